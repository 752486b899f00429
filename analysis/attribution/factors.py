"""What a kind of evidence counts, as falls of laboratories that differ have it."""

from __future__ import annotations

FACTORS: dict[str, float] = {
    "advantages.advantages_changed": 1.3,
    "advantages.advantages_steady": 1.4,
    "data.prompts_changed": 1.8,
    "data.prompts_steady": 0.7,
    "entropy.entropy_in_range": 1.8,
    "entropy.entropy_lost": 0.6,
    "entropy.entropy_rose_before_fall": 0.5,
    "length.length_changes_after_fall": 1.2,
    "length.length_pays_since": 1.5,
    "length.length_steady": 1.6,
    "mismatch.check_fails": 0.8,
    "mismatch.check_passes": 1.1,
    "mismatch.explained_by_declared_lag": 1.1,
    "mismatch.mismatch_grows_before_fall": 0.7,
    "mismatch.mismatch_grows_with_fall": 0.9,
    "mismatch.mismatch_large": 0.8,
    "mismatch.mismatch_small": 1.5,
    "optimizer.learning_rate_spike_at_fall": 1.7,
    "optimizer.reward_drops_with_policy": 0.6,
    "optimizer.setting_changed": 1.9,
    "pairing.advantages_do_not_follow": 1.6,
    "pairing.rewards_in_other_rows": 1.5,
    "pairing.rewards_in_their_rows": 1.7,
    "reference.no_reference": 1.1,
    "reference.reference_changed": 1.8,
    "reward.likelier_earn_less": 0.7,
    "reward.likelier_earn_more": 1.6,
    "reward.likelier_earn_no_more": 1.2,
    "reward.reward_drops_without_policy": 0.0,
    "reward.reward_falls_too": 2.1,
    "reward.reward_hides_fall": 1.3,
    "reward.rewards_changed": 0.9,
    "reward.rewards_deterministic": 1.3,
    "reward.rewards_noisy": 0.9,
    "staleness.declared_fresh": 1.3,
    "staleness.declared_lag_grows": 1.4,
    "staleness.stale_weights_excluded": 1.1,
    "truncation.responses_cut": 1.7,
    "truncation.responses_not_cut": 1.7,
    "truncation.setting_changed": 1.6,
}
"""SUSPECT.CODE of evidence -> factor of its points; what is not here counts once. Set by `benchmarks/laboratories/left_out.py
--factors` on the falls of six laboratories, by least logarithmic loss, for evidence that at least 8 falls of 3 of them have. Set on
five of them with rules that had not seen the sixth, they answer 55 of its 82 falls rightly instead of 50, and 71 of 86 with a control
instead of 67."""
