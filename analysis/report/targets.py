"""Files that a report is written to: what lies there stays, and what cannot be written is said."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...schemas.errors import FileThere, StorageError, option


def refuse(paths: Sequence[Path], force: bool) -> None:
    """Raise FileThere where a file lies, unless `force` replaces it, or a folder."""
    there = [path for path in paths if path.is_dir() or (path.exists() and not force)]
    if not there:
        return
    more = f", and {len(there) - 1} more of the same figures" if len(there) > 1 else ""
    way = "name a file in it" if there[0].is_dir() else f"name another place, or replace files with {option('force')}"
    raise FileThere(f"{there[0]}: is {'a folder' if there[0].is_dir() else 'there already'}{more}; {way}")


def local(path: str | os.PathLike[str]) -> Path:
    """A path to write to, as an absolute one.

    Raises StorageError for an address of another storage, and where the folder to write into does not exist: a typo makes none.
    """
    if "://" in os.fspath(path):
        raise StorageError(f"{path}: reports and figures are written to a local folder; name one, and copy it there")
    target = Path(os.path.abspath(os.path.expanduser(path)))
    if not target.parent.is_dir():
        raise StorageError(f"{path}: there is no folder {target.parent}; make it first, or name another place")
    return target


@contextmanager
def explained(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise StorageError in the place of what the operating system says while a file is written."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written ({error.strerror or error}); name a folder on a disk that you may write to"
        ) from error
