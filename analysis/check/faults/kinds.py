"""Detect differing weights, and classify mismatches that no fault predicts token by token."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from ....schemas.documents import Contract
from ....schemas.passes import CURRENT, ROLLOUT, TRAIN
from ...advice import NOTHING, Advice
from ...rows import counted
from ...trace.ragged import centred
from .. import commands, features
from ..finding import BY_VERSION, SIDES, Fault, Finding, Hypothesis, Number, explained, located, max_flip, predicting
from ..pair_data import (
    FEW_TOKENS,
    HALF_ULP,
    MAX_EXCESS,
    MIN_REST,
    NOISE_FACTOR,
    PairData,
    allowed_noise,
    coarsest,
    declared,
    dtype_of,
    is_mixture,
    level,
    log_odds,
    logit_error,
    named,
    once,
    precisions,
)
from ..where import Where, later_turn, onset_of, where_text
from .sampling import PENALTY, recorded_penalty
from .values import UNRELATED

# --- Weights that differ, as recorded or inferred from a mismatch that grows with updates

MIN_COURSE = 4
"""Minimum number of steps for judging whether the mismatch grows with the updates."""
MIN_WIDTH = 0.05
"""Minimum standard deviation of the sampled tokens' log-odds (nats) at a step that counts."""
MIN_GROWTH = 3.0
"""Minimum factor by which a reported mismatch grows relative to the logits' spread. In 80 healthy runs, some of which
start from uniform policies at high learning rates, it grew by at most 2.9."""
MIN_GROWN = 0.2
"""Unless it grows by ten times that factor, it must also reach this share of the largest rounding error. In the same runs,
it reached a share of 0.12."""
_QUANTISED = ("quantization", "quantisation", "quantize", "cache_dtype", "kv_cache_dtype", "kv_dtype")
_QUANTISED_TO = {"fp8": "fp8", "float8": "fp8", "int4": "int4", "w4": "int4", "awq": "int4", "gptq": "int4"}
"""Part of a quantisation's name -> the option of `replay --quantize` that is nearest to it."""
_NOT_QUANTISED = ("auto", "None", "bfloat16", "float16", "float32")


def _tensor(numbers: Mapping[str, Any]) -> dict[str, str]:
    version, given, holds = numbers["trainer_version"], numbers["given_version"], numbers["holds_version"]
    how = "it was never sent"
    if given is not None:
        how = f"it was last sent at version {given}{', when it was already stale' if given != holds else ''}"
        how = how if numbers["is_loaded"] else f"the tensor sent at version {given} was not loaded"
    has = "from no recorded version" if holds is None else f"from version {holds}"
    a_row = " per row" if str(numbers["dtype"]).endswith("values") else ""
    known = {
        "adapter": f"is the trainer's tensor without its adapter, at version {version}",
        "quantised": f"is the trainer's tensor rounded to {numbers['dtype']}{a_row}",
        "other_weights": "matches the trainer's at no recorded version, rounded or not",
    }
    text = known.get(numbers["cause"], f"is {has}, while the trainer is at version {version}; {how}")
    return {"what_text": f"the engine's {numbers['tensor']} {text}"}


WEIGHTS = Fault(code="weights_differ", title="the weights differ: stale, partly synchronised, without the adapter, or quantised", broken="engine", evidence={
    "engine_weights": "{what_text}; according to the digests, this is the case for {num_tensors:,} of {of_tensors:,} tensors at version {trainer_version}, and for at least one tensor at {num_versions:,} of {of_versions:,} versions, first at version {first_version}",
    "policy_versions": "according to the recorded policy versions, {side} scored {num_sequences:,} of {of_sequences:,} sequences with weights that are {updates} behind the other side's",
    "stopped": "according to the recorded policy versions, {side} has kept version {version} since step {since}, while {other} has moved on to version {latest}, although it was at most {updates} behind at earlier steps",
    "contract": "only {side}'s contract sets {setting} to {value}",
    "one_adapter": "only {side} has an adapter, and " + features.SIZE,
    "grew_before": "the rms of d is {first:.2g} nats at step {since}, before the selected steps, and {later:.2g} within them, so the mismatch grew with the updates",
    "grows": "the mismatch grows from step to step although both sides record the same policy version: the logits differ by about {first:.2g} nats at step {first_step} and {later:.2g} at step {last_step}, {ratio:.3g} times as much relative to their spread, although rounding grows only with the logits, and the mean logprob is about the same",
    "follows_advantages": "each sequence's mismatch correlates with its own advantage ({correlation:.2f} over {num_sequences:,} sequences): {side} was scored with weights already updated on this batch",
    "reference": "{side}'s logprobs are {part:.0%} of the way from {other}'s to the reference's at {num_steps:,} of {of_steps:,} steps ({span_text}), which accounts for {weight:.0%} of the mismatch there",
    "same_weights": "{one}'s logits equal those of {other} {ago} earlier: over {num_tokens:,} tokens that occur again with the same prefix, the two differ by {apart:.2g} nats (median), but by {own:.2g} at the same step",
    "frozen": "from step {since} on, {side} gives the same tokens in the same context the same logprobs at every step (they differ by {own:.2g} nats rms in the logit over {num_tokens:,} repeated tokens), while {other}'s change by {moved:.2g} nats",
    "follows": "when {other}'s logprobs of the same tokens in the same context change from step to step, {side}'s change the same way, but only {part:.0%} as far (over {num_tokens:,} repeated tokens)",
    "judged": features.judged("a weight sync that failed, was late or left tensors out; a missing adapter; a replica at a different version; a policy version recorded before the engine loaded its weights; a key-value cache from before a sync or sleep; or trainer logprobs from the reference model or from after the update"),
}, words={
    "policy_versions": lambda n: {"updates": counted(n["updates_behind"], "optimizer update")},
    "stopped": lambda n: {"updates": counted(n["before"], "update")},
    "same_weights": lambda n: {"ago": counted(n["lag"], "step")},
    "engine_weights": _tensor, "one_adapter": features.judged_words, "judged": features.judged_words,
    "reference": lambda n: {"span_text": f"from {n['first_step']} to {n['last_step']}" if n["num_steps"] > 1 else f"step {n['first_step']}"},
}, causes={
    "stale_weights": "one side's weights are a step or more behind",
    "partial_sync": "some weights were not synchronised", "adapter": "the adapter is on one side only",
    "quantised": "one side's weights are quantised", "quantised_cache": "one side's key-value cache is quantised",
    "after_update": "one side was scored after the update on the same batch",
    "never_synchronised": "the trainer's weights were never sent to the engine",
    "stopped": "the trainer's weights are no longer sent to the engine",
    "early": "older weights or a different prompt at the beginning of responses: a prefix cache kept across updates, or weights swapped during sampling",
    "frozen": "one side's weights are never updated",
    "other_weights": "the engine's weights match no recorded version of the trainer",
    "reference": "the engine has the reference's weights: without the adapter, not updated, or restored wrongly",
    "part_of_updates": "the engine applies only part of the trainer's updates, such as an adapter at the wrong scale",
})  # fmt: skip


