"""An objective as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...schemas.errors import option
from ..check.text import of_steps, wrapped
from ..rows import Rows, shown, to_text
from ..statement import Measured, Statement
from .concentration import CARRIED

if TYPE_CHECKING:
    from .judged import Objective

NUM_WORST = 5
"""Steps that are shown unless all are asked for."""

STEP_COLUMNS = (
    "step", "iteration", "num_tokens", "bias", "abs_bias", "skew", "relative_bias", "relative_abs_bias", "flipped",
    "bad_updates", "mean_abs_d", "var_d", "var_drift", "mean_abs_sum_d",
)  # fmt: skip


_CARRIED = {
    "half": "share of the terms that carry half of sum |b|",
    "ninety": "share of the terms that carry 90 % of it",
    "top_thousandth": "share of it in the top 0.1 % of the terms",
}


VERDICT: Mapping[str, str] = {
    "nothing_read": "What the mismatch does to the objective cannot be answered.",
    "no_tokens": "Nothing can be said: no token counts and has a finite logprob under every pass.",
    "no_advantage": "The objective is 0: no advantage is other than 0, so that no ratio matters.",
    "in_ratio": "The loss divides by the rollout's own logprobs, so that its ratio is the one that the samples call for, and this "
    "bias is 0. That ratio holds the mismatch beside the policy's drift, so that clip and weights act on both{how_far}; the "
    "gradient is the trainer's.",
    "no_effect": "The mismatch does not touch the objective's value: the ratio that it uses has the same contribution as the "
    "true one on every token.",
    "not_answerable": "What it does to the objective cannot be answered; see below what is missing.",
    "ratios": "A token's ratio is off by {mean_abs_d:.3g} nats on average, a whole sequence's by {mean_abs_sum_d:.3g} nats.",
    "undecided": "Whether the mismatch pushes one way cannot be told: {reason}. {how_much}",
    "negligible_noise": "The mismatch pushes no way that this many groups could show: next to nothing. {how_much}",
    "moderate_noise": "The mismatch pushes no way that this many groups could show: noise. {how_much}",
    "large_noise": "The mismatch pushes no way that this many groups could show: noise, and a large one. {how_much}",
    "negligible_push_up": "The mismatch pushes one way, by next to nothing, and up: {up}. {how_much}",
    "small_push_up": "The mismatch pushes one way, by a little, and up: {up}. {how_much}",
    "large_push_up": "The mismatch pushes one way, by much, and up: {up}. {how_much}",
    "negligible_push_down": "The mismatch pushes one way, by next to nothing, and down: {down}. {how_much}",
    "small_push_down": "The mismatch pushes one way, by a little, and down: {down}. {how_much}",
    "large_push_down": "The mismatch pushes one way, by much, and down: {down}. {how_much}",
    "negligible_opposed": "The mismatch moves the objective by next to nothing, and no direction can be given: {opposed}. {how_much}",
    "small_opposed": "The mismatch moves the objective by a little, and no direction can be given: {opposed}. {how_much}",
    "large_opposed": "The mismatch moves the objective by much, and no direction can be given: {opposed}. {how_much}",
    "unclipped": "Without the loss's clip it would add {relative_bias_signed}{interval}.",
    "signs": "On the whole {signs}.",
    "concentration": "Half of sum |b| lies in {half_percent} of the {terms}, 90 % in {ninety_percent}.",
    "worst_update": "The update with the largest bias is step {step} ({bias:+.3g}{share_of_all}).",
    "clip_decisions": "It turns the clip decision of {flipped_percent} of the {terms}; {clipped_percent} are clipped in all.",
    "correction": "The loss's correction is in these figures; with its weights left out the bias is "
    "{uncorrected_relative_bias_signed} instead of {relative_bias_signed}, and without cancelling "
    "{uncorrected_relative_abs_bias_percent} instead of {relative_abs_bias_percent}.",
}
"""Code of a part of the verdict -> the sentence."""

_WAYS = {
    "up": "the loss sees more objective than there is",
    "down": "the loss sees less objective than there is",
    "opposed": "the clip, which holds the true term down alone, lifts the bias whatever the mismatch does, and without the clip it "
    "has the other sign",
}

CANNOT: Mapping[str, str] = {
    "no_trainer_logprobs": "everything: the trace has logprobs of neither 'train' nor 'current', which the ratio of the loss is "
    "made of; record them with Recorder.add_scores",
    "no_rollout": "what the mismatch does: the trace has no logprobs of the pass 'rollout'",
    "no_train": "what of the ratio is mismatch and what is policy drift: record the pass 'train' for that",
    "no_current": "what later updates on the same batch do, and policy drift: record the pass 'current' for that",
    "no_advantages": "everything that an advantage enters: record them with Recorder.add_sequences(advantage=...)",
}
"""Code of what cannot be answered -> the sentence."""

NOTES: Mapping[str, str] = {
    "current_for_train": "the trace has no pass 'train': 'current' stands for it, so that what the updates since sampling moved "
    "counts as mismatch here",
    "first_update_only": "the trace has no pass 'current': figures are of a batch's first update, where the policy inside the "
    "loss is the trainer's own and the used ratio is 1 unless the loss divides by the rollout's",
    "sequences_left_out": "{num_left_out:,} of {num_sequences:,} sequences have no logprobs in one of the passes: they are left "
    "out",
    "not_finite": "{num_nan:,} tokens have a NaN and {num_inf:,} an infinite logprob under a pass: they are in no figure",
    "some_without_advantage": "{num_lacking:,} of {num_sequences:,} sequences have no advantage: they add nothing to a bias",
    "rows_without_tokens": "{num_empty:,} of {num_rows:,} sequences that went through the loss have no token to compare: they "
    "add nothing to a sum, and the loss's mean counts them",
    "no_clip": "{kind} has no clip: its weight falls without a bound, so that nothing counts as clipped",
    "unknown_settings": "settings of the loss that no figure knows of: {settings}",
    "micro_batches_unknown": "the trace does not say which rows were one micro-batch: tokens are weighed over the whole update",
    "divisor_unknown": "the divisor of the aggregation is not recorded (max_tokens): sizes are as if it were 1, shares are right",
    "kl_left_out": "the KL term (coefficient {coefficient:g}) is in no figure",
    "ratios_clamped": "ratios of some sequences are beyond exp({bound:g}) and count as that",
}
"""Code of a note -> the sentence."""


def loss_basis() -> Mapping[str, str]:
    """Code of where the loss is from -> the words."""
    how = f"say it with {option('loss', 'KIND')} and its bounds"
    return {
        "recorded": "as the trace records it",
        "not_recorded": f"assumed, since the trace says of no loss that is known: {how}",
        "unreadable": f"assumed, since what the trace says of it cannot be read ({{error}}): {how}",
        "asked": "as it was asked for",
        "fields_asked": "{fields} as asked for",
    }


def verdict_sentence(part: Statement, confidence: float) -> str:
    """A part of the verdict in words."""
    values = part.values
    words = {f"{name}_percent": f"{value * 100:.3g} %" for name, value in values.items() if isinstance(value, float)}
    words |= {f"{name}_signed": f"{value * 100:+.3g} %" for name, value in values.items() if isinstance(value, float)}
    words |= _WAYS | {"signs": " and ".join(_signs(values))}
    words["share_of_all"] = f", {values['share'] * 100:.2g} % of all updates' together" if "share" in values else ""
    words["interval"] = (
        f" ({confidence * 100:g} % interval over groups {words['low_signed']} to {words['high_signed']})"
        if "low" in values
        else ""
    )
    how_much = (
        "It adds {relative_bias_signed} to the objective, of the sum of its terms' sizes{interval}; without cancelling it would "
        "be {relative_abs_bias_percent}."
    )
    words["how_much"] = how_much.format(**words) if "relative_abs_bias" in values else ""
    words["how_far"] = _how_far(values)
    return VERDICT[part.code].format(**values, **words)


def _how_far(values: Mapping[str, Measured]) -> str:
    """How far the mismatch moves a ratio that holds it, and how much of the terms the clip takes."""
    told = []
    if "mean_abs_d" in values:
        told.append(f"it moves a token's ratio by {values['mean_abs_d']:.3g} nats on average")
    if "clipped" in values:
        told.append(f"{float(values['clipped']) * 100:.3g} % of the {values['terms']} are clipped")
    return f" ({'; '.join(told)})" if told else ""


def _signs(values: Mapping[str, Measured]) -> Iterator[str]:
    for name, sign, more, less in (
        ("relative_positive", "A > 0", "credited too much", "credited too little"),
        ("relative_negative", "A < 0", "punished too little", "punished too much"),
    ):
        if name in values:
            value = float(values[name])
            yield f"tokens with {sign} are {more if value > 0 else less} by {abs(value) * 100:.3g} %"


def objective_text(found: Objective, width: int | None = None, by: str = "run") -> str:
    """Write an objective, for reading: the verdict, the run's figures with their intervals, the worst steps or all."""
    found = shown(found)
    parts = [wrapped(" ".join(found.verdict), "", width), _loss(found, width)]
    parts += [wrapped(f"cannot be answered: {sentence}", "", width) for sentence in found.cannot]
    parts += [wrapped(f"note: {note}", "", width) for note in found.notes]
    if by == "run" and found.figures:
        parts.append(to_text(objective_rows(found), width))
    if len(found.steps):
        parts.append(_steps(found, width, by))
    return "\n\n".join(parts)


