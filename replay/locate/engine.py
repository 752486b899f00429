"""`tim-trace locate`: where two executions of recorded sequences part, and which operators carry the gap."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np

from ...schemas.checksums import short_hash, whole_hash
from ...schemas.contract import canonical_json
from ...schemas.errors import CannotReplay, InvalidOption, TimTraceError
from ...schemas.steps import parse_steps
from ...tracer import environment
from ...tracer.located.results import (
    ROUTES,
    A,
    B,
    CarriedError,
    Divergence,
    Located,
    LocatedSequence,
    OperatorError,
    PatchedSequence,
    Router,
    WeightDifference,
    only,
)  # fmt: skip
from ...tracer.progress import Progress, no_progress
from ...tracer.store import first_line
from ...tracer.weights.reader import Tensor
from ..arms import Arm, parse_arm
from ..backends.adapters import PREFIX
from ..batching import check_tokens
from ..hf_scorer import HfScorer
from ..recorded import RecordedRow, RecordedRun
from .chosen import Chosen, choose
from .exact_execution import EXACT, ExactExecution
from .execution import Execution, Prepare
from .head import Head, judge_head
from .judged_sequence import Apart, JudgedSequence
from .reference import EVERY_LAYER, Judged, Judgement, Point, Reference, Window, kind_of, layer_of, position_of
from .routes import choices, score_with
from .taps import RowTaps
from .unfinished import Unfinished
from .vllm_execution import VLLM, AnyExecution, VllmExecution
from .vllm_grafts import AnyGraft, can_patch, graft_of

REFERENCE = "dtype=fp64"
CODE_DIFFERS = 4e-6
"""A token's error, relative, from which code that runs in float64 computes something else; float32 inside of it stays below."""
_SAME_FUNCTION = 1e-9
"""Nats by which log-probabilities of two codes in float64 may differ that compute the same function."""
_IS_OTHER_TENSOR = 0.5
"""Share of a tensor's numbers that differ where it is another one, not a part of it."""
_UNDONE = "gives other numbers than the recorded model's, which are undone further on: in float64 this code gives the same log-probabilities"
LAYER_STEPS = 8
"""Points at which layers are replaced from the front on."""
_LAST = 1 << 40
"""The place of the head among operators: behind all layers."""
_SHARE_OF_MEMORY = 0.25
"""Of what is free: what the numbers of operators may take."""
_SHARE_TO_GO_ON = 0.5
"""The same of a question that was interrupted, which needs the part that it had."""
_UNKNOWN_FREE = 8 << 30
_OF_CODE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What code of the user's may end with where it meets dtypes, batches or surroundings that it does not know."""
CARRIED = "what operators carry of the gap"
_TASKS = 4
"""Of a sequence: both executions, what lies behind each, what both carry."""
_NEAR_VERSIONS = 8
"""Recorded versions that a foreign tensor is looked for in, on either side of the step's."""


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
    unfinished: Unfinished | None = None,
    progress: Progress = no_progress,
) -> Located:
    """Run sequences of a recorded step through two executions, and say where they part and what carries the gap.

    `arm` is the one that is asked about (by default as recorded), `against` the one that it is held against (by default the
    recorded model in float64): arms as `replay` takes them, of transformers or the exact engine in one forward a row, or of vLLM. `steps` names one step. `sequences` are how
    many (the ones where trainer and engine lie farthest apart, where both were recorded), `random:N`, or names with commas.

    Of each operator: what it took and gave is held against a float64 model on the same inputs, so that an error which came
    before does not count, in units of the bound of what rounding can do (module `bounds`). The first one beyond its bound is the
    divergence. `layers` (3 or 2:8) looks at these alone, and `operators` at those that have one of some words in their names
    (`self_attn.q_proj,rotary`): of these alone errors are judged, carried and patched.

    `patch`: `kinds` computes the operators of a kind in `against` by the code of `arm`, on their own inputs, and back; `layers`
    all operators of the layers from the front on; `all` both; `none` neither. What is left of the gap says what they carry.

    `model_factory` and `against_factory`, as `module:function`, build the model of either side by the user's code; from
    Python `prepare` and `prepare_against` change a model that transformers built, once its weights are loaded. Such a side runs once
    more in float64: a difference of its code shows there that rounding hides.

    `tapped_bytes` is what the numbers of operators may take in memory, by default a quarter of what is free: layers that do not
    fit beside each other are listened to in turns.

    `unfinished` keeps what is done, so that the same question goes on from there when it was interrupted; it is left for the
    caller to remove. Where a side's code is the user's it is not used: the code may be another one since.

    Nothing else is written. Raises CannotReplay, WeightsMissing, DamagedTrace, InvalidOption, TraceNotFound.
    """
    if patch not in ("kinds", "layers", "all", "none"):
        raise InvalidOption(f"got {patch!r}; use kinds, layers, all or none", option="patch")
    arms = {A: _arm(arm), B: _arm(against)}
    run = RecordedRun(trace, weights_from=weights_from)
    sides = {A: (model_factory, prepare), B: (against_factory, prepare_against)}
    runs = {
        side: run if factory is None else RecordedRun(trace, model_factory=factory, weights_from=weights_from)
        for side, (factory, _) in sides.items()
    }
    asked = parse_steps(steps, run.steps(run.replayed_pass))
    if len(asked) != 1:
        raise InvalidOption(f"{steps!r} names {len(asked)} steps; name one", option="steps")
    rows = run.step(asked[0])
    check_tokens(rows, run.model["config"])
    chosen = choose(run, asked[0], rows, sequences)
    if any(factory is not None or change is not None for factory, change in sides.values()):
        unfinished = None
    location = _Location(
        run, runs, arms, sides, asked[0], rows, chosen, layers, operators, tapped_bytes, unfinished, progress
    )
    return location.found(patch)


