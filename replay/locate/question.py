"""The id of a question to `locate`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ...schemas.checksums import short_hash
from ...schemas.contract import canonical_json
from ...tracer.located.results import LocateQuestion
from ..arms import Arm, parse_arm


def question_id(question: LocateQuestion) -> str:
    """Return the XXH3-64 of a question's canonical JSON, 16 hexadecimal digits; arms count by their changes, not their spelling."""
    asked: dict[str, Any] = asdict(question) | {"arm": _changes(question.arm), "against": _changes(question.against)}
    if question.operators is None:  # questions of earlier releases had none
        del asked["operators"]
    return short_hash(canonical_json(asked).encode())


def _changes(text: str | None) -> dict[str, Any]:
    """Return what an arm changes, without its name: settings of later releases change no id."""
    recorded = asdict(Arm())
    given = asdict(Arm() if text is None else parse_arm(text))
    return {name: value for name, value in given.items() if name != "name" and value != recorded[name]}