def objective_json(found: Objective) -> dict[str, Any]:
    """The same as JSON can say it, with every number of every step; sentences beside their codes."""
    rendered = {name: getattr(found, name) for name in ("verdict", "notes", "cannot", "loss_from")}
    return asdict(found) | {"steps": found.steps} | rendered


def _loss(found: Objective, width: int | None) -> str:
    loss = found.loss
    bounds = {"ppo_clip": f" (clip -{loss.clip_low:g} +{loss.clip_high:g}{_hard(loss.clip_hard)})",
              "cispo": f" (weight at most {loss.clip_high:g})",
              "sapo": f" (temperature {loss.sapo_temperature_pos:g} where A > 0, else {loss.sapo_temperature_neg:g})",
              "vespo": f" (k {loss.vespo_k_pos:g}, lambda {loss.vespo_lambda_pos:g} where A >= 0, else k {loss.vespo_k_neg:g}, "
                       f"lambda {loss.vespo_lambda_neg:g})"}.get(loss.kind, "")  # fmt: skip
    level = {"token": "tokens", "sequence_mean": "sequences, by the mean of log-ratios"}.get(
        loss.level, "sequences, by the sum of log-ratios"
    )
    corrected = "" if loss.correction == "none" else f", corrected by {loss.correction}{_bounds(found)}"
    text = (
        f"{found.trace}{of_steps(found.steps_asked)}: {loss.kind}{bounds} of {level}, divided by {loss.denominator!r}{corrected}; {loss.aggregation}; "
        f"{found.loss_from}. {found.num_updates:,} updates, {found.num_sequences:,} sequences, {found.num_tokens:,} tokens, "
        f"{found.num_groups:,} groups."
    )
    return wrapped(text, "", width)


