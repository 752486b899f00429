import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import make_batch, tim_trace
from tim_trace.analysis.info import info
from tim_trace.analysis.views import connect
from tim_trace.schemas.errors import ImportFailed, StorageError, TraceExists
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
    query = "SELECT DISTINCT \"pass\" = 'rollout', policy_version FROM scores ORDER BY ALL"
    assert connection.execute(query).fetchall() == [(False, None), (True, 2)]


FURTHER = {
    "min_p": 0.125, "repetition_penalty": 1.5, "max_tokens": 64, "rewards": {"format": True, "correct": 0.5},
    "advantages": [0.5, 0.25, 0.125], "top2_gap": [0.5, 0.25, 1.0],
}  # fmt: skip


@pytest.mark.parametrize(("name", "write"), [("a.parquet", write_parquet), ("a.jsonl", write_json)])
def test_settings_rewards_and_gaps_that_the_recorder_takes_come_in(tmp_path, name, write):
    keys = ("step", "prompt_ids", "response_ids", "train_logprobs")
    write(tmp_path / name, [{key: ROW[key] for key in keys} | FURTHER])
    imported = import_parquet(tmp_path / name, output=tmp_path / "run")
    assert imported.ignored_columns == ()
    query = "SELECT min_p, repetition_penalty, max_tokens, rewards, advantages FROM sequences"
    (found,) = connect(tmp_path / "run").execute(query).fetchall()
    assert found == (0.125, 1.5, 64, {"format": 1.0, "correct": 0.5}, [0.5, 0.25, 0.125])
    assert connect(tmp_path / "run").execute("SELECT top2_gap FROM scores").fetchall() == [([0.5, 0.25, 1.0],)]


def test_rewards_and_advantages_may_be_missing_in_some_rows(tmp_path):
    rows = [ROW | {"seq_id": str(row)} for row in range(4)]
    rows[0] |= {"rewards": {"format": 1.0}}
    rows[1] |= {"rewards": {"format": None, "correct": 0.0}, "advantages": [0.5, 0.5, 0.5]}
    rows[2] |= {"advantages": [1.0, 0.5, 0.25]}
    write_json(tmp_path / "a.jsonl", rows)
    import_parquet(tmp_path / "a.jsonl", output=tmp_path / "run")
    query = "SELECT CAST(rewards AS VARCHAR), advantage, advantages FROM sequences ORDER BY seq_id"
    assert connect(tmp_path / "run").execute(query).fetchall() == [
        ("{format=1.0}", -0.5, None),
        ("{correct=0.0}", None, [0.5, 0.5, 0.5]),
        (None, None, [1.0, 0.5, 0.25]),
        (None, -0.5, None),
    ]


@pytest.mark.parametrize("value", ["a", [1.0], {"a": "b"}, {"a": [1]}, 2.5])
def test_rewards_that_are_no_record_of_numbers_are_refused(tmp_path, value):
    write_json(tmp_path / "a.jsonl", [ROW, ROW | {"seq_id": "b", "rewards": value}])
    with pytest.raises(
        ImportFailed,
        match=r"a.jsonl: column 'rewards' contains .*, but each row needs a record with one number.* \(line 2",
    ):
        import_parquet(tmp_path / "a.jsonl", output=tmp_path / "run")


def test_a_number_that_is_missing_in_a_large_file_is_null(tmp_path):
    rows = [ROW | {"seq_id": str(row), "reward": None, "top_k": None} for row in range(600)]
    write_parquet(tmp_path / "a.parquet", [*rows[:-1], ROW | {"seq_id": "last"}])
    import_parquet(tmp_path / "a.parquet", output=tmp_path / "run")
    query = "SELECT count(reward), count(top_k) FROM sequences"
    assert connect(tmp_path / "run").execute(query).fetchall() == [(1, 1)]


@pytest.mark.slow
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


