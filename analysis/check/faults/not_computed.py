"""Values that no forward pass computed for the sampled token (missing, constant or copied), and unsampled tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ....schemas.documents import Contract
from ....schemas.passes import ROLLOUT
from ...advice import Advice
from .. import commands
from ..features import Side, counts, means, sides
from ..finding import Broken, Fault, Finding, Hypothesis, Number, certain, predicting
from ..pair_data import PairData, declared, dtype_of, half_ulp, precisions
from ..sample import MIN_UNSAMPLED_RUN, UNSAMPLED_NATS, PassSample, run_lengths, template_tokens
from .sampling import IMPOSSIBLE_LOGPROB, MAX_LEFT, TRUNCATION, recorded_filter

MAX_CONSTANTS = 20
"""Maximum number of a pass's most frequent values to test as placeholders."""
FEW_CONSTANTS = 3
"""Minimum number of tokens, and of token ids, that must share a value for it to count as a placeholder."""
_REPEATED_FACTOR = 3
"""Minimum factor by which a placeholder's contexts outnumber those of nearby values. Squared if it is in both passes."""
_MOST_LATE = 8
"""Maximum displacement of a loss mask to search for (tokens)."""
_WINDOW_NATS = 0.05
"""Maximum distance (nats) of the nearby values that show how often a value repeats by chance."""
_EVIDENCE = {
    "missing": "{side} has {value} where {other} has a logprob, for {num_tokens:,} tokens {at}{ids_text}",
    "missing_in_both": "neither {side} nor {other} has a finite logprob ({side}: {value}) for {num_tokens:,} tokens {at}",
    "missing_elsewhere": "{a} or {b} has NaN or infinity for {num_tokens:,} tokens at steps that were not inspected individually",
    "unlikely_runs": "in {num_sequences:,} of {of_sequences:,} sequences, runs of consecutive tokens ({num_tokens:,} in all) have a mean logprob of {mean_logprob:.3g} nats on both sides and a mean entropy of {mean_entropy:.3g}, so these tokens come from a prompt or a tool, not from sampling, but are included in the loss",
    "constant": "{side} is {value:g} for {num_tokens:,} tokens in {num_sequences:,} sequences, where {other} averages {other_mean:.3g} nats (minimum {other_min:.3g}){reason}",
    "merged": "in {num_sequences:,} sequences, {side} is 0 for {num_tokens:,} tokens, and their logprobs are added to the logprob {where} them ({other}'s sums agree to {residual:.2g} nats), as if several tokens had arrived as one",
    "constant_in_both": "{a} and {b} are both {value:g} for {num_tokens:,} tokens in {num_sequences:,} sequences and different contexts, far more often than any nearby value",
    "constant_rows": "{side} has the same value for all tokens of a sequence while {other} varies: each of the {num_tokens:,} tokens has a {what} over its sequence instead of its logprob",
    "equal_bits": "all {num_tokens:,} tokens of {a} and {b} are bitwise equal, and {contracts_known}",
    "equal_against_contracts": "all {num_tokens:,} tokens of {a} and {b} are bitwise equal, although their contracts name {differing}: {copied_text}",
    "copied_steps": "{a} and {b} are bitwise equal at all {num_tokens:,} tokens from step {since_equal} on, but differ at {share_before:.0%} of the earlier tokens, with the same contracts, so one is a copy of the other from that step on",
    "shifted_mask": "{side} has no logprob for {num_tokens:,} tokens in the loss, but has logprobs for {num_left_out:,} masked tokens of the same sequences, so the loss mask is {displaced_text}",
    "reference": "reference and train are bitwise equal at all {num_tokens:,} tokens inspected, in {num_steps:,} steps, but train and rollout differ by more than rounding, so train may contain the reference's logprobs",
    "copied_rows": "{num_sequences:,} of {of_sequences:,} sequences are bitwise equal in both passes, although their contracts name {differing}, so one pass is a copy of the other in these sequences",
}
_PLACES = {
    "scattered": "scattered over {num_sequences:,} sequences",
    "whole": "(every token of {num_sequences:,} of {of_sequences:,} sequences)",
}
_CLAUSES: Mapping[str, Mapping[Any, str]] = {
    "contracts_known": {0: "no contract implies that they should differ", 1: "their contracts describe the same numerics"},
    "reason": {
        "improbable": "; elsewhere, {other}'s logprobs average {elsewhere_mean:.3g} nats, so these tokens were not sampled from the policy",
        "appended": "; elsewhere, {other}'s logprobs average {elsewhere_mean:.3g} nats, and each of these tokens is the last in its response, so they were appended after sampling",
        "after_end": "; these tokens{ids_text} extend to the end of their responses, so padding is included in the loss",
        "floor": "; every token with a lower logprob in {other} has this value in {side}, so {side} is clamped there",
    },
}  # fmt: skip


