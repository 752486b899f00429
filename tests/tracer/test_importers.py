import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import make_batch, tim_trace
from tim_trace.analysis.database import connect
from tim_trace.analysis.info import info
from tim_trace.schemas.errors import ImportFailed, TraceExists
from tim_trace.tracer.importers.neutral import import_parquet

ROW = {
    "step": 3, "seq_id": "a", "group_id": "g", "prompt_ids": [1, 2], "response_ids": [3, 4, 5],
    "response_mask": [1, 0, 1], "rollout_logprobs": [-0.5, 0.0, -1.25], "train_logprobs": [-0.75, -0.1, -1.0],
    "current_logprobs": [-0.75, -0.1, -1.0], "reference_logprobs": [-0.25, -0.1, -1.0], "entropy": [0.5, 0.25, 1.0],
    "reward": 1.0, "advantage": -0.5, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "policy_version": 2,
    "finish_reason": "stop",
}  # fmt: skip


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_json(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(steps=3, rows=4):
    """What other people's dump of random steps holds."""
    found = []
    for step in range(1, steps + 1):
        batch = make_batch(rows, seed=step)
        for row in range(rows):
            found.append(
                {
                    "step": step,
                    "prompt_ids": batch["prompt_ids"][row],
                    "response_ids": batch["response_ids"][row],
                    "rollout_logprobs": batch["rollout"][row].tolist(),
                    "train_logprobs": batch["train"][row].tolist(),
                    "reward": float(batch["reward"][row]),
                }
            )
    return found


@pytest.mark.parametrize("name", ["dump.parquet", "dump.jsonl"])
def test_every_column_comes_in(tmp_path, name):
    (write_parquet if name.endswith("parquet") else write_json)(tmp_path / name, [ROW])
    imported = import_parquet(tmp_path / name, output=tmp_path / "run")
    assert imported.passes == ("rollout", "train", "current", "reference")
    connection = connect(tmp_path / "run")
    cursor = connection.execute("SELECT * EXCLUDE (run, writer) FROM sequences")
    sequence = dict(zip([column[0] for column in cursor.description], cursor.fetchone(), strict=True))
    for column in (
        "step",
        "seq_id",
        "group_id",
        "prompt_ids",
        "response_ids",
        "reward",
        "temperature",
        "top_p",
        "top_k",
    ):
        assert sequence[column] == ROW[column]
    assert sequence["response_mask"] == [True, False, True]
    assert (sequence["advantage"], sequence["advantages"], sequence["finish_reason"]) == (-0.5, None, "stop")
    scores = dict(connection.execute('SELECT "pass", logprobs FROM scores').fetchall())
    float32 = {name: np.float32(ROW[f"{name}_logprobs"]).tolist() for name in ("train", "current", "reference")}
    assert scores == {"rollout": [-0.5, None, -1.25], **float32}
    entropies = connection.execute('SELECT "pass", entropy FROM scores WHERE entropy IS NOT NULL').fetchall()
    assert entropies == [("train", ROW["entropy"])]
    assert connection.execute("SELECT DISTINCT policy_version FROM scores").fetchall() == [(2,)]


def test_parquet_and_json_lines_give_the_same_trace(tmp_path):
    rows = rows_of()
    write_parquet(tmp_path / "a.parquet", rows)
    write_json(tmp_path / "b.jsonl", rows)
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    answers = []
    for name in ("a.parquet", "b.jsonl", "c.jsonl.gz"):
        import_parquet(tmp_path / name, output=tmp_path / name[0] / "run")
        query = "SELECT step, seq_id, position, token_id, rollout_logprob, train_logprob FROM tokens ORDER BY ALL"
        answers.append(connect(tmp_path / name[0] / "run").execute(query).fetchall())
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]) == sum(len(row["response_ids"]) for row in rows)


