"""The named queries, against NumPy over the same tokens."""

import numpy as np
import pytest
from builders import make_trace, tim_trace
from rich_trace import by_sequence, close, make_rich_trace, of_step, tokens_of
from tim_trace.analysis.queries.catalogue import catalogue, named_query, query
from tim_trace.analysis.query import sql
from tim_trace.schemas.errors import InvalidOption, NothingToCompare
from tim_trace.tracer.recorder import Recorder

NAMES = [each.name for each in catalogue()]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return make_rich_trace(tmp_path_factory.mktemp("catalogue") / "run")


@pytest.fixture(scope="module")
def tokens(trace):
    return tokens_of(trace)


def rows(trace, name, **options):
    return query(name, trace, **options).dicts()


@pytest.mark.parametrize("name", NAMES)
def test_every_query_says_what_it_is_and_runs(trace, name):
    chosen = named_query(name)
    assert chosen.unit
    assert chosen.source
    assert chosen.meaning
    assert len(chosen.summary) <= 120
    assert rows(trace, name)
    assert sql(trace, chosen.over("rollout", "train")).rows


def test_bins_hold_every_token_once(trace, tokens):
    for name in ("by-probability", "by-position", "by-turn"):
        assert sum(row["num_tokens"] for row in rows(trace, name)) == len(tokens["d"]), name
    assert sum(row["num_sequences"] for row in rows(trace, "by-length")) == len(np.unique(tokens["sequence"]))


def test_decades_of_probability(trace, tokens):
    decade = np.floor(tokens["logprob_b"].astype(float) / np.log(10))
    for row in rows(trace, "by-probability"):
        inside = decade == row["decade"]
        d = tokens["d"][inside]
        share = tokens["k3"][inside].sum() / tokens["k3"].sum()
        close(
            row,
            {"num_tokens": inside.sum(), "mean_d": d.mean(), "rms_d": np.sqrt((d * d).mean()), "share_of_k3": share},
        )


def test_places_are_taken_by_powers_of_two(trace, tokens):
    for row in rows(trace, "by-position"):
        first = row["first_position"]
        inside = (tokens["position"] >= first) & (tokens["position"] < max(2 * first, 1))
        close(row, {"num_tokens": inside.sum(), "mean_abs_d": np.abs(tokens["d"][inside]).mean()})


