"""Attention over a KV cache. A query's result does not depend on keys that it cannot see.

Keys that a query cannot see get a weight of exactly 0, so prefill, chunked and decode modes give the same bits.

Shapes: B rows, W cache width, S keys in the cache, T queries, C queries per block, A query heads, N key heads, G = A /
N query heads per key head, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .functions import Precision, exp, power_of_two
from .slices import Slices, bits_for, exponents, matmul, scaled_matmul, sliced, sum_of_units

MOST_KEYS = 1 << 17
"""Maximum context length (tokens). Sums over more keys may be inexact."""
BLOCK = {"cpu": 1 << 18, "cuda": 1 << 25}
"""Maximum number of attention scores in memory at once. On a CPU, these scores fit into the processor's cache. On a
GPU, they take 256 MB, plus six to eight times as much for intermediate results."""


@dataclass(frozen=True, slots=True)
class Seen:
    keys_BTS: Any
    first_T: list[int]
    last_T: list[int]
    """First and last key index visible to each query in any row. Copied to the host once per forward pass."""


class KeyValueCache:
    def __init__(self, num_rows: int, num_heads: int, width: int, head_width: int, precision: Precision, device: Any):
        self._count = precision.slices
        shape = (num_rows, num_heads, width)

        def empty(bits: int) -> Slices:
            zeros = (torch.zeros(*shape, head_width, dtype=torch.float64, device=device) for _ in range(self._count))
            return Slices(tuple(zeros), torch.zeros(*shape, 1, dtype=torch.int64, device=device), bits)

        self._keys, self._values = empty(bits_for(head_width, self._count)), empty(bits_for(MOST_KEYS, self._count))
        self._broken = torch.zeros(*shape, dtype=torch.bool, device=device)
        """True for tokens with a non-finite value vector. Only queries that see such a token give NaN."""

    def add(self, keys_BNTD: Any, values_BNTD: Any, start: int) -> None:
        new = slice(start, start + keys_BNTD.shape[2])
        _, finite = exponents(values_BNTD)
        for cached, vectors in ((self._keys, keys_BNTD), (self._values, values_BNTD.masked_fill(~finite, 0.0))):
            given = sliced(vectors, cached.bits, self._count)
            for kept, part in zip((*cached.parts, cached.exponent), (*given.parts, given.exponent), strict=True):
                kept[:, :, new] = part
        self._broken[:, :, new] = ~finite[..., 0]

    def attend(self, queries_BATD: Any, seen: Seen, scaling: float) -> Any:
        """Return the attention output [B, A, T, D] in float64."""
        B, A, T, D = queries_BATD.shape
        N, S = self._broken.shape[1], seen.keys_BTS.shape[2]
        queries_BNGTD = queries_BATD.view(B, N, A // N, T, D)
        result_BNGTD = torch.empty_like(queries_BNGTD)
        block = max(1, BLOCK.get(queries_BATD.device.type, BLOCK["cuda"]) // (B * A * S))
        for start in range(0, T, block):
            stop = min(T, start + block)
            # Skip keys that no query in the block sees.
            keys = slice(min(seen.first_T[start:stop]), max(seen.last_T[start:stop]) + 1)
            queries_BNGCD = queries_BNGTD[:, :, :, start:stop]
            seen_BCS = seen.keys_BTS[:, start:stop, keys]
            result_BNGTD[:, :, :, start:stop] = self._block(queries_BNGCD, keys, seen_BCS, scaling)
        return result_BNGTD.view(B, A, T, D)

    def _block(self, queries_BNGCD: Any, seen: slice, seen_BCS: Any, scaling: float) -> Any:
        B, N, G, C, D = queries_BNGCD.shape
        S = seen_BCS.shape[2]
        keys, values = self._keys.part(seen), self._values.part(seen)
        queries = sliced(queries_BNGCD.reshape(B, N, G * C, D), keys.bits, self._count)
        scores_BNGCS = matmul(queries, keys).mul_(scaling).view(B, N, G, C, S)
        scores_BNGCS.masked_fill_(~seen_BCS[:, None, None], float("-inf"))
        weights_BNGCS = exp(scores_BNGCS - scores_BNGCS.amax(dim=-1, keepdim=True))
        total_BNGC1 = sum_of_units(weights_BNGCS)
        weights_BNGCS.mul_(power_of_two(values.exponent).mT[:, :, None])
        weights = sliced(weights_BNGCS.view(B, N, G * C, S), values.bits, self._count)
        result_BNGCD = scaled_matmul(weights, values).view(B, N, G, C, D) / total_BNGC1
        # Find the queries that see a token with non-finite values. A matrix product is used, because a Python branch
        # would have to wait for the device.
        lost_BCN = (seen_BCS.to(weights_BNGCS.dtype) @ self._broken[:, :, seen].to(weights_BNGCS.dtype).mT) > 0
        return result_BNGCD.masked_fill_(lost_BCN.mT[:, :, None, :, None], float("nan"))
