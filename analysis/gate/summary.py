"""A gate's verdicts as Markdown, for the summary of a CI job."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..rows import printable

if TYPE_CHECKING:
    from .gate import Gated, Verdict

_COLUMNS = ("condition", "verdict", "value", "interval", "how")


def summary_markdown(gated: Gated, trace: str) -> str:
    """A heading that says whether the run passes, and a row a condition."""
    failures = sum(verdict.fails for verdict in gated.verdicts)
    count = len(gated.verdicts)
    title = f"{failures} of {count} conditions failed" if failures else f"{count} of {count} conditions passed"
    rows = [_COLUMNS, ["---"] * len(_COLUMNS), *(_row(verdict) for verdict in gated.verdicts)]
    lines = [f"### tim-trace gate {_plain(trace)}: {title}", "", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n\n"


def _row(verdict: Verdict) -> list[str]:
    interval = "" if verdict.low is None or verdict.high is None else f"{verdict.low:.6g} to {verdict.high:.6g}"
    told = f"**{verdict.verdict}**" if verdict.fails else verdict.verdict
    return [_plain(verdict.condition), told, f"{verdict.value:.6g}", interval, _plain(verdict.how)]


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, in one cell of a table."""
    return re.sub(r"[\\`*_{}\[\]<>()#+!|~&]", lambda found: f"&#{ord(found[0])};", " ".join(printable(text).split()))
