"""Every number that a check decides by, with the reason for it."""

MAX_SAMPLED_STEPS = 16
"""Steps whose tokens are read: enough to tell a level from a trend, few enough that a long run takes seconds."""
MIN_SAMPLED_STEPS = 2
"""A pair of neighbours, however large a step is."""
MAX_READ_TOKENS = 2_000_000
"""Tokens of the steps that are read: a run is looked at in seconds, and a step is read as a whole."""
MAX_WORST_STEPS = 1
"""Steps with the largest mean d squared that are read beside those."""
MAX_SAMPLED_TOKENS = 100_000
"""Tokens of these that are inspected individually: a share of 1e-3 of them is still 100."""

MIN_MISSING_SHARE = 1e-4
"""Share of lost values; fewer are a few cut-off sequences of a run, which `stats` counts as num_nan and NULL."""
MIN_CUT_TOKENS_LOST = 3
"""Lost tokens from which on their place is told: one or two stand at an end by chance."""
MIN_TAIL_SHARE = 0.8
"""Share of the missing tokens at the end (or beginning) of their sequence from which on it was cut, not riddled."""

MIN_COPIED_TOKENS = 4
"""Tokens below -1e-3 nats that agree bit for bit in a copied row."""
COPIED_BY_CHANCE = 1e-4
"""Rows that may be expected to agree by chance, going by how often the other rows' tokens do."""

MAX_CONSTANTS = 20
"""Most frequent values that are looked at as possible placeholders."""
MIN_CONSTANT_COUNT = 3
"""A value that comes so often is looked at; engines repeat values too, and the other side decides."""
MIN_CONSTANT_TOKENS = 3
"""Different tokens that have the value: a placeholder does not look at the token."""
MIN_CONSTANT_SPREAD = 0.1
"""Nats by which the other side must differ, and ten times its usual difference: far beyond what rounding does."""
MIN_GRID = 1e-5
"""Nats below 0 within which float32 has less than 200 logprobs: of tokens that an engine is certain of many have the same."""
MAX_LOGPROB = 1e-4
"""A logprob is 0 at most; float32 sums of a softmax overshoot by 1e-6, and values above this are none."""
MAX_NOT_LOGPROBS_SHARE = 0.5
"""Where more of the values are no logprobs, nothing else is asked of the pass."""
MIN_CORRELATION = 0.3
"""Correlation of two passes' logprobs below which they are of different tokens or models: rounding, other weights and
another temperature leave 0.8 and more, and unrelated values have 0."""
MIN_LOGPROBS = 30
"""Tokens below which no statistic is asked: the largest d of so few carries a third of their sum of squares and more."""
MAX_SHARED_UNIT_SCORE = 4.0
"""Standard errors within which logprob + entropy averages to 0 in the right unit, which both passes share."""
MIN_SHARED_UNIT_SCORE = 12.0
"""Standard errors by which it must miss 0 as the values stand: sampling that is cut off, or another temperature's entropy, moves
it too."""
MIN_SHARED_COUNT = 20
"""Tokens at which both passes have one value to the last bit before that value is looked at as one that stands for none."""
MIN_UNCERTAIN_ENTROPY = 0.1
"""Mean entropy, nats, of tokens whose logprob 0 is none: that of certain tokens is 0, as their logprob is."""
SHARED_OVER_CHANCE = 10.0
"""Times as many tokens as the values next to it have: ties of rounded logprobs come at every value of the grid alike."""
MAX_TIED_DISTANCE = 0.5
"""How near the other side lies to a value at its tokens, against its distance elsewhere: a placeholder does not know its tokens."""
MIN_TIED_SHARE = 0.1
"""Share of these tokens on either side of the value: rounding lies around it, what a floor cut off lies below."""
IMPOSSIBLE_LOGPROB = -80.0
"""No sampled token has exp(-80) = 1e-35: -100, -9999 and the like say "none"."""
UNSAMPLED_SURPRISE = 1.5
"""Tokens that the policy did not draw have logprobs lower by this factor, and a nat more, than those that it drew."""
MIN_RUN_OF_UNSAMPLED = 2.0
"""Prompts and tool outputs are runs; a lost value is alone or at random."""

MIN_SPREAD = 1e-3
"""Logprobs that vary less cannot tell one unit from another."""
BASE_RESIDUAL = 0.25
"""Another unit must remove three quarters of the typical |d|; the true one removes all but rounding."""

