"""`tim-trace replay`: score recorded tokens again, under other numerics, and write what comes out as a pass."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..schemas.capture import Capture
from ..schemas.contract import Contract
from ..schemas.errors import CannotReplay, InvalidOption
from ..schemas.layout import PASSES, SCORES, WRITERS
from ..schemas.passes import REPLAY_PREFIX, TRAIN
from ..tracer.batch import Batch
from ..tracer.progress import Progress, no_progress
from ..tracer.recorder import Recorder
from ..tracer.rows import Forward
from ..tracer.weights.source import open_weights
from ..tracer.writer import TraceWriter
from .arms import AS_RECORDED, Arm, named, parse_arm
from .batching import ForwardBatch, check_tokens
from .differences import differences
from .loaded import LoadedModel
from .recorded import RecordedRow, RecordedRun
from .results import ReplayedStep
from .scored import Scored
from .scorers import ArmScorer, scorer_of
from .steps import parse_steps
from .vllm_scorer import VllmScorer


@dataclass(slots=True)
class _Wanted:
    """An arm and the steps that are still to be done."""

    scorer: ArmScorer | VllmScorer
    steps: list[int]
    done: set[int]
    """Steps that the trace has of this arm already."""
    recorder: Any = None


def replay(
    trace: str | os.PathLike[str],
    *,
    steps: str = "all",
    arm: Sequence[str] = (),
    force: bool = False,
    progress: Progress = no_progress,
    **changes: Any,
) -> list[ReplayedStep]:
    """Score recorded steps again, under other numerics, and write each arm as a pass replay/<arm>.

    `changes` are one arm's, by the names of `Arm`; `arm` holds further ones as text (`dtype=fp16,batch-size=1`). The
    recording itself is always replayed first, as `replay/as-recorded`: another arm's distance says something only where
    that gives the recorded bits back. Steps that an arm has already are not done again; an arm that has them all is
    refused without `force`, and so is one whose name stands for other changes. One model is in memory at a time.

    Raises CannotReplay, WeightsMissing, DamagedTrace, InvalidOption, TraceNotFound.
    """
    arms = _arms(arm, changes)
    run = RecordedRun(trace)
    chosen = parse_steps(steps, run.steps(TRAIN))
    device = _device()
    wanted = _wanted(run, arms, chosen, device, force)
    weights = open_weights(run.store)
    results: list[ReplayedStep] = []
    held: dict[int, bool] = {}
    total = sum(len(entry.steps) for entry in wanted)
    try:
        with progress("replaying", total) as advance:
            for group in _by_key(wanted):
                for result in _group(run, group, weights, held):
                    results.append(result)
                    advance(1)
    finally:
        for entry in wanted:
            if entry.recorder is not None:
                entry.recorder.close()
    return results


def _arms(texts: Sequence[str], changes: dict[str, Any]) -> list[Arm]:
    own = Arm(**{key: value for key, value in changes.items() if value is not None})
    arms = [parse_arm(text) for text in texts]
    if not own.is_identity or changes.get("name"):
        arms.insert(0, own)
    arms = [named(Arm(), AS_RECORDED), *(arm for arm in arms if not arm.is_identity)]
    names = [arm.name for arm in arms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidOption(f"arm: {', '.join(twice)} is named twice; give each arm a name of its own with name=")
    return arms


def _wanted(run: RecordedRun, arms: list[Arm], steps: list[int], device: str, force: bool) -> list[_Wanted]:
    """What is to be done of each arm; everything that can be refused is, before anything is removed."""
    contract = _contract(run, steps)
    scorers = [scorer_of(run, arm, contract, device) for arm in arms]
    needed = {arm.weights_version for arm in arms if arm.weights_version is not None}
    missing = sorted((needed | {run.step(steps[0])[0].policy_version}) - set(open_weights(run.store).versions))
    if missing:
        open_weights(run.store).load(missing[0])  # raises, and says what there is
    wanted = []
    for arm, scorer in zip(arms, scorers, strict=True):
        pass_name = REPLAY_PREFIX + arm.name
        serves_others = arm.is_identity and len(arms) > 1
        done = set() if force and not serves_others else set(run.steps(pass_name))
        if done and any(found.get("arm") != arm.changes for found in run.arms(pass_name)):
            raise InvalidOption(
                f"{pass_name} is there already with other changes; choose a name (--name), or replace it with --force"
            )
        left = [step for step in steps if step not in done]
        if not left and not serves_others:
            raise InvalidOption(
                f"{pass_name} has all of these steps already; look at it (tim-trace stats RUN --pair {pass_name}:train), "
                "or replace it with --force"
            )
        # The identity arm is computed for every step that another arm is: its bits are what that arm is judged by.
        wanted.append(_Wanted(scorer, steps if arm.is_identity else left, done))
    for entry in wanted:
        if force and not entry.done:
            _remove(run, REPLAY_PREFIX + entry.scorer.arm.name)
    return wanted


def _contract(run: RecordedRun, steps: list[int]) -> Contract:
    """The contract of the recorded `train` pass; a step that was scored under several is refused."""
    digests = {row.contract for row in run.step(steps[0])}
    if len(digests) != 1:
        raise CannotReplay(
            f"{run.store.url}: step {steps[0]} was scored under {len(digests)} contracts; which one held?"
        )
    contract = run.contract(TRAIN, digests.pop())
    # A loop of the user's own says of its model what it likes; what it does not say is taken from the model's config.
    config = run.model["config"]
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    model = {"dtypes": {dtype: 1}, "attention": "sdpa"} | dict(contract.get("model") or {})
    return {"torch": {}, "temperature": 1.0} | contract | {"model": model}


def _check_contract(run: RecordedRun, step: int, rows: list[RecordedRow], contract: Contract) -> None:
    """Raise CannotReplay when a step was scored under another contract than the first."""
    for digest in {row.contract for row in rows}:
        found = list(differences({**contract, **run.contract(TRAIN, digest)}, contract))
        if found:
            raise CannotReplay(
                f"{run.store.url}: step {step} was scored under another contract than the first step ({found[0]}); "
                "replay such steps apart, with --steps"
            )


def _by_key(wanted: list[_Wanted]) -> Iterator[list[_Wanted]]:
    """Arms that share a model, the identity arm's first."""
    keys = list(dict.fromkeys(entry.scorer.key for entry in wanted))
    for key in keys:
        yield [entry for entry in wanted if entry.scorer.key == key]


