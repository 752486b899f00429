"""Check the tokens of sampled rows: their finish reasons, limits, masks, versions and entropies.

Shapes: N sampled tokens in S sequences, concatenated.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from .advantages import DataRows, count_of
from .features import means, pearson
from .finding import BY_VERSION, DataFinding, data_fault
from .sample import (
    CHANCE,
    MIN_UNSAMPLED_RUN,
    MOST_LOST,
    UNSAMPLED_NATS,
    PassSample,
    Sample,
    ratio_in_bits,
    run_lengths,
    template_tokens,
    unscaled_ratio,
)
from .where import part_of_rows, rank_of, recorded_order

Find = Callable[..., Iterator[DataFinding]]


def check_tokens(run: DataRows, sample: Sample) -> Iterator[DataFinding]:
    find = partial(run.find, sample=sample)
    for engine, other in ((sample.a, sample.b), (sample.b, sample.a)):
        if engine.name == "rollout":
            for check in (_unsampled, _repeated, partial(_masked, run)):
                yield from check(sample, engine, other, find)
    yield from _ends(run, sample, find)
    yield from _entropies(sample, find)
    yield from _stripped(run, sample, find)


def _repeats_end(sample: Sample) -> np.ndarray:
    """Return [N] bool: True for tokens at the end of a row that repeat the preceding token."""
    differs = sample.tokens != sample.tokens[np.maximum(sample.starts[1:] - 1, 0)][sample.seq]
    last_other = sample.starts[:-1] - 1
    np.maximum.at(last_other, sample.seq[differs], np.flatnonzero(differs))
    return np.asarray(np.arange(len(sample.tokens)) > last_other[sample.seq] + 1)


def _rows(sample: Sample, tokens: np.ndarray) -> np.ndarray:
    """Return [S] bool: True for rows that contain a token in `tokens` ([N] bool)."""
    return np.bincount(sample.seq[tokens], minlength=sample.num_sequences) > 0


_TOKENS = "SELECT position, token_id, mask, rollout_logprob, train_logprob FROM tokens WHERE step = {step} AND seq_id = '{seq_id}' ORDER BY position"
_PADDING_COUNTS = data_fault("padding_counts", "padding after the end token counts toward the loss", "{num_tokens:,} tokens in {num_rows:,} rows repeat the end token and count toward the loss, although they were not sampled", _TOKENS)  # fmt: skip
_UNSAMPLED_COUNT = data_fault("unsampled_count", "tokens that were not sampled count toward the loss", "{num_tokens:,} tokens in {num_rows:,} rows, such as tool output or parts of a template, count toward the loss but were not sampled", _TOKENS)  # fmt: skip


def _unsampled(sample: Sample, engine: PassSample, other: PassSample, find: Find) -> Iterator[DataFinding]:
    """Find padding and tool tokens in the loss."""
    certain = (engine.logprobs == 0) & (other.logprobs < 0)
    certain &= bool(certain.any() and other.logprobs[certain].mean() <= -0.1)  # else rounded to a probability of 1
    entropy = next((side.entropy for side in (other, engine) if side.entropy is not None), np.nan)
    with np.errstate(invalid="ignore"):
        unlikely = np.fmax(engine.logprobs, other.logprobs) + entropy < UNSAMPLED_NATS
    compared = sample.compared
    if compared.any() and abs(np.mean(sample.d[compared])) > -0.2 * np.mean(engine.logprobs[compared]):
        unlikely[:] = False  # the entropy may belong to another distribution
    template = template_tokens(sample, engine)
    missing = sample.mask & (certain | ~np.isfinite(engine.logprobs)) & ~template
    known = np.isfinite(other.logprobs) & sample.mask
    parts = [other.logprobs[part & known] for part in (missing, ~missing)]
    lost, usual = (float(part.mean()) if len(part) else np.nan for part in parts)
    if lost > min(1.5 * usual, usual - 1):
        return  # these tokens were sampled, and the engine's logprobs are lost or belong to other rows
    odd, repeats_end = missing | (sample.mask & unlikely), _repeats_end(sample)
    size = run_lengths(odd & ~repeats_end, sample.seq)
    inside = odd & ~repeats_end & (size >= MIN_UNSAMPLED_RUN) & (size < sample.lengths[sample.seq])
    inside |= template
    padding = odd & repeats_end & ~template
    if (missing & (padding | inside)).sum() < 0.9 * missing.sum():
        return  # sampled tokens have no logprobs either
    counts = np.unique(sample.tokens[padding], return_counts=True)[1]
    for fault, tokens in ((_PADDING_COUNTS, padding), (_UNSAMPLED_COUNT, inside)):
        rows = _rows(sample, tokens)
        row, is_mixed = int(rows.argmax()), fault is _PADDING_COUNTS and counts.max(initial=0) < 0.9 * counts.sum()
        yield from () if is_mixed else find(
            fault, rows, least=int(np.ceil(max(3, 0.05 * len(rows)))), num_tokens=int(tokens.sum()), num_rows=int(rows.sum()),
            step=int(sample.steps[row]), seq_id=sample.seq_ids[row].replace("'", "''"),
        )  # fmt: skip


_SAMPLES_REPEAT = data_fault("samples_repeat", "responses repeat", "{num:,} of {num_asked:,} responses to repeated prompts occurred before, but judging by their logprobs, at most {expected:.0f} should repeat, so {cause}", cause={
    "padding": "batches are padded with copies of their first rows", "unknown": "several rows share a seed or rows were reused",
    "engines": "each repeats the row {apart} rows earlier, as if engines shared a seed",
})  # fmt: skip


def _repeated(sample: Sample, engine: PassSample, other: PassSample, find: Find) -> Iterator[DataFinding]:
    """Find responses that repeat earlier ones more often than expected, or that are too improbable to be sampled twice."""
    place, temperature = recorded_order(sample), sample.settings["temperature"]
    in_order = np.lexsort((place, sample.steps))
    # Ignore copies without loss tokens, because they only pad a batch.
    full = in_order[(_rows(sample, sample.mask) & (sample.lengths > 0))[in_order]]
    starts, ends = sample.starts[:-1][full], sample.starts[1:][full]
    _, firsts, which = np.unique(sample.token_keys[ends - 1], return_index=True, return_inverse=True)
    earlier, first = rank_of(sample.prefix_keys[starts]), firsts[which]
    asked = (earlier > 0) & np.array([sample.prompts[row] is not None for row in full], bool)
    # Use the larger logprob if both passes have one. Sampling may be sharper than the recorded distribution, so halve
    # the logprobs, which allows for a temperature of about 0.5.
    likely = np.where(sample.mask & np.isfinite(engine.logprobs), np.fmax(engine.logprobs, other.logprobs), 0.0)
    halved = np.bincount(sample.seq, np.clip(np.nan_to_num(likely), -1e4, 0.0), sample.num_sequences)[full] / 2
    probability = np.minimum(np.exp(halved), 1 - 1e-9)
    # Log of the number of rows expected to repeat a response with this probability.
    chance = halved + np.log(max(earlier[asked].sum(), 1))
    again = first != np.arange(len(full))
    rows = np.flatnonzero(asked & again)

    def expected(part: np.ndarray) -> float:
        return float(-np.expm1(earlier[part] * np.log1p(-probability[part])).sum())

    is_frequent, is_greedy = len(rows) >= 4 + 3 * expected(asked), (temperature == 0) | (sample.settings["top_k"] == 1)
    if is_greedy.all() or not (is_frequent or (chance[rows] < CHANCE).any()):
        return
    found = _copies(sample.steps[full], rows, first[rows], place[full])
    part = asked if is_frequent or found else asked & (chance < np.log(0.01))
    numbers: dict[str, Any] = {
        "num_asked": int(part.sum()),
        "expected": expected(part),
        **(found or {"cause": "unknown"}),
    }
    is_notice = not np.isfinite(temperature).any()
    yield from find(_SAMPLES_REPEAT, again[part], rows=full[part], notice=is_notice, **numbers)


def _copies(steps: np.ndarray, rows: np.ndarray, first: np.ndarray, place: np.ndarray) -> dict[str, Any]:
    """Return, judging by the position of each row within its step (`place`, [N]), why `rows` repeat the rows `first` ([K]
    indices each). Empty if the positions show no pattern."""
    if (steps[rows] != steps[first]).any():
        return {}
    at, apart = np.unique(steps, return_inverse=True)[1], place[rows] - place[first]
    num, size = count_of(at[rows]), count_of(at)[rows]
    if (place[first] < num).all() and (apart == size - num).all():
        return {"cause": "padding"}
    return {"cause": "engines", "apart": int(apart[0])} if len(rows) > 0 and np.ptp(apart) == 0 else {}


_LAG = r"max_(head_offpolicyness|off_?policy_steps|async_level|staleness(_steps)?|trajectory_age_steps|(policy_)?lag)$"
_MOST_LATE = 0.05
"""Maximum share of rows beyond the limit in a healthy run. AReaL and SkyRL limit the number of running requests, so a
slow request can exceed the limit."""


_BEYOND_LAG = data_fault("lag_exceeds_limit", "the engine is further behind than the settings allow", "{setting} is recorded, but {num:,} rows were sampled with weights from up to {largest} steps earlier", BY_VERSION)  # fmt: skip


def _beyond_lag(
    run: DataRows, sample: Sample, lag: np.ndarray, versions: np.ma.MaskedArray, find: Find
) -> Iterator[DataFinding]:
    """Find rows whose engine is further behind the trainer (`lag`, [S] updates) than a setting allows (steps)."""
    limits = {re.split("[./]", key)[-1]: value for key, value in run.numbers(_LAG).items()}
    known = versions.filled(-1) >= 0
    if not limits or len(np.unique(sample.steps[known])) < 2:
        return
    limit = sum(limits.values())  # prime-rl limits the lag at the start of a request, and during it
    per_step = max(np.polyfit(sample.steps[known], versions[known], 1)[0], 1.0)  # updates per step
    lag = np.floor(lag / per_step + 0.01)
    # Frameworks count either the steps between two versions or the versions in flight.
    is_notice = bool(lag.max() <= limit + 1 or (lag > limit + 1).mean() < _MOST_LATE)
    setting, largest = ", ".join(f"{name} = {value:g}" for name, value in limits.items()), int(lag.max())
    yield from find(_BEYOND_LAG, lag > limit, least=3, notice=is_notice, setting=setting, largest=largest)


def _versions_per_update(versions: np.ma.MaskedArray, others: np.ma.MaskedArray) -> float | None:
    """Return by how much `versions` grow when `others` grow by 1 ([S] each), if this is constant and not 1."""
    known = (versions.filled(-1) >= 0) & (others.filled(-1) >= 0)
    pairs = np.unique(np.stack([others.data[known], versions.data[known]]), axis=1)
    if len(np.unique(pairs[0])) < 3:
        return None
    first, last = pairs[:, 0], pairs[:, -1]
    slope = (last[1] - first[1]) / (last[0] - first[0])
    is_exact = np.abs(slope * (pairs[0] - first[0]) - (pairs[1] - first[1])).max() < 1e-6 * max(np.ptp(pairs[1]), 1)
    return float(slope) if is_exact and slope > 0 and slope != 1 else None


_MAX_EXCESS = 0.3
"""Largest mean of logprob + entropy (nats) of sampled tokens. For a tool's tokens, it may be too noisy to tell from 0."""


