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
            _draw(console, seen)
        return
    drawn: list[Watched] = []
    with _terminated_as_interrupted(), _redrawn(console, drawn):
        try:
            with console.screen(hide_cursor=True):
                for seen in views:
                    drawn[:] = [seen]
                    _redraw(console, seen)
        except KeyboardInterrupt:
            pass
    for seen in drawn:
        _draw(console, seen)


def _draw(console: Console, seen: Watched) -> None:
    width = console.width if console.is_terminal else _PIPE_WIDTH
    console.print(watched_text(seen, width=width, encoding=console.encoding), soft_wrap=True)


def _redraw(console: Console, seen: Watched) -> None:
    width, height = console.size
    text = watched_text(seen, width=width, height=height - 1, encoding=console.encoding, goes_on=not seen.is_over)
    console.clear()
    console.print(text, soft_wrap=True, end="")


@contextmanager
def _redrawn(console: Console, drawn: list[Watched]) -> Iterator[None]:
    """Draw the view of `drawn` anew when the terminal gets another size."""
    busy = False

    def redraw(number: int, frame: FrameType | None) -> None:
        nonlocal busy
        if drawn and not busy:
            busy = True
            _redraw(console, drawn[0])
            busy = False

    with _handled(signal.SIGWINCH, redraw):
        yield


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let the end of the session leave the terminal as it was, too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled(signal.SIGTERM, interrupt), _handled(signal.SIGHUP, interrupt):
        yield


@contextmanager
def _handled(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
