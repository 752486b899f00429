"""Record imported rows step by step, with each logprob column as a pass.

Shapes: B sequences in one step, R of them scored by a pass.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ...schemas.capture import Capture
from ...schemas.documents import Manifest, now
from ...schemas.errors import ImportFailed, InvalidRecord, TimTraceError
from ...schemas.layout import METRICS, TRAIN_SPLIT
from ...schemas.passes import CURRENT, LOGPROBS, ROLLOUT, STANDARD, TRAIN
from ...schemas.tables import ARRAYS, GIVEN, PER_TOKEN, TOKEN_SCORES, Column
from ...schemas.version import __version__
from ..batch import Batch
from ..create import grown_trace, whole_trace
from ..dense import Logits, TopK, tail_of
from ..ragged import Ragged
from ..recorder import Recorder
from ..routing import Routing
from ..rows import aligned
from ..writer import TraceWriter
from .columns import Columns, RowBatch, Selection, read_metrics
from .kinds import SCORE, TEXT, VALUES, VERSION, Kind, array_kind, either, kind_of
from .placeholders import HOLES, KEPT, OPEN, PassRows, Placeholders, ZeroLists, as_holes, num_certain

PASSES = {f"{name}{LOGPROBS}": name for name in STANDARD}
OF_TOKENS = tuple(name for name in TOKEN_SCORES if name != "logprobs")
"""Score columns other than logprobs. A column whose name contains no pass belongs to the first imported pass
among `train`, `current` and `rollout`."""
OF_PASSES = {f"{name}_{column}": name for name in STANDARD for column in ("logprobs", *OF_TOKENS, *ARRAYS)}
"""Maps each pass-specific column to its pass."""

POLICY_VERSION, SPLIT = "_policy_version", "split"
VERSIONS = tuple(f"{name}{POLICY_VERSION}" for name in STANDARD)

KINDS: dict[str, Kind] = {
    **{name: kind_of(column) for name, column in GIVEN.items()},
    "advantage": either(SCORE, VALUES, pa.types.is_list, "a number or, in every row, a list of numbers"),
    **dict.fromkeys((*PASSES, *OF_TOKENS), VALUES),
    SPLIT: TEXT,
    **dict.fromkeys(VERSIONS, VERSION),
    **dict.fromkeys((name for name in OF_PASSES if name not in PASSES), VALUES),
    **{f"{name}_{column}": array_kind(of.type, of.alignment) for name in STANDARD for column, of in ARRAYS.items()},
}

KNOWN = tuple(KINDS)
REQUIRED = ("step", "prompt_ids", "response_ids")
_OPTIONAL = {name for name, column in ARRAYS.items() if column.null}


def cannot_map(theirs: str, ours: str, reason: str) -> ImportFailed:
    near = [] if ours in KNOWN else get_close_matches(ours, KNOWN, 1, 0.8)
    reason = f"Did you mean {near[0]!r}?" if near else reason
    return ImportFailed(f"{theirs!r} cannot be mapped to {ours!r}. {reason}", option="map")


@dataclass(slots=True, kw_only=True)
class Imported:
    folder: Path
    format: str = "parquet"
    num_sequences: int = 0
    num_tokens: int = 0
    num_metrics: int = 0
    passes: tuple[str, ...] = ()
    placeholders: Placeholders = field(default_factory=Placeholders)
    num_above_zero: int = 0
    """Number of invalid logprobs (above 0), which are kept unchanged."""
    ignored_columns: tuple[str, ...] = ()
    num_files: int = 0
    """Number of files read in this import, or 0 for the parquet format."""
    num_known_files: int = 0
    held_back: tuple[str, ...] = ()
    """Incomplete parts left for a later import, one sentence each."""
    missing: tuple[str, ...] = ()
    """Passes without logprobs in the files, one sentence each."""
    notes: tuple[str, ...] = ()
    """Notes on changed or skipped data, one sentence each."""


class RowImport:
    """An import in progress. `result` is complete once the import is closed."""

    def __init__(self, folder: Path, source: str, path: str, selection: Selection, *, ordered: bool):
        self.result = Imported(folder=folder, format=source)
        self._contract = {"engine": None, "source": f"import {source}", "path": path}
        self._selection = selection
        self.writer = TraceWriter(folder, journals=False)
        self._recorder = Recorder.of_writer(self.writer, Capture(), ordered=ordered)
        self._zero_lists = ZeroLists()
        self._open: dict[str, list[_Scores]] = {}
        self._num_read = 0
        self._unowned: tuple[str, ...] = ()
        self.scored: set[str] = set()
        self.lacks: Mapping[str, str] = {}
        self.contracts: Mapping[str, Mapping[str, Any]] = {}
        """Settings of each pass, if known."""
        self._where = path

    @contextmanager
    def recording(self) -> Iterator[RowImport]:
        try:
            with self._recorder:
                yield self
                self._finish()
        except InvalidRecord as error:
            raise ImportFailed(f"{self._where}: {error}") from error
        self.writer.check(self._where)

    def check_any(self) -> None:
        path = self._contract["path"]
        if not self._num_read:
            skipped = f" ({'; '.join(self.result.notes)})" if self.result.notes else ""
            raise ImportFailed(f"{path} contains no rows{skipped}. Pass files with one row per sequence")
        if not self.result.num_sequences:
            raise ImportFailed(f"{path}: --sample selected 0 of {self._num_read} sequences. Pass a larger --sample")

    def add_pass(self, name: str, **contract: Any) -> None:
        self._recorder.add_contract(name, {**self._contract, **self.contracts.get(name, {}), **contract})

    def add_rows(
        self, rows: RowBatch, names: Mapping[str, str], passes: Mapping[str, str], kinds: Mapping[str, Kind] = KINDS
    ) -> None:
        self._where = rows.file
        self.writer.check(rows.file)
        others = {ours: VERSION if ours.endswith(POLICY_VERSION) else VALUES for ours in names.values()}
        columns = Columns.of(rows, names, {**others, **kinds, **dict.fromkeys(passes, VALUES)})
        if lacking := next((name for name in REQUIRED if columns[name] is None), None):
            raise ImportFailed(
                f"{rows.file}: {rows.place(0)} has no {lacking}, but each row needs {KINDS[lacking].wants}"
            )
        given = columns.list("seq_id") or [
            str(number) for number in range(self._num_read, self._num_read + columns.num_rows)
        ]
        self._num_read += columns.num_rows
        kept = np.flatnonzero(self._selection.keeps(columns.list("step") or (), given))
        columns = columns if len(kept) == columns.num_rows else columns.take(kept)
        for name in passes.values():
            if name not in self.result.passes:
                self.result.passes += (name,)
                self.add_pass(name)
        has = [columns.has(name) for name in GIVEN if name == "rewards" or columns.is_list(name)]
        splits = np.array([split or TRAIN_SPLIT for split in columns.list(SPLIT) or [None] * columns.num_rows])
        for part in _groups(np.array(columns.list("step"), np.int64), splits, *has):
            self._add_step(columns.take(part), [given[row] for row in kept[part]], passes)
        self.result.num_sequences += columns.num_rows

    def add_metrics(self, rows: RowBatch) -> None:
        self._where = rows.file
        by_step: dict[int, dict[str, Any]] = {}
        for step, name, value in read_metrics(rows):
            by_step.setdefault(step, {})[name] = value
        for step, values in by_step.items():
            self._recorder.add_metrics(step, values)
            self.result.num_metrics += len(values)

    def add_metric_columns(self, columns: Mapping[str, pa.Array]) -> None:
        num = len(columns["step"])
        self.writer.submit(lambda: self.writer.append(METRICS, columns, num), sum(a.nbytes for a in columns.values()))
        self.result.num_metrics += num

    def _finish(self) -> None:
        for name in tuple(self._open):
            self._settle(name, HOLES if self._zero_lists.was_never_filled(name) else KEPT)
        self.result.ignored_columns += self._unowned
        for name, note in self.lacks.items():
            if name not in self.scored:
                self.add_pass(name, logprobs_note=note)
                self.result.missing += (f"{name}: {note}",)

    def _add_step(self, columns: Columns, seq_ids: list[str], named: Mapping[str, str]) -> None:
        """Record rows that share a step, a split, and the set of non-NULL columns."""
        steps, response_ids = columns.list("step"), columns.ragged("response_ids")
        assert steps is not None
        if response_ids is None:
            response_ids = Ragged(np.empty(0, np.int32), np.zeros(columns.num_rows, np.int64))
        given = {column.keyword or name: _given(columns, column) for name, column in GIVEN.items()}
        given |= {"step": steps[0], "seq_ids": seq_ids, "response_ids": response_ids, "rewards": _rewards(columns)}
        if not columns.has("advantages").any():
            given["advantage"] = columns.ragged("advantage") if columns.is_list("advantage") else columns["advantage"]
        given["split"] = (columns.list(SPLIT) or [None])[0] or TRAIN_SPLIT
        batch = self._recorder.add_sequences(**given)
        self.result.num_tokens += len(response_ids.values)
        lengths = response_ids.lengths
        passes = {
            name: self._pass_rows(columns, column, name, batch, lengths)
            for column, name in named.items()
            if columns.has(column).any()
        }
        owner = next((name for name in (TRAIN, CURRENT, ROLLOUT) if name in named.values()), None)
        verdicts = self._zero_lists.verdicts({name: part for name, part in passes.items() if name in STANDARD}, lengths)
        for name, part in passes.items():
            if name in self._open and name in self._zero_lists.filled:
                self._settle(name, KEPT)
            for verdict in (KEPT, HOLES, OPEN):
                some = np.flatnonzero(verdicts.get(name, np.full(len(part.rows), KEPT)) == verdict)
                if len(some):
                    scores = _Scores(batch, columns, part.rows[some], part.logprobs.take(some), name == owner)
                    self._add(name, scores, verdict)
        if owner is None:
            self._unowned = tuple(name for name in OF_TOKENS if name in self._unowned or columns[name] is not None)
        for column, name in named.items():
            has = [columns.has(field) for field in _fields(columns, name, name == owner).values()]
            if len(lone := np.flatnonzero(np.any(has, axis=0) & ~columns.has(column))):
                self._record(name, _Scores(batch, columns, lone, as_holes(response_ids.take(lone)), name == owner))

    def _pass_rows(self, columns: Columns, column: str, name: str, batch: Batch, lengths: np.ndarray) -> PassRows:
        rows = np.flatnonzero(columns.has(column))
        part = columns.take(rows, column, "response_mask")
        given = part.ragged(column)
        what, remedy = f"logprobs of pass {name!r}", "a pass needs one logprob, or NULL, for each response token"
        logprobs = aligned(
            given, np.float32, None, lengths[rows], lambda row: batch.label(rows[row]), batch.step, what, remedy
        )
        self.result.num_above_zero += int((logprobs.values > 0).sum())
        return PassRows(rows, self.result.placeholders.clean(logprobs, part.ragged("response_mask")))

    def _add(self, name: str, scores: _Scores, verdict: int) -> None:
        """Record a pass's scores. HOLES turns zeros into NULL, and OPEN postpones the decision to `_settle`."""
        if verdict == OPEN:
            self._open.setdefault(name, []).append(scores)
        elif verdict == HOLES:
            self.result.placeholders.all_zero += scores.logprobs.num_known
            self._record(name, replace(scores, logprobs=as_holes(scores.logprobs)))
        else:
            self.result.placeholders.certain += num_certain(scores.logprobs)
            self._record(name, scores)

    def _settle(self, name: str, verdict: int) -> None:
        for scores in self._open.pop(name):
            self._add(name, scores, verdict)

    def _record(self, name: str, scores: _Scores) -> None:
        if scores.logprobs.num_known:
            self.scored.add(name)
        fields = _fields(scores.columns, name, scores.is_owner)
        has = [scores.columns.has(field)[scores.rows] for field in fields.values()]
        for some in _groups(np.zeros(len(scores.rows), bool), *has):
            rows = scores.rows[some]
            own = scores.columns.take(rows, *fields.values()) if fields else scores.columns
            values = {each: ragged for each, field in fields.items() if (ragged := own.ragged(field)) is not None}
            given: dict[str, Any] = {each: values.pop(each) for each in OF_TOKENS if each in values}
            given |= {"rows": rows, "logprobs": scores.logprobs.take(some)}
            if (versions := scores.columns.list(f"{name}{POLICY_VERSION}")) is not None:
                given["policy_version"] = [versions[row] for row in rows]
            self._recorder.add_scores(name, scores.batch, **given, **_arguments(name, values, scores.batch, rows))


