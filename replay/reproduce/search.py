"""Find the smallest module, the fewest tokens and the simplest numbers on which two executions differ.

Shapes: T tokens in a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch

from ..locate.judged import OF_CODE
from ..locate.names import layer_modules
from ..locate.taps import outputs_of, tensors_of, with_tensors

SEED = 0
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256)
"""Lengths to try (tokens)."""
_LARGE = 1e4
"""Magnitude from which a number counts as part of a mask."""
_ROUNDINGS = 4.0
"""Difference beyond rounding, in multiples of a's own rounding error. The script uses the same rule."""
_ROWS = 4
_MANY_BYTES = 500_000
"""Size above which recorded weights are rounded to bfloat16, if the difference remains."""
_CALLS = 2
"""Number of a module's calls to try, e.g. a rotary embedding's for full and for sliding attention."""


@dataclass(frozen=True, slots=True)
class Scope:
    """A module that both executions have."""

    path: str
    """Module name, or an empty string for the whole model."""
    num_layers: int | None
    """Layers that the whole model keeps. None within a module."""
    a: Any
    """Model of the reference execution."""
    b: Any
    """Model of the execution that diverges."""

    def module(self, model: Any) -> Any:
        return model.get_submodule(self.path)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Within the block, both models keep only their first `num_layers` layers."""
        with ExitStack() as stack:
            for model in (self.a, self.b) if self.num_layers is not None else ():
                parent, _, attribute = next(iter(layer_modules(model))).rpartition(".")[0].rpartition(".")
                owner = model.get_submodule(parent)
                layers = getattr(owner, attribute)
                stack.callback(setattr, owner, attribute, layers)
                setattr(owner, attribute, layers[: self.num_layers])
                for config in (model.config, owner.config):
                    stack.callback(setattr, config, "num_hidden_layers", config.num_hidden_layers)
                    config.num_hidden_layers = self.num_layers
            yield

    def call(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        given = module(*args, **kwargs)
        return outputs_of(given) if self.path else [given.logits.log_softmax(-1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One computation on which the executions differ beyond rounding."""

    scope: Scope
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    weights: dict[str, Any]
    """The reference's parameters and buffers, by name within the module."""
    own: dict[str, Any]
    """The suspect's parameters and buffers that differ from the reference's."""
    random_weights: bool
    """True if `weights` are random numbers from `SEED` (in order), except buffers."""
    random_inputs: tuple[bool, ...]
    """For each input tensor, true if it holds random numbers from `SEED`, drawn after the weights."""
    output: int
    """Index of the differing tensor among the outputs."""

    @property
    def inputs(self) -> list[Any]:
        return tensors_of(self.args, self.kwargs)


def scopes(a: Any, b: Any, operator: str) -> Iterator[Scope]:
    """Yield modules that contain an operator of `locate`, from the smallest to the whole model with 0, 1, ... layers."""
    layers = layer_modules(a)
    every = {name for name, _ in a.named_modules()} & {name for name, _ in b.named_modules()}
    parts = operator.partition("#")[0].split(".")
    head = next((name for name, each in a.named_modules() if each is a.get_input_embeddings()), "")
    found = head if operator == "embedding" else next(
        (name for n in range(len(parts), 0, -1) for name in sorted(every, key=len)
         if f".{name}".endswith("." + ".".join(parts[:n]))), "",
    )  # fmt: skip
    for name, _ in layers.get(found, a).named_children() if found in layers else ():
        if any(True for _ in a.get_submodule(f"{found}.{name}").children()) and f"{found}.{name}" in every:
            yield Scope(f"{found}.{name}", None, a, b)  # attention and MLP, for a computation between their parts
    while found and not any(name.startswith(f"{found}.") for name in layers):
        if found in every:
            yield Scope(found, None, a, b)
        found = found.rpartition(".")[0]
    for number in range(len(layers) + 1):
        yield Scope("", number, a, b)


