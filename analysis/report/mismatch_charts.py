"""How the mismatch lies over tokens, what it does to the loss, and what would remove it: one chart each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from ..breakdowns.breakdowns import Breakdowns
from ..diagnosis.text import effect_text
from ..rows import Rows
from . import chart
from .chart import Array, Chart, Density, Histogram, Line, Lines, Share, Shares
from .commands import command
from .subject import Subject

_NOT_SHOWN = ("none", "token-is", "sequence-is")
"""Corrections that cut and lower nothing."""

_RATIO = (
    "Natural logarithm of how much likelier a token is under the policy that is trained than under the one that sampled it "
    "(before), and of the ratio that the loss uses after its clipping (after)."
)


_GROUPS = {
    "d-by-": "Where the gap lies",
    "ratio-": "What the loss sees of it",
    "contribution-": "What the loss sees of it",
    "arms": "What would remove it",
    "corrections": "What would cut it",
}
"""How the key of a chart begins -> the heading that it stands under."""


def headings(charts: Iterable[Chart]) -> dict[str, str]:
    """Key of the first chart under each heading -> the heading."""
    found: dict[str, str] = {}
    for one in charts:
        heading = next((text for start, text in _GROUPS.items() if one.key.startswith(start)), "")
        if heading and heading not in found.values():
            found[one.key] = heading
    return found


def mismatch_charts(subject: Subject) -> list[Chart]:
    """The charts of one run; of what the trace does not hold there is none."""
    found: list[Chart] = []
    if subject.spread is not None:
        found += _spread_charts(subject, subject.spread)
    found += _objective_charts(subject)
    found += [one for one in (_arms(subject), _corrections(subject)) if one is not None]
    return found


def _spread_charts(subject: Subject, spread: Breakdowns) -> Iterator[Chart]:
    a, b = subject.pair
    yield Density(
        key="d-by-probability", title="d against the token's probability", unit="tokens",
        note=f"Each cell counts tokens. {_told(spread.envelope)}What lies far out at p near 1 is no rounding. The outermost rows "
        "hold everything beyond.",
        sql=spread.sql["density"], x_label=f"probability under {b}", y_label=f"d = {a} - {b}, nats",
        x_edges=spread.edges.probability, y_edges=spread.edges.d, counts=spread.whole.density,
        curves=_envelope(spread), by_step={step: shapes.density for step, shapes in spread.by_step.items()},
    )  # fmt: skip
    axes = (
        ("position", "Mean |d| by place in the response", "place of the token, from 1", spread.edges.position,
         "Flat for rounding. A step upwards at one place is a cache, a window or a rotary embedding that goes wrong there."),
        ("length", "Mean |d| by length of the response", "tokens of the response", spread.edges.length,
         "Whether long responses are worse token by token."),
        ("entropy", "Mean |d| by entropy", "entropy of the next-token distribution, nats", spread.edges.entropy,
         "A gap that grows with the entropy comes from uncertain tokens, as rounding does."),
    )  # fmt: skip
    for name, title, label, edges, note in axes:
        profile = getattr(spread.whole, name)
        if profile is not None:
            yield _profile(spread, name, title, label, np.asarray(edges), note)
    if spread.whole.ratios is not None:
        for sign in ("positive", "negative"):
            yield _ratios(spread, sign)


def _told(envelope: float | None) -> str:
    if envelope is None:
        return ""
    return (
        f"Rounding of logits moves d by at most a constant times 1 - p (arXiv 2512.23087): the lines are +-{envelope:.3g} (1 - p), "
        "within which 99 % of the tokens below p = 0.99 lie. "
    )


def _envelope(spread: Breakdowns) -> tuple[Line, ...]:
    if spread.envelope is None:
        return ()
    x = np.linspace(0.0, 1.0, 41)
    limit = float(spread.edges.d[-1])
    upper = spread.envelope * (1 - x)
    upper[upper > limit] = np.nan
    return Line(name="99 % within", x=x, y=upper), Line(name="99 % within", x=x, y=-upper)


def _profile(spread: Breakdowns, name: str, title: str, label: str, edges: Array, note: str) -> Lines:
    profile = getattr(spread.whole, name)
    start = edges[:-1] + (1 if name == "position" else 0)
    there = profile.num > 0
    return Lines(
        key=f"d-by-{name}", title=title, unit="nats", note=f"{note} rms counts large gaps more.", sql=spread.sql[name],
        lines=(Line(name="mean |d|", x=start[there], y=profile.mean_abs_d[there]), Line(name="rms d", x=start[there], y=profile.rms_d[there])),
        x_label=label, x_scale=chart.LINEAR if name == "entropy" else chart.LOG,
        by_step={
            step: (own.mean_abs_d[there], own.rms_d[there])
            for step, shapes in spread.by_step.items()
            if (own := getattr(shapes, name)) is not None
        },
    )  # fmt: skip


def _ratios(spread: Breakdowns, sign: str) -> Histogram:
    which = "above" if sign == "positive" else "below"

    def of(ratios: Mapping[tuple[str, str], Array]) -> dict[str, Array]:
        return {when: counts for (when, of_sign), counts in ratios.items() if of_sign == sign}

    assert spread.whole.ratios is not None
    assert spread.edges.ratio is not None
    return Histogram(
        key=f"ratio-{sign}", title=f"Ratio of tokens with an advantage {which} 0", unit="tokens",
        note=f"{_RATIO} The outermost bins hold everything beyond.", sql=spread.sql["ratios"],
        x_label="ln ratio, nats", edges=spread.edges.ratio, counts=of(spread.whole.ratios),
        by_step={step: of(shapes.ratios) for step, shapes in spread.by_step.items() if shapes.ratios is not None},
    )  # fmt: skip


def _objective_charts(subject: Subject) -> Iterator[Chart]:
    found = subject.objective
    if found is None or not len(found.steps):
        return
    column = _column_of(found.steps)
    steps = column("step")
    asked = command(subject, "objective", "--json")
    drift = [
        Line(name=name, x=steps, y=values)
        for name, key in (("mismatch", "var_d"), ("policy drift", "var_drift"))
        if np.isfinite(values := column(key)).any()
    ]
    if drift and any(np.nanmax(line.y, initial=0.0) > 0 for line in drift):
        positive = all((line.y[np.isfinite(line.y)] > 0).all() for line in drift)
        yield Lines(
            key="ratio-split", title="What the ratio is made of", unit="nats squared",
            note="Variance over tokens of the two parts of ln ratio: the mismatch d = train - rollout, and the policy's drift "
            "= current - train. Off-policy drift is wanted and clipped; mismatch is neither.", sql=asked,
            lines=tuple(drift), x_label="step", y_scale=chart.LOG if positive else chart.LINEAR,
        )  # fmt: skip
    bias = [
        Line(name=name, x=steps, y=values, is_side=key == "relative_abs_bias")
        for name, key in (("sum of b", "relative_bias"), ("sum of |b|", "relative_abs_bias"))
        if np.isfinite(values := column(key)).any()
    ]
    if bias:
        yield Lines(
            key="contribution-bias", title="What the mismatch adds to the objective", unit="share of sum |f|",
            note="b is the contribution of a token under the ratio that the loss uses, less that under the true one; both "
            "sums are over the sum of |f|, the size of the objective's terms. Above 0 the loss sees more objective than there "
            "is. Where the sum is small beside the sum of |b|, the errors cancel (arXiv 2605.14220).", sql=asked,
            lines=tuple(bias), x_label="step",
        )  # fmt: skip


def _column_of(rows: Rows) -> Callable[[str], Array]:
    columns = {name: place for place, name in enumerate(rows.columns)}

    def column(name: str) -> Array:
        if name not in columns:
            return np.full(len(rows), np.nan)
        return np.array([np.nan if row[columns[name]] is None else row[columns[name]] for row in rows.rows], float)

    return column


def _arms(subject: Subject) -> Shares | None:
    found = subject.diagnosis
    if found is None or not found.replays:
        return None
    shares = tuple(
        Share(name=each.arm, value=each.removed, low=each.low, high=each.high, text=f"{effect_text(each)} ({each.num_tokens:,} tokens)")
        for each in found.replays
    )  # fmt: skip
    a, b = subject.pair
    return Shares(
        key="arms", title="What each replay removes of the gap", unit="share of the gap's mean square",
        note=f"The replay takes the place of {a}: 1 means that it agrees with {b} then, 0 that it changes nothing, below 0 that "
        "it lies further away. Lines are 95 % intervals over groups of sequences.",
        sql=command(subject, "diagnose", "--json"), groups={"removed": shares}, x_label="share removed",
    )  # fmt: skip


def _corrections(subject: Subject) -> Shares | None:
    rows = subject.corrections
    if rows is None:
        return None
    keys = {"cut": "share_tokens_cut", "lowered": "share_tokens_truncated"}
    weighing = [row for row in rows.dicts() if row["correction"] not in _NOT_SHOWN]
    chosen = [row for row in weighing if any(row[key] for key in keys.values())]
    idle = [row["correction"] for row in weighing if row not in chosen]
    groups = {
        name: tuple(Share(name=row["correction"], value=row[key] or 0.0, text=row["rule"]) for row in chosen)
        for name, key in keys.items()
    }
    return Shares(
        key="corrections", title="What each correction would cut", unit="share of tokens",
        note=f"Cut: weight 0. Lowered: the weight is held at its bound. Of {subject.part}. How much it would help "
        "is another question: see docs/collapses.md.",
        sql=command(subject, "corrections", "--json"), groups=groups, x_label="share of tokens",
        remark=f"{len(idle)} of {len(weighing)} would cut and lower nothing: {', '.join(idle)}." if idle else "",
    )  # fmt: skip
