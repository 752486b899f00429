"""Thresholds of a check, each with its reason."""

MAX_SAMPLED_STEPS = 16
"""Maximum number of steps whose tokens are read: enough to tell a level from a trend, few enough to take seconds."""
MIN_SAMPLED_STEPS = 2
"""Minimum number of steps read, however large: a pair of neighbours."""
MAX_READ_TOKENS = 2_000_000
"""Approximate number of tokens read; whole steps are read, so it may be exceeded."""
MAX_WORST_STEPS = 1
"""Number of steps with the largest mean squared d that are read in addition."""
MAX_SAMPLED_TOKENS = 100_000
"""Maximum number of tokens inspected individually: 0.1 % of them is still 100."""

MIN_MISSING_SHARE = 1e-4
"""Minimum share of NULL values that is reported; below it, a few sequences were cut off, and `stats` counts them."""
MIN_CUT_TOKENS_LOST = 3
"""Minimum number of missing tokens whose place is reported: one or two are at an end by chance."""
MIN_TAIL_SHARE = 0.8
"""Minimum share of the missing tokens at the end (or beginning) of their sequences for these to count as cut off."""

MIN_COPIED_TOKENS = 4
"""Minimum number of bitwise-equal tokens below -1e-3 nats in a copied row."""
COPIED_BY_CHANCE = 1e-4
"""Maximum expected number of rows equal by chance, estimated from how often tokens of the other rows are equal."""

MAX_CONSTANTS = 20
"""Number of most frequent values tested as placeholders."""
MIN_CONSTANT_COUNT = 3
"""Minimum occurrences of a value before it is tested. Engines repeat values too; the other side decides."""
MIN_CONSTANT_TOKENS = 3
"""Minimum number of different token ids with the value: a placeholder is independent of the token."""
MIN_CONSTANT_SPREAD = 0.1
"""Minimum |d| at a constant, nats (and ten times the usual |d|): far beyond rounding."""
MIN_GRID = 1e-5
"""Nats below 0 within which float32 has fewer than 200 logprobs, so many near-certain tokens share one."""
MAX_LOGPROB = 1e-4
"""Largest value accepted as a logprob: float32 sums of a softmax overshoot 0 by 1e-6."""
MAX_NOT_LOGPROBS_SHARE = 0.5
"""Share of values that are not logprobs above which the other detectors are skipped."""
MIN_CORRELATION = 0.3
"""Correlation of two passes' logprobs below which they belong to different tokens or models: with rounding, other weights or
another temperature it stays above 0.8; unrelated values have 0."""
MIN_LOGPROBS = 30
"""Minimum number of tokens for statistics: with fewer, the largest d makes up a third or more of the sum of squares."""
MAX_SHARED_UNIT_SCORE = 4.0
"""Maximum distance of the mean of logprob + entropy from 0 in the right unit, standard errors."""
MIN_SHARED_UNIT_SCORE = 12.0
"""Minimum distance from 0 in the recorded unit, standard errors: truncated sampling, or the entropy at another temperature,
moves it too."""
MIN_SHARED_COUNT = 20
"""Minimum number of tokens with the same bits in both passes before their value is tested as a placeholder."""
MIN_UNCERTAIN_ENTROPY = 0.1
"""Minimum mean entropy, nats, of tokens for which a logprob of 0 is a placeholder: certain tokens have an entropy of 0."""
SHARED_OVER_CHANCE = 10.0
"""Minimum frequency of a shared constant relative to nearby values: ties of rounded logprobs are equally frequent."""
MAX_TIED_DISTANCE = 0.5
"""Distance of the other side from a value at its tokens, relative to elsewhere, below which the two are related: a placeholder is
independent of its tokens."""
MIN_TIED_SHARE = 0.1
"""Minimum share of these tokens on each side of the value: rounding scatters around it, a floor cuts off one side."""
IMPOSSIBLE_LOGPROB = -80.0
"""No sampled token has a probability of exp(-80) = 1e-35: -100, -9999 and the like are placeholders."""
UNSAMPLED_SURPRISE = 1.5
"""Tokens not drawn from the policy have logprobs lower than sampled ones by this factor and by at least one nat."""
MIN_RUN_OF_UNSAMPLED = 2.0
"""Minimum mean run length, in tokens: prompts and tool outputs are runs, lost values are isolated."""

MIN_SPREAD = 1e-3
"""Minimum standard deviation of logprobs, nats, to tell one unit from another."""
BASE_RESIDUAL = 0.25
"""Share of the typical |d| that may remain after converting the unit; the right unit leaves rounding alone."""

