"""Chooses the sequences of a step that both executions run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.dataset as ds

from ...schemas.errors import CannotReplay, InvalidOption
from ...schemas.layout import SCORES, SEQUENCES
from ...schemas.passes import ROLLOUT
from ..recorded import RecordedRow, RecordedRun

RANDOM = "random"
_SEED = 20260000


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Chosen sequences of a step, at least one; all have the same policy version as the first."""

    rows: tuple[RecordedRow, ...]
    how: str
    """`worst` for the largest mismatch between trainer and engine, `random`, or `named`."""
    groups: dict[str, str]
    """Sequence -> group of its prompt, or the sequence's own id if it has no group."""


def choose(run: RecordedRun, step: int, rows: Sequence[RecordedRow], text: str) -> Chosen:
    """Return the sequences selected by a text such as `8`, `random:8`, or ids. Raises InvalidOption, and CannotReplay
    without any.
    """
    usable = [row for row in rows if row.scored.any()]
    if not usable:
        raise CannotReplay(f"{run.store.url}: no sequence of step {step} has a scored token")
    by_name = {row.seq_id: row for row in usable}
    head, _, tail = text.rpartition(":")
    if tail.isdigit() and head in ("", RANDOM) and (number := int(tail)):
        order = np.random.default_rng(_SEED + step).permutation(len(usable)).tolist()
        how = RANDOM
        apart = {} if head else _apart(run, step, by_name)
        if apart:
            how = "worst"
            order = sorted(range(len(usable)), key=lambda place: -apart.get(usable[place].seq_id, -1.0))
        found = [usable[place] for place in order[:number]]
    else:
        names = [name.strip() for name in text.split(",")]
        missing = [name for name in names if name not in by_name]
        if missing:
            raise InvalidOption(
                f"{missing[0]!r} is not a scored sequence of step {step}; give a number, random:N, or ids such as "
                f"{usable[0].seq_id}",
                option="sequences",
            )
        found, how = [by_name[name] for name in names], "named"
    version = found[0].policy_version
    same = tuple(row for row in found if row.policy_version == version)
    table = run.table(SEQUENCES, ds.field("step") == step, ["seq_id", "group_id"])
    named = dict(zip(table["seq_id"].to_pylist(), table["group_id"].to_pylist(), strict=True))
    return Chosen(rows=same, how=how, groups={row.seq_id: named.get(row.seq_id) or row.seq_id for row in same})


def _apart(run: RecordedRun, step: int, rows: dict[str, RecordedRow]) -> dict[str, float]:
    """Return sequence -> mean |train - rollout|, nats, if the engine's logprobs were recorded."""
    table = run.table(SCORES, (ds.field("step") == step) & (ds.field("pass") == ROLLOUT), ["seq_id", "logprobs"])
    found = {}
    for seq_id, logprobs in zip(table["seq_id"].to_pylist(), table["logprobs"], strict=True):
        row = rows.get(seq_id)
        if row is None or not logprobs.is_valid or len(logprobs.values) != len(row.logprobs):
            continue
        rollout = np.asarray(logprobs.values.cast("float64").fill_null(np.nan))
        d = np.abs(row.logprobs.astype(np.float64) - rollout)[row.scored]
        if np.isfinite(d).any():
            found[seq_id] = float(np.nanmean(np.where(np.isfinite(d), d, np.nan)))
    return found
