"""A third list of faults of code planted in real transformers models, written blind.

ARCHITECTURES  name -> config dict (+ "class", the dotted path of the ForCausalLM)
initialise     fills a model with lively random numbers, in place
FAULTS         list of Fault; `plant(model)` changes the model's code or buffers in place
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


def _arch(module, prefix, extra=None, drop=(), **kw):
    args = {k: v for k, v in {**_BASE, **kw}.items() if k not in drop}
    d = _config(module, prefix, **args)
    d["class"] = f"transformers.models.{module}.modeling_{module}.{prefix}ForCausalLM"
    d.update(extra or {})
    return d


def _rope(theta=10000.0, **kw):
    return {"rope_type": "default", "rope_theta": theta, **kw}


def _yarn(**kw):
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 128,
        **kw,
    }


_HYBRID = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_EAGER_EXPERTS = {"experts_implementation": "eager"}

ARCHITECTURES = {
    "glm4": _arch(
        "glm4", "Glm4", head_dim=16, attention_bias=True, rms_norm_eps=1.5625e-7,
        rope_parameters=_rope(partial_rotary_factor=0.5),
    ),
    "exaone4": _arch(
        "exaone4", "Exaone4", sliding_window=16, sliding_window_pattern=4, layer_types=_HYBRID,
        rope_parameters=_rope(50000.0),
    ),
    "nemotron": _arch(
        "nemotron", "Nemotron", mlp_bias=True, intermediate_size=160, num_hidden_layers=4,
        rope_parameters=_rope(partial_rotary_factor=0.5),
    ),
    "mixtral": _arch(
        "mixtral", "Mixtral", extra=_EAGER_EXPERTS, intermediate_size=48, num_local_experts=6,
        num_experts_per_tok=2, sliding_window=None, rope_parameters=_rope(1e6),
    ),
    "deepseek_v3": _arch(
        "deepseek_v3", "DeepseekV3", extra=_EAGER_EXPERTS, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=24,
        qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=16, moe_intermediate_size=32, n_routed_experts=8,
        num_experts_per_tok=3, n_group=4, topk_group=2, n_shared_experts=1, routed_scaling_factor=2.5,
        first_k_dense_replace=1, num_mtp_layers=0, rope_parameters=_yarn(mscale=1.0, mscale_all_dim=1.0),
    ),
    "gpt_oss": _arch(
        "gpt_oss", "GptOss", extra={"attn_implementation": "eager", **_EAGER_EXPERTS}, head_dim=16,
        intermediate_size=48, num_local_experts=6, num_experts_per_tok=2, sliding_window=16, swiglu_limit=1.5,
        layer_types=["sliding_attention", "full_attention"] * 2, rope_parameters=_yarn(truncate=False),
    ),
    "phi": _arch(
        "phi", "Phi", intermediate_size=160, qk_layernorm=True, resid_pdrop=0.1,
        rope_parameters=_rope(partial_rotary_factor=0.5),
    ),
    "granitemoeshared": _arch(
        "granitemoeshared", "GraniteMoeShared", extra=_EAGER_EXPERTS, intermediate_size=40, shared_intermediate_size=56,
        num_local_experts=6, num_experts_per_tok=2, embedding_multiplier=3.3, logits_scaling=4.0,
        residual_multiplier=0.4, attention_multiplier=0.2, rope_parameters=_rope(),
    ),
    "cohere2": _arch(
        "cohere2", "Cohere2", sliding_window=16, logit_scale=0.25, tie_word_embeddings=True,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], rope_parameters=_rope(),
    ),
    "gptj": _arch(
        "gptj", "GPTJ", extra={"attn_implementation": "eager"},
        drop=(
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "max_position_embeddings",
        ),
        n_embd=64, n_layer=4, n_head=4, n_positions=512, n_inner=160, rotary_dim=8, resid_pdrop=0.1, attn_pdrop=0.1,
    ),
}  # fmt: skip


def build(name):
    """A fresh model of that architecture (torch's own initialisation; call initialise after)."""
    d = dict(ARCHITECTURES[name])
    module, cls = d.pop("class").rsplit(".", 1)
    cls = getattr(importlib.import_module(module), cls)
    attn, experts = d.pop("attn_implementation", None), d.pop("experts_implementation", None)
    config = cls.config_class(**d)
    if attn:
        config._attn_implementation = attn
    if experts:
        config._experts_implementation = experts
    return cls(config).eval()


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
            if kind.endswith("Norm1P"):
                randn(p, 0.2)
            elif kind.endswith("Norm"):
                randn(p, 0.2, 0.0 if pname == "bias" else 1.0)
            elif pname == "bias" or pname.endswith("_bias"):
                randn(p, 0.2)
            elif pname == "sinks":
                randn(p, 0.7, 0.7)
            elif p is head.weight:
                randn(p, head_std)
            elif isinstance(module, nn.Embedding):
                randn(p, 0.3)
            elif "router" in kind.lower():
                randn(p, 1.5 / math.sqrt(p.shape[-1]))
            elif kind == "GptOssExperts":
                randn(p, 1.2 / math.sqrt(p.shape[-2]))
            elif name.endswith(("q_proj", "k_proj", "q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa")):
                randn(p, 1.4 / math.sqrt(p.shape[-1]))
            else:
                randn(p, 1.2 / math.sqrt(p.shape[-1]))
        for bname, b in module.named_buffers(recurse=False):
            if bname == "e_score_correction_bias":
                randn(b, 0.15)
    return model


# --------------------------------------------------------------------------- tools for planting


def core(model):
    return model.transformer if hasattr(model, "transformer") else model.model


def layers(model):
    return core(model).h if hasattr(core(model), "h") else core(model).layers


def attns(model, only=None):
    return [getattr(x, "self_attn", None) or x.attn for i, x in enumerate(layers(model)) if only is None or i in only]


def method(module, fn):
    """Replace the forward of this one instance."""
    module.forward = types.MethodType(fn, module)


def unwrapped(module):
    f = type(module).forward
    while hasattr(f, "__wrapped__"):
        f = f.__wrapped__
    return f


class _Overlay(dict):
    """Globals of a function with some names replaced; all else is looked up live."""

    def __missing__(self, key):
        return self._under[key]


def with_globals(module, **names):
    f = unwrapped(module)
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
    real = unwrapped(module).__globals__["ALL_ATTENTION_FUNCTIONS"]
    with_globals(module, ALL_ATTENTION_FUNCTIONS=_Registry(real, change))


def allowed(mask, q, k):
    """The mask as booleans [b, 1, q, k]."""
    ql, kl = q.shape[-2], k.shape[-2]
    if mask is None:
        i = torch.arange(ql)[:, None] + kl - ql
        return (torch.arange(kl)[None] <= i)[None, None].expand(q.shape[0], 1, ql, kl)
    return mask[..., :kl] if mask.dtype == torch.bool else mask[..., :kl] > -1e4


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
        new = (j <= i) & ok.any(-2, keepdim=True)
        return new & (i - j < w) if w else new

    return masked(edit)


def rescaled(factor):
    def change(real, module, q, k, v, mask, kw):
        return real(module, q, k, v, mask, **dict(kw, scaling=kw["scaling"] * factor))

    return change


def edited(fn):
    """fn(q, k, v) -> q, k, v just before the scores."""

    def change(real, module, q, k, v, mask, kw):
        return real(module, *fn(q, k, v), mask, **kw)

    return change


def plain(softmax=None, repeat=None, dtype=None, sinks=True):
    """Attention written out."""

    def change(real, module, q, k, v, mask, kw):
        n = q.shape[1] // k.shape[1]
        rep = repeat or (lambda x, n: x.repeat_interleave(n, 1))
        out_dtype = q.dtype
        if dtype:
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        k, v = rep(k, n), rep(v, n)
        s = q @ k.transpose(-1, -2) * kw["scaling"]
        s = s.masked_fill(~allowed(mask, q, k), torch.finfo(s.dtype).min)
        aux = kw.get("s_aux") if sinks else None
        if aux is not None:
            aux = aux.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:-1], 1)
            p = torch.softmax(torch.cat([s, aux], -1), -1)[..., :-1]
        else:
            p = softmax(s) if softmax else torch.softmax(s, -1)
        return (p @ v).transpose(1, 2).contiguous().to(out_dtype), None

    return change


