from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import fill
from typing import TYPE_CHECKING

from ..replay.backends.trusted import OTHER_INPUTS, REFUSED, WHY
from ..replay.results import ReplayedStep, ReplayedSteps, ReplayPlan, by_arm
from ..schemas.passes import TRAIN
from .rows import MAIN_COLUMNS, Rows, counted, shown, table, to_text

if TYPE_CHECKING:
    from ..replay.gradients.results import GradientReport, GradientStep, ModuleGradient
    from .prediction import Prediction
    from .triangulate import Triangulation


def plan_text(plan: ReplayPlan, width: int | None = None) -> str:
    return to_text(plan_rows(plan), width)


def plan_rows(plan: ReplayPlan) -> Rows:
    names, rows = plan._table()
    return Rows(tuple(names), [tuple(row) for row in rows])


def estimate_sentence(plan: ReplayPlan) -> str:
    assert plan.seconds is not None
    tokens, arms = sum(arm.num_tokens for arm in plan), [arm for arm in plan if arm.num_tokens]
    scoring_s = sum(arm.num_tokens / arm.tokens_per_s for arm in arms if arm.tokens_per_s)
    pace = f" at {tokens / scoring_s:,.0f} tokens/s" if scoring_s else ""
    loads = sum(arm.num_versions for arm in plan)
    return (
        f"about {_duration(plan.seconds)}: {tokens:,} tokens in {len(arms)} arm{'s' * (len(arms) != 1)}{pace}, "
        f"{loads:,} weight load{'s' * (loads != 1)}"
    )


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}" if seconds < 10 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds" if seconds >= 10 else f"{seconds:.1f} seconds"


def not_held_reason(code: str) -> str:
    return WHY[code].format(name="").replace("  ", " ")


def not_reproduced(broken: Sequence[ReplayedStep]) -> str:
    first = broken[0]
    version = next((step.fitting_version for step in broken if step.fitting_version is not None), None)
    size = "" if first.not_held == REFUSED else f", mean |d| {first.mean_abs_d:.2g}, largest {first.max_abs_d:.2g} nats"
    meaning = "Every arm's difference from `train` includes this one"
    if first.not_held == OTHER_INPUTS:
        meaning = "The nearest versions' weights do not reproduce it; try --weights-version N or --temperature T"
    if version is not None:
        meaning = f"--weights-version {version} reproduces it, so the recorded policy_version is wrong"
    return (
        f"the recorded bits were not reproduced in {counted(len(broken), 'step')} (first: step {first.step}{size}), because "
        f"{not_held_reason(str(first.not_held))}. {meaning}. "
        f"Differences from the recording: {'; '.join(first.differs) or 'none'}"
    )


def replay_text(found: ReplayedSteps, width: int | None = None) -> str:
    return to_text(table(by_arm(found)), width)


def triangulation_text(found: Triangulation, width: int | None = None) -> str:
    found = shown(found)
    why = "" if found.not_held is None else f", because {not_held_reason(found.not_held)}"
    size = found.identity_mean_abs_d
    held = f"NOT HELD{'' if size is None else f' (mean |d| {size:.2g} nats)'}{why}: see tim-trace replay"
    if found.identity_held:
        held = "held: bitwise equal to the recording"
    elif size is not None and size < 0.01 * found.gap_rms:
        held = f"not bitwise{why}: mean |d| is only {size:.1g} nats, less than 1% of the mismatch"
    facts = {
        "reference": found.reference,
        "identity": held,
        "steps": f"{len(found.steps)} ({found.steps[0]} to {found.steps[-1]})",
        "tokens": f"{found.num_tokens:,} in {found.num_sequences:,} sequences, {found.num_groups:,} groups",
        "mismatch": f"{found.gap_rms:.4g} nats rms (train - rollout)",
        "correlation": f"{found.correlation:.3g} between the two errors",
        "resolution": f"{found.resolution:.1g} nats, because the reference is stored as float32",
    }
    parts = [
        triangulation_sentence(found),
        "\n".join(f"{name:<11}  {value}" for name, value in facts.items()),
        to_text(triangulation_rows(found), width),
    ]
    if len(found.arms):
        parts.append(to_text(found.arms, width))
    if found.predictions:
        parts += _prediction_parts(found.predictions, width)
    return "\n\n".join(parts)


def triangulation_sentence(found: Triangulation) -> str:
    if found.gap_rms == 0.0:
        return "No mismatch: trainer and engine give every token the same logprob."
    larger = max(found.sides, key=lambda side: side.share or 0.0)
    if larger.share is None:
        return (
            "Cannot attribute the mismatch: the reference reproduces neither trainer nor engine (mean |error| "
            f"{' and '.join(f'{side.mean_abs:.2g}' for side in found.sides)} nats). `tim-trace replay` finds out why."
        )
    if larger.share < 0.6:
        trainer, engine = (f"{side.share:.0%}" for side in found.sides)
        return f"Both sides account for the mismatch: the trainer for {trainer} of mean squared d, the engine for {engine}."
    who = "trainer" if larger.name == TRAIN else "engine"
    if larger.share_low is None or larger.share_high is None:
        interval = f"no interval: {found.no_interval}"
    else:
        interval = f"95% CI over {found.num_groups:,} groups: {larger.share_low:.1%} to {larger.share_high:.1%}"
    return f"The {who} accounts for {larger.share:.1%} of the mismatch (mean squared d; {interval})."


