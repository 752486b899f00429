"""slime's, NeMo-RL's, prime-rl's and OpenRLHF's numbers, in float64.

OpenRLHF's are held against the loss of its published wheel. slime, NeMo-RL and prime-rl have no wheel with their code: these
are held against renderings in torch, written from the formulas in their sources. Tokens that do not count have logprobs and
advantages like the others, unless a test says otherwise. Shapes: B sequences, T positions.
"""

import importlib
import math
import re
import sys
import warnings
from importlib.metadata import distributions
from types import ModuleType

import numpy as np
import pytest
import torch
from builders import make_trace
from tim_trace.analysis.frameworks.registry import FRAMEWORKS
from tim_trace.analysis.query import sql
from tim_trace.analysis.stats import likeness, stats
from tim_trace.analysis.views import connect, open_database
from tim_trace.schemas.errors import InvalidOption
from tim_trace.tracer.recorder import Recorder

WIDTH = 8


def batch(seed, spread, rows=25):
    """there, mask, rollout, train, current, advantages and entropies, all [B, T]; one row has no token that counts."""
    draw = np.random.default_rng(seed)
    there = np.arange(WIDTH) < draw.integers(1, WIDTH + 1, rows)[:, None]
    mask = there & (draw.random(there.shape) > 0.2)
    mask[0, 0], mask[1] = True, False
    rollout = -draw.exponential(1.5, there.shape)
    train, current = (np.minimum(rollout + draw.normal(0, spread, there.shape), 0) for _ in range(2))
    advantages = draw.choice([-1.0, 0.0, 0.5], there.shape)
    values = (rollout, train, current, advantages, draw.exponential(1.0, there.shape))
    return there, mask, *(each.astype(np.float32) for each in values)


def record(path, batches, passes=("rollout", "train", "current"), entropies=True):
    with Recorder(path) as recorder:
        for step, (there, mask, *values, advantages, entropy) in enumerate(batches, 1):

            def cut(values, there=there):
                return [row[kept].tolist() for row, kept in zip(values, there, strict=True)]

            added = recorder.add_sequences(
                step=step, prompt_ids=[[1]] * len(there), response_ids=cut(there.astype(int)),
                response_mask=cut(mask), advantage=cut(advantages), reward=rewards(len(there)),
            )  # fmt: skip
            for name, logprobs in zip(("rollout", "train", "current"), values, strict=True):
                if name in passes:
                    own = {"entropy": cut(entropy)} if name == "train" and entropies else {}
                    recorder.add_scores(name, added, logprobs=cut(logprobs), **own)


def rewards(rows):
    """[B] every third response is right."""
    return (np.arange(rows) % 3 == 0).astype(float)


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    path = tmp_path_factory.mktemp("frameworks") / "run"
    batches = [batch(seed, spread) for seed, spread in enumerate([0.0, 0.05, 0.6, 5.0])]
    record(path, batches)
    return path, batches


def tensors(given):
    return [torch.from_numpy(np.asarray(values)).double() for values in given[1:]]


def agree(steps, framework, rendering, rel=1e-9, **options):
    path, batches = steps
    found = stats(path, by="step", like=framework, **options).dicts()
    for row, given in zip(found, batches, strict=True):
        expected = rendering(*tensors(given), **options)
        assert set(row) == {"run", "step", *expected}
        for name, value in expected.items():
            assert row[name] == pytest.approx(float(value), rel=rel, abs=1e-13, nan_ok=True), name


def slime(mask, rollout, train, current, *_, tis_clip=2.0, tis_clip_low=0.0, calculate_per_token_loss=False):
    """Every metric goes through the reducer: sums of samples over their own count, by the batch's size."""
    counts = mask.sum(1).clamp_min(1)

    def reduced(values):
        sums = torch.where(mask.bool(), values, 0.0).sum(1)
        return sums.sum() / counts.sum() if calculate_per_token_loss else (sums / counts).mean()

    ratio = (train - rollout).exp()
    return mis(mask.bool(), train, rollout, reduced) | {
        "train_rollout_logprob_abs_diff": reduced((train - rollout).abs()),
        "tis": reduced(ratio),
        "tis_clipfrac": reduced((ratio.clamp(tis_clip_low, tis_clip) != ratio).double()),
        "tis_abs": reduced((ratio - 1).abs()),
        "ppo_kl": reduced(train - current),
        "ois": reduced((current - train).exp()),
    }