def rotary(module, change):
    """change(real, q, k, cos, sin) -> q, k for this attention module."""
    live = unwrapped(module).__globals__

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


def identity(module):
    method(module, lambda self, x, *a, **kw: x)


@torch.no_grad()
def step(weight, seed, size):
    """A small step away, as weights of one update before."""
    g = torch.Generator().manual_seed(seed)
    weight.add_((size * weight.std() * torch.randn(weight.shape, generator=g)).to(weight.dtype))


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


# --------------------------------------------------------------------------- glm4


def _halves(x, cos, sin):
    """NeoX rotation of the first 2 * cos.shape[-1] dimensions of each head; cos, sin [b, s, d / 2]."""
    d = cos.shape[-1]
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b, rest = x[..., :d], x[..., d : 2 * d], x[..., 2 * d :]
    return torch.cat([a * c - b * s, b * c + a * s, rest], -1)


@fault("glm4", 0, "rotary", "half (NeoX) rotary for interleaved, all layers", also=(None,))
def glm4_rope_half(m):
    def change(real, q, k, cos, sin):
        c, s = cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]
        return _halves(q, c, s), _halves(k, c, s)

    for a in attns(m):
        rotary(a, change)


@fault("glm4", None, "rotary", "partial rotary factor 1 for 0.5: the whole head is rotated", also=(0,))
def glm4_partial_factor(m):
    core(m).rotary_emb.inv_freq = 1.0 / (1e4 ** (torch.arange(0, 16, 2).float() / 16))


@fault("glm4", 1, "post_norm post_self_attn_layernorm", "norm after the attention left out in layer 1")
def glm4_no_post_attn_norm(m):
    identity(layers(m)[1].post_self_attn_layernorm)


@fault("glm4", 0, "input_norm", "eps 1e-4 for 1.6e-7 in the input norms of all layers")
def glm4_input_norm_eps(m):
    for layer in layers(m):
        layer.input_layernorm.variance_epsilon = 1e-4


@fault("glm4", 3, "v_proj", "bias of v_proj dropped in layer 3")
def glm4_no_v_bias(m):
    linear(layers(m)[3].self_attn.v_proj, bias=torch.zeros_like)


@fault("glm4", 2, "gate_proj up_proj activation", "gate and up taken as alternating columns of gate_up_proj in layer 2")
def glm4_gate_up_alternating(m):
    def forward(self, x):
        y = self.gate_up_proj(x)
        return self.down_proj(y[..., 1::2] * self.activation_fn(y[..., 0::2]))

    method(layers(m)[2].mlp, forward)


@fault(
    "glm4", 1, "post_norm post_self_attn_layernorm post_mlp_layernorm", "weights of the norms after attention and after MLP of layer 1 "
    "loaded into each other", weights=True,
)  # fmt: skip
def glm4_sandwich_norms_swapped(m):
    layer = layers(m)[1]
    a, b = layer.post_self_attn_layernorm.weight, layer.post_mlp_layernorm.weight
    with torch.no_grad():
        old = a.clone()
        a.copy_(b)
        b.copy_(old)


@fault("glm4", 2, "down_proj", "down_proj of layer 2 summed over two halves of its input, each rounded to bf16")
def glm4_down_reduce_bf16(m):
    def forward(self, x):
        n = x.shape[-1] // 2
        return bf16(F.linear(x[..., :n], self.weight[:, :n])) + bf16(F.linear(x[..., n:], self.weight[:, n:]))

    method(layers(m)[2].mlp.down_proj, forward)


# --------------------------------------------------------------------------- exaone4


@fault("exaone4", 0, "attention", "sliding window of 15 keys for 16, all sliding layers")
def exaone4_window_15(m):
    for a in attns(m, {0, 1, 3}):
        attention(a, window(15))


@fault("exaone4", 2, "rotary", "rotary applied in layer 2, a layer of full attention without positions")
def exaone4_rope_on_full(m):
    layers(m)[2].self_attn.is_sliding = True


@fault("exaone4", 1, "q_norm", "q_norm left out in layer 1")
def exaone4_no_q_norm(m):
    identity(layers(m)[1].self_attn.q_norm)


