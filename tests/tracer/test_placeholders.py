"""Lists of zeros: a policy that is certain, or logprobs that nobody wrote."""

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import tim_trace
from hypothesis import given, settings
from hypothesis import strategies as st
from tim_trace.tracer.importers import columns
from tim_trace.tracer.importers.neutral import import_parquet
from tim_trace.tracer.importers.placeholders import CERTAIN_NATS, PassRows, ZeroLists, num_certain
from tim_trace.tracer.ragged import flatten

REAL = [-1.0, -0.5, -2.0]
ZEROS = [0.0, 0.0, 0.0]
NEAR = [-(2.0**-23), 0.0, -0.125]
NONE = [None, None, None]


def imported(tmp_path, rows, *, masks=None, name="run"):
    """Import rows of pass -> logprobs; gives what came of it, and pass -> [logprobs of each row]."""
    columns = [
        {
            "step": 1,
            "prompt_ids": [1],
            "response_ids": [7] * len(next(iter(row.values()))),
            **({} if masks is None else {"response_mask": masks[number]}),
            **{f"{pass_name}_logprobs": values for pass_name, values in row.items()},
        }
        for number, row in enumerate(rows)
    ]
    path = tmp_path / f"{name}.parquet"
    pq.write_table(pa.Table.from_pylist(columns), path)
    result = import_parquet(path, output=tmp_path / name)
    scores = pq.read_table(tmp_path / name / "scores")
    found = {}
    for pass_name, seq_id, values in zip(*(scores[c].to_pylist() for c in ("pass", "seq_id", "logprobs")), strict=True):
        found.setdefault(pass_name, {})[int(seq_id)] = values
    return result, {pass_name: [found[pass_name][row] for row in range(len(rows))] for pass_name in found}


def test_zeros_on_both_sides_are_a_certain_policy(tmp_path):
    rows = [{"rollout": ZEROS, "train": ZEROS}, {"rollout": REAL, "train": REAL}]
    result, found = imported(tmp_path, rows)
    assert found == {"rollout": [ZEROS, REAL], "train": [ZEROS, REAL]}
    assert (result.placeholders.total, result.placeholders.certain) == (0, 6)


def test_zeros_on_both_sides_of_a_whole_import_are_a_certain_policy(tmp_path):
    result, found = imported(tmp_path, [{"rollout": ZEROS, "train": ZEROS}] * 3)
    assert found == {"rollout": [ZEROS] * 3, "train": [ZEROS] * 3}
    assert (result.placeholders.total, result.placeholders.certain) == (0, 18)


@pytest.mark.parametrize("side", ["rollout", "train"])
def test_zeros_on_one_side_are_placeholders(tmp_path, side):
    other = "train" if side == "rollout" else "rollout"
    result, found = imported(tmp_path, [{side: ZEROS, other: REAL}, {side: REAL, other: REAL}])
    assert found == {side: [NONE, REAL], other: [REAL, REAL]}
    assert (result.placeholders.all_zero, result.placeholders.certain) == (3, 0)


@pytest.mark.parametrize(
    ("other", "kept"),
    [
        (NEAR, True),
        ([-CERTAIN_NATS, 0.0, 0.0], True),
        ([float(np.nextafter(np.float32(-CERTAIN_NATS), np.float32(-1))), 0.0, 0.0], False),
        ([0.9, 0.8, 0.9], False),  # probabilities
        ([float("nan"), 0.0, 0.0], False),
        ([float("-inf"), 0.0, 0.0], False),
        ([None, None, None], False),
        ([None, -1e-7, None], True),
        ([-9999.0, -1e-7, None], True),
        ([-9999.0, -9999.0, -9999.0], False),
    ],
)
def test_the_other_side_decides_within_what_rounding_to_bfloat16_makes(tmp_path, other, kept):
    _, found = imported(tmp_path, [{"rollout": ZEROS, "train": other}, {"rollout": REAL, "train": REAL}])
    assert found["rollout"] == [ZEROS if kept else NONE, REAL]


def test_one_pass_alone_has_no_witness(tmp_path):
    result, found = imported(tmp_path, [{"rollout": ZEROS}, {"rollout": REAL}])
    assert found == {"rollout": [NONE, REAL]}
    assert result.placeholders.all_zero == 3


def test_the_reference_is_no_witness_of_the_policy_but_the_policy_is_one_of_the_reference(tmp_path):
    rows = [
        {"rollout": ZEROS, "train": ZEROS, "reference": REAL},
        {"rollout": REAL, "train": REAL, "reference": ZEROS},
        {"rollout": REAL, "train": REAL, "reference": REAL},
    ]
    _, found = imported(tmp_path, rows)
    assert found == {
        "rollout": [ZEROS, REAL, REAL],
        "train": [ZEROS, REAL, REAL],
        "reference": [REAL, NONE, REAL],
    }


