import gc
import os
import shutil

import duckdb
import numpy as np
import pandas
import polars
import pyarrow.parquet as pq
import pytest
from builders import tim_trace
from segmented import add_steps, make_run, rows_of
from tim_trace.analysis import check, compact, objective, stats
from tim_trace.analysis.trace.sums import summarize
from tim_trace.analysis.verify import verify
from tim_trace.analysis.views import open_database
from tim_trace.schemas.errors import DamagedTrace, TraceExists
from tim_trace.schemas.layout import TABLES
from tim_trace.tracer.compaction import buckets
from tim_trace.tracer.compaction.merge import merge
from tim_trace.tracer.progress import no_progress
from tim_trace.tracer.recorder import Recorder


def answers(trace):
    """The same, and what verbs answer."""
    found = rows_of(trace)
    for by in ("run", "step", "sequence"):
        found.append(str(stats(trace, by=by).rows))
    found += [str(check(trace)), str(objective(trace))]
    return [text.replace(str(trace), "RUN") for text in found]


def sealed_files(trace):
    return {str(path.relative_to(trace)) for table in TABLES for path in (trace / table).glob("*.parquet")}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Buckets and row groups of a few steps, so that a small trace has several."""
    monkeypatch.setattr(buckets, "BUCKET_TOKENS", 1500)
    monkeypatch.setattr(buckets, "SWEEP_BUCKETS", 3)
    monkeypatch.setattr(buckets, "STEP_TOKENS", 300)


@pytest.mark.slow
def test_every_answer_is_the_same_from_few_files(tmp_path):
    trace = make_run(tmp_path / "run")
    summarize(trace)
    before, files = answers(trace), sealed_files(trace)
    found = compact(trace)
    after = sealed_files(trace)
    assert answers(trace) == before
    assert len(after) < len(files) / 3
    assert after.isdisjoint(files - after)
    assert {row[0]: row[2] for row in found.tables.rows if row[1]} == dict.fromkeys(
        (row[0] for row in found.tables.rows if row[1]), 1
    )
    assert verify(trace).is_whole
    assert not verify(trace).ignored
    assert not compact(trace).has_changed
    # What was computed of all rows holds for the merged ones.
    assert open_database(trace).sums.covers(("train", "rollout"), runs=True)


def test_rows_are_in_the_order_of_steps_and_row_groups_end_where_steps_do(tmp_path):
    trace = make_run(tmp_path / "run")
    compact(trace)
    (path,) = (trace / "scores").iterdir()
    file = pq.ParquetFile(path)
    seen, steps_of_pass = set(), {}
    for number in range(file.num_row_groups):
        rows = file.read_row_group(number, columns=["pass", "step"])
        (name,) = set(rows["pass"].to_pylist())
        steps = rows["step"].to_pylist()
        assert steps == sorted(steps)
        assert steps[0] >= steps_of_pass.get(name, 0)
        steps_of_pass[name] = steps[-1]
        assert not seen & {(name, step) for step in steps}
        seen |= {(name, step) for step in steps}
    assert file.num_row_groups > 6


@pytest.mark.slow
def test_a_large_step_is_cut_and_files_have_about_the_wanted_size(tmp_path, monkeypatch):
    monkeypatch.setattr(buckets, "ROW_GROUP_TOKENS", 60)
    trace = make_run(tmp_path / "run")
    before = answers(trace)
    merge(str(trace), 20_000, no_progress)
    sizes = [path.stat().st_size for path in (trace / "scores").iterdir()]
    assert len(sizes) > 1
    assert max(sizes) < 60_000
    assert answers(trace) == before
    assert max(pq.ParquetFile(path).metadata.row_group(0).num_rows for path in (trace / "scores").iterdir()) < 60


@pytest.mark.slow
def test_whenever_it_is_killed_every_answer_stays_and_the_next_call_goes_on(tmp_path, monkeypatch):
    whole = make_run(tmp_path / "whole", writers=2, steps=4)
    before = rows_of(whole)
    original = {name: getattr(os, name) for name in ("replace", "unlink", "rename")}

    class Killed(BaseException):
        pass

    def killed_after(count):
        left = [count]

        def counted(name):
            def call(*arguments, **options):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return original[name](*arguments, **options)

            return call

        return {name: counted(name) for name in original}

    points = 0
    while True:
        trace = tmp_path / f"killed-{points}" / "whole"
        shutil.copytree(whole, trace)
        gc.collect()  # a temporary folder of an earlier read must not be removed by the calls that are killed
        with monkeypatch.context() as patch:
            for name, call in killed_after(points).items():
                patch.setattr(os, name, call)
            try:
                compact(trace)
                ended = True
            except Killed:
                ended = False
        assert rows_of(trace) == before, points
        compact(trace)
        assert rows_of(trace) == before, points
        assert len(list((trace / "scores").iterdir())) == 1
        assert not [path for path in trace.iterdir() if path.name.startswith(".tmp-")], points
        if ended:
            break
        shutil.rmtree(trace.parent)
        points += 1
    assert points > 20


def test_merged_files_beside_those_that_they_replace_count_once(tmp_path, monkeypatch):
    trace = make_run(tmp_path / "run", writers=2, steps=2)
    before, unlink = rows_of(trace), os.unlink

    class Killed(BaseException):
        pass

    def killed(path, *arguments, **options):
        if str(path).endswith(".parquet"):
            raise Killed
        unlink(path, *arguments, **options)

    num_files = len(sealed_files(trace))
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", killed)
        with pytest.raises(Killed):
            compact(trace)
    assert len(sealed_files(trace)) > num_files
    assert rows_of(trace) == before
    compact(trace)
    assert rows_of(trace) == before


def test_a_run_that_is_recorded_is_not_merged(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        add_steps(recorder, 0, range(1, 3))
        with pytest.raises(TraceExists, match=r"is being recorded .*, so it cannot be merged"):
            compact(tmp_path / "run")


def test_replays_keep_files_of_their_own(tmp_path):
    trace = make_run(tmp_path / "run")
    with Recorder(trace, resume=True) as recorder:
        recorder.add_contract("replay/fp32", {"engine": "hf"})
        batch = recorder.add_sequences(step=99, response_ids=[[1]])
        recorder.add_scores("replay/fp32", batch, logprobs=[[-1.0]])
        name = recorder.writer.name
    compact(trace)
    assert {path.name.rpartition("-")[0] for path in (trace / "scores").iterdir() if path.name.startswith(name)} == {
        name
    }


def test_what_is_damaged_is_not_merged(tmp_path):
    trace = make_run(tmp_path / "run")
    next((trace / "scores").iterdir()).unlink()
    with pytest.raises(DamagedTrace, match="merging would make the loss permanent"):
        compact(trace)


def test_damage_that_is_met_while_merging_leaves_the_trace_as_it_is(tmp_path):
    trace = make_run(tmp_path / "run")
    path = max((trace / "scores").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[300] ^= 255
    path.write_bytes(content)
    files = sealed_files(trace)
    with pytest.raises(DamagedTrace, match=path.name):
        compact(trace)
    assert sealed_files(trace) == files
    assert not [entry for entry in trace.iterdir() if entry.name.startswith(".tmp-")]


@pytest.mark.slow
def test_another_folder_gets_the_merged_trace_and_the_first_one_stays(tmp_path):
    trace = make_run(tmp_path / "run")
    files = sealed_files(trace)
    before = answers(trace)
    compact(trace, output=tmp_path / "merged" / "run")
    assert sealed_files(trace) == files
    assert answers(tmp_path / "merged" / "run") == before
    assert verify(tmp_path / "merged" / "run").is_whole
    with pytest.raises(TraceExists):
        compact(trace, output=tmp_path / "merged" / "run")
    compact(trace, output=tmp_path / "merged" / "run", force=True)
    assert answers(tmp_path / "merged" / "run") == before


@pytest.mark.slow
def test_object_storage_gets_the_merged_trace(tmp_path, s3):
    trace = make_run(tmp_path / "run")
    before = answers(trace)
    done = tim_trace("compact", trace, "-o", "s3://bucket/merged/run", "--json")
    assert done.code == 0, done.stderr
    assert done.json()["trace"] == "s3://bucket/merged/run"
    assert s3.ls("bucket/merged/run/index")
    assert answers("s3://bucket/merged/run") == before
    again = tim_trace("compact", trace, "-o", "s3://bucket/merged/run")
    assert (again.code, "already exists. Use another URL" in again.stderr) == (2, True)
    compact("s3://bucket/merged/run", output=tmp_path / "back" / "run")
    assert answers(tmp_path / "back" / "run") == before


@pytest.mark.slow
def test_merged_files_are_plain_parquet_to_other_readers(tmp_path):
    trace = make_run(tmp_path / "run", attempts=False)
    compact(trace)
    ids = "SELECT step, seq_id, list_sum(response_ids) AS ids FROM sequences ORDER BY step, seq_id"
    expected = open_database(trace).ask(ids).rows
    files = f"{trace}/sequences/*.parquet"
    assert duckdb.connect().sql(ids.replace("FROM sequences", f"FROM read_parquet('{files}')")).fetchall() == expected
    rows = polars.scan_parquet(files).select("step", "seq_id", polars.col("response_ids").list.sum()).collect()
    assert rows.sort("step", "seq_id").rows() == expected
    table = pq.read_table(trace / "sequences", columns=["step", "seq_id", "response_ids"]).to_pylist()
    assert sorted((row["step"], row["seq_id"], sum(row["response_ids"])) for row in table) == expected
    frame = pandas.read_parquet(trace / "scores", columns=["pass", "logprobs"])
    found = sum(float(np.sum(values, dtype=np.float64)) for values in frame["logprobs"][frame["pass"] == "train"])
    (row,) = open_database(trace).ask("SELECT fsum(train_logprob) FROM tokens").rows
    assert found == pytest.approx(row[0], rel=1e-12)
