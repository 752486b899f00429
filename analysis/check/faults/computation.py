"""Mismatch from computation rather than recorded weights: a different model, a non-deterministic side, or different
experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import commands
from ..finding import Fault, Finding
from ..hypothesis import Hypothesis
from ..likelihood import MAX_FLIP_NATS
from ..pair_data import PairData, declared
from ..rounding import HALF_ULP, allowed_noise, dtype_of, precisions
from ..structure import MAX_TOKEN_EFFECT, growth, not_repeatable, repeats
from .weights import SIZE, level, measured

_MEASURED = SIZE + "{token_text}"


def _dtypes(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "dtypes": " and ".join(numbers[f"dtype_{side}"] or "an unknown dtype" for side in "ab"),
        "token_text": f"; {numbers['token_effect']:.0%} of the mismatch depends on the token id, and rounding would not"
        if numbers["token_effect"] > MAX_TOKEN_EFFECT
        else "",
    }


COMPUTATION = Fault(
    code="computation_differs",
    title="one side's model or input differs throughout: its weights (quantised, converted or loaded wrongly), its computation "
    "(rotary, norm, attention, soft cap, precision), or the prompt that it reads",
    broken="computation",
    evidence={
        "equal_weights": "the engine sampled with the trainer's weights (the digests of all tensors agree), yet "
        + _MEASURED,
        "full_size": _MEASURED
        + "; the mismatch has its full size from the first recorded step: replay to find the component",
        "one_step": _MEASURED + "; one step does not show whether weights or the computation differ",
    },
    words={"equal_weights": _dtypes, "full_size": _dtypes, "one_step": _dtypes},
)
NOT_REPEATABLE = Fault(
    code="not_repeatable",
    title="one side gives the same tokens different values: dropout or noise, or a context that is not recorded",
    broken="computation",
    evidence={
        "repeats": "for {num:,} tokens repeated after the same prefix, the logits of {side} differ by {own:.2g} nats "
        "rms, those of {other} by {others:.2g}; d there is {d:.2g}"
    },
)
ROUTER_FLIPS = Fault(
    code="router_flips",
    title="the two sides choose different experts",
    broken="engine",
    evidence={
        "router_tail": "{experts_text}: {tail_share:.2%} of the tokens differ by more than {tail_ratio:g} times the median "
        "({bulk:.2g} nats of a logit); for these, the router chose different experts"
    },
    words={
        "router_tail": lambda n: {
            "experts_text": "the model is a mixture of experts"
            if n["experts_known"]
            else "the pattern of a mixture of experts"
        }
    },
)
TAIL_RATIO = 10.0
"""Logit error above which a token is in the tail, in multiples of the median: rounding alone reaches six to eight."""


def find_not_repeatable(data: PairData) -> list[Finding]:
    """Detect a side that gives different values for the same token after the same prefix."""
    side = not_repeatable(data)
    if side is None:
        return []
    found = repeats(data)
    own, others = (found.a, found.b) if side == "a" else (found.b, found.a)
    return [
        NOT_REPEATABLE.finding(
            data,
            "repeats",
            weight=0.8,
            next=commands.query(data, "prefix-noise"),
            broken="trainer" if (side == "a") == (data.names["b"] == "rollout") else "engine",
            numbers={
                "side": data.names[side],
                "other": data.names["b" if side == "a" else "a"],
                "own": own,
                "others": others,
                "num": found.num,
                "d": found.d,
            },
        )
    ]


def find_computation(data: PairData, *, is_equal: bool) -> Finding:
    """Return the finding for a mismatch larger than rounding; `is_equal` is True if the weights are known to be
    equal.
    """
    signal = "equal_weights" if is_equal else "full_size" if growth(data).later else "one_step"
    return COMPUTATION.finding(
        data,
        signal,
        weight=0.5,
        next=commands.triangulate(data, dtype_of(data.contract("a"))) if is_equal else commands.weights_replay(data),
        numbers=measured(data),
    )


def find_router_flips(data: PairData, off: np.ndarray) -> list[Hypothesis]:
    """Detect, in a mixture of experts, that most tokens agree within rounding while a few differ by far more in either
    direction. `off`, [K] bool, are the tokens that rounding does not explain.
    """
    mixture = is_mixture(data)
    noise = np.abs(data.d) / data.scale
    bulk = float(np.median(noise))
    tail = off | (noise > TAIL_RATIO * bulk)
    both = min(np.mean(data.d[tail] > 0), np.mean(data.d[tail] < 0)) if tail.any() else 0.0
    most = 0.4 if mixture else 0.1
    if mixture is False or not 0.002 < tail.mean() < most or both < 0.2:
        return []
    if mixture is None and (data.updates_behind.any() or float(np.quantile(noise[tail], 0.99)) > MAX_FLIP_NATS):
        return []
    expected = bool(_rounds_routers(data) and (tail.mean() < 0.025 or level(data) < allowed_noise(data)))
    if mixture is None and not expected:
        return []
    finding = ROUTER_FLIPS.finding(
        data, "router_tail", tail, is_expected=expected,
        weight=float(np.sum(data.d[tail] ** 2) / max(np.sum(data.d**2), 1e-30)),
        next=commands.replay(data, "--routing recorded", "routed"),
        numbers={
            "tail_share": float(tail.mean()), "tail_ratio": TAIL_RATIO, "bulk": bulk, "experts_known": int(bool(mixture)),
        },
    )  # fmt: skip
    return [Hypothesis(finding=finding, tokens=data.marked(tail), gain=0.0)]


def _rounds_routers(data: PairData) -> bool:
    """Return True if either pass is, or may be, computed in 16 bits, so that the routers receive rounded inputs."""
    known = [side.coarsest for side in precisions(data)]
    return None in known or any(dtype in HALF_ULP for dtype in known)


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
