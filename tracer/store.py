"""Reading a trace's folder, wherever it lies. Nothing outside of the folder is read, whatever its files say."""

from __future__ import annotations

import os
import shlex
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ..schemas.documents import MAX_BYTES
from ..schemas.errors import DamagedTrace, TraceNotFound
from ..schemas.layout import MANIFEST, REPLACED_PREFIX, REPLACING_PREFIX, TEMPORARY_PREFIX, WRITERS
from ..schemas.manifest import Manifest, parse_manifest
from ..schemas.writer_state import WriterState, parse_writer_state


class Store:
    """Reads a trace's folder on any file system that fsspec knows.

    `url` is a local path or a URL such as `s3://bucket/runs/7`; a path is a name, and no character of it a pattern.
    Nothing is read before a method asks for it.
    """

    def __init__(self, url: str | os.PathLike[str]):
        self.url = os.fspath(url)
        self.filesystem: fsspec.AbstractFileSystem
        if "://" in self.url:
            self.filesystem, root = fsspec.core.url_to_fs(self.url)
        else:
            self.filesystem, root = LocalFileSystem(), os.path.abspath(os.path.expanduser(self.url))
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

    @cached_property
    def _real_root(self) -> str:
        return os.path.realpath(self.root)

    def checked_path(self, relative: str) -> str:
        """The same as `path`. Raises DamagedTrace for a link that leads out of the folder."""
        path = self.path(relative)
        if self.is_local:
            real = os.path.realpath(path)
            if real != self._real_root and not real.startswith(f"{self._real_root}{os.sep}"):
                raise DamagedTrace(
                    f"{self.shown(relative)}: is a link that leads out of the trace, to {real}; it is not followed: put a "
                    "copy in its place"
                )
        return path

    def exists(self, relative: str) -> bool:
        return bool(self.filesystem.exists(self.checked_path(relative)))

    def read_bytes(self, relative: str) -> bytes:
        return bytes(self.filesystem.cat_file(self.checked_path(relative)))

    def read_range(self, relative: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file, fewer where it ends before."""
        path = self.checked_path(relative)
        if not self.is_local:
            return bytes(self.filesystem.cat_file(path, start=start, end=stop)) if stop > start else b""
        with open(path, "rb", buffering=0) as file:
            parts = []
            while start < stop and (part := os.pread(file.fileno(), stop - start, start)):
                parts.append(part)
                start += len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_json(self, relative: str) -> bytes:
        """The bytes of a JSON document. Raises DamagedTrace for one that is too large to be one of ours."""
        path = self.checked_path(relative)
        size = int(self.filesystem.size(path) or 0)
        if size > MAX_BYTES:
            raise DamagedTrace(f"{self.shown(relative)}: has {size:,} bytes, which no JSON document of a trace has")
        return bytes(self.filesystem.cat_file(path))

    def seen_at(self, relative: str) -> float | None:
        """When a file was changed last, seconds since 1970; None where the file system does not tell."""
        try:
            found = self.filesystem.modified(self.path(relative))
        except (NotImplementedError, OSError, KeyError):
            return None
        return found.timestamp() if isinstance(found, datetime) else None

    def files(self, folder: str) -> dict[str, int]:
        """Finished files directly in a folder: name -> bytes, sorted by name; empty when there is no such folder."""
        self.filesystem.invalidate_cache(self.path(folder))
        try:
            entries = self.filesystem.ls(self.path(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found = {
            entry["name"].rsplit("/", 1)[-1]: int(entry["size"] or 0)
            for entry in entries
            if entry["type"] != "directory" and entry["name"].rstrip("/") != self.path(folder)
        }
        return {name: found[name] for name in sorted(found) if name and not name.startswith(TEMPORARY_PREFIX)}

    def folders(self, folder: str) -> list[str]:
        """Names of the finished folders directly in a folder; empty when there is no such folder."""
        self.filesystem.invalidate_cache(self.path(folder))
        try:
            entries = self.filesystem.ls(self.path(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = (entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry["type"] == "directory")
        return sorted(name for name in names if not name.startswith(TEMPORARY_PREFIX))

    def aside(self) -> list[str]:
        """Folders of traces that are or were being replaced by this one, the newest last; of a local trace alone."""
        if not self.is_local:
            return []
        names = [f"{REPLACED_PREFIX}*", f"{REPLACING_PREFIX}*"]
        found = [path for name in names for path in Path(self.root).glob(name) if (path / MANIFEST).exists()]
        return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)]

    def size(self, folder: str) -> int:
        """Bytes of all files below a folder."""
        return sum(self.walk(folder).values())

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
            content = self.read_json(MANIFEST)
        except (FileNotFoundError, NotADirectoryError) as error:
            if not self.filesystem.exists(self.root):
                raise TraceNotFound(
                    f"{self.url}: nothing is there; record a run with `tim-trace record -o {self.url} -- COMMAND`"
                ) from error
            if aside := self.aside():
                raise TraceNotFound(
                    f"{self.url}: a process died while it replaced the trace here, and nothing is lost: the next `tim-trace "
                    f"record` or `import` to this folder puts it back, or: mv {shlex.quote(self.shown(aside[-1]))}/* "
                    f"{shlex.quote(self.url)}"
                ) from error
            raise TraceNotFound(
                f"{self.url}: holds no {MANIFEST}, so it is not a trace; name the folder that `tim-trace record -o` or "
                "`tim-trace import` wrote"
            ) from error
        except OSError as error:
            raise DamagedTrace(f"{where}: cannot be read ({error}); check the path and your access to it") from error
        return parse_manifest(content, where)

    def writers(self) -> tuple[list[WriterState], list[str]]:
        """Read every writer's state; what could not be read comes second, a sentence each."""
        is_checked = self.manifest().is_checked
        states, damaged = [], []
        for name in self.files(WRITERS):
            try:
                states.append(self.writer(name.removesuffix(".json"), needs_checksum=is_checked))
            except FileNotFoundError:
                continue
            except DamagedTrace as error:
                damaged.append(str(error))
        return states, damaged

    def writer(self, name: str, *, needs_checksum: bool) -> WriterState:
        """Read a writer's state. Raises DamagedTrace and FileNotFoundError."""
        relative = f"{WRITERS}/{name}.json"
        where = self.shown(relative)
        try:
            state = parse_writer_state(self.read_json(relative), where, needs_checksum=needs_checksum)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DamagedTrace(
                f"{where}: cannot be read ({error.strerror or error}); restore it from a copy"
            ) from error
        if state.writer != name:
            raise DamagedTrace(f"{where}: is the state of writer {state.writer!r} under another name; remove it")
        return state


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
