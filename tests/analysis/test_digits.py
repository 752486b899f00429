"""Every statistic of a pair against mpmath, where sums of doubles would cancel: tiny and huge d, probabilities near 1 and near 0."""

import mpmath
import numpy as np
import pytest
from mpmath import mpf
from shared import rest_slow
from tim_trace.analysis.check.check import gather
from tim_trace.analysis.corrections import corrections
from tim_trace.analysis.diagnosis.diagnose import own_metrics
from tim_trace.analysis.facts.mismatch import read_step_mismatch
from tim_trace.analysis.facts.read_series import read_series
from tim_trace.analysis.gate.condition import SequenceColumns
from tim_trace.analysis.gate.gate import gate
from tim_trace.analysis.queries.catalogue import query
from tim_trace.analysis.statistics.estimators import FROM_SUMS
from tim_trace.analysis.stats import stats
from tim_trace.analysis.trace.pair_sums import COUNTS, OF_DIFFERENCES
from tim_trace.analysis.trace.sums import summarize
from tim_trace.analysis.views import connect, open_database
from tim_trace.schemas.errors import TimTraceWarning
from tim_trace.tracer.recorder import Recorder

mpmath.mp.dps = 40

# A few hundred additions of rounded terms, at 1.1e-16 each.
DIGITS = 1e-13
SUMMED = ("k3", "k3_positive", "k3_negative", "mean_abs_d", "mean_d", "ess", "entropy")


def draw_lengths(draw, num, longest=40):
    return draw.integers(1, longest, num)


def tiny(draw, n):
    """d of about 1e-9: probabilities within 1e-2 of 1, where float32 holds such differences."""
    rollout = -draw.uniform(0.004, 0.008, n)
    return rollout + draw.choice([-2, -1, 0, 1, 2], n) * 4.7e-10, rollout


def near_one(draw, n):
    """Probabilities within 1e-12 of 1."""
    rollout = -draw.exponential(1e-12, n)
    return rollout * draw.uniform(0.5, 1.5, n), rollout


def far_below(draw, n):
    """d from -24 to -17."""
    rollout = -draw.exponential(1.0, n)
    return rollout - draw.uniform(17, 24, n), rollout


def far_above(draw, n):
    """d of about 20."""
    rollout = -draw.uniform(20, 22, n)
    return rollout + draw.uniform(19, 20, n), rollout


def mixed(draw, n):
    """All of these in one sequence."""
    parts = [kind(draw, n) for kind in (tiny, near_one, far_below, far_above)]
    chosen = draw.integers(0, 4, n)
    return tuple(np.choose(chosen, [part[side] for part in parts]) for side in (0, 1))


def extreme(draw, n):
    """Differences of which a double does not hold the exponential."""
    rollout = -draw.uniform(900, 2000, n)
    return rollout + draw.uniform(-900, 900, n), rollout


def alike(draw, n):
    """One large probability, and others that differ in their last digits."""
    logprobs = [np.full(n, np.log(0.5)) + draw.integers(-3, 4, n) * 6e-8 for _ in range(2)]
    for values in logprobs:
        values[0] = -1e-3
    return tuple(logprobs)


def crowded(draw, n):
    """Probabilities of about a third that differ in float32's last digits alone."""
    return tuple(-1 - draw.integers(0, 4, n) * 1.2e-7 for _ in range(2))


KINDS = (tiny, near_one, far_below, far_above, mixed, extreme, alike, crowded)


