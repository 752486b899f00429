"""Weights that are not the same on both sides: behind, synchronised in part, without the adapter, quantised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import commands
from ..evidence import Evidence, declared
from ..finding import Finding
from ..thresholds import (
    ALIKE,
    MAX_LAG_LEFT,
    MAX_PERSISTENCE,
    MAX_TILT,
    MIN_ALONG,
    MIN_CLEAR_PERSISTENCE,
    MIN_DRIFT_SCORE,
    MIN_GROWTH_SCORE,
    MIN_PERSISTENCE,
    MIN_SEQUENCE_SCORE,
    MIN_TOKEN_EFFECT,
    MIN_WEIGHTS_NOISE,
    STANDING_STILL,
)
from .contexts import Contexts
from .error_structure import texture
from .numerics import Precision, allowed_noise, precisions
from .token_effect import token_effect
from .versions import along_movement, drift, followed, lagged


@dataclass(frozen=True, slots=True)
class WeightGap:
    """How large the gap is against what rounding would do, and whether it looks like other weights."""

    level: float
    """Noise of a logit that gives so large a gap, nats: sqrt(sum d^2 / sum (1 - p)^2), the largest hundredth clipped."""
    allowed: float
    token_effect: float
    """Share of the variance of d / (1 - p) that the token's id explains, beyond chance."""
    token_score: float
    """The same in standard deviations of what chance gives."""

    @property
    def is_excessive(self) -> bool:
        return self.level > self.allowed

    @property
    def is_of_weights(self) -> bool:
        return self.level > MIN_WEIGHTS_NOISE and self.token_effect > MIN_TOKEN_EFFECT and self.token_score > 5


def measure_gap(evidence: Evidence, sides: tuple[Precision, Precision]) -> WeightGap:
    """Measure the gap's size and how much of it belongs to tokens."""
    there = np.isfinite(evidence.noise)
    noise, rest = evidence.noise[there], evidence.rest[there]
    cut = float(np.quantile(noise, 0.99)) if len(noise) else 0.0
    level = float(np.sqrt(np.sum((np.minimum(noise, cut) * rest) ** 2) / np.sum(rest**2))) if len(noise) else 0.0
    effect, score = token_effect(evidence)
    return WeightGap(level, allowed_noise(sides), effect, score)


def find_declared(evidence: Evidence) -> list[Finding]:
    """What contracts and versions say themselves."""
    return _versions(evidence) + _quantisation(evidence)


def _versions(evidence: Evidence) -> list[Finding]:
    a, b = evidence.sample.a, evidence.sample.b
    behind = a.versions - b.versions
    rows = np.flatnonzero(np.nan_to_num(behind) != 0)
    if not len(rows):
        return []
    affected = np.isin(evidence.seq, rows)
    lag = int(np.median(behind[rows]))
    older = b.name if lag > 0 else a.name
    return [
        Finding(
            code="stale_weights",
            evidence=f"{len(rows):,} of {evidence.sample.num_sequences:,} sequences were scored by {older} with weights "
            f"{abs(lag)} optimizer updates behind the other side's, as the recorded policy versions say",
            effect=evidence.rms(affected),
            share=float(affected.mean()),
            next=commands.sql(
                evidence,
                'SELECT step, "pass", policy_version, count(*) AS num_sequences FROM scores GROUP BY ALL ORDER BY ALL',
            ),
            numbers={"updates_behind": abs(lag), "side": older},
        )
    ]


def _quantisation(evidence: Evidence) -> list[Finding]:
    for side in "ab":
        contract = evidence.contract(side)
        for path in (
            ("config", "model_config", "quantization"),
            ("model", "quantization"),
            ("config", "cache_config", "cache_dtype"),
            ("arm", "quantize"),
            ("arm", "kv_dtype"),
        ):
            value = declared(contract, *path)
            if value and str(value) not in ("auto", "None", "bfloat16", "float16", "float32"):
                name = getattr(evidence.sample, side).name
                return [
                    _finding(
                        evidence, "quantised", f"the contract of {name} says {path[-1]} {value}", 1.0, "--quantize int8"
                    )
                ]
    return []


