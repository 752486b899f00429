"""Planted faults and harmless re-implementations in real transformers models (written blind)."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Fault:
    name: str
    architecture: str
    plant: Callable
    layer: int | None
    operator: frozenset
    detail: str = ""


# ------------------------------------------------------------------ architectures
def _arch(cls, cfg, **kw):
    mod = cls.rpartition(".")[0]
    conf = getattr(importlib.import_module(mod), cfg)(**kw)
    d = conf.to_dict()
    d["class"] = cls
    if "gemma" in cls:
        d["attn_implementation"] = "eager"  # sdpa leaves the soft cap out
    if "moe" in cls:
        d["experts_implementation"] = "eager"  # grouped_mm has no float64
    return d


_T = "transformers.models."
_base = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
ARCHITECTURES = {
    "llama": _arch(
        _T + "llama.modeling_llama.LlamaForCausalLM",
        "LlamaConfig",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=10000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        **_base,
    ),
    "qwen2": _arch(
        _T + "qwen2.modeling_qwen2.Qwen2ForCausalLM",
        "Qwen2Config",
        vocab_size=400,
        hidden_size=48,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        **_base,
    ),
    "qwen3": _arch(
        _T + "qwen3.modeling_qwen3.Qwen3ForCausalLM",
        "Qwen3Config",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=144,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        **_base,
    ),
    "gemma2": _arch(
        _T + "gemma2.modeling_gemma2.Gemma2ForCausalLM",
        "Gemma2Config",
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=16,
        attn_logit_softcapping=8.0,
        final_logit_softcapping=6.0,
        max_position_embeddings=256,
        **_base,
    ),
    "qwen3_moe": _arch(
        _T + "qwen3_moe.modeling_qwen3_moe.Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        vocab_size=300,
        hidden_size=48,
        intermediate_size=96,
        moe_intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        decoder_sparse_step=1,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        **_base,
    ),
    "gpt_neox": _arch(
        _T + "gpt_neox.modeling_gpt_neox.GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        rotary_pct=0.5,
        use_parallel_residual=True,
        hidden_act="gelu",
        max_position_embeddings=256,
        tie_word_embeddings=False,
        **_base,
    ),
    "olmo2": _arch(
        _T + "olmo2.modeling_olmo2.Olmo2ForCausalLM",
        "Olmo2Config",
        vocab_size=280,
        hidden_size=64,
        intermediate_size=120,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        **_base,
    ),
    "gpt2": _arch(
        _T + "gpt2.modeling_gpt2.GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=360,
        n_embd=64,
        n_layer=4,
        n_head=4,
        n_positions=128,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        activation_function="gelu_new",
        **_base,
    ),
}


def build(name, dtype=torch.float32, seed=0):
    """A model of that architecture with drawn parameters, in eval mode, of that dtype (buffers stay as built)."""
    d = dict(ARCHITECTURES[name])
    mod, c = d.pop("class").rsplit(".", 1)
    cls = getattr(importlib.import_module(mod), c)
    model = cls(cls.config_class.from_dict(d)).eval()
    initialise(model, seed)
    for p in model.parameters():
        p.data = p.data.to(dtype)
        p.requires_grad_(False)
    if "gemma" in name and dtype == torch.float64:
        finite_mask(model)
    return model


def finite_mask(model):
    """transformers' own eager attention gives NaN in float64 with left padding (float64's least mask value
    becomes -inf in its float32 softmax, padded rows become NaN); this keeps the mask finite. No fault."""
    for i in range(len(layers(model))):

        def f(old, *a, **k):
            if k.get("attention_mask") is not None and k["attention_mask"].is_floating_point():
                k["attention_mask"] = k["attention_mask"].clamp(min=-1e30)
            return old(*a, **k)

        wrap(attn(model, i), f)


def initialise(model, seed):
    """Draw all parameters (float32 draws, so every dtype has the same weights up to rounding)."""
    g = torch.Generator().manual_seed(1000 + seed)
    kind = type(model).__name__.lower()
    if "gemma" in kind:  # sdpa leaves the soft cap out in transformers, eager has it
        model.set_attn_implementation("eager")
    if "moe" in kind:  # grouped_mm has no float64
        model.set_experts_implementation("eager")
    gemma = "gemma" in type(model).__name__.lower()
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    for name, p in model.named_parameters():
        z = torch.randn(p.shape, generator=g)
        low = name.lower()
        if "embed" in low or "wte" in low or "wpe" in low:
            v = z * (0.15 if tied else 0.05)
        elif low.endswith("bias"):
            v = 0.3 * z
        elif p.dim() == 1:
            v = 0.3 * z if gemma else 1 + 0.3 * z
        else:
            fan = p.shape[-1]
            if "c_attn" in low or "c_proj" in low or "c_fc" in low:
                fan = p.shape[0]  # Conv1D
            v = z * (1.2 / math.sqrt(fan))
        p.data.copy_(v.to(p.dtype))
    return model


# ------------------------------------------------------------------ helpers
def base(m):
    for n in ("model", "gpt_neox", "transformer"):
        if hasattr(m, n):
            return getattr(m, n)


def layers(m):
    b = base(m)
    return b.h if hasattr(b, "h") else b.layers


def attn(m, i):
    layer = layers(m)[i]
    for n in ("self_attn", "attention", "attn"):
        if hasattr(layer, n):
            return getattr(layer, n)


def final_norm(m):
    b = base(m)
    for n in ("norm", "final_layer_norm", "ln_f"):
        if hasattr(b, n):
            return getattr(b, n)


def head(m):
    return m.get_output_embeddings()


def get(m, path):
    for x in path.split("."):
        m = m[int(x)] if x.isdigit() else getattr(m, x)
    return m


def wrap(mod, fn):
    """fn(old_forward, *args, **kw) becomes the forward of mod."""
    old = mod.forward
    mod.forward = lambda *a, **k: fn(old, *a, **k)


def noise(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step_param(p, rel, seed):
    s = p.data.float().std()
    z = noise(p.shape, seed).to(p.device)
    p.data.copy_((p.data.double() + (rel * s * z).double()).to(p.dtype))


def fp8(x, scale=1.0):
    y = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return y.to(x.dtype)


def low(x):
    """one precision below: bfloat16 in float32/float64 models, float8 in bfloat16 models."""
    return fp8(x) if x.dtype in (torch.bfloat16, torch.float16) else x.to(torch.bfloat16).to(x.dtype)


class _Cache:
    """what attention gets back from the KV cache is another thing than what was put in"""

    def __init__(self, real, fn):
        self.real, self.fn = real, fn

    def update(self, k, v, *a, **kw):
        if self.real is not None:
            k, v = self.real.update(k, v, *a, **kw)
        return self.fn(k, v)

    def __getattr__(self, n):
        return getattr(self.__dict__["real"], n)


def kv(i, fn):
    def plant(m):
        idx = range(len(layers(m))) if i is None else [i]
        key = "layer_past" if hasattr(m, "gpt_neox") else "past_key_values"
        for j in idx:

            def f(old, *a, **k):
                k[key] = _Cache(k.get(key), fn)
                return old(*a, **k)

            wrap(attn(m, j), f)

    return plant


def allowed_of(mask, q, device, n=None):
    if mask is None:
        n = n or q
        return torch.ones(q, n, dtype=torch.bool, device=device).tril(n - q)[None, None]
    return mask if mask.dtype == torch.bool else mask > -1


def mask_edit(idx, editor):
    """editor(allowed [B,1,q,k], rows [q,1], cols [1,k]) -> allowed, in layers idx"""

    def plant(m):
        for j in idx:

            def f(old, *a, j=j, **k):
                h = a[0] if a else k["hidden_states"]
                mask = k.get("attention_mask")
                past = k.get("past_key_values", k.get("layer_past"))
                seen = past.get_seq_length(j) if past is not None else 0
                al = allowed_of(mask, h.shape[1], h.device, seen + h.shape[1])
                r = torch.arange(al.shape[-2], device=h.device)[:, None] + al.shape[-1] - al.shape[-2]
                c = torch.arange(al.shape[-1], device=h.device)[None]
                new = editor(al, r, c)
                if mask is not None and mask.dtype != torch.bool:
                    new = torch.zeros(new.shape, dtype=mask.dtype, device=h.device).masked_fill(
                        ~new, torch.finfo(mask.dtype).min
                    )
                k["attention_mask"] = new
                return old(*a, **k)

            wrap(attn(m, j), f)

    return plant


def kernel(name, idx, fn):
    """another attention kernel (registered interface) in layers idx; fn(module,q,k,v,allowed,scaling,softcap)->[B,H,q,d]"""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def run(module, query, key, value, attention_mask, scaling=None, softcap=None, **kw):
        g = query.shape[1] // key.shape[1]
        k, v = key.repeat_interleave(g, 1), value.repeat_interleave(g, 1)
        al = allowed_of(attention_mask, query.shape[2], query.device, key.shape[2])
        if scaling is None:
            scaling = query.shape[-1] ** -0.5
        return fn(module, query, k, v, al, scaling, softcap).transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("planted_" + name, run)

    def plant(m):
        for j in range(len(layers(m))) if idx is None else idx:
            a = attn(m, j)
            a.config = copy.copy(a.config)
            a.config._attn_implementation_internal = "planted_" + name

    return plant


def scores(q, k, al, s, cap, dt=None):
    x = (q @ k.transpose(2, 3)) * s
    if cap is not None:
        x = torch.tanh(x / cap) * cap
    return x.masked_fill(~al, -1e30)


def out(path, fn):
    """result of submodule `path` goes through fn"""

    def plant(m):
        wrap(get(m, path), lambda old, *a, **k: fn(old(*a, **k)))

    return plant


def inp(path, fn):
    def plant(m):
        wrap(get(m, path), lambda old, x, *a, **k: old(fn(x), *a, **k))

    return plant


def setattr_(path, name, val):
    def plant(m):
        o = get(m, path)
        setattr(o, name, val(getattr(o, name)) if callable(val) else val)

    return plant


def act(path, fn):
    """another activation function in the submodule `path`"""

    def plant(m):
        get(m, path).forward = fn

    return plant


def param(path, fn):
    def plant(m):
        p = get(m, path)
        p.data.copy_(fn(p.data.clone()).to(p.dtype))

    return plant


def step(path, rel, seed=5):
    return lambda m: step_param(get(m, path), rel, seed)


def eps_all(old_new):
    def plant(m):
        for mod in m.modules():
            for n in ("variance_epsilon", "eps"):
                if isinstance(getattr(mod, n, None), float):
                    setattr(mod, n, old_new)

    return plant


def inv_freq(fn):
    def plant(m):
        r = base(m).rotary_emb
        r.inv_freq = fn(r.inv_freq.clone(), m.config)

    return plant


def theta(new):
    def f(x, cfg):
        n = x.shape[0]
        return 1.0 / (new ** (torch.arange(0, n, device=x.device).to(x.dtype) / n))

    return inv_freq(f)


def lora(path, scale, seed=9, transpose=False):
    """the low-rank update B A is in the recorded weight once; this adds scale times it again, in code"""

    def plant(m):
        lin = get(m, path)
        o, i = (lin.weight.shape[1], lin.weight.shape[0]) if transpose else lin.weight.shape
        A, B = noise((4, i), seed) / math.sqrt(i), noise((o, 4), seed + 1) * 0.1

        def f(old, x):
            return old(x) + scale * F.linear(F.linear(x, A.to(x)), B.to(x))

        wrap(lin, f)

    return plant


def low_layer(i):
    """one layer in bfloat16 (in a bfloat16 model: float8-rounded activations before its projections)"""

    def plant(m):
        layer = layers(m)[i]
        dt = next(layer.parameters()).dtype
        if dt == torch.bfloat16:
            for _, s in layer.named_modules():
                if isinstance(s, torch.nn.Linear):
                    wrap(s, lambda old, x: old(fp8(x)))
            return
        layer.to(torch.bfloat16)

        def cast(x):
            return x.to(torch.bfloat16) if torch.is_tensor(x) and x.is_floating_point() else x

        def f(old, *a, **k):
            a = [cast(x) for x in a]
            k = {n: (tuple(cast(y) for y in x) if isinstance(x, tuple) else cast(x)) for n, x in k.items()}
            k["attention_mask"] = (
                None
                if k.get("attention_mask") is None
                else (
                    k["attention_mask"]
                    if k["attention_mask"].dtype == torch.bool
                    else k["attention_mask"].clamp(min=torch.finfo(torch.bfloat16).min)
                )
            )
            r = old(*a, **k)
            return (
                r.to(dt)
                if torch.is_tensor(r)
                else tuple(x.to(dt) if torch.is_tensor(x) and x.is_floating_point() else x for x in r)
            )

        wrap(layer, f)

    return plant


def residual(i, which, fn):
    """the residual stream of layer i: `which`=mid scales the branch-free part; done on the layer's result"""

    def plant(m):
        def f(old, h, *a, **k):
            r = old(h, *a, **k)
            return fn(r, h) if torch.is_tensor(r) else (fn(r[0], h), *r[1:])

        wrap(layers(m)[i], f)

    return plant


