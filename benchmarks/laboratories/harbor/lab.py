"""A laboratory of small RL runs over strings and numbers: twelve teams, one fault switched on a run.

    python benchmarks/laboratories/harbor/lab.py -o FOLDER [--only NAME ...]

writes FOLDER/NAME/trace, label.json and plan.json for each run, and prints which runs fell. A NAME is that of a run, a part of
it, or a cause; the sound twins of the chosen runs are made too, and finished runs are kept. A team (families.py) has a task
(tasks.py), a policy (models.py), an algorithm, names for what it logs, and a choice of what it records. Its policies start from
supervised weights, which are kept in FOLDER/.cache. A fault (faults.py) is a set of hooks in the training loop (loop.py);
before its first step a run is bit for bit its twin.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from families import FAMILIES
from faults import RUNS
from loop import Run, judge

CAUSES = [
    "mismatch",
    "staleness",
    "optimizer",
    "reward",
    "pairing",
    "data",
    "truncation",
    "reference",
    "advantages",
    "entropy",
    "length",
    "other",
    "sound",
    "harmless",
]


def plan():
    sound = [
        dict(
            name=f"{family}-sound-{seed}",
            cause="sound",
            family=family,
            seed=seed,
            t0=None,
            detail=f"sound run of team {family}",
            hooks={},
        )
        for family in FAMILIES
        for seed in (0, 1)
    ]
    return sound + RUNS


def twin_of(run):
    return f"{run['family']}-sound-{run['seed']}"


def make(run, folder):
    out = folder / run["name"]
    if (out / "label.json").exists():
        return False
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    started = time.time()
    done = Run(FAMILIES[run["family"]], run["seed"], run["hooks"], trace=out / "trace", cache=folder / ".cache").go()
    seconds = round(time.time() - started, 1)
    (out / "plan.json").write_text(
        json.dumps({"evaluations": done.evaluations, "steps": done.eval_steps, "seconds": seconds})
    )
    (out / "label.json").write_text(
        json.dumps({"cause": run["cause"], "detail": run["detail"], "twin": twin_of(run), "first_step": run["t0"]})
    )
    return True


def state(run, folder):
    """What share a finished run kept, whether that is as meant, and its seconds; None of others."""
    out, twin = folder / run["name"], folder / twin_of(run)
    if not (out / "label.json").exists() or not (twin / "label.json").exists():
        return None
    own, its = (json.loads((place / "plan.json").read_text()) for place in (out, twin))
    kept, twin_kept = judge(own["evaluations"]), judge(its["evaluations"])
    meant = kept > 0.95 if run["cause"] in ("sound", "harmless") else kept < 0.9 and twin_kept > 0.95
    return kept, meant, own["seconds"]


def print_table(folder):
    total, number = 0.0, 0
    print(f"{'cause':12s} runs  fallen (sound, harmless: kept 0.95)")
    for cause in CAUSES:
        found = [(run, state(run, folder)) for run in plan() if run["cause"] == cause]
        found = [(run, s) for run, s in found if s]
        total, number = total + sum(s[2] for _, s in found), number + len(found)
        others = " ".join(f"NOT {run['name']} ({s[0]:.2f})" for run, s in found if not s[1])
        print(f"{cause:12s} {len(found):4d}  {sum(s[1] for _, s in found):4d}   {others}")
    print(f"{number} runs, {total:.0f} s")


def main():
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the runs; runs in it are kept")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="make these runs and their twins alone")
    options = parser.parse_args()
    known = plan()
    names = {run["name"] for run in known} | set(CAUSES)

    def wanted(run):
        return not options.only or any(
            word in (run["name"], run["cause"]) or (word not in names and word in run["name"]) for word in options.only
        )

    chosen = [run for run in known if wanted(run)]
    twins = {twin_of(run) for run in chosen}
    for run in [run for run in known if run["name"] in twins and run not in chosen] + chosen:
        started = time.time()
        if make(run, options.output):
            found = state(run, options.output)
            kept, verdict = (found[0], "ok" if found[1] else "NO") if found else (0.0, "NO")
            seconds = time.time() - started
            print(f"{run['cause']:10s} {run['name']:20s} {verdict:3s} {kept:.3f} {seconds:5.1f} s", flush=True)
    print_table(options.output)


if __name__ == "__main__":
    main()
