"""Values recorded at the wrong tokens.

A placement maps each token to the token where its value was recorded, and is judged by the mismatch that remains
after moving the values back.

Shapes: S sequences (rows), R selected rows, T tokens in the longest row, K kept tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ....schemas.passes import ROLLOUT
from ...advice import Advice
from .. import commands
from ..features import Side, counts, sides
from ..finding import Fault, Hypothesis, Number, located, nobodys, predicting, unexplained
from ..pair_data import PairData, allowed_noise, logit_error, once, value_rounding
from ..sample import run_lengths
from ..where import PERIODS, Where, batches, largest, recorded_order, where_text

CAP_NATS = 3.0
"""Maximum cost per token when rows are compared (nats), so that impossible tokens do not dominate."""
MIN_OFF_NATS = 0.05
"""Minimum mean |d| (nats) of a row that is compared with other rows or positions."""
REALIGNED_SHARE = 0.35
"""Maximum share of the difference left by a correct shift or reversal. A wrong shift leaves more than half."""
MIN_FIT_NATS = 15.0
"""Minimum evidence (nats) that values match the other side's at a given distance more often than by chance."""
_FAR = 8
"""Maximum distance (tokens) at which matches are counted. Those beyond LAGS show how many occur by chance."""
LAGS = (-3, -2, -1, 0, 1, 2, 3)
"""Shifts to try, in tokens. At positive shifts, pass b's values come later."""
CHUNKS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 64)
"""Chunk lengths to try, in tokens."""
WIDTH = 6
"""Number of consecutive tokens to compare at once. Fewer would match by chance, and more would miss short blocks."""

_ROWS_OFF = "{num_sequences:,} of {of_sequences:,} mismatched rows"
_AFTER = f"{_ROWS_OFF} agree up to some token (between positions {{first_place}} and {{last_place}}), and after it only if shifted by {{lags}} tokens: "


def _shift_words(numbers: Mapping[str, Any]) -> dict[str, str]:
    lag, where = numbers["lag"], f", {where_text(numbers)}," if "feature" in numbers else ""
    direction, which = ("later", "next") if lag > 0 else ("earlier", "previous")
    tokens_off = f"{abs(lag)} token{'s' * (abs(lag) > 1)}"
    whose = f"the {which} token" if abs(lag) == 1 else f"the token {abs(lag)} places {direction}"
    if "," in str(numbers.get("lags", "")):
        whose += f" (or at a distance of {numbers['lags'].partition(', ')[2]} tokens)"
    more = "; both tokens have the same id, so one token was recorded twice" if numbers.get("is_repeated") else ""
    if numbers.get("num_beside"):
        more += f"; {numbers['num_beside']:,} values next to these fit no token nearby, so they probably belong to another row"
    return {"tokens_off": tokens_off, "where": where, "whose": whose, "more_text": more, "direction": direction}


def _pair_words(numbers: Mapping[str, Any]) -> dict[str, str]:
    pairs = [f"{key[11:]} with {other}" for key, other in numbers.items() if key.startswith("belongs_to/")]
    return {"pairs": ", ".join(pairs[:4]) + ", ..." * (numbers["num_sequences"] > 4)}


def _order_words(numbers: Mapping[str, Any]) -> dict[str, str]:
    apart = numbers["steps_apart"]
    return {
        "steps": "in several steps" if apart is None else f"{apart:+d} step(s) away" if apart else "in the same step"
    }


_COUNTED = {
    "padding": "by the difference between its length and the longest in {}: padding is on the opposite side or was removed incorrectly",
    "place": "by its index in {}: the offsets into packed values are wrong",
    "": "as if offsets into packed values were wrong, or padding had been removed on the wrong side",
}


def _own_words(numbers: Mapping[str, Any]) -> dict[str, str]:
    what, _, block = str(numbers["counted"]).partition(" of ")
    of = "its step" if block == "step" else f"its block of {block} rows"
    return {"counted_text": _COUNTED[what].format(of)}


