"""Run the benchmarks and print them as ratios measured side by side.

python benchmarks/run.py                  # all, about 30 minutes on 2 cores
python benchmarks/run.py writing startup  # some
"""

import argparse
import os
import platform
import sys

import demo
import gradients
import importing
import integrity
import judging
import likeness
import memory
import objectives
import packing
import querying
import replaying
import reports
import scoring
import startup
import transfers
import watching
import weights
import writing

BENCHMARKS = {
    "writing": writing.compare,
    "integrity": integrity.compare,
    "importing": importing.compare,
    "querying": querying.compare,
    "likeness": likeness.compare,
    "judging": judging.compare,
    "objectives": objectives.compare,
    "reports": reports.compare,
    "watching": watching.compare,
    "replaying": replaying.compare,
    "gradients": gradients.compare,
    "packing": packing.compare,
    "scoring": scoring.compare,
    "memory": memory.compare,
    "weights": weights.compare,
    "transfers": transfers.compare,
    "startup": startup.compare,
    "demo": demo.compare,
}
"""By name, functions that measure and yield each comparison as soon as it is known."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    names = parser.parse_args().names or list(BENCHMARKS)
    if unknown := set(names) - set(BENCHMARKS):
        sys.exit(f"unknown benchmark {', '.join(sorted(unknown))}; choose from {', '.join(BENCHMARKS)}")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {platform.system()}")
    for name in names:
        print(f"\n{name}: {BENCHMARKS[name].__doc__.splitlines()[0]}", flush=True)
        for comparison in BENCHMARKS[name]():
            print(f"  {comparison}", flush=True)


if __name__ == "__main__":
    main()
