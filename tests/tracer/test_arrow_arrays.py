"""Arrow arrays made of buffers, beside those that pyarrow makes of the same values."""

import sys
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from builders import run
from tim_trace.tracer.arrow_arrays import column_array, float_values, number_array, text_array

TIME = pa.timestamp("us", tz="UTC")

RECORDS = """
import sys
import numpy as np
from tim_trace import Recorder

with Recorder(sys.argv[1]) as recorder:
    for step in (1, 2):
        batch = recorder.add_sequences(
            step=step, prompt_ids=[[1], [2]], response_ids=np.array([[5, 6], [7, 8]]), response_mask=np.ones((2, 2), bool),
            reward=np.array([0.0, 1.0]), rewards={"a": [1, None]}, advantage=[0.5, -0.5], group_ids=["x", "y"],
            temperature=1.0, finish_reason=["stop", None], policy_version=3,
        )
        for name in ("rollout", "train"):
            recorder.add_scores(name, batch, logprobs=-np.ones((2, 2), np.float32), entropy=[[0.5, None], [0.5, 0.5]])
        recorder.add_metrics(step, {"loss": 0.5, "note": "text", "none": None})
    recorder.flush()
    assert "pyarrow" in sys.modules
    assert "pandas" not in sys.modules
"""


@pytest.mark.parametrize(
    ("values", "type"),
    [
        (["a", "", None, "\u00e9\u6f22", "x" * 300], pa.string()),
        (["a", "b"], pa.string()),
        ([], pa.string()),
        ([1, None, -(2**63), 2**63 - 1], pa.int64()),
        ([1, 2], pa.int32()),
        ([0.5, None, float("inf"), 1e300], pa.float64()),
        ([True, 0, 2.5], pa.float64()),
        ([None, None], pa.float32()),
        ([], pa.float64()),
        ([datetime(2026, 1, 2, 3, 4, 5, 678901, UTC), None, datetime(1969, 12, 31, 23, 59, 59, 1, UTC)], TIME),
    ],
)
def test_columns_are_those_that_pyarrow_makes(values, type):
    found = column_array(values, type)
    found.validate(full=True)
    assert found.equals(pa.array(values, type))


@pytest.mark.parametrize("type", [pa.bool_(), pa.int32(), pa.int64(), pa.float32(), pa.float64()], ids=str)
@pytest.mark.parametrize("number", [0, 1, 7, 8, 1000])
def test_numbers_are_those_that_pyarrow_makes(type, number):
    draw = np.random.default_rng(number)
    values_B, valid_B = draw.integers(0, 2, number), draw.random(number) < 0.7
    for valid in (None, valid_B):
        found = number_array(values_B, type, valid)
        found.validate(full=True)
        mask = None if valid is None else ~valid
        assert found.equals(pa.array(values_B.astype(type.to_pandas_dtype()), type, mask=mask))
    assert number_array(values_B[::-1], type).equals(pa.array(values_B[::-1].astype(type.to_pandas_dtype()), type))


def test_null_among_floats_is_nan():
    found = float_values(column_array([0.5, None, *[2.0] * 9], pa.float64()))
    assert found.tolist()[2:] == [2.0] * 9
    assert (found[0], np.isnan(found[1])) == (0.5, True)
    assert float_values(column_array([0.5, 1.5], pa.float64())).tolist() == [0.5, 1.5]


def test_nan_stays_a_value():
    assert number_array(np.array([np.nan, 1.0]), pa.float32()).null_count == 0


def test_half_of_a_surrogate_pair_is_refused():
    with pytest.raises(UnicodeEncodeError):
        text_array(["a", "\ud800"])


def test_recording_imports_no_pandas(tmp_path):
    # It takes up to a second of Python, which the training's threads would wait for.
    (tmp_path / "records.py").write_text(RECORDS)
    done = run(sys.executable, tmp_path / "records.py", tmp_path / "run")
    assert done.code == 0, done.stderr