def test_a_folder_brings_all_its_files_and_its_metrics(tmp_path):
    folder = tmp_path / "dump"
    folder.mkdir()
    rows = rows_of(steps=4)
    write_parquet(folder / "0.parquet", rows[:5])
    write_json(folder / "1.jsonl", rows[5:])
    write_parquet(
        folder / "metrics.parquet",
        [{"step": 2, "name": "loss", "value": 0.5}, {"step": 2, "name": "kl", "value": None}],
    )
    imported = import_parquet(folder, output=tmp_path / "run")
    assert (imported.num_sequences, imported.num_metrics) == (16, 2)
    assert connect(tmp_path / "run").execute("SELECT step, name, value FROM metrics ORDER BY name").fetchall() == [
        (2, "kl", None),
        (2, "loss", 0.5),
    ]


def test_rows_may_come_in_any_order_of_steps(tmp_path):
    rows = rows_of()
    write_json(tmp_path / "dump.jsonl", rows[::-1])
    import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run")
    assert connect(tmp_path / "run").execute("SELECT step, count(*) FROM sequences GROUP BY step ORDER BY step").fetchall() == [
        (1, 4), (2, 4), (3, 4),
    ]  # fmt: skip


def test_placeholders_become_null_and_are_counted(tmp_path):
    base = {"step": 1, "prompt_ids": [1], "response_ids": [1, 2, 3], "train_logprobs": [-1.0, -1.0, -1.0]}
    rows = [
        {**base, "rollout_logprobs": [-9999.0, 0.0, -1.0], "response_mask": [1, 0, 1]},
        {**base, "rollout_logprobs": [0.0, 0.0, 0.0], "response_mask": [1, 1, 1]},
        {**base, "rollout_logprobs": [0.0, -0.5, 0.0], "response_mask": [1, 1, 1]},
        {**base, "rollout_logprobs": None, "response_mask": [1, 1, 1]},
    ]
    write_parquet(tmp_path / "dump.parquet", rows)
    imported = import_parquet(tmp_path / "dump.parquet", output=tmp_path / "run")
    holes = imported.placeholders
    assert (holes.clamped, holes.masked_zeros, holes.all_zero, holes.total) == (1, 1, 3, 5)
    found = connect(tmp_path / "run").execute(
        "SELECT seq_id, logprobs FROM scores WHERE \"pass\" = 'rollout' ORDER BY seq_id"
    )
    assert found.fetchall() == [("0", [None, None, -1.0]), ("1", [None] * 3), ("2", [0.0, -0.5, 0.0])]


def test_nan_and_infinities_are_kept(tmp_path):
    (tmp_path / "dump.jsonl").write_text(
        '{"step": 1, "prompt_ids": [1], "response_ids": [1, 2, 3], "train_logprobs": [NaN, -Infinity, null]}\n'
    )
    import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run")
    ((values,),) = connect(tmp_path / "run").execute("SELECT logprobs FROM scores").fetchall()
    assert np.isnan(values[0])
    assert values[1:] == [-np.inf, None]


def test_an_advantage_may_be_a_list(tmp_path):
    write_json(tmp_path / "dump.jsonl", [ROW | {"advantage": [0.5, 0.25, -1.0]}])
    import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run")
    assert connect(tmp_path / "run").execute("SELECT advantage, advantages FROM sequences").fetchone() == (
        None,
        [0.5, 0.25, -1.0],
    )