SHIFT = Fault(code="shift", title="one side is shifted by a token", broken="recording", words={
    "moved_rows": _shift_words, "own_lags": _own_words, "neighbours": _shift_words,
}, causes={
    "own": "one side's rows are shifted by different numbers of tokens (wrong padding or offsets)",
    "neighbour": "some tokens have their neighbours' values", "doubled": "some tokens were recorded twice",
    "reversed": "one side's values are in reverse order",
    "lost": "some of one side's values are missing, and later values have moved up",
}, evidence={
    "own_lags": "{num_sequences:,} of {of_sequences:,} mismatched rows in {b} are shifted relative to {a}, by different numbers of tokens ({least:+d} to {largest:+d}): shifted back, they differ by {moved:.2g} nats per token, but by {unmoved:.2g} as recorded; each row is shifted {counted_text}",
    "reversed": "{b} runs backwards along each sequence: read from the end, it differs from {a} by {moved:.2g} nats on average",
    "reversed_chunks": "in each chunk of {chunk} tokens, {b} runs backwards: read from the end of the chunk, it differs from {a} by {moved:.2g} nats on average",
    "moved_rows": "{b} is {tokens_off} {direction} than {a}: shifted back, the two differ by {moved:.2g} nats per token on "
    f"average, but by {{unmoved:.2g}} as recorded (differences are capped at {CAP_NATS:g})",
    "neighbours": "{num_tokens:,} of {of_tokens:,} values of {side}{where} belong to {whose}: on average, they are within {moved:.2g} nats of the other side's value at that token, but {size:.2g} from its value at the token where they are recorded{more_text}",
    "lost": f"{_ROWS_OFF} lack {{num_lost}} {{side}} value(s) at some token (position {{first_place}} to {{last_place}}): the later values "
    "have moved up to fill the gap, and the end of the row is filled with {filler:g}",
    "moved_after_place": f"{_AFTER}the turns were joined at the wrong token",
})  # fmt: skip
RETOKENISED = Fault(code="retokenised", title="the two sides scored different tokenisations of the text", broken="recording", evidence={
    "moved_after_place": f"{_AFTER}the text was decoded and re-encoded into different tokens",
    "impossible_after_place": f"{_ROWS_OFF} agree up to a position that differs by row (token {{first_place}} to "
    "{last_place}), where one side considers the token impossible, and differ by {effect:.2g} nats rms from that token on, so the two sides scored different tokens",
})  # fmt: skip
ROW_PAIRING = Fault(code="row_pairing", title="some of one side's rows belong to a different sequence", broken="recording", words={"other_rows": _pair_words}, evidence={"other_rows": f"{_ROWS_OFF} match the {{side}} values from a different row in the same or a neighbouring step: {{pairs}}"})  # fmt: skip
MISPLACED = Fault(code="misplaced", title="one side's values belong to different tokens, because blocks or rows are in the wrong order", broken="recording", words={"found_elsewhere": _order_words}, clauses={"order": {
    "rows": "they belong to different rows, {steps}",
    "blocks": "blocks within a row are in the wrong order, as if its context-parallel chunks had been joined wrongly (distinct displacements: {num_offsets:,}; most common: {offset:+,} tokens)",
}}, evidence={
    "found_elsewhere": "{num_tokens:,} values of {side} match {other} at different tokens, to within {residual:.2g} nats on average; as recorded, they differ by {size:.2g} nats: {order}",
})  # fmt: skip


def find_placement(data: PairData) -> list[Hypothesis]:
    generators = (_shifted, _reversed, _rows_paired, _elsewhere, _shifted_after_onset)
    return [found for generate in generators if (found := generate(data)) is not None]


def _placed(
    data: PairData, fault: Fault, signal: str, source: np.ndarray, tokens: np.ndarray, *, cost: float, next: Advice,
    numbers: Mapping[str, Number], weight: float = 1.0, of_a: bool = False,
) -> Hypothesis:  # fmt: skip
    residual = _at(data.a, source) - data.b if of_a else data.a - _at(data.b, source)
    finding = fault.finding(data, signal, tokens, weight=weight, next=next, numbers=numbers)
    return predicting(data, finding, residual, cost, tokens, is_right=True)


