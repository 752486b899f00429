"""Cache of a run's series by step. A refresh reads only the steps that have grown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ...schemas.loss import read_loss
from ..alarms.figures import Figure, read_token_figures
from ..alarms.repeats import Repeats
from ..facts.mismatch import read_step_mismatch
from ..facts.policy import Given, read_clipping, read_entropy, read_given, read_lags
from ..facts.read_series import on_steps, read_logged, read_sampled
from ..facts.series import KINDS, Column, Series
from ..trace.database import Database
from ..trace.hyperparameters import read_hyperparameters
from ..trace.source import Pair, Source
from ..views import open_database
from .extent import Extent, Extents

MOST_TOKENS = 10_000_000
"""Maximum number of response tokens read per refresh, newest steps first; a step with more tokens is read alone."""
RATE_STEPS = 20
"""Number of newest steps over which the training rate is measured."""
Times = list[tuple[int, float]]
"""(step, seconds since 1970), in ascending order of steps."""

_LOGGED_TIMES = """
SELECT step, epoch(max(logged_at)) FROM metrics WHERE step > 0 AND logged_at IS NOT NULL
GROUP BY step ORDER BY step DESC LIMIT $steps
"""


class Memory:
    """Cache of a run's series, with the same values as `read_series` returns.

    The share of changed weights is omitted, because every refresh would have to read all weight versions again.
    """

    def __init__(self, pair: Pair):
        self.repeats = Repeats()
        self.times: Times = []
        self._pair = pair
        self._read: dict[int, Extent] = {}
        self._given = Given()
        self._basis: Any = None
        self._num_metrics = -1
        self._logged: list[Column] = []
        self._values: dict[str, dict[int, tuple[float, bool]]] = {}
        """Name of a series -> step -> (value, True if a NaN or an infinity was recorded)."""
        self._sources: dict[str, str] = {}
        self._of_tokens: dict[str, dict[int, float]] = {}

    def pending(self, extents: Extents) -> list[int]:
        """Return the steps that must still be read, newest first."""
        if not self._read.keys() <= extents.steps.keys():
            self._forget()
        return sorted((step for step, extent in extents.steps.items() if self._read.get(step) != extent), reverse=True)

    def is_behind(self, extents: Extents) -> bool:
        """Return True if the trace has data that the cache has not read yet."""
        return extents.num_metrics != self._num_metrics or bool(self.pending(extents))

    def read(self, source: Source, extents: Extents) -> None:
        """Read the logged values, and the newest steps that have not been read yet. Raises DamagedTrace."""
        pending = self.pending(extents)
        # If no step has been read yet, reading the sums stored in the trace is cheaper than reading tokens.
        summed = self._pair in source.covered and len(pending) == len(extents.steps)
        used = accumulate(extents.steps[step].num_response_tokens for step in pending)
        # Without gaps: alerts and changes compare neighbouring steps.
        newest = [step for step, num in zip(pending, used, strict=True) if step == pending[0] or num <= MOST_TOKENS]
        wanted = sorted(pending if summed else newest)
        database = open_database(source)
        if not summed:
            database.keep_steps(wanted)
        run = source.run
        self._logged = read_logged(database, run)
        self.times = database.connection.execute(_LOGGED_TIMES, {"steps": RATE_STEPS + 1}).fetchall()[::-1]
        self._num_metrics = extents.num_metrics
        self._given = self._given | read_given(database, run)
        loss = read_loss(read_hyperparameters(database, run))
        basis = (self._given, loss, any(column.name == "entropy" for column in self._logged))
        if basis != self._basis and self._read:  # the run's settings changed, so cached steps are out of date
            self._forget()
        self._basis = basis
        if wanted:
            self._keep(wanted, self._columns(database, run))
            self._keep_figures(wanted, read_token_figures(database, self._pair, run))
            self.repeats.keep(database, run, wanted)
            self._read |= {step: extents.steps[step] for step in wanted}

    def series(self, steps: Iterable[int]) -> dict[str, Series]:
        """Return every series, over `steps` and all steps with logged values, in the order of `KINDS`."""
        columns = [self._column(name) for name in self._values if self._values[name]]
        # Entropies recorded per token replace entropies logged per step.
        found = {column.name: column for column in (*self._logged, *columns) if len(column.steps)}
        every = np.unique(np.concatenate([np.fromiter(steps, np.int64), *(c.steps for c in found.values())]))
        every = every.astype(np.int64)
        return {name: on_steps(every, found[name]) for name in KINDS if name in found}

    def token_figures(self) -> dict[str, Figure]:
        """Return the per-token figures that alarms need in addition to the series; see `alarms.read_token_figures`."""
        return {
            name: (np.array(sorted(values), np.int64), np.array([values[step] for step in sorted(values)]))
            for name, values in self._of_tokens.items()
            if values
        }

    def _keep_figures(self, steps: Sequence[int], figures: Mapping[str, Figure]) -> None:
        for values in self._of_tokens.values():
            for step in steps:
                values.pop(step, None)
        for name, (of_steps, found) in figures.items():
            self._of_tokens.setdefault(name, {}).update(zip(of_steps.tolist(), found.tolist(), strict=True))

    def _columns(self, database: Database, run: str) -> list[Column]:
        gap = read_step_mismatch(database, self._pair, run)
        return [
            *gap.columns,
            *read_sampled(database, run),
            *read_entropy(database, run, self._pair[0], self._logged, gap.estimate, self._given),
            *read_lags(database, self._pair, run, self._given),
            *read_clipping(database, run),
        ]

    def _keep(self, steps: Sequence[int], columns: Sequence[Column]) -> None:
        for values in self._values.values():
            for step in steps:
                values.pop(step, None)
        for column in columns:
            kept = self._values.setdefault(column.name, {})
            lacking = np.isin(column.steps, column.not_finite).tolist()
            kept.update(zip(column.steps.tolist(), zip(column.values.tolist(), lacking, strict=True), strict=True))
            self._sources[column.name] = column.source

    def _column(self, name: str) -> Column:
        values = self._values[name]
        steps = np.array(sorted(values), np.int64)
        found, lacking = zip(*(values[step] for step in steps.tolist()), strict=True)
        return Column(name, steps, np.array(found), self._sources[name], steps[np.array(lacking)])

    def _forget(self) -> None:
        self._read, self._values, self._of_tokens = {}, {}, {}
        self.repeats = Repeats()
