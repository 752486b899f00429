"""Malformed input, drawn by chance: an error in one line, or what was given comes back; nothing between."""

import json
import math
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tim_trace.schemas.errors import ImportFailed, InvalidRecord
from tim_trace.tracer import staging
from tim_trace.tracer.importers.neutral import KNOWN, import_parquet
from tim_trace.tracer.recorder import Recorder

NUM_IMPORTS, NUM_CALLS = 50, 200
"""Cases of each form of file, and of host and of device tensors."""
NAN, INF = float("nan"), float("inf")

SCALARS = [
    None, 0, 1, -1, 3, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**70, -(2**63) - 1, 10**400, 0.0, 1.0, 0.5, 7.5, -2.5, 1e39,
    -1e300, NAN, INF, -INF, True, False, "", "a", "1", "0.5", "nan", "stop", "\ud800", "a\nb", "[1]", {"a": 1}, {}, [],
]  # fmt: skip
LISTS = [
    [1, 2, 3], [1, 2], [1, 2, 3, 4], [], [None, 1, 2], [None] * 3, [0.5, -0.5, -1.5], [-1.0, -2.0, NAN], [-1, -2, -3],
    [0, 1, 1], [True, False, True], [True, 1, 0], [0.0, 0.0, 0.0], [-9999.0, -1.0, -2.0], [1e39, 1.0, 1.0], ["a"] * 3,
    ["1", "2", "3"], [[1], [2], [3]], [1, "a", 3], [{}] * 3, [2**40, 1, 2], [7.5, 1.0, 2.0], [1.0, 2.0, 3.0], [-1, 2, 3],
    [-INF, -0.5, 0.0], [-(2**31), 0, 1], [0.1, 0.2, 0.3],
]  # fmt: skip
VALUES = [*SCALARS, *LISTS]

ROW = {
    "step": 3, "seq_id": "a", "group_id": "g", "prompt_ids": [1, 2], "response_ids": [3, 4, 5],
    "response_mask": [True, False, True], "rollout_logprobs": [-0.5, -0.25, -1.25], "train_logprobs": [-0.75, -0.5, -1.0],
    "current_logprobs": [-0.75, -0.5, -1.0], "reference_logprobs": [-0.25, -0.5, -1.0], "entropy": [0.5, 0.25, 1.0],
    "advantage": -0.5, "reward": 1.0, "temperature": 0.5, "top_p": 0.75, "top_k": 20, "policy_version": 2,
    "finish_reason": "stop", "min_p": 0.125, "repetition_penalty": 1.5, "max_tokens": 64, "top2_gap": [0.5, 0.25, 1.0],
    **{f"{name}_policy_version": 2 for name in ("train", "current", "reference")},
}  # fmt: skip
GIVEN = [name for name in KNOWN if name in ROW]
"""The columns of one number, or of one a token. `advantages` is `advantage` by token, the engine's version `policy_version`."""


def same(given, read, column=""):
    """Whether a value that was read says what was given."""
    if isinstance(given, (list, tuple)):
        if not isinstance(read, list) or len(given) != len(read):
            return False
        return all(same(one, other, column) for one, other in zip(given, read, strict=True))
    if given is None and column == "train_logprobs" and isinstance(read, list):
        return all(value is None for value in read)  # there is an entropy
    if read is None:
        return given is None or (column.endswith("_logprobs") and given in (0, -9999))  # placeholders
    if isinstance(read, bool):
        return given in (0, 1) or (column == "response_mask" and isinstance(given, (int, float)) and given > 1)
    if isinstance(read, str) or isinstance(given, str) or given is None:
        return str(given) == read
    if not isinstance(given, (int, float)) or math.isnan(given) or math.isnan(read):
        return isinstance(given, float) and math.isnan(given) and math.isnan(read)
    return given == read or (math.isfinite(given) and math.isfinite(read) and float(np.float32(given)) == read)


def told(error):
    """An error, when it is one line."""
    assert "\n" not in str(error).replace("'a\nb'", "")
    return str(error)


def write(folder, form, rows):
    """Write rows in one of the forms; None where that form cannot hold them."""
    path = folder / f"dump.{form}"
    if form == "parquet":
        try:
            pq.write_table(pa.Table.from_pylist(rows), path)
        except (pa.ArrowException, OverflowError, UnicodeError):
            return None
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_back(folder):
    """Row's name -> what the trace has of it, under the columns' names."""
    found = {row["seq_id"]: row for row in pq.read_table(folder / "sequences").to_pylist()}
    for row in found.values():
        row["advantage"] = row["advantage"] if row["advantages"] is None else row["advantages"]
        row |= dict.fromkeys([name for name in GIVEN if name not in row])
    scores = folder / "scores"
    for score in pq.read_table(scores).to_pylist() if scores.exists() else []:
        found[score["seq_id"]][f"{score['pass']}_logprobs"] = score["logprobs"]
        found[score["seq_id"]][f"{score['pass']}_policy_version"] = score["policy_version"]
        for name in ("entropy", "top2_gap"):
            if score[name] is not None:
                found[score["seq_id"]][name] = score[name]
    return found


