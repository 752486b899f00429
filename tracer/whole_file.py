"""Write a trace's files atomically, and lock its folder if the file system supports locks."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..schemas.errors import StorageError, warn
from ..schemas.layout import BUILT_PREFIX, TEMPORARY_PREFIX, WHOLE_TRACES, WRITERS, is_temporary

_MOVED_WITHIN_S = 10.0
"""Temporary state files younger than this (seconds) are kept, because a writer may be about to move them into place."""


def write_whole(path: Path, content: bytes) -> None:
    with whole_file(path) as temporary:
        temporary.write_bytes(content)


def write_part(folder: Path, relative: str, content: bytes) -> None:
    with trace_file(folder, relative) as temporary:
        temporary.write_bytes(content)


def write_once(path: Path, content: bytes) -> bool:
    """Write a file unless it exists. Returns True if this process wrote it."""
    temporary = _beside(path)
    temporary.write_bytes(content)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:  # without hard links, the last process to write the file wins
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return True


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path that is moved to `path` at the end, or removed after an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        remove(temporary)
        raise


@contextmanager
def trace_file(folder: Path, relative: str) -> Iterator[Path]:
    """Like `whole_file`, but for a file in a trace. Raises FileNotFoundError if the trace was removed."""
    check_there(folder)
    check_inside(folder, relative)
    with whole_file(folder / relative) as temporary:
        yield temporary


@contextmanager
def unnamed_file(folder: Path, kind: str) -> Iterator[Path]:
    check_there(folder)
    check_inside(folder, f"{kind}/unnamed")
    (folder / kind).mkdir(exist_ok=True)
    temporary = _beside(folder / kind / "unnamed")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def check_there(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the trace's folder was removed during recording", str(folder))


def check_inside(folder: Path, relative: str) -> None:
    place = folder
    for name in Path(relative).parent.parts:
        place = place / name
        if place.is_symlink():
            raise _is_link(place)


def check_no_links(folder: Path) -> None:
    for base, names, _ in os.walk(folder):
        for name in names:
            if os.path.islink(os.path.join(base, name)):
                raise _is_link(Path(base, name))


def _is_link(place: Path) -> StorageError:
    return StorageError(
        f"{place} is a link, and traces are written only to their own folders. Replace it with a copy of its target"
    )


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporaries(folder: Path) -> None:
    """Remove killed writers' temporary files. Call this only if no writer is alive."""
    for path in sorted(folder.rglob(f"{TEMPORARY_PREFIX}*")):
        is_left = path.parent != folder / WRITERS or _age_s(path) > _MOVED_WITHIN_S
        if is_left and is_temporary(path.name) and not path.relative_to(folder).parts[0].startswith(WHOLE_TRACES):
            remove(path)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _beside(path: Path) -> Path:
    return path.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}-{path.name}"


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


LOCK = f"{BUILT_PREFIX}{'0' * 32}"
"""Lock file for folders that cannot be locked themselves (NFS). Its prefix makes readers ignore it."""


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Hold a folder's lock during a `with` block, after waiting for other processes to release it.

    If the file system does not support locks, warns and continues. Yields False if the lock's previous holder removed
    the folder. Raises FileNotFoundError if the folder was missing from the start.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    file = None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            file = _locked_file(folder)
        yield _is_there(folder, descriptor)
    finally:
        if file is not None:
            (folder / LOCK).unlink(missing_ok=True)
            os.close(file)
        os.close(descriptor)


def is_held(folder: Path) -> bool:
    """Return True if a process holds a folder's lock. Returns False if the file system does not support locks."""
    for path, flags in ((folder, os.O_RDONLY | os.O_DIRECTORY), (folder / LOCK, os.O_RDWR)):
        try:
            descriptor = os.open(path, flags)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # some file systems (NFS) can lock files but not folders
            continue
        finally:
            os.close(descriptor)
        return False
    return False


def _locked_file(folder: Path) -> int | None:
    while True:
        file = None
        try:
            file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_there(folder / LOCK, file):  # False if the previous holder has removed the file
                return file
        except OSError as error:
            if file is not None:
                (folder / LOCK).unlink(missing_ok=True)
                os.close(file)
            advice = "make sure that no two commands write there at once"
            warn(
                f"{folder}: its file system does not support locks ({error.strerror}); {advice}",
            )
            return None
        os.close(file)


def _is_there(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(folder), os.fstat(descriptor))
    except OSError:
        return False
