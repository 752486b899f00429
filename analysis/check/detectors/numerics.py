"""Detect rounded logprobs or logits, and routers that choose different experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....schemas.contract import Contract
from .. import commands
from ..finding import Finding
from ..pair_data import PairData, declared, once
from ..thresholds import (
    EXCESS,
    HALF,
    MAX_HEALTHY_NOISE,
    MAX_ROUNDED_ROUTER_SHARE,
    MAX_ROUTER_TAIL_SHARE,
    MAX_ROUTER_TOKEN_EFFECT,
    MIN_ALL_ROUNDING_SHARE,
    MIN_FLIP_NOISE,
    MIN_ROUNDING_SHARE,
    ROUTER_TAIL_RATIO,
    ROUTER_TAIL_SHARE,
    ROUTER_TOP_SHARE,
)
from .bits import value_precision
from .equality import dtype_of
from .error_structure import token_effect
from .logit_grid import logit_precision


@dataclass(frozen=True, slots=True)
class Precision:
    """dtypes of one pass: declared by its contract, and inferred from its values; None where unknown."""

    declared: str | None
    logits: str | None
    """dtype to which the logits were rounded."""
    values: str | None
    """dtype to which the logprobs themselves were rounded."""
    has_tf32: bool = False
    """True if the contract allows TensorFloat-32 in float32 matrix products."""

    @property
    def coarsest(self) -> str | None:
        """Coarsest dtype declared or inferred; None if unknown. Logits in float32 alone do not show it, because the
        layers before the head may be coarser."""
        seen = [self.declared] if self.declared else []
        seen += ["tf32"] if self.has_tf32 and self.declared == "float32" else []
        seen += [dtype for dtype in (self.logits, self.values) if dtype in HALF]
        return max(seen, key=lambda dtype: MAX_HEALTHY_NOISE.get(dtype, 0.0)) if seen else None


@once
def precisions(data: PairData) -> tuple[Precision, Precision]:
    """Return the precision of pass a and of pass b."""
    a, b = (
        Precision(
            dtype_of(data.contract(side)), grid, value_precision(getattr(data, side)), _has_tf32(data.contract(side))
        )
        for side, grid in zip("ab", logit_precision(data), strict=True)
    )
    return a, b


def _has_tf32(contract: Contract) -> bool:
    return bool(declared(contract, "torch", "cuda_matmul_allow_tf32") or declared(contract, "allow_tf32"))


def allowed_noise(sides: tuple[Precision, Precision]) -> float:
    """Return the maximum logit noise expected from rounding, nats."""
    known = [side.coarsest for side in sides if side.coarsest in MAX_HEALTHY_NOISE]
    return max((MAX_HEALTHY_NOISE[dtype] for dtype in known if dtype), default=EXCESS)


def find_low_precision(data: PairData) -> list[Finding]:
    """Detect rounded logprobs, or rounded logits in a pass whose contract says float32."""
    for side, precision in zip("ab", precisions(data), strict=True):
        step = HALF.get(precision.values or "")
        if step is not None:
            values = getattr(data, side)
            explained = float(np.sum((values * step) ** 2) / 3 / max(np.sum(data.d**2), 1e-30))
            if explained > MIN_ROUNDING_SHARE:
                # If a pass is computed in 16 bits throughout, 16-bit logprobs are expected.
                named = precision.declared in HALF
                unknown = precision.declared is None and explained < MIN_ALL_ROUNDING_SHARE
                return [_head(data, side, "rounded_logprobs", precision.values, is_expected=named or unknown)]
        elif precision.logits in HALF and precision.declared == "float32":
            return [_head(data, side, "rounded_logits", precision.logits)]
    return []


def _head(data: PairData, side: str, signal: str, dtype: str | None, *, is_expected: bool = False) -> Finding:
    part = "log-softmax" if signal == "rounded_logprobs" else "head"
    replay = commands.replay(data, "--logits-dtype bf16", "head")
    return data.finding(
        "low_precision_head",
        signal,
        is_expected=is_expected,
        next=replay,
        numbers={"side": data.names[side], "dtype": dtype, "part": part},
    )


def find_router_flips(data: PairData) -> list[Finding]:
    """Detect that most tokens agree within rounding and a few differ by far more, as happens when a router chooses
    different experts."""
    noise = data.noise[np.isfinite(data.noise)]
    if len(noise) < 50:
        return []
    bulk = float(np.median(noise))
    mixture = is_mixture(data)
    if mixture is None and data.updates_behind.any():  # different weights can also cause a tail
        return []
    tail = noise > ROUTER_TAIL_RATIO * bulk
    if mixture is False or not ROUTER_TAIL_SHARE < tail.mean() < (0.4 if mixture else MAX_ROUTER_TAIL_SHARE):
        return []
    squares = np.sort(noise**2)[::-1]
    top = float(squares[: max(len(squares) // 50, 1)].sum() / max(squares.sum(), 1e-30))
    if (mixture is None and top < ROUTER_TOP_SHARE) or token_effect(data)[0] > MAX_ROUTER_TOKEN_EFFECT:
        return []
    affected = np.nan_to_num(data.noise) > ROUTER_TAIL_RATIO * bulk
    if float(np.sqrt(np.mean(data.noise[affected] ** 2))) < MIN_FLIP_NOISE:
        return []
    return [
        data.finding(
            "router_flips",
            "router_tail",
            affected,
            is_expected=_rounds_routers(data) and tail.mean() < MAX_ROUNDED_ROUTER_SHARE,
            weight=float(np.sum(data.d[affected] ** 2) / max(np.sum(data.d**2), 1e-30)),
            next=commands.replay(data, "--routing recorded", "routed"),
            numbers={
                "tail_share": float(tail.mean()),
                "tail_ratio": ROUTER_TAIL_RATIO,
                "bulk": bulk,
                "experts_known": int(bool(mixture)),
            },
        )
    ]


def _rounds_routers(data: PairData) -> bool:
    """Return True if either pass is, or may be, computed in 16 bits, so that the routers receive rounded inputs."""
    known = [side.coarsest for side in precisions(data)]
    return None in known or any(dtype in HALF for dtype in known)


def is_mixture(data: PairData) -> bool | None:
    """Return True if a contract or the model configuration names experts; None if neither describes the model."""
    texts = [
        str(declared(data.contract(side), *path) or "")
        for side in "ab"
        for path in (("model", "class"), ("model_class",), ("model", "experts"), ("model", "moe_layers"))
    ]
    config = data.model.get("config") or {}
    counted = [config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")]
    if any(counted) or any("moe" in text.lower() or "mixtral" in text.lower() for text in texts):
        return True
    return False if config or any(texts[:2]) else None
