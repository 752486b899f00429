"""The remaining work in a replay, and how long it is expected to take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from ..schemas.layout import SCORES, SEQUENCES
from ..schemas.results import Table
from .recorded import RecordedRun
from .sample import STEPS_AT_ONCE, Sample, batched


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPlan:
    """The work that remains to be done under one arm."""

    arm: str
    num_steps: int = 0
    """Number of steps with sequences that have no score yet."""
    num_sequences: int = 0
    """Number of sequences that have no score yet."""
    num_tokens: int = 0
    """Number of prompt and response tokens that run through the model, including those of rows that only share a
    forward pass with a missing sequence."""
    num_versions: int = 0
    """Number of times that weights are loaded: once per change of policy version."""
    tokens_per_s: float | None = None
    """Tokens per second, measured on the first rows; None until measured."""
    load_s: float | None = None
    """Measured seconds to load the weights of one policy version; None until measured."""
    num_devices: int = 1
    """Number of GPUs or CPUs in use at the same time."""

    @property
    def seconds(self) -> float | None:
        """Estimated time in a single process, seconds; None until the pace is known."""
        if not self.num_tokens:
            return 0.0
        if self.tokens_per_s is None:
            return None
        return self.num_tokens / self.tokens_per_s + self.num_versions * (self.load_s or 0.0)

    @property
    def device_hours(self) -> float | None:
        """Estimated device hours; None until the pace is known."""
        return None if self.seconds is None else self.seconds * self.num_devices / 3600

    def at(self, tokens_per_s: float, load_s: float) -> ArmPlan:
        """Return the plan with a measured pace."""
        return replace(self, tokens_per_s=tokens_per_s, load_s=load_s)


class ReplayPlan(list[ArmPlan], Table):
    """The work that remains to be done under each arm."""

    _text = "tim_trace.analysis.replay_text:plan_text"

    @property
    def seconds(self) -> float | None:
        """Estimated time for all arms, seconds; None until the pace is known."""
        return _total(arm.seconds for arm in self)

    @property
    def device_hours(self) -> float | None:
        """Estimated device hours for all arms; None until the pace is known."""
        return _total(arm.device_hours for arm in self)

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        names = [field.name for field in fields(ArmPlan)] + ["seconds", "device_hours"]
        return names, [[getattr(arm, name) for name in names] for arm in self]


@dataclass(frozen=True, slots=True)
class Extent:
    """The length of one sequence in a step, and the forward pass in which it was recorded."""

    seq_id: str
    num_tokens: int
    """Number of prompt and response tokens."""
    version: int | None
    forward: tuple[str, int | None]
    """Writer that recorded the forward pass, and the index of the forward pass at that writer; the index is None if it
    was not recorded."""


def extents(run: RecordedRun, steps: Sequence[int]) -> Iterator[tuple[int, list[Extent]]]:
    """Yield each step with the sizes of its sequences in the replayed pass.

    At most STEPS_AT_ONCE steps are held in memory at a time.
    """
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
    """Counter of the work that remains under an arm, step by step."""

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
        """Start with no steps; `lacks(step, sequence)` returns True if the sequence has no score under the arm yet."""
        self._lacks, self._sample, self._keeps_batches = lacks, sample, keeps_batches
        self._weights_version = weights_version
        self._plan = ArmPlan(arm=name, num_devices=num_devices)
        self._version: int | None = None

    def add(self, step: int, rows: Sequence[Extent]) -> None:
        """Count the work in a step. Steps must be added in order."""
        unit_of = None if self._sample is None else self._sample.steps[step]
        drawn = [row for row in rows if unit_of is None or row.seq_id in unit_of]
        lacking = [row for row in drawn if self._lacks(step, row.seq_id)]
        forwards = {row.forward for row in lacking}
        run = [row for row in rows if row.forward in forwards] if self._keeps_batches else lacking
        before = self._plan
        self._plan = replace(
            before,
            num_steps=before.num_steps + bool(lacking),
            num_sequences=before.num_sequences + len(lacking),
            num_tokens=before.num_tokens + sum(row.num_tokens for row in run),
            num_versions=before.num_versions + self._loads(run),
        )

    @property
    def plan(self) -> ArmPlan:
        """The plan for all steps added until now."""
        return self._plan

    def _loads(self, rows: Sequence[Extent]) -> int:
        """Return how many times weights are loaded to score a step's rows."""
        found = sorted({-1 if row.version is None else row.version for row in rows})
        if self._weights_version is not None:
            found = [self._weights_version] if found else []
        loads = 0
        for version in found:
            loads += version != self._version
            self._version = version
        return loads


def _rows(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    return zip(*(table[name].to_pylist() for name in table.column_names), strict=True)


def _total(values: Iterable[float | None]) -> float | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if len(known) == len(found) else None
