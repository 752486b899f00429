"""Record the torch calls that a function makes on given tensors, and write them as Python source.

Python values that depend on tensors, such as sizes and chosen experts, become constants in the source.
"""

from __future__ import annotations

import ast
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
_SLICE = re.compile(r"slice\((?:None|([^,()]+)), (?:None|([^,()]+)), (?:None|([^,()]+))\)")
_DEVICE = re.compile(r"device\(type='\w+'(, index=\d+)?\)")


class NotWritable(ValueError):
    """A call cannot be written as source."""


@dataclass(slots=True, eq=False)
class Name:
    """A tensor's source code. Replaces the tensor in a call's arguments, so that their repr is source code."""

    text: str = ""

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class _Call:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    takes: list[Name]
    gives: list[Name]
    is_one: bool
    """True if the call returns a single tensor, rather than a tuple."""
    in_place: bool


class Calls(TorchFunctionMode):  # type: ignore[misc]  # torch has no types for it
    """Records each torch call within the block. `named` maps source code to the tensor that it stands for. Tensors that
    are neither named nor returned by a recorded call are stored in `constants` as c0, c1, ..., and source code refers to them as w["c0"], ..."""

    def __init__(self, named: Mapping[str, Any], constants: dict[str, Any]):
        super().__init__()
        self._constants = constants
        self._calls: list[_Call] = []
        self._kept = [*named.values()]  # keeps ids unique
        self._names = {id(tensor): Name(source) for source, tensor in reversed([*named.items()])}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.unbind, types, args))
        kwargs = dict(kwargs or {})
        in_place = bool(_IN_PLACE.fullmatch(getattr(func, "__name__", ""))) or "out" in kwargs
        takes = [self._known(each) for each in outputs_of((args, kwargs))]
        named_args, named_kwargs = with_outputs((args, kwargs), takes)
        given = func(*args, **kwargs)
        gives = outputs_of(given)
        is_same = len(gives) == 1 and any(gives[0] is each for each in outputs_of(args))
        if in_place or (gives and not is_same):
            new = {} if in_place and is_same else {id(each): Name() for each in gives}
            self._kept += gives
            self._names |= new
            is_one = isinstance(given, torch.Tensor)
            self._calls.append(_Call(func, named_args, named_kwargs, takes, [*new.values()], is_one, in_place))
        return given

    def _known(self, tensor: Any) -> Name:
        if id(tensor) not in self._names:
            name = f"c{len(self._constants)}"
            self._kept.append(tensor)
            self._names[id(tensor)], self._constants[name] = Name(f'w["{name}"]'), tensor.detach().clone()
        return self._names[id(tensor)]

    def source(self, given: Any) -> tuple[list[str], set[str]]:
        """Return the lines of a function body that computes the tensor `given`, and the sources of all tensors that the
        body reads. Raises NotWritable."""
        if (result := self._names.get(id(given))) is None:
            raise NotWritable("the result was computed by calls that torch does not report")
        needed, calls = {result}, list[_Call]()
        for call in reversed(self._calls):
            if call.in_place or needed & set(call.gives):
                needed.update(call.takes)
                calls.insert(0, call)
        used = {name.text for name in needed if name.text}
        uses = Counter([*(name for call in calls for name in call.takes), result])
        lines, numbers = list[str](), count(1)
        pending: list[Name] = []
        """Results used only once. Their expressions are inserted where they are used."""

        def assign(names: list[Name], text: str, comma: str = "") -> None:
            for name in names:
                name.text = f"v{next(numbers)}" if uses[name] else "_"
            lines.append(f"{', '.join(name.text for name in names)}{comma} = {text}")

        for call in calls:
            others, within = ([name for name in pending if (name in call.takes) == i] for i in (False, True))
            while within and len(_text(call)) > _WIDTH:
                within.sort(key=lambda name: len(name.text))
                assign([within[-1]], within.pop().text)
            for name in others if call.in_place else ():
                assign([name], name.text)
            text, pending = _text(call), [] if call.in_place else others
            if not call.gives:
                lines.append(text)
            elif call.is_one and uses[call.gives[0]] == 1 and not call.in_place:
                call.gives[0].text = text
                pending.append(call.gives[0])
            else:
                assign(call.gives, text, "" if call.is_one or len(call.gives) > 1 else ",")
        lines.append(f"return {result}")
        try:  # without needless parentheses
            return [ast.unparse(ast.parse(line)) for line in lines], used
        except SyntaxError as error:
            raise NotWritable(f"a call's argument cannot be written as source: {error.text}") from error


def _text(call: _Call) -> str:
    name = resolve_name(call.function) or f"torch.{call.function.__name__}"
    _, *parents, leaf = name.split(".")
    last = leaf.strip("_") if leaf.startswith("__") else leaf
    args = [_DEVICE.sub("'cpu'", repr(each)) for each in call.args]
    words = [
        f"{word}={value!r}"
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
        within = _SLICE.sub(lambda ends: f"{ends[1] or ''}:{ends[2] or ''}:{ends[3] or ''}", args[1])
        within = within.replace("Ellipsis", "...")
        is_tuple = isinstance(call.args[1], tuple) and call.args[1]
        within = within[1:-1].removesuffix(",") if is_tuple else within
        return f"{args[0]}[{within}]" + (f" = {args[2]}" if last == "setitem" else "")
    if leaf.startswith("__i") and last[1:] in _OPERATORS:
        return f"{args[0]} {_OPERATORS[last[1:]]}= {args[1]}"
    if len(args) == 2 and not words:
        if last in _OPERATORS:
            return f"({args[0]} {_OPERATORS[last]} {args[1]})"
        if last[:1] == "r" and last[1:] in _OPERATORS:
            return f"({args[1]} {_OPERATORS[last[1:]]} {args[0]})"
    return f"{args[0]}.{leaf}({', '.join(args[1:] + words)})"
