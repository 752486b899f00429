"""The sequences of two runs, paired within each step, and the tokens that paired responses share.

Shapes: N sequences of run A, M of run B, K pairs of both, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..trace.database import Database, step_condition
from ..trace.quoting import quoted

_ROWS = """
SELECT step, hash(prompt_ids) AS prompt, hash(prompt_ids, response_ids) AS whole, response_ids{columns}
FROM (SELECT *, row_number() OVER () AS place FROM sequences WHERE {within}) AS s
{joins}
ORDER BY step, place
"""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Sequences of both runs that belong together."""

    a: np.ndarray
    """[K] place in run A."""
    b: np.ndarray
    equal: np.ndarray
    """[K] bool: whether prompt and response are the same; else the prompt is."""


def paired(a: Any, b: Any) -> Pairs:
    """Pair sequences of a step: first equal ones, then what is left of equal prompts, each in the order of recording.

    Both have arrays `step`, `prompt` and `whole`, the hashes of Rollouts.
    """
    of_whole = _matched(a.step, a.whole, b.step, b.whole)
    left_a, left_b = (np.setdiff1d(np.arange(len(run.step)), used) for run, used in zip((a, b), of_whole, strict=True))
    rest = _matched(a.step[left_a], a.prompt[left_a], b.step[left_b], b.prompt[left_b])
    at_a, at_b = np.concatenate([of_whole[0], left_a[rest[0]]]), np.concatenate([of_whole[1], left_b[rest[1]]])
    equal = np.arange(len(at_a)) < len(of_whole[0])
    order = np.argsort(at_a, kind="stable")
    return Pairs(at_a[order], at_b[order], equal[order])


