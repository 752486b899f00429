"""The exact engine as one of the two executions: its own operators, under transformers' names.

The engine stores values of its own dtype in float64 tensors. Its operators are observed in the engine's dtype.

Shapes: B rows in a forward pass, W padded row length, M = B W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from ..backends.exact.attention import MOST_KEYS
from ..backends.exact.model import ExactModel, Operator
from ..backends.exact.slices import bits_for
from ..batching import ForwardBatch
from ..exact_scorer import ExactArmScorer
from .execution import Execution, Listening
from .taps import Call, RowTaps, of_tokens, outputs_of, places, shape_of

EXACT = "exact"


class ExactExecution(Execution):
    """An arm of the exact engine with the weights of a step."""

    scorer_of = ExactArmScorer
    is_other_code = False
    rounds_scores = False
    coarsest = None
    """None, since this engine rounds only once, to the dtype of its outputs."""
    _keeps_double = False

    @property
    def model(self) -> Any:
        """The transformers model that holds the weights."""
        return self.built.held

    @property
    def attention_cut(self) -> float:  # type: ignore[override]
        """Part of the weighted values that the engine's attention cuts off, as a share of the largest."""
        slices = self.built.precision.slices
        return float(2.0 ** -(slices * bits_for(MOST_KEYS, slices)))

    def _listening(self, wanted: Callable[[str], bool]) -> Listening:
        return partial(_heard, self.built, wanted)


@contextmanager
def _heard(
    model: ExactModel, wanted: Callable[[str], bool], batch: ForwardBatch, chosen: Mapping[int, RowTaps]
) -> Iterator[None]:
    """Record the inputs and outputs of the exact engine's operators in one forward, for some of its rows."""
    import torch

    shape, dtype = shape_of(batch), model.precision.dtype
    where = {index: torch.from_numpy(places(batch, index)).to(model.device) for index in chosen}

    def kept(value: Any, index: int, operator: Operator) -> Any:
        part = of_tokens(value, shape, where[index], heads_first=operator.is_heads_first)
        return part.to(dtype) if part is not None and part.is_floating_point() else part

    def called(name: str, operator: Operator, original: Callable[..., Any], *args: Any) -> Any:
        given = original(*args)
        takes = args[:3] if operator.is_heads_first else args
        for index, taps in chosen.items():
            took = tuple(kept(value, index, operator) for value in takes)
            if name.endswith("rotary_emb"):
                took = (None, *took)  # transformers' rotary takes hidden states before the positions
            taps.calls[name] = Call(took, tuple(kept(value, index, operator) for value in outputs_of(given)))
        return given

    with ExitStack() as stack:
        for name, operator in model.operators().items():
            if wanted(name):
                stack.enter_context(operator.replaced(partial(called, name, operator, operator.call)))
        yield
