"""The folder of a new trace. What lies there already is replaced only where it is a trace and nothing else."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..schemas.errors import DamagedTrace, NewerTrace, StorageError, TraceExists
from ..schemas.layout import MANIFEST, REPLACED_PREFIX, TEMPORARY_PREFIX, TOKENIZER, is_own
from ..schemas.manifest import Manifest
from .liveness import liveness
from .store import Store
from .whole_file import write_once, write_part

_NAMED = 3
"""Foreign files that an error names."""


@contextmanager
def new_trace(path: str | os.PathLike[str], manifest: Manifest, *, force: bool = False) -> Iterator[Path]:
    """Make the folder of a new trace and give it, absolute; what was there before is put back on an error.

    With `force` a trace that lies there is replaced: it is moved aside, and removed once the block ends well. Raises
    TraceExists when something lies there already and there is no `force`, when it is not a trace, when files lie in it that
    tim-trace did not write, and when it is being recorded.
    """
    folder = _local(path)
    _check_free(folder, path, force=force)
    is_new = not folder.exists()
    with _explained(path):
        folder.mkdir(parents=True, exist_ok=True)
        aside = _move_aside(folder)
    try:
        with _explained(path):
            write_part(folder, MANIFEST, manifest.to_json().encode())
        yield folder
    except BaseException:
        _remove_own(folder, listed=())
        _put_back(folder)
        if is_new:
            _remove_empty(folder)
        raise
    if aside is not None:
        _remove_own(aside, listed=_listed(Store(aside)))
        _remove_empty(aside)


def create_trace(path: str | os.PathLike[str], manifest: Manifest, *, force: bool = False) -> Path:
    """Make the folder of a new trace and return it, absolute. Raises as `new_trace` does."""
    with new_trace(path, manifest, force=force) as folder:
        return folder


def join_trace(path: str | os.PathLike[str], manifest: Manifest) -> Path:
    """Return the folder of a trace that may exist already; the first of several processes makes it.

    Raises TraceExists when the folder holds something else than a trace.
    """
    folder = _local(path)
    with _explained(path):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / MANIFEST).exists():
            if any(
                not entry.name.startswith(TEMPORARY_PREFIX) and entry.name != MANIFEST for entry in folder.iterdir()
            ):
                if not (folder / MANIFEST).exists():
                    raise TraceExists(f"{path}: exists and is not a trace, so it is left alone; name another folder")
            else:
                write_once(folder / MANIFEST, manifest.to_json().encode())
    Store(folder).manifest()
    return folder


def _check_free(folder: Path, path: str | os.PathLike[str], *, force: bool) -> None:
    """Raise TraceExists unless a trace may be made here."""
    if folder.exists() and not folder.is_dir():
        raise TraceExists(f"{path}: is a file; name a folder that does not exist yet")
    if not folder.exists():
        return
    _put_back(folder)
    if not any(folder.iterdir()):
        return
    store = Store(folder)
    try:
        store.manifest()
    except NewerTrace:
        pass
    except (OSError, DamagedTrace) as error:
        raise TraceExists(f"{path}: exists and is not a trace, so it is left alone; name another folder") from error
    if not force:
        raise TraceExists(f"{path}: a trace is there already; name another folder, or replace it with --force")
    for state in store.writers()[0]:
        if liveness(state, store).is_alive:
            raise TraceExists(
                f"{path}: is being recorded (process {state.pid} on {state.host or 'an unknown host'}), and a trace that "
                "grows is not replaced; end that process, or name another folder"
            )
    listed = _listed(store)
    foreign = [name for name in _names(folder) if not (is_own(name) or name in listed)]
    if foreign:
        more = f" and {len(foreign) - _NAMED} more" if len(foreign) > _NAMED else ""
        raise TraceExists(
            f"{path}: holds files that are no part of a trace ({', '.join(foreign[:_NAMED])}{more}), so it is left alone; "
            "move them away, or name another folder"
        )


def _names(folder: Path) -> Iterator[str]:
    """Paths below a folder, relative to it: of files, and of links whatever they lead to."""
    for base, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(base, name))]
        for name in sorted([*files, *links]):
            yield os.path.relpath(os.path.join(base, name), folder)


def _move_aside(folder: Path) -> Path | None:
    """Move what lies in a folder into a folder in it, the manifest first; None where nothing does."""
    entries = sorted(folder.iterdir(), key=lambda entry: entry.name != MANIFEST)
    if not entries:
        return None
    aside = folder / f"{REPLACED_PREFIX}{uuid.uuid4().hex}"
    aside.mkdir()
    for entry in entries:
        entry.rename(aside / entry.name)
    return aside


def _put_back(folder: Path) -> None:
    """Undo `_move_aside`, the manifest last; also after a process that died in between. Does nothing beside a trace."""
    if (folder / MANIFEST).exists():
        return
    for aside in folder.glob(f"{REPLACED_PREFIX}*"):
        if aside.is_symlink() or not aside.is_dir():
            continue
        for entry in sorted(aside.iterdir(), key=lambda entry: entry.name == MANIFEST):
            entry.rename(folder / entry.name)
        aside.rmdir()


def _listed(store: Store) -> set[str]:
    """The tokenizer's files, whose names are the tokenizer's own: those that writers say they wrote."""
    return {name for state in store.writers()[0] for name in state.files or () if name.startswith(f"{TOKENIZER}/")}


def _remove_own(folder: Path, listed: Collection[str]) -> None:
    """Remove the files of a trace, those of a replaced one aside, and the folders that are empty then."""
    for name in [*_names(folder)]:
        if not name.startswith(REPLACED_PREFIX) and (is_own(name) or name in listed):
            with contextlib.suppress(OSError):
                (folder / name).unlink()
    for base, _, _ in os.walk(folder, topdown=False):
        if Path(base) != folder:
            _remove_empty(Path(base))


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:  # something else lies there
        return


def _local(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        raise StorageError(
            f"{path}: recording writes to a local folder; record there, copy it, and read the copy from its URL"
        )
    return Path(os.path.realpath(os.path.expanduser(path)))


@contextmanager
def _explained(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (TraceExists, StorageError):
        raise
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written ({error.strerror or error}); name a folder on a disk that you may write to"
        ) from error
