"""The thresholds used to read facts for an attribution, with the reasons for each value.

Those shared with other commands are in facts/thresholds.py, those for a drop in facts/series.py.
"""

from __future__ import annotations

OTHER_ENDINGS = 0.2
"""Responses count as cut off if at least this fraction of a step's responses end early with an unusual token."""
OF_NO_SCATTER = 10.0
"""Minimum size, in standard deviations, for a change in an input to count as deliberate."""
BEGUN = 0.1
"""The mismatch counts as begun when it reaches this fraction of its size at the onset of the drop."""
LAG_GROWS = 2.0
"""Minimum ratio of the lag to its usual value for sampling to count as too far behind; slow sequences cause less."""
LEARNED = 0.1
"""Fraction of the run, from its start, needed to estimate the conditions under which it learned, e.g. its lag."""
WAS_THERE = 0.5
"""Maximum ratio of reward noise before the drop to that after it if noise is a possible cause; a run that learned
despite the noise did not collapse from it."""
ADVANTAGE_FOLLOWS = 0.3
"""Minimum correlation within a step for advantages to count as following rewards if every group has one member; a
critic may remove most of the reward."""
ADVANTAGE_AGREES = 0.7
"""Minimum correlation within groups for rewards and advantages to count as consistent; baselines and scaling leave it
at 1, clipping above 0.8."""
CHANGED = 0.05
"""Fraction of responses whose reward may change without a change in the verifier."""
FEW_CHANGED = 10
"""Minimum number of responses with a different reward for the verifier to count as changed."""
ABRUPT = 10.0
"""Minimum growth factor in one step for the mismatch to count as growing abruptly; training alone causes less."""
MISMATCH_DIFFERS = 3.0
"""Minimum ratio of two runs' mismatches that counts as different; with the same engine it reaches 1.5 by chance."""
MATERIAL_MISMATCH = 0.01
"""Mean |d|, in nats, below which a mismatch does not affect a run; bf16 engines show 0.002 to 0.01 in healthy runs of several months."""
MIXED = 0.5
"""Rewards count as mixed up if rows with a different reward are at least this frequent, relative to rewards shuffled
within groups."""
MANY_SHARED = 0.3
"""Fraction of a step's prompts that both runs must share for anything except the weights to be compared."""
FEWEST_SHARED = 4
"""Minimum number of sequences per step with prompts that occur in both runs, for comparing weights. Prompts can differ
because some trainers drop groups with equal rewards, and so choose prompts by rewards."""
MOSTLY_CUT = 0.8
"""A length limit is the reason if at least this fraction of the differing responses differ only by ending early."""
LENGTH_SHARE = 0.5
"""Minimum fraction of a step's responses with a different reward for the reward to count as dependent on length."""
TERM_IN_ADVANTAGE = 0.75
"""Correlation of advantages with the distance from the reference (or with the logprob), controlling for the baseline
run's advantages, above which the reward counts as containing a KL term (or an entropy bonus)."""
LENGTH_LITTLE, LENGTH_MOST = 0.35, 0.7
"""Fractions of the within-step reward variance that length explains. If it explains less than LENGTH_LITTLE before a
drop and at least LENGTH_MOST after it, rewards have come to depend on length."""
WEIGHTS_DIFFER = 1e-5
"""Difference between two trainers' mean logprobs for a response, in nats, above which their weights count as different;
fp32 kernels cause 1e-7."""
