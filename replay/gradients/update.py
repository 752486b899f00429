"""Read a trace's optimizer steps: policy version, rows, loss inputs, and the step where the grad norm was logged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow.dataset as ds

from ...schemas.errors import CannotReplay, option
from ...schemas.layout import HYPERPARAMETER, METRICS, SCORES, SEQUENCES
from ...schemas.passes import CURRENT, TRAIN
from ..recorded import RecordedRow, RecordedRun, assumed_versions

GRAD_NORMS = ("grad_norm", "actor/grad_norm", "train/grad_norm")
_LOSS = "loss"
"""Value of the contract field `source` for logprobs from the loss's own forward pass."""
Place = tuple[str, int]
"""Key of a recorded forward pass: (writer, forward_id)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRow:
    row: RecordedRow
    mask: np.ndarray
    """[T] bool: true for tokens included in the loss."""
    advantage: np.ndarray
    """float32 [1] (one advantage for the sequence) or [T] (one per token)."""
    passes: dict[str, np.ndarray]
    """[T] float32 logprobs by pass (nats). NaN where missing."""

    @property
    def place(self) -> Place:
        return self.row.writer, self.row.forward_id

    @property
    def num_tokens(self) -> int:
        return int(self.mask.sum())


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer step. Its gradient is computed at the weights of `policy_version`."""

    step: int
    """Step in which the sequences were generated."""
    policy_version: int
    loss_pass: str
    """The pass with the logprobs that the loss computed: `current`, or `train` if `current` was not recorded."""
    contract: str
    rows: tuple[LossRow, ...]
    step_tokens: int
    step_places: int
    own_ratio: bool
    """True if the old logprobs were computed in the loss itself, so that every importance ratio was 1."""
    metric_step: int | None
    """Step where this update's grad norm was logged, or None if unknown."""
    notes: tuple[str, ...] = ()

    @property
    def composition_known(self) -> bool:
        return all(entry.row.composition_known for entry in self.rows)

    @cached_property
    def places(self) -> dict[Place, tuple[LossRow, ...]]:
        """Rows by micro-batch, or all rows in a single group if micro-batches were not recorded."""
        if not self.composition_known:
            return {("", 0): self.rows}
        found: dict[Place, list[LossRow]] = {}
        for entry in self.rows:
            found.setdefault(entry.place, []).append(entry)
        return {place: tuple(rows) for place, rows in found.items()}

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.rows)


def loss_steps(run: RecordedRun) -> list[int]:
    return sorted({*run.steps(CURRENT), *run.steps(TRAIN)})


def hyperparameters(run: RecordedRun) -> dict[str, Any]:
    return {
        name.removeprefix(HYPERPARAMETER): text if value is None else value
        for name, value, text in run.records(METRICS, ds.field("name") >= HYPERPARAMETER, ["name", "value", "text"])
        if name.startswith(HYPERPARAMETER)
    }


def logged(run: RecordedRun, names: Sequence[str]) -> dict[int, float]:
    """Return the values, by step, of the first metric in `names` that was logged. Empty if none was logged."""
    for name in names:
        rows = run.records(METRICS, ds.field("name") == name, ["step", "value"])
        found = {step: value for step, value in rows if value is not None}
        if found:
            return found
    return {}


def updates(run: RecordedRun, step: int, passes: Iterable[str], norms: Mapping[int, float]) -> Iterator[Update]:
    """Yield a step's updates with logprobs for `passes`. Raises CannotReplay if advantages or a pass are missing."""
    loss_pass = CURRENT if step in run.steps(CURRENT) else TRAIN
    scored, notes = _one_iteration_a_version(run.step(step, loss_pass))
    sequences = _sequences(run, step)
    known = {name: _logprobs(run, step, name) for name in sorted(set(passes))}
    versions = sorted({row.policy_version for row in scored})
    metric_steps = _metric_steps(run, step, versions, norms)
    first = {row.seq_id: row for row in reversed(scored)}
    rows = [_loss_row(row, sequences[row.seq_id], known) for row in scored]
    counted = {entry.row.seq_id: entry.num_tokens for entry in rows}
    wanted = (ds.field("step") == step) & (ds.field("pass") == TRAIN)
    of_train = set() if loss_pass == TRAIN else {digest for (digest,) in run.records(SCORES, wanted, ["contract"])}
    own_ratio = bool(of_train) and all(each and run.contract(TRAIN, each).get("source") == _LOSS for each in of_train)
    for version in versions:
        own = tuple(entry for entry in rows if entry.row.policy_version == version)
        yield Update(
            step=step,
            policy_version=version,
            loss_pass=loss_pass,
            contract=run.digest([entry.row for entry in own], f"step {step} with policy version {version}"),
            rows=own,
            step_tokens=sum(counted.values()),
            step_places=len({(row.writer, row.forward_id) for row in first.values()}),
            own_ratio=own_ratio,
            metric_step=metric_steps[version],
            notes=(*notes, *assumed_versions([entry.row for entry in own])),
        )


