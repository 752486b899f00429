"""A laboratory of small RL runs over symbols, sums, walks and tools: twelve families, one fault switched on a run.

    python benchmarks/laboratories/granite/lab.py -o FOLDER [--only NAME ...]

writes FOLDER/NAME/trace, label.json and plan.json for each run, and prints what share of its best reward the run kept,
and whether that is as meant. A NAME is that of a run, a part of it, or a cause; sound twins are runs like others, and
are made only where they are chosen. Finished runs are kept. With --list the chosen runs are printed and none is made.

A family (families.py) has a task, a policy, an algorithm, names for what it logs, and a choice of what it records. Its
policies start from supervised weights, which are kept in FOLDER/.cache. A fault (faults.py) is settings and hooks of
the training loop (core.py) from its first step on; before that a run is bit for bit its twin.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import shutil
import time
import traceback
from pathlib import Path

import numpy as np
from core import Run, kept
from families import FAMILIES
from faults import RUNS


def make(fault, output):
    """Makes a run in its folder of `output`: its evaluations and seconds, or None where it is finished."""
    folder = output / fault.name
    if (folder / "label.json").exists():
        return None
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    started = time.time()
    evaluations = Run(FAMILIES[fault.family], fault, folder / "trace", output / ".cache").go()
    (folder / "plan.json").write_text(json.dumps({"evaluations": evaluations}))
    label = {
        "cause": fault.cause,
        "detail": fault.detail,
        "twin": f"{fault.family}-sound-{fault.seed}",
        "first_step": None if fault.cause == "sound" else fault.start,
    }
    (folder / "label.json").write_text(json.dumps(label))
    return evaluations, time.time() - started


def main():
    """Makes or lists the runs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="folder of the runs; finished runs in it are kept")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="make these runs alone")
    parser.add_argument("--list", action="store_true", help="print name, cause and detail of the runs, and make none")
    options = parser.parse_args()
    if not options.list and options.output is None:
        parser.error("-o FOLDER is needed, except with --list")
    for fault in RUNS:
        if options.only and not any(word in fault.name or word == fault.cause for word in options.only):
            continue
        if options.list:
            print(fault.name, fault.cause, fault.detail)
            continue
        try:
            made = make(fault, options.output)
        except Exception:
            print("ERROR", fault.name)
            traceback.print_exc(limit=-3)
            continue
        if made is None:
            continue
        evaluations, seconds = made
        levels = [round(float(part.mean()), 3) for part in np.array_split(np.array(evaluations), 8)]
        share = kept(evaluations)
        good = (share >= 0.95) if fault.cause in ("sound", "harmless") else share < 0.9
        print(
            f"{'ok ' if good else 'NO '} {fault.name:34s} {fault.cause:11s} kept {share:.3f} {seconds:.1f}s  {levels}",
            flush=True,
        )


if __name__ == "__main__":
    main()