ARRAYS_OF_ROW = {
    "train_topk_ids": [[5, 6]] * 3, "train_topk_logprobs": [[-0.5, -1.0]] * 3, "train_tail_logprob": [-2.0] * 3,
    "rollout_logits": [[0.5, 1.5]] * 3, "current_vocabulary_logprobs": [[-0.5, -1.5]] * 3,
    "train_expert_ids": [[[0, 1]]] * 5, "train_expert_weights": [[[0.5, 0.5]]] * 5,
}  # fmt: skip


def replaced(value, odd, depth):
    """A nested list with `odd` in place of its first element at that depth."""
    return odd if depth == 0 else [replaced(value[0], odd, depth - 1), *value[1:]]


def test_arrays_are_refused_in_one_sentence_or_come_back(tmp_path):
    path, refused = tmp_path / "rows.jsonl", []
    for name, value in ARRAYS_OF_ROW.items():
        depth = 1 + str(np.asarray(value).shape).count(", ")
        for number, odd in enumerate(
            [*SCALARS[:20:3], [1, "a", 3], True, "a", {}, [[]], [None] * 3, 2**40, NAN, [[1], [2], [3]]]
        ):
            row = ROW | ARRAYS_OF_ROW | {name: replaced(value, odd, number % (depth + 1))}
            path.write_text(json.dumps(ROW | ARRAYS_OF_ROW | {"seq_id": "b"}) + "\n" + json.dumps(row))
            try:
                import_parquet(path, output=tmp_path / "run", force=True)
            except ImportFailed as error:
                refused.append(str(error))
    assert len(refused) > 50
    assert all("rows.jsonl" in sentence and "\n" not in sentence for sentence in refused)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_an_import_says_what_is_wrong_or_brings_in_what_was_given(tmp_path, form):
    chance = random.Random(f"import {form}")
    outcomes, skipped = {"refused": 0, "came back": 0}, 0
    for case in range(NUM_IMPORTS):
        column, value = chance.choice(GIVEN), chance.choice(VALUES)
        rows = [ROW | {"seq_id": name} for name in "abc"]
        row = chance.randrange(3)
        if isinstance(rows[row][column], list) and chance.random() < 0.3:  # one element only
            value = [*rows[row][column][:-1], chance.choice(SCALARS)]
        rows[row][column] = value
        # A column of one kind comes through, and a mixed one shows whether the first or the last row decides.
        for other in range(3) if chance.random() < 0.4 and column != "seq_id" else ():
            rows[other][column] = value
        path = write(tmp_path, form, rows)
        if path is None:
            skipped += 1
            continue
        output = tmp_path / f"run{case}"
        try:
            import_parquet(path, output=output)
        except ImportFailed as error:
            outcomes["refused"] += told(error).startswith(str(path)) and not output.exists()
            continue
        given = pq.read_table(path).to_pylist() if form == "parquet" else rows
        found = read_back(output)
        assert len(found) == 3, (column, value)
        for row in given:
            read = found[str(row["seq_id"])]
            for name in GIVEN:
                pass_name = name.removesuffix("_policy_version")
                if pass_name != name and read[f"{pass_name}_logprobs"] is None:
                    continue  # a pass without logprobs has no version
                assert same(row[name], read[name], name), (name, row[name], read[name])
        outcomes["came back"] += 1
    assert sum(outcomes.values()) + skipped == NUM_IMPORTS
    assert min(outcomes.values()) > NUM_IMPORTS / 10, outcomes


def shaped(chance, value):
    """A value in one of the forms in which Python hands it over."""
    kinds = [lambda: value, lambda: tuple(value) if isinstance(value, list) else value]
    kinds += [lambda: np.array(value), lambda: torch.tensor(value), lambda: np.array(value, dtype=object)]
    try:
        return chance.choice(kinds)()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return value


