"""`tim-trace replay`: score recorded tokens again under other numerics, and write the result as a pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from typing import Any, NamedTuple

import numpy as np

from ..schemas.arguments import check_arguments
from ..schemas.capture import Capture
from ..schemas.contract import Contract
from ..schemas.errors import CannotReplay, InvalidOption, option
from ..schemas.passes import ROLLOUT, TRAIN
from ..schemas.steps import parse_steps
from ..tracer.adopt import adopt
from ..tracer.cluster import connected, run_units
from ..tracer.progress import Advance, Progress, no_progress
from ..tracer.store import first_line
from .arm_pass import ArmPass
from .arms import AS_RECORDED, Arm, check_distinct, parse_arm, read_arms
from .backends.trusted import CONDITIONS, REFUSED, UNEXPLAINED, check_scoring
from .batching import check_tokens
from .differences import differences
from .gpus import device_here, gpus_of_actor
from .loaded import FORWARDS, JoinedScoring, LoadedModel, Rows, Scorer, joined_steps, scorer_of
from .meter import Meter, Told, untold
from .plan import ArmCount, Pace, ReplayPlan, extents
from .recorded import RecordedRow, RecordedRun, assumed_versions
from .results import GroupSums, ReplayedStep, ReplayedSteps
from .sample import Sample, draw_sample, parse_sample
from .scored import Scored


@dataclass(slots=True)
class _Wanted:
    """A requested arm, and the steps that still have to be scored under it."""

    scorer: Scorer
    target: ArmPass
    steps: list[int]
    there: dict[int, set[str] | None]
    """Step -> sequences that already have scores under this arm; None if every sequence has one."""
    work: int
    """Estimated work per step, in units of `meter.work`."""
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
    as_recorded: bool = False,
    arm: Sequence[str | Arm] = (),
    arm_file: str | os.PathLike[str] | None = None,
    model_factory: str | None = None,
    weights_from: str | os.PathLike[str] | None = None,
    allow_kernel: Sequence[str] = (),
    capture: str = "logprobs",
    capture_fraction: float = 1.0,
    force: bool = False,
    dry_run: bool = False,
    ray: str | None = None,
    gpus_per_arm: float | None = None,
    progress: Progress = no_progress,
    at_estimate: Callable[[ReplayPlan], None] | None = None,
    **changes: Any,
) -> ReplayedSteps:
    """Score recorded steps again, under other numerics, and write each arm as a pass replay/<arm>.

    `changes` define one arm, with the field names of `Arm`; `arm` adds arms (as text, `dtype=fp16,batch-size=1`), and so
    does `arm_file`, a TOML file with one table per arm. The recording itself is always replayed first, as
    `replay/as-recorded`: the distance of another arm is meaningful only if that reproduces the recorded bits. Steps that
    an arm already has are skipped; without `force`, an arm that has them all is refused, and so is a name that
    stands for other changes. One model is in memory at a time; arms share it if they can. `as_recorded` replays the
    recording only, and raises if there is a change.

    `sample` scores a random fraction of the sequences (below 1) or this number of them (1 or more): whole prompt groups,
    spread over the steps, the same ones every time. A larger sample adds to a smaller one. Forwards with the recorded
    batches run whole, since other neighbours would change the bits; arms with their own batch shape run only the sample.

    `model_factory`, as `module:function`, builds a model whose class transformers does not have. `weights_from` is the
    folder of the run's checkpoints, for a trace without weights.

    No code is run because the trace names it: the model must be one of transformers' own classes and the scoring function
    TRL's, or the replay is refused. A recorded attention kernel of the hub (`kernels-community/flash-attn2`) is fetched and
    run only if `allow_kernel` names it. If the recorded attention or experts do not run here, torch's own replace them, with
    a warning; if the recording does not run at all, the other arms still do. `not_held` is the reason its bits differ.

    `capture` keeps more than each token's logprob (`topk:K`, `logits`, or `hidden`, the last hidden states), for the
    fraction `capture_fraction` of the sequences: the same ones as in a recording. It does not change the logprobs' bits.

    `dry_run` writes nothing: it scores the first rows under each arm and returns a `plan` of the remaining work and time of
    each arm. `at_estimate` is called with the plan of a replay once the first rows have been timed.

    `ray` distributes the steps over the actors of a Ray cluster: `local` starts one here; `auto` or `host:port` connects to
    a running one, whose nodes see the trace at the same path. The bits are those of a single process. If a node dies, its
    step is scored on another. `gpus_per_arm` is the number of GPUs per actor, or a fraction of one; by default 1 if this
    machine has a GPU, else 0. `at_estimate` is then called after the first step, and `dry_run` scores its rows on an actor.

    Raises CannotReplay, WeightsMissing, DamagedTrace, InvalidOption, TraceNotFound, NotInstalled.
    """
    gpus = gpus_of_actor(ray, gpus_per_arm)
    device = device_here() if ray is None else "cuda" if gpus else "cpu"
    arms = _arms(arm, arm_file, changes)
    if as_recorded and len(arms) > 1:
        raise InvalidOption(
            f"changes nothing, but arm {arms[1].name} does; leave one of them out", option="as_recorded"
        )
    run = RecordedRun(trace, model_factory=model_factory, weights_from=weights_from, allow_kernel=allow_kernel)
    chosen = parse_steps(steps, run.steps(run.replayed_pass))
    drawn = None if sample is None else draw_sample(run, parse_sample(sample), chosen)
    kept = Capture.parse(capture, capture_fraction)
    wanted = _wanted(run, arms, chosen, force, kept, drawn, device, dry_run=dry_run)
    plan = _plan(run, wanted, drawn)
    if dry_run and ray is not None:
        return ReplayedSteps(sample=drawn, plan=_measured_on_cluster(run, wanted, plan, drawn, kept, device, ray, gpus))
    if dry_run:
        return ReplayedSteps(sample=drawn, plan=_measured(run, wanted, plan, drawn))
    results = ReplayedSteps(sample=drawn, plan=plan)
    told = _Telling(plan, at_estimate)
    if ray is not None:
        with connected(ray):  # fails before anything is removed if the cluster does not answer
            _remove_replaced(wanted)
            return _on_cluster(run, wanted, results, kept, device, ray, gpus, progress, told)
    _remove_replaced(wanted)
    held: _Held = {}
    # Sealing an arm takes about as long as a step in one forward.
    sealing = min(entry.work for entry in wanted)
    total = sum(len(entry.steps) * entry.work + sealing for entry in wanted)
    with progress("replaying", total) as advance:
        try:
            for group in _by_key(wanted):
                for step, sums in _group(run, group, held, advance, drawn, told):
                    results.append(step)
                    results.groups.extend(sums)
        finally:
            for entry in wanted:
                entry.target.close()
                advance(sealing)
    return results


def _remove_replaced(wanted: list[_Wanted]) -> None:
    for entry in wanted:
        if entry.is_replaced:
            entry.target.remove()


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


def _wanted(
    run: RecordedRun,
    arms: list[Arm],
    steps: list[int],
    force: bool,
    capture: Capture,
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
    scorers = [scorer_of(run, arm, contract, device, capture) for arm in arms]
    needed = {arm.weights_version for arm in arms if arm.weights_version is not None}
    missing = sorted((needed | {first[0].policy_version}) - set(run.weights.versions))
    if missing:
        run.weights.load(missing[0])  # raises an error that lists the existing versions
    wanted: list[_Wanted] = []
    asked: list[tuple[ArmPass, list[int]]] = []
    """Requested arms, each with the steps in which sequences have no score yet."""
    for arm, scorer in zip(arms, scorers, strict=True):
        target = ArmPass(run, arm, capture)
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
        # Other arms are judged by the identity arm, so it covers all their steps. The estimate in a dry run
        # covers the whole sample, including sequences that already have scores.
        asked_steps = steps if arm.is_identity or sample is not None else left
        rows = first if sample is None else scorer.together(sample.drawn(steps[0], first), first)
        wanted.append(_Wanted(scorer, target, asked_steps, there, scorer.work(rows), is_replaced, serves_others))
    if not any(left for _, left in asked):
        name = asked[0][0].name
        raise InvalidOption(
            f"{name} already has all of these {'steps' if sample is None else 'sequences'}; show it (tim-trace stats RUN "
            f"--pair {name}:{run.replayed_pass}), or replace it with {option('force')}"
        )
    return wanted


class _Telling:
    """Reporter of the replay plan. It reports once, at the pace measured on the first rows."""

    def __init__(self, plan: ReplayPlan, at_estimate: Callable[[ReplayPlan], None] | None):
        self._plan, self._at_estimate = plan, at_estimate
        self.pace = Pace(self._tell)
        self.loaded: LoadedModel | None = None
        self.num_actors = 1
        """Number of Ray actors that share the steps. The actors measure the pace themselves and report it through
        `tell`."""

    def _tell(self, tokens_per_s: float) -> None:
        self.tell(tokens_per_s, self.loaded.load_s if self.loaded else 0.0)

    def tell(self, tokens_per_s: float, load_s: float) -> None:
        """Report the plan at the given pace. Calls after the first do nothing."""
        if self._at_estimate is not None:
            tell, self._at_estimate = self._at_estimate, None
            tell(self._plan.at(tokens_per_s, load_s, self.num_actors))

    def at_room(self, num_actors: int) -> None:
        """Set the number of actors that share the steps."""
        self.num_actors = num_actors


def _plan(run: RecordedRun, wanted: list[_Wanted], sample: Sample | None) -> ReplayPlan:
    """Return the remaining work of each arm."""
    counts = [
        ArmCount(
            entry.scorer.arm.name,
            entry.lacks,
            sample=sample,
            keeps_batches=entry.scorer.keeps_batches,
            weights_version=entry.scorer.arm.weights_version,
            num_devices=entry.scorer.num_devices,
        )
        for entry in wanted
    ]
    steps = [set(entry.steps) for entry in wanted]
    for step, rows in extents(run, sorted(set().union(*steps))):
        for count, own in zip(counts, steps, strict=True):
            if step in own:
                count.add(step, rows)
    return ReplayPlan(count.plan for count in counts)


def _measured(run: RecordedRun, wanted: list[_Wanted], plan: ReplayPlan, sample: Sample | None) -> ReplayPlan:
    """Return the plan with each arm's pace, measured on the first rows."""
    paces: _Paces = {}
    for group in _to_measure(wanted, plan):
        paces |= _paces(run, [(entry.scorer, entry.steps[0]) for entry in group], sample)
    return _paced(plan, paces)


