"""Dumps on object storage: an import from their URL makes the trace that one from a folder makes."""

import json

import dumps
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import tim_trace
from dumps import make_steps
from tim_trace import connect, import_dump, verify
from tim_trace.schemas.errors import ImportFailed, StorageError
from tim_trace.tracer.importers.dump import DumpFolder
from tim_trace.tracer.importers.remote_file import RemoteFile


def write_parquet(folder, steps):
    folder.mkdir(parents=True)
    for step, samples in steps.items():
        rows = [
            {
                "step": step, "prompt_ids": each.prompt, "response_ids": each.response, "rollout_logprobs": each.rollout,
                "train_logprobs": each.train,
            }
            for each in samples
        ]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{step}.parquet")


FORMATS = {
    **dumps.WRITERS,
    "vllm": dumps.write_vllm,
    "sglang": dumps.write_sglang,
    "trl": dumps.write_trl,
    "areal": dumps.write_areal,
    "open-instruct": dumps.write_open_instruct,
    "torchtitan": dumps.write_torchtitan,
    "ms-swift": dumps.write_ms_swift,
    "parquet": write_parquet,
}

ONE_STEP = ("vllm", "sglang", "trl", "areal")
"""Of which a dump says nothing of steps, or is written one at a time here."""


def contents(trace):
    """All that a trace holds of its sequences and scores."""
    ask = connect(trace).execute
    sequences = ask("SELECT * EXCLUDE (run, writer) FROM sequences ORDER BY step, seq_id").fetchall()
    scores = ask("""SELECT * EXCLUDE (run, writer, contract) FROM scores ORDER BY step, seq_id, "pass" """).fetchall()
    return repr(sequences), repr(scores)


def put(s3, folder, place):
    s3.put(f"{folder}/", f"bucket/{place}/", recursive=True)
    return f"s3://bucket/{place}"


@pytest.mark.slow
@pytest.mark.parametrize("format", list(FORMATS))
def test_an_import_from_a_url_is_that_from_the_folder(s3, tmp_path, format):
    FORMATS[format](tmp_path / "dump", make_steps(*((3,) if format in ONE_STEP else (3, 4))))
    url = put(s3, tmp_path / "dump", f"same/{format}")
    here = import_dump(format, tmp_path / "dump", output=tmp_path / "here")
    there = import_dump("auto", url, output=tmp_path / "there")
    assert (there.format, there.num_sequences, there.num_tokens) == (format, here.num_sequences, here.num_tokens)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert not verify(tmp_path / "there").damaged


def test_every_format_is_imported_from_a_url():
    from tim_trace.tracer.importers import formats

    assert FORMATS.keys() == formats.FORMATS.keys() | {"parquet"}


@pytest.mark.slow
@pytest.mark.parametrize("format", ["prime-rl", "slime"])
def test_what_came_since_is_added_from_a_url(s3, tmp_path, format):
    FORMATS[format](tmp_path / "some", make_steps(3))
    FORMATS[format](tmp_path / "all", make_steps(3, 4))
    place = f"grown/{format}"
    url = put(s3, tmp_path / "some", place)
    first = import_dump(format, url, output=tmp_path / "run")
    put(s3, tmp_path / "all", place)
    second = import_dump(format, url, output=tmp_path / "run")
    assert (first.num_sequences, second.num_sequences, second.num_known_files > 0) == (6, 6, True)
    import_dump(format, tmp_path / "all", output=tmp_path / "whole")
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    assert import_dump(format, url, output=tmp_path / "run").num_sequences == 0


def test_lines_that_came_since_are_added_from_a_url(s3, tmp_path):
    FORMATS["vllm"](tmp_path / "dump", make_steps(3))
    (file,) = (tmp_path / "dump").iterdir()
    lines = file.read_bytes().splitlines(keepends=True)
    s3.pipe_file(f"bucket/lines/{file.name}", b"".join(lines[:2]) + lines[2][:-9])
    first = import_dump("vllm", "s3://bucket/lines", output=tmp_path / "run")
    s3.pipe_file(f"bucket/lines/{file.name}", b"".join(lines))
    second = import_dump("vllm", "s3://bucket/lines", output=tmp_path / "run")
    assert (first.num_sequences, second.num_sequences) == (2, len(lines) - 2)
    import_dump("vllm", tmp_path / "dump", output=tmp_path / "whole")
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_a_file_that_changed_there_is_refused(s3, tmp_path):
    FORMATS["nemo-rl"](tmp_path / "dump", make_steps(3))
    url = put(s3, tmp_path / "dump", "changed")
    import_dump("nemo-rl", url, output=tmp_path / "run")
    (name,) = s3.ls("bucket/changed")
    s3.pipe_file(name, s3.cat_file(name).replace(b"1", b"2"))
    with pytest.raises(
        ImportFailed, match=r"s3://bucket/changed/train_data_step3.jsonl: has changed since it was imported"
    ):
        import_dump("nemo-rl", url, output=tmp_path / "run")


