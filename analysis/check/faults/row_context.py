"""Rows whose values depend on their neighbours: padding that is attended to, packed rows that see each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...advice import Advice
from .. import commands
from ..finding import Fault, Finding, Number
from ..hypothesis import Hypothesis, located
from ..likelihood import explained
from ..pair_data import PairData
from ..structure import MAX_FALL, MIN_SCORE, along_movement, error_structure, exact_rows, fades, grows_inside, repeats
from ..where import Where, where_text
from .weights import CLEAR_ALONG, some_behind

_PADDING = ("pad_left", "shorter_prompt", "shorter_total", "prompt_length")
_PACKING = ("forward_row", "not_first_of")

ROW_CONTEXT = Fault(
    code="row_context",
    title="rows depend on their neighbours: padding is attended to, or packed rows see each other",
    broken="computation",
    evidence={
        "rows_run_together": "{num_sequences:,} of {of_sequences:,} sequences, {where}, have {ratio:.3g} times the mismatch of "
        "the others (rms {effect:.2g} vs {rms_elsewhere:.2g} nats), from the first step on",
        "fades": "the mismatch decreases along the response, in its last third to {left:.2g} times that in the first "
        "({score:.1f} standard errors), from the first step on: the two sides read different prompts, or attend to "
        "them differently",
        "some_rows_exact": "{exact:.0%} of the sequences are at the level of rounding and the logits of the others are "
        "off by {level:.2g} nats, from the first step on: padding and packing differ by row, weights do "
        "not{repeat_text}",
    },
    words={
        "rows_run_together": lambda n: {"where": where_text(n)},
        "some_rows_exact": lambda n: {
            "repeat_text": f"; {n['unsteady']} gives the same prefix different values in different rows"
            if n["unsteady"]
            else ""
        },
    },
    causes={
        "prompt": "the two sides read different prompts (BOS, template, truncation, a wrong cache), or attend to them "
        "differently",
        "turns": "later turns have a different context: the template drops or rewrites earlier turns",
        "padding": "padding is attended to or counted in positions: rows with padding are off",
        "packing": "packed rows see each other: only the first row of each pack is right",
        "rows": "some sequences are off and the others are not: the cause may be their prompt, their padding or packing, or the process that computed them",
    },
)


def find_row_context(data: PairData, places: Sequence[Where]) -> list[Hypothesis]:
    """Detect that rows with padding, or all but the first of a pack, are off."""
    found = []
    for place in places:
        cause = _cause(data, place)
        if cause is None and place.feature in ("position", "total_position") and place.kind == "before":
            # If the first tokens are wrong from the first step on, their context is wrong.
            cause = "prompt" if place.values[0] >= 2 and grows_inside(data, place.inside) < 2.5 else None
        if cause is None or place.kind == "one_of":
            continue
        finding = ROW_CONTEXT.finding(
            data, "rows_run_together", place.inside, weight=explained(data, place.inside), next=_replay(data, is_padding=cause == "padding"),
            numbers={
                **place.numbers, **data.names, "cause": cause,
                "ratio": place.ratio, "num_sequences": len(np.unique(data.seq[place.inside])),
                "of_sequences": len(np.unique(data.seq)), "rms_elsewhere": data.rms(~place.inside),
            },
        )  # fmt: skip
        found.append(located(data, finding, place.inside, 3.0))
    return found


def _cause(data: PairData, place: Where) -> str | None:
    if place.feature == "later_turn":
        return "turns"
    if place.feature == "prompt_length" and place.kind == "from":
        return "prompt"
    if place.feature.startswith(_PADDING):
        return "padding"
    # The recording order alone does not show which rows were packed together.
    is_recorded = bool(np.isfinite([*data.sample.a.forward_row, *data.sample.b.forward_row]).any())
    return None if not place.feature.startswith(_PACKING) else "packing" if is_recorded else "rows"


def find_fading(data: PairData) -> list[Finding]:
    """Detect that the mismatch is largest at the first tokens and fades along the response."""
    fall, score = fades(data)
    if fall < MAX_FALL or score < MIN_SCORE:
        return []
    numbers: dict[str, Number] = {**data.names, "cause": "prompt", "left": float(np.exp(-fall)), "score": score}
    return [ROW_CONTEXT.finding(data, "fades", weight=0.7, next=commands.query(data, "by-position"), numbers=numbers)]


def find_exact_rows(data: PairData) -> list[Hypothesis]:
    """Detect that some rows are exact and others are not, from the first step on, although nothing recorded
    distinguishes them.
    """
    exact, rows = exact_rows(data)
    inside = np.isin(data.seq, rows)
    if not 0.05 < exact < 0.99 or error_structure(data).persistence < 0.2 or grows_inside(data, inside) > 5:
        return []
    twins = repeats(data)
    unsteady = "a" if twins.a > 3 * twins.b and twins.a > twins.d / 4 else "b" if twins.b > 3 * twins.a else ""
    # Cost of choosing m of n rows.
    num = len(np.unique(data.seq))
    cost = len(rows) * (np.log(num / max(len(rows), 1)) + 1)
    if (abs(along_movement(data)) > CLEAR_ALONG and not unsteady) or _begins_later(data, inside):
        return [located(data, some_behind(data, exact, inside), inside, cost)]
    if (fading := find_fading(data.within(inside))) and not unsteady:
        return [located(data, fading[0], inside, cost)]
    finding = ROW_CONTEXT.finding(
        data, "some_rows_exact", inside, next=_replay(data, is_padding=False),
        numbers={
            **data.names, "cause": "rows", "exact": exact, "level": float(np.median(np.abs(data.d[inside]) / data.scale[inside])),
            "unsteady": data.names[unsteady] if unsteady else None,
        },
    )  # fmt: skip
    return [located(data, finding, inside, cost)]


def _begins_later(data: PairData, inside: np.ndarray) -> bool:
    """Return True if no row of the first step contains tokens `inside`, [K] bool, although more than four would be
    expected to if they were spread evenly over the steps.
    """
    first = data.sample.steps[data.seq] == data.sample.steps[data.seq].min()
    rows, off = np.unique(data.seq[first]), np.unique(data.seq[inside])
    expected = len(rows) * len(off) / max(len(np.unique(data.seq)), 1)
    return expected > 4 and not np.isin(rows, off).any()


def _replay(data: PairData, is_padding: bool) -> Advice:
    arms = "--arm padding=left --arm padding=right" if is_padding else "--arm padding=packed --arm padding=right"
    return commands.arms(data, arms)
