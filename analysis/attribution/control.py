"""Compare a run with its baseline run, and turn their differences into evidence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ...schemas.passes import REFERENCE
from ..facts import thresholds as ft
from ..facts.mismatch import FROM_START
from ..facts.recorded import read_recorded
from ..facts.relations import correlation, length_correlation, relation
from ..facts.repeats import repeated_responses
from ..facts.rollouts import Rollouts, least_reward, reward_differences, shared_responses
from ..facts.two_runs import moved_tokens
from ..statement import Measured, Statement
from . import thresholds as t
from .attribution import Difference
from .divergence import BY_LENGTH, ENGINE, REWARDS, SAMPLING, SCORING, SUSPECTS_OF, UPDATE, Divergence, first_divergence
from .odds import ranked
from .run_facts import Facts
from .settings import suspect_of
from .suspect import Evidence, Suspect
from .suspects.advantages import one_sided
from .suspects.lag import declared_lag, is_farther_behind
from .suspects.mismatch import cause_of_weights, is_of_other_rows, trainer_disagrees


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlComparison:
    """The result of comparing a run with its baseline run."""

    suspects: tuple[Suspect, ...]
    is_intervention: bool
    differences: tuple[Difference, ...]
    notes: tuple[Statement, ...]
    parted: Divergence | None = None
    """The first difference between runs that were identical until then; None if they never were."""


def compare(facts: Facts, control: Facts, suspects: tuple[Suspect, ...]) -> ControlComparison:
    """Reweigh a run's suspects by its differences from a baseline run.

    If only the run collapsed, a difference caused it; if both runs collapsed, none did. If the runs are bitwise
    identical up to a step, only the first difference counts. Otherwise the differences share the probability in
    proportion to the evidence that the run alone gives for each.
    """
    shares = shares_prompts(facts, control)
    notes = () if shares else (Statement(code="other_prompts"),)
    parted = _decisive(facts, control, first_divergence(facts, control)) if shares else None
    first = tuple(_of_divergence(facts, control, suspects, parted)) if parted else ()
    told = {(each.suspect, each.code) for each in first}
    rest = tuple(
        each for each in _differences(facts, control, suspects) if not first or (each.suspect, each.code) not in told
    )
    differences = (*first, *rest)
    codes = {difference.suspect for difference in first or differences}
    if facts.fall is None:
        return ControlComparison(
            suspects=(), is_intervention=shares, differences=differences, notes=notes, parted=parted
        )
    suspects = ranked(suspects, t.WORTH_BESIDE)
    if any(difference.code in ("rewards_by_length", BY_LENGTH) for difference in differences):
        suspects = _without(suspects, "reward", "rewards_changed", "rewards_of_other_rule")
    fell_too = control.fall is not None and control.fall.share > t.FELL_TOO * facts.fall.share
    if fell_too:
        suspects = _with(suspects, codes, Evidence(code="control_differs_and_fell", points=-t.CONTROL))
    elif codes:
        suspects = _with(suspects, codes, Evidence(code="control_differs_and_did_not_fall", points=t.CONTROL))
        others = {suspect.code for suspect in suspects} - codes
        if parted is not None:
            suspects = _with(suspects, others, Evidence(code="control_is_alike", points=-t.PARTS_FIRST))
            for code, evidence in _of_update(facts, control, parted) if parted.code == UPDATE else ():
                suspects = _with(suspects, {code} & codes, evidence)
        elif shares and len(codes) == 1 and all(difference.code in _GIVEN for difference in differences):
            suspects = _with(suspects, others - {"unknown"}, Evidence(code="control_is_alike", points=-t.DECISIVE))
        if parted is None and any(difference.code == "entropy_higher" for difference in differences):
            suspects = _with(suspects, {"entropy"}, Evidence(code="entropy_parts_first", points=t.MEDIUM))
    else:
        notes = (*notes, Statement(code="no_difference"))
    return ControlComparison(
        suspects=suspects, is_intervention=shares and len(codes) == 1,
        differences=differences, notes=notes,
        parted=parted,
    )  # fmt: skip


def _decisive(facts: Facts, control: Facts, parted: Divergence | None) -> Divergence | None:
    """Return the first difference if it can have caused the drop: not after the drop, and not by rounding drift."""
    if parted is None or not parted.is_sudden:
        return None
    if facts.fall is not None and parted.step > facts.fall.latest:
        return None
    is_far = float(parted.values.get("apart", 0.0)) >= t.MATERIAL_MISMATCH
    if parted.code in (ENGINE, SCORING) and not is_far and not _is_material(facts, control):
        return None
    if parted.code == SAMPLING and parted.num_before == 0:  # the runs used different random seeds
        return None
    others = int(parted.values.get("num_sequences", 0)) - int(parted.values.get("num_equal", 0))
    is_few = parted.code == SAMPLING and others < t.MANY_PART * int(parted.values["num_sequences"])
    return None if is_few else parted


def _of_divergence(
    facts: Facts, control: Facts, suspects: tuple[Suspect, ...], parted: Divergence
) -> Iterator[Difference]:
    """Yield the first difference between the runs once for each suspect that it may support."""
    codes = SUSPECTS_OF.get(parted.code, ())
    held = cause_of_weights(facts) if parted.code == ENGINE else None
    if held is not None:
        codes = ("staleness" if held == "stale_weights" else "mismatch",)
    elif parted.code == ENGINE and is_farther_behind(facts, control):
        codes = ("staleness",)
    elif parted.code == ENGINE and parted.num_before == 0:  # weights cannot be stale yet
        codes = ("mismatch",)
    if parted.code == SCORING and _lasts(facts, parted.step) and not trainer_disagrees(facts):
        codes = ("mismatch",)  # broken or reloaded weights reach the engine with the next update
    if parted.code == REWARDS and facts.graded_elsewhere is not None:
        codes = ("pairing",)
    changed = [each for each in _changed(facts, control, suspects) if each.values["is_set"]]
    given = {each.suspect for each in (*_rates(facts, control), *_settings(facts, control), *changed)}
    if parted.code == UPDATE:
        unseen = () if np.isfinite(facts.rollouts.at([parted.step]).advantage).any() else ("advantages", "pairing")
        # With a lagging engine, logprobs from other rows look like a different update.
        codes = ("pairing",) if is_of_other_rows(facts) else ("unknown", "optimizer", "entropy", "reference", *unseen)
    # A changed setting acts through the update or the sampling; anywhere else it is a separate difference.
    own = () if given and parted.code in (UPDATE, SAMPLING) else codes
    codes = (*own, *sorted(given - set(own)))
    for code in codes:
        yield Difference(suspect=code, code=parted.code, values={"step": parted.step, **parted.values})


def _lasts(facts: Facts, step: int) -> bool:
    """Return True if the mismatch found at a step persists some updates later."""
    values = facts.values("mean_abs_d")
    at = int(np.searchsorted(facts.steps, step))
    later = values[at + _UPDATED : at + _UPDATED + _LATER]
    later = later[np.isfinite(later)]
    return len(later) > 0 and float(np.median(later)) >= t.LASTS * float(values[at])


def _of_update(facts: Facts, control: Facts, parted: Divergence) -> Iterator[tuple[str, Evidence]]:
    """Yield evidence for the reason why an update differs although its inputs are identical."""
    step = parted.step
    yield from ((code, Evidence(code="update_differs", points=points)) for code, points in t.OF_UPDATES.items())
    yield from _by_distance(facts, control, step)
    gradient, update, moment = (_ratio(facts, control, name, step) for name in _OF_UPDATE)
    apart = float(parted.values.get("apart", 0.0))
    is_equal = (
        abs(gradient - 1) <= _LOGGED and apart >= t.SHOWS_IN_GRADIENT
    )  # a small loss term hardly changes the gradient
    values: dict[str, Measured] = {"step": step, "factor": gradient}
    if is_equal:
        yield from ((code, Evidence(code="gradient_is_equal", values=values, points=-t.CERTAIN)) for code in _OF_LOSS)
    elif abs(gradient - 1) > _LOGGED:
        yield "optimizer", Evidence(code="gradient_differs", values=values, points=-t.MEDIUM)
    if gradient > t.GRADIENT_GROWS:
        yield "entropy", Evidence(code="gradient_grows", values=values, points=-t.STRONG)
        if np.isfinite(facts.rollouts.reference).any():
            yield "reference", Evidence(code="gradient_grows", values=values, points=t.STRONG)
    values = {"step": step, "factor": update}
    by_optimizer = (
        max(update / max(gradient, 1.0), gradient / max(update, 1e-12)) if np.isfinite(update * gradient) else 1.0
    )
    squared = 1.0 if math.isnan(gradient) else gradient**2  # Adam's second moment averages the square
    is_other_moment = moment < min(1.0, squared) - t.MOMENT_DIFFERS or moment > max(1.0, squared) + t.MOMENT_DIFFERS
    if by_optimizer >= t.UPDATE_GROWS or is_other_moment:
        yield "optimizer", Evidence(code="update_is_other", values=values, points=t.CERTAIN)
    elif is_equal and abs(update - 1) <= _LOGGED:
        yield "unknown", Evidence(code="update_is_equal", values=values, points=t.DECISIVE)
        yield "optimizer", Evidence(code="update_is_equal", values=values, points=-t.DECISIVE)
    if not apart <= t.WEIGHTS_JUMP:
        values = {"step": step, "apart": apart}
        yield from ((code, Evidence(code="weights_jump", values=values, points=-t.DECISIVE)) for code in _OF_LOSS)
        yield "unknown", Evidence(code="weights_jump", values=values, points=t.MEDIUM)
    yield from _of_loss(facts, control, step)
    yield from _away(facts, control, parted)
    if apart <= t.WEIGHTS_JUMP / 4:
        for difference in _entropy(facts, control, step):
            yield "entropy", Evidence(code="entropy_parts_first", values=difference.values, points=t.STRONG)


_UPDATED, _LATER = 2, 6
"""Number of updates until the engine has the weights trained at a step, and number of steps compared after that."""
_LOGGED = 1e-5
"""Relative difference below which two logged numbers count as equal."""
_OF_UPDATE = ("grad_norm", "update_to_weight", "adam_second_moment")
_OF_LOSS = ("entropy", "reference")


def _ratio(facts: Facts, control: Facts, name: str, step: int) -> float:
    """Return a series at a step divided by the baseline's; NaN if either value is missing."""
    of_run, of_control = (_at(run, name, step) for run in (facts, control))
    return of_run / of_control if of_control else math.nan