def _matched(
    step_N: np.ndarray, key_N: np.ndarray, step_M: np.ndarray, key_M: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Places of rows of equal step and key, the k-th of one with the k-th of the other."""
    keys = [
        {key: place for place, key in enumerate(_numbered(step, key))}
        for step, key in ((step_N, key_N), (step_M, key_M))
    ]
    shared = [key for key in keys[0] if key in keys[1]]
    at_a, at_b = (np.array([places[key] for key in shared], np.int64) for places in keys)
    return at_a, at_b


def _numbered(steps: np.ndarray, keys: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Step, key, and how many of both came before."""
    seen: dict[tuple[int, int], int] = {}
    for step, key in zip(steps.tolist(), keys.tolist(), strict=True):
        number = seen.get((step, key), 0)
        seen[step, key] = number + 1
        yield step, key, number


@dataclass(slots=True)
class RunRows:
    """Sequences of one run with their lists."""

    step: np.ndarray
    prompt: np.ndarray
    whole: np.ndarray
    response: Any
    logprobs: dict[str, Any] = field(default_factory=dict)
    mask: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTokens:
    """The tokens that come before two responses to one prompt part, of the sequences of one step."""

    apart: dict[str, float]
    """Pass -> mean difference of the two runs' logprobs of these tokens, nats; only passes that both runs have."""
    num_cut: int
    """Responses of run A that end where run B's goes on, so far the same."""
    num_in_tool: int
    """Responses that part at a token that was not sampled: the mask leaves it out of the loss."""


def shared_tokens(a: Database, b: Database, step: int, passes: Sequence[str]) -> SharedTokens:
    """Compare the logprobs of both runs over the tokens that their sequences of a step share."""
    one, two = (read_rows(database, range(step, step + 1), passes, columns=", response_mask") for database in (a, b))
    pairs = paired(one, two)
    sums = {name: [0.0, 0] for name in passes}
    num_cut = num_in_tool = 0
    for at_a, at_b, is_equal in zip(pairs.a.tolist(), pairs.b.tolist(), pairs.equal.tolist(), strict=True):
        num, lengths = shared_prefix(one, two, at_a, at_b)
        num_cut += not is_equal and num == lengths[0] < lengths[1]
        num_in_tool += num < min(lengths) and _is_masked(one, at_a, num)
        for name, (total, count) in sums.items():
            apart = _apart(one, two, at_a, at_b, name, num)
            sums[name] = [total + float(apart.sum()), count + len(apart)]
    return SharedTokens(
        apart={name: total / count for name, (total, count) in sums.items() if count},
        num_cut=num_cut,
        num_in_tool=num_in_tool,
    )


@dataclass(frozen=True, slots=True)
class MovedTokens:
    """The tokens that come before two responses to one prompt part, of the sequences of one step."""

    moved: np.ndarray
    """[T] logprob in run A less that in run B, nats."""
    logprob: np.ndarray
    """[T] in run B."""
    distance: np.ndarray
    """[T] logprob less the reference's, in run B; NaN where there is none."""


def moved_tokens(a: Database, b: Database, step: int, name: str, reference: str) -> MovedTokens:
    """By how much tokens of a step are likelier under a pass of run A than of run B, beside what they were to run B."""
    one, two = (read_rows(database, range(step, step + 1), (name, reference)) for database in (a, b))
    pairs = paired(one, two)
    found: list[list[np.ndarray]] = []
    for at_a, at_b in zip(pairs.a.tolist(), pairs.b.tolist(), strict=True):
        num, _ = shared_prefix(one, two, at_a, at_b)
        of_a, of_b = (logprobs_of(rows, at, name, num) for rows, at in ((one, at_a), (two, at_b)))
        if len(of_a) and len(of_b):
            referred = logprobs_of(two, at_b, reference, num)
            found.append([of_a - of_b, of_b, of_b - referred if len(referred) else np.full(num, np.nan)])
    columns = [np.concatenate(column) for column in zip(*found, strict=True)] if found else [np.empty(0)] * 3
    known = np.isfinite(columns[0])
    return MovedTokens(*(column[known] for column in columns))


def shared_prefix(one: RunRows, two: RunRows, at_a: int, at_b: int) -> tuple[int, tuple[int, int]]:
    """Tokens before two responses part, and the length of both."""
    ids = [rows.response[at].values.to_numpy() for rows, at in ((one, at_a), (two, at_b))]
    shortest = min(map(len, ids))
    parts = np.flatnonzero(ids[0][:shortest] != ids[1][:shortest])
    return int(parts[0]) if len(parts) else shortest, (len(ids[0]), len(ids[1]))


def _is_masked(rows: RunRows, at: int, place: int) -> bool:
    mask = rows.mask[at] if rows.mask is not None else None
    return bool(mask is not None and mask.is_valid and len(mask.values) > place and not mask.values[place].as_py())


def _apart(one: RunRows, two: RunRows, at_a: int, at_b: int, name: str, num: int) -> np.ndarray:
    """[T] differences of two runs' finite logprobs of the first `num` tokens; empty where one has none."""
    a_T, b_T = logprobs_of(one, at_a, name, num), logprobs_of(two, at_b, name, num)
    if len(a_T) != len(b_T):
        return np.empty(0)
    apart = np.abs(a_T - b_T)
    return np.asarray(apart[np.isfinite(apart)])


def logprobs_of(rows: RunRows, at: int, name: str, num: int) -> np.ndarray:
    """[num] logprobs of a response's first tokens under a pass; empty where it has fewer."""
    each = rows.logprobs[name][at]
    if not each.is_valid or len(each.values) < num:
        return np.empty(0)
    return np.asarray(each.values.to_numpy(zero_copy_only=False)[:num].astype(np.float64))


def read_rows(database: Database, steps: range, passes: Sequence[str], columns: str = "") -> RunRows:
    within = step_condition(steps)
    names = [f"p{number}" for number in range(len(passes))]
    query = _ROWS.format(
        columns=columns + "".join(f", {name}.logprobs AS {name}" for name in names),
        within=within,
        joins="\n".join(
            f'LEFT JOIN (SELECT step, seq_id, logprobs FROM scores WHERE {within} AND "pass" = {quoted(wanted)} '
            f"AND iteration = 0) AS {name} USING (step, seq_id)"
            for name, wanted in zip(names, passes, strict=True)
        ),
    )
    table = database.connection.sql(query).to_arrow_table().combine_chunks()
    arrays = {name: table[name].to_numpy() for name in ("step", "prompt", "whole")}
    lists = {wanted: table[name] for name, wanted in zip(names, passes, strict=True)}
    mask = table["response_mask"] if "response_mask" in table.column_names else None
    return RunRows(**arrays, response=table["response_ids"], logprobs=lists, mask=mask)
