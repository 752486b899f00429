"""The series of a run, read from its trace."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...schemas.errors import InvalidOption
from ..trace.cache import cached
from ..trace.database import Database, Traces, opened
from ..trace.source import Pair
from . import logged, mismatch, policy, rollouts, weight_changes
from .columns import Column
from .quantities import KINDS, Series, named

__all__ = ["Series", "read_series"]

MISMATCH: Pair = ("train", "rollout")


def read_series(database: Traces | Database, *, pair: Pair = MISMATCH, run: str | None = None) -> dict[str, Series]:
    """Read what a run did by step, under the names of `quantities.KINDS`; what the trace cannot answer is left out.

    All series are over the same steps: those with sequences or a logged value. `pair` names the passes of the mismatch,
    d = logprob(a) - logprob(b) in nats over tokens that count and are finite in both, of the loss's first use of a
    sequence. `run` is needed where several traces are open.

    - k3 = mean(exp(d) - 1 - d); k3_positive and k3_negative the same over tokens with advantage above and below 0;
      ess = (sum w)^2 / (n sum w^2) with w = exp(d).
    - reward_std_within_groups: the standard deviation (of n - 1) within groups of at least two, averaged over groups;
      share_groups_without_spread: those in which all rewards are equal, which give no gradient.
    - policy_lag: updates between the weights that sampled and those in the loss; version_lag: between those of pass b
      and pass a.
    - clip_share: tokens whose ratio is beyond the bound of the recorded loss, of those with an advantage.
    - reward: of the sequences; where these have none, what the trainer logged.
    - changed_weights: share of elements whose bits differ from the version kept before.

    Raises InvalidOption, TraceNotFound, NewerTrace or DamagedTrace.
    """
    opened_database = opened(database)
    return dict(_read(opened_database, pair, _run(opened_database, run)))


@cached
def _read(database: Database, pair: Pair, run: str) -> dict[str, Series]:
    columns = list(_columns(database, pair, run))
    if not columns:
        return {}
    steps = np.unique(np.concatenate([column.steps for column in columns])).astype(np.int64)
    found = {column.name: _on(steps, column) for column in columns}
    return {name: found[name] for name in KINDS if name in found}


def _columns(database: Database, pair: Pair, run: str) -> Iterable[Column]:
    metrics = logged.read_logged(database, run)
    step_mismatch = mismatch.read_step_mismatch(database, pair, run)
    sources = (
        step_mismatch.columns,
        rollouts.read_rollouts(database, run),
        metrics,
        policy.read_entropy(database, run, pair[0], metrics, step_mismatch.estimate),
        policy.read_lags(database, pair, run),
        policy.read_clipping(database, run),
        weight_changes.read_changed(database, run),
    )
    known: set[str] = set()
    for columns in sources:
        found = [column for column in columns if len(column.steps) and column.name not in known]
        known |= {column.name for column in found if np.isfinite(column.values).any()}
        yield from found


def _on(steps: np.ndarray, column: Column) -> Series:
    """A column over all steps of the run."""
    values = np.full(len(steps), np.nan)
    values[np.searchsorted(steps, column.steps)] = column.values
    return named(column.name, steps, values, column.source, column.not_finite, column.logged)


def _run(database: Database, run: str | None) -> str:
    names = [source.run for source in database.sources]
    if run is None and len(names) == 1:
        return names[0]
    if run not in names:
        problem = "several traces are open" if run is None else f"got {run!r}"
        raise InvalidOption(f"{problem}; name one of {', '.join(names)}", option="run")
    return run