_VERSIONS_AHEAD = data_fault("versions_ahead", "the engine's policy version is ahead of the trainer's", "in {num:,} rows, the engine's policy version is {ahead:.0f} ahead of the trainer's, although the trainer does not have these weights yet, so one counter is wrong{per_update}", BY_VERSION, per_update=": the engine's grows by {per_update:.3g} while the trainer's grows by 1")  # fmt: skip
_FINISHED_MASKED = data_fault("finished_masked", "finished rows without tokens in the loss", "{num:,} rows that finished (finish reason stop) have no tokens in the loss, like the truncated ones")  # fmt: skip
_ROWS_MASKED = data_fault("rows_masked", "rows without tokens in the loss", "{num:,} rows have advantages but no tokens in the loss{are_counted}", is_often_intended=True, are_counted=", and their rewards count in their groups' baselines")  # fmt: skip
_MASK_CUTS = data_fault("mask_cuts", "the loss mask leaves out sampled tokens", "{num_tokens:,} sampled tokens{end_id} {part} of {num_rows:,} rows do not count toward the loss", end_id=" (the end token, id {end_id})", part={"end": "at the end", "beginning": "at the beginning", "middle": "in the middle"})  # fmt: skip


def _masked(run: DataRows, sample: Sample, engine: PassSample, other: PassSample, find: Find) -> Iterator[DataFinding]:
    """Find policy versions ahead of the trainer's, rows without loss tokens, and sampled tokens outside the loss."""
    ahead = (engine.versions - other.versions).filled(0)
    if other.name == "train":
        per_update = _versions_per_update(engine.versions, other.versions)
        least = int(0.05 * len(ahead)) + 1
        yield from find(_VERSIONS_AHEAD, ahead > 0, least=least, ahead=ahead, per_update=per_update)
        yield from _beyond_lag(run, sample, -ahead, other.versions, find)
    stopped, truncated = sample.ended == "stop", sample.ended == "length"
    masked = ~_rows(sample, sample.mask) & (sample.lengths > 0)
    if min((masked & stopped).sum(), truncated.sum()) >= 3 and masked[truncated].mean() > 0.95:
        # Excluding truncated rows is usual (`mask_truncated_completions` in TRL, `apply_overlong_filtering` in SkyRL).
        # Excluding finished rows by their end token is a fault. Others may be excluded by choice.
        final = sample.tokens[sample.starts[1:] - 1]
        ids = np.unique(final[masked & stopped])
        is_end = len(ids) <= 2 and not np.isin(ids, final[stopped & ~masked]).any()
        yield from find(_FINISHED_MASKED, masked & stopped, notice=not is_end)
    else:
        yield from find(_ROWS_MASKED, masked, least=3, are_counted=bool(run.counts_masked), notice=True)
    place = np.arange(len(sample.tokens))
    last, first = np.full(sample.num_sequences, -1), np.full(sample.num_sequences, len(place))
    np.maximum.at(last, sample.seq[sample.mask], place[sample.mask])
    np.minimum.at(first, sample.seq[sample.mask], place[sample.mask])
    sampled = (engine.logprobs < 0) & np.isfinite(sample.d) & (last >= 0)[sample.seq]
    cut = sampled & (place > last[sample.seq]) & ~_repeats_end(sample)
    rows = _rows(sample, cut)

    def of_cut(rows: np.ndarray, part: str, num: int, end_id: int | None = None) -> Iterator[DataFinding]:
        numbers = {"num_tokens": num, "num_rows": int(rows.sum()), "part": part, "end_id": end_id}
        yield from find(_MASK_CUTS, rows, notice=part != "beginning", **numbers)

    num_asked = stopped.sum() if stopped.any() and stopped[rows].all() else sample.num_sequences
    if rows.sum() > max(3, num_asked / 2):
        ids = np.unique(sample.tokens[cut])
        yield from of_cut(rows, "end", int(cut.sum()), int(ids[0]) if len(ids) == 1 else None)
        return
    # Some engines drop the end token, so that it has no logprob and is masked as if it were padding.
    final = np.maximum(sample.starts[1:] - 1, 0)
    ended = stopped & (last >= 0) & ~sample.mask[final]
    ids = np.unique(sample.tokens[final][ended])
    is_dropped = len(ids) == 1 and not (sample.mask & (sample.tokens == ids[0])).any()
    if ended.sum() > max(3, 0.9 * stopped.sum()) and is_dropped:
        yield from of_cut(ended, "end", int(ended.sum()), int(ids[0]))
        return
    cut = sampled & (place < first[sample.seq])
    rows = _rows(sample, cut)
    # A forced prefix is the same in all rows, so tokens that vary between rows were sampled.
    is_sampled = len(np.unique(sample.tokens[sample.starts[:-1][rows]])) > max(3, rows.sum() / 10)
    # Frameworks mask long beginnings of some rows, such as those sampled by older policies, but not their first token alone.
    fewest = sample.num_sequences / (20 if cut.sum() == rows.sum() else 2)
    if is_sampled and rows.sum() > max(3, fewest):
        yield from of_cut(rows, "beginning", int(cut.sum()))
    # A tool's tokens are unlikely: the mean of logprob + entropy is 0 only where tokens were sampled.
    entropy = next((side.entropy for side in (other, engine) if side.entropy is not None), None)
    cut = sampled & ~sample.mask & (place > first[sample.seq]) & (place < last[sample.seq])
    if entropy is None:
        return
    excess, apart = (engine.logprobs + entropy)[cut & np.isfinite(entropy)], np.abs(sample.d)
    if len(excess) < 100:
        return
    is_sampled = abs(excess.mean()) < min(4 * excess.std() / np.sqrt(len(excess)), _MAX_EXCESS)
    # Correction methods mask single tokens with a large mismatch.
    is_by_mismatch = np.median(apart[cut]) > 3 * np.median(apart[sample.compared])
    rows = _rows(sample, cut)
    if is_sampled and not is_by_mismatch and rows.sum() > max(3, 0.2 * sample.num_sequences):
        yield from of_cut(rows, "middle", int(cut.sum()))


