from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..replay.backends import adapters
from ..schemas.errors import InvalidOption, TimTraceError, WeightsMissing, option, tell_damage
from ..schemas.layout import TOKENIZER, is_tokenizer
from ..schemas.modules import module_of
from ..schemas.weights import ITEM_BYTES, WeightVersion
from ..tracer.progress import Progress, no_progress
from ..tracer.store import Store
from ..tracer.weights.checkpoints import CheckpointReader, config_of, open_weights, write_folder
from ..tracer.weights.reader import SUPPLIES, WeightReader
from .engine_weights import ADAPTER, NEVER, OTHER, PARTIAL, QUANTISED, STALE, engine_weights
from .rows import Rows, to_text, wrapped

OK = "ok"
VERSION_COLUMNS = ("version", "kind", "writers", "num_elements", "num_bytes", "stored_bytes", "share_changed", "chain")
MODULE_COLUMNS = ("module", "num_tensors", "num_elements", "mean_share_changed", "max_share_changed", "num_unchanged")


def weights(
    trace: str | os.PathLike[str], *, by: str = "version", engine: bool = False, verify: bool = False,
    weights_from: str | os.PathLike[str] | None = None, progress: Progress = no_progress,
) -> Rows:  # fmt: skip
    """List the weight versions, with their size and the share of elements that changed.

    Each version's row has the number of elements, their bytes in memory and on disk, the share whose bits differ from
    the previous version, and a hash over the whole history. In bfloat16 at typical learning rates, at least 98% of
    the elements stay the same (arXiv 2602.03839). `verify` rebuilds each version, checks its hashes, and adds the
    column `verified`: `ok`, or a description of the damage. If `by` is module, each row is a module, combined over all
    layers, and `num_unchanged` counts the versions in which the module did not change.

    `engine` compares the engine's tensors (or modules) with the trainer's instead. `trainer_version` is the trainer's
    version when the engine last started sampling, `given_version` the last version that the engine received, and
    `holds_version` the latest version whose bits the engine has. `agrees` tells whether the two agree (None if
    unknown), `num_differ` counts the versions at which they differed, and `cause` is a code in WEIGHT_CAUSES.

    `weights_from` is the folder of the run's checkpoints, for a trace without weights.

    Raises WeightsMissing if there are no weights, TraceNotFound, NewerTrace.
    """
    if by not in ("version", "module"):
        raise InvalidOption(f"got {by!r}; use version or module", option="by")
    if engine:
        if verify:
            raise InvalidOption(
                f"{option('verify')} applies only to the trainer's weights; drop one option", option="engine"
            )
        return engine_weights(trace, by="module" if by == "module" else "tensor")
    reader = _open(trace, weights_from)
    if isinstance(reader, CheckpointReader):
        if by == "module":
            raise InvalidOption(
                f"{trace}: the weights are checkpoints, which do not record changes; use {option('by', 'version')}"
            )
        rows = _of_checkpoints(reader)
    else:
        rows = _by_version(reader) if by == "version" else _by_module(reader)
    return _verified(rows, reader, progress) if verify and by == "version" else rows


def export(
    trace: str | os.PathLike[str], version: int, folder: str | os.PathLike[str], *,
    weights_from: str | os.PathLike[str] | None = None,
) -> Path:  # fmt: skip
    """Write a version's weights to a folder that transformers can load with `from_pretrained`.

    A model with adapters is written as the base model, plus one folder per adapter for peft's
    `PeftModel.from_pretrained`.

    Only files that are named like tokenizer files are copied from the trace, so no code, pickle or model config is
    copied. If the trace is untrusted, load the folder without trust_remote_code.

    Raises WeightsMissing or DamagedTrace, or InvalidOption if `folder` exists.
    """
    store = Store(trace)
    tensors = _open(trace, weights_from).load(version)
    model = next((state.model for state in store.writers()[0] if state.model.get("config")), None)
    if model is None:
        raise WeightsMissing(f"{trace} has no model config, so its weights cannot be exported; record the run again")
    tokenizer = {name: store.read_bytes(f"{TOKENIZER}/{name}") for name in store.files(TOKENIZER) if is_tokenizer(name)}
    target = Path(folder)
    own = {name: adapters.exported_config(name, config) for name, config in (model.get("adapters") or {}).items()}
    below = adapters.below(tensors) if own else tensors
    sizes = Counter[str]()
    for tensor in below.values():
        sizes[tensor.dtype] += tensor.bits.size
    write_folder(target, below, config_of(model) | {"dtype": max(sizes, key=sizes.__getitem__)}, tokenizer)
    for name, config in own.items():
        write_folder(target / name, adapters.of_adapter(tensors, name), config, {}, prefix="adapter_")
    return target


def _open(
    trace: str | os.PathLike[str], weights_from: str | os.PathLike[str] | None
) -> WeightReader | CheckpointReader:
    store = Store(trace)
    store.manifest()
    reader = open_weights(store, weights_from)
    tell_damage(reader.damaged)
    if not reader.versions:
        hint = reader.damaged[0] if reader.damaged else f"{SUPPLIES}, or {option('weights_from', 'DIR')}"
        if isinstance(reader, WeightReader) and not reader.damaged and reader.checkpoints is not None:
            hint = reader.told_checkpoints
        raise WeightsMissing(f"{trace}: has no weights; {hint}")
    return reader


