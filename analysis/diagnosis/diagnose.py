from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from ...replay.arm_option import VLLM
from ...replay.arms import arm_text, parse_arm
from ...schemas.documents import Contract
from ...schemas.errors import NothingToCompare
from ...schemas.modules import has_experts
from ...schemas.passes import REPLAY_PREFIX, ROLLOUT, TRAIN
from ...schemas.steps import ALL_STEPS
from ...tracer.progress import Progress, no_progress
from ..advice import Advice
from ..alarms.figures import figure, token_figures
from ..alarms.reading import read_alarms
from ..attribution.attribute import RECORD, explain
from ..attribution.attribution import Attribution
from ..check import commands
from ..check.check import CheckResult, gather, judge, unpaired
from ..check.data_checks import data_findings
from ..check.faults import FAULTS
from ..check.faults.kinds import declared_precision
from ..check.pair_data import PairData, Precision, dtype_of, precisions
from ..facts.changes import known_run
from ..facts.conditions import SETTING
from ..facts.read_series import read_averages, read_series
from ..facts.recorded import CONTRACT, RecordedChange, read_recorded
from ..facts.thresholds import ABRUPT
from ..location import Location, newest
from ..statistics.estimators import FROM_SUMS, Array, addable
from ..statistics.intervals import Interval, NoInterval, bootstrap, ends, unit
from ..trace.columns import parse_pair, tell_sampled
from ..trace.database import Database
from ..trace.macros import quoted
from ..trace.pair_sums import COUNTS, OF_DIFFERENCES, SUM_EXP_ABS_D
from ..trace.source import Pair
from ..trace.tokens import tokens_by_step
from ..views import open_database
from .diagnosis import Diagnosis, FigureComparison, Numerics, ReplayEffect, SizeComparison, data_faults
from .figures import FIGURES
from .text import cause_text, effect_text, version_text

_CONFIDENCE = 0.95

_SUMS = """
SELECT count(*) AS num, sum((logprob_a - logprob_b) ** 2) AS gap, sum((logprob_c - logprob_b) ** 2) AS "left",
       any_value({unit}) AS unit
FROM triangle({a}, {b}, {c}) JOIN sequences AS s USING (run, step, seq_id)
GROUP BY run, step, seq_id ORDER BY run, step, seq_id
"""


_ENGINE_ALONE = {"engine", "mode"}


def replay_effects(database: Database, pair: Pair, passes: list[str]) -> tuple[ReplayEffect, ...]:
    found, contracts = [], _contracts(database)
    engines = {contract.get("engine") for contract in contracts[pair[1]]} - {None}
    tell_sampled(database, set(passes) - {*pair})
    for name in passes:
        if not name.startswith(REPLAY_PREFIX) or name in pair:
            continue
        query = _SUMS.format(a=quoted(pair[0]), b=quoted(pair[1]), c=quoted(name), unit=unit("s"))
        rows = database.ask(query).dicts()
        num, gap, left = (math.fsum(row[column] for row in rows) for column in ("num", "gap", "left"))
        if num and gap:
            gap_N, left_N = (np.array([row[column] for row in rows], np.float64) for column in ("gap", "left"))
            interval = removed_interval(gap_N, left_N, np.array([row["unit"] for row in rows], np.uint64))
            low, high = ends(interval) or (None, None)
            found.append(ReplayEffect(
                arm=name.removeprefix(REPLAY_PREFIX), pair=pair, num_tokens=int(num), gap_rms=(gap / num) ** 0.5,
                left_rms=(left / num) ** 0.5, removed=1 - (left / num) / (gap / num), low=low, high=high,
                no_interval=str(interval) if isinstance(interval, NoInterval) else None,
                is_own_engine=any(_is_of_engines(contract, engines) for contract in contracts[name]),
                changes=_changes(contracts[name]),
            ))  # fmt: skip
    # If a replay as recorded removes the mismatch, the trainer did not compute what it recorded, and no other arm shows more.
    as_recorded = [each for each in found if each.is_as_recorded and each.code == "settles"]
    return tuple(as_recorded or sorted(found, key=lambda each: -each.removed))


