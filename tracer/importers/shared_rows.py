"""Match the sequences of several files by prompt, so that each file becomes a pass over the same tokens.

Two engines may continue a prompt differently. Their values are comparable up to the first token at which they diverge.
Each distinct response becomes a row. A token's value is stored in the first row that has the same tokens up to and
including this token. In all other rows, the pass has NULL at this position. So each token that two passes have in
common is compared exactly once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import PurePath
from typing import Any

import numpy as np
import pyarrow as pa

from ...schemas.errors import ImportFailed
from ...schemas.passes import LOGPROBS, REPLAY_PREFIX, ROLLOUT, STANDARD
from ...schemas.tables import GIVEN
from .columns import ROWS_AT_ONCE, Columns, RowBatch
from .dump_rows import DumpRows
from .fields import Values
from .kinds import INT32_MAX, TEXT, VALUES, integer, list_of, required
from .row_import import KINDS, OF_TOKENS, POLICY_VERSION

PROMPT_LOGPROBS = "prompt_logprobs"
"""Column with the engine's logprobs of the prompt tokens. The first prompt token has none."""
UNKNOWN = -1
"""Id used for response tokens whose id was not recorded."""
TOKENS = list_of(required(integer("a token id", pa.int32(), UNKNOWN, INT32_MAX)), "a list of token ids")
PROMPT = "prompt"
"""Column with a name for a prompt whose token ids are unknown."""
MOST_REPEATS = 1024
CELLS = tuple(
    name for name, column in GIVEN.items() if not pa.types.is_list(column.type) and name not in ("seq_id", "group_id")
)
"""Columns with one value per row that are copied from a response. seq_id and group_id are set during matching."""
MASK = "response_mask"
OF_RESPONSES = (MASK, "advantages")
PER_TOKEN = (*OF_TOKENS, *OF_RESPONSES)
MATCHED = ("prompt_ids", "response_ids", f"{ROLLOUT}{LOGPROBS}")
VERSION = f"{ROLLOUT}{POLICY_VERSION}"
"""Column with the policy version of a path's pass."""
MAPPED = (*CELLS, *PER_TOKEN, VERSION)


@dataclass(frozen=True, slots=True)
class _Response:
    pass_name: str
    ids: np.ndarray
    tokens: Mapping[str, Values]
    """Logprobs and the columns in PER_TOKEN."""
    prompt_logprobs: Values | None
    cells: Mapping[str, Any]
    version: int | None


@dataclass(slots=True)
class _Prompt:
    label: str
    ids: np.ndarray | None
    passes: dict[str, dict[bytes, list[_Response]]] = field(default_factory=dict)
    """For each pass, maps the token ids (as bytes) of each distinct response to its repetitions."""


