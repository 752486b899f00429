"""Check whether two passes can be compared, and explain their mismatch.

Recorded facts are tested first. Then, in each round, the explanation that best fits the remaining tokens is accepted.
Finally, the remaining mismatch is located and classified.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from ...schemas.errors import NothingToCompare
from ...schemas.layout import WEIGHTS
from ...schemas.passes import CURRENT, REFERENCE, ROLLOUT, TRAIN
from ...schemas.results import Result
from ...schemas.steps import ALL_STEPS
from ...tracer.progress import Progress, no_progress
from ..advice import NOTHING
from ..comparison.passes import PassComparison, compare_passes
from ..engine_weights import read_engine_verdict
from ..trace import columns
from ..trace.database import Database, cached
from ..trace.source import Pair
from ..trace.tokens import spread
from ..views import open_database
from .data_checks import data_findings
from .faults import kinds, misplaced, not_computed, sampling, values
from .features import FEW, not_repeatable
from .finding import Broken, DataFinding, Finding, Hypothesis, Number, nobodys
from .pair_data import FEW_TOKENS, MAX_EXCESS, PairData, allowed_noise, level, logit_error, width
from .sample import NEEDED_SUMS, Sample, logprobs_of, read_pair_sums, read_sample
from .where import MAX_COVERED, Where, places

MIN_GAIN_NATS = 12.0
"""Minimum evidence (nats) for an explanation, less its parameters' cost. By chance, one run in 100,000 reaches it."""
MAX_LEFT = 0.5
"""Maximum share of the mismatch that an explanation confined to one place may leave unexplained."""
WELL_PREDICTED = 0.1
"""Maximum share left unexplained by an explanation that competes only with others that predict values."""
_MAX_ROUNDS, _MAX_PARTS, _MAX_PLACES = 5, 3, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOwner:
    owner: str
    """Finding code, `rounding` for tokens explained by rounding, or `nobody` for unexplained tokens."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult(Result):
    """Verdict on whether two passes can be compared, and the faults found."""

    _text = "tim_trace.analysis.check.text:checked_text"

    trace: str
    pair: str
    """The compared passes as a:b. d is logprob(a) - logprob(b)."""
    steps: str = ALL_STEPS
    num_tokens: int
    """Number of tokens in the loss that have a finite logprob in both passes."""
    num_sampled_tokens: int
    """Number of tokens inspected individually. All other tokens are only included in statistics."""
    rms_d: float
    """Root mean square of d (nats)."""
    findings: tuple[Finding, ...]
    """Findings, most probable first. There is always at least one."""
    owners: tuple[TokenOwner, ...] = ()
    """Number of inspected tokens explained by each finding, by rounding, and by nothing. A token explained by several
    findings counts for the first of them."""
    data: tuple[DataFinding, ...] = ()
    """Faults in rewards, advantages, groups and logged metrics. They do not affect the comparison."""
    notes: tuple[str, ...] = ()
    """Keys of text.NOTES: remarks, and checks that could not run on this trace."""
    attempts: tuple[columns.AttemptInfo, ...] = ()
    """Training attempts. Empty if there was only one."""

    @property
    def is_compared(self) -> bool:
        """False if no passes were compared, because `rollout` has no logprobs. `data` is checked either way."""
        return self.findings[0].code != "not_compared"

    @property
    def is_valid(self) -> bool:
        """True if two passes were compared and no fault was found."""
        return self.is_compared and not any(finding.fails for finding in self.findings)

    @property
    def has_few_tokens(self) -> bool:
        """True if nothing was found, but too few tokens were compared to rule out anything but gross errors."""
        return self.findings[0].code == "too_few"

    @property
    def broken(self) -> Broken | None:
        """What to fix, judging by the most probable fault, or None if the comparison is valid."""
        return next((finding.broken for finding in self.findings if finding.fails), None)


def check(
    trace: str | os.PathLike[str], *, pair: str = "train:rollout", steps: str = ALL_STEPS, partial: bool = False,
    ray: str | None = None, progress: Progress = no_progress,
) -> CheckResult | PassComparison:  # fmt: skip
    """Report whether two passes may be compared, or which fault makes the comparison invalid.

    Each fault comes with evidence, its effect in nats, the share of affected tokens, and a command that confirms it.
    The check computes statistics of the whole run and inspects tokens in a sample of steps. `steps` (3:80, -10:,
    2:200:2) restricts the check to part of the run. If `ray` is a Ray cluster's address (`auto`, `host:port`, or
    `local` to start one), Ray actors compute the sums.

    If a trace has no logprobs of `rollout`, current:train is compared instead of train:rollout, provided that the policy
    versions of both were recorded. Otherwise, if rewards, a reference or other passes were recorded, only `data` is
    checked, and the only finding is `not_compared`.

    If a trace has passes of several engines but neither `train` nor `rollout`, all passes are compared, and the result
    is a PassComparison, as from `compare`.

    Raises NothingToCompare if the passes share no token, DamagedTrace if part of the trace is missing or unreadable and
    `partial` is not set, InvalidOption, TraceNotFound, and NewerTrace.
    """
    database = open_database(trace, steps, ray=ray)
    database.check_whole(partial=partial)
    with database.telling(progress):
        names = columns.parse_pair(pair)
        if names == (TRAIN, ROLLOUT) and columns.has_only_other_passes(database, names):
            return compare_passes(database)
        if names == (TRAIN, ROLLOUT) and columns.has_versions_of_current(database):
            names = (CURRENT, TRAIN)
        is_default = names == (TRAIN, ROLLOUT)
        if is_default and ROLLOUT not in columns.num_scored(database) and (found := unpaired(database, trace)):
            return found
        try:
            data = gather(database, names, trace=os.fspath(trace))
        except NothingToCompare:
            if is_default and columns.masks_everything(database) and (found := unpaired(database, trace)):
                return found
            raise
        return judge(data, ":".join(names), data_findings(database, data.sample))


_HAS_REWARDS = "SELECT EXISTS (FROM sequences WHERE reward IS NOT NULL)"


def unpaired(database: Database, trace: str | os.PathLike[str]) -> CheckResult | None:
    """Check only rewards, advantages, groups and the reference. None if a trace has none of them."""
    scored = columns.num_scored(database)
    sample = read_sample(database, (TRAIN, ROLLOUT if ROLLOUT in scored else TRAIN), []) if TRAIN in scored else None
    found = data_findings(database, sample)
    if len(scored) < 2 and not found and database.connection.execute(_HAS_REWARDS).fetchall() == [(False,)]:
        return None
    finding = kinds.not_compared(columns.why_nothing(database, (TRAIN, ROLLOUT)))
    return CheckResult(
        trace=os.fspath(trace), pair=f"{TRAIN}:{ROLLOUT}", steps=database.steps, num_tokens=0, num_sampled_tokens=0,
        rms_d=math.nan, findings=(finding,), data=found, attempts=columns.attempts(database),
    )  # fmt: skip


def gather(database: Database, pair: Pair, *, trace: str, sums: tuple[str, ...] = NEEDED_SUMS) -> PairData:
    """Read everything the detectors need. `sums` names columns in schemas.sums.

    Raises NothingToCompare if the passes share no token.
    """
    columns.tell_sampled(database, pair)
    sample = _sample(database, pair, sums)
    if not sample.mask.any():
        raise NothingToCompare(columns.why_nothing(database, pair))
    execute, source = database.connection.execute, database.sources[0]
    contracts = execute("SELECT contract, contract_json FROM passes").fetchall()
    passes, known = columns.scored_passes(database), _sums(database, pair, sums)
    reference = cache(partial(logprobs_of, database, REFERENCE, sample, known.worst_steps))
    return PairData(
        trace=trace, steps=database.steps, condition=database.step_condition(), sample=sample,
        sums=known, contracts={name: json.loads(text) for name, text in contracts if text},
        settings=columns.read_hyperparameters(database), passes=passes, reference=reference if REFERENCE in passes else None,
        has_weights=source.store.exists(WEIGHTS), is_import=source.manifest.is_import,
        is_recorder=source.manifest.source == "recorder",
        model=next((state.model for state in columns.writer_states(database) if state.model), {}),
        attempts=columns.attempts(database), engine=_engine(database), first=_first_step(database, pair), keep=sample.compared,
    )  # fmt: skip


_engine = cached(read_engine_verdict)
_sums = cached(read_pair_sums)


@cached
def _sample(database: Database, pair: Pair, sums: tuple[str, ...]) -> Sample:
    (sample,) = spread(database, _read, [(pair, _sums(database, pair, sums).worst_steps)])
    return sample


def _read(database: Database, asked: tuple[Pair, list[int]]) -> Iterator[Sample]:
    yield read_sample(database, *asked)


def _first_step(database: Database, pair: Pair) -> tuple[int, float] | None:
    """Return the first step of the whole run and its rms d (nats), or None if the selected steps include it."""
    if database.steps == ALL_STEPS:
        return None
    query = f"SELECT step, rms_d FROM pair_steps('{pair[0]}', '{pair[1]}') ORDER BY step LIMIT 1"
    asked, first = (each.connection.execute(query).fetchall() for each in (database, database.of_steps(ALL_STEPS)))
    return None if not first or not asked or first[0][0] == asked[0][0] else (int(first[0][0]), float(first[0][1]))


def judge(data: PairData, pair: str, of_data: tuple[DataFinding, ...] = ()) -> CheckResult:
    """Run every detector.

    Raises NothingToCompare if no token has a finite logprob in both passes and no finding explains why.
    """
    sums, findings = data.sums, explain(data)
    for equal in (each for each in of_data if each.code == "reference_is_policy"):
        if findings[0].fails and findings[0].signal == "judged" and TRAIN in data.names.values():
            findings.insert(0, not_computed.reference_copied(data, equal.numbers))
    if not sums.num_tokens and not any(finding.fails for finding in findings):
        raise NothingToCompare(f"{data.trace}: no token in the loss has a finite logprob in both passes of {pair}")
    return CheckResult(
        trace=data.trace, pair=pair, steps=data.steps, num_tokens=sums.num_tokens,
        num_sampled_tokens=int(data.sample.compared.sum()), rms_d=sums.rms_d,
        findings=tuple(replace(finding, tokens=None) for finding in findings), owners=_owners(data, findings),
        data=of_data, notes=_notes(data), attempts=data.attempts,
    )  # fmt: skip


def _owners(data: PairData, findings: list[Finding]) -> tuple[TokenOwner, ...]:
    """Count the sampled tokens that each finding explains. Skip findings after `unexplained`, which are guesses."""
    owners, nobody = [], 0
    for finding in findings:
        num = data.num_kept
        if finding.side is not None and finding.tokens is not None:
            data = data.without(finding.tokens)
        if finding.code == "unexplained":
            nobody = num - data.num_kept
            break
        if finding.side is not None:
            owners.append(TokenOwner(owner=finding.code, num_tokens=num - data.num_kept))
    num = int(nobodys(data).sum()) if owners and data.num_kept and not nobody else 0
    rest = {"rounding": data.num_kept - num, "nobody": nobody + num}
    return (*owners, *(TokenOwner(owner=owner, num_tokens=num) for owner, num in rest.items()))


def _notes(data: PairData) -> tuple[str, ...]:
    sample = data.sample
    applies = {
        "few_tokens": data.num_kept < FEW_TOKENS,
        "no_contract": not any(sample.a.contracts) or not any(sample.b.contracts), "no_entropies": data.entropy is None,
        "few_steps": len(np.unique(sample.steps)) < 3, "no_prompts": all(prompt is None for prompt in sample.prompts),
        "attempts": len(data.attempts) > 1,
    }  # fmt: skip
    return tuple(code for code, holds in applies.items() if holds)


# --- Explaining a mismatch

_FIXED = (
    values.find_other_quantity, sampling.find_temperature, sampling.find_one_sided, sampling.find_penalty,
)  # fmt: skip
"""Detectors whose explanations make one side a fixed function of the other side's distribution."""
_VALUES = (
    not_computed.find_constants, not_computed.find_merged, values.find_clamped, values.find_unit, *_FIXED[:1],
    not_computed.find_constant_rows, misplaced.find_placement, *_FIXED[1:], values.find_low_precision, kinds.find_reference, values.find_unrelated,
)  # fmt: skip
"""Detectors whose explanations predict each token's d or its sign."""


