"""The thresholds used in attribution and the points given for evidence, with the reasons for each value.

Thresholds for facts are in facts/thresholds.py, those for a drop in facts/fall.py.

Points are natural logarithms of odds: evidence that is e times as probable if the suspect is the cause as if it is not gets 1
point. They were set on the tuning split of benchmarks/collapse and tested on its held-out split; WORTH scales them for other
runs. Where a reason counts collapses, they come from the benchmark suites on which the threshold was set, so the counts are
not expected error rates.
"""

from __future__ import annotations

import math

from .suspect import Evidence

WORTH, WORTH_BESIDE = 0.5, 0.3
"""Weight of a point in the printed probability: for a single run, and for a run with a baseline run.
Both are below 1 because pieces of evidence are not independent and user runs differ from the tuning suites; the second is lower because
differences from a baseline run partly show the same thing. Chosen among five pairs on the left-out results from eleven benchmark suites:
the lowest log loss with a baseline run, and at most one confident wrong cause in ten."""
WEAK, MEDIUM, STRONG, DECISIVE, CERTAIN = 0.7, 1.5, 2.5, 4.0, 7.0
"""Points for evidence that is 2, 4.5, 12, 55 and 1,100 times as probable if the suspect is the cause as if it is not. CERTAIN is
reserved for direct row-by-row observations that have no other explanation."""

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
"""Suspect -> its points before any evidence, which also account for the absence of evidence. They roughly match how frequent each cause
is in eleven benchmark suites; see FACTORS."""

_SIZES = ((0.003, -4.0), (0.01, -3.0), (0.03, -1.5), (0.06, 0.0), (0.15, 1.5), (math.inf, 2.5))
"""Upper bound of mean |d|, in nats -> points. bf16 engines show 0.002 to 0.01 in healthy months-long runs; published collapses
begin above 0.02 (papers on IcePop and VeXact, and benchmarks/collapse)."""
USUAL_ENDING = 0.01
"""Minimum share of earlier responses ending with a token for that token to count as a usual ending."""
SHORTER = 0.9
"""Maximum ratio of the later to the earlier response length for responses to count as ending sooner."""
ONE_ENDING = 0.9
"""Minimum share of a step's responses ending with the same token for that token to count as a new stop token; before that step, at most
half of this share may end with it."""
OTHER_ENDINGS = 0.2
"""Minimum share of a step's responses that end with an unusual token before the maximum length, for responses to count as cut off."""
CUT_SHARE = 0.1
"""Minimum share of earlier responses that are longer than every later one, and of later responses that end exactly at the maximum length,
for responses to count as cut off."""
TOGETHER_SD = 3.5
"""Minimum joint size of the changes in several prompt statistics at one step for the prompts to count as changed: the root of the summed
squares, in standard deviations."""
OF_NO_SCATTER = 10.0
"""Minimum size of a change in an input, in standard deviations, for the change to count as deliberate."""
NEW_PROMPTS = 0.2
"""Minimum change in the share of prompts that occur in no earlier step, for the prompts to count as changed."""
OTHER_PATTERNS = 0.1
"""Minimum change in the total variation distance between prompts' token repetition patterns, for the prompts to count as changed."""
RESCALED = 3.0
"""Minimum factor by which the scale of advantages changes to count as rescaled; normalisation alone causes less."""
MOVED_BASELINE = 0.5
"""Minimum change in the mean advantage, in standard deviations of the advantages, for the baseline to count as changed."""
BOTH_SIGNS = 0.1
"""Minimum share of negative advantages expected when training with a baseline. If the share falls below a tenth of this, the sign or the
baseline has been lost."""
INVERTED_ADVANTAGES = -0.3
"""Correlation between advantages and rewards within groups below which the sign of the advantages is wrong; misaligned rows give about 0."""
EARLIER = 3.5
"""Points for a permanent change in an input long before the drop: a policy may take many updates to unlearn."""
BEARABLE = 3.0
"""Factor by which the learning rate may grow without necessarily harming training; a larger factor alone can explain a drop."""
SUDDEN = 3.0
"""Maximum width, in steps, of the change interval for the reference model to count as replaced; a policy moves away from its reference more
slowly."""

LARGE_MISMATCH = 0.06
"""Minimum mean |d|, in nats, for a mismatch before the drop to remain a possible cause even if another change came later."""

