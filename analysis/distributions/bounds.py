"""Bound the divergence between two distributions if one or both are known only by the top K and the tail's mass.

Shapes: C rows; M columns: the tokens that either side lists, or the whole vocabulary if one side is full.

Each side comes with an interval [lo, hi] for each listed token's probability; an interval for t, the unlisted tokens'
total mass; and `cap`, the largest probability that an unlisted token can have, which is the smallest listed
probability, or t if t is smaller. The bounds hold for all distributions consistent with these. Proof, with h(p, q) from
divergence.py (h(p, p) = 0, h >= 0, jointly convex, homogeneous of degree 1):

Merging. Convexity and homogeneity give h(p1 + p2, q1 + q2) <= h(p1, q1) + h(p2, q2): the log-sum inequality for KL, and
in general the data-processing inequality on a partition of the vocabulary (Csiszar and Shields 2004, Information theory
and statistics: a tutorial, lemma 4.1). So for any partition, a divergence is at least the sum of h over its cells.

Lower bound. As a function of p, h(p, q) decreases up to q and increases beyond q; the same holds with p and q swapped.
If p and q each lie in an interval, the minimum of h is therefore 0 if the intervals overlap, and otherwise h at their
two nearest endpoints. For any partition, these minima summed over its cells are a lower bound. Three such bounds are
computed and the largest is used; each partition has one cell for every token that both sides list, and
    (1) one cell for all other tokens;
    (2) one for the n tokens that only a lists, with q in [0, min(t_b, n cap_b)], one for those that only b lists, and
        one for those that neither side lists;
    (3) one for each token that only one side lists, with the other side's probability in [0, cap], and one for the
        tokens that neither side lists.

Upper bound. A convex h is largest at a corner. For tokens not listed by both sides, merging gives h(p, q) <= h(p, 0) +
h(0, q), as for disjoint supports: (p + q) / 2 for the total variation and ln 2 (p + q) / 2 for Jensen-Shannon. KL(a ||
b) is unbounded (inf) if a may have mass where b has none. If b is full and has no zeros, it is finite: a's unlisted
probabilities are at most cap and add up to at most t, so sum p ln(p / q) is at most sum p max(ln(cap / q), 0), which is
largest with as much mass as possible on the smallest q.

Entropy. An unlisted token contributes p ln(1 / p) >= p ln(1 / cap), and n unlisted tokens with total mass t contribute
at most t ln(n / t). A top-K side's vocabulary size is unknown. The other side's size is used if that side is full;
otherwise 2^31, because ids are int32.

Rounding. Captured logprobs are float32, computed in float32 from logits divided by a temperature: a logit x has an
error up to 2^-23 |x|. The intervals allow 2^-23 (64 / min(temperature, 1) + 4 |logprob|) nats, which covers logits
up to 64 before temperature. The tail's mass, which an engine may compute as 1 - sum, gets the same allowance in total.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .divergence import Array, Full, entropy, even_entropy, log_softmax, unknown
from .topk import PartialDistribution, TopK, argmax, columns, entropy_bounds, is_broken

LN2 = float(np.log(2.0))
_DIGITS = 1e-12
"""Bound on the rounding error of a float64 sum that is at most 1."""

H = Callable[[Array, Array], Array]


@dataclass(frozen=True, slots=True)
class _Box:
    p_lo: Array
    p_hi: Array
    q_lo: Array
    q_hi: Array

    def least(self, h: H) -> Array:
        above, below = self.p_lo > self.q_hi, self.q_lo > self.p_hi
        p = np.where(above, self.p_lo, np.where(below, self.p_hi, 0.0))
        return h(p, np.where(above, self.q_hi, np.where(below, self.q_lo, 0.0)))

    def most(self, h: H) -> Array:
        corners = [h(p, q) for p in (self.p_lo, self.p_hi) for q in (self.q_lo, self.q_hi)]
        return np.asarray(np.maximum.reduce(corners))


def kl(p: Array, q: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        x = (p - q) / q
        near = np.abs(x) < 0.1
        x = np.where(near, x, 0.0)
        terms = np.where(near, q * ((1 + x) * np.log1p(x) - x), p * (np.log(p) - np.log(q)) - p + q)
        terms = np.where(p > 0, terms, q)
    return np.where((q == 0) & (p > 0), np.inf, terms)


def js(p: Array, q: Array) -> Array:
    mass = p + q
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(mass > 0, mass / 4 * even_entropy(np.where(mass > 0, (p - q) / mass, 0.0)), 0.0)


def tv(p: Array, q: Array) -> Array:
    return np.asarray(np.abs(p - q) / 2)


def compare_partly(a: Full | TopK, b: Full | TopK) -> dict[str, Array]:
    side_a, side_b, outside = columns(a, b)
    found: dict[str, Array] = {}
    for name, (low, high) in {
        "kl_ab": _ends(kl, side_a, side_b, outside), "kl_ba": _ends(kl, side_b, side_a, outside),
        "js": _ends(js, side_a, side_b, outside, LN2 / 2), "tv": _ends(tv, side_a, side_b, outside, 0.5),
        "entropy_a": entropy_bounds(a, b), "entropy_b": entropy_bounds(b, a),
    }.items():  # fmt: skip
        found[f"{name}_low"] = np.maximum(low * (1 - 1e-9) - _DIGITS, 0.0)
        found[f"{name}_high"] = high * (1 + 1e-9) + _DIGITS
    found["js_high"], found["tv_high"] = np.minimum(found["js_high"], LN2), np.minimum(found["tv_high"], 1.0)
    broken = is_broken(a) | is_broken(b)
    found = {name: np.where(broken, np.nan, values) for name, values in found.items()}
    (top_a, tied_a), (top_b, tied_b) = argmax(a), argmax(b)
    found["argmax_flip"] = unknown(top_a != top_b, tied_a | tied_b | broken)
    for name, side in (("a", a), ("b", b)):
        if isinstance(side, Full):
            found[f"entropy_{name}"] = entropy(log_softmax(side.logits_CV))
            found[f"vocab_{name}"] = np.full(len(broken), side.logits_CV.shape[1])
    return found


def _ends(
    h: H, a: PartialDistribution, b: PartialDistribution, outside: bool, disjoint: float | None = None
) -> tuple[Array, Array]:
    """Return a lower and an upper bound on the sum of h(p, q) over the vocabulary. `disjoint` is h(1, 0), or None if it
    is infinite."""
    both = a.listed_CM & b.listed_CM
    box = _Box(a.lo_CM, a.hi_CM, b.lo_CM, b.hi_CM)
    low = _sum(box.least(h), both) + _least_of_the_rest(h, a, b, both)
    most = _sum(box.most(h), both)
    if disjoint is None:
        return low, most + _most_of_the_rest_kl(a, b, outside)
    return low, most + disjoint * (_rest(a, both)[1] + _rest(b, both)[1])


def _rest(side: PartialDistribution, both: Array) -> tuple[Array, Array]:
    """Return the smallest and largest total mass that a side can have outside the tokens that both sides list."""
    own = side.listed_CM & ~both
    low = np.maximum(_sum(side.lo_CM, own) + side.tail_lo_C, 1 - _sum(side.hi_CM, both))
    high = np.minimum(_sum(side.hi_CM, own) + side.tail_hi_C, 1 - _sum(side.lo_CM, both))
    low = np.clip(low - _DIGITS, 0.0, 1.0)
    return low, np.maximum(np.clip(high + _DIGITS, 0.0, 1.0), low)


def _least_of_the_rest(h: H, a: PartialDistribution, b: PartialDistribution, both: Array) -> Array:
    only_a, only_b = a.listed_CM & ~both, b.listed_CM & ~both
    one = _Box(*_rest(a, both), *_rest(b, both)).least(h)
    in_b = np.minimum(a.tail_hi_C, only_b.sum(axis=1) * a.cap_C)
    in_a = np.minimum(b.tail_hi_C, only_a.sum(axis=1) * b.cap_C)
    neither = _Box(
        np.maximum(a.tail_lo_C - in_b, 0.0), a.tail_hi_C, np.maximum(b.tail_lo_C - in_a, 0.0), b.tail_hi_C
    ).least(h)
    none = np.zeros_like(in_a)
    two = _Box(_sum(a.lo_CM, only_a), _sum(a.hi_CM, only_a), none, in_a).least(h)
    two += _Box(none, in_b, _sum(b.lo_CM, only_b), _sum(b.hi_CM, only_b)).least(h)
    no, cap_a, cap_b = np.zeros_like(a.lo_CM), a.cap_C[:, None] + 0 * a.lo_CM, b.cap_C[:, None] + 0 * b.lo_CM
    three = _sum(_Box(a.lo_CM, a.hi_CM, no, cap_b).least(h), only_a)
    three += _sum(_Box(no, cap_a, b.lo_CM, b.hi_CM).least(h), only_b)
    return np.asarray(np.maximum(one, np.maximum(two, three) + neither))


def _most_of_the_rest_kl(a: PartialDistribution, b: PartialDistribution, outside: bool) -> Array:
    both = a.listed_CM & b.listed_CM
    only_a, only_b = a.listed_CM & ~both, b.listed_CM & ~both
    has_tail = (a.tail_hi_C > 0) & (a.cap_C > 0)
    unbounded = (only_a & (a.hi_CM > 0)).any(axis=1)
    unbounded |= has_tail & ((only_b & (b.lo_CM == 0)).any(axis=1) | outside)
    high = _most_on_the_least(a, np.where(only_b & (b.lo_CM > 0), b.lo_CM, np.inf))
    high = high - a.tail_lo_C + _sum(b.hi_CM, only_b) + b.tail_hi_C
    return np.where(unbounded, np.inf, high)


def _most_on_the_least(a: PartialDistribution, q_CM: Array) -> Array:
    """Return the maximum of sum p max(ln(cap / q), 0) over all p with p <= cap and sum p <= tail_hi."""
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = np.maximum(np.log(a.cap_C)[:, None] - np.log(np.sort(q_CM, axis=1)), 0.0)
        filled = np.minimum(np.floor(a.tail_hi_C / a.cap_C), q_CM.shape[1])
    filled = np.nan_to_num(filled, posinf=0.0)
    gain = np.nan_to_num(np.concatenate([gain, np.zeros((len(gain), 1))], axis=1), posinf=0.0, neginf=0.0)
    sums = np.concatenate([np.zeros((len(gain), 1)), np.cumsum(gain, axis=1)], axis=1)
    place = filled.astype(np.int64)[:, None]
    left = np.maximum(a.tail_hi_C - filled * a.cap_C, 0.0)
    whole, rest = (np.take_along_axis(values, place, axis=1)[:, 0] for values in (sums, gain))
    return np.asarray(a.cap_C * whole + left * rest)


def _sum(values: Array, where: Array) -> Array:
    return np.asarray(np.where(where, values, 0.0).sum(axis=1))
