"""The training loop: sample with an engine, score, recompute, update; hooks where faults come in; recording.

Shapes: B rows, P prompt tokens, T response tokens, V vocabulary, G rows of a group.
"""

import copy
import time
import zlib
from collections import OrderedDict

import numpy as np
import torch
from tasks import EOS, PAD
from tim_trace import Loss, Recorder


def seed_of(*parts):
    return zlib.crc32("/".join(map(str, parts)).encode())


def rng_of(*parts):
    return np.random.default_rng(seed_of(*parts))


def uniforms(B, T, *parts):
    g = torch.Generator().manual_seed(seed_of(*parts))
    return torch.rand(B, T, generator=g)


class Out:
    """Sampled rows: resp [B,T], lp [B,T], mask [B,T] (sampled tokens), part [B,T] (any token), turns, ended, cut."""


def sample(
    model,
    task,
    items,
    u,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    repetition_penalty=1.0,
    proc=None,
    limit=None,
    stop=(EOS,),
    max_turns=None,
    tool=None,
    greedy=False,
    prompts=None,
    stop_text=None,
):
    B, T = len(items), task.T
    ids = torch.tensor([task.prompt_ids(t) for t, _ in items]) if prompts is None else prompts
    limit = np.full(B, T) if limit is None else np.broadcast_to(np.asarray(limit), (B,))
    max_turns = task.turns if max_turns is None else max_turns
    tool = tool or task.tool
    o = Out()
    o.prompts = torch.tensor([task.prompt_ids(t) for t, _ in items])
    resp = np.full((B, T), PAD, np.int64)
    lps = np.zeros((B, T), np.float32)
    mask, part = np.zeros((B, T), bool), np.zeros((B, T), bool)
    done, count, turn = np.zeros(B, bool), np.zeros(B, int), np.zeros(B, int)
    ended = np.zeros(B, bool)
    queue = [[] for _ in range(B)]
    texts = [[[]] for _ in range(B)]
    with torch.no_grad():
        z, state = model.start(ids)
        for t in range(T):
            z = torch.nan_to_num(z, nan=0.0, posinf=80.0, neginf=-80.0)
            if repetition_penalty != 1.0 and t:
                seen = torch.zeros(B, z.shape[1], dtype=torch.bool)
                seen.scatter_(1, torch.from_numpy(resp[:, :t]), True)
                seen[:, :3] = False
                z = torch.where(seen, torch.where(z > 0, z / repetition_penalty, z * repetition_penalty), z)
            z = z / temperature
            if proc is not None:
                z = proc(z, resp, t, count)
            if top_k:
                z = z.masked_fill(z < z.topk(top_k, -1).values[:, -1:], -1e9)
            if min_p > 0:
                p = z.softmax(-1)
                z = z.masked_fill(p < min_p * p.max(-1, keepdim=True).values, -1e9)
            if top_p < 1.0:
                p, at = z.softmax(-1).sort(-1, descending=True)
                drop = (p.cumsum(-1) - p) > top_p
                z = z.masked_fill(torch.zeros_like(drop).scatter_(1, at, drop), -1e9)
            lp = z.log_softmax(-1)
            if greedy:
                tok = lp.argmax(-1)
            else:
                c = lp.exp().cumsum(-1)
                tok = (c < u[:, t : t + 1] * c[:, -1:]).sum(-1).clamp(max=z.shape[1] - 1)
            taken = lp.gather(1, tok[:, None])[:, 0].numpy()
            tok = tok.numpy().copy()
            for i in range(B):
                if done[i]:
                    tok[i] = PAD
                    continue
                part[i, t] = True
                if queue[i]:
                    tok[i] = queue[i].pop(0)
                    resp[i, t] = tok[i]
                    continue
                resp[i, t], lps[i, t], mask[i, t] = tok[i], taken[i], True
                count[i] += 1
                k = int(tok[i])
                if k != EOS:
                    texts[i][-1].append(k)
                if k in stop or (stop_text and task.dec(texts[i][-1]).endswith(stop_text)):
                    turn[i] += 1
                    if turn[i] >= max_turns:
                        done[i] = True
                        ended[i] = k == EOS
                        continue
                    queue[i] = task.enc(tool(items[i][1], task.dec(texts[i][-1])))
                    texts[i].append([])
                if count[i] >= limit[i]:
                    done[i] = True
            if done.all():
                break
            if t + 1 < T:
                z, state = model.step(state, torch.from_numpy(tok))
    o.resp, o.lp, o.mask, o.part = (
        torch.from_numpy(resp),
        torch.from_numpy(lps),
        torch.from_numpy(mask),
        torch.from_numpy(part),
    )
    o.turns = [[task.dec(x) for x in t] for t in texts]
    o.ended, o.count, o.lens = ended, count, part.sum(1)
    o.finish = [
        "stop" if d and (e or count[i] < limit[i]) else "length"
        for i, (d, e) in enumerate(zip(done, ended, strict=True))
    ]
    return o


