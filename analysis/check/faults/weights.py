"""Weights that differ between trainer and engine, according to the recording or because the mismatch grows with the
updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ....schemas.contract import Contract
from .. import commands
from ..finding import Fault, Finding, Number
from ..hypothesis import CLAIM_NATS, Hypothesis, by_step
from ..pair_data import PairData, declared
from ..rounding import allowed_noise, precisions
from ..structure import along_movement, fades, growth, token_effect

MIN_ALONG = 2.5
"""Minimum alignment between d and the weight updates, in standard errors, for the text to mention it: rounded weights
stay below 2.
"""
CLEAR_ALONG = 4.0
"""Alignment between d and the weight updates, in standard errors, that shows weights of another version at any size: healthy
runs stay below 2.5."""
MIN_GROWTH = 2.5
"""Minimum ratio between the mismatch at a later step and at the first step for the mismatch to count as growing with
the updates.
"""
CLEAR_GROWTH = 5.0
"""Ratio from which the mismatch counts as growing at any size, even far below what rounding allows."""
MIN_TOKEN_EFFECT = 0.15
"""Minimum share of the mismatch explained by token ids for weights to be suspected: different weights shift a token's
logprob in the same direction in every context; rounding does not.
"""

_QUANTISED = (
    ("config", "model_config", "quantization"),
    ("model", "quantization"),
    ("config", "cache_config", "cache_dtype"),
    ("arm", "quantize"),
    ("arm", "kv_dtype"),
)
"""Contract paths that may declare quantised weights or a quantised KV cache."""
_NOT_QUANTISED = ("auto", "None", "bfloat16", "float16", "float32")


def _tensor(numbers: Mapping[str, Any]) -> dict[str, str]:
    """Return a phrase that says what the engine holds instead of the trainer's tensor."""
    tensor, cause = numbers["tensor"], numbers["cause"]
    if cause == "adapter":
        text = f"the engine's {tensor} is the trainer's without its adapter, at version {numbers['trainer_version']}"
    elif cause == "quantised":
        a_row = " per row" if str(numbers["dtype"]).endswith("values") else ""
        text = f"the engine's {tensor} is the trainer's rounded to {numbers['dtype']}{a_row}"
    elif cause == "other_weights":
        text = f"the engine's {tensor} matches the trainer's at no recorded version, rounded or not"
    else:
        version, given, holds = numbers["trainer_version"], numbers["given_version"], numbers["holds_version"]
        how = "it was never sent"
        if given is not None and not numbers["is_loaded"]:
            how = f"the tensor sent at version {given} was not loaded"
        elif given is not None:
            how = f"last sent at version {given}{', already stale then' if given != holds else ''}"
        has = "from no recorded version" if holds is None else f"from version {holds}"
        text = f"the engine's {tensor} is {has}, while the trainer is at {version}; {how}"
    return {"what_text": text}


def _measured(numbers: Mapping[str, Any]) -> dict[str, Any]:
    along = numbers["along_movement"]
    late, ahead = ("b", "a") if along > 0 else ("a", "b")
    behind = f"; the difference follows the updates ({abs(along):.1f} standard errors), as if {numbers[late]} lagged behind {numbers[ahead]}"
    return {
        "dtypes": " and ".join(numbers[f"dtype_{side}"] or "an unknown dtype" for side in "ab"),
        "share_of_tokens": max(numbers["token_effect"], 0.0),
        "fades_text": f"; in the last third of a response it is {np.exp(-numbers['fall']):.2g} times that in the "
        f"first, as with a prompt cached under older weights"
        if numbers.get("cause") == "stale_prefix"
        else "",
        "behind_text": behind if abs(along) > MIN_ALONG else "",
    }


SIZE = "the logits differ by {level:.2g} nats rms, but rounding of {dtypes} gives at most {allowed:.2g}"
_LEVEL = SIZE + "; {share_of_tokens:.0%} of the mismatch depends on the token id, and rounding would not"