def _of_loss(facts: Facts, control: Facts, step: int) -> Iterator[tuple[str, Evidence]]:
    """Yield evidence for a bonus or penalty term in the loss, from its distance to the baseline run's."""
    usual = (
        float(np.nanmedian(np.abs(control.values("loss")))) if np.isfinite(control.values("loss")).any() else math.nan
    )
    higher = (_at(facts, "loss", step) - _at(control, "loss", step)) / max(usual, 1e-12)
    if not abs(higher) >= t.LOSS_MOVES:
        return
    values = {"step": step, "factor": abs(higher)}
    code = "loss_is_higher" if higher > 0 else "loss_is_lower"
    yield "entropy", Evidence(code=code, values=values, points=-t.STRONG if higher > 0 else t.STRONG)
    if higher > 0 and np.isfinite(facts.rollouts.reference).any():
        yield "reference", Evidence(code=code, values=values, points=t.STRONG)
    if higher < 0:
        yield "unknown", Evidence(code=code, values=values, points=-t.STRONG)


def _by_distance(facts: Facts, control: Facts, step: int) -> Iterator[tuple[str, Evidence]]:
    """Yield evidence for a KL term if changes of logprobs correlate more with the distance to the reference than with
    logprobs."""
    after = next((int(each) for each in facts.steps if each > step), None)
    if after is None or not np.isfinite(facts.rollouts.reference).any():
        return
    moved = moved_tokens(facts.database, control.database, after, facts.pair[0], REFERENCE)
    known = np.isfinite(moved.distance)
    if known.sum() < t.FEWEST_MOVED:
        return
    by_distance = correlation(moved.moved[known], moved.distance[known])
    by_logprob = correlation(moved.moved[known], moved.logprob[known])
    # An immediate and complete return to the reference means that its weights were reloaded.
    if t.MOVED_BY_DISTANCE <= abs(by_distance) < t.RELOADED and abs(by_distance) > abs(by_logprob):
        values = {"step": step, "correlation": by_distance}
        yield "reference", Evidence(code="moved_by_distance", values=values, points=t.STRONG)