CAP_NATS = 3.0
"""Cap on the cost of a token when rows are aligned, so that one impossible value cannot outweigh a row."""
MIN_OFF_NATS = 0.05
"""Minimum mean |d| per token, nats, of a mismatched row: misplaced values differ by half a nat and more."""
REALIGNED_SHARE = 0.35
"""Maximum share of the difference left after a shift: the right one leaves rounding, an unrelated one more than half."""
MIN_SHIFTED_ROWS = 0.8
"""Minimum share of the mismatched rows that agree better when shifted: a shift affects all of them."""
BROKEN_NATS = 1.0
"""Mean |d|, nats, that numerics never reach token after token: the sides scored different tokens."""
SURPRISING_NATS = -5.0
"""Maximum logprob, nats, of the first token that only one side has."""
MIN_BROKEN_ROWS = 0.4
"""Minimum share of the mismatched rows that break at a position that differs by row."""
LAGS = (-3, -2, -1, 0, 1, 2, 3)
"""Shifts tried, in tokens; positive: pass b is late."""
LAG_SWITCH_NATS = 2.0
"""Cost of changing the lag: two tokens' worth of disagreement, so that noise does not trigger a change."""
MIN_ALIGNED_TOKENS = 6
"""Minimum length of the longest row for alignment to show where a shift begins, given LAG_SWITCH_NATS."""
MIN_ALIGNMENT_GAIN_NATS = 4.0
"""Minimum saving of an alignment per row, net of lag changes."""
MIN_REALIGNED_ROWS = 0.05
"""A single realigned row counts only if it is at least this share of the mismatched rows: otherwise it may be chance."""
MIN_LAGGED_TOKENS = 3
"""Minimum number of shifted tokens in a row: fewer agree with a neighbour by chance."""
MAX_ALIGNED_ROWS = 256
"""Maximum number of rows aligned, worst first: alignment takes time, and a fault shows in the worst rows."""
MAX_SHIFTED_ROWS = 64
"""Maximum number of rows aligned to test whether a shift holds from their beginning."""
MAX_PAIRED_ROWS = 64
"""Maximum number of rows per step compared with all rows of the step."""
PAIRED_SHARE = 0.15
"""Maximum share of a row's difference left by its partner: the right row leaves rounding, a chance fit a third."""
MIN_PAIRED_ROWS = 2
"""Minimum number of swapped rows: one alone cannot be swapped."""
MIN_OVER_CHANCE = 3.0
"""Minimum excess of rows with a partner over the number found among randomly permuted rows, in standard deviations of a
Poisson count."""
MIN_PAIRED_TOKENS = 4
"""Minimum overlap of two rows, in tokens: shorter ones agree by chance."""

MIN_REST = 0.02
"""Minimum 1 - p of a token: below it, a logprob hardly shows a change of the logits."""

MIN_LEVEL_RATIO = 3.0
"""Minimum ratio between the mismatches of two parts; in healthy runs lengths, prompts and positions differ by less than 2."""
MIN_OWN_SCORE = 6.0
"""Minimum difference between the variance explained by rises and by drops, over the sequences, in standard errors."""
MIN_PLACE_SCORE = 7.0
"""Minimum difference of the two parts' means of log |d|, in standard errors."""
MIN_STEEPNESS = 0.4
"""Minimum share of a change that happens at its position: a step, not a slope."""
MIN_SIDE_TOKENS = 20
"""Minimum number of tokens on each side of a position."""
MIN_SIDE_POSITIONS = 3
"""Minimum number of positions on each side: the first token alone always differs from those that follow."""
MIN_PLACE_SEQUENCES = 4
"""Minimum number of sequences with their own change position."""
MIN_CUT_TOKENS = 8
"""Minimum number of informative tokens in a sequence searched for its own change position."""

MIN_SUBSET_R2 = 0.3
"""Minimum share of the variance between sequences explained by splitting the values of a column in two."""
ALIKE_R2 = 0.97
"""Columns whose R2 is at least this share of the best one's split the sequences alike; the simplest is reported."""
MIN_SUBSET_TOKENS = 20
"""Minimum number of informative tokens for a mean per value of a column."""
MAX_SUBSET_SHARE = 0.95
"""Maximum share of a subset: a part that is nearly everything accounts for no more than its share."""
MIN_DECLARED_SHARE = 0.95
"""Share of the sequences with a repeated prompt that were sampled by older weights, according to their policy versions, above
which these explain the larger mismatch."""
MAX_GROUPS_SHARE = 0.5
"""The same for prompts, some of which always have a small mismatch."""
MIN_FALL = 1.5
"""Minimum factor by which the mismatch drops from the first third of a sequence to the last if a cached prompt causes it."""
MIN_FALL_SCORE = 4.0
"""The same in standard errors over the sequences."""
MIN_SINCE_SHARE = 0.5
"""Minimum share of the sequences after an onset: less is a short stretch at the end of the run."""
MIN_SUBSET_WIDTHS = 1.0
"""Minimum distance between the two parts, relative to the spread within a part."""

