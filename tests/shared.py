"""A folder that all workers of a test session see, and what is made there once for all of them."""

import fcntl
import hashlib
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

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


def made_once(key, make):
    """The folder that `make(folder)` filled. The first worker to ask makes it, the others wait for it.

    A `make` that raises leaves nothing, so that the next one to ask tries again.
    """
    if FOLDER is None:
        set_folder(Path(mkdtemp(prefix="tim-trace-tests-")))
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    folder, done = FOLDER / name, FOLDER / f"{name}.done"
    with locked(FOLDER / f"{name}.lock"):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
