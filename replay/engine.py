"""`tim-trace replay`: score recorded tokens again under different numerics, and write the result as a pass."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import nan
from time import perf_counter
from typing import Any

import numpy as np

from ..schemas.arguments import check_arguments
from ..schemas.contract import Contract
from ..schemas.errors import CannotReplay, InvalidOption, option
from ..schemas.passes import ROLLOUT, TRAIN
from ..schemas.steps import parse_steps
from ..tracer.adopt import adopt
from ..tracer.cluster import connected, run_units
from ..tracer.progress import Advance, Progress, no_progress, unheard
from ..tracer.store import first_line
from .arm_pass import ArmPass
from .arms import AS_RECORDED, Arm, check_distinct, parse_arm
from .backends.trusted import CONDITIONS, REFUSED, UNEXPLAINED, check_scoring
from .batching import check_tokens
from .differences import differences
from .gpus import device_here, gpus_of_actor
from .loaded import LoadedModel, Scorer, scorer_of
from .plan import ArmPlan, ReplayPlan
from .recorded import RecordedRow, RecordedRun, assumed_versions
from .results import ReplayedStep, ReplayedSteps
from .sample import Sample, draw_sample, extents, parse_sample
from .scored import Scored


@dataclass(slots=True)
class _Wanted:
    """A requested arm, and the steps that still have to be scored under it."""

    scorer: Scorer
    target: ArmPass
    steps: list[int]
    there: dict[int, set[str] | None]
    """Step -> sequences that already have scores under this arm; None if every sequence has one."""
    is_replaced: bool
    """True if the existing pass of this arm is removed before the arm is scored."""
    serves_others: bool = False
    """True for the identity arm if other arms were requested. Those arms run even where the identity arm cannot."""

    def lacks(self, step: int, seq_id: str) -> bool:
        """Return True if the sequence has no score under this arm yet."""
        there = self.there.get(step, set())
        return there is not None and seq_id not in there

    def lacking(self, step: int, rows: list[RecordedRow]) -> list[RecordedRow]:
        """Return the rows in a step that have no score under this arm yet."""
        return [row for row in rows if self.lacks(step, row.seq_id)]


def replay(
    trace: str | os.PathLike[str],
    *,
    steps: str = "all",
    sample: str | float | None = None,
    arm: Sequence[str | Arm] = (),
    model_factory: str | None = None,
    weights_from: str | os.PathLike[str] | None = None,
    allow_kernel: Sequence[str] = (),
    force: bool = False,
    dry_run: bool = False,
    ray: str | None = None,
    gpus_per_arm: float | None = None,
    progress: Progress = no_progress,
    **changes: Any,
) -> ReplayedSteps:
    """Score recorded steps again under different numerics, and write each arm as a pass replay/<arm>.

    `changes` define one arm, with the field names of `Arm`; `arm` adds arms (as text, `dtype=fp16,batch-size=1`). The recording itself is always replayed first, as
    `replay/as-recorded`: the distance of another arm is meaningful only if this replay reproduces the recorded bits.
    Steps that an arm already has are skipped; without `force`, an arm that already has all steps is refused, and so is
    a name that is already used for other changes. One model is in memory at a time; arms share it if they can.

    `sample` scores a random fraction of the sequences (below 1) or this number of them (1 or more): whole prompt groups,
    spread over the steps, the same ones every time. A larger sample extends a smaller one. Arms with the recorded
    batches run whole forwards, since other neighbours would change the bits; arms with their own batch shape run only
    the sample.

    `model_factory`, as `module:function`, builds a model whose class transformers does not have. `weights_from` is the
    folder of the run's checkpoints, for a trace without weights.

    No code is run because the trace names it: the model must be one of transformers' own classes and the scoring function
    TRL's, or the replay is refused. A recorded attention kernel of the hub (`kernels-community/flash-attn2`) is fetched and
    run only if `allow_kernel` names it. If the recorded attention or experts do not run here, torch's own replace them, with
    a warning; if the recording cannot be replayed at all, the other arms still run. `not_held` gives the reason if its
    bits differ.

    `dry_run` writes nothing: it scores the first rows under each arm in this process, and returns a `plan` of the remaining
    work and time of each arm.

    `ray` distributes the steps over the actors of a Ray cluster: `local` starts one here; `auto` or `host:port` connects to
    a running one, whose nodes see the trace at the same path. The bits are those of a single process. If a node dies, its
    step is scored on another. `gpus_per_arm` is the number of GPUs per actor, or a fraction of one; by default 1 if this
    machine has a GPU, else 0.

    Raises CannotReplay, WeightsMissing, DamagedTrace, InvalidOption, TraceNotFound, NotInstalled.
    """
    if dry_run and ray is not None:
        raise InvalidOption("measures the pace in this process, so it cannot be combined with ray", option="dry_run")
    gpus = gpus_of_actor(ray, gpus_per_arm)
    device = device_here() if ray is None else "cuda" if gpus else "cpu"
    arms = _arms(arm, changes)
    run = RecordedRun(trace, model_factory=model_factory, weights_from=weights_from, allow_kernel=allow_kernel)
    chosen = parse_steps(steps, run.steps(run.replayed_pass))
    drawn = None if sample is None else draw_sample(run, parse_sample(sample), chosen)
    wanted = _wanted(run, arms, chosen, force, drawn, device, dry_run=dry_run)
    plan = _plan(run, wanted, drawn)
    if dry_run:
        _measure(run, wanted, plan, drawn)
    results = ReplayedSteps(sample=drawn, plan=plan)
    if dry_run:
        return results
    with connected(ray):  # fails before anything is removed if the cluster does not answer
        for entry in wanted:
            if entry.is_replaced:
                entry.target.remove()
        with progress("replaying", sum(arm.num_tokens for arm in plan)) as advance:
            made = (
                _here(run, wanted, advance, drawn)
                if ray is None
                else _on_cluster(run, wanted, drawn, device, ray, gpus, advance)
            )
            results.extend(made)
    return results


def _here(run: RecordedRun, wanted: list[_Wanted], advance: Advance, sample: Sample | None) -> Iterator[ReplayedStep]:
    """Yield the results of each step and arm, computed in this process."""
    held: _Held = {}
    try:
        for group in _by_key(wanted):
            loaded = LoadedModel(run.weights)
            try:
                for step in sorted({step for entry in group for step in entry.steps}):
                    yield from _step_results(run, loaded, group, step, held, advance, sample)
            finally:
                loaded.close()
    finally:
        for entry in wanted:
            entry.target.close()


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


def _wanted(
    run: RecordedRun,
    arms: list[Arm],
    steps: list[int],
    force: bool,
    sample: Sample | None,
    device: str,
    *,
    dry_run: bool,
) -> list[_Wanted]:
    """Return the remaining work for each arm. All checks run here, before any existing pass is removed."""
    steps = steps if sample is None else [step for step in steps if step in sample.steps]
    first = run.step(steps[0])
    contract = _contract(run, steps[0], first)
    if dry_run:  # Our own scoring code is as fast as TRL's, and importing TRL would take most of the time in a dry run.
        check_scoring(contract)
        contract |= {"fused_lm_head": None}
    scorers = [scorer_of(run, arm, contract, device) for arm in arms]
    needed = {arm.weights_version for arm in arms if arm.weights_version is not None}
    missing = sorted((needed | {first[0].policy_version}) - set(run.weights.versions))
    if missing:
        run.weights.load(missing[0])  # raises an error that lists the existing versions
    wanted: list[_Wanted] = []
    asked: list[tuple[ArmPass, list[int]]] = []
    """Requested arms, each with the steps in which sequences have no score yet."""
    for arm, scorer in zip(arms, scorers, strict=True):
        target = ArmPass(run, arm)
        serves_others = arm.is_identity and len(arms) > 1
        is_replaced = force and not serves_others
        there = {} if is_replaced else _there(run, target, steps)
        if not is_replaced and target.steps and target.has_other_changes:
            raise InvalidOption(
                f"{target.name} already exists with other changes; choose another name ({option('name', 'NAME')}), or replace it with {option('force')}"
            )
        left = [step for step in steps if _lacks(there, step, sample)]
        if not serves_others:
            asked.append((target, left))
        # Other arms are judged by the identity arm, so it covers all their steps. The results of a
        # sample cover all of it, including sequences that already have scores.
        asked_steps = steps if arm.is_identity or sample is not None else left
        wanted.append(_Wanted(scorer, target, asked_steps, there, is_replaced, serves_others))
    if not any(left for _, left in asked):
        name = asked[0][0].name
        raise InvalidOption(
            f"{name} already has all of these {'steps' if sample is None else 'sequences'}; show it (tim-trace stats RUN "
            f"--pair {name}:{run.replayed_pass}), or replace it with {option('force')}"
        )
    return wanted


def _plan(run: RecordedRun, wanted: list[_Wanted], sample: Sample | None) -> ReplayPlan:
    """Return the remaining work of each arm."""
    plans = [ArmPlan(arm=entry.scorer.arm.name) for entry in wanted]
    loaded: dict[str, int] = {}
    """Arm -> the version of weights that it would have loaded last."""
    steps = [set(entry.steps) for entry in wanted]
    for step, rows in extents(run, sorted(set().union(*steps))):
        drawn = rows if sample is None else [row for row in rows if row.seq_id in sample.steps[step]]
        for entry, plan, own in zip(wanted, plans, steps, strict=True):
            if step not in own:
                continue
            lacking = [row for row in drawn if entry.lacks(step, row.seq_id)]
            forwards = {row.forward for row in lacking}
            running = [row for row in rows if row.forward in forwards] if entry.scorer.keeps_batches else lacking
            stale = entry.scorer.arm.weights_version
            plan.num_steps += bool(lacking)
            plan.num_sequences += len(lacking)
            plan.num_tokens += sum(row.num_tokens for row in running)
            for version in sorted({row.version if stale is None else stale for row in running}):
                plan.num_versions += version != loaded.get(plan.arm)
                loaded[plan.arm] = version
    return ReplayPlan(plans)


def _measure(run: RecordedRun, wanted: list[_Wanted], plan: ReplayPlan, sample: Sample | None) -> None:
    """Set each arm's pace in the plan, measured on the first rows.

    The rows are scored twice, since the first forward pass is slower than later ones.
    """
    to_do = {arm.arm: arm for arm in plan if arm.num_tokens}
    for group in _by_key([entry for entry in wanted if entry.scorer.arm.name in to_do]):
        loaded = LoadedModel(run.weights)
        try:
            for entry in group:
                scorer, step = entry.scorer, entry.steps[0]
                rows = run.step(step)
                check_tokens(rows, run.model["config"])
                drawn = rows if sample is None else sample.drawn(step, rows)
                first = scorer.first(scorer.together(drawn, rows))
                loaded.score(scorer, first, unheard)
                start = perf_counter()
                loaded.score(scorer, first, unheard)
                arm = to_do[scorer.arm.name]
                arm.tokens_per_s = sum(row.num_tokens for row in first) / max(perf_counter() - start, 1e-9)
                arm.load_s = loaded.load_s
        finally:
            loaded.close()


_Held = dict[int, str | None]
"""Step -> code of the reason why replaying the step as recorded did not reproduce its bits; None if it did."""


def _there(run: RecordedRun, target: ArmPass, steps: list[int]) -> dict[int, set[str] | None]:
    """Return step -> sequences that already have scores under an arm; None if every sequence has one."""
    if not target.is_sample:
        return dict.fromkeys(target.steps)
    whole, own = run.sequences(run.replayed_pass, steps), run.sequences(target.name, steps)
    return {step: None if own[step] >= whole[step] else own[step] for step in steps if own[step]}


def _lacks(there: dict[int, set[str] | None], step: int, sample: Sample | None) -> bool:
    """Return True if a step has sequences left to score."""
    names = there.get(step, set())
    return names is not None and (sample is None or not names >= sample.steps[step].keys())


def _contract(run: RecordedRun, step: int, rows: list[RecordedRow]) -> Contract:
    """Return the contract under which the replayed pass was recorded in a step. Raises CannotReplay if there are
    several."""
    digests = {row.contract for row in rows}
    if len(digests) != 1:
        raise CannotReplay(
            f"{run.store.url}: step {step} was scored under {len(digests)} contracts; a replay needs exactly one"
        )
    return run.train_contract(digests.pop())


def _check_contract(run: RecordedRun, step: int, rows: list[RecordedRow], contract: Contract) -> None:
    """Raise CannotReplay if a step was recorded under a contract that differs from the first step's."""
    for digest in {row.contract for row in rows}:
        found = list(differences(run.train_contract(digest), contract))
        if found:
            raise CannotReplay(
                f"{run.store.url}: step {step} was scored under a different contract from the first step's "
                f"({found[0]}); "
                f"replay such steps separately, with {option('steps', 'FIRST:LAST')}"
            )


