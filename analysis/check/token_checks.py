"""Check the sampled rows' tokens: masks, padding, end tokens, finish reasons, entropies and policy versions.

Shapes: N sampled tokens in S rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .data_finding import DataFinding
from .sample import MIN_UNSAMPLED_RUN, UNSAMPLED_NATS, PassSample, Sample, run_lengths
from .where import part_of_rows, rank_of

Find = Callable[..., Iterator[DataFinding]]


def token_findings(sample: Sample, find: Find) -> Iterator[DataFinding]:
    """Check the sample's tokens. Some checks need the engine's pass."""
    if "rollout" in (sample.a.name, sample.b.name):
        engine, other = (sample.a, sample.b) if sample.a.name == "rollout" else (sample.b, sample.a)
        for check in (_unsampled, _repeated, _masked):
            yield from check(sample, engine, other, find)
    yield from _ends(sample, find)
    yield from _entropies(sample, find)


def _repeats_end(sample: Sample) -> np.ndarray:
    """Return which tokens at the row's end only repeat the previous token, [N] bool."""
    differs = sample.tokens != sample.tokens[np.maximum(sample.starts[1:] - 1, 0)][sample.seq]
    last_other = sample.starts[:-1] - 1
    np.maximum.at(last_other, sample.seq[differs], np.flatnonzero(differs))
    return np.asarray(np.arange(len(sample.tokens)) > last_other[sample.seq] + 1)


def _rows(sample: Sample, tokens: np.ndarray) -> np.ndarray:
    """Return the rows that contain any of `tokens` ([N] bool), [S] bool."""
    return np.bincount(sample.seq[tokens], minlength=sample.num_sequences) > 0


def _unsampled(sample: Sample, engine: PassSample, other: PassSample, find: Find) -> Iterator[DataFinding]:
    """Find padding and tool tokens in the loss."""
    certain = (engine.logprobs == 0) & (other.logprobs < 0)
    if certain.any() and other.logprobs[certain].mean() > -0.1:  # probabilities rounded to 1
        certain[:] = False
    entropy = next((side.entropy for side in (other, engine) if side.entropy is not None), np.nan)
    with np.errstate(invalid="ignore"):
        unlikely = np.fmax(engine.logprobs, other.logprobs) + entropy < UNSAMPLED_NATS
    missing = sample.mask & (certain | ~np.isfinite(engine.logprobs))
    known = np.isfinite(other.logprobs) & sample.mask
    if (missing & known).any() and (known & ~missing).any():
        lost, usual = (float(np.mean(other.logprobs[part & known])) for part in (missing, ~missing))
        if lost > min(1.5 * usual, usual - 1):
            return  # these tokens were sampled, and the engine's logprobs are lost or belong to other rows
    odd, repeats_end = missing | (sample.mask & unlikely), _repeats_end(sample)
    size = run_lengths(odd & ~repeats_end, sample.seq)
    inside = odd & ~repeats_end & (size >= MIN_UNSAMPLED_RUN) & (size < sample.lengths[sample.seq])
    padding = odd & repeats_end
    if (missing & (padding | inside)).sum() < 0.9 * missing.sum():
        return  # sampled tokens lack logprobs, too
    counts = np.unique(sample.tokens[padding], return_counts=True)[1]
    for code, tokens in (("padding_counts", padding), ("unsampled_count", inside)):
        rows = _rows(sample, tokens)
        if rows.sum() < max(3, 0.05 * len(rows)) or (code == "padding_counts" and counts.max() < 0.9 * counts.sum()):
            continue
        row = int(rows.argmax())
        yield from find(
            code, rows, num_tokens=int(tokens.sum()), num_rows=int(rows.sum()), step=int(sample.steps[row]),
            seq_id=sample.seq_ids[row].replace("'", "''"),
        )  # fmt: skip


