"""Measure storing and rebuilding the weights of each version."""

import statistics
import tempfile
import time
from pathlib import Path

from comparison import Comparison, seconds
from tim_trace.schemas.documents import WriterState
from tim_trace.tracer.store import Store
from tim_trace.tracer.weights.reader import WeightReader
from tim_trace.tracer.weights.writer import WeightWriter

NUM_ELEMENTS = 100_000_000
NUM_BYTES = 2 * NUM_ELEMENTS
NUM_VERSIONS = 200
WARMING_UP = 20
"""Number of versions after which AdamW's moments average many gradients."""
REBUILT = 12


def compare():
    """Measure 200 versions of 100 million bfloat16 weights (scale 0.02), with AdamW at lr 1e-6 and random gradients."""
    import torch

    torch.manual_seed(0)
    master = [torch.nn.Parameter(0.02 * torch.randn(NUM_ELEMENTS // 10)) for _ in range(10)]
    optimizer = torch.optim.AdamW(master, lr=1e-6, weight_decay=0.0)
    waiting, writing, updating = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        writer = WeightWriter(Path(folder), "p1-bench", lambda *_: None)
        for version in range(NUM_VERSIONS):
            weights = {str(number): tensor.detach().to(torch.bfloat16) for number, tensor in enumerate(master)}
            waiting.append(seconds(lambda: writer.snapshot(version, weights)))  # noqa: B023
            writing.append(waiting[-1] + seconds(writer.drain))
            for tensor in master:
                tensor.grad = torch.randn_like(tensor)
            updating.append(seconds(optimizer.step))
        writer.close()
        reader = reader_of(folder)
        kept = [reader.parts[version][0] for version in reader.versions]
        for kind, at_least in (("keyframe", 300), ("delta", 300)):
            rates = [
                NUM_BYTES / writing[part.version] / 1e6 for part in kept if part.is_keyframe == (kind == "keyframe")
            ]
            yield Comparison(
                what=f"writing a {kind}, alongside training", values=rates, unit=" MB/s", at_least=at_least
            )
        shares = [took / update for took, update in zip(waiting, updating, strict=True)]
        yield Comparison(what="time on the training thread, over that of AdamW's update", values=shares)
        keyframe = statistics.mean(part.num_bytes for part in kept if part.is_keyframe)
        yield Comparison(what="bytes of a keyframe over those in memory", values=[keyframe / NUM_BYTES])
        last = [part for part in kept if part.version >= WARMING_UP]
        shares = [part.num_bytes / keyframe for part in last if not part.is_keyframe]
        yield Comparison(what="bytes of a delta over those of a keyframe", values=shares, at_most=0.05)
        every = [
            sum(part.num_bytes for part in kept) / len(kept) / keyframe,
            sum(part.num_bytes for part in last) / len(last) / keyframe,
        ]
        yield Comparison(
            what="bytes of a version, including keyframes, over those of a keyframe", values=every, at_most=0.03
        )
        yield from _rebuilding(folder, kept)


def _rebuilding(folder, kept):
    keyframes = [part.version for part in kept if part.is_keyframe]
    far = sorted(kept, key=lambda part: _distance(kept, part))[-REBUILT:]
    plain, rebuilt, following = [], [], []
    for number, part in enumerate(far):
        plain.append(seconds(lambda: reader_of(folder).load(keyframes[number % len(keyframes)])))  # noqa: B023
        rebuilt.append(seconds(lambda: reader_of(folder).load(part.version)))  # noqa: B023
    reader = reader_of(folder)
    reader.load(keyframes[0])
    for version in range(keyframes[0] + 1, keyframes[0] + REBUILT):
        start = time.perf_counter()
        reader.load(version)
        following.append(NUM_BYTES / (time.perf_counter() - start) / 1e6)
    rates = [NUM_BYTES / took / 1e6 for took in plain]
    yield Comparison(what="rebuilding a keyframe, hashes compared", values=rates, unit=" MB/s", at_least=300)
    yield Comparison(
        what="rebuilding a version that is farthest from its keyframe, over the time to read a keyframe",
        values=[far_away / near for far_away, near in zip(rebuilt, plain, strict=True)], at_most=2,
    )  # fmt: skip
    yield Comparison(what="rebuilding the next version", values=following, unit=" MB/s", at_least=300)


def _distance(kept, part):
    """Estimate, from their bytes, the number of elements changed by the rows from the keyframe to a version."""
    by_row = {other.row: other for other in kept if other.segment == part.segment}
    distance = 0
    while not part.is_keyframe:
        distance += part.num_bytes
        part = by_row[part.parent_row]
    return distance


def reader_of(folder):
    return WeightReader(Store(folder), [WriterState(writer="p1")])