@pytest.mark.slow
def test_steps_and_a_sample_of_parquet_are_chosen(tmp_path):
    write_parquet(tmp_path / "dump.parquet", rows_of(steps=5, rows=20))
    query = "SELECT step, seq_id FROM sequences ORDER BY ALL"
    import_parquet(tmp_path / "dump.parquet", output=tmp_path / "run")
    whole = connect(tmp_path / "run").execute(query).fetchall()
    assert import_parquet(tmp_path / "dump.parquet", output=tmp_path / "part", steps="-2:").num_sequences == 40
    assert connect(tmp_path / "part").execute(query).fetchall() == [row for row in whole if row[0] > 3]
    sampled = [import_parquet(tmp_path / "dump.parquet", output=tmp_path / name, sample=0.3) for name in "ab"]
    assert 10 < sampled[0].num_sequences < 60
    found = [connect(tmp_path / name).execute(query).fetchall() for name in "ab"]
    assert found[0] == found[1]
    assert set(found[0]) < set(whole)
    with pytest.raises(ImportFailed, match="selected 0 of 100 sequences"):
        import_parquet(tmp_path / "dump.parquet", output=tmp_path / "c", sample=1e-12)


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
    assert "3 invalid logprobs above 0" in done.stderr


NOT_TOKENS = "a list of token ids (0 to 2147483647)"
NOT_NUMBERS = "a list of numbers"
NOT_FLAGS = "a list of 0s and 1s, or of booleans"
WRONG = [
    # column, value, what each row needs, what the message shows of the row
    ("step", None, "a non-negative integer", ": NULL"),
    ("step", 1.5, "a non-negative integer", ": 1.5"),
    ("step", "3", "a non-negative integer", ": '3'"),
    ("step", float("nan"), "a non-negative integer", ": nan"),
    ("step", 1e300, "a non-negative integer", ": 1e+300"),
    ("step", -1, "a non-negative integer", ": -1"),
    ("step", True, "a non-negative integer", ": True"),
    ("step", [3], "a non-negative integer", ": [3]"),
    ("seq_id", None, "a string or an integer", ": NULL"),
    ("seq_id", 1.5, "a string or an integer", ": 1.5"),
    ("seq_id", ["a"], "a string or an integer", ": ['a']"),
    ("group_id", 1.0, "a string or an integer", ": 1.0"),
    ("prompt_ids", 5, NOT_TOKENS, ": 5"),
    ("prompt_ids", [1, -1], NOT_TOKENS, ", element 1: -1"),
    ("response_ids", None, NOT_TOKENS, ": NULL"),
    ("response_ids", [1, 2, 2**40], NOT_TOKENS, ", element 2: 1099511627776"),
    ("response_ids", [1.5, 2.0, 3.0], NOT_TOKENS, ", element 0: 1.5"),
    ("response_ids", [1, None, 3], NOT_TOKENS, ", element 1: NULL"),
    ("response_ids", ["1", "2", "3"], NOT_TOKENS, ", element 0: '1'"),
    ("response_ids", [[1], [2], [3]], NOT_TOKENS, ", element 0: [1]"),
    ("response_ids", [True, True, False], NOT_TOKENS, ", element 0: True"),
    ("response_ids", "abc", NOT_TOKENS, ": 'abc'"),
    ("train_logprobs", "a", NOT_NUMBERS, ": 'a'"),
    ("train_logprobs", 0.5, NOT_NUMBERS, ": 0.5"),
    ("train_logprobs", ["a", "b", "c"], NOT_NUMBERS, ", element 0: 'a'"),
    ("train_logprobs", [[-1.0], [-2.0], [-3.0]], NOT_NUMBERS, ", element 0: [-1.0]"),
    ("train_logprobs", [True, False, True], NOT_NUMBERS, ", element 0: True"),
    ("train_logprobs", [-1.0, -1e39, -1.0], NOT_NUMBERS, ", element 1: -1e+39"),
    ("entropy", ["a", "b", "c"], NOT_NUMBERS, ", element 0: 'a'"),
    ("response_mask", [1, 2, 0], NOT_FLAGS, ", element 1: 2"),
    ("response_mask", [0.5, 1.0, 0.0], NOT_FLAGS, ", element 0: 0.5"),
    ("response_mask", [1, None, 0], NOT_FLAGS, ", element 1: NULL"),
    ("response_mask", ["true", "true", "false"], NOT_FLAGS, ", element 0: 'true'"),
    ("response_mask", True, NOT_FLAGS, ": True"),
    ("reward", "high", "a number", ": 'high'"),
    ("reward", [1.0], "a number", ": [1.0]"),
    ("reward", {"right": 1.0}, "a number", ": {'right': 1.0}"),
    ("advantage", "high", "a number or, in every row, a list of numbers", ": 'high'"),
    ("advantage", ["x", "y", "z"], "a number or, in every row, a list of numbers", ", element 0: 'x'"),
    ("temperature", "0.7", "a number", ": '0.7'"),
    ("temperature", True, "a number", ": True"),
    ("top_p", [0.9], "a number", ": [0.9]"),
    ("top_k", 1.5, "a whole number up to 2147483647", ": 1.5"),
    ("top_k", 2**31, "a whole number up to 2147483647", ": 2147483648"),
    ("policy_version", "2", "a whole number", ": '2'"),
    ("policy_version", 2.5, "a whole number", ": 2.5"),
    ("finish_reason", 1, "text", ": 1"),
    ("finish_reason", ["stop"], "text", ": ['stop']"),
]


