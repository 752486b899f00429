from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..schemas.documents import CLOSED, FAILED, OPEN, WriterState, command_exit_code
from ..schemas.layout import DENSE, FOLDERS, MANIFEST, WEIGHTS
from ..schemas.passes import REPLAY_PREFIX, standard_first
from ..schemas.results import Result
from ..tracer.environment import NUMERIC_LIBRARIES
from ..tracer.liveness import AGE, RESTARTED, SILENT_S
from ..tracer.located import result_ids
from .trace.columns import AttemptInfo, attempts, sample_sentence, sampled_passes, scored_passes
from .trace.database import Database
from .trace.source import Source, open_source
from .trace.tokens import step_ranges
from .views import open_database

LIVE, FINISHED, KILLED, STOPPED = "live", "finished", "killed", "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterInfo:
    writer: str
    state: str
    """`live`, `finished`, `killed` (exited without closing) or `stopped` (recording failed)."""
    host: str
    pid: int
    rank: int | None
    attempt: int | None
    """Training attempt that the writer belongs to. None outside training, or if not recorded."""
    known_by: str
    """How `state` was determined: from the writer's closing entry (`closed`), its process (`process`), a restart of its
    machine (`restarted`), or the time since its last heartbeat (`age`)."""
    silent_s: float | None
    """Seconds since the writer's last heartbeat, if `known_by` is `age`."""
    num_sequences: int
    num_tokens: int
    waited_s: float
    """Seconds that training spent waiting for the disk."""
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassInfo:
    name: str
    num_rows: int
    """Number of score rows with logprobs."""
    num_sequences: int
    engine: str | None
    num_contracts: int
    num_captured: int
    num_routed: int
    """Number of score rows with router choices."""
    note: str | None
    """Reason why scores are missing or cover only a sample, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceInfo(Result):
    _text = "tim_trace.analysis.info_text:info_text"

    run: str
    path: str
    run_id: str
    format_version: int
    created_at: str
    created_by: str
    source: str
    command: tuple[str, ...]
    exit_code: int | None
    """Exit code of `command`. None if the command is still running, or if the trace was recorded without one."""
    state: str
    capture: str
    capture_fraction: float
    model: str | None
    num_parameters: int | None
    model_dtypes: dict[str, int]
    tokenizer: str | None
    versions: dict[str, str]
    """Versions of Python and relevant libraries."""
    first_step: int | None
    last_step: int | None
    num_steps: int
    """Steps with sequences or, in a trace without sequences, steps with logged values."""
    num_sequences: int
    num_prompt_tokens: int
    num_response_tokens: int
    num_metrics: int
    num_eval_sequences: int
    """Sequences sampled for evaluation. No other count includes them."""
    num_eval_steps: int
    passes: tuple[PassInfo, ...]
    writers: tuple[WriterInfo, ...]
    num_bytes: dict[str, int]
    """Size in bytes of each folder in the trace. `dense` contains the captured distributions."""
    num_captured: int
    num_located: int = 0
    attempts: tuple[AttemptInfo, ...] = field(default=())
    """Training attempts, if the run resumed from a checkpoint."""
    judged: tuple[str, ...] = field(default=())
    """One sentence per writer process that cannot be seen from this machine, saying why it counts as live or ended."""
    missing: tuple[str, ...] = field(default=())
    """One sentence per kind of missing data."""
    damaged: tuple[str, ...] = field(default=())
    """One sentence per unreadable or missing file. No result includes data from these files."""
    ignored: tuple[str, ...] = field(default=())
    """One sentence per file that does not belong to the trace."""


def info(trace: str | os.PathLike[str] | Database) -> TraceInfo:
    """Summarize a trace: contents, writers, and missing or damaged data.

    Raises TraceNotFound, NewerTrace, or DamagedTrace if the trace cannot be opened.
    """
    database = trace if isinstance(trace, Database) else open_database(open_source(os.fspath(trace)))
    source = database.sources[0]
    written = dict((name, counts) for name, *counts in database.connection.execute(_WRITTEN).fetchall())
    writers = [
        _writer(source, state, *written.get(state.writer, (0, 0))) for state in source.writers if not state.is_launcher
    ]
    model = next((state.model for state in source.writers if state.model), {})
    tokenizer = next((state.tokenizer for state in source.writers if state.tokenizer), {})
    versions = next((state.versions for state in source.writers if state.versions), {})
    (counts,) = database.ask(_COUNTS).dicts()
    not_recorded = dict.fromkeys(sentence for state in source.writers for sentence in state.not_recorded)
    missing = [*_missing(database, source, writers), *_replay_lacks(source, counts)]
    return TraceInfo(
        run=source.run, path=source.store.url, exit_code=command_exit_code(source.writers),
        state=_state(source, writers), model=model.get("name") or model.get("class"),
        num_parameters=model.get("num_parameters"), model_dtypes=dict(model.get("dtypes") or {}),
        tokenizer=tokenizer.get("name") or tokenizer.get("class"),
        versions={name: versions[name] for name in ("python", *NUMERIC_LIBRARIES) if name in versions},
        passes=_passes(database), writers=tuple(writers), num_bytes=_bytes(source),
        num_located=len(result_ids(source.store)), attempts=attempts(database), judged=tuple(_judged(source)),
        missing=(*missing, *(f"not recorded: {sentence}" for sentence in not_recorded)),
        damaged=tuple(source.damaged), ignored=tuple(source.ignored),
        **{name: getattr(source.manifest, name) for name in _OF_MANIFEST}, **counts,
    )  # fmt: skip


_OF_MANIFEST = (
    "run_id", "format_version", "created_at", "created_by", "source", "command", "capture", "capture_fraction",
)  # fmt: skip


_COUNTS = """
    WITH logged AS (SELECT DISTINCT step FROM metrics WHERE NOT starts_with(name, 'hyperparameter/'))
    SELECT coalesce(min(step), (SELECT min(step) FROM logged)) AS first_step,
           coalesce(max(step), (SELECT max(step) FROM logged)) AS last_step,
           CASE WHEN count(*) > 0 THEN count(DISTINCT step) ELSE (SELECT count(*) FROM logged) END AS num_steps,
           count(*) AS num_sequences,
           coalesce(sum(num_prompt_tokens), 0)::BIGINT AS num_prompt_tokens,
           coalesce(sum(num_response_tokens), 0)::BIGINT AS num_response_tokens,
           (SELECT count(*) FROM metrics) AS num_metrics,
           (SELECT count(*) FROM eval_sequences) AS num_eval_sequences,
           (SELECT count(DISTINCT step) FROM eval_sequences) AS num_eval_steps,
           (SELECT count(dense) FROM scores) AS num_captured
    FROM sequences
