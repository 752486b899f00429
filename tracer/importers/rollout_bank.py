"""Import Megatron-RL's rollout bank (`--rl-durable-rollout-bank`), which stores finished rollout groups.

`ledger.log` has one JSON line per group, which points into `tokens.bin` (int32), `logprobs.bin` (float16, generated
tokens only) and `masks.bin` (uint8) by offset. MANIFEST.json names the generation and its segments. Names, types and
checksum are those of Megatron-LM's megatron/rl/rollout_bank.py, and turns are joined as in megatron/rl/rl_utils.py
(`_is_collapsible_rollout`, `prepare_trajectories`), both d98e8a6.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from ..store import too_large
from .columns import RowBatch
from .fields import Fields, Values, shown
from .format import DumpFolder, Format, Part, Reading, read_rows
from .masked_lines import masked_row
from .pickles import Budget
from .textfiles import as_object, opened, parsed, read_lines, whole_content

_LEDGER, _MANIFEST, _VERSION = "ledger.log", "MANIFEST.json", 2
_PATTERN = rf"gen-\d+/{_LEDGER}"
_SIDECARS = {"tok": ("tokens.bin", "<i4"), "lp": ("logprobs.bin", "<f2"), "mask": ("masks.bin", "u1")}
_UID = re.compile(r"gen-(\d{1,18})/\d+")
_AT_ONCE = 64
_TIMES = 8
"""Maximum memory for a group's arrays, as a multiple of its bytes in the sidecars."""
_BYTES_PER_TURN = 128


def _parts(folder: DumpFolder) -> list[Part]:
    """Return one part per segment. If there is a manifest, only segments of the active generation count."""
    ledgers = [name for name, _ in folder.matching(_PATTERN)]
    manifests = [name for name, _ in folder.matching(re.escape(_MANIFEST))]
    active = {ledger for name in manifests for ledger in _active(folder.path(name), name)}
    return [Part(files=(name,)) for name in ledgers if name in active or not manifests]


def _active(path: Path, name: str) -> list[str]:
    found = as_object(parsed(whole_content(path), str(path), "the manifest is one object"), str(path), "the manifest")
    _check_version(found, str(path))
    generation, segments = found.get("active_generation"), found.get("segments")
    if (
        not isinstance(generation, str)
        or not isinstance(segments, list)
        or not all(isinstance(s, str) for s in segments)
    ):
        raise ImportFailed(f"{path}: does not name an active_generation and its segments. Copy the bank again")
    return [os.path.join(os.path.dirname(name), "generations", generation, segment, _LEDGER) for segment in segments]


def _check_version(record: Mapping[str, Any], where: str) -> None:
    if (version := record.get("format_version")) != _VERSION:
        raise ImportFailed(f"{where}: unsupported format_version {shown(version)}; expected {_VERSION}")


def _groups(reading: Reading, path: Path, first: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line, group). Its `turns` maps a sidecar to arrays [member][turn]."""
    budget, recent = reading.budget(), deque[int](maxlen=_AT_ONCE)
    folder, ledger, ends = reading.folder, reading.part.files[0], dict.fromkeys(_SIDECARS, 0)
    for number, record in read_lines(path, first):
        where = f"{path}, line {number}"
        _check_version(record, where)
        if record.get("kind") != "token":
            continue  # text without token ids, or a group without rollouts
        group = record.get("group")
        members = group.get("rollouts") if isinstance(group, dict) else None
        if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
            raise ImportFailed(f"{where}: has no list of rollouts")
        slices, turns = [], {}
        for key, (name, dtype) in _SIDECARS.items():
            content = b""
            if key in record:
                content, ends[key] = _slice(folder, ledger, name, record[key], ends[key], where, recent)
                turns[key] = _turns(
                    content, dtype, record[key].get("lengths"), len(members), f"{where}, {name}", budget
                )
            slices.append(content)
        if _checksum(record, slices) != record.get("checksum"):
            raise ImportFailed(f"{where}: does not match its checksum. Copy the bank again from where it was written")
        yield number, record | {"turns": turns}


def _checksum(record: Mapping[str, Any], slices: list[bytes]) -> str:
    rest = {name: value for name, value in record.items() if name != "checksum"}
    digest = hashlib.blake2b(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode(), digest_size=16)
    for content in slices:
        digest.update(content)
    return digest.hexdigest()


def _slice(
    folder: DumpFolder, ledger: str, name: str, meta: Any, start: int, where: str, recent: deque[int]
) -> tuple[bytes, int]:
    """Return a group's bytes and where they end. Groups must not share bytes, which would multiply a small sidecar."""
    offset, size = (meta.get(key) if isinstance(meta, dict) else None for key in ("offset", "bytes"))
    if type(offset) is not int or type(size) is not int or offset < start or size < 0:
        raise ImportFailed(
            f"{where}: offset {shown(offset)} and bytes {shown(size)} in {name} do not follow those before"
        )
    if size == 0:
        return b"", start
    if (found := folder.beside(ledger, name)) is None:
        raise ImportFailed(f"{where}: {name} is missing. Copy the whole bank")
    path = folder.path(found)
    if offset + size > path.stat().st_size:
        raise ImportFailed(f"{where}: {name} ends before byte {offset + size:,}. Copy the whole bank again")
    recent.append(size)
    if (said := too_large(sum(recent), _TIMES)) is not None:
        raise ImportFailed(f"{where}: {name}: {said}. Import it on a larger machine")
    with opened(path) as file:
        file.seek(offset)
        return file.read(size), offset + size


