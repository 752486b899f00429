"""Finished parts of an interrupted `locate`, from which the same question resumes.

Each sequence and patch has a document next to the results, `locate/<id>-unfinished-*.json`, written atomically. They
are valid if `locate/<id>-unfinished.json` has the current weights, sequences, versions and machine.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ... import __version__
from ...schemas.checksums import short_hash
from ...schemas.contract import canonical_json
from ...schemas.documents import read_document, to_document
from ...schemas.errors import DamagedTrace, TimTraceError, tell_damage
from ...schemas.layout import LOCATE
from ...tracer.located.result_files import UNFINISHED, unfinished_names
from ...tracer.located.results import LocateQuestion, Patch
from ...tracer.store import Store, first_line
from ...tracer.whole_file import check_inside, write_part
from ..arms import Arm, parse_arm
from .sequence import JudgedSequence

_WHAT = "a finished part of an interrupted locate"

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Surroundings:
    """Everything that affects the bits of the parts."""

    digest: str
    """Digest of everything except `tapped_bytes`."""
    tapped_bytes: int
    """Memory for operator values, bytes, which decides which sequences run together."""

    @property
    def id(self) -> str:
        """Id stored in every part, so that parts made under other conditions are ignored."""
        return short_hash(canonical_json(asdict(self)).encode())


class Unfinished:
    """Stored finished parts of one question. If storing a part fails, the work continues without it."""

    def __init__(self, store: Store, question: LocateQuestion):
        """The question's step is set by `begin`."""
        self._store, self._question = store, question
        self._surroundings: _Surroundings | None = None
        self._writes = store.is_local

    def begin(self, step: int, deciding: dict[str, Any], tapped_bytes: int, most_bytes: int) -> int:
        """Set the conditions, and remove parts made under other ones.

        Return the memory for operator values, bytes: the same as before the interruption, up to `most_bytes`, else
        `tapped_bytes`.
        """
        self._question = replace(self._question, step=step)
        digest = short_hash(canonical_json(deciding | {"made_by": __version__}).encode())
        before = self._read(self._name(), _Surroundings)
        if before is not None and before.digest == digest and before.tapped_bytes <= most_bytes:
            self._surroundings = before
            return before.tapped_bytes
        self.remove()
        self._surroundings = _Surroundings(digest=digest, tapped_bytes=tapped_bytes)
        self._write(self._name(), asdict(self._surroundings))
        return tapped_bytes

    def sequence(self, number: int, seq_id: str) -> JudgedSequence | None:
        """Return a finished sequence; None if it is not finished."""
        found = self._part(f"sequence-{number}", JudgedSequence)
        return found if found is not None and found.seq_id == seq_id else None

    def add_sequence(self, number: int, found: JudgedSequence) -> None:
        """Store a finished sequence."""
        self._add(f"sequence-{number}", found)

    def patch(self, taker: str, number: int) -> Patch | None:
        """Return a finished patch; None if it is not finished."""
        return self._part(f"patch-{taker}-{number}", Patch)

    def add_patch(self, taker: str, number: int, found: Patch) -> None:
        """Store a finished patch."""
        self._add(f"patch-{taker}-{number}", found)

    def remove(self) -> None:
        """Remove all parts of the question."""
        root = Path(self._store.root)
        with suppress(OSError):  # e.g. if nothing could be written
            for name in unfinished_names(self._store, question_id(self._question)) if self._store.is_local else ():
                check_inside(root, name)
                (root / name).unlink(missing_ok=True)

    def _name(self, part: str = "") -> str:
        return f"{LOCATE}/{question_id(self._question)}{UNFINISHED}{part and '-'}{part}.json"

    def _part(self, part: str, kind: type[Part]) -> Part | None:
        return self._read(self._name(part), kind, is_part=True)

    def _read(self, relative: str, kind: type[Part], *, is_part: bool = False) -> Part | None:
        """Read a document made under these conditions; warn about a damaged one, whose part is computed again."""
        where = self._store.shown(relative)
        try:
            values = read_document(self._store.read_json(relative), where, _WHAT, needs_checksum=True)
            if is_part and (self._surroundings is None or values.pop("surroundings", None) != self._surroundings.id):
                return None
            # JSON has no NaN or infinities; they are stored as strings.
            return msgspec.convert(values, kind, strict=False)
        except FileNotFoundError:
            return None
        except (TimTraceError, OSError, msgspec.ValidationError) as error:
            told = first_line(error)
            told = (
                told.removesuffix("; restore it from a copy") if isinstance(error, DamagedTrace) else f"{where}: {told}"
            )
            tell_damage([f"{told}; that part is located again"])
            return None

    def _add(self, part: str, found: Any) -> None:
        assert self._surroundings is not None
        self._write(self._name(part), asdict(found) | {"surroundings": self._surroundings.id})

    def _write(self, relative: str, values: dict[str, Any]) -> None:
        if not self._writes:
            return
        try:
            write_part(Path(self._store.root), relative, to_document(values).encode())
        except OSError:  # the end reports that the result cannot be stored either
            self._writes = False


def question_id(question: LocateQuestion) -> str:
    """Return the XXH3-64 hash of a question's canonical JSON, 16 hexadecimal digits.

    An arm enters the hash with its changes, not with its name.
    """
    asked: dict[str, Any] = asdict(question) | {"arm": _changes(question.arm), "against": _changes(question.against)}
    if question.operators is None:  # questions of earlier releases had none
        del asked["operators"]
    return short_hash(canonical_json(asked).encode())


def _changes(text: str | None) -> dict[str, Any]:
    """Return an arm's changes without its name, so that options added in later releases change no id."""
    recorded = asdict(Arm())
    given = asdict(Arm() if text is None else parse_arm(text))
    return {name: value for name, value in given.items() if name != "name" and value != recorded[name]}
