"""Find the smallest module, the fewest tokens, and the simplest weights and inputs that make two executions differ.

Shapes: T tokens per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from ..locate.judged import OF_CODE
from ..locate.names import layer_modules
from ..locate.taps import hooked, outputs_of, tensors_of, with_tensors

SEED = 0
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256)
"""Lengths to try (tokens), before the whole row."""
_LARGE = 1e4
"""Minimum magnitude of a number that counts as part of a mask."""
_ROUNDINGS = 4.0
"""Rounding explains errors up to this multiple of the reference's error. The script has the same rule."""
_TINY = 1e-300
_CALLS = 2
"""Number of calls to try per module. A rotary embedding is called for full and for sliding attention."""
_ROWS = 4
"""Rows to keep of a projection's recorded weights."""


@dataclass(frozen=True, slots=True)
class Scope:
    """A module that exists in both executions, or the whole model."""

    path: str
    """Module name, or an empty string for the whole model."""
    num_layers: int | None
    """Number of layers that the whole model keeps. None for a single module."""
    a: Any
    """Model of the reference execution."""
    b: Any
    """Model of the execution that diverges."""

    def module(self, model: Any) -> Any:
        return model.get_submodule(self.path)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Within the block, both models keep only their first `num_layers` layers, and the reference's experts run in
        eager mode, which supports float64."""
        with ExitStack() as stack:

            def put(owner: Any, name: str, value: Any) -> None:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)

            for model in (self.a, self.b) if self.num_layers is not None else ():
                parent, _, attribute = next(iter(layer_modules(model))).rpartition(".")[0].rpartition(".")
                owner = model.get_submodule(parent)
                put(owner, attribute, getattr(owner, attribute)[: self.num_layers])
                for config in (model.config, owner.config):
                    put(config, "num_hidden_layers", self.num_layers)
            if getattr(getattr(self.a, "config", None), "_experts_implementation", None) is not None:
                put(self.a.config, "_experts_implementation", "eager")
            yield

    def call(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = module(*args, **kwargs)
        return given if self.path else given.logits.log_softmax(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Source code for one side of a script."""

    setup: Sequence[str] = ()
    body: Sequence[str]
    """Lines of a function of `w` (weights by name) and `x0`, `x1`, ... (inputs)."""
    dtype: Any
    """Dtype in which the code computes."""
    built: str = ""
    """Variable of the transformers module that `setup` builds, or empty if it builds none."""


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
    """True if `weights` (except buffers) are random numbers from `SEED`, drawn in order after the inputs."""
    random_inputs: tuple[bool, ...]
    """For each input tensor, True if it contains random numbers from `SEED`."""
    output: int | None = None
    """Index of the differing tensor among the outputs, or None if there is only one."""
    part: Code | None = None
    """The suspect's source, if the suspect is not a transformers model."""

    @property
    def inputs(self) -> list[Any]:
        return tensors_of(self.args, self.kwargs)


def differences(a: Any, b: Any, operator: str, row_T: Any, token: int) -> Iterator[Difference]:
    """Yield differences between two models at an operator from `locate`, smallest module first. `token` is the index of
    the token with the largest error. The models stay shortened until the next difference is requested."""
    for scope in _scopes(a, b, operator):
        with scope.cut():
            is_found = False
            for found in _Search(scope, row_T, token).found():
                is_found = True
                yield found
            if is_found and scope.num_layers is not None:
                return  # more layers only make the script longer


def _scopes(a: Any, b: Any, operator: str) -> Iterator[Scope]:
    """Yield modules that contain the operator, smallest first, then the whole model cut to 0, 1, ... layers."""
    layers, modules, others = layer_modules(a), dict(a.named_modules()), dict(b.named_modules())
    parts = operator.partition("#")[0].split(".")
    if operator == "embedding":
        path = next((name for name, each in modules.items() if each is a.get_input_embeddings()), "")
    else:
        starts = [".".join(parts[:number]) for number in range(len(parts), 0, -1)]
        names = sorted(modules, key=len)
        path = next((name for start in starts for name in names if f".{name}".endswith(f".{start}")), "")
    paths = [name for name in modules if path and name.rpartition(".")[0] == path and any(modules[name].children())]
    while path and not any(name.startswith(f"{path}.") for name in layers):
        paths.append(path)
        path = path.rpartition(".")[0]
    yield from (Scope(path, None, a, b) for path in paths if path in others)
    yield from (Scope("", number, a, b) for number in range(len(layers) + 1))


