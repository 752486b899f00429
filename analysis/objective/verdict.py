"""An objective in plain words."""

from __future__ import annotations

from collections.abc import Mapping

from ...schemas.loss import ROLLOUT, TOKEN, Loss
from ..rows import Rows
from .concentration import Concentration
from .judged import Estimate, Objective

SMALL, LARGE = 0.001, 0.05
"""Shares of sum |f(rho*)| below which a bias is called next to nothing, and above which it is called large. Conventions of
ours: an advantage is a difference of noisy rewards, of which a thousandth cannot be seen and a twentieth can."""


def verdict(
    loss: Loss,
    figures: Mapping[str, Estimate],
    carried: Concentration | None,
    steps: Rows,
    num_tokens: int,
    confidence: float,
) -> tuple[str, ...]:
    """Does the mismatch push one way, by how much, where."""
    if not num_tokens:
        return ("Nothing can be said: no token counts and has a finite logprob under every pass.",)
    relative, size = figures.get("relative_bias"), figures.get("relative_abs_bias")
    if relative is None or size is None:
        return _without_bias(figures)
    if relative.value is None or size.value is None:
        return ("The objective is 0: no advantage is other than 0, so that no ratio matters.",)
    if size.value == 0:
        why = (
            "the loss divides by the rollout's own logprobs, so that the ratio it uses is the true one; the gradient is still "
            "the trainer's"
            if loss.denominator == ROLLOUT and loss.correction == "none"
            else "the ratio that it uses has the same contribution as the true one on every token"
        )
        return (f"The mismatch does not touch the objective's value: {why}.",)
    sentences = [_direction(relative, size, confidence), _sides(figures)]
    sentences += [_where(loss, carried, steps), _flips(figures, loss), _correction(figures)]
    return tuple(sentence for sentence in sentences if sentence)


def _direction(relative: Estimate, size: Estimate, confidence: float) -> str:
    value, most = relative.value or 0.0, size.value or 0.0
    how_much = (
        f"It adds {_signed_percent(value)} to the objective, of the sum of its terms' sizes{_interval(relative, confidence)}; without "
        f"cancelling it would be {_percent(most)}."
    )
    if relative.low is None or relative.high is None:
        return f"Whether the mismatch pushes one way cannot be told: {relative.no_interval}. {how_much}"
    if relative.low <= 0 <= relative.high:
        noise = "next to nothing" if most < SMALL else "noise" if most < LARGE else "noise, and a large one"
        return f"The mismatch pushes no way that this many groups could show: {noise}. {how_much}"
    much = "by next to nothing" if abs(value) < SMALL else "by a little" if abs(value) < LARGE else "by much"
    way = (
        "up: the loss sees more objective than there is"
        if value > 0
        else "down: the loss sees less objective than there is"
    )
    return f"The mismatch pushes one way, {much}, and {way}. {how_much}"


def _percent(share: float) -> str:
    return f"{share * 100:.3g} %"


def _signed_percent(share: float) -> str:
    return f"{share * 100:+.3g} %"


def _interval(found: Estimate, confidence: float) -> str:
    if found.low is None or found.high is None:
        return ""
    return (
        f" ({confidence * 100:g} % interval over groups {_signed_percent(found.low)} to {_signed_percent(found.high)})"
    )


def _sides(figures: Mapping[str, Estimate]) -> str:
    parts = []
    for name, sign, more, less in (
        ("relative_positive", "A > 0", "credited too much", "credited too little"),
        ("relative_negative", "A < 0", "punished too little", "punished too much"),
    ):
        value = figures[name].value
        if value:
            parts.append(f"tokens with {sign} are {more if value > 0 else less} by {_percent(abs(value))}")
    return f"On the whole {' and '.join(parts)}." if parts else ""


def _where(loss: Loss, carried: Concentration | None, steps: Rows) -> str:
    unit = "tokens" if loss.level == TOKEN else "sequences"
    sentence = ""
    if carried is not None:
        sentence = f"Half of sum |b| lies in {_percent(carried.half)} of the {unit}, 90 % in {_percent(carried.ninety)}"
    rows = [row for row in steps.dicts() if row["bias"] is not None]
    if len(rows) < 2:
        return f"{sentence}." if sentence else ""
    worst = max(rows, key=lambda row: abs(row["bias"]))
    total = sum(abs(row["bias"]) for row in rows)
    share = f", {abs(worst['bias']) / total * 100:.2g} % of all updates' together" if total else ""
    most = f"the update with the largest bias is step {worst['step']} ({worst['bias']:+.3g}{share})"
    return f"{sentence}; {most}." if sentence else f"T{most[1:]}."


def _flips(figures: Mapping[str, Estimate], loss: Loss) -> str:
    if "flipped" not in figures:
        return ""
    flipped, clipped = figures["flipped"].value or 0.0, figures["clipped"].value or 0.0
    terms = "tokens" if loss.level == TOKEN else "sequences"
    return f"It turns the clip decision of {_percent(flipped)} of the {terms}; {_percent(clipped)} are clipped in all."


def _correction(figures: Mapping[str, Estimate]) -> str:
    plain, applied = figures.get("uncorrected_relative_bias"), figures["relative_bias"]
    if plain is None or plain.value is None or applied.value is None:
        return ""
    noise, left = figures["uncorrected_relative_abs_bias"].value or 0.0, figures["relative_abs_bias"].value or 0.0
    return (
        f"The loss's correction is in these figures; with its weights left out the bias is {_signed_percent(plain.value)} instead of "
        f"{_signed_percent(applied.value)}, and without cancelling {_percent(noise)} instead of {_percent(left)}."
    )


def _without_bias(figures: Mapping[str, Estimate]) -> tuple[str, ...]:
    """What can be said of ratios alone."""
    sentences = ["What it does to the objective cannot be answered; see below what is missing."]
    variance, total = figures.get("mean_abs_d"), figures.get("mean_abs_sum_d")
    if variance is not None and total is not None and variance.value is not None and total.value is not None:
        sentences.append(
            f"A token's ratio is off by {variance.value:.3g} nats on average, a whole sequence's by {total.value:.3g} nats."
        )
    return tuple(sentences)


def nothing_read(trace: str, loss: Loss, how: str, confidence: float) -> Objective:
    """The answer where the trace has logprobs of one side alone, or none."""
    return Objective(
        trace=trace, loss=loss, loss_from=how, passes=("train", "rollout", "current"), num_updates=0, num_rows=0, num_sequences=0,
        num_tokens=0, num_terms=0, num_nan=0, num_inf=0, num_groups=0, confidence=confidence,
        verdict=("What the mismatch does to the objective cannot be answered.",), notes=(),
        cannot=(
            "everything: the trace has logprobs of neither 'train' nor 'current', which the ratio of the loss is made of; record "
            "them with Recorder.add_scores",
        ),
        figures={}, concentration=None, steps=Rows(("step", "iteration"), []),
    )  # fmt: skip
