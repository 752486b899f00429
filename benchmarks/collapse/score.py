"""Score `tim-trace attribute` on the suite's runs, whose causes are known.

python benchmarks/collapse/score.py runs/collapse/heldout [--json FILE]

A switch is a cause if its run collapsed and the twin without it did not. Runs that dropped by between a twentieth and a
tenth, and runs whose twin also collapsed, are left out and counted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tim_trace.analysis.attribution.attribute import attribute
from truth import Truth, truths

NOTHING = "none"


def answer(truth: Truth, *, with_control: bool) -> str:
    """Return the named suspect: `none` if no collapse is detected, `open` if no suspect is named."""
    control = str(truth.twin / "trace") if with_control and truth.twin != truth.folder else None
    found = attribute(truth.trace, control=control)
    if found.fall is None:
        return NOTHING
    return found.cause or "open"


def scored(found: Sequence[Truth], *, with_control: bool) -> dict[str, object]:
    """Return the answers by expected suspect, and the share that is right."""
    judged = [truth for truth in found if truth.expected is not None]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        said = pool.map(partial(answer, with_control=with_control), judged, chunksize=1)
    answers = list(zip(judged, said, strict=True))
    fallen = [(truth, said) for truth, said in answers if truth.expected != NOTHING]
    sound = [(truth, said) for truth, said in answers if truth.expected == NOTHING]
    return {
        "num_fallen": len(fallen),
        "right": sum(truth.expected == said for truth, said in fallen),
        "seen": sum(said != NOTHING for _, said in fallen),
        "num_sound": len(sound),
        "called_fallen": sum(said != NOTHING for _, said in sound),
        "confusion": {
            cause: dict(Counter(said for truth, said in answers if _row(truth) == cause))
            for cause in sorted({_row(truth) for truth, _ in answers})
        },
        "wrong": [
            f"{truth.folder.name}: {truth.expected}, said {said}" for truth, said in answers if truth.expected != said
        ],
        "left_out": len(found) - len(judged),
    }


def _row(truth: Truth) -> str:
    return f"{truth.cause} (held)" if truth.expected == NOTHING else truth.cause


def _print(title: str, figures: dict) -> None:
    print(f"{title}: {figures['right']} of {figures['num_fallen']} causes right; "
          f"{figures['called_fallen']} of {figures['num_sound']} healthy runs called collapsed; "
          f"{figures['left_out']} runs left out")  # fmt: skip
    for cause, answers in figures["confusion"].items():
        print(f"  {cause:<24}" + ", ".join(f"{said} {count}" for said, count in sorted(answers.items())))
    for line in figures["wrong"]:
        print(f"    wrong: {line}")


def main() -> None:
    """Score folders of runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found = [truth for folder in given.folder for truth in truths(folder)]
    figures = {
        "without a control": scored(found, with_control=False),
        "with a control": scored(found, with_control=True),
    }
    for title, each in figures.items():
        _print(title, each)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