def mis(mask, train, rollout, reduced):
    """The measures of slime's example mis.py. `reduced` is what takes means of [B, T]."""
    counts = mask.sum(1, keepdim=True).clamp_min(1)

    def mean(values):
        return (torch.where(mask, values, 0.0).sum(1, keepdim=True) / counts).expand_as(train)

    d = torch.where(mask, train - rollout, 0.0)
    found = {}
    for side, logprobs in {"training": train, "rollout": rollout}.items():
        found |= {f"mis_{side}_log_ppl": -mean(logprobs), f"mis_{side}_ppl": (-mean(logprobs)).exp()}
    difference = mean(rollout) - mean(train)
    found |= {
        "mis_kl": -d,
        "mis_k3_kl": torch.expm1(d) - d,
        "mis_log_ppl_diff": difference,
        "mis_log_ppl_abs_diff": difference.abs(),
        "mis_ppl_ratio": difference.exp(),
        "mis_chi2_token": mean(torch.expm1(2 * d.clamp(-20, 20))),
        "mis_chi2_seq": torch.expm1(2 * d.sum(1, keepdim=True).clamp(-20, 20)).expand_as(d),
    }
    return {name: reduced(values) for name, values in found.items()}


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("bounds", [(2.0, 0.0), pytest.param((1.02, 0.98), marks=pytest.mark.slow)])
def test_slime(steps, per_token, bounds):
    options = {"tis_clip": bounds[0], "tis_clip_low": bounds[1], "calculate_per_token_loss": per_token}
    agree(steps, "slime", slime, **options)


def nemo_rl(
    mask, rollout, train, current, *_, reference_policy_kl_type="k3", sequence_level_importance_ratios=False,
    train_micro_batch_size=1, ratio_clip_min=0.2, ratio_clip_max=0.2, disable_ppo_ratio=False,
):  # fmt: skip
    """A micro-batch adds its sums over the batch's counts of tokens or of sequences."""
    num_tokens, num_sequences, of_sequences = mask.sum(), len(mask), sequence_level_importance_ratios

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
    if of_sequences:  # [b, 1] weights by [b] masks: every sequence is counted b times
        importance = sum(
            (part * torch.ones(len(part))).sum() / num_sequences for part in weights.split(train_micro_batch_size)
        )
    else:
        importance = mean(weights)
    policy = current - train
    if sequence_level_importance_ratios:
        policy = (torch.where(mask.bool(), policy, 0.0).sum(1) / mask.sum(1).clamp_min(1))[:, None].expand_as(train)
    ratios = current if disable_ppo_ratio else policy.exp()
    clamped = ratios if disable_ppo_ratio else ratios.clamp(1 - ratio_clip_min, 1 + ratio_clip_max)
    for name, values in {"probs_ratio": ratios, "probs_ratio_clamped": clamped}.items():
        found[name] = mean(values)
        of_rows = [row[counts.bool()] for row, counts in zip(values, mask, strict=True) if counts.any()]
        for end in ("min", "max"):
            ends = [value for value in (getattr(row, end)() for row in of_rows) if not value.isinf()]
            found[f"{name}_{end}"] = getattr(torch.stack(ends), end)() if ends else -1
    errors = sequence_errors(mask, difference)
    found |= {f"{end}_seq_mult_prob_error": getattr(errors, end)() for end in ("max", "mean", "min")}
    return found | {
        "token_mult_prob_error": mean(difference.abs().exp()),
        "gen_kl_error": kl(rollout, train),
        "policy_kl_error": kl(train, rollout),
        "js_divergence_error": mean((halves[0] + halves[1]) / 2),
        "sampling_importance_ratio": importance,
        "approx_entropy": -mean((current - rollout).exp() * current),
    }


def sequence_errors(mask, difference):
    """mean(exp(|d|)) of the sequences that have a token."""
    sums, counts = torch.where(mask.bool(), difference.abs().exp(), 0.0).sum(1), mask.sum(1)
    return sums[counts > 0] / counts[counts > 0]


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
def test_nemo_rl(steps, kl_type):
    agree(steps, "nemo-rl", nemo_rl, reference_policy_kl_type=kl_type)


@pytest.mark.parametrize("micro_batch", [1, 5])
def test_nemo_rl_s_sequence_ratios(steps, micro_batch):
    options = {"sequence_level_importance_ratios": True, "train_micro_batch_size": micro_batch}
    agree(steps, "nemo-rl", nemo_rl, **options)