def _away(facts: Facts, control: Facts, parted: Divergence) -> Iterator[tuple[str, Evidence]]:
    """Yield evidence against a KL or entropy term if the policy moves away from its reference at once."""
    distances = [run.rollouts.reference_distance_by_step for run in (facts, control)]
    near = [distance[(steps > parted.step) & (steps <= parted.step + 3)] for steps, distance in distances]
    if min(map(len, near)) == 0:
        return
    farther = float(near[0].mean() - near[1].mean())
    if farther > t.AWAY_FROM_REFERENCE:
        values = {"step": parted.step, "farther": farther}
        yield from (
            (code, Evidence(code="leaves_reference", values=values, points=-t.STRONG))
            for code in ("entropy", "reference")
        )


_GIVEN = (
    "prompts",
    "rewards",
    "rewards_by_length",
    "rewards_permuted",
    "advantages",
    "lag",
    "learning_rate",
    "setting",
    "changed",
)
"""Codes of differences in inputs, which no other difference can cause."""


def _with(suspects: tuple[Suspect, ...], codes: set[str], evidence: Evidence) -> tuple[Suspect, ...]:
    """Return all suspects, ranked again after adding a piece of evidence to those in `codes`."""
    return ranked(
        [
            replace(suspect, evidence=(*suspect.evidence, evidence)) if suspect.code in codes else suspect
            for suspect in suspects
        ],
        t.WORTH_BESIDE,
    )


