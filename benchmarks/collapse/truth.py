"""What really happened in a run, from evaluations by the true reward and from those of its twin."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from causes import FAMILIES

FELL = 0.9
"""A run whose last fifth is below this share of its best fifth fell."""
HELD = 0.95
"""One above this share did not; what lies between is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """A run and what became of it."""

    folder: Path
    plan: dict[str, Any]
    cause: str
    """The switch's cause, `sound` or `harmless`."""
    expected: str | None
    """The suspect to be named; `none` where nothing fell; None where it cannot be said who is to blame."""
    twin: Path
    kept: float
    """Last fifth over best fifth of the evaluations."""

    @property
    def trace(self) -> str:
        return str(self.folder / "trace")


def truths(folder: Path) -> list[Truth]:
    """The runs below a folder that have a twin there."""
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
    """The last fifth's mean over the best fifth's."""
    width = max(len(evaluations) // 5, 2)
    means = [sum(evaluations[i : i + width]) / width for i in range(len(evaluations) - width + 1)]
    return means[-1] / max(means)
