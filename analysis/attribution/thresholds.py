"""Thresholds for the facts of an attribution, with the reason for each.

Those shared with other commands are in facts/thresholds.py, those for finding a drop in facts/series.py.
"""

from __future__ import annotations

OTHER_ENDINGS = 0.2
"""Responses are cut off if at least this fraction of a step's responses end early on an unusual token."""
OF_NO_SCATTER = 10.0
"""Size, in standard deviations, from which a change in an input is deliberate."""
BEGUN = 0.1
"""The mismatch has begun once it reaches this fraction of its size at the onset of the drop."""
LAG_GROWS = 2.0
"""The engine is too far behind at this multiple of its usual lag; slow sequences increase the lag by less."""
LEARNED = 0.1
"""Fraction of the run, from its start, that shows what is normal, such as the lag."""
WAS_THERE = 0.5
"""Noise in the reward is not the cause if more than this fraction of it preceded the drop."""
ADVANTAGE_FOLLOWS = 0.3
"""Advantages follow rewards if they correlate above this within a step; a critic may remove most of the reward."""
ADVANTAGE_AGREES = 0.7
"""Advantages agree with rewards above this correlation within groups; clipping leaves it above 0.8."""
CHANGED = 0.05
"""Fraction of responses whose reward may change although the verifier is the same."""
FEW_CHANGED = 10
"""Number of responses that must get a different reward before the verifier counts as changed."""
ABRUPT = 10.0
"""The mismatch jumps if it grows by at least this factor in one step; training alone makes it grow by less."""
MISMATCH_DIFFERS = 3.0
"""Minimum ratio of the mismatches of two runs for them to differ; with the same engine, it reaches 1.5 by chance."""
MATERIAL_MISMATCH = 0.01
"""A smaller mean |d|, in nats, is harmless; bf16 engines show 0.002 to 0.01 in healthy runs of several months."""
MIXED = 0.5
"""Rewards are mixed up if at least this fraction of the rows that a shuffle within groups would change is different."""
MANY_SHARED = 0.3
"""If the runs share fewer of a step's prompts than this fraction, only their weights are compared."""
FEWEST_SHARED = 4
"""Minimum number of sequences in a step whose prompts both runs share. Prompts differ, for example, if a trainer drops
groups with equal rewards."""
MOSTLY_CUT = 0.8
"""A length limit explains the difference if at least this fraction of the differing responses were merely cut short."""
LENGTH_SHARE = 0.5
"""At least this fraction of a step's responses gets a different reward if the reward starts to depend on length."""
LENGTH_LITTLE, LENGTH_MOST = 0.35, 0.7
"""Rewards come to depend on length if the variance it explains rises from below the first to at least the second."""
WEIGHTS_DIFFER = 1e-5
"""Two trainers' weights differ if the mean logprobs of a response differ by more, in nats; fp32 kernels cause 1e-7."""
