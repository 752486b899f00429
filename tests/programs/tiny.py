"""A tiny Qwen3 with random weights and a tokenizer of its own, for programs that tests run."""

import dataclasses
import hashlib
import inspect
import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

CHARACTERS = "0123456789+= "


def make_tokenizer():
    words = {word: index for index, word in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = ["input_ids", "attention_mask"]  # transformers 4 adds token_type_ids, which Qwen3 does not take
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", model_input_names=names
    )


def config_of(config_class, settings):
    """A trainer's config with those settings that this release of TRL knows."""
    known = {field.name for field in dataclasses.fields(config_class)}
    return config_class(**{name: value for name, value in settings.items() if name in known})


def save_model(folder, dtype=torch.float32, moe=False):
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    shape = dict(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=128, tie_word_embeddings=True, pad_token_id=0,
        eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = moe_model(shape) if moe else Qwen3ForCausalLM(Qwen3Config(**shape))
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def moe_model(shape):
    """A Qwen3-MoE of three layers, the middle one dense; so many experts that some choices are close."""
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**(shape | experts | {"num_hidden_layers": 3, "mlp_only_layers": [1]}))
    return Qwen3MoeForCausalLM(config)


def keep_weights_reloadable():
    """Let TRL update vLLM's weights on a CPU: its CPU kernels pack them away otherwise."""
    from vllm.model_executor.layers import utils

    def plain(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def spare_compiler():
    """Let vLLM run models as they are: compiling one this small takes longer than all else in a run."""
    from vllm import LLM

    inspect.unwrap(LLM.__init__).__kwdefaults__["enforce_eager"] = True


def weights_hash(model):
    digest = hashlib.sha256()
    for name, parameter in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def finish(path, **content):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)
    sys.stdout.flush()
