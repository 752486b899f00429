"""TRL's numbers, against the statements and methods of the installed TRL that compute them, on float64 tensors.

Shapes: B sequences, T positions.
"""

import ast
import math
from collections import defaultdict
from dataclasses import dataclass, fields
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace

import duckdb
import numpy as np
import pytest
import torch
from builders import make_trace
from shared import rest_slow
from tim_trace.analysis.frameworks.trl import Trl
from tim_trace.analysis.stats import likeness, stats
from tim_trace.analysis.views import connect
from tim_trace.schemas.errors import InvalidOption, NothingToCompare
from tim_trace.tracer.recorder import Recorder

MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
WIDTH = 9


def source(name):
    """A module of trl/trainer, parsed: importing it takes a while, and warns of vLLM's version."""
    return ast.parse(Path(distribution("trl").locate_file(f"trl/trainer/{name}")).read_text(encoding="utf-8"))


def function(module, name):
    (found,) = (node for node in ast.walk(source(module)) if isinstance(node, ast.FunctionDef) and node.name == name)
    return found


def run_of(*nodes, **names):
    """Run nodes of TRL's source, with torch and the smallest and largest of `utils.py` at hand; what they define."""
    helpers = [function("utils.py", name) for name in ("nanmin", "nanmax")]
    names |= {"torch": torch, "math": math}
    exec(compile(ast.Module([*helpers, *nodes], []), "trl", "exec"), names)
    return names


def trainer_of(metrics, gather=torch.atleast_1d, **settings):
    """What TRL's methods ask of a trainer."""
    return SimpleNamespace(
        accelerator=SimpleNamespace(gather=gather, reduce=lambda x, reduction: x, num_processes=1),
        _metrics={"train": metrics},
        **settings,
    )


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
    assert len(blocks) == 2

    def of(given, mode="sequence_mask", clip_max=3.0, clip_min=None, gather=torch.atleast_1d):
        metrics = defaultdict(list)
        trainer = trainer_of(
            metrics,
            gather=gather,
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_max=clip_max,
            vllm_importance_sampling_clip_min=clip_min,
        )
        run_of(
            *blocks,
            **{"self": trainer, "mode": "train", "device": "cpu"},
            old_per_token_logps=torch.tensor(given.old).double(),
            completion_mask=torch.tensor(given.there).long(),
            sampling_per_token_logps=torch.tensor(given.sampling).double(),
            tool_mask=torch.tensor(given.mask).long(),
        )
        return {name: value for name, (value,) in metrics.items()}

    return of


@pytest.fixture(scope="module")
def loss():
    """The metrics of `_compute_loss` of TRL's GRPO trainer."""
    methods = run_of(function("grpo_trainer.py", "_compute_loss"))

    def of(given, *, loss_type="dapo", importance_sampling_level="token", epsilon=0.2, epsilon_high=None, delta=None):
        metrics = defaultdict(list)
        current, old, sampling = (torch.tensor(x).double() for x in (given.current, given.old, given.sampling))
        trainer = trainer_of(
            metrics,
            _get_per_token_logps_and_entropies=lambda *_, **__: (current, torch.zeros_like(current), None),
            model=SimpleNamespace(training=True),
            args=SimpleNamespace(
                delta=delta, steps_per_generation=1, sapo_temperature_pos=1.0, sapo_temperature_neg=1.0
            ),
            loss_type=loss_type, importance_sampling_level=importance_sampling_level,
            epsilon_low=epsilon, epsilon_high=epsilon if epsilon_high is None else epsilon_high,
            off_policy_mask_threshold=None,
            top_entropy_quantile=1.0, beta=0.0, use_vllm=False, aux_loss_enabled=False, _entropy_bonus_enabled=False,
            current_gradient_accumulation_steps=1, max_completion_length=WIDTH,
        )  # fmt: skip
        there = torch.tensor(given.there).long()
        inputs = {
            "prompt_ids": there[:, :0], "prompt_mask": there[:, :0], "completion_ids": there, "completion_mask": there,
            "tool_mask": torch.tensor(given.mask).long(), "advantages": torch.tensor(given.advantages).double(),
            "old_per_token_logps": old, "sampling_per_token_logps": sampling,
            "num_items_in_batch": torch.tensor(given.mask.sum()),
        }  # fmt: skip
        methods["_compute_loss"](trainer, None, inputs)
        return {name: value for name, (value,) in metrics.items() if "clip_ratio" in name}

    return of


