import datetime
import decimal
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tim_trace.tracer.importers import kinds
from tim_trace.tracer.importers.kinds import WrongValues, first_wrong
from tim_trace.tracer.importers.neutral import KINDS

ALL = {**KINDS, "metric": kinds.SCORE, "flag": kinds.FLAGS}

SCALARS = [
    (pa.int8(), st.integers(-128, 127)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 5) | st.integers(2**31 - 2, 2**31 + 2)),
    (pa.uint64(), st.integers(0, 2**64 - 1) | st.integers(0, 1)),
    (pa.float16(), st.sampled_from([0.0, 1.0, 0.5, -2.0, math.nan]).map(np.float16)),
    (pa.float32(), st.floats(width=32) | st.sampled_from([0.0, 1.0, 7.0, 2.0**31])),
    (pa.float64(), st.floats() | st.sampled_from([0.0, 1.0, 7.0, 7.5, 1e39, -1e39, 2.0**53, 2.0**63, 3.4028235e38])),
    (pa.decimal128(20, 2), st.sampled_from(["0", "1", "7", "7.5", "-1", "99999999999"]).map(decimal.Decimal)),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.sampled_from(["", "a", "1", "7.0", "nan"])),
    (pa.large_string(), st.sampled_from(["a", "1"])),
    (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["a", "1"])),
    (pa.binary(), st.sampled_from([b"", b"1"])),
    (pa.timestamp("us"), st.just(datetime.datetime(2026, 1, 1))),
    (pa.struct([("a", pa.int64())]), st.just({"a": 1})),
    (pa.null(), st.none()),
]


def lists(type, values):
    for make in (pa.list_, pa.large_list, lambda inner: pa.list_(inner, 2)):
        size = 2 if make is not pa.list_ and make is not pa.large_list else None
        yield make(type), st.lists(st.none() | values, min_size=size or 0, max_size=size or 3)


TYPES = [
    *SCALARS,
    *(found for type, values in SCALARS if not pa.types.is_dictionary(type) for found in lists(type, values)),
    (pa.list_(pa.list_(pa.int64())), st.just([[1]])),
]


def equal(one, other):
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other or (one != one and other != other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_a_column_is_taken_when_each_value_is_and_comes_out_as_they_are(name, data):
    kind = ALL[name]
    type, values = data.draw(st.sampled_from(TYPES))
    given = data.draw(st.lists(st.none() | values, min_size=1, max_size=4))
    try:
        array = pa.array(given, type)
    except pa.ArrowException:  # a decimal or a dictionary that Arrow itself does not build from these
        return
    held = array.to_pylist()
    fits = first_wrong(held, kind) is None
    try:
        found = kind.column(array)
    except (WrongValues, pa.ArrowException):
        assert not fits, (type, held)
        return
    assert fits, (type, held)
    expected = [kind.one(value)[0].as_py() for value in held]
    assert equal(found.to_pylist(), expected)
