from __future__ import annotations

import re
from collections.abc import Sequence, Set
from difflib import get_close_matches

from .errors import InvalidRecord
from .layout import PASS_NAME

ROLLOUT, TRAIN, CURRENT, REFERENCE = "rollout", "train", "current", "reference"
STANDARD = (ROLLOUT, TRAIN, CURRENT, REFERENCE)
LOGPROBS = "_logprobs"
"""Suffix for logprob columns in an import file, e.g. `train_logprobs`."""
REPLAY_PREFIX = "replay/"

_NAME = re.compile(PASS_NAME)


def standard_first(name: str) -> tuple[int, str]:
    """Sort key for pass names: the standard passes in the order of STANDARD, then the others by name."""
    return (STANDARD.index(name) if name in STANDARD else len(STANDARD)), name


def check_pass(name: str, declared: Set[str] = frozenset()) -> str:
    if not isinstance(name, str):
        raise InvalidRecord(f"pass {name!r} is not a string. Use one of {', '.join(STANDARD)}")
    if name in STANDARD or name in declared or (name.startswith(REPLAY_PREFIX) and _NAME.fullmatch(name)):
        return name
    near = get_close_matches(name.lower(), [*STANDARD, *declared], 1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    known = ", ".join([*STANDARD, "replay/<arm>", *sorted(declared - set(STANDARD))])
    raise InvalidRecord(
        f"pass {name!r} is unknown{hint} Use one of {known}, or declare it first with add_contract({name!r}, {{...}})"
    )


def check_pass_name(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRecord(f"pass {name!r}: use letters, digits and _ . + = -, with / between parts, e.g. replay/fp16")
    return name


def first_pair(names: Sequence[str]) -> str | None:
    """Return the pair of passes to compare by default, or None if there are fewer than two passes.

    With a rollout pass, the pair is train:rollout, or NAME:rollout with the first other pass if the train pass is
    missing. Without a rollout pass, the pair is current:train if both exist, else the first two passes.
    """
    if len(names) < 2:
        return None
    if ROLLOUT not in names:
        return f"{CURRENT}:{TRAIN}" if {CURRENT, TRAIN} <= {*names} else f"{names[0]}:{names[1]}"
    other = TRAIN if TRAIN in names else next(name for name in names if name != ROLLOUT)
    return f"{other}:{ROLLOUT}"
