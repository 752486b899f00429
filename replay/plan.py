"""The remaining work of a replay, and how long it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from time import perf_counter
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from ..schemas.layout import SCORES, SEQUENCES
from ..schemas.results import Table
from .meter import Told
from .recorded import RecordedRun
from .sample import STEPS_AT_ONCE, Sample, batched

PROBE_S = 1.0
"""Seconds of scoring after which the pace is reported; a shorter step is measured whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPlan:
    """The remaining work of one arm."""

    arm: str
    num_steps: int = 0
    """Steps with missing sequences."""
    num_sequences: int = 0
    """Missing sequences."""
    num_tokens: int = 0
    """Prompt and response tokens that go through the model, recorded neighbours of missing sequences included."""
    num_versions: int = 0
    """Number of weight loads: one per change of version."""
    tokens_per_s: float | None = None
    """Measured on the first rows; None before."""
    load_s: float | None = None
    """Seconds to load one version, measured; None before."""
    num_all_tokens: int = 0
    """Tokens of all sequences of these steps if a sample is scored; else `num_tokens`."""
    num_devices: int = 1
    """GPUs or CPUs in use at once, per actor on a cluster."""
    num_actors: int = 1
    """Ray actors that share the steps."""

    @property
    def device_hours(self) -> float | None:
        """Estimated device hours; None before a pace is known."""
        work_s = self._work_s(self.num_tokens)
        return None if work_s is None else work_s * self.num_devices / 3600

    @property
    def seconds(self) -> float | None:
        """Estimated time; None before a pace is known."""
        return self._seconds(self.num_tokens)

    @property
    def all_seconds(self) -> float | None:
        """Estimated time for all sequences of these steps; None before a pace is known."""
        return self._seconds(self.num_all_tokens)

    def _seconds(self, num_tokens: int) -> float | None:
        """Estimated time of the actor with the most steps."""
        work_s = self._work_s(num_tokens)
        return work_s and work_s * -(-self.num_steps // self.num_actors) / self.num_steps

    def _work_s(self, num_tokens: int) -> float | None:
        """Estimated time in one process."""
        if not num_tokens:
            return 0.0
        if self.tokens_per_s is None:
            return None
        return num_tokens / self.tokens_per_s + self.num_versions * (self.load_s or 0.0)


class ReplayPlan(list[ArmPlan], Table):
    """The remaining work of each arm."""

    _text = "tim_trace.analysis.replay_text:plan_text"

    def at(self, tokens_per_s: float, load_s: float, num_actors: int = 1) -> ReplayPlan:
        """Return the plan at one pace for all arms."""
        return ReplayPlan(replace(arm, tokens_per_s=tokens_per_s, load_s=load_s, num_actors=num_actors) for arm in self)

    @property
    def seconds(self) -> float | None:
        """Estimated time of all arms; None before a pace is known."""
        return _total(arm.seconds for arm in self)

    @property
    def device_hours(self) -> float | None:
        """Estimated device hours of all arms; None before a pace is known."""
        return _total(arm.device_hours for arm in self)

    @property
    def all_seconds(self) -> float | None:
        """Estimated time of all arms without sampling."""
        return _total(arm.all_seconds for arm in self)

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        names = [field.name for field in fields(ArmPlan)] + ["seconds", "all_seconds", "device_hours"]
        return names, [[getattr(arm, name) for name in names] for arm in self]


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of one sequence of a step."""

    seq_id: str
    num_tokens: int
    """Prompt and response tokens."""
    version: int | None
    forward: tuple[str, int | None]
    """Writer, and the index of the forward at that writer; None if not recorded."""


def extents(run: RecordedRun, steps: Sequence[int]) -> Iterator[tuple[int, list[Extent]]]:
    """Yield each step with its sequences in the replayed pass; holds STEPS_AT_ONCE steps in memory."""
    for part in batched(steps, STEPS_AT_ONCE):
        yield from _extents(run, part).items()


def _extents(run: RecordedRun, steps: Sequence[int]) -> dict[int, list[Extent]]:
    chosen = ds.field("step").isin(list(steps))
    known = run.table(
        SEQUENCES, chosen, ["step", "seq_id", "num_prompt_tokens", "num_response_tokens", "policy_version"]
    )
    lengths = {
        (step, seq_id): ((prompt or 0) + (response or 0), version)
        for step, seq_id, prompt, response, version in _rows(known)
    }
    scored = run.table(
        SCORES,
        chosen & (ds.field("pass") == run.replayed_pass),
        ["step", "seq_id", "policy_version", "writer", "forward_id"],
    )
    found: dict[int, list[Extent]] = {step: [] for step in steps}
    for step, seq_id, version, writer, forward_id in _rows(scored):
        number, sampled_with = lengths.get((step, seq_id), (0, None))
        found[step].append(Extent(seq_id, number, sampled_with if version is None else version, (writer, forward_id)))
    return found


class ArmCount:
    """Counts the remaining work of an arm, step by step."""

    def __init__(
        self,
        name: str,
        lacks: Callable[[int, str], bool],
        *,
        sample: Sample | None,
        keeps_batches: bool,
        weights_version: int | None,
        num_devices: int = 1,
    ):
        """`lacks(step, sequence)` is true if the arm has no score of the sequence yet."""
        self._lacks, self._sample, self._keeps_batches = lacks, sample, keeps_batches
        self._weights_version = weights_version
        self._plan = ArmPlan(arm=name, num_devices=num_devices)
        self._version: int | None = None

    def add(self, step: int, rows: Sequence[Extent]) -> None:
        """Count a step, after those before it."""
        drawn = rows if self._sample is None else self._drawn(step, rows)
        lacking = [row for row in drawn if self._lacks(step, row.seq_id)]
        everything = sum(row.num_tokens for row in rows if self._lacks(step, row.seq_id))
        forwards = {row.forward for row in lacking}
        run = [row for row in rows if row.forward in forwards] if self._keeps_batches else lacking
        num_tokens = sum(row.num_tokens for row in run)
        before = self._plan
        self._plan = replace(
            before,
            num_steps=before.num_steps + bool(lacking),
            num_sequences=before.num_sequences + len(lacking),
            num_tokens=before.num_tokens + num_tokens,
            num_versions=before.num_versions + self._loads(run),
            num_all_tokens=before.num_all_tokens + (num_tokens if self._sample is None else everything),
        )

    @property
    def plan(self) -> ArmPlan:
        """The counts so far."""
        return self._plan

    def _drawn(self, step: int, rows: Sequence[Extent]) -> list[Extent]:
        assert self._sample is not None
        return [row for row in rows if row.seq_id in self._sample.steps[step].unit_of]

    def _loads(self, rows: Sequence[Extent]) -> int:
        """Count the weight loads for a step's rows."""
        found = sorted({-1 if row.version is None else row.version for row in rows})
        if self._weights_version is not None:
            found = [self._weights_version] if found else []
        loads = 0
        for version in found:
            loads += version != self._version
            self._version = version
        return loads


class Pace:
    """Reports the pace of a replay once, as soon as its first rows are scored."""

    def __init__(self, tell: Callable[[float], None]):
        """`tell` is called with tokens per second."""
        self._tell: Callable[[float], None] | None = tell
        self._start, self._tokens = 0.0, 0.0

    def watching(self, told: Told, num_tokens: int) -> Told:
        """Wrap `told` to time the scoring of `num_tokens`; a share of 0 marks its start."""

        def watched(share: float) -> None:
            if share == 0.0:
                self._start, self._tokens = perf_counter(), 0.0
            elif self._tell is not None:
                self._tokens += share * num_tokens
                took = perf_counter() - self._start
                if took >= PROBE_S or self._tokens >= 0.999 * num_tokens:
                    tell, self._tell = self._tell, None
                    tell(self._tokens / max(took, 1e-9))
            told(share)

        return watched


def _rows(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    return zip(*(table[name].to_pylist() for name in table.column_names), strict=True)


def _total(values: Iterable[float | None]) -> float | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if len(known) == len(found) else None
