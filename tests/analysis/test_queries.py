"""The named queries that need more than two passes' logprobs, against NumPy and by hand."""

import numpy as np
import pytest
from rich_trace import close, make_rich_trace, of_sequences, of_step, tokens_of
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
def captured(trace):
    return tokens_of(trace, "pair_distributions('train', 'rollout')", "mask")


def rows(trace, name, **options):
    return query(name, trace, **options).dicts()


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


def test_divergences_are_those_of_the_distributions(trace, captured):
    for row in rows(trace, "divergences"):
        step = of_step(captured, row["step"])
        close(row, {"mean_tv": step["tv"].mean(), "max_kl_ba": step["kl_ba"].max(), "mean_js": step["js"].mean()})


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
        ("advantage-correlation", "advantages"),
        ("divergences", "distributions"),
    ):
        with pytest.raises(NothingToCompare, match=f"query {name} needs {needs}.*; not recorded for train and rollout"):
            query(name, tmp_path / "run")
