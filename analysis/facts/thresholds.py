"""The thresholds of the facts, with their reasons; those of a drop are in fall.py."""

from __future__ import annotations

AHEAD = 3.0
"""Steps before the interval of a fall at which what the fall may have begun with may lie."""
AT_ONCE = 0.35
"""Share of the settled mismatch from which it counts as present already: one update brings less."""
GROWTH = 1.6
"""Factor from the first half of a run to its last quarter from which the mismatch counts as growing."""

STALE_LEFT = 0.2
"""Share of the mismatch that may be left against the trainer's logprobs of some steps before where the engine had those
weights: rounding leaves less, and so do distances that are nearly right."""
STALE_REACHES = 20
"""Steps that must be compared before stale weights are excluded: engines are rarely farther behind without saying so."""
EARLIER_AGREES = 0.5
"""Share of the engine's logprobs of openings that are the trainer's of one earlier step, or distance, from which it had these weights: of 57
falls of the mismatch at most 0.14."""
EARLIER_FEWEST = 8
"""The fewest that are the trainer's of any step before, of which that is told."""
EARLIER_OVER_CHANCE = 5.0
"""Times as many as there are by chance; of falls of the mismatch at most 2.3."""
NONE_LEFT = 0.1
"""Where many rows are alike by chance: the share of those that chance does not explain which may be left unexplained."""
STILL = 0.5
"""Share of the openings that come again within three steps to which an engine that keeps its weights gives the same bits: one that gets
new weights every other step has half."""
STILL_BY_CHANCE = 0.1
"""The largest share of them to which the trainer may give the same bits, for its weights to be known to change."""
STALE_CARRIES = 0.2
"""Share of the run's mean |d| that openings of responses must have to represent it."""

DROPS = 0.6
"""Share of what a reward lost that it has to lose from one step to the next for it to be a drop."""
SAME_POLICY = 3.0
"""Standard deviations by which entropy, length and likelihood may differ beside a drop of the reward that no change of policy explains."""
OTHER_POLICY = 5.0
"""Those from which the policy is another one."""

MATERIAL_REWARD = 0.05
"""Least difference of two rewards of one response, in standard deviations of all rewards: KL terms in the reward make smaller ones."""
UNEQUAL_SHIFTED = 0.35
"""Of the unequal share, what may be left after moving rewards back to where they belong."""
SAME_REWARDS = 0.15
"""Largest distance of two distributions of rewards that count as the same, 0 to 1; of their means in standard deviations."""
SAME_REWARDS_SD = 2.5
"""Standard errors by which the means of their steps may lie apart."""
MOST = 0.5
"""Share of the responses from which what they are given counts as changed where no fall says so."""
REFERENCE_MOVES = 0.05
"""Nats of a response's mean logprob by which a fixed reference model does not differ from itself: kernels of bf16 give 0.01."""
SAME_ORDER = 0.95
"""Correlation of rewards of equal responses before and since from which the same is rewarded on another scale."""
GRADED_ELSEWHERE = 0.9
"""Least share of responses with the reward that they earned under another prompt, which tells that they were graded by it."""
GRADED_BY_CHANCE = 0.6
"""Most of these that may have it by chance for that to be known."""
LACKING = 10.0
"""Responses that would lack their earlier reward by chance, from which it is known whether rewards were reordered."""
LACKING_OF_PERMUTED = 0.1
"""Share of these that may lack it where they were: a few verifiers' time-outs."""
LENGTH_PAYS = 0.5
"""Correlation of length and reward within groups from which length is what pays; of honest tasks it was 0.5 at most."""
LENGTH_EXPLAINS = 0.8
"""Correlation with length from which a difference of rewards is a matter of length."""
LENGTH_IS_ALL = 0.98
"""The same where only some responses earn something else: almost nothing else may explain it."""
LENGTH_EXPLAINS_WITHIN = 0.85
"""The same within steps, or of a bonus that grows steadily: there nothing else scatters, and few values of a reward reach 0.8."""
ALMOST_ALL = 0.9
"""Share of the responses that must earn something else where a reward pays for length."""
MOVES_SD = 6.0
"""Standard deviations of the steps before from which a quantity has left what it was at a step."""
MOVES_ON = 0.6
"""Share of these that two of the three steps after it must have, too."""
BREAKS_SD = 4.0
"""Standard deviations of the steps before by which a correlation falls at once where it is lost."""
BREAKABLE = 0.2
"""Least correlation that can be lost."""
BREAK_LOSES = 0.5
"""Least share of it that is lost for good."""
MATERIAL_REST = 0.1
"""Share of what rewards differ by that must be left among responses that earned alike, for their length to be asked of it."""
OTHER_ROWS = 0.4
"""Least share of the logprobs that differ which are another row's, for rows to be handed on in another order: those of rows of another length
are cut or filled up."""