def identity_norm(path):
    def plant(m):
        get(m, path).forward = lambda x: x

    return plant


def mlp_code(i, fn):
    def plant(m):
        p = layers(m)[i].mlp
        p.forward = lambda x: fn(p, x)

    return plant


def rot_layer(i, fn):
    """cos, sin handed to layer i (None: all)"""

    def plant(m):
        for j in range(len(layers(m))) if i is None else [i]:

            def f(old, *a, **k):
                k["position_embeddings"] = fn(*k["position_embeddings"])
                return old(*a, **k)

            wrap(attn(m, j), f)

    return plant


def rot_positions(fn):
    def plant(m):
        wrap(base(m).rotary_emb, lambda old, x, position_ids, *a, **k: old(x, fn(position_ids), *a, **k))

    return plant


def permute_heads(k, v):
    return k.flip(1), v.flip(1)


def interleave_heads(m_layer):
    """query head h reads kv head h % n_kv instead of h // group: reorder q heads in, outputs back"""

    def fn(module, q, k, v, al, s, cap):
        n = module.num_key_value_groups
        kk, vv = k[:, ::n], v[:, ::n]
        kk, vv = kk.repeat(1, n, 1, 1), vv.repeat(1, n, 1, 1)
        return torch.softmax(scores(q, kk, al, s, cap).float(), -1).to(q.dtype) @ vv

    return fn


