import duckdb
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tim_trace.analysis.trace.database import sql_file
from tim_trace.analysis.trace.quantiles import exact_quantiles

sizes = st.one_of(st.just(0.0), st.floats(1e-30, 1e30), st.sampled_from([0.25, 0.5, 1.0]))


@settings(max_examples=80, deadline=None)
@given(parts=st.lists(st.lists(sizes, max_size=40), min_size=1, max_size=4))
def test_quantiles_of_parts_are_those_of_the_whole(parts):
    connection = duckdb.connect()
    tables = []
    for index, part in enumerate(parts):
        connection.execute(f"CREATE TABLE part_{index} AS SELECT unnest(?::DOUBLE[]) AS d", [part])
        tables.append(f"part_{index}")

    def queries(name):
        text = sql_file(name).split("FROM pair_tokens")[0], sql_file(name).split(")\nWHERE", 1)[1]
        return [f"{text[0]} FROM {table} WHERE {text[1]}" for table in tables]

    total, cuts = exact_quantiles(connection, queries("histogram"), queries("bins"))
    values = np.array([value for part in parts for value in part])
    assert total == len(values)
    if not len(values):
        assert cuts == (None, None, None)
        return
    # Interpolation rounds once more or less.
    np.testing.assert_allclose(cuts, np.quantile(values, [0.5, 0.95, 0.99]), rtol=1e-12)
    wanted = connection.execute(
        "SELECT quantile_cont(d, [0.5, 0.95, 0.99]) FROM (SELECT unnest(?::DOUBLE[]) AS d)", [values.tolist()]
    )
    np.testing.assert_allclose(cuts, wanted.fetchone()[0], rtol=1e-12)
