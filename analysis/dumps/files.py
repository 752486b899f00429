"""Tensors in one dump file (.pt, .npy, .npz or .safetensors), read as data; no code in it is run."""

from __future__ import annotations

import io
import json
import math
import stat
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from ...tracer.importers.arrays import Held, Tensor, from_bfloat16
from ...tracer.importers.pickles import Budget, NotPlain
from ...tracer.importers.torch_files import BAD_ZIP, read_pickled

SUFFIXES = (".pt", ".pth", ".npy", ".npz", ".safetensors")
_PRECISION_BITS = {"float64": 53, "float32": 24, "bfloat16": 8, "float16": 11}
_SAFETENSORS = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "bfloat16", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "BOOL": "?",
}  # fmt: skip
"""Name of a dtype in safetensors -> name in NumPy."""
_MOST_HEADER_BYTES = 100 << 20
"""Maximum size of a safetensors header, as in the safetensors library."""
_DEEPEST = 8
"""Maximum nesting of dictionaries and lists in one file."""


class Value:
    """One dumped tensor."""

    __slots__ = ("array", "dtype")

    def __init__(self, array: np.ndarray, dtype: str):
        self.array, self.dtype = array, dtype

    @property
    def is_float(self) -> bool:
        return self.dtype in _PRECISION_BITS

    @property
    def unit(self) -> float:
        """Return the unit roundoff of `dtype`."""
        return 2.0 ** -_PRECISION_BITS[self.dtype]

    @property
    def held_unit(self) -> float:
        """Return the unit roundoff of the coarsest dtype that represents every value exactly.

        For a tensor computed in bfloat16 but saved as float32, the result is the unit roundoff of bfloat16.
        """
        own = self.unit
        if self.dtype != "float32" or not self.array.size:
            return own
        bits = np.ascontiguousarray(self.array).view(np.uint32)
        if not (bits & 0xFFFF).any():
            return 2.0**-8
        with np.errstate(over="ignore"):
            is_half = np.array_equal(self.array.astype(np.float16).astype(np.float32), self.array)
        return 2.0**-11 if is_half else own


class TensorFile:
    """An open dump file, with tensors by name; if the file has a single unnamed tensor, the name is ""."""

    def __init__(self, path: Path):
        self.path = path
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ImportFailed(f"{path}: is not a regular file, so it is not read")
        self._held: dict[str, Any] = {}
        try:
            self._open()
        except ImportFailed:
            raise
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            EOFError,
            OverflowError,
            RecursionError,
            struct.error,
        ) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ImportFailed(
                f"{path}: is not a complete {path.suffix} file ({reason}); dump or copy it again"
            ) from error

    def names(self) -> list[str]:
        return list(self._held)

    def read(self, name: str) -> Value:
        """Read one tensor. Raises ImportFailed."""
        held = self._held[name]
        try:
            if isinstance(held, Tensor):
                return _value(held.array(), held.dtype)
            if isinstance(held, Held):
                return _value(held.array())
            if isinstance(held, tuple):
                return self._safetensor(*held)
            return _value(held)
        except (NotPlain, ValueError, OSError) as error:
            raise ImportFailed(f"{self.path}: {name or 'its tensor'} cannot be read ({error})") from error

    def _open(self) -> None:
        if self.path.suffix == ".npy":
            self._held[""] = np.load(self.path, mmap_mode="r", allow_pickle=False)
        elif self.path.suffix == ".npz":
            self._held = dict(_read_npz(self.path, Budget(str(self.path), self.path.stat().st_size)))
        elif self.path.suffix == ".safetensors":
            self._held = dict(self._safetensors())
        else:
            value = read_pickled(self.path)
            if isinstance(value, dict) and isinstance(value.get("meta"), dict) and "value" in value:  # SGLang's dumper
                value = value["value"]
            self._held = dict(_tensors(value))

    def _safetensors(self) -> Iterator[tuple[str, tuple[str, tuple[int, ...], int, int]]]:
        """Yield each tensor's name with its dtype, its shape, and the start and end of its bytes in the file."""
        total = self.path.stat().st_size
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(total - 8, _MOST_HEADER_BYTES):
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise TypeError("its header names no tensors")
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
            sizes = (*shape, start, stop)
            if not all(type(size) is int and size >= 0 for size in sizes) or not start <= stop <= total - 8 - length:
                raise ValueError(f"{name[:80]!r} points outside the file")
            yield name, (entry["dtype"], shape, 8 + length + start, 8 + length + stop)

    def _safetensor(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> Value:
        if name not in _SAFETENSORS:
            raise NotPlain(f"dtype {name}")
        is_bfloat16 = name == "BF16"
        dtype = np.dtype("<u2" if is_bfloat16 else _SAFETENSORS[name])
        if math.prod(shape) * dtype.itemsize != stop - start:
            raise NotPlain("its size in bytes does not match its shape")
        if stop == start:
            return Value(np.empty(shape, np.float32), "bfloat16" if is_bfloat16 else dtype.name)
        array = np.memmap(self.path, dtype, "r", offset=start, shape=shape)
        return Value(from_bfloat16(array), "bfloat16") if is_bfloat16 else _value(array)


def _value(array: np.ndarray, dtype: str | None = None) -> Value:
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise NotPlain(f"dtype {array.dtype}")
    return Value(array.astype(array.dtype.newbyteorder("="), copy=False), dtype or array.dtype.name)


def _tensors(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield every tensor in a nested value, with the dotted path of keys that leads to the tensor."""
    if isinstance(value, (Held, np.ndarray)):
        yield name, value
    elif depth < _DEEPEST and isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(item, f"{name}.{key}" if name else str(key), depth + 1)


def _read_npz(path: Path, budget: Budget) -> dict[str, np.ndarray]:
    """Read the arrays of a .npz file, except arrays of objects. Raises ImportFailed."""
    found = {}
    try:
        with path.open("rb") as whole, zipfile.ZipFile(whole) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith(".npy"):
                    budget.take(2 * entry.file_size)
                    with archive.open(entry) as file:
                        content = file.read(entry.file_size + 1)
                    found[entry.filename.removesuffix(".npy")] = _array(content)
    except BAD_ZIP as error:
        if isinstance(error, ImportFailed):
            raise
        raise ImportFailed(
            f"{path}: not readable as .npz ({(str(error).splitlines() or [type(error).__name__])[0]})"
        ) from error
    return found


def _array(content: bytes) -> np.ndarray:
    file = io.BytesIO(content)
    form: Any = np.lib.format
    read = form.read_array_header_1_0 if form.read_magic(file) == (1, 0) else form.read_array_header_2_0
    shape, fortran, dtype = read(file)
    rest = content[file.tell() :]
    if dtype.hasobject or not dtype.itemsize or int(np.prod(shape, dtype=object)) * dtype.itemsize != len(rest):
        raise ValueError(f"an array of {dtype} and shape {shape} in {len(rest)} bytes")
    return np.frombuffer(rest, dtype).reshape(shape, order="F" if fortran else "C")
