"""Planted faults and harmless rewrites, written without knowledge of the locator.

`CASES` holds pairs of executions of small random models: B is `build(architecture)` after `make`, A the same without.
A case with a `fault` states which module and operator differ first; a case without one computes the same in another way,
so that only rounding differs. `python benchmarks/location/faults.py` measures every case without the locator and exits
nonzero if a fault is too small or a harmless case too large.
"""

import copy
import inspect
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

VOCAB_SIZE = 304
"""Number of rows of every embedding and head; input tokens are below `REAL_TOKENS`."""
REAL_TOKENS = 290
SPECIAL_TOKEN = 7
"""A token that occurs in every input, like an end of turn."""
INPUT_LENGTHS = (24, 41, 67, 101)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What B computes otherwise first."""

    modules: set[str]
    """Names in `model.named_modules()`, each of which is a right answer; "" is the model itself."""
    operators: set[str]
    """Operators, each of which is a right answer."""
    why: str
    """The code change in one line."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pair of executions."""

    name: str
    architecture: str
    make: Callable[[PreTrainedModel], None]
    """Changes model B in place."""
    fault: Fault | None
    """None: harmless."""
    inputs: list[Tensor] = field(repr=False)
    """1-D token tensors, longest last."""
    arm_a: str = "dtype=fp32"
    arm_b: str = "dtype=fp32"


# ---------------------------------------------------------------------------------------------------------------------
# Models


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How to build a small model of one architecture, and the names of its parts."""

    config_class: str
    model_class: str
    options: dict[str, object]
    attention: str = "sdpa"
    """Attention kernel of A; soft caps and sinks need eager."""
    layers: str = "model.layers"
    attention_name: str = "self_attn"


def _rope(theta: float, **options: object) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": theta} | options


_DENSE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

ARCHITECTURES = {
    "qwen2": Architecture(
        config_class="Qwen2Config",
        model_class="Qwen2ForCausalLM",
        options=_DENSE | {"tie_word_embeddings": True, "rope_parameters": _rope(1e4)},
    ),
    "qwen3": Architecture(
        config_class="Qwen3Config",
        model_class="Qwen3ForCausalLM",
        options=_DENSE | {"head_dim": 24, "num_hidden_layers": 6, "rope_parameters": _rope(5e4)},
    ),
    "llama": Architecture(
        config_class="LlamaConfig",
        model_class="LlamaForCausalLM",
        options=_DENSE
        | {
            "num_attention_heads": 8,
            "hidden_size": 128,
            "rope_parameters": _rope(
                1e4,
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        },
    ),
    "gemma2": Architecture(
        config_class="Gemma2Config",
        model_class="Gemma2ForCausalLM",
        options=_DENSE
        | {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "sliding_window": 19,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 5.0,
            "rope_parameters": _rope(1e4),
        },
        attention="eager",
    ),
    "gemma3": Architecture(
        config_class="Gemma3TextConfig",
        model_class="Gemma3ForCausalLM",
        options=_DENSE
        | {
            "hidden_size": 80,
            "num_hidden_layers": 6,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 17,
            "final_logit_softcapping": 6.0,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "rope_parameters": {"full_attention": _rope(1e6), "sliding_attention": _rope(1e4)},
        },
    ),
    "mistral": Architecture(
        config_class="MistralConfig",
        model_class="MistralForCausalLM",
        options=_DENSE | {"sliding_window": 29, "num_hidden_layers": 4, "rope_parameters": _rope(1e4)},
    ),
    "mixtral": Architecture(
        config_class="MixtralConfig",
        model_class="MixtralForCausalLM",
        options=_DENSE
        | {"num_hidden_layers": 4, "num_local_experts": 6, "num_experts_per_tok": 2, "rope_parameters": _rope(1e5)},
    ),
    "qwen3_moe": Architecture(
        config_class="Qwen3MoeConfig",
        model_class="Qwen3MoeForCausalLM",
        options=_DENSE
        | {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "rope_parameters": _rope(1e5),
        },
    ),
    "qwen2_moe": Architecture(
        config_class="Qwen2MoeConfig",
        model_class="Qwen2MoeForCausalLM",
        options=_DENSE
        | {
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
            "rope_parameters": _rope(1e4),
        },
    ),
    "olmo2": Architecture(
        config_class="Olmo2Config",
        model_class="Olmo2ForCausalLM",
        options=_DENSE | {"num_key_value_heads": 4, "rope_parameters": _rope(1e5)},
    ),
    "phi3": Architecture(
        config_class="Phi3Config",
        model_class="Phi3ForCausalLM",
        options=_DENSE
        | {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "rope_parameters": _rope(1e4, partial_rotary_factor=0.5),
            "original_max_position_embeddings": 512,
        },
    ),
    "granite": Architecture(
        config_class="GraniteConfig",
        model_class="GraniteForCausalLM",
        options=_DENSE
        | {
            "tie_word_embeddings": True,
            "embedding_multiplier": 3.0,
            "logits_scaling": 1.5,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
            "rope_parameters": _rope(1e4),
        },
    ),
    "glm4": Architecture(
        config_class="Glm4Config",
        model_class="Glm4ForCausalLM",
        options=_DENSE | {"head_dim": 16, "rope_parameters": _rope(1e4, partial_rotary_factor=0.5)},
    ),
    "gpt_oss": Architecture(
        config_class="GptOssConfig",
        model_class="GptOssForCausalLM",
        options=_DENSE
        | {
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 21,
            "swiglu_limit": 2.5,
            "rope_parameters": _rope(
                1e4,
                rope_type="yarn",
                factor=8.0,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
                original_max_position_embeddings=64,
            ),
        },
        attention="eager",
    ),
    "deepseek_v3": Architecture(
        config_class="DeepseekV3Config",
        model_class="DeepseekV3ForCausalLM",
        options=_DENSE
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 48,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 40,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "rope_parameters": _rope(1e4),
        },
    ),
    "cohere2": Architecture(
        config_class="Cohere2Config",
        model_class="Cohere2ForCausalLM",
        options=_DENSE
        | {
            "num_hidden_layers": 4,
            "sliding_window": 23,
            "logit_scale": 0.5,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": _rope(1e4),
        },
    ),
    "starcoder2": Architecture(
        config_class="Starcoder2Config",
        model_class="Starcoder2ForCausalLM",
        options=_DENSE | {"tie_word_embeddings": False, "rope_parameters": _rope(1e4)},
    ),
    "gpt_neox": Architecture(
        config_class="GPTNeoXConfig",
        model_class="GPTNeoXForCausalLM",
        options={name: value for name, value in _DENSE.items() if name != "num_key_value_heads"}
        | {"rope_parameters": _rope(1e4, partial_rotary_factor=0.5)},
        layers="gpt_neox.layers",
        attention_name="attention",
    ),
}


def _standard_deviation(name: str, parameter: nn.Parameter, tied: bool) -> float:
    fan_in = parameter.shape[1 if name.endswith("_proj") and parameter.ndim == 3 else -1]
    if parameter.ndim == 3 and "experts" in name and not name.endswith("_proj"):
        return 0.3
    if "embed" in name:
        return 2.4 / math.sqrt(fan_in) if tied else 1.0
    if "lm_head" in name:
        return 2.4 / math.sqrt(fan_in)
    if any(part in name for part in ("q_proj", "k_proj", "qkv", "query_key_value", "gate.weight", "router.weight")):
        return 1.5 / math.sqrt(fan_in)
    return 1.1 / math.sqrt(fan_in)


@torch.no_grad()
def build(architecture: str) -> PreTrainedModel:
    """Build the small float32 model of an architecture, in eval mode, with the same weights at each call."""
    parts = ARCHITECTURES[architecture]
    config = getattr(transformers, parts.config_class)(**copy.deepcopy(parts.options))
    config._attn_implementation = parts.attention
    with torch.random.fork_rng():
        model = getattr(transformers, parts.model_class)(config)
    model = model.to(torch.float32).eval()
    generator = torch.Generator().manual_seed(20265000 + list(ARCHITECTURES).index(architecture))
    centre = 0.0 if architecture in ("gemma2", "gemma3") else 1.0
    tied = bool(config.tie_word_embeddings)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            value = 0.2 * noise if name.endswith("bias") else centre + 0.25 * noise
        elif name.endswith("bias") or parameter.ndim == 1:
            value = 0.3 * noise
        else:
            value = _standard_deviation(name, parameter, tied) * noise
        parameter.copy_(value)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def _make_inputs(architecture: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(20266000 + list(ARCHITECTURES).index(architecture))
    inputs = []
    for length in INPUT_LENGTHS:
        tokens = torch.randint(8, REAL_TOKENS, (length,), generator=generator)
        tokens[5::17] = SPECIAL_TOKEN
        inputs.append(tokens)
    return inputs


def _layer(architecture: str, index: int) -> str:
    return f"{ARCHITECTURES[architecture].layers}.{index}"


def _attention(architecture: str, index: int) -> str:
    return f"{_layer(architecture, index)}.{ARCHITECTURES[architecture].attention_name}"


# ---------------------------------------------------------------------------------------------------------------------
# Own classes: each is mixed into the class of a module, before it
# Shapes: B batch, T tokens, N heads, K keys, D head size


def _swap(module: nn.Module, own: type) -> None:
    module.__class__ = type(f"{own.__name__}{type(module).__name__}", (own, type(module)), {})


def _modeling(module: nn.Module) -> object:
    """Return the transformers file that defines a module's class."""
    for cls in type(module).__mro__:
        if cls.__module__.startswith("transformers.models."):
            return inspect.getmodule(cls)
    raise AssertionError(type(module))


def _bias_of(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """Return an additive float32 mask from the arguments of the model's attention."""
    lowest = torch.finfo(torch.float32).min
    if mask is None:
        places = torch.arange(query.shape[2]) + key.shape[2] - query.shape[2]
        mask = torch.arange(key.shape[2])[None, :] <= places[:, None]
        mask = mask[None, None]
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape).masked_fill(~mask, lowest)
    return mask.float().clamp_min(lowest)


