"""The GRPO example with and without recording."""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from comparison import Comparison, in_turn, ratios

EXAMPLE = Path(__file__).parents[1] / "examples" / "grpo_addition.py"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""Environment of `make demo`: otherwise threads that wait for each other would count as work."""
ROUNDS = 5


def compare():
    """Compare the whole GRPO example (200 steps, vLLM rollouts), recorded and unrecorded."""
    shares, own, training, cpu = [], [], {"recorded": [], "bare": []}, {"recorded": [], "bare": []}

    def counted(name, run):
        before = _cpu_s()
        training[name].append(run())
        cpu[name].append(_cpu_s() - before)

    with tempfile.TemporaryDirectory() as folder:
        taken = in_turn(
            ROUNDS,
            recorded=lambda: counted("recorded", lambda: _recorded(folder, shares, own)),
            bare=lambda: counted("bare", lambda: _run(folder, sys.executable, EXAMPLE)),
        )
    yield Comparison(
        what="share of the wall time that recording takes on the training thread", values=shares, at_most=0.03
    )
    yield Comparison(
        what="time of trainer.train() over that of the bare run",
        values=ratios(training["recorded"], training["bare"]),
    )
    yield Comparison(what="wall time over that of the bare run", values=ratios(taken["recorded"], taken["bare"]))
    yield Comparison(
        what="CPU time of all processes over that of the bare run", values=ratios(cpu["recorded"], cpu["bare"])
    )
    yield Comparison(
        what="CPU time reported by hooks and writer threads, over the CPU time of the bare run",
        values=ratios(own, cpu["bare"]),
    )


def _cpu_s():
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _recorded(folder, shares, own):
    """Run recorded, and note the hooks' seconds over the command's wall seconds, and the recorder's CPU seconds."""
    record = (sys.executable, "-m", "tim_trace", "record", "-o", "trace", "--force", "--", sys.executable, EXAMPLE)
    start = time.perf_counter()
    train_s = _run(folder, *record)
    wall_s = time.perf_counter() - start
    states = [json.loads(path.read_text()) for path in Path(folder, "trace", "writers").glob("*.json")]
    shares.append(sum(state["spent_s"] for state in states) / wall_s)
    own.append(sum(state["cpu_s"] or 0.0 for state in states))
    return train_s


def _run(folder, *command):
    """Run the example and return the seconds of its training, as logged by the trainer."""
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True, text=True)
    return float(re.search(r"'train_runtime': '([\d.]+)'", done.stdout)[1])
