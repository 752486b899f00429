"""vLLM: saved responses of its OpenAI-compatible server."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from .dump import Format, Reading
from .fields import Fields
from .responses import SETTINGS, holds, read_responses, response_parts
from .rowbatch import RowBatch

_TOKEN = re.compile(r"token_id:(\d{1,10})")

COLUMNS = {
    "prompt_ids": ("prompt_token_ids",),
    "response_ids": ("token_ids",),
    "rollout_logprobs": ("token_logprobs",),
    "finish_reason": ("finish_reason",),
    **SETTINGS,
}


def _rows(fields: Fields, response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    choices = response.get("choices")
    if not isinstance(choices, list):
        raise ImportFailed(f"{fields.where}: has no choices")
    for place, choice in enumerate(choices):
        where = f"{fields.where}, choice {place}"
        if not isinstance(choice, Mapping):
            raise ImportFailed(f"{where}: is no object")
        logprobs = choice.get("logprobs")
        tokens, values = _tokens(logprobs if isinstance(logprobs, Mapping) else {})
        own = fields.of({**choice, "token_logprobs": values}, where)
        ids = own.ids("response_ids")
        if ids is None:
            ids = _ids(tokens, where)
        scores = own.values("rollout_logprobs")
        if scores is not None and len(scores) != len(ids):
            raise ImportFailed(f"{where}: has {len(scores)} logprobs for {len(ids)} tokens")
        prompt = own.ids("prompt_ids")
        yield {
            "prompt_ids": fields.ids("prompt_ids") if prompt is None else prompt,
            "response_ids": ids,
            "rollout_logprobs": scores,
            "finish_reason": own.text("finish_reason"),
        }


def _tokens(logprobs: Mapping[str, Any]) -> tuple[list[Any], list[Any] | None]:
    """Tokens and logprobs of a choice: of a completion, or of a chat."""
    content = logprobs.get("content")
    if isinstance(content, list):
        entries = [entry if isinstance(entry, Mapping) else {} for entry in content]
        return [entry.get("token") for entry in entries], [entry.get("logprob") for entry in entries]
    tokens, values = logprobs.get("tokens"), logprobs.get("token_logprobs")
    return tokens if isinstance(tokens, list) else [], values if isinstance(values, list) else None


def _ids(tokens: list[Any], where: str) -> np.ndarray:
    found = [_TOKEN.fullmatch(token) if isinstance(token, str) else None for token in tokens]
    numbers = [int(match[1]) for match in found if match is not None]
    if len(numbers) != len(tokens) or not tokens or max(numbers) >= 2**31:
        raise ImportFailed(
            f"{where}: has no token ids; ask vLLM with return_token_ids=true (or return_tokens_as_token_ids=true) and logprobs"
        )
    return np.array(numbers, np.int32)


def _read(reading: Reading) -> Iterator[RowBatch]:
    yield from read_responses(reading, _rows)


VLLM = Format(
    name="vllm",
    writes="your client: responses of `/v1/completions` or `/v1/chat/completions`, asked with logprobs and return_token_ids=true",
    files="*.jsonl or *.json",
    columns=COLUMNS,
    alignment="logprobs belong to token_ids of the choice, or to tokens written as token_id:<id>",
    recognises=lambda folder: holds(folder, "choices"),
    parts=response_parts,
    read=_read,
    lacks={
        "rollout": "the responses hold no logprobs; ask with logprobs=1 (chat: logprobs=true)",
        "train": "responses are the engine's side alone; write the trainer's logprobs of the same tokens beside "
        "them, and import that with `tim-trace import parquet`",
    },
    lines=True,
)