_Held = dict[int, str | None]
"""Step -> code of the reason why replaying the step as recorded did not reproduce its bits; None if it did."""
_Paces = dict[str, tuple[float, float]]
"""Arm -> its pace: tokens per second, and seconds to load the weights of one policy version."""


def _to_measure(wanted: list[_Wanted], plan: ReplayPlan) -> Iterator[list[_Wanted]]:
    """Yield the arms with remaining work, grouped by the model they share."""
    to_do = {arm.arm for arm in plan if arm.num_tokens}
    return _by_key([entry for entry in wanted if entry.scorer.arm.name in to_do])


def _paces(run: RecordedRun, group: Sequence[tuple[Scorer, int]], sample: Sample | None) -> _Paces:
    """Return each arm's pace, measured on the first rows of a step.

    The rows are scored twice, since the first forward pass is slower than later ones.
    """
    found: _Paces = {}
    loaded = LoadedModel(run.weights)
    try:
        for scorer, step in group:
            rows = run.step(step)
            check_tokens(rows, run.model["config"])
            drawn = rows if sample is None else sample.drawn(step, rows)
            first = scorer.first(scorer.together(drawn, rows))
            told: list[float] = []
            for _ in range(2):
                pace = Pace(told.append)
                loaded.score(scorer, first, pace.watching(untold, sum(row.num_tokens for row in first)))
            found[scorer.arm.name] = told[-1], loaded.load_s
    finally:
        loaded.close()
    return found


