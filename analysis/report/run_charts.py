"""Charts by step, one per series."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..facts.recorded import interval_text
from ..facts.series import KINDS, LOG, Series
from ..statistics.location import SHIFT
from . import chart
from .chart import Band, Line, LineChart, Mark
from .commands import query_of_metric, query_of_series
from .subject import Subject

_OF_MISMATCH = ("k3", "p99_abs_d", "max_abs_d", "ess")
_MOST_MARKS = 8
_MOST_STEPS = 12


def run_charts(subjects: Sequence[Subject]) -> list[LineChart]:
    """Chart every series that varies. Marks show where the first run's series change."""
    charts = [one for name, term in SERIES.items() if (one := _chart(name, term, subjects)) is not None]
    place = next((i + 1 for i, one in enumerate(charts) if one.key == "reward"), 0)
    return [*charts[:place], *_evaluation(subjects), *charts[place:]]


def constants(subject: Subject) -> dict[str, float]:
    return {
        name: float(values[0])
        for name in SERIES
        if name in subject.series and len(values := _known(subject.series[name])) and np.all(values == values[0])
    }


def _chart(name: str, term: Term, subjects: Sequence[Subject]) -> LineChart | None:
    lines = [
        Line(name=subject.name, x=series.steps, y=series.values)
        for subject in subjects
        if (series := subject.series.get(name)) is not None and len(_known(series))
    ]
    known = [line.y[np.isfinite(line.y)] for line in lines]
    if all((values == values[:1]).all() for values in known):
        return None
    values = np.concatenate(known)
    is_log = KINDS[name][1] == LOG and values.min() > 0
    if name in _OF_MISMATCH:
        lines += _arms(name, subjects, is_log)
    first = subjects[0]
    source = first.series[name].source if name in first.series else ""
    return LineChart(
        key=name, title=term.title, unit=term.unit, note=f"{term.note} Here: {source}." if source else term.note,
        sql=query_of_series(name, first), lines=tuple(lines), x_label="step", y_scale=chart.LOG if is_log else chart.LINEAR,
        marks=_marks(name, first), remark=not_finite(first.series[name].not_finite) if name in first.series else "",
        bands=_published_k3(first) if name == "k3" else (),
    )  # fmt: skip


def not_finite(steps: Sequence[int] | np.ndarray) -> str:
    if not len(steps):
        return ""
    told = ", ".join(str(step) for step in steps[:_MOST_STEPS])
    more = f" and {len(steps) - _MOST_STEPS} more" if len(steps) > _MOST_STEPS else ""
    return f"NaN or infinite at step{'s' if len(steps) > 1 else ''} {told}{more}."


def _known(series: Series) -> np.ndarray:
    return np.asarray(series.values[series.known])


def _arms(name: str, subjects: Sequence[Subject], is_log: bool) -> list[Line]:
    """Return one line per replay: the mismatch series `name`, computed with the replay as pass a. On a logarithmic
    axis, 0 becomes NaN."""
    found = []
    for subject in subjects:
        for arm, columns in subject.arms.items():
            for column in columns:
                if column.name == name:
                    y = np.where(column.values > 0, column.values, np.nan) if is_log else column.values
                    line_name = f"{subject.name} {arm}" if len(subjects) > 1 else arm
                    found.append(Line(name=line_name, x=column.steps, y=y, is_side=True))
    return found


def _marks(name: str, subject: Subject) -> tuple[Mark, ...]:
    series = subject.dynamics.series if subject.dynamics else ()
    changes = [change for one in series if one.name == name for change in one.changes]
    largest = sorted(changes, key=lambda change: -abs(change.size_in_sd))[:_MOST_MARKS]
    marks = []
    for change in sorted(largest, key=lambda change: change.step):
        what = "jumps" if change.kind == SHIFT else "changes slope"
        when = f"{what} at step {change.step}{interval_text(change.low, change.high)}"
        text = f"{when}: {change.before:.3g} to {change.after:.3g}"
        marks.append(Mark(x=change.step, low=change.low, high=change.high, text=text))
    return tuple(marks)


def _published_k3(subject: Subject) -> tuple[Band, ...]:
    is_mixture = any("moe" in str(row["contract_json"]).lower() for row in subject.contracts)
    fitting = [each.figure for each in (subject.diagnosis.figures if subject.diagnosis else ()) if each.fits]
    healthy = [one for one in fitting if one.metric == "k3" and one.is_mixture == is_mixture and not one.is_fault]
    low = min((figure.low for figure in healthy), default=0.0)
    high = max((figure.high for figure in healthy), default=0.0)
    if not low < high:
        return ()
    sources = ", ".join(dict.fromkeys(figure.source for figure in healthy))
    return (Band(low=low, high=high, text=f"published for these dtypes: {low:g} to {high:g} ({sources})"),)