def subset(o, rows):
    n = Out()
    rows = list(map(int, rows))
    for k in ("prompts", "resp", "lp", "mask", "part"):
        setattr(n, k, getattr(o, k)[rows])
    for k in ("ended", "count", "lens"):
        setattr(n, k, getattr(o, k)[rows])
    for k in ("turns", "finish"):
        setattr(n, k, [getattr(o, k)[r] for r in rows])
    return n


def true_scores(task, items, o):
    return np.array([task.score(m, t, e) for (_, m), t, e in zip(items, o.turns, o.ended, strict=True)])


def pretrained(fam, seed, cache):
    """A policy with supervised weights that reach about fam['pre'] on held-out prompts; they are kept in folder `cache`."""
    task = fam["task"]()
    path = cache / f"{fam['name']}-{seed}-{seed_of(fam['key'])}.pt"
    torch.manual_seed(seed_of(fam["name"], seed, "init"))
    model = fam["model"](task.V, task.P, task.T)
    if path.exists():
        model.load_state_dict(torch.load(path))
        return model
    items = task.draw(rng_of(fam["name"], "held"), 192, held=True)
    u = uniforms(192, task.T, fam["name"], "pre-eval")
    opt = torch.optim.AdamW(model.parameters(), lr=fam.get("pre_lr", 3e-3))
    best = 0
    for i in range(1, 1500):
        rng = rng_of(fam["name"], seed, "pre", i)
        batch = task.draw(rng, 64, **fam.get("pre_data", {}))
        prompts = torch.tensor([task.prompt_ids(t) for t, _ in batch])
        rows, masks = [], []
        for text, meta in batch:
            turns, ids, mask = task.demo(rng, text, meta), [], []
            for k, t in enumerate(turns):
                a = task.enc(t)
                if rng.random() < fam.get("pre_noise", 0.0) and a:
                    a[int(rng.integers(len(a)))] = int(rng.integers(3, task.V))
                ids += [*a, EOS]
                mask += [1] * (len(a) + 1)
                if k + 1 < len(turns):
                    x = task.enc(task.tool(meta, t))
                    ids += x
                    mask += [0] * len(x)
            rows.append((ids + [PAD] * task.T)[: task.T])
            masks.append((mask + [0] * task.T)[: task.T])
        resp, mask = torch.tensor(rows), torch.tensor(masks, dtype=torch.float32)
        lp = model.logits(prompts, resp).log_softmax(-1).gather(-1, resp[..., None])[..., 0]
        loss = -(lp * mask).sum() / mask.sum()
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if i % 5 == 0:
            best = float(true_scores(task, items, sample(model, task, items, u)).mean())
            if best >= fam["pre"]:
                break
    print(
        f"  pretrained {fam['name']}-{seed}: {i} steps, {best:.3f}, {sum(p.numel() for p in model.parameters())} parameters",
        flush=True,
    )
    cache.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


def bf16(t):
    return t.to(torch.bfloat16).to(t.dtype) if t.is_floating_point() else t


def rows_of(x, lens):
    return [x[i, : int(n)].tolist() for i, n in enumerate(lens)]


