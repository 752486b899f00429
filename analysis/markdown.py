"""Markdown for pages that people paste into issues and chats."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .rows import printable


def escaped(text: str) -> str:
    """Return text as one line that GitHub shows literally, without markup and without links to people or issues.

    >>> escaped("a|b <i> max_abs_d @me")
    'a\\\\|b \\\\<i> max_abs_d @\\u2060me'
    """
    line = re.sub(
        r"[\\`*\[\]<|~$&]|\b_+\B|\B_+\b", lambda found: "\\" + "\\".join(found[0]), " ".join(printable(text).split())
    )
    return re.sub(r"[@#](?=\w)", "\\g<0>\u2060", line)  # an invisible word joiner prevents a link


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table, aligned so that it is also readable as plain text. The cells must already be escaped."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    widths[-1] = 3  # the last column needs no padding
    lines = [head, ["-" * width for width in widths], *rows]
    return [f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |" for line in lines]


def fenced(text: str) -> list[str]:
    fence = "`" * max([3, *(len(found) + 1 for found in re.findall("`+", text))])
    return [f"{fence}sh", text, fence]
