"""Upload a trace to object storage: data files first, then the writer states that list them, and the manifest last."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from typing import Any

from ..schemas.checksums import short_hash, whole_hash
from ..schemas.documents import parse_writer_state
from ..schemas.errors import StorageError, StorageStalled, TraceExists
from ..schemas.layout import INDEX, JOURNAL, MANIFEST, TABLES, TEMPORARY_PREFIX, WRITERS
from .index import write_index
from .liveness import HEARTBEAT_S, journal_of
from .patience import MAX_WAIT_S, Patience, say
from .progress import Progress, no_progress
from .store import Store, first_line
from .worker import Worker

_BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "oss"}
_FEW_FILES, _GROWTH = 32, 1.25
_TRIES = 5
"""Attempts per file, on top of the file system library's own retries."""


class Upload:
    """Uploads a local trace to a URL. Readers of the URL never see incomplete files, or files that no writer lists."""

    def __init__(self, folder: Path, url: str):
        self.folder, self.url = folder, url
        self._store = Store(url)
        protocol = self._store.filesystem.protocol
        self._has_buckets = not _BUCKETS.isdisjoint([protocol] if isinstance(protocol, str) else protocol)
        self._sent: dict[str, str | int] = {}
        """Maps each uploaded path to the file's size, or to the hash of a writer state."""
        self._num_indexed = 0
        self.num_bytes = 0
        """Bytes uploaded so far, including files in progress."""

    def has_part_of(self, run_id: str | None = None, files: Collection[str] = ()) -> bool:
        """Return True if an earlier, interrupted upload has left some of `files` at the URL.

        Raises TraceExists if the URL holds other files, or the manifest of another run.
        """
        try:
            found = self._store.filesystem.find(self._store.root)
        except FileNotFoundError:
            return False
        names = {path.removeprefix(self._store.root).strip("/") for path in found}
        others = {name for name in names if name not in files and not name.startswith(f"{INDEX}/")}
        if others or (MANIFEST in names and self._store.manifest().run_id != run_id):
            raise TraceExists(f"{self.url} already exists. Use another URL, or remove it")
        return bool(names)

    def send(self, progress: Progress = no_progress, *, tries: int = _TRIES) -> None:
        """Upload new finished files, and then the states that list them. Unsealed segments are left for later."""
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
        return len(self._sent) > max(_FEW_FILES, self._num_indexed * _GROWTH)

    def keep_only(self, folder: str, names: Collection[str]) -> None:
        """Remove all files except `names` from a remote folder. Killed processes may have left some behind."""
        self._store.filesystem.invalidate_cache()
        for name in Store(self.url).files(folder).keys() - names:
            self._remove(f"{folder}/{name}")

    def _remove(self, path: str) -> None:
        with suppress(Exception):
            self._store.filesystem.rm_file(self._store.path(path))

    def put(self, path: str, content: bytes | None = None, *, tries: int = _TRIES) -> None:
        from fsspec.callbacks import Callback

        target, filesystem = self._store.path(path), self._store.filesystem
        for attempt in range(1, tries + 1):
            try:
                if not self._has_buckets:  # never create a bucket, because its name may be misspelled
                    filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
                if content is None:
                    before = self.num_bytes
                    moved = Callback(hooks={"moved": lambda _, value, before=before, **__: self._moved(before + value)})
                    filesystem.put_file(str(self.folder / path), target, callback=moved)
                else:
                    filesystem.pipe_file(target, content)
                self.num_bytes += 1  # an empty file is progress too
                return
            except Exception as error:  # file system libraries raise all kinds of errors
                if content is None and not (self.folder / path).exists():  # merged or removed since it was listed
                    return
                if attempt == tries:
                    raise StorageError(
                        f"{self._store.shown(path)} cannot be written ({first_line(error.__cause__ or error)}). "
                        "Check your credentials and permissions"
                    ) from error

    def _moved(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


def _without_unsealed(content: bytes, where: str) -> tuple[bytes, set[str]]:
    """Remove journals and partly sealed segments from a writer's state. Also return the removed files' paths."""
    state = parse_writer_state(content, where)
    if not state.journals:
        return content, set()
    segments = {found[0] for journal in state.journals if (found := journal_of(journal.rpartition("/")[2]))}
    paths = {path for of in segments for path in (f"{of.dense}/zarr.json", *map(of.parquet, TABLES))}
    unsealed = paths & set(state.files)
    state.journals = ()
    state.files = {name: record for name, record in state.files.items() if name not in unsealed}
    return state.to_json().encode(), unsealed


_QUIET_S = 5.0


def cache_folder(url: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "tim-trace" / short_hash(url.encode()) / url.rstrip("/").rpartition("/")[2]


def forget(folder: str | os.PathLike[str], url: str) -> None:
    if Path(folder).resolve() == cache_folder(url).resolve():
        shutil.rmtree(cache_folder(url).parent, ignore_errors=True)


class Sender:
    def __init__(self, url: str, *, max_wait: float = MAX_WAIT_S):
        self.url, self._max_wait = url, max_wait
        self.folder = cache_folder(url)
        if self.folder.exists():
            raise TraceExists(
                f"{url}: an earlier recording in {self.folder} was not uploaded completely. Upload it with "
                f"`{self.remedy}`, or remove it"
            )
        self._upload = Upload(self.folder, url)
        self._upload.has_part_of()
        self._is_stuck = self._has_failed = False
        self.folder.parent.mkdir(parents=True, exist_ok=True)

    @property
    def remedy(self) -> str:
        return f"tim-trace compact {self.folder} -o {self.url}"

    @contextmanager
    def sending(self) -> Iterator[None]:
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # otherwise each failed request prints a traceback
        worker = self._worker(idle=self._send_sealed, idle_s=HEARTBEAT_S)
        try:
            yield
        finally:
            self._end(worker)

    def _worker(self, **options: Any) -> Worker:
        return Worker(max_bytes=0, patience=Patience("", self._max_wait), **options)

    def _end(self, worker: Worker) -> None:
        text = f"uploading the rest of the trace to {self.url} (stops after {self._max_wait:.0f} s without progress)"
        note = Timer(_QUIET_S, say, [text])
        note.daemon = True
        note.start()
        try:
            worker.close(signs=lambda: self._upload.num_bytes)
        except StorageStalled:
            worker.abandon()
            self._is_stuck = True
        finally:
            note.cancel()

    def _send_sealed(self) -> None:
        try:
            self._upload.send(tries=1)
            if self._upload.has_grown:
                self._upload.send_index()
        except OSError as error:
            if not self._has_failed:
                say(f"{error}. Recording continues in {self.folder}, and the upload will be retried later")
            self._has_failed = True

    def finish(self) -> None:
        error: BaseException | None = None
        if not self._is_stuck:
            worker = self._worker()
            worker.submit(self._upload.send, 0)
            worker.submit(self._upload.send_index, 0)
            self._end(worker)
            error = worker.error
        if self._is_stuck:
            error = StorageError(f"{self.url} accepted no data for {self._max_wait:.0f} s")
        if isinstance(error, OSError):
            raise StorageError(
                f"{error}. The complete trace is in {self.folder}. Upload it with `{self.remedy}`"
            ) from error
        if error is not None:
            raise error
        shutil.rmtree(self.folder.parent, ignore_errors=True)
