"""vLLM as one of the two executions: a healthy engine is only rounding, and what is planted in it is found where it lies."""

import json
import shutil
import subprocess
import sys

import pytest
from builders import PROGRAMS, tim_trace
from located_runs import model_of, record
from runs import train
from tim_trace.analysis.locate import locate
from tim_trace.schemas.errors import CannotReplay

pytestmark = pytest.mark.engine

WHERE = {
    "epsilon": "model.layers.1.post_attention_layernorm",
    "activation": "layers.2.activation",
    "scale": "model.layers.1.self_attn.attention",
    "cache": "model.layers.1.self_attn.attention",
    "theta": "layers.0.rotary.q",
    "logits": "lm_head",
    "stale": "model.layers.2.mlp.up_proj",
    "biases": "model.layers.1.self_attn.q_proj",
    "no_norm": "model.layers.1.self_attn.q_norm",
    "stale_experts": "model.layers.2.mlp.experts",
    "exchanged_experts": "model.layers.1.mlp.experts",
    "renormalised": "model.layers.1.mlp.gate",
    "rounded_router": "model.layers.1.mlp.gate",
    "other_activation": "model.layers.2.mlp.experts",
}
HIDDEN_BY_ROUNDING = {("bf16", "epsilon")}


def cases(folder, dtype, models):
    command = [sys.executable, PROGRAMS / "locate_vllm.py", folder, dtype, *models]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=900)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == sum(11 if model == "qwen3_moe" else 8 for model in models), done.stderr[-3000:]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "models"), [("fp32", ["llama", "qwen2"]), ("bf16", ["qwen3"])])
def test_what_is_planted_in_the_engine_is_found_where_it_lies(tmp_path, dtype, models):
    for case in cases(tmp_path, dtype, models):
        fault, first = case["fault"], case["first"]
        if fault == "nothing":
            assert first is None, case
            assert case["worst"] < 1.0
            assert case["explained"] == pytest.approx(1.0, abs=0.02 if dtype == "bf16" else 0.15)
            assert {"act_fn"} <= set(case["unseen"])
            assert {"q_proj a", "down_proj a", "all operators a"} <= set(case["removed"])
        elif (dtype, fault) in HIDDEN_BY_ROUNDING:
            assert first is None, case
        else:
            assert first is not None, case
            assert first[:2] == ["b", WHERE[fault]], case
            if fault in ("stale", "biases"):
                assert first[2] == "weights", case
            if fault == "stale" and dtype == "fp32":
                assert first[3] == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_planted_in_an_engines_mixture_of_experts_is_found_where_it_lies(tmp_path, dtype):
    for case in cases(tmp_path, dtype, ["qwen3_moe"]):
        fault, first = case["fault"], case["first"]
        if fault == "nothing":
            assert first is None, case
            assert case["worst"] < 1.0
            assert set(case["unseen"]) <= {"lm_head"}
            removed = case["removed"]
            assert {"gate a", "experts a", "all operators a"} <= set(removed)
            assert not [name for name in removed if name.endswith(" b")]
            if case["flipped"]:
                assert removed["routes a"] > 0.2
            else:
                assert case["explained"] == pytest.approx(1.0, abs=0.15)
        elif (dtype, fault) in HIDDEN_BY_ROUNDING:
            assert first is None, case
        else:
            assert first is not None, case
            assert first[:2] == ["b", WHERE[fault]], case
            if fault in ("stale_experts", "exchanged_experts"):
                assert first[2] == "weights", case
            if fault == "stale_experts" and dtype == "fp32":
                assert first[3] == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_recorded_run_is_held_against_its_engine(tmp_path, mode):
    run = train("--trainer", "rloo", "--vllm", "--bf16-engine", config={"beta": 0.05}, capture="logprobs")
    done = tim_trace(
        "locate",
        shutil.copytree(run.trace, tmp_path / "run"),
        "--steps",
        "1",
        "--against",
        f"engine=vllm,mode={mode}",
        "--json",
    )
    assert done.code == 0, done.stderr
    found = done.json()
    assert found["first"] is None
    assert found["explained"] == pytest.approx(1.0, abs=0.1)
    assert found["gap_rms"] > 0.0
    own = {each["kind"]: each["carried"] for each in found["kinds"] if each["side"] == "b"}
    assert sum(own.values()) > 0.9  # the engine computes in bfloat16, the trainer in float32
    assert found["engines"] == ["b"]
    assert "--against engine=vllm,dtype=fp32" in done.stderr


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("llama", {"against": "engine=vllm,prefix-caching=on"}, "omit prefix-caching on"),
        (
            "qwen2_moe",
            {"against": "engine=vllm"},
            "supported mixture-of-experts models: Qwen3MoeForCausalLM",
        ),
        ("llama", {"against": "engine=vllm", "against_factory": "module:function"}, "factory"),
    ],
)
def test_what_cannot_be_heard_of_vllm_is_said_before_it_starts(tmp_path, model, options, said):
    record(tmp_path / "run", model_of(model))
    with pytest.raises(CannotReplay, match=said):
        locate(tmp_path / "run", steps="1", **options)
