"""Choose sequences, check every operator on them, and compute each error's contribution to the mismatch.

Shapes: T response tokens in a sequence, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import torch

from ...schemas.errors import CannotReplay, InvalidOption
from ...schemas.layout import SCORES, SEQUENCES
from ...schemas.passes import ROLLOUT
from ...tracer.dense import scaled
from ...tracer.located import A, B, Router
from ...tracer.store import first_line
from ..recorded import RecordedRow, RecordedRun
from . import bounds
from .bounds import Rounding
from .execution import Execution
from .judged import OF_CODE, Judged, Judgement, Point, judged
from .names import kind_of, layer_of
from .pooled import Apart, Pooled
from .reference import Reference
from .taps import RowTaps
from .windows import Window

LOG_SOFTMAX, LOGITS = "log_softmax", "logits"
"""Operator kinds after the output projection. `logits` is any scaling or capping of the logits by user code."""
Head = list[tuple[Judged, np.ndarray]]
"""Operators after the last hidden states, each with its error's contribution to the log-probabilities [T] (nats)."""
_LAST = 1 << 40
RANDOM = "random"
_SEED = 20260000
CARRIED = "operators' shares of the mismatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    rows: tuple[RecordedRow, ...]
    how: str
    """How the rows were chosen: `worst` (largest mismatch between trainer and engine), `random` or `named`."""
    groups: dict[str, str]
    """Prompt group by sequence id. A sequence without a group has its own id as its group."""


def choose(run: RecordedRun, step: int, rows: Sequence[RecordedRow], text: str) -> Chosen:
    """Select sequences from an option value: `8`, `random:8` or a list of ids. Raises InvalidOption, CannotReplay."""
    usable = [row for row in rows if row.scored.any()]
    if not usable:
        raise CannotReplay(f"{run.store.url}: step {step} has no sequence with a scored token")
    by_name = {row.seq_id: row for row in usable}
    head, _, tail = text.rpartition(":")
    if tail.isdigit() and head in ("", RANDOM) and (number := int(tail)):
        order = np.random.default_rng(_SEED + step).permutation(len(usable)).tolist()
        how = RANDOM
        mismatch = {} if head else _mismatch(run, step, by_name)
        if mismatch:
            how = "worst"
            order = sorted(range(len(usable)), key=lambda place: -mismatch.get(usable[place].seq_id, -1.0))
        found = [usable[place] for place in order[:number]]
    else:
        names = [name.strip() for name in text.split(",")]
        missing = [name for name in names if name not in by_name]
        if missing:
            raise InvalidOption(
                f"{missing[0]!r} is not a scored sequence of step {step}; pass a number, random:N, or ids such as "
                f"{usable[0].seq_id}",
                option="sequences",
            )
        found, how = [by_name[name] for name in names], "named"
    version = found[0].policy_version
    same = tuple(row for row in found if row.policy_version == version)
    named = dict(run.records(SEQUENCES, ds.field("step") == step, ["seq_id", "group_id"]))
    return Chosen(rows=same, how=how, groups={row.seq_id: named.get(row.seq_id) or row.seq_id for row in same})


def _mismatch(run: RecordedRun, step: int, rows: dict[str, RecordedRow]) -> dict[str, float]:
    table = run.table(SCORES, (ds.field("step") == step) & (ds.field("pass") == ROLLOUT), ["seq_id", "logprobs"])
    found = {}
    for seq_id, logprobs in zip(table["seq_id"].to_pylist(), table["logprobs"], strict=True):
        row = rows.get(seq_id)
        if row is None or not logprobs.is_valid or len(logprobs.values) != len(row.logprobs):
            continue
        rollout = np.asarray(logprobs.values.cast("float64").fill_null(np.nan))
        d = np.abs(row.logprobs.astype(np.float64) - rollout)[row.scored]
        if np.isfinite(d).any():
            found[seq_id] = float(np.nanmean(np.where(np.isfinite(d), d, np.nan)))
    return found


