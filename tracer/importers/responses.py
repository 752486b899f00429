"""Import responses saved from vLLM, SGLang or NeMo-Gym, as JSON Lines or a JSON array.

Responses contain only the engine's logprobs. NeMo-Gym's fields are defined in nemo_gym/openai_utils.py
(NVIDIA-NeMo/Gym, 07d6b0d0).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from ...schemas.passes import LOGPROBS
from .fields import Fields, Values
from .format import DumpFolder, Format, first_object, read_rows
from .shared_rows import PROMPT_LOGPROBS
from .textfiles import TIMES_AS_JSON, parsed, read_lines, whole_content

_FILE = r"[^/]+\.(?:jsonl|json)"
STEP = 0
"""Step for responses that were sampled outside training and therefore have no step."""

SETTINGS = {"temperature": ("temperature",), "top_p": ("top_p",), "top_k": ("top_k",), "step": ("step",)}


def _holds(folder: DumpFolder, key: str) -> bool:
    if (name := folder.first(_FILE)) is None:
        return False
    try:
        first = next(objects(folder.path(name)), (0, {}))[1]
    except ImportFailed:
        first = first_object(folder, name)
    return isinstance(response_of(first)[0].get(key), (list, Mapping))


def objects(path: Path, first: int = 1) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open("rb") as file:
        begins = file.read(64).lstrip()[:1]
    if path.suffix != ".json" or begins not in (b"[", b"{"):
        yield from read_lines(path, first)
        return
    found = parsed(
        whole_content(path, TIMES_AS_JSON), str(path), "a .json file must contain one response or an array of responses"
    )
    for number, item in enumerate(found if isinstance(found, list) else [found], start=1):
        if not isinstance(item, Mapping):
            raise ImportFailed(f"{path}: response {number} is not an object")
        yield number, item


def response_of(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return a saved object's response and request. If either is missing, the object itself is used instead."""
    inside, request = record.get("response"), record.get("request", record.get("responses_create_params"))
    response = inside if isinstance(inside, Mapping) else record
    if isinstance(response.get("body"), Mapping):
        response = response["body"]
    return response, request if isinstance(request, Mapping) else record


def response_format(
    key: str, rows_of: Callable[[Fields, Mapping[str, Any]], Iterable[dict[str, Any]]], columns: Mapping[str, tuple[str, ...]],
    rollout: str, **told: Any,
) -> Format:  # fmt: skip
    """Return the format for servers whose responses contain `key`. `rollout` is the note for files without logprobs."""

    def rows(fields: Fields, name: str, number: int) -> Iterator[dict[str, Any]]:
        response, request = response_of(fields.record)
        settings = fields.of(request, fields.where).cells(*SETTINGS)
        settings["step"] = STEP if settings["step"] is None else settings["step"]
        settings |= fields.cells("reward") if "reward" in columns else {}
        group = fields.text("group_id")
        for place, cells in enumerate(rows_of(fields.of(response, fields.where), response)):
            names = {"seq_id": f"{name}.{place}", "group_id": name if group is None else group}
            yield {**settings, **names, **cells, **fields.added_cells({*settings, *cells})}

    return Format(
        files="*.jsonl or *.json",
        columns={**columns, **SETTINGS},
        pattern=_FILE,
        recognises=lambda folder: _holds(folder, key),
        read=lambda reading: read_rows(reading, rows, records=objects, unit="response"),
        lines=True,
        lacks={
            "rollout": rollout,
            "train": "responses have only the engine's logprobs. Write them to Parquet with the trainer's logprobs "
            "for the same tokens, and import the result with `tim-trace import parquet`",
        },
        **told,
    )


_SAMPLED = f"rollout/sampling{LOGPROBS}"
"""Column with logprobs under the sampling distribution, after temperature and truncation."""


