"""Mistakes in the transfer of weights to verl's engine, as a plugin makes them: a class of its own for the rollout `vllm`.

VERL_USE_EXTERNAL_MODULES=cpu_platform,transfer_faults and TRANSFER_FAULT=skips|late|never|fp8. Nothing here knows of tim-trace.
"""

import os

import torch
import wrapt

SKIPPED = "model.layers.1.mlp.down_proj.weight"


def _as_faulty(adapter_class):
    class FaultyAdapter(adapter_class):
        count = 0
        before = ()

        async def update_weights(self, weights, *args, **kwargs):
            weights = [(name, tensor.detach().clone()) for name, tensor in weights]
            self.count += 1
            fault = os.environ["TRANSFER_FAULT"]
            if fault == "never":
                return
            if fault == "skips" and self.count > 1:
                weights = [(name, tensor) for name, tensor in weights if name != SKIPPED]
            if fault == "late":
                weights, self.before = self.before or weights, weights
            if fault == "fp8":
                weights = [(name, tensor.to(torch.float8_e4m3fn).to(tensor.dtype)) for name, tensor in weights]
            await super().update_weights(iter(weights), *args, **kwargs)

    return FaultyAdapter


def _make_faulty(module):
    own = module.get_rollout_class
    module.get_rollout_class = lambda *args, **kwargs: _as_faulty(own(*args, **kwargs))


wrapt.register_post_import_hook(_make_faulty, "verl.workers.rollout.base")
