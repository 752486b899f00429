"""Run every analysis on one run for a report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ...schemas.documents import Contract
from ...schemas.errors import NothingToCompare, TimTraceError
from ...schemas.passes import REPLAY_PREFIX
from ...tracer.progress import Advance
from ..attribution.attribute import attribute
from ..attribution.attribution import Attribution
from ..breakdowns.breakdowns import Breakdowns, read_breakdowns
from ..corrections import corrections
from ..diagnosis.diagnose import diagnose
from ..diagnosis.diagnosis import Diagnosis
from ..dynamics.dynamics import Dynamics, dynamics
from ..facts.mismatch import read_step_mismatch
from ..facts.read_series import read_series
from ..facts.series import Series, by_step, named
from ..info import TraceInfo, info
from ..objective.objective import objective
from ..objective.verdict import Objective
from ..rows import Rows
from ..token_samples.token_samples import TokenSamples, read_token_samples
from ..trace.columns import read_hyperparameters, scored_passes, why_nothing
from ..trace.database import Database
from ..trace.source import Pair
from ..trace.tokens import evenly_spaced, tokens_by_step
from ..views import open_database

Found = TypeVar("Found")

NUM_QUESTIONS = 9
WHOLE = 30_000_000
MOST_TOKENS = 5_000_000
"""Maximum number of tokens to read from a run with more than WHOLE tokens. At least one step is read, even if that step
exceeds the limit."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Results of every analysis of one run. A result that could not be computed is None, and `unanswered` says
    why."""

    trace: str
    asked_steps: str
    condition: str
    name: str
    pair: Pair
    info: TraceInfo
    series: Mapping[str, Series]
    diagnosis: Diagnosis | None
    dynamics: Dynamics | None
    objective: Objective | None
    attribution: Attribution | None
    corrections: Rows | None
    part: str
    arms: Mapping[str, tuple[Series, ...]]
    """Replay name -> mismatch series between the replay and pass b."""
    spread: Breakdowns | None
    excerpts: TokenSamples
    contracts: tuple[Contract, ...]
    settings: Mapping[str, float | str]
    evaluation: Series | None
    unanswered: Mapping[str, str]

    @property
    def steps(self) -> np.ndarray:
        found = next(iter(self.series.values()), None)
        return np.empty(0, np.int64) if found is None else found.steps


def read_subject(
    trace: str | os.PathLike[str], pair: Pair, name: str, control: str | os.PathLike[str] | None, steps: str,
    advance: Advance,
) -> Subject:  # fmt: skip
    database = open_database(trace, steps)
    other = None if control is None else open_database(control, steps)
    names, why = ":".join(pair), dict[str, str]()

    def ask(what: str, question: Callable[[], Found]) -> Found | None:
        try:
            return question()
        except TimTraceError as error:
            why[what] = str(error)
            return None
        finally:
            advance(1)

    def diagnosed_tokens() -> Diagnosis:
        found = diagnose(database, pair=names, control=other, steps=steps)
        if found.checked is None:
            raise NothingToCompare(why_nothing(database, pair))
        return found

    held = info(database)
    diagnosed = ask("diagnosis", diagnosed_tokens)
    series = read_series(database, pair=pair)
    moved = ask("dynamics", lambda: dynamics(database, pair=names))
    part, of_part = without_most_steps(database)
    judged = ask("objective", lambda: objective(part))
    attributed = ask(
        "attribution",
        lambda: diagnosed.attribution if diagnosed else attribute(database, control=other, pair=names, steps=steps),
    )
    notable = _notable(moved, attributed)
    num_steps = num_steps_within(held.num_response_tokens, held.num_steps)
    spread = ask("spread", lambda: read_breakdowns(database, pair, notable=notable, max_steps=num_steps))
    corrected = ask("corrections", lambda: corrections(part, pair=names))
    arms = ask("arms", lambda: _arms(database, pair)) or {}
    excerpts = read_token_samples(database, pair, notable=notable)
    advance(1)
    return Subject(
        trace=os.fspath(trace), asked_steps=steps, condition=database.step_condition(), name=name, pair=pair, info=held, series=series, diagnosis=diagnosed,
        dynamics=moved, objective=judged, attribution=attributed, corrections=corrected, part=of_part, arms=arms,
        spread=spread, excerpts=excerpts, evaluation=_evaluation(database, attributed), contracts=tuple(database.ask("FROM passes").dicts()),
        settings=read_hyperparameters(database, database.sources[0].run), unanswered=why,
    )  # fmt: skip


def _notable(moved: Dynamics | None, attributed: Attribution | None) -> tuple[int, ...]:
    steps = {change.step for series in moved.series for change in series.changes} if moved else set()
    if attributed and attributed.fall:
        steps |= {attributed.fall.low, attributed.fall.step, attributed.fall.high}
    return tuple(sorted(steps))


_LOGGED = "SELECT step, avg(value) FILTER (isfinite(value)) AS value FROM metrics WHERE name = $name GROUP BY step ORDER BY step"


def _evaluation(database: Database, attributed: Attribution | None) -> Series | None:
    if attributed is None or attributed.outcome in ("", "reward"):
        return None
    rows = by_step(database, _LOGGED, {"name": attributed.outcome})
    return named(attributed.outcome, rows["step"], rows["value"], f"logged as {attributed.outcome}")


def _arms(database: Database, pair: Pair) -> dict[str, tuple[Series, ...]]:
    replays = [name for name in scored_passes(database) if name.startswith(REPLAY_PREFIX) and name not in pair]
    found = {name: tuple(read_step_mismatch(database, (name, pair[1]))) for name in replays}
    return {name: columns for name, columns in found.items() if columns}


# --- parts of large runs ------------------------------------------------------------------------------------------------


def without_most_steps(database: Database) -> tuple[Database, str]:
    """Limit a large run to evenly spaced steps with about `MOST_TOKENS` tokens. Return the limited run, and a phrase
    that describes the selection."""
    tokens = tokens_by_step(database)
    total, whole = sum(tokens.values()), f"all {len(tokens):,} steps" if len(tokens) > 1 else "its only step"
    if total <= WHOLE:
        return database, whole
    kept = evenly_spaced(list(tokens), max(1, int(len(tokens) * MOST_TOKENS / total)))
    part = open_database(database.sources[0])
    part.keep_steps(kept)
    return part, f"{len(kept)} of {len(tokens)} evenly spaced steps" if len(kept) < len(tokens) else whole


def num_steps_within(num_tokens: int, num_steps: int) -> int:
    return int(np.clip(MOST_TOKENS * num_steps / max(num_tokens, 1), 10, 200))
