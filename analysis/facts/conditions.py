"""Read each step's inputs: prompts, sampling limits, advantages, distance from the reference, and settings."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from ...schemas.layout import HYPERPARAMETER
from ...schemas.tables import SAMPLING as SAMPLING_SETTINGS
from ..trace.columns import scored_passes, sequence_columns
from ..trace.database import Database, cached
from ..trace.tokens import tokens_by_step
from .read_series import NAMES, read_logged
from .series import LENGTH, LINEAR, LOG, LOGIT, Series, by_step

PROMPTS, SAMPLING, ADVANTAGES, REFERENCE, SETTING, LOGGED, MASK = (
    "prompts", "sampling", "advantages", "reference", "setting", "logged", "mask",
)  # fmt: skip

_MOST_PROMPTS = 20_000
_MOST_SWITCHES = 5
"""A logged number that changes more than this many times is treated as a measurement, not a setting."""
_HELD = 4
"""Minimum number of identical values between two changes in a setting."""

_SAMPLED = """
SELECT step, avg(len(prompt_ids)) AS prompt_length, max(num_response_tokens) AS longest_response, count(*) AS num_sequences,
       count(*) / count(DISTINCT group_id) AS group_size, {others}
FROM sequences GROUP BY step ORDER BY step
"""
_PLACES = """
SELECT step, hash(place, token) AS token, count(*) AS n
FROM (
    SELECT step, unnest(prompt_ids[1:{most}]) AS token, unnest(range(1, least(len(prompt_ids), {most}) + 1)) AS place
    FROM sequences WHERE hash(seq_id) % {every} = 0
    UNION ALL
    SELECT step, unnest(list_reverse(prompt_ids)[1:{most}]), -unnest(range(1, least(len(prompt_ids), {most}) + 1))
    FROM sequences WHERE hash(seq_id) % {every} = 0
)
GROUP BY ALL ORDER BY step, token
"""
"""Token counts by position in the prompt: 1, 2, ... from the start, and -1, -2, ... from the end."""
_MOST_PLACES = 12
_NEW = """
SELECT step, avg((first = step)::DOUBLE) AS share_new_prompts
FROM (SELECT step, min(step) OVER (PARTITION BY hash(prompt_ids)) AS first FROM sequences)
GROUP BY step ORDER BY step
"""
_MASKED = "coalesce(sum(num_response_tokens - list_sum(response_mask::TINYINT[])), 0) / sum(num_response_tokens) AS share_masked"
_ADVANTAGES = """
SELECT step, CASE WHEN abs(avg(advantage)) < 1e-6 * greatest(max(abs(advantage)), max(abs(reward))) THEN 0 ELSE favg(advantage) END
           AS advantage_mean,
       CASE WHEN stddev_samp(rewarded) > 1e-9 AND stddev_samp(moved) > 1e-9 THEN round(corr(rewarded, moved), 9) END
           AS advantage_correlation,
       CASE WHEN stddev_samp(rewarded) > 1e-9 THEN round(stddev_samp(advantage) / stddev_samp(rewarded), 9) END
           AS advantage_scale
