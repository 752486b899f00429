"""Every threshold of check and every verdict that follows from one, on arrays just under and just over the boundary."""

import ast
import math
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tim_trace.analysis
from click.testing import CliRunner
from tim_trace import cli
from tim_trace.analysis.check import sample as sampling
from tim_trace.analysis.check import thresholds
from tim_trace.analysis.check.check import judge
from tim_trace.analysis.check.detectors import (
    alignment,
    broken,
    constants,
    equality,
    grammar,
    log_base,
    logit_grid,
    missing,
    numerics,
    pairing,
    position_changes,
    shared,
    subsets,
    temperature,
    truncation,
    unsampled,
    values,
    weight_mismatch,
)
from tim_trace.analysis.check.detectors.bits import value_precision
from tim_trace.analysis.check.detectors.error_structure import ErrorStructure, error_structure, token_effect
from tim_trace.analysis.check.detectors.grid import Grid
from tim_trace.analysis.check.detectors.numerics import Precision, allowed_noise
from tim_trace.analysis.check.detectors.weight_mismatch import LogitMismatch
from tim_trace.analysis.check.finding import FAULTS, HEALTHY, WEIGHT_CAUSES, Finding
from tim_trace.analysis.check.notes import notes
from tim_trace.analysis.check.pair_data import PairData
from tim_trace.analysis.check.result import CheckResult
from tim_trace.analysis.check.sample import PassSample, Sample
from tim_trace.analysis.check.sums import PairSums
from tim_trace.analysis.check.text import checked_json, checked_text, evidence_text
from tim_trace.schemas.tables import SAMPLING


