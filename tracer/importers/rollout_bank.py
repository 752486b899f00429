"""Import Megatron-RL's rollout bank (`--rl-durable-rollout-bank`), which stores finished rollout groups.

`ledger.log` has one JSON line per group, with offsets into `tokens.bin` (int32), `logprobs.bin` (float16, generated
tokens only) and `masks.bin` (uint8). MANIFEST.json names the generation and its segments. Names, types and
checksum are those of Megatron-LM's megatron/rl/rollout_bank.py, and turns are joined as in megatron/rl/rl_utils.py
(`_is_collapsible_rollout`, `prepare_trajectories`), both at commit d98e8a6.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np

from ...schemas.errors import ImportFailed
from ..store import too_large
from .dump_rows import masked_row
from .fields import Fields, Values
from .format import DumpFolder, Format, Part, Reading, read_rows
from .textfiles import opened, parsed, read_lines, whole_content

_LEDGER, _MANIFEST = "ledger.log", "MANIFEST.json"
_PATTERN = rf"gen-\d+/{_LEDGER}"
_SIDECARS = (("tokens.bin", "<i4"), ("logprobs.bin", "<f2"), ("masks.bin", "u1"))
_UID = re.compile(r"gen-(\d{1,18})/\d+")
_AT_ONCE = 64
_TIMES = 8
"""Maximum memory for a group's arrays, as a multiple of its size in the .bin files."""
_BYTES_PER_TURN = 128
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Turn = tuple[np.ndarray, np.ndarray, Values]
"""(tokens, mask, logprobs) of a turn, each of shape [T]."""


class _Slice(msgspec.Struct, frozen=True):
    offset: _Natural = 0
    bytes: _Natural = 0
    lengths: list[list[_Natural]] = []


class _Members(msgspec.Struct):
    rollouts: list[dict[str, Any]]


class _Group(msgspec.Struct):
    format_version: Literal[2]
    kind: Literal["token"]
    collection_iter: _Natural
    group: _Members
    checksum: str
    tok: _Slice
    lp: _Slice = _Slice()
    mask: _Slice = _Slice()


class _Manifest(msgspec.Struct):
    format_version: Literal[2]
    active_generation: str
    segments: list[str]


def _parts(folder: DumpFolder) -> list[Part]:
    """Return one part per segment. If there is a manifest, only the active generation's segments are returned."""
    manifests = folder.matching(re.escape(_MANIFEST))
    active = {ledger for name in manifests for ledger in _active(folder.path(name), name)}
    return [Part(files=(name,)) for name in folder.matching(_PATTERN) if name in active or not manifests]


def _active(path: Path, name: str) -> list[str]:
    found = _typed(parsed(whole_content(path), str(path), "the manifest is one object"), _Manifest, str(path))
    folder = os.path.join(os.path.dirname(name), "generations", found.active_generation)
    return [os.path.join(folder, segment, _LEDGER) for segment in found.segments]


def _typed(value: Any, kind: type[_Struct], where: str) -> _Struct:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ImportFailed(f"{where} does not follow rollout bank version 2 ({error}). Copy the bank again") from error