def _arm(given: str | Arm | None) -> Arm:
    return given if isinstance(given, Arm) else Arm() if given is None else parse_arm(given)


def _layers(text: str | None) -> Callable[[str], bool]:
    """Which operators are looked at, by the layer in their names."""
    if text is None:
        return lambda name: True
    try:
        ends = [int(part) if part else None for part in text.split(":")]
        first, last = (ends[0], ends[0]) if len(ends) == 1 else ends
    except ValueError as error:
        raise InvalidOption(f"got {text!r}; write a layer, or FIRST:LAST", option="layers") from error

    def wanted(name: str) -> bool:
        layer = layer_of(name)
        return layer is None or ((first is None or layer >= first) and (last is None or layer <= last))

    return wanted


def _named(text: str | None) -> Callable[[str], bool]:
    """Which operators are looked at, by words of their names: whole ones between dots, or several of them."""
    if text is None:
        return lambda name: True
    words = [word.strip().strip(".") for word in text.split(",")]
    if not all(words):
        raise InvalidOption(f"got {text!r}; write words of names with commas, as q_proj,rotary", option="operators")
    return lambda name: any(f".{word}." in f".{name}." for word in words)


@dataclass(slots=True)
class _PooledOperator:
    """What one operator of one side introduced, over rows."""

    judged: list[tuple[str, Judged]] = field(default_factory=list)
    inherited: list[Apart] = field(default_factory=list)
    difference: list[Apart] = field(default_factory=list)


@dataclass(slots=True)
class _InDouble:
    """What one operator of a side's code introduced in float64, over rows."""

    largest: float = 0.0
    orders: list[int] = field(default_factory=list)
    """Where it computes something else."""

    def add(self, each: Judged) -> None:
        """Add what was found of a row, at one place."""
        self.largest = max(self.largest, each.largest)
        if each.largest > CODE_DIFFERS:
            self.orders.append(each.order)


@dataclass(slots=True)
class _Pooled:
    """What was found of all sequences."""

    operators: dict[tuple[str, str], _PooledOperator] = field(default_factory=lambda: defaultdict(_PooledOperator))
    """By side and operator."""
    logprobs: dict[str, dict[str, np.ndarray]] = field(default_factory=lambda: {A: {}, B: {}})
    """Side -> sequence -> [T] nats."""
    carried: list[CarriedError] = field(default_factory=list)
    routers: dict[str, Router] = field(default_factory=dict)
    unseen: set[str] = field(default_factory=set)
    unjudged: dict[str, str] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    """Of all operators that could be judged."""
    are_whole: bool = True
    """Whether the engines took every sequence in one forward."""

    def add(self, found: JudgedSequence) -> None:
        """Add a sequence's."""
        for side in (A, B):
            self.logprobs[side][found.seq_id] = found.values(side)
        for side, each in found.judged:
            self.operators[side, each.operator].judged.append((found.seq_id, each))
        for (_side, name), operator in self.operators.items():
            if name in found.apart:
                operator.inherited.append(found.apart[name][0])
                operator.difference.append(found.apart[name][1])
        for router in found.routers:
            known = self.routers.get(router.operator)
            self.routers[router.operator] = router if known is None else _both(known, router)
        self.carried += found.carried
        self.unseen |= found.unseen
        self.unjudged |= found.unjudged
        self.kinds |= found.kinds
        self.are_whole &= found.is_whole


