"""Read a trace's folder on any file system. Nothing outside the folder is read, whatever its files contain."""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ..schemas.documents import MAX_BYTES, Manifest, WriterState, parse_manifest, parse_writer_state
from ..schemas.errors import DamagedTrace, StorageError, TraceNotFound, of_system
from ..schemas.layout import (
    BUILT_PREFIX,
    FOLDERS,
    MANIFEST,
    PASSES,
    REPLACED_PREFIX,
    REPLACING_PREFIX,
    TEMPORARY_PREFIX,
    TOKENIZER,
    WRITERS,
)  # fmt: skip

_LISTED_RECURSIVELY = (PASSES, TOKENIZER)
"""Folders listed recursively, because they contain few files."""
_READ_BYTES = 64 << 20
"""Maximum size of a single read (bytes), because os.pread allocates the requested size even if the file is shorter."""


_BOTO_TRIES = {"config_kwargs": {"retries": {"total_max_attempts": 1}}}
_S3_TRIES = 2
"""Tries in each retry loop of s3fs. A read passes through two such loops, so 2 tries make 4 attempts (15 s each)."""


def file_system(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    try:
        is_s3 = url.startswith(("s3://", "s3a://"))
        filesystem, path = fsspec.core.url_to_fs(url, **(_BOTO_TRIES if is_s3 else {}))
        if is_s3:
            filesystem.retries = _S3_TRIES
    except OSError as error:
        raise of_system(error, url) from error
    except Exception as error:  # file system libraries raise all kinds of errors
        way = ": pip install s3fs" if is_s3 and isinstance(error, ImportError) else ""
        raise StorageError(
            f"{url}: unsupported file system ({first_line(error)}{way}). Use a folder, or a URL such as s3://bucket/run"
        ) from error
    if not path.strip("/"):
        raise StorageError(f"{url} does not name a folder. Use a URL such as s3://bucket/run")
    return filesystem, path


class _RemoteFileSystem:
    def __init__(self, filesystem: fsspec.AbstractFileSystem, url: str):
        self._filesystem, self._url = filesystem, url

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._filesystem, name)
        if not callable(found):
            return found

        def reached(*arguments: Any, **options: Any) -> Any:
            try:
                return found(*arguments, **options)
            except (FileNotFoundError, NotADirectoryError, NotImplementedError):
                raise
            except Exception as error:  # file system libraries raise all kinds of errors
                raise StorageError(
                    f"{self._url} cannot be reached ({first_line(error)}). Check the URL, your credentials and "
                    "your permissions"
                ) from error

        return reached


