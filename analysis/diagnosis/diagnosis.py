"""Result of a diagnosis, as codes and numbers; text.py has the sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...schemas.results import Result
from ..advice import Advice
from ..alarms.reading import AlarmReadings
from ..attribution.attribution import Attribution
from ..check.check import CheckResult
from ..check.data_checks import DataFinding
from ..facts.recorded import RecordedChange
from ..location import Location
from .figures import PublishedFigure

SETTLES = 0.9
"""Share of the mismatch that a replay must remove to identify the cause."""
ADDS_LITTLE = 0.1
"""Share of the mismatch that a replay must remove or add to count as having an effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """dtypes of pass a and pass b, declared by contracts and inferred from logprobs; None if unknown."""

    passes: tuple[str, str]
    declared: tuple[str | None, str | None]
    """dtypes declared by the contracts."""
    logits: tuple[str | None, str | None]
    """dtypes to which the logits were rounded; see check.pair_data."""
    values: tuple[str | None, str | None]
    """dtypes to which the recorded logprobs were rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureComparison:
    """A published figure, and the trace's value under the same definition."""

    figure: PublishedFigure
    own: float
    fits: bool
    """True if the published figure has the same coarser dtype as the trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeComparison:
    """Size of the mismatch relative to published values of healthy runs."""

    code: Literal["equal", "unpublished", "below", "within", "above"]
    """`equal`: no mismatch; `unpublished`: no published value for this dtype; otherwise `own` relative to the range."""
    own: float
    """Root mean square of d, nats."""
    coarser: str | None
    """The coarser of the dtypes of pass a and pass b, which determines the size of the mismatch; None if unknown."""
    is_inferred: bool = False
    """True if no contract declares the dtype."""
    low: float | None = None
    """Lower end of the published range, nats; `high` is the upper end. Both are None for `equal` and `unpublished`."""
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayEffect:
    """How much of the mismatch disappears if a replay replaces pass a."""

    arm: str
    pair: tuple[str, str]
    num_tokens: int
    gap_rms: float
    """Root mean square of d between pass a and pass b over the replayed tokens, nats."""
    left_rms: float
    """Root mean square of d between the replay and pass b over the same tokens, nats."""
    removed: float
    """Share of the mean squared d removed by the replay; negative if the replay increases the mean squared d."""
    low: float | None
    """Lower end of the 95% interval of `removed`, over groups; `high` is the upper end. Both are None without one."""
    high: float | None
    no_interval: str | None
    """Reason why there is no interval; None if there is one."""
    is_own_engine: bool = False
    """True if the replay only switched to the engine that computed pass b."""
    changes: str | None = None
    """Options of the replay, e.g. `dtype=fp16,batch-size=1`; None if not recorded."""

    @property
    def code(self) -> Literal["settles", "repeats", "part", "nothing", "adds"]:
        """Effect of the replay: it removes the mismatch (`settles`), reproduces pass b (`repeats`), removes part of the
        mismatch (`part`), has no effect (`nothing`), or increases the mismatch (`adds`)."""
        if self.removed > SETTLES:
            return "repeats" if self.is_own_engine else "settles"
        if self.removed > ADDS_LITTLE:
            return "part"
        return "nothing" if self.removed > -ADDS_LITTLE else "adds"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenSide:
    """What must be fixed, according to `check` and `attribute` together."""

    side: str
    """`recording`, `engine`, `trainer`, `computation`, `versions` or `data`; see check.finding.Broken."""
    since: int | None
    """First broken step; None if no command finds a start within the run."""
    by: tuple[str, ...]
    """The commands that found the fault: `check`, `attribute` or both."""
    other: str | None = None
    """Side that the other command blames; None if both agree, or only one blames a side."""
    is_stronger: bool = False
    """True if both commands explain the same mismatch, with stronger evidence for `side` than for `other`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Result):
    """Whether a run collapsed and why, whether its comparison is valid and whether its mismatch is normal."""

    _text = "tim_trace.analysis.diagnosis.text:diagnosis_text"

    checked: CheckResult
    attribution: Attribution
    """Whether the run collapsed, the onset of the collapse, and its probable cause."""
    jumps: tuple[RecordedChange, ...]
    """Increases of the mismatch by a factor of ABRUPT or more, largest first."""
    numerics: Numerics
    metrics: dict[str, float]
    """Metrics of the trace, by the names that `stats` and the frameworks use."""
    size: SizeComparison
    figures: tuple[FigureComparison, ...]
    alarms: AlarmReadings
    replays: tuple[ReplayEffect, ...]
    next: tuple[Advice, ...]
    """Commands that answer the questions still open."""
    located: Location | None = None
    """Newest `locate` result stored in the trace, without operators; None if there is none."""

    @property
    def settled_by(self) -> ReplayEffect | None:
        """Replay that removes nearly all of the mismatch; None if none does."""
        return next((replay for replay in self.replays if replay.code == "settles"), None)

    @property
    def unexplained_jump(self) -> RecordedChange | None:
        """Largest jump of the mismatch that no recorded setting explains; None if there is none, or the comparison is not
        valid."""
        return next((jump for jump in self.jumps if not jump.follows), None) if self.checked.is_valid else None

    @property
    def broken(self) -> BrokenSide | None:
        """What must be fixed, and since which step; None if nothing is broken."""
        checked, suspect = self.checked, self.attribution.suspects[0] if self.attribution.cause else None
        seen, caused = checked.broken, suspect.broken if suspect else None
        faults = data_faults(checked)
        of_data = min((each.since for each in faults if each.since is not None), default=None)
        if seen is None and caused is None:
            return BrokenSide(side="data", since=of_data, by=("check",)) if faults else None
        since = None if seen is None else _first_step(checked, self.jumps)
        if suspect is None or caused is None:
            return BrokenSide(side=str(seen), since=since, by=("check",))
        step = of_data if caused == "data" and of_data is not None else suspect.since
        if seen is None:
            return BrokenSide(
                side=caused, since=step, by=("check", "attribute") if caused == "data" and faults else ("attribute",)
            )
        both = min((each for each in (since, step) if each is not None), default=None)
        is_of_mismatch = suspect.code in ("mismatch", "staleness")
        if seen == caused or (is_of_mismatch and "computation" in (seen, caused)):
            return BrokenSide(side=caused if seen == "computation" else seen, since=both, by=("check", "attribute"))
        if not is_of_mismatch:
            return BrokenSide(side=caused, since=step, by=("attribute",), other=seen)
        if suspect.proof is not None and checked.findings[0].weight < 1.0:
            return BrokenSide(side=caused, since=step, by=("attribute",), other=seen, is_stronger=True)
        return BrokenSide(side=seen, since=both, by=("check",), other=caused, is_stronger=True)


_OF_LOGPROBS = ("ratio_is_one", "padding_counts", "unsampled_count")
"""Codes of data findings that compare logprobs and may therefore be due to a fault in the comparison."""


def data_faults(checked: CheckResult) -> tuple[DataFinding, ...]:
    """Return the faults in the run's data, except findings that also occur in healthy runs."""
    return tuple(
        each for each in checked.data if not each.is_notice and (checked.is_valid or each.code not in _OF_LOGPROBS)
    )


def _first_step(checked: CheckResult, jumps: tuple[RecordedChange, ...]) -> int | None:
    """Return the first step of the fault that makes a comparison invalid; None if it is present from the start.

    The check inspects a sample of steps, so a jump between two of them dates the fault more precisely.
    """
    found = []
    for each in (each for each in checked.findings if each.fails and each.signal != "grew_before"):
        since = each.numbers.get("since_step", each.numbers.get("since"))
        if since is not None:
            before = int(each.numbers.get("last_before") or int(since) - 1)
            found.append(next((jump.step for jump in jumps if before < jump.step <= int(since)), int(since)))
    return min(found, default=None)
