"""Shapes: B rows, T tokens per row in a forward pass, S tokens per row including cached ones, H hidden width, M = B T,
A heads, D head width."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ....schemas.errors import CannotReplay, option
from .attention import MOST_KEYS, KeyValueCache, Seen
from .functions import Precision
from .layers import ExactHead, Experts, Linear, Mixture, Mlp, RmsNorm, Rotary, Router

_HEADS_FIRST = ("q_norm", "k_norm", "attention")
CLASSES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_ROTARY_BY_LENGTH = ("dynamic", "longrope")


def check(identity: Mapping[str, Any]) -> None:
    name, config = str(identity.get("class", "")).rpartition(".")[2], identity["config"]
    if name not in CLASSES:
        raise CannotReplay(
            f"engine exact cannot run {name or 'this model'}, only {', '.join(CLASSES)}; use {option('engine', 'hf')}"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise CannotReplay(
            f"engine exact: activation {config['hidden_act']!r} is not supported (only silu is); use "
            f"{option('engine', 'hf')}"
        )
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotary.get("rope_type") or rotary.get("type") or "default"
    if kind in _ROTARY_BY_LENGTH or rotary.get("partial_rotary_factor", 1.0) != 1.0:
        raise CannotReplay(
            f"engine exact: rotary embedding {kind!r} is not supported, because its angles depend on the sequence "
            "length or it covers only part of a head; use default, linear, llama3 or yarn over the whole head, or "
            f"{option('engine', 'hf')}"
        )


@dataclass(frozen=True, slots=True)
class Operator:
    owner: Any
    attribute: str
    is_heads_first: bool = False


class Core:
    def __init__(self, scaling: float, precision: Precision):
        self._scaling, self._precision = scaling, precision

    def __call__(self, query_BATD: Any, key_BNTD: Any, value_BNTD: Any, cache: KeyValueCache, seen: Seen) -> Any:
        """Add the keys and values to the cache, and return the attention output [B, A, T, D]."""
        cache.add(key_BNTD, value_BNTD, seen.keys_BTS.shape[2] - seen.keys_BTS.shape[1])
        return self._precision.round(cache.attend(query_BATD.contiguous(), seen, self._scaling))


class ExactModel:
    def __init__(self, held: Any):
        self.held = held
        self.config = held.config
        self._layers: list[SimpleNamespace] = []
        self._heads: dict[Any, ExactHead] = {}

    @property
    def precision(self) -> Precision:
        return Precision(self.held.get_input_embeddings().weight.dtype)

    @property
    def device(self) -> Any:
        return self.held.get_input_embeddings().weight.device

    def forget(self) -> None:
        self._layers, self._heads = [], {}

    def prepare(self) -> None:
        if not self._layers:
            precision, base = self.precision, self.held.base_model
            self._rotary = Rotary(base.rotary_emb, precision)
            weight_VH = self.held.get_input_embeddings().weight.detach()
            self._embedding: Callable[[Any], Any] = lambda ids_M: weight_VH[ids_M].to(torch.float64)
            self._norm = RmsNorm(base.norm, precision)
            self._layers = [_layer(module, self.config, precision) for module in base.layers]

    def operators(self) -> dict[str, Operator]:
        """Map transformers' names to operators. `<name>.attention` is attention module `<name>` without projections."""
        self.prepare()
        names = {id(module): name for name, module in self.held.named_modules()}
        base = self.held.base_model
        found = {
            names[id(base.embed_tokens)]: Operator(self, "_embedding"),
            names[id(base.rotary_emb)]: Operator(self._rotary, "table"),
            names[id(base.norm)]: Operator(self, "_norm"),
        }
        for layer, module in zip(self._layers, base.layers, strict=True):
            parts = {"": layer, "self_attn.": layer.self_attn, "mlp.": layer.mlp}
            found |= {
                f"{names[id(module)]}.{part}{name}": Operator(owner, name, name in _HEADS_FIRST)
                for part, owner in parts.items()
                for name, value in vars(owner).items()
                if callable(value) and value is not layer.mlp
            }
        return found

    def head(self, temperature: float, dtype: Any = None) -> ExactHead:
        key = (temperature, dtype)
        if key not in self._heads:
            self._heads[key] = ExactHead(self.held, self.precision, temperature, dtype)
        return self._heads[key]

    def caches(self, num_rows: int, width: int) -> list[KeyValueCache]:
        """Return one empty cache per layer. Raises CannotReplay if `width` is too large for exact sums."""
        if width > MOST_KEYS:
            raise CannotReplay(
                f"engine exact: a sequence has {width:,} tokens, but sums are exact only up to {MOST_KEYS:,} tokens; "
                "replay shorter sequences"
            )
        shape = (num_rows, self.config.num_key_value_heads, width, self._head_width)
        return [KeyValueCache(*shape, self.precision, self.device) for _ in range(self.config.num_hidden_layers)]

    @property
    def _head_width(self) -> int:
        return int(2 * len(self.held.base_model.rotary_emb.inv_freq))

    def hidden(self, ids_BT: Any, positions_BS: Any, rows_BS: Any, caches: list[KeyValueCache]) -> Any:
        """Return the hidden states [B, T, H] of the last T tokens. A token attends only to tokens with the same row
        number in `rows_BS`, where 0 means padding."""
        self.prepare()
        B, T = ids_BT.shape
        start = rows_BS.shape[1] - T
        x_MH = self._embedding(ids_BT.reshape(-1))
        turns = tuple(table[:, None] for table in self._rotary.table(positions_BS[:, start:]))
        seen = seen_by_window(rows_BS, positions_BS, start, {layer.window for layer in self._layers})
        precision = self.precision
        for layer, cache in zip(self._layers, caches, strict=True):
            attention = self._attention(layer.self_attn, layer.input_layernorm(x_MH), cache, turns, seen[layer.window])
            x_MH = precision.round(x_MH + attention)
            x_MH = precision.round(x_MH + layer.mlp(layer.post_attention_layernorm(x_MH)))
        return self._norm(x_MH).view(B, T, -1)

    def _attention(self, layer: SimpleNamespace, x_MH: Any, cache: KeyValueCache, turns: Any, seen: Seen) -> Any:
        B, T = seen.keys_BTS.shape[:2]
        query, key, value = (
            project(x_MH).view(B, T, -1, self._head_width).transpose(1, 2)
            for project in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        if hasattr(layer, "q_norm") and hasattr(layer, "k_norm"):
            query, key = layer.q_norm(query), layer.k_norm(key)
        query, key = self._rotary.turn(query, *turns), self._rotary.turn(key, *turns)
        return layer.o_proj(layer.attention(query, key, value, cache, seen).transpose(1, 2).reshape(B * T, -1))


def seen_by_window(rows_BS: Any, positions_BS: Any, start: int, windows: set[int | None]) -> dict[int | None, Seen]:
    """Return the keys that each query sees, for each sliding window size. Copies key ranges to the host only once."""
    keys = [_seen(rows_BS, positions_BS, start, window) for window in windows]
    any_LTS = torch.stack([keys_BTS.any(dim=0) for keys_BTS in keys]).to(torch.uint8)
    first_LT, last_LT = any_LTS.argmax(dim=-1), any_LTS.shape[-1] - 1 - any_LTS.flip(-1).argmax(dim=-1)
    ends = torch.stack((first_LT, last_LT), dim=1).tolist()
    return {window: Seen(keys_BTS, *own) for window, keys_BTS, own in zip(windows, keys, ends, strict=True)}


def _seen(rows_BS: Any, positions_BS: Any, start: int, window: int | None) -> Any:
    """Return a mask [B, T, S] that is true for keys in the token's row and window, up to and including the token."""
    place_S = torch.arange(rows_BS.shape[1], device=rows_BS.device)
    place_T1 = place_S[start:, None]
    seen_BTS = (place_S < place_T1) & (rows_BS[:, None] == rows_BS[:, start:, None]) & (rows_BS > 0)[:, None]
    if window is not None:
        seen_BTS &= positions_BS[:, start:, None] - positions_BS[:, None] < window
    # Let each token see itself: even a padding token, whose result is unused, must see at least one key.
    return seen_BTS | (place_S == place_T1)


def _layer(module: Any, config: Any, precision: Precision) -> SimpleNamespace:
    given = module.self_attn
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    attention: dict[str, Any] = {name: _linear(getattr(given, name), precision) for name in projections}
    norms = {name: getattr(given, name, None) for name in ("q_norm", "k_norm")}
    attention |= {name: RmsNorm(norm, precision) for name, norm in norms.items() if norm is not None}
    return SimpleNamespace(
        input_layernorm=RmsNorm(module.input_layernorm, precision),
        self_attn=SimpleNamespace(**attention, attention=Core(float(given.scaling), precision)),
        window=getattr(given, "sliding_window", None),
        post_attention_layernorm=RmsNorm(module.post_attention_layernorm, precision),
        mlp=(_mixture if hasattr(module.mlp, "experts") else _mlp)(module.mlp, config, precision),
    )


def _linear(module: Any, precision: Precision) -> Linear:
    return Linear(module.weight, module.bias, precision)


def _mlp(module: Any, _config: Any, precision: Precision) -> Mlp:
    gate, up, down = (_linear(part, precision) for part in (module.gate_proj, module.up_proj, module.down_proj))
    return Mlp(gate, up, down, precision)


def _mixture(module: Any, config: Any, precision: Precision) -> Mixture:
    experts = []
    for gate_up, down in zip(module.experts.gate_up_proj, module.experts.down_proj, strict=True):
        gate, up, down = (Linear(weight, None, precision) for weight in (*gate_up.chunk(2, dim=0), down))
        experts.append(Mlp(gate, up, down, precision))
    router = Router(
        Linear(module.gate.weight, None, precision), config.num_experts_per_tok, config.norm_topk_prob, precision
    )
    return Mixture(router, Experts(experts, precision))
