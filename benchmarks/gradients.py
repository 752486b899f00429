"""Compare gradients of recorded steps with a bare forward and backward of the same batches."""

import tempfile
from pathlib import Path

import numpy as np
from comparison import Comparison, in_turn, ratios
from replaying import forward_of, small_model
from tim_trace.replay.gradients.engine import gradient
from tim_trace.schemas.loss import Loss
from tim_trace.tracer.recorder import Recorder

NUM_STEPS, MICRO_BATCHES, ROWS, PROMPT, RESPONSE = 2, 4, 8, 32, 224
VOCAB = 4000
SIZES = {"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
ROUNDS = 5


def compare():
    """Time gradients of two steps with four micro-batches and 8,192 tokens each on a small Qwen3, and a bare loop."""
    model = small_model(**SIZES).train()
    steps = [_step(seed) for seed in range(NUM_STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        several, one = Path(folder, "several"), Path(folder, "one")
        _record(several, model, steps, ROWS)
        _record(one, model, steps[:1], ROWS * MICRO_BATCHES)
        taken = in_turn(
            ROUNDS,
            taken=lambda: gradient(several),
            bare=lambda: _loop(model, steps, ROWS),
            alone=lambda: gradient(one),
            bare_one=lambda: _loop(model, steps[:1], ROWS * MICRO_BATCHES),
        )
    yield Comparison(
        what="time over that of the bare loop, bias and variance over the recorded micro-batches",
        values=ratios(taken["taken"], taken["bare"]),
        at_most=1.1,
    )
    yield Comparison(
        what="the same for a step with a single forward, without micro-batches",
        values=ratios(taken["alone"], taken["bare_one"]),
        at_most=1.1,
    )


def _step(seed):
    draw = np.random.default_rng(seed)
    rows = MICRO_BATCHES * ROWS
    return draw.integers(0, VOCAB, (rows, PROMPT + RESPONSE)), draw.normal(size=rows).astype(np.float32)


def _record(trace, model, steps, rows):
    """Record steps of token sequences with advantages, `rows` per micro-batch."""
    with Recorder(trace) as recorder:
        name = f"{type(model).__module__}.{type(model).__qualname__}"
        recorder.describe(model={"class": name, "config": model.config.to_dict()})
        recorder.add_contract("train", {"engine": "a loop", "training_mode": True})
        recorder.add_loss(Loss())
        recorder.add_weights(0, model.state_dict())
        for number, (ids, advantage) in enumerate(steps, 1):
            responses = list(ids[:, PROMPT:])
            batch = recorder.add_sequences(
                step=number, prompt_ids=list(ids[:, :PROMPT]), response_ids=responses, advantage=advantage,
                group_ids=[row // 2 for row in range(len(ids))], policy_version=0,
            )  # fmt: skip
            logprobs = [np.full(RESPONSE, -np.log(VOCAB), np.float32) for _ in responses]
            recorder.add_scores("train", batch, logprobs=logprobs, forward=forward_of(responses, rows))


def _loop(model, steps, rows):
    """What a user would write: forward, log_softmax, gather, PPO's clip, backward, the norm."""
    import torch

    for ids, advantage in steps:
        model.zero_grad()
        for start in range(0, len(ids), rows):
            ids_BW = torch.from_numpy(ids[start : start + rows])
            advantage_B1 = torch.from_numpy(advantage[start : start + rows, None])
            logits_BTV = model(ids_BW, logits_to_keep=RESPONSE + 1, use_cache=False).logits[:, :-1]
            logprobs_BT = torch.log_softmax(logits_BTV, -1).gather(-1, ids_BW[:, PROMPT:, None]).squeeze(-1)
            ratio_BT = torch.exp(logprobs_BT + np.log(VOCAB))
            clipped_BT = ratio_BT.clamp(0.8, 1.2)
            loss = -torch.min(ratio_BT * advantage_B1, clipped_BT * advantage_B1).sum() / (len(ids) * RESPONSE)
            loss.backward()
        torch.nn.utils.get_total_norm([value.grad for value in model.parameters()])
