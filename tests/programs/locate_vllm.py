"""Locate faults that are planted in a real vLLM engine's model: `locate_vllm.py FOLDER DTYPE MODEL ...`, a line of JSON a case."""

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import tiny  # noqa: F401  first: it sets what vLLM reads
import torch
from tim_trace.analysis.locate import location
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

    vllm_execution._EagerScorer.build = one_engine
    faults = [nothing, epsilon, activation, scale, cache, theta, logits]
    more = {"llama": [stale], "qwen2": [biases], "qwen3": [no_norm]}
    for model in sys.argv[3:]:
        run = FOLDER / model
        located_runs.record(run, located_runs.model_of(model), versions=2)
        for fault in (*faults, *more[model]):
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
            }), flush=True)  # fmt: skip
        engine.close()
        engine = None


if __name__ == "__main__":
    main()
