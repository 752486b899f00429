"""Tasks, policies, sampling and the training loop: sample with an engine, score, recompute, update; hooks; recording.

A run is a family (families.py), a seed and at most one fault (faults.py). A fault is called before each step from its
first one on; it changes settings (Ctx.set) or puts hooks into the step's dict (Ctx.h), which the loop looks up by name.
Random numbers come from generators seeded by run and step, so before its first step a run is bit for bit its twin.

Shapes: B rows, P prompt tokens, T response tokens, V vocabulary, G rows of a group.
"""

import copy
import time
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from tim_trace import Recorder
from torch import nn

torch.set_num_threads(1)
PAD, EOS = 0, 1


# ---------------------------------------------------------------- tasks
class Task:
    """A task: prompts of P tokens, responses of at most T, V tokens in all, turns of a tool.

    prompts(rng, n, alt) makes n prompts, those where `alt` is true in another template; score(p, x, done) is the reward
    of the tokens x before the end token; demo(p, rng) is a demonstration, now and then with a mistake.
    """

    P = 8
    T = 12
    V = 16
    max_turns = 99

    def fin(self, toks, n):  # tokens before EOS, finished?
        x = toks[:n].tolist()
        return (x[:-1], True) if n and x[-1] == EOS else (x, False)

    def reward(self, prompts, toks, lens):
        return np.array(
            [self.score(p, *self.fin(t, n)) for p, t, n in zip(prompts, toks, lens, strict=True)], np.float64
        )

    def forced(self, prompt, toks, t, turns):
        return None

    def pre(self, rng, n):
        return self.prompts(rng, n)


