from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..rows import Rows, of_steps, shown, to_text, wrapped
from .verdict import Objective

NUM_WORST = 5

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
        parts.append(to_text(objective_rows(found), width))
    if len(found.steps):
        parts.append(_steps(found, width, by))
    return "\n\n".join(parts)


def objective_json(found: Objective) -> dict[str, Any]:
    rendered = {name: getattr(found, name) for name in ("verdict", "notes", "cannot", "loss_from")}
    return asdict(found) | {"steps": found.steps} | rendered


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
    kept = [name for name in STEP_COLUMNS if name in found.steps.columns]
    steps = found.steps.without([name for name in found.steps.columns if name not in kept])
    if by == "step":
        return to_text(steps, width)
    key = next((name for name in ("bias", "mean_abs_d", "var_drift") if name in kept), "num_tokens")
    place = steps.columns.index(key)
    worst = sorted(steps.rows, key=lambda row: -abs(row[place] or 0.0))[:NUM_WORST]
    return f"Worst steps, by {key}:\n\n{to_text(Rows(steps.columns, worst), width)}"
