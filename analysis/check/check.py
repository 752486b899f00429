"""Check whether two passes may be compared, and name the fault if not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from ...schemas.errors import NothingToCompare
from ...schemas.layout import WEIGHTS
from ...schemas.steps import ALL_STEPS
from ...tracer.progress import Progress, no_progress
from ..engine_weights import read_engine_verdict
from ..info import attempts
from ..trace.columns import sequence_columns
from ..trace.database import Database, cached
from ..trace.macros import parse_pair, quoted, tell_sampled, why_nothing
from ..trace.pair_sums import OF_DIFFERENCES, finite, pair_sums
from ..trace.ragged import array_of, counted
from ..trace.source import Pair
from ..trace.spread import spread
from ..trace.sums import ensure
from ..trace.tokens import PassRows, token_query, tokens_by_step, tokens_of_rows
from ..views import open_database
from .data_checks import DataFinding, data_findings
from .explain import explain
from .pair_data import LOST, PairData, PairSums
from .result import CheckResult, notes
from .sample import Sample, read_sample

_COLUMNS = ("num_tokens", *LOST, *OF_DIFFERENCES)


def check(
    trace: str | os.PathLike[str],
    *,
    pair: str = "train:rollout",
    steps: str = ALL_STEPS,
    partial: bool = False,
    ray: str | None = None,
    progress: Progress = no_progress,
) -> CheckResult:
    """Report whether two passes may be compared, or which fault makes the comparison invalid.

    Each fault of FAULTS found is reported with its evidence, effect in nats, share of affected tokens, and a command to
    confirm it. The check uses sums over the whole run and the individual tokens of a sample of steps. `steps` (3:80,
    -10:, 2:200:2) restricts it to part of the run. `ray` is the address of a Ray cluster (`auto`, `host:port`, or
    `local` to start one) whose actors compute the sums.

    Raises NothingToCompare if the passes share no token; InvalidOption, TraceNotFound, NewerTrace; and DamagedTrace if
    part of the trace is missing or unreadable, unless `partial` is set.
    """
    database = open_database(trace, steps, ray=ray)
    database.check_whole(partial=partial)
    with database.telling(progress):
        names = parse_pair(pair)
        tell_sampled(database, names)
        sums = _sums(database, names)
        question = (names, os.fspath(trace), sums.total, sums.worst_steps(), sums.worst_lost_steps())
        (found,) = spread(database, _judged, [question])
    return found


_Question = tuple[Pair, str, PairSums, list[int], list[int]]
"""The passes, the path of the trace as given by the caller, sums over the whole run in one row, and the steps with the largest
mismatch and with the most lost values: input of `_judged`, which runs in the process that reads the sampled tokens."""


def _judged(database: Database, question: _Question) -> Iterator[CheckResult]:
    pair, trace, sums, worst_steps, lost_steps = question
    sample = read_sample(database, pair, worst_steps, lost_steps)
    yield judge(_pair_data(database, pair, trace, sums, sample), ":".join(pair), data_findings(database, sample))


def gather(database: Database, pair: Pair, *, trace: str) -> PairData:
    """Read the data that the detectors need.

    Raises NothingToCompare if the passes share no token.
    """
    tell_sampled(database, pair)
    return _pair_data(database, pair, trace, _sums(database, pair), _sample(database, pair))


def _pair_data(database: Database, pair: Pair, trace: str, sums: PairSums, sample: Sample) -> PairData:
    if not sample.mask.any():
        raise NothingToCompare(why_nothing(database, pair))
    contracts = database.connection.execute("SELECT contract, contract_json FROM passes").fetchall()
    return PairData(
        trace=trace,
        steps=database.steps,
        condition=database.step_condition(),
        sample=sample,
        sums=sums,
        contracts={name: json.loads(text) for name, text in contracts if text},
        passes=[
            name for (name,) in database.connection.execute('SELECT DISTINCT "pass" FROM scores ORDER BY 1').fetchall()
        ],
        has_weights=database.sources[0].store.exists(WEIGHTS),
        is_import=database.sources[0].manifest.is_import,
        model=next((state.model for state in database.sources[0].store.writers()[0] if state.model), {}),
        attempts=attempts(database),
        engine=_engine(database),
        first=_first_step(database, pair),
        keep=sample.compared,
    )


def _first_step(database: Database, pair: Pair) -> tuple[int, float] | None:
    """Return the run's first step and the rms of d there, nats; None if that step is among the selected ones."""
    if database.steps == ALL_STEPS:
        return None
    query = f"SELECT step, rms_d FROM pair_steps('{pair[0]}', '{pair[1]}') ORDER BY step LIMIT 1"
    asked, first = (each.connection.execute(query).fetchall() for each in (database, database.of_steps(ALL_STEPS)))
    return None if not first or not asked or first[0][0] == asked[0][0] else (int(first[0][0]), float(first[0][1]))


