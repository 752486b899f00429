"""Record steps of known content without end, and tell which step is in the journal; a test kills it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
from builders import add_step, make_batch
from tim_trace.tracer.dense import TopK
from tim_trace.tracer.recorder import Recorder

path, capture, *seal_bytes = sys.argv[1:]
recorder = Recorder(path, capture=capture)
recorder.writer.segments.seal_bytes = int(*seal_bytes or [30_000])
step = 0
while True:
    step += 1
    batch = make_batch(rows=16, seed=step)
    added = add_step(recorder, step, batch, ("rollout",), seq_ids=range(16))
    tokens = sum(len(ids) for ids in batch["response_ids"])
    top = TopK(
        token_ids=np.full((tokens, 2), step, np.int32),
        logprobs=np.full((tokens, 2), -1.0, np.float32),
        tail_logprob=np.zeros(tokens, np.float32),
    )
    dense = {"distribution": top, "captured_rows": range(16)} if capture != "logprobs" else {}
    recorder.add_scores("train", added, logprobs=batch["train"], **dense)
    recorder.add_metrics(step, {"loss": step})
    recorder.flush()
    print(step, flush=True)
