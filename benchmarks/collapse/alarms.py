"""Measure which alerts fire before a run collapses, how early, and how often they fire without a collapse.

python benchmarks/collapse/alarms.py runs/collapse/heldout [--json FILE]

For each rule: the share of collapses before which it fired (within the run and before the drop began), the median
lead in steps, and false alerts per 1,000 steps of healthy runs. An alert is a step at which the rule starts to fire.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rules import RULES, Known, Rule
from tim_trace.analysis.alarms.repeats import unequal_rewards
from tim_trace.analysis.facts.read_series import read_series
from tim_trace.analysis.facts.rollouts import Rollouts, read_rollouts
from tim_trace.analysis.facts.series import Outcome, find_fall
from tim_trace.analysis.views import open_database
from truth import Truth, truths

_RATIOS = """
SELECT step, avg(exp(abs(d))) AS mult_prob_error, avg(exp(d)) AS ratio_mean, stddev_pop(exp(d)) AS ratio_std,
       avg(exp(2 * d)) - 1 AS chi2_token,
       avg((advantage < 0 AND exp(logprob_b::DOUBLE) - exp(logprob_a::DOUBLE) >= 0.5)::INTEGER) AS bad_updates
FROM pair('train', 'rollout') WHERE mask AND isfinite(d) GROUP BY step ORDER BY step
"""
_REWARDS = "SELECT step, stddev_samp(reward) AS reward_std FROM sequences GROUP BY step ORDER BY step"


def known_of(truth: Truth) -> tuple[np.ndarray, Known]:
    """Return the steps of a run, and every quantity that a rule uses."""
    database = open_database(truth.trace)
    series = {name: one for name, one in read_series(database).items()}
    at = series["k3"].known
    steps = series["k3"].steps[at]
    known: Known = {name: one.values[at] for name, one in series.items()}
    for query in (_RATIOS, _REWARDS):
        table = database.connection.sql(query).to_arrow_table()
        known |= {name: table[name].to_numpy() for name in table.column_names if name != "step"}
    known["unequal_rewards"] = unequal_by_step(read_rollouts(database), steps)
    for name in ("length", "entropy", "grad_norm", "learning_rate", "reward"):
        known.setdefault(name, np.full(len(steps), np.nan))
    return steps, known


def unequal_by_step(rollouts: Rollouts, steps: np.ndarray) -> np.ndarray:
    """Return the share [n], up to each step, of responses repeated from the last 20 steps whose reward differs."""
    return unequal_rewards(np.searchsorted(steps, rollouts.step), rollouts.whole, rollouts.reward, len(steps))


def fall_step(truth: Truth) -> int | None:
    """Return the step at which the evaluation begins to drop."""
    values = np.array(truth.plan["evaluations"])
    steps = np.arange(len(values)) * truth.plan["steps"] // (len(values) - 1)
    fall = find_fall(Outcome(name="evaluation", steps=steps, values=values, is_evaluation=True))
    return None if fall is None else fall.high


def judged(rule: Rule, runs: Sequence[tuple[Truth, int | None, np.ndarray, Known]]) -> dict[str, object]:
    """A row of the table."""
    leads, num_falls, false, healthy = [], 0, 0, 0
    for truth, fell_at, steps, known in runs:
        with np.errstate(all="ignore"):
            flags = rule.sounds(known)
        begins = flags & ~np.r_[False, flags[:-1]]
        if truth.expected == "none":
            healthy += len(steps)
            false += int(begins.sum())
        elif fell_at is not None:
            num_falls += 1
            before = np.flatnonzero(flags & (steps <= fell_at))
            if len(before):
                leads.append(int(fell_at - steps[before[0]]))
    return {
        "rule": rule.name,
        "source": rule.source,
        "falls": num_falls,
        "warned": len(leads),
        "median_lead": float(np.median(leads)) if leads else None,
        "false_per_1000": 1000 * false / healthy if healthy else None,
    }


def main() -> None:
    """Print the table for a folder of runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    runs = [
        (truth, fall_step(truth), *known_of(truth))
        for folder in given.folder
        for truth in truths(folder)
        if truth.expected is not None
    ]
    rows = [judged(rule, runs) for rule in RULES]
    print("| rule | source | warned before the collapse | median lead, steps | false alerts per 1,000 healthy steps |")
    print("|---|---|---|---|---|")
    for row in rows:
        lead = "" if row["median_lead"] is None else f"{row['median_lead']:.0f}"
        print(
            f"| {row['rule']} | {row['source']} | {row['warned']} of {row['falls']} | {lead} | {row['false_per_1000']:.1f} |"
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
