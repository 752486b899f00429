from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...schemas.checksums import SealedFile
from ...schemas.errors import DamagedTrace, ImportFailed, TraceNotFound, option
from ...schemas.passes import LOGPROBS, ROLLOUT, TRAIN
from ...schemas.steps import ALL_STEPS, parse_steps
from ..progress import Progress, no_progress
from ..store import Store, too_large
from .columns import RowBatch, Selection, listed_names
from .format import DumpFolder, Format, Part, Reading, content_of
from .formats import FORMATS, curves_in, how_to_dump, recognised
from .kinds import VALUES, Kind
from .metrics import SCALARS, import_metrics
from .neutral import holds_rows, import_parquet
from .row_import import KINDS, KNOWN, OF_PASSES, Imported, RowImport, cannot_map, open_import
from .shared_rows import MAPPED, MATCHED, PROMPT_LOGPROBS, TOKENS, SharedRows, named_settings, pass_names
from .textfiles import TIMES_AS_JSON

_Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

AUTO, PARQUET = "auto", "parquet"
_READERS = {"json": PARQUET, "jsonl": PARQUET, "csv": SCALARS.name, "tensorboard": SCALARS.name, "wandb": SCALARS.name}
"""Maps each kind of file to the import format that reads it."""


def import_dump(
    format: str,
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    output: str | os.PathLike[str],
    map: Mapping[str, str] | None = None,
    steps: str = ALL_STEPS,
    sample: float = 1.0,
    partial: bool = False,
    force: bool = False,
    progress: Progress = no_progress,
) -> Imported:
    """Convert another tool's files to a trace, or add new files to the trace of an earlier import.

    `format` is `auto`, `parquet` (see import_parquet) or a framework or engine from docs/reference/import-formats.md.
    `path` is a file or a folder or, for the parquet format, a URL that fsspec can open. Pass several paths to
    import the values that several engines computed for the same prompts: each path becomes a pass, and sequences are
    matched by prompt. `map` maps field names in the files to columns, including columns that the format lacks. A field
    mapped to "" is skipped. `steps` (3:80, -10:) selects steps. `sample` selects a share of the sequences by hashing
    their names. Incomplete steps and half-written files are skipped and listed in the result. To add them later, import
    again. Set `partial` to import as much of them as possible now.

    Nothing in the files is executed: pickles are read as data, and an object of an unsupported class is an error only
    if it is in a field that is read. At most one step or 512 JSON Lines rows are held in memory. If several paths are
    given, or for Megatron-LM's files, all rows are held in memory at once.

    Raises ImportFailed, which names the file, field and row, and leaves the output unchanged.
    """
    if format not in (AUTO, PARQUET, *FORMATS):
        reads = f" (format {_READERS[format]} reads {format} files)" if format in _READERS else ""
        raise ImportFailed(f"unknown format '{format}'{reads}. Choose one of {', '.join((AUTO, PARQUET, *FORMATS))}")
    if not isinstance(path, (str, os.PathLike)) and len(path) < 2:
        if not path:
            raise ImportFailed("no path was given. Pass a file or a folder")
        path = path[0]
    folder = _dump_folder(format, path)
    hint = None
    if format == AUTO:
        format = (folder and recognised(folder)) or PARQUET
        if folder is not None and not folder.is_file and format in (PARQUET, SCALARS.name):
            hint = how_to_dump(folder)
            if hint and format == PARQUET and not holds_rows(folder.url, map or {}):
                raise ImportFailed(f"{folder.url} contains no dump. {hint}{curves_in(folder)}")
    reads_one = folder is None or format in (PARQUET, SCALARS.name) or FORMATS[format].parts is not None
    if reads_one and not isinstance(path, (str, os.PathLike)):
        raise ImportFailed(f"the {format} format reads one path, but got {len(path)} paths. Pass a folder or a pattern")
    if folder is None or format in (PARQUET, SCALARS.name):
        if partial:
            raise ImportFailed(f"the {format} format has no incomplete steps. Remove this option", option="partial")
        if folder is not None and format == SCALARS.name:
            if sample != 1.0:
                raise ImportFailed("scalars have no sequences to select from. Remove this option", option="sample")
            result = import_metrics(folder, output=output, map=map, steps=steps, force=force, progress=progress)
            result.notes += (f"no tokens: {hint}",) if hint else ()
            return result
        assert isinstance(path, (str, os.PathLike))
        return import_parquet(path, output=output, map=map, steps=steps, sample=sample, force=force, progress=progress)
    given, selection = dict(map or {}), Selection(sample=sample)
    chosen = FORMATS[format]
    columns = _mapped(chosen, given)
    mapped = ",".join(f"{theirs}={ours}" for theirs, ours in sorted(given.items()))
    # Every import into the same trace must use the same options.
    options = {"sample": repr(float(sample)), "map": mapped, "steps": steps if chosen.lines else ""}
    before = None if force else _Before.of(output, chosen, options)
    parts = chosen.parts_of(folder)
    _check_one_run(folder, parts)
    held_back = [part.waits_for for part in parts if part.waits_for and not partial]
    parts = [part for part in parts if part.waits_for is None or partial]
    selection = replace(selection, steps=_chosen_steps(chosen, folder, columns, parts, steps))
    if selection.steps is not None:
        parts = [part for part in parts if part.step is None or part.step in selection.steps]
    if before is not None:
        parts = before.new(folder, parts)
    named = (
        chosen.passes(folder)
        if chosen.passes
        else {name: (label, named_settings(label)) for name, label in folder.passes.items()}
    )
    for theirs, ours in given.items() if named else ():
        if ours in KNOWN and ours not in (*MAPPED, *MATCHED):
            raise ImportFailed(
                f"{theirs!r} cannot be mapped to {ours!r}, because sequences are matched by prompt. Fields can "
                f"be mapped only to the columns {', '.join(MAPPED)}",
                option="map",
            )
    if named and before is not None and parts:
        raise ImportFailed(
            f"{output}: files were added since the first import, but sequences can only be matched if all files are "
            "imported together. Replace the trace with --force"
        )
    if not parts:
        if before is None:
            raise ImportFailed(f"{folder.url}: {'; '.join(held_back) or _holds_none(chosen, folder)}")
        result = Imported(folder=Path(os.path.abspath(os.path.expanduser(output))), format=chosen.name)
    else:
        with open_import(
            output, chosen.name, folder.url, selection, ordered=_are_ordered(chosen, parts), grows=before is not None,
            force=force,
        ) as rows:  # fmt: skip
            rows.contracts = chosen.contracts
            seen = _add_parts(chosen, folder, parts, columns, rows, before, named, partial=partial, progress=progress)
            if before is None:
                rows.check_any()
            if unread := [name for name, ours in given.items() if ours and name not in seen]:
                raise ImportFailed(f"no file has the field {listed_names(unread)}", option="map")
            lacks = {ROLLOUT: _NO_LOGPROBS, TRAIN: _NO_LOGPROBS, **chosen.lacks}
            if named and rows.scored:
                del lacks[ROLLOUT]
            rows.lacks = {name: note for name, note in lacks.items() if before is None or name not in before.passes}
            rows.writer.state.import_options = options
        result = rows.result
        result.num_files = len(rows.writer.state.sources)
    result.held_back = tuple(held_back)
    result.num_known_files = 0 if before is None else before.num_known
    return result


