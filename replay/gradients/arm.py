"""`gradient` arms: changes to the forward passes, the logprobs in the loss, and the correction."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...schemas.errors import InvalidOption
from ...schemas.loss import CORRECTIONS, SEQUENCE_MEAN, SEQUENCE_SUM, Loss
from ...schemas.passes import CURRENT, REPLAY_PREFIX, ROLLOUT, TRAIN
from ..arm_option import GRADIENT, HF, arm_option
from ..arms import OPTIONS, Arm, names_for, parse_arm

EXACT = ("exact", "token_exact", "sequence_exact")
"""Corrections with untruncated importance weights (train / rollout), per token or per sequence. `exact` uses the level
of the recorded correction or loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientArm(Arm):
    logprobs: str | None = arm_option(
        "Pass whose logprobs are the importance ratio's denominator and replace train in the correction ratio "
        "(train / rollout): train, rollout (bypass), current (ratio 1), or replay/<arm>.",
        users=(HF, GRADIENT), metavar="PASS",
    )  # fmt: skip
    correction: str | None = arm_option(
        "Correction: none, exact, token_exact, sequence_exact, or token_truncate:C, token_mask:C, sequence_truncate:C, "
        "sequence_mask:C, where C is the maximum ratio or two bounds LOW_HIGH.",
        users=(HF, GRADIENT), metavar="RULE",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.engine != HF:
            raise InvalidOption(
                f"arm engine={self.engine} has no backward pass; first run tim-trace replay RUN "
                f"--engine {self.engine}, then use its logprobs: --arm logprobs=replay/{self._replayed}"
            )
        Arm.__post_init__(self)  # dataclass(slots=True) creates a new class, which breaks zero-argument super()
        for name in self.lacking(GRADIENT):
            raise InvalidOption(
                f"arm {name.replace('_', '-')}: not supported by gradient; use "
                f"{', '.join(names_for(GRADIENT))}, logprobs or correction, or replay this arm and pass its "
                f"logprobs: --arm logprobs=replay/{self._replayed}"
            )
        if self.logprobs not in (None, TRAIN, ROLLOUT, CURRENT) and not str(self.logprobs).startswith(REPLAY_PREFIX):
            raise InvalidOption(f"arm logprobs={self.logprobs}: use train, rollout, current or replay/<arm>")
        corrected(Loss(), self.correction)

    @property
    def _replayed(self) -> str:
        return Arm(**{name: value for name, value in self.changes.items() if name in OPTIONS}).name


def parse_gradient_arm(text: str) -> GradientArm:
    """Parse an arm such as `dtype=bf16,logprobs=rollout,correction=token_truncate:2`. Raises InvalidOption.

    >>> parse_gradient_arm("dtype=bf16,correction=none").name
    'bf16+correction-none'
    """
    arm = parse_arm(text, GradientArm)
    if arm.is_identity:
        raise InvalidOption(
            f"{text!r} changes nothing, so leave it out (the recorded gradient is always computed)", option="arm"
        )
    assert isinstance(arm, GradientArm)
    return arm


def corrected(loss: Loss, correction: str | None) -> Loss:
    if correction is None:
        return loss
    kind, _, bounds = correction.partition(":")
    if (kind not in CORRECTIONS and kind not in EXACT) or bool(bounds) == (kind in ("none", *EXACT)):
        raise InvalidOption(
            f"arm correction={correction}: use none, {', '.join(EXACT)}, or token_truncate, token_mask, "
            "sequence_truncate or sequence_mask with a bound, e.g. token_truncate:2 or token_mask:0.5_5"
        )
    if kind in EXACT:
        level = kind.partition("_")[0]
        if kind == "exact" and loss.correction != "none":
            level = loss.correction.partition("_")[0]
        elif kind == "exact":
            level = "sequence" if loss.level in (SEQUENCE_MEAN, SEQUENCE_SUM) else "token"
        kind = f"{level}_truncate"
    low, _, high = bounds.rpartition("_")
    try:
        numbers = [float(value) if value else None for value in (low, high)]
    except ValueError as error:
        raise InvalidOption(
            f"arm correction={correction}: {bounds!r} is not a bound; use an upper bound (2), or a lower and an upper "
            "bound (0.5_5)"
        ) from error
    return replace(loss, correction=kind, correction_low=numbers[0], correction_high=numbers[1])
