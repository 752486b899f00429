"""Harmless pairs: B computes the same in another way."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from fourth_common import *
from fourth_common import Hooks, OwnAttn, RECODE
from fourth_fault_list import LoRALinear, lora_pair, merge_lora, prenorm_layer, theta_freq, unmerge_lora
from fourth_models import Out

# ------------------------------------------------------------------------------------ attention implementations
for _arch, _impl in [
    ("qwen2", "eager"),
    ("qwen3", "sdpa"),
    ("gemma3", "eager"),
    ("cohere2", "sdpa"),
    ("exaone4", "eager"),
    ("deepseek_v3", "eager"),
    ("stablelm", "sdpa"),
    ("gpt_neox", "eager"),
    ("smollm3", "eager"),
    ("nemotron", "sdpa"),
]:
    harmless(f"{_arch}_attention_{_impl}", _arch)(lambda b, i=_impl: use_attention(b, i))


class EinsumHooks(Hooks):
    def __call__(self, module, q, k, v, mask, scaling, softcap=None, sinks=None):
        b, h, t, d = q.shape
        g = k.shape[1]
        q = q.view(b, g, h // g, t, d)
        s = torch.einsum("bgrtd,bgsd->bgrts", q, k).flatten(1, 2) * scaling
        if softcap is not None:
            s = torch.tanh(s / softcap) * softcap
        p = self.probs(self.mask(s, mask), sinks).unflatten(1, (g, h // g))
        return torch.einsum("bgrts,bgsd->bgrtd", p, v).flatten(1, 2)


register("user_einsum", EinsumHooks())
for _arch in ["qwen3", "gemma2", "starcoder2", "mixtral", "olmo2", "gpt_oss", "granite"]:
    harmless(f"{_arch}_attention_einsum_grouped", _arch)(lambda b: use_attention(b, "user_einsum"))


class OnlineHooks(Hooks):
    """Keys in chunks with running maximum and sum, as in flash attention."""

    def __call__(self, module, q, k, v, mask, scaling, softcap=None, sinks=None):
        n = q.shape[1] // k.shape[1]
        k, v = self.expand(k, n), self.expand(v, n)
        s = self.mask(self.scores(q, k, scaling, softcap), mask)
        b, h, t, _ = s.shape
        if sinks is None:
            m = torch.full((b, h, t, 1), -1e30, dtype=s.dtype)
            z = torch.zeros_like(m)
        else:
            m = sinks.view(1, -1, 1, 1).expand(b, h, t, 1).clone()
            z = torch.ones_like(m)
        o = torch.zeros_like(q[..., : v.shape[-1]])
        for c, w in zip(s.split(20, -1), v.split(20, 2)):
            m2 = torch.maximum(m, c.amax(-1, keepdim=True))
            e, r = (c - m2).exp(), (m - m2).exp()
            z, o, m = z * r + e.sum(-1, keepdim=True), o * r + e @ w, m2
        return o / z


register("user_online", OnlineHooks())
for _arch in ["mixtral", "exaone4", "gpt_oss", "gemma2", "mistral", "deepseek_v3", "phi3"]:
    harmless(f"{_arch}_attention_online_chunks", _arch)(lambda b: use_attention(b, "user_online"))


class F64Hooks(Hooks):
    def __call__(self, module, q, k, v, mask, scaling, softcap=None, sinks=None):
        o = super().__call__(
            module,
            q.double(),
            k.double(),
            v.double(),
            mask,
            scaling,
            softcap,
            None if sinks is None else sinks.double(),
        )
        return o.to(q.dtype)


register("user_f64", F64Hooks())
for _arch in ["gemma3", "ernie4_5_moe", "apertus"]:
    harmless(f"{_arch}_attention_in_float64", _arch)(lambda b: use_attention(b, "user_f64"))


class RowHooks(Hooks):
    """Query by query, over the visible keys only."""

    def __call__(self, module, q, k, v, mask, scaling, softcap=None, sinks=None):
        n = q.shape[1] // k.shape[1]
        out = torch.empty_like(q[..., : v.shape[-1]])
        for t in range(q.shape[2]):
            kk, vv = self.expand(k[:, :, : t + 1], n), self.expand(v[:, :, : t + 1], n)
            s = self.scores(q[:, :, t : t + 1], kk, scaling, softcap)
            if mask is not None:
                s = s + mask[:, :, t : t + 1, : t + 1]
            out[:, :, t : t + 1] = self.probs(s, sinks) @ vv
        return out


register("user_rows", RowHooks())
for _arch in ["hunyuan_v1_dense", "cohere2"]:
    harmless(f"{_arch}_attention_row_by_row", _arch)(lambda b: use_attention(b, "user_rows"))

# own attention code (other spelling of qkv, rotary, norms)
for _arch in ["qwen2", "glm4", "cohere2", "ernie4_5_moe", "exaone4", "olmo2", "hunyuan_v1_dense", "gpt_oss", "smollm3"]:
    harmless(f"{_arch}_own_attention_code", _arch)(lambda b: own_attention(b))

# ------------------------------------------------------------------------------------------------------- norms
for _arch, _form in [
    ("qwen2", "divide"),
    ("gemma3", "divide"),
    ("cohere2", "fused"),
    ("starcoder2", "manual"),
    ("nemotron", "fused"),
    ("olmo2", "einsum"),
    ("glm4", "f64"),
    ("deepseek_v3", "fused"),
    ("apertus", "einsum"),
    ("gpt_neox", "f64"),
    ("exaone4", "divide"),
]:
    harmless(f"{_arch}_norms_{_form}", _arch)(lambda b, f=_form: recode_norms(b, f))


@harmless("stablelm_head_norms_together", "stablelm")
def _(b):
    def forward(self, x):
        w = torch.stack([n.weight for n in self.norms])[None, :, None, :]
        return F.layer_norm(x, (self.dim,), None, None, self.norms[0].eps) * w

    for l in b.model.layers:
        swap(l.self_attn.q_layernorm, forward=forward)
        swap(l.self_attn.k_layernorm, forward=forward)


class MyRMSNorm(nn.Module):
    """A norm of one's own with other names."""

    def __init__(self, w, eps):
        super().__init__()
        self.gain = nn.Parameter(w.clone())
        self.tiny = eps

    def forward(self, x):
        return torch.mul(x, self.gain) * x.pow(2).mean(dim=-1, keepdim=True).add(self.tiny).rsqrt()


