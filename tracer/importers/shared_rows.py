"""Match the sequences of several files by prompt, so that each file becomes a pass over the same tokens.

Two engines may continue a prompt differently. Their values are comparable up to the first token at which they diverge.
Each distinct response is a row, and a value is stored in the first row that has the same tokens up to and including its
own. All others are NULL. So two passes share exactly their common tokens, each of them once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import pyarrow as pa

from ...schemas.errors import ImportFailed
from ...schemas.passes import LOGPROBS, REPLAY_PREFIX, ROLLOUT, STANDARD
from .columns import ROWS_AT_ONCE, Columns, RowBatch
from .dump_rows import DumpRows
from .fields import Values
from .kinds import INT32_MAX, VALUES, integer, list_of, required
from .row_import import KINDS

PROMPT_LOGPROBS = "prompt_logprobs"
"""Column with the engine's logprobs of the prompt tokens. The first has none."""
UNKNOWN = -1
"""Id of a response token whose id was not recorded."""
TOKENS = list_of(required(integer("a token id", pa.int32(), UNKNOWN, INT32_MAX)), "a list of token ids")
MOST_PASSES = 1024
_CELLS = ("step", "temperature", "top_p", "top_k", "reward", "finish_reason", "policy_version")


@dataclass(frozen=True, slots=True)
class _Response:
    pass_name: str
    ids: np.ndarray
    logprobs: Values
    prompt_logprobs: Values | None
    cells: Mapping[str, Any]


class SharedRows:
    """Sequences of several passes by step and prompt.

    If one file repeats a prompt, its n-th response is matched with the n-th response in the other files. If it also
    repeats the response, the repetition becomes a pass of its own, named `<pass>.1`.
    """

    def __init__(self) -> None:
        self.repeated: dict[str, str] = {}
        """Pass that each repetition belongs to."""
        self._prompts: dict[tuple[int, Any], tuple[str, np.ndarray | None, list[list[_Response]]]] = {}
        self._places: dict[tuple[str, int, Any, bytes], tuple[int, int]] = {}
        self._numbers: dict[tuple[str, int, Any], int] = {}

    def add(self, batch: RowBatch, pass_name: str) -> None:
        """Add the rows of one pass. Raises ImportFailed if a row cannot be matched or has values for other tokens."""
        names = {name: name for name in batch.columns if name in KINDS or name == PROMPT_LOGPROBS}
        rows = Columns.of(
            RowBatch(file=batch.file, columns={name: batch.columns[name] for name in names}, numbers=batch.numbers, unit=batch.unit),
            names, {**KINDS, "response_ids": TOKENS, PROMPT_LOGPROBS: VALUES},
        )  # fmt: skip
        prompts, responses, logprobs, before = (
            _lists(rows, name) for name in ("prompt_ids", "response_ids", f"{ROLLOUT}{LOGPROBS}", PROMPT_LOGPROBS)
        )
        groups = rows.list("group_id") or [None] * rows.num_rows
        cells = {name: values for name in _CELLS if (values := rows.list(name)) is not None}
        for row in range(rows.num_rows):
            where = f"{batch.file}, {batch.place(row)}"
            prompt, response, values = prompts[row], responses[row], logprobs[row]
            if prompt is None and "prompt_ids" in names and rows.has("prompt_ids").any():
                raise ImportFailed(f"{where}: has no prompt token ids, by which sequences are matched")
            if response is None or values is None:
                continue
            for what, found, tokens in ((LOGPROBS, values, response), (PROMPT_LOGPROBS, before[row], prompt)):
                if found is not None and (tokens is None or len(found) != len(tokens.values)):
                    num = 0 if tokens is None else len(tokens.values)
                    raise ImportFailed(
                        f"{where}: {len(found)} {what.strip('_')} for {num} tokens, expected one per token"
                    )
            one = {name: column[row] for name, column in cells.items()}
            self._add(pass_name, groups[row], prompt, _Response(pass_name, response.values, values, before[row], one))

    def _add(self, name: str, group: str | None, prompt: Values | None, found: _Response) -> None:
        key = (int(found.cells["step"]), group if prompt is None else prompt.values.tobytes())
        label = group if prompt is None and group is not None else str(len(self._prompts))
        _, _, occurrences = self._prompts.setdefault(key, (label, None if prompt is None else prompt.values, []))
        of_response = (name, *key, found.ids.tobytes())
        if of_response in self._places:
            place, repetition = self._places[of_response]
            repetition += 1
        else:
            place, repetition = self._numbers.get((name, *key), 0), 0
            self._numbers[name, *key] = place + 1
        self._places[of_response] = place, repetition
        if repetition:
            pass_name = f"{name}.{repetition}"
            self.repeated[pass_name] = name
            if len(self.repeated) > MOST_PASSES:
                raise ImportFailed(f"pass {name!r}: repeats a prompt and response more than {MOST_PASSES:,} times")
            found = _Response(pass_name, found.ids, found.logprobs, found.prompt_logprobs, found.cells)
        while len(occurrences) <= place:
            occurrences.append([])
        occurrences[place].append(found)

    def batches(self, file: str) -> Iterator[RowBatch]:
        """Yield the matched rows, one column of logprobs per pass."""
        rows, number = DumpRows(file, "sequence"), 0
        for (_step, _key), (label, prompt, occurrences) in sorted(self._prompts.items(), key=lambda entry: entry[0][0]):
            for place, responses in enumerate(occurrences):
                for variant, cells in enumerate(_rows(prompt, responses)):
                    number += 1
                    rows.add(number, **cells, seq_id=f"{label}.{place}.{variant}", group_id=f"{label}.{place}")
                    if len(rows) >= ROWS_AT_ONCE:
                        yield rows.batch()
                        rows = DumpRows(file, "sequence")
        if len(rows):
            yield rows.batch()