def _repeat(states: Tensor, num_heads: int) -> Tensor:
    return states.repeat_interleave(num_heads // states.shape[1], dim=1)


def _scores(query: Tensor, key: Tensor, bias: Tensor, scaling: float, soft_cap: float | None) -> Tensor:
    scores = (query.float() * scaling) @ key.float().transpose(2, 3)
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    return scores + bias


def _blocked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    scaling: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    block_size: int = 16,
) -> Tensor:
    """Softmax attention with a running maximum and sum over blocks of keys, in float32."""
    key, value = _repeat(key, query.shape[1]), _repeat(value, query.shape[1])
    if sinks is None:
        top = torch.full((*query.shape[:3], 1), torch.finfo(torch.float32).min)
        total = torch.zeros_like(top)
    else:
        top = sinks.float().reshape(1, -1, 1, 1).expand(*query.shape[:3], 1)
        total = torch.ones_like(top)
    weighted = torch.zeros(*query.shape[:3], value.shape[-1])
    for start in range(0, key.shape[2], block_size):
        block = slice(start, start + block_size)
        scores = _scores(query, key[:, :, block], bias[..., block], scaling, soft_cap)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        shrink = torch.exp(top - new_top)
        weights = torch.exp(scores - new_top)
        total = total * shrink + weights.sum(-1, keepdim=True)
        weighted = weighted * shrink + weights @ value[:, :, block].float()
        top = new_top
    return (weighted / total).to(query.dtype)


def _split_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    scaling: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Two halves of the keys computed separately, merged by their logsumexp, as in flash decoding."""
    key, value = _repeat(key, query.shape[1]), _repeat(value, query.shape[1])
    half = key.shape[2] // 2
    outputs, sums = [], []
    for part in (slice(0, half), slice(half, None)):
        scores = _scores(query, key[:, :, part], bias[..., part], scaling, soft_cap)
        sums.append(scores.logsumexp(-1, keepdim=True))
        outputs.append(scores.softmax(-1) @ value[:, :, part].float())
    if sinks is not None:
        sums.append(sinks.float().reshape(1, -1, 1, 1).expand_as(sums[0]))
        outputs.append(torch.zeros_like(outputs[0]))
    shares = torch.cat(sums, -1).softmax(-1)
    merged = sum(output * shares[..., i : i + 1] for i, output in enumerate(outputs))
    return merged.to(query.dtype)


def _grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    scaling: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Heads of a group against their key head without repeating it; powers of two in place of exp."""
    batch, num_heads, length, size = query.shape
    groups = query.float().reshape(batch, key.shape[1], -1, length, size)
    scores = torch.einsum("bgrtd,bgkd->bgrtk", groups, key.float()) * scaling
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    scores = (scores + bias[:, :, None]).reshape(batch, num_heads, length, -1)
    if sinks is not None:
        scores = torch.cat([sinks.float().reshape(1, -1, 1, 1).expand(batch, -1, length, 1), scores], -1)
    weights = torch.exp2((scores - scores.amax(-1, keepdim=True)) * math.log2(math.e))
    weights = weights / weights.sum(-1, keepdim=True)
    if sinks is not None:
        weights = weights[..., 1:]
    weights = weights.reshape(batch, key.shape[1], -1, length, key.shape[2])
    return torch.einsum("bgrtk,bgkd->bgrtd", weights, value.float()).reshape(batch, num_heads, length, -1).to(query)


def _chunked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    scaling: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    chunk_size: int = 20,
) -> Tensor:
    """A prefill in chunks of queries, each over the keys up to its end."""
    outputs = []
    offset = key.shape[2] - query.shape[2]
    for start in range(0, query.shape[2], chunk_size):
        stop = min(start + chunk_size, query.shape[2])
        seen = slice(0, offset + stop)
        rows = bias[:, :, start:stop, seen] if bias.shape[2] > 1 else bias[..., seen]
        outputs.append(
            _blocked_attention(
                query[:, :, start:stop],
                key[:, :, seen],
                value[:, :, seen],
                rows,
                scaling,
                soft_cap,
                sinks,
                block_size=chunk_size,
            )
        )
    return torch.cat(outputs, 2)


def _by_heads_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    scaling: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One head after the other, with keys transposed first and the sum over keys divided last."""
    outputs = []
    for head in range(query.shape[1]):
        group = head * key.shape[1] // query.shape[1]
        scores = torch.matmul(key[:, group].float(), query[:, head].float().transpose(1, 2)).transpose(1, 2) * scaling
        if soft_cap is not None:
            scores = torch.tanh(scores / soft_cap) * soft_cap
        scores = scores + bias[:, 0]
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks[head].float() - top)
        outputs.append((weights @ value[:, group].float()) / total)
    return torch.stack(outputs, 1).to(query.dtype)


RECODED_ATTENTION = {
    "blocks": _blocked_attention,
    "split-keys": _split_attention,
    "grouped": _grouped_attention,
    "chunks": _chunked_attention,
    "by-heads": _by_heads_attention,
}


def _register(name: str, compute: Callable[..., Tensor]) -> str:
    """Register `compute` as an attention kernel; soft caps and sinks are passed on."""

    def kernel(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **options: object,
    ) -> tuple[Tensor, None]:
        bias = _bias_of(attention_mask, query, key)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = compute(query, key, value, bias, scale, softcap, s_aux)
        return output.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register(name, kernel)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    return name


def _use_kernel(module: nn.Module, name: str) -> None:
    """Make a single attention module call another kernel; masks stay the model's."""
    module.config = copy.copy(module.config)
    module.config._attn_implementation = name


class OwnAttention:
    """Projections, head norms, rotation, kernel and output projection as separate methods, with the same result."""

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, N, D] each."""
        if hasattr(self, "query_key_value"):
            fused = self.query_key_value(hidden)
            return fused.view(*fused.shape[:-1], -1, 3 * self.head_size).chunk(3, dim=-1)
        if hasattr(self, "qkv_proj"):
            kv_size = self.num_key_value_heads * self.head_dim
            fused = self.qkv_proj(hidden)
            parts = fused.split([fused.shape[-1] - 2 * kv_size, kv_size, kv_size], dim=-1)
        else:
            parts = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        return tuple(part.view(*part.shape[:-1], -1, self.head_dim) for part in parts)

    def normalise(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "q_norm"):
            return query, key
        return self.normalise_one(self.q_norm, query), self.normalise_one(self.k_norm, key)

    def normalise_one(self, norm: nn.Module, states: Tensor) -> Tensor:
        if norm.weight.numel() == states.shape[-1]:
            return norm(states)
        return norm(states.flatten(-2)).view(states.shape)

    def rotates(self) -> bool:
        return "Cohere2" not in type(self).__name__ or self.sliding_window is not None

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N, T, D] each."""
        return _modeling(self).apply_rotary_pos_emb(query, key, cos, sin)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[B, T, N, D]."""
        kernel = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, _modeling(self).eager_attention_forward
        )
        options = {}
        if hasattr(self, "sinks"):
            options["s_aux"] = self.sinks
        if getattr(self, "attn_logit_softcapping", None) is not None:
            options["softcap"] = self.attn_logit_softcapping
        return kernel(self, query, key, value, mask, dropout=0.0, scaling=self.scaling, **options)[0]

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: object = None,
        **options: object,
    ) -> tuple[Tensor, None]:
        query, key, value = self.project(hidden_states)
        query, key = self.normalise(query, key)
        query, key, value = (states.transpose(1, 2) for states in (query, key, value))
        if self.rotates():
            query, key = self.rotate(query, key, *position_embeddings)
        cache = past_key_values if past_key_values is not None else options.get("layer_past")
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        output = self.attend(query, key, value, attention_mask).reshape(*hidden_states.shape[:-1], -1)
        return (self.dense if hasattr(self, "dense") else self.o_proj)(output), None


class OwnMlp:
    """Two projections, an activation and a product as separate methods, with the same result."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if hasattr(self, "gate_up_proj"):
            return self.gate_up_proj(x).chunk(2, dim=-1)
        return self.gate_proj(x), self.up_proj(x)

    def multiply(self, gate: Tensor, up: Tensor) -> Tensor:
        return (self.activation_fn if hasattr(self, "activation_fn") else self.act_fn)(gate) * up

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.multiply(*self.project(x)))


class OwnLayer:
    """A layer with two residual additions, and norms before them, or after as in OLMo 2."""

    def add(self, residual: Tensor, update: Tensor) -> Tensor:
        return residual + update * getattr(self, "residual_multiplier", 1.0)

    def add_attention(self, residual: Tensor, update: Tensor) -> Tensor:
        return self.add(residual, update)

    def add_mlp(self, residual: Tensor, update: Tensor) -> Tensor:
        return self.add(residual, update)

    def forward(self, hidden_states: Tensor, **options: object) -> Tensor:
        residual = hidden_states
        if hasattr(self, "post_feedforward_layernorm"):
            update = self.post_attention_layernorm(self.self_attn(hidden_states=residual, **options)[0])
            residual = self.add_attention(residual, update)
            return self.add_mlp(residual, self.post_feedforward_layernorm(self.mlp(residual)))
        update = self.self_attn(hidden_states=self.input_layernorm(residual), **options)[0]
        residual = self.add_attention(residual, update)
        update = self.mlp(self.post_attention_layernorm(residual))
        return self.add_mlp(residual, update[0] if isinstance(update, tuple) else update)


def _norm_scale(norm: nn.Module) -> Tensor:
    """Return the factor of a norm, in float32."""
    return norm.weight.float() + (1.0 if "Gemma" in type(norm).__name__ else 0.0)


def _epsilon(norm: nn.Module) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def _set_epsilon(norm: nn.Module, value: float) -> None:
    setattr(norm, "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps", value)


def _is_centred(norm: nn.Module) -> bool:
    return "LayerNorm" in type(norm).__name__


class FusedNorm:
    """All in float32, rounded once: the sum of squares as a product, then division by the root."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        if _is_centred(self):
            x = x - x.sum(-1, keepdim=True) / x.shape[-1]
        squares = torch.einsum("...h,...h->...", x, x)[..., None]
        y = x / torch.sqrt(squares / x.shape[-1] + _epsilon(self)) * _norm_scale(self)
        if getattr(self, "bias", None) is not None:
            y = y + self.bias.float()
        return y.to(hidden_states.dtype)


class PrescaledNorm:
    """The weight is multiplied first; the sum of squares is taken over two halves."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        if _is_centred(self):
            x = x - x.mean(-1, keepdim=True)
        first, second = x.square().chunk(2, dim=-1)
        mean_square = (first.sum(-1, keepdim=True) + second.sum(-1, keepdim=True)) / x.shape[-1]
        y = (x * _norm_scale(self)) * (mean_square + _epsilon(self)).rsqrt()
        if getattr(self, "bias", None) is not None:
            y = y + self.bias.float()
        return y.to(hidden_states.dtype)


class SplitSumLinear:
    """A product in parts of the inputs, summed in float32 and rounded once (split-K)."""

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(x.float().split(24, dim=-1), self.weight.float().split(24, dim=-1), strict=True)
        total = sum(F.linear(states, weight) for states, weight in parts)
        if self.bias is not None:
            total = total + self.bias.float()
        return total.to(x.dtype)


