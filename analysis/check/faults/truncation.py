"""Probability mass missing in one pass: cut off by top-p, top-k, min-p or a grammar, or assigned to
vocabulary padding.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .. import commands
from ..finding import Fault, Finding
from ..likelihood import Hypothesis, of_signs
from ..pair_data import MIN_REST, PairData, declared
from ..rounding import allowed_noise

TRUNCATION = Fault(
    code="truncation",
    title="top-p, top-k or min-p renormalised on one side only",
    broken="recording",
    evidence={
        "kept_mass": "{side} is never below {other}: it was renormalised over the tokens that sampling kept, which "
        "have {kept_mass:.4g} of the probability mass of {other} on average and at least "
        "{least_mass:.3g}{recorded_text}"
    },
    words={"kept_mass": lambda n: {"recorded_text": f"; recorded: {n['recorded']}" if n.get("recorded") else ""}},
)
PADDED_VOCABULARY = Fault(
    code="padded_vocabulary",
    title="one side's softmax covers more tokens: vocabulary padding, forbidden tokens, or a shard that the other side "
    "lacks",
    broken="computation",
    evidence={
        "lost_mass": "{side} is never above {other}: it gives {lost_mass:.3g} of its probability to ids that {other} "
        "leaves out, i.e. head rows beyond the tokenizer's length, tokens that {other} forbids, or a vocabulary shard "
        "that {other} lacks"
    },
)
MIN_ONE_SIDED = 0.6
"""Minimum |mean d| / mean |d| for a mismatch to count as one-sided: the ratio is 1 if all d have one sign, 0 if they cancel
out."""
MAX_MINOR_SHARE = 0.05
"""Maximum share of the larger differences that may have the opposite sign; for rounding it is one half."""


def find_one_sided(data: PairData) -> list[Hypothesis]:
    """Detect that nearly all of the larger differences have the same sign. The mean of exp(-|d|) over sampled tokens is
    then the probability mass that both passes share.

    A token filter raises the logprobs of likely and unlikely tokens by the same amount. If unlikely tokens are off by
    far more, one side computes them wrongly.
    """
    size = np.abs(data.d)
    if len(size) < 20 or not size.any():
        return []
    squares = size * size
    negative = float(squares[data.d < 0].sum() / squares.sum())
    minor = size[data.d > 0] if negative > 0.5 else size[data.d < 0]
    # Differences from rounding have both signs; differences larger than rounding must have only one.
    large = size > 2 * (float(np.quantile(minor, 0.95)) if len(minor) else 0.0)
    wrong = float(np.mean((data.d[large] > 0) == (negative > 0.5))) if large.any() else 1.0
    clear = wrong <= MAX_MINOR_SHARE and squares[large].sum() >= 0.5 * squares.sum()
    # Scaled logits change logprobs in the tail by a lot in one direction, and all others by a little in the opposite direction.
    lean = abs(float(data.d.mean())) / float(size.mean())
    if lean < (MIN_ONE_SIDED if clear else 0.7):
        return []
    # Lost mass changes every token in one direction; the few exceptions are rounding. A wrong computation also moves
    # some tokens by nats in the other direction.
    other = (data.d > 0) if negative > 0.5 else (data.d < 0)
    most = 3 * allowed_noise(data) * data.scale
    if np.sum(size[other] > most[other]) > 0.02 * other.sum() or _grows_with_surprise(data):
        return []
    raised, lowered = ("b", "a") if negative > 0.5 else ("a", "b")
    mass = np.minimum(np.exp(data.d if negative > 0.5 else -data.d), 1.0)
    score = (1 - mass.mean()) / max(float(mass.std()) / np.sqrt(len(mass)), 1e-12)
    if score < (4 if clear else 8):
        return []
    of = _truncation if _is_cut(data, raised) else _padding
    sign = np.full(data.num_kept, -1.0 if negative > 0.5 else 1.0)
    found = of_signs(data, of(data, raised, lowered, mass), sign, 4.0)
    # A recorded filter is tested first.
    return [replace(found, gain=float("inf")) if _is_recorded(data, raised, size) else found]


def _is_recorded(data: PairData, raised: str, size: np.ndarray) -> bool:
    """Return True if the recording names a filter whose top-p, if it has one, agrees with the mass kept."""
    if not recorded_filter(data) or data.names[raised] == "train":
        return False
    kept = data.sample.settings["top_p"]
    kept = kept[np.isfinite(kept)]
    least = float(kept.min()) if len(kept) else 1.0
    if least >= 1.0:
        return True
    return float(np.mean(size > -np.log(least) + 3 * allowed_noise(data))) < 0.01


def _grows_with_surprise(data: PairData) -> bool:
    """Return True if |d| grows with a token's surprise by more than lost mass can explain, which shifts all tokens of a
    context equally.
    """
    surprise = -np.maximum(data.a, data.b)
    order = np.argsort(surprise, kind="stable")
    likely, unlikely = np.array_split(order, 4)[1], np.array_split(order, 4)[3]
    size = np.abs(data.d)
    return bool(np.median(size[unlikely]) > max(3.0, 20 * float(np.median(size[likely]))))


def recorded_filter(data: PairData) -> str:
    """Return the recorded top-p, top-k and min-p that leave out tokens, as text; empty if there are none."""
    said = []
    for name in ("top_p", "top_k", "min_p"):
        values = data.sample.settings[name]
        cuts = values[(values < 1) if name == "top_p" else (values > 0)]
        if len(cuts):
            said.append(f"{name} {float(np.median(cuts)):g}")
    return ", ".join(said)


def _is_cut(data: PairData, raised: str) -> bool:
    """Return True if tokens were cut off, False if padding rows were added to the vocabulary.

    The mean of 1 / p over sampled tokens estimates how many tokens can be sampled: the whole vocabulary, or only the
    kept tokens. If the distribution has a flat tail, every nucleus has the same mass; a token alone in its nucleus has
    logprob 0.
    """
    if recorded_filter(data):
        return True
    sides = {"a": data.sample.a, "b": data.sample.b}
    cut_off = np.isneginf(sides[raised].logprobs) & np.isfinite(sides["b" if raised == "a" else "a"].logprobs)
    if np.any(cut_off & data.sample.mask):
        return True  # the other pass sampled a token that this pass cut off
    neutral = {"top_p": 1.0, "top_k": 0.0, "min_p": 0.0}
    if raised == "a" or all(np.all(data.sample.settings[name] == value) for name, value in neutral.items()):
        return False  # the recorded settings rule out truncation
    if np.mean((data.b > -1e-6) & (data.a < -1e-3)) > 0.01:
        return True
    vocabulary = int(data.sample.tokens.max()) + 1
    missing = -np.expm1(np.minimum(data.d, 0.0))
    constant = np.subtract(*np.quantile(missing, [0.9, 0.1])) < 0.02 * np.median(missing)
    return bool(constant or np.mean(np.exp(-data.b)) < 0.6 * vocabulary)


def _truncation(data: PairData, raised: str, lowered: str, mass: np.ndarray) -> Finding:
    return TRUNCATION.finding(
        data, "kept_mass", mass < 1 - 1e-6, next=commands.replay(data, f"--top-p {max(mass.min(), 0.01):.2g}", "cut"),
        numbers={
            "side": data.names[raised], "other": data.names[lowered], "kept_mass": float(mass.mean()),
            "least_mass": float(mass.min()), "recorded": recorded_filter(data),
        },
    )  # fmt: skip


def _padding(data: PairData, raised: str, lowered: str, mass: np.ndarray) -> Finding:
    return PADDED_VOCABULARY.finding(
        data,
        "lost_mass",
        mass < 1 - 1e-6,
        next=commands.sql(
            data,
            f"SELECT step, avg(1 - exp(-abs(d))) AS lost_mass FROM {{pair}} WHERE mask AND d {'<' if lowered == 'a' else '>'} 0 "
            "GROUP BY step ORDER BY step",
        ),
        numbers={"side": data.names[lowered], "other": data.names[raised], "lost_mass": float(1 - mass.mean())},
    )


GRAMMAR = Fault(
    code="grammar",
    title="one side was sampled under a grammar, so its logprobs cover only the allowed tokens",
    broken="recording",
    evidence={
        "allowed_tokens": "{side} was sampled under a grammar (structured outputs): its logprobs cover the allowed "
        "tokens, those of {other} all tokens; of {of_tokens:,} such tokens, {num_tokens:,} are higher in {side} by "
        "more than rounding (at most {largest:.3g} nats), and {num_lower:,} are lower"
    },
)


def find_grammar(data: PairData) -> list[Hypothesis]:
    """Return a finding for each pass that used a grammar while the other did not, with a mask of the affected tokens,
    [N] bool.

    The contract must name the grammar, and the values must confirm it: renormalising over fewer tokens raises every
    logprob, so lower values are evidence against a grammar.
    """
    under = {side: _under_grammar(data, side) for side in "ab"}
    found = []
    for side, other in ("ab", "ba"):
        tokens = data.keep & (under[side] & ~under[other])[data.sample.seq]
        finding = _of_side(data.without(~tokens), side, other) if tokens.any() else None
        if finding is not None:
            found.append(Hypothesis(finding=finding, tokens=tokens, gain=float("inf")))
    return found


def _under_grammar(data: PairData, side: str) -> np.ndarray:
    """Return [S] bool: True for sequences whose contract names structured outputs."""
    named = {name: declared(contract, "structured_outputs") is True for name, contract in data.contracts.items()}
    return np.array([named.get(name or "", False) for name in getattr(data.sample, side).contracts], bool)


def _of_side(data: PairData, side: str, other: str) -> Finding | None:
    values, others = getattr(data, side), getattr(data, other)
    if np.std(values) < 1e-3:
        return None
    rounding = allowed_noise(data) * np.maximum(-np.expm1(others), MIN_REST)
    raised, lower = values - others > rounding, others - values > rounding
    if raised.sum() < 10 or lower.sum() > 0.05 * (raised.sum() + lower.sum()):
        return None
    name, other_name = data.names[side], data.names[other]
    return GRAMMAR.finding(
        data, "allowed_tokens", raised,
        next=commands.whole_vocabulary_replay(data, other_name, int(data.sample.steps[data.seq[raised][0]])),
        numbers={
            "side": name, "other": other_name, "num_tokens": int(raised.sum()), "of_tokens": data.num_kept,
            "num_lower": int(lower.sum()), "largest": float((values - others).max()),
        },
    )  # fmt: skip
