"""Code of forms that transformers does not have is judged like any other, or named; it never ends the command with a traceback."""

from dataclasses import dataclass
from types import MethodType, SimpleNamespace

import pytest
import torch
from located_runs import recorded_once
from shared import rest_slow
from tim_trace.replay.locate.engine import _check_form, locate
from tim_trace.schemas.errors import CannotReplay


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return recorded_once(tmp_path_factory)


@pytest.fixture(scope="module")
def trace(traces):
    return traces("llama")


def located(trace, plant, **options):
    usual = {"arm": "dtype=fp32", "against": "dtype=fp32", "patch": "none"}
    return locate(trace, sequences="s0,s4", prepare_against=plant, **usual | options)


@dataclass(frozen=True)
class Projected:
    states: torch.Tensor
    extra: None = None


def swapped(module, forward):
    """The module computes with another forward, of the same weights."""
    module.forward = MethodType(forward, module)


def linear(module, hidden):
    return torch.nn.functional.linear(hidden, module.weight)


def of_mlps(model, forward):
    for layer in model.model.layers:
        swapped(layer.mlp, forward)


def gives_a_dict_of_keywords(model):
    for layer in model.model.layers:
        swapped(layer.mlp.up_proj, lambda self, *, states, mask=None: {"mask": mask, "states": linear(self, states)})
    of_mlps(model, lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(states=x)["states"]))


def gives_a_frozen_dataclass(model):
    for layer in model.model.layers:
        swapped(layer.mlp.up_proj, lambda self, x: Projected(linear(self, x)))
    of_mlps(model, lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).states))


def takes_a_list(model):
    for layer in model.model.layers:
        swapped(layer.mlp.down_proj, lambda self, parts: linear(self, parts[0] * parts[1]))
    of_mlps(model, lambda self, x: self.down_proj([self.act_fn(self.gate_proj(x)), self.up_proj(x)]))


def activates_in_place(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.SiLU(inplace=True)


def gives_nothing_beside_its_states(model):
    for layer in model.model.layers:
        swapped(layer.mlp.gate_proj, lambda self, x: (None, linear(self, x)))
    of_mlps(model, lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)[1]) * self.up_proj(x)))


class OfItsOwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(_context, hidden, weight):
        return hidden @ weight.mT

    @staticmethod
    def backward(_context, _gradient):
        raise NotImplementedError("no gradient")


def has_a_function_of_autograd(model):
    for layer in model.model.layers:
        swapped(layer.mlp.up_proj, lambda self, x: OfItsOwnGradient.apply(x, self.weight))


def calls_a_norm_twice(model):
    norm = model.model.layers[1].input_layernorm
    norm.register_forward_pre_hook(lambda module, args: (module.forward(*args), args)[1])
    swapped(model.model.layers[1].mlp, lambda self, x: (self.up_proj(x), type(self).forward(self, x))[1])


def knows_a_module_by_two_names(model):
    for layer in model.model.layers:
        layer.also = layer.mlp.up_proj


def has_its_weights_as_buffers(model):
    for layer in model.model.layers:
        weight = layer.input_layernorm.weight.detach()
        del layer.input_layernorm.weight
        layer.input_layernorm.register_buffer("weight", weight)


def has_layers_of_other_types(model):
    class OtherLayer(type(model.model.layers[1])):
        def forward(self, hidden_states, **rest):
            attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **rest)
            hidden_states = hidden_states + attended
            return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    model.model.layers[1].__class__ = OtherLayer


ODD = [
    gives_a_dict_of_keywords, activates_in_place, gives_a_frozen_dataclass, gives_nothing_beside_its_states,
    has_a_function_of_autograd, calls_a_norm_twice, knows_a_module_by_two_names, has_its_weights_as_buffers, has_layers_of_other_types,
]  # fmt: skip


@pytest.mark.parametrize("plant", rest_slow(ODD, 2), ids=lambda plant: plant.__name__)
def test_odd_code_that_computes_the_same_is_no_fault(trace, plant):
    found = located(trace, plant)
    assert found.first is None
    assert found.unjudged == {}


@pytest.mark.slow
@pytest.mark.parametrize("plant", ODD, ids=lambda plant: plant.__name__)
def test_a_fault_beside_odd_code_is_named(trace, plant):
    def with_fault(model):
        plant(model)
        down = model.model.layers[2].mlp.down_proj
        down.register_forward_hook(lambda _module, _args, given: given * 1.01)

    found = located(trace, with_fault)
    assert found.first.operator == "model.layers.2.mlp.down_proj"