def _without(suspects: tuple[Suspect, ...], code: str, *evidence: str) -> tuple[Suspect, ...]:
    """Return all suspects, ranked again without one suspect's evidence that the baseline run supersedes."""
    return ranked(
        [
            replace(suspect, evidence=tuple(each for each in suspect.evidence if each.code not in evidence))
            if suspect.code == code
            else suspect
            for suspect in suspects
        ],
        t.WORTH_BESIDE,
    )


def _differences(facts: Facts, control: Facts, suspects: tuple[Suspect, ...]) -> Iterator[Difference]:
    """Yield the differences between two runs that their traces show."""
    yield from _prompts(facts, control, suspects)
    for find in (_rewards, _advantages, _lags):
        yield from find(facts, control)
    given = [*_rates(facts, control), *_settings(facts, control), *_changed(facts, control, suspects)]
    # If no input differs, find the first update that does.
    first = [] if given else list(_first_update(facts, control))
    parted = [
        int(each.values["step"]) for each in first if "control" in each.values
    ]  # updates whose gradient norms differ
    yield from _mismatches(facts, control, suspects, min(parted, default=None))
    yield from given
    yield from first
    if any(each.suspect == "entropy" for each in first):
        yield from _entropy(facts, control, int(first[0].values["step"]))


def shares_prompts(facts: Facts, control: Facts) -> bool:
    """Return True if the first steps of both runs have the same prompts in the same order."""
    first, second = (_of_first_step(run.rollouts) for run in (facts, control))
    return len(first.prompt) == len(second.prompt) > 0 and bool((first.prompt == second.prompt).all())


def _of_first_step(rollouts: Rollouts) -> Rollouts:
    return rollouts.until(int(rollouts.step[0])) if len(rollouts.step) else rollouts


