import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import make_trace, tim_trace
from tim_trace.analysis.database import connect
from tim_trace.analysis.info import info
from tim_trace.analysis.source import open_source
from tim_trace.schemas.errors import DamagedTrace, NewerTrace, TraceNotFound


@pytest.fixture
def trace(tmp_path):
    make_trace(tmp_path / "run", steps=2)
    make_trace(tmp_path / "other", steps=3, first=11)
    # Two writers' files in one trace.
    for table in ("sequences", "scores", "metrics"):
        (file,) = (tmp_path / "other" / table).glob("*.parquet")
        shutil.copy(file, tmp_path / "run" / table / "other-000000.parquet")
    return tmp_path / "run"


def check_readable(trace, rows):
    assert connect(trace).execute("SELECT count(*) FROM scores").fetchone() == (rows,)
    assert tim_trace("info", trace).code == 0
    assert tim_trace("stats", trace).code == 0


@pytest.mark.parametrize("cut", [0, 3, 50, -1])
def test_a_truncated_file_is_named_and_the_rest_is_read(trace, cut):
    (file,) = (trace / "scores").glob("p*.parquet")
    file.write_bytes(file.read_bytes()[:cut])
    (sentence,) = info(str(trace)).damaged
    assert f"scores/{file.name}: not readable as Parquet" in sentence
    assert "restore the file from a copy" in sentence
    check_readable(trace, 24)


def test_a_foreign_parquet_file_is_named_and_the_rest_is_read(trace):
    pq.write_table(pa.table({"a": [1]}), trace / "scores" / "x-000000.parquet")
    (sentence,) = info(str(trace)).damaged
    assert "scores/x-000000.parquet: lacks the columns pass, step" in sentence
    check_readable(trace, 40)


def test_a_file_with_columns_of_another_type_is_named(trace):
    (file,) = (trace / "scores").glob("other*.parquet")
    table = pq.read_table(file)
    changed = table.set_column(table.schema.get_field_index("step"), "step", table["step"].cast(pa.string()))
    pq.write_table(changed, file)
    (sentence,) = info(str(trace)).damaged
    assert "has columns of other types: step" in sentence


@pytest.mark.parametrize(
    "name", ["notes.txt", "scores/notes.txt", "scores/huh.parquet", "journal/notes.txt", "passes/x.txt"]
)
def test_foreign_files_do_no_harm(trace, name):
    (trace / name).parent.mkdir(exist_ok=True)
    (trace / name).write_text("hello")
    check_readable(trace, 40)
    assert all(name in sentence for sentence in info(str(trace)).damaged)


def test_a_foreign_journal_is_named_and_the_rest_is_read(trace):
    (trace / "journal").mkdir(exist_ok=True)
    (trace / "journal" / "w-000000.scores.arrows").write_bytes(b"not Arrow at all" * 9)
    (sentence,) = info(str(trace)).damaged
    assert "journal/w-000000.scores.arrows" in sentence
    check_readable(trace, 40)


def test_a_broken_writer_state_or_contract_is_named(trace):
    (trace / "writers" / "x.json").write_text("{")
    (trace / "passes" / "train" / "x.json").write_text("{}")
    damaged = info(str(trace)).damaged
    assert [any(name in sentence for sentence in damaged) for name in ("writers/x.json", "passes/train/x.json")] == [
        True
    ] * 2
    check_readable(trace, 40)


def test_damaged_sums_are_passed_over_and_made_anew(trace):
    wanted = tim_trace("stats", trace, "--json").json()
    for file in (trace / "sums").iterdir():
        file.write_bytes(b"x")
    assert tim_trace("stats", trace, "--json").json() == wanted
    assert len(info(str(trace)).damaged) == 3


def test_sums_of_files_that_are_gone_are_not_used(trace):
    tim_trace("stats", trace)
    (file,) = (trace / "scores").glob("other*.parquet")
    file.unlink()
    (row,) = tim_trace("stats", trace, "--json").json()
    assert row["num_sequences"] == 8


def test_half_written_files_are_not_seen(trace):
    (trace / "scores" / ".tmp-1234-x-000000.parquet").write_bytes(b"half")
    assert info(str(trace)).damaged == ()


def test_no_trace_is_told_apart_from_nothing(tmp_path):
    with pytest.raises(TraceNotFound, match="nothing is there; record a run with"):
        open_source(str(tmp_path / "missing"))
    with pytest.raises(TraceNotFound, match=r"holds no trace.json, so it is not a trace"):
        open_source(str(tmp_path))
    (tmp_path / "trace.json").write_text("{}")
    with pytest.raises(DamagedTrace, match=r"trace.json: this is not the trace.json of a trace"):
        open_source(str(tmp_path))
    (tmp_path / "trace.json").write_text('{"format": "tim-trace", "format_version": 99}')
    with pytest.raises(NewerTrace, match="upgrade it with"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("command", [("info",), ("stats",), ("sql", "SELECT 1")])
def test_every_command_names_a_missing_trace_in_one_line(tmp_path, command):
    done = tim_trace(command[0], tmp_path / "no" / "run", *command[1:])
    assert done.code == 2
    assert done.stderr.startswith(f"Error: {tmp_path}/no/run: nothing is there")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
