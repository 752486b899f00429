"""Hold `tim-trace attribute` against laboratories that differ, each scored with what was set on the others.

python benchmarks/laboratories/left_out.py runs/laboratories/a runs/laboratories/b runs/laboratories/c

A folder of runs has NAME/trace, NAME/label.json (cause, twin) and NAME/plan.json (evaluations by the true reward). A run counts
as fallen where the last fifth of its evaluations is below 0.9 of the best fifth and its twin's is above 0.95; what lies between
is left out. Of a cause `other` the right answer is that it cannot be told. A cause that is named without a fall counts as said, and is
counted apart: `silent`, where what is rewarded or sampled became another one, and `supposed`, in case that the run does worse all the
same. Of a sound run the second is no alarm.

What a kind of evidence counts, as a factor of its points, and what a suspect begins with are set on the other folders by least
logarithmic loss; factors are held near 1 where few of their falls have the evidence. `--factors` prints both of all folders together, as
analysis/attribution/odds.py and thresholds.py have them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy.optimize import minimize
from tim_trace.analysis import attribute
from tim_trace.analysis.attribution.attribution import MIN_PROBABILITY_OF_SUSPECT
from tim_trace.analysis.attribution.odds import FACTORS, kind_of
from tim_trace.analysis.attribution.suspect import SUSPECTS
from tim_trace.analysis.attribution.thresholds import WORTH, WORTH_BESIDE

FELL, HELD = 0.9, 0.95
SOUND = ("sound", "harmless")
CONFIDENT = 0.6
BANDS = (0.0, 0.5, 0.7, 0.9, 1.01)
FEWEST_FALLS, FEWEST_FOLDERS = 8, 3
"""That have a kind of evidence, for its factor to be set."""
BEGINS = 3.0
"""The most points that a suspect begins with, or the fewest below 0."""
MOST = 3.0
"""The largest factor; the least is 0, so that evidence for a suspect never speaks against it."""
HELD_NEAR_1 = 1.0
"""Weight of the squared distances of the factors from 1, beside the summed loss of the falls."""
HELD_NEAR_0 = 0.3
"""The same of the points that suspects begin with, from 0."""


@dataclass(frozen=True)
class Answer:
    """What was said of a run, and what is true."""

    name: str
    cause: str
    """The label: a suspect, `other`, or one of SOUND."""
    evidence: dict[str, dict[str, float]] | None
    """Suspect -> kind of evidence -> points; None where no fall was seen and nothing that hides one."""
    is_silent: bool = False
    """Whether a cause is named though no fall is seen."""
    is_supposed: bool = False
    """Whether one is only in case that the run does worse all the same."""
    is_alone: bool = True
    """Whether no control was given."""

    @property
    def worth(self) -> float:
        """What a point of its evidence counts."""
        return WORTH if self.is_alone else WORTH_BESIDE

    def probabilities(self, factors: dict[str, float]) -> dict[str, float]:
        """Suspect -> probability, with factors of the evidence of a fall, and what suspects begin with."""
        used = {} if self.is_silent else factors
        points = {
            name: self.worth
            * (used.get(name, 0.0) + sum(used.get(kind_of(name, code), 1.0) * each for code, each in found.items()))
            for name, found in (self.evidence or {}).items()
        }
        highest = max(points.values())
        odds = {name: math.exp(value - highest) for name, value in points.items()}
        return {name: value / sum(odds.values()) for name, value in odds.items()}

    def first(self, factors: dict[str, float]) -> tuple[str, float]:
        """The first of the list and its probability; `none` where nothing is said."""
        if self.evidence is None:
            return "none", 1.0
        return max(self.probabilities(factors).items(), key=lambda item: item[1])

    def first_suspect(self, factors: dict[str, float]) -> str:
        """The first of the list that has a name, as the answer gives it whether it is sure or not; `none` where there is none."""
        found = self.probabilities(factors).items() if self.evidence else ()
        named = {name: value for name, value in found if name != "unknown" and value >= MIN_PROBABILITY_OF_SUSPECT}
        return max(named, key=named.__getitem__, default="none")


def share_kept(evaluations):
    """The last fifth's mean over the best fifth's, above the lowest value where rewards are negative."""
    values = np.asarray(evaluations, float)
    width = max(len(values) // 5, 1)
    means = np.convolve(values, np.ones(width) / width, mode="valid")
    floor = min(float(values.min()), 0.0)
    return float((means[-1] - floor) / max(means.max() - floor, 1e-12))


def answers(folder, *, with_control, with_priors):
    """The answers over a laboratory's runs; runs that neither fell nor held are left out.

    Without priors suspects begin with nothing, so that what they begin with can be set.
    """
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
        told = result.silent or result.supposed
        suspects = told.suspects if told else result.suspects
        evidence: dict[str, dict[str, float]] = {}
        for suspect in suspects:
            kinds = evidence.setdefault(suspect.code, {})
            for each in suspect.evidence:
                if each.code != "prior" or with_priors or result.silent:
                    kinds[each.code] = kinds.get(each.code, 0.0) + each.points
        found.append(
            Answer(
                run.name, label["cause"], evidence or None, is_silent=result.silent is not None,
                is_supposed=result.supposed is not None, is_alone=not with_control,
            )
        )  # fmt: skip
    return found, left_out


def fitted(folders):
    """SUSPECT.CODE of evidence -> its factor, and SUSPECT -> the points that it begins with, with the least logarithmic loss over some folders' answers."""
    known = [
        (place, each) for place, found in enumerate(folders) for each in found
        if each.evidence is not None and not each.is_silent and each.cause not in SOUND
    ]  # fmt: skip
    places, falls = defaultdict(set), defaultdict(int)
    for place, each in known:
        for suspect, kinds in each.evidence.items():
            for code, points in kinds.items():
                if points and each.is_alone:
                    places[kind_of(suspect, code)].add(place)
                    falls[kind_of(suspect, code)] += 1
    kinds = sorted(kind for kind in falls if falls[kind] >= FEWEST_FALLS and len(places[kind]) >= FEWEST_FOLDERS)
    if not kinds:
        return {}
    column = {kind: number for number, kind in enumerate(kinds)}
    names = sorted({suspect for _, each in known for suspect in each.evidence})
    tables = []
    for _, each in known:
        suspects = list(each.evidence)
        table, rest = np.zeros((len(suspects), len(kinds))), np.zeros(len(suspects))
        for row, suspect in enumerate(suspects):
            for code, points in each.evidence[suspect].items():
                if (number := column.get(kind_of(suspect, code))) is None:
                    rest[row] += points
                else:
                    table[row, number] += points
        begins = [names.index(suspect) for suspect in suspects]
        tables.append(
            (each.worth, table, rest, begins, suspects.index("unknown" if each.cause == "other" else each.cause))
        )

    def loss(given):
        factors, added = given[: len(kinds)], given[len(kinds) :]
        total = HELD_NEAR_1 * ((factors - 1) ** 2).sum() + HELD_NEAR_0 * (added**2).sum()
        slope = np.r_[2 * HELD_NEAR_1 * (factors - 1), 2 * HELD_NEAR_0 * added]
        for worth, table, rest, begins, truth in tables:
            points = worth * (rest + table @ factors + added[begins])
            odds = np.exp(points - points.max())
            odds /= odds.sum()
            total -= math.log(max(odds[truth], 1e-12))
            odds[truth] -= 1
            slope[: len(kinds)] += worth * (odds @ table)
            np.add.at(slope, len(kinds) + np.array(begins), worth * odds)
        return total, slope

    begin = np.r_[np.ones(len(kinds)), np.zeros(len(names))]
    bounds = [(0, MOST)] * len(kinds) + [(-BEGINS, BEGINS)] * len(names)
    found = minimize(loss, begin, jac=True, method="L-BFGS-B", bounds=bounds)
    return dict(zip([*kinds, *names], found.x.tolist(), strict=True))


