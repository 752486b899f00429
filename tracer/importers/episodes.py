"""Read prime-rl's `traces.jsonl`: episodes, each with one message graph per agent.

A node has the tokens that its message adds, and logprobs for the sampled tokens (`mask`). A path from a root to a leaf
is one training sample. Field names and rules follow verifiers (a60a606 and 0.4.1: v1/episode.py, v1/trace.py,
v1/graph.py) and `iter_trainable_branches` in prime-rl's src/prime_rl/orchestrator/trajectories.py (559b447).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from .dump_rows import masked_row
from .fields import PER_TOKEN, Fields, Values, shown

_BYTES_PER_TOKEN = 5 + 9 * len(PER_TOKEN)


@dataclass(frozen=True, slots=True)
class _Node:
    parent: int | None
    tokens: np.ndarray
    mask: np.ndarray
    is_sampled: bool
    values: dict[str, Values]
    """Per-token values by column, known only for sampled tokens."""


def episode_rows(fields: Fields, *_: Any) -> Iterator[dict[str, Any]]:
    """Yield an episode's trainable branches. A sampled node counts for training only in its first branch."""
    work = _record(_record(_record(fields.record, "run", fields), "work", fields), "policy", fields)
    common = {
        "policy_version": fields.of(work, fields.where, policy_version="end").integer("policy_version"),
        "group_id": fields.of(_record(fields.record, "group", fields), fields.where, group_id="id").text("group_id"),
    }
    for number, trace in enumerate(_records(fields.record, "traces", fields)):
        own = fields.of(trace, f"{fields.where}, trace {number}")
        if _record(trace, "agent", own).get("trainable") is not False:
            yield from _branches(own, common)


def _branches(trace: Fields, common: dict[str, Any]) -> Iterator[dict[str, Any]]:
    records = _records(trace.record, "nodes", trace)
    nodes = [_node(trace.of(record, f"{trace.where}, node {n}"), n) for n, record in enumerate(records)]
    calls = {call.get("node"): call for call in _records(trace.record, "calls", trace) if type(call.get("node")) is int}
    common = common | _rewards(trace)
    parents = {node.parent for node in nodes}
    links = [_records(record, "semantic_parents", trace) for record in records]
    resumed = [link.get("node") for each in links for link in each if link.get("type") == "compaction"]
    trained: set[int] = set()
    for leaf in range(len(nodes)):
        if leaf in parents or (
            "compaction_attempt" in [link.get("type") for link in links[leaf]] and leaf not in resumed
        ):
            continue  # prime-rl does not train on a compaction from which the agent did not resume
        path = [leaf]
        while (parent := nodes[path[-1]].parent) is not None:
            path.append(parent)
        path.reverse()
        trace.budget.take(_BYTES_PER_TOKEN * sum(len(nodes[n].tokens) for n in path) + 64 * len(path))
        masks = [nodes[n].mask & (n not in trained) for n in path]
        trained |= {n for n in path if nodes[n].is_sampled and nodes[n].mask.any()}
        if not (mask := np.concatenate(masks)).any():
            continue
        call = next((calls[n] for n in reversed(path) if n in calls), {})
        sampling = trace.of(_record(call, "sampling", trace), trace.where)
        cells = common | sampling.cells("temperature", "top_p", "max_tokens")
        cells["finish_reason"] = trace.of(call, trace.where).text("finish_reason")
        tokens = np.concatenate([nodes[n].tokens for n in path])
        yield cells | masked_row(tokens, mask, {name: _spread(name, [nodes[n] for n in path]) for name in PER_TOKEN})


def _node(fields: Fields, number: int) -> _Node:
    parent = fields.record.get("parent")
    if parent is not None and not (type(parent) is int and 0 <= parent < number):
        raise ImportFailed(f"{fields.where}: parent is {shown(parent)}, expected the index of an earlier node")
    tokens, mask = fields.ids("tokens"), fields.flags("response_mask")
    tokens = np.empty(0, np.int32) if tokens is None else tokens
    mask = np.zeros(len(tokens), bool) if mask is None else mask
    if len(mask) != len(tokens):
        raise ImportFailed(f"{fields.where}: mask has {len(mask)} entries for {len(tokens)} token_ids")
    values = {}
    for name in PER_TOKEN:
        given = fields.values(name)
        if given is None or not len(given):
            continue
        if len(given) != mask.sum():
            raise ImportFailed(f"{fields.where}: {name} has {len(given)} values for {mask.sum()} sampled tokens")
        whole = Values(np.zeros(len(tokens)), mask.copy())
        whole.values[mask], whole.known[mask] = given.values, given.known
        values[name] = whole
    return _Node(parent, tokens, mask, fields.record.get("sampled") is True, values)


def _spread(name: str, nodes: list[_Node]) -> Values | None:
    parts = [node.values.get(name, Values(np.zeros(len(node.mask)), np.zeros(len(node.mask), bool))) for node in nodes]
    return Values(*map(np.concatenate, zip(*parts, strict=True))) if any(part.known.any() for part in parts) else None


def _rewards(trace: Fields) -> dict[str, Any]:
    """Return the rewards' scores and their weighted sum. Rewards without a score are left out."""
    scores, total = {}, 0.0
    for name in (given := _record(trace.record, "rewards", trace)):
        own = trace.of(
            _record(given, name, trace), f"{trace.where}, reward {name!r:.40}", score="score", weight="weight"
        )
        if (score := own.number("score")) is not None:
            weight = own.number("weight")
            scores[name], total = score, total + score * (1.0 if weight is None else weight)
    return {"reward": total, "rewards": scores} if scores else {}


def _record(record: Mapping[str, Any], name: str, fields: Fields) -> Mapping[str, Any]:
    found = record.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise ImportFailed(f"{fields.where}: field {name!r:.40} is {shown(found)}, expected an object")
    return found or {}


def _records(record: Mapping[str, Any], name: str, fields: Fields) -> list[Mapping[str, Any]]:
    found = record.get(name) or []
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise ImportFailed(f"{fields.where}: field {name!r} is {shown(found)}, expected a list of objects")
    return found
