"""Find the shortest description of the tokens that a mismatch affects.

A description splits tokens by one feature, such as a position or a token id. Its evidence is the log likelihood gained
by fitting a separate mismatch level to each part, minus the description's cost (nats).

Shapes: K kept tokens in S sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import lgamma, log
from typing import Any, Literal

import numpy as np

from .pair_data import PairData, levels, logit_error, once
from .sample import Sample

Kind = Literal["one_of", "from", "before", "is"]

MIN_RATIO = 3.0
"""Minimum ratio of the mean mismatch inside a description to that outside. In healthy runs, it stays below 2."""
PLACE_NATS = 20.0
"""Minimum evidence for a description (nats). Among all descriptions tried, one can reach 10 by chance."""
MAX_COVERED = 0.95
"""Maximum share of tokens inside a description. A mismatch that covers more is reported as being everywhere."""
MIN_UNITS = 4
"""Minimum number of units on either side of a split, and maximum distance (tokens) from a trigger to the onset."""
PERIODS = (2, 4, 8, 16, 32, 64)
"""Batch sizes (rows) and periods (tokens) to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    feature: str
    """A key of FEATURES, possibly with a number or a side in its name."""
    kind: Kind
    """How `values` select tokens: `from` (at least) or `before` (below) a threshold, `one_of` a set, or `is` (a flag)."""
    values: tuple[Any, ...]
    """The threshold or the values. Empty for `is`."""
    inside: np.ndarray
    """[K] bool: tokens that fit the description."""
    gain: float
    ratio: float
    """Mean mismatch inside the description divided by the mean mismatch outside."""
    mean_ratio: float
    """Like `ratio`, but with arithmetic instead of geometric means, so that bit-identical tokens have little effect."""
    level_outside: float
    """Median logit error outside the description (nats)."""

    @property
    def numbers(self) -> dict[str, str]:
        return _described(self.feature, self.kind, self.values)


FEATURES = {
    "first_token": "the first token of the response",
    "last_token": "the last token of the response",
    "last_of_truncated": "the last token of truncated responses",
    "from_end": "the distance from the response's end in tokens",
    "position": "the position in the response",
    "total_position": "the position in the whole sequence (prompt + response)",
    "phase": "the position in the response modulo {last}",
    "phase_total": "the position in the whole sequence (prompt + response) modulo {last}",
    "first_of_chunk": "the first token of a chunk, if prompt and response together are split into {last} equal chunks",
    "last_of_chunk": "the last token of a chunk, if prompt and response together are split into {last} equal chunks",
    "token_id": "the token id",
    "token_before": "the previous token's id",
    "after_ids": "an earlier token's id",
    "from_ids": "the id of this token or an earlier one",
    "token_repeated": "tokens that occurred earlier in the row",
    "later_turn": "tokens after the first turn of a conversation",
    "starts_turn": "the first token after masked tokens",
    "step": "the step",
    "version": "the policy version that sampled the sequence",
    "version_a": "the policy version with which pass a scored the sequence",
    "version_b": "the policy version with which pass b scored the sequence",
    "lag": "the number of updates between trainer and engine",
    "writer": "the writer",
    "contract": "the contract",
    "forward_row": "the row index in the forward pass",
    "pad_left": "the left padding",
    "row": "the row index in the step",
    "not_first_of": "rows other than the first in each block of {last} rows",
    "group_rank": "the row index in the group",
    "group_id": "the group id",
    "prompt_seen_before": "the flag `prompt occurred at an earlier step`",
    "reward_above_0": "the flag `reward above 0`",
    "advantage_above_0": "the flag `advantage above 0`",
    "finish_reason": "the finish reason",
    "last_id": "the last token's id",
    "reward": "the reward",
    "response_length": "the response length in tokens",
    "prompt_length": "the prompt length in tokens",
    "total_length": "the combined prompt and response length in tokens",
    "shorter_prompt_of": "rows whose prompt length is below the maximum in their block of {last} rows",
    "shorter_total_of": "rows whose total length is below the maximum in their block of {last} rows",
    "shorter_prompt_of_step": "rows whose prompt is shorter than the longest in the step",
    "shorter_total_of_step": "rows that are shorter than the longest in the step",
}
"""Feature -> phrase. A feature's name may end in a number, which replaces `{last}`, or in the letter of a pass."""


