"""`tim-trace replay`: score recorded tokens again, under other numerics, and write what comes out as a pass."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..schemas.arguments import check_arguments
from ..schemas.capture import Capture
from ..schemas.contract import Contract
from ..schemas.errors import CannotReplay, InvalidOption, option
from ..schemas.passes import TRAIN
from ..schemas.steps import parse_steps
from ..tracer.progress import Advance, Progress, no_progress
from .arm_pass import ArmPass
from .arms import Arm, check_distinct, parse_arm, read_arms
from .batching import check_tokens
from .differences import differences
from .loaded import LoadedModel
from .meter import Meter
from .recorded import RecordedRow, RecordedRun
from .results import ReplayedStep, ReplayedSteps
from .scored import Scored
from .scorers import Scorer, scorer_of


@dataclass(slots=True)
class _Wanted:
    """An arm and the steps that are still to be done."""

    scorer: Scorer
    target: ArmPass
    steps: list[int]
    done: set[int]
    """Steps that the trace has of this arm already."""
    work: int
    """Of one step, as `meter.work` counts."""


def replay(
    trace: str | os.PathLike[str],
    *,
    steps: str = "all",
    as_recorded: bool = False,
    arm: Sequence[str | Arm] = (),
    arm_file: str | os.PathLike[str] | None = None,
    model_factory: str | None = None,
    weights_from: str | os.PathLike[str] | None = None,
    capture: str = "logprobs",
    capture_fraction: float = 1.0,
    force: bool = False,
    progress: Progress = no_progress,
    **changes: Any,
) -> ReplayedSteps:
    """Score recorded steps again, under other numerics, and write each arm as a pass replay/<arm>.

    `changes` are one arm's, by the names of `Arm`; `arm` holds further ones (as text, `dtype=fp16,batch-size=1`), and so
    does `arm_file`, a TOML file with a table each. The recording itself is always replayed first, as
    `replay/as-recorded`: another arm's distance says something only where that gives the recorded bits back. Steps that
    an arm has already are not done again; an arm that has them all is refused without `force`, and so is one whose name
    stands for other changes. One model is in memory at a time, and arms that can share it do. `as_recorded` says that
    nothing else is wanted, and refuses a change.

    `model_factory`, as `module:function`, builds the model where transformers does not know its class. `weights_from` is the
    folder of the run's checkpoints, where the trace has no weights of its own.

    What the trace names is not called: the model is one of transformers' own classes and the scoring function TRL's, or the
    replay is refused.

    `capture` keeps more than each token's logprob (`topk:K`, `logits`, or `hidden`, the last hidden states), for the
    share `capture_fraction` of the sequences: the same ones as in a recording. The logprobs are the same bits with it.

    Raises CannotReplay, WeightsMissing, DamagedTrace, InvalidOption, TraceNotFound.
    """
    arms = _arms(arm, arm_file, changes)
    if as_recorded and len(arms) > 1:
        raise InvalidOption(f"changes nothing, and {arms[1].name} does; leave one of them out", option="as_recorded")
    run = RecordedRun(trace, model_factory=model_factory, weights_from=weights_from)
    chosen = parse_steps(steps, run.steps(TRAIN))
    wanted = _wanted(run, arms, chosen, force, Capture.parse(capture, capture_fraction))
    results = ReplayedSteps()
    held: dict[int, bool] = {}
    # Sealing what an arm added takes about as long as a step in one forward.
    sealing = min(entry.work for entry in wanted)
    total = sum(len(entry.steps) * entry.work + sealing for entry in wanted)
    with progress("replaying", total) as advance:
        try:
            for group in _by_key(wanted):
                results.extend(_group(run, group, held, advance))
        finally:
            for entry in wanted:
                entry.target.close()
                advance(sealing)
    return results


def _arms(given: Sequence[str | Arm], arm_file: str | os.PathLike[str] | None, changes: dict[str, Any]) -> list[Arm]:
    options = {key: value for key, value in changes.items() if value is not None}
    check_arguments(Arm, options, name="replay")
    own = Arm(**options)
    arms = [single if isinstance(single, Arm) else parse_arm(single) for single in given]
    arms += read_arms(arm_file) if arm_file is not None else []
    if not own.is_identity or changes.get("name"):
        arms.insert(0, own)
    arms = [Arm(), *(arm for arm in arms if not arm.is_identity)]
    check_distinct([arm.name for arm in arms])
    return arms


def _wanted(run: RecordedRun, arms: list[Arm], steps: list[int], force: bool, capture: Capture) -> list[_Wanted]:
    """What is to be done of each arm; everything that can be refused is, before anything is removed."""
    first, device = run.step(steps[0]), _device()
    contract = _contract(run, steps[0], first)
    scorers = [scorer_of(run, arm, contract, device, capture) for arm in arms]
    needed = {arm.weights_version for arm in arms if arm.weights_version is not None}
    missing = sorted((needed | {first[0].policy_version}) - set(run.weights.versions))
    if missing:
        run.weights.load(missing[0])  # raises, and says what there is
    wanted: list[_Wanted] = []
    asked: list[tuple[ArmPass, list[int]]] = []
    """Arms that were asked for, and the steps that they lack."""
    for arm, scorer in zip(arms, scorers, strict=True):
        target = ArmPass(run, arm, capture)
        serves_others = arm.is_identity and len(arms) > 1
        done = set() if force and not serves_others else set(target.steps)
        if done and target.has_other_changes:
            raise InvalidOption(
                f"{target.name} is there already with other changes; choose a name ({option('name', 'NAME')}), or replace it with {option('force')}"
            )
        left = [step for step in steps if step not in done]
        if not serves_others:
            asked.append((target, left))
        # The identity arm comes with every step that another arm has: its bits are what that arm is judged by.
        asked_steps = steps if arm.is_identity else left
        wanted.append(_Wanted(scorer, target, asked_steps, done, scorer.work(first)))
    if not any(left for _, left in asked):
        name = asked[0][0].name
        raise InvalidOption(
            f"{name} has all of these steps already; look at it (tim-trace stats RUN --pair {name}:train), or replace it with "
            f"{option('force')}"
        )
    for entry in wanted:
        if force and not entry.done:
            entry.target.remove()
    return wanted


def _contract(run: RecordedRun, step: int, rows: list[RecordedRow]) -> Contract:
    """The contract of the recorded `train` pass; a step that was scored under several is refused."""
    digests = {row.contract for row in rows}
    if len(digests) != 1:
        raise CannotReplay(f"{run.store.url}: step {step} was scored under {len(digests)} contracts; which one held?")
    return run.train_contract(digests.pop())


def _check_contract(run: RecordedRun, step: int, rows: list[RecordedRow], contract: Contract) -> None:
    """Raise CannotReplay when a step was scored under another contract than the first."""
    for digest in {row.contract for row in rows}:
        found = list(differences(run.train_contract(digest), contract))
        if found:
            raise CannotReplay(
                f"{run.store.url}: step {step} was scored under another contract than the first step ({found[0]}); "
                f"replay such steps apart, with {option('steps', 'FIRST:LAST')}"
            )


def _by_key(wanted: list[_Wanted]) -> Iterator[list[_Wanted]]:
    """Arms that share a model, the identity arm's first."""
    keys = list(dict.fromkeys(entry.scorer.key for entry in wanted))
    for key in keys:
        yield [entry for entry in wanted if entry.scorer.key == key]