def find_versions(data: PairData) -> list[Finding]:
    inside = data.updates_behind[data.seq] != 0
    if not inside.any() or features.wrong_versions(data):
        return []
    fresh = data.within(~inside)
    usual = level(fresh) if fresh.num_kept >= FEW_TOKENS else allowed_noise(data) / 2
    if level(data.within(inside)) < 2 * usual:
        return []  # the mismatch is about as large as where both sides used the same policy version, or as rounding
    lag = int(np.median(data.updates_behind[np.unique(data.seq[inside])]))
    numbers = features.counts(data, inside) | {"cause": "stale_weights", "side": data.names["b" if lag > 0 else "a"]}
    numbers |= {"of_sequences": data.sample.num_sequences, "updates_behind": abs(lag)}
    next = commands.sql(data, BY_VERSION)
    if found := _stopped(data):
        inside = data.sample.steps[data.seq] >= found["since"]
        return [WEIGHTS.finding(data, "stopped", inside, next=next, broken="engine", numbers=numbers | found)]
    return [WEIGHTS.finding(data, "policy_versions", inside, next=next, broken="versions", numbers=numbers)]


MIN_STOPPED = 5
"""Minimum number of steps after which an engine that keeps its weights is no longer updated."""


def _stopped(data: PairData) -> dict[str, Any]:
    """Return the step from which the engine keeps its weights after following the trainer. Empty if it does not.

    An engine that is updated every few steps, or ahead of a trainer that uses up its last batches, was as far behind
    before: the last lag must be three times the largest earlier one, and the mismatch must have grown as well.
    """
    trainer, engine = (side.versions.filled(-1) for side in (data.sample.a, data.sample.b))
    known = np.minimum(trainer, engine) >= 0
    steps = np.unique(data.sample.steps[known])
    rows = [known & (data.sample.steps == step) for step in steps]
    newest, latest = (np.array([each[row].max() for row in rows]) for each in (engine, trainer))
    lag, since = latest - newest, int(steps[np.argmax(newest == newest[-1])])
    before, later = steps < since, data.sample.steps[data.seq] >= since
    if not before.any() or steps[-1] - since < MIN_STOPPED or data.rms(later) < 3 * data.rms(~later):
        return {}
    if data.names["b"] != ROLLOUT or lag[-1] < max(MIN_STOPPED, 3 * lag[before].max()):
        return {}
    shown = {"version": int(newest[-1]), "latest": int(latest[-1]), "before": int(max(lag[before].max(), 0))}
    return {"cause": "stopped", "side": ROLLOUT, "other": data.names["a"], "since": since, **shown}


def find_quantisation(data: PairData) -> list[Finding]:
    own = {side: _quantised(data.contract(side)) for side in data.names}
    for side, other in ("ab", "ba"):
        for name, value in own[side].items():
            if value not in own[other].values():
                nearest = (to for part, to in _QUANTISED_TO.items() if part in value.lower())
                cause, options = "quantised", f"--quantize {next(nearest, 'int8')}"
                if "cache" in name or "kv" in name:
                    cause, options = "quantised_cache", "--kv-dtype fp8 --mode decode"
                numbers = {"cause": cause, "side": data.names[side], "setting": name, "value": value}
                replay = commands.replay(data, options, "suspect", int(data.sample.steps[-1]))
                return [WEIGHTS.finding(data, "contract", next=replay, numbers=numbers)]
    return []


def _quantised(contract: Contract) -> dict[str, str]:
    values = {name: str(value) for name, value in named(contract, *_QUANTISED).items() if value}
    return {name: value for name, value in values.items() if value not in _NOT_QUANTISED}


def declared_precision(contract: Contract) -> tuple[str, ...]:
    return str(dtype_of(contract)), *sorted(_quantised(contract).values())


def find_adapter(data: PairData) -> list[Finding]:
    adapters = [name for side, name in data.names.items() if declared(data.contract(side), "model", "adapters")]
    if len(adapters) != 1:
        return []
    numbers = measured(data) | {"cause": "adapter", "side": adapters[0]}
    return [WEIGHTS.finding(data, "one_adapter", weight=0.8, next=commands.weights(data), numbers=numbers)]


def find_after_update(data: PairData) -> list[Finding]:
    """Detect that one side was scored after the update on the same batch, which raises logprobs in sequences with a
    positive advantage. Stale weights can do so, too, but not at the first step."""
    advantage, rows = data.sample.outcomes.get("advantage"), np.unique(data.seq)
    is_stale = _grew(data) and not features.growth(data).is_sudden
    if is_stale or advantage is None or not np.isfinite(advantage[rows]).any():
        return []
    mean = features.means(features.clipped(data.d / data.scale), data.seq)[rows]
    mean = centred(mean, np.unique(data.sample.steps[rows], return_inverse=True)[1])
    there = np.isfinite(advantage[rows]) & (advantage[rows] != 0)
    correlation = features.pearson(advantage[rows][there], mean[there])
    score = correlation * np.sqrt(there.sum()) / np.sqrt(max(1 - correlation**2, 1e-9))
    if not (abs(score) > features.CLEAR and abs(correlation) > 0.4):
        return []
    side = data.names["a" if correlation > 0 else "b"]
    broken, next = SIDES.get(side, "computation"), commands.weights_replay(data)
    numbers: dict[str, Number] = {"cause": "after_update", "side": side, "correlation": abs(correlation)}
    numbers["num_sequences"] = int(there.sum())
    return [WEIGHTS.finding(data, "follows_advantages", weight=0.9, next=next, broken=broken, numbers=numbers)]


def find_reference(data: PairData) -> list[Hypothesis]:
    """Explain d as a constant part of the trainer's distance from the reference: all of it at some steps, or the same
    part of it at every step. With an engine a few updates behind, this part shrinks from step to step.

    Both sides must agree at the first step. Otherwise, the trainer may be wrong while its policy has hardly moved.
    """
    if data.reference is None or data.names != {"a": TRAIN, "b": ROLLOUT} or level(data) < allowed_noise(data) / 4:
        return []
    steps = data.sample.steps[data.seq]
    first = steps == steps.min()
    if data.rms(first) > data.rms(~first) / 2:
        return []
    apart = data.a - data.reference()[data.keep]
    known, found = np.isfinite(apart), []
    for step in np.unique(steps[known]):
        at = known & (steps == step)
        square = float(apart[at] @ apart[at])
        # The standard error of the part is then at most 0.05.
        if square > (20 * data.rms(at)) ** 2 and at.sum() >= features.FEW:
            found.append((step, float(data.d[at] @ apart[at]) / square))
    if not found:
        return []
    step, part = np.array(found).T
    inside = part > 0.25
    if inside.sum() == 1 and step[inside] == np.unique(steps)[1]:
        return []  # an engine one update behind also has the initial weights at the second step
    usual = float(np.median(part[inside])) if inside.any() else 0.0
    is_all, is_constant = abs(usual - 1) < 0.1, inside.all() and len(part) >= MIN_COURSE
    if np.abs(part - np.where(inside, usual, 0.0)).max() > 0.1 or not (is_all or is_constant):
        return []
    at, usual = known & np.isin(steps, step[inside]), 1.0 if is_all else usual
    residual = np.where(at, data.d - usual * apart, data.d)
    numbers: dict[str, Number] = {"cause": "reference" if is_all else "part_of_updates", "part": usual}
    numbers |= {"side": ROLLOUT, "other": TRAIN, "num_steps": int(inside.sum()), "of_steps": len(np.unique(steps))}
    numbers |= {"first_step": int(step[inside].min()), "last_step": int(step[inside].max())}
    numbers["weight"] = weight = 1 - float(np.sum(residual[at] ** 2) / max(np.sum(data.d[at] ** 2), 1e-30))
    next = commands.weights_replay(data, int(steps.min()) if is_all else None)
    finding = WEIGHTS.finding(data, "reference", at, weight=weight, next=next, numbers=numbers)
    # A formula of the values themselves, such as a temperature, is simpler than other weights.
    return [replace(predicting(data, finding, residual, 8.0, at), rank=3)]


