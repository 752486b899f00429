"""What was acknowledged survives `kill -9`; `python tests/stress.py durability` has the long form."""

import subprocess
import sys
from pathlib import Path

import pytest
from builders import ROOT
from shared import rest_slow
from stress import durability, kill_recording


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
