"""Shapes: n values, one per step, NaN if missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ...schemas.results import Result
from ...schemas.steps import select_steps
from ..alarms.reading import Alarm, AlarmReadings
from ..alarms.text import ALARM_FORM
from ..facts.changes import ChangePoint
from ..facts.series import LENGTH, MISMATCH, OPTIMIZER, POLICY, Series
from ..rows import Form, Rows

WAITING = "waiting"
"""State before anything has been recorded. `info` defines the other states."""

COLUMNS = (
    "reward", "length", "k3", "p99_abs_d", "max_abs_d", "entropy", "grad_norm", "clip_share", "ess", "learning_rate",
)  # fmt: skip
"""Columns of the table of the latest steps. On narrow terminals, the last columns are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    name: str
    change: ChangePoint


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Watched(Result):
    """A snapshot of a run during recording."""

    _text = "tim_trace.analysis.watch.screen:watched_text"

    trace: str
    run: str
    pair: str
    state: str
    """`waiting`, `live`, `finished`, `killed` or `stopped`."""
    exit_code: int | None = None
    """The recorded command's exit code, or None if it is still running or there was no command."""
    is_over: bool = False
    """True if nothing more will be recorded."""
    notes: tuple[str, ...] = ()
    """Notes and advice for the user, one sentence each."""
    damaged: tuple[str, ...] = ()
    """Unreadable data excluded from all values, one sentence each."""
    num_steps: int = 0
    num_unread_steps: int = 0
    """Number of steps whose tokens have not been read yet. Values over the whole run exclude these steps."""
    first_step: int | None = None
    last_step: int | None = None
    num_sequences: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    age_s: float | None = None
    """Seconds since data was last recorded, or None if unknown."""
    steps_per_minute: float | None = None
    rate_from: str = ""
    """How steps_per_minute was measured."""
    steps: str = "-10:"
    """Steps to show (`parse_steps` syntax)."""
    series: Mapping[str, Series]
    """All series from `read_series`."""
    alarms: AlarmReadings = field(default_factory=AlarmReadings)
    """Every alert rule at every step (see `diagnose`)."""
    changes: tuple[Moved, ...] = ()
    """Changes in the mismatch, the reward and the gradient norm. Empty while the run has too few steps."""

    @property
    def shown_steps(self) -> list[int]:
        every = next((series.steps for series in self.series.values()), np.empty(0, np.int64))
        return select_steps(self.steps, every.tolist())


def value_at(series: Series, step: int) -> float | None:
    """Return the series' value at a step: None if no value was recorded, and NaN if the value is NaN or infinite."""
    if step in series.not_finite:
        return float("nan")
    value = float(series.values[np.searchsorted(series.steps, step)])
    return value if np.isfinite(value) else None


def latest_rows(seen: Watched) -> Rows:
    rows = [(step, *(value_at(series, step) for series in seen.series.values())) for step in seen.shown_steps]
    return Rows(("step", *seen.series), rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedSeries:
    name: str
    kind: str
    scale: str
    source: str
    num_steps: int
    """Number of steps with a value."""
    last: float | None
    """Value at the last step that has one. `last`, `smallest` and `largest` are None if no step has a value."""
    smallest: float | None
    largest: float | None
    not_finite: tuple[int, ...]
    """Steps whose value is NaN or infinite."""


def _summary(series: Series) -> WatchedSeries:
    known = series.values[series.known].tolist()
    return WatchedSeries(
        name=series.name, kind=series.kind, scale=series.scale, source=series.source, num_steps=len(known),
        last=known[-1] if known else None, smallest=min(known, default=None), largest=max(known, default=None),
        not_finite=tuple(series.not_finite.tolist()),
    )  # fmt: skip


def _all_series(seen: Watched) -> tuple[WatchedSeries, ...]:
    return tuple(map(_summary, seen.series.values()))


def _num_latest(seen: Watched) -> int:
    return len(seen.shown_steps)


WATCHED_FORM: Form = {
    **ALARM_FORM,
    Alarm: {**ALARM_FORM[Alarm], **dict.fromkeys(("definition", "level", "rule", "above", "of_size", "source", "of_mismatch"))},
    AlarmReadings: {"judged": None, "raised": AlarmReadings.raised, "num_judged": AlarmReadings.num_judged},
    Watched: {"num_latest": _num_latest, "latest": latest_rows, "series": _all_series},
}  # fmt: skip


BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
ASCII = "_.:-=+*#"
"""Characters from lowest to highest, used if the terminal lacks block characters."""
BROKEN = "!"
"""Marks a NaN or an infinity."""

_SPIKES = (MISMATCH, OPTIMIZER, LENGTH, POLICY)
"""Series kinds that show the most extreme value when steps are merged, so that spikes stay visible."""


def spark(series: Series, width: int, characters: str = BLOCKS) -> str:
    """Draw a series in at most `width` characters, scaled from minimum to maximum (empty if it has no values).

    A character that covers several steps shows the worst value of a mismatch series (the smallest ess, or the mean_d
    farthest from 0), the maximum of an optimizer, length or policy series, and the mean of any other series. A space
    marks a missing value, and `!` marks a NaN or infinity.
    """
    if not series.known.any():
        return BROKEN if len(series.not_finite) else ""
    values = joined(series, width)
    broken = np.array([each.any() for each in _split(np.isin(series.steps, series.not_finite), width)])
    known = values[np.isfinite(values)]
    low, extent = float(known.min()), float(np.ptp(known))
    levels = (
        (values - low) / extent if extent > 1e-12 * max(1.0, abs(low)) else np.where(np.isfinite(values), 0.0, np.nan)
    )
    return "".join(
        BROKEN
        if bad
        else " "
        if np.isnan(level)
        else characters[min(int(level * len(characters)), len(characters) - 1)]
        for level, bad in zip(levels, broken, strict=True)
    )


def joined(series: Series, width: int) -> np.ndarray:
    return np.array([_one(series, part[np.isfinite(part)]) for part in _split(series.scaled, width)])


def _split(values: np.ndarray, width: int) -> list[np.ndarray]:
    return np.array_split(values, min(len(values), max(width, 1)))


def _one(series: Series, known: np.ndarray) -> float:
    if not len(known):
        return float("nan")
    if series.name == "ess":
        return float(known.min())
    if series.name == "mean_d":
        return float(known[np.argmax(np.abs(known))])
    return float(known.max() if series.kind in _SPIKES else known.mean())
