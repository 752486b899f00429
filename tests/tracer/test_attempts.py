"""Runs that make some steps again: every number counts a step once, as its newest attempt made it."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from builders import PROGRAMS, ROOT, add_step, make_batch, run, tim_trace
from click.testing import CliRunner
from tim_trace.analysis.check.check import check
from tim_trace.analysis.check.text import note_texts
from tim_trace.analysis.info import info
from tim_trace.analysis.info_text import info_text
from tim_trace.analysis.report.report import report
from tim_trace.analysis.stats import stats
from tim_trace.analysis.views import connect
from tim_trace.cli import main
from tim_trace.schemas.documents import Manifest
from tim_trace.tracer.create import new_trace
from tim_trace.tracer.liveness import next_attempt
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.store import Store
from tim_trace.tracer.writer import TraceWriter

TORCHRUN = Path(sys.executable).parent / "torchrun"
ROWS = 8
FIRST, SECOND = range(1, 7), range(5, 9)


def batch_of(attempt, step):
    batch = make_batch(ROWS, seed=100 * attempt + step)
    if attempt == 1 and step in SECOND:  # what was made again would be seen from afar
        batch["train"] = [values - np.float32(3) for values in batch["train"]]
    return batch


def add(recorder, attempt, step):
    recorder.add_contract("rollout", {"engine": "vllm", "dtype": "bfloat16"})
    recorder.add_contract("train", {"engine": "trl", "dtype": "float32"})
    add_step(recorder, step, batch_of(attempt, step), seq_ids=[f"{step}-{row}" for row in range(ROWS)])
    recorder.add_metrics(step, {"loss": 0.5 * step + 100 * (attempt == 1 and step in SECOND), "grad_norm": 1.0})


@pytest.fixture
def traces(tmp_path):
    """A run that resumed at step 5 of 6, and one that never made what was made again."""
    resumed, plain = tmp_path / "resumed" / "run", tmp_path / "plain" / "run"
    with Recorder(resumed) as recorder:
        for step in FIRST:
            add(recorder, 1, step)
    with Recorder(resumed, resume=True) as recorder:
        for step in SECOND:
            add(recorder, 2, step)
    with Recorder(plain) as recorder:
        for step in range(1, 9):
            add(recorder, 2 if step in SECOND else 1, step)
    return resumed, plain


def told(path, *command):
    """What a command prints about a trace, without what names the trace or the time."""
    done = CliRunner().invoke(main, [command[0], str(path), *command[1:], "--json"])
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout.replace(str(path), "RUN"))


def check_same(found, expected, where=""):
    """Two documents say the same; doubles of sums in another order may differ by a few units in the last place."""
    assert type(found) is type(expected), (where, found, expected)
    if isinstance(found, dict):
        assert found.keys() == expected.keys(), where
        for name in found:
            check_same(found[name], expected[name], f"{where}/{name}")
    elif isinstance(found, list):
        assert len(found) == len(expected), (where, found, expected)
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            check_same(one, other, f"{where}/{place}")
    elif isinstance(found, float):
        assert found == pytest.approx(expected, rel=1e-13, abs=1e-15, nan_ok=True), where
    else:
        assert found == expected, where


COMMANDS = [
    ("stats",), ("stats", "--by", "step"), ("stats", "--by", "sequence"), ("stats", "--like", "verl", "--by", "step"),
    ("check",), ("diagnose",), ("dynamics",), ("objective", "--loss", "ppo_clip"), ("corrections",), ("attribute",),
    ("gate", "--fail-on", "tim.k3>1e-3"), ("watch",),
    ("sql", "SELECT * EXCLUDE (writer, attempt) FROM sequences ORDER BY ALL"),
    ("sql", "SELECT * EXCLUDE (writer, attempt) FROM scores ORDER BY step, pass, seq_id"),
    ("sql", "SELECT * EXCLUDE (writer, attempt, logged_at) FROM metrics ORDER BY ALL"),
    ("sql", "FROM steps ORDER BY step"),
    ("sql", "FROM tokens ORDER BY step, seq_id, position"),
]  # fmt: skip


@pytest.mark.slow
def test_every_command_counts_a_step_once_as_its_newest_attempt_made_it(traces):
    for command in COMMANDS:
        found, expected = (told(path, *command) for path in traces)
        for document in (found, expected):
            for clock in ("steps_per_minute", "age_s"):
                document.pop(clock, None)
            checked = document.get("checked", document)
            if "notes" in checked:
                checked["notes"] = [note for note in checked["notes"] if "attempted" not in note]
                if "note_codes" in checked:
                    checked["note_codes"] = [code for code in checked["note_codes"] if code != "attempts"]
        check_same(found, expected, " ".join(command))


@pytest.mark.slow
def test_figures_of_a_report_show_a_step_once(traces, tmp_path):
    figures = []
    for place, path in enumerate(traces):
        report([str(path)], png=str(tmp_path / f"figures{place}"))
        files = sorted((tmp_path / f"figures{place}").glob("*.csv"))
        figures.append({file.name: [cells(line) for line in file.read_text().splitlines()] for file in files})
    check_same(*figures)
    assert figures[0]


def cells(line):
    """The cells of a line of CSV, numbers as numbers."""
    found = []
    for cell in line.split(","):
        try:
            found.append(float(cell))
        except ValueError:
            found.append(cell)
    return found


def test_all_views_hold_what_every_attempt_made(traces):
    connection = connect(traces[0])
    for view in ("sequences", "scores", "metrics"):
        found = connection.execute(
            f"SELECT step, attempt, count(*) FROM all_{view} GROUP BY ALL ORDER BY ALL"
        ).fetchall()
        shown = connection.execute(f"SELECT step, attempt, count(*) FROM {view} GROUP BY ALL ORDER BY ALL").fetchall()
        rows = {"sequences": ROWS, "scores": 2 * ROWS, "metrics": 2}[view]
        every = {(step, 1) for step in FIRST} | {(step, 2) for step in SECOND}
        assert set(found) == {(*key, rows) for key in every}
        assert set(shown) == {(step, 2 if step in SECOND else 1, rows) for step in range(1, 9)}


@pytest.mark.slow
def test_info_and_check_tell_which_attempt_counts(traces):
    text = info_text(info(str(traces[0])))
    table = [line.split("  ") for line in text.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in table]
    assert ["attempt", "steps", "sequences", "repeated later"] in cells
    assert ["1", "1 to 6", "48", "5 to 6"] in cells
    assert ["2", "5 to 8", "32"] in cells
    assert "2 training attempts. Each step uses its newest attempt: 16 sequences from earlier" in text
    checked = check(traces[0])
    note = note_texts(checked)[checked.notes.index("attempts")]
    assert note == (
        "training was attempted 2 times; only the newest attempt at each step is used; left out because they were "
        "repeated later: steps 5 to 6 of attempt 1"
    )
    assert check(traces[0]).rms_d == pytest.approx(check(traces[1]).rms_d, rel=1e-13)
    assert check(traces[0]).rms_d < 0.1 < 3
    assert told(traces[0], "info")["attempts"][0]["superseded"] == [[5, 6]]
    assert any("attempted 2 times" in note for note in told(traces[0], "check")["notes"])
    assert "training attempts" not in info_text(info(str(traces[1])))
    assert "attempts" not in check(traces[1]).notes


def attempts_of(path):
    """Attempt -> the steps that it made, and those that count."""
    connection = connect(path)
    made, counted = (
        dict(
            connection.execute(
                f"SELECT attempt, list_sort(list(DISTINCT step)) FROM {view} GROUP BY attempt ORDER BY 1"
            ).fetchall()
        )
        for view in ("all_sequences", "sequences")
    )
    return made, counted


@pytest.mark.slow
def test_processes_without_a_rank_that_record_at_once_are_one_attempt(tmp_path):
    program = """