@contextmanager
def open_import(
    output: str | os.PathLike[str], format: str, url: str, selection: Selection, *, ordered: bool, grows: bool,
    force: bool,
) -> Iterator[RowImport]:  # fmt: skip
    """Open a RowImport for a new trace, or for additions to a finished one (`grows`). Leaves no files on failure."""
    source = f"import {format} {url}"
    manifest = Manifest(run_id=str(uuid.uuid4()), created_at=now(), created_by=__version__, source=source)
    place = grown_trace(output) if grows else whole_trace(output, manifest, force=force)
    try:
        with place as folder, RowImport(folder, format, url, selection, ordered=ordered).recording() as rows:
            yield rows
    except TimTraceError:
        raise
    except OSError as error:
        raise ImportFailed(f"{output} could not be written ({error})") from error
    rows.result.folder = Path(os.path.abspath(os.path.expanduser(output)))


@dataclass(frozen=True, slots=True)
class _Scores:
    batch: Batch
    columns: Columns
    rows: np.ndarray
    """[R] indices into the batch."""
    logprobs: Ragged
    is_owner: bool
    """True if this pass also stores the score columns in OF_TOKENS whose names contain no pass."""


def _fields(columns: Columns, name: str, is_owner: bool) -> dict[str, str]:
    """Map a pass's score fields (except logprobs) and arrays to their columns, leaving out missing columns."""
    names = [(each, each) for each in OF_TOKENS if is_owner]
    names += [(each, f"{name}_{each}") for each in (*OF_TOKENS, *(ARRAYS if name in STANDARD else ()))]
    return {each: column for each, column in names if columns[column] is not None}


