from __future__ import annotations

import math
import os
from collections.abc import Sequence
from xml.etree import ElementTree

from ...schemas.errors import InvalidOption, NothingToCompare
from ...tracer.progress import Progress, no_progress
from ...tracer.whole_file import write_whole
from ..markdown import escaped, table_lines
from ..report.targets import explained, local
from ..rows import MAIN_COLUMNS, counted, printable, table, to_text, wrapped
from ..statistics.intervals import Interval, NoInterval, ends
from ..views import open_database
from .certified import certified
from .condition import (
    CANNOT_TELL,
    CERTIFICATE,
    CHECK,
    FAILED,
    PASSED,
    Condition,
    Gated,
    Verdict,
    is_count,
    parse_condition,
)
from .measured import Measured, Run


def gate(
    trace: str | os.PathLike[str],
    *,
    fail_on: Sequence[str] = (),
    certificate: str | os.PathLike[str] | None = None,
    pair: str = "train:rollout",
    confidence: float = 0.95,
    partial: bool = False,
    junit: str | os.PathLike[str] | None = None,
    summary: str | os.PathLike[str] | None = None,
    progress: Progress = no_progress,
) -> Gated:
    """Check a run against failure conditions, for the CI of training code.

    Like `stats`, stores per-sequence sums in the trace, for conditions on `stats` columns.

    A condition is either `check`, which is met if the comparison has a fault or too few tokens (`cannot tell`), or
    `<source>.<metric><sign><number>` with sign > >= < or <=: `tim.k3>1e-3` for a `stats` column, `verl.k3_kl>1e-3` for a
    `stats --like verl` column (the last part of a name is enough). `tim.|k1|>0.1` compares the absolute value. `tim`
    also has the per-step metrics used by alerts, such as `grad_norm` or `mean_exp_abs_d`, averaged over steps.

    By default, a condition covers all tokens in the run. With ` any step`, it is met if any single step meets it, which
    is how published alert levels are meant to be used. With ` last 20 steps`, it covers the tokens in those steps. A
    verdict's `warns` property is true if only single steps meet the condition.

    Every metric except a count has an interval over groups. Sequences in a step form a group if they share a
    `group_id`, and a sequence without one is its own group. Metrics computed from sums use a bootstrap-t. Maxima use a
    bootstrap that ends at the observed maximum. Quantiles invert the bootstrap-t for the token share above them
    (Woodruff 1952). All others, including framework metrics, use a jackknife over 20 parts made from whole groups.
    With fewer than 8 groups, there is no interval. Resampling has a fixed seed. The measured coverage is in
    docs/evidence/intervals.md.

    The exit code and the `fails` property depend only on the value. `verdict` is `cannot tell` if the interval contains
    the bound, or is expected but missing. NaN and infinities fail. Metrics other than counts also fail if they exclude
    non-finite tokens, or if most tokens lack logprobs.

    `certificate` is a certificate.json from `certify`. The gate fails if no pass has the certified settings, or
    if a batch or sequence exceeds the certified bounds.

    `junit` is a JUnit XML file to write or replace. Each condition is a test case. `summary` is a file to append a
    Markdown table to, such as $GITHUB_STEP_SUMMARY.

    Raises InvalidOption for a malformed condition or an unknown metric, NothingToCompare if the passes share no token
    or the trace has no value for a metric, TraceNotFound, NewerTrace, and DamagedTrace if part of the trace is
    unreadable or missing (unless `partial` is set).
    """
    if not fail_on and certificate is None:
        raise InvalidOption(
            "no condition given; use 'check', or a metric and a threshold in quotes, e.g. 'tim.k3>1e-3'",
            option="fail_on",
        )
    if not 0 < confidence < 1:
        raise InvalidOption(f"got {confidence}; pass a number between 0 and 1, e.g. 0.95", option="confidence")
    target, summary_target = (None if path is None else local(path) for path in (junit, summary))
    database = open_database(trace)
    database.check_whole(partial=partial)
    conditions = {text: parse_condition(text) for text in fail_on if text.strip() != CHECK}
    judged: dict[str, Verdict] = {}
    for last in dict.fromkeys(condition.last for condition in conditions.values()):
        run = Run(open_database(trace, f"-{last}:") if last else database, pair, confidence, progress)
        measured = run.measure([condition for condition in conditions.values() if condition.last == last])
        judged |= {text: _judged(conditions[text], number, run.left_out) for text, number in measured.items()}
    told = [] if certificate is None else [certified(database, certificate)]
    verdicts = told + [judged[text] if text in judged else _checked(trace, pair, partial, progress) for text in fail_on]
    gated = Gated(verdicts=tuple(verdicts))
    if junit is not None and target is not None:
        with explained(junit):
            write_whole(target, junit_xml(gated, os.fspath(trace)))
    if summary is not None and summary_target is not None:
        with explained(summary), summary_target.open("a", encoding="utf-8") as file:
            file.write(summary_markdown(gated, os.fspath(trace)))
    return gated


