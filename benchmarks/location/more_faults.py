"""Faults of code planted in real transformers models, written blind.

ARCHITECTURES  name -> config dict (+ "class", the dotted path of the ForCausalLM)
initialise     fills a model with lively random numbers, in place
FAULTS         list of Fault; `plant(model)` changes the model's code in place
HEALTHY        list of (name, architecture, plant): the same mathematics otherwise written

All patches live on the instance (module.forward, attributes, buffers); no module
level function of transformers is touched, so a healthy copy may run next to it.
"""

import importlib
import math
import types
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

# --------------------------------------------------------------------------- architectures


def _config(module, name, **kw):
    mod = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    return getattr(mod, name + "Config")(**kw).to_dict()


_BASE = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    use_cache=True,
)


def _arch(module, prefix, extra=None, drop=(), config=None, **kw):
    args = {k: v for k, v in {**_BASE, **kw}.items() if k not in drop}
    d = _config(module, config or prefix, **args)
    d["class"] = f"transformers.models.{module}.modeling_{module}.{prefix}ForCausalLM"
    d.update(extra or {})
    return d


def _rope(theta=10000.0, **kw):
    return {"rope_type": "default", "rope_theta": theta, **kw}


ARCHITECTURES = {
    "mistral": _arch("mistral", "Mistral", head_dim=16, sliding_window=16, rms_norm_eps=1e-6, rope_parameters=_rope()),
    "phi3": _arch(
        "phi3",
        "Phi3",
        rms_norm_eps=1e-5,
        rope_parameters=_rope(partial_rotary_factor=0.5),
        original_max_position_embeddings=512,
        resid_pdrop=0.1,
    ),
    "gemma3": _arch(
        "gemma3",
        "Gemma3",
        config="Gemma3Text",
        extra={"attn_implementation": "eager"},
        num_hidden_layers=5,
        head_dim=16,
        sliding_window=16,
        query_pre_attn_scalar=24,
        final_logit_softcapping=5.0,
        vocab_size=300,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": _rope(10000.0),
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        },
    ),
    "gemma2": _arch(
        "gemma2",
        "Gemma2",
        extra={"attn_implementation": "eager"},
        num_hidden_layers=3,
        head_dim=16,
        sliding_window=16,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=6.0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=_rope(),
    ),
    "starcoder2": _arch(
        "starcoder2",
        "Starcoder2",
        num_hidden_layers=3,
        hidden_size=48,
        num_attention_heads=6,
        intermediate_size=128,
        vocab_size=320,
        use_bias=True,
        tie_word_embeddings=True,
        residual_dropout=0.1,
        rope_parameters=_rope(),
    ),
    "cohere": _arch(
        "cohere",
        "Cohere",
        num_hidden_layers=3,
        logit_scale=0.25,
        use_qk_norm=True,
        tie_word_embeddings=True,
        rope_parameters=_rope(),
    ),
    "olmoe": _arch(
        "olmoe",
        "Olmoe",
        extra={"experts_implementation": "eager"},
        intermediate_size=40,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        rope_parameters=_rope(),
    ),
    "qwen2_moe": _arch(
        "qwen2_moe",
        "Qwen2Moe",
        extra={"experts_implementation": "eager"},
        num_hidden_layers=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=56,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        rope_parameters=_rope(),
    ),
    "granite": _arch(
        "granite",
        "Granite",
        num_hidden_layers=3,
        hidden_size=96,
        num_attention_heads=6,
        embedding_multiplier=4.0,
        logits_scaling=4.0,
        residual_multiplier=0.4,
        attention_multiplier=0.12,
        rope_parameters=_rope(),
    ),
    "smollm3": _arch(
        "smollm3", "SmolLM3", no_rope_layers=[1, 1, 1, 0], tie_word_embeddings=True, rope_parameters=_rope(50000.0)
    ),
    "opt": _arch(
        "opt",
        "OPT",
        drop=("intermediate_size", "num_key_value_heads"),
        ffn_dim=128,
        word_embed_proj_dim=64,
        dropout=0.1,
    ),
}


def build(name):
    """A fresh model of that architecture (torch's own initialisation; call initialise after)."""
    d = dict(ARCHITECTURES[name])
    module, cls = d.pop("class").rsplit(".", 1)
    cls = getattr(importlib.import_module(module), cls)
    attn, experts = d.pop("attn_implementation", None), d.pop("experts_implementation", None)
    config = cls.config_class(**d)
    kw = {}
    if attn:
        config._attn_implementation = attn
    if experts:
        config._experts_implementation = experts
    return cls(config, **kw).eval()


@torch.no_grad()
def initialise(model, seed):
    g = torch.Generator().manual_seed(int(seed))

    def randn(p, std, mean=0.0):
        p.copy_((mean + std * torch.randn(p.shape, generator=g)).to(p.dtype))

    cfg = model.config
    scale = getattr(cfg, "logit_scale", None) or 1.0
    scale /= getattr(cfg, "logits_scaling", None) or 1.0
    head_std = 2.0 / math.sqrt(cfg.hidden_size) / scale
    head = model.get_output_embeddings()
    done = set()
    for name, module in model.named_modules():
        kind = type(module).__name__
        for pname, p in module.named_parameters(recurse=False):
            if id(p) in done:
                continue
            done.add(id(p))
            if kind.endswith("Norm"):
                if pname == "bias":
                    randn(p, 0.2)
                else:
                    randn(p, 0.2, 0.0 if "Gemma" in kind else 1.0)
            elif pname == "bias":
                randn(p, 0.2)
            elif p is head.weight:
                randn(p, head_std)
            elif isinstance(module, nn.Embedding):
                randn(p, 0.3)
            elif "Router" in kind:
                randn(p, 1.5 / math.sqrt(p.shape[-1]))
            elif name.endswith(("q_proj", "k_proj", "qkv_proj")):
                randn(p, 1.4 / math.sqrt(p.shape[-1]))
            else:
                randn(p, 1.2 / math.sqrt(p.shape[-1]))
    return model


# --------------------------------------------------------------------------- tools for planting


def core(model):
    return model.model.decoder if hasattr(model.model, "decoder") else model.model


def layers(model):
    return core(model).layers


def attns(model, only=None):
    return [layer.self_attn for i, layer in enumerate(layers(model)) if only is None or i in only]


def method(module, fn):
    """Replace the forward of this one instance."""
    module.forward = types.MethodType(fn, module)


