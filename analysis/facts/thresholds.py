"""Thresholds for facts, with the reason for each; those for detecting a drop are in series.py."""

from __future__ import annotations

AHEAD = 3.0
"""The cause of a drop is searched for from this many steps before the interval of its onset."""
AT_ONCE = 0.35
"""The mismatch was present from the start if it begins with at least this fraction of its settled size. A mismatch that
a single update causes is smaller."""
GROWTH = 1.6
"""The mismatch grows if, in the last quarter of the run, it is at least this many times its settled size."""

EARLIER_AGREES = 0.5
"""The engine has earlier weights if this fraction of prefixes matches the trainer at one step, or a constant number of steps back. In
57 collapses due to the mismatch, the fraction was at most 0.14."""
EARLIER_FEWEST = 8
"""Number of prefixes that must match if the engine has weights from several earlier steps."""
EARLIER_OVER_CHANCE = 5.0
"""The weights are from several earlier steps if at least this many times more prefixes match than expected by chance.
With other causes, the factor is at most 2.3."""
STILL = 0.5
"""The engine keeps its weights if this fraction of repeated prefixes has bitwise identical engine logprobs. With new
weights at every other step, one half of them do."""
STILL_BY_CHANCE = 0.1
"""The trainer's weights change if at most this fraction of repeated prefixes has bitwise identical trainer logprobs."""

MATERIAL_REWARD = 0.05
"""Smallest difference between two rewards for the same response that is treated as real, in standard deviations of all
rewards. KL terms in the reward cause smaller ones."""
UNEQUAL_SHIFTED = 0.35
"""Rewards are in the wrong rows if undoing a shift of rows leaves at most this fraction of the unequal pairs."""
SAME_REWARDS = 0.15
"""Two distributions of rewards are the same up to this Kolmogorov-Smirnov distance, or difference of means in standard
deviations."""
SAME_REWARDS_SD = 2.5
"""Two distributions of rewards are also the same if their means differ by at most this many standard errors."""
MOST = 0.5
"""Without a drop, a value is considered changed if it differs for at least this fraction of repeated responses."""
REFERENCE_MOVES = 0.05
"""The reference model changed if its mean logprob of a response changes by more, in nats; bf16 kernels cause 0.01."""
SAME_ORDER = 0.95
"""Above this correlation between old and new rewards of identical responses, only their scale changed."""
LENGTH_PAYS = 0.5
"""Above this correlation within groups, the reward is taken to depend on length; correct rewards correlate less."""
LENGTH_EXPLAINS = 0.8
"""Length explains reward differences above this correlation."""
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
"""A correlation weaker than this is not tested, because it is too weak to be lost."""
BREAK_LOSES = 0.5
"""A lost correlation stays lower by at least this fraction."""
MATERIAL_REST = 0.1
"""Responses with equal rewards are tested separately if the variance of reward differences among them is at least this
fraction of the total."""