def _judged(condition: Condition, measured: Measured, missing: str) -> Verdict:
    by_step = {step: condition.judged(value) for step, value in measured.by_step.items()}
    beyond = [step for step, value in by_step.items() if condition.holds(value)]
    worst = condition.worst_step(by_step)
    value, how, interval = condition.judged(measured.value), measured.how, measured.interval
    fails = condition.holds(value)
    verdict = FAILED if fails else PASSED
    if math.isfinite(value) and interval is not None and not _is_decided(condition, interval):
        verdict = CANNOT_TELL
    low, high = (None if interval is None else ends(interval)) or (None, None)
    says = f"{len(beyond)} of {len(by_step)} steps violate the bound" + (f", first step {beyond[0]}" if beyond else "")
    if condition.any_step:
        if worst is None:
            raise NothingToCompare(f"{measured.metric}: no step has a value to check; remove this condition")
        value, fails, low, high = by_step[worst], bool(beyond), None, None
        verdict, how = FAILED if fails else PASSED, f"{says}; the value is from the worst step"
    elif worst is not None and beyond and not fails and not is_count(measured.metric):
        how = f"{says}, worst step {worst} ({by_step[worst]:.3g}); the condition would fail with 'any step'; {how}"
    if condition.last and by_step:
        how = f"the last {len(by_step)} steps, {min(by_step)} to {max(by_step)}: {how}"
    if missing and measured.leaves_out:
        fails, verdict, how = True, FAILED if fails else CANNOT_TELL, f"{missing}; {how}"
    return Verdict(
        condition=condition.text, metric=measured.metric, value=value, low=low, high=high, bound=condition.bound,
        verdict=verdict, fails=fails, steps_beyond=None if is_count(measured.metric) else len(beyond), worst_step=worst,
        how=how,
    )  # fmt: skip


def _is_decided(condition: Condition, interval: Interval | NoInterval) -> bool:
    if isinstance(interval, NoInterval):
        return interval is NoInterval.ALIKE
    return len({condition.holds(end) for end in interval}) == 1


def _checked(trace: str | os.PathLike[str], pair: str, partial: bool, progress: Progress) -> Verdict:
    from ..check.check import check  # only this condition needs the detectors of `check`
    from ..check.faults import evidence_text
    from ..comparison.passes import PassComparison
    from ..comparison.passes_text import sentence

    checked = check(trace, pair=pair, partial=partial, progress=progress)
    verdict = PASSED if checked.is_valid else FAILED
    if isinstance(checked, PassComparison):
        num = sum(len(group.odd_tokens) + len(group.contradictions) for group in checked.groups)
        told = sentence(checked)
    elif not checked.is_compared:
        raise NothingToCompare(evidence_text(checked.findings[0]))
    else:
        faults = [finding for finding in checked.findings if finding.fails]
        told = "; ".join(f"{finding.title}: {evidence_text(finding)}" for finding in faults or checked.findings)
        num = len(faults)
        verdict = CANNOT_TELL if checked.has_few_tokens else verdict
    return Verdict(
        condition=CHECK, metric=CHECK, value=float(num), low=None, high=None, bound=None, verdict=verdict,
        fails=verdict != PASSED, steps_beyond=None, worst_step=None, how=told,
    )  # fmt: skip


SUITE = "tim-trace gate"
_COLUMNS = ("condition", "verdict", "value", "interval", "how")


def gated_text(gated: Gated, width: int | None = None) -> str:
    """Render the verdicts as a table, and each reason in full below it."""
    reasons = [wrapped(f"{one.condition}: {one.verdict}: {one.how}", "", width) for one in gated.verdicts]
    columns = to_text(table(gated.verdicts).without(["metric", "fails", "how"]), width, MAIN_COLUMNS["gate"])
    return "\n\n".join([f"{_title(gated)}.", columns, *reasons])


def _title(gated: Gated) -> str:
    failures, count = sum(verdict.fails for verdict in gated.verdicts), counted(len(gated.verdicts), "condition")
    return f"FAILED: {failures} of {count}" if failures else f"PASSED: {count}"


def junit_xml(gated: Gated, trace: str) -> bytes:
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
    if verdict.metric in (CHECK, CERTIFICATE):
        return f"{verdict.verdict}: {verdict.how}"
    interval = "" if verdict.low is None else f", interval {verdict.low!r} to {verdict.high!r}"
    return f"{verdict.verdict}: {verdict.metric} = {verdict.value!r}{interval} ({verdict.how})"


def summary_markdown(gated: Gated, trace: str) -> str:
    rows = table_lines(_COLUMNS, [_row(verdict) for verdict in gated.verdicts])
    lines = [f"### tim-trace gate {escaped(trace)}: {_title(gated)}", "", *rows]
    return "\n".join(lines) + "\n\n"


def _row(verdict: Verdict) -> list[str]:
    interval = "" if verdict.low is None or verdict.high is None else f"{verdict.low:.6g} to {verdict.high:.6g}"
    told = f"**{verdict.verdict}**" if verdict.fails else verdict.verdict
    return [escaped(verdict.condition), told, f"{verdict.value:.6g}", interval, escaped(verdict.how)]