def where_text(numbers: Mapping[str, Any]) -> str:
    """Render a location's description as a phrase, e.g. `all at the first token of the response`."""
    feature, kind, values = str(numbers["feature"]), str(numbers["kind"]), str(numbers["values"])
    name, _, last = feature.rpartition("_")
    side = f" of pass {last}" if last in ("a", "b") and feature not in FEATURES else ""
    phrase = FEATURES.get(feature) or FEATURES.get(name) or (name if side else feature).replace("_", " ")
    phrase = phrase.format(last=last) + side
    if kind == "is" or (kind == "before" and values in ("", "True")):
        return f"{'all' if kind == 'is' else 'none'} {'in' if phrase.startswith('rows') else 'at'} {phrase}"
    if feature == "step" and kind in ("from", "before"):
        return f"all from step {values} on" if kind == "from" else f"all before step {values}"
    relation = {"from": "is at least", "before": "is below"}.get(kind, "is one of" if "," in values else "is")
    return f"all where {phrase} {relation} {values}"


@once
def places(data: PairData) -> list[Where]:
    """Describe where the mismatch is located. Return only descriptions with enough evidence, best first."""
    level, num = levels(data), np.bincount(data.seq, minlength=data.sample.num_sequences)
    rows = np.flatnonzero(num)
    mean = (np.bincount(data.seq, level, len(num)) / np.maximum(num, 1))[rows]
    found = [_place(data, name, values[rows], mean, rows) for name, values in sequence_columns(data.sample).items()]
    found += [_place(data, name, values, level, None) for name, values in token_columns(data).items()]
    if ids := _trigger_ids(data):
        tokens, after = data.sample.tokens[data.keep], np.zeros(data.num_kept, bool)
        here = np.isin(tokens, ids)
        for first, last in _rows(data):
            seen = not set(ids).isdisjoint(data.sample.prompts[data.seq[first]] or ())
            after[first:last] = seen | (np.cumsum(here[first:last]) > here[first:last])
        chosen = len(ids) * float(np.log(len(np.unique(tokens))))
        for name, inside in (("after_ids", after), ("from_ids", after | here)):
            place = _place(data, name, inside, level, None)
            if place and place.kind == "is":
                found.append(replace(place, kind="one_of", values=tuple(ids), gain=place.gain - chosen))
    return sorted((each for each in found if each is not None), key=lambda each: -each.gain)


def _rows(data: PairData) -> list[tuple[int, int]]:
    first = np.flatnonzero(np.r_[True, data.seq[1:] != data.seq[:-1]])
    return list(zip(first.tolist(), [*first[1:].tolist(), data.num_kept], strict=True))


def _trigger_ids(data: PairData) -> list[int]:
    """Return a few token ids that occur just before the mismatch begins in several rows, but much less often elsewhere."""
    noise, least = logit_error(data), 6  # least: minimum number of rows in which the mismatch begins partway through
    off = noise > 50 * np.quantile(noise, 0.1)
    if not least < off.sum() < MAX_COVERED * data.num_kept:
        return []
    tokens = data.sample.tokens[data.keep]
    clean: Counter[int] = Counter()
    near, within = [], []
    for first, last in _rows(data):
        prompt = data.sample.prompts[data.seq[first]] or ()
        onset = first + int(off[first:last].argmax()) if off[first:last].any() else last
        before = max(onset - MIN_UNITS, first)  # near-certain tokens in between can mask the onset
        clean.update({*tokens[first:before].tolist(), *(prompt if before > first else ())})
        if onset < last:
            near.append({*tokens[before : onset + 1].tolist(), *(() if onset > first else prompt)})
            within += near[-1:] if onset > first else []
    often = Counter(chain.from_iterable(near))
    left = [{each for each in ids if clean[each] < often[each] / 4} for ids in near]
    chosen: list[int] = []
    while left := [ids for ids in left if ids]:
        token, rows = Counter(chain.from_iterable(left)).most_common(1)[0]
        if rows < 2 or (not chosen and len(left) < least):
            break
        chosen.append(token)
        left = [ids for ids in left if token not in ids]
    return sorted(chosen) if sum(not ids.isdisjoint(chosen) for ids in within) >= least else []


