"""Record a trace of many writers with short steps, as from hundreds of ranks, one writer after the other.

    python benchmarks/scale/many_writers.py -o runs/scale/512 --writers 512 --steps 200

Each writer is a separate Recorder, as in a rank of a run: it records a few sequences per step with the passes
`rollout`, `train` and `current`. Values are random with a seed, lengths log-normal.

    python benchmarks/scale/many_writers.py -o runs/scale/long --writers 512 --steps 10000 --sequences 1 --tokens 12 --at-once 1000 --seals 2

With `--at-once`, rows of that many steps are passed to a writer together, without the Recorder, whose 5 million calls
would take hours on one machine; writers, journals, sealed files and states are the same. Each writer seals `--seals`
times, as it would with longer responses.
"""

import argparse
import os
import time
import uuid
from functools import partial
from pathlib import Path

import numpy as np
from tim_trace import __version__
from tim_trace.schemas.capture import Capture
from tim_trace.schemas.documents import Manifest, now
from tim_trace.schemas.layout import SCORES, SEQUENCES
from tim_trace.tracer.create import new_trace
from tim_trace.tracer.liveness import Attempt
from tim_trace.tracer.ragged import Ragged
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.writer import TraceWriter

VOCABULARY = 150_000


def write(folder, *, writers, steps, sequences=4, mean_tokens=48, seed=1, flush_every=None, at_once=None):
    """Record a run. Writers seal every `flush_every` steps, to leave several segments; `at_once`: see above."""
    manifest = Manifest(run_id=str(uuid.UUID(int=seed)), created_at=now(), created_by=__version__, source="recorder")
    with new_trace(folder, manifest, force=False) as made:
        attempt = Attempt(number=1, key="many_writers")
        os.environ["RANK"] = "0"
        first = TraceWriter(made, attempt=attempt)
    for number in range(writers):
        rng = np.random.default_rng([seed, number])
        os.environ["RANK"] = str(number)
        writer = TraceWriter(made, attempt=attempt) if number else first
        if at_once:
            for start in range(1, steps + 1, at_once):
                step = np.arange(start, min(start + at_once, steps + 1))
                writer.submit(partial(_append_steps, writer, rng, step, number, sequences, mean_tokens), 0)
                if flush_every and step[-1] % flush_every == 0:
                    writer.submit(writer.segments.seal, 0)
            writer.close()
            continue
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


def _append_steps(writer, rng, steps, number, sequences, mean_tokens):
    """Append rows of several steps, as the Recorder creates them for one."""
    step = np.repeat(steps, sequences)
    lengths = np.clip(rng.lognormal(np.log(mean_tokens), 0.5, len(step)).astype(int), 1, 8 * mean_tokens)
    tokens = int(lengths.sum())
    rollout = -rng.exponential(0.5, tokens).astype(np.float32)
    trained = np.minimum(rollout + rng.normal(0, 0.02, tokens).astype(np.float32), 0)
    names = [
        f"{writer.name}-{row}" for row in range((steps[0] - 1) * sequences, (steps[0] - 1) * sequences + len(step))
    ]
    known = {"step": step, "seq_id": names, "attempt": 1}
    prompt_lengths = np.full(len(step), 12)
    columns = {
        "response_ids": Ragged(rng.integers(0, VOCABULARY, tokens, dtype=np.int32), lengths),
        "num_response_tokens": lengths,
        "prompt_ids": Ragged(rng.integers(0, VOCABULARY, 12 * len(step), dtype=np.int32), prompt_lengths),
        "num_prompt_tokens": prompt_lengths,
        "group_id": [f"{of}-{number}" for of in step],
        "reward": rng.random(len(step)),
        "advantage": rng.normal(0, 1, len(step)),
        "policy_version": step - 1,
    }
    writer.append(SEQUENCES, known | columns, len(step))
    writer.state.num_sequences += len(step)
    writer.state.num_tokens += tokens
    for name, values in (("rollout", rollout), ("train", trained), ("current", trained)):
        columns = {"pass": name, "iteration": 0, "logprobs": Ragged(values, lengths)}
        writer.append(SCORES, known | columns, len(step))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--writers", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--at-once", type=int, help="number of steps whose rows are passed to a writer together")
    parser.add_argument(
        "--seals", type=int, help="number of files that each writer leaves per table (default: one per 64 MB)"
    )
    given = parser.parse_args()
    start = time.perf_counter()
    write(
        given.output,
        writers=given.writers,
        steps=given.steps,
        sequences=given.sequences,
        mean_tokens=given.tokens,
        flush_every=given.seals and given.steps // given.seals,
        at_once=given.at_once,
    )
    print(f"{given.writers} writers, {given.steps} steps: {time.perf_counter() - start:.0f} s")
