"""Check that a run matches a certificate from `certify`: the settings, and the bounds on batches and sequences."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...replay.certify.results import Certificate, hash_of
from ...schemas.documents import differences
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


def certified(database: Database, file: str | os.PathLike[str]) -> Verdict:
    """Return `passed` if a pass of the run has the certified settings, and no batch or sequence exceeds the limits.

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
    more = [f"and {len(deviations) - _SHOWN} more"] if len(deviations) > _SHOWN else []
    how = "; ".join(deviations[:_SHOWN] + more) or (
        f"pass {closest} has the certified settings, at most {found.max_batch} rows per batch and at most "
        f"{found.max_length} tokens in prompt and response together"
    )
    return Verdict(
        condition=CERTIFICATE, metric=CERTIFICATE, value=float(len(deviations)), low=None, high=None, bound=None,
        verdict=FAILED if deviations else PASSED, fails=bool(deviations), steps_beyond=None, worst_step=None, how=how,
    )  # fmt: skip


def _read(file: str | os.PathLike[str]) -> Certificate:
    try:
        found = msgspec.json.decode(Path(file).read_bytes(), type=Certificate)
        if found.is_certified and found.settings_hash == hash_of(found.settings):
            return found
        problem = "is not a certificate, or its settings were changed"
    except (OSError, msgspec.MsgspecError) as error:
        problem = f"cannot be read as a certificate ({error})"
    raise InvalidOption(f"{file} {problem}; write one with tim-trace certify", option="certificate")


def _beyond(database: Database, name: str, found: Certificate) -> Iterator[str]:
    (largest,) = database.connection.execute(_LARGEST, {"name": name}).fetchall()
    if largest[0] is None:
        yield _UNKNOWN
    kinds = ("rows per batch", "tokens per prompt", "tokens per response")
    for what, num, most in zip(kinds, largest, (found.max_batch, found.max_length, found.max_length), strict=True):
        if num is not None and num > most:
            yield f"{num} {what}, certified up to {most}"
