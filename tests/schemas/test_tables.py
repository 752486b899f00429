"""A column is described once: the recorder and the importers take what schemas/tables.py says."""

import inspect

import numpy as np
import pyarrow.parquet as pq
import pytest
from tim_trace.schemas.passes import STANDARD
from tim_trace.schemas.tables import ARRAYS, GIVEN, SAMPLING, TABLES, TOKEN_SCORES
from tim_trace.tracer.importers.row_import import KNOWN
from tim_trace.tracer.recorder import Recorder

FORGOTTEN = (
    "schemas/tables.py and the signature differ: give the method a keyword for each column (Column.keyword names it where it is "
    "not the column's name), or mark the column is_made where the recorder makes its values"
)


def keywords(method):
    return {name for name, p in inspect.signature(method).parameters.items() if p.kind is p.KEYWORD_ONLY}


def test_the_recorder_takes_every_column_that_it_does_not_make():
    others = {"response_attention_mask", "prompt_attention_mask", "split"}
    columns = {column.keyword or name for name, column in GIVEN.items()}
    assert keywords(Recorder.add_sequences) - others == columns, FORGOTTEN
    assert set(TOKEN_SCORES) <= keywords(Recorder.add_scores), FORGOTTEN


def test_files_to_import_may_have_every_column_that_the_recorder_takes():
    of_passes = {f"{name}_{column}" for name in STANDARD for column in (*ARRAYS, *TOKEN_SCORES, "policy_version")}
    assert set(KNOWN) == {*GIVEN, *of_passes, *TOKEN_SCORES, "split"} - {"logprobs"}


def test_every_given_column_is_sealed_and_every_setting_is_one_of_them(tmp_path):
    given = {
        "step": 3, "seq_ids": ["a"], "group_ids": [7], "response_ids": [[1, 2]], "prompt_ids": [[3]], "response_mask": [[1, 0]],
        "rewards": {"format": [0.5]}, "finish_reason": "stop", "advantage": [[0.25, 0.5]], "reward": True,
    }  # fmt: skip
    settings = dict.fromkeys(SAMPLING, 1)
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_sequences(**given, **settings, policy_version=4)
    (path,) = (tmp_path / "run" / "sequences").glob("*.parquet")
    (row,) = pq.read_table(path).to_pylist()
    assert row["advantage"] is None
    assert [name for name in GIVEN if row[name] is None] == ["advantage"]
    assert {name: row[name] for name in SAMPLING} == settings
    assert (row["group_id"], row["reward"], row["rewards"]) == ("7", 1.0, [("format", 0.5)])


@pytest.mark.parametrize("repeats", [False, True])
def test_a_file_keeps_each_repeated_text_once_and_splits_floats_into_bytes_if_that_is_smaller(tmp_path, repeats):
    draw = np.random.default_rng(0)
    values = -draw.exponential(1.0, 5000).astype(np.float32)
    values = values[np.arange(5000) % 300] if repeats else values
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(
            step=1, response_ids=[[1] * 5000], advantage=[values.tolist()], finish_reason="stop"
        )
        recorder.add_scores("train", batch, logprobs=[values.tolist()])
    for table in ("sequences", "scores"):
        (path,) = (tmp_path / "run" / table).glob("*.parquet")
        group = pq.read_metadata(path).row_group(0)
        encodings = {group.column(n).path_in_schema: group.column(n).encodings for n in range(group.num_columns)}
        for column in TABLES[table].columns:
            for name, found in encodings.items():
                if name == column.name:
                    assert ("RLE_DICTIONARY" in found) is column.repeats, name
                if name == f"{column.name}.list.element":
                    is_split = column.name in ("advantage", "advantages", "logprobs") and not repeats
                    if column.name in ("entropy", "top2_gap"):
                        continue  # no values
                    assert ("BYTE_STREAM_SPLIT" in found) is is_split, name
