"""Gradients of real trainings, and of a loop whose every number is worked out again here."""

import shutil

import numpy as np
import pyarrow as pa
import pytest
import torch
from builders import make_trace
from click.testing import CliRunner
from forged import reseal, rewrite_table
from json_output import assert_valid
from runs import train
from tim_trace import cli
from tim_trace.analysis.replay_text import gradient_sentence, gradient_text
from tim_trace.replay.arms import Arm
from tim_trace.replay.backends.transformers import TransformersScorer
from tim_trace.replay.gradients.engine import gradient
from tim_trace.schemas.errors import CannotReplay, InvalidOption, TimTraceWarning
from tim_trace.schemas.loss import Loss
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.rows import Forward
from transformers import Qwen3Config, Qwen3ForCausalLM

OFF_POLICY = {"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 2, "beta": 0.1}
OF_GRPO = {
    "loss_type": "grpo", "gradient_accumulation_steps": 4, "per_device_train_batch_size": 4, "temperature": 0.7,
    "beta": 0.1, "gradient_checkpointing": True,
}  # fmt: skip
OF_CISPO = {
    "loss_type": "cispo", "epsilon_high": 5.0, "gradient_accumulation_steps": 2, "steps_per_generation": 4,
    "per_device_train_batch_size": 4,
}  # fmt: skip
OF_SAPO = {"loss_type": "sapo", "num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 2}
OF_VESPO = OF_SAPO | {"loss_type": "vespo", "beta": 0.1, "use_bias_correction_kl": True}
OF_RLOO = {
    "beta": 0.05, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "per_device_train_batch_size": 4,
}  # fmt: skip

EACH_STEP, IN_PAIRS = [(1, 0), (2, 1), (3, 2)], [(1, 0), (1, 1), (3, 2), (3, 3)]
"""The step whose sequences an update trains on, and the policy version before it."""


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    ("arguments", "config", "updates"),
    [
        pytest.param((), None, EACH_STEP, id="dapo"),
        pytest.param(("--steps", "4"), OFF_POLICY, IN_PAIRS, id="off-policy-kl"),
        pytest.param((), OF_GRPO, EACH_STEP, id="grpo-accumulation", marks=pytest.mark.slow),
        pytest.param(("--steps", "4"), OF_CISPO, IN_PAIRS, id="cispo", marks=pytest.mark.slow),
        pytest.param(("--steps", "4"), OF_SAPO, IN_PAIRS, id="sapo", marks=pytest.mark.slow),
        pytest.param(("--steps", "4"), OF_VESPO, IN_PAIRS, id="vespo"),
        pytest.param(("--trainer", "rloo"), OF_RLOO, IN_PAIRS[:3], id="rloo", marks=pytest.mark.slow),
        pytest.param((), {"bf16": True}, EACH_STEP, id="mixed-precision"),
    ],
)
def test_the_norm_that_trl_logged_comes_back_to_its_last_digit(arguments, config, updates):
    run = train(*arguments, capture="logprobs", **({"config": config} if config else {}))
    found = gradient(run.trace)
    assert [(step.step, step.policy_version) for step in found.steps] == updates
    norms = [entry["grad_norm"] for entry in run.result["history"] if "grad_norm" in entry]
    assert [step.grad_norm for step in found.steps] == norms
    assert all(step.reproduced and step.forward_held for step in found.steps)
    assert "to the last digit in" in gradient_sentence(found)


@pytest.mark.slow
@pytest.mark.engine
def test_the_norm_under_a_correction_of_vllm_s_logprobs_comes_back():
    run = train("--vllm", "--bf16-engine", config={"temperature": 0.8}, capture="topk:3", fraction="0.5")
    found = gradient(run.trace, arm=["correction=none", "logprobs=rollout", "correction=exact"])
    assert found.loss.correction == "sequence_mask"
    recorded, without, bypass, exact = found.steps[:4]
    assert recorded.reproduced
    assert recorded.whole.cosine == pytest.approx(1, abs=1e-12)
    assert recorded.whole.bias == 0.0 < min(without.whole.bias, bypass.whole.bias)
    assert exact.whole.cosine > 0.99


# A loop of one's own: two optimizer steps on the first step's sequences, one on the third's, four micro-batches each.

ROWS, MICRO = 8, 2
LOSS = Loss(clip_low=0.01, clip_high=0.02, correction="token_truncate", correction_high=1.01)
RATE = 0.05


def small_model(**changes):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": False,
    }  # fmt: skip
    return Qwen3ForCausalLM(Qwen3Config(**sizes | changes))


