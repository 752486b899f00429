"""Record the torch calls that a function makes on given tensors, and write them as Python source.

Python values that depend on tensors, such as sizes and chosen experts, become constants in the source.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import count
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from ..locate.taps import outputs_of, with_outputs

_WIDTH = 112
"""Maximum length of an expression (characters)."""
_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "truediv": "/", "true_divide": "/", "matmul": "@", "pow": "**",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "and": "&", "or": "|",
    "floordiv": "//", "mod": "%",
}  # fmt: skip
_IN_PLACE = re.compile(r"__setitem__|__i(?!nvert)\w+__|[a-z]\w*[a-z0-9]_")


class NotWritable(ValueError):
    """A call has an argument that cannot be written as source."""


@dataclass(frozen=True, slots=True)
class Name:
    """Reference to a tensor."""

    tensor: int


@dataclass(frozen=True, slots=True)
class _Call:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    takes: list[int]
    gives: list[int]
    is_one: bool
    """True if the call returns a single tensor, rather than a tuple."""
    in_place: bool


class Calls(TorchFunctionMode):  # type: ignore[misc]  # torch has no types for it
    """Records each torch call within the block. `named` maps the source of each known tensor to the tensor."""

    def __init__(self, named: Mapping[str, Any], first: int = 0):
        super().__init__()
        self._first = first
        self.constants: dict[str, Any] = {}
        """Tensors that were neither named nor returned by a recorded call. Their source is w["c0"], ..."""
        self._calls: list[_Call] = []
        self._kept: list[Any] = []  # keeps ids unique
        self._sources: dict[int, str] = {}
        for source, tensor in named.items():
            self._sources.setdefault(self._id(tensor), source)

    def _id(self, tensor: Any) -> int:
        self._kept.append(tensor)
        return id(tensor)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.unbind, types, args))
        kwargs = dict(kwargs or {})
        in_place = bool(_IN_PLACE.fullmatch(getattr(func, "__name__", ""))) or "out" in kwargs
        takes = [self._known(each) for each in outputs_of((args, kwargs))]
        named_args, named_kwargs = with_outputs((args, kwargs), map(Name, takes))
        given = func(*args, **kwargs)
        gives = outputs_of(given)
        is_same = len(gives) == 1 and any(gives[0] is each for each in outputs_of(args))
        if in_place or (gives and not is_same):
            new = [] if in_place and is_same else [self._id(each) for each in gives]
            is_one = isinstance(given, torch.Tensor)
            self._calls.append(_Call(func, named_args, named_kwargs, takes, new, is_one, in_place))
            self._sources |= dict.fromkeys(new, "")
        return given

    def _known(self, tensor: Any) -> int:
        if id(tensor) not in self._sources:
            name = f"c{self._first + len(self.constants)}"
            self._sources[self._id(tensor)], self.constants[name] = f'w["{name}"]', tensor.detach().clone()
        return id(tensor)

    def used(self, given: Any) -> set[str]:
        """Return the sources of the named tensors on which the tensor `given` depends."""
        return {source for call in self._needed(given) for each in call.takes if (source := self._sources[each])}

    def _needed(self, given: Any) -> list[_Call]:
        needed, calls = {id(given)}, []
        for call in reversed(self._calls):
            if call.in_place or needed & set(call.gives):
                needed.update(call.takes)
                calls.append(call)
        return calls[::-1]

    def source(self, given: Any) -> list[str]:
        """Return the lines of a function body that computes the tensor `given`. Raises NotWritable."""
        calls, texts, numbers = self._needed(given), dict(self._sources), count(1)
        uses = Counter([*(name for call in calls for name in call.takes), id(given)])
        lines: list[str] = []
        pending: dict[int, None] = {}
        """Results whose text is an expression, to be written within their only use."""

        def assign(names: list[int], text: str, comma: str = "") -> None:
            texts.update({name: f"v{next(numbers)}" if uses[name] else "_" for name in names})
            lines.append(f"{', '.join(texts[name] for name in names)}{comma} = {text}")

        for call in calls:
            text = _text(call, texts)
            if call.in_place or len(text) > _WIDTH:
                for name in pending if call.in_place else pending.keys() & set(call.takes):
                    assign([name], texts[name])
                text = _text(call, texts)
            pending = {} if call.in_place else {name: None for name in pending if name not in call.takes}
            if not call.gives:
                lines.append(text)
            elif call.is_one and uses[call.gives[0]] == 1 and not call.in_place:
                texts[call.gives[0]] = text
                pending[call.gives[0]] = None
            else:
                assign(call.gives, text, "" if call.is_one or len(call.gives) > 1 else ",")
        if not texts.get(id(given)):
            raise NotWritable("the result was computed by calls that torch does not report")
        lines.append(f"return {texts[id(given)]}")
        return [ast.unparse(ast.parse(line)).replace("'", '"') for line in lines]  # without needless parentheses


def _text(call: _Call, texts: Mapping[int, str]) -> str:
    name = resolve_name(call.function) or f"torch.{call.function.__name__}"
    _, *parents, leaf = name.split(".")
    last = leaf.strip("_") if leaf.startswith("__") else leaf
    args = [written(each, texts) for each in call.args]
    words = [
        f"{word}={written(value, texts)}"
        for word, value in call.kwargs.items()
        if not word.startswith("_") and word != "device" and value is not None
    ]
    if parents[:1] != ["Tensor"]:
        if reduce(lambda found, part: getattr(found, part, None), [*parents, leaf], torch) is not call.function:
            raise NotWritable(f"{name} is not a public torch function")
        return f"{name.replace('torch.nn.functional.', 'F.')}({', '.join(args + words)})"
    if last == "get":
        return f"{args[0]}.{parents[-1]}"
    if last in ("getitem", "setitem"):
        is_tuple = isinstance(call.args[1], tuple) and call.args[1]
        within = args[1][1:-1].removesuffix(",") if is_tuple else args[1]
        return f"{args[0]}[{within}]" + (f" = {args[2]}" if last == "setitem" else "")
    if leaf.startswith("__i") and last[1:] in _OPERATORS:
        return f"{args[0]} {_OPERATORS[last[1:]]}= {args[1]}"
    if len(args) == 2 and not words:
        if last in _OPERATORS:
            return f"({args[0]} {_OPERATORS[last]} {args[1]})"
        if last[:1] == "r" and last[1:] in _OPERATORS:
            return f"({args[1]} {_OPERATORS[last[1:]]} {args[0]})"
    return f"{args[0]}.{leaf}({', '.join(args[1:] + words)})"


def written(value: Any, texts: Mapping[int, str] = {}) -> str:  # noqa: B006  # never changed
    """Return a Python value as source. `texts` holds the source of each named tensor. Raises NotWritable."""
    if isinstance(value, Name):
        return texts[value.tensor]
    if isinstance(value, slice):
        ends = [value.start, value.stop] + ([] if value.step is None else [value.step])
        return ":".join("" if end is None else written(end, texts) for end in ends)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{written(name)}: {written(each, texts)}" for name, each in value.items()) + "}"
    if isinstance(value, tuple | list):
        inner = ", ".join(written(each, texts) for each in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, torch.device):
        return '"cpu"'
    if isinstance(value, str):
        return json.dumps(value)
    if value is None or isinstance(value, bool | int | float | torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if value is Ellipsis:
        return "..."
    raise NotWritable(f"{type(value).__name__} {value!r:.60} cannot be written as source")
