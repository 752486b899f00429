"""`tim-trace gradient` as text."""

from __future__ import annotations

from collections.abc import Sequence

from ..replay.gradients.results import GradientReport, GradientStep, ModuleGradient
from .main_columns import MAIN_COLUMNS
from .rows import Rows, shown, to_text

TABLES = ("step", "module", "arm")
_FIGURES = ("norm", "cosine", "norm_ratio", "bias", "bias_error", "variance")


def gradient_text(found: GradientReport, by: str = "step", width: int | None = None) -> str:
    """Write gradients for reading: a row a step and arm, a kind of module of these, or an arm over all steps."""
    found = shown(found)
    rows = gradient_rows(found, by)
    loss = found.loss
    corrected = "" if loss.correction == "none" else f", correction {loss.correction}"
    facts = f"loss {loss.kind} of {loss.level} ratios over {loss.denominator}, {loss.aggregation}{corrected}"
    return "\n\n".join([found.sentence, facts, to_text(rows, width, MAIN_COLUMNS["gradient"]), *found.notes])


def gradient_rows(found: GradientReport, by: str = "step") -> Rows:
    """A row a step and arm, a kind of module of these, or an arm over all steps."""
    return {"step": by_step, "module": by_module, "arm": by_arm}[by](found.steps)


def by_step(steps: Sequence[GradientStep]) -> Rows:
    """A row an optimizer step and arm."""
    columns = (
        "step", "arm", "version", "grad_norm", "logged_norm", "cosine", "norm_ratio", "bias", "bias_error", "variance",
        "noise_scale", "progress_a", "progress_b", "progress_c",
    )  # fmt: skip
    rows = [
        (
            step.step, step.arm, step.policy_version, step.grad_norm, step.logged_norm,
            *_figures(step.whole)[1:], step.noise_scale,
            *((None,) * 3 if step.progress is None else (step.progress.a, step.progress.b, step.progress.c)),
        )
        for step in steps
    ]  # fmt: skip
    return Rows(columns, rows)


def by_module(steps: Sequence[GradientStep]) -> Rows:
    """A row an optimizer step, arm and kind of module."""
    return Rows(
        ("step", "arm", "version", "module", "num_parameters", *_FIGURES),
        [
            (step.step, step.arm, step.policy_version, part.module, part.num_parameters, *_figures(part))
            for step in steps
            for part in step.modules
        ],
    )


def by_arm(steps: Sequence[GradientStep]) -> Rows:
    """A row an arm: means over the steps, and in how many the bias is beyond twice its error."""
    rows = []
    for name in dict.fromkeys(step.arm for step in steps):
        own = [step.whole for step in steps if step.arm == name]
        cosines = [whole.cosine for whole in own if whole.cosine is not None]
        ratios = [whole.norm_ratio for whole in own if whole.norm_ratio is not None]
        shares = [whole.bias / whole.norm * whole.norm_ratio for whole in own if whole.norm and whole.norm_ratio]
        told = [whole for whole in own if whole.bias_error is not None]
        biased = sum(whole.bias > 2 * (whole.bias_error or 0.0) for whole in told)
        rows.append((
            name, len(own), _mean(cosines), min(cosines, default=None), _mean(ratios), _mean(shares),
            biased if told else None,
        ))  # fmt: skip
    columns = ("arm", "num_steps", "mean_cosine", "min_cosine", "mean_norm_ratio", "mean_bias_share", "num_biased")
    return Rows(columns, rows)


def _figures(part: ModuleGradient) -> tuple[float | None, ...]:
    return tuple(getattr(part, name) for name in _FIGURES)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
