"""Keep vLLM's linear layers plain: on a CPU it packs their weights and then takes no new ones."""

import wrapt


def _plain(module):
    def keep(layer, remove_weight):
        import torch

        layer.cpu_linear = torch.nn.functional.linear

    module.dispatch_cpu_unquantized_gemm = keep


wrapt.register_post_import_hook(_plain, "vllm.model_executor.layers.utils")