def bf16_softmax(module, q, k, v, al, s, cap):
    x = scores(q, k, al, s, cap)
    x = (
        fp8(torch.softmax(x.float(), -1)).to(q.dtype)
        if x.dtype == torch.bfloat16
        else torch.softmax(x.bfloat16(), -1).to(x.dtype)
    )
    return x @ v


def stale_block(k, v):
    k, v = k.clone(), v.clone()
    n = min(16, k.shape[2])
    if n > 8:
        z = noise((k.shape[1], n - 8, k.shape[3]), 21).to(k)
        k[:, :, 8:n] = z * k[:, :, :8].float().std().to(k.dtype)
    return k, v


def block_of_neighbour(k, v):
    k, v = k.clone(), v.clone()
    if k.shape[2] >= 24:
        k[:, :, 8:16], v[:, :, 8:16] = k[:, :, 16:24].clone(), v[:, :, 16:24].clone()
    return k, v


def drop_head(path_o, head_dim, h, factor=0.0):
    def f(x):
        x = x.clone()
        x[..., h * head_dim : (h + 1) * head_dim] *= factor
        return x

    return inp(path_o, f)


def scale_head_attention(i, h, factor):
    def f(module, q, k, v, al, s, cap):
        y = torch.softmax(scores(q, k, al, s, cap).float(), -1).to(q.dtype) @ v
        y = y.clone()
        y[:, h] *= factor
        return y

    return f


def swap_experts(i, a, b):
    def plant(m):
        e = layers(m)[i].mlp.experts
        for n in ("gate_up_proj", "down_proj"):
            p = getattr(e, n)
            d = p.data.clone()
            p.data[a], p.data[b] = d[b], d[a]

    return plant


def stale_expert(i, e, rel):
    def plant(m):
        p = layers(m)[i].mlp.experts.gate_up_proj
        d = p.data[e].float()
        p.data[e] = (d + rel * d.std() * noise(d.shape, 4)).to(p.dtype)

    return plant


def router_code(i, fn):
    def plant(m):
        g = layers(m)[i].mlp.gate
        g.forward = lambda x: fn(g, x.reshape(-1, g.hidden_dim))

    return plant


def _route(g, logits, dt, norm=True, topk=None):
    p = torch.softmax(logits.float(), -1)
    v, ix = torch.topk(p, topk or g.top_k, dim=-1)
    if norm:
        v = v / v.sum(-1, keepdim=True)
    return logits, v.to(dt), ix


