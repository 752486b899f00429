"""Results of `locate`, each in its own file in a trace's locate/ folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ..schemas.documents import MAX_BYTES, now, read_document, to_document
from ..schemas.errors import DamagedTrace, NewerTrace, StorageError, TimTraceError
from ..schemas.layout import LOCATE
from ..schemas.version import __version__
from .environment import numeric_versions
from .store import Store
from .whole_file import write_part

A, B = "a", "b"
"""`a` is the execution under examination, and `b` is the reference."""
ROUTES = "routes"
"""Name of the patch that replaces one execution's expert choices with the other's."""
BEYOND = 1.0
"""Rounding cannot explain an error above this multiple of the rounding bound."""
FORMAT = 1
_WHAT = "a locate result"
_AGAIN = "Run locate again, or delete the file"
_NAME = re.compile(r"[0-9a-f]{16}\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocateQuestion:
    """Arguments of a `locate` call. Another call with the same arguments replaces the earlier result."""

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
    return " and ".join(f"{name} {text}" for name, text in (("layers", layers), ("operators", operators)) if text)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorError:
    """Error that an operator adds in one execution, measured against float64 on the same inputs."""

    side: str
    """Execution, `a` or `b`."""
    order: int
    """Position of the operator in the forward pass."""
    operator: str
    """Module name, or a name such as `layers.7.residual` for a computation between modules."""
    kind: str
    """Last part of the operator's name."""
    layer: int | None
    """Layer index from 0, or None outside the layers."""
    dtype: str
    """Output dtype (torch name)."""
    num_values: int
    """Number of output values."""
    introduced: float
    """Root mean square (RMS) error introduced by the operator itself, relative to the exact result's RMS."""
    ratio: float
    """Largest introduced error, divided by the rounding bound. Rounding explains ratios up to 1."""
    seq_id: str
    """Sequence in which `ratio` is largest."""
    token: int
    """Index of the token with the largest error, counted from 0 over the prompt and response."""
    inherited: float | None
    """RMS difference between the inputs in `a` and `b`, relative to their RMS in `a`. None if no input is shared."""
    difference: float | None
    """RMS difference between the outputs in `a` and `b`, relative to their RMS in `a`. None if no output is shared."""
    in_double: float | None
    """Largest relative error at any token when the operator's code runs in float64. None if float64 was not tried."""

    @property
    def is_beyond(self) -> bool:
        return self.ratio > BEYOND


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedSequence:
    """A sequence that both executions computed. Its mismatch at a token is d = logprob(b) - logprob(a) (nats)."""

    seq_id: str
    group: str
    num_tokens: int
    sum_square: float
    """Sum of d^2 (nats^2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDifference:
    """A weight tensor that differs from the recording, compared in the execution's dtype."""

    side: str
    tensor: str
    layer: int | None
    largest: float
    """Largest absolute difference between corresponding elements."""
    version: int | None
    """Policy version whose recorded tensor is identical to this one, or None."""
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Differences between the experts that a router selects in the two executions."""

    operator: str
    layer: int | None
    num_tokens: int
    num_flipped: int
    """Number of tokens at which the two executions select different experts."""
    margin: float | None = None
    """Largest margin among the flipped tokens. A token's margin is the lowest score of a selected expert minus the
    highest score of an expert not selected, both in execution `a`. None if no token is flipped, or if the choice
    depends on more than the scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Mismatch that remains if one execution runs some of the other execution's operators on its own inputs."""

    patch: str
    """Patched operators: one kind, `all operators`, or `routes` for the expert choices that differ."""
    taker: str
    """Execution in which operators are replaced, `a` or `b`."""
    num_operators: int
    squares_left: tuple[float, ...]
    """Remaining sum of d^2 (nats^2) in each of the result's sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first operator in the forward pass whose error is larger than rounding can explain."""

    side: str
    operator: str
    kind: str
    layer: int | None
    why: str
    """`weights`: different weights. `beyond`: error above the rounding bound. `code`: differs even in float64."""
    ratio: float | None
    version: int | None
    """Policy version that the weights belong to, if `why` is `weights`."""
    seq_id: str | None
    token: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Differences between two executions on the sequences of one step."""

    run: str
    step: int
    policy_version: int
    device: str
    a: str
    b: str
    only: str = ""
    """Limits of the search, such as `layers 2:8` or `operators q_proj,rotary`. Empty if there are none."""
    chosen: str
    num_tokens: int
    """Number of response tokens compared."""
    mean_abs_d: float
    """Mean |d| over the compared tokens (nats), where d = logprob(b) - logprob(a)."""
    max_abs_d: float
    operators: tuple[OperatorError, ...]
    weights: tuple[WeightDifference, ...]
    routers: tuple[Router, ...]
    """Routers in the order of the forward pass. Empty if the model is not a mixture of experts."""
    unseen: tuple[str, ...]
    """Operator kinds that only one execution has."""
    engines: tuple[str, ...]
    """Executions (`a` or `b`) that ran in vLLM, in eager mode without compilation, CUDA graphs or prefix cache."""
    first: Divergence | None
    """First divergence, or None if rounding can explain all errors."""
    unjudged: dict[str, str] = field(default_factory=dict)
    """Checks that could not be run, with the reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located(Findings):
    """Findings, plus the values needed to compute each operator's share of the mismatch."""

    sequences: tuple[LocatedSequence, ...]
    products: Mapping[tuple[str, str], Mapping[str, float]]
    """For each (execution, operator) and sequence: sum over tokens of d times the operator's contribution to d (nats^2).
    If the model were linear in the errors, these sums would add up to the sum of d^2."""
    patches: tuple[Patch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResult:
    """Contents of locate/<id>.json."""

    format: int
    id: str
    run_id: str
    question: LocateQuestion
    made_at: str
    made_by: str
    versions: dict[str, str]
    found: Located

    @property
    def relative(self) -> str:
        return result_path(self.id)


def result_path(result: str) -> str:
    return f"{LOCATE}/{result}.json"


def result_ids(store: Store) -> list[str]:
    return [name.removesuffix(".json") for name in store.files(LOCATE) if _NAME.fullmatch(name)]


def write_result(store: Store, result: str, question: LocateQuestion, found: Located) -> str:
    kept = KeptResult(
        format=FORMAT, id=result, run_id=store.manifest().run_id, question=question, made_at=now(), made_by=__version__,
        versions=numeric_versions(), found=found,
    )  # fmt: skip
    values = asdict(kept)
    values["found"]["products"] = [[*operator, own] for operator, own in found.products.items()]
    content = to_document(values).encode()
    if len(content) > MAX_BYTES:
        raise StorageError(f"the result takes {len(content):,} bytes (limit: {MAX_BYTES:,}). Locate fewer sequences")
    write_part(Path(store.root), kept.relative, content)
    return kept.relative


def read_result(store: Store, result: str) -> KeptResult:
    where = store.shown(result_path(result))
    values = read_document(store.read_json(result_path(result)), where, _WHAT)
    if isinstance(made := values.get("format"), int) and made > FORMAT:
        raise NewerTrace(f"{where} has format {made} from a newer release. This release reads up to format {FORMAT}")
    try:
        found: dict[str, Any] = values["found"]
        found["products"] = {(side, operator): own for side, operator, own in found["products"]}
        # JSON has no NaN or infinities, so they are stored as strings, which `strict=False` converts.
        kept = msgspec.convert(values, KeptResult, strict=False)
    except (msgspec.ValidationError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise DamagedTrace(f"{where} is not {_WHAT} ({str(error).splitlines()[0]}). Run locate again") from error
    if kept.id != result:
        raise DamagedTrace(f"{where} belongs to result {kept.id}. {_AGAIN}")
    if kept.run_id != store.manifest().run_id:
        raise DamagedTrace(f"{where} belongs to run {kept.run_id}, not to this one. Delete it")
    if not _is_possible(kept.found):
        raise DamagedTrace(f"{where} contains values that locate never writes. {_AGAIN}")
    return kept


def _is_possible(found: Located) -> bool:
    names = {each.seq_id for each in found.sequences}
    sides = {each.side for each in found.operators} | {each.taker for each in found.patches}
    return (
        sides <= {A, B}
        and all(len(each.squares_left) == len(found.sequences) for each in found.patches)
        and all(own.keys() <= names for own in found.products.values())
    )


def read_results(store: Store) -> tuple[list[KeptResult], list[str]]:
    """Return all results, newest last, and a sentence for each unreadable one."""
    found, damaged = [], []
    for result in result_ids(store):
        try:
            found.append(read_result(store, result))
        except FileNotFoundError:  # the result was deleted after it was listed
            continue
        except (TimTraceError, OSError) as error:
            damaged.append(str(error))
    return sorted(found, key=lambda each: (each.made_at, each.id)), damaged
