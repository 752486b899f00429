"""Each sign of this project's own alarm, on series worked by hand."""

import numpy as np
from tim_trace.analysis.alarms.figures import (
    gap_bends,
    logarithm,
    norm_jumps,
    rate_jumps,
    rewards_contradict,
    sustained,
    trailing_median,
)


def at(flags):
    """Places of the values that sound."""
    return np.flatnonzero(flags).tolist()


def test_a_gap_bends_at_its_third_step_above_the_level():
    gap = np.array([0.07, 0.07, 0.06, 0.07, 0.07, 0.07, 0.07, 0.05, 0.07])
    assert at(gap_bends(gap)) == [5, 6]
    assert at(gap_bends(np.array([0.07, 0.07]))) == []
    assert at(gap_bends(np.array([0.07, np.nan, 0.07, 0.07]))) == []


def test_rewards_contradict_above_a_twentieth():
    assert at(rewards_contradict(np.array([0.0, 0.05, 0.0501, np.nan, 1.0]))) == [2, 4]


def test_a_rate_jumps_above_three_times_what_it_ever_was():
    rate = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.1, 1.0, 1.0, 1.0])
    assert at(rate_jumps(rate)) == [6]
    assert at(rate_jumps(rate[:6] * np.array([1, 1, 1, 1, 9, 9.0]))) == [5]  # of a median, one spike is no part


def test_a_rate_that_comes_back_to_what_it_once_was_jumps_not():
    warm = np.array([4.0] * 5 + [1.0] * 6 + [4.0])
    assert at(rate_jumps(warm)) == []
    assert at(rate_jumps(warm[5:])) == [6]


def test_a_rate_has_no_past_before_its_sixth_step():
    assert at(rate_jumps(np.array([1.0, 1.0, 1.0, 1.0, 99.0]))) == []


def test_a_norm_jumps_at_its_third_step_above_four_times_the_median():
    norm = np.ones(32)
    norm[25:28] = 4.1
    assert at(norm_jumps(norm)) == [27]
    norm[26] = 4.0
    assert at(norm_jumps(norm)) == []


def test_the_past_of_a_norm_ends_five_steps_ago():
    norm = np.array([1.0] * 16 + [8.0] * 18)
    # At place 30 the window is places 5 to 24: 11 ones, median 1. At 31 it is ten of each, median sqrt(8), bound 11.3.
    assert at(norm_jumps(norm)) == [27, 28, 29, 30]


def test_a_norm_has_no_past_before_25_steps_are_over():
    norm = np.array([1.0] * 20 + [9.0] * 5)
    assert at(norm_jumps(norm)) == []
    assert at(norm_jumps(np.append(norm, [9.0, 9.0, 9.0]))) == [27]


def test_norms_that_are_no_number_are_no_past_and_no_jump():
    norm = np.ones(30)
    norm[:10], norm[12] = np.nan, np.inf
    norm[25:] = [5.0, 5.0, 5.0, np.nan, 5.0]
    assert at(norm_jumps(norm)) == [27]
    assert at(norm_jumps(np.where(np.arange(30) < 25, 0.0, 9.0))) == []  # of a norm of 0 nothing is a multiple


def test_sustained_is_true_from_the_last_of_a_row_on():
    assert sustained(np.array([True, True, False, True, True, True]), 2).tolist() == [
        False, True, False, False, True, True,
    ]  # fmt: skip
    assert sustained(np.array([True]), 2).tolist() == [False]
    assert sustained(np.zeros(0, bool), 1).tolist() == []


def test_a_trailing_median_leaves_out_the_value_itself_and_the_gap():
    values = np.array([5.0, 1.0, 3.0, 100.0, 7.0, 9.0])
    np.testing.assert_array_equal(trailing_median(values, 3), [np.nan, np.nan, np.nan, 3.0, 3.0, 7.0])
    np.testing.assert_array_equal(trailing_median(values, 3, 2), [np.nan] * 5 + [3.0])
    np.testing.assert_array_equal(trailing_median(np.array([np.inf, 2.0, np.nan, 0.0]), 2), [np.nan, np.nan, 2.0, 2.0])
    np.testing.assert_array_equal(trailing_median(np.array([np.nan, 1.0]), 1), [np.nan, np.nan])


def test_a_logarithm_of_nothing_is_none():
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(
            logarithm(np.array([1.0, np.e, 0.0, -1.0, np.nan])), [0.0, 1.0, np.nan, np.nan, np.nan]
        )
