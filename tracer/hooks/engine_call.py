"""Request extra logprobs from an engine for recording, and return only what the caller requested."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schemas.capture import Capture
from ...schemas.passes import ROLLOUT
from ...schemas.tables import SAMPLING
from ..dense import LOGPROBS, TAIL, TOKEN_IDS, Logits, TopK, tail_of

ALL_LOGPROBS = -1
ROOM_FOR_ALL = 1 << 30  # larger than any vocabulary; vLLM's own value for "no limit", -1, disables other features
DELTA = "DELTA"
"""vLLM output kind that contains only new tokens. vLLM drops flat logprobs when it merges such outputs."""


@dataclass(slots=True, kw_only=True)
class Requested:
    params: Any
    changed: bool
    captured: bool


def asking(params: Any, capture: Capture | None) -> Any:
    """Return `params`, or a copy that also requests the logprobs needed for `capture`."""
    wanted = 0 if capture is None else ALL_LOGPROBS if capture.level == "logits" else capture.k or 0
    have = params.logprobs
    if have is not None and (have == ALL_LOGPROBS or (wanted != ALL_LOGPROBS and have >= wanted)):
        return params
    asked = params.clone()
    asked.logprobs = wanted
    if params.prompt_logprobs is None and hasattr(asked, "flat_logprobs"):
        asked.flat_logprobs = getattr(getattr(params, "output_kind", None), "name", None) != DELTA
    return asked


def room_for(capture: Capture, given: int) -> int:
    if not capture.dense or given == ALL_LOGPROBS:
        return given
    return max(ROOM_FOR_ALL if capture.level == "logits" else capture.k or 1, given)


def cut_down(completion: Any, requested: Requested) -> Any:
    """Trim a completion to what the caller requested, and return the untrimmed logprobs."""
    given = completion.logprobs
    if requested.changed:
        completion.logprobs = as_requested(given, completion.token_ids, requested)
        if requested.params.logprobs is None:
            completion.cumulative_logprob = None
    return given


def sampled_logprobs(logprobs: Any, token_ids: Sequence[int]) -> list[float]:
    if hasattr(logprobs, "start_indices"):  # in vLLM's flat container, the sampled token comes first at each position
        return [logprobs.logprobs[start] for start in logprobs.start_indices]
    return [position[token].logprob for position, token in zip(logprobs, token_ids, strict=True)]


def distribution(logprobs: Any, capture: Capture) -> dict[str, np.ndarray] | None:
    """Return the top-K logprobs and the log probability of all other tokens, or the full vocabulary's logprobs."""
    if logprobs is None or not len(logprobs):
        return None
    ids_TK, logprobs_TK = _ranked(logprobs)
    if capture.level == "logits":
        logprobs_TV = np.full((len(ids_TK), int(ids_TK.max()) + 1), np.nan, np.float32)
        np.put_along_axis(logprobs_TV, ids_TK.astype(np.int64), logprobs_TK, axis=1)
        return {LOGPROBS: logprobs_TV}
    k = capture.k or 1
    ids_TK, logprobs_TK = ids_TK[:, :k], logprobs_TK[:, :k]
    return {TOKEN_IDS: ids_TK, LOGPROBS: logprobs_TK, TAIL: tail_of(logprobs_TK)}


def _ranked(logprobs: Any) -> tuple[np.ndarray, np.ndarray]:
    if hasattr(logprobs, "start_indices"):
        width = logprobs.end_indices[0] - logprobs.start_indices[0]
        # In vLLM's flat format, a position usually lists the sampled token first, and then the tokens of rank 1, 2, ...
        # If vLLM merged outputs, the sampled token is listed only once, at its rank.
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
    most = requested.params.logprobs
    if most is None or logprobs is None:
        return None
    kept, limit = [], math.inf if most < 0 else most
    for position, token in zip(logprobs, token_ids, strict=True):
        # The sampled token comes first whatever its rank, as in vLLM's own results.
        entries = {token: position[token]}
        for other, entry in sorted(position.items(), key=lambda item: item[1].rank):
            if entry.rank <= limit:
                entries.setdefault(other, entry)
        kept.append(entries)
    if not getattr(requested.params, "flat_logprobs", False):  # missing in older releases of vLLM
        return kept
    from vllm.logprobs import FlatLogprobs

    container = FlatLogprobs()
    container.extend(kept)
    return container


@dataclass(slots=True, kw_only=True)
class EngineCall:
    """Completions from one engine call, grouped by prompt. Shapes: B completions."""

    outputs: Sequence[Any]
    requested: Sequence[Requested]
    given: list[Any] | None
    """[B] logprobs before trimming, or None if nothing was trimmed."""
    capture: Capture

    @property
    def completions(self) -> list[Any]:
        return [completion for output in self.outputs for completion in output.outputs]

    @property
    def prompt_of(self) -> list[int]:
        return [index for index, output in enumerate(self.outputs) for _ in output.outputs]

    @property
    def lengths(self) -> list[int]:
        return [len(completion.token_ids) for completion in self.completions]

    @property
    def finish_reasons(self) -> list[str | None]:
        return [completion.finish_reason for completion in self.completions]

    @property
    def engine_logprobs(self) -> list[Any]:
        return [completion.logprobs for completion in self.completions] if self.given is None else self.given

    def logprobs(self) -> list[list[float] | None]:
        return [
            None if given is None else sampled_logprobs(given, completion.token_ids)
            for completion, given in zip(self.completions, self.engine_logprobs, strict=True)
        ]

    def captured(self) -> list[int]:
        asked = [self.requested[prompt].captured for prompt in self.prompt_of]
        return [row for row, keep in enumerate(asked) if keep and self.engine_logprobs[row]]

    def distribution(self, rows: Sequence[int]) -> TopK | Logits | None:
        given = [distribution(self.engine_logprobs[row], self.capture) for row in rows]
        parts = [part for part in given if part is not None]
        if not parts:
            return None
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return TopK(**arrays) if TOKEN_IDS in arrays else Logits(logits=arrays[LOGPROBS], kind=LOGPROBS)

    def record(self, recorder: Any, *, step: int, names: Sequence[str]) -> None:
        """Record the completions and their logprobs (rollout pass). `names` has one name per prompt."""
        prompts = self.prompt_of
        params = [self.requested[prompt].params for prompt in prompts]
        batch = recorder.add_sequences(
            step=step,
            seq_ids=[f"{names[prompt]}-{done.index}" for prompt, done in zip(prompts, self.completions, strict=True)],
            group_ids=[names[prompt] for prompt in prompts],
            prompt_ids=[list(self.outputs[prompt].prompt_token_ids or []) for prompt in prompts],
            response_ids=[list(done.token_ids) for done in self.completions], finish_reason=self.finish_reasons,
            **{name: [getattr(one, name) for one in params] for name in SAMPLING},
        )  # fmt: skip
        logprobs = self.logprobs()
        scored = [row for row, values in enumerate(logprobs) if values is not None]
        if scored:
            captured = self.captured()
            recorder.add_scores(
                ROLLOUT, batch, rows=scored, logprobs=[logprobs[row] for row in scored],
                distribution=self.distribution(captured), captured_rows=captured,
            )  # fmt: skip
