"""Replaying real recordings. Bits are compared as bits."""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders import PROGRAMS, TIM_TRACE, change_contract, make_trace, run, tim_trace
from forged import change_document, reseal, rewrite_table
from runs import train
from tim_trace.analysis.stats import stats
from tim_trace.analysis.views import connect
from tim_trace.replay.arm_pass import ArmPass
from tim_trace.replay.arms import Arm
from tim_trace.replay.engine import replay
from tim_trace.replay.hf_scorer import HfScorer
from tim_trace.replay.recorded import RecordedRun, assumed_versions
from tim_trace.replay.results import by_arm
from tim_trace.schemas.errors import CannotReplay, InvalidOption, WeightsMissing
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.rows import Forward
from tim_trace.tracer.store import Store
from tim_trace.tracer.weights.checkpoints import open_weights

pytestmark = pytest.mark.engine

OFF_POLICY = {"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 2, "beta": 0.1}
ACCUMULATION = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4, "temperature": 0.7}
MIXED = {"bf16": True}
RLOO_VLLM = ("--trainer", "rloo", "--vllm", "--bf16-engine")


@pytest.fixture
def trace(tmp_path):
    """A copy of a recorded run: on-policy, no vLLM, prompts of several lengths."""
    shutil.copytree(train(capture="logprobs").trace, tmp_path / "run")
    return tmp_path / "run"


def copy(run, tmp_path):
    shutil.copytree(run.trace, tmp_path / "run")
    return tmp_path / "run"


def rows(trace, query):
    return connect(trace).execute(query).fetchall()


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        pytest.param((), {}, id="on-policy"),
        pytest.param(("--steps", "4"), OFF_POLICY, id="off-policy"),
        pytest.param((), ACCUMULATION, id="accumulation", marks=pytest.mark.slow),
        pytest.param((), MIXED, id="mixed-precision", marks=pytest.mark.slow),
        pytest.param(RLOO_VLLM, {"beta": 0.05}, id="rloo-vllm", marks=pytest.mark.slow),
        pytest.param(("--ranks", "2"), {"steps_per_generation": 1}, id="two-ranks", marks=pytest.mark.slow),
    ],
)
def test_replaying_as_recorded_gives_every_bit_back(arguments, config, tmp_path):
    trace = copy(train(*arguments, capture="logprobs", **({"config": config} if config else {})), tmp_path)
    results = replay(trace)
    assert {result.arm for result in results} == {"as-recorded"}
    assert all(result.identity_held and result.num_equal == result.num_tokens > 0 for result in results)
    different = """
        SELECT count(*) FILTER (WHERE a.logprobs IS DISTINCT FROM b.logprobs), count(*)
        FROM scores a JOIN scores b USING (step, seq_id)
        WHERE a.pass = 'replay/as-recorded' AND b.pass = 'train'
    """
    ((wrong, count),) = rows(trace, different)
    assert wrong == 0
    assert count == rows(trace, "SELECT count(*) FROM scores WHERE pass = 'train'")[0][0]


def test_the_contract_names_the_trainer_s_own_function(trace):
    replay(trace, steps="1")
    ((function, kernels, arm),) = rows(
        trace,
        """SELECT contract_json ->> '$.scoring_function', contract_json ->> '$.attention_kernels', contract_json ->> '$.arm'
        FROM passes WHERE pass = 'replay/as-recorded'""",
    )
    assert function.endswith("GRPOTrainer._get_per_token_logps_and_entropies")
    assert "sdpa" in kernels
    assert arm == "{}"


def test_other_weights_are_noticed(trace):
    stale, own = by_arm(replay(trace, steps="3", weights_version=0))[::-1]
    assert own.share_equal == 1.0
    assert stale.share_equal < 1.0
    assert stale.mean_abs_d > 1e-4
    assert rows(trace, "SELECT DISTINCT policy_version FROM scores WHERE pass LIKE 'replay/weights%'") == [(0,)]


