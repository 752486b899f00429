"""A folder of dumped tensors, with the module, forward, rank and position in the order for each tensor."""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...schemas.errors import ImportFailed, NothingToCompare
from .files import SUFFIXES, TensorFile, Value
from .layout import Unmatched
from .names import TensorPlace, has_layer, is_gradient, place_of

_PASS_TAGS = ("step", "forward_pass_id")
"""Names of the tag with which SGLang's dumper numbers forwards, in current and older releases."""
_PASS_FOLDER = re.compile(r"^(?:step|pass|forward|forward_pass|iteration)[_=-]?(\d+)$")
_RANK_FOLDER = re.compile(r"^(?:tp_|global_|tp|global)?rank[_=-]?(\d+)$")
_PROCESS_FOLDER = re.compile(r"^proc\d+$")
_MOST_JSON_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One dumped tensor, and where to read it."""

    name: str
    path: Path
    key: str
    """Name of the tensor in the file; "" if the file has a single unnamed tensor."""
    rank: int
    number: int | None
    """Position in the order in which tensors were dumped; None if not recorded."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Key by which the tensors of two dumps are matched."""

    place: TensorPlace
    forward: int
    """Index of the forward in the dump, from 0."""
    call: int
    """Index of the tensor among all tensors dumped at the same place in one forward, from 0."""


