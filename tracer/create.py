"""Create or replace a trace's folder. A folder is replaced only if it holds a trace and nothing else.

If the process dies, one of the two traces survives. The old trace is moved to `.tmp-replacing-*`, manifest first. Once
the move is complete, that folder is renamed to `.tmp-replaced-*`. The new manifest is written last. So a folder without
a manifest still has the old trace, in parts or in `.tmp-replaced-*`, and `put_back` restores it.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..schemas.documents import Manifest
from ..schemas.errors import DamagedTrace, NewerTrace, StorageError, TimTraceError, TraceExists, option
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
from .liveness import liveness
from .store import Store, listed
from .whole_file import alone, check_inside, check_no_links, is_held, write_once, write_part


@contextmanager
def new_trace(path: str | os.PathLike[str], manifest: Manifest, *, force: bool = False) -> Iterator[Path]:
    """Create a trace's folder and yield its absolute path. If the block raises, the old content is restored."""
    with claimed(path) as folder:
        with _explained(path):
            _check_free(folder, path, force=force)
            aside = move_aside(folder)
            try:
                is_first = write_once(folder / MANIFEST, manifest.to_json().encode())
            except OSError:
                put_back(folder)
                raise
            if not is_first:  # another process can create the trace first if there are no file locks
                raise TraceExists(f"{path}: another process has just created a trace there. Use another folder")
        try:
            yield folder
        except BaseException:
            remove_own(folder)
            put_back(folder)
            raise
        if aside is not None:
            remove_replaced(aside)


@contextmanager
def whole_trace(path: str | os.PathLike[str], manifest: Manifest, *, force: bool = False) -> Iterator[Path]:
    """Like `new_trace`, but yield a temporary folder. The old trace is replaced at the end."""
    with ExitStack() as stack:
        with claimed(path) as folder, _explained(path):
            _check_free(folder, path, force=force)
            stack.callback(remove_empty, folder)
            building = stack.enter_context(_building(folder, manifest))
        yield building
        with claimed(path), _explained(path):
            _check_free(folder, path, force=force, building=building)
            aside = move_aside(folder)
            move_all(building, folder)
            if aside is not None:
                remove_replaced(aside)


