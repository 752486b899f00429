"""`--map` to every column that the Recorder takes, from a table and from each framework's dump."""

import inspect
import json
import math
from dataclasses import fields

import dumps
import numpy as np
import pytest
import torch
from builders import make_batch, tim_trace
from shared import rest_slow
from tim_trace import connect, import_dump
from tim_trace.schemas.errors import ImportFailed
from tim_trace.schemas.passes import LOGPROBS, STANDARD
from tim_trace.schemas.tables import ARRAYS, GIVEN, TOKEN_SCORES
from tim_trace.tracer.dense import Logits, TopK
from tim_trace.tracer.importers.formats import FORMATS
from tim_trace.tracer.importers.row_import import KNOWN, PASSES
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.routing import Routing

OF_ONE_ROW = {
    "group_id": "g", "policy_version": 3, "reward": 0.5, "rewards": {"a": 1.0}, "advantage": 0.25, "temperature": 0.75,
    "top_p": 0.5, "top_k": 5, "min_p": 0.125, "repetition_penalty": 1.25, "max_tokens": 99, "finish_reason": "length",
}  # fmt: skip
NOT_OF_A_FILE = {
    "routing", "distribution", "captured_rows", "hidden", "forward", "scored_mask", "attention_mask",
    "prompt_attention_mask", "response_attention_mask", "batch", "rows", "pass_name",
}  # fmt: skip


def test_an_import_takes_what_the_recorder_takes():
    columns = {column.keyword or name for name, column in GIVEN.items()} | {"advantage"}
    taken = set(inspect.signature(Recorder.add_sequences).parameters) - {"self", "split"} - NOT_OF_A_FILE
    assert taken == columns
    scores = set(inspect.signature(Recorder.add_scores).parameters) - {"self", "logprobs", "policy_version"}
    of_a_pass = {*ARRAYS, *TOKEN_SCORES, "policy_version"}
    of_passes = {f"{name}_{column}" for name in STANDARD for column in of_a_pass}
    assert set(KNOWN) == set(GIVEN) | {"advantage", "split"} | of_passes | (scores - NOT_OF_A_FILE)
    in_arrays = {field.name for kind in (TopK, Logits, Routing) for field in fields(kind)} - {"kind"}
    assert {column.keyword or name for name, column in ARRAYS.items()} == in_arrays


@pytest.mark.parametrize("per_token", [False, True])
def test_every_column_of_a_table_is_mapped(tmp_path, per_token):
    batch = make_batch(4)
    lists = {name: [[-0.5] * len(ids) for ids in batch["response_ids"]] for name in PASSES}
    table = {
        "step": [7] * 4, "seq_id": list("abcd"), "prompt_ids": batch["prompt_ids"], "response_ids": batch["response_ids"],
        "response_mask": [[True] * len(ids) for ids in batch["response_ids"]],
        "entropy": [[0.5] * len(ids) for ids in batch["response_ids"]], **lists,
        "top2_gap": [[1.5] * len(ids) for ids in batch["response_ids"]], **{n: [v] * 4 for n, v in OF_ONE_ROW.items()},
    }  # fmt: skip
    if per_token:
        table["advantages"] = [[float(place) for place, _ in enumerate(ids)] for ids in table["response_ids"]]
        del table["advantage"]
    rows = [{f"their {name}": values[row] for name, values in table.items()} for row in range(4)]
    dumps.write_lines(tmp_path / "dump.jsonl", rows)
    options = [part for name in table for part in ("--map", f"their {name}={name}")]
    done = tim_trace("import", "parquet", tmp_path / "dump.jsonl", "-o", tmp_path / "run", *options)
    assert done.code == 0, done.stderr
    connection = connect(tmp_path / "run")
    for name, values in table.items():
        if name in GIVEN:
            found = connection.execute(f'SELECT "{name}" FROM sequences ORDER BY seq_id').fetchall()
            assert found == [(value,) for value in values], name
    query = 'SELECT "pass", logprobs, entropy, top2_gap FROM scores ORDER BY "pass", seq_id'
    scores = connection.execute(query).fetchall()
    assert [row[0] for row in scores] == [name for name in sorted(STANDARD) for _ in range(4)]
    for place, (name, logprobs, entropy, gap) in enumerate(scores):
        assert logprobs == lists[f"{name}{LOGPROBS}"][place % 4]
        of_train = (table["entropy"][place % 4], table["top2_gap"][place % 4])
        assert (entropy, gap) == (of_train if name == "train" else (None, None))


