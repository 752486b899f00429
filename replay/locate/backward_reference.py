"""What each operator's backward should have passed on for what came back to it, in float64.

The recorded model runs forward and backward in float64 over an execution's own forward. At every operator's inputs and outputs,
and at the residual stream into each layer, the execution's numbers are put in on the way forth, and its gradients on the way
back. So each vector-Jacobian product, and what lies between two operators, is computed of the execution's own numbers, and no error
that came before counts.
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
from .backward_taps import STREAM, BackwardCall, Visited
from .bounds import growth
from .names import is_core, kind_of
from .taps import operators

HEAD, LOSS = "head", "loss"
"""What lies behind the last hidden states, and behind the log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedGradient:
    """One gradient of one forward, held against float64."""

    operator: str
    what: str
    dtype: str
    error: float
    """Length of what was introduced."""
    size: float
    """Of the exact gradient."""
    ratio: float


class BackwardReference:
    """A model in float64 that judges the backward of executions."""

    def __init__(self, scorer: GradientScorer, tensors: Mapping[str, Tensor]):
        """`scorer` has an arm of float64 with unfused attention."""
        self.scorer = scorer
        self.model: Any = scorer.build()
        scorer.put(self.model, tensors)
        scorer.attach(self.model)
        self.model.eval()
        self._modules = operators(self.model, adapters_apart=True)
        self.owner = {name: name.rpartition(".")[0] for name, _ in self.model.named_parameters(remove_duplicate=False)}

    def take_weights(self, model: Any) -> None:
        """Use an execution's own weights: a rounded or foreign one is no error of its backward."""
        import torch

        held = dict(model.named_parameters(remove_duplicate=False))
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
        """The gradients of one forward in the order of the way back, a parameter's behind its operator's."""
        return _Backward(self, calls, logprobs, gradients, head_dtype).judged_of(batch, loss)

    def logprobs(self, batch: ForwardBatch) -> Any:
        return self.scorer._scorer.logprobs(batch)


