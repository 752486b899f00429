"""Read torch.save and pickle.dump files as arrays and plain values, without torch and without executing code."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...schemas.checksums import Bytes
from ...schemas.errors import ImportFailed
from .arrays import HELD, NUMPY_DTYPES, PLAIN, STORAGES, TORCH_DTYPES, Storage, Tensor, bytes_of, known, raw_tensor
from .pickles import BYTES, Budget, Foreign, Known, Names, NotPlain, Persistent, load
from .textfiles import whole_content

_MAGIC = 0x1950A86A20F9469CFC6C
"""First value in a legacy torch.save file. Newer releases of torch write zip files."""
BAD_ZIP = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, KeyError, NotImplementedError, RuntimeError, OSError, ValueError,
    OverflowError, MemoryError,
)  # fmt: skip
_MAX_INSIDE = 4
"""Maximum nesting depth. A pickle may contain another torch.save file as bytes."""


def read_pickled(path: Path) -> Any:
    return unpickled(whole_content(path), str(path))


def unpickled(content: bytes, where: str, shells: Mapping[tuple[str, str], Known] | None = None) -> Any:
    return read_bytes(content, where, shells or {}, Budget(where, len(content)))


def is_cut(path: Path) -> bool:
    """Return True for an empty file or an incomplete zip file. Either may still be growing."""
    with path.open("rb") as file:
        begins = file.read(4)
        if begins != b"PK\x03\x04":
            return not begins
        try:
            return not zipfile.is_zipfile(file)
        except BAD_ZIP:
            return True


def read_bytes(content: Bytes, where: str, shells: Names, budget: Budget, depth: int = 0) -> Any:
    if depth > _MAX_INSIDE:
        raise ImportFailed(
            f"{where} contains pickles nested more than {_MAX_INSIDE} levels deep, which no framework writes"
        )
    if content[:4] == b"PK\x03\x04":
        return _read_zip(content, where, shells, budget, depth)
    if content[:1] != b"\x80":
        raise ImportFailed(f"{where} is neither a pickle (protocol 2 or later) nor a torch.save file")
    content = bytes(content)
    names = _names(where, shells, budget, depth)
    value, end = load(content, names, where, budget)
    return _read_legacy(content, end, where, names, budget) if value == _MAGIC and type(value) is int else value


def _read_zip(content: Bytes, where: str, shells: Names, budget: Budget, depth: int) -> Any:
    try:
        with zipfile.ZipFile(pa.BufferReader(content)) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            odd = next((e for e in entries.values() if e.compress_type != zipfile.ZIP_STORED or e.flag_bits & 1), None)
            if odd is not None:
                raise ImportFailed(
                    f"{where}: entry {odd.filename!r} is compressed or encrypted, which torch.save never does"
                )
            pickles = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise ImportFailed(f"{where} is a zip file without data.pkl, so torch.save did not write it")
            root = pickles[0].removesuffix("data.pkl")
            if root + "byteorder" in entries and archive.read(root + "byteorder") != b"little":
                raise ImportFailed(
                    f"{where} was written on a big-endian machine, which is not supported. Save it again on a "
                    "little-endian machine"
                )
            storages: dict[str, Storage] = {}

            def storage(dtype: str | None, key: str, numel: int) -> Storage:
                if key not in storages:
                    entry = entries.get(f"{root}data/{key}")
                    if entry is None:
                        raise NotPlain(f"storage {key!r} is missing")
                    budget.take(entry.file_size)
                    storages[key] = Storage(dtype, _stored(content, entry))
                    if entry.file_size < numel * _item_size(dtype):
                        raise NotPlain("a storage is shorter than declared")
                return storages[key]

            found = archive.read(pickles[0])
            budget.take(len(found))
            names = _names(where, shells, budget, depth)
            return load(found, names, where, budget, persistent=_checked(storage))[0]
    except BAD_ZIP as error:
        if isinstance(error, ImportFailed):
            raise
        raise ImportFailed(
            f"{where}: incomplete or damaged torch.save file ({error}). Wait until it is complete, or copy it again"
        ) from error


def _stored(content: Bytes, entry: zipfile.ZipInfo) -> Bytes:
    """Return an uncompressed entry's bytes without copying, because ZipFile.read is slow for thousands of entries."""
    if content[entry.header_offset : entry.header_offset + 4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"Bad magic number for entry {entry.filename!r}")
    name_length, extra_length = _LENGTHS.unpack_from(content, entry.header_offset + _LENGTHS_AT)
    start = entry.header_offset + _HEADER_BYTES + name_length + extra_length
    found = memoryview(content)[start : start + entry.file_size]
    if len(found) != entry.file_size or zlib.crc32(found) != entry.CRC:
        raise zipfile.BadZipFile(f"Bad CRC-32 for entry {entry.filename!r}")
    return found


_HEADER_BYTES, _LENGTHS_AT, _LENGTHS = 30, 26, struct.Struct("<HH")
"""Zip entry header: its size in bytes, then the offset and format of its two length fields (name, extra)."""


