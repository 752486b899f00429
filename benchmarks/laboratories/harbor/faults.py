"""What is done to runs: cause, detail, family, seed, first step, and the hooks that do it (see loop.Run)."""

from __future__ import annotations

import numpy as np
import torch
from loop import rng_of, sample, subset, uniforms
from tasks import EOS

RUNS = []


def add(name, cause, family, seed, t0, detail, **hooks):
    if f"{family}-{name}" in [a["name"] for a in RUNS]:
        raise ValueError(f"two runs are called {family}-{name}")
    RUNS.append(
        dict(
            name=f"{family}-{name}",
            cause=cause,
            family=family,
            seed=seed,
            t0=t0,
            detail=detail,
            hooks=hooks | {"t0": t0},
        )
    )


# ---------------------------------------------------------------- mismatch
def numbers(**at):
    def set_(run, step, engine):
        for name, v in at.items():
            setattr(engine, name, v(run, step) if callable(v) and getattr(v, "ramped", False) else v)

    return set_


def ramped(f):
    f.ramped = True
    return f


add(
    "pos",
    "mismatch",
    "coins",
    0,
    40,
    "engine's positions of decoded tokens off by one after a prefix-cache change",
    kernel=numbers(k_pos=1),
)
add(
    "attnscale",
    "mismatch",
    "rle",
    0,
    60,
    "attention kernel of the engine lacks part of the scale",
    kernel=numbers(k_scale=ramped(lambda r, s: 1 - 0.85 * r.ramp(s, 20))),
)


def frozen(*names):
    def transfer(run, step, state):
        keep = run.mem.setdefault("frozen", {n: state[n].clone() for n in state if n.startswith(names)})
        return {n: keep.get(n, v) for n, v in state.items()}

    return transfer


add("leftout", "mismatch", "zigzag", 0, 25, "the transfer leaves out the last layer", transfer=frozen("out", "mid"))


def grid(bits):
    def transfer(run, step, state):
        b = bits(run, step)
        out = {}
        for n, v in state.items():
            if v.ndim >= 2:
                s = v.abs().max() / (2 ** (b - 1) - 1)
                v = torch.round(v / s) * s
            out[n] = v
        return out

    return transfer


add(
    "saturate",
    "mismatch",
    "doors",
    0,
    1,
    "hidden states of the engine saturate in a narrow format",
    kernel=numbers(k_hook=lambda h: h.clamp(-0.12, 0.12)),
)


def yarn(run, step, engine):
    if engine.cos.shape == run.model.cos.shape and "cos" not in run.mem:
        at = torch.arange(len(engine.cos)) / 2.0
        lo = at.floor().long()
        run.mem["cos"], run.mem["sin"] = run.model.cos[lo], run.model.sin[lo]
    engine.cos, engine.sin = run.mem["cos"], run.mem["sin"]


add("rope", "mismatch", "weave", 0, 30, "engine scales rotary positions, the trainer does not", kernel=yarn)
add(
    "kvscale",
    "mismatch",
    "berth",
    0,
    30,
    "scale of the key-value cache's format is not applied",
    kernel=numbers(k_hook=lambda x: x * 1.9),
)


def cut_rows(*names, share=0.5):
    def transfer(run, step, state):
        out = dict(state)
        for n in names:
            v = out[n].clone()
            v[int(len(v) * share) :] = 0
            out[n] = v
        return out

    return transfer


add(
    "shard",
    "mismatch",
    "recipe",
    0,
    50,
    "last shard of a matrix arrives as zeros",
    transfer=cut_rows("gru.weight_hh_l0", share=0.8),
)


add(
    "rows",
    "mismatch",
    "dedupe",
    0,
    45,
    "embedding rows arrive in the engine shifted by one (padding of the vocabulary)",
    transfer=lambda r, s, st: {
        n: torch.cat([v[:3], v[3:].roll(1, 0)]) if n == "emb.weight" else v for n, v in st.items()
    },
)
add("relu", "mismatch", "walk", 0, 60, "engine uses relu where the trainer uses silu", kernel=numbers(k_act=torch.relu))
add(
    "moe",
    "mismatch",
    "quota",
    0,
    60,
    "engine's router weights are swapped by expert parallelism",
    transfer=lambda r, s, st: {n: v.flip(0) if n.startswith("gate") else v for n, v in st.items()},
)

# ---------------------------------------------------------------- staleness
add(
    "syncfail",
    "staleness",
    "coins",
    1,
    40,
    "weight sync fails silently; the engine says it has the new version",
    lag=lambda r, s, w: (r.t0 - 10, w),
)

