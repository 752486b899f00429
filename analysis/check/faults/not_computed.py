"""Values that no forward pass computed for the sampled token (missing, constant or copied), and tokens that were never
sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ....schemas.documents import Contract
from .. import commands
from ..finding import Broken, Fault, Finding, Hypothesis, Number, predicting
from ..pair_data import PairData, declared, dtype_of, half_ulp, precisions
from ..sample import MIN_UNSAMPLED_RUN, UNSAMPLED_NATS, PassSample, run_lengths
from .sampling import IMPOSSIBLE_LOGPROB, TRUNCATION, recorded_filter

MIN_MISSING_SHARE = 1e-4
"""Minimum share of NULL logprobs for a finding. A smaller share comes from cut-off sequences, which `stats` counts."""
MAX_CONSTANTS = 20
MIN_CONSTANT_TOKENS = 3
"""Minimum tokens (and token ids) that must share a value before it can count as a placeholder."""
_SHARED_FACTOR = 10
"""A value found in both passes is a placeholder if its contexts outnumber those of nearby values by this factor."""
_REPEATED_FACTOR = 3
"""Corresponding factor for a value found in only one pass."""
_WINDOW_NATS = 0.05
"""Maximum distance between a constant and nearby values (nats). Nearby values show how often a value repeats by chance.
"""
MAX_LEFT_BY_MERGING = 0.3
"""Maximum fraction of the mismatch that sums over neighbours may leave."""
MIN_COPIED_TOKENS = 4
"""A row counts as copied only if at least this many logprobs below -1e-3 nats are bitwise equal."""
COPIED_BY_CHANCE = 1e-4
"""Maximum rows expected to be equal by chance, given how often tokens are equal in all other rows."""
_EVIDENCE = {
    "missing": "{side} has {value} where {other} has a logprob, for {num_tokens:,} tokens {at}",
    "missing_in_both": "neither {side} nor {other} has a finite logprob ({side}: {value}) for {num_tokens:,} tokens {at}",
    "missing_elsewhere": "{a} or {b} has NaN or infinity for {num_tokens:,} tokens at steps that were not inspected individually",
    "unlikely_runs": "in {num_sequences:,} of {of_sequences:,} sequences, runs of consecutive tokens "
    "({num_tokens:,} in all) have a mean logprob of {mean_logprob:.3g} nats on both sides and a mean entropy of "
    "{mean_entropy:.3g}, so these tokens come from a prompt or a tool, not from sampling, but are included in the loss",
    "constant": "{side} is {value:g} for {num_tokens:,} tokens in {num_sequences:,} sequences, where {other} has "
    "{other_mean:.3g} nats on average and {other_min:.3g} at the lowest{reason_text}",
    "merged": "{side} is 0 for {num_tokens:,} tokens, and the token {where} them has their logprobs added to its own "
    "({other}'s sums agree to {residual:.2g} nats), as if several tokens arrived as one, in {num_sequences:,} sequences",
    "constant_in_both": "{a} and {b} are both {value:g} for {num_tokens:,} tokens in {num_sequences:,} sequences and "
    "different contexts, far more often than any nearby value",
    "constant_rows": "{side} has the same value for all tokens of a sequence while {other} varies: each of the "
    "{num_tokens:,} tokens has {what} over its sequence instead of its logprob",
    "equal_bits": "all {num_tokens:,} tokens of {a} and {b} are bitwise equal, and {contracts_text}",
    "equal_against_contracts": "all {num_tokens:,} tokens of {a} and {b} are bitwise equal, although their contracts "
    "name {differing}: {copied_text}",
    "copied_steps": "{a} and {b} are bitwise equal at all {num_tokens:,} tokens from step {since_equal} on, but "
    "differ at {share_before:.0%} of the earlier tokens, with the same contracts, so one is a copy of the other "
    "from that step on",
    "shifted_mask": "{side} has no logprob for {num_tokens:,} tokens in the loss, nearly all at the {end} of a run of "
    "such tokens, but has logprobs for {num_left_out:,} masked tokens next to such runs, so the loss mask is one token "
    "{late}",
    "reference": "reference and train are bitwise equal at all {num_tokens:,} tokens inspected, in {num_steps:,} steps, "
    "but train and rollout differ by more than rounding, so train may contain the reference's logprobs",
    "copied_rows": "{num_sequences:,} of {of_sequences:,} sequences are bitwise equal in both passes, although their "
    "contracts name {differing}, so one pass is a copy of the other in these sequences",
}
_REASONS = {
    "improbable": "; elsewhere, {other}'s logprobs average {elsewhere_mean:.3g}, so these tokens were not sampled from the policy",
    "appended": "; elsewhere, {other}'s logprobs average {elsewhere_mean:.3g}, and all these tokens are the last of their "
    "response, so they were appended after sampling",
    "after_end": "; these tokens follow the response's first end token, so padding is included in the loss",
    "floor": "; every token with a lower logprob in {other} has this value in {side}, so {side} is clamped there",
    "none": "",
}


def _at(numbers: Mapping[str, Any]) -> dict[str, str]:
    places = {
        "scattered": "scattered over {num_sequences:,} sequences",
        "whole": "(every token of {num_sequences:,} of {of_sequences:,} sequences)",
    }
    at = places.get(numbers["place"], "at the {place} of {num_sequences:,} of {of_sequences:,} sequences")
    return {"at": at.format_map(numbers)}


def _differences(n: Mapping[str, Any]) -> dict[str, str]:
    differing = [
        f"different {what}s ({n[f'{what}_a']} and {n[f'{what}_b']})" for what in ("engine", "dtype") if f"{what}_a" in n
    ]
    never = "two such forward passes are never bitwise equal, so one was copied from the other"
    maybe = "one was copied from the other, or the two are built to be bitwise equal: replay to find out"
    return {"differing": " and ".join(differing), "copied_text": never if "dtype_a" in n else maybe}


_WORDS = {
    "missing": _at, "missing_in_both": _at, "constant": lambda n: {"reason_text": _REASONS[n["reason"]].format_map(n)},
    "equal_bits": lambda n: {
        "contracts_text": "their contracts describe the same numerics"
        if n["contracts_known"]
        else "no contract gives a reason for them to differ"
    },
    "equal_against_contracts": _differences, "copied_rows": _differences,
}  # fmt: skip


def _fault(code: str, title: str, *signals: str, **causes: str) -> Fault:
    evidence = {signal: _EVIDENCE[signal] for signal in signals}
    broken: Broken | None = None if code == "equal" else "recording"
    return Fault(code=code, title=title, broken=broken, evidence=evidence, words=_WORDS, causes=causes)


_MISSING = ("missing", "missing_in_both", "missing_elsewhere")
LENGTHS = _fault("lengths", "tokens are missing on one side", *_MISSING)
HOLES = _fault(
    "placeholders", "missing values instead of logprobs", *_MISSING,
    impossible="one side gives sampled tokens a probability of 0: it cuts off or forbids tokens that the other side sampled",
    not_finite="one side computed NaN or infinity instead of logprobs",
)  # fmt: skip
PLACEHOLDERS = _fault(
    "placeholders", "placeholders instead of logprobs", "constant", "constant_in_both", "constant_rows"
)
MERGED = _fault("log_base", "one side's logprobs are sums over several tokens", "merged")
NOT_SAMPLED = _fault(
    "mask", "prompt, tool or padding tokens are included in the loss", "constant",
    appended="tokens that were not sampled are at the end of responses and included in the loss",
)  # fmt: skip
MASK = _fault("mask", "prompt or tool tokens are included in the loss", "unlikely_runs")
COPIES = _fault(
    "copies", "one pass is a copy of the other", "equal_against_contracts", "copied_rows", "copied_steps", "reference",
    reference="the reference's logprobs are stored as the trainer's",
)  # fmt: skip
SHIFTED_MASK = _fault("mask", "the loss mask is shifted by one token", "shifted_mask")
EQUAL = _fault("equal", "bitwise equal", "equal_bits")


def reference_copied(data: PairData, numbers: Mapping[str, Number]) -> Finding:
    return COPIES.finding(
        data, "reference", next=commands.stats(data, "step"), numbers={**numbers, "cause": "reference"}, weight=0.5
    )


def find_missing(data: PairData) -> list[Finding]:
    """Detect NULL, NaN and infinite logprobs. At the ends of sequences they indicate truncation, elsewhere lost values.

    A NULL is reported only if the other pass has a value. NaN and infinity are always reported, even at steps that are
    not inspected, because a sampled token has a finite logprob.
    """
    sample = data.sample
    sides = (sample.a, sample.b)
    lost_a, lost_b = (sample.mask & ~np.isfinite(side.logprobs) for side in sides)
    null_a, null_b = (side.is_null for side in sides)
    missing = (
        _missing(data, *sides, lost_a & ~lost_b, null_a), _missing(data, *sides[::-1], lost_b & ~lost_a, null_b),
        _missing(data, *sides, lost_a & lost_b & ~(null_a & null_b), null_a & null_b, signal="missing_in_both"),
    )  # fmt: skip
    found = [finding for finding in missing if finding is not None]
    found = [_shifted_mask(data, each) or each for each in found]
    elsewhere = data.sums.num_not_finite - int(((lost_a & ~null_a) | (lost_b & ~null_b)).sum())
    if elsewhere > 0:
        share = float(elsewhere / max(data.sums.num_tokens + data.sums.num_not_finite, 1))
        found.append(
            HOLES.finding(
                data, "missing_elsewhere", np.zeros(data.num_kept, bool), effect=float("nan"), share=share, next=commands.stats(data, "step"),
                numbers={"num_tokens": elsewhere, **data.names},
            )
        )  # fmt: skip
    return found


def _missing(
    data: PairData, side: PassSample, other: PassSample, missing: np.ndarray, null: np.ndarray, signal: str = "missing"
) -> Finding | None:
    sample, num = data.sample, int(missing.sum())
    share = num / max(int(sample.mask.sum()), 1)
    nulls, values, seq, position = null[missing], side.logprobs[missing], sample.seq[missing], sample.position[missing]
    if not num or (nulls.all() and share < MIN_MISSING_SHARE):
        return None
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
    return (LENGTHS if cut and not cause else HOLES).finding(
        data, signal, np.zeros(data.num_kept, bool), effect=float("nan"), share=float(share),
        next=commands.sql(
            data,
            "SELECT step, seq_id, count(*) AS num_tokens, count(*) FILTER (isfinite(logprob)) AS num_scored FROM "
            f"(SELECT step, seq_id, unnest(logprobs) AS logprob FROM scores WHERE \"pass\" = '{side.name}') "
            "GROUP BY ALL HAVING num_scored < num_tokens ORDER BY ALL LIMIT 20",
        ),
        numbers={
            "side": side.name, "other": other.name, "num_tokens": num, "num_sequences": len(rows),
            "of_sequences": sample.num_sequences, "place": place if cut else "scattered",
            "value": next((kind for kind, has in kinds.items() if has.all()), "NaN"), "cause": cause,
        },
    )  # fmt: skip


def _shifted_mask(data: PairData, finding: Finding) -> Finding | None:
    sample, names = data.sample, {data.sample.a.name: data.sample.a, data.sample.b.name: data.sample.b}
    side = names.get(str(finding.numbers.get("side")))
    if side is None:
        return None
    has, joined = np.isfinite(side.logprobs), np.diff(sample.seq) == 0
    before = {name: np.r_[False, each[:-1] & joined] for name, each in (("mask", sample.mask), ("has", has))}
    after = {name: np.r_[each[1:] & joined, False] for name, each in (("mask", sample.mask), ("has", has))}
    missing, left_out = sample.mask & ~has, has & ~sample.mask
    for late, end, inside, outside in (("late", "end", before, after), ("early", "beginning", after, before)):
        at_end = missing & inside["has"] & ~outside["mask"]
        beside = left_out & outside["mask"]
        if at_end.sum() > 0.9 * missing.sum() and beside.sum() > 0.5 * missing.sum():
            return SHIFTED_MASK.finding(
                data, "shifted_mask", np.zeros(data.num_kept, bool), effect=float("nan"), share=finding.share, next=finding.next,
                numbers={"side": side.name, "num_tokens": int(missing.sum()), "num_left_out": int(beside.sum()), "end": end, "late": late},
            )  # fmt: skip
    return None


def find_unsampled(data: PairData) -> list[Hypothesis]:
    """Detect runs of tokens whose logprob is far below the negative entropy in both passes. Needs recorded entropies.

    For sampled tokens, logprob + entropy averages 0. Entropy rises after an improbable token, so improbable tokens
    rarely follow each other.
    """
    entropy = data.entropy
    if entropy is None:
        return []
    likely = np.maximum(data.a, data.b)
    unlikely = likely + entropy < UNSAMPLED_NATS
    runs = unlikely & (run_lengths(unlikely, data.seq) >= MIN_UNSAMPLED_RUN)
    rows = np.unique(data.seq[runs])
    present = len(np.unique(data.seq))
    if len(rows) < max(4, 0.05 * present):
        return []
    finding = MASK.finding(
        data, "unlikely_runs", runs, weight=0.9, next=commands.row(data, int(rows[0])),
        numbers={
            "num_tokens": int(runs.sum()), "num_sequences": len(rows), "of_sequences": present,
            "mean_logprob": float(likely[runs].mean()), "mean_entropy": float(entropy[runs].mean()),
        },
    )  # fmt: skip
    return [Hypothesis(finding=finding, tokens=data.marked(runs), gain=float("inf"))]


def find_constants(data: PairData) -> list[Hypothesis]:
    found = []
    for side, other in ((data.sample.a, data.sample.b), (data.sample.b, data.sample.a)):
        values, counts = np.unique(side.logprobs[data.keep], return_counts=True)
        often = np.argsort(-counts, kind="stable")[:MAX_CONSTANTS]
        tested = {*often[counts[often] >= MIN_CONSTANT_TOKENS].tolist()}
        masks = [(value, data.keep & (side.logprobs == value)) for value in values[sorted(tested)].tolist()]
        # Values from masked logits are not all equal, because the normaliser differs.
        if len(impossible := values[values <= IMPOSSIBLE_LOGPROB]):
            masks.append((float(np.median(impossible)), data.keep & (side.logprobs <= IMPOSSIBLE_LOGPROB)))
        for value, where in masks:
            if _stands_for_none(data, side, other, value, where):
                far = where & (np.abs(other.logprobs - value) > 0.1)
                if value == 0.0 and far.sum() < 0.02 * where.sum():  # a certain token has a logprob of 0
                    where = far
                finding = _constant(data, side, other, value, where)
                zeros = np.zeros(data.num_kept)
                found.append(predicting(data, finding, zeros, np.log(data.num_kept), where[data.keep]))
    return found


def find_merged(data: PairData) -> list[Hypothesis]:
    """Detect tokens whose logprob is 0 because it was added to a neighbour's."""
    found, same = [], np.diff(data.seq) == 0
    for side, own, other in (("a", data.a, data.b), ("b", data.b, data.a)):
        zero = own == 0
        far = zero & (other < -0.05)
        if far.sum() < MIN_CONSTANT_TOKENS:
            continue
        for where in ("before", "after"):
            # Each token that is not 0 starts a group, or ends it.
            group = np.cumsum(np.r_[True, ~(same & (zero[1:] if where == "before" else zero[:-1]))]) - 1
            lead = ~zero & (np.bincount(group, zero)[group] > 0)
            residual = np.where(lead, own - np.bincount(group, other)[group], 0.0)
            tokens = np.bincount(group, lead)[group] > 0
            if far[tokens].sum() < 0.8 * far.sum():
                continue
            size = float(np.median(np.abs(residual[lead])))
            finding = MERGED.finding(
                data, "merged", tokens, next=commands.tokens(data, f"logprob_{side} = 0"),
                numbers={
                    "side": data.names[side], "other": data.names["b" if side == "a" else "a"], "where": where,
                    "num_tokens": int(far.sum()), "num_sequences": len(np.unique(data.seq[tokens & far])), "residual": size,
                },
            )  # fmt: skip
            hypothesis = predicting(data, finding, residual, 2.0, tokens)
            found += [hypothesis] if hypothesis.left is not None and hypothesis.left < MAX_LEFT_BY_MERGING else []
    return found