@pytest.mark.parametrize("options", [{"ratio_clip_min": 0.05, "ratio_clip_max": 0.01}, {"disable_ppo_ratio": True}])
@pytest.mark.parametrize("of_sequences", [False, True])
def test_nemo_rl_s_ratios(steps, options, of_sequences):
    agree(steps, "nemo-rl", nemo_rl, sequence_level_importance_ratios=of_sequences, **options)


@pytest.mark.parametrize("odd", [math.nan, -math.inf])
def test_nemo_rl_gives_a_sequence_no_weight_whose_masked_tokens_are_not_finite(tmp_path, odd):
    # The sum over a sequence is of d times the mask, and NaN * 0 is NaN, which becomes a weight of 0.
    given = batch(9, 0.1)
    rows, places = np.nonzero(given[0] & ~given[1])
    given[2][rows[2], places[2]] = given[2][rows[-1], places[-1]] = odd
    record(tmp_path / "run", [given])
    (row,) = stats(tmp_path / "run", like="nemo-rl", sequence_level_importance_ratios=True).dicts()
    expected = nemo_rl(*tensors(given), sequence_level_importance_ratios=True)["sampling_importance_ratio"]
    assert row["sampling_importance_ratio"] == pytest.approx(float(expected))


@pytest.mark.slow
def test_nemo_rl_leaves_infinite_ratios_out_of_the_largest(tmp_path):
    given = batch(5, 0.1)
    given[3][0, 0] = -math.inf
    record(tmp_path / "run", [given])
    agree((tmp_path / "run", [given]), "nemo-rl", nemo_rl)
    assert 1 < stats(tmp_path / "run", like="nemo-rl").dicts()[0]["probs_ratio_max"] < math.inf
    given[3][:] = -math.inf
    record(tmp_path / "all", [given])
    assert stats(tmp_path / "all", like="nemo-rl").dicts()[0]["probs_ratio_max"] == -1


def prime_rl(mask, rollout, train, _, advantages, entropy, dppo_mask_low=0.2, dppo_mask_high=0.2, ipo_threshold=None):
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
    found = {"mismatch_kl/all": mismatch[mask], "entropy/all": entropy[mask]}
    found |= {name: torch.stack(v) for name, v in of_sequences.items()}
    return {
        f"{name}/{statistic}": getattr(values, statistic)()
        for name, values in found.items()
        for statistic in ("mean", "median", "std", "min", "max")
    } | {"kl_ent_ratio/mean": mismatch[mask].mean() / entropy[mask].mean()}


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


@pytest.fixture(scope="module")
def policy_loss():
    """The class PolicyLoss of OpenRLHF's wheel; what it imports and does not use here is left out."""
    installed = next(distributions(name="openrlhf", path=[*sys.path, f"{sys.prefix}/frameworks"]), None)
    assert installed, "openrlhf is not installed: `make test` does it"
    before = dict(sys.modules)
    try:
        for name in ("openrlhf", "openrlhf.models"):  # whose __init__ would import all of it
            package = sys.modules[name] = ModuleType(name)
            package.__path__ = [str(installed.locate_file(name.replace(".", "/")))]
        sys.modules["deepspeed"] = ModuleType("deepspeed")
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # a decorator of its own imports parts of torch that warn
            loss = importlib.import_module("openrlhf.models.loss")
        yield loss.PolicyLoss
    finally:
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in ("openrlhf", "deepspeed"):
                del sys.modules[name]


@pytest.fixture
def openrlhf(policy_loss):
    """What OpenRLHF's loss gives of a batch."""

    def of(mask, rollout, train, current, advantages, *_, policy_loss_type="ppo", eps_clip_low_high=(0.2, 0.2),
           is_correction_enable=False):  # fmt: skip
        # It gives vllm_kl where it corrects.
        loss = policy_loss(
            *eps_clip_low_high, policy_loss_type=policy_loss_type, vllm_is_truncated_threshold=[0.5, 2.0],
            enable_vllm_is_correction=is_correction_enable or policy_loss_type == "ppo",
        )  # fmt: skip
        _, clip_ratio, ppo_kl, vllm_kl = loss(current, train, advantages, mask, rollout)
        found = {"ppo_clip_ratio": clip_ratio, "ppo_kl": ppo_kl}
        return found if vllm_kl is None else found | {"vllm_kl": vllm_kl}

    return of


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eps_clip_low_high": (0.05, 0.01)},
        {"policy_loss_type": "gspo", "eps_clip_low_high": (0.001, 0.03)},
        {"policy_loss_type": "gspo", "is_correction_enable": True},
    ],
    ids=["", "tight", "gspo", "corrected"],
)
def test_openrlhf(steps, openrlhf, options):
    # OpenRLHF rounds what is clipped to float32.
    agree(steps, "openrlhf", openrlhf, rel=1e-7, **options)


