"""Commands and queries shown in a report."""

from __future__ import annotations

import shlex

from ...schemas.steps import ALL_STEPS
from ..trace.macros import quoted, quoted_pair
from .subject import Subject

_TAKES_PAIR = frozenset({"check", "diagnose", "attribute", "corrections", "gate", "dynamics"})

_TAKES_STEPS = frozenset({"attribute", "check", "corrections", "diagnose", "dynamics", "objective", "stats"})


def command(subject: Subject, verb: str, *options: str) -> str:
    """Return a `tim-trace VERB` command for the subject's trace, with the subject's steps, pair and baseline run if the
    verb accepts them."""
    own: list[str] = []
    if verb in _TAKES_STEPS and subject.asked_steps != ALL_STEPS:
        own += ["--steps", subject.asked_steps]
    if verb in _TAKES_PAIR and subject.pair != ("train", "rollout"):
        own += ["--pair", ":".join(subject.pair)]
    found = subject.attribution
    if verb == "attribute" and "--control" not in options and found is not None and found.control is not None:
        own += ["--control", found.control]
    return shlex.join(["tim-trace", verb, subject.trace, *own, *options])


_STEPS = {"k3": "k3", "p99_abs_d": "p99_abs_d", "max_abs_d": "max_abs_d", "ess": "ess_token"}
"""Maps the name of a series to its column in the SQL macro pair_steps."""

_OF_SEQUENCES = {
    "reward": "avg(reward) FILTER (isfinite(reward))",
    "length": "avg(num_response_tokens)",
    "share_length_limited": "avg((finish_reason = 'length')::INTEGER)",
}

_OF_GROUPS = {"reward_std_within_groups": "avg(spread)", "share_groups_without_spread": "avg((spread = 0)::INTEGER)"}

_GROUPS = """SELECT step, {value} AS {name}
FROM (
    SELECT step, CASE WHEN min(reward) = max(reward) THEN 0.0 ELSE stddev_samp(reward) END AS spread
    FROM sequences
    WHERE group_id IS NOT NULL AND isfinite(reward){within}
    GROUP BY step, group_id
    HAVING count(*) > 1
)
GROUP BY step ORDER BY step"""


def query_of_series(name: str, subject: Subject) -> str:
    where = f" WHERE {subject.condition}" if subject.condition else ""
    if name in _STEPS:
        return (
            f"SELECT step, {_STEPS[name]} AS {name} FROM pair_steps({quoted_pair(subject.pair)}){where} ORDER BY step"
        )
    if name in _OF_SEQUENCES:
        return f"SELECT step, {_OF_SEQUENCES[name]} AS {name} FROM sequences{where} GROUP BY step ORDER BY step"
    if name in _OF_GROUPS:
        return _GROUPS.format(value=_OF_GROUPS[name], name=name, within=_and(subject))
    series = subject.series.get(name)
    if series is not None and series.logged:
        return query_of_metric(series.logged, subject)
    if name == "changed_weights":
        return command(subject, "weights")
    return command(subject, "dynamics", "--json")


def query_of_metric(name: str, subject: Subject, first_step: int = 1) -> str:
    return (
        f"SELECT step, avg(value) FILTER (isfinite(value)) AS value FROM metrics WHERE name = {quoted(name)} "
        f"AND step >= {first_step}{_and(subject)} GROUP BY step ORDER BY step"
    )


def _and(subject: Subject) -> str:
    return f" AND {subject.condition}" if subject.condition else ""
