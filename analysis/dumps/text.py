"""Render the result of `tim-trace locate --from-dumps` as text."""

from __future__ import annotations

from ..main_columns import MAIN_COLUMNS
from ..rows import Rows, shown, to_text
from .compare import DumpComparison, TensorDifference, dumps_rows

_MOST_ROWS = 24
"""Maximum number of table rows shown on a terminal."""
_MOST_NAMES = 4
_LEFT_OUT = ("layer", "name_a", "name_b", "max_abs")
_SELDOM = ("forward", "num_different", "num_nonfinite_a", "num_nonfinite_b", "why")
"""Columns omitted from the table if empty or 0 in all rows."""


def dumps_text(found: DumpComparison, width: int | None = None, by: str = "operator", limit: int = _MOST_ROWS) -> str:
    """Render where two dumps start to differ: `limit` rows around the first difference."""
    found = shown(found)
    forwards = f"{found.num_forwards_a}" if found.num_forwards_a == found.num_forwards_b else (
        f"{found.num_forwards_a} in a and {found.num_forwards_b} in b, the first of one against the first of the other"
    )  # fmt: skip
    facts = [
        ("a", found.a),
        ("b", found.b),
        ("tensors", f"{len(found.tensors):,} compared, in the order of {_ORDERS.get(found.order, found.order)}"),
        ("forwards", forwards),
        (
            "tokens",
            "input_ids are equal" if found.tokens_checked else "not checked: input_ids are not in both dumps",
        ),
    ]
    if found.num_gradients:
        facts.append(("left out", f"{found.num_gradients:,} gradients and parameters"))
    facts += [
        (f"only in {side}", f"{len(names):,}: {_some(names)}")
        for side, names in (("a", found.only_a), ("b", found.only_b))
        if names
    ]
    facts += [("not compared", f"{each.place}: {each.reason}") for each in found.not_compared[:_MOST_NAMES]]
    if len(found.not_compared) > _MOST_NAMES:
        facts.append(("not compared", f"{len(found.not_compared) - _MOST_NAMES:,} more; --json has them all"))
    rows = _around(dumps_rows(found, by), found, limit)
    return "\n\n".join(
        [
            sentence(found),
            "\n".join(f"{name:<12}  {value}" for name, value in facts),
            to_text(rows.without((*_LEFT_OUT, *_empty(rows))), width, MAIN_COLUMNS["dumps"]),
        ]
    )


_ORDERS = {
    "layers": "layers and of a block's usual forward (neither dump records its order)",
    "dump_index of a": "a's dump_index", "dump_index of b": "b's dump_index", "dump.json of a": "a's dump.json",
    "dump.json of b": "b's dump.json",
}  # fmt: skip


def sentence(found: DumpComparison) -> str:
    """Return one or two sentences that state where the dumps start to differ."""
    first = found.first
    if first is None and not found.tensors:
        return "No tensor could be compared."
    if first is None:
        judged = (row for row in found.tensors if row.ratio is not None)
        top = max(judged, key=lambda row: row.ratio or 0.0, default=None)
        most = "" if top is None else f"; the largest difference is {top.ratio:.2g} of its bound, in {top.place}"
        return f"Only rounding: no tensor differs by more than its dtype explains{most}.{_integers(found)}"
    before = "nothing was compared before it" if found.before is None else (
        f"{found.before.place} before it is at {found.before.ratio or 0.0:.2g} of its bound"
    )  # fmt: skip
    where = f"{first.place}{_in_forward(found, first)}"
    if first.why == "nonfinite":
        return (
            f"The first tensor that is not finite is {where}: {first.num_nonfinite_a:,} values of a and "
            f"{first.num_nonfinite_b:,} of b."
        )
    if first.why == "differs":
        return f"The first difference is {where}: {first.num_different:,} values differ, from token {first.token} on."
    return (
        f"The first difference that rounding does not explain is {where}: {first.rms:.3g} of its size, {first.ratio:,.3g} times "
        f"the bound (largest at token {first.token}); {before}. Dumps do not show which side is wrong."
    )


def _integers(found: DumpComparison) -> str:
    """Return a sentence about integer tensors that differ. They are not judged, since rounding can change discrete choices
    such as the selected experts."""
    differ = [row for row in found.tensors if row.num_different]
    return (
        f" {len(differ):,} tensors of integers differ, first {differ[0].place}; they are not judged." if differ else ""
    )


def _in_forward(found: DumpComparison, first: TensorDifference) -> str:
    return f" (forward {first.forward})" if max(found.num_forwards_a, found.num_forwards_b) > 1 else ""


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")


def _empty(rows: Rows) -> list[str]:
    return [name for name in _SELDOM if not any(row[rows.columns.index(name)] for row in rows.rows)]


def _around(rows: Rows, found: DumpComparison, limit: int) -> Rows:
    """Return up to `limit` rows around the first difference; without a difference, the first rows."""
    if found.first is None or len(rows) <= limit:
        return Rows(rows.columns, rows.rows[:limit])
    key = (found.first.forward, found.first.place)
    columns = [rows.columns.index(name) for name in ("forward", "place")]
    at = next((n for n, row in enumerate(rows.rows) if tuple(row[c] for c in columns) == key), 0)
    start = max(min(at - limit // 2, len(rows) - limit), 0)
    return Rows(rows.columns, rows.rows[start : start + limit])
