"""Tasks, policies, the sampling engine, and the training loop with the hooks that faults come in by; recording.

Shapes: B rows, P prompt tokens, T response tokens, V vocabulary, G rows of a group. D0 is the token of digit 0.
"""

from __future__ import annotations

import copy
import math
import shutil
import time

import numpy as np
import torch
import torch.nn.functional as Fn
from tim_trace import Recorder
from torch import nn

BOS, EOS, SEP, MA, MB, BLANK, ERR = 1, 2, 3, 4, 5, 6, 7
D0, V = 8, 20


def gen(*key):
    return torch.Generator().manual_seed(int(np.random.SeedSequence(list(key)).generate_state(1)[0]))


# ---------------------------------------------------------------- tasks
class SeqTask:
    """Prompt [BOS marker d.. SEP]; the answer is a function of the digits and ends with EOS."""

    def __init__(self, kind, n, lo=None, hi=10, exact=0.0, low=0.0, high=1.0, T=None, unf=False):
        self.unf = unf
        self.kind, self.n, self.lo, self.hi, self.exact, self.low, self.high = kind, n, lo or n, hi, exact, low, high
        self.P = n + 3
        self.A = {"add": 4, "repeat": 9}.get(kind, n + 1)
        self.T = T or self.A + 3
        self.has_dense = False

    def answers(self, digits, m, kind):
        rows = digits.tolist()
        out = np.zeros((len(rows), max(self.A, self.n + 1)), np.int64)
        lens = []
        for i, (d, k) in enumerate(zip(rows, m.tolist(), strict=True)):
            d = d[self.n - k :]
            if kind == "reverse":
                a = d[::-1]
            elif kind == "copy":
                a = d
            elif kind == "sort":
                a = sorted(d)
            elif kind == "sortdown":
                a = sorted(d)[::-1]
            elif kind == "shift":
                a = [(x + 3) % 10 for x in d]
            elif kind == "shift7":
                a = [(x + 7) % 10 for x in d]
            elif kind == "odd":
                a = [x for x in d if x % 2]
            elif kind == "even":
                a = [x for x in d if x % 2 == 0]
            elif kind == "add":
                a = [int(c) for c in str(d[0] * 10 + d[1] + d[2] * 10 + d[3])]
            elif kind == "sub":
                a = [int(c) for c in str(abs(d[0] * 10 + d[1] - d[2] * 10 - d[3]))]
            elif kind == "repeat":
                a = [d[0]] * (1 + d[1] % 8)
            elif kind == "alt":
                a = [d[0], d[1]] * ((1 + d[1] % 8) // 2)
            elif kind == "rotate":
                a = d[1:] + d[:1]
            a = [D0 + x for x in a] + [EOS]
            out[i, : len(a)] = a
            lens.append(len(a))
        return torch.from_numpy(out), torch.tensor(lens)

    def make(self, digits, m, kind=None, marker=MA):
        toks = digits + D0
        pos = torch.arange(self.n)[None]
        toks = torch.where(pos < (self.n - m)[:, None], torch.full_like(toks, BLANK), toks)
        n = len(digits)
        p = torch.cat([torch.full((n, 1), BOS), torch.full((n, 1), marker), toks, torch.full((n, 1), SEP)], 1)
        a, la = self.answers(digits, m, kind or self.kind)
        return dict(p=p, a=a, la=la, digits=digits, m=m)

    def sample(self, g, n, kind=None, marker=MA, digits=None, m=None):
        d = torch.randint(0, self.hi, (n, self.n), generator=g)
        k = torch.randint(self.lo, self.n + 1, (n,), generator=g)
        return self.make(d if digits is None else digits(d), k if m is None else m(k), kind, marker)

    def frac(self, b, resp, lens):
        T = resp.shape[1]
        a, la = b["a"], b["la"]
        w = min(T, a.shape[1])
        pos = torch.arange(w)[None]
        ok = (resp[:, :w] == a[:, :w]) & (pos < torch.minimum(lens, la)[:, None])
        return ok.sum(1).float() / torch.maximum(lens, la).float()

    def score(self, b, resp, lens):
        f = self.frac(b, resp, lens)
        f = self.exact * (f > 0.999).float() + (1 - self.exact) * f
        if self.unf:
            f = f * (resp.gather(1, (lens - 1)[:, None])[:, 0] == EOS)
        return self.low + (self.high - self.low) * f

    def expert(self, b):
        return b["a"], b["la"]


class RMTask:
    """A hidden bigram table scores the response, -20 to -10."""

    has_dense = False

    def __init__(self):
        g = gen(77)
        self.P, self.T, self.n = 5, 11, 3
        self.big = torch.randn(V, V, generator=g)
        self.cls = torch.randn(10, V, generator=g)
        self.big[:, :D0] -= 1.0
        self.cls[:, :D0] -= 1.0
        self.A = 9

    def sample(self, g, n, lo=0, hi=10, marker=MA, digits=None):
        d = torch.randint(lo, hi, (n, self.n), generator=g)
        if digits is not None:
            d = digits(d)
        p = torch.cat([torch.full((n, 1), BOS), d + D0, torch.full((n, 1), SEP)], 1)
        return dict(p=p, digits=d)

    def quality(self, b, resp, lens, big=None, cls=None):
        big = self.big if big is None else big
        cls = self.cls if cls is None else cls
        prev = torch.cat([b["p"][:, 1:2], resp[:, :-1]], 1)
        c = b["digits"][:, 0]
        s = big[prev, resp] + cls[c[:, None], resp]
        mask = (torch.arange(resp.shape[1])[None] < lens[:, None]) & (resp != EOS)
        k = mask.sum(1).float()
        ended = ((resp == EOS).any(1)).float()
        return (s * mask).sum(1) / k.clamp(min=1) - 0.35 * (k - 7).abs() - 0.8 * (1 - ended)

    def score(self, b, resp, lens, **kw):
        return -20 + 10 * torch.sigmoid(0.9 * (self.quality(b, resp, lens, **kw) - 0.7))

    def expert(self, b):
        n = len(b["p"])
        g = gen(78, n, int(b["digits"].sum()))
        a = torch.randint(D0, D0 + 10, (n, 9), generator=g)
        la = torch.randint(5, 9, (n,), generator=g)
        a[torch.arange(n), la - 1] = EOS
        return a, la


class ToolTask:
    """Two keys to ask a tool for; answer the larger of its two values."""

    has_dense = False

    def __init__(self):
        self.P, self.T, self.A = 5, 8, 6
        self.forced = {1: 0, 3: 2}  # position of tool output -> position of the key

    def sample(self, g, n, marker=MA, kind="max", digits=None):
        k = torch.randint(0, 10, (n, 2), generator=g)
        table = torch.randint(0, 10, (n, 10), generator=g)
        if digits is not None:
            k = digits(k)
        p = torch.cat([torch.full((n, 1), BOS), torch.full((n, 1), marker), k + D0, torch.full((n, 1), SEP)], 1)
        v = table.gather(1, k)
        ans = v.max(1).values if kind == "max" else v.min(1).values
        a = torch.stack([k[:, 0] + D0, v[:, 0] + D0, k[:, 1] + D0, v[:, 1] + D0, ans + D0, torch.full((n,), EOS)], 1)
        return dict(p=p, k=k, table=table, ans=ans, a=a, la=torch.full((n,), 6))

    def tool(self, b, key):
        ok = (key >= D0) & (key < D0 + 10)
        v = b["table"].gather(1, (key - D0).clamp(0, 9)[:, None])[:, 0] + D0
        return torch.where(ok, v, torch.full_like(v, ERR))

    def score(self, b, resp, lens):
        q = (resp[:, 0] == b["k"][:, 0] + D0).float() * 0.2 + (
            (resp[:, 2] == b["k"][:, 1] + D0) & (lens > 2)
        ).float() * 0.2
        right = (resp[:, 4] == b["ans"] + D0) & (lens > 4)
        ended = resp.gather(1, (lens - 1)[:, None])[:, 0] == EOS
        return -1 + q + 0.2 * ended.float() + 1.4 * (right & ended & (lens == 6)).float()

    def expert(self, b):
        return b["a"], b["la"]


class GridTask:
    """Walk on a 6x6 board to the goal and stop there; dense reward by move."""

    has_dense = True

    def __init__(self):
        self.P, self.T, self.A, self.size = 6, 13, 11, 6
        self.dx = torch.zeros(V, 2, dtype=torch.long)
        for i, m in enumerate([(1, 0), (-1, 0), (0, 1), (0, -1)]):
            self.dx[14 + i] = torch.tensor(m)

    def sample(self, g, n, marker=MA, digits=None):
        d = torch.randint(0, self.size, (n, 4), generator=g)
        if digits is not None:
            d = digits(d)
        p = torch.cat([torch.full((n, 1), BOS), d + D0, torch.full((n, 1), SEP)], 1)
        return dict(p=p, d=d)

    def dense(self, b, resp, lens, goal=None):
        s, goal = b["d"][:, :2], b["d"][:, 2:] if goal is None else goal
        live = torch.arange(resp.shape[1])[None] < lens[:, None]
        pos = s[:, None] + (self.dx[resp] * live[..., None]).cumsum(1)
        dist = (pos - goal[:, None]).abs().sum(2).float()
        d0 = (s - goal).abs().sum(1).float()
        before = torch.cat([d0[:, None], dist[:, :-1]], 1)
        r = 0.5 * (before - dist) * live
        stop = (resp == EOS) & live
        r = r + 2.0 * (stop & (dist == 0)).float() - 0.5 * (live & ~stop & (resp < 14)).float()
        return r

    def score(self, b, resp, lens):
        return self.dense(b, resp, lens).sum(1)

    def expert(self, b):
        out = np.zeros((len(b["d"]), 12), np.int64)
        lens = []
        for i, (x, y, gx, gy) in enumerate(b["d"].tolist()):
            a = [14 if gx > x else 15] * abs(gx - x) + [16 if gy > y else 17] * abs(gy - y) + [EOS]
            out[i, : len(a)] = a
            lens.append(len(a))
        return torch.from_numpy(out), torch.tensor(lens)


# ---------------------------------------------------------------- policies
class Net(nn.Module):
    def __init__(self, kind, d, L, critic=False, layers=2, window=10):
        super().__init__()
        self.kind, self.d, self.drop, self.pos_shift, self.window = kind, d, 0.0, 0, window
        self.dead = None
        self.recurrent = kind in ("gru", "rnn", "ssm", "moe")
        self.emb = nn.Embedding(V, d)
        if kind in ("gru", "moe"):
            self.core = nn.GRU(d, d, batch_first=True)
        if kind == "rnn":
            self.core = nn.RNN(d, d, batch_first=True)
        if kind == "moe":
            self.router = nn.Linear(d, 4)
            self.up = nn.Parameter(torch.randn(4, d, d) / d**0.5)
            self.down = nn.Parameter(torch.randn(4, d, d) / d**0.5 / 2)
        if kind == "ssm":
            self.decay = nn.Parameter(torch.linspace(-1.0, 4.0, d))
            self.inp = nn.Linear(d, 2 * d)
            self.mix = nn.Linear(2 * d, d)
            self.inp2 = nn.Linear(d, 2 * d)
            self.mix2 = nn.Linear(2 * d, d)
            self.decay2 = nn.Parameter(torch.linspace(-1.0, 4.0, d))
        if kind == "tf":
            self.pos = nn.Parameter(0.3 * torch.randn(L + 4, d))
            self.blocks = nn.ModuleList(
                nn.ModuleDict(
                    dict(
                        n1=nn.LayerNorm(d),
                        qkv=nn.Linear(d, 3 * d),
                        o=nn.Linear(d, d),
                        n2=nn.LayerNorm(d),
                        u=nn.Linear(d, 2 * d),
                        w=nn.Linear(2 * d, d),
                    )
                )
                for _ in range(layers)
            )
            self.nf = nn.LayerNorm(d)
        if kind == "win":
            self.f1 = nn.Linear(window * d, 4 * d)
            self.f2 = nn.Linear(4 * d, d)
        self.head = nn.Linear(d, V)
        if critic:
            self.value = nn.Linear(d, 1)

    def scan(self, x, inp, decay, mix, s):
        u, gate = inp(x).chunk(2, -1)
        a = torch.sigmoid(decay)
        hs = []
        s = torch.zeros(x.shape[0], self.d) if s is None else s
        for t in range(x.shape[1]):
            s = a * s + (1 - a) * u[:, t]
            hs.append(s)
        h = torch.stack(hs, 1)
        return x + mix(torch.cat([h * torch.sigmoid(gate), torch.relu(h)], -1)), s

    def hidden(self, tok, state=None):
        x = self.emb(tok)
        if self.kind in ("gru", "rnn", "moe"):
            h, state = self.core(x, state)
            if self.kind == "moe":
                w = torch.softmax(self.router(h), -1)
                top = w.topk(2, -1)
                w = torch.zeros_like(w).scatter(-1, top.indices, top.values)
                if self.dead is not None:
                    w = w * torch.tensor([0.0 if i in self.dead else 1.0 for i in range(4)])
                y = torch.relu(torch.einsum("bld,edf->blef", h, self.up))
                h = h + (torch.einsum("blef,efd->bled", y, self.down) * w[..., None]).sum(2)
        elif self.kind == "ssm":
            s1, s2 = state or (None, None)
            h, s1 = self.scan(x, self.inp, self.decay, self.mix, s1)
            h, s2 = self.scan(h, self.inp2, self.decay2, self.mix2, s2)
            state = (s1, s2)
        elif self.kind == "tf":
            B, L, d = x.shape
            h = x + self.pos[self.pos_shift : self.pos_shift + L]
            for b in self.blocks:
                q, k, v = b["qkv"](b["n1"](h)).view(B, L, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
                o = Fn.scaled_dot_product_attention(q, k, v, is_causal=True)
                h = h + b["o"](o.transpose(1, 2).reshape(B, L, d))
                h = h + b["w"](Fn.gelu(b["u"](b["n2"](h))))
            h = self.nf(h)
        elif self.kind == "win":
            head = x[:, :6]  # the prompt (6 tokens), the sums of what was said, the last tokens
            B, L, d = x.shape
            csum = torch.cumsum(torch.cat([torch.zeros_like(x[:, :6]), x[:, 6:]], 1), 1)
            last = [torch.cat([torch.zeros(B, k, d), x[:, : L - k]], 1) for k in range(3)]
            z = torch.cat([head.reshape(B, 1, 6 * d).expand(B, L, 6 * d), csum, *last], -1)
            h = self.f2(torch.tanh(self.f1(z)))
        if self.drop and self.training:
            h = Fn.dropout(h, self.drop)
        return h, state

    def forward(self, tok):
        h = self.hidden(tok)[0]
        return self.head(h), (self.value(h)[..., 0] if hasattr(self, "value") else None)


@torch.no_grad()
def generate(
    net, task, b, T, gumbel, temp=1.0, limit=None, stop=None, elogits=None, estate=None, tool=None, top=None, ended=None
):
    """Sample; returns responses, their lengths, the sampler's own logprobs, mask of tokens that the policy chose."""
    p = b["p"]
    B = len(p)
    resp = torch.zeros(B, T, dtype=torch.long)
    lps = torch.zeros(B, T)
    chosen = torch.zeros(B, T, dtype=torch.bool)
    lens = torch.zeros(B, dtype=torch.long)
    live = torch.ones(B, dtype=torch.bool)
    forced = getattr(task, "forced", {})
    limit = torch.full((B,), T) if limit is None else limit
    state, tok = None, p
    for t in range(T):
        if net.recurrent:
            h, state = net.hidden(tok, state)
            h = h[:, -1]
            if estate is not None:
                state = estate(state, t)
        else:
            h = net.hidden(torch.cat([p, resp[:, :t]], 1))[0][:, -1]
        z = net.head(h) / temp
        if elogits is not None:
            z = elogits(z, t)
        lp = torch.log_softmax(z, -1)
        if t in forced:
            nxt = (tool or task.tool)(b, resp[:, forced[t]])
            fixed = True
        else:
            nxt = (z + gumbel[:B, t]).argmax(-1)
            fixed = False
        nxt = torch.where(live, nxt, torch.zeros_like(nxt))
        resp[:, t] = nxt
        lps[:, t] = torch.where(live, lp.gather(1, nxt[:, None])[:, 0], torch.zeros(B))
        chosen[:, t] = live & (not fixed)
        lens = lens + live.long()
        done = nxt == EOS
        if stop is not None:
            for s in stop:
                done = done | (nxt == s)
        live = live & ~done & (lens < limit)
        if not live.any():
            break
        tok = nxt[:, None]
    return resp, lens, lps, chosen


def draw_gumbel(g, B, T):
    u = torch.rand(B, T, V, generator=g).clamp(1e-9, 1 - 1e-7)
    return -torch.log(-torch.log(u))


# ---------------------------------------------------------------- pretraining
def pretrained(fam, seed, cache):
    """A policy that has seen noisy demonstrations; its weights are kept in folder `cache`."""
    path = cache / f"{fam['name']}_{seed}.pt"
    torch.manual_seed(1000 * seed + fam["id"])
    task = fam["task"]
    net = Net(fam["net"], fam["d"], task.P + task.T + 2, fam.get("critic", False), fam.get("layers", 2))
    if path.exists():
        net.load_state_dict(torch.load(path))
        return net
    opt = torch.optim.Adam(net.parameters(), lr=fam.get("pre_lr", 4e-3))
    g = gen(5, seed, fam["id"])
    for i in range(fam["pre"]):
        for gr in opt.param_groups:
            gr["lr"] = fam.get("pre_lr", 4e-3) * (1 - 0.8 * i / fam["pre"])
        b = task.sample(g, 128)
        a, la = task.expert(b)
        w = a.shape[1]
        noise = torch.rand(a.shape, generator=g) < fam.get("pre_noise", 0.15)
        rnd = torch.randint(2, V, a.shape, generator=g)
        a = torch.where(noise, rnd, a)
        mask = torch.arange(w)[None] < la[:, None]
        z, _ = net(torch.cat([b["p"], a], 1)[:, :-1])
        lp = torch.log_softmax(z[:, task.P - 1 :], -1).gather(2, a[..., None])[..., 0]
        loss = -(lp * mask).sum() / mask.sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
    cache.mkdir(parents=True, exist_ok=True)
    torch.save(net.state_dict(), path)
    return net


def bf16(net):
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(p.bfloat16().float())


def rounded(z, t):
    return z.bfloat16().float()


def scored(model, full, resp, P, temperature):
    """Logprobs and entropies of the tokens of responses, and the critic's values where there is one."""
    z, v = model(full[:, :-1])
    z = z[:, P - 1 :] / temperature
    lpa = torch.log_softmax(z, -1)
    lp = lpa.gather(2, resp[..., None])[..., 0]
    ent = -(lpa.exp() * lpa).sum(-1)
    return lp, ent, (v[:, P - 1 :] if v is not None else None)


# ---------------------------------------------------------------- the loop
class Run:
    """A run of a family with a fault's hooks, recorded in `folder`/trace."""

    def __init__(self, fam, seed, fault, folder, cache):
        self.fam, self.seed, self.fault, self.folder, self.cache = fam, seed, fault, folder, cache
        self.task = copy.copy(fam["task"])
        self.evals = []
        self.noted = {}

    def active(self, step):
        return step >= self.fault["start"]

    def p(self, step):
        ramp = self.fault.get("ramp", 1)
        return min(1.0, (step - self.fault["start"] + 1) / ramp)

    def hook(self, name, value, *args):
        fn = self.fault.get(name)
        if fn is None or not self.active(self.step):
            return value
        return fn(self, value, self.p(self.step), *args)

    def engine_logits(self, inner):
        """What the engine makes of its logits, after `inner`."""
        change, p = self.fault["elogits"], self.p(self.step)
        return lambda z, t: change(self, inner(z, t) if inner else z, p, t)

    def engine_state(self):
        change, p = self.fault["estate"], self.p(self.step)
        return lambda state, t: change(self, state, p, t)

    def engine_tool(self):
        change, p = self.fault["tool"], self.p(self.step)
        return lambda b, key: change(self, self.task.tool(b, key), p, b, key)

    def lr(self, step):
        f = self.fam
        n = f["steps"]
        s = f.get("schedule", "constant")
        warm = f.get("warmup", 0)
        x = min(1.0, step / warm) if warm else 1.0
        if s == "linear":
            x *= max(0.1, 1 - step / n)
        if s == "cosine":
            x *= 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / n))
        return f["lr"] * x

    def evaluate(self, net):
        was = net.training
        net.eval()
        resp, lens, _, _ = generate(net, self.fam["task"], self.held, self.fam["task"].T, self.held_gumbel)
        r = self.fam["task"].score(self.held, resp, lens).mean().item()
        net.train(was)
        return r

    def go(self):
        f, task, rec = self.fam, self.task, self.fam["rec"]
        t0 = time.time()
        net = self.net = pretrained(f, self.seed, self.cache)
        net.train()
        torch.manual_seed(99 + self.seed)
        ref = self.ref = copy.deepcopy(net).eval() if f.get("kl") is not None else None
        eng = self.eng = copy.deepcopy(net).eval()
        self.gd, self.gs, self.gf = (
            gen(11, self.seed, f["id"]),
            gen(12, self.seed, f["id"]),
            gen(13, self.seed, f["id"]),
        )
        self.held = f["task"].sample(gen(14, f["id"]), f.get("held", 160))
        self.held_gumbel = draw_gumbel(gen(15, f["id"]), f.get("held", 160), task.T)
        G, nP = f["G"], f["prompts"]
        pool = task.sample(gen(16, self.seed, f["id"]), f["pool"]) if f.get("pool") else None
        base = dict(
            lr=0.0,
            temperature=1.0,
            clip_low=f.get("clip", (0.2, 0.2))[0],
            clip_high=f.get("clip", (0.2, 0.2))[1],
            grad_clip=f.get("grad_clip", 1.0),
            beta1=f.get("betas", (0.9, 0.99))[0],
            beta2=f.get("betas", (0.9, 0.99))[1],
            eps=1e-8,
            weight_decay=f.get("wd", 0.0),
            kl_coef=f.get("kl") or 0.0,
            entropy_coef=f.get("ent", 0.0),
            max_tokens=task.T,
            group_size=G,
            num_prompts=nP,
            gamma=1.0,
            lam=0.95,
            vf_coef=0.5,
            length_coef=0.0,
            engine_temperature=1.0,
            top_k=-1,
            adv_scale=1.0,
            epochs=f.get("epochs", 1),
            entropy_target=-1.0,
            is_cap=f.get("cap", 2.0),
            lag=f.get("lag", 0),
        )
        cls = torch.optim.AdamW if f.get("wd") is not None else torch.optim.Adam
        if f.get("opt") == "sgd":
            opt = torch.optim.SGD(net.parameters(), lr=f["lr"], momentum=0.9)
        else:
            opt = cls(
                net.parameters(),
                lr=f["lr"],
                betas=(base["beta1"], base["beta2"]),
                eps=1e-8,
                weight_decay=base["weight_decay"],
            )
        self.opt = opt
        self.hist = {}
        ema = None
        self.prev = None
        self.began = False
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        recorder = Recorder(self.folder / "trace")
        names = f["names"]
        last_settings = None
        every = f.get("eval_every", 2)
        for step in range(1, f["steps"] + 1):
            self.step, version = step, step - 1
            S = dict(base)
            S["lr"] = self.lr(step)
            if self.active(step) and not self.began:
                self.began = True
                self.hook("once", None)
            self.hook("set", S)
            S = self.S = S
            # settings, recorded
            shown = {f["settings"].get(k, None): v for k, v in S.items() if f["settings"].get(k)}
            if rec["settings"]:
                if step == 1:
                    recorder.add_hyperparameters({**f.get("static", {}), **shown})
                    if f.get("add_loss"):
                        recorder.add_loss(f["add_loss"])
                elif rec["live"]:
                    lrname = f["settings"].get("lr")
                    changed = {k: v for k, v in shown.items() if last_settings[k] != v and k != lrname}
                    if (
                        lrname
                        and abs(S["lr"] / max(self.lr(step), 1e-12) - 1) > 1e-9
                        and self.noted.get("lr") != S["lr"]
                    ):
                        changed[lrname] = S["lr"]
                        self.noted["lr"] = S["lr"]
                    if changed:
                        recorder.add_hyperparameters(changed, step=step)
                last_settings = shown
            # prompts
            if pool is None:
                b = task.sample(self.gd, nP)
            else:
                idx = torch.randperm(f["pool"], generator=self.gd)[:nP]
                b = {k: v[idx] for k, v in pool.items()}
            b = self.hook("prompts", b)
            G_ = S["group_size"]
            nPr = len(b["p"])
            b = {k: v.repeat_interleave(G_, 0) for k, v in b.items()}
            B = len(b["p"])
            group = torch.arange(nPr).repeat_interleave(G_)
            # engine
            self.hist[version] = {k: v.clone() for k, v in net.state_dict().items()}
            want = max(0, version - S["lag"])
            used, declared = self.hook("sync", (want, want))
            eng.load_state_dict(self.hist[used])
            if f.get("bf16") or S.get("bf16"):
                bf16(eng)
            self.hook("engine", eng)
            el = rounded if f.get("bf16") or S.get("bf16") else None
            if "elogits" in self.fault and self.active(step):
                el = self.engine_logits(el)
            es = self.engine_state() if "estate" in self.fault and self.active(step) else None
            T = max(task.T, S["max_tokens"])
            gumbel = draw_gumbel(self.gs, B, T)
            limit = torch.full((B,), int(S["max_tokens"]))
            limit = self.hook("limit", limit, b)
            stop = self.hook("stop", None)
            tool = self.engine_tool() if "tool" in self.fault and self.active(step) else None
            resp, lens, elp, chosen = generate(
                eng, task, b, T, gumbel, S["temperature"] * S["engine_temperature"], limit, stop, el, es, tool
            )
            att = torch.arange(T)[None] < lens[:, None]
            finished = resp.gather(1, (lens - 1)[:, None])[:, 0] == EOS
            if stop is not None:
                lasttok = resp.gather(1, (lens - 1)[:, None])[:, 0]
                for s in stop:
                    finished = finished | (lasttok == s)
            # reward
            true_r = task.score(b, resp, lens)
            dense = None
            if task.has_dense:
                dense = task.dense(b, resp, lens)
                dense = self.hook("dense", dense, b, resp, lens)
                r = dense.sum(1)
            else:
                r = self.hook("score", true_r, b, resp, lens)
            resp = self.hook("tokens", resp, att, chosen)
            mask = self.hook("mask", chosen, att)
            maskf = mask.float()
            full = torch.cat([b["p"], resp], 1)
            P = b["p"].shape[1]
            given = (full, resp, P, S["temperature"])
            if "drop" in self.fault and self.active(step):
                net.drop = self.fault["drop"] * self.p(step)
            with torch.no_grad():
                tlp, tent, tval = scored(net, *given)
                rlp = scored(ref, *given)[0] if ref is not None else None
            elp = self.hook("elp", elp, b, resp, lens)
            # advantages
            algo = f["adv"]
            if algo in ("grpo", "drgrpo"):
                rr = r.view(nPr, G_)
                a = rr - rr.mean(1, keepdim=True)
                if algo == "grpo":
                    a = a / (rr.std(1, keepdim=True) + 1e-4)
                adv = a.reshape(-1)[:, None] * att.float()
            elif algo == "rloo":
                rr = r.view(nPr, G_)
                a = (rr - rr.mean(1, keepdim=True)) * G_ / (G_ - 1)
                a = a / f.get("rscale", 1.0)
                adv = a.reshape(-1)[:, None] * att.float()
            elif algo == "ema":
                m = r.mean().item()
                ema = m if ema is None else ema
                ema_used = self.hook("baseline", ema)
                a = (r - ema_used) / f.get("rscale", 1.0)
                ema = 0.8 * ema + 0.2 * m
                adv = a[:, None] * att.float()
            elif algo == "rtg":
                g_ = dense.flip(1).cumsum(1).flip(1)
                m = (g_ * att).sum(0) / att.sum(0).clamp(min=1)
                ema = m if ema is None else 0.8 * ema + 0.2 * m
                adv = (g_ - ema[None]) / f.get("rscale", 1.0) * att.float()
            elif algo == "gae":
                tr = torch.zeros(B, T)
                tr[torch.arange(B), lens - 1] = r
                if rlp is not None:
                    tr = tr - S["kl_coef"] * (tlp - rlp) * att
                val = tval * att
                adv = torch.zeros(B, T)
                lastg = torch.zeros(B)
                for t in reversed(range(T)):
                    nv = val[:, t + 1] * att[:, t + 1] if t + 1 < T else torch.zeros(B)
                    delta = tr[:, t] + S["gamma"] * nv - val[:, t]
                    lastg = (delta + S["gamma"] * S["lam"] * lastg) * att[:, t]
                    adv[:, t] = lastg
                ret = adv + val
                mm = (adv * att).sum() / att.sum()
                sd = (((adv - mm) ** 2) * att).sum().div(att.sum()).sqrt()
                adv = (adv - mm) / (sd + 1e-6) * att
            adv = adv * S["adv_scale"]
            adv = self.hook("adv", adv, r, group, att)
            old = elp if f.get("denominator") == "rollout" else tlp
            # updates
            for gr in opt.param_groups:
                gr["lr"] = S["lr"]
                if "betas" in gr:
                    gr["betas"] = (S["beta1"], S["beta2"])
                    gr["eps"] = S["eps"]
                else:
                    gr["momentum"] = S["beta1"]
                gr["weight_decay"] = S["weight_decay"]
            for _ in range(S["epochs"]):
                lp, ent, val = scored(net, *given)
                ratio = torch.exp((lp - old).clamp(-20, 20))
                ntok = maskf.sum().clamp(min=1)
                kind = f["loss"]
                if kind == "ppo":
                    s1 = ratio * adv
                    s2 = ratio.clamp(1 - S["clip_low"], 1 + S["clip_high"]) * adv
                    obj = self.hook("clipmin", torch.minimum(s1, s2), s1, s2)
                elif kind == "gspo":
                    lr_ = ((lp - old) * maskf).sum(1) / maskf.sum(1).clamp(min=1)
                    sr = torch.exp(lr_.clamp(-20, 20))[:, None]
                    obj = torch.minimum(
                        sr * adv, sr.clamp(1 - S["clip_low"], 1 + S["clip_high"]) * adv
                    ) * torch.ones_like(lp)
                elif kind == "reinforce":
                    obj = lp * adv
                elif kind == "tis":
                    obj = torch.exp((lp.detach() - elp).clamp(-20, 20)).clamp(max=S["is_cap"]) * lp * adv
                elif kind == "seqw":
                    w = torch.exp((((lp.detach() - elp) * maskf).sum(1)).clamp(-20, 20)).clamp(max=S["is_cap"])[:, None]
                    obj = w * lp * adv
                if f.get("agg", "token_mean") == "token_mean":
                    pg = -(obj * maskf).sum() / ntok
                elif f["agg"] == "seq_mean":
                    pg = -((obj * maskf).sum(1) / maskf.sum(1).clamp(min=1)).mean()
                else:
                    pg = -(obj * maskf).sum(1).mean() / task.A
                emean = (ent * maskf).sum() / ntok
                loss = pg
                klv = torch.tensor(0.0)
                if rlp is not None:
                    dlt = (rlp - lp).clamp(-10, 10)
                    k3 = dlt.exp() - dlt - 1
                    klv = (k3 * maskf).sum() / ntok
                    if algo != "gae":
                        loss = loss + S["kl_coef"] * klv
                if S["entropy_coef"]:
                    loss = loss - S["entropy_coef"] * emean
                if val is not None:
                    loss = loss + S["vf_coef"] * (((val - ret) ** 2) * maskf).sum() / ntok
                loss = self.hook(
                    "loss", loss, dict(lp=lp, adv=adv, mask=maskf, ent=ent, att=att, full=full, P=P, resp=resp)
                )
                if not (self.fault.get("nozero") and self.active(step)):
                    opt.zero_grad()
                loss.backward()
                self.hook("grad", net)
                gn = nn.utils.clip_grad_norm_(net.parameters(), S["grad_clip"])
                opt.step()
                self.hook("after", net, opt)
            net.drop = 0.0
            version = step
            self.hook("post", net, opt)
            self.kl_now, self.ent_now = float(klv.detach()), float(emean.detach())
            if not hasattr(self, "ent_first"):
                self.ent_first = self.ent_now
            # record
            ev = None
            if step % every == 0 or step == 1:
                ev = self.evaluate(net)
                self.evals.append(ev)
            kw = {}
            if rec["adv"]:
                kw["advantage"] = adv if algo in ("gae", "rtg") else adv[torch.arange(B), 0]
            if rec["versions"]:
                kw["policy_version"] = declared
            if G_ > 1:
                kw["group_ids"] = [f"{step}-{i}" for i in group.tolist()]
            if rec.get("sampling", True):
                kw["temperature"] = float(S["temperature"] * S["engine_temperature"])
                kw["max_tokens"] = int(S["max_tokens"])
            if rec.get("finish", True):
                kw["finish_reason"] = ["stop" if x else "length" for x in finished.tolist()]
            if rec.get("mask", False) or getattr(task, "forced", None):
                kw["response_mask"] = mask
            batch = recorder.add_sequences(
                step=step, prompt_ids=b["p"], response_ids=resp, response_attention_mask=att, reward=r, **kw
            )
            tv = {"policy_version": version - 1} if rec["versions"] else {}
            recorder.add_scores("rollout", batch, logprobs=elp.clamp(max=0))
            te = {"entropy": tent} if rec["entropy"] == "token" else {}
            recorder.add_scores("train", batch, logprobs=tlp.clamp(max=0), **te, **tv)
            if rlp is not None:
                recorder.add_scores(
                    "reference",
                    batch,
                    logprobs=rlp.clamp(max=0),
                    **({"policy_version": 0} if rec["versions"] else {}),
                )
            vals = dict(
                reward=r.mean(),
                entropy=emean.detach(),
                gnorm=gn,
                lr=S["lr"],
                kl=klv.detach(),
                len=lens.float().mean(),
                loss=loss.detach(),
                pg=pg.detach(),
                clipfrac=((ratio - 1).abs() > 0.2).float().mul(maskf).sum() / ntok,
                trunc=1 - finished.float().mean(),
                drift=((tlp - elp).abs() * maskf).sum() / ntok,
            )
            if not rec["entropy"]:
                vals.pop("entropy")
            m = {names[k]: float(v) for k, v in vals.items() if names.get(k)}
            if ev is not None and rec["eval"] and names.get("eval") and step % rec["eval"] == 0:
                m[names["eval"]] = ev
            if m:
                recorder.add_metrics(step, m)
            if rec["live"]:
                recorder.add_optimizer(step, opt)
        recorder.close()
        self.seconds = time.time() - t0
        return self.evals


def fallen(ev):
    n = max(1, len(ev) // 5)
    base = min(min(ev), 0.0)
    e = np.array(ev) - base
    best = max(e[i : i + n].mean() for i in range(len(e) - n + 1))
    return float(e[-n:].mean() / best), float(best + base), float(e[0] + base), float(e[-n:].mean() + base)