def _hard(bound: float | None) -> str:
    return "" if bound is None else f", never above {bound:g}"


def _bounds(found: Objective) -> str:
    low, high = found.loss.correction_low, found.loss.correction_high
    parts = [f"{sign} {bound:g}" for sign, bound in (("from", low), ("up to", high)) if bound is not None]
    return f" {' '.join(parts)}" if parts else ""


def objective_rows(found: Objective, by: str = "run") -> Rows:
    """A row a figure of the run, or a step."""
    if by == "step":
        return found.steps
    rows = [(each.name, each.value, each.low, each.high, each.meaning) for each in found.figures.values()]
    if (carried := found.concentration) is not None:
        rows += [(label, getattr(carried, name), None, None, _CARRIED[name]) for name, label in CARRIED.items()]
    return Rows(("figure", "value", "low", "high", "what it is"), rows)


def _steps(found: Objective, width: int | None, by: str) -> str:
    kept = [name for name in STEP_COLUMNS if name in found.steps.columns]
    steps = found.steps.without([name for name in found.steps.columns if name not in kept])
    if by == "step":
        return to_text(steps, width)
    key = next((name for name in ("bias", "mean_abs_d", "var_drift") if name in kept), "num_tokens")
    place = steps.columns.index(key)
    worst = sorted(steps.rows, key=lambda row: -abs(row[place] or 0.0))[:NUM_WORST]
    return f"Worst steps, by {key}:\n\n{to_text(Rows(steps.columns, worst), width)}"
