"""A folder that all workers of a test session see, and what is made there once for all of them."""

import fcntl
import hashlib
import os
import shutil
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import gettempdir

import pytest

FOLDER = None
"""The session's folder; tests/conftest.py sets it."""


def set_folder(base):
    """Take the session's folder: of a worker the one above its own."""
    global FOLDER
    FOLDER = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    FOLDER.mkdir(exist_ok=True)


@contextmanager
def locked(path):
    """Hold a lock that the kernel releases if this process dies."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def one_at_a_time():
    """Wait until no other worker has an engine, where there is a GPU: an engine takes most of its memory."""
    return locked(Path(gettempdir()) / "tim-trace-tests.lock") if shutil.which("nvidia-smi") else nullcontext()


def made_once(key, make, base=None):
    """The folder in `base`, else in the session's, that `make(folder)` filled: by the first worker to ask, the others wait.

    A `make` that raises leaves nothing, so that the next one to ask tries again.
    """
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    base = base or FOLDER
    folder, done = base / name, base / f"{name}.done"
    with locked(base / f"{name}.lock"):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def rest_slow(values, num_fast=1):
    """The values of a parameter, of which `make test` runs the first ones."""
    values = list(values)
    return values[:num_fast] + [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values[num_fast:]
    ]