def explain(data: PairData) -> list[Finding]:
    """Return the findings, most probable first. There is always at least one."""
    engine = kinds.find_engine_weights(data)
    parts = [_explain(part, is_known=bool(engine)) for part in _by_precision(data)]
    rest: list[Finding] = []
    for part in parts:
        rest = _added(rest, [each for each in part if each.side is not None or len(parts) == 1], None)
    if len(parts) > 1:
        rest = sorted(rest, key=lambda each: not each.fails)
        if not any(each.fails for each in rest):
            rest += [each for part in parts for each in part if each.side is None]
    if replays := kinds.routing_replay(data):
        contextual = [each.code for each in (kinds.ROW_CONTEXT, kinds.ONSET, kinds.COMPUTATION, kinds.NOT_REPEATABLE)]
        rest = [
            replace(each, numbers=each.numbers | {"replays": replays}) if each.code in contextual else each
            for each in rest
        ]
    return [*engine, *(each for each in rest if each.fails or not engine)]


def _by_precision(data: PairData) -> list[PairData]:
    known = {name or "": kinds.declared_precision(data.contracts.get(name or "", {})) for name in [*data.contracts, ""]}
    names = zip(data.sample.a.contracts, data.sample.b.contracts, strict=True)
    precision = np.array([str([known.get(name or "", known[""]) for name in pair]) for pair in names])[data.seq]
    found, counts = np.unique(precision, return_counts=True)
    if len(found) < 2:
        return [data]
    return [data.within(precision == found[each]) for each in np.argsort(-counts, kind="stable")]


