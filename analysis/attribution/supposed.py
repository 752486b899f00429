"""What would have made a run fall that does not show it: somebody may know of a fall that no recorded outcome tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..dynamics.conditions import ADVANTAGES, PROMPTS, SAMPLING, SETTING
from ..dynamics.fall import COLLAPSE, Fall
from ..dynamics.recorded import CONTRACT, read_recorded
from . import thresholds as t
from .facts import Facts
from .mismatch import read_run_mismatch
from .suspects.truncation import ending_step

_GIVEN = (PROMPTS, SAMPLING, ADVANTAGES, SETTING, CONTRACT)


def supposed_at(facts: Facts, step: int) -> Facts:
    """The same, as if the run fell at a step."""
    fall = Fall(
        outcome=facts.outcome.name if facts.outcome else "", onset_of="", kind=COLLAPSE, step=step, low=step, high=step + 1,
        interval=(step - 1, step + 1), fallen=step + int(t.AHEAD), before=0.0, after=0.0, size_in_sd=0.0,
    )  # fmt: skip
    return replace(facts, fall=fall, mismatch=read_run_mismatch(facts.series, fall))


def broken_steps(facts: Facts) -> Iterator[int]:
    """Steps at which a run was given something else, or its engine became another one."""
    for change in read_recorded(facts.database, facts.pair):
        is_clear = change.size_in_sd is None or abs(change.size_in_sd) >= t.OF_NO_SCATTER
        if change.kind in _GIVEN and is_clear and change.shape != "ramp":
            yield change.step
        if change.series == "mean_abs_d" and isinstance(change.after, float) and change.after >= t.MATERIAL_MISMATCH:
            yield change.step
    if (ending := ending_step(facts.rollouts)) is not None:
        yield ending
    if facts.changed_rewards is not None:
        yield facts.changed_rewards.step
    lag = np.abs(facts.values("version_lag"))
    known = np.flatnonzero(np.isfinite(lag))
    if len(known):
        grows = known[1:][np.diff(lag[known]) >= 1]
        yield from (int(facts.steps[place]) for place in grows[:1])
