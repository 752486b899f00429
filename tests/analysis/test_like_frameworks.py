"""slime's, NeMo-RL's, prime-rl's and OpenRLHF's numbers, against renderings of their definitions in torch.

The renderings follow what each framework's source says of padded or packed batches; these frameworks cannot be installed
here. Shapes: B sequences, T positions.
"""

import math

import numpy as np
import pytest
import torch
from builders import make_trace
from tim_trace.analysis.database import FRAMEWORK_MACROS, Database, connect
from tim_trace.analysis.frameworks.registry import FRAMEWORKS
from tim_trace.analysis.query import sql
from tim_trace.analysis.stats import stats
from tim_trace.schemas.errors import InvalidOption
from tim_trace.tracer.recorder import Recorder

WIDTH = 8


def batch(seed, spread, rows=25):
    """there, mask, rollout, train, current and advantages, all [B, T]; one row has no token that counts."""
    draw = np.random.default_rng(seed)
    there = np.arange(WIDTH) < draw.integers(1, WIDTH + 1, rows)[:, None]
    mask = there & (draw.random(there.shape) > 0.2)
    mask[0, 0], mask[1] = True, False
    rollout = -draw.exponential(1.5, there.shape)
    train, current = (np.minimum(rollout + draw.normal(0, spread, there.shape), 0) for _ in range(2))
    advantages = draw.choice([-1.0, 0.0, 0.5], there.shape)
    return there, mask, *(values.astype(np.float32) for values in (rollout, train, current, advantages))


def record(path, batches, passes=("rollout", "train", "current")):
    with Recorder(path) as recorder:
        for step, (there, mask, *values, advantages) in enumerate(batches, 1):

            def cut(values, there=there):
                return [row[kept].tolist() for row, kept in zip(values, there, strict=True)]

            added = recorder.add_sequences(
                step=step, prompt_ids=[[1]] * len(there), response_ids=cut(there.astype(int)),
                response_mask=cut(mask), advantage=cut(advantages),
            )  # fmt: skip
            for name, logprobs in zip(("rollout", "train", "current"), values, strict=True):
                if name in passes:
                    recorder.add_scores(name, added, logprobs=cut(logprobs))


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    path = tmp_path_factory.mktemp("frameworks") / "run"
    batches = [batch(seed, spread) for seed, spread in enumerate([0.0, 0.05, 0.6, 5.0])]
    record(path, batches)
    return path, batches


def tensors(given):
    return [torch.from_numpy(np.asarray(values)).double() for values in given[1:]]


def agree(steps, framework, rendering, **options):
    path, batches = steps
    found = stats(path, by="step", like=framework, **options).dicts()
    for row, given in zip(found, batches, strict=True):
        expected = rendering(*tensors(given), **options)
        assert set(row) == {"run", "step", *expected}
        for name, value in expected.items():
            assert row[name] == pytest.approx(float(value), rel=1e-9, abs=1e-13, nan_ok=True), name


def slime(mask, rollout, train, current, _, tis_clip=2.0, tis_clip_low=0.0, calculate_per_token_loss=False):
    """Every metric goes through the reducer: sums of samples over their own count, by the batch's size."""

    def reduced(values):
        if calculate_per_token_loss:
            return sum((v * m).sum() for v, m in zip(values, mask, strict=True)) / mask.sum(1).clamp_min(1).sum()
        return sum((v * m).sum() / m.sum().clamp_min(1) for v, m in zip(values, mask, strict=True)) / len(mask)

    ratio = (train - rollout).exp()
    return {
        "train_rollout_logprob_abs_diff": reduced((train - rollout).abs()),
        "tis": reduced(ratio),
        "tis_clipfrac": reduced((ratio.clamp(tis_clip_low, tis_clip) != ratio).double()),
        "tis_abs": reduced((ratio - 1).abs()),
        "ppo_kl": reduced(train - current),
        "ois": reduced((current - train).exp()),
    }


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("bounds", [(2.0, 0.0), (1.02, 0.98)])
def test_slime(steps, per_token, bounds):
    options = {"tis_clip": bounds[0], "tis_clip_low": bounds[1], "calculate_per_token_loss": per_token}
    agree(steps, "slime", slime, **options)