_ENDED = ("stop", "eos", "end_turn", "stop_sequence", "tool_calls", "tool_call", "tool_use", "function_call")
"""Finish reasons of responses that the model ended. Others, such as `max_turns` or `abort`, say nothing about the tokens."""


def _wrong_reasons(numbers: Mapping[str, Any]) -> dict[str, str]:
    longest, found = numbers.get("longest"), numbers.get("reasons", {}).items()
    why = {"length": f"shorter than {longest} tokens and ending with an end token"}
    full = f"{longest} tokens long (the maximum) and without an end token"
    return {"reasons": ", and ".join(f"{num:,} marked {name!r} although {why.get(name, full)}" for name, num in found)}


_FINISH_CONTRADICTS = data_fault("finish_contradicts", "finish reasons contradict the tokens", "{num:,} rows have the wrong finish reason: {case}", cases={
    "lengths": "{reasons}",
    "end_tokens": "{num:,} marked 'stop' although they end with various tokens instead of an end token",
}, words=_wrong_reasons)  # fmt: skip
_LIMIT_CONTRADICTS = data_fault("limit_contradicts", "responses are cut before the recorded limit", "{num:,} rows have finish reason 'length' at {length:,.0f} tokens, but max_tokens is {limit:,.0f}")  # fmt: skip
_LIMIT_EXCEEDED = data_fault("limit_exceeded", "responses are longer than the recorded limit", "{num:,} rows have up to {length:,.0f} tokens although max_tokens is {limit:,.0f}{cause}", cause={
    "other_limit": ", so the engine runs with a different limit",
    "resumed": " and others are cut there, for example because a response that was resumed gets the whole limit again",
    "left": ", but no more than the largest recorded limit, {largest:,.0f}, so max_tokens may be what a resumed response had left",
})  # fmt: skip
_PROMPT_PADDING = data_fault("prompt_padding", "prompts are recorded with padding", "{num:,} of {of:,} prompts begin with token {token} repeated, and no other prompt begins with a repeated token, so padding is recorded as part of the prompt")  # fmt: skip
_TOKENS_AFTER_END = data_fault("tokens_after_end", "tokens after the end token count toward the loss", {
    "tokens_after_end": "{num:,} of {of:,} rows have token {token} exactly {distance} tokens before their end and hardly anywhere else, so it ends the response, and all tokens after it, whether sampled or padding, count toward the loss",
    "declared": "{num:,} of {of:,} rows go on after the recorded end token (id {token}), and the next tokens count toward the loss, so the engine may ignore the end token, or the mask may include tokens of the template",
})  # fmt: skip