def _group(run: RecordedRun, group: list[_Wanted], weights: Any, held: dict[int, bool]) -> Iterator[ReplayedStep]:
    loaded = LoadedModel(weights)
    for step in sorted({step for entry in group for step in entry.steps}):
        rows = run.step(step)
        check_tokens(rows, run.model["config"])
        _check_contract(run, step, rows, group[0].scorer.contract)
        for entry in group:
            if step in entry.steps:
                yield _step(run, entry, step, loaded.score(entry.scorer, rows), held)


def _step(run: RecordedRun, entry: _Wanted, step: int, scored: Scored, held: dict[int, bool]) -> ReplayedStep:
    scorer, (order, values, batches) = entry.scorer, scored
    contract = scorer.made_by()
    if step not in entry.done:
        _write(run, entry, step, order, values, batches, contract)
    recorded = np.concatenate([row.logprobs[row.scored] for row in order])
    replayed = np.concatenate([value[row.scored] for row, value in zip(order, values, strict=True)])
    same = recorded.view(np.uint32) == replayed.astype(np.float32).view(np.uint32)
    d = replayed.astype(np.float64) - recorded.astype(np.float64)
    if scorer.arm.is_identity:
        held[step] = bool(same.all())
    return ReplayedStep(
        arm=scorer.arm.name,
        step=step,
        num_tokens=len(d),
        num_equal=int(same.sum()),
        mean_abs_d=float(np.abs(d).mean()) if len(d) else 0.0,
        max_abs_d=float(np.abs(d).max(initial=0.0)),
        identity_held=held[step],
        differs=_differs(scorer, order, contract) if scorer.arm.is_identity and not held[step] else (),
    )


def _differs(scorer: ArmScorer | VllmScorer, rows: list[RecordedRow], contract: Contract) -> tuple[str, ...]:
    """Why the recorded bits did not come back, as far as the trace tells."""
    unknown = not all(row.composition_known for row in rows)
    words = ("batch composition: not recorded, now one row a forward",) if unknown else ()
    return (*words, *differences(scorer.contract, contract))


def _write(
    run: RecordedRun,
    entry: _Wanted,
    step: int,
    rows: list[RecordedRow],
    values: list[np.ndarray],
    batches: list[ForwardBatch],
    contract: Contract,
) -> None:
    """Add the step to the arm's pass, in one record: a killed replay has it whole or not at all."""
    if entry.recorder is None:
        entry.recorder = Recorder.of_writer(TraceWriter(run.folder), Capture.parse("logprobs", 1.0))
    pass_name = REPLAY_PREFIX + entry.scorer.arm.name
    entry.recorder.add_contract(pass_name, contract)
    batch = Batch(step, [row.seq_id for row in rows])
    batch.resolve(np.array([len(row.response_ids) for row in rows]), None)
    versions = [row.policy_version for row in rows]
    stale = entry.scorer.arm.weights_version
    entry.recorder.add_scores(
        pass_name,
        batch,
        logprobs=[value.astype(np.float32) for value in values],
        scored_mask=[row.scored for row in rows],
        policy_version=np.array(versions) if stale is None else stale,
        forward=_forward_columns(step, batches) if batches else None,
    )
    entry.recorder.writer.drain()


def _forward_columns(step: int, batches: list[ForwardBatch]) -> Forward:
    sizes = [len(batch.rows) for batch in batches]
    ids = np.repeat(np.arange(len(batches)), sizes) + (step << 20)
    widths = np.repeat([batch.ids_BW.shape[1] for batch in batches], sizes)
    rows = [row for batch in batches for row in batch.rows]
    firsts = np.concatenate([batch.first_B for batch in batches])
    left = firsts - [len(row.prompt_ids) for row in rows]
    right = widths - firsts - [len(row.response_ids) for row in rows]
    return Forward(
        ids=ids.astype(np.int64),
        places=np.concatenate([np.arange(size) for size in sizes]).astype(np.int32),
        rows=np.repeat(sizes, sizes).astype(np.int32),
        pad_left=left.astype(np.int32),
        pad_right=right.astype(np.int32),
    )


def _remove(run: RecordedRun, pass_name: str) -> None:
    """Remove an arm's pass: the files of the writers that wrote it, which wrote nothing else."""
    for writer in run.writers_of(pass_name):
        for name in run.store.files(SCORES):
            if name.startswith(f"{writer}-"):
                (run.folder / SCORES / name).unlink()
        (run.folder / WRITERS / f"{writer}.json").unlink(missing_ok=True)
    shutil.rmtree(run.folder / PASSES / pass_name, ignore_errors=True)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