def _stands_for_none(data: PairData, side: PassSample, other: PassSample, value: float, where: np.ndarray) -> bool:
    """Return True if `value`, found in one pass at `where` ([N] bool), stands for a missing logprob."""
    rest = data.keep & ~where
    off = other.logprobs[where] - value
    if value <= IMPOSSIBLE_LOGPROB:
        return bool(np.median(np.abs(off)) > abs(value) / 2)
    usual, large = np.quantile(np.abs(data.sample.d[rest]), [0.5, 0.9]) if rest.any() else (0.0, 0.0)
    far = np.abs(off) > max(0.1, 10 * usual, large)
    if far.sum() < 2 or np.std(off) <= 0.05 or -1e-5 < value < 0:
        return False
    if value != 0.0:
        kinds = (data.sample.tokens[where], data.sample.prefix_keys[where])
        num = min(len(np.unique(kind)) for kind in kinds)
        if len(off) < 8 or far.mean() <= 0.5 or num < MIN_CONSTANT_TOKENS:
            return False
        # 16-bit logits repeat values. For example, the likelier of two tokens whose logits differ by 1 has a logprob of
        # -0.3133.
        if num <= _REPEATED_FACTOR * _repeats(side.logprobs, data.keep & ~where, value, 0.5):
            return False
    elsewhere = np.abs(other.logprobs[rest] - value)
    if value == 0.0:  # correct for certain tokens and for tokens that are alone in their nucleus
        uncertain = np.abs(off) > 0.02
        if np.isin(data.sample.tokens[rest], data.sample.tokens[where][uncertain]).sum() < uncertain.sum() / 4:
            return True  # these ids nearly always have it
        off, elsewhere = off[uncertain], elsewhere[elsewhere > 0.02]
    usual = np.median(elsewhere) if len(elsewhere) else 0.0
    return bool(np.median(np.abs(off)) > usual / 2 or (value < 0 and np.mean(off < 0) > 0.9))


