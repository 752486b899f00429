"""A check as text: every sentence that it says, made from codes and numbers."""

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

_ROWS_OFF = "{num_sequences:,} of {of_sequences:,} rows that are off"
_RMS = "(rms {effect:.2g} against {rms_elsewhere:.2g} nats)"
_WEIGHTS = (
    "the logits differ by {level:.2g} nats rms, where rounding of {dtypes} gives {allowed:.2g} at most, and "
    "{share_of_tokens:.0%} of it belongs to the tokens' identity"
)

EVIDENCE: Mapping[str, str] = {
    "missing": "{side} has {value} where {other} has a logprob, for {num_tokens:,} tokens {at}",
    "missing_in_both": "{side} and {other} have no finite logprob ({side}: {value}) for {num_tokens:,} tokens {at}",
    "missing_elsewhere": "{a} or {b} has NaN or an infinity for {num_tokens:,} tokens of steps that were not inspected one by one",
    "above_zero": "{side} has values above 0 for {num_tokens:,} tokens, from {least:.3g} to {largest:.3g}: a logprob is 0 at most, "
    "and no unit was found in which these agree with the other side",
    "constant_in_both": "{a} and {b} are both {value:g} for {num_tokens:,} tokens of {num_sequences:,} sequences in different "
    "contexts, far more often than any value near it",
    "constant_rows": "{side} has one value for all tokens of a sequence, and another for the next, where {other}'s vary: a mean or "
    "a sum of the sequence stands at each of its {num_tokens:,} tokens",
    "negative_entropies": "{side}'s values are the negative entropies of the distributions, not the logprobs of the {num_tokens:,} "
    "tokens that were drawn",
    "most_probable": "{side} is never below {other}, agrees where the token was the most probable one, and elsewhere leaves room "
    "for another: it holds the logprobs of the most probable tokens, not of the {num_tokens:,} that were drawn",
    "no_correlation": "the logprobs of {side} and {other} do not go together (correlation {correlation:.2f} over {num_tokens:,} "
    "tokens): they belong to other tokens, in no order that was found, or to another model",
    "constant": "{side} is {value:g} for {num_tokens:,} tokens of {num_sequences:,} sequences, where {other} has "
    "{other_mean:.3g} nats on average and anything down to {other_min:.3g}{reason_text}",
    "equal_bits": "all {num_tokens:,} tokens of {a} and {b} have the same bits, and {contracts_text}",
    "equal_against_contracts": "all {num_tokens:,} tokens of {a} and {b} have the same bits, although their contracts say "
    "{differing}: {copied_text}",
    "copied_rows": "{num_sequences:,} of {of_sequences:,} sequences have the same bits in both passes, and of the others' "
    "tokens {equal_elsewhere:.1%}: those rows were filled in from the other pass",
    "shared_unit": "{a} and {b} both hold {unit_text}: their mean is {mean_logprob:.3g} where the entropy is {mean_entropy:.3g} "
    "nats, and logprob + entropy averages to 0 over sampled tokens in that unit alone",
    "other_unit": "{side} holds {unit_text}: taken as these, nine tenths of the tokens agree to {residual:.2g} nats on "
    "average, as they stand to {size:.2g}",
    "moved_rows": "{b} stands {tokens_off} {direction} than {a}: moved back, the two differ by {moved:.2g} nats a token on "
    f"average, as they stand by {{unmoved:.2g}} (each at most {CAP_NATS:g})",
    "moved_after_place": f"{_ROWS_OFF} agree up to a token (its position: {{first_place}} to {{last_place}}) and, moved by "
    "{lags} tokens, after it: {joined_text}",
    "impossible_after_place": f"{_ROWS_OFF} agree up to a position of their own (token {{first_place}} to {{last_place}}), "
    "which one side finds impossible, and differ by {effect:.2g} nats rms from there on: the two sides scored different tokens",
    "other_rows": f"{_ROWS_OFF} agree with the {{side}} of another row of their step or the one beside: {{pairs}}",
    "kept_mass": "{side} is never below {other}: it was renormalised over the tokens that sampling kept, {kept_mass:.4g} of "
    "{other}'s mass on average and {least_mass:.3g} at least",
    "allowed_tokens": "the contract of {side} says that it was sampled under a grammar (structured outputs): its logprobs are over "
    "the tokens that the grammar allows, {other}'s over all; of {of_tokens:,} such tokens {num_tokens:,} are higher in {side} "
    "beyond rounding, by {largest:.3g} nats at most, and {num_lower:,} lower",
    "lost_mass": "{side} is never above {other}: {lost_mass:.3g} of its probability goes to something that no token stands "
    "for, as rows of the head beyond the tokenizer's length do: mask these",
    "scaled_logits": "{b}'s logits are {a}'s divided by {temperature:.3g} (fitted, {least:.3g} to {largest:.3g}; {r2:.0%} of the "
    "mismatch follows it)"
    "{recorded_text}",
    "common_place": "{larger} token {position} of {counted_text}{on}, in all sequences alike, the mismatch is {ratio:.3g} times "
    f"as large {_RMS}",
    "own_places": "in {num_sequences:,} of {of_sequences:,} sequences the mismatch is {ratio:.3g} times as large {after} a "
    "position of their own (token {first_place} to {last_place}): weights or cached keys and values were exchanged while "
    "these were being sampled",
    "prefix_cache": "the {num_sequences:,} sequences whose prompt came at an earlier step have a mismatch {ratio:.3g} times "
    f"that of the others {_RMS}; in the last third of a sequence it is {{fall_text}}",
    "persistence": "the logits differ by {level:.2g} nats rms; neighbouring tokens are off alike (correlation "
    "{persistence:.2f} of the size of d), and sequences are not ({sequence_score:.0f} standard deviations): weights or cached "
    "prefixes changed while they were being sampled",
    "column": "{num_sequences:,} of {of_sequences:,} sequences, those with {column} {values}, have a mismatch {ratio:.3g} "
    f"times that of the others {_RMS}",
    "rounded_logprobs": "every logprob of {side} is a {dtype} number: the {part} was computed or stored in low precision",
    "rounded_logits": "the logits of {side} lie on {dtype}'s grid, although its contract says float32: the {part} was computed "
    "or stored in low precision",
    "router_tail": "{experts_text}: {tail_share:.2%} of the tokens lie more than {tail_ratio:g} times as far off as the "
    "median one ({bulk:.2g} nats of a logit), and are those whose router chose other experts",
    "unlikely_runs": "in {num_sequences:,} of {of_sequences:,} sequences runs of tokens, {num_tokens:,} in all, have "
    "{mean_logprob:.3g} nats on average on both sides where their entropy is {mean_entropy:.3g}: sampling does not draw "
    "these; they are a prompt's or a tool's, and count in the loss",
    "policy_versions": "{num_sequences:,} of {of_sequences:,} sequences were scored by {side} with weights {updates_behind} "
    "optimizer updates behind the other side's, as the recorded policy versions say",
    "contract": "the contract of {side} says {setting} {value}",
    "one_adapter": "only {side} has an adapter, and " + _WEIGHTS,
    "logits": _WEIGHTS + "{behind_text}; logprobs alone do not say why: the replay decides",
    "engine_weights": "{what_text}; {num_tensors:,} of {of_tensors:,} tensors are so at version {trainer_version}, and some at "
    "{num_versions:,} of {of_versions:,} versions, from {first_version} on: digests of every tensor say it",
    "equal_weights": "the engine sampled with the trainer's weights, every tensor of them, as their digests say; and the logits "
    "differ by {level:.2g} nats rms, where rounding of {dtypes} gives {allowed:.2g} at most",
    "too_few": "{num_tokens:,} tokens compare: from fewer than {least:,} nothing is told but missing values and equal bits; record "
    "more sequences",
    "rounding": "the logits differ by {level:.2g} nats rms, within {allowed:.2g} that rounding of {dtypes} gives at most, and "
    "no pattern was found in it",
}
"""Code of a signal -> the evidence, with the finding's numbers in it."""