def _ends(run: DataRows, sample: Sample, find: Find) -> Iterator[DataFinding]:
    """Find finish reasons and length limits that tokens contradict, padded prompts, and tokens after an end token."""
    said, lengths, limit = sample.ended, sample.lengths, sample.settings["max_tokens"]
    cut = said == "length"
    total, longest = lengths + sample.prompt_lengths, int(lengths.max(initial=0))
    early = cut & np.isfinite(limit) & (lengths < limit)
    partly = np.flatnonzero(_rows(sample, sample.mask) & _rows(sample, ~sample.mask))
    if early.any() and np.ptp(lengths[early]) == 0 and np.ptp(total[early]) and not len(partly):
        least = int(max(3, np.ceil(0.5 * cut.sum())))
        yield from find(_LIMIT_CONTRADICTS, early, least=least, length=lengths, limit=limit)
    # The limit applies to each stretch of sampled tokens between tool outputs.
    runs, sampled = np.where(sample.mask, run_lengths(sample.mask, sample.seq), 0), lengths.copy()
    sampled[partly] = [runs[sample.starts[row] : sample.starts[row + 1]].max() for row in partly]
    beyond = np.isfinite(limit) & (limit > 0) & (sampled > limit)
    cause = "resumed" if (sampled == limit)[cut].sum() > beyond.sum() else "other_limit"
    largest, length = float(np.nanmax(limit, initial=0.0)), int(sampled[beyond].max(initial=0))
    if is_budget := bool((limit[beyond] < largest).all() and length <= largest):
        cause = "left"
    numbers: dict[str, Any] = {"length": length, "limit": limit, "cause": cause, "largest": largest}
    yield from find(_LIMIT_EXCEEDED, beyond, least=3, notice=is_budget, **numbers)
    last, short = sample.tokens[np.maximum(sample.starts[1:] - 1, 0)], lengths < longest
    ends, counts = np.unique(last[short], return_counts=True)
    # A token that is often followed by sampled tokens of the same turn does not end responses.
    joined = np.r_[np.diff(sample.seq) == 0, False] & sample.mask & np.r_[sample.mask[1:], False]
    inside = joined & ~np.r_[_repeats_end(sample)[1:], False]
    usual = ends[np.argsort(-counts)][:3]
    has_end = np.isin(last, [end for end in usual if (sample.tokens[inside] == end).sum() <= (last == end).sum()])
    # Skip responses with many different last tokens: with stop strings, the last token does not show the finish reason.
    if short.sum() >= 8 and has_end[short].mean() >= 0.9:
        ended = np.isin(said, _ENDED)
        # After a turn that ended, a trajectory may have no room for another.
        has_turns = np.isin(np.arange(len(said)), partly)
        wrong = (ended & ~short & ~has_end) | (cut & short & has_end & ~has_turns & (total < total.max()))
        least = int(max(3, np.ceil(0.02 * (ended | cut).sum())))
        reasons = dict(Counter(said[wrong].tolist()))
        yield from find(_FINISH_CONTRADICTS, wrong, least=least, signal="lengths", reasons=reasons, longest=longest)
    elif (stopped := said == "stop").any() and np.isin(last[stopped], run.end_ids).mean() >= 0.5:
        final = np.maximum(sample.starts[1:] - 1, 0)  # a tool's output may follow the end token
        other = stopped & (lengths > 0) & ~np.isin(last, run.end_ids) & sample.mask[final]
        # Stop strings end responses with a few other ids.
        if other.any() and np.unique(last[other], return_counts=True)[1].max() < 0.5 * other.sum():
            yield from find(_FINISH_CONTRADICTS, other, signal="end_tokens", least=int(max(8, 0.02 * stopped.sum())))
    known = [prompt or [] for prompt in sample.prompts]
    again = np.array([len(prompt) > 3 and prompt[0] == prompt[1] for prompt in known])
    num_known = sum(len(prompt) > 3 for prompt in known)
    ids, counts = np.unique([known[row][0] for row in np.flatnonzero(again)], return_counts=True)
    if num_known >= 8 and len(ids) and counts.max() > 0.9 * counts.sum() and _are_padded(sample, again):
        least = int(max(4, np.ceil(0.3 * num_known)))
        yield from find(_PROMPT_PADDING, again, least=least, of=num_known, token=int(ids[counts.argmax()]))
    # A tool's output or the next turn's prompt is masked, and padding may repeat the end token.
    followed = joined & np.isin(sample.tokens, run.end_ids) & (np.diff(sample.tokens, append=-1) != 0)
    num_rows = int((lengths > 0).sum())
    if (affected := _rows(sample, followed)).sum() > max(3, 0.05 * num_rows):
        # A loop with its own tokens may have recorded a default end token that it does not use.
        is_unused = np.isin(last, run.end_ids).sum() < 0.1 * num_rows
        token = int(np.bincount(sample.tokens[followed]).argmax())
        yield from find(_TOKENS_AFTER_END, affected, signal="declared", of=num_rows, token=token, notice=is_unused)
        return
    from_end = lengths[sample.seq] - 1 - sample.position
    for distance in range(1, 9):
        there = (from_end == distance) & sample.mask
        ids, counts = np.unique(sample.tokens[there], return_counts=True)
        if not len(ids):
            continue
        num, everywhere = int(counts.max()), sample.tokens == ids[counts.argmax()]
        affected = _rows(sample, there & everywhere)
        final = np.unique(last[affected], return_counts=True)[1]
        # A token that merely precedes the end token is always followed by it, but various tokens follow an end token.
        is_end = num >= max(12, 0.2 * num_rows) and num > 0.9 * everywhere.sum()
        if is_end and final.max() < 0.5 * final.sum():
            numbers = {"of": num_rows, "token": int(ids[counts.argmax()]), "distance": distance}
            yield from find(_TOKENS_AFTER_END, affected, **numbers)
            return