def find_same_weights(data: PairData) -> list[Finding]:
    """Detect that one side's weights are those of the other side some steps earlier, from tokens that occur again."""
    if (found := features.same_weights(data)) is None:
        return []
    # If the passes agree at the first step, before any update, one of them has not received the updates. Otherwise, the other
    # was scored after the update.
    is_behind = features.growth(data).first < allowed_noise(data)
    behind, other = (data.names[side] for side in ("ba" if found.lag > 0 else "ab"))
    side = behind if is_behind else other
    numbers: dict[str, Number] = {"cause": "stale_weights" if is_behind else "after_update", "side": side}
    numbers |= {"one": behind, "other": other, "lag": abs(found.lag), "num_tokens": found.tokens}
    numbers |= {"apart": found.apart, "own": found.own}
    last = int(data.sample.steps[-1])
    # A side that was scored after the update differs from its own recorded version.
    step = last - abs(found.lag) if is_behind else last
    next, broken = commands.weights_replay(data, step), SIDES.get(side, "computation")
    return [WEIGHTS.finding(data, "same_weights", weight=0.9, next=next, broken=broken, numbers=numbers)]


def find_frozen(data: PairData) -> list[Finding]:
    """Detect a side whose weights do not change from step to step, or too little, although the other side's do."""
    found, grown = features.frozen(data), features.growth(data)
    if found is None or (found[1]["part"] and grown.first > grown.later / 2):
        return []  # a mismatch that is there before any update is no missing update
    side, other = data.names[found[0]], data.names["b" if found[0] == "a" else "a"]
    numbers: dict[str, Number] = {"side": side, "other": other, **found[1]}
    numbers["cause"], signal = ("part_of_updates", "follows") if numbers["part"] else ("frozen", "frozen")
    inside, broken = data.sample.steps[data.seq] >= numbers["since"], SIDES.get(side, "computation")
    before = data.sample.steps[data.sample.steps < numbers["since"]]
    kept = int(before.max(initial=data.sample.steps.min())) if signal == "frozen" else None
    next = commands.weights_replay(data, kept)
    return [WEIGHTS.finding(data, signal, inside, weight=0.9, next=next, broken=broken, numbers=numbers)]


def find_earlier_growth(data: PairData) -> list[Finding]:
    if data.first is None or data.rms() < 5 * data.first[1] or level(data) < allowed_noise(data):
        return []
    known: dict[str, Number] = {"cause": "", "since": data.first[0], "first": data.first[1], "later": data.rms()}
    return [WEIGHTS.finding(data, "grew_before", weight=0.7, next=commands.weights_replay(data), numbers=known)]


def find_growth(data: PairData) -> list[Finding]:
    """Detect a mismatch within rounding that grows from step to step although policy versions are equal.

    Rounding grows with the logits: compare with their spread, and skip steps whose mean logprob is far from the first
    step's, and steps with a nearly uniform policy, whose rounding is that of the recorded values.
    """
    sample, steps, noise = data.sample, data.sample.steps[data.seq], logit_error(data)
    fresh = ((sample.a.versions - sample.b.versions).filled(1) == 0)[data.seq]  # an unknown version is not on policy
    course: list[tuple[float, ...]] = []
    for step in np.unique(steps[fresh]):
        part = fresh & (steps == step)
        surprise, part = float(np.mean(data.a[part] + data.b[part])), part & (data.rest > MIN_REST)
        width = float(np.std(log_odds(data.a[part]))) if part.any() else 0.0
        if part.sum() < features.FEW or width <= MIN_WIDTH or surprise >= 0:
            continue
        if not course or abs(np.log(surprise / course[0][1])) < np.log(1.25):
            log = np.log(noise[part] + np.median(noise[part]) / 4)
            error = np.sqrt(np.sum(np.bincount(data.seq[part], log - log.mean()) ** 2)) / len(log)
            course.append((step, surprise, log.mean(), error, np.log(width)))
    if len(course) < MIN_COURSE or weights_agree(data):
        return []
    known, _, log, error, width = np.array(course).T
    relative = log - width
    last, order = int(np.argmax(relative)), np.argsort(np.argsort(relative)).astype(float)
    ratio = relative[last] - relative[0]
    grown = min(ratio, log[last] - log[0])  # rounding need not shrink with the logits
    is_clear = grown > max(np.log(MIN_GROWTH), features.CLEAR * np.hypot(error[0], error[last]))
    least = 0.0 if grown > np.log(10 * MIN_GROWTH) else MIN_GROWN * allowed_noise(data)
    is_clear &= level(data.within(fresh & (steps == known[last]))) > least
    if not is_clear or features.pearson(order, np.arange(len(order)).astype(float)) < 0.9:
        return []
    numbers: dict[str, Number] = {"cause": "", "first_step": int(known[0]), "last_step": int(known[last])}
    numbers |= {"first": float(np.exp(log[0])), "later": float(np.exp(log[last])), "ratio": float(np.exp(ratio))}
    grows = steps > known[0]
    return [WEIGHTS.finding(data, "grows", grows, weight=0.7, next=commands.weights_replay(data), numbers=numbers)]


_MIN_ONSET = 2.0
"""Minimum factor by which the mismatch grows at a recorded attention window."""


def find_window(data: PairData) -> list[Finding]:
    """Detect a mismatch within rounding that grows at exactly the first token beyond a recorded attention window."""
    recorded = named(data.config, *_WINDOWS)
    begins = onset_of(data, "total_position") if recorded and data.num_kept >= FEW_TOKENS else None
    if begins is None or begins[1] < _MIN_ONSET:
        return []
    beyond = data.position + data.sample.prompt_lengths[data.seq] >= begins[0]
    for setting, window in recorded.items():
        # A token's logprob is computed at the position before it, so the onset may be one past the window.
        if isinstance(window, int) and begins[0] - window in (0, 1):
            numbers: dict[str, Number] = {**data.names, "cause": "window", "setting": setting, "window": window}
            numbers |= {"onset": begins[0], "times": begins[1]}
            return [ONSET.finding(data, "recorded", beyond, next=_triangulation(data), numbers=numbers)]
    return []


def measured(data: PairData) -> dict[str, Number]:
    effect, score = features.token_effect(data)
    return {
        "level": level(data), "allowed": allowed_noise(data), "token_effect": effect, "token_score": score,
        "along_movement": features.along_movement(data), **data.names, **coarsest(data),
    }  # fmt: skip


