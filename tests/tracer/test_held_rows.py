import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from segmented import add_steps
from tim_trace.schemas.capture import Capture
from tim_trace.schemas.documents import CLOSED, Manifest
from tim_trace.tracer.create import new_trace
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.segments import HeldRows
from tim_trace.tracer.store import Store
from tim_trace.tracer.writer import TraceWriter

OWN = ("writer", "contract", "seq_id")
"""Columns that name the writer; names of sequences are made of its name."""


def tables(folder):
    """Rows of the files of a trace, without what names the writer: folder -> [rows of a file]."""
    found = {}
    for kind in ("sequences", "scores"):
        parts = [pq.read_table(path) for path in sorted((folder / kind).glob("*.parquet"))]
        found[kind] = [part.drop_columns([name for name in OWN if name in part.column_names]) for part in parts]
    return found


def write(folder, *, journals, seal_bytes):
    manifest = Manifest(run_id="r", created_at="2026-01-01T00:00:00Z", created_by="test", source="test")
    with new_trace(folder, manifest) as made:
        writer = TraceWriter(made, journals=journals)
        writer.segments.seal_bytes = seal_bytes
        with Recorder.of_writer(writer, Capture()) as recorder:
            for step in range(1, 4):
                add_steps(recorder, 1, [step])
                recorder.flush()
    return writer


def test_rows_that_wait_in_memory_are_sealed_as_those_of_a_journal_are(tmp_path):
    for journals in (True, False):
        write(tmp_path / str(journals), journals=journals, seal_bytes=1 << 30)
    assert tables(tmp_path / "False") == tables(tmp_path / "True")


def test_rows_that_wait_in_memory_are_sealed_when_they_are_many(tmp_path):
    writer = write(tmp_path / "run", journals=False, seal_bytes=1)
    found = tables(tmp_path / "run")
    assert len(found["sequences"]) > 1
    assert sum(table.num_rows for table in found["sequences"]) == 18
    assert sum(table.num_rows for table in found["scores"]) == 54
    (state,) = Store(tmp_path / "run").writers()[0]
    assert (state.state, state.journals) == (CLOSED, ())
    assert set(state.files) == set(writer.state.files)
    assert not (tmp_path / "run" / "journal").exists()


def test_what_is_no_table_is_refused_before_it_waits():
    names = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    rows = HeldRows()
    with pytest.raises(pa.ArrowInvalid, match="UTF8"):
        rows.append(pa.record_batch([names], names=["seq_id"]))
    assert (rows.batches, rows.num_bytes) == ([], 0)
