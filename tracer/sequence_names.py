"""The names that a writer's sequences have had: each comes once a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..schemas.errors import InvalidRecord


@dataclass(slots=True, kw_only=True)
class SequenceNames:
    """Names of the sequences of one split, by step."""

    step: int | None = None
    """The newest step; None before the first."""
    known: dict[int, set[str]] = field(default_factory=dict)
    count: int = 0
    """Sequences so far."""

    def refuse_repeated(self, step: int, names: list[str]) -> None:
        """Raise InvalidRecord for a name that comes twice, before any of them counts as known."""
        known, seen = self.known.get(step, set[str]()), set[str]()
        if len(set(names)) == len(names) and known.isdisjoint(names):
            return
        for name in names:
            if name in known or name in seen:
                raise InvalidRecord(
                    f"step {step}, sequence {name!r}: comes a second time; (step, seq_id) names one sequence"
                )
            seen.add(name)

    def add(self, step: int, names: list[str], *, ordered: bool) -> set[str]:
        """Note names of a step, and return all that are known of it; `ordered` steps do not come again later."""
        if ordered and step != self.step:
            self.known = {}
        self.refuse_repeated(step, names)
        known = self.known.setdefault(step, set())
        known.update(names)
        self.step = step
        self.count += len(names)
        return known
