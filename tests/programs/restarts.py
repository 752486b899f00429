"""Record from several processes, of which one breaks once after its checkpoint; torchrun starts all of them again."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from builders import add_step, make_batch
from tim_trace.tracer.recorder import Recorder

path, checkpoint, breaks_at, last = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def barrier(step):
    """Wait for the other rank. Gloo's own barrier now and then meets the addresses of the ranks before the restart."""
    here = checkpoint.parent / "barriers"
    here.mkdir(exist_ok=True)
    (here / f"{restarts}-{step}-{rank}").touch()
    while not (here / f"{restarts}-{step}-{1 - rank}").exists():
        time.sleep(0.01)


first = int(checkpoint.read_text()) + 1 if checkpoint.exists() else 1
with Recorder(path) as recorder:
    for step in range(first, last + 1):
        batch = make_batch(seed=1000 * restarts + 100 * rank + step)
        add_step(recorder, step, batch, seq_ids=[f"r{rank}-{row}" for row in range(4)])
        recorder.flush()
        barrier(step)
        if step % 2 == 0 and rank == 0:
            checkpoint.write_text(str(step))
        if step == breaks_at and not restarts:
            if rank == 1:
                raise RuntimeError("out of memory, say")  # leaves the recorder as an error does: closed
            time.sleep(600)  # until torchrun ends it
