"""Compare logged metrics and losses with the averages that the recorded rows and tokens give.

Shapes: N rows (sequences) of R steps, T tokens of these rows, S steps with an average, E steps with a logged value.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ...schemas.loss import CURRENT, PPO, REINFORCE, ROLLOUT, SAPO, SEQUENCE_MEAN, TOKEN, Loss, read_loss
from ..statistics.loss import clamped_exp, contribution, correction_weight, is_clipped
from ..trace.columns import attempts, passes_with, scored_passes
from ..trace.ragged import counted, fitted
from .advantages import CLOSE, TINY, DataRows, count_of, mean_of
from .features import pearson
from .finding import BY_STEP, DataFault, DataFinding, data_fault

_EXACT, _SCALED = 1e-4, 1e-3
"""Largest error of a reported average, relative to the logged values: for rows' values as recorded, and for multiples of
them or values that another forward pass may have computed."""
_FIT = 0.05
"""Largest error relative to the logged values' standard deviation, so that the average follows their changes."""
_MOST_TIMES = 128
"""Largest integer that a mistaken factor is likely to be, such as the number of micro-batches or processes."""
KL_COEFFICIENT = r"(^|[./_])(kl_(loss_|penalty_)?coef|kl_ctl|beta)$"
_ENTROPY_COEFFICIENT = r"(^|[./_])entropy_(loss_)?coeff?(icient)?$"
_TOKENS = """
SELECT {columns} FROM (SELECT run, step, seq_id, response_mask AS mask, advantages, row_number() OVER () AS place FROM sequences WHERE step IN ({steps})) {joins}
ORDER BY step, place
"""
_JOIN = """LEFT JOIN (SELECT run, step, seq_id, {1} AS "{0}" FROM scores WHERE "pass" = '{2}' AND iteration = 0 AND step IN ({steps})) USING (run, step, seq_id)"""
_LOGGED = "SELECT name, step, avg(value) FROM metrics WHERE isfinite(value) AND NOT starts_with(name, 'hyperparameter/') GROUP BY ALL"
_LOST = "SELECT name, step, min(value) FROM metrics WHERE NOT isfinite(value) GROUP BY ALL"
_EVALUATION = """
SELECT step, sum(total) / sum(num) AS mean, avg(best) AS best FROM (
    SELECT step, sum(reward) AS total, count(*) AS num, max(reward) AS best FROM eval_sequences WHERE isfinite(reward) GROUP BY step, coalesce(group_id, prompt_ids::VARCHAR)
) GROUP BY step ORDER BY step
"""
_SCALE = r"(^|[./_])reward_scal(e|ing)(_factor)?$"
_EVALUATED = r"^(eval|val|valid|validation|test)[-_/].*(reward|score|acc|pass@|mean@|best@)"
_LEARNING_RATE = r"(^|[/_])(lr|learning_rate)$"
_SCHEDULED = r"(^|[/_])(lr|learning_rate|kl_coef|entropy_coeff?)($|[/_-])"
_AVERAGES = {
    "loss_tokens": "the mean over the loss tokens", "rows": "the mean over all rows", "all_tokens": "the mean over all tokens, including masked ones",
    "padded": "{over} and the padding", "by_length": "{over}, weighted by length", "with_zeros": "{over}, with 0 for rows without a value",
    "group_best": "the mean of the groups' largest values", "row_means": "the mean of the rows' means", "group_means": "the mean of the groups' means",
    "trajectories": "the mean over trajectories", "with_truncated": "the mean over all rows, including truncated ones",
    "lag": "the mean number of updates behind the trainer", "extreme_lag": "the {last}imum number of updates behind the trainer",
    "varied_groups": "the mean of the rows of groups with different rewards", "with_advantage": "the mean of the rows with an advantage other than 0",
    "in_loss": "the mean of the rows with tokens in the loss", "finished": "the mean of the rows that were not truncated",
    "first_of_group": "the mean of the first row of each group", "first_part": "the mean of the first {last} of the rows",
    "last_part": "the mean of the last {last} of the rows", "every_row": "the mean of every {last} row", "part": "the mean of {last}",
    "parts": "the mean of the reward functions' unweighted sum", "deviation": "the standard deviation of the rewards within {last}",
    "deviation_of_parts": "the standard deviation of the reward functions' unweighted sum within {last}",
    "trajectory_length": "the mean number of tokens per trajectory", "loss_length": "the mean number of tokens in the loss",
    "whole_length": "the mean length of prompt and response", "extreme": "the {last}imum over the rows", "sum_of_row": "the sum per row",
    "sum_of_loss": "the sum over the loss tokens", "sum_by_all": "the sum over the loss tokens divided by the number of all tokens, including masked ones",
    "sum_with_padding": "the sum over each row and its padding, with a placeholder logprob of 1 (TRL's) for padding",
    "over_longest": "each row's sum over the longest length", "clip_without_effect": "the share of tokens where the clip has no effect",
    "beyond_clip": "the share of tokens beyond either bound, whether clipped or not", "evaluation_rows": "the mean over all evaluation rows",
    "evaluation_best": "the mean of each prompt's best row", "loss_terms": "{first} {sign} {weight:.4g} {term}, although the coefficient is {declared:g}",
}  # fmt: skip
"""Average -> phrase. What follows a colon in an average's name replaces `{last}`, or, if it is an average, `{over}`."""


def _average_text(numbers: Mapping[str, Any]) -> str:
    name, _, last = str(numbers["of"]).partition(":")
    text = _AVERAGES[name].format_map({**numbers, "last": last, "over": _AVERAGES.get(last, "")})
    text = f"the mean over rows of {text}" if numbers.get("by_row") else text
    if times := numbers.get("divided_by"):
        text += f", divided by {times:.0f}"
    elif times := numbers.get("multiplied_by"):
        text += f", multiplied by {times:.4g}"
    return text + ", with the wrong sign" if numbers.get("is_negative") else text


def _of_average(numbers: Mapping[str, Any]) -> dict[str, str]:
    others = (f"; {other['name']} is {_average_text(other)}" for other in numbers["others"])
    return {"of": _average_text(numbers), "others": "".join(others)}


