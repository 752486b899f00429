"""Measure which remedy saves which run from collapse, and compare with the prediction from the broken run's trace.

python benchmarks/collapse/remedies.py runs/collapse/heldout -o runs/collapse/remedies [--json FILE]

Takes the runs below a folder that collapsed because of their engine, repeats each with one remedy (remedy.py) and the
same seeds, and compares the rescue (the recovered share of the lost evaluation score: 1 reaches the healthy twin) with
the prediction from the broken run's own trace (foretold.py).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from foretold import WEIGHTS_EVERY, Foretold, foretold
from laboratory import Plan, perform
from remedy import REMEDIES, Remedy
from switches import Switches
from truth import Truth, truths

_OF_ENGINE = ("mismatch", "staleness")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescue:
    """Effect of a remedy on a broken run."""

    run: str
    cause: str
    remedy: Remedy
    broken: float
    """Mean over the last fifth of the evaluations."""
    sound: float
    """The twin's."""
    remedied: float
    foretold: Foretold

    @property
    def rescue(self) -> float:
        """Return the recovered share of the loss."""
        return (self.remedied - self.broken) / (self.sound - self.broken)


def last_fifth(plan: dict) -> float:
    """Return the mean of a run's last evaluations."""
    values = plan["evaluations"]
    return float(np.mean(values[-max(len(values) // 5, 2) :]))


def rescues_of(job: tuple[Truth, Path, Path]) -> list[Rescue]:
    """Return the effect of each remedy on a broken run, with the prediction from its trace."""
    truth, output, models = job
    weighed = output / f"{truth.folder.name}-weights"
    _performed(plan_of(truth, {}), weighed, models, weights_every=WEIGHTS_EVERY)
    sound = last_fifth(json.loads((truth.twin / "plan.json").read_text()))
    found = []
    for remedy in REMEDIES:
        if not remedy.applies(truth.plan["switches"]):
            continue
        plan = plan_of(truth, remedy.changes)
        found.append(
            Rescue(
                run=truth.folder.name,
                cause=truth.detail,
                remedy=remedy,
                broken=last_fifth(truth.plan),
                sound=sound,
                remedied=last_fifth(_performed(plan, output / plan.name, models)),
                foretold=foretold(truth.trace, str(weighed / "trace"), remedy, truth.plan),
            )
        )
    return found


def _performed(plan: Plan, folder: Path, models: Path, weights_every: int = 0) -> dict:
    """Return a run's plan.json, after running the plan if it is missing."""
    if not (folder / "plan.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        perform(plan, folder, models, weights_every)
    return json.loads((folder / "plan.json").read_text())


def plan_of(truth: Truth, changes: dict[str, object]) -> Plan:
    """Return the plan of a run, with other switches."""
    said = {name: tuple(v) if isinstance(v, list) else v for name, v in truth.plan["switches"].items()}
    fields = {name: truth.plan[name] for name in ("task", "architecture", "algorithm", "rate", "steps", "seed")}
    return Plan(**fields, switches=replace(Switches(**said), **changes))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path("runs/collapse/models"))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--most", type=int, help="broken runs at most")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    broken = [truth for folder in given.folder for truth in truths(folder) if truth.expected in _OF_ENGINE]
    jobs = [(truth, given.output, given.models) for truth in broken[: given.most]]
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        rescues = [rescue for found in pool.imap(rescues_of, jobs) for rescue in found]
    _print_table(rescues)
    _print_predictions(rescues)
    if given.json:
        rows = [asdict(each.foretold) | _row(each) for each in rescues]
        given.json.write_text(json.dumps(rows, indent=1))


def _row(each: Rescue) -> dict[str, object]:
    own = {name: getattr(each, name) for name in ("run", "cause", "broken", "sound", "remedied", "rescue")}
    return own | {"remedy": each.remedy.name, "kind": each.remedy.kind}


def _print_table(rescues: list[Rescue]) -> None:
    """Print the median rescue by remedy and cause, with the number of runs; empty if the remedy does not apply."""
    causes = sorted({each.cause for each in rescues})
    print(f"| remedy | {' | '.join(causes)} | all |\n|---|{'---|' * (len(causes) + 1)}")
    for remedy in REMEDIES:
        cells = []
        for cause in (*causes, None):
            own = [each.rescue for each in rescues if each.remedy == remedy and cause in (None, each.cause)]
            cells.append(f"{np.median(own):+.2f} ({len(own)})" if own else "")
        print(f"| {remedy.name} | {' | '.join(cells)} |")


def _print_predictions(rescues: list[Rescue]) -> None:
    """Print the correlation of each prediction with the rescue, by kind of remedy and overall."""
    for name in Foretold.__dataclass_fields__:
        for kinds in (("correction",), ("precision",), ("correction", "precision")):
            pairs = [(getattr(each.foretold, name), each.rescue) for each in rescues if each.remedy.kind in kinds]
            known = [pair for pair in pairs if pair[0] is not None and np.isfinite(pair[0])]
            if len(known) > 2:
                x, y = np.array(known).T
                print(f"{name} and rescue, {' and '.join(kinds)}, {len(known)} runs: "
                      f"Pearson {np.corrcoef(x, y)[0, 1]:.2f}, Spearman {np.corrcoef(_ranks(x), _ranks(y))[0, 1]:.2f}")  # fmt: skip


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 1; equal values get the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


if __name__ == "__main__":
    main()
