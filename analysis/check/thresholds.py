"""Thresholds of a check, each with its reason."""

MAX_SAMPLED_STEPS = 16
"""Maximum number of steps whose tokens are read: enough to tell a level from a trend, few enough to take seconds."""
MIN_SAMPLED_STEPS = 2
"""Minimum number of steps whose tokens are read, even if they exceed MAX_READ_TOKENS: two neighbouring steps."""
MAX_READ_TOKENS = 2_000_000
"""Approximate maximum number of tokens read from disk. Only whole steps are read, so the actual number may be
larger."""
MAX_WORST_STEPS = 1
"""Number of additional steps read: those with the largest mean squared d."""
MAX_SAMPLED_TOKENS = 100_000
"""Maximum number of tokens inspected individually. A fault in 0.1 % of the tokens still affects 100 of these."""

MIN_MISSING_SHARE = 1e-4
"""Minimum share of NULL logprobs for a finding. A smaller share means that a few sequences were cut off; `stats` counts
them."""
MIN_CUT_TOKENS_LOST = 3
"""Minimum number of missing tokens needed to report where in the sequence they are: one or two can be at an end by
chance."""
MIN_TAIL_SHARE = 0.8
"""Minimum share of the missing tokens that must be at the end (or beginning) of sequences for the sequences to count as
cut off."""

MIN_COPIED_TOKENS = 4
"""Minimum number of bitwise-equal logprobs below -1e-3 nats for a row to count as copied."""
COPIED_BY_CHANCE = 1e-4
"""Maximum expected number of rows that are equal by chance, estimated from the share of equal tokens in all other rows.
Above it, equal rows are not reported as copies."""

MAX_CONSTANTS = 20
"""Maximum number of values tested as placeholders, most frequent first."""
MIN_CONSTANT_COUNT = 3
"""Minimum number of occurrences for a value to be tested as a placeholder. Genuine logprobs repeat too, so the values
of the other pass decide."""
MIN_CONSTANT_TOKENS = 3
"""Minimum number of different token ids that share a value for it to count as a placeholder, which does not depend on
the token."""
MIN_CONSTANT_SPREAD = 0.1
"""Minimum |d|, nats, at the tokens of a constant for it to count as a placeholder. |d| must also be at least ten times
the typical |d| of the run, so rounding cannot explain it."""
MIN_GRID = 1e-5
"""Range below 0, nats, in which float32 can represent fewer than 200 logprobs, so many near-certain tokens share a
value. Repeated values in this range are not treated as placeholders."""
MAX_LOGPROB = 1e-4
"""Largest value accepted as a logprob, nats: rounding in a float32 softmax can give logprobs up to 1e-6 above 0."""
MAX_NOT_LOGPROBS_SHARE = 0.5
"""Share of values that are not logprobs above which the other detectors are skipped."""
MIN_CORRELATION = 0.3
"""Minimum correlation between the logprobs of two passes; below it, they belong to different tokens or models. With
rounding, different weights or a different temperature, the correlation stays above 0.8; for unrelated values it is
0."""
MIN_LOGPROBS = 30
"""Minimum number of tokens for the statistical detectors: with fewer, the largest d alone contributes a third or more
of the sum of squares."""
MAX_SHARED_UNIT_SCORE = 4.0
"""Maximum distance between 0 and the mean of logprob + entropy, in standard errors, for a unit to be accepted as
correct."""
MIN_SHARED_UNIT_SCORE = 12.0
"""Minimum distance between 0 and the mean of logprob + entropy, in standard errors, for the recorded unit to be
rejected. Truncated sampling, or an entropy taken at a different temperature, also shifts this mean, so the threshold is
high."""
MIN_SHARED_COUNT = 20
"""Minimum number of tokens at which both passes hold the same value, bit for bit, for that value to be tested as a
placeholder."""
MIN_UNCERTAIN_ENTROPY = 0.1
"""Minimum mean entropy, nats, at tokens with a logprob of 0 for that 0 to count as a placeholder. Where the policy is
certain of a token, the entropy is 0."""
SHARED_OVER_CHANCE = 10.0
"""Minimum ratio between the frequency of a value shared by both passes and that of nearby values, for it to count as a
placeholder. Rounded logprobs that coincide by chance are no more frequent than their neighbours."""
MAX_TIED_DISTANCE = 0.5
"""Maximum distance between a repeated value and the other pass's logprobs at the same tokens, as a share of that
distance at all other tokens. Below it, the value depends on the tokens, so it is not a placeholder."""
MIN_TIED_SHARE = 0.1
"""Minimum share of the tokens with a repeated value whose logprobs in the other pass are above it, and below it.
Rounding scatters to both sides; a floor cuts off all lower values."""
IMPOSSIBLE_LOGPROB = -80.0
"""Logprob, nats, below which a value is a placeholder, such as -100 or -9999: no sampled token has a probability of
exp(-80), about 1e-35."""
UNSAMPLED_SURPRISE = 1.5
"""Minimum ratio between the mean surprisal (negative logprob) of suspected tokens and that of sampled tokens. If it is
exceeded, and the difference is at least one nat, the suspected tokens were not drawn from the policy."""
MIN_RUN_OF_UNSAMPLED = 2.0
"""Minimum mean length, in tokens, of runs of suspected tokens for them to count as prompt or tool tokens, which are
contiguous; lost values are isolated."""

