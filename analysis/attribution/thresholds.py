"""The thresholds of attribution and the points for each kind of evidence, with the reason for each value.

Thresholds for facts are in facts/thresholds.py, those for detecting a drop in facts/fall.py.

Points are log odds (natural logarithm): evidence that is e times as probable if the suspect is the cause as if it is
not gets 1 point. They were set on the tuning split of benchmarks/collapse and tested on its held-out split; WORTH
scales them for other runs. Collapses counted in a reason come from the suites on which the threshold was set, so these
counts are not expected error rates.
"""

from __future__ import annotations

import math

from .suspect import Evidence

WORTH, WORTH_BESIDE = 0.5, 0.3
"""Factor from points to the log odds of the printed probability: for a single run, and for a run with a baseline run.
Both are below 1 because pieces of evidence are not independent and users' runs differ from the tuning suites. The second is lower because
differences from a baseline run overlap. Chosen among five pairs by the left-out results on eleven benchmark suites: it has the lowest log
loss with a baseline run and names a wrong cause with confidence at most once in ten."""
WEAK, MEDIUM, STRONG, DECISIVE, CERTAIN = 0.7, 1.5, 2.5, 4.0, 7.0
"""Points for evidence that is 2, 4.5, 12, 55 and 1,100 times as probable if the suspect is the cause as if it is not. CERTAIN is
reserved for what rows show directly and nothing else explains."""

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
"""Suspect -> points before any evidence, which also account for evidence that is missing. They roughly reflect the
frequency of each cause in eleven benchmark suites; see FACTORS."""

_SIZES = ((0.003, -4.0), (0.01, -3.0), (0.03, -1.5), (0.06, 0.0), (0.15, 1.5), (math.inf, 2.5))
"""Upper bound of mean |d|, in nats -> points. bf16 engines show 0.002 to 0.01 in healthy months-long runs; published collapses
begin above 0.02 (papers on IcePop and VeXact, and benchmarks/collapse)."""
USUAL_ENDING = 0.01
"""A response ending is usual if at least this share of earlier responses has its last token."""
SHORTER = 0.9
"""Responses end sooner if the ratio of their later to their earlier length is at most this."""
ONE_ENDING = 0.9
"""A token has become a stop token if at least this share of a step's responses end with it, but at most half of this
share before that step."""
OTHER_ENDINGS = 0.2
"""Responses are cut off if at least this share of a step's end with an unusual token before the maximum length."""
CUT_SHARE = 0.1
"""Responses are cut off if at least this share of the earlier ones is longer than every later one, and at least this
share of the later ones ends exactly at the maximum length."""
TOGETHER_SD = 3.5
"""Prompts have changed if several of their statistics change at one step by at least this much together: the root of
the summed squares, in standard deviations."""
OF_NO_SCATTER = 10.0
"""A change of an input counts as deliberate from this size up, in standard deviations."""
NEW_PROMPTS = 0.2
"""Prompts have changed if the share of them not seen in any earlier step changes by at least this much."""
OTHER_PATTERNS = 0.1
"""Prompts have changed if the total variation distance of their repetition patterns changes by at least this much."""
RESCALED = 3.0
"""Advantages are rescaled if their scale changes by at least this factor; normalisation alone changes it by less."""
MOVED_BASELINE = 0.5
"""The baseline has changed if the mean advantage changes by at least this many standard deviations of advantages."""
BOTH_SIGNS = 0.1
"""Minimum share of negative advantages in training with a baseline. A tenth of it or less means that the sign or the
baseline was lost."""
INVERTED_ADVANTAGES = -0.3
"""Advantages have the wrong sign below this correlation with rewards within groups; misaligned rows give about 0."""
EARLIER = 3.5
"""Points for a permanent change in an input long before the drop: a policy may take many updates to unlearn."""
BEARABLE = 3.0
"""A learning rate may grow by this factor without harming training; a larger factor can explain a drop by itself."""
SUDDEN = 3.0
"""The reference model was replaced only if the interval of the change is at most this many steps wide; a policy moves
away from its reference more slowly."""

