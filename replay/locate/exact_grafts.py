"""Computes operators of the exact engine with another execution's code, and vice versa.

Shapes: B rows in a forward pass, T padded row length, M = B T, N heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ..backends.exact.model import ExactModel, Operator, seen_by_window
from ..backends.exact.scorer import laid
from ..batching import ForwardBatch
from ..recorded import RecordedRow
from .exact_execution import ExactExecution
from .execution import Execution
from .grafts import Graft, cast
from .names import is_core
from .taps import tensors_of

_ROTARY, _EMBEDDING = "rotary_emb", "embed_tokens"


class ExactModule:
    """An operator of the exact engine, callable like the transformers module of the same name."""

    def __init__(self, name: str, operator: Operator, dtype: Any):
        self._kind, self._operator, self._dtype = name.rpartition(".")[2], operator, dtype

    def parameters(self) -> Iterator[Any]:
        """Return no parameters, since the dtype of the operator is that of its model."""
        return iter(())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the operator's result, in the dtype of the engine."""
        import torch

        takes = tensors_of(args, kwargs)
        if self._kind == _ROTARY:
            takes = [value for value in takes if not value.is_floating_point()]
        wide = [cast(value, torch.float64) for value in takes]
        shape = wide[0].shape
        if self._kind == _EMBEDDING:
            return self._operator.call(wide[0].flatten()).unflatten(0, shape).to(self._dtype)
        given = self._operator.call(*wide if self._kind == _ROTARY else (wide[0].reshape(-1, shape[-1]), *wide[1:]))
        if isinstance(given, tuple):
            return tuple(cast(part, self._dtype) for part in given)
        return given.reshape(*shape[:-1], -1).to(self._dtype)


class ExactGiver(Graft):
    """Replacement of operators in a taker's running model by those of the exact engine."""

    def __init__(self, taker: Execution, giver: ExactExecution):
        super().__init__(taker, giver)
        self._exact: ExactModel = giver.exact
        self.theirs = {
            name: ExactModule(name, operator, giver.dtype)
            for name, operator in self._exact.operators().items()
            if not is_core(name)
        }

    @contextmanager
    def as_giver(self) -> Iterator[None]:
        """Use the exact engine's own settings in this context, so that it rounds even if the taker is in float64."""
        import torch

        with torch.no_grad(), torch._C.DisableTorchFunction(), torch.autocast(self.first.device.type, enabled=False):
            yield

    def masks_of(self, batch: ForwardBatch) -> dict[str, Any]:
        """Return the attention cores for a forward of the taker, called like transformers' attention functions."""
        import torch

        _, positions_BW, rows_BW = (torch.from_numpy(part).to(self._exact.device) for part in laid(batch))
        windows, operators = self._exact.windows(), self._exact.operators()
        return {
            name: (self._core(operators[name], rows_BW, positions_BW, windows[name]), None, None, {})
            for name in windows
        }

    def _core(self, operator: Operator, rows_BW: Any, positions_BW: Any, window: int | None) -> Callable[..., Any]:
        def attend(_module: Any, query: Any, key: Any, value: Any, _mask: Any) -> tuple[Any, None]:
            states = [state.double() for state in (query, key, value)]
            cache = self._exact.caches(len(rows_BW), rows_BW.shape[1])[0]
            seen = seen_by_window(rows_BW, positions_BW, 0, {window})[window]
            return operator.call(*states, cache, seen).transpose(1, 2).to(self.first.dtype), None

        return attend


class ExactTaker(Graft):
    """Replacement of operators in the running exact engine by those of transformers, or of another exact engine."""

    def __init__(self, taker: ExactExecution, giver: Execution):
        self.taker = taker  # Graft's own maps are those of self._by
        self._operators = taker.exact.operators()
        self._precision = taker.exact.precision
        self._by = ExactGiver(giver, giver) if isinstance(giver, ExactExecution) else Graft(giver, giver)

    def names(self, rows: Sequence[RecordedRow], of: list[RecordedRow]) -> list[str]:
        cores = set(self.cores(rows, of, filter(is_core, self._operators)))
        return [name for name in self._operators if name in self._by.theirs or name in cores]

    @contextmanager
    def put(self, names: Collection[str], batch: ForwardBatch) -> Iterator[None]:
        masks = self._by.masks_of(batch) if any(map(is_core, names)) else {}
        with ExitStack() as stack:
            for name in names:
                operator = self._operators[name]
                by = self._core(operator, masks[name]) if is_core(name) else self._module(name, operator)
                stack.enter_context(operator.replaced(by))
            yield

    def _module(self, name: str, operator: Operator) -> Callable[..., Any]:
        original, theirs = operator.call, self._by.theirs[name]

        def called(*args: Any) -> Any:
            given = original(*args)
            dtype = next(theirs.parameters(), self._by.first).dtype
            takes = [cast(value, dtype) for value in args]
            if name.endswith(_ROTARY):  # transformers' rotary reads only the dtype of the hidden states
                takes.insert(0, self._by.first)
            with self._by.as_giver():
                new = theirs(*takes)
            if isinstance(given, tuple):
                return tuple(self._as_given(part, old) for part, old in zip(new, given, strict=True))
            return self._as_given(new, given)

        return called

    def _core(self, operator: Operator, mask: tuple[Any, ...]) -> Callable[..., Any]:
        function, theirs, attention_mask, words = mask
        original = operator.call

        def called(query: Any, key: Any, value: Any, *rest: Any) -> Any:
            given = original(query, key, value, *rest)
            states = [cast(state, self._by.first.dtype) for state in (query, key, value)]
            with self._by.as_giver():
                new = function(theirs, *states, attention_mask, **words)[0]
            return self._as_given(new.transpose(1, 2), given)

        return called

    def _as_given(self, new: Any, given: Any) -> Any:
        """Return a result as the exact engine stores it: rounded to its dtype, in float64."""
        new = new.reshape(given.shape)
        return self._precision.round(new.double()) if new.is_floating_point() else new
