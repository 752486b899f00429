import json
import subprocess
import sys
from dataclasses import replace
from threading import Thread

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from builders import PROGRAMS, add_step, make_batch, make_trace
from forged import reseal, rewrite_table
from tim_trace.analysis.check.check import check
from tim_trace.analysis.compact import compact
from tim_trace.analysis.facts.read_series import read_series
from tim_trace.analysis.gate.gate import gate
from tim_trace.analysis.info import info
from tim_trace.analysis.report.page.page import page
from tim_trace.analysis.report.report import report
from tim_trace.analysis.stats import stats
from tim_trace.analysis.trace import large_tables, source
from tim_trace.analysis.trace.columns import num_scored
from tim_trace.analysis.trace.macros import LISTING
from tim_trace.analysis.trace.source import MADE_OF, sums_file
from tim_trace.analysis.verify import verify
from tim_trace.analysis.views import connect, open_database
from tim_trace.analysis.watch.watch import Watcher
from tim_trace.schemas.tables import TABLES, Column
from tim_trace.tracer import snapshot
from tim_trace.tracer.parquet_file import write_checked
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.store import Store

PAIR = ("train", "rollout")


def rows(path, query):
    return connect(path).execute(query).fetchall()


def test_views_hold_every_column_and_the_run(tmp_path):
    make_trace(tmp_path / "run")
    connection = connect(tmp_path / "run")
    for name, table in TABLES.items():
        columns = [row[0] for row in connection.execute(f"DESCRIBE {name}").fetchall()]
        assert columns == ["run", *(column.name for column in table.columns)]


def test_tokens_are_what_was_recorded(tmp_path):
    batches = make_trace(tmp_path / "run", steps=2)
    query = """
        SELECT step, seq_id, position, token_id, rollout_logprob, train_logprob, d, advantage, mask
        FROM tokens ORDER BY step, seq_id, position
    """
    wanted = []
    for step, batch in batches.items():
        for row, ids in enumerate(batch["response_ids"]):
            for position, token in enumerate(ids):
                rollout, train = float(batch["rollout"][row][position]), float(batch["train"][row][position])
                advantage = float(batch["advantage"][row])
                wanted.append(
                    (step, f"{step}-{row}", position, token, rollout, train, train - rollout, advantage, True)
                )
    assert rows(tmp_path / "run", query) == wanted