def find_other_weights(evidence: Evidence) -> list[Finding]:
    """The gap is larger than rounding, or belongs to tokens as only other weights make it: which weights, then?"""
    sides = precisions(evidence)
    gap = measure_gap(evidence, sides)
    if not (gap.is_excessive or gap.is_of_weights):
        return _changed_inside(evidence, f"the logits differ by {gap.level:.2g} nats rms", MIN_CLEAR_PERSISTENCE)
    contexts = Contexts.of(evidence)
    size = (
        f"the logits differ by {gap.level:.2g} nats rms, where rounding of {_named(sides)} gives {gap.allowed:.2g} at most, "
        f"and {max(gap.token_effect, 0):.0%} of it belongs to the tokens' identity"
    )
    adapters = [getattr(evidence.sample, s).name for s in "ab" if declared(evidence.contract(s), "model", "adapters")]
    if len(adapters) == 1:
        return [_finding(evidence, "adapter", f"only {adapters[0]} has an adapter, and {size}", 0.8, "")]
    if changed := _changed_inside(evidence, size, MIN_PERSISTENCE):
        return changed
    lag = lagged(contexts)
    if lag is not None and lag.left < MAX_LAG_LEFT:
        name = getattr(evidence.sample, lag.side).name
        seen = (
            f"{name} agrees with the other side of {lag.steps_behind} step(s) before: over {lag.num:,} contexts that come "
            f"again, that leaves {lag.left:.1%} of the squared gap"
        )
        return [
            _finding(
                evidence,
                "stale_weights",
                seen,
                1 - lag.left,
                _stale_option(evidence, lag.steps_behind),
            )
        ]
    moves = followed(contexts)
    if moves is not None and max(moves.moved_a, moves.moved_b) > 0.5 * evidence.rms():
        low, high = sorted((moves.moved_a, moves.moved_b))
        if low < STANDING_STILL * high:
            still = evidence.sample.b.name if moves.moved_b < moves.moved_a else evidence.sample.a.name
            seen = f"{still} stands still from step to step while the other side moves by {high:.2g} nats; {size}"
            return [_finding(evidence, "adapter", seen, 0.7, "")]
        slope = moves.b_on_a
        seen = f"{evidence.sample.b.name} follows {slope:.0%} of {evidence.sample.a.name}'s movements; {size}"
        if slope < 1 - ALIKE:
            return [_finding(evidence, "partial_sync", seen, 0.5, "")]
        if slope > 1 + ALIKE:
            return [_finding(evidence, "stale_weights", seen, 0.5, _stale_option(evidence, 1))]
        return [
            _finding(
                evidence, "quantised", f"both sides move alike from step to step, yet {size}", 0.6, "--quantize int8"
            )
        ]
    return _by_drift(evidence, size)


def _changed_inside(evidence: Evidence, size: str, least: float) -> list[Finding]:
    """Where weights or cached prefixes changed on the way, neighbouring tokens are off alike, and sequences are not."""
    seen = texture(evidence)
    if seen.persistence < least or seen.sequence_score < MIN_SEQUENCE_SCORE:
        return []
    said = (
        f"{size}; neighbouring tokens are off alike (correlation {seen.persistence:.2f} of the gap's size), and sequences are "
        f"not ({seen.sequence_score:.0f} standard deviations): weights or cached prefixes changed while they were being sampled"
    )
    return _ranked(evidence, said, ("change_inside_sequence", "stale_weights"))


def _by_drift(evidence: Evidence, size: str) -> list[Finding]:
    """Rounded weights leave the same gap at every step and at tokens of every probability; weights that were never updated
    one that grows; stale ones one that goes with the last updates. What else is possible follows the most probable."""
    found, along, seen = drift(evidence), along_movement(evidence), texture(evidence)
    behind = abs(along) > MIN_ALONG
    if behind:
        late, other = (evidence.sample.b, evidence.sample.a) if along > 0 else (evidence.sample.a, evidence.sample.b)
        size += f"; it points along the movement of the weights ({abs(along):.1f} standard errors): {late.name} is behind {other.name}"
    constant = not behind and (found is None or found.score < MIN_DRIFT_SCORE)
    if constant and seen.tilt < MAX_TILT and seen.persistence < MAX_PERSISTENCE:
        over = "" if found is None else f" and the same over {found.num_steps} steps"
        what = f"{size}; it is as large at improbable tokens as at probable ones{over}, as rounding of the weights makes it"
        return _ranked(evidence, what, ("quantised", "partial_sync"))
    if found is None:
        what = f"{size}; with fewer than three steps that compare, other weights cannot be told apart"
        return _ranked(evidence, what, ("stale_weights", "partial_sync", "quantised"))
    if found.growth > MIN_GROWTH_SCORE:
        what = (
            f"{size}; it grows from step to step ({found.growth:.1f} standard errors): some weights were never updated"
        )
        return _ranked(evidence, what, ("partial_sync", "adapter"))
    what = f"{size}; it is larger at probable tokens and does not grow with the steps, as the last updates make it"
    return _ranked(evidence, what, ("stale_weights", "partial_sync"))


def _ranked(evidence: Evidence, seen: str, codes: tuple[str, ...]) -> list[Finding]:
    """The most probable fault with its evidence, and those that the same evidence leaves possible."""
    options = {"stale_weights": _stale_option(evidence, 1), "quantised": "--quantize int8"}
    said = [seen, *("the same evidence leaves this possible; a replay decides" for _ in codes[1:])]
    return [
        _finding(evidence, code, why, 0.5 / (place + 1), options.get(code, ""))
        for place, (code, why) in enumerate(zip(codes, said, strict=True))
    ]


def _stale_option(evidence: Evidence, behind: int) -> str:
    return f"--weights-version {_version(evidence, behind)}"


def _finding(evidence: Evidence, code: str, seen: str, weight: float, option: str) -> Finding:
    return Finding(
        code=code,
        evidence=seen,
        effect=evidence.rms(),
        share=1.0,
        weight=weight,
        next=commands.replay(evidence, option, "suspect", int(evidence.sample.steps[-1]))
        if option
        else commands.weights(evidence),
    )


def _version(evidence: Evidence, behind: int) -> int:
    known = evidence.sample.versions[np.isfinite(evidence.sample.versions)]
    return max(int(known.max()) - behind, 0) if len(known) else behind


def _named(sides: tuple[Precision, Precision]) -> str:
    return " and ".join(side.coarsest or "an unknown dtype" for side in sides)
