"""Keep vLLM's linear layers plain: on a CPU it packs their weights and then takes no new ones. Give verl below 0.9 a CPU."""

from importlib.metadata import PackageNotFoundError, version

import wrapt


def _plain(module):
    def keep(layer, remove_weight):
        import torch

        layer.cpu_linear = torch.nn.functional.linear

    module.dispatch_cpu_unquantized_gemm = keep


wrapt.register_post_import_hook(_plain, "vllm.model_executor.layers.utils")


def _older(function):
    def hook(module):
        import cpu_device

        getattr(cpu_device, function)(module)

    return hook


try:
    if version("verl") < "0.9":
        wrapt.register_post_import_hook(_older("install"), "verl.utils.device")
        wrapt.register_post_import_hook(_older("install_padding"), "verl.utils.attention_utils")
except PackageNotFoundError:
    pass
