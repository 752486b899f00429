"""How many rows a trace has of each step: what tells a step that has grown from one that has not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...schemas.layout import METRICS, SCORES, SEQUENCES
from ...schemas.passes import REPLAY_PREFIX
from ..source import Pair, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What is recorded of one step. Rows are only ever added, so that an equal extent is an equal content."""

    num_sequences: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    """Response tokens."""
    num_scores: int = 0
    """Rows of scores, less those of replays that are not asked for."""

    def __add__(self, other: Extent) -> Extent:
        return Extent(
            num_sequences=self.num_sequences + other.num_sequences,
            num_prompt_tokens=self.num_prompt_tokens + other.num_prompt_tokens,
            num_tokens=self.num_tokens + other.num_tokens,
            num_scores=self.num_scores + other.num_scores,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """What is recorded by now."""

    steps: dict[int, Extent] = field(default_factory=dict)
    """Steps that have sequences or scores."""
    passes: frozenset[str] = frozenset()
    num_metrics: int = 0
    """Logged values, hyperparameters included."""
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Path of a sealed file of sequences or scores -> its first and last step."""

    def __add__(self, other: Extents) -> Extents:
        steps = dict(self.steps)
        for step, extent in other.steps.items():
            steps[step] = steps[step] + extent if step in steps else extent
        return Extents(steps=steps, passes=self.passes | other.passes, num_metrics=self.num_metrics + other.num_metrics)


class Surveyor:
    """Counts again and again, and opens each sealed file once: it never changes."""

    def __init__(self, pair: Pair):
        self._pair = pair
        self._seen: set[str] = set()
        self._sealed = Extents()

    def survey(self, source: Source) -> Extents:
        """Count what lies there. Raises FileNotFoundError when a file vanishes meanwhile."""
        files = {path: table for table, paths in source.files.items() for path in paths}
        if not self._seen <= set(files):  # somebody removed files: what was counted of them is void
            self._seen, self._sealed = set(), Extents()
        for path in [path for path in files if path not in self._seen]:
            rows = _sealed_rows(source, files[path], path)
            self._sealed = (
                self._sealed + self._count(files[path], rows) + Extents(ranges=_range(path, files[path], rows))
            )
            self._seen.add(path)
        journaled = (self._count(table, rows.select(_COLUMNS[table])) for table, rows in source.journals.items())
        return sum(journaled, self._sealed)

    def _count(self, table: str, rows: pa.Table) -> Extents:
        if table == METRICS:
            return Extents(num_metrics=rows.num_rows)
        if table == SCORES:
            counted = rows.group_by(["step", "pass"]).aggregate([([], "count_all")]).to_pylist()
            return Extents(
                steps=_summed(
                    (row["step"], Extent(num_scores=row["count_all"])) for row in counted if self._is_asked(row)
                ),
                passes=frozenset(row["pass"] for row in counted),
            )
        counted = (
            rows.group_by(["step"]).aggregate([([], "count_all"), *((name, "sum") for name in _LENGTHS)]).to_pylist()
        )
        return Extents(steps={row["step"]: _of_sequences(row) for row in counted})

    def _is_asked(self, row: dict[str, Any]) -> bool:
        return row["pass"] in self._pair or not row["pass"].startswith(REPLAY_PREFIX)


_LENGTHS = ("num_prompt_tokens", "num_response_tokens")
_COLUMNS = {SEQUENCES: ["step", *_LENGTHS], SCORES: ["step", "pass"], METRICS: ["step"]}


def _sealed_rows(source: Source, table: str, path: str) -> pa.Table:
    relative = f"{table}/{path.rsplit('/', 1)[-1]}"
    with source.store.filesystem.open(source.store.path(relative), "rb") as file:
        return pq.ParquetFile(file).read(columns=_COLUMNS[table])


def _range(path: str, table: str, rows: pa.Table) -> dict[str, tuple[int, int]]:
    if table == METRICS or not rows.num_rows:
        return {}
    ends = pc.min_max(rows["step"]).as_py()
    return {path: (ends["min"], ends["max"])}


def _summed(parts: Iterable[tuple[int, Extent]]) -> dict[int, Extent]:
    found: dict[int, Extent] = {}
    for step, extent in parts:
        found[step] = found[step] + extent if step in found else extent
    return found


def _of_sequences(row: dict[str, Any]) -> Extent:
    return Extent(
        num_sequences=row["count_all"],
        num_prompt_tokens=row["num_prompt_tokens_sum"] or 0,
        num_tokens=row["num_response_tokens_sum"] or 0,
    )
