"""True outcome of a run, from its own and its twin's evaluations by the true reward."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FELL = 0.9
"""A run whose last fifth is below this share of its best fifth has collapsed."""
SOUND = ("sound", "harmless")
HELD = 0.95
"""A run above this share has not; runs in between are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A run to make."""

    name: str
    label: dict[str, Any]
    """`cause` as in Truth, `detail`, and `twin`: the name of the healthy run that differs only in the cause."""
    perform: Callable[[Path, Path], object]
    """Function that writes `trace` and `plan.json` to the first folder, and may keep models in the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """A run and its true outcome."""

    folder: Path
    plan: dict[str, Any]
    cause: str
    """The suspect to name, `other` if it is not among the suspects, `sound` or `harmless`."""
    detail: str
    """What exactly was switched."""
    expected: str | None
    """The cause if the run collapsed and its twin did not; `none` if it did not collapse; else None."""
    twin: Path
    kept: float
    """Mean of the last fifth over that of the best fifth of the evaluations."""

    @property
    def trace(self) -> str:
        return str(self.folder / "trace")


def truths(folder: Path) -> list[Truth]:
    """Return the runs below a folder that have a twin there."""
    found = [_truth(path.parent, folder) for path in sorted(folder.glob("*/label.json"))]
    return [each for each in found if each is not None]


def _truth(run: Path, folder: Path) -> Truth | None:
    label, plan = (json.loads((run / name).read_text()) for name in ("label.json", "plan.json"))
    twin = folder / label["twin"]
    if not (twin / "plan.json").exists():
        return None
    kept = share_kept(plan["evaluations"])
    of_twin = share_kept(json.loads((twin / "plan.json").read_text())["evaluations"])
    fell, held = kept < FELL, kept > HELD
    expected = None
    if held:
        expected = "none"
    elif fell and of_twin > HELD and label["cause"] not in SOUND:
        expected = label["cause"]
    return Truth(
        folder=run, plan=plan, cause=label["cause"], detail=label["detail"], expected=expected, twin=twin, kept=kept
    )


def share_kept(evaluations: Sequence[float]) -> float:
    """Return the mean of the last fifth divided by that of the best; any negative minimum is subtracted first."""
    values = np.asarray(evaluations, float)
    width = max(len(values) // 5, 1)
    means = np.convolve(values, np.ones(width) / width, mode="valid")
    floor = min(float(values.min()), 0.0)
    return float((means[-1] - floor) / max(means.max() - floor, 1e-12))
