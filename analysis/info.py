"""What a trace holds, who wrote it, and what is missing from it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..schemas.layout import DENSE, FOLDERS, MANIFEST, WEIGHTS
from ..schemas.passes import REPLAY_PREFIX, STANDARD
from ..schemas.results import Result
from ..schemas.writer_state import CLOSED, FAILED, OPEN, WriterState, command_exit_code
from ..tracer.environment import NUMERIC_LIBRARIES
from ..tracer.liveness import AGE, RESTARTED, SILENT_S
from ..tracer.located.result_files import result_ids
from .trace.columns import scored_passes
from .trace.database import Database
from .trace.samples import sample_sentence, sampled_passes
from .trace.source import Source, open_source

LIVE, FINISHED, KILLED, STOPPED = "live", "finished", "killed", "stopped"


_Range = tuple[int, int, int]
"""First and last step, and how many sequences they have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterInfo:
    """One process that wrote to the trace."""

    writer: str
    state: str
    """`live`, `finished`, `killed` (it ended without closing) or `stopped` (its recording failed)."""
    host: str
    pid: int
    rank: int | None
    attempt: int | None
    """Attempt at training that it belongs to; None outside of training, and from releases that did not say."""
    known_by: str
    """How it is known whether it still writes: it said so (`closed`), its `process` is there or not, its machine was
    `restarted` since, or the `age` of its last sign."""
    silent_s: float | None
    """Seconds since its last sign, where its age decided."""
    num_sequences: int
    num_tokens: int
    waited_s: float
    """Time that training waited for the disk, seconds."""
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassInfo:
    """One pass."""

    name: str
    num_rows: int
    """Rows of scores that have logprobs."""
    num_sequences: int
    engine: str | None
    num_contracts: int
    num_captured: int
    """Rows of scores that have captured distributions."""
    num_routed: int
    """Rows of scores that have router choices."""
    note: str | None
    """What the contract says where there are no scores, or that they are of a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptInfo:
    """One attempt at training of a run that resumed."""

    attempt: int
    first_step: int
    last_step: int
    num_sequences: int
    num_superseded: int
    """Sequences of steps that a later attempt made again: views leave them out."""
    superseded: tuple[tuple[int, int], ...] = ()
    """The steps that a later attempt made again, as first and last step of each run of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceInfo(Result):
    """What a trace holds."""

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
    """How the recorded command ended; None while it runs or when there was none."""
    state: str
    """`live`, `finished`, `killed` or `stopped`."""
    capture: str
    capture_fraction: float
    model: str | None
    num_parameters: int | None
    model_dtypes: dict[str, int]
    tokenizer: str | None
    versions: dict[str, str]
    """Versions of the libraries that decide numbers."""
    first_step: int | None
    last_step: int | None
    num_steps: int
    num_sequences: int
    num_prompt_tokens: int
    num_response_tokens: int
    num_metrics: int
    num_eval_sequences: int
    """Sequences that were sampled to evaluate; in none of the numbers above."""
    num_eval_steps: int
    passes: tuple[PassInfo, ...]
    writers: tuple[WriterInfo, ...]
    num_bytes: dict[str, int]
    """Folder -> bytes; `dense` is what captured distributions take."""
    num_captured: int
    """Rows of scores that have captured distributions."""
    num_located: int = 0
    """Results of `locate`."""
    attempts: tuple[AttemptInfo, ...] = field(default=())
    """Attempts at training, where there are several: a run that resumed from a checkpoint."""
    has_checksums: bool = True
    """Whether every file has checksums; those of earlier releases have none, so that damage inside of them is not seen."""
    judged: tuple[str, ...] = field(default=())
    """How it is known that a process still writes or does not, where its process cannot be seen from here, a sentence each."""
    missing: tuple[str, ...] = field(default=())
    """What the trace lacks, a sentence each."""
    damaged: tuple[str, ...] = field(default=())
    """What cannot be read or is missing and is in no answer, a sentence each."""
    ignored: tuple[str, ...] = field(default=())
    """What lies there and is no part of the trace, a sentence each."""