@pytest.mark.parametrize("name", ["dump.parquet", "dump.jsonl"])
@pytest.mark.parametrize(
    ("column", "value", "needed", "shown"), WRONG, ids=[f"{row[0]}-{row[1]!r:.20}" for row in WRONG]
)
def test_a_value_that_a_column_cannot_hold_is_named_with_its_row_and_nothing_is_left(
    tmp_path, name, column, value, needed, shown
):
    rows = [ROW | {"seq_id": "first"}, ROW | {column: value}]
    if name.endswith("parquet"):
        write_parquet(tmp_path / name, rows[1:])  # a Parquet column has one type: here that of the wrong value
    else:
        write_json(tmp_path / name, rows)
    with pytest.raises(ImportFailed) as caught:
        import_parquet(tmp_path / name, output=tmp_path / "run")
    told = str(caught.value)
    assert told.startswith(f"{tmp_path / name}: column {column!r} contains ")
    assert f", but each row needs {needed} (" in told
    assert told.endswith(f"{shown})")
    assert "\n" not in told
    assert not (tmp_path / "run").exists()


def test_a_row_is_named_by_its_number_and_a_line_by_its_own(tmp_path):
    rows = [ROW | {"seq_id": str(row)} for row in range(1200)]
    rows[1000]["reward"] = float("inf")
    rows[1100]["step"] = -7
    write_parquet(tmp_path / "dump.parquet", rows)
    with pytest.raises(ImportFailed, match=r"'step' contains int64, .* \(row 1101: -7\)"):
        import_parquet(tmp_path / "dump.parquet", output=tmp_path / "run")
    (tmp_path / "dump.jsonl").write_text("\n\n" + "\n".join(json.dumps(row) for row in rows))
    with pytest.raises(ImportFailed, match=r"'step' contains int64, .* \(line 1103: -7\)"):
        import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"train_logprobs": [-1.0]},
            "step 3, sequence 'a': got 1 values of logprobs of pass 'train' for 3 response tokens",
        ),
        ({"response_mask": [1]}, "'a': got 1 values of response_mask for 3 response tokens"),
        ({"entropy": [1.0]}, "'a': got 1 values of entropy of pass 'train' for 3 response tokens"),
        ({"advantage": [1.0]}, "'a': got 1 values of advantages for 3 response tokens"),
    ],
)
@pytest.mark.parametrize("name", ["dump.parquet", "dump.jsonl"])
def test_a_list_of_another_length_is_named_and_nothing_is_left(tmp_path, change, message, name):
    (write_parquet if name.endswith("parquet") else write_json)(tmp_path / name, [ROW | change])
    with pytest.raises(ImportFailed, match=message) as caught:
        import_parquet(tmp_path / name, output=tmp_path / "run")
    assert str(caught.value).startswith(str(tmp_path / name))
    assert not (tmp_path / "run").exists()