def _turns(
    content: bytes, dtype: str, lengths: Any, num_members: int, where: str, budget: Budget
) -> list[list[np.ndarray]]:
    rows = lengths if isinstance(lengths, list) and all(isinstance(row, list) for row in lengths) else []
    flat = [length for row in rows for length in row]
    budget.take(_BYTES_PER_TURN * len(flat))
    is_valid = len(rows) == num_members and all(type(n) is int and n >= 0 for n in flat)
    if not is_valid or sum(flat) * np.dtype(dtype).itemsize != len(content):
        raise ImportFailed(f"{where}: its lengths do not add up to {len(content):,} bytes of {num_members} rollouts")
    parts = iter(np.split(np.frombuffer(content, dtype), np.cumsum(flat[:-1])))
    return [[next(parts) for _ in row] for row in rows]


def _rows(fields: Fields, name: str, number: int) -> Iterator[dict[str, Any]]:
    record, turns = fields.record, fields.record["turns"]
    uid = fields.text("group_id")
    found = _UID.fullmatch(uid or "")
    collected = int(found[1]) if found else fields.integer("step")
    if collected is None:
        raise ImportFailed(f"{fields.where}: its uid does not name an iteration, and it has no collection_iter")
    for place, member in enumerate(record["group"]["rollouts"]):
        own = fields.of(member, f"{fields.where}, rollout {place}")
        tokens, logprobs, masks = (turns[key][place] if key in turns else [] for key in _SIDECARS)
        if not tokens:
            continue  # a placeholder of a failed episode
        if len(masks) != len(tokens) or len(logprobs) not in (0, len(tokens)):
            raise ImportFailed(f"{own.where}: {len(tokens)} turns, but {len(masks)} masks and {len(logprobs)} logprobs")
        logprobs = logprobs or [np.empty(0, np.float16)] * len(tokens)
        sampled = [_sampled(*turn, own.where) for turn in zip(tokens, masks, logprobs, strict=True)]
        sequences = [(ids, *one) for ids, one in zip(tokens, sampled, strict=True)]
        reward = None if isinstance(own.get("reward"), list) else own.number("reward")
        for ids, mask, values in [_joined(tokens, sampled)] if _is_chain(tokens, sampled) else sequences:
            if mask.any():
                row = masked_row(ids, mask, {"rollout_logprobs": values if values.known.any() else None})
                yield {"step": collected + 1, "group_id": uid, "reward": reward, **row}


def _sampled(tokens: np.ndarray, mask: np.ndarray, logprobs: np.ndarray, where: str) -> tuple[np.ndarray, Values]:
    """Spread a turn's logprobs over its generated tokens. Those beyond the last logprob (an appended end token) have
    none."""
    if len(mask) != len(tokens) or len(logprobs) > (mask == 1).sum() or (mask > 1).any():
        raise ImportFailed(
            f"{where}: {len(tokens)} tokens, {len(mask)} entries in its mask and {len(logprobs)} logprobs do not match"
        )
    at = np.flatnonzero(mask)[: len(logprobs)]
    values = _none_of(len(tokens))
    values.values[at], values.known[at] = logprobs, True
    return mask.astype(bool), values


def _is_chain(tokens: list[np.ndarray], sampled: list[tuple[np.ndarray, Values]]) -> bool:
    """Return True if each turn's tokens begin with the previous turn's, so that all turns are one sequence."""
    pairs = pairwise(tokens)
    whole = all((mask == values.known).all() for mask, values in sampled[:-1] if values.known.any())
    return whole and all(len(a) <= len(b) and np.array_equal(a, b[: len(a)]) for a, b in pairs)


def _joined(
    tokens: list[np.ndarray], sampled: list[tuple[np.ndarray, Values]]
) -> tuple[np.ndarray, np.ndarray, Values]:
    mask, values = np.zeros(len(tokens[-1]), bool), _none_of(len(tokens[-1]))
    for one, own in sampled:
        mask[: len(one)] |= one
        at = np.flatnonzero(own.known)
        values.values[at], values.known[at] = own.values[at], True
    return tokens[-1], mask, values


def _none_of(length: int) -> Values:
    return Values(np.zeros(length, np.float32), np.zeros(length, bool))


def _read(reading: Reading) -> Iterator[RowBatch]:
    return read_rows(reading, _rows, records=lambda path, first: _groups(reading, path, first), at_once=_AT_ONCE)


MEGATRON_RL = Format(
    name="megatron-rl",
    writes="`--rl-durable-rollout-bank`",
    files=f"generations/generation-<id>/gen-<N>/{_LEDGER} with tokens.bin, logprobs.bin and masks.bin",
    columns={"group_id": ("uid",), "step": ("collection_iter",), "reward": ("reward",)},
    alignment="each turn has all its tokens, a mask of the generated ones and one logprob per generated token. Turns that "
    "continue each other are one sequence. uid names the iteration that collected a group, and the step is the one after it, "
    "as Megatron-LM counts",
    pattern=_PATTERN,
    parts=_parts,
    read=_read,
    contracts={"rollout": {"stored_as": "float16"}},
    lacks={
        "rollout": "the groups have no logprobs",
        "train": "the bank has only the engine's logprobs. Record the trainer's with tim_trace.Recorder, or attach the "
        "weights and replay",
    },
    lines=True,
)
