"""Render `tim-trace gradient`."""

from __future__ import annotations

from collections.abc import Sequence

from ..replay.gradients.results import GradientReport, GradientStep, ModuleGradient
from .main_columns import MAIN_COLUMNS
from .rows import Rows, shown, to_text

_FIGURES = ("norm", "cosine", "norm_ratio", "bias", "variance")


def gradient_text(found: GradientReport, by: str = "step", width: int | None = None) -> str:
    """Render gradients, one row per step and arm, per step, arm and module, or per arm over all steps."""
    found = shown(found)
    rows = gradient_rows(found, by)
    loss = found.loss
    corrected = "" if loss.correction == "none" else f", correction {loss.correction}"
    facts = f"loss {loss.kind} with {loss.level}-level ratios over {loss.denominator}, {loss.aggregation}{corrected}"
    return "\n\n".join([gradient_sentence(found), facts, to_text(rows, width, MAIN_COLUMNS["gradient"]), *found.notes])


def gradient_sentence(found: GradientReport) -> str:
    """Return a sentence that states whether the recorded gradient norms were reproduced."""
    logged = [step for step in found.steps if step.reproduced is not None]
    wrong = [step for step in logged if not step.reproduced]
    if not logged:
        return (
            "No gradient norm was logged for these steps, so the gradients cannot be checked against the recorded ones."
        )
    if not wrong:
        steps = f"all {len(logged)} steps" if len(logged) > 1 else "the step"
        return f"The recorded gradient norm was reproduced to the last digit in {steps} that logged one."
    first = wrong[0]
    why = f" ({'; '.join(first.notes)})" if first.notes else ""
    return (
        f"The recorded gradient norm was reproduced in {len(logged) - len(wrong)} of {len(logged)} steps; step {first.step} gives "
        f"{first.grad_norm!r}, but {first.logged_norm!r} was logged{why}. Distances to a gradient that was not "
        f"reproduced are less reliable."
    )


def gradient_rows(found: GradientReport, by: str = "step") -> Rows:
    """Return one row per step and arm, per step, arm and module, or per arm over all steps."""
    return {"step": _by_step, "module": _by_module, "arm": _by_arm}[by](found.steps)


def _by_step(steps: Sequence[GradientStep]) -> Rows:
    columns = (
        "step", "arm", "version", "grad_norm", "logged_norm", "cosine", "norm_ratio", "bias", "variance",
    )  # fmt: skip
    rows = [
        (step.step, step.arm, step.policy_version, step.grad_norm, step.logged_norm, *_figures(step.whole)[1:])
        for step in steps
    ]
    return Rows(columns, rows)


def _by_module(steps: Sequence[GradientStep]) -> Rows:
    return Rows(
        ("step", "arm", "version", "module", "num_parameters", *_FIGURES),
        [
            (step.step, step.arm, step.policy_version, part.module, part.num_parameters, *_figures(part))
            for step in steps
            for part in step.modules
        ],
    )


def _by_arm(steps: Sequence[GradientStep]) -> Rows:
    """Return one row per arm: averages over the arm's steps."""
    rows = []
    for name in dict.fromkeys(step.arm for step in steps):
        own = [step.whole for step in steps if step.arm == name]
        cosines = [whole.cosine for whole in own if whole.cosine is not None]
        ratios = [whole.norm_ratio for whole in own if whole.norm_ratio is not None]
        shares = [whole.bias / whole.norm * whole.norm_ratio for whole in own if whole.norm and whole.norm_ratio]
        rows.append((name, len(own), _mean(cosines), min(cosines, default=None), _mean(ratios), _mean(shares)))
    columns = ("arm", "num_steps", "mean_cosine", "min_cosine", "mean_norm_ratio", "mean_bias_share")
    return Rows(columns, rows)


def _figures(part: ModuleGradient) -> tuple[float | None, ...]:
    return tuple(getattr(part, name) for name in _FIGURES)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
