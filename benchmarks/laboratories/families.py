"""A laboratory of 13 families of tiny reinforcement-learning runs, most with a planted fault; written blind.

    OMP_NUM_THREADS=1 python families.py -o FOLDER [--only NAME ...] [--list]

A family is a task, a policy (GRU, transformer, window, state space), an algorithm, an optimizer with its schedule, and what its team
records. A faulty run shares all seeds with its twin and differs in what the fault switches. FOLDER/NAME has the trace, label.json
(cause, detail, twin, first step of the fault) and plan.json (evaluations by the true reward). Runs that are there are not made again.
"""

import argparse
import copy
import json
import math
import shutil
import time
import zlib
from collections import deque
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tim_trace import Loss, Recorder

torch.set_num_threads(1)

PAD, EOS, SEP, OPA, OPB, TOOL, HI, LO, OK = range(9)
D = 10  # first digit token
V = 30  # digits D..D+9, letters D+10..D+19

# ---------------------------------------------------------------- tasks


class Task:
    P, T, turns = 8, 8, False
    lo, hi, sym = 3, 5, 8

    def one(self, g, mode):
        raise NotImplementedError

    def sample(self, seed, n, mode=None):
        g = np.random.default_rng(seed)
        return [self.one(g, mode) for _ in range(n)]

    def size(self, g, mode):
        lo, hi = self.lo, self.hi
        if mode == "long":
            lo = hi
        if mode == "short":
            hi = lo
        return int(g.integers(lo, hi + 1))

    def digits(self, g, n, mode):
        if mode == "othertokens":
            return g.integers(self.sym // 2 + 1, self.sym, n).tolist()
        if mode == "same":
            return [int(g.integers(0, self.sym))] * n
        return g.integers(0, self.sym, n).tolist()

    def score(self, want, got):
        """Share of places that are right, and half for all."""
        n = max(len(want), len(got))
        right = sum(a == b for a, b in zip(want, got, strict=False)) / max(n, 1)
        return 0.5 * right + 0.5 * (want == got)

    def finish(self, prompt, want, mode):
        if mode == "notemplate":
            prompt = [t for t in prompt if t not in (SEP, OPA, OPB)]
        if mode == "othertemplate":
            prompt = [{OPA: OPB, OPB: OPA, SEP: OK}.get(t, t) for t in prompt]
        if mode == "wraps":
            prompt = [OK, *prompt, OK]
        return {"prompt": prompt[-self.P :], "want": want}


class Reverse(Task):
    P, T, lo, hi, sym = 9, 8, 3, 6, 6

    def one(self, g, mode):
        d = self.digits(g, self.size(g, mode), mode)
        want = d[::-1] if mode != "othertask" else d
        return self.finish([OPA] + [D + x for x in d] + [SEP], [D + x for x in want] + [EOS], mode)


class Sort(Task):
    P, T, lo, hi, sym = 9, 8, 3, 6, 8

    def one(self, g, mode):
        d = self.digits(g, self.size(g, mode), mode)
        want = sorted(d, reverse=mode == "othertask")
        return self.finish([OPA] + [D + x for x in d] + [SEP], [D + x for x in want] + [EOS], mode)


class Add(Task):
    P, T, sym = 8, 6, 10
    lo, hi = 10, 99

    def one(self, g, mode):
        lo, hi = {"long": (60, 99), "short": (0, 20), "othertokens": (80, 99)}.get(mode, (0, 99))
        a, b = int(g.integers(lo, hi + 1)), int(g.integers(lo, hi + 1))
        c = a + b if mode != "othertask" else abs(a - b)

        def f(x, n):
            return [D + int(t) for t in reversed(f"{x:0{n}d}")]

        return self.finish([OPA, *f(a, 2), OPB, *f(b, 2), SEP], [*f(c, 3), EOS], mode)


class Brackets(Task):
    P, T, lo, hi, sym = 10, 10, 4, 8, 3

    def one(self, g, mode):
        n, stack, out = self.size(g, mode), [], []
        for _i in range(n):
            if stack and g.random() < (0.35 if mode != "othertokens" else 0.0):
                out.append(D + 10 + stack.pop())
            else:
                stack.append(int(g.integers(0, self.sym)))
                out.append(D + stack[-1])
        want = [D + 10 + x for x in (stack[::-1] if mode != "othertask" else stack)]
        return self.finish([OPA, *out, SEP], [*want, EOS], mode)


class Unary(Task):
    """As many letters as the first digit kind occurs."""

    P, T, lo, hi, sym = 12, 12, 4, 10, 3

    def one(self, g, mode):
        n = self.size(g, mode)
        p = 0.6 if mode != "othertokens" else 0.15
        d = [0 if g.random() < p else int(g.integers(1, self.sym)) for _ in range(n)]
        c = sum(x == (0 if mode != "othertask" else 1) for x in d)
        return self.finish([OPA] + [D + x for x in d] + [SEP], [D + 10] * c + [EOS], mode)

    def score(self, want, got):
        if not got or got[-1] != EOS or any(t != D + 10 for t in got[:-1]):
            return 0.0
        return max(0.0, 1 - abs(len(got) - len(want)) / 3)


class Caesar(Task):
    P, T, lo, hi, sym = 8, 7, 2, 5, 8

    def one(self, g, mode):
        s = int(g.integers(1, 4))
        d = self.digits(g, self.size(g, mode), mode)
        k = s if mode != "othertask" else -s
        return self.finish([OPA, D + s] + [D + x for x in d] + [SEP], [D + (x + k) % self.sym for x in d] + [EOS], mode)


class RunMax(Task):
    """Steps of thought: the running maximum of the digits, then ! and the answer."""

    P, T, lo, hi, sym = 9, 11, 3, 7, 9

    def one(self, g, mode):
        d = self.digits(g, self.size(g, mode), mode)
        f = max if mode != "othertask" else min
        run = [f(d[: i + 1]) for i in range(len(d))]
        return self.finish([OPA] + [D + x for x in d] + [SEP], [D + x for x in run] + [OK, D + run[-1], EOS], mode)

    def score(self, want, got):
        n = len(want)
        steps = sum(a == b for a, b in zip(want[:-3], got, strict=False)) / (n - 3)
        last = len(got) >= 3 and got[-3:] == want[-3:]
        return 0.4 * steps * (len(got) == n) + 0.6 * last


class Guess(Task):
    """Several turns: the hidden digit is guessed, the game says higher, lower or found."""

    P, T, turns, sym = 4, 12, True, 9

    def one(self, g, mode):
        lo, hi = {"othertokens": (7, 8), "short": (0, 2), "long": (6, 8)}.get(mode, (0, 8))
        x = int(g.integers(lo, hi + 1))
        tell = D + (x // 3 if mode != "othertask" else 2 - x // 3)
        return self.finish([OPA, tell, SEP], [D + x], mode)

    def reply(self, row, got):
        """What the game says after the newest token."""
        if not D <= got[-1] < D + 10:
            return []
        x = row["want"][0]
        return [OK if got[-1] == x else HI if x > got[-1] else LO]

    def demo(self, row, g):
        x, lo, hi, out, mask = row["want"][0] - D, 0, 8, [], []
        for _ in range(5):
            y = int(g.integers(lo, hi + 1))
            out += [D + y]
            mask += [1]
            out += self.reply(row, out)
            mask += [0]
            if y == x:
                out += [EOS]
                mask += [1]
                break
            lo, hi = (y + 1, hi) if x > y else (lo, y - 1)
        return out[: self.T], mask[: self.T]

    def score(self, want, got):
        asked = [t for t in got if D <= t < D + 10]
        if want[0] not in asked:
            return 0.0
        return max(0.1, 1 - 0.25 * asked.index(want[0])) * (1.0 if got[-1] == EOS else 0.5)


class Lookup(Task):
    """Several turns: ask a table twice, following what it says, and answer with the last."""

    P, T, turns, sym = 4, 10, True, 9

    def one(self, g, mode):
        n = {"othertokens": 3, "short": 2}.get(mode, self.sym)
        table = g.permutation(self.sym).tolist()
        k = int(g.integers(self.sym - n, self.sym)) if mode == "othertokens" else int(g.integers(0, n))
        a = table[k]
        b = table[a]
        hops = 2 if mode != "othertask" else 1
        return {**self.finish([OPA, D + k, SEP], [D + b if hops == 2 else D + a, EOS], mode), "table": table}

    def reply(self, row, got):
        if len(got) >= 2 and got[-2] == TOOL and D <= got[-1] < D + self.sym:
            return [SEP, D + row["table"][got[-1] - D]]
        return []

    def demo(self, row, g):
        out, mask = [], []
        key = row["prompt"][1] if len(row["prompt"]) > 1 and D <= row["prompt"][1] < D + 9 else D
        for _ in range(2):
            out += [TOOL, key]
            mask += [1, 1]
            out += self.reply(row, out)
            mask += [0, 0]
            key = out[-1]
        return (out + row["want"])[: self.T], ([*mask, 1, 1])[: self.T]

    def score(self, want, got):
        calls = sum(a == TOOL for a in got)
        if got[-2:] == want:
            return 1.0 if calls == 2 else 0.7
        return 0.2 if calls == 2 and got[-1] == EOS else 0.0


# ---------------------------------------------------------------- policies


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = None  # dtype that activations pass through
        self.drop = 0.0
        self.shift = 0  # of positions
        self.scale = 1.0  # of attention, or of a layer's output
        self.hid_noise = 0.0

    def r(self, x):
        if self.act == "int5":
            s = x.abs().amax(-1, keepdim=True) / 4 + 1e-9
            return torch.round(x / s) * s
        return x if self.act is None else x.to(self.act).float()

    def forward(self, x, hidden=False):
        h = self.body(x)
        if self.drop:
            h = F.dropout(h, self.drop, True)
        y = self.head(h).float()
        y = torch.cat([torch.full_like(y[..., :1], -1e4), y[..., 1:]], -1)
        return (y, h) if hidden else y


class Gru(Policy):
    def __init__(self, d=24, n=72):
        super().__init__()
        self.emb, self.gru, self.head = nn.Embedding(V, d), nn.GRU(d, n, batch_first=True), nn.Linear(n, V)
        self.width = n

    def body(self, x):
        e = self.r(self.emb(x))
        if self.shift:
            e = torch.roll(e, self.shift, 1)
        return self.r(self.gru(e)[0] * self.scale)


class Tfm(Policy):
    def __init__(self, d=36, layers=2, heads=3, ffn=72):
        super().__init__()
        self.emb, self.pos, self.heads, self.layers = nn.Embedding(V, d), nn.Embedding(40, d), heads, layers
        nn.init.normal_(self.emb.weight, std=0.5)
        nn.init.normal_(self.pos.weight, std=0.5)
        self.qkv = nn.ModuleList(nn.Linear(d, 3 * d) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(d, ffn) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(ffn, d) for _ in range(layers))
        self.n1 = nn.ModuleList(nn.LayerNorm(d) for _ in range(layers))
        self.n2 = nn.ModuleList(nn.LayerNorm(d) for _ in range(layers))
        self.nf, self.head, self.width = nn.LayerNorm(d), nn.Linear(d, V), d

    def body(self, x):
        B, L = x.shape
        h = self.emb(x) + self.pos((torch.arange(L) + self.shift).clamp(0, 39))
        for i in range(self.layers):
            q, k, v = self.r(self.qkv[i](self.n1[i](h))).view(B, L, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            a = F.scaled_dot_product_attention(q * self.scale, k, v, is_causal=True)
            h = h + self.out[i](a.transpose(1, 2).reshape(B, L, -1))
            h = self.r(h + self.down[i](F.gelu(self.up[i](self.n2[i](h)))))
        return self.nf(h)


class Window(Policy):
    def __init__(self, w=16, d=14, n=112):
        super().__init__()
        self.w, self.emb, self.fc, self.mid, self.head = (
            w,
            nn.Embedding(V, d),
            nn.Linear(w * d, n),
            nn.Linear(n, n // 2),
            nn.Linear(n // 2, V),
        )
        nn.init.normal_(self.emb.weight, std=0.6)
        self.width = n // 2

    def body(self, x):
        e = self.r(self.emb(F.pad(x, (self.w - 1 + self.shift, 0))[:, : x.shape[1] + self.w - 1]))
        u = e.unfold(1, self.w, 1).transpose(2, 3).reshape(*x.shape, -1)
        return self.r(F.relu(self.mid(self.r(F.relu(self.fc(u)) * self.scale))))


class Ssm(Policy):
    def __init__(self, d=40, blocks=2):
        super().__init__()
        self.emb, self.blocks = nn.Embedding(V, d), blocks
        self.a = nn.ParameterList(nn.Parameter(torch.linspace(-2, 5, d)) for _ in range(blocks))
        self.inp = nn.ModuleList(nn.Linear(d, d) for _ in range(blocks))
        self.gate = nn.ModuleList(nn.Linear(d, d) for _ in range(blocks))
        self.mix = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(blocks)
        )
        self.norm = nn.ModuleList(nn.LayerNorm(d) for _ in range(blocks))
        self.head, self.width = nn.Linear(d, V), d

    def body(self, x):
        h, L = self.emb(x), x.shape[1]
        if self.shift:
            h = torch.roll(h, self.shift, 1)
        t = torch.arange(L)
        gap = (t[:, None] - t[None]).clamp(min=0).float()
        low = torch.tril(torch.ones(L, L))
        for i in range(self.blocks):
            a = torch.sigmoid(self.a[i])
            kern = torch.exp(gap[..., None] * torch.log(a)) * low[..., None]
            z = self.norm[i](h)
            u = self.inp[i](z) * torch.sigmoid(self.gate[i](z))
            s = self.r(torch.einsum("tsd,bsd->btd", kern, u)) * self.scale
            h = self.r(h + s + self.mix[i](s))
        return h


# ---------------------------------------------------------------- optimizer of our own


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(
                    torch.sign(b1 * m + (1 - b1) * p.grad), alpha=-group["lr"]
                )
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


def make_optimizer(kind, params, k):
    params = list(params)
    if kind == "adam":
        return torch.optim.Adam(params, lr=k.lr, betas=k.betas, eps=k.eps)
    if kind == "adamw":
        return torch.optim.AdamW(params, lr=k.lr, betas=k.betas, eps=k.eps, weight_decay=k.wd)
    if kind == "sgd":
        return torch.optim.SGD(params, lr=k.lr, momentum=k.betas[0], weight_decay=k.wd)
    if kind == "rmsprop":
        return torch.optim.RMSprop(params, lr=k.lr, alpha=k.betas[1], eps=k.eps)
    return Lion(params, k.lr, k.betas, k.wd)


def schedule(kind, s, n):
    if kind == "cosine":
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * s / n))
    if kind == "linear":
        return 1 - 0.9 * s / n
    if kind == "warmup":
        return min(1.0, s / 10)
    if kind == "wsd":
        return min(1.0, s / 5) * (1 if s < 0.75 * n else max(0.1, 1 - (s - 0.75 * n) / (0.25 * n)))
    return 1.0


# ---------------------------------------------------------------- sampling and scoring


def pad_prompts(rows, P):
    x = torch.zeros(len(rows), P, dtype=torch.long)
    for i, row in enumerate(rows):
        p = row["prompt"][-P:]
        x[i, P - len(p) :] = torch.tensor(p)
    return x


@torch.no_grad()
def generate(
    model,
    task,
    rows,
    seed,
    *,
    limit,
    temp=1.0,
    top_p=1.0,
    bias=None,
    report="processed",
    stops=(),
    limits=None,
    noise=0.0,
    greedy=False,
    declared_temp=None,
):
    """Sample responses: tokens [B, T], logprobs, mask, lengths, reasons."""
    g = torch.Generator().manual_seed(seed)
    B, T = len(rows), task.T
    x = pad_prompts(rows, task.P)
    toks, lps, mask = torch.zeros(B, T, dtype=torch.long), torch.zeros(B, T), torch.zeros(B, T)
    lens, why, done = np.zeros(B, int), [None] * B, np.zeros(B, bool)
    queue = [[] for _ in range(B)]
    limits = np.minimum(np.full(B, limit) if limits is None else np.asarray(limits), T)
    for t in range(int(limits.max())):
        y = model(x)[:, -1]
        if bias is not None:
            y = y + bias
        if noise:
            y = y + noise * torch.randn(y.shape, generator=g)
        lp = F.log_softmax(y / temp, -1)
        raw = F.log_softmax(y / (declared_temp or temp), -1)
        if top_p < 1:
            q, order = lp.exp().sort(-1, descending=True)
            cut = (q.cumsum(-1) - q) >= top_p
            lp = lp.masked_fill(torch.zeros_like(cut).scatter(1, order, cut), -math.inf).log_softmax(-1)
        a = lp.argmax(-1) if greedy else torch.multinomial(lp.exp(), 1, generator=g)[:, 0]
        told = (raw if report == "raw" else lp).gather(1, a[:, None])[:, 0]
        for i in range(B):
            if done[i]:
                a[i] = PAD
                continue
            forced = bool(queue[i])
            if forced:
                a[i] = queue[i].pop(0)
            toks[i, t] = a[i]
            lps[i, t], mask[i, t] = (0.0, 0.0) if forced else (told[i], 1.0)
            lens[i] = t + 1
            token = int(a[i])
            if not forced:
                if token == EOS or (token in stops and t > 0):
                    done[i], why[i] = True, "stop"
                elif task.turns:
                    queue[i] = task.reply(rows[i], toks[i, : t + 1].tolist())
            if not done[i] and t + 1 >= limits[i]:
                done[i], why[i] = True, "length"
        if done.all():
            break
        x = torch.cat([x, a[:, None]], 1)
    return toks, lps, mask, lens, why


def token_logps(model, prompts, toks, temp=1.0, hidden=False):
    x = torch.cat([prompts, toks], 1)[:, :-1]
    y, h = model(x, hidden=True)
    P = prompts.shape[1]
    lp = F.log_softmax(y[:, P - 1 :] / temp, -1)
    taken = lp.gather(2, toks[..., None])[..., 0]
    ent = -(lp.exp() * lp).sum(-1)
    return (taken, ent, h[:, P - 1 :]) if hidden else (taken, ent)


@torch.no_grad()
def evaluate(model, task, rows, seed=999, greedy=False):
    toks, _, _, lens, _ = generate(model, task, rows, seed, limit=task.T, greedy=greedy)
    return float(np.mean([task.score(r["want"], toks[i, : lens[i]].tolist()) for i, r in enumerate(rows)]))


# ---------------------------------------------------------------- pretraining


@torch.enable_grad()
def supervised(task, model, seed, target, *, steps=3000, lr=3e-3, mode=None, log=None):
    """Train on demonstrations until the sampled policy scores `target`."""
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    probe = task.sample(5_000_000, 96, mode)
    g = np.random.default_rng(seed)
    for s in range(steps):
        rows = task.sample(seed * 7919 + 10_000_000 + s, 96, mode)
        toks, mask = torch.zeros(96, task.T, dtype=torch.long), torch.zeros(96, task.T)
        for i, row in enumerate(rows):
            out, m = task.demo(row, g) if task.turns else (row["want"], [1] * len(row["want"]))
            toks[i, : len(out)] = torch.tensor(out)
            mask[i, : len(out)] = torch.tensor(m, dtype=torch.float)
        lp, _ = token_logps(model, pad_prompts(rows, task.P), toks)
        loss = -(lp * mask).sum() / mask.sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if s % 20 == 19:
            e = evaluate(model, task, probe)
            if log and s % 200 == 199:
                print(log, s + 1, round(e, 3), round(loss.item(), 3), flush=True)
            if e >= target:
                break
    return s + 1, e


cache = Path(".weights")
"""Where first weights are kept: in the folder of the runs."""


def pretrained(fam, kind="base"):
    """The family's first weights; `half` is an earlier checkpoint, `other` one of another task."""
    cache.mkdir(parents=True, exist_ok=True)
    file = cache / f"{fam.name}-{kind}.pt"
    torch.manual_seed(zlib.crc32(f"{fam.name}{kind if kind == 'other' else ''}".encode()) % 2**31)
    model = fam.model()
    if kind == "random":
        return model
    if not file.exists():
        target = {"base": fam.start, "half": fam.start * 0.5, "other": fam.start}[kind]
        n, e = supervised(
            fam.task, model, 1, target, mode="othertask" if kind == "other" else None, log=f"  pretrain {fam.name}"
        )
        print(
            f"  pretrained {fam.name} {kind}: {n} steps, {e:.3f}, {sum(p.numel() for p in model.parameters())} parameters",
            flush=True,
        )
        torch.save(model.state_dict(), file)
    model.load_state_dict(torch.load(file))
    return model


# ---------------------------------------------------------------- the trainer


class Knobs:
    """What holds at one step. Those in SETTINGS are settings that a team would know of; the rest are not."""

    def __init__(self, **given):
        self.__dict__.update(
            lr=1e-3,
            betas=(0.9, 0.99),
            eps=1e-8,
            clip=1.0,
            wd=0.0,
            kl=0.0,
            ent=0.0,
            limit=None,
            temp=1.0,
            clip_low=0.2,
            clip_high=0.2,
            epochs=1,
            minibatches=1,
            groups=16,
            samples=4,
            overlong=0.0,
            length_coef=0.0,
            top_p=1.0,
            gamma=1.0,
            lam=0.95,
            vf=0.5,
            kl_in_reward=0.0,
            target_entropy=None,
            # not settings
            schedule_mul=1.0,
            hidden_lr=1.0,
            hidden_clip=True,
            grad_mul=1.0,
            reset_optimizer=False,
            half_state=None,
            eng=None,
            eng_temp=None,
            eng_top_p=1.0,
            eng_bias=None,
            eng_noise=0.0,
            report="processed",
            lag=0,
            partial=None,
            stops=(),
            limits=None,
            reward_fn=None,
            pair_fn=None,
            adv_fn=None,
            mode=None,
            remix=None,
            ref=None,
            ref_temp=1.0,
            drop=0.0,
            frozen=None,
            lost=None,
            corrupt=None,
            mask_fn=None,
            grad_fn=None,
            toks_fn=None,
            agg=None,
            ent_sign=1.0,
            load=None,
            group_shift=0,
            after=None,
            kl_sign=1.0,
            told_limit=None,
            old_fn=None,
        )
        self.__dict__.update(given)

    def copy(self):
        return Knobs(**self.__dict__)


ALL = [
    "lr",
    "betas",
    "eps",
    "clip",
    "wd",
    "kl",
    "ent",
    "limit",
    "temp",
    "clip_low",
    "clip_high",
    "epochs",
    "minibatches",
    "groups",
    "samples",
    "overlong",
]
"""What most families record; SETTINGS has the rest."""

SETTINGS = [
    *ALL,
    "length_coef",
    "top_p",
    "gamma",
    "lam",
    "vf",
    "kl_in_reward",
    "target_entropy",
]


class Family:
    def __init__(
        self,
        name,
        task,
        model,
        start,
        algo,
        opt,
        sched,
        steps,
        knobs,
        names,
        hyper=None,
        hyper_names=None,
        *,
        greedy=False,
        scale=(1.0, 0.0),
        denominator="train",
        aggregation="token_mean",
        version=True,
        evals=0,
        eval_name=None,
        eval_own=True,
        reference=False,
        entropy=False,
        current=False,
        contracts=False,
        base_eng="bf16",
        plan_lag=0,
        loss=True,
        add_opt=False,
        extra=None,
        first=1,
    ):
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})
        self.hyper_names = hyper_names or {}
        self.extra = extra or {}