CAP_NATS = 3.0
"""A token counts at most so much when rows are aligned, so that one impossible value cannot outweigh a row."""
MIN_OFF_NATS = 0.05
"""Rows that differ by less a token are not searched for another partner: misplaced values differ by half a nat and more."""
REALIGNED_SHARE = 0.35
"""The true partner or place leaves rounding; an unrelated one that fits by chance leaves more than half."""
MIN_SHIFTED_ROWS = 0.8
"""Share of the rows that must agree better when moved: a shift befalls them all, other tokens some."""
BROKEN_NATS = 1.0
"""A difference that no numerics make in token after token: the sides look at different tokens."""
SURPRISING_NATS = -5.0
"""Logprob of the first token that only one side has."""
MIN_BROKEN_ROWS = 0.4
"""Share of the rows that are off which break at a place of their own."""
LAGS = (-3, -2, -1, 0, 1, 2, 3)
"""Tokens by which a value may stand too late."""
LAG_SWITCH_NATS = 2.0
"""What a change of the lag costs: two tokens' worth of disagreement, so that noise does not buy one."""
MIN_ALIGNED_TOKENS = 6
"""Tokens of the longest row from which on alignment can tell where a shift begins: a change of the lag costs two tokens' worth."""
MIN_ALIGNMENT_GAIN_NATS = 4.0
"""What alignment must save in a row after paying for the changes."""
MIN_REALIGNED_ROWS = 0.05
"""Share of the rows that are off which agree when moved, where only one does: that may be chance."""
MIN_LAGGED_TOKENS = 3
"""Fewer tokens than this agree with a neighbour by chance."""
MAX_ALIGNED_ROWS = 256
"""Rows that are aligned, those that are most off: alignment takes time, and a fault shows in the worst rows."""
MAX_SHIFTED_ROWS = 64
"""Rows that are aligned to see whether a shift holds from their beginning."""
MAX_PAIRED_ROWS = 64
"""Rows of a step that are tried against all of its rows."""
PAIRED_SHARE = 0.15
"""What the true partner of a row leaves of its difference: rounding, where another row that fits by chance leaves a third."""
MIN_PAIRED_ROWS = 2
"""One row alone cannot be swapped."""
MIN_OVER_CHANCE = 3.0
"""Standard deviations by which more rows must find a partner than find one among rows whose values were exchanged at
random: a Poisson number of these is chance."""
MIN_PAIRED_TOKENS = 4
"""Shorter overlaps agree by chance."""

MIN_REST = 0.02
"""Tokens with less than this left of their probability hardly show what happened to the logits."""

MIN_LEVEL_RATIO = 3.0
"""Factor between the mismatches of two parts; lengths, prompts and positions of healthy runs differ by less than two."""
MIN_OWN_SCORE = 6.0
"""Standard errors by which one direction of change explains more than the other, over the sequences."""
MIN_PLACE_SCORE = 7.0
"""Standard errors between the two parts' means of log |d|."""
MIN_STEEPNESS = 0.4
"""A place is a step: most of the change happens at it."""
MIN_SIDE_TOKENS = 20
"""Tokens on either side of a place."""
MIN_SIDE_POSITIONS = 3
"""Positions on either side: a first token alone is always another one than those that follow."""
MIN_PLACE_SEQUENCES = 4
"""Sequences that have a place of their own."""
MIN_CUT_TOKENS = 8
"""Telling tokens of a sequence that is asked for a place of its own."""

MIN_SUBSET_R2 = 0.3
"""Share of the variance between sequences that a division of a column must explain."""
ALIKE_R2 = 0.97
"""Two columns that explain so nearly the same divide the sequences alike, and the plainer is named."""
MIN_SUBSET_TOKENS = 20
"""Telling tokens of a value of a column, so that its mean is one."""
MAX_SUBSET_SHARE = 0.95
"""A part that is nearly everything carries no more than its share."""
MIN_DECLARED_SHARE = 0.95
"""Of the sequences whose prompt came before, and whose mismatch is the larger: the share that older weights sampled by their policy
versions, above which these explain it."""
MAX_GROUPS_SHARE = 0.5
"""The same for prompts, of which some always lie low together."""
MIN_FALL = 1.5
"""Factor by which the mismatch falls from the first third of the sequences to the last where a cached prompt makes it."""
MIN_FALL_SCORE = 4.0
"""The same in standard errors over the sequences."""
MIN_SINCE_SHARE = 0.5
"""Share of the sequences that the rest of a run must be to be one: less is a stretch of steps at its end."""
MIN_SUBSET_WIDTHS = 1.0
"""The two parts' values lie apart by at least the spread within a part."""

