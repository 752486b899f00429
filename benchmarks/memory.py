"""Memory that recording takes."""

import subprocess
import sys
import tempfile
from pathlib import Path

from comparison import Comparison
from steps import make_step, record
from tim_trace.tracer.recorder import Recorder

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def compare():
    """Memory that a process gains at its peak while it records 20 steps of a million tokens one after the other."""
    if not CLEAR.exists():
        print("  left out: this system does not let a process reset its peak memory")
        return
    values = [
        float(subprocess.run([sys.executable, __file__], check=True, capture_output=True).stdout) for _ in range(3)
    ]
    yield Comparison(what="extra memory at its peak", values=values, unit=" MB", at_most=512)


def main():
    step = make_step(0)
    with tempfile.TemporaryDirectory() as folder:
        CLEAR.write_text("5")
        before = _megabytes("VmRSS")
        with Recorder(folder + "/trace") as recorder:
            for number in range(1, 21):
                record(recorder, number, step)
        print(_megabytes("VmHWM") - before)


def _megabytes(name):
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