def _both(a: Router, b: Router) -> Router:
    """A router over the tokens of two sequences."""
    return replace(
        a,
        num_tokens=a.num_tokens + b.num_tokens,
        num_flipped=a.num_flipped + b.num_flipped,
        margin=max((each for each in (a.margin, b.margin) if each is not None), default=None),
    )


class _Location:
    """The work of one question."""

    def __init__(
        self,
        run: RecordedRun,
        runs: Mapping[str, RecordedRun],
        arms: Mapping[str, Arm],
        sides: Mapping[str, tuple[str | None, Prepare | None]],
        step: int,
        rows: list[RecordedRow],
        chosen: Chosen,
        layers: str | None,
        operators: str | None,
        tapped_bytes: int | None,
        unfinished: Unfinished | None,
        progress: Progress,
    ):
        import torch

        self.run, self.step, self.rows, self.chosen, self.progress = run, step, rows, chosen, progress
        self.only = only(layers, operators)
        wanted, named = _layers(layers), _named(operators)
        self.wanted = wanted
        """Of a name, whether its layer is looked at: then it is listened to, since others are judged by it."""
        self.asked: Callable[[str], bool] = lambda name: wanted(name) and named(name)
        """Whether the operator is judged, and patched."""
        self.arms = arms
        self.device = device = "cuda" if torch.cuda.is_available() else "cpu"
        contract = run.train_contract(rows[0].contract)
        versions = {row.policy_version for row in chosen.rows}
        if len(versions) != 1:
            raise CannotReplay(
                f"{run.store.url}: the chosen sequences have {len(versions)} policy versions; choose of one"
            )
        self.version = versions.pop()
        self.tensors = run.weights.load(self.version, rows[0].attempt)
        plain = HfScorer(run, Arm(dtype="fp64", attention="eager"), contract, device)
        model = plain.build()
        _check_form(model)
        plain.put(model, self.tensors)
        # A trace of a model with adapters has PEFT's names, which the rebuilt one has not.
        dtypes = {name.removeprefix(PREFIX): _dtype(tensor.dtype) for name, tensor in self.tensors.items()}
        self.reference = Reference(model, dtypes)
        free = _free_bytes(device)
        self.tapped_bytes = int(free * _SHARE_OF_MEMORY) if tapped_bytes is None else tapped_bytes
        self.executions: dict[str, AnyExecution] = {}
        self.doubles: dict[str, Execution] = {}
        # Where one side's code is the user's, both give logits by the model's own forward, head and all.
        whole = any(factory is not None or prepare is not None for factory, prepare in sides.values())

        def transformers(side: str, arm: Arm) -> Execution:
            kind = ExactExecution if arm.engine == EXACT else Execution
            made = kind(runs[side], arm, contract, device, sides[side][1], calls_whole_model=whole)
            made.load(self._tensors(arm))
            made.reference = self.reference
            return made

        for side, arm in arms.items():
            if arm.engine == VLLM:
                engine = VllmExecution(runs[side], arm, contract, device, sides[side][1])
                engine.load(self._tensors(arm))
                self.executions[side] = engine
                continue
            self.executions[side] = transformers(side, arm)
            if self.executions[side].is_other_code and arm.dtype != "fp64":
                double = Arm(dtype="fp64", weights_version=arm.weights_version, adapter=arm.adapter)
                self.doubles[side] = transformers(side, double)
        self.unfinished = unfinished
        self.numbers = {row.seq_id: number for number, row in enumerate(chosen.rows)}
        if unfinished is not None:
            most = int(free * _SHARE_TO_GO_ON) if tapped_bytes is None else tapped_bytes
            self.tapped_bytes = unfinished.begin(step, self._deciding(), self.tapped_bytes, most)

    def _deciding(self) -> dict[str, Any]:
        """All that decides the bits of what is found, beside the question."""
        return {
            "executions": {side: execution.made_by() for side, execution in self.executions.items()},
            "torch": environment.torch_settings(),
            "device": environment.device_name(self.device),
            "versions": environment.numeric_versions(),
            "model": self.run.model,
            "weights": {
                name: _bits(tensors)
                for name, tensors in (("step", self.tensors), *((side, self._tensors(arm)) for side, arm in self.arms.items()))
            },
            "rows": [_row_bits(row) for row in self.rows],
            "chosen": [(row.seq_id, self.chosen.groups[row.seq_id]) for row in self.chosen.rows],
            "how": self.chosen.how,
        }  # fmt: skip

    def _tensors(self, arm: Arm) -> Any:
        if arm.weights_version is None:
            return self.tensors
        return self.run.weights.load(arm.weights_version, self.rows[0].attempt)

    def found(self, patch: str) -> Located:
        """Everything that was asked for."""
        pooled = _Pooled()
        doubles: dict[tuple[str, str], _InDouble] = defaultdict(_InDouble)
        hidden: dict[tuple[str, str], _PooledOperator] = defaultdict(_PooledOperator)
        same = {side: True for side in self.doubles}
        """Side -> whether its code gives the recorded model's log-probabilities, both in float64."""
        done = self._done()
        told = f", {len(done)} of {len(self.chosen.rows)} sequences done before" if done else ""
        with self.progress(f"running operators{told}", _TASKS * len(self.chosen.rows)) as advance:
            for part, windows in self._parts():
                logprobs: dict[str, dict[str, np.ndarray]] = {A: {}, B: {}}
                taps: dict[str, dict[str, RowTaps]] = {}
                if any(row.seq_id not in done for row in part):
                    taps = {side: self._listen(side, part, windows[-1], logprobs) for side in (A, B)}
                advance(len(part))
                for row in part:
                    heard = {side: found.pop(row.seq_id) for side, found in taps.items()}
                    found = done.get(row.seq_id)
                    if found is None:
                        found = self._judged(row, heard, windows, logprobs)
                        if self.unfinished is not None:
                            self.unfinished.add_sequence(self.numbers[row.seq_id], found)
                    pooled.add(found)
                    advance(_TASKS - 1)
                for side, execution in list(self.doubles.items()):
                    try:
                        values, double = execution.listen(part, self.rows, self.wanted)
                    except _OF_CODE as error:  # such as code that knows one dtype alone
                        pooled.unjudged[f"{side} in float64"] = f"{type(error).__name__}: {first_line(error)}"
                        del self.doubles[side]
                        continue
                    for row in part:
                        exact_T = self.reference.logprobs(
                            row, execution.numerics.temperature, position_of(double[row.seq_id])
                        )
                        off_T = np.abs(values[row.seq_id] - exact_T)[row.scored]
                        same[side] &= bool((off_T <= _SAME_FUNCTION).all())
                        judgement = self._judge(execution, row, double[row.seq_id], None, EVERY_LAYER)
                        head = judge_head(execution, self.reference, row, double[row.seq_id], values[row.seq_id], _LAST)
                        for each in (*judgement.operators, *(each for each, _ in head)):
                            if not self.asked(each.operator):
                                continue
                            key = side, each.operator
                            doubles[key].add(each)
                            if key not in pooled.operators and each.largest > CODE_DIFFERS:  # seen in float64 alone
                                hidden[key].judged.append((row.seq_id, replace(each, ratio=0.0)))
        if not pooled.operators:
            kinds = ", ".join(sorted(pooled.kinds))
            raise InvalidOption(
                f"no operator that is looked at has such a name; their kinds are: {kinds}", option="operators"
            )
        pooled.operators |= hidden
        weights = tuple(self._weights())
        operators = tuple(_pooled(side, name, each, doubles) for (side, name), each in pooled.operators.items())
        undone = {side for side in self.doubles if same[side]}
        undone_operators = [
            each for each in operators if each.side in undone and (each.in_double or 0.0) > CODE_DIFFERS
        ]
        pooled.unjudged |= {f"{each.side} {each.operator}": _UNDONE for each in undone_operators}
        named = [each for each in operators if each not in undone_operators]
        counting = [each for each in weights if not (each.side in undone and each.share > _IS_OTHER_TENSOR)]
        d = {name: pooled.logprobs[B][name] - pooled.logprobs[A][name] for name in pooled.logprobs[A]}
        flat = np.concatenate([d[row.seq_id][row.scored] for row in self.chosen.rows])
        return Located(
            run=self.run.store.name,
            step=self.step,
            policy_version=self.version,
            device=self.device,
            a=self.arms[A].name,
            b=self.arms[B].name,
            sequences=tuple(self._sequence(row, d[row.seq_id]) for row in self.chosen.rows),
            chosen=self.chosen.how,
            num_tokens=len(flat),
            mean_abs_d=float(np.abs(flat).mean()) if len(flat) else 0.0,
            max_abs_d=float(np.abs(flat).max(initial=0.0)),
            operators=tuple(sorted(operators, key=lambda each: (each.side, each.order))),
            carried=tuple(pooled.carried),
            weights=weights,
            routers=tuple(sorted(pooled.routers.values(), key=lambda each: (each.layer or 0, each.operator))),
            patches=tuple(self._patched(patch, pooled)) if patch != "none" and np.any(flat) else (),
            unseen=tuple(sorted(pooled.unseen)),
            unjudged=pooled.unjudged,
            first=_first(named, counting),
            engines=tuple(side for side, each in self.executions.items() if isinstance(each, VllmExecution)),
            only=self.only,
        )

    def _sequence(self, row: RecordedRow, d_T: np.ndarray) -> LocatedSequence:
        return LocatedSequence(
            seq_id=row.seq_id,
            group=self.chosen.groups[row.seq_id],
            num_tokens=int(row.scored.sum()),
            sum_square=float(np.square(d_T[row.scored]).sum()),
        )

    def _parts(self) -> Iterator[tuple[list[RecordedRow], list[Window]]]:
        """Chosen sequences whose operators' numbers fit into memory together, those of one forward side by side.

        Where those of one sequence do not, beside it the layers whose do: windows of them, that are listened to in turns.
        """
        per_token = sum(_tapped_values(each.config) * each.itemsize for each in self.executions.values())
        most = self.tapped_bytes
        part: list[RecordedRow] = []
        for row in sorted(self.chosen.rows, key=lambda row: (row.writer, row.forward_id)):
            if part and sum(each.num_tokens for each in (*part, row)) * per_token > most:
                yield part, self._windows(math.ceil(sum(each.num_tokens for each in part) * per_token / most))
                part = []
            part.append(row)
        if part:
            yield part, self._windows(math.ceil(sum(each.num_tokens for each in part) * per_token / most))

    def _windows(self, number: int) -> list[Window]:
        layers = sorted({layer for name in self.reference.operators if (layer := layer_of(name)) is not None})
        number = min(number, len(layers))
        if number <= 1 or layers != list(range(len(layers))):
            return [EVERY_LAYER]
        ends = np.linspace(0, len(layers), number + 1).astype(int).tolist()
        return [
            Window(first=first, last=end - 1, is_first=first == 0, is_last=end == len(layers))
            for first, end in pairwise(ends)
        ]

    def _listen(
        self, side: str, part: list[RecordedRow], window: Window, logprobs: dict[str, dict[str, np.ndarray]]
    ) -> dict[str, RowTaps]:
        execution = self.executions[side]
        try:
            values, taps = execution.listen(part, self.rows, lambda name: self.wanted(name) and window.needs(name))
        except _OF_CODE as error:
            if isinstance(error, TimTraceError) or not execution.is_other_code:
                raise
            raise CannotReplay(
                f"{side} ({self.arms[side].name}): the code of this side ended with {type(error).__name__}: {first_line(error)}; "
                "run it by itself in these batches, or choose others (padding=packed, batch-size=1)"
            ) from error
        logprobs[side] |= values
        return taps

    def _done(self) -> dict[str, JudgedSequence]:
        """The sequences that were judged before the question was interrupted."""
        if self.unfinished is None:
            return {}
        known = (self.unfinished.sequence(number, name) for name, number in self.numbers.items())
        return {found.seq_id: found for found in known if found is not None}

    def _judged(
        self,
        row: RecordedRow,
        heard: dict[str, RowTaps],
        windows: list[Window],
        logprobs: dict[str, dict[str, np.ndarray]],
    ) -> JudgedSequence:
        """A row's operators, and what each carries of its gap."""
        result = JudgedSequence(seq_id=row.seq_id)
        positions = {side: position_of(taps) for side, taps in heard.items()}
        judged: dict[tuple[str, Window], Judgement] = {}
        heads: dict[str, Head] = {}

        def judge(sides: list[str], window: Window) -> list[dict[Point, Any]]:
            taps = heard
            if any(side not in heard for side in sides) or window is not windows[-1]:
                taps = {side: self._listen(side, [row], window, logprobs)[row.seq_id] for side in (A, B)}
            if not any(of is window for _, of in judged):
                _set_apart(result, taps[A], taps[B])
            for side in sides:
                judgement = self._judge(self.executions[side], row, taps[side], positions[side], window)
                if window is windows[-1]:
                    heads[side] = self._head(side, row, taps[side], logprobs)
                judged[side, window] = judgement
                result.unjudged |= {f"{side} {name}": why for name, why in judgement.unjudged.items()}
                del taps[side]
            return [judged[side, window].errors for side in sides]

        d_T = np.where(row.scored, logprobs[B][row.seq_id] - logprobs[A][row.seq_id], 0.0)
        temperature = self.executions[A].numerics.temperature
        for position in sorted(set(positions.values())):
            sides = [side for side in (A, B) if positions[side] == position]

            def errors_of(window: Window, sides: list[str] = sides) -> list[dict[Point, Any]]:
                return judge(sides, window)

            products: list[dict[Point, float]] = [{} for _ in sides]
            if d_T.any():
                try:
                    products = self.reference.carried(row, d_T, temperature, position, windows, errors_of)
                except _OF_CODE as error:  # such as code that autograd cannot follow
                    result.unjudged[CARRIED] = f"{type(error).__name__}: {first_line(error)}"
            for window in reversed(windows):
                if left := [side for side in sides if (side, window) not in judged]:
                    judge(left, window)
            for side, own in zip(sides, products, strict=True):
                for each in (each for window in windows for each in judged[side, window].operators):
                    result.kinds.add(each.kind)
                    if self.asked(each.operator):
                        result.judged.append((side, each))
                        if each.point in own:
                            result.carried.append(_carried(side, each, row, own[each.point]))
                for each, own_T in heads[side]:
                    result.kinds.add(each.kind)
                    if not self.asked(each.operator):
                        continue
                    result.judged.append((side, each))
                    result.carried.append(_carried(side, each, row, float((d_T * np.nan_to_num(own_T)).sum())))
        result.logprobs = {side: logprobs[side][row.seq_id].tolist() for side in (A, B)}
        engines = [each for each in self.executions.values() if isinstance(each, VllmExecution)]
        result.is_whole = all(each.takes_whole_rows for each in engines)
        return result

    def _judge(
        self, execution: AnyExecution, row: RecordedRow, taps: RowTaps, first_position: int | None, window: Window
    ) -> Judgement:
        return self.reference.judge(
            row, taps, execution.weight_dtypes, rounds_scores=execution.rounds_scores,
            attention_cut=execution.attention_cut, coarsest=execution.coarsest, first_position=first_position, window=window,
        )  # fmt: skip

    def _head(
        self, side: str, row: RecordedRow, taps: RowTaps, logprobs: Mapping[str, Mapping[str, np.ndarray]]
    ) -> Head:
        return judge_head(self.executions[side], self.reference, row, taps, logprobs[side][row.seq_id], _LAST)

    def _weights(self) -> Iterator[WeightDifference]:
        """Tensors of either side that are not the recorded ones."""
        recorded = dict(self.reference.model.named_parameters(remove_duplicate=False))
        for side, execution in self.executions.items():
            if execution.is_adapted or self.run.model.get("adapters"):
                continue
            for name, parameter in execution.held():
                if name in recorded and recorded[name].shape == parameter.shape:
                    exact = recorded[name]
                    if not bool((parameter == exact.to(parameter.dtype)).all()):
                        off = (parameter.double() - exact.to(parameter.dtype).double()).abs()
                        version = None if execution.arm.quantize else self._version_of(name, parameter)
                        yield WeightDifference(
                            side=side,
                            tensor=name,
                            layer=layer_of(name),
                            largest=float(off.max()),
                            version=version,
                            share=float((off > 0).double().mean()),
                        )

    def _version_of(self, name: str, parameter: Any) -> int | None:
        """The recorded version, near the step's, that a tensor is of."""
        from ..backends.model import to_torch

        near = sorted(self.run.weights.versions, key=lambda version: abs(version - self.version))[: 2 * _NEAR_VERSIONS]
        for version in near:
            tensor = self.run.weights.load(version, self.rows[0].attempt).get(name)
            if tensor is not None and bool((to_torch(tensor).to(parameter.dtype) == parameter.cpu()).all()):
                return version
        return None

    def _patched(self, patch: str, pooled: _Pooled) -> Iterator[PatchedSequence]:
        if not pooled.are_whole:  # an engine that is asked again after it was interrupted has run nothing yet
            for engine in self.executions.values():
                if isinstance(engine, VllmExecution):
                    engine.takes_whole_rows = False
        grafts = {
            side: graft_of(self.executions[side], self.executions[other])
            for side, other in ((B, A), (A, B))
            if can_patch(self.executions[side], self.executions[other])
        }
        flipped = sum(each.num_flipped > 0 for each in pooled.routers.values())
        routes: list[tuple[str, frozenset[str] | None]] = [(ROUTES, None)] if flipped else []
        plans = {side: [*self._plans(patch, graft), *routes] for side, graft in grafts.items()}
        done = {
            (side, number): found
            for side, own in plans.items()
            for number in range(len(own) if self.unfinished is not None else 0)
            if self.unfinished is not None and (found := self.unfinished.patch(side, number)) is not None
        }
        total = sum(map(len, plans.values()))
        told = f", {len(done)} of {total} done before" if done else ""
        with self.progress(f"patching operators{told}", total) as advance:
            for side, graft in grafts.items():
                other = A if side == B else B
                for number, (name, operators) in enumerate(plans[side]):
                    found = done.get((side, number))
                    if found is None:
                        try:
                            if operators is None:
                                scored = self._routed(self.executions[side], self.executions[other])
                            else:
                                scored = graft.score(operators, self.chosen.rows, self.rows)
                        except _OF_CODE as error:
                            if not any(each.is_other_code for each in self.executions.values()):
                                raise
                            pooled.unjudged[f"patch {name} in {side}"] = f"{type(error).__name__}: {first_line(error)}"
                            advance(1)
                            continue
                        changed = flipped if operators is None else len(operators)
                        found = tuple(self._left(name, side, changed, scored, pooled.logprobs[other]))
                        if self.unfinished is not None:
                            self.unfinished.add_patch(side, number, found)
                    yield from found
                    advance(1)

    def _routed(self, taker: AnyExecution, giver: AnyExecution) -> dict[str, np.ndarray]:
        return score_with(taker, choices(giver, self.chosen.rows, self.rows, self.wanted), self.chosen.rows, self.rows)

    def _left(
        self, name: str, side: str, number: int, scored: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]
    ) -> Iterator[PatchedSequence]:
        """What is left of each sequence's gap."""
        for row in self.chosen.rows:
            left = (scored[row.seq_id] - other[row.seq_id])[row.scored]
            yield PatchedSequence(
                name=name,
                taker=side,
                num_operators=number,
                seq_id=row.seq_id,
                sum_square_left=float(np.square(left).sum()),
            )

    def _plans(self, patch: str, graft: AnyGraft) -> Iterator[tuple[str, frozenset[str]]]:
        """Names of what is put in together."""
        names = [name for name in graft.names(self.chosen.rows, self.rows) if self.asked(name)]
        if patch in ("kinds", "all"):
            kinds: dict[str, list[str]] = defaultdict(list)
            for name in names:
                kinds[kind_of(name)].append(name)
            for kind, members in kinds.items():
                yield kind, frozenset(members)
        if patch in ("layers", "all"):
            layers = sorted({layer for name in names if (layer := layer_of(name)) is not None})
            ends = (
                sorted({layers[round(i * (len(layers) - 1) / LAYER_STEPS)] for i in range(LAYER_STEPS + 1)})
                if layers
                else []
            )
            for end in ends:
                part = frozenset(name for name in names if (layer := layer_of(name)) is not None and layer <= end)
                yield f"layers 0 to {end}", part
        yield "all operators", frozenset(names)


