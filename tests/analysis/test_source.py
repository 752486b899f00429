import json
import os
import shutil
import subprocess
import sys
import warnings

import fuzz_bases
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builders import add_step, make_batch, make_trace, tim_trace
from click.testing import CliRunner
from forged import reseal, rewrite_table
from shared import rest_slow
from tim_trace.analysis.info import info
from tim_trace.analysis.stats import stats
from tim_trace.analysis.trace.source import open_source
from tim_trace.analysis.views import connect
from tim_trace.cli import main
from tim_trace.schemas.errors import DamagedTrace, DamageWarning, NewerTrace, TraceNotFound
from tim_trace.schemas.sums import KINDS
from tim_trace.tracer.dense import Logits
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.verified_file import VerifiedFile


@pytest.fixture
def trace(tmp_path):
    """A trace of two writers: one recorded steps 1 and 2, the other steps 11 to 13, four sequences each."""
    for steps in ((1, 2), (11, 12, 13)):
        with Recorder(tmp_path / "run", resume=True) as recorder:
            for step in steps:
                add_step(recorder, step, make_batch(seed=step), seq_ids=[f"{step}-{row}" for row in range(4)])
                recorder.add_metrics(step, {"loss": 0.5})
    return tmp_path / "run"


def file_of(trace, table, steps):
    """The file of a table that the writer of so many steps wrote."""
    files = {
        pq.read_table(file, columns=["step"])["step"].unique().to_pylist()[0]: file
        for file in (trace / table).glob("*.parquet")
    }
    return files[1 if steps == 2 else 11]


def check_readable(trace, rows, *, damaged=False):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert connect(trace).execute("SELECT count(*) FROM scores").fetchone() == (rows,)
    assert any(issubclass(one.category, DamageWarning) for one in told) == damaged
    done = tim_trace("stats", trace, "--json")
    assert done.code == 0
    found = json.loads(done.stdout)
    assert bool(found["damaged"]) == damaged
    assert all(sentence in done.stderr for sentence in found["damaged"])
    for command, sound in (("check", (0, 1)), ("gate", (0,))):  # whether the comparison is valid matters not here
        options = ["--fail-on", "tim.k3>1e9"] if command == "gate" else []
        refused = tim_trace(command, trace, *options)
        assert refused.code in ((2,) if damaged else sound), refused.stderr
        assert ("--partial" in refused.stderr) == damaged
        assert tim_trace(command, trace, *options, "--partial").code in sound
    assert tim_trace("info", trace).code == 0
    assert tim_trace("verify", trace).code == (2 if damaged else 0)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0, 3, 50, -1])
def test_a_truncated_file_is_named_and_the_rest_is_read(trace, cut):
    file = file_of(trace, "scores", 2)
    file.write_bytes(file.read_bytes()[:cut])
    (sentence,) = info(str(trace)).damaged
    assert f"scores/{file.name} has" in sentence
    assert "bytes, but its writer wrote" in sentence
    assert "Restore the file from a backup" in sentence
    assert "(16 rows of steps 1 to 2)" in sentence
    check_readable(trace, 24, damaged=True)


@pytest.mark.slow
def test_a_file_that_is_gone_is_named_with_what_is_lost(trace):
    file = file_of(trace, "scores", 2)
    file.unlink()
    (sentence,) = info(str(trace)).damaged
    assert f"scores/{file.name} is missing (16 rows of steps 1 to 2)" in sentence
    check_readable(trace, 24, damaged=True)


@pytest.mark.slow
def test_a_copy_under_another_name_does_not_count(trace):
    for table in ("sequences", "scores"):
        file = file_of(trace, table, 2)
        shutil.copy(file, trace / table / f"{file.name[:-14]}000007.parquet")
        shutil.copy(file, trace / table / "other-000000.parquet")
    check_readable(trace, 40, damaged=True)  # of the writer `other` nobody knows what it wrote
    for table in ("sequences", "scores"):
        (trace / table / "other-000000.parquet").unlink()
    assert len(info(str(trace)).ignored) == 2
    check_readable(trace, 40)


