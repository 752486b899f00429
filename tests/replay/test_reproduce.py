"""`reproduce` turns a located difference into a script that shows it without tim-trace."""

import subprocess
import sys
from types import MethodType

import pytest
import torch
from builders import tim_trace
from located_runs import recorded_once
from shared import rest_slow
from tim_trace.replay.locate.engine import locate
from tim_trace.replay.recorded import RecordedRun
from tim_trace.replay.reproduce import engine
from tim_trace.replay.reproduce.calls import Calls
from tim_trace.replay.reproduce.engine import MOST_BYTES, MOST_LINES, reproduce, reproduced
from tim_trace.schemas.errors import CannotReplay


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return recorded_once(tmp_path_factory)


def made(trace, plant, output, **arms):
    executions = {}
    options = {"arm": "dtype=fp32", "against": "dtype=fp32"} | arms
    found = locate(trace, sequences="s0", patch="none", prepare_against=plant, executions=executions, **options)
    return reproduced(RecordedRun(trace), found, executions, output)


def printed(path):
    """Run a script where neither tim-trace nor the trace is at hand, and return its exit code and its numbers."""
    done = subprocess.run(
        [sys.executable, "-I", path.name], cwd=path.parent, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def other_epsilon(model):
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-2


def own_activation(model):
    model.model.layers[2].mlp.forward = MethodType(
        lambda self, x: self.down_proj(torch.nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x)),
        model.model.layers[2].mlp,
    )


def other_weight(model):
    model.model.layers[0].self_attn.o_proj.weight.data[3] *= 1.5


def shifted_positions(model):
    forward = model.forward

    def shifted(input_ids, **words):
        positions = torch.arange(input_ids.shape[1])[None]
        return forward(input_ids=input_ids, **words | {"position_ids": positions + (positions > 4)})

    model.forward = shifted


def scaled_logits(model):
    forward = model.forward

    def scaled(**words):
        given = forward(**words)
        given.logits = given.logits * 1.1
        return given

    model.forward = scaled


@pytest.mark.parametrize(
    ("plant", "operator", "needs_file"),
    [
        pytest.param(other_epsilon, "post_attention_layernorm", False, marks=pytest.mark.slow),
        pytest.param(own_activation, "activation", False, marks=pytest.mark.slow),
        (other_weight, "o_proj", True),
    ],
)
def test_a_fault_in_a_module_becomes_a_script_of_that_module(traces, tmp_path, plant, operator, needs_file):
    result = made(traces("llama"), plant, tmp_path / "bug.py")
    assert operator in result.first.operator
    assert result.num_lines <= MOST_LINES
    assert result.num_bytes <= MOST_BYTES
    assert (tmp_path / "bug.pt").exists() == needs_file == (result.file is not None)
    assert "tim_trace" not in (tmp_path / "bug.py").read_text()
    assert printed(tmp_path / "bug.py") == (1, result.output)


@pytest.mark.parametrize("plant", rest_slow([scaled_logits, shifted_positions]))
def test_a_fault_between_modules_becomes_a_script_of_the_whole_model_with_few_layers(traces, tmp_path, plant):
    result = made(traces("llama"), plant, tmp_path / "bug.py")
    text = (tmp_path / "bug.py").read_text()
    assert "LlamaForCausalLM(config)" in text
    assert "layers.1." not in text
    assert (result.file, result.num_lines <= MOST_LINES) == (None, True)


@pytest.mark.slow
def test_two_settings_of_the_same_class_are_both_built_from_it(traces, tmp_path):
    result = made(traces("gemma2"), None, tmp_path / "bug.py", arm="dtype=fp32,attention=math")
    text = (tmp_path / "bug.py").read_text()
    assert (result.first.side, result.first.kind) == ("a", "attention")
    assert [text.count(f'config._attn_implementation = "{name}"') for name in ("sdpa", "eager")] == [1, 1]
    assert text.count('Gemma2ForCausalLM(config).eval().get_submodule("model.layers.0.self_attn")') == 2
    fixed = text.replace('"sdpa"', '"eager"')
    (tmp_path / "bug.py").write_text(fixed)
    assert printed(tmp_path / "bug.py")[0] == 0