def pair_data(a, b, lengths=None, *, tokens=None, steps=None, settings=None, entropy=None, prompts=None, **more):
    """Two passes from arrays of logprobs, [N]; sequences of `lengths` tokens, one where none are given."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    lengths = np.array([len(a)] if lengths is None else lengths)
    num = len(lengths)

    def side(name, values):
        return PassSample(
            name=name, logprobs=values, is_null=np.isnan(values), entropy=entropy if name == "train" else None,
            versions=np.ma.masked_all(num, np.int64), contracts=[None] * num, writers=["w"] * num,
        )  # fmt: skip

    sample = Sample(
        a=side("train", a), b=side("rollout", b),
        tokens=np.arange(len(a)) % 50 if tokens is None else np.asarray(tokens), mask=np.ones(len(a), bool),
        starts=np.concatenate([[0], np.cumsum(lengths)]), steps=np.ones(num, int) if steps is None else np.asarray(steps),
        seq_ids=[f"s{row}" for row in range(num)], group_ids=["g"] * num, prompts=prompts or [None] * num,
        versions=np.ma.masked_all(num, np.int64),
        settings={name: np.full(num, np.nan) for name in SAMPLING} | (settings or {}),
    )  # fmt: skip
    d2 = sample.d[np.isfinite(sample.d)] ** 2
    not_finite = [~np.isfinite(values) & ~np.isnan(values) for values in (a, b)]
    lost = {
        "num_nan": np.array([0]), "num_inf": np.array([np.sum(not_finite[0] | not_finite[1])]),
        "num_null": np.array([0]),
    }  # fmt: skip
    sums = PairSums(
        steps=np.array([1]), columns={"num_tokens": np.array([len(d2)]), "sum_d2": np.array([d2.sum()])} | lost
    )
    return PairData(
        trace="run", sample=sample, sums=sums, contracts={}, passes=["rollout", "train"], has_weights=False, is_import=False, model={},
        keep=sample.compared, **more,
    )  # fmt: skip


def code_of(findings):
    """The code of the first finding; None where there is none."""
    first = findings[0] if findings else None
    return getattr(first[0] if isinstance(first, tuple) else first, "code", None)


# --- Values that are missing, copied or constant --------------------------------------------------------------------------


def lost(num):
    """`num` of 100,000 tokens have no value in rollout."""
    b = np.full(100_000, -1.0)
    b[:num] = np.nan
    return code_of(missing.find_missing(pair_data(np.full(100_000, -1.1), b)))


def lost_at_the_end(num):
    """Of 20 missing tokens `num` at the end of the sequence, the others apart."""
    b = np.full(200, -1.0)
    b[10 : 10 + 2 * (20 - num) : 2] = np.nan
    b[200 - num :] = np.nan
    return code_of(missing.find_missing(pair_data(np.full(200, -1.1), b)))


def lost_last(num):
    """The last `num` of 200 tokens have no value."""
    b = np.full(200, -1.0)
    b[200 - num :] = np.nan
    return pair_data(np.full(200, -1.1), b)


def copied(num_telling, others=400, equal=0):
    """A sequence that is copied, with `num_telling` tokens below 0, and another of which `equal` tokens agree."""
    b = np.concatenate([np.full(num_telling, -1.0), np.full(others, -2.0)])
    a = b + np.concatenate([np.zeros(num_telling + equal), np.full(others - equal, 0.1)])
    return code_of(equality.find_copied_rows(pair_data(a, b, [num_telling, others])))


@pytest.mark.parametrize(
    ("steps", "is_copied"),
    [
        ([1, 2, 3, 4], False),
        ([1, 1, 3, 4], False),
        ([1, 1, 1, 4], True),
        ([1, 3, 3, 4], True),
        ([3, 4, 1, 2], True),
        ([1, 3, 2, 4], True),
    ],
)
def test_an_engine_that_was_exact_in_its_first_steps_is_no_copy_of_its_trainer(steps, is_copied):
    b = np.full(200, -1.0)
    a = b + np.repeat([0.0, 0.0, 0.1, 0.1], 50)
    found = equality.find_copied_rows(pair_data(a, b, [50] * 4, steps=steps))
    assert [each.code for each in found] == ["copies"] * is_copied


@pytest.mark.parametrize(("num_equal", "is_copied"), [(0, True), (30, False)])
def test_rows_agree_by_chance_as_often_as_others_of_their_steps(num_equal, is_copied):
    """Two rows of step 1 agree to the last bit; two more do but for some tokens; from step 2 on the engine has other weights."""
    b = np.full(8 * 32, -1.0)
    off = np.full((8, 32), 0.1)
    off[:4] = np.where(np.arange(32) < num_equal, 0.0, 1e-7)
    off[:2] = 0.0
    found = equality.find_copied_rows(pair_data(b + off.ravel(), b, [32] * 8, steps=[1, 1, 1, 1, 2, 2, 2, 2]))
    assert [each.code for each in found] == ["copies"] * is_copied


def constant(value, other, rest=200, tokens=None):
    """A value of rollout where train has `other`; the rest agrees at logprobs of its own."""
    values = np.linspace(-4.2, -3.8, rest)
    a, b = np.concatenate([other, values]), np.concatenate([np.full(len(other), value), values + 1e-6])
    ids = np.arange(len(a)) if tokens is None else np.concatenate([tokens, np.arange(rest)])
    return code_of(constants.find_constants(pair_data(a, b, tokens=ids)))


@pytest.mark.parametrize(("value", "code"), [(-9e-6, None), (-1.1e-5, "placeholders"), (0.0, "placeholders")])
def test_logprobs_of_tokens_that_are_certain_are_the_same_by_chance(value, code):
    assert constant(value, -1 - np.arange(30) / 10) == code


def nth_constant(decoys):
    """A placeholder that is one of few, with `decoys` values that come more often and are healthy."""
    healthy = np.repeat(-1 - 0.01 * np.arange(decoys), 5)
    a, b = np.concatenate([healthy, [-3.0, -5.0, -7.0, -4.0]]), np.concatenate([healthy + 1e-6, np.full(4, -0.5)])
    b[:-4] = healthy
    a[:-4] = healthy + 1e-6
    return code_of(constants.find_constants(pair_data(a, b, tokens=np.arange(len(a)))))


def surprise(nats, usual=4.0, runs=2):
    """Zeros where train has `nats` on average, in runs, while other tokens have `usual`."""
    num = 40
    zero = np.arange(4 * num) % (2 * runs) < runs
    a = np.where(zero, -nats, -usual) + 0.2 * np.where(np.arange(4 * num) // (2 * runs) % 2, 1, -1)
    return code_of(constants.find_constants(pair_data(a, np.where(zero, 0.0, a + 1e-6))))


def zero_runs(doubles):
    """Of 20 runs of zeros `doubles` are of two tokens, one of three where all are, else of one."""
    flags = np.concatenate([np.concatenate([np.ones(1 + (run < doubles), bool), [False]]) for run in range(20)])
    a = np.where(flags, -8.0, -1.0) + 0.2 * np.where(np.arange(len(flags)) % 2, 1, -1)
    return code_of(constants.find_constants(pair_data(a, np.where(flags, 0.0, a + 1e-6))))


def far(num):
    """`num` of 1,000 tokens of a constant lie far off."""
    other = np.full(1000, -1e-3)
    other[:num] = np.linspace(-4, -1, num)
    return constant(0.0, other)


def given(expected):
    """Seven sequences of a prompt that begin alike, of which sampling would begin `expected` otherwise."""
    nats = -math.log(1 - expected / 6)
    data = pair_data(np.tile([-nats, -1.0], 7), np.tile([0.0, -1.0], 7), [2] * 7, prompts=[[1]] * 7, tokens=[5, 6] * 7)
    return constants._are_given(data.sample, data.sample.a, np.tile([True, False], 7))


# --- Units and alignment --------------------------------------------------------------------------------------------------


def spread_in_base_2(nats):
    a = -1 + nats * np.where(np.arange(40) % 2, 1, -1)
    return code_of(log_base.find_unit(pair_data(a, a / math.log(2))))


def residual_in_base_2(offset):
    """Base 2 with an error: with -2 nats the residual is ln 2 * offset, and d is 2 / ln 2 - 2 - offset."""
    a = -2 + 0.002 * np.where(np.arange(40) % 2, 1, -1)
    return code_of(log_base.find_unit(pair_data(a, a / math.log(2) + offset)))


def swapped_rows(nats, left=0.0):
    """Two rows of which each has the other's values, `nats` apart; the first one's partner leaves some."""
    a = np.tile([-1.0, -1.5], 5)
    return pairing.find_row_pairing(
        pair_data(np.concatenate([a, a - nats]), np.concatenate([a - nats, a - left]), [10, 10])
    )


def paired_tokens(num):
    """Two swapped rows, one of only `num` tokens."""
    a = -1 - np.random.default_rng(1).random(8) * 3
    rows = a, a - 1.0
    data = pair_data(np.concatenate([rows[0], rows[1][:num]]), np.concatenate([rows[1], rows[0][:num]]), [8, num])
    return code_of(pairing.find_row_pairing(data))


def random_rows(lag, num=6, width=40):
    draw = -np.random.default_rng(0).exponential(2.0, (num, width + 8))
    return pair_data(draw[:, 4 : width + 4].ravel(), draw[:, 4 - lag : width + 4 - lag].ravel(), [width] * num)


def late_row(saved):
    """A row whose last three values stand a token late, where moving these saves so much."""
    u = saved / 3
    a = [-1.0, -2.0, -3.0, -3.0, -3.0 - u, -3.0 - 2 * u]
    b = [-1.0, -2.0, -3.0, -3.0 - u, -3.0 - 2 * u, -3.0 - 3 * u]
    return np.array(a), np.array(b)


def switches(saved):
    a, b = late_row(saved)
    return bool(alignment.align(Grid(a[None], b[None]))[0].any())


def aligned_rows(monkeypatch, num, lagged=(3,), gain=5.0):
    """Rows that are off, the first of which agree when `lagged` of their tokens are moved."""

    def align(grid):
        lags = np.zeros(grid.a.shape, int)
        for row, count in enumerate(lagged):
            lags[row, 2 : 2 + count] = 1
        return lags, np.where(np.arange(len(lags)) < len(lagged), gain, 0.0)

    monkeypatch.setattr(alignment, "align", align)
    return code_of(alignment.find_retokenised(pair_data(np.full(8 * num, -1.0), np.full(8 * num, -2.0), [8] * num)))


def num_aligned(monkeypatch, find, num):
    """How many of so many rows that are off are aligned."""
    seen = []

    def align(grid):
        seen.append(len(grid.a))
        return np.zeros(grid.a.shape, int), np.zeros(len(grid.a))

    monkeypatch.setattr(alignment, "align", align)
    find(Grid(np.full((num, 8), -1.0), np.full((num, 8), -2.0)))
    return seen[0]


def num_tried(monkeypatch, num):
    seen = []
    monkeypatch.setattr(pairing, "_match", lambda grid, own, off, rows, partner: seen.append(len(off)))
    pairing.find_row_pairing(pair_data(np.full(2 * num, -1.0), np.full(2 * num, -2.0), [2] * num))
    return seen[0]


def num_paired(monkeypatch, num, partners=None, of=10):
    """`num` of 10 rows that are off agree with another one."""

    def match(grid, own, off, rows, partner):
        partner[:num] = (np.arange(num) + 1) % 10 if partners is None else partners

    monkeypatch.setattr(pairing, "_match", match)
    return code_of(pairing.find_row_pairing(pair_data(np.full(20, -1.0), np.full(20, -2.0), [2] * 10)))


def shift_leaves(monkeypatch, left, rows=1.0, aligned=False):
    monkeypatch.setattr(alignment, "_beside", lambda grid, lag: (left if lag == 1 else 1.0, 1.0))
    monkeypatch.setattr(alignment, "_share_of_rows", lambda grid, lag: rows)
    monkeypatch.setattr(alignment, "_begins_aligned", lambda grid: aligned)
    return code_of(alignment.find_shift(random_rows(1)))


def breaks(cost, before=0.0, surprising=-6.0):
    costs = np.array([0.0, before, cost, cost, cost])
    return broken._place(costs, np.full(5, -1.0), np.array([-1.0, -1, surprising, -1, -1])) == 2


def broken_rows(monkeypatch, num):
    """`num` of 10 rows that are off break at a place of their own."""
    places = iter([*range(1, num + 1), *[None] * (10 - num)])
    monkeypatch.setattr(broken, "_place", lambda cost, a, b: next(places))
    return code_of(broken.find_broken(pair_data(np.full(200, -1.0), np.full(200, -2.0), [20] * 10)))


# --- Places and parts -----------------------------------------------------------------------------------------------------


def noisy(seed=0, num=8, width=40, **options):
    draw = np.random.default_rng(seed)
    b = -draw.exponential(1.5, num * width) - 0.1
    return pair_data(b + draw.normal(0, 1e-3, len(b)), b, [width] * num, **options)


def onset(monkeypatch, *, place=20, step=1.0, within=1.0, low=1e-3):
    change = position_changes.LevelChange(place, math.log(10), 10.0)
    monkeypatch.setattr(position_changes, "best_cut", lambda *_: change)
    monkeypatch.setattr(position_changes, "_holds", lambda *_: True)
    monkeypatch.setattr(position_changes, "steepness", lambda *_: step)
    monkeypatch.setattr(position_changes, "_within_sequences", lambda *_: within)
    monkeypatch.setattr(position_changes, "_low_part", lambda *_: low)
    return code_of(position_changes.find_onset(noisy()))


def own_places(monkeypatch, *, num=6, score=10.0, ratio=10.0):
    cuts = {row: position_changes.LevelChange(10, math.log(ratio), 1.0) for row in range(num)}
    monkeypatch.setattr(position_changes, "own_cuts", lambda *_: (cuts, score))
    return code_of(position_changes.find_own_places(noisy()))


def holds(*, ratio=10.0, score=10.0):
    return position_changes._holds(
        position_changes.LevelChange(1, math.log(ratio), score**2), total=score**2 + 100, num=100
    )


def cut_tokens(num):
    """Whether sequences of so many tokens are asked for a place of their own."""
    y = np.tile(np.where(np.arange(num) < num // 2, 0.0, 1.0), 5)
    return bool(position_changes.own_cuts(y, np.repeat(np.arange(5), num), np.tile(np.arange(num), 5))[0])


def margin(num):
    """Whether a place with `num` values before it is tried."""
    y = np.concatenate([np.zeros(num), np.ones(60)])
    return position_changes.best_cut(y, np.arange(len(y)), thresholds.MIN_SIDE_TOKENS).place == num


def split(levels, weights, values, name="writer_a"):
    return subsets._split(name, list(values), np.array(levels, float), np.array(weights, float)) is not None


def explains(spread):
    return split([-spread, spread, math.log(4) - spread, math.log(4) + spread], [50] * 4, "xxyy")


def ratio(factor):
    return split([0.0, math.log(factor)], [50, 50], "xy")


def high_share(share, name="writer_a"):
    return split([0.0, 3.0], [1000 * (1 - share), 1000 * share], ["p", "q"], name)


def apart(widths):
    """Low values at 0 and 3, of a spread of 1.5, and a high one so many spreads above."""
    return split([0.0, 3.0, 3.0 + 1.5 * widths], [20, 200, 200], "xyz")


def plainer(monkeypatch, r2):
    """Whether the plainer of two columns is named that explain so much and 1."""
    rows = np.arange(8) < 4
    splits = {"step": 1.0, "writer_a": r2}
    monkeypatch.setattr(
        subsets,
        "_split",
        lambda name, *_: subsets.Split(name, ["x"], rows, 10.0, splits[name]) if name in splits else None,
    )
    monkeypatch.setattr(subsets, "_noise", lambda *_: 0.0)
    monkeypatch.setattr(subsets, "_is_more_than_change", lambda *_: True)
    data = noisy(steps=np.arange(8))
    data.sample.a.writers = list("aaaabbbb")
    (found,) = subsets.find_subset(data)
    return found.numbers["column"] == "writer_a"


# --- Temperature, truncation, padding -------------------------------------------------------------------------------------


def tempered(*, scale=0.9, r2=0.9, score=50.0):
    return temperature.is_temperature(temperature.ScaleFit(scale, r2, score))


def fitted(scale, num=100):
    u = np.random.default_rng(0).normal(0, 0.5, num)
    a = -2 - np.abs(u)
    return temperature._by_entropy(pair_data(a, a + (scale - 1) * u, entropy=u - a), "a") is not None


def odds_fitted(num):
    a = -np.linspace(0.1, 3, num)
    return temperature._by_odds(pair_data(a, a + 0.01)) is not None


def one_sided(d, **options):
    d = np.asarray(d, float)
    return code_of(truncation.find_one_sided(pair_data(-3.0 + d, np.full(len(d), -3.0), **options)))


def sizes(**counts):
    """`n_x=(count, d)` one after the other."""
    return np.concatenate([np.full(count, d) for count, d in counts.values()])


def cut_or_padded(*, alone=0, vocabulary=10, logprob=-2.0):
    """Uneven lost mass of 1,000 tokens; `alone` of them have logprob 0 in rollout."""
    d = -np.linspace(0.05, 0.3, 1000)
    b = np.full(1000, logprob)
    b[:alone] = 0.0
    return code_of(truncation.find_one_sided(pair_data(b + d, b, tokens=np.arange(1000) % vocabulary)))


# --- Precision, weights, routers ------------------------------------------------------------------------------------------


def grid_dtype(offset=0.0, *, steps=128, num=40, on=40, temperatures=(1.0,), divided=1.0):
    """The dtype of `num` differences, `on` of them `offset` steps beside the grid and the others half a step."""
    k = np.arange(3, 3 + num) * 3 + 2
    beside = np.where(np.arange(num) < on, offset, 0.5)
    return logit_grid._of((k + beside) / steps / divided, list(temperatures))


def rounded_values(num, of=100):
    values = -np.linspace(1, 2, of).astype(np.float32)
    values.view(np.uint32)[:] |= 1
    values.view(np.uint32)[:num] &= 0xFFFF0000
    return value_precision(values)


def different_values(num):
    return value_precision(np.tile(-np.linspace(1, 2, num).astype(np.float32), 3))


def rounding_explains(share, dtype="bfloat16"):
    """A pass of 16-bit values that explain so much of d: (v * half)^2 / 3 of d^2."""
    half, low = {"bfloat16": (2.0**-9, 0xFFFF0000), "float16": (2.0**-12, 0xFFFFE000)}[dtype]
    values = -np.linspace(1, 2, 200).astype(np.float32)
    values.view(np.uint32)[:] &= low
    values = np.unique(values).astype(float)
    if dtype == "float16":
        values = values[(-values).astype(np.float32).view(np.uint32) & 0xFFFF != 0]
    d = math.sqrt(float(np.mean((values * half) ** 2)) / 3 / share)
    return code_of(numerics.find_low_precision(pair_data(values, values - d)))


def excessive(level, *dtypes):
    sides = tuple(Precision(dtype, None, None) for dtype in dtypes)
    return LogitMismatch(level, allowed_noise(sides), 0.5, 9.0).is_excessive


def of_weights(*, level=0.5, effect=0.5, score=50.0, num_ids=100):
    return LogitMismatch(level, 1.0, effect, score, num_ids=num_ids).is_of_weights


def changes_inside(persistence, *, excess, score=10.0):
    return ErrorStructure(persistence, score).changes_inside(is_excessive=excess)


def effect_tokens(num):
    tokens = np.arange(num) % 10
    b = np.full(num, -2.0)
    return token_effect(pair_data(b + 0.01 * tokens + 1e-5 * np.arange(num), b, tokens=tokens))[1] > 0


def routed(monkeypatch, num, times=100.0, *, of=10_000, mixture=True, effect=0.0, rest=1.0):
    """`num` of 10,000 tokens lie so many times as far off as the median one."""
    noise = np.full(of, 1e-3 * rest)
    noise[: of // 2 + 1] = 1e-3
    noise[:num] = 1e-3 * times
    b = np.full(of, math.log(0.5))
    data = pair_data(b - noise * 0.5, b)
    data.noise = noise
    monkeypatch.setattr(numerics, "is_mixture", lambda _: mixture)
    monkeypatch.setattr(numerics, "token_effect", lambda _: (effect, 0.0))
    return code_of(numerics.find_router_flips(data))


@pytest.mark.parametrize(
    ("mixture", "versions", "expected"),
    [(None, 3, "router_flips"), (None, 4, None), (None, np.ma.masked, "router_flips"), (True, 4, "router_flips")],
)
def test_weights_that_are_declared_to_be_others_are_not_taken_for_experts(monkeypatch, mixture, versions, expected):
    b = np.full(10_000, math.log(0.5))
    data = pair_data(b - 1e-3, b)
    data.noise = np.where(np.arange(10_000) < 100, 1.0, 1e-3)
    data.sample.a.versions[:], data.sample.b.versions[:] = versions, 3.0
    monkeypatch.setattr(numerics, "is_mixture", lambda _: mixture)
    monkeypatch.setattr(numerics, "token_effect", lambda _: (0.0, 0.0))
    assert code_of(numerics.find_router_flips(data)) == expected


def flipped_by(monkeypatch, noise):
    """A hundredth of the tokens lies so far off, nats of a logit, and the others as far as float32 rounds."""
    b = np.full(10_000, math.log(0.5))
    data = pair_data(b - 1e-7, b)
    data.noise = np.where(np.arange(10_000) < 100, noise, 1e-7)
    monkeypatch.setattr(numerics, "is_mixture", lambda _: True)
    monkeypatch.setattr(numerics, "token_effect", lambda _: (0.0, 0.0))
    return code_of(numerics.find_router_flips(data))


@pytest.mark.parametrize(
    ("level", "dtypes", "expected"),
    [
        (0.05, ("bfloat16", "float32"), "change_inside_sequence"),
        (0.05, ("bfloat16", None), None),
        (0.05, (None, None), None),
        (0.5, (None, None), "change_inside_sequence"),
        (0.98e-3, ("float32", "float32"), None),
        (1.02e-3, ("float32", "float32"), "change_inside_sequence"),
    ],
)
def test_rounding_that_a_state_carries_on_is_no_change_inside_of_sequences(monkeypatch, level, dtypes, expected):
    """A recurrent state in 16 bits makes neighbouring tokens off alike: of dtypes that nobody named a mismatch as small as rounding is that."""
    known = all(dtypes)
    size = LogitMismatch(level, 0.08, 0.0, 0.0, num_ids=8, is_of_known_dtypes=known)
    monkeypatch.setattr(weight_mismatch, "logit_mismatch", lambda data: size)
    monkeypatch.setattr(weight_mismatch, "error_structure", lambda data: ErrorStructure(0.3, 9.0))
    assert code_of(weight_mismatch.find_other_weights(noisy())) == expected


def test_both_sides_dtypes_have_to_be_said_or_seen():
    data = noisy()
    assert not weight_mismatch.logit_mismatch(data).is_of_known_dtypes
    data = noisy()
    data.sample.a.contracts, data.sample.b.contracts = ["a"] * 8, ["b"] * 8
    data.contracts = {"a": {"dtype": "torch.bfloat16"}, "b": {"dtype": "torch.float32"}}
    found = weight_mismatch.logit_mismatch(data)
    assert found.is_of_known_dtypes
    assert found.num_ids == len(np.unique(data.sample.tokens))


def router_top(monkeypatch, share):
    """The top fiftieth of 10,000 tokens carries so much of the squared noise; no contract names experts."""
    times = math.sqrt(share / (1 - share) * 9800 / 200)
    return routed(monkeypatch, 200, times, mixture=None)


def under_grammar(raised, lower=0, *, contracts=("rollout",), nats=1.0, others=200):
    """`raised` tokens of rollout are higher than train's by so much and `lower` lower; both contracts say float32."""
    a = -1.0 - 0.01 * np.arange(others)
    b = a.copy()
    b[:raised] += nats * (1 - np.exp(a[:raised]))
    b[raised : raised + lower] -= 1.0
    data = pair_data(a, b)
    data.sample.a.contracts, data.sample.b.contracts = ["train"], ["rollout"]
    data.contracts = {
        name: {"dtype": "float32", "model": {"dtypes": {"float32": 1}}} | ({"structured_outputs": True} if name in contracts else {})
        for name in ("train", "rollout")
    }  # fmt: skip
    return data