FINDING_CARRIES = 0.1
"""Minimum share of the run's mean |d| that comes from the tokens named in check's finding, for the finding to explain the mismatch."""
MISMATCH_JUMPS = 2.0
"""Minimum factor by which the mismatch must increase to count as having grown."""
BEGUN = 0.1
"""Share of its size at the onset of the drop that the mismatch must reach at a step to count as begun there."""
LASTS = 0.5
"""Minimum share of a mismatch that must persist some updates later for the trainer to be computing differently; otherwise it may only hold
other weights, which the engine receives later. Of six first differences in the trainer's scores, three came from other weights and three
from dropout; none was a mismatch."""
DISAGREES, AGREES = 0.3, 0.05
"""Share of prefixes repeated within a step that get two different logprobs. The trainer or the engine is non-deterministic, or scores other
rows, if this share is at least DISAGREES after the onset of the mismatch and at most AGREES before it. Of 11 such collapses, eight were engine noise, one a lagging replica, two dropout in the trainer."""

LAG_GROWS = 2.0
"""Minimum ratio of the declared lag to its usual value for sampling to have fallen behind; waiting for the slowest sequences causes less."""
LEARNED = 0.1
"""Minimum share of the run, counted from its start, needed to show under which conditions it learned, such as its usual lag."""
ORDINARY_LAG = 4.0
"""Number of updates by which asynchronous trainers may lag by design (AReaL allows 4 to 8, one-step off-policy is 1). If a lag up to this
is constant from the start, the run learned with it."""
WAS_THERE = 0.5
"""Maximum ratio of reward noise before a drop to reward noise after it for the noise to be a possible cause; a run that learned despite the
noise did not collapse from it."""
UNEQUAL = 0.01
"""Maximum share of repeated responses with two different rewards for the reward to count as deterministic; a few are
due to verifier timeouts.
"""
DISAGREE, AGREE = 0.15, 0.01
"""Share of identical responses within a step that get two different rewards. If it is at least DISAGREE after a drop and at most AGREE before
it, the reward has begun to depend on more than the response. Of 10 such collapses, eight were reward noise, one misaligned rewards, one cut-off responses."""
OTHER_RULE = 0.3
"""Minimum share of identical responses whose reward differs after a step, while identical responses within one step agree, for the reward
rule to have changed. Of 31 such collapses, 23 were the reward, five tools or tokens read by a scorer, two answers to other prompts, one a length penalty."""
MUCH_UNEQUAL = 0.3
"""Share of identical responses with a different reward at which a changed reward rule is nearly certain; anything else that a verifier
reads, such as a tool result, causes a smaller share."""
SORTED = 0.9
"""Minimum share of groups whose rewards are in sorted order, among groups whose rewards differ, for rewards to have been sorted."""
SORTED_BY_CHANCE = 0.5
"""Maximum share of groups with sorted rewards by chance and before the drop, for the order to be evidence; if rows were always recorded in
sorted order, it shows nothing."""
ADVANTAGE_FOLLOWS = 0.3
"""Minimum correlation between advantages and rewards within a step for advantages to follow rewards if every group has a single member; a
critic may remove most of the reward."""
ADVANTAGE_AGREES = 0.7
"""Minimum correlation between rewards and advantages within groups for the two to agree; baselines and scaling leave it at 1, clipping
above 0.8."""
CHANGED = 0.05
"""Maximum share of responses whose reward may change although the verifier is unchanged."""
FEW_CHANGED = 10
"""Minimum number of responses whose reward changed for the verifier to count as changed."""
APART = 1.0
"""Minimum difference between engine and trainer logprobs, in nats per token, for the sampled policy to be a different policy from the
trained one."""
RETURNS = 0.5
"""Maximum share of its distance from the reference that a policy keeps when a KL term pulls it back; other causes leave a larger share."""
DISTANCE_JUMPS = 3.0
"""Minimum factor by which the distance between policy and reference grows from one step to the next to count as a jump."""
COEFFICIENT_GROWS = 10.0
"""Minimum factor by which the KL coefficient grows, while the policy returns to its reference, to rule out other causes."""
INVERTED = 0.22
"""Minimum share of groups in which likelier answers clearly earn less for rewards to count as inverted. The share is 0.01 to 0.06 in healthy
runs, 0.1 with random rewards, and at least 0.3 if half of the prompts reward the opposite."""
AGAINST = -0.2
"""Mean correlation between likelihood and reward within groups below which likelier answers earn less."""
NO_DIRECTION = 0.15
"""Mean correlation between likelihood and reward within groups below which the two are unrelated. It is 0.58 to 0.82 in healthy runs and -0.1 to
0.11 with random rewards."""
HIDDEN = 0.3
"""Minimum ratio of the recorded reward's relative drop to the evaluation's; below this ratio the recorded reward hides the drop."""

