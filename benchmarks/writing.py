"""Compare recording with bare Parquet and JSON lines of the same content."""

import json
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from comparison import Comparison, in_turn, ratios
from steps import make_step, record
from tim_trace.tracer.recorder import Recorder

COLUMNS = ("ids", "rollout", "train", "current")
NUM_STEPS = 16


def compare():
    """Measure recording 16 million tokens (ids, three float32 columns), and its share of the training thread."""
    steps = [make_step(number % 4) for number in range(NUM_STEPS)]
    tables = [_table(step) for step in steps]
    with tempfile.TemporaryDirectory() as folder:
        trace, bare, lines = (Path(folder, name) for name in ("trace", "bare.parquet", "dump.jsonl"))
        taken = in_turn(
            7,
            recorded=lambda: _record(steps, trace),
            bare=lambda: _write_bare(pa.concat_tables(tables), bare),
        )
        yield Comparison(
            what="the recorder's throughput over that of pyarrow.parquet.write_table",
            values=ratios(taken["bare"], taken["recorded"]),
            at_least=0.7,
        )
        recorded_bytes = sum(file.stat().st_size for file in trace.rglob("*") if file.is_file())
        yield Comparison(
            what="bytes over those of the bare Parquet", values=[recorded_bytes / bare.stat().st_size], at_most=1.1
        )
        taken = in_turn(3, recorded=lambda: _record(steps, trace), lines=lambda: _write_lines(steps, lines))
    yield Comparison(
        what="the recorder's throughput over that of JSON lines",
        values=ratios(taken["lines"], taken["recorded"]),
        at_least=20,
    )
    for longest in (180, 1800):
        step = make_step(0, longest=longest)
        yield Comparison(
            what=f"time on the training thread, CPU tensors, {step.num_tokens:,} tokens per batch",
            values=[_caller_ns(step) for _ in range(5)],
            unit=" ns per token",
            at_most=50,
        )
    small = _small_batch()
    for form, arrays in small.items():
        for call, values in _small_ns(arrays).items():
            yield Comparison(
                what=f"{call} of 64 x 100 tokens, {form}: training-thread time", values=values, unit=" ns per token",
                at_most=None if form == "lists" else 50,
            )  # fmt: skip


def _record(steps, folder):
    with Recorder(folder, force=True) as recorder:
        for number, step in enumerate(steps, 1):
            record(recorder, number, step)


def _small_batch():
    """Return ids and logprobs of 64 sequences of 100 tokens, by form."""
    import torch

    draw = np.random.default_rng(0)
    ids, logprobs = draw.integers(0, 150_000, (64, 100), "i4"), -draw.exponential(1.0, (64, 100)).astype("f4")
    tensors = [torch.from_numpy(array) for array in (ids, logprobs)]
    return {
        "arrays": (ids, logprobs),
        "tensors": tensors,
        "lists of arrays": ([*ids], [*logprobs]),
        "lists of tensors": [list(tensor) for tensor in tensors],
        "lists": (ids.tolist(), logprobs.tolist()),
    }


def _small_ns(arrays, rounds=5, num_steps=100):
    """Return nanoseconds per token by call and round; queued data is written before the next call."""
    ids, logprobs = arrays
    found = {"add_sequences": [], "add_scores": []}
    for _ in range(rounds):
        spent = dict.fromkeys(found, 0.0)
        with tempfile.TemporaryDirectory() as folder, Recorder(folder + "/trace") as recorder:
            for number in range(1, num_steps + 1):
                start = time.perf_counter()
                batch = recorder.add_sequences(step=number, response_ids=ids)
                spent["add_sequences"] += time.perf_counter() - start
                for name in ("rollout", "train"):
                    recorder.flush()
                    start = time.perf_counter()
                    recorder.add_scores(name, batch, logprobs=logprobs)
                    spent["add_scores"] += (time.perf_counter() - start) / 2
                recorder.flush()
        for call, seconds in spent.items():
            found[call].append(1e9 * seconds / (num_steps * 6400))
    return found


def _table(step):
    """Return the step as Arrow lists, ready to write."""
    offsets = pa.array([0, *step.mask.sum(1).cumsum()], pa.int32())
    return pa.table(
        {name: pa.ListArray.from_arrays(offsets, pa.array(getattr(step, name)[step.mask])) for name in COLUMNS}
    )


def _write_bare(table, path):
    pq.write_table(
        table,
        path,
        row_group_size=1000,
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
        column_encoding={f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in COLUMNS[1:]},
    )


def _write_lines(steps, path):
    """Write one JSON object per sequence, as trainers dump their generations."""
    with path.open("w") as file:
        for number, step in enumerate(steps, 1):
            for row, mask in enumerate(step.mask):
                values = {name: getattr(step, name)[row][mask].tolist() for name in COLUMNS}
                file.write(json.dumps({"step": number, **values}, ensure_ascii=False) + "\n")


def _caller_ns(step, num_steps=5):
    """Return the caller's nanoseconds per token, excluding time spent waiting for a full queue."""
    spent, tensors = 0.0, step.tensors
    with tempfile.TemporaryDirectory() as folder, Recorder(folder + "/trace") as recorder:
        for number in range(1, num_steps + 1):
            start = time.perf_counter()
            record(recorder, number, step, tensors)
            spent += time.perf_counter() - start
            recorder.flush()
    return 1e9 * spent / (num_steps * step.num_tokens)
