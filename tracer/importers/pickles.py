"""Reading pickles of strangers as data: a machine of our own, which calls nothing that a file names.

Python's unpickler imports what a file names and calls it; restricted to some names it still hashes, copies and allocates as
the file says. This one knows the instructions that frameworks' dumps are made of and a closed list of names, each of which
stands for a function of ours that takes plain values and gives plain values. Every other name is refused, and named.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any

from ...schemas.errors import ImportFailed

CONTAINER_BYTES = 64
"""What an empty list, dictionary or tuple takes in memory, and no byte of the file stands for."""
VIEWED_BYTES = 1 << 16
"""From how many on a file's bytes are not copied: a value is a view of them, of which arrays are made."""
BYTES = (bytes, memoryview)
"""What a pickle's bytes become."""


class NotPlain(ValueError):
    """What a file holds is no array and no plain value, or not of the form that they are written in."""


class Budget:
    """What one file may take in memory: some times its own bytes, whatever it claims."""

    TIMES, FREE_BYTES = 64, 64 << 20

    def __init__(self, where: str, num_bytes: int):
        self._where, self._left = where, self.TIMES * num_bytes + self.FREE_BYTES

    def take(self, num_bytes: int) -> None:
        """Count what is about to be allocated. Raises ImportFailed when it is too much."""
        self._left -= num_bytes
        if num_bytes < 0 or self._left < 0:
            raise ImportFailed(
                f"{self._where}: would take more than {self.TIMES} times its own size in memory, so it is not read; no "
                "framework writes such a file"
            )


