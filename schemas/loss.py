"""The loss of a run: how tokens, their logprobs and advantages became one number, as far as the trace says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import InvalidOption, InvalidRecord

PPO, REINFORCE, CISPO = "ppo_clip", "reinforce", "cispo"
KINDS = (PPO, REINFORCE, CISPO)
TOKEN, SEQUENCE_MEAN, SEQUENCE_SUM = "token", "sequence_mean", "sequence_sum"
LEVELS = (TOKEN, SEQUENCE_MEAN, SEQUENCE_SUM)
TRAIN, ROLLOUT, CURRENT = "train", "rollout", "current"
DENOMINATORS = (TRAIN, ROLLOUT, CURRENT)
AGGREGATIONS = (
    "token_mean", "batch_token_mean", "micro_token_mean", "sequence_mean", "sequence_sum", "sequence", "constant",
)  # fmt: skip
CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

PREFIX = "loss/"
"""What the names of its hyperparameters begin with where a loop of one's own recorded it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A policy loss: minimise the aggregate of -w f(rho, A) over tokens, rho = current / denominator, A the advantage."""

    kind: str = PPO
    """`ppo_clip`: f = min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A); `reinforce`: f = rho A without clip, whose
    gradient at rho = 1 is A grad logprob; `cispo`: f = stop(min(rho, clip_high)) A logprob."""
    level: str = TOKEN
    """rho of `token`s; of sequences by the mean of their log-ratios (GSPO): `sequence_mean`; by the sum: `sequence_sum`."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """Of ppo_clip, the distance from 1; of cispo, the largest ratio itself."""
    clip_hard: float | None = None
    """Largest unclipped ratio, whatever the sign of the advantage (TRL's delta); None: none."""
    denominator: str = TRAIN
    """The pass below the ratio: `train` (recomputed), `rollout` (bypass), or `current` itself (rho is 1 in value)."""
    aggregation: str = "token_mean"
    """`token_mean`: over all tokens of an optimizer step; `batch_token_mean`: over those of the whole recorded step, times
    the share of its micro-batches that the optimizer step takes; `micro_token_mean`: over a micro-batch's, then over these;
    `sequence_mean`: over each sequence's tokens, then over sequences; `sequence_sum`: their sums, over sequences;
    `sequence`: one term a sequence (level sequence_sum), over sequences; `constant`: sum over tokens / (sequences * max_tokens)."""
    max_tokens: int | None = None
    """The divisor of aggregation `constant`."""
    kl_coefficient: float = 0.0
    """Of the k3 term against the pass `reference`."""
    kl_weighted: bool = False
    """Whether that term is multiplied by the ratio, of which it then has a gradient too."""
    correction: str = "none"
    """What multiplies each token's term, of r = train / rollout: `token_truncate` min(r, cap), `token_mask` r where it is
    at most cap and else 0, and the same of the sequence's product."""
    correction_low: float | None = None
    correction_high: float | None = None
    unknown: tuple[str, ...] = ()
    """Settings of the run that change the loss and are not said here."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("kind", KINDS), ("level", LEVELS), ("denominator", DENOMINATORS), ("aggregation", AGGREGATIONS),
            ("correction", CORRECTIONS),
        ):  # fmt: skip
            if getattr(self, name) not in choices:
                raise InvalidRecord(f"loss: {name} {getattr(self, name)!r} is unknown; use {', '.join(choices)}")

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """What is recorded of it, for Recorder.add_hyperparameters."""
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        return {PREFIX + name: value for name, value in known.items() if value is not None and name != "unknown"}


def read_loss(values: Mapping[str, Any]) -> Loss | None:
    """The loss that a run's hyperparameters say (names without `hyperparameter/`); None where they say none we know.

    Knows what Recorder.add_loss wrote, and the settings of TRL's GRPO and RLOO trainers.
    """
    own = {name.removeprefix(PREFIX): value for name, value in values.items() if name.startswith(PREFIX)}
    if own:
        return _own(own)
    if "loss_type" in values and "importance_sampling_level" in values:
        return _grpo(values)
    if "normalize_advantages" in values and "epsilon" in values:
        return _rloo(values)
    return None


def parse_loss(text: str, recorded: Loss | None = None) -> Loss:
    """A loss by its fields, `kind=reinforce,aggregation=sequence_sum`; what the text leaves out is as recorded, or default.

    Raises InvalidOption.

    >>> parse_loss("clip_high=0.28").clip_high
    0.28
    """
    kinds = {field.name: str(field.type) for field in fields(Loss) if field.name != "unknown"}
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        name = name.replace("-", "_")
        if name not in kinds or not equals:
            raise InvalidOption(
                f"loss: got {part!r}; write name=value with commas between them; names: {', '.join(kinds)}"
            )
        values[name] = _typed(name, value, kinds[name])
    try:
        return replace(recorded or Loss(), **values)
    except InvalidRecord as error:
        raise InvalidOption(str(error)) from error


def _typed(name: str, value: str, kind: str) -> Any:
    if value == "none" and "None" in kind:
        return None
    try:
        if kind == "bool":
            return {"true": True, "false": False}[value.lower()]
        return value if kind == "str" else int(value) if kind.startswith("int") else float(value)
    except (KeyError, ValueError) as error:
        wanted = "true or false" if kind == "bool" else "a number"
        raise InvalidOption(f"loss: {name} cannot be {value!r}; it is {wanted}") from error


def _own(values: Mapping[str, Any]) -> Loss:
    names = {field.name for field in fields(Loss)}
    known = {name: value for name, value in values.items() if name in names}
    if "max_tokens" in known:
        known["max_tokens"] = int(known["max_tokens"])
    if "kl_weighted" in known:
        known["kl_weighted"] = bool(known["kl_weighted"])
    return Loss(**known, unknown=tuple(sorted(set(values) - names)))


_GRPO_AGGREGATIONS = {
    "grpo": "sequence_mean",
    "bnpo": "micro_token_mean",
    "dr_grpo": "constant",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "luspo": "sequence_sum",
}


def _grpo(values: Mapping[str, Any]) -> Loss | None:
    """TRL 1.16, GRPOTrainer._compute_loss."""
    kind = str(values["loss_type"])
    if kind not in _GRPO_AGGREGATIONS:
        return None
    low = _number(values, "epsilon", 0.2)
    high = _number(values, "epsilon_high", low)
    corrected = bool(values.get("use_vllm")) and bool(values.get("vllm_importance_sampling_correction"))
    return Loss(
        kind=CISPO if kind == CISPO else PPO,
        level=SEQUENCE_MEAN if values["importance_sampling_level"] == "sequence" else TOKEN,
        clip_low=low,
        clip_high=high,
        clip_hard=_number(values, "delta", None),
        aggregation=_grpo_aggregation(kind, values),
        max_tokens=int(_number(values, "max_completion_length", 0)) or None,
        kl_coefficient=_number(values, "beta", 0.0),
        kl_weighted=bool(_number(values, "beta", 0.0) and _number(values, "use_bias_correction_kl", 0.0)),
        correction=str(values.get("vllm_importance_sampling_mode")) if corrected else "none",
        correction_low=_number(values, "vllm_importance_sampling_clip_min", None) if corrected else None,
        correction_high=_number(values, "vllm_importance_sampling_clip_max", None) if corrected else None,
        unknown=_unknown(values),
    )


def _grpo_aggregation(kind: str, values: Mapping[str, Any]) -> str:
    """Its token mean is over a generation batch, which may make several optimizer steps."""
    found = _GRPO_AGGREGATIONS[kind]
    accumulated = _number(values, "gradient_accumulation_steps", None)
    if found == "token_mean" and accumulated != _number(values, "steps_per_generation", accumulated):
        return "batch_token_mean"
    return found


def _rloo(values: Mapping[str, Any]) -> Loss:
    """TRL 1.16, RLOOTrainer._compute_loss; its KL term is part of the reward."""
    low = _number(values, "epsilon", 0.2)
    return Loss(
        kind=PPO,
        level=SEQUENCE_SUM,
        clip_low=low,
        clip_high=_number(values, "epsilon_high", low),
        aggregation="sequence",
        unknown=_unknown(values),
    )


_NEUTRAL = {
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": 0.0,
}
"""TRL's further settings of the loss -> the value that changes nothing."""


def _unknown(values: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, neutral in _NEUTRAL.items() if _number(values, name, neutral) != neutral)


def _number(values: Mapping[str, Any], name: str, default: Any) -> Any:
    """A number; a setting that is absent, empty or the text None has its default."""
    value = values.get(name)
    return default if value is None or value == "None" else float(value)