MIN_SPREAD = 1e-3
"""Minimum standard deviation of logprobs, nats, for units to be distinguishable."""
BASE_RESIDUAL = 0.25
"""Maximum share of the typical |d| that may remain after converting one pass from another unit; the correct unit leaves
only rounding."""

CAP_NATS = 3.0
"""Maximum cost of a token, nats, when rows are aligned, so that one impossible value cannot outweigh the rest of the
row."""
MIN_OFF_NATS = 0.05
"""Minimum mean |d| per token, nats, for a row to count as mismatched: misplaced values differ by half a nat or more."""
REALIGNED_SHARE = 0.35
"""Maximum share of the difference that may remain after a row is shifted: the correct shift leaves only rounding, any
other more than half."""
MIN_SHIFTED_ROWS = 0.8
"""Minimum share of the mismatched rows that agree better when shifted: a shift affects all of them."""
BROKEN_NATS = 1.0
"""Minimum mean |d|, nats, over consecutive tokens that shows that trainer and engine scored different tokens. Numerical
error never reaches it over several tokens."""
SURPRISING_NATS = -5.0
"""Maximum logprob, nats, on one side, of the first token at which the texts of trainer and engine differ."""
MIN_BROKEN_ROWS = 0.4
"""Minimum share of the mismatched rows that agree up to some position and disagree after it, the position differing by
row."""
LAGS = (-3, -2, -1, 0, 1, 2, 3)
"""Shifts tried, in tokens; a positive shift means that the values of pass b come later."""
LAG_SWITCH_NATS = 2.0
"""Cost, nats, of each change of the lag within a row. It equals the disagreement at about two tokens, so that noise
alone does not cause a change."""
MIN_ALIGNED_TOKENS = 6
"""Minimum length, in tokens, of the longest row for an alignment to show where a shift begins: in shorter rows, a shift
cannot save LAG_SWITCH_NATS."""
MIN_ALIGNMENT_GAIN_NATS = 4.0
"""Minimum cost, nats, that aligning a row must save after subtracting the cost of lag changes."""
MIN_REALIGNED_ROWS = 0.05
"""A single realigned row counts only if it is at least this share of the mismatched rows: otherwise it may be
chance."""
MIN_LAGGED_TOKENS = 3
"""Minimum number of shifted tokens for a row to count as shifted: fewer can agree with a neighbouring token by
chance."""
MAX_ALIGNED_ROWS = 256
"""Maximum number of rows aligned, those with the largest difference first: alignment is slow, and a fault shows in
these rows."""
MAX_SHIFTED_ROWS = 64
"""Maximum number of rows aligned to test whether a shift begins at the first token."""
MAX_PAIRED_ROWS = 64
"""Maximum number of rows per step compared with all rows of the step."""
PAIRED_SHARE = 0.15
"""Maximum share of a row's difference that may remain when it is compared with another row instead. The correct row
leaves only rounding, a chance match a third."""
MIN_PAIRED_ROWS = 2
"""Minimum number of swapped rows for a finding: a swap involves at least two."""
MIN_OVER_CHANCE = 3.0
"""Minimum number of rows with a better-matching partner, in excess of the number found after randomly permuting the
rows, in standard deviations of a Poisson count."""
MIN_PAIRED_TOKENS = 4
"""Minimum number of tokens that two rows must have in common to be compared: rows with a shorter overlap agree by
chance."""

