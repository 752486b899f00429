import importlib
import math
import shutil

import numpy as np
import pytest
from builders import add_step, make_batch, make_trace
from hypothesis import given, settings
from hypothesis import strategies as st
from tim_trace.analysis.stats import stats
from tim_trace.analysis.trace import chunks, pair_sums, quantiles, ragged, sums
from tim_trace.analysis.trace.connection import Connection
from tim_trace.analysis.trace.sums import summarize
from tim_trace.analysis.views import connect, open_database
from tim_trace.schemas.capture import Capture
from tim_trace.schemas.errors import InvalidOption, NothingToCompare
from tim_trace.schemas.sums import KINDS
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.writer import TraceWriter

# Sums of a few hundred terms in another order, and exp of another library: a few units in the last place.
CLOSE = {"rtol": 1e-11, "atol": 1e-15}


def expected(sequences):
    """The statistics of (train, rollout, mask) triples, written out in NumPy in the plainest way."""
    rows = []
    for train, rollout, mask in sequences:
        a, b = np.asarray(train, np.float64)[mask], np.asarray(rollout, np.float64)[mask]
        finite = np.isfinite(a) & np.isfinite(b)
        rows.append((a[finite], b[finite], np.isnan(a) | np.isnan(b), finite))
    a, b = np.concatenate([row[0] for row in rows]), np.concatenate([row[1] for row in rows])
    d, pa, pb = a - b, np.exp(a), np.exp(b)
    summed = np.array([(x - y).sum() for x, y, _, _ in rows if len(x)])
    means = np.array([(x - y).mean() for x, y, _, _ in rows if len(x)])
    weights, ratios = np.exp(summed), np.exp(d)
    return {
        "num_sequences": len(summed),
        "num_tokens": len(d),
        "num_nan": sum(int(nan.sum()) for _, _, nan, _ in rows),
        "num_inf": sum(int((~finite & ~nan).sum()) for _, _, nan, finite in rows),
        "k1": (-d).mean(),
        "k2": (d**2 / 2).mean(),
        "k3": (np.expm1(d) - d).mean(),
        "mean_abs_d": np.abs(d).mean(),
        "rms_d": math.sqrt((d**2).mean()),
        "p50_abs_d": np.quantile(np.abs(d), 0.5),
        "p95_abs_d": np.quantile(np.abs(d), 0.95),
        "p99_abs_d": np.quantile(np.abs(d), 0.99),
        "max_abs_d": np.abs(d).max(),
        "share_outside": ((ratios < 0.8) | (ratios > 1.25)).mean(),
        "prob_diff_mean": np.abs(pa - pb).mean(),
        "prob_diff_max": np.abs(pa - pb).max(),
        "prob_pearson": np.corrcoef(pa, pb)[0, 1],
        "log_ppl_abs_diff_sum": np.abs(summed).mean(),
        "log_ppl_abs_diff_mean": np.abs(means).mean(),
        "ess_token": ratios.sum() ** 2 / (len(d) * (ratios**2).sum()),
        "ess_sequence": weights.sum() ** 2 / (len(summed) * (weights**2).sum()),
        "chi2_token": (ratios**2).mean() - 1,
        "chi2_sequence": np.expm1(2 * summed).mean(),
    }


def check(row, wanted):
    assert {"run", "step", "quantile_error", *wanted} >= set(row)
    for name, value in wanted.items():
        np.testing.assert_allclose(row[name], value, err_msg=name, **CLOSE)


def record(path, steps):
    """Record step -> [(train, rollout, mask)]."""
    with Recorder(path) as recorder:
        for step, sequences in steps.items():
            added = recorder.add_sequences(
                step=step,
                seq_ids=range(len(sequences)),
                response_ids=[[0] * len(train) for train, _, _ in sequences],
                response_mask=[mask.tolist() for _, _, mask in sequences],
            )
            recorder.add_scores("train", added, logprobs=[train for train, _, _ in sequences])
            recorder.add_scores("rollout", added, logprobs=[rollout for _, rollout, _ in sequences])