def _by_key(wanted: list[_Wanted]) -> Iterator[list[_Wanted]]:
    """Yield the arms grouped by the model they share, the identity arm's group first."""
    keys = list(dict.fromkeys(entry.scorer.key for entry in wanted))
    for key in keys:
        yield [entry for entry in wanted if entry.scorer.key == key]


def _step_results(
    run: RecordedRun,
    loaded: LoadedModel,
    group: list[_Wanted],
    step: int,
    held: _Held,
    advance: Advance,
    sample: Sample | None,
) -> Iterator[ReplayedStep]:
    """Yield the results of a step under arms that share a model."""
    rows = _read(run, group, step)
    for entry in group:
        if step in entry.steps:
            try:
                scored = _scored(entry, step, rows, sample, loaded, advance)
            except RuntimeError as error:  # raised by torch, or CannotReplay, which is a subclass of RuntimeError
                if not entry.serves_others:
                    raise
                held[step] = REFUSED
                yield _refused(entry, step, error)
            else:
                yield _step(entry, step, scored, held)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """Unit of work on a cluster: a step, under arms that share a model."""

    step: int
    arms: dict[str, dict[int, set[str] | None]]
    """Arm -> `_Wanted.there` of the step when the replay began."""

    def __str__(self) -> str:
        return f"step {self.step} under {', '.join(self.arms)}"