def make(kind, num_sequences, seed=0, longest=40):
    """Step -> (train, rollout) float32 arrays of sequences, two steps where there are that many."""
    draw = np.random.default_rng(seed)
    sequences = [
        tuple(side.astype(np.float32) for side in kind(draw, n)) for n in draw_lengths(draw, num_sequences, longest)
    ]
    half = max(num_sequences // 2, 1)
    return {step: part for step, part in ((1, sequences[:half]), (4, sequences[half:])) if part}


def record(path, steps):
    with Recorder(path) as recorder:
        for step, sequences in steps.items():
            batch = recorder.add_sequences(
                step=step,
                seq_ids=[f"{place:02d}" for place in range(len(sequences))],
                response_ids=[[0] * len(train) for train, _ in sequences],
            )
            recorder.add_scores("train", batch, logprobs=[train.tolist() for train, _ in sequences])
            recorder.add_scores("rollout", batch, logprobs=[rollout.tolist() for _, rollout in sequences])
    return path


def exact(sequences):
    """The statistics in 40 digits; None where there is no spread to correlate."""
    rows = [[(mpf(float(a)), mpf(float(b))) for a, b in zip(*pair, strict=True)] for pair in sequences]
    tokens = [pair for row in rows for pair in row]
    n, s = len(tokens), len(rows)
    d = [a - b for a, b in tokens]
    sums = [mpmath.fsum(a - b for a, b in row) for row in rows]
    pa, pb = ([mpmath.exp(pair[side]) for pair in tokens] for side in (0, 1))

    def mean(values):
        values = list(values)
        return mpmath.fsum(values) / len(values)

    def share(logs):
        weights = [mpmath.exp(x) for x in logs]
        return mpmath.fsum(weights) ** 2 / (len(weights) * mpmath.fsum(w * w for w in weights))

    mean_a, mean_b = mean(pa), mean(pb)
    spread_a, spread_b = (mpmath.fsum((p - m) ** 2 for p in side) for side, m in ((pa, mean_a), (pb, mean_b)))
    covariance = mpmath.fsum((p - mean_a) * (q - mean_b) for p, q in zip(pa, pb, strict=True))
    return {
        "num_sequences": s,
        "num_tokens": n,
        "k1": -mean(d),
        "k2": mean(x * x / 2 for x in d),
        "k3": mean(mpmath.expm1(x) - x for x in d),
        "mean_abs_d": mean(abs(x) for x in d),
        "rms_d": mpmath.sqrt(mean(x * x for x in d)),
        "max_abs_d": max(abs(x) for x in d),
        "prob_diff_mean": mean(abs(p - q) for p, q in zip(pa, pb, strict=True)),
        "prob_diff_max": max(abs(p - q) for p, q in zip(pa, pb, strict=True)),
        # Squares below 1e-300 are 0 to a double.
        "prob_pearson": covariance / mpmath.sqrt(spread_a * spread_b) if min(spread_a, spread_b) > 1e-300 else None,
        "log_ppl_abs_diff_sum": mean(abs(x) for x in sums),
        "log_ppl_abs_diff_mean": mean(abs(x) / len(row) for x, row in zip(sums, rows, strict=True)),
        "ess_token": share(d),
        "ess_sequence": share(sums),
        "chi2_token": mean(mpmath.expm1(2 * x) for x in d),
        "chi2_sequence": mean(mpmath.expm1(2 * x) for x in sums),
        # What a sum of both signs cancels to is the data's own: its digits are those of the sizes.
        "sizes": {
            "k1": mean(abs(x) for x in d),
            "prob_pearson": mpf(1),
            "chi2_token": mean(abs(mpmath.expm1(2 * x)) for x in d),
            "chi2_sequence": mean(abs(mpmath.expm1(2 * x)) for x in sums),
        },
    }


def same(row, wanted, names=None):
    for name, value in wanted.items():
        if name == "sizes" or (names is not None and name not in names):
            continue
        if value is None:
            assert row[name] is None or np.isnan(row[name]), name
        elif abs(value) > mpf("1.79e308"):
            assert row[name] == np.inf, name
        else:
            size = wanted["sizes"].get(name, abs(value))
            assert abs(row[name] - value) <= max(DIGITS * size, mpf("1e-300")), (name, row[name], float(value))


@pytest.mark.parametrize("kind", rest_slow(KINDS, 3), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("num_sequences", "longest"),
    [(1, 2), pytest.param(1, 40, marks=pytest.mark.slow), pytest.param(50, 2, marks=pytest.mark.slow), (12, 40)],
)
def test_every_statistic_has_the_digits_of_mpmath(tmp_path, kind, num_sequences, longest):
    steps = make(kind, num_sequences, num_sequences, longest)
    trace = record(tmp_path / "run", steps)
    every = [sequence for part in steps.values() for sequence in part]
    of_run, of_step = exact(every), {step: exact(part) for step, part in steps.items()}
    for has_sums in (False, True):
        assert (trace / "sums").exists() == has_sums
        database = open_database(trace)
        (row,) = stats(database).dicts()
        same(row, of_run)
        for row in stats(database, by="step").dicts():
            same(row, of_step[row["step"]])
    for row, sequence in zip(stats(database, by="sequence").dicts(), every, strict=True):
        same(row, exact([sequence]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_verl_s_numbers_have_their_digits_too(tmp_path, kind):
    steps = make(kind, 12)
    trace = record(tmp_path / "run", steps)
    of_run = stats(trace, like="verl").dicts()
    of_step = stats(trace, like="verl", by="step").dicts()
    every = [sequence for part in steps.values() for sequence in part]
    for row, sequences in [(of_run[0], every), *((row, steps[row["step"]]) for row in of_step)]:
        tokens = [(mpf(float(a)), mpf(float(b))) for pair in sequences for a, b in zip(*pair, strict=True)]
        diff = [abs(mpmath.exp(a) - mpmath.exp(b)) for a, b in tokens]
        clamped = [mpmath.expm1(2 * min(max(a - b, mpf(-20)), mpf(20))) for a, b in tokens]
        correlation = row["training/rollout_actor_probs_pearson_corr"]
        wanted = exact(sequences)["prob_pearson"]
        assert np.isnan(correlation) if wanted is None else abs(correlation - wanted) < DIGITS
        n = len(tokens)
        close(row["training/rollout_probs_diff_std"], mpmath.sqrt(squares(diff) / (n - 1)))
        close(
            row["rollout_corr/chi2_token"],
            mpmath.fsum(clamped) / n,
            at_least=DIGITS * mpmath.fsum(map(abs, clamped)) / n,
        )
        close(row["rollout_corr/k3_kl"], exact(sequences)["k3"])


def squares(values):
    mean = mpmath.fsum(values) / len(values)
    return mpmath.fsum((value - mean) ** 2 for value in values)


def close(value, wanted, at_least=1e-300):
    if wanted > mpf("1.79e308"):
        assert value == np.inf
    else:
        assert abs(value - wanted) <= max(DIGITS * abs(wanted), at_least), (value, float(wanted))


def test_a_probability_that_never_changes_has_no_correlation(tmp_path):
    # 0.1 and sums of it are rounded: nothing of that may look like spread.
    logprob = np.float32(np.log(0.1))
    steps = {1: [(np.linspace(-2, -1, n, dtype=np.float32), np.full(n, logprob)) for n in range(1, 40)]}
    trace = record(tmp_path / "run", steps)
    assert [row["prob_pearson"] for by in ("run", "step") for row in stats(trace, by=by).dicts()] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_last_digits_do_not_depend_on_where_the_sums_come_from(tmp_path, kind):
    trace = record(tmp_path / "run", make(kind, 12))
    query = "SELECT * FROM pair_sequences('train', 'rollout')"
    from_sql = connect(trace).execute(query).fetchall()
    rows = [{by: stats(trace, by=by).rows for by in ("sequence", "run", "step")} for _ in range(2)]
    assert rows[0] == rows[1]
    assert from_sql == rows[0]["sequence"] == connect(trace).execute(query).fetchall()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_gate_check_and_dynamics_use_the_same_sums(tmp_path, kind):
    steps = make(kind, 12)
    trace = record(tmp_path / "run", steps)
    wanted = exact([sequence for part in steps.values() for sequence in part])
    columns = SequenceColumns.read(open_database(trace), ("train", "rollout")).values
    totals = {name: values.sum() for name, values in columns.items()}
    same({name: formula(totals) for name, formula in FROM_SUMS.items()}, wanted, set(FROM_SUMS))
    from_tokens, by_tokens = own(trace), ess_by_step(trace)
    stats(trace, by="step")
    for metrics, ess in ((from_tokens, by_tokens), (own(trace), ess_by_step(trace))):
        same(metrics, wanted, ("k3", "rms_d", "prob_diff_mean", "chi2_token", "ess_token"))
        for step, value in ess.items():
            same({"ess_token": value}, exact(steps[step]), ("ess_token",))


@pytest.mark.slow
def test_the_effective_sample_size_of_very_negative_d_is_right_wherever_it_is_read(tmp_path):
    # d from -24 to -17: (n + sum of exp(d) - 1)^2 has no digit of it left, and gave 2.2, NaN or infinity.
    draw = np.random.default_rng(5)
    d = np.float32(draw.uniform(-24, -17, (40, 30)))
    steps = {step: [(row, np.zeros(30, np.float32)) for row in d[20 * (step > 1) :][:20]] for step in (1, 2)}
    trace = record(tmp_path / "run", steps)

    def share(values):
        weights = [mpmath.exp(float(x)) for x in np.ravel(values)]
        return float(mpmath.fsum(weights) ** 2 / (len(weights) * mpmath.fsum(w * w for w in weights)))

    of_run, of_step = share(d), {1: share(d[:20]), 2: share(d[20:])}
    assert 0.2 < of_run < 0.4
    for _ in range(2):  # from the tokens, and from the sums that are kept then
        database = open_database(trace)
        found = {"stats": stats(database).dicts()[0]["ess_token"], "check": own(trace)["ess_token"]}
        found["gate"] = gate(trace, fail_on=["tim.ess_token<0.01"]).verdicts[0].value
        found["SQL"] = connect(trace).execute("SELECT ess_token FROM pair_runs('train', 'rollout')").fetchone()[0]
        with pytest.warns(TimTraceWarning, match="no advantages"):
            rules = {row["correction"]: row["ess_token"] for row in corrections(trace).dicts()}
        # corrections clamps d to 20 nats.
        assert rules["token-is"] == pytest.approx(share(np.maximum(d, np.float32(-20))), rel=1e-12)
        assert found == {name: pytest.approx(of_run, rel=1e-12) for name in found}
        by_step = {row["step"]: row["ess_token"] for row in query("ess", trace).dicts()}
        for each in (by_step, ess_by_step(trace), dict(zip(*ess_series(trace), strict=True))):
            assert each == {step: pytest.approx(value, rel=1e-12) for step, value in of_step.items()}


def ess_series(trace):
    """As `watch`, `dynamics` and the report read it."""
    series = read_series(open_database(trace))["ess"]
    return series.steps.tolist(), series.values.tolist()


def own(trace):
    sums = (*COUNTS, *OF_DIFFERENCES)
    return own_metrics(gather(open_database(trace), ("train", "rollout"), trace=str(trace), sums=sums))


def ess_by_step(trace):
    columns = read_step_mismatch(open_database(trace), ("train", "rollout"))
    (ess,) = (column for column in columns if column.name == "ess")
    return dict(zip(ess.steps.tolist(), ess.values.tolist(), strict=True))


def test_a_series_has_the_same_bits_whatever_the_order_of_the_rows_and_with_or_without_stored_sums(tmp_path):
    draw = np.random.default_rng(7)
    rows = [(f"{number}", float(draw.normal()), *mixed(draw, 30)) for number in range(40)]
    found = []
    for name, order in (
        ("given", rows),
        ("reversed", rows[::-1]),
        ("unsummed", rows),
        ("unsummed reversed", rows[::-1]),
    ):
        with Recorder(tmp_path / name) as recorder:
            for step in range(1, 4):
                ids, advantages, trained, sampled = zip(*order, strict=True)
                batch = recorder.add_sequences(
                    step=step, seq_ids=[f"{step}-{number}" for number in ids], response_ids=[[1] * 30] * len(order),
                    reward=advantages, advantage=advantages,
                )  # fmt: skip
                recorder.add_scores("train", batch, logprobs=[np.float32(row) for row in trained])
                recorder.add_scores("rollout", batch, logprobs=[np.float32(row) for row in sampled])
        if not name.startswith("unsummed"):
            summarize(tmp_path / name)
        series = read_series(open_database(tmp_path / name), pair=("train", "rollout"))
        found.append({column: one.values.tobytes() for column, one in series.items() if column in SUMMED})
    assert len(found[0]) == len(SUMMED)
    assert found == [found[0]] * 4
