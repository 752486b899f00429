"""Lines of a view: cut to the width of a terminal, and fewer where it is not high enough."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from ..rows import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """What a view is written on."""

    width: int
    """Columns."""
    encoding: str = "utf-8"
    is_tight: bool = False
    """Whether lines are few: no empty ones, and none is continued."""

    def can(self, characters: str) -> bool:
        """Whether the encoding has these characters."""
        try:
            characters.encode(self.encoding)
        except (UnicodeEncodeError, LookupError):
            return False
        return True

    def shown(self, text: str) -> str:
        """The text without what would act on the terminal or has no place in its encoding."""
        text = printable(text)
        return text if self.can(text) else text.encode("ascii", "backslashreplace").decode()

    def line(self, *parts: str | tuple[str, str]) -> Text:
        """One line of parts, each with a style or without, cut to the width."""
        text, left = Text(no_wrap=True), self.width
        for part in parts:
            words, style = (part, "") if isinstance(part, str) else part
            words = self.cut(words, left)
            text.append(words, style)
            left -= cell_len(words)
        return text

    def cut(self, text: str, width: int) -> str:
        """The text in no more columns than `width`; its last one says that something was cut."""
        text = self.shown(text)
        if cell_len(text) <= width:
            return text
        return set_cell_size(text, width - 1) + "~" if width > 0 else ""

    def ending(self, text: str, width: int) -> str:
        """The end of the text in no more columns than `width`: of a path the part that tells."""
        text = self.shown(text)
        while cell_len(text) > width:
            text = "~" + text[2:] if len(text) > 1 else ""
        return text

    def wrapped(self, text: str, *, first: Sequence[tuple[str, str]] = (), style: str = "") -> list[Text]:
        """The text in several lines, beside what stands before the first."""
        indent = sum(cell_len(words) for words, _ in first)
        if indent > self.width // 2:  # no room beside it: below
            return [self.line(*first), *(self.line("  ", (line, style)) for line in self._broken(text, self.width - 2))]
        lines = self._broken(text, self.width - indent)
        return [
            self.line(*(first if not place else ((" " * indent, ""),)), (line, style))
            for place, line in enumerate(lines)
        ]

    def _broken(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(self.shown(text), max(width, 1), break_on_hyphens=False) or [""]


@dataclass(slots=True, kw_only=True)
class Section:
    """A part of a view, which can do with fewer lines."""

    head: list[Text]
    blocks: list[list[Text]] = field(default_factory=list)
    """Lines that stay or go together."""
    least: int = 0
    """Blocks that stay as long as others have more than theirs."""
    keeps_last: bool = False
    """Whether the first blocks go before the last ones."""
    num_left_out: int = 0

    def lines(self, paper: Paper) -> list[Text]:
        left_out = f"... and {self.num_left_out} more"
        told = [paper.line((left_out, "dim"))] if self.num_left_out and not self.keeps_last else []
        return [*self.head, *(line for block in self.blocks for line in block), *told]

    def shorten(self) -> None:
        self.blocks.pop(0 if self.keeps_last else -1)
        self.num_left_out += 1


def fitted(sections: Sequence[Section], paper: Paper, height: int | None) -> list[Text]:
    """The lines of all sections, an empty one between two where it is not tight, in no more than `height` lines."""
    while height is not None and len(lines := _joined(sections, paper)) > height:
        longest = max(sections, key=lambda each: len(each.blocks) - each.least)
        if len(longest.blocks) <= longest.least:
            longest = max(sections, key=lambda each: len(each.blocks))
        if not longest.blocks:
            return lines[:height]
        longest.shorten()
    return _joined(sections, paper)


def _joined(sections: Sequence[Section], paper: Paper) -> list[Text]:
    lines: list[Text] = []
    for section in sections:
        if own := section.lines(paper):
            lines += [Text(), *own] if lines and not paper.is_tight else own
    return lines
