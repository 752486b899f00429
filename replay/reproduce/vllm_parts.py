"""Parts of vLLM's model that a script can compare with transformers: one layer's class, or an engine with few layers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..locate.judged import OF_CODE
from ..locate.names import layer_modules, layer_of
from ..locate.vllm_execution import VllmExecution
from .calls import written
from .search import Difference, Scope, state

_LENGTHS = (2, 3, 8)
"""Lengths to try (tokens), before the whole sequence. An engine gives no logprob for the first token."""
_GATED = 64
_OWN_ARGUMENTS = ("dtype", "max_model_len", "gpu_memory_utilization", "skip_tokenizer_init")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPart:
    """vLLM's side of a script, as source. `difference` describes transformers' side."""

    difference: Difference
    imports: tuple[str, ...]
    setup: tuple[str, ...] = ()
    body: tuple[str, ...]


def vllm_parts(model: Any, execution: VllmExecution, operator: str, row_T: Any, built: str) -> Iterator[VllmPart]:
    """Yield parts that can show an operator's error, the smallest first. `model` is transformers', `built` its name in
    the script."""
    with suppress(*OF_CODE):  # a layer of another form
        yield from _layers(model, execution.model, operator.partition("#")[0], len(row_T))
    lengths = [length for length in _LENGTHS if length < len(row_T)] + [len(row_T)]
    numbers = sorted({1, (layer_of(operator) or 0) + 1, len(layer_modules(model))})
    for is_random, tried in ((True, lengths), (False, lengths[-1:])):
        for number in numbers:
            for length in tried:
                yield _engine(model, execution, number, row_T[None, :length], is_random, built)


def _layers(model: Any, vllm_model: Any, operator: str, length: int) -> Iterator[VllmPart]:
    own, theirs, kind = dict(model.named_modules()), dict(vllm_model.named_modules()), operator.split(".")[-1]
    layer = next((name for name in layer_modules(model) if layer_of(name) == layer_of(operator)), "")
    if ".rotary." in operator:
        module, config = theirs[f"{layer}.self_attn.rotary_emb"], model.config.get_text_config()
        table = next(each for name, each in own.items() if name.endswith("rotary_emb"))
        rotate = vars(sys.modules[type(own[f"{layer}.self_attn"]).__module__])["apply_rotary_pos_emb"]
        sizes = f"{module.head_size}, {config.max_position_embeddings}, {module.is_neox_style}"

        def rotated(positions: Any, x: Any) -> Any:
            return rotate(x[None, None], x[None, None], *table(x, positions[None]))[0][0, 0]

        for number in (2, length):
            source = f"get_rope({sizes}, {written(config.rope_parameters)})"
            inputs = torch.arange(number), torch.randn(number, module.head_size)
            yield _layer(source, "vllm.model_executor.layers.rotary_embedding", rotated, {}, *inputs)
    elif kind == "activation":
        module, act_fn = theirs[f"{layer}.mlp.act_fn"], own[f"{layer}.mlp"].act_fn
        words = f'approximate="{module.approximate}"' if hasattr(module, "approximate") else ""

        def activated(x: Any) -> Any:
            return act_fn(x[:, : _GATED // 2]) * x[:, _GATED // 2 :]

        source = f"{type(module).__name__}({words})"
        yield _layer(source, type(module).__module__, activated, {}, torch.randn(1, _GATED))
    else:
        norms = [name for name in own if name.startswith(f"{layer}.") and name.endswith("norm")]
        name = norms[-1] if kind == "residual" else operator
        norm, module = own[name], theirs[name]
        (size,) = norm.weight.shape  # no projection
        epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        source, x = f"{type(module).__name__}({size}, eps={epsilon})", torch.randn(1, size)
        weights = dict(norm.named_parameters())
        if kind != "residual":
            yield _layer(source, type(module).__module__, norm.forward, weights, x)
        yield _layer(source, type(module).__module__, lambda x, residual: norm(x + residual), weights, x, x.clone())


def _layer(source: str, file: str, function: Callable[..., Any], weights: Mapping[str, Any], *inputs: Any) -> VllmPart:
    name = source.partition("(")[0]
    module = torch.nn.Module()
    module.forward = function
    for parameter, weight in weights.items():
        module.register_parameter(parameter, weight)
    modules = torch.nn.ModuleDict({name: module})
    arguments = ", ".join(f"x{i}" for i in range(len(inputs)))
    return VllmPart(
        difference=Difference(
            scope=Scope(name, None, modules, modules), args=inputs, kwargs={}, weights=dict(weights), own={}, output=0,
            random_weights=bool(weights), random_inputs=tuple(each.is_floating_point() for each in inputs),
        ),
        imports=("from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config", f"from {file} import {name}"),
        setup=(
            'with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))):',
            f"    module = {source}",
        ),
        body=(
            f"module.to(x{len(inputs) - 1}).load_state_dict(w, strict=False)",
            f"return module({arguments})" + ("[0]" if inputs[1:] else ""),
        ),
    )  # fmt: skip


def _engine(
    model: Any, execution: VllmExecution, num_layers: int, ids_BT: Any, is_random: bool, built: str
) -> VllmPart:
    words = {name: value for name, value in execution.engine_arguments.items() if name not in _OWN_ARGUMENTS}
    arguments = ", ".join(f"{name}={written(value)}" for name, value in words.items())
    return VllmPart(
        difference=Difference(
            scope=Scope("", num_layers, model, model), args=(), kwargs={"input_ids": ids_BT, "use_cache": False}, own={},
            weights={name: value.detach() for name, value in state(model)}, output=0,
            random_weights=is_random, random_inputs=(is_random,),
        ),
        imports=("from vllm import LLM, SamplingParams",),
        body=(
            "with TemporaryDirectory() as folder:",
            f"    {built}.to(next(iter(w.values()))).save_pretrained(folder, state_dict=w)",
            f"    llm = LLM(folder, dtype={built}.dtype, max_model_len={ids_BT.shape[1] + 1}, skip_tokenizer_init=True,",
            f"        {arguments})",
            "asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)",
            'given = llm.generate({"prompt_token_ids": x0[0].tolist()}, asked, use_tqdm=False)[0].prompt_logprobs[1:]',
            "return torch.tensor([each[token].logprob for each, token in zip(given, x0[0, 1:].tolist())])",
        ),
    )  # fmt: skip
