"""Read untrusted pickles as data, with an unpickler that never imports or calls what a file names.

Python's unpickler imports and calls whatever a file names, and even with an allowlist, the file controls what is
hashed, copied and allocated. This unpickler supports only the opcodes in frameworks' dumps. An allowlist maps names to
functions defined here that take and return plain values. Any other name becomes an inert `Foreign`.
"""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ...schemas.errors import ImportFailed

CONTAINER_BYTES = 64
"""Memory charged (bytes) for each list, dict or tuple, because pickles do not state container sizes up front."""
VIEWED_BYTES = 1 << 16
"""Byte strings of at least this many bytes are kept as views of the file instead of being copied."""
BYTES = (bytes, memoryview)


class NotPlain(ValueError):
    """A file contains something other than arrays and plain values, or stores them in an unexpected form."""


class Budget:
    """Memory limit per file: a constant plus a multiple of the file size. Sizes stated in the file do not raise it."""

    TIMES, FREE_BYTES = 64, 64 << 20

    def __init__(self, where: str, num_bytes: int):
        self._where, self._left = where, self.TIMES * num_bytes + self.FREE_BYTES

    def take(self, num_bytes: int) -> None:
        """Deduct `num_bytes` before they are allocated. Raises ImportFailed if the budget is exceeded."""
        self._left -= num_bytes
        if num_bytes < 0 or self._left < 0:
            raise ImportFailed(
                f"{self._where}: not read, because it would take more than {self.TIMES} times the file size in memory. "
                "No framework writes such a file"
            )