@fault("exaone4", 3, "q_norm k_norm", "q_norm and k_norm take each other's weight in layer 3")
def exaone4_qk_norm_swapped(m):
    a = layers(m)[3].self_attn

    def forward_with(weight):
        def forward(self, x):
            h = x.float()
            return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)

        return forward

    wq, wk = a.q_norm.weight, a.k_norm.weight
    method(a.q_norm, forward_with(wk))
    method(a.k_norm, forward_with(wq))


@fault("exaone4", 1, "k_norm", "k_norm of layer 1 applied after the rotation instead of before it")
def exaone4_k_norm_after_rope(m):
    a = layers(m)[1].self_attn
    norm = type(a.k_norm).forward
    identity(a.k_norm)
    attention(a, edited(lambda q, k, v: (q, norm(a.k_norm, k), v)))


@fault(
    "exaone4", 2, "post_norm input_norm q_proj k_proj v_proj",
    "layer 2 norms what the attention reads, as in Llama, and not what it gives",
)  # fmt: skip
def exaone4_pre_norm(m):
    def forward(self, hidden_states, **kw):
        h, _ = self.self_attn(hidden_states=self.post_attention_layernorm(hidden_states), **kw)
        h = hidden_states + h
        return h + self.post_feedforward_layernorm(self.mlp(h))

    method(layers(m)[2], forward)


@fault("exaone4", 1, "residual", "residual around the MLP of layer 1 left out")
def exaone4_no_mlp_residual(m):
    def forward(self, hidden_states, **kw):
        h, _ = self.self_attn(hidden_states=hidden_states, **kw)
        h = hidden_states + self.post_attention_layernorm(h)
        return self.post_feedforward_layernorm(self.mlp(h))

    method(layers(m)[1], forward)


@fault("exaone4", None, "rotary", "cosine and sine rounded to bf16, all layers", also=(0,))
def exaone4_cos_sin_bf16(m):
    after(core(m).rotary_emb, lambda y: (bf16(y[0]), bf16(y[1])))


# --------------------------------------------------------------------------- nemotron


@fault("nemotron", 1, "input_norm", "weight + 1 of the input norm of layer 1 rounded to fp8")
def nemotron_norm_weight_fp8(m):
    def forward(self, x):
        w = (self.weight + 1.0).to(torch.float8_e4m3fn).to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, w, self.bias, self.eps)

    method(layers(m)[1].input_layernorm, forward)


@fault("nemotron", 3, "post_norm", "norm before the MLP of layer 3 multiplies by weight, not by 1 + weight")
def nemotron_post_norm_plus_one(m):
    method(
        layers(m)[3].post_attention_layernorm,
        lambda self, x: F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps),
    )


@fault("nemotron", 2, "activation", "relu for squared relu in layer 2")
def nemotron_relu(m):
    layers(m)[2].mlp.act_fn = nn.ReLU()


@fault("nemotron", None, "rotary", "rotary base 5e5 for 1e4", also=(0,))
def nemotron_rope_theta(m):
    core(m).rotary_emb.inv_freq = 1.0 / (5e5 ** (torch.arange(0, 8, 2).float() / 8))


@fault("nemotron", None, "final_norm", "bias of the final norm dropped")
def nemotron_final_norm_bias(m):
    method(core(m).norm, lambda self, x: F.layer_norm(x, self.normalized_shape, self.weight + 1.0, None, self.eps))


@fault("nemotron", 3, "attention", "query heads grouped with KV heads 0 1 0 1 for 0 0 1 1 in layer 3")
def nemotron_gqa_tiled(m):
    attention(layers(m)[3].self_attn, plain(repeat=lambda x, n: x.repeat(1, n, 1, 1)))


@fault("nemotron", 0, "down_proj", "bias of down_proj of layer 0 added once a tensor-parallel rank, of two")
def nemotron_down_bias_twice(m):
    linear(layers(m)[0].mlp.down_proj, bias=lambda b: 2 * b)


@fault("nemotron", 2, "up_proj gate_proj", "up_proj of layer 2 in bf16, weight and input")
def nemotron_up_bf16(m):
    linear(layers(m)[2].mlp.up_proj, weight=bf16, x=bf16)


@fault("nemotron", 1, "input_norm q_proj k_proj v_proj", "layer 1 runs under bf16 autocast")
def nemotron_layer_autocast(m):
    f = type(layers(m)[1]).forward

    def forward(self, *a, **kw):
        with torch.autocast("cpu", torch.bfloat16):
            return f(self, *a, **kw).to(self.mlp.up_proj.weight.dtype)

    method(layers(m)[1], forward)


# --------------------------------------------------------------------------- mixtral


def _mixtral_router(self, x, k=None, dtype=None, renorm=True):
    x = x.reshape(-1, self.hidden_dim)
    d = dtype or x.dtype
    logits = F.linear(x.to(d), self.weight.to(d)).to(x.dtype)
    top, idx = torch.topk(torch.softmax(logits.float(), -1), k or self.top_k, -1)
    if renorm:
        top = top / top.sum(-1, keepdim=True)
    return logits, top, idx


def _expert(self, e, x):
    gate, up = F.linear(x, self.gate_up_proj[e]).chunk(2, -1)
    return F.linear(self.act_fn(gate) * up, self.down_proj[e])


def _oss_gate(self, y, alpha=None, limit=None, one=1.0):
    alpha = self.alpha if alpha is None else alpha
    limit = self.limit if limit is None else limit
    gate, up = y[..., 0::2].clamp(max=limit), y[..., 1::2].clamp(-limit, limit)
    return (up + one) * gate * torch.sigmoid(gate * alpha)


def _oss_expert(self, e, x, **kw):
    y = _oss_gate(self, x @ self.gate_up_proj[e] + self.gate_up_proj_bias[e], **kw)
    return y @ self.down_proj[e] + self.down_proj_bias[e]


def _experts(self, x, idx, weights, expert=_expert, order=None, backwards=False):
    """The experts as a dense loop; expert(self, e, x) -> what expert e gives."""
    out = torch.zeros_like(x)
    n = self.num_experts
    for e in reversed(range(n)) if backwards else range(n):
        w = (weights * (idx == e)).sum(-1, keepdim=True)
        hit = (idx == e).any(-1, keepdim=True)
        y = (w * expert(self, order[e] if order else e, x)).to(x.dtype)
        out = out + torch.where(hit, y, torch.zeros_like(x))
    return out


