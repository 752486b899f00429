"""Suspect: sampling engine and trainer disagree under the same weights."""

from __future__ import annotations

import shlex
from dataclasses import replace

import numpy as np

from ...advice import Advice
from ...check.finding import Finding
from ...facts import thresholds as ft
from ...facts.mismatch import FROM_START, FROM_UPDATES
from ...statement import Measured
from .. import thresholds as t
from ..run_facts import Facts
from ..settings import is_of_sampling
from ..suspect import Evidence, Suspect
from .changed import holds, settings
from .lag import declared_lag, is_declared_fresh, is_grown_beside_lag
from .timing import AFTER, FIRST, largest_rise, order

_FEWEST_STEPS = 2
"""Minimum number of steps with a recorded entropy on each side of a drop needed to compare entropy with -logprob."""
_OF_WEIGHTS = ("weights_differ", "change_inside_sequence", "subset")

_OF_SEMANTICS = (
    "temperature",
    "truncation",
    "grammar",
    "shift",
    "mask",
    "placeholders",
    "retokenised",
    "log_base",
    "padded_vocabulary",
    "penalty",
    "misplaced",
    "unrelated",
    "chunk_boundary",
    "one_place",
)


def mismatch(facts: Facts) -> Suspect:
    """Return the evidence for training-inference mismatch as the cause, and the kind of mismatch."""
    if facts.mismatch is None:
        missing = Evidence(code="no_passes", points=0.0)
        return Suspect(
            code="mismatch",
            evidence=(missing, t.prior("mismatch")),
            next=Advice("tim-trace record -o RUN -- COMMAND", "with an engine that returns logprobs"),
        )
    size_and_order = [_size(facts.mismatch.size), *_order(facts)]
    if _trainer_moves(facts):  # a lagging engine differs from a trainer that changes abruptly
        size_and_order = [*(replace(each, points=min(each.points, 0.0)) for each in size_and_order), _TRAINER_MOVES]
    not_sampled = unsampled(facts)
    if is_of_other_rows(facts):
        size_and_order = [replace(each, points=min(each.points, 0.0)) for each in size_and_order]
    if not_sampled:  # trainer and engine agree on wrong logprobs, so a small mismatch does not count against it
        size_and_order = [replace(each, points=max(each.points, 0.0)) for each in size_and_order]
    semantics = _semantics(facts)
    if any(
        is_of_sampling(change.series) for change in facts.settings_of("mismatch")
    ):  # trainer and engine may both apply the setting and agree
        size_and_order, semantics = (
            [replace(each, points=max(each.points, 0.0)) for each in part] for part in (size_and_order, semantics)
        )
    evidence = [
        *size_and_order, *not_sampled, *semantics, *_disagrees(facts), *_lag(facts), *settings(facts, "mismatch"),
        *holds(facts, t.WEAK),
    ]  # fmt: skip
    return Suspect(code="mismatch", detail=kind(facts), evidence=(*evidence, t.prior("mismatch")), next=_next(facts))


_TRAINER_MOVES = Evidence(code="trainer_moves_first", points=-t.STRONG)


def _disagrees(facts: Facts) -> list[Evidence]:
    """Return evidence of a non-deterministic engine; a non-deterministic trainer counts against this suspect."""
    engine, trainer = facts.disagreeing
    if engine > trainer and not is_of_other_rows(facts):
        return [Evidence(code="engine_disagrees", values={"share": engine}, points=t.CERTAIN)]
    return [replace(each, points=-each.points) for each in trainer_disagrees(facts)]


def trainer_disagrees(facts: Facts) -> list[Evidence]:
    """Return evidence of a non-deterministic trainer (e.g. dropout left on); it counts towards `unknown`."""
    engine, trainer = facts.disagreeing
    if not trainer > engine or is_of_other_rows(facts):
        return []
    return [Evidence(code="trainer_disagrees", values={"share": trainer}, points=t.CERTAIN)]


def _trainer_moves(facts: Facts) -> bool:
    """Return True if the trainer's scores change while a lagging engine still samples as before."""
    step = facts.moves.step("mean_abs_d")
    if step is None or declared_lag(facts).at_fall < 1 or declared_lag(facts).grew or _engine_moves(facts):
        return False
    return facts.moves.moves_at(step + 2, "trained", "entropy", "grad_norm")