_CONTRADICTS = data_fault("metric_contradicts", "a logged metric contradicts the rows", "{name} is logged as {logged:.4g} at step {step}, but the rows give {recorded:.4g}{is_lost}{per_padding}", BY_STEP, is_lost=", so a missing or masked value may have been included", per_padding=", an error of about {per_padding:.3g} for each padding position, so padding may be included")  # fmt: skip
_OF_OTHERS = data_fault("metric_of_others", "a logged metric is not the mean of its values", "{name} is {of}: it is logged as {logged:.4g} at step {step}, but the recorded values give {recorded:.4g}{others}", BY_STEP, words=_of_average)  # fmt: skip
_LATE = data_fault("metric_late", "a logged metric belongs to another step", "at all {num:,} logged steps, {name} is logged one step {late} the rows that it averages, so values are assigned to the wrong step", BY_STEP)  # fmt: skip
_Logged = dict[str, dict[int, float]]
"""Metric -> step -> value."""


class _Average(NamedTuple):
    of: str
    """What the average covers: a key of _AVERAGES, possibly with a value that its phrase contains."""
    values: np.ndarray
    """[R] or [S], NaN where a step has none."""
    kind: str = "right"
    """`right`, or, if a metric should not be this average, `wrong`, or `notice` if that may be intended."""
    error: np.ndarray | None = None
    """[R] or [S] largest likely distance from the average over other rows. None if only exact values are compared."""
    times: Mapping[str, Any] = MappingProxyType({})
    """The factor by which logged values differ from the average, and whether it is a mean over rows of another average."""


