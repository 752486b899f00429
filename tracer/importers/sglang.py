"""Import format of SGLang: saved responses from /generate with logprobs in meta_info."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...schemas.errors import ImportFailed
from ...schemas.passes import LOGPROBS
from .fields import Fields, Values
from .responses import response_format

_SAMPLED = f"rollout/sampling{LOGPROBS}"
"""Column of logprobs under the sampling distribution, after temperature and truncation."""


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
            raise ImportFailed(f"{fields.where}: output_ids differ from the tokens of output_token_logprobs")
        ids = given
    if ids is None:
        raise ImportFailed(f"{fields.where}: has no token ids; request them from SGLang with return_logprob=true")
    prompt = fields.ids("prompt_ids")
    before = _triples(own, "prompt") if prompt is None else None
    reason = meta.get("finish_reason")
    version = own.text("policy_version")
    yield {
        "prompt_ids": prompt if before is None else before[1],
        "response_ids": ids,
        "rollout_logprobs": values,
        _SAMPLED: _sampling(own),
        "policy_version": int(version) if version is not None and version.isdigit() and len(version) < 19 else None,
        "finish_reason": fields.of(reason, fields.where).text("finish_reason") if isinstance(reason, Mapping) else None,
    }


def _triples(fields: Fields, column: str) -> tuple[Values, np.ndarray] | None:
    found = fields.get(column)
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(entry, list) and len(entry) >= 2 for entry in found):
        raise ImportFailed(f"{fields.where}: {column} is not a list of (logprob, token id, text)")
    pair = fields.of(
        {"v": [entry[0] for entry in found], "i": [entry[1] for entry in found]}, fields.where, v="v", i="i"
    )
    values, ids = pair.values("v"), pair.ids("i")
    assert values is not None
    assert ids is not None
    return values, ids


def _sampling(fields: Fields) -> Values | None:
    found = fields.get(_SAMPLED)
    triples = _triples(fields, _SAMPLED) if isinstance(found, list) and found and isinstance(found[0], list) else None
    return triples[0] if triples else fields.values(_SAMPLED)


SGLANG = response_format(
    "meta_info",
    _rows,
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
    writes="your client: responses of `/generate`, requested with return_logprob=true",
    alignment="output_token_logprobs are (logprob, id, text) for each output token; output_token_sampling_logprobs "
    "become the pass "
    "rollout/sampling, and rollout minus rollout/sampling is the log of the mass that truncation kept",
    rollout="the responses hold no logprobs; request them with return_logprob=true",
)
