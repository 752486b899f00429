"""A run with weights to be looked into by `locate`: a tiny Llama, its trainer in float32 and its engine in bfloat16."""

import copy

import numpy as np
import torch
import transformers
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.rows import Forward

VOCAB, ROWS, LENGTH = 60, 12, 24


def make_run(
    path, *, num_steps=2, keeps_weights=True, passes=("rollout", "train"), seed=1, token_seed=5, advantage=None
):
    """Record it: rows of one forward each, sampled at random, scored by the model itself."""
    model = _model(seed)
    draw = np.random.default_rng(token_seed)
    with Recorder(path) as recorder:
        name = f"{type(model).__module__}.{type(model).__qualname__}"
        recorder.describe(model={"class": name, "config": model.config.to_dict()})
        recorder.add_contract(
            "train",
            {"engine": "a loop", "dtype": "float32", "model": {"dtypes": {"float32": 1}, "attention": "eager"}},
        )
        recorder.add_contract("rollout", {"engine": "another loop", "dtype": "bfloat16"})
        if keeps_weights:
            recorder.add_weights(0, model.state_dict())
        for step in range(1, num_steps + 1):
            _add_step(recorder, draw, step, model, passes, advantage)
    return path


def _model(seed):
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
    return model


def _add_step(recorder, draw, step, model, passes, advantage):
    prompts = [draw.integers(2, VOCAB, 4) for _ in range(ROWS)]
    responses = [draw.integers(2, VOCAB, LENGTH) for _ in range(ROWS)]
    batch = recorder.add_sequences(
        step=step, prompt_ids=prompts, response_ids=responses, policy_version=0, temperature=1.0, advantage=advantage,
        group_ids=[f"{step}-{row // 2}" for row in range(ROWS)], seq_ids=[f"{step}-{row}" for row in range(ROWS)],
    )  # fmt: skip
    alone, none = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32)
    forward = Forward(ids=np.arange(ROWS), places=alone, rows=alone + 1, pad_left=none, pad_right=none)
    models = {"train": model, "rollout": copy.deepcopy(model).to(torch.bfloat16)}
    for name in passes:
        scored = [_logprobs(models[name], *row) for row in zip(prompts, responses, strict=True)]
        recorder.add_scores(name, batch, logprobs=scored, forward=forward if name == "train" else None)


@torch.no_grad()
def _logprobs(model, prompt, response):
    """[T] float32 logprob of each response token."""
    ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
    logprobs = model(ids).logits.float().log_softmax(-1)[0, len(prompt) - 1 : -1]
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
