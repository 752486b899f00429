from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pyarrow as pa

from ...schemas.errors import warn
from ...schemas.steps import ALL_STEPS
from ...tracer.progress import Progress, no_progress
from ..advice import Advice
from ..check.check import CheckResult
from ..facts import thresholds as t
from ..facts.recorded import GIVEN, read_recorded
from ..facts.rollouts import Rollouts, other_endings, read_prompts
from ..facts.series import COLLAPSE, Fall, Outcome, shared_values
from ..statement import Measured, Statement
from ..statistics.intervals import student_quantile
from ..statistics.noise import highest_long_run_variance
from ..trace.columns import parse_pair
from ..trace.database import Database
from ..trace.source import Pair
from ..views import open_database
from .attribution import INTERVENTION, OBSERVATION, Attribution, Difference, NotFinite, SupposedCause, Suspect
from .brief import query
from .divergence import SAMPLING, UPDATE
from .fact import Fact
from .looks.engine import OF_WEIGHTS, carried
from .looks.samples import data_faults_since
from .model import ALONE, BESIDE, judged, shares_prompts, supported, table, table_beside
from .run_facts import Facts, read_facts
from .text import DIFFERENCES, evidence_sentence

_NUMBERS = ("reward", "grad_norm", "loss")
"""A run cannot recover if any of these series stays NaN or infinite."""
_MOST_STEPS = 12
_FEWEST_LAST = 8
"""Minimum number of steps for comparing the end of a run with its baseline."""
_LEAST_DIFFERENCE = 0.1
_SET = ("setting.", "learning_rate")
"""Prefixes of features that compare settings. Different settings are evidence even if the data differ earlier."""
FELL_TOO = 0.6
"""The baseline counts as collapsed too if its relative drop exceeds this fraction of the run's relative drop."""


def attribute(
    trace: str | os.PathLike[str] | Database,
    *,
    control: str | os.PathLike[str] | Database | None = None,
    pair: str = "train:rollout",
    steps: str = ALL_STEPS,
    progress: Progress = no_progress,
) -> Attribution:
    """Report whether and when a run collapsed or began to decline, what changed first, and the most likely cause.

    The outcome is a logged evaluation or, without one, the sequence reward. Each suspect comes with a probability, the
    evidence for and against it, and the cheapest replay or rerun to test it. A single run yields only observations,
    because the first change need not be the cause. For an intervention, pass `control`: a baseline run with the same
    seeds and one deliberate change, ideally an exact engine. If only the baseline improves, the drop has the kind
    `flat`. A mismatch that begins after the drop is never its cause.

    `steps` (3:80, -10:, 2:200:2) restricts the diagnosis to part of the run. Earlier steps still serve as evidence,
    later steps only if the drop begins by the last selected step. A later collapse is reported without its cause.

    Raises InvalidOption, TraceNotFound, NewerTrace or DamagedTrace.
    """
    names, baseline = parse_pair(pair), None if control is None else open_database(control, steps)
    return explain(open_database(trace, steps), names, control=baseline, progress=progress)


def explain(
    database: Database,
    pair: Pair,
    *,
    control: Database | None = None,
    checked: CheckResult | None = None,
    progress: Progress = no_progress,
) -> Attribution:
    """Run `attribute` on open databases. Pass `checked` to reuse a `check` result."""
    if control is not None and control.sources[0].store.root == database.sources[0].store.root:
        warn(f"{control.given[0]} is compared with itself, so no difference can be found; pass another run as control")
    elif control is not None:
        _check_baseline(database, control)
    with database.telling(progress), nullcontext() if control is None else control.telling(progress):
        facts = read_facts(database, pair, checked=checked)
        if control is None:
            return _alone(facts)
        return _beside(facts, read_facts(control.of_steps(facts.database.steps), pair, is_control=True))


def _check_baseline(database: Database, control: Database) -> None:
    of_run, of_control = read_prompts(database), read_prompts(control)
    if of_run and of_control and not of_run & of_control:
        warn(
            f"{control.given[0]} shares no prompts with {database.given[0]}; a baseline needs the same seeds and data, apart "
            "from the cause"
        )