def _one_iteration_a_version(rows: list[RecordedRow]) -> tuple[list[RecordedRow], list[str]]:
    first: dict[tuple[str, int], RecordedRow] = {}
    kept, dropped = [], 0
    for row in sorted(rows, key=lambda row: row.iteration):
        before = first.setdefault((row.seq_id, row.policy_version), row)
        if np.array_equal(before.logprobs, row.logprobs, equal_nan=True):
            kept.append(row)
        else:
            dropped += 1
    notes = [
        f"{dropped} rows were scored again with different weights under the same policy version. Their optimizer steps "
        f"cannot be told apart, so only the first step is used; to separate them, record versions with "
        f"Recorder.add_scores(policy_version=...)"
    ]
    kept.sort(key=lambda row: (row.writer, row.forward_id, row.forward_row))
    return kept, notes if dropped else []


def _sequences(run: RecordedRun, step: int) -> dict[str, dict[str, Any]]:
    table = run.table(SEQUENCES, ds.field("step") == step, ["seq_id", "response_mask", "advantage", "advantages"])
    found = {row["seq_id"]: row for row in table.to_pylist()}
    if not any(row["advantage"] is not None or row["advantages"] is not None for row in found.values()):
        raise CannotReplay(
            f"{run.store.url}: step {step} has no advantages, so its loss has no gradient; record them with "
            "Recorder.add_sequences(advantage=...)"
        )
    return found


def _loss_row(row: RecordedRow, sequence: dict[str, Any], known: Mapping[str, dict[str, np.ndarray]]) -> LossRow:
    length = len(row.response_ids)
    mask, values = sequence["response_mask"], sequence["advantages"]
    if values is None:
        values = [np.nan if sequence["advantage"] is None else sequence["advantage"]]
    advantage = np.array([np.nan if value is None else value for value in values], np.float32)
    return LossRow(
        row=row,
        mask=np.ones(length, bool) if mask is None else np.array([bool(value) for value in mask], bool),
        advantage=np.nan_to_num(advantage, nan=0.0),
        passes={name: values.get(row.seq_id, np.full(length, np.nan, np.float32)) for name, values in known.items()},
    )


def _logprobs(run: RecordedRun, step: int, pass_name: str) -> dict[str, np.ndarray]:
    wanted = (ds.field("step") == step) & (ds.field("pass") == pass_name)
    table = run.table(SCORES, wanted, ["seq_id", "iteration", "logprobs"])
    columns = (table["seq_id"].to_pylist(), table["iteration"].to_pylist(), table["logprobs"])
    rows = sorted(zip(*columns, strict=True), key=lambda row: row[1])
    found = {  # in reverse, so that the first iteration's values are kept
        seq_id: np.asarray(values.values.fill_null(float("nan")))
        for seq_id, _, values in reversed(rows)
        if values.is_valid
    }
    if not found:
        how = f"replay this arm first (tim-trace replay RUN --steps {step})" if "/" in pass_name else (
            f"record this pass, or set a loss that does not need it, e.g. "
            f"{option('loss', 'denominator=train,correction=none,kl_coefficient=0')}"
        )  # fmt: skip
        raise CannotReplay(
            f"{run.store.url}: step {step} has no logprobs for pass {pass_name!r}, which the loss or "
            f"an arm requires; {how}"
        )
    return found


def _metric_steps(
    run: RecordedRun, step: int, versions: Sequence[int], norms: Mapping[int, float]
) -> dict[int, int | None]:
    """Map each policy version to the step where its update was logged. TRL logs a step's updates at consecutive steps.
    All versions map to None if one of those steps has its own sequences or no logged norm."""
    steps = {version: step + version - versions[0] for version in versions}
    others = set(loss_steps(run)) - {step}
    if len(versions) > 1 and (others & set(steps.values()) or not set(steps.values()) <= set(norms)):
        return dict.fromkeys(versions)
    return dict(steps.items())