PAID_MORE = 0.2
"""Minimum relative growth of the recorded reward while the evaluation drops, for the reward to be wrong; with a correct
reward the two hardly ever diverge like this.
"""
LENGTH_MOVES = 1.3
"""Minimum factor by which response length changes to count as evidence by itself."""
LENGTH_MOVES_PAID = 1.05
"""Minimum factor by which response length changes to count as evidence if longer responses earn more."""

ENTROPY_LOST = 0.25
"""Share of its initial value below which entropy has collapsed; healthy runs keep at least 0.4 (literature: collapse below 0.2 to 0.4)."""
ENTROPY_SHRUNK = 0.6
"""Ratio of entropy after the drop to entropy before it, below which the policy became more certain while it got worse; unlearning makes a
policy less certain."""
MOST_ENTROPY = 14.0
"""Maximum plausible entropy of a policy, in nats per token (ln of a million tokens). A higher value means that the
weights are broken, or that other weights sampled the tokens.
"""
ENTROPY_GAINED = 2.0
"""Ratio to its initial value above which entropy has exploded."""
ENTROPY_CLIMBS = 2.5
"""Minimum ratio of the final entropy to the entropy just before the drop, with a gradual and lasting rise, for an entropy bonus to be the
cause. An entropy bonus reached it in 14 of 14 collapses in six benchmark suites, other causes in 11 of 187."""
ENTROPY_STAYS = 0.9
"""Minimum share of its peak value that a rising entropy must keep up to the end of the run, for an entropy bonus to be the cause; if the
policy broke instead, entropy decreases again."""
CLIMBS_FOR = 2
"""Minimum number of steps between the earliest onset of a drop and the loss of a good part of the reward, for rising entropy to be the cause:
an entropy bonus does not act at once."""

RATE_SPIKE = 3.0
"""Minimum ratio of a spike in the learning rate to the earlier median; a linear warm-up stays at 2."""
RATE_STAYS = 10.0
"""Minimum factor by which a raised learning rate must still be raised at the onset to be the cause; training does not tolerate such a rate
for long."""
ABRUPT = 10.0
"""Minimum factor by which the mismatch grows from one step to the next to count as abrupt; training alone causes less."""
BENDS = 0.03
"""Minimum mean |d|, in nats, after an abrupt jump of the mismatch, for the jump to affect the run."""
NORM_JUMPS = 3.0
"""Minimum factor by which the gradient norm grows to count as a jump."""
LEAP = 6.0
"""Ratio of an update's size to earlier updates above which the optimizer caused it. It did in all 12 collapses with such an update; the
largest ratio in 128 others was 4.4."""
BURST = 8.0
"""Ratio of single updates to the median update above which the optimizer's moving averages are too short or too long."""
LARGE_UPDATE = 0.003
"""Ratio of update norm to weight norm above which an update is large; the usual advice for supervised training is 0.001."""
AS_BEFORE = 1.5
"""Ratio of the largest update at the onset to the earlier median, below which updates count as unchanged."""
HUGE_UPDATE = 0.005
"""Ratio of update norm to weight norm above which runs rarely keep learning."""

CUSTOMARY: dict[str, tuple[float, float, float, float]] = {
    "adam_beta1": (0.5, 0.98, 0.8, 0.95),
    "adam_beta2": (0.9, 0.99999, 0.95, 0.999),
    "adam_epsilon": (1e-16, 1e-4, 1e-15, 1e-6),
    "learning_rate": (0.0, 0.01, 1e-6, 1e-3),
}
"""Setting -> (low, high, usual low, usual high). A value outside the range low to high is evidence for the optimizer. The learning rate is
Adam's, which changes each weight by about that much per update; a rate of 0.01 replaces a layer's weights within a few updates."""
ENTROPY_WEIGHS = 1.0
"""Entropy coefficient above which one nat of entropy outweighs one standard deviation of normalised advantages; usual values are 0 to 0.01."""


