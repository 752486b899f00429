"""The neutral way in: one row a sequence, with the names of the trace's own columns.

Shapes: B sequences of one step, R rows that a pass has.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ... import __version__
from ...schemas.capture import Capture
from ...schemas.clock import now
from ...schemas.errors import ImportFailed, InvalidRecord, TimTraceError
from ...schemas.manifest import Manifest
from ...schemas.passes import CURRENT, REFERENCE, ROLLOUT, TRAIN
from ..batch import Batch
from ..create import whole_trace
from ..progress import Progress, no_progress
from ..ragged import Ragged
from ..recorder import Recorder
from ..rows import aligned
from .columns import METRIC_KINDS, Columns, read_metrics
from .import_writer import ImportWriter
from .kinds import COUNT, FLAGS, NAME, NUMBER, SCORE, STEP, TEXT, TOKENS, VALUES, VERSION, Kind, either, required
from .mapping import check_map, names_of
from .placeholders import HOLES, KEPT, OPEN, PassRows, Placeholders, ZeroLists, as_holes, num_certain
from .rowbatch import RowBatch, listed_names
from .rowfiles import RowFiles

PASSES = {
    "rollout_logprobs": ROLLOUT,
    "train_logprobs": TRAIN,
    "current_logprobs": CURRENT,
    "reference_logprobs": REFERENCE,
}
"""Column -> the pass that it gives."""

KINDS: dict[str, Kind] = {
    "step": STEP,
    "prompt_ids": TOKENS,
    "response_ids": required(TOKENS),
    **dict.fromkeys(PASSES, VALUES),
    "seq_id": required(NAME),
    "group_id": NAME,
    "response_mask": FLAGS,
    "entropy": VALUES,
    "advantage": either(SCORE, VALUES),
    "reward": SCORE,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": COUNT,
    "policy_version": VERSION,
    "finish_reason": TEXT,
}
"""Column -> what each of its cells must hold."""

KNOWN = tuple(KINDS)
REQUIRED = ("step", "prompt_ids", "response_ids")
PER_ROW = ("reward", "temperature", "top_p", "top_k", "policy_version", "finish_reason")


@dataclass(slots=True, kw_only=True)
class Imported:
    """What an import brought in."""

    folder: Path
    num_sequences: int = 0
    num_tokens: int = 0
    """Response tokens."""
    num_metrics: int = 0
    passes: tuple[str, ...] = ()
    placeholders: Placeholders = field(default_factory=Placeholders)
    num_above_zero: int = 0
    """Logprobs above 0, kept as they are: they are no log-probabilities."""
    ignored_columns: tuple[str, ...] = ()


def import_parquet(
    path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str],
    map: Mapping[str, str] | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> Imported:
    """Make a trace of Parquet files, or of JSON, CSV or Arrow files with the same names.

    One row a sequence: `step`, `prompt_ids`, `response_ids` and at least one of `rollout_logprobs`, `train_logprobs`,
    `current_logprobs` and `reference_logprobs`; optionally `seq_id`, `group_id`, `response_mask`, `entropy`, `reward`,
    `advantage` (a number or a list), `temperature`, `top_p`, `top_k`, `policy_version` and `finish_reason`. Lists are
    aligned with `response_ids`. A `metrics.parquet` (`step`, `name`, `value`) beside them is read too. `path` is a
    file, a folder (also one that `save_to_disk` of Hugging Face datasets wrote) or a pattern, on any file system that
    fsspec knows. `map` renames columns, theirs -> ours; what becomes "" is left out.

    Placeholders become NULL: -9999, 0.0 where the mask is 0, and lists that hold nothing but 0.0 where another pass is
    not as certain of these tokens (ZeroLists has the rule).

    Raises ImportFailed, naming file, column and row. Nothing is left at `output` then, and with `force` the trace that
    lay there stays.
    """
    source = RowFiles.of(os.fspath(path))
    given = dict(map or {})
    files = source.names()
    check_map(given, files, KNOWN, source.url)
    names = {file: names_of(file, columns, given, KNOWN) for file, columns in files.items()}
    _check_columns(names, files, source.url)
    manifest = Manifest(
        run_id=str(uuid.uuid4()), created_at=now(), created_by=__version__, source=f"import parquet {source.url}"
    )
    try:
        with whole_trace(output, manifest, force=force) as folder:
            result = _Import(source, names, folder, progress).run()
    except TimTraceError:
        raise
    except OSError as error:
        raise ImportFailed(f"{output}: could not be imported to ({error})") from error
    result.folder = Path(os.path.abspath(os.path.expanduser(output)))
    mapped = {theirs for columns in names.values() for theirs in columns}
    result.ignored_columns = (
        *(name for name in dict.fromkeys(name for columns in files.values() for name in columns) if name not in mapped),
        *result.ignored_columns,
    )
    return result


def _check_columns(names: Mapping[str, Mapping[str, str]], files: Mapping[str, Sequence[str]], where: str) -> None:
    """Raise ImportFailed unless each file has the required columns, and one of them logprobs."""
    some = any(files.values())
    for file, columns in names.items():
        if some and not files[file]:
            continue  # nothing was written there, as by a process without rows
        lacking = [name for name in REQUIRED if name not in columns.values()]
        if lacking:
            raise ImportFailed(
                f"{file}: lacks the columns {', '.join(lacking)} (found: {listed_names(files[file])}); map yours to "
                f"{'it' if len(lacking) == 1 else 'them'}, as theirs={lacking[0]}"
            )
    if not any(name in columns.values() for columns in names.values() for name in PASSES):
        found = dict.fromkeys(name for columns in files.values() for name in columns)
        raise ImportFailed(
            f"{where}: has no logprobs (found: {listed_names(list(found))}); map yours to {' or '.join(PASSES)}, as "
            f"theirs={next(iter(PASSES))}"
        )


class _Import:
    """One import on its way."""

    def __init__(self, source: RowFiles, names: Mapping[str, Mapping[str, str]], folder: Path, progress: Progress):
        self._source, self._names, self._progress = source, names, progress
        there = {name for columns in names.values() for name in columns.values()}
        self._result = Imported(folder=folder, passes=tuple(name for column, name in PASSES.items() if column in there))
        self._entropy_of = next((name for name in (TRAIN, CURRENT, ROLLOUT) if name in self._result.passes), None)
        if "entropy" in there and self._entropy_of is None:
            self._result.ignored_columns = ("entropy",)
        self._writer = ImportWriter(folder)
        self._recorder = Recorder.of_writer(self._writer, Capture(), ordered=False)
        self._zero_lists = ZeroLists()
        self._open: dict[str, list[_Scores]] = {}
        self._where = source.url

    def run(self) -> Imported:
        """Read everything and write it. Raises ImportFailed."""
        try:
            with self._recorder:
                self._add_all()
        except InvalidRecord as error:
            raise ImportFailed(f"{self._where}: {error}") from error
        self._writer.check(self._where)
        return self._result

    def _add_all(self) -> None:
        for name in self._result.passes:
            contract = {"engine": None, "source": "import parquet", "path": self._source.url}
            self._recorder.add_contract(name, contract)
        there = {theirs: ours for names in self._names.values() for theirs, ours in names.items()}
        columns = sorted(there, key=lambda theirs: KNOWN.index(there[theirs]))
        with self._progress("importing", self._source.num_bytes) as advance:
            for rows in self._source.batches(columns):
                self._where = rows.file
                self._add_rows(rows)
                advance(rows.num_bytes)
        self._where = self._source.url
        if not self._result.num_sequences:
            raise ImportFailed(f"{self._source.url}: holds no rows; each is one sequence")
        for name in list(self._open):
            self._settle(name, HOLES if self._zero_lists.was_never_filled(name) else KEPT)
        for rows in self._source.metrics(METRIC_KINDS):
            self._where = rows.file
            self._add_metrics(rows)

    def _add_rows(self, rows: RowBatch) -> None:
        self._writer.check(rows.file)
        columns = Columns.of(rows, self._names[rows.file], KINDS)
        lacking = next((name for name in REQUIRED if columns[name] is None), None)
        if lacking:
            raise ImportFailed(f"{rows.file}: {rows.place(0)} has no {lacking}; each row needs {KINDS[lacking].wants}")
        first = self._result.num_sequences
        for part in _alike(columns):
            numbers = (first + part).tolist()
            self._add_step(columns.take(part), [str(number) for number in numbers])
        self._result.num_sequences += columns.num_rows

    def _add_step(self, columns: Columns, numbers: list[str]) -> None:
        """Record sequences of one step that have the same columns."""
        steps, response_ids = columns.list("step"), columns.ragged("response_ids")
        assert steps is not None
        assert response_ids is not None
        per_row: dict[str, Any] = {name: columns.list(name) for name in PER_ROW}
        batch = self._recorder.add_sequences(
            step=steps[0],
            seq_ids=columns.list("seq_id") or numbers,
            group_ids=columns.list("group_id"),
            prompt_ids=columns.ragged("prompt_ids"),
            response_ids=response_ids,
            response_mask=columns.ragged("response_mask"),
            advantage=(columns.ragged if columns.is_list("advantage") else columns.list)("advantage"),
            **per_row,
        )
        self._result.num_tokens += len(response_ids.values)
        passes = {
            name: self._pass_rows(columns, column, batch, response_ids.lengths)
            for column, name in PASSES.items()
            if columns.has(column).any()
        }
        verdicts = self._zero_lists.verdicts(passes, response_ids.lengths)
        for name, part in passes.items():
            if name in self._open and self._zero_lists.is_filled(name):
                self._settle(name, KEPT)
            for verdict in (KEPT, HOLES, OPEN):
                some = np.flatnonzero(verdicts[name] == verdict)
                if len(some):
                    self._add(name, _Scores(batch, columns, part.rows[some], part.logprobs.take(some)), verdict)
        if self._entropy_of is not None:
            lone = columns.has("entropy") & ~columns.has(f"{self._entropy_of}_logprobs")
            if lone.any():
                nothing = as_holes(response_ids.take(np.flatnonzero(lone)))
                self._record(self._entropy_of, _Scores(batch, columns, np.flatnonzero(lone), nothing))

    def _pass_rows(self, columns: Columns, column: str, batch: Batch, lengths: np.ndarray) -> PassRows:
        """What a pass has of these sequences, without what is a placeholder by itself."""
        rows = np.flatnonzero(columns.has(column))
        part = columns.take(rows)
        given = part.ragged(column)
        seq_ids = [batch.seq_ids[row] for row in rows]
        what = f"logprobs of pass {PASSES[column]!r}"
        logprobs = aligned(given, np.float32, None, lengths[rows], seq_ids, batch.step, what)
        self._result.num_above_zero += int((logprobs.values > 0).sum())
        return PassRows(rows, self._result.placeholders.clean(logprobs, part.ragged("response_mask")))

    def _add(self, name: str, scores: _Scores, verdict: int) -> None:
        """Record scores of a pass as it was found of their zeros, or keep them until that can be said."""
        if verdict == OPEN:
            self._open.setdefault(name, []).append(scores)
        elif verdict == HOLES:
            self._result.placeholders.all_zero += scores.logprobs.num_known
            self._record(name, replace(scores, logprobs=as_holes(scores.logprobs)))
        else:
            self._result.placeholders.certain += num_certain(scores.logprobs)
            self._record(name, scores)

    def _settle(self, name: str, verdict: int) -> None:
        """Record what was kept back of a pass."""
        for scores in self._open.pop(name):
            self._add(name, scores, verdict)

    def _record(self, name: str, scores: _Scores) -> None:
        has_entropy = scores.columns.has("entropy")[scores.rows] & (name == self._entropy_of)
        for with_entropy in (True, False):
            some = np.flatnonzero(has_entropy == with_entropy)
            if len(some):
                rows = scores.rows[some]
                self._recorder.add_scores(
                    name,
                    scores.batch,
                    rows=rows,
                    logprobs=scores.logprobs.take(some),
                    entropy=scores.columns.take(rows).ragged("entropy") if with_entropy else None,
                )

    def _add_metrics(self, rows: RowBatch) -> None:
        by_step: dict[int, dict[str, Any]] = {}
        for step, name, value in read_metrics(rows):
            by_step.setdefault(step, {})[name] = value
        for step, values in by_step.items():
            self._recorder.add_metrics(step, values)
            self._result.num_metrics += len(values)


@dataclass(frozen=True, slots=True)
class _Scores:
    """Scores of one pass that are about to be recorded."""

    batch: Batch
    columns: Columns
    rows: np.ndarray
    """[R] which rows of the batch."""
    logprobs: Ragged


def _alike(columns: Columns) -> list[np.ndarray]:
    """Rows that are recorded together: of one step, and with or without a prompt, a mask and a list of advantages."""
    steps = columns.list("step")
    assert steps is not None
    has = [columns.has(name) for name in ("prompt_ids", "response_mask", "advantage") if columns.is_list(name)]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row, key in enumerate(zip(steps, *(flags.tolist() for flags in has), strict=True)):
        groups.setdefault(key, []).append(row)
    return [np.array(rows) for rows in groups.values()]
