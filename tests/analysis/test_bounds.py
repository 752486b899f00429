"""Bounds from top-K captures hold for what they were cut from, and for all else that fits them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tim_trace.analysis.distributions.bounds import compare_partly
from tim_trace.analysis.distributions.divergence import Full, compare_full
from tim_trace.analysis.distributions.topk import TopK
from tim_trace.tracer.dense import top_k_with_tail

BOUNDED = ("kl_ab", "kl_ba", "js", "tv", "entropy_a", "entropy_b")


def top_k(logits, k, temperature=1.0):
    """What a capture keeps of float32 logits."""
    arrays = top_k_with_tail(torch.tensor(logits), k, temperature)
    ids, logprobs, tail = (array.numpy() for array in arrays)
    return TopK(ids.astype(np.int64), logprobs.astype(np.float64), tail.astype(np.float64), temperature)


def tail_from_the_rest(part):
    """The tail as vLLM's reader has it: what K float32 logprobs leave of 1."""
    with np.errstate(divide="ignore"):
        tail = np.log(np.maximum(1 - np.exp(part.logprobs_CK).sum(axis=1), 0)).astype(np.float32)
    return TopK(part.ids_CK, part.logprobs_CK, tail.astype(np.float64), part.temperature)


def assert_hold(exact, found):
    for name in BOUNDED:
        assert (found[f"{name}_low"] <= exact[name]).all(), (name, found[f"{name}_low"], exact[name])
        assert (found[f"{name}_high"] >= exact[name]).all(), (name, found[f"{name}_high"], exact[name])
    known = ~np.ma.getmaskarray(found["argmax_flip"])
    assert (np.asarray(found["argmax_flip"])[known] == np.asarray(exact["argmax_flip"])[known]).all()


@st.composite
def cases(draw):
    """Two rows of float32 logits of V tokens: near, far, peaked, flat, with ties and with tokens that are cut."""
    vocab = draw(st.integers(1, 24))
    rows = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([0.0, 0.01, 1.0, 5.0, 15.0]))
    a = (rows.normal(size=(2, vocab)) * scale).astype(np.float32)
    if draw(st.booleans()):
        a = np.round(a)
    other = draw(st.sampled_from(["same", "near", "far", "opposite"]))
    far = (rows.normal(size=(2, vocab)) * scale).astype(np.float32)
    b = {
        "same": a.copy(),
        "near": (a + rows.normal(size=a.shape) * 1e-3).astype(np.float32),
        "far": far,
        "opposite": -a,
    }[other]
    for logits in (a, b):
        if draw(st.booleans()):
            cut = rows.random(logits.shape) < 0.5
            cut[:, draw(st.integers(0, vocab - 1))] = False
            logits[cut] = -np.inf
    k = draw(st.integers(1, vocab)), draw(st.integers(1, vocab))
    return a, b, k, draw(st.sampled_from([0.5, 1.0, 2.0])), draw(st.booleans())


@pytest.mark.slow
@given(cases())
@settings(max_examples=300, deadline=None)
def test_they_hold_for_the_distributions_that_were_cut(case):
    a, b, k, temperature, from_rest = case
    whole_a, whole_b = (Full(logits.astype(np.float64) / temperature) for logits in (a, b))
    part_a, part_b = top_k(a, k[0], temperature), top_k(b, k[1], temperature)
    if from_rest:
        part_a, part_b = tail_from_the_rest(part_a), tail_from_the_rest(part_b)
    exact = compare_full(whole_a, whole_b)
    assert_hold(exact, compare_partly(part_a, part_b))
    assert_hold(exact, compare_partly(whole_a, part_b))
    assert_hold(exact, compare_partly(part_a, whole_b))


