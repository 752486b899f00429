from __future__ import annotations

import re
from collections import Counter
from typing import Any

ATTENTION = "attention"
"""Last part of an attention core's name. A core covers everything from the scores to the weighted sum."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)(?:\.|$)")
_LAYER_ITSELF = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.\d+$")


def layer_of(name: str) -> int | None:
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def kind_of(name: str) -> str:
    """Return the last component of an operator's name (q_proj, input_layernorm), ignoring list indices."""
    return re.sub(r"(\.\d+)+$", "", name.partition("#")[0]).rpartition(".")[2]


def layer_modules(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if _LAYER_ITSELF.search(name)}


def core_name(attention: str) -> str:
    return f"{attention}.{ATTENTION}"


class CallNames:
    """Names the calls of each operator in one forward pass: `name`, then `name#2`, and so on."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()

    def next(self, name: str) -> str:
        self._count[name] += 1
        return self.present(name)

    def present(self, name: str) -> str:
        number = self._count[name]
        return name if number <= 1 else f"{name}#{number}"