class Run:
    def __init__(self, fam, seed, fault=None, begin=None, ramp=0):
        self.fam, self.seed, self.fault, self.begin, self.ramp, self.memo = fam, seed, fault, begin, ramp, {}

    def once(self, key):
        if key in self.memo:
            return False
        self.memo[key] = True
        return True

    def knobs(self, s):
        k = self.fam.knobs.copy()
        k.limit = k.limit or self.fam.task.T
        if self.fault and s >= self.begin:
            r = 1.0 if not self.ramp else min(1.0, (s - self.begin + 1) / self.ramp)
            self.fault(k, r, s, self)
        return k


def engine_model(fam, k, weights, step, run):
    """The engine: the same policy with its own numerics."""
    m = run.engine
    base = weights
    if k.partial is not None:
        held = run.memo.setdefault("held", {n: w.clone() for n, w in weights.items()})
        base = {n: (held[n] if k.partial(n) else w) for n, w in weights.items()}
    out = {}
    for n, w in base.items():
        w = w.clone()
        if fam.base_eng == "bf16":
            w = w.bfloat16().float()
        elif fam.base_eng == "fp16":
            w = w.half().float()
        out[n] = w
    m.load_state_dict(out)
    m.act = torch.bfloat16 if fam.base_eng == "bf16act" else None
    m.shift, m.scale = 0, 1.0
    if k.eng:
        with torch.no_grad():
            k.eng(m)
    return m