def _evaluation(subjects: Sequence[Subject]) -> Iterator[LineChart]:
    found = [(subject, subject.evaluation) for subject in subjects if subject.evaluation is not None]
    if found:
        lines = [Line(name=subject.name, x=logged.steps, y=logged.values) for subject, logged in found]
        first, name = found[0][0], found[0][1].name
        yield LineChart(
            key="evaluation", title=name, unit="", sql=query_of_metric(name, first, 0), lines=tuple(lines), x_label="step",
            note="An evaluation logged by the run. A faulty reward does not affect it.",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Term:
    title: str
    unit: str
    note: str


SERIES: dict[str, Term] = {
    "k3": Term("Mismatch k3", "nats", "Mean exp(d) - 1 - d, where d is the trainer's logprob for a token minus the engine's. It estimates the KL divergence between them and is never negative."),
    "p99_abs_d": Term("p99 of |d|", "nats", "99% of tokens have a smaller |d|. d is the trainer's logprob for a token minus the engine's."),
    "max_abs_d": Term("Largest |d|", "nats", "The largest difference between a token's two logprobs in the step. "
    "At 0.69 nats, one side gives the token twice the probability."),
    "ess": Term("Token ESS", "share", "Effective sample size: (sum w)^2 / (n sum w^2) with w = exp(d). At 1, all "
    "tokens have equal weight. Near 0, a few tokens have nearly all of it."),
    "reward": Term("Reward", "", "Mean recorded reward in the step."),
    "length": Term("Response length", "tokens", "Mean tokens per response."),
    "entropy": Term("Entropy", "nats", "Mean next-token entropy. Near 0 there is no exploration."),
    "grad_norm": Term("Gradient norm", "", "Gradient L2 norm logged by the trainer."),
    "learning_rate": Term("Learning rate", "", "As the trainer logged it."),
    "clip_share": Term("Clipped share", "share of tokens", "Tokens with a ratio beyond the recorded loss's bound. ppo_clip gives them no gradient, and cispo clamps their weight to the bound."),
    "policy_lag": Term("Policy lag", "updates", "Optimizer updates between sampling and training. 0 is on-policy."),
    "changed_weights": Term("Changed weights", "share of elements", "Weight elements that changed since the previous version. In bfloat16, small updates are rounded away."),
    "loss": Term("Loss", "", "As the trainer logged it."),
    "update_to_weight": Term("Update to weight", "ratio", "One update's norm divided by the weights' norm."),
    "reward_std_within_groups": Term("Reward spread in groups", "", "Standard deviation of rewards for the same prompt. "
    "Advantages are computed within these groups."),
    "share_groups_without_spread": Term("Groups without reward spread", "share of groups", "Groups whose rewards are all equal. They give no gradient."),
    "share_length_limited": Term("Truncated responses", "share of responses", "Responses that ended because they reached "
    "the token limit."),
}  # fmt: skip

WORDS: dict[str, str] = {name: term.note for name, term in SERIES.items() if "_" in name} | {
    "k3_positive": "k3 over tokens with an advantage above 0.",
    "k3_negative": "k3 over tokens with an advantage below 0.",
    "d": "The trainer's logprob for a token minus the engine's (nats). 0.69 nats is a factor of two in probability.",
    "nats": "Natural logarithm units. A difference of x nats is a factor of exp(x).",
    "rms": "Root mean square. It gives large values more weight.",
    "valid": "Both logprobs measure the same quantity, with the same tokens, temperature, mask, weights and position. Otherwise, their difference says nothing about numerics.",
    "contract": "Everything that affects a pass's numbers: engine, versions, dtypes, kernels, parallelism, sampling.",
    "advantage": "How much better a response did than the others in its group. If positive, training makes the "
    "response more likely.",
    "|d|": "Absolute difference between the trainer's and the engine's logprob for a token (nats).",
    "sum |f|": "Sum of |f| over all tokens, where f is ratio times advantage after the loss's clipping.",
    "k3": "Mean exp(d) - 1 - d. It estimates the KL divergence between trainer and engine (nats).",
    "alerts": "Based on thresholds from frameworks and papers, which define their metrics differently.",
    "interval": "Confidence interval from resampling sequence groups: how much the value depends on the sampled groups.",
    "replay": "Recorded steps scored again under different numerics, from the weights in the trace.",
    "ln ratio": "Natural logarithm of the ratio of a token's probabilities under two policies.",
    "arm": "Recorded steps replayed under different numerics, stored as a separate pass.",
    "observation": "Evidence from a single run. The first series to change is not necessarily the cause.",
    "intervention": "Evidence from comparing the run with a baseline run: same seeds, one change.",
}
"""Word in the report -> explanation shown on hover."""
