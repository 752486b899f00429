"""Which remedy saves which collapse, beside what the trace of the broken run alone had predicted.

python benchmarks/collapse/remedies.py runs/collapse/heldout -o runs/collapse/remedies [--json FILE]

Takes the runs below a folder that fell through their engine, runs each again with one remedy and the same seeds, and compares
the rescue (what of the lost evaluation came back: 0 nothing, 1 all that the sound twin has) with the prediction: the share of
the objective's distortion, sum |b| / sum |f*|, that `tim-trace objective` says the correction removes from the broken trace,
and the share of tokens that `tim-trace corrections` says it leaves alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from runs import Plan, perform
from switches import Switches
from tim_trace.analysis.objective.objective import objective
from truth import Truth, truths

REMEDIES: dict[str, dict[str, object]] = {
    "token TIS, cap 2": {"correction": "token_truncate", "correction_cap": 2.0},
    "token MIS, cap 2": {"correction": "token_mask", "correction_cap": 2.0},
    "sequence rejection, cap 2": {"correction": "sequence_mask", "correction_cap": 2.0},
    "a third of the learning rate": {"rate_factor": 0.3},
}
_OF_ENGINE = ("mismatch", "staleness")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescue:
    """What a remedy did for a broken run."""

    run: str
    cause: str
    remedy: str
    broken: float
    """Mean of the last fifth of the evaluations."""
    sound: float
    """The twin's."""
    remedied: float
    predicted: float | None
    """Share of the objective's distortion that the correction removes, from the broken trace alone; None for a remedy
    that no trace can foretell."""

    @property
    def rescue(self) -> float:
        """The share of what was lost that came back."""
        return (self.remedied - self.broken) / (self.sound - self.broken)


def last_fifth(plan: dict) -> float:
    """The mean of a run's last evaluations."""
    values = plan["evaluations"]
    return float(np.mean(values[-max(len(values) // 5, 2) :]))


def predicted(trace: str, remedy: dict[str, object]) -> float | None:
    """1 less the distortion with the correction over that without."""
    correction = remedy.get("correction")
    if correction is None:
        return None
    without = objective(trace, correction="none")
    corrected = objective(trace, correction=str(correction), correction_high=float(str(remedy["correction_cap"])))
    return 1.0 - distortion(corrected) / distortion(without)


def distortion(found) -> float:
    """Sum |b| over sum |f*| of a run."""
    return float(found.figures["relative_abs_bias"].value)


def _remedied(job: tuple[Truth, str, Path, Path]) -> Rescue:
    truth, remedy, output, models = job
    said = {name: tuple(v) if isinstance(v, list) else v for name, v in truth.plan["switches"].items()}
    changes = REMEDIES[remedy]
    fields = {name: truth.plan[name] for name in ("task", "architecture", "algorithm", "rate", "steps", "seed")}
    plan = Plan(**fields, switches=replace(Switches(**said), **changes))
    folder = output / plan.name
    if not (folder / "plan.json").exists():
        perform(plan, folder, models)
    return Rescue(
        run=truth.folder.name,
        cause=truth.cause,
        remedy=remedy,
        broken=last_fifth(truth.plan),
        sound=last_fifth(json.loads((truth.twin / "plan.json").read_text())),
        remedied=last_fifth(json.loads((folder / "plan.json").read_text())),
        predicted=predicted(truth.trace, changes),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path("runs/collapse/models"))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    broken = [truth for folder in given.folder for truth in truths(folder) if truth.expected in _OF_ENGINE]
    jobs = [(truth, remedy, given.output, given.models) for truth in broken for remedy in REMEDIES]
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        rescues = list(pool.imap(_remedied, jobs))
    _print(rescues)
    if given.json:
        rows = [{name: getattr(each, name) for name in (*Rescue.__dataclass_fields__, "rescue")} for each in rescues]
        given.json.write_text(json.dumps(rows, indent=1))


def _print(rescues: list[Rescue]) -> None:
    causes = sorted({each.cause for each in rescues})
    print(f"| remedy | {' | '.join(causes)} | all |\n|---|{'---|' * (len(causes) + 1)}")
    for remedy in REMEDIES:
        cells = []
        for cause in (*causes, None):
            own = [each.rescue for each in rescues if each.remedy == remedy and cause in (None, each.cause)]
            cells.append(f"{np.median(own):+.2f} ({len(own)})" if own else "")
        print(f"| {remedy} | {' | '.join(cells)} |")
    known = [each for each in rescues if each.predicted is not None]
    if len(known) > 2:
        x, y = (np.array([getattr(each, name) for each in known]) for name in ("predicted", "rescue"))
        ranks = [np.argsort(np.argsort(values)) for values in (x, y)]
        print(f"\nprediction and rescue over {len(known)} corrected runs: Pearson {np.corrcoef(x, y)[0, 1]:.2f}, "
              f"Spearman {np.corrcoef(*ranks)[0, 1]:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
