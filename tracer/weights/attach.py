"""Attach weights from a Hugging Face folder to a trace that was recorded without weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...schemas.errors import InvalidOption, WeightsMissing, option
from ...schemas.layout import SCORES, SEQUENCES, TOKENIZER, WEIGHTS, WRITERS, Segment
from ..create import grown_trace
from ..snapshot import Snapshot, take_snapshot
from ..store import Store, first_line, listed
from ..verified_file import FileCursor
from ..whole_file import remove, write_part
from ..writer import TraceWriter
from .checkpoints import DTYPES
from .identity import described, tokenizer_identity
from .reader import WeightReader

_DECIDING = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
"""Config entries that must match the recorded model."""
_TOLD = 8  # versions or tensors listed in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    version: int
    folder: str
    num_tensors: int
    num_bytes: int
    has_tokenizer: bool


def attach(
    trace: str | os.PathLike[str],
    version: int,
    folder: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> Attached:
    """Record weights from a Hugging Face model folder as a policy version, so an imported dump can be replayed.

    `folder` contains config.json and safetensors files from `save_pretrained`. The model's class must be part of
    transformers, because code in the folder is never run. The config is stored with the weights, and so is the
    tokenizer from `tokenizer` or `folder`. An interrupted call leaves the trace unchanged.

    `force` replaces weights attached earlier. Recorded weights cannot be replaced, because later versions build on
    them.

    Raises InvalidOption if no row has the version, if the version already has weights, or if the model does not match
    the trace. Raises WeightsMissing if the folder has no readable weights, NotInstalled without transformers,
    TraceExists while the trace is being recorded, TraceNotFound and StorageError.
    """
    Store(trace).manifest()
    model, of_tokenizer = load_folder(folder, tokenizer)
    there = os.path.abspath(os.path.expanduser(folder))
    with grown_trace(trace) as building:
        store = Store(trace)
        snapshot = take_snapshot(store)
        _check_version(snapshot, version)
        _check_model(snapshot, model, there)
        replaced = _to_replace(store, version, force)
        has_tokenizer = of_tokenizer is not None and not store.files(TOKENIZER)
        writer = TraceWriter(building, journals=False)
        writer.state.attached_from = there
        writer.state.model = described(model, there, model.config.to_dict())
        if of_tokenizer is not None:
            writer.state.tokenizer = tokenizer_identity(of_tokenizer)
        if has_tokenizer:
            writer.save_tokenizer(of_tokenizer)
        writer.keep_weights(version, model.state_dict())
        writer.close()
        writer.check(there)
        for name in replaced:
            _remove(store, Path(store.root), name)
    (record,) = WeightReader(Store(trace), Store(trace).writers()[0]).parts[version]
    return Attached(
        version=version,
        folder=there,
        num_tensors=len(record.hashes),
        num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in model.parameters()),
        has_tokenizer=has_tokenizer,
    )


def load_folder(folder: str | os.PathLike[str], tokenizer: str | os.PathLike[str] | None = None) -> tuple[Any, Any]:
    """Load a folder's model, in its stored dtypes, and the tokenizer (None if the folder has none)."""
    path = Path(os.path.expanduser(folder))
    if (path / "adapter_config.json").exists():
        raise WeightsMissing(
            f"{path} contains an adapter; merge it (merge_and_unload) and save the model to another folder"
        )
    for needed in ("config.json", "*.safetensors"):
        if not any(path.glob(needed)):
            raise WeightsMissing(f"{path} has no {needed}; pass a folder written by save_pretrained")
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers may raise anything for an invalid config
        raise WeightsMissing(
            f"{path / 'config.json'} cannot be read ({first_line(error)}). Restore it from a backup"
        ) from error
    name = str((config.architectures or ["none"])[0])
    kind: Any = getattr(transformers, name, None)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not is_model or not hasattr(kind, "generate"):
        raise WeightsMissing(
            f"{path / 'config.json'} names the architecture {name}, which the installed transformers does not "
            "provide as a language model"
        )
    try:
        model, told = kind.from_pretrained(
            path, config=config, dtype="auto", trust_remote_code=False, local_files_only=True, use_safetensors=True,
            output_loading_info=True,
        )  # fmt: skip
    except Exception as error:
        raise WeightsMissing(f"{path} cannot be loaded ({first_line(error)}). Restore it from a backup") from error
    for words, names in (("has no", told["missing_keys"]), ("has the wrong shape for", told["mismatched_keys"])):
        if names:
            raise WeightsMissing(
                f"{path} {words} {listed(sorted(map(str, names)), _TOLD)}; check that it contains a complete {name}"
            )
    with torch.no_grad():
        _put_own_dtypes(model, path)
    return model, _tokenizer(path, tokenizer)