def test_probabilities_are_imported_and_pointed_at(tmp_path):
    write_json(tmp_path / "dump.jsonl", [ROW | {"train_logprobs": [0.5, 0.9, 0.1]}])
    done = tim_trace("import", "parquet", tmp_path / "dump.jsonl", "-o", tmp_path / "run")
    assert done.code == 0
    assert "3 logprobs lie above 0 and were kept" in done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": None}, "a row has no step"),
        (
            {"train_logprobs": [-1.0]},
            "step 3, sequence 'a': 1 values of logprobs of pass 'train' for 3 response tokens",
        ),
        ({"response_mask": [1]}, "'a': 1 values of response_mask for 3 response tokens"),
        ({"response_ids": [1, 2, 2**40]}, "'response_ids' does not read as lists of int32"),
        ({"response_ids": [1.5, 2.0, 3.0]}, "'response_ids' does not read as lists of int32"),
        ({"train_logprobs": "a"}, "'train_logprobs' holds string, where each row needs a list of float"),
    ],
)
@pytest.mark.parametrize("name", ["dump.parquet", "dump.jsonl"])
def test_a_wrong_row_is_named_and_nothing_is_left(tmp_path, change, message, name):
    (write_parquet if name.endswith("parquet") else write_json)(tmp_path / name, [ROW | change])
    with pytest.raises(ImportFailed, match=message) as caught:
        import_parquet(tmp_path / name, output=tmp_path / "run")
    assert str(caught.value).startswith(str(tmp_path / name))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("make", [pa.large_list, lambda type: pa.list_(type, 3)])
def test_other_kinds_of_list_are_lists(tmp_path, make):
    table = pa.Table.from_pylist([ROW])
    place = table.schema.get_field_index("train_logprobs")
    table = table.set_column(place, "train_logprobs", table["train_logprobs"].cast(make(pa.float64())))
    pq.write_table(table, tmp_path / "dump.parquet")
    import_parquet(tmp_path / "dump.parquet", output=tmp_path / "run")
    found = connect(tmp_path / "run").execute("SELECT logprobs FROM scores WHERE \"pass\" = 'train'").fetchone()
    assert found == (np.float32(ROW["train_logprobs"]).tolist(),)


def test_a_name_that_comes_twice_is_an_error(tmp_path):
    write_json(tmp_path / "dump.jsonl", [ROW, ROW])
    with pytest.raises(ImportFailed, match="sequence 'a': comes a second time"):
        import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lacks the columns step, prompt_ids, response_ids"),
        ('{"step": 1}\n', "lacks the columns prompt_ids, response_ids .*found: step"),
        ('{"step": 1, "prompt_ids": [], "response_ids": []}\n', "has no logprobs .*rollout_logprobs or train_logprobs"),
        ("{\n", "dump.jsonl, line 1: not JSON"),
        ("[1]\n", "dump.jsonl, line 1: is no object"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path, text, message):
    (tmp_path / "dump.jsonl").write_text(text)
    with pytest.raises(ImportFailed, match=message):
        import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run")


def test_paths_that_hold_nothing_are_named(tmp_path):
    with pytest.raises(ImportFailed, match="nothing is there"):
        import_parquet(tmp_path / "missing.parquet", output=tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImportFailed, match=r"holds no .parquet or .jsonl file"):
        import_parquet(tmp_path / "empty", output=tmp_path / "run")
    (tmp_path / "x.csv").write_text("a")
    with pytest.raises(ImportFailed, match=r"neither .parquet nor .jsonl"):
        import_parquet(tmp_path / "x.csv", output=tmp_path / "run")
    (tmp_path / "x.parquet").write_text("a")
    with pytest.raises(ImportFailed, match=r"x\.parquet: not readable as Parquet"):
        import_parquet(tmp_path / "x.parquet", output=tmp_path / "run")


def test_an_existing_trace_is_left_alone(tmp_path):
    write_json(tmp_path / "dump.jsonl", [ROW])
    import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run")
    with pytest.raises(TraceExists, match="--force"):
        import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run")
    import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run", force=True)


def test_a_trace_of_one_pass_is_a_trace(tmp_path):
    write_json(
        tmp_path / "dump.jsonl",
        [{k: v for k, v in ROW.items() if k in ("step", "prompt_ids", "response_ids", "rollout_logprobs")}],
    )
    done = tim_trace("import", "parquet", tmp_path / "dump.jsonl", "-o", tmp_path / "run")
    assert done.code == 0
    assert [p.name for p in info(str(tmp_path / "run")).passes] == ["rollout"]
    shown = tim_trace("stats", tmp_path / "run")
    assert shown.code == 2
    assert "the only pass with logprobs is 'rollout'" in shown.stderr
