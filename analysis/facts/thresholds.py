"""The thresholds for facts, with the reason for each value; those for detecting a drop are in series.py."""

from __future__ import annotations

AHEAD = 3.0
"""Number of steps before the onset interval of a drop that are searched for its cause."""
AT_ONCE = 0.35
"""A mismatch exists from the start if it has at least this share of its settled size at the first step; one update causes
less."""
GROWTH = 1.6
"""The mismatch grows if, in the last quarter of the run, it is at least this many times its settled size."""

EARLIER_AGREES = 0.5
"""The engine had earlier weights if, for at least this share of prefixes, its logprob equals the trainer's logprob from
one earlier step (or from a fixed number of steps back). The share was at most 0.14 in 57 collapses due to the
mismatch."""
EARLIER_FEWEST = 8
"""The engine had weights of several earlier steps only if at least this many prefixes match one of them."""
EARLIER_OVER_CHANCE = 5.0
"""The engine had weights of several earlier steps only if at least this many times as many prefixes match as chance
explains; the factor is at most 2.3 in collapses caused by the mismatch."""
STILL = 0.5
"""The engine kept its weights if it gives at least this share of the prefixes repeated within a few steps bitwise
identical logprobs; with new weights at every other step, the share is one half."""
STILL_BY_CHANCE = 0.1
"""The trainer's weights changed if it gives at most this share of repeated prefixes bitwise identical logprobs."""


MATERIAL_REWARD = 0.05
"""Two rewards of a response differ if they are at least this far apart, in standard deviations of all rewards; KL terms
in the reward cause smaller differences."""
UNEQUAL_SHIFTED = 0.35
"""Rewards were in the wrong rows if undoing a row shift leaves at most this share of the repeated responses that had
different rewards."""
SAME_REWARDS = 0.15
"""Two reward distributions are equal if their distance is at most this: the Kolmogorov-Smirnov distance (0 to 1), or
the difference of the means in standard deviations."""
SAME_REWARDS_SD = 2.5
"""Rewards before and after a step are equally distributed if their means differ by at most this, in standard errors."""
MOST = 0.5
"""In a run without a drop, a value has changed if at least this share of repeated responses gets a different one."""
REFERENCE_MOVES = 0.05
"""The reference model has changed if its mean logprob of a response changes by more than this, in nats; bf16 kernels
cause 0.01."""
SAME_ORDER = 0.95
"""Only the scale of rewards has changed if the old and new rewards of identical responses correlate more than this."""
LENGTH_PAYS = 0.5
"""The reward depends on length if the two correlate more than this within groups; in correct tasks they do not."""
LENGTH_EXPLAINS = 0.8
"""Length explains reward differences if it correlates with them more than this."""
LENGTH_IS_ALL = 0.98
"""If only some rewards differ, length explains the differences if it correlates with them more than this."""
LENGTH_EXPLAINS_WITHIN = 0.85
"""Within steps, or for a bonus that grows steadily, length explains reward differences if it correlates with them more
than this."""
ALMOST_ALL = 0.9
"""If a reward starts to depend on length, it changes for at least this share of the responses."""
MOVES_SD = 6.0
"""A series changes at a step if it moves by at least this many standard deviations of the earlier steps."""
MOVES_ON = 0.6
"""A change lasts if at least this share of it persists in two of the next three steps."""
BREAKS_SD = 4.0
"""A correlation is lost only if it drops abruptly by at least this many standard deviations of the earlier steps."""
BREAKABLE = 0.2
"""The loss of a correlation is tested only if its earlier value is at least this."""
BREAK_LOSES = 0.5
"""A correlation is lost only if it decreases permanently by at least this share."""
MATERIAL_REST = 0.1
"""Responses with equal rewards are tested separately if they account for at least this share of the variance of reward
differences."""