WEIGHTS = Fault(
    code="weights_differ",
    title="the weights differ: stale, partly synchronised, without the adapter, or quantised",
    broken="engine",
    evidence={
        "engine_weights": "{what_text}; this holds for {num_tensors:,} of {of_tensors:,} tensors at version "
        "{trainer_version}, and for at least one tensor at {num_versions:,} of {of_versions:,} versions, from "
        "{first_version} on (by the digest of every tensor)",
        "policy_versions": "{side} scored {num_sequences:,} of {of_sequences:,} sequences with weights {updates_behind} "
        "optimizer updates behind the other side's, according to the recorded policy versions",
        "contract": "the contract of {side} has {setting} {value}",
        "one_adapter": "only {side} has an adapter, and " + _LEVEL,
        "some_rows": "{exact:.0%} of the sequences are at the level of rounding and the others are not{behind_text}: "
        "one of several engines, or a part of its rows, used other weights",
        "follows": _LEVEL + "{behind_text}",
        "grew_before": "the rms of d is {first:.2g} nats at step {since}, before the selected steps, and {later:.2g} within them: the mismatch grew with the updates",
        "grows": "the median logit difference grows from {first:.2g} nats at the first step to {later:.2g}, and "
        "exceeds rounding from step {since} on: it is absent at version 0 and grows with the "
        "updates{fades_text}{behind_text}",
    },
    words={
        "engine_weights": _tensor, "one_adapter": _measured, "grows": _measured, "follows": _measured, "some_rows": _measured,
    },
    causes={
        "stale_weights": "one side's weights are a step or more behind",
        "partial_sync": "some weights were not synchronised",
        "adapter": "the adapter is on one side only",
        "quantised": "one side's weights are quantised",
        "stale_prefix": "the engine reuses a prefix cache of older weights",
        "never_synchronised": "the trainer's weights were never sent to the engine",
        "other_weights": "the engine's weights match no recorded version of the trainer",
    },
)  # fmt: skip


def find_declared(data: PairData) -> list[Finding]:
    """Detect weights that differ according to the recorded policy versions or contracts."""
    return _versions(data) + _quantisation(data)


def _versions(data: PairData) -> list[Finding]:
    rows = np.flatnonzero(data.updates_behind)
    rows = rows[np.isin(rows, data.seq)]
    if not len(rows):
        return []
    lag = int(np.median(data.updates_behind[rows]))
    query = 'SELECT step, "pass", policy_version, count(*) AS num_sequences FROM scores GROUP BY ALL ORDER BY ALL'
    return [
        WEIGHTS.finding(
            data,
            "policy_versions",
            np.isin(data.seq, rows),
            next=commands.sql(data, query),
            broken="versions",
            numbers={
                "cause": "stale_weights",
                "updates_behind": abs(lag),
                "side": data.names["b" if lag > 0 else "a"],
                "num_sequences": len(rows),
                "of_sequences": data.sample.num_sequences,
            },
        )
    ]


def _quantisation(data: PairData) -> list[Finding]:
    own = {side: _quantised(data.contract(side)) for side in data.names}
    for side, other in (("a", "b"), ("b", "a")):
        for path, value in own[side].items():
            if value not in own[other].values():
                said: dict[str, Number] = {
                    "cause": "quantised", "side": data.names[side], "setting": path[-1], "value": value,
                }  # fmt: skip
                replay = commands.replay(data, "--quantize int8", "suspect", int(data.sample.steps[-1]))
                return [WEIGHTS.finding(data, "contract", next=replay, numbers=said)]
    return []


def _quantised(contract: Contract) -> dict[tuple[str, ...], str]:
    """Return contract path -> setting for each path that declares quantised weights or a quantised KV cache."""
    values = {path: str(declared(contract, *path)) for path in _QUANTISED if declared(contract, *path)}
    return {path: value for path, value in values.items() if value not in _NOT_QUANTISED}


