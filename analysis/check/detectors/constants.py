"""Detect placeholders: one pass repeats a value where the logprobs in the other pass vary."""

from __future__ import annotations

import numpy as np

from .. import commands
from ..finding import Finding
from ..pair_data import PairData
from ..sample import PassSample, Sample
from ..thresholds import (
    IMPOSSIBLE_LOGPROB,
    MAX_ALIGNED_ROWS,
    MAX_CONSTANTS,
    MAX_TIED_DISTANCE,
    MIN_CONSTANT_COUNT,
    MIN_CONSTANT_SPREAD,
    MIN_CONSTANT_TOKENS,
    MIN_FAR_SHARE,
    MIN_GRID,
    MIN_RUN_OF_UNSAMPLED,
    MIN_TIED_SHARE,
    UNSAMPLED_STARTS,
    UNSAMPLED_SURPRISE,
)


def find_constants(data: PairData) -> list[tuple[Finding, np.ndarray]]:
    """Return a finding for each placeholder value, with a mask of the tokens that have the value, [N] bool."""
    found = []
    for side, other in ((data.sample.a, data.sample.b), (data.sample.b, data.sample.a)):
        for value in _repeated(data, side, other):
            where = data.keep & (side.logprobs == value)
            found.append((_finding(data, side, other, value, where), where))
    return found


def _repeated(data: PairData, side: PassSample, other: PassSample) -> list[float]:
    """Return the values that `side` repeats at tokens whose logprobs in `other` vary and are far from the value."""
    values, counts = np.unique(side.logprobs[data.keep], return_counts=True)
    often = np.argsort(-counts, kind="stable")[:MAX_CONSTANTS]
    candidates = {int(i) for i in often if counts[i] >= MIN_CONSTANT_COUNT} | set(
        np.flatnonzero(values <= IMPOSSIBLE_LOGPROB)[:MAX_CONSTANTS].tolist()
    )
    return [float(values[i]) for i in sorted(candidates) if _stands_for_none(data, side, other, float(values[i]))]


def _stands_for_none(data: PairData, side: PassSample, other: PassSample, value: float) -> bool:
    where = data.keep & (side.logprobs == value)
    off_by = np.abs(other.logprobs[where] - value)
    if value <= IMPOSSIBLE_LOGPROB:
        return bool(np.median(off_by) > abs(value) / 2)
    if -MIN_GRID < value < 0.0:
        return False
    rest = data.sample.d[data.keep & ~where]
    usual = float(np.median(np.abs(rest))) if len(rest) else 0.0
    if value == 0.0 and _is_nucleus(off_by, rest):
        return False
    if value < 0 and len(np.unique(data.sample.tokens[where])) < MIN_CONSTANT_TOKENS:
        return False  # in a repeated context, a token has the same logprob each time
    if value < 0 and _is_likely(data, other, value, where):
        return False
    far = off_by > max(MIN_CONSTANT_SPREAD, 10 * usual)
    varies = np.std(other.logprobs[where]) > MIN_CONSTANT_SPREAD / 2
    return bool(far.sum() >= 2 and far.mean() > MIN_FAR_SHARE and varies)


def _is_likely(data: PairData, other: PassSample, value: float, where: np.ndarray) -> bool:
    """Return True if the other pass's logprobs at the tokens in `where` scatter around the value. The value is then a
    genuine logprob, such as -ln 2 for two equal rounded logits. If the value is a floor, all logprobs in the other pass
    are below it."""
    rest = other.logprobs[data.keep & ~where]
    off = other.logprobs[where] - value
    around = min(np.mean(off > 0), np.mean(off < 0)) > MIN_TIED_SHARE
    return bool(len(rest) and around and np.mean(np.abs(off)) < MAX_TIED_DISTANCE * np.mean(np.abs(rest - value)))


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
    improbable = surprise > max(UNSAMPLED_SURPRISE * usual, usual + 1)
    in_runs = _mean_run(where, sample.seq) >= MIN_RUN_OF_UNSAMPLED
    reason = "begin_alike" if given else "improbable" if improbable and in_runs else "none"
    return Finding(
        code="placeholders" if reason == "none" else "mask",
        signal="constant",
        effect=float(np.sqrt(np.mean((other.logprobs[where] - value) ** 2))),
        share=float(where.sum() / max(sample.compared.sum(), 1)),
        next=commands.sql(
            data,
            "SELECT step, seq_id, position, token_id, mask, logprob_a, logprob_b FROM {pair} WHERE "
            f"logprob_{'a' if side is sample.a else 'b'} = {value!r}::FLOAT LIMIT 20",
        ),
        numbers={
            "side": side.name,
            "other": other.name,
            "value": value,
            "num_tokens": int(where.sum()),
            "num_sequences": len(np.unique(sample.seq[where])),
            "other_mean": -surprise,
            "other_min": float(np.min(other.logprobs[where])),
            "elsewhere_mean": -usual,
            "reason": reason,
        },
    )


def _are_given(sample: Sample, other: PassSample, where: np.ndarray) -> bool:
    """Return True if the tokens in `where` begin their sequences and are identical across the sequences for a prompt,
    unlike sampled tokens."""
    given: dict[object, set[tuple[int, ...]]] = {}
    num, covered, surprise = 0, 0, 0.0
    rows = np.unique(sample.seq[where])[:MAX_ALIGNED_ROWS]
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
    return bool(most and expected > UNSAMPLED_STARTS and different < 0.2 * expected)


def _mean_run(where: np.ndarray, seq: np.ndarray) -> float:
    """Return the mean length of the runs of consecutive tokens in `where`, within sequences."""
    begins = where & ~np.concatenate([[False], where[:-1] & (seq[1:] == seq[:-1])])
    return float(where.sum() / max(begins.sum(), 1))