class Known:
    """A name of the closed list: what it stands for is a function of ours."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]):
        self.make = make


class Stateful:
    """What a pickle makes first and then gives a state."""

    __slots__ = ()

    def give_state(self, state: Any) -> None:
        """Take the state. Raises NotPlain for one of another form."""
        raise NotImplementedError


Names = Mapping[tuple[str, str], Known]
"""Module and name -> what it stands for."""
Persistent = Callable[[Any], Any]
"""What a persistent id stands for, as torch uses them for storages."""


def load(
    data: bytes, names: Names, where: str, budget: Budget, *, start: int = 0, persistent: Persistent | None = None
) -> tuple[Any, int]:
    """The value of the pickle that begins at `start`, and where it ends.

    Raises ImportFailed for anything that is no pickle of plain data, naming what it is.
    """
    try:
        return _Machine(data, names, where, budget, persistent).run(start)
    except ImportFailed:
        raise
    except IndexError as error:
        raise ImportFailed(
            f"{where}: is no whole pickle: it ends before its last instruction, or takes what is not there; copy it again, or "
            "wait until it is written"
        ) from error
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        UnicodeError,
        RecursionError,
        MemoryError,
    ) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ImportFailed(f"{where}: is no pickle of arrays and plain values ({reason})") from error


class _Machine:
    """One run over one pickle."""

    def __init__(self, data: bytes, names: Names, where: str, budget: Budget, persistent: Persistent | None):
        self._view = memoryview(data)
        self._data, self._names, self._where, self._budget = data, names, where, budget
        self._persistent = persistent
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, start: int) -> tuple[Any, int]:
        data, position, size, memo = self._data, start, len(self._data), self._memo
        while True:
            code = data[position]
            if code in _NUMBERS:
                position = self._numbers(position)
                continue
            position += 1
            if code == 0x94:  # MEMOIZE
                memo[len(memo)] = self._stack[-1]
            elif code == 0x71:  # BINPUT
                memo[data[position]] = self._stack[-1]
                position += 1
            elif code == 0x68 and (kept := memo.get(data[position], memo)) is not memo:  # BINGET
                self._stack.append(kept)
                position += 1
            elif code == 0x2E:  # STOP
                if self._marked or len(self._stack) != 1:
                    raise NotPlain("it leaves values behind")
                return self._stack.pop(), position
            elif code in _SIZED:
                kind, width = _SIZED[code]
                length = int.from_bytes(data[position : position + width], "little")
                position += width
                if len(data) - position < length or position > size:
                    raise IndexError
                self._budget.take(length)
                if kind == "bytes" and length >= VIEWED_BYTES:
                    self._stack.append(self._view[position : position + length])
                else:
                    self._stack.append(_value(kind, data[position : position + length]))
                position += length
            elif code in _FIXED:
                width = _FIXED[code]
                if size - position < width:
                    raise IndexError
                argument = int.from_bytes(data[position : position + width], "little")
                position += width
                self._memory(code, argument)
            elif code == 0x63:  # GLOBAL
                end = data.index(b"\n", position)
                last = data.index(b"\n", end + 1)
                self._name(data[position:end].decode(), data[end + 1 : last].decode())
                position = last + 1
            else:
                self._plain(code)

    def _numbers(self, position: int) -> int:
        """Push a run of numbers, and return where the next instruction is."""
        run = _RUN.match(self._data, position)
        if run is None:
            raise IndexError
        # A list of the run's numbers, as Python reads it: in these bytes is nothing else, and so nothing that could be called.
        self._stack += pickle.loads(b"(" + run[0] + b"l.")
        return run.end()

    def _memory(self, code: int, argument: int) -> None:
        """An instruction with a number: of the memo, or of the format."""
        if code == 0x72:  # LONG_BINPUT
            self._memo[argument] = self._stack[-1]
        elif code in (0x68, 0x6A):  # BINGET, LONG_BINGET
            if argument not in self._memo:
                raise NotPlain("it takes what it never kept")
            self._stack.append(self._memo[argument])
        elif code == 0x80 and argument > 5:  # PROTO
            raise NotPlain(f"it is of protocol {argument}")

    def _plain(self, code: int) -> None:
        """An instruction without an argument in the file."""
        stack = self._stack
        if code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in _EMPTY:
            self._budget.take(CONTAINER_BYTES)
            stack.append(_EMPTY[code]())
        elif code == 0x28:  # MARK
            self._budget.take(CONTAINER_BYTES)
            self._marked.append(stack)
            self._stack = []
        elif code in (0x61, 0x65, 0x90):  # APPEND, APPENDS, ADDITEMS
            items = [stack.pop()] if code == 0x61 else self._to_mark()
            if type(self._stack[-1]) is not list:
                raise NotPlain("it appends to what is no list")
            self._stack[-1].extend(items)
        elif code in (0x73, 0x75):  # SETITEM, SETITEMS
            items = [stack.pop(-2), stack.pop()] if code == 0x73 else self._to_mark()
            self._set(self._stack[-1], items)
        elif code in (0x85, 0x86, 0x87):  # TUPLE1, TUPLE2, TUPLE3
            count = code - 0x84
            self._budget.take(CONTAINER_BYTES)
            self._stack[-count:] = [tuple(_at_least(stack, count)[-count:])]
        elif code in (0x74, 0x6C, 0x91):  # TUPLE, LIST, FROZENSET
            items = self._to_mark()
            self._stack.append(tuple(items) if code == 0x74 else items)
        elif code == 0x64:  # DICT
            items = self._to_mark()
            self._stack.append(self._set({}, items))
        elif code == 0x93:  # STACK_GLOBAL
            name, module = stack.pop(), stack.pop()
            if type(name) is not str or type(module) is not str:
                raise NotPlain("it names something by what is no text")
            self._name(module, name)
        elif code in (0x52, 0x81):  # REDUCE, NEWOBJ
            arguments, known = stack.pop(), stack.pop()
            if type(known) is not Known or type(arguments) is not tuple:
                raise NotPlain("it calls what is no name of the list")
            self._budget.take(CONTAINER_BYTES)
            self._stack.append(known.make(*arguments))
        elif code == 0x62:  # BUILD
            state, made = stack.pop(), stack[-1]
            if isinstance(made, Stateful):
                made.give_state(state)
            elif type(made) is not dict:
                raise NotPlain("it gives a state to what has none")
        elif code == 0x51 and self._persistent is not None:  # BINPERSID
            stack.append(self._persistent(stack.pop()))
        elif code == 0x30:  # POP
            stack.pop()
        elif code == 0x31:  # POP_MARK
            self._to_mark()
        else:
            raise ImportFailed(
                f"{self._where}: is no pickle of arrays and plain values (instruction 0x{code:02x}), so it is not read"
            )

    def _to_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._marked.pop()
        return items

    def _set(self, target: Any, items: list[Any]) -> dict[Any, Any]:
        if type(target) is not dict or len(items) % 2:
            raise NotPlain("it sets items of what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in _KEYS and not (type(key) is tuple and all(type(part) in _KEYS for part in key)):
                raise NotPlain(f"it has a key of type {type(key).__name__}")
            target[key] = value
        return target

    def _name(self, module: str, name: str) -> None:
        known = self._names.get((module, name))
        if known is None:
            shown = f"{module}.{name}" if f"{module}.{name}".isprintable() else repr(f"{module}.{name}")
            raise ImportFailed(
                f"{self._where}: names {shown[:120]}, which is none of the classes that dumps are made of; nothing of it was "
                "run, and it is not read"
            )
        self._stack.append(known)


_NUMBERS = frozenset(b"KMJG")
"""BININT1, BININT2, BININT and BINFLOAT, which one, two, four and eight bytes follow."""
_RUN = re.compile(rb"(?:K.|M..|J.{4}|G.{8}){1,4096}+", re.DOTALL)
_SIZED = {
    0x8C: ("text", 1), 0x58: ("text", 4), 0x8D: ("text", 8),
    0x43: ("bytes", 1), 0x42: ("bytes", 4), 0x8E: ("bytes", 8), 0x96: ("bytes", 8),
    0x55: ("latin1", 1), 0x54: ("latin1", 4), 0x8A: ("integer", 1), 0x8B: ("integer", 4),
}  # fmt: skip
"""Instruction -> what it pushes, and how many bytes its length takes."""
_FIXED = {0x80: 1, 0x95: 8, 0x72: 4, 0x68: 1, 0x6A: 4}
"""Instruction -> bytes of the number that follows."""
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False, 0x29: ()}
_EMPTY: dict[int, Callable[[], Any]] = {0x5D: list, 0x7D: dict, 0x8F: list}
"""A set is read as a list: nothing is hashed that is no key."""
_KEYS = (str, int, float, bool, bytes, type(None))
_LONGEST_INTEGER = 64


def _value(kind: str, content: bytes) -> Any:
    if kind == "bytes":
        return content
    if kind == "integer":
        if len(content) > _LONGEST_INTEGER:
            raise NotPlain("it holds an integer of more than 512 bits")
        return int.from_bytes(content, "little", signed=True)
    return content.decode("latin1" if kind == "latin1" else "utf-8", "surrogatepass")


def _at_least(stack: list[Any], count: int) -> list[Any]:
    if len(stack) < count:
        raise IndexError
    return stack
