"""verl's numbers, against the functions of the published verl wheel, on float64 tensors."""

import importlib.util
import math
import sys
from importlib.metadata import distribution
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from builders import make_trace
from tim_trace.analysis.stats import stats
from tim_trace.schemas.errors import InvalidOption, NothingToCompare
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
        stand_in("verl.protocol", DataProto=object)
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


def of_verl(verl, there, mask, rollout, train):
    """What verl's functions give."""
    old, sampled = (torch.from_numpy(np.where(there, values, 0.0)).double() for values in (train, rollout))
    wide = torch.from_numpy(mask).double()  # a mask of float64 keeps verl's token counts from being float32
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
    assert set(expected) - set(found) == {"training/rollout_probs_diff_valid"}
    for name, value in expected.items():
        if name in found:
            close = pytest.approx(value, rel=1e-7, abs=1e-9, nan_ok=True)
            assert found[name] == close, name


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.5, 8.0], ids=["equal", "rounding", "wide", "extreme"])
def test_every_step_s_numbers_are_verl_s(verl, tmp_path, spread):
    batches = [batch(seed, spread) for seed in range(6)]
    record(tmp_path / "run", batches)
    found = stats(tmp_path / "run", by="step", like="verl").dicts()
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    for row, given in zip(found, batches, strict=True):
        same(row, of_verl(verl, *given))


@pytest.mark.parametrize("odd", [math.nan, -120.0, -math.inf], ids=["nan", "far off", "cut"])
def test_what_is_odd_passes_through_as_in_verl(verl, tmp_path, odd):
    given = batch(1, 0.1, odd=odd)
    record(tmp_path / "run", [given])
    (row,) = stats(tmp_path / "run", like="verl", by="step").dicts()
    same(row, of_verl(verl, *given))


def test_a_run_is_one_batch(verl, tmp_path):
    batches = [batch(seed, 0.2) for seed in range(3)]
    record(tmp_path / "run", batches)
    (row,) = stats(tmp_path / "run", like="verl").dicts()
    same(row, of_verl(verl, *(np.concatenate(part) for part in zip(*batches, strict=True))))


def test_what_verl_has_no_numbers_of_is_refused(tmp_path):
    make_trace(tmp_path / "run")
    with pytest.raises(InvalidOption, match="like verl: has no numbers by sequence; use --by run or step"):
        stats(tmp_path / "run", like="verl", by="sequence")
    with pytest.raises(InvalidOption, match="like: got 'other'; use verl"):
        stats(tmp_path / "run", like="other")
    make_trace(tmp_path / "one", passes=("rollout",))
    with pytest.raises(NothingToCompare, match="has no logprobs of pass 'train'"):
        stats(tmp_path / "one", like="verl")
