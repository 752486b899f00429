"""Thresholds for deriving facts from a trace and for `attribute`. The thresholds for drops are in series.py."""

from __future__ import annotations

AHEAD = 3.0
"""The search for causes starts this many steps before the confidence interval of the drop's onset."""
EARLIER_AGREES = 0.5
"""Minimum fraction of the engine's prefix logprobs that must match the trainer's at one earlier step, or a fixed
number of steps earlier, to conclude that the engine uses those weights. In 57 collapses caused by the mismatch, the
fraction was at most 0.14."""
ROUNDED_AGREES = 0.85
"""EARLIER_AGREES for an engine that rounds differently from the trainer. If only some weights are not synchronised,
the fraction is at most 0.73."""
STILL = 0.5
"""The engine is judged not to receive new weights if at least this fraction of repeated prefixes gets bitwise identical
engine logprobs. The fraction is about half for an engine updated every second step."""
STILL_BY_CHANCE = 0.1
"""The trainer's weights count as changing if at most this fraction of repeated prefixes gets identical trainer
logprobs."""

MATERIAL_REWARD = 0.05
"""Minimum difference between rewards for the same response to count as a change, relative to the standard deviation
of all rewards. KL terms in the reward cause differences below this minimum."""
UNEQUAL_SHIFTED = 0.35
"""Rewards are judged to be in the wrong rows if, after reordering, less than this fraction of the unequal pairs are still unequal."""
SAME_REWARDS = 0.15
"""Reward distributions count as equal if their Kolmogorov-Smirnov distance is at most this, and their means differ by
at most this many standard deviations of the reward."""
SAME_REWARDS_SD = 2.5
"""Reward means also count as equal if they differ by at most this many standard errors."""
MOST = 0.5
"""A reward or reference model counts as changed if at least this fraction of repeated responses gets a new value."""
REFERENCE_MOVES = 0.05
"""Minimum change in a response's mean reference logprob (nats). bf16 kernels alone cause changes of 0.01."""
LENGTH_PAYS = 0.5
"""A reward is flagged as length-dependent if its within-group correlation with length exceeds this."""
LENGTH_EXPLAINS = 0.8
"""Reward differences are attributed to length if their correlation with length exceeds this."""
LENGTH_IS_ALL = 0.98
"""Replaces LENGTH_EXPLAINS if only some of the rewards differ."""
ALMOST_ALL = 0.9
"""Minimum fraction of rewards that must change to conclude that the reward now depends on length."""
MOVES_SD = 6.0
"""A series has changed if it differs from its earlier level by this many standard deviations."""
MOVES_ON = 0.6
"""A change counts as lasting if at least two of the next three steps differ from the earlier level by at least this
fraction of MOVES_SD."""
BREAKS_SD = 4.0
"""Minimum drop in a correlation, in standard deviations, to report the correlation as lost."""
BREAKABLE = 0.2
"""Correlations below this are never reported as lost."""
BREAK_LOSES = 0.5
"""A correlation is reported as lost only if it permanently drops by at least this fraction of its earlier level."""
MATERIAL_REST = 0.1
"""Reward differences are also correlated with length after their mean for each baseline reward is subtracted, if at
least this share of their variance remains."""

OTHER_ENDINGS = 0.2
"""Responses count as cut off if at least this fraction of a step's responses end early on an unusual token."""
OF_NO_SCATTER = 10.0
"""An input counts as changed deliberately if it changes by at least this many standard deviations."""
BEGUN = 0.1
"""The mismatch begins once it reaches this fraction of its size at the onset of the drop."""
LAG_GROWS = 2.0
"""The engine counts as too far behind if its lag grows by this factor. Slow sequences alone cause less growth."""
LEARNED = 0.1
"""Initial fraction of the run used to estimate normal values, such as the usual lag."""
WAS_THERE = 0.5
"""Maximum share of repeated responses that change before a step, relative to the share that changes at the step."""
ADVANTAGE_FOLLOWS = 0.3
"""Advantages do not follow rewards if their correlation within a step is below this."""
ADVANTAGE_AGREES = 0.7
"""Advantages count as agreeing with rewards if their correlation within groups is at least this."""
CHANGED = 0.05
"""The verifier counts as changed only if more than this fraction of rewards changes."""
FEW_CHANGED = 10
"""Minimum number of rewards that must change for the verifier to count as changed."""
ABRUPT = 10.0
"""A mismatch counts as a jump if it grows by this factor in one step. Training alone causes slower growth."""
MISMATCH_DIFFERS = 3.0
"""Minimum ratio at which two runs' mismatches count as different. With the same engine, it reaches 1.5 by chance."""
MATERIAL_MISMATCH = 0.01
"""Below this mean |d| (nats), a mismatch is harmless. Healthy bf16 engines show 0.002 to 0.01."""
MIXED = 0.5
"""Rewards are reported as shuffled if the share of changed rewards is at least this fraction of the share that a
shuffle within groups is expected to change."""
MANY_SHARED = 0.3
"""If the runs share less than this fraction of prompts in a step, only their weights are compared."""
FEWEST_SHARED = 4
"""Minimum number of sequences with shared prompts for comparing two runs. Prompts can differ because trainers drop
groups with equal rewards."""
MOSTLY_CUT = 0.8
"""A length limit explains different responses if at least this fraction of them differ only by ending earlier."""
LENGTH_SHARE = 0.5
"""Rewards count as newly dependent on length only if at least this fraction of rewards changes."""
WEIGHTS_DIFFER = 1e-5
"""Weights count as different if a response's mean logprob differs by this much (nats). fp32 kernels differ by 1e-7."""
