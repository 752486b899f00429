"""Watch a run while it is being recorded."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from ...schemas.errors import InvalidOption, TraceNotFound, tell_damage
from ...tracer.progress import Progress, no_progress
from .watched import Watched
from .watcher import Watcher

_LONGEST_S = 86_400.0


def watch(
    trace: str | os.PathLike[str],
    *,
    every: float = 5.0,
    steps: str = "-10:",
    once: bool = False,
    pair: str = "train:rollout",
    progress: Progress = no_progress,
) -> Iterator[Watched]:
    """Show a run while it is recorded: its latest steps, its course so far, and the first alerts.

    Yields a view every `every` seconds until the recording has ended; with `once`, one view. Without `once` it waits for a
    trace that does not exist yet. `steps` are the steps to show (`3`, `2:8`, `-10:` for the last ten, `all`), and `pair` names
    the passes of the mismatch, d = logprob(a) - logprob(b) in nats.

    Only steps that have grown are read again. A long run is read in portions, the newest steps first: views in between say how
    many steps are left, and `once` waits until all are read. Nothing is written, and the recorder is not disturbed.

    Raises InvalidOption, NewerTrace or DamagedTrace, and with `once` TraceNotFound.
    """
    if not 0 < every <= _LONGEST_S:
        raise InvalidOption(f"got {every}; use seconds above 0 and at most {_LONGEST_S:g}", option="every")
    watcher = Watcher(trace, pair=pair, steps=steps)
    return iter([_whole(watcher, progress)]) if once else _again_and_again(watcher, every)


def _again_and_again(watcher: Watcher, every: float) -> Iterator[Watched]:
    while True:
        began = time.monotonic()
        try:
            seen = watcher.look()
        except TraceNotFound as error:
            seen = watcher.waiting(str(error))
        yield seen
        if seen.is_over and not seen.num_unread_steps:
            return
        if not seen.num_unread_steps:
            # A trace that is slow to read is read less often, to limit the load that watching causes.
            time.sleep(max(every, 2 * (time.monotonic() - began)))


def _whole(watcher: Watcher, progress: Progress) -> Watched:
    """Read every step, then return the view."""
    seen = watcher.look()
    with progress("reading steps", seen.num_unread_steps) as advance:
        while left := seen.num_unread_steps:
            seen = watcher.look()
            advance(max(0, left - seen.num_unread_steps))
    tell_damage(seen.damaged)
    return seen
