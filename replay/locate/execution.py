"""An execution to compare. While it scores rows, operator outputs can be observed and replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from ...schemas.documents import Contract
from ...schemas.errors import CannotReplay
from ...tracer.hooks.patches import replaced
from ...tracer.weights.reader import Tensor
from ..arm_option import EXACT, phrase
from ..arms import Arm
from ..backends.double import KeepDouble
from ..backends.exact.attention import MOST_KEYS
from ..backends.exact.model import ExactModel, Operator
from ..backends.exact.scorer import ExactArmScorer
from ..backends.exact.slices import bits_for
from ..backends.kernels import KERNELS
from ..batching import ForwardBatch
from ..hf_scorer import HfScorer
from ..numerics import Numerics
from ..recorded import RecordedRow, RecordedRun
from .bounds import unit
from .reference import Reference
from .taps import Call, RowTaps, Taps, of_tokens, outputs_of, places

Prepare = Callable[[Any], None]
Listening = Callable[[ForwardBatch, Mapping[int, RowTaps]], AbstractContextManager[None]]


class Execution:
    scorer_of: type[HfScorer] = HfScorer
    attention_cut = 0.0
    """Largest error from slicing weighted values in attention (`exact.slices`), relative to the largest value."""
    _keeps_double = True
    reference: Reference | None = None
    """The recorded model. It defines the operators to observe, even if the execution's modules differ."""

    def __init__(
        self, run: RecordedRun, arm: Arm, contract: Contract, device: str, prepare: Prepare | None = None, *,
        calls_whole_model: bool = False,
    ):  # fmt: skip
        check_heard(arm)
        self.arm, self.run = arm, run
        self._prepare = prepare
        self.scorer = self.scorer_of(run, arm, contract, device)
        self.scorer.calls_whole_model = calls_whole_model
        self.built: Any = None

    @property
    def model(self) -> Any:
        return self.built

    @property
    def is_other_code(self) -> bool:
        """True if the model runs the user's code instead of the recorded transformers model."""
        return self._prepare is not None or self.run.model_factory is not None

    @property
    def is_adapted(self) -> bool:
        return self.scorer.adapter is not None

    @property
    def numerics(self) -> Numerics:
        return self.scorer.numerics

    @property
    def head(self) -> str:
        head = self.model.get_output_embeddings()
        return next((name for name, module in self.model.named_modules() if module is head), "")

    @property
    def rounds_scores(self) -> bool:
        """True if attention rounds scores and softmax to its output dtype."""
        return self.arm.attention is None or KERNELS[self.arm.attention].rounds_scores

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if self.built is None:
            self.built = self.scorer.build()
        self.scorer.put(self.built, tensors)
        if self._prepare is not None:
            self._prepare(self.model)
        self.scorer.attach(self.built)

    @property
    def weight_dtypes(self) -> dict[str, Any]:
        return {name: parameter.dtype for name, parameter in self.held()}

    @property
    def coarsest(self) -> Any:
        """Coarsest dtype that operators may round to, or None if any dtype is allowed."""
        if self.numerics.autocast is not None or self.is_adapted or self.arm.quantize:
            return None
        return max(
            (parameter.dtype for parameter in self.model.parameters() if parameter.is_floating_point()),
            key=unit, default=None,
        )  # fmt: skip

    def held(self) -> Iterator[tuple[str, Any]]:
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            yield name, parameter.detach()

    def score(
        self,
        rows: Sequence[RecordedRow],
        of: list[RecordedRow],
        around: Callable[[ForwardBatch], AbstractContextManager[Any]] = nullcontext,
    ) -> dict[str, np.ndarray]:
        """Score `rows`, together with the rows in `of` that share their forward passes. Each forward pass runs inside
        the context manager that `around` returns. Return float64 logprobs [T] by sequence."""

        @contextmanager
        def both(batch: ForwardBatch) -> Iterator[None]:
            is_double = self._keeps_double and next(self.model.parameters()).dtype == torch.float64
            with KeepDouble() if is_double else nullcontext(), around(batch):
                yield

        with replaced(self.scorer, "around", both):
            scored = self.scorer.score(self.scorer.together(list(rows), of))
        wanted = {row.seq_id for row in rows}
        return {
            row.seq_id: np.asarray(values, np.float64)
            for row, values in zip(scored.rows, scored.logprobs, strict=True)
            if row.seq_id in wanted
        }

    def listen(
        self, rows: Sequence[RecordedRow], of: list[RecordedRow], wanted: Callable[[str], bool]
    ) -> tuple[dict[str, np.ndarray], dict[str, RowTaps]]:
        """Like `score`, but also return the operator inputs and outputs that `wanted` selects."""
        heard_in = self._listening(wanted)
        found: dict[str, RowTaps] = {}
        names = {row.seq_id for row in rows}

        @contextmanager
        def heard(batch: ForwardBatch) -> Iterator[None]:
            chosen = {
                index: found.setdefault(row.seq_id, RowTaps())
                for index, row in enumerate(batch.rows)
                if row.seq_id in names
            }
            with heard_in(batch, chosen) if chosen else nullcontext():
                yield

        return self.score(rows, of, heard), found

    def _listening(self, wanted: Callable[[str], bool]) -> Listening:
        assert self.reference is not None
        return Taps(self.model, wanted, self.reference.operators).heard


class ExactExecution(Execution):
    """Runs an arm of the exact engine, which stores rounded values as float64. They are observed in the arm's dtype."""

    scorer_of = ExactArmScorer
    is_other_code = False
    rounds_scores = False
    coarsest = None
    _keeps_double = False

    @property
    def model(self) -> Any:
        return self.built.held

    @property
    def attention_cut(self) -> float:  # type: ignore[override]
        slices = self.built.precision.slices
        return float(2.0 ** -(slices * bits_for(MOST_KEYS, slices)))

    def _listening(self, wanted: Callable[[str], bool]) -> Listening:
        return partial(_heard_exactly, self.built, wanted)


@contextmanager
def _heard_exactly(
    model: ExactModel, wanted: Callable[[str], bool], batch: ForwardBatch, chosen: Mapping[int, RowTaps]
) -> Iterator[None]:
    shape, dtype = batch.tokens_BW.shape, model.precision.dtype
    where = places(batch, chosen, model.device)

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
                original = getattr(operator.owner, operator.attribute)
                observed = partial(called, name, operator, original)
                stack.enter_context(replaced(operator.owner, operator.attribute, observed))
        yield


def check_heard(arm: Arm) -> None:
    for name in arm.unheard:
        why = "operators can be compared only if one forward pass per row runs all of them"
        if name == "compile":
            why = "operators inside a compiled model cannot be observed"
        elif name == "mode" and arm.engine == EXACT:
            why += " (engine exact gives the same bits in every mode)"
        raise CannotReplay(f"arm {arm.name}: {why}; omit {phrase(name, getattr(arm, name))}")