def _repeated(sample: Sample, engine: PassSample, other: PassSample, find: Find) -> Iterator[DataFinding]:
    full = np.flatnonzero(sample.lengths)
    starts, ends = sample.starts[:-1][full], sample.starts[1:][full]
    _, firsts, which = np.unique(sample.token_keys[ends - 1], return_index=True, return_inverse=True)
    earlier = rank_of(sample.prefix_keys[starts])
    asked = (earlier > 0) & np.array([sample.prompts[row] is not None for row in full], bool)
    # Sampling may be sharper than the recorded distribution: halving logprobs allows for a temperature of about 0.5.
    logprobs = np.nan_to_num(engine.logprobs, posinf=0.0, neginf=-1e4)
    probability = np.minimum(np.exp(np.add.reduceat(logprobs, starts) / 2), 1 - 1e-9)
    expected = float(-np.expm1(earlier[asked] * np.log1p(-probability[asked])).sum())
    temperature = sample.settings["temperature"]
    if not np.all((temperature == 0) | (sample.settings["top_k"] == 1)):
        again = (firsts[which] != np.arange(len(full)))[asked]
        numbers = {"num_asked": int(asked.sum()), "expected": expected, "notice": not np.isfinite(temperature).any()}
        yield from find(
            "samples_repeat", again, steps=sample.steps[full][asked], least=int(4 + 3 * expected), **numbers
        )


def _masked(sample: Sample, engine: PassSample, other: PassSample, find: Find) -> Iterator[DataFinding]:
    """Find policy versions from the future, rows without tokens in the loss, and sampled tokens left out of it."""
    ahead = (engine.versions - other.versions).filled(0)
    if other.name == "train":
        yield from find("versions_ahead", ahead > 0, least=int(0.05 * len(ahead)) + 1, ahead=ahead)
    yield from find("rows_masked", ~_rows(sample, sample.mask) & (sample.lengths > 0), least=3, notice=True)
    place = np.arange(len(sample.tokens))
    last, first = np.full(sample.num_sequences, -1), np.full(sample.num_sequences, len(place))
    np.maximum.at(last, sample.seq[sample.mask], place[sample.mask])
    np.minimum.at(first, sample.seq[sample.mask], place[sample.mask])
    sampled = (
        (engine.logprobs < 0) & np.isfinite(engine.logprobs) & np.isfinite(other.logprobs) & (last >= 0)[sample.seq]
    )
    stopped = np.array([str(reason or "").lower() == "stop" for reason in sample.finish_reasons], bool)
    cut = sampled & (place > last[sample.seq]) & ~_repeats_end(sample)
    rows = _rows(sample, cut)
    num_asked = stopped.sum() if stopped.any() and stopped[rows].all() else sample.num_sequences
    if rows.sum() > max(3, num_asked / 2):
        yield from find("mask_cuts", rows, num_tokens=int(cut.sum()), num_rows=int(rows.sum()), end="end", notice=True)
        return
    cut = sampled & (place < first[sample.seq])
    rows = _rows(sample, cut)
    # A prefix that is forced, not sampled, is the same in all rows.
    is_sampled = len(np.unique(sample.tokens[sample.starts[:-1][rows]])) > max(3, rows.sum() / 10)
    if is_sampled and rows.sum() > max(3, sample.num_sequences / 2):
        yield from find("mask_cuts", rows, num_tokens=int(cut.sum()), num_rows=int(rows.sum()), end="beginning")