@fault("mixtral", 1, "router", "router of layer 1 in bf16, weight and input")
def mixtral_router_bf16(m):
    method(layers(m)[1].mlp.gate, lambda self, x: _mixtral_router(self, x, dtype=torch.bfloat16))


@fault("mixtral", 2, "router", "one expert a token for two in layer 2")
def mixtral_top1(m):
    method(layers(m)[2].mlp.gate, lambda self, x: _mixtral_router(self, x, k=1))


@fault("mixtral", 0, "router", "weights of the two chosen experts not normalised to one, all layers")
def mixtral_no_renorm(m):
    for layer in layers(m):
        method(layer.mlp.gate, lambda self, x: _mixtral_router(self, x, renorm=False))


@fault(
    "mixtral", 3, "experts router", "experts of layer 3 in another order: 0 2 1 4 3 5 (read by rank and not by number)"
)
def mixtral_expert_order(m):
    method(layers(m)[3].mlp.experts, lambda self, x, i, w: _experts(self, x, i, w, order=[0, 2, 1, 4, 3, 5]))


@fault("mixtral", 1, "experts", "w1 and w3 of all experts of layer 1 taken for each other")
def mixtral_w1_w3(m):
    def expert(self, e, x):
        up, gate = F.linear(x, self.gate_up_proj[e]).chunk(2, -1)
        return F.linear(self.act_fn(gate) * up, self.down_proj[e])

    method(layers(m)[1].mlp.experts, lambda self, x, i, w: _experts(self, x, i, w, expert=expert))


@fault("mixtral", None, "rotary", "positions divided by two (linear scaling left on)", also=(0,))
def mixtral_linear_scaling(m):
    core(m).rotary_emb.inv_freq = core(m).rotary_emb.inv_freq / 2.0


@fault("mixtral", 2, "attention", "query 24 also sees key 25 in layer 2, one wrong cell of the mask")
def mixtral_one_future_key(m):
    attention(layers(m)[2].self_attn, masked(lambda ok, i, j: ok | ((i == 24) & (j == 25) & ok.any(-2, keepdim=True))))


@fault("mixtral", 0, "experts", "down projection of expert 4 of layer 0 in int8, one scale for the matrix")
def mixtral_expert4_int8(m):
    def expert(self, e, x):
        gate, up = F.linear(x, self.gate_up_proj[e]).chunk(2, -1)
        return F.linear(self.act_fn(gate) * up, int8(self.down_proj[e]) if e == 4 else self.down_proj[e])

    method(layers(m)[0].mlp.experts, lambda self, x, i, w: _experts(self, x, i, w, expert=expert))


# --------------------------------------------------------------------------- deepseek_v3


@fault("deepseek_v3", 0, "attention", "scale of the scores without yarn's mscale squared, all layers")
def deepseek_no_mscale(m):
    for a in attns(m):
        a.scaling = a.qk_head_dim**-0.5


@fault("deepseek_v3", 0, "rotary", "half (NeoX) rotary for interleaved, all layers", also=(None,))
def deepseek_rope_half(m):
    for a in attns(m):
        half = unwrapped(a).__globals__["apply_rotary_pos_emb"]
        with_globals(a, apply_rotary_pos_emb_interleave=half)


@fault("deepseek_v3", 1, "router", "routed_scaling_factor left out in layer 1")
def deepseek_no_routed_scaling(m):
    layers(m)[1].mlp.gate.routed_scaling_factor = 1.0


def _deepseek_router(self, x, groups=True, bias_in_weights=False):
    logits = F.linear(x.reshape(-1, self.hidden_dim).float(), self.weight.float())
    scores = logits.sigmoid()
    choice = scores + self.e_score_correction_bias
    if groups:
        g = choice.unflatten(-1, (self.num_group, -1))
        best = g.topk(2, -1).values.sum(-1).topk(self.topk_group, -1).indices
        keep = torch.zeros(g.shape[:2], dtype=torch.bool).scatter(1, best, True)
        masked_choice = g.masked_fill(~keep[..., None], -torch.inf).flatten(-2)
    else:
        masked_choice = choice
    idx = masked_choice.topk(self.top_k, -1).indices
    w = (choice if bias_in_weights else scores).gather(1, idx)
    w = w / (w.sum(-1, keepdim=True) + 1e-20)
    return logits, w * self.routed_scaling_factor, idx


@fault("deepseek_v3", 2, "router", "correction bias also in the weights of the chosen experts in layer 2")
def deepseek_bias_in_weights(m):
    method(layers(m)[2].mlp.gate, lambda self, x: _deepseek_router(self, x, bias_in_weights=True))


@fault("deepseek_v3", 3, "router", "correction bias of layer 3 still zero (the buffer not loaded)", weights=True)
def deepseek_no_correction_bias(m):
    with torch.no_grad():
        layers(m)[3].mlp.gate.e_score_correction_bias.zero_()


@fault("deepseek_v3", 3, "router", "experts of layer 3 chosen among all groups, not among the best two")
def deepseek_no_groups(m):
    method(layers(m)[3].mlp.gate, lambda self, x: _deepseek_router(self, x, groups=False))


@fault(
    "deepseek_v3", 2, "experts shared_experts down_proj", "shared expert of layer 2 also times routed_scaling_factor"
)
def deepseek_shared_scaled(m):
    after(layers(m)[2].mlp.shared_experts, lambda y: 2.5 * y)


@fault("deepseek_v3", 1, "kv_a_layernorm k_norm", "norm of the compressed keys and values left out in layer 1")
def deepseek_no_kv_norm(m):
    identity(layers(m)[1].self_attn.kv_a_layernorm)


@fault("deepseek_v3", 3, "q_a_proj q_proj", "q_a_proj of layer 3 multiplied with an fp8 weight")
def deepseek_q_a_fp8(m):
    linear(layers(m)[3].self_attn.q_a_proj, weight=fp8)


@fault("deepseek_v3", 2, "kv_b_proj kv_a_layernorm", "compressed keys and values of layer 2 kept in fp8")
def deepseek_latent_fp8(m):
    before(layers(m)[2].self_attn.kv_b_proj, fp8)


