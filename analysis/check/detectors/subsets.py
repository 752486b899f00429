"""Detect that the mismatch is concentrated in part of the data: an engine, rank, prompt, policy version or range of
steps.

Shapes: N sampled tokens in S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import commands
from ..finding import Finding
from ..pair_data import PairData, once
from ..sample import Sample
from ..thresholds import (
    ALIKE_R2,
    HALF,
    MAX_GROUPS_SHARE,
    MAX_SUBSET_SHARE,
    MIN_DECLARED_SHARE,
    MIN_LEVEL_RATIO,
    MIN_SINCE_SHARE,
    MIN_SUBSET_R2,
    MIN_SUBSET_TOKENS,
    MIN_SUBSET_WIDTHS,
)
from .numerics import allowed_noise, precisions

SEEN_BEFORE = "prompt_seen_before"

ORDERED = ("step", "version", "version_a", "version_b")
"""Columns in which a fault must cover a contiguous range of values."""
CHANGING = (*ORDERED, "group_id")
"""Columns along which the mismatch also changes without a fault, because policies sharpen and prompts differ. A subset
along them is reported only if its mismatch exceeds rounding."""

_NAMED_FIRST = (
    SEEN_BEFORE, "writer_a", "writer_b", "contract_a", "contract_b", "version_a", "version_b", "version", "group_id", "step",
)  # fmt: skip
"""Order of preference if several columns split the sequences equally well. Sampling settings, which are not listed,
come first."""


@dataclass(frozen=True, slots=True)
class Split:
    """A division of the sequences, by the values in one column, into a part with a low and a part with a high
    mismatch."""

    column: str
    values: list[Any]
    """Column values in the part with the larger mismatch."""
    rows: np.ndarray
    """[S] bool: True for sequences in the part with the larger mismatch."""
    ratio: float
    """Ratio between the larger and the smaller mismatch."""
    r2: float
    """Share of the variance between sequences explained by the split."""


def find_group(data: PairData) -> list[Finding]:
    """Detect prompts in which the mismatch is concentrated."""
    part = group_of(data)
    return [] if part is None else [part.finding]


def find_subset(data: PairData) -> list[Finding]:
    """Detect an engine, rank, policy version, setting or range of steps in which the mismatch is concentrated."""
    part = part_of(data)
    return [] if part is None else [part.finding]


@dataclass(frozen=True, slots=True)
class SequencePart:
    """A part of the data in which the mismatch is concentrated."""

    finding: Finding
    tokens: np.ndarray
    """[N] bool: True for tokens in the part."""
    since: int | None
    """First step of the part if it covers the whole rest of the run, i.e. the fault begins at that step; None
    otherwise. If all prompts from that step on are repeats, a prefix cache explains the fault as well as different
    weights do."""


@once
def part_of(data: PairData) -> SequencePart | None:
    """Return the part of the data in which the mismatch is concentrated; None if it is not concentrated."""
    split = _best(data, _columns(data))
    if split is None:
        return None
    since = _since(data.sample.steps, split.rows)
    return SequencePart(_told(data, split, _begin(data.sample.steps, split.rows)), split.rows[data.sample.seq], since)


@once
def group_of(data: PairData) -> SequencePart | None:
    """Return the part of the data, given by prompts, in which the mismatch is concentrated; None if it is not
    concentrated."""
    split = _best(data, {"group_id": list(data.sample.group_ids)})
    return None if split is None else SequencePart(_told(data, split, None), split.rows[data.sample.seq], None)


def fades(data: PairData) -> tuple[float, float]:
    """Return the log ratio between the mismatch in the first third of each sequence and that in the last third,
    averaged over sequences, and this mean in standard errors. The effect of a cached prompt fades along the response;
    that of different weights does not."""
    level = data.level_beyond_tokens
    there = np.isfinite(level)
    place = data.position / np.maximum(data.sample.lengths[data.seq], 1)
    means = []
    for part in (there & (place < 1 / 3), there & (place >= 2 / 3)):
        count = np.bincount(data.seq[part], minlength=data.sample.num_sequences)
        total = np.bincount(data.seq[part], level[part], data.sample.num_sequences)
        means.append(np.where(count > 0, total / np.maximum(count, 1), np.nan))
    falls = (means[0] - means[1])[np.isfinite(means[0] - means[1])]
    if len(falls) < 2:
        return 0.0, 0.0
    return float(falls.mean()), float(falls.mean() / max(falls.std() / np.sqrt(len(falls)), 1e-12))


def _since(steps: np.ndarray, rows: np.ndarray) -> int | None:
    """Return the first step with sequences in `rows`, [S] bool, if these are all sequences from that step on and most
    of the run; None otherwise."""
    return _begin(steps, rows) if rows.mean() > MIN_SINCE_SHARE else None


def _begin(steps: np.ndarray, rows: np.ndarray) -> int | None:
    """Return the first step with sequences in `rows`, [S] bool, if these are all sequences from that step on and the
    run starts earlier; None otherwise."""
    first = int(steps[rows].min())
    return first if first > steps.min() and np.all(rows == (steps >= first)) else None


def _best(data: PairData, columns: dict[str, list[Any]]) -> Split | None:
    """Return the best split by one column such that one part is healthy and the other has a far larger mismatch; None
    if there is none."""
    columns = {name: values for name, values in columns.items() if len(set(map(str, values))) > 1}
    level, weight = _levels(data)
    healthy = allowed_noise(precisions(data))
    splits = [
        split
        for name, values in columns.items()
        if (split := _split(name, values, level, weight))
        and _noise(data, ~split.rows) <= healthy
        and (not _changes_anyhow(data, split) or _is_more_than_change(data, split.rows))
        and not _is_declared(data, split)
    ]
    if not splits:
        return None
    best = max(splits, key=lambda split: split.r2)
    # Among columns that split the sequences equally well, report the simplest.
    return min((s for s in splits if s.r2 >= ALIKE_R2 * best.r2), key=_order)


def _changes_anyhow(data: PairData, split: Split) -> bool:
    """Return True if the mismatch may differ between the two parts without a fault. A split by repeated prompts counts
    as a range of steps if all prompts are repeats from some step on."""
    is_range = split.column == SEEN_BEFORE and _begin(data.sample.steps, split.rows) is not None
    return is_range or split.column in CHANGING


def _is_declared(data: PairData, split: Split) -> bool:
    """Return True if the split is by repeated prompts, and these were sampled by older weights according to their
    policy versions."""
    is_behind = data.updates_behind != 0
    return split.column == SEEN_BEFORE and float(is_behind[split.rows].mean()) > MIN_DECLARED_SHARE


def _told(data: PairData, best: Split, since: int | None) -> Finding:
    affected = best.rows[data.seq]
    shown = ", ".join(str(value)[:16] for value in best.values[:5]) + (", ..." if len(best.values) > 5 else "")
    if best.column == SEEN_BEFORE:
        return _prefix_cache(data, best, affected)
    return data.finding(
        "subset",
        "column",
        affected,
        weight=data.explained_by(affected),
        next=commands.sql(data, _by_column(best.column, data)),
        numbers={
            "column": best.column,
            "values": shown,
            "ratio": best.ratio,
            "num_sequences": int(best.rows.sum()),
            "of_sequences": data.sample.num_sequences,
            "rms_elsewhere": data.rms(~affected),
            "since": since,
            "last_before": None if since is None else int(data.sample.steps[data.sample.steps < since].max()),
        },
    )


def _prefix_cache(data: PairData, split: Split, affected: np.ndarray) -> Finding:
    fall, score = fades(data.without(~split.rows[data.sample.seq]))
    return data.finding(
        "change_inside_sequence",
        "prefix_cache",
        affected,
        weight=data.explained_by(affected),
        next=commands.query(data, "by-prompt"),
        numbers={
            "column": split.column,
            "ratio": split.ratio,
            "num_sequences": int(split.rows.sum()),
            "rms_elsewhere": data.rms(~affected),
            "fall": float(np.exp(fall)),
            "fall_score": score,
        },
    )


def _is_more_than_change(data: PairData, rows: np.ndarray) -> bool:
    """Return True if the mismatch in `rows` exceeds what rounding allows in all other sequences, or if the precision in
    `rows` is lower."""
    inside = rows[data.sample.seq]
    others, own = precisions(data.without(inside)), precisions(data.without(~inside))
    coarser = any(one.logits == "float32" and two.logits in HALF for one, two in zip(others, own, strict=True))
    return coarser or _noise(data, rows) > allowed_noise(others)


def _seen_before(sample: Sample) -> list[bool | None]:
    """Return [S] True if a sequence's prompt also occurred at an earlier step, so that a prefix cache may hold it; None
    if unknown."""
    first: dict[tuple[int, ...], int] = {}
    seen: list[bool | None] = []
    for prompt, step in zip(sample.prompts, sample.steps.tolist(), strict=True):
        seen.append(None if prompt is None else first.setdefault(tuple(prompt), step) < step)
    return seen


def _noise(data: PairData, rows: np.ndarray) -> float:
    """Return the median logit noise in the sequences `rows`, [S] bool, nats."""
    values = data.noise[rows[data.seq] & np.isfinite(data.noise)]
    return float(np.median(values)) if len(values) else 0.0


def _levels(data: PairData) -> tuple[np.ndarray, np.ndarray]:
    """Return [S] the mean level in each sequence, and [S] its number of informative tokens."""
    level = data.level_beyond_tokens
    there = np.isfinite(level)
    weight = np.bincount(data.seq[there], minlength=data.sample.num_sequences).astype(float)
    total = np.bincount(data.seq[there], level[there], minlength=len(weight))
    return np.where(weight > 0, total / np.maximum(weight, 1), np.nan), weight


def _columns(data: PairData) -> dict[str, list[Any]]:
    sample = data.sample
    return {
        "writer_a": list(sample.a.writers),
        "writer_b": list(sample.b.writers),
        "contract_a": list(sample.a.contracts),
        "contract_b": list(sample.b.contracts),
        "version_a": sample.a.versions.tolist(),
        "version_b": sample.b.versions.tolist(),
        "version": sample.versions.tolist(),
        **{name: values.tolist() for name, values in sample.settings.items()},
        SEEN_BEFORE: _seen_before(sample),
        "step": sample.steps.tolist(),
    }


def _split(name: str, values: list[Any], level: np.ndarray, weight: np.ndarray) -> Split | None:
    """Return the best division of a column's values into those with a low and those with a high mismatch; None if it is
    not significant."""
    texts = np.array([str(value) for value in values])
    known, place = np.unique(texts, return_inverse=True)
    there = np.isfinite(level)
    tokens = np.bincount(place[there], weight[there], minlength=len(known))
    means = np.bincount(place[there], (level * weight)[there], minlength=len(known)) / np.maximum(tokens, 1)
    enough = tokens >= MIN_SUBSET_TOKENS
    if enough.sum() < 2:
        return None
    order = np.flatnonzero(enough)[np.argsort(means[enough], kind="stable")]
    best, at = _best_division(means[order], tokens[order])
    low, high = order[:at], order[at:]
    ratio = float(np.exp(np.average(means[high], weights=tokens[high]) - np.average(means[low], weights=tokens[low])))
    rows = np.isin(place, high)
    centred = (level - np.average(level[there], weights=weight[there]))[there]
    spread = float((weight[there] * centred**2).sum())
    r2 = best / spread if spread > 0 else 0.0
    share = float(weight[rows & there].sum() / weight[there].sum())
    within = max(float(np.std(means[low])), float(np.std(means[high])), 0.05)
    distance = float(means[high].min() - means[low].max())
    most = MAX_GROUPS_SHARE if name == "group_id" else MAX_SUBSET_SHARE
    if name in ORDERED and not _is_range(values, rows):
        return None
    if ratio < MIN_LEVEL_RATIO or r2 < MIN_SUBSET_R2 or share > most or distance < MIN_SUBSET_WIDTHS * within:
        return None
    return Split(name, [known[i] for i in high], rows, ratio, float(r2))


def _is_range(values: list[Any], rows: np.ndarray) -> bool:
    """Return True if the column values in `rows`, [S] bool, are a contiguous range, or are all values outside a
    contiguous range."""
    known = sorted({value for value in values if value is not None})
    marked = {value for value, is_marked in zip(values, rows.tolist(), strict=True) if is_marked}
    inside = np.array([value in marked for value in known])
    return int(np.sum(inside[1:] != inside[:-1])) <= 2


def _best_division(means: np.ndarray, tokens: np.ndarray) -> tuple[float, int]:
    """Return the largest between-group sum of squares when dividing sorted means in two, and the index at which the
    second group starts."""
    total = np.average(means, weights=tokens)
    left = np.cumsum(tokens)[:-1]
    sums = np.cumsum(tokens * (means - total))[:-1]
    between = sums**2 * (1 / left + 1 / (tokens.sum() - left))
    at = int(np.argmax(between))
    return float(between[at]), at + 1


def _order(split: Split) -> tuple[int, int]:
    known = split.column in _NAMED_FIRST
    return _NAMED_FIRST.index(split.column) if known else -1, len(split.values)


def _by_column(column: str, data: PairData) -> str:
    """Return an SQL query for the mismatch grouped by a column in `sequences`, or by a column in the `scores` of one
    pass."""
    table, name, passed = "sequences", column, ""
    if column.endswith(("_a", "_b")):
        table, name = "scores", {"writer": "writer", "contract": "contract", "version": "policy_version"}[column[:-2]]
        side = data.sample.a if column.endswith("_a") else data.sample.b
        passed = f" WHERE \"pass\" = '{side.name}'"
    name = "policy_version" if name == "version" else name
    return (
        f"SELECT {table}.{name}, count(*) AS num_sequences, sqrt(sum(rms_d * rms_d * num_tokens) / sum(num_tokens)) AS rms_d "
        f"FROM {{sequences}} JOIN {table} USING (run, step, seq_id){passed} GROUP BY 1 ORDER BY 3 DESC"
    )