def _read_legacy(content: bytes, start: int, where: str, names: Names, budget: Budget) -> Any:
    """Read a legacy torch.save file: consecutive pickles, followed by the storages' bytes."""
    storages: dict[str, tuple[Storage, int]] = {}

    def storage(dtype: str | None, key: str, numel: int) -> Storage:
        return storages.setdefault(key, (Storage(dtype), numel))[0]

    _, start = load(content, names, where, budget, start=start)  # protocol version
    _, start = load(content, names, where, budget, start=start)  # machine information
    value, start = load(content, names, where, budget, start=start, persistent=_checked(storage))
    keys, start = load(content, names, where, budget, start=start)
    for key in keys if isinstance(keys, list) else ():
        if not isinstance(key, str) or key not in storages:
            break  # the size of a Foreign storage is unknown, so later storages cannot be found
        made, numel = storages[key]
        size = numel * _item_size(made.dtype)
        if int.from_bytes(content[start : start + 8], "little") != numel or len(content) < start + 8 + size:
            raise ImportFailed(f"{where} ends within a tensor's data, so it is incomplete or damaged. Copy it again")
        budget.take(size)
        made.content, start = content[start + 8 : start + 8 + size], start + 8 + size
    return value


def _checked(storage: Callable[[str | None, str, int], Storage]) -> Persistent:
    """Return a function that checks a persistent id and passes its dtype, key and number of elements to `storage`."""

    def of_identity(identity: Any) -> Storage | Foreign:
        kind = identity[1] if isinstance(identity, tuple) and len(identity) > 1 else None
        if isinstance(kind, Foreign):  # an unsupported dtype, such as a quantized one
            return kind
        if type(kind) is not _StorageKind or len(identity) not in (5, 6) or identity[0] != "storage":
            raise NotPlain("malformed storage")
        _, _, key, _, numel, *view = identity
        if not isinstance(key, str) or type(numel) is not int or numel < 0:
            raise NotPlain("malformed storage")
        if view and view[0] is not None:
            raise NotPlain("a storage is a view of another storage")
        return storage(kind.dtype, key, numel)

    return of_identity


class _StorageKind(Known):
    """Stand-in for a torch storage class, which pickles refer to but cannot call."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: str | None):
        self.dtype = dtype


class _DtypeName(_StorageKind):
    """Stand-in for a torch dtype."""


def _item_size(dtype: str | None) -> int:
    """Return the item size in bytes, which is 1 for an untyped storage."""
    return 1 if dtype is None else NUMPY_DTYPES[dtype].itemsize


def _consolidated(metadata: Any, storage: Any) -> dict[str, Any]:
    if not (isinstance(metadata, dict) and isinstance(metadata.get("leaves"), dict) and isinstance(storage, HELD)):
        raise NotPlain("malformed TensorDict")
    content, found = bytes_of(storage.array()), {}
    for name, leaf in metadata["leaves"].items():
        if not (isinstance(leaf, tuple) and len(leaf) == 5 and all(type(end) is int for end in leaf[2:])):
            raise NotPlain(f"TensorDict entry {name!r} is not a plain tensor")
        dtype, shape, start, stop, padding = leaf
        if not 0 <= start <= stop - padding <= stop <= len(content):
            raise NotPlain(f"TensorDict entry {name!r} has offsets outside its data")
        found[name] = raw_tensor(dtype, shape, content[start : stop - padding])
    return found


def _tensors_of(state: Any) -> dict[str, Any]:
    tensors = state.get("_tensordict") if isinstance(state, dict) else None
    if not isinstance(tensors, dict):
        raise NotPlain("malformed TensorDict")
    return tensors


class _TensorDict:
    __slots__ = ("tensors",)

    def __init__(self, *_: Any):
        self.tensors: dict[str, Any] = {}

    def give_state(self, state: Any) -> None:
        self.tensors = _tensors_of(state)


def tensors_in(value: Any) -> dict[str, Any]:
    found = value.tensors if isinstance(value, _TensorDict) else value
    if not isinstance(found, dict):
        raise NotPlain("not a TensorDict")
    return found


def _names(where: str, shells: Names, budget: Budget, depth: int) -> Names:
    def nested(content: Any) -> Any:
        if not isinstance(content, BYTES):
            raise NotPlain("malformed storage")
        return read_bytes(content, where, shells, budget, depth + 1)

    def typed(storage: Any, offset: Any, shape: Any, strides: Any, _: Any, __: Any, dtype: Any, *___: Any) -> Any:
        if isinstance(dtype, Foreign):
            return dtype
        if not isinstance(dtype, _DtypeName):
            raise NotPlain("malformed tensor")
        return tensor(storage, offset, shape, strides, dtype=dtype.dtype)

    def tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any, dtype: str | None = None) -> Any:
        if isinstance(storage, Foreign):
            return storage
        return Tensor(storage, offset, shape, strides, budget, dtype)

    return {
        **PLAIN,
        **{("torch", name): _StorageKind(dtype) for name, dtype in STORAGES.items()},
        **{("torch", name): _DtypeName(name) for name in TORCH_DTYPES},
        ("torch.storage", "UntypedStorage"): _StorageKind(None),
        ("torch.storage", "_load_from_bytes"): Known(nested),
        ("torch._utils", "_rebuild_tensor_v2"): Known(tensor),
        ("torch._utils", "_rebuild_tensor_v3"): Known(typed),
        ("torch._utils", "_rebuild_parameter"): Known(lambda data, *_: data),
        ("tensordict._reductions", "_rebuild_tensordict_files_consolidated"): Known(_consolidated),
        ("tensordict._reductions", "_make_td"): Known(lambda _, state: _tensors_of(state)),
        **known({"tensordict tensordict._td tensordict.tensordict": {"TensorDict": _TensorDict}}),
        **shells,
    }