_REASONS = {
    "begin_alike": "; they begin all sequences of a prompt alike, and belong to it",
    "improbable": "; elsewhere {elsewhere_mean:.3g}: these tokens were not drawn from the policy",
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
        "contracts_text": "their contracts name the same numerics"
        if n["contracts_known"]
        else "no contract says that they should differ"
    },
    "equal_against_contracts": lambda n: {
        "copied_text": "two such forwards do not agree bit for bit, so one was filled in from the other"
        if "dtype_a" in n
        else "one was filled in from the other, or the two are made to agree bit for bit: a replay decides",
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
        "joined_text": "turns were joined one off there"
        if n["code"] == "shift"
        else "the text was decoded and encoded into other tokens there"
    },
    "other_rows": lambda n: {"pairs": _pairs(n)},
    "scaled_logits": lambda n: {"recorded_text": _recorded(n)},
    "common_place": lambda n: {"counted_text": _COUNTED[n["counted"]], "on": " on" if n["larger"] == "from" else ""},
    "own_places": lambda n: {"after": "after" if n["larger"] == "from" else "before"},
    "router_tail": lambda n: {
        "experts_text": "the model is a mixture of experts"
        if n["experts_known"]
        else "as routers of a mixture of experts do"
    },
    "one_adapter": lambda n: _of_weights(n),
    "engine_weights": lambda n: {"what_text": _of_tensor(n)},
    "equal_weights": lambda n: _of_weights(n),
    "logits": lambda n: _of_weights(n),
    "rounding": lambda n: {
        "dtypes": " and ".join(f"{n[f'dtype_{side}'] or 'an unknown dtype'} ({n[side]})" for side in "ab")
    },
}
"""Code of a signal -> the words that its template takes beside the numbers."""