import sys
sys.path.insert(0, sys.argv[1])
from builders import add_step, make_batch
from tim_trace.tracer.liveness import next_attempt
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.store import Store
from tim_trace.tracer.writer import TraceWriter
with Recorder(sys.argv[2], join=True) as recorder:
    recorder.flush()
    print("up", flush=True)
    input()
    add_step(recorder, 1, make_batch(), seq_ids=[f"{sys.argv[3]}-{row}" for row in range(4)])
"""
    command = [sys.executable, "-c", program, ROOT / "tests", tmp_path / "run"]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for name in ("a", "b")
        ]
        for process in processes:
            assert process.stdout.readline() == "up\n"
        for process in processes:
            process.communicate("\n")
            assert process.returncode == 0
    assert attempts_of(tmp_path / "run") == ({1: [1]}, {1: [1]})
    assert info(str(tmp_path / "run")).num_sequences == 8


def test_a_notebook_that_goes_on_from_a_checkpoint_without_having_closed_counts_once(tmp_path):
    first = Recorder(tmp_path / "run")
    for step in (1, 2, 3):
        add_step(first, step, make_batch(seed=step), seq_ids=range(4))
    first.flush()  # and then its cell was interrupted
    with Recorder(tmp_path / "run", resume=True) as second:
        for step in (3, 4):
            add_step(second, step, make_batch(seed=10 + step), seq_ids=range(4))
    assert attempts_of(tmp_path / "run") == ({1: [1, 2, 3], 2: [3, 4]}, {1: [1, 2], 2: [3, 4]})
    first.close()


@pytest.mark.slow
def test_torchrun_s_restart_is_another_attempt(tmp_path):
    command = ["--standalone", "--nproc-per-node", 2, "--max-restarts", 1, PROGRAMS / "restarts.py"]
    done = run(TORCHRUN, *command, tmp_path / "run", tmp_path / "checkpoint", 5, 7)
    assert done.code == 0, done.stderr[-3000:]
    assert attempts_of(tmp_path / "run") == ({1: [1, 2, 3, 4, 5], 2: [5, 6, 7]}, {1: [1, 2, 3, 4], 2: [5, 6, 7]})
    rows = connect(tmp_path / "run").execute("SELECT step, seq_id, response_ids FROM sequences ORDER BY ALL").fetchall()
    expected = [
        (step, f"r{rank}-{row}", make_batch(seed=1000 * (step > 4) + 100 * rank + step)["response_ids"][row])
        for step in range(1, 8) for rank in (0, 1) for row in range(4)
    ]  # fmt: skip
    assert rows == expected


SAVES = {"save_strategy": "steps", "save_steps": 2}


def trained(tmp_path, *arguments, options=(), config=None):
    """Train with TRL under `tim-trace record`, always with the same model and checkpoints."""
    command = [
        sys.executable, PROGRAMS / "train.py", "--model", tmp_path / "model", "--result", tmp_path / "result.json",
        "--config", json.dumps(config or {}), *arguments,
    ]  # fmt: skip
    return tim_trace("record", "-o", tmp_path / "run", *options, "--weights", "none", "--", *command)


def history(tmp_path, name):
    """Step -> value, as the trainer logged it at last."""
    logged = json.loads((tmp_path / "result.json").read_text())["history"]
    return {row["step"]: row[name] for row in logged if row.get(name) is not None}


def check_values(tmp_path, steps):
    """Rewards and lengths of the steps are those that the trainer logged at last."""
    query = "SELECT step, avg(reward), avg(num_response_tokens), count(*) FROM sequences GROUP BY step ORDER BY step"
    found = connect(tmp_path / "run").execute(query).fetchall()
    assert [step for step, *_ in found] == [*steps]
    for step, reward, length, count in found:
        assert reward == pytest.approx(history(tmp_path, "reward")[step], rel=2e-5)
        assert length == pytest.approx(history(tmp_path, "completions/mean_length")[step], rel=2e-5)
        assert count == 8


@pytest.mark.slow
@pytest.mark.engine
def test_a_trainer_that_is_killed_and_resumes_from_its_checkpoint_counts_once(tmp_path):
    died = trained(tmp_path, "--steps", 6, "--die-after", 5, config=SAVES)
    assert died.code == 128 + 9, died.stderr[-3000:]
    refused = trained(tmp_path, "--steps", 6, "--resume", config=SAVES)
    assert (refused.code, "a trace already exists there" in refused.stderr) == (2, True)
    done = trained(tmp_path, "--steps", 6, "--resume", options=["--resume"], config=SAVES)
    assert done.code == 0, done.stderr[-3000:]
    assert attempts_of(tmp_path / "run") == ({1: [1, 2, 3, 4, 5], 2: [5, 6]}, {1: [1, 2, 3, 4], 2: [5, 6]})
    check_values(tmp_path, range(1, 7))
    found = info(str(tmp_path / "run"))
    assert (found.num_sequences, found.exit_code, found.damaged) == (48, 0, ())
    assert [(attempt.attempt, attempt.superseded) for attempt in found.attempts] == [(1, ((5, 5),)), (2, ())]
    logged = connect(tmp_path / "run").execute("SELECT step, value FROM metrics WHERE name = 'reward'").fetchall()
    assert {step: value for step, value in logged} == pytest.approx(history(tmp_path, "reward"))
    assert len(logged) == 6


@pytest.mark.slow
@pytest.mark.engine
def test_several_generations_of_one_step_are_all_recorded_and_a_second_call_of_train_is_another_attempt(tmp_path):
    """`steps_per_generation` below `gradient_accumulation_steps`: an update is of several generations."""
    config = {"steps_per_generation": 1, "gradient_accumulation_steps": 3, "num_generations": 4}
    done = trained(tmp_path, "--steps", 2, "--trainings", 2, config=config)
    assert done.code == 0, done.stderr[-3000:]
    assert attempts_of(tmp_path / "run") == ({1: [1, 2], 2: [1, 2]}, {2: [1, 2]})
    connection = connect(tmp_path / "run")
    query = "SELECT step, count(*), count(DISTINCT seq_id), count(DISTINCT group_id), avg(reward) FROM sequences GROUP BY step ORDER BY 1"
    for step, count, names, groups, reward in connection.execute(query).fetchall():
        assert (count, names, groups) == (24, 24, 6)
        assert reward == pytest.approx(history(tmp_path, "reward")[step], rel=2e-5)
    assert connection.execute("SELECT count(*) FROM scores WHERE pass = 'current'").fetchone() == (48,)


def states_read(folder, rank, session="job"):
    """The number that a rank's process gets, and whose states it read for that."""
    program = """
import json, sys
from tim_trace.tracer.liveness import next_attempt
from tim_trace.tracer.store import Store
read = []
sys.addaudithook(lambda event, values: read.append(str(values[0])) if event == "open" else None)
number = next_attempt(Store(sys.argv[1]), sys.argv[2]).number
print(json.dumps([number, [name for name in read if name.endswith(".json") and "trace.json" not in name]]))
"""
    done = run(sys.executable, "-c", program, folder, session, env={"RANK": str(rank)})
    assert done.code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Begin an attempt as a rank of a session, restarted so often as its node counts, and return its number."""
    path = tmp_path / "run"
    manifest = Manifest(run_id="run", created_at="2026-01-01T00:00:00Z", created_by="0", source="record")
    with new_trace(path, manifest):
        pass

    def begin(rank, session="job", restarts=0):
        if rank is None:
            monkeypatch.delenv("RANK", raising=False)
        else:
            monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        attempt = next_attempt(Store(path), session)
        TraceWriter(path, attempt=attempt).close()
        return attempt.number

    return path, begin


def test_a_rank_reads_its_own_state_and_rank_0_s_and_no_other(ranks):
    path, begin = ranks
    for rank in range(40):
        assert begin(rank) == 1
    number, read = states_read(path, 40)
    assert (number, [Path(name).name.partition("-")[0] for name in read]) == (1, ["r0"])
    number, read = states_read(path, 17)
    assert (number, [Path(name).name.partition("-")[0] for name in read]) == (2, ["r17"])


def test_ranks_whose_nodes_count_other_restarts_are_one_attempt(ranks):
    """torchrun restarts the workers of a node that lost none when another node's come back, and does not count that."""
    _, begin = ranks
    assert [begin(0), begin(1)] == [1, 1]
    assert [begin(0, restarts=1), begin(1, restarts=0)] == [2, 2]
    assert [begin(1, restarts=0), begin(0, restarts=2)] == [3, 3]