LARGE_MISMATCH = 0.06
"""From this mean |d| on, in nats, a mismatch before the drop stays a possible cause even if something changed later."""

FINDING_CARRIES = 0.1
"""A check finding explains the mismatch only if its tokens account for at least this share of the run's mean |d|."""
MISMATCH_JUMPS = 2.0
"""The mismatch has grown if it increases by at least this factor."""
BEGUN = 0.1
"""The mismatch begins at the first step at which it reaches this share of its size at the onset of the drop."""
LASTS = 0.5
"""The trainer computes differently only if at least this share of a mismatch persists some updates later. Otherwise it
may just have other weights, which the engine receives later. Of six first differences in the trainer's scores, three
came from other weights and three from dropout; none was a mismatch."""
DISAGREES, AGREES = 0.3, 0.05
"""Share of the prefixes repeated within a step that get two different logprobs. If it is at least DISAGREES after the onset of the mismatch
and at most AGREES before it, trainer or engine has become non-deterministic or scores other rows. Of 11 such collapses, eight were engine noise, one a lagging replica, two dropout in the trainer."""

LAG_GROWS = 2.0
"""Sampling has fallen behind at this multiple of the usual recorded lag; waiting for slow sequences causes less."""
LEARNED = 0.1
"""Minimum share of the run, from its start, that shows the conditions under which it learned, such as its usual lag."""
ORDINARY_LAG = 4.0
"""Lag in updates that asynchronous trainers may have by design (AReaL allows 4 to 8, one-step off-policy is 1). A run
that has had a lag of up to this from the start learned with it."""
WAS_THERE = 0.5
"""Reward noise is a possible cause only if the noise before the drop is at most this share of the noise after it; a run
that learned despite the noise did not collapse from it."""
UNEQUAL = 0.01
"""The reward is deterministic if at most this share of repeated responses gets two different rewards; a few come from
verifier timeouts.
"""
DISAGREE, AGREE = 0.15, 0.01
"""Share of identical responses within a step that get two different rewards. If it is at least DISAGREE after a drop and at most AGREE
before, the reward no longer depends on the response alone. Of 10 such collapses, eight were reward noise, one misaligned rewards, one cut-off responses."""
OTHER_RULE = 0.3
"""The reward rule has changed if at least this share of identical responses gets a different reward after a step, while those within one
step agree. Of 31 such collapses, 23 were the reward, five tools or tokens read by a scorer, two answers to other prompts, one a length penalty."""
MUCH_UNEQUAL = 0.3
"""From this share of identical responses with a different reward on, a changed reward rule is nearly certain; anything
else that a verifier reads, such as a tool result, affects a smaller share."""
SORTED = 0.9
"""Rewards have been sorted if at least this share of the groups with unequal rewards has them in sorted order."""
SORTED_BY_CHANCE = 0.5
"""Sorted groups are evidence only if their share before the drop, and by chance, is at most this; rows always recorded
in sorted order show nothing."""
ADVANTAGE_FOLLOWS = 0.3
"""Advantages follow rewards within a step if their correlation is at least this, where every group has one member; a
critic may remove most of the reward."""
ADVANTAGE_AGREES = 0.7
"""Rewards and advantages agree if their correlation within groups is at least this; baselines and scaling leave it at
1, clipping above 0.8."""
CHANGED = 0.05
"""Share of responses whose reward may change although the verifier is the same."""
FEW_CHANGED = 10
"""The verifier has changed only if at least this many responses get a different reward."""
APART = 1.0
"""The sampled policy is not the trained one if the logprobs of engine and trainer differ by at least this much, in nats
per token."""
RETURNS = 0.5
"""A KL term pulls the policy back to at most this share of its distance to the reference; other causes leave more."""
DISTANCE_JUMPS = 3.0
"""The distance between policy and reference jumps if it grows by at least this factor from one step to the next."""
COEFFICIENT_GROWS = 10.0
"""A KL coefficient that grows by this factor while the policy returns to its reference rules out other causes."""
INVERTED = 0.22
"""Rewards are inverted if likelier answers clearly earn less in at least this share of the groups. The share is 0.01 to
0.06 in healthy runs, 0.1 with random rewards, and at least 0.3 if half of the prompts reward the opposite."""
AGAINST = -0.2
"""Likelier answers earn less if the mean correlation between likelihood and reward within groups is below this."""
NO_DIRECTION = 0.15
"""Likelihood and reward are unrelated if their mean correlation within groups is below this. It is 0.58 to 0.82 in
healthy runs and -0.1 to 0.11 with random rewards."""
HIDDEN = 0.3
"""The recorded reward hides a drop if its relative drop is less than this share of the evaluation's."""

