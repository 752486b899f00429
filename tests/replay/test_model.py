import numpy as np
import pytest
import torch
from tim_trace.replay.backends import model as models
from tim_trace.schemas.errors import CannotReplay
from tim_trace.tracer.weights.reader import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

KINDS = {2: torch.uint16, 4: torch.uint32}


def config(**changes):
    sizes = {
        "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8,
    }  # fmt: skip
    return Qwen3Config(**sizes | changes)


def kept(model):
    """A model's tensors as a trace keeps them; tied ones are one."""
    bits = {}
    for name, tensor in model.state_dict().items():
        flat = tensor.contiguous().view(KINDS[tensor.element_size()]).numpy().copy()
        bits[name] = Tensor(str(tensor.dtype).removeprefix("torch."), flat)
    return bits


def rebuilt(model, **changes):
    identity = {"class": f"{type(model).__module__}.{type(model).__qualname__}", "config": model.config.to_dict()}
    return models.build(identity, **{"dtype": "bfloat16", "attention": "sdpa", "device": "cpu"} | changes)


@pytest.fixture
def mixed():
    """A bfloat16 model with a norm in float32."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config()).to(torch.bfloat16)
    model.model.norm.weight = torch.nn.Parameter(1 + 1e-3 * torch.randn(16))
    return model


def test_a_tensor_of_a_dtype_of_its_own_keeps_it_and_its_bits(mixed):
    model = rebuilt(mixed)
    for _ in range(2):
        models.load(model, kept(mixed), None)
        for name, tensor in mixed.state_dict().items():
            found = model.state_dict()[name]
            assert found.dtype == tensor.dtype, name
            assert torch.equal(found, tensor), name
        assert model.model.norm.weight.dtype == torch.float32
        with torch.no_grad():
            mixed.model.norm.weight += 1e-3


def test_weights_are_rounded_to_the_dtype_that_is_asked_for(mixed):
    model = rebuilt(mixed)
    models.load(model, kept(mixed), "bfloat16")
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.model.norm.weight, mixed.model.norm.weight.to(torch.bfloat16))


def test_a_rebuilt_model_has_its_buffers_and_ties():
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config(tie_word_embeddings=True)).eval()
    again = rebuilt(model, dtype="float32").eval()
    models.load(again, kept(model), None)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_weights_that_do_not_fit_are_refused(mixed):
    tensors = kept(mixed)
    tensors["stray"] = tensors.pop("model.norm.weight")
    with pytest.raises(
        CannotReplay, match=r"1 tensors are missing \(model.norm.weight\) and 1 are unexpected \(stray\)"
    ):
        models.load(rebuilt(mixed), tensors, None)
    tensors = kept(mixed)
    tensors["model.norm.weight"] = Tensor("bfloat16", np.zeros(3, np.uint16))
    with pytest.raises(CannotReplay, match=r"model.norm.weight has shape \(3,\), but the model expects \(16,\)"):
        models.load(rebuilt(mixed), tensors, None)
