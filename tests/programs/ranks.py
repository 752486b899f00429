"""Record from several processes into one trace, started by torchrun."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch.distributed as dist
from builders import add_step, make_batch
from tim_trace.tracer.recorder import Recorder

dist.init_process_group("gloo")
rank = dist.get_rank()
with Recorder(sys.argv[1]) as recorder:
    for step in range(1, 11):
        add_step(recorder, step, make_batch(seed=100 * rank + step), seq_ids=[f"r{rank}-{row}" for row in range(4)])
        dist.barrier()
dist.destroy_process_group()