def _alone(facts: Facts) -> Attribution:
    if facts.fall is not None:
        known = table(facts)
        return _attribution(facts, known, judged(known, ALONE), None)
    supposed, known = _supposed(facts, sorted(set(broken_steps(facts)))[:_MOST_STEPS])
    return _attribution(facts, known, (), supposed)


def _beside(facts: Facts, control: Facts) -> Attribution:
    shares = shares_prompts(facts, control)
    has_tokens = facts.has_tokens or control.has_tokens
    if shares or not has_tokens:
        facts = facts.beside(control)
    known = table(facts)
    found, parted = table_beside(facts, control)
    fell_too = facts.fall and control.fall and control.fall.share > FELL_TOO * facts.fall.share
    if fell_too:
        shared = {one.feature for one in table(control)}
        suspects = judged([one for one in known if one.feature in shared], ALONE)
    else:
        suspects = judged((*known, *found), BESIDE)
    shown = [one for one in found if one.code in DIFFERENCES and abs(one.level) >= _LEAST_DIFFERENCE]
    notes = [] if shares else [Statement(code="other_prompts" if has_tokens else "no_prompts")]
    if facts.fall and not fell_too and not shown:
        notes.append(Statement(code="no_difference"))
    configured = [one for one in shown if one.feature.startswith(_SET)]
    if parted is None:
        decide = shown
    elif configured and parted.code in (UPDATE, SAMPLING):
        decide = configured  # the settings explain why the update or the samples differ
    else:
        decide = [*shown[:1], *configured]
    if facts.fall is None and (effect := _effect(facts.outcome, control.outcome)) is not None:
        notes.append(effect)
    is_intervention = shares and (facts.fall is None or len({supported(one, BESIDE, suspects) for one in decide}) == 1)
    supposed, told = None, (*found, *known)
    if facts.new_reward is not None:  # the run alone shows that the reward changed
        supposed, told = _supposed(facts, [facts.new_reward.step])
    elif facts.fall is None:
        supposed, told = _supposed(facts, [] if parted is None else [parted.step], control)
    result = _attribution(facts, told, suspects, supposed)
    return replace(
        result, control=control.trace, kind=INTERVENTION if is_intervention else OBSERVATION,
        difference_codes=tuple(
            Difference(suspect=supported(one, BESIDE, suspects), code=one.code, values=one.values) for one in shown
        ),
        note_codes=(*result.note_codes, *notes),
    )  # fmt: skip


