"""Memory of an import, by the size of its dump: whether it streams.

python benchmarks/importing_memory.py                        # dumps of 1 and 4 GB of each format
python benchmarks/importing_memory.py slime --gigabytes 1 8  # of one format, and other sizes

A dump has steps of 256 sequences, each in files of its own, and lies in the folder for temporary files (TMPDIR) while it is
measured. The import runs in a process that may have 2 GB of data (RLIMIT_DATA).
"""

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from peak import peak_megabytes
from tim_trace.tracer.importers.import_dump import import_dump

FORMATS = ("prime-rl", "slime", "verl")
MAX_DATA = 2 << 30


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
        parser.error(f"no format {', '.join(sorted(unknown))}; there are {', '.join(FORMATS)}")
    for name in formats:
        for gigabytes in arguments.gigabytes:
            _measure(name, gigabytes)


def _measure(name, gigabytes):
    with tempfile.TemporaryDirectory() as folder:
        num_bytes, num_steps = _write(name, Path(folder) / "dump", gigabytes * 1e9)
        command = [sys.executable, __file__, "--import", name, f"{folder}/dump", f"{folder}/run"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        before, peak, seconds, num_sequences = done.stdout.split()
        print(
            f"{name}, {num_bytes / 1e9:.2f} GB in {num_steps} steps, {num_sequences} sequences: peak {peak} MB ({before} MB before "
            f"the import), {float(seconds):.0f} s of CPU time",
            flush=True,
        )


def _write(name, folder, num_bytes):
    """Copies of one step under the names of as many as it takes; the bytes and steps."""
    from importing import dumps, make_samples  # which load torch, and the import does without

    one = folder.parent / "one"
    one.mkdir()
    dumps.WRITERS[name](one, {0: make_samples(256)})
    step_bytes = sum(path.stat().st_size for path in one.rglob("*"))
    num_steps = max(round(num_bytes / step_bytes), 1)
    for path in [path for path in one.rglob("*") if path.is_file()]:
        for step in range(num_steps):
            place = folder / _of_step(path.relative_to(one), step)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
            if place.name == "meta.json":
                place.write_text(f'{{"global_steps": {step}}}')
    return step_bytes * num_steps, num_steps


def _of_step(path, step):
    """The path of a file of step 0, of another step."""
    names = {"0": f"{step}", "0.pt": f"{step}.pt", "step_0": f"step_{step}"}
    return Path(*(names.get(part, part) for part in path.parts))


def _import(name, dump, output):
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA, MAX_DATA))
    before = peak_megabytes()
    imported = import_dump(name, dump, output=output)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(f"{before:.0f} {peak_megabytes():.0f} {used.ru_utime + used.ru_stime:.1f} {imported.num_sequences}")


if __name__ == "__main__":
    main()
