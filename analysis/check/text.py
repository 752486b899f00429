from __future__ import annotations

import math
from collections.abc import Mapping

from ..rows import Form, counted, of_steps, shown, wrapped
from ..trace.columns import steps_text
from .check import CheckResult
from .data_checks import FAULTS
from .faults import evidence_text
from .finding import DataFinding, Finding
from .where import where_text

_INDENT = "  "
_DATA = "rewards, advantages and groups (these do not affect the comparison of logprobs):"
_DATA_ALONE = "rewards, advantages and groups:"

NOTES: Mapping[str, str] = {
    "few_tokens": "only {num_tokens:,} comparable tokens, too few to detect faults as small as rounding. Record more sequences",
    "no_contract": "at least one pass has no contract, so its dtype, adapters and sampling settings are inferred from its values; to record them, use `tim-trace record` or call Recorder.add_contract",
    "no_entropies": "no finite entropies were recorded, so prompt or tool tokens that both sides scored as if they had been sampled cannot be detected",
    "few_steps": "fewer than three steps were inspected, too few to detect stale weights from the mismatch alone",
    "no_prompts": "prompts were not recorded, so logit precision and prompt caches cannot be checked",
    "attempts": "training was attempted {num_attempts} times; only the newest attempt at each step is used; {left_out}",
}

BROKEN: Mapping[str | None, str] = {
    "recording": "the recording is wrong",
    "engine": "the engine is wrong",
    "trainer": "the trainer is wrong",
    "computation": "the engine or the trainer is wrong",
    "versions": "the two sides' policy versions differ",
}


def note_texts(result: CheckResult) -> list[str]:
    old = [(each.superseded, each.attempt) for each in result.attempts if each.superseded]
    plural = ["s" * (steps[0][0] != steps[-1][1]) for steps, _ in old]
    again = [f"step{s} {steps_text(steps)} of attempt {at}" for s, (steps, at) in zip(plural, old, strict=True)]
    numbers = {
        "num_tokens": result.num_sampled_tokens, "num_attempts": len(result.attempts),
        "left_out": f"left out because they were repeated later: {', '.join(again)}" if again else "no step was repeated",
    }  # fmt: skip
    return [NOTES[code].format_map(numbers) for code in result.notes]


def checked_text(result: CheckResult, width: int | None = None) -> str:
    """Render the verdict, then each finding's evidence and next command."""
    result = shown(result)
    head, data, findings = _head(result), _DATA, result.findings
    if not result.is_compared:
        head, data, findings = f"NOT COMPARED: {evidence_text(findings[0])}", _DATA_ALONE, ()
    blocks = [wrapped(head, "", width)]
    blocks += [_finding_text(number, finding, width) for number, finding in enumerate(findings, 1)]
    if result.data:
        blocks.append("\n".join([data, *(_data_text(each, width) for each in result.data)]))
    elif not result.is_compared:
        blocks.append("No fault was found in the recorded rewards, advantages, groups and reference.")
    blocks += [wrapped(f"note: {note}", "", width) for note in note_texts(result)]
    return "\n\n".join(blocks)


def _head(result: CheckResult) -> str:
    inspected = "all inspected individually"
    if result.num_sampled_tokens < result.num_tokens:
        inspected = f"statistics on all, {result.num_sampled_tokens:,} inspected individually"
    verdict = "VALID" if result.broken is None else f"NOT VALID, {BROKEN[result.broken]}"
    if result.broken is None and (num := sum(not each.is_notice for each in result.data)):
        verdict += f", but with {counted(num, 'data fault')}"
    if result.has_few_tokens:
        verdict = "TOO FEW TOKENS"
    tokens = counted(result.num_tokens, "token")
    return f"{verdict}: {result.pair} of {result.trace}{of_steps(result.steps)}, {tokens} ({inspected}), rms {result.rms_d:.3g} nats"


def _finding_text(number: int, finding: Finding, width: int | None) -> str:
    title = f"{number}. {finding.title} ({finding.code})"
    effect = "undefined (no finite value)" if math.isnan(finding.effect) else f"{finding.effect:.3g} nats rms"
    lines = [title, wrapped(evidence_text(finding), _INDENT, width)]
    lines.append(f"{_INDENT}effect: {effect} on {finding.share:.2%} of the tokens")
    lines += [f"{_INDENT}{name}: {each}" for name in ("broken", "next") if (each := getattr(finding, name))]
    return "\n".join(lines)


def data_text(finding: DataFinding) -> str:
    since = "" if finding.since is None else f", starting at step {finding.since}"
    numbers = {**finding.numbers, "finding": finding.finding}
    text = FAULTS[finding.code, finding.signal].sentence(finding.signal, numbers)
    if finding.where:
        place = where_text(finding.where).removeprefix("all where ")
        text += f"; the rows are {'almost ' * (finding.where['match'] == 'almost')}exactly those where {place}"
    return f"{text} ({finding.share:.0%} affected{since})"


def _data_text(finding: DataFinding, width: int | None) -> str:
    text = f"{finding.title}{' (may be intended)' * finding.is_notice}: {data_text(finding)}"
    return f"{wrapped(text, _INDENT, width)}\n{_INDENT * 2}next: {finding.next}"


def _note_codes(result: CheckResult) -> tuple[str, ...]:
    return result.notes


CHECKED_FORM: Form = {
    CheckResult: {
        "attempts": None, "is_valid": CheckResult.is_valid, "broken": CheckResult.broken, "notes": note_texts,
        "note_codes": _note_codes,
    },
    Finding: {
        "tokens": None, "title": Finding.title, "fails": Finding.fails, "broken": Finding.broken, "evidence": evidence_text,
    },
    DataFinding: {"sentence": data_text},
}  # fmt: skip