def test_a_wrong_value_ends_the_command_with_2_in_one_line(tmp_path):
    write_parquet(tmp_path / "dump.parquet", [ROW | {"reward": "high"}])
    done = tim_trace("import", "parquet", tmp_path / "dump.parquet", "-o", tmp_path / "run")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == (
        f"Error: {tmp_path}/dump.parquet: column 'reward' contains string, but each row needs a number (row 1: 'high')\n"
    )
    assert not (tmp_path / "run").exists()


def test_an_error_of_the_writing_thread_is_the_import_s(tmp_path, monkeypatch, capfd):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    write_json(tmp_path / "dump.jsonl", [ROW])
    monkeypatch.setattr("tim_trace.tracer.seal.write_checked", full)
    with pytest.raises(ImportFailed, match=r"could not be written \(OSError: \[Errno 28\] No space left on device\)"):
        import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run")
    assert "training continues" not in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_disk_that_is_full_from_the_start_is_the_import_s_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    write_json(tmp_path / "dump.jsonl", [ROW])
    monkeypatch.setattr("tim_trace.tracer.writer.TraceWriter.save_state", full)
    with pytest.raises(ImportFailed, match=r"run could not be written \(\[Errno 28\] No space left on device\)"):
        import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_failing_import_leaves_the_trace_that_force_would_replace(tmp_path):
    write_json(tmp_path / "dump.jsonl", [ROW])
    import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run")
    before = info(str(tmp_path / "run")).run_id
    write_json(tmp_path / "wrong.jsonl", [ROW | {"reward": "high"}])
    with pytest.raises(ImportFailed):
        import_parquet(tmp_path / "wrong.jsonl", output=tmp_path / "run", force=True)
    assert info(str(tmp_path / "run")).run_id == before
    write_json(tmp_path / "other.jsonl", [ROW | {"seq_id": "other"}])
    imported = import_parquet(tmp_path / "other.jsonl", output=tmp_path / "run", force=True)
    assert imported.folder == tmp_path / "run"
    assert info(str(tmp_path / "run")).run_id != before
    assert connect(tmp_path / "run").execute("SELECT seq_id, reward FROM sequences").fetchall() == [("other", 1.0)]
    assert {path.name for path in tmp_path.iterdir()} == {"dump.jsonl", "wrong.jsonl", "other.jsonl", "run"}


@pytest.mark.parametrize(
    ("type", "values"),
    [
        (pa.dictionary(pa.int8(), pa.string()), ["stop", None]),
        (pa.large_string(), ["stop", None]),
        (pa.string_view(), ["stop", None]),
    ],
)
def test_text_in_another_encoding_is_text(tmp_path, type, values):
    rows = [{**ROW, "seq_id": str(row)} for row in range(2)]
    table = pa.Table.from_pylist(rows).drop_columns(["finish_reason"])
    array = pa.array(values, pa.string())
    array = array.dictionary_encode().cast(type) if pa.types.is_dictionary(type) else array.cast(type)
    pq.write_table(table.append_column("finish_reason", array), tmp_path / "dump.parquet")
    import_parquet(tmp_path / "dump.parquet", output=tmp_path / "run")
    found = connect(tmp_path / "run").execute("SELECT finish_reason FROM sequences ORDER BY seq_id").fetchall()
    assert found == [("stop",), (None,)]


