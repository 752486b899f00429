"""The thresholds of an attribution and the points of its evidence, with their reasons; those of the facts are in facts/thresholds.py, and those of a drop in facts/fall.py.

Points are natural logarithms of odds: evidence that is e times as probable under a suspect as without it counts 1. They
were set on the tuning split of benchmarks/collapse, and tested on its held-out split. WORTH says what they are worth elsewhere.
Shares of falls that are given as reasons are of the laboratories that a threshold was set on, no rates of what to expect.
"""

from __future__ import annotations

import math

from .suspect import Evidence

WORTH, WORTH_BESIDE = 0.5, 0.3
"""What a point counts in the probability that is printed: of one run, and beside a control, whose differences share what they say. Evidence is
not independent, and the laboratories that the points were set on are not a user's: they were chosen among five pairs, with the left-out
figures of eleven laboratories in view: the least logarithmic loss beside a control, and one cause in ten at most with a confident wrong name."""
WEAK, MEDIUM, STRONG, DECISIVE, CERTAIN = 0.7, 1.5, 2.5, 4.0, 7.0
"""Points of evidence that is 2, 4.5, 12, 55 and 1,100 times as probable under a suspect as without it; the last is for what
was seen row by row and has no other explanation."""

_PRIORS = {
    "mismatch": 0.5,
    "staleness": 0.1,
    "optimizer": -0.6,
    "reward": -2.2,
    "pairing": 0.7,
    "entropy": -1.5,
    "length": -0.4,
    "data": 0.3,
    "truncation": 0.6,
    "reference": -1.0,
    "advantages": 0.9,
    "unknown": 2.5,
}
"""Before any evidence, with what is missing where nothing of a suspect is seen: about what falls of eleven laboratories had, see FACTORS."""

_SIZES = ((0.003, -4.0), (0.01, -3.0), (0.03, -1.5), (0.06, 0.0), (0.15, 1.5), (math.inf, 2.5))
"""Mean |d| up to so many nats -> points. bf16 engines have 0.002 to 0.01 in sound runs of months; published collapses
begin beyond 0.02 (research of IcePop, VeXact and the trials of benchmarks/collapse)."""
USUAL_ENDING = 0.01
"""Least share of the responses before that ended with a token that is a usual end."""
SHORTER = 0.9
"""Share of the length that responses had before below which they end sooner."""
ONE_ENDING = 0.9
"""Share of the responses of a step that end with one token from which that stops them, if no more than half of it did before."""
OTHER_ENDINGS = 0.2
"""Share of the responses of a step that end otherwise, below the longest length, from which they are broken off."""
CUT_SHARE = 0.1
"""Least share of the responses before that are longer than any since, and of those since that end at the longest length,
from which responses are cut off."""
TOGETHER_SD = 3.5
"""Standard deviations, root of the sum of squares, from which prompts of which several things shift at one step are other ones."""
OF_NO_SCATTER = 10.0
"""Standard deviations from which a change of what a run is given is one that somebody made."""
NEW_PROMPTS = 0.2
"""Least move of the share of prompts that no step before had."""
OTHER_PATTERNS = 0.1
"""The same of the share of prompts of which other places are alike."""
RESCALED = 3.0
"""Least factor of the scale of advantages that no normalisation has by itself."""
MOVED_BASELINE = 0.5
"""Least move of the mean advantage, in standard deviations of the advantages, that is another baseline."""
BOTH_SIGNS = 0.1
"""Share of negative advantages that training with a baseline has; of less than a tenth of it the sign or the baseline is lost."""
INVERTED_ADVANTAGES = -0.3
"""Correlation of advantages and rewards within groups below which the sign is wrong; other rows leave about 0."""
EARLIER = 3.5
"""Points of what a run was given otherwise for good long before it fell: a policy may take many updates to unlearn."""
BEARABLE = 3.0
"""Factor of a learning rate that training may bear; from it on hardly another explanation is needed."""
SUDDEN = 3.0
"""Most steps that the interval of a swapped reference has: a policy that leaves its reference takes longer."""

LARGE_MISMATCH = 0.06
"""Mean |d| from which what follows a fall may have begun it, too."""

FINDING_CARRIES = 0.1
"""Share of a run's mean |d| that the tokens of check's finding must make for it to be what the mismatch is."""
MISMATCH_JUMPS = 2.0
"""Least factor by which a mismatch grew."""
BEGUN = 0.1
"""Share of the mismatch at the fall from which it has begun."""
LASTS = 0.5
"""Share of a mismatch that is there updates later from which the trainer computes otherwise, and does not only have other weights, which
the engine gets later: of six first differences in what the trainer scores none was a mismatch, three were such weights and three dropout."""
DISAGREES, AGREES = 0.3, 0.05
"""Share of equal openings of one step to which one side gives two logprobs since the mismatch begins, and at most before, from which that side
computes with noise or with other rows: of 11 such falls eight were noise of the engine, one a replica that lagged, two dropout in the trainer."""

