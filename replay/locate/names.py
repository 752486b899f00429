"""Names of modules: what kind of operator one is, and which layer it belongs to."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

ATTENTION = "attention"
"""Appended to the name of an attention layer for its core: scores, mask, softmax and values, after the rotary."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)(?:\.|$)")
_LAYER_ITSELF = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.\d+$")


def layer_of(name: str) -> int | None:
    """The number of the layer in a module's name."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def kind_of(name: str) -> str:
    """What an operator is, by the last word of its name: q_proj, input_layernorm, act_fn; an item of a list has the list's."""
    return re.sub(r"(\.\d+)+$", "", name.partition("#")[0]).rpartition(".")[2]


def layer_modules(model: Any) -> dict[str, Any]:
    """Name -> module of each layer of a model."""
    return {name: module for name, module in model.named_modules() if _LAYER_ITSELF.search(name)}


def core_name(attention: str) -> str:
    """The name of an attention layer's core."""
    return f"{attention}.{ATTENTION}"


def is_core(name: str) -> bool:
    """Whether a name is that of an attention layer's core, or of one of its calls."""
    return name.partition("#")[0].endswith(f".{ATTENTION}")


class CallNames:
    """Names the calls of operators in one forward: `name`, then `name#2`, and so on."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()

    def next(self, name: str) -> str:
        """The name of an operator's call that begins."""
        self._count[name] += 1
        return self.present(name)

    def present(self, name: str) -> str:
        """The name of an operator's last call."""
        number = self._count[name]
        return name if number <= 1 else f"{name}#{number}"
