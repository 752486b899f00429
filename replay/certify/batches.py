"""Generate batches that are likely to break batch invariance, and small changes to a batch.

Lengths, row counts and paddings near powers of two and multiples of 16 come first, because kernels, tiles and cache
blocks change there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, zip_longest
from typing import Any

import numpy as np

Sequence_ = tuple[tuple[int, ...], tuple[int, ...]]
"""Prompt and response token ids."""
Layout = tuple[tuple[str, Any], ...]
"""Searched arm options, with their values in this batch. If empty, the arm's own values apply."""

SHORT = 12
"""Maximum length of prompts and responses whose length is not tested."""
_MOST_SHORT = 48
"""Distinct rows whose length is not tested."""
MOST_TOKENS = 8192
"""Maximum tokens in a batch, including padding."""
PADS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128)


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass, or one call of an engine."""

    rows: tuple[Sequence_, ...]
    layout: Layout = ()
    pad_left: int = 0
    """Padding columns before the longest prompt."""
    pad_right: int = 0

    @property
    def before(self) -> int:
        """Columns before the responses."""
        return self.pad_left + max(len(prompt) for prompt, _ in self.rows)

    @property
    def after(self) -> int:
        """Columns from the beginning of the responses."""
        return self.pad_right + max(len(response) for _, response in self.rows)

    @property
    def width(self) -> int:
        return self.before + self.after


@dataclass(slots=True)
class Drawer:
    """Draws token ids. Ids are handed out in turn, so that all of them occur after enough tokens."""

    vocab_size: int
    max_batch: int
    max_length: int
    random: np.random.Generator
    _next: int = 0
    _short: list[Sequence_] = field(default_factory=list)

    def ids(self, num: int, *, in_turn: bool = False) -> tuple[int, ...]:
        if in_turn:
            found = (np.arange(num) + self._next) % self.vocab_size
            self._next += num
        else:
            found = self.random.integers(0, self.vocab_size, num)
        return tuple(found.tolist())

    def row(self, prompt: int | None = None, response: int | None = None) -> Sequence_:
        """Draw a row. Rows whose lengths do not matter repeat, because every new row must also be scored alone."""
        if prompt is None and response is None and len(self._short) == _MOST_SHORT:
            return self._short[int(self.random.integers(0, _MOST_SHORT))]
        short = min(SHORT, self.max_length)
        lengths = [int(self.random.integers(1, short + 1)) if num is None else num for num in (prompt, response)]
        row = self.ids(lengths[0]), self.ids(lengths[1])
        if prompt is None and response is None:
            self._short.append(row)
        return row

    def rows(self, num: int, prompt: int | None = None, response: int | None = None) -> list[Sequence_]:
        return [self.row(prompt, response) for _ in range(num)]

    def length(self) -> int:
        return int(min(self.random.geometric(min(4 / self.max_length, 1.0)), self.max_length))


def special(most: int) -> list[int]:
    """Return 1..most, with neighbours of powers of two and of multiples of 16 first."""
    powers = [1 << n for n in range(most.bit_length())]
    near = [p + d for p in [*powers, *range(16, most + 1, 16)] for d in (0, -1, 1)]
    return list(dict.fromkeys(n for n in [1, 2, 3, *near, most, *range(1, most + 1)] if 1 <= n <= most))


def probes(draw: Drawer) -> Iterator[Batch]:
    """Yield batches in which one property at a time takes every value up to the bounds, the properties in turn."""
    families = [family(draw) for family in (_counts, _lengths, _grid, _pads, _orders, _tokens)]
    for step in zip_longest(*families):
        for rows in step:
            if rows is None:
                continue
            made = rows if isinstance(rows, Batch) else Batch(tuple(rows))
            if len(made.rows) <= draw.max_batch and (len(made.rows) * made.width <= MOST_TOKENS or len(made.rows) == 1):
                yield made


_Family = Iterator[list[Sequence_] | Batch]


def _counts(draw: Drawer) -> _Family:
    for num in special(draw.max_batch):
        yield draw.rows(num)
        yield [(row[0][-1:] * 4, row[1][:1] * 4) for row in draw.rows(num)]


def _lengths(draw: Drawer) -> _Family:
    """Yield rows whose prompt, response or total has each length, along with one short row."""
    for num in special(2 * draw.max_length):
        prompt = min(max(1, num // 2), draw.max_length)
        rows = [draw.row(num), draw.row(None, num)] if num <= draw.max_length else []
        rows += [draw.row(prompt, num - prompt)] if 1 <= num - prompt <= draw.max_length else []
        rows = [*rows, draw.row()][-draw.max_batch :]
        yield [rows[place] for place in draw.random.permutation(len(rows))]


def _grid(draw: Drawer) -> _Family:
    """Yield combinations of row count and width, because kernels that sum over a batch's tokens change with both."""
    counts = [num for num in special(draw.max_batch)[:24] if num > 1]
    for length in special(draw.max_length)[:24]:
        for num in counts:
            if num * 2 * length <= MOST_TOKENS:
                rows = draw.rows(min(num, 2), length, length)
                yield [rows[place % len(rows)] for place in range(num)]


def _pads(draw: Drawer) -> _Family:
    rows = tuple(draw.rows(min(3, draw.max_batch)))
    for num in PADS:
        yield Batch(rows, pad_left=num)
        yield Batch(rows, pad_right=num)
        yield Batch(rows[:1], pad_left=num)
        yield Batch(rows[:1], pad_right=num)