def grammar_of(*arguments, **options):
    return code_of(grammar.find_grammar(under_grammar(*arguments, **options)))


# --- Values that are no logprobs, and what both sides have wrong alike ------------------------------------------------------


def above_zero(num, value=1.0):
    """`num` of 100 values of rollout are above 0, where train's go on as elsewhere; one more is NaN."""
    draw = -np.random.default_rng(0).exponential(1.0, 101) - 0.1
    b = draw + 1e-6 * np.sin(np.arange(101))
    b[:num], b[100] = value, np.nan
    b[:num] += 1e-7 * np.arange(num)
    return [finding.code for finding in detectors().find(pair_data(draw, b))]


def detectors():
    return import_module("tim_trace.analysis.check.detectors")  # `analysis.check` is the function


def correlated(r):
    """Two passes with this correlation."""
    x, y = np.random.default_rng(0).normal(size=(2, 4000))
    y = y - (x @ y) / (x @ x) * x
    a = x / x.std() - 9
    b = r * x / x.std() + np.sqrt(1 - r * r) * y / y.std() - 9
    return code_of(values.find_unrelated(pair_data(a, b)))


def of_tokens(num):
    draw = -np.random.default_rng(0).exponential(1.0, num) - 0.1
    return code_of(detectors().find(pair_data(draw, draw + 1e-6 * np.sin(np.arange(num)))))


