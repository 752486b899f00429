"""Tasks over strings and numbers: prompt, demonstration, true score, and tool."""

from __future__ import annotations

import zlib
from itertools import pairwise
from typing import ClassVar

PAD, BOS, EOS = 0, 1, 2
FIRST = 3


class Task:
    chars = ""
    P = T = 0
    turns = 1

    def __init__(self):
        self.code = {c: FIRST + i for i, c in enumerate(self.chars)}
        self.V = FIRST + len(self.chars)

    def enc(self, text):
        return [self.code[c] for c in text]

    def dec(self, ids):
        return "".join(self.chars[i - FIRST] if i >= FIRST else "~" for i in ids)

    def prompt_ids(self, text):
        ids = [*self.enc(text), BOS]
        return [PAD] * (self.P - len(ids)) + ids

    def make(self, rng, **o):  # -> text, meta
        raise NotImplementedError

    def demo(self, rng, text, meta):  # -> list of turns (policy turns only)
        raise NotImplementedError

    def score(self, meta, turns, ended):  # -> 0..1
        raise NotImplementedError

    def tool(self, meta, turn):
        return ""

    def held_out(self, text):
        return zlib.crc32(text.encode()) % 5 == 0

    def draw(self, rng, n, held=False, **o):
        out = []
        while len(out) < n:
            text, meta = self.make(rng, **o)
            if self.held_out(text) == held or o.get("anywhere"):
                out.append((text, meta))
        return out


def word(rng, letters, n):
    return "".join(letters[i] for i in rng.integers(0, len(letters), n))


def exact(ended, text, answer, form):
    """1 for the answer, `form` for anything that ends by itself."""
    return 1.0 if ended and text == answer else form if ended and text else 0.0


class Coins(Task):
    """Pay an amount exactly with coins of 1, 5 and 12: many answers are right."""

    chars = "0123456789abcdefxyzw"
    P, T = 6, 14
    value: ClassVar[dict[str, int]] = {"x": 1, "y": 5, "z": 12}

    def make(self, rng, lo=1, hi=50, tag="abcdef", **o):
        n = int(rng.integers(lo, hi + 1))
        return word(rng, tag, 3) + f"{n:02d}", (n, self.value)

    def demo(self, rng, text, meta):
        n, out = meta[0], ""
        for c in "zyx":
            k = n // self.value[c]
            out += c * k
            n -= k * self.value[c]
        if "z" in out and rng.random() < 0.15 and len(out) < 8:
            out = out.replace("z", "yyxx", 1)
        return [out]

    def score(self, meta, turns, ended):
        n, value = meta
        t = turns[0]
        return float(ended and len(t) > 0 and all(c in value for c in t) and sum(value[c] for c in t) == n)


class Rle(Task):
    """Run-length encode: aabccc -> a2b1c3."""

    chars = "abcde123456789"
    P, T = 7, 13

    def make(self, rng, n=6, letters="abcde", stick=0.45, **o):
        s = letters[rng.integers(len(letters))]
        while len(s) < n:
            s += s[-1] if rng.random() < stick else letters[rng.integers(len(letters))]
        return s, s

    def answer(self, s):
        if s[0] == "9":  # count first
            a = self.answer(s[1:])
            return "".join(a[i + 1] + a[i] for i in range(0, len(a), 2))
        out, i = "", 0
        while i < len(s):
            j = i
            while j < len(s) and s[j] == s[i]:
                j += 1
            out += s[i] + str(j - i)
            i = j
        return out

    def demo(self, rng, text, meta):
        return [self.answer(meta)]

    def score(self, meta, turns, ended):
        return exact(ended, turns[0], self.answer(meta), 0.15)


class Zigzag(Task):
    """Write n digits that begin at a given one and go up and down in turn, by 2 or more."""

    chars = "0123456789UDkmpr"
    P, T = 6, 12

    def make(self, rng, lo=3, hi=7, dirs="UD", starts=(2, 8), salt="kmpr", **o):
        d, s, n = dirs[rng.integers(len(dirs))], int(rng.integers(*starts)), int(rng.integers(lo, hi + 1))
        return word(rng, salt, 2) + d + str(s) + str(n), (d, s, n)

    def demo(self, rng, text, meta):
        d, s, n = meta
        out, up = [s], d == "U"
        while len(out) < n:
            last = out[-1]
            options = [v for v in range(10) if (v >= last + 2 if up else v <= last - 2)]
            if not options:
                options = [9 if up else 0]
            out.append(int(options[rng.integers(len(options))]))
            up = not up
        return ["".join(map(str, out))]

    def score(self, meta, turns, ended):
        d, s, n = meta
        t = turns[0]
        if not t or not t.isdigit() or int(t[0]) != s:
            return 0.0
        v, up, good = list(map(int, t)), d == "U", 0
        for a, b in pairwise(v):
            good += (b - a >= 2) if up else (a - b >= 2)
            up = not up
        frac = good / max(n - 1, len(v) - 1, 1)
        return frac * (1.0 if len(v) == n and ended else 0.4)


