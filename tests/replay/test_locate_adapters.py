"""Models with adapters, looked into by `locate`: a projection with its adapters is one operator, apart or merged."""

import pytest
from adapted import with_adapters
from located_runs import model_of, record
from shared import rest_slow
from tim_trace.analysis.locate import location
from tim_trace.replay.locate.engine import locate

KINDS = {"lora": {}, "ranks": {"use_rslora": True, "rank_pattern": {"q_proj": 2}}, "dora": {"use_dora": True}}


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    made = {}

    def trace(kind):
        if kind not in made:
            made[kind] = record(tmp_path_factory.mktemp(kind) / "run", with_adapters(model_of("llama"), **KINDS[kind]))
        return made[kind]

    return trace


@pytest.mark.parametrize("against", rest_slow(["dtype=bf16", "adapter=merged", "engine=exact,dtype=fp32"], 2))
@pytest.mark.parametrize("kind", rest_slow(KINDS, 1))
def test_rounding_is_no_divergence_beside_adapters(traces, kind, against):
    found = locate(traces(kind), arm="dtype=fp32,padding=right", against=against, sequences="4", patch="none")
    assert found.first is None
    assert max(each.ratio for each in found.operators) < 1
    assert found.unseen == ()
    assert {"q_proj", "down_proj"} <= {each.kind for each in found.operators}
    if against != "dtype=bf16":
        assert location(found).explained == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("kind", rest_slow(KINDS))
def test_another_scale_of_an_adapter_is_named(traces, kind):
    def more_scale(model):
        model.model.layers[1].self_attn.v_proj.scaling["default"] *= 1.5

    found = locate(
        traces(kind), arm="dtype=fp32", against="dtype=fp32", sequences="4", patch="none", prepare_against=more_scale
    )
    assert (found.first.side, found.first.operator) == ("b", "model.layers.1.self_attn.v_proj")


def test_a_projection_is_patched_with_its_adapters(traces):
    found = location(locate(traces("lora"), arm="dtype=bf16", against="adapter=merged", sequences="3"))
    assert {("q_proj", "a"), ("q_proj", "b"), ("down_proj", "b")} <= {
        (each.patch, each.taker) for each in found.patches
    }
