"""Placeholder values in the place of logprobs, in one pass or both, or one value for a whole row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import commands
from ..finding import Fault, Finding
from ..likelihood import Hypothesis, predicting
from ..pair_data import PairData
from ..rounding import precisions
from ..rows import row_spreads
from ..sample import PassSample, Sample
from .sampling import recorded_filter

MAX_CONSTANTS = 20
"""Maximum number of values tested as placeholders, most frequent first."""
MIN_CONSTANT_TOKENS = 3
"""Minimum number of tokens, and of different token ids, with a value for it to be tested: a placeholder does not depend on
the token."""
IMPOSSIBLE_LOGPROB = -80.0
"""Logprob, nats, below which a value is a placeholder, such as -100 or -9999: no sampled token has a probability of 1e-35."""
MIN_SHARED_COUNT = 20
"""Minimum number of tokens with the same value in both passes for it to be tested."""
_WINDOW_NATS = 0.05
"""Maximum distance, nats, between a constant and the nearby values that show how often a value repeats by chance."""
_TIE_NATS = 4e-3
"""Maximum distance, nats, between a value and -ln 2, ..., -ln 8 for it to count as a tie between logits: the largest
rounding error of -ln 8 in bfloat16."""

_REASONS = {
    "begin_alike": "; all sequences of a prompt begin with them, so they belong to the prompt",
    "improbable": "; elsewhere it has {elsewhere_mean:.3g}: these tokens were not sampled from the policy",
    "after_end": "; they follow the first end of the response: padding counts in the loss",
    "floor": "; all lower values of {other} have it: the values are cut off there",
    "none": "",
}


def _reason(numbers: Mapping[str, Any]) -> dict[str, str]:
    return {"reason_text": _REASONS[numbers["reason"]].format_map(numbers)}


_EVIDENCE = {
    "constant": "{side} is {value:g} for {num_tokens:,} tokens of {num_sequences:,} sequences, where {other} has "
    "{other_mean:.3g} nats on average, down to {other_min:.3g}{reason_text}",
    "constant_in_both": "{a} and {b} are both {value:g} for {num_tokens:,} tokens of {num_sequences:,} sequences in different "
    "contexts, far more often than any nearby value",
    "constant_rows": "{side} has the same value for all tokens of a sequence while {other} varies: each of the {num_tokens:,} "
    "tokens holds {what} over its sequence",
}

PLACEHOLDERS = Fault(
    code="placeholders", title="placeholders instead of logprobs", broken="recording", evidence=_EVIDENCE,
    words={"constant": _reason},
)  # fmt: skip
NOT_SAMPLED = Fault(
    code="mask", title="prompt, tool or padding tokens are counted as sampled tokens", broken="recording",
    evidence=_EVIDENCE, words={"constant": _reason},
)  # fmt: skip


def find_constants(data: PairData) -> list[Hypothesis]:
    """Detect values that one pass repeats where the other pass's logprobs vary."""
    found = []
    for side, other in ((data.sample.a, data.sample.b), (data.sample.b, data.sample.a)):
        for value in _repeated(data, side, other):
            where = data.keep & (side.logprobs == value)
            far = where & (np.abs(other.logprobs - value) > 0.1)
            if value == 0.0 and far.sum() < 0.02 * where.sum():  # 0 is correct for certain tokens
                where = far
            finding = _finding(data, side, other, value, where)
            found.append(predicting(data, finding, np.zeros(data.num_kept), np.log(data.num_kept), where[data.keep]))
    return found


def _repeated(data: PairData, side: PassSample, other: PassSample) -> list[float]:
    """Return the values that `side` repeats at tokens whose logprobs in `other` vary and are far from the value."""
    values, counts = np.unique(side.logprobs[data.keep], return_counts=True)
    often = np.argsort(-counts, kind="stable")[:MAX_CONSTANTS]
    candidates = {int(i) for i in often if counts[i] >= 3}
    candidates |= set(np.flatnonzero(values <= IMPOSSIBLE_LOGPROB)[:MAX_CONSTANTS].tolist())
    return [float(values[i]) for i in sorted(candidates) if _stands_for_none(data, side, other, float(values[i]))]