class SharedRows:
    """Matches sequences from several passes by step and prompt.

    If a file repeats a prompt, the prompt's n-th distinct response is matched with the n-th distinct response in the
    other files. If the file repeats the response too, the first repetition becomes a pass of its own, named `<pass>.1`.
    """

    def __init__(self) -> None:
        self.repeated: dict[str, str] = {}
        """Pass that each repetition belongs to."""
        self._prompts: dict[tuple[int | None, Any], _Prompt] = {}

    def add(self, batch: RowBatch, pass_name: str) -> None:
        """Add the rows of one pass. Raises ImportFailed for a row without a prompt or without one value per token."""
        kinds = {**KINDS, "response_ids": TOKENS, PROMPT_LOGPROBS: VALUES, PROMPT: TEXT}
        columns = {name: values for name, values in batch.columns.items() if name in kinds}
        rows = Columns.of(replace(batch, columns=columns), {name: name for name in columns}, kinds)
        prompts, responses, logprobs, before = (_lists(rows, name) for name in (*MATCHED, PROMPT_LOGPROBS))
        texts = rows.list(PROMPT) or [None] * rows.num_rows
        versions = rows.list(VERSION) or [None] * rows.num_rows
        cells = {name: values for name in CELLS if (values := rows.list(name)) is not None}
        of_tokens = {name: _lists(rows, name) for name in PER_TOKEN} | {"logprobs": logprobs}
        for row, (prompt, ids, scored) in enumerate(zip(prompts, responses, logprobs, strict=True)):
            where = f"{batch.file}, {batch.place(row)}"
            if prompt is None and texts[row] is None:
                raise ImportFailed(
                    f"{where} has no prompt token ids, which are needed to match sequences across several paths"
                )
            if ids is None or scored is None:
                continue
            tokens = {name: found for name, column in of_tokens.items() if (found := column[row]) is not None}
            for name, found in tokens.items():
                if len(found) != len(ids):
                    raise ImportFailed(f"{where}: {name} needs one value per token ({len(ids)}), got {len(found)}")
            own = {name: column[row] for name, column in cells.items()}
            if own.get("rewards") is not None:
                own["rewards"] = dict(own["rewards"])  # Arrow returns maps as pairs
            given = before[row] if prompt is not None and len(before[row] or ()) == len(prompt) else None
            self._add(texts[row], prompt, _Response(pass_name, ids.values, tokens, given, own, versions[row]))

    def _add(self, text: str | None, prompt: Values | None, found: _Response) -> None:
        key = (found.cells.get("step"), text if prompt is None else prompt.values.tobytes())
        label = text if prompt is None and text is not None else str(len(self._prompts))
        of = self._prompts.setdefault(key, _Prompt(label, None if prompt is None else prompt.values))
        same = of.passes.setdefault(found.pass_name, {}).setdefault(found.ids.tobytes(), [])
        if len(same) > MOST_REPEATS:
            raise ImportFailed(f"{found.pass_name} repeats a prompt and response more than {MOST_REPEATS:,} times")
        if same:
            name = f"{found.pass_name}.{len(same)}"
            self.repeated[name], found = found.pass_name, replace(found, pass_name=name)
        same.append(found)

    def batches(self, file: str) -> Iterator[RowBatch]:
        """Yield the matched rows, with one column of logprobs per pass."""
        rows, number = DumpRows(file, "sequence"), 0
        for _, prompt in sorted(self._prompts.items(), key=lambda entry: entry[0][0] or 0):
            ordered = (responses.values() for responses in prompt.passes.values())
            for place, matched in enumerate(zip_longest(*ordered, fillvalue=())):
                for variant, cells in enumerate(_rows(prompt.ids, [*chain(*matched)])):
                    number += 1
                    group = f"{prompt.label}.{place}"
                    rows.add(number, **cells, seq_id=f"{group}.{variant}", group_id=group)
                    if len(rows) >= ROWS_AT_ONCE:
                        yield rows.batch()
                        rows = DumpRows(file, "sequence")
        if len(rows):
            yield rows.batch()


def _lists(rows: Columns, name: str) -> list[Values | None]:
    if (ragged := rows.ragged(name)) is None:
        return [None] * rows.num_rows
    known, ends = ragged.known, np.cumsum(ragged.lengths)
    parts = [slice(end - length, end) for end, length in zip(ends, ragged.lengths, strict=True)]
    return [
        Values(ragged.values[part], known[part]) if has else None
        for part, has in zip(parts, rows.has(name), strict=True)
    ]


def _rows(prompt: np.ndarray | None, responses: Sequence[_Response]) -> Iterator[dict[str, Any]]:
    """Yield one row per distinct response, the most frequent response first.

    If any pass scored the prompt, all prompt tokens but the first become response tokens.
    """
    before = np.empty(0, np.int32)
    if prompt is not None and any(found.prompt_logprobs is not None for found in responses):
        prompt, before = prompt[:1], prompt[1:]
    variants: dict[bytes, list[_Response]] = {}
    for found in responses:
        variants.setdefault(found.ids.tobytes(), []).append(found)
    ordered = sorted(variants.values(), key=lambda same: -len(same))
    ids = [np.concatenate([before, same[0].ids]).astype(np.int32) for same in ordered]
    columns: list[dict[str, Any]] = [{} for _ in ordered]
    for place, same in enumerate(ordered):
        done = 0
        for row in range(place + 1):
            until = _num_common(ids[row], ids[place])
            for found in same if until > done else ():
                for name in found.tokens.keys() - {*OF_RESPONSES}:
                    values, known = np.zeros((2, len(ids[row])))
                    prompted = found.prompt_logprobs if name == "logprobs" else None
                    whole = _whole(prompted, found.tokens[name], len(before))
                    values[done:until], known[done:until] = whole.values[done:until], whole.known[done:until]
                    columns[row][f"{found.pass_name}_{name}"] = Values(values, known.astype(bool))
                if found.version is not None:
                    columns[row][f"{found.pass_name}{POLICY_VERSION}"] = found.version
            done = max(done, until)
    for place, same in enumerate(ordered):
        if not columns[place]:  # a longer response begins with this one, and its row has the values
            continue
        cells: dict[str, Any] = {
            name: _whole(None, same[0].tokens[name], len(before)) for name in OF_RESPONSES if name in same[0].tokens
        }
        if MASK in cells:  # tokens of the prompt are not part of the loss
            cells[MASK] = cells[MASK].values.astype(bool)
        yield {**same[0].cells, **cells, "prompt_ids": prompt, "response_ids": ids[place], **columns[place]}


