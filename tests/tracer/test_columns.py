import numpy as np
import pyarrow as pa
import pytest
from tim_trace.tracer.importers.columns import Columns


@pytest.mark.parametrize("type", [pa.int32(), pa.float32()])
def test_some_rows_of_a_large_batch_do_not_keep_it_in_memory(type):
    """An Arrow file may be one batch, of which rows wait until they are sealed."""
    batch = pa.array([[1, 0, 1]] * 1000, pa.list_(type))
    part = Columns({"x": batch.slice(10, 4)}, 4).ragged("x")
    assert part.values.flags.owndata
    assert (part.values.tolist(), part.lengths.tolist()) == ([1, 0, 1] * 4, [3] * 4)
    whole = Columns({"x": batch}, 1000).ragged("x")
    assert np.array_equal(whole.values, [1, 0, 1] * 1000)