@pytest.mark.slow
@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from([0.05, 1.0, 50.0]))
@settings(max_examples=200, deadline=None)
def test_they_hold_for_any_other_tail_that_fits(seed, k, alpha):
    """Tails drawn anew, with no token above the least listed one."""
    draw = np.random.default_rng(seed)
    p, q = (completed(draw, top, alpha) for top in (listed(draw, k), listed(draw, k)))
    with np.errstate(divide="ignore"):
        whole = [Full(np.log(row)[None]) for row in (p, q)]
        order = [np.argsort(-row, kind="stable")[:k] for row in (p, q)]
        parts = [
            TopK(ids[None], np.log(row[ids])[None], np.log(np.maximum(1 - row[ids].sum(), 0))[None])
            for row, ids in zip((p, q), order, strict=True)
        ]
    exact = compare_full(*whole)
    for pair in ((parts[0], parts[1]), (whole[0], parts[1]), (parts[0], whole[1])):
        assert_hold(exact, compare_partly(*pair))


def listed(draw, k):
    """Probabilities of K tokens of 30, and which they are."""
    return draw.permutation(30)[:k], np.sort(draw.dirichlet(np.ones(k + 1)))[::-1][:k]


def completed(draw, top, alpha):
    """A distribution with these probabilities whose other tokens are capped by the least of them."""
    ids, listed = top
    p = np.zeros(30)
    p[ids] = listed
    others = np.setdiff1d(np.arange(30), ids)
    left = 1 - listed.sum()
    share = draw.dirichlet(np.full(len(others), alpha)) * left
    for _ in range(50):
        over = np.maximum(share - listed.min(), 0)
        share = np.minimum(share, listed.min())
        room = share < listed.min()
        if over.sum() < 1e-15 or not room.any():
            break
        share[room] += over.sum() / room.sum()
    p[others] = np.minimum(share, listed.min())
    return p / p.sum()


def test_without_a_tail_they_close():
    logits = np.array([[1.0, 0.5, -1.0, 0.0]], np.float32)
    other = np.array([[0.5, 1.0, -1.0, 0.25]], np.float32)
    exact = compare_full(Full(logits.astype(np.float64)), Full(other.astype(np.float64)))
    found = compare_partly(top_k(logits, 4), Full(other.astype(np.float64)))
    for name in ("kl_ab", "kl_ba", "js", "tv"):
        # What is left is the allowance for float32.
        assert found[f"{name}_high"] - found[f"{name}_low"] < 1e-4, name
        assert found[f"{name}_low"] <= exact[name] <= found[f"{name}_high"]


def test_disjoint_lists_are_known_to_lie_far_apart():
    logits = np.full((1, 1000), -5.0, np.float32)
    a, b = logits.copy(), logits.copy()
    a[0, 0] = b[0, 1] = 12.0
    found = compare_partly(top_k(a, 1), top_k(b, 1))
    assert found["tv_low"] > 0.95
    assert found["js_low"] > 0.6
    assert found["kl_ab_low"] > 5.0
    assert found["kl_ab_high"] == np.inf
    assert found["argmax_flip"]


def test_a_tied_first_place_says_nothing_of_a_flip():
    tied = TopK(np.array([[3, 5]]), np.log([[0.25, 0.25]]), np.log([0.5]))
    clear = TopK(np.array([[3, 5]]), np.log([[0.5, 0.25]]), np.log([0.25]))
    assert np.ma.getmaskarray(compare_partly(tied, clear)["argmax_flip"]).all()
    assert not compare_partly(clear, clear)["argmax_flip"][0]


def test_a_whole_side_that_is_full_bounds_kl_from_above():
    draw = np.random.default_rng(0)
    a = (draw.normal(size=(5, 200)) * 3).astype(np.float32)
    found = compare_partly(top_k(a, 20), Full((a + 0.01 * draw.normal(size=a.shape)).astype(np.float64)))
    assert np.isfinite(found["kl_ab_high"]).all()
    assert (found["kl_ba_high"] == np.inf).all()


@pytest.mark.parametrize("tail", [np.nan])
def test_nan_stays_nan(tail):
    part = TopK(np.array([[0, 1]]), np.log([[0.5, 0.25]]), np.array([tail]))
    assert np.isnan(compare_partly(part, part)["tv_low"]).all()