def _are_padded(sample: Sample, rows: np.ndarray) -> bool:
    """Return True if the repeated first token makes the prompts of `rows` ([S] bool) equally long, as padding does (but
    an image's placeholders do not)."""
    prompts = [sample.prompts[row] or [] for row in np.flatnonzero(rows)]
    without = {len([*itertools.dropwhile(prompt[0].__eq__, prompt)]) for prompt in prompts}
    return 2 * len({*map(len, prompts)}) <= len(without)


_END_MISSING = data_fault("end_missing", "responses have no end token", "none of {num:,} responses contains the recorded end token ({ids}), so the policy never learns to sample it: {case}", cases={
    "finished": "they finished (finish reason stop), so it was removed, or stop strings end the responses",
    "equal_lengths": "every response has {length:,} tokens, so the engine never samples it",
}, words=lambda n: {"ids": f"id{'s' * (len(n['ids']) > 1)} {', '.join(map(str, n['ids']))}"})  # fmt: skip


def _stripped(run: DataRows, sample: Sample, find: Find) -> Iterator[DataFinding]:
    """Find finished responses from which the end token was removed, and runs in which it is never sampled."""
    end_ids = run.end_ids
    if not end_ids or np.isin(sample.tokens, end_ids).any():
        return
    stopped = (sample.ended == "stop") & (sample.lengths > 0)
    last = sample.tokens[np.maximum(sample.starts[1:] - 1, 0)][stopped]
    # Stop strings end responses with a few other ids.
    usual = np.sort(np.unique(last, return_counts=True)[1])[-3:].sum()
    affected, signal = stopped & (2 * usual < len(last)), "finished"
    if not stopped.any() and np.ptp(sample.lengths) == 0:
        affected, signal = ~stopped, "equal_lengths"
    numbers: dict[str, Any] = {"ids": end_ids, "length": int(sample.lengths[0])}
    yield from find(_END_MISSING, affected, least=20, signal=signal, notice=True, **numbers)


