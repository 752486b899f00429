"""A trace in other tools' files, read back by their own readers."""

import json
import math
import struct
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from builders import add_step, make_batch, make_trace, tim_trace
from tim_trace import analysis
from tim_trace.analysis.export import export as exporting
from tim_trace.analysis.export.export import export_run
from tim_trace.analysis.stats import stats
from tim_trace.analysis.views import connect
from tim_trace.schemas.errors import FileThere, InvalidOption, NotInstalled
from tim_trace.tracer.importers.neutral import import_parquet
from tim_trace.tracer.recorder import Recorder

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four steps, one of them without logprobs of rollout for a sequence, with values that are no numbers."""
    path = tmp_path_factory.mktemp("export") / "run"
    with Recorder(path) as recorder:
        recorder.add_hyperparameters({"learning_rate": 1e-3, "loss_type": "grpo"})
        for step in range(1, 5):
            add_step(recorder, step, make_batch(rows=6, seed=step))
            recorder.add_metrics(step, {"loss": 0.1 + 0.2 * step, "note": "a text", "odd": NAN if step == 2 else INF})
        odd = recorder.add_sequences(
            step=5, seq_ids=["a", "b"], response_ids=[[1, 2], [3]], rewards={"digits": [1.0, NAN]}, reward=[1.0, NAN]
        )
        recorder.add_scores("rollout", odd, logprobs=[[-0.5, NAN]], rows=[0])
        recorder.add_scores("train", odd, logprobs=[[-0.25, -1.0], [-INF]], scored_mask=[[1, 0], [1]])
    return path


def recorded(run):
    query = """
        SELECT s.step, s.seq_id, s.response_ids, s.reward, r.logprobs, t.logprobs,
               (SELECT list(d ORDER BY position) FROM pair('train', 'rollout') AS p WHERE p.step = s.step AND p.seq_id = s.seq_id)
        FROM sequences AS s LEFT JOIN scores AS r ON r.step = s.step AND r.seq_id = s.seq_id AND r."pass" = 'rollout'
        JOIN scores AS t ON t.step = s.step AND t.seq_id = s.seq_id AND t."pass" = 'train' ORDER BY s.step, s.seq_id
    """
    return connect(run).execute(query).fetchall()


COLUMNS = ("step", "seq_id", "response_ids", "reward", "rollout_logprobs", "train_logprobs", "d")


@pytest.mark.parametrize(("tokens", "groups"), [(1, {5}), (70, {2, 3, 4}), (1 << 20, {1})])
def test_parquet_has_a_row_a_sequence_with_every_bit(run, tmp_path, monkeypatch, tokens, groups):
    monkeypatch.setattr(exporting, "CHUNK_TOKENS", tokens)
    done = export_run(run, to="parquet", output=tmp_path / "out")
    table = pq.read_table(tmp_path / "out" / "sequences.parquet")
    assert pq.ParquetFile(tmp_path / "out" / "sequences.parquet").num_row_groups in groups
    assert done.num_sequences == table.num_rows == 26
    found = [tuple(row[name] for name in COLUMNS) for row in table.to_pylist()]
    np.testing.assert_equal(found, recorded(run))
    assert found[-2][4][0] == -0.5
    assert found[-2][6][0] == 0.25
    assert found[-2][6][1] is None
    assert found[-1][4] is found[-1][6] is None
    metrics = pq.read_table(tmp_path / "out" / "metrics.parquet").to_pylist()
    assert [row["value"] for row in metrics if row["name"] == "loss"] == [0.1 + 0.2 * step for step in range(1, 5)]


def test_an_exported_text_is_imported_again(run, tmp_path):
    export_run(run, to="parquet", output=tmp_path / "out")
    import_parquet(tmp_path / "out", output=tmp_path / "again")
    query = "SELECT step, name, value, text FROM metrics ORDER BY step, name"
    first, second = (connect(trace).execute(query).fetchall() for trace in (run, tmp_path / "again"))
    np.testing.assert_equal(second, first)
    assert (0, "hyperparameter/loss_type", None, "grpo") in second


@pytest.mark.slow
def test_what_was_exported_imports_as_the_same_run(tmp_path):
    make_trace(tmp_path / "run")
    done = tim_trace("export", tmp_path / "run", "--to", "parquet", "-o", tmp_path / "out")
    assert done.code == 0, done.stderr
    assert "wrote 12 sequences" in done.stderr
    assert tim_trace("import", "parquet", tmp_path / "out", "-o", tmp_path / "again").code == 0
    first, second = (stats(tmp_path / name, by="step").dicts() for name in ("run", "again"))
    assert [row | {"run": ""} for row in first] == [row | {"run": ""} for row in second]


def expected_figures(run):
    """Step -> name -> number, as stats and the trainer have them."""
    figures = {}
    for row in stats(run, by="step").dicts():
        columns = {name: value for name, value in row.items() if name not in ("run", "step") and value is not None}
        figures[row["step"]] = {f"train-rollout/{name}": float(value) for name, value in columns.items()}
    for step, name, value in connect(run).execute("SELECT step, name, value FROM metrics WHERE step > 0").fetchall():
        if value is not None:
            figures[step][name] = value
    return figures


@pytest.mark.slow
def test_tensorboard_reads_every_number_of_every_step(run, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    done = export_run(run, to="tensorboard", output=tmp_path / "out")
    events = EventAccumulator(str(tmp_path / "out"), size_guidance={"tensors": 0}).Reload()
    found = {}
    for tag in events.Tags()["tensors"]:
        for event in events.Tensors(tag):
            found.setdefault(event.step, {})[tag] = make_ndarray(event.tensor_proto).item()
    expected = expected_figures(run)
    np.testing.assert_equal(
        {step: dict(sorted(values.items())) for step, values in found.items()},
        {step: dict(sorted(values.items())) for step, values in expected.items()},
    )
    assert done.num_values == sum(map(len, expected.values()))
    assert done.num_texts == 4


def records_of(path):
    """The records of a file of wandb: a header of seven bytes, then LevelDB's log format."""
    content, place, part = path.read_bytes(), 7, b""
    while place < len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", content[place : place + 7])
        assert place + 7 + size <= len(content), "the last record is cut"
        part += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield part
            part = b""