def _at(numbers: Mapping[str, Any]) -> dict[str, str]:
    at = _PLACES.get(numbers["place"], "at the {place} of {num_sequences:,} of {of_sequences:,} sequences")
    after = (
        "after responses that were truncated"
        if numbers.get("are_truncated")
        else "which has a logprob at the end of others"
    )
    ids = f", all with id {numbers['token_id']}, {after}" if "token_id" in numbers else ""
    return {"at": at.format_map(numbers), "ids_text": ids}


def _differences(n: Mapping[str, Any]) -> dict[str, str]:
    known = [what for what in ("engine", "dtype") if f"{what}_a" in n]
    differing = [f"different {what}s ({n[f'{what}_a']} and {n[f'{what}_b']})" for what in known]
    never = "two such forward passes are never bitwise equal, so one was copied from the other"
    maybe = "one was copied from the other, or the two are built to be bitwise equal: replay to find out"
    return {"differing": " and ".join(differing), "copied_text": never if "dtype_a" in n else maybe}


def _displaced(num_late: int) -> str:
    text = f"{abs(num_late)} token{'s' * (abs(num_late) != 1)} {'late' if num_late > 0 else 'early'}"
    return text if num_late else "displaced, by different numbers of tokens"


_WORDS = {
    "missing": _at, "missing_in_both": _at,
    "constant": lambda n: {"ids_text": f", all with id {n['token_id']}," if "token_id" in n else ""},
    "equal_against_contracts": _differences, "copied_rows": _differences,
    "shifted_mask": lambda n: {"displaced_text": n.get("cause") or _displaced(int(n["num_late"]))},
}  # fmt: skip


def _fault(code: str, title: str, *signals: str, **causes: str) -> Fault:
    evidence = {signal: _EVIDENCE[signal] for signal in signals}
    broken: Broken | None = None if code == "equal" else "recording"
    return Fault(
        code=code, title=title, broken=broken, evidence=evidence, words=_WORDS, clauses=_CLAUSES, causes=causes
    )


_MISSING = ("missing", "missing_in_both", "missing_elsewhere")
LENGTHS = _fault("lengths", "tokens are missing on one side", *_MISSING)
_CONSTANT = ("constant", "constant_in_both", "constant_rows")
PLACEHOLDERS = _fault("placeholders", "placeholders instead of logprobs", *_CONSTANT)
HOLES = _fault(
    "placeholders", "missing values instead of logprobs", *_MISSING,
    impossible="one side gives sampled tokens a probability of 0: it cuts off or forbids tokens that the other side sampled",
    not_finite="one side computed NaN or infinity instead of logprobs",
)  # fmt: skip
MERGED = _fault("log_base", "one side's logprobs are sums over several tokens", "merged")
MASK = _fault("mask", "prompt or tool tokens are included in the loss", "unlikely_runs")
NOT_SAMPLED = _fault(
    "mask", "prompt, tool or padding tokens are included in the loss", "constant", "missing",
    appended="tokens that were not sampled are at the end of responses and included in the loss",
)  # fmt: skip
COPIES = _fault(
    "copies", "one pass is a copy of the other", "equal_against_contracts", "copied_rows", "copied_steps", "reference",
    reference="the reference's logprobs are stored as the trainer's",
)  # fmt: skip
SHIFTED_MASK = _fault("mask", "the loss mask is displaced", "shifted_mask", inverted="the loss mask is inverted")
EQUAL = _fault("equal", "bitwise equal", "equal_bits")


