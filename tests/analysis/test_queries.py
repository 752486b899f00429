"""The named queries that need more than two passes' logprobs, against NumPy and by hand."""

import numpy as np
import pytest
from rich_trace import close, make_rich_trace, of, of_sequences, of_step, tokens_of
from tim_trace.analysis.queries.catalogue import query
from tim_trace.schemas.errors import NothingToCompare
from tim_trace.tracer.recorder import Recorder


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return make_rich_trace(tmp_path_factory.mktemp("queries") / "run")


@pytest.fixture(scope="module")
def tokens(trace):
    return tokens_of(trace)


@pytest.fixture(scope="module")
def entropies(trace):
    return tokens_of(trace, "pair_entropies('train', 'rollout')")


@pytest.fixture(scope="module")
def current(trace):
    return tokens_of(trace, "pair_current('train', 'rollout')", "mask AND isfinite(d) AND isfinite(stale)")


@pytest.fixture(scope="module")
def captured(trace):
    return tokens_of(trace, "pair_distributions('train', 'rollout')", "mask")


def rows(trace, name, **options):
    return query(name, trace, **options).dicts()


def probabilities(tokens):
    return np.exp(tokens["logprob_b"].astype(float)), np.exp(tokens["logprob_a"].astype(float))


def test_entropies_are_the_rollout_s(trace, entropies):
    found = rows(trace, "by-entropy")
    assert sum(row["num_tokens"] for row in found) == len(entropies["d"])
    for row in found:
        inside = np.floor(entropies["entropy"] * 4) / 4 == row["entropy_from"]
        d = entropies["d"][inside]
        close(row, {"num_tokens": inside.sum(), "mean_abs_d": np.abs(d).mean(), "max_abs_d": np.abs(d).max(),
                    "share_of_k3": entropies["k3"][inside].sum() / entropies["k3"].sum()})  # fmt: skip
    first = None
    for row in rows(trace, "entropy"):
        step = of_step(entropies, row["step"])
        first = first or step["entropy"].mean()
        close(row, {
            "mean_entropy": step["entropy"].mean(), "share_of_first": step["entropy"].mean() / first,
            "approx_entropy": -(np.exp(step["d"]) * step["logprob_a"]).mean(),
            "kl_ent_ratio": step["k3"].mean() / step["entropy"].mean(),
        })  # fmt: skip


def test_gaps_are_binned_by_powers_of_four(trace, entropies):
    found = rows(trace, "by-top2-gap")
    assert sum(row["num_tokens"] for row in found) == len(entropies["d"])
    for row in found:
        inside = (entropies["top2_gap"] >= row["gap_from"]) & (entropies["top2_gap"] < 4 * row["gap_from"])
        close(row, {"num_tokens": inside.sum(),
                    "share_within": (np.abs(entropies["d"]) > entropies["top2_gap"])[inside].mean()})  # fmt: skip


def test_flips_are_those_of_the_distributions(trace, captured):
    found = rows(trace, "flips-by-gap")
    assert sum(row["num_tokens"] for row in found) == len(captured["argmax_flip"])
    flipped = sum(row["num_tokens"] * row["share_flipped"] for row in found)
    assert flipped == pytest.approx(captured["argmax_flip"].sum())
    for row in rows(trace, "divergences"):
        step = of_step(captured, row["step"])
        close(row, {"mean_tv": step["tv"].mean(), "max_kl_ba": step["kl_ba"].max(), "mean_js": step["js"].mean()})


def test_distances_under_their_other_names(trace, tokens):
    for row in rows(trace, "distances"):
        step = of_step(tokens, row["step"])
        d, (p, q) = step["d"], probabilities(step)
        mean = np.log((p + q) / 2)
        a, b = step["logprob_a"].astype(float) - mean, step["logprob_b"].astype(float) - mean
        close(row, {
            "k3_reverse": (np.expm1(-d) + d).mean(), "mult_prob_error": np.exp(np.abs(d)).mean(),
            "js_sampled": (np.expm1(a) - a + np.expm1(b) - b).mean() / 2, "is_ratio_mean": np.exp(d).mean(),
            "ser": np.mean([np.abs(np.expm1(each["d"])).mean() for each in of_sequences(step)]),
            "prob_diff_std": np.abs(p - q).std(ddof=1),
        })  # fmt: skip


