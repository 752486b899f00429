"""Is the comparison of two passes valid, and if not, which fault lies between them?"""

from __future__ import annotations

import json
import os

import numpy as np

from ...schemas.errors import NothingToCompare
from ...schemas.layout import WEIGHTS
from ...schemas.sums import SEQUENCE_SUMS
from ...tracer.progress import Progress, no_progress
from ..database import Database, quoted
from ..pairs import parse_pair, quoted_pair, why_nothing
from ..source import Pair
from .checked import Checked
from .detectors import find
from .evidence import Evidence, SequenceSums
from .notes import notes
from .sample import read_sample


def check(trace: str | os.PathLike[str], *, pair: str = "train:rollout", progress: Progress = no_progress) -> Checked:
    """Say whether two passes may be compared, or which fault lies between them.

    Faults are those of FAULTS, each with its evidence, its effect in nats, the share of tokens that it affects and the
    command that would confirm it. The sums of every sequence are looked at, and the tokens of steps spread over the run.

    Raises NothingToCompare when the passes share no token, TraceNotFound, NewerTrace or DamagedTrace.
    """
    evidence = gather(Database(trace), parse_pair(pair), trace=os.fspath(trace), progress=progress)
    return judge(evidence, pair)


def gather(database: Database, pair: Pair, *, trace: str, progress: Progress = no_progress) -> Evidence:
    """Read what a check looks at. Raises NothingToCompare when the passes share no token."""
    with progress("reading tokens", 1) as advance:
        sums = _sums(database, pair)
        advance(1)
    sample = read_sample(database, pair, sums.worst_steps())
    if not sample.mask.any():
        raise NothingToCompare(why_nothing(database, pair))
    return Evidence(
        trace=trace,
        sample=sample,
        sums=sums,
        contracts=_contracts(database),
        passes=[
            name for (name,) in database.connection.execute('SELECT DISTINCT "pass" FROM scores ORDER BY 1').fetchall()
        ],
        has_weights=database.sources[0].store.exists(WEIGHTS),
        model=next((state.model for state in database.sources[0].store.writers()[0] if state.model), {}),
        keep=sample.compared,
    )


def judge(evidence: Evidence, pair: str) -> Checked:
    """Ask every detector."""
    findings = find(evidence)
    sums = evidence.sums
    return Checked(
        trace=evidence.trace,
        pair=pair,
        num_tokens=sums.num_tokens,
        num_sampled_tokens=int(evidence.sample.compared.sum()),
        rms_d=float(np.sqrt(sums.mean("sum_d2"))),
        findings=tuple(findings),
        notes=tuple(notes(evidence)),
    )


def _sums(database: Database, pair: Pair) -> SequenceSums:
    """Sums of every sequence: those that the trace keeps, or computed from the tokens."""
    table = (
        f"(SELECT * FROM sequence_sums WHERE pass_a = {quoted(pair[0])} AND pass_b = {quoted(pair[1])})"
        if pair in database.covered
        else f"counted_sums({quoted_pair(pair)}, NULL, NULL, NULL)"
    )
    names = [column.name for column in SEQUENCE_SUMS.columns if column.name.startswith(("num_", "sum_", "max_"))]
    chosen = ", ".join(f"coalesce({name}, 0) AS {name}" for name in names)
    query = f"SELECT step, {chosen} FROM {table} WHERE iteration_a = 0 AND iteration_b = 0"
    columns = {name: np.asarray(values) for name, values in database.connection.execute(query).fetchnumpy().items()}
    return SequenceSums(steps=columns.pop("step"), columns=columns)


def _contracts(database: Database) -> dict[str, dict[str, object]]:
    rows = database.connection.execute("SELECT contract, contract_json FROM passes").fetchall()
    return {name: json.loads(text) for name, text in rows if text}
