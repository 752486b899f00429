"""The `diagnose` result as codes and numbers. Sentences are in text.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...replay.arms import AS_RECORDED
from ...schemas.passes import TRAIN
from ...schemas.results import Result
from ..advice import Advice
from ..alarms.reading import AlarmReadings
from ..attribution.attribution import Attribution
from ..check.check import CheckResult
from ..check.finding import DataFinding
from ..facts.recorded import RecordedChange
from ..location import Location
from .figures import PublishedFigure

SETTLES = 0.9
"""A replay identifies the cause if it removes more than this share of the mismatch."""
ADDS_LITTLE = 0.1
"""A replay has no effect if it removes or adds at most this share of the mismatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Dtypes of passes a and b, or None where unknown."""

    passes: tuple[str, str]
    declared: tuple[str | None, str | None]
    logits: tuple[str | None, str | None]
    """Logits dtypes inferred from the logprobs (see check.pair_data)."""
    values: tuple[str | None, str | None]
    """Dtypes that the recorded logprobs were rounded to."""
    in_file: tuple[bool, bool] = (False, False)
    """True if the logprobs were rounded in the imported file, rather than by the engine or trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureComparison:
    figure: PublishedFigure
    own: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeComparison:
    code: Literal["equal", "unpublished", "below", "within", "above"]
    """`equal` if the passes do not differ, `unpublished` if no published value applies, else the position of `own`
    relative to the published range."""
    own: float
    coarser: str | None
    is_inferred: bool = False
    low: float | None = None
    """`low` to `high` is the published range (nats), None for `equal` and `unpublished`."""
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayEffect:
    """Effect on the mismatch of replacing pass a with a replay."""

    arm: str
    pair: tuple[str, str]
    num_tokens: int
    gap_rms: float
    left_rms: float
    removed: float
    """Share of mean squared d that the replay removes. Negative if the mismatch increases."""
    low: float | None
    """`low` to `high` is the 95% interval for `removed`. If both are None, `no_interval` says why."""
    high: float | None
    no_interval: str | None
    is_own_engine: bool = False
    """True if the replay only switched to pass b's engine."""
    changes: str | None = None
    """Replay options, e.g. `dtype=fp16,batch-size=1`, or None if not recorded."""

    @property
    def is_as_recorded(self) -> bool:
        """True if pass a is the trainer's, and the replay changes none of its settings."""
        return self.arm == AS_RECORDED and self.pair[0] == TRAIN

    @property
    def code(self) -> Literal["settles", "repeats", "part", "nothing", "adds"]:
        """`settles` (removes the mismatch), `repeats` (reproduces pass b), `part` (removes some), `nothing` (no effect)
        or `adds` (increases it)."""
        if self.removed > SETTLES:
            return "repeats" if self.is_own_engine else "settles"
        if self.removed > ADDS_LITTLE:
            return "part"
        return "nothing" if self.removed > -ADDS_LITTLE else "adds"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenSide:
    """Component to fix, based on the results of `check` and `attribute`."""

    side: str
    """`data`, or a component in check.finding.Broken."""
    since: int | None
    by: tuple[str, ...]
    other: str | None = None
    is_stronger: bool = False
    """True if `side` and `other` both explain the mismatch, but the evidence for `side` is stronger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Result):
    """A run's diagnosis: collapse, cause, validity of the comparison, and mismatch."""

    _text = "tim_trace.analysis.diagnosis.text:diagnosis_text"

    checked: CheckResult | None
    """None if the trace has logged averages but no tokens."""
    attribution: Attribution
    jumps: tuple[RecordedChange, ...]
    """Jumps in the mismatch by a factor of ABRUPT or more, largest first."""
    numerics: Numerics
    metrics: dict[str, float]
    size: SizeComparison
    figures: tuple[FigureComparison, ...]
    alarms: AlarmReadings
    replays: tuple[ReplayEffect, ...]
    next: tuple[Advice, ...]
    located: Location | None = None

    @property
    def settled_by(self) -> ReplayEffect | None:
        return next((replay for replay in self.replays if replay.code == "settles"), None)

    @property
    def unexplained_jump(self) -> RecordedChange | None:
        """Largest jump in the mismatch that no recorded setting explains. None if the comparison is invalid."""
        return next((jump for jump in self.jumps if not jump.follows), None) if self.is_valid else None

    @property
    def is_valid(self) -> bool:
        return self.checked is not None and self.checked.is_valid

    @property
    def broken(self) -> BrokenSide | None:
        checked, suspect = self.checked, self.attribution.suspects[0] if self.attribution.cause else None
        seen, caused = checked.broken if checked else None, suspect.broken if suspect else None
        faults = data_faults(checked) if checked else ()
        of_data = min((each.since for each in faults if each.since is not None), default=None)
        if seen is None and caused is None:
            return BrokenSide(side="data", since=of_data, by=("check",)) if faults else None
        since = None if checked is None or seen is None else _first_step(checked, self.jumps)
        if suspect is None or caused is None:
            return BrokenSide(side=str(seen), since=since, by=("check",))
        step = of_data if caused == "data" and of_data is not None else suspect.since
        if seen is None:
            by = ("check", "attribute") if caused == "data" and faults else ("attribute",)
            return BrokenSide(side=caused, since=step, by=by)
        both = min((each for each in (since, step) if each is not None), default=None)
        is_of_mismatch = suspect.code in ("mismatch", "staleness")
        if seen == caused or (is_of_mismatch and "computation" in (seen, caused)):
            return BrokenSide(side=caused if seen == "computation" else seen, since=both, by=("check", "attribute"))
        if not is_of_mismatch:
            return BrokenSide(side=caused, since=step, by=("attribute",), other=seen)
        assert checked is not None
        if suspect.proof is not None and checked.findings[0].weight < 1.0:
            return BrokenSide(side=caused, since=step, by=("attribute",), other=seen, is_stronger=True)
        return BrokenSide(side=seen, since=both, by=("check",), other=caused, is_stronger=True)


_OF_LOGPROBS = ("ratio_is_one", "padding_counts", "unsampled_count")


def data_faults(checked: CheckResult) -> tuple[DataFinding, ...]:
    return tuple(
        each for each in checked.data if not each.is_notice and (checked.is_valid or each.code not in _OF_LOGPROBS)
    )


def _first_step(checked: CheckResult, jumps: tuple[RecordedChange, ...]) -> int | None:
    found = []
    for each in (each for each in checked.findings if each.fails and each.signal != "grew_before"):
        since = each.numbers.get("since_step", each.numbers.get("since"))
        if since is not None:
            before = int(each.numbers.get("last_before") or int(since) - 1)
            found.append(next((jump.step for jump in jumps if before < jump.step <= int(since)), int(since)))
    return min(found, default=None)
