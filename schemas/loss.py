"""Policy losses, and how to read one from a run's hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from .errors import InvalidOption, InvalidRecord

PPO, REINFORCE, CISPO, SAPO, VESPO = "ppo_clip", "reinforce", "cispo", "sapo", "vespo"
KINDS = (PPO, REINFORCE, CISPO, SAPO, VESPO)
TOKEN, SEQUENCE_MEAN, SEQUENCE_SUM = "token", "sequence_mean", "sequence_sum"
LEVELS = (TOKEN, SEQUENCE_MEAN, SEQUENCE_SUM)
TRAIN, ROLLOUT, CURRENT = "train", "rollout", "current"
DENOMINATORS = (TRAIN, ROLLOUT, CURRENT)
AGGREGATIONS = (
    "token_mean", "batch_token_mean", "micro_token_mean", "sequence_mean", "sequence_sum", "sequence", "constant",
)  # fmt: skip
CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

VESPO_LOG_RATIO = (math.log(1e-8), 20.0)
"""Range (nats) to which vespo clamps each sequence's log-ratio and each log correction weight."""
VESPO_LEAST_LAMBDA = 1e-4

PREFIX = "loss/"

Default = TypeVar("Default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A policy loss: the aggregate of -w f(rho, A) over tokens, which training minimises.

    rho = current / denominator is the probability ratio, A the advantage, and w the `correction` weight.
    """

    kind: str = PPO
    """Function f in the loss. `ppo_clip`: f = min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A). `reinforce`: f =
    rho A, unclipped, so that the gradient at rho = 1 is A grad logprob. `cispo`: f = stop(min(rho, clip_high)) A
    logprob. `sapo`: f = 4 / tau sigmoid(tau (rho - 1)) A (arXiv 2511.20347). `vespo`: f = stop(phi(rho)) A logprob,
    where phi = exp(lambda + k ln rho - lambda rho) and rho is the sequence's ratio (arXiv 2602.10693). sapo and vespo
    do not clip."""
    level: str = TOKEN
    """Tokens in a ratio. `token`: one ratio per token. `sequence_mean`: one per sequence, from the mean log-ratio
    (GSPO). `sequence_sum`: one per sequence, from the summed log-ratio."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """For ppo_clip, the ratio's upper bound minus 1. For cispo, the maximum ratio."""
    clip_hard: float | None = None
    """For ppo_clip, an upper bound on the ratio for advantages of either sign (TRL's delta). None for no such bound."""
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    """sapo's tau is sapo_temperature_pos where A > 0, else sapo_temperature_neg."""
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    """vespo's k (vespo_k_pos) and lambda (vespo_lambda_pos) where A >= 0."""
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    """vespo's k (vespo_k_neg) and lambda (vespo_lambda_neg) where A < 0."""
    denominator: str = TRAIN
    """Pass whose logprobs are the ratio's denominator: `train` (recomputed by the trainer), `rollout` (bypass mode), or
    `current` (rho is always 1)."""
    aggregation: str = "token_mean"
    """How token terms are averaged. `token_mean`: mean over all tokens in an optimizer step. `batch_token_mean`: sum
    over tokens / (tokens in the recorded step * share of that step's micro-batches that are in the optimizer step).
    `micro_token_mean`: mean over each micro-batch's tokens, then over micro-batches. `sequence_mean`: mean over each
    sequence's tokens, then over sequences. `sequence_sum`: sum over each sequence's tokens, then mean over sequences.
    `sequence`: mean over sequences, each of which has a single term (level sequence_sum). `constant`: sum over tokens
    / (sequences * max_tokens). Masked tokens are excluded, but fully masked sequences still count as sequences."""
    max_tokens: int | None = None
    """Tokens per sequence that the `constant` aggregation divides by. None for other aggregations."""
    kl_coefficient: float = 0.0
    """Coefficient for the KL term (k3 estimate against the `reference` pass)."""
    kl_weighted: bool = False
    """True if the KL term is multiplied by the ratio and gradients flow through that ratio."""
    kl_level: str | None = None
    """Level of the ratio in the KL term (values as for `level`), or None if it equals the loss's `level`."""
    correction: str = "none"
    """Importance weight for each token's term, where r = train / rollout. `token_truncate`: min(r, cap). `token_mask`:
    r if r <= cap, else 0. `sequence_*`: the same, using the product of r over the sequence. vespo multiplies rho by
    this weight."""
    correction_low: float | None = None
    correction_high: float | None = None
    unknown: tuple[str, ...] = ()
    """Settings that affect the run's loss but are not covered by the other fields."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("kind", KINDS), ("level", LEVELS), ("denominator", DENOMINATORS), ("aggregation", AGGREGATIONS),
            ("correction", CORRECTIONS), ("kl_level", (None, *LEVELS)),
        ):  # fmt: skip
            if (value := getattr(self, name)) not in choices:
                known = ", ".join(filter(None, choices))
                raise InvalidRecord(f"{name} {value!r} is unknown; use {known}", option="loss")
        if self.kind == VESPO and self.level != SEQUENCE_SUM:
            raise InvalidRecord(
                f"vespo needs one ratio per sequence, but level is {self.level}; use level={SEQUENCE_SUM}",
                option="loss",
            )
        for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
            if not getattr(self, name) > 0:
                raise InvalidRecord(f"{name} must be above 0, got {getattr(self, name)}", option="loss")

    @property
    def has_clip(self) -> bool:
        """True if the loss can clip ratios. To test individual tokens, use analysis.statistics.loss.is_clipped."""
        return self.kind in (PPO, CISPO)

    @property
    def hyperparameters(self) -> dict[str, float | str]:
        """Settings to pass to Recorder.add_hyperparameters.

        Omits default `sapo_*` and `vespo_*` settings if the loss is of another kind.
        """
        known = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "unknown"}
        left_out = {
            field.name
            for field in fields(self)
            if field.name.partition("_")[0] in {SAPO, VESPO} - {self.kind} and known[field.name] == field.default
        }
        return {PREFIX + name: value for name, value in known.items() if value is not None and name not in left_out}


def read_loss(values: Mapping[str, float | str]) -> Loss | None:
    """Read the loss from hyperparameters recorded by Recorder.add_loss or by TRL's GRPO and RLOO trainers."""
    own = {name.removeprefix(PREFIX): value for name, value in values.items() if name.startswith(PREFIX)}
    if own:
        return _own(own)
    if "loss_type" in values and "importance_sampling_level" in values:
        return _grpo(values)
    if "normalize_advantages" in values and "epsilon" in values:
        return _rloo(values)
    return None


