"""Render the verdicts of a gate as text, JUnit XML and Markdown for CI pages."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from ..rows import printable, table, to_text
from .condition import CHECK, Gated, Verdict

SUITE = "tim-trace gate"
_COLUMNS = ("condition", "verdict", "value", "interval", "how")


def gated_text(gated: Gated, width: int | None = None) -> str:
    """Render the verdicts as a table with one row per condition."""
    return to_text(table(gated.verdicts), width)


def junit_xml(gated: Gated, trace: str) -> bytes:
    """Render JUnit XML with one test case per condition, which is a failure if the value violates the condition."""
    failures = sum(verdict.fails for verdict in gated.verdicts)
    counts = {"tests": str(len(gated.verdicts)), "failures": str(failures), "errors": "0", "skipped": "0"}
    suites = ElementTree.Element("testsuites", {"name": SUITE} | counts)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": SUITE} | counts)
    for verdict in gated.verdicts:
        case = ElementTree.SubElement(suite, "testcase", classname=printable(trace), name=printable(verdict.condition))
        text = printable(_sentence(verdict))
        if verdict.fails:
            ElementTree.SubElement(case, "failure", message=text, type=verdict.verdict).text = text
        else:
            ElementTree.SubElement(case, "system-out").text = text
    ElementTree.indent(suites)
    return bytes(ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True))


def _sentence(verdict: Verdict) -> str:
    if verdict.metric == CHECK:
        return f"{verdict.verdict}: {verdict.how}"
    interval = "" if verdict.low is None else f", interval {verdict.low!r} to {verdict.high!r}"
    return f"{verdict.verdict}: {verdict.metric} = {verdict.value!r}{interval} ({verdict.how})"


def summary_markdown(gated: Gated, trace: str) -> str:
    """Render Markdown with the overall result as a heading, and one table row per condition."""
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
    """Escape text for a table cell in Markdown."""
    return re.sub(r"[\\`*_{}\[\]<>()#+!|~&]", lambda found: f"&#{ord(found[0])};", " ".join(printable(text).split()))
