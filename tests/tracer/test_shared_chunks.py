import struct
from itertools import pairwise

import duckdb
import numpy as np
import pyarrow.dataset as datasets
import pyarrow.parquet as pq
import pytest
from segmented import make_run, rows_of
from tim_trace.analysis import compact
from tim_trace.analysis.verify import verify
from tim_trace.schemas.errors import DamagedTrace
from tim_trace.tracer.compaction import merge
from tim_trace.tracer.compaction.shared_chunks import read_struct, write_struct
from tim_trace.tracer.recorder import Recorder

PASSES = ("current", "rollout", "train")


def make_equal_run(path, *, differs_from=None):
    """A run of two files a table, whose pass `current` has the bits of `train`, up to the step from which it differs."""
    rng = np.random.default_rng(1)
    with Recorder(path) as recorder:
        for step in range(1, 41):
            lengths = rng.integers(300, 500, 8)
            batch = recorder.add_sequences(step=step, response_ids=[np.arange(n, dtype=np.int32) for n in lengths])
            rollout, train = ([-rng.exponential(1, n).astype(np.float32) for n in lengths] for _ in range(2))
            current = [values - 1 for values in train] if differs_from and step >= differs_from else train
            for name, values in zip(PASSES, (current, rollout, train), strict=True):
                recorder.add_scores(name, batch, logprobs=values)
            if step == 20:
                recorder.flush()
                recorder.writer.segments.seal()
    return path


def places(path):
    """(pass, first step) of a row group -> where its logprobs lie."""
    file = pq.ParquetFile(path)
    found = {}
    for number in range(file.num_row_groups):
        rows = file.read_row_group(number, columns=["pass", "step"])
        group = file.metadata.row_group(number)
        (column,) = (
            group.column(i) for i in range(group.num_columns) if group.column(i).path_in_schema.startswith("logprobs.")
        )
        assert len(set(rows["pass"].to_pylist())) == 1
        found[rows["pass"][0].as_py(), rows["step"][0].as_py()] = column.data_page_offset
    return found


def merged_scores(trace):
    (path,) = (trace / "scores").iterdir()
    return path


def test_passes_with_equal_bits_lie_once_in_a_merged_trace_and_answer_as_before(tmp_path, monkeypatch):
    trace = make_equal_run(tmp_path / "run")
    before = rows_of(trace)
    compact(trace)
    path = merged_scores(trace)
    found = places(path)
    steps = {step for _, step in found}
    assert len(steps) > 2
    for step in steps:
        assert found["current", step] == found["train", step] != found["rollout", step]
    assert rows_of(trace) == before
    assert verify(trace).is_whole
    apart = make_equal_run(tmp_path / "apart")
    monkeypatch.setattr(merge, "share_chunks", lambda path, sealed, block_bytes: sealed)
    compact(apart)
    assert path.stat().st_size < 0.8 * merged_scores(apart).stat().st_size
    for read in (
        pq.read_table,
        lambda path: pq.read_table(path, pre_buffer=False),
        lambda path: datasets.dataset(path).to_table(),
    ):
        rows, of_apart = read(path), read(merged_scores(apart))
        names = [name for name in rows.column_names if name not in ("seq_id", "writer")]
        assert rows.select(names).equals(of_apart.select(names))
    query = "SELECT pass, step, count(*), fsum(list_sum(logprobs)) FROM '{}' GROUP BY ALL ORDER BY ALL"
    assert duckdb.sql(query.format(path)).fetchall() == duckdb.sql(query.format(merged_scores(apart))).fetchall()


def test_passes_that_differ_keep_their_own_places(tmp_path):
    trace = make_equal_run(tmp_path / "run", differs_from=20)
    before = rows_of(trace)
    compact(trace)
    found = places(merged_scores(trace))
    steps = sorted({step for _, step in found})
    shared = [step for step in steps if found["current", step] == found["train", step]]
    assert shared == [step for step, after in pairwise(steps) if after <= 20] != []
    assert rows_of(trace) == before


def test_a_trace_whose_passes_lie_once_is_merged_again_with_what_came_since(tmp_path):
    trace = make_equal_run(tmp_path / "run")
    compact(trace)
    with Recorder(trace, resume=True) as recorder:
        batch = recorder.add_sequences(step=41, response_ids=[[1, 2]])
        for name in PASSES:
            recorder.add_scores(name, batch, logprobs=[[-1.0, -2.0]])
    before = rows_of(trace)
    compact(trace)
    found = places(merged_scores(trace))
    assert found["current", 1] == found["train", 1]
    assert rows_of(trace) == before
    assert verify(trace).is_whole


def test_damage_where_two_passes_lie_is_found(tmp_path):
    trace = make_equal_run(tmp_path / "run")
    compact(trace)
    path = merged_scores(trace)
    content = bytearray(path.read_bytes())
    content[places(path)["train", 1] + 100] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedTrace, match=path.name):
        rows_of(trace)
    assert not verify(trace).is_whole


def test_every_footer_is_read_and_written_to_the_same_bytes(tmp_path):
    trace = make_run(tmp_path / "run")
    for path in trace.rglob("*.parquet"):
        content = path.read_bytes()
        (size,) = struct.unpack("<i", content[-8:-4])
        footer = content[-8 - size : -8]
        assert write_struct(read_struct(footer)) == footer
        with pytest.raises(ValueError, match="ends within a value"):
            read_struct(footer[: size // 2])