PAID_MORE = 0.2
"""The reward is wrong if it grows by at least this share while the evaluation drops; a correct reward hardly ever
diverges from the evaluation like this.
"""
LENGTH_MOVES = 1.3
"""A change of response length by at least this factor is evidence by itself."""
LENGTH_MOVES_PAID = 1.05
"""A change of response length by at least this factor is evidence if longer responses earn more."""

ENTROPY_LOST = 0.25
"""Entropy has collapsed below this share of its initial value; healthy runs keep 0.4 (literature: 0.2 to 0.4)."""
ENTROPY_SHRUNK = 0.6
"""The policy has become more certain while getting worse if its entropy after the drop is below this share of that
before; unlearning makes it less certain."""
MOST_ENTROPY = 14.0
"""Maximum plausible entropy of a policy, in nats per token (ln of a million tokens). Above it, the weights are broken,
or other weights sampled the tokens.
"""
ENTROPY_GAINED = 2.0
"""Entropy has exploded above this multiple of its initial value."""
ENTROPY_CLIMBS = 2.5
"""An entropy bonus is the cause if entropy rises gradually and for good to at least this multiple of its value just
before the drop. It did in 14 of 14 collapses from an entropy bonus in six benchmark suites, and in 11 of 187 others."""
ENTROPY_STAYS = 0.9
"""An entropy bonus is the cause only if rising entropy keeps at least this share of its peak up to the end of the run;
in a broken policy, entropy decreases again."""
CLIMBS_FOR = 2
"""Rising entropy is the cause only if at least this many steps lie between the earliest onset of the drop and the loss
of a good part of the reward: an entropy bonus does not act at once."""

RATE_SPIKE = 3.0
"""A spike of the learning rate is at least this many times its earlier median; a linear warm-up stays at 2."""
RATE_STAYS = 10.0
"""A raised learning rate is the cause only if it is still raised by at least this factor at the onset; training does
not tolerate that for long."""
ABRUPT = 10.0
"""The mismatch grows abruptly if it grows by at least this factor in one step; training alone causes less."""
BENDS = 0.03
"""An abrupt jump of the mismatch affects the run only if mean |d| is at least this afterwards, in nats."""
NORM_JUMPS = 3.0
"""The gradient norm jumps if it grows by at least this factor."""
LEAP = 6.0
"""The optimizer is the cause if an update is more than this many times as large as earlier ones. It was in all 12
collapses with such an update; the largest ratio in 128 others was 4.4."""
BURST = 8.0
"""Single updates this many times the median mean that the optimizer's moving averages are too short or too long."""
LARGE_UPDATE = 0.003
"""An update is large above this ratio of its norm to the weight norm; usual advice for supervised training: 0.001."""
AS_BEFORE = 1.5
"""Updates are unchanged if the largest at the onset is below this multiple of the earlier median."""
HUGE_UPDATE = 0.005
"""Runs rarely keep learning if the norm of an update exceeds this share of the weight norm."""

CUSTOMARY: dict[str, tuple[float, float, float, float]] = {
    "adam_beta1": (0.5, 0.98, 0.8, 0.95),
    "adam_beta2": (0.9, 0.99999, 0.95, 0.999),
    "adam_epsilon": (1e-16, 1e-4, 1e-15, 1e-6),
    "learning_rate": (0.0, 0.01, 1e-6, 1e-3),
}
"""Setting -> (low, high, usual low, usual high). A value outside low to high is evidence for the optimizer. Learning rates are
Adam's, which changes each weight by about that much per update: at 0.01, a layer's weights are replaced within a few updates."""
ENTROPY_WEIGHS = 1.0
"""Entropy coefficient above which a nat of entropy outweighs one sd of normalised advantages; usual: 0 to 0.01."""