@pytest.fixture(scope="module")
def rloo():
    """The metrics of `_compute_loss` of TRL's RLOO trainer, where the rollout's logprobs have no part."""
    method = run_of(function("rloo_trainer.py", "_compute_loss"))["_compute_loss"]

    def of(given, *, epsilon=0.2, epsilon_high=None):
        metrics = defaultdict(list)
        current, old, mask = (torch.tensor(x).double() for x in (given.current, given.old, given.mask))
        trainer = trainer_of(
            metrics,
            _get_per_token_logps_and_entropies=lambda *_, **__: (current, torch.zeros_like(current), None),
            model=SimpleNamespace(training=True), aux_loss_enabled=False,
            epsilon_low=epsilon, epsilon_high=epsilon if epsilon_high is None else epsilon_high,
        )  # fmt: skip
        inputs = {
            "prompt_ids": mask[:, :0], "prompt_mask": mask[:, :0], "completion_ids": mask, "completion_mask": mask,
            "advantages": torch.tensor(given.advantages).double(), "old_logps": (old * mask).sum(1),
        }  # fmt: skip
        method(trainer, None, inputs)
        return {name: value for name, (value,) in metrics.items() if "clip_ratio" in name}

    return of


@dataclass
class Batch:
    """Tokens that are there, tokens that count and the logprobs of three passes, [B, T]; advantages, [B]."""

    there: np.ndarray
    mask: np.ndarray
    sampling: np.ndarray
    old: np.ndarray
    current: np.ndarray
    advantages: np.ndarray


def batch(seed, spread, rows=25):
    """One row has no token that counts."""
    draw = np.random.default_rng(seed)
    there = np.arange(WIDTH) < draw.integers(1, WIDTH + 1, rows)[:, None]
    mask = there & (draw.random(there.shape) > 0.2)
    mask[0, 0], mask[1] = True, False
    sampling = -draw.exponential(1.5, there.shape).astype(np.float32)
    old, current = (np.minimum(sampling + draw.normal(0, spread, there.shape).astype(np.float32), 0) for _ in range(2))
    return Batch(there, mask, sampling, old, current, draw.choice([-1.0, -0.1, 0.0, 0.5], rows))


def record(path, batches, passes=("rollout", "train", "current"), steps=None):
    with Recorder(path) as recorder:
        for step, given in zip(steps or range(1, len(batches) + 1), batches, strict=True):

            def cut(values, there=given.there):
                return [row[kept].tolist() for row, kept in zip(values, there, strict=True)]

            added = recorder.add_sequences(
                step=step, prompt_ids=[[1]] * len(given.there), response_ids=cut(given.there.astype(int)),
                response_mask=cut(given.mask), advantage=given.advantages,
                seq_ids=[f"{recorder.writer.name}-{step}-{row}" for row in range(len(given.there))],
            )  # fmt: skip
            for name, logprobs in {"rollout": given.sampling, "train": given.old, "current": given.current}.items():
                if name in passes:
                    recorder.add_scores(name, added, logprobs=cut(logprobs))


def odd_batch():
    """vLLM gave some tokens no number, the trainer gave one the probability 0, and one advantage is no number."""
    given = batch(7, 0.3)
    given.sampling[2:6, 0] = math.nan
    given.mask[2:6, 0] = True
    given.old[6, 0], given.mask[6, 0] = -math.inf, True
    given.current[7, 0], given.mask[7, 0] = math.nan, True
    given.advantages[8:10] = math.nan, math.inf
    return given


def unknown_batch():
    """vLLM gave no token a number."""
    given = batch(8, 0.3)
    given.sampling[:] = math.nan
    return given


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    path = tmp_path_factory.mktemp("trl") / "run"
    batches = [batch(seed, spread) for seed, spread in enumerate([0.0, 0.1, 1.0, 6.0])] + [odd_batch(), unknown_batch()]
    record(path, batches)
    return path, batches


def agree(found, expected):
    for name, value in expected.items():
        # TRL counts and divides in float32 here.
        close = 2e-7 if "clip_ratio" in name else 1e-9
        assert found[name] == pytest.approx(value, rel=close, abs=1e-12, nan_ok=True), name


@pytest.mark.parametrize("mode", rest_slow(MODES, 2))
@pytest.mark.parametrize(("clip_max", "clip_min"), rest_slow([(3.0, None), (1.2, 0.8)]))
def test_every_step_s_numbers_are_trl_s(trl, loss, steps, mode, clip_max, clip_min):
    path, batches = steps
    options = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": clip_max}
    found = stats(path, by="step", like="trl", vllm_importance_sampling_clip_min=clip_min, **options).dicts()
    for row, given in zip(found, batches, strict=True):
        expected = trl(given, mode, clip_max, clip_min) | loss(given)
        assert set(row) == {"run", "step", *expected}
        agree(row, expected)


