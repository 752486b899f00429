"""Finding and reading the routers of transformers' models, tiny and with random weights."""

import pytest
import torch
from tim_trace.tracer.routing import RouterTap, choice, facts, id_dtype, is_mixture, of_cells, routers

SHAPE = {
    "vocab_size": 16, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": None,
}  # fmt: skip


def model_of(kind, **more):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SHAPE | more))).eval()


KINDS = [
    ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2}, [0, 1]),
    ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}, [0, 1]),
    ("olmoe", {"num_experts": 8, "num_experts_per_tok": 2}, [0, 1]),
    (
        "deepseek_v3",
        {
            "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
            "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "head_dim": 8,
        },
        [1],
    ),
    ("gpt_oss", {"num_local_experts": 8, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2}, [0, 1]),
    ("granitemoe", {"num_local_experts": 8, "num_experts_per_tok": 2}, [0, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "more", "layers"), KINDS, ids=[kind for kind, _, _ in KINDS])
def test_routers_of_many_models_are_found_and_heard(kind, more, layers):
    model = model_of(kind, **more)
    known = routers(model)
    assert [router.layer for router in known] == layers
    assert facts(model) == {"moe_layers": layers, "num_experts": 8, "experts_per_token": 2}
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        bare = model(ids).logits
        with RouterTap(known) as tap:
            heard = model(ids).logits
    assert torch.equal(bare, heard)
    (found,) = tap.forwards()
    assert tap.problem is None
    assert found.expert_ids.shape == found.expert_weights.shape == (12, len(layers), 2)
    assert found.expert_ids.dtype == torch.int8
    assert found.expert_ids.min() >= 0
    assert (found.expert_ids[..., 0] != found.expert_ids[..., 1]).all()
    cells = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0]], dtype=torch.bool).numpy()
    assert torch.equal(of_cells([found], cells).expert_ids, found.expert_ids[[2, 3, 4, 6, 7, 8, 9, 10]])
    assert of_cells([found], cells[:1]) is None


def test_a_router_that_keeps_its_choice_is_named():
    more = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 32}
    model = model_of("llama4_text", **more)
    known = routers(model)
    assert is_mixture(model)
    with RouterTap(known) as tap, torch.no_grad():
        model(torch.arange(4)[None])
    assert tap.forwards() == []
    assert tap.problem == "Llama4Router does not return its choices as (logits, weights, ids)"


def test_a_dense_model_has_no_routers():
    model = model_of("qwen3")
    assert not is_mixture(model)
    assert routers(model) == []
    assert facts(model) == {}


def test_choices_are_told_from_logits_by_their_place():
    ids, weights, logits = torch.tensor([[1, 0]]), torch.tensor([[0.5, 0.25]]), torch.tensor([[0.0, 1.0]])
    for output, place in (((logits, weights, ids), 2), ((ids, weights, logits), 0)):
        found = choice(output)
        assert found[0] is ids
        assert found[1] is weights
        assert found[2] == place
    assert choice((logits, weights)) is None
    assert choice(ids) is None


def test_ids_are_as_small_as_they_can_be():
    assert [id_dtype(count) for count in (128, 129, 1 << 15, 1 << 16, None)] == [
        torch.int8, torch.int16, torch.int16, torch.int32, torch.int32,
    ]  # fmt: skip