# --------------------------------------------------------------------------- gpt_oss


@fault("gpt_oss", 0, "attention", "sinks left out of the softmax, all layers")
def gptoss_no_sinks(m):
    for a in attns(m):
        attention(a, plain(sinks=False))


@fault("gpt_oss", 1, "experts activation", "silu for the gate with alpha 1.702 in layer 1")
def gptoss_alpha(m):
    layers(m)[1].mlp.experts.alpha = 1.0


@fault("gpt_oss", 2, "experts activation", "gate and up of layer 2 not clamped to the limit")
def gptoss_no_limit(m):
    layers(m)[2].mlp.experts.limit = 6e4


def _oss_experts(m, layer, expert, **kw):
    method(
        layers(m)[layer].mlp.experts,
        lambda self, x, router_indices=None, routing_weights=None: _experts(
            self, x, router_indices, routing_weights, expert=expert, **kw
        ),
    )


@fault("gpt_oss", 3, "experts activation", "up and not up + 1 multiplied with the gate in layer 3")
def gptoss_no_plus_one(m):
    _oss_experts(m, 3, lambda self, e, x: _oss_expert(self, e, x, one=0.0))


@fault("gpt_oss", 0, "router", "softmax over all experts before the choice, not over the chosen, all layers")
def gptoss_softmax_first(m):
    def forward(self, x):
        logits = F.linear(x, self.weight, self.bias)
        top, idx = torch.softmax(logits, -1).topk(self.top_k, -1)
        return logits, top, idx

    for layer in layers(m):
        method(layer.mlp.router, forward)


@fault("gpt_oss", None, "rotary", "yarn's attention factor left out of cosine and sine", also=(0,))
def gptoss_no_attention_factor(m):
    core(m).rotary_emb.attention_scaling = 1.0


@fault("gpt_oss", 0, "attention", "sliding window of 17 keys for 16, both sliding layers")
def gptoss_window_17(m):
    for a in attns(m, {0, 2}):
        attention(a, window(17))


@fault(
    "gpt_oss", 1, "experts", "bias of the experts' down projection of layer 1 added whole, without the router's weight"
)
def gptoss_down_bias_whole(m):
    def forward(self, x, router_indices=None, routing_weights=None):
        def bare(self, e, x):
            return _oss_gate(self, x @ self.gate_up_proj[e] + self.gate_up_proj_bias[e]) @ self.down_proj[e]

        out = _experts(self, x, router_indices, routing_weights, expert=bare)
        return out + self.down_proj_bias[router_indices].sum(1)

    method(layers(m)[1].mlp.experts, forward)


@fault("gpt_oss", 2, "router", "bias of the router dropped in layer 2")
def gptoss_no_router_bias(m):
    def forward(self, x):
        logits = F.linear(x, self.weight)
        top, idx = logits.topk(self.top_k, -1)
        return logits, torch.softmax(top, -1), idx

    method(layers(m)[2].mlp.router, forward)


# --------------------------------------------------------------------------- phi


@fault("phi", 0, "activation", "gelu with erf for its tanh approximation, all layers")
def phi_gelu_erf(m):
    for layer in layers(m):
        layer.mlp.activation_fn = nn.GELU()


@fault("phi", 2, "o_proj", "bias of dense dropped in layer 2")
def phi_no_dense_bias(m):
    linear(layers(m)[2].self_attn.dense, bias=torch.zeros_like)


@fault("phi", 1, "q_norm q_layernorm", "q_layernorm of layer 1 without its bias")
def phi_q_norm_bias(m):
    method(
        layers(m)[1].self_attn.q_layernorm,
        lambda self, x: F.layer_norm(x, self.normalized_shape, self.weight, None, self.eps),
    )


@fault("phi", 3, "gate_proj up_proj input_norm post_norm", "MLP of layer 3 reads the states before the norm")
def phi_mlp_unnormed(m):
    def forward(self, hidden_states, **kw):
        h, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kw)
        return h + self.mlp(hidden_states) + hidden_states

    method(layers(m)[3], forward)


@fault("phi", None, "rotary", "positions count from the second token of a row: the first two both have 0", also=(0,))
def phi_positions_off(m):
    f = type(core(m).rotary_emb).forward
    method(core(m).rotary_emb, lambda self, x, position_ids: f(self, x, (position_ids - 1).clamp(min=0)))


@fault("phi", None, "lm_head", "bias of lm_head dropped")
def phi_no_lm_head_bias(m):
    linear(m.lm_head, bias=torch.zeros_like)


@fault("phi", 1, "down_proj", "fc2 of layer 1 multiplied with an int8 weight, one scale for the matrix")
def phi_fc2_int8(m):
    linear(layers(m)[1].mlp.fc2, weight=int8)


# --------------------------------------------------------------------------- granitemoeshared


@fault("granitemoeshared", 2, "residual", "residual multiplier of the MoE branch of layer 2 left out")
def granitemoe_no_residual_multiplier(m):
    def forward(self, hidden_states, **kw):
        h, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kw)
        x = hidden_states + h * self.residual_multiplier
        h = self.post_attention_layernorm(x)
        return x + self.block_sparse_moe(h) + self.shared_mlp(h)

    method(layers(m)[2], forward)


@fault(
    "granitemoeshared", 1, "experts shared_mlp input_linear output_linear residual", "shared MLP left out in layer 1"
)
def granitemoe_no_shared(m):
    method(layers(m)[1].shared_mlp, lambda self, x: torch.zeros_like(x))


@fault("granitemoeshared", None, "embedding", "embedding multiplier rounded to bf16")
def granitemoe_embedding_multiplier(m):
    core(m).embedding_multiplier = float(torch.tensor(3.3).bfloat16())


@fault(
    "granitemoeshared", None, "lm_head log_softmax", "logits multiplied with logits_scaling instead of divided by it"
)
def granitemoe_logits_scaling(m):
    top = type(m).forward
    s = float(m.config.logits_scaling)

    def forward(self, *a, **kw):
        out = top(self, *a, **kw)
        out.logits = out.logits * (s * s)
        return out

    method(m, forward)


