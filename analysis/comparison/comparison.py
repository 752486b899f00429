from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...schemas.layout import HYPERPARAMETER
from ...schemas.passes import REPLAY_PREFIX
from ...schemas.results import Result
from ...schemas.steps import ALL_STEPS
from ...schemas.tables import SAMPLING
from ..statement import Measured, Statement
from ..trace.columns import field_text, flat_contract
from ..trace.database import Database

KINDS = (
    "steps", "setting", "sampling", "contract", "prompts", "responses", "columns", "logprobs", "rewards", "advantages", "lag", "series",
)  # fmt: skip
"""Kinds of difference, in causal order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference:
    kind: str
    name: str
    """Name of the setting, contract field (`pass.field`), column, pass or series, else empty."""
    step: int
    """First step where the runs differ. In a series, differences within noise do not count."""
    a: Measured | None
    """Value in run A at `step` (for a series, the median from `step` to the next change), or None if missing."""
    b: Measured | None
    size_in_sd: float | None = None
    """Mean difference of a series, divided by its standard deviation per step. None for other kinds of difference, or
    if the difference is constant."""
    values: Mapping[str, Measured] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Result):
    """Differences between two runs, earliest first."""

    _text = "tim_trace.analysis.comparison.text:comparison_text"

    a: str
    b: str
    pair: str
    """The two passes whose mismatch is compared, as a:b."""
    steps: str = ALL_STEPS
    num_steps: int
    """Number of steps with sequences in both runs or, if there are none, with series values in both."""
    differences: tuple[RunDifference, ...]
    """Sorted by first step, then by kind, with the largest differences between series first."""
    same: tuple[str, ...]
    """Series that are bitwise equal at every step."""
    within_scatter: tuple[str, ...]
    """Series that differ only by noise, or that have too few common steps to tell."""
    note_codes: tuple[Statement, ...] = ()
    """Limits of the comparison (codes in text.NOTES)."""

    @property
    def first(self) -> RunDifference | None:
        """Earliest difference, or None if the runs do not differ."""
        return self.differences[0] if self.differences else None


_SETTINGS = """
SELECT name, step, value, text FROM metrics WHERE starts_with(name, $prefix) ORDER BY step, logged_at
"""

_SAMPLING = f"""
SELECT step, {", ".join(f"list_sort(list(DISTINCT {name})) AS {name}" for name in SAMPLING)}
FROM sequences GROUP BY step ORDER BY step
"""

_CONTRACTS = """
SELECT step, "pass", mode(contract) AS contract FROM scores
WHERE contract IS NOT NULL AND iteration = 0 GROUP BY step, "pass" ORDER BY step
"""

_Timeline = dict[str, dict[int, float | str]]
"""Values by name and step. Each value applies until the next listed step."""


def stated_differences(a: Database, b: Database, steps: Sequence[int]) -> Iterator[RunDifference]:
    yield from _setting_differences(a, b)
    yield from _sampling_differences(a, b, steps)
    yield from _contract_differences(a, b, steps)


def _setting_differences(a: Database, b: Database) -> Iterator[RunDifference]:
    of_a, of_b = _settings(a), _settings(b)
    for name in sorted(of_a.keys() | of_b.keys()):
        changes = sorted(of_a.get(name, {}).keys() | of_b.get(name, {}).keys())
        for step in changes:
            one, two = (_held(timeline.get(name, {}), step) for timeline in (of_a, of_b))
            if one != two:
                yield RunDifference(kind="setting", name=name, step=step, a=one, b=two)
                break


def _settings(database: Database) -> _Timeline:
    found: _Timeline = {}
    for name, step, value, text in database.connection.execute(_SETTINGS, {"prefix": HYPERPARAMETER}).fetchall():
        found.setdefault(name.removeprefix(HYPERPARAMETER), {})[step] = text if value is None else value
    return found


def _held(values: Mapping[int, float | str], step: int) -> float | str | None:
    known = [start for start in values if start <= step]
    return values[max(known)] if known else None


def _sampling_differences(a: Database, b: Database, steps: Sequence[int]) -> Iterator[RunDifference]:
    of_a, of_b = ({row["step"]: row for row in database.ask(_SAMPLING).dicts()} for database in (a, b))
    for name in SAMPLING:
        for step in steps:
            one, two = of_a[step][name], of_b[step][name]
            if one != two:
                yield RunDifference(kind="sampling", name=name, step=step, a=_listed(one), b=_listed(two))
                break


def _listed(values: list[float] | None) -> Measured | None:
    if not values:
        return None
    return values[0] if len(values) == 1 else ", ".join(f"{value:g}" for value in values)


def _contract_differences(a: Database, b: Database, steps: Sequence[int]) -> Iterator[RunDifference]:
    of_a, of_b = _contracts(a), _contracts(b)
    names = sorted({name for found in (of_a, of_b) for at_step in found.values() for name in at_step})
    for name in names:
        seen: set[str] = set()
        for step in steps:
            one, two = of_a.get(step, {}).get(name), of_b.get(step, {}).get(name)
            if one == two or ((one is None or two is None) and "" in seen):
                continue
            if one is None or two is None:
                seen.add("")
                yield RunDifference(kind="contract", name=name, step=step, a=one and "recorded", b=two and "recorded")
                continue
            fields_a, fields_b = (flat_contract(json.loads(text)) for text in (one, two))
            for path in sorted((fields_a.keys() | fields_b.keys()) - seen):
                if fields_a.get(path) != fields_b.get(path):
                    seen.add(path)
                    yield RunDifference(
                        kind="contract", name=f"{name}.{path}", step=step, a=fields_a.get(path), b=fields_b.get(path)
                    )


def _contracts(database: Database) -> dict[int, dict[str, str]]:
    texts = dict(database.connection.execute("SELECT contract, contract_json FROM passes").fetchall())
    found: dict[int, dict[str, str]] = {}
    for step, name, contract in database.connection.execute(_CONTRACTS).fetchall():
        if not name.startswith(REPLAY_PREFIX):
            found.setdefault(step, {})[name] = texts.get(contract) or field_text({"contract": contract})
    return found
