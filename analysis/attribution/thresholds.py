"""The thresholds of an attribution and the points of its evidence, with their reasons.

The thresholds of the facts are in facts/thresholds.py, those of a drop in facts/fall.py.

Points are natural logarithms of odds: evidence e times as probable under a suspect as without it counts 1. They were set on
the tuning split of benchmarks/collapse and tested on its held-out split; WORTH scales them for other runs. Counts of collapses
given as reasons come from the benchmark suites that a threshold was set on; they are not error rates to expect.
"""

from __future__ import annotations

import math

from .suspect import Evidence

WORTH, WORTH_BESIDE = 0.5, 0.3
"""Weight of a point in the printed probability: for one run, and with a baseline run, whose differences overlap in what they show.
Below 1 because evidence is not independent and user runs differ from the tuning suites. Chosen among five pairs on the left-out results of
eleven benchmark suites: least log loss with a baseline run, with at most one confident wrong cause in ten."""
WEAK, MEDIUM, STRONG, DECISIVE, CERTAIN = 0.7, 1.5, 2.5, 4.0, 7.0
"""Points of evidence that is 2, 4.5, 12, 55 and 1,100 times as probable under a suspect as without it. CERTAIN is for direct
observations, row by row, without another explanation."""

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
"""Points of a suspect before any evidence, which also cover the absence of evidence; about the frequencies of causes in eleven benchmark
suites, see FACTORS."""

_SIZES = ((0.003, -4.0), (0.01, -3.0), (0.03, -1.5), (0.06, 0.0), (0.15, 1.5), (math.inf, 2.5))
"""Upper bound of mean |d|, in nats -> points. bf16 engines show 0.002 to 0.01 in healthy months-long runs; published collapses
begin above 0.02 (papers on IcePop and VeXact, and benchmarks/collapse)."""
USUAL_ENDING = 0.01
"""Minimum share of earlier responses that end with a token for it to be a usual ending."""
SHORTER = 0.9
"""Maximum ratio of the response length to the earlier one, for responses to count as ending sooner."""
ONE_ENDING = 0.9
"""Minimum share of the responses of a step that end with one token, for it to stop them; at most half of that share before."""
OTHER_ENDINGS = 0.2
"""Minimum share of the responses of a step with an unusual ending below the maximum length, for them to count as cut off."""
CUT_SHARE = 0.1
"""Minimum share of earlier responses longer than any later one, and of later ones that end exactly at the maximum length, for
responses to count as cut off."""
TOGETHER_SD = 3.5
"""Minimum joint size, root sum of squares in standard deviations, of several prompt statistics that change at one step."""
OF_NO_SCATTER = 10.0
"""Minimum size, in standard deviations, for a change of an input to count as deliberate."""
NEW_PROMPTS = 0.2
"""Minimum change of the share of prompts not in any earlier step."""
OTHER_PATTERNS = 0.1
"""Minimum change of the total variation distance of the repetition patterns of prompts."""
RESCALED = 3.0
"""Minimum factor of the scale of advantages; normalisation alone causes less."""
MOVED_BASELINE = 0.5
"""Minimum change of the mean advantage, in standard deviations of the advantages, to count as another baseline."""
BOTH_SIGNS = 0.1
"""Minimum share of negative advantages when training with a baseline; below a tenth of it, sign or baseline is lost."""
INVERTED_ADVANTAGES = -0.3
"""Correlation of advantages and rewards within groups below which the sign is wrong; misaligned rows give about 0."""
EARLIER = 3.5
"""Points of a permanent change of an input long before the drop: a policy may take many updates to unlearn."""
BEARABLE = 3.0
"""Factor of a learning rate that training may tolerate; a larger one alone is enough to explain a drop."""
SUDDEN = 3.0
"""Maximum number of steps in the interval of a replaced reference; a policy leaves its reference more slowly."""

LARGE_MISMATCH = 0.06
"""Minimum mean |d| for a mismatch to be a possible cause even if a later change followed."""

FINDING_CARRIES = 0.1
"""Minimum share of the run's mean |d| in the tokens of check's finding, for the finding to explain the mismatch."""
MISMATCH_JUMPS = 2.0
"""Minimum factor by which a mismatch grows."""
BEGUN = 0.1
"""Share of the mismatch at the onset above which it has begun."""
LASTS = 0.5
"""Minimum share of a mismatch that persists some updates later, for the trainer to compute differently rather than to hold other weights
that the engine gets later. Of six first differences in the trainer's scores, three were such weights, three were dropout, none a mismatch."""
DISAGREES, AGREES = 0.3, 0.05
"""A side is non-deterministic, or scores other rows, if at least DISAGREES of the openings repeated within a step get two logprobs after
the onset of the mismatch, and at most AGREES before. Of 11 such collapses, eight were engine noise, one a lagging replica, two dropout in the trainer."""

