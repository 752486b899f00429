"""Charts that show where the mismatch occurs, how it enters the loss, and what would remove it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from ..breakdowns.breakdowns import Breakdowns
from ..diagnosis.text import effect_text
from . import chart
from .chart import Array, Bar, BarChart, Chart, Heatmap, Line, LineChart
from .commands import command
from .subject import Subject

_NOT_SHOWN = ("none", "token-is", "sequence-is")

_GROUPS = {
    "d-by-": "Where the mismatch is",
    "ratio-": "How the mismatch enters the loss",
    "contribution-": "How the mismatch enters the loss",
    "arms": "What would remove or reduce the mismatch",
    "corrections": "What would remove or reduce the mismatch",
}


_PROFILES = {
    "position": (
        "Mean |d| by position in the response", "token position, from 1",
        "Rounding gives a flat line. A jump at one position points to a cache, an attention window or a rotary embedding.",
    ),
    "length": (
        "Mean |d| by response length", "response tokens", "Shows whether the mismatch is larger in long responses.",
    ),
    "entropy": (
        "Mean |d| by entropy", "next-token entropy, nats",
        "A mismatch that grows with entropy comes from uncertain tokens, as expected from rounding.",
    ),
}  # fmt: skip


def grouped(charts: Iterable[Chart]) -> dict[str, list[Chart]]:
    found: dict[str, list[Chart]] = {}
    for one in charts:
        heading = next(title for start, title in _GROUPS.items() if one.key.startswith(start))
        found.setdefault(heading, []).append(one)
    return found


def mismatch_charts(subject: Subject) -> list[Chart]:
    return [chart for charts in (_spread, _objective, _arms, _corrections) for chart in charts(subject)]


def _spread(subject: Subject) -> Iterator[Chart]:
    spread, (a, b) = subject.spread, subject.pair
    if spread is None:
        return
    rounding = "" if spread.envelope is None else (
        f"Rounded logits change d by at most a constant times 1 - p (arXiv 2512.23087). The lines are +-{spread.envelope:.3g} "
        "(1 - p) and enclose 99% of tokens below p = 0.99. "
    )  # fmt: skip
    yield Heatmap(
        key="d-by-probability", title="d against the token's probability", unit="tokens",
        note=f"Each cell counts tokens. {rounding}A large |d| at p near 1 is not rounding. The outermost rows count everything "
        "beyond the axis.", sql=spread.sql["density"], x_label=f"probability under {b}", y_label=f"d = {a} - {b}, nats",
        x_edges=np.linspace(0.0, 1.0, spread.density.shape[1] + 1), y_edges=spread.d_edges, counts=spread.density,
        curves=_envelope(spread),
    )  # fmt: skip
    for name, (title, label, note) in _PROFILES.items():
        if (profile := spread.profiles.get(name)) is not None:
            start = profile.start + (1 if name == "position" else 0)
            yield LineChart(
                key=f"d-by-{name}", title=title, unit="nats", note=f"{note} The rms gives large |d| more weight.", sql=spread.sql[name],
                lines=(Line(name="mean |d|", x=start, y=profile.mean_abs_d), Line(name="rms d", x=start, y=profile.rms_d)),
                x_label=label, x_scale=chart.LINEAR if name == "entropy" else chart.LOG,
            )  # fmt: skip


def _envelope(spread: Breakdowns) -> tuple[Line, ...]:
    if spread.envelope is None:
        return ()
    x = np.linspace(0.0, 1.0, 41)
    limit = float(spread.d_edges[-1])
    upper = spread.envelope * (1 - x)
    upper[upper > limit] = np.nan
    return Line(name="99% within", x=x, y=upper), Line(name="99% within", x=x, y=-upper)


def _objective(subject: Subject) -> Iterator[Chart]:
    found = subject.objective
    if found is None or not len(found.steps):
        return
    rows = found.steps.dicts()
    asked = command(subject, "objective", "--json")

    def column(name: str) -> Array:
        return np.array([row.get(name) for row in rows], float)

    def lines(keys: Mapping[str, str]) -> tuple[Line, ...]:
        return tuple(
            Line(name=name, x=column("step"), y=values, is_side=key == "relative_abs_bias")
            for key, name in keys.items()
            if np.isfinite(values := column(key)).any()
        )

    drift = lines({"var_d": "mismatch", "var_drift": "policy drift"})
    if drift and any(np.nanmax(line.y, initial=0.0) > 0 for line in drift):
        positive = all((line.y[np.isfinite(line.y)] > 0).all() for line in drift)
        yield LineChart(
            key="ratio-split", title="Mismatch and drift in the loss's ratio", unit="nats squared",
            note="ln ratio is the mismatch (d = train - rollout) plus the policy drift (current - train). The lines "
            "show how much each varies across tokens. The drift is intended and clipped. The mismatch is neither.",
            sql=asked, lines=drift, x_label="step", y_scale=chart.LOG if positive else chart.LINEAR,
        )  # fmt: skip
    if bias := lines({"relative_bias": "sum b", "relative_abs_bias": "sum |b|"}):
        yield LineChart(
            key="contribution-bias", title="How the mismatch changes the objective", unit="share of sum |f|",
            note="b is what a token adds to the objective under the loss's ratio, minus what it adds under the true ratio. "
            "Both sums are divided by sum |f|, the objective terms' total size. Above 0, the loss overstates the "
            "objective. If sum b is small compared with sum |b|, the errors cancel (arXiv 2605.14220).",
            sql=asked, lines=bias, x_label="step",
        )  # fmt: skip


def _arms(subject: Subject) -> Iterator[Chart]:
    found = subject.diagnosis
    if found is None or not found.replays:
        return
    shares = tuple(
        Bar(
            name=each.arm, value=each.removed, low=each.low, high=each.high,
            text=f"{effect_text(each)} ({each.num_tokens:,} tokens)",
        )
        for each in found.replays
    )  # fmt: skip
    a, b = subject.pair
    yield BarChart(
        key="arms", title="How much mismatch each replay removes", unit="share of mean d squared",
        note=f"The replay replaces {a}: at 1, the replay agrees with {b}; at 0, it changes nothing; below 0, "
        "the mismatch grows. Lines are 95% CIs over sequence groups.",
        sql=command(subject, "diagnose", "--json"), groups={"removed": shares}, x_label="share removed",
    )  # fmt: skip


def _corrections(subject: Subject) -> Iterator[Chart]:
    if subject.corrections is None:
        return
    keys = {"cut": "share_tokens_cut", "lowered": "share_tokens_truncated"}
    weighing = [row for row in subject.corrections.dicts() if row["correction"] not in _NOT_SHOWN]
    chosen = [row for row in weighing if any(row[key] for key in keys.values())]
    idle = [row["correction"] for row in weighing if row not in chosen]
    groups = {
        name: tuple(Bar(name=row["correction"], value=row[key] or 0.0, text=row["rule"]) for row in chosen)
        for name, key in keys.items()
    }
    yield BarChart(
        key="corrections", title="Share of tokens that each correction would cut", unit="share of tokens",
        note=f"Cut: weight 0. Lowered: weight clamped to its bound. Computed on {subject.part}. See docs/evidence/remedies.md for how much each correction helps.",
        sql=command(subject, "corrections", "--json"), groups=groups, x_label="share of tokens",
        remark=f"{len(idle)} of {len(weighing)} would have no effect: {', '.join(idle)}." if idle else "",
    )  # fmt: skip
