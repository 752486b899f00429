"""How a mismatch spreads over tokens, against plain loops over what was recorded, and against its own SQL."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tim_trace.analysis.breakdowns.breakdowns import read_breakdowns, rounded_up
from tim_trace.analysis.views import open_database
from tim_trace.tracer.recorder import Recorder

THREE = ("rollout", "train", "current")
STEPS, ROWS, LONGEST = 4, 7, 21


def make(seed, steps=STEPS, by_token=False):
    """Rows of every step: four passes' logprobs with NaN, infinities and tokens that a pass gave nothing, masks, entropies."""
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(steps):
        for row in range(ROWS):
            n = int(draw.integers(1, LONGEST + 1))
            rollout = (-draw.exponential(1.0, n)).astype("f4")
            train, now, later = (np.minimum(rollout + draw.normal(0, 0.1, n), 0).astype("f4") for _ in range(3))
            for values, hole in ((rollout, -np.inf), (train, np.nan), (now, np.nan)):
                values[draw.random(n) < 0.05] = hole
            advantage = draw.normal(size=n).astype("f4") if by_token else np.full(n, draw.normal())
            advantage[draw.random(n if by_token else ()) < 0.2] = 0.0
            made.append(
                {
                    "rollout": rollout, "train": train, "current": [now, later], "advantage": advantage,
                    "given": draw.random(n) > 0.1, "mask": np.ones(n, bool) if row == 0 else draw.random(n) > 0.3,
                    "entropy": np.where(draw.random(n) < 0.1, np.nan, draw.exponential(1.0, n)).astype("f4"),
                }
            )  # fmt: skip
    return made


