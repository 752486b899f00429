from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import numpy as np

from ...schemas.errors import InvalidOption, NothingToCompare, option
from ...schemas.loss import SAPO, TOKEN, VESPO, Loss
from ...schemas.steps import ALL_STEPS
from ...tracer.progress import Progress, no_progress
from ..rows import Rows
from ..statement import Statement
from ..statistics.estimators import Totals
from ..statistics.intervals import NoInterval, bootstrap
from ..statistics.loss import SAFETY_BOUND
from ..trace.database import Database
from ..trace.tokens import tokens_by_step
from ..views import open_database
from .figures import FigureFormula, as_float, chosen_figures, summed, totals_of, values_of
from .pass_roles import choose_loss, choose_sides
from .sums import TOKEN_MEANS, SequenceSums, read_sequence_sums
from .verdict import Estimate, Objective, nothing_read, verdict

_COUNTS = ("num_sequences", "num_tokens", "terms_known", "num_nan", "num_inf")


def objective(
    trace: str | os.PathLike[str] | Database, *, steps: str = ALL_STEPS, loss: str | None = None,
    confidence: float = 0.95, ray: str | None = None, progress: Progress = no_progress,
) -> Objective:  # fmt: skip
    """Measure how the mismatch biases a run's training objective: the direction, size and location of the bias.

    With d = train - rollout and drift = current - train (a token's logprobs in nats), the correct importance ratio is
    rho* = current / rollout = exp(d + drift). The loss's own ratio rho_used divides current by the loss's denominator:
    exp(drift) for train, rho* for rollout, 1 for current. A term's bias is b = w f(rho_used) - f(rho*), after arXiv
    2605.14220. A term is a token, or a sequence if the loss takes one ratio per sequence. f is the term's contribution,
    including the advantage (for a sequence, its mean advantage). w is the loss's correction weight, or 1 without a
    correction. In vespo, w multiplies rho_used. Exponents are clamped to +-20 nats.

    The loss is read from the trace. `loss` overrides it with a kind (ppo_clip, reinforce, gspo, rloo, cispo, sapo,
    vespo), fields of Loss, or both, e.g. `gspo,clip_high=0.01`. Sums within an update (one inner iteration in a
    step) use the loss's token weights, and run figures are means over updates. Masked rows and tokens without a logprob
    add nothing to the sums, but count in the loss's divisors. The KL term is left out.

    `steps` (3:80, -10:, 2:200:2) selects steps. Intervals resample groups (see statistics.intervals.bootstrap). `ray`
    is a Ray cluster's address (`auto`, `host:port`, or `local` to start one here).

    Questions left open by missing data (advantages, the `current` pass, the trainer, the engine, the loss) are listed
    in `cannot` and `notes`. Raises InvalidOption, TraceNotFound, NewerTrace or DamagedTrace.
    """
    if not 0 < confidence < 1:
        raise InvalidOption(f"got {confidence}; pass a number between 0 and 1, e.g. 0.95", option="confidence")
    database = open_database(trace, steps, ray)
    chosen, basis = choose_loss(database, loss)
    sides = choose_sides(database, chosen)
    if database.kept_steps and not tokens_by_step(database):
        raise NothingToCompare(f"{database.given[0]}: {option('steps', steps)} selects steps without sequences")
    name = ", ".join(database.given)
    if sides is None:
        return nothing_read(name, chosen, basis, confidence, database.steps)
    sums = read_sequence_sums(database, sides, progress)
    columns, num_updates = totals_of(sums), len(sums.updates)
    figures = chosen_figures(sides.loss, sides.known)
    of_figures = estimates(figures, columns, num_updates, sums.unit_N, confidence)
    by_update = summed(totals_of(sums, sums.update_N), sums.update_N, num_updates) | {"num_rows": sums.num_rows_U}
    of_steps = _steps(figures, sums.updates, by_update)
    counts = {key: int(columns[key].sum()) for key in _COUNTS}
    query = "SELECT count(*) FROM sequences WHERE num_response_tokens > 0"
    ((num_recorded,),) = database.connection.execute(query).fetchall()
    notes = _notes(sides.loss, counts, sums, num_recorded)
    return Objective(
        trace=name, steps_asked=database.steps, loss=sides.loss, loss_basis=basis, num_updates=num_updates,
        passes=(sides.train, sides.rollout, sides.current), num_rows=int(sums.num_rows_U.sum()), num_terms=counts.pop("terms_known"),
        num_groups=len(np.unique(sums.unit_N)), confidence=confidence, note_codes=(*sides.notes, *notes), cannot_codes=sides.cannot,
        verdict_codes=verdict(sides.loss, of_figures, of_steps, counts["num_tokens"]), figures=of_figures, steps=of_steps, **counts,
    )  # fmt: skip