class ChunkedHead:
    """Logits in chunks of the vocabulary, the last one smaller."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.linear(x, weight) for weight in self.weight.split(88)], dim=-1)


class FusedProjections(OwnAttention):
    """One product for query, key and value."""

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layers = self.q_proj, self.k_proj, self.v_proj
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        fused = F.linear(hidden, torch.cat([layer.weight for layer in layers]), bias)
        parts = fused.split([layer.out_features for layer in layers], dim=-1)
        return tuple(part.reshape(*part.shape[:-1], -1, self.head_dim) for part in parts)


class FusedMlp(OwnMlp):
    """One product for gate and up; silu as x / (1 + exp(-x)) in float32 where the activation is silu."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if hasattr(self, "gate_up_proj"):
            gate, up = self.gate_up_proj.weight.chunk(2)
            return F.linear(x, gate), F.linear(x, up)
        fused = F.linear(x, torch.cat([self.up_proj.weight, self.gate_proj.weight]))
        up, gate = fused.chunk(2, dim=-1)
        return gate, up

    def multiply(self, gate: Tensor, up: Tensor) -> Tensor:
        activation = self.activation_fn if hasattr(self, "activation_fn") else self.act_fn
        if "silu" in type(activation).__name__.lower():
            gate32 = gate.float()
            return (gate32 / (1.0 + torch.exp(-gate32)) * up.float()).to(up.dtype)
        return (activation(gate.float()) * up.float()).to(up.dtype)


class DividedMlp(OwnMlp):
    """Tensor parallel over two ranks: halves of the intermediate size, their outputs summed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        product = self.multiply(*self.project(x))
        pairs = zip(product.float().chunk(2, -1), self.down_proj.weight.float().chunk(2, -1), strict=True)
        return sum(F.linear(states, weight) for states, weight in pairs).to(x.dtype)


class ComplexRotary(OwnAttention):
    """Rotation by complex numbers in float32."""

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rotary_size = cos.shape[-1]
        turn = torch.complex(cos[..., : rotary_size // 2].float(), sin[..., : rotary_size // 2].float())[:, None]

        def turned(states: Tensor) -> Tensor:
            pairs = states[..., :rotary_size].float().unflatten(-1, (2, -1)).transpose(-1, -2).contiguous()
            product = torch.view_as_complex(pairs) * turn
            rotated = torch.view_as_real(product).transpose(-1, -2).flatten(-2).to(states.dtype)
            return torch.cat([rotated, states[..., rotary_size:]], -1)

        return turned(query), turned(key)


class InterleavedLayoutRotary(OwnAttention):
    """Halves are interleaved into pairs, the pairs rotated, and the interleaving undone."""

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        half = cos.shape[-1] // 2
        cos, sin = cos[:, None, :, :half].float(), sin[:, None, :, :half].float()

        def turned(states: Tensor) -> Tensor:
            woven = torch.stack([states[..., :half], states[..., half : 2 * half]], -1).flatten(-2).float()
            even, odd = woven[..., 0::2], woven[..., 1::2]
            woven = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
            rotated = torch.cat([woven[..., 0::2], woven[..., 1::2]], -1).to(states.dtype)
            return torch.cat([rotated, states[..., 2 * half :]], -1)

        return turned(query), turned(key)


class HalvesLayoutRotary(OwnAttention):
    """Pairs are laid out as halves, rotated, and laid out as pairs again (GLM-4, Cohere 2)."""

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        size = cos.shape[-1]
        if "Cohere2" in type(self).__name__:
            cos, sin = cos[:, None, :, 0::2].float(), sin[:, None, :, 0::2].float()
        else:
            cos, sin = cos[:, None, :, : size // 2].float(), sin[:, None, :, : size // 2].float()

        def turned(states: Tensor) -> Tensor:
            first, second = states[..., 0:size:2].float(), states[..., 1:size:2].float()
            halves = torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
            rotated = halves.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2).to(states.dtype)
            return torch.cat([rotated, states[..., size:]], -1)

        return turned(query), turned(key)


class Float32Residual(OwnLayer):
    """Added in place in float32, rounded once."""

    def add(self, residual: Tensor, update: Tensor) -> Tensor:
        total = update.float().mul_(getattr(self, "residual_multiplier", 1.0))
        return total.add_(residual.float()).to(residual.dtype)


class SortedExperts:
    """Pairs of token and slot sorted by expert, computed in runs, scattered back and summed over slots."""

    def expert(self, index: int, states: Tensor) -> Tensor:
        if self.is_transposed:
            product = self._apply_gate(states @ self.gate_up_proj[index] + self.gate_up_proj_bias[index])
            return product @ self.down_proj[index] + self.down_proj_bias[index]
        gate, up = F.linear(states, self.gate_up_proj[index]).chunk(2, dim=-1)
        return F.linear(self.act_fn(gate) * up, self.down_proj[index])

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        num_slots = top_k_index.shape[-1]
        order = top_k_index.flatten().argsort(stable=True)
        counts = top_k_index.flatten().bincount(minlength=self.num_experts).tolist()
        runs = hidden_states[order // num_slots].split(counts)
        outputs = torch.cat([self.expert(index, run) for index, run in enumerate(runs)])
        places = torch.empty_like(outputs)
        places[order] = outputs
        weighted = places.unflatten(0, (-1, num_slots)).float() * top_k_weights.float()[..., None]
        return weighted.sum(1).to(hidden_states.dtype)


class DenseExperts(SortedExperts):
    """Every expert on every token, weighted with zeros where it was not chosen."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weights = torch.zeros(hidden_states.shape[0], self.num_experts)
        weights.scatter_(1, top_k_index, top_k_weights.float())
        total = torch.zeros_like(hidden_states, dtype=torch.float32)
        for index in range(self.num_experts):
            total += self.expert(index, hidden_states).float() * weights[:, index, None]
        return total.to(hidden_states.dtype)


class ChosenSoftmaxRouter:
    """Softmax over the chosen logits, which is the renormalised softmax over all."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        top, index = logits.float().topk(self.top_k, dim=-1)
        weights = torch.exp(top - top.logsumexp(-1, keepdim=True))
        return logits, weights.to(logits.dtype) if "Qwen3" in type(self).__name__ else weights, index


class NormalisedLogits:
    """The model returns logprobs (logits minus their logsumexp), like an engine."""

    def forward(self, *args: object, **options: object) -> object:
        output = super().forward(*args, **options)
        logits = output.logits.float()
        output.logits = logits - logits.logsumexp(-1, keepdim=True)
        return output


# ---------------------------------------------------------------------------------------------------------------------
# Own classes that are wrong


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16)


class Bf16Linear:
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else _bf16(self.bias)
        return F.linear(_bf16(x), _bf16(self.weight), bias).to(x.dtype)


class Bf16Attention(OwnAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        bias = _bias_of(mask, query, key)
        query16, key16, value16 = _bf16(query), _bf16(key), _bf16(value)
        soft_cap = getattr(self, "attn_logit_softcapping", None)
        output = _blocked_attention(query16, key16, value16, bias, self.scaling, soft_cap)
        return output.transpose(1, 2).to(query.dtype)


class Bf16Mlp(OwnMlp):
    def forward(self, x: Tensor) -> Tensor:
        gate = F.linear(_bf16(x), _bf16(self.gate_proj.weight))
        up = F.linear(_bf16(x), _bf16(self.up_proj.weight))
        return F.linear(self.act_fn(gate) * up, _bf16(self.down_proj.weight)).to(x.dtype)


class Bf16Norm:
    def forward(self, hidden_states: Tensor) -> Tensor:
        x = _bf16(hidden_states)
        if _is_centred(self):
            y = F.layer_norm(x, x.shape[-1:], _bf16(self.weight), _bf16(self.bias), _epsilon(self))
        else:
            y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _epsilon(self)) * _bf16(_norm_scale(self))
        return y.to(hidden_states.dtype)


class Bf16Experts(SortedExperts):
    def expert(self, index: int, states: Tensor) -> Tensor:
        gate, up = F.linear(_bf16(states), _bf16(self.gate_up_proj[index])).chunk(2, dim=-1)
        return F.linear(self.act_fn(gate) * up, _bf16(self.down_proj[index])).to(states.dtype)


class Bf16Router:
    """The product of states and weights has bf16 inputs; `_round_router` rounds the weights."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(_bf16(hidden_states).to(hidden_states.dtype))


class Bf16Logprobs:
    def forward(self, *args: object, **options: object) -> object:
        output = super().forward(*args, **options)
        output.logits = F.log_softmax(_bf16(output.logits), dim=-1).float()
        return output


class TemperedLogits:
    def forward(self, *args: object, **options: object) -> object:
        output = super().forward(*args, **options)
        output.logits = output.logits / 1.1
        return output


class TiledGroups(OwnAttention):
    """Key heads are tiled over the query heads, not repeated."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat(1, times, 1, 1), value.repeat(1, times, 1, 1)
        return _blocked_attention(query, key, value, _bias_of(mask, query, key), self.scaling).transpose(1, 2)


class ShiftedWindow(OwnAttention):
    """The sliding window is one key shorter."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        bias = _bias_of(mask, query, key)
        places = torch.arange(query.shape[2]) + key.shape[2] - query.shape[2]
        window = self.sliding_window or self.config.sliding_window
        outside = places[:, None] - torch.arange(key.shape[2])[None, :] >= window - 1
        bias = bias.masked_fill(outside, torch.finfo(torch.float32).min)
        soft_cap = getattr(self, "attn_logit_softcapping", None)
        sinks = getattr(self, "sinks", None)
        return _blocked_attention(query, key, value, bias, self.scaling, soft_cap, sinks).transpose(1, 2)


class SeenNextToken(OwnAttention):
    """The causal mask is shifted by one key: a token sees its successor."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        bias = _bias_of(mask, query, key)
        bias = torch.cat([bias[..., :1], bias[..., :-1]], -1)
        return _blocked_attention(query, key, value, bias, self.scaling).transpose(1, 2)


class ForgottenTail(OwnAttention):
    """The last block of keys is dropped if it is not full and there is another block."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        bias = _bias_of(mask, query, key)
        full = key.shape[2] // 16 * 16
        places = torch.arange(query.shape[2])[:, None]
        dropped = (torch.arange(key.shape[2])[None, :] >= full) & (torch.arange(key.shape[2])[None, :] < places)
        bias = bias.masked_fill(dropped, torch.finfo(torch.float32).min)
        return _blocked_attention(query, key, value, bias, self.scaling).transpose(1, 2)


