from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...schemas.errors import option
from ..statement import Measured, Statement

_BY_CLIPPING = (
    ", by {relative_bias_signed}{interval} of the sum of the terms' absolute values. This comes from clipping."
)

VERDICT: Mapping[str, str] = {
    "nothing_read": "The mismatch's effect on the objective cannot be computed.",
    "no_tokens": "No result: no token in the loss has a finite logprob in every pass.",
    "no_advantage": "The objective is 0: all advantages are 0, so no ratio has an effect.",
    "in_ratio": "The loss divides by the rollout's own logprobs, so the ratio used is the true ratio, and the bias is 0. That "
    "ratio contains both the mismatch and the policy's drift, so clipping and correction weights act on both{how_far}.",
    "no_effect": "The mismatch does not change the objective's value: each token contributes as much with the used "
    "ratio as with the true ratio.",
    "not_answerable": "The effect on the objective cannot be computed. The missing data are listed below.",
    "ratios": "On average, the mismatch changes a token's ratio by {mean_abs_d:.3g} nats and a whole sequence's ratio by {mean_abs_sum_d:.3g} nats.",
    "undecided": "Cannot tell whether the mismatch biases the objective: {reason}. {how_much}",
    "negligible_noise": "The mismatch does not detectably bias the objective, and it adds negligible noise. {how_much}",
    "moderate_noise": "The mismatch does not detectably bias the objective, but it adds noise. {how_much}",
    "large_noise": "The mismatch does not detectably bias the objective, but it adds a lot of noise. {how_much}",
    "negligible_push_up": "The mismatch biases the objective upward by a negligible amount: {up}. {how_much}",
    "small_push_up": "The mismatch biases the objective slightly upward: {up}. {how_much}",
    "large_push_up": "The mismatch biases the objective strongly upward: {up}. {how_much}",
    "negligible_push_down": "The mismatch biases the objective downward by a negligible amount: {down}. {how_much}",
    "small_push_down": "The mismatch biases the objective slightly downward: {down}. {how_much}",
    "large_push_down": "The mismatch biases the objective strongly downward: {down}. {how_much}",
    "negligible_opposed": f"The mismatch biases the objective negligibly{_BY_CLIPPING}",
    "small_opposed": f"The mismatch biases the objective slightly{_BY_CLIPPING}",
    "large_opposed": f"The mismatch biases the objective strongly{_BY_CLIPPING}",
    "unclipped": "Without clipping, the bias would be {relative_bias_signed}{interval}.",
    "signs": "Overall, {signs}.",
    "worst_update": "The largest bias is at step {step} ({bias:+.3g}{share_of_all}).",
    "clip_decisions": "The mismatch flips the clip decision for {flipped_percent} of the {terms}; {clipped_percent} are clipped in "
    "total.",
    "correction": "These figures include the loss's correction; without the correction weights, the bias would be {uncorrected_relative_bias_signed} "
    "instead of {relative_bias_signed}, and absolute biases would add up to {uncorrected_relative_abs_bias_percent} "
    "instead of {relative_abs_bias_percent}.",
}

_WAYS = {
    "up": "the loss overstates it",
    "down": "the loss understates it",
}

CANNOT: Mapping[str, str] = {
    "no_trainer_logprobs": "all questions, because the loss's ratio needs logprobs of 'train' or 'current' and the trace "
    "has neither; record them with Recorder.add_scores",
    "no_rollout": "how the mismatch affects the objective, because the trace has no 'rollout' logprobs",
    "no_train": "how the ratio splits into mismatch and policy drift; record the 'train' pass",
    "no_current": "how far the policy drifts, and how later updates on a batch behave; record the 'current' pass",
    "no_advantages": "all questions about advantages; record advantages with Recorder.add_sequences(advantage=...)",
}

NOTES: Mapping[str, str] = {
    "current_for_train": "the trace has no 'train' pass, so 'current' replaces it and the updates since sampling count as "
    "mismatch",
    "first_update_only": "the trace has no 'current' pass, so the figures are for the first update on a batch, which "
    "starts from the trainer's policy. The used ratio is 1 unless the loss divides by the rollout's logprobs",
    "sequences_left_out": "{num_left_out:,} of {num_sequences:,} sequences lack logprobs in some pass and are excluded",
    "not_finite": "{num_nan:,} tokens have a NaN logprob and {num_inf:,} an infinite logprob in some pass; all figures exclude them",
    "some_without_advantage": "{num_lacking:,} of {num_sequences:,} sequences have no advantage and contribute nothing "
    "to a bias",
    "rows_without_tokens": "{num_empty:,} of {num_rows:,} sequences used in the loss have no token to "
    "compare: they add nothing to the sums but count in the loss's mean",
    "no_clip": "{kind} has no clip: its weight decays smoothly, so no term counts as clipped",
    "unknown_settings": "the figures ignore these loss settings: {settings}",
    "micro_batches_unknown": "micro-batches were not recorded, so token weights refer to the whole update",
    "divisor_unknown": "the aggregation's divisor (max_tokens) was not recorded, so sizes assume a divisor of 1 (shares do not depend on it)",
    "kl_left_out": "all figures exclude the KL term (coefficient {coefficient:g})",
    "ratios_clamped": "some sequences' ratios exceed exp({bound:g}) and are clamped to it",
}


def loss_basis() -> Mapping[str, str]:
    how = f"set it with {option('loss', 'KIND,FIELD=VALUE')}"
    return {
        "recorded": "as recorded",
        "not_recorded": f"assumed, because the trace records no known loss: {how}",
        "unreadable": f"assumed, because the recorded loss cannot be read ({{error}}): {how}",
        "asked": "as requested",
        "fields_asked": "{fields} as requested",
    }


def verdict_sentence(part: Statement, confidence: float) -> str:
    values = part.values
    words = {f"{name}_percent": f"{value * 100:.3g}%" for name, value in values.items() if isinstance(value, float)}
    words |= {f"{name}_signed": f"{value * 100:+.3g}%" for name, value in values.items() if isinstance(value, float)}
    words |= _WAYS | {"signs": " and ".join(_signs(values))}
    words["share_of_all"] = f", {values['share'] * 100:.2g}% of the total" if "share" in values else ""
    words["interval"] = ""
    if "low" in values:
        span = f"{words['low_signed']} to {words['high_signed']}"
        words["interval"] = f" ({confidence * 100:g}% interval over groups {span})"
    how_much = (
        "Relative to the sum of the terms' absolute values, the net bias is {relative_bias_signed}{interval}, and the "
        "absolute biases add up to {relative_abs_bias_percent}."
    )
    words["how_much"] = how_much.format(**words) if "relative_abs_bias" in values else ""
    words["how_far"] = _how_far(values)
    return VERDICT[part.code].format(**values, **words)


def _how_far(values: Mapping[str, Measured]) -> str:
    parts = []
    if "mean_abs_d" in values:
        parts.append(f"the mismatch changes a token's ratio by {values['mean_abs_d']:.3g} nats on average")
    if "clipped" in values:
        parts.append(f"{float(values['clipped']) * 100:.3g}% of the {values['terms']} are clipped")
    return f" ({'; '.join(parts)})" if parts else ""


def _signs(values: Mapping[str, Measured]) -> Iterator[str]:
    for name, sign, more, less in (
        ("relative_positive", "A > 0", "credited too much", "credited too little"),
        ("relative_negative", "A < 0", "punished too little", "punished too much"),
    ):
        if name in values:
            value = float(values[name])
            yield f"tokens with {sign} are {more if value > 0 else less} by {abs(value) * 100:.3g}%"