def _check_form(model: Any) -> None:
    """Raises CannotReplay for a model of which the float64 one cannot be listened to."""
    needs = ("base_model", "get_input_embeddings", "get_output_embeddings")
    missing = [name for name in needs if not hasattr(model, name)]
    if not missing and model.get_output_embeddings() is None:
        missing = ["a module that gives logits"]
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        missing.append("a config of transformers")
    if missing:
        raise CannotReplay(
            f"{type(model).__name__} is no model of transformers' form: it has no {', no '.join(missing)}; its operators cannot be "
            "seen. Derive it from transformers' PreTrainedModel, or hold dumps of both sides against each other: tim-trace locate --from-dumps A B"
        )


def _carried(side: str, each: Judged, row: RecordedRow, product: float) -> CarriedError:
    sign = 1.0 if side == B else -1.0
    return CarriedError(
        side=side, operator=each.operator, kind=each.kind, layer=each.layer, seq_id=row.seq_id, product=sign * product
    )


def _set_apart(result: JudgedSequence, a: RowTaps, b: RowTaps) -> None:
    """Note how far apart both executions are before and behind each operator, and count routes that flip."""
    result.unseen |= _unseen(a, b)
    for name, ours in a.calls.items():
        if (theirs := b.calls.get(name)) is not None:
            result.routers += _routers(name, ours.gives, theirs.gives)
            result.apart[name] = _apart(ours.takes, theirs.takes), _apart(ours.gives, theirs.gives)