class LostChunkBoundary(OwnAttention):
    """A prefill in chunks of 20: a chunk does not see the last key of the chunk before it."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        bias = _bias_of(mask, query, key)
        chunk = torch.arange(query.shape[2])[:, None] // 20
        lost = torch.arange(key.shape[2])[None, :] == chunk * 20 - 1
        bias = bias.masked_fill(lost, torch.finfo(torch.float32).min)
        return _blocked_attention(query, key, value, bias, self.scaling).transpose(1, 2)


class FirstChunkAlone(OwnAttention):
    """A prefill in chunks of 48: later chunks see only themselves."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        bias = _bias_of(mask, query, key)
        other = torch.arange(query.shape[2])[:, None] // 48 != torch.arange(key.shape[2])[None, :] // 48
        bias = bias.masked_fill(other, torch.finfo(torch.float32).min)
        return _blocked_attention(query, key, value, bias, self.scaling).transpose(1, 2)


class OtherBlock(OwnAttention):
    """Keys and values of positions 16 to 31 come from another sequence's cached block."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        key, value = key.clone(), value.clone()
        if key.shape[2] >= 32:
            key[:, :, 16:32] = self.other_key.to(key)
            value[:, :, 16:32] = self.other_value.to(value)
        return super().attend(query, key, value, mask)


class KeepsBlock(OwnAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        self.other_key = key[:, :, 16:32].clone()
        self.other_value = value[:, :, 16:32].clone()
        return super().attend(query, key, value, mask)


class Fp8Cache(OwnAttention):
    """Keys and values go through e4m3 with a scale that is too small, so that large ones are cut off."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        def stored(states: Tensor) -> Tensor:
            scale = 0.0035
            scaled = (states.float() / scale).clamp(-448.0, 448.0)
            return (scaled.to(torch.float8_e4m3fn).float() * scale).to(states.dtype)

        return super().attend(query, stored(key), stored(value), mask)


class Fp8CacheOtherScales(OwnAttention):
    """Keys are written to an e4m3 cache with one scale and read with another."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        stored = (key.float() / 0.02).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return super().attend(query, (stored.float() * 0.018).to(key.dtype), value, mask)


class UnnormalisedQuery(OwnAttention):
    def normalise(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query, self.normalise_one(self.k_norm, key)


class UnnormalisedHeads(OwnAttention):
    def normalise(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query, key


class ShardNorm:
    """The mean square is taken over the half that a tensor-parallel rank holds."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float().unflatten(-1, (2, -1))
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _epsilon(self))
        return (y.flatten(-2) * self.weight.float()).to(hidden_states.dtype)


class UncentredNorm:
    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _epsilon(self)) * self.weight.float()
        if getattr(self, "bias", None) is not None:
            y = y + self.bias.float()
        return y.to(hidden_states.dtype)


class PlainWeightNorm:
    """Multiplies by the weight where 1 + weight is meant."""

    def forward(self, x: Tensor) -> Tensor:
        return (self._norm(x.float()) * self.weight.float()).type_as(x)


class IdentityNorm:
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class PairsRotary(OwnAttention):
    """Neighbouring channels are rotated as pairs where halves are meant."""

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        half = cos.shape[-1] // 2
        cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]

        def turned(states: Tensor) -> Tensor:
            even, odd = states[..., 0 : 2 * half : 2], states[..., 1 : 2 * half : 2]
            rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
            return torch.cat([rotated, states[..., 2 * half :]], -1)

        return turned(query), turned(key)