def plain(value):
    """What was given, as lists of numbers."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return plain(value.tolist())
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def per_row(value, rows):
    value = plain(value)
    return value if isinstance(value, list) else [value] * rows


BATCH = {
    "step": 0, "response_ids": [[3, 4, 5], [6, 7, 8]], "prompt_ids": [[1], [2, 3]], "seq_ids": ["a", "b"],
    "group_ids": ["g", "h"], "response_mask": [[True, False, True], [True, True, True]], "reward": [0.5, 1.0],
    "advantage": [0.5, -0.5], "temperature": 0.5, "top_p": [0.75, 0.5], "top_k": 20, "min_p": 0.0, "max_tokens": [8, 9],
    "repetition_penalty": 1.0, "policy_version": 3, "finish_reason": ["stop", "length"],
}  # fmt: skip
COLUMNS = {"group_ids": "group_id"}
SCORES = {
    "logprobs": [[-0.5, -1.0, -2.0], [-0.25, -0.5, -0.75]], "entropy": [[0.5] * 3] * 2, "top2_gap": [[1.0] * 3] * 2,
    "policy_version": 2,
}  # fmt: skip
PER_TOKEN = ("response_ids", "prompt_ids", "response_mask", "logprobs", "entropy", "top2_gap")


def drawn(chance, given, name):
    """The arguments with one of them changed: as a whole, in one row, or in one element."""
    value, kind = given[name], chance.random()
    if name in PER_TOKEN and kind < 0.7:
        rows = [list(row) for row in value]
        if kind < 0.35:
            rows[chance.randrange(2)] = chance.choice(VALUES)
        else:
            rows[chance.randrange(2)][0] = chance.choice(SCALARS)
        value = rows
    elif isinstance(value, list) and kind < 0.6:
        value = [*value[:-1], chance.choice(VALUES)]
    else:
        value = chance.choice([*VALUES, [chance.choice(SCALARS)] * 2, [chance.choice(LISTS)] * 2])
        if name == "step" and isinstance(value, int) and value > given["step"]:
            value = -value  # a step that far ahead would be the last
    return given | {name: shaped(chance, value)}


def accepted(recorder, call):
    """Whether a call is taken, at once or after the writing thread has looked; a refusal is one line."""
    try:
        call()
        recorder.flush()
        recorder.writer.raise_invalid()
    except InvalidRecord as error:
        return not told(error)
    return True


@pytest.mark.filterwarnings("ignore::tim_trace.schemas.errors.TimTraceWarning")
@pytest.mark.parametrize("device", [False, True])
def test_a_recorder_says_what_is_wrong_or_records_what_was_given(tmp_path, monkeypatch, device):
    if device:  # host tensors take the way of device tensors: the writing thread checks them
        monkeypatch.setattr(staging, "on_device", staging.is_tensor)
    chance = random.Random(f"recorder {device}")
    sequences, scores, metrics = {}, {}, {}
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, NUM_CALLS + 1):
            name = chance.choice(list(BATCH))
            given = drawn(chance, BATCH | {"step": step}, name)
            if accepted(recorder, lambda given=given: recorder.add_sequences(**given)):
                sequences[plain(given["step"])] = given
                continue
            batch = recorder.add_sequences(**BATCH | {"step": step})
            sequences[step] = BATCH | {"step": step}
            given = drawn(chance, SCORES, chance.choice(list(SCORES)))
            if accepted(recorder, lambda given=given, batch=batch: recorder.add_scores("train", batch, **given)):
                scores[step] = given
            else:
                recorder.add_scores("train", batch, **SCORES)
                scores[step] = SCORES
            values = {"value": shaped(chance, chance.choice(VALUES)), "other": 0.5}
            if accepted(recorder, lambda values=values, step=step: recorder.add_metrics(step, values)):
                metrics[step] = values
    assert recorder.writer.state.state == "closed", recorder.writer.state.error
    assert len(sequences) - len(scores) > NUM_CALLS / 6  # sequences that came back though one argument was drawn
    assert NUM_CALLS / 10 < len(metrics) < len(scores)

    def rows_of(table):
        found = {}
        for row in pq.read_table(tmp_path / "run" / table).to_pylist():
            found.setdefault(row["step"], []).append(row)
        return found

    found = rows_of("sequences")
    assert set(found) == set(sequences)
    for step, given in sequences.items():
        for name in set(BATCH) - {"step", "seq_ids", "advantage"}:
            read = [row[COLUMNS.get(name, name)] for row in found[step]]
            assert same(per_row(given[name], 2), read, name), (name, given[name], read)
        read = [row["advantages"] if row["advantage"] is None else row["advantage"] for row in found[step]]
        assert same(per_row(given["advantage"], 2), read), (given["advantage"], read)
        names = given["seq_ids"]
        assert names is None or same([str(item) for item in plain(names)], [row["seq_id"] for row in found[step]])
    found = rows_of("scores")
    assert set(found) == set(scores)
    for step, given in scores.items():
        for name in SCORES:
            read = [row[name] for row in found[step]]
            assert same(per_row(given[name], 2), read, name), (name, given[name], read)
    found = rows_of("metrics")
    assert set(found) == set(metrics)
    for step, values in metrics.items():
        read = {row["name"]: row["value"] if row["text"] is None else row["text"] for row in found[step]}
        value = plain(values["value"])
        while isinstance(value, list):
            (value,) = value
        assert same(value, read["value"]), (values, read)
        assert read["other"] == 0.5