def test_one_pass_of_the_policy_with_other_values_makes_placeholders_of_the_rest(tmp_path):
    rows = [{"rollout": ZEROS, "train": ZEROS, "current": REAL}, {"rollout": REAL, "train": REAL, "current": REAL}]
    _, found = imported(tmp_path, rows)
    assert found == {"rollout": [NONE, REAL], "train": [NONE, REAL], "current": [REAL, REAL]}


def test_a_pass_that_was_never_filled_is_null_even_where_the_other_is_certain(tmp_path):
    """As `prev_logprobs` of a run that skips them: the certain sequences would be all that is left to compare."""
    rows = [
        {"rollout": NEAR, "train": ZEROS},
        {"rollout": [-(2.0**-26)], "train": [0.0]},
        {"rollout": REAL, "train": ZEROS},
    ]
    result, found = imported(tmp_path, rows)
    assert found == {"rollout": [NEAR, [-(2.0**-26)], REAL], "train": [NONE, [None], NONE]}
    assert (result.placeholders.all_zero, result.placeholders.certain) == (7, 0)


def test_a_single_zero_is_kept_of_a_pass_that_has_other_values(tmp_path):
    _, found = imported(tmp_path, [{"rollout": [0.0], "train": [-0.75]}, {"rollout": REAL, "train": REAL}])
    assert found["rollout"] == [[0.0], REAL]


def test_zeros_outside_of_the_mask_are_placeholders_on_both_sides(tmp_path):
    result, found = imported(
        tmp_path,
        [{"rollout": ZEROS, "train": ZEROS}, {"rollout": REAL, "train": REAL}],
        masks=[[True, False, True], [True, True, True]],
    )
    assert found["rollout"] == [[0.0, None, 0.0], REAL]
    assert (result.placeholders.masked_zeros, result.placeholders.certain) == (2, 4)


def test_what_becomes_of_zeros_does_not_hang_on_the_order_or_the_batches_of_rows(tmp_path, monkeypatch):
    rows = [
        {"rollout": ZEROS, "train": NEAR},
        {"rollout": ZEROS, "train": REAL},
        {"rollout": REAL, "train": REAL},
        {"rollout": [0.0], "train": [-0.5]},
    ]
    expected = {0: ZEROS, 1: NONE, 2: REAL, 3: [0.0]}
    for number, order in enumerate(itertools.permutations(range(4))):
        for module in ("textfiles", "columns"):
            monkeypatch.setattr(f"tim_trace.tracer.importers.{module}.ROWS_AT_ONCE", 1 + number % 4)
        _, found = imported(tmp_path, [rows[row] for row in order], name=f"run{number}")
        assert found["rollout"] == [expected[row] for row in order]
    assert columns.ROWS_AT_ONCE == 4


LISTS = st.lists(st.lists(st.sampled_from([0.0, -1.0, -0.125, float("nan"), None]), max_size=3), min_size=1, max_size=4)


@given(LISTS, st.sampled_from([0.0, -1.0]))
@settings(deadline=None)
def test_verdicts_are_those_that_are_reached_when_every_list_is_judged(rollout, other):
    train = [[other if value == 0.0 else value for value in row] for row in rollout]
    given = {name: flatten(rows, np.float32, None, name) for name, rows in {"rollout": rollout, "train": train}.items()}
    passes = {name: PassRows(np.arange(len(rollout)), ragged) for name, ragged in given.items()}
    lists, lengths = ZeroLists(), given["rollout"].lengths
    found = lists.verdicts(passes, lengths)
    zeros = {name: np.array([is_zeros(row) for row in rows]) for name, rows in [("rollout", rollout), ("train", train)]}
    judged = lists._judged(passes, lengths, zeros)
    assert {name: part.tolist() for name, part in found.items()} == {
        name: part.tolist() for name, part in judged.items()
    }
    counts = [sum(value is not None for value in row) for row in rollout if is_zeros(row)]
    assert num_certain(given["rollout"]) == sum(count for count in counts if count >= 2)


def is_zeros(row):
    known = [value for value in row if value is not None]
    return bool(known) and all(value == 0.0 for value in known)


def test_counts_are_printed(tmp_path):
    rows = [{"rollout": ZEROS, "train": ZEROS}, {"rollout": ZEROS, "train": REAL}, {"rollout": REAL, "train": REAL}]
    imported(tmp_path, rows)
    done = tim_trace("import", "parquet", tmp_path / "run.parquet", "-o", tmp_path / "shell")
    assert "3 placeholders became NULL (0 values of -9999, 0 zeros outside the mask, 3 in all-zero" in done.stderr
    assert "6 logprobs of 0 were kept, because another pass also gives these tokens probability 1" in done.stderr