def draw_step(seed, rows=6, odd=True):
    draw = np.random.default_rng(seed)
    sequences = []
    for _ in range(rows):
        length = int(draw.integers(1, 30))
        rollout = -draw.exponential(1.0, length).astype(np.float32)
        train = np.minimum(rollout + draw.normal(0, 0.2, length), 0).astype(np.float32)
        mask = draw.random(length) < 0.8
        if odd:
            train[draw.random(length) < 0.05] = np.nan
            rollout[draw.random(length) < 0.05] = -np.inf
        sequences.append((train, rollout, mask))
    sequences[0][2][:] = False
    return sequences


def test_a_case_worked_by_hand(tmp_path):
    # d = ln 2, 0 in one sequence and -ln 2 in the other, at rollout probabilities 1/4, 1/2 and 1/2.
    half, quarter = math.log(0.5), math.log(0.25)
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, response_ids=[[1, 2], [3]])
        recorder.add_scores("train", added, logprobs=[[half, half], [quarter]])
        recorder.add_scores("rollout", added, logprobs=[[quarter, half], [half]])
    (row,) = stats(tmp_path / "run").dicts()
    ln2 = float(np.float32(half) - np.float32(quarter))
    wanted = {
        "num_sequences": 2, "num_tokens": 3, "num_nan": 0, "num_inf": 0,
        "k1": 0.0,
        "k2": ln2**2 / 3,
        # exp(d) - 1 - d: 1 - ln 2, 0, -1/2 + ln 2
        "k3": 0.5 / 3,
        "mean_abs_d": 2 * ln2 / 3,
        "max_abs_d": ln2,
        "p50_abs_d": ln2,
        "share_outside": 2 / 3,
        # 1/2 - 1/4, 0, 1/2 - 1/4
        "prob_diff_mean": 0.5 / 3,
        "prob_diff_max": 0.25,
        "log_ppl_abs_diff_sum": ln2,
        "log_ppl_abs_diff_mean": 0.75 * ln2,
        # weights 2, 1, 1/2 and, by sequence, 2, 1/2
        "ess_token": 3.5**2 / (3 * 5.25),
        "ess_sequence": 2.5**2 / (2 * 4.25),
        "chi2_token": 5.25 / 3 - 1,
        "chi2_sequence": 4.25 / 2 - 1,
    }  # fmt: skip
    for name, value in wanted.items():
        # The logprobs are float32: ln 2 is off by 1e-8.
        np.testing.assert_allclose(row[name], value, rtol=1e-7, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("by", ["run", "step", "sequence"])
def test_every_statistic_agrees_with_numpy(tmp_path, by):
    steps = {step: draw_step(step) for step in (1, 2, 5)}
    record(tmp_path / "run", steps)
    rows = stats(tmp_path / "run", by=by).dicts()
    if by == "run":
        (row,) = rows
        check(row, expected([sequence for step in steps.values() for sequence in step]))
    elif by == "step":
        assert [row["step"] for row in rows] == [1, 2, 5]
        for row in rows:
            check(row, expected(steps[row["step"]]))
    else:
        assert len(rows) == 18
        for row, sequence in zip(rows, [s for step in steps.values() for s in step], strict=True):
            single = {
                key: row[key]
                for key in ("k1", "k2", "k3", "p99_abs_d", "ess_token", "chi2_token", "num_nan", "num_inf")
            }
            if row["num_tokens"]:
                wanted = expected([sequence])
                for name, value in single.items():
                    np.testing.assert_allclose(value, wanted[name], err_msg=name, **CLOSE)
            else:
                assert single["k3"] is None


@pytest.mark.parametrize("size", [1e-9, 1e-7, 1e-5, 1e-3, 0.0199, 0.0201, 1.0])
def test_k3_keeps_its_digits_for_tiny_differences(size):
    connection = connect_empty()
    found = connection.execute(f"SELECT expm1_minus({size}::DOUBLE), expm1_minus({-size}::DOUBLE)").fetchone()
    # exp(x) - 1 - x as its series, which these sizes need at most 20 terms of.
    wanted = [math.fsum((sign * size) ** n / math.factorial(n) for n in range(2, 22)) for sign in (1, -1)]
    np.testing.assert_allclose(found, wanted, rtol=1e-13 if size < 0.02 else 1e-11)


def connect_empty():
    import duckdb
    from tim_trace.analysis.trace.macros import sql_file

    connection = duckdb.connect()
    connection.execute(sql_file("macros"))
    return connection


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), steps=st.integers(1, 4))
def test_sums_and_tokens_give_the_same_numbers(tmp_path_factory, seed, steps):
    path = tmp_path_factory.mktemp("sums") / "run"
    record(path, {step: draw_step(seed + step) for step in range(1, steps + 1)})
    from_tokens = {by: stats(path, by=by).rows for by in ("step", "run")}
    kept = open_database(path)
    assert not sums.ensure(kept, sums.MISMATCH), "sums were kept, so no token is read again"
    # Bit for bit: one SQL makes the statistics of both.
    assert {by: stats(path, by=by).rows for by in ("step", "run")} == from_tokens


