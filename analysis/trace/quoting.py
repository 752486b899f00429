"""Texts and pass names as literals of SQL."""

from __future__ import annotations


def quoted(text: str) -> str:
    """Return a text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def quoted_pair(pair: tuple[str, str]) -> str:
    """Return both passes of a pair as arguments of a macro."""
    return f"{quoted(pair[0])}, {quoted(pair[1])}"
