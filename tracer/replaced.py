"""Replace a trace in its folder, so that one of the two traces survives if the process dies at any moment.

The old trace is moved to `.tmp-replacing-*`, manifest first, which is renamed to `.tmp-replaced-*` when complete. The new
trace's manifest is written last. So a folder without a manifest holds either part of the old trace, with the rest in
`.tmp-replacing-*`, or part of the new one, with the complete old one in `.tmp-replaced-*`; `put_back` undoes both.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

from ..schemas.errors import TimTraceError
from ..schemas.layout import (
    BUILT_PREFIX,
    MANIFEST,
    REPLACED_PREFIX,
    REPLACING_PREFIX,
    TEMPORARY_PREFIX,
    TOKENIZER,
    WHOLE_TRACES,
    WRITERS,
    is_own,
)
from .store import Store
from .whole_file import check_inside, check_no_links, is_held


def entries(folder: Path) -> list[Path]:
    """Return the entries of a folder, except traces that are being replaced or written."""
    return [entry for entry in folder.iterdir() if not entry.name.startswith(WHOLE_TRACES)]


def names(folder: Path) -> Iterator[str]:
    """Yield the relative paths of files and links below a folder, except in traces that are being replaced or written."""
    for base, folders, files in os.walk(folder):
        if Path(base) == folder:
            folders[:] = [name for name in folders if not name.startswith(WHOLE_TRACES)]
        links = [name for name in folders if os.path.islink(os.path.join(base, name))]
        for name in sorted([*files, *links]):
            yield os.path.relpath(os.path.join(base, name), folder)


def move_aside(folder: Path) -> Path | None:
    """Move a folder's entries into a new subfolder, and return the subfolder; None if the folder is empty."""
    moved = sorted(entries(folder), key=lambda entry: entry.name != MANIFEST)
    if not moved:
        return None
    name = uuid.uuid4().hex
    moving, aside = folder / f"{REPLACING_PREFIX}{name}", folder / f"{REPLACED_PREFIX}{name}"
    moving.mkdir()
    for entry in moved:
        entry.rename(moving / entry.name)
    return moving.rename(aside)


def move_all(source: Path, target: Path) -> None:
    """Move all entries of a folder to another one, the manifest last, and remove the first folder."""
    for entry in sorted(source.iterdir(), key=lambda entry: entry.name == MANIFEST):
        entry.rename(target / entry.name)
    source.rmdir()


def put_back(folder: Path) -> None:
    """Undo an interrupted replacement, or finish it if the new trace is complete."""
    if (folder / MANIFEST).exists():
        for aside in [*_aside(folder, REPLACED_PREFIX), *_aside(folder, REPLACING_PREFIX)]:
            if not (aside / MANIFEST).exists():
                remove_replaced(aside)
        return
    for moving in _aside(folder, REPLACING_PREFIX):
        move_all(moving, folder)
        return
    whole = [aside for aside in _aside(folder, REPLACED_PREFIX) if (aside / MANIFEST).exists()]
    if whole:
        newest = max(whole, key=lambda aside: aside.stat().st_mtime_ns)
        remove_own(folder)
        move_all(newest.rename(folder / newest.name.replace(REPLACED_PREFIX, REPLACING_PREFIX)), folder)


def _aside(folder: Path, prefix: str) -> list[Path]:
    """Return the folders whose name has a prefix, except links, whose targets may not belong to the trace."""
    return [path for path in folder.glob(f"{prefix}*") if path.is_dir() and not path.is_symlink()]


def remove_replaced(aside: Path) -> None:
    """Remove a replaced trace. Only files that belong to a trace are removed."""
    remove_own(aside, listed=tokenizer_files(Store(aside)))
    remove_empty(aside)


def move_part(building: Path, folder: Path) -> None:
    """Move an additional part into a trace, its writers' states last; one without a manifest is being moved."""
    check_no_links(building)
    (building / MANIFEST).unlink(missing_ok=True)
    parts = [part for part in building.rglob("*") if part.is_file() and not part.name.startswith(TEMPORARY_PREFIX)]
    for part in sorted(parts, key=lambda part: part.parent.name == WRITERS):
        relative = part.relative_to(building)
        check_inside(folder, relative.as_posix())
        (folder / relative).parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, folder / relative)


def remove_unfinished(folder: Path) -> None:
    """Remove traces that killed processes were building, and finish moves that they had started."""
    for building in _aside(folder, BUILT_PREFIX):
        if not is_held(building):
            if (folder / MANIFEST).exists() and not (building / MANIFEST).exists():
                move_part(building, folder)
            shutil.rmtree(building, ignore_errors=True)


def tokenizer_files(store: Store) -> set[str]:
    """Return the tokenizer's files from the writers' states, since their names vary."""
    if not os.path.isdir(store.path(TOKENIZER)):
        return set()
    with contextlib.suppress(TimTraceError):
        return {name for state in store.writers()[0] for name in state.files or () if name.startswith(f"{TOKENIZER}/")}
    return set()


def remove_own(folder: Path, listed: Collection[str] = ()) -> None:
    """Remove the files that belong to a trace, and folders that become empty."""
    for name in [*names(folder)]:
        if is_own(name) or name in listed:
            with contextlib.suppress(OSError):
                (folder / name).unlink()
    for base, _, _ in os.walk(folder, topdown=False):
        if Path(base) != folder and not os.path.relpath(base, folder).startswith(WHOLE_TRACES):
            remove_empty(Path(base))


def remove_empty(folder: Path) -> None:
    """Remove a folder if it is empty."""
    with contextlib.suppress(OSError):
        folder.rmdir()