@pytest.mark.slow
def test_one_file_is_imported_by_its_url_from_the_command_line(s3, tmp_path):
    FORMATS["vllm"](tmp_path / "dump", make_steps(3))
    put(s3, tmp_path / "dump", "one")
    (name,) = s3.ls("bucket/one")
    done = tim_trace("import", "vllm", f"s3://{name}", "-o", tmp_path / "run")
    assert done.code == 0, done.stderr
    import_dump("vllm", tmp_path / "dump", output=tmp_path / "here")
    assert contents(tmp_path / "run") == contents(tmp_path / "here")


def test_a_pickle_that_names_a_function_is_refused_by_its_url(s3, tmp_path):
    s3.pipe_file("bucket/hostile/gen_batch.dp", b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.")
    with pytest.raises(ImportFailed, match=r"s3://bucket/hostile/gen_batch.dp: uses posix.system"):
        import_dump("verl", "s3://bucket/hostile", output=tmp_path / "run")


def test_a_cut_file_there_waits_for_its_end(s3, tmp_path):
    FORMATS["slime"](tmp_path / "dump", make_steps(3, 4))
    url = put(s3, tmp_path / "dump", "cut")
    name = "bucket/cut/rollout_data/4.pt"
    s3.pipe_file(name, s3.cat_file(name)[:-100])
    imported = import_dump("slime", url, output=tmp_path / "run")
    assert imported.num_sequences == 6
    assert "rollout_data/4.pt is half-written" in imported.held_back[0]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket/nothing/here", "not found; name the folder"),
        ("s3://no-such-bucket/dump", "s3://no-such-bucket/dump: "),
        ("gopher://somewhere/dump", "unsupported file system"),
    ],
)
def test_a_url_that_cannot_be_read_is_named(s3, tmp_path, url, said):
    with pytest.raises((ImportFailed, StorageError), match=said):
        import_dump("verl", url, output=tmp_path / "run")


def test_a_url_of_this_machine_follows_no_link_out_of_the_folder(tmp_path):
    (tmp_path / "dump").mkdir()
    (tmp_path / "secret.jsonl").write_text(json.dumps({"choices": []}))
    (tmp_path / "dump" / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    with pytest.raises(ImportFailed, match="is a link out of the folder"):
        import_dump("vllm", f"file://{tmp_path}/dump", output=tmp_path / "run")


def test_a_large_file_is_read_by_ranges(s3, tmp_path):
    line = json.dumps({"n": 1, "text": "x" * 1000}).encode() + b"\n"
    s3.pipe_file("bucket/large/a.jsonl", line * 3000)
    (name,) = DumpFolder.of("s3://bucket/large").files
    asked = []
    file = DumpFolder.of("s3://bucket/large").path(name)
    counting = _Counting(file.filesystem, asked)
    with RemoteFile(filesystem=counting, path=file.path, url=file.url).open(ahead=1 << 18) as stream:
        assert sum(1 for _ in stream) == 3000
    assert len(asked) > 5
    assert max(asked) <= (1 << 18) * 3


class _Counting:
    """A file system that notes how much of a file is asked for at once."""

    def __init__(self, filesystem, asked):
        self._filesystem, self._asked = filesystem, asked

    def open(self, path, mode, **options):
        file = self._filesystem.open(path, mode, **options)
        fetch = file.cache.fetcher

        def fetched(start, end):
            self._asked.append(end - start)
            return fetch(start, end)

        file.cache.fetcher = fetched
        return file


def test_an_error_on_the_way_names_the_file(tmp_path):
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/broken/a.jsonl", b'{"choices": []}\n')
    folder = DumpFolder.of("memory://broken")
    memory.rm("/broken/a.jsonl")
    with pytest.raises(ImportFailed, match=r"memory://broken/a.jsonl: cannot be read"):
        folder.path("a.jsonl").open()
    with pytest.raises(ImportFailed, match=r"memory://broken/a.jsonl: cannot be read"):
        folder.path("a.jsonl").read_bytes()