MIN_TEMPERATURE_SHIFT = 0.004
"""Smallest |log T| reported: bfloat16 changes the scale of logits by less."""
MIN_TEMPERATURE_SCORE = 6.0
"""Minimum distance of the fitted scale from 1, standard errors."""
MIN_TEMPERATURE_R2 = 0.6
"""Minimum share of the mismatch explained by one factor: other faults that sharpen a distribution leave far more scatter."""
MIN_TEMPERATURE_TOKENS = 30
"""Minimum number of informative tokens for the fit."""
MAX_TEMPERATURE = 20.0
"""Largest fit accepted as a temperature."""

MAX_MINOR_SHARE = 0.05
"""Maximum share of the larger differences with the wrong sign; for rounding it is one half."""
MIN_LARGE_SHARE = 0.5
"""Minimum share of the sum of d squared in differences beyond rounding."""
MAX_CUT_NATS = 3.0
"""Largest |d| explained by truncation: in practice 5 % of the probability and more is kept."""
MIN_MASS_SCORE = 4.0
"""Minimum distance of the mean of exp(d) below 1, standard errors."""
NUCLEUS_ALONE_SHARE = 0.01
"""Minimum share of tokens that are alone in their nucleus: logprob 0, and lower on the other side."""

MIN_GRID_PAIRS = 6
"""Minimum number of distinct differences between two logits of one context."""
TEMPERATURES = tuple(round(0.3 + 0.01 * step, 2) for step in range(121))
"""Common sampling temperatures, from 0.30 to 1.50."""
GRID_TOLERANCE = {"bfloat16": 0.02, "float16": 0.08}
"""Maximum distance from the grid, in grid steps: at least four times the rounding of a float32 logprob below 16 nats (1e-6 nats)."""
MIN_GRID_SHARE = 0.35
"""Minimum share of the differences on the grid: contexts whose weights changed between two rows are off it."""
GRID_CHANCE = 1e-6
"""Maximum probability that this share is on the grid by chance, over all temperatures tried."""

MIN_ROUNDED_SHARE = 0.95
"""Minimum share of a side's values ending in zero bits; of float32 values one in 65,536 (bfloat16) or 8,192 (float16) does."""
MIN_ROUNDED_TOKENS = 8
"""Minimum number of different values, so that their zero bits are not chance."""

MIN_FAR_SHARE = 0.02
"""Minimum share of a constant's tokens far from it on the other side: others may be nearly certain tokens."""

