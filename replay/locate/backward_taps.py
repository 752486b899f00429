"""The tensors that the operators of a forward took and gave, and the gradients that came back through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .names import CallNames, core_name, layer_modules
from .taps import attention_around, hooked, operators, outputs_of, tensors_of, with_outputs, with_tensors

STREAM = "residual"
"""Appended to a layer's name for the residual stream into it."""


@dataclass(slots=True)
class BackwardCall:
    """One call of an operator: its tensors, and the gradient of each; None if none came."""

    takes: list[Any] = field(default_factory=list)
    gives: list[Any] = field(default_factory=list)
    passed: dict[int, Any] = field(default_factory=dict)
    """Slot of an input -> the gradient that this call alone passed on to it."""
    came: dict[int, Any] = field(default_factory=dict)
    """Slot of an output -> the gradient that came back to it."""
    asks: list[bool] = field(default_factory=list)
    """By input: whether autograd asks for its gradient."""
    follows: list[bool] = field(default_factory=list)
    """By output: whether autograd follows it."""


class Visited:
    """A model whose operators and residual stream are visited as a forward comes to them."""

    def __init__(self, model: Any):
        self.modules = operators(model, adapters_apart=True)
        self._layers = {f"{name}.{STREAM}": module for name, module in layer_modules(model).items()}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._calls = CallNames()
        self.is_on = True
        """Off in the backward, where gradient checkpoints run operators again."""

    def takes(self, name: str, values: list[Any]) -> list[Any]:
        """Return what an operator's call takes in the place of its inputs."""
        raise NotImplementedError

    def gives(self, name: str, more: Any, values: list[Any]) -> list[Any]:
        """Return what goes on in the place of an operator's outputs; `more` are an attention core's weights and scaling, else None."""
        raise NotImplementedError

    def enters(self, name: str, value: Any) -> Any:
        """Return what goes on in the place of the residual stream into a layer."""
        raise NotImplementedError

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Visit the forwards within."""
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
    """Keeps what a model's operators took and gave in one forward, and the gradients of its backward."""

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
    """The same numbers in a tensor of their own, whose gradient is kept."""
    if not value.requires_grad:
        return value
    alias = value.view_as(value)

    def keep(gradient: Any) -> None:
        kept[slot] = gradient.detach().clone()

    alias.register_hook(keep)
    return alias