def nemo_rl(
    mask, rollout, train, current, _, reference_policy_kl_type="k3", sequence_level_importance_ratios=False,
    truncated_importance_sampling_type=None, truncated_importance_sampling_ratio=None,
    truncated_importance_sampling_ratio_min=None, train_micro_batch_size=1,
):  # fmt: skip
    """A micro-batch adds its sums over the batch's counts of tokens or of sequences."""
    num_tokens, num_sequences = mask.sum(), len(mask)
    lower, upper = truncated_importance_sampling_ratio_min, truncated_importance_sampling_ratio
    kind, of_sequences = truncated_importance_sampling_type, sequence_level_importance_ratios

    def mean(values):
        return (values * mask).sum() / num_tokens

    def kl(logprobs, reference):
        ratio = reference - logprobs
        estimators = {"k1": -ratio, "k2": ratio**2 / 2, "k3": torch.expm1(ratio) - ratio}
        return mean(estimators[reference_policy_kl_type])

    middle = torch.logaddexp(train, rollout) - math.log(2)
    halves = [torch.expm1(side - middle) - (side - middle) for side in (train, rollout)]
    difference = train - rollout
    weights = (difference * mask).sum(1, keepdim=True).exp() if of_sequences else difference.exp()
    weights = torch.nan_to_num(weights, nan=0.0, posinf=0.0, neginf=0.0)
    found = {}
    if kind in ("tis", "icepop"):
        outside = (weights < (lower or 0.0)) | (weights > upper)
        found["is_oob_ratio"] = mean(outside.double())
        weights = weights.clamp(lower or 0.0, upper) if kind == "tis" else weights * ~outside
    elif kind == "seq-mask-tis":
        geometric = ((difference * mask).sum(1) / mask.sum(1).clamp_min(1)).exp()
        inside = ((geometric >= lower) & (geometric <= upper)).double()
        found["is_oob_ratio"] = 1 - inside.mean()
        weights = weights * inside[:, None]
    if of_sequences:  # [b, 1] weights by [b] masks: every sequence is counted b times
        importance = sum(
            (part * torch.ones(len(part))).sum() / num_sequences for part in weights.split(train_micro_batch_size)
        )
    else:
        importance = mean(weights)
    errors = (difference.abs().exp() * mask).sum(1)[mask.sum(1) > 0] / mask.sum(1)[mask.sum(1) > 0]
    return found | {
        "token_mult_prob_error": mean(difference.abs().exp()),
        "gen_kl_error": kl(rollout, train),
        "policy_kl_error": kl(train, rollout),
        "js_divergence_error": mean((halves[0] + halves[1]) / 2),
        "sampling_importance_ratio": importance,
        "approx_entropy": -mean((current - rollout).exp() * current),
        "max_seq_mult_prob_error": errors.max(),
        "mean_seq_mult_prob_error": errors.mean(),
        "min_seq_mult_prob_error": errors.min(),
    }


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
def test_nemo_rl(steps, kl_type):
    agree(steps, "nemo-rl", nemo_rl, reference_policy_kl_type=kl_type)


@pytest.mark.parametrize(
    ("kind", "lower", "upper", "of_sequences", "micro_batch"),
    [
        ("tis", None, 1.05, False, 1),
        ("tis", 0.9, 1.1, False, 1),
        ("icepop", 0.9, 1.1, False, 1),
        ("seq-mask-tis", 0.98, 1.02, False, 1),
        ("tis", None, 1.5, True, 1),
        ("icepop", 0.5, 1.5, True, 5),
        (None, None, None, True, 5),
    ],
)
def test_nemo_rl_s_truncations(steps, kind, lower, upper, of_sequences, micro_batch):
    options = {"truncated_importance_sampling_type": kind, "truncated_importance_sampling_ratio": upper}
    options |= {"truncated_importance_sampling_ratio_min": lower, "sequence_level_importance_ratios": of_sequences}
    agree(steps, "nemo-rl", nemo_rl, train_micro_batch_size=micro_batch, **options)


def prime_rl(mask, rollout, train, _, advantages, dppo_mask_low=0.2, dppo_mask_high=0.2, ipo_threshold=None):
    """Statistics of a value a token, and of values a sequence."""
    mask = mask.bool()
    ratio = train - rollout
    mismatch = torch.expm1(ratio) - ratio
    change = train.exp() - rollout.exp()
    high, low = change > dppo_mask_high, change < -dppo_mask_low
    masked = torch.where(advantages > 0, high, low) if ipo_threshold is None else change.abs() > ipo_threshold

    def means(values, where):
        return [v[w].double().sum() / max(int(w.sum()), 1) for v, w in zip(values, where, strict=True)]

    of_sequences = {
        "masked_mismatch_kl": means(mismatch, mask & masked),
        "unmasked_mismatch_kl": means(mismatch, mask & ~masked),
        "is_masked": means(masked, mask),
    }
    if ipo_threshold is None:
        of_sequences |= {
            "is_masked_low": means((advantages < 0) & low, mask),
            "is_masked_high": means((advantages > 0) & high, mask),
            "masked_advantage_positive": means(advantages > 0, mask & masked),
            "masked_advantage_negative": means(advantages < 0, mask & masked),
        }
    found = {"mismatch_kl/all": mismatch[mask]} | {name: torch.stack(v) for name, v in of_sequences.items()}
    return {
        f"{name}/{statistic}": getattr(values, statistic)()
        for name, values in found.items()
        for statistic in ("mean", "median", "std", "min", "max")
    }


