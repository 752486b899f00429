"""Reads vLLM's logprobs as numbers, and reduces them to those that the caller requested."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schemas.capture import Capture
from ..dense import LOGPROBS, TAIL, TOKEN_IDS, Logits, TopK

ALL_LOGPROBS = -1
ROOM_FOR_ALL = 1 << 30
"""Value for `max_logprobs` above any vocabulary's size; -1, no limit, would disable other engine features."""

DELTA = "DELTA"
"""vLLM's output kind with only new tokens. It joins waiting outputs by position, which loses flat logprobs."""


@dataclass(slots=True, kw_only=True)
class Requested:
    """The logprobs and output options that the caller set for one request."""

    params: Any
    logprobs: int | None
    flat: bool
    changed: bool = False
    """True if recording requests more from the engine than the caller did."""
    captured: bool = False

    @classmethod
    def of(cls, params: Any, *, changed: bool, captured: bool) -> Requested:
        flat = bool(getattr(params, "flat_logprobs", False))
        return cls(params=params, logprobs=params.logprobs, flat=flat, changed=changed, captured=captured)


def asking(params: Any, capture: Capture | None) -> Any:
    """Return sampling parameters that request the logprobs needed for recording. If `params` already does, return the
    same object.

    `capture` is given for a request whose distributions are recorded.
    """
    wanted = 0 if capture is None else ALL_LOGPROBS if capture.level == "logits" else capture.k or 0
    have = params.logprobs
    if have is not None and (have == ALL_LOGPROBS or (wanted != ALL_LOGPROBS and have >= wanted)):
        return params
    asked = params.clone()
    asked.logprobs = wanted
    is_delta = getattr(getattr(params, "output_kind", None), "name", None) == DELTA
    if params.prompt_logprobs is None and hasattr(asked, "flat_logprobs"):
        asked.flat_logprobs = not is_delta
    return asked


def room_for(capture: Capture, given: int) -> int:
    """Return the `max_logprobs` that the engine needs to capture distributions, at least `given`."""
    if not capture.dense or given == ALL_LOGPROBS:
        return given
    return max(ROOM_FOR_ALL if capture.level == "logits" else capture.k or 1, given)


def cut_down(completion: Any, requested: Requested) -> Any:
    """Reduce a completion's logprobs to those that the caller requested. Return the engine's full logprobs."""
    given = completion.logprobs
    if requested.changed:
        completion.logprobs = as_requested(given, completion.token_ids, requested)
        if requested.logprobs is None:
            completion.cumulative_logprob = None
    return given


def sampled_logprobs(logprobs: Any, token_ids: Sequence[int]) -> list[float]:
    """Return the logprob of each sampled token; NaN stays NaN."""
    if hasattr(logprobs, "start_indices"):  # In vLLM's flat container, the sampled token comes first at each position.
        return [logprobs.logprobs[start] for start in logprobs.start_indices]
    return [position[token].logprob for position, token in zip(logprobs, token_ids, strict=True)]


def distribution(logprobs: Any, capture: Capture) -> dict[str, np.ndarray] | None:
    """Return the captured arrays for one completion: the top K with the tail's mass, or logprobs over the whole
    vocabulary.

    The tail's mass is 1 minus the sum of K float32 probabilities. It is accurate to about 1e-7; the log of a smaller
    mass is -inf.
    """
    if logprobs is None or not len(logprobs):
        return None
    ids_TK, logprobs_TK = _ranked(logprobs)
    if capture.level == "logits":
        logprobs_TV = np.full((len(ids_TK), int(ids_TK.max()) + 1), np.nan, np.float32)
        np.put_along_axis(logprobs_TV, ids_TK.astype(np.int64), logprobs_TK, axis=1)
        return {LOGPROBS: logprobs_TV}
    k = capture.k or 1
    ids_TK, logprobs_TK = ids_TK[:, :k], logprobs_TK[:, :k]
    left_T = 1.0 - np.exp(logprobs_TK.astype(np.float64)).sum(axis=1)
    with np.errstate(divide="ignore"):
        tail_T = np.log(np.maximum(left_T, 0.0)).astype(np.float32)
    return {TOKEN_IDS: ids_TK, LOGPROBS: logprobs_TK, TAIL: tail_T}


def gathered(parts: Sequence[dict[str, np.ndarray] | None]) -> TopK | Logits | None:
    """Return the distributions of several rows, concatenated. Rows without one are skipped; None if no row has one."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    arrays = {name: np.concatenate([part[name] for part in present]) for name in present[0]}
    return TopK(**arrays) if "token_ids" in arrays else Logits(logits=arrays["logprobs"], kind="logprobs")


def _ranked(logprobs: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the top K tokens per position, by rank: ids [T, K] int32 and logprobs [T, K] float32.

    A sampled token outside the top K is left out.
    """
    if hasattr(logprobs, "start_indices"):
        width = logprobs.end_indices[0] - logprobs.start_indices[0]
        # At flat positions that vLLM joined from several outputs, the sampled token occurs only once, at its rank.
        if len(logprobs.ranks) == width * len(logprobs) and logprobs.ranks[1:width] == list(range(1, width)):
            ids = np.array(logprobs.token_ids, np.int32).reshape(-1, width)
            values = np.array(logprobs.logprobs, np.float32).reshape(-1, width)
            return ids[:, 1:], values[:, 1:]
    rows = []
    for position in logprobs:
        ranked = sorted(position.items(), key=lambda item: item[1].rank)
        rows.append([(token, entry.logprob) for token, entry in ranked])
    width = min(len(row) for row in rows)
    ids = np.array([[token for token, _ in row[:width]] for row in rows], np.int32)
    values = np.array([[value for _, value in row[:width]] for row in rows], np.float32)
    return ids, values


def as_requested(logprobs: Any, token_ids: Sequence[int], requested: Requested) -> Any:
    """Return the logprobs that the caller requested, taken from the engine's, in the requested container."""
    if requested.logprobs is None or logprobs is None:
        return None
    kept = []
    for position, token in zip(logprobs, token_ids, strict=True):
        # The sampled token comes first whatever its rank, as in results of the unhooked engine.
        entries = {token: position[token]}
        limit = math.inf if requested.logprobs < 0 else requested.logprobs
        for other, entry in sorted(position.items(), key=lambda item: item[1].rank):
            if entry.rank <= limit:
                entries.setdefault(other, entry)
        kept.append(entries)
    if not requested.flat:
        return kept
    container = type(logprobs)() if hasattr(logprobs, "start_indices") else None
    if container is None:
        from vllm.logprobs import FlatLogprobs

        container = FlatLogprobs()
    container.extend(kept)
    return container
