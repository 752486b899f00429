"""Write tests/data/trace-v2 and what it must answer. Run once, by the release that introduces the format."""

import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from builders import add_step, make_batch
from tim_trace.analysis.views import connect
from tim_trace.tracer import environment, liveness
from tim_trace.tracer.recorder import Recorder

# Nothing of the machine that wrote it is kept in the repository.
environment.program = lambda: ("python", "make_trace_v2.py")
environment.all_versions = lambda: {"python": "3.11"}
liveness.socket.gethostname = lambda: "host"
liveness.boot_id = liveness.pid_namespace = lambda: None
liveness.process_start = lambda pid: None

path = Path(__file__).parent / "trace-v2"
shutil.rmtree(path, ignore_errors=True)
with Recorder(path) as recorder:
    recorder.add_contract("rollout", {"engine": "vllm", "dtype": "bfloat16"})
    recorder.add_contract("train", {"engine": "trl", "dtype": "float32"})
    recorder.add_hyperparameters({"loss_type": "dapo", "beta": 0.0})
    for step in (1, 2):
        batch = make_batch(rows=3, seed=step)
        add_step(recorder, step, batch, seq_ids=[f"{step}-{row}" for row in range(3)], temperature=1.0)
        recorder.add_metrics(step, {"loss": 0.5})
rows = connect(path).execute("SELECT step, num_tokens, k3 FROM pair_steps('train', 'rollout')").fetchall()
(path.parent / "trace-v2.json").write_text(json.dumps({"pair_steps": rows}, indent=2) + "\n")