@harmless("smollm3_own_norm_modules", "smollm3")
def _(b):
    for name, m in list(b.named_modules()):
        if type(m).__name__ == "SmolLM3RMSNorm":
            b.set_submodule(name, MyRMSNorm(m.weight, m.variance_epsilon))


# ------------------------------------------------------------------------------------------------------- rotary
def complex_rotate(self, q, k, cos, sin):
    z = torch.complex(cos, sin)[:, None, :, : cos.shape[-1] // 2]

    def turn(x):
        r = cos.shape[-1]
        y = torch.complex(x[..., : r // 2], x[..., r // 2 : r]) * z
        return torch.cat((y.real, y.imag, x[..., r:]), -1)

    return turn(q), turn(k)


for _arch in ["qwen3", "phi3", "starcoder2"]:

    @harmless(f"{_arch}_rotary_complex", _arch)
    def _(b, arch=_arch):
        extra = {}
        if arch == "phi3":

            def qkv(self, x):
                n = self.config.num_attention_heads * self.head_dim
                g = self.num_key_value_heads * self.head_dim
                return tuple(y.unflatten(-1, (-1, self.head_dim)) for y in self.qkv_proj(x).split([n, g, g], -1))

            extra = dict(qkv=qkv)
        own_attention(b, rotate=complex_rotate, **extra)


@harmless("mistral_rotary_matrices", "mistral")
def _(b):
    def rotate(self, q, k, cos, sin):
        d = q.shape[-1]
        j = torch.zeros(d, d, dtype=q.dtype)
        i = torch.arange(d // 2)
        j[i + d // 2, i] = -1
        j[i, i + d // 2] = 1
        r = torch.diag_embed(cos) + j * sin[:, :, None, :]  # x @ r
        return torch.einsum("bhtd,btde->bhte", q, r), torch.einsum("bhtd,btde->bhte", k, r)

    own_attention(b, rotate=rotate)


@harmless("olmo2_rotary_recomputed_in_layers", "olmo2")
def _(b):
    inv = b.model.rotary_emb.inv_freq.clone()

    def rotate(self, q, k, cos, sin):
        a = torch.outer(torch.arange(q.shape[2]).to(q.dtype), inv.to(q.dtype))
        c, s = a.cos(), a.sin()

        def turn(x):
            x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
            return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1)

        return turn(q), turn(k)

    own_attention(b, rotate=rotate)


@harmless("apertus_rotary_cached_table", "apertus")
def _(b):
    class Table(nn.Module):
        def __init__(self, inv):
            super().__init__()
            self.inv = inv.double()

        def forward(self, x, position_ids):
            a = torch.outer(torch.arange(256, dtype=torch.float64), self.inv)
            a = torch.cat((a, a), -1)
            return a.cos()[position_ids].to(x.dtype), a.sin()[position_ids].to(x.dtype)

    b.model.rotary_emb = Table(b.model.rotary_emb.inv_freq)


@harmless(
    "glm4_rotary_pairs_permuted_weights",
    "glm4",
    note="reparametrised: rows of q_proj and k_proj and the layout of the rotary both changed; q_proj's and k_proj's outputs are permuted against A's",
)
def _(b):
    d, r = 16, 8
    order = torch.cat([torch.arange(0, r, 2), torch.arange(1, r, 2), torch.arange(r, d)])

    def rotate(self, q, k, cos, sin):
        return half(q, cos[:, None], sin[:, None]), half(k, cos[:, None], sin[:, None])

    for m in attn_modules(b):
        for p in (m.q_proj, m.k_proj):
            p.weight.copy_(p.weight.unflatten(0, (-1, d))[:, order].flatten(0, 1))
            p.bias.copy_(p.bias.view(-1, d)[:, order].flatten())
        swap(m, OwnAttn, rotate=rotate)


# ---------------------------------------------------------------------------------------------- fused / split projections
class FusedAttention(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.wqkv = nn.Linear(
            m.q_proj.in_features, m.q_proj.out_features + 2 * m.k_proj.out_features, bias=m.q_proj.bias is not None
        )
        self.wqkv.weight.copy_(torch.cat([p.weight for p in (m.q_proj, m.k_proj, m.v_proj)]))
        if m.q_proj.bias is not None:
            self.wqkv.bias.copy_(torch.cat([p.bias for p in (m.q_proj, m.k_proj, m.v_proj)]))
        self.wo = m.o_proj
        self.qn, self.kn = getattr(m, "q_norm", None), getattr(m, "k_norm", None)
        self.d, self.scale, self.nq, self.nk = m.head_dim, m.scaling, m.q_proj.out_features, m.k_proj.out_features

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kw):
        b, t, _ = hidden_states.shape
        q, k, v = (
            y.view(b, t, -1, self.d).transpose(1, 2)
            for y in self.wqkv(hidden_states).split([self.nq, self.nk, self.nk], -1)
        )
        if self.qn is not None:
            q, k = self.qn(q), self.kn(k)
        cos, sin = (x[:, None] for x in position_embeddings)
        q, k = half(q, cos, sin), half(k, cos, sin)
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_mask, is_causal=attention_mask is None, scale=self.scale, enable_gqa=True
        )
        return self.wo(o.transpose(1, 2).flatten(2)), None


for _arch in ["qwen2", "qwen3", "mistral"]:

    @harmless(f"{_arch}_fused_qkv_module", _arch)
    def _(b):
        for l in b.model.layers:
            l.self_attn = FusedAttention(l.self_attn)


class FusedMLP(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.w13 = nn.Linear(m.gate_proj.in_features, 2 * m.gate_proj.out_features, bias=m.gate_proj.bias is not None)
        self.w13.weight.copy_(torch.cat((m.gate_proj.weight, m.up_proj.weight)))
        if m.gate_proj.bias is not None:
            self.w13.bias.copy_(torch.cat((m.gate_proj.bias, m.up_proj.bias)))
        self.w2 = m.down_proj
        self.act = m.act_fn

    def forward(self, x):
        g, u = self.w13(x).tensor_split(2, -1)
        return self.w2(self.act(g).mul_(u))


for _arch in ["granite", "gemma3", "cohere2"]:

    @harmless(f"{_arch}_fused_gate_up_module", _arch)
    def _(b):
        for l in b.model.layers:
            l.mlp = FusedMLP(l.mlp)


class SplitMLP(nn.Module):
    def __init__(self, m):
        super().__init__()
        g, u = m.gate_up_proj.weight.chunk(2, 0)
        self.gate = nn.Linear(g.shape[1], g.shape[0], bias=False)
        self.up = nn.Linear(g.shape[1], g.shape[0], bias=False)
        self.gate.weight.copy_(g)
        self.up.weight.copy_(u)
        self.down = m.down_proj

    def forward(self, x):
        g = self.gate(x)
        return self.down(g * torch.sigmoid(g) * self.up(x))


for _arch in ["phi3", "glm4"]:

    @harmless(f"{_arch}_gate_up_split_module", _arch)
    def _(b):
        for l in b.model.layers:
            l.mlp = SplitMLP(l.mlp)


@harmless("hunyuan_mlp_in_chunks", "hunyuan_v1_dense")
def _(b):
    def forward(self, x):
        y = torch.zeros_like(x)
        for c in torch.arange(self.gate_proj.out_features).split(48):
            h = F.silu(F.linear(x, self.gate_proj.weight[c])) * F.linear(x, self.up_proj.weight[c])
            y += F.linear(h, self.down_proj.weight[:, c])
        return y

    for l in b.model.layers:
        swap(l.mlp, forward=forward)


@harmless("qwen2_mlp_token_chunks", "qwen2")
def _(b):
    for l in b.model.layers:
        base = base_forward(l.mlp)
        swap(l.mlp, forward=lambda self, x, base=base: torch.cat([base(self, c) for c in x.split(7, 1)], 1))


# ---------------------------------------------------------------------------------------------------- projections
for _arch, _style in [
    ("smollm3", "matmul"),
    ("gpt_neox", "einsum"),
    ("granite", "f64"),
    ("vale", "matmul"),
    ("bloom", "f64"),
    ("mica", "einsum"),
]:
    harmless(f"{_arch}_linears_{_style}", _arch)(lambda b, s=_style: recode_linears(b, s))


@harmless("mistral_weights_strided", "mistral")
def _(b):
    for m in b.modules():
        if isinstance(m, nn.Linear):
            m.weight = nn.Parameter(m.weight.t().contiguous().t(), requires_grad=False)


@harmless("starcoder2_bias_as_column", "starcoder2")
def _(b):
    class Augmented(nn.Module):
        def __init__(self, lin):
            super().__init__()
            self.table = nn.Parameter(torch.cat((lin.weight, lin.bias[:, None]), 1).t().contiguous())

        def forward(self, x):
            return torch.cat((x, torch.ones_like(x[..., :1])), -1) @ self.table

    for l in b.model.layers:
        l.mlp.c_fc, l.mlp.c_proj = Augmented(l.mlp.c_fc), Augmented(l.mlp.c_proj)


# ---------------------------------------------------------------------------------------------------- activations
@harmless("gemma3_gelu_tanh_written_out", "gemma3")
def _(b):
    for l in b.model.layers:
        swap(
            l.mlp.act_fn,
            forward=lambda self, x: x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)),
        )


@harmless("gpt_neox_gelu_erfc", "gpt_neox")
def _(b):
    for l in b.gpt_neox.layers:
        swap(l.mlp.act, forward=lambda self, x: 0.5 * x * torch.erfc(-x / math.sqrt(2.0)))


@harmless("nemotron_relu2_by_clamp", "nemotron")
def _(b):
    for l in b.model.layers:
        swap(l.mlp.act_fn, forward=lambda self, x: x * x.clamp(min=0))


@harmless("apertus_xielu_other_order", "apertus")
def _(b):
    def forward(self, x):
        ap = torch.log1p(self.alpha_p.exp())
        an = self.beta + torch.log1p(self.alpha_n.exp())
        neg = torch.expm1(torch.minimum(x, self.eps)) * an - an * x
        return self.beta * x + torch.where(x > 0, ap * x.square(), neg)

    for l in b.model.layers:
        swap(l.mlp.act_fn, forward=forward)


@harmless("bloom_gelu_functional", "bloom")
def _(b):
    def forward(self, x):
        return 0.5 * x + 0.5 * x * torch.tanh(0.79788456 * (x + 0.044715 * x**3))

    for l in b.transformer.h:
        swap(l.mlp.gelu_impl, forward=forward)


# ------------------------------------------------------------------------------------------------------- residuals
@harmless("qwen3_residual_in_place", "qwen3")
def _(b):
    def forward(self, hidden_states, **kw):
        h = hidden_states.clone()
        h.add_(self.self_attn(self.input_layernorm(h), **kw)[0])
        h += self.mlp(self.post_attention_layernorm(h))
        return h

    for l in b.model.layers:
        swap(l, forward=forward)


@harmless("cohere2_parallel_sum_other_order", "cohere2")
def _(b):
    def forward(self, hidden_states, **kw):
        y = self.input_layernorm(hidden_states)
        return (self.mlp(y) + self.self_attn(y, **kw)[0]) + hidden_states

    for l in b.model.layers:
        swap(l, forward=forward)


@harmless("gpt_neox_parallel_sum_other_order", "gpt_neox")
def _(b):
    def forward(self, hidden_states, **kw):
        a, _ = self.attention(self.input_layernorm(hidden_states), **kw)
        return (hidden_states + a) + self.mlp(self.post_attention_layernorm(hidden_states))

    for l in b.gpt_neox.layers:
        swap(l, forward=forward)


@harmless("granite_residual_addcmul", "granite")
def _(b):
    def forward(self, hidden_states, **kw):
        a, _ = self.self_attn(self.input_layernorm(hidden_states), **kw)
        h = torch.add(hidden_states, a, alpha=self.residual_multiplier)
        return torch.add(h, self.mlp(self.post_attention_layernorm(h)), alpha=self.residual_multiplier)

    for l in b.model.layers:
        swap(l, forward=forward)


@harmless("glm4_stream_in_float64", "glm4")
def _(b):
    def forward(self, hidden_states, **kw):
        a, _ = self.self_attn(self.input_layernorm(hidden_states), **kw)
        h = (hidden_states.double() + self.post_self_attn_layernorm(a).double()).to(hidden_states.dtype)
        return (h.double() + self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(h))).double()).to(h.dtype)

    for l in b.model.layers:
        swap(l, forward=forward)


# ------------------------------------------------------------------------------------------------------- mixtures
for _arch in ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "ernie4_5_moe"]:

    @harmless(f"{_arch}_experts_batched_mm", _arch)
    def _(b):
        b.config._experts_implementation = "batched_mm"
        for m in b.modules():
            if type(m).__name__.endswith("Experts"):
                m.config._experts_implementation = "batched_mm"


