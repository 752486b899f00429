"""Record from several processes without end; each tells on stdout what `add_*` returned for, and when; a test kills them.

usage: durable.py RUN WRITERS PAUSE_S FLUSHES. A line is `WRITER STEP SECONDS KIND`: KIND is `added` as soon as a step's calls
returned, and `flushed` once `flush()` did.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from builders import add_step, make_batch
from tim_trace.tracer.recorder import Recorder

path, writers, pause_s, flushes = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
number = 0
for other in range(1, writers):
    if os.fork() == 0:
        number = other
        break
recorder = Recorder(path, join=True)
recorder.writer.segments.seal_bytes = 200_000
batches = [make_batch(rows=32, seed=seed, longest=200) for seed in range(4)]
step = 0


def tell(kind):
    os.write(1, f"{number} {step} {time.monotonic()} {kind}\n".encode())


while True:
    step += 1
    add_step(recorder, step, batches[step % 4], seq_ids=[f"{number}-{row}" for row in range(32)])
    recorder.add_metrics(step, {f"loss{number}": step})
    tell("added")
    if flushes and step % flushes == 0:
        recorder.flush()
        tell("flushed")
    time.sleep(pause_s)