def _explain(data: PairData, *, is_known: bool) -> list[Finding]:
    above = list(values.find_positive(data))
    if above and (units := _best(values.find_unit(data))):
        return _added([units.finding], [each for each in _explained(data.without(units.tokens)) if each.fails], None)
    facts = [each.finding for each in above]
    if any(finding.share > 0.5 for finding in facts):
        return facts
    facts += not_computed.find_missing(data)
    data = _without(data, above)
    for find in (sampling.find_grammar, not_computed.find_shared_constants):
        owned_by = list(find(data))
        facts += [each.finding for each in owned_by]
        data = _without(data, owned_by)
    equal = not_computed.find_equal(data)
    if data.num_kept < FEW:
        off = nobodys(data) if data.num_kept else data.keep[:0]
        gross = [kinds.unexplained_tokens(data, off, None)] if off.any() else []
        few = kinds.TOO_FEW.finding(data, "too_few", numbers={"num_tokens": data.num_kept, "least": FEW})
        return facts or gross or [each for each in equal if not each.fails] or [few]
    if not data.d.any():
        return [*facts, *(each for each in equal if each.fails or not facts)]
    copied = [each for each in equal if each.signal == "copied_steps"]
    found = [*equal, *([] if is_known else _explained(_without(data, copied)))]
    for detect in (not_computed.find_unsampled, sampling.find_sampled_elsewhere):
        if not any(finding.fails for finding in (*found, *facts)):
            found += [each.finding for each in detect(data)]
    if not is_known and not any(finding.fails for finding in (*found, *facts)):
        found += kinds.find_growth(data) or kinds.find_window(data)
    if not any(finding.fails or finding.code == values.LOW_PRECISION.code for finding in (*found, *facts)):
        found += [each.finding for each in values.find_low_precision(data) if each.finding.is_expected]
    found = sorted(found, key=lambda finding: not finding.fails) or ([] if facts else [kinds.rounding(data)])
    cut = bool(found) and found[0].code == "truncation" and any(each.numbers.get("value") == "-inf" for each in facts)
    is_first = cut or (bool(found) and found[0].fails and found[0].weight > 0.5)
    return [*found, *facts] if is_first else [*facts, *found]