def _shifted(data: PairData) -> Hypothesis | None:
    index = _index(data)
    # Leave out rows that agree, because they would hide a shift of the other rows.
    off = np.flatnonzero(np.nan_to_num(row_means(_cost(data, index))) > max(MIN_OFF_NATS, allowed_noise(data)))
    if len(off) < 2:
        return None
    known = _counted_lags(data, index, off)
    off, lags = (off, _lags(data, index[off])) if known is None else (off[known != 0], known[known != 0])
    moved, unmoved = _cost(data, index[off], lags[:, None]), _cost(data, index[off])
    compared = np.isfinite(moved)
    long = compared.sum(axis=1) >= 4
    after, own = row_means(moved), row_means(np.where(compared, unmoved, np.nan))
    fits = long & (after < REALIGNED_SHARE * own) & (lags != 0)
    # The first tokens must be shifted, too. Rows that agree at first and are shifted later have a different fault.
    head = np.cumsum(compared, axis=1) <= 4
    at_once = np.nansum(moved * head, axis=1) < np.nansum(unmoved * head, axis=1)
    if fits.sum() < max(2, 0.6 * long.sum()) or at_once[fits].mean() < 0.5:
        return None
    claimed = fits | ((known is not None) & ~long)  # include rows too short to compare once shifted
    rows, lags = off[claimed], lags[claimed]
    row_lags = np.zeros((len(index), 1), np.int64)
    row_lags[rows, 0] = lags
    values, num = np.unique(lags, return_counts=True)
    lag, is_one = int(values[num.argmax()]), num.max() > 0.9 * len(lags)
    query = f"SELECT step, seq_id, position, token_id, logprob_a, logprob_b, lead(logprob_b, {lag}) OVER (PARTITION BY step, "
    query += "seq_id ORDER BY position) AS moved FROM {pair} ORDER BY step, seq_id, position LIMIT 40"
    by = (name for name, each in _known_lags(data) if np.mean(each[rows] == np.abs(lags)) > 0.9)
    numbers: dict[str, Number] = {
        "lag": lag, "moved": float(after[fits].mean()), "unmoved": float(own[fits].mean()), **data.names,
        "least": int(lags.min()), "largest": int(lags.max()), "num_sequences": len(rows), "of_sequences": len(off),
        "counted": "" if is_one else next(by, ""), "cause": "" if is_one else "own",
    }  # fmt: skip
    return _placed(
        data, SHIFT, "moved_rows" if is_one else "own_lags", _lagged(index, row_lags)[data.seq, data.position],
        np.isin(data.seq, rows), cost=len(values) * np.log(2 * index.shape[1]) + (not is_one) * 2 * len(rows),
        weight=float(1 - after[fits].sum() / own[fits].sum()), next=commands.sql(data, query), numbers=numbers,
    )  # fmt: skip


