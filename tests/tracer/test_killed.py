import random
import signal
import subprocess
import sys

import pytest
from builders import PROGRAMS, make_batch, tim_trace
from shared import rest_slow
from tim_trace.analysis.info import info
from tim_trace.analysis.views import connect
from tim_trace.tracer.dense import read_dense
from tim_trace.tracer.seal import adopt
from tim_trace.tracer.store import Store


def kill_after(path, steps, capture="logprobs"):
    """Kill the program once it has told `steps` steps, and return the last step that it told."""
    program = [sys.executable, PROGRAMS / "endless.py", path, capture]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        told = 0
        for line in process.stdout:
            told = int(line)
            if told >= steps:
                process.send_signal(signal.SIGKILL)
                break
        told = max([told, *(int(line) for line in process.stdout)])
        assert process.wait() == -signal.SIGKILL
    return told


def check_steps(path, told):
    """Every step that was told is there as it was recorded, and nothing is there twice."""
    connection = connect(path)
    sequences = connection.execute(
        "SELECT step, seq_id, response_ids FROM sequences ORDER BY step, seq_id::INT"
    ).fetchall()
    steps = {step for step, _, _ in sequences}
    assert set(range(1, told + 1)) <= steps <= set(range(1, told + 3))
    for step in range(1, told + 1):
        batch = make_batch(rows=16, seed=step)
        assert [ids for s, _, ids in sequences if s == step] == batch["response_ids"]
    assert len(sequences) == len({(step, name) for step, name, _ in sequences})
    query = 'SELECT "pass", step, seq_id, logprobs FROM scores WHERE step <= ? ORDER BY step, seq_id::INT'
    scores = connection.execute(query, [told]).fetchall()
    for name in ("rollout", "train"):
        found = [values for n, _, _, values in scores if n == name]
        assert found == [row.tolist() for step in range(1, told + 1) for row in make_batch(16, seed=step)[name]]
    metrics = connection.execute("SELECT step, value FROM metrics WHERE step <= ? ORDER BY step", [told]).fetchall()
    assert metrics == [(step, float(step)) for step in range(1, told + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_killed_writer_loses_nothing_that_was_appended(tmp_path, seed):
    # The moments fall before, in and after sealing, which comes about every tenth step.
    told = kill_after(tmp_path / "run", random.Random(seed).randint(1, 60))
    check_steps(tmp_path / "run", told)
    found = info(str(tmp_path / "run"))
    assert found.state == "killed"
    assert any("exited without closing" in sentence for sentence in found.missing)


@pytest.mark.slow
def test_a_killed_writers_journal_can_be_sealed_by_another_process(tmp_path):
    told = kill_after(tmp_path / "run", 25)
    adopt(tmp_path / "run")
    assert not (tmp_path / "run" / "journal").exists()
    check_steps(tmp_path / "run", told)


@pytest.mark.parametrize("sealed", rest_slow([False, True]))
def test_captured_distributions_survive_a_kill(tmp_path, sealed):
    told = kill_after(tmp_path / "run", 9, "topk:2")
    if sealed:
        adopt(tmp_path / "run")
    rows = connect(tmp_path / "run").execute(
        "SELECT step, dense, dense_start, len(logprobs) FROM scores WHERE \"pass\" = 'train' AND step <= ?", [told]
    )
    for step, group, start, tokens in rows.fetchall():
        arrays = read_dense(Store(tmp_path / "run"), group, start, tokens)
        assert arrays["token_ids"].tolist() == [[step, step]] * tokens


@pytest.mark.slow
def test_info_of_a_killed_recording_says_so_and_goes_on(tmp_path):
    kill_after(tmp_path / "run", 3)
    shown = tim_trace("info", tmp_path / "run")
    assert shown.code == 0
    assert "killed: a writer exited without closing" in shown.stdout
    assert tim_trace("stats", tmp_path / "run").code == 0