@contextmanager
def holding(module: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Within the block, replace the numbers in parameters and buffers."""
    named = dict(state(module))
    before = {name: named[name].data for name in values if name in named}
    try:
        for name, data in before.items():
            named[name].data = values[name].to(data.device, data.dtype)
        yield
    finally:
        for name, data in before.items():
            named[name].data = data


def bfloat16(value: Any) -> Any:
    """Return a floating-point tensor rounded to bfloat16, and others unchanged."""
    return value.to(torch.bfloat16) if value.is_floating_point() else value


def state(module: Any) -> Iterator[tuple[str, Any]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


class Search:
    def __init__(self, scope: Scope, row_T: Any, token: int):
        self._scope, self._row_T, self._token = scope, row_T, token
        self._a, self._b = scope.module(scope.a), scope.module(scope.b)
        self._weights = {name: value.detach().clone() for name, value in state(self._a)}
        self._shapes = {name: tuple(value.shape) for name, value in self._a.named_parameters()}
        self._own = {
            name: value.detach().clone()
            for name, value in state(self._b)
            if (given := self._weights.get(name)) is None or not torch.equal(value.to(given), given)
        }

    def _with_fewer_digits(self, found: Difference) -> Difference:
        size = sum(each.nbytes for each in (*found.weights.values(), *found.own.values()))
        if found.random_weights or size < _MANY_BYTES:
            return found
        weights, own = (
            {name: bfloat16(each).to(each.dtype) for name, each in held.items()} for held in (found.weights, found.own)
        )
        return self._judged(replace(found, weights=weights, own=own)) or found

    @cached_property
    def _exact(self) -> Any:
        exact = deepcopy(self._a).double()
        for module in exact.modules():
            if getattr(getattr(module, "config", None), "_experts_implementation", None) is not None:
                module.config._experts_implementation = "eager"  # other kernels do not support float64
        return exact

    def smallest(self) -> Iterator[Difference]:
        """Yield differences, the simplest kind of numbers first."""
        are_parameters = any(name in self._own for name, _ in self._b.named_parameters())
        for random_weights, random_inputs, row in (
            (True, True, False), (True, False, False), (False, True, False), (False, False, False), (False, False, True),
        ):  # fmt: skip
            if random_weights and (are_parameters or not self._shapes):
                continue
            if not self._scope.path and random_inputs == row:
                continue  # token ids are the only inputs
            rows = product(self._rows() if row else self._random_rows(), range(_CALLS if self._scope.path else 1))
            tried = (self._difference(ids_T, random_weights, random_inputs, number) for ids_T, number in rows)
            found = next((each for each in tried if each is not None), None)
            if found is not None:
                yield self._reduced(found)

    def _random_rows(self) -> Iterator[Any]:
        size, most = num_ids(self._scope.a), len(self._row_T)
        draw = torch.Generator().manual_seed(SEED)
        ids_T = torch.randint(size, (most,), generator=draw)
        yield from (ids_T[:length] for length in (*(each for each in _LENGTHS if each < most), most))

    def _rows(self) -> Iterator[Any]:
        token = self._token
        yield self._row_T[token : token + 1]
        for length in (*(each for each in _LENGTHS if each <= token), token + 1):
            yield self._row_T[token + 1 - length : token + 1]
        yield self._row_T

    def _difference(self, ids_T: Any, random_weights: bool, random_inputs: bool, number: int) -> Difference | None:
        scope = self._scope
        try:
            with scope.cut(), torch.random.fork_rng(devices=[]):
                args, kwargs = self._calls_of(ids_T)[number]
                inputs = tensors_of(args, kwargs)
                alone = [id(each) for each in (*args, *kwargs.values())]  # not the tables of a rotary embedding, a pair
                are_random = tuple(
                    random_inputs and (not scope.path or (id(each) in alone and _is_plain(each))) for each in inputs
                )
                if random_inputs and not any(are_random):
                    return None
                torch.manual_seed(SEED)  # the script draws in the same order
                shapes = self._shapes if random_weights else {}
                weights = {name: torch.randn(shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}
                inputs = [_drawn(each, scope.a) if own else each for each, own in zip(inputs, are_random, strict=True)]
                args, kwargs = with_tensors(args, kwargs, inputs)
                found = Difference(
                    scope=scope, args=args, kwargs=kwargs, weights=self._weights | weights, own=self._own,
                    random_weights=random_weights, random_inputs=are_random, output=0,
                )  # fmt: skip
                return self._judged(found)
        except OF_CODE:  # code that does not run on these numbers
            return None

    def _calls_of(self, ids_T: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the arguments of each of the module's calls in one forward pass."""
        words = {"input_ids": ids_T[None].to(next(self._a.parameters(), ids_T).device), "use_cache": False}
        if not self._scope.path:
            return [((), words)]
        calls: list[Any] = []

        def keep(_module: Any, args: Any, kwargs: Any) -> None:
            kwargs = {name: value for name, value in kwargs.items() if name != "past_key_values"}
            calls.append(with_tensors(args, kwargs, [each.detach().clone() for each in tensors_of(args, kwargs)]))

        with ExitStack() as stack:
            stack.callback(self._a.register_forward_pre_hook(keep, with_kwargs=True).remove)
            self._scope.a(**words)
        return calls

    def _judged(self, found: Difference) -> Difference | None:
        """Return the difference with the output that differs most, or None if rounding can explain all."""
        values = []
        for module in (self._a, self._b, self._exact):
            dtype = dtype_of(module, found.inputs)
            inputs = [each.to(dtype) if each.is_floating_point() else each.clone() for each in found.inputs]
            own = found.own if module is self._b else {}
            with holding(module, found.weights | own):
                values.append(self._scope.call(module, *with_tensors(found.args, found.kwargs, inputs)))
        ratios = [_ratio(*each) for each in zip(*values, strict=False)]
        best = max(range(len(ratios)), key=ratios.__getitem__)
        return replace(found, output=best) if ratios[best] > 1.0 else None

    def _reduced(self, found: Difference) -> Difference:
        """Keep only the used rows of an embedding, or some rows of a projection, and fewer digits of many weights."""
        weight = found.weights.get("weight", found.own.get("weight"))
        if found.random_weights or not isinstance(self._a, torch.nn.Linear | torch.nn.Embedding) or weight is None:
            return self._with_fewer_digits(found)
        inputs = found.inputs
        if not inputs[0].is_floating_point():
            rows, inputs[0] = inputs[0].unique(return_inverse=True)
            choices = [rows]
        else:
            choices = [torch.arange(start, start + _ROWS) for start in range(0, len(weight), _ROWS)]
        args, kwargs = with_tensors(found.args, found.kwargs, inputs)
        for rows in choices:
            cut = [
                {name: value[rows] if value.shape[:1] == weight.shape[:1] else value for name, value in held.items()}
                for held in (found.weights, found.own)
            ]
            new = replace(found, args=args, kwargs=kwargs, weights=cut[0], own=cut[1])
            try:
                if (shown := self._judged(new)) is not None:
                    return shown
            except OF_CODE:
                break
        return found


def num_ids(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def dtype_of(module: Any, inputs: Sequence[Any]) -> Any:
    """Return the dtype in which a module computes."""
    values = (*module.parameters(), *module.buffers(), *inputs)
    return next((each.dtype for each in values if each.is_floating_point()), torch.float32)


def _drawn(value: Any, model: Any) -> Any:
    shape = tuple(value.shape)
    return (torch.randn(shape) if value.is_floating_point() else torch.randint(num_ids(model), shape)).to(value)


def _is_plain(value: Any) -> bool:
    """Return True if random numbers can replace a tensor: it holds numbers, not a mask."""
    return bool(value.is_floating_point() and value.dim() > 1 and value.isfinite().all() and value.abs().max() < _LARGE)


def _ratio(a: Any, b: Any, exact: Any) -> float:
    """Return the largest difference relative to what rounding explains, or inf if b is not finite."""
    unit = torch.finfo(b.dtype).eps / 2 if b.is_floating_point() else 0.0
    a, b, exact = (each.double() for each in (a, b, exact))
    if a.shape != b.shape:
        return 0.0
    bound = _ROUNDINGS * max(float((a - exact).abs().max()), unit * float(exact.abs().max()))
    off = float((b - exact).abs().max())
    return off / bound if bound else float("inf") if off else 0.0