def _explained(data: PairData) -> list[Finding]:
    found: list[Finding] = []
    behind: str | None = None
    for _ in range(_MAX_ROUNDS):
        if data.num_kept < FEW or data.rms() == 0.0:
            break
        # First test the differences that the trace declares: policy versions, quantisation and adapters.
        declares = (kinds.find_versions, kinds.find_quantisation, kinds.find_adapter) if not found else ()
        given = [each for find in declares for each in find(data)]
        is_quantised = any(each.signal == "contract" for each in given)
        declared = [_expected(data, each, is_quantised=is_quantised) for each in given]
        if any(each.is_expected or each.signal == "stopped" for each in declared):
            rest = data.within(data.updates_behind[data.seq] == 0)
            judged = _explained(rest) if rest.num_kept < data.num_kept else []
            return [*_exactly_explained(data), *declared, *(each for each in judged if each.fails)]
        placed = _places(data)
        whole = _unrefuted(data, _candidates(data), placed)
        best = _best([*whole, *placed, *_inside(data, placed, whole)])
        if best is None:
            return _added(found, (declared or _left(data)) if is_excessive(data) else [], behind)
        dated = _dated(data, best, _narrowed(data, best, _with_cause(data, best)))
        found = _added(found, [replace(each, tokens=best.tokens & data.keep) for each in dated], behind)
        if best.right is None:
            data = data.without(best.tokens)
        else:
            data, behind = data.corrected(best.tokens, best.right), best.finding.code
    return found


