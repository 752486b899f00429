"""Parts of vLLM that a script can compare with transformers: one layer's class, or an engine with few layers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any

import torch

from ..locate.judged import OF_CODE
from ..locate.names import layer_modules, layer_of
from ..locate.vllm_execution import VllmExecution
from .search import Code, Difference, Scope, dtype_of, state

_LENGTHS = (2, 3, 8)
"""Lengths to try (tokens), before the whole sequence. An engine gives no logprob for the first token."""
_GATED = 64
_OWN_ARGUMENTS = ("dtype", "max_model_len", "gpu_memory_utilization", "skip_tokenizer_init")
_SETTINGS = """os.environ.update(
    VLLM_LOGGING_LEVEL="ERROR", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", TORCHDYNAMO_DISABLE="1"
)"""
"""VLLM_CPU_KVCACHE_SPACE and TORCHDYNAMO_DISABLE only save memory and time."""


def vllm_differences(
    model: Any, execution: VllmExecution, operator: str, row_T: Any, built: str
) -> Iterator[Difference]:
    """Yield computations that may reproduce an operator's error in vLLM, smallest first. `model` is the transformers
    model, and `built` is its variable in the script."""
    with suppress(*OF_CODE):  # another kind of layer
        yield _layer(model, execution.model, operator.partition("#")[0], len(row_T))
    lengths = [length for length in _LENGTHS if length < len(row_T)] + [len(row_T)]
    numbers = sorted({1, (layer_of(operator) or 0) + 1, len(layer_modules(model))})
    for is_random, tried in ((True, lengths), (False, lengths[-1:])):
        for number, length in product(numbers, tried):
            yield from _engine(model, execution, number, row_T[None, :length], is_random, built)


def _layer(model: Any, vllm_model: Any, operator: str, length: int) -> Difference:
    """Compare vLLM's norm, activation or rotary embedding with the model's. Other layers raise one of `OF_CODE`."""
    own, theirs, kind = dict(model.named_modules()), dict(vllm_model.named_modules()), operator.split(".")[-1]
    layer = next((name for name in layer_modules(model) if layer_of(name) == layer_of(operator)), "")
    weights: dict[str, Any] = {}
    if ".rotary." in operator:
        module, config = theirs[f"{layer}.self_attn.rotary_emb"], model.config.get_text_config()
        table = next(each for name, each in own.items() if name.endswith("rotary_emb"))
        rotate = vars(sys.modules[type(own[f"{layer}.self_attn"]).__module__])["apply_rotary_pos_emb"]
        maker = sys.modules["vllm.model_executor.layers.rotary_embedding"].get_rope
        sizes = f"{module.head_size}, {config.max_position_embeddings}, {module.is_neox_style}"
        words = f"{sizes}, {config.rope_parameters}"
        inputs = [torch.arange(length), torch.randn(length, module.head_size)]

        def computed(*parts: Any) -> Any:
            positions, x = parts
            return rotate(x[None, None], x[None, None], *table(x, positions[None]))[0][0, 0]
    elif kind == "activation":
        module, act_fn = theirs[f"{layer}.mlp.act_fn"], own[f"{layer}.mlp"].act_fn
        maker, words = type(module), f"approximate='{module.approximate}'" if hasattr(module, "approximate") else ""
        inputs = [torch.randn(1, _GATED)]

        def computed(*parts: Any) -> Any:
            gate, up = parts[0].chunk(2, -1)
            return act_fn(gate) * up
    else:
        norms = [name for name in own if name.startswith(f"{layer}.") and name.endswith("norm")]
        name = norms[-1] if kind == "residual" else operator
        norm, maker = own[name], type(theirs[name])
        weights = dict(norm.named_parameters())
        (size,) = norm.weight.shape  # no projection
        words = f"{size}, eps={norm.variance_epsilon if hasattr(norm, 'variance_epsilon') else norm.eps}"
        inputs = [torch.randn(1, size) for _ in range(2 if kind == "residual" else 1)]

        def computed(*parts: Any) -> Any:
            return norm(parts[0] + parts[1] if parts[1:] else parts[0])

    name, reference = maker.__name__, torch.nn.Module()
    reference.forward = computed
    for parameter, weight in weights.items():
        reference.register_parameter(parameter, weight)
    modules = torch.nn.ModuleDict({name: reference})
    xs = [f"x{i}" for i in range(len(inputs))]
    code = Code(
        setup=(
            _SETTINGS,
            "from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config",
            f"from {maker.__module__} import {name}",
            'with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))):',
            f"    module = {name}({words})",
        ),
        body=(
            f"module.to({xs[-1]}).load_state_dict(w, strict=False)",
            f"return module({', '.join(xs)}){'[0]' if xs[1:] else ''}",
        ),
        dtype=dtype_of(vllm_model, []),
    )
    return Difference(
        scope=Scope(name, None, modules, modules), args=tuple(inputs), kwargs={}, weights=weights, own={}, part=code,
        random_weights=bool(weights), random_inputs=tuple(each.is_floating_point() for each in inputs),
    )  # fmt: skip


def _engine(
    model: Any, execution: VllmExecution, num_layers: int, ids_BT: Any, is_random: bool, built: str
) -> Iterator[Difference]:
    words = {name: value for name, value in execution.engine_arguments.items() if name not in _OWN_ARGUMENTS}
    arguments = ", ".join(f"{name}={value!r}" for name, value in words.items())
    code = Code(
        setup=(_SETTINGS, "from vllm import LLM, SamplingParams"),
        body=(
            "with TemporaryDirectory() as folder:",
            f"    {built}.to(next(iter(w.values()))).save_pretrained(folder, state_dict=w)",
            f"    llm = LLM(folder, dtype={built}.dtype, max_model_len={ids_BT.shape[1] + 1}, skip_tokenizer_init=True,",
            f"        {arguments})",
            "asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)",
            'given = llm.generate({"prompt_token_ids": x0[0].tolist()}, asked, use_tqdm=False)[0].prompt_logprobs[1:]',
            "return torch.tensor([each[token].logprob for each, token in zip(given, x0[0, 1:].tolist())])",
        ),
        dtype=dtype_of(execution.model, []),
    )
    scope = Scope("", num_layers, model, model)
    with scope.cut():
        yield Difference(
            scope=scope, args=(), kwargs={"input_ids": ids_BT, "use_cache": False}, own={}, part=code,
            weights={name: value.detach() for name, value in state(model).items()},
            random_weights=is_random, random_inputs=(is_random,),
        )  # fmt: skip