@pytest.mark.slow
def test_the_mixed_precision_of_fsdp_is_replayed(tmp_path):
    """accelerate has FSDP1 cast rotary frequencies, too, and FSDP2 what the model gives: TRL's logprobs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run(*command, PROGRAMS / "fsdp_scores.py", tmp_path)
    assert done.code == 0, done.stderr
    for kind in ("fsdp1", "fsdp2"):
        ((text,),) = rows(tmp_path / kind, "SELECT contract_json FROM passes")
        casts = {name for name in json.loads(text)["model"] if name.endswith("s_dtype")}
        assert casts == {"parameters_dtype", "buffers_dtype" if kind == "fsdp1" else "outputs_dtype"}
        (arm,) = by_arm(replay(tmp_path / kind))
        assert (kind, arm.share_equal) == (kind, 1.0)


@pytest.mark.slow
def test_when_bits_do_not_come_back_it_says_what_differs(trace):
    def change(contract):
        return json.loads(
            json.dumps(contract).replace('"temperature": 1.0', '"temperature": 0.9').replace("1.16.0", "1.15.9")
        )

    change_contract(trace, "train", change)
    done = tim_trace("replay", trace, "--steps", "2", "--json")
    (result,) = done.json()
    assert not result["identity_held"]
    assert result["differs"] == [f"versions.trl: recorded 1.15.9, now {version('trl')}"]
    assert (
        "because weights, tokens or settings are not those of the recorded pass" in done.stderr
    )  # its temperature is not the recorded one


@pytest.fixture(scope="module")
def arms(tmp_path_factory):
    """Several arms on one recording, in one call."""
    trace = tmp_path_factory.mktemp("arms") / "run"
    shutil.copytree(train(capture="logprobs").trace, trace)
    texts = [
        "dtype=fp64", "dtype=fp32", "dtype=bf16", "dtype=fp16", "batch-size=1", "padding=right", "attention=eager",
        "attention=math", "attention=flash", "mode=decode", "mode=chunked:2", "mode=chunked:2,dtype=fp64", "threads=1",
        "temperature=0.5", "top-k=3", "dtype=bf16,lm-head=fp32", "logits-dtype=bf16", "deterministic", "quantize=int8", "quantize=int4", "quantize=fp8",
        "padding=packed", "padding=packed,batch-size=3,attention=math", "mode=decode,kv-dtype=fp8",
    ]  # fmt: skip
    return trace, {result.arm: result for result in by_arm(replay(trace, arm=texts))}


def test_every_arm_is_a_pass_of_the_trace(arms):
    trace, results = arms
    found = dict(rows(trace, "SELECT pass, count(*) FROM scores WHERE pass LIKE 'replay/%' GROUP BY pass"))
    assert found == {f"replay/{name}": 24 for name in results}
    assert len(results) == 25
    assert stats(trace, pair="replay/bf16:train").rows


def test_arms_lie_as_far_off_as_their_precision(arms):
    _, results = arms
    distance = {name: result.mean_abs_d for name, result in results.items()}
    assert distance["fp32"] == 0.0
    assert 0 < distance["fp64"] < 1e-6
    assert 1e-6 < distance["fp16"] < 3e-3
    assert distance["fp16"] < distance["bf16"] < 3e-2
    assert distance["bf16+head-fp32"] < 3e-2
    for name in ("batch-size-1", "padding-right", "eager", "math", "flash", "decode", "chunked-2", "threads-1"):
        assert distance[name] < 1e-6, name
    assert distance["padding-packed"] < 1e-6
    assert distance["math+batch-size-3+padding-packed"] < 1e-6
    assert distance["decode"] < 1e-6 < distance["decode+kv-fp8"] < 1e-1
    assert distance["temperature-0.5"] > 1e-3
    assert 1e-5 < distance["int8"] < distance["fp8"] < distance["int4"] < 1


def test_the_kernel_that_was_used_is_in_the_contract(arms):
    trace, _ = arms
    query = "SELECT pass, contract_json ->> '$.attention_kernels' FROM passes WHERE pass LIKE 'replay/%'"
    kernels = dict(rows(trace, query))
    assert kernels["replay/math"] == '["sdpa math"]'
    assert kernels["replay/eager"] == '["eager"]'
    assert kernels["replay/flash"] == '["sdpa flash"]'
    assert kernels["replay/math+batch-size-3+padding-packed"] == '["sdpa math"]'


def test_packed_rows_have_no_padding_and_are_sorted_by_length(arms):
    trace, _ = arms
    query = """
        SELECT forward_rows, pad_left, pad_right, num_prompt_tokens + num_response_tokens
        FROM scores JOIN sequences USING (step, seq_id)
        WHERE pass = 'replay/math+batch-size-3+padding-packed' AND step = 1 ORDER BY forward_id, forward_row
    """
    found = rows(trace, query)
    assert [row[0] for row in found] == [3] * 6 + [2] * 2
    assert {row[1:3] for row in found} == {(0, 0)}
    lengths = [row[3] for row in found]
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) > 1


def test_a_packed_row_does_not_see_its_neighbours(trace):
    """Packed in double precision, the rows give what each gives alone."""
    replay(trace, steps="1", arm=["padding=packed,dtype=fp64", "batch-size=1,dtype=fp64"])
    ((distance,),) = rows(
        trace, "SELECT max_abs_d FROM pair_runs('replay/fp64+padding-packed', 'replay/fp64+batch-size-1')"
    )
    assert distance <= 2.4e-7


@pytest.mark.slow
def test_compiled_scores_lie_within_rounding(trace):
    _, compiled = by_arm(replay(trace, steps="1", compile=True))
    assert compiled.max_abs_d < 1e-5
    query = "SELECT contract_json ->> '$.torch_compile' FROM passes WHERE pass = 'replay/compile'"
    assert rows(trace, query) == [("true",)]


def test_two_ways_to_the_same_number_agree_in_double_precision(arms):
    trace, _ = arms
    ((distance,),) = rows(trace, "SELECT max_abs_d FROM pair_runs('replay/fp64+chunked-2', 'replay/fp64')")
    # Both are kept as float32; what they round differs by less than its last place.
    assert distance <= 2.4e-7


def test_double_precision_does_not_depend_on_the_batch():
    run = RecordedRun(train(capture="logprobs").trace)
    recorded = run.step(2)
    contract = run.contract("train", recorded[0].contract)
    weights = open_weights(run.store).load(recorded[0].policy_version)

    def scored(**changes):
        scorer = HfScorer(run, Arm(**changes), contract, "cpu")
        model = scorer.build()
        scorer.put(model, weights)
        scorer.attach(model)
        result = scorer.score(recorded)
        return np.concatenate([value for _, value in sorted(zip([r.seq_id for r in result.rows], result.logprobs))])  # noqa: B905

    whole, alone = scored(dtype="fp64"), scored(dtype="fp64", batch_size=1)
    assert whole.dtype == np.float64
    np.testing.assert_allclose(alone, whole, rtol=0, atol=1e-13)
    single, single_alone = scored(mode="decode"), scored(mode="decode", batch_size=1)
    assert np.abs(single - single_alone).max() > 1e-13


def record_a_loop(path, off=0.0, policy_version=None, num_versions=1):
    """A loop of one's own: a model, its logprobs by a plain forward of one row, and its weights. Version 0 gives the
    logprobs, the weights of every later version are 1.5 times those before."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=30, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, dtype="float32",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    prompts, responses = [[1, 2], [3, 4, 5]], [[6, 7, 8], [9, 1]]
    logprobs = []
    for prompt, response in zip(prompts, responses, strict=True):
        with torch.no_grad():
            table = torch.log_softmax(model(torch.tensor([prompt + response])).logits[0], -1)
        logprobs.append([float(table[len(prompt) - 1 + i, token]) - off for i, token in enumerate(response)])
    with Recorder(path) as recorder:
        name = f"{type(model).__module__}.{type(model).__qualname__}"
        recorder.describe(model={"class": name, "config": config.to_dict()})
        recorder.add_contract("train", {"engine": "mine", "dtype": "float32"})
        for version in range(num_versions):
            recorder.add_weights(version, {name: value * 1.5**version for name, value in model.state_dict().items()})
        batch = recorder.add_sequences(step=1, prompt_ids=prompts, response_ids=responses, policy_version=0)
        recorder.add_scores("train", batch, logprobs=logprobs, policy_version=policy_version)


