"""Intervals over groups: that they hold the truth, what is resampled, and where there is none."""

import importlib.util
import math
import sys

import numpy as np
import pytest
from builders import ROOT, run
from tim_trace.analysis.gate.measured import resampled
from tim_trace.analysis.statistics.intervals import (
    MIN_GROUPS,
    MOST_UNITS,
    PARTS,
    NoInterval,
    bootstrap,
    jackknife,
    largest_interval,
    numbered,
    parts_of,
    ratio_interval,
    student_quantile,
)  # fmt: skip
from tim_trace.analysis.statistics.moments import centred, co_moment, off_median
from tim_trace.analysis.triangulate import GAP, share_of_gap


def mean_interval(values):
    return ratio_interval(values, np.ones(len(values)), np.arange(len(values)), 0.95)


@pytest.fixture(scope="module")
def coverage():
    """The benchmark's module."""
    spec = importlib.util.spec_from_file_location("coverage_benchmark", ROOT / "benchmarks" / "coverage.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def mean_of(values, groups, confidence=0.95, **options):
    columns = {"value": np.asarray(values, float), "one": np.ones(len(values))}
    return bootstrap({"mean": lambda t: t["value"] / t["one"]}, columns, groups, confidence, **options)["mean"]


@pytest.mark.slow
def test_intervals_hold_the_truth_where_prompts_differ(coverage):
    # The smaller part of benchmarks/coverage.py: 12 prompts of 8 sequences that have most of their error in common.
    alone, cell = (
        coverage.Cell(num_sequences=number, group_size=size, correlation=correlation, tails="normal")
        for number, size, correlation in ((20_000, 1, 0.0), (96, 8, 0.8))
    )
    truth = coverage.Numbers(coverage.draw_run(np.random.default_rng(1), alone)).values()
    counts = coverage.measure(cell, truth, 60, 7)
    held = {key: count.coverage for key, count in counts.items() if count.held + count.missed > 45}
    assert len(held) > 45
    # 60 runs at 95 % hold it in 51 or more with a probability of 0.999.
    assert {key: share for key, share in held.items() if share < 51 / 60} == {}
    assert np.mean(list(held.values())) > 0.93


def test_sequence_weights_have_no_interval_where_groups_differ_in_scale(coverage):
    # Intervals there held the truth in a third of the runs, because the run rarely has the sequences that determine it.
    names = {"ess_sequence": 0.0, "chi2_sequence": 0.0, "chi2_token": 0.0}
    for tails, printed in (("normal", {*names}), ("scales", {"chi2_token"})):
        cell = coverage.Cell(num_sequences=128, group_size=1, correlation=0.0, tails=tails)
        for number in range(10):
            columns = coverage.Numbers(coverage.draw_run(np.random.default_rng(number), cell)).columns
            found = resampled(columns, names, 0.95)
            assert {each.metric for each in found if isinstance(each.interval, tuple)} == printed
            assert {each.interval for each in found if each.metric not in printed} <= {NoInterval.UNSEEN}


def test_sequences_as_groups_of_their_own_would_not_hold_it():
    # What was resampled once: the same runs and the same interval, with sequences of a prompt taken apart.
    held = {"prompts": 0, "sequences": 0}
    for number in range(200):
        draw = np.random.default_rng(number)
        scale = np.repeat(np.exp(0.7 * draw.normal(size=(2, 16))), 16, axis=1)[:, :, None]
        errors = scale * draw.normal(size=(2, 256, 8))
        trainer, engine = errors.reshape(2, -1)
        units = {"prompts": np.repeat(np.arange(16), 16 * 8), "sequences": np.repeat(np.arange(256), 8)}
        for name, groups in units.items():
            parts = {"train": trainer * (trainer - engine), GAP: (trainer - engine) ** 2}
            columns = {part: np.bincount(groups, values) for part, values in parts.items()}
            _, (low, high) = share_of_gap(columns, "train")
            # Both sides are alike: each carries half.
            held[name] += low <= 0.5 <= high
    assert held["prompts"] >= 180
    assert held["sequences"] < 120


@pytest.mark.parametrize("num_groups", [MIN_GROUPS, 12, 40])
def test_means_of_skewed_values_are_covered(num_groups):
    # exp(N(0, 1)): a percentile bootstrap of 8 holds the truth in three quarters of the runs.
    held = 0
    for number in range(300):
        values = np.random.default_rng(number).lognormal(0.0, 1.0, num_groups)
        low, high = mean_interval(values)
        held += low <= math.exp(0.5) <= high
    assert held >= 0.9 * 300


def test_no_end_is_nearer_than_student_s():
    for number in range(20):
        values = np.random.default_rng(number).normal(5, 1, 10)
        low, high = mean_interval(values)
        reach = 2.262 * values.std(ddof=1) / math.sqrt(10)
        assert low <= values.mean() - 0.999 * reach
        assert high >= values.mean() + 0.999 * reach
        assert high - low < 4 * reach


def test_many_groups_give_the_normal_interval():
    values = np.random.default_rng(0).normal(0, 1, 20 * MOST_UNITS)
    low, high = mean_interval(values)
    error = values.std() / math.sqrt(len(values))
    assert [low, high] == pytest.approx([values.mean() - 1.96 * error, values.mean() + 1.96 * error], abs=0.25 * error)


def test_what_is_resampled_is_a_group():
    draw = np.random.default_rng(3)
    values = draw.normal(1, 1, 30)
    once = mean_of(values, np.arange(30))
    # Copies of a sequence add nothing, wherever they lie, and a name of a group is but a name.
    groups = np.tile(np.arange(30), 5)
    assert mean_of(np.tile(values, 5), groups) == pytest.approx(once)
    assert mean_of(np.tile(values, 5), 1000 - 7 * groups) == pytest.approx(once)
    apart = mean_of(np.tile(values, 5), np.arange(150))
    assert apart[1] - apart[0] < 0.5 * (once[1] - once[0])


def test_an_interval_is_the_same_twice_and_wider_with_more_confidence():
    values = np.random.default_rng(4).exponential(1, 40)
    found = {share: mean_of(values, np.arange(40), share) for share in (0.5, 0.9, 0.95, 0.99)}
    assert mean_of(values, np.arange(40), 0.9) == found[0.9]
    lows, highs = zip(*found.values(), strict=True)
    assert list(lows) == sorted(lows, reverse=True)
    assert list(highs) == sorted(highs)


def test_a_ratio_s_error_is_that_of_its_linearisation():
    # Cochran 1977, ch. 6: n / (n - 1) sum (y - R x)^2 / (sum x)^2; with many groups the ends lie 1.96 of it away.
    draw = np.random.default_rng(5)
    x = draw.uniform(1, 3, 250)
    y = 0.4 * x + draw.normal(0, 0.1, 250)
    found = bootstrap({"r": lambda t: t["y"] / t["x"]}, {"x": x, "y": y}, np.arange(250), 0.95)["r"]
    ratio = y.sum() / x.sum()
    error = math.sqrt(250 / 249 * ((y - ratio * x) ** 2).sum()) / x.sum()
    assert found == pytest.approx((ratio - 1.97 * error, ratio + 1.97 * error), abs=0.2 * error)


def test_where_there_is_no_interval_it_is_said_why():
    eight = np.arange(8)
    assert mean_of(np.arange(7.0), np.arange(7)) is NoInterval.FEW
    assert mean_of(np.full(8, 0.1), eight) is NoInterval.ALIKE
    assert mean_of([np.inf] + [1.0] * 7, eight) is NoInterval.UNDEFINED
    # One group in eight carries all: without it, in a third of the resamples, there is no spread to measure by.
    assert mean_of([1.0] + [0.0] * 7, eight) is NoInterval.CARRIED
    low, high = mean_of([1.0] + [0.0] * 7, eight, open_ended=True)
    assert (low < 0.125, high) == (True, math.inf)
    only_one = {"a": np.array([1.0] + [0.0] * 7), "b": np.array([2.0] + [0.0] * 7)}
    found = bootstrap(
        {"r": lambda t: t["a"] / t["b"], "c": lambda t: t["fixed"]}, only_one, eight, 0.95, constants={"fixed": 3.0}
    )
    assert found == {"r": NoInterval.UNDEFINED, "c": NoInterval.ALIKE}


def test_the_jackknife_leaves_out_parts_of_whole_groups():
    groups = np.repeat(np.arange(50), 3)
    part_N = parts_of(groups)
    assert sorted(set(part_N)) == list(range(PARTS))
    for part in range(PARTS):
        left, counts = np.unique(groups[part_N == part], return_counts=True)
        assert len(left) in (2, 3)
        assert set(counts) == {3}
    low, high = jackknife(74.5, np.array([np.arange(150.0)[part_N != part].mean() for part in range(PARTS)]), 0.95)
    assert low < 74.5 < high
    assert sorted(parts_of(np.arange(9))) == list(range(9))


def test_the_jackknife_of_a_mean_of_few_groups_is_the_interval_of_that_mean():
    values = np.random.default_rng(6).exponential(1, PARTS)
    found = jackknife(values.mean(), np.array([np.delete(values, place).mean() for place in range(PARTS)]), 0.95)
    low, high = mean_interval(values)
    assert found == pytest.approx((low, high), abs=1e-9)


def test_the_jackknife_knows_what_it_cannot_do():
    values = np.random.default_rng(7).normal(size=20)

    def found(statistic, value=None):
        without = np.array([statistic(np.delete(values, place)) for place in range(20)])
        return jackknife(statistic(values) if value is None else value, without, 0.95)

    assert found(lambda v: float(v.max())) is NoInterval.SINGLE
    assert found(lambda v: 3.0) is NoInterval.ALIKE
    assert found(lambda v: math.nan, 1.0) is NoInterval.UNDEFINED
    assert found(lambda v: 1.0, math.nan) is NoInterval.UNDEFINED
    assert jackknife(1.0, np.ones(7), 0.95) is NoInterval.FEW


def test_a_largest_value_s_interval_ends_at_it():
    values = np.arange(40.0)
    low, high = largest_interval(values, np.repeat(np.arange(20), 2), 0.95)
    assert (low, high) == (33.0, 39.0)
    assert largest_interval(values, np.repeat(np.arange(5), 8), 0.95) is NoInterval.FEW


def test_student_s_quantiles():
    # The printed tables' figures; a series in 1 / freedom gave 11.30 and 4.30 for the first two.
    for freedom, quantile in ((1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (19, 2.093), (120, 1.980)):
        assert student_quantile(0.975, freedom) == pytest.approx(quantile, abs=5e-4)


def test_groups_are_numbered_as_they_come():
    places, number = numbered(np.array([9, 4, 9, 7, 4], np.uint64))
    assert (places.tolist(), number) == ([0, 1, 0, 2, 1], 3)


def test_moments_of_equal_values_are_exactly_zero_and_others_keep_their_digits():
    values = np.concatenate([np.full(n, 0.1) for n in (1, 3, 7, 10)])
    starts, num = np.array([0, 1, 4, 11]), np.array([1.0, 3.0, 7.0, 10.0])
    found = centred(values, starts, num)
    assert found.mean_N.tolist() == [0.1] * 4
    assert co_moment(found, found, starts, num).tolist() == [0.0] * 4
    assert off_median(found.mean_N, num, np.zeros(4, int)).tolist() == [0.0] * 4
    # 1e8 give or take 1: squares of 1e16 hide it.
    far = 1e8 + np.array([-1.0, 0.0, 1.0, 3.0])
    moved = centred(far, np.array([0]), np.array([4.0]))
    assert co_moment(moved, moved, np.array([0]), np.array([4.0])).tolist() == [8.75]
    counted = centred(np.where([1, 0, 1, 1], far, 0.0), np.array([0]), np.array([3.0]), np.array([1, 0, 1, 1], bool))
    assert co_moment(counted, counted, np.array([0]), np.array([3.0]))[0] == pytest.approx(8.0)


def test_a_median_of_means_is_taken_at_each_place_among_those_that_count():
    means = np.array([5.0, 1.0, 0.0, 3.0, 2.0])
    off = off_median(means, np.array([1.0, 1.0, 0.0, 2.0, 1.0]), np.array([0, 0, 0, 0, 1]))
    assert off.tolist() == [2.0, -2.0, 0.0, 0.0, 0.0]


def test_scipy_is_imported_by_what_needs_an_interval_alone():
    modules = "tim_trace.cli, tim_trace.analysis.info, tim_trace.analysis.query, tim_trace.analysis.stats"
    done = run(sys.executable, "-c", f"import {modules}, sys; print([n for n in sys.modules if n.startswith('scipy')])")
    assert (done.code, done.stdout.strip()) == (0, "[]"), done.stderr