HALF = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Half a unit in the last place, relative."""
MIN_ROUNDING_SHARE = 0.02
"""Minimum share of the mismatch explained by rounding of the logprobs alone: sums inside the softmax add to it."""

MIN_ALL_ROUNDING_SHARE = 0.5
"""The same if no contract names a dtype and everything but the values is computed in float32."""

MAX_HEALTHY_NOISE = {"bfloat16": 0.08, "float16": 0.012, "tf32": 0.012, "float32": 4e-3, "float64": 4e-3}
"""Maximum noise of the logits from rounding, nats: twice the rms measured between trainers and engines of 0.5 to 8 billion
parameters (0.031 to 0.045 in bfloat16, 0.005 in float16, 0.0019 to 0.0022 in float32). TensorFloat-32 has the mantissa of float16."""
MIN_UNSURE_REST = 0.2
"""Mean 1 - p below which a policy is low-entropy: its logits differ by tens of nats, and rounding is relative to them."""
MAX_UNTOLD_NOISE = 2.0
"""Factor on the allowed noise if the mismatch does not depend on token ids: kernels, lengths, sharpened policies and small models
can round by more than measured. A healthy model of 135 million parameters has 0.1 nats."""
MAX_SURE_NOISE = 8.0
"""Factor on the allowed noise of a low-entropy policy if the mismatch does not depend on token ids: bfloat16 rounds logits of
60 nats to half a nat."""
EXCESS = 0.08
"""Maximum noise, nats, if no dtype is known: bfloat16 is assumed."""
MIN_WEIGHTS_NOISE = 1e-3
"""Noise of the logits, nats, below which other weights are not considered: TensorFloat-32 alone reaches it."""
MIN_TOKEN_EFFECT = 0.15
"""Minimum share of the mismatch explained by token ids: rounding changes with every context, other weights shift a token the same
way."""
MIN_FLOAT32_TOKEN_EFFECT = 0.05
"""The same if both contracts say float32: no weight was rounded, so rounding does not depend on token ids."""
MIN_FLOAT32_TOKEN_SCORE = 8.0
"""MIN_TOKEN_SCORE in that case."""
MIN_TOKEN_SCORE = 5.0
"""Minimum distance of that share from chance, standard deviations."""
MIN_EFFECT_TOKENS = 400
"""Minimum number of different contexts to measure a token effect."""
MIN_EFFECT_IDS = 8
"""Minimum number of different token ids: with a handful, each in few contexts, rounding of a context looks like an effect of the id."""

ROUTER_TAIL_RATIO = 10.0
"""Start of the tail, in multiples of the median noise: rounding alone reaches six to eight."""
MIN_FLIP_NOISE = 1e-3
"""Minimum noise of the logits in the tail, nats: another expert changes them by far more, and float32 rounding has a tail, too."""
MAX_ROUNDED_ROUTER_SHARE = 0.025
"""Maximum tail share expected from routers with 16-bit inputs: scores with an error of 2^-8 change the choice where the first two
are that close, for one token in 100 to 200 per layer."""
ROUTER_TAIL_SHARE = 0.002
"""Minimum share of the tokens in the tail."""
MAX_ROUTER_TAIL_SHARE = 0.1
"""Maximum share of the tokens in the tail if no contract names experts: visible flips are rare."""

TOKEN_SHRINKAGE = 10.0
"""Shrinkage of the mean of a token id, in tokens."""

ROUTER_TOP_SHARE = 0.9
"""Minimum share of the squared noise in the top 2 % of the tokens if routers flip; otherwise it is 25 % to 75 %. Used if no
contract names experts."""
MAX_ROUTER_TOKEN_EFFECT = 0.2
"""Maximum token effect of router flips: a flip depends on the context; other weights, which can look as sparse, on the token."""

UNSAMPLED_NATS = -3.0
"""logprob + entropy, nats, of an unlikely token: 5 % of the tokens of a model with a flat tail are below it."""
MIN_UNSAMPLED_RUN = 4
"""Minimum run length, in tokens; fewer than 2 % of the sequences of healthy runs have such a run."""
MIN_UNSAMPLED_SEQUENCES = 0.05
"""Minimum share of the sequences with such a run."""

MIN_RAISED_TOKENS = 10
"""Minimum number of tokens raised beyond rounding by a grammar: ten have one sign by chance in one of 1,000 traces."""

MIN_LEANING = 0.7
"""MIN_ONE_SIDED if rounding hides part of the signs of d."""
MIN_ONE_SIDED = 0.6
"""Minimum |mean d| / mean |d|: 1 if all d have one sign, 0 if they balance."""
KEPT_VOCABULARY = 0.6
"""Minimum mean of 1 / p relative to the vocabulary size: 1 if all tokens can be sampled."""

UNSAMPLED_STARTS = 5.0
"""Minimum expected number of sequences of a prompt that would start differently if their first tokens were sampled."""

FEW_TOKENS = 500
"""Tokens below which only gross faults can be detected."""
MIN_ALONG = 2.5
"""Minimum alignment of d with the weight updates, in standard errors, for the text to mention it: rounded weights stay below 2."""
MOVEMENT_SHRINKAGE = 3.0
"""Shrinkage of the mean d of a token bigram, in tokens."""
PERSISTENCE_LAGS = (1, 2, 4)
"""Lags, in tokens, at which |d| is correlated: short, so that a change inside the sequence is rarely between the two tokens."""
MIN_PERSISTENCE = 0.07
"""Minimum correlation of |d| between neighbouring tokens if weights changed inside sequences (mostly 0.1 and more); with other
weights it is 0.04 in three of four cases."""
MIN_CLEAR_PERSISTENCE = 0.12
"""The same if the mismatch is no larger than rounding."""
MIN_WHOLE_SCORE = 100.0
"""Minimum difference between sequences, in standard deviations, if whole sequences are affected (one engine of several): a change
during sampling leaves both kinds of tokens in most sequences and stays below 30."""
MIN_SEQUENCE_SCORE = 4.0
"""Minimum difference of |d| between sequences of a step, in standard deviations, if it changes inside them: rounding stays below
2.5, other weights mostly below 4."""
