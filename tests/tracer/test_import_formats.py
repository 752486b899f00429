"""Ways in beside Parquet and JSON lines, and other people's names."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import make_batch, tim_trace
from tim_trace.analysis.views import connect
from tim_trace.schemas.errors import ImportFailed
from tim_trace.tracer.importers.neutral import import_parquet, parse_map


def rows_of(rows=5, step=1):
    """A dump with numbers, lists, text and NULL."""
    batch = make_batch(rows, seed=step)
    return [
        {
            "step": step,
            "seq_id": f"s{row}",
            "prompt_ids": batch["prompt_ids"][row],
            "response_ids": batch["response_ids"][row],
            "response_mask": [token % 2 == 0 for token in batch["response_ids"][row]],
            "rollout_logprobs": [None, *batch["rollout"][row].tolist()[1:]],
            "train_logprobs": batch["train"][row].tolist(),
            "reward": None if row == 1 else float(batch["reward"][row]),
            "top_k": row,
            "finish_reason": None if row == 2 else "stop, or not",
        }
        for row in range(rows)
    ]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_array(path, rows):
    content = json.dumps(rows, indent=1).encode()
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


def content(path):
    """Everything that a trace holds but when and by whom it was written."""
    connection = connect(path)
    return [
        connection.execute(f"SELECT * EXCLUDE ({left_out}) FROM {table} ORDER BY ALL").fetchall()
        for table, left_out in (("sequences", "run, writer"), ("scores", "run, writer, contract"))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("dump.json", write_array),
        ("dump.json.gz", write_array),
    ],
)
def test_every_form_gives_the_trace_that_json_lines_give(tmp_path, name, write):
    rows = rows_of()
    import_parquet(write_jsonl(tmp_path / "dump.jsonl", rows), output=tmp_path / "lines")
    import_parquet(write(tmp_path / name, rows), output=tmp_path / "run")
    assert content(tmp_path / "run") == content(tmp_path / "lines")


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_a_file_that_was_cut_or_changed_is_named(tmp_path):
    path = write_parquet(tmp_path / "dump.parquet", rows_of(40))
    whole = path.read_bytes()
    chance = np.random.default_rng(0)
    outcomes = set()
    for trial in range(16):
        changed = bytearray(whole)
        if trial % 2:
            changed = changed[: chance.integers(len(whole))]
        else:
            changed[chance.integers(len(whole))] ^= 1 << chance.integers(8)
        path.write_bytes(changed)
        try:
            import_parquet(path, output=tmp_path / "run", force=True)
            outcomes.add("read")  # a flipped bit of a number is another number
        except ImportFailed as error:
            outcomes.add("refused in one line" if "\n" not in str(error) else str(error))
    assert outcomes == {"read", "refused in one line"}


def test_text_that_is_no_text_is_named(tmp_path):
    table = pa.Table.from_pylist([{name: value for name, value in rows_of()[0].items() if name != "finish_reason"}])
    bytes_as_text = pa.StringArray.from_buffers(1, pa.py_buffer(np.int32([0, 1]).tobytes()), pa.py_buffer(b"\xe4"))
    pq.write_table(table.append_column("finish_reason", bytes_as_text), tmp_path / "dump.parquet")
    with pytest.raises(ImportFailed, match=r"column 'finish_reason' contains bytes that are not valid UTF-8"):
        import_parquet(tmp_path / "dump.parquet", output=tmp_path / "run")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "row 1 is not an object: each row must be an object with one sequence"),
        ('[{"step": 1}', r"dump\.json is not JSON .*: a \.json file that begins with \[ must be an array of objects"),
        ("[]", "missing columns"),
        (
            '{\n "step": 1}',
            r"line 1 is not JSON .*: each line must be one object, except that a \.json file may contain one array",
        ),
    ],
)
def test_wrong_json_says_what_a_file_may_be(tmp_path, text, message):
    (tmp_path / "dump.json").write_text(text)
    with pytest.raises(ImportFailed, match=message):
        import_parquet(tmp_path / "dump.json", output=tmp_path / "run")


THEIRS = {
    "step": "global_step",
    "prompt_ids": "prompts",
    "response_ids": "completion_ids",
    "train_logprobs": "old_log_probs",
    "reward": "score = sum",
}


@pytest.mark.slow
def test_other_people_s_names_are_mapped(tmp_path):
    rows = rows_of()
    import_parquet(write_jsonl(tmp_path / "ours.jsonl", rows), output=tmp_path / "ours")
    theirs = [{THEIRS.get(name, name): value for name, value in row.items()} for row in rows]
    path = write_jsonl(tmp_path / "theirs.jsonl", theirs)
    renamed = {theirs: ours for ours, theirs in THEIRS.items()}
    imported = import_parquet(path, output=tmp_path / "run", map=renamed)
    assert imported.ignored_columns == ()
    assert content(tmp_path / "run") == content(tmp_path / "ours")
    options = [part for theirs, ours in renamed.items() for part in ("--map", f"{theirs}={ours}")]
    done = tim_trace("import", "parquet", path, "-o", tmp_path / "shell", *options)
    assert done.code == 0, done.stderr
    assert content(tmp_path / "shell") == content(tmp_path / "ours")


def test_a_mapped_column_is_named_by_both_names_where_it_is_wrong(tmp_path):
    path = write_jsonl(tmp_path / "dump.jsonl", [row | {"score": "high"} for row in rows_of()])
    with pytest.raises(ImportFailed, match=r"column 'score' \(mapped to 'top_p'\) contains string"):
        import_parquet(path, output=tmp_path / "run", map={"score": "top_p"})


def test_a_column_that_is_mapped_to_nothing_makes_room_and_is_named(tmp_path):
    path = write_jsonl(tmp_path / "dump.jsonl", [row | {"reward": "text", "score": 0.5} for row in rows_of()])
    imported = import_parquet(path, output=tmp_path / "run", map={"reward": "", "score": "reward"})
    assert imported.ignored_columns == ("reward",)
    assert connect(tmp_path / "run").execute("SELECT DISTINCT reward FROM sequences").fetchall() == [(0.5,)]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["scores=reward"], r"map: .*dump\.jsonl has no column 'scores' \(found: step, seq_id, prompt_ids, .*, score"),
        (
            ["score=prize"],
            "map: 'score' cannot be mapped to 'prize'. Known columns: step, seq_id, .*response_ids, .*finish_reason",
        ),
        (["score=reward"], r"the columns reward and score both map to 'reward'. Skip one with the mapping reward="),
        (
            ["score=top_p", "uid=top_p"],
            "the columns score and uid both map to 'top_p'. Skip one with the mapping score=",
        ),
        (["score"], "map: got 'score', expected theirs=ours, e.g. completion_ids=response_ids"),
        (["=reward"], "map: got '=reward', expected theirs=ours"),
        (["score=top_p", "score=top_k"], "map: 'score' is mapped to both 'top_p' and 'top_k'. Map it only once"),
    ],
)
def test_a_map_that_cannot_be_is_one_line(tmp_path, texts, message):
    path = write_jsonl(tmp_path / "dump.jsonl", [row | {"score": 0.5, "uid": 1} for row in rows_of()])
    with pytest.raises(ImportFailed, match=message) as caught:
        import_parquet(path, output=tmp_path / "run", map=parse_map(texts))
    done = tim_trace("import", "parquet", path, "-o", tmp_path / "run", *(f"--map={text}" for text in texts))
    assert (done.code, done.stderr) == (2, f"Error: {caught.value}\n".replace("Error: map:", "Error: --map:"))
    assert not (tmp_path / "run").exists()


def test_columns_to_map_are_shown_as_the_option_that_maps_them(tmp_path):
    row = {"iter": 1, "prompt": [1], "completion_ids": [2], "old_log_probs": [-1.0], "note": "x"}
    path = write_jsonl(tmp_path / "dump.jsonl", [row])
    with pytest.raises(
        ImportFailed, match=r"e.g. map=\{'their_step': 'step', 'prompt': 'prompt_ids', 'completion_ids':"
    ):
        import_parquet(path, output=tmp_path / "run")
    done = tim_trace("import", "parquet", path, "-o", tmp_path / "run")
    example = "--map their_step=step --map prompt=prompt_ids --map completion_ids=response_ids"
    assert done.stderr.endswith(f"e.g. {example}\n")
    done = tim_trace("import", "parquet", path, "-o", tmp_path / "run", *example.replace("their_step", "iter").split())
    assert done.stderr.endswith(
        "e.g. --map their_rollout_logprobs=rollout_logprobs\n"
    )  # no guess from the name: old_log_probs can be either pass


def test_columns_passed_over_are_named_so_that_a_terminal_shows_them(tmp_path):
    many = {f"extra{number}": 1 for number in range(30)}
    path = write_jsonl(tmp_path / "dump.jsonl", [rows_of()[0] | {"a\nb": 1, "": 2} | many])
    done = tim_trace("import", "parquet", path, "-o", tmp_path / "run")
    assert r"ignored columns: 'a\nb', '', extra0, " in done.stderr
    assert "extra17 and 12 more\n" in done.stderr
