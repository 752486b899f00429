from __future__ import annotations

import os
import shlex
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from ...schemas.documents import command_exit_code
from ...schemas.errors import DamagedTrace, InvalidOption, TraceNotFound, option, tell_damage
from ...schemas.layout import JOURNAL, TABLES, TEMPORARY_PREFIX
from ...schemas.steps import select_steps
from ...tracer.progress import Progress, no_progress
from ...tracer.snapshot import Examined
from ...tracer.store import Store
from ..alarms.reading import judge_alarms
from ..facts.changes import change_points
from ..facts.series import Series
from ..info import LIVE, duration, state_of
from ..trace.columns import parse_pair
from ..trace.source import Source, open_source
from .memory import RATE_STEPS, Extents, Memory, Surveyor, Times
from .watched import WAITING, Moved, Watched

_ATTEMPTS = 5
_MOVING = ("k3", "reward", "grad_norm")
SILENT_S = 300.0
SILENT_STEPS = 10
"""If no data arrives, the run is reported as silent after SILENT_STEPS average step durations, but not before SILENT_S
seconds."""
SETTLED_S = 60.0
"""`tim-trace record` is considered killed after this many seconds with neither new data nor an exit code."""


class Watcher:
    """Follows a growing trace without locking it or writing to it."""

    def __init__(self, trace: str | os.PathLike[str], *, pair: str = "train:rollout", steps: str = "-10:"):
        self.trace = os.fspath(trace)
        self.pair = parse_pair(pair)
        self.steps = steps
        select_steps(steps, ())
        self._seen_steps: Times = []
        self._begin("")

    def _begin(self, run_id: str) -> None:
        self._run_id = run_id
        self._examined: Examined = {}
        self._surveyor, self._memory = Surveyor(self.pair), Memory(self.pair)
        self._moved: tuple[tuple[int, float], tuple[Moved, ...]] | None = None

    def look(self) -> Watched:
        """Read up to `memory.MOST_TOKENS` new tokens, and return the run's current view. Raises TraceNotFound,
        NewerTrace or DamagedTrace."""
        for attempt in range(_ATTEMPTS):
            try:
                return self._look()
            except TraceNotFound:
                raise
            except DamagedTrace:  # a file vanished between listing and reading
                if attempt == _ATTEMPTS - 1:
                    raise
            except OSError as error:
                if attempt == _ATTEMPTS - 1:
                    raise DamagedTrace(
                        f"{self.trace}: files cannot be read ({str(error).splitlines()[0]}); check that the folder is "
                        f"not being moved or deleted, and that you have read access"
                    ) from error
            time.sleep(0.1 * attempt)
        raise AssertionError

    def waiting(self, why: str) -> Watched:
        self._begin("")
        note = f"{why}. Waiting; Ctrl-C stops"
        return Watched(
            trace=self.trace, run=os.path.basename(os.path.abspath(self.trace)), pair=":".join(self.pair), state=WAITING,
            notes=(note,), steps=self.steps, series={},
        )  # fmt: skip

    def _look(self) -> Watched:
        source = open_source(self.trace, examined=self._examined)
        if source.manifest.run_id != self._run_id:  # this is the first call, or the trace was replaced
            self._begin(source.manifest.run_id)
            self._examined = source.examined
        extents = self._surveyor.survey(source)
        if self._memory.is_behind(extents):
            self._memory.read(source, extents)
        return self._seen(source, extents)

    def _seen(self, source: Source, extents: Extents) -> Watched:
        steps = [step for step, extent in extents.steps.items() if extent.num_sequences]
        series = self._memory.series(steps)
        if not steps:  # the trace has only logged values
            steps = next((one.steps.tolist() for one in series.values()), [])
        unread = self._memory.pending(extents)
        state = state_of(source) if source.writers else WAITING
        exit_code = command_exit_code(source.writers)
        age_s = self._age(source)
        is_launched = source.manifest.source == "record"
        ended = state not in (LIVE, WAITING) and (exit_code is not None or not is_launched or (age_s or 0) > SETTLED_S)
        rate, rate_from = self._rate(source, steps)
        return Watched(
            trace=self.trace, run=source.run, pair=":".join(self.pair), state=state, exit_code=exit_code, is_over=ended,
            notes=tuple(self._notes(source, extents, state, ended)), damaged=tuple(source.damaged), num_steps=len(steps), num_unread_steps=len(unread),
            first_step=min(steps, default=None), last_step=max(steps, default=None),
            num_sequences=sum(extent.num_sequences for extent in extents.steps.values()),
            num_prompt_tokens=sum(extent.num_prompt_tokens for extent in extents.steps.values()),
            num_tokens=sum(extent.num_response_tokens for extent in extents.steps.values()),
            age_s=age_s, steps_per_minute=rate, rate_from=rate_from, steps=self.steps, series=series,
            alarms=judge_alarms(series, self._memory.repeats, self._memory.token_figures()),
            changes=() if unread else self._changes(series),
        )  # fmt: skip

    def _age(self, source: Source) -> float | None:
        times = [when for _, when in self._memory.times]
        times += [datetime.fromisoformat(writer.closed_at).timestamp() for writer in source.writers if writer.closed_at]
        if (source.is_live or not times) and (newest := _newest_file(source.store)) is not None:
            times.append(newest)
        return max(0.0, time.time() - max(times)) if times else None  # the clocks may differ

    def _rate(self, source: Source, steps: list[int]) -> tuple[float | None, str]:
        if source.manifest.source.startswith("import"):
            return None, ""
        if (found := _rate_of(self._memory.times)) is not None:
            return found, f"times of the last {len(self._memory.times)} logged steps"
        last = max(steps, default=None)
        if last is not None and (not self._seen_steps or last > self._seen_steps[-1][0]):
            self._seen_steps = [*self._seen_steps, (last, time.time())][-RATE_STEPS:]
        found = _rate_of(self._seen_steps)
        return found, "" if found is None else "measured while watching"

    def _silence(self, source: Source) -> str:
        age_s, per_minute = self._age(source), _rate_of(self._memory.times)
        usual_s = 60 / per_minute if per_minute else 0.0
        if age_s is None or age_s < max(SILENT_S, SILENT_STEPS * usual_s):
            return ""
        hosts = sorted({writer.host for writer in source.writers if source.liveness[writer.writer].is_alive})
        if hosts == [socket.gethostname()]:
            return f"nothing recorded for {duration(age_s)}, although the process is alive: training may be stuck"
        return f"nothing recorded for {duration(age_s)}; check on {', '.join(hosts)} whether the process is alive"

    def _changes(self, series: dict[str, Series]) -> tuple[Moved, ...]:
        chosen = {name: series[name] for name in _MOVING if name in series}
        key = (
            sum(len(one.steps) for one in chosen.values()),
            sum(float(one.values[one.known].sum()) for one in chosen.values()),
        )
        if self._moved is None or self._moved[0] != key:
            found = [Moved(name=name, change=change) for name, one in chosen.items() for change in change_points(one)]
            self._moved = (key, tuple(sorted(found, key=lambda each: each.change.step)))
        return self._moved[1]

    def _notes(self, source: Source, extents: Extents, state: str, ended: bool) -> list[str]:
        notes: list[str] = []
        info = f"tim-trace info {shlex.quote(self.trace)}"
        if state == WAITING:
            notes.append("the trace exists, but no process is recording to it yet; waiting")
        elif not extents.steps and not (ended and self._memory.series(())):
            notes.append(f"no sequences were recorded; see {info}" if ended else "no sequence recorded yet")
        elif extents.steps and (lacking := [name for name in self.pair if name not in extents.passes]):
            there = ", ".join(sorted(extents.passes)) or "none"
            notes.append(
                f"no mismatch to show: no scores of pass {' and '.join(map(repr, lacking))} yet; passes so far: {there}"
                f" ({option('pair', 'A:B')} compares two other passes)"
            )
        if state not in (LIVE, WAITING) and not ended:
            notes.append("every recording process has exited, but the command is still running")
        if state == LIVE and (silence := self._silence(source)):
            notes.append(silence)
        errors = [writer.error for writer in source.writers if writer.error]
        notes += [f"a process stopped recording while training continued: {error}" for error in errors]
        if source.damaged:
            notes.append(f"{len(source.damaged)} damaged files are skipped; {info} lists them")
        return notes


