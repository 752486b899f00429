"""Generate a laboratory's runs with their healthy twins, and tell which collapsed as meant.

python benchmarks/collapse/make.py recurrent -o runs/laboratories/recurrent           # a GRU in numpy, 4 minutes
python benchmarks/collapse/make.py transformer -o runs/collapse/tuning                # half an hour on two cores
python benchmarks/collapse/left_out.py facts runs/laboratories/* -o facts.parquet     # then fit or score `attribute`

Each run is a folder with `trace` (recorded through the public API), `label.json` (cause, twin) and `plan.json`
(evaluations by the true reward). Existing runs are kept. A laboratory is a module with `members(split, seeds)`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

LABORATORIES = {"transformer": "causes", "recurrent": "recurrent"}


def main() -> None:
    """Make runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("laboratory", choices=LABORATORIES)
    parser.add_argument("--split", default="tuning", help="tuning or heldout (transformer)")
    parser.add_argument("--seeds", type=int, help="number of seeds")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these causes or runs alone, and their twins")
    parser.add_argument("--models", type=Path, default=Path("runs/collapse/models"))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    found = importlib.import_module(LABORATORIES[given.laboratory]).members(given.split, given.seeds)
    wanted = [one for one in found if not given.only or {one.name, one.label["cause"]} & set(given.only)]
    twins = {one.label["twin"] for one in wanted}
    jobs = [(one, given.output, given.models) for one in found if one in wanted or one.name in twins]
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for number, line in enumerate(pool.imap_unordered(_make, jobs), 1):
            print(f"{number}/{len(jobs)} {line}", flush=True)
    _print_outcomes(given.output)


def _make(job) -> str:
    member, output, models = job
    folder = output / member.name
    if (folder / "label.json").exists():
        return f"{member.name}: there already"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()
    member.perform(folder, models)
    (folder / "label.json").write_text(json.dumps(member.label))
    return f"{member.name}: {time.monotonic() - began:.0f} s"


def _print_outcomes(output: Path) -> None:
    from truth import SOUND, truths

    for one in truths(output):
        as_meant = one.expected == ("none" if one.cause in SOUND else one.cause)
        print(f"{one.folder.name:56} {one.cause:16} keeps {one.kept:.3f}  {'as meant' if as_meant else 'NOT AS MEANT'}")


if __name__ == "__main__":
    main()