MIN_TEMPERATURE_SHIFT = 0.004
"""Smallest |log T| that is reported: what bfloat16 does to the scale of logits stays below."""
MIN_TEMPERATURE_SCORE = 6.0
"""Standard errors by which the fitted scale must lie off 1."""
MIN_TEMPERATURE_R2 = 0.6
"""Share of the mismatch that one factor must explain: other faults that sharpen a distribution leave far more scatter."""
MIN_TEMPERATURE_TOKENS = 30
"""Telling tokens of the fit."""
MAX_TEMPERATURE = 20.0
"""Beyond it a fit is no temperature."""

MAX_MINOR_SHARE = 0.05
"""Share of the larger differences that may have the wrong sign: of rounding half of them have it."""
MIN_LARGE_SHARE = 0.5
"""Share of the sum of d squared in differences beyond rounding."""
MAX_CUT_NATS = 3.0
"""Largest |d| of a kept mass: 5 % and more of the probability is kept wherever people truncate."""
MIN_MASS_SCORE = 4.0
"""Standard errors by which the mean of exp(d) must lie below 1."""
NUCLEUS_ALONE_SHARE = 0.01
"""Share of tokens whose nucleus they fill alone, with logprob 0, while the other side gives them less."""

MIN_GRID_PAIRS = 6
"""Different distances between two logits of one context."""
TEMPERATURES = tuple(round(0.3 + 0.01 * step, 2) for step in range(121))
"""Sampling temperatures that people set, from 0.30 to 1.50."""
GRID_TOLERANCE = {"bfloat16": 0.02, "float16": 0.08}
"""Grid steps: what rounding of a float32 logprob below 16 nats leaves (1e-6 nats), times four and more."""
MIN_GRID_SHARE = 0.35
"""Share of the differences on the grid: contexts whose weights changed between two rows are off it."""
GRID_CHANCE = 1e-6
"""Probability that this share lies on the grid by chance, over all temperatures that were tried."""

MIN_ROUNDED_SHARE = 0.95
"""Share of a side's values that end in zero bits; of float32 values one in 65,536 does, or in 8,192."""
MIN_ROUNDED_TOKENS = 8
"""Different values, so that their zero bits are no chance."""

MIN_FAR_SHARE = 0.02
"""Share of a constant's tokens that the other side puts far off: a lost value may stand at a token that is nearly certain."""

HALF = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Half a unit in the last place, relative."""
MIN_ROUNDING_SHARE = 0.02
"""Share of the mismatch that rounding of the logprobs alone must explain: the sums inside of such a softmax add to it."""

MIN_ALL_ROUNDING_SHARE = 0.5
"""The same where no contract names a dtype and all but the values is computed in float32."""

MAX_HEALTHY_NOISE = {"bfloat16": 0.08, "float16": 0.012, "tf32": 0.012, "float32": 4e-3, "float64": 4e-3}
"""Noise of the logits that rounding gives at most, nats: twice what was measured between trainers and engines of 0.5 to 8
billion parameters (rms 0.031 to 0.045 in bfloat16, 0.005 in float16, 0.0019 to 0.0022 in float32). TensorFloat-32 keeps as many bits
of a factor as float16."""
MIN_UNSURE_REST = 0.2
"""Mean of 1 - p below which a policy is a sure one: its logits lie tens of nats apart, and rounding is relative to them."""
MAX_UNTOLD_NOISE = 2.0
"""Times the noise that is allowed where no share of the mismatch is seen to belong to token ids: kernels, lengths, sharpened policies
and small models round by more than was measured. A model of 135 million parameters, healthy on both sides, has 0.1 nats."""
MAX_SURE_NOISE = 8.0
"""Times the noise that is allowed where the policy is sure and nothing in the mismatch belongs to tokens: logits of 60 nats are
rounded to half a nat in bfloat16."""
EXCESS = 0.08
"""The same where no dtype is known: bfloat16 is taken for granted."""
MIN_WEIGHTS_NOISE = 1e-3
"""Noise of the logits, nats, below which other weights are not looked for: TensorFloat-32 alone gives so much."""
MIN_TOKEN_EFFECT = 0.15
"""Share of the mismatch that belongs to token ids: rounding changes with every context, other weights push a token the same way."""
MIN_FLOAT32_TOKEN_EFFECT = 0.05
"""The same where both contracts say float32: no weight was rounded, so that nothing of rounding belongs to tokens."""
MIN_FLOAT32_TOKEN_SCORE = 8.0
"""The score that it takes there."""
MIN_TOKEN_SCORE = 5.0
"""The same share in standard deviations of what chance gives."""
MIN_EFFECT_TOKENS = 400
"""Different contexts, so that a token effect is one."""
MIN_EFFECT_IDS = 8
"""Different token ids, at least: each of a handful stands in few contexts, so that the rounding of a context looks like a matter of the id."""

ROUTER_TAIL_RATIO = 10.0
"""Times the median: rounding alone reaches six to eight."""
MIN_FLIP_NOISE = 1e-3
"""Noise of the logits, nats, of the tokens in the tail: another expert moves logits by far more, and the rounding of float32 has a tail, too."""
MAX_ROUNDED_ROUTER_SHARE = 0.025
"""Share of the tail that routers with inputs of 16 bits give: scores of an error of 2^-8 choose another expert where the first two
lie so near to each other, for a token in a hundred or two of a layer."""
ROUTER_TAIL_SHARE = 0.002
"""Share of the tokens in that tail."""
MAX_ROUTER_TAIL_SHARE = 0.1
"""The same at most, where no contract names experts: flips that are seen are few."""

TOKEN_SHRINKAGE = 10.0
"""Tokens' worth of doubt about what is usual for a token id."""

