"""Import logged scalars into the table `metrics`. Shapes: N values, sorted by step."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...schemas.errors import DamagedTrace, ImportFailed, TraceNotFound
from ...schemas.layout import HYPERPARAMETER, METRICS
from ...schemas.steps import ALL_STEPS, parse_steps
from ..progress import Progress
from ..scalars import as_float
from ..snapshot import take_snapshot
from ..store import Store
from ..verified_file import FileCursor
from .columns import Selection, listed_names, shown_name
from .format import DumpFolder, Format
from .row_import import Imported, open_import
from .scalar_files import files_of, is_number, is_of_scalars, rows_of

_STEP, _COUNTER = "step", "_step"
_STEPS = (
    _STEP, "Step", "global_step", "train/global_step", "trainer/global_step", "training/global_step",
    "eval/global_step", "train/step", "rollout/step", "eval/step",
)  # fmt: skip
_CLOCKS = ("_timestamp", "_runtime", "_wandb", "Wall time", "")

SCALARS = Format(
    name="metrics",
    writes="any logger of scalars (TRL, transformers, verl, slime, miles, TensorBoard, W&B)",
    files="trainer_state.json, *.tfevents.*, *.wandb, *.csv, *.jsonl, *.json, or a log with the lines that verl or slime print",
    columns={_STEP: (*_STEPS, _COUNTER)},
    alignment="scalars per step, no tokens. Every other column becomes a metric under its own name. "
    "[These names](../start/import.md#curves-alone) are recognised as mismatch, reward and so on",
    recognises=is_of_scalars,
)
_MOST_NAMES, _MOST_DEPTH, _AT_ONCE = 100_000, 20, 1 << 16


def import_metrics(
    folder: DumpFolder, *, output: str | os.PathLike[str], map: Mapping[str, str] | None, steps: str, force: bool,
    progress: Progress,
) -> Imported:  # fmt: skip
    """Import a file or folder of scalars. Values are kept in memory (16 bytes each) to keep the last one of each step.

    A trace at `output` that was not imported from scalars is extended. Raises ImportFailed or TraceExists.
    """
    names, left_out = files_of(folder)
    found, notes = _Scalars(dict(map or {})), list[str]()
    with progress("importing", folder.num_bytes(names)) as advance:
        for name in names:
            for row in rows_of(folder.path(name), notes, found.ignored):
                found.add(*row)
            advance(folder.num_bytes([name]))
    found.check(folder.url)
    there = np.unique(np.concatenate([np.frombuffer(column, np.int64) for column in found.steps.values()]))
    kept = None if steps == ALL_STEPS else np.array(parse_steps(steps, there.tolist(), of=folder.url))
    is_beside = not force and _holds_other(output, found.steps.keys())
    with open_import(
        output, SCALARS.name, folder.url, Selection(), ordered=False, grows=is_beside, force=force
    ) as rows:
        for columns in found.columns(kept):
            rows.add_metric_columns(columns)
    result = rows.result
    result.num_files, result.held_back = len(names), tuple(left_out)
    result.notes = (*notes, *found.sentences())
    result.ignored_columns = tuple(name for name in found.ignored if name not in found.steps)
    return result


def _holds_other(output: str | os.PathLike[str], names: Any) -> bool:
    store = Store(output)
    try:
        if store.manifest().source.startswith(f"import {SCALARS.name} "):
            return False
    except (TraceNotFound, DamagedTrace, OSError, ValueError):
        return False
    files = (pa.PythonFile(FileCursor(entry.file), mode="r") for entry in take_snapshot(store).files[METRICS])
    known = {name for file in files for name in pc.unique(pq.read_table(file, columns=["name"])["name"]).to_pylist()}
    if both := sorted(known & set(names)):
        raise ImportFailed(f"{output}: already has values of {listed_names(both)}. Rename or skip them", option="map")
    return True


class _Scalars:
    """Scalars by name, in the order logged."""

    def __init__(self, mapped: dict[str, str]):
        self.steps: dict[str, array[int]] = {}
        self._values: dict[str, array[float]] = {}
        self._texts: dict[tuple[str, int], str] = {}
        self.ignored: dict[str, None] = {}
        self._mapped, self._unread = mapped, dict.fromkeys(name for name, ours in mapped.items() if ours)
        self._by_counter, self._differs = "", ""
        self._num_again = self._num_not_finite = 0
        self._again = self._not_finite = ""

    def add(self, where: str, step: int | None, values: Mapping[str, Any]) -> None:
        flat = dict(self._flat(values))
        for name in [name for name in self._mapped if name in flat]:
            self._unread.pop(name, None)
            value, ours = flat.pop(name), self._mapped[name]
            if ours:
                flat[ours] = value
        at = self._step(where, flat) if step is None else step
        if at < 0:
            raise ImportFailed(
                f"{where}: the step is {at}, but steps are not negative. Map another column, e.g. theirs=step"
            )
        for name, value in flat.items():
            if (value is None and not name.startswith(HYPERPARAMETER)) or name in _STEPS or name == _COUNTER:
                continue
            if name in _CLOCKS:
                self.ignored[name] = None
                continue
            if name.startswith(HYPERPARAMETER) and not isinstance(value, (int, float)):
                value = str(value)
            number = self._number(value)
            if number is None and not isinstance(value, str):
                self.ignored[name] = None
                continue
            own = name.encode(errors="backslashreplace").decode()
            if own not in self.steps:
                if len(self.steps) >= _MOST_NAMES:
                    raise ImportFailed(
                        f"{where}: has more than {_MOST_NAMES:,} columns. Remove those that are not scalars"
                    )
                self.steps[own], self._values[own] = array("q"), array("d")
            self.steps[own].append(at)
            self._values[own].append(math.nan if number is None else number)
            if number is None:
                self._texts[own, at] = value.encode(errors="backslashreplace").decode()
            elif self._texts:
                self._texts.pop((own, at), None)

    def _flat(self, values: Mapping[str, Any], path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
        """Yield nested objects as `outer/inner`. W&B's own objects (histograms, images, tables) have a `_type`."""
        for name, value in values.items():
            if isinstance(value, Mapping) and "_type" not in value and depth < _MOST_DEPTH:
                yield from self._flat(value, f"{path}{name}/", depth + 1)
            else:
                yield f"{path}{name}", value

    @staticmethod
    def _number(value: Any) -> float | None:
        if isinstance(value, str) and is_number(value):
            return float(value)
        return as_float(value) if isinstance(value, (bool, int, float)) else None

    def _step(self, where: str, flat: Mapping[str, Any]) -> int:
        name = next((name for name in (*_STEPS, _COUNTER) if flat.get(name) is not None), None)
        if name is None:
            raise ImportFailed(
                f"{where}: has no step (found: {listed_names([*flat])}). Map its column, e.g. theirs=step"
            )
        value = flat[name]
        number = float(value) if isinstance(value, str) and is_number(value) else value
        if (
            isinstance(number, bool)
            or not isinstance(number, (int, float))
            or number != number // 1
            or abs(number) >= 2**63
        ):
            raise ImportFailed(
                f"{where}: {shown_name(name)} is {value!r:.40}, but a step is a whole number. Map another column, e.g. theirs=step"
            )
        if name == _COUNTER:
            self._by_counter = self._by_counter or where
        elif flat.get(_COUNTER, number) != number:
            self._differs = self._differs or name
        return int(number)

    def check(self, url: str) -> None:
        if self._by_counter and self._differs:
            raise ImportFailed(
                f"{self._by_counter}: has only W&B's counter _step, other rows have {self._differs}, and the two differ. Map the "
                "one to use, e.g. _step=step"
            )
        if self._unread:
            raise ImportFailed(f"no row has the column {listed_names([*self._unread])}", option="map")
        if not self.steps:
            raise ImportFailed(f"{url}: contains no scalars. Pass a file with values per step")

    def columns(self, kept: np.ndarray | None) -> Iterator[dict[str, pa.Array]]:
        """Yield the last value of each step, sorted by step."""
        names, steps, values, codes = list(self.steps), [], [], []
        for code, name in enumerate(names):
            of_name, order = np.frombuffer(self.steps[name], np.int64), np.argsort(self.steps[name], kind="stable")
            is_last = np.append(of_name[order][1:] != of_name[order][:-1], True)
            if not is_last.all():
                self._num_again += int((~is_last).sum())
                self._again = self._again or f"{name} at step {of_name[order][~is_last][0]}"
            order = order[is_last]
            order = order if kept is None else order[np.isin(of_name[order], kept)]
            steps.append(of_name[order])
            values.append(np.frombuffer(self._values[name], np.float64)[order])
            codes.append(np.full(len(order), code, np.int32))
        step_N, value_N, code_N = np.concatenate(steps), np.concatenate(values), np.concatenate(codes)
        order_N = np.lexsort((code_N, step_N))
        dictionary = pa.array(names, pa.string())
        for first in range(0, len(order_N), _AT_ONCE):
            part = order_N[first : first + _AT_ONCE]
            step, code, value = step_N[part], code_N[part], value_N[part]
            texts = [self._texts.get((names[c], s)) for c, s in zip(code, step, strict=True)] if self._texts else None
            is_text = np.zeros(len(part), bool) if texts is None else np.array([text is not None for text in texts])
            if len(lost := np.flatnonzero(~np.isfinite(value) & ~is_text)):
                self._num_not_finite += len(lost)
                self._not_finite = self._not_finite or f"{names[code[lost[0]]]} at step {step[lost[0]]}"
            yield {
                "step": pa.array(step), "name": dictionary.take(pa.array(code)), "value": pa.array(value, mask=is_text),
                "text": pa.nulls(len(part), pa.string()) if texts is None else pa.array(texts, pa.string()),
            }  # fmt: skip

    def sentences(self) -> Iterator[str]:
        if self._num_again:
            yield f"{self._num_again:,} values were logged again for the same step (first: {self._again}), as by a resumed run; the last one was kept"
        if self._num_not_finite:
            yield f"{self._num_not_finite:,} values are NaN or infinite (first: {self._not_finite}) and were kept"
        texts = [name for name, _ in self._texts if not name.startswith(HYPERPARAMETER)]
        if texts:
            yield f"{len(texts):,} values are text (first: {texts[0]}) and were kept as text"