def test_integers_and_flags_are_taken_for_what_they_say(tmp_path):
    row = ROW | {"step": 3.0, "reward": True, "seq_id": 7, "group_id": 8, "train_logprobs": [-1, 0, -2], "top_k": 20.0}
    write_parquet(tmp_path / "dump.parquet", [row | {"response_mask": [1.0, 0.0, 1.0]}])
    import_parquet(tmp_path / "dump.parquet", output=tmp_path / "run")
    connection = connect(tmp_path / "run")
    query = "SELECT step, reward, seq_id, group_id, top_k, response_mask FROM sequences"
    assert connection.execute(query).fetchall() == [(3, 1.0, "7", "8", 20, [True, False, True])]
    found = connection.execute("SELECT logprobs FROM scores WHERE \"pass\" = 'train'").fetchone()
    assert found == ([-1.0, None, -2.0],)  # 0 outside of the mask is a placeholder


def test_kinds_that_json_mixes_are_taken_where_each_is_one(tmp_path):
    write_json(tmp_path / "dump.jsonl", [ROW | {"seq_id": "a", "reward": True}, ROW | {"seq_id": 1, "reward": 0.5}])
    import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run")
    found = connect(tmp_path / "run").execute("SELECT seq_id, reward FROM sequences ORDER BY seq_id").fetchall()
    assert found == [("1", 0.5), ("a", 1.0)]


def test_null_cells_are_not_recorded_row_by_row(tmp_path):
    """NULL is none of: an empty prompt, a mask without tokens, an entropy of another length."""
    rows = [
        ROW | {"seq_id": "all"},
        ROW | {"seq_id": "none", "prompt_ids": None, "response_mask": None, "entropy": None, "group_id": None},
        ROW | {"seq_id": "entropy", "train_logprobs": None, "advantage": None},
    ]
    write_parquet(tmp_path / "dump.parquet", rows)
    import_parquet(tmp_path / "dump.parquet", output=tmp_path / "run")
    connection = connect(tmp_path / "run")
    query = "SELECT seq_id, prompt_ids, response_mask, group_id, advantage FROM sequences ORDER BY seq_id"
    mask = [True, False, True]
    assert connection.execute(query).fetchall() == [
        ("all", [1, 2], mask, "g", -0.5),
        ("entropy", [1, 2], mask, "g", None),
        ("none", None, None, None, -0.5),
    ]
    query = "SELECT seq_id, logprobs IS NULL OR len(list_filter(logprobs, lambda x: x IS NOT NULL)) = 0, entropy FROM scores"
    assert connection.execute(f"{query} WHERE \"pass\" = 'train' ORDER BY seq_id").fetchall() == [
        ("all", False, ROW["entropy"]),
        ("entropy", True, ROW["entropy"]),
        ("none", False, None),
    ]


def test_advantages_are_numbers_or_lists_and_not_both(tmp_path):
    write_json(tmp_path / "dump.jsonl", [ROW, ROW | {"seq_id": "b", "advantage": [0.5, 0.25, -1.0]}])
    message = "'advantage' contains mixed values, but each row needs a number or, in every row, a list of numbers"
    with pytest.raises(ImportFailed, match=message):
        import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run")


def test_a_list_of_advantages_may_miss_in_some_rows(tmp_path):
    write_json(
        tmp_path / "dump.jsonl",
        [ROW | {"seq_id": "a", "advantage": [0.5, 0.25, -1.0]}, ROW | {"seq_id": "b", "advantage": None}],
    )
    import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run")
    query = "SELECT advantage, advantages FROM sequences ORDER BY seq_id"
    assert connect(tmp_path / "run").execute(query).fetchall() == [(None, [0.5, 0.25, -1.0]), (None, None)]