def _rewards(facts: Facts, control: Facts) -> Iterator[Difference]:
    """Yield a difference if identical responses to identical prompts get different rewards in the two runs."""
    a, b = facts.rollouts, control.rollouts
    at_a, at_b = shared_responses(a, b)
    difference, differs = reward_differences(a.reward[at_a], b.reward[at_b], b.reward)
    known = np.isfinite(difference)
    if known.sum() < 10:
        return
    differs &= np.abs(difference) > least_reward(b)
    share = float(differs[known].mean())
    if share <= t.UNEQUAL:
        return
    # A reward that is noisy within the baseline run differs between the runs anyway.
    by_itself = _noise(b)
    if share <= t.UNEQUAL + by_itself / t.WAS_THERE:
        return
    values = {"share": share, "num_responses": int(known.sum())}
    chosen = known & differs
    length = length_correlation(difference[chosen], a.length[at_a][chosen], a.step[at_a][chosen])
    if abs(length) > ft.LENGTH_EXPLAINS:
        yield Difference(suspect="length", code="rewards_by_length", values=values | {"correlation": length})
    elif permuted(a, b) or facts.rewards_lie_off:
        yield Difference(suspect="pairing", code="rewards_permuted", values=values)
    else:
        yield Difference(suspect="reward", code="rewards", values=values)


def _noise(rollouts: Rollouts) -> float:
    """Return the share of repeated responses with two different rewards; 0 if no response repeats."""
    unequal = repeated_responses(rollouts).unequal
    return 0.0 if math.isnan(unequal) else unequal


def permuted(a: Rollouts, b: Rollouts) -> bool:
    """Return True if the first step whose rewards differ has the baseline run's rewards in another order."""
    for step in np.unique(a.step):
        one, two = a.step == step, b.step == step
        if one.sum() != two.sum() or not (a.whole[one] == b.whole[two]).all():
            return False
        if not np.allclose(a.reward[one], b.reward[two], equal_nan=True):
            return bool(np.allclose(np.sort(a.reward[one]), np.sort(b.reward[two]), equal_nan=True))
    return False


def _advantages(facts: Facts, control: Facts) -> Iterator[Difference]:
    of_run, of_control = (relation(run.since_fall, "reward", "advantage").by_group for run in (facts, control))
    if of_run < t.ADVANTAGE_AGREES <= of_control:
        is_theirs = of_run < t.INVERTED_ADVANTAGES or bool(one_sided(facts))
        yield _difference("advantages" if is_theirs else "pairing", "advantages", of_run, of_control)


def _lags(facts: Facts, control: Facts) -> Iterator[Difference]:
    if is_farther_behind(facts, control):
        yield _difference("staleness", "lag", declared_lag(facts).at_fall, declared_lag(control).at_fall)


def _mismatches(
    facts: Facts, control: Facts, suspects: tuple[Suspect, ...], parted: int | None = None
) -> Iterator[Difference]:
    """Yield a mismatch that the baseline run lacks, attributed to the engine or to stale weights.

    The suspect is the one more probable in the run alone. A mismatch that begins after the first step with a different
    gradient is a consequence, so it is not yielded.
    """
    run, other = facts.mismatch, control.mismatch
    if run is None or other is None or not _is_material(facts, control):
        return
    explained = next((suspect.code for suspect in suspects if suspect.code in ("mismatch", "staleness")), "mismatch")
    if is_of_other_rows(facts):
        explained = "pairing"
    if is_farther_behind(facts, control):
        return
    is_earlier = facts.earlier_weights is not None and facts.earlier_weights.explains
    if explained == "staleness" and (declared_lag(facts).at_fall >= 1 or run.begins == FROM_START) and not is_earlier:
        explained = "mismatch"  # the baseline run has the same lag, or no weights can be stale yet
    if parted is None and declared_lag(facts).at_fall >= 1:
        parted = _first_parted(facts, control)  # once policies differ, the same lag can cause a different mismatch
    if parted is None and facts.drop is not None and facts.drop.is_of_policy:
        parted = facts.drop.step - int(ft.AHEAD) - 1  # a small mismatch cannot change the policy at once
    if parted is not None and not _is_apart_by(facts, control, parted):
        return
    yield _difference(explained, "mismatch", run.size, other.size)


