"""Thresholds for deriving facts from a trace. The thresholds for drops are in series.py."""

from __future__ import annotations

AHEAD = 3.0
"""Search for causes from this many steps before the drop's onset interval."""
AT_ONCE = 0.35
"""The mismatch counts as present from the start if its first value exceeds this fraction of its later size."""
GROWTH = 1.6
"""The mismatch counts as growing if its median over the last quarter of the run is more than this many times its median
between 10% and 50% of the run."""

EARLIER_AGREES = 0.5
"""Minimum fraction of the engine's prefix logprobs that match the trainer's at one earlier step, or at a fixed number
of steps back, to conclude that the engine uses those weights. In 57 collapses caused by the mismatch, the fraction
was at most 0.14."""
ROUNDED_AGREES = 0.85
"""The same for an engine that rounds. If part of the weights is not synchronised, the fraction is at most 0.73."""
EARLIER_FEWEST = 8
"""Minimum matching prefixes to report that the engine mixes weights from several earlier steps."""
EARLIER_OVER_CHANCE = 5.0
"""Minimum ratio between these matches and chance matches. It is at most 2.3 in collapses with other causes."""
STILL = 0.5
"""The engine is judged not to receive new weights if at least this fraction of repeated prefixes gets bitwise identical
engine logprobs. The fraction is about half for an engine updated every second step."""
STILL_BY_CHANCE = 0.1
"""The trainer's weights count as changing if at most this fraction of repeated prefixes gets identical trainer
logprobs."""

MATERIAL_REWARD = 0.05
"""Minimum difference between rewards for the same response to count as a change, relative to the standard deviation
over all rewards. KL terms in the reward cause smaller differences."""
UNEQUAL_SHIFTED = 0.35
"""Rewards are judged to be in the wrong rows if reordering them leaves less than this fraction of the unequal pairs."""
SAME_REWARDS = 0.15
"""Reward distributions count as equal up to this Kolmogorov-Smirnov distance and this difference in means (sd)."""
SAME_REWARDS_SD = 2.5
"""The means may also differ by this many standard errors, if that allows more."""
MOST = 0.5
"""A reward or reference model counts as changed if this fraction of repeated responses gets a different value."""
REFERENCE_MOVES = 0.05
"""Minimum change in a response's mean reference logprob (nats). bf16 kernels alone cause changes of 0.01."""
SAME_ORDER = 0.95
"""A reward change counts as a mere change in scale if old and new rewards for identical responses correlate more than
this."""
LENGTH_PAYS = 0.5
"""A reward is flagged as length-dependent if its within-group correlation with length exceeds this."""
LENGTH_EXPLAINS = 0.8
"""Reward differences are attributed to length if they correlate with it more than this."""
LENGTH_IS_ALL = 0.98
"""Replaces LENGTH_EXPLAINS if only some rewards differ."""
LENGTH_EXPLAINS_WITHIN = 0.85
"""Replaces LENGTH_EXPLAINS for correlations within steps, and for a length bonus that grows over time."""
ALMOST_ALL = 0.9
"""Minimum fraction of rewards that must change to conclude that the reward now depends on length."""
MOVES_SD = 6.0
"""A series has changed if it differs from its earlier level by this many standard deviations."""
MOVES_ON = 0.6
"""A change is lasting if at least two of the next three steps differ by this fraction of MOVES_SD."""
BREAKS_SD = 4.0
"""Minimum drop in a correlation to report it as lost (standard deviations)."""
BREAKABLE = 0.2
"""Correlations below this are never reported as lost."""
BREAK_LOSES = 0.5
"""A lost correlation must also stay lower by at least this fraction."""
MATERIAL_REST = 0.1
"""Reward differences centred by baseline reward are tested only if they keep at least this share of the variance."""