class Run:
    """A run of a family, with the hooks `change` from its step `t0` on, recorded in `trace`."""

    def __init__(self, fam, seed, change, trace, cache):
        self.fam, self.seed, self.change = fam, seed, change
        self.t0 = self.change.get("t0", 1)
        self.task = fam["task"]()
        self.model = pretrained(fam, seed, cache)
        self.first = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.ref, self.engine = copy.deepcopy(self.model), copy.deepcopy(self.model)
        for m in (self.ref, self.engine):
            m.requires_grad_(False)
        self.N = fam["steps"]
        self.version = 0
        self.history = OrderedDict()
        self.keep_versions()
        self.mem = {}  # faults keep what they need here
        self.s = dict(fam["s"])
        s = self.s
        P = list(self.model.parameters())
        kind = fam["opt"]
        if kind == "adamw":
            self.opt = torch.optim.AdamW(
                P, lr=s["lr"], betas=(s["beta1"], s["beta2"]), eps=s["eps"], weight_decay=s["weight_decay"]
            )
        elif kind == "adam":
            self.opt = torch.optim.Adam(P, lr=s["lr"], betas=(s["beta1"], s["beta2"]), eps=s["eps"])
        elif kind == "sgd":
            self.opt = torch.optim.SGD(P, lr=s["lr"], momentum=s["momentum"], weight_decay=s.get("weight_decay", 0.0))
        else:
            self.opt = torch.optim.RMSprop(P, lr=s["lr"], alpha=s["alpha"], eps=s["eps"])
        self.held = self.task.draw(rng_of(fam["name"], "held-out"), fam.get("held", 256), held=True)
        self.evaluations, self.eval_steps = [], []
        self.baseline, self.table = None, {}
        self.rec, self.recorded = Recorder(trace), None

    # -- hooks
    def has(self, name, step):
        return name in self.change and step >= self.t0

    def call(self, name, step, value, *more):
        """The hook's value if the change has begun, else `value`."""
        if self.has(name, step):
            return self.change[name](self, step, value, *more)
        return value

    def ramp(self, step, n):
        return min(1.0, (step - self.t0 + 1) / n)

    def keep_versions(self):
        self.history[self.version] = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        while len(self.history) > 120:
            self.history.pop(next(iter(self.history)))

    # -- parts
    def evaluate(self, step):
        self.model.eval()
        u = uniforms(len(self.held), self.task.T, self.fam["name"], "eval")
        o = sample(self.model, self.task, self.held, u, temperature=self.fam["s"].get("temperature", 1.0))
        true = true_scores(self.task, self.held, o)
        return float(np.mean([self.fam["scale"](x) for x in true]))

    def prompts(self, step, s):
        fam, rng = self.fam, rng_of(self.fam["name"], self.seed, step, "data")
        n = s["num_prompts"]
        if fam.get("pool"):
            pool = self.task.draw(rng_of(fam["name"], "pool"), fam["pool"])
            items = [pool[i] for i in rng.choice(len(pool), n, replace=n > len(pool))]
        else:
            items = self.task.draw(rng, n)
        items = self.call("data", step, items, rng)
        return [it for it in items for _ in range(s["group_size"])]

    def engines(self, step, B):
        """[(rows, actual version, said version)]"""
        lag = self.fam.get("lag", 0)
        want = max(0, self.version - lag) if self.version > lag else 0
        want = self.call("lag", step, want)
        if isinstance(want, list):
            return want
        if isinstance(want, tuple):
            return [(np.arange(B), *want)]
        return [(np.arange(B), want, want)]

    def load_engine(self, step, version):
        keep = self.history.get(version)
        if keep is None:
            keep = self.history[min(self.history)]
        state = {k: v.clone() for k, v in keep.items()}
        half = self.fam.get("bf16", False) or self.has("bf16", step)
        if half:
            state = {k: bf16(v) for k, v in state.items()}
        state = self.call("transfer", step, state)
        self.engine.load_state_dict(state)
        if half:
            self.engine.k_bits = 8
        if self.has("kernel", step):
            self.change["kernel"](self, step, self.engine)

    def rollout(self, step, s, items, tag="sample"):
        B = len(items)
        u = uniforms(B, self.task.T, self.fam["name"], self.seed, step, tag)
        cfg = dict(
            temperature=s["temperature"],
            top_p=s.get("top_p", 1.0),
            top_k=s.get("top_k", 0),
            repetition_penalty=s.get("repetition_penalty", 1.0),
            limit=s.get("max_tokens"),
            max_turns=s.get("max_turns"),
        )
        parts, versions, ids = [], np.zeros(B, int), []
        for rows, actual, said in self.engines(step, B):
            self.load_engine(step, actual)
            mine = [items[i] for i in rows]
            c = dict(cfg)
            if c["limit"] is not None and np.ndim(c["limit"]):
                c["limit"] = np.asarray(c["limit"])[rows]
            c = self.call("engine_sampling", step, c, mine)
            parts.append(sample(self.engine, self.task, mine, u[rows], greedy=tag == "greedy", **c))
            versions[rows] = said
            ids += list(rows)
        if len(parts) == 1:
            return parts[0], versions
        o, order = Out(), np.argsort(ids)
        for k in ("prompts", "resp", "lp", "mask", "part"):
            setattr(o, k, torch.cat([getattr(p, k) for p in parts])[order])
        for k in ("ended", "count", "lens"):
            setattr(o, k, np.concatenate([getattr(p, k) for p in parts])[order])
        for k in ("turns", "finish"):
            flat = [x for p in parts for x in getattr(p, k)]
            setattr(o, k, [flat[i] for i in order])
        return o, versions

    def rewards(self, step, items, o, tag="sample"):
        texts = self.call("decode", step, o.turns, o)
        true = np.array([self.task.score(m, t, e) for (_, m), t, e in zip(items, texts, o.ended, strict=True)])
        r = np.array([self.fam["scale"](x) for x in true])
        if "overlong" in self.s_now:
            buffer, most = self.s_now["overlong"], self.s_now["overlong_limit"]
            r = r - self.s_now["overlong_factor"] * np.clip((o.count - (most - buffer)) / buffer, 0, 1)
        rng = rng_of(self.fam["name"], self.seed, step, "reward", tag)
        r = self.call("reward", step, r, items, o, rng)
        r = self.call("length", step, r, items, o, rng)
        return np.asarray(r, np.float64)

    def advantages(self, step, r, items, o, s):
        algo, G = self.fam["algo"], s["group_size"]
        if algo in ("grpo", "drgrpo", "rloo", "opo"):
            g = r.reshape(-1, G)
            if algo == "grpo":
                a = (g - g.mean(1, keepdims=True)) / (g.std(1, keepdims=True, ddof=1) + s.get("adv_eps", 1e-4))
            elif algo == "drgrpo":
                a = g - g.mean(1, keepdims=True)
            elif algo == "opo":
                lengths = o.count.reshape(-1, G).astype(float)
                a = g - (g * lengths).sum(1, keepdims=True) / lengths.sum(1, keepdims=True)
            else:
                a = (g - g.mean(1, keepdims=True)) * G / (G - 1)
            a = a.reshape(-1)
        elif algo == "ema":
            if self.baseline is None:
                self.baseline = r.mean()
            a = (r - self.baseline) / self.fam.get("adv_div", 1.0)
            self.baseline = 0.9 * self.baseline + 0.1 * r.mean()
        elif algo == "whiten":
            kl = np.zeros_like(r)
            if self.fam.get("kl_in_reward"):
                kl = s["kl_coef"] * ((self.old - self.reference) * o.mask).sum(1).numpy()
            x = r - kl
            a = (x - x.mean()) / (x.std() + 1e-6)
        elif algo == "remax":
            greedy, _ = self.rollout(step, s, items, tag="greedy")
            a = r - self.rewards(step, items, greedy, tag="greedy")
        elif algo == "table":
            a = np.zeros_like(r)
            for i, (text, _) in enumerate(items):
                b = self.table.get(text, r.mean())
                a[i] = r[i] - b
                self.table[text] = 0.8 * b + 0.2 * r[i]
            a = a / self.fam.get("adv_div", 1.0)
        elif algo == "togo":
            B, T = o.resp.shape
            tok = np.zeros((B, T))
            scale = self.fam["scale"]
            for i, (_, m) in enumerate(items):
                start, p = self.task.potentials(m, o.turns[i][0], o.ended[i])
                v = np.diff(np.array([start, *p]))
                tok[i, : len(v)] -= v
                last = int(o.lens[i]) - 1
                tok[i, last] += r[i] - (scale(1 - start / 10) - v.sum())
            togo = np.flip(np.cumsum(np.flip(tok, 1), 1), 1)
            m = o.mask.numpy()
            b = (togo * m).sum(0) / np.maximum(m.sum(0), 1)
            a = (togo - b) * m
            a = a / (np.sqrt((a**2).sum() / max(m.sum(), 1)) + 1e-6)
        a = self.call("advantage", step, a, r, items, o)
        return np.asarray(a, np.float32)

    def token_lp(self, model, o, temperature, resp=None):
        z = model.logits(o.prompts, o.resp if resp is None else resp) / temperature
        lps = z.log_softmax(-1)
        lp = lps.gather(-1, o.resp[..., None])[..., 0]
        ent = -(lps.exp() * lps).sum(-1)
        return lp, ent

    def loss(self, step, o, rows, old, adv, rollout, s):
        fam = self.fam
        o = subset(o, rows)
        old, adv, rollout = old[rows], adv[rows], rollout[rows]
        mask = self.call("loss_mask", step, o.mask, o).float()
        lp, ent = self.token_lp(self.model, o, s["temperature"])
        if self.has("loss_lp", step):
            lp = self.change["loss_lp"](self, step, lp, o, s)
        A = adv if adv.ndim == 2 else adv[:, None]
        below = rollout if fam.get("denominator") == "rollout" else old
        log_ratio = (lp - below) * mask
        if fam.get("level") == "sequence":
            log_ratio = (log_ratio.sum(1) / mask.sum(1).clamp(min=1))[:, None].expand_as(lp)
        ratio = log_ratio.clamp(-20, 20).exp()
        ratio = self.call("ratio", step, ratio, lp, below, mask)
        if fam["loss"] == "reinforce":
            f = ratio * A
        elif fam["loss"] == "cispo":
            f = ratio.detach().clamp(max=s["clip_high"]) * A * lp
        else:
            f = torch.minimum(ratio * A, ratio.clamp(1 - s["clip_low"], 1 + s["clip_high"]) * A)
        if fam.get("tis"):
            f = f * (old - rollout).exp().clamp(max=fam["tis"]).detach()
        agg = fam["agg"]

        def reduce(x):
            x = x * mask
            if agg == "token_mean":
                return x.sum() / mask.sum().clamp(min=1)
            if agg == "sequence_mean":
                return (x.sum(1) / mask.sum(1).clamp(min=1)).mean()
            if agg == "sequence_sum":
                return x.sum(1).mean()
            return x.sum() / (len(x) * self.task.T)

        loss = -reduce(f)
        self.log["clip"] = float(
            (((ratio - 1).abs() > s.get("clip_high", 0.2)).float() * mask).sum() / mask.sum().clamp(min=1)
        )
        if s.get("kl_coef") and not fam.get("kl_in_reward") and fam.get("ref"):
            d = (self.reference[rows] - lp).clamp(-20, 20)
            k3 = self.call("kl_term", step, d.exp() - d - 1, d, lp)
            loss = loss + self.s_now["kl_coef"] * reduce(k3)
        if s.get("entropy_coef"):
            loss = loss - s["entropy_coef"] * self.call("entropy_term", step, reduce(ent), ent, mask, o)
        return self.call("loss", step, loss, o, lp, ent, mask)

    def step(self, step):
        fam = self.fam
        s = dict(fam["s"])
        s["lr"] = fam["s"]["lr"] * fam["schedule"](step, self.N)
        if "kl_adaptive" in fam:
            s["kl_coef"] = self.mem.setdefault("kl_coef", s["kl_coef"])
        if "entropy_adaptive" in fam:
            s["entropy_coef"] = self.mem.setdefault("entropy_coef", s["entropy_coef"])
        s = self.call("settings", step, s)
        self.s_now = s
        self.settings(step, s)
        self.log = {}
        items = self.prompts(step, s)
        o, versions = self.rollout(step, s, items)
        r = self.rewards(step, items, o)
        r = np.asarray(self.call("pair_reward", step, r, items, o), np.float64)
        G = s["group_size"]
        self.log["all_reward"] = float(r.mean())
        if fam.get("filter"):
            g = r.reshape(-1, G)
            keep = np.flatnonzero(g.std(1) > 1e-9)[: fam["filter"]]
            if not len(keep):
                keep = np.array([0])
            rows = (keep[:, None] * G + np.arange(G)).reshape(-1)
            o, versions, r, items = subset(o, rows), versions[rows], r[rows], [items[i] for i in rows]
            r = np.asarray(self.call("pair_filtered", step, r, items, o), np.float64)
        B = len(items)
        self.model.eval()
        with torch.no_grad():
            old, ent = self.token_lp(self.model, o, s["temperature"])
            self.o_now = o
            if fam.get("ref"):
                ref = self.call("reference", step, self.ref)
                if isinstance(ref, torch.Tensor):
                    self.reference = ref
                else:
                    self.reference = self.token_lp(ref, o, s["temperature"])[0]
        self.old = old
        rollout = self.call("pair_rollout", step, o.lp, o)
        adv = self.advantages(step, r, items, o, s)
        adv = np.asarray(self.call("pair_advantage", step, adv, r, items, o), np.float32)
        old = self.call("pair_old", step, old, o)
        self.record(step, s, items, o, versions, r, adv, rollout, old, ent)
        # update
        for g in self.opt.param_groups:
            g["lr"] = s["lr"]
            if "betas" in g:
                g["betas"] = (s["beta1"], s["beta2"])
            if "eps" in g and "eps" in s:
                g["eps"] = s["eps"]
            if "weight_decay" in g and "weight_decay" in s:
                g["weight_decay"] = s["weight_decay"]
            if "momentum" in s:
                g["momentum"] = s["momentum"]
        if self.has("train_mode", step):
            self.change["train_mode"](self, step)
        at = torch.tensor(adv)
        order = rng_of(fam["name"], self.seed, step, "order").permutation(B)
        n = s.get("minibatches", 1)
        norms, losses = [], []
        for rows in np.array_split(order, n):
            if not len(rows):
                continue
            loss = self.loss(step, o, rows, old, at, rollout, s)
            if not self.has("keep_grad", step):
                self.opt.zero_grad()
            loss.backward()
            self.call("grad", step, None, o)
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), s["max_grad_norm"] or 1e9)
            self.call("before_opt", step, None)
            if torch.isfinite(norm):
                self.opt.step()
            self.call("after_opt", step, None)
            norms.append(float(norm) if torch.isfinite(norm) else 1e9)
            losses.append(float(loss.detach()))
        self.model.eval()
        self.model.drop = 0.0
        self.version += 1
        self.call("weights", step, None)
        self.keep_versions()
        m = o.mask.float()
        tokens = m.sum()
        self.log.update(
            reward=float(r.mean()),
            reward_std=float(r.std()),
            loss=float(np.mean(losses)),
            grad_norm=float(np.mean(norms)),
            entropy=float((ent * m).sum() / tokens),
            lr=s["lr"],
            length=float(o.count.mean()),
            max_length=float(o.count.max()),
            cut=float(np.mean([f == "length" for f in o.finish])),
            adv_mean=float(adv.mean()),
            adv_max=float(adv.max()),
            adv_min=float(adv.min()),
            gap=float(((rollout - old).abs() * m).sum() / tokens),
            gap_kl=float(((((old - rollout).clamp(-20, 20).exp() - 1) - (old - rollout)) * m).sum() / tokens),
            lag=float(self.version - 1 - versions.mean()),
            kl_coef=s.get("kl_coef") or 0.0,
            entropy_coef=s.get("entropy_coef") or 0.0,
            kept=float(B),
        )
        if fam.get("ref"):
            d = self.reference - self.old
            self.log["kl"] = float(((d.clamp(-20, 20).exp() - d - 1) * m).sum() / tokens)
        if "kl_adaptive" in fam:
            target, horizon = fam["kl_adaptive"]
            error = self.call(
                "kl_error", step, float(np.clip(self.log["kl"] / self.call("kl_target", step, target) - 1, -0.2, 0.2))
            )
            self.mem["kl_coef"] = s["kl_coef"] * (1 + error * horizon)
        if "entropy_adaptive" in fam:
            target, rate, most = fam["entropy_adaptive"]
            target = s.get("entropy_target", target)
            move = self.call("entropy_error", step, rate * (1 if self.log["entropy"] < target else -1))
            self.mem["entropy_coef"] = float(
                np.clip(s["entropy_coef"] + move, 0.0, self.call("entropy_most", step, most))
            )
        if step % fam["eval_every"] == 0 or step == self.N:
            e = self.evaluate(step)
            self.evaluations.append(e)
            self.eval_steps.append(step)
            self.log["eval"] = e
        names, m = fam["names"], {}
        for key, name in names.items():
            if key == "eval":
                if "eval" in self.log and step % fam["log_eval"] == 0:
                    m[name] = self.log["eval"]
            elif key in self.log:
                m[name] = self.log[key]
        self.rec.add_metrics(step, m)
        if fam["record"] == "live":
            self.rec.add_optimizer(step, self.opt)

    # -- recording
    def settings(self, step, s):
        fam = self.fam
        named = {fam["hp"][k]: v for k, v in s.items() if k in fam["hp"]}
        if self.recorded is None:
            if "settings" not in fam.get("missing", ()):
                self.rec.add_hyperparameters({**fam.get("hp_fixed", {}), **named})
                if fam.get("Loss"):
                    self.rec.add_loss(Loss(**fam["Loss"](s)))
        elif fam["record"] == "live":
            changed = {k: v for k, v in named.items() if self.recorded.get(k) != v}
            if fam.get("Loss"):
                new = Loss(**fam["Loss"](s)).hyperparameters
                changed |= {k: v for k, v in new.items() if self.recorded.get(k) != v}
            if changed:
                self.rec.add_hyperparameters(changed, step=step)
        self.recorded = dict(named)
        if fam.get("Loss"):
            self.recorded |= Loss(**fam["Loss"](s)).hyperparameters

    def record(self, step, s, items, o, versions, r, adv, rollout, old, ent):
        fam, missing, lens = self.fam, self.fam.get("missing", ()), o.lens
        G = s["group_size"]
        A = None
        if "advantages" not in missing:
            A = rows_of(adv, lens) if adv.ndim == 2 else adv.tolist()
        known = "versions" not in missing
        full_mask = rows_of(o.mask.long(), lens) if self.task.turns > 1 else None
        batch = self.rec.add_sequences(
            step=step,
            prompt_ids=[[k for k in row if k != PAD] for row in o.prompts.tolist()],
            response_ids=rows_of(o.resp, lens),
            response_mask=full_mask,
            group_ids=[f"{step}-{i // G}" for i in range(len(items))]
            if G > 1
            else ([t for t, _ in items] if fam.get("pool") else None),
            policy_version=versions.tolist() if known else None,
            reward=r.tolist(),
            advantage=A,
            temperature=s["temperature"] if "temperature" in fam.get("per_row", ()) else None,
            max_tokens=s.get("max_tokens")
            if "max_tokens" in fam.get("per_row", ()) and np.ndim(s.get("max_tokens")) == 0
            else None,
            finish_reason=list(o.finish) if fam.get("finish", True) else None,
        )
        scored = full_mask
        if fam.get("rollout_pass", True):
            self.rec.add_scores("rollout", batch, logprobs=rows_of(rollout.clamp(max=0), lens), scored_mask=scored)
        self.rec.add_scores(
            "train",
            batch,
            logprobs=rows_of(old.clamp(max=0), lens),
            scored_mask=scored,
            entropy=rows_of(ent.clamp(min=0), lens) if fam.get("token_entropy") else None,
            policy_version=self.version if known else None,
        )
        if fam.get("ref"):
            self.rec.add_scores(
                "reference",
                batch,
                logprobs=rows_of(self.reference.clamp(max=0), lens),
                scored_mask=scored,
                policy_version=0 if known else None,
            )

    def go(self):
        t = time.time()
        try:
            for step in range(1, self.N + 1):
                self.step(step)
        finally:
            self.rec.close()
        self.seconds = time.time() - t
        return self


def judge(e):
    """Last fifth over best fifth, of levels above min(lowest, 0)."""
    e = np.array(e) - min(min(e), 0.0)
    k = max(1, round(len(e) / 5))
    return float(e[-k:].mean() / max(np.sort(e)[-k:].mean(), 1e-9))