def _paced(plan: ReplayPlan, paces: _Paces, num_actors: int = 1) -> ReplayPlan:
    found = [(arm, *paces.get(arm.arm, (None, None))) for arm in plan]
    return ReplayPlan(
        replace(arm, tokens_per_s=tokens_per_s, load_s=load_s, num_actors=num_actors)
        for arm, tokens_per_s, load_s in found
    )


def _there(run: RecordedRun, target: ArmPass, steps: list[int]) -> dict[int, set[str] | None]:
    """Return step -> sequences that already have scores under an arm; None if every sequence has one."""
    if not target.is_sample:
        return dict.fromkeys(target.steps)
    whole, own = run.sequences(run.replayed_pass, steps), run.sequences(target.name, steps)
    return {step: None if own[step] >= whole[step] else own[step] for step in steps if own[step]}


def _lacks(there: dict[int, set[str] | None], step: int, sample: Sample | None) -> bool:
    """Return True if a step has sequences left to score."""
    names = there.get(step, set())
    return names is not None and (sample is None or not names >= sample.steps[step].unit_of.keys())


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
                f"{run.store.url}: step {step} was scored under another contract than the first step ({found[0]}); "
                f"replay such steps separately, with {option('steps', 'FIRST:LAST')}"
            )


def _by_key(wanted: list[_Wanted]) -> Iterator[list[_Wanted]]:
    """Yield the arms grouped by the model they share, the identity arm's group first."""
    keys = list(dict.fromkeys(entry.scorer.key for entry in wanted))
    for key in keys:
        yield [entry for entry in wanted if entry.scorer.key == key]


