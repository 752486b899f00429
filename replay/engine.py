"""`tim-trace replay`: rescore recorded tokens under different numerics."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from math import nan
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ..schemas.documents import differences
from ..schemas.errors import CannotReplay, InvalidOption, TimTraceError, option
from ..schemas.lazy import check_arguments
from ..schemas.passes import REPLAY_PREFIX, ROLLOUT, TRAIN
from ..schemas.steps import parse_steps
from ..tracer.cluster import connected, run_units
from ..tracer.progress import Advance, Progress, no_progress, unheard
from ..tracer.seal import adopt
from ..tracer.store import first_line
from .arm_pass import ArmPass
from .arms import AS_RECORDED, Arm, check_distinct, parse_arm
from .backends.trusted import CONDITIONS, OTHER_INPUTS, REFUSED, ROUNDING_NATS, UNEXPLAINED, check_scoring
from .batching import Scored, check_tokens
from .loaded import LoadedModel, Scorer, device_here, gpus_of_actor, scorer_of
from .recorded import RecordedRow, RecordedRun, assumed_versions
from .results import ArmPlan, ReplayedStep, ReplayedSteps, ReplayPlan
from .sample import Row, Sample, draw_sample, extents, parse_sample


@dataclass(slots=True)
class _PendingArm:
    scorer: Scorer
    target: ArmPass
    steps: list[int]
    scored_before: dict[int, set[str] | None]
    """Sequences that this arm has already scored, by step. None for a step that it has scored completely."""
    is_replaced: bool = False
    """True if an existing pass for this arm must be removed first."""

    def unscored(self, step: int, rows: Sequence[Row]) -> list[Row]:
        scored_before = self.scored_before.get(step, set())
        return [] if scored_before is None else [row for row in rows if row.seq_id not in scored_before]


def replay(
    trace: str | os.PathLike[str], *, steps: str = "all", sample: str | float | None = None,
    arm: Sequence[str | Arm] = (), model_factory: str | None = None, weights_from: str | os.PathLike[str] | None = None,
    allow_kernel: Sequence[str] = (), force: bool = False, dry_run: bool = False, ray: str | None = None,
    gpus_per_arm: float | None = None, progress: Progress = no_progress, **changes: Any,
) -> ReplayedSteps:  # fmt: skip
    """Score recorded steps again under different numerics, and write each arm as pass replay/<arm>.

    `changes` are `Arm` fields and define one arm. `arm` adds more arms as text: `dtype=fp16,batch-size=1`. The
    unchanged recording is always replayed first as `replay/as-recorded`. Trust differences in other arms only if this
    replay reproduces the recorded bits. Steps that an arm has already scored are skipped. Without `force`, an arm that
    has already scored all steps is refused, and so is an arm whose name was already used for different changes.

    `sample` draws whole prompt groups across all steps: a fraction of the sequences if below 1, otherwise about that
    many sequences. A trace always gives the same sample, and a larger sample includes every smaller one. Arms that keep
    the recorded batches still run whole forward passes, because the rest of the batch can change a sequence's logprobs.

    `model_factory` names a function (`module:function`) that builds models missing from transformers. `weights_from` is
    the run's checkpoint folder, needed if the trace has no weights.

    A trace cannot make a replay run code: the model must be one of transformers' own classes, and the scoring function
    must be TRL's. A recorded attention kernel from the hub (`kernels-community/flash-attn2`) runs only if
    `allow_kernel` names it. Recorded attention or experts that do not run here are replaced by torch's own, and a
    warning says so. If the recording cannot be replayed at all, the other arms still run. In the results, `not_held`
    gives the reason if bits differ.

    `dry_run` writes nothing. It scores the first rows in each arm and returns a `plan` that estimates the remaining
    work and time.

    `ray` distributes the steps across a Ray cluster: `local` starts one here, and `auto` or `host:port` connects to a
    running one. Every node needs the trace at the same path. The bits are the same as in a single process. If a node
    dies, another takes over its step. `gpus_per_arm` is the number of GPUs per actor, or a fraction. The default is 1
    if this machine has a GPU, else 0.

    Raises CannotReplay, WeightsMissing, DamagedTrace, InvalidOption, TraceNotFound, NotInstalled.
    """
    if dry_run and ray is not None:
        raise InvalidOption("measures the speed in this process, so it cannot be combined with ray", option="dry_run")
    gpus = gpus_of_actor(ray, gpus_per_arm)
    device = device_here() if ray is None else "cuda" if gpus else "cpu"
    arms = _arms(arm, changes)
    run = RecordedRun(trace, model_factory=model_factory, weights_from=weights_from, allow_kernel=allow_kernel)
    chosen = parse_steps(steps, run.steps(run.replayed_pass))
    drawn = None if sample is None else draw_sample(run, parse_sample(sample), chosen)
    wanted = _pending_arms(run, arms, chosen, force, drawn, device, dry_run=dry_run)
    plan = _plan(run, wanted, drawn)
    results = ReplayedSteps(sample=drawn, plan=plan, replayed_pass=run.replayed_pass)
    if dry_run:
        _measure(run, wanted, plan, drawn)
        return results
    with connected(ray):  # connect first, so that no pass is removed if the cluster is unreachable
        for entry in wanted:
            if entry.is_replaced:
                entry.target.remove()
        with progress("replaying", sum(arm.num_tokens for arm in plan)) as advance:
            results.extend(_results(run, wanted, drawn, device, ray, gpus, advance))
    return results


def _arms(given: Sequence[str | Arm], changes: dict[str, Any]) -> list[Arm]:
    options = {key: value for key, value in changes.items() if value is not None}
    check_arguments(Arm, options, name="replay")
    own = Arm(**options)
    arms = [single if isinstance(single, Arm) else parse_arm(single) for single in given]
    if not own.is_identity or changes.get("name"):
        arms.insert(0, own)
    arms = [Arm(), *(arm for arm in arms if not arm.is_identity)]
    check_distinct([arm.name for arm in arms])
    return arms


def _pending_arms(
    run: RecordedRun, arms: list[Arm], steps: list[int], force: bool, sample: Sample | None, device: str, *,
    dry_run: bool,
) -> list[_PendingArm]:  # fmt: skip
    """Check the request and return the arms to replay. Must run before any existing pass is removed."""
    steps = steps if sample is None else [step for step in steps if step in sample.steps]
    first = run.step(steps[0])
    contract = run.train_contract(run.digest(first, f"step {steps[0]}"))
    if dry_run:  # measure tim-trace's own code: it is as fast as TRL's, which is slow to import
        check_scoring(contract)
        contract |= {"fused_lm_head": None}
    scorers = [scorer_of(run, arm, contract, device) for arm in arms]
    needed = {arm.weights_version for arm in arms if arm.weights_version is not None}
    missing = sorted((needed | {first[0].policy_version}) - set(run.weights.versions))
    if missing:
        run.weights.load(missing[0])  # raises an error that lists the existing versions
    wanted: list[_PendingArm] = []
    asked: list[tuple[ArmPass, list[int]]] = []
    for arm, scorer in zip(arms, scorers, strict=True):
        target = ArmPass(run, arm)
        serves_others = arm.is_identity and len(arms) > 1
        is_replaced = force and not serves_others
        contracts = [] if is_replaced else run.arms(target.name)
        scored_before: dict[int, set[str] | None] = {}
        if any("sample" in found for found in contracts):
            whole, own = run.sequences(run.replayed_pass, steps), run.sequences(target.name, steps)
            scored_before = {step: None if own[step] >= whole[step] else own[step] for step in steps if own[step]}
        elif not is_replaced:
            scored_before = dict.fromkeys(target.steps)
        if target.steps and any(found.get("arm") != arm.changes for found in contracts):
            raise InvalidOption(
                f"{target.name} already exists with different changes; choose another name ({option('name', 'NAME')}), "
                f"or replace it with {option('force')}"
            )
        left = [
            step for step in steps
            if (names := scored_before.get(step, set())) is not None
            and (sample is None or not names >= sample.steps[step].keys())
        ]  # fmt: skip
        if not serves_others:
            asked.append((target, left))
        # The as-recorded arm (the baseline of the others) and every arm with a sample cover all steps. Other arms cover
        # only the steps that they have not scored yet.
        asked_steps = steps if arm.is_identity or sample is not None else left
        wanted.append(_PendingArm(scorer, target, asked_steps, scored_before, is_replaced))
    if not any(left for _, left in asked):
        name = asked[0][0].name
        raise InvalidOption(
            f"{name} has already scored all of these {'steps' if sample is None else 'sequences'}; view the scores "
            f"(tim-trace stats RUN --pair {name}:{run.replayed_pass}), or replace them with {option('force')}"
        )
    return wanted


def _plan(run: RecordedRun, wanted: list[_PendingArm], sample: Sample | None) -> ReplayPlan:
    plans = [ArmPlan(arm=entry.scorer.arm.name) for entry in wanted]
    loaded: dict[str, int] = {}
    steps = [set(entry.steps) for entry in wanted]
    for step, rows in extents(run, sorted(set().union(*steps))):
        drawn = rows if sample is None else sample.drawn(step, rows)
        for entry, plan, own in zip(wanted, plans, steps, strict=True):
            if step not in own:
                continue
            unscored = entry.unscored(step, drawn)
            forwards = {row.forward for row in unscored}
            running = [row for row in rows if row.forward in forwards] if entry.scorer.arm.keeps_batches else unscored
            stale = entry.scorer.arm.weights_version
            plan.num_steps += bool(unscored)
            plan.num_sequences += len(unscored)
            plan.num_tokens += sum(row.num_tokens for row in running)
            for version in sorted({row.version if stale is None else stale for row in running}):
                plan.num_versions += version != loaded.get(plan.arm)
                loaded[plan.arm] = version
    return ReplayPlan(plans)


def _measure(run: RecordedRun, wanted: list[_PendingArm], plan: ReplayPlan, sample: Sample | None) -> None:
    unmeasured = {arm.arm: arm for arm in plan if arm.num_tokens}
    for group in _by_key([entry for entry in wanted if entry.scorer.arm.name in unmeasured]):
        with closing(LoadedModel(run.weights)) as loaded:
            for entry in group:
                scorer, step = entry.scorer, entry.steps[0]
                rows = run.step(step)
                check_tokens(rows, run.model["config"])
                first = scorer.first(scorer.together(rows if sample is None else sample.drawn(step, rows), rows))
                loaded.score(scorer, first, unheard)  # warm-up
                start = perf_counter()
                loaded.score(scorer, first, unheard)
                arm = unmeasured[scorer.arm.name]
                arm.tokens_per_s = sum(row.num_tokens for row in first) / max(perf_counter() - start, 1e-9)
                arm.load_s = loaded.load_s


def _by_key(wanted: list[_PendingArm]) -> list[list[_PendingArm]]:
    groups: dict[Any, list[_PendingArm]] = {}
    for entry in wanted:
        groups.setdefault(entry.scorer.key, []).append(entry)
    return list(groups.values())


def replay_missing(
    run: RecordedRun, arms: Sequence[Arm], steps: Sequence[int], progress: Progress, *, ray: str | None = None,
    gpus_per_arm: float | None = None,
) -> ReplayedSteps | None:  # fmt: skip
    """Replay `steps` with each arm that has not scored all of them. Return None if there is nothing to replay."""
    lacking = [arm for arm in arms if not set(steps) <= set(run.steps(REPLAY_PREFIX + arm.name))]
    if not lacking:
        return None
    found = replay(
        run.store.url, steps=",".join(map(str, steps)), arm=lacking, model_factory=run.model_factory, weights_from=run.weights_from,
        allow_kernel=run.allow_kernel, progress=progress, ray=ray, gpus_per_arm=gpus_per_arm,
    )  # fmt: skip
    run.look()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    step: int
    arms: dict[str, dict[int, set[str] | None]]

    def __str__(self) -> str:
        return f"step {self.step} under {', '.join(self.arms)}"


class _UnitScorer:
    """Scores units (one step under a set of arms) here, or in a Ray actor that opens the trace at its first unit."""

    def __init__(
        self, run: RecordedRun, wanted: list[_PendingArm], sample: Sample | None, device: str, advance: Advance | None
    ):
        self._opening = run.opening
        self._arms = [entry.scorer.arm for entry in wanted]
        self._contract, self._device, self._threads = wanted[0].scorer.contract, device, torch.get_num_threads()
        self._sample, self._advance, self._tries_versions = sample, advance, True
        self._opened: tuple[RecordedRun, LoadedModel, dict[str, tuple[Scorer, ArmPass]]] | None = None
        if advance is not None:
            arms = {entry.scorer.arm.name: (entry.scorer, entry.target) for entry in wanted}
            self._opened = run, LoadedModel(run.weights), arms

    def run(self, unit: _Unit) -> tuple[list[ReplayedStep], int]:
        """Score a unit and write its scores. Return the results and the number of tokens to add to the progress bar (0
        outside an actor, where the bar advances during scoring)."""
        if self._opened is None:
            torch.set_num_threads(self._threads)
            run = RecordedRun(**self._opening)
            scorers = [scorer_of(run, arm, self._contract, self._device) for arm in self._arms]
            arms = {scorer.arm.name: (scorer, ArmPass(run, scorer.arm)) for scorer in scorers}
            self._opened = run, LoadedModel(run.weights), arms
        (run, loaded, arms), step = self._opened, unit.step
        rows = run.step(step)
        check_tokens(rows, run.model["config"])
        for digest in {row.contract for row in rows}:
            found = list(differences(run.train_contract(digest), self._contract))
            if found:
                raise CannotReplay(
                    f"{run.store.url}: step {step} and the first step have different contracts ({found[0]}); replay "
                    f"them separately with {option('steps', 'FIRST:LAST')}"
                )
        tokens: list[int] = []
        results = []
        for name, scored_before in unit.arms.items():
            entry = _PendingArm(*arms[name], [step], scored_before)
            try:
                scored = _scored(entry, step, rows, self._sample, loaded, self._advance or tokens.append)
            except RuntimeError as error:  # raised by torch, or CannotReplay (a RuntimeError)
                # If the as-recorded arm cannot run, note the error and go on with the other arms.
                if name != AS_RECORDED or len(self._arms) == 1:
                    raise
                results.append(ReplayedStep(
                    arm=name, step=step, num_tokens=0, num_equal=0, mean_abs_d=nan, max_abs_d=nan,
                    identity_held=False, not_held=REFUSED, differs=(first_line(error),),
                ))  # fmt: skip
            else:
                result = _step(entry.scorer, step, scored)
                if result.not_held == OTHER_INPUTS and self._tries_versions:
                    self._tries_versions = False
                    result = replace(result, fitting_version=_fitting_version(entry.scorer, result, rows, loaded))
                results.append(result)
        return results, sum(tokens)

    def close(self) -> None:
        if self._opened is not None:
            _, loaded, arms = self._opened
            loaded.close()
            for _, target in arms.values():
                target.close()


def _results(
    run: RecordedRun, wanted: list[_PendingArm], sample: Sample | None, device: str, ray: str | None, gpus: float,
    advance: Advance,
) -> Iterator[ReplayedStep]:  # fmt: skip
    units = [
        _Unit(step=step, arms={
            entry.scorer.arm.name: {step: entry.scored_before[step]} if step in entry.scored_before else {}
            for entry in group if step in entry.steps
        })
        for group in _by_key(wanted)
        for step in sorted({step for entry in group for step in entry.steps})
    ]  # fmt: skip
    worker = _UnitScorer(run, wanted, sample, device, advance if ray is None else None)
    cpus = 1 if gpus else torch.get_num_threads()
    scored: dict[int, list[ReplayedStep]] = {}
    try:
        for number, (results, num_tokens) in run_units(ray, worker, units, num_cpus=cpus, num_gpus=gpus):
            scored[number] = results
            advance(num_tokens)
    finally:
        if ray is not None:
            adopt(run.folder)
    steps = [step for number in range(len(units)) for step in scored[number]]
    held = {step.step: step.not_held for step in steps if step.arm == AS_RECORDED}
    for step in steps:
        yield replace(step, identity_held=held[step.step] is None, not_held=held[step.step])


def _scored(
    entry: _PendingArm, step: int, rows: list[RecordedRow], sample: Sample | None, loaded: LoadedModel, advance: Advance
) -> Scored:
    """Return an arm's scores for a step, computing and storing any that are missing."""
    wanted = rows if sample is None else sample.drawn(step, rows)
    unscored = entry.unscored(step, wanted)
    new = {row.seq_id for row in unscored}
    scored_before = [row for row in wanted if row.seq_id not in new]
    known: Scored | None = Scored()
    if scored_before:
        known = entry.target.scored(
            step, scored_before, entry.scorer.made_by() if entry.scorer.arm.is_identity else None
        )
    if known is None:
        unscored, known = wanted, Scored()
    if not unscored:
        return known
    scored = loaded.score(entry.scorer, entry.scorer.together(unscored, rows), advance)
    scored = scored.only({row.seq_id for row in unscored})
    if new:
        own = {} if sample is None else {"sample": sample.contract}
        entry.target.add(step, scored.only(new), entry.scorer.made_by() | own)
    scored.extend(known)
    return scored