class HalvesRotary(OwnAttention):
    """Halves are rotated where neighbouring channels are meant (GLM-4, Cohere 2)."""

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        size = cos.shape[-1]
        cos, sin = cos[:, None, :, : size // 2], sin[:, None, :, : size // 2]

        def turned(states: Tensor) -> Tensor:
            first, second = states[..., : size // 2], states[..., size // 2 : size]
            return torch.cat([first * cos - second * sin, second * cos + first * sin, states[..., size:]], -1)

        return turned(query), turned(key)


class Bf16Rotary(OwnAttention):
    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotate(query, key, _bf16(cos).to(cos.dtype), _bf16(sin).to(sin.dtype))


class UnrotatedKey(OwnAttention):
    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotate(query, key, cos, sin)[0], key


class ShiftedPositions:
    """A pad between prompt and response is counted: positions from 16 on are one too high."""

    def forward(self, x: Tensor, position_ids: Tensor, *args: object, **options: object) -> tuple[Tensor, Tensor]:
        return super().forward(x, position_ids + (position_ids >= 16).long(), *args, **options)


class RepeatedPosition:
    """The response's first token gets the position of the prompt's last one, and so on."""

    def forward(self, x: Tensor, position_ids: Tensor, *args: object, **options: object) -> tuple[Tensor, Tensor]:
        return super().forward(x, position_ids - (position_ids >= 12).long(), *args, **options)


class UnscaledUpdate(OwnLayer):
    """The multiplier of the residual branch is missing after the MLP."""

    def add_mlp(self, residual: Tensor, update: Tensor) -> Tensor:
        return residual + update


class DroppedResidual(OwnLayer):
    def add_mlp(self, residual: Tensor, update: Tensor) -> Tensor:
        return update


class Bf16Residual(OwnLayer):
    def add_attention(self, residual: Tensor, update: Tensor) -> Tensor:
        return (_bf16(residual) + _bf16(update)).to(residual.dtype)


class TwiceAdded(OwnLayer):
    """Two tensor-parallel ranks each add the residual before the sum over ranks."""

    def add_attention(self, residual: Tensor, update: Tensor) -> Tensor:
        return 2 * residual + update


class SwappedProduct(OwnMlp):
    """The activation is applied to up, not to gate."""

    def multiply(self, gate: Tensor, up: Tensor) -> Tensor:
        return super().multiply(up, gate)


class ClampedProduct(OwnMlp):
    """The fused kernel clamps the product as another model's does."""

    def multiply(self, gate: Tensor, up: Tensor) -> Tensor:
        return super().multiply(gate, up).clamp(-0.7, 0.7)


class Bf16Product(OwnMlp):
    def multiply(self, gate: Tensor, up: Tensor) -> Tensor:
        activation = self.activation_fn if hasattr(self, "activation_fn") else self.act_fn
        return (_bf16(activation(gate)) * _bf16(up)).to(up.dtype)


class LostTailLinear:
    """The last 5 inputs are not in a multiple of the kernel's block and are left out."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x[..., :-5], self.weight[:, :-5], self.bias)


class RepeatedChunkHead:
    """The last chunk of logits is written from the buffer of the chunk before it."""

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(x, self.weight)
        logits[..., -76:] = logits[..., -152:-76].clone()
        return logits


class TwiceBiasedLinear:
    """Two tensor-parallel ranks each add the bias before the sum over ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class CapacityExperts(SortedExperts):
    """An expert takes at most a set number of tokens; the others are dropped."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weights = top_k_weights.clone()
        for index in range(self.num_experts):
            tokens, slots = torch.where(top_k_index == index)
            weights[tokens[20:], slots[20:]] = 0.0
        return super().forward(hidden_states, top_k_index, weights)


class UnweightedExperts(SortedExperts):
    """Outputs of the chosen experts are averaged, not weighted."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index, torch.full_like(top_k_weights, 1.0 / top_k_index.shape[1]))


class ConcatenatedGateExperts:
    """Reads gate and up as two halves where they are interleaved."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return super()._apply_gate(torch.stack([gate, up], -1).flatten(-2))


class UnshiftedGateExperts:
    """Leaves the one out of (up + 1) * glu."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate = gate_up[..., ::2].clamp(max=self.limit)
        up = gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return up * gate * torch.sigmoid(gate * self.alpha)


# ---------------------------------------------------------------------------------------------------------------------
# Changes of weights, buffers and settings

Make = Callable[[PreTrainedModel], None]


def _own(path: str, own: type) -> Make:
    """Mix a class into one module."""
    return lambda model: _swap(model.get_submodule(path), own)


def _on(path: str, change: Callable[[nn.Module], None]) -> Make:
    def make(model: PreTrainedModel) -> None:
        with torch.no_grad():
            change(model.get_submodule(path))

    return make


def _set(path: str, name: str, value: object) -> Make:
    return _on(path, lambda module: setattr(module, name, value))


def _set_config(name: str, value: object) -> Make:
    return lambda model: setattr(model.config, name, value)


def _on_weight(path: str, change: Callable[[Tensor], Tensor], name: str = "weight") -> Make:
    """Replace a parameter by the result of `change`."""

    def replace(module: nn.Module) -> None:
        parameter = getattr(module, name)
        parameter.copy_(change(parameter.clone()))

    return _on(path, replace)


def _all(*makes: Make) -> Make:
    def make(model: PreTrainedModel) -> None:
        for one in makes:
            one(model)

    return make


def _noise(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _age(module: nn.Module, share: float = 0.05, norms: bool = True) -> None:
    """Weights of an earlier update: every parameter is moved by a fraction of its spread."""
    for i, (name, parameter) in enumerate(module.named_parameters()):
        if norms or "norm" not in name:
            spread = parameter.float().std().item()
            parameter.add_((share * spread * _noise(parameter.shape, 70 + i)).to(parameter.dtype))


def _add_adapter(linear: nn.Module, scale: float, seed: int) -> None:
    """An adapter of rank 4 merged with too large a scale: the excess is added."""
    down = _noise((4, linear.in_features), seed) / math.sqrt(linear.in_features)
    up = _noise((linear.out_features, 4), seed + 1) / 2
    linear.weight.add_((scale * up @ down).to(linear.weight.dtype))


def _untie(model: PreTrainedModel) -> None:
    """The head is a separate copy that missed the last update."""
    weight = model.get_output_embeddings().weight.detach().clone()
    moved = weight + (0.04 * weight.float().std() * _noise(weight.shape, 11)).to(weight.dtype)
    model.get_output_embeddings().weight = nn.Parameter(moved)


def _frequencies(theta: float, rotary_size: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, rotary_size, 2).float() / rotary_size)


def _rotary(architecture: str) -> str:
    return f"{ARCHITECTURES[architecture].layers.rsplit('.', 1)[0]}.rotary_emb"


def _drop_bias(linear: nn.Module) -> None:
    linear.bias = None


def _round_router(path: str) -> Make:
    return _all(_on_weight(path, lambda weight: _bf16(weight).to(weight.dtype)), _own(path, Bf16Router))


def _swap_heads(weight: Tensor) -> Tensor:
    """Two key heads in the wrong order."""
    return torch.cat(weight.chunk(2)[::-1])


def _exchange(name_a: str, name_b: str) -> Callable[[nn.Module], None]:
    def exchange(module: nn.Module) -> None:
        first, second = module.get_submodule(name_a).weight, module.get_submodule(name_b).weight
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)

    return exchange


def _on_experts(path: str, change: Callable[[Tensor], Tensor]) -> Make:
    """Reorder the experts' weights."""

    def reorder(experts: nn.Module) -> None:
        for parameter in experts.parameters():
            parameter.copy_(change(parameter.clone()))

    return _on(path, reorder)


def _second_and_third(parameter: Tensor) -> Tensor:
    order = list(range(len(parameter)))
    order[1], order[2] = order[2], order[1]
    return parameter[order]


def _with_other_block(path: str) -> Make:
    """Run another sequence, cache a block of its keys and values, and read it for every sequence."""

    def make(model: PreTrainedModel) -> None:
        attention = model.get_submodule(path)
        tokens = torch.randint(8, REAL_TOKENS, (1, 40), generator=torch.Generator().manual_seed(5))
        plain_class = attention.__class__
        _swap(attention, KeepsBlock)
        with torch.no_grad():
            model(tokens, use_cache=False)
        attention.__class__ = plain_class
        _swap(attention, OtherBlock)

    return make


def _kernel_everywhere(kind: str) -> Make:
    """The whole model calls a registered kernel with a different implementation."""

    def make(model: PreTrainedModel) -> None:
        model.config._attn_implementation = _register(f"fifth_{kind}", RECODED_ATTENTION[kind])

    return make


def _kernel_in(path: str, kind: str) -> Make:
    return _on(path, lambda module: _use_kernel(module, _register(f"fifth_{kind}", RECODED_ATTENTION[kind])))


def _wrong_kernel_in(path: str, name: str, change: Callable[..., Tensor]) -> Make:
    return _on(path, lambda module: _use_kernel(module, _register(f"fifth_wrong_{name}", change)))


def _everywhere(suffixes: tuple[str, ...], own: type) -> Make:
    """Mix a class into every module whose name ends with this suffix."""

    def make(model: PreTrainedModel) -> None:
        for name, module in list(model.named_modules()):
            if name.endswith(suffixes):
                _swap(module, own)

    return make


def _own_model(own: type) -> Make:
    return lambda model: _swap(model, own)


def _nothing(model: PreTrainedModel) -> None:
    """B is identical to A; only the arms differ."""


# ---------------------------------------------------------------------------------------------------------------------
# Cases

CASES: list[Case] = []


def _fault(
    name: str,
    architecture: str,
    make: Make,
    modules: set[str],
    operators: set[str],
    why: str,
    arm_a: str = "dtype=fp32",
    arm_b: str = "dtype=fp32",
) -> None:
    CASES.append(
        Case(
            name=f"{architecture}-{name}",
            architecture=architecture,
            make=make,
            fault=Fault(modules=modules, operators=operators, why=why),
            inputs=_make_inputs(architecture),
            arm_a=arm_a,
            arm_b=arm_b,
        )
    )


def _harmless(
    name: str, architecture: str, make: Make = _nothing, arm_a: str = "dtype=fp32", arm_b: str = "dtype=fp32"
) -> None:
    CASES.append(
        Case(
            name=f"{architecture}-{name}",
            architecture=architecture,
            make=make,
            fault=None,
            inputs=_make_inputs(architecture),
            arm_a=arm_a,
            arm_b=arm_b,
        )
    )


def _fault_in(
    name: str,
    architecture: str,
    index: int,
    part: str,
    make_at: Callable[[str], Make],
    operators: set[str],
    why: str,
    others: tuple[str, ...] = (),
    **arms: str,
) -> None:
    """A fault in one part of a layer; `others` are parts that are equally right answers. "" is the layer itself."""
    layer = _layer(architecture, index)
    path = f"{layer}.{part}" if part else layer
    modules = {path} | {f"{layer}.{other}" if other else layer for other in others}
    _fault(name, architecture, make_at(path), modules, operators, why, **arms)


def _fault_in_attention(
    name: str, architecture: str, index: int, own: type, operators: set[str], why: str, **arms: str
) -> None:
    path = _attention(architecture, index)
    _fault(name, architecture, _own(path, own), {path}, operators, why, **arms)


def _fault_in_rotary(name: str, architecture: str, make: Make, why: str, index: int = 0, **arms: str) -> None:
    """Tables of all layers: the table's module, or the first attention that reads it, is right."""
    modules = {_rotary(architecture), _attention(architecture, index)}
    _fault(name, architecture, make, modules, {"rotary"}, why, **arms)


_BOTH_BF16 = {"arm_a": "dtype=bf16", "arm_b": "dtype=bf16"}
_BOTH_FP16 = {"arm_a": "dtype=fp16", "arm_b": "dtype=fp16"}
_FP32_TO_BF16 = {"arm_a": "dtype=fp32", "arm_b": "dtype=bf16"}


def _list_rotary_faults() -> None:
    for architecture, theta, size, arms in (
        ("qwen3", 1e4, 24, {}),
        ("glm4", 1e5, 8, {}),
        ("olmo2", 1e4, 16, _BOTH_BF16),
        ("deepseek_v3", 1e5, 8, {}),
    ):
        _fault_in_rotary(
            "rope-theta",
            architecture,
            _set(_rotary(architecture), "inv_freq", _frequencies(theta, size)),
            "the engine's configuration has another theta",
            **arms,
        )
    _fault_in_rotary(
        "rope-scaling-ignored",
        "llama",
        _set(_rotary("llama"), "inv_freq", _frequencies(1e4, 16)),
        "llama3 scaling of the frequencies is not read",
    )
    _fault_in_rotary(
        "rope-mscale-ignored",
        "gpt_oss",
        _set(_rotary("gpt_oss"), "attention_scaling", 1.0),
        "yarn's factor on cos and sin is left out",
    )
    _fault_in_rotary(
        "rope-local-theta-everywhere",
        "gemma3",
        _set(_rotary("gemma3"), "full_attention_inv_freq", _frequencies(1e4, 16)),
        "full layers read the table of the sliding ones",
        index=2,
    )
    _fault_in_rotary(
        "rope-linear-factor",
        "mistral",
        _on(_rotary("mistral"), lambda rotary: rotary.inv_freq.div_(2.0)),
        "positions are divided by 2 as by a linear scaling",
    )
    _fault_in_rotary(
        "rope-full-instead-of-partial",
        "phi3",
        _set(_rotary("phi3"), "inv_freq", _frequencies(1e4, 16)),
        "the partial rotary factor is not read",
    )
    for architecture, index in (("qwen2", 0), ("llama", 2), ("qwen3_moe", 4)):
        _fault_in_attention(
            "rotary-pairs",
            architecture,
            index,
            PairsRotary,
            {"rotary"},
            "neighbouring channels are rotated, not halves",
        )
    for architecture, index in (("glm4", 2), ("cohere2", 1)):
        _fault_in_attention(
            "rotary-halves",
            architecture,
            index,
            HalvesRotary,
            {"rotary"},
            "halves are rotated, not neighbouring channels",
        )
    _fault_in_attention("rotary-bf16-tables", "starcoder2", 3, Bf16Rotary, {"rotary"}, "cos and sin are kept in bf16")
    _fault_in_attention("rotary-bf16-tables", "granite", 0, Bf16Rotary, {"rotary"}, "cos and sin are kept in bf16")
    _fault_in_attention("rotary-key-missing", "mixtral", 3, UnrotatedKey, {"rotary"}, "keys are cached unrotated")
    for architecture, own in (
        ("qwen3", ShiftedPositions),
        ("glm4", ShiftedPositions),
        ("olmo2", RepeatedPosition),
        ("starcoder2", RepeatedPosition),
        ("qwen2_moe", ShiftedPositions),
    ):
        _fault_in_rotary(
            "positions-after-padding",
            architecture,
            _own(_rotary(architecture), own),
            "positions behind the prompt are off by one",
        )


def _list_norm_faults() -> None:
    for architecture, index, part, value in (
        ("qwen2", 0, "input_layernorm", 1e-3),
        ("granite", 2, "post_attention_layernorm", 1e-3),
        ("deepseek_v3", 2, "self_attn.q_a_layernorm", 1e-2),
        ("starcoder2", 4, "input_layernorm", 1e-2),
        ("gemma2", 1, "post_feedforward_layernorm", 1e-2),
        ("qwen3", 5, "self_attn.k_norm", 1e-2),
    ):
        others = ("self_attn",) if "self_attn" in part else ()
        _fault_in(
            "norm-eps",
            architecture,
            index,
            part,
            lambda path, value=value: _on(path, lambda norm: _set_epsilon(norm, value)),
            {"norm"},
            f"eps is {value}",
            others=others,
        )
    _fault(
        "final-norm-eps",
        "mixtral",
        _on("model.norm", lambda norm: _set_epsilon(norm, 1e-2)),
        {"model.norm"},
        {"norm"},
        "eps of the last norm is 1e-2",
    )
    for architecture, index, part in (
        ("qwen3_moe", 0, "k_norm"),
        ("gemma3", 5, "q_norm"),
        ("olmo2", 2, "k_norm"),
        ("deepseek_v3", 3, "kv_a_layernorm"),
    ):
        _fault_in(
            f"{part}-missing",
            architecture,
            index,
            f"self_attn.{part}",
            lambda path: _own(path, IdentityNorm),
            {"norm"},
            "the norm is not applied",
            others=("self_attn",),
        )
    for name, architecture, index, own, why in (
        ("q_norm-missing", "qwen3", 2, UnnormalisedQuery, "the engine's attention has no norm of queries"),
        ("head-norms-missing", "qwen3_moe", 3, UnnormalisedHeads, "the engine's attention has no head norms"),
    ):
        parts = ("self_attn.q_norm", "self_attn.k_norm")
        _fault_in(
            name,
            architecture,
            index,
            "self_attn",
            lambda path, own=own: _own(path, own),
            {"norm"},
            why,
            others=parts if own is UnnormalisedHeads else parts[:1],
        )
    _fault_in(
        "q_norm-per-rank",
        "olmo2",
        0,
        "self_attn.q_norm",
        lambda path: _own(path, ShardNorm),
        {"norm"},
        "each tensor-parallel rank normalises over its own half",
        others=("self_attn",),
    )
    _fault_in(
        "norm-not-centred",
        "cohere2",
        2,
        "input_layernorm",
        lambda path: _own(path, UncentredNorm),
        {"norm"},
        "the mean is not subtracted",
    )
    _fault_in(
        "norm-not-centred",
        "gpt_neox",
        0,
        "input_layernorm",
        lambda path: _own(path, UncentredNorm),
        {"norm"},
        "the mean is not subtracted",
    )
    _fault_in(
        "norm-weight-without-one",
        "gemma3",
        1,
        "pre_feedforward_layernorm",
        lambda path: _own(path, PlainWeightNorm),
        {"norm"},
        "weight is multiplied, not 1 + weight",
    )
    for architecture, index, part in (("starcoder2", 2, "post_attention_layernorm"), ("mistral", 0, "input_layernorm")):
        _fault_in(
            "norm-bf16",
            architecture,
            index,
            part,
            lambda path: _own(path, Bf16Norm),
            {"norm"},
            "the norm is computed in bf16",
        )


def _list_attention_faults() -> None:
    for architecture, index in (("gemma2", 2), ("gemma3", 3), ("cohere2", 1), ("gpt_oss", 2)):
        _fault_in_attention(
            "window-off-by-one",
            architecture,
            index,
            ShiftedWindow,
            {"attention"},
            "the sliding window has one key less",
        )
    _fault(
        "window-off-by-one",
        "mistral",
        _set_config("sliding_window", 30),
        {_attention("mistral", 0)},
        {"attention"},
        "the sliding window has one key more, in every layer",
    )
    for architecture, index, value in (
        ("gemma2", 0, 0.25),
        ("granite", 1, 0.25),
        ("qwen3", 3, 0.25),
        ("deepseek_v3", 4, 0.25),
        ("glm4", 4, 0.125),
    ):
        path = _attention(architecture, index)
        _fault(
            "score-scale",
            architecture,
            _set(path, "scaling", value),
            {path},
            {"attention"},
            f"scores are multiplied by {value}, a scale of another head size",
        )
    for architecture, index in (("llama", 2), ("phi3", 0), ("mixtral", 1)):
        _fault_in_attention(
            "groups-tiled", architecture, index, TiledGroups, {"attention"}, "key heads are tiled, not repeated"
        )
    for architecture, index in (("qwen2", 1), ("mistral", 2), ("gpt_neox", 3)):
        _fault_in_attention(
            "chunk-boundary",
            architecture,
            index,
            LostChunkBoundary,
            {"attention"},
            "a chunk of a prefill does not see the last key before it",
        )
    for architecture, index in (("qwen2_moe", 3), ("starcoder2", 0)):
        _fault_in_attention(
            "chunk-sees-itself",
            architecture,
            index,
            FirstChunkAlone,
            {"attention"},
            "later chunks of a prefill see only themselves",
        )
    for architecture, index in (("llama", 1), ("qwen3", 0), ("gemma3", 2), ("granite", 4)):
        path = _attention(architecture, index)
        _fault(
            "other-sequence-block",
            architecture,
            _with_other_block(path),
            {path},
            {"attention"},
            "places 16 to 31 come from the cached block of another sequence",
        )
    for architecture, index in (("qwen2", 4), ("llama", 0), ("qwen3_moe", 1)):
        _fault_in_attention(
            "fp8-cache-cut-off",
            architecture,
            index,
            Fp8Cache,
            {"attention"},
            "the scale of the fp8 cache is too small",
        )
    for architecture, index in (("gemma3", 4), ("phi3", 3), ("gpt_oss", 0)):
        _fault_in_attention(
            "fp8-cache-two-scales",
            architecture,
            index,
            Fp8CacheOtherScales,
            {"attention"},
            "keys are written with one scale and read with another",
        )
    for architecture, index in (("llama", 3), ("glm4", 0), ("gemma2", 4)):
        _fault_in_attention(
            "attention-bf16", architecture, index, Bf16Attention, {"attention"}, "the kernel computes in bf16"
        )
    _fault_in_attention(
        "mask-off-by-one",
        "qwen3_moe",
        2,
        SeenNextToken,
        {"attention"},
        "a token sees its successor",
        **_BOTH_BF16,
    )
    _fault_in_attention(
        "key-tail-lost", "olmo2", 4, ForgottenTail, {"attention"}, "the last block of keys is read only if full"
    )
    path = _attention("gpt_oss", 1)
    _fault(
        "sinks-left-out",
        "gpt_oss",
        _wrong_kernel_in(
            path,
            "no_sinks",
            lambda query, key, value, bias, scaling, soft_cap, sinks: _blocked_attention(
                query, key, value, bias, scaling, soft_cap
            ),
        ),
        {path},
        {"attention"},
        "the kernel leaves the sinks out",
    )
    path = _attention("deepseek_v3", 0)
    _fault(
        "values-in-fp8",
        "deepseek_v3",
        _wrong_kernel_in(
            path,
            "fp8_values",
            lambda query, key, value, bias, scaling, soft_cap, sinks: _blocked_attention(
                query, key, value.to(torch.float8_e4m3fn).to(value.dtype), bias, scaling
            ),
        ),
        {path},
        {"attention"},
        "the kernel reads values in fp8",
    )
    path = _attention("gemma2", 3)
    _fault(
        "soft-cap-missing",
        "gemma2",
        _set(path, "attn_logit_softcapping", None),
        {path},
        {"soft_cap", "attention"},
        "one layer's scores are not capped",
    )
    _fault(
        "soft-cap-missing-in-kernel",
        "gemma2",
        _all(*(_on(_attention("gemma2", index), lambda module: _use_kernel(module, "sdpa")) for index in range(5))),
        {_attention("gemma2", 0)},
        {"soft_cap", "attention"},
        "the kernel has no soft cap, in every layer",
    )


def _list_linear_faults() -> None:
    for architecture, index, part, arms in (
        ("qwen2", 2, "self_attn.k_proj", {}),
        ("glm4", 1, "self_attn.v_proj", {}),
        ("starcoder2", 3, "mlp.c_fc", {}),
        ("gpt_neox", 4, "attention.dense", {}),
        ("gpt_oss", 3, "self_attn.o_proj", {}),
        ("qwen2_moe", 0, "self_attn.q_proj", _BOTH_BF16),
    ):
        _fault_in(
            "bias-dropped",
            architecture,
            index,
            part,
            lambda path: _on(path, _drop_bias),
            {"linear"},
            "the loader skips the bias",
            **arms,
        )
    for architecture, index, part, arms in (
        ("qwen3", 3, "mlp.down_proj", {}),
        ("mixtral", 3, "self_attn.o_proj", {}),
        ("gemma2", 0, "mlp.gate_proj", {}),
        ("mistral", 1, "self_attn.v_proj", _BOTH_FP16),
    ):
        _fault_in(
            "lora-scale",
            architecture,
            index,
            part,
            lambda path: _on(path, lambda linear: _add_adapter(linear, 0.3, 21)),
            {"linear"},
            "the adapter is merged with twice its scale",
            **arms,
        )
    _fault(
        "lora-scale-all-layers",
        "llama",
        _all(
            *(
                _on(f"{_attention('llama', index)}.{part}", lambda linear: _add_adapter(linear, 0.3, 31))
                for index in range(5)
                for part in ("q_proj", "v_proj")
            )
        ),
        {f"{_attention('llama', 0)}.q_proj", f"{_attention('llama', 0)}.v_proj"},
        {"linear"},
        "adapters of all layers are merged with twice their scale",
    )
    for architecture, index, first in (
        ("phi3", 3, "input_layernorm"),
        ("cohere2", 3, "input_layernorm"),
        ("gemma3", 0, "input_layernorm"),
    ):
        _fault_in(
            "stale-layer",
            architecture,
            index,
            first,
            lambda path: _on(path.rsplit(".", 1)[0], _age),
            {"norm"},
            "one layer kept its weights of an earlier update, norms too",
        )
    for architecture, index in (("llama", 4), ("olmo2", 1)):
        _fault_in(
            "stale-layer-linears",
            architecture,
            index,
            "self_attn.q_proj",
            lambda path: _on(path.rsplit(".", 2)[0], lambda layer: _age(layer, norms=False)),
            {"linear"},
            "one layer's linear weights are of an earlier update",
            others=("self_attn.k_proj", "self_attn.v_proj"),
        )
    for architecture, index, part in (
        ("qwen3", 4, "mlp.down_proj"),
        ("gpt_neox", 1, "attention.query_key_value"),
        ("phi3", 2, "self_attn.o_proj"),
        ("deepseek_v3", 3, "self_attn.kv_b_proj"),
    ):
        _fault_in(
            "linear-bf16",
            architecture,
            index,
            part,
            lambda path: _own(path, Bf16Linear),
            {"linear"},
            "one linear layer computes in bf16",
        )
    for architecture, index in (("granite", 4), ("cohere2", 0)):
        _fault_in(
            "mlp-bf16",
            architecture,
            index,
            "mlp",
            lambda path: _own(path, Bf16Mlp),
            {"linear"},
            "one MLP computes in bf16, from its first product on",
            others=("mlp.gate_proj", "mlp.up_proj"),
        )
    for architecture, index, part in (("granite", 0, "k_proj"), ("qwen2_moe", 2, "k_proj")):
        _fault_in(
            "key-heads-swapped",
            architecture,
            index,
            f"self_attn.{part}",
            lambda path: _on_weight(path, _swap_heads),
            {"linear"},
            "two ranks' key heads are merged in the wrong order",
        )
    _fault_in(
        "ranks-reversed",
        "mistral",
        3,
        "self_attn.o_proj",
        lambda path: _on_weight(path, lambda weight: torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)),
        {"linear"},
        "columns of a row-parallel layer are merged in the wrong order",
    )
    _fault_in(
        "ranks-interleaved",
        "phi3",
        1,
        "mlp.gate_up_proj",
        lambda path: _on_weight(path, lambda weight: torch.cat([weight.chunk(4)[i] for i in (0, 2, 1, 3)])),
        {"linear"},
        "gate and up of two ranks are concatenated rank by rank",
    )
    _fault_in(
        "qkv-layout",
        "gpt_neox",
        2,
        "attention.query_key_value",
        lambda path: _on_weight(path, lambda weight: weight.unflatten(0, (4, 3, 16)).transpose(0, 1).flatten(0, 2)),
        {"linear"},
        "rows are laid out by query, key, value, where the model reads them by heads",
    )
    _fault_in(
        "input-tail-lost",
        "qwen2",
        3,
        "mlp.down_proj",
        lambda path: _own(path, LostTailLinear),
        {"linear"},
        "the kernel leaves the last inputs out",
    )
    _fault_in(
        "bias-added-twice",
        "starcoder2",
        1,
        "self_attn.o_proj",
        lambda path: _own(path, TwiceBiasedLinear),
        {"linear"},
        "every tensor-parallel rank adds the bias",
        **_FP32_TO_BF16,
    )
    _fault_in(
        "int4-zero-point",
        "llama",
        1,
        "mlp.up_proj",
        lambda path: _on_weight(path, lambda weight: weight + 0.02 * weight.abs().amax(dim=1, keepdim=True)),
        {"linear"},
        "the zero point of a quantised weight is off",
    )
    _fault_in(
        "gate-and-up-exchanged",
        "qwen3",
        1,
        "mlp.gate_proj",
        lambda path: _on(path.rsplit(".", 1)[0], _exchange("gate_proj", "up_proj")),
        {"linear"},
        "the loader writes gate to up and up to gate",
        others=("mlp.up_proj",),
    )


