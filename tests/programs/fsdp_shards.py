"""Record a sharded model from two processes while every collective inside recording raises; one recorder stops on the way.

python -m torch.distributed.run --nproc-per-node 2 fsdp_shards.py FOLDER KIND...: records into FOLDER/KIND/run, which is there. A KIND is
fsdp2, or a strategy of FSDP1 (full, grad_op, none) with what it differs in, joined by "-": flat (without use_orig_params),
offload, a type of state_dict (FULL, SHARDED, LOCAL), half (forwards in bfloat16), verl (offloaded as verl does it).
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate.utils import extract_model_from_parallel

sys.path.insert(0, str(Path(__file__).parent))
from collectives import refuse_in_guards
from tim_trace.tracer.hooks.models import is_whole, keeps_weights, own_tensors, trained_model
from tim_trace.tracer.hooks.session import Order, Session
from tim_trace.tracer.hooks.trl_trainer import TrainerHooks
from tim_trace.tracer.weights.identity import class_path, dtypes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial

STEPS = 4
STOPS = 2
"""The second process records no step from this one on."""
_STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "none": ShardingStrategy.NO_SHARD,
}


class Tied(torch.nn.Module):
    """A model with what state_dicts differ by: tied parameters, a buffer, one that is not kept, a parameter of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(6, 13), torch.nn.LayerNorm(13), torch.nn.Linear(13, 6))
            for _ in range(2)
        )
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden) * self.scale


def wrapped(model: torch.nn.Module, kind: list[str]) -> torch.nn.Module:
    if kind == ["fsdp2"]:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    options = {
        "use_orig_params": "flat" not in kind,
        "sharding_strategy": _STRATEGIES[kind[0]],
        "cpu_offload": CPUOffload(offload_params=True) if "offload" in kind else None,
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16) if "half" in kind else None,
        "device_id": torch.device("cpu"),
    }
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FullyShardedDataParallel(block, **options)
    model = FullyShardedDataParallel(model, **options)
    for name in kind:
        if name.isupper():
            FullyShardedDataParallel.set_state_dict_type(model, StateDictType[f"{name}_STATE_DICT"])
    return model


def whole(model: torch.nn.Module, kind: list[str]) -> dict[str, torch.Tensor]:
    """The state_dict as torch gathers it from all processes."""
    if kind == ["fsdp2"]:
        state = model.state_dict()
        return {k: (v.full_tensor() if hasattr(v, "device_mesh") else v).detach().clone() for k, v in state.items()}
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return {k: v.detach().clone() for k, v in model.state_dict().items()}


def step_end(self: object, grad_norm: torch.Tensor, learning_rate: float) -> None:
    """As a trainer's _maybe_log_save_evaluate."""


def record(folder: Path, kind: list[str]) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = wrapped(Tied(), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # What accelerate prepares and takes apart again, as TRL's trainers have it; with FSDP it does not start on a CPU.
    trainer = SimpleNamespace(model=model, accelerator=SimpleNamespace(unwrap_model=extract_model_from_parallel))
    session = Session(Order(run=str(folder / "run"), weights="delta"))
    hooks, sizes = TrainerHooks(session), set()
    for version in range(STEPS):
        with torch.no_grad():
            model(torch.arange(11))  # the trainer's own logprobs: FSDP2 leaves its root gathered
        if "verl" in kind:
            for handle in model._all_handles:  # as verl.utils.fsdp_utils.offload_fsdp_model_to_cpu
                handle.flat_param_to(torch.device("cpu"), non_blocking=True)
                handle.flat_param._local_shard = handle.flat_param.data
        if rank == 0 or version < STOPS:
            with session.guard("weights"):
                held = trained_model(trainer)
                assert class_path(held).endswith(".Tied")
                assert not is_whole(held)
                assert keeps_weights(session, held)
                sizes.add(sum(dtypes(held).values()))
                session.recorder.add_weights(version, own_tensors(held, is_first=rank == 0))
        assert session.is_recording, session.recorder.writer.state.error
        trains = "offload" not in kind  # its gradients need the streams of an accelerator
        if trains:
            model(torch.arange(11)).square().sum().backward()
        state = whole(model, kind)
        if rank == 0:
            torch.save(state, folder / f"{version}.pt")
        if trains:
            norms = [torch.tensor(0.5)]
            if kind == ["fsdp2"]:  # the norm is a DTensor: in some releases of torch each process has a part of it
                norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
                norms.append(DTensor.from_local(torch.tensor(1.0), norms[0].device_mesh, [Partial()]))
            optimizer.step()
            if rank == 0:
                with session.guard("what the first process records alone"):
                    for norm in norms:
                        found = hooks._at_step_end(step_end, trainer, norm, 0.1)
                        session.recorder.add_metrics(version, found)
                    assert (found["grad_norm"] is None) == (len(norms) > 1)
                    session.recorder.add_optimizer(version, optimizer)
            optimizer.zero_grad()
    session.close()
    assert sizes == {sum(parameter.numel() for parameter in Tied().parameters())}, sizes


if __name__ == "__main__":
    torch.Tensor.pin_memory = lambda self: self  # an accelerator's, of parameters that are offloaded
    dist.init_process_group("gloo")
    refuse_in_guards()
    for name in sys.argv[2:]:
        record(Path(sys.argv[1], name), name.split("-"))
    dist.destroy_process_group()
