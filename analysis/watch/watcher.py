"""Looks at a trace again and again, and reads what is new."""

from __future__ import annotations

import os
import shlex
import socket
import time

from ...schemas.errors import DamagedTrace, TraceNotFound, option
from ...schemas.steps import select_steps
from ...schemas.writer_state import command_exit_code
from ...tracer.snapshot import Examined
from ..alarms.reading import judge_alarms
from ..facts.changes import change_points
from ..facts.series import Series
from ..info import LIVE, state_of
from ..trace.pairs import parse_pair
from ..trace.source import Source, open_source
from . import pace
from .extent import Extents, Surveyor
from .memory import Memory
from .watched import WAITING, Moved, Watched

_ATTEMPTS = 5
_MOVING = ("k3", "reward", "grad_norm")
"""Series of which changes are told."""
SILENT_S = 300.0
SILENT_STEPS = 10
"""Silence that is told: as many steps take no longer, and no less than this many seconds."""
SETTLED_S = 60.0
"""Silence after which a recorded command counts as ended though nobody wrote how: `tim-trace record` was killed."""


class Watcher:
    """Sees a run as it grows. It only reads: no lock, and no file in the trace."""

    def __init__(self, trace: str | os.PathLike[str], *, pair: str = "train:rollout", steps: str = "-10:"):
        """Set out to watch. Raises InvalidOption for a pair or steps that cannot be read."""
        self.trace = os.fspath(trace)
        self.pair = parse_pair(pair)
        self.steps = steps
        select_steps(steps, ())
        self._seen_steps: pace.Times = []
        self._begin("")

    def _begin(self, run_id: str) -> None:
        """Know nothing of the run."""
        self._run_id = run_id
        self._examined: Examined = {}
        self._surveyor, self._memory = Surveyor(self.pair), Memory(self.pair)
        self._moved: tuple[tuple[int, float], tuple[Moved, ...]] | None = None

    def look(self) -> Watched:
        """See what is there now; reads up to `memory.MOST_TOKENS` of steps that have grown.

        Raises TraceNotFound, NewerTrace or DamagedTrace.
        """
        for attempt in range(_ATTEMPTS):
            try:
                return self._look()
            except TraceNotFound:
                raise
            except (OSError, DamagedTrace) as error:  # a file vanished between listing and reading
                if attempt == _ATTEMPTS - 1 and isinstance(error, DamagedTrace):
                    raise
                if attempt == _ATTEMPTS - 1:
                    raise DamagedTrace(
                        f"{self.trace}: files cannot be read ({str(error).splitlines()[0]}); is the folder being moved or "
                        "deleted, and may you read it?"
                    ) from error
                time.sleep(0.1 * attempt)
        raise AssertionError

    def waiting(self, why: str) -> Watched:
        """What is seen of a trace that is not there yet, or no more."""
        self._begin("")
        note = f"{why}. It is looked for again and again; Ctrl-C ends that"
        return Watched(
            trace=self.trace, run=os.path.basename(os.path.abspath(self.trace)), pair=":".join(self.pair), state=WAITING,
            notes=(note,), steps=self.steps, series={},
        )  # fmt: skip

    def _look(self) -> Watched:
        source = open_source(self.trace, examined=self._examined)
        if source.manifest.run_id != self._run_id:  # the first look, or the trace was replaced
            self._begin(source.manifest.run_id)
            self._examined = source.snapshot.examined
        extents = self._surveyor.survey(source)
        if self._memory.is_behind(extents):
            self._memory.read(source, extents)
        return self._seen(source, extents)

    def _seen(self, source: Source, extents: Extents) -> Watched:
        steps = [step for step, extent in extents.steps.items() if extent.num_sequences]
        series = self._memory.series(steps)
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
            num_tokens=sum(extent.num_tokens for extent in extents.steps.values()),
            age_s=age_s, steps_per_minute=rate, rate_from=rate_from, steps=self.steps, series=series,
            alarms=judge_alarms(series, self._memory.repeats, self._memory.token_figures()),
            moved=() if unread else self._changes(series),
        )  # fmt: skip

    def _age(self, source: Source) -> float | None:
        """Seconds since something was recorded: by the files while they grow, else by what they say of themselves."""
        times = [when for _, when in self._memory.times]
        times += [pace.seconds(writer.closed_at) for writer in source.writers if writer.closed_at]
        if (source.is_live or not times) and (newest := pace.newest_file(source.store)) is not None:
            times.append(newest)
        return pace.ago(max(times)) if times else None

    def _rate(self, source: Source, steps: list[int]) -> tuple[float | None, str]:
        """Steps a minute, and what that is from."""
        if source.manifest.source.startswith("import"):
            return None, ""
        if (found := pace.rate(self._memory.times)) is not None:
            return found, f"times of the last {len(self._memory.times)} logged steps"
        last = max(steps, default=None)
        if last is not None and (not self._seen_steps or last > self._seen_steps[-1][0]):
            self._seen_steps = [*self._seen_steps, (last, time.time())][-pace.STEPS :]
        if (found := pace.rate(self._seen_steps)) is not None:
            return found, "by what came while watching"
        return None, ""

    def _silence(self, source: Source) -> str:
        """What to do when nothing has come for as long as many steps take; empty when something has."""
        age_s, per_minute = self._age(source), pace.rate(self._memory.times)
        usual_s = 60 / per_minute if per_minute else 0.0
        if age_s is None or age_s < max(SILENT_S, SILENT_STEPS * usual_s):
            return ""
        hosts = sorted({writer.host for writer in source.writers if source.snapshot.liveness[writer.writer].is_alive})
        if hosts == [socket.gethostname()]:
            return "nothing was recorded for long, though the process lives: is the training stuck?"
        return f"nothing was recorded for long; whether the process lives can be seen only on {', '.join(hosts)}: look there"

    def _changes(self, series: dict[str, Series]) -> tuple[Moved, ...]:
        """When the chosen series changed; worked out anew where one of them has grown."""
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
            notes.append("the trace is begun, and no process records into it yet: it is looked at again and again")
        elif not extents.steps:
            notes.append(f"no sequence was recorded: {info} says more" if ended else "no sequence is recorded yet")
        elif lacking := [name for name in self.pair if name not in extents.passes]:
            there = ", ".join(sorted(extents.passes)) or "none"
            notes.append(
                f"no mismatch to show: no scores of pass {' and '.join(map(repr, lacking))} yet; passes by now: {there}"
                f" ({option('pair', 'A:B')} compares two others)"
            )
        if state not in (LIVE, WAITING) and not ended:
            notes.append("every process that recorded has ended, the recorded command not yet")
        if state == LIVE and (silence := self._silence(source)):
            notes.append(silence)
        errors = [writer.error for writer in source.writers if writer.error]
        notes += [f"a process stopped recording while training went on: {error}" for error in errors]
        if source.damaged:
            notes.append(f"{len(source.damaged)} files are damaged and passed over: {info} says which")
        return notes
