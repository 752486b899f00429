import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tim_trace.schemas.errors import InvalidRecord
from tim_trace.tracer import ragged
from tim_trace.tracer.ragged import Padding, Ragged, cells_of, flatten

masks = st.integers(1, 5).flatmap(
    lambda rows: st.integers(1, 7).flatmap(
        lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=rows, max_size=rows)
    )
)


@given(masks, st.sampled_from(["torch", "numpy"]), st.booleans())
def test_flattening_gives_the_masked_cells_row_by_row(mask, kind, wide):
    mask = np.array(mask)
    cells = np.arange(mask.size, dtype=np.float32).reshape(mask.shape)
    padding = Padding.of(torch.from_numpy(mask) if kind == "torch" else mask)
    long, ragged._LONG = ragged._LONG, 0 if wide else 1000
    try:
        flat = flatten(torch.from_numpy(cells) if kind == "torch" else cells, np.float32, padding, "x")
    finally:
        ragged._LONG = long
    assert flat.values.tolist() == cells[mask].tolist()
    assert flat.lengths.tolist() == mask.sum(axis=1).tolist()


@given(masks, st.data())
def test_taking_rows_takes_their_cells(mask, data):
    mask = np.array(mask)
    rows = np.array(data.draw(st.permutations(range(len(mask)))))[: data.draw(st.integers(0, len(mask)))].astype(int)
    cells = np.arange(mask.size).reshape(mask.shape)
    flat = flatten(cells[rows], np.int64, Padding.of(mask).take(rows), "x")
    assert flat.values.tolist() == cells[rows][mask[rows]].tolist()


@given(st.lists(st.lists(st.none() | st.floats(width=32), max_size=4), max_size=6), st.data())
def test_taking_lists_takes_their_values(lists, data):
    rows = data.draw(st.permutations(range(len(lists))))[: data.draw(st.integers(0, len(lists)))]
    taken = flatten(lists, np.float32, None, "x").take(np.array(rows, int))
    expected = flatten([lists[row] for row in rows], np.float32, None, "x")
    assert taken.lengths.tolist() == expected.lengths.tolist()
    assert np.array_equal(taken.values, expected.values, equal_nan=True)
    assert taken.num_known == expected.num_known == sum(value is not None for row in rows for value in lists[row])


def test_a_flattened_batch_is_a_copy():
    cells = np.zeros((2, 3), np.float32)
    flat = flatten(cells, np.float32, None, "x")
    cells[:] = 1
    assert not flat.values.any()


def test_none_in_a_list_is_not_recorded_and_nan_is_a_value():
    flat = flatten([[1.0, None], [float("nan")]], np.float32, None, "x")
    assert flat.valid.tolist() == [True, False, True]
    assert np.isnan(flat.values[2])


def test_half_floats_widen_without_a_change():
    cells = torch.tensor([[-0.1, -3.7]], dtype=torch.bfloat16)
    assert flatten(cells, np.float32, None, "x").values.tolist() == cells.float()[0].tolist()


def test_lists_of_tensors_and_arrays_are_ragged():
    flat = flatten([torch.tensor([1, 2]), np.array([3]), [4, 5]], np.int32, None, "x")
    assert flat.values.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros(3), r"shape \(3,\); pass a batch \[B, T\]"),
        ([1, 2], r"here: row 0 is 1 \(int\)\. Pass B lists"),
        ([["a"]], r"here: row 0 is \['a'\] \(list\); token ids are whole numbers from 0 to 2147483647"),
        ([[1.0, [2]]], r"here: row 0 is \[1.0, \[2\]\] \(list\)"),
        (7, r"got 7 \(int\)"),
    ],
)
def test_what_is_no_batch_is_named(data, message):
    with pytest.raises(InvalidRecord, match=message):
        flatten(data, np.int32, None, "here")


def test_a_mask_of_another_shape_is_named():
    with pytest.raises(InvalidRecord, match=r"\(2, 4\).*mask has shape \(2, 3\)"):
        flatten(np.zeros((2, 4)), np.float32, Padding.of(np.ones((2, 3))), "x")