def reference_copied(data: PairData, numbers: Mapping[str, Number]) -> Finding:
    known: dict[str, Number] = {**numbers, "cause": "reference"}
    return COPIES.finding(data, "reference", next=commands.stats(data, "step"), numbers=known, weight=0.5)


def find_missing(data: PairData) -> list[Finding]:
    """Detect logprobs that are NaN, infinite, or NULL although the other pass has a value. At the ends of sequences they
    indicate truncation, elsewhere lost values. NaN and infinities are also counted at steps that are not inspected."""
    sample, (a, b) = data.sample, (data.sample.a, data.sample.b)
    # data_checks reports tokens of a template.
    lost_a, lost_b = (sample.mask & ~np.isfinite(each.logprobs) & ~template_tokens(sample, each) for each in (a, b))
    in_both = lost_a & lost_b & ~(a.is_null & b.is_null)
    asked = (
        (a, b, lost_a & ~lost_b, a.is_null, "missing"), (b, a, lost_b & ~lost_a, b.is_null, "missing"),
        (a, b, in_both, a.is_null & b.is_null, "missing_in_both"),
    )  # fmt: skip
    found = [finding for each in asked if (finding := _missing(data, *each)) is not None]
    elsewhere = data.sums.num_not_finite - int(((lost_a & ~a.is_null) | (lost_b & ~b.is_null)).sum())
    if elsewhere > 0:
        share = elsewhere / max(data.sums.num_tokens + data.sums.num_not_finite, 1)
        numbers: dict[str, Number] = {"num_tokens": elsewhere, **data.names}
        found.append(_of_no_value(HOLES, data, "missing_elsewhere", share, commands.stats(data, "step"), numbers))
    return found


def _of_no_value(
    fault: Fault, data: PairData, signal: str, share: float, next: Advice, numbers: Mapping[str, Number]
) -> Finding:
    nobody = np.zeros(data.num_kept, bool)
    return fault.finding(data, signal, nobody, effect=float("nan"), share=share, next=next, numbers=numbers)