LAG_GROWS = 2.0
"""Least factor of a declared lag, over the usual one, by which sampling fell behind; waiting for the slowest sequences makes less."""
LEARNED = 0.1
"""Share of a run's steps before a fall that tell with which lag it learned."""
ORDINARY_LAG = 4.0
"""Updates that asynchronous trainers are behind by design (AReaL allows 4 to 8, one step off-policy is 1): constant from the start, a run
learned with it."""
WAS_THERE = 0.5
"""Share of the noise of rewards since a fall that may have been there before it: what a run learned with is no cause."""
UNEQUAL = 0.01
"""Share of repeated responses with two rewards that a deterministic reward may have: time-outs of verifiers."""
DISAGREE, AGREE = 0.15, 0.01
"""Least share of the pairs of equal responses of one step with two rewards since a fall, and the most before it, for a reward that began to depend
on more than the response: of 10 such falls eight were noise of the reward, one rewards of other rows, one responses that were cut off."""
OTHER_RULE = 0.3
"""Share of equal responses that earn something else since a step, while all of a step agree, from which the reward follows another rule: of 31
such falls 23 were the reward's, five those of tools or of tokens that a scorer reads, two of answers to other prompts, one of a price for length."""
MUCH_UNEQUAL = 0.3
"""The share from which it is as good as certain: what a verifier reads beside the response, a tool's answer, makes less."""
SORTED = 0.9
"""Share of the groups with several rewards, at least, in which the rewards are in order of size, that tells that they were sorted."""
SORTED_BY_CHANCE = 0.5
"""Largest such share that chance gives, or that there was before the fall: rows that were always recorded in that order say nothing."""
ADVANTAGE_FOLLOWS = 0.3
"""The least one within a step, where groups have one member each and a critic may have taken most of the reward away."""
ADVANTAGE_AGREES = 0.7
"""Least correlation of rewards and advantages within groups; baselines and scales leave 1, clipping above 0.8."""
CHANGED = 0.05
"""Share of responses that may earn another reward later; a verifier that is changed moves more."""
FEW_CHANGED = 10
"""Responses that must earn something else before a verifier counts as changed."""
APART = 1.0
"""Nats a token by which what is sampled is less likely to the trainer than to the engine, from which the recorded reward is that of
another policy than the one that is trained."""
RETURNS = 0.5
"""Share of its distance to the reference that a policy keeps at most when a KL term pulls it back; by another way it keeps more."""
DISTANCE_JUMPS = 3.0
"""Least factor, between two steps, of how much more likely responses are to the policy than to its reference."""
COEFFICIENT_GROWS = 10.0
"""Least factor of the KL term's coefficient, beside a policy that returns to its reference, that leaves no other explanation."""
INVERTED = 0.22
"""Share of groups in which likelier answers clearly earn less: 0.01 to 0.06 in sound runs, 0.1 with random rewards, 0.3 and
more where half of the prompts pay the opposite."""
AGAINST = -0.2
"""Mean correlation of likelihood and reward within groups below which likelier answers earn less."""
NO_DIRECTION = 0.15
"""Mean correlation of likelihood and reward within groups: 0.58 to 0.82 in sound runs, -0.1 to 0.11 with random rewards."""
HIDDEN = 0.3
"""Share of an evaluation's fall that the recorded reward must show, too."""

PAID_MORE = 0.2
"""Share by which the recorded reward grows while the evaluation falls, from which hardly a policy becomes worse by itself."""
LENGTH_MOVES = 1.3
"""Least factor of a change of length that counts by itself."""
LENGTH_MOVES_PAID = 1.05
"""The least one where longer responses earn more."""

ENTROPY_LOST = 0.25
"""Share of the first entropy below which it has collapsed: sound runs keep 0.4 and more (research: H/H0 below 0.2 to 0.4)."""
ENTROPY_SHRUNK = 0.6
"""Share of the entropy before the fall below which a policy became more certain while it did worse: one that unlearns becomes uncertain."""
MOST_ENTROPY = 14.0
"""Nats a token that no policy has, ln of a million tokens: broken weights or other ones than those that sampled, not a policy that explores."""
ENTROPY_GAINED = 2.0
"""Factor above which it has exploded."""
ENTROPY_CLIMBS = 2.5
"""Factor over the entropy just before the fall that an entropy bonus reached by the end of the run in 14 of 14 falls of six laboratories,
for good and not at once; of 187 other falls in 11."""
ENTROPY_STAYS = 0.9
"""Share of its peak that it keeps at the end then; of a policy that broke it goes down again."""
CLIMBS_FOR = 2
"""Steps, at least, from where such a fall may begin to where a good part of it is there."""

