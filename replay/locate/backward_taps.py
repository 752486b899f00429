"""What the operators of a forward took and gave, and the gradients that came back through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from .names import core_name, layer_of
from .taps import attention_around, operators, outputs_of, tensors_of, with_outputs, with_tensors

STREAM = "residual"
"""What is appended to a layer's name for the residual stream that comes into it."""


@dataclass(slots=True)
class BackwardCall:
    """One call of an operator: tensors as they passed, and the gradients of each; None where none came."""

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


def layer_modules(model: Any) -> dict[str, Any]:
    """Name of the residual stream -> the layer that it comes into."""
    found = {}
    for name, module in model.named_modules():
        if layer_of(name) is not None and name.rpartition(".")[2].isdigit() and any(True for _ in module.children()):
            parent = name.rpartition(".")[0]
            if layer_of(parent) is None:
                found[f"{name}.{STREAM}"] = module
    return found


Visit = Callable[[str, list[Any]], list[Any]]
"""Called with an operator's call and its tensors; gives those that go on in their place."""


class Visited:
    """Calls back before and behind each operator of a model, and at the residual stream into each layer."""

    def __init__(self, model: Any, before: Visit, after: Callable[[str, Any, list[Any]], list[Any]], stream: Visit):
        """`after` is given the module's extra output too: an attention core's weights; None for other operators."""
        self._model, self._before, self._after, self._stream = model, before, after, stream
        self._names = {id(module): name for name, module in model.named_modules()}
        self._count: dict[str, int] = {}
        self.is_on = True
        """Off in the backward, where gradient checkpoints run operators again."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in operators(self._model, adapters_apart=True).items():
                for handle in self._hooks(name, module):
                    stack.callback(handle.remove)
            for name, module in layer_modules(self._model).items():
                stack.callback(module.register_forward_pre_hook(self._into(name), with_kwargs=True).remove)
            stack.enter_context(attention_around(self._core))
            yield

    def _hooks(self, name: str, module: Any) -> tuple[Any, Any]:
        def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self.is_on:
                return None
            return with_tensors(args, kwargs, self._before(self._next(name), tensors_of(args, kwargs)))

        def after(_module: Any, args: Any, given: Any) -> Any:
            if not self.is_on:
                return None
            return with_outputs(given, self._after(self._present(name), None, outputs_of(given)))

        return module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)

    def _into(self, name: str) -> Callable[..., Any]:
        def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self.is_on:
                return None
            if args:
                return (self._stream(name, [args[0]])[0], *args[1:]), kwargs
            hidden = kwargs["hidden_states"]
            return args, kwargs | {"hidden_states": self._stream(name, [hidden])[0]}

        return before

    def _core(self, module: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_on or id(module) not in self._names:
            return original(module, *args, **kwargs)
        call = self._next(core_name(self._names[id(module)]))
        states = self._before(call, list(args[:3]))
        given = original(module, *states, *args[3:], **kwargs)
        more = given[1], kwargs.get("scaling") or states[0].shape[-1] ** -0.5
        return (self._after(call, more, [given[0]])[0], *given[1:])

    def _next(self, name: str) -> str:
        self._count[name] = self._count.get(name, 0) + 1
        return self._present(name)

    def _present(self, name: str) -> str:
        number = self._count[name]
        return name if number == 1 else f"{name}#{number}"


class BackwardTaps:
    """Keeps what a model's operators took and gave in one forward, and the gradients of its backward."""

    def __init__(self, model: Any):
        self.calls: dict[str, BackwardCall] = {}
        self.visited = Visited(model, self._takes, self._gives, self._takes)

    def _takes(self, name: str, values: list[Any]) -> list[Any]:
        call = self.calls.setdefault(name, BackwardCall())
        call.takes = [value.detach().clone() for value in values]
        call.asks = [value.requires_grad for value in values]
        return [_alias(value, call.passed, slot) for slot, value in enumerate(values)]

    def _gives(self, name: str, _more: Any, values: list[Any]) -> list[Any]:
        call = self.calls[name]
        call.gives = [value.detach().clone() for value in values]
        call.follows = [value.requires_grad for value in values]
        return [_alias(value, call.came, slot) for slot, value in enumerate(values)]


def _alias(value: Any, kept: dict[int, Any], slot: int) -> Any:
    """The same numbers in a tensor of their own, whose gradient is kept."""
    if not value.requires_grad:
        return value
    alias = value.view_as(value)

    def keep(gradient: Any) -> None:
        kept[slot] = gradient.detach().clone()

    alias.register_hook(keep)
    return alias
