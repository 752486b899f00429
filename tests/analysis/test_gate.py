"""Conditions on a run: what they mean, their intervals, and the exit code."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from builders import make_trace, tim_trace
from tim_trace.analysis.check.check import check
from tim_trace.analysis.database import Database
from tim_trace.analysis.gate.condition import metric_named, parse_condition
from tim_trace.analysis.gate.gate import gate
from tim_trace.analysis.gate.intervals import jackknife, student_quantile
from tim_trace.analysis.gate.sums import COUNTS, LARGEST, QUANTILES, SequenceColumns
from tim_trace.analysis.stats import stats
from tim_trace.analysis.totals import FROM_SUMS
from tim_trace.schemas.errors import InvalidOption, NothingToCompare
from tim_trace.tracer.recorder import Recorder


def record(path, gaps, base=lambda place: -1.0):
    """A sequence for each list of d, over rollout logprobs of -1 or of each token's place."""
    with Recorder(path) as recorder:
        batch = recorder.add_sequences(
            step=1, prompt_ids=[[1]] * len(gaps), response_ids=[[2] * len(each) for each in gaps]
        )
        recorder.add_scores("rollout", batch, logprobs=[[base(place) for place in range(len(each))] for each in gaps])
        recorder.add_scores(
            "train", batch, logprobs=[[base(place) + d for place, d in enumerate(each)] for each in gaps]
        )
    return path


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """300 sequences of 5 to 40 tokens; the size of the gap differs from one to the next."""
    draw = np.random.default_rng(3)
    gaps = [draw.normal(0, draw.exponential(0.05), draw.integers(5, 41)).clip(-5, 0.9).tolist() for _ in range(300)]
    return record(tmp_path_factory.mktemp("gate") / "run", gaps, lambda place: -1 - place % 3)


def judged(trace, *conditions, **options):
    return gate(trace, fail_on=conditions, **options).verdicts


def test_a_condition_says_what_fails():
    condition = parse_condition(" verl.rollout_corr/k3_kl >= 1e-3 ")
    assert (condition.source, condition.metric, condition.sign, condition.bound) == (
        "verl", "rollout_corr/k3_kl", ">=", 1e-3,
    )  # fmt: skip
    assert [parse_condition(f"tim.k3{sign}2").holds(2) for sign in (">", ">=", "<", "<=")] == [False, True, False, True]
    assert parse_condition("nemo-rl.js_divergence_error<-1.5").bound == -1.5
    assert all(parse_condition(f"tim.k3{sign}1").holds(math.nan) for sign in (">", "<"))


@pytest.mark.parametrize("text", ["k3>1", "tim.k3", "tim.k3=1", "tim.k3>", "tim.k3>x", "tim.k3>nan", "tim.>1", ""])
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(InvalidOption, match="write check, or a number and its bound"):
        parse_condition(text)


def test_a_metric_is_found_by_the_end_of_its_name():
    names = ["rollout_corr/k3_kl", "rollout_corr/kl", "training/kl", "training/diff_max"]
    assert metric_named(parse_condition("verl.k3_kl>1"), names) == "rollout_corr/k3_kl"
    assert metric_named(parse_condition("verl.training/kl>1"), names) == "training/kl"
    with pytest.raises(InvalidOption, match="may mean rollout_corr/kl or training/kl; write the whole name"):
        metric_named(parse_condition("verl.kl>1"), names)
    with pytest.raises(InvalidOption, match=r"verl has no number 'k3'; did you mean k3_kl"):
        metric_named(parse_condition("verl.k3>1"), names)
    with pytest.raises(InvalidOption, match="it has k3_kl, kl, diff_max"):
        metric_named(parse_condition("verl.zzzzzz>1"), names)


def test_sums_of_sequences_give_what_stats_gives(noisy):
    (row,) = stats(noisy).dicts()
    columns = SequenceColumns(Database(noisy), ("train", "rollout"))
    totals = {name: values.sum() for name, values in columns.values.items()}
    for name, formula in FROM_SUMS.items():
        assert formula(totals) == pytest.approx(row[name], rel=1e-9), name
    for name, largest in LARGEST.items():
        assert columns.largest[largest].max() == row[name]
    known = {"run", *FROM_SUMS, *LARGEST, *QUANTILES, *COUNTS}
    assert set(row) <= known


