"""The kind of a mismatch that no explanation predicts token by token, with its probability.

The model is a multinomial logistic regression on `features`, fitted by `benchmarks/kinds/fit.py` to faults and healthy
runs of tiny models, whose values come from two real executions. `docs/evidence/check.md` has its calibration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from .features import REASONS, features
from .pair_data import PairData, once
from .where import where_text

ROUNDING = "rounding"
"""Name of the kind that is no fault."""
MAX_DISTANCE = 4.0
"""Bound of a feature, in standard deviations of the fitted runs: beyond it, a run is like none of them."""

MAX_REASONS = 3
"""Maximum number of features that a sentence names."""
SIZE = "the logits differ by {level:.2g} nats rms, but rounding of {dtypes} gives at most {allowed:.2g}"
_JUDGED = "{probability:.0%} probable; typical causes: HINT. The mismatch is {level:.2g} nats rms in logits, where rounding of {dtypes} gives at most {allowed:.2g}{since_text}{reason_text}{where_text}"


@dataclass(frozen=True, slots=True)
class Model:
    """A fitted multinomial logistic regression of C kinds on F features."""

    features: tuple[str, ...]
    kinds: tuple[str, ...]
    mean: np.ndarray
    """[F] mean of each feature."""
    scale: np.ndarray
    """[F] standard deviation of each feature."""
    coefficients: np.ndarray
    """[C, F] coefficients of the standardised features."""
    intercept: np.ndarray
    """[C]"""

    def distances(self, measured: dict[str, float]) -> np.ndarray:
        """Return the standardised features, [F]."""
        values = np.array([measured[name] for name in self.features])
        return np.asarray(np.clip((values - self.mean) / self.scale, -MAX_DISTANCE, MAX_DISTANCE))

    def probabilities(self, measured: dict[str, float]) -> np.ndarray:
        """Return the probability of each kind, [C]."""
        logits = self.coefficients @ self.distances(measured) + self.intercept
        odds = np.exp(logits - logits.max())
        return np.asarray(odds / odds.sum())


@cache
def model() -> Model:
    """Return the fitted model that comes with the package."""
    stored = json.loads(files(__package__).joinpath("kinds.json").read_text(encoding="ascii"))
    arrays = {name: np.array(stored[name]) for name in ("mean", "scale", "coefficients", "intercept")}
    return Model(features=tuple(stored["features"]), kinds=tuple(stored["kinds"]), **arrays)


@once
def probabilities(data: PairData) -> dict[str, float]:
    """Return the probability of each kind, rounding among them, most probable first."""
    found = model().probabilities(features(data))
    return {model().kinds[at]: float(found[at]) for at in np.argsort(-found, kind="stable")}


def reasons(data: PairData, kind: str) -> list[tuple[str, float, bool]]:
    """Return the features in REASONS that speak most for a kind against the others, at most MAX_REASONS, best first:
    name, value, and True if the value is above the mean of the fitted runs.
    """
    fitted, measured = model(), features(data)
    at = fitted.kinds.index(kind)
    others = np.array([probabilities(data)[name] for name in fitted.kinds])
    others[at] = 0.0
    against = others @ fitted.coefficients / max(float(others.sum()), 1e-12)
    away = fitted.distances(measured)
    worth = away * (fitted.coefficients[at] - against)
    order = [at for at in np.argsort(-worth) if worth[at] > 0.1 and fitted.features[at] in REASONS][:MAX_REASONS]
    return [(fitted.features[at], measured[fitted.features[at]], bool(away[at] > 0)) for at in order]


def judged(hint: str) -> str:
    """Return the sentence for a kind of mismatch; `hint` lists its typical causes."""
    return _JUDGED.replace("HINT", hint)


def judged_words(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the words of `judged` and `SIZE` that are not numbers of the finding."""
    said = []
    for at in range(MAX_REASONS):
        if (name := numbers.get(f"reason_{at}")) is not None:
            above, value = numbers[f"reason_{at}_above"], float(numbers[f"reason_{at}_value"])
            said.append(REASONS[name][0 if above else 1].format(v=value, times=np.exp(abs(value)), **numbers))
    where = ""
    if numbers.get("feature"):
        rows = f"{numbers['num_sequences']:,} of {numbers['of_sequences']:,} sequences"
        where = f"; it is {numbers['ratio']:.3g} times as large as elsewhere in {rows}, {where_text(numbers)}"
    since = numbers.get("since")
    return {
        "dtypes": " and ".join(numbers[f"dtype_{side}"] or "an unknown dtype" for side in "ab"),
        "reason_text": "".join(f"; {each}" for each in dict.fromkeys(said)),
        "where_text": where,
        "since_text": "" if since is None else f", from step {since} on",
    }
