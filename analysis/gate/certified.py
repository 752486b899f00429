"""Check that a run has the settings of a certificate from `certify`, and that its batches are within the bounds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ...schemas.documents import Contract, contract_hash, differences
from ...schemas.errors import InvalidOption
from ..trace.database import Database
from .condition import CERTIFICATE, FAILED, PASSED, Verdict

_SHOWN = 3
_UNKNOWN = "batch sizes were not recorded"
_LARGEST = """
SELECT (SELECT max(n) FROM (SELECT count(*) AS n FROM scores WHERE "pass" = $name AND forward_id IS NOT NULL
        GROUP BY step, writer, forward_id)),
    max(num_prompt_tokens), max(num_response_tokens) FROM sequences
"""


class _Settings(msgspec.Struct):
    verdict: str
    max_batch: int
    max_length: int
    settings: tuple[Contract, Contract]
    settings_hash: str


def certified(database: Database, file: str | os.PathLike[str]) -> Verdict:
    """Return `passed` if a pass of the run has the certified settings, and no batch or sequence beyond the bounds.

    The verdict's `value` is the number of deviations. Raises InvalidOption if `file` is not a certificate.
    """
    found = _read(file)
    contracts = database.connection.execute('SELECT "pass", contract_json FROM passes').fetchall()
    own = {name: json.loads(text) for name, text in contracts if text}
    compared = {name: list(differences(found.settings[0], contract)) for name, contract in own.items()}
    beyond = {name: list(_beyond(database, name, found)) for name in own}
    closest = min(
        own, key=lambda name: (len(compared[name]), _UNKNOWN in beyond[name], len(beyond[name])), default=None
    )
    if closest is None:
        deviations = ["the run has no contract to compare"]
    else:
        changes = (each.replace("recorded", "certified") for each in compared[closest])
        deviations = [f"pass {closest}: {each}" for each in (*changes, *beyond[closest])]
    listed = "; ".join(deviations[:_SHOWN]) + (
        f"; and {len(deviations) - _SHOWN} more" if len(deviations) > _SHOWN else ""
    )
    how = listed or (
        f"pass {closest} has the certified settings, at most {found.max_batch} rows per batch and at most "
        f"{found.max_length} tokens per prompt and response"
    )
    return Verdict(
        condition=CERTIFICATE, metric=CERTIFICATE, value=float(len(deviations)), low=None, high=None, bound=None,
        verdict=FAILED if deviations else PASSED, fails=bool(deviations), steps_beyond=None, worst_step=None, how=how,
    )  # fmt: skip


def _read(file: str | os.PathLike[str]) -> _Settings:
    try:
        found = msgspec.json.decode(Path(file).read_bytes(), type=_Settings)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidOption(
            f"{file} cannot be read as a certificate ({error}); write one with tim-trace certify", option="certificate"
        ) from error
    if (
        found.verdict != "certified"
        or contract_hash({"a": found.settings[0], "b": found.settings[1]}) != found.settings_hash
    ):
        raise InvalidOption(
            f"{file} is not a certificate, or its settings were changed; write one with tim-trace certify",
            option="certificate",
        )
    return found


def _beyond(database: Database, name: str, found: _Settings) -> Iterator[str]:
    (sizes,) = database.connection.execute(_LARGEST, {"name": name}).fetchall()
    bounds: tuple[tuple[str, Any, int], ...] = (
        ("rows per batch", sizes[0], found.max_batch), ("tokens per prompt", sizes[1], found.max_length),
        ("tokens per response", sizes[2], found.max_length),
    )  # fmt: skip
    if sizes[0] is None:
        yield _UNKNOWN
    for what, largest, most in bounds:
        if largest is not None and largest > most:
            yield f"{largest} {what}, certified up to {most}"