def _group(
    run: RecordedRun,
    group: list[_Wanted],
    held: _Held,
    advance: Advance,
    sample: Sample | None,
    telling: _Telling,
) -> Iterator[tuple[ReplayedStep, list[GroupSums]]]:
    loaded = telling.loaded = LoadedModel(run.weights)
    try:
        for joined in joined_steps(_read(run, group), _most_tokens(group), partial(_num_tokens, sample)):
            yield from _joined(loaded, group, joined, held, advance, sample, telling.pace)
    finally:
        loaded.close()


def _joined(
    loaded: LoadedModel,
    group: list[_Wanted],
    joined: Rows,
    held: _Held,
    advance: Advance,
    sample: Sample | None,
    pace: Pace,
) -> Iterator[tuple[ReplayedStep, list[GroupSums]]]:
    """Yield the results of each arm for steps that are scored together."""
    scoring = JoinedScoring(loaded, list(joined))
    for step in joined:
        for entry in group:
            if step in entry.steps:
                meter = Meter(advance, entry.work)
                try:
                    scored = _scored(entry, step, joined, sample, scoring, meter.add, pace)
                except RuntimeError as error:  # raised by torch, or CannotReplay, which is a subclass of RuntimeError
                    if not entry.serves_others:
                        raise
                    held[step] = REFUSED
                    yield _refused(entry, step, error), []
                else:
                    yield _step(entry, step, scored, held), _group_sums(entry, step, scored, sample)
                meter.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """Unit of work on a cluster: steps that one actor scores together, under arms that share a model."""

    arms: dict[str, tuple[list[int], dict[int, set[str] | None]]]
    """Arm -> its steps, and for each step the sequences that already had scores when the replay began."""
    work: int

    def __str__(self) -> str:
        steps = sorted({step for own, _ in self.arms.values() for step in own})
        return f"step {', '.join(map(str, steps))} under {', '.join(self.arms)}"


class _UnitScores(NamedTuple):
    """The results that an actor returns for one unit."""

    parts: list[tuple[ReplayedStep, list[GroupSums]]]
    tokens_per_s: float | None
    """Tokens per second, measured on the first rows of the unit; None if nothing was scored."""
    load_s: float


class _Actor:
    """Base class of the Ray actors. An actor opens the trace and the arms when it gets its first unit."""

    def __init__(
        self,
        run: RecordedRun,
        wanted: list[_Wanted],
        capture: Capture,
        sample: Sample | None,
        device: str,
        threads: int,
    ):
        """Store what the actor needs; `threads` is the number of threads that torch uses in the parent process."""
        self._opening = run.opening
        self._arms = [entry.scorer.arm for entry in wanted]
        self._contract, self._device, self._threads = wanted[0].scorer.contract, device, threads
        self._capture, self._sample = capture, sample
        self._run: RecordedRun | None = None
        self._entries: dict[str, tuple[Scorer, ArmPass]] = {}

    def _opened(self) -> RecordedRun:
        if self._run is None:
            import torch

            torch.set_num_threads(self._threads)
            self._run = RecordedRun(**self._opening)
            for arm in self._arms:
                scorer = scorer_of(self._run, arm, self._contract, self._device, self._capture)
                self._entries[arm.name] = scorer, ArmPass(self._run, arm, self._capture)
        return self._run


