"""Shared helpers: registry, own attention code with hooks, harmless re-codings."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Callable

import torch
import torch.nn.functional as F
from torch import nn

from fourth_models import BUILD, build, make_inputs

LIN, NORM, ROT, ATT, ACT, GU, RES, ROUTER, EXP, EMB, HEAD, SCALE, CAP, LSM = (
    "linear",
    "norm",
    "rotary",
    "attention",
    "activation",
    "gate_up_product",
    "residual",
    "router",
    "experts",
    "embedding",
    "head",
    "logit_scaling",
    "soft_cap",
    "log_softmax",
)
OPERATORS = {LIN, NORM, ROT, ATT, ACT, GU, RES, ROUTER, EXP, EMB, HEAD, SCALE, CAP, LSM}


@dataclass
class Fault:
    modules: set
    operator: set
    why: str
    subtle: bool = False  # measured: 10 to 1000 times the float32 rounding (from fourth_measured.json)


@dataclass
class Case:
    name: str
    architecture: str
    make: Callable = field(repr=False)
    fault: Fault | None = None
    inputs: list = field(default_factory=list, repr=False)
    note: str = ""
    a: Callable | None = field(default=None, repr=False)  # prepares A before it is copied

    def build(self):
        """(model_a, model_b), both in eval mode, float32."""
        with torch.no_grad():
            a = build(self.architecture)
            if self.a is not None:
                self.a(a)
            b = copy.deepcopy(a)
            b = self.make(b) or b
            for p in b.parameters():
                p.requires_grad_(False)
        return a.eval(), b.eval()


CASES: list[Case] = []


def _add(case):
    assert case.name not in {c.name for c in CASES}, case.name
    assert case.architecture in BUILD
    CASES.append(case)


def fault(name, arch, modules, operator, why, subtle=False, also=(), note="", a=None):
    modules = {modules} if isinstance(modules, str) else set(modules)
    operator = {operator} if isinstance(operator, str) else set(operator)
    assert operator <= OPERATORS

    def deco(fn):
        def make(b):
            for w in also:
                RECODE[w](b)
            return fn(b)

        _add(Case(name, arch, make, Fault(modules, operator, why, subtle), make_inputs(arch), note, a))
        return fn

    return deco


def harmless(name, arch, note="", a=None):
    def deco(fn):
        _add(Case(name, arch, fn, None, make_inputs(arch, seed=11), note, a))
        return fn

    return deco


def L(i, *rest):
    return ".".join(["model.layers", str(i), *rest])


def swap(mod, mixin=None, **methods):
    """The module becomes an instance of a subclass (own code of a user) with other methods."""
    cls = type(mod)
    bases = (mixin, cls) if mixin is not None else (cls,)
    mod.__class__ = type("User" + cls.__name__, bases, methods)
    return mod


def base_forward(mod):
    return type(mod).forward


# -------------------------------------------------------------------------------------- own attention with hooks
class Hooks:
    def expand(self, x, n):
        return x if n == 1 else x.repeat_interleave(n, dim=1)

    def scores(self, q, k, scaling, softcap):
        s = (q * scaling) @ k.transpose(-1, -2)
        return s if softcap is None else softcap * torch.tanh(s / softcap)

    def mask(self, s, m):
        tq, tk = s.shape[-2:]
        if m is None:
            keep = torch.ones(tq, tk, dtype=torch.bool, device=s.device).tril(tk - tq)
            return s.masked_fill(~keep, float("-inf"))
        if m.dtype == torch.bool:
            return s.masked_fill(~m, torch.finfo(s.dtype).min)
        return s + m

    def probs(self, s, sinks):
        if sinks is None:
            s = s - s.amax(-1, keepdim=True)
            e = s.exp()
            return e / e.sum(-1, keepdim=True)
        z = torch.cat([s, sinks.view(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], 1).to(s.dtype)], -1)
        return z.softmax(-1)[..., :-1]

    def combine(self, p, v):
        return p @ v

    def __call__(self, module, q, k, v, mask, scaling, softcap=None, sinks=None):
        n = q.shape[1] // k.shape[1]
        k, v = self.expand(k, n), self.expand(v, n)
        p = self.probs(self.mask(self.scores(q, k, scaling, softcap), mask), sinks)
        return self.combine(p, v)


def register(name, hooks):
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    def fn(module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, s_aux=None, **kw):
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        o = hooks(module, query, key, value, attention_mask, scaling, softcap, s_aux)
        return o.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, fn)
    AttentionMaskInterface.register(name, eager_mask)
    return name


register("user_eager", Hooks())


def attn_modules(b):
    return [m for n, m in b.named_modules() if n.endswith(("self_attn", ".attention"))]


def use_attention(b, name, layer=None):
    """All attentions (or one of them) of b by the named implementation; the others stay eager then."""
    if layer is None:
        b.config._attn_implementation = name
        for m in attn_modules(b):
            m.config._attn_implementation = name
    else:
        use_attention(b, "eager")
        m = attn_modules(b)[layer]
        m.config = copy.deepcopy(m.config)
        m.config._attn_implementation = name


def half(x, cos, sin):
    r = cos.shape[-1]
    x, rest = x[..., :r], x[..., r:]
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x * cos + torch.cat((-x2, x1), -1) * sin, rest), -1)


def inter(x, cos, sin):  # cos, sin with pairs repeated next to each other
    r = cos.shape[-1]
    x, rest = x[..., :r], x[..., r:]
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.cat((x * cos + torch.stack((-x2, x1), -1).flatten(-2) * sin, rest), -1)


class OwnAttn:
    """Own attention for q_proj/k_proj/v_proj/o_proj modules of transformers (same computation in own words)."""

    hooks = Hooks()
    norm_before = True

    def qkv(self, x):
        d = self.head_dim
        sh = (*x.shape[:2], -1, d)
        return self.q_proj(x).view(sh), self.k_proj(x).view(sh), self.v_proj(x).view(sh)

    def rotates(self):
        n = type(self).__name__
        if "SmolLM3" in n:
            return bool(self.use_rope)
        if "Cohere2" in n:
            return self.sliding_window is not None
        if "Exaone4" in n:
            return self.is_sliding or self.sliding_window is None
        return True

    def norm_q(self, q):
        m = getattr(self, "q_norm", None) or getattr(self, "query_layernorm", None)
        return q if m is None else self._norm(m, q)

    def norm_k(self, k):
        m = getattr(self, "k_norm", None) or getattr(self, "key_layernorm", None)
        return k if m is None else self._norm(m, k)

    def _norm(self, m, x):  # b h t d
        if m.weight.numel() == x.shape[-1]:
            return m(x)
        b, h, t, d = x.shape
        return m(x.transpose(1, 2).reshape(b, t, h * d)).view(b, t, h, d).transpose(1, 2)

    def rotate(self, q, k, cos, sin):
        n = type(self).__name__
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        if "GptOss" in n:
            cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        if "Glm4" in n or "Ernie" in n:
            cos, sin = (x[..., : x.shape[-1] // 2].repeat_interleave(2, -1) for x in (cos, sin))
        f = inter if ("Glm4" in n or "Ernie" in n or "Cohere2" in n) else half
        return f(q, cos, sin), f(k, cos, sin)

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kw):
        b, t, _ = hidden_states.shape
        q, k, v = (x.transpose(1, 2) for x in self.qkv(hidden_states))
        first = self.norm_before and "HunYuan" not in type(self).__name__
        if first:
            q, k = self.norm_q(q), self.norm_k(k)
        if self.rotates():
            q, k = self.rotate(q, k, *position_embeddings)
        if not first:
            q, k = self.norm_q(q), self.norm_k(k)
        o = self.hooks(
            self,
            q,
            k,
            v,
            attention_mask,
            self.scaling,
            getattr(self, "attn_logit_softcapping", None),
            getattr(self, "sinks", None),
        )
        return self.o_proj(o.transpose(1, 2).reshape(b, t, -1)), None


def own_attention(b, **methods):
    for m in attn_modules(b):
        swap(m, OwnAttn, **methods)


# -------------------------------------------------------------------------------------------- harmless re-codings
def recode_norms(b, form="fused"):
    def rms_fused(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.variance_epsilon)

    def rms_divide(self, x):
        return x * self.weight / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + self.variance_epsilon).sqrt()

    def rms_f64(self, x):
        y = x.double()
        y = y / (y.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt() * self.weight.double()
        return y.to(x.dtype)

    def rms_einsum(self, x):
        ss = torch.einsum("...d,...d->...", x, x)[..., None]
        return torch.rsqrt(ss / x.shape[-1] + self.variance_epsilon) * (self.weight * x)

    def gem_fused(self, x):
        return F.rms_norm(x, (x.shape[-1],), 1.0 + self.weight, self.eps)

    def gem_divide(self, x):
        y = x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return y + y * self.weight

    def ln_manual(self, x):
        m = x.mean(-1, keepdim=True)
        v = (x * x).mean(-1, keepdim=True) - m * m
        y = (x - m) / (v + self.eps).sqrt() * self.weight
        return y if self.bias is None else y + self.bias

    def ln_f64(self, x):
        y = F.layer_norm(
            x.double(),
            (x.shape[-1],),
            self.weight.double(),
            None if self.bias is None else self.bias.double(),
            self.eps,
        )
        return y.to(x.dtype)

    def coh_fused(self, x):
        return F.layer_norm(x, (x.shape[-1],), self.weight, None, self.variance_epsilon)

    def one_p(self, x):
        y = F.layer_norm(x, (x.shape[-1],), None, None, self.eps)
        return y + y * self.weight + self.bias

    n = 0
    for m in list(b.modules()):
        name = type(m).__name__
        if name == "Cohere2LayerNorm":
            swap(m, forward=coh_fused)
        elif name == "NemotronLayerNorm1P":
            swap(m, forward=one_p)
        elif name in ("Gemma2RMSNorm", "Gemma3RMSNorm"):
            swap(m, forward=gem_fused if form == "fused" else gem_divide)
        elif name.endswith("RMSNorm") and hasattr(m, "variance_epsilon"):
            swap(m, forward={"fused": rms_fused, "divide": rms_divide, "f64": rms_f64, "einsum": rms_einsum}[form])
        elif isinstance(m, nn.LayerNorm):
            swap(m, forward=ln_f64 if form == "f64" else ln_manual)
        else:
            continue
        n += 1
    assert n


def recode_mlps(b):
    def joined(self, x):
        w = torch.cat((self.up_proj.weight, self.gate_proj.weight), 0)
        bias = None if self.up_proj.bias is None else torch.cat((self.up_proj.bias, self.gate_proj.bias))
        u, g = F.linear(x, w, bias).chunk(2, -1)
        return self.down_proj(u * self.act_fn(g))

    n = 0
    for m in list(b.modules()):
        if all(isinstance(getattr(m, k, None), nn.Linear) for k in ("gate_proj", "up_proj", "down_proj")):
            swap(m, forward=joined)
            n += 1
    assert n


def recode_linears(b, style="matmul"):
    """Every projection by another order of sums."""

    def split_k(self, x):
        h = self.in_features // 2
        y = x[..., h:] @ self.weight[:, h:].t() + x[..., :h] @ self.weight[:, :h].t()
        return y if self.bias is None else y + self.bias

    def f64(self, x):
        return F.linear(x.double(), self.weight.double(), None if self.bias is None else self.bias.double()).to(x.dtype)

    def ein(self, x):
        y = (
            torch.einsum("bti,oi->bto", x, self.weight)
            if x.dim() == 3
            else torch.einsum("...i,oi->...o", x, self.weight)
        )
        return y if self.bias is None else self.bias + y

    f = {"matmul": split_k, "f64": f64, "einsum": ein}[style]
    for m in list(b.modules()):
        if type(m) is nn.Linear:
            swap(m, forward=f)


RECODE = {
    "attn": lambda b: use_attention(b, "user_eager"),
    "eager": lambda b: use_attention(b, "eager"),
    "sdpa": lambda b: use_attention(b, "sdpa"),
    "own": own_attention,
    "norm": recode_norms,
    "norm_div": lambda b: recode_norms(b, "divide"),
    "mlp": recode_mlps,
    "lin": recode_linears,
    "ein": lambda b: recode_linears(b, "einsum"),
}