class _Overlay(dict):
    """Globals of a function with some names replaced; all else is looked up live."""

    def __missing__(self, key):
        return self._under[key]


def with_globals(module, **names):
    f = type(module).forward
    while hasattr(f, "__wrapped__"):
        f = f.__wrapped__
    over = _Overlay(names)
    over._under = f.__globals__
    over["__builtins__"] = f.__globals__["__builtins__"]
    new = types.FunctionType(f.__code__, over, f.__name__, f.__defaults__, f.__closure__)
    new.__kwdefaults__ = f.__kwdefaults__
    method(module, new)


class _Registry:
    def __init__(self, real, change):
        self.real, self.change = real, change

    def get_interface(self, name, default):
        real, change = self.real.get_interface(name, default), self.change

        def attend(module, q, k, v, mask, **kw):
            return change(real, module, q, k, v, mask, kw)

        return attend


def attention(module, change):
    """change(real, module, q, k, v, mask, kw) -> (output [b, s, h, d], weights)."""
    real = type(module).forward
    while hasattr(real, "__wrapped__"):
        real = real.__wrapped__
    with_globals(module, ALL_ATTENTION_FUNCTIONS=_Registry(real.__globals__["ALL_ATTENTION_FUNCTIONS"], change))


def allowed(mask, q, k):
    """The mask as booleans [b, 1, q, k]."""
    ql, kl = q.shape[-2], k.shape[-2]
    if mask is None:
        i = torch.arange(ql)[:, None] + kl - ql
        return (torch.arange(kl)[None] <= i)[None, None].expand(q.shape[0], 1, ql, kl)
    return mask[..., :kl] if mask.dtype == torch.bool else mask[..., :kl] > -1e30


def like(ok, mask, q):
    """Booleans back into the kind of mask that was given."""
    if mask is None or mask.dtype == torch.bool:
        return ok
    return torch.zeros(ok.shape, dtype=q.dtype).masked_fill(~ok, torch.finfo(q.dtype).min)


def masked(edit):
    """edit(ok, i, j) -> ok; i, j the absolute query and key indices."""

    def change(real, module, q, k, v, mask, kw):
        ok = allowed(mask, q, k)
        ql, kl = ok.shape[-2:]
        i = torch.arange(ql)[:, None] + kl - ql
        j = torch.arange(kl)[None]
        return real(module, q, k, v, like(edit(ok, i, j), mask, q), **kw)

    return change


def window(w):
    """Causal sliding window of w keys (itself among them), padding as before; None: no window."""

    def edit(ok, i, j):
        keys = ok.any(-2, keepdim=True)
        new = (j <= i) & keys
        return new & (i - j < w) if w else new

    return masked(edit)


def rescaled(factor):
    def change(real, module, q, k, v, mask, kw):
        kw = dict(kw, scaling=kw["scaling"] * factor)
        return real(module, q, k, v, mask, **kw)

    return change


def edited(fn):
    """fn(q, k, v) -> q, k, v just before the scores."""

    def change(real, module, q, k, v, mask, kw):
        return real(module, *fn(q, k, v), mask, **kw)

    return change


def plain(softmax=None, repeat=None, cap="kw", dtype=None, probs=None):
    """Attention written out."""

    def change(real, module, q, k, v, mask, kw):
        n = q.shape[1] // k.shape[1]
        rep = repeat or (lambda x, n: x.repeat_interleave(n, 1))
        out_dtype = q.dtype
        if dtype:
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        k, v = rep(k, n), rep(v, n)
        s = q @ k.transpose(-1, -2) * kw["scaling"]
        c = kw.get("softcap") if cap == "kw" else cap
        if c:
            s = c * torch.tanh(s / c)
        s = s.masked_fill(~allowed(mask, q, k), -1e30)
        p = softmax(s) if softmax else torch.softmax(s, -1)
        if probs:
            p = probs(p)
        return (p @ v).transpose(1, 2).contiguous().to(out_dtype), None

    return change


def rotary(module, change):
    """change(real, q, k, cos, sin) -> q, k for this attention module."""
    f = type(module).forward
    while hasattr(f, "__wrapped__"):
        f = f.__wrapped__
    live = f.__globals__

    def apply(q, k, cos, sin, **kw):
        return change(live["apply_rotary_pos_emb"], q, k, cos, sin)

    with_globals(module, apply_rotary_pos_emb=apply)


def bf16(x):
    return x.to(torch.bfloat16).to(x.dtype)


def fp8(x, scale=None):
    scale = x.abs().amax() / 448.0 if scale is None else scale
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def int8(x):
    s = x.abs().amax() / 127.0
    return torch.round(x / s).clamp(-127, 127) * s


def linear(module, weight=lambda w: w, bias=lambda b: b, x=lambda x: x, y=lambda y: y):
    def forward(self, input):
        b = self.bias
        return y(F.linear(x(input), weight(self.weight), None if b is None else bias(b)))

    method(module, forward)


def after(module, fn):
    """The module's own forward, and fn on what it gives."""
    f = type(module).forward

    def forward(self, *a, **kw):
        return fn(f(self, *a, **kw))

    method(module, forward)


def before(module, fn):
    f = type(module).forward

    def forward(self, x, *a, **kw):
        return f(self, fn(x), *a, **kw)

    method(module, forward)


def rms(module, eps=None, weight=lambda w: w, dtype=torch.float32, stat=None):
    """RMSNorm written out; `weight` maps the stored weight to the factor."""
    gemma = "Gemma" in type(module).__name__

    def forward(self, x):
        e = eps if eps is not None else (self.eps if gemma else self.variance_epsilon)
        h = x.to(dtype)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + e)
        w = (1.0 + self.weight) if gemma else self.weight
        return (h * weight(w).to(dtype)).to(x.dtype)

    method(module, forward)


def identity(module):
    method(module, lambda self, x, *a, **kw: x)


@dataclass
class Fault:
    name: str
    architecture: str
    plant: object
    layer: object
    operator: frozenset
    detail: str
    also_layers: tuple = ()  # other layer values that are as right (rotary computed once before the layers)
    tiny: bool = False  # may change the logprobs by less than 1e-4 on average
    weights: bool = False  # the parameters themselves are changed


FAULTS = []
HEALTHY = []


def fault(architecture, layer, operator, detail="", also=(), tiny=False, weights=False):
    def add(fn):
        FAULTS.append(
            Fault(
                fn.__name__,
                architecture,
                fn,
                layer,
                frozenset(operator.split()),
                detail or (fn.__doc__ or "").strip(),
                tuple(also),
                tiny,
                weights,
            )
        )
        return fn

    return add