@given(
    st.lists(st.integers(0, 4), max_size=5).flatmap(
        lambda n: st.tuples(st.just(n), st.permutations(range(len(n))), st.integers(0, 5))
    )
)
def test_taking_every_row_is_taking_each(drawn):
    lengths, order, num = np.array(drawn[0], np.int64), np.array(drawn[1], np.int64), drawn[2]
    lists = Ragged(np.arange(lengths.sum(), dtype=np.float32), lengths, np.arange(lengths.sum()) % 2 == 0)
    for rows in (np.arange(len(lengths)), order, order[:num]):
        taken, cells = lists.take(rows), cells_of(rows, lengths)
        assert taken.lengths.tolist() == lengths[rows].tolist()
        assert taken.values.tolist() == lists.values[cells].tolist()
        assert taken.valid.tolist() == lists.valid[cells].tolist()


def row_forms():
    floats = [np.array([-0.5, -1.0], "f4"), np.array([], "f4"), np.array([-2.0], "f4")]
    ids = [np.array([1, 2]), np.array([3]), np.array([], np.int64)]
    return {
        "floats": (floats, np.float32), "ids": (ids, np.int32), "doubles": ([row.astype("f8") for row in floats], np.float32),
        "flags": ([row > 1 for row in ids], bool), "halves": ([row.astype("f2") for row in floats], np.float32),
        "float ids": ([row.astype("f4") for row in ids], np.int32),
    }  # fmt: skip


@pytest.mark.parametrize("form", list(row_forms()))
@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["arrays", "tensors"])
def test_rows_that_are_alike_are_read_as_each_is(form, make, monkeypatch):
    rows, dtype = row_forms()[form]
    given_rows = [make(row) for row in rows]
    if form == "halves" and make is torch.from_numpy:
        given_rows = [row.to(torch.bfloat16) for row in given_rows]
    fast = flatten(given_rows, dtype, None, "rows")
    monkeypatch.setattr(ragged, "_alike", lambda data, dtype: None)
    plain = flatten(given_rows, dtype, None, "rows")
    assert fast.values.dtype == plain.values.dtype == dtype
    assert fast.values.tolist() == plain.values.tolist()
    assert fast.lengths.tolist() == plain.lengths.tolist()
    assert fast.valid is None


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        ([np.array([1, -2])], np.int32), ([np.array([1.5])], np.int32), ([np.array([2**40])], np.int32),
        ([np.array([[1]])], np.int32), ([np.array(["a"])], np.float32), ([np.array([1e300])], np.float32),
        ([torch.tensor([1.0]).half()], np.int32), ([torch.tensor([1.0], dtype=torch.bfloat16)], np.int32),
        ([torch.tensor([1 + 1j])], np.float32), ([torch.tensor([300, -1])], np.int32),
        ([np.array([1]), np.array([0.5])], np.int32), ([torch.tensor(1)], np.int32),
    ],
)  # fmt: skip
def test_rows_that_are_alike_are_refused_as_each_is(rows, dtype, monkeypatch):
    with pytest.raises(InvalidRecord) as fast:
        flatten(rows, dtype, None, "rows")
    monkeypatch.setattr(ragged, "_alike", lambda data, dtype: None)
    with pytest.raises(InvalidRecord) as plain:
        flatten(rows, dtype, None, "rows")
    assert str(fast.value) == str(plain.value)


@pytest.mark.parametrize("width", [8, 2048])
def test_some_rows_of_padding_have_their_own_tokens_in_their_own_order(width):
    mask = np.zeros((4, width), bool)
    for row, (start, length) in enumerate([(0, 3), (width - 2, 2), (1, width - 1), (4, 0)]):
        mask[row, start : start + length] = True
    cells = np.arange(4 * width).reshape(4, width)
    for rows in ([2, 0], [3, 1], [1, 2, 0]):
        taken = Padding.of(mask).take(np.array(rows))
        assert taken.flatten(cells[rows]).tolist() == [cell for row in rows for cell in cells[row][mask[row]].tolist()]
