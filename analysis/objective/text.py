from __future__ import annotations

from ..rows import MAIN_COLUMNS, Form, Rows, of_steps, shown, to_text, wrapped
from .verdict import Objective

NUM_WORST = 5
_ROOM_FOR_INTERVALS = 100
"""Minimum width (columns) for intervals and meanings side by side. Below it, the intervals are left out."""

STEP_COLUMNS = (
    "step", "iteration", "num_tokens", "bias", "abs_bias", "skew", "relative_bias", "relative_abs_bias", "flipped",
    "bad_updates", "mean_abs_d", "var_d", "var_drift", "mean_abs_sum_d",
)  # fmt: skip


def objective_text(found: Objective, width: int | None = None, by: str = "run") -> str:
    found = shown(found)
    parts = [wrapped(" ".join(found.verdict), "", width), _loss(found, width)]
    parts += [wrapped(f"cannot be answered: {sentence}", "", width) for sentence in found.cannot]
    parts += [wrapped(f"note: {note}", "", width) for note in found.notes]
    if by == "run" and found.figures:
        main = MAIN_COLUMNS["objective"] if width is not None and width < _ROOM_FOR_INTERVALS else ()
        parts.append(to_text(objective_rows(found), width, main))
    if len(found.steps):
        parts.append(_steps(found, width, by))
    return "\n\n".join(parts)


def worst_steps(found: Objective) -> Rows:
    """Return one row for each of the NUM_WORST updates with the largest bias (or mismatch, if the bias is unknown)."""
    if not found.steps.rows:
        return found.steps
    column = _worst_by(found)
    worst = sorted(found.steps.dicts(), key=lambda row: -abs(row[column] or 0.0))
    return Rows(found.steps.columns, [tuple(row.values()) for row in worst[:NUM_WORST]])


def _worst_by(found: Objective) -> str:
    return next((name for name in ("bias", "mean_abs_d", "var_drift") if name in found.steps.columns), "num_tokens")


OBJECTIVE_FORM: Form = {
    Objective: {
        "verdict": Objective.verdict, "notes": Objective.notes, "cannot": Objective.cannot, "loss_from": Objective.loss_from,
    },
}  # fmt: skip
RUN_FORM: Form = {Objective: {**OBJECTIVE_FORM[Objective], "steps": worst_steps}}
"""Output of `objective --by run`."""


def _loss(found: Objective, width: int | None) -> str:
    loss = found.loss
    hard = "" if loss.clip_hard is None else f", never above {loss.clip_hard:g}"
    bounds = {"ppo_clip": f" (clip -{loss.clip_low:g} +{loss.clip_high:g}{hard})",
              "cispo": f" (weight at most {loss.clip_high:g})",
              "sapo": f" (temperature {loss.sapo_temperature_pos:g} where A > 0, else {loss.sapo_temperature_neg:g})",
              "vespo": f" (k {loss.vespo_k_pos:g}, lambda {loss.vespo_lambda_pos:g} where A >= 0, else k {loss.vespo_k_neg:g}, "
                       f"lambda {loss.vespo_lambda_neg:g})"}.get(loss.kind, "")  # fmt: skip
    level = {"token": "token-level ratios", "sequence_mean": "sequence-level ratios from the mean of log-ratios"}.get(
        loss.level, "sequence-level ratios from the sum of log-ratios"
    )
    corrected = "" if loss.correction == "none" else f", corrected by {loss.correction}{_bounds(found)}"
    text = (
        f"{found.trace}{of_steps(found.steps_asked)}: {loss.kind}{bounds} with {level} against {loss.denominator!r}{corrected}, "
        f"aggregated by {loss.aggregation} ({found.loss_from}). {found.num_updates:,} updates, {found.num_sequences:,} sequences, {found.num_tokens:,} tokens, "
        f"{found.num_groups:,} groups."
    )
    return wrapped(text, "", width)


def _bounds(found: Objective) -> str:
    low, high = found.loss.correction_low, found.loss.correction_high
    parts = [f"{sign} {bound:g}" for sign, bound in (("from", low), ("up to", high)) if bound is not None]
    return f" {' '.join(parts)}" if parts else ""


def objective_rows(found: Objective, by: str = "run") -> Rows:
    if by == "step":
        return found.steps
    rows = [(each.name, each.value, each.low, each.high, each.meaning) for each in found.figures.values()]
    return Rows(("figure", "value", "low", "high", "meaning"), rows)


def _steps(found: Objective, width: int | None, by: str) -> str:
    shown_steps = found.steps if by == "step" else worst_steps(found)
    text = to_text(shown_steps.without({*found.steps.columns} - {*STEP_COLUMNS}), width)
    return text if by == "step" else f"Worst steps, by {_worst_by(found)}:\n\n{text}"
