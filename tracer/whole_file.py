"""Writing files into a trace so that each appears whole."""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..schemas.errors import StorageError
from ..schemas.layout import TEMPORARY_PREFIX, WHOLE_TRACES, WRITERS, is_temporary

_MOVED_WITHIN_S = 10.0
"""How long a writer's first state may lie beside its place."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place and move it there, so that no reader meets half of it."""
    with whole_file(path) as temporary:
        temporary.write_bytes(content)


def write_part(folder: Path, relative: str, content: bytes) -> None:
    """Write a file of a trace. Raises FileNotFoundError when the trace's folder is not there any more."""
    with trace_file(folder, relative) as temporary:
        temporary.write_bytes(content)


def write_once(path: Path, content: bytes) -> bool:
    """Give `path` this content unless another process was first; return whether it was not."""
    temporary = _beside(path)
    temporary.write_bytes(content)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links: the last of several equal writers wins
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return True


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a temporary path; what is written there takes `path`'s place at the end, and is removed on an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        _remove(temporary)
        raise


@contextmanager
def trace_file(folder: Path, relative: str) -> Iterator[Path]:
    """`whole_file` in a trace. Raises FileNotFoundError when its folder is not there any more: it is not made again.

    Raises StorageError where a link would lead elsewhere.
    """
    check_there(folder)
    check_inside(folder, relative)
    with whole_file(folder / relative) as temporary:
        yield temporary


@contextmanager
def unnamed_file(folder: Path, kind: str) -> Iterator[Path]:
    """Give a temporary path in a folder of a trace, for a file that is named for its content, and moved by the caller."""
    check_there(folder)
    check_inside(folder, f"{kind}/unnamed")
    (folder / kind).mkdir(exist_ok=True)
    temporary = _beside(folder / kind / "unnamed")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def check_there(folder: Path) -> None:
    """Raise FileNotFoundError when a trace's folder was removed while it was recorded."""
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the trace's folder was removed while it was recorded", str(folder))


def check_inside(folder: Path, relative: str) -> None:
    """Raise StorageError when a folder of a trace, on the way to one of its files, is a link: it would be written elsewhere."""
    place = folder
    for name in Path(relative).parent.parts:
        place = place / name
        if place.is_symlink():
            raise _is_link(place)


def check_no_links(folder: Path) -> None:
    """Raise StorageError when any folder of a trace is a link."""
    for base, names, _ in os.walk(folder):
        for name in names:
            if os.path.islink(os.path.join(base, name)):
                raise _is_link(Path(base, name))


def _is_link(place: Path) -> StorageError:
    return StorageError(
        f"{place}: is a link, and a trace is written in its own folders alone; put a copy of what it leads to in its place"
    )


def sync(path: Path) -> None:
    """Have what a file holds, or which names a folder holds, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporaries(folder: Path) -> None:
    """Remove what killed writers left half-written; only when no writer of the trace is alive. Whole traces are left.

    A state that was made just now stays, too: its writer may be about to move it to its place.
    """
    for path in sorted(folder.rglob(f"{TEMPORARY_PREFIX}*")):
        is_left = path.parent != folder / WRITERS or _age_s(path) > _MOVED_WITHIN_S
        if is_left and is_temporary(path.name) and not path.relative_to(folder).parts[0].startswith(WHOLE_TRACES):
            _remove(path)


def _age_s(path: Path) -> float:
    """Seconds since a file was written; 0 where it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _beside(path: Path) -> Path:
    return path.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}-{path.name}"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