class Coins(Task):
    """Pay an amount of 4 to 45 with coins: many answers are right; 0..10 by the distance.

    Tokens: 2..11 digits, 12..15 coins of 1, 2, 5 and 10, 16 marker.
    """

    P, T, V = 3, 12, 17
    coins: ClassVar = {12: 1, 13: 2, 14: 5, 15: 10}

    def prompts(self, rng, n, alt=None):
        x = rng.integers(4, 46, n)
        p = np.stack([np.full(n, 16), 2 + x // 10, 2 + x % 10], 1)
        if alt is not None:
            p[alt] = np.stack([2 + x % 10, 2 + x // 10, np.full(n, 16)], 1)[alt]
        return p

    def target(self, p):
        return (p[1] - 2) * 10 + p[2] - 2 if p[0] == 16 else (p[1] - 2) * 10 + p[0] - 2

    def score(self, p, x, done):
        if not done or any(t not in self.coins for t in x):
            return 0.0
        return max(0.0, 10 - 2.0 * abs(self.target(p) - sum(self.coins[t] for t in x)))

    def demo(self, p, rng):
        x, out = self.target(p), []
        for t, v in ((15, 10), (14, 5), (13, 2), (12, 1)):
            while x >= v:
                out.append(t)
                x -= v
        out = [int(rng.integers(12, 16)) if rng.random() < 0.2 else t for t in out]
        return [*out[: self.T - 1], EOS]


class Brackets(Task):
    """Close three to six brackets; 0 or 1.

    Tokens: 2..5 openers, 6..9 closers, 10 marker.
    """

    P, T, V = 7, 9, 12

    def prompts(self, rng, n, alt=None):
        p = np.zeros((n, 7), np.int64)
        for i in range(n):
            k = rng.integers(3, 7)
            p[i, 7 - k :] = rng.integers(2, 6, k)
        return p

    def answer(self, p):
        return [int(t) + 4 for t in p[::-1] if 2 <= t <= 5]

    def score(self, p, x, done):
        return float(done and x == self.answer(p))

    def demo(self, p, rng):
        x = [int(rng.integers(6, 10)) if rng.random() < 0.12 else t for t in self.answer(p) if rng.random() > 0.03]
        return [*x, EOS]


class Grid(Task):
    """Walk from one cell of a grid to another; -20 for what is no walk, else -20..-10 by the distance left.

    Tokens: 2..7 coordinates, 9..12 moves (+x -x +y -y), 13 marker.
    """

    P, T, V = 5, 14, 14
    mv: ClassVar = {9: (1, 0), 10: (-1, 0), 11: (0, 1), 12: (0, -1)}

    def prompts(self, rng, n, alt=None):
        p = np.concatenate([np.full((n, 1), 13), rng.integers(2, 8, (n, 4))], 1)
        if alt is not None:
            q = np.concatenate([p[:, 3:5], p[:, 1:3], p[:, :1]], 1)  # goal first, marker last
            p[alt] = q[alt]
        return p

    def ends(self, p):
        return (p[1:3], p[3:5]) if p[0] == 13 else (p[2:4], p[0:2])

    def score(self, p, x, done):
        if not done or any(t not in self.mv for t in x):
            return -20.0
        (a, b), (g, h) = self.ends(p)
        for t in x:
            a, b = a + self.mv[t][0], b + self.mv[t][1]
        return -10.0 - min(10, 2 * (abs(a - g) + abs(b - h)))

    def demo(self, p, rng):
        (a, b), (g, h) = self.ends(p)
        out = [9 if g > a else 10] * abs(int(g - a)) + [11 if h > b else 12] * abs(int(h - b))
        if rng.random() < 0.3:
            rng.shuffle(out)
        x = [int(rng.integers(9, 13)) if rng.random() < 0.2 else int(t) for t in out if rng.random() > 0.08]
        return [*x[:13], EOS]


class Tool(Task):
    """Look two keys up with a tool and answer the values, the larger first; -1, 0 or 1.

    Tokens: 2..7 keys, 8..15 numbers of the prompt, 16..21 values, 22 question, 23 answer, 24 error.
    """

    P, T, V, max_turns = 4, 12, 25, 3
    Q, A, E = 22, 23, 24
    table = np.random.default_rng(5).integers(0, 6, (6, 8, 8))

    def prompts(self, rng, n, alt=None):
        k = np.array([rng.permutation(6)[:2] for _ in range(n)]) + 2
        return np.concatenate([k, rng.integers(8, 16, (n, 2))], 1)

    def val(self, p, k):
        return int(self.table[k - 2, p[2] - 8, p[3] - 8]) + 16

    def answer(self, p):
        return sorted((self.val(p, p[0]), self.val(p, p[1])), reverse=True)

    def score(self, p, x, done):
        if not done or self.A not in x:
            return -1.0
        y = x[x.index(self.A) + 1 :]
        if len(y) != 2:
            return -1.0
        ok = sum(a == b for a, b in zip(y, self.answer(p), strict=True))
        return (-1.0, 0.0, 1.0)[ok]

    def forced(self, prompt, toks, t, turns, wrong=None, limit=3):
        if t < 2:
            return None
        f = np.full(len(toks), -1)
        for i in np.nonzero((toks[:, t - 2] == self.Q) & (toks[:, t - 1] >= 2) & (toks[:, t - 1] <= 7))[0]:
            turns[i] += 1
            k = toks[i, t - 1]
            if wrong is not None and wrong[i]:
                k = 2 + (k - 1) % 6
            f[i] = self.val(prompt[i], k) if turns[i] <= limit else -2
        return f

    def demo(self, p, rng):
        a, b = int(p[0]), int(p[1])
        if rng.random() < 0.12:
            b = int(rng.integers(2, 8))
        v = sorted((self.val(p, p[0]), self.val(p, p[1])), reverse=True)
        if rng.random() < 0.1:
            v = v[::-1]
        v = [int(rng.integers(16, 22)) if rng.random() < 0.1 else t for t in v]
        if rng.random() < 0.12:
            return [self.Q, a, self.val(p, a), self.A, *v, EOS]
        return [self.Q, a, self.val(p, a), self.Q, b, self.val(p, b), self.A, *v, EOS]


class Rle(Task):
    """Write a run-length code out; the share of right places if finished.

    Tokens: 2..7 letters, 8..11 counts of 1..4.
    """

    P, T, V = 6, 14, 12

    def prompts(self, rng, n, alt=None):
        x, k = rng.integers(2, 8, (n, 3)), rng.integers(8, 12, (n, 3))
        p = np.stack([x, k], 2).reshape(n, 6)
        if alt is not None:
            p[alt] = np.stack([k, x], 2).reshape(n, 6)[alt]
        return p

    def answer(self, p):
        return [int(min(a, b)) for a, b in p.reshape(3, 2) for _ in range(max(a, b) - 7)]

    def score(self, p, x, done):
        a = self.answer(p)
        return sum(i == j for i, j in zip(a, x, strict=False)) / max(len(a), len(x)) if done else 0.0

    def demo(self, p, rng):
        a = [t for t in self.answer(p) for _ in range(1 if rng.random() > 0.08 else int(rng.integers(0, 3)))]
        return [*[int(rng.integers(2, 8)) if rng.random() < 0.06 else t for t in a][:13], EOS]


class Style(Task):
    """Write words that follow each other well and name the topics; about -2..5 by a reward model.

    The reward model adds the fluency of pairs and the share of topics named, and subtracts repetition.
    Tokens: 2..21 words.
    """

    P, T, V = 4, 16, 22
    S = np.random.default_rng(9).uniform(-1, 1, (22, 22))

    def prompts(self, rng, n, alt=None):
        return np.array([rng.permutation(20)[:4] for _ in range(n)]) + 2

    def score(self, p, x, done, S=None):
        if len(x) < 6 or any(t < 2 for t in x):
            return -2.0
        S = self.S if S is None else S
        x = np.array(x)
        flu = S[x[:-1], x[1:]].mean()
        rep = 1 - len(set(x.tolist())) / len(x)
        return float(2 * flu + 3 * np.isin(p, x).mean() - 2.0 * rep)

    def demo(self, p, rng):
        n = int(rng.integers(6, 15))
        x = [int(rng.choice(p))]
        while len(x) < n:
            e = np.exp(1.5 * self.S[x[-1], 2:])
            e[p - 2] *= 3.0
            x.append(2 + int(rng.choice(20, p=e / e.sum())))
        return [*x, EOS]


class Listing(Task):
    """List the distinct symbols of a prompt in any order; 0..1.

    Tokens: 2..11 symbols, 12 marker (of a list of those absent), 13 marker.
    """

    P, T, V = 9, 11, 14

    def prompts(self, rng, n, alt=None):
        p = np.zeros((n, 9), np.int64)
        p[:, 0] = 13
        for i in range(n):
            k = rng.integers(3, 7)
            s = rng.permutation(10)[:k] + 2
            p[i, 1:] = s[np.concatenate([rng.permutation(k), rng.integers(0, k, 8 - k)])][rng.permutation(8)]
        if alt is not None:
            p[alt, 0] = 12
        return p

    def want(self, p):
        s = set(int(t) for t in p[1:])
        return s if p[0] == 13 else set(range(2, 12)) - s

    def score(self, p, x, done):
        if not done:
            return 0.0
        w = self.want(p)
        ok = len(set(x) & w)
        return max(0.0, (ok - (len(x) - ok)) / len(w))

    def demo(self, p, rng):
        s = sorted(self.want(p))
        rng.shuffle(s)
        s = [t for t in s if rng.random() > 0.08]
        return [*[int(t) if rng.random() > 0.08 else int(rng.integers(2, 12)) for t in s][:10], EOS]


class ModSum(Task):
    """Running sums modulo 5 of four digits, then the last one; 0 or 1 on the last.

    Tokens: 2..6 digits and sums, 9 equals sign and marker, 10 marker (of alternating signs).
    """

    P, T, V = 5, 9, 11

    def prompts(self, rng, n, alt=None):
        p = np.concatenate([np.full((n, 1), 9), rng.integers(2, 7, (n, 4))], 1)
        if alt is not None:
            p[alt, 0] = 10
        return p

    def sums(self, p):
        s, out = 0, []
        for i, t in enumerate(p[1:]):
            s = (s + (t - 2) * (-1 if p[0] == 10 and i % 2 else 1)) % 5
            out.append(int(s) + 2)
        return out

    def score(self, p, x, done):
        return float(done and len(x) >= 2 and x[-2] == 9 and x[-1] == self.sums(p)[-1])

    def demo(self, p, rng):
        s = self.sums(p)
        if rng.random() < 0.10:
            return [*s[: int(rng.integers(0, 3))], 9, s[-1], EOS]
        out = [int(rng.integers(2, 7)) if rng.random() < 0.05 else t for t in s]
        return [*out, 9, out[-1] if rng.random() > 0.1 else int(rng.integers(2, 7)), EOS]


class Cipher(Task):
    """Replace each letter by a word, by the letter and the parity of the one before; -1 or 1 a token.

    Tokens: 2..13 letters, 14..25 words, 26 and 27 markers.
    """

    P, T, V = 9, 9, 28
    perm = np.random.default_rng(3).permutation(12)

    def prompts(self, rng, n, alt=None):
        p = np.concatenate([np.full((n, 1), 26), rng.integers(2, 14, (n, 8))], 1)
        if alt is not None:
            p[alt, 0] = 27
        return p

    def answer(self, p):
        x = p[1:] - 2
        prev = np.concatenate([[0], x[:-1]])
        a = self.perm[(x + (prev % 2)) % 12] if p[0] == 26 else self.perm[::-1][x]
        return (a + 14).tolist()

    def token_rewards(self, prompts, toks, lens):
        r = np.zeros(toks.shape)
        for i, p in enumerate(prompts):
            a = np.array([*self.answer(p), EOS])
            n = lens[i]
            r[i, :n] = np.where(toks[i, :n] == a[:n], 1.0, -1.0)
            if n < 9:
                r[i, n - 1] -= 9 - n  # missing words
        return r

    def reward(self, prompts, toks, lens):
        return self.token_rewards(prompts, toks, lens).sum(1)

    def demo(self, p, rng):
        return [*[int(rng.integers(14, 26)) if rng.random() < 0.3 else t for t in self.answer(p)], EOS]


class Hops(Task):
    """Follow a table from a start for two to four hops; the share of the right prefix if finished.

    Tokens: 2..7 nodes, 8..10 hops of 2..4, 11 and 12 templates.
    """

    P, T, V = 9, 7, 13

    def prompts(self, rng, n, alt=None):
        t = np.array([rng.permutation(6) for _ in range(n)]) + 2
        p = np.concatenate([np.full((n, 1), 11), t, rng.integers(2, 8, (n, 1)), rng.integers(8, 11, (n, 1))], 1)
        if alt is not None:
            p[alt, 0] = 12
        return p

    def answer(self, p):
        t = p[1:7].tolist()
        x, out = int(p[7]), []
        for _ in range(p[8] - 6):
            x = t[x - 2] if p[0] == 11 else t.index(x) + 2
            out.append(x)
        return out

    def score(self, p, x, done):
        if not done:
            return 0.0
        a = self.answer(p)
        k = 0
        while k < min(len(a), len(x)) and a[k] == x[k]:
            k += 1
        return k / max(len(a), len(x))

    def demo(self, p, rng):
        a = [int(rng.integers(2, 8)) if rng.random() < 0.15 else t for t in self.answer(p)]
        return [*(a[:-1] if rng.random() < 0.08 else a), EOS]


# ---------------------------------------------------------------- policies
class Base(nn.Module):
    """A policy: full(p, r) are the logits at all response places; an engine calls start and step."""

    drop = 0.0

    def init_head(self, d, V):
        self.head = nn.Linear(d, V)
        b = torch.zeros(V)
        b[PAD] = -1e9
        self.register_buffer("ban", b, persistent=False)

    def out(self, x):
        if self.drop > 0:
            x = F.dropout(x, self.drop, True)
        return self.head(x).float() + self.ban.float()


class Rnn(Base):
    """A GRU or an LSTM."""

    def __init__(self, task, kind="gru", d=48, e=24):
        super().__init__()
        self.emb = nn.Embedding(task.V, e)
        self.rnn = (nn.GRU if kind == "gru" else nn.LSTM)(e, d, batch_first=True)
        self.init_head(d, task.V)
        self.P = task.P

    def full(self, p, r):
        y, _ = self.rnn(self.emb(torch.cat([p, r[:, :-1]], 1)))
        return self.out(y[:, self.P - 1 :])

    def start(self, p):
        y, h = self.rnn(self.emb(p))
        return h, self.out(y[:, -1])

    def step(self, h, tok):
        y, h = self.rnn(self.emb(tok[:, None]), h)
        return h, self.out(y[:, -1])


class Ssm(Base):
    """A gated linear recurrence with learned decays."""

    def __init__(self, task, d=48, layers=2):
        super().__init__()
        self.emb = nn.Embedding(task.V, d)
        self.n = layers
        self.P = task.P
        self.decay = nn.Parameter(torch.linspace(-1, 6, d).repeat(layers, 1))
        self.inp = nn.ModuleList([nn.Linear(d, 2 * d) for _ in range(layers)])
        self.mlp = nn.ModuleList(
            [nn.Sequential(nn.Linear(2 * d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(layers)]
        )
        self.init_head(d, task.V)

    def cell(self, h, tok):
        x, new = self.emb(tok), []
        for i in range(self.n):
            a, g = self.inp[i](x).chunk(2, -1)
            k = torch.sigmoid(self.decay[i])
            hi = k * h[i] + a * torch.sigmoid(g)
            new.append(hi)
            x = x + self.mlp[i](torch.cat([hi, x], -1))
        return new, x

    def many(self, toks):
        xs = self.emb(toks)
        L = toks.shape[1]
        last = []
        for i in range(self.n):
            a, g = self.inp[i](xs).chunk(2, -1)
            u = a * torch.sigmoid(g)
            k = torch.sigmoid(self.decay[i])
            h, hs = torch.zeros_like(u[:, 0]), []
            for t in range(L):
                h = k * h + u[:, t]
                hs.append(h)
            last.append(h)
            xs = xs + self.mlp[i](torch.cat([torch.stack(hs, 1), xs], -1))
        return last, xs

    def full(self, p, r):
        return self.out(self.many(torch.cat([p, r[:, :-1]], 1))[1][:, self.P - 1 :])

    def start(self, p):
        h, x = self.many(p)
        return h, self.out(x[:, -1])

    def step(self, h, tok):
        h, x = self.cell(h, tok)
        return h, self.out(x)


class Window(Base):
    """The prompt, the last w tokens and the place, through a perceptron.

    `seen` adds counts of the words written, `align` reads the prompt only at and beside the place.
    """

    def __init__(self, task, w=3, e=16, d=96, seen=False, align=False):
        super().__init__()
        self.emb = nn.Embedding(task.V, e)
        self.pos = nn.Embedding(task.T, e)
        self.w = w
        self.P, self.V = task.P, task.V
        self.seen, self.align = seen, align
        self.net = nn.Sequential(
            nn.Linear(e * ((3 if align else task.P) + w + 1) + (task.V if seen else 0), d),
            nn.GELU(),
            nn.Linear(d, d),
            nn.GELU(),
        )
        self.init_head(d, task.V)

    def feats(self, p, hist, pos, seen):  # p [B,P], hist [B,..,w], pos [...]
        B, L = hist.shape[:2]
        if self.align:
            e = self.emb(p)
            a = torch.cat([e[:, :1].expand(B, L, -1), e[:, pos], e[:, (pos + 1).clamp(max=self.P - 1)]], -1)
        else:
            a = self.emb(p).flatten(1)[:, None].expand(B, L, -1)
        f = [a, self.emb(hist).flatten(2), self.pos(pos)[None].expand(B, L, -1)]
        if self.seen:
            f.append(seen)
        return self.out(self.net(torch.cat(f, -1)))

    def full(self, p, r):
        B, T = r.shape
        x = torch.cat([torch.zeros(B, self.w, dtype=r.dtype), r[:, :-1]], 1)
        s = None
        if self.seen:
            s = torch.cat([torch.zeros(B, 1, self.V), F.one_hot(r[:, :-1], self.V).float().cumsum(1)], 1).clamp(max=2)
        return self.feats(p, x.unfold(1, self.w, 1), torch.arange(T), s)

    def start(self, p):
        st = (p, torch.zeros(len(p), self.w, dtype=p.dtype), 0, torch.zeros(len(p), self.V))
        return st, self.feats(p, st[1][:, None], torch.tensor([0]), st[3][:, None])[:, 0]

    def step(self, st, tok):
        p, h, t, s = st
        st = (p, torch.cat([h[:, 1:], tok[:, None]], 1), t + 1, s + F.one_hot(tok, self.V).float())
        return st, self.feats(p, st[1][:, None], torch.tensor([t + 1]), st[3].clamp(max=2)[:, None])[:, 0]


class Trans(Base):
    """A transformer, its perceptrons mixtures of `experts` if there are any.

    Only an engine's copy ever has `shift` (of positions) and `route` (of gates) off their defaults.
    """

    shift = 0
    route = None

    def __init__(self, task, d=32, layers=2, heads=4, experts=0):
        super().__init__()
        self.emb = nn.Embedding(task.V, d)
        self.pos = nn.Parameter(torch.randn(task.P + task.T + 4, d) * 0.1)
        self.H, self.n, self.P, self.E = heads, layers, task.P, experts
        self.qkv = nn.ModuleList([nn.Linear(d, 3 * d) for _ in range(layers)])
        self.proj = nn.ModuleList([nn.Linear(d, d) for _ in range(layers)])
        self.ln = nn.ModuleList([nn.LayerNorm(d) for _ in range(2 * layers + 1)])
        if experts:
            self.gate = nn.ModuleList([nn.Linear(d, experts) for _ in range(layers)])
            self.up = nn.ModuleList([nn.Linear(d, experts * d) for _ in range(layers)])
            self.down = nn.ParameterList([nn.Parameter(torch.randn(experts, d, d) * d**-0.5) for _ in range(layers)])
        else:
            self.up = nn.ModuleList([nn.Linear(d, 3 * d) for _ in range(layers)])
            self.down = nn.ModuleList([nn.Linear(3 * d, d) for _ in range(layers)])
        self.init_head(d, task.V)

    def body(self, toks):
        B, L = toks.shape
        pos = self.pos[:L]
        if self.shift:
            pos = torch.cat([self.pos[: self.P], self.pos[self.P + self.shift : L + self.shift]])[:L]
        x = self.emb(toks) + pos
        for i in range(self.n):
            q, k, v = self.qkv[i](self.ln[2 * i](x)).view(B, L, 3, self.H, -1).permute(2, 0, 3, 1, 4)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj[i](a.transpose(1, 2).reshape(B, L, -1))
            y = self.ln[2 * i + 1](x)
            if self.E:
                g = self.gate[i](y)
                if self.route is not None:
                    g = self.route(g)
                top, ix = g.topk(2, -1)
                w = torch.zeros_like(g).scatter(-1, ix, top.softmax(-1))
                h = F.gelu(self.up[i](y)).view(B, L, self.E, -1)
                x = x + torch.einsum("blef,efd->bled", h, self.down[i]).mul(w[..., None]).sum(2)
            else:
                x = x + self.down[i](F.gelu(self.up[i](y)))
        return self.ln[-1](x)

    def full(self, p, r):
        return self.out(self.body(torch.cat([p, r[:, :-1]], 1))[:, self.P - 1 :])

    def start(self, p):
        return p, self.out(self.body(p)[:, -1])

    def step(self, st, tok):
        st = torch.cat([st, tok[:, None]], 1)
        return st, self.out(self.body(st)[:, -1])


class Critic(nn.Module):
    """Values of all response places, by a GRU."""

    def __init__(self, task, d=24):
        super().__init__()
        self.emb = nn.Embedding(task.V, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.v = nn.Linear(d, 1)
        self.P = task.P

    def forward(self, p, r):
        y, _ = self.rnn(self.emb(torch.cat([p, r[:, :-1]], 1)))
        return self.v(y[:, self.P - 1 :])[..., 0]


# ---------------------------------------------------------------- sampling
@torch.no_grad()
def sample(
    model,
    task,
    prompt,
    u,
    max_tokens,
    temp=1.0,
    hook=None,
    start_hook=None,
    stop=(),
    cut=None,
    turns_limit=None,
    wrong=None,
    raw_logps=False,
    top_k=0,
):
    """Responses [B,T], mask of sampled tokens, logprobs, lengths and finish reasons; `u` [B,T] are the uniforms."""
    B, T = len(prompt), task.T
    toks, mask, lps = np.zeros((B, T), np.int64), np.zeros((B, T), bool), np.zeros((B, T), np.float32)
    done, lens = np.zeros(B, bool), np.zeros(B, np.int64)
    fin = np.array(["length"] * B, dtype=object)
    P = torch.as_tensor(prompt)
    st, lg = model.start(P)
    if start_hook is not None:
        st, lg = start_hook(st, lg)
    turns = np.zeros(B, np.int64)
    rows = np.arange(B)
    for t in range(min(max_tokens, T)):
        if hook is not None:
            lg = hook(lg, t, toks)
        x = lg / temp
        if top_k:
            x = x.masked_fill(x < x.topk(top_k, -1)[0][:, -1:], -1e9)
        lp = F.log_softmax(x, -1)
        c = lp.exp().double().cumsum(-1)
        tok = (c < torch.as_tensor(u[:, t : t + 1]) * c[:, -1:]).sum(-1).clamp(max=lp.shape[1] - 1).numpy()
        got = (F.log_softmax(lg, -1) if raw_logps else lp).numpy()[rows, tok]
        live = ~done
        m = live.copy()
        f = (
            task.forced(prompt, toks, t, turns)
            if turns_limit is None and wrong is None
            else task.forced(prompt, toks, t, turns, wrong, turns_limit or task.max_turns)
        )
        if f is not None:
            over = (f == -2) & live  # no turn left: the conversation is cut
            done |= over
            live &= ~over
            m &= ~over
            tok = np.where(f >= 0, f, tok)
            m &= f < 0
        if cut is not None:
            c2 = live & (t >= cut)
            done |= c2
            live &= ~c2
            m &= ~c2
        hit = np.zeros(B, bool)
        for s in stop:
            hit |= live & (tok == s)
        toks[live, t] = tok[live]
        mask[:, t] = m & live
        lps[:, t] = np.where(mask[:, t], got, 0)
        lens[live] += 1
        e = live & (tok == EOS) | hit
        fin[e] = "stop"
        done |= e
        if done.all() or t + 1 >= min(max_tokens, T):
            break
        st, lg = model.step(st, torch.as_tensor(toks[:, t]))
    return toks, mask, lps, lens, fin


def evaluate(model, task, prompts, u, s):
    """Mean reward of sampled responses to held-out prompts, without an engine's faults."""
    toks, _, _, lens, _ = sample(model, task, prompts, u, task.T)
    return float(task.reward(prompts, toks, lens).mean())


# ---------------------------------------------------------------- the run
def pretrained(f, cache):
    """The policy with supervised weights, and the critic if there is one; they are kept in folder `cache`."""
    path = cache / f"{f['name']}.pt"
    task = f["task"]
    torch.manual_seed(f.get("init_seed", 0))
    pol = f["policy"](task)
    critic = Critic(task) if f["adv"] == "gae" else None
    if path.exists():
        d = torch.load(path)
        pol.load_state_dict(d["pol"])
        if critic is not None:
            critic.load_state_dict(d["critic"])
        return pol, critic
    rng = np.random.default_rng(123)
    opt = torch.optim.Adam(pol.parameters(), f.get("pre_lr", 3e-3))
    for i in range(f["pre_steps"]):
        for g in opt.param_groups:
            g["lr"] = f.get("pre_lr", 3e-3) * (1 - 0.9 * i / f["pre_steps"])
        p = task.prompts(rng, 128)
        r = np.zeros((128, task.T), np.int64)
        for j in range(128):
            x = task.demo(p[j], rng)[: task.T]
            r[j, : len(x)] = x
        rt = torch.as_tensor(r)
        lg = pol.full(torch.as_tensor(p), rt)
        loss = (F.cross_entropy(lg.flatten(0, 1), rt.flatten(), reduction="none") * (rt > 0).flatten()).sum() / (
            rt > 0
        ).sum()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(pol.parameters(), 1.0)
        opt.step()
    if critic is not None:
        o = torch.optim.Adam(critic.parameters(), 3e-3)
        for _ in range(150):
            p = task.prompts(rng, 96)
            toks, mask, _, lens, _ = sample(pol, task, p, rng.random((96, task.T)), task.T)
            y = torch.as_tensor((task.reward(p, toks, lens) + 15) / 5).float()[:, None]
            v = critic(torch.as_tensor(p), torch.as_tensor(toks))
            m = torch.as_tensor(mask).float()
            loss = ((v - y) ** 2 * m).sum() / m.sum()
            o.zero_grad()
            loss.backward()
            o.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"pol": pol.state_dict(), "critic": critic.state_dict() if critic is not None else None}, path)
    return pol, critic


class Ctx:
    """What a fault sees of a run: family f, task, settings s, step, its hooks h and generator rng, memory mem, models."""

    pass


def lps_of(model, p, r, temp):
    """Logprobs of the responses' tokens, and entropies."""
    lg = F.log_softmax(model.full(p, r) / temp, -1)
    ent = -(lg.exp() * lg.clamp(min=-100)).sum(-1)
    return lg.gather(-1, r[..., None])[..., 0], ent


def make_opt(f, s, params):
    """The family's optimizer."""
    if f["opt"] == "sgd":
        return torch.optim.SGD(params, s["lr"], momentum=s["momentum"], weight_decay=s["weight_decay"])
    if f["opt"] == "rmsprop":
        return torch.optim.RMSprop(params, s["lr"], alpha=0.98)
    return (torch.optim.AdamW if f["opt"] == "adamw" else torch.optim.Adam)(
        params, s["lr"], betas=(s["beta1"], s["beta2"]), eps=s["eps"], weight_decay=s["weight_decay"]
    )


def run(f, seed, fault, start, ramp, folder, cache, changes=None):
    """One run, recorded in `folder`: the evaluations and the seconds it took.

    `fault(c, w)` is called from step `start` on, w rising to 1 over `ramp` steps. `changes` are made from step 1 on:
    settings s, data_seed, bf16. Supervised weights are kept in folder `cache`.
    """
    task, S = f["task"], f["steps"]
    c = Ctx()
    c.f, c.task, c.seed = f, task, seed
    c.s = {
        **dict(
            lr=1e-3,
            beta1=0.9,
            beta2=0.99,
            eps=1e-8,
            weight_decay=0.0,
            momentum=0.9,
            clip_grad=1.0,
            temperature=1.0,
            top_k=0,
            max_tokens=task.T,
            kl_coef=0.0,
            ent_coef=0.0,
            clip_low=0.2,
            clip_high=0.2,
            gamma=1.0,
            lam=0.95,
            batch=96,
            group=8,
            epochs=1,
            minibatches=1,
            max_turns=task.max_turns,
            kl_target=None,
            ent_target=None,
            overlong_buffer=None,
            lag=0,
            loss_agg=f["agg"],
            algorithm=f["algo"],
            adv_estimator=f["adv"],
            warmup=0,
        ),
        **f.get("s", {}),
        **(changes or {}).get("s", {}),
    }
    opts = changes or {}
    s = c.s
    pol, critic = pretrained(f, cache)
    c.pol, c.critic = pol, critic
    torch.manual_seed(1000 + seed)
    c.opt = make_opt(f, s, pol.parameters())
    c.copt = torch.optim.Adam(critic.parameters(), 3e-3) if critic is not None else None
    c.ref = copy.deepcopy(pol)
    c.engine = copy.deepcopy(pol)
    c.init_sd = copy.deepcopy(pol.state_dict())
    c.hist, c.store, c.ema, c.mem = {0: c.init_sd}, {}, None, {}
    bf16 = opts.get("bf16", f.get("bf16", False))
    if bf16:
        c.engine = c.engine.to(torch.bfloat16)
    ev_rng = np.random.default_rng(777)
    evp = task.prompts(ev_rng, f.get("n_eval", 192))
    evu = ev_rng.random((len(evp), task.T))
    pool = task.prompts(np.random.default_rng([seed, 5]), f["pool"]) if f.get("pool") else None
    evals = []
    n_over = f.get("oversample", 1)
    known = [
        "lr",
        "max_tokens",
        "kl_coef",
        "ent_coef",
        "temperature",
        "clip_grad",
        "weight_decay",
        "batch",
        "group",
        "clip_low",
        "clip_high",
        "epochs",
        "lag",
        "loss_agg",
        "algorithm",
        "adv_estimator",
        "warmup",
        "minibatches",
        "top_k",
    ]
    known += ["momentum"] if f["opt"] == "sgd" else [] if f["opt"] == "rmsprop" else ["beta1", "beta2", "eps"]
    known += [k for k in ("kl_target", "ent_target", "overlong_buffer") if s[k] is not None]
    known += (["gamma", "lam"] if critic is not None else []) + (["max_turns"] if task.max_turns < 99 else [])
    live, nm = f["record"] == "live", f["names"]
    rec = Recorder(folder) if folder else None
    if rec and f["record"] != "none":
        rec.add_hyperparameters({k: s[k] for k in known} | {"optimizer": f["opt"]})

    def sets(**kw):
        kw = {k: v for k, v in kw.items() if s[k] != v}
        s.update(kw)
        if rec and live and kw:
            rec.add_hyperparameters({k: v for k, v in kw.items() if k in known}, step=c.step)

    c.set = sets
    t0 = time.time()
    for step in range(1, S + 1):
        c.step = step
        c.h = h = {}
        c.rng = np.random.default_rng([seed, step, 7])
        c.w = 0.0
        if fault is not None and step >= start:
            c.w = w = min(1.0, (step - start + 1) / max(ramp, 1))
            fault(c, w)
        h = c.h
        B, G = s["batch"], s["group"]
        n = B // G * n_over
        # prompts
        rng = np.random.default_rng([seed + opts.get("data_seed", 0), step, 1])
        if "prompts" in h:
            p = h["prompts"](rng, n)
        elif pool is not None:
            p = pool[rng.integers(0, len(pool), n)]
        else:
            p = task.prompts(rng, n)
        p = np.repeat(p, G, 0)
        # engine
        ver = step - 1
        u = np.random.default_rng([seed, step, 2]).random((len(p), task.T))
        lag = h["lag"] if "lag" in h else s["lag"]
        vers = h["row_versions"](len(p), ver) if "row_versions" in h else np.full(len(p), max(0, ver - lag))
        parts = []
        for v in sorted(set(vers.tolist())):
            rows = np.nonzero(vers == v)[0]
            sd = c.hist[v]
            if not bf16:  # the engine's copy has fewer bits, so that its numbers are its own
                k2 = 2.0 ** f.get("mantissa", 17)
                sd = {k: torch.ldexp((torch.frexp(t)[0] * k2).round() / k2, torch.frexp(t)[1]) for k, t in sd.items()}
            if "engine_sd" in h:
                sd = h["engine_sd"]({k: t.clone() for k, t in sd.items()})
            c.engine.load_state_dict(sd)
            c.rows = rows
            o = sample(
                c.engine,
                task,
                p[rows],
                u[rows],
                s["max_tokens"],
                h.get("engine_temp", s["temperature"]),
                h.get("engine_logits"),
                h.get("engine_start"),
                h.get("stop", ()),
                h["cut"][rows] if "cut" in h else None,
                s["max_turns"] if task.max_turns < 99 else None,
                h["wrong_tool"][rows] if "wrong_tool" in h else None,
                h.get("raw", False),
                h.get("engine_top_k", s["top_k"]),
            )
            parts.append((rows, o))
        toks, mask, roll, lens, fin = [
            np.concatenate([o[k] for _, o in parts])[np.argsort(np.concatenate([r for r, _ in parts]))]
            for k in range(5)
        ]
        c.store[step] = (p, toks, mask, roll, lens, fin, vers)
        if "replay" in h:
            share, age = h["replay"]
            old = c.store.get(step - age)
            if old is not None:
                k = int(share * len(p)) // G * G
                p, toks, mask, roll, lens, fin, vers = [
                    np.concatenate([a[:k], b[k:]]) for a, b in zip(old, c.store[step], strict=True)
                ]
        c.store.pop(step - 45, None)
        # reward
        if f["adv"] == "rtg":
            tr = task.token_rewards(p, toks, lens)
            r = tr.sum(1)
        else:
            tr, r = None, task.reward(p, toks, lens)
        if s["overlong_buffer"] is not None:
            r = r - 1.0 * np.clip((lens - s["overlong_buffer"]) / 2, 0, 1)
        if "reward" in h:
            r = h["reward"](r, p, toks, lens)
        if "token_reward" in h:
            tr = h["token_reward"](tr, p, toks, lens)
            r = tr.sum(1)
        if n_over > 1:  # dynamic sampling: informative groups first
            sd_ = r.reshape(-1, G).std(1) > 1e-6
            order = np.argsort(~sd_, kind="stable")[: B // G]
            ix = (order[:, None] * G + np.arange(G)).ravel()
            p, toks, mask, roll, lens, fin, vers, r = [a[ix] for a in (p, toks, mask, roll, lens, fin, vers, r)]
        if "pair_r" in h:
            r = h["pair_r"](r, lens)
        if "pair_tr" in h:
            tr = h["pair_tr"](tr)
            r = tr.sum(1)
        train_toks, train_mask = toks, mask
        if "retok" in h:
            train_toks = h["retok"](toks)
        Pt, Rt, M = torch.as_tensor(p), torch.as_tensor(train_toks), torch.as_tensor(train_mask).float()
        temp = s["temperature"]
        if "dropout" in h:
            pol.drop = h["dropout"]
        with torch.no_grad():
            old, ent = lps_of(pol, Pt, Rt, temp)
            old = old * M if not f.get("rec_mask") else old
            ref = lps_of(c.ref, Pt, Rt, temp)[0] if f.get("kl_in") else None
            if ref is not None and "ref" in h:
                ref = h["ref"](ref)
        rollt = torch.as_tensor(roll)
        # advantages
        R = torch.as_tensor(r).float()
        kl_tok = (old - ref) * M if ref is not None else None
        bm, eps = h.get("base_mult", 1.0), 1e-4
        if f["adv"] in ("grpo", "drgrpo", "rloo"):
            g = R.view(-1, G)
            mean = g.mean(1, keepdim=True)
            if f["adv"] == "rloo":
                A = g - bm * (g.sum(1, keepdim=True) - g) / (G - 1)
            elif f["adv"] == "grpo":
                A = (g - bm * mean) / (g.std(1, keepdim=True) + eps)
            else:
                A = g - bm * mean
            A = A.reshape(-1)[:, None].expand_as(M)
        elif f["adv"] == "whiten":
            tokr = -s["kl_coef"] * kl_tok
            tokr[torch.arange(len(R)), torch.as_tensor(lens - 1)] += R
            ret = tokr.flip(1).cumsum(1).flip(1)
            mu = (ret * M).sum() / M.sum()
            sd_ = (((ret - mu) ** 2 * M).sum() / M.sum()).sqrt()
            A = (ret - bm * mu) / (sd_ + 1e-4)
        elif f["adv"] == "gae":
            with torch.no_grad():
                val = critic(Pt, Rt) * M
            tokr = -s["kl_coef"] * kl_tok
            tokr[torch.arange(len(R)), torch.as_tensor(lens - 1)] += (R + 15) / 5 if not h.get("raw_scores") else R / 5
            A = torch.zeros_like(M)
            nxt, acc = torch.zeros(len(R)), torch.zeros(len(R))
            for t in range(task.T - 1, -1, -1):
                d = tokr[:, t] + s["gamma"] * nxt - bm * val[:, t]
                acc = (d + s["gamma"] * s["lam"] * acc) * M[:, t]
                A[:, t] = acc
                nxt = val[:, t]
            ret = A + val
            if not h.get("no_whiten"):
                mu = (A * M).sum() / M.sum()
                A = (A - mu) / ((((A - mu) ** 2 * M).sum() / M.sum()).sqrt() + 1e-4)
        elif f["adv"] == "rtg":
            ret = torch.as_tensor(tr).float().flip(1).cumsum(1).flip(1)
            now = (ret * M).sum(0) / M.sum(0).clamp(min=1)
            c.ema = now if c.ema is None else 0.9 * c.ema + 0.1 * now
            A = (ret - bm * c.ema) / 3
        A = A * M
        if "adv" in h:
            A = h["adv"](A, R, M, lens) * M
        if "pair_lp" in h:
            old = old[h["pair_lp"]]
        # record
        if rec:
            am = np.arange(task.T)[None] < lens[:, None]
            kw = dict(
                step=step,
                prompt_ids=p,
                prompt_attention_mask=p > 0,
                response_ids=train_toks,
                response_attention_mask=am,
                group_ids=[f"{step}-{i // G}" for i in range(len(p))] if G > 1 else None,
                reward=r,
                finish_reason=fin.tolist() if f.get("rec_finish", True) else None,
            )
            if f.get("rec_adv", True):
                kw["advantage"] = (
                    A.numpy() if f["adv"] in ("whiten", "gae", "rtg") else A.max(1)[0].numpy() + A.min(1)[0].numpy()
                )
            if f.get("rec_mask"):
                kw["response_mask"] = (
                    train_mask if "loss_mask" not in h else (h["loss_mask"](train_mask, train_toks, am))
                )
            if f.get("rec_versions", True):
                kw["policy_version"] = np.full(len(p), max(0, ver - s["lag"])) if h.get("hide") else vers
            if f.get("rec_limits"):
                kw["max_tokens"] = s["max_tokens"]
                kw["temperature"] = s["temperature"]
            b = rec.add_sequences(**kw)
            sm = dict(scored_mask=train_mask) if f.get("rec_mask") else {}
            tv = dict(policy_version=np.full(len(p), ver)) if f.get("rec_versions", True) else {}
            rec.add_scores("rollout", b, logprobs=np.minimum(roll, 0), **sm)
            rec.add_scores(
                "train",
                b,
                logprobs=np.minimum(old.numpy(), 0),
                **sm,
                **tv,
                **({"entropy": ent.numpy()} if f.get("rec_entropy") else {}),
            )
            if ref is not None:
                rec.add_scores("reference", b, logprobs=np.minimum(ref.numpy(), 0), **sm)
        # update
        lm = (
            M
            if "loss_mask" not in h
            else torch.as_tensor(
                h["loss_mask"](train_mask, train_toks, np.arange(task.T)[None] < lens[:, None])
            ).float()
        )
        lr = s["lr"] * min(1.0, step / max(1, s["warmup"])) * (f["sched"](step / S) if f.get("sched") else 1.0)
        for g in c.opt.param_groups:
            g["lr"] = lr
            g["weight_decay"] = s["weight_decay"]
            if "betas" in g:
                g["betas"], g["eps"] = (s["beta1"], s["beta2"]), s["eps"]
            if "momentum" in g and f["opt"] == "sgd":
                g["momentum"] = s["momentum"]
        mb = np.array_split(np.arange(len(p)), s["minibatches"]) if s["minibatches"] > 1 else [np.arange(len(p))]
        gn, clipf, loss_v = 0.0, 0.0, 0.0
        mrng = np.random.default_rng([seed, step, 3])
        for _ in range(s["epochs"]):
            pm = mrng.permutation(len(p)) if len(mb) > 1 else np.arange(len(p))
            for q in mb:
                ix = torch.as_tensor(pm[q])
                m, a = lm[ix], A[ix]
                if h.get("adv_seq_fix"):
                    a = h["adv_seq_fix"](a)
                lp, en = lps_of(pol, Pt[ix], Rt[ix], temp)
                if "lp_shift" in h:
                    lp = h["lp_shift"](pol, Pt[ix], Rt[ix], lp)
                lr_ = lp - old[ix]
                if f["algo"] == "gspo":
                    sl = (lr_ * m).sum(1, keepdim=True) / m.sum(1, keepdim=True).clamp(min=1)
                    lr_ = sl.expand_as(lp)
                ratio = lr_.clamp(-20, 20).exp()
                wt = 1.0
                if f.get("tis"):
                    wt = (old[ix] - rollt[ix]).exp().clamp(max=f["tis"])
                if f["algo"] == "reinforce":
                    obj = a * lp
                elif f["algo"] == "cispo":
                    obj = ratio.detach().clamp(max=1 + s["clip_high"]) * a * lp
                else:
                    cl = ratio.clamp(1 - s["clip_low"], 1 + s["clip_high"]) * a
                    obj = (torch.max if h.get("max_bug") else torch.min)(ratio * a, cl)
                    clipf = float(((ratio * a > cl).float() * m).sum() / m.sum().clamp(min=1))
                tokl = -wt * obj
                if f.get("kl_in") == "loss":
                    k = (ref[ix] - lp).clamp(-20, 20)
                    tokl = tokl + s["kl_coef"] * (k.exp() - k - 1)
                tokl = tokl - s["ent_coef"] * en
                if "extra" in h:
                    tokl = tokl + h["extra"](lp, en)
                if f["agg"] == "token_mean":
                    loss = (tokl * m).sum() / m.sum().clamp(min=1)
                elif f["agg"] == "sequence_mean":
                    loss = ((tokl * m).sum(1) / m.sum(1).clamp(min=1)).mean()
                else:
                    loss = (tokl * m).sum() / (len(q) * task.T)
                if not h.get("no_zero"):
                    c.opt.zero_grad()
                loss.backward()
                if "grads" in h:
                    h["grads"](pol)
                gn = float(nn.utils.clip_grad_norm_(pol.parameters(), s["clip_grad"] if s["clip_grad"] else 1e9))
                if not np.isfinite(gn):
                    c.opt.zero_grad()
                c.opt.step()
                loss_v = float(loss.detach())
                if critic is not None:
                    v = critic(Pt[ix], Rt[ix])
                    cl_ = ((v - ret[ix]) ** 2 * M[ix]).sum() / M[ix].sum()
                    c.copt.zero_grad()
                    cl_.backward()
                    c.copt.step()
        pol.drop = 0.0
        if "after" in h:
            h["after"](pol)
        c.hist[step] = {k: t.clone() for k, t in pol.state_dict().items()}
        for v in [v for v in c.hist if v and v < step - 60 and v not in c.mem.get("keep", ())]:
            del c.hist[v]
        kl = float(kl_tok.sum() / M.sum()) if ref is not None else 0.0
        H = float((ent * M).sum() / M.sum())
        if s["kl_target"] is not None and not h.get("ctl_off"):
            sgn = h.get("ctl_sign", 1.0)
            s["kl_coef"] = float(
                np.clip(s["kl_coef"] * (1 + sgn * 0.1 * np.clip(kl / s["kl_target"] - 1, -0.5, 0.5)), 1e-5, 5.0)
            )
        if s["ent_target"] is not None:
            s["ent_coef"] = float(np.clip(s["ent_coef"] + 0.01 * (s["ent_target"] - H), 0.0, 3.0))
        e = None
        if step % f["eval_every"] == 0 or step == 1:
            e = evaluate(pol, task, evp, evu, s)
            evals.append(e)
        if rec:
            vals = dict(
                reward=float(r.mean()),
                reward_std=float(r.std()),
                entropy=H,
                grad_norm=gn,
                lr=lr,
                kl=kl,
                length=float(lens.mean()),
                clipfrac=clipf,
                loss=loss_v,
                kl_coef=s["kl_coef"],
                ent_coef=s["ent_coef"],
                truncated=float((fin == "length").mean()),
                seconds=time.time() - t0,
            )
            rec.add_metrics(step, {nm[k]: v for k, v in vals.items() if k in nm})
            if live:
                rec.add_optimizer(step, c.opt)
            if e is not None and "eval" in nm:
                rec.add_metrics(step, {nm["eval"]: e})
    if rec:
        rec.close()
    return evals, time.time() - t0


def kept(evals):
    """Mean of the last fifth over that of the best fifth, of levels above min(lowest, 0)."""
    x = np.array(evals, float)
    n = max(1, len(x) // 5)
    lo = min(x.min(), 0)
    best = max(q.mean() for q in np.array_split(x, 5))
    last = x[-n:].mean()
    return (last - lo) / max(best - lo, 1e-9)
