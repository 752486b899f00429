"""Find how per-token advantages follow from the reward and a KL penalty on each token.

Shapes: T tokens, P pairs of a token in the loss and the next one of its row, R rows, S steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..trace.columns import scored_passes, sequence_columns
from .advantages import DataRows
from .finding import DataFinding

_TOKENS = """
SELECT step, row, coalesce(reward, 'nan') AS reward, coalesce(a, 'nan') AS a, coalesce(k, 0) AS k, coalesce(counts, true) AS counts FROM (
    SELECT step, row, reward, unnest(advantages)::DOUBLE AS a, unnest({penalty}) AS k, unnest({mask}) AS counts, generate_subscripts(advantages, 1) AS place
    FROM (SELECT *, row_number() OVER () AS row FROM sequences WHERE {asked}) {join}
) WHERE place IS NOT NULL ORDER BY step, row, place
"""
_JOIN = """LEFT JOIN (SELECT run, step, seq_id, list_transform(list_zip(x.logprobs, y.logprobs), lambda each: each[1]::DOUBLE - each[2]) AS kl
FROM scores AS x JOIN scores AS y USING (run, step, seq_id) WHERE x."pass" = 'train' AND y."pass" = 'reference' AND x.iteration = 0 AND y.iteration = 0) USING (run, step, seq_id)"""
_EXACT = 1e-4
"""Error that rounding leaves, relative to the standard deviation of a step's advantages."""
_MANY = 8
_JUMP = 5.0
"""Factor between two steps that no controller of the KL coefficient reaches."""


def check_returns(run: DataRows) -> Iterator[DataFinding]:
    """Fit A_t = gamma A_u + c (train - reference)_t + b at each step, where u is the next token of the row, and find rows
    where this fails between a masked span's ends, and steps where c has the wrong sign or another size."""
    if not run.is_per_token:
        return
    has_kl = {"train", "reference"} <= {*scored_passes(run.database)}
    mask = "response_mask" if sequence_columns(run.database).mask else "NULL::BOOLEAN[]"
    query = _TOKENS.format(
        penalty="kl" if has_kl else "NULL::DOUBLE[]", mask=mask, asked=run.asked, join=_JOIN if has_kl else ""
    )
    step, row, reward, a, k, counts = run.database.connection.execute(query).fetchnumpy().values()
    i = np.flatnonzero(counts.astype(bool) & np.isfinite(a))
    last, (i, j) = i[np.diff(row[i], append=-1) != 0], (i[:-1], i[1:])
    i, j = i[row[i] == row[j]], j[row[i] == row[j]]
    of_row = np.unique(row, return_index=True)[1]
    between = np.cumsum(k)[j - 1] - np.cumsum(k)[i]
    terms, steps = np.c_[a[j], k[i], np.ones(len(i))], np.unique(step)
    leaks, resets = np.zeros((2, len(i)), bool)
    gamma, penalty = np.full((2, len(steps)), np.nan)
    for at, each in enumerate(steps):
        own = step[i] == each
        near, far, scale = own & (j == i + 1), own & (j > i + 1), float(np.std(a[i][own])) if own.any() else 0.0
        if near.sum() < _MANY or not scale:
            continue
        fitted = np.linalg.lstsq(terms[near], a[i][near], rcond=None)[0]
        rest, part = a[i] - terms @ fitted, float(np.std(fitted[1] * k[i][near]))
        if np.std(rest[near]) > _EXACT * scale:
            continue
        gamma[at] = fitted[0]
        off = far & (np.abs(rest) > 10 * _EXACT * scale)
        leaks |= off & (np.abs(rest - fitted[1] * between) < 10 * _EXACT * scale)
        value = a[i] - fitted[1] * k[i]
        if far.any() and np.ptp(value[far]) < 10 * _EXACT * scale:
            resets |= off
        ends = last[step[last] == each]
        x, y = reward[ends], a[ends] - fitted[1] * k[ends]
        if fitted[0] > 0.5 and part > 0.01 * scale and np.std(x) > 0 and (slope := np.polyfit(x, y, 1)[0]) > 0:
            penalty[at] = fitted[1] / slope
    factor = np.median(gamma[np.isfinite(gamma)]) if np.isfinite(gamma).any() else 1.0
    implied = f", although {run.group_setting} implies one advantage per response" if run.group_setting else ""
    decay = f"; they decay by a factor of {factor:.4g} per token towards the start" if 0.5 < factor < 0.999 else ""
    if implied or decay:
        yield from run.find("advantages_vary", run.rows["is_per_token"], notice=True, explanation=implied + decay)
    known = np.flatnonzero(np.isfinite(penalty))
    size, off, text = np.abs(penalty[known]), penalty[known] > 0, "the wrong sign"
    jumps = np.minimum.accumulate(size[::-1])[::-1][1:] > _JUMP * np.maximum.accumulate(size)[:-1]
    if not off.any() and jumps[2:-2].any():
        off, text = np.arange(len(known)) > np.argmax(jumps), "another size"
    if off.any():
        text = f"a KL term of {text}: its coefficient on train - reference is {np.median(penalty[known][off]):+.3g} in units of the reward"
    usual = (
        f"it is {np.median(penalty[known][~off]):+.3g} at the other steps"
        if not off.all()
        else "a penalty has a negative one"
    )
    for affected, rule, rest in (
        (np.isin(step[of_row], steps[known[off]]), text, usual),
        (np.isin(row[of_row], row[i][resets]), "no share of the return before masked tokens", "those after them follow the reward"),
        (np.isin(row[of_row], row[i][leaks]), "the KL penalty of masked tokens added", "these tokens do not count toward the loss"),
    ):  # fmt: skip
        yield from run.find("advantages_mixed", affected, step[of_row], least=_MANY, rule=rule, rest=rest)
