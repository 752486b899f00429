"""What loading weights into a model takes in memory: the model and a tensor, not two models."""

import sys

import pytest
import torch
from builders import PROGRAMS, run
from safetensors.torch import save_file
from tim_trace.tracer.recorder import Recorder
from transformers import Qwen3Config, Qwen3ForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A trace with a model of 300 MB, of random bits, and a folder of the same as a checkpoint."""
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with Recorder(folder / "run") as recorder:
        name = "transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM"
        recorder.describe(model={"class": name, "config": config.to_dict()})
        recorder.add_weights(0, model.state_dict())
    (folder / "checkpoints" / "step_0").mkdir(parents=True)
    # As save_pretrained writes them, but with the tied name, which a trace has too.
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "checkpoints" / "step_0" / "model.safetensors")
    return folder, float(sum(parameter.detach().double().sum() for parameter in model.parameters()))


@pytest.mark.parametrize("source", ["trace", "checkpoints"])
def test_loading_takes_the_model_and_its_largest_tensor(recorded, source):
    folder, total = recorded
    weights_from = folder / "checkpoints" if source == "checkpoints" else "-"
    done = run(sys.executable, PROGRAMS / "loads.py", folder / "run", weights_from, "lazy")
    assert done.code == 0, done.stderr
    num_bytes, largest, most, found = map(float, done.stdout.split())
    assert found == total
    assert num_bytes > 250e6
    # A chunk compressed, and as it is (16 MB each), the tensor that they give, and what the allocator keeps.
    print(num_bytes, largest, most)
    assert most < num_bytes + 2 * largest + 64e6


def test_what_is_loaded_whole_takes_more(recorded):
    """That the bound above can be broken: a version that is held for the next one, and all of its tensors."""
    folder, _ = recorded
    done = run(sys.executable, PROGRAMS / "loads.py", folder / "run", "-", "whole")
    num_bytes, _, most, _ = map(float, done.stdout.split())
    print(num_bytes, most)
    assert most > 2 * num_bytes
