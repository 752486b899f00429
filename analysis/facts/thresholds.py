"""Thresholds for facts. Those for detecting a drop are in series.py."""

from __future__ import annotations

AHEAD = 3.0
"""Search for causes from this many steps before the drop's onset interval."""
AT_ONCE = 0.35
"""The mismatch was there from the start if the first step shows this fraction of its settled size."""
GROWTH = 1.6
"""The mismatch grows if its last quarter is at least this many times its settled size."""

EARLIER_AGREES = 0.5
"""The engine has earlier weights if this fraction of prefixes matches the trainer at one step or one lag. In 57
collapses caused by the mismatch, the fraction was at most 0.14."""
EARLIER_FEWEST = 8
"""Minimum matching prefixes to report that the engine has weights from several earlier steps."""
EARLIER_OVER_CHANCE = 5.0
"""Minimum ratio to chance matches for the same report. Other collapses reach 2.3."""
STILL = 0.5
"""The engine keeps its weights if this fraction of repeated prefixes gets bitwise identical engine logprobs. With new
weights at every other step, half do."""
STILL_BY_CHANCE = 0.1
"""The trainer's weights change if at most this fraction of repeated prefixes keeps bitwise identical logprobs."""

MATERIAL_REWARD = 0.05
"""Minimum real difference between two rewards for the same response, relative to the standard deviation over all
rewards. KL terms in the reward cause smaller ones."""
UNEQUAL_SHIFTED = 0.35
"""Rewards are in the wrong rows if undoing a shift leaves at most this fraction of unequal pairs."""
SAME_REWARDS = 0.15
"""Two reward distributions match up to this Kolmogorov-Smirnov distance, or mean difference in standard deviations."""
SAME_REWARDS_SD = 2.5
"""They also match if their means differ by at most this many standard errors."""
MOST = 0.5
"""Without a drop, a value changed if at least this fraction of repeated responses gets a different one."""
REFERENCE_MOVES = 0.05
"""Minimum change (nats) in a response's mean logprob under a changed reference model. bf16 kernels cause 0.01."""
SAME_ORDER = 0.95
"""Above this correlation between old and new rewards for identical responses, only the scale changed."""
LENGTH_PAYS = 0.5
"""The reward depends on length above this correlation within groups. Correct rewards stay lower."""
LENGTH_EXPLAINS = 0.8
"""Length explains reward differences above this correlation."""
LENGTH_IS_ALL = 0.98
"""Same as LENGTH_EXPLAINS, if only some rewards differ."""
LENGTH_EXPLAINS_WITHIN = 0.85
"""Same as LENGTH_EXPLAINS, within steps or for a bonus that grows steadily."""
ALMOST_ALL = 0.9
"""Minimum fraction of rewards that change if the reward starts to depend on length."""
MOVES_SD = 6.0
"""A series moves if it leaves the earlier level by this many times the earlier standard deviation."""
MOVES_ON = 0.6
"""A move lasts if two of the next three steps exceed MOVES_SD times this factor."""
BREAKS_SD = 4.0
"""A correlation is lost if it drops abruptly by this many times the earlier standard deviation."""
BREAKABLE = 0.2
"""Weaker correlations are not tested for a loss."""
BREAK_LOSES = 0.5
"""A lost correlation stays lower by at least this fraction."""
MATERIAL_REST = 0.1
"""Minimum variance share at which reward differences between responses with equal rewards are tested separately."""