def find_engine_weights(data: PairData) -> list[Finding]:
    if not _is_of_both(data):
        return []
    steps = data.sample.steps[data.seq]
    return [
        WEIGHTS.finding(
            data, "engine_weights", np.isin(steps, list(fault.steps)), next=commands.engine_weights(data),
            numbers={
                "cause": fault.cause, "side": ROLLOUT, "tensor": fault.tensor, "trainer_version": fault.version,
                "holds_version": fault.holds_version, "given_version": fault.given_version, "is_loaded": int(fault.is_loaded),
                "dtype": fault.cast, "num_tensors": fault.num_tensors, "of_tensors": fault.of_tensors,
                "num_versions": fault.num_versions, "of_versions": fault.of_versions, "first_version": fault.first_version,
            },
        )
        for fault in data.engine.faults
    ]  # fmt: skip


def weights_agree(data: PairData) -> bool:
    steps = np.unique(data.sample.steps[data.seq]).tolist()
    return bool(steps) and _is_of_both(data) and data.engine.agreeing_steps.issuperset(steps)


def _is_of_both(data: PairData) -> bool:
    names = set(data.names.values())
    return ROLLOUT in names and bool(names & {TRAIN, CURRENT})


# --- Kinds

MIN_SECOND = 0.2
"""Minimum probability for also reporting the second most probable kind."""
MIN_CLEAR = 0.6
"""Minimum probability of a kind for reporting which side's weights lag, and for reporting it before a recorded setting that
could explain the mismatch as well. Of 86 faults in public reports (sets 22 to 35), 90% of the kinds above it are right, and
71% of the 17 below."""
MAX_ROUNDING = 0.1
"""A mismatch that rounding could explain is a fault only if the probability of rounding is below this. With each author's
runs held out, 0 of 1,304 healthy runs and 3 of 92 H100 pairs are below it, and 64 of 495 of one author's far sharper
random policies."""
TAIL_RATIO = 10.0
"""A token belongs to the tail if its logit error exceeds the median by this factor. Rounding alone reaches 6 to 8."""
MIN_PLACE_RATIO = 10.0
"""Minimum factor by which the median mismatch at a place exceeds the rest if only the place is reported as wrong."""
MAX_NAMED = 20
"""Maximum number of token ids, or values of a column, that together count as one place."""

COMPUTATION = Fault(code="computation_differs", title="one side's model differs throughout", broken="computation", evidence={
    "equal_weights": f"the engine sampled with the trainer's weights (all tensor digests agree), but {features.SIZE}",
    "judged": features.judged("quantised, converted or wrongly loaded weights, or a different rotary embedding, norm, attention, soft cap, expert or precision"),
    "setting": "the recorded settings include {settings}, which one side may ignore, compute differently, or load the wrong weights for. " + features.SIZE_AND_PLACE,
}, words=dict.fromkeys(("equal_weights", "judged", "setting"), features.judged_words), causes={
    "since": "one side's model or numerics changed during the run",
    "setting": "one side's model differs, possibly in a part that a recorded setting controls",
    "head": "one side's output layer differs, such as a missing bias: each token id has its own mismatch",
})  # fmt: skip
NOT_REPEATABLE = Fault(
    code="not_repeatable", title="one side gives identical tokens different values", broken="computation",
    evidence={"judged": features.judged("dropout, noise, or a context that was not recorded")}, words={"judged": features.judged_words},
)  # fmt: skip
_CONTEXTS = {
    "prompt": ("the two sides read different prompts or positions", "a different BOS token, chat template, truncation, cached prefix, prompt mask or rotary embedding"),
    "prefill": ("one side processes prompts incorrectly", "chunked prefill that loses earlier chunks, or a stale prefix cache: the first response token, which the prompt's forward pass predicts, differs most"),
    "cached": ("the engine reads prompts with older weights: a prefix cache kept across weight updates", "a prefix cache that is not reset when the weights change: the mismatch begins at rounding level, grows with the updates, and fades along responses"),
    "replaced": ("the engine has older weights up to a certain response position: they were replaced during sampling", "a weight update at response token {onset}, which no recorded policy version shows"),
    "decode": ("one side decodes incorrectly after the prompt: wrong positions or a wrong cache", "wrong positions or a wrong cache after the prompt: the first response token, which the prompt's forward pass predicts, agrees"),
    "turns": ("later turns have a different context", "a template that drops or rewrites earlier turns or tool output, or positions that restart"),
    "neighbours": ("padding is attended to, or packed rows attend to each other", "attention to padding, position ids that count padding, or attention between packed rows"),
    "cut": ("long prompts are truncated, partly read, or get wrong positions", "prompts truncated to a maximum length, prompt chunks that were lost, or rotary positions that lose precision"),
    "group": ("the two sides read different prompts: on one side, some prompts start with another prompt's prefix",
              "another prompt's cached prefix, or prompt parts in a different order"),
    "padding": ("padding is attended to or counted in position ids", "attention to padding, or position ids that count it; only rows with padding are affected"),
    "packing": ("packed rows attend to each other", "attention between packed rows; only each pack's first row is correct"),
    "ids": ("the two sides read some token ids differently", "different embeddings for these ids, a mask that treats them as padding, or ids that one side maps to other ids"),
}  # fmt: skip
"""Code of the cause -> title of the finding, and typical causes."""
_ONSETS = {
    "": ("", "the KV cache, the rotary embedding, an attention window, a context-parallel chunk, or a weight update during sampling"),
    "window": ("one side attends to fewer tokens, or its positions are limited: an attention window, an evicted cache, or rotary positions",
               "a sliding window or an evicted cache of about {onset} tokens, or positions that are wrong from about {onset} on"),
    "shards": ("one side's context restarts at fixed columns, as if shards or chunks did not see earlier ones",
               "context-parallel shards or prefill chunks of {onset} columns that do not attend to earlier ones"),
    "event": ("from some response position on, one side has different weights, a different context or a different kernel", "a weight update during sampling, a resumed request, a template that rewrites earlier turns, or a switch of the attention kernel, at response token {onset}"),
    "older": ("responses begin with older weights than the rest: the weights changed during sampling",
              "requests were continued after a weight update; if the policy version was recorded at the end, it is wrong for the beginning"),
    "newer": ("responses end with other weights than they begin with: the weights changed during sampling",
              "requests were continued after a weight update; if the policy version was recorded at the start, it is wrong for the end"),
    "beginnings": ("some responses begin in a different context", "typical causes: a weight update during sampling, cached prefixes of other prompts, or requests that were preempted and resumed"),
    "ends": ("from some token on, part of the responses have a different context or other tokens", "typical causes: text that was tokenised again, a weight update during sampling, a resumed request, a lost cache, or a template that rewrites earlier turns"),
}  # fmt: skip


def _in_rows(numbers: Mapping[str, Any]) -> dict[str, str]:
    end = "before" if numbers["cause"] in ("older", "beginnings") else "from"
    whole = f"; {numbers['num_whole']:,} other sequences differ throughout" if numbers["num_whole"] else ""
    return {"end": end, "whole_text": whole, "hint": _ONSETS[numbers["cause"]][1]}


