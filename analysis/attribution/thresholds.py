"""The thresholds used to read facts for an attribution, with the reasons for each value.

Those shared with other commands are in facts/thresholds.py, those for a drop in facts/series.py.
"""

from __future__ import annotations

OTHER_ENDINGS = 0.2
"""Responses are cut off if at least this share of a step's responses ends early with an unusual token."""
OF_NO_SCATTER = 10.0
"""A change in an input is deliberate if it has at least this size, in standard deviations."""
BEGUN = 0.1
"""The mismatch has begun once it reaches this share of its size at the onset of the drop."""
LAG_GROWS = 2.0
"""Sampling has fallen behind if its lag is at least this many times the usual one; slow sequences alone cause less."""
LEARNED = 0.1
"""Minimum share of the run, from its start, that shows the conditions under which it learned, such as its usual lag."""
WAS_THERE = 0.5
"""Reward noise is a possible cause only if the noise before the drop is at most this share of the noise after it; a run
that learned despite the noise did not collapse from it."""
ADVANTAGE_FOLLOWS = 0.3
"""If every group has one member, advantages follow rewards if their correlation within a step is at least this; a critic
may remove most of the reward."""
ADVANTAGE_AGREES = 0.7
"""Rewards and advantages agree if their correlation within groups is at least this; baselines and scaling leave it at
1, clipping above 0.8."""
CHANGED = 0.05
"""Maximum share of responses whose reward may change under the same verifier."""
FEW_CHANGED = 10
"""The verifier has changed only if at least this many responses get a different reward."""
ABRUPT = 10.0
"""The mismatch grows abruptly if it grows at least by this factor in one step; training alone causes less."""
MISMATCH_DIFFERS = 3.0
"""Two runs' mismatches differ if their ratio is at least this; with the same engine they reach 1.5 by chance."""
MATERIAL_MISMATCH = 0.01
"""Mean |d|, in nats, below which a mismatch does not affect a run; bf16 engines show 0.002 to 0.01 in healthy runs of several months."""
MIXED = 0.5
"""Rewards have been mixed up if the share of rows with a different reward is at least this fraction of the share
expected after shuffling rewards within groups."""
MANY_SHARED = 0.3
"""Anything except the weights is compared only if both runs share at least this fraction of a step's prompts."""
FEWEST_SHARED = 4
"""Weights are compared only if a step has at least this many sequences with prompts that occur in both runs. Prompts can differ
because some trainers drop groups with equal rewards, and so choose prompts by rewards."""
MOSTLY_CUT = 0.8
"""A length limit has cut responses if at least this share of the responses that differ do so only by ending early."""
LENGTH_SHARE = 0.5
"""A reward depends on length only if at least this share of a step's responses gets a different one."""
TERM_IN_ADVANTAGE = 0.75
"""The reward contains a KL term (or an entropy bonus) if the correlation of advantages with the distance from the reference
(or with the logprob) exceeds this, controlling for the baseline run's advantages."""
LENGTH_LITTLE, LENGTH_MOST = 0.35, 0.7
"""Share of the reward variance within a step that length explains. If it is below LENGTH_LITTLE before a drop and at least LENGTH_MOST after it,
rewards have come to depend on length."""
WEIGHTS_DIFFER = 1e-5
"""Two trainers hold different weights if their mean logprobs for a response differ by more than this, in nats; fp32
kernels cause 1e-7."""