def router_low(g, x):
    lg = F.linear(low(x), low(g.weight))
    lg = low(lg) if x.dtype == torch.bfloat16 else lg.bfloat16().to(x.dtype)
    return _route(g, lg, x.dtype)


def router_biased(g, x):
    lg = F.linear(x, g.weight)
    b = torch.linspace(-0.05, 0.05, g.num_experts, device=x.device).to(lg)
    return _route(g, lg + b, x.dtype)


def router_drop_third(g, x):
    lg, v, ix = _route(g, F.linear(x, g.weight), x.dtype)
    v = v.clone()
    v[:, -1] = 0
    return lg, v, ix


def untie(rel):
    def plant(m):
        h = head(m)
        h.weight = torch.nn.Parameter(h.weight.data.clone(), requires_grad=False)
        step_param(h.weight, rel, 31)

    return plant


def drop_bias(path, sl=None):
    def plant(m):
        p = get(m, path)
        if sl is None:
            p.data.zero_()
        else:
            p.data[sl] = 0

    return plant


def neox_bias(part, i):
    """GPT-NeoX interleaves q,k,v inside each head"""

    def plant(m):
        a = attn(m, i)
        b = a.query_key_value.bias.data.view(-1, 3, a.head_size)
        b[:, part] = 0

    return plant


def neox_step(part, i, rel):
    def plant(m):
        a = attn(m, i)
        w = a.query_key_value.weight.data
        v = w.view(-1, 3, a.head_size, w.shape[-1])
        d = v[:, part].float()
        v[:, part] = (d + rel * d.std() * noise(d.shape, 6)).to(w.dtype)

    return plant


def tail_rows(n):
    def f(x):
        x = x.clone()
        x[..., -n:] = x[..., -n:] * 0.5 + 1.0
        return x

    return f


def quick_silu(x):
    return x * torch.clamp(x / 4 + 0.5, 0, 1) * 0.02 + F.silu(x) * 0.98


def gemma_no_plus_one(path):
    def plant(m):
        n = get(m, path)
        n.forward = lambda x: (n._norm(x.float()) * n.weight.float()).type_as(x)

    return plant


def norm_cast_before(path, eps_name="variance_epsilon"):
    def plant(m):
        n = get(m, path)

        def f(x):
            h = low(x)
            v = low(low(h * h).mean(-1, keepdim=True))
            return n.weight * (h * torch.rsqrt(v + getattr(n, eps_name)))

        n.forward = f

    return plant


def window(d):
    """sliding layers of gemma2: the window is 16+d"""

    def plant(m):
        w = m.config.sliding_window
        idx = [i for i in range(len(layers(m))) if m.config.layer_types[i] == "sliding_attention"]

        def ed(al, r, c):
            real = al.diagonal(dim1=-2, dim2=-1)[..., None, :] if al.shape[-1] == al.shape[-2] else True
            return (c <= r) & (c > r - (w + d)) & real

        mask_edit(idx, ed)(m)

    return plant


def causal_leak(al, r, c):
    """each token also sees the next one (which is no padding)"""
    nxt = al.diagonal(dim1=-2, dim2=-1)[..., None, :]
    return al | ((c == r + 1) & nxt)


def blind_self(al, r, c):
    """a token does not see the one before it (if it still sees itself)"""
    return al & ~((c == r - 1) & (r > 4))


# ------------------------------------------------------------------ the faults
FAULTS: list[Fault] = []


def add(name, arch, plant, layer, ops, detail=""):
    FAULTS.append(Fault(name, arch, plant, layer, frozenset(ops.split("|")), detail))