def _exactly_explained(data: PairData) -> list[Finding]:
    """Return an exact formula for the mismatch of older weights, if any. Different weights alone do not follow a formula."""
    older = data.within(data.updates_behind[data.seq] != 0)
    if older.num_kept < FEW or not is_excessive(older):
        return []
    exact = (each for each in _candidates(older) if each.left is not None and each.left < sampling.MAX_LEFT)
    whole = [each for each in exact if 2 * each.tokens.sum() > older.num_kept]
    best = _best([each for each in whole if not _is_learned(data, each.finding)])
    return [] if best is None else [replace(best.finding, tokens=best.tokens & older.keep)]


def _is_learned(data: PairData, finding: Finding) -> bool:
    """Return True if the updates themselves can cause what a formula explains: a temperature, if pass a's logits grow with
    the updates by at least a quarter of the factor found (the policy gets sharper), and an unknown unit, if rows scored
    with equal weights do not show it."""
    if finding.numbers.get("unit") in ("curve", "factor", "floor"):
        fresh = data.within(data.updates_behind[data.seq] == 0)
        return fresh.num_kept >= FEW and not is_excessive(fresh)
    temperature = finding.numbers.get("temperature")
    if finding.code != sampling.TEMPERATURE.code or not isinstance(temperature, float):
        return False
    version = data.sample.a.versions.filled(-1)[data.seq]
    known = [each for each in np.unique(version[version >= 0]) if (version == each).sum() >= FEW]
    widths = [width(data.a[version == each]) for each in known]
    if len(known) < 2:
        return False
    behind = float(np.mean(data.updates_behind[data.updates_behind != 0]))
    learned = behind * float(np.polyfit(known, np.log(np.maximum(widths, 1e-9)), 1)[0])
    return bool(learned * np.sign(np.log(temperature)) > abs(np.log(temperature)) / 4)