def dense_experts(self, x, idx, w):
    """All experts on all tokens by bmm, weights zero for the others."""
    full = torch.zeros(x.shape[0], self.num_experts, dtype=x.dtype).scatter(1, idx, w)
    g, u = torch.bmm(x[None].expand(self.num_experts, -1, -1), self.gate_up_proj.transpose(1, 2)).chunk(2, -1)
    y = torch.bmm(self.act_fn(g) * u, self.down_proj.transpose(1, 2))
    return torch.einsum("etd,te->td", y, full)


def sorted_experts(self, x, idx, w):
    """Tokens sorted by expert, one slice per expert, summed per token afterwards."""
    flat = idx.flatten()
    order = flat.argsort(stable=True)
    tok = order // idx.shape[1]
    counts = flat.bincount(minlength=self.num_experts).tolist()
    parts = []
    for e, rows in enumerate(x[tok].split(counts)):
        g, u = (rows @ self.gate_up_proj[e].t()).chunk(2, -1)
        parts.append((self.act_fn(g) * u) @ self.down_proj[e].t())
    y = torch.empty_like(torch.cat(parts))
    y[order] = torch.cat(parts)
    return (y.view(*idx.shape, -1) * w[..., None]).sum(1)


def token_experts(self, x, idx, w):
    out = []
    for t in range(x.shape[0]):
        acc = 0
        for e, c in zip(idx[t].tolist(), w[t]):
            h = self.gate_up_proj[e] @ x[t]
            n = h.shape[0] // 2
            acc = acc + c * (self.down_proj[e] @ (self.act_fn(h[:n]) * h[n:]))
        out.append(acc)
    return torch.stack(out)


