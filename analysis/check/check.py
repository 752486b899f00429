from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ...schemas.errors import NothingToCompare
from ...schemas.layout import WEIGHTS
from ...schemas.passes import ROLLOUT, TRAIN
from ...schemas.results import Result
from ...schemas.steps import ALL_STEPS
from ...tracer.progress import Progress, no_progress
from ..comparison.passes import PassComparison, compare_passes
from ..engine_weights import read_engine_verdict
from ..trace.columns import (
    AttemptInfo,
    attempts,
    has_only_other_passes,
    parse_pair,
    scored_passes,
    tell_sampled,
    why_nothing,
)
from ..trace.database import Database, cached
from ..trace.source import Pair
from ..trace.tokens import spread
from ..views import open_database
from .data_checks import data_findings
from .explain import explain
from .faults.not_computed import reference_copied
from .finding import Broken, DataFinding, Finding, nobodys
from .pair_data import FEW_TOKENS, PairData
from .sample import NEEDED_SUMS, Sample, read_pair_sums, read_sample


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOwner:
    owner: str
    """Finding code, `rounding` for tokens explained by rounding, or `nobody` for unexplained tokens."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult(Result):
    """Verdict on whether two passes can be compared, and the faults found."""

    _text = "tim_trace.analysis.check.text:checked_text"

    trace: str
    pair: str
    """The compared passes as a:b. d is logprob(a) - logprob(b)."""
    steps: str = ALL_STEPS
    num_tokens: int
    """Number of tokens in the loss that have a finite logprob in both passes."""
    num_sampled_tokens: int
    """Number of tokens inspected individually. All other tokens are only included in statistics."""
    rms_d: float
    """Root mean square of d (nats)."""
    findings: tuple[Finding, ...]
    """Findings, most probable first. There is always at least one."""
    owners: tuple[TokenOwner, ...] = ()
    """Number of inspected tokens that each finding explains, that rounding explains, and that nothing explains. A token
    that several findings explain counts for the first of them."""
    data: tuple[DataFinding, ...] = ()
    """Faults in rewards, advantages, groups and logged metrics. They do not affect the comparison."""
    notes: tuple[str, ...] = ()
    """Keys in text.NOTES: remarks, and checks that the trace does not support."""
    attempts: tuple[AttemptInfo, ...] = ()
    """Training attempts. Empty if there was only one."""

    @property
    def is_valid(self) -> bool:
        """True if no fault was found."""
        return not any(finding.fails for finding in self.findings)

    @property
    def broken(self) -> Broken | None:
        """What to fix, judging by the most probable fault, or None if the comparison is valid."""
        return next((finding.broken for finding in self.findings if finding.fails), None)


def check(
    trace: str | os.PathLike[str], *, pair: str = "train:rollout", steps: str = ALL_STEPS, partial: bool = False,
    ray: str | None = None, progress: Progress = no_progress,
) -> CheckResult | PassComparison:  # fmt: skip
    """Report whether two passes may be compared, or which fault makes the comparison invalid.

    Each fault comes with evidence, its effect in nats, the share of affected tokens, and a command that confirms it.
    The check uses sums over the whole run and inspects tokens in a sample of steps. `steps` (3:80, -10:, 2:200:2)
    restricts the check to part of the run. If `ray` is a Ray cluster's address (`auto`, `host:port`, or `local` to
    start one), Ray actors compute the sums.

    If a trace has passes of several engines but neither `train` nor `rollout`, all passes are compared, and the result
    is a PassComparison, as from `compare`.

    Raises NothingToCompare if the passes share no token, InvalidOption, TraceNotFound, NewerTrace, and DamagedTrace if
    part of the trace is missing or unreadable and `partial` is not set.
    """
    database = open_database(trace, steps, ray=ray)
    database.check_whole(partial=partial)
    with database.telling(progress):
        names = parse_pair(pair)
        if names == (TRAIN, ROLLOUT) and has_only_other_passes(database, names):
            return compare_passes(database)
        data = gather(database, names, trace=os.fspath(trace))
        return judge(data, ":".join(names), data_findings(database, data.sample))


def gather(database: Database, pair: Pair, *, trace: str, sums: tuple[str, ...] = NEEDED_SUMS) -> PairData:
    """Read everything the detectors need. `sums` names columns in schemas.sums.

    Raises NothingToCompare if the passes share no token.
    """
    tell_sampled(database, pair)
    sample = _sample(database, pair, sums)
    if not sample.mask.any():
        raise NothingToCompare(why_nothing(database, pair))
    execute, source = database.connection.execute, database.sources[0]
    contracts = execute("SELECT contract, contract_json FROM passes").fetchall()
    return PairData(
        trace=trace, steps=database.steps, condition=database.step_condition(), sample=sample,
        sums=_sums(database, pair, sums), contracts={name: json.loads(text) for name, text in contracts if text},
        passes=scored_passes(database),
        has_weights=source.store.exists(WEIGHTS), is_import=source.manifest.is_import,
        model=next((state.model for state in source.store.writers()[0] if state.model), {}),
        attempts=attempts(database), engine=_engine(database), first=_first_step(database, pair), keep=sample.compared,
    )  # fmt: skip


_engine = cached(read_engine_verdict)
_sums = cached(read_pair_sums)


@cached
def _sample(database: Database, pair: Pair, sums: tuple[str, ...]) -> Sample:
    (sample,) = spread(database, _read, [(pair, _sums(database, pair, sums).worst_steps)])
    return sample


def _read(database: Database, asked: tuple[Pair, list[int]]) -> Iterator[Sample]:
    yield read_sample(database, *asked)


def _first_step(database: Database, pair: Pair) -> tuple[int, float] | None:
    """Return the whole run's first step and its rms d (nats), or None if the selected steps include it."""
    if database.steps == ALL_STEPS:
        return None
    query = f"SELECT step, rms_d FROM pair_steps('{pair[0]}', '{pair[1]}') ORDER BY step LIMIT 1"
    asked, first = (each.connection.execute(query).fetchall() for each in (database, database.of_steps(ALL_STEPS)))
    return None if not first or not asked or first[0][0] == asked[0][0] else (int(first[0][0]), float(first[0][1]))


