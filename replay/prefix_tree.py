"""Rows packed into a prefix tree, as in TRL: tokens that rows share run through the model only once.

Shapes: B rows in a forward pass, W tokens in the forward pass, N scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .backends.packing import Span
from .batching import PackedBatch
from .recorded import RecordedRow

_Pair = tuple[int, int | None]
"""A token and the token after it; None in place of the latter for the last token in a row."""
UNLABELLED = -100
"""Label of a position whose next token has no score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeBatch(PackedBatch):
    """One forward pass over rows whose common prefixes occur only once. Attention follows each row's path in the
    tree."""

    places_B: tuple[np.ndarray, ...]
    """[B] arrays: for each row, the index of each token within the forward pass."""
    segments: tuple[Span, ...]
    """Segments of the tree without branches."""

    @property
    def spans(self) -> list[Span]:
        """Spans of tokens that attend to each other: one per segment, with the path from the root to the segment as
        prefix."""
        return list(self.segments)

    @property
    def before_N(self) -> np.ndarray:
        """Indices of the hidden states that predict the response tokens."""
        pairs = zip(self.rows, self.places_B, strict=True)
        return np.concatenate([places[len(row.prompt_ids) - 1 : -1] for row, places in pairs])

    @property
    def scored_N(self) -> np.ndarray:
        """Indices of the response tokens, row by row."""
        pairs = zip(self.rows, self.places_B, strict=True)
        return np.concatenate([places[len(row.prompt_ids) :] for row, places in pairs])

    @property
    def places_N(self) -> np.ndarray:
        """Indices of prompt and response tokens, row by row; rows share the indices of common prefixes."""
        return np.concatenate(self.places_B)

    @property
    def labels_W(self) -> np.ndarray:
        """int64: the token that follows each position if that token is scored, else UNLABELLED."""
        labels_W = np.full(self.width, UNLABELLED, np.int64)
        scored_N = np.concatenate([row.scored for row in self.rows])
        labels_W[self.before_N[scored_N]] = np.concatenate([row.response_ids for row in self.rows])[scored_N]
        return labels_W


def tree_batch(rows: Sequence[RecordedRow]) -> TreeBatch:
    """Pack rows as trl.experimental.async_grpo.packing.TreeRow (TRL 1.16) does, in this order.

    Rows share a token if they agree on it, on all tokens before it and on the next one; the tree is laid out depth first.
    """
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
    places_B = tuple(place_of[nodes] for nodes in nodes_B)
    return TreeBatch(
        rows=tuple(rows),
        ids_W=np.array(ids_W, np.int64),
        positions_W=np.array(positions_W, np.int64),
        ends_B=np.array([places[-1] + 1 for places in places_B], np.int64),
        places_B=places_B,
        segments=tuple(segments),
    )
