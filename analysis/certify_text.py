from __future__ import annotations

from ..replay.certify.results import VERDICTS, Certificate, Counterexample, Coverage, ranges
from .rows import Form, counted, shown, wrapped

_MOST_LISTED = 8


def verdict_sentence(found: Certificate) -> str:
    other = ", batch against each sequence alone"
    if found.against is not None:
        other = f" against {found.against or 'the recorded settings'}"
    sequences = counted(found.max_batch, "sequence")
    bounds = f"batches of up to {sequences}, prompts and responses of up to {found.max_length} tokens"
    return f"{VERDICTS[found.verdict]} ({found.arm or 'recorded settings'}{other}; {bounds})."


def certificate_text(found: Certificate, width: int | None = None) -> str:
    found = shown(found)
    parts = [[verdict_sentence(found)]]
    if found.counterexample:
        parts.append(_example(found.counterexample))
    parts.append(_covered(found.covered, found.seconds))
    if found.not_covered:
        parts.append(["not covered:", *(f"  {each}" for each in found.not_covered[:_MOST_LISTED])])
    if found.file:
        parts.append([f"certificate: {found.file}", f"next: tim-trace gate RUN --certificate {found.file}"])

    def fitted(line: str) -> str:
        return line if line.startswith("next: ") else wrapped(line, "", width)

    return "\n\n".join("\n".join(map(fitted, lines)) for lines in parts)


def _example(one: Counterexample) -> list[str]:
    lengths = [f"{a}+{b}" for a, b in zip(one.prompt_lengths, one.response_lengths, strict=True)]
    more = ", ..." if len(lengths) > _MOST_LISTED else ""
    layout = f", {one.layout}" if one.layout else ""
    pads = f", padding {one.pad_left} + {one.pad_right}" if one.pad_left or one.pad_right else ""
    history = " after another batch" if one.needs_history else ""
    again = "" if one.repeats else " On a rerun, the two executions matched bit for bit."
    return [
        f"smallest batch found{history}: {counted(len(lengths), 'row')} of {', '.join(lengths[:_MOST_LISTED])}{more} "
        f"tokens (prompt+response){layout}{pads}. "
        f"Row {one.row}, response token {one.token}: {one.value:.9g} vs {one.other:.9g}. "
        f"{counted(one.num_different, 'token differs', 'tokens differ')}, by up to {one.max_abs_d:.3g} nats.{again}",
        f"trace: {one.folder}",
        f"next: {one.replay}",
    ]


def _covered(one: Coverage, seconds: float) -> list[str]:
    calls = f", {one.num_calls:,} kinds of operator calls" if one.num_calls else ""
    return [
        f"covered: {counted(one.num_batches, 'batch', 'batches')} ({one.num_planned:,} planned) made of "
        f"{counted(one.num_sequences, 'different sequence')} in {seconds:.0f} s, "
        f"{one.num_tokens:,} response tokens compared{calls}, {one.vocabulary:.0%} of the token ids",
        f"  rows: {ranges(one.row_counts)}",
        f"  prompt lengths: {ranges(one.prompt_lengths)}",
        f"  response lengths: {ranges(one.response_lengths)}",
        f"  layouts: {'; '.join(text or 'as set by the arm' for text in one.layouts)}",
    ]


CERTIFICATE_FORM: Form = {Certificate: {"is_certified": Certificate.is_certified, "sentence": verdict_sentence}}
