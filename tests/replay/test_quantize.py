import pytest
import torch
from tim_trace.replay.backends.model import GROUP, quantize, rounded


def test_int4_by_hand():
    # The largest is 1.4, so the scale is 0.2: -0.3 is -1.5 steps, which rounds to the even -2.
    weight = torch.tensor([[1.4, -0.3, 0.09, 0.11]])
    torch.testing.assert_close(rounded(weight, "int4"), torch.tensor([[1.4, -0.4, 0.0, 0.2]]))


@pytest.mark.parametrize(("kind", "steps"), [("int8", 254), ("int4", 14)])
def test_an_error_is_at_most_half_a_step_of_its_group(kind, steps):
    weight = torch.randn(5, 300)
    for start in range(0, 300, GROUP):
        group = weight[:, start : start + GROUP]
        step = 2 * group.abs().amax(dim=1, keepdim=True) / steps
        error = (rounded(weight, kind)[:, start : start + GROUP] - group).abs()
        assert (error <= step / 2 * (1 + 1e-5)).all()


def test_fp8_keeps_three_bits_of_mantissa():
    weight = torch.randn(4, 64)
    error = (rounded(weight, "fp8") - weight).abs() / weight.abs().clamp(min=1e-2)
    assert 0.01 < error.max() <= 1 / 16 + 1e-4


def test_zeros_and_the_dtype_stay():
    assert torch.equal(rounded(torch.zeros(2, 3), "int8"), torch.zeros(2, 3))
    assert rounded(torch.randn(2, 3).to(torch.bfloat16), "fp8").dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts_are_rounded_by_their_inputs_and_routers_are_not(kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": 16,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 1,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2}
    experts = {"num_local_experts" if kind == "gpt_oss" else "num_experts": 4, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **heads, **experts))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    quantize(model, "int4")
    after = model.state_dict()
    (name,) = (name for name in after if name.endswith("experts.down_proj"))
    for expert in range(4):
        # gpt-oss has [inputs, outputs], the others [outputs, inputs].
        old, new = (w.T if kind == "gpt_oss" else w for w in (before[name][expert], after[name][expert]))
        assert not torch.equal(old, new)
        assert torch.equal(rounded(old, "int4"), new)
    assert all(torch.equal(before[name], after[name]) for name in after if "router" in name or ".gate." in name)