def info(trace: str | Database) -> TraceInfo:
    """Say what a trace holds, who wrote it, what is missing and what is damaged.

    Raises TraceNotFound, NewerTrace or DamagedTrace when there is no trace to look at.
    """
    database = trace if isinstance(trace, Database) else Database(open_source(os.fspath(trace)))
    source = database.sources[0]
    written = dict((name, counts) for name, *counts in database.connection.execute(_WRITTEN).fetchall())
    writers = [
        _writer(source, state, *written.get(state.writer, (0, 0))) for state in source.writers if not state.is_launcher
    ]
    model = next((state.model for state in source.writers if state.model), {})
    tokenizer = next((state.tokenizer for state in source.writers if state.tokenizer), {})
    versions = next((state.versions for state in source.writers if state.versions), {})
    counts = _one(database, _COUNTS)
    manifest = source.manifest
    return TraceInfo(
        run=source.run,
        path=source.store.url,
        run_id=manifest.run_id,
        format_version=manifest.format_version,
        created_at=manifest.created_at,
        created_by=manifest.created_by,
        source=manifest.source,
        command=manifest.command,
        exit_code=command_exit_code(source.writers),
        state=_state(source, writers),
        capture=manifest.capture,
        capture_fraction=manifest.capture_fraction,
        model=model.get("name") or model.get("class"),
        num_parameters=model.get("num_parameters"),
        model_dtypes=dict(model.get("dtypes") or {}),
        tokenizer=tokenizer.get("name") or tokenizer.get("class"),
        versions={name: versions[name] for name in ("python", *NUMERIC_LIBRARIES) if name in versions},
        passes=_passes(database),
        writers=tuple(writers),
        num_bytes=_bytes(source),
        num_located=len(result_ids(source.store)),
        attempts=attempts(database),
        has_checksums=not source.snapshot.unchecked,
        judged=tuple(_judged(source)),
        missing=(*_missing(database, source, writers), *_replay_lacks(source, counts), *_not_recorded(source)),
        damaged=tuple(source.damaged),
        ignored=tuple(source.snapshot.ignored),
        **counts,
    )


_COUNTS = """
    SELECT min(step) AS first_step, max(step) AS last_step, count(DISTINCT step) AS num_steps,
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

_ATTEMPTS = """
    SELECT attempt, min(step) AS first_step, max(step) AS last_step, count(*) AS num_sequences,
           count(*) FILTER (attempt < newest) AS num_superseded,
           list_sort(list(DISTINCT step) FILTER (attempt < newest)) AS superseded
    FROM (SELECT step, attempt, max(attempt) OVER (PARTITION BY step) AS newest FROM all_sequences)
    WHERE attempt IS NOT NULL
    GROUP BY attempt
    ORDER BY attempt