def _contracts(database: Database) -> dict[str, list[Contract]]:
    found: dict[str, list[Contract]] = defaultdict(list)
    for name, text in database.connection.execute('SELECT "pass", contract_json FROM passes').fetchall():
        if text:
            found[name].append(json.loads(text))
    return found


def _changes(contracts: list[Contract]) -> str | None:
    arms = {arm_text(contract["arm"]) for contract in contracts if isinstance(contract.get("arm"), dict)}
    return arms.pop() if len(arms) == 1 else None


def _is_of_engines(contract: Contract, engines: set[object]) -> bool:
    arm = set(contract.get("arm") or {})
    return contract.get("engine") in engines and "engine" in arm and arm <= _ENGINE_ALONE


def removed_interval(gap_N: Array, left_N: Array, unit_N: np.ndarray) -> Interval | NoInterval:
    found = bootstrap(
        {"removed": lambda t: 1 - t["left"] / t["gap"]}, {"gap": gap_N, "left": left_N}, unit_N, _CONFIDENCE
    )["removed"]
    return found if isinstance(found, NoInterval) else (found[0], min(found[1], 1.0))


def diagnose(
    trace: str | os.PathLike[str] | Database, *, pair: str = "train:rollout",
    control: str | os.PathLike[str] | Database | None = None, steps: str = ALL_STEPS, progress: Progress = no_progress,
) -> Diagnosis:  # fmt: skip
    """Report whether and why a run collapsed, whether the comparison is valid, and whether the mismatch is normal.

    Combines `attribute` (against the baseline `control` if given), `check`, the declared and inferred precision of
    each side, published values, the alerts at every step, and the effect of recorded replays. `steps` (3:80, -10:,
    2:200:2) restricts the answers to part of the run. Other steps still serve as evidence.

    Raises NothingToCompare if the passes share no token, InvalidOption, TraceNotFound, NewerTrace or DamagedTrace.
    """
    names = parse_pair(pair)
    database = open_database(trace, steps)
    opened_control = None if control is None else open_database(control, steps)
    if not tokens_by_step(database) and read_series(database, pair=names):
        return _of_scalars(database, names, opened_control, progress)
    with database.telling(progress):
        more = () if database.sums.covers(names) else (SUM_EXP_ABS_D,)
        try:
            data = gather(database, names, trace=database.given[0], sums=(*COUNTS, *OF_DIFFERENCES, *more))
        except NothingToCompare:
            if names != (TRAIN, ROLLOUT) or (checked := unpaired(database, database.given[0])) is None:
                raise
            return _of_scalars(database, names, opened_control, progress, checked)
    checked = judge(data, pair, data_findings(database, data.sample))
    a, b = sides = precisions(data)
    metrics = own_metrics(data)
    declared = [value.lower() for side in "ab" for value in declared_precision(data.contract(side))]
    is_float8 = any(name in value for value in declared for name in ("fp8", "float8"))  # such as the cache's dtype
    coarser = "float8" if is_float8 else coarser_dtype(sides)
    figures = _figures(metrics, coarser)
    replays = replay_effects(database, names, data.passes)
    sums = data.sums
    of_tokens = token_figures(sums.steps, sums.columns) if SUM_EXP_ABS_D in sums.columns else None
    attribution = explain(database, names, control=opened_control, checked=checked, progress=progress)
    with database.telling(progress):
        jumps = _jumps(database, names)
        found = newest(database)
    located = None if found is None else replace(found.location, operators=())
    causes = (cause_text(each) for each in replays if each.code == "settles")
    if (cause := next(causes, "").partition(": ")[0]) and checked.findings[0].cause == FAULTS["weights_differ"]:
        checked = replace(checked, findings=(replace(checked.findings[0], cause=cause), *checked.findings[1:]))
    size = size_comparison(checked.findings[0].code, metrics.get("rms_d", math.nan), figures, coarser)
    return Diagnosis(
        checked=checked, attribution=attribution, jumps=jumps, metrics=metrics, figures=figures, replays=replays,
        numerics=Numerics(
            passes=names, declared=(a.declared, b.declared), logits=(a.logits, b.logits), values=(a.values, b.values),
            in_file=(a.is_stored, b.is_stored),
        ),
        size=replace(size, is_inferred=not is_float8 and coarser not in (a.declared, b.declared)), alarms=read_alarms(database, names, of_tokens),
        next=(*_not_finite(data, attribution), *_next(data, checked, replays, located)), located=located,
    )  # fmt: skip