def make_batch(seed):
    draw = np.random.default_rng(seed)
    return {
        "prompt_ids": [draw.integers(2, 20, 3).tolist() for _ in range(ROWS)],
        "response_ids": [draw.integers(2, 20, n).tolist() for n in draw.integers(2, 7, ROWS)],
        "advantage": draw.normal(size=ROWS).astype(np.float32),
        "noise": [draw.normal(0, 0.03, 6).astype(np.float32) for _ in range(ROWS)],
    }


def logprobs(model, batch, rows):
    """[T] log-probabilities of each row's response, of rows padded on the right to six tokens."""
    ids = torch.zeros(len(rows), 9, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        tokens = batch["prompt_ids"][row] + batch["response_ids"][row]
        ids[index, : len(tokens)], mask[index, : len(tokens)] = torch.tensor(tokens), 1
    every = torch.log_softmax(model(input_ids=ids, attention_mask=mask).logits.float(), -1)
    taken = every[:, 2:-1].gather(-1, ids[:, 3:, None]).squeeze(-1)
    return [taken[index, : len(batch["response_ids"][row])] for index, row in enumerate(rows)]


def objective(batch, rows, current, below, weights):
    """LOSS of some rows by hand: what they add to the mean over all tokens of the step."""
    total = sum(len(ids) for ids in batch["response_ids"])
    loss = 0.0
    for row, now in zip(rows, current, strict=True):
        ratio = torch.exp(now - below[row])
        clipped = ratio.clip(1 - LOSS.clip_low, 1 + LOSS.clip_high)
        advantage = float(batch["advantage"][row])
        loss = loss - (torch.minimum(ratio * advantage, clipped * advantage) * weights[row]).sum() / total
    return loss


def micro_batches():
    return [list(range(start, start + MICRO)) for start in range(0, ROWS, MICRO)]


def truncated(old, rollout):
    return [torch.exp(a - b).clamp(max=LOSS.correction_high) for a, b in zip(old, rollout, strict=True)]


def micro_gradients(model, batch, below, weights):
    """Each micro-batch's share of the gradient, flat, by the names of the parameters."""
    found = []
    for rows in micro_batches():
        model.zero_grad()
        objective(batch, rows, logprobs(model, batch, rows), below, weights).backward()
        found.append({name: value.grad.double().flatten() for name, value in model.named_parameters()})
    return found


def flat(gradient_):
    return torch.cat(list(gradient_.values())).numpy()


def forward(batch, first):
    place = np.arange(ROWS)
    lengths = np.array([len(ids) for ids in batch["response_ids"]])
    return Forward(
        ids=first + place // MICRO, places=(place % MICRO).astype("i4"), rows=np.full(ROWS, MICRO, "i4"),
        pad_left=np.zeros(ROWS, "i4"), pad_right=(6 - lengths).astype("i4"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    """The loop's trace, and what it had in hand at its second optimizer step."""
    folder = tmp_path_factory.mktemp("loop") / "run"
    model, version = small_model(), 0
    with Recorder(folder) as recorder:
        name = f"{type(model).__module__}.{type(model).__qualname__}"
        recorder.describe(model={"class": name, "config": model.config.to_dict()})
        recorder.add_contract("train", {"engine": "a loop"})
        recorder.add_contract("current", {"engine": "a loop", "training_mode": True})
        recorder.add_loss(LOSS)
        for step, num_updates in ((1, 2), (3, 1)):
            batch = make_batch(step)
            recorder.add_weights(version, model.state_dict())
            with torch.no_grad():
                old = [value.clone() for rows in micro_batches() for value in logprobs(model, batch, rows)]
            rollout = [a + torch.from_numpy(b[: len(a)]) for a, b in zip(old, batch["noise"], strict=True)]
            rollout = [value.clamp(max=0) for value in rollout]
            added = recorder.add_sequences(
                step=step, prompt_ids=batch["prompt_ids"], response_ids=batch["response_ids"],
                advantage=batch["advantage"], policy_version=version, group_ids=[row // 2 for row in range(ROWS)],
            )  # fmt: skip
            recorder.add_scores("rollout", added, logprobs=[value.numpy() for value in rollout])
            recorder.add_scores("train", added, logprobs=[value.numpy() for value in old])
            weights = truncated(old, rollout)
            for _ in range(num_updates):
                shares = micro_gradients(model, batch, old, weights)
                with torch.no_grad():
                    now = [v.clone() for rows in micro_batches() for v in logprobs(model, batch, rows)]
                recorder.add_weights(version, model.state_dict())
                recorder.add_scores(
                    "current", added, logprobs=[value.numpy() for value in now], policy_version=version,
                    forward=forward(batch, version * 4),
                )  # fmt: skip
                total = {key: sum(share[key] for share in shares) for key in shares[0]}
                norm = float(np.linalg.norm(flat(total)))
                recorder.add_metrics(version + 1, {"grad_norm": float(f"{norm:.5g}"), "learning_rate": RATE})
                if version == 1:
                    hand = {
                        "shares": shares, "batch": batch, "old": old, "rollout": rollout,
                        "state": {key: value.clone() for key, value in model.state_dict().items()},
                    }  # fmt: skip
                with torch.no_grad():
                    for key, value in model.named_parameters():
                        value -= RATE * total[key].view_as(value).float()
                version += 1
    return folder, hand


def test_the_norm_that_a_loop_logged_comes_back_to_its_last_digit(loop):
    found = gradient(loop[0])
    assert [(step.step, step.policy_version, step.reproduced) for step in found.steps] == [
        (1, 0, True), (1, 1, True), (3, 2, True),
    ]  # fmt: skip
    assert {step.num_micro_batches for step in found.steps} == {4}
    norm = float(np.linalg.norm(sum(flat(share) for share in loop[1]["shares"])))
    assert found.steps[1].grad_norm == pytest.approx(norm, rel=1e-5)


def by_hand(loop, below, weights):
    """[4, parameters] shares of the second optimizer step's gradient under other logprobs and weights."""
    _, hand = loop
    model = small_model()
    model.load_state_dict(hand["state"])
    return np.stack([flat(share) for share in micro_gradients(model, hand["batch"], below, weights)])


def arms_by_hand(hand):
    old, rollout = hand["old"], hand["rollout"]
    ones = [torch.ones_like(value) for value in old]
    exact = [torch.exp(a - b) for a, b in zip(old, rollout, strict=True)]
    whole = [value.log().sum().exp() * torch.ones_like(value) for value in exact]
    masked = [torch.where((value >= 0.99) & (value <= 1.02), value, 0.0) for value in exact]
    return {
        "correction=none": (old, ones),
        "correction=exact": (old, exact),
        "correction=sequence_exact": (old, whole),
        "correction=token_mask:0.99_1.02": (old, masked),
        "logprobs=rollout": (rollout, ones),
        "logprobs=rollout,correction=none": (rollout, ones),
    }


@pytest.mark.parametrize("text", arms_by_hand({"old": [], "rollout": []}))
def test_an_arm_s_figures_are_those_worked_out_by_hand(loop, text):
    trace, hand = loop
    r_i = np.stack([flat(share) for share in hand["shares"]])
    a_i = by_hand(loop, *arms_by_hand(hand)[text])
    step = next(
        step for step in gradient(trace, steps="1", arm=[text]).steps
        if step.policy_version == 1 and step.arm != "as-recorded"
    )  # fmt: skip
    a, r, n = a_i.sum(0), r_i.sum(0), 4
    close = {"rel": 2e-4}  # float32, and the bias is a small difference
    assert step.whole.norm == pytest.approx(np.linalg.norm(a), **close)
    assert step.whole.cosine == pytest.approx(a @ r / np.linalg.norm(a) / np.linalg.norm(r), abs=1e-6)
    assert step.whole.norm_ratio == pytest.approx(np.linalg.norm(a) / np.linalg.norm(r), **close)
    assert step.whole.bias == pytest.approx(np.linalg.norm(a - r), rel=2e-3)
    variance = ((n * a_i - a) ** 2).sum() / (n * (n - 1))
    assert step.whole.variance == pytest.approx(variance, **close)


def test_kinds_of_modules_add_up_to_the_model(loop):
    trace, hand = loop
    step = gradient(trace, steps="3", arm=["dtype=bf16"]).steps[1]
    assert {part.module for part in step.modules} == {"embedding", "attention", "mlp", "norm", "head"}
    for name in ("norm", "bias"):
        squares = sum(getattr(part, name) ** 2 for part in step.modules)
        assert squares == pytest.approx(getattr(step.whole, name) ** 2)
    assert sum(part.variance for part in step.modules) == pytest.approx(step.whole.variance)
    step = gradient(trace, steps="1").steps[1]
    total = {name: sum(share[name] for share in hand["shares"]) for name in hand["shares"][0]}
    (head,) = (part for part in step.modules if part.module == "head")
    assert head.norm == pytest.approx(float(total["lm_head.weight"].norm()), rel=1e-4)


def test_other_batch_shapes_and_kernels_change_little_and_double_precision_least(loop):
    texts = [
        "batch-size=1", "batch-tokens=64", "attention=math", "padding=packed", "dtype=fp64", "quantize=int4",
        "weights-version=0",
    ]  # fmt: skip
    found = {step.arm: step.whole for step in gradient(loop[0], steps="3", arm=texts).steps}
    for name in ("batch-size-1", "batch-tokens-64", "math", "padding-packed", "fp64"):
        assert found[name].bias < 1e-4 * found[name].norm
        assert found[name].cosine == pytest.approx(1, abs=1e-8)
    assert found["int4"].bias > 1e-3 * found["int4"].norm
    assert found["weights-version-0"].bias > 1e-3 * found["int4"].norm


def test_a_step_of_one_forward_has_no_variance(loop, tmp_path):
    trace = tmp_path / "run"
    model, batch = small_model(), make_batch(1)
    with Recorder(trace) as recorder:
        name = f"{type(model).__module__}.{type(model).__qualname__}"
        recorder.describe(model={"class": name, "config": model.config.to_dict()})
        recorder.add_weights(0, model.state_dict())
        recorder.add_contract("train", {"engine": "a loop"})
        recorder.add_loss(Loss(denominator="current"))
        added = recorder.add_sequences(
            step=1, prompt_ids=batch["prompt_ids"], response_ids=batch["response_ids"], policy_version=0,
            advantage=batch["advantage"], group_ids=[row % 4 for row in range(ROWS)],
        )  # fmt: skip
        whole = forward(batch, 0)
        whole.ids[:], whole.places[:], whole.rows[:] = 0, np.arange(ROWS), ROWS
        values = [np.full(len(ids), -1.0, np.float32) for ids in batch["response_ids"]]
        recorder.add_scores("train", added, logprobs=values, forward=whole)
    (single,) = gradient(trace).steps
    assert (single.num_micro_batches, single.whole.variance, single.reproduced) == (0, None, None)
    assert single.grad_norm > 0


def test_out_of_memory_halves_the_rows_of_a_forward(loop, monkeypatch):
    whole = TransformersScorer.logprobs

    def little(self, batch):
        if len(batch.rows) > 1:
            raise MemoryError
        return whole(self, batch)

    monkeypatch.setattr(TransformersScorer, "logprobs", little)
    with pytest.warns(
        TimTraceWarning, match="out of memory with 2 rows per forward and backward pass; continuing with 1"
    ):
        (step,) = gradient(loop[0], steps="3").steps
    assert step.reproduced  # five digits were logged


def test_what_was_not_reproduced_is_said_with_both_numbers(loop):
    found = gradient(loop[0], steps="1", loss="clip_high=0.5,correction=none")
    assert found.steps[1].reproduced is False
    assert repr(found.steps[0].grad_norm) in gradient_sentence(found) or repr(
        found.steps[1].grad_norm
    ) in gradient_sentence(found)
    assert "Comparisons with a gradient that was not reproduced are less reliable" in gradient_sentence(found)
    assert repr(found.steps[1].logged_norm) in gradient_sentence(found) or repr(
        found.steps[0].logged_norm
    ) in gradient_sentence(found)


def test_dropout_is_named_where_the_recording_drew_it(loop, tmp_path):
    trace = tmp_path / "run"
    shutil.copytree(loop[0], trace)
    for path in trace.glob("writers/*"):
        path.write_text(path.read_text().replace('"attention_dropout": 0.0', '"attention_dropout": 0.5'))
    reseal(trace)
    (step,) = gradient(trace, steps="3").steps
    assert step.reproduced is False
    assert any("uses dropout" in note for note in step.notes)


def test_a_loop_that_logs_one_norm_for_several_updates_is_not_guessed_at(loop, tmp_path):
    trace = tmp_path / "run"
    shutil.copytree(loop[0], trace)
    for path in trace.glob("metrics/*.parquet"):
        rewrite_table(path, lambda table: table.filter([step != 2 for step in table["step"].to_pylist()]))
    reseal(trace)
    first, second, third = gradient(trace).steps
    assert first.logged_norm is second.logged_norm is None
    assert any("unclear which logged grad norm" in note for note in first.notes)
    assert third.reproduced


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"arm": ["engine=vllm"]}, InvalidOption, "no backward.*logprobs=replay/vllm"),
        ({"arm": ["engine=exact"]}, InvalidOption, "no backward.*logprobs=replay/exact"),
        ({"arm": ["mode=decode"]}, InvalidOption, "arm mode.*batch-size.*logprobs=replay/decode"),
        ({"arm": ["correction=none:2"]}, InvalidOption, "token_truncate:2"),
        ({"arm": ["correction=token_truncate"]}, InvalidOption, "with a bound"),
        ({"arm": ["correction=token_mask:much"]}, InvalidOption, "'much' is not a bound"),
        ({"arm": ["logprobs=engine"]}, InvalidOption, "train, rollout, current or replay"),
        ({"arm": ["dtype=bf16", "dtype=bf16"]}, InvalidOption, "two arms are named"),
        ({"arm": ["name=nothing"]}, InvalidOption, "changes nothing"),
        ({"arm": ["logprobs=replay/bf16"], "steps": "1"}, CannotReplay, "tim-trace replay RUN --steps 1"),
        ({"loss": "clip=2"}, InvalidOption, "clip_low"),
        ({"loss": "aggregation=constant", "steps": "1"}, CannotReplay, "loss='max_tokens=N'"),
        ({"loss": "kl_coefficient=0.1", "steps": "1"}, CannotReplay, "pass 'reference'"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(loop, options, error, words):
    with pytest.raises(error, match=words):
        gradient(loop[0], **options)


def test_a_trace_without_a_model_a_loss_or_advantages_says_so(loop, tmp_path):
    make_trace(tmp_path / "bare")
    with pytest.raises(CannotReplay, match="the model was not recorded"):
        gradient(tmp_path / "bare")

    trace = tmp_path / "run"
    shutil.copytree(loop[0], trace)
    for path in trace.glob("metrics/*.parquet"):
        rewrite_table(path, lambda t: t.filter([not name.startswith("hyper") for name in t["name"].to_pylist()]))
    reseal(trace)
    with pytest.raises(CannotReplay, match="loss='kind="):
        gradient(trace)

    def without_advantages(table):
        place = table.column_names.index("advantage")
        field = table.schema.field(place)
        return table.set_column(place, field, pa.nulls(len(table), field.type))

    for path in trace.glob("sequences/*.parquet"):
        rewrite_table(path, without_advantages)
    reseal(trace)
    with pytest.raises(CannotReplay, match=r"no advantages.*add_sequences\(advantage"):
        gradient(trace, loss="kind=reinforce")


def test_the_command_says_whether_the_norm_came_back_and_gives_each_figure_as_json(loop):
    found = gradient(loop[0], steps="1:3", arm=["dtype=bf16"])
    for table, word in (("step", "variance"), ("module", "embedding"), ("arm", "mean_bias_share")):
        text = gradient_text(found, by=table)
        assert "to the last digit in all 3 steps" in text
        assert word in text
    options = ["gradient", str(loop[0]), "--steps", "3", "--arm", "dtype=bf16"]
    printed = assert_valid(
        "gradient", CliRunner().invoke(cli.main, [*options, "--json"], catch_exceptions=False).stdout
    )
    assert [step["arm"] for step in printed["steps"]] == ["as-recorded", "bf16"]
    assert printed["steps"][1]["whole"]["cosine"] == pytest.approx(found.steps[-1].whole.cosine, abs=1e-6)
    assert printed["sentence"] == gradient_sentence(gradient(loop[0], steps="3"))


def test_arms_go_by_their_changes():
    from tim_trace.replay.gradients.arm import parse_gradient_arm

    arm = parse_gradient_arm("dtype=bf16,batch-size=2,logprobs=replay/x,correction=token_mask:0.5_5")
    assert (arm.dtype, arm.batch_size, arm.keeps_batches) == ("bf16", 2, Arm(batch_size=2).keeps_batches)
    assert (arm.logprobs, arm.correction) == ("replay/x", "token_mask:0.5_5")
    assert arm.name == "bf16+batch-size-2+logprobs-replay-x+correction-token_mask-0.5_5"
    assert parse_gradient_arm("logprobs=rollout,name=bypass").name == "bypass"