@fault("granitemoeshared", 3, "router", "softmax over all experts before the choice in layer 3")
def granitemoe_softmax_first(m):
    def forward(self, x):
        logits = F.linear(x, self.weight).float()
        top, idx = torch.softmax(logits, -1).topk(self.top_k, -1)
        return idx, top.type_as(x), logits

    method(layers(m)[3].block_sparse_moe.router, forward)


@fault("granitemoeshared", 2, "attention", "keys rounded to fp8 when put into the cache in layer 2")
def granitemoe_k_cache_fp8(m):
    attention(layers(m)[2].self_attn, edited(lambda q, k, v: (q, fp8(k), v)))


@fault("granitemoeshared", 1, "o_proj", "o_proj weight of layer 1 stale by a small step", weights=True)
def granitemoe_stale_o_proj(m):
    step(layers(m)[1].self_attn.o_proj.weight, seed=21, size=0.02)


# --------------------------------------------------------------------------- cohere2


@fault("cohere2", 3, "rotary", "rotary applied in layer 3, a layer of full attention without positions")
def cohere2_rope_on_full(m):
    layers(m)[3].self_attn.sliding_window = 16


@fault("cohere2", 1, "attention", "no sliding window in layer 1")
def cohere2_no_window(m):
    attention(layers(m)[1].self_attn, window(None))


@fault("cohere2", 2, "input_norm", "RMSNorm for LayerNorm in layer 2: the mean is not taken off")
def cohere2_rms(m):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    method(layers(m)[2].input_layernorm, forward)


@fault(
    "cohere2", None, "lm_head", "padding rows of the first of two vocabulary shards kept: ids from 128 on shifted by 2"
)
def cohere2_padded_vocabulary(m):
    def padded(w):
        return torch.cat([w[:128], torch.zeros_like(w[:2]), w[128:-2]])

    linear(m.lm_head, weight=padded)


@fault("cohere2", None, "rotary", "inverse frequencies cast to bf16 with the model", also=(0,))
def cohere2_inv_freq_bf16(m):
    core(m).rotary_emb.inv_freq = bf16(core(m).rotary_emb.inv_freq)


@fault(
    "cohere2",
    2,
    "down_proj",
    "MLP of layer 2 run in chunks of 16 tokens, the last of each full chunk lost in down_proj",
)
def cohere2_mlp_chunk_end(m):
    def cut(y):
        lost = torch.arange(y.shape[-2]) % 16 == 15
        return y.masked_fill(lost[:, None], 0.0)

    linear(layers(m)[2].mlp.down_proj, y=cut)


@fault("cohere2", 0, "attention", "values rounded to fp8 when put into the cache, all layers")
def cohere2_v_cache_fp8(m):
    for a in attns(m):
        attention(a, edited(lambda q, k, v: (q, k, fp8(v))))


@fault("cohere2", 1, "residual", "output of layer 1's attention counted twice in the parallel sum")
def cohere2_attention_twice(m):
    def forward(self, hidden_states, **kw):
        x = self.input_layernorm(hidden_states)
        h, _ = self.self_attn(hidden_states=x, **kw)
        return hidden_states + h + (self.mlp(x) + h)

    method(layers(m)[1], forward)


@fault("cohere2", None, "lm_head", "lm_head untied: multiplies with the embeddings of a step before")
def cohere2_untied_head(m):
    stale = m.lm_head.weight.detach().clone()
    step(stale, seed=31, size=0.01)
    linear(m.lm_head, weight=lambda w: stale.to(w.dtype))


# --------------------------------------------------------------------------- gptj


@fault("gptj", 0, "rotary attention", "half (NeoX) rotary for interleaved, all layers", also=(None,))
def gptj_rope_half(m):
    def apply(x, sin, cos):  # x [b, s, h, d]
        return _halves(x.transpose(1, 2), cos, sin).transpose(1, 2)

    for a in attns(m):
        with_globals(a, apply_rotary_pos_emb=apply)


@fault("gptj", 0, "rotary attention", "rotary over the whole head of 16 for its first 8, all layers", also=(None,))
def gptj_rotary_dim(m):
    make = unwrapped(attns(m)[0]).__globals__["create_sinusoidal_positions"]
    for a in attns(m):
        a.rotary_dim = 16
        a.embed_positions = make(512, 16)


def gptj_attn(module, scale=1.0, dtype=None, mask=lambda x: x, probs=None):
    """GPT-J's _attn written out."""

    def _attn(self, query, key, value, attention_mask=None):
        out = value.dtype
        q, k, v = (x.to(dtype or torch.float32) for x in (query, key, value))
        ok = mask(allowed(attention_mask, query, key))
        s = (q @ k.transpose(-1, -2) / (self.scale_attn * scale)).masked_fill(~ok, -3e4)
        p = probs(s) if probs else torch.softmax(s, -1)
        return (p @ v).to(out), p

    module._attn = types.MethodType(_attn, module)


@fault("gptj", 2, "attention", "scores divided by head_dim and not by its root in layer 2")
def gptj_scale(m):
    a = attns(m)[2]
    a.scale_attn = float(a.head_dim)


@fault("gptj", 1, "attention", "scores and softmax of layer 1 in fp16")
def gptj_softmax_fp16(m):
    gptj_attn(attns(m)[1], dtype=torch.float16)


@fault("gptj", 3, "attention", "chunk boundary: queries 32 to 39 do not see the keys before 32 in layer 3")
def gptj_chunk_boundary(m):
    def cut(ok):
        i, j = torch.arange(ok.shape[-2])[:, None], torch.arange(ok.shape[-1])[None]
        return ok & ~((i >= 32) & (i < 40) & (j < 32))

    gptj_attn(attns(m)[3], mask=cut)


@fault("gptj", 1, "up_proj gate_proj fc_in", "bias of fc_in dropped in layer 1")
def gptj_no_fc_in_bias(m):
    linear(layers(m)[1].mlp.fc_in, bias=torch.zeros_like)


@fault("gptj", 3, "activation", "quick gelu (x sigmoid 1.702 x) for gelu_new in layer 3")
def gptj_quick_gelu(m):
    method(layers(m)[3].mlp.act, lambda self, x: x * torch.sigmoid(1.702 * x))