ENTROPIES = "SELECT round(e, 1) AS entropy, avg(-p) AS surprise, count(*) AS n FROM (SELECT unnest(entropy) AS e, unnest(logprobs) AS p FROM scores WHERE \"pass\" = '{name}') GROUP BY ALL ORDER BY ALL"
_ENTROPIES_LOST = data_fault("entropies_lost", "entropies do not belong to the logprobs", "{share:.0%} of the entropies recorded for {name} are {case}", ENTROPIES, cases={
    "temperature": "impossible given the token's logprob, and the mean of -logprob is {ratio:.2f} times their mean, as if they had been computed without the recorded temperature of {temperature:g}",
    "others": "NaN, or impossible given the token's logprob, as if they belonged to other tokens or another distribution",
})  # fmt: skip
_IN_BITS = data_fault("entropies_in_bits", "entropies are in bits", "at all entropy levels, the mean of -logprob is {ratio:.3f} (ln 2) times the entropy recorded for {name}, so the entropies are in bits, not nats", ENTROPIES)  # fmt: skip
_SHIFTED = data_fault("entropies_shifted", "entropies belong to other positions", "-logprob correlates better with {name}'s entropy one position away ({best:.2f}) than at the same position ({own:.2f}), so each entropy belongs to the {which} position", ENTROPIES)  # fmt: skip