MIN_REST = 0.02
"""Minimum 1 - p for a token to be informative, with p its probability: below it, a change in the logits hardly affects
the logprob."""

MIN_LEVEL_RATIO = 3.0
"""Minimum ratio between the mismatch in two parts of the data. In healthy runs, the mismatch varies by less than a
factor of 2 between lengths, prompts or positions."""
MIN_OWN_SCORE = 6.0
"""Minimum difference between the variance explained by a rise and that explained by a drop within each sequence, in
standard errors over the sequences."""
MIN_PLACE_SCORE = 7.0
"""Minimum difference between the mean log |d| after a position and before it, in standard errors."""
MIN_STEEPNESS = 0.4
"""Minimum share of a change that must occur at one position for it to count as a jump rather than a slope."""
MIN_SIDE_TOKENS = 20
"""Minimum number of tokens before and after a position tested for a change."""
MIN_SIDE_POSITIONS = 3
"""Minimum number of positions before and after a position tested for a change: the first token always differs from the
rest."""
MIN_PLACE_SEQUENCES = 4
"""Minimum number of sequences in which the mismatch changes at a sequence-specific position."""
MIN_CUT_TOKENS = 8
"""Minimum number of informative tokens for a sequence to be searched for a change position."""

MIN_SUBSET_R2 = 0.3
"""Minimum share of the variance between sequences that must be explained by dividing a column's values into two
sets."""
ALIKE_R2 = 0.97
"""Columns whose R2 is at least this share of the best column's R2 count as equally good; the simplest is reported."""
MIN_SUBSET_TOKENS = 20
"""Minimum number of informative tokens with a given column value for their mean to be used."""
MAX_SUBSET_SHARE = 0.95
"""Maximum share of the data that a subset may cover: a mismatch in nearly all of the data is not concentrated
anywhere."""
MIN_DECLARED_SHARE = 0.95
"""Minimum share of the repeated-prompt sequences that were sampled by older weights according to their policy versions.
Above it, the older weights explain the larger mismatch, and no prefix cache is suspected."""
MAX_GROUPS_SHARE = 0.5
"""Maximum share of the data that a subset of prompts may cover. It is lower than MAX_SUBSET_SHARE because some prompts
always have a small mismatch."""
MIN_FALL = 1.5
"""Minimum factor by which the mismatch drops from the first third of a sequence to the last if a cached prompt causes
it."""
MIN_FALL_SCORE = 4.0
"""Minimum drop of the mismatch from the first to the last third of a sequence, in standard errors over the sequences,
if a cached prompt causes it."""
MIN_SINCE_SHARE = 0.5
"""Minimum share of the sequences that must come after an onset; otherwise it only affects a short stretch at the end of
the run."""
MIN_SUBSET_WIDTHS = 1.0
"""Minimum distance between the mean mismatch levels of two parts, relative to the spread within a part."""

MIN_TEMPERATURE_SHIFT = 0.004
"""Minimum |log T| for a temperature T to be reported: rounding to bfloat16 changes the scale of logits by less."""
MIN_TEMPERATURE_SCORE = 6.0
"""Minimum distance between the fitted logit scale and 1, in standard errors."""
MIN_TEMPERATURE_R2 = 0.6
"""Minimum share of the mismatch that must be explained by scaling the logits with one factor. Other faults that sharpen
a distribution leave far more scatter."""
MIN_TEMPERATURE_TOKENS = 30
"""Minimum number of informative tokens for fitting a temperature."""
MAX_TEMPERATURE = 20.0
"""Largest fitted value accepted as a temperature."""

MAX_MINOR_SHARE = 0.05
"""Maximum share of the larger differences d that may have the opposite sign if tokens were cut off; for rounding it is
one half."""
MIN_LARGE_SHARE = 0.5
"""Minimum share of the sum of d^2 that must come from differences larger than rounding."""
MAX_CUT_NATS = 3.0
"""Largest |d|, nats, that truncation can explain: in practice, truncation keeps at least 5 % of the probability
mass."""
MIN_MASS_SCORE = 4.0
"""Minimum amount by which the mean of exp(d) must be below 1, in standard errors."""
NUCLEUS_ALONE_SHARE = 0.01
"""Minimum share of tokens that are the only one in their nucleus: logprob 0 on one side, and a lower one on the
other."""