class _UnitScorer(_Actor):
    """Ray actor of a replay. It keeps one model in memory until a unit needs a different one."""

    _loaded: LoadedModel | None = None

    def run(self, unit: _Unit) -> _UnitScores:
        """Score a unit and write its scores to the trace.

        The caller sets `identity_held` in the results of arms other than the identity arm.
        """
        run = self._opened()
        self._loaded = self._loaded or LoadedModel(run.weights)
        group = [
            _Wanted(*self._entries[name], *part, 0, False, name == AS_RECORDED and len(self._arms) > 1)
            for name, part in unit.arms.items()
        ]
        joined = dict(_read(run, group))
        held: _Held = dict.fromkeys(joined)
        paces: list[float] = []
        parts = list(_joined(self._loaded, group, joined, held, untold, self._sample, Pace(paces.append)))
        return _UnitScores(parts, paces[0] if paces else None, self._loaded.load_s)

    def close(self) -> None:
        """Release the model and seal the added scores."""
        if self._loaded is not None:
            self._loaded.close()
        for _, target in self._entries.values():
            target.close()


class _PaceMeter(_Actor):
    """Ray actor of a dry run. It scores only the first rows and writes nothing."""

    def run(self, steps: dict[str, int]) -> _Paces:
        """Return the pace of arms that share a model; `steps` is arm -> the step on whose first rows its pace is
        measured."""
        run = self._opened()
        return _paces(run, [(self._entries[name][0], step) for name, step in steps.items()], self._sample)

    def close(self) -> None:
        """Do nothing: no scores were written."""


def _on_cluster(
    run: RecordedRun,
    wanted: list[_Wanted],
    results: ReplayedSteps,
    capture: Capture,
    device: str,
    address: str,
    gpus: float,
    progress: Progress,
    telling: _Telling,
) -> ReplayedSteps:
    """Score the units on Ray actors. The results are added in the same order as in a single process."""
    import torch

    units = list(_units(run, wanted, results.sample))
    worker = _UnitScorer(run, wanted, capture, results.sample, device, torch.get_num_threads())
    scored: dict[int, list[tuple[ReplayedStep, list[GroupSums]]]] = {}
    found = run_units(address, worker, units, num_cpus=_num_cpus(gpus), num_gpus=gpus, at_room=telling.at_room)
    try:
        with progress("replaying", sum(unit.work for unit in units)) as advance:
            for number, unit in found:
                if unit.tokens_per_s is not None:
                    telling.tell(unit.tokens_per_s, unit.load_s)
                scored[number] = unit.parts
                advance(units[number].work)
    finally:
        adopt(run.folder)
    identity = next(entry.scorer.arm.name for entry in wanted if entry.scorer.arm.is_identity)
    parts = [part for number in range(len(units)) for part in scored[number]]
    held = {step.step: step.not_held for step, _ in parts if step.arm == identity}
    for step, sums in parts:
        results.append(replace(step, identity_held=held[step.step] is None, not_held=held[step.step]))
        results.groups.extend(sums)
    return results


def _measured_on_cluster(
    run: RecordedRun,
    wanted: list[_Wanted],
    plan: ReplayPlan,
    sample: Sample | None,
    capture: Capture,
    device: str,
    address: str,
    gpus: float,
) -> ReplayPlan:
    """Return the plan with each arm's pace on a Ray actor, for as many actors as fit into the cluster."""
    import torch

    worker = _PaceMeter(run, wanted, capture, sample, device, torch.get_num_threads())
    units = [{entry.scorer.arm.name: entry.steps[0] for entry in group} for group in _to_measure(wanted, plan)]
    room: list[int] = [1]
    paces: _Paces = {}
    for _, found in run_units(address, worker, units, num_cpus=_num_cpus(gpus), num_gpus=gpus, at_room=room.append):
        paces |= found
    return _paced(plan, paces, room[-1])


def _num_cpus(gpus: float) -> int:
    """Return the number of CPUs to reserve per actor."""
    import torch

    return 1 if gpus else torch.get_num_threads()


def _units(run: RecordedRun, wanted: list[_Wanted], sample: Sample | None) -> Iterator[_Unit]:
    """Yield the groups of steps that a single process would score together, in the order in which it would score
    them."""
    for group in _by_key(wanted):
        parts: Iterable[list[int]] = ([step] for step in sorted({step for entry in group for step in entry.steps}))
        if most := _most_tokens(group):
            parts = (list(part) for part in joined_steps(_read(run, group), most, partial(_num_tokens, sample)))
        for part in parts:
            own_steps = [(entry, [step for step in part if step in entry.steps]) for entry in group]
            yield _Unit(
                arms={
                    entry.scorer.arm.name: (own, {step: entry.there[step] for step in own if step in entry.there})
                    for entry, own in own_steps
                    if own
                },
                work=sum(entry.work * len(own) for entry, own in own_steps),
            )