@contextmanager
def holding(module: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Within the block, set a module's parameters and buffers to `values`."""
    named = state(module)
    before = {name: named[name].data for name in values if name in named}
    try:
        for name, data in before.items():
            named[name].data = values[name].to(data.device, data.dtype)
        yield
    finally:
        for name, data in before.items():
            named[name].data = data


def state(module: Any) -> dict[str, Any]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class _Search:
    def __init__(self, scope: Scope, row_T: Any, token: int):
        self._scope, self._row_T, self._token = scope, row_T, token
        self._a, self._b = scope.module(scope.a), scope.module(scope.b)
        self._exact = deepcopy(self._a).double()
        self._weights = {name: value.detach().clone() for name, value in state(self._a).items()}
        self._shapes = {name: tuple(value.shape) for name, value in self._a.named_parameters()}
        self._own = {
            name: value.detach().clone()
            for name, value in state(self._b).items()
            if (given := self._weights.get(name)) is None or not torch.equal(value.to(given), given)
        }

    def found(self) -> Iterator[Difference]:
        """Yield differences with random weights and inputs, then with recorded weights, then with both recorded."""
        are_parameters = any(name in self._own for name, _ in self._b.named_parameters())
        lengths = [*(each for each in _LENGTHS if each < len(self._row_T)), len(self._row_T)]
        rows = [self._row_T[max(self._token + 1 - length, 0) :][:length] for length in lengths]
        for random_weights, random_inputs in ((True, True), (False, True), (False, False)):
            if random_weights and (are_parameters or not self._shapes):
                continue
            tried = (self._tried(*each, random_weights, random_inputs) for each in product(rows, range(_CALLS)))
            if found := next((each for each in tried if each is not None), None):
                yield self._reduced(found)

    def _tried(self, ids_T: Any, call: int, random_weights: bool, random_inputs: bool) -> Difference | None:
        scope = self._scope
        with suppress(*OF_CODE), torch.random.fork_rng(devices=[]):  # the code may not run on these numbers
            args, kwargs = self._calls_of(ids_T)[call]
            inputs = tensors_of(args, kwargs)
            # Only tensor arguments are randomised. Rotary tables are passed as a tuple, so they keep their values.
            arguments = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            plain = [id(each) for each in arguments if each.is_floating_point() and each.abs().max() < _LARGE]
            are_random = tuple(random_inputs and (not scope.path or id(each) in plain) for each in inputs)
            if random_inputs and not any(are_random):
                return None
            torch.manual_seed(SEED)  # the script draws in the same order
            for i, each in enumerate(inputs):
                if are_random[i]:
                    is_float = each.is_floating_point()
                    drawn = torch.randn(each.shape) if is_float else torch.randint(num_ids(scope.a), each.shape)
                    inputs[i] = drawn.to(each)
            shapes = self._shapes if random_weights else {}
            weights = {name: torch.randn(shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}
            args, kwargs = with_tensors(args, kwargs, inputs)
            return self._judged(
                Difference(
                    scope=scope, args=args, kwargs=kwargs, weights=self._weights | weights, own=self._own,
                    random_weights=random_weights, random_inputs=are_random,
                )
            )  # fmt: skip
        return None

    def _calls_of(self, ids_T: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Run a forward pass, and return the arguments of each call to the module."""
        words = {"input_ids": ids_T[None].to(next(self._a.parameters(), ids_T).device), "use_cache": False}
        if not self._scope.path:
            return [((), words)]
        calls: list[Any] = []

        def keep(_name: str, _module: Any, args: Any, kwargs: Any) -> None:
            kwargs = {name: value for name, value in kwargs.items() if name != "past_key_values"}
            calls.append(with_tensors(args, kwargs, [each.detach().clone() for each in tensors_of(args, kwargs)]))

        with hooked({"": self._a}, before=keep):
            self._scope.a(**words)
        return calls

    def _judged(self, found: Difference) -> Difference | None:
        """Return the difference with `output` set to the worst output, or None if rounding explains all errors."""
        values = []
        for module in (self._a, self._b, self._exact):
            dtype = dtype_of(module, found.inputs)
            inputs = [each.to(dtype) if each.is_floating_point() else each.clone() for each in found.inputs]
            with holding(module, found.weights | (found.own if module is self._b else {})):
                values.append(self._scope.call(module, *with_tensors(found.args, found.kwargs, inputs)))
        ratios = [_ratio(*each) for each in zip(*map(outputs_of, values), strict=False)]
        best = max(range(len(ratios)), key=ratios.__getitem__)
        if ratios[best] <= 1.0:
            return None
        return replace(found, output=None if isinstance(values[0], torch.Tensor) else best)

    def _reduced(self, found: Difference) -> Difference:
        """Reduce recorded weights to a few rows of a projection, the used rows of an embedding, or fewer digits."""
        inputs, choices = found.inputs, list[Any]([None])
        if isinstance(self._a, torch.nn.Linear):
            choices = [*torch.arange(len(self._a.weight)).split(_ROWS)]
        elif isinstance(self._a, torch.nn.Embedding):
            choices[0], inputs[0] = inputs[0].unique(return_inverse=True)
        args, kwargs = with_tensors(found.args, found.kwargs, inputs)
        for rows in choices if not found.random_weights else ():
            weights, own = ({name: _less(each, rows) for name, each in of.items()} for of in (found.weights, found.own))
            with suppress(*OF_CODE):
                if less := self._judged(replace(found, args=args, kwargs=kwargs, weights=weights, own=own)):
                    return less
        return found


def num_ids(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def dtype_of(module: Any, inputs: Sequence[Any]) -> Any:
    """Return the dtype in which a module computes."""
    values = (*module.parameters(), *module.buffers(), *inputs)
    return next((each.dtype for each in values if each.is_floating_point()), torch.float32)


def _less(value: Any, rows: Any) -> Any:
    if rows is not None:
        return value[rows] if value.dim() else value
    return value.bfloat16().to(value.dtype) if value.is_floating_point() else value


def _ratio(a: Any, b: Any, exact: Any) -> float:
    """Return the largest error of `b`, relative to the largest error that rounding explains."""
    unit = torch.finfo(b.dtype).eps / 2 if b.is_floating_point() else 0.0
    off, rounding, size = (float(each.abs().max()) for each in (b.double() - exact, a.double() - exact, exact.double()))
    return off / max(_ROUNDINGS * max(rounding, unit * size), _TINY)