def test_entropy_without_a_pass_of_the_policy_is_passed_over_by_name(tmp_path):
    keep = ("step", "prompt_ids", "response_ids", "reference_logprobs", "entropy")
    write_json(tmp_path / "dump.jsonl", [{name: ROW[name] for name in keep} | {"uid": 1}])
    imported = import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run")
    assert imported.ignored_columns == ("uid", "entropy")


def test_a_row_without_a_name_is_called_by_its_number_in_the_import(tmp_path):
    base = {"prompt_ids": [1], "rollout_logprobs": [-1.0]}
    write_json(tmp_path / "a.jsonl", [base | {"step": step, "response_ids": [step]} for step in (1, 2, 1)])
    write_json(tmp_path / "b.jsonl", [base | {"step": 1, "response_ids": [9]}])
    import_parquet(tmp_path / "*.jsonl", output=tmp_path / "run")
    found = connect(tmp_path / "run").execute("SELECT seq_id, response_ids[1] FROM sequences ORDER BY seq_id")
    assert found.fetchall() == [("0", 1), ("1", 2), ("2", 1), ("3", 9)]


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
    with pytest.raises(ImportFailed, match="sequence 'a' occurs twice"):
        import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run")


def test_a_name_that_comes_twice_in_two_files_is_an_error_of_the_second(tmp_path):
    write_json(tmp_path / "a.jsonl", [ROW])
    write_parquet(tmp_path / "b.parquet", [ROW])
    with pytest.raises(ImportFailed, match=r"b\.parquet: step 3, sequence 'a' occurs twice"):
        import_parquet(tmp_path, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "missing columns: step, prompt_ids, response_ids"),
        ('{"step": 1}\n', "missing columns: prompt_ids, response_ids .*found: step"),
        ('{"step": 1, "prompt_ids": [], "response_ids": []}\n', "has no logprobs .*rollout_logprobs or train_logprobs"),
        ("{\n", "dump.jsonl, line 1 is not JSON"),
        ("[1]\n", "dump.jsonl, line 1 is not an object"),
        (json.dumps(ROW) + '\n{"": 1}\n', r"'step' contains int64, .* \(line 2: NULL\)"),
        ("[" * 100_000 + "\n", "dump.jsonl, line 1 is not JSON"),
        (b"\xff\xfe\n".decode("latin-1"), "dump.jsonl, line 1 is not JSON"),
        (json.dumps(ROW | {"seq_id": "\ud800"}) + "\n", r"'seq_id' contains mixed values, .* \(line 1: '\\ud800'\)"),
        (
            json.dumps(ROW | {"step": 2**80}) + "\n",
            r"'step' contains mixed values, .* \(line 1: 1208925819614629174706176\)",
        ),
        ("{}\n{}\n", r"missing columns: step, .* \(found: none\)"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path, text, message):
    (tmp_path / "dump.jsonl").write_text(text)
    with pytest.raises(ImportFailed, match=message):
        import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run")


def test_paths_that_hold_nothing_are_named(tmp_path):
    with pytest.raises(ImportFailed, match="not found"):
        import_parquet(tmp_path / "missing.parquet", output=tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImportFailed, match=r"contains no \.parquet, \.jsonl or \.json file"):
        import_parquet(tmp_path / "empty", output=tmp_path / "run")
    (tmp_path / "x.tsv").write_text("a")
    with pytest.raises(ImportFailed, match=r"is not a \.parquet, \.jsonl or \.json"):
        import_parquet(tmp_path / "x.tsv", output=tmp_path / "run")
    for content in (b"", b"a", b"PAR1" + b"\0" * 40 + b"PAR1"):
        (tmp_path / "x.parquet").write_bytes(content)
        with pytest.raises(ImportFailed, match=r"x\.parquet cannot be read as Parquet") as caught:
            import_parquet(tmp_path / "x.parquet", output=tmp_path / "run")
        assert "\n" not in str(caught.value)
    with pytest.raises(StorageError, match="unsupported file system"):
        import_parquet("moon://x.parquet", output=tmp_path / "run")
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROW).encode())[:-12])
    with pytest.raises(ImportFailed, match=r"x\.jsonl\.gz cannot be read as JSON"):
        import_parquet(tmp_path / "x.jsonl.gz", output=tmp_path / "run")