def _sglang_rows(fields: Fields, response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    meta = response.get("meta_info")
    if not isinstance(meta, Mapping):
        raise ImportFailed(f"{fields.where} has no meta_info")
    own = fields.of(meta, fields.where)
    values, scored = _triples(own, "rollout_logprobs")
    ids = fields.ids("response_ids")
    if ids is not None and scored is not None and not np.array_equal(ids, scored):
        raise ImportFailed(f"{fields.where}: output_ids differ from the tokens in output_token_logprobs")
    ids = ids if scored is None else scored
    if ids is None:
        raise ImportFailed(f"{fields.where} has no token ids. Request them from SGLang with return_logprob=true")
    prompt = fields.ids("prompt_ids")
    before, of_prompt = _triples(own, "prompt")
    prompt = of_prompt if prompt is None else prompt
    reason = meta.get("finish_reason")
    version = own.text("policy_version")
    yield {
        "prompt_ids": prompt,
        PROMPT_LOGPROBS: before
        if prompt is not None and of_prompt is not None and np.array_equal(of_prompt, prompt)
        else None,
        "response_ids": ids,
        "rollout_logprobs": values,
        _SAMPLED: _sampling(own),
        "policy_version": int(version) if version is not None and version.isdigit() and len(version) < 19 else None,
        "finish_reason": fields.of(reason, fields.where).text("finish_reason") if isinstance(reason, Mapping) else None,
    }


def _triples(fields: Fields, column: str) -> tuple[Values | None, np.ndarray | None]:
    """Return the logprobs and token ids of a list of (logprob, token id, text) entries, or None if it is missing."""
    if (found := fields.get(column)) is None:
        return None, None
    if not isinstance(found, list) or not all(isinstance(entry, list) and len(entry) >= 2 for entry in found):
        raise ImportFailed(f"{fields.where}: {column} is not a list of (logprob, token id, text) entries")
    pair = {"v": [entry[0] for entry in found], "i": [entry[1] for entry in found]}
    own = fields.of(pair, fields.where, v="v", i="i")
    return own.values("v"), own.ids("i")


def _sampling(fields: Fields) -> Values | None:
    found = fields.get(_SAMPLED)
    is_triples = isinstance(found, list) and found and isinstance(found[0], list)
    return _triples(fields, _SAMPLED)[0] if is_triples else fields.values(_SAMPLED)


SGLANG = response_format(
    "meta_info",
    _sglang_rows,
    {
        "prompt_ids": ("prompt_ids", "input_ids"),
        "response_ids": ("output_ids",),
        "rollout_logprobs": ("output_token_logprobs",),
        _SAMPLED: ("output_token_sampling_logprobs",),
        "prompt": ("input_token_logprobs",),
        "policy_version": ("weight_version",),
        "finish_reason": ("type",),
    },
    name="sglang",
    writes="a client that saves `/generate` responses with return_logprob=true",
    alignment="output_token_logprobs has one (logprob, id, text) per output token. output_token_sampling_logprobs "
    "become the pass rollout/sampling, and rollout minus rollout/sampling is the log mass kept by truncation",
    rollout="the responses have no logprobs. Request them with return_logprob=true",
)


_TOKEN = re.compile(r"token_id:(\d{1,10})")


def _vllm_rows(fields: Fields, response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    choices = response.get("choices")
    if not isinstance(choices, list):
        raise ImportFailed(f"{fields.where} has no choices")
    for place, choice in enumerate(choices):
        where = f"{fields.where}, choice {place}"
        if not isinstance(choice, Mapping):
            raise ImportFailed(f"{where} is not an object")
        logprobs = choice.get("logprobs")
        tokens, values = _tokens(logprobs if isinstance(logprobs, Mapping) else {})
        own = fields.of({**choice, "token_logprobs": values}, where)
        cells = own.cells("prompt_ids", "response_ids", "rollout_logprobs", "finish_reason")
        if cells["response_ids"] is None:
            cells["response_ids"] = _ids(tokens, where)
        if cells["prompt_ids"] is None:
            cells["prompt_ids"] = fields.ids("prompt_ids")
        before = choice.get(PROMPT_LOGPROBS, response.get(PROMPT_LOGPROBS))
        if isinstance(before, list) and cells["prompt_ids"] is not None and len(before) == len(cells["prompt_ids"]):
            given = [_of_token(entry, token) for entry, token in zip(before, cells["prompt_ids"], strict=True)]
            cells[PROMPT_LOGPROBS] = fields.of({"v": given}, where, v="v").values("v")
        yield cells


def _of_token(entry: Any, token: int) -> Any:
    """Return a prompt token's logprob from vLLM's entry {token id: {logprob, rank, decoded_token}}, or None."""
    found = entry.get(str(token)) if isinstance(entry, Mapping) else None
    return found.get("logprob") if isinstance(found, Mapping) else None


def _tokens(logprobs: Mapping[str, Any]) -> tuple[list[Any], list[Any] | None]:
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
            f"{where} has no token ids. Request them from vLLM with return_token_ids=true (or "
            f"return_tokens_as_token_ids=true) and logprobs"
        )
    return np.array(numbers, np.int32)


VLLM = response_format(
    "choices",
    _vllm_rows,
    {
        "prompt_ids": ("prompt_token_ids",),
        "response_ids": ("token_ids",),
        "rollout_logprobs": ("token_logprobs",),
        "finish_reason": ("finish_reason",),
    },
    name="vllm",
    writes="a client that saves `/v1/completions` or `/v1/chat/completions` responses with logprobs and "
    "return_token_ids=true",
    alignment="logprobs are aligned with the choice's token_ids, or with tokens written as token_id:<id>",
    rollout="the responses have no logprobs. Request them with logprobs=1 (chat: logprobs=true)",
)


def _nemo_gym_rows(fields: Fields, response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    output = response.get("output")
    if not isinstance(output, list):
        raise ImportFailed(f"{fields.where} has no output items")
    turns = [item for item in output if isinstance(item, Mapping) and item.get("generation_token_ids") is not None]
    if not turns:
        raise ImportFailed(
            f"{fields.where}: no output item has generation_token_ids. Collect the rollouts with a model server that "
            "returns token ids"
        )
    for place, turn in enumerate(turns):
        yield fields.of(turn, f"{fields.where}, turn {place}").cells("prompt_ids", "response_ids", "rollout_logprobs")


NEMO_GYM = response_format(
    "output",
    _nemo_gym_rows,
    {
        "prompt_ids": ("prompt_token_ids",),
        "response_ids": ("generation_token_ids",),
        "rollout_logprobs": ("generation_log_probs",),
        "reward": ("reward",),
        "group_id": ("_ng_task_index",),
    },
    name="nemo-gym",
    writes="NeMo-Gym's rollout collection, with a model server that returns token ids",
    alignment="values in generation_log_probs belong to generation_token_ids. Each turn becomes one row, and its prompt contains the "
    "earlier turns. All turns of a rollout share its reward",
    rollout="the turns have no generation_log_probs",
)
