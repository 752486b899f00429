"""Compare the engine's weights with the trainer's, tensor by tensor, using recorded digests.

Engine digests are computed from tensors read back from the engine or, for tensors not read back, from the tensors as
last sent. Equal digests mean equal bits in the engine's dtype.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from ..schemas.errors import WeightsMissing, option
from ..schemas.modules import module_of
from .rows import Rows
from .trace.database import Database
from .views import open_database

STALE, PARTIAL, NEVER, ADAPTER, QUANTISED, OTHER = (
    "stale_weights", "partial_sync", "never_synchronised", "adapter", "quantised", "other_weights",
)  # fmt: skip
"""Causes of differing engine weights, as codes in the `weights_differ` finding."""

COLUMNS = (
    "tensor", "cause", "first_differs", "num_differ", "num_versions", "given_version", "holds_version", "trainer_version", "agrees",
)  # fmt: skip

_GIVEN_AS_HAD = "coalesce(given = trainer AND (held IS NULL OR held = trainer), false)"
"""SQL condition: the engine received and has the trainer's current tensor, so earlier versions need no comparison."""

_COUNTED = f"""
    SELECT policy_version, writer, min(step), count(*), coalesce(sum((trainer IS DISTINCT FROM before)::INT), 0)
    FROM (
        SELECT *, lag(trainer) OVER (PARTITION BY writer, tensor ORDER BY policy_version) AS before,
            bool_and({_GIVEN_AS_HAD}) OVER (PARTITION BY tensor) AS is_plain
        FROM {{view}}
    ) WHERE is_plain AND NOT {{every}} GROUP BY ALL ORDER BY policy_version, writer
"""
"""Counts, per policy version and writer, the tensors that the engine always received unchanged."""

_LISTED = f"""
    SELECT policy_version, writer, min(step), list(tensor), list(trainer), list(unmerged), list(given), list(held),
        list("cast")
    FROM (SELECT *, bool_and({_GIVEN_AS_HAD}) OVER (PARTITION BY tensor) AS is_plain FROM {{view}})
    WHERE {{every}} OR NOT is_plain GROUP BY policy_version, writer
"""
"""Lists the tensors that the engine did not always receive unchanged."""


_UNACCOUNTED = """
    SELECT DISTINCT step FROM (SELECT DISTINCT step, writer FROM sequences) AS sampled
    WHERE NOT EXISTS (
        SELECT 1 FROM (SELECT DISTINCT step, writer, dtype FROM engine_weights) AS told
        WHERE told.step = sampled.step AND (told.writer = sampled.writer OR told.dtype IS NULL)
    )
"""
"""Selects the steps sampled by a process that recorded no digests. Digests without a dtype come from an engine in its
own process, which serves all training processes."""

_OF_WORKERS = """
    SELECT DISTINCT step FROM engine_weights SEMI JOIN (
        SELECT DISTINCT writer FROM scores WHERE pass = 'current' AND writer NOT IN (SELECT DISTINCT writer FROM sequences)
    ) USING (writer)
"""
"""Selects steps where training workers recorded engine weights but no sequences, as in verl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTensor:
    """A tensor that differs between engine and trainer at a policy version."""

    tensor: str
    causes: tuple[str, ...]
    """Causes consistent with the bits, most probable first: STALE, ADAPTER, QUANTISED or OTHER."""
    holds_version: int | None
    """Latest version at which the trainer's tensor equals the engine's bit for bit, or None."""
    cast: str | None
    """dtype that the trainer's tensor was cast to on its way to the engine, or None if not cast."""
    is_loaded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVersion:
    version: int
    writer: str
    step: int
    given: dict[str, int]
    agreeing: frozenset[str]
    num_agreeing: int
    differences: tuple[EngineTensor, ...]
    num_unknown: int
    num_updated: int
    was_given: bool

    @property
    def num_known(self) -> int:
        return self.num_agreeing + len(self.differences)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFault:
    cause: str
    tensor: str
    version: int
    holds_version: int | None
    given_version: int | None
    is_loaded: bool
    num_tensors: int
    of_tensors: int
    num_versions: int
    of_versions: int
    first_version: int
    cast: str | None
    steps: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVerdict:
    faults: tuple[EngineFault, ...] = ()
    agreeing_steps: frozenset[int] = field(default=frozenset())