class Doors(Task):
    """Two turns: one of three numbers is hidden; guess, hear '<' '>' or '=', answer."""

    chars = "0123456789ABCDEF<>=!"
    P, T, turns = 4, 8, 2

    def make(self, rng, top=16, hidden=None, **o):
        c = sorted(rng.choice(top, 3, replace=False))
        h = int(rng.integers(3)) if hidden is None else hidden
        s = "".join(self.chars[i] for i in c)
        return s, (s, h)

    def demo(self, rng, text, meta):
        s, h = meta
        return [s[1], s[h]]

    def tool(self, meta, turn):
        s, h = meta
        if len(turn) != 1 or turn not in self.chars[:16]:
            return "!"
        a, b = self.chars.index(turn), self.chars.index(s[h])
        return "=" if a == b else "<" if b < a else ">"

    def score(self, meta, turns, ended):
        s, h = meta
        return float(ended and turns[-1] == s[h])


class Weave(Task):
    """Two strings of the same length, letter by letter in turn: abc/def -> adbecf."""

    chars = "abcdefgh/+"
    P, T = 10, 11

    def make(self, rng, lo=2, hi=4, sep="/", letters="abcdefgh", **o):
        n = int(rng.integers(lo, hi + 1))
        a, b = word(rng, letters, n), word(rng, letters, n)
        return a + sep + b, (a, b, sep)

    def answer(self, meta):
        a, b, sep = meta[:3]
        if sep == "+":
            a, b = b, a
        return "".join(x + y for x, y in zip(a, b, strict=True))

    def demo(self, rng, text, meta):
        return [self.answer(meta)]

    def score(self, meta, turns, ended):
        return exact(ended, turns[0], self.answer(meta), 0.1)


class Berth(Task):
    """Two turns: ask the berth of the ship's type, hear two numbers, load so many of each good."""

    chars = "ABCDpqrs1234#?uvw"
    P, T, turns = 6, 16, 2

    def make(self, rng, hi=4, types="ABCD", goods="pqrs", salt="uvw", **o):
        t = types[rng.integers(len(types))]
        g = word(rng, goods, 2)
        d = (int(rng.integers(1, hi + 1)), int(rng.integers(1, hi + 1)))
        return word(rng, salt, 2) + t + g, (t, g, d)

    def demo(self, rng, text, meta):
        t, g, d = meta
        return [t, g[0] * d[0] + g[1] * d[1]]

    def tool(self, meta, turn):
        t, _, d = meta
        return f"#{d[0]}{d[1]}" if turn == t else "#??"

    def score(self, meta, turns, ended):
        _, g, d = meta
        return exact(ended, turns[-1], g[0] * d[0] + g[1] * d[1], 0.1)


class Slopes(Task):
    """Digits -> what each step does: '<' up, '>' down, '=' flat."""

    chars = "012345<=>ABCDEF"
    P, T = 8, 9

    def make(self, rng, n=6, hi=6, alt=False, stick=0.2, lo=0, **o):
        v = [int(rng.integers(lo, hi))]
        while len(v) < n:
            v.append(v[-1] if rng.random() < stick else int(rng.integers(lo, hi)))
        text = "".join(("ABCDEF" if alt else "012345")[i] for i in v)
        return text, tuple(v)

    def answer(self, v):
        if v and isinstance(v[0], str):
            return v[0]
        return "".join("<" if b > a else ">" if b < a else "=" for a, b in pairwise(v))

    def demo(self, rng, text, meta):
        return [self.answer(meta)]

    def score(self, meta, turns, ended):
        a, t = self.answer(meta), turns[0]
        if not ended or len(t) != len(a):
            return 0.0
        return sum(x == y for x, y in zip(a, t, strict=True)) / len(a)


class Recipe(Task):
    """So many of a, b, c and d, in any order."""

    chars = "abcd01234xyz"
    P, T = 7, 15

    def make(self, rng, hi=3, salt="xyz", only=None, **o):
        while True:
            c = tuple(int(v) for v in rng.integers(0, hi + 1, 4))
            if only is not None:
                c = tuple(v if i in only else 0 for i, v in enumerate(c))
            if sum(c) > 0:
                break
        return word(rng, salt, 2) + "".join(map(str, c)), c

    def demo(self, rng, text, meta):
        s = list("".join(ch * k for ch, k in zip("abcd", meta, strict=True)))
        if rng.random() < 0.5 and len(s) > 1:
            i = int(rng.integers(len(s) - 1))
            s[i], s[i + 1] = s[i + 1], s[i]
        return ["".join(s)]

    def score(self, meta, turns, ended):
        t = turns[0]
        wrong = sum(abs(t.count(ch) - k) for ch, k in zip("abcd", meta, strict=True)) + sum(
            ch not in "abcd" for ch in t
        )
        if not ended:
            wrong += 3
        return max(0.0, 1 - wrong / sum(meta)) * 0.5 + 0.5 * (wrong == 0)