def _by_cause(code: str, title: str, causes: Mapping[str, tuple[str, str]], **more: str) -> Fault:
    def words(n: Mapping[str, Any]) -> dict[str, Any]:
        return {**features.judged_words(n), "hint": causes[n["cause"]][1].format_map(n)}

    return Fault(
        code=code, title=title, broken="computation", words={"judged": words, "implied": words, "in_rows": _in_rows},
        evidence={"judged": features.judged("{hint}"), "implied": features.implied("{hint}"), **more},
        causes={cause: name for cause, (name, _) in causes.items() if cause},
    )  # fmt: skip


ROW_CONTEXT = _by_cause("row_context", "the two sides read different contexts", _CONTEXTS)
_WINDOWS = ("sliding_window", "attention_chunk_size", "original_max_position_embeddings")
ONSET = _by_cause(
    "position_onset", "the mismatch begins inside sequences", _ONSETS,
    recorded="from token {onset} of prompt and response on, the logits differ {times:.2g} times as much as before, exactly where the recorded {setting} of {window} cuts off the first token, so one side's window has a different size",
    in_rows="in {num_rows:,} of {of_rows:,} sequences, the logits differ by {high:.2g} nats (median) {end} one token, which varies from sequence to sequence; all other tokens differ by {low:.2g}{whole_text}; {hint}",
)  # fmt: skip
ROUTER_FLIPS = Fault(code="router_flips", title="the two sides choose different experts", broken="engine", evidence={
    "router_tail": "{tail_share:.2%} of the tokens differ by more than {tail_ratio:g} times the median ({bulk:.2g} nats in the logit){experts_known}"
}, clauses={"experts_known": {
    0: ", as if two routers chose different experts for them; the trace does not show whether the model has experts",
    1: "; the model is a mixture of experts, and for these tokens, the two sides' routers chose different ones",
}}, causes={"unknown": "a few tokens differ far more than the rest, as in mixtures of experts"})  # fmt: skip

KINDS: Mapping[str, tuple[Fault, str]] = {
    "weights": (WEIGHTS, ""), "model": (COMPUTATION, ""), "noise": (NOT_REPEATABLE, ""),
    "prompt": (ROW_CONTEXT, "prompt"), "turns": (ROW_CONTEXT, "turns"), "neighbours": (ROW_CONTEXT, "neighbours"),
    "onset": (ONSET, ""), "sampler": (PENALTY, ""), "values": (UNRELATED, "values"),
}  # fmt: skip
TITLES = {kind: fault.causes.get(cause, fault.title) for kind, (fault, cause) in KINDS.items()}


_IMPLIED = {
    "pad_left": ("neighbours", "padding"), "shorter": ("neighbours", "padding"), "forward_row": ("neighbours", "packing"),
    "not_first_of": ("neighbours", "packing"), "later_turn": ("turns", "turns"), "prompt_seen_before": ("prompt", "prompt"),
    "prompt_length": ("prompt", "cut"), "group_id": ("prompt", "group"), "after_ids": ("prompt", "ids"), "from_ids": ("prompt", "ids"),
}  # fmt: skip
"""Feature shared by the affected tokens -> implied kind and cause."""
_CONTEXT = ("position", "total_position", *_IMPLIED)


def find_placed(data: PairData, where: Sequence[Where]) -> list[Hypothesis]:
    """Explain the mismatch by its location: fixed places, part of the run, or rows whose context differs."""
    tried = (find(data, place) for place in where for find in (_fixed_place, _part_of_run, _other_context))
    return [found for found in tried if found is not None]


def find_parts(data: PairData) -> list[Hypothesis]:
    """Explain the mismatch by rows that differ only before, or only after, a token that varies by row."""
    if (found := features.parts_of_rows(data)) is None:
        return []
    inside, are_first, numbers, cost = found
    later, joined = later_turn(data.sample)[data.keep], np.diff(data.seq) == 0
    begins = joined & (np.diff(inside.astype(int)) == (-1 if are_first else 1))
    if (later[1:] > later[:-1])[begins].mean() > 0.5:
        return []  # the turns say more
    steps = data.sample.steps[data.seq]
    is_of_weights = inside[steps == steps.min()].mean() <= inside.mean() / 5 and abs(features.along_movement(data)) > 4
    if is_of_weights:
        numbers["cause"] = "older" if are_first else "newer"
    else:
        numbers["cause"] = "beginnings" if are_first else "ends"
    finding = ONSET.finding(data, "in_rows", inside, next=commands.far_tokens(data), numbers=numbers)
    return [located(data, replace(finding, side="recording") if is_of_weights else finding, inside, cost)]


def _other_context(data: PairData, place: Where) -> Hypothesis | None:
    is_set = place.kind == "one_of" and not place.feature.endswith("_ids")
    if not place.feature.startswith(_CONTEXT) or is_set or _is_alternating(data, place):
        return None
    cost = 3.0 + np.log(data.num_kept) * (len(place.values) > 0)
    return located(data, find_kinds(data, place)[0], place.inside, cost, place)


def find_kinds(data: PairData, place: Where | None = None) -> list[Finding]:
    told = None if place is None else _implied(data, place)
    is_position = place is not None and place.feature in ("position", "total_position")
    begins = features.onset(data) if is_position else None
    if begins is not None and not (begins.shape == "event" and later_turn(data.sample)[data.keep].any()):
        told = ("onset", "")
    if told is not None:
        return [_finding(data, *told, None, place)]
    known = features.probabilities(_after_jump(data))
    if features.repeats(data).agreeing < 0.5:  # other weights give identical tokens of a step the same wrong value
        known = {kind: value for kind, value in known.items() if kind != "weights"}
    first, second, *_ = known = among_faults(known)
    is_close = known[second] >= MIN_SECOND
    rival: dict[str, Number] = {"rival": second, "rival_probability": known[second]} if is_close else {}
    found = [_finding(data, first, KINDS[first][1], known[first], place, rival)]
    found += [_finding(data, second, KINDS[second][1], known[second], place)] if is_close else []
    is_early = first in _LIKE_SETTINGS and found[0].numbers["cause"] != "head" and not _grew(data)
    if is_early and unusual_settings(data):
        setting = _finding(data, "model", "setting", sum(known[kind] for kind in _LIKE_SETTINGS), place)
        found = [each for each in found if each.code != COMPUTATION.code]
        found.insert(int(first != "model" and known[first] >= MIN_CLEAR), setting)
    return found


_LIKE_SETTINGS = ("model", "prompt", "neighbours", "onset")
"""Kinds whose mismatch a wrong setting of the model can cause."""
_SETTINGS = {
    "rope_type": "default", "factor": 1, "attention_factor": None, "partial_rotary_factor": 1, "mrope_section": None,
    "final_logit_softcapping": None, "attn_logit_softcapping": None, "logits_scaling": 1, "logit_scale": 1,
    "embedding_multiplier": 1, "residual_multiplier": 1, "attention_multiplier": 1, "num_experts": 0,
    "num_local_experts": 0, "n_routed_experts": 0, "moe_num_experts": 0, "norm_topk_prob": False, "routed_scaling_factor": 1,
}  # fmt: skip
"""Fields of transformers' model configs that change what a model computes -> value without effect."""