def kind(facts: Facts) -> str:
    """Return the kind of mismatch: check's finding, corrected for when the mismatch begins and grows."""
    first = facts.checked.findings[0] if facts.checked and not facts.checked.is_valid else None
    first = first if first and _carries(facts, first) else None
    code = first.code if first else ""
    if (cause := cause_of_weights(facts)) is not None and first is not None:
        return cause
    run, stale = facts.mismatch, facts.stale_weights
    if run is None or code not in (*_OF_WEIGHTS, "copies"):
        return code
    if stale is not None and stale.explains:
        return "stale_weights"
    if code == "copies" and run.begins != FROM_UPDATES:
        return code
    # Before the first update, trainer and engine share weights unless one of them quantises them.
    if run.begins == FROM_START:
        return "quantised" if code != "change_inside_sequence" else code
    if run.begins == FROM_UPDATES:
        is_stuck = run.grows or (stale is not None and stale.is_excluded)
        return "partial_sync" if is_stuck else "stale_weights"
    return str(first.numbers.get("cause") or code) if first else code


def cause_of_weights(facts: Facts) -> str | None:
    """Return check's code for a tensor-by-tensor difference of the engine's weights, or None."""
    finding = facts.checked.findings[0] if facts.checked else None
    return str(finding.numbers["cause"]) if finding is not None and finding.signal == "engine_weights" else None


def _carries(facts: Facts, finding: Finding) -> bool:
    """Return True if a finding explains a good part of the mismatch; always True for findings without a size."""
    values = facts.values("mean_abs_d")
    known = values[np.isfinite(values)]
    return not len(known) or not 0 < finding.effect * finding.share < t.FINDING_CARRIES * float(known.mean())


def _size(mean_abs_d: float) -> Evidence:
    points = t.of_size(mean_abs_d)
    code = "mismatch_small" if points < 0 else "mismatch_large" if points > 0 else "mismatch_unclear"
    return Evidence(code=code, values={"mean_abs_d": mean_abs_d}, points=points)


def is_of_other_rows(facts: Facts) -> bool:
    """Return True if the mismatch comes from misaligned logprob rows rather than from the engine."""
    finding = facts.checked.findings[0] if facts.checked else None
    is_found = finding is not None and finding.code == "row_pairing" and _carries(facts, finding)
    return is_found or facts.scored_rows is not None


def unsampled(facts: Facts) -> list[Evidence]:
    """Detect tokens that become far less likely than the entropy allows near the drop.

    If tokens are sampled from the returned logprobs, their mean -logprob equals the entropy. Trainer and engine can
    agree on logprobs that were not used for sampling, such as raw ones at another temperature.
    """
    if facts.fall is None:
        return []
    known = np.isfinite(facts.values("entropy"))
    steps, logprob = (
        facts.rollouts.sampled_by_step
    )  # the engine's entropy, because a lagging engine samples with its own weights
    shared, at, of = np.intersect1d(steps, facts.steps[known], return_indices=True)
    entropies, surprisal = facts.values("entropy")[known][of], -logprob[at]
    first = facts.fall.interval[0] - ft.AHEAD
    before, since = shared < first, shared > facts.fall.latest
    if before.sum() < _FEWEST_STEPS or since.sum() < _FEWEST_STEPS or (entropies <= 0).any():
        return []
    usual = float(np.median((surprisal / entropies)[before][-10:]))
    ratio = float(np.median((surprisal / entropies)[since]))
    excess = float(np.median((surprisal - entropies)[since]))
    low, high = t.SAMPLED_BY_POLICY
    if not low <= usual <= high or ratio < t.UNSAMPLED * usual or excess < t.UNSAMPLED_NATS:
        return []
    if np.median(surprisal[since]) < t.UNSAMPLED * np.median(surprisal[before][-10:]):  # only the entropy changed
        return []
    apart = facts.values("mean_abs_d")[known][of][since]
    if np.isfinite(apart).any() and np.nanmedian(apart) > excess / 2:  # the trainer's entropy belongs to another policy
        return []
    values: dict[str, Measured] = {
        "entropy": float(np.median(entropies[since])), "surprisal": float(np.median(surprisal[since])), "ratio_before": usual,
        "ratio_since": ratio,
    }  # fmt: skip
    return [Evidence(code="not_sampled_so", values=values, points=t.CERTAIN)]