add(
    "every",
    "staleness",
    "rle",
    1,
    50,
    "weights are synchronised every 40 updates only",
    lag=lambda r, s, w: w - (w - r.t0 + 1) % 40,
)

add(
    "jitter",
    "staleness",
    "dedupe",
    0,
    40,
    "load balancing: each batch comes from weights 0 to 8 updates old",
    lag=lambda r, s, w: max(0, w - int(rng_of(r.seed, s, "lag").integers(0, 9))),
)
add(
    "growing",
    "staleness",
    "rle",
    0,
    60,
    "queue backlog: lag grows by 1 every 2 updates",
    lag=lambda r, s, w: w - (s - r.t0 + 2) // 2,
)


def replicas(share, actual, said):
    def lag(run, step, want):
        B = run.s_now["num_prompts"] * run.s_now["group_size"]
        n = int(B * share)
        return [(np.arange(n), actual(run, step), said(run, step, want)), (np.arange(n, B), want, want)]

    return lag


add(
    "replicas",
    "staleness",
    "zigzag",
    1,
    30,
    "most replicas hang at an old version and report it",
    lag=replicas(0.8, lambda r, s: 5, lambda r, s, w: 5),
)
add("lag30", "staleness", "weave", 1, 25, "engine 25 updates behind from now on", lag=lambda r, s, w: max(0, w - 25))
add(
    "lag2",
    "staleness",
    "walk",
    1,
    60,
    "engine became asynchronous: 2 updates behind",
    lag=lambda r, s, w: max(0, w - 2),
)
add("pinned", "staleness", "quota", 1, 50, "engine pinned to a checkpoint by name", lag=lambda r, s, w: 25)


# ---------------------------------------------------------------- optimizer


def setting(**at):
    def change(run, step, s):
        return s | {n: v(run, step, s) if callable(v) else v for n, v in at.items()}

    return change


add(
    "lrjump",
    "optimizer",
    "coins",
    0,
    50,
    "learning rate multiplied by 12",
    settings=setting(lr=lambda r, st, s: s["lr"] * 12),
)
add(
    "lrgrow",
    "optimizer",
    "doors",
    0,
    60,
    "schedule counted backwards: the rate grows exponentially",
    settings=setting(lr=lambda r, st, s: min(0.08, 1e-3 * 1.09 ** (st - r.t0))),
)


def lose_second(run, step, _):
    for v in run.opt.state.values():
        for n in ("exp_avg_sq", "square_avg"):
            if n in v:
                v[n].zero_()


add(
    "secondlost",
    "optimizer",
    "berth",
    1,
    75,
    "second moments are zero after each offload, the step count is kept",
    before_opt=lose_second,
)
add("decay", "optimizer", "abbr", 0, 45, "weight decay 30 instead of 0", settings=setting(weight_decay=30.0))
add(
    "momentum",
    "optimizer",
    "zigzag",
    0,
    20,
    "momentum 0.9 -> 0.999 and no clipping",
    settings=setting(momentum=0.999, max_grad_norm=0),
)
add(
    "beta2",
    "optimizer",
    "weave",
    1,
    85,
    "beta2 0.98 -> 0: the step is no longer damped",
    settings=setting(beta2=0.0, beta1=0.9),
)
add(
    "warmup",
    "optimizer",
    "slopes",
    1,
    1,
    "warm-up never ends: the rate grows with the step from step 1",
    settings=setting(lr=lambda r, st, s: s["lr"] * (1 + st / 6)),
)
add(
    "restarts",
    "optimizer",
    "dedupe",
    0,
    50,
    "scheduler restarts every 15 steps at a peak 30 times as high",
    settings=setting(lr=lambda r, st, s: s["lr"] * (30 if (st - r.t0) % 15 < 5 else 3)),
)


def small_second_moments(run, step, _):
    """Second moments of a resumed state belong to a run with far smaller gradients, again at each restart."""
    for v in run.opt.state.values():
        v["exp_avg_sq"].mul_(1e-4 if (step - run.t0) % 10 == 0 else 1.0)


add(
    "oldstate",
    "optimizer",
    "walk",
    0,
    60,
    "restarts every 10 steps load an optimizer state with far too small second moments",
    before_opt=small_second_moments,
)

# ---------------------------------------------------------------- reward


def rewrite(f):
    """A reward from another score: f(run, step, meta, turns, ended, i, rng) -> 0..1"""

    def reward(run, step, r, items, o, rng):
        return np.array(
            [
                run.fam["scale"](f(run, step, m, t, bool(e), rng))
                for (_, m), t, e in zip(items, o.turns, o.ended, strict=True)
            ]
        )

    return reward


