"""Run the recorded model in float64, and check each operator on the execution's own inputs. An operator's error
therefore excludes the errors of earlier operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from ...tracer.dense import scaled
from ...tracer.hooks.patches import replaced
from ..backends.double import KeepDouble
from ..recorded import RecordedRow
from . import taps
from .forward import Forward
from .heard import Arithmetic, Heard
from .judged import GIVES, TAKES, Judgement, Point
from .names import ATTENTION, CallNames, core_name, layer_modules, layer_of
from .taps import RowTaps, mixtures
from .windows import EVERY_LAYER, Window

ErrorsOf = Callable[[Window], Sequence[dict[Point, Any]]]
"""Returns the executions' errors in a layer window."""


class Reference:
    def __init__(self, model: Any, recorded_dtypes: Mapping[str, Any] | None = None):
        """`model` has float64 weights and unfused attention. `recorded_dtypes` are the recorded weights' dtypes."""
        self.model = model.eval().requires_grad_(False)
        self.names = {id(module): name for name, module in model.named_modules()}
        self.operators = taps.operators(model)
        self.recorded_dtypes = recorded_dtypes or {}
        self.layers = layer_modules(model)

    def judge(
        self, row: RecordedRow, own: RowTaps, execution: Arithmetic, first_position: int, window: Window = EVERY_LAYER
    ) -> Judgement:
        """Judge the operators in a row's forward pass, then release their values, except those that the head needs."""
        judgement = Judgement(window)
        heard = Heard(own, execution, self.recorded_dtypes, judgement, first_position)
        forward = Forward(heard, self.operators, self.names)
        with torch.no_grad(), KeepDouble(), forward.listening(mixtures(self.model), self.layers), self._running(window):
            self._hidden(row, first_position)
        return judgement

    def carried(
        self, row: RecordedRow, weights_T: np.ndarray, temperature: float, first_position: int,
        windows: Sequence[Window], errors_of: ErrorsOf,
    ) -> list[dict[Point, float]]:  # fmt: skip
        """Return each error's first-order contribution to sum(weights_T * logprobs): error times gradient.

        Runs one float64 forward and backward pass. `errors_of` returns the executions' errors in a layer window.
        Windows are visited from last to first, and only one window's errors are in memory at a time.
        """
        products = _Products(windows, errors_of, self.names)
        with (
            taps.hooked(self.operators, after=products.gives),
            taps.attention_around(products.core),
            torch.enable_grad(),
            KeepDouble(),
            self._run_again(),
            taps.hooked(self.layers, products.enters),
            taps.hooked({"": self.model.get_input_embeddings()}, after=lambda *call: call[-1].requires_grad_()),
        ):
            hidden_TH = self._hidden(row, first_position)[0]
            logprobs_T = self._logprobs(row, hidden_TH, temperature)
            products.is_over = True
            (logprobs_T * torch.from_numpy(np.nan_to_num(weights_T)).to(logprobs_T.device)).sum().backward()
        return products.found

    @contextmanager
    def _run_again(self) -> Iterator[None]:
        """Inside the context, layers keep only their inputs, and recompute the rest in the backward pass."""
        with ExitStack() as stack:
            for module in self.layers.values():
                again = partial(
                    checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False,
                    context_fn=lambda: (nullcontext(), KeepDouble()),
                )  # fmt: skip
                stack.enter_context(replaced(module, "forward", again))
            yield

    @contextmanager
    def _running(self, window: Window) -> Iterator[None]:
        """Inside the context, layers outside the window return their input unchanged."""
        with ExitStack() as stack:
            for name, module in self.layers.items():
                layer = layer_of(name)
                if layer is not None and not window.runs(layer):
                    stack.enter_context(replaced(module, "forward", lambda hidden, *_args, **_kwargs: hidden))
            yield

    def logprobs(self, row: RecordedRow, temperature: float, first_position: int) -> np.ndarray:
        with torch.no_grad(), KeepDouble():
            return np.asarray(self._logprobs(row, self._hidden(row, first_position)[0], temperature).cpu())

    def _logprobs(self, row: RecordedRow, hidden_TH: Any, temperature: float) -> Any:
        ids_T = torch.from_numpy(row.response_ids.astype(np.int64)).to(hidden_TH.device)
        before = slice(len(row.prompt_ids) - 1, len(row.prompt_ids) + len(row.response_ids) - 1)
        logits_TV = self.model.get_output_embeddings()(hidden_TH[before])
        logits_TV = scaled(logits_TV, self.model.config.get_text_config()) / temperature
        return logits_TV.log_softmax(-1).gather(-1, ids_T[:, None])[:, 0]

    def _hidden(self, row: RecordedRow, first_position: int) -> Any:
        ids = np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64)
        device = next(self.model.parameters()).device
        positions = first_position + torch.arange(len(ids), device=device)
        return self.model.base_model(
            input_ids=torch.from_numpy(ids).to(device)[None], position_ids=positions[None], use_cache=False
        ).last_hidden_state


class _Products:
    """Multiplies each error by the gradient at the same point during the backward pass."""

    def __init__(self, windows: Sequence[Window], errors_of: ErrorsOf, names: Mapping[int, str]):
        self._windows, self._errors_of, self._names = windows, errors_of, names
        self._place = len(windows) - 1
        self._errors = errors_of(windows[-1])
        self.found: list[dict[Point, float]] = [{} for _ in self._errors]
        self._calls = CallNames()
        self._has_attended = False
        self._entered: Any = None
        self.is_over = False
        """True in the backward pass, so that recomputed layers are not observed again."""

    def enters(self, _name: str, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._entered = taps.hidden_of(args, kwargs)

    def gives(self, name: str, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> None:
        call = self._calls.next(name)
        for slot, value in enumerate(taps.tensors_of(args, kwargs)):
            if value.requires_grad:
                self._note((call, TAKES, slot), value)
        for slot, value in enumerate(taps.outputs_of(given)):
            if value.is_floating_point():
                self._note((call, GIVES, slot), value)

    def core(self, module: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._calls.next(core_name(self._names.get(id(module), "")))
        for slot, value in enumerate(args[:3]):
            self._note((call, TAKES, slot), value)
        given = original(module, *args, **kwargs)
        self._note((call, GIVES, 0), given[0])
        self._has_attended = True
        return given

    def _note(self, point: Point, value: Any) -> None:
        if self.is_over:
            return
        layer = layer_of(point[0])
        place = len(self._windows) - 1 if layer is None and self._has_attended else 0
        if layer is not None:
            place = next((number for number, window in enumerate(self._windows) if window.has(layer)), 0)
        if place and point[1] == TAKES and self._windows[place].first == layer and value is self._entered:
            place -= 1  # the previous layer, in another window, computed this value
        heads_first = point[0].endswith(f".{ATTENTION}") and point[1] == TAKES

        def multiply(gradient: Any) -> None:
            gradient = gradient[0].transpose(0, 1) if heads_first else gradient
            if place != self._place:
                self._place, self._errors = place, self._errors_of(self._windows[place])
            for products, each in zip(self.found, self._errors, strict=True):
                if (error := each.pop(point, None)) is not None:
                    products[point] = _product(gradient, error)

        (value if value.requires_grad else value.requires_grad_()).register_hook(multiply)


def _product(gradient: Any, error: Any) -> float:
    if taps.is_heads_first(gradient, error):
        gradient = gradient.transpose(1, 2)
    found = float(gradient.reshape(-1).dot(error.reshape(-1).to(gradient.dtype)))
    if np.isfinite(found):
        return found
    return float((gradient.reshape(error.shape) * error).nan_to_num(0.0, 0.0, 0.0).sum())
