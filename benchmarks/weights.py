"""Keeping the weights of each version and rebuilding them."""

import tempfile
import time
from pathlib import Path

from comparison import Comparison
from tim_trace.tracer.store import Store
from tim_trace.tracer.weights.reader import WeightReader
from tim_trace.tracer.weights.writer import WeightWriter

NUM_ELEMENTS = 100_000_000
NUM_VERSIONS = 9
VERSIONS_A_KEYFRAME = 3


def compare():
    """100 million bfloat16 weights of scale 0.02 under AdamW at lr 1e-6, with made-up gradients."""
    import torch

    torch.manual_seed(0)
    master = [torch.nn.Parameter(0.02 * torch.randn(NUM_ELEMENTS // 10)) for _ in range(10)]
    optimizer = torch.optim.AdamW(master, lr=1e-6, weight_decay=0.0)
    spent = []
    with tempfile.TemporaryDirectory() as folder:
        writer = WeightWriter(Path(folder), "p1-bench", versions_a_keyframe=VERSIONS_A_KEYFRAME)
        for version in range(NUM_VERSIONS):
            weights = {str(number): tensor.detach().to(torch.bfloat16) for number, tensor in enumerate(master)}
            start = time.perf_counter()
            writer.snapshot(version, weights)
            writer.drain()
            spent.append(time.perf_counter() - start)
            for tensor in master:
                tensor.grad = torch.randn_like(tensor)
            optimizer.step()
        writer.close()
        num_bytes = 2 * NUM_ELEMENTS
        reader = WeightReader(Store(folder))
        kept = [reader.parts[version][0] for version in reader.versions]
        for kind in ("keyframe", "delta"):
            rates = [num_bytes / spent[part.version] / 1e6 for part in kept if part.is_keyframe == (kind == "keyframe")]
            yield Comparison(what=f"writing a {kind}", values=rates, unit=" MB/s", at_least=300)
        shares = [part.num_bytes / kept[0].num_bytes for part in kept if not part.is_keyframe]
        yield Comparison(what="bytes of a delta over those of a keyframe", values=shares, at_most=0.05)
        yield from _rebuilding(folder, num_bytes)


def _rebuilding(folder, num_bytes):
    keyframe, deltas = [], []
    for _ in range(3):
        reader = WeightReader(Store(folder))
        start = time.perf_counter()
        reader.load(0)
        keyframe.append(num_bytes / (time.perf_counter() - start) / 1e6)
        for version in reader.versions[1:VERSIONS_A_KEYFRAME]:
            start = time.perf_counter()
            reader.load(version)
            deltas.append(num_bytes / (time.perf_counter() - start) / 1e6)
    yield Comparison(what="rebuilding a keyframe, hashes compared", values=keyframe, unit=" MB/s", at_least=300)
    yield Comparison(what="rebuilding the next version", values=deltas, unit=" MB/s", at_least=300)
