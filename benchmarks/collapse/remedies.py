"""Which remedy saves which collapse, beside what the trace of the broken run alone had predicted.

python benchmarks/collapse/remedies.py runs/collapse/heldout -o runs/collapse/remedies [--json FILE]

Takes the runs below a folder that fell through their engine, runs each again with one remedy and the same seeds, and compares
the rescue (what of the lost evaluation came back: 0 nothing, 1 all that the sound twin has) with what the broken run's own trace
foretells: the share of the objective's distortion, sum |b| / sum |f*|, that the correction removes (`tim-trace objective`);
the share of 1 - cosine to the exactly weighted gradient that it removes at some steps (`tim-trace gradient`); and the share of
tokens that it keeps (`tim-trace corrections`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from laboratory import Plan, perform
from switches import Switches
from tim_trace.analysis.database import connect
from tim_trace.analysis.objective.objective import objective
from tim_trace.replay.gradients.engine import gradient
from truth import Truth, truths

REMEDIES: dict[str, dict[str, object]] = {
    "token TIS, cap 2": {"correction": "token_truncate", "correction_cap": 2.0},
    "token MIS, cap 2": {"correction": "token_mask", "correction_cap": 2.0},
    "sequence rejection, cap 2": {"correction": "sequence_mask", "correction_cap": 2.0},
    "a third of the learning rate": {"rate_factor": 0.3},
}
_WEIGHTS_EVERY = 50
"""Steps from one that keeps its weights, for its gradient, to the next."""
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
    by_objective: float | None
    """Share of the objective's distortion that the correction removes; None for a remedy that no trace can foretell."""
    by_gradient: float | None
    """Share of the gradient's 1 - cosine that it removes."""
    by_corrections: float | None
    """Share of the tokens that it keeps."""

    @property
    def rescue(self) -> float:
        """The share of what was lost that came back."""
        return (self.remedied - self.broken) / (self.sound - self.broken)


def last_fifth(plan: dict) -> float:
    """The mean of a run's last evaluations."""
    values = plan["evaluations"]
    return float(np.mean(values[-max(len(values) // 5, 2) :]))


def by_objective(trace: str, remedy: dict[str, object]) -> float:
    """1 less the distortion with the correction over that without."""
    without = objective(trace, correction="none")
    corrected = objective(
        trace, correction=str(remedy["correction"]), correction_high=float(str(remedy["correction_cap"]))
    )
    return 1.0 - distortion(corrected) / distortion(without)


_EXACT = "correction=token_truncate,correction_high=1e30"
"""Token weights exp(d) as they are: the gradient that the samples call for, token by token."""


def by_gradient(trace: str, remedy: dict[str, object]) -> float:
    """1 less the correction's mean 1 - cosine to the exactly weighted gradient over that without a correction."""
    arms = ["correction=none,name=none", f"correction={remedy['correction']}:{remedy['correction_cap']},name=remedy"]
    found = gradient(trace, steps="all", against=arms, micro_batches=0, loss=_EXACT)
    apart = {
        arm: np.mean([1 - (step.whole.cosine or 0.0) for step in found.steps if step.arm == arm])
        for arm in ("none", "remedy")
    }
    return float(1.0 - apart["remedy"] / apart["none"])


def by_corrections(trace: str, remedy: dict[str, object]) -> float:
    """The share of tokens whose weight is not 0."""
    kind, cap = remedy["correction"], remedy["correction_cap"]
    if kind == "token_truncate":
        return 1.0
    d = "d" if kind == "token_mask" else "sum(d) OVER (PARTITION BY step, seq_id)"
    query = f"SELECT avg((exp(least(x, 50)) <= {cap})::INTEGER) FROM (SELECT {d} AS x FROM pair('train', 'rollout') WHERE mask)"
    return float(connect(trace).execute(query).fetchone()[0])


def distortion(found) -> float:
    """Sum |b| over sum |f*| of a run."""
    return float(found.figures["relative_abs_bias"].value)


def rescues_of(job: tuple[Truth, Path, Path]) -> list[Rescue]:
    """What each remedy did for a broken run, and what its trace had foretold."""
    truth, output, models = job
    weighed = output / f"{truth.folder.name}-weights"
    _performed(plan_of(truth, {}), weighed, models, weights_every=_WEIGHTS_EVERY)
    sound = last_fifth(json.loads((truth.twin / "plan.json").read_text()))
    found = []
    for remedy, changes in REMEDIES.items():
        plan = plan_of(truth, changes)
        corrects = "correction" in changes
        found.append(
            Rescue(
                run=truth.folder.name,
                cause=truth.cause,
                remedy=remedy,
                broken=last_fifth(truth.plan),
                sound=sound,
                remedied=last_fifth(_performed(plan, output / plan.name, models)),
                by_objective=by_objective(truth.trace, changes) if corrects else None,
                by_gradient=by_gradient(str(weighed / "trace"), changes) if corrects else None,
                by_corrections=by_corrections(truth.trace, changes) if corrects else None,
            )
        )
    return found


def _performed(plan: Plan, folder: Path, models: Path, weights_every: int = 0) -> dict:
    """A run's plan.json; made now unless it is there."""
    if not (folder / "plan.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        perform(plan, folder, models, weights_every)
    return json.loads((folder / "plan.json").read_text())


def plan_of(truth: Truth, changes: dict[str, object]) -> Plan:
    """The plan of a run, with other switches."""
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
    for name in ("by_objective", "by_gradient", "by_corrections"):
        known = [each for each in rescues if getattr(each, name) is not None and np.isfinite(getattr(each, name))]
        if len(known) > 2:
            x, y = np.array([[getattr(each, name), each.rescue] for each in known]).T
            ranks = [np.argsort(np.argsort(values)) for values in (x, y)]
            print(f"{name} and rescue over {len(known)} corrected runs: Pearson {np.corrcoef(x, y)[0, 1]:.2f}, "
                  f"Spearman {np.corrcoef(*ranks)[0, 1]:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
