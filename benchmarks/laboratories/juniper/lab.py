"""A laboratory of small RL runs over strings and numbers: ten families, one fault switched on a run.

    python benchmarks/laboratories/juniper/lab.py -o FOLDER [--only NAME ...]

writes FOLDER/NAME/trace, label.json and plan.json for each run, and prints what share of its best reward the run kept,
and whether that is as meant. A NAME is that of a run, a part of it, or a cause; sound twins are runs like others, and are
made only where they are chosen. Finished runs are kept. With --list the chosen runs are printed and none is made.

A family (families.py) has a task, a policy, an algorithm, names for what it logs, and a choice of what it records. Its
policies start from supervised weights, which are kept in FOLDER/.cache. A fault (faults.py) is called by the training
loop (core.py) at each step from its first one on; before that a run is bit for bit its twin.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import shutil
import traceback
from pathlib import Path

import numpy as np
from core import kept, run
from families import FAMILIES
from faults import RUNS


def make(d, out):
    """Makes a run in its folder of `out`: its evaluations and seconds, or None where it is finished."""
    folder = out / d["name"]
    if (folder / "label.json").exists():
        return None
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    f = FAMILIES[d["fam"]]
    ev, sec = run(
        f, d["seed"], d["fault"], d["start"], d["ramp"], folder / "trace", out / ".cache", changes=d["changes"]
    )
    (folder / "plan.json").write_text(
        json.dumps({"evaluations": ev, "every": f["eval_every"], "seconds": round(sec, 1)})
    )
    first = None if d["cause"] in ("sound", "harmless") else d["start"]
    (folder / "label.json").write_text(
        json.dumps(
            {"cause": d["cause"], "detail": d["detail"], "twin": f"{d['fam']}-{d['seed']}-sound", "first_step": first}
        )
    )
    return ev, sec


def main():
    """Makes or lists the runs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="folder of the runs; finished runs in it are kept")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="make these runs alone")
    parser.add_argument("--list", action="store_true", help="print name, cause and detail of the runs, and make none")
    options = parser.parse_args()
    if not options.list and options.output is None:
        parser.error("-o FOLDER is needed, except with --list")
    for d in RUNS:
        if options.only and not any(word in d["name"] or word == d["cause"] for word in options.only):
            continue
        if options.list:
            print(d["name"], d["cause"], d["detail"])
            continue
        try:
            made = make(d, options.output)
        except Exception:
            print("ERROR", d["name"])
            traceback.print_exc(limit=-3)
            continue
        if made is None:
            continue
        ev, sec = made
        x = [round(float(q.mean()), 3) for q in np.array_split(np.array(ev), 8)]
        k = kept(ev)
        good = (k >= 0.95) if d["cause"] in ("sound", "harmless") else k < 0.9
        print(
            f"{'ok ' if good else 'NO '} {d['name']:34s} {d['cause']:11s} kept {k:.3f} {sec:.1f}s  {x}",
            flush=True,
        )


if __name__ == "__main__":
    main()