@pytest.mark.parametrize(
    "options",
    rest_slow(
        [
            {"epsilon": 0.05},
            {"epsilon": 0.3, "epsilon_high": 0.01},
            {"loss_type": "grpo", "epsilon": 0.05, "delta": 1.02},
            {"importance_sampling_level": "sequence", "epsilon": 0.02},
            {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.1, "delta": 1.2},
            {"loss_type": "cispo", "epsilon_high": 1.1},
            {"loss_type": "cispo", "importance_sampling_level": "sequence", "epsilon_high": 1.01, "delta": 1.0},
            {"loss_type": "sapo"},
        ],
        4,
    ),
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_what_the_loss_clips_is_trl_s(loss, steps, options):
    path, batches = steps
    found = stats(path, by="step", like="trl", **options).dicts()
    shares = 0.0
    for row, given in zip(found, batches, strict=True):
        expected = loss(given, **options)
        assert {name for name in row if not name.startswith("sampling/")} == {"run", "step", *expected}
        agree(row, expected)
        shares += sum(expected.values())
    assert shares > 0 or options == {"loss_type": "sapo"}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_log_is_a_mean_over_generation_batches_and_their_processes(trl, tmp_path, monkeypatch, mode):
    # Each process's batch of each of five steps, of which TRL generates at four, and what it logs at the second and later.
    monkeypatch.setenv("WORLD_SIZE", "2")
    batches = {rank: [batch(10 * rank + seed, 0.3, rows=5 + 9 * rank) for seed in range(4)] for rank in (0, 1)}
    for rank, own in batches.items():
        monkeypatch.setenv("RANK", str(rank))
        record(tmp_path / "run", own, passes=("rollout", "train"), steps=[1, 2, 3, 5])
    logged = []
    for one, other in zip(*batches.values(), strict=True):
        first = []
        trl(one, mode, gather=lambda x, first=first: first.append(x) or torch.atleast_1d(x))
        rest = iter(first)
        logged.append(trl(other, mode, gather=lambda x, rest=rest: torch.stack([next(rest), x])))
    found = {
        row["step"]: row
        for row in stats(
            tmp_path / "run", by="step", like="trl", logging_steps=2, vllm_importance_sampling_mode=mode
        ).dicts()
    }
    assert list(found) == [2, 4, 5]
    for step, parts in {2: logged[:2], 4: logged[2:3], 5: logged[3:]}.items():
        agree(found[step], {name: np.mean([part[name] for part in parts]) for name in logged[0]})


@pytest.mark.parametrize("options", [{}, {"epsilon": 0.1, "epsilon_high": 0.4}])
def test_rloo_clips_ratios_of_sequences(rloo, tmp_path, options):
    # RLOO multiplies by the mask: a token that does not count has a logprob here.
    batches = [batch(seed, spread) for seed, spread in enumerate([0.0, 0.1, 1.0])]
    record(tmp_path / "run", batches)
    found = stats(tmp_path / "run", by="step", like="trl", trainer="rloo", **options).dicts()
    for row, given in zip(found, batches, strict=True):
        expected = rloo(given, **options)
        assert set(row) == {"run", "step", *expected}
        agree(row, expected)


def test_what_lies_on_a_token_that_does_not_count_is_left_out(trl, loss, tmp_path):
    sound, given = batch(2, 0.3), batch(2, 0.3)
    row, position = np.argwhere(given.there & ~given.mask & (given.advantages > 0)[:, None])[0]
    for each in (sound, given):
        each.old[row], each.current[row] = -2, -1  # so that the sequence is clipped
    given.current[row, position] = given.sampling[row, position] = math.nan
    record(tmp_path / "run", [given])
    for level in ("token", "sequence"):
        (found,) = stats(tmp_path / "run", like="trl", importance_sampling_level=level).dicts()
        agree(found, trl(sound) | loss(sound, importance_sampling_level=level))
    logged = loss(given, importance_sampling_level="sequence")["clip_ratio/high_mean"]
    assert logged == pytest.approx(found["clip_ratio/high_mean"] - 1 / 25)
    assert likeness(tmp_path / "run", like="trl")[1:] == []
    (told,) = likeness(tmp_path / "run", like="trl", importance_sampling_level="sequence")[1:]
    assert told == (
        "1 logprobs at 1 steps are NaN or infinite on masked tokens: TRL multiplies by a mask of 0, which gives "
        "NaN, so TRL counts the ratio of a sequence with such a token as not clipped; tim-trace leaves such tokens out"
    )


def test_without_rollout_logprobs_the_clips_are_known(loss, tmp_path):
    given = batch(2, 0.3)
    record(tmp_path / "run", [given], passes=("train", "current"))
    (row,) = stats(tmp_path / "run", like="trl").dicts()
    agree(row, loss(given))
    assert row["sampling/sampling_logp_difference/mean"] is None
    (told,) = likeness(tmp_path / "run", like="trl")[1:]
    assert told == "run: no pass 'rollout' recorded, so sampling/* is NULL"
    with pytest.raises(NothingToCompare, match="has no logprobs from pass 'other'"):
        stats(tmp_path / "run", like="trl", pair="train:other")


def test_what_the_loss_clips_is_not_known_without_its_pass_or_without_advantages(tmp_path):
    given = batch(2, 0.3)
    record(tmp_path / "run", [given], passes=("rollout", "train"))
    (row,) = stats(tmp_path / "run", like="trl").dicts()
    assert {row[name] for name in row if "clip_ratio" in name} == {None}
    assert "no pass 'current' recorded, so clip_ratio/* is NULL" in likeness(tmp_path / "run", like="trl")[1]
    with Recorder(tmp_path / "bare") as recorder:
        added = recorder.add_sequences(step=1, prompt_ids=[[1]] * 2, response_ids=[[2, 3]] * 2, advantage=[1.0, None])
        for name, logprob in {"rollout": -1.0, "train": -1.0, "current": -3.0}.items():
            recorder.add_scores(name, added, logprobs=[[logprob, logprob]] * 2)
    for level in ("token", "sequence"):
        (row,) = stats(tmp_path / "bare", like="trl", importance_sampling_level=level).dicts()
        assert {row[name] for name in row if "clip_ratio" in name} == {None}


def test_the_defaults_are_trl_s(trl, steps):
    all_defaults = {
        node.target.id: next((word.value for word in node.value.keywords if word.arg == "default"), None)
        for node in ast.walk(source("grpo_config.py"))
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call)
    }
    defaults = {name: value for name, value in all_defaults.items() if name.startswith("vllm_importance_sampling_")}
    mode, clip_max, clip_min = (
        ast.literal_eval(defaults[f"vllm_importance_sampling_{name}"]) for name in ("mode", "clip_max", "clip_min")
    )
    path, batches = steps
    found = stats(path, by="step", like="trl").dicts()[2]
    agree(found, trl(batches[2], mode, clip_max, clip_min))
    connection = connect(path, like=["trl"])
    assert connection.execute("SELECT * FROM trl_steps('train', 'rollout')").fetchall()[2] == (
        *found.values(),
        None,
    )
    for option in ("trainer", "loss_type", "importance_sampling_level"):
        with pytest.raises(duckdb.InvalidInputException, match=f"{option}: "):
            connection.execute(f"SELECT * FROM trl_steps('train', 'rollout', {option} := 'other')").fetchall()
    names = {field.name for field in fields(Trl)} - {"trainer", *defaults, "logging_steps", "logging_first_step"}
    for name in names:
        assert ast.literal_eval(all_defaults[name]) == getattr(Trl(), name), name