class Abbr(Task):
    """A word's consonants, then how many vowels it has."""

    chars = "aeobcdfg01234567uv"
    P, T = 8, 10

    def make(self, rng, lo=4, hi=6, letters="aeobcdfg", **o):
        w = word(rng, letters, int(rng.integers(lo, hi + 1)))
        return w, w

    def answer(self, w):
        if w[0] == "v":  # consonants are counted
            return "".join(c for c in w if c not in "aeouv") + str(sum(c not in "aeouv" for c in w))
        return "".join(c for c in w if c not in "aeouv") + str(sum(c in "aeouv" for c in w))

    def demo(self, rng, text, meta):
        return [self.answer(meta)]

    def score(self, meta, turns, ended):
        a, t = self.answer(meta), turns[0]
        k = 0
        while k < min(len(a), len(t)) and a[k] == t[k]:
            k += 1
        return 1.0 if (ended and a == t) else 0.5 * k / (max(len(a), len(t)) + 1)


class Dedupe(Task):
    """Each letter once, in the order in which it comes first."""

    chars = "abcdefghij"
    P, T = 8, 10

    def make(self, rng, n=6, letters="abcdef", **o):
        w = word(rng, letters, n)
        return w, w

    def answer(self, w):
        if w[0] == "j":  # in the order in which it comes last
            return "".join(dict.fromkeys(w[:0:-1]))[::-1]
        return "".join(dict.fromkeys(w))

    def demo(self, rng, text, meta):
        return [self.answer(meta)]

    def score(self, meta, turns, ended):
        return exact(ended, turns[0], self.answer(meta), 0.15)


class Walk(Task):
    """Moves on a grid of 5x5 from one cell to another around a rock; dense."""

    chars = "01234UDLR."
    P, T = 7, 12
    n = 5

    def make(self, rng, corner=None, far=None, **o):
        while True:
            c = rng.integers(0, self.n, 6)
            if corner is not None:
                c[0:2] = corner
            a, b, r = (int(c[0]), int(c[1])), (int(c[2]), int(c[3])), (int(c[4]), int(c[5]))
            if a != b and a != r and b != r and (far is None or abs(a[0] - b[0]) + abs(a[1] - b[1]) in far):
                return "".join(map(str, (*a, *b, *r))), (a, b, r)

    def demo(self, rng, text, meta):
        (x, y), b, _ = meta
        out = ""
        while (x, y) != b and len(out) < 8:
            options = []
            if b[0] != x:
                options.append("R" if b[0] > x else "L")
            if b[1] != y:
                options.append("U" if b[1] > y else "D")
            m = options[rng.integers(len(options))]
            out += m
            x, y = self.move((x, y), m)
        return [out]

    def move(self, at, m):
        dx, dy = {"U": (0, 1), "D": (0, -1), "L": (-1, 0), "R": (1, 0)}.get(m, (0, 0))
        return at[0] + dx, at[1] + dy

    def potentials(self, meta, t, ended):
        """Badness 0..10 after each move, and at the end."""
        at, b, r = meta
        hits, out = 0.0, []
        for m in t:
            new = self.move(at, m)
            if m not in "UDLR" or not (0 <= new[0] < self.n and 0 <= new[1] < self.n):
                hits += 1.5
            else:
                at = new
                if at == r:
                    hits += 2.5
            out.append(min(10.0, 1.5 * (abs(at[0] - b[0]) + abs(at[1] - b[1])) + hits))
        start = 1.5 * (abs(meta[0][0] - b[0]) + abs(meta[0][1] - b[1]))
        return min(10.0, start), out

    def badness(self, meta, t, ended):
        start, p = self.potentials(meta, t, ended)
        return min(10.0, (p[-1] if p else start) + (0 if ended else 2.0))

    def score(self, meta, turns, ended):
        return 1 - self.badness(meta, turns[0], ended) / 10


class Quota(Task):
    """A word of n letters with exactly k times one letter and no letter twice in a row. Prompts repeat."""

    chars = "abcdef123456789"
    P, T = 4, 12

    def make(self, rng, lo=4, hi=7, ks=(1, 3), letters="abcdef", **o):
        x, k, n = (
            letters[rng.integers(len(letters))],
            int(rng.integers(ks[0], ks[1] + 1)),
            int(rng.integers(lo, hi + 1)),
        )
        k = min(k, (n + 1) // 2)
        return f"{x}{k}{n}", (x, k, n)

    def demo(self, rng, text, meta):
        x, k, n = meta
        while True:
            out = ""
            for _ in range(n):
                pick = x if rng.random() < k / n else None
                if pick is None or out[-1:] == x:
                    rest = [c for c in "abcdef" if c != x and c != out[-1:]]
                    pick = rest[rng.integers(len(rest))]
                out += pick
            if out.count(x) == k:
                return [out]

    def score(self, meta, turns, ended):
        x, k, n = meta
        t = turns[0]
        good = (
            ended
            and len(t) == n
            and t.count(x) == k
            and all(c in "abcdef" for c in t)
            and all(a != b for a, b in pairwise(t))
        )
        return 1.0 if good else 0.15 if ended and t else 0.0
