"""Generate batches that are likely to break batch invariance, and small changes to a batch.

Lengths, row counts and paddings near powers of two and multiples of 16 come first, because kernels, tiles and cache
blocks change there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, zip_longest

import numpy as np

Sequence_ = tuple[tuple[int, ...], tuple[int, ...]]
"""Prompt and response token ids."""

SHORT = 12
"""Maximum prompt and response length (tokens) of short rows, used where lengths are not tested."""
_NUM_SHORT = 48
"""Number of distinct short rows. Kept low, because every row is also scored alone."""
MOST_TOKENS = 8192
"""Maximum tokens in a batch, including padding."""
PADS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128)


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass, or one engine call."""

    rows: tuple[Sequence_, ...]
    layout: str = ""
    """Arm options that the search sets, such as `mode=decode`. If empty, the arm's own values apply."""
    pad_left: int = 0
    """Padding columns before the longest prompt."""
    pad_right: int = 0

    @property
    def before(self) -> int:
        """Number of columns before the responses."""
        return self.pad_left + max(len(prompt) for prompt, _ in self.rows)

    @property
    def after(self) -> int:
        """Number of columns from the start of the responses to the end."""
        return self.pad_right + max(len(response) for _, response in self.rows)

    @property
    def width(self) -> int:
        return self.before + self.after

    def padding(self) -> tuple[list[int], list[int]]:
        """Return the number of padding tokens to the left and to the right of each row."""
        before, after = self.before, self.after
        return [before - len(prompt) for prompt, _ in self.rows], [after - len(response) for _, response in self.rows]

    def fits(self, max_batch: int) -> bool:
        num = len(self.rows)
        return num <= max_batch and (num == 1 or num * self.width <= MOST_TOKENS)


@dataclass(slots=True)
class Drawer:
    """Draws token ids, rows and lengths."""

    vocab_size: int
    max_batch: int
    max_length: int
    random: np.random.Generator
    _short: list[Sequence_] = field(init=False)

    def __post_init__(self) -> None:
        lengths = self.random.integers(1, min(SHORT, self.max_length) + 1, (_NUM_SHORT, 2))
        self._short = [self.row(*pair) for pair in lengths.tolist()]

    def below(self, most: int) -> int:
        return int(self.random.integers(0, most))

    def ids(self, num: int) -> tuple[int, ...]:
        return tuple(self.random.integers(0, self.vocab_size, num).tolist())

    def row(self, prompt: int, response: int) -> Sequence_:
        return self.ids(prompt), self.ids(response)

    def short(self, num: int) -> list[Sequence_]:
        """Draw `num` short rows, for batches in which the lengths do not matter."""
        return [self._short[self.below(_NUM_SHORT)] for _ in range(num)]

    def length(self) -> int:
        return int(min(self.random.geometric(min(4 / self.max_length, 1.0)), self.max_length))


def special(most: int) -> list[int]:
    """Return the integers 1 to `most`, starting with powers of two, multiples of 16 and their neighbours."""
    powers = [1 << n for n in range(most.bit_length())]
    near = [p + d for p in [*powers, *range(16, most + 1, 16)] for d in (0, -1, 1)]
    return list(dict.fromkeys(n for n in [1, 2, 3, *near, most, *range(1, most + 1)] if 1 <= n <= most))


def probes(draw: Drawer) -> Iterator[Batch]:
    """Yield batches that each test one property (row count, length, padding, ...), alternating between properties."""
    families = [family(draw) for family in (_counts, _lengths, _grid, _pads, _orders, _tokens)]
    for made in chain.from_iterable(zip_longest(*families)):
        batch = made if isinstance(made, Batch) else Batch(tuple(made or ()))
        if batch.rows and batch.fits(draw.max_batch):
            yield batch


_Family = Iterator[list[Sequence_] | Batch]


def _counts(draw: Drawer) -> _Family:
    for num in special(draw.max_batch):
        yield draw.short(num)
        yield [(row[0][-1:] * 4, row[1][:1] * 4) for row in draw.short(num)]


def _lengths(draw: Drawer) -> _Family:
    """For each length, yield rows whose prompt, response or total has this length, plus one short row."""
    for num in special(2 * draw.max_length):
        half, (prompt, response) = num // 2, draw.short(1)[0]
        rows = [(draw.ids(num), response), (prompt, draw.ids(num))] if num <= draw.max_length else []
        rows += [draw.row(half, num - half)] if half and num - half <= draw.max_length else []
        rows = [*rows, (prompt, response)][-draw.max_batch :]
        yield [rows[place] for place in draw.random.permutation(len(rows))]


def _grid(draw: Drawer) -> _Family:
    """Yield combinations of row count and width, because both affect kernels that sum over a batch's tokens."""
    counts = [num for num in special(draw.max_batch)[:24] if num > 1]
    for length in special(draw.max_length)[:24]:
        for num in counts:
            if num * 2 * length <= MOST_TOKENS:
                yield ([draw.row(length, length), draw.row(length, length)] * num)[:num]