def read_pair_sums(database: Database, pair: Pair) -> PairSums:
    """Return the sums stored in the trace, or compute them from the tokens. On a cluster, the computed sums are stored
    first."""
    if database.ray is not None:
        ensure(database, pair, of_run=False, progress=database.progress)
    if database.sums.covers(pair):
        kept = database.connection.execute(_kept(pair, has_mask=sequence_columns(database).mask)).fetchnumpy()
        columns = {name: np.asarray(values) for name, values in kept.items()}
    else:
        # Without a mask no other table needs to be read.
        query = token_query(
            {"a": PassRows(name=pair[0]), "b": PassRows(name=pair[1])}, ["a.step"],
            lists=["mask"] if sequence_columns(database).mask else [],
        )  # fmt: skip
        parts = []
        with database.progress("reading tokens", sum(tokens_by_step(database).values())) as advance:
            for num_read, part in database.connection.mapped_batches(query, _of_tokens):
                advance(num_read)
                parts.append(part)
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return PairSums(steps=columns.pop("step"), columns=columns)


def _kept(pair: Pair, *, has_mask: bool) -> str:
    chosen = ", ".join(f"coalesce(sums.{name}, 0) AS {name}" for name in _COLUMNS)
    counted = "list_sum(response_mask::INTEGER[])" if has_mask else "NULL"
    finite_or_not = " - ".join(f"coalesce(sums.{name}, 0)" for name in ("num_tokens", *LOST))
    return (
        f"SELECT step, {chosen}, greatest(coalesce({counted}, num_response_tokens) - {finite_or_not}, 0) AS num_null "
        f"FROM sequence_sums AS sums JOIN sequences USING (run, step, seq_id) WHERE pass_a = {quoted(pair[0])} "
        f"AND pass_b = {quoted(pair[1])} AND iteration_a = 0 AND iteration_b = 0"
    )


def _of_tokens(rows: pa.RecordBatch) -> tuple[int, dict[str, np.ndarray]]:
    """Return the number of tokens, and for each sequence its step and its sums over the tokens with finite logprobs in
    both passes."""
    tokens = tokens_of_rows(rows, ("a", "b"))
    sums = pair_sums(finite(tokens), _COLUMNS)
    mask_T = counted(rows.column("mask"), tokens.lengths_N) if "mask" in rows.schema.names else None
    counted_N = tokens.lengths_N if mask_T is None else np.bincount(tokens.sequence_T, mask_T, len(tokens.lengths_N))
    sums["num_null"] = counted_N - sum(sums[name] for name in ("num_tokens", *LOST))
    return int(tokens.lengths_N.sum()), {"step": array_of(rows.column("step")), **sums}


_engine = cached(read_engine_verdict)
_sums = cached(read_pair_sums)


@cached
def _sample(database: Database, pair: Pair) -> Sample:
    sums = _sums(database, pair)
    return read_sample(database, pair, sums.worst_steps(), sums.worst_lost_steps())


def judge(data: PairData, pair: str, of_data: tuple[DataFinding, ...] = ()) -> CheckResult:
    """Run every detector and return the findings.

    Raises NothingToCompare if no token has a finite logprob in both passes and no finding explains it.
    """
    sums = data.sums
    findings = tuple(explain(data))
    if not sums.num_tokens and not any(finding.fails for finding in findings):
        raise NothingToCompare(f"{data.trace}: no token in the loss has a finite logprob in both passes of {pair}")
    return CheckResult(
        trace=data.trace,
        pair=pair,
        steps=data.steps,
        num_tokens=sums.num_tokens,
        num_sampled_tokens=int(data.sample.compared.sum()),
        rms_d=float(np.sqrt(sums.mean("sum_d2"))),
        findings=findings,
        data=of_data,
        notes=tuple(notes(data)),
    )
