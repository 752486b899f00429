"""The recorded loss made again by `gradient`, by `objective` and in SQL, against the installed TRL's and each other.

TRL's is its own `_compute_loss` on float64 tensors. Real are the unbound methods `GRPOTrainer._compute_loss`, `get_gamma_weights` and `get_high_entropy_mask` and
`RLOOTrainer._compute_loss`, the configs with their defaults, and the statements of `_generate_and_score_completions` that
make vLLM's importance ratio. Stand-ins are the trainer around them (its attributes are the config's), one process's
accelerator, and the forward, which gives the logprobs that the test made. RLOO's loss is divided by the number of
micro-batches here, as transformers' Trainer does after `_compute_loss`.

Every value is a float32 in float64, as a trace holds it, and torch's default dtype is float64, so that TRL's own constants
(temperatures, normalizers) are not rounded. What is left is the order of sums of about a hundred terms: 1e-12.
"""

import ast
import inspect
import itertools
import math
import textwrap
import warnings
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gradient_rule import has_gradient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared import rest_slow
from tim_trace.analysis.objective.figures import totals_of
from tim_trace.analysis.objective.objective import objective
from tim_trace.analysis.objective.pass_roles import choose_sides
from tim_trace.analysis.objective.sums import read_sequence_sums
from tim_trace.analysis.statistics.loss import contribution, is_clipped
from tim_trace.analysis.views import open_database
from tim_trace.replay.gradients.arm import GradientArm
from tim_trace.replay.gradients.loss import StepLoss, divisors, passes_of
from tim_trace.replay.gradients.update import updates
from tim_trace.replay.recorded import RecordedRun
from tim_trace.schemas.loss import (
    _GRPO_AGGREGATIONS,
    _NEUTRAL,
    AGGREGATIONS,
    CORRECTIONS,
    DENOMINATORS,
    KINDS,
    LEVELS,
    Loss,
    read_loss,
)
from tim_trace.tracer.progress import no_progress
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.rows import Forward

CLOSE = {"rel": 1e-12, "abs": 1e-15}
MICRO, ROWS, WIDTH = 3, 4, 7
"""Micro-batches of an optimizer step, their rows, and the padded width."""
LOSS_TYPES = sorted(_GRPO_AGGREGATIONS)
KL = [{"beta": 0.0}, {"beta": 0.2, "use_bias_correction_kl": False}, {"beta": 0.2, "use_bias_correction_kl": True}]
CLIPPED_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
WEIGHTS = ("cispo", "vespo")
"""Their loss is a weight times a logprob: what `used` adds up is the weight, and so minus the gradient."""


@pytest.fixture(scope="module")
def trl():
    """The trainers and configs of the installed TRL, and its statements for vLLM's importance ratio."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vLLM's version, and torch's own deprecations
        from trl.trainer import grpo_config, grpo_trainer, rloo_config, rloo_trainer
    scoring = method(grpo_trainer.GRPOTrainer._generate_and_score_completions)
    (block,) = (
        node
        for node in ast.walk(scoring)
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == "self.use_vllm and self.vllm_importance_sampling_correction"
        and "masked_fill" in ast.unparse(node)
    )
    return SimpleNamespace(
        grpo=grpo_trainer.GRPOTrainer, rloo=rloo_trainer.RLOOTrainer, grpo_config=grpo_config.GRPOConfig,
        rloo_config=rloo_config.RLOOConfig, ratio=compile(ast.Module([block], []), "grpo_trainer.py", "exec"),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def double():
    """TRL in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def method(function):
    """A method's syntax tree."""
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))


def as32(values):
    return np.asarray(values, np.float32).astype(np.float64)