def _narrowed(data: PairData, best: Hypothesis, found: Sequence[Finding]) -> list[Finding]:
    """Narrow the first finding to a place with nearly all of the tokens that `best` explains and rounding cannot. If
    `best` predicts their values, the place must coincide with its tokens."""
    part = data.without(~best.tokens)
    if not FEW <= part.num_kept < 0.97 * data.num_kept:
        return list(found)
    if best.left is not None:
        asked = [place for place in places(data) if place.feature not in kinds.BY_TIME]
        asked.sort(key=lambda place: place.feature != "token_id")  # of several features, the id says most
        exact = _place_of(best.tokens[data.keep], asked, 0.9)
        return [_at(found[0], exact), *found[1:]] if exact else list(found)
    off, allowed = nobodys(part), allowed_noise(part)
    shown = [found[0].numbers.get("feature"), found[0].numbers.get("column")]
    for place in places(part) if off.any() else ():
        is_all = (off & place.inside).sum() > 0.9 * off.sum() and place.level_outside < allowed / 2
        if is_all and place.mean_ratio > 10 and place.feature not in shown:
            return [_at(found[0], place), *found[1:]]
    return list(found)


def _at(finding: Finding, place: Where) -> Finding:
    return replace(finding, numbers=finding.numbers | {f"within_{name}": each for name, each in place.numbers.items()})


def _dated(data: PairData, best: Hypothesis, found: Sequence[Finding]) -> list[Finding]:
    """Add to the first finding the step at which the fault begins, or the few steps to which it is confined."""
    tokens, steps = best.tokens & data.keep, data.sample.steps[data.sample.seq]
    there = np.unique(steps[tokens])
    without = np.setdiff1d(steps[data.keep], there)
    by_chance = float(tokens.sum()) * len(without) / max(len(there), 1)
    if by_chance < 5 or found[0].since is not None:
        return list(found)
    when: dict[str, Number] = {}
    if there.min() > without.max():
        when = {"since_step": int(there.min())}
    elif len(there) <= 5:
        when = {"in_steps": ", ".join(map(str, there))}
    return [replace(found[0], numbers=when | found[0].numbers), *found[1:]]


def _added(found: Sequence[Finding], more: Sequence[Finding], behind: str | None) -> list[Finding]:
    """Append the findings in `more` whose code or cause is new. Findings that only appear once the fault `behind` is
    corrected get no command, because commands read the uncorrected trace."""
    known = {(each.code, each.cause) for each in found}
    more = [each for each in more if (each.code, each.cause) not in known]
    if behind is not None:
        more = [replace(each, next=NOTHING, numbers=each.numbers | {"behind": behind}) for each in more]
    return [*found, *more]


def _candidates(data: PairData) -> list[Hypothesis]:
    # A non-deterministic side cannot be a fixed function of the other side, so leave out the detectors in _FIXED.
    tried = [find for find in _VALUES if find not in _FIXED] if not_repeatable(data) else _VALUES
    return [each for find in tried for each in find(data)]


