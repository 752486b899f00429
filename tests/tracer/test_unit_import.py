"""Imports by the actors of a real Ray cluster: the trace is that of one process, whatever dies on the way."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import TIM_TRACE
from clusters import removing, two_nodes
from dumps import ONE_SIDED, WRITERS, make_steps, write_lines
from segmented import QUESTIONS
from tim_trace import check, import_dump, stats, verify
from tim_trace.analysis.views import connect, open_database
from tim_trace.schemas.errors import ImportFailed, NothingToCompare, TimTraceWarning
from tim_trace.schemas.tables import TABLES
from tim_trace.tracer.importers import unit_import
from tim_trace.tracer.store import Store

pytestmark = [
    pytest.mark.slow,
    # Ray's own: pipes of its processes that it leaves to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning:ray"),
]


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as made:
        yield made


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Every file is a unit, and files of lines are cut."""
    monkeypatch.setattr(unit_import, "LEAST_BYTES", 500)


def same_trace(one, other):
    """Rows, statistics and findings are the same, to the last digit, and nothing is left beside."""
    assert answers(one) == answers(other)
    assert verify(one).is_whole
    assert [entry.name for entry in one.parent.iterdir()] == [one.name]
    sources = [
        {name: each for state in sorted(Store(run).writers()[0], key=lambda state: state.opened_at) for name, each in state.sources.items()}
        for run in (one, other)
    ]  # fmt: skip
    assert sources[0] == sources[1]


def answers(run):
    database = open_database(run)
    found = [database.ask(question).rows for question in QUESTIONS if "FROM pair_" in question]
    found.append(database.ask('SELECT "pass", contract FROM passes ORDER BY ALL').rows)
    for table in TABLES.values():
        columns = ", ".join(f'"{each.name}"' for each in table.columns if each.name not in ("writer", "logged_at"))
        found.append(database.ask(f"SELECT {columns} FROM {table.name} ORDER BY ALL").rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TimTraceWarning)
        for ask in (partial(stats, by="step"), check):
            try:
                found.append(ask(run))
            except NothingToCompare as error:
                found.append(str(error))
    return str(found).replace(str(run), "RUN")


def brought_in(imported):
    return {name: getattr(imported, name) for name in imported.__dataclass_fields__ if name != "folder"}


@pytest.mark.parametrize("format", ["verl", "slime", "prime-rl", "nemo-rl", "trl", "vllm"])
def test_a_cluster_brings_in_what_one_process_does(tmp_path, cluster, format):
    write = {**WRITERS, **ONE_SIDED}[format]
    write(tmp_path / "dump", make_steps(*([3] if format in ONE_SIDED else [3, 4, 7, 8]), num=12))
    alone = import_dump(format, tmp_path / "dump", output=tmp_path / "alone" / "run")
    divided = import_dump(format, tmp_path / "dump", output=tmp_path / "divided" / "run", ray=cluster[0].address)
    assert brought_in(divided) == brought_in(alone)
    same_trace(tmp_path / "divided" / "run", tmp_path / "alone" / "run")


def lines_of(folder, rows):
    """A file of open-instruct with these rows."""
    write_lines(folder / "a_rollouts_0.jsonl", rows)


def line(step, logprobs, **more):
    tokens = list(range(1, len(logprobs) + 1))
    return {
        "step": step,
        "prompt_tokens": [1, 2],
        "response_tokens": tokens,
        "logprobs": logprobs,
        "reward": 1.0,
        **more,
    }


