"""Judge suspects with the logistic regressions in model.json, one for runs with a baseline and one for runs without.

benchmarks/collapse/left_out.py fits them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypedDict

import numpy as np

from .attribution import SUSPECTS, Evidence, Suspect
from .divergence import SAMPLING, Divergence, first_divergence
from .fact import Fact, fact
from .looks import beside, engine, losses, samples, training
from .run_facts import Facts

_OF_MISMATCH = (
    "mismatch", "mismatch_size", "exact_until", "mismatch_grows_before_fall", "mismatch_grows_with_fall", "check_fails.weights",
    "check_fails.values", "engine_parts.later",
)  # fmt: skip
_LAGS = ("declared_lag", "declared_lag_grows")
_OLD = ("earlier_weights", "engine_stands_still")
EXPLAINED: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("declared_fresh",), ("check_fails.stale",)),
    (("never_ended",), ("not_sampled_so",)),
    (("stop_ignored", "responses_capped", "never_ended"), ("advantages_changed.mean", "advantages_changed.burst")),
    (_LAGS, ("earlier_weights", "engine_moves_on")),
    (_OLD, (*_OF_MISMATCH, "engine_moves_on", "declared_fresh", "returns_to_reference", "not_sampled_so")),
    (("length_pays_since", "rewards_by_length_part"),
     (
        "reward_hides_fall.with", "reward_moves_alone", "reward_and_relation_move", "relation_breaks_alone",
        "advantages_changed.mean", "advantages_changed.burst", "rewards_changed",
    )),
    (("rewards_changed", "in_other_rows"), ("length_pays.moves", "length_costs.moves")),
    (("in_other_rows",), ("data_fault.reward",)),
    (("logprobs_in_other_rows",), _OF_MISMATCH),
    (("engine_stands_still",), ("prompts_part", "prompts_changed")),
    (tuple(f"setting.{code}" for code in SUSPECTS), ("sampling_parts", "update_parts", "update_or_loss")),
)  # fmt: skip
"""Pairs of (features, other features that they explain), applied in order."""


def unexplained(facts: Iterable[Fact]) -> dict[str, Fact]:
    """Return the strongest fact for each feature, with its level reduced by the share that other facts explain."""
    found: dict[str, Fact] = {}
    for one in facts:
        if one.feature not in found or abs(one.level) > abs(found[one.feature].level):
            found[one.feature] = one
    for explaining, explained in EXPLAINED:
        levels = [abs(found[name].level) for name in explaining if name in found]
        share = 1.0 if levels and explaining is _LAGS else max(levels, default=0.0)
        for name in explained if share else ():
            if name in found and name not in explaining:
                found[name] = replace(found[name], level=found[name].level * (1 - share))
    is_old = any(abs(found[name].level) > 0.5 for name in _OLD if name in found)
    if is_old and "engine_parts.later" in found:
        found["engine_parts.behind"] = replace(found.pop("engine_parts.later"), group="behind", level=1.0)
    return found


def table(facts: Facts) -> tuple[Fact, ...]:
    fall = facts.fall
    looks = (*engine.ALL, *samples.ALL, *training.ALL, *losses.ALL)
    return _sorted([one for look in looks for one in look(facts, fall)]) if fall else ()


def table_beside(facts: Facts, control: Facts) -> tuple[tuple[Fact, ...], Divergence | None]:
    """Return the facts that distinguish a run from its baseline, and the first difference (None unless `decisive`)."""
    parted = decisive(facts, first_divergence(facts, control)) if shares_prompts(facts, control) else None
    found = [one for look in beside.ALL for one in look(facts, control, parted)]
    if facts.fall is not None and facts.fall.share > 0 and control.fall is not None:
        found.append(fact("control_fell", control.fall.share / facts.fall.share))
    return _sorted(found, parted.code if parted else ""), parted


def decisive(facts: Facts, parted: Divergence | None) -> Divergence | None:
    """Return the first difference, or None if it comes after the drop or results from rounding or different seeds."""
    if parted is None or not parted.is_sudden or (facts.fall is not None and parted.step > facts.fall.latest):
        return None
    return None if parted.code == SAMPLING and parted.num_before == 0 else parted


def shares_prompts(facts: Facts, control: Facts) -> bool:
    """Return True if both runs begin with the same prompts, in any order."""
    first, second = (
        np.sort(run.rollouts.at_step(int(run.rollouts.step[0])).prompt) if len(run.rollouts.step) else ()
        for run in (facts, control)
    )
    return len(first) > 0 and np.array_equal(first, second)


def _sorted(found: list[Fact], first: str = "") -> tuple[Fact, ...]:
    known = [one for one in found if one.level]
    return tuple(sorted(known, key=lambda one: (one.code != first, -abs(one.level))))


ALONE, BESIDE = "alone", "beside"
_LEAST = 0.1


class Regression(TypedDict):
    classes: list[str]
    intercepts: list[float]
    coefficients: dict[str, list[float]]


@cache
def _fitted() -> dict[str, Regression]:
    fitted: dict[str, Regression] = json.loads((Path(__file__).parent / "model.json").read_text())
    return fitted


def judged(facts: Iterable[Fact], situation: str, model: Regression | None = None) -> tuple[Suspect, ...]:
    """Return all suspects, most probable first. `Evidence.points` are log odds relative to the suspects' mean."""
    fitted = _fitted()[situation] if model is None else model
    known = {name: one for name, one in unexplained(facts).items() if name in fitted["coefficients"] and one.level}
    rows = {name: one.level * np.array(fitted["coefficients"][name]) for name, one in known.items()}
    begins = np.array(fitted["intercepts"])
    logits = begins + sum(rows.values(), np.zeros(len(begins)))
    odds = np.exp(logits - logits.max())
    found = []
    for place, code in enumerate(fitted["classes"]):
        points = {name: float(row[place] - row.mean()) for name, row in rows.items()}
        evidence = [
            Evidence(code=known[name].code, values=known[name].values, points=value)
            for name, value in sorted(points.items(), key=lambda item: -abs(item[1]))
            if abs(value) >= _LEAST
        ]
        prior = Evidence(code="prior", points=float(begins[place] - begins.mean()))
        found.append(Suspect(code=code, evidence=(*evidence, prior), probability=float(odds[place] / odds.sum())))
    return tuple(sorted(found, key=lambda suspect: -suspect.probability))


_NEAR = 0.6
"""A suspect is nearly tied with the best-supported one if it gets at least this fraction of its support."""


def supported(one: Fact, situation: str, suspects: Iterable[Suspect]) -> str:
    """Return the suspect that a fact supports most, or `unknown`. Near ties go to the most probable suspect."""
    fitted = _fitted()[situation]
    if one.feature not in fitted["coefficients"]:
        return "unknown"
    support = one.level * np.array(fitted["coefficients"][one.feature])
    near = [code for code, points in zip(fitted["classes"], support, strict=True) if points >= _NEAR * support.max()]
    return next((each.code for each in suspects if each.code in near), near[0])
