"""Router choices, distributions and each pass's scores in a table: imported, they equal what the Recorder stores."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import tim_trace
from tim_trace import connect, import_dump, verify
from tim_trace.schemas.errors import ImportFailed, InvalidRecord
from tim_trace.tracer.dense import Logits, TopK, read_dense, tail_of
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.routing import Routing
from tim_trace.tracer.store import Store

NUM_ROWS, K, LAYERS, SLOTS, VOCABULARY = 6, 3, 2, 2, 11


def make_rows(num_rows=NUM_ROWS, seed=0):
    """Rows by column. Rows 1 and 4 have no distribution of `train`, row 2 no router choices of `rollout`."""
    draw = np.random.default_rng(seed)
    rows = []
    for row in range(num_rows):
        num_prompt, num = 1 + row % 3, 2 + row % 4
        experts = draw.integers(0, 8, (num_prompt + num, LAYERS, SLOTS)).astype(np.int16)
        experts[-1] = -1
        logits = draw.normal(size=(num, VOCABULARY)).astype(np.float32)
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        ids = np.argsort(-logprobs, axis=1)[:, :K].astype(np.int32)
        top = np.take_along_axis(logprobs, ids, 1).astype(np.float32)
        rows.append(
            {
                "step": 1 + row // 3, "seq_id": f"s{row}", "prompt_ids": [1] * num_prompt, "response_ids": [2] * num,
                "rollout_logprobs": logprobs[:, 2], "train_logprobs": logprobs[:, 2] - np.float32(0.125),
                "current_logprobs": logprobs[:, 2],
                "rollout_entropy": logits[:, 0], "train_entropy": logits[:, 1], "train_top2_gap": logits[:, 2],
                "rollout_expert_ids": None if row == 2 else experts,
                "rollout_expert_weights": None if row == 2 else draw.random(experts.shape).astype(np.float32),
                "train_expert_ids": experts[:, ::-1].copy(),
                "train_topk_ids": None if row in (1, 4) else ids,
                "train_topk_logprobs": None if row in (1, 4) else top,
                "train_tail_logprob": None if row in (1, 4) else tail_of(top) - np.float32(0.5),
                "rollout_vocabulary_logprobs": logprobs,
                "current_logits": logits,
            }
        )  # fmt: skip
    return rows


def record(path, rows):
    with Recorder(path) as recorder:
        for step in sorted({row["step"] for row in rows}):
            some = [row for row in rows if row["step"] == step]
            of = {name: [row[name] for row in some] for name in some[0]}
            batch = recorder.add_sequences(
                step=step, seq_ids=of["seq_id"], prompt_ids=of["prompt_ids"], response_ids=of["response_ids"]
            )

            def joined(name, of=of):
                return np.concatenate([value for value in of[name] if value is not None])

            routed = [row for row, value in enumerate(of["rollout_expert_ids"]) if value is not None]
            for part in (routed, [row for row in range(len(some)) if row not in routed]):
                if not part:
                    continue
                routing = Routing(
                    expert_ids=joined("rollout_expert_ids"), expert_weights=joined("rollout_expert_weights")
                )
                recorder.add_scores(
                    "rollout", batch, rows=part, logprobs=[of["rollout_logprobs"][row] for row in part],
                    entropy=[of["rollout_entropy"][row] for row in part],
                    distribution=Logits(
                        logits=np.concatenate([of["rollout_vocabulary_logprobs"][row] for row in part]), kind="logprobs"
                    ),
                    captured_rows=part, routing=routing if part == routed else None,
                )  # fmt: skip
            captured = [row for row, value in enumerate(of["train_topk_ids"]) if value is not None]
            recorder.add_scores(
                "train", batch, logprobs=of["train_logprobs"], entropy=of["train_entropy"],
                top2_gap=of["train_top2_gap"], routing=Routing(expert_ids=joined("train_expert_ids")),
                distribution=TopK(
                    token_ids=joined("train_topk_ids"), logprobs=joined("train_topk_logprobs"),
                    tail_logprob=joined("train_tail_logprob"),
                ),
                captured_rows=captured,
            )  # fmt: skip
            recorder.add_scores(
                "current", batch, logprobs=of["current_logprobs"],
                distribution=Logits(logits=joined("current_logits")), captured_rows=list(range(len(some))),
            )  # fmt: skip


def content(run):
    """Every score of a trace by (pass, sequence), with its arrays."""
    store = Store(run)
    query = """SELECT "pass", seq_id, logprobs, entropy, top2_gap, dense, dense_start, routing, routing_start,
    num_prompt_tokens, num_response_tokens FROM scores JOIN sequences USING (step, seq_id)"""
    found = {}
    for name, seq_id, *scores, dense, start, routing, routed, num_prompt, num in connect(run).execute(query).fetchall():
        arrays = {} if dense is None else read_dense(store, dense, start, num)
        if routing is not None:
            arrays |= read_dense(store, routing, routed, num_prompt + num)
        found[name, seq_id] = scores, {key: (a.dtype.name, a.tolist()) for key, a in arrays.items()}
    return found


def as_list(value):
    return value.tolist() if isinstance(value, np.ndarray) else value


def write(path, rows):
    plain = [{name: as_list(value) for name, value in row.items()} for row in rows]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in plain))
    else:
        pq.write_table(pa.Table.from_pylist(plain), path, row_group_size=4)
    return path


@pytest.mark.parametrize("file", ["dump.parquet", "dump.jsonl"])
def test_an_imported_table_equals_the_recorded_trace(tmp_path, file):
    rows = make_rows()
    record(tmp_path / "recorded", rows)
    path = write(tmp_path / file, [{f"my {name}": value for name, value in row.items()} for row in rows])
    options = [part for name in rows[0] for part in ("--map", f"my {name}={name}")]
    done = tim_trace("import", "parquet", path, "-o", tmp_path / "run", *options)
    assert done.code == 0, done.stderr
    assert tim_trace("verify", tmp_path / "run").code == 0
    assert not verify(tmp_path / "run").damaged
    recorded, imported = content(tmp_path / "recorded"), content(tmp_path / "run")
    assert len(recorded) == 3 * NUM_ROWS
    assert imported == recorded


@pytest.mark.parametrize("make", [pa.large_list, lambda type: pa.list_(type, -1)])
def test_lists_of_any_arrow_type_and_integers_of_any_width_are_read(tmp_path, make):
    rows = make_rows()
    table = pa.Table.from_pylist([{name: as_list(value) for name, value in row.items()} for row in rows])
    types = {"rollout_expert_ids": make(make(make(pa.int8()))), "train_topk_ids": make(make(pa.uint32()))}
    for name, type in types.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, pa.array(table[name].to_pylist(), type))
    pq.write_table(table, tmp_path / "dump.parquet")
    record(tmp_path / "recorded", rows)
    import_dump("parquet", tmp_path / "dump.parquet", output=tmp_path / "run")
    assert content(tmp_path / "run") == content(tmp_path / "recorded")


def test_blocks_of_rows_are_limited_by_their_values(tmp_path, monkeypatch):
    """Many blocks give the same trace as one."""
    for module, name in (("neutral", "VALUES_AT_ONCE"), ("textfiles", "_BLOCK_BYTES")):
        monkeypatch.setattr(f"tim_trace.tracer.importers.{module}.{name}", 100)
    rows = make_rows()
    record(tmp_path / "recorded", rows)
    for file in ("dump.parquet", "dump.jsonl"):
        import_dump("parquet", write(tmp_path / file, rows), output=tmp_path / file.replace(".", "-"))
        assert content(tmp_path / file.replace(".", "-")) == content(tmp_path / "recorded")


def test_the_tail_is_computed_and_arrays_without_logprobs_are_kept(tmp_path):
    rows = make_rows(2)
    wanted = (
        "step",
        "seq_id",
        "prompt_ids",
        "response_ids",
        "rollout_logprobs",
        "train_topk_ids",
        "train_topk_logprobs",
    )
    part = [{name: row[name] for name in wanted} for row in rows]
    import_dump("parquet", write(tmp_path / "dump.jsonl", part), output=tmp_path / "run")
    (logprobs, *_), arrays = content(tmp_path / "run")["train", "s0"]
    assert set(logprobs) == {None}
    assert arrays["tail_logprob"] == ("float32", tail_of(rows[0]["train_topk_logprobs"]).tolist())
    assert ("train", "s1") not in content(tmp_path / "run")


def test_a_part_of_the_steps_is_imported(tmp_path):
    rows = make_rows()
    record(tmp_path / "recorded", rows)
    import_dump("parquet", write(tmp_path / "dump.parquet", rows), output=tmp_path / "run", steps="2:2")
    recorded = content(tmp_path / "recorded")
    assert content(tmp_path / "run") == {key: recorded[key] for key in recorded if key[1] in ("s3", "s4", "s5")}


def ragged(value):
    return [row[: 1 + place % 2] for place, row in enumerate(value.tolist())]


def holed(value):
    return [*value.tolist()[:-1], None]


def holed_inside(value):
    return [[None, *row[1:]] for row in value.tolist()]


TOKEN_IDS = r"token ids \[response tokens, K\], without NULL"
EXPERT_IDS = r"expert ids \[prompt and response tokens, layers, slots\], without NULL"
HOSTILE = [
    ("train_topk_ids", ragged, r"'train_topk_ids' has a list of length 2 at row 1, token 1, but the first"),
    ("train_topk_ids", lambda v: v + 0.5, rf"'train_topk_ids' contains .*each row needs {TOKEN_IDS} \(row 1, element 0"),
    ("train_topk_ids", lambda v: v * np.nan, rf"'train_topk_ids' contains .*each row needs {TOKEN_IDS} \(row 1"),
    ("train_topk_ids", lambda v: v - 100, rf"each row needs {TOKEN_IDS} \(row 1"),
    ("train_topk_ids", lambda v: v[:, 0], rf"each row needs {TOKEN_IDS} \(row 1"),
    ("train_topk_ids", lambda v: v.astype(bool), rf"each row needs {TOKEN_IDS} \(row 1"),
    ("train_topk_logprobs", lambda v: v < 0, r"each row needs numbers \[response tokens, K\], without NULL \(row 1"),
    ("train_topk_ids", holed, rf"each row needs {TOKEN_IDS} \(row 1, element 1: NULL"),
    ("train_topk_ids", holed_inside, rf"each row needs {TOKEN_IDS} \(row 1, element 0"),
    ("train_topk_ids", lambda v: v[:, :0], "has a list of length 0 at row 1, token 0"),
    ("train_topk_ids", lambda v: "x", rf"each row needs {TOKEN_IDS} \(row 1"),
    ("train_topk_ids", lambda v: v[:-1], r"sequence 's0': got 1 values of train_topk_ids for 2 response tokens"),
    ("train_topk_ids", lambda v: v[:0], r"sequence 's0': got 0 values of train_topk_ids for 2 response tokens"),
    ("train_topk_ids", lambda v: None, r"sequence 's0': pass 'train' has topk_logprobs, tail_logprob as its distribution. Map topk_ids and"),
    ("train_topk_logprobs", holed_inside, r"each row needs numbers \[response tokens, K\], without NULL \(row 1"),
    ("train_tail_logprob", holed, r"each row needs numbers \[response tokens\], without NULL \(row 1, element 1: NULL"),
    ("rollout_expert_ids", lambda v: v[:, 0], rf"each row needs {EXPERT_IDS} \(row 1"),
    ("rollout_expert_ids", lambda v: v[:, :1], r"has a list of length 2 at row 2, token 0, but the first"),
    ("rollout_expert_ids", lambda v: v + 0.5, rf"each row needs {EXPERT_IDS} \(row 1"),
    ("rollout_expert_ids", lambda v: v.astype(int) + 2**15, rf"each row needs {EXPERT_IDS} \(row 1"),
    ("rollout_expert_ids", lambda v: v[:-1], r"got 2 values of rollout_expert_ids for 3 prompt and response tokens"),
    ("rollout_expert_ids", lambda v: None, r"pass 'rollout' has .* as its routing.*Map expert_ids"),
    ("rollout_expert_weights", lambda v: v[:, :, :1], r"has a list of length 2 at row 2, token 0, but the first"),
]  # fmt: skip


@pytest.mark.parametrize("file", ["dump.parquet", "dump.jsonl"])
@pytest.mark.parametrize(("column", "change", "message"), HOSTILE)
def test_a_wrong_array_is_named_by_file_row_and_column(tmp_path, file, column, change, message):
    rows = make_rows()
    changed = change(rows[0][column])
    whole = file == "dump.parquet" and isinstance(changed, (str, np.ndarray))
    if whole and (np.ndim(changed) != rows[0][column].ndim or np.asarray(changed).dtype == bool):
        rows = [row | {column: change(row[column])} for row in rows if row[column] is not None]  # one type per column
    else:
        rows[0][column] = changed
    with pytest.raises(
        ImportFailed, match=message.replace("row 1", "(row|line) 1").replace("row 2", "(row|line) 2")
    ) as caught:
        import_dump("parquet", write(tmp_path / file, rows), output=tmp_path / "run")
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_number_of_values_per_token_cannot_change_between_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("tim_trace.tracer.importers.textfiles._BLOCK_BYTES", 1)
    rows = make_rows()
    for name in ("train_topk_ids", "train_topk_logprobs"):
        rows[5][name] = rows[5][name][:, :2]
    with pytest.raises(
        ImportFailed, match=r"dump.jsonl: step 2, pass 'train', distribution: the arrays have .* in earlier batches"
    ):
        import_dump("parquet", write(tmp_path / "dump.jsonl", rows), output=tmp_path / "run")


def test_numbers_that_are_not_finite_are_kept(tmp_path):
    rows = make_rows()
    rows[0]["train_topk_logprobs"][0] = [np.nan, -np.inf, 0.0]
    import_dump("parquet", write(tmp_path / "dump.jsonl", rows), output=tmp_path / "run")
    _, arrays = content(tmp_path / "run")["train", "s0"]
    assert np.array_equal(arrays["logprobs"][1][0], [np.nan, -np.inf, 0.0], equal_nan=True)


def test_routing_needs_prompts(tmp_path):
    rows = [row | {"prompt_ids": None} for row in make_rows()]
    with pytest.raises(ImportFailed, match="Routing covers prompt tokens too"):
        import_dump("parquet", write(tmp_path / "dump.jsonl", rows), output=tmp_path / "run")


def test_a_pass_has_one_kind_of_distribution(tmp_path):
    rows = [row | {"train_logits": row["current_logits"]} for row in make_rows()]
    with pytest.raises(ImportFailed, match="only one kind of distribution"):
        import_dump("parquet", write(tmp_path / "dump.jsonl", rows), output=tmp_path / "run")


def test_a_recorder_refuses_distributions_whose_shape_changes(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for step, k in ((1, 3), (2, 4)):
            batch = recorder.add_sequences(step=step, prompt_ids=[[1]], response_ids=[[1, 2]])
            top = TopK(
                token_ids=np.zeros((2, k), np.int32), logprobs=np.zeros((2, k), np.float32),
                tail_logprob=np.zeros(2, np.float32),
            )  # fmt: skip
            if step == 1:
                recorder.add_scores("train", batch, logprobs=[[-1.0, -2.0]], distribution=top)
            else:
                with pytest.raises(InvalidRecord, match="must not change within a pass"):
                    recorder.add_scores("train", batch, logprobs=[[-1.0, -2.0]], distribution=top)
    assert not verify(tmp_path / "run").damaged


def test_dumps_refuse_arrays_and_say_what_to_do(tmp_path):
    import dumps

    dumps.write_nemo_rl(tmp_path / "dump", dumps.make_steps(1))
    with pytest.raises(
        ImportFailed, match=r"'idx' cannot be mapped to 'train_topk_ids'\. Only the parquet format has this column"
    ):
        import_dump("nemo-rl", tmp_path / "dump", output=tmp_path / "run", map={"idx": "train_topk_ids"})
