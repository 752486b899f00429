"""A checkpoint engine `gloo` for verl, by verl's own registry: actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=gloo_engine."""

import asyncio
import pickle
from datetime import timedelta

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.net_utils import get_free_port
from verl.workers.rollout.utils import ensure_async_iterator


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """The trainer's first rank broadcasts tensor after tensor to every rollout worker."""

    def __init__(self, bucket_size, is_master=False):
        self.is_master = is_master
        self.group = None

    def prepare(self):
        if not self.is_master:
            return None
        address = ray.util.get_node_ip_address().strip("[]")
        return address, get_free_port(address)[0]

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        size = 1 + rollout_world_size
        actors = [0] + [-1] * (actor_wg_world_size - 1)

        def settings(ranks):
            return {"rank": ranks, "world_size": [size] * len(ranks), "master": [metadata[0]] * len(ranks)}

        return settings(actors), settings(list(range(1, size)))

    def init_process_group(self, rank, world_size, master):
        if rank < 0:
            return
        store = dist.TCPStore(*master, world_size, is_master=rank == 0, timeout=timedelta(seconds=120))
        self.group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=120))

    def finalize(self):
        self.group = None

    def _share(self, tensor):
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.group.broadcast([tensor], options).wait()
        return tensor

    async def send_weights(self, weights, global_steps=None):
        async for name, weight in ensure_async_iterator(weights):
            if self.group is not None:
                self._tell((name, weight.shape, weight.dtype))
                await asyncio.to_thread(self._share, weight.detach().contiguous().view(-1).view(torch.uint8))
        if self.group is not None:
            self._tell(None)

    async def receive_weights(self, global_steps=None):
        while (found := await asyncio.to_thread(self._hear)) is not None:
            name, shape, dtype = found
            weight = torch.empty(shape, dtype=dtype)
            await asyncio.to_thread(self._share, weight.view(-1).view(torch.uint8))
            yield name, weight

    def _tell(self, value):
        text = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._share(torch.tensor([len(text)]))
        self._share(text)

    def _hear(self):
        (length,) = self._share(torch.zeros(1, dtype=torch.int64)).tolist()
        return pickle.loads(self._share(torch.zeros(length, dtype=torch.uint8)).numpy().tobytes())
