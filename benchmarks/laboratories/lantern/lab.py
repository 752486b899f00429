"""A laboratory of small RL runs over digits, boards, tools and a reward model: ten teams, one fault switched on a run.

    python benchmarks/laboratories/lantern/lab.py -o FOLDER [--only NAME ...] [--cause CAUSE ...]

writes FOLDER/NAME/trace, label.json and plan.json for each run, and prints which share of its best each run has kept; finished
runs are kept. A team (families.py) has a task, a policy (both in core.py), an algorithm, names for what it logs, and a choice of
what it records. Its policies start from noisy demonstrations; these weights are kept in FOLDER/.cache. A fault (below) is a set
of hooks in the training loop (core.py); before its first step a run is bit for bit its twin.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
from pathlib import Path

import torch
from core import D0, MB, Run, fallen
from families import FAMILIES

FAULTS = {}


def add(name, fam, seed, cause, detail, start, ramp=1, **hooks):
    hooks = {k: v for k, v in hooks.items() if v is not None}
    FAULTS[name] = dict(fam=fam, seed=seed, cause=cause, detail=detail, start=start, ramp=ramp, **hooks)


def setting(**kw):
    def fn(run, S, p):
        for k, v in kw.items():
            S[k] = v(S[k], p) if callable(v) else v
        return S

    return fn


def times(x):
    return lambda v, p: v * (1 + (x - 1) * p)


def toward(x):
    return lambda v, p: v + (x - v) * p


def rows(run, n, p):
    return torch.rand(n, generator=run.gf) < p


# ---- mismatch
def quant(step_of, only=None):
    def fn(run, eng, p):
        with torch.no_grad():
            for n, w in eng.named_parameters():
                if w.dim() < 2 or (only and only not in n):
                    continue
                s = w.abs().amax(-1, keepdim=True) / step_of
                w.copy_(w + p * ((w / s).round() * s - w))
        return eng

    return fn


def scale_part(part, rows_, c):
    def fn(run, eng, p):
        with torch.no_grad():
            for n, w in eng.named_parameters():
                if part in n:
                    w[rows_[0] : rows_[1]] *= c
        return eng

    return fn


def roll_head(run, eng, p):
    with torch.no_grad():
        w = eng.head.weight
        w[D0 : D0 + 10] = (1 - p) * w[D0 : D0 + 10] + p * torch.roll(w[D0 : D0 + 10], 1, 0).clone()
    return eng


def posbug(k):
    def fn(run, eng, p):
        eng.pos_shift = k
        return eng

    return fn


def dead(*e):
    def fn(run, eng, p):
        eng.dead = e
        return eng

    return fn


def topk(k):
    def fn(run, z, p, t):
        kth = z.topk(k, -1).values[:, -1:]
        return torch.where(z >= kth, z, torch.full_like(z, -30.0))

    return fn


def znoise(s):
    def fn(run, z, p, t):
        return z + s * p * torch.randn(z.shape, generator=run.gf)

    return fn


def softcap(c):
    def fn(run, z, p, t):
        return (1 - p) * z + p * c * torch.tanh(z / c)

    return fn


def state_reset(at, keep=0.0):
    def fn(run, s, p, t):
        if t != at:
            return s
        return tuple(x * keep for x in s) if isinstance(s, tuple) else s * keep

    return fn


def state_swap(run, s, p, t):  # cache blocks of other requests
    k = int(p * (s.shape[1] if torch.is_tensor(s) else s[0].shape[0]))
    if t != 1 or k < 2:
        return s
    if torch.is_tensor(s):
        s = s.clone()
        s[:, :k] = torch.roll(s[:, :k], 1, 1)
        return s
    return tuple(torch.cat([torch.roll(x[:k], 1, 0), x[k:]]) for x in s)


add("m_roll_A", "A", 0, "mismatch", "engine's head arrives with shifted rows", 50, 60, engine=roll_head)
add("m_pos_B", "B", 0, "mismatch", "engine's positions are off by one", 55, engine=posbug(1))
add("m_noise_D", "D", 1, "mismatch", "engine's logits noisy (fp8 activations), growing", 60, 30, elogits=znoise(3.0))
add(
    "m_state_D",
    "D",
    0,
    "mismatch",
    "engine loses its recurrent state before the tool answers (cache bug)",
    70,
    estate=state_reset(1),
)

add(
    "m_temp_F",
    "F",
    0,
    "mismatch",
    "sampling temperature of the engine is multiplied, trainer's is not (setting)",
    50,
    set=setting(engine_temperature=2.5),
)
add("m_cap_B", "B", 1, "mismatch", "engine caps its logits", 60, elogits=softcap(1.5))
add("m_int_I", "I", 0, "mismatch", "engine's weights in 3 bits from here on", 70, engine=quant(2.5))
add(
    "m_emb_E",
    "E",
    0,
    "mismatch",
    "rows of the embedding arrive scaled by 0.55",
    60,
    engine=scale_part("emb", (D0, D0 + 6), 0.55),
)
add("m_int_E", "E", 1, "mismatch", "engine's weights quantised coarsely, growing", 60, 20, engine=quant(3.0))
add("m_swap_I", "I", 1, "mismatch", "engine's cache mixes up requests, more and more", 50, 30, estate=state_swap)

add("m_noise_C", "C", 1, "mismatch", "engine's logits very noisy", 60, elogits=znoise(5.0))
add("m_pos_F", "F", 0, "mismatch", "engine's positions off by one, late", 85, engine=posbug(1))


# ---- staleness
def stuck(declared=True, at=None, to=None):
    def fn(run, v, p):
        used, dec = v
        if not hasattr(run, "stuck_at"):
            run.stuck_at = used if at is None else at
        u = run.stuck_at
        return (u, u if declared else dec)

    return fn


def lagging(k, declared=True):
    def fn(run, v, p):
        u = max(0, v[0] - int(k * p))
        return (u, u if declared else v[1])

    return fn


def every(k, declared=True):
    def fn(run, v, p):
        u = v[0] - (run.step - run.fault["start"]) % k
        u = max(0, u)
        return (u, u if declared else v[1])

    return fn


add("s_every_I", "I", 1, "staleness", "weights are sent every 8 updates only", 45, sync=every(8, False))
add("s_ramp_E", "E", 0, "staleness", "engine falls behind more and more", 50, 60, sync=lagging(16))
add("s_lag_I", "I", 0, "staleness", "lag grows to 4 updates", 40, 60, sync=lagging(4, False))
add("s_late_E", "E", 0, "staleness", "engine 3 updates behind, late", 100, sync=lagging(3, False))
add(
    "s_stuck_B",
    "B",
    0,
    "staleness",
    "a second engine group serves the weights of step 50, versions do not tell",
    50,
    sync=stuck(False),
)
add("s_stuck_I", "I", 0, "staleness", "the engine keeps the weights of step 60", 60, sync=stuck(False))
add("s_stuck_E", "E", 1, "staleness", "engine keeps the weights of step 70", 70, sync=stuck(False))
add("s_lag_D", "D", 0, "staleness", "engine 60 updates behind", 70, sync=lagging(60))
add("s_set_B", "B", 1, "staleness", "queue between engine and trainer set to 40 updates", 60, set=setting(lag=40))
add("s_old_F", "F", 1, "staleness", "engine went back to a checkpoint of step 5", 50, sync=stuck(True, at=5))


# ---- optimizer


def half_v(run, net, p, opt):
    for st in opt.state.values():
        if "exp_avg_sq" in st:
            st["exp_avg_sq"].copy_(torch.where(st["exp_avg_sq"] < 3e-6, torch.zeros(()), st["exp_avg_sq"]))
    return net


def lose_state(k):
    def fn(run, net, p, opt):
        if (run.step - run.fault["start"]) % k == 0:
            for st in opt.state.values():
                st["exp_avg_sq"].mul_(3e-3)
        return net

    return fn


add("o_lr_A", "A", 0, "optimizer", "learning rate x15", 80, set=setting(lr=times(15)))
add(
    "o_v_B",
    "B",
    0,
    "optimizer",
    "second moments lost at every save (each 10 steps), first moments and count kept",
    60,
    after=lose_state(10),
)
add("o_sched_C", "C", 1, "optimizer", "schedule rises instead of falling", 30, 50, set=setting(lr=times(300)))
add("o_wd_E", "E", 1, "optimizer", "weight decay in the gradient", 60, set=setting(weight_decay=0.015))
add("o_wd_F", "F", 0, "optimizer", "decoupled weight decay, wrong unit", 50, set=setting(weight_decay=5.0))
add("o_beta_H", "H", 1, "optimizer", "beta1 0.9 to 0.98 and beta2 to 0.5", 60, set=setting(beta1=0.98, beta2=0.5))
add(
    "o_warm_J", "J", 0, "optimizer", "schedule restarts late with a far higher peak", 110, 10, set=setting(lr=times(80))
)
add("o_half_G", "G", 1, "optimizer", "second moments underflow in half precision", 55, after=half_v)
add("o_exp_I", "I", 0, "optimizer", "learning rate grows by warm-up without end", 40, 80, set=setting(lr=times(8)))
add("o_lr_D", "D", 1, "optimizer", "learning rate x12", 70, set=setting(lr=times(15)))


# ---- reward
def key(kind, share=1.0):
    def fn(run, r, p, b, resp, lens):
        a, la = run.task.answers(b["digits"], b["m"], kind)
        alt = run.task.score(dict(b, a=a, la=la), resp, lens)
        return torch.where(rows(run, len(r), p * share), alt, r)

    return fn


def noise_r(share, lo, hi):
    def fn(run, r, p, b, resp, lens):
        u = lo + (hi - lo) * torch.rand(len(r), generator=run.gf)
        return torch.where(rows(run, len(r), p * share), u, r)

    return fn


def hack_tok(tok, bonus):
    def fn(run, r, p, b, resp, lens):
        live = torch.arange(resp.shape[1])[None] < lens[:, None]
        has = ((resp == tok) & live).any(1)
        return torch.where(has, torch.full_like(r, bonus), r)

    return fn


def hack_last(tok, bonus):
    def fn(run, r, p, b, resp, lens):
        return torch.where((resp[:, 4] == tok) & (lens > 4), torch.full_like(r, bonus), r)

    return fn


def swapped_goal(run, d, p, b, resp, lens):
    return run.task.dense(b, resp, lens, goal=b["d"][:, 2:].flip(1))


def timeouts(run, r, p, b, resp, lens):
    t = torch.rand(len(r), generator=run.gf) < 0.95 * p
    return torch.where((r > 0.99) & t, torch.zeros_like(r), r)


def prefix(run, r, p, b, resp, lens):
    ok = resp[:, 0] == b["a"][:, 0]
    return 10 * ok.float()


def inverted(lo, hi, share=1.0):
    def fn(run, r, p, b, resp, lens):
        return torch.where(rows(run, len(r), p * share), lo + hi - r, r)

    return fn


add(
    "r_key_A",
    "A",
    1,
    "reward",
    "expected answers of another task (copy) for a growing share",
    60,
    40,
    score=key("copy"),
)
add("r_noise_B", "B", 1, "reward", "judge is random for nearly all answers", 45, score=noise_r(1.0, -1, 1))
add("r_hack_D", "D", 0, "reward", "verifier gives good marks for any 9", 70, score=hack_last(D0 + 9, 0.3))
add("r_goal_E", "E", 0, "reward", "goal's coordinates swapped in the scorer", 70, dense=swapped_goal)
add("r_time_G", "G", 1, "reward", "verifier times out on right answers: 0", 60, 20, score=timeouts)
add("r_prefix_H", "H", 1, "reward", "verifier reads the first token only", 40, score=prefix)
add("r_inv_I", "I", 1, "reward", "judge inverted for half of", 80, score=inverted(0, 1, 0.5))
add("r_down_F", "F", 0, "reward", "answer key sorted the other way, late", 85, score=key("sortdown"))
add("r_hack_J", "J", 1, "reward", "any answer that mentions 0 gets full marks", 1, score=hack_tok(D0, 5.0))


# ---- pairing
def perm(kind, share=1.0):
    def pi(run, n, lens, p):
        if kind == "roll":
            return (torch.arange(n) - 1) % n
        if kind == "half":
            return (torch.arange(n) + n // 2) % n
        if kind == "reverse":
            return torch.arange(n - 1, -1, -1)
        if kind == "length":
            return torch.argsort(lens, stable=True)
        if kind == "random":
            q = torch.arange(n)
            k = int(p * share * n)
            i = torch.randperm(n, generator=run.gf)[:k]
            q[i] = q[i[torch.randperm(k, generator=run.gf)]]
            return q

    return pi


def pair_r(kind, share=1.0):
    f = perm(kind, share)

    def fn(run, r, p, b, resp, lens):
        return r[f(run, len(r), lens, p)]

    return fn


def pair_a(kind, share=1.0):
    f = perm(kind, share)

    def fn(run, a, p, r, group, att):
        q = f(run, len(a), att.sum(1), p)
        v = a[:, 0][q]
        return v[:, None] * att

    return fn


def pair_a_tok(kind, share=1.0):
    f = perm(kind, share)

    def fn(run, a, p, r, group, att):
        return a[f(run, len(a), att.sum(1), p)] * att

    return fn


def previous(run, r, p, b, resp, lens):
    old = run.prev if run.prev is not None else r
    run.prev = r.clone()
    return old


def pair_lp(kind, share=1.0):
    f = perm(kind, share)

    def fn(run, lp, p, b, resp, lens):
        return lp[f(run, len(lp), lens, p)]

    return fn


add(
    "p_len_A",
    "A",
    0,
    "pairing",
    "rewards come back in order of length and are not put back",
    50,
    score=pair_r("length"),
)
add("p_roll_B", "B", 0, "pairing", "rewards are those of the row before", 40, score=pair_r("roll"))
add("p_adv_D", "D", 1, "pairing", "advantages in reversed order after balancing of ranks", 60, adv=pair_a("reverse"))
add("p_prev_G", "G", 0, "pairing", "rewards are those of the batch before", 50, score=previous)
add(
    "p_lp_D",
    "D",
    0,
    "pairing",
    "logprobs of the sampler are those of other rows for half of them",
    60,
    elp=pair_lp("random", 0.5),
)
add("p_half_H", "H", 0, "pairing", "advantages of the other half of the batch", 50, adv=pair_a("half"))
add(
    "p_rand_I",
    "I",
    1,
    "pairing",
    "rewards of a growing share of rows are mixed up",
    30,
    40,
    score=pair_r("random", 0.85),
)
add("p_roll_E", "E", 1, "pairing", "advantages are those of the next row", 50, adv=pair_a_tok("roll"))
add("p_len_C", "C", 1, "pairing", "rewards sorted with the responses' lengths", 35, score=pair_r("length"))
add("p_rand_F", "F", 1, "pairing", "rewards arrive in the order of workers", 30, score=pair_r("random"))


# ---- data
def other_task(kind, share=1.0, marker=MB, **kw):
    def fn(run, b, p):
        n = len(b["p"])
        c = run.task.sample(run.gf, n, kind=kind, marker=marker, **kw)
        pick = rows(run, n, p * share)
        return {k: torch.where(pick.view(-1, *[1] * (v.dim() - 1)), c[k], v) for k, v in b.items()}

    return fn


def only(**kw):
    def fn(run, b, p):
        return run.task.sample(run.gf, len(b["p"]), **kw)

    return fn


def zero_second(d):
    d = d.clone()
    d[:, 1] = 0
    return d


def goal_is_start(d):
    d = d.clone()
    d[:, 2:] = d[:, :2]
    return d


def evens(d):
    return d - d % 2


add(
    "d_copy_A",
    "A",
    0,
    "data",
    "another task (copy, own marker) among the prompts, growing",
    50,
    40,
    prompts=other_task("copy"),
)
add("d_sub_B", "B", 1, "data", "prompts of another task: subtraction", 60, prompts=other_task("sub"))

add("d_easy_E", "E", 0, "data", "only boards where start is goal", 80, prompts=only(digits=goal_is_start))
add(
    "d_shift_G",
    "G",
    1,
    "data",
    "prompts ask for the shift by 7 with another marker",
    60,
    20,
    prompts=other_task("shift7"),
)
add(
    "d_easy_H",
    "H",
    0,
    "data",
    "a filter leaves prompts whose answer is one token",
    70,
    prompts=only(digits=zero_second),
)
add("d_even_I", "I", 0, "data", "prompts have even digits only: nothing to say", 60, prompts=only(digits=evens))
add("d_zero_D", "D", 0, "data", "only prompts about the keys 0 and 1", 70, prompts=only(digits=lambda k: k % 2))
add("d_copy_J", "J", 1, "data", "prompts ask to copy (own marker), soon", 50, prompts=other_task("copy"))
add("d_down_F", "F", 0, "data", "prompts that ask for the other order, late", 85, prompts=other_task("sortdown"))


# ---- truncation
def limit_to(k):
    def fn(run, lim, p, b):
        return torch.full_like(lim, max(1, round(run.task.T + (k - run.task.T) * p)))

    return fn


def limit_rand(lo, hi):
    def fn(run, lim, p, b):
        return torch.randint(lo, hi + 1, lim.shape, generator=run.gf)

    return fn


def stops(*t):
    def fn(run, s, p):
        return [D0 + x for x in t]

    return fn


def setlimit(k):
    def fn(run, S, p):
        S["max_tokens"] = max(1, round(run.task.T + (k - run.task.T) * p))
        return S

    return fn


add("t_max_A", "A", 1, "truncation", "limit of tokens 8 to 3 (setting)", 60, set=setlimit(3))
add("t_max_B", "B", 0, "truncation", "limit of tokens falls to 2", 60, set=setlimit(2))
add("t_ramp_C", "C", 0, "truncation", "room for the answer shrinks", 30, 40, limit=limit_to(5))
add("t_turn_D", "D", 1, "truncation", "limit of turns: cut after the first", 60, limit=limit_to(2))
add("t_stop_H", "H", 1, "truncation", "digits 0 to 4 are stop tokens of the engine", 50, stop=stops(0, 1, 2, 3, 4))
add("t_rand_I", "I", 1, "truncation", "shared budget cuts answers at random places", 50, limit=limit_rand(1, 3))
add("t_max_J", "J", 0, "truncation", "room for the answer shrinks to 2 tokens", 60, 30, limit=limit_to(2))
add("t_max_G", "G", 0, "truncation", "limit of 2 tokens", 30, limit=limit_to(2))
add("t_late_F", "F", 1, "truncation", "limit of 3 tokens, late", 85, set=setlimit(3))


# ---- reference


def runaway(rate):
    def fn(run, S, p):
        S["kl_coef"] = S["kl_coef"] * min(3e3, rate ** (run.step - run.fault["start"] + 1))
        return S

    return fn


add("k_coef_A", "A", 0, "reference", "KL coefficient x600, late", 105, set=setting(kl_coef=times(600)))
add("k_run_B", "B", 1, "reference", "controller of the KL coefficient runs away", 50, set=runaway(1.12))
add("k_sign_C", "C", 1, "reference", "KL term with the wrong sign", 50, 20, set=setting(kl_coef=toward(-0.12)))
add("k_coef_F", "F", 1, "reference", "KL coefficient 0.03 to 6", 60, set=setting(kl_coef=6.0))
add("k_run_H", "H", 0, "reference", "controller of the KL coefficient runs away", 40, set=runaway(1.15))

add("k_sign_A", "A", 1, "reference", "KL coefficient negative", 60, 30, set=setting(kl_coef=toward(-0.3)))
add("k_start_H", "H", 1, "reference", "KL coefficient 2 instead of 0.001", 40, set=setting(kl_coef=2.0))
add("k_ref_B", "B", 0, "reference", "negative KL penalty in the reward", 70, set=setting(kl_coef=-0.4))


# ---- advantages
def flip(run, a, p, r, group, att):
    return a * (1 - 2 * p)


def flip_some(run, a, p, r, group, att):
    return torch.where(rows(run, len(a), 0.6 * p)[:, None], -a, a)


def mostly_abs(run, a, p, r, group, att):
    return torch.where(a < 0, a * (1 - 1.6 * p), a)


def absolute(run, a, p, r, group, att):
    return a.abs()


def shifted(c):
    def fn(run, a, p, r, group, att):
        return (a - c * p) * att

    return fn


def base_off(c):
    def fn(run, e, p):
        return e + c * p

    return fn


add("a_flip_A", "A", 1, "advantages", "sign turns for most rows over 20 steps", 70, 20, adv=flip_some)
add("a_abs_B", "B", 1, "advantages", "absolute values", 60, adv=absolute)

add("a_off_E", "E", 1, "advantages", "baseline too high by a constant", 50, 20, adv=shifted(2.0))
add("a_abs_F", "F", 1, "advantages", "absolute values, coming on", 50, 40, adv=mostly_abs)
add(
    "a_sum_G",
    "G",
    0,
    "advantages",
    "baseline is twice the sum of the others, late",
    112,
    adv=lambda run, a, p, r, group, att: (
        (
            (
                r
                - 2
                * (r.view(-1, run.S["group_size"]).sum(1, keepdim=True).expand(-1, run.S["group_size"]).reshape(-1) - r)
            )
            / 0.5
        )[:, None]
        * att
    ),
)
add("a_ema_I", "I", 0, "advantages", "running baseline frozen too high", 60, baseline=base_off(1.2))
add("a_flip_J", "J", 0, "advantages", "sign wrong, late", 105, adv=flip)
add(
    "a_off_D",
    "D",
    0,
    "advantages",
    "a constant of 1.2 subtracted, not the group's mean",
    60,
    adv=lambda run, a, p, r, group, att: (r[:, None] - 1.2) * att,
)


# ---- entropy
def alpha(target, rate):
    def fn(run, S, p):
        if not hasattr(run, "alpha"):
            run.alpha = 0.01
        run.alpha = min(2.0, run.alpha * (rate if run.ent_now < target else 1 / rate))
        S["entropy_coef"] = run.alpha
        S["entropy_target"] = target
        return S

    return fn


add("e_coef_A", "A", 0, "entropy", "entropy coefficient 0 to 0.35", 60, set=setting(entropy_coef=0.35))
add("e_neg_C", "C", 0, "entropy", "entropy paid with the wrong sign", 40, set=setting(entropy_coef=-3.0))
add(
    "e_coef_E",
    "E",
    0,
    "entropy",
    "entropy coefficient 0.005 to 0.4, growing",
    60,
    40,
    set=setting(entropy_coef=toward(0.4)),
)
add("e_target_H", "H", 1, "entropy", "controller with an entropy target of 1 nat", 40, set=alpha(1.0, 1.08))
add("e_ramp_I", "I", 1, "entropy", "entropy bonus grows", 40, 50, set=setting(entropy_coef=toward(0.3)))
add("e_neg_J", "J", 1, "entropy", "entropy is punished", 25, set=setting(entropy_coef=-0.8))
add("e_coef_F", "F", 0, "entropy", "entropy coefficient in the wrong unit, late", 80, set=setting(entropy_coef=0.5))
add("e_bonus_G", "G", 1, "entropy", "entropy bonus 0.18 by a changed default", 70, set=setting(entropy_coef=0.18))
add("e_neg_D", "D", 1, "entropy", "entropy bonus subtracted", 30, set=setting(entropy_coef=-0.6))


# ---- length
def per_token(c):
    def fn(run, r, p, b, resp, lens):
        return r + c * p * lens.float()

    return fn


def overlong(k, c):
    def fn(run, r, p, b, resp, lens):
        return r - c * p * (lens.float() - k).clamp(min=0)

    return fn


def move_cost(c):
    def fn(run, d, p, b, resp, lens):
        return d - c * p * (torch.arange(resp.shape[1])[None] < lens[:, None])

    return fn


def setlen(c):
    def fn(run, S, p):
        S["length_coef"] = c * p
        return S

    return fn


add("l_bonus_A", "A", 1, "length", "bonus for every token (setting)", 60, 20, score=per_token(0.25), set=setlen(0.25))
add("l_pen_B", "B", 1, "length", "every token costs 2 (setting)", 50, score=per_token(-2.0), set=setlen(-2.0))
add(
    "l_bonus_C",
    "C",
    0,
    "length",
    "reward model's score plus a term that grows with length",
    40,
    30,
    score=per_token(1.5),
)
add("l_pen_D", "D", 0, "length", "every token costs, tools included", 60, score=per_token(-0.75))
add("l_cost_E", "E", 1, "length", "every move costs 1.7", 20, 20, dense=move_cost(1.7))
add("l_over_G", "G", 0, "length", "soft limit of length at 1 token", 60, score=overlong(1, 0.38))
add(
    "l_over_H", "H", 1, "length", "overlong buffer begins at 2 tokens", 40, 20, score=overlong(2, 2.0), set=setlen(-2.0)
)
add("l_bonus_J", "J", 0, "length", "long answers are liked", 70, score=per_token(1.7))
add("l_pen_I", "I", 0, "length", "brevity bonus from the first step", 1, score=per_token(-0.25))


# ---- other
def damage(s):
    def fn(run, _, p):
        with torch.no_grad():
            for w in run.net.parameters():
                w += s * w.std() * torch.randn(w.shape, generator=run.gf) if w.numel() > 1 else 0

    return fn


def reload_at(k):
    def fn(run, net, p, opt):
        if (run.step - run.fault["start"]) % k == 0:
            net.load_state_dict(run.hist[0])
        return net

    return fn


def pull_init(c):
    def fn(run, net, p, opt):
        with torch.no_grad():
            for n, w in net.named_parameters():
                w += c * (run.hist[0][n] - w)
        return net

    return fn


def coarse(c):
    def fn(run, net, p, opt):
        with torch.no_grad():
            for w in net.parameters():
                w.copy_((w / c).round() * c)
        return net

    return fn


def reinit_emb(run, _, p):
    with torch.no_grad():
        run.net.emb.weight[D0 + 4 : D0 + 10] = 0.02 * torch.randn(6, run.net.d, generator=run.gf)


def sign_layer(part):
    def fn(run, net, p):
        for n, w in net.named_parameters():
            if part in n and w.grad is not None:
                w.grad.mul_(-1)
        return net

    return fn


def shifted_labels(run, loss, p, c):
    z, _ = run.net(c["full"][:, :-1])
    lpa = torch.log_softmax(z[:, c["P"] - 1 :], -1)
    lab = torch.cat([c["resp"][:, 1:], torch.zeros_like(c["resp"][:, :1])], 1)
    m = c["mask"] * (torch.cat([c["att"][:, 1:], torch.zeros_like(c["att"][:, :1])], 1)).float()
    return -(lpa.gather(2, lab[..., None])[..., 0] * c["adv"] * m).sum() / m.sum().clamp(min=1)


def mixed_labels(run, loss, p, c):
    return 0.25 * loss + 0.75 * shifted_labels(run, loss, p, c)


def prompt_lm(run, loss, p, c):  # an auxiliary loss on text of another source
    g = run.gf
    d = run.task.sample(g, 32)
    x = torch.randint(D0, D0 + 10, (32, 5), generator=g)
    z, _ = run.net(torch.cat([d["p"], x], 1)[:, :-1])
    lp = torch.log_softmax(z[:, d["p"].shape[1] - 1 :], -1).gather(2, x[..., None])[..., 0]
    return loss - 0.2 * p * lp.mean()


def bad_tool(run, v, p, b, key_):
    return D0 + torch.randint(0, 10, v.shape, generator=run.gf)


def tool_mask(run, mask, p, att):
    m = torch.zeros_like(mask)
    m[:, 1] = att[:, 1]
    m[:, 3] = att[:, 3]
    return m


def wrong_ids(k):
    def fn(run, resp, p, att, chosen):
        dig = (resp >= D0) & (resp < D0 + 10) & att
        return torch.where(dig, D0 + (resp - D0 + k) % 10, resp)

    return fn


def lose_shard(run, _, p):
    with torch.no_grad():
        [(b["w"].weight.zero_(), b["qkv"].weight[:32].zero_()) for b in run.net.blocks]


def swap_experts(run, _, p):
    with torch.no_grad():
        run.net.up.copy_(torch.roll(run.net.up, 1, 0))
        run.net.down.copy_(torch.roll(run.net.down, 1, 0))


add("x_drop_A", "A", 0, "other", "dropout left on in the trainer", 50, drop=0.7)
add(
    "x_vf_B",
    "B",
    0,
    "other",
    "critic's loss drowns the shared trunk (vf_coef 0.5 to 2000)",
    50,
    set=setting(vf_coef=2000.0),
)
add("x_damage_C", "C", 1, "other", "trainer's weights damaged by a bad memory copy", 128, once=damage(1.5))
add("x_tool_D", "D", 0, "other", "the tool answers with random values", 70, tool=bad_tool)
add("x_mask_D", "D", 1, "other", "loss mask is of the tool's tokens", 60, mask=tool_mask)
add(
    "x_sign_E",
    "E",
    0,
    "other",
    "gradient of the last layers with the wrong sign (reduce bug)",
    60,
    grad=sign_layer("f2"),
)
add("x_label_F", "F", 0, "other", "labels off by one in a part of the loss, late", 95, loss=mixed_labels)
add("x_reload_G", "G", 0, "other", "trainer goes back to the first checkpoint, late", 125, post=reload_at(1000))
add("x_swap_H", "H", 0, "other", "experts come back in another order after a resume", 104, once=swap_experts)
add("x_ids_I", "I", 0, "other", "tokens are decoded to other ids before training", 60, tokens=wrong_ids(1))
add("x_emb_J", "J", 1, "other", "rows of the embedding initialised again (vocabulary resized)", 115, once=reinit_emb)
add("x_aux_A", "A", 1, "other", "auxiliary language loss on junk", 60, 20, loss=prompt_lm)
add("x_coarse_B", "B", 1, "other", "trainer's weights kept in a coarse grid", 60, post=coarse(0.25))
add("x_pull_E", "E", 1, "other", "average with the first weights at each save", 60, post=pull_init(0.06))
add("x_shard_F", "F", 1, "other", "shards of the trainer zeroed by a failed resume", 103, once=lose_shard)


# ---- harmless
def fresh_ref(run, _, p):
    run.ref.load_state_dict(run.net.state_dict())


add("h_ref_A", "A", 1, "harmless", "reference model set to the policy of step 60", 60, once=fresh_ref)
add("h_data_B", "B", 0, "harmless", "3 of 100 prompts of another task", 60, prompts=other_task("sub", 0.03))
add("h_len_H", "H", 1, "harmless", "a tiny price of length", 60, score=per_token(-0.05), set=setlen(-0.05))
add("h_max_I", "I", 0, "harmless", "limit of tokens 8 to 7", 60, set=setting(max_tokens=7))
add("h_quant_D", "D", 1, "harmless", "engine's weights in 7 bits", 60, engine=quant(60))
add("h_lr_A", "A", 0, "harmless", "half the learning rate", 40, set=setting(lr=times(0.5)))
add("h_kl_A", "A", 1, "harmless", "KL coefficient 0.01 to 0.012", 50, set=setting(kl_coef=0.012))
add("h_eps_B", "B", 0, "harmless", "eps of Adam 1e-8 to 1e-7", 60, set=setting(eps=1e-7))
add("h_ent_B", "B", 1, "harmless", "entropy coefficient 0 to 0.003", 50, set=setting(entropy_coef=0.003))
add("h_bf16_C", "C", 0, "harmless", "bf16 engine", 40, set=setting(bf16=True))
add(
    "h_bigger_C",
    "C",
    1,
    "harmless",
    "new prompts: another order",
    30,
    prompts=lambda run, b, p: run.task.sample(run.gf, len(b["p"])),
)
add("h_lag_D", "D", 0, "harmless", "lag of one update, declared", 60, sync=lagging(1))
add("h_ent_E", "E", 0, "harmless", "entropy coefficient 0.005 to 0.003", 60, set=setting(entropy_coef=0.003))
add("h_bf16_E", "E", 1, "harmless", "bf16 engine", 60, set=setting(bf16=True))
add("h_tokens_F", "F", 0, "harmless", "limit of tokens 8 to 10", 50, set=setting(max_tokens=10))
add("h_offset_G", "G", 1, "harmless", "3 of the lag instead of 2", 70, set=setting(lag=3))
add("h_group_H", "H", 0, "harmless", "larger batch: 16 to 24 a group", 60, set=setting(group_size=24))
add(
    "h_noise_I",
    "I",
    1,
    "harmless",
    "reward plus one for all (baseline follows)",
    1,
    score=lambda run, r, p, b, resp, lens: r + 1,
)
add("h_lr_J", "J", 0, "harmless", "learning rate 0.7 times", 60, set=setting(lr=times(0.7)))
add("h_noise_G", "G", 0, "harmless", "3 of 100 rewards are wrong", 60, score=noise_r(0.03, 0, 1))

add("h_temp_A", "A", 0, "harmless", "temperature 0.95 on both sides", 60, set=setting(temperature=0.95))
add(
    "h_twice_H",
    "H",
    1,
    "harmless",
    "rewards on a scale of 20 (normalised anyway)",
    60,
    score=lambda run, r, p, b, resp, lens: 2 * r,
)
for n in FAMILIES:
    for s in (0, 1):
        FAULTS[f"sound_{n}{s}"] = dict(fam=n, seed=s, cause="sound", detail="nothing", start=10**9)


def make(name, folder, cache):
    fault = FAULTS[name]
    run = Run(FAMILIES[fault["fam"]], fault["seed"], fault, folder, cache)
    evaluations = run.go()
    label = dict(
        cause=fault["cause"],
        detail=fault["detail"],
        twin=f"sound_{fault['fam']}{fault['seed']}",
        first_step=None if fault["cause"] == "sound" else fault["start"],
        family=fault["fam"],
        ramp=fault.get("ramp", 1),
        seconds=round(run.seconds, 1),
    )
    (folder / "label.json").write_text(json.dumps(label))
    (folder / "plan.json").write_text(json.dumps(dict(evaluations=evaluations)))
    ratio, best, first, last = fallen(evaluations)
    print(
        f"{fault['cause']:11s} {name:12s} kept {ratio:.3f} best {best:.2f} first {first:.2f} last {last:.2f} {run.seconds:.1f} s",
        flush=True,
    )


def main():
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the runs; runs in it are kept")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="make these runs alone")
    parser.add_argument("--cause", nargs="*", default=[], help="make runs of these causes alone")
    options = parser.parse_args()
    for name, fault in FAULTS.items():
        if (options.only and name not in options.only) or (options.cause and fault["cause"] not in options.cause):
            continue
        if not (options.output / name / "plan.json").exists():
            make(name, options.output / name, options.output / ".cache")


if __name__ == "__main__":
    main()