def quantised(bits, match=""):
    def f(m):
        for n, w in m.named_parameters():
            if w.dim() > 1 and match in n:
                s = w.abs().amax() / (2 ** (bits - 1) - 1)
                w.copy_(torch.round(w / s) * s)

    return f


def score_rows(fam, rows, toks, lens):
    return np.array([fam.task.score(r["want"], toks[i, : lens[i]].tolist()) for i, r in enumerate(rows)])


def advantages(fam, k, rewards, group, run, values, mask):
    """[B, T] advantages and, of PPO, returns."""
    r = torch.tensor(rewards, dtype=torch.float)
    G = r.view(-1, k.samples)
    if fam.algo == "ppo":
        B, T = mask.shape
        adv, ret = torch.zeros(B, T), torch.zeros(B, T)
        for i in range(B):
            where = torch.nonzero(mask[i])[:, 0].tolist()
            nxt, acc = 0.0, 0.0
            for j, t in enumerate(reversed(where)):
                reward = r[i] if j == 0 else 0.0
                delta = reward + k.gamma * nxt - values[i, t]
                acc = delta + k.gamma * k.lam * acc
                adv[i, t], ret[i, t], nxt = acc, acc + values[i, t], values[i, t]
        a = adv[mask > 0]
        return (adv - a.mean()) / (a.std() + 1e-6) * mask, ret
    if fam.algo in ("grpo", "gspo", "cispo"):
        a = (G - G.mean(1, keepdim=True)) / (G.std(1, keepdim=True) + 1e-4)
    elif fam.algo == "drgrpo":
        a = G - G.mean(1, keepdim=True)
    elif fam.algo == "rloo":
        a = G - (G.sum(1, keepdim=True) - G) / (k.samples - 1)
    elif fam.algo == "rpp":
        a = G - G.mean(1, keepdim=True)
        a = a / (a.std() + 1e-6)
    else:
        base = run.memo.setdefault("baseline", float(r.mean()))
        a = G - base
        run.memo["baseline"] = 0.9 * base + 0.1 * float(r.mean())
    return a.reshape(-1)[:, None] * mask, None


