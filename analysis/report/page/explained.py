"""Words that need a note get one where they first stand in a text."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from ..terms import WORDS

_WORDS = re.compile(r"(?<![\w|/-])(" + "|".join(sorted(map(re.escape, WORDS), key=len, reverse=True)) + r")(?![\w/-])")


def explained(text: str) -> Markup:
    """A text, escaped, in which the first use of each word of `terms.WORDS` shows its note."""
    seen: set[str] = set()
    parts: list[Markup] = []
    end = 0
    for match in _WORDS.finditer(text):
        word = match[1]
        if word not in seen:
            seen.add(word)
            parts += [escape(text[end : match.start()]), term(word, word)]
            end = match.end()
    return Markup("").join([*parts, escape(text[end:])])


def term(word: str, shown: str) -> Markup:
    """A word with its note, which a mouse and a keyboard reach."""
    return Markup('<span class="term" tabindex="0">{}<span class="tip" role="tooltip">{}</span></span>').format(
        shown, WORDS[word]
    )
