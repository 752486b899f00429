import json
import shutil

import pytest
import torch
from builders import tim_trace
from runs import train
from tim_trace.analysis.weights import engine_dtype, export, weights
from tim_trace.schemas.errors import InvalidOption
from tim_trace.tracer.recorder import Recorder


@pytest.fixture
def trace(tmp_path):
    """Four float32 elements of which one moves by less than bfloat16 can tell, then one by more; and an integer."""
    tensor = torch.tensor([1.0, 2.0, 3.0, 4.0])
    count = torch.tensor([7])
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_weights(0, {"a": tensor, "count": count})
        tensor[0] += 2**-12
        recorder.add_weights(1, {"a": tensor, "count": count})
        tensor[1] += 0.5
        recorder.add_weights(2, {"a": tensor, "count": count})
    return tmp_path / "run"


def shares(trace, **options):
    return [row["share_changed"] for row in weights(trace, **options).dicts()]


def test_what_rounding_takes_away_did_not_change(trace):
    assert shares(trace) == [None, 0.2, 0.2]
    assert shares(trace, dtype="bf16") == [None, 0.0, 0.2]
    assert shares(trace, dtype="fp16") == [None, 0.0, 0.2]
    assert shares(trace, dtype="fp32") == [None, 0.2, 0.2]


def test_bytes_are_those_of_the_dtype(trace):
    assert [row["num_bytes"] for row in weights(trace).dicts()] == [24] * 3
    assert [row["num_bytes"] for row in weights(trace, dtype="bf16").dicts()] == [16] * 3


def test_what_cannot_be_rounded_to_is_refused(trace):
    with pytest.raises(InvalidOption, match="got 'int4'; use fp32, bf16 or fp16"):
        weights(trace, dtype="int4")
    with pytest.raises(InvalidOption, match="by='version'"):
        weights(trace, dtype="bf16", by="module")


def test_an_export_names_the_class_that_the_config_of_a_model_made_here_does_not(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1))
    with Recorder(tmp_path / "run") as recorder:
        recorder.describe(
            model={"class": f"{type(model).__module__}.Qwen3ForCausalLM", "config": model.config.to_dict()}
        )
        recorder.add_weights(0, model.state_dict())
    config = json.loads((export(tmp_path / "run", 0, tmp_path / "out") / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]  # vLLM takes a folder without for a pooling model


@pytest.mark.engine
def test_the_engine_s_weights_are_told_apart_from_the_trainer_s(tmp_path):
    run = train("--vllm", "--bf16-engine", config={"temperature": 0.8}, capture="topk:3", fraction="0.5")
    shutil.copytree(run.trace, tmp_path / "run")
    assert engine_dtype(tmp_path / "run") == "bf16"
    done = tim_trace("weights", tmp_path / "run")
    assert f"tim-trace weights {tmp_path / 'run'} --dtype bf16" in done.stderr
    master, engine = shares(tmp_path / "run"), shares(tmp_path / "run", dtype="bf16")
    assert all(0 < b < a for a, b in zip(master[1:], engine[1:], strict=True))
    assert engine_dtype(train(capture="logprobs").trace) is None


@pytest.mark.engine
def test_an_export_is_rounded_as_asked(tmp_path):
    from transformers import AutoModelForCausalLM

    trace = train(capture="logprobs").trace
    whole = AutoModelForCausalLM.from_pretrained(export(trace, 1, tmp_path / "whole"))
    small = AutoModelForCausalLM.from_pretrained(export(trace, 1, tmp_path / "small", dtype="bf16"))
    assert (whole.dtype, small.dtype) == (torch.float32, torch.bfloat16)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor.to(torch.bfloat16), small.state_dict()[name]), name