LAG_GROWS = 2.0
"""Minimum factor of a declared lag over its usual value, for sampling to have fallen behind; waiting for the slowest sequences causes less."""
LEARNED = 0.1
"""Minimum share of the run, from its start, that shows what it learned with, such as its usual lag."""
ORDINARY_LAG = 4.0
"""Updates by which asynchronous trainers lag by design (AReaL allows 4 to 8, one-step off-policy is 1); the run learned with such a lag
if it is constant from the start."""
WAS_THERE = 0.5
"""Maximum ratio of reward noise before a drop to that after it; a run that learned with the noise did not collapse from it."""
UNEQUAL = 0.01
"""Maximum share of repeated responses with two rewards for a deterministic reward; verifier timeouts cause some."""
DISAGREE, AGREE = 0.15, 0.01
"""Minimum share of equal responses within a step with two rewards after a drop, and maximum share before it, for a reward to have begun to
depend on more than the response. Of 10 such collapses, eight were reward noise, one misaligned rewards, one cut-off responses."""
OTHER_RULE = 0.3
"""Minimum share of equal responses with another reward since a step, while equal responses within a step agree, for the reward rule to have
changed. Of 31 such collapses, 23 were the reward, five tools or tokens read by a scorer, two answers to other prompts, one a length penalty."""
MUCH_UNEQUAL = 0.3
"""The share from which this is nearly certain; what a verifier reads besides the response, such as a tool result, causes less."""
SORTED = 0.9
"""Minimum share of the groups with different rewards that are sorted, for rewards to have been sorted."""
SORTED_BY_CHANCE = 0.5
"""Maximum such share by chance and before the drop; rows always recorded in that order show nothing."""
ADVANTAGE_FOLLOWS = 0.3
"""Minimum correlation of advantages and rewards within a step if groups have one member each; a critic may remove most of the reward."""
ADVANTAGE_AGREES = 0.7
"""Minimum correlation of rewards and advantages within groups; baselines and scales leave 1, clipping more than 0.8."""
CHANGED = 0.05
"""Maximum share of responses whose reward may change without a change of the verifier."""
FEW_CHANGED = 10
"""Minimum number of responses with another reward for the verifier to have changed."""
APART = 1.0
"""Minimum difference of engine and trainer logprob, in nats per token, for the sampled policy to be another one than the trained policy."""
RETURNS = 0.5
"""Maximum share of its distance to the reference that a policy keeps when a KL term pulls it back; other causes leave more."""
DISTANCE_JUMPS = 3.0
"""Minimum factor, between two steps, of the distance of the policy to its reference."""
COEFFICIENT_GROWS = 10.0
"""Minimum factor of the KL coefficient, with a policy that returns to its reference, to rule out other causes."""
INVERTED = 0.22
"""Minimum share of groups in which likelier answers clearly earn less: 0.01 to 0.06 in healthy runs, 0.1 with random rewards, at least 0.3 if
half of the prompts reward the opposite."""
AGAINST = -0.2
"""Mean correlation of likelihood and reward within groups below which likelier answers earn less."""
NO_DIRECTION = 0.15
"""Mean correlation of likelihood and reward within groups below which they are unrelated: 0.58 to 0.82 in healthy runs, -0.1 to 0.11 with random rewards."""
HIDDEN = 0.3
"""Minimum share of an evaluation's relative drop that the recorded reward must show as well; below it the drop is hidden."""

PAID_MORE = 0.2
"""Minimum relative growth of the recorded reward while the evaluation drops; a policy hardly gets worse this way without a wrong reward."""
LENGTH_MOVES = 1.3
"""Minimum factor of a change of length to count by itself."""
LENGTH_MOVES_PAID = 1.05
"""The same if longer responses earn more."""

ENTROPY_LOST = 0.25
"""Share of the initial entropy below which it has collapsed; healthy runs keep at least 0.4 (literature: collapse below 0.2 to 0.4)."""
ENTROPY_SHRUNK = 0.6
"""Share of the entropy before the drop below which the policy became more certain while it got worse; unlearning makes it less certain."""
MOST_ENTROPY = 14.0
"""Maximum entropy of a policy, in nats per token (ln of a million tokens); more means broken weights, or other weights than those that sampled."""
ENTROPY_GAINED = 2.0
"""Factor above which entropy has exploded."""
ENTROPY_CLIMBS = 2.5
"""Minimum factor of the final entropy over that just before the drop, gained gradually and for good. An entropy bonus reached it in 14 of 14
collapses of six benchmark suites, other causes in 11 of 187."""
ENTROPY_STAYS = 0.9
"""Minimum share of its peak that the entropy keeps to the end in that case; it decreases again if the policy broke."""
CLIMBS_FOR = 2
"""Minimum number of steps from the earliest onset of such a drop to the loss of a good part."""

