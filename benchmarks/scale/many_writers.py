"""A trace of many writers of short steps, as hundreds of ranks leave it: made by the Recorder, one writer after the other.

    python benchmarks/scale/many_writers.py -o runs/scale/512 --writers 512 --steps 200

Each writer is a Recorder of its own, as each rank of a run has one: it records a few sequences a step with the passes `rollout`,
`train` and `current`. Values are random with a seed, lengths log-normal.
"""

import argparse
import os
import time
import uuid
from pathlib import Path

import numpy as np
from tim_trace import __version__
from tim_trace.schemas.capture import Capture
from tim_trace.schemas.clock import now
from tim_trace.schemas.manifest import Manifest
from tim_trace.tracer.attempts import Attempt
from tim_trace.tracer.create import new_trace
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.writer import TraceWriter

VOCABULARY = 150_000


def write(folder, *, writers, steps, sequences=4, mean_tokens=48, seed=1, flush_every=None):
    """Record a run. `flush_every` steps a writer seals, so that it leaves several segments."""
    manifest = Manifest(run_id=str(uuid.UUID(int=seed)), created_at=now(), created_by=__version__, source="recorder")
    with new_trace(folder, manifest, force=False) as made:
        attempt = Attempt(number=1, key="many_writers")
        os.environ["RANK"] = "0"
        first = TraceWriter(made, attempt=attempt)
    for number in range(writers):
        rng = np.random.default_rng([seed, number])
        os.environ["RANK"] = str(number)
        writer = TraceWriter(made, attempt=attempt) if number else first
        with Recorder.of_writer(writer, Capture.parse("logprobs", 1.0)) as recorder:
            for step in range(1, steps + 1):
                _record_step(recorder, rng, step, number, sequences, mean_tokens)
                if flush_every and step % flush_every == 0:
                    recorder.flush()
                    writer.segments.seal()


def _record_step(recorder, rng, step, number, sequences, mean_tokens):
    lengths = np.clip(rng.lognormal(np.log(mean_tokens), 0.5, sequences).astype(int), 1, 8 * mean_tokens)
    rollout = [-rng.exponential(0.5, length).astype(np.float32) for length in lengths]
    noise = [rng.normal(0, 0.02, length).astype(np.float32) for length in lengths]
    added = recorder.add_sequences(
        step=step,
        prompt_ids=[rng.integers(0, VOCABULARY, 12, dtype=np.int32)] * sequences,
        response_ids=[rng.integers(0, VOCABULARY, length, dtype=np.int32) for length in lengths],
        group_ids=[f"{step}-{number}"] * sequences,
        reward=rng.random(sequences),
        advantage=rng.normal(0, 1, sequences),
        policy_version=step - 1,
    )
    recorder.add_scores("rollout", added, logprobs=rollout)
    trained = [np.minimum(a + b, 0) for a, b in zip(rollout, noise, strict=True)]
    recorder.add_scores("train", added, logprobs=trained)
    recorder.add_scores("current", added, logprobs=trained)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--writers", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    given = parser.parse_args()
    start = time.perf_counter()
    write(given.output, writers=given.writers, steps=given.steps, sequences=given.sequences, mean_tokens=given.tokens)
    print(f"{given.writers} writers, {given.steps} steps: {time.perf_counter() - start:.0f} s")