def test_an_operator_that_takes_more_than_the_recorded_one_is_named_and_passed_over(trace):
    found = located(trace, takes_a_list)
    assert found.first is None
    assert found.unjudged == {
        f"b model.layers.{layer}.mlp.down_proj": "takes 2 tensors, but 1 in the recorded model" for layer in range(3)
    }  # fmt: skip


def knows_one_dtype(model):
    def forward(self, x):
        if x.dtype == torch.float64:
            raise ValueError("float32 alone")
        return linear(self, x)

    swapped(model.model.layers[1].mlp.up_proj, forward)


def test_code_that_does_not_run_in_float64_is_judged_by_its_rounding(trace):
    found = located(trace, knows_one_dtype)
    assert found.first is None
    assert found.unjudged == {"b in float64": "ValueError: float32 alone"}


def test_what_code_of_the_user_ends_with_is_said_with_its_side(trace):
    def fails(model):
        swapped(model.model.layers[1].mlp.up_proj, lambda self, x: {}["states"])

    with pytest.raises(
        CannotReplay, match=r"b \(fp32\): the user code raised KeyError: 'states'; check that it runs on its own"
    ):
        located(trace, fails)


def gives_two_projections(model):
    """Its result has no form that the recorded operator's could be put in the place of."""
    for layer in model.model.layers:
        swapped(layer.mlp.up_proj, lambda self, x: (x.flip(-1) @ self.weight.flip(-1).mT, x))
    of_mlps(model, lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)[0]))


@pytest.mark.slow
def test_a_patch_of_another_form_is_left_out_by_name(trace):
    found = located(trace, gives_two_projections, patch="kinds")
    assert found.first is None
    assert {"patch up_proj in a", "patch up_proj in b"} & set(found.unjudged)
    assert {each.patch for each in found.patches} >= {"down_proj", "attention"}


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        (torch.nn.Linear(2, 2), "base_model, no get_input_embeddings, no get_output_embeddings, no transformers config"),
        (
            SimpleNamespace(base_model=1, get_input_embeddings=1, get_output_embeddings=lambda: None, config=None),
            "module that computes logits, no transformers config",
        ),
    ],
)  # fmt: skip
def test_a_model_of_another_form_is_refused_with_what_it_lacks(model, missing):
    with pytest.raises(CannotReplay, match=rf"it has no {missing}, so .* derive it from"):
        _check_form(model)


class Projected2(torch.nn.Module):
    """A projection and a pair of small ones beside it, which add nothing."""

    def __init__(self, base, scale):
        super().__init__()
        self.base, self.down, self.up, self.scale = (
            base,
            torch.nn.Linear(48, 4),
            torch.nn.Linear(4, base.out_features),
            scale,
        )

    def forward(self, hidden):
        return self.base(hidden) * self.scale + 0.0 * self.up(self.down(hidden.float())).to(hidden.dtype)


def in_two_modules(model):
    attention = model.model.layers[1].self_attn
    attention.v_proj = Projected2(attention.v_proj, 1.0)


def in_two_modules_and_wrong(model):
    attention = model.model.layers[1].self_attn
    attention.v_proj = Projected2(attention.v_proj, 1.01)


def without_a_norm(model):
    model.model.layers[1].post_attention_layernorm = torch.nn.Identity()


