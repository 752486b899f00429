"""Locate faults that are planted in a real vLLM engine's model: `locate_vllm.py FOLDER DTYPE MODEL ...`, a line of JSON a case."""

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import tiny  # noqa: F401  first: it sets what vLLM reads
import torch
from tim_trace.analysis.locate import location
from tim_trace.replay.backends import vllm_mixture
from tim_trace.replay.locate import vllm_execution
from tim_trace.replay.locate.engine import locate

sys.path.insert(0, os.fspath(Path(__file__).parents[1]))
import located_runs

FOLDER, DTYPE = Path(sys.argv[1]), sys.argv[2]
located_runs.SIZES |= {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
LLAMA = {"num_key_value_heads": 1, "max_position_embeddings": 128}
located_runs.MODELS["llama"] = ("Llama", LLAMA)
located_runs.MODELS["qwen2"] = ("Qwen2", LLAMA)
located_runs.MODELS["qwen3"] = ("Qwen3", LLAMA | {"head_dim": 32})
# vLLM's kernel for a CPU fills inner widths up to 32, and keeps weights in an order of its own.
MIXTURE = {"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
located_runs.MODELS["qwen3_moe"] = ("Qwen3Moe", LLAMA | MIXTURE)


@contextmanager
def changed(owner, name, value):
    """Give an object another attribute, of its own, within."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    yield
    if had:
        setattr(owner, name, before)
    else:
        delattr(owner, name)


@contextmanager
def changed_weight(weight, data):
    """Give a weight other numbers within."""
    before = weight.data.clone()
    weight.data.copy_(data)
    yield
    weight.data.copy_(before)


def layer(model, number):
    return model.model.layers[number]


def epsilon(model):
    return changed(layer(model, 1).post_attention_layernorm, "variance_epsilon", 1e-2)


def activation(model):
    def gelu(x):
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.gelu(gate) * up

    return changed(layer(model, 2).mlp.act_fn, "forward", gelu)


def scale(model):
    core = layer(model, 1).self_attn.attn.impl
    return changed(core, "scale", 1.1 * core.scale)


def cache(model):
    """Keys that lost digits in the cache."""
    attention = layer(model, 1).self_attn.attn
    forward = attention.forward

    def rounded(query, key, value, *rest, **words):
        return forward(query, key.to(torch.float8_e4m3fn).to(key.dtype), value, *rest, **words)

    return changed(attention, "forward", rounded)


def no_norm(model):
    return changed(layer(model, 1).self_attn.q_norm, "forward", lambda x: x)


def theta(model):
    rotary = layer(model, 0).self_attn.rotary_emb
    with changed(rotary, "base", 1e6):
        table = rotary._compute_cos_sin_cache().to(rotary.cos_sin_cache.dtype)
    before = rotary.cos_sin_cache

    @contextmanager
    def within():
        rotary.cos_sin_cache = table
        yield
        rotary.cos_sin_cache = before

    return within()


def logits(model):
    return changed(model.logits_processor, "scale", 0.95)


@contextmanager
def stale(model):
    """Weights of the next recorded version; the next case loads its own."""
    layer(model, 2).mlp.gate_up_proj.weight.data[128:].add_(1e-3)
    yield


@contextmanager
def biases(model):
    layer(model, 1).self_attn.qkv_proj.bias.data.zero_()
    yield


def experts(model, number):
    return layer(model, number).mlp.experts


@contextmanager
def stale_experts(model):
    """Weights of the next recorded version, packed as the engine has them."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    held = experts(model, 2).routed_experts
    names = dict(vllm_mixture.held_by("experts", experts(model, 2)))
    loaded = held.w2_weight.data.new_zeros(held.w2_weight.shape)
    loaded[:, :, : MIXTURE["moe_intermediate_size"]] = names["experts.down_proj"] + 1e-3
    packed = cpu_prepack_moe_weight(loaded, held.quant_method.moe_kernel.fused_experts.isa)
    with changed_weight(held.w2_weight, packed):
        yield


def exchanged_experts(model):
    weight = experts(model, 1).routed_experts.w2_weight
    return changed_weight(weight, weight.data[[1, 0, *range(2, len(weight))]])


def renormalised(model):
    return changed(experts(model, 1).router, "renormalize", True)


def rounded_router(model):
    gate = layer(model, 1).mlp.gate
    forward = gate.forward

    def rounded(x):
        logits, bias = forward(x)
        return logits.to(torch.float8_e4m3fn).to(logits.dtype), bias

    return changed(gate, "forward", rounded)


def other_activation(model):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    return changed(experts(model, 2).routed_experts, "activation", MoEActivation.GELU)


def nothing(model):
    return changed(model, "is_healthy", True)


def main():
    engine = None
    build = vllm_execution._EagerScorer.build

    def one_engine(scorer):
        nonlocal engine
        if engine is None:
            engine = build(scorer)
        return engine

    put = vllm_execution._EagerScorer.put

    def put_once(scorer, made, tensors):
        """An engine of a mixture starts anew with every weights: it keeps those that it has, which faults put back."""
        if made.llm is None or "num_experts" not in made.config:
            put(scorer, made, tensors)

    vllm_execution._EagerScorer.build = one_engine
    vllm_execution._EagerScorer.put = put_once
    of_all = [nothing, epsilon, scale, cache, theta, logits]
    more = {
        "llama": [activation, stale], "qwen2": [activation, biases], "qwen3": [activation, no_norm],
        "qwen3_moe": [stale_experts, exchanged_experts, renormalised, rounded_router, other_activation],
    }  # fmt: skip
    for model in sys.argv[3:]:
        run = FOLDER / model
        located_runs.record(run, located_runs.model_of(model), versions=2)
        for fault in (*of_all, *more[model]):
            planted = []

            def plant(made, fault=fault, planted=planted):
                planted.append(fault(made))
                planted[0].__enter__()

            found = locate(
                run, steps="1", arm=f"dtype={DTYPE}", against=f"engine=vllm,dtype={DTYPE}", sequences="9",
                patch="kinds" if fault is nothing else "none", prepare_against=plant,
            )  # fmt: skip
            planted[0].__exit__(None, None, None)
            answer = location(found)
            first = found.first
            print(json.dumps({
                "model": model,
                "fault": fault.__name__,
                "first": None if first is None else [first.side, first.operator, first.why, first.version],
                "explained": answer.explained,
                "gap": answer.gap_rms,
                "worst": max(each.ratio for each in found.operators),
                "removed": {f"{each.patch} {each.taker}": each.removed for each in answer.patches},
                "unseen": found.unseen,
                "flipped": sum(each.num_flipped for each in found.routers),
            }), flush=True)  # fmt: skip
        engine.close()
        engine = None


if __name__ == "__main__":
    main()
