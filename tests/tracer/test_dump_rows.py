import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tim_trace.tracer.importers.dump_rows import DumpRows, list_column, padded_columns
from tim_trace.tracer.ragged import Padding

ROWS = st.lists(
    st.lists(st.tuples(st.sampled_from([0.5, -1.0, float("nan")]), st.booleans()), max_size=4), min_size=1, max_size=5
)


@given(ROWS, st.booleans(), st.booleans())
@settings(deadline=None)
def test_rows_of_a_padded_batch_become_the_columns_that_they_become_one_by_one(rows, masked, alike):
    values = [np.array([0.5 if alike else value for value, _ in row], np.float32) for row in rows]
    masks = [np.array([counts for _, counts in row], bool) for row in rows]
    gathered = DumpRows("file")
    for number, (value, mask) in enumerate(zip(values, masks, strict=True), start=1):
        gathered.add(number, advantage=value, entropy=value, response_mask=mask if masked else None)
    expected = gathered.batch().columns
    lengths = np.array([len(row) for row in rows])
    assert str(list_column(np.concatenate(values), lengths).to_pylist()) == str(expected["entropy"].to_pylist())
    padded = {"advantage": values, "response_mask": masks} if masked else {"advantage": values}
    padded = {name: np.stack([np.pad(row, (0, 4 - len(row))) for row in each]) for name, each in padded.items()}
    responded = Padding.of(np.arange(4) < lengths[:, None])
    found = padded_columns(1, None, responded, np.zeros((len(rows), 4), np.int32), responded, padded)["advantage"]
    wanted = expected.get("advantage", [None] * len(rows))
    assert str(found if isinstance(found, list) else found.to_pylist()) == str(
        wanted if isinstance(wanted, list) else wanted.to_pylist()
    )
