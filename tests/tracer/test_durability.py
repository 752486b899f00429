"""What was acknowledged survives `kill -9`; `python tests/stress.py durability` has the long form."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from builders import ROOT, add_step, make_batch
from shared import rest_slow
from stress import durability, kill_recording
from tim_trace.analysis.info import info
from tim_trace.tracer import segments
from tim_trace.tracer.recorder import Recorder


@pytest.mark.slow
def test_what_add_returned_for_is_on_disk_a_second_later(tmp_path):
    found = durability(tmp_path, seed=11, count=3)
    assert found.lost == 0
    assert found.due + found.flushed > 0


@pytest.mark.parametrize("pause_s", rest_slow([0, 0.3]))
def test_after_flush_nothing_is_lost_at_all(tmp_path, pause_s):
    found = kill_recording(tmp_path / "run", writers=2, pause_s=pause_s, flushes=1, after_s=1.0)
    assert found.lost == 0
    assert found.flushed > 0


SYNCS = """
import os, sys
sys.path.insert(0, sys.argv[1])
from builders import add_step, make_batch
from tim_trace.tracer.recorder import Recorder
synced = []
real = os.fsync
def fsync(descriptor):
    synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    real(descriptor)
os.fsync = fsync
recorder = Recorder(sys.argv[2])
recorder.writer.segments.seal_bytes = 3000
for step in range(1, 6):
    if step == 4:  # what comes now stays in the journal
        recorder.writer.submit(recorder.writer.segments.seal, 0)
        recorder.flush()
        recorder.writer.segments.seal_bytes = 1 << 30
    add_step(recorder, step, make_batch(rows=8, seed=step))
recorder.add_contract("train", {"dtype": "float32"})
recorder.flush()
assert not synced, synced
recorder.flush(sync=True)
print(*synced, sep="\\n")
"""


def test_a_synced_flush_asks_the_disk_for_every_file_and_its_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SYNCS, ROOT / "tests", tmp_path / "run"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    synced = set(done.stdout.split())
    run = tmp_path / "run"
    files = {str(path) for path in run.rglob("*") if path.is_file() and not path.name.startswith(".tmp-")}
    kinds = {name.removeprefix(f"{run}/").split("/")[0] for name in files}
    assert kinds >= {"trace.json", "writers", "sequences", "scores", "passes", "journal"}
    assert files <= synced, files - synced
    inside = {str(above) for path in files for above in Path(path).parents if run in above.parents}
    assert str(run / "passes" / "train") in inside
    folders = inside | {str(run), str(tmp_path)}
    assert folders <= synced, folders - synced


SYNCS_WHILE_SEALING = """
import sys
sys.path.insert(0, sys.argv[1])
from builders import add_step, make_batch
from tim_trace.tracer.recorder import Recorder
with Recorder(sys.argv[2]) as recorder:
    recorder.writer.segments.seal_bytes = 4000
    for step in range(1, 61):
        add_step(recorder, step, make_batch(seed=step))
        assert recorder.flush(sync=True), step
"""


@pytest.mark.slow
def test_processes_that_sync_while_their_segments_are_sealed_all_record_to_the_end(tmp_path):
    """One alone seldom meets the moment in which a journal gives way to its files; several that take turns do."""
    command = [sys.executable, "-c", SYNCS_WHILE_SEALING, ROOT / "tests"]
    processes = [
        subprocess.Popen([*command, tmp_path / str(number)], stderr=subprocess.PIPE, text=True) for number in range(6)
    ]
    for number, process in enumerate(processes):
        said = process.communicate()[1]
        assert process.returncode == 0, said
        assert info(str(tmp_path / str(number))).num_sequences == 240


def test_a_journal_that_was_synced_goes_only_when_its_files_are(tmp_path, monkeypatch):
    """Sealing is held before the handover, while the journal is synced; what the disk was asked for comes in order."""
    gate, order = threading.Event(), []
    sealed, unlink, fsync = segments.seal_table, Path.unlink, os.fsync

    def seal(*args):
        files = sealed(*args)
        gate.wait(240)
        return files

    def synced(descriptor):
        order.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def removed(path, **options):
        order.append(f"removed {path}")
        unlink(path, **options)

    monkeypatch.setattr(segments, "seal_table", seal)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "unlink", removed)
    recorder = Recorder(tmp_path / "run")
    recorder.writer.segments.seal_bytes = 3000
    add_step(recorder, 1, make_batch(rows=8))
    assert recorder.flush(sync=True)
    gate.set()
    assert recorder.close()
    removals = [
        (place, Path(name).name)
        for place, name in enumerate(order)
        if name.startswith("removed ") and name.endswith(".arrows")
    ]
    assert len(removals) >= 2
    for place, name in removals:
        segment, table, _ = name.rsplit(".", 2)
        before = order[:place]
        assert str(tmp_path / "run" / table / f"{segment}.parquet") in before
        assert str(tmp_path / "run" / table) in before