@pytest.mark.slow
def test_a_script_exits_with_0_once_both_sides_compute_the_same(traces, tmp_path):
    made(traces("llama"), other_epsilon, tmp_path / "bug.py")
    text = (tmp_path / "bug.py").read_text()
    assert text.count("0.01") == 1
    (tmp_path / "bug.py").write_text(text.replace("0.01", "1e-06"))
    assert printed(tmp_path / "bug.py")[0] == 0


@pytest.mark.slow
def test_random_numbers_replace_recorded_ones_where_the_fault_stays(traces, tmp_path):
    made(traces("llama"), own_activation, tmp_path / "bug.py")
    text = (tmp_path / "bug.py").read_text()
    assert "weights = {n: torch.randn(p.shape)" in text
    assert "inputs = [torch.randn((1, 1, 48))]" in text


def test_rounding_alone_writes_nothing(traces, tmp_path):
    result = reproduce(traces("llama"), arm="dtype=bf16", sequences="s0", output=tmp_path / "bug.py")
    assert (result.first, result.script, list(tmp_path.iterdir())) == (None, None, [])
    assert str(result).startswith("Only rounding: no operator of a (bf16) or b (fp64)")


def test_a_file_that_is_there_stays_if_no_script_works(traces, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "_MOST_SECONDS", 0.001)
    (tmp_path / "bug.py").write_text("mine")
    with pytest.raises(CannotReplay, match="cannot write a script that reproduces the difference"):
        made(traces("llama"), other_epsilon, tmp_path / "bug.py")
    assert [path.name for path in tmp_path.iterdir()] == ["bug.py"]
    assert (tmp_path / "bug.py").read_text() == "mine"


def test_the_command_prints_where_the_script_is_and_what_it_printed(traces, tmp_path):
    (tmp_path / "own.py").write_text(
        "import transformers\n\n\n"
        "def build(config, dtype, attention):\n"
        "    config = transformers.LlamaConfig(**config | {'rms_norm_eps': 0.01}, attn_implementation=attention)\n"
        "    return transformers.LlamaForCausalLM(config).to(dtype).eval()\n"
    )
    done = tim_trace(
        "reproduce", traces("llama"), "--against", "dtype=fp32", "--arm", "dtype=fp32", "--sequences", "s0",
        "--against-factory", "own:build", cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.stderr
    assert done.stdout.startswith("bug.py (")
    assert "shows the error of model.layers.0.input_layernorm in b." in done.stdout
    assert (tmp_path / "bug.py").exists()


def test_an_engine_without_torch_modules_is_refused(traces, tmp_path):
    with pytest.raises(CannotReplay, match=r"a .*: a script cannot run engine exact; compare with engine=hf"):
        made(traces("llama"), other_epsilon, tmp_path / "bug.py", arm="engine=exact,dtype=fp32")


def test_recorded_calls_give_the_same_bits_as_source():
    def computed(x, weight):
        parts = x.chunk(2, dim=-1)
        total = torch.zeros_like(parts[0])
        total[..., :2] += parts[1][..., :2] * 3
        total.mul_(2.0)
        for row in torch.topk(x, 2).indices[0]:
            total = total + x[:, row, None] ** 2
        return torch.nn.functional.softmax(1.0 - total @ weight.T, dim=-1)[:, None].clamp(max=float("inf"))

    x, weight = torch.randn(3, 8), torch.randn(5, 4)
    with Calls({"x": x, "weight": weight}, {}) as calls:
        given = computed(x, weight)
    lines, used = calls.source(given)
    body = "\n".join(f"    {line}" for line in lines)
    assert used == {"x", "weight"}
    names = {"torch": torch, "F": torch.nn.functional, "inf": float("inf")}
    exec(f"def again(x, weight):\n{body}", names)
    assert torch.equal(names["again"](x, weight), given)