def _constant(data: PairData, side: PassSample, other: PassSample, value: float, where: np.ndarray) -> Finding:
    sample, own, others = data.sample, side.logprobs[data.keep], other.logprobs
    rest = data.keep & ~where
    mean = float(np.mean(others[where]))
    usual = float(np.mean(others[rest])) if rest.any() else mean
    num_runs = int((where & ~np.r_[False, where[:-1] & (np.diff(sample.seq) == 0)]).sum())
    is_last = np.r_[np.diff(sample.seq) != 0, True]
    reason = "none"
    if mean < min(1.5 * usual, usual - 1):
        at_end = np.mean((np.r_[where[1:], True] | is_last)[where]) > 0.99
        if where.sum() >= 2 * num_runs:
            reason = "after_end" if at_end else "improbable"
        # A token sampled at 1 of k positions has a probability of about 1/k.
        elif at_end and np.median(others[where]) < np.log(where.sum() / data.num_kept) - 2:
            reason = "appended"
    if value < 0 and value == own.min() and np.mean(others[where] < value + 0.1) > 0.95:
        reason = "floor"
    cause, is_impossible = reason if reason == "appended" else "", value <= IMPOSSIBLE_LOGPROB
    is_filled = np.ptp(side.logprobs[where]) == 0 and value.is_integer() and np.any(side.logprobs[rest] % 2**-8)
    ids = np.unique(sample.tokens[where])
    if is_impossible and not is_filled and len(ids) < where.sum() / 2 and not np.isin(sample.tokens[rest], ids).any():
        cause = "forbidden"
    elif (
        is_impossible
        and mean < min(1.5 * usual, usual - 1)
        and where.sum() < 1.5 * num_runs
        and np.ptp(side.logprobs[where]) > 0
    ):
        cause = "masked"
    chosen = f"<= {IMPOSSIBLE_LOGPROB}" if np.ptp(side.logprobs[where]) > 0 else f"= {value!r}::FLOAT"
    is_cut = cause in ("forbidden", "masked")
    fault = TRUNCATION if is_cut else PLACEHOLDERS if reason in ("none", "floor") else NOT_SAMPLED
    return fault.finding(
        data, cause if is_cut else "constant", where[data.keep], effect=float(np.sqrt(np.mean((others[where] - value) ** 2))),
        next=commands.tokens(data, f"logprob_{'a' if side is sample.a else 'b'} {chosen}"),
        numbers={
            "side": side.name, "other": other.name, "value": value, "num_ids": len(ids), "num_tokens": int(where.sum()),
            "num_sequences": len(np.unique(sample.seq[where])), "other_mean": mean,
            "other_min": float(np.min(others[where])), "elsewhere_mean": usual, "reason": reason, "cause": cause,
        },
    )  # fmt: skip