def _list_mlp_faults() -> None:
    for architecture, index, part, own in (
        ("starcoder2", 4, "mlp.act", nn.GELU()),
        ("gemma2", 2, "mlp.act_fn", nn.SiLU()),
        ("gemma3", 5, "mlp.act_fn", nn.GELU()),
        ("gpt_neox", 0, "mlp.act", nn.GELU(approximate="tanh")),
    ):
        _fault_in(
            "activation",
            architecture,
            index,
            part,
            lambda path, own=own: _set(*path.rsplit(".", 1), own),
            {"activation"},
            "another activation of the same family",
            others=("mlp",),
        )
    _fault_in(
        "gate-on-up",
        "granite",
        3,
        "mlp",
        lambda path: _own(path, SwappedProduct),
        {"activation", "gate_up_product"},
        "the activation is applied to up",
        others=("mlp.act_fn",),
    )
    for architecture, index in (("glm4", 3), ("olmo2", 3)):
        _fault_in(
            "product-clamped",
            architecture,
            index,
            "mlp",
            lambda path: _own(path, ClampedProduct),
            {"gate_up_product"},
            "the fused kernel clamps the product",
        )
    _fault_in(
        "product-bf16",
        "phi3",
        4,
        "mlp",
        lambda path: _own(path, Bf16Product),
        {"gate_up_product"},
        "gate times up is computed in bf16",
    )
    _fault_in(
        "residual-multiplier-missing",
        "granite",
        2,
        "",
        lambda path: _own(path, UnscaledUpdate),
        {"residual"},
        "the multiplier is left out behind the MLP",
    )
    for name, architecture, index, own, why in (
        ("residual-dropped", "mixtral", 2, DroppedResidual, "the MLP's output replaces the stream"),
        ("residual-bf16", "qwen2", 1, Bf16Residual, "the stream is added up in bf16 behind the attention"),
        ("residual-bf16", "olmo2", 4, Bf16Residual, "the stream is added up in bf16 behind the attention"),
        ("residual-added-twice", "mistral", 1, TwiceAdded, "both tensor-parallel ranks add the residual"),
    ):
        _fault_in(name, architecture, index, "", lambda path, own=own: _own(path, own), {"residual"}, why)