def turned(states, cos, sin):
    first, second = states.chunk(2, -1)
    return states * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def attention_of_own_code(model, *, turn=turned, scale=1.0, layers=(0, 1, 2)):
    """Attention that calls no function of transformers, with queries that are scaled before the product."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **_):
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        query, key, value = (
            each(hidden_states).view(shape).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = turned(query, *position_embeddings), turn(key, *position_embeddings)
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
        scores = (query * self.scaling * scale) @ key.transpose(2, 3) + attention_mask[..., : key.shape[2]]
        return self.o_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2)), None

    for layer in layers:
        swapped(model.model.layers[layer].self_attn, forward)


def keys_turned_back(model):
    attention_of_own_code(model, turn=lambda states, cos, sin: turned(states, cos, -sin), layers=(1,))


def scores_of_another_scale(model):
    attention_of_own_code(model, scale=1.1, layers=(1,))


def keys_turned_a_little(model):
    """Less than rounding in bfloat16 covers."""
    attention_of_own_code(model, turn=lambda states, cos, sin: turned(states, *angled(cos, sin, 0.002)), layers=(1,))


def angled(cos, sin, angle):
    by = torch.tensor(angle, dtype=cos.dtype)
    return cos * by.cos() - sin * by.sin(), sin * by.cos() + cos * by.sin()


def scale_in_a_projection(model):
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(4.0)
        layer.self_attn.scaling /= 4.0


def other_columns(model, *, count):
    """A head that is filled up to more rows, which count in the log-softmax, or are cut off behind it."""
    head = torch.nn.Linear(48, 256, bias=False).to(model.lm_head.weight.dtype)
    head.weight.data.zero_()
    head.weight.data[:200] = model.lm_head.weight.data
    model.lm_head = head
    if not count:
        model.register_forward_hook(lambda _module, _args, given: given.__setitem__("logits", given.logits[..., :200]))


def filled_up(model):
    other_columns(model, count=True)


def filled_up_and_cut(model):
    other_columns(model, count=False)


def mlp_in_bf16(model):
    """By functions, but for the activation."""

    def forward(self, x):
        gate, up = (
            torch.nn.functional.linear(x.bfloat16(), each.weight.bfloat16()) for each in (self.gate_proj, self.up_proj)
        )
        return torch.nn.functional.linear(self.act_fn(gate) * up, self.down_proj.weight.bfloat16()).to(x.dtype)

    swapped(model.model.layers[1].mlp, forward)


def gate_and_up_by_functions(model):
    def forward(self, x):
        gate, up = (torch.nn.functional.linear(x, weight) for weight in self.gate_up_proj.weight.chunk(2))
        return self.down_proj(gate / (1.0 + (-gate).exp()) * up)

    of_mlps(model, forward)


NAMED = [
    (mlp_in_bf16, "fp32", "model.layers.1.mlp.gate_proj"),
    (mlp_in_bf16, "bf16", "model.layers.1.mlp.gate_proj"),
    (without_a_norm, "fp32", "model.layers.1.post_attention_layernorm"),
    (in_two_modules_and_wrong, "fp32", "model.layers.1.self_attn.v_proj"),
    (keys_turned_back, "fp32", "layers.1.attention"),
    (keys_turned_a_little, "bf16", "layers.1.attention"),
    (scores_of_another_scale, "fp32", "layers.1.attention"),
    (filled_up, "fp32", "logits"),
]


@pytest.mark.parametrize(("plant", "dtype", "operator"), rest_slow(NAMED, 4))
def test_a_fault_in_other_modules_or_own_attention_is_named_by_the_recorded_operator(trace, plant, dtype, operator):
    found = located(trace, plant, arm=f"dtype={dtype}", against=f"dtype={dtype}")
    assert (found.first.side, found.first.operator) == ("b", operator)


def gelu_of_steps(model):
    for layer in model.gpt_neox.layers:
        layer.mlp.act = StepwiseGelu()


class StepwiseGelu(torch.nn.Module):
    def forward(self, x):
        return 0.5 * x * torch.erfc(-x / 2.0**0.5)


class Columns(torch.nn.Module):
    """A projection that keeps its weight under another name."""

    def __init__(self, linear):
        super().__init__()
        self.table = torch.nn.Parameter(linear.weight.detach().mT.clone())

    def forward(self, hidden):
        return hidden @ self.table


def by_columns(model):
    for layer in model.model.layers:
        layer.mlp.up_proj = Columns(layer.mlp.up_proj)


SAME = [
    ("llama", attention_of_own_code, "bf16"), ("llama", scale_in_a_projection, "fp32"), ("llama", in_two_modules, "bf16"),
    ("llama", filled_up_and_cut, "fp32"), ("gpt_neox", gelu_of_steps, "bf16"), ("llama", by_columns, "bf16"),
    ("phi3", gate_and_up_by_functions, "fp32"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plant", "dtype"), rest_slow(SAME, 3))
def test_other_modules_that_compute_the_same_are_no_fault(traces, name, plant, dtype):
    found = located(traces(name), plant, arm=f"dtype={dtype}", against=f"dtype={dtype}")
    assert found.first is None


def test_what_is_undone_further_on_is_told(trace):
    found = located(trace, scale_in_a_projection)
    assert found.first is None
    assert "has no effect" in found.unjudged["b model.layers.0.self_attn.q_proj"]
    assert {each.tensor for each in found.weights} == {
        f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(3)
    }