for _arch, _f in [
    ("mixtral", dense_experts),
    ("qwen2_moe", sorted_experts),
    ("deepseek_v3", dense_experts),
    ("ernie4_5_moe", sorted_experts),
    ("mixtral", token_experts),
]:

    @harmless(f"{_arch}_{_f.__name__}", _arch)
    def _(b, f=_f):
        for m in b.modules():
            if type(m).__name__.endswith("Experts"):
                swap(m, forward=f)


class ExpertList(nn.Module):
    """Own modules for the experts in place of three-dimensional tensors."""

    def __init__(self, m):
        super().__init__()
        self.each = nn.ModuleList()
        self.act = m.act_fn
        for e in range(m.num_experts):
            g, u = m.gate_up_proj[e].chunk(2, 0)
            d = nn.ModuleDict(
                {
                    "w1": nn.Linear(*g.shape[::-1], bias=False),
                    "w3": nn.Linear(*g.shape[::-1], bias=False),
                    "w2": nn.Linear(g.shape[0], g.shape[1], bias=False),
                }
            )
            d["w1"].weight.copy_(g), d["w3"].weight.copy_(u), d["w2"].weight.copy_(m.down_proj[e])
            self.each.append(d)

    def forward(self, x, idx, w):
        y = torch.zeros_like(x)
        for e, d in enumerate(self.each):
            hit = (idx == e).any(-1)
            if hit.any():
                c = (w * (idx == e)).sum(-1)[hit]
                z = x[hit]
                y[hit] += c[:, None] * d["w2"](self.act(d["w1"](z)) * d["w3"](z))
        return y


for _arch in ["qwen2_moe", "mixtral"]:

    @harmless(f"{_arch}_experts_as_module_list", _arch)
    def _(b):
        for l in b.model.layers:
            l.mlp.experts = ExpertList(l.mlp.experts)


@harmless("mixtral_router_softmax_of_chosen", "mixtral")
def _(b):
    def forward(self, h):
        lg = h.reshape(-1, self.hidden_dim) @ self.weight.t()
        top, i = lg.topk(self.top_k, -1)
        return lg, top.softmax(-1), i

    for l in b.model.layers:
        swap(l.mlp.gate, forward=forward)