def _ends(sample: Sample, find: Find) -> Iterator[DataFinding]:
    """Find finish reasons and limits that the tokens contradict, padded prompts, and tokens after an end token."""
    said = np.array([str(reason or "").lower() for reason in sample.finish_reasons])
    lengths, limit, cut = sample.lengths, sample.settings["max_tokens"], said == "length"
    total, longest = lengths + sample.prompt_lengths, int(lengths.max(initial=0))
    early = cut & np.isfinite(limit) & (lengths < limit)
    if early.any() and np.ptp(lengths[early]) == 0 and np.ptp(total[early]):
        least = int(max(3, np.ceil(0.5 * cut.sum())))
        yield from find("limit_contradicts", early, least=least, length=lengths, limit=limit)
    beyond = np.isfinite(limit) & (limit > 0) & (lengths > limit)
    yield from find("limit_exceeded", beyond, least=3, length=longest, limit=limit)
    last, short = sample.tokens[np.maximum(sample.starts[1:] - 1, 0)], lengths < longest
    ends, counts = np.unique(last[short], return_counts=True)
    has_end = np.isin(last, ends[np.argsort(-counts)][:3])
    if short.sum() >= 8 and has_end[short].mean() >= 0.9:  # a stop string may end with any token
        wrong = ((said == "stop") & ~short & ~has_end) | (cut & short & has_end & (total < total.max()))
        least = int(max(3, np.ceil(0.02 * np.isin(said, ("stop", "length")).sum())))
        numbers = {"num_stop": int((wrong & ~cut).sum()), "num_length": int((wrong & cut).sum()), "length": longest}
        yield from find("finish_contradicts", wrong, least=least, **numbers)
    known = [prompt or [] for prompt in sample.prompts]
    again = np.array([len(prompt) > 3 and prompt[0] == prompt[1] for prompt in known])
    num_known = sum(len(prompt) > 3 for prompt in known)
    ids, counts = np.unique([known[row][0] for row in np.flatnonzero(again)], return_counts=True)
    if num_known >= 8 and len(ids) and counts.max() > 0.9 * counts.sum():
        least = int(max(4, np.ceil(0.3 * num_known)))
        yield from find("prompt_padding", again, least=least, of=num_known, token=int(ids[counts.argmax()]))
    from_end = lengths[sample.seq] - 1 - sample.position
    for distance in range(1, 9):
        there = (from_end == distance) & sample.mask
        ids, counts = np.unique(sample.tokens[there], return_counts=True)
        if not len(ids):
            continue
        num, everywhere = int(counts.max()), sample.tokens == ids[counts.argmax()]
        affected = _rows(sample, there & everywhere)
        final = np.unique(last[affected], return_counts=True)[1]
        # A token that merely precedes the end token is always followed by that id; what follows the end varies.
        is_end = num >= max(12, 0.2 * (lengths > 0).sum()) and num > 0.9 * everywhere.sum()
        if is_end and final.max() < 0.5 * final.sum():
            numbers = {"of": int((lengths > 0).sum()), "token": int(ids[counts.argmax()]), "distance": distance}
            yield from find("tokens_after_end", affected, **numbers)
            return


def _entropies(sample: Sample, find: Find) -> Iterator[DataFinding]:
    """Find entropies recorded in bits or one token off. Correct entropies equal -logprob on average."""
    compared, every = sample.compared, np.ones(sample.num_sequences, bool)
    if not compared.any() or abs(np.mean(sample.d[compared])) > -0.02 * np.mean(sample.b.logprobs[compared]):
        return  # the entropies may be those of the other side's distribution
    joined = np.diff(sample.seq) == 0
    for side in (sample.a, sample.b):
        if side.entropy is None:
            continue
        there = sample.mask & np.isfinite(side.entropy) & np.isfinite(side.logprobs)
        place = np.flatnonzero(there & np.r_[False, there[:-1] & joined] & np.r_[there[1:] & joined, False])
        surprise, entropy = -side.logprobs[place], side.entropy[place]
        if len(place) < 500 or np.std(entropy) < 0.05:
            continue
        parts = np.array_split(np.argsort(entropy, kind="stable"), 6)[2:]
        ratios = np.array([surprise[part].mean() / max(entropy[part].mean(), 1e-9) for part in parts])
        is_bits = np.abs(ratios / np.log(2.0) - 1) < 0.12
        if is_bits.all() and abs(np.median(ratios) / np.log(2.0) - 1) < 0.03:
            count = np.bincount(sample.seq[place], minlength=len(every))
            left = np.bincount(sample.seq[place], entropy * np.log(2.0) - surprise, len(every))
            # If only some of the rows fit, the others were sampled from another distribution.
            if part_of_rows(sample, np.divide(left, count, out=np.full(len(every), np.nan), where=count > 0)) is None:
                yield from find("entropies_in_bits", every, name=side.name, ratio=float(np.median(ratios)))
        own, before, after = (float(np.corrcoef(surprise, side.entropy[place + lag])[0, 1]) for lag in (0, -1, 1))
        best, which = max((before, "next"), (after, "previous"))
        if best > 0.2 and best > 3 * own and (best - own) * np.sqrt(len(place)) > 8:
            yield from find("entropies_shifted", every, name=side.name, which=which, own=own, best=best)