@contextmanager
def grown_trace(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder for additions to a finished trace. Its files are moved into the trace at the end.

    Writer states are moved last, so after a crash the trace contains either all additions or none.
    """
    with ExitStack() as stack:
        with claimed(path) as folder, _explained(path):
            manifest = _growing(folder, path, building=None)
            building = stack.enter_context(_building(folder, manifest))
        yield building
        with claimed(path), _explained(path):
            _growing(folder, path, building=building)
            move_part(building, folder)


@contextmanager
def _building(folder: Path, manifest: Manifest) -> Iterator[Path]:
    building = folder / f"{BUILT_PREFIX}{uuid.uuid4().hex}"
    building.mkdir()
    with alone(building):
        try:
            write_part(building, MANIFEST, manifest.to_json().encode())
            yield building
        finally:
            shutil.rmtree(building, ignore_errors=True)


def _growing(folder: Path, path: str | os.PathLike[str], building: Path | None) -> Manifest:
    _refuse_built(folder, path, building)
    check_no_links(folder)
    store = Store(folder)
    refuse_live(store, path, "cannot be extended by imports or weights")
    return store.manifest()


@contextmanager
def claimed(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Lock a trace's folder for this block. If the block raises, any folders created for the trace are removed."""
    folder = local_folder(path)
    if folder.exists() and not folder.is_dir():
        raise TraceExists(f"{path} is a file. Pass a new folder")
    made = [above for above in (folder, *folder.parents) if not above.exists()]
    with ExitStack() as claim:
        with _explained(path):
            is_there = False
            while not is_there:
                claim.close()
                folder.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # another process removed the folder before it was locked
                    is_there = claim.enter_context(alone(folder))
        try:
            yield folder
        except BaseException:
            for above in made:
                remove_empty(above)
            raise


def join_trace(path: str | os.PathLike[str], manifest: Manifest) -> Path:
    """Create a trace unless another process has already done so, and return its folder."""
    folder = local_folder(path)
    with _explained(path):
        folder.mkdir(parents=True, exist_ok=True)
        has_files = any(not entry.name.startswith(TEMPORARY_PREFIX) for entry in folder.iterdir())
        if not (folder / MANIFEST).exists():
            if has_files:
                raise _not_a_trace(path)
            write_once(folder / MANIFEST, manifest.to_json().encode())
    Store(folder).manifest()
    return folder


def _not_a_trace(path: str | os.PathLike[str]) -> TraceExists:
    return TraceExists(f"{path} exists but is not a trace, so it was left unchanged. Choose another folder")


def _check_free(folder: Path, path: str | os.PathLike[str], *, force: bool, building: Path | None = None) -> None:
    _refuse_built(folder, path, building)
    put_back(folder)
    if not entries(folder):
        return
    store = Store(folder)
    try:
        store.manifest()
    except NewerTrace:
        pass
    except (OSError, DamagedTrace) as error:
        raise _not_a_trace(path) from error
    if not force:
        raise TraceExists(
            f"{path}: a trace already exists there. Use another folder, or replace it with {option('force')}"
        )
    refuse_live(store, path, "is not replaced")
    of_tokenizer = tokenizer_files(store)
    foreign = [name for name in names(folder) if not (is_own(name) or name in of_tokenizer)]
    if foreign:
        raise TraceExists(
            f"{path} contains files that do not belong to a trace ({listed(foreign, 3)}) and will not be replaced. "
            "Move them elsewhere, or use another folder"
        )


def _refuse_built(folder: Path, path: str | os.PathLike[str], building: Path | None) -> None:
    if any(other != building and is_held(other) for other in folder.glob(f"{BUILT_PREFIX}*")):
        raise TraceExists(
            f"{path}: another process is writing a trace there. Wait until it finishes, or use another folder"
        )
    if building is None:
        remove_unfinished(folder)


def refuse_live(store: Store, path: str | os.PathLike[str], what: str) -> None:
    """Raise TraceExists if the trace is being recorded. `what` ends the message, e.g. "cannot be merged"."""
    for state in store.writers()[0]:
        if liveness(state, store).is_alive:
            raise TraceExists(
                f"{path} is being recorded (process {state.pid} on {state.host or 'an unknown host'}), so it "
                f"{what}. End that process, or use another folder"
            )


def local_folder(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        raise StorageError(
            f"{path}: only `tim-trace record` and `tim-trace compact` write to URLs. Record to a local folder and upload it "
            f"with: tim-trace compact FOLDER -o {path}"
        )
    with _explained(path):  # realpath raises an error if the working directory was removed
        return Path(os.path.realpath(os.path.expanduser(path)))


@contextmanager
def _explained(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (TraceExists, StorageError):
        raise
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written ({error.strerror or error}). Use a folder with write permission"
        ) from error


def entries(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if not entry.name.startswith(WHOLE_TRACES)]


def names(folder: Path) -> Iterator[str]:
    for base, folders, files in os.walk(folder):
        if Path(base) == folder:
            folders[:] = [name for name in folders if not name.startswith(WHOLE_TRACES)]
        links = [name for name in folders if os.path.islink(os.path.join(base, name))]
        for name in sorted([*files, *links]):
            yield os.path.relpath(os.path.join(base, name), folder)


def move_aside(folder: Path) -> Path | None:
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
    for entry in sorted(source.iterdir(), key=lambda entry: entry.name == MANIFEST):
        entry.rename(target / entry.name)
    source.rmdir()


def put_back(folder: Path) -> None:
    """Undo an interrupted replacement, or finish it if the new trace is complete."""
    if (folder / MANIFEST).exists():
        for aside in [*_subfolders(folder, REPLACED_PREFIX), *_subfolders(folder, REPLACING_PREFIX)]:
            if not (aside / MANIFEST).exists():
                remove_replaced(aside)
        return
    for moving in _subfolders(folder, REPLACING_PREFIX):
        move_all(moving, folder)
        return
    whole = [aside for aside in _subfolders(folder, REPLACED_PREFIX) if (aside / MANIFEST).exists()]
    if whole:
        newest = max(whole, key=lambda aside: aside.stat().st_mtime_ns)
        remove_own(folder)
        move_all(newest.rename(folder / newest.name.replace(REPLACED_PREFIX, REPLACING_PREFIX)), folder)


def _subfolders(folder: Path, prefix: str) -> list[Path]:
    return [path for path in folder.glob(f"{prefix}*") if path.is_dir() and not path.is_symlink()]


def remove_replaced(aside: Path) -> None:
    remove_own(aside, listed=tokenizer_files(Store(aside)))
    remove_empty(aside)


def move_part(building: Path, folder: Path) -> None:
    """Move an addition's files into a trace.

    The addition's manifest is removed first. If this process dies, `remove_unfinished` completes the move of
    additions without a manifest.
    """
    check_no_links(building)
    (building / MANIFEST).unlink(missing_ok=True)
    parts = [part for part in building.rglob("*") if part.is_file() and not part.name.startswith(TEMPORARY_PREFIX)]
    for part in sorted(parts, key=lambda part: part.parent.name == WRITERS):
        relative = part.relative_to(building)
        check_inside(folder, relative.as_posix())
        (folder / relative).parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, folder / relative)


def remove_unfinished(folder: Path) -> None:
    for building in _subfolders(folder, BUILT_PREFIX):
        if not is_held(building):
            if (folder / MANIFEST).exists() and not (building / MANIFEST).exists():
                move_part(building, folder)
            shutil.rmtree(building, ignore_errors=True)


def tokenizer_files(store: Store) -> set[str]:
    if not os.path.isdir(store.path(TOKENIZER)):
        return set()
    with suppress(TimTraceError):
        return {name for state in store.writers()[0] for name in state.files if name.startswith(f"{TOKENIZER}/")}
    return set()


def remove_own(folder: Path, listed: Collection[str] = ()) -> None:
    for name in [*names(folder)]:
        if is_own(name) or name in listed:
            with suppress(OSError):
                (folder / name).unlink()
    for base, _, _ in os.walk(folder, topdown=False):
        if Path(base) != folder and not os.path.relpath(base, folder).startswith(WHOLE_TRACES):
            remove_empty(Path(base))


def remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
