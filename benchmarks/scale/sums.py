"""Measure time and memory of `info` and `stats` (first call and from stored sums) on a trace of many short sequences.

    python benchmarks/scale/sums.py -o runs/scale/sums --steps 200 800

Each trace has 5,000 sequences of 8 tokens per step. Memory is the command's peak, time its wall and CPU time.

    python benchmarks/scale/sums.py -o runs/scale/tokens --steps 1000 --sequences 1000 --tokens 1000 --alike

This trace has 10^9 tokens in 1,000 steps. With `--alike`, all sequences of a step have the same values, so that the
trace is small on disk; the cost of a query answered from sums does not depend on the values.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from tim_trace.tracer.recorder import Recorder

QUESTIONS = (["info"], ["stats"], ["stats"], ["stats", "--by", "step"])


def write(folder, steps, sequences, tokens, *, alike):
    """Record steps with the passes `rollout` and `train`; values come from a random pool."""
    rng = np.random.default_rng(1)
    rows = 1 if alike else sequences
    size = rows * tokens
    ids = list(np.tile(rng.integers(0, 150_000, (rows, tokens), dtype=np.int32), (sequences // rows, 1)))
    rollout = -rng.exponential(0.5, 2 * size).astype(np.float32)
    passes = {"rollout": rollout, "train": np.minimum(rollout + rng.normal(0, 0.02, 2 * size).astype(np.float32), 0)}
    with Recorder(folder) as recorder:
        for step in range(1, steps + 1):
            start = int(rng.integers(0, size))
            added = recorder.add_sequences(step=step, response_ids=ids)
            for name, values in passes.items():
                given = np.tile(values[start : start + size].reshape(rows, tokens), (sequences // rows, 1))
                recorder.add_scores(name, added, logprobs=list(given))


def measured(command):
    """Run a command in a separate process, and measure only that process."""
    script = f"import subprocess, sys, resource; done = subprocess.run({command!r}, stdout=subprocess.DEVNULL); " + (
        "found = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(found.ru_maxrss, found.ru_utime + found.ru_stime); sys.exit(done.returncode)"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    spent = time.perf_counter() - start
    peak, cpu = (float(number) for number in done.stdout.split())
    return spent, cpu, peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def main(folder, steps, sequences, tokens, alike):
    print("sequences  command            wall_s   cpu_s  peak_MB")
    for count in steps:
        trace = folder / str(count)
        if not trace.exists():
            write(trace, count, sequences, tokens, alike=alike)
        shutil.rmtree(trace / "sums", ignore_errors=True)
        for question in QUESTIONS:
            command = [sys.executable, "-m", "tim_trace", question[0], str(trace), *question[1:]]
            spent, cpu, peak = measured(command)
            print(f"{count * sequences:9}  {' '.join(question):16}  {spent:7.1f}  {cpu:6.1f}  {peak:7.0f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/scale/sums"))
    parser.add_argument("--steps", type=int, nargs="+", default=[200, 800])
    parser.add_argument("--sequences", type=int, default=5000, help="of a step")
    parser.add_argument("--tokens", type=int, default=8, help="of a sequence")
    parser.add_argument("--alike", action="store_true", help="all sequences of a step have the same values")
    given = parser.parse_args()
    main(given.output, given.steps, given.sequences, given.tokens, given.alike)