def test_numbers_worked_by_hand(tmp_path):
    # d: 0.1, 0.1 in one sequence and -0.3 in the other.
    run = record(tmp_path / "run", [[0.1, 0.1], [-0.3]])
    mean, largest, count = judged(run, "tim.mean_abs_d>0.16", "tim.max_abs_d>=0.4", "tim.num_tokens<3")
    assert mean.value == pytest.approx(0.5 / 3, rel=1e-6)
    # Of two sequences a resample is one of them twice, or both.
    assert (mean.low, mean.high) == (pytest.approx(0.1, rel=1e-6), pytest.approx(0.3, rel=1e-6))
    assert (mean.fails, mean.verdict) == (True, "cannot tell")
    assert (largest.fails, largest.verdict) == (False, "passed")
    assert (largest.low, largest.high) == (pytest.approx(0.1, rel=1e-6), largest.value)
    assert (count.value, count.low, count.fails, count.verdict) == (3, None, False, "passed")


def test_the_bootstrap_is_over_sequences_and_not_over_tokens(tmp_path):
    # Every token of a sequence is off alike: 100 tokens a sequence tell no more than one does.
    draw = np.random.default_rng(0)
    sizes = draw.exponential(0.1, 200).astype(np.float32).clip(0, 0.9)
    (verdict,) = judged(record(tmp_path / "run", [[float(-d)] * 100 for d in sizes]), "tim.mean_abs_d>1")
    spread = sizes.std() / math.sqrt(200)
    assert verdict.high - verdict.low == pytest.approx(2 * 1.96 * spread, rel=0.15)
    assert verdict.low < verdict.value < verdict.high


def test_more_confidence_is_a_wider_interval_and_the_same_twice(noisy):
    wide, narrow = (judged(noisy, "tim.k3>1", confidence=share)[0] for share in (0.99, 0.5))
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high
    assert judged(noisy, "tim.k3>1", confidence=0.5)[0] == narrow


def test_quantiles_have_the_interval_of_resampled_sequences(noisy):
    sequences = {}
    query = "SELECT seq_id, abs(d) FROM pair('train', 'rollout')"
    for name, size in Database(noisy).connection.execute(query).fetchall():
        sequences.setdefault(name, []).append(size)
    values = [np.array(each) for each in sequences.values()]
    draw = np.random.default_rng(1)
    resampled = [
        np.quantile(np.concatenate([values[i] for i in draw.integers(0, len(values), len(values))]), 0.95)
        for _ in range(400)
    ]
    (verdict,) = judged(noisy, "tim.p95_abs_d>1")
    low, high = np.quantile(resampled, [0.025, 0.975])
    assert (verdict.low, verdict.high) == (pytest.approx(low, rel=0.1), pytest.approx(high, rel=0.1))


def test_a_framework_s_number_has_the_jackknife_s_interval(noisy):
    ours, theirs = judged(noisy, "tim.k3>1", "verl.k3_kl>1")
    assert theirs.metric == "rollout_corr/k3_kl"
    assert theirs.value == pytest.approx(ours.value, rel=1e-9)
    assert theirs.high - theirs.low == pytest.approx(ours.high - ours.low, rel=0.4)
    assert "jackknife over 300 sequences" in theirs.how


def test_the_jackknife_of_a_mean_is_its_standard_error():
    # With as many groups as sequences it is the textbook standard error, exactly.
    values = np.array([1.0, 2.0, 4.0, 9.0, 3.0, 5.0])
    low, high = jackknife(6, values.mean(), lambda places: np.delete(values, places).mean(), 0.95)
    error = values.std(ddof=1) / math.sqrt(6)
    assert (high - low) / 2 == pytest.approx(student_quantile(0.975, 5) * error)
    assert (low + high) / 2 == pytest.approx(4.0)
    assert jackknife(5, 1.0, lambda places: 1.0, 0.95) is None
    assert jackknife(6, 1.0, lambda places: math.nan, 0.95) is None


def test_student_s_quantiles():
    # The printed tables' figures.
    for freedom, quantile in ((5, 2.571), (10, 2.228), (19, 2.093), (120, 1.980)):
        assert student_quantile(0.975, freedom) == pytest.approx(quantile, abs=2e-3)
    assert student_quantile(0.9, 10**9) == pytest.approx(NormalDist().inv_cdf(0.9))


def test_leaving_sequences_out_keeps_nothing_of_it(noisy, tmp_path):
    before = stats(noisy).dicts()
    judged(noisy, "verl.k3_kl>1", "verl.ppl_ratio>2")
    assert stats(noisy).dicts() == before
    make_trace(tmp_path / "run")
    database = Database(tmp_path / "run")
    database.leave_out(
        database.connection.sql("SELECT run, step, seq_id FROM sequences WHERE step = 1").to_arrow_table()
    )
    part = stats(database).dicts()[0]
    assert part["num_sequences"] == 8
    assert stats(tmp_path / "run").dicts()[0]["num_sequences"] == 12
    by_step = {row["step"]: row for row in stats(tmp_path / "run", by="step").dicts()}
    assert part["k1"] == pytest.approx(
        sum(by_step[s]["k1"] * by_step[s]["num_tokens"] for s in (2, 3)) / sum(by_step[s]["num_tokens"] for s in (2, 3))
    )