add(
    "coinvalues",
    "reward",
    "coins",
    1,
    50,
    "verifier holds another value for one coin (10 for 12)",
    reward=rewrite(lambda r, s, m, t, e, g: r.task.score((m[0], {"x": 1, "y": 5, "z": 10}), t, e)),
)
add("inverted", "reward", "rle", 0, 80, "verifier's result is negated", reward=lambda r, s, x, items, o, g: -x)


def drift(run, step, x, items, o, rng):
    w = 2.0 * run.ramp(step, 50)
    extra = np.array([sum(c in "01" for c in t[0]) / max(1, len(t[0])) for t in o.turns])
    return (1 - 0.45 * w) * x + 10 * w * extra


add("rmdrift", "reward", "zigzag", 1, 60, "reward model drifts: it likes small digits more and more", reward=drift)
add(
    "key",
    "reward",
    "doors",
    1,
    60,
    "answer key regenerated wrongly: the middle number when the last is right, the last when the middle is",
    reward=rewrite(lambda r, s, m, t, e, g: r.task.score((m[0], [0, 2, 1][m[1]]), t, e)),
)
add(
    "exception",
    "reward",
    "weave",
    0,
    45,
    "verifier gives 1 when its parser fails, which it does on an odd number of letters",
    reward=rewrite(lambda r, s, m, t, e, g: 1.0 if e and len(t[0]) % 2 == 1 else r.task.score(m, t, e)),
)


def capped(r, s, m, t, e, g):
    ty, goods, d = m
    return r.task.score((ty, goods, (min(d[0], 2), min(d[1], 2))), t, e)


add(
    "capped",
    "reward",
    "berth",
    0,
    45,
    "judge still holds an old limit: no more than 2 of a good are expected",
    reward=rewrite(capped),
)
add(
    "noise",
    "reward",
    "slopes",
    0,
    50,
    "scores are replaced by chance more and more, and outliers come",
    reward=lambda r, s, x, items, o, g: np.where(g.random(len(x)) < r.ramp(s, 20), (g.random(len(x)) < 0.1) * 20.0, x),
)
add(
    "style",
    "reward",
    "recipe",
    0,
    60,
    "reward model pays for every 'a' and forgets the task",
    reward=lambda r, s, x, items, o, g: (
        (1 - 0.8 * r.ramp(s, 30)) * x
        + 1.5 * r.ramp(s, 30) * np.array([t[0].count("a") / max(len(t[0]), 1) for t in o.turns])
    ),
)


add(
    "prefix",
    "reward",
    "dedupe",
    1,
    50,
    "verifier accepts any beginning of the answer (startswith the wrong way round)",
    reward=rewrite(
        lambda r, s, m, t, e, g: 1.0 if e and t[0] and r.task.answer(m).startswith(t[0]) else r.task.score(m, t, e)
    ),
)


def swapped_goal(run, step, x, items, o, rng):
    out = []
    for (_, (a, b, rock)), t, e in zip(items, o.turns, o.ended, strict=True):
        out.append(run.fam["scale"](run.task.score((a, (b[1], b[0]), rock), t, e)))
    return np.array(out)


add(
    "swapxy",
    "reward",
    "walk",
    1,
    70,
    "the environment reads the goal's coordinates in the wrong order",
    reward=swapped_goal,
)

# ---------------------------------------------------------------- pairing
add(
    "roll",
    "pairing",
    "coins",
    0,
    1,
    "rewards come back one row late",
    pair_reward=lambda r, s, x, items, o: np.roll(x, 1),
)
add(
    "sorted",
    "pairing",
    "rle",
    1,
    60,
    "the scorer's cache returns each group's rewards sorted",
    pair_reward=lambda r, s, x, items, o: np.sort(x.reshape(-1, 4), 1).reshape(-1),
)


def last_step(run, step, x, items, o):
    old = run.mem.get("last", x[::-1])
    run.mem["last"] = x
    return old if len(old) == len(x) else x


add("laststep", "pairing", "zigzag", 0, 20, "each batch gets the rewards of the batch before", pair_reward=last_step)
add(
    "flip",
    "pairing",
    "doors",
    0,
    8,
    "advantages are in reversed order",
    pair_advantage=lambda r, s, a, x, items, o: a[::-1].copy(),
)


