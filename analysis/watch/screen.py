from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console, RenderableType
from rich.live import Live

from .view import WatchedView
from .watched import WATCHED_FORM as WATCHED_FORM
from .watched import Watched

_PIPE_WIDTH = 100


def can_redraw() -> bool:
    return sys.stdout.isatty() and not Console().is_dumb_terminal


def show(views: Iterator[Watched], *, again: bool) -> None:
    """Print each view below the previous one or, if `again`, redraw the view in place and print the last one in full at
    the end or after Ctrl-C."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    if not again:
        for seen in views:
            console.print(WatchedView(seen), crop=False)
        return
    last = None
    # Make these signals raise KeyboardInterrupt, as Ctrl-C does, so that the terminal is restored.
    with _handled((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler):
        try:
            with (
                Live(
                    console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
                ) as live,
                _handled((signal.SIGWINCH,), lambda number, frame: live.refresh()),
            ):
                for seen in views:
                    last = WatchedView(seen)
                    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
                    live.update(WatchedView(seen, is_screen=True), refresh=True)
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGWINCH})
        except KeyboardInterrupt:
            pass
    if last is not None:
        console.print(last, crop=False)


def watched_text(seen: Watched) -> str:
    return drawn_text(WatchedView(seen))


def drawn_text(drawn: RenderableType, width: int | None = None) -> str:
    """Render with rich as plain text without colours."""
    console = Console(file=io.StringIO(), highlight=False, width=width or _PIPE_WIDTH)
    with console.capture() as captured:
        console.print(drawn, crop=False)
    return captured.get()


@contextmanager
def _handled(numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
