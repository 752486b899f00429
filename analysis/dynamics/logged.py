"""What the trainer logged, by step."""

from __future__ import annotations

import re

import numpy as np

from ..trace.database import Database
from ..trace.quoting import quoted
from .columns import Column
from .fall import is_evaluation

NAMES: dict[str, tuple[str, ...]] = {
    "grad_norm": ("grad_norm", "actor/grad_norm", "train/grad_norm", "optim/grad_norm"),
    "loss": ("loss", "actor/pg_loss", "train/loss", "loss/mean"),
    "learning_rate": ("learning_rate", "actor/lr", "train/learning_rate", "optim/lr", "lr"),
    "entropy": ("entropy", "actor/entropy", "actor/entropy_loss", "train/entropy", "entropy/mean"),
    "update_to_weight": ("optimizer/update_to_weight",),
    "adam_second_moment": ("optimizer/second_moment",),
    "reward": ("reward", "critic/rewards/mean", "rewards/mean", "reward/mean", "critic/score/mean", "train/reward"),
}
"""Series -> the names that frameworks and the recorder log it under, the first that a trace has counts."""

LAST_WORDS: dict[str, tuple[str, ...]] = {
    "grad_norm": ("grad_norm", "gradient_norm", "total_norm"),
    "learning_rate": ("learning_rate", "lr"),
    "entropy": ("entropy", "policy_entropy", "mean_entropy"),
    "reward": ("reward", "rewards", "mean_reward", "reward_mean", "avg_reward", "average_reward"),
}
"""Series -> the last words of names of loops of one's own, where it has none of NAMES."""

_METRICS = """
SELECT step, name, avg(value) FILTER (isfinite(value)) AS value, count(*) FILTER (NOT isfinite(value)) AS num_not_finite
FROM metrics
WHERE run = $run AND step > 0 AND value IS NOT NULL AND name IN ({names})
GROUP BY step, name ORDER BY step
"""

_NAMES = """
SELECT DISTINCT name FROM metrics
WHERE run = $run AND step > 0 AND value IS NOT NULL AND NOT contains(name, 'eval') AND NOT contains(name, 'hyperparameter/')
ORDER BY name
"""


def read_logged(database: Database, run: str) -> list[Column]:
    """Read the logged series; where several processes logged one, the mean of theirs."""
    chosen = _chosen(database, run)
    names = ", ".join(quoted(name) for name in chosen.values()) or "NULL"
    rows = database.connection.execute(_METRICS.format(names=names), {"run": run}).fetchall()
    by_name: dict[str, list[tuple[int, float, int]]] = {}
    for step, name, value, num_not_finite in rows:
        by_name.setdefault(name, []).append((step, np.nan if value is None else value, num_not_finite))
    return [_column(series, name, by_name[name]) for series, name in chosen.items() if name in by_name]


def _chosen(database: Database, run: str) -> dict[str, str]:
    """Series -> the name that this run logged it under; of several with the same last word the first by the alphabet."""
    logged = [
        name for (name,) in database.connection.execute(_NAMES, {"run": run}).fetchall() if not is_evaluation(name)
    ]
    found = {}
    for series, names in NAMES.items():
        ends = LAST_WORDS.get(series, ())
        alike = [name for name in logged if re.split(r"[/.]", name)[-1] in ends]
        name = next((name for name in (*names, *alike) if name in logged), None)
        if name is not None:
            found[series] = name
    return found


def _column(series: str, name: str, rows: list[tuple[int, float, int]]) -> Column:
    steps = np.array([step for step, _, _ in rows], np.int64)
    broken = np.array([count > 0 for _, _, count in rows], bool)
    return Column(
        series, steps, np.array([value for _, value, _ in rows], float), f"logged as {name}", steps[broken], name
    )
