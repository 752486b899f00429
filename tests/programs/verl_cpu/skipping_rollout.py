"""A mistake in the transfer of weights to verl's engine, as a plugin makes it: a class of its own for the rollout `vllm`.

VERL_USE_EXTERNAL_MODULES=cpu_platform,skipping_rollout. Nothing here knows of tim-trace.
"""

import wrapt

SKIPPED = "model.layers.1.mlp.down_proj.weight"


def _skipping(adapter_class):
    class SkippingAdapter(adapter_class):
        num_transfers = 0

        async def update_weights(self, weights, *args, **kwargs):
            """One tensor is left out from the second transfer on."""
            self.num_transfers += 1
            is_first = self.num_transfers == 1
            some = ((name, tensor) for name, tensor in weights if is_first or name != SKIPPED)
            await super().update_weights(some, *args, **kwargs)

    return SkippingAdapter


def _replace(module):
    own = module.get_rollout_class
    module.get_rollout_class = lambda *args, **kwargs: _skipping(own(*args, **kwargs))


wrapt.register_post_import_hook(_replace, "verl.workers.rollout.base")