def find_shared_constants(data: PairData) -> list[Hypothesis]:
    sample, found = data.sample, []
    same = data.keep & (sample.a.logprobs == sample.b.logprobs)
    values, counts = np.unique(sample.a.logprobs[same], return_counts=True)
    often = np.argsort(-counts, kind="stable")[:MAX_CONSTANTS]
    for value in values[often[counts[often] > _SHARED_FACTOR]].tolist():
        where = same & (sample.a.logprobs == value)
        # Contexts are counted only once, because a repeated context repeats the value.
        contexts, ids = (len(np.unique(each[where])) for each in (sample.token_keys, sample.tokens))
        if ids < MIN_CONSTANT_TOKENS or contexts <= _SHARED_FACTOR * _by_chance(data, value, where):
            continue
        finding = PLACEHOLDERS.finding(
            data, "constant_in_both", where[data.keep], effect=0.0,
            next=commands.tokens(data, f"logprob_a = {value!r}::FLOAT AND logprob_b = logprob_a"),
            numbers={
                **data.names, "value": value, "num_tokens": int(where.sum()), "num_sequences": len(np.unique(sample.seq[where])),
            },
        )  # fmt: skip
        found.append(Hypothesis(finding=finding, tokens=where, gain=float("inf")))
    return found


def _by_chance(data: PairData, value: float, where: np.ndarray) -> float:
    if value == 0.0:
        # A token with probability 1 has an entropy of 0. A recorded filter can cause that even if the recorded entropy
        # is that of the unfiltered distribution.
        if data.entropy is None or recorded_filter(data):
            return np.inf
        inside = where[data.keep]
        is_certain = np.mean(data.entropy[inside]) <= max(0.1, 0.25 * np.mean(data.entropy[~inside]))
        return np.inf if is_certain else 1.0
    ties = -np.log(np.arange(2, 9))
    if value > -_WINDOW_NATS or np.any(np.abs(value - ties) <= half_ulp(ties, "bfloat16")):
        return np.inf  # near 0, many tokens share a float32 value, and tied logits give -ln 2, -ln 3, ...
    # 16-bit values are sparse, so nearby values are searched for in a wider window.
    width = _WINDOW_NATS if all(side.values == "float32" for side in precisions(data)) else 0.5
    return _repeats(data.sample.a.logprobs, data.keep & ~where, value, width)