@harmless("deepseek_router_float64_sorted", "deepseek_v3")
def _(b):
    def forward(self, h):
        h = h.reshape(-1, h.shape[-1])
        lg = h.double() @ self.weight.double().t()
        s = 1 / (1 + (-lg).exp())
        c = s + self.e_score_correction_bias.double()
        g = c.unflatten(-1, (self.num_group, -1))
        two = g.sort(-1, descending=True).values[..., :2].sum(-1)
        kth = two.sort(-1, descending=True).values[:, self.topk_group - 1 : self.topk_group]
        c = torch.where((two >= kth)[..., None], g, torch.full_like(g, -1e9)).flatten(-2)
        i = c.argsort(-1, descending=True)[:, : self.top_k].flip(-1)
        w = s.gather(1, i)
        w = w * (self.routed_scaling_factor / w.sum(-1, keepdim=True))
        return lg.to(h.dtype), w.to(h.dtype), i

    for l in b.model.layers[1:]:
        swap(l.mlp.gate, forward=forward)


@harmless("qwen2_moe_block_other_order", "qwen2_moe")
def _(b):
    def forward(self, x):
        h = x.flatten(0, -2)
        lg = F.linear(h, self.gate.weight)
        w, i = (lg - lg.logsumexp(-1, keepdim=True)).exp().topk(self.gate.top_k, -1)
        y = self.shared_expert(h) / (1 + (-self.shared_expert_gate(h)).exp())
        return (y + self.experts(h, i, w)).view_as(x)

    for l in b.model.layers:
        swap(l.mlp, forward=forward)


@harmless("mica_experts_stacked", "mica")
def _(b):
    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        w, idx = self.router(flat)
        full = torch.zeros(flat.shape[0], len(self.experts), dtype=x.dtype).scatter(1, idx, w)
        g = torch.stack([e.gate.weight for e in self.experts])
        u = torch.stack([e.up.weight for e in self.experts])
        d = torch.stack([e.down.weight for e in self.experts])
        h = F.gelu(torch.einsum("td,efd->tef", flat, g), approximate="tanh") * torch.einsum("td,efd->tef", flat, u)
        return (self.common(flat) + torch.einsum("tef,edf,te->td", h, d, full)).view_as(x)

    for l in b.layers:
        swap(l.moe, forward=forward)


# ---------------------------------------------------------------------------------------------------- embedding, head
@harmless("gemma2_embedding_one_hot", "gemma2")
def _(b):
    def forward(self, ids):
        return (F.one_hot(ids, self.num_embeddings).to(self.weight.dtype) @ self.weight) * self.embed_scale

    swap(b.model.embed_tokens, forward=forward)


@harmless(
    "gemma3_embedding_scale_in_table",
    "gemma3",
    note="reparametrised exactly: the table is multiplied by 8 and the scale is one",
)
def _(b):
    b.model.embed_tokens.weight.mul_(8.0)
    b.model.embed_tokens.embed_scale.fill_(1.0)


@harmless("qwen2_scale_in_q_proj", "qwen2", note="reparametrised exactly: q_proj carries the factor 1/4 of the scores")
def _(b):
    for l in b.model.layers:
        a = l.self_attn
        assert a.scaling == 0.25
        a.q_proj.weight.mul_(0.25), a.q_proj.bias.mul_(0.25)
        a.scaling = 1.0


class ChunkedHead(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(c.clone()) for c in w.split(100)])

    def forward(self, x):
        return torch.cat([x @ p.t() for p in self.parts], -1)


for _arch in ["exaone4", "starcoder2"]:

    @harmless(f"{_arch}_head_in_vocabulary_chunks", _arch)
    def _(b):
        b.lm_head = ChunkedHead(b.lm_head.weight)


@harmless("olmo2_head_token_chunks_float64", "olmo2")
def _(b):
    def forward(self, x):
        return torch.cat([(c.double() @ self.weight.double().t()).to(x.dtype) for c in x.split(10, 1)], 1)

    swap(b.lm_head, forward=forward)


@harmless("gemma2_final_cap_by_exp", "gemma2")
def _(b):
    base = base_forward(b)

    def forward(self, *a, **k):
        cap = self.config.final_logit_softcapping
        self.config.final_logit_softcapping = None
        try:
            out = base(self, *a, **k)
        finally:
            self.config.final_logit_softcapping = cap
        out.logits = cap * (1 - 2 / (1 + torch.exp(2 * out.logits / cap)))
        return out

    swap(b, forward=forward)


@harmless(
    "granite_logits_scaled_before_head",
    "granite",
    note="the logits' scale is applied to the hidden state in front of the head",
)
def _(b):
    swap(b.lm_head, forward=lambda self, x: F.linear(x / 1.6, self.weight))
    b.config.logits_scaling = 1.0


@harmless("tern_logits_as_logprobs", "tern", note="B returns log-probabilities as logits")
def _(b):
    def finish(self, z):
        z = self.config.cap * torch.tanh(z / self.config.cap)
        return z - z.logsumexp(-1, keepdim=True)

    swap(b, finish=finish)


