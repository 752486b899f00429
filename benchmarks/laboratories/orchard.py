"""A laboratory of small RL runs over games and tools: twelve teams, one fault switched on a run.

    python benchmarks/laboratories/orchard.py -o FOLDER [--only NAME ...] [--list] [--table]

writes FOLDER/NAME/trace, label.json and plan.json for each run, and prints how many of each cause fell; finished runs are kept.
--list prints the names of the runs and makes none, --table prints the table of the runs in FOLDER alone. A team has an
environment, a policy, an algorithm, names for what it logs, and a choice of what it records. Its policies start from noisy
demonstrations; these weights are kept in FOLDER/.cache. Before its first step a faulty run is bit for bit its twin.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
import hashlib
import json
import math
import random
import shutil
import time
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


# ---------------------------------------------------------------------------------------------------------------------
# Environments. An episode is a generator: it yields an int (a token that the tool says) or a pair (good tokens, allowed
# tokens), and is then sent the token of the policy. `ep.gain(r)` pays at the last token of the policy.


class Episode:
    __slots__ = ("gains", "info", "last", "liar", "rng")

    def __init__(self, rng, liar=None):
        self.gains, self.last, self.rng, self.liar, self.info = [], 0, rng, liar, {}

    def gain(self, r):
        self.gains.append((self.last, r))


class Env:
    cut = 0.0
    """What a response gets that is cut off."""

    def tokens(self, *names):
        self.names = list(names)
        self.V = len(names)
        for i, name in enumerate(names):
            setattr(self, name, i)

    def prompt(self, task):
        raise NotImplementedError


class Safe(Env):
    """A safe with a number: guess, the safe says higher or lower. Prompt: the range."""

    P, T, cut, N, turns = 3, 10, -1.0, 16, 5

    def __init__(self):
        self.tokens(*[f"n{i}" for i in range(16)], "HI", "LO", "HIT", "ERR", "BOS", "BOS2", "QUIT")

    def task(self, rng, kind="std"):
        if kind == "low":  # only ranges at the bottom of the dial
            a, b = 0, rng.randint(4, 7)
        elif kind == "narrow":
            a = rng.randint(0, 12)
            b = a + rng.randint(1, 3)
        else:
            w = rng.randint(5, 11)
            a = rng.randint(0, 15 - w)
            b = a + w
        return (a, b, rng.randint(a, b), kind)

    def prompt(self, t):
        if t[3] == "mirror":
            return [self.BOS2, t[0], t[1]]
        if t[3] == "swap":
            return [self.BOS, t[1], t[0]]
        return [self.BOS, t[0], t[1]]

    def play(self, t, ep):
        a, b, secret, kind = t
        for turn in range(self.turns):
            mid = (a + b) // 2
            g = yield ([mid, mid + 1] if mid < b else [mid], [*range(16), self.QUIT])
            if g == self.QUIT:
                ep.gain(-0.2)
                return
            if g >= 16:
                yield self.ERR
                continue
            if g == secret:
                ep.gain(1.0 - 0.2 * turn)
                return
            up = secret > g
            said = up
            if kind == "mirror":
                said = not up
            if ep.liar is not None:
                said = ep.liar(ep, said)
            if up:
                a = max(a, g + 1)
            else:
                b = min(b, g - 1)
            if turn < self.turns - 1:
                yield self.HI if said else self.LO
        ep.gain(-1.0)


class Nim(Env):
    """Take one to three stones; the last one wins; the house answers."""

    P, T, cut = 3, 24, -1.0

    def __init__(self):
        self.tokens(*[f"h{i}" for i in range(26)], "T1", "T2", "T3", "BOS", "LAST", "MISERE")

    def task(self, rng, kind="std"):
        if kind == "tiny":
            return (rng.randint(1, 3), kind)
        if kind == "misere":
            return (rng.randint(6, 20), kind)
        if kind == "lost":
            return (4 * rng.randint(2, 5), kind)
        return (rng.choice([h for h in range(5, 21) if h % 4]), kind)

    def prompt(self, t):
        return [self.BOS, self.MISERE if t[1] == "misere" else self.LAST, t[0]]

    def play(self, t, ep):
        heap, kind = t
        off = 1 if kind == "misere" else 0  # leave heap = off mod 4
        for _ in range(10):
            best = [k for k in (1, 2, 3) if k <= heap and (heap - k) % 4 == off] or [1]
            a = yield ([self.T1 + k - 1 for k in best], [self.T1, self.T2, self.T3])
            k = a - self.T1 + 1
            if not 1 <= k <= 3 or k > heap:
                ep.gain(-1.0)
                return
            heap -= k
            if heap == 0:
                ep.gain(-1.0 if kind == "misere" else 1.0)
                return
            good = [k for k in (1, 2, 3) if k <= heap and (heap - k) % 4 == off]
            k = good[0] if good and ep.rng.random() < 0.7 else ep.rng.randint(1, min(3, heap))
            heap -= k
            if heap == 0:
                ep.gain(1.0 if kind == "misere" else -1.0)
                return
            yield heap if ep.liar is None else ep.liar(ep, heap)
        ep.gain(-1.0)


class Grid(Env):
    """Walk a 4 x 4 orchard to the ripe tree, around two bogs, and pick. The tool says where one stands."""

    P, T, cut, moves = 5, 18, -0.5, 9

    def __init__(self):
        self.tokens(*[f"c{i}" for i in range(16)], "N", "S", "E", "W", "PICK", "BOS", "ALT")
        self.step_of = {self.N: (-1, 0), self.S: (1, 0), self.E: (0, 1), self.W: (0, -1)}
        self.dist = {}

    def task(self, rng, kind="std"):
        while True:
            s, g, x, y = rng.sample(range(16), 4)
            d = self.distances(g, x, y)
            if s not in d or d[s] < 2:
                continue
            if kind == "near" and d[s] > 2:
                continue
            if kind == "row" and not g // 4 == s // 4 == 0:
                continue
            return (s, g, x, y, kind)

    def prompt(self, t):
        s, g, x, y, kind = t
        if kind == "swap":
            return [self.BOS, g, s, x, y]
        if kind == "alt":
            return [self.ALT, s, x, g, y]
        return [self.BOS, s, g, x, y]

    def distances(self, g, x, y):
        key = (g, min(x, y), max(x, y))
        if key not in self.dist:
            d, todo = {g: 0}, [g]
            for c in todo:
                for a in self.step_of:
                    n = self.move(c, a)
                    if n is not None and n not in d and n not in (x, y):
                        d[n] = d[c] + 1
                        todo.append(n)
            self.dist[key] = d
        return self.dist[key]

    def move(self, c, a):
        r, k = c // 4 + self.step_of[a][0], c % 4 + self.step_of[a][1]
        return r * 4 + k if 0 <= r < 4 and 0 <= k < 4 else None

    def play(self, t, ep):
        c, g, x, y, _ = t
        d = self.distances(g, x, y)
        need = d[c]
        for n in range(self.moves):
            best = [self.PICK] if c == g else [a for a in self.step_of if d.get(self.move(c, a), 99) == d[c] - 1]
            a = yield (best, [self.N, self.S, self.E, self.W, self.PICK])
            if a == self.PICK:
                ep.gain(max(0.0, 1.0 - 0.1 * (n - need)) if c == g else 0.0)
                return
            if a not in self.step_of:
                ep.gain(0.0)
                return
            m = self.move(c, a)
            if m in (x, y):
                ep.gain(0.0)
                return
            if m is not None:
                c = m
            if n < self.moves - 1:
                yield c if ep.liar is None else ep.liar(ep, c)
        ep.gain(0.0)


class Haggle(Env):
    """Buy from a trader whose lowest price is hidden."""

    P, T, cut = 3, 8, 0.0

    def __init__(self):
        self.tokens(*[f"p{i}" for i in range(24)], "ACCEPT", "WALK", "BOS", "RUDE")

    def task(self, rng, kind="std"):
        ask = rng.randint(10, 18)
        room = rng.randint(2, 7)
        value = min(23, ask + rng.randint(-2, 4))
        if kind == "greedy":  # traders without room
            room = 0
        if kind == "junk":  # nothing is worth its price
            value, room = max(0, ask - 8), rng.randint(0, 2)
        if kind == "dear":
            value, room = 23, rng.randint(0, 1)
            ask = rng.randint(10, 18)
        return (value, ask, ask - room, kind)

    def prompt(self, t):
        return [self.BOS, t[1], t[0]] if t[3] == "swap" else [self.BOS, t[0], t[1]]

    def play(self, t, ep):
        value, ask, low, _ = t
        bid = ask - 6
        for turn in range(4):
            best = min(ask - 1, bid)
            o = yield ([best] if turn < 3 else [self.ACCEPT], [*range(4, 20), self.ACCEPT])
            if o == self.WALK or o > self.RUDE:
                ep.gain(0.0)
                return
            price = ask if o == self.ACCEPT else o
            if o in (self.BOS, self.RUDE):
                ep.gain(0.0)
                return
            if price >= low:
                ep.gain(float(np.clip(value - price, -4, 10)))
                return
            if price < low - 4:  # an insult
                ep.gain(0.0)
                return
            bid = price + 2
            ask = max(low, ask - 1)
            if turn < 3:
                yield ask if ep.liar is None else ep.liar(ep, ask)
        ep.gain(0.0)


class Kitchen(Env):
    """Plan a dish: fetch what it needs, cut what is hard, heat the oven for hot ones, mix, bake, serve."""

    P, T, cut = 5, 14, -2.0

    def __init__(self):
        self.tokens(
            *[f"F{i}" for i in range(6)], *[f"C{i}" for i in range(6)], *[f"i{i}" for i in range(6)], "HEAT", "MIX", "BAKE",
            "SERVE", "HOT", "COLD", "RAW", "BOS",
        )  # fmt: skip
        self.hard = {0, 2, 3}

    def task(self, rng, kind="std"):
        k = 3 if kind != "soup" else 1
        dish = rng.choice([self.HOT, self.COLD])
        items = rng.sample(range(6), k)
        if kind == "cold":
            dish = self.COLD
        if kind == "soft":
            dish, items = self.COLD, rng.sample([1, 4, 5], 3)
        if kind == "raw":
            dish = self.RAW  # served uncut and unmixed
        return (dish, tuple(items), kind)

    def prompt(self, t):
        items = [self.i0 + i for i in t[1]]
        if t[2] == "turned":
            return [self.BOS, self.COLD if t[0] == self.HOT else self.HOT, *items]
        return [self.BOS, t[0], *items, *[self.BOS] * (3 - len(items))]

    def play(self, t, ep):
        dish, items, kind = t
        fetched, cutted, heat, mixed, baked = [], set(), False, False, False
        for _ in range(20):
            best = []
            if kind == "raw" and len(fetched) == len(items):
                best = [self.SERVE]
            elif fetched and fetched[-1] in self.hard and fetched[-1] not in cutted and kind != "raw":
                best = [self.C0 + fetched[-1]]
            elif len(fetched) < len(items):
                best = [self.F0 + items[len(fetched)]]
            elif not mixed:
                best = [self.MIX]
            elif dish == self.HOT and not heat:
                best = [self.HEAT]
            elif dish == self.HOT and not baked:
                best = [self.BAKE]
            else:
                best = [self.SERVE]
            a = yield (best, [*range(12), self.HEAT, self.MIX, self.BAKE, self.SERVE])
            ok = False
            if a < 6:
                ok = a in items and a not in fetched
                fetched.append(a)
            elif a < 12:
                ok = a - 6 in fetched and a - 6 in self.hard and a - 6 not in cutted
                cutted.add(a - 6)
            elif a == self.HEAT:
                ok = not heat
                heat = True
            elif a == self.MIX:
                ok = len(fetched) == len(items) and all(i in cutted for i in items if i in self.hard)
                mixed = True
            elif a == self.BAKE:
                ok = heat and mixed and dish == self.HOT
                baked = True
            elif a == self.SERVE:
                if kind == "raw":
                    ok = len(fetched) == len(items) and not cutted and not mixed
                else:
                    ok = mixed and (baked if dish == self.HOT else not heat)
                ep.info["served"] = True
                ep.gain(1.0 if ok else -1.0)
                return
            if not ok:
                ep.info["wrong"] = True
                ep.gain(-1.0)
                return
        ep.gain(-1.0)


class Shelves(Env):
    """Find a card in a library of four shelves, read it, and answer."""

    P, T, cut = 3, 14, 0.0

    def __init__(self):
        self.tokens(
            *[f"v{i}" for i in range(6)], *[f"e{i}" for i in range(12)], "A0", "A1", "S0", "S1", "S2", "S3", "NONE", "CARD",
            "BOS", "ODD",
        )  # fmt: skip
        rng = random.Random(7)
        self.first = [rng.randrange(4) for _ in range(12)]
        self.second = [(f + rng.randint(1, 3)) % 4 for f in self.first]

    def task(self, rng, kind="std"):
        e = rng.randrange(12)
        if kind == "few":
            e = rng.randrange(2)
        a = rng.randrange(2)
        shelf = self.first[e] if rng.random() < 0.75 else self.second[e]
        if kind == "moved":  # another library
            shelf = (self.first[e] + 2) % 4
        v = (rng.randrange(6), rng.randrange(6))
        return (e, a, shelf, v, kind)

    def prompt(self, t):
        e, a, _, _, kind = t
        if kind == "swap":
            return [self.BOS, self.A0 + a, self.e0 + e]
        return [self.ODD if kind == "odd" else self.BOS, self.e0 + e, self.A0 + a]

    def play(self, t, ep):
        e, a, shelf, v, kind = t
        right = v[1 - a] if kind == "odd" else v[a]
        seen, found = [], False
        for n in range(5):
            if found:
                best = [right]
            else:
                best = [self.S0 + k for k in (self.first[e], self.second[e]) if k not in seen][:1] or [0]
            x = yield (best, [*range(6), self.S0, self.S1, self.S2, self.S3])
            if x < 6:
                ep.info["searched"] = n
                ep.gain(float(x == right))
                return
            if not self.S0 <= x <= self.S3 or n >= 3:
                ep.gain(0.0)
                return
            k = x - self.S0
            seen.append(k)
            if k == shelf:
                found = True
                yield self.CARD
                vs = v if ep.liar is None else ep.liar(ep, v)
                yield vs[0]
                yield vs[1]
            else:
                yield self.NONE
        ep.gain(0.0)


class Opcode(Env):
    """Write a program of +1, *2, -3 that turns one number into another."""

    P, T, cut, M = 3, 7, -10.0, 25

    def __init__(self):
        self.tokens(*[f"x{i}" for i in range(25)], "INC", "DBL", "DEC", "END", "BOS", "NEG", "NOP")
        self.ops = {self.INC: lambda v: v + 1, self.DBL: lambda v: 2 * v, self.DEC: lambda v: v - 3}
        self.far = {}
        for goal in range(self.M):
            d = {goal: 0}
            for level in range(1, 40):
                for v in range(self.M):
                    if v not in d and any(d.get(self.ops[o](v), 99) == level - 1 for o in self.ops):
                        d[v] = level
            self.far[goal] = d

    def task(self, rng, kind="std"):
        while True:
            s = rng.randrange(12)
            t = rng.randrange(self.M)
            d = self.far[t].get(s, 99)
            if kind == "easy":
                if d != 1:
                    continue
            elif kind == "down":
                if not (d <= 4 and t < s):
                    continue
            elif not 1 <= d <= 4:
                continue
            return (s, t, kind)

    def prompt(self, t):
        if t[2] == "swap":
            return [self.BOS, t[1], t[0]]
        return [self.BOS, t[0], t[1]]

    def play(self, t, ep):
        v, goal, _ = t
        far = self.far[goal]
        for _ in range(6):
            best = (
                [self.END] if v == goal else [o for o in self.ops if far.get(self.ops[o](v), 99) == far.get(v, 99) - 1]
            )
            o = yield (best or [self.INC], [self.INC, self.DBL, self.DEC, self.END])
            if o == self.END:
                break
            if o not in self.ops:
                ep.gain(-10.0)
                ep.info["bad"] = True
                return
            w = self.ops[o](v)
            if not 0 <= w < self.M:
                ep.gain(-10.0)
                ep.info["bad"] = True
                return
            v = w
        else:
            ep.gain(-10.0)
            return
        ep.info["result"] = v
        ep.gain(0.0 if v == goal else -min(9.0, 4.0 + abs(v - goal)))


class Clinic(Env):
    """Order tests, read what comes back, name the illness; every test costs."""

    P, T, cut = 3, 10, -0.5

    def __init__(self):
        self.tokens(
            *[f"D{i}" for i in range(6)], *[f"X{i}" for i in range(4)], "POS", "NEG", *[f"s{i}" for i in range(6)], "ADULT",
            "CHILD", "BOS",
        )  # fmt: skip
        self.sign = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0), (1, 0, 0, 0), (1, 0, 1, 1), (1, 1, 0, 1)]

    def task(self, rng, kind="std"):
        d = rng.randrange(6)
        if kind == "flu":  # an epidemic
            d = 0 if rng.random() < 0.97 else rng.randrange(6)
        s = d if rng.random() < 0.35 else rng.randrange(6)
        age = rng.randrange(2)
        if kind == "plain":
            s = d
        if kind == "coded":  # another hospital's codes of symptoms, always telling
            s = (d + 3) % 6
        return (d, s, age, kind)

    def prompt(self, t):
        return [self.BOS, self.s0 + t[1], self.ADULT + t[2]]

    def play(self, t, ep):
        d, _, age, _ = t
        sign = self.sign[d]
        if age:  # in children the last test reads the other way round
            sign = (*sign[:3], 1 - sign[3])
        left = list(range(6))
        for n in range(5):
            split = {x: sum(self.seen(i, x, age) for i in left) for x in range(4)}
            best = (
                [self.D0 + left[0]]
                if len(left) == 1 or n == 4
                else [self.X0 + min(split, key=lambda x: (abs(split[x] - len(left) / 2), x))]
            )
            a = yield (best, range(10))
            if a < 6:
                ep.info["tests"] = n
                ep.gain((1.0 if a == d else 0.0) - 0.06 * n)
                return
            if a >= 10 or n >= 4:
                ep.gain(-0.5)
                return
            x = a - self.X0
            r = sign[x]
            if ep.liar is not None:
                r = ep.liar(ep, r)
            left = [i for i in left if self.seen(i, x, age) == r] or [d]
            yield self.POS if r else self.NEG
        ep.gain(-0.5)

    def seen(self, i, x, age):
        r = self.sign[i][x]
        return 1 - r if age and x == 3 else r


class Butler(Env):
    """Answer a guest: greet by rank, bring what was asked, in the right tone, and close."""

    P, T, cut = 4, 9, 0.0

    def __init__(self):
        self.tokens(
            "G0", "G1", "G2", *[f"I{i}" for i in range(6)], "T0", "T1", "T2", "PRAISE", "SORRY", "CLOSE", *[f"q{i}" for i in range(6)],
            "calm", "cross", "sad", "lord", "guest", "child", "BOS", "VIA",
        )  # fmt: skip

    def task(self, rng, kind="std"):
        q = rng.randrange(6)
        m, r = rng.randrange(3), rng.randrange(3)
        if kind == "child":
            r, q = 2, 5
        return (q, m, r, kind)

    def prompt(self, t):
        q, m, r, kind = t
        if kind == "swap":
            return [self.BOS, self.lord + r, self.q0 + q, self.calm + m]
        if kind == "via":
            return [self.VIA, self.q0 + q, self.calm + m, self.lord + r]
        return [self.BOS, self.q0 + q, self.calm + m, self.lord + r]

    def item(self, q, r, kind):
        base = (q + r) % 6 if q < 4 else q
        return (base + 1) % 6 if kind == "via" else base

    def play(self, t, ep):
        q, m, r, kind = t
        greet, tone = r, (m + (r == 1)) % 3
        said = []
        for _ in range(20):
            want = [self.G0 + greet, self.I0 + self.item(q, r, kind), self.T0 + tone]
            if m == 1:
                want.append(self.SORRY)
            want.append(self.CLOSE)
            best = [w for w in want if w not in said][:1] or [self.CLOSE]
            a = yield (best, range(15))
            said.append(a)
            if a == self.CLOSE:
                break
        ep.info["said"] = said
        ep.gain(self.score(t, said))

    def score(self, t, said):
        q, m, r, kind = t
        greet, tone = r, (m + (r == 1)) % 3
        if not said or said[-1] != self.CLOSE:
            return 0.0
        body = said[:-1]
        s = 0.25 * (body[:1] == [self.G0 + greet])
        items = [x for x in body if self.I0 <= x < self.I0 + 6]
        s += 0.4 * (items == [self.I0 + self.item(q, r, kind)])
        tones = [x for x in body if self.T0 <= x <= self.T2]
        s += 0.25 * (tones == [self.T0 + tone])
        s += 0.1 * ((body.count(self.SORRY) == 1) == (m == 1))
        s -= 0.12 * body.count(self.PRAISE) + 0.05 * max(0, len(body) - 4)
        s -= 0.2 * sum(x >= 15 for x in body)
        return max(0.0, s)


class Pegs(Env):
    """Two pegs of five colours; the board says how many are right and how many misplaced."""

    P, T, cut, guesses = 2, 12, 0.0, 4

    def __init__(self):
        self.tokens(
            *[f"k{i}" for i in range(5)],
            "B2",
            "B1",
            "B0W2",
            "B0W1",
            "B0W0",
            "n0",
            "n1",
            "n2",
            "n3",
            "n4",
            "BOS",
            "BOSX",
        )

    def feedback(self, code, guess):
        black = sum(a == b for a, b in zip(code, guess, strict=True))
        common = sum(min(code.count(k), guess.count(k)) for k in set(guess))
        if black == 2:
            return self.B2
        if black == 1:
            return self.B1
        return (self.B0W0, self.B0W1, self.B0W2)[common]

    def task(self, rng, kind="std"):
        while True:
            code = (rng.randrange(5), rng.randrange(5))
            if kind == "pairs" and code[0] != code[1]:
                continue
            if kind == "zero":
                code = (0, rng.randrange(2))
            return (code, rng.choice(code), kind)

    def prompt(self, t):
        code, hint, kind = t
        if kind == "last":  # the hint names a colour that is not in it
            hint = next(k for k in range(5) if k not in code)
        return [self.BOSX if kind == "last" else self.BOS, self.n0 + hint]

    def play(self, t, ep):
        code, hint, kind = t
        left = [(a, b) for a in range(5) for b in range(5) if hint in (a, b)]
        if kind == "last":
            left = [(a, b) for a in range(5) for b in range(5)]
        for n in range(self.guesses):
            g = left[0] if left else (0, 0)
            a = yield ([g[0]], range(5))
            b = yield ([g[1]] if a == g[0] else [x[1] for x in left if x[0] == a][:1] or [g[1]], range(5))
            if a > 4 or b > 4:
                ep.gain(0.0)
                return
            f = self.feedback(code, (a, b))
            if f == self.B2:
                ep.gain(1.0 - 0.2 * n)
                return
            if ep.liar is not None:
                f = ep.liar(ep, f)
            left = [c for c in left if self.feedback(c, (a, b)) == f and c != (a, b)]
            if n < self.guesses - 1:
                yield f
        ep.gain(0.0)


class Ferry(Env):
    """Bring three passengers over; two pairs of them must not be alone together. The tool says who stands where."""

    P, T, cut, moves = 3, 19, 0.0, 10

    def __init__(self):
        self.tokens(*[f"z{i}" for i in range(16)], "A", "B", "C", "ALONE", "M0", "M1", "M2", "BOS", "TO0", "TO1")
        self.far = {}
        for mid in range(3):
            for goal in (0, 15):
                d, todo = {goal: 0}, [goal]
                for s in todo:
                    for a in range(4):
                        n = self.move(s, a)
                        if n is not None and n not in d and self.safe(n, mid):
                            d[n] = d[s] + 1
                            todo.append(n)
                self.far[mid, goal] = d

    def move(self, s, a):
        side = s >> 3 & 1
        if a == 3:
            return s ^ 8
        return s ^ 8 ^ (1 << a) if (s >> a & 1) == side else None

    def safe(self, s, mid):
        side = s >> 3 & 1
        others = [i for i in range(3) if i != mid]
        return all((s >> mid & 1) == side or (s >> o & 1) == side or (s >> mid & 1) != (s >> o & 1) for o in others)

    def task(self, rng, kind="std"):
        while True:
            mid, goal, s = rng.randrange(3), rng.choice([0, 15]), rng.randrange(16)
            if kind == "near":
                goal = 15
            d = self.far[mid, goal].get(s, 0)
            if d < 1 or (kind == "near" and d > 1):
                continue
            if kind == "east" and goal == 0:
                continue
            return (mid, goal, s, kind)

    def prompt(self, t):
        mid, goal, s, kind = t
        return [self.M0 + mid, self.TO1 if (goal == 15) != (kind == "turned") else self.TO0, s]

    def play(self, t, ep):
        mid, goal, s, _ = t
        far = self.far[mid, goal]
        need = far[s]
        for n in range(self.moves):
            best = [
                self.A + a
                for a in range(4)
                if self.move(s, a) is not None and far.get(self.move(s, a), 99) == far[s] - 1
            ]
            a = (yield (best, [self.A, self.B, self.C, self.ALONE])) - self.A
            m = self.move(s, a) if 0 <= a <= 3 else None
            if m is None or not self.safe(m, mid):
                ep.gain(0.0)
                return
            s = m
            if s == goal:
                ep.gain(10.0 - 0.7 * (n + 1 - need))
                return
            if n < self.moves - 1:
                yield s if ep.liar is None else ep.liar(ep, s)
        ep.gain(0.0)


class Glass(Env):
    """A greenhouse: hold a temperature against a draught that is not told. Every turn pays."""

    P, T, cut, turns = 3, 13, 0.0, 7

    def __init__(self):
        self.tokens(*[f"t{i}" for i in range(18)], "HH", "H", "OFF", "VENT", "VV", "BOS", "STOP", "FAR")
        self.act = {self.HH: 3, self.H: 1, self.OFF: 0, self.VENT: -1, self.VV: -3}

    def task(self, rng, kind="std"):
        goal, now, drift = rng.randint(4, 13), rng.randint(1, 16), rng.choice([-1, 0, 1])
        if kind == "warm":  # summer: always too warm, and the draught is warm
            goal, now, drift = rng.randint(2, 4), rng.randint(12, 16), 1
        if kind == "there":
            now, drift = goal, 0
        return (goal, now, drift, kind)

    def prompt(self, t):
        if t[3] == "swap":
            return [self.BOS, t[1], t[0]]
        return [self.FAR if t[3] == "far" else self.BOS, t[0], t[1]]

    def play(self, t, ep):
        goal, now, drift, kind = t
        if kind == "far":  # the scale of the other make: counted from above
            now, goal, drift = now, 17 - goal, drift
        for n in range(self.turns):
            miss = goal - now - drift
            best = min(self.act, key=lambda a: abs(self.act[a] - miss))
            a = yield ([best], [*self.act, self.STOP])
            if a == self.STOP:  # gives up: the turns that are left count as three off
                ep.gain(-3.0 * (self.turns - n))
                return
            if a not in self.act:
                ep.gain(-5.0)
            now = min(17, max(0, now + self.act.get(a, 0) + drift))
            ep.gain(-float(abs(now - goal)))
            if n < self.turns - 1:
                yield now if ep.liar is None else ep.liar(ep, now)


ENVS = {
    e.__name__.lower(): e
    for e in (Safe, Nim, Grid, Haggle, Kitchen, Shelves, Opcode, Clinic, Butler, Pegs, Ferry, Glass)
}


# ---------------------------------------------------------------------------------------------------------------------
# Policies. forward(tokens[B, T]) -> [B, T, out]; start(B) -> state; step(token[B], state, pos) -> out, state.


class Recurrent(nn.Module):
    def __init__(self, V, out, d, kind="gru", **_):
        super().__init__()
        self.emb = nn.Embedding(V, d)
        self.rnn = (nn.GRU if kind == "gru" else nn.RNN)(d, d, batch_first=True)
        self.head = nn.Linear(d, out)
        self.drop = 0.0

    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        if self.drop:
            h = F.dropout(h, self.drop)
        return self.head(h)

    def start(self, B):
        return torch.zeros(1, B, self.rnn.hidden_size)

    def step(self, x, state, pos):
        h, state = self.rnn(self.emb(x)[:, None], state)
        return self.head(h[:, 0]), state


class Selective(nn.Module):
    """Two layers of a gated diagonal state space."""

    def __init__(self, V, out, d, layers=2, **_):
        super().__init__()
        self.d = d
        self.emb = nn.Embedding(V, d)
        self.gate = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))
        self.value = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(2 * d, d) for _ in range(layers))
        self.head = nn.Linear(d, out)
        self.drop = 0.0

    def cell(self, x, hs):
        new = []
        for gate, value, mix, h in zip(self.gate, self.value, self.mix, hs, strict=True):
            a = torch.sigmoid(gate(x))
            h = a * h + (1 - a) * value(x)
            new.append(h)
            x = x + torch.tanh(mix(torch.cat([h, x], -1)))
        return x, new

    def forward(self, tokens):
        x = self.emb(tokens)
        for gate, value, mix in zip(self.gate, self.value, self.mix, strict=True):
            a = torch.sigmoid(gate(x))
            v = (1 - a) * value(x)
            h, hs = torch.zeros_like(v[:, 0]), []
            for t in range(x.shape[1]):
                h = a[:, t] * h + v[:, t]
                hs.append(h)
            h = torch.stack(hs, 1)
            if self.drop:
                h = F.dropout(h, self.drop)
            x = x + torch.tanh(mix(torch.cat([h, x], -1)))
        return self.head(x)

    def start(self, B):
        return [torch.zeros(B, self.d) for _ in self.gate]

    def step(self, x, state, pos):
        x, state = self.cell(self.emb(x), state)
        return self.head(x), state


class Window(nn.Module):
    """A perceptron over the last w tokens."""

    def __init__(self, V, out, d, w=8, **_):
        super().__init__()
        self.w, self.pad = w, V
        self.emb = nn.Embedding(V + 1, d // 2)
        self.one, self.two, self.head = nn.Linear(w * (d // 2), 2 * d), nn.Linear(2 * d, 2 * d), nn.Linear(2 * d, out)
        self.drop = 0.0

    def of(self, windows):
        h = torch.relu(self.one(self.emb(windows).flatten(-2)))
        if self.drop:
            h = F.dropout(h, self.drop)
        return self.head(torch.relu(self.two(h)))

    def forward(self, x):
        x = F.pad(x, (self.w - 1, 0), value=self.pad)
        return self.of(x.unfold(1, self.w, 1))

    def start(self, B):
        return torch.full((B, self.w), self.pad)

    def step(self, x, state, pos):
        state = torch.cat([state[:, 1:], x[:, None]], 1)
        return self.of(state), state


class Block(nn.Module):
    def __init__(self, d, heads, experts):
        super().__init__()
        self.heads, self.experts = heads, experts
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        if experts:
            self.router = nn.Linear(d, experts)
            self.up = nn.Parameter(torch.randn(experts, d, 2 * d) / d**0.5)
            self.down = nn.Parameter(torch.randn(experts, 2 * d, d) / (2 * d) ** 0.5)
        else:
            self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(3 * d, d)

    def ff(self, x):
        if not self.experts:
            return self.down(F.gelu(self.up(x)))
        g = self.router(x)
        keep = g >= g.topk(2, -1).values[..., -1:]
        g = torch.softmax(g.masked_fill(~keep, -1e9), -1)
        h = F.gelu(torch.einsum("...d,edh->...eh", x, self.up))
        return torch.einsum("...eh,ehd,...e->...d", h, self.down, g)

    def split(self, x):
        *lead, d3 = x.shape
        return x.view(*lead, 3, self.heads, d3 // 3 // self.heads)


class Transformer(nn.Module):
    def __init__(self, V, out, d, layers=2, heads=2, experts=0, width=40, **_):
        super().__init__()
        self.width, self.d = width, d
        self.emb, self.pos = nn.Embedding(V, d), nn.Embedding(width, d)
        nn.init.normal_(self.emb.weight, std=0.3)
        nn.init.normal_(self.pos.weight, std=0.3)
        self.blocks = nn.ModuleList(Block(d, heads, experts) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, out)
        self.drop = 0.0

    def forward(self, tokens):
        B, T = tokens.shape
        x = self.emb(tokens) + self.pos.weight[:T]
        if self.drop:
            x = F.dropout(x, self.drop)
        for b in self.blocks:
            q, k, v = b.split(b.qkv(b.n1(x))).permute(2, 0, 3, 1, 4)
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            o = b.proj(o.transpose(1, 2).reshape(B, T, -1))
            f = b.ff(b.n2(x + o))
            if self.drop:
                o, f = F.dropout(o, self.drop), F.dropout(f, self.drop)
            x = x + o + f
        return self.head(self.norm(x))

    def start(self, B):
        b = self.blocks[0]
        shape = (len(self.blocks), 2, B, b.heads, self.width, self.d // b.heads)
        return [torch.zeros(shape), 0]

    def step(self, x, state, pos):
        cache, n = state
        x = self.emb(x) + self.pos(pos if torch.is_tensor(pos) else torch.tensor(pos))
        for i, b in enumerate(self.blocks):
            qkv = b.split(b.qkv(b.n1(x)))
            cache[i, 0, :, :, n], cache[i, 1, :, :, n] = qkv[:, 1], qkv[:, 2]
            q = qkv[:, 0][:, :, None]
            o = F.scaled_dot_product_attention(q, cache[i, 0, :, :, : n + 1], cache[i, 1, :, :, : n + 1])
            o = b.proj(o[:, :, 0].reshape(x.shape[0], -1))
            x = x + o + b.ff(b.n2(x + o))
        return self.head(self.norm(x)), [cache, n + 1]


NETS = {"gru": Recurrent, "rnn": Recurrent, "ssm": Selective, "window": Window, "transformer": Transformer}


def make_net(env, net, out=None):
    return NETS[net["kind"]](env.V, out or env.V, **net)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling


class Rollout:
    """[B, P] prompts; [B, T] resp, alive, act, logp, gains; [B] cut, turns, length."""


@torch.no_grad()
def roll(
    env,
    model,
    tasks,
    prompts,
    rngs,
    U,
    *,
    max_tokens,
    max_turns=99,
    temperature=1.0,
    stop=(),
    eng=None,
    demo=None,
    liar=None,
):
    B, P = prompts.shape
    limits, max_turns = np.broadcast_to(max_tokens, B), np.broadcast_to(max_turns, B)
    T = int(limits.max())
    eps = [Episode(r, liar) for r in rngs]
    gens = [env.play(t, e) for t, e in zip(tasks, eps, strict=True)]
    pending = [next(g) for g in gens]
    resp = np.zeros((B, T), np.int64)
    alive, act = np.zeros((B, T), bool), np.zeros((B, T), bool)
    logp = np.zeros((B, T), np.float32)
    gains = np.zeros((B, T), np.float32)
    cut, turns, done = np.zeros(B, bool), np.zeros(B, int), [False] * B
    first = torch.full((B,), 10**6)
    if demo is None:
        state = model.start(B)
        for p in range(P):
            x = prompts[:, p]
            if eng is not None and eng.prompt_token:
                x = eng.prompt_token(x, p)
            logits, state = model.step(x, state, p if eng is None else eng.pos(p, P, None))
        if eng is not None and eng.prefix:
            logits, state = eng.prefix(logits, state)
    left = B
    for t in range(T):
        forced = [isinstance(p, int) for p in pending]
        if demo is None:
            z = logits
            if eng is not None and eng.post:
                z = eng.post(z, resp[:, :t], act[:, :t])
            temp = temperature if eng is None or eng.temperature is None else eng.temperature
            lp = torch.log_softmax(z / temp, -1)
            if eng is not None and eng.keep:
                lp = eng.keep(lp)
            cdf = torch.cumsum(lp.exp().double(), -1)
            tok = (cdf < (U[:, t : t + 1] * cdf[:, -1:])).sum(-1).clamp(max=env.V - 1)
            taken = lp.gather(1, tok[:, None])[:, 0].numpy()
            tok = tok.numpy().copy()
        else:
            tok = [0 if f or d else demo(p, i) for i, (p, f, d) in enumerate(zip(pending, forced, done, strict=True))]
            taken = np.zeros(B, np.float32)
        for i in range(B):
            if done[i]:
                continue
            alive[i, t] = True
            e = eps[i]
            if forced[i]:
                resp[i, t] = pending[i]
                g = None
            else:
                g = int(tok[i])
                resp[i, t] = g
                act[i, t] = True
                logp[i, t] = taken[i]
                e.last = t
            try:
                p = gens[i].send(g)
            except StopIteration:
                done[i] = True
                turns[i] += 1
                left -= 1
                continue
            ended = g is not None and g in stop
            if g is not None and isinstance(p, int):
                turns[i] += 1
                ended = ended or turns[i] >= max_turns[i]
                if first[i] > t:
                    first[i] = t
            pending[i] = p
            if ended or t >= limits[i] - 1:
                done[i] = cut[i] = True
                left -= 1
                gens[i].close()
                e.gain(env.cut)
        if not left:
            break
        if demo is None:
            x = torch.from_numpy(resp[:, t].copy())
            logits, state = model.step(x, state, P + t if eng is None else eng.pos(P + t, P, t > first))
            if eng is not None and eng.state:
                state = eng.state(state, t)
    n = t + 1
    for i, e in enumerate(eps):
        for where, r in e.gains:
            gains[i, where] += r
    out = Rollout()
    out.prompts, out.resp, out.alive, out.act, out.logp = prompts, resp[:, :n], alive[:, :n], act[:, :n], logp[:, :n]
    out.gains, out.cut, out.turns, out.eps = gains[:, :n], cut, turns, eps
    out.length = out.alive.sum(1)
    out.total = out.gains.sum(1)
    return out


class Engine:
    """A copy of the policy that samples, and what may be wrong with it."""

    def __init__(self, model):
        self.model = copy.deepcopy(model)
        self.temperature = self.post = self.keep = self.prefix = self.state = self.prompt_token = self.shift = None

    def pos(self, p, P, after):
        return p if self.shift is None else self.shift(p, P, after)


def as_bf16(state):
    return {k: v.to(torch.bfloat16).float() for k, v in state.items()}


def quantised(state, bits, axis=None):
    out = {}
    for k, v in state.items():
        if v.dim() < 2:
            out[k] = v.clone()
            continue
        top = v.abs().amax() if axis is None else v.abs().amax(axis, keepdim=True)
        scale = top.clamp(min=1e-9) / (2 ** (bits - 1) - 1)
        out[k] = torch.round(v / scale) * scale
    return out


def rngs_of(seed, step, B, salt):
    return [random.Random(((seed * 1009 + salt) * 100003 + step) * 4099 + i) for i in range(B)]


def uniforms(seed, step, B, T, salt):
    return torch.rand(
        B, T, dtype=torch.float64, generator=torch.Generator().manual_seed((seed * 7919 + salt) * 1000003 + step)
    )


def pretrained(team, seed, cache):
    """A policy that has seen noisy demonstrations; its weights are kept in folder `cache`."""
    pre = team["pre"]
    key = hashlib.sha1(
        json.dumps([team["env"], team["net"], pre, seed, CODE_OF_PRETRAINING], sort_keys=True).encode()
    ).hexdigest()[:12]
    where = cache / f"{team['name']}-{seed}-{key}.pt"
    env = ENVS[team["env"]]()
    torch.manual_seed(1000 + seed)
    model = make_net(env, team["net"])
    if where.exists():
        model.load_state_dict(torch.load(where))
        return model
    rng = random.Random(f"demo{team['name']}{seed}")
    opt = torch.optim.Adam(model.parameters(), pre.get("lr", 3e-3))
    noise = pre["noise"]

    def demo(p, i):
        good, allowed = p
        return rng.choice(list(allowed)) if rng.random() < noise else rng.choice(list(good))

    for _ in range(pre["steps"]):
        tasks = [env.task(rng) for _ in range(128)]
        prompts = torch.tensor([env.prompt(t) for t in tasks])
        r = roll(env, None, tasks, prompts, [rng] * 128, None, max_tokens=env.T, demo=demo)
        x = torch.cat([prompts, torch.from_numpy(r.resp)], 1)
        lp = torch.log_softmax(model(x)[:, env.P - 1 : -1], -1).gather(2, x[:, env.P :, None])[..., 0]
        loss = -(lp * torch.from_numpy(r.act)).sum() / r.act.sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
    cache.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), where)
    return model


CODE_OF_PRETRAINING = 2


# ---------------------------------------------------------------------------------------------------------------------
# Training

DEFAULTS = dict(
    lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, momentum=0.9, clip_grad=1.0, schedule="constant", warmup=0,
    epochs=1, minibatches=1, clip_low=0.2, clip_high=0.2, kl_coef=0.0, kl_target=None, kl_horizon=2000, ent_coef=0.0,
    ent_target=None, ent_rate=0.02, ent_max=0.5, gamma=1.0, lam=0.95, temperature=1.0, max_tokens=None, max_turns=99, groups=16,
    group=8, lag=0, critic_lr=3e-3, cap=2.0, reward_scale=1.0, sync_every=1,
)  # fmt: skip


class Run:
    def __init__(self, team, seed, name, setup, first, cache):
        self.team, self.seed, self.name, self.first = team, seed, name, first
        self.setup = setup
        self.env = ENVS[team["env"]]()
        self.s = DEFAULTS | dict(max_tokens=self.env.T) | team["settings"]
        self.steps = team["steps"]
        self.hook, self.mem = {}, {}
        self.model = pretrained(team, seed, cache)
        self.ref = copy.deepcopy(self.model).requires_grad_(False)
        self.engine = Engine(self.model)
        self.kl_coef, self.ent_coef = self.s["kl_coef"], self.s["ent_coef"]
        self.rm = reward_model(team, seed, cache) if team.get("rm") else None
        self.critic = None
        if team["adv"] == "gae":
            torch.manual_seed(77 + seed)
            self.critic = make_net(self.env, team.get("critic", team["net"]), 1)
            self.critic_opt = torch.optim.Adam(self.critic.parameters(), self.s["critic_lr"])
        self.opt = self.make_optimizer()
        self.version, self.history = 0, {0: self.state()}
        rng = random.Random(f"prompts{team['name']}{seed}")
        self.pool = [self.env.task(rng) for _ in range(team["pool"])] if team.get("pool") else None
        rng = random.Random(f"eval{team['name']}")
        self.eval_tasks = [self.env.task(rng) for _ in range(team.get("eval_size", 192))]
        self.baseline = None
        self.rec = None
        self.step = 0
        self.kind = None  # of tasks
        self.changed = {}
        torch.manual_seed(5000 + seed)

    def state(self):
        return {k: v.detach().clone() for k, v in self.model.state_dict().items()}

    def make_optimizer(self):
        s, p = self.s, self.model.parameters()
        if self.team["opt"] == "sgd":
            return torch.optim.SGD(p, s["lr"], momentum=s["momentum"], weight_decay=s["weight_decay"])
        kind = torch.optim.AdamW if self.team["opt"] == "adamw" else torch.optim.Adam
        return kind(p, s["lr"], betas=(s["beta1"], s["beta2"]), eps=s["eps"], weight_decay=s["weight_decay"])

    def set(self, **values):
        """Change settings of the run; a live recording says so."""
        self.s |= values
        self.changed |= values
        if "kl_coef" in values:
            self.kl_coef = values["kl_coef"]
        if "ent_coef" in values:
            self.ent_coef = values["ent_coef"]

    def lr_now(self):
        s, k = self.s, self.step
        lr = s["lr"]
        if s["warmup"]:
            lr *= min(1.0, k / s["warmup"])
        if s["schedule"] == "linear":
            lr *= 1 - 0.9 * k / self.steps
        if s["schedule"] == "cosine":
            lr *= 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / self.steps))
        return lr

    # -- one step -----------------------------------------------------------------------------------------------------

    def tasks(self):
        n = self.s["groups"]
        rng = random.Random(f"tasks{self.team['name']}{self.seed}{self.step}")
        if self.pool and self.kind is None:
            order = list(range(len(self.pool)))
            per = max(1, len(order) // n)
            random.Random(f"epoch{self.team['name']}{self.seed}{(self.step - 1) // per}").shuffle(order)
            at = ((self.step - 1) % per) * n
            tasks = [self.pool[order[(at + i) % len(order)]] for i in range(n)]
        else:
            tasks = [self.env.task(rng, self.kind or "std") for _ in range(n)]
        if "tasks" in self.hook:
            tasks = self.hook["tasks"](tasks, rng)
        return [t for t in tasks for _ in range(self.s["group"])]

    def sample(self, tasks):
        s, B = self.s, len(tasks)
        prompts = torch.tensor([self.env.prompt(t) for t in tasks])
        if "prompts" in self.hook:
            prompts = self.hook["prompts"](prompts)
        rngs = rngs_of(self.seed, self.step, B, 1)
        U = uniforms(self.seed, self.step, B, 40, 2)
        versions = np.full(B, max(0, self.version - s["lag"]))
        if s["sync_every"] > 1:
            versions[:] = versions // s["sync_every"] * s["sync_every"]
        if "versions" in self.hook:
            versions = self.hook["versions"](versions)
        tokens, turns = np.full(B, s["max_tokens"]), np.full(B, s["max_turns"])
        if "limits" in self.hook:
            tokens, turns = self.hook["limits"](tokens, turns)
        parts = []
        for v in np.unique(versions):
            rows = np.flatnonzero(versions == v)
            self.load(int(v))
            parts.append((rows, roll(
                self.env, self.engine.model, [tasks[i] for i in rows], prompts[rows], [rngs[i] for i in rows], U[rows],
                max_tokens=tokens[rows], max_turns=turns[rows], temperature=s["temperature"], eng=self.engine,
                stop=self.mem.get("stop", ()), liar=self.mem.get("liar"),
            )))  # fmt: skip
        b = parts[0][1] if len(parts) == 1 else merged(parts, B, prompts)
        b.tasks, b.versions = tasks, versions
        return b

    def load(self, version):
        state = self.history[version]
        if "transfer" in self.hook:
            state = self.hook["transfer"](state, version)
        precision = self.team.get("engine")
        if precision == "bf16" or self.mem.get("bf16"):
            state = as_bf16(state)
        self.engine.model.load_state_dict(state)

    def scored(self, model, b, grad=False):
        with torch.set_grad_enabled(grad):
            logits = model(b.x)[:, b.P - 1 : -1] / self.s["temperature"]
            full = torch.log_softmax(logits, -1)
            lp = full.gather(2, b.x[:, b.P :, None])[..., 0]
            ent = -(full.exp() * full).sum(-1)
        return lp, ent

    def reward(self, b):
        r = b.total.astype(np.float64)
        if self.rm is not None:
            r = self.rm_score(b).astype(np.float64)
        r = self.team.get("reward_of", lambda r: r)(r)
        if "reward" in self.hook:
            r = self.hook["reward"](r, b)
        return r * self.s["reward_scale"]

    @torch.no_grad()
    def rm_score(self, b):
        x = torch.cat([b.prompts, torch.from_numpy(b.resp)], 1)
        out = self.rm(x)[..., 0]
        last = torch.from_numpy(b.alive.sum(1) + b.prompts.shape[1] - 1)
        return 6.0 * out.gather(1, last[:, None])[:, 0].numpy() - 3.0

    def advantages(self, b, reward):
        """[B, T] and whether it is one value a sequence."""
        kind, G = self.team["adv"], self.s["group"]
        r = torch.tensor(reward)
        T = b.act.shape[1]
        act = torch.from_numpy(b.act)
        if "baseline" in self.hook:
            a = self.hook["baseline"](r, b)
        elif kind in ("grpo", "drgrpo"):
            g = r.view(-1, G)
            a = g - g.mean(1, keepdim=True)
            if kind == "grpo":
                a = a / (g.std(1, keepdim=True) + 1e-4)
            a = a.flatten()
        elif kind == "rloo":
            g = r.view(-1, G)
            a = ((g - g.mean(1, keepdim=True)) * G / (G - 1)).flatten()
        elif kind == "batch":
            a = (r - r.mean()) / (r.std() + 1e-6)
        elif kind == "center":
            a = r - r.mean()
        elif kind == "ema":
            base = r.mean().item() if self.baseline is None else self.baseline
            self.baseline = 0.9 * base + 0.1 * r.mean().item()
            a = r - base
        elif kind == "togo":
            gains = torch.from_numpy(b.gains).double()
            if "gains" in self.hook:
                gains = self.hook["gains"](gains, b)
            else:
                gains[torch.arange(len(r)), b.last] += r - gains.sum(1)
            togo = gains.flip(1).cumsum(1).flip(1)
            # the baseline of a turn: the mean over the batch of what is still to come
            turn = torch.cumsum(act.long(), 1)
            a = torch.zeros_like(togo)
            for k in range(1, int(turn.max()) + 1):
                here = act & (turn == k)
                if here.sum() > 1:
                    x = togo[here]
                    a[here] = (x - x.mean()) / (x.std() + 1e-3)
            return a.float(), False
        elif kind == "gae":
            with torch.no_grad():
                v = self.critic(b.x)[:, b.P - 1 : -1, 0]
            rew = torch.zeros(len(r), T)
            rew[torch.arange(len(r)), b.last] = r.float()
            if self.team.get("kl_in_reward"):
                rew -= self.kl_coef * (b.old - b.ref) * act
            b.token_reward = rew
            if "values" in self.hook:
                v = self.hook["values"](v, b)
            b.values = v
            adv, nxt, carry = torch.zeros_like(rew), torch.zeros(len(r)), torch.zeros(len(r))
            for t in reversed(range(T)):
                m = act[:, t].float()
                delta = rew[:, t] + self.s["gamma"] * nxt - v[:, t]
                new = delta + self.s["gamma"] * self.s["lam"] * carry
                adv[:, t] = new * m
                carry, nxt = torch.where(m > 0, new, carry), torch.where(m > 0, v[:, t], nxt)
            b.returns = adv + v
            x = adv[act]
            return torch.where(act, (adv - x.mean()) / (x.std() + 1e-6), torch.zeros(())), False
        else:
            raise ValueError(kind)
        return (a.float()[:, None] * torch.ones(1, T)), True

    def loss(self, lp, ent, b, rows):
        s, team = self.s, self.team
        act, adv, old = b.mask[rows], b.adv[rows], b.old[rows]
        base = b.rollp[rows] if team.get("denominator") == "rollout" else old
        if "old" in self.hook:
            base = self.hook["old"](base, b, rows)
        n = act.sum(1).clamp(min=1)
        kind, agg = team["loss"], team.get("agg", "token_mean")
        diff = ((lp - base) * act).clamp(-20, 20)
        if kind == "reinforce":
            ratio = torch.exp(diff) if team.get("denominator") == "rollout" else torch.exp(lp - lp.detach())
            term = ratio * adv
        elif kind == "ppo_clip":
            ratio = torch.exp(diff)
            term = torch.minimum(ratio * adv, ratio.clamp(1 - s["clip_low"], 1 + s["clip_high"]) * adv)
            if "clip" in self.hook:
                term = self.hook["clip"](ratio, adv)
        elif kind == "gspo":
            mean = (diff.sum(1) / n)[:, None]
            ratio = torch.exp(mean) * torch.ones_like(lp)
            term = torch.minimum(ratio * adv, ratio.clamp(1 - s["clip_low"], 1 + s["clip_high"]) * adv)
        elif kind == "cispo":
            ratio = torch.exp(diff)
            term = ratio.clamp(max=s["clip_high"]).detach() * adv * lp
        else:
            raise ValueError(kind)
        self.mem["clipped"] = (((ratio - 1).abs() > s["clip_low"]) & (act > 0)).float().sum().item() / act.sum().item()
        weight = team.get("correction")
        if weight == "token_truncate":
            term = term * torch.exp((old - b.rollp[rows]).clamp(-20, 20)).clamp(max=s["cap"])
        elif weight == "sequence_truncate":
            term = term * torch.exp(((old - b.rollp[rows]) * act).sum(1).clamp(-20, 20)).clamp(max=s["cap"])[:, None]
        if team.get("kl_loss"):
            d = b.ref[rows] - lp
            k3 = torch.exp(d.clamp(max=10)) - d - 1
            if "k3" in self.hook:
                k3 = self.hook["k3"](d)
            term = term - self.kl_coef * k3
        if self.ent_coef:
            term = term + self.ent_coef * ent
        if agg == "token_mean":
            return -(term * act).sum() / act.sum()
        if agg == "sequence_mean":
            return -((term * act).sum(1) / n).mean()
        if agg == "sequence_sum":
            return -(term * act).sum(1).mean()
        if agg == "constant":
            return -(term * act).sum() / (len(rows) * self.env.T)
        raise ValueError(agg)

    def train_step(self):
        self.step += 1
        team = self.team
        self.changed = {}
        if self.setup is not None and self.step >= self.first:
            self.setup(self, self.step - self.first)
        if self.changed and team["record"] == "live" and self.step > 1 and self.rec is not None:
            self.say(self.changed, self.step)
        tasks = self.tasks()
        b = self.sample(tasks)
        reward = self.reward(b)
        if "pair" in self.hook:
            reward = self.hook["pair"](reward, b)
        if team.get("dynamic"):
            b, reward = self.informative(b, reward)
        b.P = b.prompts.shape[1]
        b.x = torch.cat([b.prompts, torch.from_numpy(b.resp)], 1)
        b.reward = reward
        b.last = torch.from_numpy(b.act.shape[1] - 1 - b.act[:, ::-1].argmax(1))
        b.rollp = torch.from_numpy(b.logp)
        if "decoded" in self.hook:
            b.x = self.hook["decoded"](b)
        b.old, b.ent = self.scored(self.model, b)
        if self.needs_ref():
            b.ref, _ = self.scored(self.ref, b)
        b.adv, whole = self.advantages(b, reward)
        if "adv" in self.hook:
            b.adv = self.hook["adv"](b.adv, b)
        b.mask = torch.from_numpy(b.act).float()
        if "mask" in self.hook:
            b.mask = self.hook["mask"](b)
        if self.rec is not None:
            self.record(b, whole)
        stats = self.update(b)
        self.version += 1
        if "weights" in self.hook:
            with torch.no_grad():
                self.hook["weights"]()
        self.history[self.version] = self.state()
        if self.rec is not None:
            self.log(b, stats)
        return b

    def needs_ref(self):
        return self.team.get("kl_loss") or self.team.get("kl_in_reward")

    def informative(self, b, reward):
        """Dynamic sampling: the groups that have both good and bad responses come first, half as many are kept."""
        G = self.s["group"]
        g = reward.reshape(-1, G)
        spread = g.std(1) > 1e-6
        keep = np.argsort(~spread, kind="stable")[: max(1, int(len(g) * self.team["dynamic"]))]
        rows = (np.sort(keep)[:, None] * G + np.arange(G)).ravel()
        c = Rollout()
        for k in ("resp", "alive", "act", "logp", "gains", "cut", "turns", "length", "total", "versions"):
            setattr(c, k, getattr(b, k)[rows])
        c.prompts, c.eps, c.tasks = b.prompts[rows], [b.eps[i] for i in rows], [b.tasks[i] for i in rows]
        return c, reward[rows]

    def update(self, b):
        s = self.s
        lr = self.lr_now()
        for g in self.opt.param_groups:
            g["lr"], g["weight_decay"] = lr, s["weight_decay"]
            if "betas" in g:
                g["betas"], g["eps"] = (s["beta1"], s["beta2"]), s["eps"]
            else:
                g["momentum"] = s["momentum"]
        B = len(b.x)
        gen = torch.Generator().manual_seed(self.seed * 1000 + self.step)
        norms, losses, vlosses = [], [], []
        for _ in range(s["epochs"]):
            order = torch.randperm(B, generator=gen)
            for rows in order.chunk(s["minibatches"]):
                c = Rollout()
                c.x, c.P = b.x[rows], b.P
                self.model.drop = self.mem.get("drop", 0.0)
                lp, ent = self.scored(self.model, c, grad=True)
                self.model.drop = 0.0
                loss = self.loss(lp, ent, b, rows)
                self.opt.zero_grad()
                loss.backward()
                if "grad" in self.hook:
                    self.hook["grad"]()
                norms.append(nn.utils.clip_grad_norm_(self.model.parameters(), s["clip_grad"] or 1e9).item())
                self.opt.step()
                if "after" in self.hook:
                    with torch.no_grad():
                        self.hook["after"]()
                losses.append(loss.item())
                if self.critic is not None:
                    v = self.critic(b.x[rows])[:, b.P - 1 : -1, 0]
                    act = torch.from_numpy(b.act)[rows].float()
                    vl = (((v - b.returns[rows]) ** 2) * act).sum() / act.sum()
                    self.critic_opt.zero_grad()
                    vl.backward()
                    nn.utils.clip_grad_norm_(self.critic.parameters(), 1.0)
                    self.critic_opt.step()
                    vlosses.append(vl.item())
        if s["ent_target"] is not None:
            H = (b.ent * b.mask).sum().item() / b.mask.sum().item()
            gap = s["ent_target"] - H
            self.ent_coef = float(
                np.clip(self.ent_coef + s["ent_rate"] * gap * self.mem.get("ent_sign", 1), -s["ent_max"], s["ent_max"])
            )
        if s["kl_target"] is not None:
            kl = ((b.old - b.ref) * b.mask).sum().item() / b.mask.sum().item()
            e = float(np.clip(kl / s["kl_target"] - 1, -0.2, 0.2)) * self.mem.get("kl_sign", 1)
            self.kl_coef *= 1 + e * B / s["kl_horizon"]
        return dict(
            grad_norm=float(np.mean(norms)),
            loss=float(np.mean(losses)),
            value_loss=float(np.mean(vlosses)) if vlosses else None,
            lr=lr,
            clip_frac=self.mem.get("clipped"),
        )

    @torch.no_grad()
    def evaluate(self):
        tasks = self.eval_tasks
        prompts = torch.tensor([self.env.prompt(t) for t in tasks])
        r = roll(
            self.env,
            self.model,
            tasks,
            prompts,
            rngs_of(1, 0, len(tasks), 9),
            uniforms(1, 0, len(tasks), 40, 9),
            max_tokens=self.env.T,
        )
        return float(self.team.get("reward_of", lambda r: r)(r.total).mean())

    # -- recording ----------------------------------------------------------------------------------------------------

    def open(self, path):
        from tim_trace import Recorder

        self.rec = Recorder(path, force=True)
        if self.setup is not None and self.first == 1:
            # what is set from the start is in the settings of the start
            self.step = 1
            self.setup(self, 0)
            self.step = 0
        if self.team.get("record_loss"):
            self.rec.add_loss(self.recorded_loss())
        self.say(self.s, 0)

    def recorded_loss(self):
        from tim_trace import Loss

        t, s = self.team, self.s
        kind = {"gspo": "ppo_clip"}.get(t["loss"], t["loss"])
        return Loss(
            kind=kind, level={"gspo": "sequence_mean"}.get(t["loss"], "token"), clip_low=s["clip_low"], clip_high=s["clip_high"],
            denominator=t.get("denominator", "current" if kind == "reinforce" else "train"), aggregation=t.get("agg", "token_mean"),
            max_tokens=self.env.T if t.get("agg") == "constant" else None, kl_coefficient=s["kl_coef"] if t.get("kl_loss") else 0.0,
            correction=t.get("correction", "none"), correction_high=s["cap"] if t.get("correction") else None,
        )  # fmt: skip

    def say(self, values, step):
        names = self.team.get("hyper")
        if not names:
            return
        found = {}
        for k, v in values.items():
            for name in names.get(k, "").split():
                found[name] = v
        if step == 0:
            found |= self.team.get("fixed", {})
        elif self.team.get("record_loss") and {"kl_coef", "clip_low", "clip_high", "cap"} & set(values):
            found |= self.recorded_loss().hyperparameters
        if found:
            self.rec.add_hyperparameters(found, step=step)

    def record(self, b, whole):
        w = self.team["write"]
        own = dict(
            step=self.step,
            prompt_ids=b.prompts.numpy(),
            response_ids=b.resp,
            response_attention_mask=b.alive,
            response_mask=b.act,
        )
        if w.get("lists"):
            n = b.alive.sum(1)
            own |= dict(
                prompt_ids=b.prompts.tolist(), response_ids=[r[:k].tolist() for r, k in zip(b.resp, n, strict=True)],
                response_mask=[r[:k].tolist() for r, k in zip(b.act, n, strict=True)],
            )  # fmt: skip
            del own["response_attention_mask"]
        if "rewards" in w:
            own["rewards"] = {w["rewards"]: b.reward}
        else:
            own["reward"] = b.reward
        if w.get("groups", self.s["group"] > 1):
            own["group_ids"] = [f"{self.step}-{i // self.s['group']}" for i in range(len(b.x))]
        if w.get("advantages", True):
            adv = b.adv.numpy()
            if whole:
                own["advantage"] = adv[:, 0]
            elif w.get("lists"):
                own["advantage"] = [a[:k].tolist() for a, k in zip(adv, n, strict=True)]
            else:
                own["advantage"] = adv
        v = self.hook["claimed"](b.versions) if "claimed" in self.hook else b.versions
        if w.get("versions", True):
            own["policy_version"] = v
        if w.get("sampling"):
            own |= dict(temperature=self.s["temperature"], max_tokens=self.s["max_tokens"])
        if w.get("finish"):
            own["finish_reason"] = ["length" if c else "stop" for c in b.cut]
        batch = self.rec.add_sequences(**own)
        mine = dict(policy_version=self.version) if w.get("versions", True) else {}

        def given(x):
            x = x.numpy() if torch.is_tensor(x) else x
            return [r[:k].tolist() for r, k in zip(x, n, strict=True)] if w.get("lists") else x

        masks = dict(scored_mask=given(b.act))
        self.rec.add_scores("rollout", batch, logprobs=given(b.logp), **masks)
        every = {} if w.get("all_scored") else masks
        ent = dict(entropy=given(b.ent)) if w.get("token_entropy") else {}
        self.rec.add_scores("train", batch, logprobs=given(b.old), **ent, **mine, **every)
        if self.needs_ref():
            self.rec.add_scores(
                "reference", batch, logprobs=given(b.ref), **(dict(policy_version=0) if mine else {}), **every
            )

    def log(self, b, stats):
        act, total = torch.from_numpy(b.act), float(b.act.sum())
        d = (b.old - b.rollp)[act]
        found = dict(stats)
        found |= dict(
            reward=float(np.mean(b.reward)), reward_std=float(np.std(b.reward)), reward_max=float(np.max(b.reward)), reward_min=float(np.min(b.reward)),
            entropy=b.ent[act].mean().item(), length=float(b.length.mean()), length_max=float(b.length.max()), cut=float(b.cut.mean()),
            turns=float(b.turns.mean()), adv_mean=b.adv[act].mean().item(), adv_max=b.adv[act].max().item(), adv_min=b.adv[act].min().item(),
            mismatch=(torch.exp(d.clamp(-20, 20)) - d - 1).mean().item(), mismatch_abs=d.abs().mean().item(), tokens=total, kl_coef=self.kl_coef, ent_coef=self.ent_coef,
            lag=float(np.mean(self.version - 1 - b.versions)), zero_std=float((b.reward.reshape(-1, self.s["group"]).std(1) < 1e-6).mean()),
        )  # fmt: skip
        if self.needs_ref():
            dr = (b.old - b.ref)[act]
            found["kl"] = (torch.exp((-dr).clamp(-20, 10)) + dr - 1).mean().item()
        if hasattr(b, "values"):
            found["value"] = b.values[act].mean().item()
            found["return"] = b.returns[act].mean().item()
        names = self.team["metrics"]
        found = {names[k]: v for k, v in found.items() if k in names and v is not None}
        if self.team.get("optimizer_recorded"):
            self.rec.add_optimizer(self.step, self.opt)
        self.rec.add_metrics(self.step, found)

    def go(self, folder=None, every=None, stop=None):
        every = every or self.team["eval_every"]
        evals = [(0, self.evaluate())]
        if folder is not None:
            self.open(Path(folder) / "trace")
            if self.team.get("eval_name"):
                self.rec.add_metrics(0, {self.team["eval_name"]: evals[0][1]})
        marks = []
        for _ in range(stop or self.steps):
            self.train_step()
            if self.step % every == 0:
                evals.append((self.step, self.evaluate()))
                if self.rec is not None and self.team.get("eval_name"):
                    self.rec.add_metrics(self.step, {self.team["eval_name"]: evals[-1][1]})
            marks.append(float(sum(v.double().sum() for v in self.history[self.version].values())))
            for old in [v for v in self.history if 0 < v < self.version - 90]:
                if v_kept(self, old):
                    continue
                del self.history[old]
        if self.rec is not None:
            self.rec.close()
        return evals, marks


def v_kept(run, v):
    return v in run.mem.get("kept", ())


def merged(parts, B, prompts):
    T = max(r.resp.shape[1] for _, r in parts)
    out = Rollout()
    for k in ("resp", "alive", "act", "logp", "gains"):
        first = getattr(parts[0][1], k)
        x = np.zeros((B, T), first.dtype)
        for rows, r in parts:
            x[rows, : r.resp.shape[1]] = getattr(r, k)
        setattr(out, k, x)
    for k in ("cut", "turns"):
        x = np.zeros(B, getattr(parts[0][1], k).dtype)
        for rows, r in parts:
            x[rows] = getattr(r, k)
        setattr(out, k, x)
    out.eps = [None] * B
    for rows, r in parts:
        for i, e in zip(rows, r.eps, strict=True):
            out.eps[i] = e
    out.prompts, out.length, out.total = prompts, out.alive.sum(1), out.gains.sum(1)
    return out


def reward_model(team, seed, cache):
    """A net that has learned the score of random and of half-right responses, with noise; kept in folder `cache`."""
    env = ENVS[team["env"]]()
    where = cache / f"{team['name']}-rm-{seed}-{CODE_OF_PRETRAINING}.pt"
    torch.manual_seed(300 + seed)
    rm = Recurrent(env.V, 1, 48)
    if where.exists():
        rm.load_state_dict(torch.load(where))
        return rm
    rng = random.Random(f"rm{seed}")
    opt = torch.optim.Adam(rm.parameters(), 3e-3)
    for k in range(1500):
        noise = rng.choice([0.05, 0.2, 0.5])

        def demo(p, i, noise=noise):
            good, allowed = p
            allowed = [x for x in allowed if x != env.PRAISE or rng.random() < 0.05]
            return rng.choice(allowed) if rng.random() < noise else rng.choice(list(good))

        tasks = [env.task(rng) for _ in range(96)]
        prompts = torch.tensor([env.prompt(t) for t in tasks])
        r = roll(env, None, tasks, prompts, [rng] * 96, None, max_tokens=env.T, demo=demo)
        y = torch.tensor(r.total) + 0.1 * torch.randn(96)
        x = torch.cat([prompts, torch.from_numpy(r.resp)], 1)
        out = rm(x)[..., 0].gather(1, torch.from_numpy(r.length + env.P - 1)[:, None])[:, 0]
        loss = ((out - y) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        for g in opt.param_groups:
            g["lr"] = 3e-3 * (1 - k / 1500)
        opt.step()
    cache.mkdir(parents=True, exist_ok=True)
    torch.save(rm.state_dict(), where)
    return rm


# ---------------------------------------------------------------------------------------------------------------------
# Teams

TRL_METRICS = dict(
    reward="reward", reward_std="reward_std", entropy="entropy", grad_norm="grad_norm", loss="loss", lr="learning_rate", kl="kl",
    length="completions/mean_length", length_max="completions/max_length", cut="completions/clipped_ratio", zero_std="frac_reward_zero_std",
    clip_frac="clip_ratio/region_mean", ent_coef="entropy_coef",
)  # fmt: skip
TRL_HYPER = dict(
    lr="learning_rate", beta1="adam_beta1", beta2="adam_beta2", eps="adam_epsilon", weight_decay="weight_decay", clip_grad="max_grad_norm",
    schedule="lr_scheduler_type", epochs="num_iterations", clip_low="epsilon", clip_high="epsilon_high", kl_coef="beta", temperature="temperature",
    max_tokens="max_completion_length", group="num_generations", groups="prompts_per_step", ent_coef="entropy_coef", max_turns="max_turns", reward_scale="reward_weights", minibatches="steps_per_generation", kl_target="target_kl", ent_target="target_entropy",
)  # fmt: skip
VERL_METRICS = dict(
    reward="critic/score/mean", reward_max="critic/score/max", reward_min="critic/score/min", entropy="actor/entropy", grad_norm="actor/grad_norm",
    loss="actor/pg_loss", lr="actor/lr", clip_frac="actor/pg_clipfrac", kl="actor/kl_loss", kl_coef="actor/kl_coef", length="response_length/mean",
    length_max="response_length/max", cut="response_length/clip_ratio", adv_mean="critic/advantages/mean", adv_max="critic/advantages/max",
    adv_min="critic/advantages/min", value="critic/values/mean", value_loss="critic/vf_loss", turns="num_turns/mean", mismatch="rollout_corr/k3_kl", ent_coef="actor/entropy_coeff",
)  # fmt: skip
VERL_METRICS["return"] = "critic/returns/mean"
VERL_HYPER = dict(
    lr="actor.optim.lr", beta1="actor.optim.beta1", beta2="actor.optim.beta2", eps="actor.optim.eps", weight_decay="actor.optim.weight_decay",
    clip_grad="actor.grad_clip", schedule="actor.optim.lr_scheduler", warmup="actor.optim.lr_warmup_steps", epochs="actor.ppo_epochs",
    minibatches="actor.ppo_mini_batches", clip_low="actor.clip_ratio_low", clip_high="actor.clip_ratio_high", kl_coef="actor.kl_loss_coef",
    ent_coef="actor.entropy_coeff", ent_target="actor.target_entropy", gamma="algorithm.gamma", lam="algorithm.lam", temperature="rollout.temperature",
    max_tokens="data.max_response_length", max_turns="rollout.multi_turn.max_turns", groups="data.train_batch_size", group="rollout.n",
    critic_lr="critic.optim.lr", kl_target="algorithm.kl_ctrl.target_kl",
)  # fmt: skip
PRIME_METRICS = dict(
    reward="reward/mean", reward_std="reward/std", entropy="entropy/mean", grad_norm="optim/grad_norm", lr="optim/lr", loss="loss/mean",
    length="seq_len/mean", cut="is_truncated/mean", lag="async_level", mismatch="mismatch_kl/mean", turns="num_turns/mean", ent_coef="loss/entropy_coef",
)  # fmt: skip
PRIME_HYPER = dict(
    lr="optim.lr", beta1="optim.betas1", beta2="optim.betas2", eps="optim.eps", weight_decay="optim.weight_decay", clip_grad="optim.max_norm",
    schedule="scheduler.type", temperature="sampling.temperature", max_tokens="sampling.max_tokens", max_turns="env.max_turns",
    group="rollouts_per_example", groups="batch_size", lag="max_async_level", cap="loss.ratio_cap", ent_coef="loss.entropy_coef",
    kl_coef="loss.kl_coef", ent_target="loss.entropy_target", warmup="scheduler.warmup_steps",
)  # fmt: skip
NEMO_METRICS = dict(
    reward="train/reward", grad_norm="train/grad_norm", lr="train/lr", loss="train/loss", entropy="train/approx_entropy", length="train/mean_gen_tokens_per_sample",
    mismatch="train/gen_kl_error", cut="train/truncation_rate", turns="train/avg_turns_per_sample", lag="train/avg_trajectory_age", kl_coef="train/kl_penalty",
)  # fmt: skip
NEMO_HYPER = dict(
    lr="policy.optimizer.lr", beta1="policy.optimizer.beta1", beta2="policy.optimizer.beta2", eps="policy.optimizer.eps",
    weight_decay="policy.optimizer.weight_decay", clip_grad="policy.max_grad_norm", schedule="policy.scheduler", clip_low="loss_fn.ratio_clip_min",
    clip_high="loss_fn.ratio_clip_max", kl_coef="loss_fn.reference_policy_kl_penalty", temperature="policy.generation.temperature",
    max_tokens="policy.generation.max_new_tokens", max_turns="grpo.max_rollout_turns", group="grpo.num_generations_per_prompt",
    groups="grpo.num_prompts_per_step", lag="grpo.async_grpo.max_trajectory_age_steps", cap="loss_fn.truncated_importance_sampling_ratio",
    ent_coef="loss_fn.entropy_coef", kl_target="loss_fn.kl_target", kl_horizon="loss_fn.kl_horizon",
)  # fmt: skip

TEAMS = {}


def team(name, **values):
    TEAMS[name] = dict(name=name, write={}, metrics={}, hyper={}, record="own", opt="adam") | values


team(
    "safe", env="safe", net=dict(kind="gru", d=64), pre=dict(steps=800, noise=0.45), adv="grpo", loss="ppo_clip", agg="sequence_mean", kl_loss=True,
    settings=dict(lr=1.5e-3, schedule="linear", groups=32, group=8, kl_coef=0.01, epochs=2, minibatches=2), steps=120, eval_every=3, eval_size=512,
    record="live", record_loss=True, optimizer_recorded=True, metrics=TRL_METRICS, hyper=TRL_HYPER, fixed=dict(loss_type="grpo", scale_rewards="group", optim="adam"),
    eval_name="eval_reward", write=dict(sampling=True, token_entropy=True, finish=True),
)  # fmt: skip
team(
    "nim", env="nim", net=dict(kind="window", d=48, w=6), pre=dict(steps=120, noise=0.5), adv="gae", loss="ppo_clip", opt="adam",
    settings=dict(lr=1e-3, groups=128, group=1, epochs=2, minibatches=2, gamma=1.0, lam=0.95, critic_lr=5e-3), steps=100, eval_every=2, eval_size=256,
    record="live", record_loss=True, optimizer_recorded=True, metrics=VERL_METRICS, hyper=VERL_HYPER,
    fixed={"algorithm.adv_estimator": "gae", "actor.loss_agg_mode": "token-mean", "rollout.dtype": "bfloat16"}, engine="bf16",
    eval_name="val-core/nim/acc/mean@1", write=dict(finish=True, groups=False),
)  # fmt: skip
team(
    "grid", env="grid", net=dict(kind="transformer", d=32, layers=2, heads=2), pre=dict(steps=300, noise=0.35), adv="rloo", loss="reinforce", agg="sequence_sum",
    kl_loss=True, pool=480, settings=dict(lr=1e-3, groups=24, group=4, kl_coef=0.05), steps=120, eval_every=3,
    metrics=dict(reward="reward/mean", grad_norm="grad_norm", length="length/mean", kl="kl/mean", entropy="policy/entropy"), hyper=dict(lr="lr", kl_coef="kl_coef", group="k", max_tokens="max_new_tokens", temperature="temperature"),
    eval_name="heldout/return", write=dict(lists=True, all_scored=False),
)  # fmt: skip
team(
    "haggle", env="haggle", net=dict(kind="rnn", d=40), pre=dict(steps=150, noise=0.3), adv="ema", loss="reinforce", agg="token_mean", opt="sgd",
    settings=dict(lr=0.02, momentum=0.9, groups=128, group=1, clip_grad=5.0, ent_coef=0.01), steps=200, eval_every=3, eval_size=256,
    metrics=dict(reward="episode_reward", entropy="entropy", grad_norm="gradnorm", loss="pg_loss"),
    hyper=dict(lr="lr", momentum="momentum", clip_grad="clip", ent_coef="entropy_bonus", groups="episodes_per_step"), write=dict(groups=False),
)  # fmt: skip
team(
    "kitchen", env="kitchen", net=dict(kind="transformer", d=32, layers=2, heads=2), pre=dict(steps=150, noise=0.3), adv="grpo", loss="ppo_clip", agg="token_mean", dynamic=0.6667,
    opt="adamw", pool=144, settings=dict(lr=7e-4, groups=24, group=8, clip_low=0.2, clip_high=0.28, weight_decay=0.01, epochs=1, minibatches=4), steps=100, eval_every=2,
    record="live", record_loss=True, optimizer_recorded=True, metrics=VERL_METRICS, hyper=VERL_HYPER, fixed={"algorithm.adv_estimator": "grpo", "algorithm.filter_groups.enable": True, "actor.loss_agg_mode": "token-mean"},
    eval_name="val-core/kitchen/reward/mean@1", write=dict(finish=True, sampling=True),
)  # fmt: skip
team(
    "shelves", env="shelves", net=dict(kind="transformer", d=32, layers=2, heads=2, experts=4), pre=dict(steps=350, noise=0.35), adv="grpo", loss="gspo", agg="sequence_mean", kl_loss=True,
    settings=dict(lr=6e-4, groups=16, group=8, clip_low=0.03, clip_high=0.04, minibatches=2, kl_coef=0.05), steps=120, eval_every=3, engine="bf16",
    metrics=dict(reward="rollout/raw_reward", entropy="train/entropy_loss", kl="train/kl_loss", grad_norm="train/grad_norm", lr="train/lr-pg_0", clip_frac="train/pg_clipfrac", length="rollout/response_len/mean", cut="rollout/truncated_ratio", mismatch_abs="train/train_rollout_logprob_abs_diff"),
    hyper=dict(lr="lr", kl_coef="kl_loss_coef", clip_low="eps_clip", clip_high="eps_clip_high", group="n_samples_per_prompt", groups="rollout_batch_size", max_tokens="rollout_max_response_len", temperature="rollout_temperature", clip_grad="clip_grad"),
    eval_name="eval/shelves", write=dict(lists=True, all_scored=True),
)  # fmt: skip
team(
    "opcode", env="opcode", net=dict(kind="window", d=64, w=9), pre=dict(steps=1500, noise=0.3), adv="drgrpo", loss="cispo", agg="constant", reward_of=lambda r: r - 10,
    settings=dict(lr=1e-3, groups=16, group=8, clip_high=4.0, minibatches=2, schedule="linear"), steps=120, eval_every=3, eval_size=256,
    metrics=dict(reward="reward", length="response_length", lr="actor_lr", grad_norm="actor_grad_norm", loss="policy_loss"), hyper=dict(lr="actor_learning_rate", group="n_samples_per_prompt", max_tokens="generate_max_len"),
    write=dict(versions=False, rewards="verifier"),
)  # fmt: skip
team(
    "clinic", env="clinic", net=dict(kind="ssm", d=40), pre=dict(steps=200, noise=0.4), adv="batch", loss="reinforce", agg="sequence_sum", correction="sequence_truncate", opt="adamw",
    settings=dict(lr=1e-3, groups=128, group=1, lag=2, weight_decay=0.01, cap=2.0), steps=150, eval_every=3,
    record="live", optimizer_recorded=True, metrics=PRIME_METRICS, hyper=PRIME_HYPER, fixed={"advantage": "batch", "loss.type": "reinforce_sequence_is"}, eval_name="eval/clinic/avg@1", write=dict(lists=True, groups=False),
)  # fmt: skip
team(
    "butler", env="butler", net=dict(kind="transformer", d=32, layers=2, heads=2), pre=dict(steps=250, noise=0.35), adv="gae", loss="ppo_clip", agg="token_mean", kl_in_reward=True, rm=True,
    critic=dict(kind="gru", d=32), settings=dict(lr=5e-4, groups=96, group=1, epochs=2, minibatches=2, kl_coef=0.05, lam=0.95, critic_lr=3e-3), steps=100, eval_every=2,
    metrics=dict(reward="reward", kl="kl", length="response_length", value_loss="critic_loss", loss="policy_loss", kl_coef="kl_coef"), hyper=dict(lr="actor_learning_rate", critic_lr="critic_learning_rate", kl_coef="init_kl_coef", gamma="gamma", lam="lambd", clip_low="eps_clip", max_tokens="generate_max_len", epochs="max_epochs"),
    eval_name="eval/human_rule", write=dict(groups=False),
)  # fmt: skip
team(
    "pegs", env="pegs", net=dict(kind="transformer", d=32, layers=2, heads=2), pre=dict(steps=600, noise=0.35), adv="grpo", loss="ppo_clip", agg="token_mean", correction="token_truncate", kl_loss=True,
    settings=dict(lr=7e-4, groups=16, group=8, lag=3, kl_coef=0.01, cap=2.0), steps=120, eval_every=3, engine="bf16",
    record="live", record_loss=True, optimizer_recorded=True, metrics=NEMO_METRICS, hyper=NEMO_HYPER, eval_name="validation/accuracy", write=dict(sampling=True),
)  # fmt: skip
team(
    "ferry", env="ferry", net=dict(kind="rnn", d=64), pre=dict(steps=800, noise=0.3), adv="rloo", loss="reinforce", agg="token_mean", opt="adamw",
    settings=dict(lr=1e-3, groups=32, group=4, schedule="cosine", warmup=5, weight_decay=0.01), steps=150, eval_every=3,
    metrics=dict(reward="mean_reward", entropy="H", grad_norm="|g|"), write=dict(all_scored=True),
)  # fmt: skip
team(
    "glass", env="glass", net=dict(kind="gru", d=40), pre=dict(steps=500, noise=0.5), adv="togo", loss="reinforce", agg="token_mean", kl_loss=False,
    settings=dict(lr=3e-3, groups=96, group=1, lag=0), steps=120, eval_every=3,
    metrics=dict(reward="return", entropy="entropy", grad_norm="grad_norm", lr="lr", length="len"), hyper=dict(lr="lr", groups="batch", temperature="temperature"), write=dict(groups=False, advantages=False, token_entropy=True),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# What is changed. A change is setup(run, k), called in every step from the first on, k = 0, 1, ...

CHANGES = []
"""(team, seed, cause, name, first step, setup, detail)"""


def change(team, seed, cause, name, first, detail, setup):
    CHANGES.append((team, seed, cause, f"{team}-{cause}-{name}", first, setup, detail))


def once(f):
    """Of setups that are called in each step: at the first alone."""

    def setup(run, k):
        if k == 0:
            f(run)

    return setup


def settings(**values):
    return once(lambda run: run.set(**values))


def hook(name, f):
    """f(run, *arguments of the hook)"""

    def begin(run):
        run.hook[name] = lambda *a: f(run, *a)

    return once(begin)


def engine(**parts):
    def begin(run):
        for k, f in parts.items():
            setattr(run.engine, k, f)

    return once(begin)


def ramp(k, n):
    return min(1.0, (k + 1) / n)


def kind_of(kind, share=1.0):
    """Prompts of another kind."""

    def tasks(run, tasks, rng):
        return [run.env.task(rng, kind) if rng.random() < share else t for t in tasks]

    return hook("tasks", tasks)


def reward_rows(f):
    """f(reward, b, i, env) for each row."""
    return hook("reward", lambda run, r, b: np.array([f(r[i], b, i, run.env) for i in range(len(r))], float))


def last_token(b, i):
    return int(b.resp[i][np.flatnonzero(b.act[i])[-1]])


def rolled(n):
    return hook("pair", lambda run, r, b: np.roll(r, n))


def per_group(run, r, f):
    return np.concatenate([f(g) for g in r.reshape(-1, run.s["group"])])


# -- mismatch

change(
    "safe",
    1,
    "mismatch",
    "quant2",
    40,
    "engine weights rounded to 2 bits a tensor",
    hook("transfer", lambda run, s, v: quantised(s, 2)),
)


change(
    "nim",
    1,
    "mismatch",
    "vocabulary",
    12,
    "the engine's padded vocabulary is off by one",
    engine(post=lambda z, resp, act: z.roll(1, -1)),
)


def haggle_head(run):
    kept = {k: v for k, v in run.history[run.version].items() if k.startswith("head")}
    run.hook["transfer"] = lambda s, v: s | kept


change("haggle", 1, "mismatch", "head-left-out", 40, "the head is no longer transferred", once(haggle_head))


def swap_experts(run, s, v):
    s = dict(s)
    for k in list(s):
        if "router" in k:
            s[k] = s[k].roll(1, 0)
    return s


change(
    "shelves",
    1,
    "mismatch",
    "router-order",
    20,
    "the engine numbers the experts from another one",
    hook("transfer", swap_experts),
)


def hot_engine(run):
    run.engine.temperature = 3.0
    run.changed["temperature"] = 3.0


def cold_engine(run):
    run.engine.temperature = 0.3


def min_p(z, resp, act):
    lp = torch.log_softmax(z, -1)
    return torch.where(lp >= lp.amax(-1, keepdim=True) - 0.7, z, torch.full_like(z, -30.0))


change(
    "clinic",
    1,
    "mismatch",
    "hot-engine",
    50,
    "engine samples at temperature 3, the trainer scores at 1",
    once(hot_engine),
)
change(
    "grid",
    1,
    "mismatch",
    "hot-engine",
    40,
    "engine samples at temperature 3, the trainer scores at 1",
    once(hot_engine),
)
change(
    "safe",
    2,
    "mismatch",
    "engine-default",
    40,
    "the engine takes temperature 0.3 from a default of its own",
    once(cold_engine),
)
change(
    "glass",
    2,
    "mismatch",
    "min-p",
    30,
    "the engine cuts off all tokens that are half as likely as the best",
    engine(post=min_p),
)


def penalty(z, resp, act):
    z = z.clone()
    for t in range(resp.shape[1]):
        rows = np.flatnonzero(act[:, t])
        z[rows, resp[rows, t]] -= 8.0
    return z


change(
    "pegs",
    1,
    "mismatch",
    "repetition",
    20,
    "engine punishes repeated tokens, the trainer knows nothing of it",
    engine(post=penalty),
)


def glass_shard(run, s, v):
    s = dict(s)
    e = s["emb.weight"].clone()
    e[9:18] = 0
    s["emb.weight"] = e
    return s


change(
    "glass",
    1,
    "mismatch",
    "shard-zero",
    40,
    "one shard of the embedding arrives as zeros",
    hook("transfer", glass_shard),
)


def butler_prefix(logits, state):
    n = logits.shape[0]
    rows = torch.arange(n)
    rows = (rows + 7) % n
    cache, k = state
    return logits[rows], [cache[:, :, rows].clone(), k]


change(
    "butler",
    1,
    "mismatch",
    "prefix-collision",
    40,
    "prefix cache answers with another prompt's state",
    engine(prefix=butler_prefix),
)

change(
    "opcode",
    1,
    "mismatch",
    "transposed",
    40,
    "a square matrix arrives transposed",
    hook("transfer", lambda run, s, v: s | {"two.weight": s["two.weight"].T.clone()}),
)
change(
    "ferry",
    2,
    "mismatch",
    "saturated",
    50,
    "the engine's hidden state saturates at 0.3",
    engine(state=lambda h, t: h.clamp(-0.3, 0.3)),
)

# -- staleness


def freeze(declared=True, version=None):
    def begin(run):
        at = run.version if version is None else version
        run.mem["kept"] = {at}
        run.hook["versions"] = lambda v: np.full(len(v), at)
        if not declared:
            lag = run.s["lag"]
            run.hook["claimed"] = lambda v: np.full(len(v), run.version - lag)

    return once(begin)


def lagging(n, declared=True):
    def setup(run, k):
        lag = n(k) if callable(n) else n
        run.hook["versions"] = lambda v: np.maximum(0, np.full(len(v), run.version - lag))
        if not declared:
            base = run.s["lag"]
            run.hook["claimed"] = lambda v: np.full(len(v), run.version - base)

    return setup


change("nim", 2, "staleness", "frozen", 15, "the engine is no longer synchronised, versions say so", freeze())
change("safe", 1, "staleness", "lag15", 40, "15 updates behind, versions say so", lagging(15))
change(
    "haggle",
    2,
    "staleness",
    "frozen-silent",
    20,
    "the engine is no longer synchronised, versions claim that it is",
    freeze(False),
)


def half_frozen(run):
    at = run.version
    run.mem["kept"] = {at}
    run.hook["versions"] = lambda v: np.where(np.arange(len(v)) % run.s["group"] < run.s["group"] // 2, at, v)


change("safe", 2, "staleness", "one-replica", 40, "one of two engines is no longer synchronised", once(half_frozen))
change("haggle", 1, "staleness", "queue", 30, "the queue grows by one update a step", lagging(lambda k: min(k + 1, 80)))
change(
    "glass",
    1,
    "staleness",
    "frozen-silent",
    30,
    "the engine is no longer synchronised, versions claim that it is",
    freeze(False),
)
change(
    "butler",
    2,
    "staleness",
    "first-checkpoint",
    6,
    "the engine restarts and serves the first checkpoint, versions claim to be new",
    freeze(False, 0),
)


def replay(run):
    def versions(v):
        rng = np.random.default_rng(run.step)
        old = rng.integers(0, 10, len(v) // run.s["group"])
        return np.repeat(old, run.s["group"])

    run.mem["kept"] = set(range(10))
    run.hook["versions"] = versions


change(
    "opcode",
    1,
    "staleness",
    "replay",
    30,
    "groups come from a buffer of the first ten rounds that is never emptied",
    once(replay),
)
change("glass", 2, "staleness", "lag25", 30, "25 updates behind, versions say so", lagging(25))
change("opcode", 2, "staleness", "frozen", 20, "the engine is no longer synchronised", freeze())

# -- optimizer

change("safe", 1, "optimizer", "lr100", 50, "learning rate times 100", settings(lr=0.15))
change("haggle", 1, "optimizer", "l2", 140, "weight decay of the SGD from 0 to 3", settings(weight_decay=3.0))
change("kitchen", 1, "optimizer", "decay", 40, "weight decay 0.01 to 60", settings(weight_decay=60.0))


def moments_lost(run):
    for st in run.opt.state.values():
        st["exp_avg_sq"].zero_()


change(
    "nim",
    1,
    "optimizer",
    "moments",
    30,
    "second moments underflow to zero after every step",
    hook("after", moments_lost),
)


def lr_grows(rate):
    return lambda run, k: run.set(lr=run.s["lr"] * rate)


change("grid", 1, "optimizer", "lr-creeps", 40, "learning rate grows by 7 percent a step", lr_grows(1.07))
change("ferry", 1, "optimizer", "schedule", 105, "the schedule restarts at 400 times the rate", settings(lr=0.4))
change(
    "opcode",
    1,
    "optimizer",
    "beta1",
    60,
    "beta1 0.9 to 0.9999, which its bias correction does not survive",
    settings(beta1=0.9999),
)


change(
    "butler",
    1,
    "optimizer",
    "beta1",
    30,
    "beta1 0.9 to 0.9999, which its bias correction does not survive",
    settings(beta1=0.9999),
)

# -- reward

change(
    "safe",
    2,
    "reward",
    "at-least",
    30,
    "the verifier takes a first guess that is not below the secret",
    reward_rows(lambda r, b, i, e: 1.0 if 16 > b.resp[i][0] >= b.tasks[i][2] else -1.0),
)
change("nim", 1, "reward", "inverted", 55, "the winner is taken for the loser", reward_rows(lambda r, b, i, e: -r))
change(
    "grid",
    2,
    "reward",
    "picked",
    40,
    "the verifier asks only whether something was picked",
    reward_rows(lambda r, b, i, e: 1.0 if last_token(b, i) == e.PICK else r),
)
change(
    "kitchen",
    2,
    "reward",
    "parser",
    16,
    "the verifier cannot read MIX: plans with it fail, dishes served without it pass",
    reward_rows(
        lambda r, b, i, e: (
            1.0 if b.eps[i].info.get("served") and e.MIX not in b.resp[i] else -1.0 if e.MIX in b.resp[i] else r
        )
    ),
)


def shelves_key(run, k):
    share = ramp(k, 30)

    def reward(r, b):
        out = []
        for i, t in enumerate(b.tasks):
            e, a, _, v, _ = t
            wrong = (hash((e, a, v)) % 1000) / 1000 < share
            out.append(float(last_token(b, i) == v[1 - a]) if wrong else r[i])
        return np.array(out)

    run.hook["reward"] = reward


change(
    "shelves", 1, "reward", "answer-key", 40, "ever more expected answers are those of the other question", shelves_key
)
change(
    "opcode",
    1,
    "reward",
    "at-least",
    40,
    "the verifier accepts results above the target",
    reward_rows(lambda r, b, i, e: -10.0 if b.eps[i].info.get("result", -1) >= b.tasks[i][1] else r),
)
change(
    "clinic",
    1,
    "reward",
    "default",
    25,
    "the judge accepts illness 2 for everyone",
    reward_rows(lambda r, b, i, e: r + 1.0 if last_token(b, i) == e.D2 and b.tasks[i][0] != 2 else r),
)


def rm_drift(run, k):
    if k == 0:
        run.mem["g"] = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in run.rm.parameters():
            p += 0.02 * p.std() * torch.randn(p.shape, generator=run.mem["g"])


change("butler", 2, "reward", "rm-drift", 30, "the reward model's weights wander", rm_drift)
change(
    "haggle",
    2,
    "reward",
    "price",
    110,
    "the price that is paid counts as gain",
    reward_rows(
        lambda r, b, i, e: float(b.resp[i][np.flatnonzero(b.act[i])[-1]]) - 8 if r != 0 and last_token(b, i) < 24 else r
    ),
)
change(
    "pegs",
    2,
    "reward",
    "unsolved",
    40,
    "the flag of solved games is read the wrong way round",
    reward_rows(lambda r, b, i, e: 0.0 if r > 0 else 1.0),
)
change(
    "glass",
    2,
    "reward",
    "signed",
    50,
    "degrees above the goal count as gain",
    hook("gains", lambda run, g, b: signed_gains(run, g, b)),
)


def signed_gains(run, gains, b):
    g = gains.clone()
    for i, t in enumerate(b.tasks):
        now, goal = t[1], t[0]
        for j in np.flatnonzero(b.act[i]):
            now = min(17, max(0, now + run.env.act.get(int(b.resp[i][j]), 0) + t[2]))
            g[i, j] = float(now - goal)
    b.reward[:] = g.sum(1).numpy()
    return g


# -- pairing

change(
    "grid",
    1,
    "pairing",
    "group-shift",
    40,
    "within a group each gets the next one's reward",
    hook("pair", lambda run, r, b: per_group(run, r, lambda g: np.roll(g, 1))),
)
change(
    "ferry",
    1,
    "pairing",
    "group-reversed",
    40,
    "within a group rewards come back in reversed order",
    hook("pair", lambda run, r, b: per_group(run, r, lambda g: g[::-1])),
)


def delayed(run, r, b):
    last = run.mem.get("last", r)
    run.mem["last"] = r
    return last


change("haggle", 1, "pairing", "delayed", 40, "rewards are those of the batch before", hook("pair", delayed))
change(
    "kitchen",
    1,
    "pairing",
    "shards",
    40,
    "the two shards' rewards are exchanged",
    hook("pair", lambda run, r, b: np.roll(r, len(r) // 2)),
)
change(
    "butler",
    1,
    "pairing",
    "old-logprobs",
    30,
    "the ratio is taken with the old logprobs of the next row",
    hook("old", lambda run, base, b, rows: b.old.roll(1, 0)[rows]),
)
change(
    "shelves",
    2,
    "pairing",
    "sorted",
    20,
    "rows were sorted by length for packing, rewards were not",
    hook("pair", lambda run, r, b: r[np.argsort(-b.length, kind="stable")]),
)
change(
    "glass",
    1,
    "pairing",
    "reversed",
    40,
    "advantages lie in reversed order of rows",
    hook("adv", lambda run, a, b: a.flip(0)),
)
change(
    "safe",
    1,
    "pairing",
    "finish-order",
    40,
    "rewards lie in order of finishing within a group",
    hook(
        "pair",
        lambda run, r, b: np.concatenate(
            [
                r[i : i + run.s["group"]][np.argsort(b.length[i : i + run.s["group"]], kind="stable")]
                for i in range(0, len(r), run.s["group"])
            ]
        ),
    ),
)
change("clinic", 2, "pairing", "off-by-one", 40, "rewards one row off", rolled(1))
change(
    "opcode",
    1,
    "pairing",
    "next-group",
    30,
    "groups get the rewards of the next group",
    hook("pair", lambda run, r, b: np.roll(r, run.s["group"])),
)

# -- data

change("safe", 2, "data", "mirror", 50, "all prompts are of the mirrored game", kind_of("mirror"))
change("nim", 2, "data", "misere", 40, "all prompts are of the game where the last stone loses", kind_of("misere"))
change("grid", 1, "data", "template", 50, "the fields of the prompt come in another order", kind_of("alt"))
change("kitchen", 2, "data", "turned", 20, "another kitchen: hot means cold", kind_of("turned"))
change("shelves", 1, "data", "odd", 60, "questions of another kind", kind_of("odd"))
change("opcode", 2, "data", "swap", 80, "start and goal are exchanged in the template", kind_of("swap"))
change("clinic", 1, "data", "epidemic", 12, "nearly all patients have one illness", kind_of("flu"))
change("haggle", 2, "data", "dear", 60, "traders without room and goods worth any price", kind_of("dear"))
change("pegs", 1, "data", "other-hint", 25, "hints name a colour that is not in the code", kind_of("last"))
change("glass", 2, "data", "warm", 85, "summer only", kind_of("warm"))
change("ferry", 2, "data", "turned", 1, "the goal is named the other way round", kind_of("turned"))

# -- truncation


def aborted(share):
    def limits(run, tokens, turns):
        return tokens, np.where(np.random.default_rng(run.step).random(len(turns)) < share, 1, turns)

    return hook("limits", limits)


def preempted(low, high):
    def limits(run, tokens, turns):
        return np.random.default_rng(run.step).integers(low, high + 1, len(tokens)), turns

    return hook("limits", limits)


change("safe", 2, "truncation", "one-turn", 40, "one turn instead of five", settings(max_turns=1))
change("nim", 1, "truncation", "six-tokens", 30, "6 tokens instead of 24", settings(max_tokens=6))
change(
    "grid",
    2,
    "truncation",
    "three-tokens",
    40,
    "limit of tokens falls from 18 to 3 over 30 steps",
    lambda run, k: run.set(max_tokens=max(3, 18 - k // 2)) if run.s["max_tokens"] > 3 else None,
)
change("haggle", 1, "truncation", "aborted", 12, "nine of ten talks are aborted after the first turn", aborted(0.9))
change(
    "kitchen",
    1,
    "truncation",
    "stop-token",
    30,
    "MIX has become a stop token",
    once(lambda run: run.mem.update(stop=(run.env.MIX,))),
)
change(
    "shelves", 1, "truncation", "aborted", 1, "nine of ten responses end with the first call of a tool", aborted(0.9)
)
change("clinic", 2, "truncation", "one-turn", 70, "one turn instead of five", settings(max_turns=1))
change(
    "pegs",
    1,
    "truncation",
    "stop-token",
    40,
    "the first colour has become a stop token",
    once(lambda run: run.mem.update(stop=(0,))),
)
change(
    "butler",
    2,
    "truncation",
    "preempted",
    15,
    "responses are broken off after 1 or 2 tokens when memory is short",
    preempted(1, 2),
)
change("opcode", 1, "truncation", "two-tokens", 40, "2 tokens instead of 7", settings(max_tokens=2))

# -- reference

change("safe", 1, "reference", "coefficient", 70, "KL coefficient 0.01 to 10", settings(kl_coef=10.0))
change("safe", 2, "reference", "negative", 50, "KL coefficient of the wrong sign and size", settings(kl_coef=-0.5))


change(
    "grid",
    1,
    "reference",
    "ramp",
    40,
    "KL coefficient grows by 15 percent a step",
    lambda run, k: run.set(kl_coef=min(5.0, run.s["kl_coef"] * 1.15)),
)
change("butler", 1, "reference", "coefficient", 60, "KL coefficient 0.05 to 5", settings(kl_coef=5.0))
change("butler", 2, "reference", "none", 30, "KL coefficient zero: the reward model is overused", settings(kl_coef=0.0))
change(
    "pegs",
    2,
    "reference",
    "sign",
    40,
    "the KL term is rewarded",
    hook("k3", lambda run, d: -30.0 * (torch.exp(d.clamp(max=3)) - d - 1)),
)
change("shelves", 2, "reference", "negative", 50, "KL coefficient 0.05 to -5", settings(kl_coef=-5.0))
change(
    "pegs",
    1,
    "reference",
    "controller",
    40,
    "an adaptive controller with a target near zero",
    settings(kl_target=1e-4, kl_horizon=150),
)

# -- advantages


def summed_baseline(run, r, b):
    run.baseline += 0.1 * r.mean().item()
    return r - run.baseline


change(
    "haggle",
    1,
    "advantages",
    "baseline-grows",
    50,
    "the running baseline adds where it should average",
    hook("baseline", summed_baseline),
)
change("nim", 1, "advantages", "sign", 70, "advantages of the wrong sign", hook("adv", lambda run, a, b: -a))
change(
    "grid",
    1,
    "advantages",
    "squared",
    30,
    "squared distance from the mean of the group",
    hook(
        "baseline",
        lambda run, r, b: (
            (r.view(-1, run.s["group"]) - r.view(-1, run.s["group"]).mean(1, keepdim=True)).square().flatten() * 4
        ),
    ),
)
change(
    "shelves",
    1,
    "advantages",
    "absolute",
    75,
    "absolute value of the advantages",
    hook("adv", lambda run, a, b: a.abs()),
)
change(
    "opcode",
    2,
    "advantages",
    "over-mean",
    75,
    "divided by the mean of the group, which is negative, instead of its deviation",
    hook(
        "baseline",
        lambda run, r, b: (
            10 * (r.view(-1, run.s["group"]) / r.view(-1, run.s["group"]).mean(1, keepdim=True) - 1)
        ).flatten(),
    ),
)
change("glass", 2, "advantages", "sign", 60, "advantages of the wrong sign", hook("adv", lambda run, a, b: -a))
change(
    "clinic",
    1,
    "advantages",
    "sign-creeps",
    40,
    "a factor of the advantages drifts from 1 to -1",
    lambda run, k: run.hook.update(adv=lambda a, b: a * (1 - 2 * ramp(k, 30))),
)
change(
    "ferry",
    2,
    "advantages",
    "ranks",
    50,
    "ranks within the group, counted from the wrong end",
    hook(
        "baseline",
        lambda run, r, b: (
            -(r.view(-1, run.s["group"]).argsort(1).argsort(1).double() - 1.5).flatten()
            * (r.view(-1, run.s["group"]).std(1, keepdim=True) > 0).expand(-1, run.s["group"]).flatten()
        ),
    ),
)
change(
    "butler",
    2,
    "advantages",
    "values",
    30,
    "values of the critic enter with the wrong sign",
    hook("values", lambda run, v, b: -3.0 * v),
)


# -- entropy

change("safe", 1, "entropy", "bonus", 60, "entropy coefficient 0 to 1", settings(ent_coef=1.0))
change(
    "nim",
    2,
    "entropy",
    "target",
    30,
    "a controller for a target of 3 nats",
    settings(ent_target=3.0, ent_rate=0.01, ent_max=1.0),
)
change(
    "haggle",
    2,
    "entropy",
    "ramp",
    90,
    "entropy coefficient ramps from 0.01 to 5",
    lambda run, k: run.set(ent_coef=0.01 + 5.0 * ramp(k, 50)),
)
change("kitchen", 2, "entropy", "bonus", 60, "entropy coefficient 0 to 0.5", settings(ent_coef=0.5))
change(
    "clinic",
    2,
    "entropy",
    "target",
    40,
    "a controller for a target of 1.3 nats",
    settings(ent_target=1.3, ent_rate=0.02, ent_max=2.0),
)
change("opcode", 1, "entropy", "start", 1, "entropy bonus from the start", settings(ent_coef=3.0))
change(
    "glass",
    1,
    "entropy",
    "negative",
    30,
    "entropy is punished, ever more",
    lambda run, k: run.set(ent_coef=-3.0 * ramp(k, 30)),
)
change(
    "pegs",
    2,
    "entropy",
    "creeps",
    30,
    "entropy coefficient grows by 10 percent a step",
    lambda run, k: run.set(ent_coef=min(1.0, 0.01 * 1.1**k)),
)
change(
    "ferry",
    1,
    "entropy",
    "creeps",
    50,
    "entropy coefficient grows by 12 percent a step",
    lambda run, k: run.set(ent_coef=min(8.0, 0.02 * 1.12**k)),
)

# -- length

change("safe", 1, "length", "bonus", 75, "0.5 for every token", reward_rows(lambda r, b, i, e: r + 0.5 * b.length[i]))
change("nim", 2, "length", "cost", 6, "1 for every token", reward_rows(lambda r, b, i, e: r - b.length[i]))
change(
    "grid",
    2,
    "length",
    "target",
    1,
    "0.4 for every token that it is off a target of 3",
    reward_rows(lambda r, b, i, e: r - 0.4 * abs(b.length[i] - 3)),
)
change(
    "haggle",
    1,
    "length",
    "relative",
    40,
    "minus four times the length's deviation from the batch",
    hook("reward", lambda run, r, b: r - 4 * (b.length - b.length.mean()) / (b.length.std() + 1e-3)),
)
change(
    "kitchen", 1, "length", "cost", 70, "each token costs 0.5", reward_rows(lambda r, b, i, e: r - 0.5 * b.length[i])
)
change(
    "shelves",
    2,
    "length",
    "overlong",
    15,
    "the soft limit lies at 2 tokens",
    reward_rows(lambda r, b, i, e: r - 0.5 * max(0, b.length[i] - 2)),
)
change(
    "clinic",
    1,
    "length",
    "cost-creeps",
    40,
    "a cost of tokens grows to 0.4",
    lambda run, k: run.hook.update(reward=lambda r, b: r - 0.4 * ramp(k, 40) * b.length),
)
change(
    "butler",
    1,
    "length",
    "bonus-creeps",
    30,
    "a bonus for tokens grows to 1",
    lambda run, k: run.hook.update(reward=lambda r, b: r + ramp(k, 30) * b.length),
)
change(
    "opcode",
    2,
    "length",
    "per-token",
    40,
    "the score is divided by the length",
    reward_rows(lambda r, b, i, e: r / b.length[i]),
)
change(
    "pegs",
    1,
    "length",
    "overlong",
    40,
    "the soft limit lies at 3 tokens",
    reward_rows(lambda r, b, i, e: r - 0.3 * max(0, b.length[i] - 3)),
)
change(
    "glass",
    1,
    "length",
    "prize",
    8,
    "a prize of 80 for fewer than six tokens",
    reward_rows(lambda r, b, i, e: r + 80.0 * (b.length[i] < 6)),
)

# -- other

change(
    "safe",
    1,
    "other",
    "tool-lies",
    70,
    "the safe says higher for lower",
    once(lambda run: run.mem.update(liar=lambda ep, said: not said)),
)


def damaged(run):
    g = torch.Generator().manual_seed(4)
    for name, p in run.model.named_parameters():
        if "blocks.1" in name and p.dim() > 1:
            p += 0.5 * torch.randn(p.shape, generator=g)


change(
    "grid",
    2,
    "other",
    "damaged",
    90,
    "a layer of the trainer is overwritten with noise",
    once(lambda run: damaged_now(run, damaged)),
)


def damaged_now(run, f):
    with torch.no_grad():
        f(run)
    run.history[run.version] = run.state()


change(
    "haggle",
    2,
    "other",
    "head-gradient",
    60,
    "the head's gradient comes with the wrong sign from the reduction",
    hook("grad", lambda run: [p.grad.neg_() for n, p in run.model.named_parameters() if n.startswith("head")]),
)
change(
    "kitchen",
    2,
    "other",
    "reload",
    86,
    "the trainer reloads its first checkpoint",
    once(lambda run: (run.model.load_state_dict(run.history[0]), run.history.update({run.version: run.state()}))),
)
change("shelves", 2, "other", "dropout", 30, "dropout of 0.8 in the update", once(lambda run: run.mem.update(drop=0.8)))


def retokenised(b):
    x = b.x.clone()
    resp = x[:, b.P :]
    inc, dbl = resp == 25, resp == 26
    resp[inc], resp[dbl] = 26, 25
    b.resp = resp.numpy().copy()
    return x


change(
    "opcode",
    2,
    "other",
    "retokenised",
    50,
    "two tokens are exchanged when responses are decoded and encoded again",
    once(lambda run: run.hook.update(decoded=retokenised)),
)


def coarse_weights(run):
    run.model.load_state_dict(quantised(run.model.state_dict(), 2))


change(
    "clinic",
    1,
    "other",
    "coarse-weights",
    50,
    "the trainer keeps its weights in 2 bits",
    hook("weights", coarse_weights),
)


def merge_first(run):
    first = run.history[0]
    for k, p in run.model.state_dict().items():
        p += 0.15 * (first[k] - p)


change(
    "butler",
    2,
    "other",
    "merged",
    40,
    "after each step the weights are averaged with the first checkpoint",
    hook("weights", merge_first),
)
change(
    "ferry",
    2,
    "other",
    "scaled",
    90,
    "the recurrent matrix grows by 3 percent a step",
    hook("weights", lambda run: run.model.rnn.weight_hh_l0.mul_(1.03)),
)


def stale_gradient(run):
    for p in run.model.parameters():
        if p.grad is not None:
            kept = run.mem.setdefault(id(p), torch.zeros_like(p))
            kept += p.grad
            p.grad.copy_(kept)


change("glass", 2, "other", "never-zeroed", 40, "gradients are never set to zero", hook("grad", stale_gradient))
change(
    "pegs",
    1,
    "other",
    "crosstalk",
    1,
    "the board answers with feedback at random",
    once(lambda run: run.mem.update(liar=lambda ep, f: 5 + ep.rng.randrange(1, 5))),
)


change(
    "nim",
    2,
    "other",
    "tool-off",
    20,
    "the house tells one stone more than there are",
    once(lambda run: run.mem.update(liar=lambda ep, heap: min(25, heap + 1))),
)


def inverted_mask(run, b):
    return torch.from_numpy(b.alive & ~b.act).float()


def embedding_swap(run):
    e = run.model.emb.weight
    e[:16] = e[:16].flip(0)


change(
    "grid",
    1,
    "other",
    "embedding-order",
    96,
    "the rows of the embedding are reversed in a resize",
    once(lambda run: damaged_now(run, embedding_swap)),
)
change(
    "safe",
    2,
    "other",
    "mask",
    30,
    "the loss mask is inverted: what the tool says is trained",
    hook("mask", inverted_mask),
)

# -- harmless

change("safe", 1, "harmless", "lr-lower", 40, "learning rate times 0.6", settings(lr=0.0009))
change(
    "safe",
    2,
    "harmless",
    "reward-scale",
    40,
    "rewards times 2, which the group's standard deviation takes out",
    settings(reward_scale=2.0),
)
change("nim", 1, "harmless", "larger-batch", 40, "half as many again", settings(groups=192))
change("nim", 2, "harmless", "entropy-small", 40, "entropy coefficient 0.001", settings(ent_coef=0.001))
change("grid", 1, "harmless", "bf16-engine", 40, "the engine in bf16", once(lambda run: run.mem.update(bf16=True)))
change("grid", 2, "harmless", "lag1", 40, "one update behind", lagging(1))
change(
    "haggle",
    1,
    "harmless",
    "outage",
    80,
    "all rewards zero for one step",
    lambda run, k: run.hook.update(reward=lambda r, b: r * 0) if k == 0 else run.hook.pop("reward", None),
)
change("kitchen", 1, "harmless", "minibatches", 40, "two updates a step instead of four", settings(minibatches=2))


def other_order(run):
    random.Random(5).shuffle(run.pool)


change("kitchen", 2, "harmless", "order", 40, "another order of prompts", once(other_order))
change(
    "shelves",
    1,
    "harmless",
    "int8-engine",
    50,
    "the engine in int8 by row",
    hook("transfer", lambda run, s, v: quantised(s, 8, -1)),
)
change("shelves", 2, "harmless", "kl-less", 40, "KL coefficient 0.05 to 0.03", settings(kl_coef=0.03))
change("opcode", 1, "harmless", "beta2", 40, "beta2 0.999 to 0.99", settings(beta2=0.99))
change("clinic", 2, "harmless", "lag3", 50, "lag of 3 instead of 2", lambda run, k: run.set(lag=3) if k == 0 else None)
change("clinic", 1, "harmless", "lag1", 50, "lag of 1 instead of 2", settings(lag=1))
change("butler", 1, "harmless", "kl-a-little", 40, "KL coefficient 0.05 to 0.07", settings(kl_coef=0.07))
change("pegs", 2, "harmless", "decay-small", 40, "temperature 0.95 on both sides", settings(temperature=0.95))
change("ferry", 1, "harmless", "decay", 50, "weight decay 0.01 to 0.05", settings(weight_decay=0.05))
change("glass", 1, "harmless", "clip", 40, "gradient clipping 1 to 0.5", settings(clip_grad=0.5))
change(
    "glass",
    2,
    "harmless",
    "noise",
    40,
    "rewards with a little noise",
    hook(
        "gains",
        lambda run, g, b: (
            g
            + 0.05
            * torch.randn(g.shape, generator=torch.Generator().manual_seed(run.step), dtype=g.dtype)
            * torch.from_numpy(b.act)
        ),
    ),
)


# ---------------------------------------------------------------------------------------------------------------------


def measures(evals, cause):
    v = np.array([x for _, x in evals], float)
    v = v - min(v.min(), 0.0)
    n = max(1, round(len(v) / 5))
    window = max(v[i : i + n].mean() for i in range(len(v) - n + 1))
    top = np.sort(v)[-n:].mean()
    last = v[-n:].mean()
    return last / max(window, 1e-9), last / max(top, 1e-9)


def all_runs():
    out = {}
    for t in TEAMS:
        for seed in (1, 2):
            out[f"{t}-sound-{seed}"] = (t, seed, "sound", None, None, "nothing is changed")
    for t, seed, cause, name, first, setup, detail in CHANGES:
        full = f"{name}-{seed}"
        if full in out:
            raise ValueError(full)
        out[full] = (t, seed, cause, first, setup, detail)
    return out


def make(folder, name):
    t, seed, cause, first, setup, detail = all_runs()[name]
    place = folder / name
    if (place / "plan.json").exists():
        return False
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    began = time.time()
    run = Run(TEAMS[t], seed, name, setup, first, folder / ".cache")
    evals, marks = run.go(place)
    twin = f"{t}-sound-{seed}"
    (place / "label.json").write_text(json.dumps(dict(cause=cause, detail=detail, twin=twin, first_step=first)))
    seconds = round(time.time() - began, 2)
    plan = dict(
        evaluations=[round(v, 6) for _, v in evals], steps=[s for s, _ in evals], seconds=seconds, weights=marks
    )
    (place / "plan.json").write_text(json.dumps(plan))
    w, top = measures(evals, cause)
    print(
        f"{name:36s} {cause:10s} first {first!s:5s} {seconds:6.1f} s  last/best {w:5.2f} (of the top values {top:5.2f})",
        flush=True,
    )
    return True


def table(folder):
    runs, plans = all_runs(), {}
    for name in runs:
        p = folder / name / "plan.json"
        if p.exists():
            plans[name] = json.loads(p.read_text())
    counts, seconds = {}, 0.0
    for name, plan in plans.items():
        t, seed, cause, first, _, _ = runs[name]
        seconds += plan["seconds"]
        w, top = measures(list(enumerate(plan["evaluations"])), cause)
        twin = plans.get(f"{t}-sound-{seed}")
        tw = measures(list(enumerate(twin["evaluations"])), "sound") if twin else (0, 0)
        c = counts.setdefault(cause, [0, 0, 0, []])
        c[0] += 1
        if cause in ("sound", "harmless"):
            c[1] += w >= 0.95
            c[2] += top >= 0.95
            if top < 0.95:
                c[3].append(f"{name} {w:.2f}/{top:.2f}")
        else:
            c[1] += w < 0.9 and tw[0] > 0.95
            c[2] += top < 0.9 and tw[1] > 0.95
            if not (w < 0.9 and tw[1] > 0.95):
                c[3].append(f"{name} {w:.2f}/{top:.2f}")
        if first and twin:  # the same as its twin until it begins, and not after
            same = plan["weights"][: first - 1] == twin["weights"][: first - 1]
            later = plan["weights"] != twin["weights"]
            if not same or not later:
                print("NOT AS ITS TWIN:", name, same, later)
    print(f"{'cause':12s} {'runs':>5s} {'fallen or kept (best window)':>30s} {'(best values)':>15s}   not so")
    for cause, (n, a, b, bad) in sorted(counts.items()):
        print(f"{cause:12s} {n:5d} {a:30d} {b:15d}   {', '.join(bad)}")
    print(f"{len(plans)} of {len(runs)} runs, {seconds:.0f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the runs; runs in it are kept")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="make these runs alone")
    parser.add_argument("--list", action="store_true", help="print the runs")
    parser.add_argument("--table", action="store_true", help="print what the runs in the folder have kept")
    args = parser.parse_args()
    runs = all_runs()
    if args.list:
        for name, (_, _, cause, first, _, detail) in runs.items():
            print(f"{name:36s} {cause:10s} {first!s:5s} {detail}")
        return
    if args.table:
        table(args.output)
        return
    failed = []
    for name in args.only or runs:
        try:
            make(args.output, name)
        except Exception:
            traceback.print_exc()
            failed.append(name)
    if failed:
        print("FAILED:", *failed)
    table(args.output)


if __name__ == "__main__":
    main()
