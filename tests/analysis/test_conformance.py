"""Traces that another program wrote without tim-trace, and the check of their format."""

import json
import re
import runpy
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tim_trace
from builders import ROOT, in_process, make_trace
from tim_trace.analysis.conformance import CODES
from tim_trace.schemas.documents import FORMAT, MAX_DEPTH
from tim_trace.schemas.errors import DamagedTrace
from tim_trace.schemas.tables import TABLES

PAGE = (ROOT / "docs" / "start" / "write-traces.md").read_text()
(PROGRAM,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("native")
    (folder / "program.py").write_text(PROGRAM)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        runpy.run_path("program.py")
    return folder / "runs" / "native"


@pytest.fixture
def native(written, tmp_path):
    return shutil.copytree(written, tmp_path / "native")


def made(path):
    make_trace(path)
    return path


def command(*words):
    return in_process(list(map(str, words)))


def codes(trace):
    found = tim_trace.verify(trace, format=True).deviations.dicts()
    assert {row["code"] for row in found} <= set(CODES)
    return {
        (row["where"], row["field"], row["code"]) for row in tim_trace.verify(trace, format=True).deviations.dicts()
    }


def change(trace, relative, edit):
    """Rewrite a Parquet file with its rows as edited."""
    table = pq.read_table(trace / relative)
    pq.write_table(pa.Table.from_pylist(edit(table.to_pylist()), table.schema), trace / relative)


def test_the_program_on_the_page_needs_pyarrow_alone_and_40_lines():
    assert set(re.findall(r"^(?:import|from) (\w+)", PROGRAM, re.MULTILINE)) == {
        "hashlib",
        "json",
        "pathlib",
        "pyarrow",
    }
    assert len([line for line in PROGRAM.splitlines() if line]) <= 40


def test_every_command_reads_what_the_program_on_the_page_writes(written):
    report = written.parent / "report.html"
    for words in (["verify", "--format"], ["info"], ["check"], ["diagnose"], ["dynamics"], ["report", "-o", report]):
        done = command(*words, written)
        assert done.code == 0, done.stderr
    assert "with my framework 1.2\n" in command("info", written).stdout
    found = command("verify", "--format", written).stdout
    assert "conforms to trace format 2" in found
    assert "12 files have no checksums" in found
    (row,) = tim_trace.stats(written).dicts()
    assert (row["num_sequences"], row["num_tokens"]) == (12, 24)
    assert row["mean_abs_d"] == pytest.approx(0.0005, rel=1e-4)


def test_a_merged_trace_of_another_program_has_the_same_rows(native):
    before = tim_trace.sql(native, "SELECT * FROM scores ORDER BY ALL").rows
    assert command("compact", native).code == 0
    assert tim_trace.sql(native, "SELECT * FROM scores ORDER BY ALL").rows == before
    assert not codes(native)


def test_a_trace_of_tim_trace_conforms(tmp_path):
    assert not codes(made(tmp_path / "run"))


EDITS = {
    ("scores", "logprobs", "wrong_length"): lambda row: row | {"logprobs": [-1.0]},
    ("scores", "logprobs", "positive_logprob"): lambda row: row | {"logprobs": [0.5, -1.0]},
    ("scores", "seq_id", "no_sequence"): lambda row: row | {"seq_id": "unknown"},
    ("scores", "pass", "bad_pass_name"): lambda row: row | {"pass": " train"},
    ("scores", "contract", "unknown_contract"): lambda row: row | {"contract": "0" * 64},
    ("scores", "iteration", "null"): lambda row: row | {"iteration": None},
    ("sequences", "response_ids", "bad_token_id"): lambda row: row | {"response_ids": [-1, 2]},
    ("sequences", "num_response_tokens", "wrong_length"): lambda row: row | {"num_response_tokens": 3},
    ("sequences", "num_prompt_tokens", "wrong_length"): lambda row: row | {"num_prompt_tokens": 3},
}


@pytest.mark.parametrize("deviation", EDITS, ids="-".join)
def test_a_row_that_deviates_is_reported_with_its_column(native, deviation):
    change(native, f"{deviation[0]}/trainer-0-000002.parquet", lambda rows: [EDITS[deviation](rows[0]), *rows[1:]])
    assert deviation in codes(native)
    done = command("verify", "--format", native)
    assert done.code == 1
    assert f"format: {deviation[0]}: {deviation[1]}: {deviation[2].replace('_', ' ')}" in done.stdout


def test_every_deviation_is_reported_at_once(native):
    for table in ("sequences", "scores"):
        change(native, f"{table}/trainer-0-000003.parquet", lambda rows: [*rows, rows[0]])
    second = native / "sequences" / "trainer-0-000002.parquet"
    rows = pq.read_table(second)
    pq.write_table(rows.drop_columns(["response_ids"]).append_column("mine", pa.array([1] * 4)), second)
    third = native / "metrics" / "trainer-0-000003.parquet"
    rows = pq.read_table(third)
    pq.write_table(rows.set_column(0, "step", rows["step"].cast(pa.int32())), third)
    (native / "metrics" / "x.parquet").write_bytes(b"junk")
    (native / "sequences" / "trainer-0-000009.parquet").write_bytes(b"PAR1junkPAR1")
    (native / "passes" / "train" / f"{'0' * 64}.json").write_text('{"pass": "train", "contract": {}}')
    (native / "passes" / "train" / f"{'1' * 64}.json").write_text("[" * (MAX_DEPTH + 1))
    manifest = json.loads((native / "trace.json").read_text())
    (native / "trace.json").write_text(json.dumps(manifest | {"extra": 1}))
    found = codes(native)
    assert found >= {
        ("sequences", "seq_id", "duplicate_row"),
        ("scores", "seq_id", "duplicate_row"),
        ("sequences/trainer-0-000002.parquet", "response_ids", "missing_column"),
        ("sequences/trainer-0-000002.parquet", "mine", "unknown_column"),
        ("metrics/trainer-0-000003.parquet", "step", "wrong_type"),
        ("metrics/x.parquet", "", "wrong_name"),
        ("sequences/trainer-0-000009.parquet", "", "unreadable"),
        (f"passes/train/{'0' * 64}.json", "", "wrong_name"),
        (f"passes/train/{'1' * 64}.json", "", "unreadable"),
        ("trace.json", "extra", "unknown_field"),
    }


def test_a_manifest_that_cannot_be_read_is_a_deviation(native):
    manifest = json.loads((native / "trace.json").read_text())
    (native / "trace.json").write_text(json.dumps({**manifest, "run_id": 7, "format": "mine"} | {"created_at": None}))
    assert codes(native) >= {("trace.json", "run_id", "wrong_type"), ("trace.json", "format", "wrong_value")}
    (native / "trace.json").write_text("{")
    assert codes(native) >= {("trace.json", "", "unreadable")}
    with pytest.raises(DamagedTrace):
        tim_trace.verify(native)


def test_a_trace_with_checksums_still_needs_them(tmp_path):
    run = made(tmp_path / "run")
    manifest = json.loads((run / "trace.json").read_text())
    checksum = manifest.pop("checksum")
    (run / "trace.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedTrace, match="checksum is missing"):
        tim_trace.info(str(run))
    (run / "trace.json").write_text(json.dumps(manifest | {"checksums": False, "checksum": checksum}))
    with pytest.raises(DamagedTrace, match="does not match its checksum"):
        tim_trace.info(str(run))
    (run / "trace.json").write_text(json.dumps(manifest | {"checksum": checksum}))
    (state,) = (run / "writers").glob("*.json")
    state.unlink()
    assert not tim_trace.verify(run).is_whole


def test_the_schemas_describe_what_is_written(tmp_path, written):
    jsonschema = pytest.importorskip("jsonschema")
    run, folder = made(tmp_path / "run"), ROOT / "docs" / "reference" / "format"
    for trace in (run, written):
        jsonschema.validate(
            json.loads((trace / "trace.json").read_text()), json.loads((folder / "trace.json").read_text())
        )
    for state in (run / "writers").glob("*.json"):
        jsonschema.validate(json.loads(state.read_text()), json.loads((folder / "writer.json").read_text()))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"format": FORMAT}, json.loads((folder / "trace.json").read_text()))
    for name, spec in TABLES.items():
        assert pa.ipc.read_schema(pa.py_buffer((folder / f"{name}.arrow").read_bytes())).equals(spec.schema)