def _list_expert_faults() -> None:
    router_or_linear = {"router", "linear"}
    for architecture, index, part in (
        ("mixtral", 0, "mlp.gate"),
        ("qwen3_moe", 2, "mlp.gate"),
        ("gpt_oss", 3, "mlp.router"),
        ("deepseek_v3", 1, "mlp.gate"),
        ("qwen2_moe", 1, "mlp.gate"),
    ):
        _fault_in("router-bf16", architecture, index, part, _round_router, router_or_linear, "the router reads bf16")
    _fault_in(
        "router-not-renormalised",
        "qwen3_moe",
        4,
        "mlp.gate",
        lambda path: _set(path, "norm_topk_prob", False),
        {"router"},
        "weights of the chosen experts do not add up to one",
    )
    _fault_in(
        "router-renormalised",
        "qwen2_moe",
        3,
        "mlp.gate",
        lambda path: _set(path, "norm_topk_prob", True),
        {"router"},
        "weights of the chosen experts are made to add up to one",
        **_BOTH_BF16,
    )
    _fault_in(
        "routed-scale-missing",
        "deepseek_v3",
        2,
        "mlp.gate",
        lambda path: _set(path, "routed_scaling_factor", 1.0),
        {"router"},
        "the factor on the routed experts is left out",
    )
    _fault_in(
        "correction-bias-missing",
        "deepseek_v3",
        4,
        "mlp.gate",
        lambda path: _on(path, lambda router: router.e_score_correction_bias.zero_()),
        {"router"},
        "the bias that chooses experts is not loaded",
    )
    _fault_in(
        "router-bias-missing",
        "gpt_oss",
        0,
        "mlp.router",
        lambda path: _on(path, lambda router: router.bias.zero_()),
        router_or_linear,
        "the router's bias is not loaded",
    )
    for architecture, index, change in (
        ("mixtral", 1, _second_and_third),
        ("qwen3_moe", 3, lambda parameter: parameter.roll(1, 0)),
        ("deepseek_v3", 3, _second_and_third),
        ("gpt_oss", 2, _second_and_third),
    ):
        _fault_in(
            "expert-order",
            architecture,
            index,
            "mlp.experts",
            lambda path, change=change: _on_experts(path, change),
            {"experts"},
            "experts are loaded in another order",
        )
    for name, architecture, index, own, why in (
        ("expert-capacity", "mixtral", 2, CapacityExperts, "tokens beyond an expert's capacity are dropped"),
        ("experts-unweighted", "qwen2_moe", 2, UnweightedExperts, "the router's weights are not applied"),
        ("experts-bf16", "mixtral", 3, Bf16Experts, "experts compute in bf16"),
        ("gate-layout", "gpt_oss", 1, ConcatenatedGateExperts, "gate and up are read as halves"),
        ("gate-without-one", "gpt_oss", 3, UnshiftedGateExperts, "the one in (up + 1) * glu is left out"),
    ):
        _fault_in(name, architecture, index, "mlp.experts", lambda path, own=own: _own(path, own), {"experts"}, why)
    _fault_in(
        "expert-bias-dropped",
        "gpt_oss",
        0,
        "mlp.experts",
        lambda path: _on(path, lambda experts: experts.down_proj_bias.zero_()),
        {"experts"},
        "the bias behind the experts is not loaded",
    )
    _fault_in(
        "expert-gate-and-up-exchanged",
        "qwen3_moe",
        0,
        "mlp.experts",
        lambda path: _on_weight(path, lambda weight: torch.cat(weight.chunk(2, 1)[::-1], 1), name="gate_up_proj"),
        {"experts"},
        "gate and up are stacked the other way round",
    )
    _fault_in(
        "shared-expert-stale",
        "deepseek_v3",
        1,
        "mlp.shared_experts.gate_proj",
        lambda path: _on(path.rsplit(".", 1)[0], _age),
        {"linear"},
        "the shared expert kept its weights of an earlier update",
        others=("mlp.shared_experts.up_proj",),
    )


def _list_ends_faults() -> None:
    for architecture in ("qwen2", "gemma3", "cohere2", "granite"):
        _fault(
            "head-untied",
            architecture,
            _untie,
            {"lm_head"},
            {"head", "linear"},
            "the head is a copy of the embedding that missed an update",
        )
    for architecture in ("llama", "phi3", "gpt_neox"):
        _fault(
            "padded-vocabulary",
            architecture,
            _on("lm_head", lambda head: head.weight[REAL_TOKENS:].zero_()),
            {"lm_head"},
            {"head", "linear"},
            "rows that pad the vocabulary are zeros that take part in the softmax",
        )
    _fault(
        "head-bf16",
        "qwen3",
        _own("lm_head", Bf16Linear),
        {"lm_head"},
        {"head", "linear"},
        "the head computes in bf16",
    )
    _fault(
        "head-chunk-repeated",
        "mistral",
        _own("lm_head", RepeatedChunkHead),
        {"lm_head"},
        {"head", "linear"},
        "the last chunk of logits is the one before it",
    )
    _fault(
        "head-shards-swapped",
        "olmo2",
        _on_weight("lm_head", lambda weight: torch.cat(weight.chunk(2)[::-1])),
        {"lm_head"},
        {"head", "linear"},
        "two shards of the vocabulary are gathered in the wrong order",
        **_BOTH_BF16,
    )
    for architecture in ("llama", "mixtral"):
        _fault(
            "embedding-shard-offset",
            architecture,
            _on_weight("model.embed_tokens", lambda weight: torch.cat([weight[:152], weight[152:].roll(1, 0)])),
            {"model.embed_tokens"},
            {"embedding"},
            "the second shard of the vocabulary starts a row too late",
        )
    for architecture in ("qwen3", "starcoder2"):
        _fault(
            "embedding-row-zeroed",
            architecture,
            _on("model.embed_tokens", lambda embedding: embedding.weight[SPECIAL_TOKEN].zero_()),
            {"model.embed_tokens"},
            {"embedding"},
            "the row of a special token is zeroed as padding",
        )
    _fault(
        "embedding-scale-bf16",
        "gemma3",
        _on("model.embed_tokens", lambda embedding: embedding.embed_scale.copy_(_bf16(embedding.embed_scale))),
        {"model.embed_tokens"},
        {"embedding"},
        "the factor on embeddings is rounded to bf16",
    )
    _fault(
        "embedding-multiplier-missing",
        "granite",
        _set("model", "embedding_multiplier", 1.0),
        {"model", "model.embed_tokens"},
        {"embedding"},
        "the factor on embeddings is left out",
    )
    for architecture in ("gemma2", "gemma3"):
        _fault(
            "final-soft-cap-missing",
            architecture,
            _set_config("final_logit_softcapping", None),
            {"", "lm_head"},
            {"soft_cap"},
            "logits are not capped",
        )
    _fault(
        "logits-scaling-missing",
        "granite",
        _set_config("logits_scaling", 1.0),
        {"", "lm_head"},
        {"logit_scaling"},
        "logits are not divided",
    )
    _fault(
        "logit-scale-default",
        "cohere2",
        _set("", "logit_scale", 0.0625),
        {"", "lm_head"},
        {"logit_scaling"},
        "logits are multiplied by the default of the configuration",
    )
    _fault(
        "temperature",
        "deepseek_v3",
        _own_model(TemperedLogits),
        {"", "lm_head"},
        {"logit_scaling"},
        "logits are divided by a temperature that A does not have",
    )
    for architecture in ("qwen2_moe", "glm4"):
        _fault(
            "logprobs-bf16",
            architecture,
            _own_model(Bf16Logprobs),
            {"", "lm_head"},
            {"log_softmax", "head"},
            "logprobs come from a log-softmax in bf16",
        )


