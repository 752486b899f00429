"""Write tests/data/smollm2: both sides' logprobs of the run that `make demo-smollm2` records. Run with that trace's folder."""

import shutil
import sys
from pathlib import Path

from tim_trace.analysis.views import connect
from tim_trace.tracer import environment, liveness
from tim_trace.tracer.recorder import Recorder

# Nothing of the machine that wrote it is kept in the repository.
environment.program = lambda: ("python", "make_smollm2.py")
environment.all_versions = lambda: {"python": "3.11"}
liveness.socket.gethostname = lambda: "host"
liveness.boot_id = lambda: None

path = Path(__file__).parent / "smollm2"
shutil.rmtree(path, ignore_errors=True)
recorded = connect(sys.argv[1])
with Recorder(path) as recorder:
    recorder.add_contract("rollout", {"engine": "vllm", "dtype": "bfloat16"})
    recorder.add_contract("train", {"engine": "trl", "dtype": "bfloat16"})
    for (step,) in recorded.execute("SELECT step FROM steps ORDER BY step").fetchall():
        columns = ("seq_id", "group_id", "prompt_ids", "response_ids", "reward", "advantage")
        rows = recorded.execute(
            f"SELECT {', '.join(columns)} FROM sequences WHERE step = {step} ORDER BY seq_id"
        ).fetchall()
        seq_ids, group_ids, prompts, responses, rewards, advantages = map(list, zip(*rows, strict=True))
        added = recorder.add_sequences(
            step=step, seq_ids=seq_ids, group_ids=group_ids, prompt_ids=prompts, response_ids=responses, reward=rewards,
            advantage=advantages, policy_version=step - 1, temperature=1.0,
        )  # fmt: skip
        for name in ("rollout", "train"):
            scores = recorded.execute(
                "SELECT logprobs FROM scores WHERE step = $1 AND pass = $2 ORDER BY seq_id", (step, name)
            ).fetchall()
            recorder.add_scores(name, added, logprobs=[row[0] for row in scores], policy_version=step - 1)
