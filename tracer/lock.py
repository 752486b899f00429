"""Exclusive access to a folder, if the file system supports locks."""

from __future__ import annotations

import fcntl
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..schemas.errors import TimTraceWarning
from ..schemas.layout import BUILT_PREFIX

LOCK = f"{BUILT_PREFIX}{'0' * 32}"
"""Name of the lock file where folders cannot be locked, as on NFS; readers ignore files with this prefix."""


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Lock a folder for the block, waiting for other processes; if the file system has no locks, warn and continue.

    Yields whether the folder still exists: the previous holder may have removed it. Raises FileNotFoundError if it is
    missing at first.
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
    """Return True if a process holds a folder's lock from `alone`; False if the file system has no locks."""
    for path, flags in ((folder, os.O_RDONLY | os.O_DIRECTORY), (folder / LOCK, os.O_RDWR)):
        try:
            descriptor = os.open(path, flags)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # folders cannot be locked here, but perhaps files
            continue
        finally:
            os.close(descriptor)
        return False
    return False


def _locked_file(folder: Path) -> int | None:
    """Wait for the lock on the folder's lock file, and return its descriptor; warn and return None without locks."""
    while True:
        file = None
        try:
            file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_there(folder / LOCK, file):  # otherwise the previous holder has removed the file
                return file
        except OSError as error:
            if file is not None:
                (folder / LOCK).unlink(missing_ok=True)
                os.close(file)
            advice = "make sure that no two commands write there at once"
            warnings.warn(
                f"{folder}: does not support locks ({error.strerror}); {advice}", TimTraceWarning, stacklevel=3
            )
            return None
        os.close(file)


def _is_there(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(folder), os.fstat(descriptor))
    except OSError:
        return False
