"""Map the tensor names found in dumps from transformers, vLLM, SGLang, Megatron and msprobe to places in the model."""

from __future__ import annotations

import re
from dataclasses import dataclass

INPUT_IDS, POSITIONS, MASK = "input_ids", "positions", "attention_mask"
OUTPUT = "output.0"

_ROOTS = re.compile(
    r"^(?:(?:module|model|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_model|language_model|decoder|transformer|"
    r"gpt_neox)(?:\.|$))+",
    re.IGNORECASE,
)
"""Names of wrappers that may precede a module's name."""
_WRAPPED = re.compile(r"\._(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)(?=\.|$)")
_MSPROBE = re.compile(r"^(?:Module|Cell)\.(.+?)\.forward\.(\d+)\.(input|output|kwargs|parameters)(?:\.(.+))?$")
_SLOT = re.compile(r"^(.*?)(?:^|\.)(inputs?|outputs?|kwargs)(?:\.(.+))?$")
_LAYERS = re.compile(r"(?:layers|h|blocks?|layer)$")
_NUMBERED = re.compile(r"^(.*(?:[A-Za-z_]|\.\d+))\.([0-3])$")
"""Name of one of a module's several outputs, such as `q_proj.1`. Names of layers have the same form and are excluded with
_LAYERS."""
_LAYER = re.compile(r"^(?:.*\.)?(?:layers|h|blocks|block|layer)\.(\d{1,6})(?:\.(.*))?$")
_PARTS = {
    "": {
        "self_attention": "self_attn", "attention": "self_attn", "attn": "self_attn", "feed_forward": "mlp", "ffn": "mlp",
        "block_sparse_moe": "mlp", "pre_mlp_layernorm": "post_attention_layernorm", "ffn_norm": "post_attention_layernorm",
        "attention_norm": "input_layernorm",
    },
    "self_attn": {
        "linear_qkv": "qkv_proj", "query_key_value": "qkv_proj", "qkv": "qkv_proj", "c_attn": "qkv_proj", "wq": "q_proj",
        "wk": "k_proj", "wv": "v_proj", "linear_proj": "o_proj", "dense": "o_proj", "out_proj": "o_proj", "c_proj": "o_proj",
        "wo": "o_proj", "core_attention": "attention", "attn": "attention", "q_layernorm": "q_norm", "k_layernorm": "k_norm",
    },
    "mlp": {
        "linear_fc1": "gate_up_proj", "linear_fc2": "down_proj", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj",
        "router": "gate",
    },
}  # fmt: skip
"""Parent module -> a submodule's name in another framework -> the submodule's name in transformers."""
_OUTSIDE = {
    "embedding.word_embeddings": "embed_tokens", "embedding": "embed_tokens", "wte": "embed_tokens", "embed_in": "embed_tokens",
    "tok_embeddings": "embed_tokens", "final_layernorm": "norm", "ln_f": "norm", "final_layer_norm": "norm",
    "output_layer": "lm_head", "logits_processor": "lm_head", "logits": "lm_head", "embed_out": "lm_head",
    "log_probs": "logprobs", "logprob": "logprobs", "token_ids": INPUT_IDS, "tokens": INPUT_IDS, "position_ids": POSITIONS,
}  # fmt: skip
"""Name in another framework of a module outside the layers -> the module's name in transformers."""
_BEFORE = (INPUT_IDS, POSITIONS, MASK, "embed_tokens", "rotary_emb")
_AFTER = ("norm", "lm_head", "logprobs")
_IN_LAYER = (
    "input_layernorm", "self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_norm",
    "self_attn.k_norm", "self_attn.rotary_emb", "self_attn.attention", "self_attn.o_proj", "self_attn", "post_attention_layernorm",
    "pre_feedforward_layernorm", "mlp.gate", "mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.act_fn", "mlp.product",
    "mlp.experts", "mlp.down_proj", "mlp", "post_feedforward_layernorm",
)  # fmt: skip
"""Modules within a transformer layer, in forward order."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """An input or output of a module."""

    layer: int | None
    module: str
    """Name of the module without wrappers and layer; "" for the layer itself or the whole model."""
    slot: str
    """Which input or output of the module: input.N, output.N, or input.NAME."""

    def __str__(self) -> str:
        module = (
            self.module or "model"
            if self.layer is None
            else f"layers.{self.layer}{'.' if self.module else ''}{self.module}"
        )
        return module if self.slot == OUTPUT else f"{module}.{self.slot}"

    def order(self) -> tuple[int, int, int, bool, str, str]:
        """Return a sort key in forward order; unknown modules come last in their layer."""
        is_output = self.slot.startswith("output")
        if self.layer is not None:
            known = _IN_LAYER.index(self.module) if self.module in _IN_LAYER else len(_IN_LAYER) + (not self.module)
            return 1, self.layer, known, is_output, self.module, self.slot
        for stage, names in ((0, _BEFORE), (2, _AFTER)):
            if self.module in names:
                return stage, 0, names.index(self.module), is_output, self.module, self.slot
        return 2, 0, len(_AFTER), is_output, self.module, self.slot


def is_gradient(name: str) -> bool:
    """Return True if a name belongs to a gradient or parameter, which is not part of the forward."""
    return name.startswith(("grad__", "param__")) or ".backward." in name or ".parameters" in name


def has_layer(name: str) -> bool:
    """Return True if a name contains a layer number."""
    return _LAYER.match(name) is not None


def place_of(name: str, layer: int | None = None) -> tuple[TensorPlace, int]:
    """Return the place for a dumped tensor's name, and the index of the module's call. `layer` is the layer tag from the
    dumper, if any.

    >>> str(place_of("Module.model.layers.2.self_attn.q_proj.Linear.forward.0.output.0")[0])
    'layers.2.self_attn.q_proj'
    >>> str(place_of("decoder.layers.2.self_attention.linear_proj.output")[0])
    'layers.2.self_attn.o_proj'
    """
    call, slot, name = 0, "", name.removeprefix("non_intrusive__")
    if probed := _MSPROBE.match(name):
        module, number, kind, rest = probed.groups()
        name, call = module.rpartition(".")[0], int(number)
        slot = _slot(kind, rest)
    elif sided := _SLOT.match(name):
        name, slot = sided[1], _slot(sided[2], sided[3])
    elif (numbered := _NUMBERED.match(name)) and not _LAYERS.search(numbered[1]):
        name, slot = numbered[1], f"output.{numbered[2]}"
    return _placed(_WRAPPED.sub("", _ROOTS.sub("", name)), slot or OUTPUT, layer), call


def _slot(kind: str, rest: str | None) -> str:
    side = "output" if kind.startswith("output") else "input"
    rest = {"hidden_states": "0", "last_hidden_state": "0", "0.last_hidden_state": "0"}.get(rest or "0", rest or "0")
    return f"{side}.{rest}"


def _placed(name: str, slot: str, layer: int | None) -> TensorPlace:
    found = _LAYER.match(name)
    if found is not None:
        return _aliased(int(found[1]), ".".join(_renamed((found[2] or "").split("."))), slot)
    if layer is not None:
        return _aliased(layer, ".".join(_renamed(name.split("."))), slot)
    last = slot.rpartition(".")[2]
    named = {"position_ids": POSITIONS}.get(last, last)
    if named in (INPUT_IDS, POSITIONS, MASK) and name in ("", "rotary_emb"):
        return TensorPlace(None, named, OUTPUT)
    if slot.endswith(".logits") and not name:
        return TensorPlace(None, "lm_head", OUTPUT)
    module = _OUTSIDE.get(name, name)
    return (
        TensorPlace(None, INPUT_IDS, OUTPUT)
        if (module, slot) == ("embed_tokens", "input.0")
        else TensorPlace(None, module, slot)
    )


def _renamed(parts: list[str]) -> list[str]:
    """Return the components of a module's name within the layer, as named in transformers."""
    holder = ""
    renamed = []
    for part in parts:
        part = _PARTS.get(holder, {}).get(part, part)
        renamed.append(part)
        holder = part if part in _PARTS else holder
    return renamed


def _aliased(layer: int, module: str, slot: str) -> TensorPlace:
    """Map the input of a projection to the output of the module before it."""
    given = {"self_attn.o_proj": "self_attn.attention", "mlp.down_proj": "mlp.product"}.get(module)
    return TensorPlace(layer, given, OUTPUT) if given and slot == "input.0" else TensorPlace(layer, module, slot)