def triangulation_rows(found: Triangulation, by: str = "side") -> Rows:
    sides = table(found.sides)
    others = {"arm": lambda: found.arms, "prediction": lambda: table(found.predictions)}
    return others[by]() if by in others else Rows(("side", *sides.columns[1:]), sides.rows)


PREDICTION_NOTES = {
    "unfelt": "in published runs, removing a larger mismatch did not raise the reward ({detail})",
    "wide": "cannot tell: the interval is wider than 0.4 times the value; replay more steps",
    "few_groups": "cannot tell: only {detail} groups at the replayed steps; replay more steps",
    "none_seen": "cannot tell: all values are 0 at the replayed steps; replay more steps",
    "no_interval": "cannot tell: the value is above 0 in too few groups of sequences; replay more steps",
    "no_advantages": "cannot tell: the trace has no advantages",
    "engine_unknown": "cannot tell: the engine is not vLLM; pass an arm that reproduces it with --engine",
    "engine_differs": "cannot tell: the engine's replay gives {detail} times the recorded mean |d|; pass an arm that "
    "reproduces it with --engine",
    "mixed_versions": "cannot tell: the engine used several old weight versions; choose one step with --steps",
    "same_execution": "cannot tell: both sides would be the same replay; change one side only",
    "not_replayed": "cannot tell: {detail}",
}  # fmt: skip
"""Notes on predictions, by code. `{detail}` stands for `Prediction.below` in `unfelt`, and for `Prediction.detail`
in the other notes."""


def _prediction_parts(predictions: Sequence[Prediction], width: int | None) -> Iterator[str]:
    legend: dict[str, None] = {}
    for remedy in dict.fromkeys(each.remedy for each in predictions):
        rows = []
        for each in (each for each in predictions if each.remedy == remedy):
            notes = {"unfelt": each.below} if each.below else {}
            notes |= {each.code: each.detail} if each.code else {}
            legend |= {f"{note}: {PREDICTION_NOTES[note].format(detail=of)}": None for note, of in notes.items()}
            value = None if each.code else each.value
            rows.append((each.metric, each.recorded, value, each.low, each.high, ", ".join(notes)))
        table = to_text(Rows(("metric", "recorded", "predicted", "low", "high", "note"), rows), width)
        yield f"{remedy}: predicted for the other steps, with 90% intervals\n{table}"
    yield "\n".join(fill(line, 80, subsequent_indent="  ") for line in legend)


_FIGURES = ("norm", "cosine", "norm_ratio", "bias", "variance")


def gradient_text(found: GradientReport, width: int | None = None, by: str = "step") -> str:
    found = shown(found)
    rows = gradient_rows(found, by)
    loss = found.loss
    settings = [f"{name} {getattr(loss, name)}" for name in ("level", "denominator", "aggregation", "correction")]
    facts = f"loss {loss.kind}: {', '.join(settings)}"
    return "\n\n".join([gradient_sentence(found), facts, to_text(rows, width, MAIN_COLUMNS["gradient"]), *found.notes])


def gradient_sentence(found: GradientReport) -> str:
    logged = [step for step in found.steps if step.reproduced is not None]
    wrong = [step for step in logged if not step.reproduced]
    if not logged:
        return "No gradient norm was logged for these steps, so there is nothing to check the gradients against."
    if not wrong:
        steps = f"all {len(logged)} steps" if len(logged) > 1 else "the step"
        return f"The recorded gradient norm was reproduced to the last digit in {steps} that logged one."
    first = wrong[0]
    why = f" ({'; '.join(first.notes)})" if first.notes else ""
    return (
        f"The recorded gradient norm was reproduced in {len(logged) - len(wrong)} of {len(logged)} steps; step {first.step} gives "
        f"{first.grad_norm!r}, but {first.logged_norm!r} was logged{why}. Comparisons with a gradient that was not "
        f"reproduced are less reliable."
    )


def gradient_rows(found: GradientReport, by: str = "step") -> Rows:
    return {"step": _by_step, "module": _by_module, "arm": _by_arm}[by](found.steps)


def _by_step(steps: Sequence[GradientStep]) -> Rows:
    columns = ("step", "arm", "version", "grad_norm", "logged_norm", *_FIGURES[1:])
    rows = [
        (step.step, step.arm, step.policy_version, step.grad_norm, step.logged_norm, *_figures(step.whole)[1:])
        for step in steps
    ]
    return Rows(columns, rows)


def _by_module(steps: Sequence[GradientStep]) -> Rows:
    rows = [
        (step.step, step.arm, step.policy_version, part.module, part.num_parameters, *_figures(part))
        for step in steps
        for part in step.modules
    ]
    return Rows(("step", "arm", "version", "module", "num_parameters", *_FIGURES), rows)


def _by_arm(steps: Sequence[GradientStep]) -> Rows:
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