def test_nemo_rl_s_own_example_of_directions(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(step=1, prompt_ids=[[1]], response_ids=[[2]])
        recorder.add_scores("rollout", batch, logprobs=[[-5.0]])
        recorder.add_scores("train", batch, logprobs=[[-15.0]])
    (row,) = rows(tmp_path / "run", "distances")
    assert row["k3_reverse"] == pytest.approx(22015, abs=1)


def test_sequences_that_opsm_drops(trace, tokens):
    for row in rows(trace, "opsm"):
        sequences = of_sequences(of_step(tokens, row["step"]))
        advantage = np.array([each["advantage"][0] for each in sequences])
        drift = np.array([-each["d"].mean() for each in sequences])
        close(row, {"share_negative": (advantage < 0).mean(),
                    "dropped_at_0_01": ((advantage < 0) & (drift > 0.01)).mean()})  # fmt: skip


def test_what_the_clips_let_through_and_probability_masks_catch(trace, tokens):
    for row, masks in zip(rows(trace, "unclipped-negative"), rows(trace, "probability-masks"), strict=True):
        step = of_step(tokens, row["step"])
        d, advantage, (p, q) = step["d"], step["advantage"].astype(float), probabilities(step)
        free = (advantage < 0) & (d > np.log(1.2))
        weight = np.exp(d) * np.abs(advantage)
        close(row, {"share_beyond_1_2": free.mean(), "max_ratio": np.exp(d[advantage < 0]).max(),
                    "share_of_loss": weight[free].sum() / weight.sum()})  # fmt: skip
        masked = (d * advantage > 0) & (np.abs(p - q) > 0.1)
        close(masks, {"masked_at_0_1": masked.mean()})


def test_where_a_response_is_first_off(trace, tokens):
    for row in rows(trace, "first-divergence"):
        firsts = [each["position"][np.abs(each["d"]) > 0.1] for each in of_sequences(of_step(tokens, row["step"]))]
        places = [found[0] for found in firsts if len(found)]
        close(row, {"share_0_1": len(places) / len(firsts), "median_first_0_1": np.median(places)})


def test_responses_of_a_prompt_are_compared(tmp_path):
    responses = [[1, 2, 3], [1, 2, 3], [1, 2, 4, 5], [7], [7], [8, 8]]
    with Recorder(tmp_path / "run") as recorder:
        groups = ["a", "a", "a", "b", "b", "alone"]
        recorder.add_sequences(step=1, prompt_ids=[[1]] * 6, response_ids=responses, group_ids=groups)
    (row,) = rows(tmp_path / "run", "unique-responses")
    assert row == {"run": "run", "step": 1, "num_groups": 2, "mean_share_unique": pytest.approx((2 / 3 + 1 / 2) / 2),
                   "share_of_groups_alike": 0.5, "mean_shared_tokens": 2.0}  # fmt: skip


def test_log_ratios_are_mismatch_and_staleness(trace, current):
    found = rows(trace, "staleness")
    assert [(row["step"], row["iteration"]) for row in found] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for row in found:
        inside = of(current, step=row["step"], iteration=row["iteration"])
        d, stale = inside["d"], inside["stale"]
        total = inside["logprob_current"] - inside["logprob_b"]
        close(row, {"mean_d": d.mean(), "var_stale": stale.var(), "var_total": total.var(),
                    "share_mismatch": (d**2).mean() / ((d**2).mean() + (stale**2).mean())})  # fmt: skip
        assert row["var_d"] + row["var_stale"] + 2 * row["cov_d_stale"] == pytest.approx(row["var_total"])


def test_rejection_by_length(trace, tokens):
    sequences = [each["d"] for each in of_sequences(tokens)]
    for row in rows(trace, "rejection-by-length"):
        inside = [d for d in sequences if row["shortest"] <= len(d) < 2 * row["shortest"]]
        kept = np.mean([(d * d / 2).max() <= 0.05 for d in inside])
        close(row, {
            "num_sequences": len(inside), "kept_by_max_k2_0_05": kept,
            "kept_by_mean_k3_0_001": np.mean([(np.expm1(d) - d).mean() <= 0.001 for d in inside]),
            "kept_by_geometric": np.mean([0.999 <= np.exp(-d.mean()) <= 1.001 for d in inside]),
            "kept_by_sequence_ratio": np.mean([0.5 <= np.exp(d.sum()) <= 2 for d in inside]),
        })  # fmt: skip
        if kept:
            close(row, {"per_token_rejection": -np.log(kept) / np.mean([len(d) for d in inside])})
        else:
            assert row["per_token_rejection"] is None


def test_concentration_as_a_gini_coefficient(trace, tokens):
    (row,) = rows(trace, "concentration")
    k3 = tokens["k3"]
    between_all = np.abs(k3[:, None] - k3[None, :]).mean()
    close(row, {"gini": between_all / (2 * k3.mean())})


def test_what_is_missing_is_named_and_nothing_else(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(step=1, prompt_ids=[[1]], response_ids=[[2]])
        for name in ("rollout", "train"):
            recorder.add_scores(name, batch, logprobs=[[-1.0]])
    for name, needs in (
        ("by-entropy", "the entropy"),
        ("staleness", "the `current` pass"),
        ("divergences", "distributions"),
    ):
        with pytest.raises(NothingToCompare, match=f"query {name} needs {needs}.*; not recorded for train and rollout"):
            query(name, tmp_path / "run")