def shared_constant(num, *, value=-0.5, at_zero=1.0, repeated=1):
    """`num` tokens of both passes are one value, and others around it come `repeated` times each."""
    around = (
        np.repeat(value - 0.04 * np.random.default_rng(1).random(200), repeated) if value else -np.linspace(1, 4, 200)
    )
    a = np.concatenate([np.full(num, value), around])
    entropy = np.concatenate([np.full(num, at_zero), np.full(len(around), 0.3)])
    ids = np.arange(len(a))
    return code_of(shared.find_shared_constants(pair_data(a, a.copy(), tokens=ids, entropy=entropy)))


def shared_unit(monkeypatch, as_it_stands=50.0, in_log2=0.0):
    scores = iter([as_it_stands, in_log2, 99.0])
    monkeypatch.setattr(shared, "_score", lambda data, values: next(scores))
    draw = -np.random.default_rng(0).exponential(1.0, 100) - 0.1
    return code_of(shared.find_shared_unit(pair_data(draw, draw + 1e-6, entropy=np.ones(100))))


def tied(spread, below=10):
    """Of 20 tokens at -0.5 the other side lies `below` below it, the others above; elsewhere it lies 3.5 nats off."""
    other = -0.5 + spread * np.where(np.arange(20) < below, -1, 1) * np.linspace(0.9, 1.1, 20)
    return constant(-0.5, other)


def begins(num):
    """Rows of `num` tokens that begin aligned, as alignment says."""
    grid = Grid(np.full((10, num), -1.0), np.full((10, num), -2.0))
    return alignment._begins_aligned(grid)


def over_chance(monkeypatch, by_chance):
    monkeypatch.setattr(pairing, "_by_chance", lambda *_: by_chance)
    return num_paired(monkeypatch, 10)


def handed_over(share):
    """Whether bfloat16 values that explain so much of d are a fault where no contract names a dtype."""
    values = -np.linspace(1, 2, 200).astype(np.float32)
    values.view(np.uint32)[:] &= 0xFFFF0000
    values = np.unique(values).astype(float)
    d = math.sqrt(float(np.mean((values * 2.0**-9) ** 2)) / 3 / share)
    (found,) = numerics.find_low_precision(pair_data(values, values - d))
    return found.fails


def sure(rest):
    b = np.full(100, math.log(1 - rest))
    return weight_mismatch.logit_mismatch(pair_data(b - 1e-3, b)).is_sure


def flips_fail(monkeypatch, num):
    b = np.full(10_000, math.log(0.5))
    data = pair_data(b - 5e-4, b)
    data.noise = np.where(np.arange(10_000) < num, 0.1, 1e-3)
    monkeypatch.setattr(numerics, "is_mixture", lambda _: True)
    monkeypatch.setattr(numerics, "token_effect", lambda _: (0.0, 0.0))
    (found,) = numerics.find_router_flips(data)
    return found.fails


@pytest.mark.parametrize(
    ("prompts", "nats", "expected"),
    [
        ([1] * 20, 0.004, None),  # all prompts came before from step 2 on: as small as rounding
        ([1] * 20, 0.2, "change_inside_sequence"),
        ([1, 2] * 10, 0.004, "change_inside_sequence"),  # half of the prompts of each later step did
    ],
)
def test_prompts_that_all_came_before_from_a_step_on_are_a_range_of_steps(prompts, nats, expected):
    draw = np.random.default_rng(0)
    steps = np.repeat([1, 2, 3, 4, 5], 4)
    asked = [[1] if prompt == 1 else [100 + place] for place, prompt in enumerate(prompts)]
    first = {}
    seen = [first.setdefault(tuple(prompt), step) < step for prompt, step in zip(asked, steps, strict=True)]
    b = -draw.exponential(1.5, 20 * 40) - 0.1
    a = b + draw.normal(0, np.repeat(np.where(seen, nats, 1e-5), 40)) * -np.expm1(b)
    assert code_of(subsets.find_subset(pair_data(a, b, [40] * 20, steps=steps, prompts=asked))) == expected


