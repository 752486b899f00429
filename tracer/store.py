"""A trace's folder: reading it wherever it lies, and writing files into it so that each appears whole."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ..schemas.errors import DamagedTrace, StorageError, TraceExists, TraceNotFound
from ..schemas.layout import MANIFEST, TEMPORARY_PREFIX, WRITERS, Segment
from ..schemas.manifest import Manifest, parse_manifest
from ..schemas.writer_state import WriterState, parse_writer_state


class Store:
    """Reads a trace's folder on any file system that fsspec knows.

    `url` is a local path or a URL such as `s3://bucket/runs/7`. Nothing is read before a method asks for it.
    """

    def __init__(self, url: str | os.PathLike[str]):
        self.url = os.fspath(url)
        filesystem, root = fsspec.core.url_to_fs(self.url)
        self.filesystem: fsspec.AbstractFileSystem = filesystem
        self.root: str = root.rstrip("/")

    @property
    def is_local(self) -> bool:
        return isinstance(self.filesystem, LocalFileSystem)

    @property
    def name(self) -> str:
        """The folder's own name, which names the run."""
        return self.root.rsplit("/", 1)[-1]

    def path(self, relative: str) -> str:
        """Path of a file of the trace, as this store's file system names it."""
        return f"{self.root}/{relative}"

    def shown(self, relative: str) -> str:
        """Path of a file of the trace, as the user would name it."""
        return f"{self.url.rstrip('/')}/{relative}"

    def exists(self, relative: str) -> bool:
        return bool(self.filesystem.exists(self.path(relative)))

    def read_bytes(self, relative: str) -> bytes:
        return bytes(self.filesystem.cat_file(self.path(relative)))

    def files(self, folder: str) -> dict[str, int]:
        """Finished files directly in a folder: name -> bytes, sorted by name; empty when there is no such folder."""
        self.filesystem.invalidate_cache(self.path(folder))
        try:
            entries = self.filesystem.ls(self.path(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found = {
            entry["name"].rsplit("/", 1)[-1]: int(entry["size"] or 0) for entry in entries if entry["type"] == "file"
        }
        return {name: found[name] for name in sorted(found) if name and not name.startswith(TEMPORARY_PREFIX)}

    def size(self, folder: str) -> int:
        """Bytes of all files below a folder."""
        self.filesystem.invalidate_cache(self.path(folder))
        try:
            return int(self.filesystem.du(self.path(folder), total=True))
        except FileNotFoundError:
            return 0

    def walk(self, folder: str) -> dict[str, int]:
        """All finished files below a folder: path relative to it -> bytes."""
        self.filesystem.invalidate_cache(self.path(folder))
        base = self.path(folder)
        try:
            entries: dict[str, dict[str, Any]] = self.filesystem.find(base, detail=True)
        except FileNotFoundError:
            return {}
        relative = {name[len(base) :].lstrip("/"): int(entry["size"] or 0) for name, entry in entries.items()}
        return {name: size for name, size in sorted(relative.items()) if f"/{TEMPORARY_PREFIX}" not in f"/{name}"}

    def manifest(self) -> Manifest:
        """Read trace.json, which tells whether this is a trace and whether this build can read it."""
        where = self.shown(MANIFEST)
        try:
            text = self.read_bytes(MANIFEST).decode("utf-8", "replace")
        except (FileNotFoundError, NotADirectoryError) as error:
            if not self.filesystem.exists(self.root):
                raise TraceNotFound(
                    f"{self.url}: nothing is there; record a run with `tim-trace record -o {self.url} -- COMMAND`"
                ) from error
            raise TraceNotFound(
                f"{self.url}: holds no {MANIFEST}, so it is not a trace; name the folder that `tim-trace record -o` or "
                "`tim-trace import` wrote"
            ) from error
        except OSError as error:
            raise DamagedTrace(f"{where}: cannot be read ({error}); check the path and your access to it") from error
        return parse_manifest(text, where)

    def writers(self) -> tuple[list[WriterState], list[str]]:
        """Read every writer's state; what could not be read comes second, a sentence each."""
        states, damaged = [], []
        for name in self.files(WRITERS):
            relative = f"{WRITERS}/{name}"
            try:
                states.append(
                    parse_writer_state(self.read_bytes(relative).decode("utf-8", "replace"), self.shown(relative))
                )
            except FileNotFoundError:
                continue
            except DamagedTrace as error:
                damaged.append(str(error))
        return states, damaged


def create_trace(path: str | os.PathLike[str], manifest: Manifest, *, force: bool = False) -> Path:
    """Make the folder of a new trace and return it, absolute.

    Raises TraceExists when something lies there already; with `force` a trace that lies there is removed first,
    and anything that is not a trace is still refused.
    """
    folder = _local(path)
    if folder.exists() and not folder.is_dir():
        raise TraceExists(f"{path}: is a file; name a folder that does not exist yet")
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MANIFEST).exists():
            raise TraceExists(f"{path}: exists and is not a trace, so it is left alone; name another folder")
        if not force:
            raise TraceExists(f"{path}: a trace is there already; name another folder, or replace it with --force")
        shutil.rmtree(folder)
    with _explained(path):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / MANIFEST, manifest.to_json().encode())
    return folder


def join_trace(path: str | os.PathLike[str], manifest: Manifest) -> Path:
    """Return the folder of a trace that may exist already; the first of several processes makes it.

    Raises TraceExists when the folder holds something else than a trace.
    """
    folder = _local(path)
    with _explained(path):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / MANIFEST).exists():
            if any(
                not entry.name.startswith(TEMPORARY_PREFIX) and entry.name != MANIFEST for entry in folder.iterdir()
            ):
                if not (folder / MANIFEST).exists():
                    raise TraceExists(f"{path}: exists and is not a trace, so it is left alone; name another folder")
            else:
                _write_once(folder / MANIFEST, manifest.to_json().encode())
    Store(folder).manifest()
    return folder


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place and move it there, so that no reader meets half of it."""
    with whole_file(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a temporary path; what is written there takes `path`'s place at the end, and is removed on an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}-{path.name}"
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        raise


def remove_temporaries(folder: Path) -> None:
    """Remove what killed writers left half-written; only when no writer of the trace is alive."""
    for path in sorted(folder.rglob(f"{TEMPORARY_PREFIX}*")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def segments(store: Store, folder: str, suffix: str) -> dict[Segment, int]:
    """Segments that have a file with this suffix in a folder -> its bytes."""
    found = {}
    for name, size in store.files(folder).items():
        segment = Segment.parse(name.removesuffix(suffix)) if name.endswith(suffix) else None
        if segment is not None:
            found[segment] = size
    return found


def _write_once(path: Path, content: bytes) -> None:
    """Give `path` this content unless another process was first."""
    temporary = path.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}-{path.name}"
    temporary.write_bytes(content)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links: the last of several equal writers wins
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _local(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        raise StorageError(
            f"{path}: recording writes to a local folder; record there, copy it, and read the copy from its URL"
        )
    return Path(os.path.abspath(os.path.expanduser(path)))


@contextmanager
def _explained(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (TraceExists, StorageError):
        raise
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written ({error.strerror or error}); name a folder on a disk that you may write to"
        ) from error