# --- rotary
add("llama_theta", "llama", theta(500000.0), 0, "rotary", "theta 500000, no llama3 scaling")
add("llama_no_scaling", "llama", theta(10000.0), 0, "rotary", "llama3 rope scaling left out")
add(
    "qwen3_theta_1pct",
    "qwen3",
    inv_freq(lambda x, c: x * torch.linspace(1, 0.99, x.shape[0]).to(x)),
    0,
    "rotary",
    "theta slightly off",
)
add(
    "qwen2_rope_interleaved_l2",
    "qwen2",
    rot_layer(
        2,
        lambda c, s: (
            c[..., : c.shape[-1] // 2].repeat_interleave(2, -1),
            s[..., : s.shape[-1] // 2].repeat_interleave(2, -1),
        ),
    ),
    2,
    "rotary",
    "GPT-J layout of the tables in layer 2",
)
add(
    "olmo2_sin_sign_l2",
    "olmo2",
    rot_layer(2, lambda c, s: (c, -s)),
    2,
    "rotary",
    "rotated the other way (scores change as q,k rotate backwards)",
)
add(
    "qwen3_moe_rope_low",
    "qwen3_moe",
    rot_layer(None, lambda c, s: (low(c), low(s))),
    0,
    "rotary",
    "tables rounded one precision lower",
)
add(
    "llama_positions_gap",
    "llama",
    rot_positions(lambda p: p + (p >= 12).to(p.dtype)),
    0,
    "rotary",
    "position ids one too high after 12 tokens",
)
add(
    "neox_rotary_pct",
    "gpt_neox",
    rot_layer(
        3,
        lambda c, s: (
            torch.cat([c[..., :2], torch.ones_like(c[..., 2:])], -1),
            torch.cat([s[..., :2], torch.zeros_like(s[..., 2:])], -1),
        ),
    ),
    3,
    "rotary",
    "fewer rotated dims in layer 3",
)
# --- norms
add("llama_eps_1e-6", "llama", eps_all(1e-6), 0, "input_norm", "eps 1e-6 for 1e-5")
add("qwen3_eps_1e-5", "qwen3", eps_all(1e-5), 0, "input_norm", "eps 1e-5 for 1e-6")
add(
    "qwen3_moe_eps_l0",
    "qwen3_moe",
    setattr_("model.layers.0.input_layernorm", "variance_epsilon", 1e-4),
    0,
    "input_norm",
    "eps 1e-4 in one norm",
)
add("qwen3_no_qnorm_l3", "qwen3", identity_norm("model.layers.3.self_attn.q_norm"), 3, "q_norm", "q_norm missing")
add(
    "qwen3_moe_no_knorm_l2",
    "qwen3_moe",
    identity_norm("model.layers.2.self_attn.k_norm"),
    2,
    "k_norm",
    "k_norm missing",
)
add(
    "qwen3_knorm_stale_l4",
    "qwen3",
    step("model.layers.4.self_attn.k_norm.weight", 1e-2),
    4,
    "k_norm",
    "stale k_norm weight",
)
add(
    "gemma2_no_plus_one_l2",
    "gemma2",
    gemma_no_plus_one("model.layers.2.pre_feedforward_layernorm"),
    2,
    "post_norm",
    "1+w missing in the norm before the mlp",
)
add(
    "gemma2_no_plus_one_final",
    "gemma2",
    gemma_no_plus_one("model.norm"),
    None,
    "final_norm",
    "1+w missing in the final norm",
)
add(
    "qwen2_postnorm_low_l1",
    "qwen2",
    norm_cast_before("model.layers.1.post_attention_layernorm"),
    1,
    "post_norm",
    "norm computed one precision lower",
)
add("llama_finalnorm_stale", "llama", step("model.norm.weight", 2e-2), None, "final_norm", "stale final norm")
add(
    "neox_ln_bias_l2",
    "gpt_neox",
    drop_bias("gpt_neox.layers.2.post_attention_layernorm.bias"),
    2,
    "post_norm",
    "layer norm bias dropped",
)
add(
    "olmo2_postnorm_scale_l3",
    "olmo2",
    param("model.layers.3.post_attention_layernorm.weight", lambda w: w * 1.02),
    3,
    "post_norm",
    "norm weight 2 % too large",
)
# --- attention
add(
    "gemma2_no_softcap_l3",
    "gemma2",
    setattr_("model.layers.3.self_attn", "attn_logit_softcapping", None),
    3,
    "attention",
    "soft cap left out in layer 3",
)
add(
    "gemma2_softcap_30",
    "gemma2",
    setattr_("model.layers.1.self_attn", "attn_logit_softcapping", 30.0),
    1,
    "attention",
    "soft cap 30 for 8",
)
add("gemma2_window_minus1", "gemma2", window(-1), 0, "attention", "sliding window 15")
add("gemma2_window_plus1", "gemma2", window(1), 0, "attention", "sliding window 17")
add(
    "gemma2_scale_headdim_l2",
    "gemma2",
    setattr_("model.layers.2.self_attn", "scaling", 16**-0.5),
    2,
    "attention",
    "head_dim for query_pre_attn_scalar",
)
add(
    "llama_scale_l3",
    "llama",
    setattr_("model.layers.3.self_attn", "scaling", lambda s: s * 1.002),
    3,
    "attention",
    "scale 0.2 % off",
)
add("llama_gqa_flip_l2", "llama", kv(2, permute_heads), 2, "attention", "kv heads flipped")
add(
    "llama_gqa_interleaved",
    "llama",
    kernel("gqa_interleave", [1], interleave_heads(1)),
    1,
    "attention",
    "query head h reads kv head h % n",
)
add("qwen2_causal_leak_l1", "qwen2", mask_edit([1], causal_leak), 1, "attention", "causal mask off by one")
add("qwen3_previous_unseen_l2", "qwen3", mask_edit([2], blind_self), 2, "attention", "the token before is not seen")
add(
    "llama_chunk_boundary",
    "llama",
    mask_edit([0, 1, 2, 3], lambda al, r, c: al & ~((r >= 32) & (c < 16))),
    0,
    "attention",
    "rows past 32 do not see columns before 16",
)
add(
    "olmo2_chunk_boundary_l2",
    "olmo2",
    mask_edit([2], lambda al, r, c: al & ~((r >= 24) & (c < 12))),
    2,
    "attention",
    "same, one layer, 24/12",
)
add("qwen3_other_block_l3", "qwen3", kv(3, stale_block), 3, "attention|rotary", "keys 8..15 of another sequence")
add(
    "gpt2_block_neighbour_l2",
    "gpt2",
    kv(2, block_of_neighbour),
    2,
    "attention|k_proj",
    "cached block 8..15 is block 16..23",
)
add("qwen2_kv_fp8_l2", "qwen2", kv(2, lambda k, v: (fp8(k), fp8(v))), 2, "attention|rotary", "fp8 KV")
add(
    "qwen3_moe_kv_fp8_scale",
    "qwen3_moe",
    kv(None, lambda k, v: (fp8(k, 0.002), fp8(v, 0.002))),
    0,
    "attention|rotary",
    "fp8 KV with a scale that saturates",
)
add(
    "llama_v_scale_l3",
    "llama",
    kv(3, lambda k, v: (k, v * 1.01)),
    3,
    "attention|v_proj",
    "values dequantised 1 % too large",
)
add(
    "qwen3_softmax_low_l2",
    "qwen3",
    kernel("softmax_low", [2], bf16_softmax),
    2,
    "attention",
    "softmax one precision lower",
)
add(
    "neox_head_scaled_l2",
    "gpt_neox",
    kernel("head_scaled", [2], scale_head_attention(2, 1, 0.0)),
    2,
    "attention",
    "one head dropped",
)
add(
    "gpt2_head_scaled_l3",
    "gpt2",
    kernel("head_scaled_g", [3], scale_head_attention(3, 2, 1.0 / 0.9)),
    3,
    "attention",
    "one head as after dropout 0.1",
)
add(
    "gpt2_scale_l1",
    "gpt2",
    setattr_("transformer.h.1.attn", "scaling", lambda s: s * 0.98),
    1,
    "attention",
    "scale 2 % off",
)
# --- projections
add("qwen2_no_vbias_l2", "qwen2", drop_bias("model.layers.2.self_attn.v_proj.bias"), 2, "v_proj", "bias of v dropped")
add("qwen2_no_qbias_l1", "qwen2", drop_bias("model.layers.1.self_attn.q_proj.bias"), 1, "q_proj", "bias of q dropped")
add("neox_no_vbias_l3", "gpt_neox", neox_bias(2, 3), 3, "v_proj|q_proj", "value part of the fused bias dropped")
add("neox_k_stale_l1", "gpt_neox", neox_step(1, 1, 1e-2), 1, "k_proj|q_proj", "key part of the fused weight stale")
add(
    "gpt2_qbias_l2",
    "gpt2",
    drop_bias("transformer.h.2.attn.c_attn.bias", slice(0, 64)),
    2,
    "q_proj",
    "query part of the fused bias dropped",
)
add("qwen3_q_stale_l3", "qwen3", step("model.layers.3.self_attn.q_proj.weight", 1e-3), 3, "q_proj", "stale tensor 1e-3")
add("llama_k_stale_l2", "llama", step("model.layers.2.self_attn.k_proj.weight", 3e-3), 2, "k_proj", "stale tensor 3e-3")
add(
    "llama_v_lora_l3",
    "llama",
    lora("model.layers.3.self_attn.v_proj", 1.0),
    3,
    "v_proj",
    "low-rank update applied twice",
)
add(
    "qwen3_o_lora_l2",
    "qwen3",
    lora("model.layers.2.self_attn.o_proj", 0.05),
    2,
    "o_proj",
    "low-rank update with another scale",
)
add(
    "qwen2_down_lora_l1",
    "qwen2",
    lora("model.layers.1.mlp.down_proj", 0.5),
    1,
    "down_proj",
    "low-rank update 1.5 times",
)
add(
    "gpt2_cproj_lora_l2",
    "gpt2",
    lora("transformer.h.2.attn.c_proj", 0.3, transpose=True),
    2,
    "o_proj",
    "low-rank update on c_proj",
)
add(
    "olmo2_o_low_l3",
    "olmo2",
    inp("model.layers.3.self_attn.o_proj", low),
    3,
    "o_proj|attention",
    "input of o_proj one precision lower",
)
add(
    "llama_o_stale_l3_tiny",
    "llama",
    step("model.layers.3.self_attn.o_proj.weight", 2e-4),
    3,
    "o_proj",
    "stale tensor 2e-4",
)
add(
    "qwen2_gate_stale_l2_tiny",
    "qwen2",
    step("model.layers.2.mlp.gate_proj.weight", 2e-4),
    2,
    "gate_proj",
    "stale tensor 2e-4",
)
add(
    "olmo2_scale_l3_tiny",
    "olmo2",
    setattr_("model.layers.3.self_attn", "scaling", lambda s: s * 1.0005),
    3,
    "attention",
    "scale 0.05 % off",
)
add(
    "gpt2_v_stale_l3_tiny",
    "gpt2",
    param(
        "transformer.h.3.attn.c_attn.weight",
        lambda w: torch.cat(
            [w[:, :128].double(), w[:, 128:].double() + 3e-4 * w.float().std() * noise((64, 64), 8)], 1
        ),
    ),
    3,
    "v_proj",
    "value part of the fused weight stale, 3e-4",
)
# --- mlp, residual
add(
    "qwen2_gate_up_swapped_l2",
    "qwen2",
    mlp_code(2, lambda p, x: p.down_proj(p.act_fn(p.up_proj(x)) * p.gate_proj(x))),
    2,
    "activation|gate_proj",
    "gate and up exchanged",
)
add("llama_silu_approx_l2", "llama", act("model.layers.2.mlp.act_fn", quick_silu), 2, "activation", "silu approximated")
add(
    "gemma2_gelu_exact_l1",
    "gemma2",
    act("model.layers.1.mlp.act_fn", F.gelu),
    1,
    "activation",
    "erf gelu for tanh gelu",
)
add(
    "neox_gelu_tanh_l2",
    "gpt_neox",
    act("gpt_neox.layers.2.mlp.act", lambda x: F.gelu(x, approximate="tanh")),
    2,
    "activation",
    "tanh gelu for erf gelu",
)
add(
    "gpt2_quickgelu_l3",
    "gpt2",
    act("transformer.h.3.mlp.act", lambda x: x * torch.sigmoid(1.702 * x)),
    3,
    "activation",
    "quick gelu",
)
add("qwen3_up_stale_l4", "qwen3", step("model.layers.4.mlp.up_proj.weight", 1e-3), 4, "up_proj", "stale tensor")
add("olmo2_gate_stale_l2", "olmo2", step("model.layers.2.mlp.gate_proj.weight", 5e-3), 2, "gate_proj", "stale tensor")
add(
    "gemma2_down_fp8_l3",
    "gemma2",
    inp("model.layers.3.mlp.down_proj", low),
    3,
    "down_proj|activation",
    "input of down_proj one precision lower",
)
add(
    "gpt2_fc_bias_l1",
    "gpt2",
    drop_bias("transformer.h.1.mlp.c_fc.bias"),
    1,
    "up_proj|gate_proj",
    "bias of c_fc dropped",
)
add(
    "llama_residual_l2",
    "llama",
    residual(2, "out", lambda r, h: r + 0.01 * h),
    2,
    "residual",
    "residual scaled 1.01 at the end of layer 2",
)
add(
    "neox_residual_l1",
    "gpt_neox",
    residual(1, "out", lambda r, h: r + 0.001 * h),
    1,
    "residual",
    "residual scaled 1.001",
)
add(
    "gemma2_residual_l2",
    "gemma2",
    residual(2, "out", lambda r, h: low(r)),
    2,
    "residual",
    "residual stream stored one precision lower",
)


def stale_layer(i, rel):
    def plant(m):
        for j, p in enumerate(layers(m)[i].parameters()):
            step_param(p, rel, 70 + j)

    return plant


add("llama_stale_layer2", "llama", stale_layer(2, 1e-3), 2, "input_norm|q_proj", "all tensors of a layer one step old")
add(
    "olmo2_stale_layer3",
    "olmo2",
    stale_layer(3, 1e-3),
    3,
    "q_proj|k_proj",
    "all tensors of a layer one step old (no input norm)",
)
add("qwen3_low_layer3", "qwen3", low_layer(3), 3, "input_norm|q_proj", "a layer in bfloat16")
add("llama_low_layer1", "llama", low_layer(1), 1, "input_norm|q_proj", "a layer in bfloat16")
# --- experts
add("moe_router_low_l2", "qwen3_moe", router_code(2, router_low), 2, "router", "router one precision lower")
add(
    "moe_router_nonorm_l3",
    "qwen3_moe",
    setattr_("model.layers.3.mlp.gate", "norm_topk_prob", False),
    3,
    "router",
    "top-k weights not normalised",
)
add(
    "moe_router_bias_l2", "qwen3_moe", router_code(2, router_biased), 2, "router", "a small load-balancing bias left in"
)
add(
    "moe_router_third_l3",
    "qwen3_moe",
    router_code(3, router_drop_third),
    3,
    "router|experts",
    "weakest expert dropped (capacity)",
)
add("moe_swap_l2", "qwen3_moe", swap_experts(2, 3, 4), 2, "experts", "two experts exchanged")
add("moe_stale_expert_l3", "qwen3_moe", stale_expert(3, 5, 1e-2), 3, "experts", "one expert stale (1e-2)")
# --- outside of layers
add("qwen2_untied", "qwen2", untie(1e-3), None, "lm_head", "head is another copy")
add("gpt2_untied", "gpt2", untie(1e-2), None, "lm_head", "head is another copy")
add(
    "gemma2_no_final_cap",
    "gemma2",
    setattr_("config", "final_logit_softcapping", None),
    None,
    "lm_head",
    "final soft cap left out",
)
add(
    "qwen3_temperature",
    "qwen3",
    out("lm_head", lambda y: (y.float() if y.dtype != torch.float64 else y) / 0.999),
    None,
    "lm_head|log_softmax",
    "temperature 0.999",
)
add("llama_tail_rows", "llama", out("lm_head", tail_rows(20)), None, "lm_head", "logits of the last 20 rows wrong")
add("olmo2_head_low", "olmo2", inp("lm_head", low), None, "lm_head|final_norm", "head input one precision lower")
add("neox_logits_low", "gpt_neox", out("lm_head", low), None, "lm_head|log_softmax", "logits one precision lower")
add("qwen3_moe_embed_stale", "qwen3_moe", step("model.embed_tokens.weight", 1e-3), None, "embedding", "stale embedding")
add(
    "gemma2_embed_scale",
    "gemma2",
    out("model.embed_tokens", lambda y: y * (8.03125 / 8.0)),
    None,
    "embedding",
    "embedding scale rounded wrongly",
)
add(
    "gpt2_positions",
    "gpt2",
    lambda m: wrap(m.transformer.wpe, lambda old, p: old(p + 1)),
    None,
    "embedding",
    "learned positions off by one",
)
add(
    "gpt2_positions_after",
    "gpt2",
    lambda m: wrap(m.transformer.wpe, lambda old, p: old(p + (p >= 20).to(p.dtype))),
    None,
    "embedding",
    "positions off by one after 20 tokens",
)


# ------------------------------------------------------------------ harmless ones
def every(fn):
    def plant(m):
        for i in range(len(layers(m))):
            fn(m, i)

    return plant


def chunk_softmax(module, q, k, v, al, s, cap):
    """online softmax over blocks of 7 keys, in float32 or the model's own if wider"""
    dt = torch.float64 if q.dtype == torch.float64 else torch.float32
    x = scores(q.to(dt), k.to(dt), al, s, cap)
    mx = torch.full((*x.shape[:-1], 1), -float("inf"), dtype=dt, device=x.device)
    den = torch.zeros_like(mx)
    acc = torch.zeros(q.shape, dtype=dt, device=x.device)
    for a in range(0, x.shape[-1], 7):
        b = x[..., a : a + 7]
        n = torch.maximum(mx, b.amax(-1, keepdim=True))
        w = (b - n).exp()
        r = (mx - n).exp()
        den, acc, mx = den * r + w.sum(-1, keepdim=True), acc * r + w @ v[:, :, a : a + 7].to(dt), n
    return (acc / den).to(q.dtype)


def plain(module, q, k, v, al, s, cap):
    return torch.softmax(scores(q * s, k, al, 1.0, cap).float(), -1).to(q.dtype) @ v


def fused_qkv(m, i):
    a = attn(m, i)
    names = ("q_proj", "k_proj", "v_proj")
    ps = [getattr(a, n) for n in names]
    W = torch.cat([p.weight for p in ps])
    B = None if ps[0].bias is None else torch.cat([p.bias for p in ps])
    at = 0
    for p in ps:
        o = p.weight.shape[0]
        p.forward = (lambda s, e: lambda x: F.linear(x, W, B)[..., s:e])(at, at + o)
        at += o


def norm64(m):
    for mod in m.modules():
        if type(mod).__name__.endswith("RMSNorm") and hasattr(mod, "variance_epsilon"):

            def f(x, n=mod):
                h = x.double()
                h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + n.variance_epsilon)
                return n.weight * h.to(x.dtype)

            mod.forward = f


def split_matmul(path):
    """sum over the inner dimension in two halves"""

    def fn(m, i):
        p = get(layers(m)[i], path)

        def f(x):
            n = x.shape[-1] // 2
            y = x[..., :n] @ p.weight[:, :n].T + x[..., n:] @ p.weight[:, n:].T
            return y if p.bias is None else y + p.bias

        p.forward = f

    return every(fn)


def rope64(m):
    r = base(m).rotary_emb

    def f(x, position_ids):
        fr = position_ids[..., None].double() * r.inv_freq.double()
        e = torch.cat((fr, fr), -1)
        return (e.cos() * r.attention_scaling).to(x.dtype), (e.sin() * r.attention_scaling).to(x.dtype)

    r.forward = f


def gelu_erf(m, i):
    layers(m)[i].mlp.act.forward = lambda x: (
        (x.float() if x.dtype != torch.float64 else x)
        .mul(0.5)
        .mul(1 + torch.erf((x.float() if x.dtype != torch.float64 else x) / math.sqrt(2)))
        .to(x.dtype)
    )


def experts_loop(m):
    for layer in layers(m):
        if not hasattr(layer.mlp, "experts"):
            continue
        e = layer.mlp.experts

        def f(x, ix, w, e=e):
            y = torch.zeros_like(x)
            for j in reversed(range(e.num_experts)):
                g = (w * (ix == j)).sum(-1, keepdim=True).to(x.dtype)
                hit = (ix == j).any(-1)
                if hit.any():
                    a, b = F.linear(x[hit], e.gate_up_proj[j]).chunk(2, -1)
                    y[hit] = y[hit] + F.linear(e.act_fn(a) * b, e.down_proj[j]) * g[hit]
            return y

        e.forward = f


def head_chunks(m):
    h = head(m)
    h.forward = lambda x: torch.cat([F.linear(x, w) for w in h.weight.split(50)], -1)


def residual_other_order(m, i):
    layer = layers(m)[i]

    def f(h, **k):
        a = layer.attention(layer.input_layernorm(h), **k)[0]
        b = layer.mlp(layer.post_attention_layernorm(h))
        w = torch.float64 if h.dtype == torch.float64 else torch.float32
        return (h.to(w) + a.to(w) + b.to(w)).to(h.dtype)

    layer.forward = f


def residual32(m, i):
    layer = layers(m)[i]

    def f(hidden_states, **k):
        w = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
        dt = hidden_states.dtype
        h = hidden_states
        h = (layer.self_attn(hidden_states=layer.input_layernorm(h), **k)[0].to(w) + h.to(w)).to(dt)
        return (layer.mlp(layer.post_attention_layernorm(h)).to(w) + h.to(w)).to(dt)

    layer.forward = f


def silu_formula(m, i):
    layers(m)[i].mlp.act_fn.forward = lambda x: x / (1 + torch.exp(-x))


def router_formula(g, x):
    """normalise by a softmax over the chosen logits"""
    lg = F.linear(x, g.weight)
    v, ix = torch.topk(lg.float(), g.top_k, dim=-1)
    return lg, torch.softmax(v, -1).to(x.dtype), ix


def layernorm_formula(m):
    for mod in m.modules():
        if isinstance(mod, torch.nn.LayerNorm):

            def f(x, n=mod):
                w = torch.float64 if x.dtype == torch.float64 else torch.float32
                h = x.to(w)
                h = h - h.mean(-1, keepdim=True)
                return (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + n.eps) * n.weight.to(w) + n.bias.to(w)).to(
                    x.dtype
                )

            mod.forward = f