FROM (
    SELECT step, advantage, reward,
           reward - CASE WHEN n > 1 THEN avg(reward) OVER grouped ELSE avg(reward) OVER (PARTITION BY step) END AS rewarded,
           advantage - CASE WHEN n > 1 THEN avg(advantage) OVER grouped ELSE avg(advantage) OVER (PARTITION BY step) END AS moved
    FROM (
        SELECT step, coalesce(group_id, seq_id) AS unit, reward, coalesce(advantage, list_avg(advantages)) AS advantage,
               count(*) OVER (PARTITION BY step, coalesce(group_id, seq_id)) AS n
        FROM sequences WHERE isfinite(reward)
    )
    WHERE isfinite(advantage)
    WINDOW grouped AS (PARTITION BY step, unit)
)
GROUP BY step ORDER BY step
"""
"""The results are rounded, so that constant values stay identical in any order of summation."""
_METRICS = """
SELECT name, step, avg(value ORDER BY value) AS value FROM metrics
WHERE value IS NOT NULL AND isfinite(value) GROUP BY ALL ORDER BY name, step
"""

_QUANTITIES = {
    "prompt_length": (PROMPTS, LOG, "mean prompt length, tokens"),
    "prompt_form_shift": (PROMPTS, LINEAR, "total variation distance between this step and the first tenth of the run, for (position, token) pairs near both ends of the prompt"),
    "share_new_places": (PROMPTS, LOG, "share of tokens near the ends of the prompt that never appeared at that position in the run's first quarter"),
    "share_new_prompts": (PROMPTS, LOGIT, "share of prompts not seen at earlier steps"),
    "longest_response": (LENGTH, LOG, "longest response at this step, tokens"),
    "num_sequences": (SAMPLING, LOG, "sequences in the step"),
    "group_size": (SAMPLING, LOG, "mean sequences per group"),
    "advantage_mean": (ADVANTAGES, LINEAR, "mean advantage"),
    "advantage_scale": (ADVANTAGES, LOG, "standard deviation of advantages divided by that of rewards, within groups"),
    "advantage_correlation": (ADVANTAGES, LINEAR, "correlation between advantages and rewards within groups"),
    "share_masked": (MASK, LOGIT, "share of response tokens excluded by the loss mask"),
    "reference_k3": (REFERENCE, LOG, "k3 between trainer and reference logprobs, nats"),
}  # fmt: skip


@cached
def read_conditions(database: Database) -> dict[str, Series]:
    """Read the open run's inputs (e.g. prompts, advantages, settings) and logged metrics that no other series contains.

    A hyperparameter keeps its value at all steps until the next recorded change.
    """
    logged = [] if tokens_by_step(database) else read_logged(database, False)
    averages = {one.name: (one.steps, one.values) for one in logged if one.name in _QUANTITIES}
    columns = averages | _of_sequences(database)
    columns = {name: column for name, column in columns.items() if np.isfinite(column[1]).any()}
    found = {
        name: Series(name, *columns[name], scale, kind, source)
        for name, (kind, scale, source) in _QUANTITIES.items()
        if name in columns
    }
    found |= {series.name: series for series in _of_metrics(database, logged)}
    # If a sampling setting recorded per sequence varies, it replaces the hyperparameter of the same name.
    for name in (name for name in SAMPLING_SETTINGS if name in columns):
        steps, values = columns[name]
        known = np.isfinite(values)
        if name not in found or np.ptp(values[known]):
            kind = SETTING if is_held(values[known]) else SAMPLING
            found[name] = Series(name, steps[known], values[known], LINEAR, kind, "recorded with the sequences")
    return found


Column = tuple[np.ndarray, np.ndarray]


def _of_sequences(database: Database) -> dict[str, Column]:
    found: dict[str, Column] = {}
    others = [f"avg({name}) AS {name}" for name in SAMPLING_SETTINGS]
    others += [_MASKED] if sequence_columns(database).mask else []
    queries = [_SAMPLED.format(others=", ".join(others)), _NEW, _ADVANTAGES]
    if {"reference", "train"} <= {*scored_passes(database)}:
        queries.append("SELECT step, k3 AS reference_k3 FROM pair_steps('reference', 'train') ORDER BY step")
    for query in queries:
        rows = by_step(database, query)
        steps = rows.pop("step")
        found |= {name: (steps, values) for name, values in rows.items()}
    if "share_new_prompts" in found:  # prompts drawn from a finite set repeat ever more often
        steps, share = found["share_new_prompts"]
        if np.nanmax(share[len(share) // 4 :], initial=0.0) < 1.0:
            found["share_new_prompts"] = steps, np.where(np.arange(len(share)) < len(share) // 4, np.nan, share)
    return found | _places(database)


def _places(database: Database) -> dict[str, Column]:
    ((num_sequences,),) = database.connection.execute("SELECT count(*) FROM sequences").fetchall()
    every = max(-(-num_sequences // _MOST_PROMPTS), 1)
    rows = database.connection.execute(_PLACES.format(every=every, most=_MOST_PLACES)).fetchnumpy()
    steps, at = np.unique(np.asarray(rows["step"], np.int64), return_inverse=True)
    tokens, column = np.unique(np.asarray(rows["token"]), return_inverse=True)
    if not len(steps) or len(steps) * len(tokens) > 50_000_000:
        return {}
    counts = np.zeros((len(steps), len(tokens)))
    counts[at, column] = np.asarray(rows["n"], float)
    total, place = counts.sum(axis=1), np.arange(len(steps))
    tenth, quarter = (max(len(steps) // part, 3) for part in (10, 4))
    usual, is_new = counts[:tenth].sum(axis=0), counts[:quarter].sum(axis=0) == 0
    apart = 0.5 * np.abs(counts / total[:, None] - usual / usual.sum()).sum(axis=1)
    new = counts[:, is_new].sum(axis=1) / total  # a single division, so that identical steps have identical values
    return {
        "prompt_form_shift": (steps, np.where(place < tenth, np.nan, apart)),
        "share_new_places": (steps, np.where(place < quarter, np.nan, new)),
    }


def _of_metrics(database: Database, known: list[Series]) -> Iterator[Series]:
    """Yield the logged numbers that are not among the `known` series."""
    rows = database.connection.execute(_METRICS).fetchnumpy()
    names = np.asarray(rows["name"]).astype(str)
    steps, values = np.asarray(rows["step"], np.int64), np.asarray(rows["value"], float)
    taken = {name for aliases in NAMES.values() for name in aliases} - set(NAMES["learning_rate"])
    taken |= {one.logged for one in known if one.name != "learning_rate"}
    every = np.union1d(steps, np.array(list(tokens_by_step(database)), np.int64))
    every = every[(every >= 1) & (every <= steps.max(initial=0))]
    for name in np.unique(names):
        of_name = names == name
        at, value = steps[of_name], values[of_name]
        if name in taken or len(at) < 2:
            continue
        if name.startswith(HYPERPARAMETER):
            held = every[every >= at[0]]
            filled = value[np.searchsorted(at, held, side="right") - 1]
            is_set = is_held(filled) or (begins_held(filled) and not is_learning_rate(str(name)))
            kind = SETTING if is_set else LOGGED
            yield Series(name.removeprefix(HYPERPARAMETER), held, filled, LINEAR, kind, "recorded as a setting")
        elif is_held(value) or (is_coefficient(name) and begins_held(value)):
            yield Series(name, at, value, LINEAR, SETTING, f"logged as {name}")
        else:
            is_positive = bool((value > 0).all()) and value.max() > 10 * value.min()
            yield Series(name, at, value, LOG if is_positive else LINEAR, LOGGED, f"logged as {name}")


def is_held(values: np.ndarray) -> bool:
    places = np.flatnonzero(values[1:] != values[:-1]) + 1
    stretches = np.diff([0, *places, len(values)])
    return len(places) <= _MOST_SWITCHES and bool((stretches[:-1] >= _HELD).all())


def held_parts(values: np.ndarray) -> list[tuple[int, int]]:
    firsts = np.r_[0, np.flatnonzero(values[1:] != values[:-1]) + 1]
    lasts = np.r_[firsts[1:] - 1, len(values) - 1]
    least = 1 if is_held(values) else max(_HELD, len(values) // 10)
    return [part for part in zip(firsts.tolist(), lasts.tolist(), strict=True) if part[1] - part[0] + 1 >= least]


def begins_held(values: np.ndarray) -> bool:
    """Return True if a setting is constant at first and then changes steadily, as with a ramp or a controller."""
    parts = held_parts(values)
    return bool(parts) and parts[0][0] == 0 and len(parts) <= _MOST_SWITCHES + 1


def is_coefficient(name: str) -> bool:
    """Return True if a metric's name suggests the coefficient of a loss term, which a controller may change."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return words[-1] == "weight" or not {"coef", "coeff", "coefficient"}.isdisjoint(words)


def is_learning_rate(name: str) -> bool:
    words = re.split(r"[/.]", name.lower())
    return words[-1] in {alias.rsplit("/", 1)[-1] for alias in NAMES["learning_rate"]}