@pytest.mark.slow
def test_statistics_by_step_of_a_finished_trace_read_no_tokens(tmp_path):
    make_trace(tmp_path / "run")

    def plan():
        query = "EXPLAIN (FORMAT json) SELECT * FROM pair_steps('train', 'rollout')"
        return str(connect(tmp_path / "run").execute(query).fetchall()).lower()

    assert "unnest" in plan()
    assert summarize(tmp_path / "run")
    assert not summarize(tmp_path / "run")
    assert "unnest" not in plan()


def test_sums_grow_with_a_live_trace(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        add_step(recorder, 1, make_batch(seed=1))
        recorder.flush()
        assert len(stats(tmp_path / "run", by="step")) == 1
        assert not (tmp_path / "run" / "sums").exists()
        add_step(recorder, 2, make_batch(seed=2))
        recorder.flush()
        live = stats(tmp_path / "run", by="step").rows
    assert stats(tmp_path / "run", by="step").rows == live


@pytest.mark.slow
def test_only_steps_without_sums_are_computed(tmp_path, monkeypatch):
    path = tmp_path / "run"
    make_trace(path, steps=4)
    stats(path)
    from_all = stats(path, by="step").rows
    # A second writer adds a step, as a resumed run does.
    with Recorder.of_writer(TraceWriter(path), Capture()) as recorder:
        add_step(recorder, 9, make_batch(seed=9))
    computed_steps = []
    compute = sums._compute

    def noted(database, unit):
        _, (chunk,), _ = unit
        computed_steps.append((chunk.first_step, chunk.last_step))
        return compute(database, unit)

    monkeypatch.setattr(sums, "_compute", noted)
    database = open_database(path)
    assert not database.sums.covers(sums.MISMATCH)
    assert sums.ensure(database, sums.MISMATCH)
    assert computed_steps == [(9, 9)]
    assert stats(path, by="step").rows[:4] == from_all
    assert [row["step"] for row in stats(path, by="step").dicts()] == [1, 2, 3, 4, 9]
    # What was there before stays for who reads it just now.
    assert len(list((path / "sums").glob("sequence_sums-*"))) == 2


@pytest.mark.slow
def test_chunks_batches_and_blocks_change_no_number(tmp_path, monkeypatch):
    make_trace(tmp_path / "run", steps=7, rows=5)
    whole = {by: stats(tmp_path / "run", by=by).rows for by in ("run", "step")}
    for path in (tmp_path / "run" / "sums").iterdir():
        path.unlink()
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", 20)
    monkeypatch.setattr(chunks, "CHUNK_SEQUENCES", 7)
    monkeypatch.setattr(pair_sums, "BATCH_ROWS", 2)
    monkeypatch.setattr(pair_sums, "BATCH_TOKENS", 0)
    monkeypatch.setattr(ragged, "_BLOCK_TOKENS", 7)
    assert {by: stats(tmp_path / "run", by=by).rows for by in ("run", "step")} == whole


ROW = ("p50_abs_d", "p95_abs_d", "p99_abs_d")


@pytest.mark.slow
def test_large_runs_have_quantiles_from_histograms(tmp_path, monkeypatch):
    path = tmp_path / "run"
    make_trace(path, steps=7, rows=5)
    (exact,) = stats(path).dicts()
    assert exact["quantile_error"] == 0
    for file in (path / "sums").iterdir():
        file.unlink()
    monkeypatch.setattr(sums, "EXACT_TOKENS", 10)
    (found,) = stats(path).dicts()
    assert found["quantile_error"] == quantiles.ERROR
    assert [found[name] for name in ROW] != [exact[name] for name in ROW]
    for name in ROW:
        assert math.isclose(found[name], exact[name], rel_tol=quantiles.ERROR)
    assert {name: found[name] for name in found if name not in (*ROW, "quantile_error")} == {
        name: exact[name] for name in exact if name not in (*ROW, "quantile_error")
    }


def test_steps_of_a_run_and_merged_files_have_the_same_quantiles(tmp_path, monkeypatch):
    monkeypatch.setattr(sums, "EXACT_TOKENS", 10)
    path = tmp_path / "run"
    make_trace(path, steps=7, rows=5)
    part = stats(path, steps="2:5").rows
    (whole,) = stats(path).dicts()
    # From kept histograms, no token is read again.
    monkeypatch.setattr(sums, "computed", None)
    monkeypatch.setattr(sums, "sizes_read", None)
    assert stats(path, steps="2:5").rows == part
    assert stats(path).dicts() == [whole]


def test_the_tokens_are_read_once_by_a_first_question(tmp_path, monkeypatch):
    make_trace(tmp_path / "run", steps=3)
    asked = []
    batches = Connection.mapped_batches

    def counted(self, query, *arguments):
        asked.append(query)
        return batches(self, query, *arguments)

    monkeypatch.setattr(Connection, "mapped_batches", counted)
    stats(tmp_path / "run")
    assert len(asked) == 1


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_database_that_is_asked_again_gives_the_same_numbers(tmp_path, is_kept):
    make_trace(tmp_path / "run", steps=3)
    if is_kept:  # of the last step nothing is
        summarize(tmp_path / "run")
        with Recorder.of_writer(TraceWriter(tmp_path / "run"), Capture()) as recorder:
            add_step(recorder, 9, make_batch(seed=9))
    database = open_database(tmp_path / "run")
    by_step = stats(database, by="step").rows
    by_run = stats(database, by="run").rows
    assert stats(database, by="step").rows == by_step
    assert stats(open_database(tmp_path / "run"), by="run").rows == by_run
    assert stats(open_database(tmp_path / "run"), by="step").rows == by_step


def test_each_inner_iteration_is_a_row_of_its_own(tmp_path):
    batch = make_batch(rows=2)
    with Recorder(tmp_path / "run") as recorder:
        added = add_step(recorder, 1, batch)
        recorder.add_scores("current", added, logprobs=batch["train"])
        recorder.add_scores("current", added, logprobs=[row - 0.5 for row in batch["train"]])
    rows = stats(tmp_path / "run", pair="current:train", by="sequence").dicts()
    assert [(row["iteration_a"], row["iteration_b"]) for row in rows] == [(0, 0), (1, 0)] * 2
    np.testing.assert_allclose([row["k1"] for row in rows], [0, 0.5] * 2, rtol=1e-6)


def test_several_traces_have_a_row_each(tmp_path):
    make_trace(tmp_path / "one" / "run", steps=1)
    make_trace(tmp_path / "two" / "run", steps=2)
    both = stats([tmp_path / "one" / "run", tmp_path / "two" / "run"])
    assert [row["run"] for row in both.dicts()] == ["run", "run-2"]
    alone = stats(tmp_path / "two" / "run").dicts()[0]
    assert both.dicts()[1] == alone | {"run": "run-2"}


def test_a_pair_turned_round_changes_the_sign_of_k1(tmp_path):
    make_trace(tmp_path / "run")
    (one,), (other,) = (stats(tmp_path / "run", pair=pair).dicts() for pair in ("train:rollout", "rollout:train"))
    assert one["k1"] == -other["k1"]
    assert one["k2"] == other["k2"]


def test_a_pass_compared_with_itself_differs_nowhere(tmp_path):
    make_trace(tmp_path / "run")
    (row,) = stats(tmp_path / "run", pair="train:train").dicts()
    assert (row["k1"], row["k2"], row["k3"], row["max_abs_d"], row["share_outside"]) == (0, 0, 0, 0, 0)
    assert (row["ess_token"], row["ess_sequence"]) == (1, 1)


def test_enormous_differences_stay_numbers(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, response_ids=[[1], [1]])
        recorder.add_scores("train", added, logprobs=[[-1.0], [-1.0]])
        recorder.add_scores("rollout", added, logprobs=[[-3000.0], [-2999.0]])
    (row,) = stats(tmp_path / "run").dicts()
    assert row["max_abs_d"] == 2999.0
    assert row["k3"] == math.inf
    # Weights e^2999 and e^2998: the larger one leads out of the square.
    np.testing.assert_allclose(row["ess_sequence"], (1 + math.exp(-1)) ** 2 / (2 * (1 + math.exp(-2))))


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("train:reference", r"has no logprobs from pass 'reference'; compare two of rollout, train, e.g. with pair="),
        ("a:b", "no logprobs from pass 'a' and 'b'"),
    ],
)
def test_a_pass_that_is_not_there_is_named_with_those_that_are(tmp_path, pair, message):
    make_trace(tmp_path / "run")
    with pytest.raises(NothingToCompare, match=message):
        stats(tmp_path / "run", pair=pair)


