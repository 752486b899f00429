"""Check a run's rewards, advantages, groups, logged metrics and importance ratios.

Faults here can ruin training even if the two passes are comparable.

Shapes: N rows (sequences) in the run or in one step, S steps, E steps with a logged value.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...schemas.loss import read_loss
from ..trace.columns import scored_passes
from ..trace.database import Database
from .advantages import (
    BATCH,
    HALVES,
    OF_OWN,
    TINY,
    Outcomes,
    batch_constant,
    count_of,
    mean_of,
    mixed,
    numbered,
    rules_of,
    shifted,
    unequal,
)
from .data_finding import CHANCE, DataFinding, RunRows
from .sample import Sample
from .token_checks import TOKEN_CHECKS

_EXPLAINED_BY = {
    "advantages_extreme": {"advantages_scaled", "baseline"}, "baseline_unknown": {"advantages_extreme"},
    "advantages_vary": {"advantages_misplaced"}, "advantages_mixed": {"not_finite"},
    "advantages_scaled": {"advantages_by_length"}, "advantages_unequal": {"advantages_extreme"},
    "rows_lost": {"not_finite"}, "rewards_by_prompt": {"rewards_constant"},
}  # fmt: skip
"""Finding -> findings that make it redundant. It is left out if any of them is present."""
_ERRORS = 4.0
"""Random variation stays within this many standard errors even in a thousand steps."""
_IS_ALGORITHM = re.compile(r"adv|baseline|estimator|algorithm|loss_type", re.IGNORECASE)
_DIVIDES = re.compile(r"(^|[./])(scale_rewards|norm_adv_by_std_in_grpo|normali[sz]e_by_std)$")
_IS_ON = re.compile(r"^(group|true|1\.0)$", re.IGNORECASE)
_IS_OFF = re.compile(r"^(batch|none|false|0\.0)$", re.IGNORECASE)
_NAMES_GROUP = re.compile(r"grpo|rloo|group", re.IGNORECASE)
_NAMES_OTHER = re.compile(r"reinforce|gae|ppo|batch|global|running|critic|remax", re.IGNORECASE)
_WEIGHT = re.compile(r"([\w./-]+)\W+(-?\d+\.?\d*(?:e-?\d+)?)")
_NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
_REUSES = re.compile(r"(num_iterations|ppo_epochs|num_ppo_epochs|updates_per_batch)$", re.IGNORECASE)


def data_findings(database: Database, sample: Sample | None) -> tuple[DataFinding, ...]:
    """Check the data at the selected steps. Tokens are inspected only at `sample`'s steps."""
    run = RunRows(database, sample)
    found: dict[str, DataFinding] = {}
    if len(run.at):
        checks = (_values, _rewards, _groups, _advantages, _repeats, _metrics, _ratios, _reward_parts)
        found |= {finding.code: finding for check in checks for finding in check(run)}
        if sample is not None and len(sample.tokens):
            find = partial(run.find, steps=sample.steps)
            found |= {finding.code: finding for check in TOKEN_CHECKS for finding in check(sample, find)}
    kept = [finding for code, finding in found.items() if not found.keys() & _EXPLAINED_BY.get(code, set())]
    return tuple(sorted(kept, key=lambda finding: finding.is_notice))


def _values(run: RunRows) -> Iterator[DataFinding]:
    rows, by_token = run.rows, run.rows["is_per_token"]
    for column in ("reward", "advantage"):
        yield from run.find("not_finite", rows[f"lost_{column}"], column=column)
    for end in ("first", "last"):
        zeros = rows[f"zeros_{end}"]
        misplaced = by_token & (zeros > 0) & (zeros == rows["num_zero"])
        least = 1 + max(by_token.sum(), 8) // 2
        yield from run.find("advantages_misplaced", misplaced, least=least, end=end, zeros=zeros)
    if setting := run.setting(_IS_ALGORITHM, _NAMES_GROUP):
        yield from run.find("advantages_vary", by_token, setting=setting)
    # A value normalised over n values is at most sqrt(n); a reward minus a baseline is at most the range of rewards.
    highest = np.abs(rows["reward"][np.isfinite(rows["reward"])]).max(initial=0.0)
    size, units = np.nan_to_num(rows["largest"], posinf=0), np.where(by_token, rows["length"], 1.0)
    bound = 2 * np.maximum(np.sqrt(np.bincount(run.at, units)), 2 * highest)[run.at]
    usual = [np.median(size[own]) for step in range(len(run.steps)) if (own := (run.at == step) & (size > 0)).any()]
    extreme = (size > bound) & (size > 10 * np.quantile(usual or [0.0], 0.25))
    numbers = {"largest": float(size.max()), "usual": float(np.quantile(usual or [0.0], 0.25))}
    yield from run.find("advantages_extreme", extreme, bound=bound, **numbers)