def _effect(run: Outcome | None, baseline: Outcome | None) -> Statement | None:
    """Return the mean difference between two runs' outcomes over the last shared steps, with its 95% interval."""
    if run is None or baseline is None or run.name != baseline.name:
        return None
    steps, of_run, of_baseline = shared_values(run, baseline)
    n = max(_FEWEST_LAST, len(steps) // 5)
    if len(steps) < n:
        return None
    apart = (of_run - of_baseline)[-n:]
    mean = float(apart.mean())
    reach = student_quantile(0.975, n - 1) * math.sqrt(highest_long_run_variance(apart - mean, 1) / n)
    values: dict[str, Measured] = {
        "outcome": run.name, "num_steps": n, "difference": mean, "low": mean - reach, "high": mean + reach,
        "most": abs(mean) + reach,
    }  # fmt: skip
    if not apart.any():
        return Statement(code="same_outcome", values={"outcome": run.name, "num_steps": n})
    return Statement(code="no_effect" if abs(mean) <= reach else "ends_apart", values=values)


def _supposed(
    facts: Facts, steps: Iterable[int], control: Facts | None = None
) -> tuple[SupposedCause | None, tuple[Fact, ...]]:
    """Judge the suspects for a drop at each of `steps`. Return the most probable cause and its facts."""
    found = []
    for step in steps:
        at = supposed_at(facts, step)
        told = (*table(at), *(() if control is None else table_beside(at, control)[0]))
        suspects = judged(told, ALONE if control is None else BESIDE)
        if facts.new_reward is not None and step == facts.new_reward.step:
            # Identical responses to identical prompts certainly get different rewards from this step on, which rules out
            # other prompts and `unknown`: scale the other probabilities up.
            named = [one for one in suspects if one.code not in ("unknown", "data")]
            total = sum(one.probability for one in named)
            suspects = tuple(replace(one, probability=one.probability / total) for one in named)
        is_named = control is not None or suspects[0].code != "unknown"
        cause = SupposedCause(suspects=described(at, suspects), step=step) if is_named else None
        found.append((suspects[0].probability if cause else 0.0, sum(abs(one.level) for one in told), cause, told))
    return max(found, key=lambda one: one[:2], default=(0.0, 0.0, None, ()))[2:]


def _attribution(
    facts: Facts, known: Iterable[Fact], suspects: tuple[Suspect, ...], supposed: SupposedCause | None
) -> Attribution:
    notes, changed = [*facts.notes], facts.new_reward
    if changed is not None and not (facts.outcome is not None and facts.outcome.is_evaluation):
        notes.append(Statement(code="reward_changed", values=changed.values))
    since = {name: facts.series[name].not_finite_since for name in _NUMBERS if name in facts.series}
    broken = [NotFinite(series=name, step=step) for name, step in since.items() if step is not None]
    return Attribution(
        trace=facts.trace, steps=facts.steps_asked, control=None, kind=OBSERVATION, num_steps=len(facts.steps),
        outcome=facts.outcome.name if facts.outcome else "", fall=facts.fall, later=facts.later, changes=facts.near,
        suspects=described(facts, suspects) if facts.fall else (),
        facts=tuple(sorted(known, key=lambda one: -abs(one.level))),
        supposed=supposed, not_finite=tuple(sorted(broken, key=lambda each: each.step)), note_codes=tuple(notes),
    )  # fmt: skip


_FACTS = (
    ("run", pa.string()), ("code", pa.string()), ("series", pa.string()), ("step", pa.int64()), ("low", pa.int64()),
    ("high", pa.int64()), ("before", pa.string()), ("after", pa.string()), ("level", pa.float64()),
    ("order", pa.string()), ("sentence", pa.string()),
)  # fmt: skip
_BEFORE = ("from_value", "before", "before_share", "lag_before", "ratio_before", "distance_before")
_AFTER = ("to_value", "after", "correlation", "share", "lag", "ratio_since", "distance_after", "factor", "mean_abs_d")


def facts_table(database: Database) -> pa.Table:
    """Return the rows of the SQL view `facts`, with the strongest facts first within each run."""
    rows = []
    for source in database.sources:
        result = explain(database.reopened(source), ("train", "rollout"))
        for one in result.facts:
            before, after = one.value(*_BEFORE), one.value(*_AFTER)
            rows.append(
                {"run": source.run, "code": one.code, "level": one.level, "order": one.order(result.fall),
                 "series": one.value("series"), "sentence": evidence_sentence(one),
                 "before": None if before is None else str(before), "after": None if after is None else str(after),
                 **{name: one.value(name) for name in ("step", "low", "high")}}
            )  # fmt: skip
    return pa.Table.from_pylist(rows, pa.schema(list(_FACTS)))


_FEWEST_STEPS = 3


def supposed_at(facts: Facts, step: int) -> Facts:
    fall = Fall(
        outcome=facts.outcome.name if facts.outcome else "", onset_of="", kind=COLLAPSE, step=step, low=step, high=step + 1,
        interval=(step - 1, step + 1), fallen=step + int(t.AHEAD), before=0.0, after=0.0, size_in_sd=0.0,
    )  # fmt: skip
    return facts.with_fall(fall)


def broken_steps(facts: Facts) -> Iterator[int]:
    for change in read_recorded(facts.database, facts.pair):
        is_given = change.kind in GIVEN and change.abnormal >= t.OF_NO_SCATTER and change.shape != "ramp"
        is_mismatch = change.series == "mean_abs_d" and isinstance(change.after, float)
        if is_given or (is_mismatch and float(change.after) >= t.MATERIAL_MISMATCH):
            yield change.step
    if (ending := ending_step(facts.rollouts)) is not None:
        yield ending
    if facts.changed_rewards is not None:
        yield facts.changed_rewards.step
    yield from (since for _, since, _ in data_faults_since(facts))
    lag = np.abs(facts.values("version_lag"))
    known = np.flatnonzero(np.isfinite(lag))
    grows = known[1:][np.diff(lag[known]) >= 1]
    yield from (int(facts.steps[place]) for place in grows[:1])


def ending_step(rollouts: Rollouts) -> int | None:
    steps = np.unique(rollouts.step)
    fifth = len(steps) // 5
    if fifth < _FEWEST_STEPS:
        return None
    steps, share = other_endings(rollouts, rollouts.until(int(steps[fifth - 1])))
    for at in range(fifth, len(steps) - _FEWEST_STEPS + 1):
        if np.median(share[:at]) <= t.OTHER_ENDINGS / 4 and share[at : at + _FEWEST_STEPS].min() >= t.OTHER_ENDINGS:
            return int(steps[at])
    return None


_NEXT = {
    "optimizer": "rerun from the last version before the drop with a tenth of the learning rate and everything else unchanged",
    "reward": "score the recorded responses around the drop again with the verifier, and compare with sequences.reward",
    "pairing": "where the trainer builds a batch, check that each row's reward, advantage and logprobs have the same seq_id",
    "entropy": "rerun with a different entropy term (sign or size) or a higher clip bound (clip_high 0.28)",
    "data": "evaluate the weights from before and after the change on the earlier prompts: if both do equally well, the prompts are the cause",
    "truncation": "resample one step from the same weights with a larger max_tokens, and compare the rewards",
    "reference": "rerun from the last version before the drop with KL coefficient 0 and everything else unchanged",
    "staleness": "to test this, rerun synchronously, with one policy version per step",
    "length": "if the correlation is positive, remove the length-dependent part of the reward",
    "advantages": "recompute one step's advantages from sequences.reward and group_id, and compare with sequences.advantage",
}  # fmt: skip


_OF_RESPONSES = ("reward", "advantages")
"""Suspects whose next step needs recorded responses."""
RECORD = "tim-trace record -o RUN -- COMMAND"


def described(facts: Facts, suspects: Iterable[Suspect]) -> tuple[Suspect, ...]:
    return tuple(
        replace(suspect, detail=kind(facts) if suspect.code == "mismatch" else "", next=_next(facts, suspect.code))
        for suspect in suspects
    )


def _next(facts: Facts, suspect: str) -> Advice:
    trace, step = shlex.quote(facts.trace), facts.fall.step if facts.fall else "all"
    if suspect in ("mismatch", "staleness", "length") and (facts.mismatch is None or not facts.has_tokens):
        return Advice(RECORD, "with an engine that returns logprobs; in your own loop, call Recorder.add_scores")
    if suspect in _OF_RESPONSES and not len(facts.rollouts.step):
        return Advice(RECORD, "to record responses; in your own loop, call Recorder.add_sequences")
    if suspect == "mismatch":
        found = facts.checked.findings[0].next if facts.checked else None
        return Advice(found) if found else Advice(f"tim-trace triangulate {trace} --steps {step}")
    if suspect in ("staleness", "length"):
        onset = (facts.fall.step, facts.fall.latest) if facts.fall else None
        return Advice(f'tim-trace sql {trace} "{query(suspect, onset, len(facts.steps))}"', _NEXT[suspect])
    return Advice(remark=_NEXT.get(suspect, ""))


def kind(facts: Facts) -> str:
    """Return what `check` says about the mismatch: a cause or a finding's code, or "" if it explains too little."""
    if facts.checked is None:
        return ""
    first = facts.checked.findings[0]
    if first.signal == "engine_weights":
        return str(first.numbers["cause"])
    if facts.checked.is_valid or carried(facts) < 0.1:
        return ""
    return str(first.numbers.get("cause") or first.code) if first.code in OF_WEIGHTS else first.code
