import math

import duckdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tim_trace.analysis.trace import quantiles as module
from tim_trace.analysis.trace.quantiles import ERROR, SHARES, Gathered, Histogram, merged, quantile_cont, quantiles

# What |d| of two float32 logprobs can be: 0, or from 2^-149 on.
sizes = st.one_of(st.just(0.0), st.floats(2.0**-149, 2.0**129), st.sampled_from([0.25, 0.5, 1.0, 2.0**-149]))


def draw_normal(draw, n):
    return np.abs(draw.normal(0, 0.02, n))


def draw_zeros(draw, n):
    return np.where(draw.random(n) < 0.97, 0.0, draw.exponential(1.0, n))


def draw_heavy(draw, n):
    return np.exp(draw.standard_cauchy(n).clip(-80, 80))


def draw_denormal(draw, n):
    return draw.integers(0, 50, n) * 2.0**-149


def draw_constant(draw, n):
    return np.full(n, 0.1)


def draw_two(draw, n):
    return np.where(draw.random(n) < 0.5, 1e-30, 1e30)


def draw_grid(draw, n):
    return draw.integers(0, 40, n) * 0.0078125  # bfloat16 logprobs around -1


DRAWN = (draw_normal, draw_zeros, draw_heavy, draw_denormal, draw_constant, draw_two, draw_grid)


def check(values, cuts, rtol):
    exact = np.quantile(values, SHARES)
    # Interpolation rounds a few times more.
    np.testing.assert_allclose(cuts, exact, rtol=rtol + 1e-14, atol=0)


@pytest.mark.parametrize("n", [1, 2, 7, 1000, 100_000])
@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_a_histogram_gives_quantiles_within_its_error(draw, n):
    values = draw(np.random.default_rng(n), n)
    histogram = Histogram.of(values)
    assert histogram.num_values == n
    check(values, histogram.cuts(), ERROR)
    check(values, histogram.cuts(values.max()), ERROR)
    assert max(histogram.cuts(values.max())) <= values.max()
    check(values, quantiles([values], histogram), 0)


def test_the_error_is_nearly_reached():
    # A value at the lower end of its bin lies furthest from the middle.
    (cut, *_) = Histogram.of(np.array([1.0])).cuts()
    assert cut == 1 + ERROR


@settings(max_examples=80, deadline=None)
@given(parts=st.lists(st.lists(sizes, max_size=40), min_size=1, max_size=4), order=st.randoms())
def test_histograms_of_parts_are_that_of_the_whole_in_any_order(parts, order):
    arrays = [np.array(part, np.float64) for part in parts]
    whole = np.concatenate(arrays)
    histogram = Histogram.of(whole)
    order.shuffle(arrays)
    found = merged(Histogram.of(array) for array in arrays)
    np.testing.assert_array_equal(found.bins_B, histogram.bins_B)
    np.testing.assert_array_equal(found.counts_B, histogram.counts_B)
    assert found.cuts() == histogram.cuts()
    gathered = Gathered(histogram)
    for array in arrays:
        gathered.add(array)
    assert gathered.cuts() == quantiles([whole], histogram)
    if len(whole):
        check(whole, histogram.cuts(), ERROR)
        check(whole, gathered.cuts(), 0)
    else:
        assert gathered.cuts() == histogram.cuts() == (None, None, None)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(values=st.lists(sizes, min_size=1, max_size=60))
def test_quantiles_of_a_step_have_the_digits_of_duckdb(values):
    array = np.array(values, np.float64)
    query = "SELECT quantile_cont(d, [0.5, 0.95, 0.99]) FROM (SELECT unnest(?::DOUBLE[]) AS d)"
    ((wanted,),) = duckdb.connect().execute(query, [values]).fetchall()
    assert list(quantiles([array], Histogram.of(array), quantile_cont)) == wanted


@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_blocks_and_ways_of_counting_change_no_histogram(draw, monkeypatch):
    values = draw(np.random.default_rng(1), 5000)
    wanted = Histogram.of(values)
    monkeypatch.setattr(module, "_DENSE_TOKENS", 10)
    dense = Histogram.of(values)
    monkeypatch.setattr(module, "_BLOCK_TOKENS", 700)
    blocks = Histogram.of(values)
    for found in (dense, blocks):
        np.testing.assert_array_equal(found.bins_B, wanted.bins_B)
        np.testing.assert_array_equal(found.counts_B, wanted.counts_B)


def test_equal_values_that_are_gathered_take_no_memory_each(monkeypatch):
    monkeypatch.setattr(module, "_GATHERED", 100)
    values = np.tile([0.0, 0.1, 0.1, 0.3], 500)
    gathered = Gathered(Histogram.of(values))
    for start in range(0, len(values), 50):
        gathered.add(values[start : start + 50])
    assert sum(len(found) for parts in gathered._parts.values() for found, _ in parts) < 200
    assert gathered.cuts() == quantiles([values], Histogram.of(values))


def test_bins_follow_the_order_of_values():
    values = np.sort(np.concatenate([draw(np.random.default_rng(3), 500) for draw in DRAWN]))
    bins = module.bins_of(values)
    assert (np.diff(bins) >= 0).all()
    assert module.bins_of(np.zeros(1)) == 0
    assert not math.isnan(float(bins.sum()))