def _pads(draw: Drawer) -> _Family:
    rows = tuple(draw.short(min(3, draw.max_batch)))
    for num in PADS:
        for chosen in (rows, rows[:1]):
            yield Batch(chosen, pad_left=num)
            yield Batch(chosen, pad_right=num)


def _orders(draw: Drawer) -> _Family:
    """Yield rows in different orders, duplicate rows, rows with shared prefixes, and one long row among short ones."""
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
            for before in (0, num - 1, num // 2):
                yield [*draw.short(before), longest, *draw.short(num - 1 - before)]


def _tokens(draw: Drawer) -> _Family:
    """Yield rows that together contain every token id (up to 40,000), and rows that repeat a single id."""
    size = min(16, draw.max_length)
    for start in range(0, min(draw.vocab_size, 40_000), 2 * size):
        ids = tuple(num % draw.vocab_size for num in range(start, start + 2 * size))
        yield [(ids[:size], ids[size:]), *draw.short(min(2, draw.max_batch - 1))]
    for token in (0, 1, 2, draw.vocab_size - 1, *draw.ids(4)):
        yield [((token,) * size, (token,) * size), *draw.short(min(2, draw.max_batch - 1))]


def mutated(batch: Batch, draw: Drawer, layouts: Sequence[str]) -> Batch:
    """Return the batch with one to three random changes to its rows, row order, lengths, padding or layout."""
    for _ in range(1 + draw.below(3)):
        rows, place, choice = list(batch.rows), draw.below(len(batch.rows)), draw.below(7)
        if choice == 0:
            del rows[place]
        elif choice == 1:
            rows[place] = draw.row(draw.length(), draw.length())
        elif choice == 2:
            rows.append(rows[place])
        elif choice == 3:
            rows += draw.short(1 + draw.below(draw.max_batch))
        elif choice == 4:
            rows = [rows[at] for at in draw.random.permutation(len(rows))]
        elif choice == 5:
            num = int(draw.random.choice((0, *PADS)))
            batch = replace(batch, pad_left=num) if draw.below(2) else replace(batch, pad_right=num)
        else:
            batch = replace(batch, layout=layouts[draw.below(len(layouts))])
        batch = replace(batch, rows=tuple(rows) or batch.rows)
        while not batch.fits(draw.max_batch):
            batch = _without(batch, draw.below(len(batch.rows)), 1)
    return batch


def shrunk(batch: Batch, differs: Callable[[Batch], bool], most: int) -> Batch:
    """Shrink the batch by delta debugging in at most `most` trials, and return the smallest one that still differs."""
    trials = count(1)
    for smaller in (_fewer_options, _fewer_rows, _less_padding, _shorter_rows):
        candidates = smaller(batch)
        while (candidate := next(candidates, None)) is not None and next(trials) <= most:
            if differs(candidate):
                batch, candidates = candidate, smaller(candidate)
    return batch


def _fewer_options(batch: Batch) -> Iterator[Batch]:
    words = batch.layout.split(",")
    layouts = ["", *(",".join(words[:at] + words[at + 1 :]) for at in range(len(words)))]
    yield from (replace(batch, layout=layout) for layout in dict.fromkeys(layouts) if layout != batch.layout)


def _fewer_rows(batch: Batch) -> Iterator[Batch]:
    """Yield batches with some rows removed, each first at its minimum width, then padded to the previous width."""
    for size in _halves(len(batch.rows)):
        for start in range(0, len(batch.rows), size):
            narrow = _without(batch, start, size)
            yield narrow
            if narrow.width < batch.width:
                left, right = batch.before - narrow.before, batch.after - narrow.after
                yield replace(narrow, pad_left=batch.pad_left + left, pad_right=batch.pad_right + right)


def _less_padding(batch: Batch) -> Iterator[Batch]:
    left, right = batch.pad_left, batch.pad_right
    yield from (replace(batch, pad_left=num) for num in (0, left // 2) if num < left)
    yield from (replace(batch, pad_right=num) for num in (0, right // 2) if num < right)


def _shorter_rows(batch: Batch) -> Iterator[Batch]:
    for place, (prompt, response) in enumerate(batch.rows):
        shorter = [(prompt[size:], response) for size in _halves(len(prompt))]
        shorter += [(prompt, response[:-size]) for size in _halves(len(response))]
        for row in shorter:
            yield replace(batch, rows=(*batch.rows[:place], row, *batch.rows[place + 1 :]))


def _halves(num: int) -> list[int]:
    """Return num // 2, num // 4, ..., 1."""
    return [num >> shift for shift in range(1, num.bit_length())]


def _without(batch: Batch, start: int, size: int) -> Batch:
    return replace(batch, rows=batch.rows[:start] + batch.rows[start + size :])