class Foreign:
    """Inert stand-in for a class or function outside the allowlist, or for the object that a call to it would return.

    Keeps the name and the state that the file sets on the object, but drops arguments and items.
    """

    __slots__ = ("module", "name", "state")

    def __init__(self, module: str, name: str):
        self.module, self.name, self.state = module, name, None

    def give_state(self, state: Any) -> None:
        self.state = state

    @property
    def attributes(self) -> dict[Any, Any] | None:
        """The object's attributes, or None if the file sets none."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2:  # (__dict__, values of __slots__)
            state = state[0] or state[1]
        return state if isinstance(state, dict) else None

    def __str__(self) -> str:
        shown = f"{self.module[:120]}.{self.name[:120]}"
        return (shown if shown.isprintable() else ascii(shown))[:120]


class Known:
    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]):
        self.make = make


Names = Mapping[tuple[str, str], Known]
Persistent = Callable[[Any], Any]


def load(
    data: bytes, names: Names, where: str, budget: Budget, *, start: int = 0, persistent: Persistent | None = None
) -> tuple[Any, int]:
    """Read the pickle at byte `start` and return (value, end position). Raises ImportFailed if it is not plain data."""
    try:
        return _Machine(data, names, where, budget, persistent).run(start)
    except ImportFailed:
        raise
    except IndexError as error:
        raise ImportFailed(
            f"{where}: incomplete pickle (it ends early, or takes values from an empty stack). Wait until the "
            "file is complete, or copy it again"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ImportFailed(f"{where} is not a pickle of arrays and plain values ({reason})") from error


class _Machine:
    def __init__(self, data: bytes, names: Names, where: str, budget: Budget, persistent: Persistent | None):
        self._view = memoryview(data)
        self._data, self._names, self._where, self._budget = data, names, where, budget
        self._persistent = persistent
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, start: int) -> tuple[Any, int]:
        data, position, size, memo = self._data, start, len(self._data), self._memo
        stack, marked, budget, owed = self._stack, self._marked, self._budget, 0
        while True:  # most frequent opcodes first, as torch.save writes about 30 opcodes per tensor
            code = data[position]
            position += 1
            if code == 0x71:  # BINPUT
                memo[data[position]] = stack[-1]
                position += 1
            elif code == 0x72:  # LONG_BINPUT
                memo[int.from_bytes(data[position : position + 4], "little")] = stack[-1]
                position += 4
            elif code == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif code == 0x68 or code == 0x6A:  # BINGET, LONG_BINGET
                width = 1 if code == 0x68 else 4
                key = int.from_bytes(data[position : position + width], "little")
                if key not in memo:
                    raise NotPlain("the pickle reads a memo entry that was never set")
                stack.append(memo[key])
                position += width
            elif code in _NUMBERS:
                width = _NUMBERS[code]
                if (next_code := data[position + width]) in _NUMBERS and (
                    data[position + width + 1 + _NUMBERS[next_code]] in _NUMBERS
                ):
                    position = self._run_of_numbers(position - 1, stack)
                else:
                    stack.append(_number(code, data[position : position + width]))
                    position += width
            elif code == 0x28:  # MARK
                owed += CONTAINER_BYTES
                marked.append(stack)
                stack = []
            elif code == 0x74:  # TUPLE
                items, stack = stack, marked.pop()
                stack.append(tuple(items))
            elif code == 0x85:  # TUPLE1
                owed += CONTAINER_BYTES
                stack[-1] = (stack[-1],)
            elif code == 0x52 or code == 0x81:  # REDUCE, NEWOBJ
                owed += CONTAINER_BYTES
                arguments, known = stack.pop(), stack[-1]
                if type(known) is Foreign:
                    stack[-1] = Foreign(known.module, known.name)
                elif type(known) is Known and type(arguments) is tuple:
                    stack[-1] = known.make(*arguments)
                else:
                    raise NotPlain("the pickle calls something other than a class or function")
            elif code == 0x51 and self._persistent is not None:  # BINPERSID
                stack[-1] = self._persistent(stack[-1])
            elif code in _CONSTANTS:
                stack.append(_CONSTANTS[code])
            elif code in _SIZED:
                decode, width = _SIZED[code]
                length = int.from_bytes(data[position : position + width], "little")
                position += width
                if len(data) - position < length or position > size:
                    raise IndexError
                owed += length
                if decode is bytes and length >= VIEWED_BYTES:
                    stack.append(self._view[position : position + length])
                else:
                    stack.append(decode(data[position : position + length]))
                position += length
            elif code == 0x2E:  # STOP
                budget.take(owed)
                if marked or len(stack) != 1:
                    raise NotPlain("values are left on the stack")
                return stack.pop(), position
            elif code == 0x63:  # GLOBAL
                end = data.index(b"\n", position)
                last = data.index(b"\n", end + 1)
                stack.append(self._named(data[position:end].decode(), data[end + 1 : last].decode()))
                position = last + 1
            elif code in _HEADERS:
                if code == 0x80 and data[position] > 5:
                    raise NotPlain(f"unsupported protocol {data[position]}")
                position += _HEADERS[code]
                if position > size:
                    raise IndexError
            else:
                stack = self._rare(code, stack)
            if owed > _OWED_BYTES:
                budget.take(owed)
                owed = 0

    def _run_of_numbers(self, position: int, stack: list[Any]) -> int:
        if (run := _RUN.match(self._data, position)) is None:
            raise IndexError
        # Use Python's unpickler, which is faster. It is safe here, because these bytes contain only numbers and no
        # callable.
        stack += pickle.loads(b"(" + run[0] + b"l.")
        return run.end()

    def _rare(self, code: int, stack: list[Any]) -> list[Any]:
        """Execute one of the less frequent opcodes, which have no inline argument. Return the current stack."""
        if code in _EMPTY:
            self._budget.take(CONTAINER_BYTES)
            stack.append(_EMPTY[code]())
        elif code in (0x61, 0x65, 0x90):  # APPEND, APPENDS, ADDITEMS
            items, stack = ([stack.pop()], stack) if code == 0x61 else (stack, self._marked.pop())
            if type(stack[-1]) is list:
                stack[-1].extend(items)
            elif type(stack[-1]) is not Foreign:
                raise NotPlain("the pickle appends to something other than a list")
        elif code in (0x73, 0x75):  # SETITEM, SETITEMS
            items, stack = ([stack.pop(-2), stack.pop()], stack) if code == 0x73 else (stack, self._marked.pop())
            self._set(stack[-1], items)
        elif code in (0x86, 0x87):  # TUPLE2, TUPLE3
            count = code - 0x84
            self._budget.take(CONTAINER_BYTES)
            if len(stack) < count:
                raise IndexError
            stack[-count:] = [tuple(stack[-count:])]
        elif code in (0x6C, 0x91):  # LIST, FROZENSET
            items, stack = stack, self._marked.pop()
            stack.append(items)
        elif code == 0x64:  # DICT
            items, stack = stack, self._marked.pop()
            stack.append(self._set({}, items))
        elif code == 0x93:  # STACK_GLOBAL
            name, module = stack.pop(), stack.pop()
            if type(name) is not str or type(module) is not str:
                raise NotPlain("a name is not text")
            stack.append(self._named(module, name))
        elif code == 0x62:  # BUILD
            state, made = stack.pop(), stack[-1]
            if hasattr(type(made), "give_state"):  # a stand-in that is created first and filled later
                made.give_state(state)
            elif type(made) is not dict:
                raise NotPlain("the pickle sets state on an object that cannot have state")
        elif code == 0x92:  # NEWOBJ_EX
            self._budget.take(CONTAINER_BYTES)
            known = (stack.pop(), stack.pop(), stack.pop())[2]
            if type(known) is not Foreign:
                raise NotPlain("the pickle creates an object with keyword arguments")
            stack.append(Foreign(known.module, known.name))
        elif code == 0x30:  # POP
            stack.pop()
        elif code == 0x31:  # POP_MARK
            stack = self._marked.pop()
        else:
            raise ImportFailed(f"{self._where} is not a pickle of arrays and plain values (opcode 0x{code:02x})")
        return stack

    def _set(self, target: Any, items: list[Any]) -> Any:
        """Set a dictionary's items. Items with a Foreign key are dropped, because keys must be plain values."""
        if type(target) is Foreign:
            return target
        if type(target) is not dict or len(items) % 2:
            raise NotPlain("the pickle sets items on something other than a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is Foreign or (type(key) is tuple and Foreign in map(type, key)):
                continue
            if type(key) not in _KEYS and not (type(key) is tuple and all(type(part) in _KEYS for part in key)):
                raise NotPlain(f"a dictionary has a {type(key).__name__} key")
            target[key] = value
        return target

    def _named(self, module: str, name: str) -> Known | Foreign:
        self._budget.take(CONTAINER_BYTES)
        return self._names.get((module, name)) or Foreign(module, name)


_OWED_BYTES = 1 << 20
_NUMBERS = {0x4B: 1, 0x4D: 2, 0x4A: 4, 0x47: 8}
"""Argument sizes in bytes for BININT1, BININT2, BININT and BINFLOAT."""
_FLOAT = struct.Struct(">d")
_RUN = re.compile(rb"(?:K.|M..|J.{4}|G.{8}){1,4096}+", re.DOTALL)


def _integer(content: bytes) -> int:
    if len(content) > 64:
        raise NotPlain("an integer with more than 512 bits")
    return int.from_bytes(content, "little", signed=True)


_TEXT, _LATIN1 = partial(str, encoding="utf-8", errors="surrogatepass"), partial(str, encoding="latin1")
_SIZED: dict[int, tuple[Callable[[bytes], Any], int]] = {
    0x8C: (_TEXT, 1), 0x58: (_TEXT, 4), 0x8D: (_TEXT, 8), 0x55: (_LATIN1, 1), 0x54: (_LATIN1, 4),
    0x43: (bytes, 1), 0x42: (bytes, 4), 0x8E: (bytes, 8), 0x96: (bytes, 8), 0x8A: (_integer, 1), 0x8B: (_integer, 4),
}  # fmt: skip
"""Decoder, and size of the length field in bytes, for each opcode."""
_HEADERS = {0x80: 1, 0x95: 8}
"""Argument sizes in bytes for opcodes without effect here: PROTO and FRAME."""
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False, 0x29: ()}
_EMPTY: dict[int, Callable[[], Any]] = {0x5D: list, 0x7D: dict, 0x8F: list}
"""Empty containers. A set becomes a list, so that only dictionary keys are hashed."""
_KEYS = (str, int, float, bool, bytes, type(None))


def _number(code: int, content: bytes) -> int | float:
    if code == 0x47:  # BINFLOAT
        return float(_FLOAT.unpack(content)[0])
    return int.from_bytes(content, "little", signed=code == 0x4A)
