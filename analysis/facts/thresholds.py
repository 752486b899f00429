"""The thresholds of the facts, with their reasons; those of a drop are in fall.py."""

from __future__ import annotations

AHEAD = 3.0
"""Number of steps before the onset interval of a drop in which its cause may lie."""
AT_ONCE = 0.35
"""Minimum share of the settled mismatch at the first step for it to count as present from the start; one update causes less."""
GROWTH = 1.6
"""Minimum growth from the first half of a run to its last quarter for the mismatch to count as growing."""

STALE_LEFT = 0.2
"""Maximum share of the mismatch that remains relative to the trainer's logprobs of an earlier step, for the engine to have had those
weights; rounding and nearly correct distances leave less."""
STALE_REACHES = 20
"""Minimum distance, in steps, that must be compared to rule out stale weights; larger lags are usually declared."""
EARLIER_AGREES = 0.5
"""Minimum share of the engine's logprobs of openings that equal the trainer's at one earlier step, or one distance, for the engine to
have had those weights; at most 0.14 in 57 collapses caused by the mismatch."""
EARLIER_FEWEST = 8
"""Minimum number of openings that match an earlier trainer step before it is reported."""
EARLIER_OVER_CHANCE = 5.0
"""Minimum ratio of EARLIER_FEWEST's count to the number expected by chance; at most 2.3 in collapses caused by the mismatch."""
NONE_LEFT = 0.1
"""Maximum share of unexplained rows, among those not matched by chance, if many rows match by chance."""
STILL = 0.5
"""Minimum share of openings repeated within three steps that get bitwise the same logprob for the engine to have kept its weights; an
engine that gets new weights every other step reaches half."""
STILL_BY_CHANCE = 0.1
"""Maximum share of these with bitwise the same trainer logprob, for the trainer's weights to count as changing."""
STALE_CARRIES = 0.2
"""Minimum mean |d| of openings, as a share of the run's, for them to represent the mismatch."""

DROPS = 0.6
"""Minimum share of the whole drop of the reward between two steps for it to count as abrupt."""
SAME_POLICY = 3.0
"""Maximum change of entropy, length and likelihood, in standard deviations, for the policy to count as unchanged."""
OTHER_POLICY = 5.0
"""Minimum change, in standard deviations, for the policy to count as changed."""

MATERIAL_REWARD = 0.05
"""Minimum difference of two rewards of one response, in standard deviations of all rewards; KL terms in the reward cause smaller ones."""
UNEQUAL_SHIFTED = 0.35
"""Maximum ratio of the unequal share after moving rewards back to their rows to that before."""
SAME_REWARDS = 0.15
"""Maximum distance of two equal reward distributions: Kolmogorov-Smirnov (0 to 1), or of their means in standard deviations."""
SAME_REWARDS_SD = 2.5
"""Maximum difference of the means over their steps, in standard errors."""
MOST = 0.5
"""Minimum share of responses that get another value for it to count as changed without a drop."""
REFERENCE_MOVES = 0.05
"""Minimum difference of a response's mean logprob, in nats, for the reference model to have changed; bf16 kernels cause 0.01."""
SAME_ORDER = 0.95
"""Minimum correlation of the rewards of equal responses before and after, for only their scale to have changed."""
GRADED_ELSEWHERE = 0.9
"""Minimum share of responses with the reward they earned under another prompt for that prompt to have graded them."""
GRADED_BY_CHANCE = 0.6
"""Maximum share expected by chance."""
LACKING = 10.0
"""Minimum number of earlier rewards expected to be missing by chance, to test whether rewards were reordered."""
LACKING_OF_PERMUTED = 0.1
"""Maximum share of that number missing in reordered steps, as from verifier timeouts."""
LENGTH_PAYS = 0.5
"""Correlation of length and reward within groups above which the reward depends on length; at most 0.5 in correct tasks."""
LENGTH_EXPLAINS = 0.8
"""Correlation with length above which length explains reward differences."""
LENGTH_IS_ALL = 0.98
"""The same if only some rewards differ."""
LENGTH_EXPLAINS_WITHIN = 0.85
"""The same within steps, or for a bonus that grows steadily."""
ALMOST_ALL = 0.9
"""Minimum share of changed rewards when a reward starts to depend on length."""
MOVES_SD = 6.0
"""Minimum change at a step, in standard deviations of the steps before."""
MOVES_ON = 0.6
"""Minimum share of this change that two of the next three steps keep."""
BREAKS_SD = 4.0
"""Minimum abrupt drop of a correlation to count as lost, in standard deviations of the steps before."""
BREAKABLE = 0.2
"""Minimum correlation before it is lost."""
BREAK_LOSES = 0.5
"""Minimum share of the correlation that is lost for good."""
MATERIAL_REST = 0.1
"""Minimum share of the variance of reward differences within responses of equal reward, to test length there."""
OTHER_ROWS = 0.4
"""Minimum share of differing logprobs that belong to another row for rows to count as reordered; rows of another length are cut or
padded."""
