"""Choose the sequences to show, and describe the choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from ..trace.source import Pair
from .steps import LookedAt, SequenceMismatch
from .token_sample import RANDOM, TYPICAL, WORST, WORST_OF_STEP

PROMPT_TOKENS = 400
"""Maximum number of prompt tokens shown, taken from the end of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Limits on the number of sequences and tokens shown."""

    worst: int = 24
    random: int = 16
    typical: int = 8
    per_step: int = 1
    """Number of worst sequences shown per step."""
    max_steps: int = 200
    """Maximum number of steps for which the worst sequences of the step are shown."""
    max_tokens: int = 200_000
    """Maximum number of tokens shown in total, including prompts."""
    max_sequence_tokens: int = 2_000
    """Maximum number of response tokens shown per sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chosen sequences, in the order shown."""

    why: dict[int, tuple[str, ...]]
    """Index of a chosen sequence in the SequenceMismatch -> reasons for the choice."""
    num_left_out: Counter[str]
    """First reason for choosing a sequence -> number of such sequences omitted to stay within max_tokens."""


def choose(gaps: SequenceMismatch, looked: LookedAt, wanted: Wanted) -> Choice:
    """Choose sequences, worst first. Whole sequences at the end of the list are dropped to stay within the token limit."""
    compared = np.flatnonzero(gaps.num_compared > 0)
    evenly = np.isin(gaps.steps, [*looked.spread])
    worst = compared[np.lexsort((-gaps.sum_abs_d[compared], -gaps.max_abs_d[compared]))]
    why: dict[int, list[str]] = {}
    for reason, rows in (
        (WORST, worst[: wanted.worst]),
        (TYPICAL, _typical(gaps, compared[evenly[compared]])[: wanted.typical]),
        (RANDOM, _random(gaps, np.flatnonzero(evenly), wanted.random)),
        (WORST_OF_STEP, _of_steps(gaps, worst, looked, wanted)),
    ):
        for row in rows:
            why.setdefault(int(row), []).append(reason)
    return _within(gaps, why, wanted)


def _typical(gaps: SequenceMismatch, rows: np.ndarray) -> np.ndarray:
    """Return the rows sorted by how far their mean |d| is from the median over all rows."""
    mean = gaps.mean_abs_d[rows]
    return rows[np.argsort(np.abs(mean - np.median(mean)), kind="stable")] if len(rows) else rows


def _random(gaps: SequenceMismatch, rows: np.ndarray, num: int) -> Iterable[int]:
    """Return `num` rows chosen by a hash of step and name, so that every call chooses the same rows."""
    if not num:
        return []
    names = (f"{gaps.steps[row]} {gaps.seq_ids[row]}" for row in rows)
    digests = [blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest() for name in names]
    return [int(rows[place]) for place in sorted(range(len(rows)), key=digests.__getitem__)[:num]]


def _of_steps(gaps: SequenceMismatch, worst: np.ndarray, looked: LookedAt, wanted: Wanted) -> list[int]:
    """Return the worst rows of each step: notable steps first, then all other steps in order."""
    places: dict[int, list[int]] = {step: [] for step in looked.notable}
    places |= {step: [] for step in looked.steps if step not in places}
    shown = looked.with_worst(wanted.max_steps)
    for row in worst:
        found = places[int(gaps.steps[row])]
        if len(found) < wanted.per_step:
            found.append(int(row))
    return [row for step, rows in places.items() if step in shown for row in rows]


def _within(gaps: SequenceMismatch, why: dict[int, list[str]], wanted: Wanted) -> Choice:
    kept: dict[int, tuple[str, ...]] = {}
    left_out: Counter[str] = Counter()
    used = 0
    for row, reasons in why.items():
        shown = min(int(gaps.lengths[row]), wanted.max_sequence_tokens)
        shown += min(int(gaps.prompt_lengths[row]), PROMPT_TOKENS)
        if used + shown > wanted.max_tokens:
            left_out[reasons[0]] += 1
            continue
        used += shown
        kept[row] = tuple(reasons)
    return Choice(why=kept, num_left_out=left_out)


def choice_text(
    choice: Choice, gaps: SequenceMismatch, looked: LookedAt, wanted: Wanted, pair: Pair, lacking: tuple[str, ...]
) -> str:
    """Render a description of the chosen sequences; `lacking` names the passes of the pair without logprobs."""
    if not looked.num_sequences:
        return f"Run {looked.run}: no sequences with response tokens."
    sentences = [_looked(looked, gaps), *_sorts(choice, gaps, looked, wanted, pair, lacking)]
    if choice.num_left_out:
        parts = ", ".join(f"{num:,} {reason}" for reason, num in choice.num_left_out.items())
        sentences.append(
            f"Left out to stay below {wanted.max_tokens:,} shown tokens: {parts} (counted by the first reason)."
        )
    return " ".join(sentences)


def _looked(looked: LookedAt, gaps: SequenceMismatch) -> str:
    whole = f"{looked.num_steps:,} steps, {looked.num_sequences:,} sequences, {looked.num_run_tokens:,} response tokens"
    if looked.is_all:
        return f"Run {looked.run}: {whole}, all searched."
    notable, worst = {*looked.notable}, looked.worst - {*looked.notable}
    parts = {
        "notable": len(notable),
        "with the largest |d|": len(worst),
        "evenly spaced": len(looked.steps) - len(notable) - len(worst),
    }
    return (
        f"Run {looked.run}: {whole}; searched {len(looked.steps):,} steps with {len(gaps.seq_ids):,} sequences and "
        f"{looked.num_tokens:,} response tokens ({', '.join(f'{num:,} {what}' for what, num in parts.items() if num)})."
    )


def _sorts(
    choice: Choice, gaps: SequenceMismatch, looked: LookedAt, wanted: Wanted, pair: Pair, lacking: tuple[str, ...]
) -> Iterable[str]:
    """Yield one sentence per kind of sequence shown."""
    counts = Counter(reason for reasons in choice.why.values() for reason in reasons)
    searched = "all steps" if looked.is_all else "the searched steps"
    evenly = "all steps" if looked.is_all else "the evenly spaced steps"
    if lacking:
        which = " and ".join(repr(name) for name in lacking)
        yield f"Pass {which} has no logprobs, so there is no d and sequences are chosen at random."
    elif not (gaps.num_compared > 0).any():
        yield f"No token has a logprob in both {pair[0]!r} and {pair[1]!r}, so sequences are chosen at random."
    else:
        yield f"d = {pair[0]} - {pair[1]}, nats, over tokens that count in the loss and were scored by both passes."
    sorts = {
        WORST: f"largest |d| of a token in {'all steps' if looked.has_all_worst else searched}",
        TYPICAL: f"mean |d| closest to the median over sequences of {evenly}",
        RANDOM: f"picked by hash from {evenly}",
        WORST_OF_STEP: f"the {wanted.per_step:,} with the largest |d| of a token in each of up to {wanted.max_steps:,} steps",
    }
    yield from (f"{counts[name]:,} {name}: {what}." for name, what in sorts.items() if counts[name])
    if not choice.why:
        yield "No sequences are shown."
