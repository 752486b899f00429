"""Where the numbers of a report are from: the contract of each pass side by side, versions and hashes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...schemas.errors import option
from ...schemas.passes import REPLAY_PREFIX
from ...schemas.steps import ALL_STEPS
from ..trace.contracts import field_text, flat_contract
from .subject import Subject

_SHOWN = 12
"""Digits of a hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One thing that decides numbers, under every pass."""

    name: str
    """Its path in the contract, as model.attention."""
    values: tuple[str, ...]
    """Of each pass; an empty text where its contract does not say."""
    differs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What a run was recorded with."""

    facts: tuple[tuple[str, str], ...]
    """Of the trace, by name."""
    passes: tuple[str, ...]
    """The columns of `fields`: a pass, with a number where it has several contracts."""
    hashes: tuple[str, ...]
    """Of each column's contract: the first digits of its SHA-256."""
    fields: tuple[Field, ...]
    """Those that differ first, then the others, each by name."""
    settings: tuple[tuple[str, str], ...]
    """Hyperparameters."""


def provenance(subject: Subject) -> Provenance:
    """Put the contracts of the recorded passes side by side; replays name what they change by themselves."""
    columns = _columns(subject)
    contracts = [flat_contract(contract) for _, _, contract in columns]
    names = sorted({name for contract in contracts for name in contract})
    fields = [_field(name, contracts) for name in names]
    return Provenance(
        facts=_facts(subject),
        passes=tuple(name for name, _, _ in columns),
        hashes=tuple(digest[:_SHOWN] for _, digest, _ in columns),
        fields=tuple(sorted(fields, key=lambda field: not field.differs)),
        settings=tuple((name, field_text(value)) for name, value in sorted(subject.settings.items())),
    )


def _columns(subject: Subject) -> list[tuple[str, str, Mapping[str, Any]]]:
    """(pass, hash, contract) of what was recorded, the pair first."""
    rows = [row for row in subject.contracts if not row["pass"].startswith(REPLAY_PREFIX) and row["contract_json"]]
    order = {name: place for place, name in enumerate(subject.pair)}
    rows = sorted(rows, key=lambda row: (order.get(row["pass"], len(order)), row["pass"], row["contract"]))
    several = {row["pass"] for row in rows if sum(other["pass"] == row["pass"] for other in rows) > 1}
    seen: dict[str, int] = {}
    found = []
    for row in rows:
        seen[row["pass"]] = seen.get(row["pass"], 0) + 1
        name = f"{row['pass']} {seen[row['pass']]}" if row["pass"] in several else row["pass"]
        found.append((name, str(row["contract"]), json.loads(row["contract_json"])))
    return found


def _field(name: str, contracts: list[dict[str, str]]) -> Field:
    values = tuple(contract.get(name, "") for contract in contracts)
    said = {value for value in values if value}
    return Field(name=name, values=values, differs=len(said) > 1)


def _facts(subject: Subject) -> tuple[tuple[str, str], ...]:
    held = subject.info
    facts = {
        "trace": held.path,
        "steps": "" if subject.asked_steps == ALL_STEPS else f"{subject.asked_steps}, as {option('steps', subject.asked_steps)}",
        "run id": held.run_id,
        "recorded": f"{held.created_at[:19]}Z with tim-trace {held.created_by} ({held.source})",
        "state": held.state if held.exit_code is None else f"{held.state}, the command ended with {held.exit_code}",
        "command": " ".join(held.command),
        "model": ", ".join(
            part
            for part in (held.model or "", f"{held.num_parameters:,} parameters" if held.num_parameters else "", ", ".join(held.model_dtypes))
            if part
        ),
        "tokenizer": held.tokenizer or "",
        "versions": ", ".join(f"{name} {version}" for name, version in held.versions.items()),
        "format": f"version {held.format_version}",
    }  # fmt: skip
    return tuple((name, value) for name, value in facts.items() if value)
