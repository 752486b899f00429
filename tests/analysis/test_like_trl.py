"""TRL's numbers, against the statements of the installed TRL that compute them, on float64 tensors."""

import ast
import math
from collections import defaultdict
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders import make_trace
from tim_trace.analysis.database import connect
from tim_trace.analysis.stats import stats
from tim_trace.schemas.errors import InvalidOption
from tim_trace.tracer.recorder import Recorder

MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
WIDTH = 9


def source(name):
    """A module of trl/trainer, parsed: importing it takes a while, and warns of vLLM's version."""
    return ast.parse(Path(distribution("trl").locate_file(f"trl/trainer/{name}")).read_text(encoding="utf-8"))


def function(module, name):
    (found,) = (node for node in ast.walk(source(module)) if isinstance(node, ast.FunctionDef) and node.name == name)
    return found


@pytest.fixture(scope="module")
def trl():
    """What `_generate_and_score_completions` does where it corrects for vLLM: the ratios, and then the metrics."""
    method = function("grpo_trainer.py", "_generate_and_score_completions")
    blocks = [
        node
        for node in ast.walk(method)
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == "self.use_vllm and self.vllm_importance_sampling_correction"
        and len(node.body) > 1
    ]
    blocks.sort(key=lambda node: node.lineno)
    code = compile(ast.Module(blocks, []), "grpo_trainer.py", "exec")
    metrics = defaultdict(list)
    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        accelerator=SimpleNamespace(gather=torch.atleast_1d),
        _metrics={"train": metrics},
    )

    def of(given, mode, clip_max, clip_min):
        metrics.clear()
        vars(trainer).update(
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_max=clip_max,
            vllm_importance_sampling_clip_min=clip_min,
        )
        there, mask, sampling, old = given
        names = {"self": trainer, "torch": torch, "math": math, "mode": "train", "device": "cpu"}
        exec(
            compile(ast.Module([function("utils.py", name) for name in ("nanmin", "nanmax")], []), "trl", "exec"), names
        )
        names |= {"old_per_token_logps": torch.tensor(old).double(), "completion_mask": torch.tensor(there).long()}
        names |= {"sampling_per_token_logps": torch.tensor(sampling).double(), "tool_mask": torch.tensor(mask).long()}
        exec(code, names)
        return {name: value for name, (value,) in metrics.items()}

    assert len(blocks) == 2
    return of


def batch(seed, spread, rows=25):
    """Tokens there, tokens that count, and both logprobs; one row has none that counts."""
    draw = np.random.default_rng(seed)
    there = np.arange(WIDTH) < draw.integers(1, WIDTH + 1, rows)[:, None]
    mask = there & (draw.random(there.shape) > 0.2)
    mask[0, 0], mask[1] = True, False
    sampling = -draw.exponential(1.5, there.shape).astype(np.float32)
    old = np.minimum(sampling + draw.normal(0, spread, there.shape).astype(np.float32), 0)
    return there, mask, sampling, old


def record(path, batches):
    with Recorder(path) as recorder:
        for step, (there, mask, sampling, old) in enumerate(batches, 1):

            def cut(values, there=there):
                return [row[kept].tolist() for row, kept in zip(values, there, strict=True)]

            added = recorder.add_sequences(
                step=step, prompt_ids=[[1]] * len(there), response_ids=cut(there.astype(int)), response_mask=cut(mask)
            )
            recorder.add_scores("rollout", added, logprobs=cut(sampling))
            recorder.add_scores("train", added, logprobs=cut(old))


def odd_batch():
    """vLLM gave some tokens no number, and the trainer gave one the probability 0."""
    there, mask, sampling, old = batch(7, 0.3)
    sampling[2:6, 0] = math.nan
    mask[2:6, 0] = True
    old[6, 0], mask[6, 0] = -math.inf, True
    return there, mask, sampling, old


def unknown_batch():
    """vLLM gave no token a number."""
    there, mask, sampling, old = batch(8, 0.3)
    return there, mask, np.full_like(sampling, math.nan), old


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    path = tmp_path_factory.mktemp("trl") / "run"
    batches = [batch(seed, spread) for seed, spread in enumerate([0.0, 0.1, 1.0, 6.0])] + [odd_batch(), unknown_batch()]
    record(path, batches)
    return path, batches


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("clip_max", "clip_min"), [(3.0, None), (1.2, 0.8)])
def test_every_step_s_numbers_are_trl_s(trl, steps, mode, clip_max, clip_min):
    path, batches = steps
    options = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": clip_max}
    found = stats(path, by="step", like="trl", vllm_importance_sampling_clip_min=clip_min, **options).dicts()
    for row, given in zip(found, batches, strict=True):
        expected = trl(given, mode, clip_max, clip_min)
        assert set(row) == {"run", "step", *expected}
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_the_defaults_are_trl_s(trl, steps):
    defaults = {
        node.target.id: next(word.value for word in node.value.keywords if word.arg == "default")
        for node in ast.walk(source("grpo_config.py"))
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target).startswith("vllm_importance_sampling_")
    }
    mode, clip_max, clip_min = (
        ast.literal_eval(defaults[f"vllm_importance_sampling_{name}"]) for name in ("mode", "clip_max", "clip_min")
    )
    path, batches = steps
    expected = trl(batches[2], mode, clip_max, clip_min)
    found = stats(path, by="step", like="trl").dicts()[2]
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    assert connect(path, like=["trl"]).execute("SELECT * FROM trl_steps('train', 'rollout')").fetchall()[2] == tuple(
        found.values()
    )


def test_worked_by_hand(tmp_path):
    # d = log 2 and log 2 in one sequence, -log 2 in the other: ratios 2, 2, 0.5 of tokens, and 4 and 0.5 of sequences.
    there = np.array([[True, True], [True, False]])
    sampling = np.full(there.shape, -1.0)
    old = sampling + np.log([[2.0, 2.0], [0.5, 1.0]])
    record(tmp_path / "run", [(there, there, sampling, old)])
    (row,) = stats(tmp_path / "run", like="trl").dicts()
    assert row["sampling/sampling_logp_difference/mean"] == pytest.approx(math.log(2), rel=1e-6)
    ratios = [row[f"sampling/importance_sampling_ratio/{name}"] for name in ("min", "mean", "max")]
    assert ratios == pytest.approx([0, 0.25, 0.5], rel=1e-6)
    (row,) = stats(tmp_path / "run", like="trl", vllm_importance_sampling_mode="token_truncate").dicts()
    assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.5, rel=1e-6)


def test_options_that_trl_would_not_take_are_refused(tmp_path):
    make_trace(tmp_path / "run")
    with pytest.raises(InvalidOption, match="got 'token'; trl has token_truncate, token_mask"):
        stats(tmp_path / "run", like="trl", vllm_importance_sampling_mode="token")
    with pytest.raises(InvalidOption, match=r"vllm_importance_sampling_clip_min: got 4; it lies below clip_max, 3"):
        stats(tmp_path / "run", like="trl", vllm_importance_sampling_clip_min=4.0)