"""

_PASSES = """
    SELECT coalesce(counted."pass", agreed."pass") AS name,
           coalesce(num_rows, 0) AS num_rows, coalesce(num_sequences, 0) AS num_sequences,
           coalesce(num_captured, 0) AS num_captured, coalesce(num_routed, 0) AS num_routed,
           engine, coalesce(num_contracts, 0) AS num_contracts,
           CASE WHEN coalesce(num_rows, 0) = 0 THEN note END AS note
    FROM (
        SELECT "pass", count(*) AS num_rows, count(*) FILTER (iteration = 0) AS num_sequences,
               count(dense) AS num_captured, count(routing) AS num_routed
        FROM scores GROUP BY "pass"
    ) AS counted
    FULL JOIN (
        SELECT "pass", any_value(engine) AS engine, count(*) AS num_contracts,
               any_value(json_extract_string(contract_json, '$.logprobs_note')) AS note
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
"""Sequences whose names are compared at once; a larger step is one alone."""


def _passes(database: Database) -> tuple[PassInfo, ...]:
    cursor = database.connection.execute(_PASSES)
    names = [column[0] for column in cursor.description]
    found = [PassInfo(**dict(zip(names, row, strict=True))) for row in cursor.fetchall()]
    samples = {name: sample_sentence(*counts) for name, counts in sampled_passes(database).items()}
    found = [replace(each, note=samples.get(each.name, each.note)) for each in found]
    order = {name: place for place, name in enumerate(STANDARD)}
    return tuple(sorted(found, key=lambda p: (order.get(p.name, len(order)), p.name)))


def _missing(database: Database, source: Source, writers: list[WriterInfo]) -> list[str]:
    """What a reader would look for and not find."""
    found = []
    ranges = list(_ranges(database))
    total = sum(num_sequences for _, _, num_sequences in ranges)
    for name, count, first, last in _unscored(database, ranges):
        where = f"step {first}" if first == last else f"steps {first} to {last}"
        found.append(f"{count} of {total} sequences have no scores of pass {name!r} ({where})")
    count, step, seq_id = _twice(database, ranges)
    if count:
        found.append(
            f"{count} sequences were recorded twice (first: step {step}, {seq_id!r}): two processes gave the same seq_id; "
            "their pairs are counted more than once"
        )
    for writer in writers:
        if writer.state == KILLED:
            found.append(f"writer {writer.writer} ended without closing: rows not yet appended are lost")
        elif writer.state == STOPPED:
            found.append(f"writer {writer.writer} stopped recording early: {writer.error}")
    for state in source.writers:
        if state.is_launcher and state.state == OPEN and not source.snapshot.liveness[state.writer].is_alive:
            found.append("`tim-trace record` exited before its command, so the exit code of the command is unknown")
    if source.snapshot.torn_bytes and source.is_live:
        found.append(f"{source.snapshot.torn_bytes} bytes are being appended right now")
    return found


def _replay_lacks(source: Source, counts: Mapping[str, int]) -> list[str]:
    """Why what was imported cannot be scored again, and what to do."""
    if not source.manifest.is_import or not counts["num_sequences"]:
        return []
    if not counts["num_response_tokens"]:
        return [
            "token ids, so that nothing can score these texts again: import a dump that has them, or record the run"
        ]
    if not counts["num_prompt_tokens"]:
        return [
            "token ids of the prompts, so that replay cannot score it again: import files that have them; --map THEIRS=prompt_ids "
            "reads a field of another name"
        ]
    if source.store.exists(WEIGHTS):
        return []
    return [
        "weights, so that replay cannot score it again: tim-trace weights "
        f"{shlex.quote(source.store.url)} --attach VERSION DIR takes those of a Hugging Face folder"
    ]


def _ranges(database: Database) -> Iterator[_Range]:
    """Ranges of steps that cover all, of about RANGE_SEQUENCES each."""
    first, last, total = None, 0, 0
    for step, num_sequences in database.connection.execute(_STEPS).fetchall():
        if first is not None and total + num_sequences > RANGE_SEQUENCES:
            yield first, last, total
            first, total = None, 0
        first, last, total = step if first is None else first, step, total + num_sequences
    if first is not None:
        yield first, last, total


def _unscored(database: Database, ranges: list[_Range]) -> Iterator[tuple[str, int, int, int]]:
    """Pass, number of sequences that have no row of it, and the first and last step of these; not of replays."""
    names = [name for name in scored_passes(database) if not name.startswith(REPLAY_PREFIX)]
    found: dict[str, list[tuple[int, int, int]]] = {name: [] for name in names}
    for first, last, _ in ranges if names else ():
        values = {"names": names, "first": first, "last": last}
        for name, *row in database.connection.execute(_UNSCORED, values).fetchall():
            found[name].append((row[0], row[1], row[2]))
    for name, rows in found.items():
        if rows:
            yield name, sum(row[0] for row in rows), min(row[1] for row in rows), max(row[2] for row in rows)


def _twice(database: Database, ranges: list[_Range]) -> tuple[int, int, str]:
    """How many names of sequences there are several times, and the step and the name of the first."""
    found = [
        row
        for first, last, _ in ranges
        for row in database.connection.execute(_TWICE, {"first": first, "last": last}).fetchall()
        if row[0]
    ]
    return (sum(row[0] for row in found), *found[0][1:]) if found else (0, 0, "")


def _judged(source: Source) -> list[str]:
    """What decided about writers that are open and whose process cannot be seen from here."""
    found = []
    for state in source.writers:
        judged = source.snapshot.liveness[state.writer]
        who = f"writer {state.writer} (process {state.pid} on {state.host or 'an unknown host'})"
        if judged.how == RESTARTED:
            found.append(f"{who} has ended: this machine was started anew since its last sign")
        elif judged.how == AGE and judged.silent_s is None:
            found.append(
                f"{who} counts as live: its process cannot be seen from here, and the age of its files is not known"
            )
        elif judged.how == AGE:
            counts = "live" if judged.is_alive else "ended"
            found.append(
                f"{who} counts as {counts}: its process cannot be seen from here, and it gave its last sign "
                f"{duration(judged.silent_s or 0.0)} ago (ended after {duration(SILENT_S)} without one)"
            )
    return found


def _not_recorded(source: Source) -> list[str]:
    return list(
        dict.fromkeys(f"not recorded: {sentence}" for state in source.writers for sentence in state.not_recorded)
    )


def attempts(database: Database) -> tuple[AttemptInfo, ...]:
    """The attempts at training of a trace, where there are several."""
    if not database.sources[0].newest:
        return ()
    rows = database.ask(_ATTEMPTS).dicts()
    return tuple(AttemptInfo(**row | {"superseded": _runs(row["superseded"] or [])}) for row in rows)


def _runs(steps: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """First and last step of each run of steps, which come sorted.

    >>> _runs([1, 2, 3, 7, 9, 10])
    ((1, 3), (7, 7), (9, 10))
    """
    firsts = [step for place, step in enumerate(steps) if not place or steps[place - 1] < step - 1]
    lasts = [step for place, step in enumerate(steps) if place == len(steps) - 1 or steps[place + 1] > step + 1]
    return tuple(zip(firsts, lasts, strict=True))


def steps_text(runs: Sequence[tuple[int, int]]) -> str:
    """Runs of steps in words.

    >>> steps_text([(1, 3), (7, 7)])
    '1 to 3, 7'
    """
    return ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in runs)


def _writer(source: Source, state: WriterState, num_sequences: int, num_tokens: int) -> WriterInfo:
    found = source.snapshot.liveness[state.writer]
    kind = {CLOSED: FINISHED, FAILED: STOPPED}.get(state.state, LIVE if found.is_alive else KILLED)
    return WriterInfo(
        writer=state.writer,
        state=kind,
        host=state.host,
        pid=state.pid,
        rank=state.rank,
        attempt=state.attempt,
        known_by=found.how,
        silent_s=found.silent_s,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        waited_s=state.waited_s,
        error=state.error,
    )


def duration(seconds: float) -> str:
    """A time in the unit that suits it.

    >>> duration(40.2), duration(900), duration(20_000), duration(3 * 86400)
    ('40 s', '15 min', '6 h', '3 d')
    """
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def state_of(source: Source) -> str:
    """Whether a trace is `live`, `finished`, `killed` or `stopped`."""
    return _state(source, [_writer(source, state, 0, 0) for state in source.writers if not state.is_launcher])


def _state(source: Source, writers: list[WriterInfo]) -> str:
    """The worst that happened, or that it goes on: also where `tim-trace record` runs and nothing writes yet."""
    if source.is_live:
        return LIVE
    states = {writer.state for writer in writers}
    return next((state for state in (STOPPED, KILLED) if state in states), FINISHED)


def _bytes(source: Source) -> dict[str, int]:
    sizes = {folder: source.store.size(folder) for folder in FOLDERS}
    sizes[MANIFEST] = len(source.store.read_bytes(MANIFEST))
    return {name: size for name, size in sizes.items() if size or name == DENSE}


def _one(database: Database, query: str) -> dict[str, Any]:
    cursor = database.connection.execute(query)
    names = [column[0] for column in cursor.description]
    (row,) = cursor.fetchall()
    return dict(zip(names, row, strict=True))