def prior(code: str) -> Evidence:
    """Return the points of a suspect before any evidence, as evidence."""
    return Evidence(code="prior", points=_PRIORS[code])


def of_size(mean_abs_d: float) -> float:
    """Return the points for a mismatch of a given size."""
    return next(points for most, points in _SIZES if mean_abs_d <= most)


CONTROL = 7.0
"""Points for an intervention: noise causes such a drop in fewer than one in a thousand healthy runs."""
FELL_TOO = 0.6
"""The baseline run has collapsed, too, if its relative drop is at least this share of the judged run's."""
MISMATCH_DIFFERS = 3.0
"""Two runs' mismatches differ if their ratio is at least this; with the same engine they reach 1.5 by chance."""
MATERIAL_MISMATCH = 0.01
"""Below this mean |d|, in nats, a mismatch does not affect a run; bf16 engines in healthy months-long runs: 0.002-0.01."""
SAMPLED_BY_POLICY = (0.6, 1.6)
"""-mean logprob and recorded entropy cover the same tokens, in nats, if their ratio is in this range."""
UNSAMPLED = 2.0
"""Tokens are not sampled from the engine's logprobs if -mean logprob / entropy grows by at least this factor."""
UNSAMPLED_NATS = 0.5
"""Tokens are not sampled from the engine's logprobs if -mean logprob exceeds entropy by this many nats per token."""
MIXED = 0.5
"""Rewards have been mixed up if the share of rows with a different reward is at least this fraction of that expected
after shuffling rewards within groups."""
MANY_SHARED = 0.3
"""Anything except the weights is compared only if both runs share at least this part of a step's prompts."""
FEWEST_SHARED = 4
"""Weights are compared only if a step has at least this many sequences with prompts of both runs. Prompts can differ
because some trainers drop groups with equal rewards, and so choose prompts by rewards."""
MOSTLY_CUT = 0.8
"""A length limit has cut responses if at least this share of those that differ does so only by ending early."""
LENGTH_SHARE = 0.5
"""A reward that depends on length differs for at least this share of a step's responses."""
TERM_IN_ADVANTAGE = 0.75
"""The reward has a KL term or an entropy bonus if the partial correlation of advantages with the distance to the
reference, or with the logprob, given the baseline run's advantages, is at least this."""
PARTS_FIRST = 7.0
"""Points for the first difference between a run and its baseline run if the two are bitwise identical before it."""
MANY_PART = 0.2
"""Sampling differs if at least this share of a step's responses differs immediately although logprobs are equal."""
GRADIENT_GROWS = 3.0
"""If the first differing update has more than this multiple of the baseline's gradient norm, the difference is not an
entropy bonus. None of 12 bonuses reached 1.6; 7 of 9 KL terms did."""
SHOWS_IN_GRADIENT = 1e-4
"""A loss term shows in the gradient norm if the update changes the policy by at least this much, in nats per token."""
UPDATE_GROWS = 3.0
"""The optimizer is the cause if an update is at least this many times larger than its gradient accounts for: all 5 changed
optimizers reached 17 or more, none of 16 others reached 2."""
MOMENT_DIFFERS = 0.3
"""Adam's settings have changed if its second moment differs by at least this share at the first differing update; one
different gradient causes less.
"""
LOSS_MOVES = 3.0
"""A loss term was added if the loss differs from the baseline run's by at least this multiple of its usual size. All 11
entropy bonuses that reached it lowered the loss; of 7 KL terms and 9 other causes, all but one raised it."""
OF_UPDATES = {"optimizer": 2.0, "entropy": 1.5, "reference": 1.1, "advantages": 1.0}
"""Suspect -> points that reflect how often it caused the first differing update. Of 119 such updates in 7 benchmark
suites, 33 were caused by the optimizer, 25 by entropy, 16 by the reference, and 45 by others.
"""
WEIGHTS_JUMP = 0.4
"""Weights were replaced if, after the first differing update, logprobs differ from the baseline run's by at least this
many nats per token. None of 8 entropy terms and 9 KL terms reached a tenth of it; 11 of 29 other updates did.
"""
AWAY_FROM_REFERENCE = 0.2
"""The cause is not a KL or entropy term if, within three steps, the policy is at least this many nats per token farther
from the reference than the baseline run's: neither term moves it away that fast."""
LOSS_GROWS = 3.0
"""The loss has gained a term if its scatter grows by at least this factor."""
LOSS_PUNISHES, LOSS_RISES = 0.7, 5.0
"""Entropy is penalised if, after a drop, loss and entropy correlate at least this much and the loss rises by at least this many standard
deviations. Two of 304 collapses, with a logged loss and no mismatch that could cause the rise, reach both; in both, entropy was penalised."""
LOSS_GOES, LOSS_SINKS = 0.85, 2.0
"""There is an entropy bonus if, after a drop, loss and entropy have a negative correlation of at least this size and
the loss decreases by at least this many standard deviations.
"""
LOSS_FOLLOWS = 0.95
"""An entropy or KL term dominates the loss if the loss correlates at least this much with entropy or the distance to
the reference. All 10 collapses that reached it with entropy were due to entropy bonuses."""
LENGTH_LITTLE, LENGTH_MOST, LENGTH_NEARLY_ALL = 0.35, 0.7, 0.9
"""Share of the within-step reward variance that length explains. If it is below LENGTH_LITTLE before a drop and at least
LENGTH_MOST after it, rewards have begun to depend on length; at LENGTH_NEARLY_ALL or above, this is certain."""
TERM_WEIGHS = 0.6
"""A KL or entropy term dominates the advantages if, within groups, they correlate at least this much with the distance
to the reference or the logprob."""
FROM_NOTHING = 0.25
"""The mismatch grows update by update if its first step has at most this share of the mismatch some steps later."""
BEYOND_RANGE = 0.2
"""A later reward is beyond the earlier range if it exceeds the maximum by at least this share of the range."""
MANY_BEYOND = 0.05
"""The reward has changed if at least this share of responses has a reward beyond the earlier range."""
ENTROPY_STEPS = 12
"""Minimum number of steps after the first differing update over which two runs' entropies are compared; they are
compared at least up to the drop."""
ENTROPY_FEWEST = 4
"""Minimum number of these steps with an entropy in both runs."""
ENTROPY_HIGHER = 0.9
"""The difference is an entropy bonus if entropy exceeds the baseline's at this share of the compared steps or more."""
WEIGHTS_DIFFER = 1e-5
"""Two trainers have different weights if mean logprobs of a response differ by this many nats; fp32 kernels: 1e-7."""
NORM_DIFFERS = 1e-3
"""Two runs' gradient norms differ if their relative difference is at least this; kernels alone cause less."""
SAME_LOGPROB = 1e-4
"""Minimum tolerance, in nats, when comparing mean logprobs for the same tokens under the same weights; three times the
earlier mismatch if that is larger."""
FEWEST_MOVED = 50
"""Minimum number of tokens that two runs must share to characterise an update."""
MOVED_BY_DISTANCE = 0.3
"""A KL term is the cause if two runs' logprob differences correlate at least this much with the distance to the
reference. In eight benchmark suites, 10 of 17 KL terms reached it, and 3 of 60 other causes."""
RELOADED = 0.95
"""From this correlation on between two runs' logprob differences and the distance to the reference, the weights as a
whole were reset to the reference instead."""
REWARD_MOVED = 0.1
"""The reward no longer measures the policy if reward differences between identical responses have more than this share
of the rewards' standard deviation: it was at least 0.19 in 7 runs harmed by a length penalty, and 0.05 in one that was
not harmed.
"""
SAME_SIZE = 0.9
"""Advantages are in the right rows if |advantage| and |reward - group mean| correlate at least this much."""
ENTROPY_UNLEARNED = 0.7
"""The policy is still uncertain if it has at least this share of the initial entropy at the onset."""
ENTROPY_GONE = 0.1
"""Entropy counts as penalised if it ends below this share of its value at the onset: 5 of 42 collapses caused by
entropy and 8 of 440 others reach both thresholds.
"""
