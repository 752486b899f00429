"""Pack rows with common prefixes into one forward pass, as TRL does.

Shapes: B rows and W tokens in a forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .backends.packing import Span
from .batching import PackedBatch
from .recorded import RecordedRow

_Pair = tuple[int, int | None]


def tree_batch(rows: Sequence[RecordedRow]) -> PackedBatch:
    """Pack rows like TRL 1.16's trl.experimental.async_grpo.packing.TreeRow. Rows share a node for token t if their
    tokens 0 to t + 1 are equal. The tree is laid out depth first."""
    tokens: list[int] = []
    roots: dict[_Pair, int] = {}
    children: list[dict[_Pair, int]] = []
    nodes_B: list[list[int]] = []
    for row in rows:
        ids = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
        level, nodes = roots, []
        for pair in zip(ids, [*ids[1:], None], strict=True):
            if pair not in level:
                level[pair] = len(tokens)
                tokens.append(pair[0])
                children.append({})
            nodes.append(level[pair])
            level = children[nodes[-1]]
        nodes_B.append(nodes)
    place_of = np.zeros(len(tokens), np.int64)
    ids_W: list[int] = []
    positions_W: list[int] = []
    segments: list[Span] = []
    stack: list[tuple[int, tuple[tuple[int, int], ...], int]] = [(node, (), 0) for node in reversed(roots.values())]
    while stack:
        node, path, depth = stack.pop()
        start = len(ids_W)
        while True:
            place_of[node] = len(ids_W)
            ids_W.append(tokens[node])
            positions_W.append(depth)
            depth += 1
            if len(children[node]) != 1:
                break
            (node,) = children[node].values()
        segments.append(Span(start=start, end=len(ids_W), prefix=path))
        path = (*path, (start, len(ids_W)))
        stack.extend((child, path, depth) for child in reversed(children[node].values()))
    return PackedBatch(
        rows=tuple(rows),
        ids_BW=np.array([ids_W], np.int64),
        positions_W=np.array(positions_W, np.int64),
        places_B=tuple(place_of[nodes] for nodes in nodes_B),
        spans=tuple(segments),
    )