def cached_prompts(num_behind):
    """Twenty sequences whose prompt came before are off, so many of them by versions that say so, and twenty others are not."""
    draw = np.random.default_rng(0)
    asked = [[1] if place >= 4 and place % 2 else [100 + place] for place in range(44)]
    asked[0] = [1]
    steps = np.repeat([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 4)
    seen = np.array([prompt == [1] and place > 0 for place, prompt in enumerate(asked)])
    b = -draw.exponential(1.5, 44 * 40) - 0.1
    a = b + draw.normal(0, np.repeat(np.where(seen, 0.2, 1e-5), 40)) * -np.expm1(b)
    data = pair_data(a, b, [40] * 44, steps=steps, prompts=asked)
    data.sample.a.versions[:], data.sample.b.versions[:] = 5.0, 5.0
    data.sample.b.versions[np.flatnonzero(seen)[:num_behind]] = 3.0
    assert seen.sum() == 20
    return code_of(subsets.find_subset(data))


def since(monkeypatch, fall=9.0, score=9.0):
    """What is named first of a part that is all of the run from a step on, where prompts came before."""
    cache = Finding(
        code="change_inside_sequence", signal="prefix_cache", effect=1.0, share=0.5, numbers={"fall": fall, "fall_score": score}
    )  # fmt: skip
    part = subsets.SequencePart(cache, np.zeros(320, bool), 2)
    cause = Finding(code="weights_differ", signal="logits", effect=1.0, share=1.0)
    monkeypatch.setattr(detectors(), "part_of", lambda data: part)
    monkeypatch.setattr(detectors(), "_INSIDE", (lambda data: [cause],))
    return detectors()._since(noisy())[0].code


# --- Tokens that nobody sampled, notes, sampling --------------------------------------------------------------------------


def unlikely(nats, num=4):
    return bool(unsampled.unlikely_runs(np.full(num, nats), np.zeros(num, int), np.arange(num)).any())


def unsampled_sequences(num, of=80):
    a = np.full((of, 10), -1.0)
    a[:num, 2:8] = -9.0
    data = pair_data(a.ravel(), a.ravel() + 1e-4, [10] * of, entropy=np.ones(10 * of))
    return code_of(unsampled.find_unsampled(data))


def noted(num):
    return "few_tokens" in [note.code for note in notes(pair_data(np.full(num, -1.0), np.full(num, -1.1)))]


def said_behind(along):
    numbers = {
        "level": 1.0, "allowed": 0.1, "token_effect": 0.5, "token_score": 9.0, "along_movement": along, "persistence": 0.0,
        "sequence_score": 0.0, "a": "train", "b": "rollout", "dtype_a": None, "dtype_b": None,
    }  # fmt: skip
    finding = Finding(code="weights_differ", signal="logits", effect=1.0, share=1.0, numbers=numbers)
    text = evidence_text(finding)
    return "rollout lagged behind train" in text if along > 0 else "train lagged behind rollout" in text


def chosen_steps(num_steps, tokens_a_step=1, worst=()):
    rows = [(step, tokens_a_step) for step in range(num_steps)]
    answer = SimpleNamespace(fetchall=lambda: rows)
    database = SimpleNamespace(connection=SimpleNamespace(execute=lambda *_: answer), memory={})
    return len(sampling._chosen_steps(database, list(worst)))


def rows_within(tokens):
    """How many of two rows of one step are looked at."""
    import pyarrow as pa

    return len(sampling._within(pa.table({"num_response_tokens": [tokens - 10, 10], "step": [1, 1]})))


PATCHED = {
    "MAX_ALIGNED_ROWS": lambda m, n: num_aligned(m, lambda grid: alignment.find_retokenised(off(grid)), n),
    "MAX_SHIFTED_ROWS": lambda m, n: num_aligned(m, alignment._begins_aligned, n),
}


def off(grid):
    return pair_data(grid.a.ravel(), grid.b.ravel(), [grid.a.shape[1]] * len(grid.a))


BOUNDARIES = [
    # threshold, what is decided, and (argument, decision) just under and just over it
    ("MAX_SAMPLED_STEPS", chosen_steps, (16, 16), (17, 16)),
    ("MAX_SAMPLED_STEPS", chosen_steps, (15, 15), (400, 16)),
    ("MIN_SAMPLED_STEPS", lambda n: chosen_steps(n, 10_000_000), (2, 2), (3, 2)),
    ("MAX_READ_TOKENS", lambda n: chosen_steps(5, n), (490_000, 4), (510_000, 2)),
    ("MAX_WORST_STEPS", lambda n: chosen_steps(400, worst=[7, 9, 11][:n]), (1, 17), (2, 17)),
    ("MAX_SAMPLED_TOKENS", rows_within, (100_000, 2), (100_001, 1)),
    ("MIN_MISSING_SHARE", lost, (9, None), (10, "lengths")),
    ("MIN_TAIL_SHARE", lost_at_the_end, (15, "placeholders"), (16, "lengths")),
    ("MIN_COPIED_TOKENS", copied, (3, None), (4, "copies")),
    ("COPIED_BY_CHANCE", lambda equal: copied(4, 400, equal), (33, "copies"), (34, None)),
    ("MAX_CONSTANTS", nth_constant, (19, "mask"), (20, None)),
    ("MIN_CONSTANT_COUNT", lambda n: constant(-0.5, np.linspace(-6, -3, n)), (2, None), (3, "placeholders")),
    (
        "MIN_CONSTANT_TOKENS",
        lambda n: constant(-0.5, np.linspace(-6, -3, 6), tokens=np.arange(6) % n),
        (2, None),
        (3, "placeholders"),
    ),
    (
        "MIN_CONSTANT_SPREAD",
        lambda x: constant(-0.5, -0.5 - x * np.tile([1, 0], 10)),
        (0.098, None),
        (0.102, "placeholders"),
    ),
    (
        "MIN_CONSTANT_SPREAD",
        lambda x: constant(-0.5, -1.5 + x * np.tile([1, -1], 10)),
        (0.049, None),
        (0.051, "placeholders"),
    ),
    ("IMPOSSIBLE_LOGPROB", lambda x: constant(x, np.array([-1.0])), (-79.0, None), (-80.0, "placeholders")),
    ("UNSAMPLED_SURPRISE", surprise, (5.9, "placeholders"), (6.1, "mask")),
    ("UNSAMPLED_SURPRISE", lambda x: surprise(x, usual=1.0), (1.95, "placeholders"), (2.05, "mask")),
    ("MIN_RUN_OF_UNSAMPLED", zero_runs, (19, "placeholders"), (20, "mask")),
    ("MIN_FAR_SHARE", far, (20, None), (21, "placeholders")),
    ("UNSAMPLED_STARTS", given, (4.9, False), (5.1, True)),
    ("MIN_SPREAD", spread_in_base_2, (0.98e-3, None), (1.02e-3, "log_base")),
    ("BASE_RESIDUAL", residual_in_base_2, (0.230, "log_base"), (0.239, None)),
    (
        "CAP_NATS",
        lambda x: float(Grid(np.zeros((1, 1)), np.full((1, 1), x)).cost()[0, 0]) == x,
        (2.95, True),
        (3.05, False),
    ),
    ("MIN_OFF_NATS", lambda x: code_of(swapped_rows(x)), (0.049, None), (0.051, "row_pairing")),
    ("PAIRED_SHARE", lambda x: code_of(swapped_rows(1.0, x)), (0.145, "row_pairing"), (0.155, None)),
    ("MIN_PAIRED_TOKENS", paired_tokens, (3, None), (4, "row_pairing")),
    ("LAGS", lambda n: code_of(alignment.find_shift(random_rows(n))), (4, None), (3, "shift")),
    ("LAGS", lambda n: code_of(alignment.find_shift(random_rows(n))), (-4, None), (-3, "shift")),
    ("LAG_SWITCH_NATS", switches, (1.95, False), (2.05, True)),
    (
        "MIN_ALIGNMENT_GAIN_NATS",
        lambda x: code_of(alignment.find_retokenised(pair_data(*late_row(x)))),
        (5.9, None),
        (6.1, "retokenised"),
    ),
    ("BROKEN_NATS", breaks, (0.98, False), (1.02, True)),
    ("BROKEN_NATS", lambda x: breaks(2.0, before=x), (0.49, True), (0.51, False)),
    ("SURPRISING_NATS", lambda x: breaks(2.0, surprising=x), (-4.9, False), (-5.1, True)),
    (
        "MIN_REST",
        lambda rest: bool(np.isfinite(pair_data([math.log(1 - rest)], [math.log(1 - rest) - 0.01]).noise[0])),
        (0.0198, False),
        (0.0202, True),
    ),
    ("MIN_LEVEL_RATIO", lambda x: holds(ratio=x), (2.95, False), (3.05, True)),
    ("MIN_LEVEL_RATIO", ratio, (2.95, False), (3.05, True)),
    ("MIN_PLACE_SCORE", lambda x: holds(score=x), (6.9, False), (7.1, True)),
    (
        "MIN_SIDE_TOKENS",
        lambda n: position_changes.Levels.of(noisy(num=1, width=n)) is not None,
        (79, False),
        (80, True),
    ),
    ("MIN_SIDE_TOKENS", margin, (19, False), (20, True)),
    ("MIN_CUT_TOKENS", cut_tokens, (7, False), (8, True)),
    ("MIN_SUBSET_R2", explains, (1.0464, True), (1.0716, False)),
    ("MIN_SUBSET_TOKENS", lambda n: split([0.0, 3.0], [n, 300], "xy"), (19, False), (20, True)),
    ("MAX_SUBSET_SHARE", high_share, (0.94, True), (0.96, False)),
    ("MAX_GROUPS_SHARE", lambda x: high_share(x, "group_id"), (0.49, True), (0.51, False)),
    ("MIN_SUBSET_WIDTHS", apart, (0.97, False), (1.03, True)),
    ("MIN_TEMPERATURE_SHIFT", lambda x: tempered(scale=math.exp(x)), (0.0039, False), (0.0041, True)),
    ("MIN_TEMPERATURE_SHIFT", lambda x: tempered(scale=math.exp(x)), (-0.0039, False), (-0.0041, True)),
    ("MIN_TEMPERATURE_SCORE", lambda x: tempered(score=x), (5.9, False), (6.0, True)),
    ("MIN_TEMPERATURE_R2", lambda x: tempered(r2=x), (0.59, False), (0.6, True)),
    ("MIN_TEMPERATURE_TOKENS", lambda n: fitted(0.9, n), (29, False), (30, True)),
    ("MIN_TEMPERATURE_TOKENS", odds_fitted, (29, False), (30, True)),
    ("MAX_TEMPERATURE", fitted, (19.8, True), (20.2, False)),
    ("MAX_TEMPERATURE", fitted, (1 / 19.8, True), (1 / 20.2, False)),
    (
        "MIN_ONE_SIDED",
        lambda n: one_sided(sizes(large=(100, -1.0), minor=(n, 0.1))),
        (245, "truncation"),
        (255, None),
    ),
    ("MIN_LEANING", lambda n: one_sided(sizes(large=(1000, -1.0), minor=(n, 1.0))), (170, "truncation"), (183, None)),
    (
        "MAX_MINOR_SHARE",
        lambda n: one_sided(sizes(large=(1000, -1.0), wrong=(n, 1.0), minor=(2450, 0.066))),
        (52, "truncation"),
        (54, None),
    ),
    (
        "MIN_LARGE_SHARE",
        lambda n: one_sided(sizes(large=(n, -0.21), middle=(1000, -0.19), minor=(848, 0.1))),
        (1000, None),
        (1025, "truncation"),
    ),
    ("MAX_CUT_NATS", lambda x: one_sided(np.full(100, -x)), (2.95, "truncation"), (3.05, None)),
    ("MIN_MASS_SCORE", lambda n: one_sided(sizes(zero=(1000 - n, 0.0), cut=(n, -1.0))), (15, None), (16, "truncation")),
    (
        "MIN_MASS_SCORE",
        lambda n: one_sided(sizes(zero=(10_000 - n, 0.0), cut=(n, -1.0), wrong=(6, 1.0))),
        (62, None),
        (66, "truncation"),
    ),
    ("NUCLEUS_ALONE_SHARE", lambda n: cut_or_padded(alone=n), (10, "padded_vocabulary"), (11, "truncation")),
    (
        "KEPT_VOCABULARY",
        lambda x: cut_or_padded(vocabulary=100, logprob=-math.log(x)),
        (59, "truncation"),
        (61, "padded_vocabulary"),
    ),
    ("MIN_GRID_PAIRS", lambda n: grid_dtype(num=n, on=n), (5, None), (6, "bfloat16")),
    ("TEMPERATURES", lambda x: x in thresholds.TEMPERATURES, (0.29, False), (0.3, True)),
    (
        "TEMPERATURES",
        lambda x: grid_dtype(temperatures=thresholds.TEMPERATURES, divided=x),
        (1.5, "bfloat16"),
        (1.51, "float32"),
    ),
    ("GRID_TOLERANCE", grid_dtype, (0.0195, "bfloat16"), (0.0205, "float32")),
    ("GRID_TOLERANCE", lambda x: grid_dtype(x, steps=4096, num=300, on=300), (0.079, "float16"), (0.081, "float32")),
    ("MIN_GRID_SHARE", lambda n: grid_dtype(num=100, on=n), (35, "float16"), (36, "bfloat16")),
    ("GRID_CHANCE", lambda n: grid_dtype(num=6, on=6, temperatures=[1.0] * n), (240, "bfloat16"), (250, "float32")),
    ("MIN_ROUNDED_SHARE", rounded_values, (94, "float32"), (95, "bfloat16")),
    ("MIN_ROUNDED_TOKENS", different_values, (7, None), (8, "float32")),
    ("MIN_ROUNDING_SHARE", rounding_explains, (0.0195, None), (0.0205, "low_precision_head")),
    ("HALF", lambda x: rounding_explains(x, "float16"), (0.0195, None), (0.0205, "low_precision_head")),
    ("MAX_HEALTHY_NOISE", lambda x: excessive(x, "bfloat16", "float32"), (0.079, False), (0.081, True)),
    ("MAX_HEALTHY_NOISE", lambda x: excessive(x, "float16", "float32"), (0.0119, False), (0.0121, True)),
    ("MAX_HEALTHY_NOISE", lambda x: excessive(x, "float32", "float32"), (3.9e-3, False), (4.1e-3, True)),
    ("MAX_HEALTHY_NOISE", lambda x: excessive(x, "float64", "float64"), (3.9e-3, False), (4.1e-3, True)),
    ("EXCESS", lambda x: excessive(x, None, None), (0.079, False), (0.081, True)),
    ("MIN_WEIGHTS_NOISE", lambda x: of_weights(level=x), (0.98e-3, False), (1.02e-3, True)),
    ("MIN_TOKEN_EFFECT", lambda x: of_weights(effect=x), (0.149, False), (0.151, True)),
    ("MIN_DECLARED_SHARE", cached_prompts, (19, "change_inside_sequence"), (20, "subset")),
    ("MIN_EFFECT_IDS", lambda x: of_weights(num_ids=x), (7, False), (8, True)),
    ("MIN_TOKEN_SCORE", lambda x: of_weights(score=x), (4.9, False), (5.1, True)),
    ("MIN_EFFECT_TOKENS", effect_tokens, (399, False), (400, True)),
    ("MIN_PERSISTENCE", lambda x: changes_inside(x, excess=True), (0.069, False), (0.071, True)),
    ("MIN_CLEAR_PERSISTENCE", lambda x: changes_inside(x, excess=False), (0.119, False), (0.121, True)),
    ("MIN_SEQUENCE_SCORE", lambda x: changes_inside(0.5, excess=True, score=x), (3.9, False), (4.1, True)),
    ("UNSAMPLED_NATS", unlikely, (-2.95, False), (-3.05, True)),
    ("MIN_UNSAMPLED_RUN", lambda n: unlikely(-9.0, n), (3, False), (4, True)),
    ("MIN_UNSAMPLED_SEQUENCES", unsampled_sequences, (3, None), (4, "mask")),
    (
        "MIN_WHOLE_SCORE",
        lambda x: ErrorStructure(0.5, x, 0.0).changes_inside(is_excessive=True),
        (99, True),
        (101, False),
    ),
    (
        "MAX_UNTOLD_NOISE",
        lambda x: LogitMismatch(x, 0.08, 0.01, 0.5).is_excessive,
        (0.159, False),
        (0.161, True),
    ),
    (  # of too few tokens to tell by their ids
        "MAX_UNTOLD_NOISE",
        lambda x: LogitMismatch(x, 0.08, 0.0, 0.0).is_excessive,
        (0.159, False),
        (0.161, True),
    ),
    ("MIN_SINCE_SHARE", lambda n: subsets._since(np.arange(100), np.arange(100) >= 100 - n), (50, None), (51, 49)),
    ("MIN_CUT_TOKENS_LOST", lambda n: code_of(missing.find_missing(lost_last(n))), (2, "placeholders"), (3, "lengths")),
    ("MAX_LOGPROB", lambda x: above_zero(2, x)[0] == "not_logprobs", (0.98e-4, False), (1.02e-4, True)),
    (
        "MAX_NOT_LOGPROBS_SHARE",
        lambda n: above_zero(n),
        (50, ["not_logprobs", "placeholders"]),
        (51, ["not_logprobs"]),
    ),
    ("MIN_RAISED_TOKENS", grammar_of, (9, None), (10, "grammar")),
    ("MAX_MINOR_SHARE", lambda n: grammar_of(95, n), (6, None), (5, "grammar")),
    ("MAX_UNTOLD_NOISE", lambda x: grammar_of(50, nats=x), (7.9e-3, None), (8.1e-3, "grammar")),
    ("MIN_CORRELATION", correlated, (0.28, "unrelated"), (0.32, None)),
    ("MIN_LOGPROBS", of_tokens, (29, "too_few"), (30, "rounding")),
    ("MIN_SHARED_COUNT", shared_constant, (19, None), (20, "placeholders")),
    ("SHARED_OVER_CHANCE", lambda n: shared_constant(n, repeated=6), (60, None), (61, "placeholders")),
    (
        "MIN_UNCERTAIN_ENTROPY",
        lambda x: shared_constant(60, value=0.0, at_zero=x),
        (0.098, None),
        (0.102, "placeholders"),
    ),
    ("MAX_TIED_DISTANCE", tied, (1.7, None), (1.8, "placeholders")),
    ("MIN_TIED_SHARE", lambda n: tied(0.3, n), (2, "placeholders"), (3, None)),
    ("MIN_ALIGNED_TOKENS", begins, (5, False), (6, True)),
    ("MIN_ALL_ROUNDING_SHARE", handed_over, (0.49, False), (0.51, True)),
    ("MIN_UNSURE_REST", sure, (0.199, True), (0.201, False)),
    (
        "MAX_SURE_NOISE",
        lambda x: LogitMismatch(x, 0.08, 0.0, 0.0, is_sure=True).is_excessive,
        (0.63, False),
        (0.65, True),
    ),
    (
        "MIN_FLOAT32_TOKEN_EFFECT",
        lambda x: LogitMismatch(0.5, 1.0, x, 50.0, both_float32=True, num_ids=8).is_of_weights,
        (0.049, False),
        (0.051, True),
    ),
    (
        "MIN_FLOAT32_TOKEN_SCORE",
        lambda x: LogitMismatch(0.5, 1.0, 0.1, x, both_float32=True, num_ids=8).is_of_weights,
        (7.9, False),
        (8.1, True),
    ),
    ("FEW_TOKENS", noted, (499, True), (500, False)),
    ("MIN_ALONG", said_behind, (2.45, False), (2.55, True)),
    ("MIN_ALONG", said_behind, (-2.45, False), (-2.55, True)),
]

PATCHED_BOUNDARIES = [
    ("MIN_SHARED_UNIT_SCORE", lambda m, x: shared_unit(m, as_it_stands=x), (11.9, None), (12.1, "log_base")),
    ("MAX_SHARED_UNIT_SCORE", lambda m, x: shared_unit(m, in_log2=x), (3.9, "log_base"), (4.1, None)),
    ("MIN_OVER_CHANCE", over_chance, (3.9, "row_pairing"), (4.1, None)),
    ("MAX_ROUNDED_ROUTER_SHARE", flips_fail, (249, False), (251, True)),
    ("MIN_FALL", lambda m, x: since(m, fall=x), (1.49, "weights_differ"), (1.51, "change_inside_sequence")),
    ("MIN_FALL_SCORE", lambda m, x: since(m, score=x), (3.9, "weights_differ"), (4.1, "change_inside_sequence")),
    # the same where what is decided upon is put in the place of what would be measured
    ("MAX_ALIGNED_ROWS", PATCHED["MAX_ALIGNED_ROWS"], (256, 256), (257, 256)),
    ("MAX_SHIFTED_ROWS", PATCHED["MAX_SHIFTED_ROWS"], (64, 64), (65, 64)),
    ("MAX_PAIRED_ROWS", num_tried, (64, 64), (65, 64)),
    ("MIN_PAIRED_ROWS", num_paired, (1, None), (2, "row_pairing")),
    ("MIN_REALIGNED_ROWS", aligned_rows, (20, "retokenised"), (22, None)),
    ("MIN_LAGGED_TOKENS", lambda m, n: aligned_rows(m, 1, (n,)), (2, None), (3, "retokenised")),
    ("REALIGNED_SHARE", shift_leaves, (0.345, "shift"), (0.355, None)),
    ("MIN_SHIFTED_ROWS", lambda m, x: shift_leaves(m, 0.1, rows=x), (0.79, None), (0.8, "shift")),
    ("MIN_BROKEN_ROWS", broken_rows, (3, None), (4, "retokenised")),
    ("MIN_OWN_SCORE", lambda m, x: own_places(m, score=x), (5.9, None), (6.1, "change_inside_sequence")),
    ("MIN_PLACE_SEQUENCES", lambda m, n: own_places(m, num=n), (3, None), (4, "change_inside_sequence")),
    ("MIN_LEVEL_RATIO", lambda m, x: own_places(m, ratio=x), (2.95, None), (3.05, "change_inside_sequence")),
    ("MIN_STEEPNESS", lambda m, x: onset(m, step=x), (0.39, None), (0.41, "position_onset")),
    ("MIN_STEEPNESS", lambda m, x: onset(m, within=x), (0.39, None), (0.41, "position_onset")),
    ("MIN_SIDE_POSITIONS", lambda m, n: onset(m, place=n), (2, None), (3, "position_onset")),
    ("EXCESS", lambda m, x: onset(m, low=x), (0.079, "position_onset"), (0.081, None)),
    ("ALIKE_R2", plainer, (0.965, False), (0.975, True)),
    ("ROUTER_TAIL_RATIO", lambda m, x: routed(m, 100, x), (9.9, None), (10.1, "router_flips")),
    ("ROUTER_TAIL_SHARE", routed, (20, None), (21, "router_flips")),
    ("MIN_FLIP_NOISE", flipped_by, (0.98e-3, None), (1.02e-3, "router_flips")),
    (
        "MAX_ROUTER_TAIL_SHARE",
        lambda m, n: routed(m, n, 1e3, mixture=None, rest=0.1),
        (199, "router_flips"),
        (1001, None),
    ),
    ("ROUTER_TOP_SHARE", router_top, (0.89, None), (0.91, "router_flips")),
    ("MAX_ROUTER_TOKEN_EFFECT", lambda m, x: routed(m, 100, effect=x), (0.19, "router_flips"), (0.21, None)),
]


# --- Decisions by numbers that stand beside the formula ---------------------------------------------------------------------


def costs(moved):
    """Rows that cost 1 as they stand, and so much when moved."""
    return SimpleNamespace(cost=lambda lag=0: np.full((3, 4), moved if lag else 1.0))


def begins_aligned(monkeypatch, num_lagged):
    lags = np.zeros((10, 8), int)
    lags[:num_lagged, 3] = 1
    monkeypatch.setattr(alignment, "align", lambda grid: (lags, np.zeros(10)))
    return alignment._begins_aligned(Grid(np.full((10, 8), -1.0), np.full((10, 8), -2.0)))


def joined(monkeypatch, num):
    """`num` of 10 moved rows are moved after tokens that do not count."""
    holes = iter([True] * num + [False] * (10 - num))
    monkeypatch.setattr(alignment, "_follows_a_hole", lambda logprobs, place: next(holes))
    return aligned_rows(monkeypatch, 10, (3,) * 10)


def chosen_cuts(monkeypatch, factor):
    change = position_changes.LevelChange
    monkeypatch.setattr(
        position_changes, "best_cut", lambda y, where, margin, sign: change(5, 1.0, factor if sign > 0 else 1.0)
    )
    return len(position_changes.own_cuts(np.zeros(50), np.repeat(np.arange(5), 10), np.tile(np.arange(10), 5))[0])


def healthy_rest(monkeypatch, noise):
    rows = np.arange(8) < 4
    monkeypatch.setattr(
        subsets, "_split", lambda name, *_: subsets.Split(name, ["x"], rows, 10.0, 0.9) if name == "writer_a" else None
    )
    monkeypatch.setattr(subsets, "_noise", lambda *_: noise)
    data = noisy()
    data.sample.a.writers = list("aaaabbbb")
    return code_of(subsets.find_subset(data))


def pairs_to(monkeypatch, distinct):
    """Ten rows that agree with so many different ones."""
    return num_paired(monkeypatch, 10, (np.arange(10) % distinct + 1) % 10)


OTHER_DECISIONS = [
    ("another row's place", pairs_to, (5, None), (6, "row_pairing")),
    ("a row that agrees when moved", lambda m, x: alignment._share_of_rows(costs(x), 1), (0.59, 1.0), (0.61, 0.0)),
    ("rows that begin aligned", begins_aligned, (4, True), (5, False)),
    ("turns that were joined", joined, (8, "retokenised"), (9, "shift")),
    ("flips of a known mixture", lambda m, n: routed(m, n), (3990, "router_flips"), (4010, None)),
    ("one direction over the other", chosen_cuts, (1.95, 0), (2.05, 5)),
    ("a part whose rest is healthy", healthy_rest, (0.079, "subset"), (0.081, None)),
    (
        "a value that is impossible",
        lambda m, x: constant(-100.0, np.array([x])),
        (-51.0, None),
        (-49.0, "placeholders"),
    ),
]


@pytest.mark.parametrize(("name", "decide", "under", "over"), OTHER_DECISIONS)
def test_other_decisions_change_at_their_numbers(monkeypatch, name, decide, under, over):
    assert (decide(monkeypatch, under[0]), decide(monkeypatch, over[0])) == (under[1], over[1])


ADAPTED, PLAIN = {"model": {"adapters": ["lora"]}}, {"engine": "vllm"}


@pytest.mark.parametrize(
    ("level", "effect", "persistence", "contracts", "expected"),
    [
        (0.5, 0.0, 0.0, (PLAIN, PLAIN), ("weights_differ", None)),
        (0.05, 0.5, 0.0, (PLAIN, PLAIN), ("weights_differ", None)),
        (0.05, 0.0, 0.0, (PLAIN, PLAIN), None),
        (0.5, 0.0, 0.0, (ADAPTED, PLAIN), ("weights_differ", "adapter")),
        (0.5, 0.0, 0.0, (ADAPTED, ADAPTED), ("weights_differ", None)),
        (0.05, 0.0, 0.0, (ADAPTED, PLAIN), None),
        (0.5, 0.0, 0.1, (PLAIN, PLAIN), ("change_inside_sequence", None)),
        (0.05, 0.0, 0.1, (PLAIN, PLAIN), None),
        (0.05, 0.0, 0.13, (PLAIN, PLAIN), ("change_inside_sequence", None)),
        (0.5, 0.0, 0.1, (ADAPTED, PLAIN), ("weights_differ", "adapter")),
    ],
)
def test_weights_differ_by_size_or_by_tokens(monkeypatch, level, effect, persistence, contracts, expected):
    size = LogitMismatch(level, 0.08, effect, 9.0, num_ids=8)
    monkeypatch.setattr(weight_mismatch, "logit_mismatch", lambda data: size)
    monkeypatch.setattr(weight_mismatch, "error_structure", lambda data: ErrorStructure(persistence, 9.0))
    data = noisy()
    data.sample.a.contracts, data.sample.b.contracts = ["a"] * 8, ["b"] * 8
    data.contracts = dict(zip("ab", contracts, strict=True))
    found = weight_mismatch.find_other_weights(data)
    assert (None if not found else (found[0].code, found[0].numbers.get("cause"))) == expected


@pytest.mark.parametrize(("versions", "expected"), [((6, 4), ("rollout", 2)), ((3, 4), ("train", 1)), ((4, 4), None)])
def test_the_side_with_the_older_recorded_version_is_behind(versions, expected):
    data = noisy()
    data.sample.a.versions, data.sample.b.versions = (np.ma.array([version] * 8) for version in versions)
    found = weight_mismatch.find_declared(data)
    assert (None if not found else tuple(found[0].numbers[name] for name in ("side", "updates_behind"))) == expected


@pytest.mark.parametrize(
    ("engines", "dtypes", "code"),
    [
        (("trl", "trl"), ("float32", "float32"), "equal"),
        (("trl", "vllm"), ("float32", "float32"), "copies"),
        (("trl", "trl"), ("float32", "bfloat16"), "copies"),
        (("trl", "exact"), ("float32", "float32"), "equal"),
        (("trl", "exact"), ("float32", "bfloat16"), "copies"),
    ],
)
def test_equal_bits_are_a_copy_where_contracts_exclude_them(engines, dtypes, code):
    data = pair_data(np.full(20, -1.0), np.full(20, -1.0))
    data.sample.a.contracts, data.sample.b.contracts = ["a"], ["b"]
    data.contracts = {
        name: {"engine": engine, "dtype": dtype} for name, engine, dtype in zip("ab", engines, dtypes, strict=True)
    }
    assert code_of(equality.find_equal(data)) == code


@pytest.mark.parametrize(
    ("contracts", "code"), [(("rollout",), "grammar"), ((), None), (("train", "rollout"), None), (("train",), None)]
)
def test_a_grammar_is_said_of_the_side_that_alone_has_one_and_is_higher(contracts, code):
    assert grammar_of(100, contracts=contracts) == code


def test_one_value_for_all_tokens_under_a_grammar_is_a_placeholder():
    data = under_grammar(100)
    data.sample.b.logprobs[:] = 0.0
    assert grammar.find_grammar(data) == []
    assert code_of(detectors().find(data)) == "placeholders"


@pytest.mark.parametrize(
    ("is_related", "codes"), [(True, ["lengths", "grammar"]), (False, ["lengths", "grammar", "unrelated"])]
)
def test_sequences_without_a_grammar_are_judged_beside_those_with_one(is_related, codes):
    draw = np.random.default_rng(0)
    a = -draw.exponential(1.0, 400) - 0.1
    b = a + np.concatenate([1 - np.exp(a[:200]), np.zeros(200)]) + 1e-6 * draw.normal(size=400)
    if not is_related:
        b[200:] = -draw.exponential(1.0, 200) - 0.1
    b[390:] = np.nan
    data = pair_data(a, b, [200, 200])
    data.sample.b.contracts, data.contracts = ["with", "without"], {"with": {"structured_outputs": True}}
    found = detectors().find(data)
    assert [finding.code for finding in found] == codes
    assert [finding.share for finding in found[:2]] == pytest.approx([10 / 400, 200 / 390], abs=0.02)


@pytest.mark.parametrize(("name", "decide", "under", "over"), BOUNDARIES)
def test_a_decision_changes_at_its_threshold(name, decide, under, over):
    assert (decide(under[0]), decide(over[0])) == (under[1], over[1])


@pytest.mark.parametrize(("name", "decide", "under", "over"), PATCHED_BOUNDARIES)
def test_a_decision_on_a_measured_number_changes_at_its_threshold(monkeypatch, name, decide, under, over):
    assert (decide(monkeypatch, under[0]), decide(monkeypatch, over[0])) == (under[1], over[1])


def test_a_token_s_usual_level_is_shrunk_by_ten_tokens():
    # Two ids, 10 tokens each: the levels lie log(4) / 2 about their mean, of which half is taken for the ids' own.
    b = np.full(20, math.log(0.5))
    d = np.repeat([0.01, 0.04], 10)
    data = pair_data(b - d, b, tokens=np.repeat([1, 2], 10))
    centred = np.repeat([data.level[0], data.level[-1]], 10) - data.level.mean()
    assert data.level_beyond_tokens == pytest.approx(data.level - centred / 2, abs=1e-12)


def test_persistence_is_over_one_two_and_four_tokens():
    # Signs of period 2 and then of period 4: correlations -1, 1, 1 and 0, -1, 1 over the three lags.
    for period, expected in ((2, 1 / 3), (4, 0.0)):
        sign = np.where(np.arange(4000) % period < period // 2, 1.0, -1.0)
        b = np.full(4000, math.log(0.5))
        data = pair_data(b - 0.01 * np.exp(sign), b, tokens=np.zeros(4000, int))
        assert error_structure(data).persistence == pytest.approx(expected, abs=2e-3)


def test_the_movement_of_the_weights_is_shrunk_by_three_tokens():
    # One sequence a step, two contexts, of which one comes twice: its mean of d counts 2 / (2 + 3), the other's 1 / (1 + 3).
    draw = np.random.default_rng(3)
    a = -draw.exponential(1.0, 12 * 5) - 0.1
    data = pair_data(a, a - draw.normal(0, 0.1, 60), [5] * 12, tokens=np.tile([1, 2, 1, 2, 3], 12), steps=np.arange(12))
    assert weight_mismatch.along_movement(data) == pytest.approx(along_by_hand(data), rel=1e-12)


def along_by_hand(data):
    """The definition of `along_movement`, token by token."""
    sample, steps = data.sample, data.sample.steps[data.seq]
    before = [-1 if t == 0 else int(sample.tokens[k - 1]) for k, t in enumerate(data.position)]
    contexts = list(zip(sample.tokens.tolist(), before, strict=True))
    d = np.clip(data.d, -3 * data.rms(), 3 * data.rms())
    bins = np.digitize(data.a, np.quantile(data.a, np.linspace(0, 1, 11)[1:-1]))
    d = d - np.array([d[bins == each].mean() for each in bins])
    products = np.zeros(sample.num_sequences)
    for k, context in enumerate(contexts):
        alike = np.array([each == context for each in contexts])
        moved = np.clip(data.a[k] - data.a[alike].mean(), -3, 3)
        products[data.seq[k]] += d[alike].sum() / (alike.sum() + 3) * (steps[k] - steps[alike].mean()) * moved
    return products.sum() / np.sqrt(np.sum(products**2))


OTHERWISE_HELD = {"MIN_GRID", "TOKEN_SHRINKAGE", "PERSISTENCE_LAGS", "MOVEMENT_SHRINKAGE"}
"""Thresholds that tests of their own hold."""


def test_every_threshold_has_its_boundary():
    source = ast.parse(Path(thresholds.__file__).read_text(encoding="utf-8"))
    names = {target.id for node in source.body if isinstance(node, ast.Assign) for target in node.targets}
    assert names == {case[0] for case in (*BOUNDARIES, *PATCHED_BOUNDARIES)} | OTHERWISE_HELD


# --- Verdicts -------------------------------------------------------------------------------------------------------------

ENGINE = {
    "padded_vocabulary", "weights_differ", "computation_differs", "change_inside_sequence", "position_onset", "subset", "low_precision_head",
    "router_flips",
}  # fmt: skip


def result_of(*codes):
    findings = tuple(
        Finding(
            code=code, signal="equal_bits", effect=0.0, share=1.0,
            numbers={"num_tokens": 2, "a": "train", "b": "rollout", "contracts_known": 0},
        )
        for code in codes
    )  # fmt: skip
    return CheckResult(
        trace="run", pair="train:rollout", num_tokens=2, num_sampled_tokens=2, rms_d=0.1, findings=findings
    )


@pytest.mark.parametrize("code", [*FAULTS, *HEALTHY])
def test_a_fault_fails_and_says_what_is_broken(code, monkeypatch):
    result = result_of(code)
    broken_part = None if code in HEALTHY else "engine" if code in ENGINE else "recording"
    assert (result.is_valid, result.broken) == (code in HEALTHY, broken_part)
    told = checked_json(result)
    assert (told["is_valid"], told["broken"], told["findings"][0]["broken"]) == (
        result.is_valid,
        broken_part,
        broken_part,
    )
    assert told["findings"][0]["fails"] is (code in FAULTS)
    head = {
        None: "VALID: ",
        "recording": "NOT VALID, the recording is broken: ",
        "engine": "NOT VALID, an engine is broken: ",
    }
    assert checked_text(result).startswith("TOO FEW TOKENS: " if code == "too_few" else head[broken_part])
    monkeypatch.setattr(tim_trace.analysis, "check", lambda *_, **__: result)
    assert CliRunner().invoke(cli.main, ["check", "run"]).exit_code == (1 if code in FAULTS else 0)


def test_one_fault_among_findings_fails():
    assert not result_of("equal", "lengths").is_valid
    assert result_of("equal", "lengths").broken == "recording"
    assert result_of("weights_differ", "lengths").broken == "engine"


def test_a_title_names_the_cause_where_the_recording_says_it():
    for cause, words in WEIGHT_CAUSES.items():
        finding = Finding(code="weights_differ", signal="contract", effect=0.0, share=1.0, numbers={"cause": cause})
        assert finding.title == words
    assert Finding(code="weights_differ", signal="logits", effect=0.0, share=1.0).title == FAULTS["weights_differ"]


def test_the_share_that_was_inspected_is_said():
    assert "2 tokens (all inspected individually)" in checked_text(result_of("equal"))
    some = CheckResult(
        trace="run",
        pair="train:rollout",
        num_tokens=3,
        num_sampled_tokens=2,
        rms_d=0.1,
        findings=result_of("equal").findings,
    )
    assert "3 tokens (statistics on all, 2 inspected individually)" in checked_text(some)


@pytest.mark.parametrize(
    ("holes", "copied_rows", "equal", "misplaced", "others", "expected"),
    [
        ([], [], [], [], [], ["rounding"]),
        ([], [], [], [], ["subset"], ["subset"]),
        ([], [], [], ["shift"], ["subset"], ["shift"]),
        (["lengths"], [], [], ["shift"], ["subset"], ["shift", "lengths"]),
        (["lengths"], [], [], [], ["subset"], ["lengths", "subset"]),
        (["lengths"], [], [], [], [], ["lengths"]),
        (["lengths"], ["copies"], [], ["shift"], [], ["copies", "lengths"]),
        ([], ["copies"], ["equal"], [], [], ["copies"]),
        ([], [], ["equal"], ["shift"], [], ["equal"]),
        (["lengths"], [], ["equal"], [], [], ["lengths"]),
        (["lengths"], [], ["copies"], [], [], ["lengths", "copies"]),
    ],
)
def test_the_order_of_findings(monkeypatch, holes, copied_rows, equal, misplaced, others, expected):
    detectors = import_module("tim_trace.analysis.check.detectors")  # `analysis.check` is the function

    def found(codes):
        return lambda data: [Finding(code=code, signal="", effect=0.0, share=1.0) for code in codes]

    monkeypatch.setattr(detectors, "find_missing", found(holes))
    monkeypatch.setattr(detectors, "find_constants", lambda data: [])
    monkeypatch.setattr(detectors, "find_copied_rows", found(copied_rows))
    monkeypatch.setattr(detectors, "find_equal", found(equal))
    monkeypatch.setattr(detectors, "find_unit", found(misplaced))
    monkeypatch.setattr(detectors, "_ALIGNMENT", ())
    monkeypatch.setattr(detectors, "_SCALE", (found(others),))
    monkeypatch.setattr(detectors, "_PARTS", ())
    monkeypatch.setattr(detectors, "_STATE", ())
    assert [finding.code for finding in judge(noisy(), "train:rollout").findings] == expected
