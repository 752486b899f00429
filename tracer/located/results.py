"""Results of `locate`: what it was asked, what it found, and the header of a result that is kept in a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgspec

from ...schemas.checksums import SealedFile
from ...schemas.documents import read_document, to_document
from ...schemas.errors import DamagedTrace, NewerTrace

A, B = "a", "b"
"""The two executions: the one asked about, and the one it is compared with."""
ROUTES = "routes"
"""The patch that gives an execution the other's choices of experts."""
BEYOND = 1.0
"""Rounding cannot explain an introduced error of more bounds than this."""
FORMAT = 1
"""Version of the header and the tables beside it."""
_WHAT = "a result of locate"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocateQuestion:
    """What `locate` was asked. The same question has the same id, and its newest result is kept."""

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
    """What a question is limited to: `layers 2:8`, `operators q_proj,rotary`, or both; empty for everything."""
    return " and ".join(f"{name} {text}" for name, text in (("layers", layers), ("operators", operators)) if text)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorError:
    """The error that one operator of one execution introduces, over all chosen sequences, against float64 on the same inputs."""

    side: str
    """`a` or `b`."""
    order: int
    """Its place in the forward."""
    operator: str
    """Name of the module; `layers.7.residual` and the like for what lies between modules."""
    kind: str
    layer: int | None
    """From 0; None outside of layers."""
    dtype: str
    """torch's name of the output's dtype."""
    num_values: int
    introduced: float
    """Root mean square of its own error, relative to that of the exact result."""
    ratio: float
    """Its largest own error, in units of the rounding bound; above 1 it computes something else."""
    seq_id: str
    token: int
    """Where that error is: the sequence, and the token of prompt and response, from 0."""
    inherited: float | None
    """Root mean square difference of the two executions' inputs, relative to a's; None if they share no input."""
    difference: float | None
    """The same for the outputs."""
    in_double: float | None
    """Largest `introduced` of a token when the same code runs in float64; None if that was not run."""

    @property
    def is_beyond(self) -> bool:
        return self.ratio > BEYOND


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedSequence:
    """A sequence that both executions ran, with its mismatch d = logprob(b) - logprob(a), nats."""

    seq_id: str
    group: str
    """Sequences of one prompt share it."""
    num_tokens: int
    sum_square: float
    """Sum of d^2, nats^2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDifference:
    """A tensor of an execution that differs from the recorded one in its dtype."""

    side: str
    tensor: str
    layer: int | None
    largest: float
    """Largest absolute difference."""
    version: int | None
    """The policy version whose recorded tensor it equals; None if it equals none."""
    share: float = 1.0
    """Fraction of its numbers that differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How often the two executions choose other experts: a step in the model, which no sum of small errors explains."""

    operator: str
    layer: int | None
    num_tokens: int
    num_flipped: int
    """Tokens with another set of experts."""
    margin: float | None = None
    """Over these tokens, the largest distance from a tie: the lowest score of an expert that a chose less the highest of one that it
    did not choose. None without flips, and where the choice does not follow from the scores alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """The mismatch left when operators of one execution are computed by the other's code, on their own inputs."""

    patch: str
    """What was patched: a kind of operator, `layers 0 to 7`, `all operators`, or `routes` for the choices of experts that differ."""
    taker: str
    """The side whose operators were replaced."""
    num_operators: int
    squares_left: tuple[float, ...]
    """Sum of d^2 with the operators replaced, per sequence of the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first operator whose result rounding does not explain."""

    side: str
    operator: str
    kind: str
    layer: int | None
    why: str
    """`weights`: it has other weights; `beyond`: its own error exceeds its bound; `code`: its code computes something else in
    float64."""
    ratio: float | None
    version: int | None
    """With `weights`: the policy version they are from."""
    seq_id: str | None
    token: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedFacts:
    """What was found apart from operators and patches, as the header of a kept result has it."""

    policy_version: int
    """Of the recorded weights."""
    device: str
    """`cpu` or `cuda`."""
    a: str
    """Name of its arm."""
    b: str
    chosen: str
    """How the sequences were chosen."""
    sequences: tuple[LocatedSequence, ...]
    num_tokens: int
    """Response tokens that were compared."""
    mean_abs_d: float
    """Of d = logprob(b) - logprob(a), nats."""
    max_abs_d: float
    weights: tuple[WeightDifference, ...]
    routers: tuple[Router, ...]
    """In the order of the forward; empty without a mixture of experts."""
    unseen: tuple[str, ...]
    """Kinds of operators that only one execution has."""
    engines: tuple[str, ...]
    """The sides that vLLM ran: eager, neither compiled nor in CUDA graphs, and without a prefix cache."""
    first: Divergence | None
    """None if rounding explains everything."""
    unjudged: dict[str, str] = field(default_factory=dict)
    """What could not be judged or done -> the reason; the rest is judged without it."""

    def facts(self) -> dict[str, Any]:
        """These fields by name."""
        return {each.name: getattr(self, each.name) for each in fields(LocatedFacts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Located(LocatedFacts):
    """Where two executions diverge over some sequences of a step."""

    run: str
    step: int
    operators: tuple[OperatorError, ...]
    products: Mapping[tuple[str, str], Mapping[str, float]]
    """(side, operator) -> sequence -> sum over tokens of d times what the operator's own error adds to d, nats^2. Over all
    operators of both sides they add up to the sum of d^2, as far as the model is linear in the errors."""
    patches: tuple[Patch, ...]
    only: str = ""
    """What the question was limited to: `layers 2:8`, `operators q_proj,rotary`, or both; empty for everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultHeader(LocatedFacts):
    """locate/<id>.json: one kept result without its rows."""

    format: int
    id: str
    """Of its question; names its files."""
    run_id: str
    question: LocateQuestion
    made_at: str
    """ISO 8601 in UTC."""
    made_by: str
    """Version of tim-trace."""
    versions: dict[str, str]
    """Libraries that can change a logprob -> version."""
    files: dict[str, SealedFile]
    """Path in the trace -> account of the table written there: one of operators, one of patches."""

    def to_json(self) -> str:
        return to_document(asdict(self))


def parse_header(content: bytes, where: str) -> ResultHeader:
    """Read locate/<id>.json; unknown fields are ignored. Raises DamagedTrace and NewerTrace."""
    values = read_document(content, where, _WHAT, needs_checksum=True)
    if isinstance(made := values.get("format"), int) and made > FORMAT:
        raise NewerTrace(f"{where}: format {made} of a later release; this one reads up to {FORMAT}")
    try:
        # JSON has no NaN and no infinities: they are strings there.
        return msgspec.convert(values, ResultHeader, strict=False)
    except (msgspec.ValidationError, RecursionError) as error:
        raise DamagedTrace(f"{where}: not {_WHAT} ({str(error).splitlines()[0]}); run locate again") from error
