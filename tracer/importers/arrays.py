"""The classes that frameworks' dumps are made of, as plain data: NumPy arrays, torch tensors, and shells around them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ...schemas.checksums import Bytes
from .pickles import BYTES, Budget, Known, NotPlain, Stateful

TORCH_DTYPES = {
    "float64": "<f8", "double": "<f8", "float32": "<f4", "float": "<f4", "float16": "<f2", "half": "<f2", "bfloat16": "bfloat16",
    "int64": "<i8", "long": "<i8", "int32": "<i4", "int": "<i4", "int16": "<i2", "short": "<i2", "int8": "i1", "char": "i1",
    "uint8": "u1", "byte": "u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8", "bool": "?",
}  # fmt: skip
"""torch's name of a dtype -> NumPy's; bfloat16 has none, and is read as float32, which holds it exactly."""
_NUMPY_DTYPES = {name: np.dtype("<u2" if text == "bfloat16" else text) for name, text in TORCH_DTYPES.items()}
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool",
}  # fmt: skip
_ONE_NAME = {
    "double": "float64", "float": "float32", "half": "float16", "long": "int64", "int": "int32", "short": "int16",
    "char": "int8", "byte": "uint8",
}  # fmt: skip
"""torch's second name of a dtype -> its first."""
MAX_DIMENSIONS = 8


class Held:
    """What is an array, once its bytes are there."""

    __slots__ = ()

    def array(self) -> np.ndarray:
        """The array; a view where one is possible. Raises NotPlain for bytes that are no array of its shape."""
        raise NotImplementedError


class NumpyDtype(Stateful):
    """A NumPy dtype by its text, and whether its bytes are swapped."""

    __slots__ = ("order", "text")

    def __init__(self, text: Any, *_: Any):
        self.text, self.order = text if isinstance(text, str) else "", "|"

    def give_state(self, state: Any) -> None:
        if not (isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "=")):
            raise NotPlain("a NumPy dtype has a state of another form")
        self.order = state[1]

    @property
    def dtype(self) -> np.dtype:
        """NumPy's own. Raises NotPlain for any but numbers, flags, text and objects."""
        if self.text[:1] not in ("b", "i", "u", "f", "U", "S", "O") or not self.text[1:].isdigit():
            raise NotPlain(f"a NumPy array of dtype {self.text!r}")
        if self.text[0] == "O":
            return np.dtype(object)
        return np.dtype(("" if self.order in "|=" else self.order) + self.text)


class NumpyArray(Stateful, Held):
    """A NumPy array that is made empty and then gets its bytes."""

    __slots__ = ("_bytes", "_dtype", "_fortran", "_shape")

    def __init__(self, *_: Any):
        self._shape: tuple[int, ...] = (0,)
        self._dtype, self._fortran = NumpyDtype("f4"), False
        self._bytes: Bytes | list[Any] = b""

    def give_state(self, state: Any) -> None:
        if not (isinstance(state, tuple) and len(state) in (4, 5)):
            raise NotPlain("a NumPy array has a state of another form")
        shape, dtype, fortran, content = state[-4:]
        if not isinstance(dtype, NumpyDtype) or not isinstance(content, (*BYTES, str, list)):
            raise NotPlain("a NumPy array has a state of another form")
        self._shape, self._dtype, self._fortran = checked_shape(shape), dtype, bool(fortran)
        self._bytes = content.encode("latin1") if isinstance(content, str) else content

    def array(self) -> np.ndarray:
        if isinstance(self._bytes, list):
            if self._dtype.text[:1] != "O" or len(self._bytes) != math.prod(self._shape):
                raise NotPlain("a NumPy array has another number of objects than its shape")
            found = np.empty(len(self._bytes), object)
            for place, item in enumerate(self._bytes):
                found[place] = item
            return found.reshape(self._shape, order="F" if self._fortran else "C")
        return shaped(self._bytes, self._dtype.dtype, self._shape, fortran=self._fortran)


class Storage:
    """The bytes below tensors; a file may give them after the tensors."""

    __slots__ = ("content", "dtype")

    def __init__(self, dtype: str | None, content: Bytes | None = None):
        self.dtype, self.content = dtype, content


