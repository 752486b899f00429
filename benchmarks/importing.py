"""Compare imports of dumps with the bare reader of each format."""

import ctypes
import gc
import json
import pickle
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.json as pj
import pyarrow.parquet as pq
import xxhash
from comparison import Comparison, in_turn, ratios
from tim_trace.tracer.importers.import_dump import import_dump

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import dumps  # what each framework writes

NUM_SAMPLES, LONGEST, ROUNDS = 512, 1000, 5
COPIED = ("verl", "skyrl", "parquet")
"""Formats whose readers mostly copy memory."""
MORE_STEPS = 8
"""Steps of a larger dump of these formats, in which fixed costs are a smaller share."""


def compare():
    """Compare import speed, in CPU time of all threads, with torch.load, json or pyarrow, on each framework's dump of a
    step.

    The step has 512 sequences of 20 to 1,000 tokens. JSON is read completely by json (as frameworks do), pyarrow and
    msgspec. The floor uses none of our code: the reader (msgspec for JSON), bare pyarrow that writes the same columns
    with the same codec, and one hash of the output. An import of two sequences shows the fixed cost of an import.
    """
    step = make_samples()
    yield Comparison(what="response tokens of a step", values=[sum(len(sample.response) for sample in step)])
    few = [*make_samples(2)]
    with tempfile.TemporaryDirectory() as folder:
        dumps.write_verl(Path(folder, "dump"), {1: few})
        imported = partial(import_dump, "verl", Path(folder, "dump"), output=f"{folder}/run", force=True)
        imported()
        taken = in_turn(ROUNDS, clock=time.process_time, imported=imported)["imported"]
        yield Comparison(what="verl, two sequences", values=[1000 * seconds for seconds in taken], unit=" ms")
    formats = _formats()
    for name, num_steps in [*((name, 1) for name in formats), *((name, MORE_STEPS) for name in COPIED)]:
        (write, read), steps = formats[name], {number: step for number in range(1, num_steps + 1)}
        num_tokens = sum(len(sample.response) for samples in steps.values() for sample in samples)
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "dump"
            place.mkdir()
            write(place, steps)
            files = sorted(path for path in place.rglob("*") if path.is_file() and path.stat().st_size)

            def imported(name=name, place=place, folder=folder):
                import_dump(name, place, output=f"{folder}/run", force=True)

            others = {kind: partial(_read_all, reader, files) for kind, reader in OTHERS.get(read, {}).items()}
            readers = {ALONE: partial(_read_all, read, files), **others}
            imported(), [reader() for reader in readers.values()]
            tables = [pq.read_table(path) for path in Path(folder, "run").rglob("*.parquet")]

            def write_bare(tables=tables, folder=folder):
                for number, table in enumerate(tables):
                    _write_bare(table, Path(folder, f"{number}.parquet"))

            gc.freeze()  # the collector does not traverse objects loaded by the benchmark, such as torch's
            taken = in_turn(
                ROUNDS, clock=_both_clocks, before=_give_memory_back, **readers, imported=imported, bare=write_bare
            )
            cpu = {kind: [seconds[0] for seconds in rounds] for kind, rounds in taken.items()}
            size = sum(path.stat().st_size for path in files) / 1e6
            what = f"{name}, {num_steps} step{'s' * (num_steps > 1)} ({size:.0f} MB)"
            yield Comparison(what=what, values=ratios(cpu[ALONE], cpu["imported"]), at_least=0.5)
            wall = [seconds[1] for seconds in taken[ALONE]], [seconds[1] for seconds in taken["imported"]]
            yield Comparison(what=f"{what}, wall time", values=ratios(*wall))
            for kind in others:
                yield Comparison(what=f"{what}, over {kind} alone", values=ratios(cpu[kind], cpu["imported"]))
            fastest = cpu[MSGSPEC if others else ALONE]
            floor = [reader + bare for reader, bare in zip(fastest, cpu["bare"], strict=True)]
            yield Comparison(what=f"{what}, over the floor", values=ratios(floor, cpu["imported"]))
            rates = [num_tokens / seconds / 1e6 for seconds in cpu["imported"]]
            yield Comparison(what=f"{what}, million response tokens per CPU second", values=rates)


def _both_clocks():
    """Return the CPU seconds of all threads, and the wall seconds."""
    return np.array([time.process_time(), time.perf_counter()])