def _lags(data: PairData, index: np.ndarray) -> np.ndarray:
    """Return the best shift of pass b in each row (tokens), [R], among LAGS and the best shifts of WIDTH consecutive values."""
    a, b = _at(data.a, index), np.pad(_at(data.b, index), ((0, 0), (0, WIDTH - 1)), constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(b, WIDTH, axis=1)
    tried = [np.full(len(index), lag) for lag in LAGS]
    length = (index >= 0).sum(axis=1)
    for part in (0.25, 0.5, 0.75):
        nth = np.maximum((length * part).astype(int) - WIDTH // 2, 0)
        start = ((index >= 0).cumsum(axis=1) > nth[:, None]).argmax(axis=1)
        window = np.take_along_axis(a, np.minimum(start[:, None] + np.arange(WIDTH), index.shape[1] - 1), axis=1)
        distance = np.nan_to_num(np.minimum(np.abs(windows - window[:, None]), CAP_NATS), nan=CAP_NATS)
        tried.append(distance.sum(axis=2).argmin(axis=1) - start)
    costs = [row_means(_cost(data, index, lags[:, None]), np.maximum(4, 0.3 * length)) for lags in tried]
    return np.asarray(np.stack(tried)[np.argmin(costs, axis=0), np.arange(len(index))])


def _known_lags(data: PairData) -> Iterator[tuple[str, np.ndarray]]:
    """Yield quantities by which rows may be shifted: a name, such as `padding of 8`, and a number for each row, [S]."""
    sample, order = data.sample, recorded_order(data.sample)
    for name, block in batches(sample, order).items():
        for lengths in (sample.lengths, sample.lengths + sample.prompt_lengths):
            yield f"padding of {name}", largest(lengths, block) - lengths
    for size in PERIODS[:-1]:
        yield f"place of {size}", order % size


def _counted_lags(data: PairData, index: np.ndarray, rows: np.ndarray) -> np.ndarray | None:
    """Return the shift of each of the `rows`, [R], if nearly all of them are shifted by a known quantity."""
    for _, quantity in _known_lags(data):
        for lags in (quantity[rows], -quantity[rows]):
            moved, unmoved = _cost(data, index[rows], lags[:, None]), _cost(data, index[rows])
            long = (np.isfinite(moved).sum(axis=1) >= 4) & (lags != 0)
            own = row_means(np.where(np.isfinite(moved), unmoved, np.nan))
            fits = long & (np.nan_to_num(row_means(moved), nan=np.inf) < REALIGNED_SHARE * np.nan_to_num(own))
            if fits.sum() > max(0.9 * long.sum(), 3) and len(np.unique(lags[fits])) > 2:
                return np.asarray(lags)
    return None


def find_neighbours(data: PairData, where: Sequence[Where]) -> list[Hypothesis]:
    """Detect values that rounding cannot explain but that match the other side's values up to three tokens away."""
    off, found = nobodys(data), []
    # Displaced values can be recognised only if most tokens agree.
    if not 5 <= off.sum() <= data.num_kept / 2 or np.median(logit_error(data)[~off]) > allowed_noise(data):
        return []
    error = 4 * unexplained(data).sigma * data.scale + 2 * value_rounding(data)

    def fitting(side: Side, lag: int) -> tuple[np.ndarray, np.ndarray]:
        at = np.where(off, _lagged(_index(data), lag)[data.seq, data.position], -1)
        return at, (at >= 0) & (np.abs(_at(side.others, at) - side.values) < error[at])

    for side in sides(data):
        # Lags too large for any real displacement show how many values fit by chance.
        far = [fitting(side, lag) for lag in range(-_FAR, _FAR + 1) if abs(lag) > max(LAGS)]
        chance = (sum(fits.sum() for _, fits in far) + 1) / (sum((at >= 0).sum() for at, _ in far) + 1)
        source, lags = np.full(data.num_kept, -1), {}
        for lag in sorted({*LAGS} - {0}, key=abs):
            at, fits = fitting(side, lag)
            by_chance, fits = chance * float((at >= 0).sum()), fits & (source < 0)
            num = int(fits.sum())
            if num > 2 * by_chance and num * np.log(num / max(by_chance, 1e-3)) - num + by_chance > MIN_FIT_NATS:
                source[fits], lags[lag] = at[fits], num
        there, num = source >= 0, int((source >= 0).sum())
        left = np.abs(_at(side.others, source) - side.values)[there]
        if num > max(off.sum() / 4, 4) and np.median(left) < 0.1 * np.median(np.abs(data.d[there])):
            # If both tokens of a pair mismatch, either side could be the shifted one, so prefer the engine.
            found.append((num * (1.2 if side.own.name == ROLLOUT else 1.0), side, source, lags))
    return [_of_neighbours(data, where, *max(found, key=lambda each: each[0])[1:])] if found else []


def _of_neighbours(
    data: PairData, where: Sequence[Where], side: Side, source: np.ndarray, lags: Mapping[int, int]
) -> Hypothesis:
    there, off, ids = source >= 0, nobodys(data), data.sample.tokens[data.keep]
    beside = off & ~there & (run_lengths(off, data.seq, there) > 0)
    moved = np.abs(_at(side.others, source) - side.values)
    same = (ids == ids[source]) & (side.values == side.values[source])
    ordered = sorted(lags, key=lambda lag: -lags[lag])
    is_repeated = bool(same[there].mean() > 0.9)
    numbers: dict[str, Number] = {**side.names, **counts(data, there), "lag": ordered[0]}
    numbers |= {"lags": ", ".join(map(str, ordered)), "num_beside": int(beside.sum())}
    numbers |= {"moved": float(moved[there].mean()), "size": float(np.abs(data.d[there]).mean())}
    numbers |= {"is_repeated": int(is_repeated), "cause": "doubled" if is_repeated else "neighbour"}
    tokens = there | beside
    alike = [place for place in where if (place.inside & tokens).sum() > 0.7 * (place.inside | tokens).sum()]
    numbers |= alike[0].numbers if alike else {}
    finding = SHIFT.finding(data, "neighbours", tokens, next=commands.far_tokens(data), numbers=numbers)
    return predicting(data, finding, np.where(there, np.sign(data.d) * moved, data.d), 8.0, tokens)


def _reversed(data: PairData) -> Hypothesis | None:
    first, last = (np.searchsorted(data.seq, data.seq, side) for side in ("left", "right"))
    place = np.arange(data.num_kept) - first
    best, moved = 0, np.abs(data.d)
    for chunk in (int(data.sample.lengths.max(initial=0)), *CHUNKS):
        start = first + place // chunk * chunk
        source = start + np.minimum(start + chunk, last) - 1 - np.arange(data.num_kept)
        off_by = np.abs(data.a - data.b[source])
        if np.median(off_by) < REALIGNED_SHARE * np.median(moved):
            best, moved, found = chunk, off_by, source
    if not best or data.num_kept < 4:
        return None
    found, is_whole = np.where(found == np.arange(data.num_kept), -1, found), best not in CHUNKS
    numbers: dict[str, Number] = {"moved": float(moved.mean()), "chunk": best, "cause": "reversed", **data.names}
    return _placed(
        data, SHIFT, "reversed" if is_whole else "reversed_chunks", found, found >= 0, cost=1.0 if is_whole else 6.0,
        next=commands.tokens(data), numbers=numbers,
    )  # fmt: skip


def _rows_paired(data: PairData) -> Hypothesis | None:
    a, b = (_at(values, _index(data)) for values in (data.a, data.b))
    own, steps = row_means(_cost(data, _index(data))), data.sample.steps
    rows_of = [np.flatnonzero((steps == step) & np.isfinite(own)) for step in np.unique(steps)]
    tried = [rows[own[rows] > MIN_OFF_NATS][:64] for rows in rows_of]

    def partners(mixed: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        partner = np.full(len(own), -1)
        for step, rows in enumerate(rows_of):
            candidates = np.concatenate([rows, *rows_of[max(step - 1, 0) : step], *rows_of[step + 1 : step + 2]])
            values = b[candidates]
            values[np.isfinite(values)] = mixed(values[np.isfinite(values)])
            for row in tried[step]:
                costs = row_means(np.minimum(np.abs(a[row] - values), CAP_NATS), min(4, np.isfinite(a[row]).sum()))
                if costs.min() < REALIGNED_SHARE / 2 * own[row] and candidates[costs.argmin()] != row:
                    partner[row] = candidates[costs.argmin()]
        return partner

    partner, num_tried = partners(np.asarray), sum(map(len, tried))
    found = np.flatnonzero(partner >= 0)
    if len(found) < 2 or len(np.unique(partner[found])) < 0.6 * len(found) or len(found) < 0.2 * num_tried:
        return None
    draw = np.random.default_rng(0)
    by_chance = np.mean([(partners(draw.permutation) >= 0).sum() for _ in range(4)])
    if len(found) < max(2 * by_chance, by_chance + 3.0 * np.sqrt(by_chance)):
        return None
    names, place = data.sample.seq_ids, np.where(partner >= 0, partner, np.arange(len(own)))
    numbers: dict[str, Number] = {"side": data.sample.b.name, "num_sequences": len(found), "of_sequences": num_tried}
    return _placed(
        data, ROW_PAIRING, "other_rows", _index(data)[place[data.seq], data.position], np.isin(data.seq, found),
        cost=len(found) * np.log(max(len(names), 2)), weight=len(found) / num_tried, next=commands.row(data, int(found[0])),
        numbers=numbers | {f"belongs_to/{names[i]}": names[partner[i]] for i in found[:20]},
    )  # fmt: skip


def _shifted_after_onset(data: PairData) -> Hypothesis | None:
    index = _index(data)
    costs = np.nan_to_num(row_means(_cost(data, index)))
    suspects = np.argsort(-costs, kind="stable")[:256]
    suspects = suspects[costs[suspects] > MIN_OFF_NATS]
    lags, gains = _aligned(data, index[suspects])
    zero = np.nansum(_cost(data, index[suspects]), axis=1)
    moved = (gains > 4.0) & (gains > 0.5 * zero) & ((lags != 0).sum(axis=1) >= 3) & ((lags != 0).argmax(axis=1) >= 2)
    if moved.sum() < min(2, max(1, 0.05 * len(suspects))):
        return None
    rows, lags = suspects[moved], lags[moved]
    onset = (lags != 0).argmax(axis=1)
    # If the lag changes right after masked tokens, a turn was joined at the wrong token.
    hole = (index < 0) & ((index >= 0).cumsum(axis=1) > 0)
    joined = np.mean([hole[row, max(t - 4, 0) : t + 1].any() for row, t in zip(rows, onset, strict=True)]) > 0.8
    row_lags = np.zeros_like(index)
    row_lags[rows] = lags
    lost = _lost(data, index[rows], lags)
    return _placed(
        data, SHIFT if joined or lost else RETOKENISED, "lost" if lost else "moved_after_place", _lagged(index, row_lags)[data.seq, data.position],
        np.isin(data.seq, rows), cost=len(rows) * np.log(len(LAGS) * max(index.shape[1], 2)),
        weight=float(1 - (zero - gains)[moved].sum() / max(zero[moved].sum(), 1e-9)), next=commands.row(data, int(rows[0])),
        numbers=_onset_numbers(data, rows, len(suspects), onset) | {"lags": ", ".join(str(t) for t in np.unique(lags) if t), **lost},
    )  # fmt: skip


def _lost(data: PairData, index: np.ndarray, lags: np.ndarray) -> dict[str, Number]:
    usual = np.array([np.bincount(row[row != 0] - LAGS[0]).argmax() + LAGS[0] for row in lags])
    values, counts = np.unique(usual, return_counts=True)
    lag = int(values[counts.argmax()])
    last = [row[row >= 0][-abs(lag) :] for row in index[usual == lag]]
    held = (data.a if lag > 0 else data.b)[np.concatenate(last)]
    filler, often = np.unique(held, return_counts=True)
    if counts.max() < 0.6 * len(lags) or often.max() < max(4, 0.8 * len(held)):
        return {}
    side = data.names["a" if lag > 0 else "b"]
    return {"cause": "lost", "side": side, "num_lost": abs(lag), "filler": float(filler[often.argmax()])}


def _onset_numbers(data: PairData, rows: np.ndarray, num_off: int, onset: np.ndarray) -> dict[str, Number]:
    return {
        "num_sequences": len(rows), "of_sequences": num_off, "seq_id": data.sample.seq_ids[rows[0]],
        "first_place": int(onset.min()), "last_place": int(onset.max()),
    }  # fmt: skip


def _aligned(data: PairData, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's cheapest sequence of lags of pass b, [R, T], and its saving over no lag (nats), [R]. A nonzero
    lag at the start and each change of the lag cost two nats, and a token without a partner CAP_NATS / 2."""
    there, states, switch = index >= 0, np.arange(len(LAGS))[:, None], 2.0
    costs = np.stack([np.where(there, np.nan_to_num(_cost(data, index, lag), nan=CAP_NATS / 2), 0.0) for lag in LAGS])
    best = np.where(np.array(LAGS)[:, None] == 0, 0.0, np.full((1, len(index)), switch))
    came, path = np.empty(costs.shape, np.int8), np.empty(index.shape, np.int64)
    for t in range(index.shape[1]):
        switched = best.min(axis=0) + switch
        came[:, :, t] = np.where(best <= switched, states, best.argmin(axis=0))
        best = np.minimum(best, switched) + costs[:, :, t]
    state = best.argmin(axis=0)
    for t in reversed(range(index.shape[1])):
        path[:, t] = state
        state = came[state, np.arange(len(index)), t]
    return np.where(there, np.array(LAGS)[path], 0), costs[LAGS.index(0)].sum(axis=1) - best.min(axis=0)


def _elsewhere(data: PairData) -> Hypothesis | None:
    if data.num_kept < 100 or data.rms() < 0.05 or (source := _matches(data)) is None:
        return None
    away = np.where(source >= 0, source - np.arange(data.num_kept), 0)
    moved = away != 0
    if moved.sum() < 20:
        return None
    # The side whose logprob + entropy averages 0 is aligned with its tokens.
    a, b = sides(data)
    a_is_right = abs(a.sampled_score) <= abs(b.sampled_score) or b.own.entropy is None
    other_row = moved & (data.seq[source] != data.seq)
    apart = data.sample.steps[data.seq[source]] - data.sample.steps[data.seq]
    is_rows = other_row[moved].mean() > 0.5
    values, counts = np.unique(apart[other_row] if is_rows else np.where(other_row, 0, away)[moved], return_counts=True)
    most = int(values[counts.argmax()]) if not is_rows or counts.max() > 0.8 * counts.sum() else None
    runs = np.r_[True, (np.diff(away) != 0) | (np.diff(data.seq) != 0)] & moved
    hypothesis = _placed(
        data, MISPLACED, "found_elsewhere", source, moved, of_a=True, cost=runs.sum() * np.log(data.num_kept),
        weight=float(np.sum(data.d[moved] ** 2) / np.sum(data.d**2)), next=commands.row(data, int(data.seq[moved.argmax()])),
        numbers={
            "side": data.names["ab"[a_is_right]], "other": data.names["ba"[a_is_right]], "order": "rows" if is_rows else "blocks",
            "steps_apart": most if is_rows else 0, "offset": 0 if is_rows else most,
            "num_offsets": 0 if is_rows else len(values), "num_tokens": int(moved.sum()),
            "residual": float(np.abs(data.b - data.a[source])[moved].mean()), "size": float(np.abs(data.d[moved]).mean()),
        },
    )  # fmt: skip
    holder = np.full(data.num_kept, -1)
    holder[source[moved]] = np.flatnonzero(moved)
    right = data.spread_out(np.where(moved, data.a - _at(data.b, holder), data.d))
    return replace(hypothesis, rank=1, right=right)  # rank 1, because a shift or a pairing of rows is simpler


def _matches(data: PairData) -> np.ndarray | None:
    """Return the index of the token whose value in pass a matches each token's value in pass b, [K], or -1 if none
    does. None if too few tokens have a match."""
    from scipy.spatial import cKDTree  # needed only if nothing simpler explains the mismatch

    start = np.arange(max(data.num_kept - WIDTH + 1, 0))
    last, span = start + WIDTH - 1, np.arange(WIDTH)
    start = start[(data.seq[start] == data.seq[last]) & (data.position[last] - data.position[start] == WIDTH - 1)]
    windows_a, windows_b = (values[start[:, None] + span] for values in (data.a, data.b))
    own = np.mean(np.minimum(np.abs(windows_a - windows_b), CAP_NATS), axis=1)
    tolerance = max(allowed_noise(data), 0.02)
    wanted = np.flatnonzero((np.std(windows_b, axis=1) > 10 * tolerance) & (own > 5 * tolerance))
    if len(start) < 20 or len(wanted) < 10:
        return None
    wanted = wanted[:: -(-len(wanted) // 4_000)]
    tree = cKDTree(windows_a)
    distance, nearest = tree.query(windows_b[wanted], p=1)
    by_chance = tree.query(np.random.default_rng(0).permuted(windows_b[wanted], axis=1), p=1)[0]
    limit = min(float(np.quantile(by_chance, 0.02)), WIDTH * own[wanted].mean() / 4)
    # Matches between identical texts are excluded, because a text has similar values wherever it occurs.
    ids = data.sample.tokens[data.keep][start[:, None] + span]
    fits = (distance < limit) & (np.any(ids[wanted] != ids[nearest], axis=1) | (nearest == wanted))
    if fits.sum() < 10 or fits.mean() < 0.1 or fits.mean() < 4 * np.mean(by_chance < limit):
        return None
    source = np.full(data.num_kept, -1)
    at, come = ((start[windows[fits]][:, None] + span).ravel() for windows in (wanted, nearest))
    best_last = np.argsort(-np.abs(data.b[at] - data.a[come]), kind="stable")
    source[at[best_last]] = come[best_last]
    for step in (1, -1):  # extend matches while the values agree
        for _ in range(64):
            at = np.flatnonzero(source < 0)
            at = at[(at >= step) & (at - step < data.num_kept)]
            at = at[(source[at - step] >= 0) & (data.seq[at] == data.seq[at - step])]
            come = source[at - step] + step
            at, come = (each[(come >= 0) & (come < data.num_kept)] for each in (at, come))
            fits = (data.seq[come] == data.seq[come - step]) & (np.abs(data.b[at] - data.a[come]) <= np.abs(data.d[at]))
            source[at[fits]] = come[fits]
            if not fits.any():
                break
    return source


def find_broken(data: PairData) -> list[Hypothesis]:
    """Detect passes that scored different text after a token that one side considers impossible, within its turn."""
    mask = data.sample.mask
    turns = np.cumsum(mask & ~np.r_[False, mask[:-1]] & (data.sample.position > 0))[data.keep]
    turns = np.unique(turns * data.sample.num_sequences + data.seq, return_inverse=True)[1]
    seq = np.zeros(turns.max(initial=-1) + 1, np.int64)
    seq[turns] = data.seq
    index = np.full((len(seq), int(data.sample.lengths.max(initial=0))), -1)
    index[turns, data.position] = np.arange(data.num_kept)
    cost, lower = _cost(data, index), _at(np.minimum(data.a, data.b), index)
    off = np.nan_to_num(row_means(cost)) > MIN_OFF_NATS
    place = (cost > 0.5).argmax(axis=1)
    after = np.where(np.arange(cost.shape[1]) >= place[:, None], cost, np.nan)[off]
    rows, at = np.flatnonzero(off), place[off]
    is_broken = (cost[rows, at] > 1.0) & (lower[rows, at] < -5.0) & (np.isfinite(after).sum(axis=1) > 1)
    is_broken &= np.nanmedian(after, axis=1) > 0.5
    rows, at = rows[is_broken], at[is_broken]
    if len(rows) < max(2, 0.4 * off.sum()) or np.std(at) < 1:
        return []
    tokens = np.isin(turns, rows) & (data.position >= place[turns])
    finding = RETOKENISED.finding(
        data, "impossible_after_place", tokens, weight=len(rows) / off.sum(), next=commands.row(data, int(seq[rows[0]])),
        numbers=_onset_numbers(data, seq[rows], len(np.unique(seq[off])), at),
    )  # fmt: skip
    return [located(data, finding, tokens, len(rows) * np.log(max(cost.shape[1], 2)))]


@once
def _index(data: PairData) -> np.ndarray:
    index = np.full((data.sample.num_sequences, int(data.sample.lengths.max(initial=0))), -1)
    index[data.seq, data.position] = np.arange(data.num_kept)
    return index


def _at(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    return np.where(index >= 0, values[index], np.nan)


def _lagged(index: np.ndarray, lag: int | np.ndarray) -> np.ndarray:
    at = np.broadcast_to(np.arange(index.shape[1]) + lag, index.shape)
    return np.where((at >= 0) & (at < index.shape[1]), np.take_along_axis(index, at % index.shape[1], axis=1), -1)


def _cost(data: PairData, index: np.ndarray, lag: int | np.ndarray = 0) -> np.ndarray:
    """Return |a[t] - b[t + lag]| capped at CAP_NATS, [R, T]. NaN where either value is missing."""
    return np.asarray(np.minimum(np.abs(_at(data.a, index) - _at(data.b, _lagged(index, lag))), CAP_NATS))


def row_means(costs: np.ndarray, least: int | np.ndarray = 0) -> np.ndarray:
    """Return each row's mean cost, [R]: NaN for a row without costs, infinity for one with fewer than `least`."""
    count = np.isfinite(costs).sum(axis=1)
    means = np.where(count > 0, np.nansum(costs, axis=1) / np.maximum(count, 1), np.nan)
    return np.where(count < least, np.inf, means)
