"""Tables on object storage: an import from their URL makes the trace that one from a folder makes."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dumps import make_steps
from tim_trace import connect, import_dump, verify
from tim_trace.schemas.errors import ImportFailed, StorageError


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


def contents(trace):
    """All that a trace holds of its sequences and scores."""
    ask = connect(trace).execute
    sequences = ask("SELECT * EXCLUDE (run, writer) FROM sequences ORDER BY step, seq_id").fetchall()
    scores = ask("""SELECT * EXCLUDE (run, writer, contract) FROM scores ORDER BY step, seq_id, "pass" """).fetchall()
    return repr(sequences), repr(scores)


@pytest.mark.parametrize("format", ["auto", "parquet"])
def test_an_import_from_a_url_is_that_from_the_folder(s3, tmp_path, format):
    write_parquet(tmp_path / "dump", make_steps(3, 4))
    s3.put(f"{tmp_path / 'dump'}/", f"bucket/same/{format}/", recursive=True)
    here = import_dump("parquet", tmp_path / "dump", output=tmp_path / "here")
    there = import_dump(format, f"s3://bucket/same/{format}", output=tmp_path / "there")
    assert (there.format, there.num_sequences, there.num_tokens) == ("parquet", here.num_sequences, here.num_tokens)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert not verify(tmp_path / "there").damaged


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket/nothing/here", "not found"),
        ("s3://no-such-bucket/dump", "s3://no-such-bucket/dump: "),
        ("gopher://somewhere/dump", "unsupported file system"),
    ],
)
def test_a_url_that_cannot_be_read_is_named(s3, tmp_path, url, said):
    with pytest.raises((ImportFailed, StorageError), match=said):
        import_dump("parquet", url, output=tmp_path / "run")


def test_a_dump_of_a_framework_has_to_be_here(tmp_path):
    with pytest.raises(
        ImportFailed, match=r"s3://bucket/dump: only the parquet format can be read from a URL. Copy the"
    ):
        import_dump("verl", "s3://bucket/dump", output=tmp_path / "run")
