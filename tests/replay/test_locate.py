"""Where two executions part: what is planted is found where it lies, and rounding is taken for nothing else."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from types import FunctionType, MethodType

import pytest
import torch
from located_runs import MODELS, OF_OTHER_CODE, recorded_once
from runs import train
from shared import rest_slow
from tim_trace.analysis.locate import locate
from tim_trace.analysis.locate_text import location_sentence, location_text, next_command
from tim_trace.analysis.location import location
from tim_trace.replay.locate import bounds
from tim_trace.replay.locate.bounds import Rounding
from tim_trace.replay.locate.engine import locate as locate_operators
from tim_trace.schemas.errors import CannotReplay, InvalidOption
from tim_trace.tracer.located import read_results
from tim_trace.tracer.store import Store
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return recorded_once(tmp_path_factory)


@pytest.mark.parametrize(
    "dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow), pytest.param("fp16", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", rest_slow(MODELS))
def test_rounding_is_no_divergence(traces, name, dtype):
    found = locate(traces(name), arm=f"dtype={dtype}", patch="none")
    assert found.first is None
    assert max(each.ratio for each in found.operators) < 1
    assert found.gap_rms > 0


@pytest.mark.parametrize("dtype", rest_slow(["fp32", "bf16"]))
@pytest.mark.parametrize("name", rest_slow(OF_OTHER_CODE, 3))
def test_rounding_of_models_of_other_code_is_no_divergence(traces, name, dtype):
    found = locate(traces(name), arm=f"dtype={dtype}", patch="none")
    assert found.first is None
    assert max(each.ratio for each in found.operators) > 0.005


def test_a_head_that_takes_rounded_weights_in_float32_is_no_divergence(traces):
    found = locate(traces("llama"), arm="dtype=bf16", against="dtype=bf16,lm-head=fp32", patch="none")
    assert found.first is None


@pytest.mark.parametrize(
    ("name", "dtype", "off"),
    rest_slow(
        [
            ("llama", "fp32", 1e-5),
            ("gemma2", "fp32", 1e-5),
            ("qwen3_moe", "fp32", 1e-5),
            ("llama", "bf16", 0.05),
            ("gemma2", "bf16", 0.05),
        ]
    ),
)
def test_the_operators_own_errors_add_up_to_the_gap(traces, name, dtype, off):
    found = locate(traces(name), arm=f"dtype={dtype}", patch="none")
    assert found.explained == pytest.approx(1, abs=off)


@pytest.mark.parametrize(
    ("name", "arm"),
    rest_slow(
        [("qwen3", "dtype=bf16"), ("gemma2", "dtype=bf16"), ("gpt_neox", "batch-size=1"), ("qwen3_moe", "dtype=fp32")]
    ),
)
def test_layers_that_do_not_fit_beside_each_other_give_the_same(traces, name, arm):
    whole = locate_operators(traces(name), arm=arm, against="attention=eager", patch="none")
    turns = locate_operators(traces(name), arm=arm, against="attention=eager", patch="none", tapped_bytes=1)
    assert list(map(as_row, turns.operators)) == list(map(as_row, whole.operators))
    assert turns.products == {
        operator: pytest.approx(products, rel=1e-6, abs=1e-12) for operator, products in whole.products.items()
    }
    assert (turns.first, turns.routers, turns.unseen) == (whole.first, whole.routers, whole.unseen)


def as_row(operator):
    """What an operator introduced, without its place in a window."""
    return tuple(
        f"{value:.6g}" if isinstance(value, float) else str(value)
        for name, value in asdict(operator).items()
        if name != "order"
    )


def test_flipped_routes_are_counted_and_are_no_divergence(traces):
    found = locate(traces("qwen3_moe"), arm="dtype=bf16", patch="none")
    assert found.first is None
    assert sum(router.num_flipped for router in found.routers) > 0
    assert "expert choices differ, first in model.layers." in location_text(found)


def other_experts(model):
    """In layer 1 every fifth token goes to an expert that was not chosen."""

    def choose(_module, _args, given):
        logits, weights, ids = given
        rest = torch.ones_like(logits).scatter(-1, ids, 0.0).argmax(-1)
        ids = ids.clone()
        ids[::5, 0] = rest[::5]
        return logits, weights, ids

    model.model.layers[1].mlp.gate.register_forward_hook(choose)


@pytest.mark.parametrize("taker", rest_slow(["a", "b"]))
def test_the_others_choices_of_experts_remove_what_choices_alone_make(traces, taker):
    found = locate_operators(traces("qwen3_moe"), arm="dtype=fp32", against="dtype=fp32", prepare_against=other_experts)
    assert found.first.operator == "model.layers.1.mlp.gate"
    assert sum(each.sum_square for each in found.sequences) > 0
    left = [each.squares_left for each in found.patches if (each.patch, each.taker) == ("routes", taker)]
    assert left == [(0.0,) * len(found.sequences)]


def test_only_choices_that_differ_are_given(traces):
    """Between two precisions the weights of experts differ everywhere, and few choices do: the rest of the gap stays."""
    found = locate(traces("qwen3_moe"), arm="dtype=bf16", layers="1")
    routes = [each for each in found.patches if each.patch == "routes"]
    flipped = [each for each in found.routers if each.num_flipped]
    assert [each.operator for each in flipped] == ["model.layers.1.mlp.gate"]
    assert [each.num_operators for each in routes] == [1, 1]
    assert all(0 < abs(each.removed) < 1 for each in routes)
    assert 0 < flipped[0].margin < 0.1
    assert "chosen and rejected experts' scores differ by at most" in location_text(found)


def test_without_flips_no_choices_are_given(traces):
    found = locate(traces("qwen3_moe"), arm="batch-size=1", against="attention=eager")
    assert not [each for each in found.patches if each.patch == "routes"]


def no_norm(model):
    model.model.layers[1].self_attn.q_norm.forward = lambda hidden: hidden


def other_eps(model):
    model.model.layers[2].post_attention_layernorm.variance_epsilon = 1e-4


def wrong_scale(model):
    model.model.layers[1].self_attn.scaling *= 1.02


def other_window(model):
    model.model.layers[0].self_attn.sliding_window = 11
    model.config.sliding_window = 11


def no_cap(model):
    model.model.layers[2].self_attn.attn_logit_softcapping = None


def other_angles(model):
    model.model.rotary_emb.inv_freq.mul_(1.01)


def stronger_residual(model):
    layer = model.model.layers[1]
    inner = layer.mlp.forward
    original = layer.forward

    def forward(hidden_states, **more):
        out = original(hidden_states, **more)
        return out * 1.01

    layer.forward = forward
    assert inner


def stale_tensor(model):
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.add_(1e-3)


def lower_precision(model):
    module = model.model.layers[1].mlp.down_proj
    original = module.forward
    module.forward = lambda hidden: original(hidden.to(torch.float16).to(hidden.dtype))


def exchanged_experts(model):
    experts = model.model.layers[1].mlp.experts
    original = experts.forward
    experts.forward = lambda hidden, chosen, weights: original(hidden, 5 - chosen, weights)


def unnormalised_router(model):
    model.model.layers[2].mlp.gate.norm_topk_prob = not model.model.layers[2].mlp.gate.norm_topk_prob


def warmer_logits(model):
    original = model.lm_head.forward
    model.lm_head.forward = lambda hidden: original(hidden) * 0.999


def other_activation(model):
    model.gpt_neox.layers[1].mlp.act = torch.nn.GELU(approximate="tanh")


def plain_branch(model):
    model.model.layers[1].residual_multiplier = 1.0


def plain_embedding(model):
    model.model.embedding_multiplier = 1.0


def fewer_experts(model):
    model.model.layers[1].mlp.gate.top_k = 2


def input_in_lower_precision(model):
    """Layer 1 computes from a rounded copy of what it takes, beside the residual stream."""
    norm = model.model.layers[1].input_layernorm
    norm.register_forward_pre_hook(lambda _module, args: (args[0].half().to(args[0].dtype),))


def layer_in_autocast(model):
    layer = model.model.layers[1]

    def forward(hidden, original=layer.forward, **rest):
        with torch.autocast("cpu", torch.bfloat16):
            return original(hidden, **rest).to(hidden.dtype)

    layer.forward = forward


def other_shared_gate(model):
    """The gate of the shared expert of layer 1 is no operator of its own: it is a part of the mixture's sum."""
    mixture = model.model.layers[1].mlp
    mixture.register_forward_hook(lambda module, args, given: given + 0.1 * module.shared_expert.forward(args[0]))


