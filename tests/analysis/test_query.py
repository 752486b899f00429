import os

import fsspec
import pytest
from builders import make_trace
from tim_trace.analysis.query import sql
from tim_trace.schemas.errors import InvalidQuery
from tim_trace.tracer.recorder import Recorder


@pytest.fixture
def trace(tmp_path):
    make_trace(tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    "query",
    [
        "SELECT count(*) FROM tokens",
        "FROM steps",
        "DESCRIBE tokens",
        "SHOW TABLES",
        "SUMMARIZE sequences",
        "EXPLAIN SELECT * FROM tokens",
        "EXPLAIN ANALYZE SELECT * FROM tokens",
        "WITH x AS (SELECT 1) FROM x",
        "PIVOT metrics ON name USING avg(value) GROUP BY step",
        "SELECT 1; SELECT 2",
        "SELECT * FROM pair_steps('train', 'rollout')",
    ],
)
def test_reading_is_allowed(trace, query):
    assert sql(trace, query).columns


@pytest.mark.parametrize(
    "query",
    [
        "COPY (SELECT 1) TO '{run}/scores/new.parquet'",
        "COPY (SELECT 1) TO '{file}'",
        "COPY (SELECT 1) TO '{outside}'",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{file}'",
        "EXPLAIN (ANALYZE, FORMAT json) COPY (SELECT 1) TO '{file}'",
        "SELECT 1; COPY (SELECT 1) TO '{outside}'",
        "ATTACH '{run}/x.db'",
        "CREATE TABLE x AS SELECT 1",
        "CREATE PERSISTENT SECRET x (TYPE s3)",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "RESET allowed_paths",
        "PRAGMA database_list",
        "EXPORT DATABASE '{outside}'",
        "SELECT * FROM read_text('{secret}')",
        "SELECT * FROM read_text('{run}/../secret.txt')",
        "SELECT * FROM read_blob('{run}/trace.json')",
        "SELECT * FROM '{secret}'",
        "SELECT * FROM glob('{run}/../*')",
        "SELECT * FROM read_csv('{secret}')",
        "SELECT * FROM query('COPY (SELECT 1) TO ''{outside}''')",
        "CALL pragma_version()",
        "DROP VIEW tokens",
        "INSERT INTO computed_sequence_sums SELECT * FROM computed_sequence_sums",
    ],
)
def test_writing_and_other_files_are_refused(trace, query):
    secret, outside = trace.parent / "secret.txt", trace.parent / "outside.csv"
    secret.write_text("secret")
    (file,) = (trace / "scores").glob("*.parquet")
    before = {path: path.stat().st_mtime_ns for path in trace.parent.rglob("*")}
    text = query.format(run=trace, file=file, outside=outside, secret=secret)
    with pytest.raises(InvalidQuery, match=r"unsafe=True|does not exist|single SELECT"):
        sql(trace, text)
    assert {path: path.stat().st_mtime_ns for path in trace.parent.rglob("*")} == before


def test_a_query_sees_no_variable_of_the_process(trace):
    secret = [{"a": 1}]  # noqa: F841
    with pytest.raises(InvalidQuery, match="secret does not exist"):
        sql(trace, "SELECT * FROM secret")


def test_unsafe_allows_other_files(trace):
    (trace.parent / "other.csv").write_text("a,b\n1,2\n")
    assert sql(trace, f"SELECT b FROM '{trace.parent}/other.csv'", unsafe=True).rows == [(2,)]


def test_a_wrong_query_is_explained_in_duckdb_s_words(trace):
    with pytest.raises(InvalidQuery, match=r"Candidate bindings"):
        sql(trace, "SELECT rewardd FROM sequences")
    with pytest.raises(InvalidQuery, match="the query is empty"):
        sql(trace, " ")


def test_a_live_trace_s_journal_is_read_in_a_confined_session(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_sequences(step=1, response_ids=[[1, 2]])
        recorder.flush()
        assert sql(tmp_path / "run", "SELECT count(*) FROM tokens").rows == [(2,)]


def test_a_remote_trace_is_confined_too(trace):
    memory = fsspec.filesystem("memory")
    memory.put(str(trace), "/runs/remote", recursive=True)
    memory.pipe("/runs/secret.csv", b"a\n1\n")
    try:
        assert (
            sql("memory://runs/remote", "SELECT count(*) FROM tokens").rows
            == sql(trace, "SELECT count(*) FROM tokens").rows
        )
        with pytest.raises(InvalidQuery, match="unsafe=True"):
            sql("memory://runs/remote", "SELECT * FROM read_csv('memory:///runs/secret.csv')")
    finally:
        memory.rm("/runs", recursive=True)


def test_a_query_never_follows_a_link_out_of_the_trace(trace):
    (trace.parent / "secret.txt").write_text("secret")
    os.symlink(trace.parent / "secret.txt", trace / "scores" / "link.txt")
    with pytest.raises(InvalidQuery):
        sql(trace, f"SELECT * FROM read_text('{trace}/scores/link.txt')")


def test_times_are_given_with_their_zone(trace):
    ((logged_at,),) = sql(trace, "SELECT max(logged_at) FROM metrics").rows
    assert logged_at.utcoffset().total_seconds() == 0


@pytest.mark.parametrize("listing", ["SHOW TABLES", "SELECT view_name AS name FROM duckdb_views() WHERE NOT internal"])
def test_what_is_there_is_listed_before_it_was_asked(trace, listing):
    assert {"sequences", "steps", "tokens"} <= {name for (name,) in sql(trace, listing).rows}


@pytest.mark.slow
def test_every_macro_can_be_the_first_that_is_called(trace):
    names = "SELECT DISTINCT function_name FROM duckdb_functions() WHERE NOT internal AND function_type LIKE '%macro'"
    macros = {name for (name,) in sql(trace, names).rows}
    assert {"pair", "pair_steps", "correction_runs", "pair_routing"} <= macros
    for name in sorted(
        macros
    ):  # with too few arguments DuckDB says so; of one that is not known it says something else
        with pytest.raises(InvalidQuery) as error:
            sql(trace, f"SELECT {name}(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)")
        assert "does not exist" not in str(error.value), name