def test_a_loop_of_one_s_own_can_be_replayed(tmp_path):
    record_a_loop(tmp_path / "run")
    identity, double = by_arm(replay(tmp_path / "run", dtype="fp64"))
    assert (identity.arm, double.arm) == ("as-recorded", "fp64")
    assert identity.max_abs_d < 1e-6
    assert double.max_abs_d < 1e-6


def test_weights_that_no_pass_named_are_assumed_and_said(tmp_path):
    record_a_loop(tmp_path / "run")
    (row, *_) = (run := RecordedRun(str(tmp_path / "run"))).step(1)
    assert (row.policy_version, row.version_assumed) == (0, "the version that sampled the sequence")
    assert assumed_versions(run.step(1)) == [
        "policy version not recorded, assumed to be 0 (the version that sampled the sequence)"
    ]
    record_a_loop(tmp_path / "other", off=0.5)
    (identity,) = replay(tmp_path / "other")
    assert not identity.identity_held
    assert "policy version not recorded, assumed to be 0 (the version that sampled the sequence)" in identity.differs


def test_a_version_that_a_pass_named_is_not_assumed(tmp_path):
    record_a_loop(tmp_path / "run", off=0.5, policy_version=0)
    assert assumed_versions(RecordedRun(str(tmp_path / "run")).step(1)) == []
    (identity,) = replay(tmp_path / "run")
    assert not any("policy version" in reason for reason in identity.differs)


