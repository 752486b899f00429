"""Names of runs and metrics, which may hold anything, as text that matplotlib draws as it stands."""

from __future__ import annotations

import textwrap
from functools import cache

from matplotlib.font_manager import findfont, get_font


def plain(text: str, most: int = 60) -> str:
    """One line of text without formulas, cut in its middle to `most` characters.

    A character that the font lacks, or that cannot be seen, is written as its number; the CSV has it as it is.
    """
    return _without_formulas(_one_line(text, most))


def wrapped(text: str, width: int, most_lines: int = 3) -> str:
    """Text as plain() gives it, broken into at most `most_lines` lines of `width` characters."""
    lines = textwrap.wrap(_one_line(text, width * most_lines), width)
    return _without_formulas("\n".join(lines[:most_lines]))


def _one_line(text: str, most: int) -> str:
    shown = "".join(_shown(character) for character in " ".join(text.split()))
    if len(shown) <= most:
        return shown
    head = (most - 2) // 2
    return f"{shown[:head]}...{shown[len(shown) - (most - 3 - head) :]}"


def _without_formulas(text: str) -> str:
    return text.replace("$", r"\$")  # what stands between two of them would be one


def _shown(character: str) -> str:
    number = ord(character)
    if number in _glyphs() and character.isprintable():
        return character
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())