def _list_recodings() -> None:
    kinds = list(RECODED_ATTENTION)
    for i, architecture in enumerate(ARCHITECTURES):
        kind = kinds[i % len(kinds)]
        _harmless(f"attention-{kind}", architecture, _kernel_everywhere(kind))
    for architecture, kind in (("gemma2", "chunks"), ("gpt_oss", "grouped"), ("mistral", "split-keys")):
        _harmless(
            f"attention-{kind}-in-one-layer", architecture, _kernel_in(_attention(architecture, 1), kind), **_BOTH_BF16
        )
    norms = ("layernorm", "layer_norm", ".norm", "q_norm", "k_norm")
    for architecture in ("qwen3", "gemma2", "olmo2", "cohere2", "starcoder2", "gpt_neox", "deepseek_v3"):
        _harmless("norms-fused", architecture, _everywhere(norms, FusedNorm))
    for architecture in ("qwen2", "gemma3", "glm4", "granite"):
        _harmless("norms-prescaled", architecture, _everywhere(norms, PrescaledNorm))
    for architecture in ("gemma3", "cohere2", "qwen2"):
        _harmless("norms-fused-in-bf16", architecture, _everywhere(norms, FusedNorm), **_BOTH_BF16)
    for architecture in ("qwen2", "llama", "glm4"):
        _harmless("qkv-fused", architecture, _everywhere(("self_attn",), FusedProjections))
    for architecture in ("llama", "gemma2", "phi3", "glm4"):
        _harmless("gate-up-fused", architecture, _everywhere(("mlp",), FusedMlp))
    _harmless("gate-up-fused-in-bf16", "llama", _everywhere(("mlp",), FusedMlp), **_BOTH_BF16)
    for architecture in ("qwen3", "granite", "olmo2"):
        _harmless("mlp-two-ranks", architecture, _everywhere(("mlp",), DividedMlp))
    for architecture in ("qwen3", "phi3", "gemma3", "gpt_neox"):
        _harmless(
            "rotary-complex", architecture, _everywhere((ARCHITECTURES[architecture].attention_name,), ComplexRotary)
        )
    for architecture in ("llama", "mixtral"):
        _harmless("rotary-woven", architecture, _everywhere(("self_attn",), InterleavedLayoutRotary))
    for architecture in ("glm4", "cohere2"):
        _harmless("rotary-as-halves", architecture, _everywhere(("self_attn",), HalvesLayoutRotary))
    _harmless("rotary-complex-in-bf16", "qwen3", _everywhere(("self_attn",), ComplexRotary), **_BOTH_BF16)
    for architecture in ("mistral", "granite", "olmo2", "starcoder2"):
        layers = tuple(_layer(architecture, index) for index in range(5))
        _harmless("residual-in-place", architecture, _everywhere(layers, Float32Residual))
    _harmless(
        "residual-in-place-in-bf16",
        "llama",
        _everywhere(tuple(_layer("llama", index) for index in range(5)), Float32Residual),
        **_BOTH_BF16,
    )
    for architecture in ("mixtral", "gpt_oss", "qwen2_moe"):
        _harmless("experts-sorted", architecture, _everywhere(("mlp.experts",), SortedExperts))
    for architecture in ("qwen3_moe", "deepseek_v3"):
        _harmless("experts-dense", architecture, _everywhere(("mlp.experts",), DenseExperts))
    for architecture in ("mixtral", "qwen3_moe"):
        _harmless("router-chosen-softmax", architecture, _everywhere(("mlp.gate",), ChosenSoftmaxRouter))
    for architecture, part in (("qwen2", "down_proj"), ("starcoder2", "c_proj"), ("llama", "o_proj")):
        _harmless("split-sums", architecture, _everywhere((part,), SplitSumLinear))
    _harmless("split-sums-in-bf16", "phi3", _everywhere(("down_proj", "o_proj"), SplitSumLinear), **_BOTH_BF16)
    for architecture in ("llama", "gemma2", "deepseek_v3"):
        _harmless("head-in-chunks", architecture, _everywhere(("lm_head",), ChunkedHead))
    _harmless("head-split-sums", "mistral", _everywhere(("lm_head",), SplitSumLinear))
    for architecture in ("qwen3", "gpt_neox"):
        _harmless("logits-normalised", architecture, _own_model(NormalisedLogits))


def _list_arms() -> None:
    for architecture in ("qwen2", "qwen3", "llama", "gemma2", "gemma3", "olmo2", "granite", "cohere2"):
        _harmless("fp32-bf16", architecture, arm_b="dtype=bf16")
    for architecture in ("mistral", "phi3", "starcoder2"):
        _harmless("fp32-fp16", architecture, arm_b="dtype=fp16")
    for architecture in ("glm4", "gpt_neox", "llama"):
        _harmless("bf16-fp16", architecture, arm_a="dtype=bf16", arm_b="dtype=fp16")
    for architecture in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"):
        _harmless("fp32-bf16", architecture, arm_b="dtype=bf16")
    for architecture in ("qwen2", "mistral", "gemma3", "deepseek_v3"):
        _harmless("sdpa-eager", architecture, arm_b="dtype=fp32,attention=eager")
    for architecture in ("qwen3", "llama", "cohere2"):
        _harmless("sdpa-eager-in-bf16", architecture, arm_a="dtype=bf16", arm_b="dtype=bf16,attention=eager")
    for architecture in ("qwen2_moe", "starcoder2"):
        _harmless("math-flash", architecture, arm_a="dtype=fp32,attention=math", arm_b="dtype=fp32,attention=flash")
    for architecture in ("qwen2", "gemma2", "qwen3_moe", "phi3"):
        _harmless("batch-of-one", architecture, arm_a="dtype=fp32,batch-size=4", arm_b="dtype=fp32,batch-size=1")
    _harmless("batch-of-one-in-bf16", "granite", arm_a="dtype=bf16,batch-size=4", arm_b="dtype=bf16,batch-size=1")
    _harmless("batch-of-two-in-fp16", "glm4", arm_a="dtype=fp16,batch-size=4", arm_b="dtype=fp16,batch-size=2")
    for architecture in ("qwen3", "llama", "gpt_oss", "gemma3"):
        _harmless("padding-sides", architecture, arm_a="dtype=fp32,padding=left", arm_b="dtype=fp32,padding=right")
    _harmless("padding-sides-in-bf16", "olmo2", arm_a="dtype=bf16,padding=left", arm_b="dtype=bf16,padding=right")


_list_rotary_faults()
_list_norm_faults()
_list_attention_faults()
_list_linear_faults()
_list_mlp_faults()
_list_expert_faults()
_list_ends_faults()
_list_recodings()
_list_arms()


# ---------------------------------------------------------------------------------------------------------------------
# The check: the effect of each case on the logprobs, without the locator

FAULT_RATIO = 30.0
"""Minimum effect of a fault on a logprob, relative to harmless rewrites of the architecture."""
HARMLESS_RATIO = 10.0
"""Maximum effect of a harmless case, relative to their median or to the effect of the dtype alone."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@torch.no_grad()
def _score(model: PreTrainedModel, inputs: list[Tensor], arm: str) -> list[Tensor]:
    """Return the logprobs of each input's tokens from the second on, in nats, in float32."""
    settings = dict(setting.split("=") for setting in arm.split(","))
    model = model.to(DTYPES[settings["dtype"]])
    if "attention" in settings:
        model.config._attn_implementation = "eager" if settings["attention"] == "eager" else "sdpa"
    kernels = {"math": torch.nn.attention.SDPBackend.MATH, "flash": torch.nn.attention.SDPBackend.FLASH_ATTENTION}
    rows = int(settings.get("batch-size", len(inputs) if "padding" in settings else 1))
    scores = []
    for start in range(0, len(inputs), rows):
        batch = inputs[start : start + rows]
        width = max(len(tokens) for tokens in batch)
        is_left = settings.get("padding", "left") == "left"
        token_ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(token_ids)
        places = [slice(width - len(row), width) if is_left else slice(0, len(row)) for row in batch]
        for i, tokens in enumerate(batch):
            token_ids[i, places[i]] = tokens
            mask[i, places[i]] = 1
        options = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)} if rows > 1 else {}
        if kernel := kernels.get(settings.get("attention", "")):
            with torch.nn.attention.sdpa_kernel(kernel):
                logits = model(token_ids, use_cache=False, **options).logits
        else:
            logits = model(token_ids, use_cache=False, **options).logits
        for i, tokens in enumerate(batch):
            logprobs = logits[i, places[i]][:-1].float().log_softmax(-1)
            scores.append(logprobs.gather(-1, tokens[1:, None])[:, 0])
    return scores


def _is_finite(scores: list[Tensor]) -> bool:
    return all(bool(torch.isfinite(row).all()) for row in scores)


def _distance(scores_a: list[Tensor], scores_b: list[Tensor], longest_alone: bool) -> float:
    rows = list(zip(scores_a, scores_b, strict=True))
    return max((a - b).abs().max().item() for a, b in (rows[-1:] if longest_alone else rows))


def measure(case: Case) -> float:
    """Return a case's largest |d logprob|, in nats: of a fault in float32 on the longest input, of a harmless case in
    its arms."""
    model_b = build(case.architecture)
    case.make(model_b)
    if case.fault is None:
        scores_a = _score(build(case.architecture), case.inputs, case.arm_a)
        scores_b = _score(model_b, case.inputs, case.arm_b)
    else:
        scores_a = _score(build(case.architecture), case.inputs, "dtype=fp32")
        scores_b = _score(model_b, case.inputs, "dtype=fp32")
        missing = {module for module in case.fault.modules if module not in dict(model_b.named_modules())}
        if missing:
            raise ValueError(f"{case.name}: no module is called {missing}")
    if not (_is_finite(scores_a) and _is_finite(scores_b)):
        return math.nan
    return _distance(scores_a, scores_b, longest_alone=case.fault is not None)


def _dtype_noise(architecture: str, dtype: str) -> float:
    inputs = _make_inputs(architecture)
    scores = _score(build(architecture), inputs, "dtype=fp32")
    return _distance(scores, _score(build(architecture), inputs, f"dtype={dtype}"), longest_alone=False)


def main() -> int:
    """Print every case with its effect; return 1 if one is too small or too large."""
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or list(ARCHITECTURES)
    num_bad = 0
    for architecture in chosen:
        cases = [case for case in CASES if case.architecture == architecture]
        effects = {case.name: measure(case) for case in cases}
        recodings = [
            effects[case.name]
            for case in cases
            if case.fault is None and case.make is not _nothing and "dtype=fp32" == case.arm_a == case.arm_b
        ]
        rounding = statistics.median(recodings)
        print(f"{architecture}: median harmless rewrite in float32 {rounding:.1e} nats")
        for case in cases:
            effect = effects[case.name]
            dtypes = {arm.split(",")[0].removeprefix("dtype=") for arm in (case.arm_a, case.arm_b)} - {"fp32"}
            if case.fault is not None:
                is_good = effect >= FAULT_RATIO * rounding
                base = rounding
            else:
                base = max([rounding] + [_dtype_noise(architecture, dtype) for dtype in sorted(dtypes)])
                is_good = effect <= (2.0 if dtypes else HARMLESS_RATIO) * base
            num_bad += not is_good
            kind = "harmless" if case.fault is None else "fault"
            print(f"  {'ok ' if is_good else 'BAD'} {kind:8} {effect:9.2e} = {effect / base:10.1f} x  {case.name}")
    names = [case.name for case in CASES]
    num_faults = sum(case.fault is not None for case in CASES)
    print(
        f"{num_faults} faults, {len(CASES) - num_faults} harmless, {num_bad} bad, names unique: {len(set(names)) == len(names)}"
    )
    return int(num_bad > 0 or len(set(names)) != len(names))


if __name__ == "__main__":
    sys.exit(main())