RATE_SPIKE = 3.0
"""Factor over the earlier median learning rate above which it is a spike; a linear warm-up stays at two."""
RATE_STAYS = 10.0
"""Minimum factor that a raised learning rate still has at the onset; training does not tolerate it for long."""
ABRUPT = 10.0
"""Minimum factor of a mismatch from one step to the next; training alone causes less."""
BENDS = 0.03
"""Minimum mean |d| after such a jump to affect a run."""
NORM_JUMPS = 3.0
"""Minimum factor of the gradient norm."""
LEAP = 6.0
"""Factor over earlier updates above which an update is caused by the optimizer: all of 12 collapses with such an update; the largest of 128 others was 4.4."""
BURST = 8.0
"""Factor over the median update above which single updates show that the averages of the optimizer are too short or too long."""
LARGE_UPDATE = 0.003
"""Relative size above which one update is large; the usual advice for supervised training is 0.001."""
AS_BEFORE = 1.5
"""Factor of the largest update at the onset over the earlier median, below which updates are unchanged."""
HUGE_UPDATE = 0.005
"""Relative size of one update above which runs rarely keep learning."""

CUSTOMARY: dict[str, tuple[float, float, float, float]] = {
    "adam_beta1": (0.5, 0.98, 0.8, 0.95),
    "adam_beta2": (0.9, 0.99999, 0.95, 0.999),
    "adam_epsilon": (1e-16, 1e-4, 1e-15, 1e-6),
    "learning_rate": (0.0, 0.01, 1e-6, 1e-3),
}
"""Setting -> (low, high, usual low, usual high): outside of low to high it counts as evidence for the optimizer. The learning rate is Adam's, which
changes each weight by about that much per update; 0.01 replaces a layer's weights within a few updates."""
ENTROPY_WEIGHS = 1.0
"""Entropy coefficient above which a nat outweighs a standard deviation of normalised advantages; usual values are 0 to 0.01."""


def prior(code: str) -> Evidence:
    """Return the points of a suspect before any evidence."""
    return Evidence(code="prior", points=_PRIORS[code])


def of_size(mean_abs_d: float) -> float:
    """Return the points for the size of a mismatch."""
    return next(points for most, points in _SIZES if mean_abs_d <= most)


