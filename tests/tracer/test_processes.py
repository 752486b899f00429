import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import PROGRAMS, ROOT, make_batch, run, tim_trace
from tim_trace.analysis.info import info
from tim_trace.analysis.views import connect
from tim_trace.schemas.errors import TraceExists
from tim_trace.tracer.recorder import Recorder

TORCHRUN = Path(sys.executable).parent / "torchrun"


@pytest.mark.slow
def test_two_ranks_write_one_trace_each_with_its_own_files(tmp_path):
    done = run(TORCHRUN, "--standalone", "--nproc-per-node", 2, PROGRAMS / "ranks.py", tmp_path / "run")
    assert done.code == 0, done.stderr
    found = info(str(tmp_path / "run"))
    assert [(writer.state, writer.rank, writer.num_sequences) for writer in found.writers] == [
        ("finished", 0, 40),
        ("finished", 1, 40),
    ]
    assert found.missing == ()
    assert len(list((tmp_path / "run" / "scores").glob("*.parquet"))) == 2
    rows = connect(tmp_path / "run").execute("SELECT seq_id, response_ids FROM sequences WHERE step = 3").fetchall()
    assert dict(rows) == {
        f"r{rank}-{row}": make_batch(seed=100 * rank + 3)["response_ids"][row] for rank in (0, 1) for row in range(4)
    }


def test_a_second_run_of_ranks_into_the_same_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    Recorder(tmp_path / "run").close()
    with pytest.raises(TraceExists, match=r"writer for rank 0 is closed.*force=True"):
        Recorder(tmp_path / "run")


@pytest.mark.slow
def test_children_of_a_recorded_process_record_with_files_of_their_own(tmp_path):
    done = tim_trace("record", "-o", tmp_path / "run", "--", sys.executable, PROGRAMS / "forks.py")
    assert done.code == 0, done.stderr
    found = info(str(tmp_path / "run"))
    assert found.missing == ()
    assert sorted((writer.state, writer.num_sequences) for writer in found.writers) == [
        ("finished", 4), ("finished", 4), ("finished", 8),
    ]  # fmt: skip
    names = connect(tmp_path / "run").execute("SELECT DISTINCT split_part(seq_id, '-', 1) FROM sequences ORDER BY 1")
    assert names.fetchall() == [("fork",), ("parent",), ("spawn",)]


RANK = """
import sys
sys.path.insert(0, sys.argv[1])
from builders import add_step, make_batch
from tim_trace.schemas.errors import TraceExists
from tim_trace.tracer.recorder import Recorder
try:
    recorder = Recorder(sys.argv[2], join=True)
except TraceExists as error:
    print(error)
    raise SystemExit(0)
add_step(recorder, 1, make_batch(), seq_ids=["a", "b", "c", "d"])
recorder.flush()
print("up", flush=True)
input()
recorder.close()
"""


def test_of_processes_with_one_rank_the_first_records_and_a_restart_after_a_kill_is_another_attempt(tmp_path):
    command = [sys.executable, "-c", RANK, ROOT / "tests", tmp_path / "run"]

    def started():
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"RANK": "3"}
        )

    processes = [started() for _ in range(4)]
    said = [process.stdout.readline().strip() for process in processes]
    assert sorted(line == "up" for line in said) == [False, False, False, True]
    (first,) = [process for process, line in zip(processes, said, strict=True) if line == "up"]
    (sentence,) = {line for line in said if line != "up"}
    assert f"process {first.pid} on" in sentence
    assert "is recording rank 3 of this trace. Give each process its own RANK" in sentence
    first.kill()
    for process in processes:
        process.communicate()
    again = started()
    assert again.stdout.readline() == "up\n"
    again.communicate("\n")
    rows = connect(tmp_path / "run").execute("SELECT attempt, count(*) FROM all_sequences GROUP BY 1 ORDER BY 1")
    assert rows.fetchall() == [(1, 4), (2, 4)]
