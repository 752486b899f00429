"""One process at a time in a folder, on file systems that lock it, lock files alone, or lock nothing."""

import errno
import fcntl
import os
import stat
import threading

import pytest
from tim_trace.schemas.documents import Manifest
from tim_trace.schemas.errors import TimTraceWarning
from tim_trace.tracer.create import new_trace
from tim_trace.tracer.whole_file import alone, is_held


def as_nfs(monkeypatch, error=errno.EBADF, *, files=True):
    """Refuse locks as NFS does of folders, which are open for reading alone; without `files`, every lock."""
    real = fcntl.flock

    def flock(descriptor, operation):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) or not files:
            raise OSError(error, os.strerror(error))
        return real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("nfs", [False, True])
def test_two_are_never_in_a_folder_at_once(tmp_path, monkeypatch, nfs):
    if nfs:
        as_nfs(monkeypatch)
    inside, most = [], []

    def enter():
        for _ in range(20):
            with alone(tmp_path) as is_there:
                assert is_there
                inside.append(1)
                most.append(len(inside))
                assert is_held(tmp_path)
                inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 80
    assert max(most) == 1
    assert not is_held(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_is_made_and_replaced_where_only_files_are_locked(tmp_path, monkeypatch):
    as_nfs(monkeypatch)
    manifest = Manifest(run_id="a", created_at="2026-01-01T00:00:00Z", created_by="0", source="recorder")
    for force in (False, True):
        with new_trace(tmp_path / "run", manifest, force=force) as folder:
            assert is_held(folder)
        assert [path.name for path in folder.iterdir()] == ["trace.json"]


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    as_nfs(monkeypatch, errno.ENOSYS, files=False)
    with (
        pytest.warns(TimTraceWarning, match="does not support locks .Function not implemented.; make sure that no two"),
        alone(tmp_path),
    ):
        assert not is_held(tmp_path)
    assert list(tmp_path.iterdir()) == []