def _place(data: PairData, name: str, values: np.ndarray, level: np.ndarray, rows: np.ndarray | None) -> Where | None:
    """Describe the tokens whose `values` coincide with a high `level`. If `rows` are given, describe rows instead."""
    if (best := _split(name, values, level)) is None:
        return None
    gain, kind, known, chosen, marked, there = best
    if kind == "one_of" and known.dtype.kind in "if" and not name.startswith("phase") and len(chosen) > 2:
        limit = int(chosen.min())
        is_range = len(chosen) > 0.8 * (chosen.max() - limit + 1)
        if name.startswith("token"):  # by chance, a few ids may be on the wrong side of the limit
            limit = int(np.quantile(chosen, 0.01, method="lower"))
            is_range = np.mean((values[there] >= known[limit]) == marked[there]) > 0.97
        if is_range:
            kind, chosen = "from", np.arange(limit, len(known) if name.startswith("token") else chosen.max() + 1)
            marked = there & np.isin(values, known[chosen])
    inside = marked if rows is None else np.isin(data.seq, rows[marked])
    if marked[there].all() or inside.all() or not inside.any() or (kind == "one_of" and inside.mean() > MAX_COVERED):
        return None
    noise = logit_error(data)
    typical = np.minimum(noise, np.quantile(noise, 0.995))
    mean_ratio = float(typical[inside].mean() / max(float(typical[~inside].mean()), 1e-12))
    ratio = max(float(np.exp(level[marked].mean() - level[there & ~marked].mean())), mean_ratio)
    if ratio < MIN_RATIO:
        return None
    return Where(
        feature=name, kind=kind, values=_values(kind, known, chosen), inside=inside, gain=gain, ratio=ratio,
        mean_ratio=mean_ratio, level_outside=float(np.median(noise[~inside])),
    )  # fmt: skip


def _values(kind: Kind, known: np.ndarray, chosen: np.ndarray) -> tuple[Any, ...]:
    shown = tuple(known[chosen].tolist())
    edge = {"from": shown[:1], "before": (known[min(int(chosen.max()) + 1, len(known) - 1)].item(),), "is": ()}
    return edge.get(kind, shown)


def _described(feature: str, kind: Kind, values: tuple[Any, ...]) -> dict[str, str]:
    shown = [f"{each:g}" if isinstance(each, float) else str(each)[:16] for each in values[:5]]
    text = ", ".join(shown) + (", ..." if len(values) > 5 else "")
    return {"feature": feature, "kind": kind, "values": text}


