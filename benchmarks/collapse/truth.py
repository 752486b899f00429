"""True outcome of a run, from its own and its twin's evaluations by the true reward."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from causes import FAMILIES

FELL = 0.9
"""A run whose last fifth is below this share of its best fifth has collapsed."""
HELD = 0.95
"""A run above this share has not; runs in between are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """A run and its true outcome."""

    folder: Path
    plan: dict[str, Any]
    cause: str
    """Cause of the switch, `sound` or `harmless`."""
    expected: str | None
    """The suspect to name; `none` if nothing collapsed; None if the cause cannot be determined."""
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
    elif fell and of_twin > HELD and label["cause"] in FAMILIES:
        expected = FAMILIES[label["cause"]]
    return Truth(folder=run, plan=plan, cause=label["cause"], expected=expected, twin=twin, kept=kept)


def share_kept(evaluations: list[float]) -> float:
    """Return the last fifth's mean over the best fifth's."""
    width = max(len(evaluations) // 5, 2)
    means = [sum(evaluations[i : i + width]) / width for i in range(len(evaluations) - width + 1)]
    return means[-1] / max(means)