def unusual_settings(data: PairData) -> str:
    """Return recorded settings that most runs lack, such as rotary scaling, experts or a repetition penalty, as text. In 19
    of 20 rebuilt bug reports (not blind) with such a setting and one of _LIKE_SETTINGS, one side applied it wrongly."""
    recorded = named(data.config, *_SETTINGS)
    window = data.config.get("sliding_window") if data.config.get("use_sliding_window", True) else None
    if isinstance(window, int) and window < int((data.position + data.sample.prompt_lengths[data.seq]).max(initial=0)):
        recorded["sliding_window"] = window
    if penalty := recorded_penalty(data):
        recorded["repetition_penalty"] = penalty
    usual = {"sliding_window": None, "repetition_penalty": None, **_SETTINGS}
    return ", ".join(f"{name}={value}" for name, value in recorded.items() if value not in (None, usual[name]))


_REPLAYS = re.compile(r"rout\w*_?replay|replay_?rout|return_routed_experts", re.IGNORECASE)


def routing_replay(data: PairData) -> str:
    """Return the recorded setting by which the trainer uses the engine's expert choices, or an empty string."""
    given = {**data.settings, **data.contract("b"), **data.contract("a")}
    off = (None, False, "disabled", "False", "false")
    return next((name for name, value in given.items() if _REPLAYS.search(name) and value not in off), "")


def _grew(data: PairData) -> bool:
    """Return True if the mismatch was within rounding at the first step and clearly exceeds it later."""
    grown = features.growth(data)
    return grown.since is not None and grown.later > 2 * max(grown.first, 1e-9) and grown.first < allowed_noise(data)


@once
def _after_jump(data: PairData) -> PairData:
    """Keep only the steps after a jump from rounding level to a higher constant level, which any fault can cause."""
    grown = features.growth(data)
    return data.within(data.sample.steps[data.seq] >= (grown.since or 0)) if grown.is_sudden and _grew(data) else data


def _begins_later(data: PairData, place: Where) -> bool:
    """Return True if the first step's mismatch is about as large at `place` as elsewhere, as with stale weights."""
    first, noise = data.sample.steps[data.seq] == data.sample.steps[data.seq].min(), logit_error(data)
    inside, outside = noise[first & place.inside], noise[first & ~place.inside]
    return bool(not first.all() and len(inside) and len(outside) and np.median(inside) < 2 * np.median(outside))


def among_faults(found: Mapping[str, float]) -> dict[str, float]:
    known = {kind: value for kind, value in found.items() if kind in KINDS}
    total = max(sum(known.values()), 1e-12)
    return {kind: value / total for kind, value in known.items()}


def _is_alternating(data: PairData, place: Where) -> bool:
    is_packed = np.isfinite([*data.sample.a.forward_row, *data.sample.b.forward_row]).any()
    return place.feature == "not_first_of_2" and not is_packed


def _implied(data: PairData, place: Where) -> tuple[str, str] | None:
    name = next((name for name in _IMPLIED if place.feature.startswith(name)), None)
    if name is None or _is_alternating(data, place) or _begins_later(data, place):
        return None
    if place.kind == "one_of" and not name.endswith(("_id", "_ids")):
        return None  # only some rows of each pack, or some lengths, are affected
    steps, noise = data.sample.steps[data.seq], logit_error(data)
    others = noise[~place.inside & np.isin(steps, steps[place.inside])]
    if name == "prompt_seen_before" and len(others) and np.median(others) > allowed_noise(data):
        return None  # new prompts differ as well
    if name == "group_id" and np.isin(np.unique(steps[place.inside]), steps[~place.inside]).mean() <= 0.5:
        return None  # whole steps are affected
    if place.kind == "before" and place.feature.startswith(("pad_left", "shorter_prompt", "prompt_length")):
        # Rows without padding have the longest prompts. Rows with short prompts have the most padding.
        name = "pad_left" if name == "prompt_length" else "prompt_length"
    return _IMPLIED[name]


def _finding(
    data: PairData, kind: str, cause: str, probability: float | None, place: Where | None, rival: Mapping[str, Number] = MappingProxyType({}),
) -> Finding:  # fmt: skip
    grown, twins, inside = features.growth(data), features.repeats(data), None if place is None else place.inside
    signed = features.clipped(data.d / data.scale)
    numbers: dict[str, Number] = {**measured(data), "cause": cause, "probability": probability, **rival}
    if cause == "setting":
        numbers["settings"] = unusual_settings(data)
    broken, later = None, data if place is not None else _after_jump(data)
    told = (each for each in features.reasons(later, kind) if later is data or each[0] != "first_step")
    for at, (name, value, is_above) in enumerate(told):
        numbers |= {f"reason_{at}": name, f"reason_{at}_value": value, f"reason_{at}_above": int(is_above)}
    if place is not None:
        numbers |= {**place.numbers, **features.counts(data, place.inside), "ratio": place.ratio}
        numbers["rms_elsewhere"] = data.rms(~place.inside)
    if kind == "weights":
        if _grew(data):
            steps = data.sample.steps[data.seq]
            most = max(level(data.within(steps == step)) for step in np.unique(steps[steps >= grown.since]))
            numbers |= {"since": grown.since, "first": grown.first, "later": grown.later, "level": most}
            # In six rebuilt bug reports (not blind), it fades by at most a sixth, but by a third with older weights in a
            # prefix cache.
            fall, certainty = features.fades(data, steps >= grown.since)
            if fall > 0.3 and certainty > 4:
                numbers["cause"] = "early"
        along = features.along_movement(data) if numbers["cause"] != "early" else 0.0
        is_clear = abs(along) >= 2.5 and (probability is None or probability >= MIN_CLEAR)
        behind = "" if not is_clear else "b" if along > 0 else "a"
        broken = SIDES.get(data.names.get(behind, ""), "computation")
    elif kind == "model" and not cause and features.variance_between(signed, data.sample.tokens[data.keep])[0] > 0.7:
        # Other parts of a model act on the context: in nine rebuilt bug reports (not blind), ids explain less than half.
        numbers["cause"] = "head"
    elif kind == "model" and not cause and later is not data:
        numbers["cause"] = "since"
    elif kind == "noise" and twins.is_known:
        numbers["side"] = data.names["a" if twins.a > twins.b else "b"]
        broken = SIDES.get(str(numbers["side"]), "computation")
    elif kind == "prompt" and cause == "prompt":
        # Prefill computes the first response token's logprob, so only a prefill fault makes its error large.
        ratio = _first_token_ratio(data)
        numbers["cause"] = "prefill" if ratio > 3 else "decode" if ratio < 1 / 9 else cause
        if numbers["cause"] == cause and _grew(data) and not grown.is_sudden:
            numbers["onset"] = features.fall(data)
            numbers["cause"] = "replaced" if numbers["onset"] else "cached"
            broken = "recording" if numbers["onset"] else SIDES.get(data.names["b"], "computation")
    elif kind == "onset" and (begins := features.onset(data)) is not None:
        numbers |= {"cause": begins.shape, "onset": begins.column - (begins.shape == "shards")}
    return KINDS[kind][0].finding(
        data, "setting" if cause == "setting" else "implied" if probability is None else "judged", inside,
        weight=1.0 if probability is None else probability, next=_next(data, kind, cause), broken=broken, numbers=numbers,
    )  # fmt: skip