def _repeats(logprobs: np.ndarray, tokens: np.ndarray, value: float, width: float) -> float:
    _, counts = np.unique(logprobs[tokens & (np.abs(logprobs - value) < width)], return_counts=True)
    return float(np.quantile(counts, 0.9)) if len(counts) else 1.0


def find_constant_rows(data: PairData) -> list[Hypothesis]:
    for side, other, values, others in (("a", "b", data.a, data.b), ("b", "a", data.b, data.a)):
        spread = _spreads(data, values)
        asked = np.isfinite(spread) & (_spreads(data, others) > 0.05)
        if asked.sum() >= 3 and np.all(spread[asked] < 1e-3) and np.std(values) > 1e-3:
            count = np.maximum(np.bincount(data.seq, minlength=len(spread)), 1)
            own, sums = (np.bincount(data.seq, each, len(spread)) for each in (values, others))
            off_sum, off_mean = np.abs(own / count - sums)[asked], np.abs(own - sums)[asked] / count[asked]
            finding = PLACEHOLDERS.finding(
                data, "constant_rows", next=commands.tokens(data),
                numbers={
                    "side": data.names[side], "other": data.names[other], "num_tokens": data.num_kept,
                    "what": "a sum" if np.median(off_sum) < np.median(off_mean) else "a mean",
                },
            )  # fmt: skip
            return [predicting(data, finding, np.zeros(data.num_kept), 5.0 * asked.sum())]
    return []