def test_a_pass_recorded_with_the_next_version_is_not_taken_for_rounding(tmp_path):
    record_a_loop(tmp_path / "run", policy_version=1, num_versions=3)
    (identity,) = replay(tmp_path / "run")
    assert (identity.not_held, identity.fitting_version) == ("other-inputs", 0)
    done = tim_trace("replay", tmp_path / "run", "--force")
    assert "--weights-version 0 reproduces it, so the recorded policy_version is wrong" in done.stderr
    assert "settings, versions or hardware differ here" not in done.stderr


def test_logprobs_that_no_near_version_gives_are_said_to_have_other_inputs(tmp_path):
    record_a_loop(tmp_path / "run", off=0.5, policy_version=1, num_versions=2)
    done = tim_trace("replay", tmp_path / "run")
    assert (
        "The nearest versions' weights do not reproduce it; try --weights-version N or --temperature T" in done.stderr
    )


def test_a_replay_within_rounding_says_how_far_it_is(tmp_path):
    record_a_loop(tmp_path / "run", off=1e-5, policy_version=0, num_versions=2)
    (identity,) = replay(tmp_path / "run")
    assert (identity.not_held, identity.fitting_version) == ("conditions", None)
    done = tim_trace("replay", tmp_path / "run", "--force")
    assert "mean |d| 1e-05, largest 1e-05 nats), because settings" in done.stderr
    assert "Every arm's difference from `train` includes this one" in done.stderr


FACTORY = """
import torch


class Table(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.table = torch.nn.Embedding(size, size)

    def forward(self, input_ids, attention_mask):
        return self.table(input_ids)


def build(*, config, dtype, attention):
    return Table(config["size"]).to(dtype)
"""


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A recorded loop over a model that transformers does not know: it predicts from the token before alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "factory.py").write_text(FACTORY)
    torch.manual_seed(0)
    weight = torch.randn(9, 9)
    logprobs = torch.log_softmax(weight, -1)
    prompts, responses = [[1, 2], [3]], [[4, 5, 6], [7, 8]]
    taken = [
        [float(logprobs[a, b]) for a, b in zip([p[-1], *r], r, strict=False)]
        for p, r in zip(prompts, responses, strict=True)
    ]
    with Recorder("run") as recorder:
        recorder.describe(model={"class": "mine.Table", "config": {"size": 9}})
        recorder.add_contract("train", {"engine": "mine"})
        recorder.add_weights(0, {"table.weight": weight})
        batch = recorder.add_sequences(step=1, prompt_ids=prompts, response_ids=responses, policy_version=0)
        recorder.add_scores("train", batch, logprobs=taken)
        recorder.add_scores("rollout", batch, logprobs=[[value - 1e-3 for value in row] for row in taken])
    return tmp_path / "run"


def test_an_empty_config_describes_a_model(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.describe(model={"class": "mine.Table", "config": {}})
        recorder.add_sequences(step=1, prompt_ids=[[1]], response_ids=[[2]])
    assert RecordedRun(tmp_path / "run").model == {"class": "mine.Table", "config": {}}


@pytest.mark.slow
def test_triangulate_takes_a_model_factory(table):
    done = tim_trace("triangulate", table, "--model-factory", "factory:build", "--json", cwd=table.parent)
    assert done.code == 0, done.stderr
    errors = {side["name"]: side["rms"] for side in done.json()["sides"]}
    assert errors["train"] < 1e-6
    assert errors["rollout"] == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.slow
def test_a_model_factory_builds_what_transformers_does_not_know(table):
    done = tim_trace(
        "replay", table, "--model-factory", "factory:build", "--arm", "dtype=bf16", "--json", cwd=table.parent
    )
    assert done.code == 0, done.stderr
    distance = {result["arm"]: result["max_abs_d"] for result in done.json()}
    assert distance["as-recorded"] < 1e-6 < distance["bf16"] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "the model cannot be rebuilt.*--model-factory "),
        (("--model-factory", "factory:missing"), "model factory 'factory:missing' cannot be imported"),
        (
            ("--model-factory", "factory:build", "--mode", "decode"),
            "mode decode is not possible, because the model factory's model returns only logits",
        ),
    ],
)
def test_what_a_model_factory_lacks_is_said(table, options, message):
    done = tim_trace("replay", table, *options, cwd=table.parent)
    assert done.code == 2
    assert re.search(message, done.stderr), done.stderr


