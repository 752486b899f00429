"""The thresholds used for facts, with the reasons for each value; thresholds for a drop are in fall.py."""

from __future__ import annotations

AHEAD = 3.0
"""Number of steps before a drop's onset interval in which its cause is searched."""
AT_ONCE = 0.35
"""Minimum ratio of the mismatch at the first step to the settled mismatch, for it to count as present from the start; one update causes less."""
GROWTH = 1.6
"""Minimum ratio of the mismatch in the last quarter of a run to the settled mismatch, for it to count as growing."""

STALE_LEFT = 0.2
"""Maximum share of the mismatch that may remain when engine logprobs are compared with the trainer's from an earlier step, for the engine to
have had that step's weights. Rounding, or a distance off by one step, leaves less than this."""
STALE_REACHES = 20
"""Minimum distance, in steps, up to which earlier trainer weights must be compared to rule out stale weights; larger lags are usually
declared."""
EARLIER_AGREES = 0.5
"""Minimum share of prefixes whose engine logprob equals the trainer's at one earlier step, or at one fixed distance in steps, for the engine
to have had those weights. The share was at most 0.14 in 57 collapses caused by the mismatch."""
EARLIER_FEWEST = 8
"""Minimum number of prefixes whose engine logprobs match an earlier trainer step for that step to be reported."""
EARLIER_OVER_CHANCE = 5.0
"""Minimum ratio of prefixes that match an earlier trainer step to the number expected by chance, for the engine to have had earlier weights;
at most 2.3 in collapses caused by the mismatch."""
NONE_LEFT = 0.1
"""Maximum share of rows left unexplained, among rows that do not match by chance, for an explanation to hold where many rows match by chance."""
STILL = 0.5
"""Minimum share of prefixes, repeated within a few steps, that get bitwise identical logprobs from the engine, for the
engine to have kept its weights; an engine that gets new weights every other step reaches half."""
STILL_BY_CHANCE = 0.1
"""Maximum share of repeated prefixes that get bitwise identical logprobs from the trainer, for the trainer's weights to
count as changing.
"""
STALE_CARRIES = 0.2
"""Minimum ratio of mean |d| over prefixes to the run's mean |d|, for prefixes to represent the mismatch."""

DROPS = 0.6
"""Minimum share of the reward's whole drop that occurs between two steps, for the drop to count as abrupt."""
SAME_POLICY = 3.0
"""Maximum change in entropy, length and likelihood, in standard deviations, for the policy to count as unchanged."""
OTHER_POLICY = 5.0
"""Minimum change in entropy, length or likelihood, in standard deviations, for the policy to count as changed."""

MATERIAL_REWARD = 0.05
"""Minimum difference between two rewards for the same response to count as different, in standard deviations of all rewards; KL terms in the
reward cause smaller differences."""
UNEQUAL_SHIFTED = 0.35
"""Maximum ratio of the share of repeated responses with different rewards after undoing a row shift to the share before, for rewards to have
been in the wrong rows."""
SAME_REWARDS = 0.15
"""Maximum distance between two reward distributions that count as equal: the Kolmogorov-Smirnov distance (0 to 1), or the difference between
their means in standard deviations."""
SAME_REWARDS_SD = 2.5
"""Maximum difference between the mean rewards before and after a step, in standard errors, for the rewards to count as equally distributed."""
MOST = 0.5
"""Minimum share of repeated responses that get a different value, for the value to count as changed in a run without a drop."""
REFERENCE_MOVES = 0.05
"""Minimum difference in the reference model's mean logprob for a response, in nats, for the model to have changed; bf16 kernels cause 0.01."""
SAME_ORDER = 0.95
"""Minimum correlation between identical responses' rewards before and after a step, for only the scale of rewards to have changed."""
GRADED_ELSEWHERE = 0.9
"""Minimum share of responses whose reward equals the one they earned under another prompt, for responses to have been graded against that
prompt."""
GRADED_BY_CHANCE = 0.6
"""Maximum share of responses expected by chance to have the reward they earned under another prompt, for the match to be evidence."""
LACKING = 10.0
"""Minimum number of earlier rewards that would be missing from a step by chance, for the test of reordered rewards to be possible."""
LACKING_OF_PERMUTED = 0.1
"""Maximum ratio of missing earlier rewards to the number expected by chance, for rewards to have been reordered; verifier timeouts cause a few."""
LENGTH_PAYS = 0.5
"""Correlation between length and reward within groups above which the reward depends on length; at most 0.5 in correct tasks."""
LENGTH_EXPLAINS = 0.8
"""Correlation between reward differences and length above which length explains the differences."""
LENGTH_IS_ALL = 0.98
"""Correlation between reward differences and length above which length explains the differences if only some rewards differ."""
LENGTH_EXPLAINS_WITHIN = 0.85
"""Correlation between reward differences and length above which length explains the differences, if measured within steps or for a bonus that
grows steadily."""
ALMOST_ALL = 0.9
"""Minimum share of responses whose reward changes when a reward starts to depend on length."""
MOVES_SD = 6.0
"""Minimum change in a quantity at a step, in standard deviations over the steps before it, to count as a change."""
MOVES_ON = 0.6
"""Minimum share of a change that must persist in two of the next three steps for it to count as lasting."""
BREAKS_SD = 4.0
"""Minimum abrupt drop in a correlation for it to count as lost, in standard deviations over the steps before."""
BREAKABLE = 0.2
"""Minimum earlier value of a correlation for its loss to be tested."""
BREAK_LOSES = 0.5
"""Minimum share by which a correlation must decrease, permanently, to count as lost."""
MATERIAL_REST = 0.1
"""Minimum share of the variance of reward differences found among responses with equal rewards, to test whether length explains that part."""
OTHER_ROWS = 0.4
"""Minimum share of differing logprobs that match another row, for rows to count as reordered. Not all can match, because a row of another
length is cut or padded."""