def test_turns_are_stretches_of_the_mask(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        mask = [[True, True, False, True, False, False, True]]
        batch = recorder.add_sequences(step=1, prompt_ids=[[1]], response_ids=[[2] * 7], response_mask=mask)
        recorder.add_scores("rollout", batch, logprobs=[[-1.0] * 7])
        recorder.add_scores("train", batch, logprobs=[[-1.0, -1.5, -9.0, -2.0, -9.0, -9.0, -4.0]])
    found = [(row["turn"], row["num_tokens"], row["mean_d"]) for row in rows(tmp_path / "run", "by-turn")]
    assert found == [(1, 2, -0.25), (2, 1, -1.0), (3, 1, -3.0)]


def test_groups_carry_shares_of_the_gap(trace, tokens):
    for name, key in (("by-token", "token_id"), ("by-prompt", "group_id")):
        found = rows(trace, name)
        assert sum(row["share_of_k3"] for row in found) == pytest.approx(1.0)
        assert [row["share_of_k3"] for row in found] == sorted((row["share_of_k3"] for row in found), reverse=True)
        inside = tokens[key] == found[0][key]
        if name == "by-prompt":
            inside &= tokens["step"] == found[0]["step"]
        close(found[0], {"num_tokens": inside.sum(), "max_abs_d": np.abs(tokens["d"][inside]).max()})


def test_perplexities_are_means_over_sequences(trace, tokens):
    for row in rows(trace, "log-ppl"):
        step = of_step(tokens, row["step"])
        counts = by_sequence(step, np.ones(len(step["d"])))
        a, b = (-by_sequence(step, step[name].astype(float)) / counts for name in ("logprob_a", "logprob_b"))
        sums = by_sequence(step, step["d"])
        close(row, {
            "log_ppl_a": a.mean(), "log_ppl_diff": (a - b).mean(), "log_ppl_abs_diff": np.abs(a - b).mean(),
            "log_ppl_diff_max": (a - b).max(), "ppl_ratio": np.exp(a - b).mean(), "log_ppl_abs_diff_sum": np.abs(sums).mean(),
        })  # fmt: skip


def test_the_slope_against_the_length(trace, tokens):
    (row,) = rows(trace, "length-slope")
    counts, sums = by_sequence(tokens, np.ones(len(tokens["d"]))), by_sequence(tokens, tokens["d"])
    slope, intercept = np.polyfit(counts, sums, 1)
    close(row, {"slope": slope, "intercept": intercept, "r2": np.corrcoef(counts, sums)[0, 1] ** 2})


def test_critical_lengths(trace, tokens):
    for row in rows(trace, "critical-length"):
        step = of_step(tokens, row["step"])
        close(row, {"mean_d": step["d"].mean(), "tokens_to_5": np.log(5) / abs(step["d"].mean())})
    assert np.log(5) / 0.001 == pytest.approx(1609, abs=1)  # the source's own example


def test_concentration_and_extremes(trace, tokens):
    (row,) = rows(trace, "concentration")
    largest = np.sort(tokens["k3"])[::-1]
    kept = {"top_thousandth": 0.001, "top_hundredth": 0.01, "top_tenth": 0.1}
    close(
        row, {name: largest[: int(np.ceil(share * len(largest)))].sum() / largest.sum() for name, share in kept.items()}
    )
    for row in rows(trace, "extreme-ratios"):
        d = np.abs(of_step(tokens, row["step"])["d"])
        close(row, {"beyond_1_25": (d > np.log(1.25)).mean(), "beyond_10": (d > np.log(10)).mean()})
    assert rows(trace, "worst-tokens")[0]["d"] == pytest.approx(tokens["d"][np.abs(tokens["d"]).argmax()])


def test_bad_updates(trace, tokens):
    for row in rows(trace, "bad-updates"):
        step = of_step(tokens, row["step"])
        p, q = (np.exp(step[name].astype(float)) for name in ("logprob_b", "logprob_a"))
        wrong = (step["advantage"] < 0) & (p - q >= 0.5)
        close(row, {"num_bad": wrong.sum(), "share_bad": wrong.mean()})


def test_correlations(trace, tokens):
    for row in rows(trace, "advantage-correlation"):
        step = of_step(tokens, row["step"])
        d, advantage = step["d"], step["advantage"].astype(float)
        expected = {
            "corr_d_advantage": np.corrcoef(d, advantage)[0, 1],
            "cov_d_advantage": np.cov(d, advantage, bias=True)[0, 1],
            "mean_d_negative": d[advantage < 0].mean(),
        }
        close(row, expected)


def test_a_lag_counts_tokens_of_the_response_also_those_that_the_loss_masks(trace, tokens):
    (row,) = rows(trace, "autocorrelation")
    at = {(int(s), int(p)): d for s, p, d in zip(*(tokens[c] for c in ("sequence", "position", "d")), strict=True)}
    expected = {"num_tokens": len(at)}
    for lag in (1, 2, 8, 32):
        pairs = [(d, at[sequence, place + lag]) for (sequence, place), d in at.items() if (sequence, place + lag) in at]
        expected[f"lag_{lag}"] = np.corrcoef(*np.transpose(pairs))[0, 1]
    close(row, expected)


def test_masked_tool_output_joins_no_neighbours(tmp_path):
    # d is +, -, +, - within each turn of the model; over a tool's output the last and the first token have one sign.
    d = np.array([0.5, -0.5, 0.5, 7.0, 7.0, 0.5, -0.5, 0.5])
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(
            step=1, prompt_ids=[[1]], response_ids=[[2] * 8], response_mask=[[True] * 3 + [False] * 2 + [True] * 3]
        )
        recorder.add_scores("rollout", batch, logprobs=[np.full(8, -9.0)])
        recorder.add_scores("train", batch, logprobs=[-9.0 + d])
    (row,) = rows(tmp_path / "run", "autocorrelation")
    assert row["num_tokens"] == 6
    assert row["lag_1"] == pytest.approx(-1.0)


def test_what_is_not_finite_is_counted_by_side(trace):
    found = rows(trace, "not-finite")
    masked = sql(trace, "SELECT step, isnan(logprob_a), isinf(logprob_b) FROM pair('train', 'rollout') WHERE mask")
    for row in found:
        step = [values[1:] for values in masked.rows if values[0] == row["step"]]
        assert (row["nan_a"], row["inf_b"]) == (sum(nan for nan, _ in step), sum(inf for _, inf in step))


def test_a_name_that_is_not_there_names_the_nearest(trace):
    with pytest.raises(InvalidOption, match=r"unknown query 'by-prob'; did you mean by-probability\?"):
        query("by-prob", trace)
    with pytest.raises(InvalidOption, match="tim-trace query lists them"):
        query("zzz", trace)


def test_what_a_query_lacks_is_said(tmp_path):
    make_trace(tmp_path / "run", passes=("rollout",))
    with pytest.raises(NothingToCompare, match="has no logprobs of pass 'train'"):
        query("by-position", tmp_path / "run")
    with Recorder(tmp_path / "bare") as recorder:
        batch = recorder.add_sequences(step=1, prompt_ids=[[1]], response_ids=[[2]])
        for name in ("rollout", "train"):
            recorder.add_scores(name, batch, logprobs=[[-1.0]])
    with pytest.raises(NothingToCompare, match="query bad-updates needs advantages"):
        query("bad-updates", tmp_path / "bare")


def test_the_command_lists_prints_and_runs(trace):
    listed = tim_trace("query")
    assert [line.split()[0] for line in listed.stdout.splitlines()[2:]] == NAMES
    printed = tim_trace("query", "ess", "--sql", "--pair", "rollout:train").stdout
    assert "pair_steps('rollout', 'train')" in printed
    asked = tim_trace("sql", trace, "--json", stdin=printed)
    assert asked.json() == tim_trace("query", "ess", trace, "--pair", "rollout:train", "--json").json()
    assert tim_trace("query", "ess").code == 2