def _stands_for_none(data: PairData, side: PassSample, other: PassSample, value: float) -> bool:
    where = data.keep & (side.logprobs == value)
    off_by = np.abs(other.logprobs[where] - value)
    if value <= IMPOSSIBLE_LOGPROB:
        return bool(np.median(off_by) > abs(value) / 2)
    if -1e-5 < value < 0.0:
        return False
    rest = data.sample.d[data.keep & ~where]
    usual = float(np.median(np.abs(rest))) if len(rest) else 0.0
    if value == 0.0 and _is_nucleus(off_by, rest):
        return False
    if IMPOSSIBLE_LOGPROB < value < 0 and where.sum() < 8:
        return False
    kinds = (data.sample.tokens[where], data.sample.prefix_keys[where])
    if value < 0 and min(len(np.unique(kind)) for kind in kinds) < MIN_CONSTANT_TOKENS:
        return False  # in a repeated context, a token has the same logprob each time
    if value < 0 and _is_likely(data, other, value, where):
        return False
    far = off_by > max(0.1, 10 * usual)
    varies = np.std(other.logprobs[where]) > 0.05
    # 0 is correct for a certain token; any other value that is often correct is a real value and not a placeholder.
    return bool(far.sum() >= 2 and (value == 0.0 or far.mean() > 0.5) and varies)


def _is_likely(data: PairData, other: PassSample, value: float, where: np.ndarray) -> bool:
    """Return True if the other pass's logprobs at the tokens in `where` scatter around the value. The value is then a
    genuine logprob, such as -ln 2 for two equal rounded logits. If the value is a floor, all logprobs in the other pass
    are below it."""
    rest = other.logprobs[data.keep & ~where]
    off = other.logprobs[where] - value
    around = min(np.mean(off > 0), np.mean(off < 0)) > 0.1
    return bool(len(rest) and around and np.mean(np.abs(off)) < 0.5 * np.mean(np.abs(rest - value)))


def _is_nucleus(off_by: np.ndarray, rest: np.ndarray) -> bool:
    """Return True if 0 may be the logprob of a token that is alone in its nucleus. Sampling was then truncated, so the
    logprobs of all other tokens are raised as well."""
    moved = rest[np.abs(rest) > 1e-3]
    return bool(len(moved) and off_by.max() < 1.2 and max(np.mean(moved > 0), np.mean(moved < 0)) > 0.98)


def _finding(data: PairData, side: PassSample, other: PassSample, value: float, where: np.ndarray) -> Finding:
    sample = data.sample
    rest = data.keep & ~where
    surprise = -float(np.mean(other.logprobs[where]))
    usual = -float(np.mean(other.logprobs[rest])) if rest.any() else surprise
    given = _are_given(sample, other, where)
    improbable = surprise > max(1.5 * usual, usual + 1)
    runs = where & ~np.concatenate([[False], where[:-1] & (sample.seq[1:] == sample.seq[:-1])])
    after = np.concatenate([where[1:], [True]])
    after[sample.starts[1:][sample.lengths > 0] - 1] = True
    reason = "begin_alike" if given else "none"
    if not given and improbable and where.sum() >= 2 * runs.sum():
        reason = "after_end" if np.mean(after[where]) > 0.99 else "improbable"
    if value < 0 and value == side.logprobs[data.keep].min() and np.mean(other.logprobs[where] < value + 0.1) > 0.95:
        reason = "floor"
    return (PLACEHOLDERS if reason in ("none", "floor") else NOT_SAMPLED).finding(
        data, "constant", effect=float(np.sqrt(np.mean((other.logprobs[where] - value) ** 2))),
        share=float(where.sum() / max(sample.compared.sum(), 1)),
        next=commands.sql(
            data,
            "SELECT step, seq_id, position, token_id, mask, logprob_a, logprob_b FROM {pair} WHERE "
            f"logprob_{'a' if side is sample.a else 'b'} = {value!r}::FLOAT LIMIT 20",
        ),
        numbers={
            "side": side.name, "other": other.name, "value": value, "num_tokens": int(where.sum()),
            "num_sequences": len(np.unique(sample.seq[where])), "other_mean": -surprise,
            "other_min": float(np.min(other.logprobs[where])), "elsewhere_mean": -usual, "reason": reason,
        },
    )  # fmt: skip


def _are_given(sample: Sample, other: PassSample, where: np.ndarray) -> bool:
    """Return True if the tokens in `where` begin their sequences and are identical across the sequences for a prompt,
    unlike sampled tokens."""
    given: dict[object, set[tuple[int, ...]]] = {}
    num, covered, surprise = 0, 0, 0.0
    rows = np.unique(sample.seq[where])[:256]
    for row in rows:
        own = slice(sample.starts[row], sample.starts[row + 1])
        flags, prompt = where[own], sample.prompts[row]
        run = len(flags) if flags.all() else int(np.argmin(flags))
        if run == 0 or prompt is None:
            continue
        num += 1
        covered += run
        surprise -= float(other.logprobs[own][:run].sum())
        given.setdefault((sample.steps[row], sample.group_ids[row] or tuple(prompt)), set()).add(
            tuple(sample.tokens[own][:run].tolist())
        )
    shared = num - len(given)
    different = sum(len(starts) - 1 for starts in given.values())
    most = covered > 0.8 * where[np.isin(sample.seq, rows)].sum()
    expected = shared * -np.expm1(-surprise / max(num, 1))
    return bool(most and expected > 5 and different < 0.2 * expected)


