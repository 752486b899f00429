"""Reading a trace that a stranger made, its checksums right: bounded in memory and time, and nothing outside of it."""

import contextlib
import json
import os
import shutil
import socket
import struct

import numpy as np
import pyarrow as pa
import pytest
import torch
from builders import make_batch, make_trace
from forged import change_document, reseal, rewrite_table
from shared import rest_slow
from tim_trace.analysis.info import info
from tim_trace.analysis.trace.sums import summarize
from tim_trace.analysis.views import connect
from tim_trace.schemas.documents import MAX_DEPTH, read_object
from tim_trace.schemas.errors import DamagedTrace, DamageWarning, StorageError, WeightsMissing
from tim_trace.tracer.dense import TopK, read_dense
from tim_trace.tracer.journal import JournalStream, read_journal
from tim_trace.tracer.liveness import journal_of
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.seal import adopt
from tim_trace.tracer.snapshot import take_snapshot
from tim_trace.tracer.store import Store
from tim_trace.tracer.weights.checkpoints import open_weights
from tim_trace.tracer.whole_file import write_part

DAMAGE = pytest.mark.filterwarnings("ignore::tim_trace.schemas.errors.DamageWarning")


@pytest.fixture
def trace(tmp_path):
    make_trace(tmp_path / "run")
    return tmp_path / "run"


def only(folder, pattern="*"):
    (path,) = folder.glob(pattern)
    return path


def damaged(trace):
    """What is said of a trace's damage, in sentences that a terminal can show in one line each."""
    return list(info(str(trace)).damaged)


# Links and special files


def put_special(kind, path):
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path is short
        try:
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(path.name)
        finally:
            os.chdir(here)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "circle":
        path.symlink_to(path.name)
    elif kind == "outside":
        path.symlink_to("/etc/passwd")