ROUTER_TOP_SHARE = 0.9
"""Share of the squared noise that the top fiftieth of the tokens carries where routers flip; elsewhere it is a quarter to
three quarters. Asked where no contract names experts."""
MAX_ROUTER_TOKEN_EFFECT = 0.2
"""A flip comes with a context, not with a token: other weights, which can look as sparse, belong to tokens."""

UNSAMPLED_NATS = -3.0
"""logprob + entropy of a token that sampling hardly draws: a twentieth of the tokens of a model with a flat tail lie below."""
MIN_UNSAMPLED_RUN = 4
"""Tokens in a row; as many are seen in fewer than 2 % of the sequences of healthy runs."""
MIN_UNSAMPLED_SEQUENCES = 0.05
"""Share of the sequences that have such a run."""

MIN_RAISED_TOKENS = 10
"""Tokens that a grammar raised beyond rounding: as many differences have one sign by chance in one of a thousand traces."""

MIN_LEANING = 0.7
"""The same where rounding hides part of the signs of d."""
MIN_ONE_SIDED = 0.6
"""Size of the mean of d against the mean of |d|: 1 where all d have one sign, 0 where they balance."""
KEPT_VOCABULARY = 0.6
"""Mean of 1 / p against the size of the vocabulary: 1 where all tokens can be sampled."""

UNSAMPLED_STARTS = 5.0
"""Sequences of a prompt that sampling would begin otherwise than the first one, going by their logprobs, where none does."""

FEW_TOKENS = 500
"""Tokens below which only gross faults can be told."""
MIN_ALONG = 2.5
"""Standard errors by which d must point along the movement of the weights for the text to say so: rounded weights stay below 2."""
MOVEMENT_SHRINKAGE = 3.0
"""Tokens' worth of doubt about the mean d of a token after a token."""
PERSISTENCE_LAGS = (1, 2, 4)
"""Distances, in tokens, over which the size of d is followed: near enough that a change inside of the sequence seldom falls between."""
MIN_PERSISTENCE = 0.07
"""Correlation of the size of d from token to token where weights changed inside of sequences, 0.1 and more in most; of other
weights it is 0.04 in three of four."""
MIN_CLEAR_PERSISTENCE = 0.12
"""The same where the mismatch is no larger than rounding."""
MIN_WHOLE_SCORE = 100.0
"""Standard deviations by which sequences differ where whole ones are off, as those of one engine of several: a change on the way
leaves both kinds of tokens in most sequences, and stays below 30."""
MIN_SEQUENCE_SCORE = 4.0
"""Standard deviations by which the size of d differs between sequences of a step where it changes inside of them: rounding
stays below 2.5, other weights mostly below 4."""