class SequenceJudge:
    def __init__(
        self, row: RecordedRow, executions: Mapping[str, Execution], reference: Reference,
        windows: Sequence[Window], listen: Callable[[Window], dict[str, RowTaps]], heard: dict[str, RowTaps],
        pooled: Pooled,
    ):  # fmt: skip
        self._row, self._executions, self._reference = row, executions, reference
        self._windows, self._listen, self._heard, self._pooled = windows, listen, heard, pooled
        self._positions = {side: taps.first_position for side, taps in heard.items()}
        self._judgements: dict[tuple[str, Window], Judgement] = {}
        self._heads: dict[str, Head] = {}
        self._apart: dict[str, tuple[Apart, Apart]] = {}
        """Differences between the executions' inputs and between their outputs, keyed by operator."""

    def judge(self, is_asked: Callable[[str], bool]) -> None:
        row, pooled = self._row, self._pooled
        d_T = np.where(row.scored, pooled.logprobs[B][row.seq_id] - pooled.logprobs[A][row.seq_id], 0.0)
        for position in sorted(set(self._positions.values())):
            sides = [side for side in (A, B) if self._positions[side] == position]
            products: list[dict[Point, float]] = [{} for _ in sides]
            if d_T.any():
                temperature = self._executions[A].numerics.temperature
                try:
                    products = self._reference.carried(
                        row, d_T, temperature, position, self._windows, partial(self._errors, sides)
                    )
                except OF_CODE as error:  # e.g. it has no derivative
                    pooled.unjudged[CARRIED] = f"{type(error).__name__}: {first_line(error)}"
            for window in reversed(self._windows):
                if left := [side for side in sides if (side, window) not in self._judgements]:
                    self._errors(left, window)
            for side, own in zip(sides, products, strict=True):
                for each, product in self._of_side(side, own, d_T):
                    pooled.kinds.add(each.kind)
                    if is_asked(each.operator):
                        pooled.add(side, row.seq_id, each, product if side == B or product is None else -product)
        for name, apart in self._apart.items():
            pooled.apart[name].append(apart)

    def _of_side(
        self, side: str, products: Mapping[Point, float], d_T: np.ndarray
    ) -> Iterator[tuple[Judged, float | None]]:
        """Yield a side's operators in order, each with its error's contribution to sum(d * logprobs)."""
        for window in self._windows:
            for each in self._judgements[side, window].operators:
                yield each, None if each.point is None else products.get(each.point)
        for each, own_T in self._heads[side]:
            yield each, float((d_T * np.nan_to_num(own_T)).sum())

    def _errors(self, sides: Sequence[str], window: Window) -> list[dict[Point, Any]]:
        """Judge one layer window for these sides, and return the errors that each side introduced."""
        taps, pooled = self._heard, self._pooled
        is_last = window is self._windows[-1]
        if not is_last or any(side not in taps for side in sides):
            taps = self._listen(window)
        if not any(of is window for _, of in self._judgements):
            self._compare(taps[A], taps[B])
        for side in sides:
            execution = self._executions[side]
            found = self._reference.judge(self._row, taps[side], execution, self._positions[side], window)
            if is_last:
                logprobs_T = pooled.logprobs[side][self._row.seq_id]
                self._heads[side] = judge_head(execution, self._reference, self._row, taps[side], logprobs_T)
            self._judgements[side, window] = found
            pooled.unjudged |= {f"{side} {name}": why for name, why in found.unjudged.items()}
            del taps[side]
        return [self._judgements[side, window].errors for side in sides]

    def _compare(self, a: RowTaps, b: RowTaps) -> None:
        self._pooled.unseen |= {kind_of(name) for name in set(a.calls) ^ set(b.calls)}
        for name, ours in a.calls.items():
            if (theirs := b.calls.get(name)) is not None:
                for router in _routers(name, ours.gives, theirs.gives):
                    self._pooled.add_router(router)
                self._apart[name] = _apart(ours.takes, theirs.takes), _apart(ours.gives, theirs.gives)


def _apart(a: Sequence[Any], b: Sequence[Any]) -> Apart:
    for ours, theirs in zip(a, b, strict=False):
        if ours is None or theirs is None or not ours.is_floating_point() or ours.numel() != theirs.numel():
            continue
        exact = ours.double()
        off = (theirs.double().reshape(ours.shape) - exact).flatten()
        return float(off.dot(off)), float(exact.flatten().dot(exact.flatten()))
    return float("nan"), float("nan")


def _routers(name: str, ours: Sequence[Any], theirs: Sequence[Any]) -> Iterator[Router]:
    for a, b in zip(ours, theirs, strict=False):
        if a is not None and b is not None and not a.is_floating_point() and a.shape == b.shape and a.dim() == 2:
            flipped_T = (a.sort(-1).values != b.sort(-1).values).any(-1)
            number, margin = int(flipped_T.sum()), _margin(ours, a, flipped_T)
            yield Router(operator=name, layer=layer_of(name), num_tokens=len(a), num_flipped=number, margin=margin)


