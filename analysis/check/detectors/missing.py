"""Tokens that count in the loss and that one side has no value for."""

from __future__ import annotations

import numpy as np

from .. import commands
from ..finding import Finding
from ..pair_data import PairData
from ..sample import Side
from ..thresholds import MIN_MISSING_SHARE, MIN_TAIL_SHARE


def find_missing(data: PairData) -> list[Finding]:
    """NULL or NaN on one side only: at the ends of sequences they were cut short, elsewhere values were lost."""
    return [
        finding
        for side, other in ((data.sample.a, data.sample.b), (data.sample.b, data.sample.a))
        if (finding := _of_side(data, side, other)) is not None
    ]


def _of_side(data: PairData, side: Side, other: Side) -> Finding | None:
    sample = data.sample
    missing = sample.mask & np.isnan(side.logprobs) & np.isfinite(other.logprobs)
    share = missing.sum() / max(sample.mask.sum(), 1)
    if share < MIN_MISSING_SHARE:
        return None
    in_tail = float((missing & _tails(missing, sample.starts)).sum() / missing.sum())
    in_head = float((missing & _tails(missing[::-1], len(missing) - sample.starts[::-1])[::-1]).sum() / missing.sum())
    rows = np.unique(sample.seq[missing])
    cut = max(in_tail, in_head) >= MIN_TAIL_SHARE
    return Finding(
        code="lengths" if cut else "placeholders",
        signal="missing",
        effect=float("nan"),
        share=float(share),
        next=commands.sql(
            data,
            "SELECT step, seq_id, count(*) AS num_tokens, count(*) FILTER (isfinite(logprob)) AS num_scored FROM "
            f"(SELECT step, seq_id, unnest(logprobs) AS logprob FROM scores WHERE \"pass\" = '{side.name}') "
            "GROUP BY ALL HAVING num_scored < num_tokens ORDER BY ALL LIMIT 20",
        ),
        numbers={
            "side": side.name,
            "other": other.name,
            "num_tokens": int(missing.sum()),
            "num_sequences": len(rows),
            "of_sequences": sample.num_sequences,
            "place": ("end" if in_tail >= in_head else "beginning") if cut else "scattered",
            "value": "NULL" if side.is_null[missing].all() else "NaN",
        },
    )


def _tails(flags: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """[N] whether all tokens from here to the end of the sequence have the flag."""
    ends = np.repeat(starts[1:], np.diff(starts))
    # The next token without the flag, at or after this one; the sequence's end when there is none in it.
    following = np.minimum.accumulate(np.where(~flags, np.arange(len(flags)), len(flags))[::-1])[::-1]
    return np.asarray(flags & (following >= ends))
