"""Find the first difference between a run and its baseline.

Both runs are identical up to that point, so the first difference must have caused all later ones. Within a step, data
are compared in causal order: prompts, sampled responses, rewards, reference, advantages, updated weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from ...schemas.passes import REFERENCE
from ..facts import thresholds as t
from ..facts.relations import explained_by_length, pays_length_otherwise
from ..facts.rollouts import Rollouts
from ..facts.two_runs import row_differences, shared_tokens
from ..statement import Measured
from .run_facts import Facts

SAMPLING, ENGINE, SCORING, UPDATE = "sampling_parts", "engine_parts", "scoring_parts", "update_parts"
_ROUNDING = 1e-9
"""Maximum difference between mean logprobs (nats) that can result from summation order alone."""
_EXACT = 5
"""After this many bitwise identical steps, even the smallest difference counts as real."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    code: str
    step: int
    """First step where the runs differ. If their weights differ, the step whose update made them differ."""
    num_before: int
    is_sudden: bool = True
    """True if the weights were bitwise identical before `step`, False if rounding had already made them drift apart."""
    values: dict[str, Measured] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Step:
    """Pairs of one step, [K]."""

    a: Rollouts
    b: Rollouts
    equal: np.ndarray
    rewards: np.ndarray
    advantages: np.ndarray

    def apart(self, column: str) -> float:
        apart = np.abs(getattr(self.a, column) - getattr(self.b, column))[self.equal]
        known = apart[np.isfinite(apart)]
        return float(known.mean()) if len(known) else 0.0


def first_divergence(facts: Facts, control: Facts) -> Divergence | None:
    a, b = facts.rollouts, control.rollouts
    found = row_differences(a, b)
    pairs, before, num_exact = found.pairs, 0.0, 0
    for number, (step, share) in enumerate(zip(found.steps_S.tolist(), found.share_S, strict=True)):
        rows = slice(*np.searchsorted(found.step_K, [step, step + 1]))
        beside = _Step(
            a.ordered(pairs.a[rows]), b.ordered(pairs.b[rows]), pairs.equal[rows], found.rewards_K[rows],
            found.advantages_K[rows],
        )  # fmt: skip
        num_shared, least = len(beside.equal), _ROUNDING if num_exact >= _EXACT else t.WEIGHTS_DIFFER
        is_shared = share == 1 or num_shared >= t.FEWEST_SHARED
        code, values = _first(facts, control, beside, step, least) if is_shared else ("", {})
        # Different prompts can explain a difference in sampling, tools or advantages. If the runs share few prompts,
        # different prompts can explain any difference except one in the weights.
        if share < 1 and (
            code in ("", SAMPLING, "tool_parts", "advantages_part") or (share < t.MANY_SHARED and code != UPDATE)
        ):
            code, values = "prompts_part", {"num_sequences": len(b.at_step(step).step), "num_equal": num_shared}
        if code:
            at = int(found.steps_S[number - 1]) if code == UPDATE and number else step
            return Divergence(code=code, step=at, num_before=number, is_sudden=before < _ROUNDING, values=values)
        before = beside.apart("likelihood")
        num_exact = num_exact + 1 if max(before, beside.apart("sampled")) < _ROUNDING else 0
    return None