def _groups(reading: Reading, path: Path, first: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, group). `group["turns"][sidecar][member][turn]` is an array."""
    budget, recent = reading.new_budget(), deque[int](maxlen=_AT_ONCE * len(_SIDECARS))
    ends = [0] * len(_SIDECARS)
    for number, record in read_lines(path, first):
        where = f"{path}, line {number}"
        if record.get("kind") == "inline":
            found = record.get("group")
            members = found.get("rollouts") if isinstance(found, dict) else None
            reading.num_text += len(members) if isinstance(members, list) else 0
            continue
        group = _typed(record, _Group, where)
        slices, turns = list[bytes](), []
        for place, (name, dtype) in enumerate(_SIDECARS):
            meta = (group.tok, group.lp, group.mask)[place]
            lengths = [length for row in meta.lengths for length in row]
            # Without this check, overlapping entries could cause a small file to be read many times.
            if meta.bytes and meta.offset < ends[place]:
                raise ImportFailed(f"{where}: offset {meta.offset:,} in {name} is before the previous group's end")
            is_whole = sum(lengths) * np.dtype(dtype).itemsize == meta.bytes
            if not is_whole or len(meta.lengths) not in (0, len(group.group.rollouts)):
                raise ImportFailed(f"{where}: lengths in {name} do not add up to {meta.bytes:,} bytes")
            budget.take(_BYTES_PER_TURN * len(lengths))
            recent.append(meta.bytes)
            slices.append(_slice(reading, name, meta, where, sum(recent)))
            ends[place] = max(meta.offset + meta.bytes, ends[place])
            parts = iter(np.split(np.frombuffer(slices[-1], dtype), np.cumsum(lengths[:-1])))
            turns.append([[next(parts) for _ in row] for row in meta.lengths])
        rest = {name: value for name, value in record.items() if name != "checksum"}
        text = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
        if hashlib.blake2b(b"".join([text, *slices]), digest_size=16).hexdigest() != group.checksum:
            raise ImportFailed(f"{where} does not match its checksum. Copy the bank again from the original")
        yield number, record | {"turns": turns}


def _slice(reading: Reading, name: str, meta: _Slice, where: str, num_recent: int) -> bytes:
    if not meta.bytes:
        return b""
    if (found := reading.folder.beside(reading.part.files[0], name)) is None:
        raise ImportFailed(f"{where}: {name} is missing. Copy the whole bank")
    path, end = reading.folder.path(found), meta.offset + meta.bytes
    if end > path.stat().st_size:
        raise ImportFailed(f"{where}: {name} ends before byte {end:,}. Copy the whole bank again")
    if (said := too_large(num_recent, _TIMES)) is not None:
        raise ImportFailed(f"{where}: {name}: {said}. Import it on a larger machine")
    with opened(path) as file:
        file.seek(meta.offset)
        return file.read(meta.bytes)


def _rows(fields: Fields, name: str, number: int) -> Iterator[dict[str, Any]]:
    uid = fields.text("group_id")
    # Take the step from the uid if possible, because collection_iter changes when a checkpoint compacts the bank.
    found = _UID.fullmatch(uid or "")
    common = {"step": (int(found[1]) if found else fields.record["collection_iter"]) + 1, "group_id": uid}
    for place, member in enumerate(fields.record["group"]["rollouts"]):
        own = fields.of(member, f"{fields.where}, rollout {place}")
        tokens, logprobs, masks = (each[place] if each else [] for each in fields.record["turns"])
        if not tokens:
            continue  # a placeholder for a failed episode
        if len(masks) != len(tokens) or len(logprobs) not in (0, len(tokens)):
            raise ImportFailed(f"{own.where}: {len(tokens)} turns, but {len(masks)} masks and {len(logprobs)} logprobs")
        common["reward"] = None if isinstance(own.get("reward"), list) else own.number("reward")
        turns = [
            _turn(*turn, own.where)
            for turn in zip(tokens, masks, logprobs or [np.empty(0, np.float16)] * len(tokens), strict=True)
        ]
        for ids, mask, values in [_joined(turns)] if _is_chain(turns) else turns:
            if mask.any():
                yield common | own.added_cells(common) | masked_row(ids, mask, {"rollout_logprobs": values})


def _turn(tokens: np.ndarray, mask: np.ndarray, logprobs: np.ndarray, where: str) -> _Turn:
    """Assign logprobs to the generated tokens. An end token that the trainer appended has no logprob."""
    if len(mask) != len(tokens) or len(logprobs) > (mask == 1).sum() or (mask > 1).any():
        raise ImportFailed(
            f"{where}: the mask ({len(mask)} entries) and the logprobs ({len(logprobs)}) do not match the tokens "
            f"({len(tokens)})"
        )
    values = Values(np.zeros(len(tokens), np.float32), np.zeros(len(tokens), bool))
    at = np.flatnonzero(mask)[: len(logprobs)]
    values.values[at], values.known[at] = logprobs, True
    return tokens, mask.astype(bool), values


def _is_chain(turns: list[_Turn]) -> bool:
    """Return True if each turn begins with the previous turn's tokens, so that all turns form one sequence."""
    whole = all((mask == values.known).all() for _, mask, values in turns[:-1] if values.known.any())
    return whole and all(np.array_equal(a, b[: len(a)]) for (a, *_), (b, *_) in pairwise(turns))


def _joined(turns: list[_Turn]) -> _Turn:
    tokens, mask, values = turns[-1]
    for _, one, own in turns[:-1]:
        at = np.flatnonzero(own.known)
        mask[: len(one)] |= one
        values.values[at], values.known[at] = own.values[at], True
    return tokens, mask, values


MEGATRON_RL = Format(
    name="megatron-rl",
    writes="`--rl-durable-rollout-bank`",
    files=f"generations/generation-<id>/gen-<N>/{_LEDGER} with tokens.bin, logprobs.bin and masks.bin",
    columns={"group_id": ("uid",), "step": ("collection_iter",), "reward": ("reward",)},
    alignment="each turn has all its tokens, a mask that marks the generated tokens, and one logprob per generated token. "
    "Turns that extend each other form one sequence. The uid contains the iteration that collected the group. "
    "The step is the next iteration, as in Megatron-LM",
    pattern=_PATTERN,
    parts=_parts,
    read=lambda reading: read_rows(reading, _rows, records=partial(_groups, reading), at_once=_AT_ONCE),
    contracts={"rollout": {"stored_as": "float16"}},
    lacks={
        "rollout": "the groups have no logprobs",
        "train": "the bank has only the engine's logprobs. Record the trainer's with tim_trace.Recorder, or attach the "
        "weights and replay",
    },
    lines=True,
)
