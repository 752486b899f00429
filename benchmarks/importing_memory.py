"""Measure the memory of an import by dump size: whether it streams, and what importing the grown dump again takes.

python benchmarks/importing_memory.py                        # dumps of 1 and 4 GB of each format
python benchmarks/importing_memory.py slime --gigabytes 1 8  # one format, other sizes
python benchmarks/importing_memory.py verl --gigabytes 50    # the trace takes 12 GB

A dump has steps of 256 sequences, each step in its own files. It is stored in the folder for temporary files (TMPDIR)
and takes little space, because its files are hard links to those of four steps. Imports run in a process limited to 2
GB of data (RLIMIT_DATA). After the first import, the dump grows by three steps and is imported again, which must add
only these steps.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from peak import peak_megabytes
from tim_trace.tracer.importers.import_dump import import_dump

FORMATS = ("prime-rl", "slime", "verl")
MAX_DATA = 2 << 30
ROWS, MADE_STEPS, MORE_STEPS = 256, 4, 3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=f"of {', '.join(FORMATS)}")
    parser.add_argument("--gigabytes", nargs="+", type=float, default=[1.0, 4.0], metavar="GB")
    parser.add_argument("--import", dest="dump", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.dump:
        _import(*arguments.dump)
        return
    formats = arguments.formats or list(FORMATS)
    if unknown := set(formats) - set(FORMATS):
        parser.error(f"unknown format {', '.join(sorted(unknown))}; choose from {', '.join(FORMATS)}")
    for name in formats:
        for gigabytes in arguments.gigabytes:
            _measure(name, gigabytes)


def _measure(name, gigabytes):
    with tempfile.TemporaryDirectory() as folder:
        dump, made, output = Path(folder, "dump"), Path(folder, "made"), Path(folder, "run")
        step_bytes = _make(name, made)
        num_steps = max(round(gigabytes * 1e9 / step_bytes), 1)
        _link(made, dump, range(num_steps))
        first = _imported(name, dump, output)
        assert first["num_sequences"] == ROWS * num_steps, first
        print(
            f"{name}, {step_bytes * num_steps / 1e9:.2f} GB in {num_steps} steps, {first['num_sequences']} sequences: {_told(first)}; the "
            f"trace has {sum(path.stat().st_size for path in output.rglob('*')) / 1e9:.2f} GB",
            flush=True,
        )
        _link(made, dump, range(num_steps, num_steps + MORE_STEPS))
        second = _imported(name, dump, output)
        assert second["num_sequences"] == ROWS * MORE_STEPS, second
        print(
            f"{name}, the same with {MORE_STEPS} more steps, {second['num_sequences']} sequences: {_told(second)}",
            flush=True,
        )


def _told(run):
    return (
        f"peak {run['peak_mb']:.0f} MB ({run['before_mb']:.0f} MB before the import), {run['cpu_s']:.0f} s of CPU time in "
        f"{run['wall_s']:.0f} s"
    )


def _make(name, folder):
    """Write the files of some steps, one folder per step, and return the mean bytes per step."""
    from importing import dumps, make_samples  # these load torch, which the import does not need

    for number in range(MADE_STEPS):
        (folder / str(number)).mkdir(parents=True)
        dumps.WRITERS[name](folder / str(number), {0: make_samples(ROWS, seed=number)})
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / MADE_STEPS


def _link(made, dump, steps):
    """Link files for further steps of a dump to those of the steps already written."""
    for step in steps:
        one = made / str(step % MADE_STEPS)
        for path in [path for path in one.rglob("*") if path.is_file()]:
            place = dump / _of_step(path.relative_to(one), step)
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.name == "meta.json":
                place.write_text(json.dumps({"global_steps": step}))
            else:
                os.link(path, place)


def _of_step(path, step):
    """Return another step's path for a file of step 0."""
    names = {"0": f"{step}", "0.pt": f"{step}.pt", "step_0": f"step_{step}"}
    return Path(*(names.get(part, part) for part in path.parts))


def _imported(name, dump, output):
    command = [sys.executable, __file__, "--import", name, dump, output]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _import(name, dump, output):
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA, MAX_DATA))
    before, begun = peak_megabytes(), time.monotonic()
    imported = import_dump(name, dump, output=output, progress=_progress)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {
                "num_sequences": imported.num_sequences,
                "before_mb": before,
                "peak_mb": peak_megabytes(),
                "cpu_s": used.ru_utime + used.ru_stime,
                "wall_s": time.monotonic() - begun,
            }
        )
    )


@contextmanager
def _progress(what, total):
    """Print a line on stderr for every tenth of the work."""
    done, begun = 0, time.monotonic()

    def advance(units):
        nonlocal done
        tenths_before, done = 10 * done // total, done + units
        if 10 * done // total > tenths_before:
            print(
                f"{what}: {100 * done // total} % of {total / 1e9:.1f} GB, {time.monotonic() - begun:.0f} s, peak {peak_megabytes():.0f} MB",
                file=sys.stderr,
                flush=True,
            )

    yield advance


if __name__ == "__main__":
    main()