def test_two_files_that_were_exchanged_are_named(trace):
    one, other = file_of(trace, "scores", 2), file_of(trace, "scores", 3)
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    other.write_bytes(a)
    assert len(info(str(trace)).damaged) == 2
    with pytest.warns(DamageWarning):
        assert connect(trace).execute("SELECT count(*) FROM scores").fetchone() == (0,)


@pytest.mark.slow
def test_without_its_state_a_writer_s_files_do_not_count_and_are_named(trace):
    writer = file_of(trace, "scores", 2).name[:-15]
    (trace / "writers" / f"{writer}.json").unlink()
    (sentence,) = info(str(trace)).damaged
    assert f"writers/{writer}.json is missing or damaged" in sentence
    assert f"scores/{writer}-000000.parquet" in sentence
    check_readable(trace, 24, damaged=True)


@pytest.mark.slow
def test_a_writer_s_files_of_another_run_do_not_count(trace, tmp_path):
    make_trace(tmp_path / "other")
    for file in [*(tmp_path / "other").rglob("*.parquet"), *(tmp_path / "other" / "writers").iterdir()]:
        shutil.copy(file, trace / file.parent.name)
    foreign, lost = info(str(trace)).damaged
    assert "belongs to run" in foreign
    assert "is missing" in lost
    check_readable(trace, 40, damaged=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["notes.txt", "scores/notes.txt", "scores/huh.parquet", "journal/notes.txt", "passes/x.txt"]
)
def test_foreign_files_do_no_harm(trace, name):
    (trace / name).parent.mkdir(exist_ok=True)
    (trace / name).write_text("hello")
    check_readable(trace, 40)
    assert all(name in sentence for sentence in info(str(trace)).ignored)


@pytest.mark.slow
def test_a_foreign_journal_is_named_and_the_rest_is_read(trace):
    (trace / "journal").mkdir(exist_ok=True)
    (trace / "journal" / "w-000000.scores.arrows").write_bytes(b"not Arrow at all" * 9)
    (sentence,) = info(str(trace)).damaged
    assert "journal/w-000000.scores.arrows" in sentence
    check_readable(trace, 40, damaged=True)


@pytest.mark.slow
def test_a_broken_writer_state_or_contract_is_named(trace):
    with Recorder(trace, resume=True) as recorder:
        recorder.add_contract("train", {"engine": "trl"})
    (trace / "writers" / "x.json").write_text("{")
    (contract,) = (trace / "passes" / "train").iterdir()
    contract.write_text(contract.read_text().replace("trl", "mrl"))
    damaged = info(str(trace)).damaged
    assert ["writers/x.json" in damaged[0], "its content does not match the hash in its name" in damaged[1]] == [
        True
    ] * 2
    check_readable(trace, 40, damaged=True)


@pytest.mark.slow
def test_damaged_sums_are_passed_over_and_made_anew(trace):
    wanted = tim_trace("stats", trace, "--json").json()
    for file in (trace / "sums").iterdir():
        file.write_bytes(b"x")
    assert len(info(str(trace)).ignored) == len(KINDS)
    assert tim_trace("stats", trace, "--json").json() == wanted
    assert info(str(trace)).ignored == ()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", ["run", "step"])
def test_one_kind_of_damaged_sums_is_made_anew(trace, kind, by):
    wanted = tim_trace("stats", trace, "--by", by, "--json").json()
    tim_trace("stats", trace)  # keeps every kind
    (file,) = (trace / "sums").glob(f"{kind}-*")
    file.write_bytes(file.read_bytes()[:-30])
    assert tim_trace("stats", trace, "--by", by, "--json").json() == wanted


def test_a_contract_that_no_writer_accounts_for_does_not_count(trace, tmp_path):
    with Recorder(tmp_path / "other") as recorder:
        recorder.add_contract("replay/fp64", {"engine": "hf"})
    shutil.copytree(tmp_path / "other" / "passes", trace / "passes", dirs_exist_ok=True)
    found = info(str(trace))
    assert [one.name for one in found.passes] == ["rollout", "train"]
    assert "not listed in any writer's state" in found.ignored[0]


