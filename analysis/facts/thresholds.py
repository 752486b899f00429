"""The thresholds for facts, with the reason for each value; those for detecting a drop are in series.py."""

from __future__ import annotations

AHEAD = 3.0
"""Number of steps before the onset interval of a drop that are searched for its cause."""
AT_ONCE = 0.35
"""A mismatch counts as present from the start if its first step has at least this fraction of its settled size; one
update causes less."""
GROWTH = 1.6
"""The mismatch counts as growing if it is at least this many times its settled size in the last quarter of the run."""

EARLIER_AGREES = 0.5
"""The engine counts as having earlier weights if, for at least this fraction of prefixes, its logprob equals the
trainer's from one earlier step (or a fixed number of steps back). The fraction was at most 0.14 in 57 collapses due to
the mismatch."""
EARLIER_FEWEST = 8
"""Minimum number of prefixes that match one of several earlier steps if the engine had weights from these steps."""
EARLIER_OVER_CHANCE = 5.0
"""Minimum ratio of matching prefixes to those expected by chance if the engine had weights from several earlier steps;
it is at most 2.3 in collapses caused by the mismatch."""
STILL = 0.5
"""The engine counts as having kept its weights if at least this fraction of the prefixes repeated within a few steps
have bitwise identical engine logprobs; with new weights at every other step, one half of them do."""
STILL_BY_CHANCE = 0.1
"""Maximum fraction of repeated prefixes with bitwise identical trainer logprobs if the trainer's weights changed."""


MATERIAL_REWARD = 0.05
"""Minimum difference between two rewards of a response for them to count as different, in standard deviations of all
rewards; KL terms in the reward cause smaller differences."""
UNEQUAL_SHIFTED = 0.35
"""Maximum fraction of the repeated responses with different rewards that still differ once a row shift is undone, if
rewards were in the wrong rows."""
SAME_REWARDS = 0.15
"""Maximum distance between two reward distributions that count as the same: the Kolmogorov-Smirnov distance (0 to 1),
or the difference between the means in standard deviations."""
SAME_REWARDS_SD = 2.5
"""Maximum difference in mean reward before and after a step, in standard errors, for the distributions to count as the same."""
MOST = 0.5
"""Without a drop, a value counts as changed if at least this fraction of repeated responses get a different one."""
REFERENCE_MOVES = 0.05
"""Change in the reference model's mean logprob for a response, in nats, above which the model counts as changed; bf16
kernels cause 0.01."""
SAME_ORDER = 0.95
"""Correlation between the old and new rewards of identical responses above which only their scale has changed."""
LENGTH_PAYS = 0.5
"""Correlation within groups above which the reward counts as dependent on length; correct tasks stay below it."""
LENGTH_EXPLAINS = 0.8
"""Correlation of length with reward differences above which length explains them."""
LENGTH_IS_ALL = 0.98
"""Same as LENGTH_EXPLAINS, for the case that only some rewards differ."""
LENGTH_EXPLAINS_WITHIN = 0.85
"""Same as LENGTH_EXPLAINS, within steps or for a bonus that grows steadily."""
ALMOST_ALL = 0.9
"""Minimum fraction of responses whose reward changes if it starts to depend on length."""
MOVES_SD = 6.0
"""Minimum move at a step, in standard deviations of the earlier steps, for a series to count as changing there."""
MOVES_ON = 0.6
"""Fraction of a change that must persist in two of the next three steps for the change to last."""
BREAKS_SD = 4.0
"""Minimum abrupt drop in a correlation, in standard deviations of the earlier steps, for it to count as lost."""
BREAKABLE = 0.2
"""Minimum earlier value of a correlation for its loss to be tested."""
BREAK_LOSES = 0.5
"""Minimum fraction by which a correlation decreases permanently for it to count as lost."""
MATERIAL_REST = 0.1
"""Responses with equal rewards are tested separately if they account for at least this fraction of the variance of
reward differences."""