NOTES: Mapping[str, str] = {
    "few_tokens": "only {num_tokens:,} tokens compare: faults near the level of rounding cannot be seen in so few; record more "
    "sequences",
    "no_contract": "a pass has no contract, so its dtype, adapters and sampling are known from its numbers alone; record with "
    "`tim-trace record`, or give Recorder.add_contract",
    "no_entropies": "no entropies are recorded: tokens that nobody sampled, but both sides scored, cannot be seen",
    "few_steps": "fewer than three steps: whether the mismatch points along the movement of the weights cannot be seen",
    "no_prompts": "no prompts are recorded: the precision of logits, and caches of prompts, cannot be seen",
    "attempts": "the run has {num_attempts} attempts at training, and each step counts as its newest one made it; {left_out}",
}
"""Code of a note -> its sentence."""

BROKEN: Mapping[str | None, str] = {
    "recording": "the recording is broken",
    "engine": "an engine is broken",
    "versions": "two versions of the weights are compared, as the trace says",
}
"""What is broken -> in words."""


def evidence_text(finding: Finding) -> str:
    """What was seen, with its numbers, in a sentence."""
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
        text += f"; all of it from step {numbers['since_step']} on, before which the two agree"
    if "behind" in numbers:
        text += f"; seen once that is put right: {TITLES[str(numbers['behind'])]}"
    return f"{text}; the recorded engines and dtypes make it without a fault" if finding.is_expected else text


def note_text(note: Note) -> str:
    """A note as a sentence."""
    again = [
        f"{'step' if steps[0][0] == steps[-1][1] else 'steps'} {steps_text(steps)} of attempt {attempt.attempt}"
        for attempt in note.attempts
        if (steps := attempt.superseded)
    ]
    left_out = f"left out, since made again: {', '.join(again)}" if again else "no step was made twice"
    return NOTES[note.code].format(num_tokens=note.num_tokens, num_attempts=len(note.attempts), left_out=left_out)