def test_ranks_that_a_resumed_run_has_more_of_take_part_in_its_attempt(ranks):
    _, begin = ranks
    assert [begin(0), begin(1)] == [1, 1]
    assert [begin(rank, "resumed") for rank in (2, 0, 1, 3)] == [2, 2, 2, 2]


def test_a_driver_without_a_rank_and_its_workers_are_one_attempt(ranks):
    _, begin = ranks
    assert begin(None, "first") == 1  # it ended before it had workers
    assert [begin(None, "again"), begin(0, "again"), begin(1, "again")] == [2, 2, 2]


def test_metrics_of_a_later_attempt_hide_no_sequences_of_a_step_that_it_did_not_make(tmp_path):
    path = tmp_path / "run"
    with Recorder(path) as recorder:
        for step in (1, 2):
            add(recorder, 1, step)
    with Recorder(path, resume=True) as recorder:
        recorder.add_metrics(2, {"loss": 7.0})  # logged again before the first step of its own
        add(recorder, 2, 3)
    found = (
        connect(path)
        .execute("SELECT step, count(*), max(attempt) FROM sequences GROUP BY step ORDER BY step")
        .fetchall()
    )
    assert found == [(1, ROWS, 1), (2, ROWS, 1), (3, ROWS, 2)]
    assert connect(path).execute("SELECT count(*) FROM scores WHERE step = 2").fetchall() == [(2 * ROWS,)]


def test_a_rank_that_starts_after_another_has_ended_is_of_the_same_attempt(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        with Recorder(tmp_path / "run", join=True) as recorder:
            add_step(recorder, 1, make_batch(2, seed=rank), seq_ids=[f"{rank}-{row}" for row in range(2)])
    assert connect(tmp_path / "run").execute("SELECT DISTINCT attempt FROM sequences").fetchall() == [(1,)]
    assert connect(tmp_path / "run").execute("SELECT count(*) FROM sequences").fetchall() == [(4,)]


def test_sums_of_an_earlier_attempt_do_not_serve(tmp_path):
    path = tmp_path / "run"
    with Recorder(path) as recorder:
        add(recorder, 1, 5)
    stats(path)
    with Recorder(path, resume=True) as recorder:
        add(recorder, 2, 5)
    with Recorder(tmp_path / "plain") as recorder:
        add(recorder, 2, 5)
    for by in ("run", "step"):
        found, wanted = (
            [{key: value for key, value in row.items() if key != "run"} for row in stats(trace, by=by).dicts()]
            for trace in (path, tmp_path / "plain")
        )
        assert found == wanted