def unscaled_logits(model):
    model.register_forward_hook(lambda _module, _args, given: given.__setitem__("logits", 1.5 * given.logits))


def keys_not_turned(model):
    def apply(query, key, cos, sin, **_):
        first, second = query.chunk(2, -1)
        return query * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None], key

    with_other_names(model, apply_rotary_pos_emb=apply)


PLANTED = [
    ("qwen3", no_norm, "layers.1.self_attn.q_norm"),
    ("qwen3", other_eps, "layers.2.post_attention_layernorm"),
    ("llama", wrong_scale, "layers.1.self_attn.attention"),
    ("gemma2", no_cap, "layers.2.self_attn.attention"),
    ("gemma2", other_window, "layers.0.self_attn.attention"),
    ("llama", other_angles, "rotary_emb"),
    ("llama", keys_not_turned, "layers.0.rotary.k"),
    ("llama", stronger_residual, "layers.1.residual"),
    ("qwen3", stale_tensor, "layers.2.mlp.up_proj"),
    ("llama", lower_precision, "layers.1.mlp.down_proj"),
    ("qwen3_moe", exchanged_experts, "layers.1.mlp.experts"),
    ("qwen3_moe", unnormalised_router, "layers.2.mlp.gate"),
    ("llama", warmer_logits, "lm_head"),
    ("gpt_neox", other_activation, "layers.1.mlp.act"),
    ("gemma3", no_norm, "layers.1.self_attn.q_norm"),  # which takes heads before tokens
    ("granite", plain_branch, "layers.1.residual"),
    ("granite", plain_embedding, "embedding"),
    ("qwen2_moe", fewer_experts, "layers.1.mlp.gate"),
    ("qwen2_moe", other_shared_gate, "layers.1.mlp.experts"),
    ("granite", unscaled_logits, "logits"),
    ("llama", input_in_lower_precision, "layers.1.input_layernorm.input"),
]


