"""Measure the startup time of the command line."""

import subprocess
import sys

from comparison import Comparison, in_turn, ratios

IMPORTED = "import sys; from tim_trace import cli; print('torch' in sys.modules)"


def compare():
    """Time `tim-trace --help` in a new process, and a bare interpreter."""
    taken = in_turn(
        10,
        help=lambda: _run("-m", "tim_trace", "--help"),
        bare=lambda: _run("-c", "pass"),
    )
    yield Comparison(what="time", values=taken["help"], unit=" s", at_most=0.3)
    yield Comparison(what="time over that of a bare interpreter", values=ratios(taken["help"], taken["bare"]))
    yield f"torch imported: {_run('-c', IMPORTED).strip()} (wanted: False)"


def _run(*arguments):
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True).stdout
