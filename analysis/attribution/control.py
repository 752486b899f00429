"""A run beside its control: what the two differ in, and what follows from whether the control fell too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from . import thresholds as t
from .attribution import Suspect
from .evidence import Evidence
from .facts import Facts
from .odds import ranked
from .rollouts import Rollouts, relation
from .suspects.lag import declared_lag


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing in which two runs differ."""

    suspect: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A run against its control."""

    suspects: tuple[Suspect, ...]
    is_intervention: bool
    differences: tuple[str, ...]
    notes: tuple[str, ...]


def compare(facts: Facts, control: Facts, own: tuple[Suspect, ...]) -> Compared:
    """Let a control decide between suspects.

    Where the run fell and the control did not, what they differ in is the cause; where both fell alike, it is not.
    Several differences share the probability by what speaks for each in the run alone.
    """
    shares = shares_prompts(facts, control)
    notes = () if shares else (
        "the first steps of run and control do not share their prompts: differences between them are an observation, "
        "for an intervention rerun with the same seeds and data",
    )  # fmt: skip
    differences = tuple(_differences(facts, control, own))
    codes = {each.suspect for each in differences}
    said = tuple(each.sentence for each in differences)
    if facts.fall is None:
        return Compared(suspects=(), is_intervention=shares, differences=said, notes=notes)
    fell_too = control.fall is not None and control.fall.share > t.FELL_TOO * facts.fall.share
    if fell_too:
        decided = _weighed(
            own, lambda code: -t.CONTROL if code in codes else 0.0, "the control differs in this and fell too"
        )
    elif codes:
        decided = _weighed(
            own, lambda code: t.CONTROL if code in codes else 0.0, "the control differs in this and did not fall"
        )
    else:
        decided = own
        notes = (*notes, "run and control differ in nothing that the traces hold, and only the run fell")
    return Compared(suspects=decided, is_intervention=shares and bool(codes), differences=said, notes=notes)


def _weighed(own: tuple[Suspect, ...], points: Callable[[str], float], sentence: str) -> tuple[Suspect, ...]:
    judged = [
        replace(suspect, evidence=(*suspect.evidence, Evidence(sentence=sentence, points=points(suspect.code))))
        if points(suspect.code)
        else suspect
        for suspect in own
    ]
    return ranked(judged)


def _differences(facts: Facts, control: Facts, own: tuple[Suspect, ...]) -> Iterator[Difference]:
    """What the two differ in, as far as their traces show."""
    for find in (_rewards, _advantages, _lags):
        yield from find(facts, control)
    yield from _gaps(facts, control, own)
    for find in (_rates, _settings):
        yield from find(facts, control)
    yield from _first_update(facts, control)


def shares_prompts(facts: Facts, control: Facts) -> bool:
    """Whether the first steps of both ask the same prompts in the same order."""
    first, second = (_of_first_step(each.rollouts) for each in (facts, control))
    return len(first.prompt) == len(second.prompt) > 0 and bool((first.prompt == second.prompt).all())


def _of_first_step(rollouts: Rollouts) -> Rollouts:
    return rollouts.until(int(rollouts.step[0])) if len(rollouts.step) else rollouts


def _rewards(facts: Facts, control: Facts) -> Iterator[Difference]:
    """The same response to the same prompt earns something else."""
    a, b = facts.rollouts, control.rollouts
    _, at_a, at_b = np.intersect1d(a.whole, b.whole, return_indices=True)
    gap = a.reward[at_a] - b.reward[at_b]
    known = np.isfinite(gap)
    if known.sum() < 10:
        return
    differs = np.abs(gap) > 1e-6 * max(1.0, float(np.nanmax(np.abs(b.reward))))
    share = float(differs[known].mean())
    if share <= t.UNEQUAL:
        return
    said = f"{share:.0%} of {int(known.sum()):,} responses that both runs gave earn another reward in each"
    length = _correlation(gap[known & differs], a.length[at_a][known & differs])
    if length > t.LENGTH_EXPLAINS:
        yield Difference(suspect="length", sentence=f"{said}, the more the longer they are (correlation {length:.2f})")
    elif _permuted(a, b):
        yield Difference(
            suspect="pairing", sentence=f"{said}, and a step's rewards are those of the control in another order"
        )
    else:
        yield Difference(suspect="reward", sentence=said)


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's; 0 where one of them has no spread."""
    return float(np.corrcoef(x, y)[0, 1]) if len(x) > 2 and np.ptp(x) > 0 and np.ptp(y) > 0 else 0.0


def _permuted(a: Rollouts, b: Rollouts) -> bool:
    """Whether some step has the control's responses and its rewards, but not in the control's order."""
    for step in np.unique(a.step):
        one, two = a.step == step, b.step == step
        if one.sum() != two.sum() or not (a.whole[one] == b.whole[two]).all():
            return False
        if not np.allclose(a.reward[one], b.reward[two], equal_nan=True):
            return bool(np.allclose(np.sort(a.reward[one]), np.sort(b.reward[two]), equal_nan=True))
    return False