@pytest.mark.parametrize("dtype", rest_slow(["fp32", "bf16"]))
@pytest.mark.parametrize(
    ("name", "plant", "operator"), rest_slow(PLANTED, 3), ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_planted_fault_of_code_is_named_where_it_lies(traces, name, plant, operator, dtype):
    found = locate_operators(
        traces(name), arm=f"dtype={dtype}", against=f"dtype={dtype}", patch="none", prepare_against=plant
    )
    assert found.first is not None
    assert found.first.side == "b"
    assert found.first.operator.endswith(operator)


def test_a_layer_in_a_lower_precision_than_its_arm_is_no_rounding(traces):
    """What it gives is of a coarser dtype than any of its weights."""
    found = locate_operators(
        traces("llama"), arm="dtype=fp32", against="dtype=fp32", patch="none", prepare_against=layer_in_autocast
    )
    assert (found.first.side, found.first.operator) == ("b", "model.layers.1.self_attn.q_proj")


class OwnAttention:
    """What an attention layer finds in the place of transformers' attention functions: code that is not listened to."""

    def get_interface(self, _name, _default):
        return self.attend

    @staticmethod
    def attend(module, query, key, value, mask, scaling, **_):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = (query * scaling) @ key.transpose(2, 3) + mask[..., : key.shape[2]]
        return (torch.softmax(scores.double(), -1).to(query.dtype) @ value).transpose(1, 2).contiguous(), None


def own_attention(model):
    with_other_names(model, ALL_ATTENTION_FUNCTIONS=OwnAttention())


def with_other_names(model, **names):
    """Every attention layer finds these in the place of what its module has under these names."""
    for module in model.modules():
        if hasattr(module, "o_proj"):
            forward = type(module).forward
            while hasattr(forward, "__wrapped__"):
                forward = forward.__wrapped__
            known = {**forward.__globals__, **names}
            own = FunctionType(forward.__code__, known, None, forward.__defaults__, forward.__closure__)
            own.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(own, module)


def pairs_left_in_place(model):
    """Queries and keys are rotated in pairs of neighbours and stay in that order: the same scores."""

    def turned(x, cos, sin):
        cos, sin = (table[..., : table.shape[-1] // 2].unsqueeze(1) for table in (cos, sin))
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)

    def apply(query, key, cos, sin, **_):
        return turned(query, cos, sin), turned(key, cos, sin)

    with_other_names(model, apply_rotary_pos_emb_interleave=apply)


def turned_wrongly(model):
    """Only what is turned is wrong, and the attention behind it is not listened to."""
    own_attention(model)
    model.model.rotary_emb.inv_freq.mul_(1.01)


def fused_mlp(model):
    for layer in model.model.layers:

        def forward(hidden, mlp=layer.mlp):
            both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            gate, up = torch.nn.functional.linear(hidden, both).chunk(2, -1)
            return mlp.down_proj(torch.nn.functional.silu(gate) * up)

        layer.mlp.forward = forward


def fused_but_for_the_activation(model):
    for layer in model.model.layers:

        def forward(hidden, mlp=layer.mlp):
            both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            gate, up = torch.nn.functional.linear(hidden, both).chunk(2, -1)
            return mlp.down_proj(mlp.act_fn(gate) * up)

        layer.mlp.forward = forward


def mlp_in_parts(model):
    for layer in model.model.layers:

        def forward(hidden, original=layer.mlp.forward):
            return torch.cat([original(part) for part in hidden.split(5, dim=1)], dim=1)

        layer.mlp.forward = forward


HARMLESS = [
    ("deepseek_v3", pairs_left_in_place),
    ("llama", mlp_in_parts),
    ("llama", own_attention), ("granite", fused_mlp), ("llama", fused_but_for_the_activation), ("gemma3", None), ("granite", None),
    ("qwen2_moe", None), ("opt", None), ("granite", own_attention), ("llama", fused_mlp),
]  # fmt: skip


@pytest.mark.parametrize("dtype", rest_slow(["fp32", "bf16"]))
@pytest.mark.parametrize(("name", "plant"), rest_slow(HARMLESS, 2))
def test_code_that_computes_the_same_is_no_fault(traces, name, plant, dtype):
    found = locate_operators(
        traces(name), arm=f"dtype={dtype}", against=f"dtype={dtype}", patch="none", prepare_against=plant
    )
    assert found.first is None
    assert max(each.ratio for each in found.operators) > 0.005


def test_attention_that_is_not_listened_to_is_judged_with_what_turns_its_queries(traces):
    found = locate_operators(traces("llama"), against="dtype=fp32", patch="none", prepare_against=turned_wrongly)
    assert (found.first.side, found.first.operator) == ("b", "model.rotary_emb")
    wrong = {each.operator: each for each in found.operators if each.side == "b" and each.is_beyond}
    assert set(wrong) == {"model.rotary_emb"}  # what the attention makes of wrong tables is inherited


def test_a_tensor_of_another_version_is_named_with_it(traces):
    def stale(model):
        with torch.no_grad():
            model.model.layers[2].self_attn.k_norm.weight.add_(1e-3)

    found = locate_operators(traces("qwen3"), against="dtype=fp32", patch="none", prepare_against=stale)
    assert (found.first.why, found.first.operator, found.first.version) == (
        "weights", "model.layers.2.self_attn.k_norm", 1,
    )  # fmt: skip
    assert "version 1" in location_sentence(location(found))


def test_a_temperature_is_said_to_act_after_the_operators(traces):
    found = locate(traces("qwen3"), against="temperature=0.9")
    assert found.first is None
    assert "the mismatch arises after the logits (temperature, top-p or top-k)" in location_sentence(found)
    assert "more than any other" not in location_sentence(found)
    assert next_command(found) == "tim-trace diagnose RUN"


def test_all_weights_of_another_version_are_one_difference(traces):
    found = locate(traces("qwen3"), against="weights-version=1", patch="none")
    assert len(found.weights) > 1
    assert location_sentence(found).endswith(f"; {len(found.weights)} tensors are from version 1.")
    assert str(found).count("from version 1") == 1
    assert next_command(found) == "tim-trace diagnose RUN"


def test_a_kernel_is_proved_by_putting_it_in(traces):
    """Both in bfloat16, with another attention: all of the gap goes with it, and nothing with anything else."""
    found = locate(traces("llama"), arm="dtype=bf16", against="dtype=bf16,attention=math", sequences="random:9")
    removed = {(each.patch, each.taker): each.removed for each in found.patches}
    assert found.gap_rms > 0
    assert found.first is None
    for taker in ("a", "b"):
        assert removed["attention", taker] == removed["all operators", taker] == 1
        assert removed["gate_proj", taker] == 0
    assert "Computing attention in b as a does" in location_sentence(found)
    low = {each.patch: each.removed_low for each in found.patches}
    assert low["attention"] is None or low["attention"] == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [3, 64, 1000])
def test_bounds_hold_for_random_products_and_are_not_empty(dtype, length):
    torch.manual_seed(length)
    for scale in (1e-3, 1.0, 1e3):
        module = torch.nn.Linear(length, 40, bias=False, dtype=dtype)
        x = torch.randn(30, length).mul(scale).to(dtype)
        exact_module = torch.nn.Linear(length, 40, bias=False, dtype=torch.float64)
        exact_module.load_state_dict(module.state_dict())
        exact = exact_module(x.double())
        rounding = Rounding(given=dtype, taken=dtype, weight=dtype, recorded=dtype)
        bound = bounds.of_module(exact_module, (x.double(),), exact, 0, rounding)
        ratio = ((module(x).double() - exact).abs() / bound).max()
        assert 1e-3 < ratio < 1


@torch.no_grad()
def test_the_bound_holds_for_numbers_below_the_range_of_float16():
    torch.manual_seed(0)
    table = torch.nn.Embedding(40, 32)
    table.weight.data.mul_(1e-5)
    table.embed_scale = 64.0
    ids = torch.arange(40)
    exact = table.weight.data.double() * 64
    given = table.weight.data.half() * 64
    rounding = bounds.Rounding(given=given.dtype, taken=ids.dtype, weight=torch.float16, recorded=torch.float32)
    bound = bounds.of_module(table, (ids,), exact, 0, rounding)
    assert ((given.double() - exact).abs() / bound).max() < 1
    linear = torch.nn.Linear(32, 40, bias=False)
    linear.weight.data.copy_(table.weight.data)
    x = 100 * torch.randn(30, 32)
    exact = x.half().double() @ linear.weight.data.double().T
    given = (x.half().double() @ linear.weight.data.half().double().T).half()
    rounding = bounds.Rounding(given=given.dtype, taken=torch.float16, weight=torch.float16, recorded=torch.float32)
    bound = bounds.of_module(linear, (x.half().double(),), exact, 0, rounding)
    assert ((given.double() - exact).abs() / bound).max() < 1


@torch.no_grad()
def test_the_bound_of_a_norm_that_adds_first_holds_where_its_kernel_does_not_round_the_sum():
    """As vLLM's on a CPU; of a number much larger than the others, as hidden states have, the length's rounding is its."""
    torch.manual_seed(0)
    norm = Qwen3RMSNorm(64, eps=1e-6).bfloat16()
    norm.weight.data = torch.rand(64).add(0.5).bfloat16()
    exact_norm = Qwen3RMSNorm(64, eps=1e-6).double()
    exact_norm.load_state_dict(norm.state_dict())
    x, residual = torch.randn(2, 4000, 64).bfloat16()
    residual[:, 0] *= 300
    whole = x.float() + residual.float()
    scale = torch.rsqrt(whole.square().mean(-1, keepdim=True) + 1e-6)
    given = ((whole * scale).bfloat16() * norm.weight).double()
    taken = whole.bfloat16().double()
    exact = taken * torch.rsqrt(taken.square().mean(-1, keepdim=True) + 1e-6) * exact_norm.weight
    ratios = {}
    for adds in (False, True):
        rounding = Rounding(
            given=torch.bfloat16, taken=torch.bfloat16, weight=torch.bfloat16, recorded=torch.bfloat16, adds=adds
        )
        bound = bounds.of_module(exact_norm, (taken,), exact, 0, rounding)
        ratios[adds] = float(((given - exact).abs() / bound).max())
    assert ratios[False] > 1
    assert 0.3 < ratios[True] < 1


@pytest.mark.parametrize("shift", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("length", [8, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_the_bound_of_a_layer_norm_allows_what_each_of_its_steps_rounds(dtype, length, shift):
    """Where the mean is large beside the spread, its own rounding is most of it."""
    torch.manual_seed(length)
    norm = torch.nn.LayerNorm(length).double()
    for parameter in norm.parameters():
        parameter.copy_(torch.randn(length).div(2).add(parameter).to(dtype))
    x = torch.randn(400, length).add(shift).to(dtype)
    centred = x - x.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.var(-1, unbiased=False, keepdim=True) + norm.eps)
    given = normed * norm.weight.to(dtype) + norm.bias.to(dtype)
    exact = norm(x.double())
    rounding = Rounding(given=dtype, taken=dtype, weight=dtype, recorded=dtype)
    bound = bounds.of_module(norm, (x.double(),), exact, 0, rounding)
    assert 0.3 < ((given.double() - exact).abs() / bound).max() < 1


class RmsNorm(torch.nn.Module):
    def __init__(self, length):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(length).div(2).add(1))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight.to(x.dtype)


@pytest.mark.parametrize("length", [64, 1000])
@torch.no_grad()
def test_the_bound_of_other_code_of_an_rms_norm_allows_what_each_of_its_steps_rounds(length):
    """transformers' own computes in float32 and rounds twice."""
    torch.manual_seed(length)
    norm, x = RmsNorm(length).bfloat16(), torch.randn(4000, length).bfloat16()
    given, exact = norm(x).double(), norm.double()(x.double())
    rounding = Rounding(given=torch.bfloat16, taken=torch.bfloat16, weight=torch.bfloat16, recorded=torch.bfloat16)
    own, other = (
        float(
            (
                (given - exact).abs()
                / bounds.of_module(norm, (x.double(),), exact, 0, rounding, is_other_code=is_other)
            ).max()
        )
        for is_other in (False, True)
    )
    assert own > 1
    assert 0.2 < other < 1


@torch.no_grad()
def test_the_bound_of_a_norm_allows_numbers_below_the_range_of_float16():
    """Rounded once before the weight, and once behind it."""
    torch.manual_seed(0)
    norm, x = RmsNorm(64).half(), torch.randn(4000, 64)
    x[:, ::2] *= 1e-5
    x = x.half()
    normed = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).half()
    given, exact = (norm.weight * normed).double(), norm.double()(x.double())
    rounding = Rounding(given=torch.float16, taken=torch.float16, weight=torch.float16, recorded=torch.float16)
    assert 0.3 < ((given - exact).abs() / bounds.of_module(norm, (x.double(),), exact, 0, rounding)).max() < 1


def test_operators_in_float32_are_put_into_a_model_in_float64(traces):
    found = locate(traces("llama"), arm="dtype=fp32", against="dtype=fp64", sequences="s2")
    assert {each.taker for each in found.patches} == {"a", "b"}


def test_layers_and_sequences_can_be_chosen(traces):
    found = locate(traces("llama"), arm="dtype=bf16", sequences="s2,s4", layers="1")
    assert {each.layer for each in found.operators} == {None, 1}
    assert found.num_sequences == 2
    assert found.no_interval == "fewer than 8 groups"
    assert {each.patch for each in found.patches} >= {"q_proj", "attention", "all operators"}


def test_operators_are_chosen_by_words_of_their_names_and_keep_their_figures(traces):
    everything = locate(traces("llama"), arm="dtype=bf16", sequences="s2", patch="none", keep=False)
    words = "self_attn.q_proj, rotary,lm_head"
    found = locate(traces("llama"), arm="dtype=bf16", sequences="s2", operators=words, layers="1")
    asked = {"model.layers.1.self_attn.q_proj", "layers.1.rotary.q", "layers.1.rotary.k", "lm_head"}
    assert {each.operator for each in found.operators if each.side == "a"} == asked
    whole = {(each.side, each.operator): each for each in everything.operators}
    for each in found.operators:
        assert replace(each, order=0) == replace(whole[each.side, each.operator], order=0)
    assert found.only == f"layers 1 and operators {words}"
    assert f"Limited to {found.only}." in location_text(found)
    assert {each.patch for each in found.patches} <= {"q_proj", "rotary", "lm_head", "all operators"}
    assert found.only in [each.found.only for each in read_results(Store(traces("llama")))[0]]
    assert not everything.only
    assert "looked at" not in location_text(everything)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"operators": "q_prj"}, InvalidOption, r"in these layers matches; use one of these kinds: .*q_proj.*"),
        ({"operators": "proj"}, InvalidOption, "in these layers matches"),
        ({"operators": "q_proj,"}, InvalidOption, "pass parts of operator names"),
        ({"against": "mode=decode"}, CannotReplay, "omit mode decode"),
        ({"sequences": "nobody"}, InvalidOption, "'nobody' is not a scored sequence of step 1"),
        ({"steps": "7"}, InvalidOption, "matches no recorded step"),
        ({"layers": "a"}, InvalidOption, "pass a layer, or FIRST:LAST"),
        ({"patch": "some"}, InvalidOption, "use kinds or none"),
    ],
)
def test_what_cannot_be_done_is_said(traces, options, error, message):
    with pytest.raises(error, match=message):
        locate(traces("llama"), **options)


