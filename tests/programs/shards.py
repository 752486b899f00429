"""Record sharded weights (FSDP2) from several processes, started by torchrun; saves the whole tensors for comparison."""

import os
import sys

import torch
import torch.distributed as dist
from tim_trace.tracer.recorder import Recorder
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

folder, result = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
model.register_buffer("scale", torch.tensor([2.0]))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with Recorder(folder) as recorder:
    for version in range(3):
        state = model.state_dict(keep_vars=True)
        own = {name: tensor for name, tensor in state.items() if rank == 0 or hasattr(tensor, "device_mesh")}
        recorder.add_weights(version, own)
        whole = {
            name: (tensor.full_tensor() if hasattr(tensor, "device_mesh") else tensor).detach().clone()
            for name, tensor in state.items()
        }
        if rank == 0:
            torch.save(whole, os.path.join(result, f"{version}.pt"))
        model(torch.ones(4, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