def _lists(rows: Columns, name: str) -> list[Values | None]:
    has, ragged = rows.has(name), rows.ragged(name)
    if ragged is None:
        return [None] * rows.num_rows
    known = np.ones(len(ragged.values), bool) if ragged.valid is None else ragged.valid
    ends = np.cumsum(ragged.lengths)
    return [
        Values(ragged.values[end - length : end], known[end - length : end]) if there else None
        for end, length, there in zip(ends, ragged.lengths, has, strict=True)
    ]


def _rows(prompt: np.ndarray | None, responses: Sequence[_Response]) -> Iterator[dict[str, Any]]:
    """Yield a row per distinct response, the most frequent first."""
    with_prompt = prompt is not None and any(found.prompt_logprobs is not None for found in responses)
    variants: dict[bytes, list[_Response]] = {}
    for found in responses:
        variants.setdefault(found.ids.tobytes(), []).append(found)
    ordered = sorted(variants.values(), key=lambda same: -len(same))
    ids = [same[0].ids for same in ordered]
    columns: list[dict[str, Values]] = [{} for _ in ordered]
    for place, same in enumerate(ordered):
        num, done = len(ids[place]), 0
        for row in range(place + 1):
            until = num if row == place else _common(ids[row], ids[place])
            for found in same:
                if until > done or (row == 0 and with_prompt and found.prompt_logprobs is not None):
                    columns[row][f"{found.pass_name}{LOGPROBS}"] = _part(
                        found, done, until, len(ids[row]), len(prompt) - 1 if with_prompt and prompt is not None else 0, row == 0
                    )
            done = max(done, until)
    for place, same in enumerate(ordered):
        response, first = ids[place], prompt
        if with_prompt and prompt is not None:
            response, first = np.concatenate([prompt[1:], response]), prompt[:1]
        yield {**same[0].cells, "prompt_ids": first, "response_ids": response, **columns[place]}


def _part(found: _Response, start: int, end: int, num: int, num_prompt: int, is_first: bool) -> Values:
    """Return a row's values [num_prompt + num], known from response token `start` to `end` and, first, in the prompt."""
    values, known = np.zeros(num_prompt + num, found.logprobs.values.dtype), np.zeros(num_prompt + num, bool)
    if num_prompt and is_first and found.prompt_logprobs is not None:
        values[:num_prompt], known[:num_prompt] = found.prompt_logprobs[1:]
    inside = slice(num_prompt + start, num_prompt + end)
    values[inside], known[inside] = found.logprobs[start:end]
    return Values(values, known)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    num = min(len(a), len(b))
    differs = np.flatnonzero(a[:num] != b[:num])
    return int(differs[0]) if len(differs) else num


def pass_names(paths: Sequence[str]) -> list[str]:
    """Return a distinct pass name for each path: its last part without suffix, with as many folders as needed.

    >>> pass_names(["a/tp1.json", "b/tp1.json", "b/tp2.json"])
    ['a/tp1', 'b/tp1', 'tp2']
    """
    parts = [PurePath(path).parts for path in paths]
    names = [_clean(re.sub(r"\.jsonl?$", "", path[-1] if path else "")) for path in parts]
    for num in range(2, max(map(len, parts), default=0) + 1):
        repeated = {name for name in names if names.count(name) > 1}
        names = [
            f"{_clean(path[-num])}/{name}" if name in repeated and len(path) >= num else name
            for name, path in zip(names, parts, strict=True)
        ]
    taken = {*STANDARD, REPLAY_PREFIX.rstrip("/")}
    names = [f"{ROLLOUT}/{name}" if name.partition("/")[0] in taken else name for name in names]
    return [f"{name}.{names[:place].count(name) + 1}" if name in names[:place] else name for place, name in enumerate(names)]


def _clean(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+=-]+", "-", name).lstrip("_.+=-") or "pass"