def _first(facts: Facts, control: Facts, beside: _Step, step: int, least: float) -> tuple[str, dict[str, Measured]]:
    equal = beside.equal
    sampled, trained = beside.apart("sampled"), beside.apart("likelihood")
    referred = beside.apart("reference")
    tokens = None
    if not equal.all():
        passes = [facts.pair[1], facts.pair[0], REFERENCE]
        tokens = shared_tokens(facts.database, control.database, step, passes)
        sampled, trained, referred = (
            max(of_equal, tokens.apart.get(name, 0.0))
            for of_equal, name in zip((sampled, trained, referred), passes, strict=True)
        )
    engine_parts, trainer_parts = sampled > least, trained > least
    values: dict[str, Measured] = {"num_sequences": len(equal), "num_equal": int(equal.sum())}
    if tokens is not None and not tokens.apart and not equal.any():
        # All responses differ at their first token, so no shared token can be compared. If the mismatch is much
        # larger than the baseline's, suspect the engine alone, otherwise the trainer, too.
        apart = _apart_at(facts, step)
        engine_parts, trainer_parts = True, not apart > t.MISMATCH_DIFFERS * _apart_at(control, step)
        trained = sampled = math.nan
    if engine_parts and trainer_parts and not equal.all() and trained <= t.WEIGHTS_DIFFER < sampled:
        trainer_parts = False  # different responses change the shape of the batch and hence the trainer's rounding
    if engine_parts and trainer_parts:
        return UPDATE, values | {"apart": trained}
    if trainer_parts:
        is_behind = bool(np.nanmax(np.abs(facts.values("version_lag")), initial=0.0) >= 1)
        # An update can change the trainer alone: the engine may lag behind, or its precision may be too low to show a
        # small change.
        is_update = is_behind or trained < t.MATERIAL_MISMATCH
        return (UPDATE if is_update else SCORING), values | {"apart": trained}
    if engine_parts:
        return ENGINE, values | {"apart": sampled}
    if not equal.all():
        assert tokens is not None
        num_other = int((~equal).sum())
        if tokens.num_cut >= t.MOSTLY_CUT * num_other:
            return "responses_cut_off", values
        return ("tool_parts" if tokens.num_in_tool * 2 > num_other else SAMPLING), values
    return _of_rewards(facts, control, beside, step, values) or _of_the_rest(beside, referred, values)


def _apart_at(facts: Facts, step: int) -> float:
    return max(facts.at("mean_abs_d", step), t.MATERIAL_MISMATCH)


def _of_rewards(
    facts: Facts, control: Facts, beside: _Step, step: int, values: dict[str, Measured]
) -> tuple[str, dict[str, Measured]] | None:
    a, b, differs = beside.a, beside.b, beside.rewards
    if not differs.any():
        return None
    values = values | {"share": float(differs.mean())}
    if np.isnan((a.reward - b.reward)[differs]).any():
        return "rewards_part", values
    earlier = control.rollouts.until(step - 1)
    last = earlier.at_step(int(earlier.step[-1])).reward if len(earlier.step) else np.empty(0)
    if len(last) == len(a.reward) and np.ptp(last) > 0 and np.allclose(a.reward, last, equal_nan=True):
        return "rewards_of_last_step_part", values
    is_inverted = np.allclose(a.reward, np.nanmax(b.reward) + np.nanmin(b.reward) - b.reward, equal_nan=True)
    if np.allclose(np.sort(a.reward), np.sort(b.reward), equal_nan=True) and not is_inverted and _are_mixed(b, differs):
        return "rewards_permuted_part", values
    since = facts.rollouts.since(step)
    explained, direction = explained_by_length(since, control.rollouts)
    by_length = math.copysign(math.sqrt(explained), direction) if explained >= t.LENGTH_EXPLAINS and direction else 0.0
    if not by_length and differs.mean() >= t.LENGTH_SHARE:
        by_length = pays_length_otherwise(since, control.rollouts)
    return ("rewards_by_length_part", values | {"correlation": by_length}) if by_length else ("rewards_part", values)


def _are_mixed(b: Rollouts, differs: np.ndarray) -> bool:
    groups = (b.reward[b.group == group] for group in np.unique(b.group))
    counts = (np.unique(rewards, return_counts=True)[1] for rewards in groups)
    by_chance = [1 - float(((count / count.sum()) ** 2).sum()) for count in counts]
    return float(differs.mean()) >= t.MIXED * float(np.mean(by_chance))


def _of_the_rest(beside: _Step, referred: float, values: dict[str, Measured]) -> tuple[str, dict[str, Measured]]:
    a, b = beside.a, beside.b
    if referred > t.WEIGHTS_DIFFER:
        return "reference_parts", values | {"apart": referred}
    if not beside.advantages.any():
        return "", {}
    if np.allclose(np.abs(a.advantage), np.abs(b.advantage), equal_nan=True):  # some or all signs are flipped
        return "advantages_part", values
    if np.allclose(np.sort(a.first_advantage), np.sort(b.first_advantage), equal_nan=True):
        return "advantages_permuted_part", values
    return ("advantages_part" if np.isfinite(a.reward).any() else "advantages_or_rewards_part"), values