"""

_WRITTEN = """
    SELECT writer, count(*), sum(num_response_tokens)::BIGINT FROM sequences GROUP BY writer
"""


_PASSES = """
    SELECT coalesce(counted."pass", agreed."pass") AS name,
           coalesce(num_rows, 0) AS num_rows, coalesce(num_sequences, 0) AS num_sequences,
           coalesce(num_captured, 0) AS num_captured, coalesce(num_routed, 0) AS num_routed,
           engine, coalesce(num_contracts, 0) AS num_contracts,
           CASE WHEN coalesce(num_rows, 0) = 0 THEN note
                ELSE 'logprobs rounded to ' || stored_as || ' in the imported file' END AS note
    FROM (
        SELECT "pass", count(*) AS num_rows, count(*) FILTER (iteration = 0) AS num_sequences,
               count(dense) AS num_captured, count(routing) AS num_routed
        FROM scores GROUP BY "pass"
    ) AS counted
    FULL JOIN (
        SELECT "pass", any_value(engine) AS engine, count(*) AS num_contracts,
               any_value(json_extract_string(contract_json, '$.logprobs_note')) AS note,
               any_value(json_extract_string(contract_json, '$.stored_as')) AS stored_as
        FROM passes GROUP BY "pass"
    ) AS agreed ON agreed."pass" = counted."pass"
"""

_STEPS = "SELECT step, count(*) FROM sequences GROUP BY step ORDER BY step"

_UNSCORED = """
    SELECT wanted.name, count(*) AS num_missing, min(s.step) AS first_step, max(s.step) AS last_step
    FROM (SELECT step, seq_id FROM sequences WHERE step BETWEEN $first AND $last) AS s
    CROSS JOIN (SELECT unnest($names::VARCHAR[]) AS name) AS wanted
    ANTI JOIN (SELECT DISTINCT "pass" AS name, step, seq_id FROM scores WHERE step BETWEEN $first AND $last) AS scored
           ON scored.name = wanted.name AND scored.step = s.step AND scored.seq_id = s.seq_id
    GROUP BY wanted.name
"""

_TWICE = """
    SELECT count(*), min(step), min_by(seq_id, (step, seq_id))
    FROM (
        SELECT step, seq_id FROM sequences WHERE step BETWEEN $first AND $last GROUP BY step, seq_id HAVING count(*) > 1
    )