@pytest.mark.slow
def test_an_offline_run_of_wandb_holds_every_number_and_the_settings(run, tmp_path):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    # A process of its own: wandb's service has written the whole file when the process ends, not when the run does.
    done = tim_trace("export", run, "--to", "wandb", "-o", tmp_path, env={"WANDB_SILENT": "true"})
    assert done.code == 0, done.stderr
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found, settings = {}, {}
    for content in records_of(file):
        record = Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            values = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
            }
            found[values["_step"]] = {name: float(value) for name, value in values.items() if not name.startswith("_")}
        settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    np.testing.assert_equal(found, expected_figures(run))
    assert settings["loss_type"] == "grpo"


@pytest.mark.parametrize("library", ["tensorboard", "wandb"])
def test_a_library_that_is_missing_is_named(run, tmp_path, monkeypatch, library):
    for name in [library, *[name for name in sys.modules if name.startswith(f"{library}.")]]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        NotInstalled, match=rf"^{library} is not installed; pip install 'tim-trace\[{library}\]' or, in a clone, "
    ):
        analysis.export_run(run, to=library, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_that_lie_there_stay_without_force(run, tmp_path):
    export_run(run, to="parquet", output=tmp_path, steps="1")
    with pytest.raises(FileThere):
        export_run(run, to="parquet", output=tmp_path)
    assert pq.read_table(tmp_path / "sequences.parquet").num_rows == 6
    export_run(run, to="parquet", output=tmp_path, steps="1:2", force=True)
    assert pq.read_table(tmp_path / "sequences.parquet").num_rows == 12
    with pytest.raises(InvalidOption, match="got 'csv'; use parquet"):
        export_run(run, to="csv", output=tmp_path)


def test_a_trace_without_the_pair_still_has_its_sequences_and_its_log(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_sequences(step=1, response_ids=[[1, 2]])
        recorder.add_metrics(1, {"loss": 0.5})
    export_run(tmp_path / "run", to="parquet", output=tmp_path)
    (row,) = pq.read_table(tmp_path / "sequences.parquet").to_pylist()
    assert (row["response_ids"], row["d"]) == ([1, 2], None)
    assert not math.isnan(pq.read_table(tmp_path / "metrics.parquet").to_pylist()[0]["value"])


def test_files_in_a_folder_that_is_not_there_are_refused_and_no_folder_is_made(tmp_path):
    make_trace(tmp_path / "run")
    for format in ("parquet", "tensorboard"):
        done = tim_trace("export", tmp_path / "run", "--to", format, "-o", tmp_path / "missing" / "out")
        assert done.code == 2
        assert f"folder {tmp_path / 'missing'} does not exist; create it" in done.stderr
    assert not (tmp_path / "missing").exists()
    assert (
        tim_trace("export", tmp_path / "run", "--to", "parquet", "-o", tmp_path / "out").code == 0
    )  # its own folder is made


def test_policy_versions_survive_an_export_and_an_import(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for step in (1, 2):
            batch = recorder.add_sequences(step=step, prompt_ids=[[1]], response_ids=[[2, 3]], policy_version=step - 1)
            for name, version in (("rollout", step - 1), ("train", step)):
                recorder.add_scores(name, batch, logprobs=[[-1.0, -2.0]], policy_version=version)
    export_run(tmp_path / "run", to="parquet", output=tmp_path / "out")
    import_parquet(tmp_path / "out", output=tmp_path / "again")
    query = 'SELECT "pass", step, policy_version FROM scores ORDER BY ALL'
    found = connect(tmp_path / "again").execute(query).fetchall()
    assert found == connect(tmp_path / "run").execute(query).fetchall()
    assert found[-1] == ("train", 2, 2)
