"""The neutral way in: one row a sequence, with the names of the trace's own columns."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from ... import __version__
from ...schemas.clock import now
from ...schemas.errors import ImportFailed, TimTraceError
from ...schemas.manifest import Manifest
from ...schemas.steps import ALL_STEPS, parse_steps
from ..create import whole_trace
from ..progress import Progress, no_progress
from .columns import METRIC_KINDS, Columns
from .mapping import check_map, names_of
from .row_import import KINDS, KNOWN, PASSES, REQUIRED, Imported, RowImport
from .rowbatch import listed_names
from .rowfiles import RowFiles
from .selection import Selection, check_sample


def import_parquet(
    path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str],
    map: Mapping[str, str] | None = None,
    steps: str = ALL_STEPS,
    sample: float = 1.0,
    force: bool = False,
    progress: Progress = no_progress,
) -> Imported:
    """Make a trace of Parquet files, or of JSON, CSV or Arrow files with the same names.

    One row a sequence: `step`, `prompt_ids`, `response_ids` and at least one of `rollout_logprobs`, `train_logprobs`,
    `current_logprobs` and `reference_logprobs`; optionally `seq_id`, `group_id`, `response_mask`, `entropy`, `reward`,
    `advantage` (a number or a list), `temperature`, `top_p`, `top_k`, `policy_version` and `finish_reason`. Lists are
    aligned with `response_ids`. A `metrics.parquet` (`step`, `name`, `value`) beside them is read too. `path` is a
    file, a folder (also one that `save_to_disk` of Hugging Face datasets wrote) or a pattern, on any file system that
    fsspec knows. `map` renames columns, theirs -> ours; what becomes "" is left out. `steps` (3:80, -10:) takes a part of
    the run, and `sample` a share of the sequences, chosen by a hash of their names.

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
    selection = Selection(steps=_chosen(source, names, steps), sample=check_sample(sample))
    manifest = Manifest(
        run_id=str(uuid.uuid4()), created_at=now(), created_by=__version__, source=f"import parquet {source.url}"
    )
    try:
        with (
            whole_trace(output, manifest, force=force) as folder,
            RowImport(folder, "parquet", source.url, selection=selection) as rows,
        ):
            _add_all(source, names, rows, progress)
    except TimTraceError:
        raise
    except OSError as error:
        raise ImportFailed(f"{output}: could not be imported to ({error})") from error
    result = rows.result
    result.folder = Path(os.path.abspath(os.path.expanduser(output)))
    mapped = {theirs for columns in names.values() for theirs in columns}
    result.ignored_columns = (
        *(name for name in dict.fromkeys(name for columns in files.values() for name in columns) if name not in mapped),
        *result.ignored_columns,
    )
    return result


def _add_all(source: RowFiles, names: Mapping[str, Mapping[str, str]], rows: RowImport, progress: Progress) -> None:
    """Read everything and record it."""
    there = {theirs: ours for columns in names.values() for theirs, ours in columns.items()}
    passes = {column: name for column, name in PASSES.items() if column in there.values()}
    columns = sorted(there, key=lambda theirs: KNOWN.index(there[theirs]))
    num_rows = 0
    with progress("importing", source.num_bytes) as advance:
        for batch in source.batches(columns):
            rows.add_rows(batch, names[batch.file], passes)
            num_rows += len(batch.numbers)
            advance(batch.num_bytes)
    if not num_rows:
        raise ImportFailed(f"{source.url}: holds no rows; each is one sequence")
    if not rows.result.num_sequences:
        raise ImportFailed(f"{source.url}: none of its {num_rows} sequences was chosen; take a larger --sample")
    for batch in source.metrics(METRIC_KINDS):
        rows.add_metrics(batch)


def _chosen(source: RowFiles, names: Mapping[str, Mapping[str, str]], steps: str) -> frozenset[int] | None:
    """The steps that are meant; None for all. Reads the column of steps of every file."""
    if steps == ALL_STEPS:
        return None
    theirs = {column for columns in names.values() for column, ours in columns.items() if ours == "step"}
    there: set[int] = set()
    for batch in source.batches(theirs):
        columns = Columns.of(batch, names[batch.file], {"step": KINDS["step"]})
        there.update(columns.list("step") or ())
    return frozenset(parse_steps(steps, sorted(there), of=source.url))


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