def said(answer, factors):
    """The suspect that is named and its probability; `none` without a fall, `open` where none is named."""
    code, probability = answer.first(factors)
    if code == "none" or (answer.is_supposed and answer.cause in SOUND):
        return "none", 1.0
    return ("open" if code == "unknown" or probability <= 0.5 else code), probability


def report(title, found, factors):
    """Print one laboratory's figures and return its named answers with their probabilities."""
    rows = [(each, *said(each, factors)) for each in found]
    suspects = [row for row in rows if row[0].cause not in (*SOUND, "other")]
    others = [row for row in rows if row[0].cause == "other"]
    sound = [row for row in rows if row[0].cause in SOUND]
    confident = sum(name not in ("open", "none") and p >= CONFIDENT for _, name, p in others)
    print(
        f"{title}: {sum(e.cause == name for e, name, _ in suspects)} of {len(suspects)} causes right, "
        f"{sum(e.first_suspect(factors) == e.cause for e, *_ in suspects)} the first suspect, "
        f"{sum((e.is_silent or e.is_supposed) and e.cause == name for e, name, _ in suspects)} of them without a fall, "
        f"{sum(name == 'none' for _, name, _ in suspects)} not seen; of {len(others)} other causes {confident} got a confident wrong "
        f"name; {sum(name != 'none' for _, name, _ in sound)} of {len(sound)} sound runs alarmed"
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
    parser.add_argument("--as-it-is", action="store_true", help="with the factors of the code, none set on any folder")
    parser.add_argument("--factors", action="store_true", help="print the factors that all folders together set")
    given = parser.parse_args()
    num_needed = FEWEST_FOLDERS + (not given.factors)
    if not given.as_it_is and len(given.folder) < num_needed:
        parser.error(f"factors need at least {num_needed} folders; or score these with --as-it-is")
    if not given.as_it_is:
        FACTORS.clear()
    found = {
        with_control: {
            folder: answers(folder, with_control=with_control, with_priors=given.as_it_is) for folder in given.folder
        }
        for with_control in (False, True)
    }
    of_folders = {folder: found[False][folder][0] + found[True][folder][0] for folder in given.folder}
    if given.factors:
        for kind, factor in fitted(list(of_folders.values())).items():
            if kind in SUSPECTS:
                print(f"what {kind} begins with: {factor:+.1f}")
            elif round(factor, 1) != 1.0:
                print(f'    "{kind}": {factor:.1f},')
        return
    for with_control, by_folder in found.items():
        print("beside a control" if with_control else "without a control")
        named = []
        for folder, (of_folder, left_out) in by_folder.items():
            rest = [of_other for other, of_other in of_folders.items() if other != folder]
            factors = {} if given.as_it_is else fitted(rest)
            named += report(f"  {folder.name} ({left_out} left out)", of_folder, factors)
        for low, high in pairwise(BANDS):
            band = [(is_right, p) for is_right, p in named if low <= p < high]
            on_average = f" ({np.mean([p for _, p in band]):.0%} on average)" if band else ""
            right = sum(is_right for is_right, _ in band)
            print(f"  of {len(band)} named at {low:.0%} to {min(high, 1):.0%}{on_average} {right} are right")


if __name__ == "__main__":
    main()