def _spreads(data: PairData, values: np.ndarray) -> np.ndarray:
    count = np.bincount(data.seq, minlength=data.sample.num_sequences)
    mean = np.bincount(data.seq, values, len(count)) / np.maximum(count, 1)
    squares = np.bincount(data.seq, (values - mean[data.seq]) ** 2, len(count))
    return np.where(count >= 3, np.sqrt(squares / np.maximum(count, 1)), np.nan)


def find_equal(data: PairData) -> list[Finding]:
    """Detect passes that are bitwise equal everywhere, or in whole sequences despite different dtypes.

    With the same dtype, both passes can produce the same bits for some sequences, such as those without padding.
    """
    if not data.num_kept:
        return []
    differing = _differing(data.contract("a"), data.contract("b"))
    if not data.d.any():
        numbers: dict[str, Number] = {"num_tokens": data.num_kept, **data.names}
        if differing:
            # Two engines can be built to give equal bits, but two dtypes cannot.
            return [
                COPIES.finding(
                    data, "equal_against_contracts", is_expected="dtype_a" not in differing,
                    next=commands.replay(data, "", "as-recorded"), numbers=numbers | differing,
                )
            ]  # fmt: skip
        known = bool(data.contract("a") and data.contract("b"))
        return [EQUAL.finding(data, "equal_bits", numbers=numbers | {"contracts_known": int(known)})]
    size = data.sample.num_sequences
    if found := _copied_since(data):
        return found
    num, telling, equal = (
        np.bincount(data.seq, each, minlength=size)
        for each in (None, data.b < -1e-3, (data.d == 0.0) & (data.b < -1e-3))
    )
    copied = (telling >= MIN_COPIED_TOKENS) & (equal == telling)
    elsewhere = float(equal[~copied].sum() / max(telling[~copied].sum(), 1))
    expected = size * max(elsewhere, 1e-3) ** telling.max(where=copied, initial=0)
    if "dtype_a" not in differing or not copied.any() or expected > COPIED_BY_CHANCE:
        return []
    return [
        COPIES.finding(
            data, "copied_rows", copied[data.seq], effect=0.0, next=commands.stats(data, "sequence"),
            numbers={"num_sequences": int(copied.sum()), "of_sequences": int((num > 0).sum()), **differing},
        )
    ]  # fmt: skip