def _group(run: RecordedRun, group: list[_Wanted], held: dict[int, bool], advance: Advance) -> Iterator[ReplayedStep]:
    loaded = LoadedModel(run.weights)
    try:
        for step in sorted({step for entry in group for step in entry.steps}):
            rows = run.step(step)
            check_tokens(rows, run.model["config"])
            _check_contract(run, step, rows, group[0].scorer.contract)
            for entry in group:
                if step in entry.steps:
                    meter = Meter(advance, entry.work)
                    scored = _known(entry, step, rows) or loaded.score(
                        entry.scorer, _capturing(entry, step, rows), meter.add
                    )
                    yield _step(entry, step, scored, held)
                    meter.finish()
    finally:
        loaded.close()


def _capturing(entry: _Wanted, step: int, rows: list[RecordedRow]) -> list[RecordedRow]:
    """The rows, with those marked whose distributions are kept; none of a step that the arm has already."""
    capture = entry.scorer.capture
    if not capture.dense or step in entry.done:
        return rows
    return [replace(row, captured=capture.selects(step, row.seq_id)) for row in rows]


def _known(entry: _Wanted, step: int, rows: list[RecordedRow]) -> Scored | None:
    """What the trace has of the identity arm already: it need not be computed again in the same surroundings."""
    return entry.target.scored_alike(step, rows, entry.scorer.made_by()) if step in entry.done else None


def _step(entry: _Wanted, step: int, scored: Scored, held: dict[int, bool]) -> ReplayedStep:
    scorer, contract = entry.scorer, entry.scorer.made_by()
    if step not in entry.done:
        entry.target.add(step, scored, contract)
    pairs = list(zip(scored.rows, scored.logprobs, strict=True))
    recorded = np.concatenate([row.logprobs[row.scored] for row, _ in pairs])
    replayed = np.concatenate([value[row.scored] for row, value in pairs])
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
        differs=_differs(scorer, scored.rows, contract) if scorer.arm.is_identity and not held[step] else (),
    )


def _differs(scorer: Scorer, rows: list[RecordedRow], contract: Contract) -> tuple[str, ...]:
    """Why the recorded bits did not come back, as far as the trace tells."""
    unknown = not all(row.composition_known for row in rows)
    words = ["batch composition: not recorded, now one row a forward"] if unknown else []
    if not all(row.version_known for row in rows):
        words.append(
            f"policy version: not recorded, now {rows[0].policy_version}, the only one whose weights there are"
        )
    return (*words, *differences(scorer.contract, contract))


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