_ARGUMENTS: tuple[tuple[str, Callable[..., Any], tuple[str, ...]], ...] = (
    ("distribution", TopK, ("topk_ids", "topk_logprobs", "tail_logprob")),
    ("distribution", Logits, ("logits",)),
    ("distribution", partial(Logits, kind="logprobs"), ("vocabulary_logprobs",)),
    ("routing", Routing, ("expert_ids", "expert_weights")),
)
"""Argument of Recorder.add_scores, its class, and the columns of ARRAYS that it takes."""


def _arguments(name: str, arrays: Mapping[str, Ragged], batch: Batch, rows: np.ndarray) -> dict[str, Any]:
    values, each = dict[str, np.ndarray](), "give each token its values"
    for column, ragged in arrays.items():
        of_prompt = ARRAYS[column].alignment == PER_TOKEN
        lengths = batch.whole_lengths(rows) if of_prompt else batch.lengths(rows)
        if lengths is not None:  # without prompts, the recorder raises the error
            what, tokens = f"{name}_{column}", "prompt and response tokens" if of_prompt else "response tokens"
            aligned(ragged, None, None, lengths, lambda row: batch.label(rows[row]), batch.step, what, each, tokens)
        if len(ragged.values):
            values[column] = ragged.values
    if {"topk_ids", "topk_logprobs"} <= values.keys() and "tail_logprob" not in values:
        values["tail_logprob"] = tail_of(values["topk_logprobs"])
    found: dict[str, Any] = {}
    for argument, make, columns in _ARGUMENTS:
        given = [column for column in columns if column in values]
        if given and (not {*columns[:2]} - _OPTIONAL <= {*given} or argument in found):
            raise InvalidRecord(
                f"step {batch.step}, {batch.label(rows[0])}: pass {name!r} has {', '.join(given)} as its {argument}. "
                f"Map {' and '.join(columns[:2])}, and map only one kind of distribution per pass"
            )
        if given:
            found[argument] = make(**{ARRAYS[column].keyword or column: values[column] for column in given})
    return found | ({"captured_rows": rows} if "distribution" in found else {})


def _given(columns: Columns, column: Column) -> Any:
    if pa.types.is_list(column.type):
        return columns.ragged(column.name)
    return columns[column.name] if column.type == pa.float64() else columns.list(column.name)


def _rewards(columns: Columns) -> dict[str, list[float]] | None:
    rows = [dict(row or ()) for row in columns.list("rewards") or ()]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, float("nan")) for row in rows] for name in names} or None


def _groups(*keys: np.ndarray) -> list[np.ndarray]:
    if len(keys[0]) and all((key == key[0]).all() for key in keys):
        return [np.arange(len(keys[0]))]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row, each in enumerate(zip(*(key.tolist() for key in keys), strict=True)):
        groups.setdefault(each, []).append(row)
    return [np.array(rows) for rows in groups.values()]
