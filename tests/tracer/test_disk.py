import os
import shutil
import subprocess
import sys
import threading

import pytest
from builders import PROGRAMS, add_step, make_batch, make_trace, run, tim_trace
from tim_trace.analysis.info import info
from tim_trace.analysis.views import connect
from tim_trace.schemas.errors import DamageWarning, StorageError
from tim_trace.tracer.recorder import Recorder


def check_stopped(done, path):
    assert done.code == 0
    assert done.stdout == "trained to the end\n"
    assert done.stderr.count("RECORDING STOPPED") == 1
    assert f"tim-trace info {path}" in done.stderr
    found = info(str(path))
    assert found.state == "stopped"
    assert any("stopped recording early: OSError" in sentence for sentence in found.missing)
    with pytest.warns(DamageWarning, match="stopped recording early"):
        connection = connect(path)
    steps = connection.execute("SELECT count(DISTINCT step), max(step) FROM sequences").fetchone()
    assert 0 < steps[0] == steps[1] < 2000


@pytest.mark.slow
def test_when_files_may_grow_no_more_training_goes_on_and_what_was_recorded_stays(tmp_path):
    done = run(sys.executable, PROGRAMS / "fills_disk.py", tmp_path / "run", 200_000)
    check_stopped(done, tmp_path / "run")


@pytest.mark.slow
def test_a_full_disk_ends_the_recording_and_marks_the_trace(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", mount], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this machine does not let tests mount a small disk")
    try:
        done = run(sys.executable, PROGRAMS / "fills_disk.py", mount / "run", 0)
        check_stopped(done, mount / "run")
        assert "No space left on device" in done.stderr
    finally:
        subprocess.run(["umount", mount], check=True)


@pytest.mark.slow
def test_a_slow_disk_makes_training_wait_and_drops_nothing(tmp_path, monkeypatch):
    gate = threading.Event()
    with Recorder(tmp_path / "run", queue_bytes=1) as recorder:
        append = recorder.writer.segments.append
        monkeypatch.setattr(recorder.writer.segments, "append", lambda *args: (gate.wait(), append(*args)))
        threading.Timer(1.0, gate.set).start()  # long after a second task is submitted, on a busy machine, too
        for step in range(1, 21):
            add_step(recorder, step, make_batch(seed=step))
    assert recorder.writer.state.waited_s > 0.2
    assert connect(tmp_path / "run").execute("SELECT count(*) FROM scores").fetchone() == (160,)
    (writer,) = info(str(tmp_path / "run")).writers
    assert writer.waited_s > 0.2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match=r"run cannot be written \(Permission denied\)\. Use a folder"):
        Recorder(tmp_path / "run")


def test_a_path_through_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=r"cannot be written \(Not a directory\)"):
        Recorder(tmp_path / "file" / "run")


def test_a_read_only_trace_can_be_read(tmp_path):
    make_trace(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    done = tim_trace("stats", tmp_path / "run", "--by", "step")
    assert done.code == 0
    shutil.rmtree(tmp_path / "run" / "sums")
    (tmp_path / "run" / "sums").write_text("in the way: sums cannot be kept here")
    assert tim_trace("stats", tmp_path / "run", "--by", "step").stdout == done.stdout
    kept = {"sums", "index"}
    assert before == [path for path in sorted(tmp_path.rglob("*")) if kept.isdisjoint(path.relative_to(tmp_path).parts)]