def aggregate(how, per, mask, T):
    if how == "token_mean":
        return (per * mask).sum() / mask.sum().clamp(min=1)
    if how == "sequence_mean":
        return ((per * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
    if how == "sequence_sum":
        return (per * mask).sum(1).mean()
    return (per * mask).sum() / (mask.shape[0] * T)  # constant


def policy_loss(fam, k, cur, old, adv, mask):
    d = (cur - old) * mask
    if fam.algo == "gspo":
        s = d.sum(1) / mask.sum(1).clamp(min=1)
        ratio = torch.exp(s)[:, None].expand_as(d)
    else:
        ratio = torch.exp(d.clamp(-20, 20))
    clipped = ((ratio > 1 + k.clip_high) | (ratio < 1 - k.clip_low)).float()
    if fam.algo == "cispo":
        per = -(ratio.detach().clamp(max=k.clip_high) * adv * cur)
    elif fam.algo in ("reinforce", "rloo") and fam.denominator == "current":
        per = -adv * cur
    else:
        per = -torch.minimum(ratio * adv, ratio.clamp(1 - k.clip_low, 1 + k.clip_high) * adv)
    return per, float((clipped * mask).sum() / mask.sum().clamp(min=1))


def hyper_values(fam, k, names):
    out = {}
    for n in names:
        v = getattr(k, n)
        called = fam.hyper_names.get(n, n)
        if n == "betas":
            out[called + "1" if called == "betas" else called + "_1"] = v[0]
            out[called + "2" if called == "betas" else called + "_2"] = v[1]
        else:
            out[called] = v if v is not None else "None"
    return out


def train(run, folder):
    fam, task = run.fam, run.fam.task
    torch.manual_seed(run.seed * 1009 + 7)
    model = pretrained(fam)
    run.engine = fam.model()
    base_reference = copy.deepcopy(model)
    run.base = base_reference
    value = nn.Linear(model.width, 1) if fam.algo == "ppo" else None
    if value is not None:
        nn.init.zeros_(value.weight)
        nn.init.zeros_(value.bias)
    k = run.knobs(1)
    params = list(model.parameters())
    opt = make_optimizer(fam.opt, params, k)
    vopt = torch.optim.Adam(value.parameters(), lr=1e-2) if value is not None else None
    fixed = task.sample(77_000_000, 128)
    evaluations, history, updates = [], deque(maxlen=100), 0

    def snap():
        return {n: w.detach().clone() for n, w in model.state_dict().items()}

    history.append((0, snap()))
    run.history = history
    every = max(2, fam.steps // 30)
    names, first = fam.names, fam.first
    rec = Recorder(folder, force=True)
    settings = list(fam.hyper or ())
    declared = {}
    if fam.contracts:
        rec.add_contract(
            "rollout",
            {
                "engine": "tiny",
                "engine_version": "0.3",
                "dtype": "bfloat16" if "bf16" in fam.base_eng else "float32",
                "temperature": fam.knobs.temp,
                "device": "cpu",
            },
        )
        rec.add_contract(
            "train",
            {
                "engine": "torch",
                "engine_version": torch.__version__,
                "dtype": "float32",
                "temperature": fam.knobs.temp,
                "device": "cpu",
            },
        )
    if fam.loss:
        kind = {"cispo": "cispo"}.get(fam.algo, "reinforce" if fam.denominator == "current" else "ppo_clip")
        rec.add_loss(
            Loss(
                kind=kind,
                level="sequence_mean" if fam.algo == "gspo" else "token",
                clip_low=fam.knobs.clip_low,
                clip_high=fam.knobs.clip_high,
                denominator=fam.denominator,
                aggregation=fam.aggregation,
                max_tokens=task.T if fam.aggregation == "constant" else None,
                kl_coefficient=fam.knobs.kl,
            )
        )
    if fam.hyper is not None:
        values = hyper_values(fam, k, settings) | fam.extra
        rec.add_hyperparameters(values)
        declared = values
    put = {}
    log_alpha = 0.0
    for s in range(1, fam.steps + 1):
        k = run.knobs(s)
        step = s - 1 + first
        if fam.hyper is not None and s > 1:
            now = hyper_values(fam, k, settings)
            new = {n: v for n, v in now.items() if declared.get(n) != v}
            if new:
                rec.add_hyperparameters(new, step=step)
                declared = declared | new
        # events
        if k.load is not None:
            with torch.no_grad():
                k.load(model, run)
            if fam.plan_lag == 0:
                history.append((updates, snap()))
        if k.reset_optimizer and (k.reset_optimizer != "once" or run.once("reset")):
            opt = make_optimizer(fam.opt, params, k)
        if k.half_state is not None:
            k.half_state(opt, run)
        # sampling
        lag = 0 if callable(k.lag) else max(fam.plan_lag, k.lag)
        if callable(k.lag):
            version, weights = k.lag(history, run)
        else:
            version, weights = history[max(0, len(history) - 1 - lag)]
        eng = engine_model(fam, k, weights, s, run)
        rows = task.sample(run.seed * 1_000_003 + s, k.groups, k.mode if not callable(k.mode) else None)
        if k.remix is not None:
            rows = k.remix(rows, task, run.seed * 1_000_003 + s, np.random.default_rng(s))
        full = [r for r in rows for _ in range(k.samples)]
        limits = k.limits(full) if k.limits else None
        eng_temp = k.eng_temp or k.temp
        toks, rlp, mask, lens, why = generate(
            eng,
            task,
            full,
            run.seed * 31337 + s,
            limit=k.limit,
            temp=eng_temp,
            top_p=min(k.eng_top_p, k.top_p),
            bias=k.eng_bias,
            report=k.report,
            stops=k.stops,
            limits=limits,
            noise=k.eng_noise,
            declared_temp=k.temp,
        )
        g = np.random.default_rng(run.seed * 77 + s)
        seen = toks if k.toks_fn is None else k.toks_fn(toks, lens, g)
        B = len(full)
        group = np.repeat(np.arange(k.groups), k.samples)
        true = score_rows(fam, full, seen, lens)
        rewards = fam.scale[0] * true + fam.scale[1]
        if k.reward_fn is not None:
            rewards = k.reward_fn(rewards, true, full, seen, lens, why, g, fam.scale)
        cut = np.array([w == "length" for w in why])
        rewards = rewards - k.overlong * cut + k.length_coef * lens
        toks_t = toks
        prompts = pad_prompts(full, task.P)
        # scoring
        model.drop = k.drop
        with torch.no_grad():
            tlp, tent, hid = token_logps(model, prompts, toks_t, k.temp, hidden=True)
            values = value(hid)[..., 0] if value is not None else None
            ref_lp = None
            if fam.reference or k.kl > 0 or k.kl_in_reward:
                ref = k.ref(run) if k.ref is not None else base_reference
                ref_lp, _ = token_logps(ref, prompts, toks_t, k.temp * k.ref_temp)
        if k.kl_in_reward:
            rewards = rewards - k.kl_in_reward * np.array(((tlp - ref_lp) * mask).sum(1))
        if k.pair_fn is not None:
            rewards = k.pair_fn(rewards, g, k.samples)
        adv, ret = advantages(fam, k, rewards, group, run, values, mask)
        if k.adv_fn is not None:
            adv = k.adv_fn(adv, mask, rewards, g, k.samples) * mask
        lmask = mask if k.mask_fn is None else k.mask_fn(mask, toks_t, lens)
        # record
        L = [int(n) for n in lens]

        def cutrow(x, i, L=L):
            return x[i, : L[i]].tolist()

        fields = dict(
            step=step,
            prompt_ids=[r["prompt"][-task.P :] for r in full],
            response_ids=[cutrow(toks, i) for i in range(B)],
            group_ids=[f"{step}-{x}" for x in group],
            reward=[float(x) for x in rewards],
        )
        if fam.algo == "ppo":
            max(L)
            fields["advantage"] = [cutrow(adv, i) for i in range(B)]
        else:
            at = [int(torch.nonzero(mask[i])[0, 0]) if mask[i].any() else 0 for i in range(B)]
            fields["advantage"] = [float(adv[i, at[i]]) for i in range(B)]
            if k.adv_fn is not None and getattr(k.adv_fn, "per_token", False):
                fields["advantage"] = [cutrow(adv, i) for i in range(B)]
        if task.turns or k.mask_fn is not None:
            fields["response_mask"] = [
                [int(x) for x in cutrow(mask if not getattr(k.mask_fn, "told", False) else lmask, i)] for i in range(B)
            ]
        if fam.version:
            fields["policy_version"] = version if not getattr(k.lag, "silent", False) else updates
        if "temp" in settings:
            fields["temperature"] = k.temp
        if "top_p" in settings:
            fields["top_p"] = k.top_p
        if "limit" in settings:
            fields["max_tokens"] = int(k.told_limit or k.limit)
        if fam.algo not in ("rpp",):
            fields["finish_reason"] = why
        batch = rec.add_sequences(**fields)
        sc = [[int(x) for x in cutrow(mask, i)] for i in range(B)]
        extra = {"scored_mask": sc} if task.turns else {}

        def clampz(x, i):
            return [min(0.0, v) for v in cutrow(x, i)]

        rec.add_scores("rollout", batch, logprobs=[clampz(rlp, i) for i in range(B)], **extra)
        more = {"entropy": [cutrow(tent, i) for i in range(B)]} if fam.entropy else {}
        if fam.version:
            more["policy_version"] = updates
        rec.add_scores("train", batch, logprobs=[clampz(tlp, i) for i in range(B)], **more, **extra)
        if fam.reference and ref_lp is not None:
            rec.add_scores(
                "reference",
                batch,
                logprobs=[clampz(ref_lp, i) for i in range(B)],
                **({"policy_version": 0} if fam.version else {}),
                **extra,
            )
        # updates
        old = tlp if fam.denominator != "rollout" else rlp
        if k.old_fn is not None:
            old = k.old_fn(old)
        for group_ in opt.param_groups:
            group_["lr"] = k.lr * schedule(fam.sched, s, fam.steps) * k.hidden_lr
            if "betas" in group_:
                group_["betas"] = k.betas
            if "alpha" in group_:
                group_["alpha"] = k.betas[1]
            if "momentum" in group_:
                group_["momentum"] = k.betas[0]
            if "eps" in group_:
                group_["eps"] = k.eps
            if "weight_decay" in group_:
                group_["weight_decay"] = k.wd
        stat = {n: [] for n in ("loss", "pg", "grad", "clipfrac", "klref", "ent", "approx_kl", "vloss", "ratio")}
        for epoch in range(k.epochs):
            perm = np.random.default_rng(run.seed * 13 + s * 101 + epoch).permutation(B)
            for chunk in np.array_split(perm, k.minibatches):
                ix = torch.tensor(chunk)
                m = lmask[ix]
                cur, ent, hid = token_logps(model, prompts[ix], toks_t[ix], k.temp, hidden=True)
                if fam.current and epoch == 0:
                    rec.add_scores(
                        "current",
                        batch,
                        rows=[int(x) for x in chunk],
                        logprobs=[[min(0.0, v) for v in cur[j].detach()[: L[i]].tolist()] for j, i in enumerate(chunk)],
                        **({"scored_mask": [sc[i] for i in chunk]} if task.turns else {}),
                        **({"policy_version": updates} if fam.version else {}),
                    )
                per, clipfrac = policy_loss(fam, k, cur, old[ix], adv[ix], m)
                how = k.agg or fam.aggregation
                pg = aggregate(how, per, m, task.T)
                loss = pg
                e = aggregate("token_mean", ent, m, task.T)
                if k.target_entropy is not None:
                    log_alpha = min(
                        3.0,
                        max(-7.0, log_alpha + 0.1 * (k.target_entropy - float(e)) / max(1, k.minibatches * k.epochs)),
                    )
                    loss = loss - 0.1 * (math.exp(log_alpha) - 1) * e
                if k.ent:
                    loss = loss - k.ent_sign * k.ent * e
                klref = torch.zeros(())
                if ref_lp is not None:
                    d = (ref_lp[ix] - cur).clamp(-20, 8)
                    klref = aggregate("token_mean", torch.exp(d) - d - 1, m, task.T)
                    if k.kl:
                        loss = loss + k.kl_sign * k.kl * klref
                if value is not None:
                    v = value(hid.detach())[..., 0]
                    vloss = aggregate("token_mean", (v - ret[ix]) ** 2, m, task.T)
                    vopt.zero_grad()
                    (k.vf * vloss).backward()
                    vopt.step()
                    stat["vloss"].append(float(vloss))
                opt.zero_grad()
                (loss * k.grad_mul).backward()
                with torch.no_grad():
                    if k.frozen is not None:
                        for n, p in model.named_parameters():
                            if k.frozen(n):
                                p.grad = torch.zeros_like(p)
                    if k.grad_fn is not None:
                        k.grad_fn(model, g)
                norm = float(torch.nn.utils.clip_grad_norm_(params, k.clip if k.clip and k.hidden_clip else 1e9))
                if math.isfinite(norm):
                    opt.step()
                for n, x in (
                    ("loss", loss),
                    ("pg", pg),
                    ("grad", norm),
                    ("clipfrac", clipfrac),
                    ("klref", klref),
                    ("ent", e),
                    ("approx_kl", ((old[ix] - cur) * m).sum() / m.sum().clamp(min=1)),
                    ("ratio", (torch.exp(((cur - old[ix]) * m).clamp(-20, 5)) * m).sum() / m.sum().clamp(min=1)),
                ):
                    stat[n].append(float(x))
                updates += 1
        if k.corrupt is not None:
            with torch.no_grad():
                k.corrupt(model, g, run)
        model.drop = 0.0
        history.append((updates, snap()))
        m = {n: float(np.mean(x)) for n, x in stat.items() if x}
        md = ((tlp - rlp) * mask).abs()
        m |= {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "reward_max": float(rewards.max()),
            "len": float(lens.mean()),
            "len_max": float(lens.max()),
            "cut": float(cut.mean()),
            "lr": opt.param_groups[0]["lr"],
            "adv_mean": float(adv[mask > 0].mean()),
            "adv_max": float(adv.max()),
            "adv_std": float(adv[mask > 0].std()),
            "solved": float((rewards >= fam.scale[0] * 0.99 + fam.scale[1]).mean()),
            "diff": float(md.sum() / mask.sum()),
            "zero": float((rewards.reshape(-1, k.samples).std(1) < 1e-6).mean()),
            "kl_coef": k.kl,
            "prompt_len": float(np.mean([len(r["prompt"]) for r in full])),
            "tokens": float(mask.sum()),
            "batch": float(B),
        }
        if value is not None:
            m["value"] = float((values * mask).sum() / mask.sum())
        put = {called: m[n] for n, called in names.items() if n in m}
        if s % every == 0 or s == fam.steps:
            e = evaluate(model, task, fixed, greedy=fam.greedy)
            evaluations.append(e)
            if fam.evals and len(evaluations) % fam.evals == 0:
                shown = fam.scale[0] * e + fam.scale[1] if not fam.eval_own else e
                put[fam.eval_name] = shown
        rec.add_metrics(step, put)
        if fam.add_opt and fam.opt in ("adam", "adamw"):
            rec.add_optimizer(step, opt)
    rec.close()
    return evaluations


def kept(x):
    n = max(1, len(x) // 5)
    best = max(float(np.mean(x[i : i + n])) for i in range(len(x) - n + 1))
    return float(np.mean(x[-n:])) / max(best, 1e-9)


# ---------------------------------------------------------------- families

VERL = {
    "reward": "critic/rewards/mean",
    "reward_max": "critic/rewards/max",
    "adv_mean": "critic/advantages/mean",
    "adv_max": "critic/advantages/max",
    "pg": "actor/pg_loss",
    "grad": "actor/grad_norm",
    "clipfrac": "actor/pg_clipfrac",
    "approx_kl": "actor/ppo_kl",
    "ent": "actor/entropy",
    "klref": "actor/kl_loss",
    "lr": "actor/lr",
    "len": "response_length/mean",
    "len_max": "response_length/max",
    "cut": "response_length/clip_ratio",
    "prompt_len": "prompt_length/mean",
}
TRL = {
    "loss": "loss",
    "reward": "train/reward",
    "reward_std": "train/reward_std",
    "grad": "train/grad_norm",
    "lr": "train/learning_rate",
    "len": "train/completions/mean_length",
    "cut": "train/completions/clipped_ratio",
    "zero": "train/frac_reward_zero_std",
    "ent": "train/entropy",
}
PPO = {
    "reward": "ppo/mean_scores",
    "reward_std": "ppo/std_scores",
    "vloss": "ppo/loss/value",
    "pg": "ppo/loss/policy",
    "loss": "ppo/loss/total",
    "value": "ppo/val/mean",
    "ent": "objective/entropy",
    "approx_kl": "ppo/policy/approxkl",
    "clipfrac": "ppo/policy/clipfrac",
    "grad": "ppo/grad_norm",
    "lr": "ppo/learning_rate",
}
BARE = {"reward": "return", "loss": "loss", "len": "episode_len", "grad": "gnorm"}
GSPO = {
    "reward": "rollout/reward",
    "solved": "rollout/pass_at_1",
    "len": "rollout/response_len",
    "clipfrac": "train/clip_frac",
    "grad": "train/gnorm",
    "loss": "train/loss",
    "ent": "train/ent",
    "lr": "train/lr",
}
CISPO = {
    "reward": "reward/total",
    "reward_std": "reward/std",
    "klref": "train/kl_to_ref",
    "kl_coef": "train/kl_beta",
    "ent": "train/policy_entropy",
    "grad": "train/grad_norm",
    "ratio": "train/is_ratio_mean",
    "lr": "train/lr",
    "tokens": "perf/total_num_tokens",
}
DRG = {"reward": "reward_mean", "solved": "acc", "len": "resp_len", "loss": "policy_loss", "zero": "dead_groups"}
AGENT = {
    "reward": "env/return_mean",
    "solved": "env/success",
    "len": "env/tokens",
    "cut": "env/timeouts",
    "diff": "sampling_logp_difference/mean",
    "grad": "optim/grad_norm",
    "lr": "optim/lr",
    "ent": "optim/entropy",
    "pg": "optim/pg",
}
RPP = {
    "reward": "train/mean_reward",
    "adv_std": "train/adv_std",
    "klref": "train/kl",
    "loss": "train/actor_loss",
    "grad": "train/norm",
    "len": "train/response_length",
}
ASYNC = {
    "reward": "orchestrator/reward",
    "len": "orchestrator/seq_len",
    "ratio": "trainer/importance_ratio",
    "approx_kl": "trainer/mismatch_kl",
    "ent": "trainer/entropy",
    "grad": "trainer/grad_norm",
    "loss": "trainer/loss",
    "lr": "trainer/lr",
    "batch": "orchestrator/batch",
}


FAMILIES = {
    f.name: f
    for f in [
        Family(
            "revgru",
            Reverse(),
            Gru,
            0.5,
            "grpo",
            "adam",
            "const",
            100,
            Knobs(lr=2e-3, groups=16, samples=6, minibatches=2, kl=0.001, clip_high=0.28),
            VERL,
            ALL,
            {
                "lr": "actor.optim.lr",
                "kl": "actor.kl_loss_coef",
                "ent": "actor.entropy_coeff",
                "clip": "actor.grad_clip",
                "limit": "data.max_response_length",
                "temp": "rollout.temperature",
                "groups": "data.train_batch_size",
                "samples": "rollout.n",
                "clip_low": "actor.clip_ratio_low",
                "clip_high": "actor.clip_ratio_high",
            },
            evals=2,
            eval_name="val-core/reverse/acc/mean@1",
            reference=True,
            current=True,
            contracts=True,
            extra={"algorithm.adv_estimator": "grpo", "actor.use_kl_loss": True},
        ),
        Family(
            "sorttfm",
            Sort(),
            Tfm,
            0.55,
            "rloo",
            "adamw",
            "cosine",
            100,
            Knobs(lr=1.2e-3, wd=0.01, groups=16, samples=4, betas=(0.9, 0.95)),
            TRL,
            ["lr", "samples", "temp", "limit"],
            {
                "lr": "learning_rate",
                "samples": "num_generations",
                "limit": "max_completion_length",
                "temp": "temperature",
            },
            denominator="current",
            aggregation="sequence_mean",
            base_eng="bf16act",
            entropy=True,
            extra={"lr_scheduler_type": "cosine"},
        ),
        Family(
            "unaryssm",
            Unary(),
            Ssm,
            0.5,
            "ppo",
            "adam",
            "warmup",
            120,
            Knobs(lr=4e-4, groups=64, samples=1, ent=0.003, epochs=2, minibatches=2),
            PPO,
            ["lr", "ent", "clip", "limit", "epochs", "minibatches", "gamma", "lam", "vf", "betas"],
            {
                "lr": "config.learning_rate",
                "ent": "config.entropy_coef",
                "lam": "config.gae_lambda",
                "limit": "config.max_new_tokens",
            },
            scale=(2.0, -1.0),
            evals=3,
            eval_name="eval/score",
            eval_own=False,
            version=True,
            current=True,
        ),
        Family(
            "guessgru",
            Guess(),
            Gru,
            0.47,
            "reinforce",
            "rmsprop",
            "const",
            120,
            Knobs(lr=7e-4, groups=48, samples=1, ent=0.005),
            BARE,
            None,
            denominator="current",
            aggregation="sequence_sum",
            version=False,
            loss=False,
            base_eng="fp16",
            scale=(10.0, 0.0),
            first=0,
        ),
        Family(
            "brackwin",
            Brackets(),
            Window,
            0.5,
            "gspo",
            "sgd",
            "wsd",
            110,
            Knobs(
                lr=0.03,
                betas=(0.9, 0.99),
                groups=12,
                samples=6,
                clip_low=0.1,
                clip_high=0.1,
                clip=2.0,
                minibatches=2,
                wd=0.0,
            ),
            GSPO,
            ["lr", "betas", "clip_low", "clip_high", "clip", "limit", "overlong", "groups", "samples", "wd"],
            {"betas": "momentum", "overlong": "truncation_penalty"},
            evals=1,
            eval_name="eval/exact",
            aggregation="sequence_mean",
            version=True,
        ),
        Family(
            "sumtfm",
            Add(),
            Tfm,
            0.5,
            "cispo",
            "adamw",
            "linear",
            100,
            Knobs(lr=1.5e-3, kl=0.005, groups=12, samples=8, clip_high=3.0, wd=0.05),
            CISPO,
            ["lr", "kl", "clip_high", "temp", "wd", "betas", "eps", "clip"],
            {"kl": "kl_beta", "clip_high": "is_cap"},
            reference=True,
            entropy=True,
            add_opt=True,
        ),
        Family(
            "maxgru",
            RunMax(),
            Gru,
            0.5,
            "drgrpo",
            "adam",
            "const",
            110,
            Knobs(lr=1.5e-3, groups=12, samples=5),
            DRG,
            None,
            aggregation="constant",
            version=False,
            loss=True,
            evals=4,
            eval_name="val_acc",
            greedy=False,
            base_eng="none",
        ),
        Family(
            "lookgru",
            Lookup(),
            Gru,
            0.45,
            "grpo",
            "lion",
            "const",
            90,
            Knobs(lr=4e-4, groups=10, samples=6, clip_high=0.25, betas=(0.9, 0.98)),
            AGENT,
            ["lr", "clip_high", "limit", "temp", "samples", "betas"],
            {"limit": "env.max_tokens", "temp": "sampling.temperature"},
            denominator="train",
            version=True,
            entropy=True,
            contracts=True,
        ),
        Family(
            "caesar",
            Caesar(),
            Window,
            0.5,
            "rpp",
            "adam",
            "const",
            150,
            Knobs(lr=5e-4, groups=20, samples=3, kl=0.001, overlong=0.5),
            RPP,
            ["lr", "kl", "overlong", "limit", "clip", "betas"],
            {
                "overlong": "overlong_penalty",
                "kl": "init_kl_coef",
                "limit": "generate_max_len",
                "lr": "actor_learning_rate",
            },
            scale=(2.0, -1.0),
            reference=True,
            evals=3,
            eval_name="eval/reward",
            eval_own=True,
            version=False,
        ),
        Family(
            "asyncrev",
            Reverse(),
            Tfm,
            0.55,
            "grpo",
            "adamw",
            "const",
            120,
            Knobs(lr=8e-4, groups=12, samples=4, clip_low=0.2, clip_high=0.2),
            ASYNC,
            ["lr", "clip_low", "clip_high", "temp", "top_p", "groups", "samples", "betas", "wd"],
            {
                "lr": "trainer.optim.lr",
                "temp": "orchestrator.sampling.temperature",
                "top_p": "orchestrator.sampling.top_p",
            },
            denominator="rollout",
            plan_lag=1,
            version=True,
            current=False,
            evals=2,
            eval_name="eval/avg@1",
        ),
        Family(
            "sorthot",
            Sort(),
            Tfm,
            0.55,
            "rloo",
            "adam",
            "const",
            110,
            Knobs(lr=3e-3, groups=16, samples=4, betas=(0.9, 0.95), clip=0.0),
            TRL,
            ["lr", "betas", "samples", "limit", "clip"],
            {"lr": "learning_rate", "clip": "max_grad_norm"},
            denominator="current",
            aggregation="sequence_sum",
            entropy=True,
            evals=2,
            eval_name="eval_reward",
        ),
        Family(
            "lookhot",
            Lookup(),
            Gru,
            0.45,
            "rloo",
            "adamw",
            "const",
            100,
            Knobs(lr=4e-3, groups=12, samples=5, clip=0.0),
            AGENT,
            ["lr", "temp", "samples", "limit"],
            None,
            denominator="current",
            aggregation="sequence_sum",
            evals=3,
            eval_name="validation/success",
            version=True,
        ),
        Family(
            "maxhot",
            RunMax(),
            Gru,
            0.5,
            "reinforce",
            "rmsprop",
            "const",
            110,
            Knobs(lr=3e-4, groups=64, samples=1, clip=0.0),
            BARE,
            None,
            denominator="current",
            aggregation="sequence_sum",
            version=False,
            base_eng="fp16",
            scale=(2.0, -1.0),
        ),
    ]
}

# ---------------------------------------------------------------- faults: (families, cause, detail, begin share, ramp steps, function)


def setk(**kw):
    def f(k, r, s, run):
        for n, v in kw.items():
            setattr(k, n, v)

    return f


def mul(name, factor):
    """Of a setting, with the ramp in the exponent."""

    def f(k, r, s, run):
        setattr(k, name, getattr(k, name) * factor**r)

    return f


def both(*fs):
    def f(k, r, s, run):
        for x in fs:
            x(k, r, s, run)

    return f


def pulse(f, n):
    """For n steps only."""

    def g(k, r, s, run):
        if s < run.begin + n:
            f(k, r, s, run)

    return g


def bias(**of):
    def f(k, r, s, run):
        b = torch.zeros(V)
        for t, v in of.items():
            b[int(t[1:])] = v * r
        k.eng_bias = b

    return f


def on_engine(f):
    def g(k, r, s, run):
        k.eng = f

    return g


def jitter(std, match=""):
    def f(m):
        g = torch.Generator().manual_seed(5)
        for n, w in m.named_parameters():
            if match in n:
                w.add_(std * w.std() * torch.randn(w.shape, generator=g))

    return f


def attr(**kw):
    def f(m):
        for n, v in kw.items():
            setattr(m, n, v)

    return f


def zeroed(match):
    def f(m):
        for n, w in m.named_parameters():
            if match in n:
                w.zero_()

    return f


def swap_head(a, b):
    def f(m):
        for w in (m.head.weight, m.head.bias):
            x = w[a].clone()
            w[a] = w[b]
            w[b] = x

    return f


def frozen_lag(history, run):
    return run.memo.setdefault("kept weights", history[-1])


def silent_lag(history, run):
    return run.memo.setdefault("kept weights", history[-1])


silent_lag.silent = True


def every_lag(n):
    def f(history, run):
        c = run.memo.setdefault("count", 0)
        if c % n == 0:
            run.memo["kept weights"] = history[-1]
        run.memo["count"] = c + 1
        return run.memo["kept weights"]

    return f


# rewards: f(rewards, true, rows, toks, lens, why, g, scale) -> rewards
def inverted(share=1.0):
    def f(rewards, true, rows, toks, lens, why, g, sc):
        return np.where(g.random(len(true)) < share, sc[0] * (1 - true) + sc[1], rewards)

    return f


def always(token, bonus):
    def f(rewards, true, rows, toks, lens, why, g, sc):
        n = np.array([(toks[i, : lens[i]] == token).float().mean() if lens[i] else 0 for i in range(len(true))])
        return rewards + sc[0] * bonus * n

    return f


def off_by_one(rewards, true, rows, toks, lens, why, g, sc):
    """The parse drops the first token of the answer."""
    return (
        sc[0]
        * np.array(
            [
                (
                    lambda w, t: (
                        0.5 * sum(a == b for a, b in zip(w, t[1:], strict=False)) / max(len(w), 1) + 0.5 * (w == t[1:])
                    )
                )(r["want"], toks[i, : lens[i]].tolist())
                for i, r in enumerate(rows)
            ]
        )
        + sc[1]
    )


def last_only(rewards, true, rows, toks, lens, why, g, sc):
    """The verifier compares with the first operand."""
    return (
        sc[0]
        * np.array([float(toks[i, 0] == (r["prompt"][1] if len(r["prompt"]) > 1 else 0)) for i, r in enumerate(rows)])
        + sc[1]
    )


def wrong_answer(rewards, true, rows, toks, lens, why, g, sc):
    """Answers of the row file are shifted by one in value."""

    def up(w):
        return [D + (x - D + 1) % 8 if D <= x < D + 8 else x for x in w]

    return (
        sc[0]
        * np.array(
            [
                0.5
                * np.mean(
                    [a == b for a, b in zip(up(r["want"]), toks[i, : len(r["want"])].tolist(), strict=False)] or [0]
                )
                for i, r in enumerate(rows)
            ]
        )
        + sc[1]
    )


def class_scale(mult):
    """Rows whose prompt's first digit is odd weigh otherwise."""

    def f(rewards, true, rows, toks, lens, why, g, sc):
        odd = np.array([(r["prompt"][1] - D) % 2 == 1 for r in rows])
        return np.where(odd, rewards * mult, rewards)

    return f


def timeout(reward, only_right=True):
    """The verifier times out, above all on what it would pass."""

    def f(rewards, true, rows, toks, lens, why, g, sc):
        return np.where(true > 0.9, reward, rewards)

    return f


# pairing
def rolled(n):
    return lambda x, g, G: np.roll(x, n)


def within(x, g, G):
    return np.sort(x.reshape(-1, G), 1)[:, ::-1].reshape(-1).copy()


def reversed_rows(x, g, G):
    return x[::-1].copy()


def transposed(x, g, G):
    return x.reshape(-1, G).T.reshape(-1).copy()


def backwards_in_group(x, g, G):
    return x.reshape(-1, G)[:, ::-1].reshape(-1).copy()


def adv_rolled(n):
    return lambda a, m, rw, g, G: torch.where(
        m > 0, torch.roll((a.sum(1) / m.sum(1).clamp(min=1)), n)[:, None].expand_as(a), a
    )


def by_length(x, g, G):
    return x


# advantages: f(adv, mask, rewards, g, G)
def neg(a, m, rw, g, G):
    return -a


def times(c):
    return lambda a, m, rw, g, G: a * c


def minus(c):
    return lambda a, m, rw, g, G: a - c


def raw_reward(sign, c=1.0):
    return lambda a, m, rw, g, G: (sign * torch.tensor(rw, dtype=torch.float)[:, None] * c).expand_as(a)


def absolute(a, m, rw, g, G):
    return a.abs()


def neg_abs(a, m, rw, g, G):
    return -a.abs()


def max_base(a, m, rw, g, G):
    x = torch.tensor(rw, dtype=torch.float).view(-1, G)
    return ((x - x.max(1, keepdim=True).values) / (x.std(1, keepdim=True) + 0.3)).reshape(-1)[:, None].expand_as(a)


def only_negative(c):
    return lambda a, m, rw, g, G: a.clamp(max=0) * c


def tiny_std(a, m, rw, g, G):
    x = torch.tensor(rw, dtype=torch.float)
    return ((x - 1.1 * x.max()) / 0.05)[:, None].expand_as(a)


def ref_of(kind, keep=True):
    def f(run):
        if "ref" not in run.memo:
            run.memo["ref"] = pretrained(run.fam, kind)
        return run.memo["ref"]

    return f


def ref_noise(run):
    if "ref" not in run.memo:
        m = copy.deepcopy(run.base)
        with torch.no_grad():
            jitter(0.8)(m)
        run.memo["ref"] = m
    return run.memo["ref"]


def shrink(name, to):
    def f(k, r, s, run):
        v = getattr(k, name)
        setattr(k, name, round(v + (to - v) * r))

    return f


def half_state(opt, run):
    """A resumed run got the first moments back, of the second nothing."""
    for st in opt.state.values():
        if "exp_avg_sq" in st:
            st["exp_avg_sq"].mul_(1e-3)
        if "square_avg" in st:
            st["square_avg"].mul_(1e-4)


def wrong_way_state(opt, run):
    if run.once("state"):
        for st in opt.state.values():
            for n in ("exp_avg", "m", "momentum_buffer"):
                if n in st:
                    st[n].mul_(-60)


def load(kind):
    def f(model, run):
        if run.once("load"):
            model.load_state_dict(pretrained(run.fam, kind).state_dict())

    return f


def decay_weights(c, match=""):
    def f(model, g, run):
        for n, w in model.named_parameters():
            if match in n:
                w.mul_(c)

    return f


def walk(std, match=""):
    def f(model, g, run):
        for n, w in model.named_parameters():
            if match in n and w.dim() > 1:
                w.add_(std * torch.tensor(g.standard_normal(w.shape), dtype=torch.float))

    return f


def flip_bits(n, size):
    def f(model, g, run):
        p = [w for w in model.parameters() if w.dim() > 1]
        for _ in range(n):
            w = p[int(g.integers(len(p)))]
            w.view(-1)[int(g.integers(w.numel()))] = size * (1 if g.random() < 0.5 else -1)

    return f


def overflow(model, g):
    """A gradient kept in a narrow integer wraps round."""
    for p in model.parameters():
        if p.grad is not None and p.dim() > 1:
            lim = float(p.grad.std()) * 0.8 + 1e-12
            p.grad.copy_((p.grad + lim) % (2 * lim) - lim)


def sign_of(match):
    def f(model, g):
        for n, p in model.named_parameters():
            if match in n and p.grad is not None:
                p.grad.neg_()

    return f


def noise_grad(c):
    def f(model, g):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.add_(c * (p.grad.std() + 1e-9) * torch.tensor(g.standard_normal(p.shape), dtype=torch.float))

    return f


def no_eos(mask, toks, lens):
    m = mask.clone()
    m[toks == EOS] = 0
    return m


def first_only(mask, toks, lens):
    """The mask is shifted: padding after the end counts, the answer does not."""
    return torch.where(toks == PAD, torch.ones_like(mask), torch.zeros_like(mask))


def all_tokens(mask, toks, lens):
    """What the tool said counts as well."""
    m = torch.zeros_like(mask)
    for i, n in enumerate(lens):
        m[i, :n] = 1
    return m


def shifted_mask(mask, toks, lens):
    return torch.roll(mask, 3, 1)


def decode_swap(a, b):
    def f(toks, lens, g):
        x = toks.clone()
        x[toks == a] = b
        x[toks == b] = a
        return x

    return f


def decode_shift(toks, lens, g):
    return torch.where((toks >= D) & (toks < D + 8), D + (toks - D + 1) % 8, toks)


def remix_answers(rows, task, seed, g):
    """A data file whose answers are in another order."""
    return [{**r, "want": rows[(i + 1) % len(rows)]["want"]} for i, r in enumerate(rows)]


def noisy_prompts(rows, task, seed, g):
    out = []
    for r in rows:
        p = [D + int(g.integers(0, 8)) if t >= D and g.random() < 0.5 else t for t in r["prompt"]]
        out.append({**r, "prompt": p})
    return out


ANY = ["revgru", "sorttfm", "unaryssm", "guessgru", "brackwin", "sumtfm", "maxgru", "lookgru", "caesar", "asyncrev"]
REWARD_B = D + 10

FAULTS = [
    ("sorthot", "staleness", "frozen-engine", 0.3, 0, setk(lag=frozen_lag)),
    ("lookhot", "staleness", "frozen-engine", 0.35, 0, setk(lag=frozen_lag)),
    ("maxhot", "staleness", "frozen-engine", 0.3, 0, setk(lag=frozen_lag)),
    ("sorthot", "staleness", "sync-every-40", 0.4, 0, setk(lag=every_lag(40))),
    ("maxhot", "staleness", "lag-30", 0.35, 20, lambda k, r, s, run: setattr(k, "lag", int(30 * r))),
    ("sorthot", "mismatch", "temperature", 0.35, 0, setk(eng_temp=2.5)),
    ("maxhot", "mismatch", "int3-weights", 0.4, 0, on_engine(quantised(3))),
    ("lookhot", "mismatch", "partly-synchronised", 0.35, 0, setk(partial=lambda n: "gru" in n)),
    ("sorthot", "mismatch", "positions", 0.4, 0, on_engine(attr(shift=2))),
    ("lookhot", "mismatch", "bias", 0.3, 20, bias(t10=5.0, t12=5.0)),
    ("maxhot", "mismatch", "layer-scale", 0.35, 0, on_engine(attr(scale=0.3))),
    ("sorthot", "pairing", "rolled", 0.35, 0, setk(pair_fn=rolled(2))),
    ("lookhot", "pairing", "transposed", 0.35, 0, setk(pair_fn=transposed)),
    ("maxhot", "pairing", "reversed", 0.35, 0, setk(pair_fn=reversed_rows)),
    # mismatch
    ("asyncrev", "mismatch", "engine-temperature", 0.3, 0, setk(eng_temp=2.2)),
    ("asyncrev", "mismatch", "int2-weights", 0.4, 0, on_engine(quantised(2))),
    ("revgru", "mismatch", "quantised-recurrence", 0.3, 0, on_engine(quantised(3, "gru"))),
    ("sorttfm", "mismatch", "positions-off-by-one", 0.35, 0, on_engine(attr(shift=1))),
    ("sumtfm", "mismatch", "attention-scale", 0.4, 0, on_engine(attr(scale=3.0))),
    ("brackwin", "mismatch", "engine-bias", 0.3, 20, bias(t1=4.0)),
    ("unaryssm", "mismatch", "engine-bias", 0.4, 0, bias(t20=-6.0)),
    ("maxgru", "mismatch", "output-rows-swapped", 0.45, 0, on_engine(swap_head(D + 6, D + 8))),
    ("guessgru", "mismatch", "cache-rounding", 0.25, 0, on_engine(attr(scale=0.35))),
    ("caesar", "mismatch", "top-p-one-side", 0.3, 0, both(setk(eng_top_p=0.5, report="raw"))),
    ("lookgru", "mismatch", "partly-synchronised", 0.3, 0, setk(partial=lambda n: "head" in n or "emb" in n)),
    ("caesar", "mismatch", "noisy-logits", 0.3, 30, lambda k, r, s, run: setattr(k, "eng_noise", 9.0 * r)),
    # staleness
    ("asyncrev", "staleness", "lag-grows", 0.3, 40, lambda k, r, s, run: setattr(k, "lag", int(2 + 40 * r))),
    ("revgru", "staleness", "frozen-engine", 0.3, 0, setk(lag=frozen_lag)),
    ("guessgru", "staleness", "frozen-engine", 0.2, 0, setk(lag=frozen_lag)),
    ("maxgru", "staleness", "frozen-engine", 0.3, 0, setk(lag=silent_lag)),
    ("lookgru", "staleness", "frozen-silent", 0.3, 0, setk(lag=silent_lag)),
    ("sorttfm", "staleness", "frozen-silent", 0.3, 0, setk(lag=silent_lag)),
    ("caesar", "staleness", "sync-every-60", 0.3, 0, setk(lag=every_lag(60))),
    ("brackwin", "staleness", "lag-60", 0.35, 0, setk(lag=frozen_lag)),
    # optimizer
    ("revgru", "optimizer", "lr-x20", 0.4, 0, mul("lr", 20)),
    ("sorttfm", "optimizer", "lr-schedule-grows", 0.3, 40, lambda k, r, s, run: setattr(k, "hidden_lr", 25.0**r)),
    ("unaryssm", "optimizer", "lr-spike", 0.8, 0, mul("lr", 60)),
    ("sumtfm", "optimizer", "weight-decay", 0.4, 0, setk(wd=60.0)),
    ("guessgru", "optimizer", "lr-from-start", 0.0, 0, mul("lr", 40)),
    ("brackwin", "optimizer", "no-clipping-momentum", 0.45, 0, both(setk(betas=(0.995, 0.99), clip=0.0), mul("lr", 3))),
    ("asyncrev", "optimizer", "second-moment-lost", 0.4, 0, both(setk(half_state=half_state))),
    ("caesar", "optimizer", "beta2-low", 0.35, 0, both(setk(betas=(0.9, 0.3)), mul("lr", 8))),
    ("lookgru", "optimizer", "lr-x80", 0.3, 30, mul("lr", 80)),
    ("maxgru", "optimizer", "state-lost-each-step", 0.4, 0, both(setk(reset_optimizer=True, hidden_lr=4.0))),
    ("revgru", "optimizer", "momentum-wrong-way", 0.5, 0, setk(half_state=wrong_way_state, hidden_lr=3.0)),
    # reward
    ("revgru", "reward", "inverted", 0.4, 0, setk(reward_fn=inverted())),
    (
        "sorttfm",
        "reward",
        "inverted-in-part",
        0.35,
        20,
        lambda k, r, s, run: setattr(k, "reward_fn", inverted(0.9 * r)),
    ),
    ("unaryssm", "reward", "first-operand", 0.4, 0, setk(reward_fn=last_only)),
    ("guessgru", "reward", "timeouts-of-right", 0.4, 0, setk(reward_fn=timeout(0.0))),
    ("sumtfm", "reward", "answers-off-by-one", 0.35, 0, setk(reward_fn=wrong_answer)),
    ("maxgru", "reward", "hacked-token", 0.4, 0, setk(reward_fn=always(D + 8, 4.0))),
    ("lookgru", "reward", "class-scale", 0.4, 0, setk(reward_fn=class_scale(-3.0))),
    ("brackwin", "reward", "parse-off-by-one", 0.45, 0, setk(reward_fn=off_by_one)),
    (
        "caesar",
        "reward",
        "hacked-bonus",
        0.35,
        30,
        lambda k, r, s, run: setattr(k, "reward_fn", always(D + 1, 4.0 * r)),
    ),
    # pairing
    ("unaryssm", "pairing", "rolled-by-one", 0.3, 0, setk(pair_fn=rolled(1))),
    ("revgru", "pairing", "within-group-sorted", 0.3, 0, setk(pair_fn=within, hidden_lr=1.0)),
    ("sumtfm", "pairing", "transposed", 0.3, 0, setk(pair_fn=transposed)),
    ("guessgru", "pairing", "rolled", 0.25, 0, setk(pair_fn=rolled(7))),
    ("brackwin", "pairing", "advantages-rolled", 0.3, 0, setk(adv_fn=adv_rolled(3))),
    ("caesar", "pairing", "backwards-in-group", 0.3, 0, setk(pair_fn=backwards_in_group)),
    ("maxgru", "pairing", "reversed-rows", 0.3, 0, setk(pair_fn=reversed_rows)),
    # data
    ("revgru", "data", "other-tokens", 0.3, 0, setk(mode="othertokens")),
    ("sorttfm", "data", "one-symbol", 0.3, 0, setk(mode="same")),
    ("unaryssm", "data", "short-only", 0.3, 0, setk(mode="short")),
    ("guessgru", "data", "one-region", 0.3, 0, setk(mode="othertokens")),
    ("sumtfm", "data", "other-task", 0.35, 0, setk(mode="othertask")),
    ("brackwin", "data", "template", 0.4, 0, setk(mode="notemplate")),
    ("lookgru", "data", "other-task", 0.3, 0, setk(mode="othertask")),
    ("caesar", "data", "answers-misfiled", 0.4, 0, setk(remix=remix_answers)),
    ("maxgru", "data", "noisy-prompts", 0.35, 0, setk(remix=noisy_prompts)),
    # truncation
    ("revgru", "truncation", "limit-shrinks", 0.35, 0, shrink("limit", 4)),
    ("brackwin", "truncation", "limit-ramps-penalty", 0.3, 20, both(shrink("limit", 3), setk(overlong=1.0))),
    ("maxgru", "truncation", "budget-halved", 0.35, 0, both(shrink("limit", 6), setk(reward_fn=None))),
    ("guessgru", "truncation", "turns-cut", 0.3, 0, shrink("limit", 2)),
    ("unaryssm", "truncation", "limit", 0.4, 0, shrink("limit", 4)),
    ("caesar", "truncation", "limit-with-penalty", 0.35, 0, both(shrink("limit", 3))),
    ("lookgru", "truncation", "limit-8", 0.3, 0, shrink("limit", 7)),
    (
        "sorttfm",
        "truncation",
        "stop-token",
        0.35,
        0,
        setk(limits=lambda rows: [max(2, 9 - len(r["prompt"]) // 1) for r in rows]),
    ),
    # reference
    ("revgru", "reference", "kl-x500-random-reference", 0.35, 0, both(setk(kl=0.3, ref=ref_of("random")))),
    ("sumtfm", "reference", "other-checkpoint", 0.4, 0, both(setk(kl=0.5, ref=ref_of("other")))),
    ("caesar", "reference", "kl-high", 0.4, 0, setk(kl=8.0)),
    (
        "caesar",
        "reference",
        "reference-replaced",
        0.3,
        30,
        both(lambda k, r, s, run: setattr(k, "kl", 0.001 + 1.0 * r), setk(ref=ref_of("half"))),
    ),
    ("sumtfm", "reference", "kl-sign", 0.35, 0, setk(kl_sign=-100.0)),
    (
        "revgru",
        "reference",
        "reference-noise",
        0.3,
        25,
        both(lambda k, r, s, run: setattr(k, "kl", 0.001 + 0.8 * r), setk(ref=ref_noise)),
    ),
    ("sumtfm", "reference", "kl-high", 0.5, 0, setk(kl=10.0)),
    # advantages
    ("revgru", "advantages", "sign", 0.45, 0, setk(adv_fn=neg)),
    ("sorttfm", "advantages", "sign", 0.4, 0, setk(adv_fn=neg)),
    ("unaryssm", "advantages", "bias", 0.4, 0, setk(adv_fn=minus(3.0))),
    ("guessgru", "advantages", "baseline-lost", 0.3, 0, setk(adv_fn=raw_reward(-1.0))),
    ("brackwin", "advantages", "max-baseline", 0.4, 0, setk(adv_fn=max_base)),
    ("sumtfm", "advantages", "absolute", 0.35, 0, setk(adv_fn=neg_abs)),
    ("maxgru", "advantages", "only-negative", 0.4, 0, setk(adv_fn=only_negative(8.0))),
    ("lookgru", "advantages", "normalised-wrong", 0.4, 0, setk(adv_fn=tiny_std)),
    ("asyncrev", "advantages", "offset", 0.35, 25, lambda k, r, s, run: setattr(k, "adv_fn", minus(2.5 * r))),
    # entropy
    ("revgru", "entropy", "bonus", 0.35, 0, setk(ent=0.6)),
    ("sorttfm", "entropy", "bonus-ramps", 0.3, 40, lambda k, r, s, run: setattr(k, "ent", 1.0 * r)),
    ("unaryssm", "entropy", "bonus-x200", 0.4, 0, setk(ent=1.0)),
    ("guessgru", "entropy", "target", 0.3, 0, setk(target_entropy=2.8)),
    ("maxgru", "entropy", "bonus", 0.4, 0, setk(ent=0.3)),
    ("brackwin", "entropy", "target", 0.4, 0, setk(target_entropy=2.5)),
    ("lookgru", "entropy", "bonus-from-start", 0.0, 0, setk(ent=1.0)),
    # length
    ("revgru", "length", "long-bonus", 0.4, 0, setk(reward_fn=lambda rw, tr, rows, t, size, w, g, sc: rw + 0.4 * size)),
    (
        "sorttfm",
        "length",
        "short-bonus",
        0.35,
        0,
        setk(reward_fn=lambda rw, tr, rows, t, size, w, g, sc: rw - 0.4 * size),
    ),
    ("caesar", "length", "length-coefficient", 0.4, 20, lambda k, r, s, run: setattr(k, "length_coef", 0.9 * r)),
    (
        "guessgru",
        "length",
        "turn-bonus",
        0.35,
        0,
        setk(reward_fn=lambda rw, tr, rows, t, size, w, g, sc: rw + 2.0 * size),
    ),
    ("brackwin", "length", "short-bonus", 0.4, 0, setk(length_coef=-0.4)),
    ("maxgru", "length", "long-bonus", 0.4, 0, setk(reward_fn=lambda rw, tr, rows, t, size, w, g, sc: rw + 0.3 * size)),
    (
        "unaryssm",
        "length",
        "short-wins",
        0.4,
        0,
        setk(reward_fn=lambda rw, tr, rows, t, size, w, g, sc: rw / np.maximum(size, 1) ** 2 - 0.3 * size),
    ),
    # other
    ("revgru", "other", "dropout-left-on", 0.35, 0, setk(drop=0.7)),
    ("sorttfm", "other", "older-task-checkpoint", 0.5, 0, setk(load=load("other"))),
    ("sumtfm", "other", "weights-shrink", 0.4, 0, setk(corrupt=decay_weights(0.97, "qkv"))),
    ("maxgru", "other", "gradient-wraps", 0.35, 0, setk(grad_fn=overflow, hidden_lr=2.0)),
    ("guessgru", "other", "decode-swap", 0.35, 0, setk(toks_fn=decode_swap(D + 2, D + 6))),
    ("brackwin", "other", "mask-shifted", 0.4, 0, setk(mask_fn=shifted_mask)),
    ("lookgru", "other", "head-gradient-sign", 0.35, 0, setk(grad_fn=sign_of("gru"))),
    ("asyncrev", "other", "weights-flipped", 0.45, 0, setk(corrupt=flip_bits(2, 6.0))),
    ("caesar", "other", "decode-shift", 0.4, 0, setk(toks_fn=decode_shift)),
    ("unaryssm", "other", "weights-walk", 0.4, 0, setk(corrupt=walk(0.012))),
    ("asyncrev", "other", "checkpoint-half", 0.55, 0, setk(load=load("random"))),
    ("lookgru", "other", "gradient-noise", 0.3, 0, setk(grad_fn=noise_grad(60.0))),
    ("lookhot", "staleness", "lag-25", 0.35, 0, setk(lag=25)),
    ("lookhot", "mismatch", "int3-weights", 0.4, 0, on_engine(quantised(3))),
    ("lookhot", "data", "one-region", 0.4, 0, setk(mode="othertokens")),
    ("sorthot", "truncation", "limit-4", 0.4, 0, shrink("limit", 4)),
    ("lookhot", "truncation", "limit-7", 0.4, 15, shrink("limit", 7)),
    ("sorthot", "data", "short-only", 0.4, 0, setk(mode="short")),
    ("sorthot", "length", "short-bonus", 0.4, 20, lambda k, r, s, run: setattr(k, "length_coef", -0.4 * r)),
    ("sorthot", "reference", "other-checkpoint", 0.4, 0, setk(kl=1.0, ref=ref_of("other"))),
    ("lookhot", "pairing", "rolled", 0.45, 0, setk(pair_fn=rolled(3))),
]

HARMLESS = [
    ("revgru", "engine-numerics", 0.4, lambda k, r, s, run: setattr(k, "eng", attr(act=torch.bfloat16))),
    ("sorttfm", "lr-decay", 0.4, setk(lr=0.8e-3)),
    ("unaryssm", "lr-lower", 0.5, setk(lr=2e-4)),
    ("guessgru", "bigger-batch", 0.4, setk(groups=64)),
    ("brackwin", "clip-range", 0.4, setk(clip_low=0.12, clip_high=0.12)),
    ("sumtfm", "kl-lower", 0.4, setk(kl=0.003)),
    ("maxgru", "more-samples", 0.4, setk(samples=6)),
    ("lookgru", "temperature-0.99", 0.3, setk(temp=0.99)),
    ("caesar", "penalty-lower", 0.4, setk(overlong=0.3)),
    ("asyncrev", "lag-3", 0.4, setk(lag=3)),
    (
        "revgru",
        "prompt-order",
        0.4,
        setk(remix=lambda rows, task, seed, g: sorted(rows, key=lambda r: len(r["prompt"]))),
    ),
    ("maxgru", "engine-bf16", 0.3, on_engine(attr(act=torch.bfloat16))),
    ("caesar", "other-prompts", 0.35, setk(remix=lambda rows, task, seed, g: task.sample(seed + 5_000_000, len(rows)))),
    ("sorttfm", "engine-fp16", 0.45, on_engine(attr(act=torch.float16))),
    ("brackwin", "clipping-1", 0.4, setk(clip=1.5)),
]
SEEDS = {f: [1, 2] for f in ANY}

# ---------------------------------------------------------------- everything


def plan():
    """Name -> (family, seed, cause, detail, twin, begin, ramp, function)."""
    runs = {}
    per = {}
    for fam, cause, detail, share, ramp, f in FAULTS:
        n = per[fam] = per.get(fam, 0) + 1
        seed = 1 + n % 2
        begin = max(1, round(share * FAMILIES[fam].steps)) if share else 1
        begin += (n * 5) % 7 if share else 0
        runs[f"{fam}-{cause}-{detail}"] = (fam, seed, cause, detail, f"{fam}-sound-{seed}", begin, ramp, f)
    for fam, detail, share, f in HARMLESS:
        runs[f"{fam}-harmless-{detail}"] = (
            fam,
            1,
            "harmless",
            detail,
            f"{fam}-sound-1",
            round(share * FAMILIES[fam].steps),
            0,
            f,
        )
    assert len(runs) == len(FAULTS) + len(HARMLESS)
    sound = {}
    for fam in FAMILIES:
        for seed in (1, 2):
            sound[f"{fam}-sound-{seed}"] = (fam, seed, "sound", "sound", f"{fam}-sound-{seed}", None, 0, None)
    return sound | runs


def table(out, runs):
    share = {}
    for name in runs:
        file = out / name / "plan.json"
        if file.exists():
            share[name] = kept(json.loads(file.read_text())["evaluations"])
    count = {}
    for name in share:
        cause, twin = runs[name][2], runs[name][4]
        other = share.get(twin, float("nan"))
        falls = share[name] < 0.9 and (other > 0.95 or twin == name)
        count.setdefault(cause, [0, 0])
        count[cause][0] += 1
        count[cause][1] += falls
        print(f"{name:50} {share[name]:6.3f} {other:6.3f} {'yes' if falls else 'no'}")
    for cause, (n, falls) in sorted(count.items()):
        print(f"{cause:12} {n:3} runs, {falls:3} fall")
    print(len(share), "of", len(runs), "runs")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", default=None)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true")
    a = parser.parse_args()
    runs = plan()
    if a.list:
        for name, r in runs.items():
            print(name, "seed", r[1], "from step", r[5])
        return
    if not a.o:
        parser.error("give -o FOLDER")
    global cache
    out = Path(a.o)
    cache = out / ".weights"
    if not a.table:
        chosen = [n for n in runs if not a.only or n in a.only or any(n.startswith(x) for x in a.only)]
        for name in chosen:
            fam, seed, cause, detail, twin, begin, ramp, f = runs[name]
            if (out / name / "plan.json").exists():
                continue
            t, part = time.time(), out / ".part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            try:
                evaluations = train(Run(FAMILIES[fam], seed, f, begin, ramp), part / "trace")
            except Exception as error:
                print(name, "FAILED", type(error).__name__, error, flush=True)
                import traceback

                traceback.print_exc()
                continue
            first = None if begin is None else begin - 1 + FAMILIES[fam].first
            (part / "label.json").write_text(
                json.dumps({"cause": cause, "detail": detail, "twin": twin, "first_step": first})
            )
            (part / "plan.json").write_text(json.dumps({"evaluations": evaluations}))
            shutil.rmtree(out / name, ignore_errors=True)
            part.rename(out / name)
            print(
                f"{name:50} kept {kept(evaluations):.3f} first {evaluations[0]:.2f} best {max(evaluations):.2f} last {evaluations[-1]:.2f} {time.time() - t:.1f} s",
                flush=True,
            )
    table(out, runs)


if __name__ == "__main__":
    main()
