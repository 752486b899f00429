"""The exact engine as one of the two executions: its operators are heard and judged."""

import numpy as np
import pytest
import torch
from located_runs import model_of, record, recorded_once
from shared import rest_slow
from tim_trace.analysis.locate import locate
from tim_trace.analysis.query import sql
from tim_trace.replay.arms import parse_arm
from tim_trace.replay.engine import replay
from tim_trace.replay.locate.engine import locate as locate_operators
from tim_trace.replay.locate.execution import ExactExecution
from tim_trace.replay.recorded import RecordedRun
from tim_trace.schemas.errors import CannotReplay

MODELS = ["llama", "qwen3", "qwen3_moe"]


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return recorded_once(tmp_path_factory)


@pytest.mark.parametrize("dtype", rest_slow(["fp32", "bf16", "fp16", "fp64"]))
@pytest.mark.parametrize("name", rest_slow(MODELS, 3))
def test_every_operator_of_the_exact_engine_is_heard_and_only_rounds(traces, name, dtype):
    found = locate(
        traces(name), arm=f"engine=exact,dtype={dtype}", against="dtype=fp64,padding=right", patch="none", sequences="4"
    )
    assert found.first is None
    assert found.unseen == ()
    assert max(each.ratio for each in found.operators) < 1
    ours, theirs = ({each.operator for each in found.operators if each.side == side} for side in "ab")
    # The residual stream is the sum itself: what is judged of it is rounding, which float64 hides.
    assert {name for name in theirs if "residual" not in name and "activation" not in name} <= ours
    if name != "qwen3_moe" or dtype in ("fp32", "fp64"):
        assert found.explained == pytest.approx(1, abs=0.02)


def test_batches_change_no_bit_of_the_exact_engine(traces):
    found = locate(traces("llama"), arm="engine=exact,dtype=bf16", against="engine=exact,dtype=bf16,padding=packed")
    assert (found.max_abs_d, found.explained, found.patches) == (0.0, None, ())


def test_what_is_heard_are_the_bits_of_a_replay(tmp_path):
    trace = record(tmp_path / "run", model_of("qwen3"))
    replay(trace, engine="exact", dtype="fp32", name="exact")
    query = "SELECT seq_id, logprobs FROM scores WHERE pass = 'replay/exact'"
    replayed = {row["seq_id"]: np.float32(row["logprobs"]).tobytes() for row in sql(trace, query).dicts()}
    run = RecordedRun(trace)
    rows = run.step(1)
    execution = ExactExecution(run, parse_arm("engine=exact,dtype=fp32"), run.train_contract(rows[0].contract), "cpu")
    execution.load(run.weights.load(0))
    heard, _ = execution.listen(rows, rows, lambda name: True)
    assert {name: values.astype(np.float32).tobytes() for name, values in heard.items()} == replayed


def test_a_stale_tensor_of_the_exact_engine_is_named(traces):
    def stale(model):
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.add_(1e-3)

    found = locate_operators(
        traces("llama"), arm="dtype=fp32", against="engine=exact,dtype=fp32", patch="none", prepare_against=stale
    )
    assert found.first is not None
    assert (found.first.side, found.first.operator) == ("b", "model.layers.1.mlp.up_proj")
    assert (found.first.why, found.first.version) == ("weights", 1)


def test_a_fault_of_the_trainers_code_is_named_beside_the_exact_engine(traces):
    def plant(model):
        model.model.layers[2].post_attention_layernorm.variance_epsilon = 1e-2

    found = locate_operators(
        traces("qwen3"),
        arm="dtype=fp32",
        against="engine=exact,dtype=fp32",
        sequences="3",
        prepare=plant,
    )
    assert (found.first.side, found.first.operator) == ("a", "model.layers.2.post_attention_layernorm")
    assert found.patches == ()  # its operators fit into no other execution


@pytest.mark.parametrize(
    ("name", "against", "said"),
    [
        ("llama", "engine=exact,mode=decode", "the same bits in every mode"),
        ("gemma2", "engine=exact", "cannot run Gemma2ForCausalLM"),
    ],
)
def test_what_the_exact_engine_cannot_do_is_said(traces, name, against, said):
    with pytest.raises(CannotReplay, match=said):
        locate(traces(name), against=against)