def _missing(
    data: PairData, side: PassSample, other: PassSample, missing: np.ndarray, null: np.ndarray, signal: str
) -> Finding | None:
    sample, num = data.sample, int(missing.sum())
    share = num / max(int(sample.mask.sum()), 1)
    nulls, values, seq, position = null[missing], side.logprobs[missing], sample.seq[missing], sample.position[missing]
    if not num or (nulls.all() and share < 1e-4):
        return None  # a few NULLs come from truncated sequences, which `stats` counts
    first, last = np.full(sample.num_sequences, np.inf), np.full(sample.num_sequences, -1.0)
    np.minimum.at(first, sample.seq[~missing], sample.position[~missing])
    np.maximum.at(last, sample.seq[~missing], sample.position[~missing])
    in_head, in_tail = float(np.mean(position < first[seq])), float(np.mean(position > last[seq]))
    rows = np.unique(seq)
    lost, counted = (np.bincount(each, minlength=sample.num_sequences) for each in (seq, sample.seq[sample.mask]))
    place = "whole" if np.all(lost[rows] == counted[rows]) else "end" if in_tail >= in_head else "beginning"
    cut = num >= 3 and max(in_tail, in_head) >= 0.8  # one or two tokens may be at an end by chance
    cause = "" if nulls.any() else "impossible" if np.isneginf(values).all() else "not_finite"
    kinds = {"NULL": nulls, "-inf": np.isneginf(values), "inf": np.isinf(values)}
    kind = next((kind for kind, has in kinds.items() if has.all()), "NaN")
    query = commands.sql(
        data,
        "SELECT step, seq_id, count(*) AS num_tokens, count(*) FILTER (isfinite(logprob)) AS num_scored FROM "
        f"(SELECT step, seq_id, unnest(logprobs) AS logprob FROM scores WHERE \"pass\" = '{side.name}') "
        "GROUP BY ALL HAVING num_scored < num_tokens ORDER BY ALL LIMIT 20",
    )
    numbers: dict[str, Number] = {
        "side": side.name, "other": other.name, "num_tokens": num, "num_sequences": len(rows),
        "of_sequences": sample.num_sequences, "place": place if cut else "scattered", "value": kind, "cause": cause,
    }  # fmt: skip
    fault, ids = LENGTHS if cut and not cause else HOLES, np.unique(sample.tokens[missing])
    if fault is LENGTHS and signal == "missing" and place == "end" and num == len(rows) and len(ids) == 1:
        are_truncated = bool((sample.ended[rows] == "length").all())
        others = sample.mask & ~missing & (sample.position == last[sample.seq])
        if are_truncated or (sample.tokens[others] == ids[0]).sum() >= 3:
            appended: dict[str, Number] = {"cause": "appended", "token_id": int(ids[0]), "are_truncated": are_truncated}
            fault, numbers = NOT_SAMPLED, numbers | appended
    found = _of_no_value(fault, data, signal, share, query, numbers)
    if cause == "not_finite":
        found = replace(found, side="engine" if side.name == ROLLOUT else "trainer")
    return _shifted_mask(data, side, found) or found


def _shifted_mask(
    data: PairData, side: PassSample, finding: Finding, filler: np.ndarray | None = None
) -> Finding | None:
    """Return a finding if the loss mask is inverted or shifted: as many tokens are wrongly left out as included. If given,
    `filler` ([N] bool) marks the tokens without a logprob."""
    sample = data.sample
    has, place = np.isfinite(side.logprobs) if filler is None else ~filler, np.arange(len(sample.mask))
    wrong = (sample.mask & ~has, has & ~sample.mask)
    lost, out = (np.bincount(sample.seq[each], minlength=sample.num_sequences) for each in wrong)
    num, num_out = int(lost.sum()), int(out[lost > 0].sum())
    numbers: dict[str, Number] = {"side": side.name, "num_tokens": num, "num_left_out": num_out}

    def fits(late: int) -> bool:
        origin = np.clip(place + late, 0, len(place) - 1)
        inside = (lost > 0)[sample.seq] & (sample.seq[origin] == sample.seq)
        return bool(np.mean(sample.mask[origin][inside] == has[inside]) > 0.98)

    if num_out and (sample.mask != has).mean() > 0.98:
        numbers["cause"] = "inverted"
    elif np.minimum(lost, out).sum() < 0.8 * num or num_out > 1.25 * num:
        return None
    else:
        tried = sorted(range(-_MOST_LATE, _MOST_LATE + 1), key=abs)[1:]
        numbers["num_late"] = next((late for late in tried if fits(late)), 0)
    # Filler at a row's first token and a masked end token look like a shift, but then no masked token has filler.
    is_shifted = numbers.get("num_late") and has[~sample.mask].mean() < 0.9
    if filler is not None and not (is_shifted or "cause" in numbers):
        return None
    return _of_no_value(SHIFTED_MASK, data, "shifted_mask", finding.share, finding.next, numbers)