def test_passes_that_share_no_token_are_nothing_to_compare(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, response_ids=[[1], [2]], response_mask=[[0], [1]])
        recorder.add_scores("train", added, rows=[0], logprobs=[[-1.0]])
        recorder.add_scores("rollout", added, rows=[1], logprobs=[[-1.0]])
    with pytest.raises(NothingToCompare, match="no token with a logprob in both"):
        stats(tmp_path / "run")


def test_nan_everywhere_is_counted(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, response_ids=[[1, 2]])
        recorder.add_scores("train", added, logprobs=[[math.nan, math.nan]])
        recorder.add_scores("rollout", added, logprobs=[[-1.0, -math.inf]])
    (row,) = stats(tmp_path / "run").dicts()
    assert (row["num_tokens"], row["num_nan"], row["num_inf"], row["k3"]) == (0, 2, 0, None)


@pytest.mark.parametrize("pair", ["train", "train:", ":", "a:b:c"])
def test_a_pair_is_written_with_one_colon(tmp_path, pair):
    make_trace(tmp_path / "run")
    with pytest.raises(InvalidOption, match=r"as a:b, e.g. train:rollout"):
        stats(tmp_path / "run", pair=pair)


def test_an_interrupted_answer_over_many_runs_keeps_the_sums_that_it_made(tmp_path, monkeypatch):
    runs = [tmp_path / f"run-{number}" for number in range(10)]
    for run in runs:
        make_trace(run, first=1 + int(run.name.partition("-")[2]))
    alone = [stats(str(run)).rows[0] for run in runs[:1]]
    batches, module = iter(range(100)), importlib.import_module("tim_trace.analysis.stats")

    def summarize_one_batch(*arguments, **options):
        if next(batches) == 1:
            raise KeyboardInterrupt
        return summarize(*arguments, **options)

    monkeypatch.setattr(module, "_TOGETHER", 3)
    monkeypatch.setattr(module, "summarize", summarize_one_batch)
    with pytest.raises(KeyboardInterrupt):
        stats([str(run) for run in runs])
    assert sum(any((run / "sums").glob("*")) for run in runs[1:] if (run / "sums").exists()) == 3
    monkeypatch.setattr(module, "summarize", summarize)
    together = stats([str(run) for run in runs]).rows
    assert len(together) == 10
    assert together[0][1:] == alone[0][1:]
    assert all(any((run / "sums").glob("*")) for run in runs)


@pytest.mark.slow
def test_runs_together_have_the_numbers_and_sums_that_each_has_alone(tmp_path, monkeypatch):
    names = ["NULL", "a b", "50%25", "it's=1", "x", "[y]*?", "\u00fc+", "longer", "last"]
    alone, together = tmp_path / "alone", tmp_path / "together"
    for number, name in enumerate(names):
        make_trace(alone / name, first=1 + number, steps=3 if name == "longer" else 2)
    shutil.copytree(alone, together)
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", 70)  # two or three of the runs, and some steps of the longer one
    rows = {by: [row for name in sorted(names) for row in stats(alone / name, by=by).rows] for by in ("run", "step")}
    assert {by: stats([together / name for name in names], by=by).rows for by in rows} == rows
    last = {row[0]: row for row in rows["step"]}
    assert stats([together / name for name in names], by="step", steps="-1:").rows == [*last.values()]
    kept = [{path.name: path.read_bytes() for path in side.glob("*/sums/*")} for side in (alone, together)]
    assert kept[0] == kept[1]
    assert len(kept[0]) == len(names) * len(KINDS)
