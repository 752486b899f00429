"""Exact quantiles of |d| over a whole run, whose tokens need not fit in memory.

Two readings: counts in narrow bins tell which bins hold the wanted ranks, and only the values in those are gathered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import duckdb
import numpy as np

SHARES = (0.5, 0.95, 0.99)


def exact_quantiles(
    connection: duckdb.DuckDBPyConnection,
    histograms: Iterable[str],
    values: Iterable[str],
    shares: tuple[float, ...] = SHARES,
) -> tuple[int, tuple[float | None, ...]]:
    """Count the tokens and give their quantiles, interpolated between the two nearest as DuckDB's quantile_cont does.

    `histograms` are queries for (bin, num_tokens), `values` the same number of queries for (bin, abs_d) with `{bins}`
    to fill in; each pair of them covers a part of the tokens.
    """
    counts: Counter[int] = Counter()
    for query in histograms:
        for bin, num_tokens in connection.execute(query).fetchall():
            counts[bin] += num_tokens
    total = sum(counts.values())
    if not total:
        return 0, tuple(None for _ in shares)
    ranks = {share: share * (total - 1) for share in shares}
    bins = _bins_of(counts, {rank for place in ranks.values() for rank in (int(np.floor(place)), int(np.ceil(place)))})
    gathered = _gather(connection, values, bins)
    return total, tuple(_interpolate(gathered, bins, place) for place in ranks.values())


def _bins_of(counts: Mapping[int, int], ranks: set[int]) -> dict[int, int]:
    """Bin of each rank -> number of values before that bin."""
    found, before = {}, 0
    wanted = sorted(ranks)
    for bin in sorted(counts):
        while wanted and wanted[0] < before + counts[bin]:
            found[bin] = before
            wanted.pop(0)
        before += counts[bin]
    return found


def _gather(
    connection: duckdb.DuckDBPyConnection, values: Iterable[str], bins: Mapping[int, int]
) -> dict[int, np.ndarray]:
    parts: dict[int, list[np.ndarray]] = {bin: [] for bin in bins}
    for query in values:
        found = connection.execute(query.format(bins=", ".join(str(bin) for bin in bins))).fetchnumpy()
        for bin in bins:
            parts[bin].append(found["abs_d"][found["bin"] == bin])
    return {bin: np.sort(np.concatenate(arrays)) for bin, arrays in parts.items()}


def _interpolate(gathered: Mapping[int, np.ndarray], bins: Mapping[int, int], place: float) -> float:
    low, high = int(np.floor(place)), int(np.ceil(place))
    below, above = _ranked(gathered, bins, low), _ranked(gathered, bins, high)
    return below + (above - below) * (place - low)


def _ranked(gathered: Mapping[int, np.ndarray], bins: Mapping[int, int], rank: int) -> float:
    bin = max(bin for bin, before in bins.items() if before <= rank)
    return float(gathered[bin][rank - bins[bin]])
