"""Detect different weights in trainer and engine. The cause is reported if the recording shows it; otherwise a replay
is needed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....schemas.contract import Contract
from ...advice import Advice
from .. import commands
from ..finding import Finding, Number
from ..pair_data import PairData, declared, once
from ..thresholds import (
    MAX_SURE_NOISE,
    MAX_UNTOLD_NOISE,
    MIN_EFFECT_IDS,
    MIN_FLOAT32_TOKEN_EFFECT,
    MIN_FLOAT32_TOKEN_SCORE,
    MIN_TOKEN_EFFECT,
    MIN_TOKEN_SCORE,
    MIN_UNSURE_REST,
    MIN_WEIGHTS_NOISE,
    MOVEMENT_SHRINKAGE,
)
from .engine_weights import weights_agree
from .equality import dtype_of
from .error_structure import error_structure, token_effect
from .numerics import allowed_noise, precisions

_QUANTISED = (
    ("config", "model_config", "quantization"),
    ("model", "quantization"),
    ("config", "cache_config", "cache_dtype"),
    ("arm", "quantize"),
    ("arm", "kv_dtype"),
)
"""Contract paths that may declare quantised weights or a quantised KV cache."""
_NOT_QUANTISED = ("auto", "None", "bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class LogitMismatch:
    """Size of the logit mismatch compared with rounding, and evidence for different weights."""

    level: float
    """Rms change of the logits that explains d, nats: sqrt(sum d^2 / sum (1 - p)^2), with the largest 1 % clipped."""
    allowed: float
    """Maximum logit noise from rounding for models with at least 0.5 billion parameters, nats."""
    token_effect: float
    """Share of the variance of d / (1 - p) explained by the token id, beyond the share expected by chance."""
    token_score: float
    """Distance between `token_effect` and 0, in standard deviations under pure noise."""
    is_sure: bool = False
    """True for a low-entropy policy, whose logits are large and therefore have larger rounding errors."""
    both_float32: bool = False
    """True if both contracts say float32 and do not allow TensorFloat-32."""
    is_of_known_dtypes: bool = True
    """True if the dtype of each pass is declared or inferred."""
    num_ids: int = 0
    """Number of different token ids among the kept tokens."""

    @property
    def bound(self) -> float:
        """Largest level that is attributed to rounding, nats: `allowed` if the mismatch depends on the token id,
        otherwise a multiple."""
        if self.token_score > MIN_TOKEN_SCORE:
            return self.allowed
        return self.allowed * (MAX_SURE_NOISE if self.is_sure else MAX_UNTOLD_NOISE)

    @property
    def is_excessive(self) -> bool:
        return self.level > self.bound

    @property
    def is_of_weights(self) -> bool:
        """True if the mismatch depends on the token id. Rounding errors vary with the context, whereas different
        weights shift a token's logprob in the same direction in every context."""
        least = (MIN_TOKEN_EFFECT, MIN_TOKEN_SCORE)
        if self.both_float32:
            least = (MIN_FLOAT32_TOKEN_EFFECT, MIN_FLOAT32_TOKEN_SCORE)
        is_of_tokens = self.token_effect > least[0] and self.token_score > least[1] and self.num_ids >= MIN_EFFECT_IDS
        return self.level > MIN_WEIGHTS_NOISE and is_of_tokens

    @property
    def may_carry(self) -> bool:
        """True if rounding errors alone may be correlated between tokens, because all later tokens read a rounded state
        or cache."""
        return self.level <= MIN_WEIGHTS_NOISE or not self.is_of_known_dtypes


@once
def logit_mismatch(data: PairData) -> LogitMismatch:
    """Measure the logit mismatch and the share of it that depends on the token id."""
    known = np.isfinite(data.noise)
    noise, rest = data.noise[known], data.rest[known]
    cut = float(np.quantile(noise, 0.99)) if len(noise) else 0.0
    level = float(np.sqrt(np.sum((np.minimum(noise, cut) * rest) ** 2) / np.sum(rest**2))) if len(noise) else 0.0
    sides = precisions(data)
    return LogitMismatch(
        level,
        allowed_noise(sides),
        *token_effect(data),
        is_sure=bool(data.num_kept and data.rest.mean() < MIN_UNSURE_REST),
        both_float32=all(side.coarsest == "float32" and side.declared == "float32" for side in sides),
        is_of_known_dtypes=all(side.coarsest is not None for side in sides),
        num_ids=len(np.unique(data.sample.tokens[data.keep][known])),
    )


def find_declared(data: PairData) -> list[Finding]:
    """Detect weights that differ according to the recorded policy versions or contracts."""
    return _versions(data) + _quantisation(data)


