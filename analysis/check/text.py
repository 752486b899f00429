"""A check as text."""

from __future__ import annotations

import math
import textwrap
from dataclasses import asdict
from typing import Any

from ..rows import shown
from .checked import Checked
from .finding import Finding

_INDENT = "  "


def checked_text(checked: Checked, width: int | None = None) -> str:
    """Write what a check found, for reading: the verdict, and the evidence and next command of every finding."""
    checked = shown(checked)
    looked = (
        "all of them"
        if checked.num_sampled_tokens >= checked.num_tokens
        else f"{checked.num_sampled_tokens:,} of them one by one, the others in sums"
    )
    verdict = "VALID" if checked.is_valid else "NOT VALID"
    head = f"{verdict}: {checked.pair} of {checked.trace}, {checked.num_tokens:,} tokens ({looked}), rms {checked.rms_d:.3g} nats"
    blocks = [wrapped(head, "", width)]
    blocks += [_finding(number, finding, width) for number, finding in enumerate(checked.findings, 1)]
    blocks += [wrapped(f"note: {note}", "", width) for note in checked.notes]
    return "\n\n".join(blocks)


def _finding(number: int, finding: Finding, width: int | None) -> str:
    title = f"{number}. {finding.title} ({finding.code})"
    lines = [title, wrapped(finding.evidence, _INDENT, width)]
    effect = "not a number" if math.isnan(finding.effect) else f"{finding.effect:.3g} nats rms"
    lines.append(f"{_INDENT}effect: {effect} on {finding.share:.2%} of the tokens")
    if finding.next:
        lines.append(f"{_INDENT}next: {finding.next}")
    return "\n".join(lines)


def wrapped(text: str, indent: str, width: int | None) -> str:
    if width is None:
        return indent + text
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def checked_json(checked: Checked) -> dict[str, Any]:
    """The same as JSON can say it, with every number."""
    findings = [asdict(finding) | {"title": finding.title, "fails": finding.fails} for finding in checked.findings]
    return asdict(checked) | {"is_valid": checked.is_valid, "findings": findings}