class Store:
    """Reads a trace's folder on any file system that fsspec supports.

    `url` is a local path or a URL such as `s3://bucket/runs/7`. Wildcards are not expanded.
    """

    def __init__(self, url: str | os.PathLike[str]):
        self.url = os.fspath(url)
        self.filesystem: fsspec.AbstractFileSystem
        if "://" in self.url:
            self.filesystem, root = file_system(self.url)
            if not self.is_local:
                self.filesystem = _RemoteFileSystem(self.filesystem, self.url)
        else:
            try:
                self.filesystem, root = LocalFileSystem(), os.path.abspath(os.path.expanduser(self.url))
            except FileNotFoundError as error:  # the working directory was removed
                raise of_system(error) from error
        self.root: str = root.rstrip("/")
        self._listed: dict[str, list[dict[str, Any]]] = {}
        """Entries of each remote folder, as of the last call to `look`."""

    @property
    def is_local(self) -> bool:
        return isinstance(self.filesystem, LocalFileSystem)

    @property
    def name(self) -> str:
        """The folder's name, which is also the run's name. Invalid UTF-8 is replaced, because tables require UTF-8."""
        return self.root.rsplit("/", 1)[-1].encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def look(self) -> None:
        if self.is_local:
            return
        self.filesystem.invalidate_cache()
        self._listed = {"": self._list("")}
        there = {name for name, _, is_folder in self._entries("") if is_folder}
        with ThreadPoolExecutor(len(FOLDERS)) as pool:
            self._listed |= zip(
                FOLDERS, pool.map(lambda folder: self._list(folder) if folder in there else [], FOLDERS), strict=True
            )

    def _list(self, folder: str, *, is_deep: bool = False) -> list[dict[str, Any]]:
        path = self.path(folder).rstrip("/")
        try:
            if is_deep or folder in _LISTED_RECURSIVELY:
                return list(self.filesystem.find(path, detail=True).values())
            return list(self.filesystem.ls(path, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _listing(self, folder: str, *, is_deep: bool) -> list[dict[str, Any]]:
        if folder in self._listed and is_deep == (folder in _LISTED_RECURSIVELY):
            return self._listed[folder]
        self.filesystem.invalidate_cache(self.path(folder).rstrip("/"))
        return self._list(folder, is_deep=is_deep)

    def path(self, relative: str) -> str:
        return f"{self.root}/{relative}"

    def shown(self, relative: str) -> str:
        return f"{self.url.rstrip('/')}/{relative}"

    @cached_property
    def _real_root(self) -> str:
        return os.path.realpath(self.root)

    def checked_path(self, relative: str) -> str:
        """Like `path`, but raises DamagedTrace for a link that points outside the folder."""
        if "\0" in relative:
            raise DamagedTrace(f"{self.shown(relative)} is not a valid file name. The trace may be damaged")
        if (real := self.link_out(relative)) is not None:
            raise DamagedTrace(self.link_problem(relative, real))
        return self.path(relative)

    def link_problem(self, relative: str, real: str) -> str:
        return (
            f"{self.shown(relative)} is a link that points outside the trace, to {real}, and is not followed. Replace "
            "it with a copy"
        )

    def exists(self, relative: str) -> bool:
        return bool(self.filesystem.exists(self.checked_path(relative)))

    def read_bytes(self, relative: str, size: int | None = None) -> bytes:
        size = self.file_size(relative) if size is None else size
        if (said := too_large(size)) is not None:
            raise DamagedTrace(f"{self.shown(relative)}: {said}")
        return self.read_range(relative, 0, size)

    def file_size(self, relative: str) -> int:
        path = self.checked_path(relative)
        if not self.is_local:
            entry = self._listed_entry(relative)
            return int((self.filesystem.size(path) if entry is None else entry["size"]) or 0)
        with self._irregular_is_damage(relative):
            return os.stat(path).st_size

    def read_range(self, relative: str, start: int, stop: int) -> bytes:
        path = self.checked_path(relative)
        if not self.is_local:
            return bytes(self.filesystem.cat_file(path, start=start, end=stop)) if stop > start else b""
        # Without O_NONBLOCK, opening a FIFO would block until another process opens it for writing.
        with self._irregular_is_damage(relative):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise DamagedTrace(f"{self.shown(relative)} is not a regular file. Remove it")
            parts = []
            while start < stop and (part := os.pread(descriptor, min(stop - start, _READ_BYTES), start)):
                parts.append(part)
                start += len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            os.close(descriptor)

    @contextmanager
    def _irregular_is_damage(self, relative: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.ELOOP):
                raise
            raise DamagedTrace(f"{self.shown(relative)} is not a regular file ({error.strerror}). Remove it") from error

    def read_json(self, relative: str) -> bytes:
        # Do not query the size first: a live writer may replace the file with a longer one before it is read.
        content = self.read_range(relative, 0, MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            size = self.file_size(relative)
            raise DamagedTrace(f"{self.shown(relative)} has {size:,} bytes, too many for a JSON file in a trace")
        return content

    def _listed_entry(self, relative: str) -> dict[str, Any] | None:
        first = relative.partition("/")[0]
        folder = first if first in _LISTED_RECURSIVELY else relative.rpartition("/")[0]
        path = self.path(relative)
        return next((entry for entry in self._listed.get(folder, ()) if entry["name"] == path), None)

    def _md5(self, folder: str) -> dict[str, str]:
        """Return MD5 hashes by file name. S3 and compatible stores list a small file's MD5 hash as its ETag."""
        found = ((entry["name"].rpartition("/")[2], entry.get("ETag")) for entry in self._listed.get(folder, ()))
        return {name: tag.strip('"') for name, tag in found if isinstance(tag, str)}

    def seen_at(self, relative: str) -> float | None:
        """Return a file's modification time (Unix time), or None if unknown."""
        try:
            found = self.filesystem.modified(self.path(relative))
        except (NotImplementedError, OSError, KeyError):
            return None
        return found.timestamp() if isinstance(found, datetime) else None

    def files(self, folder: str) -> dict[str, int]:
        """Return the sizes (bytes) of finished files directly in a folder, by name. Empty if the folder is missing."""
        found = {name: size for name, size, is_folder in self._entries(folder) if not is_folder}
        return {name: found[name] for name in sorted(found) if name and not name.startswith(TEMPORARY_PREFIX)}

    def folders(self, folder: str) -> list[str]:
        names = (name for name, _, is_folder in self._entries(folder) if is_folder)
        return sorted(name for name in names if not name.startswith(TEMPORARY_PREFIX))

    def _similar(self) -> str:
        """Return the path of a local trace with a similar name, or an empty string."""
        from difflib import get_close_matches  # imported here to keep startup fast

        if not self.is_local:
            return ""
        path, *names = Path(self.root).parts
        with suppress(OSError):
            for name in names:
                is_there = os.path.exists(os.path.join(path, name))
                near = [name] if is_there else get_close_matches(name, os.listdir(path), n=1)
                if not near:
                    return ""
                path = os.path.join(path, *near)
        is_trace = os.path.isfile(os.path.join(path, MANIFEST))
        return (path if os.path.isabs(self.url) else os.path.relpath(path)) if is_trace else ""

    def aside(self) -> list[str]:
        """Return folders left by interrupted replacements of this local trace, newest last."""
        if not self.is_local:
            return []
        names = [f"{REPLACED_PREFIX}*", f"{REPLACING_PREFIX}*"]
        found = [path for name in names for path in Path(self.root).glob(name) if (path / MANIFEST).exists()]
        return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)]

    def arriving_writers(self) -> set[str]:
        """Return writers whose files are still being moved into the trace. Writer states are moved last."""
        building = [name for name, _, is_folder in self._entries("") if is_folder and name.startswith(BUILT_PREFIX)]
        return {file.removesuffix(".json") for name in building for file in self.files(f"{name}/{WRITERS}")}

    def size(self, folder: str) -> int:
        return sum(self.walk(folder).values())

    def walk(self, folder: str) -> dict[str, int]:
        found: dict[str, int] = {}
        if not self.is_local:  # one request lists the whole folder
            base, entries = self.path(folder), self._listing(folder, is_deep=True)
            found = {entry["name"][len(base) :].lstrip("/"): int(entry["size"] or 0) for entry in entries}
            return {name: size for name, size in sorted(found.items()) if f"/{TEMPORARY_PREFIX}" not in f"/{name}"}
        waiting = [""]
        while waiting:
            below = waiting.pop()
            for name, size, is_folder in self._entries(f"{folder}/{below}".rstrip("/")):
                if not name.startswith(TEMPORARY_PREFIX):
                    if is_folder:
                        waiting.append(f"{below}{name}/")
                    else:
                        found[f"{below}{name}"] = size
        return dict(sorted(found.items()))

    def link_out(self, relative: str) -> str | None:
        """Return a path's target if a link in the path leads outside the trace, otherwise None."""
        if not self.is_local or not self._has_link(relative):
            return None
        real = os.path.realpath(self.path(relative))
        return None if real == self._real_root or real.startswith(f"{self._real_root}{os.sep}") else real

    def _has_link(self, relative: str) -> bool:
        """Return True if a path contains a link or `..`. This is ten times faster than resolving the path."""
        path = self.root
        for name in relative.split("/"):
            path = f"{path}/{name}"
            if name == ".." or os.path.islink(path):
                return True
        return False

    def _entries(self, folder: str) -> Iterator[tuple[str, int, bool]]:
        """For each entry of a folder, yield its name, its size in bytes, and whether it is a folder."""
        if self.is_local:
            yield from self._local_entries(folder)
            return
        path = self.path(folder).rstrip("/")
        for entry in self._listing(folder, is_deep=False):
            full = entry["name"].rstrip("/")
            if full != path:
                yield full.rsplit("/", 1)[-1], int(entry["size"] or 0), entry["type"] == "directory"

    def _local_entries(self, folder: str) -> Iterator[tuple[str, int, bool]]:
        """Like `_entries`, for a local folder. A link to a file has that file's size. Links to folders are skipped."""
        if self.link_out(folder) is not None:
            return
        try:
            entries = list(os.scandir(self.path(folder)))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            try:
                is_folder, size = entry.is_dir(), entry.stat().st_size
            except OSError:  # a dangling or circular link, or an entry that has been removed
                is_folder, size = False, 0
                if not os.path.lexists(entry.path):
                    continue
            if not (is_folder and entry.is_symlink()):
                yield entry.name, size, is_folder

    def manifest(self) -> Manifest:
        where = self.shown(MANIFEST)
        try:
            content = self.read_json(MANIFEST)
        except (FileNotFoundError, NotADirectoryError) as error:
            if not self.filesystem.exists(self.root):
                near = self._similar()
                way = f"Record a run with `tim-trace record -o {self.url} -- COMMAND`"
                raise TraceNotFound(f"{self.url} does not exist. {f'Did you mean {near}?' if near else way}") from error
            if aside := self.aside():
                raise TraceNotFound(
                    f"{self.url}: a process died while replacing the trace here, but no data is lost. The next "
                    f"`tim-trace record` or `import` to this folder restores it, or run: mv "
                    f"{shlex.quote(self.shown(aside[-1]))}/* {shlex.quote(self.url)}"
                ) from error
            raise TraceNotFound(
                f"{self.url} has no {MANIFEST}, so it is not a trace. Pass the folder written by `tim-trace record "
                "-o` or `tim-trace import`"
            ) from error
        except StorageError:
            raise
        except OSError as error:
            raise DamagedTrace(f"{where} cannot be read ({error}). Check the path and its permissions") from error
        return parse_manifest(content, where)

    def writers(
        self, manifest: Manifest | None = None, known_state: Callable[..., WriterState | None] = lambda *_, **__: None
    ) -> tuple[list[WriterState], list[str]]:
        """Read every writer's state. Also return a sentence for each unreadable state."""
        manifest = manifest or self.manifest()
        names = [name for name in self.files(WRITERS) if name.endswith(".json")]
        known = {name: known_state(f"{WRITERS}/{name}", md5=md5) for name, md5 in self._md5(WRITERS).items()}
        contents = self._read_many(WRITERS, [name for name in names if known.get(name) is None])
        known |= {name: known_state(f"{WRITERS}/{name}", content=content) for name, content in contents.items()}
        states, damaged = [], []
        for name in names:
            try:
                state, writer = known.get(name), name.removesuffix(".json")
                if state is None:
                    state = self.writer(writer, manifest, contents.get(name))
                else:
                    self._check_writer(state, writer, manifest)
                states.append(state)
            except FileNotFoundError:
                continue
            except DamagedTrace as error:
                damaged.append(str(error))
        return states, damaged

    def writers_named(self, *prefixes: str) -> list[WriterState]:
        """Read the states of local writers whose names start with one of `prefixes`, skipping unreadable states.

        Besides these states, only the manifest is read, because every rank calls this when it starts, often on a shared
        file system.
        """
        manifest, states = self.manifest(), []
        with suppress(FileNotFoundError):
            names = [
                name for name in os.listdir(self.path(WRITERS)) if name.startswith(prefixes) and name.endswith(".json")
            ]
            for name, content in self._read_local(WRITERS, sorted(names)):
                with suppress(DamagedTrace):
                    states.append(self.writer(name.removesuffix(".json"), manifest, content))
        return states

    def _read_many(self, folder: str, names: Collection[str]) -> dict[str, bytes]:
        if not names:
            return {}
        if self.is_local:
            return dict(self._read_local(folder, names))
        sizes = self.files(folder)
        paths = {self.path(f"{folder}/{name}"): name for name in names if sizes[name] <= MAX_BYTES}
        found = self.filesystem.cat(list(paths), on_error="return")
        return {paths[path]: bytes(content) for path, content in found.items() if isinstance(content, bytes)}

    def _read_local(self, folder: str, names: Collection[str]) -> Iterator[tuple[str, bytes]]:
        """Yield a local folder's regular files, by name. Its path is checked for links only once. Links are skipped."""
        if self.link_out(folder) is not None:
            return
        try:
            directory = os.open(self.path(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            for name in names:
                try:
                    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
                    descriptor = os.open(name, flags, dir_fd=directory)
                except OSError:  # the file is a link, or has been removed
                    continue
                try:
                    found = os.fstat(descriptor)
                    if stat.S_ISREG(found.st_mode) and found.st_size <= MAX_BYTES:
                        yield name, os.pread(descriptor, found.st_size, 0)
                except OSError:
                    continue
                finally:
                    os.close(descriptor)
        finally:
            os.close(directory)

    def writer(self, name: str, manifest: Manifest | None = None, content: bytes | None = None) -> WriterState:
        manifest = manifest or self.manifest()
        relative = f"{WRITERS}/{name}.json"
        where = self.shown(relative)
        try:
            content = self.read_json(relative) if content is None else content
            state = parse_writer_state(content, where, needs_checksum=manifest.checksums)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise unreadable(where, error) from error
        self._check_writer(state, name, manifest)
        return state

    def _check_writer(self, state: WriterState, name: str, manifest: Manifest) -> None:
        where = self.shown(f"{WRITERS}/{name}.json")
        if state.writer != name:
            raise DamagedTrace(f"{where} contains the state of a different writer, {state.writer!r}. Remove it")
        if state.run_id != manifest.run_id:
            raise DamagedTrace(
                f"{where} belongs to run {state.run_id}, but {self.shown(MANIFEST)} belongs to run {manifest.run_id}. "
                "One of the two files is wrong: restore it from a backup"
            )


def unreadable(where: str, error: OSError) -> DamagedTrace | StorageError:
    """Return the error for an unreadable file. An unreachable file system does not count as damage."""
    if isinstance(error, StorageError):
        return error
    return damaged(f"{where} cannot be read ({error.strerror or error})")


def damaged(what: str) -> DamagedTrace:
    return DamagedTrace(f"{what}. Restore it from a backup")


def too_large(size: int, times: int = 2) -> str | None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size * times <= memory:
        return None
    return f"reading it would take about {size * times:,} bytes of memory, but this machine has {memory:,}"


def listed(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
