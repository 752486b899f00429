"""`tim-trace locate`: find where two executions diverge and what causes the mismatch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from ...schemas.errors import CannotReplay, InvalidOption, TimTraceError
from ...schemas.steps import parse_steps
from ...tracer.located import A, B, Located, LocatedSequence, WeightDifference, limits
from ...tracer.progress import Progress, no_progress
from ...tracer.store import first_line
from ..arm_option import EXACT, VLLM
from ..arms import Arm, parse_arm
from ..backends import trusted
from ..backends.adapters import PREFIX
from ..backends.model import to_torch
from ..batching import check_tokens
from ..hf_scorer import HfScorer
from ..loaded import device_here
from ..recorded import RecordedRow, RecordedRun
from .execution import ExactExecution, Execution, Prepare
from .judged import OF_CODE
from .names import layer_of
from .patches import patched
from .pooled import Pooled, first_divergence
from .reference import Reference
from .sequence import Chosen, SequenceJudge, choose, judge_head
from .taps import RowTaps
from .vllm_execution import VllmExecution
from .windows import Window, bytes_per_token, free_bytes, parts

REFERENCE = "dtype=fp64"
_SAME_FUNCTION = 1e-9
"""Maximum difference in float64 log-probabilities (nats) at which two implementations count as equivalent."""
_SHARE_OF_MEMORY = 0.25
"""Fraction of the free memory that recorded operator values may use."""
_TASKS = 4
_NEAR_VERSIONS = 16
"""Maximum number of policy versions (nearest first) in which to look for the values of a differing tensor."""
_Side = tuple[Arm, RecordedRun, Prepare | None]


def locate(
    trace: str | os.PathLike[str],
    *,
    steps: str = "-1",
    arm: str | Arm | None = None,
    against: str | Arm = REFERENCE,
    sequences: str = "8",
    layers: str | None = None,
    operators: str | None = None,
    patch: str = "kinds",
    model_factory: str | None = None,
    against_factory: str | None = None,
    weights_from: str | os.PathLike[str] | None = None,
    prepare: Prepare | None = None,
    prepare_against: Prepare | None = None,
    tapped_bytes: int | None = None,
    executions: dict[str, Execution] | None = None,
    progress: Progress = no_progress,
) -> Located:
    """Find where two executions of recorded sequences diverge.

    `analysis.locate` adds shares of the mismatch and confidence intervals. `prepare` and `prepare_against` modify a
    side's model after its weights are loaded. That side then counts as user code. `tapped_bytes` limits the memory for
    recorded operator values (default: a quarter of the free memory). The loaded executions are added to `executions`,
    by side.

    Raises CannotReplay, WeightsMissing, DamagedTrace, InvalidOption, TraceNotFound.
    """
    if patch not in ("kinds", "none"):
        raise InvalidOption(f"got {patch!r}; use kinds or none", option="patch")
    run = RecordedRun(trace, weights_from=weights_from)
    _check_class(run)

    def side_of(given: str | Arm | None, factory: str | None, change: Prepare | None) -> _Side:
        own = run if factory is None else RecordedRun(trace, model_factory=factory, weights_from=weights_from)
        return given if isinstance(given, Arm) else parse_arm(given or ""), own, change

    sides = {A: side_of(arm, model_factory, prepare), B: side_of(against, against_factory, prepare_against)}
    asked = parse_steps(steps, run.steps(run.replayed_pass))
    if len(asked) != 1:
        raise InvalidOption(f"{steps!r} selects {len(asked)} steps; select one", option="steps")
    rows = run.step(asked[0])
    check_tokens(rows, run.model["config"])
    chosen = choose(run, asked[0], rows, sequences)
    wanted, named = _layers(layers), _named(operators)
    location = _Location(
        run, asked[0], rows, chosen, sides, wanted, lambda name: wanted(name) and named(name), progress
    )
    if executions is not None:
        executions |= location.executions
    return location.located(patch, limits(layers, operators), tapped_bytes)


def _layers(text: str | None) -> Callable[[str], bool]:
    if text is None:
        return lambda name: True
    try:
        ends = [int(part) if part else None for part in text.split(":")]
        first, last = (ends[0], ends[0]) if len(ends) == 1 else ends
    except ValueError as error:
        raise InvalidOption(f"got {text!r}; pass a layer, or FIRST:LAST", option="layers") from error

    def wanted(name: str) -> bool:
        layer = layer_of(name)
        return layer is None or ((first is None or layer >= first) and (last is None or layer <= last))

    return wanted


def _named(text: str | None) -> Callable[[str], bool]:
    if text is None:
        return lambda name: True
    words = [word.strip().strip(".") for word in text.split(",")]
    if not all(words):
        raise InvalidOption(f"got {text!r}; pass parts of operator names, e.g. q_proj,rotary", option="operators")
    return lambda name: any(f".{word}." in f".{name}." for word in words)


class _Location:
    def __init__(
        self, run: RecordedRun, step: int, rows: list[RecordedRow], chosen: Chosen, sides: Mapping[str, _Side],
        wanted: Callable[[str], bool], is_asked: Callable[[str], bool], progress: Progress,
    ):  # fmt: skip
        self._run, self._step, self._rows, self._chosen, self._progress = run, step, rows, chosen, progress
        self._wanted, self._is_asked = wanted, is_asked
        self._device = device_here()
        self._version = chosen.rows[0].policy_version
        tensors = run.weights.load(self._version, rows[0].attempt)
        self.executions: dict[str, Execution] = {}
        self._doubles: dict[str, Execution] = {}
        """For each side with user code, an execution of that code in float64."""
        contract = run.train_contract(rows[0].contract)
        plain = HfScorer(run, Arm(dtype="fp64", attention="eager"), contract, self._device)
        model = plain.build()
        _check_form(model)
        plain.put(model, tensors)
        # In a trace with adapters, parameter names start with PEFT's prefix. Remove it, because the rebuilt model's
        # names do not have it.
        dtypes = {name.removeprefix(PREFIX): getattr(torch, each.dtype) for name, each in tensors.items()}
        self._reference = Reference(model, dtypes)
        self._free = free_bytes(self._device)  # before the executions allocate memory
        # If either side runs user code, both sides compute logits in the model's own forward method.
        whole = any(own.model_factory is not None or change is not None for _, own, change in sides.values())

        def loaded(arm: Arm, own: RecordedRun, change: Prepare | None) -> Execution:
            kind = {EXACT: ExactExecution, VLLM: VllmExecution}.get(arm.engine, Execution)
            made = kind(own, arm, contract, self._device, change, calls_whole_model=whole)
            stale = arm.weights_version
            made.load(tensors if stale is None else self._run.weights.load(stale, rows[0].attempt))
            made.reference = self._reference
            return made

        for side, (arm, own, change) in sides.items():
            self.executions[side] = loaded(arm, own, change)
            if self.executions[side].is_other_code and arm.dtype != "fp64":
                double = Arm(dtype="fp64", weights_version=arm.weights_version, adapter=arm.adapter)
                self._doubles[side] = loaded(double, own, change)

    def located(self, patch: str, only: str, tapped_bytes: int | None) -> Located:
        rows, executions = self._chosen.rows, self.executions
        pooled = self._pooled(int(self._free * _SHARE_OF_MEMORY) if tapped_bytes is None else tapped_bytes)
        if not pooled.judged:
            kinds = ", ".join(sorted(pooled.kinds))
            raise InvalidOption(
                f"no operator in these layers matches; use one of these kinds: {kinds}", option="operators"
            )
        operators, weights = tuple(pooled.operators()), tuple(self._foreign_weights())
        first = first_divergence(operators, weights, pooled)
        d = {name: pooled.logprobs[B][name] - pooled.logprobs[A][name] for name in pooled.logprobs[A]}
        flat = np.concatenate([d[row.seq_id][row.scored] for row in rows])
        patches = () if patch == "none" or not np.any(flat) else tuple(
            patched(executions, rows, self._rows, pooled, self._wanted, self._is_asked, self._progress)
        )  # fmt: skip
        return Located(
            run=self._run.store.name,
            step=self._step,
            policy_version=self._version,
            device=self._device,
            a=executions[A].arm.name,
            b=executions[B].arm.name,
            sequences=tuple(
                LocatedSequence(
                    seq_id=row.seq_id,
                    group=self._chosen.groups[row.seq_id],
                    num_tokens=int(row.scored.sum()),
                    sum_square=float(np.square(d[row.seq_id][row.scored]).sum()),
                )
                for row in rows
            ),
            chosen=self._chosen.how,
            num_tokens=len(flat),
            mean_abs_d=float(np.abs(flat).mean()) if len(flat) else 0.0,
            max_abs_d=float(np.abs(flat).max(initial=0.0)),
            operators=tuple(sorted(operators, key=lambda each: (each.side, each.order))),
            products=pooled.products,
            weights=weights,
            routers=tuple(sorted(pooled.routers.values(), key=lambda each: (each.layer or 0, each.operator))),
            patches=patches,
            unseen=tuple(sorted(pooled.unseen)),
            unjudged=pooled.unjudged,
            first=first,
            engines=tuple(side for side, each in executions.items() if isinstance(each, VllmExecution)),
            only=only,
        )

    def _pooled(self, tapped_bytes: int) -> Pooled:
        pooled = Pooled(same_in_double=dict.fromkeys(self._doubles, True))
        rows = self._chosen.rows
        per_token = sum(bytes_per_token(each.model) for each in self.executions.values())
        with self._progress("running operators", _TASKS * len(rows)) as advance:
            for part, windows in parts(rows, self._reference.operators, per_token, tapped_bytes):
                heard = {side: self._listen(side, part, windows[-1]) for side in (A, B)}
                advance(len(part))
                for row in part:
                    taps: dict[str, RowTaps] = {}
                    for side, (values, of_part) in heard.items():
                        pooled.logprobs[side][row.seq_id] = values[row.seq_id]
                        taps[side] = of_part.pop(row.seq_id)
                    again = partial(self._taps, row)
                    judge = SequenceJudge(row, self.executions, self._reference, windows, again, taps, pooled)
                    judge.judge(self._is_asked)
                    advance(_TASKS - 1)
                for side in list(pooled.same_in_double):
                    self._judge_in_double(side, part, pooled)
        return pooled

    def _taps(self, row: RecordedRow, window: Window) -> dict[str, RowTaps]:
        return {side: self._listen(side, [row], window)[1][row.seq_id] for side in (A, B)}

    def _listen(
        self, side: str, part: list[RecordedRow], window: Window
    ) -> tuple[dict[str, np.ndarray], dict[str, RowTaps]]:
        execution = self.executions[side]
        try:
            return execution.listen(part, self._rows, lambda name: self._wanted(name) and window.needs(name))
        except OF_CODE as error:
            if isinstance(error, TimTraceError) or not execution.is_other_code:
                raise
            raise CannotReplay(
                f"{side} ({execution.arm.name}): the user code raised {type(error).__name__}: {first_line(error)}; "
                "check that it runs on its own with these batches, or change the batches (padding=packed, batch-size=1)"
            ) from error

    def _judge_in_double(self, side: str, part: list[RecordedRow], pooled: Pooled) -> None:
        execution, reference = self._doubles[side], self._reference
        try:
            values, heard = execution.listen(part, self._rows, self._wanted)
        except OF_CODE as error:  # e.g. it supports only one dtype
            pooled.unjudged[f"{side} in float64"] = f"{type(error).__name__}: {first_line(error)}"
            del pooled.same_in_double[side]
            return
        for row in part:
            taps, own_T = heard[row.seq_id], values[row.seq_id]
            position = taps.first_position
            off_T = np.abs(own_T - reference.logprobs(row, execution.numerics.temperature, position))[row.scored]
            pooled.same_in_double[side] &= bool((off_T <= _SAME_FUNCTION).all())
            judged = reference.judge(row, taps, execution, position).operators
            for each in (*judged, *(each for each, _ in judge_head(execution, reference, row, taps, own_T))):
                if self._is_asked(each.operator):
                    pooled.in_double[side, each.operator].append((row.seq_id, each))

    def _foreign_weights(self) -> Iterator[WeightDifference]:
        recorded = dict(self._reference.model.named_parameters(remove_duplicate=False))
        for side, execution in self.executions.items():
            if execution.is_adapted or self._run.model.get("adapters"):
                continue
            for name, parameter in execution.held():
                if name not in recorded or recorded[name].shape != parameter.shape:
                    continue
                exact = recorded[name].to(parameter.dtype)
                if not bool((parameter == exact).all()):
                    off = (parameter.double() - exact.double()).abs()
                    yield WeightDifference(
                        side=side, tensor=name, layer=layer_of(name), largest=float(off.max()),
                        version=None if execution.arm.quantize else self._version_of(name, parameter),
                        share=float((off > 0).double().mean()),
                    )  # fmt: skip

    def _version_of(self, name: str, parameter: Any) -> int | None:
        versions = sorted(self._run.weights.versions, key=lambda version: abs(version - self._version))
        for version in versions[:_NEAR_VERSIONS]:
            tensor = self._run.weights.load(version, self._rows[0].attempt).get(name)
            if tensor is not None and bool((to_torch(tensor).to(parameter.dtype) == parameter.cpu()).all()):
                return version
        return None


def _check_class(run: RecordedRun) -> None:
    name = str(run.model.get("class", ""))
    try:
        trusted.model_class(name)
    except CannotReplay as error:
        raise CannotReplay(
            f"{run.store.url}: the recorded class {name!r:.80} is not a language model in the installed transformers. "
            "locate needs it as the float64 reference, and a model factory cannot replace it"
        ) from error


def _check_form(model: Any) -> None:
    needs = ("base_model", "get_input_embeddings", "get_output_embeddings")
    missing = [name for name in needs if not hasattr(model, name)]
    if not missing and model.get_output_embeddings() is None:
        missing = ["module that computes logits"]
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        missing.append("transformers config")
    if missing:
        raise CannotReplay(
            f"{type(model).__name__} is not structured like a transformers model: it has no {', no '.join(missing)}, "
            "so its operators cannot be observed; derive it from transformers' PreTrainedModel"
        )