class Tensor(Held):
    """A torch tensor: some elements of a storage."""

    __slots__ = ("_array", "_budget", "_dtype", "_offset", "_shape", "_storage", "_strides")

    def __init__(self, storage: Any, offset: Any, shape: Any, strides: Any, budget: Budget, dtype: str | None = None):
        if not isinstance(storage, Storage) or type(offset) is not int or offset < 0:
            raise NotPlain("a tensor of another form")
        self._storage, self._offset, self._budget = storage, offset, budget
        self._shape, self._strides = checked_shape(shape), checked_shape(strides)
        self._dtype = dtype
        self._array: np.ndarray | None = None
        if len(self._shape) != len(self._strides):
            raise NotPlain("a tensor has other strides than its shape")

    @property
    def dtype(self) -> str | None:
        """torch's name of the dtype that it was saved in."""
        name = self._dtype or self._storage.dtype
        return _ONE_NAME.get(name, name) if name is not None else None

    def array(self) -> np.ndarray:
        if self._array is None:
            self._array = self._made()
        return self._array

    def _made(self) -> np.ndarray:
        name, content = self._dtype or self._storage.dtype, self._storage.content
        if content is None or name not in TORCH_DTYPES:
            raise NotPlain(f"a tensor of dtype {name}" if content else "a tensor without its bytes")
        dtype = _NUMPY_DTYPES[name]
        count, is_flat = math.prod(self._shape), self._strides == _contiguous(self._shape)
        last = self._offset + (
            count - 1 if is_flat else sum((n - 1) * step for n, step in zip(self._shape, self._strides, strict=True))
        )
        if count and last >= len(content) // dtype.itemsize:
            raise NotPlain("a tensor reaches beyond its bytes")
        self._budget.take(count * max(dtype.itemsize, 4))
        if not count:
            return np.empty(self._shape, np.float32 if name == "bfloat16" else dtype)
        if is_flat:
            view = np.frombuffer(content, dtype, count, self._offset * dtype.itemsize).reshape(self._shape)
        else:
            flat = np.frombuffer(content, dtype, len(content) // dtype.itemsize)
            steps = [step * dtype.itemsize for step in self._strides]
            view = np.lib.stride_tricks.as_strided(flat[self._offset :], self._shape, steps, writeable=False)
        return from_bfloat16(view) if name == "bfloat16" else view


class Shell(Stateful):
    """An object of a framework, as the plain state that its pickle holds."""

    __slots__ = ("arguments", "state")

    def __init__(self, *arguments: Any):
        self.arguments, self.state = arguments, None

    def give_state(self, state: Any) -> None:
        self.state = state


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of elements that lie one after the other."""
    if len(shape) == 1:
        return (1,)
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bfloat16 bits, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def checked_shape(shape: Any) -> tuple[int, ...]:
    """A shape, or strides. Raises NotPlain for what is neither."""
    if not isinstance(shape, (tuple, list)) or len(shape) > MAX_DIMENSIONS:
        raise NotPlain("an array of another shape")
    for size in shape:
        if type(size) is not int or not 0 <= size < 2**48:
            raise NotPlain("an array of another shape")
    return tuple(shape)


def shaped(content: Bytes, dtype: np.dtype, shape: tuple[int, ...], *, fortran: bool = False) -> np.ndarray:
    """Bytes as an array. Raises NotPlain unless they are as many as its shape says."""
    if dtype.hasobject or dtype.itemsize == 0 or len(content) != math.prod(shape) * dtype.itemsize:
        raise NotPlain(f"an array of shape {shape} has {len(content)} bytes")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


def raw_tensor(dtype: Any, shape: Any, content: Any) -> np.ndarray:
    """A tensor that was written as the name of its dtype, its shape and its bytes. Raises NotPlain."""
    if isinstance(content, Held):
        content = bytes_of(content.array())
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
    if name not in TORCH_DTYPES or not isinstance(content, BYTES):
        raise NotPlain(f"a tensor of dtype {dtype!r}")
    is_bfloat16 = name == "bfloat16"
    found = shaped(content, _NUMPY_DTYPES[name], checked_shape(shape))
    return from_bfloat16(found) if is_bfloat16 else found


def bytes_of(array: np.ndarray) -> Bytes:
    """An array's bytes, not copied where they lie one after the other. Raises NotPlain for an array of objects."""
    if array.dtype.hasobject:
        raise NotPlain("an array of objects where bytes belong")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def settled(value: Any) -> Any:
    """A value of a dump, an array where it holds one."""
    return value.array() if isinstance(value, Held) else value


def _sequence(value: Any = ()) -> list[Any]:
    if not isinstance(value, (list, tuple, *BYTES)):
        raise NotPlain("a list of another form")
    return list(value)


def _dictionary(items: Any = ()) -> dict[Any, Any]:
    if isinstance(items, (list, tuple)) and not items:
        return {}
    raise NotPlain("a dictionary of another form")


def _default_dictionary(*_: Any) -> dict[Any, Any]:
    return {}


def _latin1(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise NotPlain("bytes of another form")
    return text.encode("latin1")


def _bytes(content: Any = b"", encoding: Any = "latin1") -> Bytes:
    return content if isinstance(content, BYTES) else _latin1(content, encoding)


def _scalar(dtype: Any, content: Any) -> Any:
    if not isinstance(dtype, NumpyDtype) or not isinstance(content, bytes):
        raise NotPlain("a NumPy number of another form")
    return shaped(content, dtype.dtype, ()).item()


def _from_buffer(content: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> NumpyArray:
    found = NumpyArray()
    found.give_state((shape, dtype, order == "F", content))
    return found


def _text(*parts: Any) -> str:
    return ":".join(str(part) for part in parts if isinstance(part, (str, int)))


def _refused(*_: Any) -> Any:
    raise NotPlain("it calls a class that is only named")


def _size(shape: Any = ()) -> tuple[int, ...]:
    return checked_shape(shape)


_BUILTINS: dict[Callable[..., Any], tuple[str, ...]] = {
    _sequence: ("list", "tuple", "set", "frozenset"),
    _dictionary: ("dict",),
    _bytes: ("bytes", "bytearray"),
    _refused: ("int", "float", "str", "bool", "object"),
}
PLAIN = {
    ("collections", "OrderedDict"): Known(_dictionary),
    ("collections", "defaultdict"): Known(_default_dictionary),
    ("_codecs", "encode"): Known(_latin1),
    **{
        (module, name): Known(make)
        for module in ("builtins", "__builtin__")
        for make, names in _BUILTINS.items()
        for name in names
    },
    ("numpy", "dtype"): Known(NumpyDtype),
    ("numpy", "ndarray"): Known(NumpyArray),
    **{
        (f"numpy.{core}.multiarray", name): Known(make)
        for core in ("core", "_core")
        for name, make in (("_reconstruct", NumpyArray), ("scalar", _scalar))
    },
    **{(f"numpy.{core}.numeric", "_frombuffer"): Known(_from_buffer) for core in ("core", "_core")},
    ("torch", "Size"): Known(_size),
    ("torch", "device"): Known(_text),
}
"""Names that are in the pickles of every framework."""