def _give_memory_back():
    """Return free memory to the system: otherwise a copy is faster if one of the same size came before."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _read_all(read, files):
    for path in files:
        read(path)


def _write_bare(table, path):
    values = [
        field.name for field in table.schema if pa.types.is_list(field.type) and field.type.value_type == pa.float32()
    ]
    written = pa.BufferOutputStream()
    pq.write_table(
        table,
        written,
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
        column_encoding={f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in values},
    )
    content = written.getvalue()
    path.write_bytes(content)
    xxhash.xxh3_128(content).digest()


def make_samples(num_samples=NUM_SAMPLES, seed=0):
    draw = np.random.default_rng(seed)
    return [
        dumps.Sample(
            index=index,
            prompt=draw.integers(3, 150_000, int(draw.integers(20, 200))),
            response=draw.integers(3, 150_000, length),
            mask=np.ones(length, bool),
            rollout=-draw.exponential(1.0, length).astype(np.float32),
            train=-draw.exponential(1.0, length).astype(np.float32),
            reference=-draw.exponential(1.0, length).astype(np.float32),
            entropy=draw.exponential(1.0, length).astype(np.float32),
            advantage=0.5,
            reward=1.0,
        )
        for index, length in enumerate(draw.integers(20, LONGEST, num_samples).tolist())
    ]


def _formats():
    """Return, by format, the function that writes a dump and the one that reads one of its files."""
    return {
        "verl": (lambda folder, steps: dumps.write_verl(folder, steps, method="tensors"), _read_verl),
        "slime": (dumps.WRITERS["slime"], _read_torch),
        "miles": (dumps.WRITERS["miles"], _read_torch),
        "skyrl": (dumps.write_skyrl, _read_skyrl),
        "prime-rl": (dumps.write_prime_rl, _read_json),
        "nemo-rl": (dumps.write_nemo_rl, _read_json),
        "vllm": (dumps.write_vllm, _read_json),
        "sglang": (dumps.write_sglang, _read_json),
        "open-instruct": (dumps.write_open_instruct, _read_json),
        "torchtitan": (_write_torchtitan, _read_json),
        "parquet": (_write_parquet, pq.read_table),
    }


def _write_torchtitan(folder, steps):
    lines = [
        {
            "group_id": "g", "status": "done", "reward": sample.reward,
            "turns": [{
                "max_policy_version": step, "prompt_token_ids": sample.prompt.tolist(),
                "completion_token_ids": sample.response.tolist(), "completion_logprobs": sample.rollout.tolist(),
            }],
        }
        for step, samples in steps.items()
        for sample in samples
    ]  # fmt: skip
    dumps.write_lines(folder / "rollout_samples.jsonl", lines)


def _write_parquet(folder, steps):
    rows = [
        {
            "step": step, "prompt_ids": sample.prompt, "response_ids": sample.response, "rollout_logprobs": sample.rollout,
            "train_logprobs": sample.train,
        }
        for step, samples in steps.items()
        for sample in samples
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), folder / "dump.parquet")


def _read_torch(path):
    import torch

    return torch.load(path, weights_only=False)


def _read_json(path):
    with path.open() as lines:
        return [json.loads(line) for line in lines]


def _read_msgspec(path):
    with path.open("rb") as lines:
        return [msgspec.json.decode(line) for line in lines]


def _read_arrow(path):
    return pj.read_json(path, read_options=pj.ReadOptions(block_size=64 << 20))


@dataclass
class DataProto:
    """The class that a pickle of verl's batch becomes."""

    state: tuple = ()

    def __setstate__(self, state):
        self.state = state


def _read_verl(path):
    import torch

    if path.suffix == ".json":
        return json.loads(path.read_text())
    with dumps.classes_of(verl__protocol={"DataProto": DataProto}):
        found = pickle.loads(path.read_bytes())
    return torch.load(BytesIO(found.state[0]), weights_only=False)


def _rebuild_tensor_batch(_kind, state):
    tensors = state["batch_dict"].items()
    return {
        name: np.frombuffer(tensor["data"], tensor["dtype"]).reshape(tensor["shape"])
        for name, tensor in tensors
        if tensor is not None
    }


def _read_skyrl(path):
    members = {
        "TrainingInputBatch": type("TrainingInputBatch", (dict,), {}),
        "_rebuild_tensor_batch": _rebuild_tensor_batch,
    }
    with dumps.classes_of(skyrl__backends__skyrl_train__training_batch=members):
        return pickle.loads(path.read_bytes())


ALONE, MSGSPEC, ARROW = "json or its own", "msgspec", "pyarrow's JSON reader"
OTHERS = {
    _read_json: {ARROW: _read_arrow, MSGSPEC: _read_msgspec},
}
"""Alternatives to each json reader for the same files, by name."""