def find_unsampled(data: PairData) -> list[Hypothesis]:
    """Detect runs of tokens whose logprob is far below the negative entropy in both passes. Entropy rises after an
    improbable token, so improbable tokens rarely follow each other."""
    if (entropy := data.entropy) is None:
        return []
    unlikely = (likely := np.maximum(data.a, data.b)) + entropy < UNSAMPLED_NATS
    runs = unlikely & (run_lengths(unlikely, data.seq) >= MIN_UNSAMPLED_RUN)
    rows, numbers = np.unique(data.seq[runs]), counts(data, runs)
    if len(rows) < max(4, 0.05 * len(np.unique(data.seq))):
        return []
    numbers |= {"mean_logprob": float(likely[runs].mean()), "mean_entropy": float(entropy[runs].mean())}
    next = commands.row(data, int(rows[0]))
    return [certain(MASK.finding(data, "unlikely_runs", runs, weight=0.9, next=next, numbers=numbers))]


def find_constants(data: PairData) -> Iterator[Hypothesis]:
    """Detect placeholders for missing logprobs in one pass."""
    for side in sides(data):
        values, num = np.unique(side.values, return_counts=True)
        often = np.argsort(-num, kind="stable")[:MAX_CONSTANTS]
        tested = values[np.sort(often[num[often] >= FEW_CONSTANTS])].tolist()
        masks = [(value, side.values == value) for value in tested if value > IMPOSSIBLE_LOGPROB]
        # Masked logits give slightly different values, because the normaliser differs, so test these together.
        if len(impossible := values[values <= IMPOSSIBLE_LOGPROB]):
            masks.append((float(np.median(impossible)), side.values <= IMPOSSIBLE_LOGPROB))
        for value, where in masks:
            if _stands_for_none(data, side, value, where):
                far = where & (np.abs(side.others - value) > 0.1)
                # Leave out correct values: 0 at probability 1, or a 16-bit logprob that equals it by chance.
                is_sparse = precisions(data)["ab".index(side.key)].rounded is not None
                if far.sum() < 0.02 * where.sum() if value == 0.0 else is_sparse:
                    where = far
                finding, own = _constant(data, side, value, where), side.own.logprobs
                lost = own == value if value > IMPOSSIBLE_LOGPROB else own <= IMPOSSIBLE_LOGPROB
                if displaced := _shifted_mask(data, side.own, finding, lost):
                    finding = replace(displaced, effect=finding.effect)
                yield predicting(data, finding, np.zeros(data.num_kept), np.log(data.num_kept), where)


def find_merged(data: PairData) -> Iterator[Hypothesis]:
    """Detect tokens with a logprob of 0 because their logprob was added to a neighbour's."""
    same = np.diff(data.seq) == 0
    for side in sides(data):
        own, other = side.values, side.others
        zero = own == 0
        far = zero & (other < -0.05)
        for where in ("before", "after") if far.sum() >= FEW_CONSTANTS else ():
            # Group the zeros with their neighbour: a nonzero logprob starts a group, or ends it if `where` is `after`.
            group = np.cumsum(np.r_[True, ~(same & (zero[1:] if where == "before" else zero[:-1]))]) - 1
            lead = ~zero & (np.bincount(group, zero)[group] > 0)
            residual = np.where(lead, own - np.bincount(group, other)[group], 0.0)
            tokens = np.bincount(group, lead)[group] > 0
            if far[tokens].sum() < 0.8 * far.sum():
                continue
            numbers = side.names | counts(data, far & tokens) | {"where": where, "num_tokens": int(far.sum())}
            numbers["residual"] = float(np.median(np.abs(residual[lead])))
            next = commands.tokens(data, f"logprob_{side.key} = 0")
            finding = MERGED.finding(data, "merged", tokens, next=next, numbers=numbers)
            hypothesis = predicting(data, finding, residual, 2.0, tokens)
            if hypothesis.left is not None and hypothesis.left < MAX_LEFT:
                yield hypothesis