def judge(data: PairData, pair: str, of_data: tuple[DataFinding, ...] = ()) -> CheckResult:
    """Run every detector.

    Raises NothingToCompare if no token has a finite logprob in both passes and no finding explains why.
    """
    sums = data.sums
    findings = explain(data)
    equal = next((each for each in of_data if each.code == "reference_is_policy"), None)
    if equal is not None and findings[0].fails and findings[0].signal == "judged" and "train" in data.names.values():
        findings.insert(0, reference_copied(data, equal.numbers))
    if not sums.num_tokens and not any(finding.fails for finding in findings):
        raise NothingToCompare(f"{data.trace}: no token in the loss has a finite logprob in both passes of {pair}")
    return CheckResult(
        trace=data.trace, pair=pair, steps=data.steps, num_tokens=sums.num_tokens,
        num_sampled_tokens=int(data.sample.compared.sum()), rms_d=sums.rms_d,
        findings=tuple(replace(finding, tokens=None) for finding in findings), owners=_owners(data, findings),
        data=of_data, notes=_notes(data), attempts=data.attempts,
    )  # fmt: skip


def _owners(data: PairData, findings: list[Finding]) -> tuple[TokenOwner, ...]:
    """Count the sampled tokens that each finding explains. Those after `unexplained` are guesses and explain none."""
    owners, nobody = [], 0
    for finding in findings:
        num = data.num_kept
        if finding.side is not None and finding.tokens is not None:
            data = data.without(finding.tokens)
        if finding.code == "unexplained":
            nobody = num - data.num_kept
            break
        if finding.side is not None:
            owners.append(TokenOwner(owner=finding.code, num_tokens=num - data.num_kept))
    num = int(nobodys(data).sum()) if owners and data.num_kept and not nobody else 0
    rest = {"rounding": data.num_kept - num, "nobody": nobody + num}
    return (*owners, *(TokenOwner(owner=owner, num_tokens=num) for owner, num in rest.items()))


def _notes(data: PairData) -> tuple[str, ...]:
    sample = data.sample
    applies = {
        "few_tokens": data.num_kept < FEW_TOKENS,
        "no_contract": not any(sample.a.contracts) or not any(sample.b.contracts), "no_entropies": data.entropy is None,
        "few_steps": len(np.unique(sample.steps)) < 3, "no_prompts": all(prompt is None for prompt in sample.prompts),
        "attempts": len(data.attempts) > 1,
    }  # fmt: skip
    return tuple(code for code, holds in applies.items() if holds)