class _UnitScorer:
    """Ray actor of a replay. It opens the trace with its first unit, and keeps one model in memory until a unit needs a
    different one."""

    def __init__(self, run: RecordedRun, wanted: list[_Wanted], sample: Sample | None, device: str, threads: int):
        """Store what the actor needs; `threads` is the number of threads that torch uses in the parent process."""
        self._opening = run.opening
        self._arms = [entry.scorer.arm for entry in wanted]
        self._contract, self._device, self._threads = wanted[0].scorer.contract, device, threads
        self._sample = sample
        self._run: RecordedRun | None = None
        self._loaded: LoadedModel | None = None
        self._entries: dict[str, tuple[Scorer, ArmPass]] = {}

    def run(self, unit: _Unit) -> tuple[list[ReplayedStep], int]:
        """Score a unit and write its scores to the trace; return the results, and the number of tokens that ran.

        The caller sets `identity_held` in the results of arms other than the identity arm.
        """
        if self._run is None or self._loaded is None:
            import torch

            torch.set_num_threads(self._threads)
            self._run = RecordedRun(**self._opening)
            self._loaded = LoadedModel(self._run.weights)
            for arm in self._arms:
                scorer = scorer_of(self._run, arm, self._contract, self._device)
                self._entries[arm.name] = scorer, ArmPass(self._run, arm)
        group = [
            _Wanted(*self._entries[name], [unit.step], there, False, name == AS_RECORDED and len(self._arms) > 1)
            for name, there in unit.arms.items()
        ]
        held: _Held = {unit.step: None}
        tokens: list[int] = []
        parts = _step_results(self._run, self._loaded, group, unit.step, held, tokens.append, self._sample)
        return list(parts), sum(tokens)

    def close(self) -> None:
        """Release the model and seal the added scores."""
        if self._loaded is not None:
            self._loaded.close()
        for _, target in self._entries.values():
            target.close()


