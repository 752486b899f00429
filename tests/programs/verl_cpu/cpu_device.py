"""torch.cpu with the functions that verl asks a device of, and what verl below 0.9 needs to take it for one."""

import types

import torch

DEVICE = types.ModuleType("cpu_device_module")
vars(DEVICE).update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})
for name in (
    "memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats",
    "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all", "set_device", "synchronize", "current_device",
):  # fmt: skip
    setattr(DEVICE, name, lambda *args, **kwargs: 0)
DEVICE.mem_get_info = lambda *args, **kwargs: (8 << 30, 16 << 30)
DEVICE.device_count = lambda: 1
DEVICE.is_available = lambda: True
DEVICE.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
DEVICE.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
DEVICE.get_device_name = lambda *args, **kwargs: "cpu"


def install(module):
    """Let functions of verl.utils.device answer with the CPU: these releases have no platforms."""
    module.is_cuda_available = module.is_npu_available = False
    module.get_torch_device = lambda: DEVICE
    module.get_device_name = lambda: "cpu"
    module.get_device_id = lambda: "cpu"
    module.get_nccl_backend = lambda: "gloo"
    module.get_resource_name = lambda: "GPU"
    module.get_visible_devices_keyword = lambda: "CUDA_VISIBLE_DEVICES"


def install_padding(module):
    """Let verl.utils.attention_utils do without flash-attn, as 0.9 does."""

    def index_first_axis(values, indices):
        return values[indices]

    def unpad_input(values, mask, unused_mask=None):
        lengths = mask.sum(dim=-1, dtype=torch.int32)
        indices = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
        ends = torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
        return values.reshape(-1, *values.shape[2:])[indices], indices, ends, lengths.max().item(), lengths

    def pad_input(values, indices, batch, length):
        padded = values.new_zeros(batch * length, *values.shape[1:])
        padded[indices] = values
        return padded.view(batch, length, *values.shape[1:])

    def rearrange(*args, **kwargs):
        from einops import rearrange

        return rearrange(*args, **kwargs)

    module.index_first_axis, module.unpad_input, module.pad_input = index_first_axis, unpad_input, pad_input
    module.rearrange = rearrange