def engine_versions(database: Database, *, every_tensor: bool = False) -> Iterator[EngineVersion]:
    """Yield each engine's state at every policy version it sampled with, in version order.

    If a step was repeated, only its newest attempt is used. Tensors that the engine always received unchanged are
    counted rather than listed, unless `every_tensor` is set.
    """
    view = "every_engine_weights" if database.kept_steps else "engine_weights"
    words = {"view": view, "every": "true" if every_tensor else "false"}
    run = database.connection.execute
    counted = {(version, writer): rest for version, writer, *rest in run(_COUNTED.format_map(words)).fetchall()}
    listed = {(version, writer): rest for version, writer, *rest in run(_LISTED.format_map(words)).fetchall()}
    engines: dict[str, _Engine] = defaultdict(_Engine)
    had: dict[str, dict[int, int]] = defaultdict(dict)
    for version, keys in groupby(sorted({*counted, *listed}), key=lambda key: key[0]):
        writers = [writer for _, writer in keys]
        updated = {
            tensor
            for writer in writers
            for tensor, own in zip(*listed.get((version, writer), _NOTHING)[1:3], strict=True)
            if own is not None and _note(had[tensor], own, version)
        }
        for writer in writers:
            step, *plain = counted.get((version, writer), (None, 0, 0))
            own_step, *columns = listed.get((version, writer), _NOTHING)
            tensors = list(zip(*columns, strict=True))
            at = (version, writer, own_step if step is None else step)
            yield engines[writer].compared(at, tensors, had, updated, plain)


_Columns = tuple[
    int, list[str], list[int | None], list[int | None], list[int | None], list[int | None], list[str | None]
]
_NOTHING: _Columns = (0, [], [], [], [], [], [])
_Tensor = tuple[str, int | None, int | None, int | None, int | None, str | None]
"""Name; hashes of the trainer's tensor, before adapters are merged, as given to the engine and as held by it; cast."""


def _note(had: dict[int, int], own: int, version: int) -> bool:
    is_updated = had.get(own) != version and (not had or own != next(reversed(had)))
    had.pop(own, None)
    had[own] = version
    return is_updated


class _Engine:
    def __init__(self) -> None:
        self._has: dict[str, int] = {}
        self._given: dict[str, int] = {}
        self._given_at: dict[str, int] = {}
        self._was_given = False

    def compared(
        self, at: tuple[int, str, int], tensors: Sequence[_Tensor], had: Mapping[str, Mapping[int, int]],
        updated: Collection[str], plain: Sequence[int],
    ) -> EngineVersion:  # fmt: skip
        agreeing, differences, num_unknown = set(), [], 0
        version, writer, step = at
        num_plain, num_plain_updated = plain
        self._was_given |= bool(num_plain) or any(given is not None for _, _, _, given, _, _ in tensors)
        for tensor, own, unmerged, given, held, cast in tensors:
            if given is not None:
                self._has[tensor] = self._given[tensor] = given
                self._given_at[tensor] = version
            if held is not None:
                self._has[tensor] = held
            if own is None or tensor not in self._has:
                num_unknown += 1
            elif self._has[tensor] == own:
                agreeing.add(tensor)
            else:
                has = self._has[tensor]
                holds, is_loaded = had[tensor].get(has), self._given.get(tensor, has) == has
                # If the engine never received weights, its initial weights may be dummy values, so report only STALE.
                causes = _causes(holds, has == unmerged, cast, is_new=has == given) if self._was_given else (STALE,)
                differences.append(
                    EngineTensor(tensor=tensor, causes=causes, holds_version=holds, cast=cast, is_loaded=is_loaded)
                )
        return EngineVersion(
            version=version, writer=writer, step=step, given=dict(self._given_at), agreeing=frozenset(agreeing),
            num_agreeing=num_plain + len(agreeing), differences=tuple(differences), num_unknown=num_unknown,
            num_updated=num_plain_updated + len(agreeing & set(updated)), was_given=self._was_given,
        )  # fmt: skip


def _causes(holds: int | None, is_unmerged: bool, cast: str | None, *, is_new: bool) -> tuple[str, ...]:
    changed = (OTHER,) if cast is None else (QUANTISED, OTHER)
    if not is_new:  # for an old tensor, staleness is the most probable cause
        return (STALE,) if holds is not None else (ADAPTER,) if is_unmerged else changed[:1]
    if is_unmerged:
        return (ADAPTER,) if holds is None else (ADAPTER, STALE)
    # Report the other causes too: a tensor with few distinct values, such as a norm weight of all ones, can match an
    # older version by chance.
    return changed[:1] if holds is None else (STALE, *changed)


def read_engine_verdict(database: Database) -> EngineVerdict:
    steps = database.kept_steps.get(database.sources[0].run)
    found = engine_verdict(list(engine_versions(database)), steps)
    if not found.agreeing_steps:
        return found
    rows = database.connection.execute(f"{_UNACCOUNTED} EXCEPT {_OF_WORKERS}").fetchall()
    unaccounted = {step for (step,) in rows}
    return replace(found, agreeing_steps=found.agreeing_steps - unaccounted)


def engine_verdict(versions: Sequence[EngineVersion], steps: Collection[int] | None = None) -> EngineVerdict:
    asked = [each for each in versions if steps is None or each.step in steps]
    is_late = any(each.causes[0] == STALE for version in asked for each in version.differences)
    by_cause: dict[str, list[tuple[EngineVersion, list[EngineTensor]]]] = defaultdict(list)
    for version in asked:
        for cause, differences in _resolved(version.differences, is_late).items():
            by_cause[cause].append((version, differences))
    faults = [_fault(cause, seen, len({v.version for v in asked})) for cause, seen in by_cause.items()]
    faults.sort(key=lambda fault: -sum(len(found) for _, found in by_cause[_of_bits(fault.cause)]))
    wrong = {v.step for v in asked if v.differences or v.num_unknown or not v.num_known}
    return EngineVerdict(faults=tuple(faults), agreeing_steps=frozenset({v.step for v in asked} - wrong))


