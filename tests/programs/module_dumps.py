"""Dump what every module of a tiny model gives: of transformers, of vLLM, and of vLLM with another epsilon in layer 1."""

import sys
from pathlib import Path

import tiny  # first: it sets what vLLM reads
import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

FOLDER = Path(sys.argv[1])
IDS = [3, 5, 7, 2, 9, 11, 4, 8, 6, 10, 3, 3, 7]
target = None
"""The folder that hooks write to; None: they write nothing."""


def save(name, output):
    tensors = [
        item.detach().clone()
        for item in (output if isinstance(output, tuple) else (output,))
        if isinstance(item, torch.Tensor)
    ]
    if target is not None and tensors:
        torch.save(tensors[0] if len(tensors) == 1 else tuple(tensors), target / f"{name}.pt")


def hooked(model):
    for name, module in model.named_modules():
        if name and name != "model":
            module.register_forward_hook(lambda module, args, output, name=name: save(name, output))


def other_epsilon(model):
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-2


def dump(folder, run):
    global target
    folder.mkdir()
    target = folder
    run()
    target = None
    torch.save(torch.tensor(IDS), folder / "input_ids.pt")


tiny.save_model(FOLDER / "model")
trainer = AutoModelForCausalLM.from_pretrained(FOLDER / "model").eval()
hooked(trainer)
with torch.no_grad():
    dump(FOLDER / "trainer", lambda: trainer(torch.tensor([IDS])))
engine = LLM(
    model=str(FOLDER / "model"),
    dtype="float32",
    enforce_eager=True,
    max_model_len=64,
    enable_prefix_caching=False,
    seed=0,
)
engine.apply_model(hooked)
prompt, one = {"prompt_token_ids": IDS}, SamplingParams(max_tokens=1, temperature=0)
dump(FOLDER / "engine", lambda: engine.generate(prompt, one, use_tqdm=False))
engine.apply_model(other_epsilon)
dump(FOLDER / "other", lambda: engine.generate(prompt, one, use_tqdm=False))