def _first_token_ratio(data: PairData) -> float:
    """Return the ratio of the first response token's logit error to the next four tokens'. NaN with too few tokens."""
    noise, position = logit_error(data), data.position
    first, others = noise[position == 0], noise[(position > 0) & (position < 5)]
    return float(np.median(first) / np.median(others)) if min(len(first), len(others)) >= 20 else float("nan")


def _next(data: PairData, kind: str, cause: str) -> Advice:
    if cause == "setting":
        return _triangulation(data)
    if kind in ("weights", "model"):
        return commands.weights_replay(data)
    if kind == "neighbours":
        return commands.arms(data, "--arm padding=left --arm padding=packed")
    if kind in ("sampler", "values"):
        return commands.far_tokens(data)
    return commands.query(data, "prefix-noise" if kind == "noise" else "by-position")


def _triangulation(data: PairData) -> Advice:
    return commands.triangulate(data, dtype_of(data.contract("a")))


def equal_weights(data: PairData) -> Finding:
    return COMPUTATION.finding(data, "equal_weights", next=_triangulation(data), numbers=measured(data))


def is_fault(data: PairData) -> bool:
    """Return True if a whole run's mismatch correlates with something that does not affect rounding, and is larger than a
    single rounding of the logits, whose pattern depends on the kernels' tiles."""
    is_whole = data.num_kept > 0.9 * data.sample.compared.sum() and data.num_kept >= FEW_TOKENS
    is_large = is_whole and data.rms() > 0.0 and level(data) > allowed_noise(data) / NOISE_FACTOR
    return is_large and features.probabilities(data)[features.NO_FAULT] < MAX_ROUNDING


def find_router_flips(data: PairData, off: np.ndarray) -> list[Finding]:
    """Detect router flips in MoE models: tokens, including `off` ([K] bool), that differ far more than most, either way."""
    mixture = is_mixture(data)
    noise = np.abs(data.d) / data.scale
    bulk = float(np.median(noise))
    tail = off | (noise > TAIL_RATIO * bulk)
    lean = abs(float(np.sum(np.sign(data.d[tail]))))
    is_one_sided = lean > 0.6 * tail.sum() and lean > 2.6 * np.sqrt(tail.sum())  # by chance, 1 run in 100 reaches 2.6
    most = 0.4 if mixture else 0.1
    if mixture is False or not 0.002 < tail.mean() < most or is_one_sided:
        return []
    if mixture is None and (data.updates_behind.any() or float(np.quantile(noise[tail], 0.99)) > max_flip(data)):
        return []
    is_usual = tail.mean() < 0.05 or level(data) < allowed_noise(data)
    known = [side.coarsest for side in precisions(data)]
    rounds_routers = None in known or any(dtype in HALF_ULP for dtype in known)
    expected = bool(rounds_routers and is_usual and not is_fault(data))
    if mixture is None and not expected:
        return []
    numbers: dict[str, Number] = {"tail_share": float(tail.mean()), "tail_ratio": TAIL_RATIO, "bulk": bulk}
    numbers |= {"experts_known": int(bool(mixture)), "cause": "" if mixture else "unknown"}
    next = commands.replay(data, "--routing recorded", "routed") if mixture else commands.far_tokens(data)
    weight = _share_of_squares(data, tail)
    flips = ROUTER_FLIPS.finding(data, "router_tail", tail, weight=weight, next=next, numbers=numbers)
    return [replace(flips, is_expected=expected)]


def _share_of_squares(data: PairData, tokens: np.ndarray) -> float:
    return float(np.sum(data.d[tokens] ** 2) / max(np.sum(data.d**2), 1e-30))


# --- Tokens at one place, or in part of a run

_TOKENS = (
    "first_token", "last_token", "last_of_truncated", "from_end", "position", "total_position", "token_id", "token_before", "starts_turn",
)  # fmt: skip
BY_TIME = ("step", "version", "version_a", "version_b", "lag")
_ROW_SETTINGS = ("row", "group_rank", "reward_above_0", "advantage_above_0", "response_length", "total_length")


def _place(numbers: Mapping[str, Any]) -> dict[str, str]:
    lower, words = numbers["share_lower"], f"{numbers['a']} than under {numbers['b']}"
    sign = "" if 0.3 < lower < 0.7 else f"; {lower:.0%} of them are less likely under {words}"
    return {"where": where_text(numbers) if numbers.get("feature") else "", "sign_text": sign}


_EVIDENCE = {
    "place": "{num_tokens:,} of {of_tokens:,} tokens, {where}, differ by {size:.3g} nats on average, and the rest by {elsewhere:.2g} nats{sign_text}"
}
_CAUSES = {"last_of_truncated": "truncated", "token_id": "some_ids", "token_before": "after_some_ids"}

ONE_PLACE = Fault(
    code="one_place", title="values at one fixed place in the sequences are wrong", broken="computation",
    evidence=_EVIDENCE, words={"place": _place},
    causes={
        "truncated": "the last token of truncated responses is wrong, as if another token, such as an end token, had replaced the sampled one",
        "some_ids": "some token ids are scored wrongly, because their rows in the output head, a bias, or the ids themselves are wrong",
        "after_some_ids": "tokens after some ids are scored wrongly, so these ids may have wrong embeddings",
        "ids": "tokens with ids above or below a limit are wrong, possibly because of a vocabulary shard, added tokens, or ids stored in too few bits",
    },
)  # fmt: skip
BOUNDARY = Fault(
    code="chunk_boundary", title="tokens at the boundaries of chunks or context-parallel shards are scored wrongly",
    broken="computation", evidence=_EVIDENCE, words={"place": _place},
)  # fmt: skip
SUBSET = Fault(
    code="subset", title="the mismatch is concentrated in part of the run", broken="engine",
    evidence={"column": "{num_sequences:,} of {of_sequences:,} sequences, {where}, have {times} times the mismatch of the rest (rms {effect:.2g} vs {rms_elsewhere:.2g} nats)"},
    words={"column": lambda n: {"where": where_text({**n, "feature": n["column"]}), "times": features.times_text(n["ratio"])}},
)  # fmt: skip


def _sizes(data: PairData, inside: np.ndarray) -> dict[str, Number]:
    size = np.abs(data.d)
    return data.names | features.counts(data, inside) | {
        "size": float(size[inside].mean()), "elsewhere": float(size[~inside].mean()) if not inside.all() else 0.0,
        "largest": float(size[inside].max()), "share_lower": float(np.mean(data.d[inside] < 0)),
    }  # fmt: skip


_MIN_OTHER_IDS = 8
"""Minimum number of token ids that must be right for saying that ids beyond a limit are wrong."""


