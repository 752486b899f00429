"""Plain stand-ins for classes in frameworks' pickles: NumPy arrays, torch tensors and the frameworks' own objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...schemas.checksums import Bytes
from .pickles import BYTES, Budget, Foreign, Known, NotPlain

TORCH_DTYPES = {
    "float64": "<f8", "double": "<f8", "float32": "<f4", "float": "<f4", "float16": "<f2", "half": "<f2", "bfloat16": "bfloat16",
    "int64": "<i8", "long": "<i8", "int32": "<i4", "int": "<i4", "int16": "<i2", "short": "<i2", "int8": "i1", "char": "i1",
    "uint8": "u1", "byte": "u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8", "bool": "?",
}  # fmt: skip
"""NumPy type strings by torch dtype. NumPy has no bfloat16, so bfloat16 values become float32, without loss."""
NUMPY_DTYPES = {name: np.dtype("<u2" if text == "bfloat16" else text) for name, text in TORCH_DTYPES.items()}
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool",
}  # fmt: skip
MAX_DIMENSIONS = 8
_DTYPE_KINDS = ("b", "i", "u", "f", "U", "S", "O")


class NumpyDtype:
    __slots__ = ("order", "text")

    def __init__(self, text: Any, *_: Any):
        self.text, self.order = text if isinstance(text, str) else "", "|"

    def give_state(self, state: Any) -> None:
        if not (isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "=")):
            raise NotPlain("a NumPy dtype has unexpected pickled state")
        self.order = state[1]

    @property
    def dtype(self) -> np.dtype:
        if self.text[:1] not in _DTYPE_KINDS or not self.text[1:].isdigit():
            raise NotPlain(f"unsupported NumPy dtype {self.text!r}")
        if self.text[0] == "O":
            return np.dtype(object)
        return np.dtype(("" if self.order in "|=" else self.order) + self.text)


class NumpyArray:
    __slots__ = ("_bytes", "_dtype", "_fortran", "_shape")

    def __init__(self, *_: Any):
        self._shape: tuple[int, ...] = (0,)
        self._dtype, self._fortran = NumpyDtype("f4"), False
        self._bytes: Bytes | list[Any] = b""

    def give_state(self, state: Any) -> None:
        if not (isinstance(state, tuple) and len(state) in (4, 5)):
            raise NotPlain("a NumPy array has unexpected pickled state")
        shape, dtype, fortran, content = state[-4:]
        if not isinstance(dtype, NumpyDtype) or not isinstance(content, (*BYTES, str, list)):
            raise NotPlain("a NumPy array has unexpected pickled state")
        self._shape, self._dtype, self._fortran = checked_shape(shape), dtype, bool(fortran)
        self._bytes = content.encode("latin1") if isinstance(content, str) else content

    def array(self) -> np.ndarray:
        if isinstance(self._bytes, list):
            if self._dtype.text[:1] != "O" or len(self._bytes) != math.prod(self._shape):
                raise NotPlain("a NumPy array has too many or too few objects for its shape")
            found = np.fromiter(self._bytes, object, len(self._bytes))
            return found.reshape(self._shape, order="F" if self._fortran else "C")
        return shaped(self._bytes, self._dtype.dtype, self._shape, fortran=self._fortran)


class Storage:
    """Stand-in for a torch storage. `content` may be set later, because legacy files store it after all tensors."""

    __slots__ = ("content", "dtype")

    def __init__(self, dtype: str | None, content: Bytes | None = None):
        self.dtype, self.content = dtype, content


class Tensor:
    __slots__ = ("_array", "_budget", "_dtype", "_offset", "_shape", "_storage", "_strides")

    def __init__(self, storage: Any, offset: Any, shape: Any, strides: Any, budget: Budget, dtype: str | None = None):
        if not isinstance(storage, Storage) or type(offset) is not int or offset < 0:
            raise NotPlain("malformed tensor")
        self._storage, self._offset, self._budget = storage, offset, budget
        self._shape, self._strides = checked_shape(shape), checked_shape(strides)
        self._dtype = dtype
        self._array: np.ndarray | None = None
        if len(self._shape) != len(self._strides):
            raise NotPlain("a tensor's strides and shape differ in length")

    def array(self) -> np.ndarray:
        if self._array is None:
            self._array = self._made()
        return self._array

    def _made(self) -> np.ndarray:
        name, content = self._dtype or self._storage.dtype, self._storage.content
        if content is None or name not in TORCH_DTYPES:
            raise NotPlain(f"unsupported tensor dtype {name}" if content else "a tensor has no data")
        dtype = NUMPY_DTYPES[name]
        count = math.prod(self._shape)
        last = self._offset + sum((n - 1) * step for n, step in zip(self._shape, self._strides, strict=True))
        if count and last >= len(content) // dtype.itemsize:
            raise NotPlain("a tensor extends past its data")
        self._budget.take(count * max(dtype.itemsize, 4))
        if not count:
            return np.empty(self._shape, np.float32 if name == "bfloat16" else dtype)
        steps = [step * dtype.itemsize for step in self._strides]
        view = np.ndarray(self._shape, dtype, content, self._offset * dtype.itemsize, steps)
        return from_bfloat16(view) if name == "bfloat16" else view


HELD = (NumpyArray, Tensor)


class Shell:
    """Stand-in for a framework's object, with its constructor arguments and pickled state."""

    __slots__ = ("arguments", "state")

    def __init__(self, *arguments: Any):
        self.arguments, self.state = arguments, None

    def give_state(self, state: Any) -> None:
        self.state = state


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def checked_shape(shape: Any) -> tuple[int, ...]:
    is_short = isinstance(shape, (tuple, list)) and len(shape) <= MAX_DIMENSIONS
    if not is_short or not all(type(size) is int and 0 <= size < 2**48 for size in shape):
        raise NotPlain("invalid array shape")
    return tuple(shape)


