"""Import format of vLLM: saved responses from its OpenAI-compatible server."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from .fields import Fields
from .responses import response_format

_TOKEN = re.compile(r"token_id:(\d{1,10})")


def _rows(fields: Fields, response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    choices = response.get("choices")
    if not isinstance(choices, list):
        raise ImportFailed(f"{fields.where}: has no choices")
    for place, choice in enumerate(choices):
        where = f"{fields.where}, choice {place}"
        if not isinstance(choice, Mapping):
            raise ImportFailed(f"{where}: is not an object")
        logprobs = choice.get("logprobs")
        tokens, values = _tokens(logprobs if isinstance(logprobs, Mapping) else {})
        own = fields.of({**choice, "token_logprobs": values}, where)
        cells = own.cells("prompt_ids", "response_ids", "rollout_logprobs", "finish_reason")
        if cells["response_ids"] is None:
            cells["response_ids"] = _ids(tokens, where)
        if cells["prompt_ids"] is None:
            cells["prompt_ids"] = fields.ids("prompt_ids")
        yield cells


def _tokens(logprobs: Mapping[str, Any]) -> tuple[list[Any], list[Any] | None]:
    """Return the tokens and logprobs from a choice in a completion response or a chat response."""
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
            f"{where}: has no token ids; request them from vLLM with return_token_ids=true (or "
            f"return_tokens_as_token_ids=true) and logprobs"
        )
    return np.array(numbers, np.int32)


VLLM = response_format(
    "choices",
    _rows,
    {
        "prompt_ids": ("prompt_token_ids",),
        "response_ids": ("token_ids",),
        "rollout_logprobs": ("token_logprobs",),
        "finish_reason": ("finish_reason",),
    },
    name="vllm",
    writes="your client: responses of `/v1/completions` or `/v1/chat/completions`, requested with logprobs and return_token_ids=true",
    alignment="logprobs belong to the choice's token_ids, or to tokens written as token_id:<id>",
    rollout="the responses hold no logprobs; request them with logprobs=1 (chat: logprobs=true)",
)