RATE_SPIKE = 3.0
"""Factor over the median learning rate of the steps before that no schedule has: a straight warm-up stays at two."""
RATE_STAYS = 10.0
"""Least factor that a learning rate, raised before a fall, still has where the fall begins; training does not bear it for long."""
ABRUPT = 10.0
"""Factor of a mismatch that no training makes from one step to the next."""
BENDS = 0.03
"""Mean |d| from which such a jump bends a run."""
NORM_JUMPS = 3.0
"""Least factor of the gradient norm."""
LEAP = 6.0
"""Factor over the updates before by which one is the optimizer's: of 12 falls with such an update all were, and of 128 others the largest was 4.4."""
BURST = 8.0
"""Factor over the median size of an update that single ones have where the optimizer's averages are too short or too long."""
LARGE_UPDATE = 0.003
"""Relative size of one update that is large: a thousandth is what supervised training is advised to take."""
AS_BEFORE = 1.5
"""Factor of the largest update at a fall over the median before it, below which updates are as they were."""
HUGE_UPDATE = 0.005
"""The size from which hardly a run goes on learning."""

CUSTOMARY: dict[str, tuple[float, float, float, float]] = {
    "adam_beta1": (0.5, 0.98, 0.8, 0.95),
    "adam_beta2": (0.9, 0.99999, 0.95, 0.999),
    "adam_epsilon": (1e-16, 1e-4, 1e-15, 1e-6),
    "learning_rate": (0.0, 0.01, 1e-6, 1e-3),
}
"""Setting -> the range outside of which it speaks for the optimizer, and the customary range. The learning rate is Adam's, which
moves each weight by about as much an update: a hundredth is the size of a layer's weights within some updates."""
ENTROPY_WEIGHS = 1.0
"""Coefficient of the entropy above which a nat of it is worth more than a standard deviation of normalised advantages; 0 to 0.01 is
customary."""


def prior(code: str) -> Evidence:
    """The points of a suspect before any evidence."""
    return Evidence(code="prior", points=_PRIORS[code])


def of_size(mean_abs_d: float) -> float:
    """Points of the size of a mismatch."""
    return next(points for most, points in _SIZES if mean_abs_d <= most)


