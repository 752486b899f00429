from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ...schemas.documents import Contract, contract_hash
from ...schemas.results import Result

CERTIFIED, COUNTEREXAMPLE, UNDECIDED = "certified", "counterexample", "undecided"
VERDICTS = {
    CERTIFIED: "CERTIFIED: bitwise equal in every planned batch",
    COUNTEREXAMPLE: "NOT BITWISE EQUAL: found a batch that differs",
    UNDECIDED: "UNDECIDED: time ran out before every planned batch was tried; no difference found so far",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Batches, layouts and operator calls that the search tried."""

    num_batches: int = 0
    num_planned: int = 0
    """Batches to try before a certificate is issued. Random changes follow."""
    num_sequences: int = 0
    num_tokens: int = 0
    """Response tokens compared."""
    row_counts: tuple[int, ...] = ()
    """Numbers of rows per batch."""
    prompt_lengths: tuple[int, ...] = ()
    response_lengths: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    """Tokens per row, including padding."""
    layouts: tuple[str, ...] = ()
    """Arm options set by the search, such as `mode=decode`. An empty string means the arm's own values."""
    vocabulary: float = 0.0
    """Fraction of the vocabulary that occurred in the batches."""
    num_calls: int = 0
    """Distinct operator calls seen: operator, dtypes and size classes. 0 for vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterexample:
    """The smallest batch found whose logprobs differ."""

    folder: str
    """A trace with this batch. Its pass `against` contains the second execution's logprobs."""
    replay: str
    """The command that shows the difference."""
    layout: str
    prompt_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    pad_left: int
    pad_right: int
    row: int
    """Index of the first row whose logprobs differ, from 0."""
    token: int
    """Index of the row's first response token whose logprob differs, from 0."""
    value: float
    """The first execution's logprob there (nats)."""
    other: float
    """The second execution's logprob there (nats)."""
    num_different: int
    """Number of response tokens in this batch whose logprobs differ."""
    max_abs_d: float
    needs_history: bool
    """True if the logprobs differ only when another batch runs first. That batch is forward pass 0 in the trace."""
    repeats: bool
    """False if the logprobs were equal on a rerun. `value` and `other` are then from the first run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate(Result):
    """Verdict on whether two executions give the same bits for every batch within the bounds."""

    _text = "tim_trace.analysis.certify_text:certificate_text"

    verdict: str
    """`certified`, `counterexample` or `undecided`."""
    of: str
    """The run or model folder."""
    arm: str
    against: str | None
    """The second arm. None if batches were compared with each sequence alone."""
    max_batch: int
    max_length: int
    """Maximum tokens per prompt and per response."""
    seed: int
    seconds: float
    covered: Coverage
    not_covered: tuple[str, ...] = ()
    """Row counts, lengths (`row_counts: 43-44`) and layouts that were not tried, with the reason if known."""
    counterexample: Counterexample | None = None
    settings_hash: str
    """SHA-256 of both executions' settings."""
    settings: tuple[Contract, Contract] = field(default=({}, {}))
    """Both executions' contracts."""
    file: str | None = None
    """Where the certificate was written."""

    @property
    def is_certified(self) -> bool:
        return self.verdict == CERTIFIED


def hash_of(settings: tuple[Contract, Contract]) -> str:
    return contract_hash(dict(zip("ab", settings, strict=True)))


def ranges(numbers: Any) -> str:
    """Format sorted numbers as ranges.

    >>> ranges([1, 2, 3, 7])
    '1-3,7'
    """
    groups = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in group] for _, group in groups]
    return ",".join(f"{span[0]}-{span[-1]}" if span[1:] else str(span[0]) for span in spans)
