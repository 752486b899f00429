from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.dataset as ds

from ..schemas.capture import Capture
from ..schemas.documents import Contract, canonical_json, differences
from ..schemas.layout import DENSE, PASSES, SCORES, WRITERS, Segment
from ..schemas.passes import REPLAY_PREFIX
from ..tracer.batch import Batch
from ..tracer.recorder import Recorder
from ..tracer.routing import joined
from ..tracer.rows import Forward
from ..tracer.snapshot import Snapshot
from ..tracer.whole_file import alone, write_part
from ..tracer.writer import TraceWriter
from .arms import Arm
from .batching import Scored
from .recorded import RecordedRow, RecordedRun


class ArmPass:
    def __init__(self, run: RecordedRun, arm: Arm):
        self.run, self.arm = run, arm
        self.name = REPLAY_PREFIX + arm.name
        self._recorder: Recorder | None = None
        self._scored_steps: tuple[Snapshot | None, set[int]] = (None, set())

    @property
    def steps(self) -> list[int]:
        return self.run.steps(self.name)

    def scored(self, step: int, rows: Sequence[RecordedRow], contract: Contract | None = None) -> Scored | None:
        """Return the stored scores of `rows`, skipping rows without scores. With `contract`, return None unless all
        rows have scores and every contract setting that affects logprobs is the same."""
        own = {row.seq_id: row for row in self.run.step(step, self.name)}
        kept = [row for row in rows if row.seq_id in own]
        if contract is not None:
            now = json.loads(canonical_json(contract))
            digests = {own[row.seq_id].contract for row in kept}
            if len(kept) < len(rows) or any(
                any(differences(self.run.contract(self.name, one), now)) for one in digests
            ):
                return None
        return Scored(rows=kept, logprobs=[own[row.seq_id].logprobs for row in kept])

    def add(self, step: int, scored: Scored, contract: Contract) -> None:
        """Add a step's scores as one record, so that a killed replay never leaves a partial step. Sequences already
        scored by a concurrent replay are skipped."""
        with alone(self.run.folder):
            unscored = {row.seq_id for row in scored.rows} - self._scored_now(step)
            if unscored:
                self._record(step, scored.only(unscored), contract)

    def _scored_now(self, step: int) -> set[str]:
        own = set() if self._recorder is None else {self._recorder.writer.name}
        ended = {name for name, found in self.run.snapshot.liveness.items() if not found.is_alive}
        if {name.removesuffix(".json") for name in self.run.store.files(WRITERS)} - ended - own:
            self.run.look()
        if self._scored_steps[0] is not self.run.snapshot:
            self._scored_steps = self.run.snapshot, {*self.steps, *(step for step, _ in self.run.unsealed(self.name))}
        return self.run.sequences(self.name, [step])[step] if step in self._scored_steps[1] else set()

    def _record(self, step: int, scored: Scored, contract: Contract) -> None:
        if self._recorder is None:
            self._recorder = Recorder.of_writer(TraceWriter(self.run.folder), Capture())
        self._recorder.add_contract(self.name, contract)
        batch = Batch(step, [row.seq_id for row in scored.rows], attempt=scored.rows[0].attempt)
        responses_B = np.array([len(row.response_ids) for row in scored.rows])
        batch.resolve(responses_B, None, np.array([len(row.prompt_ids) for row in scored.rows]))
        stale, forward = self.arm.weights_version, None
        if scored.batches:
            paddings = [batch.padding() for batch in scored.batches]
            forward = forward_of(paddings, (step << 20) % 2**63, scored.kept)
        self._recorder.add_scores(
            self.name, batch, logprobs=[value.astype(np.float32) for value in scored.logprobs],
            scored_mask=[row.scored for row in scored.rows],
            policy_version=np.array([row.policy_version for row in scored.rows]) if stale is None else stale,
            forward=forward, routing=joined(scored.routing),
        )  # fmt: skip
        self._recorder.flush()

    def remove(self) -> None:
        """Delete every writer's files for this pass. The writers are first marked as removed, so that readers ignore
        any files that remain if this process is killed."""
        folder, store = self.run.folder, self.run.store
        began = f"{PASSES}/{self.name}/"
        writers = {state.writer for state in store.writers()[0] if any(file.startswith(began) for file in state.files)}
        sealed = self.run.table(SCORES, ds.field("pass") == self.name, ["writer"])["writer"].to_pylist()
        for name in sorted({*writers, *sealed}):
            path = f"{WRITERS}/{name}.json"
            state = store.writer(name, self.run.manifest)
            write_part(folder, path, replace(state, is_removed=True).to_json().encode())
            for file in (*store.files(SCORES), *store.folders(DENSE)):
                if (segment := Segment.parse(file.removesuffix(".parquet"))) is not None and segment.writer == name:
                    (folder / SCORES / file).unlink(missing_ok=True)
                    shutil.rmtree(folder / DENSE / file, ignore_errors=True)
            (folder / path).unlink(missing_ok=True)
        for name in store.files(f"{PASSES}/{self.name}"):
            (folder / PASSES / self.name / name).unlink(missing_ok=True)
        self.run.look()

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()


def forward_of(paddings: Sequence[tuple[Any, Any]], first_id: int = 0, kept: Any = slice(None)) -> Forward:
    """Describe consecutive forward passes, given each one's left and right padding [B]. `kept` selects rows."""
    sizes = [len(left) for left, _ in paddings]
    left, right = (np.concatenate(side)[kept] for side in zip(*paddings, strict=True))
    return Forward(
        ids=first_id + np.repeat(np.arange(len(sizes)), sizes)[kept],
        places=np.concatenate([*map(np.arange, sizes)])[kept],
        rows=np.repeat(sizes, sizes)[kept],
        pad_left=left,
        pad_right=right,
    )
