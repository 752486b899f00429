"""What a replay will do and how long that takes, before it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from time import perf_counter
from typing import Any

import pyarrow.dataset as ds

from ..schemas.layout import SCORES, SEQUENCES
from ..schemas.passes import TRAIN
from ..schemas.results import Table
from .meter import Told
from .recorded import RecordedRun
from .sample import Sample

PROBE_S = 1.0
"""Seconds of scoring after which a pace is known; a step that takes less is measured whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPlan:
    """What an arm still has to do."""

    arm: str
    num_steps: int
    """Steps in which it lacks sequences."""
    num_sequences: int
    """That it lacks."""
    num_tokens: int
    """Of prompts and responses that go through the model, with the recorded neighbours of what it lacks."""
    num_versions: int
    """Weights that are loaded, each time that they change."""
    tokens_per_s: float | None = None
    """Measured here on the first rows; None before."""
    load_s: float | None = None
    """Of one version's weights, measured here; None before."""
    num_all_tokens: int
    """Those of all sequences of these steps, where a sample is scored; else `num_tokens`."""

    @property
    def seconds(self) -> float | None:
        """Estimated time; None before a pace is known."""
        return self._seconds(self.num_tokens)

    @property
    def all_seconds(self) -> float | None:
        """Estimated time for all sequences of these steps; None before a pace is known."""
        return self._seconds(self.num_all_tokens)

    def _seconds(self, num_tokens: int) -> float | None:
        if self.tokens_per_s is None:
            return None
        return num_tokens / self.tokens_per_s + self.num_versions * (self.load_s or 0.0)


class ReplayPlan(list[ArmPlan], Table):
    """What each arm still has to do."""

    _text = "tim_trace.analysis.replay_text:plan_text"

    def at(self, tokens_per_s: float, load_s: float) -> ReplayPlan:
        """The same at one pace for all arms."""
        return ReplayPlan(replace(arm, tokens_per_s=tokens_per_s, load_s=load_s) for arm in self)

    @property
    def seconds(self) -> float | None:
        """Estimated time of all arms together; None before a pace is known."""
        return _total(arm.seconds for arm in self)

    @property
    def all_seconds(self) -> float | None:
        """The same without a sample."""
        return _total(arm.all_seconds for arm in self)

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        names = [field.name for field in fields(ArmPlan)] + ["seconds", "all_seconds"]
        return names, [[getattr(arm, name) for name in names] for arm in self]


@dataclass(frozen=True, slots=True)
class Extent:
    """One sequence of a step, as far as a plan asks."""

    seq_id: str
    num_tokens: int
    """Of prompt and response."""
    version: int | None
    forward: tuple[str, int | None]
    """The writer, and its number of the forward."""


def extents(run: RecordedRun, steps: Sequence[int]) -> dict[int, list[Extent]]:
    """Step -> what pass `train` has of it."""
    chosen = ds.field("step").isin(list(steps))
    known = run.table(
        SEQUENCES, chosen, ["step", "seq_id", "num_prompt_tokens", "num_response_tokens", "policy_version"]
    )
    lengths = {
        (step, seq_id): ((prompt or 0) + (response or 0), version)
        for step, seq_id, prompt, response, version in _rows(known)
    }
    scored = run.table(
        SCORES, chosen & (ds.field("pass") == TRAIN), ["step", "seq_id", "policy_version", "writer", "forward_id"]
    )
    found: dict[int, list[Extent]] = {step: [] for step in steps}
    for step, seq_id, version, writer, forward_id in _rows(scored):
        number, sampled_with = lengths.get((step, seq_id), (0, None))
        found[step].append(Extent(seq_id, number, sampled_with if version is None else version, (writer, forward_id)))
    return found


def arm_plan(
    name: str,
    steps: Mapping[int, list[Extent]],
    lacks: Callable[[int, str], bool],
    *,
    sample: Sample | None,
    keeps_batches: bool,
    weights_version: int | None,
) -> ArmPlan:
    """What an arm has to do of these steps, where `lacks(step, sequence)` says what the trace does not have of it."""
    num_steps = num_sequences = num_tokens = num_all = 0
    versions: list[int | None] = []
    for step, rows in steps.items():
        drawn = rows if sample is None else [row for row in rows if row.seq_id in sample.steps[step].unit_of]
        lacking = [row for row in drawn if lacks(step, row.seq_id)]
        num_all += sum(row.num_tokens for row in rows if lacks(step, row.seq_id))
        if lacking:
            forwards = {row.forward for row in lacking}
            run = [row for row in rows if row.forward in forwards] if keeps_batches else lacking
            num_steps, num_sequences = num_steps + 1, num_sequences + len(lacking)
            num_tokens += sum(row.num_tokens for row in run)
            versions += sorted({row.version for row in run}, key=lambda version: version or 0)
    changes = [version for place, version in enumerate(versions) if place == 0 or version != versions[place - 1]]
    return ArmPlan(
        arm=name,
        num_steps=num_steps,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        num_versions=min(len(changes), 1) if weights_version is not None else len(changes),
        num_all_tokens=num_tokens if sample is None else num_all,
    )


class Pace:
    """Tells the pace of a replay once, as soon as its first rows are scored."""

    def __init__(self, tell: Callable[[float], None]):
        """`tell` gets tokens a second."""
        self._tell: Callable[[float], None] | None = tell
        self._start, self._tokens = 0.0, 0.0

    def watching(self, told: Told, num_tokens: int) -> Told:
        """`told`, listened to while `num_tokens` are scored; a share of 0 says that scoring starts."""

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


def _rows(table: Any) -> Any:
    return zip(*(table[name].to_pylist() for name in table.column_names), strict=True)


def _total(values: Any) -> float | None:
    known = list(values)
    return None if any(value is None for value in known) else sum(known)