def _entropies(sample: Sample, find: Find) -> Iterator[DataFinding]:
    """Find entropies in bits or of another token or distribution. Correct entropies equal -logprob on average."""
    compared, every = sample.compared, np.ones(sample.num_sequences, bool)
    if not compared.any() or abs(np.mean(sample.d[compared])) > -0.02 * np.mean(sample.b.logprobs[compared]):
        return  # the entropies may belong to the other side's distribution
    for side in (sample.a, sample.b):
        ratio, share = unscaled_ratio(sample, side)
        if ratio:
            heat = float(np.nanmax(sample.settings["temperature"]))
            numbers: dict[str, Any] = {"signal": "temperature", "share": share, "ratio": ratio, "temperature": heat}
        elif side.share_lost > MOST_LOST:
            numbers = {"signal": "others", "share": side.share_lost}
        else:
            continue
        yield from find(_ENTROPIES_LOST, every, name=side.name, **numbers)
    joined = np.diff(sample.seq) == 0
    for side in (sample.a, sample.b):
        if side.entropy is None:
            continue
        there = sample.mask & np.isfinite(side.entropy) & np.isfinite(side.logprobs)
        place = np.flatnonzero(there & np.r_[False, there[:-1] & joined] & np.r_[there[1:] & joined, False])
        surprise, entropy = -side.logprobs[place], side.entropy[place]
        if len(place) < 500 or np.std(entropy) < 0.05:
            continue
        if ratio := ratio_in_bits(surprise, entropy):
            left = means(entropy * np.log(2.0) - surprise, sample.seq[place], len(every))
            # If the ratio is not the same in all rows, some come from another distribution.
            if part_of_rows(sample, left) is None:
                yield from find(_IN_BITS, every, name=side.name, ratio=ratio)
        # The expected -logprob of a sampled token is the entropy, so the slope is 1 if they belong together.
        slope, left = np.polyfit(entropy, surprise, 1)[0], surprise - entropy
        is_calibrated = abs(slope - 1) < 0.2 + 4 * left.std() / (np.std(entropy) * np.sqrt(len(place)))
        if not is_calibrated and (shift := best_lag(-side.logprobs, side.entropy, there, sample.seq, (-1, 1))):
            best, own, lag = shift
            which = "next" if lag < 0 else "previous"
            yield from find(_SHIFTED, every, name=side.name, which=which, own=own, best=best)


def best_lag(
    values: np.ndarray, others: np.ndarray, there: np.ndarray, seq: np.ndarray, lags: Sequence[int]
) -> tuple[float, float, int] | None:
    """Return the highest correlation of `values` with `others` ([N] each) at any of the `lags` (tokens), the
    correlation at lag 0, and the best lag, or None if chance explains the difference. Equal pairs count once."""
    found, at = [], np.flatnonzero(there)
    own = pearson(*np.unique(np.stack([values[at], others[at]]), axis=1))
    for lag in lags:
        first = at[(at + lag >= 0) & (at + lag < len(there))]
        first = first[there[first + lag] & (seq[first + lag] == seq[first])]
        pairs = np.unique(np.stack([values[first], others[first + lag]]), axis=1)
        moved = pearson(*pairs) if len(first) >= 30 and pairs.std(axis=1).min() > 0.05 else 0.0
        apart = np.diff(np.arctanh(np.clip([own, moved], -1 + 1e-9, 1 - 1e-9)))[0]  # Fisher's z, error 1 / sqrt(n)
        if moved > 0.2 and moved > 3 * own and apart * np.sqrt(pairs.shape[1]) > 8:
            found.append((moved, own, lag))
    return max(found, default=None)