CONTROL = 7.0
"""Points of an intervention: a thousand to one. Noise of a sound run falls as far in fewer than one of a thousand."""
FELL_TOO = 0.6
"""Share of the run's fall from which a control counts as fallen alike."""
MISMATCH_DIFFERS = 3.0
"""Factor between two runs' mismatch from which they differ; chance in two runs of one engine gives 1.5."""
MATERIAL_MISMATCH = 0.01
"""Mean |d| below which a mismatch does not bend a run: bf16 engines have 0.002 to 0.01 in sound runs of months."""
SAMPLED_BY_POLICY = (0.6, 1.6)
"""-mean logprob over the recorded entropy, as sampled tokens have it, within which both are of the same tokens and in nats."""
UNSAMPLED = 2.0
"""Least factor by which that grows where tokens are no longer sampled with the logprobs that the engine returns for them."""
UNSAMPLED_NATS = 0.5
"""Least excess of -mean logprob over the entropy there, nats a token."""
MIXED = 0.5
"""Share of the rows that an order of its groups by chance gives other rewards, from which a step's rewards were mixed."""
MANY_SHARED = 0.3
"""Share of a step's prompts that both runs must ask for anything but their weights to be compared."""
FEWEST_SHARED = 4
"""Sequences of a step, with prompts that both runs ask, that tell whether their weights are the same: trainers that drop groups of
equal rewards ask by what these are."""
MOSTLY_CUT = 0.8
"""Share of the responses that part whose length alone does, from which a limit cuts them."""
LENGTH_SHARE = 0.5
"""Share of a step's responses that must earn something else for that to be a matter of their length, which all of them have."""
TERM_IN_ADVANTAGE = 0.75
"""Partial correlation of what advantages differ by with the distance to the reference, or with the logprob, from which a KL term or an
entropy bonus in the reward is what differs."""
PARTS_FIRST = 7.0
"""Points of what differs first between a run and a control that are the same bits until then."""
MANY_PART = 0.2
"""Share of a step's responses that have to part at once, from equal logprobs, for the sampling to be what differs."""
GRADIENT_GROWS = 3.0
"""Factor of the gradient's norm at the update that differs, which an entropy bonus does not have: of 12 none had 1.6, of 9 KL terms 7 had."""
SHOWS_IN_GRADIENT = 1e-4
"""Nats a token that an update must leave the weights apart for a term of the loss to show in the gradient's norm."""
UPDATE_GROWS = 3.0
"""Factor of the size of an update over what its gradient explains, from which the optimizer makes it: of 5 optimizers that were changed
each had 17 and more, of 16 others none had 2."""
MOMENT_DIFFERS = 0.3
"""Relative difference of Adam's second moment at the update that differs, which one other gradient does not make."""
LOSS_MOVES = 3.0
"""Factor of the usual size of the loss by which it must differ from the control's: of 11 such entropy bonuses all lowered it, of 7 KL terms
and 9 other causes all but one raised it."""
OF_UPDATES = {"optimizer": 2.0, "entropy": 1.5, "reference": 1.1, "advantages": 1.0}
"""Points that make suspects as probable as they were of 119 updates that differed, of 7 laboratories: 33, 25, 16, and 45 of another cause."""
WEIGHTS_JUMP = 0.4
"""Nats a token between the weights that the update which differs leaves and the control's, from which the weights were rather replaced:
of 8 entropy and 9 KL terms none had a tenth of it, of 29 other updates 11 had."""
AWAY_FROM_REFERENCE = 0.2
"""Nats a token, above the control's, of the distance to the reference within three steps: a KL term or an entropy bonus does not lead
away from the reference that soon."""
LOSS_GROWS = 3.0
"""Factor of the scatter of the loss from which it has another term."""
LOSS_PUNISHES, LOSS_RISES = 0.7, 5.0
"""Correlation of the loss and the entropy since a fall, and standard deviations by which the loss rose, from which it is the entropy that is
punished: of 304 falls with a logged loss two have both, and no mismatch that makes such a loss; entropy was punished in both."""
LOSS_GOES, LOSS_SINKS = 0.85, 2.0
"""The same of an entropy bonus, where the correlation is negative and the loss sinks."""
LOSS_FOLLOWS = 0.95
"""Correlation with the entropy, or with the distance to the reference, from which that term is theirs: of 10 such falls with the entropy 10
were an entropy bonus's."""
LENGTH_LITTLE, LENGTH_MOST, LENGTH_NEARLY_ALL = 0.35, 0.7, 0.9
"""Share of the variance of a step's rewards that lengths explain before a fall and since, from which rewards are a matter of length."""
TERM_WEIGHS = 0.6
"""Correlation of advantages within groups with the distance to the reference, or with the logprob, from which a term of it is most of the
advantage."""
FROM_NOTHING = 0.25
"""Share of the mismatch of some steps later that its first step has at most where it grows update by update."""
BEYOND_RANGE = 0.2
"""Share of the range of all rewards before, by which rewards since lie above it."""
MANY_BEYOND = 0.05
"""Least share of the responses whose rewards do."""
ENTROPY_STEPS = 12
"""Steps, at least, after the first update that differs at which two runs' entropies are compared; else until the fall."""
ENTROPY_FEWEST = 4
"""Fewest of these with an entropy in both."""
ENTROPY_HIGHER = 0.9
"""Share of these at which a run's entropy is higher, from which a bonus for it may be what differs."""
WEIGHTS_DIFFER = 1e-5
"""Mean difference of a response's mean logprob from which two trainers hold other weights; kernels give 1e-7 in fp32."""
NORM_DIFFERS = 1e-3
"""Relative difference of gradient norms beyond what kernels give."""
SAME_LOGPROB = 1e-4
"""Nats by which two mean logprobs of the same tokens under the same weights differ at most, where the mismatch before was less."""
FEWEST_MOVED = 50
"""Tokens that two runs share of which it is told what an update moved them by."""
MOVED_BY_DISTANCE = 0.3
"""Correlation of the logprobs that two runs' updates leave apart with the distance to the reference, from which that is a KL term's: of 17 KL
terms of eight laboratories 10 had it, of 60 others 3."""
RELOADED = 0.95
"""The same from which weights went back to the reference as a whole."""
REWARD_MOVED = 0.1
"""Standard deviation of what equal responses earn otherwise, over that of the rewards, from which a reward no longer tells how good the
policy is: of 7 runs that a price for length made worse the least had 0.19, of one that bore it 0.05."""
SAME_SIZE = 0.9
"""Correlation of the sizes of advantages and of rewards off their group's mean, from which advantages are their rows' own."""
ENTROPY_UNLEARNED = 0.7
"""Least share of the first entropy that is left where a fall begins, for a policy that is uncertain still."""
ENTROPY_GONE = 0.1
"""Share of that which is left at the end at most where the entropy is punished: of 42 falls of the entropy's 5 have both, of 440 others 8."""