def test_files_without_rows_or_columns_are_no_trace(tmp_path):
    table = pa.Table.from_pylist([ROW])
    pq.write_table(table.slice(0, 0), tmp_path / "rows.parquet")
    with pytest.raises(ImportFailed, match=r"rows\.parquet contains no rows"):
        import_parquet(tmp_path / "rows.parquet", output=tmp_path / "run")
    pq.write_table(table.select([]), tmp_path / "columns.parquet")
    with pytest.raises(ImportFailed, match=r"missing columns: step, prompt_ids, response_ids \(found: none\)"):
        import_parquet(tmp_path / "columns.parquet", output=tmp_path / "run")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ImportFailed, match="missing columns"):
        import_parquet(tmp_path / "empty.jsonl", output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_process_without_rows_leaves_a_file_that_is_passed_over(tmp_path):
    folder = tmp_path / "dump"
    folder.mkdir()
    write_json(folder / "0.jsonl", [ROW])
    (folder / "1.jsonl").write_text("")
    pq.write_table(pa.Table.from_pylist([ROW]).slice(0, 0), folder / "2.parquet")
    assert import_parquet(folder, output=tmp_path / "run").num_sequences == 1


def test_each_file_of_a_folder_has_the_required_columns(tmp_path):
    write_json(tmp_path / "0.jsonl", [ROW])
    write_parquet(tmp_path / "1.parquet", [{name: value for name, value in ROW.items() if name != "response_ids"}])
    with pytest.raises(
        ImportFailed, match=r"1\.parquet: missing columns: response_ids .*e.g. map=\{'.*': 'response_ids'\}"
    ):
        import_parquet(tmp_path, output=tmp_path / "run")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"step": "2", "name": "loss", "value": 0.5}], r"'step' contains string, .* \(row 1: '2'\)"),
        ([{"step": 1.5, "name": "loss", "value": 0.5}], r"'step' contains double, .* \(row 1: 1.5\)"),
        ([{"step": None, "name": "loss", "value": 0.5}], r"'step' contains null, .* \(row 1: NULL\)"),
        ([{"step": 2, "name": None, "value": 0.5}], r"'name' contains null, .* \(row 1: NULL\)"),
        (
            [{"step": 2, "name": "loss", "value": [0.5]}],
            r"'value' contains list<double>, but each row needs a number or text",
        ),
        (
            [{"step": 2, "loss": 0.5}],
            "missing columns: name, value. A metrics file needs the columns step, name and value",
        ),
    ],
)
def test_wrong_metrics_are_named_and_nothing_is_left(tmp_path, rows, message):
    write_json(tmp_path / "dump.jsonl", [ROW])
    write_parquet(tmp_path / "metrics.parquet", rows)
    with pytest.raises(ImportFailed, match=message) as caught:
        import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run")
    assert str(caught.value).startswith(str(tmp_path / "metrics.parquet"))
    assert not (tmp_path / "run").exists()


def test_metrics_keep_numbers_text_and_what_is_missing(tmp_path):
    folder = tmp_path / "dump"
    folder.mkdir()
    write_json(folder / "0.jsonl", [ROW])
    values = {"loss": 0.5, "done": True, "phase": "warm", "kl": None}
    write_json(folder / "metrics.jsonl", [{"step": 2, "name": name, "value": value} for name, value in values.items()])
    assert import_parquet(folder, output=tmp_path / "run").num_metrics == 4
    assert connect(tmp_path / "run").execute("SELECT name, value, text FROM metrics ORDER BY name").fetchall() == [
        ("done", 1.0, None), ("kl", None, None), ("loss", 0.5, None), ("phase", None, "warm"),
    ]  # fmt: skip


