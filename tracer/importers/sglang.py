"""SGLang: saved responses of /generate, whose meta_info holds logprobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from .dump import Format, Reading
from .fields import Fields, Values
from .responses import SETTINGS, holds, read_responses, response_parts
from .row_import import LOGPROBS
from .rowbatch import RowBatch

SAMPLING = "rollout/sampling"
"""Pass of the logprobs that the token was drawn with: after temperature and truncation."""

COLUMNS = {
    "prompt_ids": ("prompt_ids", "input_ids"),
    "response_ids": ("output_ids",),
    "rollout_logprobs": ("output_token_logprobs",),
    f"{SAMPLING}{LOGPROBS}": ("output_token_sampling_logprobs",),
    "prompt": ("input_token_logprobs",),
    "policy_version": ("weight_version",),
    "finish_reason": ("type",),
    **SETTINGS,
}


def _rows(fields: Fields, response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    meta = response.get("meta_info")
    if not isinstance(meta, Mapping):
        raise ImportFailed(f"{fields.where}: has no meta_info")
    own = fields.of(meta, fields.where)
    entries = _triples(own, "rollout_logprobs")
    ids, values = fields.ids("response_ids"), None
    if entries is not None:
        values, given = entries
        if ids is not None and not np.array_equal(ids, given):
            raise ImportFailed(f"{fields.where}: output_ids are other tokens than those of output_token_logprobs")
        ids = given
    if ids is None:
        raise ImportFailed(f"{fields.where}: has no token ids; ask SGLang with return_logprob=true")
    prompt = fields.ids("prompt_ids")
    before = _triples(own, "prompt") if prompt is None else None
    reason = meta.get("finish_reason")
    version = own.text("policy_version")
    sampling = own.get(f"{SAMPLING}{LOGPROBS}")
    yield {
        "prompt_ids": prompt if before is None else before[1],
        "response_ids": ids,
        "rollout_logprobs": values,
        f"{SAMPLING}{LOGPROBS}": None if sampling is None else _sampling(own, len(ids)),
        "policy_version": int(version) if version is not None and version.isdigit() and len(version) < 19 else None,
        "finish_reason": fields.of(reason, fields.where).text("finish_reason") if isinstance(reason, Mapping) else None,
    }


def _triples(fields: Fields, column: str) -> tuple[Values, np.ndarray] | None:
    """Logprobs and token ids of a list of (logprob, id, text)."""
    found = fields.get(column)
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(entry, list) and len(entry) >= 2 for entry in found):
        raise ImportFailed(f"{fields.where}: {column} is no list of (logprob, token id, text)")
    pair = fields.of(
        {"v": [entry[0] for entry in found], "i": [entry[1] for entry in found]}, fields.where, v="v", i="i"
    )
    values, ids = pair.values("v"), pair.ids("i")
    assert values is not None
    assert ids is not None
    return values, ids


def _sampling(fields: Fields, length: int) -> Values:
    column = f"{SAMPLING}{LOGPROBS}"
    found = fields.get(column)
    triples = isinstance(found, list) and found and isinstance(found[0], list)
    values = (_triples(fields, column) or (None, None))[0] if triples else fields.values(column)
    if values is None or len(values) != length:
        raise ImportFailed(
            f"{fields.where}: has {0 if values is None else len(values)} sampling logprobs for {length} tokens"
        )
    return values


def _read(reading: Reading) -> Iterator[RowBatch]:
    yield from read_responses(reading, _rows)


SGLANG = Format(
    name="sglang",
    writes="your client: responses of `/generate`, asked with return_logprob=true",
    files="*.jsonl or *.json",
    columns=COLUMNS,
    alignment="output_token_logprobs are (logprob, id, text) of each output token; output_token_sampling_logprobs become the pass "
    "rollout/sampling, and rollout less rollout/sampling is the log of the mass that truncation kept",
    recognises=lambda folder: holds(folder, "meta_info"),
    parts=response_parts,
    read=_read,
    lacks={
        "rollout": "the responses hold no logprobs; ask with return_logprob=true",
        "train": "responses are the engine's side alone; write the trainer's logprobs of the same tokens beside "
        "them, and import that with `tim-trace import parquet`",
    },
    lines=True,
)