def _check_one_run(folder: DumpFolder, parts: list[Part]) -> None:
    """Raise ImportFailed if a step's files come from several runs, or from both training and validation."""
    places: dict[tuple[int, str], str] = {}
    for part in parts:
        for name in part.files if part.step is not None else ():
            place, base = os.path.split(name)
            # A step's files may be in folders with different names, but files with the same name in folders with the
            # same name come from two runs.
            key = f"{os.path.basename(place)}/{base}" if len(part.files) > 1 else ""
            if (other := places.setdefault((part.step or 0, key), place)) != place:
                raise ImportFailed(
                    f"{folder.url} has step {part.step} in both {other or '.'} and {place or '.'}, so it contains "
                    "several runs or validation data. Pass one of these folders"
                )


def _holds_none(format: Format, folder: DumpFolder) -> str:
    other = recognised(folder)
    remedy = "Pass the folder that the framework wrote to" if other in (None, format.name) else f"Import it as {other}"
    return f"it contains no {format.files}. {remedy}"


def _are_ordered(format: Format, parts: list[Part]) -> bool:
    """Return True if each part is one step and steps increase. If so, earlier steps' sequence names are not kept."""
    steps = [part.step for part in parts if part.step is not None]
    increase = all(before < after for before, after in pairwise(steps))
    return "step" not in format.columns and len(steps) == len(parts) and increase


