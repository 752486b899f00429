"""Records the inputs and outputs of a forward's operators, and the gradients that flow back through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .names import CallNames, core_name, layer_modules
from .taps import attention_around, hooked, operators, outputs_of, tensors_of, with_outputs, with_tensors

STREAM = "residual"
"""Suffix of a layer's name for the residual stream into it."""


@dataclass(slots=True)
class BackwardCall:
    """One call of an operator: its inputs and outputs, and their gradients."""

    takes: list[Any] = field(default_factory=list)
    gives: list[Any] = field(default_factory=list)
    passed: dict[int, Any] = field(default_factory=dict)
    """Input index -> the gradient that this call alone passed on to it."""
    came: dict[int, Any] = field(default_factory=dict)
    """Output index -> the gradient that reached it."""
    asks: list[bool] = field(default_factory=list)
    """True for each input that requires a gradient."""
    follows: list[bool] = field(default_factory=list)
    """True for each output that requires a gradient."""


class Visited:
    """A model whose operators and residual stream are visited during a forward."""

    def __init__(self, model: Any):
        self.modules = operators(model, adapters_apart=True)
        self._layers = {f"{name}.{STREAM}": module for name, module in layer_modules(model).items()}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._calls = CallNames()
        self.is_on = True
        """Off in the backward, where gradient checkpoints run operators again."""

    def takes(self, name: str, values: list[Any]) -> list[Any]:
        """Return the tensors to use as inputs of an operator's call."""
        raise NotImplementedError

    def gives(self, name: str, more: Any, values: list[Any]) -> list[Any]:
        """Return the tensors to use as outputs of an operator; `more` are a core's weights and scaling, else None."""
        raise NotImplementedError

    def enters(self, name: str, value: Any) -> Any:
        """Return the tensor to use as the residual stream into a layer."""
        raise NotImplementedError

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Visit the forwards in this context."""
        with (
            hooked(self.modules, self._before, self._after),
            hooked(self._layers, self._into),
            attention_around(self._core),
        ):
            yield

    def _before(self, name: str, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_on:
            return None
        return with_tensors(args, kwargs, self.takes(self._calls.next(name), tensors_of(args, kwargs)))

    def _after(self, name: str, _module: Any, _args: Any, _kwargs: Any, given: Any) -> Any:
        return (
            with_outputs(given, self.gives(self._calls.present(name), None, outputs_of(given))) if self.is_on else None
        )

    def _into(self, name: str, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_on:
            return None
        if args:
            return (self.enters(name, args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self.enters(name, kwargs["hidden_states"])}

    def _core(self, module: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_on or id(module) not in self._names:
            return original(module, *args, **kwargs)
        call = self._calls.next(core_name(self._names[id(module)]))
        states = self.takes(call, list(args[:3]))
        given = original(module, *states, *args[3:], **kwargs)
        more = given[1], kwargs.get("scaling") or states[0].shape[-1] ** -0.5
        return (self.gives(call, more, [given[0]])[0], *given[1:])


class BackwardTaps(Visited):
    """Records a model's operators in one forward, and the gradients of its backward."""

    def __init__(self, model: Any):
        super().__init__(model)
        self.calls: dict[str, BackwardCall] = {}

    def takes(self, name: str, values: list[Any]) -> list[Any]:
        call = self.calls.setdefault(name, BackwardCall())
        call.takes = [value.detach().clone() for value in values]
        call.asks = [value.requires_grad for value in values]
        return [_alias(value, call.passed, slot) for slot, value in enumerate(values)]

    def gives(self, name: str, more: Any, values: list[Any]) -> list[Any]:
        call = self.calls[name]
        call.gives = [value.detach().clone() for value in values]
        call.follows = [value.requires_grad for value in values]
        return [_alias(value, call.came, slot) for slot, value in enumerate(values)]

    def enters(self, name: str, value: Any) -> Any:
        return self.takes(name, [value])[0]


def _alias(value: Any, kept: dict[int, Any], slot: int) -> Any:
    """Return a view of a tensor whose gradient is recorded separately."""
    if not value.requires_grad:
        return value
    alias = value.view_as(value)

    def keep(gradient: Any) -> None:
        kept[slot] = gradient.detach().clone()

    alias.register_hook(keep)
    return alias
