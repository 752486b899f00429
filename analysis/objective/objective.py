"""Whether the mismatch bent what a run was optimising, and by how much."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from ...schemas.errors import InvalidOption
from ...schemas.loss import SAPO, TOKEN, VESPO, Loss
from ...tracer.progress import Progress, no_progress
from ..rows import Rows
from ..statistics.estimators import Array
from ..statistics.intervals import NoInterval, bootstrap
from ..trace.database import Database, opened
from .chosen import choose_loss
from .concentration import CARRIED, Carried
from .figures import Figure, as_float, chosen_figures, summed, totals_of, values_of
from .judged import Estimate, Objective
from .pass_roles import ADVANTAGE, MISMATCH, PassRoles, choose_sides
from .shares import TOKEN_MEANS
from .sums import SequenceSums, read_sequence_sums
from .verdict import nothing_read, verdict

_COUNTS = ("num_sequences", "num_tokens", "terms_known", "num_nan", "num_inf")


def objective(
    trace: str | os.PathLike[str] | Database,
    *,
    loss: str | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    clip_hard: float | None = None,
    sapo_temperature_pos: float | None = None,
    sapo_temperature_neg: float | None = None,
    vespo_k_pos: float | None = None,
    vespo_lambda_pos: float | None = None,
    vespo_k_neg: float | None = None,
    vespo_lambda_neg: float | None = None,
    denominator: str | None = None,
    aggregation: str | None = None,
    correction: str | None = None,
    correction_low: float | None = None,
    correction_high: float | None = None,
    confidence: float = 0.95,
    progress: Progress = no_progress,
) -> Objective:
    """Say what the mismatch does to the objective that a run trained on: does it push one way, by how much, and where.

    With d = train - rollout and drift = current - train (logprobs of a token, nats), the ratio that the samples call for is
    rho* = current / rollout = exp(d + drift), and the one that the loss uses divides by another pass: train (exp(drift)),
    rollout (rho* itself) or current (1). Then b = w f(rho_used) - f(rho*) is what the mismatch adds to the contribution of a
    token, or of a sequence where the loss takes one ratio of it: arXiv 2605.14220, where b = f(rho* exp(-d)) - f(rho*). f is
    the loss's, with the sign and size of the advantage in it; w is the weight of its correction, 1 where it has none (in vespo
    it multiplies rho_used).
    Exponents are clamped to +-20 nats. A sequence's ratio goes with the mean advantage of its tokens.

    The loss is read from what the trace records; every option that is given takes the place of what it says. Sums are weighed
    as the loss weighs tokens within an update (a step's inner iteration), and the run is the mean over updates. What the loss
    divides by counts all that went through it, also masked rows and tokens without a logprob, which add nothing to a sum. How
    few terms carry sum |b| counts terms alike. Intervals are over groups (see statistics.intervals.bootstrap). The KL term is
    left out.

    What cannot be answered (no advantages, no pass `current`, one side only, a loss that is not known) is said in `cannot`
    and `notes`, and the rest is answered. Raises InvalidOption, TraceNotFound, NewerTrace or DamagedTrace.
    """
    if not 0 < confidence < 1:
        raise InvalidOption(f"confidence: got {confidence}; give a share between 0 and 1, as 0.95")
    database = opened(trace)
    options = {
        "loss": loss, "clip_low": clip_low, "clip_high": clip_high, "clip_hard": clip_hard,
        "sapo_temperature_pos": sapo_temperature_pos, "sapo_temperature_neg": sapo_temperature_neg,
        "vespo_k_pos": vespo_k_pos, "vespo_lambda_pos": vespo_lambda_pos, "vespo_k_neg": vespo_k_neg,
        "vespo_lambda_neg": vespo_lambda_neg, "denominator": denominator, "aggregation": aggregation,
        "correction": correction, "correction_low": correction_low, "correction_high": correction_high,
    }  # fmt: skip
    chosen, how = choose_loss(database, options)
    sides = choose_sides(database, chosen)
    name = ", ".join(database.given)
    if sides is None:
        return nothing_read(name, chosen, how, confidence)
    return _judge(name, how, sides, read_sequence_sums(database, sides, progress), confidence, _num_sequences(database))


def _judge(
    trace: str, how: str, sides: PassRoles, sums: SequenceSums, confidence: float, num_recorded: int
) -> Objective:
    loss, num_updates = sides.loss, len(sums.updates)
    columns = totals_of(sums)
    figures = chosen_figures(loss, sides.known)
    of_figures = estimates(figures, columns, num_updates, sums.unit_N, confidence)
    carried = sums.carried if {MISMATCH, ADVANTAGE} <= sides.known else None
    of_run = None if carried is None else carried.of_run
    by_update = summed(totals_of(sums, sums.update_N), sums.update_N, num_updates) | {"num_rows": sums.num_rows_U}
    steps = _steps(figures, sums.updates, by_update, carried)
    counts = {key: int(columns[key].sum()) for key in _COUNTS}
    return Objective(
        trace=trace, loss=loss, loss_from=how, passes=(sides.train, sides.rollout, sides.current), num_updates=num_updates,
        num_rows=int(sums.num_rows_U.sum()), num_sequences=counts["num_sequences"], num_tokens=counts["num_tokens"], num_terms=counts["terms_known"],
        num_nan=counts["num_nan"], num_inf=counts["num_inf"], num_groups=len(np.unique(sums.unit_N)), confidence=confidence,
        verdict=verdict(loss, of_figures, of_run, steps, counts["num_tokens"], confidence),
        notes=(*sides.notes, *_notes(loss, counts, sums, num_recorded)), cannot=sides.cannot, figures=of_figures, concentration=of_run,
        steps=steps,
    )  # fmt: skip


def estimates(
    figures: Mapping[str, Figure], columns: Mapping[str, Array], num_updates: int, unit_N: np.ndarray, confidence: float
) -> dict[str, Estimate]:
    """The figures of a run with their intervals over groups, from the [N] columns of `totals_of`.

    What weighs a token within its update (the number of its tokens or sequences), and the number of updates, stay as they
    were recorded.
    """
    constants = {"num_updates": float(num_updates)}
    totals = {key: np.asarray(values.sum()) for key, values in columns.items()}
    totals |= {key: np.asarray(value) for key, value in constants.items()}
    statistics = {name: figure.value for name, figure in figures.items()}
    intervals = bootstrap(statistics, columns, unit_N, confidence, constants=constants)
    found = {}
    for name, value in values_of(figures, totals).items():
        interval, (least, most) = intervals[name], figures[name].bounds
        low = high = no_interval = None
        if isinstance(interval, NoInterval):
            no_interval = str(interval)
        else:
            low, high = max(interval[0], least), min(interval[1], most)
        found[name] = Estimate(
            name=name, value=as_float(value), low=low, high=high, no_interval=no_interval, meaning=figures[name].told
        )
    return found


def _steps(
    figures: Mapping[str, Figure], updates: list[tuple[int, int]], totals: Mapping[str, Array], carried: Carried | None
) -> Rows:
    """One row an update."""
    values = values_of(figures, {**totals, "num_updates": np.ones(len(updates))})
    names = ["step", "iteration", "num_rows", "num_sequences", "num_tokens", *values]
    columns = [
        *zip(*updates, strict=True),
        *([int(count) for count in totals[name]] for name in ("num_rows", "num_sequences", "num_tokens")),
        *([as_float(value) for value in column] for column in values.values()),
    ]
    if carried is not None and carried.of_run is not None:
        found = [carried.of_update.get(update) for update in updates]
        for name, label in CARRIED.items():
            names.append(label)
            columns.append([None if each is None else getattr(each, name) for each in found])
    return Rows(tuple(names), list(zip(*columns, strict=True)) if updates else [])


def _num_sequences(database: Database) -> int:
    query = "SELECT count(*) FROM sequences WHERE num_response_tokens > 0"
    (row,) = database.connection.execute(query).fetchall()
    return int(row[0])


def _notes(loss: Loss, counts: Mapping[str, int], sums: SequenceSums, num_recorded: int) -> list[str]:
    notes = []
    is_first_U = np.array([iteration == 0 for _, iteration in sums.updates], bool)
    num_read = int(is_first_U[sums.update_N].sum())
    if num_read < num_recorded:
        notes.append(
            f"{num_recorded - num_read:,} of {num_recorded:,} sequences have no logprobs in one of the passes: they are left out"
        )
    if counts["num_nan"] or counts["num_inf"]:
        notes.append(
            f"{counts['num_nan']:,} tokens have a NaN and {counts['num_inf']:,} an infinite logprob under a pass: they are in no figure"
        )
    lacking = int(((sums.columns["num_tokens"] > 0) & (sums.columns["terms_known"] == 0)).sum())
    if 0 < lacking < counts["num_sequences"]:
        notes.append(
            f"{lacking:,} of {counts['num_sequences']:,} sequences have no advantage: they add nothing to a bias"
        )
    num_rows = int(sums.num_rows_U.sum())
    if counts["num_sequences"] < num_rows and loss.aggregation not in TOKEN_MEANS:
        notes.append(
            f"{num_rows - counts['num_sequences']:,} of {num_rows:,} sequences that went through the loss have no token to "
            "compare: they add nothing to a sum, and the loss's mean counts them"
        )
    if loss.kind in (SAPO, VESPO):
        notes.append(f"{loss.kind} has no clip: its weight falls without a bound, so that nothing counts as clipped")
    if loss.unknown:
        notes.append(f"settings of the loss that no figure knows of: {', '.join(loss.unknown)}")
    if loss.aggregation == "micro_token_mean" and not sums.micro_batches_known:
        notes.append("the trace does not say which rows were one micro-batch: tokens are weighed over the whole update")
    if loss.aggregation == "constant" and loss.max_tokens is None:
        notes.append(
            "the divisor of the aggregation is not recorded (max_tokens): sizes are as if it were 1, shares are right"
        )
    if loss.kl_coefficient:
        notes.append(f"the KL term (coefficient {loss.kl_coefficient:g}) is in no figure")
    if loss.level != TOKEN and (np.abs(sums.columns["sum_d"] + sums.columns["sum_drift"]) > 20).any():
        notes.append("ratios of some sequences are beyond exp(20) and count as that")
    return notes
