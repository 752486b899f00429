"""Policies. Each has logits(prompt, response) for all response places, and start / step as an engine calls them.

Attributes named k_* are the numbers of a kernel; only an engine's copy ever has them off their defaults, and only
start / step read them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class Policy(nn.Module):
    k_scale = 1.0  # of attention scores
    k_pos = 0  # positions of decoded tokens are moved by this
    k_eps = None  # eps of layer norm
    k_act = None  # another activation
    k_bits = None  # mantissa bits of hidden states
    k_hook = None  # function of hidden state, at decode
    drop = 0.0

    def d(self, x):
        return F.dropout(x, self.drop, self.training) if self.drop > 0 else x

    def kround(self, x):
        if self.k_hook is not None:
            x = self.k_hook(x)
        if self.k_bits is None:
            return x
        m, e = torch.frexp(x)
        s = 2.0**self.k_bits
        return torch.ldexp(torch.round(m * s) / s, e)


class GRU(Policy):
    def __init__(self, V, P, T, E=24, H=64):
        super().__init__()
        self.emb = nn.Embedding(V, E)
        self.gru = nn.GRU(E, H, batch_first=True)
        self.out = nn.Linear(H, V)

    def logits(self, prompt, resp):
        x = torch.cat([prompt, resp[:, :-1]], 1)
        h, _ = self.gru(self.d(self.emb(x)))
        return self.out(self.d(h[:, prompt.shape[1] - 1 :]))

    def start(self, prompt):
        h, s = self.gru(self.emb(prompt))
        h, s = self.kround(h), self.kround(s)
        return self.out(h[:, -1]), s

    def step(self, s, tok):
        h, s = self.gru(self.emb(tok)[:, None], s)
        s = self.kround(s)
        return self.out(self.kround(h[:, 0])), s


class Block(nn.Module):
    def __init__(self, D, nh):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 3 * D), nn.Linear(3 * D, D)
        self.nh = nh


class Trans(Policy):
    def __init__(self, V, P, T, D=48, L=2, nh=4, rope=False):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.rope, self.nh, self.D, self.N = rope, nh, D, P + T + 8
        if not rope:
            self.pos = nn.Parameter(torch.randn(self.N, D) * 0.05)
        else:
            f = 1.0 / 100 ** (torch.arange(0, D // nh, 2) / (D // nh))
            a = torch.arange(self.N + 16)[:, None] * f[None]
            self.register_buffer("cos", a.cos(), persistent=False)
            self.register_buffer("sin", a.sin(), persistent=False)
        self.blocks = nn.ModuleList([Block(D, nh) for _ in range(L)])
        self.norm = nn.LayerNorm(D)
        self.out = nn.Linear(D, V)

    def rot(self, x, at):  # [B, h, n, d]
        if not self.rope:
            return x
        c, s = self.cos[at], self.sin[at]
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.nh, -1).transpose(1, 2)

    def ln(self, n, x, engine):
        if engine and self.k_eps is not None:
            return F.layer_norm(x, n.normalized_shape, n.weight, n.bias, self.k_eps)
        return n(x)

    def run(self, x, at, cache, engine):
        x = self.emb(x)
        if not self.rope:
            x = x + self.pos[at]
        x = self.d(x)
        n = x.shape[1]
        for i, b in enumerate(self.blocks):
            q, k, v = map(self.split, b.qkv(self.ln(b.n1, x, engine)).chunk(3, -1))
            q, k = self.rot(q, at), self.rot(k, at)
            if engine:
                k, v = self.kround(k), self.kround(v)
            if cache is not None:
                if len(cache) <= i:
                    cache.append((k, v))
                else:
                    k, v = torch.cat([cache[i][0], k], 2), torch.cat([cache[i][1], v], 2)
                    cache[i] = (k, v)
            w = q @ k.transpose(-1, -2) / math.sqrt(k.shape[-1])
            if engine:
                w = w * self.k_scale
            if n > 1:
                w = w + torch.full((n, n), -1e9).triu(1)
            a = (w.softmax(-1) @ v).transpose(1, 2).flatten(2)
            x = x + self.d(b.proj(a))
            h = b.up(self.ln(b.n2, x, engine))
            h = self.k_act(h) if engine and self.k_act is not None else F.gelu(h)
            x = x + self.d(b.down(h))
        return self.out(self.ln(self.norm, x, engine))

    def logits(self, prompt, resp):
        x = torch.cat([prompt, resp[:, :-1]], 1)
        return self.run(x, torch.arange(x.shape[1]), None, False)[:, prompt.shape[1] - 1 :]

    def start(self, prompt):
        cache = []
        z = self.run(prompt, torch.arange(prompt.shape[1]), cache, True)[:, -1]
        return z, (cache, prompt.shape[1])

    def step(self, s, tok):
        cache, t = s
        z = self.run(tok[:, None], torch.tensor([min(t + self.k_pos, self.N - 1)]), cache, True)[:, 0]
        return z, (cache, t + 1)


class Window(Policy):
    """The prompt, the last W tokens and the place, through a perceptron; `experts` of them mixed by a gate."""

    def __init__(self, V, P, T, E=12, W=3, H=96, experts=1):
        super().__init__()
        self.emb = nn.Embedding(V, E)
        self.place = nn.Parameter(torch.randn(T + 4, E) * 0.1)
        self.W, self.n = W, experts
        size = (P + W + 1) * E
        self.up = nn.Linear(size, H * experts)
        self.mid = nn.Linear(H, H)
        self.out = nn.Linear(H, V)
        if experts > 1:
            self.gate = nn.Linear(size, experts)

    def body(self, x, engine=False):
        x = self.d(x)
        h = self.up(x)
        h = self.k_act(h) if engine and self.k_act is not None else F.silu(h)
        if self.n > 1:
            g = self.gate(x).softmax(-1)
            h = (h.view(*h.shape[:-1], self.n, -1) * g[..., None]).sum(-2) * self.n
        if engine:
            h = self.kround(h)
        h = h + F.silu(self.mid(h))
        if engine:
            h = self.kround(h)
        return self.out(self.d(h))

    def logits(self, prompt, resp):
        B, T = resp.shape
        p = self.emb(prompt).flatten(1)[:, None].expand(-1, T, -1)
        x = F.pad(resp[:, :-1], (self.W, 0), value=0).unfold(1, self.W, 1)[:, :T]
        x = self.emb(x).flatten(2)
        return self.body(torch.cat([p, x, self.place[:T][None].expand(B, -1, -1)], -1))

    def start(self, prompt):
        B = prompt.shape[0]
        s = (self.emb(prompt).flatten(1), torch.zeros(B, self.W, dtype=torch.long), 0)
        return self.now(s), s

    def now(self, s):
        p, w, t = s
        t = min(max(0, t + (self.k_pos if t > 0 else 0)), len(self.place) - 1)
        return self.body(torch.cat([p, self.emb(w).flatten(1), self.place[t][None].expand(len(p), -1)], -1), True)

    def step(self, s, tok):
        s = (s[0], torch.cat([s[1][:, 1:], tok[:, None]], 1), s[2] + 1)
        return self.now(s), s


class SSM(Policy):
    """A gated linear recurrence."""

    def __init__(self, V, P, T, E=24, H=64):
        super().__init__()
        self.emb = nn.Embedding(V, E)
        self.inp = nn.Linear(E, H)
        self.gate = nn.Linear(E + H, H)
        self.o1 = nn.Linear(H + E, H)
        self.out = nn.Linear(H, V)

    def cell(self, s, e):
        a = torch.sigmoid(self.gate(torch.cat([e, s], -1)) + 1)
        return a * s + (1 - a) * torch.tanh(self.inp(e)) * 2

    def read(self, s, e):
        return self.out(self.d(F.silu(self.o1(torch.cat([s, e], -1)))))

    def logits(self, prompt, resp):
        e = self.d(self.emb(torch.cat([prompt, resp[:, :-1]], 1)))
        s, out = e.new_zeros(len(e), self.inp.out_features), []
        for t in range(e.shape[1]):
            s = self.cell(s, e[:, t])
            if t >= prompt.shape[1] - 1:
                out.append(s)
        s = torch.stack(out, 1)
        return self.read(s, e[:, prompt.shape[1] - 1 :])

    def start(self, prompt):
        e = self.emb(prompt)
        s = e.new_zeros(len(e), self.inp.out_features)
        for t in range(e.shape[1]):
            s = self.cell(s, e[:, t])
        s = self.kround(s)
        return self.read(s, e[:, -1]), s

    def step(self, s, tok):
        e = self.emb(tok)
        s = self.kround(self.cell(s, e))
        return self.read(s, e), s


class AttnGRU(Policy):
    """A GRU that looks back at the prompt's states."""

    def __init__(self, V, P, T, E=24, H=64):
        super().__init__()
        self.emb = nn.Embedding(V, E)
        self.place = nn.Parameter(torch.randn(P, H) * 0.1)
        self.gru = nn.GRU(E, H, batch_first=True)
        self.q = nn.Linear(H, H)
        self.mix = nn.Linear(2 * H, H)
        self.out = nn.Linear(H, V)

    def read(self, h, mem, scale=1.0):
        w = self.q(h) @ (mem + self.place).transpose(1, 2) / math.sqrt(h.shape[-1]) * scale
        c = w.softmax(-1) @ mem
        return self.out(self.d(torch.tanh(self.mix(torch.cat([h, c], -1)))))

    def logits(self, prompt, resp):
        P = prompt.shape[1]
        h, _ = self.gru(self.d(self.emb(torch.cat([prompt, resp[:, :-1]], 1))))
        return self.read(h[:, P - 1 :], h[:, :P])

    def start(self, prompt):
        h, s = self.gru(self.emb(prompt))
        h, s = self.kround(h), self.kround(s)
        return self.read(h[:, -1:], h, self.k_scale)[:, 0], (s, h)

    def step(self, s, tok):
        s, mem = s
        h, s = self.gru(self.emb(tok)[:, None], s)
        h, s = self.kround(h), self.kround(s)
        return self.read(h, mem, self.k_scale)[:, 0], (s, mem)