def _put_own_dtypes(model: Any, path: Path) -> None:
    """Restore the stored bits of tensors that transformers converted to another dtype."""
    from safetensors import safe_open

    tensors = model.state_dict(keep_vars=True)
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as content:  # type: ignore[no-untyped-call]
            for name in tensors.keys() & set(content.keys()):
                if DTYPES.get(content.get_slice(name).get_dtype()) != str(tensors[name].dtype).removeprefix("torch."):
                    tensors[name].data = content.get_tensor(name)


def _tokenizer(path: Path, given: str | os.PathLike[str] | None) -> Any:
    import transformers

    place = path if given is None else Path(os.path.expanduser(given))
    if given is None and not any((place / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers may raise anything for an invalid tokenizer
        raise InvalidOption(
            f"{place} contains no tokenizer that can be loaded ({first_line(error)})", option="tokenizer"
        ) from error


def _check_version(snapshot: Snapshot, version: int) -> None:
    """Raise InvalidOption if `version` is invalid, or if rows have policy versions but none has this one."""
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 1 << 40:
        raise InvalidOption(f"got {version!r}; pass a policy version (a number of optimizer updates, 0 or more)")
    there: set[int] = set()
    for table in (SEQUENCES, SCORES):
        for rows in _columns(snapshot, table, ["policy_version"]):
            there.update(version for column in rows.columns for version in pc.unique(column).drop_null().to_pylist())
    if there and version not in there:
        some = [str(each) for each in sorted(there)]
        told = ", ".join(some if len(some) <= _TOLD else [*some[: _TOLD - 1], "...", some[-1]])
        raise InvalidOption(f"{snapshot.store.url}: no row has version {version}; recorded versions: {told}")


def _check_model(snapshot: Snapshot, model: Any, there: str) -> None:
    where, config = snapshot.store.url, model.config.to_dict()
    for known in snapshot.writers:
        if known.model.get("adapters"):
            raise InvalidOption(f"{where} was recorded with adapters, but a model folder contains no adapter weights")
        recorded = known.model.get("config")
        if isinstance(recorded, dict):
            other = [name for name in _DECIDING if _size(recorded, name) != _size(config, name)]
            if other:
                told = ", ".join(f"{name} {_size(config, name)}, not {_size(recorded, name)}" for name in other)
                raise InvalidOption(f"{there} does not match the model in {where}: {told}")
    tables = _columns(snapshot, SEQUENCES, ["prompt_ids", "response_ids"])
    tokens = (pc.max(pc.list_flatten(column)).as_py() for rows in tables for column in rows.columns)
    most = max((token for token in tokens if token is not None), default=-1)
    vocab_size = int(_size(config, "vocab_size") or 0)
    if most >= vocab_size:
        raise InvalidOption(
            f"{there} has a vocabulary of {vocab_size:,} tokens, but {where} contains token {most:,}; check that the "
            "folder holds the model that was trained"
        )


def _size(config: Mapping[str, Any], name: str) -> Any:
    return (config.get("text_config") or config).get(name)


def _columns(snapshot: Snapshot, table: str, names: Sequence[str]) -> Iterator[pa.Table]:
    for entry in snapshot.files[table]:
        wanted = [name for name in names if name not in entry.lacking]
        yield pq.read_table(pa.PythonFile(FileCursor(entry.file), mode="r"), columns=wanted)
    if table in snapshot.journals:
        yield snapshot.journals[table].select(names)


def _to_replace(store: Store, version: int, force: bool) -> list[str]:
    states = {state.writer: state for state in store.writers()[0]}
    writers = [record.writer for record in WeightReader(store, tuple(states.values())).parts.get(version, ())]
    if any(name not in states or states[name].attached_from is None for name in writers):
        raise InvalidOption(
            f"{store.url} has recorded weights of version {version}, which cannot be replaced. To attach other "
            "weights, import or copy the run without weights"
        )
    if writers and not force:
        raise InvalidOption(
            f"{store.url} already has weights of version {version}, attached from {states[writers[0]].attached_from}; "
            f"replace them with {option('force')}"
        )
    return writers


def _remove(store: Store, folder: Path, name: str) -> None:
    """Mark a writer as removed, so that readers ignore its attached weights, then delete its files."""
    path = f"{WRITERS}/{name}.json"
    write_part(folder, path, replace(store.writer(name), is_removed=True).to_json().encode())
    for file in (*store.files(WEIGHTS), *store.folders(WEIGHTS)):
        stem = file.removesuffix(".json").rpartition(".")[0] if file.endswith(".json") else file
        if (segment := Segment.parse(stem)) is not None and segment.writer == name:
            remove(folder / WEIGHTS / file)
    (folder / path).unlink(missing_ok=True)
