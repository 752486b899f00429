"""Convert the points of suspects into probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .suspect import Suspect
from .thresholds import WORTH


def ranked(suspects: Sequence[Suspect], worth: float = WORTH) -> tuple[Suspect, ...]:
    """Return suspects with probabilities that sum to 1, most probable first; `worth` converts points to log odds."""
    highest = max(suspect.points for suspect in suspects)
    odds = [math.exp(worth * (suspect.points - highest)) for suspect in suspects]
    total = sum(odds)
    judged = [replace(suspect, probability=each / total) for suspect, each in zip(suspects, odds, strict=True)]
    return tuple(sorted(judged, key=lambda suspect: -suspect.probability))


def kind_of(suspect: str, code: str) -> str:
    """Return the key in FACTORS for a suspect's evidence code; a changed setting has one key for all suspects."""
    return code if code == SET else f"{suspect}.{code}"


def weighed(suspect: Suspect) -> Suspect:
    """Return a suspect with the points for each piece of evidence multiplied by its factor in FACTORS."""
    factors = [FACTORS.get(kind_of(suspect.code, evidence.code), 1.0) for evidence in suspect.evidence]
    evidence = [
        replace(each, points=factor * each.points) for each, factor in zip(suspect.evidence, factors, strict=True)
    ]
    return replace(suspect, evidence=tuple(evidence))


SET = "setting_changed"
"""Evidence code with one factor for all suspects, because too few collapses have it for each suspect alone."""

FACTORS: dict[str, float] = {
    "advantages.advantages_changed": 1.9,
    "advantages.advantages_one_sided": 1.4,
    "advantages.advantages_steady": 1.7,
    "advantages.advantages_turn": 1.6,
    "data.prompts_changed": 1.8,
    "entropy.entropy_climbs": 1.1,
    "entropy.entropy_explodes": 1.2,
    "entropy.entropy_in_range": 1.1,
    "entropy.entropy_lost": 0.9,
    "entropy.loss_follows_entropy": 0.8,
    "entropy.loss_moves_down": 0.9,
    "entropy.loss_moves_up": 1.4,
    "length.length_changes": 0.8,
    "length.length_changes_after_fall": 1.1,
    "length.length_explains_rewards": 1.4,
    "length.length_pays": 0.3,
    "length.length_pays_since": 1.4,
    "length.length_steady": 1.6,
    "mismatch.check_fails": 0.9,
    "mismatch.check_passes": 0.7,
    "mismatch.engine_disagrees": 1.2,
    "mismatch.exact_until": 1.1,
    "mismatch.explained_by_declared_lag": 1.4,
    "mismatch.explained_by_earlier_weights": 1.3,
    "mismatch.explained_by_still_engine": 1.2,
    "mismatch.mismatch_grows_before_fall": 0.8,
    "mismatch.mismatch_grows_by_updates": 1.7,
    "mismatch.mismatch_grows_with_fall": 1.3,
    "mismatch.mismatch_small": 1.2,
    "optimizer.grad_norm_grows_before_fall": 0.7,
    "optimizer.gradient_moves_first": 0.9,
    "optimizer.learning_rate_spike_at_fall": 1.8,
    "optimizer.policy_moves_at_once": 0.4,
    "optimizer.reward_drops_with_policy": 1.8,
    "optimizer.update_leaps": 1.2,
    "optimizer.update_moves_first": 0.8,
    "optimizer.update_size": 1.5,
    "pairing.advantages_do_not_follow": 1.4,
    "pairing.relation_breaks_alone": 1.3,
    "pairing.rewards_in_other_rows": 1.4,
    "pairing.rewards_in_their_rows": 1.5,
    "reference.gradient_moves_first": 1.1,
    "reference.loss_moves_up": 0.7,
    "reference.no_reference": 1.8,
    "reference.reference_changed": 1.4,
    "reference.reference_jumps": 0.3,
    "reward.likelier_earn_less": 0.3,
    "reward.likelier_earn_more": 0.5,
    "reward.likelier_earn_no_more": 0.6,
    "reward.relation_breaks_alone": 0.8,
    "reward.reward_and_relation_move": 1.2,
    "reward.reward_drops_without_policy": 0.7,
    "reward.reward_falls_too": 1.3,
    "reward.reward_hides_fall": 1.7,
    "reward.reward_moves_alone": 0.6,
    "reward.rewards_changed": 0.5,
    "reward.rewards_deterministic": 1.4,
    "reward.rewards_disagree_in_step": 0.6,
    "reward.rewards_noisy": 0.0,
    "reward.rewards_of_other_rule": 0.8,
    "setting_changed": 2.4,
    "staleness.declared_fresh": 0.7,
    "staleness.declared_lag_grows": 2.0,
    "staleness.earlier_weights_at_distance": 1.4,
    "staleness.engine_moves_on": 0.9,
    "staleness.engine_stands_still": 1.4,
    "staleness.stale_weights_excluded": 1.2,
    "truncation.responses_cut": 1.9,
    "truncation.responses_not_cut": 2.3,
    "unknown.policy_moves_at_once": 2.1,
}
"""Key SUSPECT.CODE -> factor applied to the points of the evidence; 1 if missing. `benchmarks/laboratories/left_out.py
--factors` fitted them, together with the priors (thresholds._PRIORS), to minimise log loss on the collapses of eleven
benchmark suites, for evidence that occurs in at least 8 collapses of 3 suites."""
