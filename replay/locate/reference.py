"""What each operator of an execution should have given for what it took, in float64.

The recorded model runs once in float64 over a row. Before each operator, what the execution's operator took is put in the place of
what the float64 model has there, and what it gave afterwards: so each operator, and what lies between two of them (additions,
rotations, products), is computed of the execution's own numbers, and no error that came before counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ...tracer.logits import scaled
from ...tracer.store import first_line
from ..backends.double import keep_double
from ..recorded import RecordedRow
from . import bounds
from .bounds import Rounding
from .router_choice import follows
from .taps import (
    ATTENTION,
    LAYER_NAME,
    Call,
    RowTaps,
    are_experts,
    attention_around,
    attention_layers,
    core_name,
    is_heads_first,
    like,
    mixtures,
    operators,
    outputs_of,
    tensors_of,
    tokens_first,
    with_outputs,
    with_tensors,
)  # fmt: skip

RESIDUAL, ROTARY, ACTIVATION, WIRING, EMBEDDING = "residual", "rotary", "activation", "wiring", "embedding"
"""What lies between operators that are modules: additions to the residual stream, the rotation of queries and keys, the product
of gate and up, anything else, and what is done to embeddings before the first layer takes them."""
STATES = "queries", "keys", "values"
"""What reaches the core of attention, where there is no rotary before it, or keys alone are wrong: a cache lies in between."""
EXPERTS, ROUTER = "experts", "router"
"""All experts of a mixture, and their sum; the choice of them where its module was not heard."""
INPUT = "input"
"""What an operator takes where it should be what its layer takes, and is not."""
_ORDERS = 10_000
"""More than a layer has operators."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)(?:\.|$)")
_BEFORE_LAYERS = re.compile(r"embed|wte|wpe|rotary")
_IN_ATTENTION = re.compile(r"att(?:n|ention)\.[^.]+$")
_NORM_OF_LAYER = re.compile(r"\.\d+\.(?:\w*norm\w*|ln\w*)$")
_QUERY_LIKE = ("q_proj", "k_proj", "v_proj", "query_key_value", "c_attn", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj",
               "c_fc", "fc1", "dense_h_to_4h", "gate", "router")  # fmt: skip
_ENDS_OF_ATTENTION = ("o_proj", "out_proj", "dense", "c_proj")
_ENDS_OF_MLP = ("down_proj", "fc2", "dense_4h_to_h", "fc_out", "output_linear")
_FIRST_OF_MLP = ("gate_proj", "fc1", "c_fc", "dense_h_to_4h", "fc_in")
_STEEPEST = 1.13
"""Largest slope of the activations that models have: GELU's."""
_MOST_FLIPPED = 0.25
"""Share of tokens with another choice of experts that rounding may make where the router was not heard."""
_OTHERWISE = 0.1
"""Relative difference of queries and keys from which their dimensions may lie in another order."""
_QKV = "q_proj", "k_proj", "v_proj"
_NORMS = tuple(re.compile(rf"\.{word[0]}(?:{word[1:]})?_?(?:layer)?norm$") for word in ("query", "key", "value"))
"""Names of the norms of queries, keys and values, as they differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One operator of one row's forward, held against float64."""

    operator: str
    """Its module's name; `<layer>.residual` and the like for what lies between modules."""
    kind: str
    layer: int | None
    order: int
    num_values: int
    error: float
    """Root mean square of what it introduced, relative to that of the exact result."""
    largest: float
    """The same of the token where it is largest."""
    ratio: float
    """The largest introduced error in units of its bound; inf where only one of the two is finite, or a choice differs."""
    token: int
    """The row's token (prompt and response) where that is."""
    dtype: str
    """torch's name of the dtype of what it gave."""
    point: Point | None = None
    """Where its own error enters the forward; None for choices and for the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Layers whose operators' numbers exist together."""

    first: int | None = None
    """None where every layer is."""
    last: int | None = None
    is_first: bool = True
    """What comes before all layers belongs to it."""
    is_last: bool = True
    """What comes behind all layers belongs to it."""

    @property
    def is_all(self) -> bool:
        return self.first is None or self.last is None

    def has(self, layer: int) -> bool:
        """Whether a layer belongs to it."""
        return self.first is None or self.last is None or self.first <= layer <= self.last

    def needs(self, name: str) -> bool:
        """Whether it takes the numbers of an operator to judge those of these layers: norms behind take what layers leave."""
        layer = layer_of(name)
        if layer is None:
            return self.is_last or bool(_BEFORE_LAYERS.search(name))
        return self.has(layer) or (
            self.last is not None and layer == self.last + 1 and bool(_NORM_OF_LAYER.search(name))
        )

    def runs(self, layer: int) -> bool:
        """Whether float64 has to run a layer."""
        return self.has(layer) or (self.last is not None and layer == self.last + 1)


EVERY_LAYER = Window()

Point = tuple[str, str, int]
"""An operator's call; TAKES or GIVES; which of its tensors."""
TAKES, GIVES = "takes", "gives"


@dataclass(slots=True)
class Judgement:
    """A row's forward, held against float64."""

    operators: list[Judged]
    errors: dict[Point, Any]
    """What was introduced at each point: found less exact, float32 [T, ...]."""
    first_position: int
    """The position that the execution gave the row's first token."""
    unjudged: dict[str, str] = field(default_factory=dict)
    """Operator -> why it could not be judged."""


