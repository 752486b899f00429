"""Record until files may grow no more, as on a full disk, and go on training."""

import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from builders import add_step, make_batch
from tim_trace.tracer.recorder import Recorder

path, limit = sys.argv[1], int(sys.argv[2])
with Recorder(path) as recorder:
    recorder.flush()
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    for step in range(1, 2001):
        add_step(recorder, step, make_batch(rows=8, seed=step))
    recorder.flush()
print("trained to the end")