def make(seed, scenario):
    """[M * B, T] arrays of an optimizer step: what is there, what counts, four passes' logprobs; and [M * B] advantages."""
    draw = np.random.default_rng(seed)
    shape = (MICRO * ROWS, WIDTH)
    there = np.arange(WIDTH) < draw.integers(2, WIDTH + 1, len(np.zeros(shape)))[:, None]
    there[0] = True
    mask = there.copy()
    if scenario != "whole":
        mask &= draw.random(shape) > 0.25
        mask[1, 0] = mask[2, 0] = True
        mask[5] = False  # one row, as mask_truncated_completions leaves it
        mask[6, 1:] = False
        mask[6, 0] = True
    if scenario == "empty":
        mask[ROWS : 2 * ROWS] = False  # a whole micro-batch
    rollout = np.minimum(-draw.exponential(1.0, shape), 0)
    train = np.minimum(rollout + draw.normal(0, 0.25, shape), 0)
    current = np.minimum(train + draw.normal(0, 0.25, shape), 0)
    reference = np.minimum(train + draw.normal(0, 0.3, shape), 0)
    advantages = draw.normal(size=shape[0])
    advantages[3] = 0.0
    arrays = {"rollout": rollout, "train": train, "current": current, "reference": reference, "advantages": advantages}
    return {"there": there, "mask": mask} | {name: as32(values) for name, values in arrays.items()}


def micro_batches(count=MICRO):
    return [slice(start, start + ROWS) for start in range(0, count * ROWS, ROWS)]


