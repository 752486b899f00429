from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...facts import thresholds as t
from ...facts.recorded import AFTER, BEFORE, WITH, order_beside
from ...facts.series import Fall
from ..fact import Fact, fact, of_ratio
from ..run_facts import Facts

_USUAL = 0.02
"""Mean |d| (nats) that gives the mismatch half its full weight. Healthy bf16 runs show 0.002 to 0.01."""
_FEWEST = 2
OF_WEIGHTS = ("weights_differ", "change_inside_sequence", "subset", "copies")


def weighs(facts: Facts) -> float:
    return 0.0 if facts.mismatch is None else facts.mismatch / (facts.mismatch + _USUAL)


def size(facts: Facts, _: Fall) -> Iterator[Fact]:
    if (run := facts.mismatch) is not None:
        yield fact("mismatch_size", of_ratio(run, _USUAL, 30.0), mean_abs_d=run)


def rise(facts: Facts, fall: Fall) -> Iterator[Fact]:
    changes = [change for change in facts.changes.get("mean_abs_d", ()) if change.size_in_sd > 3.0]
    if not changes:
        return
    largest = max(changes, key=lambda change: change.after / max(change.before, 1e-12))
    factor = largest.after / max(largest.before, 1e-12)
    values = {"step": largest.step, "low": largest.low, "high": largest.high}
    when = order_beside(largest, fall)
    if largest.before == 0 and when != AFTER:
        yield fact("exact_until", largest.after / (largest.after + _USUAL), mean_abs_d=largest.after, **values)
        return
    code = {
        BEFORE: "mismatch_grows_before_fall", WITH: "mismatch_grows_with_fall", AFTER: "mismatch_grows_after_fall",
    }[when]  # fmt: skip
    yield fact(code, of_ratio(factor, 1.0, 100.0) * weighs(facts), factor=factor, **values)
    step = facts.moves.step("mean_abs_d")
    if step is None or when == AFTER or facts.moves.moves_at(step, "reward", "sampled", "length"):
        return
    if facts.moves.moves_at(step + 2, "trained", "entropy", "grad_norm"):
        yield fact("trainer_moves_first", weighs(facts), step=step)


def carried(facts: Facts) -> float:
    finding, values = facts.checked.findings[0], facts.values("mean_abs_d")  # type: ignore[union-attr]
    mean, effect = float(np.nanmean(values)) if np.isfinite(values).any() else 0.0, finding.effect * finding.share
    return 1.0 if not mean or not effect else min(effect / mean, 1.0)


def check(facts: Facts, _: Fall) -> Iterator[Fact]:
    if facts.checked is None:
        return
    finding = facts.checked.findings[0]
    if not finding.fails:
        return
    if finding.code == "row_pairing":
        yield fact("logprobs_in_other_rows", carried(facts) * weighs(facts))
    else:
        is_stale = "stale_weights" in (finding.code, finding.numbers.get("cause"))
        group = "stale" if is_stale else "weights" if finding.code in OF_WEIGHTS else "values"
        level = carried(facts) * weighs(facts)
        yield fact("check_fails", level, group, finding=finding.code, finding_title=finding.title)


def age(facts: Facts, _: Fall) -> Iterator[Fact]:
    still, earlier = facts.still_engine, facts.earlier_weights
    if still is not None and still.explains:
        yield fact("engine_stands_still", (still.still - still.of_trainer) * weighs(facts), **still.values)
    elif still is not None:
        yield fact("engine_moves_on", (1 - still.still) * weighs(facts), **still.values)
    if earlier is not None and earlier.explains:
        code = "earlier_weights_at_distance" if earlier.is_distance else "earlier_weights_of_step"
        yield fact(code, weighs(facts), "", "earlier_weights", **earlier.values)


def lag(facts: Facts, _: Fall) -> Iterator[Fact]:
    """Report how many updates the engine lags behind the trainer. A constant lag is normal in asynchronous training."""
    at_fall, usual = declared_lag(facts)
    values = {"lag": at_fall, "mean_abs_d": facts.mismatch or 0.0}
    recorded = facts.values("version_lag")
    if np.isfinite(recorded).any() and not np.nan_to_num(recorded).any():
        yield fact("declared_fresh", 1.0)
    elif at_fall >= max(1.0, t.LAG_GROWS * usual):
        level = of_ratio(at_fall, max(usual, 0.5), 8.0) * (0.5 + weighs(facts) / 2)
        yield fact("declared_lag_grows", level, lag_before=usual, **values)
    elif at_fall >= 1:
        yield fact("declared_lag", of_ratio(at_fall, 1.0, 16.0) * weighs(facts), **values)


def unsampled(facts: Facts, fall: Fall) -> Iterator[Fact]:
    """Report whether mean -logprob exceeds mean entropy. They agree if tokens are sampled from the recorded policy."""
    known = np.isfinite(facts.values("entropy"))
    if not known.any():
        return
    steps, logprob = facts.rollouts.by_step(facts.rollouts.sampled)
    shared, at, of = np.intersect1d(steps, facts.steps[known], return_indices=True)
    entropy, surprisal = facts.values("entropy")[known][of], -logprob[at]
    before, since = shared < fall.interval[0] - t.AHEAD, shared > fall.latest
    if before.sum() < _FEWEST or since.sum() < _FEWEST or (entropy <= 0).any():
        return
    ratios = surprisal / entropy
    usual, ratio = float(np.median(ratios[before][-10:])), float(np.median(ratios[since]))
    apart = facts.values("mean_abs_d")[known][of][since]
    excess = float(np.median((surprisal - entropy)[since]))
    unexplained = max(excess - 2 * float(np.nanmedian(apart)), 0.0) if np.isfinite(apart).any() else max(excess, 0.0)
    grown = max(of_ratio(float(np.median(surprisal[since])), float(np.median(surprisal[before][-10:])), 4.0), 0.0)
    level = max(of_ratio(ratio, usual, 4.0), 0.0) * grown**0.5 * unexplained / (unexplained + 0.5)
    values = {"entropy": float(np.median(entropy[since])), "surprisal": float(np.median(surprisal[since]))}
    yield fact("not_sampled_so", level, ratio_before=usual, ratio_since=ratio, **values)


def declared_lag(facts: Facts) -> tuple[float, float]:
    """Return the engine's lag (updates) at the drop's onset, and its median before that. Both are 0 if unknown."""
    values = np.abs(facts.values("version_lag"))
    known = np.isfinite(values)
    if not known.any():
        return 0.0, 0.0
    steps, values = facts.steps[known], values[known]
    if facts.fall is None:
        first, last = steps[0], steps[-1]
    else:
        first, last = facts.fall.interval[0] - t.AHEAD, facts.fall.latest
    learned = steps < first if (steps < first).mean() >= t.LEARNED else steps <= last
    at = (steps >= first) & (steps <= last)
    at_fall, usual = values[at] if at.any() else values, values[learned] if learned.any() else values
    width = min(max(len(values) // 10, 3), len(at_fall))
    medians = np.median(np.lib.stride_tricks.sliding_window_view(at_fall, width), axis=-1)
    return float(medians.max()), float(np.median(usual))


def is_farther_behind(facts: Facts, control: Facts) -> bool:
    of_run, of_control = declared_lag(facts)[0], declared_lag(control)[0]
    return of_run >= max(of_control + 1, t.LAG_GROWS * of_control)


ALL = (size, rise, check, age, lag, unsampled)