def parse_loss(text: str, recorded: Loss | None = None) -> Loss:
    """Parse a loss such as `kind=reinforce,aggregation=sequence_sum`. Raises InvalidOption.

    Fields that `text` does not set come from `recorded`, or keep their defaults if `recorded` is None.

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
                f"got {part!r}, expected comma-separated name=value pairs. Names: {', '.join(kinds)}", option="loss"
            )
        values[name] = _typed(name, value, kinds[name])
    try:
        return replace(recorded or Loss(), **values)
    except InvalidRecord as error:
        raise InvalidOption(error.message, option=error.option) from error


def _typed(name: str, value: str, kind: str) -> float | str | None:
    if value == "none" and "None" in kind:
        return None
    try:
        if kind == "bool":
            return {"true": True, "false": False}[value.lower()]
        return value if kind.startswith("str") else int(value) if kind.startswith("int") else float(value)
    except (KeyError, ValueError) as error:
        wanted = "true or false" if kind == "bool" else "a number"
        raise InvalidOption(f"{name} cannot be {value!r}, expected {wanted}", option="loss") from error


def _own(values: Mapping[str, float | str]) -> Loss:
    names = {field.name for field in fields(Loss)}
    types: dict[str, Callable[[float | str], float]] = {"max_tokens": int, "kl_weighted": bool}  # metrics are floats
    known: dict[str, Any] = {  # the fields of Loss, as `hyperparameters` wrote them
        name: types[name](value) if name in types else value for name, value in values.items() if name in names
    }
    return Loss(**known, unknown=tuple(sorted(set(values) - names)))


_GRPO_AGGREGATIONS = {
    "grpo": "sequence_mean",
    "bnpo": "micro_token_mean",
    "dr_grpo": "constant",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "luspo": "sequence_sum",
    "sapo": "sequence_mean",
    "vespo": "token_mean",
}


_GRPO_OPTIONS = (
    "sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
)  # fmt: skip
"""TRL settings with the same name and default as in `Loss`."""


def _grpo(values: Mapping[str, float | str]) -> Loss | None:
    """Return the loss that TRL 1.16's GRPOTrainer._compute_loss computes, or None if its type is unknown."""
    kind = str(values["loss_type"])
    if kind not in _GRPO_AGGREGATIONS:
        return None
    low = _number(values, "epsilon", 0.2)
    corrected = bool(values.get("use_vllm")) and bool(values.get("vllm_importance_sampling_correction"))
    level = SEQUENCE_MEAN if values["importance_sampling_level"] == "sequence" else TOKEN
    kl_weighted = bool(_number(values, "beta", 0.0) and _number(values, "use_bias_correction_kl", 0.0))
    shaped: dict[str, Any] = {name: _number(values, name, getattr(Loss(), name)) for name in _GRPO_OPTIONS}
    return Loss(
        kind=kind if kind in (CISPO, SAPO, VESPO) else PPO, level=SEQUENCE_SUM if kind == VESPO else level,
        clip_low=low, clip_high=_number(values, "epsilon_high", low), clip_hard=_number(values, "delta", None),
        aggregation=_grpo_aggregation(kind, values),
        max_tokens=int(_number(values, "max_completion_length", 0)) or None,
        kl_coefficient=_number(values, "beta", 0.0), kl_weighted=kl_weighted,
        kl_level=level if kl_weighted and kind == VESPO else None,
        correction=str(values.get("vllm_importance_sampling_mode")) if corrected else "none",
        correction_low=_number(values, "vllm_importance_sampling_clip_min", None) if corrected else None,
        correction_high=_number(values, "vllm_importance_sampling_clip_max", None) if corrected else None,
        unknown=_unknown(values), **shaped,
    )  # fmt: skip


