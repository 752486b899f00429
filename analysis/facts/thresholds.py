"""Thresholds for facts. Those for detecting a drop are in series.py."""

from __future__ import annotations

AHEAD = 3.0
"""Search for causes from this many steps before the drop's onset interval."""
AT_ONCE = 0.35
"""The mismatch exists from the start if it exceeds this fraction of its later size at the first step."""
GROWTH = 1.6
"""The mismatch grows if its median in the last quarter is this many times its median between 10% and 50% of the run."""

EARLIER_AGREES = 0.5
"""Minimum fraction of the engine's prefix logprobs that match the trainer's at one earlier step, or at a fixed number
of steps back, for concluding that the engine uses those weights. In 57 collapses caused by the mismatch, the
fraction was at most 0.14."""
EARLIER_FEWEST = 8
"""Minimum matching prefixes to report that the engine has weights from several earlier steps."""
EARLIER_OVER_CHANCE = 5.0
"""Minimum ratio of these matches to chance matches. In other collapses, it reaches 2.3."""
STILL = 0.5
"""The engine is not receiving new weights if this fraction of repeated prefixes gets bitwise identical engine logprobs.
If it receives them every second step, half do."""
STILL_BY_CHANCE = 0.1
"""The trainer's weights change if at most this fraction of repeated prefixes gets identical trainer logprobs."""

MATERIAL_REWARD = 0.05
"""Minimum difference between two rewards for the same response, relative to the standard deviation over all rewards. KL
terms in the reward cause smaller differences."""
UNEQUAL_SHIFTED = 0.35
"""Rewards are in the wrong rows if reordering them leaves less than this fraction of the unequal pairs."""
SAME_REWARDS = 0.15
"""Reward distributions are equal up to this Kolmogorov-Smirnov distance and difference in means (in sd)."""
SAME_REWARDS_SD = 2.5
"""Their means may also differ by this many standard errors, if that is more."""
MOST = 0.5
"""A reward or reference model has changed if this fraction of repeated responses gets a different value."""
REFERENCE_MOVES = 0.05
"""Minimum change in a response's mean reference logprob (nats). bf16 kernels alone cause 0.01."""
SAME_ORDER = 0.95
"""If old and new rewards for identical responses correlate more than this, only the scale has changed."""
LENGTH_PAYS = 0.5
"""Minimum correlation within groups for a reward to depend on length. Correct rewards stay below it."""
LENGTH_EXPLAINS = 0.8
"""Length explains reward differences if the two correlate more than this."""
LENGTH_IS_ALL = 0.98
"""Replaces LENGTH_EXPLAINS if only some rewards differ."""
LENGTH_EXPLAINS_WITHIN = 0.85
"""Replaces LENGTH_EXPLAINS for correlations within steps, and for a length bonus that grows over time."""
ALMOST_ALL = 0.9
"""Minimum fraction of changed rewards if the reward starts to depend on length."""
MOVES_SD = 6.0
"""A series has moved if it differs from its earlier level by this many standard deviations."""
MOVES_ON = 0.6
"""A move lasts if two of the next three steps differ by at least this fraction of MOVES_SD."""
BREAKS_SD = 4.0
"""A correlation is lost if it drops by this many standard deviations."""
BREAKABLE = 0.2
"""Correlations below this cannot count as lost."""
BREAK_LOSES = 0.5
"""A correlation counts as lost if it stays lower by at least this fraction."""
MATERIAL_REST = 0.1
"""Minimum share of variance for testing differences among responses with equal baseline rewards separately."""