def test_lines_of_one_large_file_keep_their_numbers_and_a_grown_one_adds_what_is_new(tmp_path, cluster):
    draw = np.random.default_rng(0)
    rows = [line(1 + n // 20, (-draw.exponential(1, draw.integers(1, 30))).tolist()) for n in range(400)]
    for name, ray in (("alone", None), ("divided", cluster[0].address)):
        lines_of(tmp_path / "dump", rows[:250])
        (tmp_path / "dump" / "a_rollouts_0.jsonl").open("a").write('{"step": 1, "prom')  # is being written
        first = import_dump("open-instruct", tmp_path / "dump", output=tmp_path / name / "run", ray=ray)
        assert first.num_sequences == 250
        lines_of(tmp_path / "dump", rows)
        grown = import_dump("open-instruct", tmp_path / "dump", output=tmp_path / name / "run", ray=ray)
        assert (grown.num_sequences, grown.num_known_files) == (150, 1)
        again = import_dump("open-instruct", tmp_path / "dump", output=tmp_path / name / "run", ray=ray)
        assert again.num_sequences == 0
    same_trace(tmp_path / "divided" / "run", tmp_path / "alone" / "run")
    writers = "SELECT count(DISTINCT writer) FROM scores"
    assert connect(tmp_path / "divided" / "run").execute(writers).fetchone()[0] > 10


def neutral_rows(steps, num=40, named=False):
    """Rows of the neutral format; without names sequences are called by their numbers."""
    draw = np.random.default_rng(0)
    rows = []
    for place in range(steps * num):
        tokens = draw.integers(0, 90, draw.integers(1, 30)).tolist()
        rollout = np.minimum(-draw.exponential(1, len(tokens)), 0).astype(np.float32)
        rows.append({
            "step": 1 + place // num, "prompt_ids": [1, 2], "response_ids": tokens, "rollout_logprobs": rollout.tolist(),
            "train_logprobs": np.minimum(rollout + np.float32(0.001), 0).tolist(), "group_id": f"g{place // 4}",
        } | ({"seq_id": f"s{place}"} if named else {}))  # fmt: skip
    return rows


def write_neutral(folder, form):
    """A folder of files of a form, of which one Parquet file has several row groups; `mixed` has a file of lines between two."""
    folder.mkdir()
    rows = neutral_rows(6, named=form == "named")
    pq.write_table(pa.Table.from_pylist([{"step": 1, "name": "loss", "value": 0.5}]), folder / "metrics.parquet")
    if form == "mixed":
        pq.write_table(pa.Table.from_pylist(rows[:100]), folder / "a.parquet", row_group_size=20)
        write_lines(folder / "b.jsonl", rows[100:150])
        pq.write_table(pa.Table.from_pylist(rows[150:]), folder / "c.parquet", row_group_size=20)
    else:
        pq.write_table(pa.Table.from_pylist(rows), folder / "all.parquet", row_group_size=30)


@pytest.mark.parametrize("form", ["numbered", "named", "mixed"])
def test_row_groups_of_parquet_files_are_divided(tmp_path, cluster, form):
    write_neutral(tmp_path / "dump", form)
    for case, options in (("all", {}), ("some", {"steps": "2:5", "sample": 0.5})):
        alone = import_dump("parquet", tmp_path / "dump", output=tmp_path / case / "alone" / "run", **options)
        divided = import_dump(
            "parquet", tmp_path / "dump", output=tmp_path / case / "divided" / "run", ray=cluster[0].address, **options
        )
        assert brought_in(divided) == brought_in(alone)
        assert divided.num_metrics == 1
        same_trace(tmp_path / case / "divided" / "run", tmp_path / case / "alone" / "run")
    writers = "SELECT count(DISTINCT writer) FROM scores"
    assert connect(tmp_path / "all" / "divided" / "run").execute(writers).fetchone()[0] >= 8


def killing():
    """A progress that ends the import at the third unit that is whole, as a driver does that is killed: nothing is tidied up."""
    code = (
        "import os, sys; from contextlib import contextmanager; from tim_trace import import_dump; "
        "from tim_trace.tracer.importers import unit_import; unit_import.LEAST_BYTES = 500; done = []\n"
        "@contextmanager\n"
        "def progress(what, total):\n"
        "    def advance(size):\n"
        "        done.append(size)\n"
        "        if len(done) == 3: os.kill(os.getpid(), 9)\n"
        "    yield advance\n"
        "import_dump('parquet', sys.argv[1], output=sys.argv[2], ray=sys.argv[3], progress=progress)\n"
    )
    return [sys.executable, "-c", code]


def test_row_groups_that_were_whole_are_taken_over_while_they_hold_what_they_held(tmp_path, cluster):
    write_neutral(tmp_path / "dump", "numbered")
    output = tmp_path / "divided" / "run"
    done = subprocess.run([*killing(), str(tmp_path / "dump"), str(output), cluster[0].address])
    assert done.returncode == -signal.SIGKILL
    whole = [*unit_import.room_of(output).glob("*/.tmp-unit.json")]
    assert len(whole) >= 3
    # The last rows of the file change: what lies before them is not read again.
    rows = neutral_rows(6)
    rows[-1]["rollout_logprobs"] = [-0.75] * len(rows[-1]["response_ids"])
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "dump" / "all.parquet", row_group_size=30)
    import_dump("parquet", tmp_path / "dump", output=tmp_path / "alone" / "run")
    import_dump("parquet", tmp_path / "dump", output=output, ray=cluster[0].address)
    pids = {state.pid for state in Store(output).writers()[0]}
    assert len(pids) > 2  # actors of both drivers
    same_trace(output, tmp_path / "alone" / "run")


def test_an_error_in_a_row_group_is_told_in_the_same_words(tmp_path, cluster):
    rows = neutral_rows(6)
    rows[150]["rollout_logprobs"] = [-0.5] * 40
    twice = neutral_rows(6, named=True)
    twice[200]["seq_id"], twice[200]["step"] = "s3", 1
    for name, written, told in (
        ("row", rows, "step 4, sequence .150.: 40 values of logprobs"),
        ("twice", twice, "occurs twice"),
    ):
        pq.write_table(pa.Table.from_pylist(written), tmp_path / f"{name}.parquet", row_group_size=30)
        refusals = []
        for ray in (None, cluster[0].address):
            with pytest.raises(ImportFailed, match=told) as refusal:
                import_dump("parquet", tmp_path / f"{name}.parquet", output=tmp_path / "run", ray=ray)
            refusals.append(str(refusal.value))
        assert refusals[0] == refusals[1]
    assert {entry.name for entry in tmp_path.iterdir()} == {"row.parquet", "twice.parquet"}


def test_an_error_names_the_same_line_and_leaves_nothing(tmp_path, cluster):
    rows = [line(1, [-0.5] * 10) for _ in range(200)]
    rows[150]["logprobs"] = [-0.5]
    lines_of(tmp_path / "dump", rows)
    told = []
    for ray in (None, cluster[0].address):
        with pytest.raises(ImportFailed, match="line 151: pass rollout has 1 logprobs for 10 tokens") as refusal:
            import_dump("open-instruct", tmp_path / "dump", output=tmp_path / "run", ray=ray)
        told.append(str(refusal.value))
        assert {entry.name for entry in tmp_path.iterdir()} == {"dump"}
    assert told[0] == told[1]


def test_zeros_that_the_whole_import_decides_about_are_decided_alike(tmp_path, cluster):
    # Single zeros are kept only where the pass has another value somewhere: here in the last lines alone.
    rows = [line(1, [0.0]) for _ in range(100)] + [line(2, [-0.5, -0.25]) for _ in range(100)]
    lines_of(tmp_path / "some" / "dump", rows)
    lines_of(tmp_path / "none" / "dump", rows[:100])
    for case, known in (("some", 100), ("none", 0)):
        dump = tmp_path / case / "dump"
        alone = import_dump("open-instruct", dump, output=tmp_path / case / "alone" / "run")
        divided = import_dump("open-instruct", dump, output=tmp_path / case / "divided" / "run", ray=cluster[0].address)
        assert brought_in(divided) == brought_in(alone)
        same_trace(tmp_path / case / "divided" / "run", tmp_path / case / "alone" / "run")
        query = "SELECT count(*) FROM scores WHERE step = 1 AND logprobs[1] IS NOT NULL"
        assert connect(tmp_path / case / "divided" / "run").execute(query).fetchone()[0] == known


def test_a_name_that_comes_twice_in_two_units_is_refused_in_the_same_words(tmp_path, cluster):
    told = []
    for place in ("one", "two"):
        (tmp_path / "dump" / place).mkdir(parents=True)
        write_lines(tmp_path / "dump" / place / "completions.jsonl", [
            {"step": 1, "prompt": ["a"] * 9, "completion": ["b"] * 9, "advantages": [0.5] * 9} for _ in range(8)
        ])  # fmt: skip
    for ray in (None, cluster[0].address):
        with pytest.raises(ImportFailed, match="occurs twice") as refusal:
            import_dump("ms-swift", tmp_path / "dump", output=tmp_path / "run", ray=ray)
        told.append(str(refusal.value))
    assert told[0] == told[1]


def test_what_a_node_read_when_it_was_removed_is_read_on_another(tmp_path):
    WRITERS["verl"](tmp_path / "dump", make_steps(*range(1, 13)))
    import_dump("verl", tmp_path / "dump", output=tmp_path / "alone" / "run")
    told = []
    with two_nodes() as (made, nodes):
        import_dump(
            "verl",
            tmp_path / "dump",
            output=tmp_path / "divided" / "run",
            ray=made.address,
            progress=removing(made, nodes[0], told),
        )
    assert len(told) > 6
    same_trace(tmp_path / "divided" / "run", tmp_path / "alone" / "run")


def test_a_driver_that_was_killed_goes_on_with_what_was_whole(tmp_path, cluster):
    WRITERS["verl"](tmp_path / "dump", make_steps(*range(1, 41), num=40))
    room = unit_import.room_of(tmp_path / "divided" / "run")
    command = [
        str(TIM_TRACE),
        "import",
        "verl",
        str(tmp_path / "dump"),
        "-o",
        str(tmp_path / "divided" / "run"),
        "--ray",
        cluster[0].address,
    ]
    # Units of the command line are large: this one has units of a file each.
    program = (
        "import sys; from tim_trace.tracer.importers import unit_import; unit_import.LEAST_BYTES = 500; "
        "from tim_trace.cli import main; sys.argv = sys.argv[1:]; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + 400
    whole = []
    while not whole and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        whole = [*room.glob("*/.tmp-unit.json")]
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()
    assert not (tmp_path / "divided" / "run" / "trace.json").exists()  # as a whole or not at all
    kept = {path.parent.name: path.stat().st_mtime_ns for path in room.glob("*/.tmp-unit.json")}
    assert kept
    run_id = json.loads((room / "trace.json").read_text())["run_id"]
    import_dump("verl", tmp_path / "dump", output=tmp_path / "alone" / "run")
    import_dump("verl", tmp_path / "dump", output=tmp_path / "divided" / "run", ray=cluster[0].address)
    assert Store(tmp_path / "divided" / "run").manifest().run_id == run_id
    pids = {state.pid for state in Store(tmp_path / "divided" / "run").writers()[0]}
    assert len(pids) > 2  # actors of both drivers
    same_trace(tmp_path / "divided" / "run", tmp_path / "alone" / "run")


def test_an_import_divided_among_actors_says_the_same_of_columns_it_ignored(tmp_path, cluster):
    rows = neutral_rows(6)
    for row in rows:  # entropies of neither pass of the policy
        row["reference_logprobs"] = row.pop("rollout_logprobs")
        row.pop("train_logprobs", None)
        row["entropy"] = [0.5] * len(row["response_ids"])
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=30)
    alone, divided = (
        import_dump("parquet", tmp_path / "rows.parquet", output=tmp_path / name, ray=ray)
        for name, ray in (("alone", None), ("divided", cluster[0].address))
    )
    assert alone.ignored_columns == divided.ignored_columns
    assert "entropy" in alone.ignored_columns