# ------------------------------------------------------------------------------------------------------- batches
def padded(side, n, partner=False):
    def make(b):
        base = base_forward(b)

        def forward(self, input_ids, attention_mask=None, position_ids=None, **kw):
            bs, t = input_ids.shape
            pad = input_ids.new_zeros(bs, n)
            ids = torch.cat((pad, input_ids) if side == "left" else (input_ids, pad), 1)
            mask = torch.cat(
                (torch.zeros_like(pad), torch.ones_like(input_ids))
                if side == "left"
                else (torch.ones_like(input_ids), torch.zeros_like(pad)),
                1,
            )
            if partner:
                ids = torch.cat((ids, (torch.arange(t + n)[None] * 7) % 200 + 5))
                mask = torch.cat((mask, torch.ones_like(mask[:1])))
            pos = (mask.cumsum(-1) - 1).clamp(min=0)
            kw.pop("use_cache", None)
            extra = {} if "Bloom" in type(self).__name__ else {"position_ids": pos}
            out = base(self, ids, attention_mask=mask, **extra)
            out.logits = out.logits[:bs, n:] if side == "left" else out.logits[:bs, :t]
            return out

        swap(b, forward=forward)

    return make


for _arch, _side, _n, _p in [
    ("qwen2", "left", 9, False),
    ("gemma3", "left", 5, True),
    ("mixtral", "right", 11, True),
    ("bloom", "left", 6, False),
    ("stablelm", "right", 8, False),
    ("tern", "left", 7, True),
    ("vale", "right", 10, True),
    ("exaone4", "left", 12, True),
]:
    harmless(f"{_arch}_padded_{_side}{'_in_batch' if _p else ''}", _arch, note="B's modules see a padded batch inside")(
        padded(_side, _n, _p)
    )


@harmless("phi3_positions_shifted", "phi3", note="all rotary positions shifted by 13: only differences count")
def _(b):
    base = base_forward(b)

    def forward(self, input_ids, position_ids=None, **kw):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None].expand_as(input_ids)
        return base(self, input_ids, position_ids=position_ids + 13, **kw)

    swap(b, forward=forward)


def prefill(cut):
    def make(b):
        base = base_forward(b)

        def forward(self, input_ids, **kw):
            from transformers import DynamicCache

            kw = {k: v for k, v in kw.items() if k in ("output_hidden_states",)}
            cache = DynamicCache(config=self.config)
            first = base(self, input_ids[:, :cut], past_key_values=cache, use_cache=True, **kw)
            rest = base(self, input_ids[:, cut:], past_key_values=cache, use_cache=True, **kw)
            first.logits = torch.cat((first.logits, rest.logits), 1)
            return first

        swap(b, forward=forward)

    return make


for _arch, _cut in [("qwen3", 10), ("gemma2", 17), ("deepseek_v3", 20), ("smollm3", 1)]:
    harmless(f"{_arch}_prefill_in_two_parts", _arch, note="B calls its layers twice with a cache")(prefill(_cut))


@harmless("olmo2_cache_used", "olmo2")
def _(b):
    b.config.use_cache = True


# --------------------------------------------------------------------------------------- outputs, names, other containers
@dataclass
class LayerResult:
    stream: torch.Tensor
    note: str = ""


class OwnLayer(nn.Module):
    """A decoder layer with other names whose parts return dicts."""

    def __init__(self, l):
        super().__init__()
        self.parts = nn.ModuleDict(
            {"n1": l.input_layernorm, "mixer": l.self_attn, "n2": l.post_attention_layernorm, "ff": l.mlp}
        )

    def run(self, x, **kw):
        x = {"x": x}
        x["a"] = self.parts["mixer"](self.parts["n1"](x["x"]), **kw)[0]
        x["y"] = x["x"] + x["a"]
        x["m"] = self.parts["ff"](self.parts["n2"](x["y"]))
        return LayerResult(x["m"] + x["y"])

    def forward(self, hidden_states, **kw):
        return self.run(hidden_states, **kw).stream


for _arch in ["qwen2", "mistral"]:

    @harmless(f"{_arch}_layers_renamed", _arch)
    def _(b):
        for i, l in enumerate(b.model.layers):
            b.model.layers[i] = OwnLayer(l)


@harmless("starcoder2_lora_of_rank_zero_and_dropouts", "starcoder2")
def _(b):
    for l in b.model.layers:
        l.self_attn.o_proj = nn.Sequential(
            OrderedDict(lin=l.self_attn.o_proj, drop=nn.Dropout(0.3), same=nn.Identity())
        )
        l.mlp.c_proj = nn.Sequential(l.mlp.c_proj, nn.Dropout(0.5))


@harmless("qwen3_lora_unmerged", "qwen3", a=merge_lora)
def _(b):
    unmerge_lora(b)


class DictReturning(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.inner = mlp

    def forward(self, x):
        return {"hidden": self.inner(x), "aux": None}


@harmless("vale_ff_returns_dict", "vale")
def _(b):
    def forward(self, x, ang, keep):
        a = self.attn(self.rms1(x), ang, keep)
        x = x + a
        return self.ff(self.rms2(x))["hidden"] + x

    for blk in b.blocks:
        blk.ff = DictReturning(blk.ff)
        swap(blk, forward=forward)


@harmless("vale_attention_by_sdpa_real_rotary", "vale")
def _(b):
    def turn(self, x, ang):
        c, s = ang.cos()[:, :, None], ang.sin()[:, :, None]
        x1, x2 = x[..., 0::2], x[..., 1::2]
        return torch.stack((x1 * c - x2 * s, x1 * s + x2 * c), -1).flatten(-2)

    def mix(self, q, k, v, keep):
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None], enable_gqa=True)
        return o.transpose(1, 2).flatten(2)

    for blk in b.blocks:
        swap(blk.attn, turn=turn, mix=mix)


@harmless("tern_fused_qkv_and_baddbmm", "tern")
def _(b):
    def forward(self, x, allowed):
        bs, t, e = x.shape
        w = torch.cat((self.query.weight, self.key.weight, self.value.weight))
        q, k, v = (
            self.split(y).flatten(0, 1)
            for y in F.linear(x, w, torch.cat((self.query.bias, self.key.bias, self.value.bias))).chunk(3, -1)
        )
        bias = (
            self.bias(t, x.device)[None]
            .expand(bs, -1, -1, -1)
            .masked_fill(~allowed[:, None], float("-inf"))
            .flatten(0, 1)
        )
        a = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=self.d**-0.5).softmax(-1)
        return self.proj(torch.bmm(a, v).unflatten(0, (bs, -1)).transpose(1, 2).flatten(2))

    for l in b.body.stack:
        swap(l.mix, forward=forward)