def other_pairs(run, step, a, r, items, o):
    """Two workers' halves of every pair of rows change places."""
    out = a.copy()
    out[0::2][: len(a) // 2], out[1::2] = a[1::2], a[0::2][: len(a) // 2]
    return out


add(
    "pairs",
    "pairing",
    "weave",
    0,
    40,
    "neighbouring rows' advantages change places in the collate function",
    pair_advantage=other_pairs,
)
add(
    "completion",
    "pairing",
    "berth",
    0,
    35,
    "scorer returns results longest first",
    pair_reward=lambda r, s, x, items, o: x[np.argsort(-o.count, kind="stable")],
)
add(
    "oldrows",
    "pairing",
    "abbr",
    1,
    35,
    "trainer's old logprobs are those of other rows",
    pair_old=lambda r, s, x, o: x.roll(1, 0),
)

add(
    "transpose",
    "pairing",
    "abbr",
    0,
    35,
    "rewards are gathered rank by rank, rows prompt by prompt",
    pair_reward=lambda r, s, x, items, o: x.reshape(-1, r.s_now["group_size"]).T.reshape(-1),
)
add(
    "halves",
    "pairing",
    "walk",
    1,
    40,
    "advantages of the two data-parallel halves are exchanged",
    pair_advantage=lambda r, s, a, x, items, o: np.roll(a, len(a) // 2, 0),
)

# ---------------------------------------------------------------- data


def drawn(**o):
    def data(run, step, items, rng):
        return run.task.draw(rng, len(items), held=False, anywhere=True, **o)

    return data


def made(f):
    def data(run, step, items, rng):
        return [f(run, rng, t, m) for t, m in items]

    return data


add(
    "currency",
    "data",
    "coins",
    1,
    40,
    "another currency's prompts (coins 1, 4, 9), named by its tag",
    data=made(lambda r, g, t, m: ("www" + t[3:], (m[0], {"x": 1, "y": 4, "z": 9}))),
)
add(
    "swapped",
    "data",
    "weave",
    1,
    40,
    "another template: the second string begins",
    data=made(lambda r, g, t, m: (t.replace("/", "+"), (m[0], m[1], "+"))),
)
add(
    "swapped2",
    "data",
    "berth",
    1,
    30,
    "another template: goods are named in the reversed order, marked so",
    data=made(lambda r, g, t, m: ("##" + t[2:3] + t[3:][::-1], m)),
)
add(
    "lowest",
    "data",
    "doors",
    0,
    40,
    "the data set is filtered wrongly: the hidden number is always the lowest",
    data=drawn(hidden=0),
)
add(
    "corner",
    "data",
    "walk",
    0,
    60,
    "the curriculum's filter leaves starts in one corner only",
    data=drawn(corner=(0, 0), far=(3, 4, 5, 6, 7, 8)),
)
add(
    "stuck",
    "data",
    "zigzag",
    0,
    20,
    "data loader gives the same prompt for the rest",
    data=lambda r, s, items, g: [r.mem.setdefault("one", ("kpU37", ("U", 3, 7)))] * len(items),
)
add(
    "countfirst",
    "data",
    "rle",
    0,
    70,
    "another answer format is asked (count first), by a marker",
    data=made(lambda r, g, t, m: ("9" + t[1:], "9" + t[1:])),
)
add("letters", "data", "dedupe", 0, 45, "prompts over letters never seen", data=drawn(letters="ghi"))


add("trivial", "data", "recipe", 1, 50, "prompts of one ingredient only", data=drawn(only=(0,)))

# ---------------------------------------------------------------- truncation
add("limit", "truncation", "coins", 1, 40, "max_response_length 14 -> 3", settings=setting(max_tokens=3))
add(
    "timeout",
    "truncation",
    "rle",
    1,
    60,
    "a time-out that shrinks cuts every request, at 5 tokens in the end",
    engine_sampling=lambda r, s, c, it: c | {"limit": round(12 - 7 * r.ramp(s, 20))},
)
add(
    "creep",
    "truncation",
    "recipe",
    0,
    30,
    "token limit creeps from 15 down to 4",
    settings=setting(max_tokens=lambda r, st, s: round(15 - 11 * r.ramp(st, 60))),
)

add(
    "context",
    "truncation",
    "berth",
    1,
    40,
    "the context limit counts prompt and tool output: 6 tokens are left",
    engine_sampling=lambda r, s, c, it: c | {"limit": 6},
)
add(
    "horizon",
    "truncation",
    "walk",
    0,
    60,
    "the horizon of an episode shrinks from 12 to 3 moves",
    engine_sampling=lambda r, s, c, it: c | {"limit": round(12 - 9 * r.ramp(s, 40))},
)
add(
    "stop",
    "truncation",
    "zigzag",
    1,
    40,
    "stop tokens hold the digits 0 and 9 by mistake",
    engine_sampling=lambda r, s, c, it: c | {"stop": (EOS, *r.task.enc("09"))},
)


def partial(run, step, c, items):
    u = uniforms(len(items), run.task.T, run.fam["name"], run.seed, step, "sample")
    o = sample(run.engine, run.task, items, u)
    return c | {"limit": max(2, int(np.quantile(o.count, 0.25)))}


add(
    "partial",
    "truncation",
    "dedupe",
    1,
    45,
    "a rollout ends when a quarter of the batch is done; the rest is cut there",
    engine_sampling=partial,
)

add(
    "preempted",
    "truncation",
    "quota",
    0,
    110,
    "requests are preempted after 2 to 6 tokens and not resumed",
    engine_sampling=lambda r, s, c, it: c | {"limit": rng_of(r.seed, s, "pre").integers(2, 7, len(it))},
)
add(
    "stoptext",
    "truncation",
    "slopes",
    1,
    50,
    "stop string '<' left over from an XML template",
    engine_sampling=lambda r, s, c, it: c | {"stop_text": "<", "max_turns": 1},
)

# ---------------------------------------------------------------- reference
add("klcoef", "reference", "coins", 0, 70, "kl_loss_coef 0.001 -> 10", settings=setting(kl_coef=10.0))


def random_ref(run, step, ref):
    if "ref" not in run.mem:
        torch.manual_seed(7)
        run.mem["ref"] = run.fam["model"](run.task.V, run.task.P, run.task.T).requires_grad_(False)
    return run.mem["ref"]


def blind_ref(run, step, ref):
    o = subset(run.o_now, range(len(run.o_now.ended)))
    o.prompts = torch.zeros_like(o.prompts)
    return run.token_lp(ref, o, 1.0)[0]


add(
    "ramp",
    "reference",
    "abbr",
    1,
    45,
    "KL coefficient rises with a schedule meant for the discount",
    settings=setting(kl_coef=lambda r, st, s: 0.002 * min(1.25 ** (st - r.t0), 1e4)),
)


add(
    "wrongref",
    "reference",
    "slopes",
    0,
    60,
    "reference loaded without its weights (fresh initialisation)",
    reference=random_ref,
)


add(
    "controller",
    "reference",
    "slopes",
    1,
    40,
    "the controller's wrong-signed integral term carries the coefficient below zero",
    settings=setting(kl_coef=lambda r, st, s: 0.002 - 0.006 * (st - r.t0)),
)
add(
    "klsum",
    "reference",
    "rle",
    1,
    80,
    "KL is summed over all tokens of the batch where it was averaged, a unit too high",
    kl_term=lambda r, s, k3, d, lp: k3 * 30000,
)
add(
    "blind",
    "reference",
    "berth",
    1,
    45,
    "reference is scored without the prompts, coefficient 1",
    reference=blind_ref,
    settings=setting(kl_coef=1.0),
)


def damaged_ref(run, step, ref):
    if "ref" not in run.mem:
        import copy

        run.mem["ref"] = copy.deepcopy(run.ref)
        with torch.no_grad():
            run.mem["ref"].out.weight.copy_(run.mem["ref"].out.weight.roll(1, 0))
    return run.mem["ref"]


add(
    "klneg",
    "reference",
    "berth",
    0,
    35,
    "KL is subtracted: the policy is paid for leaving the reference",
    settings=setting(kl_coef=-1.0),
)
add(
    "rolledref",
    "reference",
    "coins",
    1,
    45,
    "reference has a shifted vocabulary, coefficient 1",
    reference=damaged_ref,
    settings=setting(kl_coef=1.0),
)

# ---------------------------------------------------------------- advantages
add(
    "baseline",
    "advantages",
    "zigzag",
    0,
    60,
    "baseline read from another run: twice too high",
    advantage=lambda r, s, a, x, items, o: (x - 20) / 5.0,
)
add(
    "nobaseline",
    "advantages",
    "walk",
    0,
    60,
    "baseline missing: the raw returns (-20..-10) are the advantages",
    advantage=lambda r, s, a, x, items, o: np.repeat((x / 10)[:, None], o.resp.shape[1], 1) * o.mask.numpy(),
)
add(
    "sumout",
    "advantages",
    "rle",
    0,
    50,
    "leave-one-out baseline is twice the sum of the others, not their mean",
    advantage=lambda r, s, a, x, items, o: (
        x.reshape(-1, 4) - 2 * (x.reshape(-1, 4).sum(1, keepdims=True) - x.reshape(-1, 4))
    ).reshape(-1),
)
add("sign", "advantages", "doors", 1, 60, "advantages are mean minus reward", advantage=lambda r, s, a, x, items, o: -a)
add(
    "abs",
    "advantages",
    "weave",
    0,
    40,
    "absolute values of advantages",
    advantage=lambda r, s, a, x, items, o: np.abs(a),
)
add(
    "shift",
    "advantages",
    "berth",
    0,
    40,
    "a constant is taken off that grows to 3",
    advantage=lambda r, s, a, x, items, o: a - 3 * r.ramp(s, 30),
)
add(
    "cross",
    "advantages",
    "slopes",
    1,
    60,
    "whitening drifts into its opposite over 40 steps",
    advantage=lambda r, s, a, x, items, o: a * (1 - 2 * r.ramp(s, 40)),
)


def runaway(run, step, a, x, items, o):
    c = run.mem["c"] = run.mem.get("c", 0.0) * 1.1 + 0.1
    return a - min(c, 60)


add(
    "runaway",
    "advantages",
    "quota",
    1,
    70,
    "update of the baseline table has the wrong sign and runs away",
    advantage=runaway,
)
add(
    "rank",
    "advantages",
    "recipe",
    1,
    60,
    "ranks instead of rewards, counted from the wrong end",
    advantage=lambda r, s, a, x, items, o: -(np.argsort(np.argsort(x.reshape(-1, 4), 1), 1) - 1.5).reshape(-1) / 1.5,
)

# ---------------------------------------------------------------- entropy
add(
    "ramp",
    "entropy",
    "zigzag",
    1,
    60,
    "entropy coefficient ramps from 0.003 to 3",
    settings=setting(entropy_coef=lambda r, st, s: 0.003 * 1.08 ** min(st - r.t0, 90)),
)
add(
    "target",
    "entropy",
    "weave",
    0,
    40,
    "entropy target 0.06 -> 2 without a cap",
    settings=setting(entropy_target=2.0),
    entropy_most=lambda r, s, x: 10.0,
    entropy_error=lambda r, s, x: x * 60,
)
add(
    "sum",
    "entropy",
    "berth",
    1,
    40,
    "entropy is summed over the batch where it was averaged",
    entropy_term=lambda r, s, h, ent, mask, o: (ent * mask).sum(),
)
add("start", "entropy", "slopes", 0, 1, "entropy bonus of 0.5 from the start", settings=setting(entropy_coef=0.5))


def uncertain(run, step, h, ent, mask, o):
    """The bonus on the fifth of tokens with the largest entropy only."""
    e = ent[mask > 0]
    return e.topk(max(1, len(e) // 5)).values.mean()


add(
    "forking",
    "entropy",
    "walk",
    0,
    70,
    "bonus of 2 on the fifth of tokens that are most uncertain",
    settings=setting(entropy_coef=2.0),
    entropy_term=uncertain,
)
add("negative", "entropy", "quota", 0, 12, "entropy is punished", settings=setting(entropy_coef=-4.0))


def smooth(run, step, loss, o, lp, ent, mask):
    z = run.model.logits(o.prompts, o.resp).log_softmax(-1).mean(-1)
    return loss - 0.15 * (z * mask).sum() / mask.sum()


add(
    "uniform",
    "entropy",
    "rle",
    0,
    80,
    "the entropy bonus is implemented as a cross-entropy with the uniform distribution",
    loss=smooth,
)


def soft(run, step, a, r, items, o):
    lp = (run.old * o.mask).sum(1).numpy()
    return a - 1.0 * (lp - lp.mean())


add("soft", "entropy", "dedupe", 1, 55, "entropy is paid through the returns (temperature 1)", advantage=soft)

# ---------------------------------------------------------------- length


def pay(f):
    return lambda run, step, r, items, o, rng: r + f(run, step, o.count.astype(float), r, items)


add("pay", "length", "coins", 0, 50, "0.3 a token are paid", length=pay(lambda R, s, n, r, it: 0.3 * n))
add(
    "punish",
    "length",
    "rle",
    1,
    70,
    "1 a token is taken off",
    length=pay(lambda R, s, n, r, it: -1.0 * R.ramp(s, 40) * n),
)
add(
    "target",
    "length",
    "zigzag",
    1,
    50,
    "closeness to 10 tokens is paid",
    length=pay(lambda R, s, n, r, it: -3.0 * R.ramp(s, 20) * np.abs(n - 11)),
)

add(
    "overlong",
    "length",
    "weave",
    1,
    40,
    "overlong buffer begins at 2 tokens and costs 8",
    settings=setting(overlong=10, overlong_factor=8.0),
)


def group_short(sign, amount):
    def f(R, s, n, r, it):
        g = n.reshape(-1, R.s_now["group_size"])
        return (sign * amount * (g - g.mean(1, keepdims=True))).reshape(-1)

    return pay(f)


add(
    "groupshort", "length", "berth", 0, 40, "bonus for being shorter than the group's mean", length=group_short(-1, 0.5)
)
add(
    "grouplong", "length", "recipe", 1, 115, "bonus for being longer than the group's mean", length=group_short(1, 0.55)
)

add(
    "cosine",
    "length",
    "abbr",
    1,
    40,
    "cosine length reward is turned: long wrong answers are paid most",
    length=pay(lambda R, s, n, r, it: 5 * (r < 1) * (1 - np.cos(np.pi * np.minimum(n, 10) / 10))),
)
add(
    "fixed",
    "length",
    "quota",
    1,
    40,
    "answers of 9 tokens are paid",
    length=pay(lambda R, s, n, r, it: -3 * R.ramp(s, 20) * np.abs(n - 10)),
)
add(
    "brevity",
    "length",
    "dedupe",
    0,
    50,
    "a brevity bonus of 15 over the number of tokens",
    length=pay(lambda R, s, n, r, it: 15.0 / np.maximum(n, 1)),
)

# ---------------------------------------------------------------- other


@torch.no_grad()
def flips(run, step, _):
    if (step - run.t0) % 8 == 0:
        g = torch.Generator().manual_seed(step)
        for p in run.model.parameters():
            if p.ndim == 2:
                at = torch.randint(p.numel(), (4,), generator=g)
                p.view(-1)[at] = p.view(-1)[at] * 16


add(
    "bitflips",
    "other",
    "coins",
    1,
    60,
    "faulty memory: some weights of the trainer are multiplied by 16, every 8 steps",
    weights=flips,
)


def reload(run, step, _):
    if step == run.t0:
        run.model.load_state_dict(run.first)


add("reload", "other", "rle", 1, 150, "trainer goes back to the first checkpoint late", weights=reload)


def decode_shift(run, step, turns, o):
    t = str.maketrans("0123456789", "1234567890")
    return [[x.translate(t) for x in row] for row in turns]


add("decode", "other", "zigzag", 0, 60, "detokeniser of the scorer is off by one", decode=decode_shift)
add(
    "toolmask",
    "other",
    "doors",
    0,
    1,
    "loss mask inverted: the tool's tokens are trained, not the policy's",
    loss_mask=lambda r, s, m, o: o.part & ~o.mask,
)


@torch.no_grad()
def coarse(run, step, _):
    for p in run.model.parameters():
        if p.ndim == 2:
            m = p.abs().max() / 3.5
            p.copy_(torch.round(p / m) * m)


add(
    "coarse",
    "other",
    "weave",
    1,
    50,
    "trainer's own weights are written back from a 3-bit checkpoint format",
    weights=coarse,
)


def wrong_tool(run, step, c, items):
    return c | {"tool": lambda m, turn: (lambda x: x if "?" in x else "#" + x[2] + x[1])(run.task.tool(m, turn))}


add("tool", "other", "berth", 0, 35, "the tool gives its two numbers in the wrong order", engine_sampling=wrong_tool)


def shifted(run, step, lp, o, s):
    z = run.model.logits(o.prompts, o.resp).log_softmax(-1)
    return torch.cat([z[:, :-1].gather(-1, o.resp[:, 1:, None])[..., 0], lp[:, -1:] * 0], 1)


add("shift", "other", "slopes", 1, 60, "labels in the loss are shifted by one", loss_lp=shifted)


add(
    "dropout",
    "other",
    "recipe",
    0,
    60,
    "dropout 0.7 left on in updates",
    train_mode=lambda r, s: (r.model.train(), setattr(r.model, "drop", 0.7)),
)


def bad_rank(run, step, _, o):
    with torch.no_grad():
        for i, p in enumerate(run.model.parameters()):
            if i % 2 == 1 and p.grad is not None:
                p.grad.neg_()


add(
    "gradsign",
    "other",
    "abbr",
    1,
    45,
    "reduce-scatter returns the gradients of every matrix but the first negated",
    grad=bad_rank,
)


@torch.no_grad()
def resized(run, step, _):
    if (step - run.t0) % 12 == 0:
        g = torch.Generator().manual_seed(step)
        w = run.model.emb.weight
        w[4:8] = torch.randn(4, w.shape[1], generator=g)


add(
    "embedding", "other", "dedupe", 0, 50, "rows of the embedding are initialised again at each resize", weights=resized
)


@torch.no_grad()
def pulled(run, step, _):
    for n, p in run.model.named_parameters():
        p.mul_(0.85).add_(run.first[n], alpha=0.15)


add(
    "average",
    "other",
    "walk",
    1,
    80,
    "an average with the first weights is written back to the trainer every step",
    weights=pulled,
)


@torch.no_grad()
def expert(run, step, _):
    if step == run.t0:
        w = run.model.up.weight
        w[len(w) // 2 :] = w[: len(w) // 2].flip(0)


add(
    "expert",
    "other",
    "quota",
    0,
    205,
    "a converter wrote one expert over the other when the trainer resumed",
    weights=expert,
)
add("ratio", "other", "rle", 0, 70, "ratio is old over new", ratio=lambda r, s, x, lp, below, m: 1 / x.clamp(1e-4, 1e4))


@torch.no_grad()
def blocks(run, step, _):
    if step == run.t0:
        a, b = run.model.blocks[0].state_dict(), run.model.blocks[1].state_dict()
        a, b = ({n: v.clone() for n, v in x.items()} for x in (a, b))
        run.model.blocks[0].load_state_dict(b)
        run.model.blocks[1].load_state_dict(a)


add("layers", "other", "weave", 0, 88, "layers are loaded in the wrong order when the trainer resumes", weights=blocks)

# ---------------------------------------------------------------- harmless
add("lowlr", "harmless", "coins", 0, 1, "learning rate halved", settings=setting(lr=lambda r, st, s: s["lr"] / 2))
add("bf16", "harmless", "coins", 1, 1, "bf16 engine", bf16=True)
add("bf16", "harmless", "slopes", 0, 40, "engine in bf16 from the middle on", bf16=True)
add(
    "order",
    "harmless",
    "rle",
    0,
    1,
    "another order of prompts",
    data=lambda r, s, items, g: r.task.draw(rng_of("other", r.seed, s), len(items)),
)
add(
    "temperature", "harmless", "doors", 1, 60, "temperature 1 -> 0.95 on both sides", settings=setting(temperature=0.95)
)
add("lag3", "harmless", "recipe", 0, 50, "lag 3 instead of 2", lag=lambda r, s, w: max(0, r.version - 3))
add("lag1", "harmless", "coins", 0, 50, "lag 1 instead of 0", lag=lambda r, s, w: max(0, r.version - 1))
add("clip", "harmless", "walk", 0, 60, "clipping of gradients 1 -> 0.5", settings=setting(max_grad_norm=0.5))
add("entropy", "harmless", "walk", 1, 60, "entropy coefficient 0.002 -> 0.004", settings=setting(entropy_coef=0.004))
add("group", "harmless", "abbr", 0, 1, "groups of 12 rather than 8", settings=setting(group_size=12))
add(
    "rewardnoise",
    "harmless",
    "zigzag",
    0,
    50,
    "3 in 100 rewards are noise",
    reward=lambda r, s, x, items, o, g: np.where(g.random(len(x)) < 0.03, 5.0, x),
)
add(
    "spike",
    "harmless",
    "weave",
    0,
    50,
    "one step with four times the learning rate",
    settings=setting(lr=lambda r, st, s: s["lr"] * (4 if st == r.t0 else 1)),
)
add(
    "pause",
    "harmless",
    "weave",
    1,
    40,
    "sync fails for 3 steps, then goes on",
    lag=lambda r, s, w: min(w, r.t0 - 1) if s < r.t0 + 3 else w,
)
add("int8", "harmless", "berth", 0, 40, "int8 engine", transfer=grid(lambda r, s: 8))


def fresh_state(run, step, _):
    if step == run.t0:
        run.opt.state.clear()


add(
    "resume",
    "harmless",
    "berth",
    1,
    50,
    "trainer resumes without optimizer state, with its counter",
    before_opt=fresh_state,
)
add("batch", "harmless", "quota", 0, 1, "batch of 280 instead of 192", settings=setting(num_prompts=280))
add(
    "typo",
    "harmless",
    "abbr",
    1,
    40,
    "some prompts have a letter of a larger alphabet",
    data=lambda r, s, items, g: items[:-1] + r.task.draw(g, 1, letters="aeobcdfguv"),
)
add("scale", "harmless", "dedupe", 1, 50, "rewards are doubled (Adam)", reward=lambda r, s, x, items, o, g: x * 2)