def _on_cluster(
    run: RecordedRun,
    wanted: list[_Wanted],
    sample: Sample | None,
    device: str,
    address: str,
    gpus: float,
    advance: Advance,
) -> Iterator[ReplayedStep]:
    """Score the units on Ray actors; yield the results in the same order as in a single process."""
    import torch

    threads = torch.get_num_threads()
    units = [
        _Unit(
            step=step,
            arms={
                entry.scorer.arm.name: {step: entry.there[step]} if step in entry.there else {}
                for entry in group
                if step in entry.steps
            },
        )
        for group in _by_key(wanted)
        for step in sorted({step for entry in group for step in entry.steps})
    ]
    worker = _UnitScorer(run, wanted, sample, device, threads)
    scored: dict[int, list[ReplayedStep]] = {}
    try:
        found = run_units(address, worker, units, num_cpus=1 if gpus else threads, num_gpus=gpus)
        for number, (results, num_tokens) in found:
            scored[number] = results
            advance(num_tokens)
    finally:
        adopt(run.folder)
    identity = next(entry.scorer.arm.name for entry in wanted if entry.scorer.arm.is_identity)
    steps = [step for number in range(len(units)) for step in scored[number]]
    held = {step.step: step.not_held for step in steps if step.arm == identity}
    for step in steps:
        yield replace(step, identity_held=held[step.step] is None, not_held=held[step.step])


