"""Attention for rows packed end to end. A row attends only to itself, including any prefix shared with other rows.

Shapes: N heads, G key-value heads, W tokens in a forward pass, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...schemas.errors import CannotReplay, option

NAME = "tim_trace_packed"


def register() -> None:
    """Register the packed attention with transformers. It takes the argument `packed` (RowSpans) instead of a mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    start: int
    end: int
    prefix: tuple[tuple[int, int], ...] = ()
    """Earlier parts of the same row, as (start, end) ranges with an exclusive end."""


@dataclass(slots=True)
class RowSpans:
    spans: Sequence[Span]
    num_attentions: int = 0


def check(config: Any) -> None:
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise _cannot(f"{text.model_type} has layers without full attention ({', '.join(sorted(kinds))})")


def check_all(rows: RowSpans, config: Any) -> None:
    layers = config.get_text_config().num_hidden_layers
    if rows.num_attentions != layers:
        raise _cannot(f"only {rows.num_attentions} of {layers} layers can separate packed rows")


def _attention(
    module: Any, query_1NWD: Any, key_1GWD: Any, value_1GWD: Any, attention_mask: Any, *,
    packed: RowSpans, scaling: float | None = None, **more: Any,
) -> tuple[Any, None]:  # fmt: skip
    import torch

    special = [name for name in ("softcap", "s_aux", "position_bias", "sliding_window") if more.get(name) is not None]
    if special:
        raise _cannot(f"its attention uses {special[0]}")
    parts = []
    grouped = query_1NWD.shape[1] != key_1GWD.shape[1]
    attend = partial(torch.nn.functional.scaled_dot_product_attention, scale=scaling, enable_gqa=grouped)
    for span in packed.spans:
        own = slice(span.start, span.end)
        query, key, value = (states[:, :, own] for states in (query_1NWD, key_1GWD, value_1GWD))
        mask = None
        if span.prefix:
            before = [slice(*stretch) for stretch in span.prefix]
            key, value = (
                torch.cat([*(states[:, :, stretch] for stretch in before), part], dim=2)
                for states, part in ((key_1GWD, key), (value_1GWD, value))
            )
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
            mask = mask.tril(key.shape[2] - query.shape[2])
        parts.append(attend(query, key, value, attn_mask=mask, is_causal=mask is None and query.shape[2] > 1))
    packed.num_attentions += 1
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _cannot(why: str) -> CannotReplay:
    return CannotReplay(
        f"padding=packed is not possible with this model: {why}; use {option('padding', 'left')} or right"
    )
