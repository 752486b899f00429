import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tim_trace.schemas.errors import ImportFailed
from tim_trace.tracer.importers.fields import Fields
from tim_trace.tracer.importers.pickles import Budget

NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(width=64) | st.booleans()


def values(items):
    return Fields({"x": items}, {"x": ("x",)}, "here", set(), Budget("here", 0)).values("x")


@given(st.lists(NUMBERS, max_size=12) | st.lists(st.integers(-(2**63), 2**63 - 1)) | st.lists(st.floats()))
@settings(deadline=None)
def test_a_list_of_numbers_becomes_what_numpy_makes_of_it(items):
    found = values(items)
    expected = np.array(items, np.float64 if float in map(type, items) else np.int64)
    assert found.values.dtype == expected.dtype
    assert np.array_equal(found.values, expected, equal_nan=True)
    assert found.known.all()
    assert len(found.known) == len(items)


@given(st.lists(st.none() | st.floats(width=32, allow_nan=False), min_size=1, max_size=12))
@settings(deadline=None)
def test_none_in_a_list_is_not_known(items):
    found = values(items)
    assert [value if known else None for value, known in zip(*found, strict=True)] == items


@pytest.mark.parametrize("items", [["1"], [1, "1"], [1.0, "1"], [[1]], [1, 2**64], [1.0, 10**400], [{}]])
def test_a_list_of_anything_else_is_refused(items):
    with pytest.raises(ImportFailed, match="expected a list of numbers"):
        values(items)
