"""Thresholds for the facts of an attribution, with the reason for each.

Thresholds shared with other commands are in facts/thresholds.py, and those for finding a drop are in facts/series.py.
"""

from __future__ import annotations

OTHER_ENDINGS = 0.2
"""Responses are considered cut off if at least this fraction of a step's responses ends early on an unusual token."""
OF_NO_SCATTER = 10.0
"""Minimum size, in standard deviations, of a change in an input that is considered deliberate."""
BEGUN = 0.1
"""The mismatch has begun once it reaches this fraction of its size at the onset of the drop."""
LAG_GROWS = 2.0
"""Multiple of its usual lag at which the engine is too far behind. Slow sequences alone do not reach it."""
LEARNED = 0.1
"""Fraction of the run, counted from its start, that defines what is normal, for example for the lag."""
WAS_THERE = 0.5
"""Noise in the reward is not the cause if more than this fraction of it was present before the drop."""
ADVANTAGE_FOLLOWS = 0.3
"""Minimum correlation of advantages with rewards within a step; low, because a critic may remove most of the reward."""
ADVANTAGE_AGREES = 0.7
"""Minimum correlation of advantages with rewards within groups for them to agree. With clipping, it is above 0.8."""
CHANGED = 0.05
"""Fraction of responses whose reward may change although the verifier is the same."""
FEW_CHANGED = 10
"""Minimum number of responses with a different reward to conclude that the verifier changed."""
ABRUPT = 10.0
"""The mismatch jumps if it grows by at least this factor in one step. Training alone makes it grow more slowly."""
MISMATCH_DIFFERS = 3.0
"""Minimum ratio between mismatches that are considered different. With the same engine, chance alone reaches 1.5."""
MATERIAL_MISMATCH = 0.01
"""A mean |d| below this, in nats, is considered harmless: with bf16 engines, healthy runs of several months have 0.002
to 0.01."""
MIXED = 0.5
"""Rewards are mixed up if at least this fraction of the rows that a shuffle within groups can change has changed."""
MANY_SHARED = 0.3
"""If the runs share fewer of a step's prompts than this fraction, only their weights are compared."""
FEWEST_SHARED = 4
"""Minimum number of sequences in a step whose prompts both runs share. Prompts differ, for example, if a trainer drops
groups with equal rewards."""
MOSTLY_CUT = 0.8
"""A length limit explains the difference if at least this fraction of the differing responses were merely cut short."""
LENGTH_SHARE = 0.5
"""If the reward starts to depend on length, at least this fraction of a step's responses gets a different reward."""
LENGTH_LITTLE, LENGTH_MOST = 0.35, 0.7
"""Rewards start to depend on length if the share of their variance that length explains rises from below the first
value to at least the second."""
WEIGHTS_DIFFER = 1e-5
"""Two trainers' weights differ if the mean logprobs of a response differ by more than this, in nats. Different fp32
kernels cause differences of 1e-7."""