@pytest.mark.parametrize(
    "options", [{}, {"dppo_mask_low": 0.01, "dppo_mask_high": 0.02}, {"ipo_threshold": 0.05}], ids=["", "tight", "ipo"]
)
def test_prime_rl(steps, options):
    agree(steps, "prime-rl", prime_rl, **options)


def test_prime_rl_masks_nothing_that_it_does_not_know(tmp_path):
    # Without advantages no mask is known; the mismatch is.
    make_trace(tmp_path / "run")
    with Recorder(tmp_path / "bare") as recorder:
        added = recorder.add_sequences(step=1, prompt_ids=[[1]], response_ids=[[2, 3]])
        recorder.add_scores("rollout", added, logprobs=[[-1.0, -1.0]])
        recorder.add_scores("train", added, logprobs=[[-1.0, -0.1]])
    (row,) = stats(tmp_path / "bare", like="prime-rl").dicts()
    assert row["mismatch_kl/all/mean"] == pytest.approx((math.exp(0.9) - 1.9) / 2, rel=1e-6)
    assert row["is_masked/mean"] is None
    assert row["is_masked/std"] is None
    (row,) = stats(tmp_path / "bare", like="prime-rl", ipo_threshold=0.1).dicts()
    assert row["is_masked/mean"] == 0.5


def openrlhf(mask, rollout, train, current, _):
    return {
        "vllm_kl": ((rollout - train) * mask).sum() / mask.sum(),
        "ppo_kl": ((train - current) * mask).sum() / mask.sum(),
    }


def test_openrlhf(steps):
    agree(steps, "openrlhf", openrlhf)


@pytest.mark.parametrize("odd", [math.nan, -math.inf], ids=["nan", "cut"])
def test_what_is_odd_passes_through(tmp_path, odd):
    given = batch(9, 0.1)
    given[3][0, 0] = odd
    record(tmp_path / "run", [given])
    for name, rendering in {"slime": slime, "nemo-rl": nemo_rl, "prime-rl": prime_rl, "openrlhf": openrlhf}.items():
        agree((tmp_path / "run", [given]), name, rendering)


def two_sequences(path):
    """d = log 2 and log 2 in one sequence, -log 2 in the other."""
    there = np.array([[True, True], [True, False]])
    rollout = np.full(there.shape, -1.0)
    train = rollout + np.log([[2.0, 2.0], [0.5, 1.0]])
    record(path, [(there, there, rollout, train, train, np.ones(there.shape))], passes=("rollout", "train"))
    return path


def test_worked_by_hand(tmp_path):
    path = two_sequences(tmp_path / "run")
    log2 = math.log(2)
    (row,) = stats(path, like="slime").dicts()
    assert row["tis"] == pytest.approx((2 + 0.5) / 2, rel=1e-6)
    assert row["tis_abs"] == pytest.approx((1 + 0.5) / 2, rel=1e-6)
    assert row["ois"] is None  # no pass current
    (row,) = stats(path, like="slime", calculate_per_token_loss=True).dicts()
    assert row["tis"] == pytest.approx((2 + 2 + 0.5) / 3, rel=1e-6)
    (row,) = stats(path, like="nemo-rl").dicts()
    assert row["token_mult_prob_error"] == pytest.approx(2, rel=1e-6)
    assert row["gen_kl_error"] == pytest.approx((2 * (1 - log2) + log2 - 0.5) / 3, rel=1e-6)
    assert row["approx_entropy"] is None
    (row,) = stats(path, like="openrlhf").dicts()
    assert row["vllm_kl"] == pytest.approx(-log2 / 3, rel=1e-6)
    (row,) = stats(path, like="prime-rl").dicts()
    # exp(-1) rises to twice as much, by more than 0.2: both tokens of the first sequence are masked.
    assert (row["is_masked/mean"], row["is_masked/max"], row["is_masked_high/mean"]) == (0.5, 1.0, 0.5)
    assert row["mismatch_kl/all/median"] == pytest.approx(1 - log2, rel=1e-6)