def _split(
    name: str, values: np.ndarray, level: np.ndarray
) -> tuple[float, Kind, np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Return the split of units (sequences or tokens) by their values that best separates high levels from low ones: the
    gain, the kind, the distinct values, the indices of those inside, and which units are inside and have a value."""
    there = np.isfinite(values) if values.dtype.kind == "f" else np.ones(len(values), bool)
    if values.dtype.kind == "O":
        there, values = np.array([value is not None for value in values]), values.astype(str)
    known, place = _distinct(values[there])
    level = level[there]
    if len(known) < 2:
        return None
    num, counts = len(level), np.bincount(place).astype(float)
    sums = np.bincount(place, level) - counts * level.mean()

    def gains(inside: np.ndarray, part: np.ndarray, level: np.ndarray = level) -> np.ndarray:
        total, num = float(np.sum((level - level.mean()) ** 2)), len(level)
        between = part**2 / inside + part**2 / np.maximum(num - inside, 1e-9)
        return np.asarray(-num / 2 * np.log(np.maximum(1 - between / max(total, 1e-30), 1e-12)))

    size: np.ndarray = np.arange(1, len(known))
    options: list[tuple[float, Kind, np.ndarray]] = [(0.0, "is", size)]
    if known.dtype == bool:
        chosen = int(sums[1] / counts[1] > sums[0] / counts[0])
        options.append((float(gains(counts[1:], sums[1:])[0]) - 1, "is" if chosen else "before", np.array([chosen])))
    elif known.dtype.kind in "if" and not name.startswith("phase"):
        before, part = np.cumsum(counts)[:-1], np.cumsum(sums)[:-1]
        worth = gains(before, part) - np.log(len(known))
        worth[np.minimum(before, num - before) < MIN_UNITS] = -np.inf
        if name.startswith("token"):  # levels depend on the id, so a split must also separate the ids' means
            means = sums / counts
            of_ids = gains(size, np.cumsum(means - means.mean())[:-1], means) - np.log(len(known))
            worth[(of_ids < PLACE_NATS) | (np.minimum(size, len(known) - size) < MIN_UNITS)] = -np.inf
        at = int(np.argmax(worth))
        up = part[at] < 0
        options.append((float(worth[at]), "from" if up else "before", size[at:] if up else np.arange(at + 1)))
    if known.dtype != bool and len(known) <= num / 2:
        order = np.argsort(-(sums / counts), kind="stable")
        # Penalize choosing m of n values by the log of the number of ways to choose them.
        cost = size * (np.log(len(known) / size) + 1) + np.log(len(known))
        worth = gains(np.cumsum(counts[order])[:-1], np.cumsum(sums[order])[:-1]) - cost
        at = int(np.argmax(worth))
        options.append((float(worth[at]), "one_of", np.sort(order[: at + 1])))
    gain, kind, chosen_values = max(options, key=lambda option: option[0])
    marked = np.zeros(len(values), bool)
    marked[np.flatnonzero(there)[np.isin(place, chosen_values)]] = True
    return (gain, kind, known, chosen_values, marked, there) if gain >= PLACE_NATS else None


def onset_of(data: PairData, name: str) -> tuple[int, float] | None:
    """Return the value of a token feature at which the mismatch increases, and the factor. None without evidence."""
    level = levels(data)
    if (best := _split(name, token_columns(data)[name], level)) is None or best[1] != "from":
        return None
    _, _, known, chosen, marked, _ = best
    return int(known[chosen.min()]), float(np.exp(level[marked].mean() - level[~marked].mean()))


def _distinct(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    whole = values.astype(np.int64) if values.dtype.kind in "bf" else None
    if whole is None or not len(whole) or (whole != values).any() or np.ptp(whole) > 4 * len(whole):
        return np.unique(values, return_inverse=True)
    least = whole.min()
    there = np.bincount(whole - least) > 0
    return (np.flatnonzero(there) + least).astype(values.dtype), (np.cumsum(there) - 1)[whole - least]


def sequence_columns(sample: Sample) -> dict[str, np.ndarray]:
    order, prompt = recorded_order(sample), sample.prompt_lengths
    total = prompt + sample.lengths
    columns: dict[str, np.ndarray] = {
        "version": _known(sample.versions), "lag": _known(sample.a.versions - sample.b.versions), **sample.settings,
        "prompt_seen_before": _seen_before(sample), "group_id": np.array(sample.group_ids, object),
        "finish_reason": np.array(sample.finish_reasons, object),
        **{f"{name}_above_0": np.where(np.isfinite(x), x > 0, np.nan) for name, x in sample.outcomes.items()},
        "response_length": sample.lengths.astype(float), "prompt_length": prompt.astype(float),
        "total_length": total.astype(float), "step": sample.steps.astype(float), "row": order.astype(float),
    }  # fmt: skip
    groups = np.array([f"{step}/{name}" for step, name in zip(sample.steps, sample.group_ids, strict=True)])
    columns["group_rank"] = np.where(any(sample.group_ids), rank_of(groups, order), np.nan)
    for side, own in (("a", sample.a), ("b", sample.b)):
        columns |= {
            f"writer_{side}": np.array(own.writers, object), f"contract_{side}": np.array(own.contracts, object),
            f"version_{side}": _known(own.versions), f"forward_row_{side}": own.forward_row, f"pad_left_{side}": own.pad_left,
        }  # fmt: skip
    for size, batch in batches(sample, order).items():
        if size != "step":
            columns[f"not_first_of_{size}"] = order % int(size) > 0
        for name, lengths in (("prompt", prompt), ("total", total)):
            columns[f"shorter_{name}_of_{size}"] = lengths < largest(lengths, batch)
    return columns


def token_columns(data: PairData) -> dict[str, np.ndarray]:
    sample, position = data.sample, data.position
    total = position + sample.prompt_lengths[data.seq]
    from_end = sample.lengths[data.seq] - 1 - position
    counted = np.concatenate([[True], sample.mask[:-1]])[data.keep]
    columns: dict[str, np.ndarray] = {
        "first_token": position == 0, "last_token": from_end == 0, "position": position.astype(float),
        "total_position": total.astype(float), "from_end": from_end.astype(float),
        "token_id": sample.tokens[data.keep].astype(float),
        "token_before": np.where(position > 0, sample.previous[data.keep], np.nan),
        "token_repeated": occurrences(data)["row"] > 0, "later_turn": later_turn(sample)[data.keep],
        "starts_turn": (position > 0) & ~counted,
    }  # fmt: skip
    if (reasons := {*map(str, sample.finish_reasons)}) & {"length", "stop"} and len(reasons) > 1:
        columns["last_of_truncated"] = (from_end == 0) & (np.array(sample.finish_reasons, object)[data.seq] == "length")
    for parts in PERIODS[:4]:
        chunk = np.maximum(-(-(sample.lengths + sample.prompt_lengths)[data.seq] // parts), 1)
        columns[f"first_of_chunk_{parts}"] = total % chunk == 0
        columns[f"last_of_chunk_{parts}"] = ((total + 1) % chunk == 0) & (from_end > 0)
    for name, places in (("phase", position), ("phase_total", total)):
        for period in (each for each in PERIODS if each <= places.max(initial=0)):
            columns[f"{name}_{period}"] = (places % period).astype(float)
    return columns


def later_turn(sample: Sample) -> np.ndarray:
    """Return [N] bool: True from the second turn on, which begins at the first masked token after an unmasked one."""
    out = np.zeros(len(sample.tokens), bool)
    for first, last in zip(sample.starts[:-1], sample.starts[1:], strict=True):
        counted = np.cumsum(sample.mask[first:last]) > 0
        out[first:last] = np.cumsum(counted & ~sample.mask[first:last]) > 0
    return out


def recorded_order(sample: Sample) -> np.ndarray:
    """Return each sequence's index within its step [S], ordering sequences by the number in their id."""
    return rank_of(sample.steps, np.array([f"{len(name):08d}{name}" for name in sample.seq_ids]))


@once
def occurrences(data: PairData) -> dict[str, np.ndarray]:
    """Return how often each token's id occurs earlier, [K]: in the `response` or the `row` (prompt and response)."""
    sample = data.sample
    rows, tokens = sample.seq, sample.tokens.astype(np.int64)
    given = [np.asarray(each or (), np.int64) for each in sample.prompts]
    prompt_rows = np.repeat(np.arange(len(given)), [len(each) for each in given])
    num_ids = int(max(tokens.max(initial=0), *(each.max(initial=0) for each in given), 0)) + 1
    in_row = rank_of(np.r_[prompt_rows, rows] * num_ids + np.concatenate([*given, tokens]))[len(prompt_rows) :]
    return {"response": rank_of(rows * num_ids + tokens)[data.keep], "row": in_row[data.keep]}


def _seen_before(sample: Sample) -> np.ndarray:
    first: dict[tuple[int, ...], int] = {}
    out = np.full(sample.num_sequences, np.nan)
    for row, (prompt, step) in enumerate(zip(sample.prompts, sample.steps.tolist(), strict=True)):
        if prompt is not None:
            out[row] = first.setdefault(tuple(prompt), step) < step
    return out


def batches(sample: Sample, order: np.ndarray) -> dict[str, np.ndarray]:
    """Map each possible batch size (rows), or `step`, to the sequences' batch numbers, [S]."""
    return {str(size): sample.steps * 1_000_000 + order // size for size in PERIODS[:-1]} | {"step": sample.steps}


def largest(values: np.ndarray, batch: np.ndarray) -> np.ndarray:
    _, place = np.unique(batch, return_inverse=True)
    out = np.zeros(int(place.max(initial=0)) + 1, values.dtype)
    np.maximum.at(out, place, values)
    return np.asarray(out[place])


def rank_of(label: np.ndarray, *keys: np.ndarray) -> np.ndarray:
    """Return, for each element, how many earlier elements have the same label, [N], after sorting by `keys` if given."""
    order = np.lexsort((*keys, label))
    rank = np.empty(len(label), np.int64)
    rank[order] = np.arange(len(label)) - np.searchsorted(label[order], label[order])
    return rank


def row_columns(sample: Sample) -> dict[str, np.ndarray]:
    last_id, reward = sample.tokens[sample.starts[1:] - 1], sample.outcomes["reward"]
    return sequence_columns(sample) | {"last_id": last_id, "reward": reward}


_DESCRIBING = ("step", "last_id", "finish_reason", "group_rank", "version", "reward", "response_length")


def shared_by(columns: Mapping[str, np.ndarray], affected: np.ndarray) -> dict[str, str]:
    """Describe the value, or range of values, in one of the columns ([S] each) that sets the `affected` rows ([S] bool)
    apart from nearly all others. Empty if it may be due to chance."""
    num, total = int(affected.sum()), len(affected)
    tried = sum(len({*columns[name].tolist()}) for name in _DESCRIBING)
    if lgamma(total + 1) - lgamma(num + 1) - lgamma(total - num + 1) - log(max(tried, 1)) < PLACE_NATS:
        return {}
    for name in _DESCRIBING:
        column, own = columns[name], columns[name][affected]
        usual = Counter(own.tolist()).most_common(1)[0][0]
        options = [(f"{usual:.10g}" if isinstance(usual, float) else str(usual), column == usual)]
        # A range that extends to the last step is left out: the finding's first step already describes it.
        if name in ("reward", "response_length") or (name == "step" and own.max() < column.max()):
            options += [(f"{own.min():g} to {own.max():g}", (column >= own.min()) & (column <= own.max()))]
        for values, inside in options if usual is not None else ():
            if all((a & b).sum() > 0.95 * max(a.sum(), b.sum()) for a, b in ((affected, inside), (~affected, ~inside))):
                match = "exact" if (inside == affected).all() else "almost"
                return {"feature": name, "kind": "one_of", "values": values, "match": match}
    return {}


def part_of_rows(sample: Sample, values: np.ndarray) -> tuple[dict[str, str], np.ndarray] | None:
    """Return the rows (described as by Where.numbers, and as [S] bool) whose finite `values` [S] differ most from the others, or None if
    chance can explain the difference. Only features known before sampling are tried. If rows were sorted by length
    afterwards, their index is not: given its length, a response's expected surprise is not its entropy."""
    rows, found = np.flatnonzero(np.isfinite(values)), []
    known_before = ("row", "group_rank", "not_first_of", "writer", "contract", "version", *sample.settings)
    for name, column in sequence_columns(sample).items():
        if name.startswith(known_before) and (best := _split(name, column[rows], values[rows])) is not None:
            gain, kind, known, chosen, marked, _ = best
            by_length = None if name in sample.settings else _split(name, column[rows], np.log(sample.lengths[rows]))
            if by_length is not None and by_length[0] > gain:
                continue
            inside = np.isin(np.arange(len(values)), rows[marked])
            found.append((gain, _described(name, kind, _values(kind, known, chosen)), inside))
    return max(found, key=lambda each: each[0])[1:] if found else None


def _known(values: np.ma.MaskedArray) -> np.ndarray:
    return np.ma.filled(values.astype(float), np.nan)
