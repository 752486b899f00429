"""Find how per-token advantages follow from the reward and from a KL penalty on each token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .advantages import DataRows
from .finding import DataFinding

_TOKENS = """
SELECT step, row, coalesce(reward, 'nan') AS reward, a, CASE WHEN isfinite(kl) THEN kl ELSE 0 END AS kl, place, coalesce(counts, true) AS counts FROM (
    SELECT step, row, reward, unnest(advantages)::DOUBLE AS a, unnest(kl) AS kl, unnest(response_mask) AS counts, generate_subscripts(advantages, 1) AS place
    FROM (SELECT *, row_number() OVER () AS row FROM sequences WHERE {asked}) LEFT JOIN (
        SELECT run, step, seq_id, list_transform(list_zip(train.logprobs, other.logprobs), lambda pair: pair[1]::DOUBLE - pair[2]) AS kl
        FROM scores AS train JOIN scores AS other USING (run, step, seq_id, iteration) WHERE train."pass" = 'train' AND other."pass" = 'reference' AND iteration = 0
    ) USING (run, step, seq_id)) WHERE isfinite(a) ORDER BY step, row, place
"""
_EXACT = 1e-4
"""Error that rounding leaves, relative to the standard deviation of a step's advantages."""
_JUMP = 5.0
"""Factor between two steps that no controller of a KL coefficient reaches."""


def check_returns(run: DataRows) -> Iterator[DataFinding]:
    """Fit a = gamma next + c (train - reference) + constant to the advantages of each step's neighbouring tokens. Find
    rows where this does not hold across masked tokens, and steps where it no longer holds or c changes."""
    if not run.is_per_token:
        return
    table = run.database.connection.execute(_TOKENS.format(asked=run.asked)).fetchnumpy()
    step, row, reward, a, kl, place, counts = map(np.asarray, table.values())
    before = np.cumsum(kl) - kl
    step, row, reward, a, kl, place, before = (each[counts] for each in (step, row, reward, a, kl, place, before))
    steps, starts = np.unique(step, return_index=True)
    rows, first = np.unique(row, return_index=True)
    at = step[first]
    leaks, resets, runs_on = np.zeros((3, len(step)), bool)
    gamma, size = np.full((2, len(steps)), np.nan)
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(step)], strict=True)):
        i = np.arange(start, end)
        last, i = i[np.diff(row[i], append=-1) != 0], i[:-1][np.diff(row[i]) == 0]
        near, error = place[i + 1] == place[i] + 1, _EXACT * float(np.std(a[start:end]))
        if near.sum() < 8 or not error:
            continue
        terms = np.c_[a[i + 1], kl[i], np.ones(len(i))]
        fitted = np.linalg.lstsq(terms[near], a[i][near], rcond=None)[0]
        rest, outcome = a[i] - terms @ fitted, a - fitted[1] * kl
        gamma[number] = fitted[0] if np.std(rest[near]) < error else np.inf
        if np.isinf(gamma[number]) or fitted[0] < 0.5:
            continue
        off = ~near & (np.abs(rest) > 10 * error)
        leaks[i] = off & (np.abs(rest - fitted[1] * (before[i + 1] - before[i] - kl[i])) < 10 * error)
        gap, decay = place[i + 1] - place[i], min(float(fitted[0]), 1 - 1e-9)
        predicted = a[i + 1] * decay**gap + fitted[2] * (1 - decay**gap) / (1 - decay) + fitted[1] * kl[i]
        runs_on[i] = off & (decay < 0.999) & (np.abs(a[i] - predicted) < 10 * error)
        resets[i] = off & (len(i) > near.sum() and np.ptp(outcome[i][~near]) < 10 * error)
        slope = np.polyfit(reward[last], outcome[last], 1)[0] if np.std(reward[last]) > 0 else 0.0
        if slope > 0 and np.std(fitted[1] * kl[i][near]) > 100 * error:
            size[number] = fitted[1] / slope
    holds, fails, known = np.isfinite(gamma), np.isinf(gamma), np.flatnonzero(np.isfinite(size))
    implied = f", although {run.group_setting} implies one advantage per response" if run.group_setting else ""
    factor = np.median(gamma[holds]) if holds.any() else 1.0
    if 0.5 < factor < 0.999:
        implied += f"; they decay by a factor of {factor:.4g} per token towards the start"
    text = f"a decay of {factor:.4g} per token over masked tokens as well, as if these counted toward the loss"
    yield from run.find("advantages_mixed", np.isin(rows, row[runs_on]), at, least=8, notice=True, rule=text)
    if implied:
        yield from run.find("advantages_vary", run.rows["is_per_token"], notice=True, explanation=implied)
    size, off, which = size[known], size[known] > 0, "the wrong sign"
    jumps = np.minimum.accumulate(np.abs(size[::-1]))[::-1][1:] > _JUMP * np.maximum.accumulate(np.abs(size))[:-1]
    if not off.any() and jumps[2:-2].any():
        off, which = np.arange(len(known)) > np.argmax(jumps), "another size"
    here, elsewhere = (
        f"{np.median(size[each]):+.3g}" if each.any() else "negative, as for a penalty," for each in (off, ~off)
    )
    is_lost = min(len(known), fails.sum()) > 4 and np.flatnonzero(holds)[-1] < np.argmax(fails)
    for affected, rule in (
        (np.isin(at, steps[known[off]]), f"a KL term of {which}: its coefficient on train - reference is {here} in units of the reward, while it is {elsewhere} at other steps"),
        (np.isin(rows, row[resets]), "no share of the return before masked tokens, while advantages after these tokens follow the reward"),
        (np.isin(rows, row[leaks]), "the KL penalty of masked tokens added, although these tokens do not count toward the loss"),
        (np.isin(at, steps[fails & is_lost]), "no fixed relation to the next token's advantage and the KL penalty, although they have one at earlier steps"),
    ):  # fmt: skip
        yield from run.find("advantages_mixed", affected, at, least=8, rule=rule)
