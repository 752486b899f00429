"""Values recorded from an execution in one row's forward pass, and bounds on their errors.

If an execution fuses an operator with others, the operator's possible error is added to the bound for the next
observed operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from . import bounds
from .bounds import Rounding
from .judged import Judgement
from .names import CallNames, kind_of, layer_of
from .taps import Call, RowTaps, tokens_first

ENDS_OF_ATTENTION = ("o_proj", "out_proj", "dense", "c_proj")
ENDS_OF_MLP = ("down_proj", "fc2", "dense_4h_to_h", "fc_out", "output_linear")
FIRST_OF_MLP = ("gate_proj", "fc1", "c_fc", "dense_h_to_4h", "fc_in")
_STEEPEST = 1.13
"""Maximum slope of the common activation functions (that of GELU)."""


class Arithmetic(Protocol):
    """Properties of an `Execution` that bounds depend on."""

    @property
    def weight_dtypes(self) -> dict[str, Any]: ...
    @property
    def rounds_scores(self) -> bool: ...
    @property
    def attention_cut(self) -> float: ...
    @property
    def coarsest(self) -> Any: ...


class Heard:
    def __init__(
        self, taps: RowTaps, execution: Arithmetic, recorded_dtypes: Mapping[str, Any], judgement: Judgement,
        first_position: int,
    ):  # fmt: skip
        self.taps, self.judgement, self.first_position = taps, judgement, first_position
        self._execution, self._recorded = execution, recorded_dtypes
        # Read these properties only once, because each iterates over all weights.
        self._dtypes, self._coarsest = execution.weight_dtypes, execution.coarsest
        self._names = CallNames()
        self._last = list(taps.calls)[-2:]
        self.entered: dict[int | None, Any] = {}
        """float64 inputs by layer index."""
        self.branches: list[Any] = []
        """Outputs of the attention and MLP layers that ran since the last residual addition."""
        self.unheard: dict[tuple[int | None, str], tuple[Any, Callable[[Any], Any]]] = {}
        """Unobserved operators by (layer, kind): exact output, and a function from dtype to error bound."""

    def begin(self, name: str) -> Call | None:
        """Begin an operator call. Return the recorded call, or None if it was not observed."""
        return self.taps.calls.get(self._names.next(name))

    def end(self, name: str) -> Call | None:
        """End an operator call. Return the recorded call, and release its values unless the head needs them."""
        called = self.called(name)
        call = self.taps.calls.get(called)
        if call is not None and called not in self._last:
            self.taps.calls[called] = Call((), ())
        return call

    def called(self, name: str) -> str:
        return self._names.present(name)

    def rounding(self, given: Any, taken: Any = None, **rest: Any) -> Rounding:
        coarsest = self._coarsest

        def finer(dtype: Any) -> Any:
            return coarsest if coarsest is not None and bounds.unit(dtype) > bounds.unit(coarsest) else dtype

        return Rounding(given=finer(given), taken=finer(given if taken is None else taken), **rest)

    def bound(
        self, name: str, module: Any, slot: int, value: Any, takes: tuple[Any, ...], call: Call, given: Any,
        made_in: Any = None,
    ) -> Any:  # fmt: skip
        first = next((each for each in call.takes if each is not None and each.is_floating_point()), given)
        rounding = self.rounding(made_in or given.dtype, first.dtype, **self._weight(name), adds=call.adds)
        bound = bounds.of_module(module, takes, value, slot, rounding, is_other_code=call.is_other_code)
        return tokens_first(_expanded(bound, value), given)

    def attention_bound(
        self, states: tuple[Any, ...], given: Any, kwargs: Mapping[str, Any], rounding: Rounding, *, turns: bool
    ) -> Any:
        query, key, value = (state[0].transpose(0, 1) for state in states)
        scaling = float(kwargs.get("scaling") or query.shape[-1] ** -0.5)
        last = self.first_position + len(query)
        off = [bounds.of_rotary(state, last, rounding) for state in (query, key)] if turns else ()
        return bounds.of_attention(
            query, key, value, given[1][0], given[0][0], scaling, rounding,
            rounds_scores=self._execution.rounds_scores, cut=self._execution.attention_cut, off=off,
        )  # fmt: skip

    def stream_bound(self, exact: Any, rounding: Rounding) -> Any:
        """Bound the error in the residual stream. The outputs of attention and MLPs may be scaled, and their partial
        sums rounded, before they are added to it."""
        size = exact.abs()
        for branch in self.branches:
            if branch.numel() == exact.numel():
                size = size + branch.double().reshape(exact.shape).abs()
        ends = [value for (_, kind), (value, _) in self.unheard.items() if kind in (*ENDS_OF_ATTENTION, *ENDS_OF_MLP)]
        return bounds.of_sum(size, rounding) + sum(
            bounds.of_branch(value.reshape(exact.shape), rounding) for value in ends if value.numel() == exact.numel()
        )

    def _weight(self, name: str) -> dict[str, Any]:
        own, recorded = (
            dtypes.get(f"{name}.weight", dtypes.get(f"{name}.base_layer.weight"))
            for dtypes in (self._dtypes, self._recorded)
        )
        is_renamed = own is None and recorded is not None
        return {"weight": self._coarsest if is_renamed else own, "recorded": recorded}

    def miss(self, name: str, given: Any, bound: Callable[[Any], Any]) -> None:
        layer = layer_of(name)
        if any(other != layer for other, _ in self.unheard):  # left over from a finished layer
            self.unheard.clear()
        self.unheard[layer, kind_of(name)] = given, bound

    def miss_module(self, name: str, module: Any, takes: tuple[Any, ...], value: Any) -> None:

        def bound(dtype: Any) -> Any:
            rounding = self.rounding(dtype, **self._weight(name))
            return _expanded(bounds.of_module(module, takes, value, 0, rounding), value)

        self.miss(name, value, bound)

    def missed(self, layer: int | None, kind: str, exact: Any, dtype: Any) -> tuple[Any, Any] | None:
        """Return the output and error bound of an operator that was not observed, shaped like `exact`, or None if it
        was observed or its output has another size."""
        value, bound = self.unheard.get((layer, kind), (None, None))
        if value is None or bound is None or value.numel() != exact.numel():
            return None
        return value.reshape(exact.shape), bound(dtype).reshape(exact.shape)

    def missed_mlp(self, name: str, layer: int | None, exact: Any, dtype: Any) -> Any:
        found = (self.missed(layer, kind, exact, dtype) for kind in FIRST_OF_MLP)
        gate = next((each for each in found if each is not None), None)
        if kind_of(name) not in ENDS_OF_MLP:  # `name` is the activation
            return 0.0 if gate is None or not bool((gate[0] == exact).all()) else gate[1]
        up = self.missed(layer, "up_proj", exact, dtype)
        both, of_both = self.unheard.get((layer, "gate_up_proj"), (None, None))
        if both is not None and of_both is not None and both.numel() == 2 * exact.numel():
            halves = zip(both.chunk(2, -1), of_both(dtype).chunk(2, -1), strict=True)
            gate, up = ((value.reshape(exact.shape), bound.reshape(exact.shape)) for value, bound in halves)
        total = 0.0 if up is None else (exact / up[0]).nan_to_num(0.0, 0.0, 0.0).abs() * up[1]
        if gate is not None and any((layer, kind) in self.unheard for kind in ("act_fn", "act", "activation_fn")):
            total = total + _STEEPEST * gate[1] * (1.0 if up is None else up[0].abs())
        return total


def _expanded(bound: Any, value: Any) -> Any:
    return (value.new_tensor(bound) if isinstance(bound, float) else bound).expand(value.shape)
