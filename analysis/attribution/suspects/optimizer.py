"""Suspect: the learning rate, or the optimizer's other settings."""

from __future__ import annotations

import numpy as np

from ...advice import Advice
from .. import thresholds as t
from ..attribution import Suspect
from ..evidence import Evidence
from ..facts import Facts
from .timing import AFTER, FIRST, order, rises


def optimizer(facts: Facts) -> Suspect:
    """What speaks for the optimizer."""
    evidence = [*_spike(facts), *_settings(facts), *_steps(facts), *_norm(facts), *_dropped(facts)]
    return Suspect(
        code="optimizer",
        evidence=(*evidence, t.prior("optimizer")),
        next=Advice(
            remark="rerun from the last version before the fall with a tenth of the learning rate, all else alike"
        ),
    )


def _spike(facts: Facts) -> list[Evidence]:
    values = facts.values("learning_rate")
    known = np.isfinite(values) & (values > 0)
    if known.sum() < 3 or facts.fall is None:
        return []
    steps, values = facts.steps[known], values[known]
    place = _jump(values)
    if place is None:
        return []
    first = int(steps[place])
    factor = values[place:].max() / np.median(values[:place])
    said = f"the learning rate is {factor:.3g} times what it was from step {first} on"
    if first > max(facts.fall.high, facts.fall.fallen):
        return [Evidence(sentence=f"{said}, after the fall began", points=-t.WEAK)]
    near = first >= facts.fall.low - max(len(facts.steps) // 10, 5)
    return [
        Evidence(
            sentence=f"{said}, {'where' if near else 'before'} the fall begins", points=t.DECISIVE if near else t.MEDIUM
        )
    ]


def _jump(values: np.ndarray) -> int | None:
    """The first place at which a learning rate is a multiple of the median before it, which no straight warm-up is."""
    for place in range(3, len(values)):
        if values[place] > t.RATE_SPIKE * np.median(values[:place]):
            return place
    return None


def _settings(facts: Facts) -> list[Evidence]:
    found = []
    for name, (low, high, reason) in t.CUSTOMARY.items():
        value = facts.settings.get(name)
        if isinstance(value, float) and not low <= value <= high:
            found.append(Evidence(sentence=f"{name} is {value:g}; {reason}", points=t.STRONG))
    return found


def _steps(facts: Facts) -> list[Evidence]:
    """How far each update moves the weights."""
    values = facts.values("update_to_weight")
    known = values[np.isfinite(values)]
    if not len(known) or facts.fall is None:
        return []
    end = int(np.searchsorted(facts.steps[np.isfinite(values)], facts.fall.high, side="right"))
    size = float(np.median(known[: max(end, 1)]))
    points = -t.WEAK if size < t.LARGE_UPDATE else t.MEDIUM if size < t.HUGE_UPDATE else t.STRONG
    return [
        Evidence(sentence=f"an update moves the weights by {size:.2g} of their size", points=points),
        *_bursts(known[: int(np.searchsorted(facts.steps[np.isfinite(values)], facts.fall.fallen, side="right"))]),
    ]


def _bursts(sizes: np.ndarray) -> list[Evidence]:
    """Updates now and then that are a multiple of the others."""
    if len(sizes) < 10:
        return []
    usual = float(np.median(sizes))
    many = sizes > t.BURST * usual
    if many.sum() < 2:
        return []
    return [
        Evidence(
            sentence=f"{int(many.sum())} updates until then are more than {t.BURST:g} times as large as the median one, up "
            f"to {sizes.max() / usual:.3g} times",
            points=t.MEDIUM,
        )
    ]


def _dropped(facts: Facts) -> list[Evidence]:
    """A policy that becomes another one from one step to the next was moved too far by it."""
    drop = facts.drop
    if drop is None or not drop.is_of_policy:
        return []
    return [
        Evidence(
            sentence=f"the reward loses {min(drop.share, 1.0):.0%} of the fall at step {drop.step}, and the policy is another "
            "one from then on: so much in so few updates",
            points=t.STRONG if drop.is_early else t.MEDIUM,
        )
    ]


def _norm(facts: Facts) -> list[Evidence]:
    changes = rises(facts, "grad_norm", 3.0)
    if not changes or facts.fall is None:
        return []
    first = changes[0]
    factor = first.after / max(first.before, 1e-12)
    said = f"the gradient norm grows {factor:.3g}-fold from step {first.step} on"
    when = order(facts, first)
    if factor > t.NORM_JUMPS and when == FIRST:
        return [Evidence(sentence=f"{said}, before the fall", points=t.WEAK)]
    if when == AFTER:
        return [Evidence(sentence=f"{said}, after the fall began", points=-t.WEAK / 2)]
    return []
