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
"""The engine is too far behind if its lag is at least this many times the usual lag; slow sequences cause less."""
LEARNED = 0.1
"""Fraction of the run, from its start, that it takes to see what is normal, such as the lag."""
WAS_THERE = 0.5
"""Noise in the reward is ruled out if more than this fraction of it was there before the drop: the run learned in spite
of it."""
ADVANTAGE_FOLLOWS = 0.3
"""Within a step, advantages follow rewards above this correlation; a critic may remove most of the reward."""
ADVANTAGE_AGREES = 0.7
"""Advantages agree with rewards above this correlation within groups; baselines and scaling leave it at 1, clipping
above 0.8."""
CHANGED = 0.05
"""Fraction of responses whose reward may change under the same verifier."""
FEW_CHANGED = 10
"""Responses that must get a new reward before the verifier has changed."""
ABRUPT = 10.0
"""The mismatch jumps if it grows by at least this factor in one step; training alone causes less."""
MISMATCH_DIFFERS = 3.0
"""Ratio from which two runs' mismatches differ; with the same engine it reaches 1.5 by chance."""
MATERIAL_MISMATCH = 0.01
"""Mean |d|, in nats, below which a mismatch is harmless; bf16 engines show 0.002 to 0.01 in healthy runs of several
months."""
MIXED = 0.5
"""Rewards are mixed up if at least this fraction of the rows that a shuffle within groups would change have a different
reward."""
MANY_SHARED = 0.3
"""Fraction of a step's prompts that both runs must have before anything but their weights is compared."""
FEWEST_SHARED = 4
"""Sequences per step with prompts of both runs that it takes to compare weights. Prompts can differ because some
trainers drop groups with equal rewards, and so choose prompts by reward."""
MOSTLY_CUT = 0.8
"""A length limit is the reason if at least this fraction of the differing responses just end early."""
LENGTH_SHARE = 0.5
"""Fraction of a step's responses that must get a different reward before the reward can depend on length."""
TERM_IN_ADVANTAGE = 0.75
"""The reward has a KL term if advantages correlate this much with the distance from the reference, and an entropy bonus
if they correlate this much with the logprob, given the baseline's advantages."""
LENGTH_LITTLE, LENGTH_MOST = 0.35, 0.7
"""Rewards have come to depend on length if it explains less than LENGTH_LITTLE of their variance within a step before
the drop, and at least LENGTH_MOST after it."""
WEIGHTS_DIFFER = 1e-5
"""Difference between two trainers' mean logprobs of a response, in nats, above which their weights differ; fp32 kernels
cause 1e-7."""
