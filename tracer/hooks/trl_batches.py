"""Read TRL batches: passes, loss rows, rewards and finish reasons."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...schemas.passes import REFERENCE, TRAIN
from .engine_call import EngineCall
from .patches import arguments
from .trl_release import PAD_TOKEN, REWARD_NAMES, REWARD_WEIGHTS, end_tokens, find, sampled_logprobs
from .trl_state import Generation, Loss, Recorded, Scoring

ROW_KEY = "tim_trace_row"
"""Batch key for row indices or encoded samples, used to identify rows after shuffling."""


def named_passes(scorings: list[Scoring], output: dict[str, Any]) -> list[tuple[str, Scoring]]:
    """Pair each scoring call with its pass name, based on its output tensor or, for RLOO, on the call order."""
    named = []
    for index, scoring in enumerate(scorings):
        is_reference = scoring.is_reference or scoring.logprobs is output.get("ref_per_token_logps")
        is_train = scoring.logprobs is output.get("old_per_token_logps") or index == 0
        named.append((TRAIN if is_train and not is_reference else REFERENCE, scoring))
    return named


def scoring_call(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return a scoring call's arguments by name. TRL 1.14 passes some of them as *args."""
    call = arguments(original, trainer, *args, **kwargs)
    return dict(zip(("input_ids", "attention_mask", "logits_to_keep"), call.pop("args", ()), strict=False)) | call


def scoring_of(trainer: Any, call: dict[str, Any], result: Any) -> Scoring:
    logprobs, entropy = (result[0], result[1]) if isinstance(result, tuple) else (result, None)
    return Scoring(
        logprobs=logprobs,
        entropy=entropy,
        is_reference=call["model"] is getattr(trainer, "ref_model", None),
        rows_a_forward=call.get("batch_size") or len(call["input_ids"]),
    )


def loss_of(known: Mapping[int, Recorded], inputs: Any) -> Loss | None:
    keys = inputs.get(ROW_KEY) if isinstance(inputs, dict) else None
    if keys is None or not len(keys):
        return None
    keys = keys.cpu()
    index, rows = int(keys[0, 0]), keys[:, 1].numpy()
    recorded = known.get(index)
    if recorded is None:
        return None
    scored_mask = inputs["completion_mask"] if recorded.masks_attention else None
    return Loss(recorded=recorded, rows=rows, scored_mask=scored_mask)


def row_keys(index: int, rows: int) -> Any:
    import torch

    return torch.from_numpy(np.column_stack([np.full(rows, index), np.arange(rows)]))


def local_rewards(trainer: Any, generation: Generation, rows: int) -> dict[str, Any]:
    per_func = generation.rewards_per_func
    weights, names = find(trainer, REWARD_WEIGHTS), find(trainer, REWARD_NAMES)
    if per_func is None or weights is None or names is None:
        return {}
    first = trainer.accelerator.process_index * rows
    per_func = per_func[first : first + rows]
    reward = (per_func * weights.to(per_func.device).unsqueeze(0)).nansum(dim=1)
    reward = reward.masked_fill(per_func.isnan().all(dim=1), float("nan"))
    return {"reward": reward, "rewards": {name: per_func[:, column] for column, name in enumerate(names)}}


def engine_call_of(generation: Generation) -> EngineCall | None:
    if len(generation.engine_calls) != 1 or generation.rows is None:
        return None
    call = generation.engine_calls[0]
    return call if call.lengths == generation.rows.response_lengths.tolist() else None


def server_logprobs(generation: Generation) -> list[list[float]] | None:
    if generation.rows is None:
        return None
    lengths = generation.rows.response_lengths.tolist()
    if len(generation.server_logprobs) != 1:
        return sampled_logprobs(generation.returned, lengths)
    given = generation.server_logprobs[0]
    if [len(positions) for positions in given] != lengths:
        return None
    return [[float("nan") if first is None else first for first, *_ in positions] for positions in given]


def finish_reasons(trainer: Any, call: EngineCall | None, generation: Generation) -> list[str | None]:
    if call is not None:
        return call.finish_reasons
    ends = end_tokens(trainer)
    return why_ended(ends and ends | {find(trainer, PAD_TOKEN)}, generation.last_tokens)


def why_ended(ends: set[int], last_tokens: Sequence[int | None]) -> list[str | None]:
    known = (None if token is None or not ends else token in ends for token in last_tokens)
    return [None if is_end is None else "stop" if is_end else "length" for is_end in known]


def right_padded(width: int, lengths: np.ndarray) -> np.ndarray:
    return np.arange(width)[None, :] < lengths[:, None]


def left_padded(width: int, lengths: np.ndarray) -> np.ndarray:
    return np.arange(width)[None, :] >= width - lengths[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSample:
    name: str
    group: str | None
    policy_version: int | None
    advantage: float
    rewards: Mapping[str, float]
    """Rewards by reward function, plus their weighted sum as `reward`. May be empty."""
    ids: np.ndarray
    """[tokens] int32 ids of the prompt and response tokens."""
    mask: np.ndarray
    """[tokens] uint8, 1 for tokens in the loss."""

    @property
    def first(self) -> int:
        """Index of the first token in the loss, where the response starts."""
        counted = self.counted
        return int(counted[0]) if len(counted) else len(self.ids)

    @property
    def counted(self) -> np.ndarray:
        """Indices of the tokens in the loss. Token 0 is never included, because no earlier token predicts it."""
        return np.flatnonzero(self.mask[1:]) + 1


@dataclass(frozen=True)
class PackedRow:
    """Samples packed into one row, in the order in which the loss processes them.

    Shapes: S samples, T tokens in the longest response, M loss terms.
    """

    samples: Sequence[PackedSample]

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.array([len(sample.ids) - sample.first for sample in self.samples], np.int64)

    @cached_property
    def terms(self) -> tuple[np.ndarray, np.ndarray]:
        """For each loss term, the index of its sample and its position in the sample's response, both [M]."""
        counted = [sample.counted - sample.first for sample in self.samples]
        owners = np.repeat(np.arange(len(counted)), [len(places) for places in counted])
        return owners, np.concatenate([*counted, np.empty(0, np.int64)])

    @cached_property
    def scored(self) -> np.ndarray:
        scored = np.zeros((len(self.samples), int(self.lengths.max(initial=0))), bool)
        scored[self.terms] = True
        return scored


def to_bytes(rows: Sequence[Sequence[PackedSample]]) -> Any:
    import torch

    encoded = [np.frombuffer(pickle.dumps(list(samples)), np.uint8) for samples in rows]
    width = max(map(len, encoded))
    return torch.from_numpy(np.stack([np.pad(row, (0, width - len(row))) for row in encoded]))


def of_bytes(row: Any) -> PackedRow:
    return PackedRow(pickle.loads(row.cpu().numpy().tobytes()))
