"""A gate's verdicts as JUnit XML, which CI pages show."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree

from ..rows import printable
from .condition import CHECK

if TYPE_CHECKING:
    from .gate import Gated, Verdict

SUITE = "tim-trace gate"


def junit_xml(gated: Gated, trace: str) -> bytes:
    """One test case a condition: a failure where its value violates it."""
    failures = sum(verdict.fails for verdict in gated.verdicts)
    counts = {"tests": str(len(gated.verdicts)), "failures": str(failures), "errors": "0", "skipped": "0"}
    suites = ElementTree.Element("testsuites", {"name": SUITE} | counts)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": SUITE} | counts)
    for verdict in gated.verdicts:
        case = ElementTree.SubElement(suite, "testcase", classname=printable(trace), name=printable(verdict.condition))
        told = printable(_told(verdict))
        if verdict.fails:
            ElementTree.SubElement(case, "failure", message=told, type=verdict.verdict).text = told
        else:
            ElementTree.SubElement(case, "system-out").text = told
    ElementTree.indent(suites)
    return bytes(ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True))


def _told(verdict: Verdict) -> str:
    if verdict.metric == CHECK:
        return f"{verdict.verdict}: {verdict.how}"
    interval = "" if verdict.low is None else f", interval {verdict.low!r} to {verdict.high!r}"
    return f"{verdict.verdict}: {verdict.metric} = {verdict.value!r}{interval} ({verdict.how})"
