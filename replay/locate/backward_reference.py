"""The recorded model in float64, which checks each operator's backward on the execution's own incoming gradient.

The model repeats an execution's forward and backward pass. At every operator's inputs and outputs, and at the residual
stream into each layer, the execution's values are substituted in the forward, and its gradients in the backward. So
each vector-Jacobian product, and each computation between two operators, is computed from the execution's own values,
and no earlier error counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...tracer.weights.reader import Tensor
from ..backends.double import keep_double
from ..batching import ForwardBatch
from ..gradients.scorer import GradientScorer
from . import backward_bounds as bounds
from .backward_bounds import BackwardRounding
from .backward_results import BETWEEN, DETACHED, INPUT, PARAMETER
from .backward_taps import BackwardCall, Visited
from .bounds import growth
from .names import is_core
from .taps import fitting

HEAD, LOSS = "head", "loss"
"""Names for the computations between the last hidden states and the log-probabilities (head), and for those that follow
the log-probabilities (loss)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedGradient:
    """One gradient in one forward pass, compared with the gradient in float64."""

    operator: str
    what: str
    dtype: str
    error: float
    """Norm of the error that the operator introduced."""
    size: float
    """Norm of the exact gradient."""
    ratio: float


class BackwardReference:
    """A float64 model that checks the backward passes of executions."""

    def __init__(self, scorer: GradientScorer, tensors: Mapping[str, Tensor], executed: Any):
        """Build the model. `scorer` has a float64 arm with unfused attention; weights are copied from the `executed`
        model."""
        import torch

        self.scorer = scorer
        self.model: Any = scorer.build()
        scorer.put(self.model, tensors)
        scorer.attach(self.model)
        self.model.eval()
        held = dict(executed.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(held[name])

    def judge(
        self,
        batch: ForwardBatch,
        calls: Mapping[str, BackwardCall],
        logprobs: BackwardCall,
        gradients: Mapping[str, Any],
        loss: Callable[[Any], Any],
        head_dtype: Any,
    ) -> list[JudgedGradient]:
        """Return the gradients of one forward pass, compared with float64, in backward order. Parameters follow all
        operators."""
        import torch

        self.model.zero_grad(set_to_none=True)
        found = _Backward(self.model, calls, logprobs, gradients, head_dtype)
        with torch.enable_grad(), keep_double(), found.listening():
            value = loss(found.logprobs_of(self.scorer._scorer.logprobs(batch)))
            found.is_on = False
            value.backward()
        found.judge_parameters()
        return found.judged


class _Backward(Visited):
    """One forward and backward pass in float64, in which an execution's values are substituted."""

    def __init__(
        self,
        model: Any,
        calls: Mapping[str, BackwardCall],
        logprobs: BackwardCall,
        gradients: Mapping[str, Any],
        head_dtype: Any,
    ):
        super().__init__(model)
        self._model, self._own, self._logprobs, self._gradients = model, calls, logprobs, gradients
        self._head_dtype = head_dtype
        self.judged: list[JudgedGradient] = []
        self._parameters = {value: name for name, value in model.named_parameters()}
        self._more: dict[str, Any] = {}
        """Call of an attention core -> attention weights and scaling of the call."""
        self._bounds: dict[str, Any] = {}
        """Parameter -> sum over calls of the bounds on the error of its gradient."""
        self._contributions: dict[int, Any] = {}
        """Address of a tensor -> magnitudes, per token, of the gradients that operators added to the tensor's
        gradient."""
        self._held: list[Any] = []
        """Tensors that are kept alive so that their addresses are not reused."""
        self._seen_hidden = False

    def _put(self, value: Any, own: Any, note: Callable[[Any], Any]) -> Any:
        """Return the execution's value, substituted in the forward pass; in the backward pass, `note` replaces the
        gradient."""
        put = _function().apply(value, own.detach().reshape(value.shape).to(value.dtype), note)
        self._held += [value, put]
        return put

    # --- forward ------------------------------------------------------------------------------------------------------

    def takes(self, name: str, values: list[Any]) -> list[Any]:
        call = self._own.get(name)
        return values if call is None else [self._taken(name, call, slot, each) for slot, each in enumerate(values)]

    def _taken(self, name: str, call: BackwardCall, slot: int, value: Any) -> Any:
        own, address = fitting(call.takes, slot, value), value.data_ptr()
        if own is None:
            return value
        if not value.requires_grad:
            return own.reshape(value.shape).to(value.dtype)

        def note(exact: Any) -> Any:
            if not call.asks[slot]:
                return (
                    exact  # The gradient was cut off at an earlier place in the backward pass, and is reported there.
                )
            found = _found(call.passed.get(slot), exact)
            contribution = found.abs().amax(-1).reshape(-1)
            known = self._contributions.get(address)
            if known is None or known.shape == contribution.shape:
                self._contributions[address] = contribution if known is None else known + contribution
            self._add(name, INPUT, call.passed.get(slot), exact, self._input_bound(name, call, slot, exact))
            return found

        return self._put(value, own, note)

    def enters(self, name: str, value: Any) -> Any:
        call = self._own.get(name)
        if call is None or not value.requires_grad:
            return value
        address, passed = value.data_ptr(), call.passed

        def note(exact: Any) -> Any:
            found = _found(passed.get(0), exact)
            self._contributions[address] = found.abs().amax(-1).reshape(-1)
            rounding = BackwardRounding.of(call.takes[0], passed.get(0))
            bound = bounds.of_between(exact, self._largest(exact), rounding)
            self._add(name, BETWEEN, passed.get(0), exact, bound)
            return found

        return self._put(value, call.takes[0], note)

    def gives(self, name: str, more: Any, values: list[Any]) -> list[Any]:
        call = self._own.get(name)
        self._more[name] = more
        return values if call is None else [self._given(name, call, slot, each) for slot, each in enumerate(values)]

    def _given(self, name: str, call: BackwardCall, slot: int, value: Any) -> Any:
        own = fitting(call.gives, slot, value)
        if own is None:
            return value
        if not value.requires_grad:
            return own.reshape(value.shape).to(value.dtype)
        kept: list[Any] = []

        def note(exact: Any) -> Any:
            came = call.came.get(slot)
            rounding = BackwardRounding.of(own, came, *call.takes)
            if not call.follows[slot]:
                self._add(name, DETACHED, came, exact, bounds.of_between(exact, 0.0, rounding))
            else:
                self._judge_between(name, call, exact, rounding, kept[0], own)
            found = _found(came, exact)
            self._bound_parameters(name, call, found)
            return found

        put = self._put(value, own, note)
        kept.append(put.data_ptr())
        return put

    def logprobs_of(self, value: Any) -> Any:
        """Return the execution's log-probabilities in place of the float64 model's."""

        def note(exact: Any) -> Any:
            came = self._logprobs.came.get(0)
            unit = 2.0**-24 if came is None or came.dtype.itemsize >= 4 else 2.0**-8
            bound = (growth(exact.numel()) + 64.0) * unit * (exact.abs() + 1e-3 * exact.abs().max())
            self._add(LOSS, BETWEEN, came, exact, bound)
            return _found(came, exact)

        return self._put(value, self._logprobs.gives[0], note)

    # --- backward -----------------------------------------------------------------------------------------------------

    def _judge_between(
        self, name: str, call: BackwardCall, exact: Any, rounding: BackwardRounding, address: int, own: Any
    ) -> None:
        """Check the gradient that reaches an operator's output. The first gradient comes from the head and the loss."""
        came = call.came.get(0)
        if not self._seen_hidden:
            self._seen_hidden = True
            self._add(HEAD, BETWEEN, came, exact, self._head_bound(own))
            return
        size = self._contributions.get(address)
        tokens = exact.shape[:-1]
        added = size.reshape(*tokens, 1) if size is not None and size.numel() == tokens.numel() else 0.0
        length = exact.shape[1] if exact.dim() > 2 else len(exact)
        self._add(f"{name}.output", BETWEEN, came, exact, bounds.of_between(exact, added, rounding, angles=length))

    def _head_bound(self, hidden: Any) -> Any:
        """Return a bound on the error of the last hidden states' gradient, from a projection, a log-softmax and their
        backward."""
        import torch

        weight = self._model.get_output_embeddings().weight
        rounding = BackwardRounding.of(torch.empty(0, dtype=self._head_dtype), hidden)
        lengths, rows = float(weight.detach().norm(dim=-1).max()), float(hidden.double().norm(dim=-1).max())
        per_logit = (growth(weight.shape[1]) * rounding.sums + 4.0 * rounding.out) * lengths * rows
        gradient = self._logprobs.came.get(0)
        largest = 0.0 if gradient is None else float(gradient.abs().max())
        off = 4.0 * per_logit + 24.0 * rounding.out + growth(len(weight)) * rounding.sums
        number = 1 if gradient is None else gradient.numel()
        self._add_bound(weight, off * largest * rows * number**0.5)
        return off * largest * float(weight.detach().abs().max()) * 2.0

    def _largest(self, exact: Any) -> Any:
        """Return [..., 1]: for each token, the largest element of the residual stream's gradient in this layer and all
        later ones."""
        sizes = [size for size in self._contributions.values() if size.numel() == exact.shape[:-1].numel()]
        return max(sizes, key=lambda size: float(size.max())).reshape(*exact.shape[:-1], 1) if sizes else 0.0

    def _input_bound(self, name: str, call: BackwardCall, slot: int, exact: Any) -> Any:
        import torch

        came = call.came.get(0)
        rounding = BackwardRounding.of(*call.takes, *call.gives, call.passed.get(slot))
        incoming = torch.zeros_like(call.gives[0]).double() if came is None else came.double()
        if is_core(name):
            weights, scaling = self._more[name]
            query, key, value = (each.double() for each in call.takes[:3])
            of_states = bounds.of_attention(
                (query, key, value), weights.detach(), incoming.transpose(1, 2), float(scaling), rounding
            )
            return of_states[slot]
        x = call.takes[slot].double().reshape(exact.shape)
        with torch.no_grad():
            return bounds.of_input(self.modules[name.partition("#")[0]], x, incoming, exact, rounding)

    def _bound_parameters(self, name: str, call: BackwardCall, incoming: Any) -> None:
        import torch

        plain = name.partition("#")[0]
        module = self.modules.get(plain)
        if module is None or not call.takes:
            return
        for own, parameter in module.named_parameters(recurse=False):
            rounding = BackwardRounding.of(*call.takes, *call.gives, self._gradients.get(f"{plain}.{own}"))
            with torch.no_grad():
                bound = bounds.of_parameter(module, own, call.takes[0].double(), incoming, parameter.grad, rounding)
            self._add_bound(parameter, bound)

    def _add_bound(self, parameter: Any, bound: Any) -> None:
        name = self._parameters[parameter]
        self._bounds[name] = self._bounds.get(name, 0.0) + bound

    def judge_parameters(self) -> None:
        """Check the gradients of parameters; the backward pass must have finished."""
        for parameter, name in self._parameters.items():
            if parameter.grad is None:
                continue
            found = self._gradients.get(name)
            kept = BackwardRounding.of(parameter if found is None else found)
            bound = self._bounds.get(name, 0.0) + 3.0 * kept.out * parameter.grad.abs()
            bound = bound + 96.0 * kept.out * float(parameter.grad.abs().max()) * (name not in self._bounds)
            self._add(name.rpartition(".")[0], PARAMETER, found, parameter.grad, bound)

    def _add(self, operator: str, what: str, own: Any, exact: Any, bound: Any) -> None:
        off = (_found(own, exact) - exact).abs()
        floor = float(exact.abs().max()) * 2.0**-40 + 1e-38
        units = off / (bound + floor)
        self.judged.append(
            JudgedGradient(
                operator=operator,
                what=what,
                dtype="" if own is None else str(own.dtype).removeprefix("torch."),
                error=float(off.norm()),
                size=float(exact.norm()),
                ratio=float(units.nan_to_num(nan=float("inf")).max()) if units.numel() else 0.0,
            )
        )


def _found(own: Any, exact: Any) -> Any:
    """Return an execution's gradient in the shape and dtype of the float64 gradient; zeros if the execution has
    none."""
    return exact.new_zeros(exact.shape) if own is None else own.reshape(exact.shape).to(exact.dtype)


def _function() -> Any:
    """Return an autograd function that substitutes a value in the forward pass, and the result of `note` in the
    backward pass."""
    import torch

    class Put(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, value: Any, own: Any, note: Callable[[Any], Any]) -> Any:
            context.note = note
            return own.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            return context.note(gradient.detach()), None, None

    return Put
