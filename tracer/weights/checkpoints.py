"""Read and write policy versions as Hugging Face folders."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...schemas.errors import InvalidOption, StorageError, WeightsMissing
from ..store import Store
from .chunks import bits_type
from .reader import Tensor, WeightReader

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_VERSION = re.compile(r"(?:^|[^0-9])(\d+)$")


class CheckpointReader:
    """Reads policy versions from Hugging Face folders whose names end with the version, such as `checkpoint-20`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.damaged: list[str] = []
        self.folders: dict[int, Path] = {}
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            match = _VERSION.search(path.name)
            if match and path.is_dir() and any(path.glob("*.safetensors")):
                self.folders[int(match[1])] = path

    @property
    def versions(self) -> list[int]:
        return sorted(self.folders)

    def load(self, version: int, attempt: int | None = None, *, is_lazy: bool = False) -> dict[str, Tensor]:
        """Memory-map a version's tensors, ignoring `attempt` and `is_lazy`.

        Raises WeightsMissing if the version is missing or cannot be read.
        """
        if version not in self.folders:
            there = ", ".join(map(str, self.versions)) or "none"
            raise WeightsMissing(f"{self.folder} has no checkpoint of version {version}; available: {there}")
        return read_folder(self.folders[version])


def read_folder(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise WeightsMissing(f"{folder} contains no .safetensors files; pass a folder written by save_pretrained")
    for path in paths:
        try:
            with safe_open(path, "np"):  # checks that the header matches the file
                pass
            with open(path, "rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
                start = file.tell()
        except (SafetensorError, OSError, ValueError) as error:
            raise WeightsMissing(f"{path} cannot be read ({error}). Restore it from a backup") from error
        header.pop("__metadata__", None)
        # Map the file copy-on-write, because torch warns about read-only arrays.
        mapped = np.memmap(path, np.uint8, "c")
        for name, entry in header.items():
            dtype = DTYPES.get(entry["dtype"])
            if dtype is None:
                raise WeightsMissing(
                    f"{path}: {name} has dtype {entry['dtype']}, which is not supported; save it in another dtype"
                )
            first, last = (start + offset for offset in entry["data_offsets"])
            tensors[name] = Tensor(dtype, np.asarray(mapped[first:last]).view(bits_type(dtype)).reshape(entry["shape"]))
    return tensors


def config_of(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's config. If it lacks the `architectures` field, which vLLM needs, add the field."""
    config = dict(identity["config"])
    own = str(identity.get("class", "")).rpartition(".")[2]
    return config if config.get("architectures") or not own else config | {"architectures": [own]}


def write_folder(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], tokenizer: Mapping[str, bytes], *,
    prefix: str = "",
) -> None:  # fmt: skip
    """Write weights, a config and tokenizer files to a folder that `from_pretrained` can load.

    With `prefix="adapter_"`, PEFT can load the folder as an adapter. Raises InvalidOption if the folder is not
    empty, and StorageError if it cannot be written.
    """
    from safetensors import TensorSpec, serialize_file

    documents = {f"{prefix}config.json": json.dumps(dict(config), indent=2).encode() + b"\n", **tokenizer}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidOption(f"{folder} exists and is not an empty folder; pass a new folder")
    shared: dict[int, str] = {}
    arrays: dict[str, np.ndarray] = {}
    specs = {}
    for own, tensor in tensors.items():
        # A tied tensor is one object under several names. Write it once, because loading ties it again.
        if shared.setdefault(id(tensor), own) == own:
            arrays[own] = np.ascontiguousarray(tensor.bits)
            specs[own] = TensorSpec(
                dtype=tensor.dtype,
                shape=list(tensor.bits.shape),
                data_ptr=arrays[own].ctypes.data,
                data_len=arrays[own].nbytes,
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        serialize_file(specs, str(folder / f"{prefix}model.safetensors"), metadata={"format": "pt"})
        for document, content in documents.items():
            (folder / document).write_bytes(content)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written ({error}); pass a writable folder") from error


FOLDER_VARIABLE = "TIM_TRACE_WEIGHTS_FROM"
"""Environment variable that sets --weights-from for every command."""


def open_weights(store: Store, weights_from: str | os.PathLike[str] | None = None) -> WeightReader | CheckpointReader:
    """Open a trace's policy versions, which are either recorded in it or saved as checkpoints.

    Checkpoints are read only from `weights_from` or TIM_TRACE_WEIGHTS_FROM. A folder named in the trace is ignored,
    because the trace may come from an untrusted source.
    """
    manifest = store.manifest()
    writers, damaged = store.writers()
    reader = WeightReader(store, writers, checkpoints=manifest.weights_from)
    reader.damaged[:0] = damaged
    if weights_from is not None:
        return CheckpointReader(Path(weights_from))
    if reader.versions or reader.damaged or manifest.weights_from is None:
        return reader
    folder = os.environ.get(FOLDER_VARIABLE)
    return CheckpointReader(Path(folder)) if folder else reader