def _add_parts(
    format: Format, folder: DumpFolder, parts: list[Part], columns: Mapping[str, tuple[str, ...]], rows: RowImport,
    before: _Before | None, named: Mapping[str, tuple[str, Mapping[str, Any]]], *, partial: bool, progress: Progress,
) -> set[str]:  # fmt: skip
    seen: set[str] = set()
    shared, without, num_text = SharedRows(), list[str](), 0
    if named and (said := too_large(folder.num_bytes([name for part in parts for name in part.files]), TIMES_AS_JSON)):
        raise ImportFailed(f"{folder.url}: {said}. All files are held in memory for matching, so import fewer at once")
    with progress("importing", sum(folder.num_bytes(part.files) for part in parts)) as advance:
        for part in parts:
            first = {} if before is None else {name: before.first_line(name) for name in part.files}
            reading = Reading(
                folder=folder, part=part, columns=columns, seen=seen, first_line=first, partial=partial,
                added=tuple(name for name in columns if name in KNOWN and columns[name] != format.columns.get(name)),
            )  # fmt: skip
            for batch in format.batches(reading):
                if named:
                    shared.add(batch, named[part.files[0]][0])
                else:
                    _add(rows, batch)
            without += reading.without_values
            num_text += reading.num_text
            for name in part.files:
                lines = reading.last_line.get(name) if format.lines else None
                rows.writer.state.sources[name] = reading.sources.get(name) or content_of(
                    folder.path(name), lines=lines
                )
            advance(folder.num_bytes(part.files))
    if without:
        rows.result.notes += (f"skipped {len(without):,} files without logprobs, such as {without[0]}",)
    if num_text:
        rows.result.notes += (f"skipped {num_text:,} rollouts that are text without token ids",)
    contracts = dict(named.values())
    rows.contracts = {**rows.contracts, **contracts} | {name: contracts[of] for name, of in shared.repeated.items()}
    for batch in shared.batches(folder.url):
        _add(rows, batch, KINDS | {"response_ids": TOKENS})
    return seen


_KINDS = KINDS | {"rollout_expert_ids": Kind(wants="", type=VALUES.type, convert=lambda array: array)}
"""Kinds of columns in dumps. Router choices are not converted here, because `routed` has already checked them."""


def _add(rows: RowImport, batch: RowBatch, kinds: Mapping[str, Kind] = _KINDS) -> None:
    batch.columns.pop(PROMPT_LOGPROBS, None)
    names = {name: name for name in batch.columns}
    rows.add_rows(batch, names, {name: name.removesuffix(LOGPROBS) for name in names if name.endswith(LOGPROBS)}, kinds)


_NO_LOGPROBS = "the files have no logprobs for this pass"