def test_tokens_of_a_sequence_without_scores_are_there_with_nulls(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_sequences(step=1, response_ids=[[7, 8]], response_mask=[[1, 0]], advantage=[[0.5, 0.25]])
    query = "SELECT token_id, rollout_logprob, train_logprob, d, mask, advantage FROM tokens ORDER BY position"
    assert rows(tmp_path / "run", query) == [(7, None, None, None, True, 0.5), (8, None, None, None, False, 0.25)]


def test_an_advantage_of_a_whole_response_keeps_its_digits_and_one_of_a_token_those_it_was_recorded_with(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for seq_id, advantage in {"a": 0.1, "b": 1e-50, "c": 1e300, "d": [0.1]}.items():
            added = recorder.add_sequences(step=1, seq_ids=[seq_id], response_ids=[[7]], advantage=[advantage])
            for name in ("rollout", "train"):
                recorder.add_scores(name, added, logprobs=[[-1.0]])
    wanted = [("a", 0.1), ("b", 1e-50), ("c", 1e300), ("d", float(np.float32(0.1)))]
    for table in ("tokens", "pair('train', 'rollout')"):
        assert rows(tmp_path / "run", f"SELECT seq_id, advantage FROM {table} ORDER BY seq_id") == wanted


def test_pair_agrees_with_tokens(tmp_path):
    make_trace(tmp_path / "run")
    pair = "SELECT step, seq_id, position, token_id, d FROM pair('train', 'rollout') ORDER BY ALL"
    tokens = "SELECT step, seq_id, position, token_id, d FROM tokens ORDER BY ALL"
    assert rows(tmp_path / "run", pair) == rows(tmp_path / "run", tokens)


def test_steps_join_sequences_and_metrics(tmp_path):
    batches = make_trace(tmp_path / "run")
    query = "SELECT step, num_sequences, mean_reward, first_policy_version, loss, learning_rate, grad_norm FROM steps"
    for (step, count, reward, version, loss, rate, norm), batch in zip(
        rows(tmp_path / "run", query), batches.values(), strict=True
    ):
        assert (count, version, loss, rate, norm) == (4, step - 1, 0.5 * step, 1e-6, None)
        np.testing.assert_allclose(reward, batch["reward"].mean(), rtol=1e-14)


def test_passes_show_the_contracts(tmp_path):
    make_trace(tmp_path / "run")
    found = rows(tmp_path / "run", 'SELECT "pass", engine, contract_json FROM passes')
    assert [(name, engine, json.loads(text)["dtype"]) for name, engine, text in found] == [
        ("rollout", "vllm", "bfloat16"),
        ("train", "trl", "float32"),
    ]


def test_plain_duckdb_reads_the_files_with_the_same_columns(tmp_path):
    import duckdb

    make_trace(tmp_path / "run")
    found = (
        duckdb.connect()
        .execute(f"SELECT count(*), sum(len(logprobs)) FROM '{tmp_path}/run/scores/*.parquet'")
        .fetchone()
    )
    assert found == tuple(rows(tmp_path / "run", "SELECT count(*), sum(len(logprobs)) FROM scores")[0])


@pytest.mark.slow
def test_a_filter_by_step_reads_that_step_s_row_groups_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("tim_trace.tracer.seal.ROW_GROUP_TOKENS", 20)
    make_trace(tmp_path / "run", steps=20, rows=8)
    (file,) = (tmp_path / "run" / "scores").glob("*.parquet")
    assert pq.ParquetFile(file).metadata.num_row_groups > 40
    connection = connect(tmp_path / "run")

    def scans(query):
        plan = json.loads(connection.execute(f"EXPLAIN (ANALYZE, FORMAT json) {query}").fetchone()[1])
        return [(node["row_groups_scanned"], node["total_row_groups_to_scan"]) for node in nodes(plan["operator"][0])]

    def nodes(node):
        if node.get("type") == "TABLE_SCAN":
            yield node
        for child in node.get("children", []):
            yield from nodes(child)

    for table in ("pair", "pair_steps", "step_cuts", "pair_sums"):
        found = scans(f"SELECT * FROM {table}('train', 'rollout') WHERE step = 7")
        assert len(found) >= 3
        assert all(0 < read < total / 5 for read, total in found), table


@pytest.mark.slow
@pytest.mark.parametrize("sealed", [False, True])
def test_a_live_trace_shows_what_was_recorded_by_now(tmp_path, sealed):
    with Recorder(tmp_path / "run") as recorder:
        if sealed:
            recorder.writer.segments.seal_bytes = 1
        for step in range(1, 6):
            add_step(recorder, step, make_batch(seed=step))
            recorder.flush()
            assert rows(tmp_path / "run", "SELECT count(*), max(step) FROM scores") == [(8 * step, step)]
            assert len(rows(tmp_path / "run", "FROM tokens")) == sum(
                len(ids) for s in range(1, step + 1) for ids in make_batch(seed=s)["response_ids"]
            )


@pytest.fixture
def live(tmp_path):
    """A recording under way, and what adds a step to every table of it."""
    with Recorder(tmp_path / "run") as recorder:
        steps = iter(range(1, 10_000))

        def add_step():
            step = next(steps)
            recorder.add_contract("train", {"engine": "none", "step": step})
            for split in ("train", "eval"):
                batch = recorder.add_sequences(step=step, response_ids=[[1, 2]], split=split)
                recorder.add_scores("train", batch, logprobs=[[-1.0, -2.0]])
            recorder.add_metrics(step, {"loss": 0.5})
            recorder.writer._worker.drain()

        add_step()
        yield tmp_path / "run", add_step


def test_all_tables_of_a_live_trace_are_of_one_moment(live, monkeypatch):
    run, add_step = live
    read = snapshot._read_table

    def read_slowly(*arguments):
        read(*arguments)
        add_step()

    monkeypatch.setattr(snapshot, "_read_table", read_slowly)
    tables = ("sequences", "scores", "metrics", "eval_sequences", "eval_scores")
    for num_steps in (1, 1 + len(TABLES)):
        found = connect(run).execute(f"SELECT {', '.join(f'(SELECT max(step) FROM {name})' for name in tables)}")
        assert found.fetchall() == [(num_steps,) * len(tables)]


def test_a_contract_of_a_live_or_killed_run_is_in_passes_with_the_first_score_under_it(live):
    run, add_step = live
    add_step()
    query = """SELECT count(*), count(engine) FROM scores LEFT JOIN passes USING (run, "pass", contract)"""
    assert connect(run).execute(query).fetchall() == [(2, 2)]
    (state,), _ = Store(run).writers()
    assert len([name for name in state.files if name.startswith("passes/train/")]) == 2


def test_every_score_has_its_sequence_where_journals_grow_between_any_two_looks(live, monkeypatch):
    run, add_step = live
    look = snapshot.journaled_segments

    def look_slowly(store):
        add_step()
        return look(store)

    monkeypatch.setattr(snapshot, "journaled_segments", look_slowly)
    query = "SELECT count(*), count(sequences.step) FROM scores LEFT JOIN sequences USING (run, step, seq_id)"
    ((scores, sequences),) = connect(run).execute(query).fetchall()
    assert scores == sequences > 1


def test_a_process_that_records_as_fast_as_it_can_is_read_as_of_one_moment(tmp_path):
    steps = ", ".join(
        f"(SELECT coalesce(max(step), 0) FROM {rows})"
        for rows in ("sequences", "scores WHERE pass = 'rollout'", "scores WHERE pass = 'train'", "metrics")
    )
    program = [sys.executable, PROGRAMS / "endless.py", tmp_path / "run", "logprobs", "60_000_000"]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as recording:
        try:
            recording.stdout.readline()
            Thread(target=recording.stdout.read, daemon=True).start()
            for _ in range(5):
                sampled, rollout, train, logged = connect(tmp_path / "run").execute(f"SELECT {steps}").fetchone()
                assert sampled >= rollout >= train >= logged >= sampled - 1, "in this order they are recorded"
        finally:
            recording.kill()


def test_a_trace_without_a_row_answers_with_nothing(tmp_path):
    Recorder(tmp_path / "run").close()
    for view in ("sequences", "scores", "metrics", "passes", "steps", "tokens", "pair_steps('train', 'rollout')"):
        assert rows(tmp_path / "run", f"SELECT * FROM {view}") == []


@pytest.mark.slow
def test_several_traces_are_one_database(tmp_path):
    make_trace(tmp_path / "a", steps=1)
    make_trace(tmp_path / "b", steps=2)
    found = connect([tmp_path / "a", tmp_path / "b"]).execute(
        "SELECT run, count(DISTINCT step), count(*) FROM tokens GROUP BY run ORDER BY run"
    )
    assert [(run, steps) for run, steps, _ in found.fetchall()] == [("a", 1), ("b", 2)]
    by_step = connect([tmp_path / "a", tmp_path / "b"]).execute("SELECT run, step FROM pair_steps('train', 'rollout')")
    assert by_step.fetchall() == [("a", 1), ("b", 1), ("b", 2)]


def test_names_with_quotes_are_names(tmp_path):
    make_trace(tmp_path / "it's")
    assert rows(tmp_path / "it's", "SELECT DISTINCT run FROM tokens") == [("it's",)]


def test_format_2_stays_readable(trace_v2):
    database = open_database(trace_v2)
    assert database.sources[0].damaged == []
    found = database.connection.execute("SELECT step, num_tokens, k3 FROM pair_steps('train', 'rollout')").fetchall()
    wanted = json.loads((trace_v2.parent / "trace-v2.json").read_text())
    assert [list(row) for row in found] == wanted["pair_steps"]


TYPES = {
    "VARCHAR": pa.string(), "BIGINT": pa.int64(), "INTEGER": pa.int32(), "DOUBLE": pa.float64(), "FLOAT": pa.float32(),
    "BOOLEAN": pa.bool_(), "UBIGINT": pa.uint64(), "TIMESTAMP WITH TIME ZONE": pa.timestamp("us", tz="UTC"),
}  # fmt: skip
TYPES |= {f"{name}[]": pa.list_(type) for name, type in TYPES.items()}
TYPES |= {"MAP(VARCHAR, DOUBLE)": pa.map_(pa.string(), pa.float64())}
"""DuckDB's name -> a type of Arrow that a column has, or may have one day."""
ADDED = tuple(
    Column(name=f"new_{place}", type=type, doc="a column of a later release")
    for place, type in enumerate(TYPES.values())
)


def test_every_type_of_a_column_is_tried():
    assert {column.type for table in TABLES.values() for column in table.columns} <= set(TYPES.values())


@pytest.fixture
def later(monkeypatch):
    """A later release, whose every table has a column more of every type."""
    for name, table in TABLES.items():
        monkeypatch.setitem(TABLES, name, replace(table, columns=(*table.columns[:-1], *ADDED, table.columns[-1])))


def read_again(trace, tmp_path):
    """Ask what an open, a view, each kind of verb and a merge make of a trace; what there is stays what it was."""
    assert info(str(trace)).damaged == ()
    database = open_database(trace)
    database.define_named(LISTING)
    assert database.damaged == ()
    counts = {name: database.ask(f"SELECT count(*) FROM {name}").rows[0][0] for name in TABLES}
    for name in (*TABLES, *(f"all_{name}" for name in TABLES)):
        described = {row["column_name"]: row["column_type"] for row in database.ask(f"DESCRIBE {name}").dicts()}
        assert [described[column.name] for column in ADDED] == list(TYPES), name
        known = " + ".join(f'count("{column.name}")' for column in ADDED)
        assert database.ask(f"SELECT {known} FROM {name}").rows == [(0,)], name
    steps = [{name: value for name, value in row.items() if name != "run"} for row in stats(trace, by="step").dicts()]
    assert check(trace).pair == "train:rollout"
    assert not gate(trace, fail_on=["tim.k3>9"]).fails
    assert len(read_series(open_database(trace))["k3"].steps) == len(steps)
    assert Watcher(trace).look().num_sequences == counts["sequences"]
    assert "<html" in page(report(trace))
    assert list(num_scored(open_database(trace))) == ["rollout", "train"]
    assert verify(trace).damaged == ()
    return counts, steps


@pytest.mark.filterwarnings("error::tim_trace.schemas.errors.TimTraceWarning")
@pytest.mark.parametrize("many_files", [large_tables.MANY_FILES, 0], ids=["few files", "large tables"])
def test_a_column_of_a_later_release_of_any_type_leaves_the_oldest_trace_whole(
    trace_v2, tmp_path, later, monkeypatch, many_files
):
    monkeypatch.setattr(large_tables, "MANY_FILES", many_files)
    counts, steps = read_again(trace_v2, tmp_path)
    expected = json.loads((trace_v2.parent / "trace-v2.json").read_text())["pair_steps"]
    assert (counts["sequences"], counts["scores"]) == (6, 12)
    assert [[row["step"], row["num_tokens"], pytest.approx(row["k3"])] for row in steps] == expected


@pytest.mark.slow
def test_a_journal_of_before_a_column_is_read_and_merged_with_it(tmp_path, monkeypatch):
    sealed = make_trace(tmp_path / "sealed") and tmp_path / "sealed"
    recorder = Recorder(tmp_path / "live")
    for step in (1, 2):
        add_step(recorder, step, make_batch(4, seed=step), seq_ids=list("abcd"))
    recorder.flush()
    for name, table in TABLES.items():
        monkeypatch.setitem(TABLES, name, replace(table, columns=(*table.columns[:-1], *ADDED, table.columns[-1])))
    assert read_again(tmp_path / "live", tmp_path)[0]["scores"] == 16
    before = read_again(sealed, tmp_path)
    compact(sealed, output=tmp_path / "merged")
    assert read_again(tmp_path / "merged", tmp_path) == before
    monkeypatch.undo()
    recorder.close()


def test_columns_that_are_never_null_are_those_of_the_first_release(trace_v2):
    """A later one would be missing from every file before it."""
    first = {
        "sequences": {"step", "seq_id", "response_ids", "num_response_tokens", "writer"},
        "scores": {"pass", "step", "seq_id", "iteration", "writer"},
        "metrics": {"step", "name", "writer"},
        "engine_weights": {"step", "policy_version", "tensor", "writer"},
    }
    first |= {f"eval_{name}": first[name] for name in ("sequences", "scores")}
    assert {
        name: {column.name for column in table.columns if not column.null} for name, table in TABLES.items()
    } == first
    for name in ("sequences", "scores", "metrics"):
        (file,) = (trace_v2 / name).glob("*.parquet")
        assert first[name] <= {*pq.read_schema(file).names}


@pytest.mark.parametrize("column", ["logprobs", "seq_id"])
def test_a_file_without_a_column_has_it_as_null_or_is_damaged_where_it_is_never_null(trace_v2, column):
    (file,) = (trace_v2 / "scores").glob("*.parquet")
    rewrite_table(file, lambda table: table.drop_columns([column]))
    reseal(trace_v2)
    found = info(str(trace_v2)).damaged
    if column == "seq_id":
        assert "missing columns: seq_id" in found[0]
        return
    assert found == ()
    assert rows(trace_v2, "SELECT count(*), count(logprobs) FROM scores") == [(12, 0)]
    assert list(num_scored(open_database(trace_v2))) == []
    assert Watcher(trace_v2).look().num_sequences == 6


def test_sums_of_an_earlier_release_are_passed_over_and_made_anew(trace_v2, monkeypatch):
    stats(trace_v2)
    monkeypatch.setattr(source, "_EDITION", source._EDITION + 1)
    before = {path.name for path in (trace_v2 / "sums").iterdir()}
    database = open_database(trace_v2)
    assert not database.sums.covers(PAIR)
    assert database.sources[0].damaged == []
    assert database.connection.execute("SELECT count(*) FROM sequence_sums").fetchall() == [(0,)]
    found = stats(trace_v2, by="step").rows
    made = {path.name for path in (trace_v2 / "sums").iterdir()} - before
    assert "sequence_sums" in {name.split("-")[0] for name in made}
    again = open_database(trace_v2)
    assert again.sums.covers(PAIR)
    assert stats(again, by="step").rows == found


def test_sums_of_an_edition_whose_numbers_may_be_another_run_s_are_not_believed(tmp_path):
    trace = tmp_path / "run"
    make_trace(trace)
    wanted = stats(trace, by="step").rows
    for kept in sorted((trace / "sums").iterdir()):
        kind, table = kept.name.split("-")[0], pq.read_table(kept)
        made_of = json.loads(table.schema.metadata[MADE_OF])
        del made_of["edition"]
        if kind == "sequence_sums":
            table = table.set_column(
                table.schema.get_field_index("sum_d"), table.schema.field("sum_d"), pc.add(table["sum_d"], 1)
            )
        table = table.replace_schema_metadata({MADE_OF: json.dumps(made_of).encode()})
        kept.unlink()
        written = write_checked(tmp_path / "odd", f"sums/{kind}", table.schema, [table])
        (tmp_path / "odd").rename(trace / sums_file(kind, written.footer))
    assert not open_database(trace).sums.covers(PAIR)
    assert stats(trace, by="step").rows == wanted


@pytest.mark.slow
def test_a_file_of_sums_with_other_columns_answers_nothing(tmp_path):
    trace = tmp_path / "run"
    make_trace(trace)
    wanted = stats(trace, by="step").rows
    (path,) = (trace / "sums").glob("sequence_sums-*")
    table = pq.read_table(path)
    narrow = table.set_column(10, "sum_abs_d", table["sum_abs_d"].cast("float"))
    for odd in (table.drop_columns("sum_weight2"), table.append_column("more", table["sum_d"]), narrow, table):
        for kept in (trace / "sums").glob("sequence_sums-*"):
            kept.unlink()
        written = write_checked(tmp_path / "odd", "sums/sequence_sums", odd.schema, [odd])
        (tmp_path / "odd").rename(trace / sums_file("sequence_sums", written.footer))
        database = open_database(trace)
        # The last of them has the right ones.
        assert (database.sums.covers(PAIR), database.sources[0].damaged) == (odd is table, [])
        assert stats(database, by="step").rows == wanted