class ScarceMemory:
    """Scores zeros, and runs out of memory with more rows than it is good for."""

    name = "scarce"

    def __init__(self, rows):
        self.rows = rows

    def __call__(self, batch):
        if len(batch.rows) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.zeros(len(batch.scored_N))


def scarce(rows, **changes):
    run = RecordedRun(train(capture="logprobs").trace)
    recorded = run.step(1)
    scorer = HfScorer(run, Arm(**changes), run.contract("train", recorded[0].contract), "cpu")
    scorer._scorer = ScarceMemory(rows)
    return scorer, recorded


def test_out_of_memory_halves_the_batch_and_says_so():
    scorer, recorded = scarce(3, dtype="fp32")
    with pytest.warns(UserWarning, match="out of memory") as told:
        result = scorer.score(recorded)
    assert [str(warning.message).rpartition("with ")[2] for warning in told] == ["4", "2"]
    assert max(len(batch.rows) for batch in result.batches) == 2
    assert [row.seq_id for row in result.rows] == [row.seq_id for row in recorded]


@pytest.mark.slow
def test_a_machine_that_runs_out_of_memory_goes_on_with_fewer_rows(tmp_path):
    """A wide layer, 64 rows of 100 tokens, and 400 MB that the process may still take."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=30, hidden_size=32, intermediate_size=16_384, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=32, dtype="float32",
    )  # fmt: skip
    ids = np.random.default_rng(0).integers(0, 30, (64, 100))
    one, none = np.ones(64, np.int32), np.zeros(64, np.int32)
    together = Forward(
        ids=none.astype("i8"), places=np.arange(64, dtype="i4"), rows=64 * one, pad_left=none, pad_right=none
    )
    with Recorder(tmp_path / "run") as recorder:
        model = {"class": "transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM", "config": config.to_dict()}
        recorder.describe(model=model)
        recorder.add_contract("train", {"engine": "mine"})
        recorder.add_weights(0, Qwen3ForCausalLM(config).state_dict())
        batch = recorder.add_sequences(step=1, prompt_ids=ids[:, :4], response_ids=ids[:, 4:], policy_version=0)
        recorder.add_scores("train", batch, logprobs=np.full((64, 96), -1.0, np.float32), forward=together)
    done = run(sys.executable, PROGRAMS / "little_memory.py", tmp_path / "run", "dtype=fp32,name=again", "400")
    assert done.code == 0, done.stderr
    assert "arm again: out of memory with 64 rows per forward pass; continuing with 32" in done.stderr
    (identity, again) = (line.split()[1:] for line in done.stdout.splitlines())
    assert identity[0] == again[0] == str(64 * 96)
    assert float(again[1]) == pytest.approx(float(identity[1]), abs=1e-5)


@pytest.mark.parametrize(("rows", "changes"), [(3, {}), (3, {"batch_size": 8}), (0, {"dtype": "fp32"})])
@pytest.mark.filterwarnings("ignore:arm fp32")
def test_out_of_memory_stops_where_the_batch_shape_is_the_arm(rows, changes):
    scorer, recorded = scarce(rows, **changes)
    with pytest.raises(CannotReplay, match=r"out of memory with \d+ rows"):
        scorer.score(recorded)


def test_where_the_recording_does_not_fit_into_memory_other_arms_run(trace, monkeypatch):
    given = HfScorer._given

    def scarce(scorer, score, batch):
        if len(batch.rows) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return given(scorer, score, batch)

    monkeypatch.setattr(HfScorer, "_given", scarce)
    identity, arm = replay(trace, steps="1", arm=["batch-size=1"])
    assert (identity.num_tokens, identity.identity_held, identity.not_held) == (0, False, "refused")
    assert "out of memory with" in identity.differs[0]
    assert (arm.identity_held, arm.not_held) == (False, "refused")
    assert arm.num_tokens > 0
    assert arm.max_abs_d < 1e-4
    whole, of_arm = by_arm([identity, arm])
    assert np.isnan(whole.mean_abs_d)
    assert of_arm.mean_abs_d == arm.mean_abs_d
    with pytest.raises(CannotReplay, match="out of memory with"):
        replay(trace, steps="2")


def test_a_bound_of_tokens_is_not_lowered_by_itself():
    scorer, recorded = scarce(3, batch_tokens=4096)
    with pytest.raises(CannotReplay, match=r"out of memory with \d+ rows per forward pass; use batch_tokens=2048"):
        scorer.score(recorded)


def test_finished_steps_are_not_done_again(trace):
    assert [result.step for result in replay(trace, steps="2", dtype="bf16") if result.arm == "bf16"] == [2]
    assert [result.step for result in replay(trace, steps="all", dtype="bf16") if result.arm == "bf16"] == [1, 3]
    with pytest.raises(InvalidOption, match=r"replay/bf16 has already scored all of these steps.*force=True"):
        replay(trace, dtype="bf16")
    assert rows(trace, "SELECT count(*) FROM scores WHERE pass = 'replay/bf16'") == [(24,)]


def test_force_replaces_an_arm_and_leaves_the_rest(trace):
    replay(trace, steps="1:2", dtype="bf16", arm=["dtype=fp16"])
    replay(trace, steps="3", dtype="bf16", force=True)
    found = rows(trace, "SELECT pass, step FROM scores WHERE pass LIKE 'replay/%' GROUP BY ALL ORDER BY ALL")
    assert [row for row in found if row[0] == "replay/bf16"] == [("replay/bf16", 3)]
    assert [row for row in found if row[0] == "replay/fp16"] == [("replay/fp16", 1), ("replay/fp16", 2)]


def test_a_refused_replay_removes_nothing(trace):
    replay(trace, steps="1", dtype="bf16")
    before = sorted(path.relative_to(trace) for path in trace.rglob("*") if path.is_file())
    for changes in ({"weights_version": 99, "dtype": "bf16", "name": "bf16"}, {"dtype": "bf16", "arm": ["dtype=tf32"]}):
        with pytest.raises((CannotReplay, WeightsMissing)):
            replay(trace, steps="1", force=True, **changes)
    assert sorted(path.relative_to(trace) for path in trace.rglob("*") if path.is_file()) == before


def test_force_may_give_a_name_another_meaning(trace):
    replay(trace, steps="1", dtype="bf16", name="mine")
    replay(trace, steps="1", dtype="fp16", name="mine", force=True)
    assert [
        result.step for result in replay(trace, steps="1:2", dtype="fp16", name="mine") if result.arm == "mine"
    ] == [2]


def test_a_name_that_stands_for_other_changes_is_refused(trace):
    replay(trace, steps="1", dtype="bf16", name="mine")
    with pytest.raises(InvalidOption, match="replay/mine already exists with different changes"):
        replay(trace, steps="2", dtype="fp16", name="mine")
    with pytest.raises(InvalidOption, match="two arms are named"):
        replay(trace, arm=["dtype=fp16", "dtype=fp16"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "tf32"}, "tf32 needs an NVIDIA GPU.*fp64, fp32, bf16 or fp16"),
        ({"attention": "efficient"}, "efficient needs an NVIDIA GPU.*eager, math, flash"),
        ({"attention": "cudnn"}, "cudnn needs an NVIDIA GPU"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="what a CPU refuses")
def test_what_the_device_lacks_is_refused_and_the_trace_stays_as_it_was(trace, changes, message):
    before = sorted(path.relative_to(trace) for path in trace.rglob("*"))
    with pytest.raises(CannotReplay, match=message):
        replay(trace, **changes)
    assert sorted(path.relative_to(trace) for path in trace.rglob("*")) == before


def test_a_trace_without_a_model_or_weights_says_so(tmp_path, trace):
    make_trace(tmp_path / "bare")
    with pytest.raises(CannotReplay, match="the model was not recorded"):
        replay(tmp_path / "bare")
    shutil.rmtree(trace / "weights")
    for state in (trace / "writers").iterdir():
        change_document(state, lambda values: values | {"files": {
            name: record for name, record in (values["files"] or {}).items() if not name.startswith("weights/")
        }})  # fmt: skip
    with pytest.raises(WeightsMissing, match="record with --weights delta"):
        replay(trace)
    assert rows(trace, "SELECT count(*) FROM scores WHERE pass LIKE 'replay/%'") == [(0,)]


def test_tokens_outside_of_the_vocabulary_are_named(trace):
    import pyarrow as pa

    def with_large_id(table):
        ids = table["response_ids"].to_pylist()
        ids[0][0] = 9_999
        column = pa.array(ids, table.schema.field("response_ids").type)
        return table.set_column(table.schema.get_field_index("response_ids"), "response_ids", column)

    rewrite_table(next((trace / "sequences").glob("*.parquet")), with_large_id)
    reseal(trace)
    with pytest.raises(CannotReplay, match=r"token 9999 in the response is outside the model's vocabulary"):
        replay(trace, steps="1")


def test_an_arm_that_is_complete_does_not_keep_others_from_being_completed(trace):
    replay(trace, arm=["batch-size=1"])
    replay(trace, arm=["dtype=bf16"], steps="1")
    replay(trace, arm=["batch-size=1", "dtype=bf16"])
    query = "SELECT pass, count(*) FROM scores WHERE pass LIKE 'replay/%' GROUP BY pass"
    assert {count for _, count in rows(trace, query)} == {24}
    with pytest.raises(InvalidOption, match="has already scored all of these steps"):
        replay(trace, arm=["batch-size=1", "dtype=bf16"])


@pytest.mark.slow
def test_a_killed_replay_goes_on_where_it_was(trace):
    draw = random.Random(0)
    command = [str(TIM_TRACE), "replay", str(trace), "--batch-size", "1", "--arm", "dtype=bf16"]
    for _ in range(3):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not _replayed(trace) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = tim_trace("replay", trace, "--batch-size", "1", "--arm", "dtype=bf16")
    assert done.code in (0, 2), done.stderr
    if done.code == 2:
        assert "has already scored all of these steps" in done.stderr
    query = "SELECT pass, count(*), count(DISTINCT (step, seq_id)) FROM scores WHERE pass LIKE 'replay/%' GROUP BY pass"
    found = {name: (count, distinct) for name, count, distinct in rows(trace, query)}
    assert set(found.values()) == {(24, 24)}, found


@pytest.mark.slow
def test_two_replays_at_once_add_each_step_once(trace):
    command = [str(TIM_TRACE), "replay", str(trace), "--batch-size", "1"]
    processes = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    told = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    query = "SELECT pass, count(*), count(DISTINCT (step, seq_id)) FROM scores WHERE pass LIKE 'replay/%' GROUP BY pass"
    assert {name: (count, names) for name, count, names in rows(trace, query)} == {
        "replay/as-recorded": (24, 24), "replay/batch-size-1": (24, 24),
    }  # fmt: skip


def _replayed(trace):
    return any(name.startswith("p") for name in Store(trace).files("journal"))


def test_the_command_prints_a_row_an_arm_and_what_comes_next(trace):
    done = tim_trace("replay", trace, "--steps", "1:2", "--dtype", "bf16")
    assert done.code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == [
        "arm", "num_steps", "num_tokens", "share_equal", "mean_abs_d", "max_abs_d", "steps_reproduced",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[2:]] == ["as-recorded", "bf16"]
    assert "--pair replay/bf16:train" in done.stderr


def replayed_by_vllm(run, tmp_path, *arguments):
    """Replay with vLLM in a process of its own, and return the trace."""
    trace = copy(run, tmp_path)
    done = tim_trace("replay", trace, *arguments)
    assert done.code == 0, done.stderr[-3000:]
    return trace


def gaps(trace, *names):
    """Each pass's mean |d| to the recorded rollout."""
    return {name: rows(trace, f"SELECT mean_abs_d FROM pair_runs('{name}', 'rollout')")[0][0] for name in names}


