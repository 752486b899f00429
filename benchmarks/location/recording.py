"""Record traces of one step of a model, without logprobs, for `tim-trace locate`."""

import importlib

import numpy as np
from replaying import forward_of
from tim_trace.tracer.recorder import Recorder


def recorded(folder, model, prompts, responses, rows_a_forward):
    """Record one step with rows of token ids, `rows_a_forward` per forward, and return the folder."""
    config = model.config.to_dict() if hasattr(model.config, "to_dict") else dict(vars(model.config))
    config["experts_implementation"] = "eager"
    attention = getattr(model.config, "_attn_implementation", "eager")
    with Recorder(folder) as recorder:
        recorder.describe(model={"class": f"{type(model).__module__}.{type(model).__name__}", "config": config})
        recorder.add_contract(
            "train", {"engine": "a loop", "model": {"dtypes": {"float32": 1}, "attention": attention}}
        )
        recorder.add_weights(0, model.state_dict())
        batch = recorder.add_sequences(
            step=1, prompt_ids=prompts, response_ids=responses, policy_version=0,
            group_ids=[f"g{number}" for number in range(len(prompts))],
        )  # fmt: skip
        logprobs = [np.full(len(row), -1.0, np.float32) for row in responses]
        recorder.add_scores("train", batch, logprobs=logprobs, forward=forward_of(responses, rows_a_forward))
    return folder


def drawn(path, config, initialise):
    """Build the model class at `path` from a config, with weights drawn by `initialise`."""
    module, _, name = path.rpartition(".")
    model_class = getattr(importlib.import_module(module), name)
    model = model_class(model_class.config_class.from_dict(config)).eval()
    initialise(model)
    return model


def rows(vocab, num_rows, lengths, seed=0):
    """Draw rows of token ids, with lengths from `lengths[0]` to below `lengths[1]`."""
    draw = np.random.default_rng(seed)
    return [draw.integers(5, vocab, draw.integers(*lengths)) for _ in range(num_rows)]
