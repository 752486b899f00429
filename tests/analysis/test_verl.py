"""verl's numbers, against the functions of the published verl wheel, on float64 tensors."""

import importlib.util
import math
import sys
from importlib.metadata import distribution
from types import ModuleType, SimpleNamespace

import dumps
import numpy as np
import pytest
import torch
from builders import make_trace
from tim_trace.analysis.frameworks.verl import FRAMEWORK
from tim_trace.analysis.frameworks.verl_sums import token_sums
from tim_trace.analysis.stats import stats
from tim_trace.analysis.trace.columns import parse_pair
from tim_trace.analysis.views import connect, open_database
from tim_trace.schemas.errors import InvalidOption, NothingToCompare
from tim_trace.tracer.importers.import_dump import import_dump
from tim_trace.tracer.recorder import Recorder

WIDTH = 12


@pytest.fixture(scope="module")
def verl():
    """The two modules that define the numbers, loaded with stand-ins for what they import and do not use here."""
    before = dict(sys.modules)

    def stand_in(name, **values):
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
        vars(module).update(values)
        return module

    # As verl.utils.torch_functional defines them.
    def masked_sum(values, mask, axis=None):
        return (torch.where(mask.bool(), values, 0.0) * mask).sum(axis=axis)

    def masked_mean(values, mask, axis=None):
        return masked_sum(values, mask, axis) / (mask.sum(axis=axis) + 1e-8)

    try:
        for name in (
            "verl",
            "verl.utils",
            "verl.trainer",
            "verl.trainer.config",
            "verl.workers",
            "verl.workers.config",
        ):
            stand_in(name)
        functional = stand_in("verl.utils.torch_functional", masked_sum=masked_sum, masked_mean=masked_mean)
        sys.modules["verl.utils"].torch_functional = functional
        stand_in("verl.protocol", DataProto=dict)
        stand_in("verl.trainer.config.algorithm", RolloutCorrectionConfig=dict)
        stand_in("verl.workers.config.actor", PolicyLossConfig=dict)
        yield SimpleNamespace(
            corr=load("verl/trainer/ppo/rollout_corr_helper.py"), debug=load("verl/utils/debug/metrics.py")
        )
    finally:
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] == "verl":
                del sys.modules[name]


def load(path):
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), distribution("verl").locate_file(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batch(seed, spread, rows=9, odd=None):
    """A padded batch with inner masks and one row that is masked as a whole."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, WIDTH + 1, rows)
    there = np.arange(WIDTH) < lengths[:, None]
    mask = there & (draw.random(there.shape) > 0.3)
    mask[0, 0], mask[1] = True, False
    rollout = -draw.exponential(1.5, there.shape).astype(np.float32)
    train = np.minimum(rollout + draw.normal(0, spread, there.shape).astype(np.float32), 0)
    if odd is not None:
        train[0, 0] = odd
    return there, mask, rollout, train


def tensors_of(there, mask, rollout, train):
    """old, rollout and mask as verl holds them, in float64."""
    old, sampled = (torch.from_numpy(np.where(there, values, 0.0)).double() for values in (train, rollout))
    return old, sampled, torch.from_numpy(mask).double()  # such a mask keeps verl's token counts from being float32


def of_verl(verl, there, mask, rollout, train):
    """What verl's functions give."""
    old, sampled, wide = tensors_of(there, mask, rollout, train)
    found = {f"rollout_corr/{k}": v for k, v in verl.corr.compute_offpolicy_metrics(old, sampled, wide).items()}
    tensors = {"rollout_log_probs": sampled, "old_log_probs": old, "response_mask": wide, "responses": sampled}
    return found | verl.debug.calculate_debug_metrics(SimpleNamespace(batch=tensors))


def record(path, batches):
    with Recorder(path) as recorder:
        for step, (there, mask, rollout, train) in enumerate(batches, 1):
            lengths = there.sum(axis=1)

            def cut(values, lengths=lengths):
                return [row[:n].tolist() for row, n in zip(values, lengths, strict=True)]

            added = recorder.add_sequences(
                step=step,
                prompt_ids=[[1]] * len(there),
                response_ids=cut(np.ones(there.shape, int)),
                response_mask=cut(mask),
            )
            recorder.add_scores("rollout", added, logprobs=cut(rollout))
            recorder.add_scores("train", added, logprobs=cut(train))


def same(found, expected):
    assert set(expected) == set(found) - {"run", "step"}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-7, abs=1e-9, nan_ok=True), name


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.5, 8.0], ids=["equal", "rounding", "wide", "extreme"])
def test_every_step_s_numbers_are_verl_s(verl, tmp_path, spread):
    batches = [batch(seed, spread) for seed in range(6)]
    record(tmp_path / "run", batches)
    found = stats(tmp_path / "run", by="step", like="verl").dicts()
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    for row, given in zip(found, batches, strict=True):
        same(row, of_verl(verl, *given))