@pytest.mark.slow
def test_vllm_on_the_recorded_weights_gives_the_recorded_rollout(tmp_path):
    run = train(*RLOO_VLLM, config={"beta": 0.05}, capture="logprobs")
    arms = ["--engine", "vllm", "--arm", "engine=vllm,mode=decode", "--arm", "engine=vllm,dtype=fp32"]
    trace = replayed_by_vllm(run, tmp_path, *arms)
    gap = gaps(trace, "train", "replay/vllm", "replay/vllm+decode", "replay/vllm+fp32")
    assert gap["train"] > 1e-4
    assert gap["replay/vllm"] < 0.2 * gap["train"]
    assert gap["replay/vllm+decode"] < 0.2 * gap["train"]
    assert gap["replay/vllm+fp32"] > 0.5 * gap["train"]
    ((distance,),) = rows(trace, "SELECT mean_abs_d FROM pair_runs('replay/vllm+fp32', 'train')")
    assert distance < 1e-5
    ways = dict(rows(trace, "SELECT pass, contract_json ->> '$.way' FROM passes WHERE pass LIKE 'replay/vllm%'"))
    forced = "trace_replay" if torch.cuda.is_available() else "logits_processor"
    assert ways == {
        "replay/vllm": "prompt_logprobs", "replay/vllm+decode": forced, "replay/vllm+fp32": "prompt_logprobs",
    }  # fmt: skip


