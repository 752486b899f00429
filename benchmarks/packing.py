"""Compare a packed replay with a naive padded loop on sequences of very different lengths."""

import tempfile
from pathlib import Path

import numpy as np
from comparison import Comparison, in_turn, ratios
from replaying import VOCAB, copy_of, record_steps, small_model
from tim_trace.replay.engine import replay

NUM_ROWS, PROMPT = 64, 10
SHORTEST, LONGEST = 20, 1000
ROUNDS = 3


def compare():
    """Measure tokens per second of a packed replay and of padded loops, for 64 sequences of 20 to 1,000 tokens."""
    import torch

    model = small_model()
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, VOCAB, length) for length in draw.integers(SHORTEST, LONGEST + 1, NUM_ROWS)]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "run")
        record_steps(trace, model, [rows], PROMPT, 8)
        replay(trace)  # so that later arms need not compute the identity arm again
        fresh = iter([copy_of(trace, number) for number in range(ROUNDS)])
        taken = in_turn(
            ROUNDS,
            packed=lambda: replay(next(fresh), padding="packed"),
            by_8=lambda: _loop(torch, model, rows, 8),
            by_16=lambda: _loop(torch, model, rows, 16),
        )
    for number in (8, 16):
        yield Comparison(
            what=f"throughput over that of a loop with {number} rows per batch, with reading and writing the trace",
            values=ratios(taken[f"by_{number}"], taken["packed"]),
            at_least=2,
        )


def _loop(torch, model, rows, batch_size):
    """What a user would write: pad on the right, forward, log_softmax, gather."""
    for start in range(0, len(rows), batch_size):
        part = [torch.from_numpy(row) for row in rows[start : start + batch_size]]
        ids_BW = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
        lengths_B = torch.tensor([len(row) for row in part])
        mask_BW = (torch.arange(ids_BW.shape[1]) < lengths_B[:, None]).long()
        with torch.no_grad():
            logits_BWV = model(ids_BW, attention_mask=mask_BW).logits[:, :-1]
            torch.log_softmax(logits_BWV, -1).gather(-1, ids_BW[:, 1:, None])
