"""Hold `tim-trace attribute` against laboratories that differ, each scored with what was set on the others.

python benchmarks/laboratories/left_out.py runs/laboratories/a runs/laboratories/b runs/laboratories/c

A folder of runs has NAME/trace, NAME/label.json (cause, twin) and NAME/plan.json (evaluations by the true reward). A run counts
as fallen where the last fifth of its evaluations is below 0.9 of the best fifth and its twin's is above 0.95; what lies between
is left out. Of a cause `other` the right answer is that it cannot be told. A cause
that is named without a fall (`silent`: what is rewarded or sampled became another one) counts as said, and is counted apart. Two numbers are set on the other folders, by least
logarithmic loss: what a point of evidence is worth, and how many points "something else" begins with.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy.optimize import minimize
from tim_trace.analysis import attribute
from tim_trace.analysis.attribution.thresholds import WORTH

FELL, HELD = 0.9, 0.95
SOUND = ("sound", "harmless")
CONFIDENT = 0.6
BANDS = (0.0, 0.5, 0.7, 0.9, 1.01)


@dataclass(frozen=True)
class Answer:
    """What was said of a run, and what is true."""

    name: str
    cause: str
    """The label: a suspect, `other`, or one of SOUND."""
    points: dict[str, float] | None
    """Suspect -> points; None where no fall was seen and nothing that hides one."""
    is_silent: bool = False
    """Whether a cause is named though no fall is seen."""

    def probabilities(self, worth: float = 1.0, unknown: float = 0.0) -> dict[str, float]:
        """Suspect -> probability, with another worth of a point and other points of `unknown`."""
        scaled = {name: worth * value + unknown * (name == "unknown") for name, value in (self.points or {}).items()}
        highest = max(scaled.values())
        odds = {name: math.exp(value - highest) for name, value in scaled.items()}
        return {name: value / sum(odds.values()) for name, value in odds.items()}


def share_kept(evaluations):
    """The last fifth's mean over the best fifth's, above the lowest value where rewards are negative."""
    values = np.asarray(evaluations, float)
    width = max(len(values) // 5, 1)
    means = np.convolve(values, np.ones(width) / width, mode="valid")
    floor = min(float(values.min()), 0.0)
    return float((means[-1] - floor) / max(means.max() - floor, 1e-12))


def answers(folder, *, with_control):
    """The answers over a laboratory's runs; runs that neither fell nor held are left out."""
    found, left_out = [], 0
    for label_file in sorted(folder.glob("*/label.json")):
        run = label_file.parent
        label = json.loads(label_file.read_text())
        kept, of_twin = (
            share_kept(json.loads((folder / name / "plan.json").read_text())["evaluations"])
            for name in (run.name, label["twin"])
        )
        is_sound = label["cause"] in SOUND
        if (is_sound and kept < HELD) or (not is_sound and (kept > FELL or of_twin < HELD)):
            left_out += 1
            continue
        control = str(folder / label["twin"] / "trace") if with_control and label["twin"] != run.name else None
        result = attribute(str(run / "trace"), control=control)
        suspects = result.silent.suspects if result.silent else result.suspects
        points = {suspect.code: suspect.points for suspect in suspects} or None
        found.append(Answer(run.name, label["cause"], points, is_silent=result.silent is not None))
    return found, left_out


def fitted(found):
    """Worth of a point and points of `unknown` with the least logarithmic loss."""
    known = [each for each in found if each.points is not None and each.cause not in SOUND]

    def loss(values):
        total = 0.0
        for each in known:
            truth = "unknown" if each.cause == "other" else each.cause
            total -= math.log(max(each.probabilities(*values).get(truth, 0.0), 1e-9))
        return total / max(len(known), 1)

    return tuple(minimize(loss, (0.7, 1.0), method="Nelder-Mead").x)


def said(answer, worth, unknown):
    """The suspect that is named and its probability; `none` without a fall, `open` where none is named."""
    if answer.points is None:
        return "none", 1.0
    code, probability = max(answer.probabilities(worth, unknown).items(), key=lambda item: item[1])
    return ("open" if code == "unknown" or probability <= 0.5 else code), probability


def report(title, found, worth, unknown):
    """Print one laboratory's figures and return its named answers with their probabilities."""
    rows = [(each, *said(each, worth, unknown)) for each in found]
    suspects = [row for row in rows if row[0].cause not in (*SOUND, "other")]
    others = [row for row in rows if row[0].cause == "other"]
    sound = [row for row in rows if row[0].cause in SOUND]
    confident = sum(name not in ("open", "none") and p >= CONFIDENT for _, name, p in others)
    print(
        f"{title}: {sum(e.cause == name for e, name, _ in suspects)} of {len(suspects)} causes right, "
        f"{sum(e.is_silent and e.cause == name for e, name, _ in suspects)} of them without a fall, "
        f"{sum(name == 'none' for _, name, _ in suspects)} not seen; of {len(others)} other causes {confident} got a confident wrong "
        f"name; {sum(name != 'none' for _, name, _ in sound)} of {len(sound)} sound runs alarmed "
        f"(worth {worth:.2f}, unknown {unknown:+.2f})"
    )
    for each, name, p in rows:
        expected = "none" if each.cause in SOUND else "open" if each.cause == "other" else each.cause
        if name != expected:
            print(f"    {each.name}: {each.cause}, said {name} ({p:.0%})")
    return [(each.cause == name, p) for each, name, p in rows if name not in ("open", "none")]


def main():
    """Score every folder with what the others set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument(
        "--as-it-is", action="store_true", help="with the points of the code, nothing set on any folder"
    )
    given = parser.parse_args()
    for with_control in (False, True):
        print("beside a control" if with_control else "without a control")
        found = {folder: answers(folder, with_control=with_control) for folder in given.folder}
        named = []
        for folder, (of_folder, left_out) in found.items():
            rest = [answer for other in found if other != folder for answer in found[other][0]]
            worth, unknown = (WORTH, 0.0) if given.as_it_is else fitted(rest)
            named += report(f"  {folder.name} ({left_out} left out)", of_folder, worth, unknown)
        for low, high in pairwise(BANDS):
            band = [(is_right, p) for is_right, p in named if low <= p < high]
            on_average = f" ({np.mean([p for _, p in band]):.0%} on average)" if band else ""
            right = sum(is_right for is_right, _ in band)
            print(f"  of {len(band)} named at {low:.0%} to {min(high, 1):.0%}{on_average} {right} are right")


if __name__ == "__main__":
    main()