def test_the_direction_of_nemo_rl_s_errors(tmp_path):
    # The generation sampled a token of log-probability -5 that the trainer gives -15.
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, prompt_ids=[[1]], response_ids=[[2]])
        recorder.add_scores("rollout", added, logprobs=[[-5.0]])
        recorder.add_scores("train", added, logprobs=[[-15.0]])
    (row,) = stats(tmp_path / "run", like="nemo-rl").dicts()
    assert row["gen_kl_error"] == pytest.approx(9 + math.exp(-10), rel=1e-9)
    assert row["policy_kl_error"] == pytest.approx(math.exp(10) - 11, rel=1e-9)
    assert row["js_divergence_error"] == pytest.approx(4.3067, rel=1e-4)


def test_a_run_is_one_batch(steps, tmp_path):
    path, batches = steps
    record(tmp_path / "one", [tuple(np.concatenate(part) for part in zip(*batches, strict=True))])
    for framework in FRAMEWORKS:
        (whole,), (one,) = (stats(run, like=framework).dicts() for run in (path, tmp_path / "one"))
        assert (whole.pop("run"), one.pop("run")) == ("run", "one")
        assert one == pytest.approx(whole, rel=1e-12, nan_ok=True), framework


def test_an_open_database_answers_of_one_pair_after_the_other(steps):
    database = Database(steps[0])
    for pair in ("train:rollout", "current:rollout", "train:rollout"):
        for framework in FRAMEWORKS:
            shown = stats(database, pair=pair, like=framework, by="step").rows
            assert shown == stats(steps[0], pair=pair, like=framework, by="step").rows, framework
    a, b = (database.ask(f"SELECT * FROM verl_steps('{a}', 'rollout')").rows for a in ("train", "current"))
    assert a != b


def test_the_macros_give_the_same(steps):
    path, _ = steps
    connection = connect(path, like=list(FRAMEWORKS))
    for name in FRAMEWORK_MACROS:
        query = f"SELECT * FROM {name.replace('-', '_')}_steps('train', 'rollout')"
        shown = stats(path, by="step", like=name)
        assert sql(path, query).columns == shown.columns or name == "nemo-rl"  # which leaves is_oob_ratio away
        assert len(connection.execute(query).fetchall()) == len(shown)
    assert set(FRAMEWORK_MACROS) == set(FRAMEWORKS)
    with pytest.raises(InvalidOption, match="like: got 'other'; use verl"):
        connect(path, like=["other"])


@pytest.mark.parametrize(
    ("framework", "options", "message"),
    [
        (
            "slime",
            {"rollout_is": "token"},
            "rollout_is: slime has no such option; it belongs to verl: leave it away, or",
        ),
        ("verl", {"tis_clip": 3.0}, "tis_clip: verl has no such option; it belongs to slime"),
        ("openrlhf", {"ipo_threshold": 0.1}, "ipo_threshold: openrlhf has no such option"),
        ("verl", {"typo": 1}, "typo: verl has no such option; see --help"),
        (None, {"tis_clip": 3.0}, "tis_clip: without a framework there is none; it belongs to slime"),
        ("slime", {"tis_clip_low": 3.0}, "tis_clip_low: got 3; it lies between 0 and tis_clip, 2"),
        ("nemo-rl", {"reference_policy_kl_type": "k4"}, "got 'k4'; nemo-rl has k1, k2, k3"),
        ("nemo-rl", {"truncated_importance_sampling_type": "tis"}, "needs truncated_importance_sampling_ratio above 0"),
        (
            "nemo-rl",
            {"truncated_importance_sampling_ratio": 2.0},
            "needs truncated_importance_sampling_type: tis, icepop",
        ),
        (
            "nemo-rl",
            {"truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio": 2.0},
            "icepop needs truncated_importance_sampling_ratio_min",
        ),
        ("nemo-rl", {"train_micro_batch_size": -1}, "train_micro_batch_size: got -1; it is 1 or more"),
        ("prime-rl", {"dppo_mask_low": -0.1}, "dppo_mask_low: got -0.1; give a difference of probabilities"),
    ],
)
def test_options_of_another_framework_or_without_sense_are_refused(tmp_path, framework, options, message):
    make_trace(tmp_path / "run")
    with pytest.raises(InvalidOption, match=message):
        stats(tmp_path / "run", like=framework, **options)
