"""What is done to runs: family, seed, name, cause, detail, fault, its first step and ramp, and changes from step 1 on.

A fault is called as fault(c, w) at each step from its first one on, w rising to 1 over its ramp; c is core.Ctx.
"""

import numpy as np
import torch
import torch.nn.functional as F
from families import FAMILIES

RUNS = []


def add(fam, seed, name, cause, detail, fault=None, start=1, ramp=1, **changes):
    """Adds a run to RUNS."""
    if f"{fam}-{seed}-{name}" in [d["name"] for d in RUNS]:
        raise ValueError(f"two runs are called {fam}-{seed}-{name}")
    RUNS.append(
        dict(
            fam=fam,
            seed=seed,
            name=f"{fam}-{seed}-{name}",
            cause=cause,
            detail=detail,
            fault=fault,
            start=start,
            ramp=ramp,
            changes=changes,
        )
    )


# ---------------------------------------------------------------- of several causes
def setting(**kw):
    """Other settings."""
    return lambda c, w: c.set(**kw)


def ramped(name, to):
    """A setting that goes to `to` over the ramp, by factors if both values are positive."""

    def f(c, w):
        b = c.mem.setdefault("base", c.s[name])
        v = b + (to - b) * w if b <= 0 or to <= 0 else b * (to / b) ** w
        c.set(**{name: round(v) if isinstance(to, int) else float(v)})

    return f


def hook(**kw):
    """Hooks that are constants."""
    return lambda c, w: c.h.update(kw)


def both(*fs):
    """Several faults at once."""
    return lambda c, w: [f(c, w) for f in fs]


def T(x):
    """A tensor of x."""
    return torch.as_tensor(x)


# ---------------------------------------------------------------- mismatch
def head_left_out(c, w):
    """The engine keeps the output head it had at the first step of the fault."""
    c.h["engine_sd"] = lambda sd: {k: (c.mem.setdefault(k, v) if "head" in k else v) for k, v in sd.items()}


def position_shift(c, w):
    """The engine's positions after the prompt are off by one."""
    c.engine.shift = 1


def coarse(levels):
    """The engine's matrices are quantised, from the first to the second number of levels over the ramp."""

    def f(c, w):
        n = levels[0] + (levels[1] - levels[0]) * w

        def q(sd):
            out = {}
            for k, v in sd.items():
                a = v.abs().max() / n
                out[k] = (v / a).round() * a if v.ndim > 1 else v
            return out

        c.h["engine_sd"] = q

    return f


def cache_collision(share):
    """A share of rows starts from the state of another prompt."""

    def f(c, w):
        def g(st, lg):
            n = len(lg)
            bad = T(c.rng.random(n) < share * w)
            j = torch.where(bad, T((np.arange(n) + 16) % n), T(np.arange(n)))
            st = tuple(x[:, j] for x in st) if isinstance(st, tuple) else st[:, j] if st.ndim == 3 else st[j]
            return st, lg[j]

        c.h["engine_start"] = g

    return f


def rep_penalty(pen):
    """The engine subtracts `pen` from the logits of tokens already written."""

    def g(c, w):
        def f(lg, t, toks):
            m = np.zeros(lg.shape, bool)
            m[np.arange(len(toks))[:, None], toks[:, :t]] = t > 0
            m[:, :2] = False
            return lg - pen * w * T(m).float()

        c.h["engine_logits"] = f

    return g


def softcap(cap):
    """The engine caps logits."""

    def g(c, w):
        def f(lg, t, toks):
            x = cap * torch.tanh(lg / cap)
            x[:, 0] = -1e9
            return (1 - w) * lg + w * x

        c.h["engine_logits"] = f

    return g


def rows_swapped(pairs):
    """Pairs of rows of the head are exchanged in the engine."""

    def g(c, w):
        def q(sd):
            for a, b in pairs:
                for k in sd:
                    if "head" in k:
                        x = sd[k][a].clone()
                        sd[k][a] = sd[k][b]
                        sd[k][b] = x
            return sd

        c.h["engine_sd"] = q

    return g


def decay_rounded(step):
    """The engine rounds the decays of its state to multiples of `step`."""

    def f(c, w):
        def q(sd):
            sd["decay"] = (sd["decay"] / step).round() * step
            return sd

        c.h["engine_sd"] = q

    return f


