"""What was found where two executions part."""

from __future__ import annotations

from dataclasses import dataclass, field

A, B = "a", "b"
"""The two executions: the one that is asked about, and the one that it is held against."""
ROUTES = "routes"
"""The patch that gives an execution the other's choices of experts."""
BEYOND = 1.0
"""An introduced error of more than so many bounds is no rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorError:
    """What one operator of one execution introduced, over all chosen sequences, against float64 on the same inputs."""

    side: str
    """`a` or `b`."""
    order: int
    """Its place in the forward."""
    operator: str
    """Its module's name; `layers.7.residual` and the like for what lies between modules."""
    kind: str
    layer: int | None
    """From 0; None outside of layers."""
    dtype: str
    """Of what it gives, torch's name."""
    num_values: int
    introduced: float
    """Root mean square of its own error, relative to that of the exact result."""
    ratio: float
    """Its largest own error, in units of the bound of what rounding can do; beyond 1 it computes something else."""
    seq_id: str
    token: int
    """Where that is: the sequence, and the token of prompt and response, from 0."""
    inherited: float | None
    """Root mean square of the difference of both executions' inputs, relative to a's; None where they have none in common."""
    difference: float | None
    """The same of what both give."""
    in_double: float | None
    """`introduced` of a token where it is largest, when the same code runs in float64; None where that was not done."""

    @property
    def is_beyond(self) -> bool:
        return self.ratio > BEYOND


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedSequence:
    """A sequence that was looked at: its gap d = logprob(b) - logprob(a), nats."""

    seq_id: str
    group: str
    """Sequences of one prompt have the same."""
    num_tokens: int
    sum_square: float
    """Of d, nats^2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedError:
    """What an operator's own error adds to a sequence's gap, to first order."""

    side: str
    operator: str
    kind: str
    layer: int | None
    seq_id: str
    product: float
    """Sum over tokens of d times what the error adds to d, nats^2: over all operators of both sides this gives the sum of
    d^2, as far as the model is linear in the errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDifference:
    """A tensor that an execution holds, and that is not the recorded one in its dtype."""

    side: str
    tensor: str
    layer: int | None
    largest: float
    """Largest absolute difference."""
    version: int | None
    """The policy version whose recorded tensor it is; None where it is none's."""
    share: float = 1.0
    """Of its numbers, how many differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How often the two executions choose other experts: a step in the model, which no sum of small errors explains."""

    operator: str
    layer: int | None
    num_tokens: int
    num_flipped: int
    """Tokens with another set of experts."""
    margin: float | None = None
    """Of these, the largest distance between the lowest score of an expert that a chose and the highest of one that it did not, in
    the scores that the router gives: how far the widest flip was from a tie. None without flips, and where the choice is not
    by these scores alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedSequence:
    """One sequence's gap when operators of one execution are computed by the other's code, on their own inputs."""

    name: str
    """What was patched: a kind of operator, `layers 0 to 7`, `all operators`, or `routes`: the choices of experts that differ."""
    taker: str
    """The side whose operators were replaced."""
    num_operators: int
    seq_id: str
    sum_square_left: float
    """Of d, with the operators replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first operator whose result is not to be explained by rounding."""

    side: str
    operator: str
    kind: str
    layer: int | None
    why: str
    """`weights`: it holds other ones; `beyond`: its own error is beyond its bound; `code`: its code computes something else in
    float64."""
    ratio: float | None
    version: int | None
    """With `weights`: the policy version that they are of."""
    seq_id: str | None
    token: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where two executions part over some sequences of a step."""

    run: str
    step: int
    policy_version: int
    """Of the recorded weights."""
    device: str
    """`cpu` or `cuda`."""
    a: str
    """Name of its arm."""
    b: str
    sequences: tuple[LocatedSequence, ...]
    chosen: str
    """How they were chosen."""
    num_tokens: int
    """Response tokens that were compared."""
    mean_abs_d: float
    """Of d = logprob(b) - logprob(a), nats."""
    max_abs_d: float
    operators: tuple[OperatorError, ...]
    carried: tuple[CarriedError, ...]
    weights: tuple[WeightDifference, ...]
    routers: tuple[Router, ...]
    """In the order of the forward; empty without a mixture of experts."""
    patches: tuple[PatchedSequence, ...]
    unseen: tuple[str, ...]
    """Operators that only one execution has, or whose inside a fused kernel hides: `attention: scores, softmax and values`."""
    first: Divergence | None
    """None where nothing but rounding was found."""
    engines: tuple[str, ...]
    """The sides that vLLM ran: eager, neither compiled nor in CUDA graphs, and without a prefix cache."""
    unjudged: dict[str, str] = field(default_factory=dict)
    """Operators whose form was not understood, and what else could not be done -> why; the rest is judged without them."""
    only: str = ""
    """What alone was looked at: `layers 2:8`, `operators q_proj,rotary`, or both; empty where everything was."""

    def products(self) -> dict[tuple[str, str], dict[str, float]]:
        """(side, operator) -> sequence -> `product` of its errors, added up: a residual stream is judged at two places."""
        found: dict[tuple[str, str], dict[str, float]] = {}
        for each in self.carried:
            own = found.setdefault((each.side, each.operator), {})
            own[each.seq_id] = own.get(each.seq_id, 0.0) + each.product
        return found


def only(layers: str | None, operators: str | None) -> str:
    """What alone is looked at, in words; empty where everything is."""
    return " and ".join(f"{name} {text}" for name, text in (("layers", layers), ("operators", operators)) if text)