def _fixed_place(data: PairData, place: Where) -> Hypothesis | None:
    name, values, is_id = place.feature, place.values, place.feature.startswith("token")
    is_range = name in ("token_id", "token_before") and place.kind != "one_of"
    is_boundary = name.startswith(("first_of_chunk", "last_of_chunk", "phase"))
    if not is_boundary and name not in _TOKENS:
        return None
    noise = logit_error(data)
    usual = np.median(noise[~place.inside])
    # Tokens that both sides are certain of have no mismatch, so compare means as well.
    is_wrong = np.median(noise[place.inside]) >= MIN_PLACE_RATIO * usual and place.mean_ratio >= MIN_PLACE_RATIO / 2
    if not is_wrong or usual > allowed_noise(data):
        return None  # the rest is wrong, too
    if len(values) > (MAX_NAMED if is_id else 4) or (place.inside.mean() >= 0.5 and not is_range):
        return None
    ids = (data.sample.tokens if name == "token_id" else data.sample.previous)[data.keep]
    if is_range and len(np.unique(ids[~place.inside])) < _MIN_OTHER_IDS:
        return None  # a few ids stand out, not a range
    is_vague = name.startswith("phase") and (len(values) > 2 or place.ratio < 10)
    is_late = name in ("position", "total_position") and place.kind != "one_of" and values[0] >= 2
    if is_vague or is_late or (name == "from_end" and (place.kind != "before" or values[0] > 4)):
        return None
    cause = "" if is_boundary else "ids" if is_range else _CAUSES.get(name, "")
    fault, weight = BOUNDARY if is_boundary else ONE_PLACE, explained(data, place.inside)
    numbers, next = _sizes(data, place.inside) | place.numbers | {"cause": cause}, commands.far_tokens(data)
    finding = fault.finding(data, "place", place.inside, weight=weight, next=next, numbers=numbers)
    each = np.log(len(np.unique(data.sample.tokens))) if is_id else 3.0
    return located(data, finding, place.inside, 2.0 + each * len(values))


def _part_of_run(data: PairData, place: Where) -> Hypothesis | None:
    name, by_time = place.feature, place.feature in BY_TIME
    known = by_time or name in _ROW_SETTINGS or name in data.sample.settings or _is_alternating(data, place)
    known |= name.startswith(("writer", "contract", "finish_reason", "group_id"))
    if not known or len(place.values) > MAX_NAMED or (name.endswith("_length") and place.kind == "one_of"):
        return None
    steps = data.sample.steps
    marked = np.isin(np.arange(len(steps)), data.seq[place.inside])
    first = int(steps[marked].min())
    since = first if by_time and first > steps.min() and marked[steps >= first].all() else None
    numbers = features.counts(data, place.inside) | {
        "column": name,
        "kind": place.kind,
        "values": place.numbers["values"],
    }
    numbers |= {"ratio": place.ratio, "since": since, "rms_elsewhere": data.rms(~place.inside)}
    numbers["last_before"] = None if since is None else int(steps[steps < since].max())
    next = commands.query(data, "course") if name == "step" else commands.by_column(data, name)
    weight = explained(data, place.inside)
    finding = SUBSET.finding(data, "column", place.inside, weight=weight, next=next, numbers=numbers)
    return located(data, finding, place.inside, 10.0 * len(place.values) - 2.0 * (name == "step"))


# --- Unexplained tokens and fault-free verdicts


def _bound(n: Mapping[str, Any]) -> dict[str, str]:
    usual, dtypes = f"{n['allowed']:.2g}", features.dtypes_text(n)
    if n.get("cause") != "high":
        bound = f"; rounding in {dtypes} usually causes at most {usual} nats"
        if n.get("settings"):
            bound += (
                f" (12 of 177 healthy test traces reach half of that; compare how both sides apply {n['settings']})"
            )
        return {"level_text": f"{n['level']:.2g}", "bound_text": bound}
    most = f"{n['most']:.4g}, which one healthy run in 100 exceeds"
    bound = f", more than the {usual} nats that rounding in {dtypes} usually causes, but less than {most}"
    # Show four digits, because the level may be close to `most`.
    return {"level_text": f"{n['level']:.4g}", "bound_text": bound}


ROUNDING = Fault(code="rounding", title="rounding at the expected level", broken=None, evidence={
    "rounding": "the logits differ by {level_text} nats rms{bound_text}, and no single token differs by more than rounding"
}, words={"rounding": _bound}, causes={"high": "probably rounding, at an unusually high level"})  # fmt: skip
TOO_FEW = Fault(code="too_few", title="too few tokens", broken=None, evidence={
    "too_few": "only {num_tokens:,} comparable tokens; with fewer than {least:,}, only missing values, bitwise equality and gross errors are checked, so record more sequences"
})  # fmt: skip

NOT_COMPARED = Fault(code="not_compared", title="no engine logprobs to compare", broken=None, evidence={"no_rollout": "{why}"})  # fmt: skip


def not_compared(why: str) -> Finding:
    return Finding(
        code=NOT_COMPARED.code, signal="no_rollout", effect=math.nan, share=0.0, numbers={"why": why},
        cause=NOT_COMPARED.title,
    )  # fmt: skip


def _off(numbers: Mapping[str, Any]) -> dict[str, str]:
    words = _place(numbers) | {"dtypes": features.dtypes_text(numbers)}
    if numbers["num_tokens"] == 1 and not words["where"]:
        at = f"position {numbers['position']} of sequence {numbers['seq_id']!r}"
        words["where"] = f"it is at {at} at step {numbers['step']}"
    rows = f"{numbers['num_sequences']:,} of {numbers['of_sequences']:,} sequences"
    return words | {"where": words["where"] or f"they are scattered over {rows} and {numbers['num_ids']:,} token ids"}


UNEXPLAINED = Fault(code="unexplained", title="some tokens differ by more than rounding, and no known cause explains them", broken="computation", evidence={
    "off": "{num_tokens:,} of {of_tokens:,} tokens differ by {size:.3g} nats on average and at most {largest:.3g}. Rounding in {dtypes} cannot cause this, and no known cause explains it: {where}{sign_text}"
}, words={"off": _off})  # fmt: skip


def rounding(data: PairData) -> Finding:
    allowed, found = allowed_noise(data), level(data)
    is_high, settings = found > allowed, unusual_settings(data) if found > allowed / 2 else ""
    next, lag = _triangulation(data) if is_high else NOTHING, data.updates_behind
    numbers: dict[str, Number] = {"cause": "high" if is_high else None, "level": found, "allowed": allowed}
    numbers |= {"most": MAX_EXCESS * allowed, **data.names, **coarsest(data)} | (
        {"settings": settings} if settings else {}
    )
    if lag.any():
        numbers |= {"lagging": int((lag != 0).sum()), "versions_apart": int(np.median(np.abs(lag[lag != 0])))}
        last = np.flatnonzero(lag)[-1]
        if data.has_weights and not is_high:
            version, step = (
                min(int(each.versions[last]) for each in (data.sample.a, data.sample.b)),
                int(data.sample.steps[last]),
            )
            next, numbers["older_version"] = commands.arms(data, f"--arm weights-version={version}", step), version
    return ROUNDING.finding(data, "rounding", next=next, numbers=numbers)


def unexplained_tokens(data: PairData, off: np.ndarray, place: Where | None) -> Finding:
    worst = int(np.flatnonzero(off)[np.argmax(np.abs(data.d[off]))])
    row, num_ids = int(data.seq[worst]), len(np.unique(data.sample.tokens[data.keep][off]))
    numbers = _sizes(data, off) | coarsest(data) | (place.numbers if place else {})
    numbers |= {"position": int(data.position[worst]), "seq_id": data.sample.seq_ids[row]}
    numbers |= {"step": int(data.sample.steps[row]), "num_ids": num_ids}
    weight, next = _share_of_squares(data, off), commands.far_tokens(data)
    return UNEXPLAINED.finding(data, "off", off, weight=weight, next=next, numbers=numbers)