def write(path, rows, passes=THREE, advantages="one", entropy="rollout", order=None):
    """Record them, the rows of a step in an order of its own."""
    with Recorder(path) as recorder:
        order = list(range(ROWS)) if order is None else order
        for step in range(1, len(rows) // ROWS + 1):
            chosen = [rows[(step - 1) * ROWS + row] for row in order]
            given_by = {
                "one": {"advantage": [float(each["advantage"][0]) for each in chosen]},
                "each": {"advantage": [each["advantage"] for each in chosen]},
                "none": {},
            }[advantages]
            batch = recorder.add_sequences(
                step=step, response_ids=[[1] * len(each["mask"]) for each in chosen],
                response_mask=[each["mask"].tolist() for each in chosen],
                seq_ids=[f"{step}-{row}" for row in order], **given_by,
            )  # fmt: skip
            for name in passes:
                more = {"scored_mask": [each["given"].tolist() for each in chosen]} if name == "train" else {}
                if name == entropy:
                    more["entropy"] = [each["entropy"] for each in chosen]
                uses = (
                    zip(*(each[name] for each in chosen), strict=True)
                    if name == "current"
                    else [[each[name] for each in chosen]]
                )
                for logprobs in uses:
                    recorder.add_scores(name, batch, logprobs=list(logprobs), **more)
    return path


def compared(rows):
    """One tuple a compared token: step, row, position, length, d, p, entropy."""
    for number, row in enumerate(rows):
        for t in range(len(row["mask"])):
            a = float(row["train"][t]) if row["given"][t] else math.nan
            b = float(row["rollout"][t])
            if row["mask"][t] and math.isfinite(a) and math.isfinite(b):
                yield (
                    number // ROWS + 1, number, t, len(row["mask"]), a - b, np.exp(b), float(row["entropy"][t]),
                )  # fmt: skip


def place(edges, value):
    """The bin that holds a value; those outside are in the first or the last."""
    return int(np.clip(np.searchsorted(edges, value, "right") - 1, 0, len(edges) - 2))


def power(value):
    """The largest power of two up to a number; 0 for 0."""
    return 1 << (value.bit_length() - 1) if value else 0


def check_profile(profile, pairs):
    """Against a loop over (start of the bin, d)."""
    by_bin = {}
    for start, d in pairs:
        by_bin.setdefault(start, []).append(d)
    assert profile.start.tolist() == sorted(by_bin)
    for start, num, *found in zip(profile.start, profile.num, profile.mean_abs_d, profile.rms_d, strict=True):
        d = np.array(by_bin[start])
        assert num == len(d)
        assert found == pytest.approx([np.mean(abs(d)), np.sqrt(np.mean(d * d))], rel=1e-9, abs=1e-15)


def check_shapes(spread, tokens):
    density = np.zeros(spread.density.shape, int)
    for _, _, _, _, d, p, _ in tokens:
        density[place(spread.d_edges, d), place(np.linspace(0, 1, 41), p)] += 1
    assert np.array_equal(spread.density, density)
    check_profile(spread.profiles["position"], [(power(each[2]), each[4]) for each in tokens])
    check_profile(spread.profiles["length"], [(power(each[3]), each[4]) for each in tokens])
    of_entropy = [(math.floor(each[6] * 4) / 4, each[4]) for each in tokens if math.isfinite(each[6])]
    check_profile(spread.profiles["entropy"], of_entropy)


@pytest.mark.parametrize("seed", range(3))
def test_shapes_are_those_of_a_loop_over_tokens(tmp_path, seed):
    rows = make(seed)
    spread = read_breakdowns(open_database(write(tmp_path / "trace", rows)))
    tokens = list(compared(rows))
    assert spread.num_tokens == len(tokens) == spread.density.sum()
    assert spread.num_recorded_tokens == sum(len(row["mask"]) for row in rows)
    check_shapes(spread, tokens)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Rows and their trace, by what they have, without a recorded loss."""
    found, folder = {}, tmp_path_factory.mktemp("spread")

    def of(advantages, passes):
        if (advantages, passes) not in found:
            rows = make(3, by_token=advantages == "each")
            path = write(folder / f"{advantages}{len(passes)}", rows, passes=passes, advantages=advantages)
            found[advantages, passes] = rows, open_database(path)
        return found[advantages, passes]

    return of


def test_its_sql_gives_the_same_figures(opened):
    _, database = opened("each", THREE)
    spread = read_breakdowns(database)
    density = np.zeros_like(spread.density)
    for x, y, num in database.ask(spread.sql["density"]).rows:
        density[y, x] = num
    assert np.array_equal(density, spread.density)
    for axis, profile in spread.profiles.items():
        rows = database.ask(spread.sql[axis]).rows
        columns = (profile.start, profile.num, profile.mean_abs_d, profile.rms_d)
        assert rows == list(zip(*(column.tolist() for column in columns), strict=True))


def test_only_the_first_use_of_a_sequence_is_read(opened):
    rows, database = opened("each", THREE)
    spread = read_breakdowns(database, ("current", "rollout"))
    finite = [np.isfinite(row["current"][0]) & np.isfinite(row["rollout"]) & row["mask"] for row in rows]
    assert spread.num_tokens == sum(each.sum() for each in finite)
    assert sum(num for *_, num in database.ask(spread.sql["density"]).rows) == spread.num_tokens


def test_all_but_one_in_a_hundred_lie_in_the_envelope(tmp_path):
    rows = make(7, steps=20)
    spread = read_breakdowns(open_database(write(tmp_path / "trace", rows)))
    scaled = [abs(each[4]) / (1 - each[5]) for each in compared(rows) if each[5] < 0.99]
    assert np.mean(np.array(scaled) <= spread.envelope) >= 0.99
    assert np.mean(np.array(scaled) < spread.envelope) < 0.99


def test_the_axis_of_d_leaves_out_one_in_a_thousand(tmp_path):
    rows = make(8, steps=30)
    spread = read_breakdowns(open_database(write(tmp_path / "trace", rows)))
    size = np.abs([each[4] for each in compared(rows)])
    assert np.mean(size > spread.d_edges[-1]) <= 0.001
    assert np.allclose(spread.d_edges, -spread.d_edges[::-1])


def test_a_sample_is_the_same_whatever_the_order_of_the_rows(tmp_path):
    rows, draw = make(9), np.random.default_rng(9)
    for row in rows:
        # Of many sizes, so that adding in another order gives other last digits.
        scale = 10.0 ** draw.uniform(-6, 1, len(row["mask"]))
        row["rollout"], row["train"] = ((row[name] * scale).astype("f4") for name in ("rollout", "train"))
    there = open_database(write(tmp_path / "there", rows))
    back = open_database(write(tmp_path / "back", rows, order=list(range(ROWS))[::-1]))
    first, again, second = (read_breakdowns(database, max_tokens=250) for database in (there, there, back))
    assert first.num_tokens < read_breakdowns(there).num_tokens
    for other in (again, second):
        assert first.how == other.how
        assert first.envelope == other.envelope
        assert np.array_equal(first.density, other.density)
        for name in ("position", "length", "entropy"):
            for field in ("start", "num", "mean_abs_d", "rms_d"):
                mine, its = (getattr(each.profiles[name], field) for each in (first, other))
                np.testing.assert_allclose(mine, its, rtol=1e-12)


def test_a_sample_is_of_whole_sequences_and_no_larger_than_asked(tmp_path):
    rows = make(10)
    database = open_database(write(tmp_path / "trace", rows))
    spread = read_breakdowns(database, max_tokens=200)
    assert 0 < spread.num_tokens <= 200
    assert "hash of step and seq_id" in spread.how
    read = spread.profiles["length"].num.sum()
    sums = {sum(each[1] == number for each in compared(rows)) for number in range(len(rows))}
    assert read == spread.num_tokens
    assert read_breakdowns(database, max_tokens=1).num_tokens in sums


def test_steps_are_the_notable_ones_and_others_evenly_spread(tmp_path):
    database = open_database(write(tmp_path / "trace", make(11, steps=9), entropy=None))
    assert "all 9 steps" in read_breakdowns(database).how
    rows = make(11, steps=9)
    spread = read_breakdowns(database, notable=(7, 99), max_steps=3)
    assert spread.num_tokens == sum(each[0] in (1, 7, 9) for each in compared(rows))
    assert "3 of the 9 steps" in spread.how
    assert "1 notable" in spread.how
    of_two = read_breakdowns(database, notable=(7, 6, 5), max_steps=2)
    assert of_two.num_tokens == sum(each[0] in (6, 7) for each in compared(rows))


def test_entropies_are_the_loss_s_where_neither_pass_has_any(tmp_path):
    rows = make(13)
    own, of_loss = (
        read_breakdowns(open_database(write(tmp_path / name, rows, entropy=name))) for name in ("rollout", "current")
    )
    assert own.profiles["entropy"].num.tolist() == of_loss.profiles["entropy"].num.tolist()


def test_what_was_not_recorded_is_none(tmp_path):
    rows = make(12)
    spread = read_breakdowns(open_database(write(tmp_path / "bare", rows, advantages="none", entropy=None)))
    assert {"density", "position", "length"} == set(spread.sql)
    assert {"position", "length"} == set(spread.profiles)
    assert read_breakdowns(open_database(write(tmp_path / "one", rows, passes=("rollout",)))) is None


def test_passes_without_a_common_finite_token_have_no_spread(tmp_path):
    with Recorder(tmp_path / "trace") as recorder:
        batch = recorder.add_sequences(step=1, response_ids=[[1, 2]])
        recorder.add_scores("rollout", batch, logprobs=[[-1.0, math.nan]])
        recorder.add_scores("train", batch, logprobs=[[math.nan, -1.0]])
    assert read_breakdowns(open_database(tmp_path / "trace")) is None


def test_equal_passes_are_all_in_the_middle(tmp_path):
    with Recorder(tmp_path / "trace") as recorder:
        batch = recorder.add_sequences(step=1, response_ids=[[1, 2, 3]])
        for name in ("rollout", "train"):
            recorder.add_scores(name, batch, logprobs=[[-1.0, -0.5, 0.0]])
    spread = read_breakdowns(open_database(tmp_path / "trace"))
    middle = len(spread.d_edges) // 2 - 1
    assert spread.density[middle].sum() == 3
    assert spread.density[middle, -1] == 1
    assert spread.envelope == 0


@given(st.floats(1e-9, 1e9))
def test_a_rounded_up_number_is_no_smaller_and_little_larger(value):
    assert value * (1 - 1e-12) <= rounded_up(value) <= value * 1.11