def _versions(data: PairData) -> list[Finding]:
    rows = np.flatnonzero(data.updates_behind)
    if not len(rows):
        return []
    lag = int(np.median(data.updates_behind[rows]))
    query = 'SELECT step, "pass", policy_version, count(*) AS num_sequences FROM scores GROUP BY ALL ORDER BY ALL'
    return [
        data.finding(
            "weights_differ",
            "policy_versions",
            np.isin(data.seq, rows),
            next=commands.sql(data, query),
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
                name = data.names[side]
                said: dict[str, Number] = {"cause": "quantised", "side": name, "setting": path[-1], "value": value}
                replay = commands.replay(data, "--quantize int8", "suspect", int(data.sample.steps[-1]))
                return [data.finding("weights_differ", "contract", next=replay, numbers=said)]
    return []


def _quantised(contract: Contract) -> dict[tuple[str, ...], str]:
    """Return contract path -> setting for each path that declares quantised weights or a quantised KV cache."""
    values = {path: str(declared(contract, *path)) for path in _QUANTISED if declared(contract, *path)}
    return {path: value for path, value in values.items() if value not in _NOT_QUANTISED}


def find_other_weights(data: PairData) -> list[Finding]:
    """Detect a mismatch that is larger than rounding, or that depends on token ids in a way only different weights can
    cause."""
    size, structure = logit_mismatch(data), error_structure(data)
    agree = weights_agree(data)
    differ = size.is_excessive or (size.is_of_weights and not agree)
    adapters = [name for side, name in data.names.items() if declared(data.contract(side), "model", "adapters")]
    if differ and len(adapters) == 1 and not agree:
        declaration = {"cause": "adapter", "side": adapters[0]}
        return [_finding(data, "weights_differ", "one_adapter", 0.8, commands.weights(data), **declaration)]
    if structure.changes_inside(is_excessive=differ) and (differ or not size.may_carry):
        return [_finding(data, "change_inside_sequence", "persistence", 0.5, commands.weights(data))]
    if differ and agree:
        return [
            _finding(
                data,
                "computation_differs",
                "equal_weights",
                0.5,
                commands.triangulate(data, dtype_of(data.contract("a"))),
            )
        ]
    if differ:
        return [_finding(data, "weights_differ", "logits", 0.5, commands.weights_replay(data))]
    return []


def _finding(data: PairData, code: str, signal: str, weight: float, command: Advice, **more: str) -> Finding:
    """Return a finding that includes all measured scores."""
    size, structure = logit_mismatch(data), error_structure(data)
    dtypes = {f"dtype_{side}": each.coarsest for side, each in zip("ab", precisions(data), strict=True)}
    return data.finding(
        code,
        signal,
        weight=weight,
        next=command,
        numbers={
            "level": size.level,
            "allowed": size.bound,
            "token_effect": size.token_effect,
            "token_score": size.token_score,
            "along_movement": along_movement(data),
            "persistence": structure.persistence,
            "sequence_score": structure.sequence_score,
            **data.names,
            **dtypes,
            **more,
        },
    )


def along_movement(data: PairData) -> float:
    """Return the alignment between d and the change in pass a over the steps, in standard errors; 0 for fewer than
    three steps.

    For each token bigram, the mean of d is multiplied by the trend over the steps of its logprob in pass a. The product
    is 0 on average if d is rounding, positive if pass b lags behind pass a, and negative if pass a lags behind pass b.
    Standard errors are computed over sequences. The dependence of d on the size of the logprob is removed first.
    """
    sample = data.sample
    steps = sample.steps[data.seq].astype(float)
    if len(np.unique(steps)) < 3 or not data.num_kept:
        return 0.0
    tokens = sample.tokens.astype(np.int64)
    before = np.concatenate([[-1], tokens[:-1]])
    before[sample.starts[:-1][sample.lengths > 0]] = -1
    _, place = np.unique((tokens * (tokens.max() + 2) + before)[data.keep], return_inverse=True)
    count = np.bincount(place)
    d = np.clip(data.d, *np.array([-3.0, 3.0]) * data.rms())
    bins = np.digitize(data.a, np.quantile(data.a, np.linspace(0, 1, 11)[1:-1]))
    d = d - (np.bincount(bins, d) / np.maximum(np.bincount(bins), 1))[bins]
    mean_d = np.bincount(place, d) / (count + MOVEMENT_SHRINKAGE)
    moved = np.clip(data.a - (np.bincount(place, data.a) / count)[place], -3, 3)
    since = steps - (np.bincount(place, steps) / count)[place]
    products = np.bincount(data.seq, mean_d[place] * since * moved)
    return float(products.sum() / max(np.sqrt(np.sum(products**2)), 1e-30))