def change_lines(folder, change):
    for path in folder.rglob("*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        dumps.write_lines(path, [change(record) for record in records])


def change_documents(folder, change):
    """Change the records of JSON files: a list of them, or one object per name."""
    for path in folder.rglob("*.json"):
        found = json.loads(path.read_text())
        named = (
            {name: change(one) if isinstance(one, dict) else one for name, one in found.items()}
            if isinstance(found, dict)
            else None
        )
        path.write_text(json.dumps([change(one) for one in found] if named is None else named))


def change_samples(folder, change):
    for path in folder.rglob("*.pt"):
        record = torch.load(path, weights_only=True)
        if "samples" in record:
            record["samples"] = [change(sample) for sample in record["samples"]]
        else:
            rows = range(len(record["rollout_data"]["tokens"]))
            data = {k: v for k, v in record["rollout_data"].items() if len(v) == len(rows)}
            changed = [change({name: values[row] for name, values in data.items()}) for row in rows]
            record["rollout_data"] |= {name: [each[name] for each in changed] for name in changed[0]}
        torch.save(record, path)


def write_with(format, folder, given, monkeypatch):
    """Write a format's dump whose rows have `given(record)` besides: fields by name."""
    steps = dumps.make_steps(1)
    if format == "verl":
        tensors = dumps.verl_tensors(steps[1])
        with dumps.classes_of(verl__protocol={"DataProto": dumps.DataProto}):
            others = {}
            for name, value in given(tensors).items():
                if torch.is_tensor(value):
                    tensors[name] = value
                else:
                    others[name] = np.array([value] * 6, dtype=object)
            path = folder / "1" / "gen_batch.dp"
            path.parent.mkdir(parents=True)
            torch.save(dumps.DataProto(tensors, others, {}), path, _use_new_zipfile_serialization=False)
        return
    if format == "skyrl":
        whole = dumps.TrainingInputBatch

        class Changed(whole):
            def __init__(self, *, batch_dict, **more):
                added = {
                    name: dumps.skyrl_tensor(torch.full((6,), value)) if isinstance(value, (int, float)) else value
                    for name, value in given(batch_dict).items()
                }
                super().__init__(batch_dict=batch_dict | added, **more)

        monkeypatch.setattr(dumps, "TrainingInputBatch", Changed)
    if format == "megatron-rl":
        dumps.write_rollout_bank(folder, steps, more=given({}))
        return
    {**dumps.WRITERS, **dumps.ONE_SIDED, "verl text": dumps.write_verl_text}[format](folder, steps)
    if format in ("slime", "miles"):
        change_samples(folder, lambda sample: sample | given(sample))
    elif format == "megatron-lm":
        change_documents(folder, lambda record: record | given(record))
    elif format != "skyrl":
        change_lines(folder, lambda record: record | given(record))


ALL = [*dumps.WRITERS, *dumps.ONE_SIDED, "verl text"]


@pytest.mark.parametrize("format", rest_slow(ALL, 5))
def test_every_column_of_a_row_is_mapped_in_every_dump(tmp_path, format, monkeypatch):
    name = format.removesuffix(" text")
    own = FORMATS[name].columns
    added = {column: value for column, value in OF_ONE_ROW.items() if column not in own}
    if format == "megatron-lm":  # sequences are grouped by prompt
        del added["group_id"]
    if format == "skyrl":  # tensors hold numbers
        added = {column: value for column, value in added.items() if isinstance(value, (int, float))}
    write_with(format, tmp_path / "dump", lambda _: {f"their_{c}": v for c, v in added.items()}, monkeypatch)
    map = {f"their_{column}": column for column in added}
    import_dump(name, tmp_path / "dump", output=tmp_path / "run", map=map)
    columns = ", ".join(added)
    found = connect(tmp_path / "run").execute(f"SELECT DISTINCT {columns} FROM sequences").fetchall()
    assert found == [tuple(added.values())]


@pytest.mark.parametrize("format", rest_slow([*dumps.WRITERS, "open-instruct"], 4))
def test_every_column_of_tokens_is_aligned_as_the_dump_aligns_its_own(tmp_path, format, monkeypatch):
    (field, *_) = FORMATS[format].columns["rollout_logprobs"]
    copies = {"their_current": "current_logprobs", "their_gap": "top2_gap", "their_entropy": "rollout_entropy"}
    write_with(format, tmp_path / "dump", lambda record: {name: record[field] for name in copies}, monkeypatch)
    import_dump(format, tmp_path / "dump", output=tmp_path / "run", map=copies)
    query = 'SELECT seq_id, logprobs FROM scores WHERE "pass" = ? ORDER BY seq_id'
    scores = {name: connect(tmp_path / "run").execute(query, [name]).fetchall() for name in ("rollout", "current")}
    entropies = connect(tmp_path / "run").execute(query.replace("logprobs", "entropy"), ["rollout"]).fetchall()
    assert len(entropies) == len(scores["rollout"])
    assert entropies[-1][1][-1] == scores["rollout"][-1][1][-1]
    assert scores["rollout"] == scores["current"] != []
    owner = "current" if format == "open-instruct" else "train"
    query = f"SELECT seq_id, top2_gap FROM scores WHERE \"pass\" = '{owner}' ORDER BY seq_id"
    for (_, gaps), (_, logprobs) in zip(
        connect(tmp_path / "run").execute(query).fetchall(), scores["rollout"], strict=True
    ):
        for gap, logprob in zip(gaps, logprobs, strict=True):
            assert logprob is None or math.isclose(gap, logprob, rel_tol=1e-6)


def test_tokens_of_a_text_dump_are_mapped(tmp_path):
    rows = [{"input": "a", "output": "b", "score": 1.0, "step": 7, "in": [1], "out": [2, 3], "lp": [-0.5, -0.25]}]
    dumps.write_lines(tmp_path / "dump" / "7.jsonl", rows)
    map = {"in": "prompt_ids", "out": "response_ids", "lp": "rollout_logprobs"}
    imported = import_dump("verl", tmp_path / "dump", output=tmp_path / "run", map=map)
    assert (imported.num_tokens, imported.passes) == (2, ("rollout",))


@pytest.mark.parametrize(
    ("map", "message"),
    [
        ({"idx": "step"}, "'idx' cannot be mapped to 'step'. nemo-rl files have no field for the step"),
        ({"idx": "moon"}, "'idx' cannot be mapped to 'moon'. nemo-rl takes .*top_p"),
        ({"moon": "top_p"}, "no file has the field moon"),
        ({"content": "top_p"}, "field 'content' is .*, expected a number"),
        ({"content": "top2_gap"}, "'content' .*expected"),
    ],
)
def test_a_map_of_a_dump_that_cannot_be_is_named(tmp_path, map, message):
    dumps.write_nemo_rl(tmp_path / "dump", dumps.make_steps(1))
    with pytest.raises(ImportFailed, match=message):
        import_dump("nemo-rl", tmp_path / "dump", output=tmp_path / "run", map=map)


def test_a_mapped_field_of_a_batch_needs_a_value_per_row(tmp_path, monkeypatch):
    given = {"short": torch.ones(5), "one": torch.tensor(1.0)}
    write_with("verl", tmp_path / "dump", lambda _: given, monkeypatch)
    for name in given:
        with pytest.raises(ImportFailed, match="the field mapped to top_p must have 6 values, one per row"):
            import_dump("verl", tmp_path / "dump", output=tmp_path / "run", map={name: "top_p"})


@pytest.mark.parametrize("column", ["group_id", "train_logprobs", "rollout_entropy"])
def test_a_column_that_matched_sequences_cannot_have_is_refused(tmp_path, column):
    dumps.write_megatron(tmp_path / "dump", dumps.make_steps(1))
    with pytest.raises(
        ImportFailed, match=f"'latency' cannot be mapped to '{column}', because sequences are matched by prompt"
    ):
        import_dump("megatron-lm", tmp_path / "dump", output=tmp_path / "run", map={"latency": column})


def test_a_table_has_evaluation_samples_and_a_version_for_each_pass(tmp_path):
    rows = [
        {
            "step": 7, "seq_id": "ab"[row], "prompt_ids": [1], "response_ids": [2, 3], "policy_version": 4, "kind": kind,
            "rollout_logprobs": [-0.5, -0.25], "train_logprobs": [-0.5, -0.25], "current_logprobs": [-0.5, -0.25],
            "trainer": 5, "now": version,
        }
        for row, (kind, version) in enumerate([(None, 6), ("eval", None)])
    ]  # fmt: skip
    dumps.write_lines(tmp_path / "dump.jsonl", rows)
    map = {"kind": "split", "trainer": "train_policy_version", "now": "current_policy_version"}
    import_dump("parquet", tmp_path / "dump.jsonl", output=tmp_path / "run", map=map)
    connection = connect(tmp_path / "run")
    for view, name, of_current in (("scores", "a", 6), ("eval_scores", "b", None)):
        found = connection.execute(f'SELECT seq_id, "pass", policy_version FROM {view} ORDER BY "pass"').fetchall()
        assert found == [(name, "current", of_current), (name, "rollout", 4), (name, "train", 5)]
    dumps.write_lines(tmp_path / "odd.jsonl", [rows[0] | {"kind": "test"}])
    with pytest.raises(ImportFailed, match=r"split: got 'test' .*; pass 'train' or 'eval'"):
        import_dump("parquet", tmp_path / "odd.jsonl", output=tmp_path / "odd", map=map)


@pytest.mark.parametrize("format", rest_slow([*dumps.WRITERS, "vllm", "open-instruct"], 4))
def test_evaluation_samples_and_versions_are_mapped_in_every_dump(tmp_path, format, monkeypatch):
    given = {"their_version": 5} | ({} if format == "skyrl" else {"their_split": "eval"})  # tensors hold numbers
    write_with(format, tmp_path / "dump", lambda _: given, monkeypatch)
    map = {"their_version": "rollout_policy_version", "their_split": "split"}
    imported = import_dump(format, tmp_path / "dump", output=tmp_path / "run", map={name: map[name] for name in given})
    views = ("scores", "sequences") if format == "skyrl" else ("eval_scores", "eval_sequences")
    scores, sequences = (
        connect(tmp_path / "run").execute(query).fetchall()
        for query in (
            f"SELECT DISTINCT policy_version FROM {views[0]} WHERE \"pass\" = 'rollout'",
            f"SELECT count(*) FROM {views[1]}",
        )
    )
    assert (scores, sequences) == ([(5,)], [(imported.num_sequences,)])


@pytest.mark.parametrize("column", ["hidden", "forward"])
def test_what_no_column_can_hold_is_refused_with_the_columns(tmp_path, column):
    dumps.write_nemo_rl(tmp_path / "dump", dumps.make_steps(1))
    dumps.write_lines(tmp_path / "dump.jsonl", [{"step": 1, "idx": 1}])
    for format, path in (("nemo-rl", "dump"), ("parquet", "dump.jsonl")):
        with pytest.raises(ImportFailed) as caught:
            import_dump(format, tmp_path / path, output=tmp_path / "run", map={"idx": column})
        assert caught.value.message.startswith(f"'idx' cannot be mapped to '{column}'. ")
        assert "rollout_logprobs" in caught.value.message


def test_each_matched_pass_has_its_own_version(tmp_path):
    dumps.write_megatron(tmp_path / "dump", dumps.make_steps(1))
    change_documents(tmp_path / "dump", lambda record: record | {"weights": 3})
    for number, path in enumerate(sorted((tmp_path / "dump").rglob("*.json"))):
        path.write_text(path.read_text().replace('"weights": 3', f'"weights": {3 + number}'))
    import_dump("megatron-lm", tmp_path / "dump", output=tmp_path / "run", map={"weights": "rollout_policy_version"})
    query = 'SELECT DISTINCT "pass", policy_version FROM scores ORDER BY "pass"'
    found = connect(tmp_path / "run").execute(query).fetchall()
    assert [version for _, version in found] == [3, 4]