@pytest.mark.slow
@pytest.mark.parametrize("odd", [math.nan, -math.inf], ids=["nan", "cut"])
def test_what_is_odd_passes_through(tmp_path, openrlhf, odd):
    given = batch(9, 0.1)
    given[3][0, 0] = odd
    given[5][0, 1], given[1][0, 1] = math.nan, True
    given[5][2, 0], given[1][2, 0] = math.inf, True
    record(tmp_path / "run", [given])
    for name, expected in {"slime": slime, "nemo-rl": nemo_rl, "prime-rl": prime_rl, "openrlhf": openrlhf}.items():
        agree((tmp_path / "run", [given]), name, expected, rel=1e-7 if name == "openrlhf" else 1e-9)


@pytest.fixture
def masked_out(tmp_path):
    """A batch, and a trace of it with NaN and infinities on two tokens that do not count."""
    sound, given = batch(9, 0.1), batch(9, 0.1)
    out = np.argwhere(given[0] & ~given[1])
    for values, (row, position) in zip(given[2:4], out, strict=False):
        values[row, position] = math.nan
    given[4][tuple(out[1])] = -math.inf
    given[5][tuple(out[0])] = math.nan
    record(tmp_path / "run", [sound, given])
    return sound, given, tmp_path / "run"


@pytest.mark.slow
def test_what_lies_on_a_token_that_does_not_count_is_left_out(masked_out, openrlhf):
    sound, given, path = masked_out
    for name, rendering in {"slime": slime, "nemo-rl": nemo_rl, "prime-rl": prime_rl, "openrlhf": openrlhf}.items():
        agree((path, [sound, sound]), name, rendering, rel=1e-7 if name == "openrlhf" else 1e-9)
    assert all(openrlhf(*tensors(given))[name].isnan() for name in ("ppo_kl", "vllm_kl"))  # and so it logs


def test_where_a_framework_that_multiplies_by_the_mask_has_nan_is_said(masked_out, tmp_path):
    *_, path = masked_out
    for name in ("slime", "nemo-rl", "openrlhf"):
        (told,) = likeness(path, like=name)[1:]
        assert told.startswith("3 logprobs at 1 steps are NaN or infinite on masked tokens: ")
        assert told.endswith("can be NaN; tim-trace leaves such tokens out")
    assert "do not count" not in " ".join(likeness(path, like="prime-rl"))  # which selects
    given = batch(9, 0.1)
    record(tmp_path / "sound", [given])
    given[3][0, 0] = math.nan  # which counts
    record(tmp_path / "odd", [given])
    assert likeness(tmp_path / "odd", like="nemo-rl")[1:] == []
    assert [likeness(tmp_path / "sound", like=name)[1:] for name in ("slime", "nemo-rl", "openrlhf")] == [[], [], []]


@pytest.mark.parametrize(
    ("framework", "names"),
    [("slime", "ppo_kl, ois"), ("openrlhf", "ppo_kl, ppo_clip_ratio"), ("nemo-rl", "approx_entropy, probs_ratio, ")],
)
def test_which_numbers_need_the_pass_inside_the_loss_is_said(tmp_path, framework, names):
    record(tmp_path / "run", [batch(9, 0.1)], passes=("rollout", "train"))
    (row,) = stats(tmp_path / "run", like=framework).dicts()
    told = likeness(tmp_path / "run", like=framework)[1]
    assert told.startswith(f"run: no pass 'current' recorded, so {names}")
    null = told.removeprefix("run: no pass 'current' recorded, so ").removesuffix(" are NULL").split(", ")
    assert {name for name, value in row.items() if value is None} == set(null)


def test_without_the_trainer_s_entropies_their_ratio_to_the_mismatch_is_not_known(tmp_path):
    record(tmp_path / "run", [batch(9, 0.1)], entropies=False)
    (row,) = stats(tmp_path / "run", like="prime-rl").dicts()
    assert {row["kl_ent_ratio/mean"], row["entropy/all/mean"], row["entropy/all/max"]} == {None}
    assert likeness(tmp_path / "run", like="prime-rl")[2] == (
        "run: no entropy of pass 'train' recorded, so entropy/all, kl_ent_ratio are NULL"
    )


