"""Predict a remedy's effect from the broken run's trace alone: 0 if it removes nothing of the fault, 1 if all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from learner import ALGORITHMS
from remedy import Remedy
from tim_trace.analysis.objective.objective import objective
from tim_trace.analysis.views import connect
from tim_trace.replay.engine import replay
from tim_trace.replay.gradients.engine import gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretold:
    """None if there is no such prediction, as for schedules."""

    by_objective: float | None = None
    """Share of the objective's distortion, sum |b| / sum |f*|, that is removed."""
    by_gradient: float | None = None
    """Removed share of the gradient's 1 - cosine to the exactly weighted one, at steps with recorded weights."""
    by_corrections: float | None = None
    """Share of tokens that the correction keeps."""
    by_replay: float | None = None
    """Share of mean |d| that is removed, at steps with recorded weights, replayed in the remedy's precision."""


def foretold(trace: str, weighed: str, remedy: Remedy, plan: Mapping) -> Foretold:
    """Return what a run's trace, and a trace of the same run with weights at some steps, predict about a remedy."""
    if remedy.kind == "correction":
        return Foretold(
            by_objective=_by_objective(trace, remedy.changes),
            by_gradient=_by_gradient(weighed, remedy.changes),
            by_corrections=_by_corrections(trace, remedy.changes),
        )
    if remedy.arm is not None:
        return _by_precision(weighed, remedy, plan)
    return Foretold()


def _by_objective(trace: str, changes: Mapping) -> float:
    """Return 1 - distortion with the correction / distortion without."""
    without = objective(trace, loss="correction=none")
    corrected = objective(trace, loss=f"correction={changes['correction']},correction_high={changes['correction_cap']}")
    distortion = [float(found.figures["relative_abs_bias"].value) for found in (without, corrected)]
    return 1.0 - distortion[1] / distortion[0]


_EXACT = "correction=token_truncate,correction_high=1e30"
"""Unmodified token weights exp(d): the gradient that is correct for the samples, token by token."""


def _by_gradient(weighed: str, changes: Mapping) -> float:
    """Return 1 - ratio of mean 1 - cosine (to the exactly weighted gradient) with and without the correction."""
    arms = ["correction=none,name=none", f"correction={changes['correction']}:{changes['correction_cap']},name=remedy"]
    found = gradient(weighed, steps="all", arm=arms, micro_batches=0, loss=_EXACT)
    apart = {
        arm: np.mean([1 - (step.whole.cosine or 0.0) for step in found.steps if step.arm == arm])
        for arm in ("none", "remedy")
    }
    return float(1.0 - apart["remedy"] / apart["none"])


def _by_corrections(trace: str, changes: Mapping) -> float:
    """Return the share of tokens whose weight is not 0."""
    kind, cap = changes["correction"], changes["correction_cap"]
    if kind == "token_truncate":
        return 1.0
    d = "d" if kind == "token_mask" else "sum(d) OVER (PARTITION BY step, seq_id)"
    query = f"SELECT avg((exp(least(x, 50)) <= {cap})::INTEGER) FROM (SELECT {d} AS x FROM pair('train', 'rollout') WHERE mask)"
    return float(connect(trace).execute(query).fetchone()[0])


_GAPS = """
SELECT sum(abs(used - correct)) / sum(abs(correct)), avg(abs(d))
FROM (
    SELECT d, loss_term(clamped_exp(stale), advantage, kind := $kind) AS used,
           loss_term(clamped_exp(d + stale), advantage, kind := $kind) AS correct
    FROM pair_now('train', $scored, $now)
    WHERE mask AND isfinite(d) AND isfinite(stale) AND isfinite(advantage) AND step % $every = 0
)
"""


def _by_precision(weighed: str, remedy: Remedy, plan: Mapping) -> Foretold:
    """Return the removed shares: (the gap that the remedy addresses - the gap that it leaves) / the recorded gap."""
    recorded = _gaps(weighed, plan, "rollout")
    taken = recorded if remedy.instead_of is None else _replayed(weighed, plan, remedy.instead_of)
    left = _replayed(weighed, plan, remedy.arm) if remedy.arm else np.zeros(2)
    by_objective, by_replay = (taken - left) / recorded
    return Foretold(by_objective=float(by_objective), by_replay=float(by_replay))


def _replayed(weighed: str, plan: Mapping, arm: str) -> np.ndarray:
    """Return the gaps of an engine in this precision that decodes, in the recorded dtype unless the arm sets one."""
    dtype = plan["switches"]["engine_dtype"]
    own = f",dtype={dtype}" if dtype and "dtype=" not in arm.replace("kv-dtype=", "") else ""
    name = arm.replace("=", "-")
    steps = f"{WEIGHTS_EVERY}:{plan['steps']}:{WEIGHTS_EVERY}"
    replay(weighed, steps=steps, arm=[f"{arm}{own},mode=decode,batch-size=64,name={name}"], force=True)
    return _gaps(weighed, plan, f"replay/{name}")


WEIGHTS_EVERY = 50
"""Number of steps between two with recorded weights."""


def _gaps(weighed: str, plan: Mapping, scored: str) -> np.ndarray:
    """Return the objective's distortion and mean |d| in nats [2], against the trainer, at steps with weights."""
    algorithm = ALGORITHMS[plan["algorithm"]]
    values = {
        "scored": scored,
        "now": "current" if algorithm.num_minibatches > 1 else "train",
        "kind": algorithm.loss.kind,
        "every": WEIGHTS_EVERY,
    }
    return np.array(connect(weighed).execute(_GAPS, values).fetchone(), dtype=float)