# ---------------------------------------------------------------- staleness
def frozen(hide=False, share=1.0, at=None, every=0):
    """A share of rows is sampled by one old version; `hide` stamps them as new, `every` syncs now and then."""

    def f(c, w):
        v0 = c.mem.setdefault("v0", c.step - 1 if at is None else at)
        c.mem["keep"] = (v0,)
        if every:
            v0 = (c.step - 1) // every * every
        c.h["row_versions"] = lambda n, ver: np.where(
            np.arange(n) % 20 < share * 20, v0, np.maximum(0, ver - c.s["lag"])
        )
        c.h["hide"] = hide

    return f


def growing(rate, top):
    """The lag grows by `rate` a step, to `top` at most."""

    def f(c, w):
        c.mem.setdefault("t", c.step)
        c.h["lag"] = min(top, c.s["lag"] + int(rate * (c.step - c.mem["t"] + 1)))

    return f


# ---------------------------------------------------------------- optimizer
def moments(scale, every):
    """Second moments of Adam are scaled every few steps."""

    def f(c, w):
        if (c.step - 1) % every == 0:
            for st in c.opt.state.values():
                if "exp_avg_sq" in st:
                    st["exp_avg_sq"].mul_(scale)

    return f


def growing_lr(g):
    """The learning rate grows by the factor g a step."""

    def f(c, w):
        b = c.mem.setdefault("lr", c.s["lr"])
        c.mem["k"] = c.mem.get("k", 0) + 1
        c.set(lr=min(b * 200, b * g ** c.mem["k"]))

    return f


# ---------------------------------------------------------------- reward
def rew(fn):
    """A fault of the rewards: fn(c, w, r, p, t, n) with rewards, prompts, responses and lengths gives new rewards."""
    return lambda c, w: c.h.update(reward=lambda r, p, t, n: fn(c, w, r, p, t, n))


def coins_wrong_key(c, w, r, p, t, n):
    """The expected amounts are wrong by 3, for a share w of the rows."""
    q = p.copy()
    q[:, 2] = np.minimum(q[:, 2] + 3, 11)
    m = c.rng.random(len(r)) < w
    return np.where(m, c.task.reward(q, t, n), r)


def inverted(share):
    """The rewards of a share of rows are turned around."""
    return lambda c, w, r, p, t, n: np.where(c.rng.random(len(r)) < share * w, r.max() + r.min() - r, r)


def grid_flip(c, w, r, p, t, n):
    """The scorer has the y axis upside down."""
    t2 = np.where(t == 11, 12, np.where(t == 12, 11, t))
    m = c.rng.random(len(r)) < w
    return np.where(m, c.task.reward(p, t2, n), r)


def rm_drift(c, w, r, p, t, n):
    """The reward model drifts away from its scores of pairs."""
    S2 = c.mem.setdefault("S", np.random.default_rng(44).uniform(-1, 1, (22, 22)))
    S = (1 - w) * c.task.S + w * (S2 * 2 - 2 * c.task.S)
    return np.array([c.task.score(a, *c.task.fin(b, k), S=S) for a, b, k in zip(p, t, n, strict=True)])


def recall_only(c, w, r, p, t, n):
    """The verifier does not count what should not be there."""
    out = np.zeros(len(r))
    for i in range(len(r)):
        x, d = c.task.fin(t[i], n[i])
        s = c.task.want(p[i])
        out[i] = len(set(x) & s) / len(s) if d else 0
    return (1 - w) * r + w * out


def coin_flip(share, lo=0.0, hi=1.0):
    """A share of rows scores `lo` or `hi` at random."""
    return lambda c, w, r, p, t, n: np.where(c.rng.random(len(r)) < share * w, c.rng.choice([lo, hi], len(r)), r)


def tool_judge(c, w, r, p, t, n):
    """The parser takes the two values in the wrong order."""
    t2 = t.copy()
    for i in range(len(r)):
        k = n[i]
        if k >= 3:
            t2[i, k - 3], t2[i, k - 2] = t[i, k - 2], t[i, k - 3]
    return (1 - w) * r + w * c.task.reward(p, t2, n)


def hops_reversed(c, w, r, p, t, n):
    """The verifier reads the list from its end."""
    t2 = t.copy()
    for i in range(len(r)):
        if n[i] > 1:
            t2[i, : n[i] - 1] = t[i, : n[i] - 1][::-1]
    return (1 - w) * r + w * c.task.reward(p, t2, n)


