"""Undo a shift or an exchange of rows, so that the remaining mismatch can be checked.

Shapes: S sequences (rows), T tokens in the longest sequence.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..finding import Finding
from ..pair_data import PairData
from ..thresholds import MIN_LOGPROBS, MIN_OFF_NATS, MIN_PAIRED_ROWS
from .grid import Grid, grid_of, row_means
from .pairing import partners_of


def realigned(data: PairData, finding: Finding) -> PairData | None:
    """Return the data with pass b realigned according to a finding; None if the finding does not allow it, or if too
    few tokens remain.

    After a shift, every mismatched row is shifted back by the lag. After an exchange of rows, each row receives its
    partner's values, and mismatched rows without a partner are dropped.
    """
    if finding.signal == "moved_rows":
        b = _shifted(grid_of(data), int(finding.numbers["lag"] or 0))
    elif finding.code == "row_pairing" and (partners := partners_of(data)) is not None:
        grid = grid_of(data)
        is_own = (partners.rows < 0) & ~(partners.own > MIN_OFF_NATS)
        b = np.where(is_own[:, None], grid.b, np.nan)
        moved = partners.rows >= 0
        b[moved] = grid.b[partners.rows[moved]]
    else:
        return None
    sample = data.sample
    values = b[sample.seq, sample.position]
    side = replace(sample.b, logprobs=values, is_null=np.isnan(values))
    changed = {name: getattr(data, name) for name in data.__dataclass_fields__}
    found = PairData(**changed | {"sample": replace(sample, b=side), "keep": data.keep & np.isfinite(values)})
    return found if found.num_kept >= MIN_LOGPROBS else None


def _shifted(grid: Grid, lag: int) -> np.ndarray:
    """Return [S, T] the values of pass b after shifting the rows that `find_shift` reported."""
    costs = np.nan_to_num(row_means(grid.cost()))
    off = costs > MIN_OFF_NATS
    moved = grid.moved(lag)
    return np.where(off[:, None], moved, grid.b) if off.sum() >= MIN_PAIRED_ROWS else moved