def test_a_number_that_resamples_lack_has_no_interval(tmp_path):
    # Of two sequences of one token each, a resample may be one of them twice: that has no correlation.
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(step=1, prompt_ids=[[1]] * 2, response_ids=[[2]] * 2)
        recorder.add_scores("rollout", batch, logprobs=[[-1.0], [-2.0]])
        recorder.add_scores("train", batch, logprobs=[[-1.5], [-3.0]])
    (verdict,) = judged(tmp_path / "run", "tim.prob_pearson<0")
    assert (verdict.verdict, verdict.low) == ("passed", None)
    assert "no interval" in verdict.how


def test_nan_never_passes(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(step=1, prompt_ids=[[1]] * 2, response_ids=[[2]] * 2)
        recorder.add_scores("rollout", batch, logprobs=[[-1.0], [-1.0]])
        recorder.add_scores("train", batch, logprobs=[[math.nan], [-1.5]])
    below, above = judged(tmp_path / "run", "verl.kl>1", "verl.kl<-1")
    assert math.isnan(below.value)
    assert (below.fails, above.fails, below.verdict) == (True, True, "failed")


def test_what_the_trace_has_no_value_of_is_said(tmp_path):
    run = record(tmp_path / "run", [[0.5]])
    # One token has no correlation.
    with pytest.raises(NothingToCompare, match="prob_pearson: the trace has no value of it"):
        judged(run, "tim.prob_pearson<0.9")
    with pytest.raises(InvalidOption, match="like: got 'moon'"):
        judged(run, "moon.k3>1")
    with pytest.raises(InvalidOption, match=r"tim has no number 'k33'; did you mean k3"):
        judged(run, "tim.k33>1")
    with pytest.raises(InvalidOption, match="no condition was given"):
        judged(run)
    with pytest.raises(InvalidOption, match="between 0 and 1"):
        judged(run, "tim.k3>1", confidence=95)


def test_the_check_is_a_condition(noisy, tmp_path):
    (healthy,) = judged(make_healthy(tmp_path / "healthy"), "check")
    assert check(tmp_path / "healthy").is_valid
    shifted = tmp_path / "shifted"
    draw = np.random.default_rng(5)
    rollout = [-draw.exponential(1.0, 60) for _ in range(60)]
    with Recorder(shifted) as recorder:
        batch = recorder.add_sequences(step=1, prompt_ids=[[1]] * 60, response_ids=[[2] * 60] * 60)
        recorder.add_scores("rollout", batch, logprobs=[each.tolist() for each in rollout])
        recorder.add_scores("train", batch, logprobs=[np.roll(each, 1).tolist() for each in rollout])
    (faulty,) = judged(shifted, "check")
    assert (healthy.fails, healthy.verdict, healthy.value) == (False, "passed", 0)
    assert (faulty.fails, faulty.verdict) == (True, "failed")
    assert faulty.value == sum(finding.fails for finding in check(shifted).findings)
    assert "shifted by a token" in faulty.how


def make_healthy(path):
    """Errors as the rounding of bfloat16 makes them: noise of the logits, so that certain tokens are hardly off."""
    draw = np.random.default_rng(6)
    with Recorder(path) as recorder:
        recorder.add_contract("rollout", {"engine": "vllm", "dtype": "bfloat16"})
        recorder.add_contract("train", {"engine": "trl", "dtype": "float32"})
        for step in range(1, 5):
            rollout = [-draw.exponential(1.0, 60) for _ in range(40)]
            train = [np.minimum(each + draw.normal(0, 2e-3, 60) * -np.expm1(each), 0) for each in rollout]
            batch = recorder.add_sequences(
                step=step, prompt_ids=[[1]] * 40, response_ids=draw.integers(0, 99, (40, 60)).tolist()
            )
            recorder.add_scores("rollout", batch, logprobs=[each.tolist() for each in rollout])
            recorder.add_scores("train", batch, logprobs=[each.tolist() for each in train])
    return path


def test_the_exit_code_goes_by_the_value(noisy):
    passed = tim_trace("gate", noisy, "--fail-on", "tim.k3>1", "--json")
    failed = tim_trace("gate", noisy, "--fail-on", "tim.k3>1", "--fail-on", "tim.k3<1")
    wrong = tim_trace("gate", noisy, "--fail-on", "tim.k3")
    assert (passed.code, failed.code, wrong.code) == (0, 1, 2)
    (told,) = passed.json()
    assert told["condition"] == "tim.k3>1"
    assert told["verdict"] == "passed"
    assert told["low"] < told["value"] < told["high"]
    assert tim_trace("gate", noisy).code == 2
