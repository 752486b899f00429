"""Import logged scalars into the table `metrics`. Shapes: N logged values."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...schemas.errors import DamagedTrace, ImportFailed, TraceNotFound
from ...schemas.layout import HYPERPARAMETER, METRICS
from ...schemas.steps import ALL_STEPS, parse_steps
from ..progress import Progress
from ..scalars import as_float, as_text
from ..snapshot import take_snapshot
from ..store import Store
from ..verified_file import FileCursor
from .columns import Selection, listed_names, map_example
from .format import DumpFolder, Format
from .row_import import Imported, open_import
from .scalar_files import files_of, is_number, is_of_scalars, rows_of

_COUNTER = "_step"
_STEPS = (
    "step", "Step", "global_step", "train/global_step", "trainer/global_step", "training/global_step",
    "eval/global_step", "train/step", "rollout/step", "eval/step",
)  # fmt: skip
_CLOCKS = ("_timestamp", "_runtime", "_wandb", "Wall time")

SCALARS = Format(
    name="metrics",
    writes="any logger of scalars (TRL, transformers, verl, slime, miles, TensorBoard, W&B)",
    files="trainer_state.json, *.tfevents.*, *.wandb, *.csv, *.jsonl, *.json, *.parquet, or a console log of verl or slime",
    columns={"step": (*_STEPS, _COUNTER)},
    alignment="scalars per step, no tokens. All other columns become metrics of the same name. "
    "[Common names](../start/import.md#curves-only) of mismatch, reward and other metrics are recognised",
    recognises=is_of_scalars,
)


def _map_step(names: Iterable[str] = ()) -> str:
    return f"Map the step column, e.g. {map_example(['step'], [*names])}"


_MOST_NAMES, _MOST_DEPTH, _AT_ONCE = 100_000, 20, 1 << 16


def import_metrics(
    folder: DumpFolder, *, output: str | os.PathLike[str], map: Mapping[str, str] | None, steps: str, force: bool,
    progress: Progress,
) -> Imported:  # fmt: skip
    """Import a file or folder of scalars.

    All values are held in memory (20 bytes each), because a metric's last value at a step replaces earlier ones. If
    `output` is a trace that was not imported from scalars, the scalars are added to it. Raises ImportFailed or
    TraceExists.
    """
    names, left_out = files_of(folder)
    found, notes = _Scalars(dict(map or {})), list[str]()
    with progress("importing", folder.num_bytes(names)) as advance:
        for name in names:
            for row in rows_of(folder.path(name), notes, found.ignored):
                found.add(*row)
            advance(folder.num_bytes([name]))
    found.check(folder.url)
    grows = not force and _holds_other(output, found.codes.keys())
    with open_import(output, SCALARS.name, folder.url, Selection(), ordered=False, grows=grows, force=force) as rows:
        for columns in found.columns(steps, folder.url, notes):
            rows.add_metric_columns(columns)
    rows.result.num_files, rows.result.held_back, rows.result.notes = len(names), tuple(left_out), tuple(notes)
    rows.result.ignored_columns = tuple(name for name in found.ignored if name not in found.codes)
    return rows.result


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
        raise ImportFailed(
            f"{output} already has values for {listed_names(both)}. Rename or skip these metrics", option="map"
        )
    return True


class _Scalars:
    """Logged values, in file order."""

    def __init__(self, mapped: dict[str, str]):
        self.codes: dict[str, int] = {}
        """Index of each metric's name."""
        self.ignored: dict[str, None] = {}
        self._steps, self._names, self._values = array("q"), array("i"), array("d")
        self._texts: dict[int, str] = {}
        self._mapped, self._unread = mapped, {name for name, ours in mapped.items() if ours}
        self._by_counter = self._differs = ""

    def add(self, where: str, step: int | None, values: Mapping[str, Any]) -> None:
        flat = dict(_flat(values))
        self._unread -= flat.keys()
        flat |= {ours: flat.pop(theirs) for theirs, ours in self._mapped.items() if theirs in flat}
        flat.pop("", None)  # skipped
        at = self._step(where, flat) if step is None else step
        if at < 0:
            raise ImportFailed(f"{where}: the step is {at}, but a step cannot be negative. {_map_step()}")
        for name, value in flat.items():
            is_setting = name.startswith(HYPERPARAMETER)
            if name in (*_STEPS, _COUNTER) or (value is None and not is_setting):
                continue
            number = _number(value)
            if name in _CLOCKS or not (is_setting or isinstance(value, str) or number is not None):
                self.ignored[name] = None
                continue
            if len(self.codes) >= _MOST_NAMES:
                raise ImportFailed(
                    f"{where} has more than {_MOST_NAMES:,} columns. Remove columns that are not scalars"
                )
            if number is None:
                self._texts[len(self._values)] = as_text(value)
            self._steps.append(at)
            self._names.append(self.codes.setdefault(as_text(name), len(self.codes)))
            self._values.append(math.nan if number is None else number)

    def _step(self, where: str, flat: Mapping[str, Any]) -> int:
        name = next((name for name in (*_STEPS, _COUNTER) if flat.get(name) is not None), None)
        if name is None:
            raise ImportFailed(f"{where} has no step (found: {listed_names([*flat])}). {_map_step(flat)}")
        step = math.nan if isinstance(flat[name], bool) else _number(flat[name])
        if step is None or step != step // 1 or abs(step) >= 2**63:
            raise ImportFailed(
                f"{where}: {name} is {flat[name]!r:.40}, but a step must be a whole number. {_map_step()}"
            )
        if name == _COUNTER:
            self._by_counter = self._by_counter or where
        elif flat.get(_COUNTER) is not None and _number(flat[_COUNTER]) != step:
            self._differs = name
        return int(step)

    def check(self, url: str) -> None:
        if self._by_counter and self._differs:
            raise ImportFailed(
                f"{self._by_counter} has no step except W&B's _step, which differs from {self._differs} in other rows. "
                "Map the column to use as the step, e.g. _step=step"
            )
        if self._unread:
            raise ImportFailed(f"no row has the column {listed_names([*self._unread])}", option="map")
        if not self.codes:
            raise ImportFailed(f"{url} contains no scalars. Pass a file with values per step")

    def columns(self, steps: str, url: str, notes: list[str]) -> Iterator[dict[str, pa.Array]]:
        """Yield columns with the last value of each metric at each step, sorted by step."""
        step_N, code_N, value_N = (np.asarray(each) for each in (self._steps, self._names, self._values))
        order_N = np.lexsort((code_N, step_N))  # stable: the last logged value stays last
        is_last = np.append((np.diff(step_N[order_N]) != 0) | (np.diff(code_N[order_N]) != 0), True)
        names, again_N, order_N = pa.array(list(self.codes)), order_N[~is_last], order_N[is_last]
        if steps != ALL_STEPS:
            order_N = order_N[np.isin(step_N[order_N], parse_steps(steps, np.unique(step_N).tolist(), of=url))]
        is_text = np.isin(order_N, list(self._texts))
        kinds = {
            "were logged again for the same step, e.g. by a resumed run; the last one was kept": again_N,
            "are NaN or infinite, and were kept": order_N[~np.isfinite(value_N[order_N]) & ~is_text],
            "are text, and were kept as text": order_N[is_text & (step_N[order_N] > 0)],
        }
        for what, place_N in kinds.items():
            if len(place_N):
                where = f"{names[code_N[place_N[0]]]} at step {step_N[place_N[0]]}"
                notes.append(f"{len(place_N):,} values {what} (first: {where})")
        for first in range(0, len(order_N), _AT_ONCE):
            part = order_N[first : first + _AT_ONCE]
            texts = [self._texts.get(place) for place in part.tolist()] if self._texts else [None] * len(part)
            yield {
                "step": pa.array(step_N[part]), "name": names.take(pa.array(code_N[part])), "text": pa.array(texts, pa.string()),
                "value": pa.array(value_N[part], mask=is_text[first : first + _AT_ONCE]),
            }  # fmt: skip


def _flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value), with nested names as `outer/inner`. W&B objects with `_type` (images) are not flattened."""
    for name, value in values.items():
        if isinstance(value, Mapping) and "_type" not in value and path.count("/") < _MOST_DEPTH:
            yield from _flat(value, f"{path}{name}/")
        else:
            yield f"{path}{name}", value


def _number(value: Any) -> float | None:
    if isinstance(value, str) and is_number(value):
        return float(value)
    return as_float(value) if isinstance(value, (bool, int, float)) else None
