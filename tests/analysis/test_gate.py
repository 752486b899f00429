"""Conditions on a run: what they mean, their intervals, and the exit code."""

import math
import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from builders import ROOT, make_trace, run, tim_trace
from tim_trace.analysis.alarms.reading import read_alarms
from tim_trace.analysis.check.check import check
from tim_trace.analysis.frameworks.framework import read_once
from tim_trace.analysis.frameworks.registry import FRAMEWORKS, framework_of
from tim_trace.analysis.gate.condition import COUNTS, LARGEST, QUANTILES, SequenceColumns, metric_named, parse_condition
from tim_trace.analysis.gate.gate import gate, gated_text
from tim_trace.analysis.statistics.estimators import FROM_SUMS
from tim_trace.analysis.statistics.intervals import NoInterval, jackknife, parts_of, unit
from tim_trace.analysis.stats import stats
from tim_trace.analysis.views import open_database
from tim_trace.schemas.errors import InvalidOption, NothingToCompare
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.routing import Routing


def record(path, gaps, base=lambda place: -1.0, groups=None):
    """A sequence for each list of d, over rollout logprobs of -1 or of each token's place."""
    with Recorder(path) as recorder:
        batch = recorder.add_sequences(
            step=1, prompt_ids=[[1]] * len(gaps), response_ids=[[2] * len(each) for each in gaps], group_ids=groups
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


@pytest.mark.parametrize(("conditions", "code"), [("tim.max_abs_d>100\ntim.k3>10\n", 0), ("tim.k3>1e-9\n\ncheck", 1)])
def test_the_action_runs_the_gate_with_one_condition_a_line(noisy, tmp_path, conditions, code):
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    (step,) = action["runs"]["steps"]
    given = {"run": str(noisy), "fail-on": conditions, "junit": str(tmp_path / "gate.xml")}
    assert given.keys() == action["inputs"].keys()
    values = {f"${{{{ inputs.{name} }}}}": value for name, value in given.items()}
    values["${{ github.action_path }}"] = str(ROOT)
    env = {name: values[text] for name, text in step["env"].items()}
    env |= {
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    (tmp_path / "step.sh").write_text(step["run"])
    # As a runner calls `shell: bash`.
    done = run("bash", "--noprofile", "--norc", "-eo", "pipefail", tmp_path / "step.sh", env=env)
    assert done.code == code, done.stderr
    cases = ElementTree.parse(tmp_path / "gate.xml").getroot().find("testsuite").findall("testcase")
    assert [case.get("name") for case in cases] == conditions.split()
    table = [line for line in (tmp_path / "summary.md").read_text().splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(cases)


@pytest.mark.slow
def test_junit_has_a_test_case_a_condition(noisy, tmp_path):
    conditions = ["tim.k3>1", "tim.k3>1e-9", "check"]
    for _ in range(2):  # what lies there is replaced
        found = gate(noisy, fail_on=conditions, junit=tmp_path / "gate.xml")
    suite = ElementTree.parse(tmp_path / "gate.xml").getroot().find("testsuite")
    assert (suite.get("tests"), suite.get("failures")) == ("3", str(sum(verdict.fails for verdict in found.verdicts)))
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == conditions
    for case, verdict in zip(cases, found.verdicts, strict=True):
        assert (case.find("failure") is not None) == verdict.fails
    assert repr(found.verdicts[1].value) in cases[1].find("failure").get("message")
    done = tim_trace("gate", noisy, "--fail-on", "tim.k3>1e-9", "--junit", tmp_path / "more.xml")
    assert done.code == 1
    assert ElementTree.parse(tmp_path / "more.xml").getroot().get("failures") == "1"


def test_a_summary_has_a_row_a_condition_and_is_added_to_what_is_there(tmp_path):
    trace = tmp_path / "a|b"
    make_trace(trace)
    for _ in range(2):
        found = gate(trace, fail_on=["tim.num_tokens>0", "tim.num_nan>0"], summary=tmp_path / "summary.md")
    text = (tmp_path / "summary.md").read_text()
    first, second = text.strip().split("\n\n### ")[0], text.count("### tim-trace gate")
    assert second == 2
    assert first.splitlines()[0].endswith("a\\|b: FAILED: 1 of 2 conditions")
    failed, passed = ([cell.strip() for cell in line.split(" | ")] for line in text.splitlines()[4:6])
    assert failed[:3] == ["| tim.num_tokens>0", "**failed**", f"{found.verdicts[0].value:.6g}"]
    assert passed[1] == "passed"
    assert {line.count(" | ") for line in text.splitlines() if line.startswith("| ")} == {4}


def judged(trace, *conditions, **options):
    return gate(trace, fail_on=conditions, **options).verdicts


def test_a_condition_says_what_fails():
    condition = parse_condition(" verl.rollout_corr/k3_kl >= 1e-3 ")
    assert (condition.source, condition.metric, condition.sign, condition.bound) == (
        "verl", "rollout_corr/k3_kl", ">=", 1e-3,
    )  # fmt: skip
    assert [parse_condition(f"tim.k3{sign}2").holds(2) for sign in (">", ">=", "<", "<=")] == [False, True, False, True]
    assert parse_condition("nemo-rl.js_divergence_error<-1.5").bound == -1.5
    values = (math.nan, math.inf, -math.inf)
    assert all(parse_condition(f"tim.k3{sign}1").holds(value) for sign in (">", "<", ">=", "<=") for value in values)


@pytest.mark.parametrize("text", ["k3>1", "tim.k3", "tim.k3=1", "tim.k3>", "tim.k3>x", "tim.k3>nan", "tim.>1", ""])
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(
        InvalidOption, match=r"[uU]se 'check', or a metric and a threshold in quotes, e\.g\. 'tim\.k3>1e-3'"
    ):
        parse_condition(text)


def test_a_metric_is_found_by_the_end_of_its_name():
    names = ["rollout_corr/k3_kl", "rollout_corr/kl", "training/kl", "training/diff_max"]
    assert metric_named(parse_condition("verl.k3_kl>1"), names) == "rollout_corr/k3_kl"
    assert metric_named(parse_condition("verl.training/kl>1"), names) == "training/kl"
    with pytest.raises(InvalidOption, match="is ambiguous: rollout_corr/kl or training/kl; write the full name"):
        metric_named(parse_condition("verl.kl>1"), names)
    with pytest.raises(InvalidOption, match=r"verl has no metric 'k3'; did you mean k3_kl"):
        metric_named(parse_condition("verl.k3>1"), names)
    with pytest.raises(InvalidOption, match="it has k3_kl, kl, diff_max"):
        metric_named(parse_condition("verl.zzzzzz>1"), names)


def test_sums_of_sequences_give_what_stats_gives(noisy):
    (row,) = stats(noisy).dicts()
    columns = SequenceColumns.read(open_database(noisy), ("train", "rollout"))
    totals = {name: values.sum() for name, values in columns.values.items()}
    for name, formula in FROM_SUMS.items():
        assert formula(totals) == pytest.approx(row[name], rel=1e-9), name
    for name, largest in LARGEST.items():
        assert columns.largest[largest].max() == row[name]
    known = {"run", "quantile_error", *FROM_SUMS, *LARGEST, *QUANTILES, *COUNTS}
    assert set(row) <= known


def test_numbers_worked_by_hand(tmp_path):
    # d: 0.1, 0.1 in one sequence and -0.3 in the other.
    run = record(tmp_path / "run", [[0.1, 0.1], [-0.3]])
    mean, largest, middle, count = judged(
        run, "tim.mean_abs_d>0.16", "tim.max_abs_d>=0.4", "tim.p50_abs_d>9", "tim.num_tokens<3"
    )
    assert mean.value == pytest.approx(0.5 / 3, rel=1e-6)
    assert (mean.fails, largest.fails) == (True, False)
    # Two sequences say nothing of how sure that is.
    for verdict in (mean, largest, middle):
        assert (verdict.low, verdict.high, verdict.verdict) == (None, None, "cannot tell")
        assert verdict.how == "no interval: 2 groups are fewer than 8 groups"
    assert (count.value, count.low, count.fails, count.verdict) == (3, None, False, "passed")


def test_the_interval_of_a_largest_value_ends_at_it(tmp_path):
    (largest,) = judged(record(tmp_path / "run", [[0.01 * n] for n in range(1, 21)]), "tim.max_abs_d>=0.25")
    assert largest.high == largest.value == pytest.approx(0.2, rel=1e-6)
    # Of 20 sequences the top n are in no resample with a probability of (1 - n / 20)^20: 0.12 for 2, and 0.012 for 4.
    assert largest.low == pytest.approx(0.17, rel=1e-6)
    assert (largest.verdict, largest.how.endswith("for the maximum; the interval ends at the observed maximum")) == (
        "passed",
        True,
    )


def test_the_bootstrap_is_over_groups_and_not_over_sequences_or_tokens(tmp_path):
    # Every token of a prompt is off alike: 4 sequences of 25 tokens tell no more than one token does.
    draw = np.random.default_rng(0)
    sizes = draw.exponential(0.1, 200).astype(np.float32).clip(0, 0.9)
    gaps = [[float(-d)] * 25 for d in np.repeat(sizes, 4)]
    (verdict,) = judged(
        record(tmp_path / "run", gaps, groups=[str(place // 4) for place in range(800)]), "tim.mean_abs_d>1"
    )
    spread = sizes.std() / math.sqrt(200)
    assert verdict.high - verdict.low == pytest.approx(2 * 1.96 * spread, rel=0.15)
    assert verdict.low < verdict.value < verdict.high
    assert verdict.how == "bootstrap-t over 200 groups"


def test_a_group_is_of_one_step(tmp_path):
    # The same prompt at another step is another group: its sequences are sampled from other weights.
    with Recorder(tmp_path / "run") as recorder:
        for step in (1, 2):
            batch = recorder.add_sequences(step=step, response_ids=[[1]] * 8, group_ids=["0", "1", "2", "3"] * 2)
            recorder.add_scores("rollout", batch, logprobs=[[-1.0]] * 8)
            recorder.add_scores("train", batch, logprobs=[[-1.0 - step * place / 100] for place in range(8)])
    (verdict,) = judged(tmp_path / "run", "tim.k3>1")
    assert verdict.how.startswith("bootstrap-t over 8 groups")


def test_a_gate_never_passes_on_what_is_no_number(tmp_path):
    # d of -24: exp(d) is 4e-11 everywhere, and all weights count. Sums of exp(d) - 1 gave NaN or infinity.
    draw = np.random.default_rng(1)
    gaps = draw.uniform(-24, -17, (16, 20)).tolist()
    (verdict,) = judged(record(tmp_path / "run", gaps), "tim.ess_token<0.1")
    d = np.float32(-1) + np.array(gaps, np.float32) + 1
    weights = np.exp(d.astype(float))
    assert verdict.value == pytest.approx(weights.sum() ** 2 / (320 * (weights**2).sum()), rel=1e-5)
    assert 0 <= verdict.low < verdict.value < verdict.high <= 1
    # exp(2 d) beyond what a double holds is known to be larger than any bound, and is no number either way.
    huge = record(tmp_path / "huge", [[500.0]] * 9, base=lambda place: -600.0)
    for condition in ("tim.chi2_token<1", "tim.chi2_token>1"):
        (verdict,) = judged(huge, condition)
        assert (verdict.value, verdict.fails, verdict.verdict) == (math.inf, True, "failed")


def test_more_confidence_is_a_wider_interval_and_the_same_twice(noisy):
    wide, narrow = (judged(noisy, "tim.k3>1", confidence=share)[0] for share in (0.99, 0.5))
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high
    assert judged(noisy, "tim.k3>1", confidence=0.5)[0] == narrow


def test_quantiles_have_the_interval_of_resampled_sequences(noisy):
    sequences = {}
    query = "SELECT seq_id, abs(d) FROM pair('train', 'rollout')"
    for name, size in open_database(noisy).connection.execute(query).fetchall():
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


@pytest.mark.slow
def test_a_framework_s_number_has_the_jackknife_s_interval(noisy):
    ours, theirs = judged(noisy, "tim.k3>1", "verl.k3_kl>1")
    assert theirs.metric == "rollout_corr/k3_kl"
    assert theirs.value == pytest.approx(ours.value, rel=1e-9)
    # 20 parts tell less than 300 groups.
    assert ours.high - ours.low < theirs.high - theirs.low < 2 * (ours.high - ours.low)
    assert "jackknife over 20 parts of 300 groups" in theirs.how
    assert theirs.low < theirs.value < theirs.high


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    """3 steps of 48 sequences in groups of 4, with all that frameworks read; one sequence is masked as a whole."""
    path, draw = tmp_path_factory.mktemp("gate") / "run", np.random.default_rng(3)
    with Recorder(path) as recorder:
        for step in range(1, 4):
            lengths = draw.integers(1, 30, 48)
            mask = [draw.random(length) < 0.9 for length in lengths]
            mask[3][:] = False
            batch = recorder.add_sequences(
                step=step, prompt_ids=[[1]] * 48, response_ids=[draw.integers(0, 99, n).tolist() for n in lengths],
                response_mask=mask, group_ids=[str(place // 4) for place in range(48)], advantage=draw.normal(0, 1, 48),
                reward=draw.integers(0, 2, 48).astype(float),
            )  # fmt: skip
            rollout = [-draw.exponential(1.0, n) for n in lengths]
            spreads = draw.exponential(0.1, 48)
            train = [np.minimum(p + draw.normal(0, s, len(p)), 0) for p, s in zip(rollout, spreads, strict=True)]
            current = [np.minimum(p + draw.normal(0, 0.1, len(p)), 0) for p in train]
            entropy = [draw.exponential(1.0, n) for n in lengths]
            recorder.add_scores("rollout", batch, logprobs=rollout)
            recorder.add_scores("train", batch, logprobs=train, entropy=entropy)
            recorder.add_scores("current", batch, logprobs=current)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("framework", list(FRAMEWORKS))
def test_what_is_left_of_a_framework_s_sums_gives_what_its_tokens_give(grouped, framework):
    # The plain path: each part is left out of the trace, and every token of the rest is read.
    (whole,) = stats(grouped, like=framework).dicts()
    database = open_database(grouped)
    query = f"SELECT run, step, seq_id, {unit('s')} AS unit FROM sequences AS s ORDER BY run, step, seq_id"
    sequences = database.connection.sql(query).to_arrow_table()
    part_N = parts_of(sequences.column("unit").to_numpy())
    without = []
    for part in range(20):
        database.leave_out(sequences.take(np.flatnonzero(part_N == part)))
        without += stats(database, like=framework).dicts()
    names = [name for name in whole if name != "run"]
    for name, verdict in zip(names, judged(grouped, *(f"{framework}.{name}>1" for name in names)), strict=True):
        plain = jackknife(whole[name], np.array([float(left[name]) for left in without]), 0.95)
        assert (verdict.metric, verdict.value) == (name, whole[name])
        if verdict.how == f"no interval: {NoInterval.UNSEEN}":  # of sequence weights alone, however the jackknife falls
            assert name in ("mis_chi2_seq", "rollout_corr/chi2_seq")
            continue
        assert (verdict.low is None) == isinstance(plain, NoInterval), name
        if verdict.low is None:
            assert verdict.how == f"no interval: {plain}"
        else:
            assert (verdict.low, verdict.high) == pytest.approx(plain, rel=1e-9), name


def test_a_framework_s_numbers_are_read_once(noisy):
    # Of the scores' files it is read no more, however many parts are left out.
    database = open_database(noisy)
    framework = framework_of("trl", {})
    with read_once(database, framework, ("train", "rollout")):
        once = framework.numbers(database, ("train", "rollout"), "run")
        database.connection.execute("ALTER VIEW scores RENAME TO hidden")
        assert framework.numbers(database, ("train", "rollout"), "run") == once
    database.connection.execute("ALTER VIEW hidden RENAME TO scores")
    assert stats(database, like="trl") == once


@pytest.mark.parametrize("framework", list(FRAMEWORKS))
def test_one_number_of_a_framework_is_the_same_alone(noisy, framework):
    database, pair = open_database(noisy), ("train", "rollout")
    chosen = framework_of(framework, {})
    with read_once(database, chosen, pair):
        (whole,) = chosen.numbers(database, pair, "run").dicts()
        for name in [name for name in whole if name != "run"][::4]:
            assert chosen.numbers(database, pair, "run", (name,)).dicts() == [{name: whole[name]}], name


def test_a_condition_on_a_number_imports_no_detector(noisy):
    program = (
        "import sys; from tim_trace.analysis import gate; gate(sys.argv[1], fail_on=['verl.k3_kl>1e9']); "
        "assert 'tim_trace.analysis.check.check' not in sys.modules"
    )
    done = run(sys.executable, "-c", program, noisy)
    assert done.code == 0, done.stderr


@pytest.mark.slow
def test_medians_over_tokens_are_those_of_what_is_left(tmp_path):
    # Values that tie, zeros and a NaN: the median of a part is NaN as long as the NaN is left.
    gaps = [[0.0, -0.1], [0.0, math.nan], [-0.3], [-0.1, -0.2], *[[-0.1 * place] for place in range(1, 7)]]
    database = open_database(record(tmp_path / "run", gaps))
    framework = framework_of("prime-rl", {})
    keys = database.connection.sql("SELECT run, step, seq_id FROM sequences ORDER BY ALL").to_arrow_table()
    names = [f"mismatch_kl/all/{which}" for which in ("median", "mean", "min", "max", "std")]
    found = []
    with read_once(database, framework, ("train", "rollout")):
        for part in range(10):
            database.leave_out(keys.slice(part, 1))
            (row,) = framework.numbers(database, ("train", "rollout"), "run").dicts()
            found.append([row[name] for name in names])
    for part in range(10):
        plain = open_database(tmp_path / "run")
        plain.leave_out(keys.slice(part, 1))
        (row,) = stats(plain, like="prime-rl").dicts()
        assert found[part] == pytest.approx([row[name] for name in names], rel=1e-12, nan_ok=True), part
    assert sum(math.isnan(row[0]) for row in found) == 9


@pytest.mark.slow
def test_agreement_of_router_choices_has_an_interval(tmp_path):
    # Of 10 sequences of one layer, one expert of two and 4 tokens each.
    draw = np.random.default_rng(4)
    chosen = draw.integers(0, 2, (40, 1, 1)).astype(np.int8)
    others = np.where(draw.random(chosen.shape) < 0.2, 1 - chosen, chosen)
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(step=1, prompt_ids=[[1, 2]] * 10, response_ids=[[3, 4]] * 10)
        for name, ids in (("train", chosen), ("rollout", others)):
            routing = Routing(expert_ids=ids)
            recorder.add_scores(name, batch, logprobs=draw.uniform(-2, -1, (10, 2)).astype("f4"), routing=routing)
    agreed, k3 = judged(tmp_path / "run", "tim.routing_agreement<0.1", "tim.k3>9")
    assert agreed.value == pytest.approx((chosen == others).mean())
    assert agreed.how.startswith("jackknife over 10 parts of 10 groups")
    assert agreed.low < agreed.value < agreed.high
    assert k3.how.startswith("bootstrap-t over 10 groups")


def test_a_framework_s_largest_value_has_no_interval(noisy):
    (verdict,) = judged(noisy, "verl.rollout_probs_diff_max>1")
    assert (verdict.low, verdict.verdict) == (None, "cannot tell")
    assert verdict.how == "no interval: a single sequence determines the value"


@pytest.mark.slow
def test_leaving_sequences_out_keeps_nothing_of_it(noisy, tmp_path):
    before = stats(noisy).dicts()
    judged(noisy, "verl.k3_kl>1", "verl.ppl_ratio>2")
    assert stats(noisy).dicts() == before
    make_trace(tmp_path / "run")
    database = open_database(tmp_path / "run")
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
    # One of eight sequences has another probability than the others: without it there is no correlation.
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(step=1, prompt_ids=[[1]] * 8, response_ids=[[2]] * 8)
        recorder.add_scores("rollout", batch, logprobs=[[-1.0]] * 7 + [[-2.0]])
        recorder.add_scores("train", batch, logprobs=[[-1.5 - place / 10] for place in range(8)])
    (verdict,) = judged(tmp_path / "run", "tim.prob_pearson<0")
    assert (verdict.verdict, verdict.low) == ("cannot tell", None)
    assert verdict.how == "no interval: the value is undefined without some of the groups"


def test_a_value_that_every_group_gives_is_decided(tmp_path):
    (verdict,) = judged(record(tmp_path / "run", [[0.0, 0.0]] * 9), "tim.k3>0")
    assert (verdict.value, verdict.low, verdict.verdict) == (0, None, "passed")
    assert verdict.how == "no interval: every group gives the same value"


def test_nan_never_passes(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(step=1, prompt_ids=[[1]] * 2, response_ids=[[2]] * 2)
        recorder.add_scores("rollout", batch, logprobs=[[-1.0], [-1.0]])
        recorder.add_scores("train", batch, logprobs=[[math.nan], [-1.5]])
    below, above = judged(tmp_path / "run", "verl.kl>1", "verl.kl<-1")
    assert math.isnan(below.value)
    assert (below.fails, above.fails, below.verdict) == (True, True, "failed")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["train", "rollout"])
def test_a_gate_does_not_pass_where_its_number_leaves_a_token_out(tmp_path, side, value):
    given = {"train": [[-1.0] * 4 for _ in range(12)], "rollout": [[-1.0] * 4 for _ in range(12)]}
    given[side][3][2] = value
    with Recorder(tmp_path / "run") as recorder:
        recorder._checks_logprobs = False  # as a framework's hook: an infinity above 0 is a finding there
        batch = recorder.add_sequences(step=1, prompt_ids=[[1]] * 12, response_ids=[[2] * 4] * 12)
        for name, logprobs in given.items():
            recorder.add_scores(name, batch, logprobs=logprobs)
    what = "1 are NaN" if math.isnan(value) else "1 are infinite"
    found = judged(tmp_path / "run", "tim.k3>1e-3", "tim.p99_abs_d>1", "tim.k3<1", "tim.num_nan>1")
    assert [(each.verdict, each.fails) for each in found] == [
        ("cannot tell", True), ("cannot tell", True), ("failed", True), ("passed", False),
    ]  # fmt: skip
    for each in found[:3]:
        assert each.how.startswith(f"of 48 tokens in the loss, {what}; the value excludes them; ")
    assert tim_trace("gate", tmp_path / "run", "--fail-on", "tim.k3>1e-3").code == 1


def test_a_token_outside_the_loss_leaves_nothing_out(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(
            step=1, prompt_ids=[[1]] * 9, response_ids=[[2] * 3] * 9, response_mask=[[True, True, False]] * 9
        )
        recorder.add_scores("rollout", batch, logprobs=[[-1.0, -1.0, math.nan]] * 9)
        recorder.add_scores("train", batch, logprobs=[[-1.0, -1.0, None]] * 9)
    (verdict,) = judged(tmp_path / "run", "tim.k3>1e-3")
    assert (verdict.verdict, verdict.fails) == ("passed", False)


@pytest.mark.parametrize(("num_null", "passes"), [(2, True), (3, False)])
def test_a_gate_does_not_pass_where_most_tokens_have_no_logprob(tmp_path, num_null, passes):
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(step=1, prompt_ids=[[1]] * 9, response_ids=[[2] * 4] * 9)
        recorder.add_scores("rollout", batch, logprobs=[[None] * num_null + [-1.0] * (4 - num_null)] * 9)
        recorder.add_scores("train", batch, logprobs=[[-1.0] * 4] * 9)
    for condition in ("tim.k3>1e-3", "verl.k3_kl>1e-3"):
        (verdict,) = judged(tmp_path / "run", condition)
        assert (not verdict.fails) == passes
        assert ("27 have no logprob in one of the passes" in verdict.how) == (not passes)


def test_what_the_trace_has_no_value_of_is_said(tmp_path):
    run = record(tmp_path / "run", [[0.5]])
    # One token has no correlation.
    with pytest.raises(NothingToCompare, match="prob_pearson: the trace has no value for this metric"):
        judged(run, "tim.prob_pearson<0.9")
    with pytest.raises(InvalidOption, match="like: got 'moon'"):
        judged(run, "moon.k3>1")
    with pytest.raises(InvalidOption, match=r"tim has no metric 'k33'; did you mean k3"):
        judged(run, "tim.k33>1")
    with pytest.raises(InvalidOption, match=r"no condition given.* 'tim.k3>1e-3'"):
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


@pytest.mark.slow
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


@pytest.mark.parametrize("option", ["--junit", "--summary"])
def test_a_file_in_a_folder_that_is_not_there_is_refused_before_anything_is_read(tmp_path, option):
    make_trace(tmp_path / "run")
    done = tim_trace("gate", tmp_path / "run", "--fail-on", "tim.k3>9", option, tmp_path / "missing" / "gate.xml")
    assert done.code == 2
    assert f"folder {tmp_path / 'missing'} does not exist" in done.stderr
    assert not (tmp_path / "missing").exists()


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    """40 steps of 12 sequences; starting at step 37, |d| is 0.5 instead of about 0.01, and the gradient norm is logged."""
    path, draw = tmp_path_factory.mktemp("gate") / "run", np.random.default_rng(8)
    with Recorder(path) as recorder:
        for step in range(1, 41):
            size = 0.5 if step >= 37 else 0.01
            rollout = [-1 - draw.exponential(1.0, 10) for _ in range(12)]
            train = [row + size * draw.choice([-1.0, 1.0], 10) for row in rollout]
            batch = recorder.add_sequences(
                step=step, prompt_ids=[[1]] * 12, response_ids=draw.integers(0, 9, (12, 10)).tolist(),
                reward=draw.random(12),
            )  # fmt: skip
            recorder.add_scores("rollout", batch, logprobs=rollout)
            recorder.add_scores("train", batch, logprobs=train)
            recorder.add_metrics(step, {"grad_norm": 9.0 if step == 20 else 1.0, "lr": 1e-6})
    return path


def test_a_condition_names_the_steps_it_judges():
    plain, any_step, last = (parse_condition(f"tim.k3>1e-3{over}") for over in ("", " any step", "  last 20 steps"))
    assert [(each.any_step, each.last) for each in (plain, any_step, last)] == [(False, 0), (True, 0), (False, 20)]
    assert {each.metric for each in (plain, any_step, last)} == {"k3"}
    assert parse_condition("tim.k3>1 last 1 step").last == 1
    size = parse_condition("tim.|k1|>0.1")
    assert (size.metric, size.of_size, size.judged(-0.2), plain.judged(-0.2)) == ("k1", True, 0.2, -0.2)
    for wrong in (
        "tim.k3>1 any",
        "tim.k3>1 last steps",
        "tim.k3>1 last 0 steps",
        "tim.k3>1 every step",
        "check any step",
    ):
        with pytest.raises(InvalidOption, match="any step"):
            parse_condition(wrong)


@pytest.mark.parametrize(("metric", "bound"), [("tim.mean_abs_d", 0.1), ("verl.log_ppl_abs_diff", 0.05)])
def test_a_mean_that_passes_while_steps_do_not_is_said(late, metric, bound):
    plain, any_step, last, before = judged(
        late, *(f"{metric}>{bound}{over}" for over in ("", " any step", " last 3 steps")), f"{metric}>9"
    )
    rows = stats(late, by="step", like=None if metric.startswith("tim") else "verl").dicts()
    values = {row["step"]: row[plain.metric] for row in rows}
    worst = max(values, key=values.get)
    assert (plain.verdict, plain.fails, plain.steps_beyond, plain.worst_step) == ("passed", False, 4, worst)
    assert plain.how.startswith(
        f"4 of 40 steps violate the bound, first step 37, worst step {worst} ({values[worst]:.3g}); "
    )
    assert "the condition would fail with 'any step'" in plain.how
    assert (any_step.verdict, any_step.fails, any_step.value) == ("failed", True, values[worst])
    assert (any_step.low, any_step.steps_beyond, any_step.worst_step) == (None, 4, worst)
    assert any_step.how == "4 of 40 steps violate the bound, first step 37; the value is from the worst step"
    assert (last.verdict, last.fails, last.steps_beyond) == ("failed", True, 3)
    assert last.low > bound
    assert "the last 3 steps, 38 to 40" in last.how
    assert (before.verdict, before.steps_beyond) == ("passed", 0)
    assert "steps" not in before.how


def test_the_last_steps_are_judged_as_a_trace_of_them_alone(late):
    (last,) = judged(late, "tim.k3>1e-3 last 10 steps")
    (row,) = stats(late, steps="31:40").dicts()
    assert last.value == row["k3"]
    (few,) = judged(late, "tim.k3>1e-3 last 99 steps")
    assert few.value == stats(late).dicts()[0]["k3"]
    assert "the last 40 steps, 1 to 40" in few.how


def test_a_published_alert_is_a_condition_of_the_same_name(late):
    readings = {each.alarm: each for each in read_alarms(open_database(late), ("train", "rollout")).judged}
    published = [alarm for alarm in readings if alarm.level is not None]
    assert {alarm.metric for alarm in published} >= {
        "k1",
        "k3",
        "mean_abs_d",
        "mean_exp_abs_d",
        "ess_token",
        "chi2_token",
    }
    verdicts = judged(late, *(alarm.gate for alarm in published))
    for alarm, verdict in zip(published, verdicts, strict=True):
        reading = readings[alarm]
        assert verdict.metric == alarm.metric
        assert (verdict.fails, verdict.worst_step) == (reading.is_raised, reading.worst_step), alarm.gate
        assert verdict.steps_beyond == reading.num_steps
        assert verdict.value == pytest.approx(abs(reading.own) if alarm.of_size else reading.own, rel=1e-9, abs=1e-12)
    assert {verdict.fails for verdict in verdicts} == {True, False}
    shown = tim_trace("diagnose", late, "--json", "-v").json()["alarms"]["judged"]
    assert {"tim.mean_exp_abs_d>1.05 any step", "tim.|k1|>0.1 any step", None} <= {entry["gate"] for entry in shown}


@pytest.mark.slow
def test_every_figure_of_an_alert_is_a_number_of_a_condition(late):
    for reading in read_alarms(open_database(late), ("train", "rollout")).judged:
        (verdict,) = judged(late, f"tim.{reading.alarm.metric}>1e9 any step")
        assert not verdict.fails, reading.alarm.metric
    norm, mean, repeats = judged(
        late, "tim.grad_norm>5 any step", "tim.grad_norm>5", "tim.unequal_rewards>0.05 any step"
    )
    assert (norm.fails, norm.value, norm.worst_step, norm.steps_beyond) == (True, 9.0, 20, 1)
    assert (mean.verdict, mean.fails, mean.value, mean.steps_beyond) == ("passed", False, pytest.approx(1.2), 1)
    assert "mean of 40 steps; no interval" in mean.how
    assert repeats.value == 0
    with pytest.raises(NothingToCompare, match="policy_lag: the trace has no value for this metric"):
        judged(late, "tim.policy_lag>1 any step")


@pytest.mark.parametrize("over", ["", " any step", " last 2 steps"])
def test_steps_of_nan_are_not_passed_over(tmp_path, over):
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, 5):
            batch = recorder.add_sequences(step=step, prompt_ids=[[1]] * 12, response_ids=[[2] * 4] * 12)
            recorder.add_scores("rollout", batch, logprobs=[[-1.0, -1.0, -1.0, math.nan if step == 4 else -1.0]] * 12)
            recorder.add_scores("train", batch, logprobs=[[-1.0] * 4] * 12)
    lost, both, framework = judged(
        tmp_path / "run", f"tim.num_not_finite>0{over}", f"tim.k3>1e-3{over}", f"verl.k3_kl>1e-3{over}"
    )
    assert (lost.fails, lost.value) == (True, 12)
    assert (both.fails, framework.fails) == (True, True)
    assert both.how.startswith("of ")
    assert "12 are NaN" in both.how
    (early,) = judged(tmp_path / "run", "tim.k3>1e-3 last 1 step")
    assert early.fails


def test_the_first_line_counts_the_failures_and_no_reason_is_cut(tmp_path):
    make_trace(tmp_path / "run")
    conditions = ["tim.k3>1e-9", "tim.num_nan>0", "check"]
    found = gate(tmp_path / "run", fail_on=conditions)
    for width in (60, 80, None):
        text = gated_text(found, width)
        assert text.splitlines()[0] == f"FAILED: {sum(one.fails for one in found.verdicts)} of 3 conditions."
        for one in found.verdicts:
            assert " ".join(f"{one.condition}: {one.verdict}: {one.how}".split()) in " ".join(text.split())
    assert gated_text(gate(tmp_path / "run", fail_on=conditions[1:2])).startswith("PASSED: 1 condition.")
