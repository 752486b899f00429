"""Operators of one execution computed by another's code, on the first one's own inputs.

The operator is replaced, not its result: putting in a tensor of the other execution would bring along everything that
differs before it, so that the last operator would seem to carry all of a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from ..backends import kernels
from ..backends.double import keep_double
from ..batching import ForwardBatch, PaddedBatch
from ..recorded import RecordedRow
from ..settings import autocast
from .execution import Execution
from .names import core_name, is_core
from .taps import (
    attention_around,
    attention_layers,
    operators,
    outputs_of,
    tensors_of,
    with_outputs,
    with_tensors,
)


class Graft:
    """Puts operators of a giver into a taker's model while it runs."""

    def __init__(self, taker: Execution, giver: Execution):
        self.taker, self._giver = taker, giver
        self.theirs: Mapping[str, Any] = operators(giver.model)
        """The giver's operators, called as transformers' modules are."""
        self._ours = operators(taker.model)
        self._modules = dict(giver.model.named_modules())
        self._masks: dict[tuple[int, ...], dict[str, Any]] = {}

    def names(self, rows: Sequence[RecordedRow], of: list[RecordedRow]) -> list[str]:
        """The operators that can be put in: those that both have; attention where it has a mask of its own."""
        scorer = self.taker.scorer
        batches = scorer.batches(scorer.together(list(rows), of))
        are_padded = all(isinstance(batch, PaddedBatch) for batch in batches)
        cores = [core_name(name) for name in attention_layers(self.taker.model)] if are_padded else []
        return [*(name for name in self._ours if name in self.theirs), *cores]

    def score(
        self, names: Collection[str], rows: Sequence[RecordedRow], of: list[RecordedRow]
    ) -> dict[str, np.ndarray]:
        """Sequence -> [T] float64 log-probabilities of the taker's, of some rows `of` a step, with these operators the giver's."""
        return self.taker.score(rows, of, lambda batch: self.put(names, batch))

    @contextmanager
    def put(self, names: Collection[str], batch: ForwardBatch) -> Iterator[None]:
        """Within it a forward of the taker computes these operators as the giver does."""
        masks = self.masks_of(batch) if any(map(is_core, names)) else {}
        ours = {id(module): name for name, module in self.taker.model.named_modules()}

        def around(module: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name = core_name(ours.get(id(module), ""))
            if name not in names or name not in masks:
                return original(module, *args, **kwargs)
            function, theirs, mask, words = masks[name]
            dtype = self._dtype if self._autocast is None else self._narrowed(args[0].dtype)
            with self.as_giver():
                given = function(theirs, *(cast(state, dtype) for state in args[:3]), mask, **words)[0]
            return as_given(given, args[0]), None

        with ExitStack() as stack:
            for name in names:
                if name in self._ours:
                    stack.callback(self._ours[name].register_forward_hook(self._hook(name), with_kwargs=True).remove)
            stack.enter_context(attention_around(around))
            yield

    def _hook(self, name: str) -> Callable[..., Any]:
        theirs = self.theirs[name]

        def graft(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> Any:
            dtype = next(theirs.parameters(), self.first).dtype
            if self._autocast is not None:
                given_dtypes = [value.dtype for value in tensors_of(args, kwargs) if value.is_floating_point()]
                dtype = self._narrowed(given_dtypes[0]) if given_dtypes else dtype
            args, kwargs = with_tensors(args, kwargs, [cast(value, dtype) for value in tensors_of(args, kwargs)])
            with self.as_giver():
                new = theirs(*args, **kwargs)
            return as_given(new, given)

        return graft

    @property
    def first(self) -> Any:
        """A parameter of the giver, of its device and dtype."""
        return next(self._giver.model.parameters())

    @property
    def _dtype(self) -> Any:
        return self.first.dtype

    def _narrowed(self, dtype: Any) -> Any:
        """Under autocast numbers have the dtypes that they come in; it leaves float64 alone, which the giver does not have."""
        import torch

        return self._dtype if dtype == torch.float64 else dtype

    @property
    def _autocast(self) -> Any:
        return self._giver.scorer.numerics.autocast

    @contextmanager
    def as_giver(self) -> Iterator[None]:
        """The giver's own surroundings: a taker in float64 keeps numbers wide that are to be narrow here."""
        import torch

        with ExitStack() as stack:
            if self._dtype == torch.float64:
                stack.enter_context(keep_double())
            else:
                stack.enter_context(torch._C.DisableTorchFunction())
            stack.enter_context(autocast(self.first.device, self._autocast))
            stack.enter_context(kernels.forced(self._giver.arm.attention))
            yield

    def masks_of(self, batch: ForwardBatch) -> dict[str, Any]:
        """The giver's attention functions and masks for a forward of the taker: it runs that forward once itself."""
        import torch

        key = tuple(hash(row.seq_id) for row in batch.rows)
        if key not in self._masks:
            found: dict[str, Any] = {}
            names = {id(module): name for name, module in self._giver.model.named_modules()}

            def around(module: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                mask = args[3] if len(args) > 3 else kwargs.get("attention_mask")
                words = {name: value for name, value in kwargs.items() if name != "attention_mask"}
                found[core_name(names.get(id(module), ""))] = (original, module, mask, words)
                return original(module, *args, **kwargs)

            assert isinstance(batch, PaddedBatch)
            device = next(self._giver.model.parameters()).device
            with torch.no_grad(), self.as_giver(), attention_around(around):
                self._giver.model.base_model(
                    input_ids=torch.from_numpy(batch.ids_BW).to(device),
                    attention_mask=torch.from_numpy(batch.mask_BW).to(device),
                    use_cache=False,
                )
            self._masks = {key: found}
        return self._masks[key]


def cast(value: Any, dtype: Any) -> Any:
    """A tensor of numbers in another dtype; anything else as it is."""
    import torch

    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    with torch._C.DisableTorchFunction():  # in the surroundings of float64 nothing becomes narrower
        return value.to(dtype) if is_float and dtype is not None else value


def as_given(new: Any, given: Any) -> Any:
    """What was computed, in the dtypes that the taker's own operator gives."""
    import torch

    with torch._C.DisableTorchFunction():  # in the surroundings of float64 nothing becomes narrower
        pairs = zip(outputs_of(new), outputs_of(given), strict=True)
        return with_outputs(given, [part.to(old.dtype) for part, old in pairs])