def _read(run: RecordedRun, group: list[_Wanted]) -> Iterator[tuple[int, list[RecordedRow]]]:
    """Yield each step that these arms still need, with its rows.

    Raises CannotReplay if a token is outside the vocabulary, or if the contracts differ between steps.
    """
    for step in sorted({step for entry in group for step in entry.steps}):
        rows = run.step(step)
        check_tokens(rows, run.model["config"])
        _check_contract(run, step, rows, group[0].scorer.contract)
        yield step, rows


def _most_tokens(group: list[_Wanted]) -> int:
    """Return the maximum number of tokens in steps that are scored together; 0 if each step is scored alone."""
    return FORWARDS * max(entry.scorer.arm.batch_tokens or 0 for entry in group)


def _num_tokens(sample: Sample | None, step: int, rows: list[RecordedRow]) -> int:
    """Return the number of tokens to score in a step."""
    return sum(row.num_tokens for row in (rows if sample is None else sample.drawn(step, rows)))


def _scored(
    entry: _Wanted,
    step: int,
    joined: Rows,
    sample: Sample | None,
    scoring: JoinedScoring,
    told: Told,
    pace: Pace,
) -> Scored:
    """Return an arm's scores for a step's rows, or for the rows in the sample; add missing scores to the trace.

    Stored scores under the identity arm are reused only if they were computed under the current contract.
    """
    rows = joined[step]
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
    together = _capturing(entry, step, entry.scorer.together(lacking, rows), new)
    scored = scoring.score(
        entry.scorer,
        step,
        together,
        lambda later: _still_lacking(entry, later, joined[later], sample),
        partial(pace.watching, told),
    )
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


def _still_lacking(entry: _Wanted, step: int, rows: list[RecordedRow], sample: Sample | None) -> list[RecordedRow]:
    """Return the rows in a step that still have to be scored under an arm."""
    return entry.lacking(step, rows if sample is None else sample.drawn(step, rows)) if step in entry.steps else []


def _capturing(entry: _Wanted, step: int, rows: list[RecordedRow], new: set[str]) -> list[RecordedRow]:
    """Return the rows, with `captured` set for new sequences whose distributions are kept."""
    capture = entry.scorer.capture
    if not capture.dense or not new:
        return rows
    return [replace(row, captured=row.seq_id in new and capture.selects(step, row.seq_id)) for row in rows]


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


def _group_sums(entry: _Wanted, step: int, scored: Scored, sample: Sample | None) -> list[GroupSums]:
    """Return the sums over each sampled group in a step; empty without a sample."""
    if sample is None:
        return []
    sampled = sample.steps[step]
    found: dict[str, GroupSums] = {}
    for row, value in zip(scored.rows, scored.logprobs, strict=True):
        recorded, replayed = row.logprobs[row.scored], value[row.scored]
        d = replayed.astype(np.float64) - recorded.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            sums = GroupSums(
                arm=entry.scorer.arm.name,
                step=step,
                weight=sampled.weight,
                num_sequences=1,
                num_tokens=len(d),
                num_equal=int(_same_bits(recorded, replayed).sum()),
                sum_abs_d=float(np.abs(d).sum()),
                sum_k3=float((np.expm1(d) - d).sum()),
            )
        unit = sampled.unit_of[row.seq_id]
        found[unit] = found[unit] + sums if unit in found else sums
    return list(found.values())


def _differs(scorer: Scorer, rows: list[RecordedRow], contract: Contract) -> tuple[str, ...]:
    """Return the known reasons why the replay did not reproduce the recorded bits."""
    unknown = not all(row.composition_known for row in rows)
    words = []
    if scorer.run.replayed_pass == ROLLOUT:
        words.append(f"pass: {TRAIN} not recorded, now {ROLLOUT}, scored by an engine: d is the mismatch")
    if unknown:
        words.append("batch composition: not recorded, now one row per forward")
    return (*words, *assumed_versions(rows), *differences(scorer.contract, contract))