def _margin(gives: Sequence[Any], ids: Any, flipped_T: Any) -> float | None:
    """Return the largest margin (lowest chosen score minus highest other score) among tokens whose experts differ."""
    wide = [each for each in gives if each is not None and each.is_floating_point() and each.shape[-1] > ids.shape[-1]]
    if not wide or not bool(flipped_T.any()):
        return None
    scores, chosen = wide[0][flipped_T].double(), ids[flipped_T].long()
    margins = scores.gather(-1, chosen).amin(-1) - scores.scatter(-1, chosen, -torch.inf).amax(-1)
    return float(margins.max()) if bool((margins >= 0).all()) else None


def judge_head(
    execution: Execution, reference: Reference, row: RecordedRow, taps: RowTaps, logprobs_T: np.ndarray
) -> Head:
    """Judge the operators after the last hidden states. A fused projection and log-softmax count as one operator."""
    name = execution.head
    last = next((taps.calls[each] for each in reversed(taps.calls) if each != name), None)
    if last is None or not last.gives or last.gives[0] is None or not len(row.response_ids):
        return []
    hidden = last.gives[0]  # [T, H] last output before the head, for prompt and response
    before = slice(len(row.prompt_ids) - 1, len(row.prompt_ids) + len(row.response_ids) - 1)
    numerics, model = execution.numerics, reference.model
    ids_T = torch.from_numpy(row.response_ids.astype(np.int64)).to(hidden.device)
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    hidden_TH = hidden[before]
    dtype = numerics.projection_dtype or hidden_TH.dtype
    found: Head = []
    with torch.no_grad():
        logits_TV = head(hidden_TH.double())
        num_logits = logits_TV.shape[1]
        call = taps.calls.get(name)
        made = None if call is None else call.gives[0]
        weight, out = head.weight, bounds.unit(dtype)
        rounding = Rounding(
            given=dtype if made is None else made.dtype, taken=hidden_TH.dtype,
            weight=execution.weight_dtypes.get(f"{name}.weight"), recorded=reference.recorded_dtypes.get(f"{name}.weight"),
        )  # fmt: skip
        if made is not None:
            made = made[before].flatten(1)
            bound = bounds.of_module(head, (hidden_TH.double(),), logits_TV, 0, rounding)
            # Logits for padding entries of the vocabulary are dropped, so their effect is attributed to the
            # log-softmax. Missing logits become NaN.
            made = torch.nn.functional.pad(
                made[:, :num_logits], (0, max(num_logits - made.shape[1], 0)), value=torch.nan
            )
            made_TV = scaled(made.double(), config) / numerics.temperature
            exact_T = _logprobs(made_TV, ids_T)
            own = exact_T - _logprobs(scaled(logits_TV, config) / numerics.temperature, ids_T)
            each = judged(name, name.rpartition(".")[2], _LAST, made, logits_TV, bound)
            found.append((each, np.asarray(own.cpu())))
            logits_TV, weight, out = made_TV, None, bounds.unit(made.dtype)
        else:
            logits_TV = scaled(logits_TV, config) / numerics.temperature
            exact_T = _logprobs(logits_TV, ids_T)
        sums = min(max(out, 2.0**-53), 2.0**-24)
        bound_T = bounds.of_logprobs(
            hidden_TH.double(), weight, logits_TV, ids_T, sums, out if weight is not None or out > 2.0**-24 else 2.0**-24,
            numerics.temperature, rounding.casts,
        )  # fmt: skip
        kind = name.rpartition(".")[2] if weight is not None else LOGITS if execution.is_other_code else LOG_SOFTMAX
        values_T = torch.from_numpy(np.asarray(logprobs_T, np.float64)).to(exact_T.device)
        scored_T = torch.from_numpy(row.scored).to(exact_T.device)
        if bool(scored_T.any()):
            each = judged(kind, kind, _LAST + 1, values_T[scored_T], exact_T[scored_T], bound_T[scored_T])
            found.append((each, np.asarray((values_T - exact_T).cpu())))
    return found


def _logprobs(logits_TV: Any, ids_T: Any) -> Any:
    return logits_TV.gather(-1, ids_T[:, None])[:, 0] - logits_TV.logsumexp(-1)
