"""Plant the fault that VLLM_FAULT names in vLLM's classes, in each Python process with this folder on its path."""

import functools
import os

import wrapt

LAYERS = "vllm.model_executor.layers"


def changed(owner, name, change):
    """Replace a function by `change(original)`."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(change(original)))


def epsilon(layernorm):
    changed(
        layernorm.RMSNorm,
        "__init__",
        lambda init: lambda self, size, eps=1e-6, **words: init(self, size, 1e-2, **words),
    )


def residual(layernorm):
    """The sum that is normalized loses half of the residual."""

    def change(forward):
        return lambda self, x, residual=None: forward(self, x) if residual is None else forward(self, x, residual / 2)

    changed(layernorm.RMSNorm, "forward_native", change)


def half_rotary(base):
    def change(init):
        return lambda self, head_size, rotary_dim, *args, **words: init(self, head_size, head_size // 2, *args, **words)

    changed(base.RotaryEmbedding, "__init__", change)


def other_base(llama):
    """The configuration's base is not passed on."""

    def change(init):
        def called(self, config, **words):
            before, config.rope_parameters = config.rope_parameters, {"rope_type": "default", "rope_theta": 500.0}
            init(self, config, **words)
            config.rope_parameters = before

        return called

    changed(llama.LlamaAttention, "_init_rotary_emb", change)


def swapped_halves(activation):
    def change(forward):
        return lambda self, x: forward(self, x.roll(x.shape[-1] // 2, -1))

    for name in ("forward_cpu", "forward_cuda"):
        changed(activation.SiluAndMul, name, change)


def no_scale(attention):
    def change(init):
        return lambda self, heads, size, scale, *args, **words: init(self, heads, size, 1.0, *args, **words)

    changed(attention.Attention, "__init__", change)


def not_loaded(llama):
    def change(load):
        return lambda self, weights: load(
            self, ((name, value * 0 if "up_proj" in name else value) for name, value in weights)
        )

    changed(llama.LlamaForCausalLM, "load_weights", change)


def transposed(llama):
    def change(load):
        return lambda self, weights: load(
            self, ((name, value.T.contiguous() if "o_proj" in name else value) for name, value in weights)
        )

    changed(llama.LlamaForCausalLM, "load_weights", change)


def logits_scale(processor):
    def change(init):
        return lambda self, *args, **words: (init(self, *args, **words), setattr(self, "scale", 0.95))[0]

    changed(processor.LogitsProcessor, "__init__", change)


PLACES = {
    "epsilon": f"{LAYERS}.layernorm",
    "residual": f"{LAYERS}.layernorm",
    "half_rotary": f"{LAYERS}.rotary_embedding.base",
    "other_base": "vllm.model_executor.models.llama",
    "swapped_halves": f"{LAYERS}.activation",
    "no_scale": f"{LAYERS}.attention.attention",
    "not_loaded": "vllm.model_executor.models.llama",
    "transposed": "vllm.model_executor.models.llama",
    "logits_scale": f"{LAYERS}.logits_processor",
}
if fault := os.environ.get("VLLM_FAULT"):
    wrapt.register_post_import_hook(globals()[fault], PLACES[fault])