class _Backward:
    """One forward and backward in float64 with an execution's numbers put in."""

    def __init__(
        self,
        reference: BackwardReference,
        calls: Mapping[str, BackwardCall],
        logprobs: BackwardCall,
        gradients: Mapping[str, Any],
        head_dtype: Any,
    ):
        self._reference, self._calls, self._logprobs, self._gradients = reference, calls, logprobs, gradients
        self._head_dtype = head_dtype
        self.judged: list[JudgedGradient] = []
        self._more: dict[str, Any] = {}
        self._bounds: dict[str, Any] = {}
        """Parameter -> the sum of its bounds over calls."""
        self._contributions: dict[int, Any] = {}
        self._held: list[Any] = []
        """Keeps addresses of tensors from being used again."""
        self._seen_hidden = False

    def judged_of(self, batch: ForwardBatch, loss: Callable[[Any], Any]) -> list[JudgedGradient]:
        import torch

        reference = self._reference
        for parameter in reference.model.parameters():
            parameter.grad = None
        visited = Visited(reference.model, self._before, self._after, self._stream)
        with torch.enable_grad(), keep_double(), visited.listening():
            found = self._put(reference.logprobs(batch), self._logprobs.gives[0], self._at_logprobs)
            value = loss(found)
            visited.is_on = False
            value.backward()
        self._parameters()
        return self.judged

    def _put(self, value: Any, own: Any, note: Callable[[Any], Any]) -> Any:
        put = _function().apply(value, own.detach().reshape(value.shape).to(value.dtype), note)
        self._held += [value, put]
        return put

    def _before(self, name: str, values: list[Any]) -> list[Any]:
        call = self._calls.get(name)
        return values if call is None else [self._taken(name, call, slot, each) for slot, each in enumerate(values)]

    def _taken(self, name: str, call: BackwardCall, slot: int, value: Any) -> Any:
        if slot >= len(call.takes) or call.takes[slot].numel() != value.numel():
            return value
        own = call.takes[slot]
        if not value.requires_grad:
            return own.reshape(value.shape).to(value.dtype)
        address = value.data_ptr()

        def note(exact: Any) -> Any:
            if not call.asks[slot]:
                # What cut it off lies before this operator: it is seen there.
                return exact
            found = self._found(call.passed.get(slot), exact)
            contribution = found.abs().amax(-1).reshape(-1)
            known = self._contributions.get(address)
            if known is None or known.shape == contribution.shape:
                self._contributions[address] = contribution if known is None else known + contribution
            bound = self._input_bound(name, call, slot, exact)
            self._add(name, INPUT, call.passed.get(slot), exact, bound)
            return found

        return self._put(value, own, note)

    def _stream(self, name: str, values: list[Any]) -> list[Any]:
        call = self._calls.get(name)
        value = values[0]
        if call is None or not value.requires_grad:
            return values
        address = value.data_ptr()

        def note(exact: Any) -> Any:
            found = self._found(call.passed.get(0), exact)
            self._contributions[address] = found.abs().amax(-1).reshape(-1)
            rounding = BackwardRounding.of(call.takes[0], call.passed.get(0))
            self._add(
                name, BETWEEN, call.passed.get(0), exact, bounds.of_between(exact, self._largest(exact), rounding)
            )
            return found

        return [self._put(value, call.takes[0], note)]

    def _after(self, name: str, more: Any, values: list[Any]) -> list[Any]:
        call = self._calls.get(name)
        self._more[name] = more
        return values if call is None else [self._given(name, call, slot, each) for slot, each in enumerate(values)]

    def _given(self, name: str, call: BackwardCall, slot: int, value: Any) -> Any:
        if slot >= len(call.gives) or call.gives[slot].numel() != value.numel():
            return value
        own = call.gives[slot]
        if not value.requires_grad:
            return own.reshape(value.shape).to(value.dtype)
        kept: list[Any] = []

        def note(exact: Any) -> Any:
            came = call.came.get(slot)
            found = self._found(came, exact)
            rounding = BackwardRounding.of(own, came, *call.takes)
            if not call.follows[slot]:
                self._add(name, DETACHED, came, exact, bounds.of_between(exact, 0.0, rounding))
            else:
                self._add(*self._between(name, exact, rounding, kept[0], own))
            self._parameter_bounds(name, call, found)
            return found

        put = self._put(value, own, note)
        kept.append(put.data_ptr())
        return put

    def _between(self, name: str, exact: Any, rounding: BackwardRounding, address: int, own: Any) -> tuple[Any, ...]:
        came = self._calls[name].came.get(0)
        if not self._seen_hidden:
            self._seen_hidden = True
            return HEAD, BETWEEN, came, exact, self._head_bound(own)
        size = self._contributions.get(address)
        tokens = exact.shape[:-1]
        added = size.reshape(*tokens, 1) if size is not None and size.numel() == tokens.numel() else 0.0
        length = exact.shape[1] if exact.dim() > 2 else len(exact)
        return f"{name}.output", BETWEEN, came, exact, bounds.of_between(exact, added, rounding, angles=length)

    def _head_bound(self, hidden: Any) -> Any:
        """Of the gradient of the last hidden states: a projection, a log-softmax and their backward."""
        weight = self._reference.model.get_output_embeddings().weight.detach()
        rounding = BackwardRounding.of(self._of_head(), hidden)
        lengths, rows = float(weight.norm(dim=-1).max()), float(hidden.double().norm(dim=-1).max())
        per_logit = (growth(weight.shape[1]) * rounding.sums + 4.0 * rounding.out) * lengths * rows
        gradient = self._logprobs.came.get(0)
        largest = 0.0 if gradient is None else float(gradient.abs().max())
        off = 4.0 * per_logit + 24.0 * rounding.out + growth(len(weight)) * rounding.sums
        number = 1 if gradient is None else gradient.numel()
        name = self._output_weight()
        self._bounds[name] = self._bounds.get(name, 0.0) + off * largest * rows * number**0.5
        return off * largest * float(weight.abs().max()) * 2.0

    def _of_head(self) -> Any:
        import torch

        return torch.empty(0, dtype=self._head_dtype)

    def _output_weight(self) -> str:
        weight = self._reference.model.get_output_embeddings().weight
        return str(next(name for name, value in self._reference.model.named_parameters() if value is weight))

    def _at_logprobs(self, exact: Any) -> Any:
        came = self._logprobs.came.get(0)
        unit = 2.0**-24 if came is None or came.dtype.itemsize >= 4 else 2.0**-8
        self._add(
            LOSS, BETWEEN, came, exact, (growth(exact.numel()) + 64.0) * unit * (exact.abs() + 1e-3 * exact.abs().max())
        )
        return self._found(came, exact)

    def _largest(self, exact: Any) -> Any:
        """[..., 1]: of the stream's gradient in the layers behind, a token's largest number so far."""
        sizes = [size for size in self._contributions.values() if size.numel() == exact.shape[:-1].numel()]
        return max(sizes, key=lambda size: float(size.max())).reshape(*exact.shape[:-1], 1) if sizes else 0.0

    def _input_bound(self, name: str, call: BackwardCall, slot: int, exact: Any) -> Any:
        import torch

        came = call.came.get(0)
        rounding = BackwardRounding.of(*call.takes, *call.gives, call.passed.get(slot))
        incoming = torch.zeros_like(call.gives[0]).double() if came is None else came.double()
        if is_core(name):
            weights, scaling = self._more[name]
            states = tuple(each.double() for each in call.takes[:3])
            return bounds.of_attention(states, weights.detach(), incoming.transpose(1, 2), float(scaling), rounding)[
                slot
            ]
        module = self._reference._modules[name.partition("#")[0]]
        x = call.takes[slot].double().reshape(exact.shape)
        with torch.no_grad():
            return bounds.of_input(module, x, incoming, exact, rounding)

    def _parameter_bounds(self, name: str, call: BackwardCall, incoming: Any) -> None:
        import torch

        plain = name.partition("#")[0]
        module = self._reference._modules.get(plain)
        if module is None or not call.takes:
            return
        for own, parameter in module.named_parameters(recurse=False):
            rounding = BackwardRounding.of(*call.takes, *call.gives, self._gradients.get(f"{plain}.{own}"))
            with torch.no_grad():
                bound = bounds.of_parameter(module, own, call.takes[0].double(), incoming, parameter.grad, rounding)
            first = next(key for key, value in self._reference.model.named_parameters() if value is parameter)
            self._bounds[first] = self._bounds.get(first, 0.0) + bound

    def _parameters(self) -> None:
        """Gradients of parameters, each behind the last gradient of its operator."""
        for name, parameter in self._reference.model.named_parameters():
            if parameter.grad is None:
                continue
            operator = self._reference.owner[name]
            found = self._gradients.get(name)
            kept = BackwardRounding.of(parameter if found is None else found)
            bound = self._bounds.get(name, 0.0) + 3.0 * kept.out * parameter.grad.abs()
            size = float(parameter.grad.abs().max())
            self._add(
                operator, PARAMETER, found, parameter.grad, bound + 96.0 * kept.out * size * (name not in self._bounds)
            )

    def _found(self, own: Any, exact: Any) -> Any:
        return exact.new_zeros(exact.shape) if own is None else own.reshape(exact.shape).to(exact.dtype)

    def _add(self, operator: str, what: str, own: Any, exact: Any, bound: Any) -> None:
        found = self._found(own, exact)
        off = (found - exact).abs()
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


def _function() -> Any:
    """Puts a value in on the way forth, and on the way back what a note gives for the gradient that came."""
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


def kind_of_judged(operator: str) -> str:
    """The kind of operator; what comes back to an operator's output has the operator's."""
    return kind_of(operator.removesuffix(".output")) if not operator.endswith(f".{STREAM}") else STREAM