def _unrefuted(data: PairData, whole: Sequence[Hypothesis], placed: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Return the explanations of the whole mismatch that its location does not refute: only those that predict values if
    one place contains nearly all tokens that rounding cannot explain, and the sides agree elsewhere."""
    off, error = nobodys(data), logit_error(data)
    for inside in (each.tokens[data.keep] for each in placed if each.gain > MIN_GAIN_NATS):
        is_all = inside.mean() < MAX_COVERED and (off & inside).sum() > 0.95 * off.sum() > 0
        if is_all and np.median(error[inside]) > 20 * np.median(error[~inside]):
            return [each for each in whole if each.left is not None or each.gain == float("inf")]
    return list(whole)


def _inside(data: PairData, placed: Sequence[Hypothesis], whole: Sequence[Hypothesis]) -> Iterator[Hypothesis]:
    """Yield explanations for the tokens inside the places with the largest gain."""
    most = 0.97 * data.num_kept
    parts = [
        each for each in placed
        if each.gain > MIN_GAIN_NATS and each.left is None and each.tokens.sum() < most and _is_part(each.finding)
    ]  # fmt: skip
    for place in sorted(parts, key=lambda each: -each.gain)[:_MAX_PARTS]:
        inside, outside = data.without(~place.tokens), data.without(place.tokens)
        if inside.num_kept < FEW:
            continue
        # No explanation predicts rounding errors, so an error as large as that outside the place may remain.
        noise = min(level(outside) / max(level(inside), 1e-30), 0.9) if outside.num_kept else 0.0
        is_narrow = place.finding.numbers.get("kind") == "from" or len(np.unique(inside.position)) < 5
        by_position = "position" in str(place.finding.numbers.get("feature")) and is_narrow
        for each in _candidates(inside):
            alike = [other for other in whole if other.gain > MIN_GAIN_NATS and _shared(each, other) > 0.8]
            same = min(alike, key=lambda other: (other.rank, -other.gain), default=None)
            # Values that are wrong from some position on always look as if they came from different tokens or from a
            # smaller vocabulary, so explanations of that kind do not count there.
            left = np.sqrt(max((each.left or 0.0) ** 2 - noise**2, 0.0) / (1 - noise**2))
            if left <= MAX_LEFT and not (by_position and each.left is None and same is None):
                yield replace(same or replace(each, beside=place.finding), gain=each.gain + place.gain)


def _shared(one: Hypothesis, other: Hypothesis) -> float:
    return _overlap(one.tokens, other.tokens)


def _overlap(one: np.ndarray, other: np.ndarray) -> float:
    """Return the share of tokens in both sets ([N] bool each) among those in either (Jaccard index)."""
    return float((one & other).sum() / max((one | other).sum(), 1))


def _place_of(tokens: np.ndarray, asked: Sequence[Where], least: float) -> Where | None:
    """Return the first of the places that overlap most with `tokens` ([K] bool), or None if they overlap by `least` at most."""
    best = max(asked, key=lambda place: _overlap(place.inside, tokens), default=None)
    return best if best is not None and _overlap(best.inside, tokens) > least else None


def _is_part(place: Finding) -> bool:
    if place.code == kinds.BOUNDARY.code and place.share > 0.15:
        return True
    fixed = (kinds.ONE_PLACE.code, kinds.BOUNDARY.code, misplaced.RETOKENISED.code)
    is_other = place.code not in fixed and place.numbers.get("cause") != "ids" and place.signal != "in_rows"
    return is_other or place.numbers.get("feature") == "token_before"


def _best(found: Sequence[Hypothesis]) -> Hypothesis | None:
    """Return the explanation with the largest gain, or a simpler one with at least half. None if the gain is too small."""
    predicted = [each for each in found if each.left is not None and each.left < MAX_LEFT and each.gain > MIN_GAIN_NATS]

    def is_predicted(one: Hypothesis) -> bool:
        return any((one.tokens & each.tokens).sum() > 0.6 * one.tokens.sum() for each in predicted)

    found = [e for e in found if e.finding.code != values.UNRELATED.code or e.left is not None or not is_predicted(e)]
    best = max(found, key=lambda each: each.gain, default=None)
    if best is None or best.gain <= MIN_GAIN_NATS:
        return None
    is_exact = best.left is not None and best.left < WELL_PREDICTED
    rivals = (each for each in found if each.gain >= best.gain / 2 and (not is_exact or each.left is not None))
    return min(rivals, key=lambda each: (each.rank, -each.gain))


def _without(data: PairData, found: Sequence[Hypothesis | Finding]) -> PairData:
    for each in found:
        assert each.tokens is not None
        data = data.without(each.tokens)
    return data


def _is_told(data: PairData, place: Where) -> bool:
    """Return True if rounding explains the mismatch outside a place, but not the mismatch inside it.

    Rounding does not depend on a writer, contract or setting, so for these, three times the mismatch outside is enough.
    """
    allowed, off = allowed_noise(data), nobodys(data)
    if place.level_outside > allowed or (off & place.inside).sum() < off.sum() / 2:
        return False
    inside = level(data.within(place.inside))
    if place.feature in (*data.sample.settings, "writer_a", "writer_b", "contract_a", "contract_b"):
        return inside > allowed / 8 and place.mean_ratio > 3
    is_off = place.mean_ratio > 3 and float(off[place.inside].mean()) > 0.2
    is_large = inside > allowed / 2 and place.ratio > 5 and data.num_kept >= FEW_TOKENS
    return is_large or is_off or is_above(data) or kinds.is_fault(data)


def _places(data: PairData) -> list[Hypothesis]:
    where = [place for place in places(data) if _is_told(data, place)][:_MAX_PLACES]
    found = [*kinds.find_placed(data, where), *misplaced.find_neighbours(data, where)]
    if not is_excessive(data):
        return found
    # A place with nearly the same tokens describes them better.
    parts = [each for each in kinds.find_parts(data) if all(_shared(each, other) < 0.7 for other in found)]
    return [*found, *misplaced.find_broken(data), *parts]


# --- Judging and describing a mismatch


def is_excessive(data: PairData) -> bool:
    """Return True if rounding cannot explain the mismatch's size, overall or at some tokens, or what it correlates with."""
    return bool(data.num_kept) and (is_above(data) or bool(nobodys(data).any()) or kinds.is_fault(data))


def is_above(data: PairData) -> bool:
    squares = data.noise[np.isfinite(data.noise)] ** 2
    if not len(squares):
        return False
    error = float(squares.std() / max(squares.mean(), 1e-30)) / (2 * np.sqrt(len(squares)))
    return bool(level(data) > MAX_EXCESS * allowed_noise(data) * (1 + 3 * min(error, 0.5)))


def _with_cause(data: PairData, best: Hypothesis) -> list[Finding]:
    if best.finding.signal in ("judged", "implied"):
        return kinds.find_kinds(data, best.place)
    place, cause = (best.finding, None) if best.beside is None else (best.beside, best.finding)
    is_subset = place.code == kinds.SUBSET.code
    if not is_subset and cause is not None:
        numbers = cause.numbers | {f"part_{name}": place.numbers.get(name) for name in ("feature", "kind", "values")}
        numbers["part_sequences"] = len(np.unique(data.sample.seq[best.tokens & data.keep]))
        return [replace(cause, numbers=numbers | {"part_of": len(np.unique(data.seq))})]
    if not is_subset:
        is_fixed = place.code in (kinds.ONE_PLACE.code, kinds.BOUNDARY.code) and not place.numbers.get("cause")
        return [place, *(each for each in (_state(data)[:1] if is_fixed else ()) if each.weight >= 0.4)]
    inside = data.without(~best.tokens)
    if cause is None and (is_excessive(inside) or place.numbers["column"] in kinds.BY_TIME):
        cause = _state(data)[0]
    if cause is None:
        return [place]
    if place.since is not None:
        cause = replace(cause, numbers=cause.numbers | {"since_step": place.since})
    is_likely = cause.code != kinds.COMPUTATION.code and cause.weight >= 0.6
    return [cause, place] if best.beside is not None or place.since is not None or is_likely else [place, cause]


def _left(data: PairData) -> list[Finding]:
    off = nobodys(data)
    if 0 < off.mean() <= 0.1:
        without = data.within(~off)
        if not (is_above(without) or kinds.is_fault(without)):
            if found := kinds.find_router_flips(data, off) or values.find_scattered(data, off):
                return found
            likely = (each for each in (_state(data)[:1] if off.sum() >= FEW else ()) if each.weight >= 0.4)
            return [kinds.unexplained_tokens(data, off, _place_of(off, places(data), 0.5)), *likely]
    return _state(data)


def _state(data: PairData) -> list[Finding]:
    if kinds.weights_agree(data):
        return [kinds.equal_weights(data)]
    for find in (kinds.find_same_weights, kinds.find_after_update, kinds.find_frozen, kinds.find_earlier_growth):
        if found := find(data):
            return found
    return kinds.find_kinds(data)


def _expected(data: PairData, finding: Finding, *, is_quantised: bool) -> Finding:
    """Mark a declared difference as expected unless the mismatch is larger than the difference can explain."""
    allowed = allowed_noise(data)
    if finding.signal == "policy_versions":
        same = ~np.isin(data.seq, np.flatnonzero(data.updates_behind))
        most = allowed * (4 * MAX_EXCESS if is_quantised else 1)
        return replace(finding, is_expected=bool(not same.any() or np.median(np.abs(data.d[same])) <= most))
    return replace(finding, is_expected=finding.signal == "contract" and level(data) <= 4 * MAX_EXCESS * allowed)
