"""Compare ways to score a step: replays as recorded, by tokens, packed, by vLLM; a bare loop; bare prompt_logprobs."""

import os
import tempfile
import time
from pathlib import Path

import numpy as np
from comparison import Comparison, in_turn, ratios
from replaying import VOCAB, forward_of, small_model
from tim_trace.replay.arms import Arm
from tim_trace.replay.loaded import LoadedModel, scorer_of
from tim_trace.replay.recorded import RecordedRun
from tim_trace.tracer.progress import unheard
from tim_trace.tracer.recorder import Recorder

GROUPS, SIZE, ROWS = 2, 8, 8
SHAPES = {
    "short responses (8 to 64 tokens) to prompts of 256": (256, 8, 64),
    "long responses (64 to 512 tokens) to prompts of 64": (64, 64, 512),
}
ARMS = {
    "as recorded": {},
    "batch-tokens 2048": {"batch_tokens": 2048},
    "padding packed": {"padding": "packed"},
    "engine vllm": {"engine": "vllm"},
    "engine vllm, batch-tokens 2048": {"engine": "vllm", "batch_tokens": 2048},
}
ROUNDS = 3


def compare():
    """Measure tokens per CPU second over a bare padded loop's, on two groups of eight responses with a small Qwen3."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    model = small_model(
        hidden_size=256, num_hidden_layers=4, architectures=["Qwen3ForCausalLM"], max_position_embeddings=1024
    )
    for shape, lengths in SHAPES.items():
        yield from _of_shape(model, shape, lengths)


def _of_shape(model, shape, lengths):
    with tempfile.TemporaryDirectory() as folder:
        run, rows = _recorded(Path(folder, "run"), model, *lengths)
        number = sum(row.num_tokens for row in rows)
        ways = {name: _scoring(run, rows, changes) for name, changes in ARMS.items()}
        ways["vLLM's own prompt_logprobs"] = _bare_vllm(Path(folder, "model"), model, rows)
        ways["bare loop"] = lambda: _loop(model, rows)
        for score in ways.values():
            score()  # the first forward of each way takes longer
        taken = in_turn(ROUNDS, clock=time.process_time, **ways)
    yield Comparison(
        what=f"{shape}: the bare loop",
        values=[number / seconds for seconds in taken["bare loop"]],
        unit=" tokens per CPU second",
    )
    for name in ways:
        if name != "bare loop":
            yield Comparison(what=f"{shape}: {name}", values=ratios(taken["bare loop"], taken[name]))
    yield Comparison(
        what=f"{shape}: engine vllm over vLLM's own prompt_logprobs",
        values=ratios(taken["vLLM's own prompt_logprobs"], taken["engine vllm"]),
    )


def _recorded(trace, model, prompt, shortest, longest):
    """Record one step of groups in random order, as in a trainer that shuffles."""
    draw = np.random.default_rng(0)
    prompts = draw.integers(0, VOCAB, (GROUPS, prompt))
    order = draw.permutation(GROUPS * SIZE)
    responses = [draw.integers(0, VOCAB, length) for length in draw.integers(shortest, longest + 1, len(order))]
    with Recorder(trace) as recorder:
        name = f"{type(model).__module__}.{type(model).__qualname__}"
        recorder.describe(model={"class": name, "config": model.config.to_dict()})
        recorder.add_contract("train", {"engine": "a loop"})
        recorder.add_weights(0, model.state_dict())
        batch = recorder.add_sequences(
            step=1, prompt_ids=prompts[order // SIZE], response_ids=responses, group_ids=[f"g{n // SIZE}" for n in order],
            policy_version=0,
        )  # fmt: skip
        logprobs = [np.full(len(ids), -1.0, np.float32) for ids in responses]
        recorder.add_scores("train", batch, logprobs=logprobs, forward=forward_of(responses, ROWS))
    run = RecordedRun(trace)
    return run, run.step(1)


def _scoring(run, rows, changes):
    """Return a function that scores the rows under an arm, with the model loaded."""
    scorer = scorer_of(run, Arm(**changes), run.train_contract(rows[0].contract), "cpu")
    loaded = LoadedModel(run.weights)
    return lambda: loaded.score(scorer, rows, unheard)


def _bare_vllm(folder, model, rows):
    """Return a call of vLLM, in float32 with its own defaults, that scores all prompts and responses at once."""
    from vllm import LLM, SamplingParams

    model.save_pretrained(folder)
    engine = LLM(model=str(folder), dtype="float32", skip_tokenizer_init=True, disable_log_stats=True, seed=0)
    prompts = [{"prompt_token_ids": [*row.prompt_ids.tolist(), *row.response_ids.tolist()]} for row in rows]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    return lambda: engine.generate(prompts, params, use_tqdm=False)


def _loop(model, rows):
    """What a user would write: rows in their order, padded on the right, forward, log_softmax, gather."""
    import torch

    for start in range(0, len(rows), ROWS):
        part = [torch.from_numpy(np.r_[row.prompt_ids, row.response_ids]).long() for row in rows[start : start + ROWS]]
        ids_BW = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
        lengths_B = torch.tensor([len(row) for row in part])
        mask_BW = (torch.arange(ids_BW.shape[1]) < lengths_B[:, None]).long()
        with torch.no_grad():
            prompt = len(rows[start].prompt_ids)  # all have one length
            kept = ids_BW.shape[1] - prompt + 1
            logits_BTV = model(ids_BW, attention_mask=mask_BW, logits_to_keep=kept).logits[:, :-1]
            torch.log_softmax(logits_BTV, -1).gather(-1, ids_BW[:, prompt:, None])
