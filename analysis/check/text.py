"""Render a check as text, from its codes and numbers."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ...schemas.steps import ALL_STEPS
from ..info import steps_text
from ..rows import shown
from .finding import TITLES, Finding
from .notes import Note
from .result import CheckResult
from .thresholds import CAP_NATS, MIN_ALONG, MIN_FALL, MIN_FALL_SCORE

_INDENT = "  "

_ROWS_OFF = "{num_sequences:,} of {of_sequences:,} mismatched rows"
_RMS = "(rms {effect:.2g} vs {rms_elsewhere:.2g} nats)"
_WEIGHTS = (
    "the logits differ by {level:.2g} nats rms, where rounding of {dtypes} gives at most {allowed:.2g}, and "
    "{share_of_tokens:.0%} of it depends on the token id"
)

EVIDENCE: Mapping[str, str] = {
    "missing": "{side} has {value} where {other} has a logprob, for {num_tokens:,} tokens {at}",
    "missing_in_both": "neither {side} nor {other} has a finite logprob ({side}: {value}) for {num_tokens:,} tokens {at}",
    "missing_elsewhere": "{a} or {b} has NaN or infinity for {num_tokens:,} tokens of steps that were not inspected individually",
    "above_zero": "{side} has values above 0 for {num_tokens:,} tokens, from {least:.3g} to {largest:.3g}: a logprob is at most 0, "
    "and in no known unit do these agree with the other side",
    "constant_in_both": "{a} and {b} are both {value:g} for {num_tokens:,} tokens of {num_sequences:,} sequences in different "
    "contexts, far more often than any nearby value",
    "constant_rows": "{side} has the same value for all tokens of a sequence while {other} varies: each of the {num_tokens:,} tokens holds a "
    "mean or sum over its sequence",
    "negative_entropies": "{side} holds the negative entropies of the distributions, not the logprobs of the {num_tokens:,} sampled "
    "tokens",
    "most_probable": "{side} is never below {other} and equal where the sampled token is the most probable one: it holds the logprobs of the "
    "most probable tokens, not of the {num_tokens:,} sampled ones",
    "no_correlation": "the logprobs of {side} and {other} are uncorrelated (correlation {correlation:.2f} over {num_tokens:,} "
    "tokens): they belong to different tokens, in no known order, or to different models",
    "constant": "{side} is {value:g} for {num_tokens:,} tokens of {num_sequences:,} sequences, where {other} has "
    "{other_mean:.3g} nats on average, down to {other_min:.3g}{reason_text}",
    "equal_bits": "all {num_tokens:,} tokens of {a} and {b} are bitwise equal, and {contracts_text}",
    "equal_against_contracts": "all {num_tokens:,} tokens of {a} and {b} are bitwise equal, although their contracts name "
    "{differing}: {copied_text}",
    "copied_rows": "{num_sequences:,} of {of_sequences:,} sequences are bitwise equal in both passes, but only {equal_elsewhere:.1%} of the "
    "tokens of the others: these rows were copied from the other pass",
    "shared_unit": "{a} and {b} both hold {unit_text}: their mean is {mean_logprob:.3g} where the entropy is {mean_entropy:.3g} "
    "nats, and logprob + entropy averages to 0 over sampled tokens only in that unit",
    "other_unit": "{side} holds {unit_text}: converted, nine tenths of the tokens differ by {residual:.2g} nats on "
    "average, unconverted by {size:.2g}",
    "moved_rows": "{b} is {tokens_off} {direction} than {a}: shifted back, the two differ by {moved:.2g} nats per token on "
    f"average, as recorded by {{unmoved:.2g}} (each capped at {CAP_NATS:g})",
    "moved_after_place": f"{_ROWS_OFF} agree up to a token (at position {{first_place}} to {{last_place}}) and, shifted by "
    "{lags} tokens, after it: {joined_text}",
    "impossible_after_place": f"{_ROWS_OFF} agree up to a position that differs by row (token {{first_place}} to {{last_place}}), "
    "whose token one side considers impossible, and differ by {effect:.2g} nats rms from there on: the two sides scored different tokens",
    "other_rows": f"{_ROWS_OFF} match {{side}} of another row of the same or a neighbouring step: {{pairs}}",
    "kept_mass": "{side} is never below {other}: it was renormalised over the tokens that sampling kept, {kept_mass:.4g} of "
    "{other}'s probability mass on average and at least {least_mass:.3g}",
    "allowed_tokens": "{side} was sampled under a grammar (structured outputs): its logprobs are over the allowed tokens, {other}'s over all; of "
    "{of_tokens:,} such tokens {num_tokens:,} are higher in {side} beyond rounding, by at most {largest:.3g} nats, and "
    "{num_lower:,} are lower",
    "lost_mass": "{side} is never above {other}: {lost_mass:.3g} of its probability goes to ids that are not tokens, such as head rows beyond "
    "the tokenizer's length: mask these",
    "scaled_logits": "{b}'s logits are {a}'s divided by {temperature:.3g} (fitted, {least:.3g} to {largest:.3g}), which accounts for {r2:.0%} of "
    "the mismatch{recorded_text}",
    "common_place": "{larger} token {position} of {counted_text}{on}, in all sequences, the mismatch is {ratio:.3g} times "
    f"as large {_RMS}",
    "own_places": "in {num_sequences:,} of {of_sequences:,} sequences the mismatch is {ratio:.3g} times as large {after} a "
    "position that differs by sequence (token {first_place} to {last_place}): weights or the KV cache changed during "
    "sampling",
    "prefix_cache": "the {num_sequences:,} sequences whose prompt occurred at an earlier step have {ratio:.3g} times the mismatch "
    f"of the others {_RMS}; in the last third of a sequence it is {{fall_text}}",
    "persistence": "the logits differ by {level:.2g} nats rms; |d| is similar in neighbouring tokens (correlation "
    "{persistence:.2f}) but differs between sequences ({sequence_score:.0f} standard deviations): weights or cached "
    "prefixes changed during sampling",
    "column": "{num_sequences:,} of {of_sequences:,} sequences (with {column} {values}) have {ratio:.3g} times the mismatch of the "
    f"others {_RMS}",
    "rounded_logprobs": "every logprob of {side} is a {dtype} value: the {part} was computed or stored in low precision",
    "rounded_logits": "the logits of {side} are rounded to {dtype}, although its contract says float32: the {part} was computed "
    "or stored in low precision",
    "router_tail": "{experts_text}: {tail_share:.2%} of the tokens differ by more than {tail_ratio:g} times the median "
    "({bulk:.2g} nats of a logit); for these the router chose different experts",
    "unlikely_runs": "in {num_sequences:,} of {of_sequences:,} sequences, runs of consecutive tokens ({num_tokens:,} in all) average "
    "{mean_logprob:.3g} nats on both sides where their entropy is {mean_entropy:.3g}: they were not sampled but come from a "
    "prompt or a tool, and they count in the loss",
    "policy_versions": "{side} scored {num_sequences:,} of {of_sequences:,} sequences with weights {updates_behind} optimizer updates behind the "
    "other side's, according to the recorded policy versions",
    "contract": "the contract of {side} has {setting} {value}",
    "one_adapter": "only {side} has an adapter, and " + _WEIGHTS,
    "logits": _WEIGHTS + "{behind_text}; logprobs alone do not show why: replay to find out",
    "engine_weights": "{what_text}; this holds for {num_tensors:,} of {of_tensors:,} tensors at version {trainer_version}, and for some at "
    "{num_versions:,} of {of_versions:,} versions, from {first_version} on (by the digest of every tensor)",
    "equal_weights": "the engine sampled with the trainer's weights (the digests of all tensors agree), yet the logits "
    "differ by {level:.2g} nats rms, where rounding of {dtypes} gives at most {allowed:.2g}",
    "too_few": "only {num_tokens:,} comparable tokens: below {least:,} only missing values and bitwise equality are checked; record more "
    "sequences",
    "rounding": "the logits differ by {level:.2g} nats rms, at most {allowed:.2g} is expected from rounding of {dtypes}, and no pattern "
    "was found",
}
"""Signal code -> template for the evidence, filled with the numbers in the finding."""

_REASONS = {
    "begin_alike": "; all sequences of a prompt begin with them, so they belong to the prompt",
    "improbable": "; elsewhere {elsewhere_mean:.3g}: these tokens were not sampled from the policy",
    "none": "",
}
_UNITS = {
    "log2": "logarithms of base 2",
    "log10": "logarithms of base 10",
    "probability": "probabilities",
    "negative_ln": "negative logprobs",
    "negative_log2": "negative logarithms of base 2",
}
_COUNTED = {"response": "the response", "prompt_and_response": "prompt and response"}

_WORDS: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, str | float]]] = {
    "missing": lambda n: {"at": _missing_at(n)},
    "constant": lambda n: {"reason_text": _REASONS[n["reason"]].format_map(n)},
    "equal_bits": lambda n: {
        "contracts_text": "their contracts have the same numerics"
        if n["contracts_known"]
        else "no contract gives a reason to differ"
    },
    "equal_against_contracts": lambda n: {
        "copied_text": "two such forwards are never bitwise equal, so one was copied from the other"
        if "dtype_a" in n
        else "one was copied from the other, or the two are built to be bitwise equal: replay to find out",
        "differing": " and ".join(
            f"{what} {n[f'{what}_a']} and {n[f'{what}_b']}" for what in ("engine", "dtype") if f"{what}_a" in n
        ),
    },
    "shared_unit": lambda n: {"unit_text": _UNITS[n["unit"]]},
    "other_unit": lambda n: {"unit_text": _UNITS[n["unit"]]},
    "missing_in_both": lambda n: {"at": _missing_at(n)},
    "prefix_cache": lambda n: {"fall_text": _fall(n)},
    "moved_rows": lambda n: {
        "tokens_off": f"{abs(n['lag'])} token{'s' if abs(n['lag']) > 1 else ''}",
        "direction": "later" if n["lag"] > 0 else "earlier",
    },
    "moved_after_place": lambda n: {
        "joined_text": "turns were joined with an offset of one there"
        if n["code"] == "shift"
        else "the text was decoded and re-encoded into different tokens there"
    },
    "other_rows": lambda n: {"pairs": _pairs(n)},
    "scaled_logits": lambda n: {"recorded_text": _recorded(n)},
    "common_place": lambda n: {"counted_text": _COUNTED[n["counted"]], "on": " on" if n["larger"] == "from" else ""},
    "own_places": lambda n: {"after": "after" if n["larger"] == "from" else "before"},
    "router_tail": lambda n: {
        "experts_text": "the model is a mixture of experts"
        if n["experts_known"]
        else "the pattern of a mixture of experts"
    },
    "one_adapter": lambda n: _of_weights(n),
    "engine_weights": lambda n: {"what_text": _of_tensor(n)},
    "equal_weights": lambda n: _of_weights(n),
    "logits": lambda n: _of_weights(n),
    "rounding": lambda n: {
        "dtypes": " and ".join(f"{n[f'dtype_{side}'] or 'an unknown dtype'} ({n[side]})" for side in "ab")
    },
}
"""Signal code -> function that derives the words in the template from the numbers in the finding."""

NOTES: Mapping[str, str] = {
    "few_tokens": "only {num_tokens:,} comparable tokens, too few to detect faults near the level of rounding; record more "
    "sequences",
    "no_contract": "a pass has no contract, so its dtype, adapters and sampling are inferred from its numbers; record with "
    "`tim-trace record`, or call Recorder.add_contract",
    "no_entropies": "no entropies recorded: tokens that both sides scored but nobody sampled cannot be detected",
    "few_steps": "fewer than three steps: stale weights cannot be detected from the direction of the mismatch",
    "no_prompts": "no prompts recorded: the precision of logits and prompt caches cannot be checked",
    "attempts": "training was attempted {num_attempts} times; each step uses its newest attempt; {left_out}",
}
"""Note code -> sentence."""

BROKEN: Mapping[str | None, str] = {
    "recording": "the recording is broken",
    "engine": "an engine is broken",
    "versions": "the policy versions of the two sides differ",
}
"""Code of what must be fixed (`finding.Broken`) -> phrase."""


def evidence_text(finding: Finding) -> str:
    """Return the evidence for a finding as a sentence with numbers."""
    numbers: dict[str, Any] = {
        **finding.numbers,
        "code": finding.code,
        "effect": finding.effect,
        "share": finding.share,
    }
    if finding.signal in _WORDS:
        numbers |= _WORDS[finding.signal](numbers)
    text = EVIDENCE[finding.signal].format_map(numbers)
    if "since_step" in numbers:
        text += f"; all of it from step {numbers['since_step']} on; the two agree before"
    if "behind" in numbers:
        text += f"; visible only after correcting for: {TITLES[str(numbers['behind'])]}"
    return f"{text}; expected for the recorded engines and dtypes" if finding.is_expected else text


def note_text(note: Note) -> str:
    """Return a note as a sentence."""
    again = [
        f"{'step' if steps[0][0] == steps[-1][1] else 'steps'} {steps_text(steps)} of attempt {attempt.attempt}"
        for attempt in note.attempts
        if (steps := attempt.superseded)
    ]
    left_out = f"left out, because repeated later: {', '.join(again)}" if again else "no step was repeated"
    return NOTES[note.code].format(num_tokens=note.num_tokens, num_attempts=len(note.attempts), left_out=left_out)


def checked_text(result: CheckResult, width: int | None = None) -> str:
    """Render a check: the verdict, then the evidence and the next command for every finding."""
    result = shown(result)
    inspected = (
        "all inspected individually"
        if result.num_sampled_tokens >= result.num_tokens
        else f"statistics on all, {result.num_sampled_tokens:,} inspected individually"
    )
    verdict = "VALID" if result.is_valid else f"NOT VALID, {BROKEN[result.broken]}"
    if [finding.code for finding in result.findings] == ["too_few"]:
        verdict = "TOO FEW TOKENS"
    head = f"{verdict}: {result.pair} of {result.trace}{of_steps(result.steps)}, {result.num_tokens:,} tokens ({inspected}), rms {result.rms_d:.3g} nats"
    blocks = [wrapped(head, "", width)]
    blocks += [_finding_text(number, finding, width) for number, finding in enumerate(result.findings, 1)]
    blocks += [wrapped(f"note: {note_text(note)}", "", width) for note in result.notes]
    return "\n\n".join(blocks)


def _finding_text(number: int, finding: Finding, width: int | None) -> str:
    title = f"{number}. {finding.title} ({finding.code})"
    lines = [title, wrapped(evidence_text(finding), _INDENT, width)]
    effect = "not a number" if math.isnan(finding.effect) else f"{finding.effect:.3g} nats rms"
    lines.append(f"{_INDENT}effect: {effect} on {finding.share:.2%} of the tokens")
    if finding.broken:
        lines.append(f"{_INDENT}broken: {finding.broken}")
    if finding.next:
        lines.append(f"{_INDENT}next: {finding.next}")
    return "\n".join(lines)


def of_steps(steps: str) -> str:
    """Return a phrase that names the steps covered by a result, to be put after the trace's name; empty if all steps
    are covered."""
    return "" if steps == ALL_STEPS else f" (steps {steps})"


def wrapped(text: str, indent: str, width: int | None) -> str:
    """Wrap text to a width, indenting each line; if the width is None, return one line."""
    if width is None:
        return indent + text
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def checked_json(result: CheckResult) -> dict[str, Any]:
    """Return a check result as JSON: codes, all numbers, and the sentences rendered from them."""
    findings = [
        asdict(finding)
        | {
            "title": finding.title,
            "fails": finding.fails,
            "broken": finding.broken,
            "evidence": evidence_text(finding),
        }
        for finding in result.findings
    ]
    notes = [note_text(note) for note in result.notes]
    codes = [note.code for note in result.notes]
    return asdict(result) | {
        "is_valid": result.is_valid,
        "broken": result.broken,
        "findings": findings,
        "notes": notes,
        "note_codes": codes,
    }


def _missing_at(numbers: Mapping[str, Any]) -> str:
    if numbers["place"] == "scattered":
        return f"scattered over {numbers['num_sequences']:,} sequences"
    if numbers["place"] == "whole":
        return f"(every token of {numbers['num_sequences']:,} of {numbers['of_sequences']:,} sequences)"
    return f"at the {numbers['place']} of {numbers['num_sequences']:,} of {numbers['of_sequences']:,} sequences"


def _fall(numbers: Mapping[str, Any]) -> str:
    """Return a phrase that says whether the trend of the mismatch along sequences points to a cache or to weights."""
    times = f"{1 / max(numbers['fall'], 1e-9):.2g} times that in the first ({abs(numbers['fall_score']):.1f} standard errors)"
    if numbers["fall"] > MIN_FALL and numbers["fall_score"] > MIN_FALL_SCORE:
        return f"{times}: the engine reused a prefix cache computed with older weights"
    return f"{times}: it does not fade along the sequence as a cached prompt would, so different weights are also possible; replay to find out"


def _pairs(numbers: Mapping[str, Any]) -> str:
    partners = {
        key.removeprefix("belongs_to/"): value for key, value in numbers.items() if key.startswith("belongs_to/")
    }
    first = ", ".join(f"{row} with {partner}" for row, partner in list(partners.items())[:4])
    return first + (", ..." if numbers["num_sequences"] > 4 else "")


def _recorded(numbers: Mapping[str, Any]) -> str:
    names = {
        "recorded_a": f"{numbers['a']}'s contract",
        "recorded_b": f"{numbers['b']}'s contract",
        "recorded_sampling": "sampling",
    }
    parts = [f"{name} {numbers[key]:g}" for key, name in names.items() if key in numbers]
    if "logprobs_mode" in numbers:
        parts.append(f"logprobs_mode {numbers['logprobs_mode']}")
    return f"; recorded: {', '.join(parts)}" if parts else ""


def _of_tensor(numbers: Mapping[str, Any]) -> str:
    """Return a phrase that says what the engine holds instead of the trainer's tensor."""
    tensor, cause = numbers["tensor"], numbers["cause"]
    if cause == "adapter":
        return f"the engine's {tensor} is the trainer's without its adapter, at version {numbers['trainer_version']}"
    if cause == "quantised":
        a_row = " per row" if str(numbers["dtype"]).endswith("values") else ""
        return f"the engine's {tensor} is the trainer's rounded to {numbers['dtype']}{a_row}"
    if cause == "other_weights":
        return f"the engine's {tensor} matches the trainer's at no recorded version, rounded or not"
    version, given = numbers["trainer_version"], numbers["given_version"]
    how = "it was never sent"
    if given is not None and not numbers["is_loaded"]:
        how = f"the tensor sent at version {given} was not loaded"
    elif given is not None:
        how = f"last sent at version {given}{', already stale then' if given != numbers['holds_version'] else ''}"
    holds = numbers["holds_version"]
    has = "from no recorded version" if holds is None else f"from version {holds}"
    return f"the engine's {tensor} is {has}, the trainer is at {version}; {how}"


def _of_weights(numbers: Mapping[str, Any]) -> Mapping[str, str | float]:
    along = numbers["along_movement"]
    late, ahead = ("b", "a") if along > 0 else ("a", "b")
    behind = (
        f"; the difference follows the weight updates ({abs(along):.1f} standard errors), as if {numbers[late]} lagged behind "
        f"{numbers[ahead]}"
    )
    return {
        "dtypes": " and ".join(numbers[f"dtype_{side}"] or "an unknown dtype" for side in "ab"),
        "share_of_tokens": max(numbers["token_effect"], 0.0),
        "behind_text": behind if abs(along) > MIN_ALONG else "",
    }