def _stands_for_none(data: PairData, side: Side, value: float, where: np.ndarray) -> bool:
    """Return True if `value`, found in one pass at `where` ([K] bool), is a placeholder for a missing logprob."""
    off, ids = side.others[where] - value, data.sample.tokens[data.keep]
    if value <= IMPOSSIBLE_LOGPROB:
        return bool(np.median(np.abs(off)) > abs(value) / 2)
    usual, large = np.quantile(np.abs(data.d[~where]), [0.5, 0.9]) if not where.all() else (0.0, 0.0)
    far = np.abs(off) > max(0.1, 10 * usual, large)
    if far.sum() < 2 or np.std(off) <= 0.05 or -1e-5 < value < 0:
        return False
    if value != 0.0:
        num_ids, num = (len(np.unique(kind[where])) for kind in (ids, data.sample.prefix_keys[data.keep]))
        if len(off) < 8 or far.mean() <= 0.5 or num < FEW_CONSTANTS:
            return False
        # 16-bit logits repeat values. For example, the likelier of two tokens whose logits differ by 1 has a logprob of
        # -0.3133. Values of only one or two ids, such as padding, must be far more frequent than nearby ones.
        few = num_ids < FEW_CONSTANTS
        usual = _repeats(side.values[~where], value, 0.5, 1.0 if few else 0.9)
        if (num if few else min(num, num_ids)) <= _REPEATED_FACTOR * usual:
            return False
    elsewhere = np.abs(side.others[~where] - value)
    if value == 0.0:  # correct if the token has probability 1 or is alone in its nucleus
        uncertain = np.abs(off) > 0.02
        if np.isin(ids[~where], ids[where][uncertain]).sum() < uncertain.sum() / 4:
            return True  # tokens with these ids nearly always have this value
        off, elsewhere = off[uncertain], elsewhere[elsewhere > 0.02]
    usual = np.median(elsewhere) if len(elsewhere) else 0.0
    return bool(np.median(np.abs(off)) > usual / 2 or (value < 0 and np.mean(off < 0) > 0.9))


def _constant(data: PairData, side: Side, value: float, where: np.ndarray) -> Finding:
    own, others, tokens, off = side.values, side.others, data.sample.tokens[data.keep], side.others[where] - value
    ids, mean = np.unique(tokens[where]), float(np.mean(others[where]))
    usual = mean if where.all() else float(np.mean(others[~where]))
    every, seq = data.marked(where), data.sample.seq
    num_runs = int((every & ~np.r_[False, every[:-1] & (np.diff(seq) == 0)]).sum())
    is_improbable, varies = mean < min(1.5 * usual, usual - 1), bool(np.ptp(own[where]) > 0)
    reason, cause = "none", ""
    if is_improbable:
        at_end = np.mean((np.r_[every[1:], True] | np.r_[np.diff(seq) != 0, True])[every]) > 0.99
        if where.sum() >= 2 * num_runs:
            reason = "after_end" if at_end else "improbable"
        # A token sampled at 1 of k positions has a probability of about 1/k. Appended tokens are far less probable.
        elif at_end and np.median(others[where]) < np.log(where.mean()) - 2:
            reason = cause = "appended"
    if value < 0 and value == own.min() and np.mean(others[where] < value + 0.1) > 0.95:
        reason, cause = "floor", ""
    is_filled = not varies and value.is_integer() and np.any(own[~where] % 2**-8)
    if value <= IMPOSSIBLE_LOGPROB:
        if not is_filled and len(ids) < where.sum() / 2 and not np.isin(tokens[~where], ids).any():
            cause = "forbidden"
        elif is_improbable and varies and where.sum() < 1.5 * num_runs:
            cause = "masked"
    chosen = f"<= {IMPOSSIBLE_LOGPROB}" if varies else f"= {value!r}::FLOAT"
    is_cut = cause in ("forbidden", "masked")
    fault = TRUNCATION if is_cut else PLACEHOLDERS if reason in ("none", "floor") else NOT_SAMPLED
    numbers = side.names | counts(data, where) | {"value": value, "num_ids": len(ids), "other_mean": mean}
    numbers |= {"other_min": float(np.min(others[where])), "elsewhere_mean": usual, "reason": reason, "cause": cause}
    numbers |= {"token_id": int(ids[0])} if len(ids) == 1 else {}
    effect, next = float(np.sqrt(np.mean(off**2))), commands.tokens(data, f"logprob_{side.key} {chosen}")
    return fault.finding(data, cause if is_cut else "constant", where, effect=effect, next=next, numbers=numbers)