def _read(run: RecordedRun, group: list[_Wanted], step: int) -> list[RecordedRow]:
    """Return the rows of a step.

    Raises CannotReplay if a token is outside the vocabulary, or if the contract differs from the first step's.
    """
    rows = run.step(step)
    check_tokens(rows, run.model["config"])
    _check_contract(run, step, rows, group[0].scorer.contract)
    return rows


def _scored(
    entry: _Wanted, step: int, rows: list[RecordedRow], sample: Sample | None, loaded: LoadedModel, advance: Advance
) -> Scored:
    """Return an arm's scores for a step's rows, or for the rows in the sample; add missing scores to the trace.

    Stored scores under the identity arm are reused only if they were computed under the current contract.
    """
    wanted = rows if sample is None else sample.drawn(step, rows)
    lacking = entry.lacking(step, wanted)
    new = {row.seq_id for row in lacking}
    there = [row for row in wanted if row.seq_id not in new]
    known = Scored()
    if there and entry.scorer.arm.is_identity:
        alike = entry.target.scored_alike(step, there, entry.scorer.made_by())
        if alike is None:
            lacking, there = wanted, []
        else:
            known = alike
    elif there:
        known = entry.target.scored(step, there)
    if not lacking:
        return known
    scored = loaded.score(entry.scorer, entry.scorer.together(lacking, rows), advance)
    scored = scored if sample is None and not there else scored.only({row.seq_id for row in lacking})
    if new:
        own = {} if sample is None else {"sample": sample.contract}
        entry.target.add(
            step,
            scored.only(new) if new < {row.seq_id for row in scored.rows} else scored,
            entry.scorer.made_by() | own,
        )
    if there:
        scored = Scored(rows=[*scored.rows, *known.rows], logprobs=[*scored.logprobs, *known.logprobs])
    return scored


def _step(entry: _Wanted, step: int, scored: Scored, held: _Held) -> ReplayedStep:
    scorer = entry.scorer
    pairs = list(zip(scored.rows, scored.logprobs, strict=True))
    recorded = np.concatenate([row.logprobs[row.scored] for row, _ in pairs])
    replayed = np.concatenate([value[row.scored] for row, value in pairs])
    same = _same_bits(recorded, replayed)
    d = replayed.astype(np.float64) - recorded.astype(np.float64)
    differs: tuple[str, ...] = ()
    if scorer.arm.is_identity:
        held[step] = None
        if not same.all():
            differs = _differs(scorer, scored.rows, scorer.made_by())
            held[step] = scorer.substitution or (CONDITIONS if differs else UNEXPLAINED)
    return ReplayedStep(
        arm=scorer.arm.name,
        step=step,
        num_tokens=len(d),
        num_equal=int(same.sum()),
        mean_abs_d=float(np.abs(d).mean()) if len(d) else 0.0,
        max_abs_d=float(np.abs(d).max(initial=0.0)),
        identity_held=held[step] is None,
        not_held=held[step],
        differs=differs,
    )


def _refused(entry: _Wanted, step: int, error: RuntimeError) -> ReplayedStep:
    """Return the identity arm's result for a step that cannot be replayed as recorded."""
    return ReplayedStep(
        arm=entry.scorer.arm.name, step=step, num_tokens=0, num_equal=0, mean_abs_d=nan, max_abs_d=nan, identity_held=False,
        not_held=REFUSED, differs=(first_line(error),),
    )  # fmt: skip


def _same_bits(recorded: np.ndarray, replayed: np.ndarray) -> np.ndarray:
    return np.asarray(recorded.view(np.uint32) == replayed.astype(np.float32).view(np.uint32))


def _differs(scorer: Scorer, rows: list[RecordedRow], contract: Contract) -> tuple[str, ...]:
    """Return the known reasons why the replay did not reproduce the recorded bits."""
    unknown = not all(row.composition_known for row in rows)
    words = []
    if scorer.run.replayed_pass == ROLLOUT:
        words.append(f"pass: {TRAIN} not recorded, now {ROLLOUT}, scored by an engine, so d is the mismatch")
    if unknown:
        words.append("batch composition: not recorded, now one row per forward")
    return (*words, *assumed_versions(rows), *differences(scorer.contract, contract))