def _routers(name: str, ours: Sequence[Any], theirs: Sequence[Any]) -> Iterator[Router]:
    """For how many tokens the two executions choose other experts, where this is a router."""
    for a, b in zip(ours, theirs, strict=False):
        if a is not None and b is not None and not a.is_floating_point() and a.shape == b.shape and a.dim() == 2:
            flipped_T = (a.sort(-1).values != b.sort(-1).values).any(-1)
            yield Router(
                operator=name,
                layer=layer_of(name),
                num_tokens=len(a),
                num_flipped=int(flipped_T.sum()),
                margin=_margin(ours, a, flipped_T),
            )


def _tapped_values(config: Any) -> int:
    """About how many numbers operators take and give, a token."""
    text = config.get_text_config()
    hidden = getattr(text, "hidden_size", 1024)
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    return int(getattr(text, "num_hidden_layers", 32) * (12 * hidden + 4 * inner))


def _free_bytes(device: str) -> int:
    """Memory that nobody uses; _UNKNOWN_FREE where the system does not say."""
    import torch

    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return _UNKNOWN_FREE


def _bits(tensors: Mapping[str, Tensor]) -> str:
    """A hash of weights: names, dtypes, shapes and bits."""
    return short_hash(canonical_json([
        (name, tensors[name].dtype, tensors[name].bits.shape, whole_hash(np.ascontiguousarray(tensors[name].bits).data))
        for name in sorted(tensors)
    ]).encode())  # fmt: skip