def find_shared_constants(data: PairData) -> list[Hypothesis]:
    """Detect values that both passes share far more often than nearby values."""
    same = data.keep & (data.sample.a.logprobs == data.sample.b.logprobs)
    values, counts = np.unique(data.sample.a.logprobs[same], return_counts=True)
    often = np.argsort(-counts, kind="stable")[:MAX_CONSTANTS]
    found = []
    for value in (float(values[i]) for i in often if counts[i] >= MIN_SHARED_COUNT):
        where = same & (data.sample.a.logprobs == value)
        if _is_shared_constant(data, value, where):
            found.append(Hypothesis(finding=_constant(data, value, where), tokens=where, gain=float("inf")))
    return found


def _is_shared_constant(data: PairData, value: float, where: np.ndarray) -> bool:
    # Each context is counted once, because a repeated context repeats the value.
    contexts = len(np.unique(data.sample.token_keys[where]))
    if contexts < MIN_SHARED_COUNT or len(np.unique(data.sample.tokens[where])) < MIN_CONSTANT_TOKENS:
        return False
    if value == 0.0:
        return _is_no_certainty(data, where)
    if value > -_WINDOW_NATS or any(abs(value + np.log(ties)) < _TIE_NATS for ties in range(2, 9)):
        return False  # near 0, many tokens share a float32 value, and tied logits give -ln 2, -ln 3, ...
    # 16-bit values are sparse, so neighbours are sought in a wider window.
    width = _WINDOW_NATS if all(side.values == "float32" for side in precisions(data)) else 0.5
    near = data.keep & ~where & (np.abs(data.sample.a.logprobs - value) < width)
    _, counts = np.unique(data.sample.a.logprobs[near], return_counts=True)
    usual = float(np.quantile(counts, 0.9)) if len(counts) else 1.0
    return bool(contexts > 10 * usual)


def _is_no_certainty(data: PairData, where: np.ndarray) -> bool:
    """Return True if the tokens in `where`, [N] bool, which have a logprob of 0, were not certain because their entropy
    is above 0. A recorded filter of sampling makes tokens certain, and the entropy may be that of all tokens.
    """
    if recorded_filter(data):
        return False
    for side in (data.sample.a, data.sample.b):
        if side.entropy is not None and np.isfinite(side.entropy[data.keep]).all():
            at, elsewhere = float(np.mean(side.entropy[where])), float(np.mean(side.entropy[data.keep & ~where]))
            return at > max(0.1, 0.25 * elsewhere)
    return False


def _constant(data: PairData, value: float, where: np.ndarray) -> Finding:
    return PLACEHOLDERS.finding(
        data, "constant_in_both", effect=0.0, share=float(where.sum() / max(data.sample.compared.sum(), 1)),
        next=commands.sql(
            data,
            "SELECT step, seq_id, position, token_id, mask, logprob_a, logprob_b FROM {pair} WHERE "
            f"logprob_a = {value!r}::FLOAT AND logprob_b = logprob_a LIMIT 20",
        ),
        numbers={
            **data.names, "value": value, "num_tokens": int(where.sum()),
            "num_sequences": len(np.unique(data.sample.seq[where])),
        },
    )  # fmt: skip


def find_constant_rows(data: PairData) -> list[Hypothesis]:
    """Detect a pass with the same value at all tokens in a sequence, such as their mean or sum, while the other pass varies."""
    for side, values, others in (("a", data.a, data.b), ("b", data.b, data.a)):
        spread, spread_other = row_spreads(data, values), row_spreads(data, others)
        asked = np.isfinite(spread) & (spread_other > 0.05)
        if asked.sum() >= 3 and np.all(spread[asked] < 1e-3) and np.std(values) > 1e-3:
            count = np.bincount(data.seq, minlength=len(spread))
            sums = np.bincount(data.seq, others, len(spread))
            own = np.bincount(data.seq, values, len(spread)) / np.maximum(count, 1)
            is_sum = np.median(np.abs(own - sums)[asked]) < np.median(np.abs(own - sums / np.maximum(count, 1))[asked])
            finding = PLACEHOLDERS.finding(
                data, "constant_rows", next=commands.tokens(data),
                numbers={
                    "side": data.names[side], "other": data.names["b" if side == "a" else "a"], "num_tokens": data.num_kept,
                    "what": "a sum" if is_sum else "a mean",
                },
            )  # fmt: skip
            return [predicting(data, finding, np.zeros(data.num_kept), 5.0 * asked.sum())]
    return []