class Reference:
    """A model in float64 that judges the operators of executions."""

    def __init__(self, model: Any, recorded_dtypes: Mapping[str, Any] | None = None):
        """`model` has the recorded weights in float64, with unfused attention; `recorded_dtypes` are the weights' own dtypes."""
        self.model = model.eval().requires_grad_(False)
        self._names = {id(module): name for name, module in model.named_modules()}
        self.operators = operators(model)
        self.attentions = attention_layers(model)
        self.recorded_dtypes = recorded_dtypes or {}
        self._layers = {
            int(found[1]): module for name, module in model.named_modules() if (found := LAYER_NAME.search(name))
        }
        self.has_rotary = any(name.rpartition(".")[2] == "rotary_emb" for name in self.operators)

    def judge(
        self,
        row: RecordedRow,
        taps: RowTaps,
        weight_dtypes: Mapping[str, Any],
        *,
        rounds_scores: bool,
        attention_cut: float = 0.0,
        coarsest: Any = None,
        first_position: int | None = None,
        window: Window = EVERY_LAYER,
    ) -> Judgement:
        """The operators of a row's forward, in their order, but for the head, whose numbers alone are left in `taps`.

        `weight_dtypes` are those of the execution's weights, `rounds_scores` and `attention_cut` what its attention does to its numbers
        (`bounds.of_attention`); `coarsest` is the dtype below which its operators should not round, whatever they give. Of a `window` that begins behind the first layer, `first_position`
        is the position of the row's first token.
        """
        import torch

        if first_position is None:
            first_position = position_of(taps)
        run = _Run(self, taps, weight_dtypes, (rounds_scores, attention_cut), coarsest, first_position, window)
        with torch.no_grad(), keep_double(), run.listening(), self._only(window):
            self._hidden(row, first_position)
        return Judgement(run.judged, run.errors, first_position, run.unjudged)

    def carried(
        self,
        row: RecordedRow,
        weights_T: np.ndarray,
        temperature: float,
        first_position: int,
        windows: Sequence[Window],
        errors_of: Callable[[Window], Sequence[dict[Point, Any]]],
    ) -> list[dict[Point, float]]:
        """What errors add to sum(weights_T * logprobs) of a row's response, to first order: each times the gradient there.

        One forward and backward of the float64 model. `errors_of` gives the errors of some executions in a window of layers; it is
        called from the last window to the first, and one window's are kept. Gradients are not kept: each is multiplied as
        soon as it is there, and the errors are used up. A layer's own numbers exist for one layer at a time: it runs once
        more on the way back.
        """
        import torch

        held, errors = len(windows) - 1, errors_of(windows[-1])
        found: list[dict[Point, float]] = [{} for _ in errors]
        count: dict[str, int] = {}
        is_over = has_attended = False
        entered: Any = None

        def enter(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal entered
            entered = args[0] if args else kwargs.get("hidden_states")

        def called(name: str) -> str:
            count[name] = count.get(name, 0) + 1
            return name if count[name] == 1 else f"{name}#{count[name]}"

        def use(number: int) -> None:
            nonlocal held, errors
            if number != held:
                held, errors = number, errors_of(windows[number])

        def note(point: Point, value: Any) -> None:
            if is_over:  # layers that run again for the backward are not listened to again
                return
            layer = layer_of(point[0])
            place = (len(windows) - 1 if has_attended else 0) if layer is None else _place(windows, layer)
            if place and point[1] == TAKES and windows[place].first == layer and value is entered:
                place -= 1  # what the layer before left
            heads_first = point[0].endswith(f".{ATTENTION}") and point[1] == TAKES

            def multiply(gradient: Any) -> None:
                gradient = gradient[0].transpose(0, 1) if heads_first else gradient
                use(place)
                for products, each in zip(found, errors, strict=True):
                    if (error := each.pop(point, None)) is not None:
                        products[point] = _product_of(gradient, error)

            (value if value.requires_grad else value.requires_grad_()).register_hook(multiply)

        def core(module: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal has_attended
            call = called(core_name(self._names.get(id(module), "")))
            for slot, value in enumerate(args[:3]):
                note((call, TAKES, slot), value)
            given = original(module, *args, **kwargs)
            note((call, GIVES, 0), given[0])
            has_attended = True
            return given

        with ExitStack() as stack:
            for name, module in self.operators.items():

                def hook(_module: Any, args: Any, kwargs: Any, given: Any, name: str = name) -> None:
                    call = called(name)
                    for slot, value in enumerate(tensors_of(args, kwargs)):
                        if value.requires_grad:
                            note((call, TAKES, slot), value)
                    for slot, value in enumerate(outputs_of(given)):
                        if value.is_floating_point():
                            note((call, GIVES, slot), value)

                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            stack.enter_context(attention_around(core))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(keep_double())
            stack.enter_context(self._run_again())
            for layer in self._layers.values():
                stack.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
            embedding = self.model.get_input_embeddings()
            stack.callback(embedding.register_forward_hook(lambda _module, _args, given: given.requires_grad_()).remove)
            hidden_TH = self._hidden(row, first_position)[0]
            logprobs_T = self._logprobs(row, hidden_TH, temperature)
            is_over = True
            (logprobs_T * torch.from_numpy(np.nan_to_num(weights_T)).to(logprobs_T.device)).sum().backward()
        return found

    @contextmanager
    def _run_again(self) -> Iterator[None]:
        """Within it a layer keeps only what it takes, and runs again when the backward needs the rest."""
        from torch.utils.checkpoint import checkpoint

        with ExitStack() as stack:
            for module in self._layers.values():
                module.forward = partial(
                    checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False,
                    context_fn=lambda: (nullcontext(), keep_double()),
                )  # fmt: skip
                stack.callback(module.__dict__.pop, "forward")
            yield

    @contextmanager
    def _only(self, window: Window) -> Iterator[None]:
        """Within it layers that a window does not need hand on what they take."""
        with ExitStack() as stack:
            for layer, module in self._layers.items():
                if window.runs(layer):
                    continue
                before = module.__dict__.get("forward")
                module.forward = _handed_on
                stack.callback(_put_back, module, before)
            yield

    def logprobs(self, row: RecordedRow, temperature: float, first_position: int = 0) -> np.ndarray:
        """[T] float64 of a row's response, its first token at a position."""
        import torch

        with torch.no_grad(), keep_double():
            return np.asarray(self._logprobs(row, self._hidden(row, first_position)[0], temperature).cpu())

    def _logprobs(self, row: RecordedRow, hidden_TH: Any, temperature: float) -> Any:
        import torch

        ids_T = torch.from_numpy(row.response_ids.astype(np.int64)).to(hidden_TH.device)
        before = slice(len(row.prompt_ids) - 1, len(row.prompt_ids) + len(row.response_ids) - 1)
        logits_TV = self.model.get_output_embeddings()(hidden_TH[before])
        logits_TV = scaled(logits_TV, self.model.config.get_text_config()) / temperature
        return logits_TV.log_softmax(-1).gather(-1, ids_T[:, None])[:, 0]

    def _hidden(self, row: RecordedRow, first_position: int) -> Any:
        """[1, T, H] of prompt and response."""
        import torch

        ids = np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64)
        device = next(self.model.parameters()).device
        positions = first_position + torch.arange(len(ids), device=device)
        output = self.model.base_model(
            input_ids=torch.from_numpy(ids).to(device)[None], position_ids=positions[None], use_cache=False
        )
        return output.last_hidden_state


class _Run:
    """One row's forward in float64 with an execution's numbers put in."""

    def __init__(
        self,
        reference: Reference,
        taps: RowTaps,
        weight_dtypes: Mapping[str, Any],
        attention: tuple[bool, float],
        coarsest: Any,
        first_position: int,
        window: Window,
    ):
        self._reference, self._taps, self._dtypes = reference, taps, weight_dtypes
        self._rounds_scores, self._cut = attention
        self._coarsest = coarsest
        self.first_position, self._window = first_position, window
        self.judged: list[Judged] = []
        self.errors: dict[Point, Any] = {}
        self.unjudged: dict[str, str] = {}
        self._num_calls: dict[str, int] = {}
        self._entered: dict[int | None, Any] = {}
        """Layer -> what it takes here."""
        self._attended: set[int | None] = set()
        """Layers whose attention has run."""
        self._branches: list[Any] = []
        """What attention and MLP gave since the last addition to the residual stream."""
        self._unheard: dict[tuple[int | None, str], tuple[Any, Callable[[Any], Any]]] = {}
        """What operators give that the execution did not call (its code fuses them), and its bound for numbers of a dtype."""
        self._normed: tuple[set[int | None], ...] = (set(), set(), set())
        """Layers of which the norms of queries, of keys and of values were heard."""
        self._states: dict[str, tuple[Any, ...]] = {}
        """Core of an attention that was not heard -> queries and keys as they should be, [T, N, D]."""
        self._last = list(taps.calls)[-2:]
        self._order = 0 if window.first is None else window.first * _ORDERS

    def _rounding(self, given: Any, taken: Any = None, **rest: Any) -> Rounding:
        """Of numbers of these dtypes, or of the coarsest one that the execution has where they are coarser: that is no rounding of its own."""

        def finer(dtype: Any) -> Any:
            is_coarser = self._coarsest is not None and bounds.unit(dtype) > bounds.unit(self._coarsest)
            return self._coarsest if is_coarser else dtype

        return Rounding(given=finer(given), taken=finer(given if taken is None else taken), **rest)

    def _owns(self, layer: int | None) -> bool:
        """Whether what is there belongs to the window."""
        if layer is None:
            return self._window.is_last if self._attended else self._window.is_first
        return self._window.has(layer)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Put the execution's numbers before and after each operator."""
        with ExitStack() as stack:
            for name, module in self._reference.operators.items():
                before, after = self._hooks(name, module)
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
            for name, module in mixtures(self._reference.model).items():
                stack.callback(module.register_forward_hook(self._mixing(name)).remove)
            for layer, module in self._reference._layers.items():
                stack.callback(module.register_forward_pre_hook(self._entering(layer), with_kwargs=True).remove)
            stack.enter_context(attention_around(self._core))
            yield

    def _entering(self, layer: int) -> Callable[..., None]:
        def enter(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._entered[layer] = args[0] if args else kwargs.get("hidden_states")

        return enter

    def _mixing(self, name: str) -> Callable[..., Any]:
        """Name a mixture whose sum of experts and a shared one is not what these gave; otherwise its rounding is the residual's."""

        def mix(_module: Any, _args: Any, given: Any) -> Any:
            found, outputs = self._taps.mixed.get(name), outputs_of(given)
            if found is None or not outputs or outputs[0].numel() != found.numel():
                return None
            exact, rounding, layer = tokens_first(outputs[0], found), self._rounding(found.dtype), layer_of(name)
            parts = [
                each.double().reshape(exact.shape).abs() for each in self._branches if each.numel() == exact.numel()
            ]
            bound = bounds.of_sum(sum(parts, exact.abs()), rounding) + self._of_branches(exact, rounding)
            unheard = self._unheard.get((layer, EXPERTS))
            if unheard is not None and unheard[0].numel() == exact.numel():
                bound = bound + unheard[1](found.dtype).reshape(exact.shape)
            if judged(name, EXPERTS, layer, 0, found, exact, bound).ratio <= 1.0:
                return None
            self._add(f"{name}.{EXPERTS}", EXPERTS, layer, found, exact, bound)
            return with_outputs(given, [like(found, outputs[0]), *outputs[1:]])

        def judging(module: Any, args: Any, given: Any) -> Any:
            with self._judging(name):
                return mix(module, args, given)
            return None

        return judging

    def _hooks(self, name: str, module: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with self._judging(name):
                return take(module, args, kwargs)
            return None

        def after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> Any:
            with self._judging(name):
                return give(module, args, kwargs, given)
            return None

        def take(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = self._call(name, next_one=True)
            if call is None:
                return None
            found = tensors_of(args, kwargs)
            if are_experts(module) and len(found) > 2:
                self._choice_taken(name, found, call)
            if name.rpartition(".")[2] != "rotary_emb" and _num_floating(call.takes) > _num_floating(found):
                self.unjudged[name] = (
                    f"takes {_num_floating(call.takes)} tensors where the recorded model's takes {_num_floating(found)}"
                )
                return None
            return with_tensors(
                args, kwargs, [self._taken(name, slot, value, call) for slot, value in enumerate(found)]
            )

        def give(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> Any:
            call = self._used(name)
            takes, outputs = tuple(tensors_of(args, kwargs)), outputs_of(given)
            if call is None or all(
                each is None for each in call.gives
            ):  # as of one that was called for some tokens at a time
                if outputs and outputs[0].is_floating_point():
                    self._did_not_hear(name, outputs[0], self._bound_unheard(name, module, takes, outputs[0]))
                return None
            if name in self.unjudged:
                new = [like(call.gives[slot], value) if _fits(call.gives, slot, value) else value
                       for slot, value in enumerate(outputs)]  # fmt: skip
                return with_outputs(given, new)
            if any(not value.is_floating_point() for value in outputs):
                self._chosen(name, module, takes, outputs, call, lambda: outputs_of(module.forward(*args, **kwargs)))
                new = [like(call.gives[slot], value) if _fits(call.gives, slot, value) else value
                       for slot, value in enumerate(outputs)]  # fmt: skip
            else:
                new = [self._given(name, module, slot, value, takes, call) for slot, value in enumerate(outputs)]
            return with_outputs(given, new)

        return before, after

    @contextmanager
    def _judging(self, name: str) -> Iterator[None]:
        """An operator of a form that is not understood is named, and the others are judged without it."""
        import torch

        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            self.unjudged.setdefault(name, f"{type(error).__name__}: {first_line(error)}")

    def _call(self, name: str, *, next_one: bool = False) -> Call | None:
        if next_one:
            self._num_calls[name] = self._num_calls.get(name, 0) + 1
        return self._taps.calls.get(self._called(name))

    def _used(self, name: str) -> Call | None:
        """The same, when it is over: its numbers are not needed again, but for what the last operators gave."""
        call = self._call(name)
        if call is not None and self._called(name) not in self._last:
            self._taps.calls[self._called(name)] = Call((), ())
        return call

    def _called(self, name: str) -> str:
        """The name of an operator's present call."""
        number = self._num_calls.get(name, 0)
        return name if number <= 1 else f"{name}#{number}"

    def _core(self, module: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The core of an attention layer: queries, keys and values come in, [1, N, T, D] each."""
        name = core_name(self._reference._names.get(id(module), ""))
        with self._judging(name):
            return self._core_given(name, module, original, args, kwargs)
        return original(module, *args, **kwargs)

    def _core_given(
        self, name: str, module: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = self._call(name, next_one=True)
        layer = layer_of(name)
        self._attended.add(layer)
        if call is None:
            given = original(module, *args, **kwargs)
            self._did_not_hear(name, given[0], self._core_unheard(args[:3], given, kwargs))
            self._states = {name: tuple(state[0].transpose(0, 1) for state in args[:2])}
            return given
        states, takes = list(args[:3]), list(call.takes)
        order_D = _order_of_dimensions(states[:2], takes[:2])
        if order_D is not None:
            takes[:2] = (taken[..., order_D] for taken in takes[:2])
        are_right = True
        for slot, (state, taken) in enumerate(zip(states, takes, strict=True)):
            if taken is None:
                continue
            exact, rounding = state[0].transpose(0, 1), self._rounding(taken.dtype)
            turns = slot < 2 and self._reference.has_rotary
            bound = bounds.of_sum(exact, rounding)
            if turns:
                bound = bounds.of_rotary(exact, self.first_position + len(exact), rounding)
            fused = self._unheard.get((layer, _QKV[slot]))
            if fused is not None and layer not in self._normed[slot]:
                # A rotation moves an error between the two numbers of a pair.
                bound = bound + math.sqrt(2.0) * fused[1](taken.dtype).reshape(exact.shape).amax(-1, keepdim=True)
            kind = STATES[slot]
            if turns:
                # The same tables turn both: where queries are right and keys are not, keys were changed behind the rotary.
                found = judged("", "", layer, 0, taken, exact, bound).ratio <= 1.0
                # A rotation, or none at all, keeps the length of each head's vector.
                keeps = (taken.double().norm(dim=-1) - exact.norm(dim=-1)).abs() <= bound.norm(dim=-1)
                kind = ROTARY if slot == 0 or found or not are_right or bool(keeps.all()) else kind
                are_right = found
            where, kind = self._wrong_state(name, slot, kind, taken.double(), exact)
            self._add(where, kind, layer, taken, exact, bound, (name, TAKES, slot))
            states[slot] = like(taken, state, heads_first=True)
        given = original(module, *states, *args[3:], **kwargs)
        found = call.gives[0]
        self._used(name)
        if found is None:
            return given
        exact = given[0].reshape(found.shape)
        rounding = self._rounding(found.dtype, call.takes[0].dtype)
        scaling = kwargs.get("scaling") or states[0].shape[-1] ** -0.5
        query, key, value = (state[0].transpose(0, 1) for state in states)
        bound = bounds.of_attention(
            query,
            key,
            value,
            given[1][0],
            given[0][0],
            float(scaling),
            rounding,
            rounds_scores=self._rounds_scores,
            cut=self._cut,
        )
        self._add(name, ATTENTION, layer, found, exact, bound.reshape(exact.shape), (self._called(name), GIVES, 0))
        return (like(found, given[0]), *given[1:])

    def _wrong_state(self, core: str, slot: int, kind: str, found: Any, exact: Any) -> tuple[str, str]:
        """The operator that makes wrong queries, keys or values, and its kind; both [T, N, D].

        A rotation keeps the length of each head's vector: where that is another one and the norm before was not heard, it is the norm's.
        """
        norms = [
            (name, kind_of(name))
            for name in self._reference.operators
            if name.startswith(f"{core.removesuffix(ATTENTION)}") and _NORMS[slot].search(name)
        ]
        if norms and layer_of(core) not in self._normed[slot]:
            lengths, others = (each.norm(dim=-1) for each in (exact, found))
            if float((others - lengths).abs().max()) > _OTHERWISE * float(lengths.amax()):
                return norms[0]
        return f"layers.{layer_of(core)}.{kind}" + (f".{'qk'[slot]}" if kind == ROTARY else ""), kind

    def _wrong_before(self, layer: int | None) -> tuple[str, str] | None:
        """The operator before the core of an attention that is code of its own, and its kind, where its queries or keys are wrong."""
        for core, states in self._states.items():
            taken = self._taps.multiplied.get(core)
            if taken is None or layer_of(core) != layer or not self._reference.has_rotary:
                continue
            found = [_as_heads_of(each.double(), state) for each, state in zip(taken, states, strict=True)]
            order_D = _order_of_dimensions([state.transpose(0, 1)[None] for state in states], found)
            for slot, (each, exact) in enumerate(zip(found, states, strict=True)):
                if each is None:
                    continue
                each = each if order_D is None else each[..., order_D]
                # Scores are scaled anywhere: what is a multiple of the right numbers is right.
                each = each / (float((each * exact).sum()) / float(exact.square().sum()) or 1.0)
                bound = bounds.of_rotary(exact, self.first_position + len(exact), self._rounding(taken[slot].dtype))
                if judged("", "", layer, 0, each, exact, bound).ratio > 2.0:
                    scale = float(exact.norm() / each.norm().clamp_min(1e-300))
                    return self._wrong_state(core, slot, ROTARY, each * scale, exact)
        return None

    def _taken(self, name: str, slot: int, value: Any, call: Call) -> Any:
        """What goes into an operator, after what lies before it has been judged."""
        taken = call.takes[slot] if slot < len(call.takes) else None
        if taken is None or taken.numel() != value.numel():
            return value
        layer = layer_of(name)
        if value.is_floating_point() and slot and are_experts(self._reference.operators[name]):
            return like(taken, value)  # the weights of a choice, which are judged with it
        if value.is_floating_point():
            if name.rpartition(".")[2] == "rotary_emb":
                return value  # of the hidden states it reads the dtype alone: what lies before them is judged where a layer takes them
            exact, point = tokens_first(value, taken), (self._called(name), TAKES, slot)
            if value is self._entered.get(layer) and self._is_apart(name, layer, taken, exact, point):
                return like(taken, value)
            self._between(name, layer, taken, exact, point)
        elif name.rpartition(".")[2] in ("rotary_emb", "wpe"):
            self._add_choice(f"{name}.positions", ROTARY, layer, taken, value.reshape(taken.shape))
        new = like(taken, value)
        if value.is_floating_point() and value.is_contiguous():
            # In place: the same numbers are added to the residual stream later.
            return value.copy_(new)
        return new

    def _choice_taken(self, name: str, found: Sequence[Any], call: Call) -> None:
        """Judge the weights [T, S] that experts take where they are not those that the router gave, such as of a router that was not heard.

        Tokens of another choice are passed over, unless they are more than rounding makes of any router.
        """
        if len(call.takes) != len(found):
            return
        ids, taken_ids = found[1], call.takes[1]
        scores, taken = found[2], call.takes[2]
        is_choice = not ids.is_floating_point() and scores.is_floating_point() and ids.shape == scores.shape
        if (
            not is_choice
            or taken is None
            or taken_ids is None
            or taken_ids.shape != ids.shape
            or taken.shape != ids.shape
        ):
            return
        (sorted_ids, order), (taken_sorted, taken_order) = (each.sort(-1) for each in (ids, taken_ids))
        exact, given = scores.gather(-1, order), taken.gather(-1, taken_order)
        same = (sorted_ids == taken_sorted).all(-1)
        if bool((given.double() == exact).all()) and bool(same.all()):
            return
        layer, rounding = layer_of(name), self._rounding(given.dtype)
        where, kind = f"layers.{layer}.{ROUTER}", ROUTER
        if float((~same).double().mean()) > _MOST_FLIPPED:
            self._add_differing(where, kind, layer, ~same, given.numel())
            return
        bound = bounds.of_sum(exact.abs(), rounding, 8.0)
        for (of, operator), (_, unheard) in self._unheard.items():
            if of == layer and operator in ("gate", "router"):  # its logits' error is the weights', relative
                logits = unheard(given.dtype)
                logits = logits if isinstance(logits, float) else logits.reshape(len(exact), -1).amax(-1, keepdim=True)
                bound = bound + 2.0 * logits * exact.abs()
        self._add(where, kind, layer, given[same], exact[same], bound[same])

    def _is_apart(self, name: str, layer: int | None, taken: Any, exact: Any, point: Point) -> bool:
        """Judge what the first operators of a layer took against what the layer took, where these are not the same numbers."""
        if layer is None or layer in self._attended:
            return False
        entered = self._taps.entered.get(layer)
        if entered is None or entered.shape != taken.shape or bool((entered == taken).all()):
            return False
        if not bool((entered.double() == exact).all()):
            size, before = exact.abs(), layer - 1 if layer else None
            for branch in self._branches:
                if branch.numel() == exact.numel():
                    size = size + branch.double().reshape(exact.shape).abs()
            self._branches = []
            rounding = self._rounding(entered.dtype)
            bound = bounds.of_sum(size, rounding) + self._of_branches(exact, rounding)
            kind = EMBEDDING if before is None else RESIDUAL
            self._add(kind if before is None else f"layers.{before}.{kind}", kind, before, entered, exact, bound)
        exact = entered.double()
        bound = bounds.of_sum(exact.abs(), self._rounding(taken.dtype))
        self._add(f"{name}.{INPUT}", kind_of(name), layer, taken, exact, bound, point)
        return True

    def _between(self, name: str, layer: int | None, taken: Any, exact: Any, point: Point) -> None:
        """Judge what lies before an operator, unless it is what the operator before gave, unchanged."""
        if bool((taken.double() == exact).all()):
            return
        kind, of = self._between_kind(name, layer)
        rounding = self._rounding(taken.dtype)
        steps = {RESIDUAL: 3.0, ACTIVATION: 4.0}.get(kind, 8.0)
        size = exact.abs()
        if kind == RESIDUAL:
            # A branch may be multiplied before it is added, and of several (attention and MLP at once, experts and a shared one) the
            # sum of some is rounded too.
            for branch in self._branches:
                if branch.numel() == exact.numel():
                    size = size + branch.double().reshape(exact.shape).abs()
            self._branches = []
        bound = bounds.of_sum(size, rounding, steps) + self._of_unheard(name, layer, kind, taken, exact)
        if kind == ROTARY:
            bound = bounds.of_rotary(exact, self.first_position + len(exact), rounding)
        if kind == RESIDUAL:
            bound = bound + self._of_branches(exact, rounding)
        elif kind == ATTENTION and layer not in self._attended:
            bound = bound + bounds.of_own_attention(exact, rounding)
        kind = EMBEDDING if kind == RESIDUAL and of is None else kind
        where = kind if kind == EMBEDDING else f"layers.{of}.{kind}" if of is not None else f"{name}.{kind}"
        if kind == ACTIVATION and kind_of(name) not in _ENDS_OF_MLP:
            for first in _FIRST_OF_MLP:  # of which the activation takes the result, as it is
                unheard = self._unheard.get((layer, first))
                if (
                    unheard is not None
                    and unheard[0].numel() == exact.numel()
                    and bool((unheard[0].reshape(exact.shape) == exact).all())
                ):
                    where, kind = f"{name.rpartition('.')[0]}.{first}", first
        if kind == ATTENTION and judged(where, kind, of, 0, taken, exact, bound).ratio > 1.0:
            where, kind = self._wrong_before(layer) or (where, kind)
        self._add(where, kind, of, taken, exact, bound, point)

    def _of_branches(self, exact: Any, rounding: Rounding) -> Any:
        """What the bound of a residual stream gets for MLPs and attentions that were not heard, such as one that is called in parts."""
        ends = [
            value for (_, kind), (value, _) in self._unheard.items() if kind in (*_ENDS_OF_ATTENTION, *_ENDS_OF_MLP)
        ]
        return sum(
            bounds.of_branch(value.reshape(exact.shape), rounding) for value in ends if value.numel() == exact.numel()
        )

    def _did_not_hear(self, name: str, given: Any, bound: Callable[[Any], Any]) -> None:
        layer = layer_of(name)
        if any(other != layer for other, _ in self._unheard):  # of a layer that is over
            self._unheard.clear()
        self._unheard[layer, kind_of(name)] = given, bound

    def _bound_unheard(self, name: str, module: Any, takes: tuple[Any, ...], value: Any) -> Callable[[Any], Any]:
        """The bound of what an operator gives that the execution did not call, for numbers of a dtype."""

        def bound(dtype: Any) -> Any:
            rounding = self._rounding(dtype, **self._weight_dtypes(name))
            found = bounds.of_module(module, takes, value, 0, rounding)
            return found if isinstance(found, float) else found.expand(value.shape)

        return bound

    def _core_unheard(self, states: tuple[Any, ...], given: Any, kwargs: Mapping[str, Any]) -> Callable[[Any], Any]:
        """The bound of an attention whose queries and keys were not heard: what turns them rounds, too."""
        query, key, value = (state[0].transpose(0, 1) for state in states)

        def bound(dtype: Any) -> Any:
            rounding = self._rounding(dtype)
            last = self.first_position + len(query)
            turned = [bounds.of_rotary(state, last, rounding) for state in (query, key)]
            scaling = float(kwargs.get("scaling") or query.shape[-1] ** -0.5)
            return bounds.of_attention(
                query,
                key,
                value,
                given[1][0],
                given[0][0],
                scaling,
                rounding,
                rounds_scores=self._rounds_scores,
                cut=self._cut,
                off=turned,
            )

        return bound

    def _of_unheard(self, name: str, layer: int | None, kind: str, taken: Any, exact: Any) -> Any:
        """What operators that were not heard add to the bound of what lies before an operator."""

        def of(operator: str) -> tuple[Any, Any] | None:
            found = self._unheard.get((layer, operator))
            if found is None or found[0].numel() != exact.numel():
                return None
            of_value = found[1](taken.dtype)
            return found[0].reshape(exact.shape), of_value if isinstance(of_value, float) else of_value.reshape(
                exact.shape
            )

        if kind == ATTENTION:
            return 0.0 if (core := of(ATTENTION)) is None else core[1]
        if kind != ACTIVATION:
            return 0.0
        gate = next((found for each in _FIRST_OF_MLP if (found := of(each)) is not None), None)
        if kind_of(name) not in _ENDS_OF_MLP:  # the activation's own input
            return 0.0 if gate is None or not bool((gate[0] == exact).all()) else gate[1]
        up, total = of("up_proj"), 0.0
        both = self._unheard.get((layer, "gate_up_proj"))
        if both is not None and both[0].numel() == 2 * exact.numel():
            of_both = both[1](taken.dtype)
            of_both = both[0].new_full(both[0].shape, of_both) if isinstance(of_both, float) else of_both
            gate, up = (
                (value.reshape(exact.shape), bound.reshape(exact.shape))
                for value, bound in zip(both[0].chunk(2, -1), of_both.expand(both[0].shape).chunk(2, -1), strict=True)
            )
        if up is not None:
            total = (exact / up[0]).nan_to_num(0.0, 0.0, 0.0).abs() * up[1]
        if gate is not None and any((layer, each) in self._unheard for each in ("act_fn", "act", "activation_fn")):
            total = total + _STEEPEST * gate[1] * (1.0 if up is None else up[0].abs())
        return total

    def _between_kind(self, name: str, layer: int | None) -> tuple[str, int | None]:
        """What lies before an operator, and the layer that it belongs to."""
        last = name.rpartition(".")[2]
        if last == ATTENTION:
            return WIRING, layer
        if last in _ENDS_OF_MLP or (last in _ENDS_OF_ATTENTION and ".mlp" in name) or last.startswith("act"):
            return ACTIVATION, layer
        if last in _ENDS_OF_ATTENTION:
            return ATTENTION, layer
        if "norm" in last and _IN_ATTENTION.search(name):
            return (
                ROTARY if self._reference.has_rotary else WIRING
            ), layer  # of queries and keys, behind what turns them
        if layer is None:
            return RESIDUAL, max((each for each in self._attended if each is not None), default=None)
        if layer in self._attended:
            return RESIDUAL, layer
        if "norm" in last or last.startswith("ln") or last in _QUERY_LIKE:
            return RESIDUAL, layer - 1 if layer else None
        return WIRING, layer

    def _given(self, name: str, module: Any, slot: int, value: Any, takes: tuple[Any, ...], call: Call) -> Any:
        """What an operator gave, judged against what the float64 one makes of the same."""
        given = call.gives[slot] if slot < len(call.gives) else None
        if given is None or given.numel() != value.numel():
            return value
        kind, layer = kind_of(name), layer_of(name)
        exact = tokens_first(value, given)
        if kind in (*_ENDS_OF_ATTENTION, *_ENDS_OF_MLP) or are_experts(module):
            self._branches.append(given)
        if kind in _ENDS_OF_ATTENTION and ".mlp" not in name:  # of attentions that call no function of transformers
            self._attended.add(layer)
        for layers, norm in zip(self._normed, _NORMS, strict=True):
            if norm.search(name):
                layers.add(layer)
        bound = self._bound(name, module, slot, value, takes, call, given)
        self._add(name, kind, layer, given, exact, bound, (self._called(name), GIVES, slot))
        return like(given, value)

    def _bound(
        self,
        name: str,
        module: Any,
        slot: int,
        value: Any,
        takes: tuple[Any, ...],
        call: Call,
        given: Any,
        made_in: Any = None,
    ) -> Any:
        first = next((each for each in call.takes if each is not None and each.is_floating_point()), given)
        rounding = self._rounding(made_in or given.dtype, first.dtype, **self._weight_dtypes(name), adds=call.adds)
        bound = bounds.of_module(module, takes, value, slot, rounding, is_other_code=call.is_other_code)
        return bound if isinstance(bound, float) else tokens_first(bound.expand(value.shape), given)

    def _weight_dtypes(self, name: str) -> dict[str, Any]:
        """Of an operator's weight in the execution (its coarsest one where it has none of that name), and of the recorded one; beside
        adapters that of the projection.
        """
        of_run, of_trace = (
            dtypes.get(f"{name}.weight", dtypes.get(f"{name}.base_layer.weight"))
            for dtypes in (self._dtypes, self._reference.recorded_dtypes)
        )
        return {"weight": self._coarsest if of_run is None and of_trace is not None else of_run, "recorded": of_trace}

    def _chosen(
        self,
        name: str,
        module: Any,
        takes: tuple[Any, ...],
        outputs: list[Any],
        call: Call,
        again: Callable[[], list[Any]],
    ) -> None:
        """Judge a router: its logits, whether its choice follows from them, and the scores of what it chose.

        Where the code that `again` runs has no logits to go on from, any choice whose logits lie within both bounds may fall either way.
        """
        import torch

        kind, layer = kind_of(name), layer_of(name)
        logits = chosen = None
        # Those of all experts are wider than the choices, which some routers give first.
        widths = [value.shape[-1] * value.is_floating_point() for value in outputs]
        num_chosen = max(value.shape[-1] for value in outputs if not value.is_floating_point())
        of_all = widths.index(max(widths)) if max(widths) > num_chosen else 0
        for slot, (value, given) in enumerate(zip(outputs, call.gives, strict=False)):
            if given is not None and given.numel() != value.numel() and not value.is_floating_point():
                differs = torch.ones(len(given), dtype=torch.bool)  # another number of experts
                self._add_differing(name, kind, layer, differs, given.numel())
                return
            if given is None or given.numel() != value.numel():
                continue
            exact = value.reshape(given.shape)
            if not value.is_floating_point():
                chosen = given, exact, slot
            elif slot == of_all:
                bound = self._bound(name, module, 0, value, takes, call, given)
                # What the scores are made of: an error of theirs is counted with the scores.
                self._add(name, kind, layer, given, exact, bound)
                logits = exact, bound, given
        if chosen is None:
            return
        given, exact, ids_slot = chosen
        differs = (given.sort(-1).values != exact.sort(-1).values).any(-1)
        if bool(differs.any()) and logits is not None and exact.dim() == 2 and int(given.max()) < logits[0].shape[-1]:
            values, bound, of_execution = logits
            unit = max(bounds.unit(each.dtype) for each in call.gives if each is not None and each.is_floating_point())
            made_right = follows(again, outputs[of_all], of_execution, given, ids_slot, max(unit, 2.0**-24))
            if made_right is None:
                least = values.gather(-1, exact).amin(-1) - values.gather(-1, given).amin(-1)
                made_right = least <= 2.0 * bound.amax(-1)
            differs &= ~made_right
        self._add_differing(name, kind, layer, differs, given.numel())
        same = (given == exact).all(-1)
        for slot, (value, score) in enumerate(zip(outputs, call.gives, strict=False)):
            if (
                slot != of_all
                and score is not None
                and value.is_floating_point()
                and score.numel() == value.numel()
                and bool(same.any())
            ):
                # Scores may be kept in more digits than the logits that they are made of.
                made_of = [
                    each for each in (call.gives[of_all], score) if each is not None and each.is_floating_point()
                ]
                coarser = max(made_of, key=lambda each: bounds.unit(each.dtype))
                bound = self._bound(name, module, slot or 1, value, takes, call, score, made_in=coarser.dtype)
                value = value.reshape(score.shape)
                point = self._called(name), GIVES, slot
                self._add(name, kind, layer, score[same], value[same], bound[same], point)
                # Scores of other choices cannot be held against each other.
                if point in self.errors:
                    self.errors[point] = torch.where(same[:, None], score.double() - value, 0.0).type(torch.float32)

    def _add(
        self,
        operator: str,
        kind: str,
        layer: int | None,
        found: Any,
        exact: Any,
        bound: Any,
        point: Point | None = None,
    ) -> None:
        import torch

        if not self._owns(layer):
            return
        off = found.double() - exact
        if point is not None:
            self.errors[point] = off.type(torch.float32)  # `float` leaves it double here
        self._order += 1
        self.judged.append(_judged(operator, kind, layer, self._order, found, off, exact, bound, point))

    def _add_choice(self, operator: str, kind: str, layer: int | None, found: Any, exact: Any) -> None:
        """Whole numbers that have to be equal, such as positions."""
        self._add_differing(operator, kind, layer, found != exact, found.numel())

    def _add_differing(self, operator: str, kind: str, layer: int | None, differs: Any, num_values: int) -> None:
        if not self._owns(layer) or not bool(differs.any()):
            return
        self._order += 1
        rows = differs.flatten(1).any(1) if differs.dim() > 1 else differs
        self.judged.append(
            Judged(
                operator=operator,
                kind=kind,
                layer=layer,
                order=self._order,
                num_values=num_values,
                error=float(differs.double().mean()),
                largest=1.0,
                ratio=float("inf"),
                token=int(rows.int().argmax()),
                dtype="int64",
            )
        )


def judged(
    operator: str,
    kind: str,
    layer: int | None,
    order: int,
    found: Any,
    exact: Any,
    bound: Any,
    point: Point | None = None,
) -> Judged:
    """Hold numbers [T, ...] against exact ones and the bound of each."""
    import torch

    off = (found if found.dtype == torch.float64 else found.double()) - exact
    return _judged(operator, kind, layer, order, found, off, exact, bound, point)


def _judged(
    operator: str,
    kind: str,
    layer: int | None,
    order: int,
    found: Any,
    off: Any,
    exact: Any,
    bound: Any,
    point: Point | None,
) -> Judged:
    """The same of what was found less exact, float64, which is used up."""
    import torch

    off_TX, exact_TX = off.reshape(len(off), -1), exact.reshape(len(exact), -1)
    off_T = torch.linalg.vector_norm(off_TX, dim=1)
    size_T = torch.linalg.vector_norm(exact_TX, dim=1)
    apart = None
    if not bool((off_T + size_T).isfinite().all()):
        found_TX = found.reshape(off_TX.shape)
        both = found_TX.isfinite() & exact_TX.isfinite()
        apart = found_TX.isfinite() != exact_TX.isfinite()
        off_TX, exact_TX = torch.where(both, off_TX, 0.0), torch.where(both, exact_TX, 0.0)
        off_T, size_T = (torch.linalg.vector_norm(values, dim=1) for values in (off_TX, exact_TX))
    num_columns = off_TX.shape[1]
    bound = torch.as_tensor(bound, dtype=torch.float64, device=off.device)
    bound_TX = bound.expand(exact.shape).reshape(off_TX.shape)
    ratio_TX = off_TX.abs_().div_(bound_TX)
    of_token = ratio_TX.amax(1)
    if bool(of_token.isnan().any()):  # 0 of a bound of 0
        of_token = ratio_TX.nan_to_num_(nan=0.0, posinf=float("inf")).amax(1)
    if apart is not None:
        of_token = torch.where(apart.any(1), float("inf"), of_token)
    token = int(of_token.argmax())
    number = max(off_TX.numel(), 1)
    error, size = (float(torch.linalg.vector_norm(values)) / number**0.5 for values in (off_T, size_T))
    per_token = num_columns**0.5
    relative = (off_T / per_token) / (size_T / per_token).clamp_min(1e-3 * size + 1e-300)
    return Judged(
        operator=operator,
        kind=kind,
        layer=layer,
        order=order,
        num_values=off_TX.numel(),
        error=error / size if size else float(off_T.max()),
        largest=float("inf") if apart is not None and bool(apart.any()) else float(relative.max()),
        ratio=float(of_token[token]),
        token=token,
        dtype=str(found.dtype).removeprefix("torch."),
        point=point,
    )


def _order_of_dimensions(states: Sequence[Any], takes: Sequence[Any]) -> Any:
    """[D] where an execution has each dimension of queries and keys, if it has them in another order than the reference, alike in both.

    Scores do not depend on that order: some rotate pairs of neighbours, and leave them where they are.
    """
    import torch

    if any(taken is None for taken in takes):
        return None
    exact, found = [], []
    for state, taken in zip(states, takes, strict=True):
        exact.append(state[0].transpose(0, 1).flatten(0, 1))
        found.append(taken.double().flatten(0, -2))
        off = exact[-1].shape != found[-1].shape or float((found[-1] - exact[-1]).norm() / exact[-1].norm())
        if off is True or not off > _OTHERWISE:
            return None
    order_D = torch.cdist(torch.cat(exact).mT, torch.cat(found).mT).argmin(1)
    if len(order_D.unique()) < len(order_D):
        return None
    pairs = zip(exact, found, strict=True)
    return order_D if all(float((b[:, order_D] - a).norm() / a.norm()) <= _OTHERWISE for a, b in pairs) else None


def _as_heads_of(found: Any, exact: Any) -> Any:
    """Queries or keys [T, M, D] as [T, N, D], where heads are repeated for the queries of a group; None where they are not, or of other widths."""
    if found.shape == exact.shape:
        return found
    if found.shape[-1] != exact.shape[-1] or found.shape[1] % exact.shape[1]:
        return None
    groups = found.unflatten(1, (exact.shape[1], -1))
    return groups[:, :, 0] if bool((groups == groups[:, :, :1]).all()) else None


def _num_floating(values: Sequence[Any]) -> int:
    return sum(value is not None and value.is_floating_point() for value in values)


def _fits(gives: Sequence[Any], slot: int, value: Any) -> bool:
    """Whether what an execution gave can stand where the reference gives `value`."""
    return slot < len(gives) and gives[slot] is not None and gives[slot].numel() == value.numel()


def _product_of(gradient: Any, error: Any) -> float:
    """The sum of both, number by number; what is not finite adds nothing."""
    if is_heads_first(gradient, error):
        gradient = gradient.transpose(1, 2)
    found = float(gradient.reshape(-1).dot(error.reshape(-1).to(gradient.dtype)))
    return (
        found if np.isfinite(found) else float((gradient.reshape(error.shape) * error).nan_to_num(0.0, 0.0, 0.0).sum())
    )


def _place(windows: Sequence[Window], layer: int) -> int:
    """The number of the window that a layer belongs to."""
    return next((number for number, window in enumerate(windows) if window.has(layer)), 0)


def _handed_on(hidden: Any, *_args: Any, **_kwargs: Any) -> Any:
    return hidden


def _put_back(module: Any, forward: Any) -> None:
    if forward is None:
        module.__dict__.pop("forward")
    else:
        module.forward = forward


def position_of(taps: RowTaps) -> int:
    """The position that an execution gave a row's first token: padding on the left moves it."""
    for name, call in taps.calls.items():
        if name.rpartition(".")[2] in ("rotary_emb", "wpe"):
            for value in call.takes:
                if value is not None and not value.is_floating_point():
                    return int(value.flatten()[0])
    return 0


def layer_of(name: str) -> int | None:
    """The layer that a module's name has a number of."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def kind_of(name: str) -> str:
    """What an operator is, by the last word of its name: q_proj, input_layernorm, act_fn and the like; of a list its name."""
    return re.sub(r"(\.\d+)+$", "", name.partition("#")[0]).rpartition(".")[2]
