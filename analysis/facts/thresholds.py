"""The thresholds of the facts, with their reasons; those of a drop are in fall.py."""

from __future__ import annotations

AHEAD = 3.0
"""Steps before the interval of a drop in which its cause may lie."""
AT_ONCE = 0.35
"""Minimum share of the settled mismatch at the first step for it to count as present from the start: one update brings less."""
GROWTH = 1.6
"""Minimum growth from the first half of a run to its last quarter for the mismatch to count as growing."""

STALE_LEFT = 0.2
"""Largest share of the mismatch left against the trainer's logprobs of an earlier step for the engine to have had those weights:
rounding leaves less, and so do distances that are nearly right."""
STALE_REACHES = 20
"""Steps that must be compared before stale weights are excluded: engines are rarely farther behind without saying so."""
EARLIER_AGREES = 0.5
"""Minimum share of the engine's logprobs of openings that equal the trainer's at one earlier step, or one distance, for the engine to
have had those weights: at most 0.14 in 57 collapses caused by the mismatch."""
EARLIER_FEWEST = 8
"""Minimum number of openings that match an earlier trainer step before it is reported."""
EARLIER_OVER_CHANCE = 5.0
"""Minimum ratio of these to the number expected by chance: at most 2.3 in collapses caused by the mismatch."""
NONE_LEFT = 0.1
"""Largest share of rows left unexplained, of those that chance does not explain, where many rows are equal by chance."""
STILL = 0.5
"""Minimum share of openings repeated within three steps that get bitwise the same logprob for the engine to have kept its weights: an
engine that gets new weights every other step has half."""
STILL_BY_CHANCE = 0.1
"""Largest share of these that may get the same bits from the trainer for its weights to be known to change."""
STALE_CARRIES = 0.2
"""Minimum mean |d| of openings, as a share of the run's, for them to represent the mismatch."""

DROPS = 0.6
"""Minimum share of its whole loss that a reward loses between two steps for it to be abrupt."""
SAME_POLICY = 3.0
"""Largest change of entropy, length and likelihood, in standard deviations, for the policy to count as unchanged."""
OTHER_POLICY = 5.0
"""Minimum change, in standard deviations, for the policy to count as changed."""

MATERIAL_REWARD = 0.05
"""Least difference of two rewards of one response, in standard deviations of all rewards: KL terms in the reward make smaller ones."""
UNEQUAL_SHIFTED = 0.35
"""Largest part of the unequal share left after moving rewards back to their rows."""
SAME_REWARDS = 0.15
"""Largest distance of two distributions of rewards that count as the same, 0 to 1; of their means in standard deviations."""
SAME_REWARDS_SD = 2.5
"""Largest difference of the means of their steps, in standard errors."""
MOST = 0.5
"""Minimum share of responses that get another value for it to count as changed without a drop."""
REFERENCE_MOVES = 0.05
"""Difference of a response's mean logprob, in nats, that a fixed reference model does not reach: bf16 kernels give 0.01."""
SAME_ORDER = 0.95
"""Minimum correlation of rewards of equal responses before and after for only the scale to have changed."""
GRADED_ELSEWHERE = 0.9
"""Minimum share of responses with the reward they earned under another prompt for that prompt to have graded them."""
GRADED_BY_CHANCE = 0.6
"""Largest share that may have it by chance."""
LACKING = 10.0
"""Minimum number of responses that would lack their earlier reward by chance, to decide whether rewards were reordered."""
LACKING_OF_PERMUTED = 0.1
"""Largest share of that number that may lack it in a reordered step: time-outs of a verifier."""
LENGTH_PAYS = 0.5
"""Correlation of length and reward within groups above which the reward pays for length; at most 0.5 in honest tasks."""
LENGTH_EXPLAINS = 0.8
"""Correlation with length above which length explains a difference of rewards."""
LENGTH_IS_ALL = 0.98
"""The same if only some responses earn something else."""
LENGTH_EXPLAINS_WITHIN = 0.85
"""The same within steps, or for a bonus that grows steadily."""
ALMOST_ALL = 0.9
"""Minimum share of responses that earn something else when a reward starts to pay for length."""
MOVES_SD = 6.0
"""Minimum change at a step, in standard deviations of the steps before."""
MOVES_ON = 0.6
"""Share of this change that two of the next three steps must keep."""
BREAKS_SD = 4.0
"""Minimum abrupt drop of a correlation, in standard deviations of the steps before, for it to be lost."""
BREAKABLE = 0.2
"""Least correlation that can be lost."""
BREAK_LOSES = 0.5
"""Minimum share of it that is lost for good."""
MATERIAL_REST = 0.1
"""Minimum share of the difference of rewards left among responses with equal rewards for length to be tested there."""
OTHER_ROWS = 0.4
"""Minimum share of differing logprobs that belong to another row for rows to have been reordered: rows of another length are cut or
filled up."""