def _resolved(differences: Sequence[EngineTensor], is_late: bool) -> dict[str, list[EngineTensor]]:
    decided = Counter(each.causes[0] for each in differences if len(each.causes) == 1)
    late = sum(each.causes[0] == STALE for each in differences)
    found: dict[str, list[EngineTensor]] = defaultdict(list)
    for each in differences:
        first, *others = each.causes
        if first == ADAPTER and others and is_late:
            first = STALE
        elif first == STALE and others:
            other = max(others, key=lambda cause: decided[cause])
            first = other if decided[other] > late else first
        found[first].append(each)
    return found


def _of_bits(cause: str) -> str:
    return STALE if cause in (PARTIAL, NEVER) else cause


def _fault(cause: str, seen: list[tuple[EngineVersion, list[EngineTensor]]], of_versions: int) -> EngineFault:
    last, differences = seen[-1]
    worst = min(differences, key=lambda each: -1 if each.holds_version is None else each.holds_version)
    if cause == STALE:
        if not last.was_given:
            cause = NEVER
        elif any(version.num_updated for version, _ in seen):
            cause = PARTIAL
    return EngineFault(
        cause=cause, tensor=worst.tensor, version=last.version, holds_version=worst.holds_version,
        given_version=last.given.get(worst.tensor), is_loaded=worst.is_loaded, num_tensors=len(differences),
        of_tensors=last.num_known, num_versions=len({version.version for version, _ in seen}),
        of_versions=of_versions, first_version=seen[0][0].version, cast=worst.cast,
        steps=frozenset(version.step for version, _ in seen),
    )  # fmt: skip


def engine_weights(trace: str | os.PathLike[str], *, by: str = "tensor") -> Rows:
    """Compare each engine tensor with the trainer's at the time when the engine last started sampling.

    `given_version` is the version at which the engine last received the tensor, and `holds_version` the latest version
    whose trainer tensor is bitwise equal to the engine's. `num_differ` counts the versions at which the two differed, and
    `first_differs` is the first of them. by="module" groups layers and shows the tensor that differs most often.

    Raises WeightsMissing if the trace has no digests of engine weights, TraceNotFound or NewerTrace.
    """
    versions = list(engine_versions(open_database(trace), every_tensor=True))
    if not versions:
        raise WeightsMissing(
            f"{trace} has no digests of the engine's weights, which only TRL and verl with vLLM record (without "
            f"{option('engine_weights', 'none')}); to try another version's weights, run tim-trace replay RUN --weights-version N"
        )
    faults = {cause: fault.cause for fault in engine_verdict(versions).faults for cause in (_of_bits(fault.cause),)}
    tables = [
        _of_tensors([version for version in versions if version.writer == writer], faults)
        for writer in sorted({version.writer for version in versions})
    ]
    newest = max(row[-2] for rows in tables for row in rows)
    rows = [row for rows in tables for row in rows if row[-2] == newest]
    return Rows(COLUMNS, _furthest(rows, module_of if by == "module" else str))


_Row = tuple[str, str | None, int | None, int, int, int | None, int | None, int, bool | None]


def _of_tensors(versions: Sequence[EngineVersion], faults: dict[str, str]) -> list[_Row]:
    last, seen, wrong, causes = versions[-1], Counter[str](), Counter[str](), {}
    first: dict[str, int] = {}
    for version in versions:
        seen.update(version.agreeing)
        for each in version.differences:
            seen[each.tensor] += 1
            wrong[each.tensor] += 1
            first.setdefault(each.tensor, version.version)
            cause = next((cause for cause in each.causes if cause in faults), each.causes[0])
            causes[each.tensor] = faults.get(cause, cause)
    holds: dict[str, int | None] = {each.tensor: each.holds_version for each in last.differences}
    rows: list[_Row] = []
    for tensor in dict.fromkeys([*last.given, *seen]):
        agrees = True if tensor in last.agreeing else False if tensor in holds else None
        held = last.version if agrees else holds.get(tensor)
        rows.append((
            tensor, causes.get(tensor), first.get(tensor), wrong[tensor], seen[tensor], last.given.get(tensor), held,
            last.version, agrees,
        ))  # fmt: skip
    return rows


def _furthest(rows: Sequence[_Row], name_of: Callable[[str], str]) -> list[_Row]:
    found: dict[str, _Row] = {}
    for row in rows:
        name = name_of(row[0])
        known = found.get(name)
        if known is None or (row[3], -(row[6] or 0)) > (known[3], -(known[6] or 0)):
            found[name] = (name, *row[1:])
    return list(found.values())
