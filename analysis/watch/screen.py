"""Drawing a watched run on a terminal, again and again."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console

from .text import watched_text
from .watched import Watched

_PIPE_WIDTH = 100


def can_redraw() -> bool:
    """Whether stdout is a terminal that lets what was written be written over."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal


def show(views: Iterator[Watched], *, again: bool) -> None:
    """Draw each view; with `again` in place of the one before, until they end or Ctrl-C. The last one stays.

    What is drawn fits the terminal, and is drawn anew when its size changes.
    """
    console = Console(highlight=False)
    if not again:
        for seen in views:
            _print(console, seen)
        return
    screen = _Screen(console)
    with (
        _handled(signal.SIGTERM, _interrupt),
        _handled(signal.SIGHUP, _interrupt),
        _handled(signal.SIGWINCH, screen.resize),
    ):
        try:
            with screen.place:
                for seen in views:
                    screen.draw(seen)
        except KeyboardInterrupt:
            pass
    if screen.seen is not None:
        _print(console, screen.seen)


class _Screen:
    """The view that is drawn."""

    def __init__(self, console: Console):
        self.seen: Watched | None = None
        self.place = console.screen(hide_cursor=True)
        """The terminal's other screen, which leaves what stood there before as it was."""
        self._console = console
        self._is_drawing = False

    def draw(self, seen: Watched) -> None:
        """Draw a view in place of the one before."""
        self.seen, self._is_drawing = seen, True
        width, height = self._console.size
        text = watched_text(seen, width=width, height=height, encoding=self._console.encoding, goes_on=not seen.is_over)
        self.place.update(text)
        self._is_drawing = False

    def resize(self, number: int, frame: FrameType | None) -> None:
        """Draw the view anew, as the terminal has another size."""
        if self.seen is not None and not self._is_drawing:
            self.draw(self.seen)


def _print(console: Console, seen: Watched) -> None:
    width = console.width if console.is_terminal else _PIPE_WIDTH
    console.print(watched_text(seen, width=width, encoding=console.encoding), soft_wrap=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Let the end of the session leave the terminal as it was, too."""
    raise KeyboardInterrupt


@contextmanager
def _handled(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