def checked_text(result: CheckResult, width: int | None = None) -> str:
    """Write what a check found, for reading: the verdict, and the evidence and next command of every finding."""
    result = shown(result)
    inspected = (
        "all inspected individually"
        if result.num_sampled_tokens >= result.num_tokens
        else f"statistics on all, {result.num_sampled_tokens:,} inspected individually"
    )
    verdict = "VALID" if result.is_valid else f"NOT VALID, {BROKEN[result.broken]}"
    if [finding.code for finding in result.findings] == ["too_few"]:
        verdict = "TOO FEW TOKENS TO SAY"
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
    """Which steps a result is of, after the name of its trace; an empty text where it is of all."""
    return "" if steps == ALL_STEPS else f" (steps {steps})"


def wrapped(text: str, indent: str, width: int | None) -> str:
    """Text broken into lines of a width, each with the indent; one line where no width is given."""
    if width is None:
        return indent + text
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def checked_json(result: CheckResult) -> dict[str, Any]:
    """The same as JSON can say it: codes, every number, and the sentences made from them."""
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
        return f"that are all of {numbers['num_sequences']:,} of {numbers['of_sequences']:,} sequences"
    return f"at the {numbers['place']} of {numbers['num_sequences']:,} of {numbers['of_sequences']:,} sequences"


def _fall(numbers: Mapping[str, Any]) -> str:
    """What the level along the sequences says of a cache against weights."""
    times = f"{1 / max(numbers['fall'], 1e-9):.2g} times that in the first ({abs(numbers['fall_score']):.1f} standard errors)"
    if numbers["fall"] > MIN_FALL and numbers["fall_score"] > MIN_FALL_SCORE:
        return f"{times}: the engine took keys and values of the prompt from its prefix cache, and older weights had computed these"
    return f"{times}: a cached prompt would be left behind, so that other weights explain it as well; a replay decides"


def _pairs(numbers: Mapping[str, Any]) -> str:
    partners = {
        key.removeprefix("belongs_to/"): value for key, value in numbers.items() if key.startswith("belongs_to/")
    }
    told = ", ".join(f"{row} with {partner}" for row, partner in list(partners.items())[:4])
    return told + (", ..." if numbers["num_sequences"] > 4 else "")


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
    """What the engine has in the place of one of the trainer's tensors."""
    tensor, cause = numbers["tensor"], numbers["cause"]
    if cause == "adapter":
        return f"the engine's {tensor} is the trainer's without its adapter, at version {numbers['trainer_version']}"
    if cause == "quantised":
        a_row = " a row" if str(numbers["dtype"]).endswith("values") else ""
        return f"the engine's {tensor} is the trainer's rounded to {numbers['dtype']}{a_row}"
    if cause == "other_weights":
        return f"the engine's {tensor} is none that the trainer had at a recorded version, nor one of these rounded"
    version, given = numbers["trainer_version"], numbers["given_version"]
    how = "it was never given"
    if given is not None and not numbers["is_loaded"]:
        how = f"what it was given at version {given} was not loaded"
    elif given is not None:
        how = f"it was given last at version {given}{', and was old then' if given != numbers['holds_version'] else ''}"
    holds = numbers["holds_version"]
    has = "none that the trainer had" if holds is None else f"that of version {holds}"
    return f"the engine's {tensor} is {has}, the trainer is at {version}; {how}"


def _of_weights(numbers: Mapping[str, Any]) -> Mapping[str, str | float]:
    along = numbers["along_movement"]
    late, ahead = ("b", "a") if along > 0 else ("a", "b")
    behind = (
        f"; it points along the movement of the weights ({abs(along):.1f} standard errors), as if {numbers[late]} were behind "
        f"{numbers[ahead]}"
    )
    return {
        "dtypes": " and ".join(numbers[f"dtype_{side}"] or "an unknown dtype" for side in "ab"),
        "share_of_tokens": max(numbers["token_effect"], 0.0),
        "behind_text": behind if abs(along) > MIN_ALONG else "",
    }
