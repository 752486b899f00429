from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ..batching import grouped
from ..recorded import RecordedRow
from .names import layer_of

_BEFORE_LAYERS = re.compile(r"embed|wte|wpe|rotary")
_NORM_OF_LAYER = re.compile(r"\.\d+\.(?:\w*norm\w*|ln\w*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Layers whose operator values are in memory at the same time."""

    first: int | None = None
    """First layer, or None for all layers."""
    last: int | None = None
    is_last: bool = True

    def has(self, layer: int) -> bool:
        return self.first is None or self.last is None or self.first <= layer <= self.last

    def needs(self, name: str) -> bool:
        """Return True if the window needs an operator's values. The next layer's norms take its last output."""
        layer = layer_of(name)
        if layer is None:
            return self.is_last or bool(_BEFORE_LAYERS.search(name))
        return self.has(layer) or (self._is_next(layer) and bool(_NORM_OF_LAYER.search(name)))

    def runs(self, layer: int) -> bool:
        return self.has(layer) or self._is_next(layer)

    def _is_next(self, layer: int) -> bool:
        return self.last is not None and layer == self.last + 1


EVERY_LAYER = Window()


def parts(
    rows: Iterable[RecordedRow], operators: Iterable[str], num_bytes: int, most_bytes: int
) -> Iterator[tuple[list[RecordedRow], list[Window]]]:
    """Yield groups of sequences that fit into memory together, each with its layer windows."""
    layers = sorted({layer for name in operators if (layer := layer_of(name)) is not None})

    def size(part: Sequence[RecordedRow]) -> int:
        return sum(row.num_tokens for row in part) * num_bytes

    by_forward = sorted(rows, key=lambda row: (row.writer, row.forward_id))
    for part in grouped(by_forward, lambda part: size(part) <= most_bytes):
        number = min(math.ceil(size(part) / most_bytes), len(layers))
        windows = [EVERY_LAYER]
        if number > 1 and layers == list(range(len(layers))):
            ends = np.linspace(0, len(layers), number + 1).astype(int).tolist()
            windows = [Window(first=first, last=end - 1, is_last=end == len(layers)) for first, end in pairwise(ends)]
        yield part, windows


def bytes_per_token(model: Any) -> int:
    text = model.config.get_text_config()
    hidden = getattr(text, "hidden_size", 1024)
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    values = int(getattr(text, "num_hidden_layers", 32) * (12 * hidden + 4 * inner))
    return values * int(next(model.parameters()).element_size())


def free_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
