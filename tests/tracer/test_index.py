import json
import os
import shutil
import tracemalloc
from collections import Counter

import msgspec
import pyarrow as pa
import pytest
import s3fs
from builders import add_step, make_batch, make_trace
from segmented import make_run, rows_of
from tim_trace.analysis import compact
from tim_trace.analysis.info import info
from tim_trace.analysis.trace.sums import summarize
from tim_trace.analysis.verify import verify
from tim_trace.analysis.views import open_database
from tim_trace.schemas.checksums import whole_hash
from tim_trace.schemas.errors import DamagedTrace, DamageWarning, QueryFailed
from tim_trace.schemas.layout import TABLES
from tim_trace.tracer.index import MAX_BYTES, read_index, write_index
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.snapshot import take_snapshot
from tim_trace.tracer.store import Store
from tim_trace.tracer.upload import Upload


@pytest.fixture
def indexed(tmp_path):
    make_trace(tmp_path / "run", steps=4)
    write_index(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def requests(monkeypatch):
    """Requests to object storage, by their kind."""
    counted = Counter()
    call = s3fs.S3FileSystem._call_s3

    async def count(self, method, *arguments, **options):
        counted[method] += 1
        return await call(self, method, *arguments, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", count)
    return counted


def test_an_open_reads_no_footer_that_the_index_holds(indexed, monkeypatch):
    read, original = [], Store.read_range
    monkeypatch.setattr(
        Store, "read_range", lambda self, name, *where: read.append(name) or original(self, name, *where)
    )

    def tables_read():
        read.clear()
        open_database(indexed)
        return {name.partition("/")[0] for name in read if name.endswith((".parquet", ".zst"))}

    assert tables_read() == {"index"}
    shutil.rmtree(indexed / "index")
    assert tables_read() == {"sequences", "scores", "metrics"}


def test_the_summary_of_a_finished_trace_comes_with_an_index(tmp_path):
    make_trace(tmp_path / "run")
    summarize(tmp_path / "run")
    (path,) = (tmp_path / "run" / "index").iterdir()
    held = read_index(Store(tmp_path / "run")).paths
    there = {str(file.relative_to(tmp_path / "run")) for file in (tmp_path / "run").rglob("*") if file.is_file()}
    assert held == there - {"trace.json", f"index/{path.name}"} - {
        name for name in there if name.startswith("tokenizer/")
    }
    assert verify(tmp_path / "run").is_whole
    before = info(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "index")
    assert info(tmp_path / "run").writers == before.writers


def test_an_index_of_before_hides_nothing_that_came_since(indexed):
    before = rows_of(indexed)
    make_trace(indexed.parent / "more", steps=2)
    for table in ("sequences", "scores"):
        next((indexed / table).iterdir()).unlink()
    with pytest.warns(DamageWarning, match="is missing"):
        assert len(open_database(indexed).damaged) == 2
    shutil.rmtree(indexed)
    make_trace(indexed, steps=5)
    assert rows_of(indexed) != before


def contents_of(trace):
    """What the index of a trace holds, for tests to change."""
    (path,) = (trace / "index").iterdir()
    unpacked = pa.CompressedInputStream(pa.BufferReader(path.read_bytes()), "zstd").read()
    return msgspec.msgpack.decode(unpacked)


def put_index(trace, contents):
    """Put an index of these contents into a trace, under the name that fits it."""
    shutil.rmtree(trace / "index")
    (trace / "index").mkdir()
    content = pa.compress(msgspec.msgpack.encode(contents), codec="zstd", asbytes=True)
    (trace / "index" / f"{whole_hash(content)}.msgpack.zst").write_bytes(content)


def test_what_is_of_other_files_in_an_index_is_not_taken(indexed, tmp_path):
    before, states = rows_of(indexed), take_snapshot(Store(indexed)).writers
    make_trace(tmp_path / "other", steps=4, rows=7)
    write_index(tmp_path / "other")
    mine, other = contents_of(indexed), contents_of(tmp_path / "other")
    # Another trace's states, footers and contracts under this one's names, of files that have as many bytes.
    for kind in ("states", "footers", "documents"):
        foreign = {path.partition("/")[0]: entry for path, entry in other[kind].items()}
        for path, entry in mine[kind].items():
            given = foreign[path.partition("/")[0]]
            other[kind][path] = [entry[0], *given[1:]] if kind == "footers" else given
    put_index(indexed, other)
    assert rows_of(indexed) == before
    assert take_snapshot(Store(indexed)).writers == states
    assert not open_database(indexed).damaged


@pytest.mark.parametrize("kind", ["versions", "schemas"])
def test_an_index_whose_parts_do_not_fit_is_passed_over(indexed, kind):
    before = rows_of(indexed)
    for values in ([], [b"no schema"]):
        contents = contents_of(indexed)
        contents[kind] = values
        put_index(indexed, contents)
        assert not read_index(Store(indexed)).paths
        assert rows_of(indexed) == before
        assert len(verify(indexed).ignored) == 1
        write_index(indexed)


def test_states_of_an_index_are_those_that_lie_there(tmp_path):
    trace = make_run(tmp_path / "run")
    read = take_snapshot(Store(trace)).writers
    write_index(trace)
    index = read_index(Store(trace))
    assert set(index.states) == {f"writers/{state.writer}.json" for state in read}
    assert take_snapshot(Store(trace)).writers == read
    assert any(state.versions for state in read)


def test_a_local_state_that_changed_since_is_read_where_it_lies(tmp_path):
    trace = make_run(tmp_path / "run", attempts=False)
    write_index(trace)
    path = max((trace / "writers").iterdir())
    before = path.stat()
    content = path.read_bytes().replace(b'"num_sequences": ', b'"num_sequences":1')
    path.write_bytes(content)  # as many bytes, and at the same time as far as anybody can tell
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.warns(DamageWarning, match=path.name):
        assert open_database(trace).damaged


def test_states_of_an_index_are_read_anew_by_a_release_that_reads_more_of_them(tmp_path):
    trace = make_run(tmp_path / "run", attempts=False)
    write_index(trace)
    contents = contents_of(trace)
    contents["state_fields"] = contents["state_fields"][:-1]
    put_index(trace, contents)
    assert not read_index(Store(trace)).states
    assert read_index(Store(trace)).footers
    assert not open_database(trace).damaged


@pytest.mark.slow
def test_an_index_that_unpacks_to_more_than_any_has_takes_no_memory(indexed):
    before = rows_of(indexed)
    content = pa.compress(b" " * (1 << 29) + b"{}", codec="zstd", asbytes=True)
    (indexed / "index" / f"{whole_hash(content)}.msgpack.zst").write_bytes(content)
    tracemalloc.start()
    assert read_index(Store(indexed)).paths
    assert tracemalloc.get_traced_memory()[1] < 5 * MAX_BYTES
    tracemalloc.stop()
    assert rows_of(indexed) == before


@pytest.mark.parametrize("damage", ["flip", "cut", "text"])
def test_a_damaged_index_is_passed_over(indexed, damage):
    before = rows_of(indexed)
    (path,) = (indexed / "index").iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes({"flip": content, "cut": content[:50], "text": b"no index"}[damage])
    assert rows_of(indexed) == before
    assert not open_database(indexed).damaged
    found = verify(indexed)
    assert not found.damaged
    (sentence,) = found.ignored
    assert path.name in sentence


def test_damage_behind_a_footer_that_the_index_holds_is_found(indexed):
    (path,) = (indexed / "scores").iterdir()
    content = bytearray(path.read_bytes())
    content[40] ^= 255
    path.write_bytes(content)
    with pytest.raises(DamagedTrace, match=path.name):
        rows_of(indexed)
    content[40] ^= 255
    content[-20] ^= 255  # in the footer: answers are right without it, and verify reads it
    path.write_bytes(content)
    assert not open_database(indexed).damaged
    assert any(path.name in sentence for sentence in verify(indexed).damaged)


@pytest.mark.slow
def test_few_requests_open_a_trace_on_object_storage_however_many_its_writers_are(s3, tmp_path, requests):
    trace = make_run(tmp_path / "run", writers=12, steps=8, attempts=False)
    summarize(trace)
    s3.put(str(trace), "bucket/many/run", recursive=True)
    expected = rows_of(trace)
    requests.clear()
    database = open_database("s3://bucket/many/run")
    assert sum(requests.values()) <= 12, requests
    assert (
        database.ask("SELECT count(*) FROM sequences").rows
        == open_database(trace).ask("SELECT count(*) FROM sequences").rows
    )
    assert sum(requests.values()) <= 20, requests
    assert rows_of("s3://bucket/many/run") == expected
    compact(trace)
    s3.put(str(trace), "bucket/few/run", recursive=True)
    database = open_database("s3://bucket/few/run")
    requests.clear()
    (found,) = database.ask("SELECT count(*) FROM pair('train', 'rollout') WHERE step = 7").rows
    assert found[0] > 0
    assert sum(requests.values()) <= 10, requests


def test_a_writer_s_state_that_changed_since_is_read_where_it_lies(s3, tmp_path, requests):
    trace = make_run(tmp_path / "run", attempts=False)
    write_index(trace)
    path = max((trace / "writers").iterdir())
    state = json.loads(path.read_text())
    s3.put(str(trace), "bucket/changed/run", recursive=True)
    requests.clear()
    assert not open_database("s3://bucket/changed/run").damaged
    assert requests["get_object"] == 2  # the manifest and the index
    broken = json.dumps(state | {"num_tokens": 1 + state["num_tokens"]})  # its checksum fits no more
    s3.pipe_file(f"bucket/changed/run/writers/{path.name}", broken.encode())
    with pytest.warns(DamageWarning, match=path.name):
        open_database("s3://bucket/changed/run")


def test_a_file_that_goes_while_it_is_asked_is_told_as_that(indexed):
    database = open_database(indexed)
    for path in (indexed / "scores").iterdir():
        path.unlink()
    with pytest.raises(
        QueryFailed, match=r"disappeared while being read, because it was merged or removed\. Try again"
    ):
        database.ask("SELECT sum(len(logprobs)) FROM scores WHERE logprobs[1] < 0")


@pytest.mark.slow
def test_a_run_that_is_being_sent_has_an_index_of_nearly_all_that_is_there(s3, tmp_path):
    upload = Upload(tmp_path / "run", "s3://bucket/growing/run")
    indexed = []
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, 31):
            add_step(recorder, step, make_batch(seed=step), ("rollout", "train"), seq_ids=range(4))
            recorder.flush()
            recorder.writer.segments.seal()
            upload.send()
            if upload.has_grown:
                upload.send_index()
                indexed.append(step)
            names = s3.ls("bucket/growing/run/index") if indexed else []
            assert len(names) == bool(indexed)
    assert 2 <= len(indexed) <= 6
    store = Store("s3://bucket/growing/run")
    there = {f"{table}/{name}" for table in TABLES for name in store.files(table)}
    assert len(there & read_index(store).paths) > len(there) / 2
    upload.send()
    assert rows_of("s3://bucket/growing/run") == rows_of(tmp_path / "run")


def test_a_document_that_a_writer_replaces_by_a_longer_one_is_read_whole(tmp_path, monkeypatch):
    path, size_before = tmp_path / "state.json", len("{}")
    path.write_text('{"state": "open"}')
    monkeypatch.setattr(Store, "file_size", lambda *_: size_before)
    assert Store(tmp_path).read_json("state.json") == path.read_bytes()
