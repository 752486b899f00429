"""Score with TRL's function under the mixed precision of FSDP1 and FSDP2, as accelerate sets it, from two processes.

python -m torch.distributed.run --nproc-per-node 2 fsdp_scores.py FOLDER: the first process records into FOLDER/fsdp1 and FOLDER/fsdp2.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import tiny
from tim_trace.replay.backends.trl import TrlScorer
from tim_trace.tracer.environment import torch_settings
from tim_trace.tracer.hooks.models import numerics
from tim_trace.tracer.hooks.trl_release import fused_lm_head
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.rows import Forward
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from transformers import Qwen3ForCausalLM
from trl import GRPOTrainer

ROWS, PROMPT, RESPONSE = 4, 6, 10
HALF = torch.bfloat16


def sharded(model: torch.nn.Module, kind: str) -> torch.nn.Module:
    if kind == "fsdp1":
        casts = MixedPrecision(param_dtype=HALF, reduce_dtype=HALF, buffer_dtype=HALF)
        return FullyShardedDataParallel(
            model, mixed_precision=casts, use_orig_params=True, device_id=torch.device("cpu")
        )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    casts = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=HALF, output_dtype=HALF)}
    for layer in model.model.layers:
        fully_shard(layer, **casts)
    return fully_shard(model, **casts)


def record(folder: Path, kind: str) -> None:
    scorer = GRPOTrainer._get_per_token_logps_and_entropies
    contract = {
        "engine": "trl", "scoring_function": f"{scorer.__module__}.{scorer.__qualname__}", "fused_lm_head": fused_lm_head(),
        "grad_enabled": False, "training_mode": True, "temperature": 1.0,
        "torch": torch_settings() | {"autocast_dtype": str(HALF)},
    }  # fmt: skip
    model = Qwen3ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    identity = {"class": f"{type(model).__module__}.{type(model).__qualname__}", "config": model.config.to_dict()}
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trl = TrlScorer(model, contract, autocast_dtype=HALF, head_in_fp32=False)  # as Accelerator.prepare_model leaves it
    model = sharded(model, kind)
    draw = np.random.default_rng(0)
    ids_BW = torch.from_numpy(draw.integers(2, len(tiny.CHARACTERS), (ROWS, PROMPT + RESPONSE)))
    with torch.no_grad():
        logprobs = trl._score(trl._trainer, model, ids_BW, torch.ones_like(ids_BW), RESPONSE)[0]
    if dist.get_rank() == 0:
        place, none = np.arange(ROWS, dtype=np.int32), np.zeros(ROWS, np.int32)
        with Recorder(folder / kind) as recorder:
            recorder.describe(model=identity)
            recorder.add_contract("train", contract | {"model": numerics(model)})
            recorder.add_weights(0, weights)
            batch = recorder.add_sequences(
                step=1, prompt_ids=ids_BW[:, :PROMPT], response_ids=ids_BW[:, PROMPT:], policy_version=0
            )
            forward = Forward(ids=none, places=place, rows=none + ROWS, pad_left=none, pad_right=none)
            recorder.add_scores("train", batch, logprobs=logprobs.float(), forward=forward)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    if dist.get_rank() == 0:
        tiny.save_model(folder / "model")
    dist.barrier()
    for kind in ("fsdp1", "fsdp2"):
        record(folder, kind)
    dist.destroy_process_group()