def prior(code: str) -> Evidence:
    """Return a suspect's points before any evidence, as evidence."""
    return Evidence(code="prior", points=_PRIORS[code])


def of_size(mean_abs_d: float) -> float:
    """Return the points for the size of a mismatch."""
    return next(points for most, points in _SIZES if mean_abs_d <= most)


CONTROL = 7.0
"""Points for an intervention: odds of about a thousand to one. Noise in a healthy run causes such a drop in fewer than one run in a thousand."""
FELL_TOO = 0.6
"""Minimum ratio of the baseline run's relative drop to the judged run's, for the baseline run to count as collapsed too."""
MISMATCH_DIFFERS = 3.0
"""Minimum ratio between the mismatches in two runs for them to differ; two runs with the same engine reach 1.5 by chance."""
MATERIAL_MISMATCH = 0.01
"""Mean |d|, in nats, below which a mismatch does not affect a run; bf16 engines show 0.002 to 0.01 in healthy months-long runs."""
SAMPLED_BY_POLICY = (0.6, 1.6)
"""Range of the ratio of -mean logprob to recorded entropy within which both are measured on the same tokens and in nats."""
UNSAMPLED = 2.0
"""Minimum factor by which the ratio of -mean logprob to entropy grows if tokens are no longer sampled from the logprobs that the engine returns."""
UNSAMPLED_NATS = 0.5
"""Minimum excess of -mean logprob over entropy, in nats per token, if tokens are no longer sampled from the logprobs that the engine returns."""
MIXED = 0.5
"""Minimum ratio of the share of rows whose reward differs to the share expected after shuffling rewards within groups, for rewards to have
been mixed up."""
MANY_SHARED = 0.3
"""Minimum share of a step's prompts that both runs must have in common to compare anything except their weights."""
FEWEST_SHARED = 4
"""Minimum number of sequences at a step, with prompts that both runs have in common, to compare the runs' weights. The prompts can differ
because trainers that drop groups with equal rewards choose prompts by rewards."""
MOSTLY_CUT = 0.8
"""Minimum share of responses that differ only by ending early, among all that differ, for a length limit to have cut them off."""
LENGTH_SHARE = 0.5
"""Minimum share of a step's responses whose reward differs for the reward to depend on length: such a rule affects almost every response."""
TERM_IN_ADVANTAGE = 0.75
"""Minimum partial correlation between advantages and the distance from the reference, or the logprob, given the baseline run's advantages,
for the difference to be a KL term or an entropy bonus in the reward."""
PARTS_FIRST = 7.0
"""Points for the first difference between a run and its baseline run if the two are bitwise identical before it."""
MANY_PART = 0.2
"""Minimum share of a step's responses that differ at once although logprobs are equal, for the sampling to differ."""
GRADIENT_GROWS = 3.0
"""Ratio between the gradient norms of run and baseline at the first differing update; above it, the difference is not
an entropy bonus. None of 12 bonuses reached 1.6; 7 of 9 KL terms did."""
SHOWS_IN_GRADIENT = 1e-4
"""Minimum change that an update makes to the policy, in nats per token, for a loss term to show in the gradient norm."""
UPDATE_GROWS = 3.0
"""Minimum ratio of an update's size to the size its gradient explains, for the optimizer to be the cause: all 5 changed optimizers reached at
least 17, none of 16 others reached 2."""
MOMENT_DIFFERS = 0.3
"""Minimum relative difference in Adam's second moment at the first differing update, for its settings to have changed;
one different gradient causes less.
"""
LOSS_MOVES = 3.0
"""Minimum difference from the baseline run's loss, in multiples of its usual size, for a loss term to have been added. All 11 entropy bonuses that
reached it lowered the loss; of 7 KL terms and 9 other causes, all but one raised it."""
OF_UPDATES = {"optimizer": 2.0, "entropy": 1.5, "reference": 1.1, "advantages": 1.0}
"""Suspect -> points that reproduce how often the suspect caused the first differing update. Of 119 such updates in 7
benchmark suites, 33 were caused by the optimizer, 25 by entropy, 16 by the reference, and 45 by others.
"""
WEIGHTS_JUMP = 0.4
"""Minimum logprob difference from the baseline run after the first differing update, in nats per token, for the weights
to have been replaced. None of 8 entropy terms and 9 KL terms reached a tenth of it; 11 of 29 other updates did.
"""
AWAY_FROM_REFERENCE = 0.2
"""Minimum excess of the distance from the reference over the baseline run's within three steps, in nats per token, to rule out a KL term or an
entropy bonus; neither moves a policy away from the reference that fast."""
LOSS_GROWS = 3.0
"""Minimum factor by which the scatter of the loss grows for the loss to have gained a term."""
LOSS_PUNISHES, LOSS_RISES = 0.7, 5.0
"""Minimum correlation between loss and entropy after a drop, and minimum rise of the loss in standard deviations, for entropy to be penalised. Of
304 collapses with a logged loss and no mismatch that could cause the rise, two reach both values; in both, entropy was penalised."""
LOSS_GOES, LOSS_SINKS = 0.85, 2.0
"""Minimum size of a negative correlation between loss and entropy after a drop, and minimum decrease of the loss in
standard deviations, for an entropy bonus.
"""
LOSS_FOLLOWS = 0.95
"""Minimum correlation between the loss and entropy, or the distance from the reference, for an entropy or KL term to dominate the loss. All 10
collapses that reached it with entropy were due to entropy bonuses."""
LENGTH_LITTLE, LENGTH_MOST, LENGTH_NEARLY_ALL = 0.35, 0.7, 0.9
"""Share of the reward variance within a step that length explains. If it is below LENGTH_LITTLE before a drop and at least LENGTH_MOST after it,
rewards have come to depend on length; from LENGTH_NEARLY_ALL upwards this is certain."""
TERM_WEIGHS = 0.6
"""Minimum correlation within groups between advantages and the distance from the reference, or the logprob, for a KL or entropy term to
dominate the advantages."""
FROM_NOTHING = 0.25
"""Maximum ratio of the mismatch at its first step to the mismatch some steps later, for it to be growing update by update."""
BEYOND_RANGE = 0.2
"""Minimum excess of a later reward over the earlier maximum, as a share of the earlier reward range, to count as beyond that range."""
MANY_BEYOND = 0.05
"""Minimum share of responses whose reward is beyond the earlier range, for the reward to have changed."""
ENTROPY_STEPS = 12
"""Minimum number of steps after the first differing update over which two runs' entropies are compared; the comparison extends at least to
the drop."""
ENTROPY_FEWEST = 4
"""Minimum number of compared steps at which both runs have an entropy."""
ENTROPY_HIGHER = 0.9
"""Minimum share of compared steps at which entropy is higher than in the baseline run, for the difference to be an entropy bonus."""
WEIGHTS_DIFFER = 1e-5
"""Minimum difference between two trainers' mean logprobs for a response, in nats, for them to hold different weights; fp32 kernels cause 1e-7."""
NORM_DIFFERS = 1e-3
"""Minimum relative difference between two runs' gradient norms to count as different; kernels alone cause less."""
SAME_LOGPROB = 1e-4
"""Minimum tolerance, in nats, when comparing mean logprobs for the same tokens under the same weights. The tolerance is three times the earlier
mismatch if that is larger."""
FEWEST_MOVED = 50
"""Minimum number of tokens shared by two runs to characterise an update."""
MOVED_BY_DISTANCE = 0.3
"""Minimum correlation between two runs' logprob differences and the distance from the reference, for a KL term to be the cause. In eight
benchmark suites, 10 of 17 KL terms reached it, and 3 of 60 other causes."""
RELOADED = 0.95
"""Minimum correlation between two runs' logprob differences and the distance from the reference, for the weights to have been reset to the
reference as a whole instead."""
REWARD_MOVED = 0.1
"""Minimum ratio of the standard deviation of reward differences between identical responses to that of the rewards,
above which the reward no longer measures the policy: it was at least 0.19 in 7 runs harmed by a length penalty, and
0.05 in one that was not harmed.
"""
SAME_SIZE = 0.9
"""Minimum correlation between |advantage| and |reward - group mean| for advantages to be in the right rows."""
ENTROPY_UNLEARNED = 0.7
"""Minimum ratio of the entropy at the onset to the initial entropy for the policy to count as still uncertain."""
ENTROPY_GONE = 0.1
"""Maximum ratio of the final entropy to the initial entropy for entropy to count as penalised: 5 of 42 collapses caused
by entropy and 8 of 440 others reach both thresholds.
"""