def test_a_writer_s_state_of_an_earlier_moment_is_named(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        add_step(recorder, 1, make_batch())
        recorder.flush()
        (state,) = (tmp_path / "run" / "writers").iterdir()
        earlier = state.read_bytes()
    state.write_bytes(earlier)
    told = tim_trace("verify", tmp_path / "run", "--json")
    assert told.code == 2
    assert all(f"writers/{state.name} is older than" in one for one in json.loads(told.stdout)["damaged"])


def test_verify_names_the_scores_that_tell_which_distributions_there_are(trace):
    file = file_of(trace, "scores", 2)
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    file.write_bytes(content)
    done = tim_trace("verify", trace, "--json")
    assert done.code == 2
    assert all(file.name in sentence for sentence in json.loads(done.stdout)["damaged"])
    assert "Traceback" not in done.stderr


def test_verify_names_a_captured_chunk_with_bytes_behind_its_end(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(step=1, response_ids=[[1, 2, 3]])
        kept = Logits(logits=torch.zeros(3, 8))
        recorder.add_scores("train", batch, logprobs=[[-1.0] * 3], distribution=kept, captured_rows=[0])
    (chunk,) = (path for path in (tmp_path / "run" / "dense").rglob("*") if path.is_file() and "/c/" in str(path))
    chunk.write_bytes(chunk.read_bytes() * 2)
    done = tim_trace("verify", tmp_path / "run", "--json")
    assert done.code == 2
    assert "bytes longer than when it was written" in json.loads(done.stdout)["damaged"][0]


@pytest.mark.slow
def test_verify_names_a_journal_of_captured_distributions(tmp_path):
    subprocess.run([sys.executable, fuzz_bases.__file__, "dense", tmp_path / "run"], check=True, capture_output=True)
    (journal,) = (tmp_path / "run" / "journal").glob("*.dense.arrows")
    whole = journal.read_bytes()
    assert tim_trace("verify", tmp_path / "run").code == 0
    for place in range(100, len(whole) - 8, len(whole) // 6):
        journal.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        done = tim_trace("verify", tmp_path / "run", "--json")
        assert done.code == 2, place
        assert any(journal.name in sentence for sentence in json.loads(done.stdout)["damaged"]), place


@pytest.mark.slow
def test_sums_of_files_that_are_gone_are_not_used(trace):
    tim_trace("stats", trace)
    file_of(trace, "scores", 3).unlink()
    (row,) = tim_trace("stats", trace, "--json").json()
    assert row["num_sequences"] == 8


def test_half_written_files_are_not_seen(trace):
    (trace / "scores" / ".tmp-1234-x-000000.parquet").write_bytes(b"half")
    assert info(str(trace)).damaged == ()


def test_columns_are_checked_although_the_checksums_match(tmp_path):
    make_trace(tmp_path / "run")
    (file,) = (tmp_path / "run" / "scores").glob("*.parquet")

    def with_text(table):
        return table.set_column(table.schema.get_field_index("step"), "step", table["step"].cast(pa.string()))

    rewrite_table(file, with_text)
    reseal(tmp_path / "run")
    (sentence,) = info(str(tmp_path / "run")).damaged
    assert "unexpected column types: step" in sentence
    rewrite_table(file, lambda table: pa.table({"a": [1]}))
    reseal(tmp_path / "run")
    (sentence,) = info(str(tmp_path / "run")).damaged
    assert "missing columns: pass, step" in sentence


def test_no_trace_is_told_apart_from_nothing(tmp_path):
    with pytest.raises(TraceNotFound, match=r"does not exist\. Record a run with"):
        open_source(str(tmp_path / "missing"))
    with pytest.raises(TraceNotFound, match=r"has no trace.json, so it is not a trace"):
        open_source(str(tmp_path))
    (tmp_path / "trace.json").write_text("{}")
    with pytest.raises(DamagedTrace, match=r"trace.json is not a trace manifest"):
        open_source(str(tmp_path))
    (tmp_path / "trace.json").write_text('{"format": "tim-trace", "format_version": 99}')
    with pytest.raises(NewerTrace, match="Upgrade tim-trace with"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("name", ["run/demo", "runs/dem"])
def test_a_misspelled_path_suggests_a_trace_with_a_similar_name(tmp_path, monkeypatch, name):
    (tmp_path / "runs" / "demo2").mkdir(parents=True)
    make_trace(tmp_path / "runs" / "demo")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceNotFound, match=rf"^{name} does not exist\. Did you mean runs/demo\?$"):
        open_source(name)
    with pytest.raises(TraceNotFound, match=r"Record a run with"):
        open_source("demo")


@pytest.mark.parametrize("command", [("info",), ("stats",), ("sql", "SELECT 1")])
def test_every_command_names_a_missing_trace_in_one_line(tmp_path, command):
    done = tim_trace(command[0], tmp_path / "no" / "run", *command[1:])
    assert done.code == 2
    assert done.stderr.startswith(f"Error: {tmp_path}/no/run does not exist")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("lost", ["weights/{}-000000.0.json", "writers/{}.json"])
@pytest.mark.parametrize("damage", [os.unlink, lambda path: path.write_bytes(b"")], ids=["missing", "empty"])
def test_weights_without_a_writer_s_part_say_so(tmp_path, lost, damage):
    with Recorder(tmp_path / "run", join=True) as one, Recorder(tmp_path / "run", join=True) as other:
        for rank, recorder in enumerate((one, other)):
            recorder.add_weights(0, {f"layers.{rank}": torch.ones(8)})
            add_step(recorder, rank + 1, make_batch())
        name = one.writer.name
    path = tmp_path / "run" / lost.format(name)
    damage(path)
    done = tim_trace("weights", tmp_path / "run", "--verify", "--json")
    assert done.code == 2
    assert path.name in done.stderr
    assert any(path.name in sentence for sentence in json.loads(done.stdout)["damaged"])
    assert [row["verified"] == "ok" for row in json.loads(done.stdout)["rows"]] == [False]
    plain = tim_trace("weights", tmp_path / "run", "--json")
    assert (plain.code, path.name in plain.stderr) == (0, True)


def test_one_writer_s_broken_weights_do_not_hide_another_s(tmp_path):
    with Recorder(tmp_path / "run", join=True) as one, Recorder(tmp_path / "run", join=True) as other:
        for rank, recorder in enumerate((one, other)):
            recorder.add_weights(0, {f"layers.{rank}": torch.ones(8)})
            add_step(recorder, rank + 1, make_batch())
    chunks = sorted(path for path in (tmp_path / "run" / "weights").rglob("c/0/0"))
    assert len(chunks) == 2
    for chunk in chunks:
        chunk.write_bytes(b"x")
    told = "".join(json.loads(tim_trace("verify", tmp_path / "run", "--json").stdout)["damaged"])
    assert all(str(chunk.relative_to(tmp_path / "run")) in told for chunk in chunks)


def test_a_version_that_is_a_broken_link_is_named(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_weights(0, {"layers.0": torch.ones(8)})
        add_step(recorder, 1, make_batch())
    (path,) = (tmp_path / "run" / "weights").glob("*.json")
    path.unlink()
    path.symlink_to("/nowhere")
    for options in ((), ("--by", "module"), ("--verify",)):
        done = tim_trace("weights", tmp_path / "run", *options)
        assert done.code in (0, 2)
        assert path.name in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "verb", rest_slow([["info"], ["info", "--json"], ["watch", "--json"], ["watch", "--once"], ["verify"]], 3)
)
def test_a_damaged_file_is_named_on_stderr_by(trace, verb):
    file = file_of(trace, "scores", 2)
    file.write_bytes(file.read_bytes()[:-1])
    name, *options = verb
    done = tim_trace(name, trace, *options)
    assert done.code == (2 if name == "verify" else 0)
    assert (file.name if name != "verify" else "damaged or missing parts: 1") in done.stderr
    if "--json" in options:
        assert file.name in json.loads(done.stdout)["damaged"][0]


OPTIONS = {
    "export": ["--to", "parquet", "-o", "exported"],
    "sql": ["FROM scores JOIN sequences USING (step, seq_id)"], "query": ["worst-tokens"], "gate": ["--fail-on", "check"],
    "report": ["-o", "report.html"], "compare": ["run"], "watch": ["--once"], "replay": ["--steps", "1"], "gradient": ["--steps", "1"],
}  # fmt: skip
"""What a command needs beside the trace; `query` takes it before the trace."""

BEFORE_TOKENS = {"info", "verify", "weights", "replay", "triangulate", "gradient", "locate", "reproduce",
                 "certify"}  # fmt: skip
"""Commands that read no logprobs, as verify, which compares checksums, or find no weights in this trace before they would."""


@pytest.mark.slow
@pytest.mark.parametrize(("table", "column"), [("scores", "logprobs"), ("sequences", "step")])
def test_damage_that_no_checksum_tells_is_named_by_every_command(tmp_path, monkeypatch, table, column):
    monkeypatch.chdir(tmp_path)
    make_trace(tmp_path / "run", steps=6, rows=40)
    (file,) = (tmp_path / "run" / table).iterdir()
    rewrite_table(file, lambda rows: rows, compression="none", use_dictionary=False)
    flip_page(file, column)
    reseal(tmp_path / "run")
    monkeypatch.setattr(VerifiedFile, "_compare", lambda *_: None)  # as if the blocks' checksums matched
    for name in set(main.commands) - {"example", "record", "import", "compact", "mcp"}:
        arguments = [tmp_path / "run", *OPTIONS.get(name, [])]
        if name == "query":
            arguments.reverse()
        done = CliRunner().invoke(main, [name, *map(str, arguments)])
        assert isinstance(done.exception, SystemExit | None), (name, done.exception)
        if name not in BEFORE_TOKENS:
            assert done.exit_code == 2, (name, done.output)
            assert file.name in done.output, name


def flip_page(file, column):
    """Flip 300 bytes of the first page of a column, or all that there are."""
    group = pq.ParquetFile(file).metadata.row_group(0)
    chunks = [group.column(place) for place in range(group.num_columns)]
    (chunk,) = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] == column]
    content = bytearray(file.read_bytes())
    page = slice(chunk.data_page_offset, chunk.data_page_offset + min(300, chunk.total_compressed_size))
    content[page] = bytes(byte ^ 0xFF for byte in content[page])
    file.write_bytes(content)


def test_a_journal_that_was_sealed_and_not_yet_removed_counts_once(tmp_path):
    path = tmp_path / "run"
    recorder = Recorder(path)
    add_step(recorder, 1, make_batch(4))
    recorder.flush()
    shutil.copytree(path / "journal", tmp_path / "journal")
    recorder.close()
    shutil.copytree(tmp_path / "journal", path / "journal", dirs_exist_ok=True)  # the process died before it removed it
    source = open_source(str(path))
    assert (source.journals, source.damaged, source.ignored) == ({}, [], [])
    query = "SELECT (SELECT count(*) FROM sequences), (SELECT count(*) FROM scores)"
    assert connect(path).execute(query).fetchall() == [(4, 8)]


def test_sums_of_a_finished_trace_do_not_serve_one_that_has_rows_in_a_journal(tmp_path):
    path = tmp_path / "run"
    with Recorder(path) as recorder:
        add_step(recorder, 1, make_batch(4, seed=1))
    stats(path)
    with Recorder(path, resume=True) as recorder:
        add_step(recorder, 2, make_batch(4, seed=2))
        recorder.flush()
        assert [row["step"] for row in stats(path, by="step").dicts()] == [1, 2]
        assert stats(path).dicts()[0]["num_sequences"] == 8
