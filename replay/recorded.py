from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow.fs import FSSpecHandler, PyFileSystem

from ..schemas.documents import Contract
from ..schemas.errors import CannotReplay, DamagedTrace, tell_damage
from ..schemas.layout import PASSES, SCORES, SEQUENCES
from ..schemas.modules import has_experts
from ..schemas.passes import ROLLOUT, TRAIN
from ..schemas.tables import TABLES
from ..tracer.parquet_file import PROTOCOL, TraceFiles
from ..tracer.routing import Routing, read_routing
from ..tracer.seal import adopt
from ..tracer.snapshot import newest_attempts, read_contract, take_snapshot
from ..tracer.store import Store, first_line
from ..tracer.weights.checkpoints import CheckpointReader, open_weights
from ..tracer.weights.reader import WeightReader
from .backends.trusted import DTYPES, KERNELS_VARIABLE, check_contract

_COMPOSITION = ("forward_id", "forward_row", "pad_left", "pad_right")
_UNNEEDED = ("routing", "routing_start", "attempt")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRow:
    seq_id: str
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    logprobs: np.ndarray
    """[T] float32 (nats). Meaningless where `scored` is false."""
    scored: np.ndarray
    """[T] bool: true where the pass has a logprob."""
    policy_version: int
    contract: str
    writer: str
    forward_id: int
    forward_row: int
    pad_left: int
    pad_right: int
    iteration: int = 0
    """Number of times this pass had already scored the sequence in this step."""
    version_assumed: str = ""
    """How the policy version was inferred, in words. Empty if the scores included the version."""
    composition_known: bool = True
    """True if the trace shows how rows shared forward passes. Otherwise each row runs alone."""
    routing: str | None = None
    routing_start: int | None = None
    attempt: int | None = None
    """Training attempt that recorded the row, or None outside training."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


class RecordedRun:
    def __init__(
        self, trace: str | os.PathLike[str], *, model_factory: str | None = None,
        weights_from: str | os.PathLike[str] | None = None, allow_kernel: Sequence[str] = (),
    ):  # fmt: skip
        """Open a local trace. Raises TraceNotFound, NewerTrace, CannotReplay, StorageError.

        `allow_kernel` lists recorded hub kernels that may run, besides those in TIM_TRACE_ALLOW_KERNEL.
        """
        self.model_factory, self.weights_from = model_factory, weights_from
        self.allow_kernel = (*allow_kernel, *filter(None, os.environ.get(KERNELS_VARIABLE, "").split(",")))
        self.store = Store(trace)
        self.manifest = self.store.manifest()
        if not self.store.is_local:
            raise CannotReplay(
                f"{trace}: the model can be rebuilt only from a local trace; copy the trace to this machine first"
            )
        self.folder = Path(self.store.root)
        adopt(self.folder)
        self.look()
        self.model, self.tokenizer = self._identities()

    def look(self) -> None:
        self.snapshot = take_snapshot(self.store)
        self.newest = newest_attempts(self.snapshot)
        self._files = TraceFiles()
        self._names = {
            table: [self._files.add(entry.relative, entry.file) for entry in entries]
            for table, entries in self.snapshot.files.items()
        }
        tell_damage(self.snapshot.damaged)

    @cached_property
    def replayed_pass(self) -> str:
        """The pass to replay: the trainer's, or the engine's if the trace has no trainer pass."""
        return ROLLOUT if not self.steps(TRAIN) and self.steps(ROLLOUT) else TRAIN

    @property
    def opening(self) -> dict[str, Any]:
        weights_from = None if self.weights_from is None else os.path.abspath(self.weights_from)
        return {
            "trace": self.folder.resolve(), "model_factory": self.model_factory, "weights_from": weights_from,
            "allow_kernel": self.allow_kernel,
        }  # fmt: skip

    @cached_property
    def weights(self) -> WeightReader | CheckpointReader:
        return open_weights(self.store, self.weights_from)

    def check_weights(self) -> None:
        """Raise WeightsMissing if the trace has no weights at all."""
        if not self.weights.versions:
            self.weights.load(0)

    def _identities(self) -> tuple[dict[str, Any], dict[str, Any]]:
        states, _ = self.store.writers()
        # Try trainer processes first, because engines do not record the model's class.
        for state in sorted(states, key=lambda state: "class" not in state.model):
            if state.model.get("config") is not None:
                if not isinstance(state.model["config"], dict):
                    raise CannotReplay(
                        f"{self.store.url}: the model's config is not a JSON object; the trace may be damaged"
                    )
                return state.model, state.tokenizer
        if self.manifest.is_import and not self.snapshot.files[SEQUENCES]:
            raise CannotReplay(
                f"{self.store.url} has logged scalars but no tokens to score; record the run with tim-trace record"
            )
        if self.manifest.is_import:
            raise CannotReplay(
                f"{self.store.url} was imported from a dump and has no model; attach the weights used to score it: "
                f"tim-trace weights {shlex.quote(self.store.url)} --attach VERSION DIR"
            )
        raise CannotReplay(
            f"{self.store.url}: the model was not recorded, so it cannot be rebuilt; record with "
            "`tim-trace record`, or describe the model with Recorder.describe(model={'class': ..., 'config': ...})"
        )

    def steps(self, pass_name: str) -> list[int]:
        return sorted(set(self.table(SCORES, ds.field("pass") == pass_name, ["step"])["step"].to_pylist()))

    @cached_property
    def longest(self) -> int:
        lengths = self.table(SEQUENCES, ds.scalar(True), ["num_prompt_tokens", "num_response_tokens"])
        return int(pc.max(pc.add(*(pc.fill_null(column, 0) for column in lengths.columns))).as_py() or 0)

    def sequences(self, pass_name: str, steps: Sequence[int]) -> dict[int, set[str]]:
        """Return, for each step, the ids of the sequences that a pass has scored. Unsealed scores are included."""
        wanted = ds.field("step").isin(list(steps)) & (ds.field("pass") == pass_name)
        found: dict[int, set[str]] = {step: set() for step in steps}
        for step, seq_id in (*self.records(SCORES, wanted, ["step", "seq_id"]), *self.unsealed(pass_name)):
            if step in found:
                found[step].add(seq_id)
        return found

    def unsealed(self, pass_name: str) -> list[tuple[int, str]]:
        journal = self.snapshot.journals.get(SCORES)
        if journal is None:
            return []
        rows = journal.filter(pc.equal(journal["pass"], pass_name))
        return list(zip(rows["step"].to_pylist(), rows["seq_id"].to_pylist(), strict=True))

    def contract(self, pass_name: str, digest: str) -> Contract:
        try:
            return read_contract(self.store, pass_name, digest)
        except DamagedTrace as error:
            raise CannotReplay(f"{error}; without its contract, the pass cannot be replayed") from error

    def digest(self, rows: Sequence[RecordedRow], where: str) -> str:
        """Return the hash of the rows' contract. Raises CannotReplay if the rows have several contracts."""
        digest, *others = {row.contract for row in rows}
        if others:
            why = f"{where} was scored under {len(others) + 1} different contracts, but a replay needs exactly one"
            raise CannotReplay(f"{self.store.url}: {why}")
        return digest

    def train_contract(self, digest: str, pass_name: str | None = None) -> Contract:
        """Return a trainer pass's contract, with gaps filled from the model's config or defaults. An engine's contract
        is ignored, since a replay does not run its code. Raises CannotReplay."""
        pass_name = pass_name or self.replayed_pass
        contract = self.contract(pass_name, digest) if pass_name != ROLLOUT else {}
        config, own = self.model["config"], str(contract.get("dtype")).removeprefix("torch.")
        of_config = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        dtype = own if own in DTYPES else of_config
        given = contract.get("model") or {}
        model = {"dtypes": {dtype: 1}, "attention": "sdpa"} | (given if isinstance(given, dict) else {"dtypes": given})
        whole = {"torch": {}, "temperature": 1.0} | contract | {"model": model}
        check_contract(whole, f"{self.store.url}: pass {pass_name!r}")
        return whole

    def arms(self, pass_name: str) -> list[Contract]:
        folder = f"{PASSES}/{pass_name}"
        return [self.contract(pass_name, name.removesuffix(".json")) for name in self.store.files(folder)]

    @cached_property
    def has_routing(self) -> bool:
        routed = (ds.field("pass") == self.replayed_pass) & ds.field("routing").is_valid()
        return bool(self.table(SCORES, routed, ["step"]).num_rows)

    def check_routing(self) -> None:
        if self.has_routing:
            return
        if not has_experts(self.model["config"]):
            raise CannotReplay(
                f"the model in {self.store.url} is not a mixture of experts; replay it without routing=recorded"
            )
        raise CannotReplay(
            f"routing=recorded: {self.store.url} has no router choices for pass {self.replayed_pass!r}; record them "
            "with tim-trace record --routing, or Recorder.add_scores(routing=...)"
        )

    def check_adapter(self, adapter: str | None) -> None:
        if adapter is not None and not self.model.get("adapters"):
            raise CannotReplay(f"the model in {self.store.url} has no adapters; replay it without adapter={adapter}")

    def routing(self, rows: Sequence[RecordedRow]) -> list[Routing]:
        places = []
        for row in rows:
            if row.routing is None or row.routing_start is None:
                raise CannotReplay(f"routing=recorded: {self.store.url}: sequence {row.seq_id!r} has no router choices")
            places.append((row.routing, row.routing_start, len(row.prompt_ids) + len(row.response_ids)))
        return read_routing(self.store, places)

    def step(self, step: int, pass_name: str | None = None) -> list[RecordedRow]:
        pass_name = pass_name or self.replayed_pass
        if not 0 <= step < 1 << 40:
            raise CannotReplay(f"{self.store.url}: step {step:,} is out of range; the trace may be damaged")
        named = ["seq_id", "prompt_ids", "response_ids", "policy_version"]
        sequences = self.table(SEQUENCES, ds.field("step") == step, named)
        columns = [
            "seq_id", "logprobs", "policy_version", "iteration", "contract", "writer",
            "forward_id", "forward_row", "pad_left", "pad_right", "routing", "routing_start", "attempt",
        ]  # fmt: skip
        scores = self.table(SCORES, (ds.field("step") == step) & (ds.field("pass") == pass_name), columns)
        tokens = {
            seq_id.as_py(): (np.asarray(prompt.values), np.asarray(response.values), version.as_py())
            for seq_id, prompt, response, version in zip(*sequences.columns, strict=True)
            if prompt.is_valid
        }
        rows = [self._row(step, pass_name, scores, index, tokens) for index in range(scores.num_rows)]
        if not rows:
            raise CannotReplay(f"{self.store.url}: step {step} has no scores for pass {pass_name!r}")
        return sorted(rows, key=lambda row: (row.writer, row.forward_id, row.forward_row))

    def _row(
        self, step: int, pass_name: str, scores: pa.Table, index: int,
        tokens: dict[str, tuple[np.ndarray, np.ndarray, int | None]],
    ) -> RecordedRow:  # fmt: skip
        given = {name: scores[name][index].as_py() for name in scores.column_names if name != "logprobs"}
        assumed = ""
        if given["policy_version"] is None and given["seq_id"] in tokens:
            given["policy_version"] = tokens[given["seq_id"]][2]
            assumed = "" if pass_name == ROLLOUT else "the version that sampled the sequence"
        if given["policy_version"] is None and len(versions := self.weights.versions) == 1:
            given["policy_version"], assumed = versions[0], "the only version with weights"
        known = all(given[name] is not None for name in _COMPOSITION)
        if not known:
            given |= {"forward_id": index, "forward_row": 0, "pad_left": 0, "pad_right": 0}
        lacking = [name for name, value in given.items() if value is None and name not in _UNNEEDED]
        if given["seq_id"] not in tokens:
            lacking.append("prompt_ids")
        if lacking:
            is_bare = "policy_version" in lacking and not self.weights.versions
            raise CannotReplay(
                f"{self.store.url}: step {step}, sequence {given['seq_id']!r}, pass {pass_name!r}: the trace "
                f"does not contain {', '.join(lacking)}, so the forward pass cannot be rebuilt"
                + ("; attach the weights: tim-trace weights RUN --attach 0 DIR" if is_bare else "")
            )
        prompt_ids, response_ids, _ = tokens[given["seq_id"]]
        logprobs, scored = np.zeros(len(response_ids), np.float32), np.zeros(len(response_ids), bool)
        if (recorded := scores["logprobs"][index]).is_valid:
            scored = np.asarray(recorded.values.is_valid())
            logprobs = np.asarray(recorded.values.fill_null(0.0))
        return RecordedRow(
            prompt_ids=prompt_ids, response_ids=response_ids, logprobs=logprobs, scored=scored,
            version_assumed=assumed, composition_known=known, **given,
        )  # fmt: skip

    def table(self, table: str, condition: ds.Expression, columns: list[str]) -> pa.Table:
        """Read the columns for all matching rows, using only the newest attempt at each step."""
        paths = [name.removeprefix(f"{PROTOCOL}://") for name in self._names[table]]
        schema = TABLES[table].schema
        if not paths:
            return pa.schema([schema.field(name) for name in columns]).empty_table()
        files = PyFileSystem(FSSpecHandler(self._files))
        wanted = [*columns, *(name for name in ("step", "attempt") if name not in columns)] if self.newest else columns
        try:
            rows = ds.dataset(paths, schema=schema, format="parquet", filesystem=files).to_table(
                wanted, filter=condition
            )
        except (pa.ArrowException, OSError) as error:
            where = ", ".join(self.store.shown(name) for name in paths[:1])
            raise self._files.error or DamagedTrace(
                f"{where} cannot be read ({first_line(error)}). Restore the file from a backup"
            ) from error
        if not self.newest:
            return rows
        newest = pa.array([self.newest.get(step) for step in rows["step"].to_pylist()], pa.int32())
        return rows.filter(pc.fill_null(pc.equal(rows["attempt"], newest), True)).select(columns)

    def records(self, table: str, condition: ds.Expression, columns: list[str]) -> Iterator[tuple[Any, ...]]:
        found = self.table(table, condition, columns)
        return zip(*(found[name].to_pylist() for name in columns), strict=True)


def assumed_versions(rows: Sequence[RecordedRow]) -> list[str]:
    found = {row.version_assumed: row.policy_version for row in rows if row.version_assumed}
    return [f"policy version not recorded, assumed to be {version} ({assumed})" for assumed, version in found.items()]
