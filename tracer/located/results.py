"""Results of `locate`: the question, the findings, and the header of a result stored in a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgspec

from ...schemas.checksums import SealedFile
from ...schemas.documents import read_document, to_document
from ...schemas.errors import DamagedTrace, NewerTrace

A, B = "a", "b"
"""The two executions: the one in question, and the one it is compared with."""
ROUTES = "routes"
"""Name of the patch that gives one execution the other's expert choices."""
BEYOND = 1.0
"""Maximum ratio between an operator's introduced error and its rounding bound; rounding cannot explain a larger
error."""
FORMAT = 1
"""Format version of the header and its tables."""
_WHAT = "a locate result"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocateQuestion:
    """The arguments of `locate`. The same question has the same id, and only its newest result is stored."""

    step: int
    arm: str | None
    against: str
    sequences: str
    layers: str | None
    patch: str
    model_factory: str | None
    against_factory: str | None
    weights_from: str | None
    operators: str | None = None


def limits(layers: str | None, operators: str | None) -> str:
    """Return the limits of a question: `layers 2:8`, `operators q_proj,rotary`, or both; empty for everything."""
    return " and ".join(f"{name} {text}" for name, text in (("layers", layers), ("operators", operators)) if text)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorError:
    """Error introduced by one operator of one execution, over all chosen sequences, against float64 on the same inputs."""

    side: str
    """`a` or `b`."""
    order: int
    """Position in the forward."""
    operator: str
    """Name of the module; `layers.7.residual` and the like for computations between modules."""
    kind: str
    layer: int | None
    """Layer index from 0; None outside the layers."""
    dtype: str
    """torch's name of the output's dtype."""
    num_values: int
    introduced: float
    """Root mean square of the operator's own error, relative to the root mean square of the exact result."""
    ratio: float
    """The operator's largest own error divided by the rounding bound; rounding does not explain a ratio above 1."""
    seq_id: str
    token: int
    """Token with the operator's largest error: its index in prompt and response, from 0, in the sequence `seq_id`."""
    inherited: float | None
    """RMS difference between the two executions' inputs, relative to a's input; None if they share no input."""
    difference: float | None
    """RMS difference between the two executions' outputs, relative to a's output; None if they share no output."""
    in_double: float | None
    """Largest `introduced` of a token when the same code runs in float64; None if not run."""

    @property
    def is_beyond(self) -> bool:
        return self.ratio > BEYOND


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedSequence:
    """A sequence that both executions ran, with its mismatch d = logprob(b) - logprob(a), nats."""

    seq_id: str
    group: str
    """Id shared by the sequences of one prompt."""
    num_tokens: int
    sum_square: float
    """Sum of d^2, nats^2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDifference:
    """A tensor in an execution that differs from the recorded tensor, compared in the execution's dtype."""

    side: str
    tensor: str
    layer: int | None
    largest: float
    """Largest absolute difference."""
    version: int | None
    """Policy version whose recorded tensor equals this execution's; None if there is no such version."""
    share: float = 1.0
    """Share of the tensor's elements that differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How often the two executions choose different experts: a discontinuity, which no sum of small errors explains."""

    operator: str
    layer: int | None
    num_tokens: int
    num_flipped: int
    """Number of tokens for which the two executions choose different sets of experts."""
    margin: float | None = None
    """Largest distance from a tie over these tokens: the lowest score of an expert that a chose minus the highest of
    one it did not choose. None without flips, and if the choice does not follow from the scores alone.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Mismatch left when operators of one execution are computed by the other's code, on their own inputs."""

    patch: str
    """Patched operators: a kind of operator, `layers 0 to 7`, `all operators`, or `routes` for differing expert choices."""
    taker: str
    """Execution, `a` or `b`, whose operators were replaced."""
    num_operators: int
    squares_left: tuple[float, ...]
    """Sum of d^2 with the operators replaced, nats^2, per sequence of the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first operator whose error rounding does not explain."""

    side: str
    operator: str
    kind: str
    layer: int | None
    why: str
    """`weights`: it has other weights; `beyond`: its own error exceeds its bound; `code`: it differs in float64."""
    ratio: float | None
    version: int | None
    """For `weights`: the policy version whose weights it has."""
    seq_id: str | None
    token: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedFacts:
    """Findings other than operators and patches, as stored in the header of a result."""

    policy_version: int
    """Policy version of the recorded weights."""
    device: str
    """`cpu` or `cuda`."""
    a: str
    """Name of the arm that execution a replays."""
    b: str
    chosen: str
    """Description of how the compared sequences were chosen."""
    sequences: tuple[LocatedSequence, ...]
    num_tokens: int
    """Number of compared response tokens."""
    mean_abs_d: float
    """Mean |d| of d = logprob(b) - logprob(a), nats."""
    max_abs_d: float
    weights: tuple[WeightDifference, ...]
    routers: tuple[Router, ...]
    """In forward order; empty without a mixture of experts."""
    unseen: tuple[str, ...]
    """Kinds of operators that only one execution has."""
    engines: tuple[str, ...]
    """Sides run by vLLM: eager, neither compiled nor in CUDA graphs, and without a prefix cache."""
    first: Divergence | None
    """First divergence; None if rounding explains everything."""
    unjudged: dict[str, str] = field(default_factory=dict)
    """What could not be judged or done -> the reason; everything else is judged without it."""

    def facts(self) -> dict[str, Any]:
        """Return these fields by name."""
        return {each.name: getattr(self, each.name) for each in fields(LocatedFacts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Located(LocatedFacts):
    """Where two executions diverge on some sequences of a step."""

    run: str
    step: int
    operators: tuple[OperatorError, ...]
    products: Mapping[tuple[str, str], Mapping[str, float]]
    """(side, operator) -> sequence -> sum over tokens of d times the contribution of the operator's own error to d,
    nats^2. Over all operators of both sides they add up to the sum of d^2, if the model is linear in the errors.
    """
    patches: tuple[Patch, ...]
    only: str = ""
    """Limits of the question: `layers 2:8`, `operators q_proj,rotary`, or both; empty for everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultHeader(LocatedFacts):
    """Contents of locate/<id>.json: one stored result without its rows."""

    format: int
    id: str
    """Id of the result's question; part of the names of the result's files."""
    run_id: str
    question: LocateQuestion
    made_at: str
    """ISO 8601 in UTC."""
    made_by: str
    """Version of tim-trace that wrote the result."""
    versions: dict[str, str]
    """Name of a library that can change a logprob -> its version."""
    files: dict[str, SealedFile]
    """Path in the trace -> SealedFile of the table at that path. There are two tables: operators and patches."""

    def to_json(self) -> str:
        return to_document(asdict(self))


def parse_header(content: bytes, where: str) -> ResultHeader:
    """Parse locate/<id>.json; unknown fields are ignored. Raises DamagedTrace and NewerTrace."""
    values = read_document(content, where, _WHAT, needs_checksum=True)
    if isinstance(made := values.get("format"), int) and made > FORMAT:
        raise NewerTrace(f"{where}: has format {made}, from a later release; this release reads up to {FORMAT}")
    try:
        # JSON has no NaN or infinities; they are stored as strings.
        return msgspec.convert(values, ResultHeader, strict=False)
    except (msgspec.ValidationError, RecursionError) as error:
        raise DamagedTrace(f"{where}: not {_WHAT} ({str(error).splitlines()[0]}); run locate again") from error
