import dataclasses
import json
import shutil

import pytest
from segmented import QUESTIONS, add_steps, rows_of
from tim_trace.analysis import compact
from tim_trace.analysis.query import sql
from tim_trace.analysis.trace import large_tables
from tim_trace.analysis.verify import verify
from tim_trace.analysis.views import connect, open_database
from tim_trace.schemas.documents import parse_writer_state
from tim_trace.schemas.errors import DamagedTrace, DamageWarning, InvalidOption
from tim_trace.tracer import index
from tim_trace.tracer.index import read_index, write_index
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.store import Store

STEPS = 10


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run that sealed at each step, so that it has many files of few steps, and one file of metrics of all."""
    path = tmp_path_factory.mktemp("large") / "run"
    with Recorder(path) as recorder:
        for step in range(1, STEPS + 1):
            add_steps(recorder, 1, [step])
            recorder.flush()
            recorder.writer.segments.seal()
        recorder.add_metrics(3, {"loss": 0.5})
    return path


@pytest.fixture
def trace(recorded, tmp_path, monkeypatch):
    """The same where tables of more than two files are large, and the index holds the footers of small tables alone."""
    shutil.copytree(recorded, tmp_path / "run")
    footers = sum(path.stat().st_size for path in (recorded / "sequences").iterdir()) // 2
    monkeypatch.setattr(index, "MAX_BYTES", 20_000 + footers // 2)
    monkeypatch.setattr(index, "_UNPACKED_BYTES", 1 << 30)
    monkeypatch.setattr(large_tables, "MANY_FILES", 2)
    write_index(tmp_path / "run")
    held = read_index(Store(tmp_path / "run"))
    assert {path.partition("/")[0] for path in held.files[0][0]} == {"sequences", "scores"}
    assert {path.partition("/")[0] for path in held.footers} == {"metrics"}
    return tmp_path / "run"


@pytest.fixture
def files_read(monkeypatch):
    """Files of sequences and scores that were read, by name."""
    read, original = [], Store.read_range

    def reading(self, relative, *where):
        if relative.startswith(("sequences/", "scores/")):
            read.append(relative)
        return original(self, relative, *where)

    monkeypatch.setattr(Store, "read_range", reading)
    return read


def test_what_a_trace_of_many_files_answers_is_the_same(trace, recorded, monkeypatch):
    found = rows_of(trace)
    monkeypatch.setattr(large_tables, "MANY_FILES", 1 << 20)
    assert found == rows_of(recorded)


@pytest.mark.parametrize("where", [
    "step = 4", "step BETWEEN 3 AND 5", "step IN (2, 9)", "step > 8 OR step < 2", "step > 3.5 AND step < 7", "NOT step > 2",
    "seq_id = (SELECT min(seq_id) FROM sequences)", "seq_id = 'a\n(step = 7)\nb' OR step = 2", "step % 3 = 0", "step = 99", "step IS NULL",
    "run = 'run' AND step >= 9 AND step != 10", "false",
])  # fmt: skip
def test_conditions_on_steps_leave_every_row_that_they_hold_for(trace, recorded, where, monkeypatch):
    questions = [
        f"SELECT step, seq_id, num_response_tokens FROM sequences WHERE {where} ORDER BY ALL",
        f"SELECT count(*) FROM sequences WHERE {where}",
        f"SELECT step, avg(d), count(*) FROM pair('train', 'rollout') WHERE {where} GROUP BY step ORDER BY step",
        f"SELECT count(*) FROM scores JOIN (SELECT DISTINCT step FROM sequences WHERE {where}) USING (step)",
        f"SELECT (SELECT count(*) FROM sequences), (SELECT count(*) FROM sequences WHERE {where}), (SELECT count(*) FROM scores)",
    ]
    found = [open_database(trace).ask(question).rows for question in questions]
    shown = [sql(trace, question).rows for question in questions]
    monkeypatch.setattr(large_tables, "MANY_FILES", 1 << 20)
    database = open_database(recorded)
    assert found == [database.ask(question).rows for question in questions]
    assert shown == found


def test_an_open_and_a_count_read_no_file_and_a_step_those_of_the_step(trace, files_read):
    database = open_database(trace)
    assert database.ask("SELECT count(*) FROM sequences").rows == [(6 * STEPS,)]
    assert database.ask("SELECT count(*) FROM scores").rows == [(18 * STEPS,)]
    assert not files_read
    assert database.ask("SELECT count(DISTINCT seq_id) FROM pair('train', 'rollout') WHERE step = 4").rows == [(6,)]
    assert len(set(files_read)) == 2


def test_chosen_steps_read_no_file_of_others(trace, files_read):
    database = open_database(trace, "3:4")
    assert database.ask("SELECT DISTINCT step FROM sequences ORDER BY 1").rows == [(3,), (4,)]
    assert len(set(files_read)) == 2
    assert database.ask("SELECT count(*) FROM pair('train', 'rollout') WHERE step = 3").rows[0][0] > 0
    assert len(set(files_read)) == 3
    assert open_database(trace, "-2:").kept_steps == {"run": [STEPS - 1, STEPS]}
    with pytest.raises(InvalidOption, match=f"recorded: 1 to {STEPS}"):
        open_database(trace, f"{STEPS + 1}:")


def test_a_question_that_is_computed_later_reads_its_own_files(trace):
    connection = open_database(trace).connection
    first = connection.sql("SELECT count(*), min(step) FROM sequences WHERE step = 3")
    second = connection.sql("SELECT count(*), min(step) FROM sequences WHERE step > 8")
    assert connection.execute("SELECT count(*) FROM sequences").fetchall() == [(6 * STEPS,)]
    assert second.fetchall() == [(12, 9)]
    assert first.to_arrow_table().to_pylist() == [{"count_star()": 6, "min(step)": 3}]


@pytest.mark.slow
def test_whoever_asks_the_connection_itself_reads_all(trace, recorded):
    for question in QUESTIONS:
        if "fsum" not in question and "stddev" not in question:
            assert connect(trace).execute(question).fetchall() == connect(recorded).execute(question).fetchall()


def test_a_footer_that_is_read_later_is_compared_with_what_its_writer_said(trace):
    (path, *_) = sorted((trace / "scores").iterdir())
    content = bytearray(path.read_bytes())
    content[-200] ^= 4
    path.write_bytes(content)
    assert verify(trace).damaged
    database = open_database(trace)
    assert database.ask("SELECT count(*) FROM pair('train', 'rollout') WHERE step = 4").rows[0][0] > 0
    with pytest.raises(DamagedTrace, match=path.name):
        database.ask("SELECT count(*) FROM pair('train', 'rollout') WHERE step = 1")


def test_a_file_under_another_s_name_and_of_another_s_columns_is_told_when_it_is_read(trace):
    first, second, *_ = sorted((trace / "scores").iterdir())
    if first.stat().st_size == second.stat().st_size:
        first.write_bytes(second.read_bytes())
        with pytest.raises(DamagedTrace, match=first.name):
            open_database(trace).ask("SELECT sum(len(logprobs)) FROM scores WHERE step = 1")
    for path in (trace / "sequences").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(DamageWarning, match="bytes, but its writer wrote"):
        assert len(open_database(trace).damaged) == STEPS


def test_steps_that_a_writer_says_and_its_rows_have_not_are_named_by_verify(trace):
    (path,) = (path for path in (trace / "writers").iterdir() if b"scores/" in path.read_bytes())
    state = parse_writer_state(path.read_bytes(), path.name)
    name = sorted(file for file in state.files if file.startswith("scores/"))[3]
    state.files[name] = dataclasses.replace(state.files[name], steps=(7, 9))
    path.write_text(state.to_json())
    (sentence,) = verify(trace).damaged
    assert name in sentence
    assert "cover steps (4, 4), but the writer recorded (7, 9)" in sentence


def test_an_index_that_is_written_again_reads_no_file_that_it_knows(trace, files_read):
    before = read_index(Store(trace))
    files_read.clear()
    write_index(trace)
    assert read_index(Store(trace)).files == before.files
    assert not [path for path in files_read if path.startswith("scores/")]


def test_what_is_known_of_many_files_is_merged(trace, recorded):
    compact(trace)
    assert rows_of(trace) == rows_of(recorded)
    assert json.dumps(verify(trace).damaged) == "[]"