KINDS = ["fifo", "socket", "folder", "device", "circle", "outside"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", ["writers/*.json", "scores/*.parquet", "passes/train/*.json"])
def test_what_is_no_regular_file_is_named_and_stops_nothing(trace, kind, file):
    path = only(trace, file)
    put_special(kind, path)
    assert any(path.name in sentence for sentence in damaged(trace))
    with pytest.warns(DamageWarning):
        (count,) = connect(trace).execute("SELECT count(*) FROM sequences").fetchone()
    assert count == (0 if file.startswith("writers/") else 12)  # what no writer accounts for does not count


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_json_that_is_no_file_is_refused(trace, kind):
    put_special(kind, trace / "trace.json")
    with pytest.raises((DamagedTrace, OSError), match=r"trace\.json"):
        take_snapshot(Store(trace))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        "journal/p1-000000.scores.arrows",
        "sums/sequence_sums-00.parquet",
        "tokenizer/tokenizer.json",
        "weights/p1-000000.0.json",
    ],
)
def test_a_special_file_more_does_not_hang(trace, kind, name):
    (trace / name).parent.mkdir(exist_ok=True)
    put_special(kind, trace / name)
    damaged(trace)
    open_weights(Store(trace))
    assert take_snapshot(Store(trace)).store.size("sequences") > 0


@pytest.mark.parametrize("folder", ["scores", "passes", "writers", "journal", "sums", "dense", "weights", "tokenizer"])
def test_a_folder_that_is_a_link_out_is_named_and_not_listed(trace, tmp_path, folder):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret-name.txt").write_text("secret")
    shutil.rmtree(trace / folder, ignore_errors=True)
    (trace / folder).symlink_to(outside)
    found = info(str(trace))
    assert any(f"{folder} is a link that points outside the trace" in sentence for sentence in found.damaged)
    assert not any("secret" in sentence for sentence in (*found.damaged, *found.ignored))
    assert Store(trace).files(folder) == {}
    assert Store(trace).walk(folder) == {}


def test_links_in_circles_are_not_walked(trace):
    for name in "abcdef":
        (trace / "passes" / name).symlink_to(".")
    assert set(Store(trace).walk("passes")) == {
        path.relative_to(trace / "passes").as_posix() for path in trace.glob("passes/*in/*.json")
    } | {path.relative_to(trace / "passes").as_posix() for path in trace.glob("passes/rollout/*.json")}


def test_hard_links_are_files(trace):
    path = only(trace / "scores")
    other = path.with_name("other")
    os.link(path, other)
    path.unlink()
    os.link(other, path)
    other.unlink()
    assert damaged(trace) == []


@pytest.mark.parametrize("folder", rest_slow(["scores", "passes", "writers", "journal", "dense", "sums"], 2))
def test_files_of_any_name_are_passed_over(trace, folder):
    (trace / folder).mkdir(exist_ok=True)
    for name in ("a\nb", "\x1b[2J", "'; DROP", "*", "[a]", "?", "x" * 250, "\udcff", "%s{0}", "-rf"):
        (trace / folder / name).write_text("{}")
    info(str(trace))
    assert connect(trace).execute("SELECT count(*) FROM sequences").fetchone() == (12,)


@pytest.mark.parametrize("folder", ["sums", "journal", "scores", "passes", "writers"])
def test_nothing_is_written_through_a_link(trace, tmp_path, folder):
    outside = tmp_path / "outside"
    shutil.copytree(trace / folder, outside, dirs_exist_ok=True) if (trace / folder).exists() else outside.mkdir()
    shutil.rmtree(trace / folder, ignore_errors=True)
    (trace / folder).symlink_to(outside)
    before = {path: path.stat().st_mtime_ns for path in outside.rglob("*")}
    with pytest.raises(StorageError, match="is a link"):
        adopt(trace)
    with pytest.raises(StorageError, match="is a link"):
        write_part(trace, f"{folder}/x", b"x")
    with pytest.warns(DamageWarning):
        summarize(trace)
    with contextlib.suppress(StorageError, DamagedTrace):
        Recorder(trace, resume=True).close()
    assert {path: path.stat().st_mtime_ns for path in outside.rglob("*")} == before


@pytest.mark.parametrize("prefix", [".tmp-replaced-", ".tmp-replacing-", ".tmp-new-"])
@pytest.mark.parametrize("has_trace", [False, True])
def test_a_folder_that_was_to_be_put_back_or_removed_is_no_link(tmp_path, prefix, has_trace):
    outside, target = tmp_path / "outside", tmp_path / "run"
    make_trace(outside)
    (outside / "mine.txt").write_text("mine")
    if has_trace:
        make_trace(target)
    before = sorted(path.relative_to(outside) for path in outside.rglob("*"))
    target.mkdir(exist_ok=True)
    (target / f"{prefix}{'0' * 32}").symlink_to(outside)
    Recorder(target, force=True).close()
    assert sorted(path.relative_to(outside) for path in outside.rglob("*")) == before


# JSON


def nested(depth):
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    "content",
    [
        nested(10**5), nested(MAX_DEPTH + 1), "[" * 10**6, '{"a": "\\ud800"}', '{"\\udfff": 1}', '{"a": ' + "9" * 10**5 + "}",
        '{"a": 1' + "0" * 400 + "}", "[]", "7", "null", '"x"', '{"a": 1', "\x00", "{'a': 1}", '{"a": 01}', '[["a", 1]]',
    ],
)  # fmt: skip
def test_a_document_that_would_stop_its_reader_is_refused(content):
    with pytest.raises(DamagedTrace, match=r"^x\.json is not a document") as caught:
        read_object(content.encode(), "x.json", "a document")
    assert str(caught.value).isprintable()


def test_a_document_as_deep_as_allowed_is_read_and_the_last_of_two_keys_counts():
    assert read_object(nested(MAX_DEPTH).encode(), "", "")
    assert read_object(b'{"a": 1, "a": 2}', "", "") == {"a": 2}
    assert np.isnan(read_object(b'{"a": NaN}', "", "")["a"])


def test_a_large_document_is_refused_unread(trace):
    path = only(trace / "writers")
    with path.open("wb") as file:
        file.truncate(1 << 40)  # holes: it takes no room on the disk
    assert any("1,099,511,627,776 bytes" in sentence for sentence in damaged(trace))


@pytest.mark.parametrize("file", ["journal/w-000000.scores.arrows", "scores/w-000000.parquet"])
def test_a_file_of_holes_takes_no_memory(trace, file):
    (trace / file).parent.mkdir(exist_ok=True)
    with (trace / file).open("wb") as opened:
        opened.truncate(1 << 42)
    assert any(file.rpartition("/")[2] in sentence for sentence in damaged(trace))


# Journals


def journal(tmp_path, table="dense", segment="w-000000", **options):
    path = tmp_path / "run" / "journal" / f"{segment}.{table}.arrows"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def stream(path, batch, **options):
    """A journal with right checksums, whatever its record holds."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    messages = pa.ipc.MessageReader.open_stream(sink.getvalue())
    messages.read_next_message()  # the schema, which JournalStream writes itself
    made = JournalStream(path.parents[1], *journal_of(path.name), batch.schema)
    made._append_message(messages.read_next_message().serialize())
    made.close()


def dense_batch(**changes):
    row = {
        "group": "w-000000/train",
        "array": "logits",
        "dtype": "float32[4]",
        "start": 0,
        "rows": 2,
        "data": bytes(32),
    }
    from tim_trace.tracer.journal import DENSE_SCHEMA

    return pa.RecordBatch.from_pylist([row | changes], schema=DENSE_SCHEMA)


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_compressed_record_is_not_unpacked(tmp_path, compression):
    batch = dense_batch(data=bytes(1 << 26))
    stream(journal(tmp_path), batch, compression=compression)
    from tim_trace.schemas.layout import Segment

    found = read_journal(Store(tmp_path / "run"), Segment("w", 0), "dense")
    assert found.batches == ()
    assert "it is compressed" in found.damage


@pytest.mark.parametrize(
    "changes",
    [
        {"group": "../../../outside"}, {"group": "w-000000/../../x"}, {"group": "w-000001/train"}, {"group": "w-000000//etc"},
        {"array": "../../x"}, {"array": "a/b"}, {"array": ""}, {"array": "a\0b"}, {"dtype": "O[4]"}, {"dtype": "object[4]"},
        {"dtype": "(2,3)f4[1]"}, {"dtype": "V10[4]"}, {"dtype": "float32[0]"}, {"dtype": "float32[-1]"}, {"dtype": "float32[x]"},
        {"dtype": "float32[1099511627776]"}, {"rows": 2**60}, {"rows": -2}, {"start": -1}, {"data": b"abc"}, {"data": b""},
    ],
)  # fmt: skip
def test_a_block_of_distributions_that_no_writer_gives_is_refused_and_never_sealed(trace, tmp_path, changes):
    stream(journal(tmp_path), dense_batch(**changes))
    with pytest.raises(DamagedTrace, match="contains an invalid block"):
        read_dense(Store(trace), "w-000000/train", 0, 2)
    state = only(trace / "writers")
    values = json.loads(state.read_bytes()) | {
        "writer": "w",
        "state": "open",
        "boot_id": "of another start",
        "journals": [],
    }
    (trace / "writers" / "w.json").write_text(json.dumps(values))
    change_document(trace / "writers" / "w.json", lambda values: values)
    adopt(trace)
    assert not (trace / "dense").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_block_that_a_writer_gives_is_read(trace, tmp_path):
    stream(journal(tmp_path), dense_batch())
    assert read_dense(Store(trace), "w-000000/train", 0, 2)["logits"].tolist() == [[0.0] * 4] * 2


# Zarr


@pytest.fixture
def captured(tmp_path):
    draw = np.random.default_rng(0)
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(step=1, response_ids=[[1, 2, 3]])
        kept = TopK(token_ids=np.tile(np.arange(4, dtype=np.int32), (3, 1)),
                    logprobs=-draw.exponential(1, (3, 4)).astype(np.float32), tail_logprob=np.full(3, -3, np.float32))  # fmt: skip
        recorder.add_scores("train", batch, logprobs=[[-1.0] * 3], distribution=kept, captured_rows=[0])
    return tmp_path / "run"


def group_of(trace):
    return f"{only(trace / 'dense').name}/train"


def set_in(*path, to):
    def change(values):
        at = values
        for name in path[:-1]:
            at = at[name]
        at[path[-1]] = to

    return change


SHARDING = ("codecs", 0, "configuration")
GZIP = {"name": "gzip", "configuration": {"level": 9}}
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
BLOSC = {
    "name": "blosc",
    "configuration": {"cname": "zstd", "clevel": 1, "shuffle": "noshuffle", "typesize": 4, "blocksize": 0},
}


@pytest.mark.parametrize(
    "change",
    [
        set_in("zarr_format", to=2), set_in("node_type", to="group"), set_in("shape", to=[3, 2**60]), set_in("shape", to=[2**60, 4]),
        set_in("shape", to=[3, 2**40]), set_in("shape", to=[3, -1]), set_in("shape", to=[]), set_in("shape", to=[3, True]),
        set_in("shape", to=[1] * 40), set_in("data_type", to="float64"), set_in("data_type", to={"name": "numpy.datetime64"}),
        set_in("data_type", to="object"), set_in("attributes", to={"dtype": "object"}), set_in("attributes", to=7),
        set_in("attributes", to={"dtype": "float16"}), set_in("storage_transformers", to=[{"name": "x"}]),
        set_in("chunk_grid", "name", to="rectilinear"), set_in("chunk_key_encoding", to={"name": "v2"}),
        set_in("chunk_grid", "configuration", "chunk_shape", to=[2**45, 4]), set_in(*SHARDING, "chunk_shape", to=[2**40, 4]),
        set_in(*SHARDING, "chunk_shape", to=[0, 4]), set_in(*SHARDING, "chunk_shape", to=[3, 4, 1]),
        set_in(*SHARDING, "codecs", to=[BYTES, GZIP]), set_in(*SHARDING, "codecs", to=[BYTES, BLOSC, BLOSC]),
        set_in(*SHARDING, "codecs", to=[{"name": "sharding_indexed", "configuration": {}}]), set_in(*SHARDING, "codecs", to=[]),
        set_in(*SHARDING, "index_codecs", to=[BYTES]), set_in(*SHARDING, "index_location", to="start"),
        set_in("codecs", to=[{"name": "numcodecs.pickle"}]), set_in("codecs", to=[{"name": "vlen-utf8"}]), set_in("codecs", to="x"),
    ],
)  # fmt: skip
def test_an_array_that_is_not_written_here_is_not_opened(captured, change):
    change_document(only(captured, "dense/*/train/logprobs/zarr.json"), change)
    reseal(captured)
    with pytest.raises(DamagedTrace, match="does not describe an array that tim-trace writes") as caught:
        read_dense(Store(captured), group_of(captured), 0, 3)
    assert str(caught.value).isprintable()


def test_other_metadata_beside_an_array_s_is_not_looked_at(captured):
    """A v2 group, consolidated metadata and a fill value change nothing: what is read is the array's own document."""
    before = read_dense(Store(captured), group_of(captured), 0, 3)
    folder = only(captured / "dense")
    for name in (".zgroup", ".zmetadata", "train/.zgroup", "train/logprobs/.zarray"):
        (folder / name).write_text('{"zarr_format": 2, "compressor": {"id": "pickle"}}')
    change_document(folder / "zarr.json", set_in("consolidated_metadata", to={"kind": "inline", "metadata": {"x": {}}}))
    change_document(folder / "train/logprobs/zarr.json", set_in("fill_value", to=7.0))
    reseal(captured)
    after = read_dense(Store(captured), group_of(captured), 0, 3)
    assert {name: values.tolist() for name, values in after.items()} == {
        name: values.tolist() for name, values in before.items()
    }


def test_a_chunk_that_claims_gigabytes_is_not_unpacked(captured):
    shard = only(captured, "dense/*/train/logprobs/c/0/0")
    content = bytearray(shard.read_bytes())
    content[4:8] = struct.pack("<I", 0x7FFFFFF0)
    shard.write_bytes(content)
    reseal(captured)
    for rows in (1, 3):
        with pytest.raises(DamagedTrace, match=r"claims a size larger|cannot be read"):
            read_dense(Store(captured), group_of(captured), 0, rows)


@pytest.mark.parametrize(("start", "rows"), [(2**62, 1), (0, 2**60), (-1, 1), (0, 4)])
def test_rows_that_an_array_lacks_are_not_read(captured, start, rows):
    with pytest.raises(DamagedTrace, match="has 3 rows"):
        read_dense(Store(captured), group_of(captured), start, rows)


def test_rows_of_any_claimed_number_take_no_memory(captured):
    change_document(only(captured, "dense/*/train/logprobs/zarr.json"), set_in("shape", to=[2**40, 4]))
    reseal(captured)
    with pytest.raises(DamagedTrace, match="bytes of memory, but this machine has"):
        read_dense(Store(captured), group_of(captured), 0, 2**39)


# Weights


@pytest.fixture
def weighed(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for version in range(2):
            recorder.add_weights(version, {"a": torch.arange(6.0).reshape(2, 3) + version, "b": torch.ones(4)})
        recorder.add_sequences(step=1, response_ids=[[1]])
    return tmp_path / "run"


TENSOR = ("attributes", "layout", "tensors", 0)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("weights/*/zarr.json", set_in(*TENSOR, "shape", to=[2**40])), ("weights/*/zarr.json", set_in(*TENSOR, "shape", to=[-1, -6])),
        ("weights/*/zarr.json", set_in(*TENSOR, "shape", to=[5])), ("weights/*/zarr.json", set_in(*TENSOR, "start", to=2**50)),
        ("weights/*/zarr.json", set_in(*TENSOR, "dtype", to="object")), ("weights/*/zarr.json", set_in(*TENSOR, "name", to="b")),
        ("weights/*/zarr.json", set_in(*TENSOR, "whole_shape", to=[2**30, 2**30])),
        ("weights/*/zarr.json", set_in("attributes", "layout", "tied", to={"c": "missing"})),
        ("weights/*/zarr.json", set_in("attributes", to=[])),
        ("weights/*.0.json", set_in("chunks", to={"float32": [0] * 1000})), ("weights/*.0.json", set_in("chunks", to={"float32": [-1]})),
        ("weights/*.0.json", set_in("chunks", to={"float32": [2**40]})), ("weights/*.0.json", set_in("chunks", to={"../x": [0]})),
        ("weights/*.0.json", set_in("hashes", to={})), ("weights/*.0.json", set_in("row", to=2**62)),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused(weighed, file, change):
    change_document(only(weighed, file), change)
    reseal(weighed)
    with pytest.raises((DamagedTrace, WeightsMissing)) as caught:
        open_weights(Store(weighed)).load(0)
    assert str(caught.value).isprintable()


def test_a_chunk_of_weights_that_claims_gigabytes_is_not_unpacked(weighed):
    for chunk in weighed.glob("weights/*/float32/c/*/0"):
        content = bytearray(chunk.read_bytes())
        content[4:8] = struct.pack("<I", 0x7FFFFFF0)
        chunk.write_bytes(content)
    reseal(weighed)
    with pytest.raises(DamagedTrace, match="does not contain 10 elements of float32"):
        open_weights(Store(weighed)).load(0)


# Parquet


def bomb(num_rows):
    """Rows of one value each, which take a few bytes, whatever their number."""

    def change(table):
        return pa.table(
            [pa.repeat(table[field.name][0], num_rows) for field in table.schema], schema=table.schema.remove_metadata()
        )

    return change


@pytest.mark.slow
def test_more_rows_than_a_file_can_hold_are_refused(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_metrics(1, {"loss": 1.0})
    path = only(tmp_path / "run" / "metrics")
    rewrite_table(path, bomb(40_000_000), use_dictionary=True)
    assert path.stat().st_size < 2_000_000
    reseal(tmp_path / "run")
    assert any("claims 40,000,000 rows in" in sentence for sentence in damaged(tmp_path / "run"))


def hostile_extension(kind):
    """A schema whose metadata name an extension type that pickles itself, as old versions of Arrow did."""

    def change(table):
        place = table.schema.get_field_index("seq_id")
        field = table.schema.field("seq_id").with_metadata(
            {b"ARROW:extension:name": kind, b"ARROW:extension:metadata": b"cos\nsystem\n(S'touch pwned'\ntR."}
        )
        return table.cast(table.schema.set(place, field))

    return change


@pytest.mark.parametrize("kind", [b"arrow.py_extension_type", b"arrow.opaque", b"arrow.json", b"pandas.period"])
@DAMAGE
def test_an_extension_type_is_not_made(trace, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    rewrite_table(only(trace / "sequences"), hostile_extension(kind))
    reseal(trace)
    info(str(trace))
    connect(trace).execute("SELECT seq_id FROM sequences").fetchall()
    assert not (tmp_path / "pwned").exists()


@DAMAGE
@pytest.mark.parametrize(
    "name", rest_slow(["step\" FROM read_csv('/etc/passwd') --", "a\nb", "\x1b[2J", "", "step", "x" * 10**5], 3)
)
def test_a_column_of_any_name_is_a_name(trace, name):
    rewrite_table(only(trace / "sequences"), lambda table: table.append_column(name, pa.array(["x"] * table.num_rows)))
    reseal(trace)
    info(str(trace))
    found = connect(trace).execute("FROM sequences")
    assert [column[0] for column in found.description].count(name) == (name == "step")
    assert len(found.fetchall()) == (0 if name == "step" else 12)  # of two columns of a name nobody knows which


@DAMAGE
def test_columns_of_other_types_are_named_and_not_read(trace):
    def change(table):
        place = table.schema.get_field_index("response_ids")
        return table.set_column(place, "response_ids", pa.array([[["x"]]] * table.num_rows))

    rewrite_table(only(trace / "sequences"), change)
    reseal(trace)
    assert any("unexpected column types: response_ids" in sentence for sentence in damaged(trace))
    assert connect(trace).execute("SELECT count(*) FROM sequences").fetchone() == (0,)


def test_pandas_metadata_change_nothing(trace):
    hostile = json.dumps(
        {"index_columns": ["x"], "columns": [{"name": "step", "pandas_type": "object", "numpy_type": "object"}]}
    )

    def change(table):
        return table.replace_schema_metadata({**(table.schema.metadata or {}), b"pandas": hostile.encode()})

    rewrite_table(only(trace / "sequences"), change)
    reseal(trace)
    assert connect(trace).execute("SELECT min(step), max(step), count(*) FROM sequences").fetchone() == (1, 3, 12)


def test_a_forged_trace_is_read_when_nothing_was_changed(trace):
    """The forging itself is right: what is refused above is refused for what was changed."""
    rewrite_table(only(trace / "sequences"), lambda table: table)
    reseal(trace)
    assert damaged(trace) == []
    assert make_batch(4, seed=1)["response_ids"] == [
        row[0]
        for row in connect(trace)
        .execute("SELECT response_ids FROM sequences WHERE step = 1 ORDER BY seq_id")
        .fetchall()
    ]