def _of_scalars(
    database: Database, pair: Pair, control: Database | None, progress: Progress, checked: CheckResult | None = None
) -> Diagnosis:
    """Diagnose a run of which no two passes can be compared. `checked` has the faults of its rewards and data."""
    attribution = explain(database, pair, control=control, progress=progress)
    series, averages = read_series(database, pair=pair), read_averages(database)
    known = {name: figure(name, series, averages) for name in _LOGGED}
    metrics = {name: float(values[1].mean()) for name, values in known.items() if values is not None}
    half_square = metrics.get("k2", metrics.get("k3"))  # k3 is d^2 / 2 to second order
    if half_square is not None:
        metrics["rms_d"] = math.sqrt(2 * max(half_square, 0.0))
    figures = tuple(replace(each, fits=True) for each in _figures(metrics, None))
    return Diagnosis(
        checked=checked, attribution=attribution, jumps=_jumps(database, pair), metrics=metrics, figures=figures, replays=(),
        numerics=Numerics(passes=pair, declared=(None, None), logits=(None, None), values=(None, None)),
        size=SizeComparison(code="unpublished", own=metrics.get("rms_d", math.nan), coarser=None),
        alarms=read_alarms(database, pair),
        next=() if attribution.fall is None else (Advice(RECORD, "curves alone rarely show the cause"),),
    )  # fmt: skip


def _jumps(database: Database, pair: Pair) -> tuple[RecordedChange, ...]:
    recorded = read_recorded(known_run(database, pair)[0], pair)
    given = [change for change in recorded if change.kind in (SETTING, CONTRACT)]
    found = [
        replace(change, follows=next((one.series for one in given if change.low <= one.high and one.low <= change.high), ""))
        for change in recorded
        if change.series == "k3" and not isinstance(change.before, str) and not isinstance(change.after, str)
        and change.after >= ABRUPT * change.before and change.after > 0
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda change: -abs(change.size_in_sd or 0.0)))


def coarser_dtype(sides: tuple[Precision, Precision]) -> str | None:
    return _coarsest(side.coarsest for side in sides)


def _coarsest(dtypes: Iterable[str | None]) -> str | None:
    return max((dtype for dtype in dtypes if dtype in _ORDER), key=_ORDER.index, default=None)


_ORDER = ("float32", "float16", "bfloat16", "float8")


def _figures(metrics: dict[str, float], coarser: str | None) -> tuple[FigureComparison, ...]:
    found = [
        FigureComparison(figure=figure, own=metrics[figure.metric], fits=_coarsest(figure.dtypes) == coarser)
        for figure in FIGURES
        if figure.metric in metrics
    ]
    return tuple(sorted(found, key=lambda each: not each.fits))


def size_comparison(
    verdict: str, own: float, figures: Sequence[FigureComparison], coarser: str | None
) -> SizeComparison:
    """Compare rms d with published values from healthy runs. `verdict` is the code of `check`'s first finding."""
    comparable = (each.figure for each in figures if each.fits and each.figure.metric == "rms_d")
    healthy = [figure for figure in comparable if not figure.is_fault]
    is_equal = verdict == "equal" or own == 0.0
    if is_equal or not healthy or math.isnan(own):
        return SizeComparison(code="equal" if is_equal else "unpublished", own=own, coarser=coarser)
    low, high = min(figure.low for figure in healthy), max(figure.high for figure in healthy)
    code: Literal["below", "within", "above"] = "below" if own < low else "above" if own > high else "within"
    return SizeComparison(code=code, own=own, coarser=coarser, low=low, high=high)


def _not_finite(data: PairData, attribution: Attribution) -> tuple[Advice, ...]:
    if not attribution.not_finite:
        return ()
    query = (
        f"SELECT seq_id, reward, advantage, num_response_tokens FROM sequences WHERE step = {attribution.not_finite[0].step} "
        "ORDER BY isfinite(reward) AND isfinite(advantage), abs(advantage) DESC LIMIT 20"
    )
    return (commands.sql(data, query),)