"""

RANGE_SEQUENCES = 1 << 18
"""Maximum number of sequences per query. A step with more sequences gets its own query."""


def _passes(database: Database) -> tuple[PassInfo, ...]:
    found = [PassInfo(**row) for row in database.ask(_PASSES).dicts()]
    samples = {name: sample_sentence(*counts) for name, counts in sampled_passes(database).items()}
    found = [replace(each, note=samples.get(each.name, each.note)) for each in found]
    return tuple(sorted(found, key=lambda each: standard_first(each.name)))


def _missing(database: Database, source: Source, writers: list[WriterInfo]) -> list[str]:
    found = []
    sequences = dict(database.connection.execute(_STEPS).fetchall())
    ranges, total = step_ranges(sequences, RANGE_SEQUENCES), sum(sequences.values())
    names = [name for name in scored_passes(database) if not name.startswith(REPLAY_PREFIX)]
    unscored = _of_ranges(database, _UNSCORED, ranges if names else (), names=names)
    for name in names:
        if rows := [row for row in unscored if row[0] == name]:
            _, counts, firsts, lasts = zip(*rows, strict=True)
            first, last = min(firsts), max(lasts)
            where = f"step {first}" if first == last else f"steps {first} to {last}"
            found.append(f"{sum(counts)} of {total} sequences have no scores from pass {name!r} ({where})")
    if twice := [row for row in _of_ranges(database, _TWICE, ranges) if row[0]]:
        _, step, seq_id = twice[0]
        found.append(
            f"{sum(row[0] for row in twice)} sequences were recorded twice (first: step {step}, {seq_id!r}) and are counted twice: two processes "
            "used the same seq_id; give each sequence its own seq_id"
        )
    for writer in writers:
        if writer.state == KILLED:
            found.append(f"writer {writer.writer} exited without closing: rows not yet written are lost")
        elif writer.state == STOPPED:
            found.append(f"writer {writer.writer} stopped recording early: {writer.error}")
    for state in source.writers:
        if state.is_launcher and state.state == OPEN and not source.liveness[state.writer].is_alive:
            found.append("`tim-trace record` exited before its command, so the exit code of the command is unknown")
    if source.torn_bytes and source.is_live:
        found.append(f"a writer is still appending {source.torn_bytes} bytes")
    return found


def _replay_lacks(source: Source, counts: Mapping[str, int]) -> list[str]:
    if not source.manifest.is_import or not counts["num_sequences"]:
        return []
    if not counts["num_response_tokens"]:
        return ["no token ids, so the trace cannot be replayed; import a dump with token ids, or record the run"]
    if not counts["num_prompt_tokens"]:
        return [
            "no prompt token ids, so the trace cannot be replayed; import files that have them (--map "
            "THEIRS=prompt_ids if the field has a different name)"
        ]
    if source.store.exists(WEIGHTS):
        return []
    attach = f"tim-trace weights {shlex.quote(source.store.url)} --attach VERSION DIR"
    return [f"no weights, so the trace cannot be replayed; attach a Hugging Face folder: {attach}"]


def _of_ranges(database: Database, query: str, ranges: Sequence[range], **values: object) -> list[tuple[Any, ...]]:
    asked = [values | {"first": steps.start, "last": steps.stop - 1} for steps in ranges]
    return [row for each in asked for row in database.connection.execute(query, each).fetchall()]


def _judged(source: Source) -> list[str]:
    found = []
    for state in source.writers:
        judged = source.liveness[state.writer]
        who = f"writer {state.writer} (process {state.pid} on {state.host or 'an unknown host'})"
        if judged.how == RESTARTED:
            found.append(f"{who} has ended: this machine has been restarted since its last heartbeat")
        elif judged.how == AGE:
            age = "the age of its files is unknown"
            if judged.silent_s is not None:
                age = f"its last heartbeat was {duration(judged.silent_s)} ago (limit: {duration(SILENT_S)})"
            counts = "live" if judged.is_alive else "ended"
            found.append(f"{who} counts as {counts}: its process cannot be seen from here, and {age}")
    return found


def _writer(source: Source, state: WriterState, num_sequences: int, num_tokens: int) -> WriterInfo:
    found = source.liveness[state.writer]
    kind = {CLOSED: FINISHED, FAILED: STOPPED}.get(state.state, LIVE if found.is_alive else KILLED)
    return WriterInfo(
        state=kind, known_by=found.how, silent_s=found.silent_s, num_sequences=num_sequences, num_tokens=num_tokens,
        **{name: getattr(state, name) for name in ("writer", "host", "pid", "rank", "attempt", "waited_s", "error")},
    )  # fmt: skip


def duration(seconds: float) -> str:
    """Format a duration in a suitable unit.

    >>> duration(40.2), duration(900), duration(20_000), duration(3 * 86400)
    ('40 s', '15 min', '6 h', '3 d')
    """
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def state_of(source: Source) -> str:
    return _state(source, [_writer(source, state, 0, 0) for state in source.writers if not state.is_launcher])


def _state(source: Source, writers: list[WriterInfo]) -> str:
    if source.is_live:
        return LIVE
    states = {writer.state for writer in writers}
    return next((state for state in (STOPPED, KILLED) if state in states), FINISHED)


def _bytes(source: Source) -> dict[str, int]:
    sizes = {folder: source.store.size(folder) for folder in FOLDERS}
    sizes[MANIFEST] = len(source.store.read_bytes(MANIFEST))
    return {name: size for name, size in sizes.items() if size or name == DENSE}
