"""Thresholds for facts, with the reason for each; those for detecting a drop are in series.py."""

from __future__ import annotations

AHEAD = 3.0
"""The cause of a drop is searched for from this many steps before the onset interval."""
AT_ONCE = 0.35
"""A mismatch was there from the start if its first step has at least this fraction of its settled size; one update
causes less."""
GROWTH = 1.6
"""The mismatch grows if it is at least this many times its settled size in the last quarter of the run."""

EARLIER_AGREES = 0.5
"""The engine has earlier weights if its logprobs of at least this fraction of prefixes equal the trainer's from one
earlier step, or from a fixed number of steps back. The fraction was at most 0.14 in 57 collapses due to the
mismatch."""
EARLIER_FEWEST = 8
"""Prefixes that must match if the engine has weights from several earlier steps."""
EARLIER_OVER_CHANCE = 5.0
"""The engine has weights from several earlier steps if this many times more prefixes match than by chance; collapses
caused by the mismatch reach 2.3."""
STILL = 0.5
"""The engine keeps its weights if at least this fraction of the prefixes repeated within a few steps have bitwise
identical engine logprobs; with new weights at every other step, one half of them do."""
STILL_BY_CHANCE = 0.1
"""The trainer's weights change if at most this fraction of repeated prefixes have bitwise identical trainer
logprobs."""


MATERIAL_REWARD = 0.05
"""Smallest difference between two rewards for the same response that is treated as real, in standard deviations of all
rewards. KL terms in the reward cause smaller ones."""
UNEQUAL_SHIFTED = 0.35
"""Rewards are in the wrong rows if undoing a row shift leaves at most this fraction of the unequal pairs."""
SAME_REWARDS = 0.15
"""Distance up to which two reward distributions are the same: Kolmogorov-Smirnov (0 to 1), or between the means in
standard deviations."""
SAME_REWARDS_SD = 2.5
"""Difference between the mean rewards before and after a step, in standard errors, up to which the distributions are
the same."""
MOST = 0.5
"""Without a drop, a value changed if at least this fraction of repeated responses get a different one."""
REFERENCE_MOVES = 0.05
"""Change in the reference model's mean logprob of a response, in nats, above which the model changed; bf16 kernels
cause 0.01."""
SAME_ORDER = 0.95
"""Correlation between old and new rewards of identical responses above which only their scale changed."""
LENGTH_PAYS = 0.5
"""Correlation within groups above which the reward depends on length; correct tasks stay below it."""
LENGTH_EXPLAINS = 0.8
"""Correlation of length with reward differences above which it explains them."""
LENGTH_IS_ALL = 0.98
"""Same as LENGTH_EXPLAINS, if only some rewards differ."""
LENGTH_EXPLAINS_WITHIN = 0.85
"""Same as LENGTH_EXPLAINS, within steps or for a bonus that grows steadily."""
ALMOST_ALL = 0.9
"""At least this fraction of rewards change if the reward starts to depend on length."""
MOVES_SD = 6.0
"""A series moves at a step if it leaves the level of the earlier steps by this many of their standard deviations."""
MOVES_ON = 0.6
"""A move lasts if two of the next three steps are still beyond this fraction of MOVES_SD."""
BREAKS_SD = 4.0
"""A correlation is lost if it drops abruptly by this many standard deviations of the earlier steps."""
BREAKABLE = 0.2
"""Weaker correlations are not tested for a loss."""
BREAK_LOSES = 0.5
"""A lost correlation stays lower by at least this fraction."""
MATERIAL_REST = 0.1
"""Responses with equal rewards are tested separately if they account for at least this fraction of the variance of
reward differences."""