def _next(
    data: PairData, checked: CheckResult, replays: tuple[ReplayEffect, ...], located: Location | None = None
) -> tuple[Advice, ...]:
    if checked.findings[0].code == "equal":
        return ()
    where = _where(data, replays) if located is None and (checked.is_valid or replays) else ()
    if settling := [cause_text(replay) for replay in replays if replay.code == "settles"]:
        return where if checked.is_valid or not settling[0] else (Advice(remark=settling[0]), *where)
    found = [each for each in (*(f.next for f in checked.findings), *(f.next for f in data_faults(checked))) if each]
    version = checked.findings[0].numbers.get("older_version")
    if version is not None and (shown := [text for each in replays if (text := version_text(each, version))]):
        found = [Advice(remark=shown[0]), *found[1:]]
    found = [Advice(remark=_result(each, replays)) or each for each in found]
    if not data.has_weights:
        supply = commands.supply(data, "this trace has no weights for a replay")
        is_needed = not checked.is_valid and all(each.command != supply.command for each in found)
        return (*found, *([supply] if is_needed else []))
    if not checked.is_valid:
        return (*found, *where)
    found += [*where, commands.triangulate(data, dtype_of(data.contract("a")))]
    if data.contract("b").get("engine") == VLLM and data.sample.steps[-1] - data.sample.steps[0] > 1:
        found.append(commands.predict(data))
    return tuple(dict.fromkeys(found))


def _result(advice: Advice, replays: tuple[ReplayEffect, ...]) -> str:
    """Return what the replays that `advice` proposes show, if all are recorded already, else an empty string."""
    recorded = {_options(each.changes): each for each in replays if each.changes}
    asked = {_options(arm) for arm in re.findall(r"--arm (\S+)", advice.command)}
    if not asked:  # the command sets the options of one arm
        asked = {arm for arm in recorded if all(f"--{option} " in advice.command for option in arm)}
    shown = []
    for each in (each for arm, each in recorded.items() if arm in asked):
        said = effect_text(replace(each, arm=f"a replay with {each.changes}"))
        shown.append(f"{said} ({each.removed:.0%} of it)" if each.code == "part" else said)
    return "; ".join(shown) if len(shown) == len(asked) else ""


def _options(arm: str) -> tuple[str, ...]:
    return tuple(sorted(each.replace("=", " ") for each in arm.split(",")))


def _where(data: PairData, replays: tuple[ReplayEffect, ...]) -> tuple[Advice, ...]:
    if not data.has_weights:
        return ()
    for replay in replays:
        if replay.code not in ("settles", "repeats", "part") or not replay.changes:
            continue
        arm = parse_arm(replay.changes)
        if arm.is_heard and not (arm.engine == "vllm" and has_experts(data.config)):
            return (commands.locate(data, replay.changes),)
    return ()


_LOGGED = ("k1", "k2", "k3", "mean_abs_d", "prob_diff_mean", "chi2_token", "mean_exp_abs_d")
"""Averaged metrics that training frameworks log."""
_FROM_SUMS = ("k1", "k3", "mean_abs_d", "rms_d", "share_outside", "prob_diff_mean", "chi2_token", "ess_token")


def own_metrics(data: PairData) -> dict[str, float]:
    """Return the mismatch over all tokens. Without stored sums, `mean_exp_abs_d` covers only a sample of tokens."""
    sums = data.sums
    if not sums.num_tokens:
        return {}
    there = sums.columns["num_tokens"] > 0
    columns = addable({name: values[there].astype(np.float64) for name, values in sums.columns.items()})
    totals = {name: np.asarray(values.sum(), np.float64) for name, values in columns.items()}
    found = {name: float(FROM_SUMS[name](totals)) for name in _FROM_SUMS}
    if SUM_EXP_ABS_D in sums.columns:
        found["mean_exp_abs_d"] = float(sums.columns[SUM_EXP_ABS_D].sum() / sums.num_tokens)
    else:
        sampled = np.abs(data.sample.d[data.sample.compared])
        found["mean_exp_abs_d"] = float(np.mean(np.exp(np.minimum(sampled, 700.0)))) if len(sampled) else float("nan")
    return found | {"max_abs_d": float(sums.columns["max_abs_d"].max())}