def _fitting_version(scorer: Scorer, found: ReplayedStep, rows: list[RecordedRow], loaded: LoadedModel) -> int | None:
    """Return the version, of the two nearest others, whose weights reproduce the step's first forward pass, or None."""
    first = scorer.first(rows)
    for version in sorted(scorer.run.weights.versions, key=lambda v: abs(v - first[0].policy_version))[1:3]:
        with suppress(TimTraceError, RuntimeError):  # damaged weights must not stop the replay
            scored = loaded.score(scorer, [replace(row, policy_version=version) for row in first], unheard)
            if _step(scorer, found.step, scored).mean_abs_d < found.mean_abs_d / 10:
                return version
    return None


def _step(scorer: Scorer, step: int, scored: Scored) -> ReplayedStep:
    pairs = list(zip(scored.rows, scored.logprobs, strict=True))
    recorded = np.concatenate([row.logprobs[row.scored] for row, _ in pairs])
    replayed = np.concatenate([value[row.scored] for row, value in pairs])
    same = recorded.view(np.uint32) == replayed.astype(np.float32).view(np.uint32)
    d = replayed.astype(np.float64) - recorded.astype(np.float64)
    differs: tuple[str, ...] = ()
    not_held = None
    if scorer.arm.is_identity and not same.all():
        if scorer.run.replayed_pass == ROLLOUT:
            differs += (f"pass {TRAIN!r} was not recorded, so d is relative to {ROLLOUT!r} (scored by an engine)",)
        if not all(row.composition_known for row in scored.rows):
            differs += ("batch composition was not recorded, so the replay runs one row per forward pass",)
        differs += (*assumed_versions(scored.rows), *differences(scorer.contract, scorer.made_by()))
        is_32_bit = scorer.numerics.autocast is None and scorer.numerics.dtype in ("float64", "float32")
        is_beyond = scorer.run.replayed_pass == TRAIN and np.abs(d).mean() > (0.01 if is_32_bit else ROUNDING_NATS)
        not_held = scorer.substitution or (OTHER_INPUTS if is_beyond else CONDITIONS if differs else UNEXPLAINED)
    return ReplayedStep(
        arm=scorer.arm.name, step=step, num_tokens=len(d), num_equal=int(same.sum()),
        mean_abs_d=float(np.abs(d).mean()) if len(d) else 0.0, max_abs_d=float(np.abs(d).max(initial=0.0)),
        identity_held=not_held is None, not_held=not_held, differs=differs,
    )  # fmt: skip
