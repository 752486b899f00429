"""Read a trace's sealed Zarr group, verifying every byte. Only codecs that tim-trace writes are accepted."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.abc.store import Store as ZarrStore

from ..schemas.checksums import BlockDigests, SealedFile, sealed, whole_hash
from ..schemas.documents import read_object
from ..schemas.errors import DamagedTrace
from ..schemas.layout import Segment
from .journal import BFLOAT16, DATA_TYPES
from .store import Store, damaged, first_line, too_large, unreadable
from .verified_file import FileChecksums, VerifiedFile

FILES = "tim-trace files"
"""Root attribute that lists each file's size in bytes and base64 block checksums."""

DOCUMENT = "zarr.json"
CODECS = ("bytes", "blosc", "crc32c", "sharding_indexed")
MAX_CHUNK_BYTES = 256 << 20
"""Maximum uncompressed chunk size in bytes, enough for a row of 128 million 16-bit values."""
MAX_CHUNKS_A_SHARD = 1 << 16
_INDEX_CODECS = ["bytes", "crc32c"]
_CHUNK_CODECS = (["bytes"], ["bytes", "blosc"], ["bytes", "crc32c"], ["bytes", "blosc", "crc32c"])
_CRC_BYTES = 4
_WHAT = "a Zarr document"


def write_files(folder: Path, contents: Mapping[str, bytes]) -> SealedFile:
    files = {}
    for name, content in sorted(contents.items()):
        if name != DOCUMENT:
            digests = BlockDigests()
            digests.add(content)
            files[name] = {"num_bytes": digests.num_bytes, "blocks": base64.b64encode(digests.blocks).decode()}
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    root = json.loads(contents[DOCUMENT])
    content_of_root = json.dumps(root | {"attributes": {FILES: files}}, indent=1).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DOCUMENT).write_bytes(content_of_root)
    return sealed(content_of_root)


class SealedGroup:
    """A segment's Zarr group. Methods raise DamagedTrace if a file changed after it was written."""

    def __init__(self, store: Store, segment: Segment, root: SealedFile):
        self.store, self.folder = store, segment.dense
        where = self._shown(DOCUMENT)
        try:
            document = store.read_json(f"{self.folder}/{DOCUMENT}")
        except OSError as error:
            raise unreadable(where, error) from error
        if whole_hash(document) != root.hash:
            raise damaged(f"{where}: checksum mismatch")
        self._files = _listed_files(read_object(document, where, _WHAT), where)
        self._open: dict[str, VerifiedFile] = {}

    def arrays(self, group: str) -> dict[str, _Array]:
        names = [name[len(group) + 1 :] for name in self._files if name.startswith(f"{group}/")]
        found = [name.removesuffix(f"/{DOCUMENT}") for name in names if name.endswith(f"/{DOCUMENT}")]
        return {name: self._array(f"{group}/{name}") for name in found if "/" not in name}

    def verify(self) -> None:
        for name in self._files:
            file = self._file(name)
            assert file is not None
            file.verify()

    def read(self, name: str, start: int | None, stop: int | None) -> bytes | None:
        file = self._file(name)
        if file is None:
            return None
        size = file.num_bytes
        begin = 0 if start is None else max(size + start, 0) if start < 0 else start
        return file.read(begin, size if stop is None else stop)

    def _file(self, name: str) -> VerifiedFile | None:
        if name not in self._open and name in self._files:
            num_bytes, blocks = self._files[name]
            checksums = FileChecksums(blocks=blocks)
            self._open[name] = VerifiedFile(self.store, f"{self.folder}/{name}", num_bytes, checksums)
        return self._open.get(name)

    def _array(self, name: str) -> _Array:
        where = f"{name}/{DOCUMENT}"
        content = self.read(where, None, None)
        assert content is not None
        return _Array(self, name, read_object(content, self._shown(where), _WHAT), self._shown(where))

    def _shown(self, name: str) -> str:
        return self.store.shown(f"{self.folder}/{name}")