@pytest.mark.slow
def test_the_command_says_where_and_ends_with_1(traces, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import transformers\n\n\n"
        "def build(*, config, dtype, attention):\n"
        "    made = transformers.LlamaConfig.from_dict(config, attn_implementation=attention)\n"
        "    model = transformers.LlamaForCausalLM(made)\n"
        "    model.model.layers[1].self_attn.scaling *= 1.5\n"
        "    return model\n"
    )
    command = [
        sys.executable,
        "-m",
        "tim_trace",
        "locate",
        str(traces("llama")),
        "--against",
        "dtype=bf16",
        "--patch",
        "none",
    ]
    ended = subprocess.run([*command, "--against-factory", "mine:build"], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.startswith("The first divergence is model.layers.1.self_attn.attention in b (bf16)")
    assert "next: tim-trace replay" in ended.stderr
    plain = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True)
    assert plain.returncode == 0, plain.stderr
    assert json.loads(plain.stdout)["first"] is None


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    "config", [None, {"bf16": True}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "temperature": 0.7}]
)  # fmt: skip
def test_of_what_trl_recorded_nothing_but_rounding_is_found(config):
    trace = train(config=config, capture="logprobs").trace
    found = locate(trace)
    assert found.first is None
    assert found.gap_rms > 0
    assert found.explained == pytest.approx(1, abs=0.05)
    assert {each.patch for each in found.patches} >= {"attention", "all operators"}
