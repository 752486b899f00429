import numpy as np
import pytest
from tim_trace.analysis.statistics.intervals import f_quantile
from tim_trace.analysis.statistics.location import break_between, break_interval


def test_f_s_quantiles():
    # The printed tables' figures; chi-square's 2.71 is the limit of many degrees of freedom.
    for freedom, quantile in ((1, 39.86), (2, 8.53), (6, 3.78), (30, 2.88), (100_000, 2.71)):
        assert f_quantile(0.90, 1, freedom) == pytest.approx(quantile, abs=5e-3)


def test_a_break_of_few_values_is_open_as_far_as_f_says():
    # Nine values leave six degrees of freedom: the index before the best one costs 1.628 times as much, which
    # F (1 + 3.78 / 6) holds and chi-square (1 + 2.71 / 6) does not.
    values = np.array([0.8, 0.79, 0.79, 0.48, 0.44, 0.17, 0.21, 0.19, 0.24])
    assert break_between(values, values[:3].mean(), values[-3:].mean()) == (1, 2, 2)


def test_a_break_without_noise_is_where_it_is():
    values = np.r_[np.full(9, 0.6), 0.35, np.full(8, 0.1)]
    assert break_between(values, 0.6, 0.1) == (8, 8, 8)
    assert break_interval(values, 0.0) == (8, 8)
