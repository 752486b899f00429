"""Create or replace the folder of a trace. A folder is replaced only if it holds a trace and nothing else."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..schemas.documents import Manifest
from ..schemas.errors import DamagedTrace, NewerTrace, StorageError, TraceExists, option
from ..schemas.layout import BUILT_PREFIX, MANIFEST, TEMPORARY_PREFIX, is_own
from .liveness import liveness
from .replaced import (
    entries,
    move_all,
    move_aside,
    move_part,
    names,
    put_back,
    remove_empty,
    remove_own,
    remove_replaced,
    remove_unfinished,
    tokenizer_files,
)
from .store import Store
from .whole_file import alone, check_no_links, is_held, write_once, write_part

_NAMED = 3
"""Maximum number of files not written by tim-trace that an error message lists."""


@contextmanager
def new_trace(path: str | os.PathLike[str], manifest: Manifest, *, force: bool = False) -> Iterator[Path]:
    """Create the folder of a new trace and yield its absolute path; on an error the previous content is restored.

    With `force` an existing trace is replaced: it is moved aside, and removed once the block succeeds. Until then no other
    process can create a trace here, so the next one sees any writer opened in the block.

    Raises TraceExists if the folder is in use and `force` is off, if it is not a trace, if it holds files that tim-trace did
    not write, or if it is being recorded.
    """
    with claimed(path) as folder:
        with _explained(path):
            _check_free(folder, path, force=force)
            aside = move_aside(folder)
            try:
                is_first = write_once(folder / MANIFEST, manifest.to_json().encode())
            except OSError:
                put_back(folder)
                raise
            if not is_first:  # another process created the trace first, which can happen without file locks
                raise TraceExists(f"{path}: another process has just created a trace there; use another folder")
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
    """Like `new_trace`, for a trace that is written as a whole: yield a folder to write to, which is moved into place
    at the end.

    The previous content stays untouched until then, however this process ends. Raises the same errors as `new_trace`,
    at the start or the end.
    """
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
    """Yield a folder to write an additional part of a finished trace to; its files are moved into the trace at the end.

    A part counts once its writers' states are in place, which are moved last: however this process ends, the trace
    contains all of the part or nothing. If this process dies while moving files, the next one that writes here moves
    the rest. Raises TraceExists if the trace is being written, and StorageError.
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
    """Yield a temporary folder inside a trace's folder, with a manifest, to write to; files left in it are removed."""
    building = folder / f"{BUILT_PREFIX}{uuid.uuid4().hex}"
    building.mkdir()
    with alone(building):
        try:
            write_part(building, MANIFEST, manifest.to_json().encode())
            yield building
        finally:
            shutil.rmtree(building, ignore_errors=True)


def _growing(folder: Path, path: str | os.PathLike[str], building: Path | None) -> Manifest:
    if any(other != building and is_held(other) for other in folder.glob(f"{BUILT_PREFIX}*")):
        raise TraceExists(f"{path}: another process is writing to it; wait until it ends")
    if building is None:
        remove_unfinished(folder)
    check_no_links(folder)
    store = Store(folder)
    refuse_live(store, path, "cannot be extended by imports or weights")
    return store.manifest()


@contextmanager
def claimed(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Create a trace's folder and claim it for the block; an error removes it. Raises TraceExists and StorageError."""
    folder = local_folder(path)
    if folder.exists() and not folder.is_dir():
        raise TraceExists(f"{path}: is a file; use a new folder")
    made = [above for above in (folder, *folder.parents) if not above.exists()]
    with ExitStack() as claim:
        with _explained(path):
            is_there = False
            while not is_there:
                claim.close()
                folder.mkdir(parents=True, exist_ok=True)
                try:
                    is_there = claim.enter_context(alone(folder))
                except FileNotFoundError:  # another process created and removed the folder
                    continue
        try:
            yield folder
        except BaseException:
            for above in made:
                remove_empty(above)
            raise


def join_trace(path: str | os.PathLike[str], manifest: Manifest) -> Path:
    """Return a trace's folder, which the first of its processes creates. Raises TraceExists if it is not a trace."""
    folder = local_folder(path)
    with _explained(path):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / MANIFEST).exists():
            if any(
                not entry.name.startswith(TEMPORARY_PREFIX) and entry.name != MANIFEST for entry in folder.iterdir()
            ):
                if not (folder / MANIFEST).exists():
                    raise TraceExists(
                        f"{path}: exists and is not a trace, so it is left unchanged; choose another folder"
                    )
            else:
                write_once(folder / MANIFEST, manifest.to_json().encode())
    Store(folder).manifest()
    return folder


def _check_free(folder: Path, path: str | os.PathLike[str], *, force: bool, building: Path | None = None) -> None:
    """Raise TraceExists unless a trace may be created here. Undoes the unfinished work of killed processes first."""
    if any(other != building and is_held(other) for other in folder.glob(f"{BUILT_PREFIX}*")):
        raise TraceExists(
            f"{path}: another process is writing a trace there; wait until it ends, or use another folder"
        )
    if building is None:
        remove_unfinished(folder)
    put_back(folder)
    if not entries(folder):
        return
    store = Store(folder)
    try:
        store.manifest()
    except NewerTrace:
        pass
    except (OSError, DamagedTrace) as error:
        raise TraceExists(
            f"{path}: exists and is not a trace, so it is left unchanged; choose another folder"
        ) from error
    if not force:
        raise TraceExists(
            f"{path}: a trace already exists there; use another folder, or replace it with {option('force')}"
        )
    refuse_live(store, path, "is not replaced")
    listed = tokenizer_files(store)
    foreign = [name for name in names(folder) if not (is_own(name) or name in listed)]
    if foreign:
        more = f" and {len(foreign) - _NAMED} more" if len(foreign) > _NAMED else ""
        raise TraceExists(
            f"{path}: contains files that do not belong to a trace ({', '.join(foreign[:_NAMED])}{more}) and is not replaced; "
            "move them away, or use another folder"
        )


def refuse_live(store: Store, path: str | os.PathLike[str], what: str) -> None:
    """Raise TraceExists if a trace is being recorded; `what` names the operation that is refused."""
    for state in store.writers()[0]:
        if liveness(state, store).is_alive:
            raise TraceExists(
                f"{path}: is being recorded (process {state.pid} on {state.host or 'an unknown host'}), and a growing "
                f"trace {what}; end that process, or use another folder"
            )


def local_folder(path: str | os.PathLike[str]) -> Path:
    """Return a local path as an absolute one. Raises StorageError for a URL."""
    if "://" in os.fspath(path):
        raise StorageError(
            f"{path}: only `tim-trace record` and `tim-trace compact` write to URLs; record to a local folder and upload it "
            f"with: tim-trace compact FOLDER -o {path}"
        )
    with _explained(path):  # raises if the working directory was removed
        return Path(os.path.realpath(os.path.expanduser(path)))


@contextmanager
def _explained(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (TraceExists, StorageError):
        raise
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written ({error.strerror or error}); use a folder with write permission"
        ) from error
