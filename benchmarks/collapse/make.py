"""Generate the runs of the collapse suite, with their twins.

python benchmarks/collapse/make.py --split tuning -o runs/collapse/tuning     # about half an hour on two cores
python benchmarks/collapse/score.py runs/collapse/tuning

Each run is a folder with `trace` (recorded through the public API) and `plan.json` (its switches, and evaluations by the
true reward). Existing runs are kept.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"


def main() -> None:
    """Make a split."""
    from causes import CAUSES, SPLITS, members

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", choices=tuple(SPLITS), default="tuning")
    parser.add_argument("--seeds", type=int, default=4, help="seeds of each cause")
    parser.add_argument("--first-seed", type=int, help="instead of the split's own")
    parser.add_argument("--steps", type=int, help="instead of the split's own")
    parser.add_argument("--cause", action="append", choices=("sound", *CAUSES), help="these alone, and their twins")
    parser.add_argument("--models", type=Path, default=Path("runs/collapse/models"))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    split = SPLITS[given.split]
    for name in ("first_seed", "steps"):
        if getattr(given, name) is not None:
            split = _replaced(split, name, getattr(given, name))
    wanted = [
        member for member in members(split, given.seeds) if not given.cause or member.cause in (*given.cause, "sound")
    ]
    jobs = [(member, given.output, given.models) for member in wanted]
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for number, line in enumerate(pool.imap_unordered(_make, jobs), 1):
            print(f"{number}/{len(jobs)} {line}", flush=True)


def _replaced(split, name, value):
    from dataclasses import replace

    return replace(split, **{name: value})


def _make(job) -> str:
    import torch
    from laboratory import perform

    member, output, models = job
    folder = output / member.plan.name
    if (folder / "label.json").exists():
        return f"{member.plan.name}: there already"
    torch.set_num_threads(1)
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    evaluations = perform(member.plan, folder, models)
    (folder / "label.json").write_text(json.dumps({"cause": member.cause, "twin": member.twin}))
    words = " ".join(f"{value:.2f}" for value in evaluations)
    return f"{member.plan.name}: {time.monotonic() - began:.0f} s, {words}"


if __name__ == "__main__":
    main()