@pytest.mark.slow
def test_vllm_s_raw_logprobs_are_brought_to_the_recorded_temperature(tmp_path):
    run = train("--vllm", "--bf16-engine", config={"temperature": 0.8}, capture="topk:3", fraction="0.5")
    trace = replayed_by_vllm(run, tmp_path, "--steps", "1", "--engine", "vllm", "--mode", "decode")
    gap = gaps(trace, "train", "replay/vllm+decode")
    assert gap["replay/vllm+decode"] < 0.2 * gap["train"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"engine": "vllm", "dtype": "fp64"}, InvalidOption, "vLLM does not support fp64; use fp32, bf16, fp16"),
        ({"engine": "vllm", "attention": "eager"}, InvalidOption, "attention: vLLM does not support this option"),
        ({"prefix_caching": "on"}, InvalidOption, "add engine='vllm'"),
    ],
)
def test_what_an_engine_does_not_take_is_refused(trace, changes, error, message):
    with pytest.raises(error, match=message):
        replay(trace, **changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what vLLM on a CPU takes instead")
@pytest.mark.slow
def test_an_attention_backend_that_vllm_does_not_take_is_refused(trace):
    done = tim_trace("replay", trace, "--steps", "1", "--engine", "vllm", "--attention-backend", "FLASH_ATTN")
    assert done.code == 2
    assert (
        "attention-backend FLASH_ATTN: this vLLM version uses CPU_ATTN instead for this model and device" in done.stderr
    )
    assert rows(trace, "SELECT count(*) FROM scores WHERE pass LIKE 'replay/vllm%'") == [(0,)]


def test_a_look_that_one_arm_takes_counts_for_the_others(tmp_path):
    """Another replay adds a step of the second arm and ends, and the first arm is the one that looks then."""

    class Run:
        folder, store, added, is_alive = tmp_path, SimpleNamespace(files=lambda folder: ["other.json"]), set(), True

        def __init__(self):
            self.look()

        def look(self):
            self.snapshot = SimpleNamespace(liveness={"other": SimpleNamespace(is_alive=self.is_alive)})
            self.seen = set(self.added)

        def steps(self, name):
            return sorted(self.seen)

        def unsealed(self, name):
            return ()

        def sequences(self, name, steps):
            return {step: {"sequence"} & {"sequence" for seen in self.seen if seen == step} for step in steps}

    run = Run()
    first, second = (ArmPass(run, SimpleNamespace(name=name)) for name in "ab")
    assert not second._scored_now(2)
    run.added, run.is_alive = {2}, False
    first._scored_now(1)
    assert second._scored_now(2)


@pytest.mark.slow
def test_vllm_under_a_bound_of_tokens_gives_the_same_and_says_so(tmp_path):
    from grouped import record_groups, tiny_model

    trace = record_groups(tmp_path / "run", tiny_model(head_dim=32, max_position_embeddings=256), steps=2)
    done = tim_trace(
        "replay", trace, "--engine", "vllm", "--batch-tokens", "64", "--sample", "0.5", "--arm", "dtype=fp64"
    )
    assert done.code == 0, done.stderr[-3000:]
    ((distance, count),) = rows(
        trace, "SELECT max_abs_d, num_tokens FROM pair_runs('replay/vllm+batch-tokens-64', 'replay/fp64')"
    )
    assert distance < 1e-5
    assert count > 100
    query = (
        "SELECT contract_json ->> '$.engine_arguments.max_num_batched_tokens' FROM passes WHERE pass LIKE '%tokens-64'"
    )
    assert rows(trace, query) == [("64",)]
