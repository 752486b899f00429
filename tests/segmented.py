"""Runs of several writers that sealed several times each, and what a trace answers whatever its files are."""

import numpy as np
from tim_trace.analysis.views import open_database
from tim_trace.schemas.layout import TABLES
from tim_trace.schemas.loss import Loss
from tim_trace.tracer.liveness import Attempt
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.writer import TraceWriter

QUESTIONS = [
    *(f"SELECT * FROM {name} ORDER BY ALL" for name in (*TABLES, "passes", "steps")),
    "SELECT step, sum(d), avg(d), stddev(d), count(*) FROM pair('train', 'rollout') GROUP BY step ORDER BY step",
    "SELECT * FROM pair_steps('train', 'rollout') ORDER BY ALL",
    "SELECT * FROM pair_sequences('current', 'rollout') ORDER BY ALL",
    "SELECT fsum(d), min(d), max(d), count(*) FROM pair('current', 'rollout')",
]


def rows_of(trace):
    """What a trace answers in SQL, to the last digit; files and their order are in none of it."""
    database = open_database(trace)
    return [str(database.ask(question).rows) for question in QUESTIONS]


def add_steps(recorder, writer, steps, seed=0):
    """A few sequences a step, in groups, with passes, masks, metrics and an evaluation."""
    for step in steps:
        rng = np.random.default_rng([seed, writer, step])
        lengths = rng.integers(1, 40, 6)
        batch = recorder.add_sequences(
            step=step,
            prompt_ids=[rng.integers(0, 90, 3) for _ in lengths],
            response_ids=[rng.integers(0, 90, length) for length in lengths],
            response_mask=[rng.random(length) < 0.9 for length in lengths],
            group_ids=[f"{writer}-{number // 3}" for number in range(6)],
            reward=rng.random(6),
            advantage=rng.normal(0, 1, 6),
            policy_version=step - 1,
        )
        rollout = [-rng.exponential(1, length).astype(np.float32) for length in lengths]
        for name in ("rollout", "train", "current"):
            noise = [rng.normal(0, 0.01, len(values)).astype(np.float32) for values in rollout]
            values = (
                rollout if name == "rollout" else [np.minimum(a + b, 0) for a, b in zip(rollout, noise, strict=True)]
            )
            recorder.add_scores(name, batch, logprobs=values)
        if writer == 0:
            recorder.add_metrics(step, {"loss": float(rng.normal()), "lr": 1e-6})
            held_out = recorder.add_sequences(step=step, response_ids=[[1, 2]], split="eval", reward=[1.0])
            recorder.add_scores("rollout", held_out, logprobs=[[-0.5, -0.25]])


def make_run(path, writers=3, steps=12, attempts=True):
    """A run of several writers that sealed twice each. With `attempts` each one is another attempt that makes a step again.

    Else they are the ranks of one attempt: all have rows of every step.
    """
    first = Recorder(path)
    first.add_hyperparameters({"learning_rate": 1e-6})
    first.add_loss(Loss())
    for writer in range(writers):
        if not attempts:
            each = range(1, steps + 1)
            recorder = first if writer == 0 else _beside(first)
        else:
            begin = 1 + writer * steps // writers - (writer > 0)
            each = range(begin, begin + steps // writers + 1)
            recorder = first if writer == 0 else Recorder(path, resume=True)
        add_steps(recorder, writer, each[:-1])
        recorder.flush()
        recorder.writer.segments.seal()
        add_steps(recorder, writer, each[-1:])
        if writer or attempts:
            recorder.close()
    first.close()
    return path


def _beside(recorder):
    """A recorder of another process of the same attempt."""
    state = recorder.writer.state
    attempt = Attempt(number=state.attempt, key=state.attempt_key)
    return Recorder.of_writer(TraceWriter(recorder.folder, attempt=attempt), recorder.capture)