MIN_GRID_PAIRS = 6
"""Minimum number of distinct logit differences, each between two tokens in the same context, needed to infer a
dtype."""
TEMPERATURES = tuple(round(0.3 + 0.01 * step, 2) for step in range(121))
"""Sampling temperatures tried when looking for a grid: 0.30 to 1.50 in steps of 0.01."""
GRID_TOLERANCE = {"bfloat16": 0.02, "float16": 0.08}
"""dtype -> maximum distance between a logit difference and the nearest grid point, in grid steps. It is at least four
times the rounding error of a float32 logprob below 16 nats (1e-6 nats)."""
MIN_GRID_SHARE = 0.35
"""Minimum share of the logit differences that must be on the grid. It is below 1 because the weights may change between
two rows with the same context."""
GRID_CHANCE = 1e-6
"""Maximum probability that the observed share of logit differences is on the grid by chance, over all temperatures
tried."""

MIN_ROUNDED_SHARE = 0.95
"""Minimum share of a pass's float32 values whose low bits are zero, for them to count as rounded to a 16-bit dtype. By
chance, one in 65,536 (bfloat16) or 8,192 (float16) has zero low bits."""
MIN_ROUNDED_TOKENS = 8
"""Minimum number of different logprobs needed to infer a 16-bit dtype from zero low bits."""

MIN_FAR_SHARE = 0.02
"""Minimum share of the tokens with a constant value whose logprob in the other pass is far from it. The remaining
tokens may be nearly certain."""

HALF = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
"""dtype -> half a unit in the last place, relative to the value."""
MIN_ROUNDING_SHARE = 0.02
"""Minimum share of the mismatch that rounding of the logprobs alone must explain if the head has low precision. Sums
inside the softmax add further error, so the share is small."""

MIN_ALL_ROUNDING_SHARE = 0.5
"""MIN_ROUNDING_SHARE if no contract names a dtype, so that only the recorded values are known to be of low
precision."""

MAX_HEALTHY_NOISE = {"bfloat16": 0.08, "float16": 0.012, "tf32": 0.012, "float32": 4e-3, "float64": 4e-3}
"""dtype -> maximum logit noise from rounding, nats: twice the rms measured between trainer and engine for models with
0.5 to 8 billion parameters (0.031 to 0.045 in bfloat16, 0.005 in float16, 0.0019 to 0.0022 in float32). TensorFloat-32
has as many mantissa bits as float16."""
MIN_UNSURE_REST = 0.2
"""Mean 1 - p below which a policy counts as low-entropy. Its logits differ by tens of nats, and rounding errors are
proportional to the logits."""
MAX_UNTOLD_NOISE = 2.0
"""Factor applied to the allowed noise if the mismatch does not depend on token ids: with some kernels, long sequences,
sharpened policies and small models, rounding exceeds MAX_HEALTHY_NOISE. It is 0.1 nats for a healthy model with 135
million parameters."""
MAX_SURE_NOISE = 8.0
"""Factor applied to the allowed noise for a low-entropy policy if the mismatch does not depend on token ids: bfloat16
rounds logits near 60 nats to multiples of a quarter of a nat."""
EXCESS = 0.08
"""Maximum logit noise from rounding, nats, if no dtype is known: bfloat16 is assumed."""
MIN_WEIGHTS_NOISE = 1e-3
"""Minimum logit noise, nats, for different weights to be considered as the cause: TensorFloat-32 alone can cause this
much."""
MIN_TOKEN_EFFECT = 0.15
"""Minimum share of the mismatch explained by token ids if weights differ. Rounding errors vary with the context;
different weights shift a token's logprob in the same direction in every context."""
MIN_FLOAT32_TOKEN_EFFECT = 0.05
"""MIN_TOKEN_EFFECT if both contracts say float32: no weight was rounded, so rounding does not depend on token ids."""
MIN_FLOAT32_TOKEN_SCORE = 8.0
"""MIN_TOKEN_SCORE if both contracts say float32."""
MIN_TOKEN_SCORE = 5.0
"""Minimum distance between the share of the mismatch explained by token ids and the share expected by chance, in
standard deviations."""
MIN_EFFECT_TOKENS = 400
"""Minimum number of different contexts needed to measure the share of the mismatch explained by token ids."""
MIN_EFFECT_IDS = 8
"""Minimum number of different token ids needed to measure the share of the mismatch explained by them. With only a few
ids, each in few contexts, rounding in one context looks like an effect of the id."""

