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
def trace(tmp_path_factory):
    return recorded_once(tmp_path_factory)("llama")


def located(trace, plant, **options):
    return locate(
        trace, arm="dtype=fp32", against="dtype=fp32", sequences="s0,s4", prepare_against=plant, **{"patch": "none", **options}
    )  # fmt: skip


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
        f"b model.layers.{layer}.mlp.down_proj": "takes 2 tensors where the recorded model's takes 1" for layer in range(3)
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
        CannotReplay, match=r"b \(fp32\): the code of this side ended with KeyError: 'states'; run it by itself"
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
    assert {each.name for each in found.patches} >= {"down_proj", "attention"}


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        (torch.nn.Linear(2, 2), "base_model, no get_input_embeddings, no get_output_embeddings, no a config of transformers"),
        (
            SimpleNamespace(base_model=1, get_input_embeddings=1, get_output_embeddings=lambda: None, config=None),
            "a module that gives logits, no a config of transformers",
        ),
    ],
)  # fmt: skip
def test_a_model_of_another_form_is_refused_with_what_it_lacks(model, missing):
    with pytest.raises(CannotReplay, match=rf"it has no {missing}; .* tim-trace locate --from-dumps"):
        _check_form(model)
