"""Thresholds for facts, with the reason for each. Those for detecting a drop are in series.py."""

from __future__ import annotations

AHEAD = 3.0
"""The search for the cause of a drop begins this many steps before the interval of its onset."""
AT_ONCE = 0.35
"""The mismatch was present from the start if it begins with at least this fraction of its settled size. A mismatch that
a single update causes is smaller."""
GROWTH = 1.6
"""The mismatch grows if, in the last quarter of the run, it is at least this many times its settled size."""

EARLIER_AGREES = 0.5
"""The engine is taken to have earlier weights if at least this fraction of prefixes matches the trainer at one step, or
a constant number of steps back. In 57 collapses due to the mismatch, the fraction was at most 0.14."""
EARLIER_FEWEST = 8
"""Minimum number of matching prefixes to report that the engine has weights from several earlier steps."""
EARLIER_OVER_CHANCE = 5.0
"""Minimum number of matching prefixes, as a multiple of the number expected by chance, to report the same. In runs with
other causes, the factor is at most 2.3."""
STILL = 0.5
"""The engine's weights are taken to be unchanged if at least this fraction of repeated prefixes has bitwise identical
engine logprobs. With new weights at every other step, half of the prefixes do."""
STILL_BY_CHANCE = 0.1
"""The trainer's weights change if at most this fraction of repeated prefixes has bitwise identical trainer logprobs."""

MATERIAL_REWARD = 0.05
"""Smallest difference between two rewards for the same response that is treated as real, in standard deviations of all
rewards. KL terms in the reward cause smaller ones."""
UNEQUAL_SHIFTED = 0.35
"""Rewards are in the wrong rows if undoing a shift of rows leaves at most this fraction of the unequal pairs."""
SAME_REWARDS = 0.15
"""Maximum Kolmogorov-Smirnov distance, or difference of means in standard deviations, between two distributions of
rewards that are treated as the same."""
SAME_REWARDS_SD = 2.5
"""Rewards are also treated as equally distributed if their means differ by at most this many standard errors."""
MOST = 0.5
"""Without a drop, a value is considered changed if it differs for at least this fraction of repeated responses."""
REFERENCE_MOVES = 0.05
"""Change of the reference model's mean logprob of a response, in nats, above which the model itself must have changed.
Different bf16 kernels cause changes of 0.01."""
SAME_ORDER = 0.95
"""Above this correlation between old and new rewards of identical responses, only the scale of the rewards changed."""
LENGTH_PAYS = 0.5
"""Minimum correlation within groups for the reward to depend on length. Correct rewards have a lower one."""
LENGTH_EXPLAINS = 0.8
"""Length explains reward differences above this correlation."""
LENGTH_IS_ALL = 0.98
"""Same as LENGTH_EXPLAINS, if only some rewards differ."""
LENGTH_EXPLAINS_WITHIN = 0.85
"""Same as LENGTH_EXPLAINS, within steps or for a bonus that grows steadily."""
ALMOST_ALL = 0.9
"""If the reward starts to depend on length, at least this fraction of the rewards changes."""
MOVES_SD = 6.0
"""A series moves at a step if it differs from the earlier steps by this many of their standard deviations."""
MOVES_ON = 0.6
"""A move lasts if two of the next three steps are still beyond this fraction of MOVES_SD."""
BREAKS_SD = 4.0
"""A correlation is lost if it drops abruptly by this many standard deviations of the earlier steps."""
BREAKABLE = 0.2
"""A correlation weaker than this is not tested, because it is too weak to be lost."""
BREAK_LOSES = 0.5
"""A correlation is lost only if it remains lower by at least this fraction."""
MATERIAL_REST = 0.1
"""Responses with equal rewards are tested separately if the variance of reward differences among them is at least this
fraction of the total."""