def find_shared_constants(data: PairData) -> Iterator[Hypothesis]:
    """Detect placeholders for missing logprobs in both passes."""
    keys, ids = data.sample.token_keys[data.keep], data.sample.tokens[data.keep]
    same = data.a == data.b
    values, num = np.unique(data.a[same], return_counts=True)
    often = np.argsort(-num, kind="stable")[:MAX_CONSTANTS]
    for value in values[often[num[often] > _REPEATED_FACTOR**2]].tolist():
        where = same & (data.a == value)
        # Count each context only once, because a repeated context repeats its value.
        num_contexts, num_ids = (len(np.unique(each[where])) for each in (keys, ids))
        if num_ids < FEW_CONSTANTS or num_contexts <= _REPEATED_FACTOR**2 * _by_chance(data, value, where):
            continue
        next = commands.tokens(data, f"logprob_a = {value!r}::FLOAT AND logprob_b = logprob_a")
        numbers = {**data.names, **counts(data, where), "value": value}
        yield certain(PLACEHOLDERS.finding(data, "constant_in_both", where, effect=0.0, next=next, numbers=numbers))


def _by_chance(data: PairData, value: float, where: np.ndarray) -> float:
    """Return how often `value` can repeat by chance, or infinity if it can be the logprob of many tokens."""
    if value == 0.0:
        # At high entropies, zeros are wrong, unless the entropies belong to the unfiltered distribution.
        if data.entropy is None or recorded_filter(data):
            return np.inf
        is_certain = np.mean(data.entropy[where]) <= max(0.1, 0.25 * np.mean(data.entropy[~where]))
        return np.inf if is_certain else 1.0
    ties = -np.log(np.arange(2, 9))
    if value > -_WINDOW_NATS or np.any(np.abs(value - ties) <= half_ulp(ties, "bfloat16")):
        # Near 0, many tokens share a float32 value, and tied logits give -ln 2, -ln 3, ...
        return np.inf
    steps = data.sample.steps[data.seq]
    size = np.exp(-value)
    if abs(size - round(size)) < 1e-5 * size and where[np.isin(steps, steps[where])].mean() > 0.95:
        return np.inf  # the policy is uniform, such as one with a new head of zeros
    # 16-bit values are sparse, so search for nearby values in a wider window.
    width = _WINDOW_NATS if all(side.values == "float32" for side in precisions(data)) else 0.5
    return _repeats(data.a[~where], value, width)


def _repeats(logprobs: np.ndarray, value: float, width: float, quantile: float = 0.9) -> float:
    _, num = np.unique(logprobs[np.abs(logprobs - value) < width], return_counts=True)
    return float(np.quantile(num, quantile)) if len(num) else 1.0


def find_constant_rows(data: PairData) -> Iterator[Hypothesis]:
    """Detect a pass that has the same value at all tokens of a sequence."""
    num = np.bincount(data.seq, minlength=data.sample.num_sequences)
    for side in sides(data):
        own, others = (means(values, data.seq, len(num)) for values in (side.values, side.others))
        away = (side.values - own[data.seq], side.others - others[data.seq])
        spread, of_others = (np.sqrt(means(each**2, data.seq, len(num))) for each in away)
        asked = (num >= 3) & (of_others > 0.05)
        if asked.sum() < 3 or not np.all(spread[asked] < 1e-3) or np.std(side.values) < 1e-3:
            continue
        off_sum, off_mean = np.abs(own - others * num)[asked], np.abs(own - others)[asked]
        what = "sum" if np.median(off_sum) < np.median(off_mean) else "mean"
        numbers = {**side.names, **counts(data), "what": what}
        finding = PLACEHOLDERS.finding(data, "constant_rows", next=commands.tokens(data), numbers=numbers)
        yield predicting(data, finding, np.zeros(data.num_kept), 5.0 * asked.sum())
        return