def gate_up_fused(m, i):
    p = layers(m)[i].mlp
    W = torch.cat([p.gate_proj.weight, p.up_proj.weight])
    n = p.gate_proj.weight.shape[0]
    p.gate_proj.forward = lambda x: F.linear(x, W)[..., :n]
    p.up_proj.forward = lambda x: F.linear(x, W)[..., n:]


HEALTHY = [
    ("llama_chunk_softmax", "llama", kernel("chunk_softmax", None, chunk_softmax)),
    ("gemma2_chunk_softmax", "gemma2", kernel("chunk_softmax_g", None, chunk_softmax)),
    ("gpt2_plain_attention", "gpt2", kernel("plain_g", None, plain)),
    ("qwen2_plain_attention", "qwen2", kernel("plain_q", None, plain)),
    ("qwen2_fused_qkv", "qwen2", every(fused_qkv)),
    ("qwen3_fused_qkv", "qwen3", every(fused_qkv)),
    ("llama_gate_up_fused", "llama", every(gate_up_fused)),
    ("qwen3_norm64", "qwen3", norm64),
    ("olmo2_split_down", "olmo2", split_matmul("mlp.down_proj")),
    ("qwen2_split_o", "qwen2", split_matmul("self_attn.o_proj")),
    ("llama_rope64", "llama", rope64),
    ("gpt_neox_gelu_erf", "gpt_neox", every(gelu_erf)),
    ("gpt_neox_residual_order", "gpt_neox", every(residual_other_order)),
    ("qwen3_residual32", "qwen3", every(residual32)),
    ("qwen3_moe_experts_loop", "qwen3_moe", experts_loop),
    ("qwen3_moe_router_formula", "qwen3_moe", lambda m: [router_code(i, router_formula)(m) for i in (0, 2, 3)]),
    ("gemma2_head_chunks", "gemma2", head_chunks),
    ("olmo2_silu_formula", "olmo2", every(silu_formula)),
    ("gpt2_layernorm_formula", "gpt2", layernorm_formula),
]