def _orders(draw: Drawer) -> _Family:
    """Yield different orders, duplicates, shared prefixes, and one long row among short ones."""
    for num in [n for n in (2, 3, 4, 7, 8, 16, 31, 64) if n <= draw.max_batch]:
        rows = [draw.row(draw.length(), draw.length()) for _ in range(num)]
        rows.sort(key=lambda row: len(row[0]) + len(row[1]))
        yield rows
        yield rows[::-1]
        yield [rows[0]] * num
        yield [*rows[: num // 2], *rows[: num - num // 2]]
        for shared in (1, 15, 16, 17, 32, 48, 64):
            if shared < draw.max_length:
                prefix = draw.ids(shared)
                yield [(prefix + draw.ids(1 + n % 3), draw.ids(4)) for n in range(num)]
                yield [(prefix, draw.ids(1 + n % 5)) for n in range(num)]
        longest = draw.row(draw.max_length, draw.max_length)
        if num * 2 * draw.max_length <= MOST_TOKENS:
            yield [longest, *draw.rows(num - 1)]
            yield [*draw.rows(num - 1), longest]
            yield [*draw.rows(num // 2), longest, *draw.rows(num - 1 - num // 2)]


def _tokens(draw: Drawer) -> _Family:
    """Yield every token id, in prompts and in responses, and runs of a single id."""
    size = min(16, draw.max_length)
    for _ in range(0, min(draw.vocab_size, 40_000), 2 * size):
        yield [(draw.ids(size, in_turn=True), draw.ids(size, in_turn=True)), *draw.rows(min(2, draw.max_batch - 1))]
    for token in (0, 1, 2, draw.vocab_size - 1, *draw.ids(4)):
        yield [((token,) * size, (token,) * size), *draw.rows(min(2, draw.max_batch - 1))]


def mutated(batch: Batch, draw: Drawer, layouts: Sequence[Layout], known: Sequence[Sequence_]) -> Batch:
    """Return a batch with one to three changes: its rows, their order and lengths, padding or layout."""
    for _ in range(int(draw.random.integers(1, 4))):
        rows, choice = list(batch.rows), int(draw.random.integers(0, 9))
        place = int(draw.random.integers(0, len(rows)))
        if choice == 0:
            rows.append(known[int(draw.random.integers(0, len(known)))] if len(known) else draw.row())
        elif choice == 1:
            del rows[place]
        elif choice == 2:
            rows[place] = draw.row(draw.length(), draw.length())
        elif choice == 3:
            rows.append(rows[place])
        elif choice == 4:
            rows = [rows[at] for at in draw.random.permutation(len(rows))]
        elif choice == 5:
            rows.sort(key=lambda row: len(row[0]) + len(row[1]), reverse=bool(draw.random.integers(0, 2)))
        elif choice == 6:
            rows += draw.rows(int(draw.random.integers(1, draw.max_batch + 1)))
        elif choice == 7:
            num = int(draw.random.choice((0, *PADS)))
            batch = replace(batch, pad_left=num) if draw.random.integers(0, 2) else replace(batch, pad_right=num)
        else:
            batch = replace(batch, layout=layouts[int(draw.random.integers(0, len(layouts)))])
        while len(rows) > 1 and (
            len(rows) > draw.max_batch or len(rows) * replace(batch, rows=tuple(rows)).width > MOST_TOKENS
        ):
            del rows[int(draw.random.integers(0, len(rows)))]
        batch = replace(batch, rows=tuple(rows or batch.rows))
    return batch


def shrunk(batch: Batch, differs: Callable[[Batch], bool], most: int) -> Batch:
    """Return the smallest batch found that still differs, by delta debugging with at most `most` trials."""
    trials = count(1)

    def better(candidate: Batch) -> bool:
        return candidate != batch and next(trials) <= most and differs(candidate)

    for layout in ((), *(batch.layout[:at] + batch.layout[at + 1 :] for at in range(len(batch.layout)))):
        batch = candidate if better(candidate := replace(batch, layout=layout)) else batch
    size = len(batch.rows) // 2
    while size:
        for start in range(0, len(batch.rows), size):
            rows = batch.rows[:start] + batch.rows[start + size :]
            fewer = next(filter(better, _without(batch, rows)), None) if rows else None
            if fewer is not None:
                batch = fewer
                break
        else:
            size //= 2
    for name in ("pad_left", "pad_right"):
        for num in (0, getattr(batch, name) // 2):
            fewer_pads: Any = {name: min(num, getattr(batch, name))}
            batch = candidate if better(candidate := replace(batch, **fewer_pads)) else batch
    for place in range(len(batch.rows)):
        for side in (0, 1):
            size = len(batch.rows[place][side]) // 2
            while size:
                row = batch.rows[place]
                short = (row[0][size:], row[1]) if side == 0 else (row[0], row[1][:-size])
                if short[side] and better(candidate := _with(batch, place, short)):
                    batch = candidate
                else:
                    size //= 2
    common = batch.rows[0][0][0]
    for place, row in enumerate(batch.rows):
        for side in (0, 1):
            same = tuple((common,) * len(row[at]) if at == side else batch.rows[place][at] for at in (0, 1))
            if better(candidate := _with(batch, place, (same[0], same[1]))):
                batch = candidate
    return batch


def _without(batch: Batch, rows: tuple[Sequence_, ...]) -> Iterator[Batch]:
    """Yield batches of only these rows: first as narrow as possible, then as wide as before."""
    narrow = replace(batch, rows=rows)
    yield narrow
    if narrow.width < batch.width:
        left, right = batch.before - narrow.before, batch.after - narrow.after
        yield replace(narrow, pad_left=batch.pad_left + left, pad_right=batch.pad_right + right)


def _with(batch: Batch, place: int, row: Sequence_) -> Batch:
    return replace(batch, rows=(*batch.rows[:place], row, *batch.rows[place + 1 :]))