def test_worked_by_hand(tmp_path):
    # d = log 2 and log 2 in one sequence, -log 2 in the other: ratios 2, 2, 0.5 of tokens, and 4 and 0.5 of sequences.
    there = np.array([[True, True], [True, False]])
    sampling = np.full(there.shape, -1.0)
    old = sampling + np.log([[2.0, 2.0], [0.5, 1.0]])
    record(tmp_path / "run", [Batch(there, there, sampling, old, old, np.ones(2))], passes=("rollout", "train"))
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
    with pytest.raises(
        InvalidOption, match=r"vllm_importance_sampling_clip_min: got 4; it must be below clip_max \(3\)"
    ):
        stats(tmp_path / "run", like="trl", vllm_importance_sampling_clip_min=4.0)
    with pytest.raises(InvalidOption, match="loss_type: got 'ppo'; trl has grpo, dr_grpo"):
        stats(tmp_path / "run", like="trl", loss_type="ppo")
    with pytest.raises(InvalidOption, match="epsilon: got -1; pass 0 or more"):
        stats(tmp_path / "run", like="trl", epsilon=-1.0)
    with pytest.raises(InvalidOption, match="logging_steps: got 0; pass 1 or more"):
        stats(tmp_path / "run", by="step", like="trl", logging_steps=0)
    with pytest.raises(InvalidOption, match="logging_steps: TRL does not log values for a whole run; use by='step'"):
        stats(tmp_path / "run", like="trl", logging_steps=2)
    with pytest.raises(InvalidOption, match="logging_first_step needs logging_steps"):
        stats(tmp_path / "run", by="step", like="trl", logging_first_step=True)
    with pytest.raises(InvalidOption, match="delta: TRL's RLOO trainer does not have this option"):
        stats(tmp_path / "run", like="trl", trainer="rloo", delta=2.0)