def test_clips_without_advantages_are_not_known(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, prompt_ids=[[1]] * 2, response_ids=[[2, 3]] * 2, advantage=[1.0, None])
        for name, logprob in {"rollout": -1.0, "train": -1.0, "current": -0.1}.items():
            recorder.add_scores(name, added, logprobs=[[logprob] * 2] * 2)
    (row,) = stats(tmp_path / "run", like="openrlhf").dicts()
    assert row["ppo_clip_ratio"] is None
    assert row["ppo_kl"] == pytest.approx(-0.9)


def two_sequences(path):
    """d = log 2 and log 2 in one sequence, -log 2 in the other."""
    there = np.array([[True, True], [True, False]])
    rollout = np.full(there.shape, -1.0)
    train = rollout + np.log([[2.0, 2.0], [0.5, 1.0]])
    ones = np.ones(there.shape)
    record(path, [(there, there, rollout, train, train, ones, ones)], passes=("rollout", "train"))
    return path


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_run_is_one_batch(steps, tmp_path):
    path, batches = steps
    record(tmp_path / "one", [tuple(np.concatenate(part) for part in zip(*batches, strict=True))])
    for framework in FRAMEWORKS:
        (whole,), (one,) = (stats(run, like=framework).dicts() for run in (path, tmp_path / "one"))
        assert (whole.pop("run"), one.pop("run")) == ("run", "one")
        assert one == pytest.approx(whole, rel=1e-12, nan_ok=True), framework


@pytest.mark.slow
def test_an_open_database_answers_of_one_pair_after_the_other(steps):
    database = open_database(steps[0])
    for pair in ("train:rollout", "current:rollout", "train:rollout"):
        for framework in FRAMEWORKS:
            shown = stats(database, pair=pair, like=framework, by="step").rows
            assert shown == stats(steps[0], pair=pair, like=framework, by="step").rows, framework
    a, b = (database.ask(f"SELECT * FROM verl_steps('{a}', 'rollout')").rows for a in ("train", "current"))
    assert a != b


@pytest.mark.slow
def test_the_macros_give_the_same(steps):
    path, _ = steps
    connection = connect(path, like=list(FRAMEWORKS))
    for name in FRAMEWORKS:
        query = f"SELECT * FROM {name.replace('-', '_')}_steps('train', 'rollout')"
        shown = stats(path, by="step", like=name)
        whole = sql(path, query)  # with what the options do not ask for
        assert whole.without(set(whole.columns) - set(shown.columns)).columns == shown.columns
        assert len(connection.execute(query).fetchall()) == len(shown)
    with pytest.raises(InvalidOption, match="like: got 'other'; use one of nemo-rl"):
        connect(path, like=["other"])


@pytest.mark.parametrize(
    ("framework", "options", "message"),
    [
        (
            "slime",
            {"ipo_threshold": 0.1},
            "ipo_threshold: slime has no such option; it belongs to prime-rl; drop it or",
        ),
        ("verl", {"tis_clip": 3.0}, "tis_clip: verl has no such option; it belongs to slime"),
        ("openrlhf", {"ipo_threshold": 0.1}, "ipo_threshold: openrlhf has no such option"),
        ("verl", {"typo": 1}, "typo: verl has no such option; no framework has it"),
        (None, {"tis_clip": 3.0}, "tis_clip: needs a framework; it belongs to slime"),
        (None, {"typo": 1}, "typo: no such option"),
        ("slime", {"tis_clip_low": 3.0}, "tis_clip_low: got 3; it must be between 0 and tis_clip (2)"),
        ("nemo-rl", {"reference_policy_kl_type": "k4"}, "got 'k4'; nemo-rl has k1, k2, k3"),
        ("nemo-rl", {"train_micro_batch_size": -1}, "train_micro_batch_size: got -1; pass 1 or more"),
        ("nemo-rl", {"ratio_clip_min": -0.1}, "ratio_clip_min: got -0.1; pass 0 or more"),
        ("openrlhf", {"policy_loss_type": "grpo"}, "got 'grpo'; openrlhf has ppo, gspo"),
        (
            "openrlhf",
            {"eps_clip_low_high": (0.2, -0.1)},
            "eps_clip_low_high: got (0.2, -0.1); pass two non-negative numbers",
        ),
        ("prime-rl", {"dppo_mask_low": -0.1}, "dppo_mask_low: got -0.1; pass 0 or more"),
    ],
)
def test_options_of_another_framework_or_without_sense_are_refused(tmp_path, framework, options, message):
    make_trace(tmp_path / "run")
    with pytest.raises(InvalidOption, match=re.escape(message)):
        stats(tmp_path / "run", like=framework, **options)