class _Array:
    def __init__(self, group: SealedGroup, name: str, document: Mapping[str, Any], where: str):
        try:
            self._chunks = _check_array(document)
            self.dtype = str(document["attributes"]["dtype"])
            self.shape = tuple(int(size) for size in document["shape"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedTrace(
                f"{where} does not describe an array that tim-trace writes ({first_line(error)})"
            ) from error
        self._row_bytes = math.prod(self.shape[1:]) * np.dtype(document["data_type"]).itemsize
        self._group, self._name = group, name
        self._zarr: Any = None

    def rows(self, start: int, count: int) -> np.ndarray:
        where = self._group._shown(self._name)
        if not 0 <= start <= start + count <= self.shape[0]:
            raise DamagedTrace(
                f"{where} has {self.shape[0]:,} rows, but scores refer to rows {start:,} to {start + count:,}"
            )
        if (said := too_large(count * self._row_bytes, times=4)) is not None:
            raise DamagedTrace(f"{where}, rows {start:,} to {start + count:,}: {said}")
        import zarr

        try:
            if self._zarr is None:
                store = _ArrayStore(self._group, self._name, self._chunks)
                self._zarr = zarr.open_array(store=store, mode="r", zarr_format=3)
            return np.asarray(self._zarr[start : start + count])
        except DamagedTrace:
            raise
        except Exception as error:  # zarr and its codecs raise all kinds of errors for invalid chunks
            raise damaged(
                f"{where}: rows {start:,} to {start + count:,} cannot be read ({first_line(error)})"
            ) from error


class _Chunks(NamedTuple):
    num_bytes: int
    num_in_shard: int | None
    """Number of chunks per shard (one file), or None if each chunk has its own file."""
    are_compressed: bool

    def check(self, content: bytes, *, is_whole: bool) -> None:
        """Raise ValueError if a chunk's header claims an impossible size, which Blosc would allocate."""
        starts = [0]
        if is_whole and self.num_in_shard is not None:
            index = content[-16 * self.num_in_shard - _CRC_BYTES :][: 16 * self.num_in_shard]
            starts = [int(start) for start in np.frombuffer(index, "<u8")[::2] if start < len(content)]
        for start in starts if self.are_compressed else ():
            if int.from_bytes(content[start + 4 : start + 8], "little") > self.num_bytes:
                raise ValueError("a chunk's header claims a size larger than the chunk size")


def _check_array(document: Mapping[str, Any]) -> _Chunks:
    if document["zarr_format"] != 3 or document["node_type"] != "array":
        raise ValueError("not a Zarr v3 array")
    shape, data_type = document["shape"], document["data_type"]
    if not _are_sizes(shape) or not 1 <= len(shape) <= 4:
        raise ValueError(f"unsupported shape {shape!r:.80}")
    if data_type not in DATA_TYPES:
        raise ValueError(f"unsupported data type {data_type!r:.80}")
    meant = document["attributes"]["dtype"]
    if data_type != ("uint16" if meant == BFLOAT16 else meant):
        raise ValueError(f"data type {data_type} does not match the declared dtype {meant!r:.80}")
    if document.get("storage_transformers"):
        raise ValueError("storage transformers are unsupported")
    item = np.dtype(data_type).itemsize
    if math.prod(shape[1:]) * item > MAX_CHUNK_BYTES:
        raise ValueError(f"rows of shape {shape[1:]!r:.80} are too large")
    grid, chunk = document["chunk_grid"], document["chunk_grid"]["configuration"]["chunk_shape"]
    if grid["name"] != "regular" or document["chunk_key_encoding"]["name"] != "default":
        raise ValueError("unsupported chunk grid or chunk key encoding")
    names, num_chunks = _names(document["codecs"]), None
    if names[0] == "sharding_indexed":
        sharding, shard = document["codecs"][0]["configuration"], chunk
        outer, names, chunk = names, _names(sharding["codecs"]), sharding["chunk_shape"]
        if len(outer) > 1 or _names(sharding["index_codecs"]) != _INDEX_CODECS:
            raise ValueError("unsupported combination of codecs")
        if not (_are_sizes(shard) and _are_sizes(chunk)) or len(shard) != len(chunk) or min(chunk) < 1:
            raise ValueError(f"unsupported shard shape {shard!r:.80}")
        num_chunks = math.prod(-(-whole // part) for whole, part in zip(shard, chunk, strict=True))
        if num_chunks > MAX_CHUNKS_A_SHARD or sharding.get("index_location", "end") != "end":
            raise ValueError(f"shards of shape {shard!r:.80} with chunks of shape {chunk!r:.80} are unsupported")
    if names not in _CHUNK_CODECS:
        raise ValueError("unsupported combination of codecs")
    if not _are_sizes(chunk) or len(chunk) != len(shape) or min(chunk) < 1 or math.prod(chunk) * item > MAX_CHUNK_BYTES:
        raise ValueError(f"unsupported chunk shape {chunk!r:.80}")
    return _Chunks(math.prod(chunk) * item, num_chunks, "blosc" in names)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and len(values) > 0 and all(type(v) is int and 0 <= v < 1 << 48 for v in values)


def _names(codecs: Any) -> list[str]:
    if not isinstance(codecs, list) or not 1 <= len(codecs) <= 4:
        raise ValueError("a list of codecs must have 1 to 4 entries")
    for codec in codecs:
        if codec["name"] not in CODECS:
            raise ValueError(f"unsupported codec {codec['name']!r:.80} (supported: {', '.join(CODECS)})")
    return [codec["name"] for codec in codecs]


def _listed_files(root: Mapping[str, Any], where: str) -> dict[str, tuple[int, bytes]]:
    try:
        listed = root["attributes"][FILES]
        return {name: (int(entry["num_bytes"]), base64.b64decode(entry["blocks"])) for name, entry in listed.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedTrace(f"{where} does not list the group's files ({first_line(error)})") from error


class _ArrayStore(ZarrStore):
    supports_writes: bool = False
    supports_deletes: bool = False
    supports_listing: bool = False

    def __init__(self, group: SealedGroup, name: str, chunks: _Chunks):
        super().__init__(read_only=True)
        self._group, self._name, self._chunks = group, name, chunks

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ArrayStore) and (self._group, self._name) == (other._group, other._name)

    async def get(self, key: str, prototype: Any, byte_range: ByteRequest | None = None) -> Any:
        start = stop = None
        if isinstance(byte_range, RangeByteRequest):
            start, stop = byte_range.start, byte_range.end
        elif isinstance(byte_range, OffsetByteRequest):
            start = byte_range.offset
        elif isinstance(byte_range, SuffixByteRequest):
            start = -byte_range.suffix
        content = self._group.read(f"{self._name}/{key}", start, stop)
        if content is not None and not isinstance(byte_range, SuffixByteRequest) and key != DOCUMENT:
            self._chunks.check(content, is_whole=byte_range is None)
        return None if content is None else prototype.buffer.from_bytes(content)

    async def get_partial_values(
        self, prototype: Any, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Any]:
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        return self._group.read(f"{self._name}/{key}", 0, 0) is not None

    def _unsupported(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    set = delete = list = list_prefix = list_dir = _unsupported
