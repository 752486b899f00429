"""What a report holds, apart from how it is written."""

from __future__ import annotations

from dataclasses import dataclass

from .chart import Chart, Lines
from .provenance import Provenance
from .subject import Subject
from .verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Everything that a report shows."""

    subjects: tuple[Subject, ...]
    """The runs; the first is the one that is reported, the others stand beside it."""
    verdicts: tuple[Verdict, ...]
    """One a run."""
    run: tuple[Lines, ...]
    """Charts of the series by step."""
    constants: dict[str, float]
    """Series of the first run that never move -> their value."""
    mismatch: tuple[Chart, ...]
    """Charts of the first run's mismatch."""
    provenance: tuple[Provenance, ...]
    """One a run."""
    made_with: str
    """Version of tim-trace."""

    @property
    def charts(self) -> tuple[Chart, ...]:
        """Every chart, in order."""
        return (*self.run, *self.mismatch)

    @property
    def title(self) -> str:
        """The run and its verdict in a line."""
        return f"{self.subjects[0].name}: {self.verdicts[0].sentence}"