def _rate_of(times: Times) -> float | None:
    if len(times) < 2 or times[-1][1] <= times[0][1]:
        return None
    return 60 * (times[-1][0] - times[0][0]) / (times[-1][1] - times[0][1])


def _newest_file(store: Store) -> float | None:
    found = []
    for folder in (JOURNAL, *TABLES):
        try:
            entries = store.filesystem.ls(store.path(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            continue
        names = [(entry["name"].rsplit("/", 1)[-1], entry) for entry in entries if entry["type"] == "file"]
        found += [when for name, entry in names if not name.startswith(TEMPORARY_PREFIX) and (when := _modified(entry))]
    return max(found, default=None)


def _modified(entry: dict[str, Any]) -> float | None:
    value = next(
        (entry[name] for name in ("mtime", "LastModified", "last_modified", "updated") if entry.get(name)), None
    )
    value = datetime.fromisoformat(value) if isinstance(value, str) else value
    return value.timestamp() if isinstance(value, datetime) else value


_LONGEST_S = 86_400.0


def watch(
    trace: str | os.PathLike[str],
    *,
    every: float = 5.0,
    steps: str = "-10:",
    once: bool = False,
    pair: str = "train:rollout",
    progress: Progress = no_progress,
) -> Iterator[Watched]:
    """Show a run while it is being recorded: its latest steps, its series so far, and the first alerts.

    Waits for the trace to exist, then yields a view every `every` seconds until recording ends. With `once`, yields
    a single view. `steps` selects the steps to show (`3`, `2:8`, `-10:` for the last ten, `all`), and `pair` names the
    passes in the mismatch d = logprob(a) - logprob(b) (nats).

    Only steps that grew are read again. A long run is read in portions, newest steps first. Views show how many steps
    are left, and `once` waits until all steps are read. Nothing is written, and the recorder is not disturbed.

    Raises InvalidOption, NewerTrace or DamagedTrace, and with `once` TraceNotFound.
    """
    if not 0 < every <= _LONGEST_S:
        raise InvalidOption(f"got {every}; pass a number of seconds above 0 and at most {_LONGEST_S:g}", option="every")
    watcher = Watcher(trace, pair=pair, steps=steps)
    return iter([_whole(watcher, progress)]) if once else _again_and_again(watcher, every)


def _again_and_again(watcher: Watcher, every: float) -> Iterator[Watched]:
    while True:
        began = time.monotonic()
        try:
            seen = watcher.look()
        except TraceNotFound as error:
            seen = watcher.waiting(str(error))
        yield seen
        if seen.is_over and not seen.num_unread_steps:
            return
        if not seen.num_unread_steps:
            # Read a slow trace less often to limit the load.
            time.sleep(max(every, 2 * (time.monotonic() - began)))


def _whole(watcher: Watcher, progress: Progress) -> Watched:
    seen = watcher.look()
    with progress("reading steps", seen.num_unread_steps) as advance:
        while left := seen.num_unread_steps:
            seen = watcher.look()
            advance(max(0, left - seen.num_unread_steps))
    tell_damage(seen.damaged)
    return seen