def estimates(
    figures: Mapping[str, FigureFormula], columns: Totals, num_updates: int, unit_N: np.ndarray, confidence: float
) -> dict[str, Estimate]:
    constants = {"num_updates": float(num_updates)}
    totals = {key: np.asarray(values.sum()) for key, values in columns.items()}
    totals |= {key: np.asarray(value) for key, value in constants.items()}
    statistics = {name: figure.value for name, figure in figures.items()}
    intervals = bootstrap(statistics, columns, unit_N, confidence, constants=constants)
    estimated = {}
    for name, value in values_of(figures, totals).items():
        interval, (least, most) = intervals[name], figures[name].bounds
        low = high = no_interval = None
        if isinstance(interval, NoInterval):
            no_interval = str(interval)
        else:
            low, high = max(interval[0], least), min(interval[1], most)
        estimated[name] = Estimate(
            name=name, value=as_float(value), low=low, high=high, no_interval=no_interval,
            meaning=figures[name].description,
        )  # fmt: skip
    return estimated


def _steps(figures: Mapping[str, FigureFormula], updates: list[tuple[int, int]], totals: Totals) -> Rows:
    values = values_of(figures, {**totals, "num_updates": np.ones(len(updates))})
    names = ["step", "iteration", "num_rows", "num_sequences", "num_tokens", *values]
    columns = [
        *zip(*updates, strict=True),
        *([int(count) for count in totals[name]] for name in ("num_rows", "num_sequences", "num_tokens")),
        *([as_float(value) for value in column] for column in values.values()),
    ]
    return Rows(tuple(names), list(zip(*columns, strict=True)) if updates else [])


def _notes(loss: Loss, counts: Mapping[str, int], sums: SequenceSums, num_recorded: int) -> Iterator[Statement]:
    is_first_U = np.array([iteration == 0 for _, iteration in sums.updates], bool)
    num_read = int(is_first_U[sums.update_N].sum())
    if num_read < num_recorded:
        values = {"num_left_out": num_recorded - num_read, "num_sequences": num_recorded}
        yield Statement(code="sequences_left_out", values=values)
    if counts["num_nan"] or counts["num_inf"]:
        yield Statement(code="not_finite", values={"num_nan": counts["num_nan"], "num_inf": counts["num_inf"]})
    lacking = int(((sums.columns["num_tokens"] > 0) & (sums.columns["terms_known"] == 0)).sum())
    if 0 < lacking < counts["num_sequences"]:
        values = {"num_lacking": lacking, "num_sequences": counts["num_sequences"]}
        yield Statement(code="some_without_advantage", values=values)
    num_rows = int(sums.num_rows_U.sum())
    if counts["num_sequences"] < num_rows and loss.aggregation not in TOKEN_MEANS:
        values = {"num_empty": num_rows - counts["num_sequences"], "num_rows": num_rows}
        yield Statement(code="rows_without_tokens", values=values)
    if loss.kind in (SAPO, VESPO):
        yield Statement(code="no_clip", values={"kind": loss.kind})
    if loss.unknown:
        yield Statement(code="unknown_settings", values={"settings": ", ".join(loss.unknown)})
    if loss.aggregation == "micro_token_mean" and not sums.micro_batches_known:
        yield Statement(code="micro_batches_unknown")
    if loss.aggregation == "constant" and loss.max_tokens is None:
        yield Statement(code="divisor_unknown")
    if loss.kl_coefficient:
        yield Statement(code="kl_left_out", values={"coefficient": loss.kl_coefficient})
    if loss.level != TOKEN and (np.abs(sums.columns["sum_d"] + sums.columns["sum_drift"]) > SAFETY_BOUND).any():
        yield Statement(code="ratios_clamped", values={"bound": SAFETY_BOUND})