def _row_bits(row: RecordedRow) -> list[str]:
    """A recorded row: its arrays as hashes, the rest as text."""
    values = (getattr(row, each.name) for each in fields(row))
    return [
        whole_hash(np.ascontiguousarray(value).data) if isinstance(value, np.ndarray) else str(value)
        for value in values
    ]


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _margin(gives: Sequence[Any], ids: Any, flipped_T: Any) -> float | None:
    """The largest distance, over flipped tokens, of the lowest score that was chosen to the highest that was not."""
    import torch

    wide = [each for each in gives if each is not None and each.is_floating_point() and each.shape[-1] > ids.shape[-1]]
    if not wide or not bool(flipped_T.any()):
        return None
    scores, chosen = wide[0][flipped_T].double(), ids[flipped_T].long()
    rest = scores.scatter(-1, chosen, -torch.inf).amax(-1)
    margins = scores.gather(-1, chosen).amin(-1) - rest
    return float(margins.max()) if bool((margins >= 0).all()) else None


def _apart(a: Sequence[Any], b: Sequence[Any]) -> Apart:
    """Of the first floating tensors of both."""
    for ours, theirs in zip(a, b, strict=False):
        if ours is None or theirs is None or not ours.is_floating_point() or ours.numel() != theirs.numel():
            continue
        exact = ours.double()
        off = (theirs.double().reshape(ours.shape) - exact).flatten()
        return float(off.dot(off)), float(exact.flatten().dot(exact.flatten()))
    return float("nan"), float("nan")


