"""Record as one process of several nodes, as hooks of a trainer do; without `tim-trace record` it trains alone.

`nodes.py FOLDER STEPS [RANK...]`: ranks meet in FOLDER after every step, or in gloo where torchrun started them; each RANK goes on
until FOLDER has a file `go`.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from builders import add_step, make_batch
from tim_trace.tracer.hooks.session import Order, Session

folder, last = Path(sys.argv[1]), int(sys.argv[2])
rank, is_gloo = int(os.environ["RANK"]), "TORCHELASTIC_RUN_ID" in os.environ
order = Order.from_environment()
session = None if order is None else Session(order)
if is_gloo:
    import torch.distributed as dist

    dist.init_process_group("gloo")


def meet(step):
    if is_gloo:
        dist.barrier()
        return
    folder.mkdir(exist_ok=True)
    (folder / f"{step}-{rank}").touch()
    while not (folder / f"{step}-{1 - rank}").exists():
        time.sleep(0.01)


if session is not None:
    session.begin_training()
for step in range(1, last + 1):
    if session is not None:
        batch = make_batch(seed=100 * rank + step)
        add_step(session.recorder, step, batch, seq_ids=[f"r{rank}-{row}" for row in range(4)])
    meet(step)
if session is not None:
    session.recorder.flush()
print(f"rank {rank} trained", flush=True)
while str(rank) in sys.argv[3:] and not (folder / "go").exists():
    time.sleep(0.01)
if session is not None:
    session.close()
if is_gloo:
    dist.destroy_process_group()