class _Before:
    def __init__(self, url: str, sources: dict[str, SealedFile], passes: set[str]):
        self._url, self.sources, self.passes = url, sources, passes
        self.num_known = 0

    @classmethod
    def of(cls, output: str | os.PathLike[str], format: Format, options: dict[str, str]) -> _Before | None:
        store = Store(output)
        try:
            manifest = store.manifest()
        except (TraceNotFound, DamagedTrace, OSError, ValueError):
            return None
        states = [state for state in store.writers()[0] if state.sources]
        if not manifest.source.startswith(f"import {format.name} ") or not states:
            return None
        found = states[0].import_options
        if found != options:
            raise ImportFailed(
                f"{output} was imported with {_shown_options(found)}, but this import has "
                f"{_shown_options(options)}. Pass the same options, choose another folder, or replace the trace with {option('force')}"
            )
        # A file that grew between imports has one entry per import. Sort by size, so that `dict` keeps the longest.
        known = sorted((each for state in states for each in state.sources.items()), key=lambda each: each[1].num_bytes)
        return cls(os.fspath(output), dict(known), set(store.folders("passes")))

    def new(self, folder: DumpFolder, parts: list[Part]) -> list[Part]:
        found = []
        for part in parts:
            known = [name for name in part.files if name in self.sources]
            self.num_known += len(known)
            grown = [name for name in known if self._has_grown(folder, name)]
            if len(known) < len(part.files) and known:
                new = next(name for name in part.files if name not in self.sources)
                raise ImportFailed(
                    f"{folder.url}: {new} is a new file, but step {part.step} was already imported into "
                    f"{self._url}. Import to another folder, or replace that trace with --force"
                )
            if not known or grown:
                found.append(part)
        if parts and not self.num_known:
            raise ImportFailed(
                f"{self._url} was imported from another folder, and {folder.url} has none of the imported files. "
                f"Choose another output folder, or replace the trace with --force"
            )
        return found

    def _has_grown(self, folder: DumpFolder, name: str) -> bool:
        path, known, size = folder.path(name), self.sources[name], folder.num_bytes([name])
        now_there = content_of(path, num_bytes=known.num_bytes)
        if now_there.hash != known.hash or (size != known.num_bytes and known.num_rows is None):
            raise ImportFailed(
                f"{path} has changed since it was imported. Import to another folder, or replace the trace with --force"
            )
        return size > known.num_bytes

    def first_line(self, name: str) -> int:
        known = self.sources.get(name)
        return 1 if known is None else (known.num_rows or 0) + 1


def _dump_folder(format: str, path: _Paths) -> DumpFolder | None:
    if not isinstance(path, (str, os.PathLike)):
        return None if format == PARQUET else DumpFolder.of_paths(path, pass_names([os.fspath(each) for each in path]))
    if format == PARQUET or (format == AUTO and ("*" in os.fspath(path) or "://" in os.fspath(path))):
        return None
    folder = DumpFolder.of(path)
    if not folder.files:
        raise ImportFailed(f"{folder.url} is empty. Pass the folder that the framework wrote to")
    return folder


def _shown_options(options: Mapping[str, str]) -> str:
    return " ".join(f"--{name} {value}" for name, value in options.items() if value) or "no options"


def _mapped(format: Format, given: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    columns = {name: tuple(field for field in fields if field not in given) for name, fields in format.columns.items()}
    taken = dict.fromkeys((*columns, *(name for name in KNOWN if name not in OF_PASSES or KINDS[name] == VALUES)))
    for theirs, ours in given.items():
        if ours == "step" and ours not in columns:
            raise cannot_map(theirs, ours, f"{format.name} files have no field for the step")
        if ours and ours not in taken:
            only = "Only the parquet format has this column. Convert the data to Parquet and import it"
            raise cannot_map(theirs, ours, only if ours in KNOWN else f"{format.name} takes {', '.join(taken)}")
        if ours:
            columns[ours] = (theirs,)
    return columns


def _chosen_steps(
    format: Format, folder: DumpFolder, columns: Mapping[str, tuple[str, ...]], parts: list[Part], steps: str
) -> frozenset[int] | None:
    if steps == ALL_STEPS:
        return None
    there = {part.step for part in parts if part.step is not None}
    for part in parts:
        if part.step is None:
            reading = Reading(folder=folder, part=part, columns=columns, seen=set())
            there |= {step for batch in format.batches(reading) for step in batch.columns["step"]}
    return frozenset(parse_steps(steps, sorted(there), of=folder.url))
