"""Weights that differ between trainer and engine, either recorded or inferred from a mismatch that grows with updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ....schemas.documents import Contract
from ....schemas.passes import CURRENT, ROLLOUT, TRAIN
from ...trace.ragged import centred
from .. import commands
from ..features import CLEAR, SIZE, along_movement, clipped, counts, judged, judged_words, means, pearson, token_effect
from ..finding import BY_VERSION, SIDES, Fault, Finding, Number
from ..pair_data import FEW_TOKENS, PairData, allowed_noise, coarsest, declared, dtype_of, level, named

_QUANTISED = ("quantization", "quantisation", "quantize", "cache_dtype", "kv_cache_dtype", "kv_dtype")
_NOT_QUANTISED = ("auto", "None", "bfloat16", "float16", "float32")


def _tensor(numbers: Mapping[str, Any]) -> dict[str, str]:
    tensor, cause = numbers["tensor"], numbers["cause"]
    if cause == "adapter":
        text = f"the engine's {tensor} is the trainer's tensor without its adapter, at version {numbers['trainer_version']}"
    elif cause == "quantised":
        a_row = " per row" if str(numbers["dtype"]).endswith("values") else ""
        text = f"the engine's {tensor} is the trainer's tensor rounded to {numbers['dtype']}{a_row}"
    elif cause == "other_weights":
        text = f"the engine's {tensor} matches the trainer's at no recorded version, rounded or not"
    else:
        version, given, holds = numbers["trainer_version"], numbers["given_version"], numbers["holds_version"]
        how = "it was never sent"
        if given is not None and not numbers["is_loaded"]:
            how = f"the tensor sent at version {given} was not loaded"
        elif given is not None:
            how = f"it was last sent at version {given}{' and already stale then' if given != holds else ''}"
        has = "from no recorded version" if holds is None else f"from version {holds}"
        text = f"the engine's {tensor} is {has}, while the trainer is at version {version}; {how}"
    return {"what_text": text}


WEIGHTS = Fault(
    code="weights_differ", title="the weights differ: stale, partly synchronised, without the adapter, or quantised",
    broken="engine",
    evidence={
        "engine_weights": "{what_text}; according to the digests, this is the case for {num_tensors:,} of "
        "{of_tensors:,} tensors at version {trainer_version}, and for at least one tensor at {num_versions:,} of "
        "{of_versions:,} versions, starting at version {first_version}",
        "policy_versions": "according to the recorded policy versions, {side} scored {num_sequences:,} of "
        "{of_sequences:,} sequences with weights that are {updates_behind} optimizer update(s) behind the other side's",
        "contract": "only {side}'s contract sets {setting} to {value}",
        "one_adapter": "only {side} has an adapter, and " + SIZE,
        "grew_before": "the rms of d is {first:.2g} nats at step {since}, before the selected steps, and {later:.2g} within them, so the mismatch grew with the updates",
        "follows_advantages": "each sequence's mismatch correlates with its own advantage ("
        "{correlation:.2f} over {num_sequences:,} sequences): {side} was scored with weights already updated on this "
        "batch",
        "judged": judged(
            "a weight sync that failed, was late or left tensors out; a missing adapter; a replica at a different "
            "version; or trainer logprobs from the reference model or from after the update"
        ),
    },
    words={"engine_weights": _tensor, "one_adapter": judged_words, "judged": judged_words},
    causes={
        "stale_weights": "one side's weights are a step or more behind",
        "partial_sync": "some weights were not synchronised",
        "adapter": "the adapter is on one side only",
        "quantised": "one side's weights are quantised",
        "after_update": "one side was scored after the update on the same batch",
        "never_synchronised": "the trainer's weights were never sent to the engine",
        "early": "older weights or a different prompt at the beginning of responses: a prefix cache kept across updates, or weights swapped during sampling",
        "other_weights": "the engine's weights match no recorded version of the trainer",
    },
)  # fmt: skip


def find_declared(data: PairData) -> list[Finding]:
    return _versions(data) + _quantisation(data)


def _versions(data: PairData) -> list[Finding]:
    inside = data.updates_behind[data.seq] != 0
    if not inside.any():
        return []
    fresh = data.within(~inside)
    if fresh.num_kept >= FEW_TOKENS and level(fresh) > max(allowed_noise(fresh), level(data.within(inside)) / 2):
        return []  # the mismatch is about as large where both sides used the same policy version
    lag = int(np.median(data.updates_behind[np.unique(data.seq[inside])]))
    numbers = counts(data, inside) | {
        "of_sequences": data.sample.num_sequences,
        "side": data.names["b" if lag > 0 else "a"],
    }
    numbers |= {"cause": "stale_weights", "updates_behind": abs(lag)}
    next = commands.sql(data, BY_VERSION)
    return [WEIGHTS.finding(data, "policy_versions", inside, next=next, broken="versions", numbers=numbers)]


def _quantisation(data: PairData) -> list[Finding]:
    own = {side: _quantised(data.contract(side)) for side in data.names}
    for side, other in ("ab", "ba"):
        for name, value in own[side].items():
            if value not in own[other].values():
                numbers = {"cause": "quantised", "side": data.names[side], "setting": name, "value": value}
                replay = commands.replay(data, "--quantize int8", "suspect", int(data.sample.steps[-1]))
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
    positive advantage. Stale weights give no such correlation."""
    advantage, rows = data.sample.outcomes.get("advantage"), np.unique(data.seq)
    if advantage is None or not np.isfinite(advantage[rows]).any():
        return []
    mean = means(clipped(data.d / data.scale), data.seq)[rows]
    mean = centred(mean, np.unique(data.sample.steps[rows], return_inverse=True)[1])
    there = np.isfinite(advantage[rows]) & (advantage[rows] != 0)
    correlation = pearson(advantage[rows][there], mean[there])
    score = correlation * np.sqrt(there.sum()) / np.sqrt(max(1 - correlation**2, 1e-9))
    if not (abs(score) > CLEAR and abs(correlation) > 0.4):
        return []
    side = data.names["a" if correlation > 0 else "b"]
    broken, next = SIDES.get(side, "computation"), commands.weights_replay(data)
    numbers: dict[str, Number] = {"cause": "after_update", "side": side, "correlation": abs(correlation)}
    numbers["num_sequences"] = int(there.sum())
    return [WEIGHTS.finding(data, "follows_advantages", weight=0.9, next=next, broken=broken, numbers=numbers)]


def find_earlier_growth(data: PairData) -> list[Finding]:
    if data.first is None or data.rms() < 5 * data.first[1] or level(data) < allowed_noise(data):
        return []
    known: dict[str, Number] = {"cause": "", "since": data.first[0], "first": data.first[1], "later": data.rms()}
    return [WEIGHTS.finding(data, "grew_before", weight=0.7, next=commands.weights_replay(data), numbers=known)]


def measured(data: PairData) -> dict[str, Number]:
    effect, score = token_effect(data)
    return {
        "level": level(data), "allowed": allowed_noise(data), "token_effect": effect, "token_score": score,
        "along_movement": along_movement(data), **data.names, **coarsest(data),
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
