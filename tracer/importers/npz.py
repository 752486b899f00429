"""Import format of train-infer-mismatch: samples.jsonl with the tokens, and one .npz file per scoring view.

Each scoring view is imported as a pass.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from ...schemas.passes import LOGPROBS
from .dump import DumpFolder, Part, Reading
from .fields import Fields
from .format import Format, read_rows
from .pickles import Budget
from .remote_file import DumpFile
from .rowbatch import RowBatch
from .torch_files import BAD_ZIP

_VIEW, _SAMPLES = r"([^/]+)\.npz", r"samples[^/]*\.jsonl"
_STEP = 1

COLUMNS = {
    "seq_id": ("id",),
    "prompt_ids": ("prompt_ids",),
    "response_ids": ("completion_ids",),
    "rollout_logprobs": ("sampler_logprobs",),
    "reward": ("correct",),
    "group_id": ("idx",),
    "finish_reason": ("finish_reason",),
    "view": ("logp",),
    "entropy": ("extra_entropy",),
}


def _parts(folder: DumpFolder) -> list[Part]:
    views = [name for name, _ in folder.matching(_VIEW)]
    samples = [name for name, _ in folder.matching(_SAMPLES)]
    if len(samples) != 1:
        raise ImportFailed(
            f"{folder.url}: has {len(samples)} samples.jsonl files with the views' tokens; name a folder with one of them and "
            "its views"
        )
    return [Part(files=(samples[0], *views), step=_STEP)]


class _View:
    """One scoring view, with values per row of the corpus."""

    def __init__(self, path: DumpFile, budget: Budget):
        arrays = read_npz(path, budget)
        try:
            logp, offsets, ids = arrays["logp"], arrays["offsets"], arrays["ids"]
        except KeyError as error:
            raise ImportFailed(f"{path}: has no array {error}; a view has logp, offsets and ids") from error
        sizes = np.diff(offsets) if offsets.ndim == 1 and offsets.dtype.kind in "iu" else np.array([-1])
        whole = logp.ndim == ids.ndim == 1 and logp.dtype.kind == "f" and len(sizes) == len(ids)
        if not whole or (len(offsets) and offsets[0] != 0) or (sizes < 0).any() or int(sizes.sum()) != len(logp):
            raise ImportFailed(f"{path}: offsets do not divide logp into one row for each entry of ids")
        self._logp, self._offsets = logp, offsets
        self._places = {int(row): place for place, row in enumerate(ids.tolist())}

    def of(self, row: int) -> np.ndarray | None:
        """Return the values of a row of the corpus; None if the view lacks the row."""
        place = self._places.get(row)
        return None if place is None else self._logp[self._offsets[place] : self._offsets[place + 1]]


def read_npz(path: DumpFile, budget: Budget) -> dict[str, np.ndarray]:
    """Read the arrays of a .npz file, except arrays of objects. Raises ImportFailed."""
    found = {}
    try:
        with path.open("rb") as whole, zipfile.ZipFile(whole) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith(".npy"):
                    budget.take(2 * entry.file_size)
                    with archive.open(entry) as file:
                        content = file.read(entry.file_size + 1)
                    found[entry.filename.removesuffix(".npy")] = _array(content)
    except BAD_ZIP as error:
        if isinstance(error, ImportFailed):
            raise
        raise ImportFailed(
            f"{path}: not readable as .npz ({(str(error).splitlines() or [type(error).__name__])[0]})"
        ) from error
    return found


def _array(content: bytes) -> np.ndarray:
    file = io.BytesIO(content)
    form: Any = np.lib.format
    read = form.read_array_header_1_0 if form.read_magic(file) == (1, 0) else form.read_array_header_2_0
    shape, fortran, dtype = read(file)
    rest = content[file.tell() :]
    if dtype.hasobject or not dtype.itemsize or int(np.prod(shape, dtype=object)) * dtype.itemsize != len(rest):
        raise ValueError(f"an array of {dtype} and shape {shape} in {len(rest)} bytes")
    return np.frombuffer(rest, dtype).reshape(shape, order="F" if fortran else "C")


def pass_of(name: str) -> str:
    """Return the name of the pass as which a scoring view is imported."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "_.+=-") else "-" for c in Path(name).stem).lstrip(
        "-_.+="
    )
    return f"replay/{plain or 'view'}"


def _read(reading: Reading) -> Iterator[RowBatch]:
    samples, *views = reading.paths()
    budget = reading.budget()
    passes = {pass_of(path.name): _View(path, budget) for path in views}
    if len(passes) < len(views):
        raise ImportFailed(f"{samples.parent}: two views have the same name")

    def rows(fields: Fields, name: str, number: int) -> list[dict[str, Any]]:
        row = fields.integer("seq_id")
        if row is None or "response_ids" not in fields:
            raise ImportFailed(f"{fields.where}: has no id and completion_ids")
        own = fields.cells("prompt_ids", "response_ids", "rollout_logprobs", "reward", "group_id", "finish_reason")
        views = {f"{name}{LOGPROBS}": view.of(row) for name, view in passes.items()}
        return [{"seq_id": str(row), **own, **views}]

    yield from read_rows(reading, rows, files=reading.part.files[:1])


NPZ = Format(
    name="npz",
    writes="train-infer-mismatch (`mismatch/run_views.py`)",
    files="<view>.npz and samples.jsonl",
    columns=COLUMNS,
    alignment="logp[offsets[r]:offsets[r + 1]] belongs to the completion of row ids[r] of samples.jsonl; the view bf16.npz "
    "becomes the pass replay/bf16",
    pattern=_VIEW,
    parts=_parts,
    read=_read,
    lacks={
        "rollout": "samples.jsonl has no sampler_logprobs",
        "train": "each view is its own pass: choose two, for example --pair replay/VIEW:rollout",
    },
)
