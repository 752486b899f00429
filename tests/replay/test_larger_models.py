"""Models that are larger than a device: layers on several (device_map), and each layer's weights in several processes (vLLM)."""

import numpy as np
import pytest
import torch
from tim_trace.replay.arms import Arm
from tim_trace.replay.backends import model as models
from tim_trace.replay.backends.vllm import VllmEngine
from tim_trace.schemas.errors import CannotReplay, InvalidOption
from tim_trace.tracer.weights.reader import Tensor


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.slow
@pytest.mark.engine
def test_a_model_whose_layers_are_moved_one_by_one_gives_the_bits_of_one_device():
    model, ids_BW = llama(), torch.arange(1, 20)[None]
    with torch.no_grad():
        whole = model.base_model(input_ids=ids_BW).last_hidden_state.clone()
        model = models.divided(model, {"cpu": 10**9})
        assert hasattr(model.base_model.layers[0], "_hf_hook")
        assert torch.equal(model.base_model(input_ids=ids_BW).last_hidden_state, whole)


def test_a_model_that_fits_nowhere_is_refused():
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    with pytest.raises(
        CannotReplay, match="does not fit: its layers need more than the 20,000 bytes available on 1 devices"
    ):
        models.divided(model, {"cpu": 20_000})


class Row:
    prompt_ids, response_ids = np.arange(1, 10), np.arange(10, 20)
    captured, seq_id = False, "a"


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.filterwarnings("ignore:(?!arm|engine)")  # vLLM is imported in this process, with warnings of its own
def test_vllm_divides_a_model_among_two_processes_and_takes_version_after_version():
    model = llama()
    arguments = {"tensor_parallel_size": 2, "enforce_eager": True, "dtype": "float32", "max_model_len": 256}
    engine = VllmEngine(model.config.to_dict(), arguments, decodes=False, device="cpu")
    try:
        for _ in range(2):
            weights = model.state_dict().items()
            engine.put({name: Tensor("float32", value.numpy().view(np.uint32).copy()) for name, value in weights})
            (found_T,) = engine.score([Row], 1.0, None, None)
            with torch.no_grad():
                logits_TV = model(torch.arange(1, 20)[None]).logits[0, 8:18]
                expected_T = torch.log_softmax(logits_TV, -1)[torch.arange(10), torch.arange(10, 20)]
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            assert np.abs(found_T - expected_T.numpy()).max() < 1e-5  # sums in another order
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 2}, "works only with vLLM; add engine='vllm'"),
        ({"engine": "exact", "tensor_parallel_size": 2}, "engine exact does not support this option"),
        ({"engine": "vllm", "tensor_parallel_size": 0}, "got 0; pass 1 or more"),
    ],
)
def test_it_is_an_arm_of_vllm_alone(options, words):
    with pytest.raises(InvalidOption, match=words):
        Arm(**options)
    assert not Arm(engine="vllm", tensor_parallel_size=2).is_heard  # locate listens in its own process