def _relative(parts: list[tuple[float, float]]) -> float | None:
    off, size = (sum(part[i] for part in parts) for i in range(2))
    return None if not parts or np.isnan(off) else float(np.sqrt(off / size)) if size else 0.0


def _pooled(
    side: str, name: str, found: _PooledOperator, doubles: Mapping[tuple[str, str], _InDouble]
) -> OperatorError:
    in_double = doubles.get((side, name))
    seq_id, worst = max(found.judged, key=lambda item: item[1].ratio)
    number = sum(each.num_values for _, each in found.judged)
    square = sum(each.num_values * each.error**2 for _, each in found.judged)
    # A residual stream is judged at two places of a layer: it stands where it is wrong.
    beyond = [each.order for _, each in found.judged if each.ratio > 1.0] or (
        [] if in_double is None else in_double.orders
    )
    return OperatorError(
        side=side,
        order=min(beyond or [each.order for _, each in found.judged]),
        operator=name,
        kind=worst.kind,
        layer=worst.layer,
        dtype=worst.dtype,
        num_values=number,
        introduced=float(np.sqrt(square / max(number, 1))),
        ratio=worst.ratio,
        seq_id=seq_id,
        token=worst.token,
        inherited=_relative(found.inherited),
        difference=_relative(found.difference),
        in_double=None if in_double is None else in_double.largest,
    )


def _unseen(a: RowTaps, b: RowTaps) -> set[str]:
    """Operators that one execution alone has."""
    return {kind_of(name) for name in set(a.calls) ^ set(b.calls)}


def _first(operators: Sequence[OperatorError], weights: Sequence[WeightDifference]) -> Divergence | None:
    """The first operator in the order of the forward that rounding does not explain."""
    foreign = {(each.side, each.tensor.rpartition(".")[0]): each for each in weights}
    for each in sorted(operators, key=lambda each: each.order):
        held = foreign.get((each.side, each.operator))
        code = each.in_double is not None and each.in_double > CODE_DIFFERS
        if held is None and not each.is_beyond and not code:
            continue
        return Divergence(
            side=each.side,
            operator=each.operator,
            kind=each.kind,
            layer=each.layer,
            why="weights" if held is not None else "beyond" if each.is_beyond else "code",
            ratio=each.ratio,
            version=None if held is None else held.version,
            seq_id=each.seq_id,
            token=each.token,
        )
    return None