def _grpo_aggregation(kind: str, values: Mapping[str, float | str]) -> str:
    """Return the aggregation. TRL's token mean covers a generation batch, which may span several optimizer steps."""
    found = _GRPO_AGGREGATIONS[kind]
    accumulated = _number(values, "gradient_accumulation_steps", None)
    if found == "token_mean" and accumulated != _number(values, "steps_per_generation", accumulated):
        return "batch_token_mean"
    return found


def _rloo(values: Mapping[str, float | str]) -> Loss:
    """Return the loss that TRL 1.16's RLOOTrainer._compute_loss computes. RLOO's KL term is part of the reward."""
    low = _number(values, "epsilon", 0.2)
    return Loss(
        kind=PPO, level=SEQUENCE_SUM, clip_low=low, clip_high=_number(values, "epsilon_high", low),
        aggregation="sequence", unknown=_unknown(values),
    )  # fmt: skip


_NEUTRAL = {
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": 0.0,
    "router_aux_loss_coef": 0.0,
}
"""Other TRL settings that can change the loss, each with the value at which it has no effect."""


def _unknown(values: Mapping[str, float | str]) -> tuple[str, ...]:
    return tuple(name for name, neutral in _NEUTRAL.items() if _number(values, name, neutral) != neutral)


def _number(values: Mapping[str, float | str], name: str, default: Default) -> float | Default:
    value = values.get(name)
    return default if value is None or value == "None" else float(value)
