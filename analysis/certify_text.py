from __future__ import annotations

from ..replay.certify.results import CERTIFIED, COUNTEREXAMPLE, UNDECIDED, Certificate, Counterexample, Coverage, ranges
from .rows import Form, counted, shown, wrapped

_MOST_LISTED = 8


def verdict_sentence(found: Certificate) -> str:
    of, recorded = found.arm or "recorded settings", "the recorded settings"
    pair = (
        f"{of}, batch against each sequence alone"
        if found.against is None
        else f"{of} against {found.against or recorded}"
    )
    bounds = f"batches of up to {counted(found.max_batch, 'sequence')}, {found.max_length} + {found.max_length} tokens"
    what = {
        CERTIFIED: "CERTIFIED: bitwise equal in every batch tried",
        COUNTEREXAMPLE: "NOT BITWISE EQUAL: found a batch that differs",
        UNDECIDED: "UNDECIDED: time ran out; no difference found so far",
    }
    return f"{what[found.verdict]} ({pair}; {bounds})."


def certificate_text(found: Certificate, width: int | None = None) -> str:
    found = shown(found)
    parts = [wrapped(verdict_sentence(found), "", width)]
    if found.counterexample:
        parts.append(_example(found.counterexample, width))
    parts.append(_covered(found.covered, found.seconds, width))
    if found.not_covered:
        listed = [wrapped(f"  {each}", "", width) for each in found.not_covered[:_MOST_LISTED]]
        parts.append("\n".join(["not covered:", *listed]))
    if found.file:
        parts.append(f"certificate: {found.file}\nnext: tim-trace gate RUN --certificate {found.file}")
    return "\n\n".join(parts)


def _example(one: Counterexample, width: int | None) -> str:
    count = len(one.prompt_lengths)
    lengths = ", ".join(
        f"{a}+{b}" for a, b in list(zip(one.prompt_lengths, one.response_lengths, strict=True))[:_MOST_LISTED]
    )
    more = ", ..." if count > _MOST_LISTED else ""
    layout = f", {one.layout}" if one.layout else ""
    pads = f", padding {one.pad_left} + {one.pad_right}" if one.pad_left or one.pad_right else ""
    history = " after another batch" if one.needs_history else ""
    again = "" if one.repeats else " When the batches ran again, the bits were equal."
    sentence = (
        f"smallest batch found{history}: {counted(count, 'row')} of {lengths}{more} tokens (prompt+response){layout}{pads}. "
        f"Row {one.row}, response token {one.token}: {one.value:.9g}, but {one.other:.9g}. "
        f"{counted(one.num_different, 'token differs', 'tokens differ')}, by up to {one.max_abs_d:.3g} nats.{again}"
    )
    return f"{wrapped(sentence, '', width)}\n{wrapped(f'trace: {one.folder}', '', width)}\nnext: {one.replay}"


def _covered(one: Coverage, seconds: float, width: int | None) -> str:
    calls = f", {one.num_calls:,} kinds of operator calls" if one.num_calls else ""
    lines = [
        f"covered: {counted(one.num_batches, 'batch', 'batches')} ({one.num_planned:,} planned) of {counted(one.num_sequences, 'sequence')} in {seconds:.0f} s, "
        f"{one.num_tokens:,} response tokens compared{calls}, {one.vocabulary:.0%} of the token ids",
        f"  rows: {ranges(one.row_counts)}",
        f"  prompt lengths: {ranges(one.prompt_lengths)}",
        f"  response lengths: {ranges(one.response_lengths)}",
        f"  layouts: {'; '.join(text or 'as the arm says' for text in one.layouts)}",
    ]
    return "\n".join(wrapped(line, "", width) for line in lines)


CERTIFICATE_FORM: Form = {Certificate: {"is_certified": Certificate.is_certified, "sentence": verdict_sentence}}