def _order(facts: Facts) -> list[Evidence]:
    largest = largest_rise(facts)
    if largest is None or facts.mismatch is None or facts.fall is None:
        return []
    values = {
        "factor": largest.after / max(largest.before, 1e-12), "step": largest.step, "low": largest.low,
        "high": largest.high,
    }  # fmt: skip
    when = order(facts, largest)
    if when == AFTER:
        # A mismatch that was large before the drop may be the cause, whatever changed later.
        points = -t.STRONG if facts.mismatch.size < t.LARGE_MISMATCH else 0.0
        return [Evidence(code="mismatch_grows_after_fall", values=values, points=points)]
    if largest.before == 0:
        del values["factor"]
        points = t.DECISIVE if largest.after >= t.BENDS else t.STRONG
        return [Evidence(code="exact_until", values=values | {"mean_abs_d": largest.after}, points=points)]
    code = "mismatch_grows_before_fall" if when == FIRST else "mismatch_grows_with_fall"
    if when != FIRST and facts.drop is not None and facts.drop.is_of_policy:
        # The policy changed abruptly; an engine this close to its trainer samples almost the same tokens.
        return [Evidence(code=code, values=values, points=0.0)]
    is_abrupt = largest.kind == "shift" and values["factor"] >= t.ABRUPT and largest.after >= t.BENDS
    is_engine = declared_lag(facts).at_fall < 1 or _engine_moves(facts)
    if is_abrupt and is_engine and facts.grows_from_nothing:
        return [Evidence(code="mismatch_grows_by_updates", values={"step": largest.step}, points=t.MEDIUM)]
    return [Evidence(code=code, values=values, points=t.DECISIVE if is_abrupt and is_engine else t.WEAK)]


def _engine_moves(facts: Facts) -> bool:
    """Return True if samples change when the mismatch jumps; a change of the trainer would reach them later."""
    step = facts.moves.step("mean_abs_d")
    return step is not None and facts.moves.moves_at(step, "reward", "sampled", "length")


def _semantics(facts: Facts) -> list[Evidence]:
    if facts.checked is None:
        return []
    finding = facts.checked.findings[0]
    if not finding.fails:
        return [Evidence(code="check_passes", values={"finding": finding.code}, points=-t.MEDIUM)]
    if finding.code == "row_pairing" or not _carries(facts, finding):
        return []
    if finding.code == "weights_differ" and "stale_weights" in (kind(facts), finding.numbers.get("cause")):
        return []
    points = t.MEDIUM if finding.code in _OF_SEMANTICS else t.WEAK
    return [Evidence(code="check_fails", values={"finding": finding.code}, points=points)]


def _lag(facts: Facts) -> list[Evidence]:
    """Return evidence that staleness, not this suspect, explains the mismatch."""
    lag, stale = declared_lag(facts), facts.stale_weights
    assert facts.mismatch is not None
    if facts.still_engine is not None and facts.still_engine.explains:
        return [Evidence(code="explained_by_still_engine", values=facts.still_engine.values, points=-t.CERTAIN)]
    if lag.at_fall < 1 and facts.earlier_weights is not None and facts.earlier_weights.explains:
        return [Evidence(code="explained_by_earlier_weights", values=facts.earlier_weights.values, points=-t.CERTAIN)]
    if is_declared_fresh(facts):
        return []
    if lag.at_fall < 1 and stale is not None and stale.explains:
        return [Evidence(code="explained_by_stale_weights", values=stale.values, points=-t.DECISIVE)]
    if lag.at_fall >= 1 and facts.mismatch.begins != FROM_START and not is_grown_beside_lag(facts, lag):
        return [Evidence(code="explained_by_declared_lag", values={"lag": lag.at_fall}, points=-t.STRONG)]
    if lag.at_fall < 1 and kind(facts) == "stale_weights":
        return [Evidence(code="explained_by_steady_size", points=-t.STRONG)]
    return []


def _next(facts: Facts) -> Advice:
    finding = facts.checked.findings[0] if facts.checked else None
    if finding is not None and finding.next:
        return Advice(finding.next)
    return Advice(
        f"tim-trace triangulate {shlex.quote(facts.trace)} --steps {facts.fall.step if facts.fall else 'all'}"
    )