def _advantages(facts: Facts, control: Facts) -> Iterator[Difference]:
    own, other = (relation(each.rollouts, "reward", "advantage").by_group for each in (facts, control))
    if own < t.ADVANTAGE_AGREES <= other:
        yield Difference(
            suspect="pairing",
            sentence=f"advantages follow rewards in the control (correlation {other:.2f}) and not in the run ({own:.2f})",
        )


def _lags(facts: Facts, control: Facts) -> Iterator[Difference]:
    own, other = declared_lag(facts), declared_lag(control)
    if own - other >= 1:
        yield Difference(
            suspect="staleness",
            sentence=f"the run's sequences were sampled {own:g} updates before they were scored, the control's {other:g}",
        )


def _gaps(facts: Facts, control: Facts, suspects: tuple[Suspect, ...]) -> Iterator[Difference]:
    """A gap that the control has not, of the engine or of weights behind, whichever the run alone makes more probable."""
    own, other = facts.gap, control.gap
    if own is None or other is None or own.size < t.MATERIAL_GAP or own.size < t.GAP_DIFFERS * other.size:
        return
    explained = next((each.code for each in suspects if each.code in ("mismatch", "staleness")), "mismatch")
    if declared_lag(facts) - declared_lag(control) >= 1:
        return
    said = f"mean |d| where the fall begins is {own.size:.2g} nats in the run; in the control it is {other.size:.2g}"
    yield Difference(suspect=explained, sentence=said)


def _rates(facts: Facts, control: Facts) -> Iterator[Difference]:
    own, other = facts.values("learning_rate"), control.values("learning_rate")
    n = min(len(own), len(other))
    differs = np.flatnonzero(np.abs(own[:n] - other[:n]) > 1e-3 * np.abs(other[:n]))
    if len(differs):
        first = differs[0]
        yield Difference(
            suspect="optimizer",
            sentence=f"from step {facts.steps[first]} on the learning rate is {own[first]:.3g} in the run and "
            f"{other[first]:.3g} in the control",
        )


_OF_OPTIMIZER = ("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "optim")


def _settings(facts: Facts, control: Facts) -> Iterator[Difference]:
    for name in _OF_OPTIMIZER:
        own, other = facts.settings.get(name), control.settings.get(name)
        if own != other and name in facts.settings and name in control.settings:
            yield Difference(suspect="optimizer", sentence=f"{name} is {own} in the run and {other} in the control")
    for name in sorted(facts.settings.keys() & control.settings.keys()):
        if "entropy" in name and facts.settings[name] != control.settings[name]:
            said = f"{name} is {facts.settings[name]} in the run and {control.settings[name]} in the control"
            yield Difference(suspect="entropy", sentence=said)


def _first_update(facts: Facts, control: Facts) -> Iterator[Difference]:
    """The first update that leaves other weights, though it was given the same sequences, rewards and advantages."""
    before = None
    for step in facts.steps[: t.FIRST_STEPS]:
        a, b = (each.rollouts for each in (facts, control))
        one, two = a.step == step, b.step == step
        if one.sum() != two.sum() or not one.any():
            return
        moved = np.abs(a.likelihood[one] - b.likelihood[two])[a.whole[one] == b.whole[two]]
        if len(moved) and np.nanmean(moved) > t.WEIGHTS_DIFFER:
            if before is not None:
                yield from _of_update(facts, control, before)
            return
        same = [np.array_equal(x[one], y[two], equal_nan=True) for x, y in _inputs(a, b)]
        if not all(same):
            return
        before = int(step)


def _inputs(a: Rollouts, b: Rollouts) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(a.whole.astype(float), b.whole.astype(float)), (a.reward, b.reward), (a.advantage, b.advantage)]


def _of_update(facts: Facts, control: Facts, step: int) -> Iterator[Difference]:
    own, other = (_at(each, "grad_norm", step) for each in (facts, control))
    if abs(own - other) > t.NORM_DIFFERS * abs(other):
        yield Difference(
            suspect="entropy",
            sentence=f"at step {step} the same sequences, rewards and advantages give a gradient of norm {own:.4g} in the "
            f"run and {other:.4g} in the control: the loss has another term (an entropy bonus, a KL term)",
        )
    else:
        yield Difference(
            suspect="optimizer",
            sentence=f"the update of step {step} leaves other weights than the control's, from the same sequences, "
            "rewards, advantages and gradient norm: the optimizer differs",
        )


def _at(facts: Facts, name: str, step: int) -> float:
    return float(facts.values(name)[np.searchsorted(facts.steps, step)])
