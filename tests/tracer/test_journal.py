import itertools
import os

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tim_trace.schemas.layout import Segment
from tim_trace.tracer.journal import JournalStream, read_journal
from tim_trace.tracer.store import Store

SCHEMA = pa.schema([("a", pa.int64()), ("b", pa.list_(pa.float32()))])
SEGMENT = Segment("w", 0)


def make_batch(start, rows=3):
    return pa.record_batch([list(range(start, start + rows)), [[0.5] * i for i in range(rows)]], schema=SCHEMA)


def write(folder, batches, close=True):
    stream = JournalStream(folder, SEGMENT, "scores", SCHEMA)
    ends = [stream.num_bytes]
    for batch in batches:
        stream.append(batch)
        ends.append(stream.num_bytes)
    if close:
        stream.close()
    else:
        stream._file.close()
    return stream.path, ends


@pytest.mark.parametrize("close", [True, False])
def test_a_journal_reads_back_whether_it_was_closed_or_not(tmp_path, close):
    batches = [make_batch(0), make_batch(10)]
    write(tmp_path, batches, close)
    content = read_journal(Store(tmp_path), SEGMENT, "scores")
    assert list(content.batches) == batches
    assert content.torn_bytes == 0


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 2000))
def test_cut_at_any_byte_a_journal_gives_its_whole_records(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("cut")
    batches = [make_batch(i) for i in range(4)]
    path, ends = write(folder, batches, close=False)
    content = path.read_bytes()[:cut]
    path.write_bytes(content)
    found = read_journal(Store(folder), SEGMENT, "scores")
    whole = sum(end <= len(content) for end in ends[1:])
    assert list(found.batches) == batches[:whole]
    assert found.torn_bytes == len(content) - max([0, *(end for end in ends if end <= len(content))])


@pytest.mark.parametrize(
    ("order", "kept"), [((0, 2, 3), 1), ((0, 1, 1, 2, 3), 2), ((0, 2, 1, 3), 1), ((1, 2, 3), 0)],
    ids=["left out", "twice", "other places", "the first left out"],
)  # fmt: skip
def test_records_are_read_in_the_order_in_which_they_were_written_alone(tmp_path, order, kept):
    batches = [make_batch(i) for i in range(4)]
    path, ends = write(tmp_path, batches)
    content = path.read_bytes()
    records = [content[start:stop] for start, stop in itertools.pairwise(ends)]
    path.write_bytes(content[: ends[0]] + b"".join(records[i] for i in order) + content[ends[-1] :])
    found = read_journal(Store(tmp_path), SEGMENT, "scores")
    assert list(found.batches) == batches[:kept]
    assert found.damage is not None


@pytest.mark.parametrize("record", [0, 1, 2])
@pytest.mark.parametrize("close", [True, False])
def test_a_damaged_length_before_the_last_record_is_damage_and_no_torn_end(tmp_path, record, close):
    batches = [make_batch(i) for i in range(4)]
    path, ends = write(tmp_path, batches, close)
    content = bytearray(path.read_bytes())
    content[ends[record] + 4 : ends[record] + 8] = (1 << 30).to_bytes(4, "little")  # longer than the file
    path.write_bytes(content)
    found = read_journal(Store(tmp_path), SEGMENT, "scores")
    assert (list(found.batches), found.torn_bytes) == (batches[:record], 0)
    assert "its length is wrong" in found.damage


def test_a_damaged_byte_of_the_last_but_one_record_is_damage(tmp_path):
    batches = [make_batch(i) for i in range(3)]
    path, ends = write(tmp_path, batches, close=False)
    whole = path.read_bytes()
    for place in range(ends[1], ends[2]):
        content = bytearray(whole)
        content[place] ^= 0x40
        path.write_bytes(content)
        found = read_journal(Store(tmp_path), SEGMENT, "scores")
        assert (list(found.batches), found.torn_bytes, found.damage is None) == (batches[:1], 0, False), place


def test_bytes_after_the_end_of_a_journal_are_damage(tmp_path):
    path, _ = write(tmp_path, [make_batch(0)])
    assert read_journal(Store(tmp_path), SEGMENT, "scores").damage is None
    path.write_bytes(path.read_bytes() + b"more")
    found = read_journal(Store(tmp_path), SEGMENT, "scores")
    assert list(found.batches) == [make_batch(0)]
    assert "4 bytes follow the end of the stream" in found.damage


def test_rows_that_no_writer_gives_are_damage_though_their_checksum_fits(tmp_path):
    offsets = pa.array([0, 9, 1], pa.int32())  # beyond the values, and back
    wrong = pa.ListArray.from_buffers(
        pa.list_(pa.float32()), 2, [None, offsets.buffers()[1]], children=[pa.array([0.5], pa.float32())]
    )
    write(tmp_path, [make_batch(0), pa.record_batch([pa.array([1, 2]), wrong], schema=SCHEMA)])
    found = read_journal(Store(tmp_path), SEGMENT, "scores")
    is_damaged = found.damage is not None  # a failing assert would print rows that Arrow cannot
    assert is_damaged
    assert list(found.batches) == [make_batch(0)]


def test_foreign_bytes_are_no_records(tmp_path):
    path, _ = write(tmp_path, [make_batch(0)])
    path.write_bytes(b"this is not Arrow, and long enough to be taken for a header")
    content = read_journal(Store(tmp_path), SEGMENT, "scores")
    assert content.batches == ()
    assert content.damage is not None


def test_a_journal_is_readable_by_arrow_itself(tmp_path):
    path, _ = write(tmp_path, [make_batch(0), make_batch(10)])
    assert pa.ipc.open_stream(path).read_all() == pa.Table.from_batches([make_batch(0), make_batch(10)])


def test_a_file_system_that_counts_no_links_is_recorded_to(tmp_path, monkeypatch):
    fstat = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result([*fstat(fd)[:3], 0, *fstat(fd)[4:]]))
    path, _ = write(tmp_path, [make_batch(0)])
    assert os.stat(path).st_nlink == 1
    assert read_journal(Store(tmp_path), SEGMENT, "scores").batches == (make_batch(0),)