class DumpFolder:
    """All tensors dumped by one side. Only one file at a time is held in memory."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.path = Path(folder)
        if not self.path.is_dir():
            raise NothingToCompare(f"{self.path}: is not a folder; give the folder that the tensors were dumped to")
        self.num_gradients = 0
        """Number of gradients and parameters in the folder, which are not compared."""
        self.order = ""
        """Source of the order of the tensors; empty if the order is not recorded."""
        self._open: TensorFile | None = None
        self.spots: dict[Spot, list[Entry]] = self._spots()
        if not self.spots:
            raise NothingToCompare(
                f"{self.path}: has no tensor from a forward; give a folder of {', '.join(SUFFIXES)} files, with one or several "
                "tensors each"
            )

    @property
    def num_forwards(self) -> int:
        return 1 + max(spot.forward for spot in self.spots)

    def read(self, entry: Entry) -> Value:
        """Read the tensor of an entry. Raises ImportFailed, and Unmatched if the dumped value is not a tensor."""
        file = self._file(entry.path)
        if entry.key not in file.names():
            raise Unmatched("the dumped value is not a tensor")
        return file.read(entry.key)

    def _file(self, path: Path) -> TensorFile:
        if self._open is None or self._open.path != path:
            self._open = None
            self._open = TensorFile(path)
        return self._open

    def _spots(self) -> dict[Spot, list[Entry]]:
        found: list[tuple[str, TensorPlace, int, Entry]] = []
        for forward, layer, entry in self._entries():
            if is_gradient(entry.name):
                self.num_gradients += 1
                continue
            place, call = place_of(entry.name, layer)
            found.append((forward, place, call, entry))
        forwards = {name: place for place, name in enumerate(sorted({item[0] for item in found}, key=_by_number))}
        found.sort(key=lambda item: (item[3].number is None, item[3].number or 0))
        times: Counter[Any] = Counter()
        spots: dict[Spot, list[Entry]] = defaultdict(list)
        for forward, place, call, entry in found:
            seen = (forward, place, call, entry.rank, entry.name)
            spots[Spot(place, forwards[forward], call + times[seen])].append(entry)
            times[seen] += 1
        return {spot: _of_one_name(entries) for spot, entries in spots.items()}

    def _entries(self) -> Iterator[tuple[str, int | None, Entry]]:
        paths = sorted(self._paths(self.path))
        numbers = self._msprobe_order(paths)
        tensors = [path for path in paths if path.suffix in SUFFIXES]
        folders = [path.relative_to(self.path).parent.parts for path in tensors]
        shared = _num_shared(folders)
        ranks: dict[str, int] = {}
        for path, parts in zip(tensors, folders, strict=True):
            tags = _tags(path.stem)
            names, forward, rank = [], "0", 0
            for depth, part in enumerate(parts):
                if of_pass := _PASS_FOLDER.match(part):
                    forward = of_pass[1]
                elif of_rank := _RANK_FOLDER.match(part):
                    rank = int(of_rank[1])
                elif _PROCESS_FOLDER.match(part):
                    rank = ranks.setdefault(part, len(ranks))
                elif depth >= shared and part != "dump_tensor_data":
                    names.append(part)
            if "name" in tags:
                forward = next((tags[tag] for tag in _PASS_TAGS if tag in tags), forward)
                layer = int(tags["layer_id"]) if tags.get("layer_id", "").isdecimal() else None
                self.order = self.order or ("dump_index" if tags.get("dump_index", "").isdecimal() else "")
                yield forward, layer, Entry(
                    name=tags["name"], path=path, key="", rank=_rank(tags, rank),
                    number=int(tags["dump_index"]) if tags.get("dump_index", "").isdecimal() else None,
                )  # fmt: skip
                continue
            for key in self._keys(path):
                name = key if _is_whole(key, path.stem) else ".".join(filter(None, (*names, path.stem, key)))
                yield forward, None, Entry(name=name, path=path, key=key, rank=rank, number=numbers.get(path.name))

    def _keys(self, path: Path) -> list[str]:
        """Return the names of the tensors in a file. Files written by msprobe hold one tensor each, so they need not be
        opened."""
        if path.parent.name == "dump_tensor_data":
            return [""]
        return self._file(path).names()

    def _msprobe_order(self, paths: list[Path]) -> dict[str, int]:
        """Return a mapping from file name to position in msprobe's dump.json, which lists modules in the order in which they
        finished."""
        numbers: dict[str, int] = {}
        for path in paths:
            if path.name != "dump.json":
                continue
            if path.stat().st_size > _MOST_JSON_BYTES:
                raise ImportFailed(f"{path}: is larger than {_MOST_JSON_BYTES >> 30} GiB, so it is not read")
            try:
                listed = json.loads(path.read_bytes())
                for number, name in enumerate(_data_names(listed.get("data", {}))):
                    numbers.setdefault(name, number)
            except (OSError, ValueError, AttributeError, RecursionError) as error:
                raise ImportFailed(f"{path}: is not a complete msprobe dump.json ({error})") from error
        if numbers:
            self.order = "dump.json"
        return numbers

    def _paths(self, folder: Path) -> Iterator[Path]:
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    path = folder / entry.name
                    if entry.is_symlink():
                        if entry.is_dir() or path.suffix in SUFFIXES or entry.name == "dump.json":
                            raise ImportFailed(
                                f"{path}: is a link and is not followed; replace it with a copy of its target"
                            )
                    elif entry.is_dir():
                        yield from self._paths(path)
                    elif path.suffix in SUFFIXES or entry.name == "dump.json":
                        if not entry.is_file():
                            raise ImportFailed(f"{path}: is not a regular file, so it is not read")
                        yield path
        except OSError as error:
            raise ImportFailed(f"{folder}: cannot be read ({error.strerror or error})") from error


def _num_shared(folders: list[tuple[str, ...]]) -> int:
    """Return the number of leading path components shared by all folders."""
    first, last = min(folders, default=()), max(folders, default=())
    return next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def _tags(stem: str) -> dict[str, str]:
    """Parse the tags in a file name written by SGLang's dumper, such as step=0___rank=0___dump_index=3___name=x."""
    return dict(part.partition("=")[::2] for part in stem.split("___") if "=" in part) if "___" in stem else {}


def _rank(tags: dict[str, str], of_folder: int) -> int:
    for tag in ("tp_rank", "rank"):
        if tags.get(tag, "").isdecimal():
            return int(tags[tag])
    return of_folder


def _is_whole(key: str, stem: str) -> bool:
    """Return True if the name of a tensor in a file identifies the tensor without the file name."""
    return has_layer(key) or not (key.isdecimal() or not key or has_layer(stem))


def _by_number(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() and len(name) < 20 else (1 << 62, name)


def _of_one_name(entries: list[Entry]) -> list[Entry]:
    """Return the entries that have the first entry's name, by rank; entries under another name for the same place are
    dropped."""
    return sorted((entry for entry in entries if entry.name == entries[0].name), key=lambda entry: entry.rank)


def _data_names(listed: Any) -> Iterator[str]:
    if isinstance(listed, dict):
        if isinstance(listed.get("data_name"), str):
            yield listed["data_name"]
        for value in listed.values():
            yield from _data_names(value)
    elif isinstance(listed, list):
        for value in listed:
            yield from _data_names(value)