def healthy(*architectures):
    def add(fn):
        for a in architectures:
            HEALTHY.append((fn.__name__ + "@" + a, a, fn))
        return fn

    return add


# --------------------------------------------------------------------------- mistral


@fault("mistral", 0, "attention", "sliding window of 15 keys for 16, all layers")
def mistral_window_15(m):
    for a in attns(m):
        attention(a, window(15))


@fault("mistral", 2, "attention", "sliding window of 17 keys for 16, layers 2 and 3")
def mistral_window_17_late(m):
    for a in attns(m, {2, 3}):
        attention(a, window(17))


@fault("mistral", 1, "attention", "no sliding window in layer 1")
def mistral_no_window_layer1(m):
    attention(layers(m)[1].self_attn, window(None))


@fault("mistral", None, "rotary", "rotary base 1e6 for 1e4", also=(0,))
def mistral_rope_base(m):
    r = core(m).rotary_emb
    r.inv_freq = 1.0 / (1e6 ** (torch.arange(0, 16, 2).float() / 16))


def _interleaved(real, q, k, cos, sin):
    def rot(x):
        d = x.shape[-1] // 2
        c, s = cos[..., :d].unsqueeze(1), sin[..., :d].unsqueeze(1)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)

    return rot(q), rot(k)


@fault("mistral", 0, "rotary", "interleaved (GPT-J) rotary for half (NeoX), all layers", also=(None,))
def mistral_rope_interleaved(m):
    for a in attns(m):
        rotary(a, _interleaved)


@fault("mistral", 1, "attention", "KV heads tiled instead of repeated in layer 1")
def mistral_gqa_tiled(m):
    attention(layers(m)[1].self_attn, plain(repeat=lambda x, n: x.repeat(1, n, 1, 1)))


@fault("mistral", 3, "attention", "scores not scaled by head_dim**-0.5 but by head_dim**-1 in layer 3")
def mistral_scale_layer3(m):
    attention(layers(m)[3].self_attn, rescaled(0.25))


@fault("mistral", 2, "o_proj", "o_proj weight of layer 2 stale: 3 percent noise", weights=True)
def mistral_stale_o_proj(m):
    w = layers(m)[2].self_attn.o_proj.weight
    g = torch.Generator().manual_seed(11)
    with torch.no_grad():
        w.add_(0.03 * w.std() * torch.randn(w.shape, generator=g))


@fault("mistral", 1, "down_proj", "down_proj of layer 1 multiplied with its weight rounded to bf16")
def mistral_down_bf16(m):
    linear(layers(m)[1].mlp.down_proj, weight=bf16)


@fault("mistral", None, "final_norm", "final norm computed in bf16")
def mistral_final_norm_bf16(m):
    rms(core(m).norm, dtype=torch.bfloat16)


@fault("mistral", 2, "attention", "softmax in bf16 in layer 2")
def mistral_softmax_bf16(m):
    attention(
        layers(m)[2].self_attn, plain(softmax=lambda s: bf16(torch.softmax(s.to(torch.bfloat16), -1).to(s.dtype)))
    )


@fault("mistral", 0, "attention", "causal mask off by one: every token also sees the next, all layers")
def mistral_mask_future(m):
    def edit(ok, i, j):
        return ok | ((j == i + 1) & ok.any(-2, keepdim=True))

    for a in attns(m):
        attention(a, masked(edit))


@fault("mistral", 3, "activation", "gelu for silu in layer 3")
def mistral_gelu(m):
    layers(m)[3].mlp.act_fn = nn.GELU()


@fault("mistral", 0, "attention", "chunk boundary lost: tokens from index 20 on do not see those before, all layers")
def mistral_chunk_lost(m):
    for a in attns(m):
        attention(a, masked(lambda ok, i, j: ok & ~((i >= 20) & (j < 20))))


@fault("mistral", 1, "residual", "residual stream rounded to bf16 at the end of layer 1")
def mistral_residual_bf16(m):
    after(layers(m)[1], bf16)


# --------------------------------------------------------------------------- phi3


@fault("phi3", None, "rotary", "rotary over the whole head for the first half of it", also=(0,))
def phi3_rope_full(m):
    r = core(m).rotary_emb
    r.inv_freq = 1.0 / (1e4 ** (torch.arange(0, 16, 2).float() / 16))


@fault("phi3", None, "rotary", "frequencies of the rotated half computed with the whole head_dim as divisor", also=(0,))
def phi3_rope_divisor(m):
    r = core(m).rotary_emb
    r.inv_freq = 1.0 / (1e4 ** (torch.arange(0, 8, 2).float() / 16))


@fault("phi3", 1, "gate_proj up_proj activation", "gate and up taken in the wrong order in layer 1")
def phi3_gate_up_swapped(m):
    def forward(self, x):
        up, gate = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(up * self.activation_fn(gate))

    method(layers(m)[1].mlp, forward)


@fault("phi3", 2, "k_proj v_proj", "keys and values of the fused projection taken in the wrong order in layer 2")
def phi3_kv_swapped(m):
    def swap(y):
        q, k, v = y.split([64, 32, 32], -1)
        return torch.cat([q, v, k], -1)

    linear(layers(m)[2].self_attn.qkv_proj, y=swap)


@fault(
    "phi3", 1, "q_proj k_proj v_proj", "qkv_proj of layer 1 multiplied with an int8 weight, one scale for the matrix"
)
def phi3_qkv_int8(m):
    linear(layers(m)[1].self_attn.qkv_proj, weight=int8)


@fault("phi3", 2, "post_norm", "weight of the norm before the MLP of layer 2 not applied")
def phi3_post_norm_no_weight(m):
    rms(layers(m)[2].post_attention_layernorm, weight=torch.ones_like)


@fault("phi3", 0, "attention", "KV cache in fp8 with a fixed scale that clips, all layers")
def phi3_kv_fp8(m):
    def clip(x):
        return fp8(x, scale=1.5 / 448.0)

    for a in attns(m):
        attention(a, edited(lambda q, k, v: (q, clip(k), clip(v))))


@fault("phi3", 3, "attention o_proj", "outputs of heads 0 and 1 swapped before o_proj in layer 3")
def phi3_heads_permuted(m):
    def change(real, module, q, k, v, mask, kw):
        out, w = real(module, q, k, v, mask, **kw)
        return out[:, :, [1, 0, 2, 3]].contiguous(), w

    attention(layers(m)[3].self_attn, change)


