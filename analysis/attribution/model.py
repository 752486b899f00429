"""Apply the fitted model: one multinomial logistic regression for a run alone, and one for a run beside its baseline run.

Fitted by benchmarks/laboratories/left_out.py on the facts of benchmark runs with a known cause.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .explained import unexplained
from .fact import Fact
from .suspect import Evidence, Suspect

ALONE, BESIDE = "alone", "beside"
_LEAST = 0.1
"""Minimum contribution to the log odds for a fact to be listed as evidence."""


@cache
def _fitted() -> Any:
    return json.loads((Path(__file__).parent / "model.json").read_text())


def judged(facts: Iterable[Fact], situation: str, model: Any = None) -> tuple[Suspect, ...]:
    """Return all suspects with probabilities that sum to 1, most probable first. Each fact's points are its contribution to
    the suspect's log odds, relative to the mean over all suspects."""
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


def supported(one: Fact, situation: str) -> str:
    """Return the suspect that a fact speaks for most; `unknown` if the model does not know the fact."""
    fitted = _fitted()[situation]
    if one.feature not in fitted["coefficients"]:
        return "unknown"
    return str(fitted["classes"][int(np.argmax(one.level * np.array(fitted["coefficients"][one.feature])))])
