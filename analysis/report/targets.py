"""Check output paths before writing anything, and explain write errors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...schemas.errors import FileThere, StorageError, option


def refuse(paths: Sequence[Path], force: bool) -> None:
    """Raise FileThere if a path is a folder, or if it is an existing file and `force` is off."""
    there = [path for path in paths if path.is_dir() or (path.exists() and not force)]
    if not there:
        return
    num = len(there) - 1
    more = f" ({num} more outputs exist)" if num > 1 else " (one more output exists)" if num else ""
    kind, way = "an existing file", f"choose another path, or overwrite with {option('force')}"
    if there[0].is_dir():
        kind, way = "a folder", "pass a file path inside it"
    raise FileThere(f"{there[0]} is {kind}{more}; {way}")


def local(path: str | os.PathLike[str]) -> Path:
    """Return an output's absolute path. Raises StorageError if it is a URL or if its parent folder is missing."""
    if "://" in os.fspath(path):
        raise StorageError(
            f"{path}: reports and figures can only be written to a local folder; write them there, then copy them"
        )
    target = Path(os.path.abspath(os.path.expanduser(path)))
    if not target.parent.is_dir():
        raise StorageError(f"{path}: folder {target.parent} does not exist; create it, or choose another path")
    return target


@contextmanager
def explained(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise StorageError(f"{path} cannot be written ({why}); choose a folder that you can write to") from error