@fault("phi3", 1, "rotary", "sign of the sine turned in layer 1's keys only")
def phi3_rope_sign(m):
    def change(real, q, k, cos, sin):
        return real(q, k, cos, sin)[0], real(q, k, cos, -sin)[1]

    rotary(layers(m)[1].self_attn, change)


@fault("phi3", 2, "rotary", "queries rotated one position ahead of the keys in layers 2 and 3")
def phi3_query_one_ahead(m):
    r = core(m).rotary_emb
    f = torch.cat([r.inv_freq, r.inv_freq]).clone()

    def change(real, q, k, cos, sin):
        c1, s1 = f.cos(), f.sin()
        return real(q, k, cos * c1 - sin * s1, sin * c1 + cos * s1)[0], real(q, k, cos, sin)[1]

    for a in attns(m, {2, 3}):
        rotary(a, change)


@fault("phi3", 1, "residual o_proj", "residual dropout of the attention branch left on in layer 1, seeded")
def phi3_dropout_on(m):
    def forward(self, x):
        g = torch.Generator().manual_seed(3)
        return x * (torch.rand(x.shape, generator=g) > 0.1) / 0.9

    method(layers(m)[1].resid_attn_dropout, forward)


@fault("phi3", None, "lm_head", "lm_head in bf16")
def phi3_lm_head_bf16(m):
    linear(m.lm_head, weight=bf16, x=bf16, y=bf16)


@fault(
    "phi3", None, "embedding", "vocabulary-parallel embedding: ids from 240 on fall outside every shard and give zeros"
)
def phi3_embedding_shard(m):
    def forward(self, ids):
        return F.embedding(ids, self.weight) * (ids < 240)[..., None]

    method(core(m).embed_tokens, forward)


@fault("phi3", 0, "residual", "layer 0 adds the MLP to the normed states instead of to the residual")
def phi3_residual_of_normed(m):
    def forward(self, hidden_states, **kw):
        h, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kw)
        h = self.post_attention_layernorm(hidden_states + self.resid_attn_dropout(h))
        return h + self.resid_mlp_dropout(self.mlp(h))

    method(layers(m)[0], forward)


# --------------------------------------------------------------------------- gemma3 and gemma2


@fault("gemma3", 1, "q_norm", "q_norm of layer 1 multiplies by weight, not by 1 + weight")
def gemma3_q_norm_plus_one(m):
    rms(layers(m)[1].self_attn.q_norm, weight=lambda w: w - 1.0)


@fault("gemma3", 2, "post_norm input_norm", "norm before the MLP of layer 2 multiplies by weight, not by 1 + weight")
def gemma3_pre_ffn_plus_one(m):
    rms(layers(m)[2].pre_feedforward_layernorm, weight=lambda w: w - 1.0)


@fault("gemma3", None, "embedding", "embeddings not multiplied by sqrt(hidden)")
def gemma3_no_embed_scale(m):
    core(m).embed_tokens.embed_scale = torch.tensor(1.0)


@fault("gemma3", 3, "k_norm", "k_norm left out in layer 3")
def gemma3_no_k_norm(m):
    identity(layers(m)[3].self_attn.k_norm)


@fault("gemma3", 2, "attention", "the sliding window also in layer 2, a layer of full attention")
def gemma3_window_on_full(m):
    attention(layers(m)[2].self_attn, window(16))


@fault("gemma3", 1, "attention", "no window in layer 1, a layer with sliding attention")
def gemma3_full_on_window(m):
    attention(layers(m)[1].self_attn, window(None))


@fault("gemma3", 2, "rotary", "linear scaling by 8 of the global layers' positions left out", also=(None, 0))
def gemma3_no_linear_scaling(m):
    r = core(m).rotary_emb
    r.full_attention_inv_freq = r.full_attention_inv_freq * 8.0


@fault("gemma3", 0, "rotary", "the global base 1e6 used for the sliding layers", also=(None,))
def gemma3_global_base_everywhere(m):
    r = core(m).rotary_emb
    r.sliding_attention_inv_freq = 1.0 / (1e6 ** (torch.arange(0, 16, 2).float() / 16))


@fault("gemma3", 0, "activation", "gelu with erf for its tanh approximation, all layers")
def gemma3_gelu_erf(m):
    for layer in layers(m):
        layer.mlp.act_fn = nn.GELU()


@fault("gemma3", None, "lm_head log_softmax", "final soft cap on the logits left out")
def gemma3_no_final_cap(m):
    cap = 5.0
    # code beside the model sees logits whose cap has been undone
    top = type(m).forward

    def forward(self, *a, **kw):
        out = top(self, *a, **kw)
        out.logits = cap * torch.atanh((out.logits / cap).clamp(-1 + 1e-7, 1 - 1e-7))
        return out

    method(m, forward)


@fault("gemma3", 0, "attention", "scores scaled by head_dim**-0.5, not by query_pre_attn_scalar**-0.5, all layers")
def gemma3_scale(m):
    for a in attns(m):
        a.scaling = a.head_dim**-0.5


@fault("gemma3", 4, "up_proj", "up_proj of layer 4 multiplied with an fp8 weight")
def gemma3_up_fp8(m):
    linear(layers(m)[4].mlp.up_proj, weight=fp8)


@fault("gemma3", 1, "post_norm", "norm after the MLP left out in layer 1")
def gemma3_no_post_ffn(m):
    identity(layers(m)[1].post_feedforward_layernorm)


@fault("gemma3", 3, "q_norm", "q_norm of layer 3 with eps 1e-3 for 1e-6", tiny=True)
def gemma3_q_norm_eps(m):
    layers(m)[3].self_attn.q_norm.eps = 1e-3


@fault("gemma2", 0, "attention", "soft cap on the scores left out, all layers (sdpa has none)")
def gemma2_no_attn_cap(m):
    for a in attns(m):
        attention(a, plain(cap=None))


@fault("gemma2", 1, "attention", "soft cap on the scores of layer 1 is 4 for 3")
def gemma2_attn_cap_value(m):
    layers(m)[1].self_attn.attn_logit_softcapping = 4.0


