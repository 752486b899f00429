"""Import files in the neutral format: one row per sequence, with the trace's column names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ...schemas.errors import ImportFailed
from ...schemas.steps import ALL_STEPS, parse_steps
from ..progress import Progress, no_progress
from .columns import METRIC_KINDS, Columns
from .mapping import check_map, names_of
from .row_import import KINDS, KNOWN, PASSES, REQUIRED, Imported, open_import
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
    """Convert Parquet or JSON files with the trace's column names to a trace.

    Files have one row per sequence. The required columns are `step`, `prompt_ids`, `response_ids` and at least one of
    `rollout_logprobs`, `train_logprobs`, `current_logprobs` and `reference_logprobs`; every other column that
    Recorder.add_sequences takes, `entropy` and `top2_gap` are optional. `advantage` is a number or a list, `rewards` a
    record of numbers. Lists are aligned with `response_ids`. A `metrics.parquet` (`step`, `name`, `value`) in the same
    folder is read too. `path` is a file, a folder or a glob pattern, on any file system that fsspec supports. `map`
    renames columns (file's name -> trace's name); a column mapped to "" is skipped. `steps` (3:80, -10:) selects steps,
    and `sample` a share of the sequences, chosen by a hash of their names.

    Placeholders become NULL: -9999, 0.0 where the mask is 0, and lists of only 0.0 unless another pass also has logprobs
    near 0 for the same tokens (see ZeroLists).

    Raises ImportFailed, naming file, column and row. After an error, nothing is written to `output`, and with `force`
    an existing trace is kept.
    """
    source = RowFiles.of(os.fspath(path))
    given = dict(map or {})
    files = source.names()
    check_map(given, files, KNOWN, source.url)
    names = {file: names_of(file, columns, given, KNOWN) for file, columns in files.items()}
    _check_columns(names, files, source.url)
    selection = Selection(steps=_chosen(source, names, steps), sample=check_sample(sample))
    there = {theirs: ours for columns in names.values() for theirs, ours in columns.items()}
    passes = {column: name for column, name in PASSES.items() if column in there.values()}
    wanted = sorted(there, key=lambda theirs: KNOWN.index(there[theirs]))
    with open_import(output, "parquet", source.url, selection, ordered=False, grows=False, force=force) as rows:
        with progress("importing", sum(source.size(name) for name in source.files)) as advance:
            for batch in source.batches(wanted):
                rows.add_rows(batch, names[batch.file], passes)
                advance(batch.num_bytes)
        rows.check_any()
        for batch in source.metrics(METRIC_KINDS):
            rows.add_metrics(batch)
    result = rows.result
    mapped = {theirs for columns in names.values() for theirs in columns}
    result.ignored_columns = (
        *(name for name in dict.fromkeys(name for columns in files.values() for name in columns) if name not in mapped),
        *result.ignored_columns,
    )
    return result


def _chosen(source: RowFiles, names: Mapping[str, Mapping[str, str]], steps: str) -> frozenset[int] | None:
    """Return the selected steps; None if all are selected. The step column of every file is read to find them."""
    if steps == ALL_STEPS:
        return None
    theirs = {column for columns in names.values() for column, ours in columns.items() if ours == "step"}
    there: set[int] = set()
    for batch in source.batches(theirs):
        columns = Columns.of(batch, names[batch.file], {"step": KINDS["step"]})
        there.update(columns.list("step") or ())
    return frozenset(parse_steps(steps, sorted(there), of=source.url))


def _check_columns(names: Mapping[str, Mapping[str, str]], files: Mapping[str, Sequence[str]], where: str) -> None:
    """Raise ImportFailed unless each file has the required columns, and at least one file has logprobs."""
    some = any(files.values())
    for file, columns in names.items():
        if some and not files[file]:
            continue  # an empty file, for example from a process without rows
        lacking = [name for name in REQUIRED if name not in columns.values()]
        if lacking:
            raise ImportFailed(
                f"{file}: lacks the columns {', '.join(lacking)} (found: {listed_names(files[file])}); map yours to "
                f"{'it' if len(lacking) == 1 else 'them'}, for example theirs={lacking[0]}"
            )
    if not any(name in columns.values() for columns in names.values() for name in PASSES):
        found = dict.fromkeys(name for columns in files.values() for name in columns)
        raise ImportFailed(
            f"{where}: has no logprobs (found: {listed_names(list(found))}); map yours to {' or '.join(PASSES)}, for "
            f"example theirs={next(iter(PASSES))}"
        )
