"""Thresholds for `attribute`. Others are in facts/thresholds.py and facts/series.py."""

from __future__ import annotations

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