def test_numbers_of_an_imported_dump_are_verl_s_own_of_its_arrays(verl, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "verl.protocol")  # the dump's writer has another stand-in
    steps = {step: dumps.make_samples(step) for step in (1, 2, 3)}
    dumps.write_verl(tmp_path / "dump", steps)
    import_dump("verl", tmp_path / "dump", output=tmp_path / "run")
    found = stats(tmp_path / "run", by="step", like="verl").dicts()
    assert [row["step"] for row in found] == [1, 2, 3]
    for row, samples in zip(found, steps.values(), strict=True):
        tensors = {name: values.numpy() for name, values in dumps.verl_tensors(samples).items()}
        there = tensors["attention_mask"][:, tensors["prompts"].shape[1] :].astype(bool)
        mask = tensors["response_mask"].astype(bool)
        same(row, of_verl(verl, there, mask, tensors["rollout_log_probs"], tensors["old_log_probs"]))


@pytest.mark.parametrize("odd", [math.nan, -120.0, -math.inf], ids=["nan", "far off", "cut"])
def test_what_is_odd_passes_through_as_in_verl(verl, tmp_path, odd):
    given = batch(1, 0.1, odd=odd)
    record(tmp_path / "run", [given])
    (row,) = stats(tmp_path / "run", like="verl", by="step").dicts()
    same(row, of_verl(verl, *given))


def test_a_sequence_s_sums_have_the_same_bits_whatever_is_beside_it():
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 3000, 60)
    starts = np.cumsum(lengths) - lengths
    old = -draw.exponential(1.0, lengths.sum()).astype(np.float32)
    rollout = np.minimum(old + draw.normal(0, 0.01, len(old)).astype(np.float32), 0)
    together = token_sums(old, rollout, lengths)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        span = slice(start, start + length)
        alone = token_sums(old[span], rollout[span], np.array([length]))
        np.testing.assert_array_equal(alone[:, 0].view(np.int64), together[:, row].view(np.int64))


@pytest.mark.slow
def test_digits_do_not_depend_on_the_number_of_threads(tmp_path):
    record(tmp_path / "run", [batch(seed, 0.3, rows=400) for seed in range(6)])
    whole = stats(tmp_path / "run", like="verl").rows
    for threads in (1, 2, 7):
        connection = connect(tmp_path / "run", like=("verl",))
        connection.execute(f"SET threads = {threads}")
        assert connection.execute("SELECT * FROM verl_runs('train', 'rollout')").fetchall() == whole


def test_a_token_without_a_logprob_counts_in_nothing(verl, tmp_path):
    given = batch(2, 0.1)
    there, mask, rollout, train = given
    known = np.random.default_rng(0).random(there.shape) > 0.2
    known[0, 0] = True
    with Recorder(tmp_path / "run") as recorder:
        lengths = there.sum(axis=1)
        cut = lambda values: [row[:n].tolist() for row, n in zip(values, lengths, strict=True)]  # noqa: E731
        added = recorder.add_sequences(
            step=1, prompt_ids=[[1]] * len(there), response_ids=cut(there.astype(int)), response_mask=cut(mask)
        )
        recorder.add_scores("rollout", added, logprobs=cut(rollout))
        recorder.add_scores("train", added, logprobs=cut(train), scored_mask=cut(known))
    (row,) = stats(tmp_path / "run", by="step", like="verl").dicts()
    same(row, of_verl(verl, there, mask & known, rollout, train))


def test_a_run_is_one_batch(verl, tmp_path):
    batches = [batch(seed, 0.2) for seed in range(3)]
    record(tmp_path / "run", batches)
    (row,) = stats(tmp_path / "run", like="verl").dicts()
    same(row, of_verl(verl, *(np.concatenate(part) for part in zip(*batches, strict=True))))


def test_what_verl_has_no_numbers_of_is_refused(tmp_path):
    make_trace(tmp_path / "run")
    with pytest.raises(InvalidOption, match="verl logs no metrics per sequence; use by='run' or by='step'"):
        stats(tmp_path / "run", like="verl", by="sequence")
    with pytest.raises(InvalidOption, match="like: got 'other'; use one of nemo-rl, openrlhf"):
        stats(tmp_path / "run", like="other")
    make_trace(tmp_path / "one", passes=("rollout",))
    with pytest.raises(NothingToCompare, match="has no logprobs from pass 'train'"):
        stats(tmp_path / "one", like="verl")


@pytest.mark.parametrize(("dtype", "num_notes"), [("bfloat16", 1), ("float32", 0)])
def test_numbers_that_verl_averaged_in_half_precision_are_told(tmp_path, dtype, num_notes):
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_contract("train", {"engine": "verl", "logprobs_dtype": dtype})
        batch = recorder.add_sequences(step=1, response_ids=[[1, 2]])
        recorder.add_scores("rollout", batch, logprobs=[[-1.0, -2.0]])
        recorder.add_scores("train", batch, logprobs=[[-1.0, -2.5]])
    database = open_database([str(tmp_path / "run")])
    assert len(FRAMEWORK().notes(database, parse_pair("train:rollout"))) == num_notes