def shaped(content: Bytes, dtype: np.dtype, shape: tuple[int, ...], *, fortran: bool = False) -> np.ndarray:
    if dtype.hasobject or dtype.itemsize == 0 or len(content) != math.prod(shape) * dtype.itemsize:
        raise NotPlain(f"an array has shape {shape} but {len(content)} bytes")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


def raw_tensor(dtype: Any, shape: Any, content: Any) -> np.ndarray:
    if isinstance(content, HELD):
        content = bytes_of(content.array())
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
    if name not in TORCH_DTYPES or not isinstance(content, BYTES):
        raise NotPlain(f"unsupported tensor dtype {dtype!r}")
    found = shaped(content, NUMPY_DTYPES[name], checked_shape(shape))
    return from_bfloat16(found) if name == "bfloat16" else found


def bytes_of(array: np.ndarray) -> Bytes:
    if array.dtype.hasobject:
        raise NotPlain("an object array where bytes are expected")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def settled(value: Any) -> Any:
    return value.array() if isinstance(value, HELD) else value


def _sequence(value: Any = ()) -> list[Any]:
    if not isinstance(value, (list, tuple, *BYTES)):
        raise NotPlain("malformed list")
    return list(value)


def _dictionary(items: Any = ()) -> dict[Any, Any]:
    if isinstance(items, (list, tuple)) and not items:
        return {}
    raise NotPlain("malformed dictionary")


def _latin1(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise NotPlain("malformed bytes")
    return text.encode("latin1")


def _bytes(content: Any = b"", encoding: Any = "latin1") -> Bytes:
    return content if isinstance(content, BYTES) else _latin1(content, encoding)


def _scalar(dtype: Any, content: Any) -> Any:
    if isinstance(dtype, NumpyDtype) and dtype.text[:1] not in _DTYPE_KINDS:
        return Foreign("numpy", dtype.text)
    if not isinstance(dtype, NumpyDtype) or not isinstance(content, bytes):
        raise NotPlain("malformed NumPy scalar")
    return shaped(content, dtype.dtype, ()).item()


def _from_buffer(content: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> NumpyArray:
    found = NumpyArray()
    found.give_state((shape, dtype, order == "F", content))
    return found


def _text(*parts: Any) -> str:
    return ":".join(str(part) for part in parts if isinstance(part, (str, int)))


def known(calls: Mapping[str, Mapping[str, Callable[..., Any]]]) -> dict[tuple[str, str], Known]:
    """Return the allowlist for a table of modules, names and functions. A key may hold several, separated by spaces."""
    return {
        (module, name): Known(make)
        for modules, made in calls.items()
        for module in modules.split()
        for names, make in made.items()
        for name in names.split()
    }


PLAIN = known(
    {
        "builtins __builtin__": {"list tuple set frozenset": _sequence, "dict": _dictionary, "bytes bytearray": _bytes},
        "collections": {"OrderedDict": _dictionary, "defaultdict": lambda *_: {}},
        "_codecs": {"encode": _latin1},
        "numpy": {"dtype": NumpyDtype, "ndarray": NumpyArray},
        "numpy.core.multiarray numpy._core.multiarray": {"_reconstruct": NumpyArray, "scalar": _scalar},
        "numpy.core.numeric numpy._core.numeric": {"_frombuffer": _from_buffer},
        "torch": {"Size": checked_shape, "device": _text},
    }
)
