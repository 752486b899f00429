"""`reproduce` turns an error in vLLM's own code into a script of vLLM's layer, or of an engine with few layers."""

import os
import subprocess
import sys

import pytest
from builders import PROGRAMS, tim_trace
from located_runs import MODELS, SIZES, model_of, record

pytestmark = [pytest.mark.engine, pytest.mark.slow]
FAULTS = PROGRAMS / "vllm_faults"


def environment(fault):
    path = os.pathsep.join(filter(None, [os.fspath(FAULTS), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "VLLM_FAULT": fault}


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}.items():
            patch.setitem(SIZES, name, value)  # heads that vLLM's attention supports
        patch.setitem(MODELS, "llama", ("Llama", {"num_key_value_heads": 1, "max_position_embeddings": 128}))
        return record(tmp_path_factory.mktemp("llama") / "run", model_of("llama"))


@pytest.mark.parametrize(
    ("fault", "operator", "runs"),
    [
        ("epsilon", "model.layers.0.input_layernorm", "module = RMSNorm(64, eps=1e-06)"),
        ("no_scale", "model.layers.0.self_attn.attention", "llm = LLM("),
    ],
)
def test_an_error_in_vllm_becomes_a_script_that_passes_once_vllm_is_fixed(trace, tmp_path, fault, operator, runs):
    done = tim_trace(
        "reproduce", trace, "--arm", "dtype=fp32", "--against", "engine=vllm,dtype=fp32", "--sequences", "s0", "--json",
        cwd=tmp_path, env=environment(fault),
    )  # fmt: skip
    assert done.code == 0, done.stderr
    found, text = done.json(), (tmp_path / "bug.py").read_text()
    assert (found["first"]["side"], found["first"]["operator"]) == ("b", operator)
    assert found["num_lines"] == text.count("\n") <= 80
    assert runs in text
    assert "tim_trace" not in text
    assert f"Takes {found['duration_s']:.0f} s." in text
    for code, planted in ((1, fault), (0, "")):
        again = subprocess.run([sys.executable, "bug.py"], cwd=tmp_path, env=environment(planted), capture_output=True)
        assert again.returncode == code, again.stderr
        assert again.stdout.startswith(b"a ")