def find_equal(data: PairData) -> list[Finding]:
    """Detect passes that are bitwise equal everywhere, or in whole sequences despite different dtypes. With the same
    dtype, equal bits in some sequences, such as those without padding, are not a fault."""
    if not data.num_kept:
        return []
    differing = _differing(data.contract("a"), data.contract("b"))
    numbers: dict[str, Number] = {"num_tokens": data.num_kept, **data.names, **differing}
    if not data.d.any() and differing:
        # Two engines may be designed to give the same bits, but two dtypes never give the same bits everywhere.
        next, expected = commands.replay(data, "", "as-recorded"), "dtype_a" not in differing
        return [COPIES.finding(data, "equal_against_contracts", is_expected=expected, next=next, numbers=numbers)]
    if not data.d.any():
        numbers["contracts_known"] = int(bool(data.contract("a") and data.contract("b")))
        return [EQUAL.finding(data, "equal_bits", numbers=numbers)]
    if found := _copied_since(data):
        return found
    num = data.sample.num_sequences
    telling = np.bincount(data.seq, data.b < -1e-3, num)
    equal = np.bincount(data.seq, (data.d == 0.0) & (data.b < -1e-3), num)
    copied = (telling >= 4) & (equal == telling)
    elsewhere = float(equal[~copied].sum() / max(telling[~copied].sum(), 1))
    by_chance = num * max(elsewhere, 1e-3) ** telling.max(where=copied, initial=0)
    if "dtype_a" not in differing or not copied.any() or by_chance > 1e-4:
        return []
    tokens, next = copied[data.seq], commands.stats(data, "sequence")
    numbers = {**counts(data, tokens), **differing}
    return [COPIES.finding(data, "copied_rows", tokens, effect=0.0, next=next, numbers=numbers)]


def _copied_since(data: PairData) -> list[Finding]:
    """Report a pass that copies the other from some step on, although the contracts stay the same."""
    known = np.unique(steps := data.sample.steps[data.seq])
    telling = data.b < -1e-3  # both passes give certain tokens a logprob of exactly 0, so equal zeros prove nothing
    equal = np.array([not data.d[steps == step].any() and telling[steps == step].any() for step in known])
    since = int(np.argmax(equal))
    if since < 2 or len(known) - since < 2 or not equal[since:].all():
        return []
    later = steps >= known[since]
    before = ~later & telling
    share = float(np.mean(data.d[before] != 0)) if before.any() else 0.0
    a, b = (np.array(side.contracts, str) for side in (data.sample.a, data.sample.b))
    now, then = ({*a[data.seq[part]], *b[data.seq[part]]} for part in (later, ~later))
    if share < 0.5 or now != then:
        return []
    numbers = data.names | counts(data, later) | {"since_equal": int(known[since]), "share_before": share}
    return [COPIES.finding(data, "copied_steps", later, effect=0.0, next=commands.stats(data, "step"), numbers=numbers)]


def _differing(a: Contract, b: Contract) -> dict[str, str]:
    sides = {"engine": (declared(a, "engine"), declared(b, "engine")), "dtype": (dtype_of(a), dtype_of(b))}
    differing = {name: pair for name, pair in sides.items() if all(pair) and pair[0] != pair[1]}
    # The engine `exact` is built to give the same bits as another engine with the same dtype.
    if "exact" in sides["engine"] and len(differing) < 2:
        return {}
    return {f"{name}_{side}": str(pair["ab".index(side)]) for name, pair in differing.items() for side in "ab"}
