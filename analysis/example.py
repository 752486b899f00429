from __future__ import annotations

import os
from importlib.resources import files
from zipfile import ZipFile

from ..schemas.documents import parse_manifest
from ..schemas.layout import MANIFEST
from ..tracer.create import whole_trace
from .info import TraceInfo, info
from .report.targets import explained


def example(path: str | os.PathLike[str], *, force: bool = False) -> TraceInfo:
    """Write an example trace: a recorded GRPO run whose reward drops.

    The trace is bundled with tim-trace (1 MB, made by `make example`). It has no weights, so it cannot be replayed.
    `path` is a new folder. An existing trace is replaced only with `force`.

    Raises TraceExists or StorageError.
    """
    with files(__package__).joinpath("example.zip").open("rb") as file, ZipFile(file) as archive:
        manifest = parse_manifest(archive.read(MANIFEST), MANIFEST)
        with whole_trace(path, manifest, force=force) as folder, explained(path):
            archive.extractall(folder)
    return info(os.fspath(path))