def cipher_key(share):
    """A share of the words is judged the wrong way."""

    def f(c, w):
        def g(tr, p, t, n):
            bad = np.random.default_rng(8).random(28) < share * w
            return np.where(bad[t] & (t > 13) & (tr != 0), -tr, tr)

        c.h["token_reward"] = g

    return f


# ---------------------------------------------------------------- pairing
def pair(fn):
    """A fault of the pairing: fn(c, w, r, lens) gives the rewards in another order."""
    return lambda c, w: c.h.update(pair_r=lambda r, lens: fn(c, w, r, lens))


def rolled(k):
    """Rewards are rolled by k rows."""
    return lambda c, w, r, lens: np.roll(r, k)


def tiled(c, w, r, lens):
    """Rewards are tiled while prompts are interleaved."""
    G = c.s["group"]
    return r.reshape(-1, G).T.reshape(-1)


def sorted_len(c, w, r, lens):
    """Rewards come sorted by length."""
    return r[np.argsort(-lens, kind="stable")]


def halves(c, w, r, lens):
    """Rewards come from the other half of the batch."""
    return np.roll(r, len(r) // 2 + 3)


def last_batch(c, w, r, lens):
    """Rewards come from the batch before."""
    o = c.mem.get("r", r)
    c.mem["r"] = r
    return o


def some_rows(share):
    """A share of the rows changes rewards among itself."""

    def f(c, w, r, lens):
        i = np.nonzero(c.rng.random(len(r)) < share * w)[0]
        o = r.copy()
        o[i] = r[c.rng.permutation(i)]
        return o

    return f


def adv_rows(c, w):
    """Advantages of other rows."""
    c.h["adv"] = lambda A, R, M, lens: A.max(1)[0].add(A.min(1)[0])[T(c.rng.permutation(len(A)))][:, None].expand_as(M)


def lp_rows(c, w):
    """Old logprobs of the row before."""
    c.h["pair_lp"] = T(np.roll(np.arange(c.s["batch"]), 1))


def tok_rows(k):
    """Token rewards of the row k before."""
    return lambda c, w: c.h.update(pair_tr=lambda tr: np.roll(tr, k, 0))


# ---------------------------------------------------------------- data
def alt(share):
    """A share of the prompts comes in the task's other template."""
    return lambda c, w: c.h.update(prompts=lambda rng, n: c.task.prompts(rng, n, alt=c.rng.random(n) < share * w))


def one_topic(c, w):
    """All prompts are the same."""
    c.h["prompts"] = lambda rng, n: np.repeat(np.array([[3, 9, 14, 20]]), n, 0)


def zeros(k):
    """The first k digits of prompts are zeros."""

    def f(c, w):
        def g(rng, n):
            p = c.task.prompts(rng, n)
            m = c.rng.random(n) < w
            p[m, 1 : 1 + k] = 2
            return p

        c.h["prompts"] = g

    return f


def counts(lo, hi):
    """The counts of prompts are between `lo` and `hi`."""

    def f(c, w):
        def g(rng, n):
            p = c.task.prompts(rng, n)
            m = c.rng.random(n) < w
            p[m, 1::2] = c.rng.integers(lo, hi, (n, 3))[m]
            return p

        c.h["prompts"] = g

    return f


# ---------------------------------------------------------------- truncation
def abort(share, lo, hi):
    """A share of rollouts is cut off at a random length."""

    def f(c, w):
        n = c.s["batch"] * c.f.get("oversample", 1)
        cut = c.rng.integers(lo, hi, n)
        cut[c.rng.random(n) > share * w] = 99
        c.h["cut"] = cut

    return f


# ---------------------------------------------------------------- reference
def ref_shift(c, w):
    """The reference's logprobs are off by one token."""
    c.h["ref"] = lambda ref: torch.roll(ref, 1, 1)


def ref_random(c, w):
    """The reference is a random model."""
    if "done" not in c.mem:
        c.mem["done"] = 1
        g = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for q in c.ref.parameters():
                q.copy_(torch.randn(q.shape, generator=g) * q.std().clamp(min=0.05) * 2)


# ---------------------------------------------------------------- advantages
def adv(fn):
    """A fault of the advantages: fn(c, w, A, R, M, lens) with rewards and mask gives new advantages."""
    return lambda c, w: c.h.update(adv=lambda A, R, M, lens: fn(c, w, A, R, M, lens))


def flip(c, w, A, R, M, lens):
    """The sign turns over the ramp."""
    return A * (1 - 2 * w)


def absolute(c, w, A, R, M, lens):
    """The absolute value."""
    return (1 - w) * A + w * A.abs()


def flip_easy(thr):
    """The sign is wrong for groups with a mean above `thr`."""
    return lambda c, w, A, R, M, lens: (
        A * torch.where(R.view(-1, c.s["group"]).mean(1).repeat_interleave(c.s["group"]) > thr, -1.0, 1.0)[:, None]
    )


def no_baseline(c, w):
    """No baseline, no whitening, and the critic's rewards not centred."""
    c.h.update(base_mult=0.0, no_whiten=True, raw_scores=True)


def base(m):
    """The baseline counts m times."""
    return lambda c, w: c.h.update(base_mult=1 + (m - 1) * w)


# ---------------------------------------------------------------- length
def per_token(x):
    """Each token adds x to the reward."""
    return rew(lambda c, w, r, p, t, n: r + w * x * n)


def kimi(c, w, r, p, t, n):
    """The shorter rows of a group are paid, right or wrong."""
    g = n.reshape(-1, c.s["group"])
    lo, hi = g.min(1, keepdims=True), g.max(1, keepdims=True)
    return r + 2 * w * np.where(hi > lo, 0.5 - (g - lo) / np.maximum(hi - lo, 1), 0.0).reshape(-1)


def some_limit(share, k):
    """A share of the ranks has a limit of k tokens."""

    def f(c, w):
        n = c.s["batch"]
        cut = np.full(n, 99)
        cut[np.arange(n) % 8 < 8 * share] = k
        c.h["cut"] = cut

    return f


# ---------------------------------------------------------------- other
def once(fn):
    """fn(c) is done once, at the first step of the fault."""

    def f(c, w):
        if "once" not in c.mem:
            c.mem["once"] = 1
            with torch.no_grad():
                fn(c)

    return f


def damage(c):
    """Noise in a recurrent matrix of the trainer."""
    g = torch.Generator().manual_seed(3)
    q = dict(c.pol.named_parameters())["rnn.weight_hh_l0"]
    q.add_(torch.randn(q.shape, generator=g) * 0.35)


def reload(c):
    """The first checkpoint is loaded again."""
    c.pol.load_state_dict(c.init_sd)


def merged(k):
    """Weights are merged with the first ones after each step."""

    def g(c, w):
        def f(pol):
            with torch.no_grad():
                for n, q in pol.named_parameters():
                    q.lerp_(c.init_sd[n], k * w)

        c.h["after"] = f

    return g


def rounded(step):
    """Weights are rounded after each step."""

    def g(c, w):
        def f(pol):
            with torch.no_grad():
                for q in pol.parameters():
                    q.copy_((q / (step * w)).round() * (step * w))

        c.h["after"] = f

    return g


def dead_row(names, row):
    """A row of some tensors is zeroed after each step."""

    def g(c, w):
        def f(pol):
            with torch.no_grad():
                for n, q in pol.named_parameters():
                    if n in names:
                        q[row] *= 1 - w

        c.h["after"] = f

    return g


def mask_only_tools(c, w):
    """Only the tool's tokens train."""
    c.h["loss_mask"] = lambda m, toks, am: am & ~m


def mask_no_tail(k):
    """Only the first k tokens train."""

    def f(c, w):
        c.h["loss_mask"] = lambda m, toks, am: m & (np.arange(m.shape[1])[None] < k)

    return f


def labels_shift(c, w):
    """The gradients are those of the next token's logprob."""

    def f(pol, p, r, lp):
        lg = F.log_softmax(pol.full(p, r), -1)
        r2 = torch.cat([r[:, 1:], r[:, -1:]], 1)
        x = lg.gather(-1, r2[..., None])[..., 0]
        return lp.detach() + torch.where(r2 > 0, x - x.detach(), 0.0)

    c.h["lp_shift"] = f


def layer_sign(part):
    """Gradients of the tensors whose name has `part` in it turn their sign."""

    def f(c, w):
        def g(pol):
            for n, q in pol.named_parameters():
                if part in n and q.grad is not None:
                    q.grad.mul_(1 - 2 * w)

        c.h["grads"] = g

    return f


def retok(a, b):
    """Two tokens are decoded as each other before training."""
    return lambda c, w: c.h.update(retok=lambda t: np.where(t == a, b, np.where(t == b, a, t)))


def wrong_tool(share):
    """The tool answers a share of rows for another key."""
    return lambda c, w: c.h.update(wrong_tool=c.rng.random(c.s["batch"]) < share * w)


def no_zero(c, w):
    """Gradients are never zeroed."""
    c.h["no_zero"] = True


def emb_merge(pairs):
    """Pairs of embeddings are averaged."""

    def f(c):
        for a, b in pairs:
            m = (c.pol.emb.weight[a] + c.pol.emb.weight[b]) / 2
            c.pol.emb.weight[a] = m
            c.pol.emb.weight[b] = m

    return f


# ---------------------------------------------------------------- the runs: sound twins
for fam in FAMILIES:
    for seed in (1, 2):
        add(fam, seed, "sound", "sound", "nothing")

# ---------------------------------------------------------------- the runs: mismatch
add("f01", 1, "head", "mismatch", "the transfer leaves out the output head from step 20 on", head_left_out, 20)
add("f03", 1, "decay", "mismatch", "the engine rounds the decays of its state", decay_rounded(3.0), 45)
add(
    "f04",
    2,
    "coarse",
    "mismatch",
    "the engine's weights are quantised more and more coarsely",
    coarse((24, 2.2)),
    40,
    40,
)
add(
    "f06",
    2,
    "cold",
    "mismatch",
    "the engine samples at temperature 0.3, the trainer scores at 1",
    hook(engine_temp=0.3),
    50,
)
add(
    "f05",
    1,
    "prefix",
    "mismatch",
    "prefix cache collisions: rows sampled from another prompt's state",
    cache_collision(0.9),
    50,
    20,
)
add(
    "f09",
    2,
    "rows",
    "mismatch",
    "rows of the head are exchanged in the transfer",
    rows_swapped([(15, 21), (16, 22)]),
    50,
)
add("f08", 2, "repetition", "mismatch", "repetition penalty in the engine only", rep_penalty(6.0), 60, 10)
add("f10", 1, "softcap", "mismatch", "logits capped in the engine only", softcap(1.2), 35, 25)

# ---------------------------------------------------------------- the runs: staleness
add("f04", 1, "frozen", "staleness", "weight sync stops, versions go on being stamped as new", frozen(hide=True), 20)
add(
    "f07",
    2,
    "base",
    "staleness",
    "restarted replicas sample with the base checkpoint, undeclared",
    frozen(hide=True, share=0.9, at=0),
    30,
)
add("f03", 2, "lag", "staleness", "lag grows to 40, declared", growing(1.0, 45), 20)
add(
    "f02",
    2,
    "base",
    "staleness",
    "most replicas restart with the base checkpoint, undeclared",
    frozen(hide=True, share=0.9, at=0),
    35,
)
add("f08", 2, "frozen", "staleness", "weight sync stops, declared", frozen(), 40)
add("f08", 1, "queue", "staleness", "the queue grows, versions declared", growing(0.8, 55), 25)
add("f09", 2, "lag", "staleness", "the lag jumps from 0 to 25, no versions", growing(100.0, 25), 30)
add("f10", 2, "lag", "harmless", "the lag jumps to 30, declared", growing(100.0, 30), 40)
add(
    "f04",
    2,
    "replica",
    "staleness",
    "three quarters of the ranks stay at one version, undeclared",
    frozen(share=0.75, hide=True),
    35,
)

# ---------------------------------------------------------------- the runs: optimizer
add("f01", 1, "lr", "optimizer", "learning rate x12", setting(lr=0.024), 80)
add("f02", 2, "gamma", "optimizer", "the schedule grows the rate by 9 % a step", growing_lr(1.09), 40)
add("f03", 1, "moments", "optimizer", "second moments of Adam scaled by 1e-3 every 8 steps", moments(1e-4, 6), 45)
add("f05", 2, "decay", "optimizer", "weight decay 0.01 -> 10", ramped("weight_decay", 10.0), 60, 20)
add("f06", 1, "beta1", "optimizer", "beta1 0.9 -> 0.999", setting(beta1=0.9995), 40)
add(
    "f08", 1, "restart", "optimizer", "warm restart of the schedule with 10 times the rate", ramped("lr", 0.015), 80, 10
)
add("f09", 1, "decay", "optimizer", "weight decay 0 -> 0.04 in SGD", ramped("weight_decay", 0.04), 60, 30)
add("f10", 2, "beta", "optimizer", "beta1 0.9998, sudden", setting(beta1=0.9995), 55)

# ---------------------------------------------------------------- the runs: reward
add("f01", 2, "key", "reward", "expected answers wrong by 3, for more and more prompts", rew(coins_wrong_key), 50, 30)
add("f02", 1, "inverted", "reward", "verifier inverted for 65 % of responses", rew(inverted(0.65)), 55, 15)
add("f03", 2, "axis", "reward", "the scorer has the y axis upside down", rew(grid_flip), 45)
add("f06", 2, "drift", "reward", "the reward model drifts", rew(rm_drift), 50, 50)
add("f07", 1, "recall", "reward", "the verifier no longer counts what should not be there", rew(recall_only), 35)
add("f08", 1, "noise", "reward", "time-outs score at random", rew(coin_flip(1.0)), 60)
add("f09", 2, "key", "reward", "the answer file of another version", cipher_key(0.5), 60)
add("f04", 2, "order", "reward", "the parser swaps the two values", rew(tool_judge), 50, 30)

# ---------------------------------------------------------------- the runs: pairing
add("f01", 1, "rolled", "pairing", "rewards rolled by five rows", pair(rolled(5)), 50)
add("f03", 1, "sorted", "pairing", "rewards come sorted by length", pair(sorted_len), 50)
add("f04", 1, "halves", "pairing", "rewards of the other shard", pair(halves), 55)
add("f06", 1, "last", "pairing", "rewards of the batch before", pair(last_batch), 40)
add("f07", 2, "advantages", "pairing", "advantages of other rows", adv_rows, 30)
add("f09", 1, "tokens", "pairing", "token rewards of the next row", tok_rows(1), 70)
add("f10", 1, "old", "pairing", "old logprobs of other rows", lp_rows, 25)
add("f05", 2, "some", "pairing", "more and more rows have another's reward", pair(some_rows(1.0)), 45, 20)
add("f02", 2, "tiled", "pairing", "rewards tiled, prompts interleaved", pair(tiled), 22)

# ---------------------------------------------------------------- the runs: data
add("f01", 2, "digits", "data", "template with units first", alt(1.0), 50)
add("f03", 1, "template", "data", "template with the goal first", alt(1.0), 40, 20)
add("f06", 2, "topic", "data", "the loader is stuck on one prompt", one_topic, 65)
add("f07", 1, "absent", "data", "prompts of another task: list those absent", alt(1.0), 35, 20)
add("f09", 2, "language", "data", "another language, by a marker", alt(1.0), 60)
add("f05", 1, "swapped", "data", "counts before letters", alt(1.0), 60)
add("f08", 2, "alternate", "data", "prompts that ask for alternating sums", alt(1.0), 60)

# ---------------------------------------------------------------- the runs: truncation
add("f01", 1, "limit", "truncation", "limit of 4 tokens", setting(max_tokens=4), 50)
add("f05", 2, "limit", "truncation", "the limit shrinks to 6 tokens", ramped("max_tokens", 6), 45, 30)
add("f04", 1, "turns", "truncation", "one turn only", setting(max_turns=1), 25)
add("f03", 2, "limit", "truncation", "limit of 4 tokens", setting(max_tokens=4), 40)
add("f07", 2, "stop", "truncation", "three symbols became stop tokens", hook(stop=(5, 8, 10)), 35)
add("f05", 1, "abort", "truncation", "rollouts are cut off at random", abort(0.92, 2, 7), 45, 20)
add("f10", 1, "limit", "truncation", "three quarters of the ranks have a limit of 3 tokens", some_limit(0.75, 3), 45)
add("f08", 2, "limit", "truncation", "the limit shrinks to 5 tokens", ramped("max_tokens", 5), 60, 30)
add("f09", 1, "stop", "truncation", "a word became a stop token", hook(stop=(16, 20, 23)), 70)

# ---------------------------------------------------------------- the runs: reference
add("f01", 1, "coef", "reference", "coefficient 0.01 -> 2", setting(kl_coef=2.0), 75)
add("f06", 1, "sign", "reference", "KL is paid", setting(kl_coef=-1.5), 55)
add("f03", 1, "shift", "reference", "the reference's logprobs are off by one token", ref_shift, 30)
add("f10", 1, "ramp", "reference", "coefficient ramps to 4", ramped("kl_coef", 4.0), 40, 40)
add("f06", 2, "ramp", "reference", "coefficient ramps to 1.5", ramped("kl_coef", 1.5), 50, 40)
add(
    "f03",
    2,
    "target",
    "reference",
    "the KL controller gets a target of 0.001 and a short horizon",
    both(setting(kl_target=0.001), hook(ctl_sign=4.0)),
    30,
)
add("f03", 1, "random", "reference", "the reference is another model", ref_random, 35)
add("f01", 2, "ascent", "reference", "the KL term has the wrong sign and weight", ramped("kl_coef", -0.6), 50, 30)

# ---------------------------------------------------------------- the runs: advantages
add("f02", 1, "sign", "advantages", "the sign turns", adv(flip), 50, 20)
add("f03", 2, "baseline", "advantages", "no baseline and no whitening", no_baseline, 1)
add("f05", 1, "absolute", "advantages", "absolute value", adv(absolute), 60, 20)
add("f09", 2, "double", "advantages", "the baseline is subtracted three times", base(3.0), 70)
add("f04", 2, "baseline", "advantages", "baseline x4", base(4.0), 50, 30)
add("f07", 1, "easy", "advantages", "sign wrong for groups with a mean above 0.7", adv(flip_easy(0.7)), 40)
add("f08", 1, "square", "advantages", "squared without the sign", adv(lambda c, w, A, R, M, lens: A.pow(2) * 3), 60)

# ---------------------------------------------------------------- the runs: entropy
add("f01", 2, "bonus", "entropy", "bonus 0 -> 0.6", setting(ent_coef=0.6), 50)
add("f02", 1, "ramp", "entropy", "bonus ramps to 0.5", ramped("ent_coef", 0.5), 40, 40)
add("f10", 2, "target", "entropy", "entropy target 0.15 -> 1.6", setting(ent_target=1.6), 30)
add("f06", 1, "negative", "entropy", "bonus of -1", setting(ent_coef=-1.0), 12)
add(
    "f07",
    2,
    "logp",
    "entropy",
    "a bug pays -logp",
    lambda c, w: c.h.update(extra=lambda lp, en: -4.0 * w * lp.detach() * lp),
    30,
)
add("f05", 2, "ramp", "entropy", "bonus ramps to 0.3", ramped("ent_coef", 0.2), 1, 60)
add("f04", 1, "bonus", "entropy", "bonus 0 -> 1", setting(ent_coef=1.0), 85)
add(
    "f09",
    1,
    "last",
    "entropy",
    "a bug weighs the bonus of the last words 100 times",
    lambda c, w: c.h.update(extra=lambda lp, en: -1.2 * en * (torch.arange(en.shape[1]) > 3)),
    115,
)
add("f03", 1, "negative", "entropy", "bonus of -1.5", setting(ent_coef=-1.5), 8)

# ---------------------------------------------------------------- the runs: length
add("f01", 1, "pay", "length", "a token pays 5", per_token(5.0), 50)
add(
    "f05",
    1,
    "cost",
    "length",
    "each token beyond four costs 0.3",
    rew(lambda c, w, r, p, t, n: r - 0.3 * w * np.maximum(0, n - 4)),
    45,
    20,
)
add("f02", 1, "rank", "length", "the shorter in the group are paid, right or wrong", rew(kimi), 30)
add(
    "f03",
    1,
    "wanted",
    "length",
    "two points for each token away from a wanted length",
    rew(lambda c, w, r, p, t, n: r - 2.5 * w * np.abs(n - 3)),
    45,
    20,
)
add("f07", 2, "overlong", "length", "overlong penalty from 2 tokens on", setting(overlong_buffer=2), 35)
add(
    "f08",
    1,
    "brief",
    "length",
    "a bonus for answers of at most four tokens",
    rew(lambda c, w, r, p, t, n: r + w * 1.5 * (n <= 4)),
    6,
)
add("f04", 2, "cost", "length", "a token costs 0.4", per_token(-0.4), 20, 10)
add("f10", 2, "cost", "length", "a token costs 0.5", per_token(-0.5), 20)

# ---------------------------------------------------------------- the runs: other
add("f01", 2, "damage", "other", "a tensor of the trainer is damaged late", once(damage), 108)
add("f02", 2, "reload", "other", "the first checkpoint is reloaded late", once(reload), 92)
add("f03", 1, "dropout", "other", "dropout left on in the trainer", hook(dropout=0.5), 45)
add("f04", 2, "mask", "other", "loss mask inverted: only the tool's tokens train", mask_only_tools, 50)
add("f04", 1, "tool", "other", "the tool answers for another key", wrong_tool(1.0), 50)
add("f06", 2, "labels", "other", "gradients of the next token's logprob, from the start", labels_shift, 1)
add(
    "f07",
    1,
    "resize",
    "other",
    "a resize of the vocabulary averages embeddings, late",
    once(emb_merge([(2, 3), (4, 5), (6, 7)])),
    74,
)
add("f08", 2, "decode", "other", "two tokens are decoded as each other before training", retok(3, 4), 60)
add("f10", 1, "merge", "other", "weights are merged with the first ones at each step", merged(0.2), 40, 20)
add("f05", 2, "round", "other", "the trainer's weights are rounded after each step", rounded(0.12), 50, 20)
add("f09", 1, "zero", "other", "gradients are never zeroed", no_zero, 60)
add(
    "f08", 1, "dead", "other", "a row of the head is zeroed at each step", dead_row(("head.weight", "head.bias"), 5), 70
)
add("f05", 1, "mask", "other", "only the first three tokens train", mask_no_tail(3), 40)

# ---------------------------------------------------------------- the runs: harmless
add("f01", 1, "slower", "harmless", "learning rate halved", setting(lr=1e-3), 60)
add("f01", 2, "lag", "harmless", "lag of 1", setting(lag=1), 40)
add("f02", 1, "batch", "harmless", "batch 96 -> 160", setting(batch=160), 50)
add("f02", 2, "temperature", "harmless", "temperature 0.95 on both sides", setting(temperature=0.95), 50)
add("f03", 1, "order", "harmless", "prompts of another seed", data_seed=50)
add("f03", 2, "clip", "harmless", "gradients clipped at 0.5", setting(clip_grad=0.5), 40)
add("f04", 1, "bf16", "harmless", "engine in bfloat16", bf16=True)
add("f04", 2, "timeouts", "harmless", "1 % of scores lost", rew(coin_flip(0.01, -1.0, 1.0)), 60)
add("f05", 1, "lag", "harmless", "lag 2 -> 3", setting(lag=3), 50)
add("f05", 2, "order", "harmless", "prompts of another seed", data_seed=50)
add("f06", 1, "kl", "harmless", "KL coefficient halved", setting(kl_coef=0.01), 60)
add("f06", 2, "beta2", "harmless", "beta2 0.99 -> 0.98", setting(beta2=0.98), 60)
add("f07", 1, "lag", "harmless", "lag of 1", setting(lag=1), 40)
add("f07", 2, "clip", "harmless", "upper clip 0.28 -> 0.24", setting(clip_high=0.24), 40)
add("f08", 1, "warmup", "harmless", "warm-up of 10 steps", s=dict(warmup=10))
add("f09", 1, "batch", "harmless", "batch 64 -> 96", setting(batch=96), 60)
add("f10", 1, "fp32", "harmless", "engine in float32", bf16=False)
add("f10", 2, "decay", "harmless", "weight decay 0 -> 0.0001", setting(weight_decay=1e-4), 40)


# ---------------------------------------------------------------- the runs: more of several causes
add("f08", 1, "zeros", "data", "noise in the prompts: most digits are zeros", zeros(3), 60, 10)
add("f05", 2, "counts", "data", "prompts with counts of one only", counts(8, 9), 50)
add("f10", 2, "reversed", "reward", "the verifier reads the list from its end", rew(hops_reversed), 35, 10)
add("f02", 1, "layers", "other", "gradients of the attention have the wrong sign", layer_sign("qkv"), 20)
add("f01", 1, "decode", "other", "two coins are decoded as each other before training", retok(12, 15), 60)
add("f09", 2, "merge", "other", "weights are merged with the first ones at each step", merged(0.05), 60, 30)
add("f05", 1, "warm", "optimizer", "second moments of Adam lost every 10 steps", moments(1e-4, 10), 60)
add("f10", 2, "kernel", "mismatch", "the engine's positions are off by one after the prompt", position_shift, 45)