def _after_last(differs: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return the rows after the last step in which `differs` holds, [N] bool."""
    return np.asarray(at > at[differs].max(initial=-1))


def _rewards(run: RunRows) -> Iterator[DataFinding]:
    """Find rewards that are constant, or constant within groups, from some step on."""
    rewards, at = run.rows["reward"], run.at
    known = np.isfinite(rewards)
    if not known.any():
        return
    inspected, response = run.responses
    value = float(rewards[known][-1])
    later = known & _after_last(known & (rewards != value), at)
    earlier = rewards[known & ~later]
    # Equal responses have equal rewards; only different ones are evidence.
    num_later = len(np.unique(response[later[inspected]]))
    usual = (1 + (earlier == value).sum()) / (2 + len(earlier))
    if num_later * np.log(usual) < CHANCE and not (len(earlier) and value == rewards[known].max()):
        after = f" from step {run.steps[at[later].min()]} on" if len(earlier) else ""
        yield from run.find("rewards_constant", later, value=value, after=after, notice=not len(earlier))
    asked = np.flatnonzero(known & inspected & (run.labels > 0))
    cell, reward = numbered(run.labels[asked], at[asked]), rewards[asked]
    least = 1e-9 * np.abs(reward).max(initial=0.0)
    within = _after_last(np.abs(reward - mean_of(cell, reward)) > least, at[asked])
    if not within.any():
        return
    kind = np.unique(response, return_inverse=True)[1][(np.cumsum(inspected) - 1)[asked]]
    more = np.bincount(np.unique(np.stack([cell, kind])[:, within], axis=1)[0]) - 1  # further responses of each group
    share = np.unique(reward[within], return_counts=True)[1].max() / within.sum()
    if (num := int((more > 0).sum())) >= 8 and np.maximum(more, 0).sum() * np.log(share) < CHANCE:
        yield from run.find(
            "rewards_by_prompt", np.isin(np.arange(len(at)), asked[within]), num=num, notice_if_whole=True
        )


def _groups(run: RunRows) -> Iterator[DataFinding]:
    known = (run.rows["group"] > 0) & (run.rows["prompt"] > 0)
    at, find = run.at[known], partial(run.find, steps=run.rows["step"][known])
    if not len(at):
        return
    group, prompt = (numbered(run.rows[name][known], at) for name in ("group", "prompt"))
    cell = numbered(group, prompt)
    firsts = np.unique(cell, return_index=True)[1]
    prompts, groups = np.bincount(group[firsts])[group], np.bincount(prompt[firsts])[prompt]
    in_group, repeated, num_prompts = count_of(group), count_of(prompt) > 1, prompt.max() + 1
    # The turns of a conversation have different prompts. Wrong group ids join prompts that also occur elsewhere.
    all_repeat = mean_of(group, 1.0 * (count_of(cell) > 1)) == 1
    mixed = (prompts > 1) & (all_repeat | (mean_of(group, 1.0 * (groups > 1)) == 1))
    alone = (in_group == 1) & repeated
    if in_group.max() == 1 and repeated.mean() > 0.5:
        yield from find("one_row_groups", repeated, rows_per_prompt=len(at) / num_prompts)
    elif mixed.any():
        yield from find("groups_mix_prompts", mixed, num_groups=len(np.unique(group[mixed])), most=int(prompts.max()))
    elif alone.sum() >= 3 and in_group.max() > 1:
        yield from find("rows_alone", alone)
    elif np.ptp(groups) == 0 and groups[0] > 1 and in_group.min() > 1 and num_prompts > 3 * len(np.unique(at)):
        # If a few prompts were drawn twice by chance, others would be drawn once.
        yield from find("prompts_split", at >= 0, num_groups=int(groups[0]), notice=True)


def _advantages(run: RunRows) -> Iterator[DataFinding]:
    known = np.isfinite(run.rows["reward"]) & np.isfinite(run.rows["advantage"])
    r, a, length, labels = (each[known] for each in (*map(run.rows.get, ("reward", "advantage", "length")), run.labels))
    steps, at = np.unique(run.rows["step"][known], return_inverse=True)
    if not len(at):
        return
    group = numbered(labels, at)
    is_grouped = bool(np.mean((count_of(group) > 1) & (labels > 0)) > 0.5)
    explain = is_grouped and not run.is_per_token
    data = Outcomes(r, a, group if is_grouped else at, at, length)
    rules = rules_of(data, explain=explain)
    if is_grouped and not run.rows["group"].any() and not (explain and "own" in rules.name):
        is_grouped = explain = False  # rows with one prompt need not be a group
        rules = rules_of(data := Outcomes(r, a, at, at, length), explain=False)
    told = rules.name != "none"
    num_told, judged = int(told.sum()), told[at]

    def found(code: str, chosen: np.ndarray, **given: Any) -> Iterator[DataFinding]:
        yield from run.find(code, chosen[at][judged], steps[at][judged], **given)

    constant = rules.name == "constant"
    if rules.freedom[constant].sum() >= 4 and not run.is_per_token:
        values = a[constant[at]]
        is_same = np.ptp(values) == 0 and values[0] != 0  # such as rows chosen for supervised training
        numbers = {"value": float(values.mean()), "num_steps": int(constant.sum())}
        yield from found("advantages_constant", constant, notice=is_same, **numbers)
    scaled = np.isfinite(rules.factor)
    if 10 * scaled.sum() > num_told and np.ptp(rules.factor[scaled]) < 0.1 * np.median(rules.factor[scaled]):
        factor = float(np.median(rules.factor[scaled]))  # groups may differ in scale
        yield from found("advantages_scaled", scaled, factor=factor, notice_if_whole=True)
    divides, keeps = run.setting(_DIVIDES, _IS_ON), run.setting(_DIVIDES, _IS_OFF)
    if explain and (divides or keeps) and np.all(rules.name[told] == "own"):
        is_wrong = rules.divided == (-1 if divides else 1)
        if is_wrong.sum() > 9 * (rules.divided == (1 if divides else -1)).sum():
            numbers = {"setting": divides or keeps, "rule": "not divided" if divides else "divided"}
            yield from found("advantages_unlike_settings", is_wrong, **numbers)
    others = Counter(name for name in rules.name if name not in ("own", "constant", "none", ""))
    name, num = others.most_common(1)[0] if others else ("", 0)
    if 2 * num < others.total() + (rules.name == "").sum():
        name = ""  # with a few small steps, some rule fits by chance
    if explain and not name:
        rest = mixed(data) or unequal(data, run.rows["is_cut"][known], rules)
        if rest:
            yield from run.find(rest[0], rest[1], steps[at], **rest[2])
            return
    off = rules.name == name
    freedom = float(rules.freedom[off].sum())
    if not freedom:
        return
    correlation, error = float(rules.correlation[off] @ rules.freedom[off]) / freedom, _ERRORS / freedom**0.5
    values = a[off[at]]
    numbers = {key: float(np.median(getattr(rules, key)[off])) for key in ("fit", "own", "between")} | {
        "correlation": correlation, "error": error, "low": values.min(), "high": values.max(), "explanation": name,
    }  # fmt: skip
    if correlation < -(0.95 if name else 0.9 if run.is_per_token else 0.5) and correlation + error < 0:
        yield from found("advantages_inverted", off, **numbers)
    elif name == BATCH:
        # Where groups have one mean, both rules fit.
        off |= (rules.name == "own") & (data.fit(r) > 0.999)
        declared = " ".join(str(value) for key, value in run.settings.items() if _IS_ALGORITHM.search(key))
        numbers["explanation"] = batch_constant(data, np.flatnonzero(off))
        is_group = bool(_NAMES_GROUP.search(declared))
        for finding in found("baseline", off, notice_if_whole=not is_group, **numbers):
            if finding.since is not None or not _NAMES_OTHER.search(declared):
                yield finding
    elif name in OF_OWN:
        yield from found(OF_OWN[name], off, notice=name != HALVES, **numbers)
    elif name:
        is_moved = name.startswith(("rewards", "the rewards"))
        yield from found("rewards_of_other_rows" if is_moved else "baseline", off, **numbers)
    elif correlation + error < (0.5 if is_grouped else 0.1) and not run.is_per_token:
        yield from found("advantages_unrelated", off, **numbers)
    elif explain and 3 <= off.sum() <= num_told - 3 and off[told][-off.sum() :].all():  # a change during the run
        yield from found("baseline_unknown", off, notice=True, **numbers)


def _repeats(run: RunRows) -> Iterator[DataFinding]:
    """Find batches that repeat, and equal responses with unequal rewards."""
    if not np.isfinite(run.rows["reward"]).any():
        return
    inspected, response = run.responses
    at, step, reward = run.at[inspected], run.rows["step"][inspected], run.rows["reward"][inspected]
    steps = np.unique(step)
    rows = {each: response[step == each] for each in steps}
    again = np.array([
        len(np.unique(rows[each])) >= 8 and np.isin(rows[each], rows.get(each - 1, [])).mean() >= 0.9 for each in steps
    ])  # fmt: skip
    yield from run.find("batch_repeats", again, steps, least=2, notice=True, num_steps=int(again.sum()))
    order = np.lexsort((at, response))
    same = np.flatnonzero(response[order][1:] == response[order][:-1])
    one, two = order[same], order[same + 1]
    least = TINY * np.abs(reward[np.isfinite(reward)]).max(initial=0.0)
    within = at[one] == at[two]
    for asked in (within, np.ones(len(within), bool)):
        differs = asked & (np.abs(reward[one] - reward[two]) > least)
        if (num := int(differs.sum())) < 20:  # so few pairs may become equal by chance
            continue
        moves = {name: np.append(reward, np.nan)[rows] for name, rows in shifted(at).items()}
        left = {name: (asked & ~(np.abs(each[one] - each[two]) <= least)).sum() for name, each in moves.items()}
        move = min(left, key=left.__getitem__)
        is_moved = bool(10 * left[move] <= num)
        if is_moved or asked is within:
            explanation = f"with {move}, only {left[move]:,} do" if is_moved else "no shift of the rewards explains this, so the reward is random or belongs to other rows"  # fmt: skip
            numbers = {"num_pairs": int(asked.sum()), "explanation": explanation}
            yield from run.find("rewards_unequal", differs, step[one], notice=not is_moved, **numbers)
            return


_LOGGED = (
    ("sequences", "reward", ("reward", "critic/score/mean", "critic/rewards/mean", "rewards/mean", "reward/mean", "train/reward", "rollout/raw_reward")),
    ("sequences", "num_response_tokens", ("completion_length", "completions/mean_length", "response_length/mean", "response_length", "rollout/response_lengths")),
    ("(FROM scores WHERE \"pass\" = 'train' AND iteration = 0 AND step IN ({steps}))", "list_avg(entropy)", ("entropy", "actor/entropy", "train/entropy", "entropy/mean")),
)  # fmt: skip
"""Table, column, and the metric names that frameworks use for the column's mean."""
_MEANS = """
SELECT step, avg(value) AS mean, stddev_pop(value) / sqrt(count(*)) AS error, max(value) - min(value) AS range
FROM (SELECT step, {column}::DOUBLE AS value FROM {table}) WHERE isfinite(value) GROUP BY step ORDER BY step
"""


class _Logged(NamedTuple):
    """A logged metric, compared with the mean of the rows of the same step, or of another one if it is `late`."""

    name: str
    late: int
    ends: np.ndarray
    """[E] indices of the steps with a logged value."""
    value: np.ndarray
    distance: np.ndarray
    off: np.ndarray
    """[E] bool: the value contradicts the rows."""
    is_sample: bool
    """True if most values differ, which suggests that other rows were averaged."""


def _metrics(run: RunRows) -> Iterator[DataFinding]:
    query = "SELECT name, step, avg(value) FROM metrics WHERE isfinite(value) GROUP BY ALL"
    logged: dict[str, dict[int, float]] = {}
    for name, step, value in run.database.connection.execute(query).fetchall():
        logged.setdefault(name, {})[step] = value
    for table, column, names in _LOGGED:
        if logged.keys().isdisjoint(names):
            continue
        query = _MEANS.format(table=table.format(steps=run.inspected), column=column)
        rows = run.database.connection.execute(query).fetchnumpy()
        steps, mean = rows["step"], rows["mean"]
        errors = _ERRORS * rows["error"] if table == "sequences" else rows["range"]
        series = itertools.product(filter(logged.__contains__, names), (0, 1, -1))
        compared = (_compared(name, logged[name], late, steps, mean, errors) for name, late in series)
        found = [each for each in compared if len(each.ends) > 2]
        if not found:
            continue
        own = [each for each in found if not each.late and (each.is_sample or each.off.sum() > 2)]
        late = [each for each in found if each.late and len(each.ends) > 3 and not each.off.any()]
        late = [each for each in late if any(other.is_sample and other.name == each.name for other in own)]
        if late and table == "sequences":
            after, which = "after" if late[0].late > 0 else "before", steps[late[0].ends]
            yield from run.find("metric_late", which >= 0, which, name=late[0].name, late=after, notice=True)
            continue
        for each in own:
            asked = each.distance > 0 if each.is_sample else each.off
            if of := _average_of(run, column, each.value[asked], mean[each.ends[asked]], steps[each.ends[asked]]):
                yield from _contradiction(run, "metric_of_others", each, asked, steps, mean, of=of)
                break
        else:
            best = min(found, key=lambda each: (each.is_sample, int(each.off.sum()), abs(each.late)))
            if best.off.sum() > 2 and (not best.is_sample or 2 * best.off.sum() > len(best.off)):
                yield from _contradiction(run, "metric_contradicts", best, best.off, steps, mean, notice=best.is_sample)


def _contradiction(
    run: RunRows, code: str, logged: _Logged, off: np.ndarray, steps: np.ndarray, mean: np.ndarray, **given: Any
) -> Iterator[DataFinding]:
    worst = int(np.argmax(np.where(off, logged.distance, -1.0)))
    end = logged.ends[worst]
    numbers = {"logged": float(logged.value[worst]), "recorded": float(mean[end]), "step": int(steps[end])}
    yield from run.find(code, off, steps[logged.ends], name=logged.name, **numbers, **given)


def _compared(
    name: str, logged: dict[int, float], late: int, steps: np.ndarray, mean: np.ndarray, errors: np.ndarray
) -> _Logged:
    every = np.array([logged.get(int(step) + late, np.nan) for step in steps])
    ends = np.flatnonzero(np.isfinite(every))
    value = every[ends]
    since_last = np.diff(np.r_[0.0, np.cumsum(mean)[ends]]) / np.diff(np.r_[-1, ends])
    distance = np.abs(value - mean[ends])
    nearest = np.minimum(distance, np.abs(value - since_last))
    off = nearest > 1e-3 * np.abs(mean).max(initial=1e-9)
    first = int(off.argmax()) if len(off) else 0
    at_end, most = bool(off[first:].all()), 2 * int(off.sum()) >= len(off)
    # Logged means that are exact only at scattered steps were computed over other rows and match by chance.
    if most or not at_end:
        off &= nearest > np.maximum(errors, errors.mean())[ends]
    return _Logged(name, late, ends, value, distance, off, most and not (at_end and first >= 2))


def _average_of(run: RunRows, column: str, value: np.ndarray, mean: np.ndarray, steps: np.ndarray) -> str:
    """Return which other rows or values have the means [E] that were logged, or an empty string."""
    if len(steps) < 3 or not np.ptp(mean):
        return ""
    factor = float(np.median(value / np.where(mean == 0, np.nan, mean)))
    if np.isfinite(factor) and abs(factor - 1) > 0.02 and np.allclose(mean * factor, value, rtol=1e-3):
        return f"all rows times {factor:.4g}" + (
            " (bits instead of nats)" if abs(factor * np.log(2) - 1) < 0.01 else ""
        )
    if column == "list_avg(entropy)":
        return ""
    values = run.rows["reward" if column == "reward" else "length"]
    rows = [values[run.rows["step"] == step] for step in steps]
    options = {
        "the first half of the rows": [each[: len(each) // 2] for each in rows],
        "the first quarter of the rows": [each[: len(each) // 4] for each in rows],
        "every other row": [each[::2] for each in rows],
    }
    if column != "reward":
        total = values + run.rows["prompt_length"]
        options["prompt and response"] = [total[run.rows["step"] == step] for step in steps]
    means = {name: [np.mean(each) if len(each) else np.nan for each in parts] for name, parts in options.items()}
    return next((name for name, each in means.items() if np.allclose(each, value, rtol=1e-4, atol=TINY)), "")


_EQUAL = """
SELECT a.step, bool_and(a.logprobs = b.logprobs) AS equal, sum(len(a.logprobs)) AS num, a.iteration > 0 AS is_reused,
       coalesce(max(a.policy_version - coalesce(b.policy_version, s.policy_version)), 0) AS lag,
       any_value(a.contract) AS contract_a, any_value(b.contract) AS contract_b
FROM scores AS a JOIN scores AS b USING (run, step, seq_id) JOIN sequences AS s USING (run, step, seq_id)
WHERE a."pass" = $a AND b."pass" = $b AND b.iteration = 0 AND a.step IN ({steps})
GROUP BY ALL ORDER BY a.step
"""


def _ratios(run: RunRows) -> Iterator[DataFinding]:
    """Find importance ratios that are all 1 although the weights were updated in between or the dtypes differ."""
    execute, sample = run.database.connection.execute, run.sample
    contracts = dict(execute("SELECT contract, contract_json FROM passes").fetchall())
    is_reusing = {str(value) for name, value in run.settings.items() if _REUSES.search(name)} - {"0", "1", "0.0", "1.0"}
    for a, b in (("current", "train"), ("train", "rollout"), ("reference", "train")):
        if not {a, b} <= {*scored_passes(run.database)}:
            continue
        if sample is not None and (sample.a.name, sample.b.name) == (a, b):
            differs = np.not_equal(sample.a.logprobs, sample.b.logprobs) & sample.compared
            of_step = sample.steps[sample.seq]
            if 2 * len(np.unique(of_step[differs])) >= len(np.unique(of_step)):
                continue
        rows = execute(_EQUAL.format(steps=run.inspected), {"a": a, "b": b}).fetchall()
        rows = [row for row in rows if row[3]] or rows  # a reused batch has seen updates in between
        equal = [row for row in rows if row[1]]
        if 2 * len(equal) <= len(rows):
            continue
        step, is_equal = (np.array(column) for column in list(zip(*rows, strict=True))[:2])
        find = partial(run.find, affected=is_equal, steps=step, a=a, b=b, num_tokens=sum(row[2] for row in equal))
        if a == "reference":
            if len(equal) == len(rows) >= 3:
                yield from find("reference_is_policy", num_steps=len(rows), notice=True)
            continue
        *_, is_reused, lag, contract_a, contract_b = max(equal, key=lambda row: row[4])
        dtypes = [{*re.findall(r"\b(?:bfloat|float)\d+", str(contracts.get(key)))} for key in (contract_a, contract_b)]
        loss = read_loss(run.settings)
        # If warm-up starts from a learning rate of 0, the first update does not change the weights.
        is_notice = len(equal) < 2
        if lag > 0:
            reason = f"the weights of {a} are {lag} updates newer"
        elif is_reused or (a == "current" and is_reusing):
            reason = "each batch is used several times, with updates in between"
        elif all(dtypes) and dtypes[0].isdisjoint(dtypes[1]):
            reason = f"{a} was computed in {', '.join(dtypes[0])}, {b} in {', '.join(dtypes[1])}"
        elif a == "current" and loss is not None and loss.has_clip and loss.denominator == b:
            reason, is_notice = "clipping has no effect, which is correct only with one update per batch", True
        else:
            continue
        yield from find("ratio_is_one", reason=reason, notice=is_notice)


def _reward_parts(run: RunRows) -> Iterator[DataFinding]:
    """Compare the reward with the weighted sum of the reward functions."""
    query = f"SELECT step, row_number() OVER () AS place, reward, map_keys(rewards), map_values(rewards) FROM sequences WHERE rewards IS NOT NULL AND step IN ({run.inspected}) ORDER BY step, place"
    rows = run.database.connection.execute(query).fetchall()
    names = rows[0][3] if rows else []
    if len(names) < 2 or any(row[3] != names for row in rows):
        return
    step, reward = np.array([row[0] for row in rows]), np.array([row[2] for row in rows], float)
    parts = np.array([row[4] for row in rows], float)
    there = np.isfinite(reward) & np.isfinite(parts).all(axis=1)
    if there.sum() < 20 or np.ptp(reward[there]) == 0:
        return
    least = 1e-4 * np.abs(reward[there]).max()

    def weights_of(rewards: np.ndarray, rows: np.ndarray | bool = True) -> np.ndarray | None:
        """Return the weights and constant that reproduce every reward from its parts, or None if no such weights exist."""
        known = there & rows & np.isfinite(rewards)
        for constant in (0.0, 1.0) if known.any() else ():
            columns = np.c_[parts[known], np.full(known.sum(), constant)]
            found = np.linalg.lstsq(columns, rewards[known], rcond=None)[0]
            if np.abs(columns @ found - rewards[known]).max() < least:
                return np.asarray(found * np.r_[np.ones(len(names)), constant])
        return None

    def text(weights: np.ndarray) -> str:
        told = [f"{weight:.3g} {name}" for weight, name in zip(weights, names, strict=False)]
        return " + ".join(told + [f"{weights[-1]:.3g}"] * bool(abs(weights[-1]) > 5e-4))

    given = str(run.settings.get("reward_weights", ""))
    listed = _NUMBER.findall(given)
    if given.startswith("[") and len(listed) == len(names):  # TRL lists them in the order of the functions
        declared = dict(zip(names, map(float, listed), strict=True))
    else:
        declared = {name: float(number) for name, number in _WEIGHT.findall(given)}
    found = partial(run.find, steps=step)
    if (weights := weights_of(reward)) is not None:
        used = np.abs(parts[there]).max(axis=0) > 0
        off = (
            np.abs(weights[:-1] - [declared.get(name, weight) for name, weight in zip(names, weights, strict=False)])[
                used
            ]
            > 0.01
        )
        if off.any() or (not declared and (np.ptp(weights[:-1][used]) > 0.01 or abs(weights[-1]) > 5e-4)):
            recorded = ", ".join(f"{name} {weight:g}" for name, weight in declared.items())
            contrast = f"but the recorded weights are {recorded}" if declared else "and no weights are recorded"
            yield from found(
                "rewards_weighted", step > -1, explanation=text(weights), contrast=contrast, notice=not off.any()
            )
        return
    first = weights_of(reward, step == step[0])
    by_step = ((each, weights_of(reward, step == each)) for each in np.unique(step))
    is_new = (each for each, own in by_step if first is not None and (own is None or np.abs(own - first).max() > 0.01))
    since = next(is_new, step[0])
    before, after = weights_of(reward, step < since), weights_of(reward, step >= since)
    if before is not None and after is not None:
        contrast = f"but {text(before)} at earlier steps"
        yield from found(
            "rewards_weighted", step >= since, explanation=text(after), contrast=contrast, notice=not declared
        )
        return
    moves = shifted(np.unique(step, return_inverse=True)[1])
    explanation = next(
        (name for name, rows in moves.items() if weights_of(np.append(reward, np.nan)[rows]) is not None), ""
    )
    total = np.nansum(parts * [declared.get(name, 1.0) for name in names], axis=1)
    if not explanation and np.abs(np.trunc(total[there]) - reward[there]).max() < least:
        explanation = "the sum truncated to an integer"
    if explanation:
        yield from found("rewards_differ", step > -1, explanation=explanation)