CONTROL = 7.0
"""Points of an intervention: odds of a thousand to one. Noise of a healthy run causes such a drop in fewer than one of a thousand."""
FELL_TOO = 0.6
"""Minimum ratio of the baseline run's relative drop to the run's for the baseline run to have collapsed too."""
MISMATCH_DIFFERS = 3.0
"""Minimum ratio of the mismatch of two runs for them to differ; two runs with one engine reach 1.5 by chance."""
MATERIAL_MISMATCH = 0.01
"""Mean |d| below which a mismatch does not affect a run; bf16 engines show 0.002 to 0.01 in healthy months-long runs."""
SAMPLED_BY_POLICY = (0.6, 1.6)
"""Range of -mean logprob over recorded entropy within which both cover the same tokens in nats."""
UNSAMPLED = 2.0
"""Minimum growth of that ratio if tokens are no longer sampled from the logprobs the engine returns."""
UNSAMPLED_NATS = 0.5
"""Minimum excess of -mean logprob over entropy in that case, in nats per token."""
MIXED = 0.5
"""Minimum ratio of the share of rows with another reward to that of a random order within groups, for rewards to have been mixed."""
MANY_SHARED = 0.3
"""Minimum share of a step's prompts common to both runs to compare anything but their weights."""
FEWEST_SHARED = 4
"""Minimum number of sequences of a step with prompts common to both runs to compare their weights; trainers that drop groups of equal
rewards choose prompts by rewards."""
MOSTLY_CUT = 0.8
"""Minimum share of the differing responses that differ only by ending early, for a length limit to cut them."""
LENGTH_SHARE = 0.5
"""Minimum share of a step's responses with another reward for the reward to depend on length, which every response has."""
TERM_IN_ADVANTAGE = 0.75
"""Minimum partial correlation of advantage differences with the distance to the reference, or with the logprob, for a KL term or an entropy
bonus in the reward to be the difference."""
PARTS_FIRST = 7.0
"""Points of the first difference between a run and a baseline run that are bitwise equal before it."""
MANY_PART = 0.2
"""Minimum share of a step's responses that differ at once under equal logprobs, for the sampling to differ."""
GRADIENT_GROWS = 3.0
"""Factor of the gradient norm at the first differing update above which it is not an entropy bonus: none of 12 bonuses had 1.6, 7 of 9 KL terms did."""
SHOWS_IN_GRADIENT = 1e-4
"""Minimum change of the policy by an update, in nats per token, for a loss term to show in the gradient norm."""
UPDATE_GROWS = 3.0
"""Minimum factor of an update over what its gradient explains, for the optimizer to cause it: all of 5 changed optimizers had at least 17,
none of 16 others had 2."""
MOMENT_DIFFERS = 0.3
"""Minimum relative difference of Adam's second moment at the first differing update; one different gradient causes less."""
LOSS_MOVES = 3.0
"""Minimum difference from the baseline run's loss, in multiples of its usual size: all of 11 such entropy bonuses lowered the loss; of 7 KL terms and
9 other causes all but one raised it."""
OF_UPDATES = {"optimizer": 2.0, "entropy": 1.5, "reference": 1.1, "advantages": 1.0}
"""Points that reproduce the frequencies of causes among 119 differing updates of 7 benchmark suites: 33 optimizer, 25 entropy, 16 reference, 45 others."""
WEIGHTS_JUMP = 0.4
"""Minimum difference from the baseline run after the first differing update, in nats per token, for the weights to have been replaced: none of 8
entropy and 9 KL terms had a tenth of it, 11 of 29 other updates did."""
AWAY_FROM_REFERENCE = 0.2
"""Minimum increase of the distance to the reference over the baseline run within three steps, in nats per token; a KL term or an entropy bonus
does not lead away from the reference that soon."""
LOSS_GROWS = 3.0
"""Minimum factor of the scatter of the loss for it to have another term."""
LOSS_PUNISHES, LOSS_RISES = 0.7, 5.0
"""Minimum correlation of loss and entropy after a drop, and minimum rise of the loss in standard deviations, for entropy to be penalised: of 304
collapses with a logged loss and no mismatch that could cause it, two reach both, and in both entropy was penalised."""
LOSS_GOES, LOSS_SINKS = 0.85, 2.0
"""The same for an entropy bonus, with a negative correlation and a decreasing loss."""
LOSS_FOLLOWS = 0.95
"""Minimum correlation with the entropy, or with the distance to the reference, for that term to dominate the loss: all of 10 such collapses
with the entropy were entropy bonuses."""
LENGTH_LITTLE, LENGTH_MOST, LENGTH_NEARLY_ALL = 0.35, 0.7, 0.9
"""Share of the variance of rewards within a step that length explains: below LENGTH_LITTLE before a drop and at least LENGTH_MOST after it,
rewards depend on length; from LENGTH_NEARLY_ALL on this is certain."""
TERM_WEIGHS = 0.6
"""Minimum correlation of advantages within groups with the distance to the reference, or with the logprob, for such a term to dominate the
advantage."""
FROM_NOTHING = 0.25
"""Maximum ratio of the mismatch at its first step to that some steps later, for it to grow update by update."""
BEYOND_RANGE = 0.2
"""Minimum excess of later rewards over the earlier maximum, as a share of the earlier range."""
MANY_BEYOND = 0.05
"""Minimum share of responses with such rewards."""
ENTROPY_STEPS = 12
"""Minimum number of steps after the first differing update over which to compare the entropies of two runs; at least until the drop."""
ENTROPY_FEWEST = 4
"""Minimum number of these steps with an entropy in both runs."""
ENTROPY_HIGHER = 0.9
"""Minimum share of these steps with a higher entropy in the run, for an entropy bonus to be the difference."""
WEIGHTS_DIFFER = 1e-5
"""Minimum difference of a response's mean logprob for two trainers to hold different weights; fp32 kernels cause 1e-7."""
NORM_DIFFERS = 1e-3
"""Minimum relative difference of gradient norms; kernels cause less."""
SAME_LOGPROB = 1e-4
"""Minimum tolerance, in nats, for mean logprobs of the same tokens under the same weights; three times the earlier mismatch if that is more."""
FEWEST_MOVED = 50
"""Minimum number of tokens common to two runs to characterise an update."""
MOVED_BY_DISTANCE = 0.3
"""Minimum correlation of the logprob changes between two runs with the distance to the reference, for a KL term to cause them: 10 of 17 KL terms
in eight benchmark suites had it, 3 of 60 others."""
RELOADED = 0.95
"""Correlation from which the weights were instead reset to the reference as a whole."""
REWARD_MOVED = 0.1
"""Minimum standard deviation of reward differences of equal responses, relative to that of the rewards, for the reward to no longer measure the
policy: the smallest of 7 runs harmed by a length penalty had 0.19, one that was not harmed 0.05."""
SAME_SIZE = 0.9
"""Minimum correlation of the sizes of advantages and of rewards minus their group's mean, for advantages to be in the right rows."""
ENTROPY_UNLEARNED = 0.7
"""Minimum share of the initial entropy at the onset for the policy to be still uncertain."""
ENTROPY_GONE = 0.1
"""Maximum share of that entropy left at the end if entropy is penalised: 5 of 42 collapses by entropy reach both, 8 of 440 others."""