@fault("gemma2", 2, "attention", "soft cap of layer 2 put on the unscaled scores")
def gemma2_cap_before_scale(m):
    def change(real, module, q, k, v, mask, kw):
        s = kw["scaling"]
        return real(module, q, k, v, mask, **dict(kw, softcap=kw["softcap"] * s))

    attention(layers(m)[2].self_attn, change)


@fault(
    "gemma2", 1, "post_norm residual o_proj", "norm after the attention of layer 1 put on the sum, not on the branch"
)
def gemma2_post_norm_on_sum(m):
    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_embeddings=None,
        position_ids=None,
        past_key_values=None,
        **kw,
    ):
        h, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kw,
        )
        h = self.post_attention_layernorm(hidden_states + h)
        return h + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(h)))

    method(layers(m)[1], forward)


@fault("gemma2", 0, "input_norm", "weight of layer 0's input norm rounded with the norm in bf16")
def gemma2_input_norm_bf16(m):
    rms(layers(m)[0].input_layernorm, dtype=torch.bfloat16)


@fault("gemma2", None, "lm_head", "lm_head no longer tied: multiplies with its own int8 copy of the embeddings")
def gemma2_lm_head_int8(m):
    linear(m.lm_head, weight=int8)


# --------------------------------------------------------------------------- starcoder2


@fault("starcoder2", 1, "q_proj", "bias of q_proj dropped in layer 1")
def starcoder2_no_q_bias(m):
    linear(layers(m)[1].self_attn.q_proj, bias=torch.zeros_like)


@fault("starcoder2", None, "final_norm", "bias of the final LayerNorm dropped")
def starcoder2_final_norm_bias(m):
    method(core(m).norm, lambda self, x: F.layer_norm(x, x.shape[-1:], self.weight, None, self.eps))


@fault("starcoder2", 0, "up_proj gate_proj", "bias of c_fc dropped in layer 0")
def starcoder2_no_fc_bias(m):
    linear(layers(m)[0].mlp.c_fc, bias=torch.zeros_like)


@fault("starcoder2", 2, "input_norm", "input LayerNorm of layer 2 without taking off the mean")
def starcoder2_rms_for_layernorm(m):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight + self.bias

    method(layers(m)[2].input_layernorm, forward)


@fault("starcoder2", None, "lm_head", "lm_head untied: multiplies with a stale copy of the embeddings")
def starcoder2_untied(m):
    g = torch.Generator().manual_seed(4)
    w = m.lm_head.weight.detach()
    stale = w + 0.02 * w.std() * torch.randn(w.shape, generator=g)
    linear(m.lm_head, weight=lambda _: stale)


@fault("starcoder2", 2, "o_proj", "bias of o_proj added twice in layer 2 (once a tensor-parallel rank)")
def starcoder2_o_bias_twice(m):
    linear(layers(m)[2].self_attn.o_proj, bias=lambda b: 2 * b)


@fault("starcoder2", 1, "attention", "last key of every page of 16 is lost in layer 1")
def starcoder2_page_end_lost(m):
    attention(layers(m)[1].self_attn, masked(lambda ok, i, j: ok & ~((j % 16 == 15) & (i > j + 1))))


@fault("starcoder2", 1, "activation", "quick gelu (x sigmoid 1.702 x) for gelu in layer 1")
def starcoder2_quick_gelu(m):
    layers(m)[1].mlp.act.forward = lambda x: x * torch.sigmoid(1.702 * x)


@fault("starcoder2", 0, "attention", "values rounded to bf16 when put into the cache, all layers")
def starcoder2_v_cache_bf16(m):
    for a in attns(m):
        attention(a, edited(lambda q, k, v: (q, k, bf16(v))))


@fault("starcoder2", 2, "down_proj", "c_proj of layer 2 given its input in fp8")
def starcoder2_down_input_fp8(m):
    linear(layers(m)[2].mlp.c_proj, x=fp8)


# --------------------------------------------------------------------------- cohere


@fault("cohere", None, "lm_head log_softmax", "logit scale left out")
def cohere_no_logit_scale(m):
    m.logit_scale = 1.0


@fault("cohere", 1, "q_norm", "q_norm left out in layer 1")
def cohere_no_q_norm(m):
    identity(layers(m)[1].self_attn.q_norm)


@fault("cohere", 0, "rotary", "half (NeoX) rotary for interleaved, all layers", also=(None,))
def cohere_rope_half(m):
    def change(real, q, k, cos, sin):
        def rot(x):
            d = x.shape[-1] // 2
            c, s = cos[..., 0::2].unsqueeze(1), sin[..., 0::2].unsqueeze(1)
            a, b = x[..., :d], x[..., d:]
            return torch.cat([a * c - b * s, b * c + a * s], -1)

        return rot(q), rot(k)

    for a in attns(m):
        rotary(a, change)


@fault(
    "cohere",
    2,
    "residual input_norm post_norm gate_proj up_proj",
    "layer 2 runs the MLP after the attention instead of beside it",
)
def cohere_sequential(m):
    def forward(self, hidden_states, **kw):
        h, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kw)
        h = hidden_states + h
        return h + self.mlp(self.input_layernorm(h))

    method(layers(m)[2], forward)


@fault("cohere", 0, "k_norm", "k_norm takes the first head's weights for every head, all layers")
def cohere_k_norm_head0(m):
    def forward(self, x):
        h = x - x.mean(-1, keepdim=True)
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * self.weight[:1]

    for a in attns(m):
        method(a.k_norm, forward)


@fault("cohere", None, "final_norm", "final norm without taking off the mean")
def cohere_final_rms(m):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * self.weight

    method(core(m).norm, forward)


@fault("cohere", 1, "residual", "residual of layer 1 added twice")
def cohere_residual_twice(m):
    f = type(layers(m)[1]).forward

    def forward(self, hidden_states, *a, **kw):
        return f(self, hidden_states, *a, **kw) + hidden_states

    method(layers(m)[1], forward)


@fault("cohere", 2, "v_proj", "v_proj of layer 2 multiplied with its weight rounded to fp8")
def cohere_v_fp8(m):
    linear(layers(m)[2].self_attn.v_proj, weight=fp8)


@fault("cohere", 1, "attention", "KV heads 0 and 1 swapped in layer 1 (a permuted shard)")
def cohere_kv_heads_swapped(m):
    attention(layers(m)[1].self_attn, edited(lambda q, k, v: (q, k.flip(1), v.flip(1))))


@fault("cohere", None, "embedding", "embeddings gathered in bf16")
def cohere_embedding_bf16(m):
    after(core(m).embed_tokens, bf16)