def some_behind(data: PairData, exact: float, inside: np.ndarray) -> Finding:
    """Return the finding that the rows `inside`, [K] bool, were computed with weights from another version."""
    numbers = measured(data) | {"exact": exact}
    return WEIGHTS.finding(data, "some_rows", inside, weight=0.7, next=commands.weights_replay(data), numbers=numbers)


def find_adapter(data: PairData) -> list[Finding]:
    """Detect an adapter on one side only, by the contracts."""
    adapters = [name for side, name in data.names.items() if declared(data.contract(side), "model", "adapters")]
    if len(adapters) != 1:
        return []
    more: dict[str, Number] = {"cause": "adapter", "side": adapters[0]}
    return [
        WEIGHTS.finding(
            data, "one_adapter", weight=0.8, next=commands.weights(data), numbers=measured(data) | more
        )
    ]  # fmt: skip


def find_growth(data: PairData) -> list[Hypothesis]:
    """Detect a mismatch that is no more than rounding at first and grows with the updates, beyond rounding or along their
    direction."""
    found = growth(data)
    if data.first is not None and data.rms() > CLEAR_GROWTH * data.first[1] and level(data) > allowed_noise(data):
        known: dict[str, Number] = {"cause": "", "since": data.first[0], "first": data.first[1], "later": data.rms()}
        finding = WEIGHTS.finding(data, "grew_before", weight=0.7, next=commands.weights_replay(data), numbers=known)
        return [Hypothesis(finding=finding, tokens=data.keep.copy(), gain=0.0, rank=1)]
    if abs(along_movement(data)) > CLEAR_ALONG and _is_of_tokens(data):
        return [_follows_updates(data)]
    if found.since is None or found.ratio < MIN_GROWTH or found.first > allowed_noise(data) / 2:
        return []
    least = allowed_noise(data) / (2 if found.ratio < CLEAR_GROWTH else 8)
    if found.later < least and not (abs(along_movement(data)) > MIN_ALONG and _is_of_tokens(data)):
        return []
    fall, score = fades(data)
    is_prefix = fall > np.log(1.5) and score > 6
    numbers = measured(data) | {"first": found.first, "later": found.later, "since": found.since}
    numbers |= {"cause": "stale_prefix" if is_prefix else "", "fall": fall}
    finding = WEIGHTS.finding(data, "grows", weight=0.8, next=commands.weights_replay(data), numbers=numbers)
    return [by_step(data, finding)]


def _follows_updates(data: PairData) -> Hypothesis:
    numbers = measured(data) | {"cause": "stale_weights"}
    finding = WEIGHTS.finding(data, "follows", weight=0.7, next=commands.weights_replay(data), numbers=numbers)
    # By chance, rounding aligns with the updates to this degree once in exp(score^2 / 2) runs.
    return Hypothesis(
        finding=finding, tokens=data.keep.copy(), gain=along_movement(data) ** 2 / 2 - CLAIM_NATS + 12, rank=1
    )


def _is_of_tokens(data: PairData) -> bool:
    effect, score = token_effect(data)
    return effect > MIN_TOKEN_EFFECT / 2 and score > 5


def measured(data: PairData) -> dict[str, Number]:
    """Return the size of the mismatch and of rounding, and what the mismatch depends on."""
    effect, score = token_effect(data)
    dtypes = {f"dtype_{side}": each.coarsest for side, each in zip("ab", precisions(data), strict=True)}
    return {
        "level": level(data), "allowed": allowed_noise(data), "token_effect": effect, "token_score": score,
        "along_movement": along_movement(data), **data.names, **dtypes,
    }  # fmt: skip


def level(data: PairData) -> float:
    """Return the rms change of the logits that explains d, nats: sqrt(sum d^2 / sum (1 - p)^2), with the largest hundredth
    clipped."""
    known = np.isfinite(data.noise)
    noise, rest = data.noise[known], data.rest[known]
    if not len(noise):
        return 0.0
    cut = float(np.quantile(noise, 0.99))
    return float(np.sqrt(np.sum((np.minimum(noise, cut) * rest) ** 2) / np.sum(rest**2)))