@harmless("mica_sinks_by_concatenation", "mica")
def _(b):
    def weights(self, s):
        z = torch.cat((s, self.sink[None, :, None, None].expand(*s.shape[:3], 1)), -1)
        return z.softmax(-1)[..., :-1]

    for l in b.layers:
        swap(l.attn, weights=weights)


@harmless(
    "deepseek_latent_absorbed",
    "deepseek_v3",
    note="kv_b_proj is absorbed into the queries and the output: B never forms keys and values",
)
def _(b):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kw):
        bs, t, _ = hidden_states.shape
        n, dn, dr, dv = self.num_heads, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states))).view(bs, t, n, dn + dr)
        c, kr = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, dr], -1)
        c = self.kv_a_layernorm(c)
        cos, sin = (x[..., : dr // 2] for x in position_embeddings)

        def turn(x, cos, sin):
            x1, x2 = x[..., 0::2], x[..., 1::2]
            return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)

        qr, kr = turn(q[..., dn:], cos[:, :, None], sin[:, :, None]), turn(kr, cos, sin)
        w = self.kv_b_proj.weight.view(n, dn + dv, -1)
        ql = torch.einsum("bthd,hdc->bthc", q[..., :dn], w[:, :dn])
        s = (torch.einsum("bthc,bsc->bhts", ql, c) + torch.einsum("bthr,bsr->bhts", qr, kr)) * self.scaling
        s = s.masked_fill(~torch.ones(t, t, dtype=torch.bool).tril(), float("-inf"))
        o = torch.einsum("bhts,bsc->bthc", s.softmax(-1), c)
        return self.o_proj(torch.einsum("bthc,hdc->bthd", o, w[:, dn:]).flatten(2)), None

    for l in b.model.layers:
        swap(l.self_attn, forward=forward)


# ---------------------------------------------------------------------------------------- whole models in own code
class FlatQwen3(nn.Module):
    """The whole model as one function over a dictionary of tensors, no submodules."""

    def __init__(self, m):
        super().__init__()
        self.config = m.config
        self.w = nn.ParameterDict({k.replace(".", "/"): nn.Parameter(v.clone()) for k, v in m.state_dict().items()})
        self.register_buffer("inv_freq", m.model.rotary_emb.inv_freq.clone(), persistent=False)

    def norm(self, x, name):
        return F.rms_norm(x, (x.shape[-1],), self.w[name.replace(".", "/")], self.config.rms_norm_eps)

    def lin(self, x, name):
        return x @ self.w[name.replace(".", "/") + "/weight"].t()

    def forward(self, input_ids, attention_mask=None, position_ids=None, **kw):
        c = self.config
        b, t = input_ids.shape
        x = self.w["model/embed_tokens/weight"][input_ids]
        pos = torch.arange(t)[None] if position_ids is None else position_ids
        a = pos[..., None].to(x.dtype) * self.inv_freq
        cos, sin = (torch.cat((f, f), -1)[:, None] for f in (a.cos(), a.sin()))
        ok = torch.ones(t, t, dtype=torch.bool).tril()[None, None]
        if attention_mask is not None:
            ok = ok & attention_mask.bool()[:, None, None]
        for i in range(c.num_hidden_layers):
            p = f"model.layers.{i}."
            y = self.norm(x, p + "input_layernorm.weight")
            q, k, v = (self.lin(y, p + f"self_attn.{n}_proj").view(b, t, -1, c.head_dim).transpose(1, 2) for n in "qkv")
            q, k = self.norm(q, p + "self_attn.q_norm.weight"), self.norm(k, p + "self_attn.k_norm.weight")
            o = F.scaled_dot_product_attention(half(q, cos, sin), half(k, cos, sin), v, attn_mask=ok, enable_gqa=True)
            x = x + self.lin(o.transpose(1, 2).flatten(2), p + "self_attn.o_proj")
            y = self.norm(x, p + "post_attention_layernorm.weight")
            x = x + self.lin(
                F.silu(self.lin(y, p + "mlp.gate_proj")) * self.lin(y, p + "mlp.up_proj"), p + "mlp.down_proj"
            )
        return Out(self.lin(self.norm(x, "model.norm.weight"), "lm_head"))


@harmless("qwen3_flat_function", "qwen3", note="no submodules in B at all")
def _(b):
    return FlatQwen3(b)


class OwnNeoxBlock(nn.Module):
    def __init__(self, l):
        super().__init__()
        self.ln_a, self.ln_m = l.input_layernorm, l.post_attention_layernorm
        a = l.attention
        w, bias = a.query_key_value.weight, a.query_key_value.bias
        d = a.head_size
        for j, n in enumerate(("to_q", "to_k", "to_v")):
            lin = nn.Linear(w.shape[1], w.shape[1])
            lin.weight.copy_(w.view(-1, 3, d, w.shape[1])[:, j].reshape(-1, w.shape[1]))
            lin.bias.copy_(bias.view(-1, 3, d)[:, j].reshape(-1))
            setattr(self, n, lin)
        self.to_out, self.fc1, self.fc2, self.d = a.dense, l.mlp.dense_h_to_4h, l.mlp.dense_4h_to_h, d

    def forward(self, x, cos, sin):
        y = self.ln_a(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.d)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        o = F.scaled_dot_product_attention(half(q, cos, sin), half(k, cos, sin), v, is_causal=True)
        return x + self.to_out(o.transpose(1, 2).flatten(2)) + self.fc2(F.gelu(self.fc1(self.ln_m(x))))


class OwnNeox(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.config = m.config
        self.wte = m.gpt_neox.embed_in
        self.blocks = nn.Sequential(*[OwnNeoxBlock(l) for l in m.gpt_neox.layers])
        self.ln = m.gpt_neox.final_layer_norm
        self.unembed = m.lm_head
        self.register_buffer("inv_freq", m.gpt_neox.rotary_emb.inv_freq.clone(), persistent=False)

    def forward(self, input_ids, attention_mask=None, position_ids=None, **kw):
        x = self.wte(input_ids)
        a = torch.outer(torch.arange(input_ids.shape[1]).to(x.dtype), self.inv_freq)
        a = torch.cat((a, a), -1)
        for blk in self.blocks:
            x = blk(x, a.cos(), a.sin())
        return Out(self.unembed(self.ln(x)))


@harmless("gpt_neox_whole_own_code", "gpt_neox")
def _(b):
    return OwnNeox(b)


class OwnGemma2(nn.Module):
    class Norm(nn.Module):
        def __init__(self, m):
            super().__init__()
            self.weight, self.eps = nn.Parameter(m.weight.clone()), m.eps

        def forward(self, x):
            return F.rms_norm(x, (x.shape[-1],), None, self.eps) * (self.weight + 1)

    class Block(nn.Module):
        def __init__(self, l):
            super().__init__()
            N = OwnGemma2.Norm
            self.norms = nn.ModuleList(
                [
                    N(l.input_layernorm),
                    N(l.post_attention_layernorm),
                    N(l.pre_feedforward_layernorm),
                    N(l.post_feedforward_layernorm),
                ]
            )
            a = l.self_attn
            self.q, self.k, self.v, self.o = a.q_proj, a.k_proj, a.v_proj, a.o_proj
            self.gate, self.up, self.down = l.mlp.gate_proj, l.mlp.up_proj, l.mlp.down_proj
            self.scale, self.cap, self.window, self.d = (
                a.scaling,
                a.attn_logit_softcapping,
                a.sliding_window,
                a.head_dim,
            )

        def attend(self, x, cos, sin):
            q, k, v = (f(x).unflatten(-1, (-1, self.d)).transpose(1, 2) for f in (self.q, self.k, self.v))
            n = q.shape[1] // k.shape[1]
            q, k, v = half(q, cos, sin), half(k, cos, sin).repeat_interleave(n, 1), v.repeat_interleave(n, 1)
            s = self.cap * torch.tanh(torch.einsum("bhtd,bhsd->bhts", q, k) * (self.scale / self.cap))
            i = torch.arange(s.shape[-1])
            dist = i[:, None] - i
            ok = (dist >= 0) if self.window is None else (dist >= 0) & (dist < self.window)
            return self.o(torch.einsum("bhts,bhsd->bthd", s.masked_fill(~ok, -torch.inf).softmax(-1), v).flatten(2))

        def forward(self, x, cos, sin):
            n = self.norms
            x = x + n[1](self.attend(n[0](x), cos, sin))
            y = n[2](x)
            return x + n[3](self.down(F.gelu(self.gate(y), approximate="tanh") * self.up(y)))

    def __init__(self, m):
        super().__init__()
        self.config = m.config
        self.table = m.model.embed_tokens.weight
        self.scale = m.model.embed_tokens.embed_scale
        self.blocks = nn.ModuleList([OwnGemma2.Block(l) for l in m.model.layers])
        self.fin = OwnGemma2.Norm(m.model.norm)
        self.head = m.lm_head
        self.register_buffer("inv_freq", m.model.rotary_emb.inv_freq.clone(), persistent=False)

    def forward(self, input_ids, attention_mask=None, position_ids=None, **kw):
        x = F.embedding(input_ids, self.table) * self.scale
        a = torch.outer(torch.arange(input_ids.shape[1]).to(x.dtype), self.inv_freq)
        a = torch.cat((a, a), -1)
        cos, sin = a.cos(), a.sin()
        for blk in self.blocks:
            x = blk(x, cos, sin)
        z = self.head(self.fin(x))
        return Out(torch.tanh(z / self.config.final_logit_softcapping) * self.config.final_logit_softcapping)


@harmless("gemma2_whole_own_code", "gemma2")
def _(b):
    return OwnGemma2(b)


@harmless("gemma3_everything_recoded", "gemma3")
def _(b):
    own_attention(b)
    recode_norms(b)
    recode_mlps(b)
    recode_linears(b, "einsum")


@harmless("granite_everything_recoded", "granite")
def _(b):
    recode_norms(b, "divide")
    recode_mlps(b)
    recode_linears(b)
    use_attention(b, "user_online")


@harmless("ernie_everything_recoded", "ernie4_5_moe")
def _(b):
    own_attention(b)
    recode_norms(b, "einsum")
    recode_linears(b, "f64")
    for m in b.modules():
        if type(m).__name__.endswith("Experts"):
            swap(m, forward=dense_experts)


@harmless(
    "bloom_alibi_distances",
    "bloom",
    note="B's alibi is counted from the last token: each row of scores is shifted by a constant",
)
def _(b):
    base = type(b.transformer).build_alibi_tensor

    def build_alibi_tensor(self, m, n, dtype):
        a = base(self, m, n, dtype)
        return a - a[..., -1:]

    swap(b.transformer, build_alibi_tensor=build_alibi_tensor)


@harmless("tern_head_tied_copy", "tern")
def _(b):
    w = b.readout.weight.clone()
    b.readout = nn.Linear(w.shape[1], w.shape[0])
    b.readout.weight.copy_(w)
    b.readout.bias.copy_(build("tern").readout.bias)


@harmless("phi3_identical_copy", "phi3")
def _(b):
    pass