def _is_material(facts: Facts, control: Facts) -> bool:
    """Return True if the run's mismatch is larger than rounding and than the baseline run's mismatch."""
    run, other = facts.mismatch, control.mismatch
    return (
        run is not None
        and run.size >= t.MATERIAL_MISMATCH
        and (other is None or run.size >= t.MISMATCH_DIFFERS * other.size)
    )


def _is_apart_by(facts: Facts, control: Facts, step: int) -> bool:
    """Return True if the mismatch exceeds the baseline run's soon after a step, or if that is unknown."""
    until = facts.steps <= step + ft.AHEAD
    size = facts.values("mean_abs_d")[until]
    beside = control.values("mean_abs_d")[: len(size)]
    n = min(len(size), len(beside))
    known = np.isfinite(size[:n]) & np.isfinite(beside[:n])
    apart = (size[:n] > t.MATERIAL_MISMATCH) & (size[:n] > t.MISMATCH_DIFFERS * beside[:n])
    return not known.any() or bool(apart[known].any())


def _first_parted(facts: Facts, control: Facts) -> int | None:
    """Return the first step at which the runs' sequences differ, or None."""
    a, b = facts.rollouts, control.rollouts
    shared = np.intersect1d(np.unique(a.step), np.unique(b.step))
    return next(
        (int(step) for step in shared if not np.array_equal(a.whole[a.step == step], b.whole[b.step == step])), None
    )


def _prompts(facts: Facts, control: Facts, suspects: tuple[Suspect, ...]) -> Iterator[Difference]:
    """Yield a difference if the prompts are equal at the first step and differ from some later step on.

    If responses differed before, a curriculum or an environment may have chosen the prompts by them; then the run's own
    prompts must shift, too.
    """
    if not shares_prompts(facts, control):
        return
    steps = np.intersect1d(np.unique(facts.rollouts.step), np.unique(control.rollouts.step))
    a, b = facts.rollouts, control.rollouts
    differing = [int(step) for step in steps if not np.array_equal(a.prompts_of(step), b.prompts_of(step))]
    if not differing:
        return
    parted = _first_parted(facts, control)
    follows = parted is not None and parted < differing[0]
    if not follows or any(each.code == "prompts_changed" for suspect in suspects for each in suspect.evidence):
        yield Difference(suspect="data", code="prompts", values={"step": differing[0], "num_steps": len(differing)})


def _changed(facts: Facts, control: Facts, suspects: tuple[Suspect, ...]) -> Iterator[Difference]:
    """Yield the run's changes near the drop that the baseline run lacks."""
    known = {(change.series, change.step) for change in read_recorded(control.database, control.pair)}
    for suspect in suspects:
        for each in suspect.evidence:
            series, step = each.values.get("series"), each.values.get("step")
            if each.points > 0 and each.code in _CHANGES and (series, step) not in known:
                values = dict(each.values) | {
                    "series": str(series or each.code),
                    "is_set": int(each.code == "setting_changed"),
                }
                yield Difference(suspect=suspect.code, code="changed", values=values)


_CHANGES = (
    "setting_changed",
    "reference_changed",
    "reference_jumps",
    "distance_jumps",
    "responses_cut",
    "advantages_changed",
)
"""Evidence codes that count as a difference if the baseline run lacks the evidence."""


def _rates(facts: Facts, control: Facts) -> Iterator[Difference]:
    of_run, of_control = facts.values("learning_rate"), control.values("learning_rate")
    n = min(len(of_run), len(of_control))
    differs = np.flatnonzero(np.abs(of_run[:n] - of_control[:n]) > 1e-3 * np.abs(of_control[:n]))
    if len(differs):
        first = int(differs[0])
        yield _difference(
            "optimizer", "learning_rate", float(of_run[first]), float(of_control[first]), step=int(facts.steps[first])
        )