def _whole(prompted: Values | None, own: Values, num_before: int) -> Values:
    prompted = prompted or Values(np.zeros(num_before + 1), np.zeros(num_before + 1, bool))
    return Values(*(np.concatenate([a[1:], b]) for a, b in zip(prompted, own, strict=True)))


def _num_common(a: np.ndarray, b: np.ndarray) -> int:
    num = min(len(a), len(b))
    differs = np.flatnonzero(a[:num] != b[:num])
    return int(differs[0]) if len(differs) else num


def pass_names(paths: Sequence[str]) -> list[str]:
    """Return a distinct pass name per path: the file name without suffix, plus parent folders where needed.

    >>> pass_names(["a/tp1.json", "b/tp1.json", "b/tp2.json"])
    ['a/tp1', 'b/tp1', 'tp2']
    """
    parts = [PurePath(path).parts for path in paths]
    names = [_clean(re.sub(r"\.jsonl?$", "", path[-1] if path else "")) for path in parts]
    for num in range(2, max(map(len, parts), default=0) + 1):
        times = Counter(names)
        names = [
            f"{_clean(path[-num])}/{name}" if times[name] > 1 and len(path) >= num else name
            for name, path in zip(names, parts, strict=True)
        ]
    taken, found = {*STANDARD, REPLAY_PREFIX.rstrip("/")}, Counter[str]()
    for place, name in enumerate(names):
        found[name] += 1
        names[place] = f"{ROLLOUT}/{name}" if name.partition("/")[0] in taken else name
        names[place] += f".{found[name]}" if found[name] > 1 else ""
    return names


_SIZES = {"tp": "tensor", "pp": "pipeline", "dp": "data", "ep": "expert", "etp": "expert_tensor"}
_SETTINGS = {
    "cuda_?graphs?": ("compilation_config", "cudagraph_mode", "on"),
    "prefix_caching": ("cache_config", "enable_prefix_caching", True),
    "chunked_prefill": ("scheduler_config", "enable_chunked_prefill", True),
    "async_sched": ("scheduler_config", "async_scheduling", True),
    "fp8": ("model_config", "quantization", "fp8"),
}
"""Patterns for words in file names, and the vLLM settings they stand for."""
_MODES = ("static", "dynamic", "offline")
NOT_SETTINGS = ("inference", "logitsmatch", "tokensmatch")
"""Words to ignore in file names, because they describe the test instead of the engine."""
MODEL_SIZE = re.compile(r"\d+(?:\.\d+)?[mb]", re.IGNORECASE)


def named_settings(name: str) -> dict[str, Any]:
    """Parse the settings in a file name into contract fields. An unknown word becomes a field with the value True.

    >>> named_settings("tp8_chunked_prefill_zmq")["config"]["parallel_config"]
    {'tensor_parallel_size': 8}
    """
    name = re.sub(r"[^A-Za-z0-9]+", "_", name)
    config: dict[str, dict[str, Any]] = {}
    words: dict[str, Any] = {}
    for pattern, (section, key, value) in _SETTINGS.items():
        name, num = re.subn(rf"(?:^|_){pattern}(?=_|$)", "_", name)
        if num:
            config.setdefault(section, {})[key] = value
    for word in filter(None, name.split("_")):
        size = re.fullmatch(r"([a-z]+)(\d{1,9})", word)
        if size and size[1] in _SIZES:
            config.setdefault("parallel_config", {})[f"{_SIZES[size[1]]}_parallel_size"] = int(size[2])
        elif word in _MODES:
            words["mode"] = word
        elif word not in NOT_SETTINGS and not MODEL_SIZE.fullmatch(word):
            words[word] = True
    return {**words, "config": config}


def _clean(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+=-]+", "-", name).lstrip("_.+=-") or "pass"