def record(path, step, settings=None, versions=1):
    """A trace of the step, a forward a micro-batch; masked rows have no logprobs of the trainer's, as its hook records them.

    `versions` optimizer steps share out its micro-batches.
    """
    there, mask = step["there"], step["mask"]
    num_rows = len(there)

    def cut(values):
        return [row[kept].tolist() for row, kept in zip(values, there, strict=True)]

    with Recorder(path) as recorder:
        recorder.describe(model={"class": "none", "config": {"vocab_size": 9}})
        for name in ("train", "current", "reference"):
            recorder.add_contract(name, {"engine": "none"})
        if settings is not None:
            recorder.add_hyperparameters(settings)
        added = recorder.add_sequences(
            step=1, prompt_ids=[[1, 2]] * num_rows, response_ids=cut(there.astype(int)), response_mask=cut(mask),
            advantage=step["advantages"], group_ids=[row // 2 for row in range(num_rows)], policy_version=0,
        )  # fmt: skip
        scored = np.repeat(mask.any(axis=1)[:, None], there.shape[1], axis=1)
        recorder.add_scores("rollout", added, logprobs=cut(step["rollout"]))
        place = np.arange(num_rows)
        forward = Forward(
            ids=place // ROWS, places=(place % ROWS).astype("i4"), rows=np.full(num_rows, ROWS, "i4"),
            pad_left=np.zeros(num_rows, "i4"), pad_right=(there.shape[1] - there.sum(1)).astype("i4"),
        )  # fmt: skip
        for name in ("train", "reference", "current"):
            more = {"forward": forward, "policy_version": place * versions // num_rows} if name == "current" else {}
            recorder.add_scores(name, added, logprobs=cut(step[name]), scored_mask=cut(scored), **more)
    return path


def config_of(kind, folder, **settings):
    """A real config; what a test does not say is TRL's default."""
    batch = {"per_device_train_batch_size": ROWS, "gradient_accumulation_steps": MICRO, "num_generations": 2}
    return kind(output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], **batch | settings)


def trainer_of(config, kind):
    """What `_compute_loss` reads of a trainer."""
    one_process = SimpleNamespace(
        num_processes=1, gather=torch.atleast_1d, reduce=lambda value, reduction: value, sync_gradients=True,
        gather_for_metrics=torch.atleast_1d, pad_across_processes=lambda value, **_: value,
    )  # fmt: skip
    values = config.to_dict() | {
        "args": config, "epsilon_low": config.epsilon,
        "epsilon_high": config.epsilon if config.epsilon_high is None else config.epsilon_high,
        "current_gradient_accumulation_steps": config.gradient_accumulation_steps, "aux_loss_enabled": False,
        "accelerator": one_process, "model": SimpleNamespace(training=True), "_metrics": {"train": defaultdict(list)},
    }  # fmt: skip
    trainer = SimpleNamespace(**values, _entropy_bonus_enabled=bool(values.get("entropy_coef")))
    if hasattr(kind, "get_gamma_weights"):
        trainer.get_gamma_weights = kind.get_gamma_weights
        trainer.get_off_policy_mask = kind.get_off_policy_mask
        trainer.get_high_entropy_mask = kind.get_high_entropy_mask.__get__(trainer)
    return trainer


def ratio_of(trl, trainer, step):
    """vLLM's importance ratio, [B, T] or [B, 1], by TRL's own statements."""
    names = {
        "self": trainer, "torch": torch, "math": math, "completion_mask": torch.tensor(step["there"]).long(),
        "tool_mask": torch.tensor(step["mask"]).long(), "old_per_token_logps": torch.tensor(step["train"]),
        "sampling_per_token_logps": torch.tensor(step["rollout"]),
    }  # fmt: skip
    exec(trl.ratio, names)
    return names["vllm_importance_sampling_ratio"]


def trl_loss(trl, config, step, old=True):
    """The scalar loss of each micro-batch, and [M * B, T] its gradient with respect to the logprobs."""
    is_rloo = isinstance(config, trl.rloo_config)
    kind = trl.rloo if is_rloo else trl.grpo
    trainer = trainer_of(config, kind)
    ratio = ratio_of(trl, trainer, step) if not is_rloo and config.use_vllm else None
    losses, gradients = [], []
    for rows in micro_batches(len(step["mask"]) // ROWS):
        leaf = torch.tensor(step["current"][rows], requires_grad=True)
        entropies = torch.tensor(-step["train"][rows])
        trainer._get_per_token_logps_and_entropies = lambda *_, leaf=leaf, entropies=entropies, **__: (
            leaf,
            entropies,
            None,
        )
        ids = torch.ones(leaf.shape, dtype=torch.long)
        there, mask = (torch.tensor(step[name][rows]).long() for name in ("there", "mask"))
        inputs = {
            "prompt_ids": ids[:, :2], "prompt_mask": ids[:, :2], "completion_ids": ids,
            "advantages": torch.tensor(step["advantages"][rows]), "num_items_in_batch": torch.tensor(step["mask"].sum()),
            "ref_per_token_logps": torch.tensor(step["reference"][rows]),
        }  # fmt: skip
        old_BT = torch.tensor(step["train"][rows])
        if is_rloo:
            inputs |= {"completion_mask": mask, "old_logps": (old_BT * mask).sum(1)}
        else:
            inputs |= {"completion_mask": there, "tool_mask": mask}
            inputs |= {"old_per_token_logps": old_BT} if old else {}
            inputs |= {} if ratio is None else {"importance_sampling_ratio": ratio[rows]}
            inputs |= {} if ratio is None else {"sampling_per_token_logps": torch.tensor(step["rollout"][rows])}
        loss = kind._compute_loss(trainer, None, inputs)
        loss = loss / config.gradient_accumulation_steps if is_rloo else loss
        loss.backward()
        losses.append(loss.item())
        gradients.append(leaf.grad.numpy())
    return np.array(losses), np.concatenate(gradients)


def our_loss(path, loss, step):
    """The same of replay.gradients, from the trace."""
    run = RecordedRun(path)
    losses, gradient = [], np.zeros(step["mask"].shape)
    for update in updates(run, 1, passes_of(loss, GradientArm()), {}):
        made = StepLoss(loss, loss.denominator, "train", divisors(loss, update))
        for rows in update.places.values():
            places = [int(entry.row.seq_id.rpartition("-")[2]) for entry in rows]
            kept = [step["there"][place] for place in places]
            leaf = torch.tensor(
                np.concatenate([step["current"][place][own] for place, own in zip(places, kept, strict=True)]),
                requires_grad=True,
            )
            value = made(rows, leaf)
            value.backward()
            losses.append(value.item())
            parts = np.split(leaf.grad.numpy(), np.cumsum([own.sum() for own in kept])[:-1])
            for place, own, part in zip(places, kept, parts, strict=True):
                gradient[place][own] = part
    return np.array(losses), gradient


def used_by_objective(database, loss):
    """The sum of w f(rho_used) of an update, as the objective weighs it."""
    totals = totals_of(read_sequence_sums(database, choose_sides(database, loss), no_progress))
    return totals["w_used_positive"].sum() + totals["w_used_negative"].sum()


def wanted_use(loss, step, losses, gradient):
    """What TRL's own numbers say of the sum of w f(rho_used)."""
    if loss.kind in WEIGHTS:
        return -gradient.sum()
    # A row without a token has a ratio of 1 whatever any pass gave: RLOO's mean has its f(1), which no pass can move.
    empty = ~step["mask"].any(axis=1)
    has_constant = loss.aggregation == "sequence" and loss.level != "token" and not loss.correction.startswith("token")
    at_one = contribution(loss, np.ones(empty.sum()), step["advantages"][empty])
    return -losses.sum() - (at_one.sum() / len(empty) if has_constant else 0.0)


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Scenario -> (the step, its trace, the trace as a database)."""
    folder = tmp_path_factory.mktemp("trl-loss")
    found = {}
    for seed, scenario in enumerate(("whole", "masked", "empty")):
        step = make(seed, scenario)
        path = record(folder / scenario, step)
        found[scenario] = step, path, open_database(path)
    return found


def settings_of(loss_type, level, correction, kl, delta):
    said = {
        "loss_type": loss_type, "importance_sampling_level": level, "epsilon": 0.1, "epsilon_high": 0.15, "delta": delta,
        "max_completion_length": 16, "sapo_temperature_pos": 1.3, "vespo_lambda_neg": 1.7,
    } | kl  # fmt: skip
    if loss_type == "cispo":
        said["epsilon_high"] = 1.2
    if correction != "none":
        said |= {
            "use_vllm": True, "vllm_importance_sampling_mode": correction, "vllm_importance_sampling_clip_max": 1.25,
            "vllm_importance_sampling_clip_min": 0.7,
        }  # fmt: skip
    return said


def check(trl, config, step, path, database, loss):
    """(a) the scalar loss and its gradient; and without a KL term (b) the objective's sum and (c) SQL's."""
    losses, gradient = trl_loss(trl, config, step)
    found, found_gradient = our_loss(path, loss, step)
    assert found == pytest.approx(losses, **CLOSE)
    assert found_gradient == pytest.approx(gradient, **CLOSE)
    if loss.kl_coefficient:
        return
    wanted = pytest.approx(wanted_use(loss, step, losses, gradient), **CLOSE)
    assert used_by_objective(database, loss) == wanted


@pytest.mark.parametrize(
    "scenario", ["masked", *(pytest.param(name, marks=pytest.mark.slow) for name in ("whole", "empty"))]
)
@pytest.mark.parametrize("level", rest_slow(["token", "sequence"]))
@pytest.mark.parametrize("loss_type", rest_slow(LOSS_TYPES, 2))
def test_every_loss_of_trl_comes_back(trl, traces, tmp_path, loss_type, level, scenario):
    step, path, database = traces[scenario]
    deltas = (None, 1.3, 1.05) if loss_type in CLIPPED_TYPES else (None,)
    for correction, kl, delta in itertools.product(CORRECTIONS, KL, deltas):
        if loss_type == "vespo" and correction.startswith("sequence"):
            continue  # TRL refuses it
        if delta is not None and (correction not in ("none", "token_mask") or kl["beta"]):
            continue
        config = config_of(trl.grpo_config, tmp_path, **settings_of(loss_type, level, correction, kl, delta))
        loss = read_loss(config.to_dict())
        assert loss is not None
        assert loss.unknown == ()
        assert loss.correction == correction
        check(trl, config, step, path, database, loss)


@pytest.mark.parametrize("scenario", ["whole", "masked", "empty"])
def test_rloo_comes_back(trl, traces, tmp_path, scenario):
    step, path, database = traces[scenario]
    config = config_of(trl.rloo_config, tmp_path, epsilon=0.1, epsilon_high=0.15, beta=0.05)
    check(trl, config, step, path, database, read_loss(config.to_dict()))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_logprobs_of_the_loss_s_own_forward_below_the_ratio(trl, traces, tmp_path, loss_type):
    step, path, _ = traces["masked"]
    config = config_of(trl.grpo_config, tmp_path, loss_type=loss_type)
    losses, gradient = trl_loss(trl, config, step, old=False)
    loss = read_loss(config.to_dict())
    found, found_gradient = our_loss(path, Loss(**given_of(loss) | {"denominator": "current"}), step)
    assert found == pytest.approx(losses, **CLOSE)
    assert found_gradient == pytest.approx(gradient, **CLOSE)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    scenario=st.sampled_from(["whole", "masked", "empty"]),
    kind=st.sampled_from(KINDS),
    level=st.sampled_from(LEVELS),
    aggregation=st.sampled_from(AGGREGATIONS),
    correction=st.sampled_from(CORRECTIONS),
    denominator=st.sampled_from(DENOMINATORS),
    clip_hard=st.none() | st.sampled_from([0.9, 1.05, 1.5]),
)
def test_gradient_and_objective_make_the_same_loss(traces, scenario, **given):
    """Also those that no trainer has, as a correction of tokens beside one term a sequence."""
    step, path, database = traces[scenario]
    given["level"] = "sequence_sum" if given["kind"] == "vespo" else given["level"]
    given |= {"clip_low": 0.1, "clip_high": 1.2 if given["kind"] == "cispo" else 0.15, "max_tokens": 16}
    loss = Loss(**given, correction_low=0.7, correction_high=1.25)
    losses, gradient = our_loss(path, loss, step)
    wanted = pytest.approx(wanted_use(loss, step, losses, gradient), **CLOSE)
    assert used_by_objective(database, loss) == wanted


def given_of(loss):
    return {name: getattr(loss, name) for name in Loss.__dataclass_fields__}


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo"])
def test_a_generation_batch_of_several_optimizer_steps_comes_back(trl, tmp_path, loss_type):
    first, second = make(5, "masked"), make(6, "whole")
    step = {name: np.concatenate([first[name], second[name]]) for name in first}
    path = record(tmp_path / "run", step, versions=2)
    config = config_of(trl.grpo_config, tmp_path, loss_type=loss_type, steps_per_generation=2 * MICRO)
    loss = read_loss(config.to_dict())
    assert loss.aggregation == "batch_token_mean"
    losses, gradient = trl_loss(trl, config, step)
    found, found_gradient = our_loss(path, loss, step)
    assert found == pytest.approx(losses, **CLOSE)
    assert found_gradient == pytest.approx(gradient, **CLOSE)
    # The objective's update is both optimizer steps, of which its sum is the mean.
    wanted = pytest.approx(wanted_use(loss, step, losses, gradient) / 2, **CLOSE)
    assert used_by_objective(open_database(path), loss) == wanted


@pytest.mark.parametrize("loss_type", rest_slow(["grpo", "dr_grpo", "luspo", "sapo", "gspo", "rloo"], 3))
def test_masked_rows_stay_in_the_mean_of_a_recorded_run(trl, tmp_path, loss_type):
    """Three of eight rows masked: a mean over those with tokens would be 1.6 times too large."""
    step = {name: values[:8] for name, values in make(9, "whole").items()}
    step["mask"][[1, 4, 6]] = False
    batch = {"gradient_accumulation_steps": 2, "beta": 0.0}
    if loss_type == "rloo":
        config = config_of(trl.rloo_config, tmp_path, **batch)
    elif loss_type == "gspo":
        given = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
        config = config_of(trl.grpo_config, tmp_path, **given, **batch)
    else:
        config = config_of(trl.grpo_config, tmp_path, loss_type=loss_type, **batch)
    losses, gradient = trl_loss(trl, config, step)
    path = record(tmp_path / "run", step, settings=config.to_dict())
    found = objective(path)
    loss = found.loss
    # TRL with the rollout's logprobs below its ratio says what f(rho*) adds up to.
    true, _ = trl_loss(trl, config, step | {"train": step["rollout"]})
    assert found.value("bias") == pytest.approx(true.sum() - losses.sum(), **CLOSE)
    wanted = pytest.approx(wanted_use(loss, step, losses, gradient), **CLOSE)
    assert found.value("used") == wanted
    assert our_loss(path, loss, step)[0] == pytest.approx(losses, **CLOSE)
    assert (found.num_rows, found.num_sequences) == (8, 5)
    assert found.steps.dicts()[0]["num_rows"] == 8
    assert any("3 of 8 sequences used in the loss have no token to compare" in note for note in found.notes)


@pytest.mark.parametrize("delta", [None, 1.3, 1.05, 0.5])
@pytest.mark.parametrize("loss_type", ["grpo", "cispo", "sapo"])
def test_a_clipped_token_is_one_to_which_trl_gives_no_gradient_or_the_cap(trl, traces, tmp_path, loss_type, delta):
    step, _, _ = traces["masked"]
    epsilon = {"epsilon_high": 1.2} if loss_type == "cispo" else {}
    config = config_of(trl.grpo_config, tmp_path, loss_type=loss_type, delta=delta, beta=0.0, **epsilon)
    loss = read_loss(config.to_dict())
    _, gradient = trl_loss(trl, config, step)
    ratio = np.exp(step["current"] - step["train"])
    advantage = np.broadcast_to(step["advantages"][:, None], ratio.shape)
    clipped = is_clipped(loss, ratio, advantage)[step["mask"]]
    if loss_type == "cispo":
        weight = -gradient * step["mask"].sum() / np.where(advantage == 0, 1, advantage)
        assert np.array_equal(clipped, (np.abs(weight - 1.2) < 1e-12)[step["mask"]])
    else:
        assert np.array_equal(clipped, ((advantage != 0) & (gradient == 0))[step["mask"]])
    assert np.array_equal(has_gradient(loss, ratio, advantage)[step["mask"]], (gradient != 0)[step["mask"]])
    assert clipped.any() == (loss_type != "sapo")


def test_trl_has_no_loss_type_and_no_setting_beyond_those_known_here(trl):
    tree = method(trl.grpo._compute_loss)
    types = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "self.loss_type":
            literal = ast.literal_eval(node.comparators[0])
            types |= {literal} if isinstance(literal, str) else set(literal)
    assert types == set(LOSS_TYPES)
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "self.args")
    }
    told = {
        "loss_type", "importance_sampling_level", "epsilon_low", "epsilon_high", "delta", "beta", "use_bias_correction_kl",
        "use_vllm", "vllm_importance_sampling_correction", "max_completion_length", "steps_per_generation",
        "current_gradient_accumulation_steps", "sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos",
        "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
    }  # fmt: skip
    of_entropy = {
        "_entropy_bonus_enabled", "_entropy_window_stats", "_last_world_entropy", "entropy_target", "entropy_coef_min",
        "entropy_coef_max", "entropy_coef_delta",
    }  # fmt: skip
    unheard = {"_get_per_token_logps_and_entropies", "_metrics", "accelerator", "args", "model", "get_gamma_weights",
               "get_off_policy_mask", "get_high_entropy_mask", "aux_loss_enabled"}  # fmt: skip
    assert read == told | of_entropy | unheard | set(_NEUTRAL)


@pytest.mark.parametrize(
    "setting", [{"top_entropy_quantile": 0.5}, {"off_policy_mask_threshold": 0.01}, {"entropy_coef": 0.1}]
)
def test_what_no_figure_knows_changes_trl_s_loss_and_is_named(trl, traces, tmp_path, setting):
    step, path, _ = traces["masked"]
    config = config_of(trl.grpo_config, tmp_path, loss_type="grpo", **setting)
    loss = read_loss(config.to_dict())
    assert loss.unknown == tuple(setting)
    losses, _ = trl_loss(trl, config, step)
    assert our_loss(path, loss, step)[0] != pytest.approx(losses, rel=1e-3)
