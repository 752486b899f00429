"""What is seen of a run at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...schemas.results import Result
from ..dynamics.changes import ChangePoint
from ..dynamics.quantities import Series

WAITING = "waiting"
"""The state of a run of which nothing is recorded yet; the others are those of `info`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What an alarm sounds at."""

    who: str
    """Whose level or rule it is; `tim-trace` for this project's own."""
    metric: str
    definition: str
    condition: str
    """When it sounds, as `> 0.001`."""
    says: str
    """What it means to who published it."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstAlarm(Condition):
    """An alarm that sounded, and the step at which it did so first."""

    first_step: int
    first_value: float | None
    """The metric there; None where the rule is no level of one metric."""
    last_step: int
    """The last step at which it sounded."""
    num_steps: int
    """Steps at which it sounded."""
    still: bool
    """Whether it sounds at the last step that can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A change of one series."""

    name: str
    change: ChangePoint


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Watched(Result):
    """A run, as far as it is recorded."""

    _text = "tim_trace.analysis.watch.text:watched_text"

    trace: str
    run: str
    pair: str
    state: str
    """`waiting`, `live`, `finished`, `killed` or `stopped`."""
    exit_code: int | None = None
    """How the recorded command ended; None while it runs or when there was none."""
    is_over: bool = False
    """Whether nothing more will be recorded."""
    notes: tuple[str, ...] = ()
    """What to know or do, a sentence each."""
    damaged: tuple[str, ...] = ()
    """What of the trace cannot be read or is missing and is in no number, a sentence each."""
    num_steps: int = 0
    """Steps that have sequences."""
    num_unread_steps: int = 0
    """Steps whose tokens were not read yet: what is said of the whole run is not of these."""
    first_step: int | None = None
    last_step: int | None = None
    num_sequences: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    """Response tokens."""
    age_s: float | None = None
    """Time since the last record, seconds; None where nothing says when it was."""
    steps_per_minute: float | None = None
    rate_from: str = ""
    """What steps_per_minute is from."""
    num_latest: int = 10
    """Latest steps to be shown."""
    series: Mapping[str, Series]
    """Name -> the values by step, as `dynamics.read_series` gives them; the same steps for all."""
    alarms: tuple[FirstAlarm, ...] = ()
    """Alarms that sounded, the earliest first."""
    num_alarms: int = 0
    """Alarms that could be judged, silent ones included."""
    not_judged: tuple[str, ...] = ()
    """Published alarms whose metric is not known by step."""
    moved: tuple[Moved, ...] = ()
    """When the mismatch, the reward and the gradient norm changed, where there are steps enough."""