ROUTER_TAIL_RATIO = 10.0
"""Logit noise above which a token is in the tail, in multiples of the median: rounding alone reaches six to eight."""
MIN_FLIP_NOISE = 1e-3
"""Minimum logit noise, nats, for a token to be in the tail. A different expert changes the logits by far more; float32
rounding also has a tail, but a smaller one."""
MAX_ROUNDED_ROUTER_SHARE = 0.025
"""Maximum share of the tokens that are expected in the tail if routers have 16-bit inputs. Router scores then have an
error of 2^-8, which changes the selected expert where two scores are that close: for one token in 100 to 200 per
layer."""
ROUTER_TAIL_SHARE = 0.002
"""Minimum share of the tokens in the tail for router flips to be reported."""
MAX_ROUTER_TAIL_SHARE = 0.1
"""Maximum share of the tokens in the tail for router flips to be reported if no contract names experts: visible flips
are rare."""

TOKEN_SHRINKAGE = 10.0
"""Strength of the shrinkage towards the overall mean when averaging per token id, as a number of added tokens."""

ROUTER_TOP_SHARE = 0.9
"""Minimum share of the summed squared noise that is in the noisiest 2 % of the tokens if routers flip; without flips
the share is 25 % to 75 %. Used if no contract names experts."""
MAX_ROUTER_TOKEN_EFFECT = 0.2
"""Maximum share of the mismatch explained by token ids for it to be attributed to router flips. A flip depends on the
context; different weights can cause an equally sparse mismatch, but it depends on the token."""

UNSAMPLED_NATS = -3.0
"""logprob + entropy, nats, below which a token counts as unlikely. With a flat-tailed model, 5 % of sampled tokens are
below it."""
MIN_UNSAMPLED_RUN = 4
"""Minimum number of consecutive unlikely tokens that suggests they were not sampled. In healthy runs, fewer than 2 % of
the sequences contain as many."""
MIN_UNSAMPLED_SEQUENCES = 0.05
"""Minimum share of the sequences that contain MIN_UNSAMPLED_RUN consecutive unlikely tokens."""

MIN_RAISED_TOKENS = 10
"""Minimum number of tokens whose logprobs a grammar raises by more than rounding. By chance, ten differences all have
one sign in one of 1,000 traces."""

MIN_LEANING = 0.7
"""MIN_ONE_SIDED if rounding hides the sign of d at some tokens."""
MIN_ONE_SIDED = 0.6
"""Minimum |mean d| / mean |d| for a mismatch to count as one-sided: the ratio is 1 if all d have one sign, 0 if they
cancel out."""
KEPT_VOCABULARY = 0.6
"""Minimum mean of 1 / p relative to the vocabulary size for the whole vocabulary to count as kept: the ratio is 1 if
every token can be sampled."""

UNSAMPLED_STARTS = 5.0
"""Minimum expected number of sequences per prompt that would start with a different token if first tokens were
sampled."""

FEW_TOKENS = 500
"""Number of tokens below which only gross faults can be detected."""
MIN_ALONG = 2.5
"""Minimum alignment between d and the weight updates, in standard errors, for the text to mention it: rounded weights
stay below 2."""
MOVEMENT_SHRINKAGE = 3.0
"""Strength of the shrinkage towards 0 when averaging d per token bigram, as a number of added tokens."""
PERSISTENCE_LAGS = (1, 2, 4)
"""Lags, in tokens, at which the autocorrelation of |d| is measured. They are short, so that a change inside a sequence
rarely falls between the two tokens compared."""
MIN_PERSISTENCE = 0.07
"""Minimum correlation of |d| between neighbouring tokens if weights changed inside sequences, where it is mostly 0.1 or
more. If weights differ throughout a sequence, it is at most 0.04 in three of four cases."""
MIN_CLEAR_PERSISTENCE = 0.12
"""MIN_PERSISTENCE if the mismatch is no larger than rounding."""
MIN_WHOLE_SCORE = 100.0
"""Minimum difference of |d| between sequences, in standard deviations, if whole sequences are affected, as by one of
several engines. A change during sampling leaves affected and unaffected tokens in most sequences, and the difference
stays below 30."""
MIN_SEQUENCE_SCORE = 4.0
"""Minimum difference of |d| between sequences in one step, in standard deviations, if |d| changes inside sequences.
With rounding it stays below 2.5, with different weights mostly below 4."""