def _settings(facts: Facts, control: Facts) -> Iterator[Difference]:
    """Yield settings with different values, except those that belong to no suspect, such as run names."""
    for name in sorted(facts.settings.keys() & control.settings.keys()):
        suspect = suspect_of(name)
        if suspect != "unknown" and facts.settings[name] != control.settings[name]:
            yield _difference(suspect, "setting", facts.settings[name], control.settings[name], setting=name)


def _first_update(facts: Facts, control: Facts) -> Iterator[Difference]:
    """Yield the first update whose weights differ although sequences, rewards and advantages are equal."""
    before = None
    until = np.inf if facts.fall is None else facts.fall.latest
    for step in facts.steps[facts.steps <= until]:
        a, b = facts.rollouts, control.rollouts
        one, two = a.step == step, b.step == step
        if one.sum() != two.sum() or not one.any():
            return
        moved = np.abs(a.likelihood[one] - b.likelihood[two])[a.whole[one] == b.whole[two]]
        if len(moved) and np.nanmean(moved) > t.WEIGHTS_DIFFER:
            if before is not None:
                yield from _of_first_update(facts, control, before)
            return
        same = [np.array_equal(x[one], y[two], equal_nan=True) for x, y in _inputs(a, b)]
        if not all(same) or not _same_logprobs(a.sampled[one], b.sampled[two]):
            return
        before = int(step)


def _entropy(facts: Facts, control: Facts, step: int) -> Iterator[Difference]:
    """Yield a difference if entropy is above the baseline's at almost all steps after the first differing update."""
    since = facts.steps > step
    if facts.fall is not None:
        since &= facts.steps <= max(facts.fall.interval[1], step + t.ENTROPY_STEPS)
    of_run, of_control = facts.values("entropy"), control.values("entropy")
    n = min(len(of_run), len(of_control))
    apart = (of_run[:n] - of_control[:n])[since[:n]]
    apart = apart[np.isfinite(apart)]
    if len(apart) >= t.ENTROPY_FEWEST and float((apart > 0).mean()) >= t.ENTROPY_HIGHER:
        values = {"step": step, "share": float((apart > 0).mean()), "num_steps": len(apart)}
        yield Difference(suspect="entropy", code="entropy_higher", values=values)


def _inputs(a: Rollouts, b: Rollouts) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(a.whole.astype(float), b.whole.astype(float)), (a.reward, b.reward), (a.advantage, b.advantage)]


def _same_logprobs(a: np.ndarray, b: np.ndarray) -> bool:
    """Return True if the engines' logprobs of two runs at a step are equal wherever both are known."""
    apart = np.abs(a - b)[np.isfinite(a) & np.isfinite(b)]
    return not len(apart) or float(apart.mean()) <= t.WEIGHTS_DIFFER


def _of_first_update(facts: Facts, control: Facts, step: int) -> Iterator[Difference]:
    of_run, of_control = (_at(run, "grad_norm", step) for run in (facts, control))
    own = facts.rollouts.at([step]).advantage
    has_advantages = bool(np.isfinite(own).any())
    unseen = () if has_advantages else ("advantages",)
    if not np.isfinite(of_run - of_control):
        code = "update_or_loss" if has_advantages else "update_or_loss_without_advantages"
        for suspect in ("unknown", "optimizer", "entropy", "reference", *unseen):
            yield Difference(suspect=suspect, code=code, values={"step": step})
    elif abs(of_run - of_control) > t.NORM_DIFFERS * abs(of_control):
        code = "gradient" if has_advantages else "gradient_without_advantages"
        for suspect in ("unknown", "entropy", "reference", *unseen):
            yield _difference(suspect, code, of_run, of_control, step=step)
    else:
        for suspect in ("unknown", "optimizer"):  # `unknown` covers weights that were broken or reloaded
            yield Difference(suspect=suspect, code="update", values={"step": step})


def _difference(suspect: str, code: str, run: Measured, control: Measured, **values: Measured) -> Difference:
    return Difference(suspect=suspect, code=code, values={"run": run, "control": control, **values})


def _at(facts: Facts, name: str, step: int) -> float:
    return float(facts.values(name)[np.searchsorted(facts.steps, step)])