def _by_version(reader: WeightReader) -> Rows:
    rows = []
    for version in reader.versions:
        parts = reader.parts[version]
        elements = sum(tensor.numel for part in parts for tensor in reader.layout(part).tensors)
        rows.append((
            version, "keyframe" if all(part.is_keyframe for part in parts) else "delta", len(parts), elements,
            sum(reader.layout(part).num_bytes for part in parts), sum(part.num_bytes for part in parts),
            _share(parts, elements), parts[0].chain[:12] if len(parts) == 1 else None,
        ))  # fmt: skip
    return Rows(VERSION_COLUMNS, rows)


def _share(parts: Sequence[WeightVersion], elements: int) -> float | None:
    known = [sum(part.num_changed.values()) for part in parts if part.num_changed is not None]
    return sum(known) / elements if len(known) == len(parts) and elements else None


def _by_module(reader: WeightReader) -> Rows:
    sizes: dict[str, dict[str, int]] = {}
    changed: dict[str, list[int]] = {}
    for version in reader.versions:
        counts: dict[str, int] = {}
        for part in reader.parts[version]:
            for tensor in reader.layout(part).tensors:
                module = module_of(tensor.name)
                sizes.setdefault(module, {})[f"{part.writer} {tensor.name}"] = tensor.numel
                if part.num_changed is not None:
                    counts[module] = counts.get(module, 0) + part.num_changed[tensor.name]
        for module, count in counts.items():
            changed.setdefault(module, []).append(count)
    rows = []
    for module, tensors in sizes.items():
        elements, counts_of = sum(tensors.values()), changed.get(module, [])
        shares = [count / elements for count in counts_of]
        rows.append((
            module, len(tensors), elements,
            sum(shares) / len(shares) if shares else None, max(shares, default=None),
            sum(count == 0 for count in counts_of) if counts_of else None,
        ))  # fmt: skip
    return Rows(MODULE_COLUMNS, rows)


def _of_checkpoints(reader: CheckpointReader) -> Rows:
    rows = []
    for version in reader.versions:
        tensors = reader.load(version).values()
        elements = sum(tensor.bits.size for tensor in tensors)
        num_bytes = sum(tensor.bits.size * ITEM_BYTES[tensor.dtype] for tensor in tensors)
        stored = sum(path.stat().st_size for path in reader.folders[version].glob("*.safetensors"))
        rows.append((version, "checkpoint", 1, elements, num_bytes, stored, None, None))
    return Rows(VERSION_COLUMNS, rows)


def _verified(rows: Rows, reader: WeightReader | CheckpointReader, progress: Progress) -> Rows:
    found = []
    with progress("verifying weights", len(rows)) as advance:
        for version, row in zip(reader.versions, rows.rows, strict=True):
            try:
                reader.load(version)
                found.append((*row, OK))
            except TimTraceError as error:
                found.append((*row, str(error)))
                tell_damage([str(error)])
            advance(1)
    return Rows((*rows.columns, "verified"), found)


_REMEDIES: Mapping[str, str] = {
    STALE: "load each new version before sampling",
    PARTIAL: "send every tensor that changed",
    NEVER: "send each new version",
    ADAPTER: "merge the adapter into the weights before sending them",
    QUANTISED: "send unquantised weights, or correct for the mismatch if quantisation is intended",
    OTHER: "check which weights are sent",
}
_LEGEND = (
    "first_differs: first version at which engine and trainer differ; num_differ: number of such versions, of num_versions; "
    "given_version: last version sent to the engine; holds_version: latest version whose bits the engine has (blank if none); "
    "trainer_version: the trainer's latest version."
)


def engine_weights_text(rows: Rows, by: str, width: int | None = None) -> str:
    """Render the rows. Tensors that agree at every version are counted but not listed."""
    agreeing = [row for row in rows.dicts() if row["agrees"] and not row["num_differ"]]
    differing = [row for row in rows.dicts() if row["num_differ"]]
    left = [row for row in rows.dicts() if not row["agrees"] or row["num_differ"]]
    sentences = []
    if differing:
        causes = ", ".join(dict.fromkeys(row["cause"] for row in differing))
        first = min(row["first_differs"] for row in differing)
        num = f"{len(differing):,} of {len(rows):,}"
        sentences.append(f"{num} engine {by}s differ ({causes}), first at version {first:,}.")
        remedies = "; ".join(dict.fromkeys(_REMEDIES[row["cause"]] for row in differing))
        sentences.append(f"Fix the engine's weight update: {remedies}.")
    if agreeing:
        versions = sorted({row["num_versions"] for row in agreeing})
        at = f"{versions[0]:,}" if len(versions) == 1 else f"{versions[0]:,} to {versions[-1]:,}"
        num = f"{len(agreeing):,} of {len(rows):,}" if left else f"All {len(rows):,}"
        sentences.append(f"{num} engine {by}s equal the trainer's bit for bit at all {at} versions (--csv lists them).")
    blocks = [wrapped(" ".join(sentences), "", width)] if sentences else []
    if left or not agreeing:
        shown = Rows(rows.columns, [tuple(row.values()) for row in left]).without({"agrees"})
        blocks += [to_text(shown, width), wrapped(_LEGEND, "", width)]
    return "\n\n".join(blocks)
