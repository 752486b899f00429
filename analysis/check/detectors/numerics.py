"""What is left once nothing is misplaced or rescaled: weights that differ, precision, routers, or plain rounding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import commands
from ..evidence import Evidence, declared, once
from ..finding import Finding
from ..thresholds import (
    EXCESS,
    HALF,
    MAX_HEALTHY_NOISE,
    MAX_ROUTER_TAIL_SHARE,
    MAX_ROUTER_TOKEN_EFFECT,
    MIN_ROUNDING_SHARE,
    ROUTER_TAIL_RATIO,
    ROUTER_TAIL_SHARE,
    ROUTER_TOP_SHARE,
)
from .bits import value_precision
from .equality import dtype_of
from .logit_grid import logit_precision
from .token_effect import token_effect


@dataclass(frozen=True, slots=True)
class Precision:
    """What a side computed in, as its contract says and as its numbers show."""

    declared: str | None
    logits: str | None
    """dtype on whose grid the logits lie."""
    values: str | None
    """dtype that the logprobs themselves were rounded to."""

    @property
    def coarsest(self) -> str | None:
        """The shortest format that is said or seen; None where nothing is: logits of float32 may follow a coarser body."""
        seen = [self.declared] if self.declared else []
        seen += [dtype for dtype in (self.logits, self.values) if dtype in HALF]
        return max(seen, key=lambda dtype: MAX_HEALTHY_NOISE.get(dtype, 0.0)) if seen else None


@once
def precisions(evidence: Evidence) -> tuple[Precision, Precision]:
    """Of pass a and of pass b."""
    a, b = (
        Precision(dtype_of(evidence.contract(side)), grid, value_precision(getattr(evidence, side)))
        for side, grid in zip("ab", logit_precision(evidence), strict=True)
    )
    return a, b


def allowed_noise(sides: tuple[Precision, Precision]) -> float:
    """Noise of the logits that rounding gives at most between two sides, nats."""
    known = [side.coarsest for side in sides if side.coarsest in MAX_HEALTHY_NOISE]
    return max((MAX_HEALTHY_NOISE[dtype] for dtype in known if dtype), default=EXCESS)


def find_low_precision(evidence: Evidence) -> list[Finding]:
    """Logprobs that were rounded themselves, or logits rounded in a pass that says to compute in float32."""
    found = []
    for side, precision in zip("ab", precisions(evidence), strict=True):
        name = getattr(evidence.sample, side).name
        step = HALF.get(precision.values or "")
        if step is not None:
            values = getattr(evidence, side)
            explained = float(np.sum((values * step) ** 2) / 3 / max(np.sum(evidence.d**2), 1e-30))
            if explained > MIN_ROUNDING_SHARE:
                found.append(
                    _head(evidence, name, f"every logprob of {name} is a {precision.values} number", "log-softmax")
                )
        elif precision.logits in HALF and precision.declared == "float32":
            seen = f"the logits of {name} lie on {precision.logits}'s grid, although its contract says float32"
            found.append(_head(evidence, name, seen, "head"))
    return found[:1]


def _head(evidence: Evidence, name: str, seen: str, part: str) -> Finding:
    return Finding(
        code="low_precision_head",
        evidence=f"{seen}: the {part} was computed or stored in low precision",
        effect=evidence.rms(),
        share=1.0,
        next=commands.replay(evidence, "--logits-dtype bf16", "head"),
        numbers={"side": name, "part": part},
    )


def find_router_flips(evidence: Evidence) -> list[Finding]:
    """Most tokens agree to rounding, and a few lie far off: what a router's choice of another expert does."""
    noise = evidence.noise[np.isfinite(evidence.noise)]
    if len(noise) < 50:
        return []
    bulk = float(np.median(noise))
    mixture = is_mixture(evidence)
    tail = noise > ROUTER_TAIL_RATIO * bulk
    if mixture is False or not ROUTER_TAIL_SHARE < tail.mean() < (0.4 if mixture else MAX_ROUTER_TAIL_SHARE):
        return []
    squares = np.sort(noise**2)[::-1]
    top = float(squares[: max(len(squares) // 50, 1)].sum() / max(squares.sum(), 1e-30))
    if (mixture is None and top < ROUTER_TOP_SHARE) or token_effect(evidence)[0] > MAX_ROUTER_TOKEN_EFFECT:
        return []
    affected = np.nan_to_num(evidence.noise) > ROUTER_TAIL_RATIO * bulk
    known = "the model is a mixture of experts" if mixture else "as routers of a mixture of experts do"
    return [
        Finding(
            code="router_flips",
            evidence=f"{known}: {tail.mean():.2%} of the tokens lie more than {ROUTER_TAIL_RATIO:g} times as far off as the "
            f"median one ({bulk:.2g} nats of a logit), and are those whose router chose other experts",
            effect=evidence.rms(affected),
            share=float(affected.mean()),
            weight=float(np.sum(evidence.d[affected] ** 2) / max(np.sum(evidence.d**2), 1e-30)),
            next=commands.replay(evidence, "--routing recorded", "routed"),
            numbers={"tail_share": float(tail.mean()), "bulk": bulk},
        )
    ]


def is_mixture(evidence: Evidence) -> bool | None:
    """Whether a contract or the model's configuration names experts; None where neither says what the model is."""
    texts = [
        str(declared(evidence.contract(side), *path) or "")
        for side in "ab"
        for path in (("model", "class"), ("model_class",), ("model", "experts"), ("model", "moe_layers"))
    ]
    config = evidence.model.get("config") or {}
    counted = [config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")]
    if any(counted) or any("moe" in text.lower() or "mixtral" in text.lower() for text in texts):
        return True
    return False if config or any(texts[:2]) else None