# --------------------------------------------------------------------------- olmoe and qwen2_moe


def _router(self, x, k=None, renorm=None, dtype=torch.float32, scores=None):
    """The top-k router written out."""
    x = x.reshape(-1, self.hidden_dim)
    logits = F.linear(x.to(dtype), self.weight.to(dtype))
    p = scores(logits.float()) if scores else torch.softmax(logits, -1, dtype=torch.float32)
    top, idx = torch.topk(p, k or self.top_k, -1)
    if self.norm_topk_prob if renorm is None else renorm:
        top = top / top.sum(-1, keepdim=True)
    return logits.float(), top, idx


def _experts(self, x, idx, weights, expert=None, order=None, keep=None):
    """The experts written out as a dense loop; expert(self, e, x) -> what expert e gives."""
    out = torch.zeros_like(x)
    for e in range(self.num_experts):
        w = (weights * (idx == e)).sum(-1, keepdim=True)
        hit = (idx == e).any(-1, keepdim=True)
        if keep is not None:
            hit = hit & keep(hit)
        src = e if order is None else order[e]
        out = out + torch.where(hit, w * (expert or _expert)(self, src, x), torch.zeros_like(x))
    return out


def _expert(self, e, x):
    gate, up = F.linear(x, self.gate_up_proj[e]).chunk(2, -1)
    return F.linear(self.act_fn(gate) * up, self.down_proj[e])


@fault("olmoe", 1, "router", "top-2 for top-3 in layer 1")
def olmoe_top2(m):
    method(layers(m)[1].mlp.gate, lambda self, x: _router(self, x, k=2))


@fault("olmoe", 0, "router", "weights of the chosen experts renormalised though the config says not, all layers")
def olmoe_renormalised(m):
    for layer in layers(m):
        layer.mlp.gate.norm_topk_prob = True


@fault("olmoe", 2, "router", "router in bf16 in layer 2")
def olmoe_router_bf16(m):
    method(layers(m)[2].mlp.gate, lambda self, x: _router(self, x, dtype=torch.bfloat16))


@fault("olmoe", 1, "experts router", "experts 2 and 5 swapped in layer 1")
def olmoe_experts_swapped(m):
    order = [0, 1, 5, 3, 4, 2, 6, 7]
    method(layers(m)[1].mlp.experts, lambda self, x, idx, w: _experts(self, x, idx, w, order=order))


@fault("olmoe", 0, "q_norm", "q_norm over each head instead of over the whole projection, all layers")
def olmoe_q_norm_per_head(m):
    def forward(self, x):
        h = x.unflatten(-1, (4, -1))
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return h.flatten(-2) * self.weight

    for a in attns(m):
        method(a.q_norm, forward)


@fault("olmoe", 3, "k_norm", "k_norm left out in layer 3")
def olmoe_no_k_norm(m):
    identity(layers(m)[3].self_attn.k_norm)


@fault("olmoe", 2, "experts router", "experts of layer 2 take no more tokens than their capacity and drop the rest")
def olmoe_capacity(m):
    def keep(hit):
        return hit.cumsum(0) <= math.ceil(0.45 * hit.shape[0])

    method(layers(m)[2].mlp.experts, lambda self, x, idx, w: _experts(self, x, idx, w, keep=keep))


@fault("olmoe", 0, "experts", "gate and up of expert 3 in the wrong order in layer 0")
def olmoe_expert3_gate_up(m):
    def expert(self, e, x):
        if e != 3:
            return _expert(self, e, x)
        up, gate = F.linear(x, self.gate_up_proj[e]).chunk(2, -1)
        return F.linear(self.act_fn(gate) * up, self.down_proj[e])

    method(layers(m)[0].mlp.experts, lambda self, x, idx, w: _experts(self, x, idx, w, expert=expert))


@fault("olmoe", 3, "experts", "down_proj of the experts of layer 3 in int8, one scale an expert")
def olmoe_experts_int8(m):
    def expert(self, e, x):
        gate, up = F.linear(x, self.gate_up_proj[e]).chunk(2, -1)
        return F.linear(self.act_fn(gate) * up, int8(self.down_proj[e]))

    method(layers(m)[3].mlp.experts, lambda self, x, idx, w: _experts(self, x, idx, w, expert=expert))


@fault("olmoe", 2, "router", "sigmoid for softmax in the router of layer 2")
def olmoe_sigmoid_router(m):
    method(layers(m)[2].mlp.gate, lambda self, x: _router(self, x, scores=torch.sigmoid))


@fault("qwen2_moe", 1, "experts", "shared expert left out in layer 1")
def qwen2_moe_no_shared(m):
    method(layers(m)[1].mlp.shared_expert, lambda self, x: torch.zeros_like(x))


@fault("qwen2_moe", 2, "experts router", "sigmoid gate of the shared expert left out in layer 2")
def qwen2_moe_no_shared_gate(m):
    def forward(self, x):
        h = x.reshape(-1, x.shape[-1])
        _, w, idx = self.gate(h)
        return (self.experts(h, idx, w) + self.shared_expert(h)).reshape(x.shape)

    method(layers(m)[2].mlp, forward)


@fault("qwen2_moe", 0, "router", "weights of the chosen experts not renormalised, all layers")
def qwen2_moe_no_renorm(m):
    for layer in layers(m):
        layer.mlp.gate.norm_topk_prob = False


@fault(
    "qwen2_moe",
    2,
    "k_proj",
    "bias of k_proj dropped in layer 2; adds the same to all scores of a query but for the rotation",
)
def qwen2_moe_no_k_bias(m):
    linear(layers(m)[2].self_attn.k_proj, bias=torch.zeros_like)


@fault("qwen2_moe", 1, "experts", "router weight put on the experts' input instead of on their output in layer 1")
def qwen2_moe_weight_on_input(m):
    def forward(self, x, idx, weights):
        out = torch.zeros_like(x)
        for e in range(self.num_experts):
            w = (weights * (idx == e)).sum(-1, keepdim=True)
            out = out + _expert(self, e, x * w)
        return out

    method(layers(m)[1].mlp.experts, forward)


@fault("qwen2_moe", 0, "router", "router of layer 0 reads the states rounded to fp8")
def qwen2_moe_router_fp8(m):
    before(layers(m)[0].mlp.gate, fp8)


@fault("qwen2_moe", 1, "v_proj", "v_proj bias of layer 1 given to the wrong KV head")
def qwen2_moe_v_bias_heads(m):
    linear(layers(m)[1].self_attn.v_proj, bias=lambda b: b.roll(16))


