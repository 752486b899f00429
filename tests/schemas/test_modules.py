import pytest
from tim_trace.schemas.modules import kind_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("transformer.wte.weight", "embedding"),
        ("model.layers.3.self_attn.q_proj.weight", "attention"),
        ("model.layers.3.self_attn.q_norm.weight", "norm"),
        ("model.layers.3.post_attention_layernorm.weight", "norm"),
        ("transformer.h.0.ln_1.bias", "norm"),
        ("model.layers.3.mlp.experts.7.up_proj.weight", "mlp"),
        ("model.layers.3.mlp.gate.weight", "mlp"),
        ("lm_head.weight", "head"),
        ("net.0.weight", "other"),
    ],
)
def test_a_tensor_s_kind_is_told_by_its_name(name, kind):
    assert kind_of(name) == kind
