"""Results of `locate`: the question, the findings, and their file, one per result, in a trace's locate/ folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from .. import __version__
from ..schemas.documents import MAX_BYTES, now, read_document, to_document
from ..schemas.errors import DamagedTrace, NewerTrace, StorageError, TimTraceError
from ..schemas.layout import LOCATE
from .environment import numeric_versions
from .store import Store
from .whole_file import write_part

A, B = "a", "b"
"""The two executions: `a` is the one under examination, `b` the one to which it is compared."""
ROUTES = "routes"
"""Name of the patch that replaces one execution's expert choices with the other's."""
BEYOND = 1.0
"""Largest error that rounding explains, in units of the rounding bound; above it, an operator counts as divergent."""
FORMAT = 1
"""Format version of a stored result."""
_WHAT = "a locate result"
_AGAIN = "run locate again, or delete the file"
_NAME = re.compile(r"[0-9a-f]{16}\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocateQuestion:
    """Arguments of a `locate` command. Identical arguments share an id, under which the newest result is stored."""

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
    """Return a question's limits, such as `layers 2:8` or `operators q_proj,rotary`; empty without limits."""
    return " and ".join(f"{name} {text}" for name, text in (("layers", layers), ("operators", operators)) if text)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorError:
    """Error that an operator adds in one execution, measured over all sequences against float64 on the same inputs."""

    side: str
    """The execution, `a` or `b`."""
    order: int
    """The operator's position in the forward pass."""
    operator: str
    """Name of the module, or a name such as `layers.7.residual` for a computation between modules."""
    kind: str
    """Last part of the name."""
    layer: int | None
    """Layer index, counted from 0; None for an operator outside the layers."""
    dtype: str
    """Output dtype, as torch names it."""
    num_values: int
    """Number of output values."""
    introduced: float
    """Root mean square of the error that the operator itself introduces, relative to the RMS of the exact result."""
    ratio: float
    """Largest error that the operator introduces, divided by the rounding bound; rounding explains values up to 1."""
    seq_id: str
    """Sequence with the largest `ratio`."""
    token: int
    """Token with the largest error, counted from 0 over the prompt and response of the sequence `seq_id`."""
    inherited: float | None
    """RMS difference between the inputs in a and b, relative to a's input RMS; None without a common input."""
    difference: float | None
    """RMS difference between the outputs in a and b, relative to a's output RMS; None without a common output."""
    in_double: float | None
    """Largest relative error at any token when the operator's code runs in float64; None if this was not tried."""

    @property
    def is_beyond(self) -> bool:
        return self.ratio > BEYOND


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedSequence:
    """A sequence that both executions ran, with its mismatch per token: d = logprob(b) - logprob(a), nats."""

    seq_id: str
    group: str
    """Id shared by all sequences with the same prompt."""
    num_tokens: int
    sum_square: float
    """Sum of d^2 over the sequence's tokens, nats^2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDifference:
    """A weight tensor that differs between an execution and the recording, compared in the execution's dtype."""

    side: str
    tensor: str
    layer: int | None
    largest: float
    """Largest absolute difference between the two tensors' elements."""
    version: int | None
    """Policy version whose recorded tensor is identical to the execution's; None if there is none."""
    share: float = 1.0
    """Fraction of the tensor's elements that differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How often a router selects different experts in the two executions, which is a discontinuous effect."""

    operator: str
    layer: int | None
    num_tokens: int
    num_flipped: int
    """Number of tokens for which the two executions select different sets of experts."""
    margin: float | None = None
    """Largest distance from a tie among tokens with different experts: in execution a, the lowest score among selected
    experts minus the highest score among the others. None if no token has different experts, or if the choice does not
    depend on the scores alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Mismatch that remains if some operators of one execution run the other's code on unchanged inputs."""

    patch: str
    """Patched operators: a kind of operator, `all operators`, or `routes` for differing expert choices."""
    taker: str
    """Execution whose operators were replaced: `a` or `b`."""
    num_operators: int
    squares_left: tuple[float, ...]
    """Sum of d^2 for each sequence in the result, with the operators replaced, nats^2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first operator in the forward pass whose error is larger than rounding can explain."""

    side: str
    operator: str
    kind: str
    layer: int | None
    why: str
    """`weights`: different weights; `beyond`: error above the rounding bound; `code`: different even in float64."""
    ratio: float | None
    version: int | None
    """If `why` is `weights`, the policy version that the operator's weights belong to; else None."""
    seq_id: str | None
    token: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Where two executions diverge, on the sequences chosen from one step."""

    run: str
    step: int
    policy_version: int
    """Policy version of the recorded weights."""
    device: str
    """`cpu` or `cuda`."""
    a: str
    """Name of the replay arm that defines execution a."""
    b: str
    only: str = ""
    """Limits of the question, such as `layers 2:8` or `operators q_proj,rotary`; empty without limits."""
    chosen: str
    """How the compared sequences were chosen."""
    num_tokens: int
    """Number of compared response tokens."""
    mean_abs_d: float
    """Mean of |d| over the compared tokens, where d = logprob(b) - logprob(a), in nats."""
    max_abs_d: float
    operators: tuple[OperatorError, ...]
    weights: tuple[WeightDifference, ...]
    routers: tuple[Router, ...]
    """One entry per router, in the order of the forward pass; empty if the model has no mixture of experts."""
    unseen: tuple[str, ...]
    """Kinds of operators that only one execution has."""
    engines: tuple[str, ...]
    """Executions that vLLM ran, `a` or `b`: in eager mode, without compilation, CUDA graphs or a prefix cache."""
    first: Divergence | None
    """First operator whose error is larger than rounding can explain; None if there is none."""
    unjudged: dict[str, str] = field(default_factory=dict)
    """Checks that could not be made, each with the reason. All other findings were made without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located(Findings):
    """The findings, with the values from which shares of the mismatch are computed."""

    sequences: tuple[LocatedSequence, ...]
    products: Mapping[tuple[str, str], Mapping[str, float]]
    """For each (execution, operator) and sequence, the sum over its tokens of d * (part of d due to the operator's own
    error), nats^2. If the model is linear in the errors, these sums over all operators of both executions add up to the
    sum of d^2."""
    patches: tuple[Patch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResult:
    """A result stored in a trace: the contents of locate/<id>.json."""

    format: int
    id: str
    """Id of the question that the result answers."""
    run_id: str
    question: LocateQuestion
    made_at: str
    """Time when the result was created, ISO 8601 in UTC."""
    made_by: str
    """Version of tim-trace that created the result."""
    versions: dict[str, str]
    """Versions of the libraries that can affect logprobs."""
    found: Located

    @property
    def relative(self) -> str:
        """Path of the result's file, relative to the trace."""
        return result_path(self.id)


def result_path(result: str) -> str:
    """Return the path of a result's file, relative to the trace."""
    return f"{LOCATE}/{result}.json"


def result_ids(store: Store) -> list[str]:
    """Return the ids of all `locate` results stored in a trace."""
    return [name.removesuffix(".json") for name in store.files(LOCATE) if _NAME.fullmatch(name)]


def write_result(store: Store, result: str, question: LocateQuestion, found: Located) -> str:
    """Store a result under its question's id and return its path. Raises OSError and StorageError."""
    kept = KeptResult(
        format=FORMAT, id=result, run_id=store.manifest().run_id, question=question, made_at=now(), made_by=__version__,
        versions=numeric_versions(), found=found,
    )  # fmt: skip
    values = asdict(kept)
    values["found"]["products"] = [[*operator, own] for operator, own in found.products.items()]
    content = to_document(values).encode()
    if len(content) > MAX_BYTES:
        raise StorageError(f"the result has {len(content):,} bytes, more than {MAX_BYTES:,}; locate fewer sequences")
    write_part(Path(store.root), kept.relative, content)
    return kept.relative


def read_result(store: Store, result: str) -> KeptResult:
    """Read a stored result; unknown fields are ignored. Raises DamagedTrace, NewerTrace and FileNotFoundError."""
    where = store.shown(result_path(result))
    values = read_document(store.read_json(result_path(result)), where, _WHAT)
    if isinstance(made := values.get("format"), int) and made > FORMAT:
        raise NewerTrace(f"{where}: has format {made} of a newer release; this release reads up to format {FORMAT}")
    try:
        found: dict[str, Any] = values["found"]
        found["products"] = {(side, operator): own for side, operator, own in found["products"]}
        # JSON has no NaN and no infinities, so they are stored as strings.
        kept = msgspec.convert(values, KeptResult, strict=False)
    except (msgspec.ValidationError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise DamagedTrace(f"{where}: not {_WHAT} ({str(error).splitlines()[0]}); run locate again") from error
    if kept.id != result:
        raise DamagedTrace(f"{where}: belongs to result {kept.id}; {_AGAIN}")
    if kept.run_id != store.manifest().run_id:
        raise DamagedTrace(f"{where}: belongs to run {kept.run_id}, not to this one; delete it")
    if not _is_possible(kept.found):
        raise DamagedTrace(f"{where}: contains values that locate does not write; {_AGAIN}")
    return kept


def _is_possible(found: Located) -> bool:
    """Return True if operators and patches belong to execution a or b, and refer to the result's sequences."""
    names = {each.seq_id for each in found.sequences}
    sides = {each.side for each in found.operators} | {each.taker for each in found.patches}
    return (
        sides <= {A, B}
        and all(len(each.squares_left) == len(found.sequences) for each in found.patches)
        and all(own.keys() <= names for own in found.products.values())
    )


def read_results(store: Store) -> tuple[list[KeptResult], list[str]]:
    """Return every `locate` result in a trace, newest last, and a sentence for each result that cannot be read."""
    found, damaged = [], []
    for result in result_ids(store):
        try:
            found.append(read_result(store, result))
        except FileNotFoundError:  # the result was deleted after it was listed
            continue
        except (TimTraceError, OSError) as error:
            damaged.append(str(error))
    return sorted(found, key=lambda each: (each.made_at, each.id)), damaged