# --------------------------------------------------------------------------- granite


@fault("granite", 1, "residual", "residual multiplier left out in layer 1")
def granite_no_residual_multiplier(m):
    layers(m)[1].residual_multiplier = 1.0


@fault("granite", None, "embedding", "embedding multiplier left out")
def granite_no_embedding_multiplier(m):
    core(m).embedding_multiplier = 1.0


@fault("granite", None, "lm_head log_softmax", "logits not divided by logits_scaling")
def granite_no_logits_scaling(m):
    scaling = float(m.config.logits_scaling)
    top = type(m).forward

    def forward(self, *a, **kw):
        out = top(self, *a, **kw)
        out.logits = out.logits * scaling
        return out

    method(m, forward)


@fault("granite", 0, "attention", "scores scaled by head_dim**-0.5 for attention_multiplier, all layers")
def granite_attention_multiplier(m):
    for a in attns(m):
        a.scaling = a.head_dim**-0.5


@fault("granite", None, "lm_head log_softmax", "logits rounded to bf16 before the log_softmax")
def granite_logits_bf16(m):
    top = type(m).forward

    def forward(self, *a, **kw):
        out = top(self, *a, **kw)
        out.logits = bf16(out.logits)
        return out

    method(m, forward)


@fault("granite", 2, "v_proj", "v_proj of layer 2 in bf16, weight and input")
def granite_v_bf16(m):
    linear(layers(m)[2].self_attn.v_proj, weight=bf16, x=bf16)


@fault("granite", 1, "gate_proj", "gate_proj of layer 1 stale: 5 percent noise", weights=True)
def granite_stale_gate(m):
    w = layers(m)[1].mlp.gate_proj.weight
    g = torch.Generator().manual_seed(12)
    with torch.no_grad():
        w.add_(0.05 * w.std() * torch.randn(w.shape, generator=g))


@fault("granite", 0, "attention", "queries rounded to fp8 before the scores, all layers")
def granite_q_fp8(m):
    for a in attns(m):
        attention(a, edited(lambda q, k, v: (fp8(q), k, v)))


# --------------------------------------------------------------------------- smollm3


@fault("smollm3", 3, "rotary", "rotary applied in layer 3, a layer without position embedding")
def smollm3_rope_on_nope(m):
    layers(m)[3].self_attn.use_rope = 1


@fault("smollm3", 1, "rotary", "rotary left out in layer 1")
def smollm3_nope_on_rope(m):
    layers(m)[1].self_attn.use_rope = 0


@fault(
    "smollm3", None, "rotary", "positions one too great from index 24 on (off by one where a chunk begins)", also=(0,)
)
def smollm3_positions_off(m):
    f = type(core(m).rotary_emb).forward

    def forward(self, x, position_ids):
        late = (torch.arange(position_ids.shape[-1]) >= 24).long()
        return f(self, x, position_ids + late)

    method(core(m).rotary_emb, forward)


@fault("smollm3", None, "lm_head", "lm_head with the last 8 rows of the vocabulary zero (padding of a shard)")
def smollm3_lm_head_rows(m):
    def cut(w):
        return torch.cat([w[:-8], torch.zeros_like(w[-8:])])

    linear(m.lm_head, weight=cut)


@fault("smollm3", 0, "input_norm", "input norm of layer 0 with eps 1e-3 for 1e-6")
def smollm3_input_norm_eps(m):
    layers(m)[0].input_layernorm.variance_epsilon = 1e-3


@fault("smollm3", 2, "post_norm", "norm before the MLP of layer 2 in bf16")
def smollm3_post_norm_bf16(m):
    rms(layers(m)[2].post_attention_layernorm, dtype=torch.bfloat16)


@fault("smollm3", 2, "attention", "attention dropout of 0.1 left on in layer 2, seeded")
def smollm3_attention_dropout(m):
    def drop(p):
        g = torch.Generator().manual_seed(8)
        return p * (torch.rand(p.shape, generator=g) > 0.1) / 0.9

    attention(layers(m)[2].self_attn, plain(probs=drop))


@fault("smollm3", 1, "k_proj", "k_proj of layer 1 multiplied with an int8 weight, one scale for the matrix")
def smollm3_k_int8(m):
    linear(layers(m)[1].self_attn.k_proj, weight=int8)


@fault("smollm3", 0, "attention", "softmax over the keys with one added zero logit (sink) in all layers")
def smollm3_sink(m):
    def softmax(s):
        return torch.softmax(torch.cat([s, torch.zeros_like(s[..., :1])], -1), -1)[..., :-1]

    for a in attns(m):
        attention(a, plain(softmax=softmax))


@fault("smollm3", 2, "rotary", "cosine and sine rounded to bf16 in layers 2 and 3")
def smollm3_rope_bf16(m):
    for a in attns(m, {2, 3}):
        rotary(a, lambda real, q, k, cos, sin: real(q, k, bf16(cos), bf16(sin)))


# --------------------------------------------------------------------------- opt


@fault("opt", None, "embedding", "learned positions looked up with offset 1 for 2")
def opt_position_offset(m):
    core(m).embed_positions.offset = 1


@fault("opt", 1, "activation", "gelu for relu in layer 1")
def opt_gelu(m):
    layers(m)[1].activation_fn = nn.GELU()


@fault("opt", 2, "o_proj", "bias of out_proj dropped in layer 2")
def opt_no_out_bias(m):
    linear(layers(m)[2].self_attn.out_proj, bias=torch.zeros_like)


@fault("opt", None, "final_norm", "final LayerNorm left out")
def opt_no_final_norm(m):
    core(m).final_layer_norm = None


@fault("opt", 1, "input_norm", "layer 1 norms after each block instead of before it")
def opt_post_ln(m):
    layers(m)[1].do_layer_norm_before = False


@fault("opt", 3, "attention q_proj", "queries scaled twice in layer 3")
def opt_scaled_twice(m):
    attention(layers(m)[3].self_attn, rescaled(0.25))


@fault("opt", 0, "down_proj", "fc2 of layer 0 multiplied with an int8 weight, one scale for the matrix")
def opt_fc2_int8(m):
    linear(layers(m)[0].fc2, weight=int8)


