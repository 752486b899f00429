"""Whether a writer still writes, of traces from other machines, other namespaces and processes whose number was taken."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from builders import ROOT, TIM_TRACE, add_step, make_batch, run, tim_trace
from tim_trace.analysis.info import info
from tim_trace.analysis.info_text import info_text
from tim_trace.schemas.documents import to_document
from tim_trace.schemas.errors import TraceExists
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.seal import adopt

NEVER = "ffffffff-0000-4000-8000-000000000000"


KILLED = """
import os, signal, sys
from builders import add_step, make_batch
from tim_trace.tracer.recorder import Recorder

recorder = Recorder(sys.argv[1])
add_step(recorder, 1, make_batch())
recorder.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory):
    path = tmp_path_factory.mktemp("killed") / "run"
    # A new interpreter: a fork of this process, which has threads and many libraries, sometimes crashes.
    done = run(sys.executable, "-c", KILLED, path, cwd=ROOT / "tests")
    assert done.code == -signal.SIGKILL, done.stderr
    return path


@pytest.fixture
def killed(killed_once, tmp_path):
    """A trace whose writer was killed with everything in its journal."""
    shutil.copytree(killed_once, tmp_path / "run")
    return tmp_path / "run"


def state_file(path):
    (file,) = (path / "writers").glob("p*.json")
    return file


def change(path, *, touched_s_ago=None, **fields):
    """Give the state of the writer other fields, with a right checksum, and all of its files another age."""
    state = json.loads(state_file(path).read_text())
    state.pop("checksum")
    state_file(path).write_text(to_document(state | fields))
    if touched_s_ago is not None:
        when = time.time() - touched_s_ago
        for file in (state_file(path), *(path / "journal").iterdir()):
            os.utime(file, (when, when))


def judged(path):
    found = info(str(path))
    (writer,) = found.writers
    return writer.state, writer.known_by


def was_adopted(path):
    """Whether adopting sealed the journal, as it does where the writer has ended."""
    adopt(path)
    return not (path / "journal").exists() and bool(list((path / "sequences").glob("*.parquet")))


OTHER_HOST = {"host": "elsewhere", "boot_id": NEVER}
OTHER_NAMESPACE = {"pid_namespace": "pid:[1]"}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [OTHER_HOST, OTHER_NAMESPACE])
@pytest.mark.parametrize(("touched_s_ago", "is_live"), [(0, True), (800, True), (1000, False), (10**6, False)])
def test_a_writer_that_cannot_be_seen_from_here_is_judged_by_its_age(killed, fields, touched_s_ago, is_live):
    change(killed, touched_s_ago=touched_s_ago, **fields)
    assert judged(killed) == ("live" if is_live else "killed", "age")
    text = info_text(info(str(killed)))
    assert f"counts as {'live' if is_live else 'ended'}: its process cannot be seen from here" in text
    assert "its last heartbeat was" in text
    assert len(info(str(killed)).judged) == 1
    if is_live:
        with pytest.raises(TraceExists, match="is being recorded"):
            Recorder(killed, force=True)
    assert was_adopted(killed) is not is_live
    assert info(str(killed)).num_sequences == 4


def test_an_open_journal_is_a_sign_though_the_state_is_old(killed):
    change(killed, touched_s_ago=10**6, **OTHER_HOST)
    (journal,) = (killed / "journal").glob("*.sequences.arrows")
    os.utime(journal)
    assert judged(killed) == ("live", "age")
    assert "counts as live" in tim_trace("info", killed, "--json").json()["judged"][0]


@pytest.mark.parametrize("touched_s_ago", [0, 10**6])
def test_a_killed_process_of_this_machine_is_known_to_have_ended(killed, touched_s_ago):
    change(killed, touched_s_ago=touched_s_ago)
    assert judged(killed) == ("killed", "process")
    assert "counts as" not in info_text(info(str(killed)))
    assert was_adopted(killed)


def test_another_process_with_the_number_of_the_writer_is_not_the_writer(killed):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        change(killed, pid=other.pid)
        assert judged(killed) == ("killed", "process")
        assert was_adopted(killed)
        other.communicate(b"\n")


def test_the_writer_itself_is_live_however_old_its_files_are(tmp_path):
    recorder = Recorder(tmp_path / "run")
    add_step(recorder, 1, make_batch())
    recorder.flush()
    change(tmp_path / "run", touched_s_ago=10**6)
    assert judged(tmp_path / "run") == ("live", "process")
    assert not was_adopted(tmp_path / "run")
    with pytest.raises(TraceExists, match=f"is being recorded \\(process {os.getpid()}"):
        Recorder(tmp_path / "run", force=True)
    recorder.close()
    assert judged(tmp_path / "run") == ("finished", "closed")


@pytest.mark.parametrize(("touched_s_ago", "expected"), [(10**9, ("killed", "restarted")), (0, ("live", "age"))])
def test_a_machine_that_was_started_anew_since_has_no_writer_of_before(killed, touched_s_ago, expected):
    change(killed, touched_s_ago=touched_s_ago, boot_id=NEVER)
    assert judged(killed) == expected
    if expected[1] == "restarted":
        assert "this machine has been restarted" in info_text(info(str(killed)))
    assert was_adopted(killed) is (expected[0] == "killed")


@pytest.mark.slow
def test_a_recording_is_live_before_anything_is_recorded_and_is_not_replaced(tmp_path):
    command = ["record", "-o", tmp_path / "run", "--", sys.executable, "-c", "print('up', flush=True); input()"]
    with subprocess.Popen(
        [TIM_TRACE, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout.readline() == "up\n"
        assert info(str(tmp_path / "run")).state == "live"
        for options in (["--force"], ["--resume"], []):
            done = tim_trace("record", "-o", tmp_path / "run", *options, "--", "true")
            assert done.code == 2
            assert ("is being recorded" if options else "a trace already exists there") in done.stderr
        process.communicate("\n")
    assert process.returncode == 0
    assert info(str(tmp_path / "run")).state == "finished"
