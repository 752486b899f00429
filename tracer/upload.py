"""Upload a local trace to object storage: every file once, then the writers' states that list them, and finally the
manifest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

from ..schemas.checksums import whole_hash
from ..schemas.errors import StorageError, TraceExists
from ..schemas.layout import INDEX, JOURNAL, MANIFEST, TABLES, TEMPORARY_PREFIX, WRITERS
from ..schemas.writer_state import parse_writer_state
from .index import write_index
from .journal import journal_of
from .progress import Progress, no_progress
from .store import Store, first_line

_BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "oss"}
_FEW_FILES, _GROWTH = 32, 1.25
_TRIES = 5
"""Attempts per file; the file system library also retries."""


class Upload:
    """Uploads a local trace to a URL, where readers see only complete, listed files."""

    def __init__(self, folder: Path, url: str):
        self.folder, self.url = folder, url
        self._store = Store(url)
        protocol = self._store.filesystem.protocol
        self._has_buckets = not _BUCKETS.isdisjoint([protocol] if isinstance(protocol, str) else protocol)
        self._sent: dict[str, str | int] = {}
        """Path in the trace -> size of the uploaded file, or hash of the uploaded writer's state."""
        self._num_indexed = 0
        """Number of uploaded files at the last index upload."""
        self.num_bytes = 0
        """Total bytes uploaded, including parts of files in progress."""

    def has_part_of(self, run_id: str | None = None, files: Collection[str] = ()) -> bool:
        """Return True if the URL holds some of a run's `files` and nothing else, as after an interrupted upload.

        Raises TraceExists if it holds anything else, and StorageError if it cannot be reached.
        """
        try:
            found = self._store.filesystem.find(self._store.root)
        except FileNotFoundError:
            return False
        names = {path.removeprefix(self._store.root).strip("/") for path in found}
        others = {name for name in names if name not in files and not name.startswith(f"{INDEX}/")}
        if others or (MANIFEST in names and self._store.manifest().run_id != run_id):
            raise TraceExists(f"{self.url}: already exists; use another URL, or remove it")
        return bool(names)

    def send(self, progress: Progress = no_progress, *, tries: int = _TRIES) -> None:
        """Upload new finished files. Raises StorageError after `tries` attempts at one file.

        Files are uploaded before the states that list them, and a segment only when all of its journals are sealed.
        """
        source = Store(self.folder)
        states = {f"{WRITERS}/{name}": source.read_json(f"{WRITERS}/{name}") for name in source.files(WRITERS)}
        left_out = {MANIFEST}
        for path, content in states.items():
            states[path], unsealed = _without_unsealed(content, source.shown(path))
            left_out |= unsealed
        files = {
            path: size
            for path, size in source.walk("").items()
            if path.partition("/")[0] not in (JOURNAL, WRITERS, INDEX) and path not in left_out
            if not any(part.startswith(TEMPORARY_PREFIX) for part in path.split("/")) and self._sent.get(path) != size
        }
        with progress("sending", sum(files.values())) as advance:
            for path, size in files.items():
                self.put(path, tries=tries)
                self._sent[path] = size
                advance(size)
        for path, content in states.items():
            if self._sent.get(path) != whole_hash(content):
                self.put(path, content, tries=tries)
                self._sent[path] = whole_hash(content)
        if MANIFEST not in self._sent:
            self.put(MANIFEST, tries=tries)
            self._sent[MANIFEST] = 1

    def send_index(self) -> None:
        """Upload an index of the uploaded files, replacing the previous one."""
        write_index(self.folder)
        names = Store(self.folder).files(INDEX)
        for name, size in names.items():
            if self._sent.get(f"{INDEX}/{name}") != size:
                self.put(f"{INDEX}/{name}")
                self._sent[f"{INDEX}/{name}"] = size
        for path in [path for path in self._sent if path.startswith(f"{INDEX}/")]:
            if path.partition("/")[2] not in names:
                self._remove(path)
                del self._sent[path]
        self._num_indexed = len(self._sent)

    @property
    def has_grown(self) -> bool:
        """True if the number of files has grown by a factor since the last index, which bounds the cost of indexes."""
        return len(self._sent) > max(_FEW_FILES, self._num_indexed * _GROWTH)

    def keep_only(self, folder: str, names: Collection[str]) -> None:
        """Remove all other files of a folder at the URL, left by killed processes."""
        self._store.filesystem.invalidate_cache()
        for name in Store(self.url).files(folder).keys() - names:
            self._remove(f"{folder}/{name}")

    def _remove(self, path: str) -> None:
        with contextlib.suppress(Exception):
            self._store.filesystem.rm_file(self._store.path(path))

    def put(self, path: str, content: bytes | None = None, *, tries: int = _TRIES) -> None:
        """Upload a file, or `content` if given. Raises StorageError after `tries` attempts."""
        from fsspec.callbacks import Callback

        target, filesystem = self._store.path(path), self._store.filesystem
        for attempt in range(1, tries + 1):
            try:
                if not self._has_buckets:  # buckets are not created, since the name may be misspelled
                    filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
                if content is None:
                    before = self.num_bytes
                    moved = Callback(hooks={"moved": lambda _, value, before=before, **__: self._moved(before + value)})
                    filesystem.put_file(str(self.folder / path), target, callback=moved)
                else:
                    filesystem.pipe_file(target, content)
                self.num_bytes += 1  # an empty file is progress too
                return
            except Exception as error:  # file system libraries raise arbitrary errors
                if content is None and not (self.folder / path).exists():  # merged or removed since it was listed
                    return
                if attempt == tries:
                    raise StorageError(
                        f"{self._store.shown(path)}: cannot be written ({first_line(error.__cause__ or error)}); check your access"
                    ) from error

    def _moved(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


def _without_unsealed(content: bytes, where: str) -> tuple[bytes, set[str]]:
    """Return a writer's state for upload without journals, and the partly sealed files omitted with them."""
    state = parse_writer_state(content, where)
    if not state.journals:
        return content, set()
    segments = {found[0] for journal in state.journals if (found := journal_of(journal.rpartition("/")[2]))}
    paths = {path for of in segments for path in (f"{of.dense}/zarr.json", *map(of.parquet, TABLES))}
    unsealed = paths & set(state.files or ())
    state.journals = ()
    state.files = {name: record for name, record in (state.files or {}).items() if name not in unsealed}
    return state.to_json().encode(), unsealed