def test_an_existing_trace_is_left_alone(tmp_path):
    write_json(tmp_path / "dump.jsonl", [ROW])
    import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run")
    with pytest.raises(TraceExists, match="force=True"):
        import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run")
    import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "run", force=True)


def test_a_trace_of_one_pass_is_a_trace(tmp_path):
    write_json(
        tmp_path / "dump.jsonl",
        [{k: v for k, v in ROW.items() if k in ("step", "prompt_ids", "response_ids", "rollout_logprobs")}],
    )
    done = tim_trace("import", "parquet", tmp_path / "dump.jsonl", "-o", tmp_path / "run")
    assert done.code == 0
    assert f"next: tim-trace info {tmp_path / 'run'}" in done.stderr
    assert [p.name for p in info(str(tmp_path / "run")).passes] == ["rollout"]
    shown = tim_trace("stats", tmp_path / "run")
    assert shown.code == 2
    assert "the only pass with logprobs is 'rollout'" in shown.stderr


def test_rows_with_and_without_a_mask_of_one_step_keep_their_own(tmp_path):
    rows = [
        {**ROW, "seq_id": str(place), "rollout_logprobs": [-0.5, -1.0, -1.25], "response_mask": mask, "policy_version": place}
        for place, mask in enumerate(([True, False, True], None, [True] * 3, None))
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    import_parquet(tmp_path / "rows.parquet", output=tmp_path / "run")
    query = "SELECT seq_id, response_mask, policy_version FROM sequences ORDER BY seq_id"
    assert connect(tmp_path / "run").execute(query).fetchall() == [
        ("0", [True, False, True], 0), ("1", None, 1), ("2", [True] * 3, 2), ("3", None, 3),
    ]  # fmt: skip
    (num_tokens,) = (
        connect(tmp_path / "run").execute("SELECT sum(num_tokens) FROM pair_sequences('train', 'rollout')").fetchone()
    )
    assert num_tokens == 11


def test_passes_that_have_some_rows_have_the_versions_of_these(tmp_path):
    rows = [
        {**ROW, "seq_id": str(place), "policy_version": place, "rollout_logprobs": None if place % 2 == 0 else ROW["rollout_logprobs"]}
        for place in range(4)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    import_parquet(tmp_path / "rows.parquet", output=tmp_path / "run")
    query = "SELECT seq_id, policy_version FROM scores WHERE pass = 'rollout' ORDER BY ALL"
    assert connect(tmp_path / "run").execute(query).fetchall() == [("1", 1), ("3", 3)]
    query = "SELECT count(policy_version) FROM scores WHERE pass = 'train'"
    assert connect(tmp_path / "run").execute(query).fetchall() == [(0,)]  # nobody said which weights these were


def test_an_ignored_column_that_looks_like_a_missing_pass_is_named(tmp_path):
    rows = [
        {"gen_logprobs" if name == "rollout_logprobs" else name: value for name, value in row.items()}
        for row in rows_of()
    ]
    write_json(tmp_path / "dump.jsonl", rows)
    done = tim_trace("import", "parquet", tmp_path / "dump.jsonl", "-o", tmp_path / "run")
    assert done.code == 0
    assert "no rollout pass: if gen_logprobs" in done.stderr
    assert "--map gen_logprobs=rollout_logprobs --force" in done.stderr
    again = ("import", "parquet", tmp_path / "dump.jsonl", "-o", tmp_path / "run", "--force", "--map")
    done = tim_trace(*again, "gen_logprobs=rollout_logprob")
    assert done.stderr.endswith("cannot be mapped to 'rollout_logprob'. Did you mean 'rollout_logprobs'?\n")
    done = tim_trace(*again, "gen_logprobs=rollout_logprobs")
    assert done.code == 0
    assert "no rollout pass" not in done.stderr