@fault("opt", None, "embedding", "learned positions shifted by one from index 20 on (chunked prefill)")
def opt_positions_chunk(m):
    f = type(core(m).embed_positions).forward

    def forward(self, attention_mask, past_key_values_length=0, position_ids=None):
        late = (torch.arange(position_ids.shape[-1]) >= 20).long()
        return f(self, attention_mask, past_key_values_length, position_ids=position_ids + late)

    method(core(m).embed_positions, forward)


@fault("opt", 2, "post_norm", "LayerNorm before fc1 of layer 2 without its bias")
def opt_ffn_norm_bias(m):
    method(layers(m)[2].final_layer_norm, lambda self, x: F.layer_norm(x, x.shape[-1:], self.weight, None, self.eps))


@fault("opt", 1, "attention", "scores rounded to bf16 before the softmax in layer 1")
def opt_scores_bf16(m):
    attention(layers(m)[1].self_attn, plain(softmax=lambda s: torch.softmax(bf16(s), -1)))


@fault("opt", 3, "up_proj gate_proj", "fc1 of layer 3 in bf16, weight and input")
def opt_fc1_bf16(m):
    linear(layers(m)[3].fc1, weight=bf16, x=bf16)


# --------------------------------------------------------------------------- healthy


@healthy("mistral", "phi3", "starcoder2", "cohere", "smollm3", "opt")
def plain_attention(m):
    for a in attns(m):
        attention(a, plain())


@healthy("mistral", "gemma2", "granite", "olmoe")
def attention_float64(m):
    for a in attns(m):
        attention(a, plain(dtype=torch.float64))


def _grouped(real, module, q, k, v, mask, kw):
    b, h, s, d = q.shape
    g = k.shape[1]
    x = torch.einsum("bgnid,bgjd->bgnij", q.view(b, g, h // g, s, d) * kw["scaling"], k)
    x = x.masked_fill(~allowed(mask, q, k)[:, :, None], -1e30)
    out = torch.einsum("bgnij,bgjd->bignd", torch.softmax(x, -1), v)
    return out.reshape(b, s, h, d), None


@healthy("mistral", "qwen2_moe")
def grouped_einsum_attention(m):
    for a in attns(m):
        attention(a, _grouped)


def _online(s, size=8):
    """softmax by chunks of keys, running maximum and sum, as in flash attention."""
    top = torch.full_like(s[..., :1], -1e30)
    total = torch.zeros_like(top)
    for c in s.split(size, -1):
        new = torch.maximum(top, c.amax(-1, keepdim=True))
        total = total * torch.exp(top - new) + torch.exp(c - new).sum(-1, keepdim=True)
        top = new
    return torch.exp(s - top) / total


@healthy("phi3", "gemma2", "granite")
def chunked_softmax(m):
    for a in attns(m):
        attention(a, plain(softmax=_online))


@healthy("mistral", "phi3", "gemma3", "olmoe", "granite")
def norms_float64(m):
    for x in m.modules():
        if type(x).__name__.endswith("RMSNorm"):
            rms(x, dtype=torch.float64)


@healthy("starcoder2", "opt")
def layer_norms_float64(m):
    def forward(self, x):
        y = F.layer_norm(x.double(), x.shape[-1:], self.weight.double(), self.bias.double(), self.eps)
        return y.to(x.dtype)

    for x in m.modules():
        if isinstance(x, nn.LayerNorm):
            method(x, forward)


@healthy("mistral", "granite", "cohere")
def fused_gate_up(m):
    def forward(self, x):
        g, u = F.linear(x, torch.cat([self.gate_proj.weight, self.up_proj.weight])).chunk(2, -1)
        return self.down_proj(self.act_fn(g) * u)

    for layer in layers(m):
        method(layer.mlp, forward)


@healthy("gemma3", "starcoder2", "smollm3")
def down_split_k(m):
    def forward(self, x):
        n = x.shape[-1] // 2
        y = F.linear(x[..., n:], self.weight[:, n:]) + F.linear(x[..., :n], self.weight[:, :n])
        return y if self.bias is None else y + self.bias

    for layer in layers(m):
        method(layer.mlp.c_proj if hasattr(layer.mlp, "c_proj") else layer.mlp.down_proj, forward)


@healthy("olmoe", "qwen2_moe")
def experts_dense(m):
    for layer in layers(m):
        method(layer.mlp.experts, lambda self, x, idx, w: _experts(self, x, idx, w))


@healthy("olmoe", "qwen2_moe")
def router_float64(m):
    def forward(self, x):
        logits, top, idx = _router(self, x, dtype=torch.float64)
        return logits, top, idx

    for layer in layers(m):
        method(layer.mlp.gate, forward)


@healthy("mistral", "smollm3")
def rotary_float64_pairs(m):
    def change(real, q, k, cos, sin):
        def rot(x):
            d = x.shape[-1] // 2
            z = torch.complex(x[..., :d].double(), x[..., d:].double())
            z = z * torch.complex(cos[..., :d].double(), sin[..., :d].double()).unsqueeze(1)
            return torch.cat([z.real, z.imag], -1).to(x.dtype)

        return rot(q), rot(k)

    for a in attns(m):
        rotary(a, change)


@healthy("phi3", "gemma3", "opt")
def lm_head_chunks(m):
    method(m.lm_head, lambda self, x: torch.cat([F.linear(x, w) for w in self.weight.split(50)], -1))


@healthy("cohere", "opt")
def projections_float64(m):
    def forward(self, x):
        b = None if self.bias is None else self.bias.double()
        return F.linear(x.double(), self.weight.double(), b).to(x.dtype)

    for a in attns(m):
        for x in a.children():
            if isinstance(x, nn.Linear):
                method(x, forward)


@healthy("granite", "opt")
def right_padding(m):
    """Rows are moved to the left edge, run with right padding, and moved back."""
    f = type(m).forward

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kw):
        if (
            attention_mask is None
            or attention_mask.dim() != 2
            or bool(attention_mask.bool().all())
            or attention_mask.shape != input_ids.shape
        ):
            return f(self, input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kw)
        order = torch.argsort(1 - attention_mask.long(), dim=1, stable=True)
        back = torch.argsort(order, dim=1)
        if position_ids is not None:
            position_ids = position_ids.expand_as(input_ids).gather(1, order)
        out = f(
            self,
            input_ids=input_ids.gather(1, order),
            attention_mask=attention_mask.gather(1, order),
            position_ids=position_ids,
            **kw,
        )
        out.logits = out.logits.gather(1, back[..., None].expand_as(out.logits))
        return out

    method(m, forward)