@fault(
    "gptj", 2, "input_norm attention q_proj k_proj v_proj o_proj up_proj gate_proj fc_in fc_out down_proj",
    "all weights of layer 2 stale by a small step", weights=True,
)  # fmt: skip
def gptj_stale_layer(m):
    for n, p in enumerate(layers(m)[2].parameters()):
        step(p, seed=100 + n, size=0.01)


# --------------------------------------------------------------------------- healthy


@healthy("glm4", "exaone4", "nemotron", "mixtral", "deepseek_v3", "gpt_oss", "phi", "granitemoeshared", "cohere2")
def attention_by_hand(m):
    for a in attns(m):
        attention(a, plain())


@healthy("deepseek_v3", "gpt_oss", "cohere2")
def attention_in_float64(m):
    for a in attns(m):
        attention(a, plain(dtype=torch.float64))


@healthy("glm4", "phi", "granitemoeshared")
def softmax_by_logsumexp(m):
    for a in attns(m):
        attention(a, plain(softmax=lambda s: torch.exp(s - torch.logsumexp(s, -1, keepdim=True))))


def _by_queries(real, module, q, k, v, mask, kw):
    """Attention of 16 queries at a time, heads grouped, by einsum."""
    _, h, s, _ = q.shape
    g = k.shape[1]
    ok = allowed(mask, q, k)
    out = []
    for i in range(0, s, 16):
        x = torch.einsum("bgnid,bgjd->bgnij", q[:, :, i : i + 16].unflatten(1, (g, h // g)), k) * kw["scaling"]
        x = x.masked_fill(~ok[:, :, None, i : i + 16], torch.finfo(x.dtype).min)
        out.append(torch.einsum("bgnij,bgjd->bignd", torch.softmax(x, -1), v).flatten(2, 3))
    return torch.cat(out, 1), None


@healthy("exaone4", "mixtral", "nemotron")
def attention_by_query_chunks(m):
    for a in attns(m):
        attention(a, _by_queries)


@healthy("gptj")
def gptj_attention_by_hand(m):
    for a in attns(m):
        gptj_attn(a, probs=lambda s: torch.exp(torch.log_softmax(s, -1)))


@healthy("gptj")
def gptj_attention_in_float64(m):
    for a in attns(m):
        gptj_attn(a, dtype=torch.float64)


@healthy("glm4", "exaone4", "mixtral", "deepseek_v3", "gpt_oss", "granitemoeshared")
def rms_by_sqrt_in_float64(m):
    def forward(self, x):
        h = x.double()
        h = h / torch.sqrt((h * h).sum(-1, keepdim=True) / h.shape[-1] + self.variance_epsilon)
        return (h * self.weight.double()).to(x.dtype)

    for x in m.modules():
        if type(x).__name__.endswith("RMSNorm"):
            method(x, forward)


@healthy("nemotron", "phi", "gptj", "cohere2")
def layer_norm_by_hand(m):
    def forward(self, x):
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        one = 1.0 if type(self).__name__.endswith("1P") else 0.0
        h = x - x.mean(-1, keepdim=True)
        h = h * torch.rsqrt(h.var(-1, unbiased=False, keepdim=True) + eps) * (self.weight + one)
        return h if getattr(self, "bias", None) is None else h + self.bias

    for x in m.modules():
        if type(x).__name__.endswith(("LayerNorm", "Norm1P")):
            method(x, forward)


@healthy("mixtral", "exaone4", "phi")
def qkv_fused(m):
    """One matrix product for q, k and v, summed over two halves of the input, whose columns are then taken apart."""

    def of(parts, start, stop):
        def forward(self, x):
            w = torch.cat([p.weight for p in parts])
            n = w.shape[1] // 2
            y = F.linear(x[..., :n], w[:, :n]) + F.linear(x[..., n:], w[:, n:])
            if self.bias is not None:
                y = y + torch.cat([p.bias for p in parts])
            return y[..., start:stop].contiguous()

        return forward

    for a in attns(m):
        parts, start = (a.q_proj, a.k_proj, a.v_proj), 0
        for p in parts:
            method(p, of(parts, start, start + p.out_features))
            start += p.out_features


@healthy("glm4")
def gate_up_split(m):
    def forward(self, x):
        gate, up = self.weight.double().chunk(2)
        return torch.cat([x.double() @ gate.t(), x.double() @ up.t()], -1).to(x.dtype)

    for layer in layers(m):
        method(layer.mlp.gate_up_proj, forward)


@healthy("mixtral", "deepseek_v3", "granitemoeshared")
def experts_weighted_before_down(m):
    """Experts from the last to the first, the router's weight put on what the down projection (no bias) reads."""

    def forward(self, x, idx, weights):
        out = torch.zeros_like(x)
        for e in reversed(range(self.num_experts)):
            token, place = torch.where(idx == e)
            gate = F.linear(x[token], self.gate_up_proj[e][: self.intermediate_dim])
            up = F.linear(x[token], self.gate_up_proj[e][self.intermediate_dim :])
            h = self.act_fn(gate) * up * weights[token, place, None].to(x.dtype)
            out = out.index_add(0, token, F.linear(h, self.down_proj[e]))
        return out

    for x in list(m.modules()):
        if type(x).__name__.endswith("Experts"):
            method(x, forward)


@healthy("gpt_oss")
def gptoss_experts_backwards(m):
    for n in range(len(layers(m))):
        _oss_experts(m, n, _oss_expert, backwards=True)


@healthy("exaone4", "granitemoeshared")
def rotary_by_complex_numbers(m):
    def change(real, q, k, cos, sin):
        d = cos.shape[-1] // 2
        turn = torch.complex(cos[..., :d].double(), sin[..., :d].double()).unsqueeze(1)

        def rot(x):
            z = torch.complex(x[..., :d].double(), x[..., d:].double()) * turn
            return torch.cat([z.real, z.imag], -1).to(x.dtype)

        return rot(q), rot(k)

    for a in attns(m):
        rotary(a, change)


@healthy("mixtral", "glm4", "phi")
def cos_sin_from_float64_angles(m):
    def forward(self, x, position_ids):
        angle = position_ids[..., None].double() * self.inv_freq.double()
        angle = torch.cat([angle, angle], -1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)

    method(core(m).rotary_emb, forward)


@healthy("cohere2")
def cohere2_rotary_by_complex_numbers(m):
    def change(real, q, k, cos, sin):
        turn = torch.complex(cos[..., ::2].double(), sin[..., ::2].double()).unsqueeze(1)

        def rot(x):
            z = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) * turn
            return torch.view_as_real(z).flatten(-2).to(x.dtype)

        return rot(q), rot(k)

    for a in attns(m):
        rotary(a, change)


@healthy("deepseek_v3")
def deepseek_rotary_pairs_left_in_place(m):
    """Queries and keys rotated in pairs that stay where they are: other order of the dimensions, same scores."""
    for a in attns(m):

        def apply(q, k, cos, sin, **kw):
            c, s = (x[..., : x.shape[-1] // 2].unsqueeze(1) for x in (cos, sin))

            def rot(x):
                x, y = x[..., 0::2], x[..., 1::2]
                return torch.stack([x * c - y * s, y * c + x * s], -1).flatten(-2)

            return rot(q), rot(k)

        with_globals(a, apply_rotary_pos_emb_interleave=apply)


@healthy("deepseek_v3")
def deepseek_rotary_reordered(m):
    """Pairs brought together first, then the half rotation."""
    for a in attns(m):
        half = unwrapped(a).__globals__["apply_rotary_pos_emb"]

        def apply(q, k, cos, sin, half=half, **kw):
            def together(x):
                return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

            return half(together(q), together(k), cos, sin)

        with_globals(a, apply_rotary_pos_emb_interleave=apply)


@healthy("exaone4", "nemotron", "gptj", "phi")
def mlp_by_token_chunks(m):
    """13 tokens at a time, and the last projection summed over three parts of its input (split K)."""

    def split_k(self, x):
        y = 0.0
        for xs, ws in zip(x.split(56, -1), self.weight.split(56, -1), strict=True):
            y = y + F.linear(xs, ws)
        return y if self.bias is None else y + self.bias

    for layer in layers(m):
        f = type(layer.mlp).forward
        method(layer.mlp, lambda self, x, f=f: torch.cat([f(self, c) for c in x.split(13, 1)], 1))
        down = next(getattr(layer.mlp, n) for n in ("down_proj", "fc_out", "fc2") if hasattr(layer.mlp, n))
        method(down, split_k)


@healthy("glm4", "phi", "gptj", "gpt_oss")
def bias_added_first(m):
    """The bias is where the sum over four parts of the input begins, and the products by einsum."""

    def forward(self, x):
        n = self.weight.shape[1] // 4
        y = 0.0 if self.bias is None else self.bias
        for i in range(0, 4 * n, n):
            y = y + torch.einsum("...i,oi->...o", x[..., i : i + n], self.weight[:, i : i + n])
        return y

    for a in attns(m):
        for x in a.children():
            if isinstance(x, nn.Linear):
                method(x, forward)


@healthy("nemotron", "gpt_oss", "deepseek_v3")
def lm_head_in_float64(m):
    method(m.lm_head, lambda self, x: F.linear(x.double(), self.weight.double()).to(x.dtype))


@healthy("cohere2", "gptj")
def lm_head_by_rows(m):
    def forward(self, x):
        b = self.bias
        parts = range(0, self.weight.shape[0], 60)
        return torch.cat(
            [F.linear(x, self.weight[i : i + 60], None if b is None else b[i : i + 60]) for i in parts], -1
        )

    method(m.lm_head, forward)


@healthy("mixtral")
def mixtral_router_chosen_first(m):
    """The choice among the logits, the softmax over the chosen."""

    def forward(self, x):
        logits = F.linear(x.reshape(-1, self.hidden_dim), self.weight)
        top, idx = logits.float().topk(self.top_k, -1)
        return logits, torch.softmax(top, -1), idx

    for layer in layers(m):
        method(layer.mlp.gate, forward)


@healthy("gpt_oss")
def gptoss_router_normalised_after(m):
    """Softmax over all in float64, the choice, then normalised."""

    def forward(self, x):
        logits = F.linear(x, self.weight, self.bias)
        top, idx = torch.softmax(logits.double(), -1).topk(self.top_k, -1)
        return logits, (top / top.sum(-1, keepdim=True)).to(x.dtype), idx

    for layer in layers(m):
        method(layer.mlp.router, forward)


@healthy("deepseek_v3")
def deepseek_router_by_hand(m):
    for layer in layers(m):
        if hasattr(layer.mlp, "gate"):
            method(layer.mlp.gate, lambda self, x: _deepseek_router(self, x))


@healthy("granitemoeshared")
def granitemoe_layer_by_hand(m):
    """The multiplier on each branch, and the shared MLP added after the experts."""

    def forward(self, hidden_states, **kw):
        r = self.residual_multiplier
        h, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kw)
        x = hidden_states + r * h
        h = self.post_attention_layernorm(x)
        return (x + r * self.block_sparse_moe(h)) + r * self.shared_mlp(h)

    for layer in layers(m):
        method(layer, forward)


@healthy("cohere2")
def cohere2_sum_in_another_order(m):
    def forward(self, hidden_states, **kw):
        x = self.input_layernorm(hidden_states)
        y = self.mlp(x)
        h, _ = self.self_attn(hidden_states=x, **kw)
        return (y + h) + hidden_states

    for layer in layers(m):
        method(layer, forward)


@healthy("phi", "gptj")
def dropout_in_eval(m):
    for x in m.modules():
        if isinstance(x, nn.Dropout):
            method(x, lambda self, h: F.dropout(h, 0.3, training=False) + 0.0)


@healthy("glm4", "exaone4", "cohere2")
def adapters_of_zero(m):
    """LoRA adapters before the first step: a second, low-rank product that adds zero."""

    def forward(self, x):
        a = torch.full((4, self.in_features), 0.1, dtype=x.dtype)
        b = torch.zeros(self.out_features, 4, dtype=x.dtype)
        return F.linear(x, self.weight, self.bias) + 2.0 * F.linear(F.linear(x, a), b)

    for a in attns(m):
        for x in a.children():
            if isinstance(x, nn.Linear):
                method(x, forward)


@healthy("nemotron")
def nemotron_relu2_otherwise(m):
    for layer in layers(m):
        layer.mlp.act_fn = _SquaredRelu()


class _SquaredRelu(nn.Module):
    def forward(self, x):
        return torch.where(x > 0, x * x, torch.zeros_like(x))