class _StepRows:
    """Rows of some steps, their tokens, and averages over both."""

    def __init__(self, run: DataRows, kept: np.ndarray, needed: set[str]) -> None:
        self.run, self.kept, self.needed, self.loss = run, np.flatnonzero(kept), needed, read_loss(run.settings)
        known, self.at = np.unique(run.at[self.kept], return_inverse=True)
        self.steps, self.cell = run.steps[known], np.unique(run.cell[self.kept], return_inverse=True)[1]
        self.starts, self.size = np.searchsorted(self.at, np.arange(len(known))), count_of(self.at)
        self.ones, self.length = np.ones(len(self.at)), self["length"]

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self.run.rows[name][self.kept])

    def mean(self, values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        w = 1.0 * (self.ones if weights is None else weights)
        with np.errstate(all="ignore"):
            sums = np.bincount(self.at, np.where(w > 0, values * w, 0.0), len(self.steps))
            return np.asarray(sums / np.bincount(self.at, w, len(self.steps)))

    @cached_property
    def widths(self) -> tuple[np.ndarray, np.int64]:
        """Tokens of a row and its padding, if each step is padded to its longest row ([N]), or all rows to the longest."""
        return np.maximum.reduceat(self.length, self.starts)[self.at], self.length.max(initial=1)

    @cached_property
    def varies(self) -> np.ndarray:
        """True for rows of groups with different rewards, [N] bool."""
        reward = np.nan_to_num(self["reward"])
        return np.asarray(mean_of(self.cell, 1.0 * (np.abs(reward - mean_of(self.cell, reward)) > TINY)) > 0)

    @cached_property
    def subsets(self) -> list[tuple[str, np.ndarray, str]]:
        """Rows over which a mean may have been taken instead of all rows: name, rows ([N] bool), and kind."""
        index = np.arange(len(self.at))
        first, place = np.isin(index, np.unique(self.cell, return_index=True)[1]), index - self.starts[self.at]
        ended, size = self.run.ended[self.kept], self.size
        found = [
            ("varied_groups", self.varies, "notice"),
            ("with_advantage", np.nan_to_num(self["advantage"]) != 0, "notice"),
            ("in_loss", self["loss_length"] > 0, "notice"),
            ("finished", (ended != "length") & (ended != ""), "notice"),
            ("first_of_group", first, "notice"),
        ]
        for word, nth, by in (("half", "second", 2), ("quarter", "fourth", 4), ("eighth", "eighth", 8)):
            found += [(f"first_part:{word}", place < size // by, "wrong"), (f"last_part:{word}", place >= size - size // by, "wrong"), (f"every_row:{nth}", place % by == 0, "wrong")]  # fmt: skip
        return found

    def averages(self, num: np.ndarray, den: np.ndarray, *, tokens: bool, error: str = "") -> Iterator[_Average]:
        """Yield right and wrong averages of values whose sum in each row is `num`, over `den` values ([N] each)."""
        has, length, ones = den > 0, self.length, self.ones
        values, whole = np.divide(num, den, out=0.0 * num, where=has), "loss_tokens" if tokens else "rows"
        yield _Average(whole, self.mean(values, den), error=self._error(values, has, error))
        by_group, best = has / np.maximum(np.bincount(self.cell, has)[self.cell], 1), np.full(len(self.at), -np.inf)
        np.maximum.at(best, self.cell, np.where(has, values, -np.inf))
        is_padded = self.loss is not None and self.loss.aggregation == "constant"
        for of, each, weights, kind in (
            *((f"padded:{whole}", num / width, ones, "right" if is_padded else "wrong") for width in (self.widths if tokens else ())),
            *((("sum_of_row", num, ones, "right"),) if tokens else ()),
            (f"by_length:{whole}", values, has * length, "right" if tokens else "wrong"),
            ("group_best", best[self.cell], by_group, "notice"),
            ("row_means", values, has, "right"),
            ("group_means", values, by_group, "right"),
            ("trajectories", values, has & ~np.isin(self.kept, self.run.continued[0]), "right"),
            (f"with_zeros:{whole}", values, ones, "notice"),
            *((of, values, rows * den, kind) for of, rows, kind in self.subsets),
        ):  # fmt: skip
            yield _Average(of, self.mean(each, weights), kind)

    def _error(self, values: np.ndarray, has: np.ndarray, kind: str) -> np.ndarray | None:
        if kind == "range":
            low, high = (extreme.reduceat(np.where(has, values, np.nan), self.starts) for extreme in (np.fmin, np.fmax))
            return np.asarray(high - low)
        variance = np.maximum(self.mean(values * values, has) - self.mean(values, has) ** 2, 0.0)
        return 4 * np.sqrt(variance / np.maximum(np.bincount(self.at, has), 1)) if kind else None

    def of_rows(self, values: np.ndarray, error: str = "") -> Iterator[_Average]:
        return self.averages(
            np.where(np.isfinite(values), values, 0.0), 1.0 * np.isfinite(values), tokens=False, error=error
        )

    @cached_property
    def tokens(self) -> dict[str, np.ndarray]:
        """Columns of the tokens, [T], NaN where missing, and `counts`, True in the loss."""
        names, column = sorted(self.needed), {"entropy": ("entropy", "train")}
        joins = [_JOIN.format(name, *column.get(name, ("logprobs", name)), steps=self.run.inspected) for name in names]
        columns = ", ".join(["mask", "advantages", *(f'"{name}"' for name in names)])
        query = _TOKENS.format(columns=columns, joins=" ".join(joins), steps=self.run.inspected)
        table, lengths = self.run.database.connection.sql(query).to_arrow_table(), self.length.astype(np.int64)
        found = {name: fitted(table[name], lengths).astype(np.float64) for name in (*names, "advantages")}
        counts = counted(table["mask"], lengths)
        found["counts"] = np.ones(int(lengths.sum()), bool) if counts is None else counts
        found["row"], own = np.repeat(np.arange(len(lengths)), lengths), found.pop("advantages")
        return found | {"advantage": np.where(np.isfinite(own), own, self["advantage"][found["row"]])}

    def sum(self, values: np.ndarray, inside: np.ndarray | bool = True) -> np.ndarray:
        """Return the sum over each row's tokens `inside` ([T] bool), [N]."""
        return np.bincount(self.tokens["row"], np.where(np.isfinite(values) & inside, values, 0.0), len(self.at))

    def of_tokens(self, values: np.ndarray, error: str = "", of_all: str = "notice") -> Iterator[_Average]:
        """Yield averages of `values` ([T], NaN where missing), and one of kind `of_all` that includes masked tokens."""
        known, counts = 1.0 * np.isfinite(values), self.tokens["counts"]
        yield from self.averages(self.sum(values, counts), self.sum(known, counts), tokens=True, error=error)
        if not counts.all():
            num = self.sum(known)
            for of, total, kind in (
                ("all_tokens", self.sum(values), of_all),
                ("sum_by_all", self.sum(values, counts), "wrong"),
            ):  # fmt: skip
                yield _Average(of, self.mean(total / np.maximum(num, 1), num), kind)
                yield _Average(of, self.mean(total / np.maximum(num, 1), num > 0), kind, None, {"by_row": True})

    @cached_property
    def log_ratio(self) -> np.ndarray:
        """Log of the loss's importance ratio, [T]. 0 if the pass `current` was not recorded."""
        tokens, loss = self.tokens, self.loss or Loss()
        d = tokens.get(CURRENT, tokens["train"]) - tokens.get(loss.denominator, tokens["train"])
        if loss.level != TOKEN:
            sums, num = self.sum(d, tokens["counts"]), self.sum(1.0 * np.isfinite(d), tokens["counts"])
            d = (sums / np.maximum(num, 1) if loss.level == SEQUENCE_MEAN else sums)[tokens["row"]]
        return np.asarray(d)


_Averages = Iterator[_Average]


def _scaled(rows: _StepRows, values: np.ndarray, factors: Iterable[float]) -> _Averages:
    """Yield averages of values with or without a recorded factor."""
    for factor, power in itertools.product(factors, (1, -1)):
        if factor:
            yield from rows.of_rows(values * factor**power)


def _reward(rows: _StepRows, match: re.Match[str]) -> _Averages:
    yield from rows.of_rows(rows["reward"], "rows")
    yield from _scaled(rows, rows["reward"], rows.run.numbers(_SCALE).values())
    names, parts, _is_given = rows.run.parts
    of_parts = {"parts": parts.sum(axis=1)} | {f"part:{name}": part for name, part in zip(names, parts.T, strict=True)}
    # Metrics with such names may be averages of unweighted or unshaped rewards.
    kind = "notice" if re.search("raw|task|score", match[0]) else "wrong"
    for of, part in of_parts.items() if len(names) > 1 else ():
        is_named = of != "parts" and re.search(rf"(^|[/_]){re.escape(of[5:])}s?($|[/_])", match[0])
        yield _Average(of, rows.mean(part), "right" if is_named else kind)


def _spreads(rows: _StepRows, values: np.ndarray, of: str = "deviation", kind: str = "right") -> _Averages:
    """Yield standard deviations within groups and within steps, over n and over n - 1 values."""
    for (label, name), less in itertools.product(((rows.cell, "groups"), (rows.at, "steps")), (1, 0)):
        n, x = count_of(label), values - mean_of(label, values)
        size = np.sqrt(mean_of(label, x * x) * n / np.maximum(n - less, 1))
        yield _Average(f"{of}:{name}", rows.mean(size, 1.0 / n), kind)


def _part(rows: _StepRows, match: re.Match[str]) -> _Averages:
    """Yield averages or deviations of one reward function, or deviations of the reward."""
    names, parts, _ = rows.run.parts
    if match["part"]:
        part = parts[:, names.index(match["part"])] if match["part"] in names else np.full(len(rows.at), np.nan)
        yield from _spreads(rows, part) if match["figure"] == "std" else rows.of_rows(part)
        weight = rows.run.weights.get(match["part"], 0.0)
        yield from _scaled(rows, part, [weight] if match["figure"] == "mean" else [])
        return
    yield from _spreads(rows, rows["reward"])
    if len(names) > 1:
        yield from _spreads(rows, parts.sum(axis=1), "deviation_of_parts", "wrong")


def _length(rows: _StepRows, match: re.Match[str]) -> _Averages:
    yield from rows.of_rows(rows.length, "rows")
    inside, last = rows["loss_length"], 1.0 * ~np.isin(rows.kept, rows.run.continued[0])
    for each in (rows.length, inside) if not last.all() else ():
        yield _Average("trajectory_length", rows.mean(each) / rows.mean(last))
    # Tokens outside the loss, such as tool output, need not count, but a fully masked row still has a length.
    is_whole = (inside == 0).sum() >= 3 and not (inside != rows.length)[inside > 0].any()
    yield _Average("loss_length", rows.mean(inside), "notice" if is_whole else "right")
    both, kind = rows.mean(rows.length + rows["prompt_length"]), "right" if match["whole"] else "wrong"
    yield _Average("whole_length", both, kind)


def _finished_length(rows: _StepRows, _: re.Match[str]) -> _Averages:
    ended = rows.run.ended[rows.kept]
    yield from rows.of_rows(np.where((ended != "length") & (ended != ""), rows.length, np.nan), "rows")
    yield _Average("with_truncated", rows.mean(rows.length), "wrong")


def _advantage(rows: _StepRows, match: re.Match[str]) -> _Averages:
    advantage = np.where(rows["is_per_token"] & (match["figure"] is not None), np.nan, rows["advantage"])
    inside = rows["loss_length"] * np.isfinite(advantage)
    if figure := match["figure"]:
        extreme = np.fmax if figure == "max" else np.fmin
        for values in (np.where(inside > 0, advantage, np.nan), advantage):
            yield _Average(f"extreme:{figure}", extreme.reduceat(values, rows.starts))
        return
    yield from rows.averages(np.nan_to_num(advantage) * inside, inside, tokens=True, error="rows")
    yield _Average("all_tokens", rows.mean(np.nan_to_num(advantage), rows.length))


def _divergence(rows: _StepRows, _: re.Match[str], a: str, b: str) -> _Averages:
    """Yield averages of the usual estimators of KL(a || b), times the coefficient if one is recorded, and, between train
    and rollout, averages of other differences."""
    tokens = rows.tokens
    for side in [each for each in dict.fromkeys((a, *([CURRENT] if b == "reference" else []))) if each in tokens]:
        d = np.clip(tokens[side] - tokens[b], -20, 20)
        estimates = [d, d * d / 2, np.exp(-d) - 1 + d, np.abs(d)]
        if b == ROLLOUT:
            apart = np.abs(np.exp(tokens[side]) - np.exp(tokens[b]))
            estimates += [-d, np.exp(d) - 1 - d, np.exp(np.abs(d)), np.exp(d), np.exp(-d), apart, d * d]
        sizes = {*rows.run.numbers(KL_COEFFICIENT).values()} - {0.0} if b == "reference" else {}
        for each, size in itertools.product(estimates, (1.0, *sizes, *(-size for size in sizes))):
            yield from rows.of_tokens(each * size)


def _staleness(rows: _StepRows, match: re.Match[str]) -> _Averages:
    """Yield the mean or an extreme of the number of updates, or of steps, by which the rows' policy version lags."""
    lag, versions = rows.run.lag[rows.kept], rows.run.trainer_versions
    per_step = float(np.median(np.diff(versions[np.isfinite(versions)]))) if np.isfinite(versions).sum() > 1 else 1.0
    for each in (lag, *([np.floor(lag / per_step)] if per_step > 1 else [])):
        if figure := match["figure"]:
            extreme = np.fmax if figure == "max" else np.fmin
            yield _Average(f"extreme_lag:{figure}", extreme.reduceat(each, rows.starts))
        else:
            yield _Average("lag", rows.mean(each))


def _surprise(rows: _StepRows, _: re.Match[str]) -> _Averages:
    sums = -rows.sum(rows.tokens["train"])
    yield from rows.of_rows(sums, "rows")
    yield _Average("sum_of_loss", rows.mean(-rows.sum(rows.tokens["train"], rows.tokens["counts"])))
    for width in rows.widths:
        yield _Average("sum_with_padding", rows.mean(sums - (width - rows.length)), "wrong")


def _of_padding(found: _Contradiction, rows: _StepRows, logged: _Logged) -> _Contradiction:
    """Add to a wrong mean of sums over rows that its error is about the same per padding position at all steps."""
    mean, name = rows.mean(-rows.sum(rows.tokens["train"])), found.numbers["name"]
    error = np.array([logged[name].get(int(step), np.nan) for step in rows.steps]) - mean
    for width in rows.widths:
        padding = rows.mean(width - rows.length)
        each = (error / np.maximum(padding, TINY))[known := np.isfinite(error)]
        is_steady = known.sum() > 3 and padding[known].min() > 0.5 and np.std(each) < 0.15 * abs(np.median(each))
        # Any other error is about the same at all steps as well.
        if is_steady and np.sign(np.median(each)) * pearson(error[known], padding[known]) > 0.8:
            numbers = found.numbers | {"per_padding": float(np.median(each)), "is_lost": False}
            return found._replace(is_notice=False, numbers=numbers)
    return found


def _importance(rows: _StepRows, _: re.Match[str]) -> _Averages:
    """Yield averages of the importance weights of tokens and of sequences, and of those weights cut by a recorded bound."""
    tokens, loss = rows.tokens, rows.loss or Loss()
    d, counts = tokens["train"] - tokens[ROLLOUT], tokens["counts"]
    num = rows.sum(1.0 * np.isfinite(d), counts)
    total = np.where(num > 0, rows.sum(d, counts), np.nan)
    for weight in (clamped_exp, partial(correction_weight, loss)):
        yield from rows.of_tokens(weight(d))
        for each in (total, total / np.maximum(num, 1)):
            yield from rows.of_rows(weight(each))


def _clipped(rows: _StepRows, match: re.Match[str]) -> _Averages:
    loss, ratio, advantage = rows.loss, clamped_exp(rows.log_ratio), rows.tokens["advantage"]
    if loss is None or not loss.has_clip:
        return
    side = {"low": advantage < 0, "high": advantage > 0}.get(match["side"] or "", advantage != 0)
    clipped, other = (np.where(np.isfinite(ratio + a), is_clipped(loss, ratio, a) & side, np.nan) for a in (advantage, -advantage))  # fmt: skip
    yield from rows.of_tokens(clipped)
    for of, kind, share in (("clip_without_effect", "wrong", other), ("beyond_clip", "notice", clipped + other)):  # fmt: skip
        yield _Average(of, next(rows.of_tokens(share)).values, kind)


def _loss(rows: _StepRows, _: re.Match[str]) -> _Averages:
    loss, tokens = rows.loss, rows.tokens
    if loss is None or loss.kind not in (PPO, REINFORCE, SAPO) or loss.unknown or "sequence" in loss.correction:
        return
    terms = -contribution(loss, clamped_exp(rows.log_ratio), tokens["advantage"])
    if loss.correction != "none" and ROLLOUT in tokens:
        terms = terms * correction_weight(loss, tokens["train"] - tokens[ROLLOUT])
    d = tokens.get(CURRENT, tokens["train"]) - tokens.get("reference", tokens["train"])
    for each in (terms, *([terms + loss.kl_coefficient * (np.exp(-d) - 1 + d)] if loss.kl_coefficient else [])):
        found = [*rows.of_tokens(each)]
        sums = rows.mean(rows.sum(each, tokens["counts"])) / (loss.max_tokens or np.nan)
        found += [_Average("over_longest", sums)] if loss.aggregation == "constant" else []
        # If all rows have the same weight, the mean is 0 by construction.
        known = each[np.isfinite(each)]
        least = 1e-3 * float(np.sqrt(np.mean(known * known))) if len(known) else np.inf
        yield from (average for average in found if np.nanmax(np.abs(average.values), initial=0.0) > least)


_MEAN = r"(/?_?(mean|avg))?$"
_OF_ACTOR = r"^((actor|train|policy|rl|ppo_actor(/update)?)/)?"
_QUANTITIES: tuple[tuple[str, Callable[[_StepRows, re.Match[str]], _Averages], tuple[str, ...]], ...] = (
    (r"^(?!rollout/rewards$)((train|rollout|rl|critic|ppo_actor|env/all)/)?(raw_|task_)?(reward|score)s?(/all)?([/_](mean|avg|avg_raw_reward|total))?$", _reward, ()),
    (r"^((val/sequence|(rollout/)?response)_lengths|generate/avg_num_tokens|(train/)?mean_gen_tokens_per_sample|tokens/responses?_len(gth)?_mean|completions/mean_length|((rollout/)?(response|completion)_len(gth)?|(ppo_actor/|rollout/)?(?P<whole>seq_len|total_lengths)(/all)?)([/_](mean|avg))?)$", _length, ()),
    (r"^completions/mean_terminated_length$", _finished_length, ()),
    (r"^((train/)?mean_prompt_length|prompt_len(gth)?(/(mean|avg))?)$", lambda rows, _: rows.of_rows(rows["prompt_length"], "rows"), ()),
    (r"^(completions/clipped_ratio|response_length/clip_ratio|is_truncated(/all)?/mean|(rollout/)?truncated(_ratio)?|(train/)?truncat(ed|ion)_rate)$", lambda rows, match: rows.of_rows(np.where(rows.run.ended == "", np.nan, rows.run.ended == "length"), "" if "clip_ratio" in match[0] else "rows"), ()),
    (r"^(rewards/(?P<part>.+)/(?P<figure>mean|std)|reward[_/]std)$", _part, ()),
    (r"(^|[/_])(off_policy(_steps|(_|/)level)?|(sample_)?staleness|(version|policy)_lag)([/_]((?P<figure>max|min)|mean|avg))?$", _staleness, ()),
    (r"^frac_reward_zero_std$", lambda rows, _: rows.of_rows(1.0 - rows.varies), ()),
    (r"^((critic|ppo_actor|rl|rollout|train)/)?advantages?([/_]((?P<figure>max|min)|mean|avg))?$", _advantage, ()),
    (_OF_ACTOR + r"(policy_)?entropy(/all)?" + _MEAN, lambda rows, _: rows.of_tokens(rows.tokens["entropy"], "range", "right"), ("entropy",)),
    (r"^objective/entropy$", _surprise, ("train",)),
    (r"(^|/)((ref_?|policy_)?kl|kl(_(loss|rewards?|penalty|div|ref))?)" + _MEAN, partial(_divergence, a="train", b="reference"), ("reference", "train", "current")),
    (r"(^|/)(ppo_kl|approx_?kl)" + _MEAN, partial(_divergence, a="train", b="current"), ("current", "train")),
    (r"^(?!.*(max|min|std|median)).*(mismatch_kl|gen_kl_error|^vllm_kl$|rollout_corr/(k3_)?kl$|logp(rob)?s?_(abs_)?diff|probs?_diff|reverse_kl|token_mult_prob_error)", partial(_divergence, a="train", b="rollout"), ("rollout", "train")),
    (r"^(?!.*(max|min|std|median|eff|ess|frac)).*(importance_(sampling_)?(ratio|weight)|rollout_is)" + _MEAN, _importance, ("rollout", "train")),
    (r"(^|/)(clip_ratio/((?P<side>low|high)_mean|region_mean)|pg_clipfrac|ppo_clip_ratio|(update/)?clip_ratio/avg)$", _clipped, ("current", "train", "rollout")),
    (_OF_ACTOR + r"(loss(/mean)?|(pg|policy)_loss|actor_loss/avg)$", _loss, ("train", "current", "rollout", "reference")),
)  # fmt: skip
"""Regular expression for the names under which frameworks log a quantity, its averages, and the passes that these read
(`entropy`: train's entropy). The first pass must have been recorded."""


class _Series(NamedTuple):
    """A metric's values at the steps that have an average, and their distance from the nearest right average."""

    averages: list[_Average]
    steps: np.ndarray
    value: np.ndarray
    """[S] NaN where not logged."""
    mean: np.ndarray
    off: np.ndarray
    """[S] True where the value contradicts the mean over the rows."""
    is_sample: bool
    """True if the values seem to be averages over other rows."""


class _Contradiction(NamedTuple):
    fault: DataFault
    is_notice: bool
    affected: np.ndarray
    steps: np.ndarray
    numbers: dict[str, Any]


def check_metrics(run: DataRows) -> Iterator[DataFinding]:
    logged: _Logged = {}
    for name, step, value in run.database.connection.execute(_LOGGED).fetchall():
        logged.setdefault(name, {})[step] = value
    lost: _Logged = {}
    for name, step, value in run.database.connection.execute(_LOST).fetchall():
        lost.setdefault(name, {})[step] = value
    passes = {*scored_passes(run.database), *(["entropy"] if "train" in passes_with(run.database, "entropy") else [])}
    chosen = [
        (quantity, matches) for quantity in _QUANTITIES if not quantity[2] or quantity[2][0] in passes
        if (matches := {name: match for name in logged | lost if (match := re.search(quantity[0], name))})
    ]  # fmt: skip
    needed = {name for (*_, needs), _ in chosen for name in needs} & passes
    is_read = run.at >= 0 if run.sample is None else np.isin(run.rows["step"], run.sample.steps)
    every, some = _StepRows(run, run.at >= 0, set()), _StepRows(run, is_read, needed)
    with np.errstate(invalid="ignore", over="ignore"):
        found = [*_totals(run, logged), *_evaluations(run, logged)]
    for (_, averages, needs), matches in chosen:
        rows = some if needs else every
        with np.errstate(invalid="ignore", over="ignore"):
            of_names = {name: _until_right(averages(rows, match), rows.steps, logged[name]) for name, match in matches.items() if name in logged}  # fmt: skip
            for name in lost.keys() & matches:
                own = next((each.values for each in averages(rows, matches[name])), rows.steps * np.nan)
                affected = np.isin(rows.steps, [*lost[name]]) & np.isfinite(own)
                # NaN may stand for steps at which nothing is logged.
                gaps = np.diff(np.flatnonzero(np.isin(rows.steps, [*logged.get(name, ())])))
                is_interval = len(gaps) > 0 and gaps.min() > 1 and len(np.unique(gaps)) <= 2
                if affected.sum() > 2 and not is_interval:
                    at = int(affected.argmax())
                    numbers = _numbers(name, lost[name][int(rows.steps[at])], own[at], rows.steps[at])
                    numbers["is_lost"] = True
                    found.append(_Contradiction(_CONTRADICTS, True, affected, rows.steps, numbers))
            found += _compare(of_names, rows.steps, logged, needs, is_moved=averages in (_reward, _length))
            if averages is _surprise:
                found = [_of_padding(each, rows, logged) if each.numbers["name"] in matches else each for each in found]
            if averages in (_reward, _length) and not any(each.numbers["name"] in matches for each in found):
                found += _extremes(logged, of_names, rows)
    for fault in dict.fromkeys(each.fault for each in found):
        first, *others = sorted((each for each in found if each.fault is fault), key=lambda each: each.is_notice)
        if fault is _OF_OTHERS:
            first.numbers["others"] = [each.numbers for each in others if each.is_notice == first.is_notice]
        yield from run.find(fault, first.affected, first.steps, notice=first.is_notice, **first.numbers)
    yield from _schedules(run, logged)


def _until_right(averages: _Averages, steps: np.ndarray, logged: dict[int, float]) -> list[_Average]:
    """Return the first right average that the logged values equal, or all averages if there is none."""
    found: list[_Average] = []
    for average in averages:
        series = _series([average], steps, logged, 0) if average.kind == "right" else None
        if series is not None and not series.off.any() and not series.is_sample:
            return [average]
        found.append(average)
    return found


def _series(given: list[_Average], steps: np.ndarray, logged: dict[int, float], by: int) -> _Series | None:
    rights = [each for each in given if each.kind == "right"]
    kept = np.isfinite(rights[0].values) if rights else np.zeros(len(steps), bool)
    value = np.array([logged.get(int(step) + by, np.nan) for step in steps[kept]])
    if np.isfinite(value).sum() <= 2:
        return None
    averages = [each._replace(values=each.values[kept]) for each in given]
    errors = np.zeros(len(value)) if rights[0].error is None else rights[0].error[kept]
    means = (each.values for each in averages if each.kind == "right")
    mean = min(means, key=lambda each: np.nan_to_num(_distance(value, each)[1], nan=np.inf).sum())
    return _Series(averages, steps[kept], value, mean, *_compared(value, mean, np.nan_to_num(errors)))


def _compare(
    names: dict[str, list[_Average]], steps: np.ndarray, logged: _Logged, needs: tuple[str, ...], *, is_moved: bool = False
) -> Iterator[_Contradiction]:  # fmt: skip
    """Compare metrics with their nearest right averages, and find out which other averages they equal. With
    `is_moved`, also try averages of neighbouring steps."""
    found = {
        (name, by): series for name, averages in names.items() for by in ((0, 1, -1) if is_moved else (0,))
        if (series := _series(averages, steps, logged[name], by)) is not None
    }  # fmt: skip
    fitting = [key for key, series in found.items() if not series.off.any()]
    unlike = {name for (name, by), series in found.items() if not by and series.is_sample}
    for name, by in fitting:
        value, own, known = found[name, by].value, found[name, by].steps, np.isfinite(found[name, by].value)
        if by and name in unlike and known.sum() > 3 and _is_exact(value, found[name, by].mean):
            late = {"name": name, "late": "after" if by > 0 else "before"}
            yield _Contradiction(_LATE, True, known[known], own[known], late)
            return
    wrong = []
    for (name, by), (averages, own, value, mean, off, is_sample) in found.items():
        if by or (not is_sample and off.sum() <= 2):
            continue
        known, differs = np.isfinite(value), (np.abs(value - mean) > 0 if is_sample else off)
        average = _average_of(value, differs, averages, needs)
        is_explained = averages[0].error is None or any(is_sample or not found[key].is_sample for key in fitting)
        if average is None and (is_explained or off.sum() <= max(2, known.sum() * is_sample / 2)):
            continue
        recorded, off = (average.values, differs) if average else (mean, off)
        worst = int(np.argmax(np.where(off, np.abs(value - recorded), -1.0)))
        numbers = _numbers(name, value[worst], recorded[worst], own[worst])
        fault, of = (_OF_OTHERS, {"of": average.of, **average.times}) if average else (_CONTRADICTS, {})
        is_notice = average.kind == "notice" if average else is_sample
        wrong.append(_Contradiction(fault, is_notice, off[known], own[known], numbers | of))
    wrong.sort(key=lambda each: (each.fault is _CONTRADICTS, each.is_notice, each.affected.sum()))
    yield from wrong[:1]


def _numbers(name: str, logged: float, recorded: float, step: int) -> dict[str, Any]:
    return {"name": name, "logged": float(logged), "recorded": float(recorded), "step": int(step)}


def _extremes(logged: _Logged, names: dict[str, list[_Average]], rows: _StepRows) -> Iterator[_Contradiction]:
    """If the logged mean covers all rows, compare logged extremes with those of the rows at each step and since the
    previous logged value, and with those of the groups' means, which prime-rl logs."""
    for name, (kind, extreme) in itertools.product(names, (("min", np.fmin), ("max", np.fmax))):
        series = _series(names[name], rows.steps, logged[name], 0)
        if series is None or series.off.any() or series.is_sample or "mean" not in name:
            continue
        of, values = names[name][0].of, rows.length if "len" in name else rows["reward"]
        values = {"loss_length": rows["loss_length"], "whole_length": rows.length + rows["prompt_length"]}.get(
            of, values
        )
        if of == "trajectories":
            values = np.where(np.isin(rows.kept, rows.run.continued[0]), np.nan, values)
        own, of_means = (extreme.reduceat(each, rows.starts) for each in (values, mean_of(rows.cell, values)))
        of_name = logged.get(name.replace("mean", kind), {})
        value = np.array([of_name.get(int(step), np.nan) for step in rows.steps])
        ends, distance = _distance(value, own)
        if not len(ends):
            continue
        of_window = extreme.reduceat(own[: ends[-1] + 1], np.r_[0, ends[:-1] + 1])
        distance, least = np.fmin(distance, np.abs(value[ends] - of_window)), 1e-3 * np.nanmax(np.abs(own))
        off, worst = (distance > least) & ~(_distance(value, of_means)[1] <= least), ends[distance.argmax()]
        if off.sum() > 2:
            numbers = _numbers(name.replace("mean", kind), value[worst], own[worst], rows.steps[worst])
            yield _Contradiction(_CONTRADICTS, True, off, rows.steps[ends], numbers)


def _compared(value: np.ndarray, mean: np.ndarray, errors: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return the steps ([S] bool) at which the logged value contradicts the mean over the rows, and whether the logged
    values seem to be averages over other rows."""
    ends, distance = _distance(value, mean)
    off = distance > max(1e-3 * np.abs(mean).max(), TINY * errors.max())
    # If all rows of a step have the same value, probably so do the rows that were not read.
    judged = off[errors[ends] > 0] if errors[ends].any() else off
    at_end, most = bool(judged[judged.argmax() :].all()), 2 * int(judged.sum()) >= len(judged)
    is_sample = most and not (at_end and judged.argmax() >= 2)
    # If the steps that differ are scattered over the run, or make up most of it, the logged means were computed over
    # other rows. Differences within the sampling error then do not count.
    if most or not at_end:
        off &= distance > np.maximum(errors, errors.mean())[ends]
    return np.isin(np.arange(len(value)), ends[off]), is_sample


def _since(mean: np.ndarray, ends: np.ndarray, num: int) -> np.ndarray:
    """Return, at the steps `ends` [E], the mean over all steps since the previous one of them, [S]. NaN elsewhere."""
    found = np.full(num, np.nan)
    found[ends] = np.diff(np.r_[0.0, np.cumsum(mean)[ends]]) / np.diff(np.r_[-1, ends])
    return found


def _distance(value: np.ndarray, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the steps with a logged value, and its distance from the step's mean or from the mean over
    all steps since the previous logged value, whichever is smaller."""
    ends = np.flatnonzero(np.isfinite(value))
    return ends, np.minimum(*np.abs(value - [mean, _since(mean, ends, len(value))])[:, ends])


def _is_exact(value: np.ndarray, mean: np.ndarray) -> bool:
    """Return whether all logged values equal the means, apart from rounding to a few decimals."""
    ends, distance = _distance(value, mean)
    digits = next((num for num in range(5) if np.allclose(np.round(value[ends], num), value[ends], 0.0, 1e-9)), 9)
    return bool((distance <= max(3e-3 * np.abs(mean).max(), 0.51 * 10.0**-digits)).all())


def _num_different(values: np.ndarray) -> int:
    return len(np.unique(np.round(values / max(np.abs(values).max(initial=0.0), 1e-300), 4)))


def _average_of(
    value: np.ndarray, differs: np.ndarray, averages: list[_Average], needs: tuple[str, ...]
) -> _Average | None:
    """Return the average, or a multiple of a right one, that all logged values equal where they differ ([S] bool) from
    the right ones. Its `values` are what should have been logged."""
    ends, found = np.flatnonzero(np.isfinite(value)), list[_Average]()
    asked = differs[ends] | (value[ends] == 0)  # a multiple of 0 is 0
    y, has_gaps = value[ends][asked], (np.diff(ends) > 1).any()
    given = averages + [each._replace(values=_since(each.values, ends, len(value))) for each in averages if has_gaps]
    x, is_right = np.stack([each.values[ends][asked] for each in given]), np.array([each.kind == "right" for each in given])  # fmt: skip
    with np.errstate(all="ignore"):
        factors = np.where(is_right, np.median((y / x)[:, (y != 0) | (not y.any())], axis=1), 1.0)
        errors = np.abs(y - factors[:, None] * x).max(axis=1) / np.where(is_right | bool(needs), _SCALED, _EXACT)
    fits = errors <= min(np.abs(y).max(), _FIT / _SCALED * np.std(y))
    for at in np.flatnonzero(fits & (_num_different(y) > 2)).tolist():
        average: _Average = given[at]
        factor = float(factors[at])
        if not is_right[at]:
            return average._replace(values=[each for each in given[: at + 1] if each.of == averages[0].of][-1].values)
        size, times = abs(factor), max(abs(factor), 1 / max(abs(factor), TINY))
        is_count = round(times) <= _MOST_TIMES and abs(times / round(times) - 1) < _SCALED
        shown = {"divided_by": times} if is_count and size < 1 else {"multiplied_by": size}
        by = {**average.times, **(shown if times > 1 + CLOSE else {}), "is_negative": factor < 0}
        # verl divides losses and KLs by the number of micro-batches, and shares may be percentages.
        is_divided = size < 1 - CLOSE and not {"reference", CURRENT}.isdisjoint(needs)
        is_scale = average.of.startswith("sum") or is_divided or round(times) == 100
        kind = "notice" if is_scale or not is_count else "wrong"
        found += [average._replace(times=by, kind=kind)] if abs(factor - 1) > CLOSE else []
    return min(found, key=lambda each: each.kind == "notice", default=None)


def _totals(run: DataRows, logged: _Logged) -> Iterator[_Contradiction]:
    """Find logged losses that are the sum of their logged terms, but with different coefficients from the settings."""
    for name in (each for each in logged if re.search(r"(^|/)(total_|final_|actor_)?loss$", each)):
        own = re.escape(name.rpartition("/")[0] + "/" * ("/" in name))
        patterns = ("(pg|policy)_loss", "kl_loss", "entropy(_loss)?")
        terms = [next((each for each in logged if re.search(f"^{own}{pattern}$", each)), "") for pattern in patterns]
        known = [each for each in terms if each]
        steps = np.array(sorted(set(logged[name]).intersection(*(logged[each] for each in known))))
        if not terms[0] or len(steps) < len(known) + 3:
            continue
        y, *columns = (np.array([logged[each][step] for step in steps]) for each in (name, *known))
        x = np.stack(columns, axis=1)
        weights, _, rank, _ = np.linalg.lstsq(x, y, rcond=1e-4)
        if (
            rank < len(known)
            or not weights[0]
            or np.abs(x @ weights - y).max() > min(_EXACT * np.abs(y).max(), _FIT * np.std(y))
        ):
            continue
        used = dict(zip(known, weights / weights[0], strict=True))
        for term, setting in ((terms[1], KL_COEFFICIENT), (terms[2], _ENTROPY_COEFFICIENT)):
            # A term may be logged with its coefficient, and an entropy with either sign.
            weight, declared = used.get(term, 0.0), {*run.numbers(setting).values()} - {0.0}
            shown = weight if term == terms[1] else abs(weight)
            # A KL with a coefficient may be part of the rewards instead.
            is_out = abs(weight) < TINY or not declared
            if is_out or np.isclose(shown, [1.0, *declared], rtol=CLOSE).any():
                continue
            right = y + weights[0] * (max(declared) * np.sign(weight / shown) - weight) * x[:, known.index(term)]
            numbers = _numbers(name, y[-1], right[-1], steps[-1]) | {
                "of": "loss_terms",
                "first": terms[0],
                "term": term,
            }
            numbers |= {"sign": "-" if weight < 0 else "+", "weight": abs(float(weight)), "declared": max(declared)}
            yield _Contradiction(_OF_OTHERS, False, steps > -1, steps, numbers)


def _evaluations(run: DataRows, logged: _Logged) -> Iterator[_Contradiction]:
    """Find evaluation rewards that are a multiple of the evaluation rows' mean, or of the mean of each prompt's best."""
    matches = [re.split("/", name) for name in logged if re.search(_EVALUATED, name)]
    ends = Counter((each[0], each[-1]) for each in matches)
    # Several metrics that differ only in the middle cover one data set each.
    names = ["/".join(each) for each in matches if ends[each[0], each[-1]] == 1]
    steps, mean, best = run.database.connection.sql(_EVALUATION).fetchnumpy().values() if names else np.zeros((3, 0))
    averages = [_Average("evaluation_rows", mean), _Average("evaluation_best", best)]
    for each in _compare(dict.fromkeys(names, averages), np.asarray(steps), logged, ("reward",)):
        is_reward = re.search("reward|score", each.numbers["name"])
        yield each if is_reward else each._replace(is_notice=True)  # an accuracy may have another unit


OF_METRIC = "SELECT step, name, value FROM metrics WHERE name = '{name}' ORDER BY step"
_RATE_ENDS = data_fault("learning_rate_ends", "the learning rate is 0 before the run ends", "{name} is logged as 0 at the last {num_steps:,} steps, from step {start} on, so the schedule ends too early, and nothing is learned from then on", OF_METRIC)  # fmt: skip
_SCHEDULE_RESTARTS = data_fault("schedule_restarts", "the resumed run starts a schedule again", "from step {start} on, where attempt {attempt} starts, {name} has the values from step {first} on, so the state of the scheduler was not restored", OF_METRIC)  # fmt: skip


def _schedules(run: DataRows, logged: _Logged) -> Iterator[DataFinding]:
    """Find schedules that restart in a resumed attempt: their values repeat those from the run's first step on. Find learning
    rates that reach 0 before the last tenth of the run."""
    known = attempts(run.database)
    rates = {
        name: np.array([*zip(*sorted(logged[name].items()), strict=True)])
        for name in filter(re.compile(_LEARNING_RATE).search, logged)
    }
    for name, (steps, rate) in rates.items():
        num = int((rate[::-1] != 0).argmax())
        # A frozen part of the model may have a rate of its own.
        if rate.any() and num > max(2, len(rate) / 10) and not any(each[1, -1] for each in rates.values()):
            numbers: dict[str, Any] = {"num_steps": num, "start": int(steps[-num])}
            yield from run.find(_RATE_ENDS, steps >= steps[-num], steps.astype(int), name=name, notice=True, **numbers)
            break
    for attempt, name in itertools.product(known[1:], filter(re.compile(_SCHEDULED).search, logged)):
        start, by, value = attempt.first_step, attempt.first_step - known[0].first_step, logged[name]
        steps = np.array([step for step in sorted(value) if step >= start and step - by in value][:by])
        now, before = (np.array([value[step - less] for step in steps]) for less in (0, by))
        if _num_different(now) > 2 and np.allclose(now, before, rtol=_EXACT, atol=0.0):
            numbers = {"attempt": attempt.attempt, "start": start, "first": known[0].first_step}
            yield from run.find(_SCHEDULE_RESTARTS, steps > -1, steps, name=name, notice=True, **numbers)
            return
