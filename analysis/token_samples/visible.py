"""Make model output safe to display: invisible, reordering and control characters are replaced by their code points."""

from __future__ import annotations

import unicodedata

SPACE, TAB, RETURN, NEWLINE = "\u00b7", "\u21e5", "\u240d", "\u21b5\n"
"""Marks that replace white space; the mark for a newline is followed by the line break."""

MOST_MARKS = 4
"""Maximum number of consecutive combining marks; more marks would overlap other lines."""

_MARKS = {" ": SPACE, "\t": TAB, "\r": RETURN}
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp"}
"""Unicode categories: control, format (bidi marks, zero-width), surrogate, private, unassigned; spaces and separators."""
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0")
"""Blank characters of other categories: joiners, fillers, undrawn vowels, selectors."""


def visible(text: str) -> str:
    """Return a token's text with every character visible; line breaks are kept.

    Spaces, tabs and newlines become marks. Control, bidi, zero-width, private, unassigned and surrogate code points,
    odd spaces, variation selectors, and combining marks without a preceding letter become U+XXXX in angle brackets.
    Idempotent: visible(visible(x)) == visible(x). Does not escape HTML.

    >>> visible("a b")
    'a\u00b7b'
    >>> ascii(visible("\u202e"))
    "'\\\\u27e8U+202E\\\\u27e9'"
    """
    if text.isascii() and text.isprintable():
        return text.replace(" ", SPACE)
    parts: list[str] = []
    marks = MOST_MARKS  # a combining mark at the start has no base letter
    before = ""
    for char in text:
        category = unicodedata.category(char)
        if category[0] == "M" and not _is_blank(char) and marks < MOST_MARKS:
            marks += 1
            parts.append(char)
        elif category[0] == "M" or category in _HIDDEN or _is_blank(char):
            marks = MOST_MARKS
            parts.append("\n" if char == "\n" and before == NEWLINE[0] else _shown(char))
        else:
            marks = 0
            parts.append(char)
        before = char
    return "".join(parts)


def named(code: int) -> str:
    """Return a code point as U+XXXX in angle brackets.

    >>> ascii(named(0x200B))
    "'\\\\u27e8U+200B\\\\u27e9'"
    """
    return f"\u27e8U+{code:04X}\u27e9"


def _shown(char: str) -> str:
    if char == "\n":
        return NEWLINE
    return _MARKS.get(char) or named(ord(char))


def _is_blank(char: str) -> bool:
    return char in _BLANK or "\ufe00" <= char <= "\ufe0f" or "\U000e0100" <= char <= "\U000e01ef"