def _copied_since(data: PairData) -> list[Finding]:
    steps = data.sample.steps[data.seq]
    known = np.unique(steps)
    equal = np.array([not data.d[steps == step].any() for step in known])
    since = int(np.argmax(equal))
    if since < 2 or len(known) - since < 2 or not equal[since:].all():
        return []
    later = steps >= known[since]
    telling = data.b[~later] < -1e-3
    share = float(np.mean(data.d[~later][telling] != 0)) if telling.any() else 0.0
    contracts = [
        {
            name
            for row in np.unique(data.seq[part])
            for name in (data.sample.a.contracts[row], data.sample.b.contracts[row])
        }
        for part in (later, ~later)
    ]
    if share < 0.5 or contracts[0] != contracts[1]:
        return []
    return [
        COPIES.finding(
            data, "copied_steps", later, effect=0.0, next=commands.stats(data, "step"),
            numbers={**data.names, "since_equal": int(known[since]), "num_tokens": int(later.sum()), "share_before": share},
        )
    ]  # fmt: skip


def _differing(a: Contract, b: Contract) -> dict[str, str]:
    sides = {"engine": (declared(a, "engine"), declared(b, "engine")), "dtype": (dtype_of(a), dtype_of(b))}
    differing = {name: pair for name, pair in sides.items() if all(pair) and pair[0] != pair[1]}
    # With the same dtype, the engine `exact` gives the same bits as another engine.
    if "exact" in sides["engine"] and len(differing) < 2:
        return {}
    return {
        f"{name}_{side}": str(value) for name, pair in differing.items() for side, value in zip("ab", pair, strict=True)
    }
