"""Findings, the faults they report, and candidate explanations with their likelihoods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import lgamma, log, pi, sqrt
from typing import Any, Literal, NamedTuple

import numpy as np

from ...schemas.passes import CURRENT, ROLLOUT, TRAIN
from ..advice import NOTHING, Advice
from .pair_data import (
    FLOOR_NATS,
    MAX_EXCESS,
    MIN_REST,
    PairData,
    allowed_noise,
    is_mixture,
    levels,
    once,
    spread,
    value_rounding,
)
from .where import Where

Number = float | int | str | None

Broken = Literal["recording", "engine", "trainer", "computation", "versions"]
"""What to fix.

`recording`: the passes do not contain the same quantity for the same tokens. `engine`, `trainer`: that side used the
wrong weights, cache, experts, context or precision. `computation`: either the engine or the trainer did so, but the
trace does not show which. `versions`: nothing needs fixing, because engine and trainer use different policy versions,
as is normal in asynchronous training.
"""
SIDES: Mapping[str, Broken] = {ROLLOUT: "engine", TRAIN: "trainer", CURRENT: "trainer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    code: str
    """A key of faults.FAULTS or faults.HEALTHY."""
    signal: str
    """How the fault was detected: a key of `Fault.evidence`."""
    effect: float
    """Rms d over the affected tokens (nats). NaN if one pass has no values there."""
    share: float
    """Share of compared tokens that are affected."""
    weight: float = 1.0
    """Share of the mismatch that the fault explains. 1 if the fault was found by comparing bits."""
    is_expected: bool = False
    """True if the recorded engines and dtypes explain the finding, so the comparison is still valid."""
    next: Advice = NOTHING
    """Command that confirms the finding. Empty if nothing is left to confirm."""
    numbers: dict[str, Number] = field(default_factory=dict)
    """Fitted values, counts and pass names for the evidence template."""
    tokens: np.ndarray | None = field(default=None, compare=False, repr=False)
    """[N] bool: the affected tokens."""
    cause: str = ""
    """Title to report: the title of the cause if it is known, otherwise the title of the fault."""
    side: Broken | None = None
    """What to fix, or None if the finding reports no fault."""

    @property
    def title(self) -> str:
        if self.since is None:
            return self.cause
        before = int(self.numbers.get("last_before") or self.since - 1)
        when = f"at step {self.since}" if before == self.since - 1 else f"between steps {before} and {self.since}"
        return f"the mismatch grows {when}"

    @property
    def since(self) -> int | None:
        since = self.numbers.get("since")
        return int(since) if self.code == "subset" and since is not None else None

    @property
    def fails(self) -> bool:
        return self.side is not None and not self.is_expected

    @property
    def is_declared(self) -> bool:
        """True if recorded settings explain the finding, False if it is only harmless."""
        return self.is_expected and self.numbers.get("cause") != "unknown"

    @property
    def broken(self) -> Broken | None:
        return self.side if self.fails else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Described:
    code: str
    title: str
    evidence: Mapping[str, str]
    """Signal -> sentence template, to be filled with the finding's numbers."""
    words: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = field(default_factory=dict)
    """Signal -> function that derives more template values from the numbers."""
    clauses: Mapping[str, str | Mapping[Any, str]] = field(default_factory=dict)
    """Number, or `signal` -> clause that replaces it: one for each value, or one unless it is None, False or empty."""

    def filled(self, template: str, signal: str, numbers: Mapping[str, Any]) -> str:
        numbers = {"signal": signal, **numbers}
        values = {**numbers, **(self.words[signal](numbers) if signal in self.words else {})}
        for name, cases in self.clauses.items():
            value = numbers.get(name)
            is_absent = value is None or value is False or value == ""
            clause = ("" if is_absent else cases) if isinstance(cases, str) else cases.get(value, "")
            values[name] = clause.format_map(values)
        return template.format_map(values)

    def sentence(self, signal: str, numbers: Mapping[str, Any]) -> str:
        return self.filled(self.evidence[signal], signal, numbers)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fault(Described):
    broken: Broken | None
    causes: Mapping[str, str] = field(default_factory=dict)
    """Value of `numbers["cause"]` -> title that replaces `title`."""

    def finding(
        self, data: PairData, signal: str, affected: np.ndarray | None = None, *, weight: float = 1.0,
        is_expected: bool = False, next: Advice = NOTHING, broken: Broken | None = None, effect: float | None = None,
        share: float | None = None, numbers: Mapping[str, Number],
    ) -> Finding:  # fmt: skip
        """Build a finding about the kept tokens marked in `affected` ([K] bool), or by default about all of them."""
        if share is None:
            share = float(np.mean(affected)) if affected is not None and len(affected) else 1.0
            share *= data.num_kept / max(int(data.sample.compared.sum()), 1)
        cause = self.causes.get(str(numbers.get("cause")), self.title)
        return Finding(
            code=self.code, signal=signal, effect=data.rms(affected) if effect is None else effect, share=share,
            weight=weight, is_expected=is_expected, next=next, numbers=dict(numbers), cause=cause,
            tokens=data.keep if affected is None else data.marked(affected), side=broken or self.broken,
        )  # fmt: skip


BY_ROW = "SELECT step, group_id, seq_id, hash(prompt_ids, response_ids) AS response, reward, advantage FROM {rows} ORDER BY step"
BY_STEP = "SELECT step, avg(reward) AS reward, min(reward) AS lowest, max(reward) AS highest, avg(num_response_tokens) AS length, max(abs(advantage)) AS largest FROM {rows} GROUP BY step ORDER BY step"
BY_GROUP = "SELECT step, group_id, count(*) AS n, count(DISTINCT prompt_ids) AS prompts, avg(reward) AS reward, avg(advantage) AS advantage, corr(reward, advantage) AS correlation FROM {rows} GROUP BY ALL ORDER BY step, group_id"
BY_VERSION = 'SELECT step, "pass", policy_version, count(*) AS num_sequences FROM scores GROUP BY ALL ORDER BY ALL'


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataFault(Described):
    query: str
    """SQL that shows the finding, to be filled with its numbers."""
    hidden_by: tuple[str, ...] = ()
    """Codes of findings that make this one redundant. A notice does not make a fault redundant."""
    is_often_intended: bool = False
    """True if healthy runs in nine sets of rebuilt bug reports have its notices at least as often as faulty ones. These
    come last."""


def data_fault(
    code: str, title: str, evidence: str | Mapping[str, str], query: str = BY_ROW, *, cases: Mapping[str, str] | None = None,
    words: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None, hidden_by: tuple[str, ...] = (),
    is_often_intended: bool = False, **clauses: str | Mapping[Any, str],
) -> DataFault:  # fmt: skip
    """Describe a data fault. With a single template as `evidence`, the signals are the `cases`, which replace its `{case}`, or
    the code."""
    if isinstance(evidence, str):
        evidence = {signal: evidence.replace("{case}", case) for signal, case in (cases or {code: ""}).items()}
    return DataFault(
        code=code, title=title, evidence=evidence, query=query, hidden_by=hidden_by, is_often_intended=is_often_intended,
        words=dict.fromkeys(evidence, words) if words else {}, clauses=clauses,
    )  # fmt: skip


# --- Explanations of a mismatch and their fit

DEGREES = 3.0
"""Degrees of freedom of the Student t distribution of rounding errors, which have no heavier tails in healthy runs."""


class Fit(NamedTuple):
    sigma: float
    """Scale of logit rounding errors (nats)."""
    log_likelihood: float


def fit(residual: np.ndarray, scale: np.ndarray, values: np.ndarray, most: float) -> Fit:
    """Fit a mixture of rounding errors (Student t, with scale sigma * `scale` and sigma at most `most` nats) and
    unexplained errors (Laplace) to residuals ([K] nats). `values`, the recorded logprobs' rounding error, is added in
    quadrature to the former."""
    size = np.abs(residual)
    if not len(size):
        return Fit(FLOOR_NATS, 0.0)
    noise = size / scale
    sigma = float(np.clip(1.3 * np.median(noise), FLOOR_NATS, most))
    width = max(float(np.mean(size)), sigma)
    unexplained, constant = 0.05, lgamma((DEGREES + 1) / 2) - lgamma(DEGREES / 2) - 0.5 * log(DEGREES * pi)
    for _ in range(6):
        spread = np.hypot(sigma * scale, values)
        weighted = (size / spread) ** 2
        inside = np.log1p(-unexplained) + constant - np.log(spread) - (DEGREES + 1) / 2 * np.log1p(weighted / DEGREES)
        outside = np.log(unexplained) - np.log(2 * width) - size / width
        total = np.logaddexp(inside, outside)
        off = np.exp(outside - total)
        unexplained = float(np.clip(off.mean(), 1e-6, 0.999))
        width = max(float(np.sum(off * size) / max(off.sum(), 1e-9)), sigma, FLOOR_NATS)
        weight = (1 - off) * (DEGREES + 1) / (DEGREES + weighted)
        sigma = float(np.clip(sqrt(np.sum(weight * noise**2) / max(np.sum(1 - off), 1e-9)), FLOOR_NATS, most))
    return Fit(sigma, float(total.sum()))


@once
def scored(data: PairData) -> np.ndarray:
    """Return the tokens used to compare explanations ([K] bool): about 20,000, in evenly spaced whole rows."""
    return np.isin(data.seq, np.unique(data.seq)[:: max(-(-data.num_kept // 20_000), 1)])


def _fit(data: PairData, residual: np.ndarray, inside: np.ndarray | None = None) -> Fit:
    chosen = scored(data) if inside is None else scored(data) & inside
    return fit(residual[chosen], data.scale[chosen], value_rounding(data)[chosen], MAX_EXCESS * allowed_noise(data))


@once
def unexplained(data: PairData) -> Fit:
    return _fit(data, data.d)


def explained(data: PairData, inside: np.ndarray) -> float:
    """Return the share of the variance in `levels` that is explained by whether a token is `inside` ([K] bool)."""
    num, level = int(inside.sum()), levels(data) - levels(data).mean()
    part = float(level[inside].sum())
    return part**2 * (1 / num + 1 / (len(inside) - num)) / max(float(level @ level), 1e-30)


def max_flip(data: PairData) -> float:
    """Return the largest logit error (nats) that a different choice of experts can cause."""
    return max(3.0, spread(data))


_MOST_AT_EDGE = 0.01
"""Maximum share of tokens in whose context rounding decides whether a sampling filter keeps some token."""


def at_edge(data: PairData) -> np.ndarray:
    """Return the tokens ([K] bool) whose d a recorded filter can cause if both passes apply it: where it keeps a token in
    one pass alone, the kept mass differs, with top_p by a factor of at most 1 / top_p."""
    top_p, top_k, min_p = (np.nan_to_num(data.sample.settings[name])[data.seq] for name in ("top_p", "top_k", "min_p"))
    most = -np.log(np.where((top_p > 0) & (top_p < 1), top_p, 1.0))
    most = np.maximum(
        most, np.log1p(np.maximum(min_p, 0.0)) + np.log1p(np.where(top_k > 0, 1 / np.maximum(top_k, 1), 0.0))
    )
    return np.asarray(np.abs(data.d) <= most)


@once
def nobodys(data: PairData) -> np.ndarray:
    """Return the tokens ([K] bool) whose d is too large to be a rounding error, at a false discovery rate of 0.1%. Rounding
    errors are assumed to follow a t distribution with six degrees of freedom, and a scale that is measured, and clamped
    to between 1/6 and MAX_EXCESS times `allowed_noise`."""
    allowed = allowed_noise(data)
    uncertain = data.rest > MIN_REST
    usual = 1.4 * float(np.median(np.abs(data.d[uncertain]) / data.scale[uncertain])) if uncertain.any() else 0.0
    # With too few uncertain tokens to measure this run's rounding level, assume at least the allowed noise.
    least = allowed / 6 if uncertain.sum() >= 30 else allowed
    sigma = float(np.clip(max(unexplained(data).sigma, usual), least, MAX_EXCESS * allowed))
    # Nearly certain tokens have a different noise level, assumed to be at least a quarter of the allowed noise.
    error = np.where(uncertain, sigma, max(sigma, allowed / 4)) * data.scale
    size = np.abs(data.d) / np.hypot(error, 2 * value_rounding(data))
    t = size / np.sqrt(6 + size**2)
    near = np.maximum(1 - t * (1 + (1 - t**2) / 2 + 3 / 8 * (1 - t**2) ** 2), 0.0)
    chance = np.where(size > 50, 270 / np.maximum(size, 1) ** 6, near)
    order = np.sort(chance)  # false discovery rate after Benjamini and Hochberg, 1995
    passed = order[order <= 1e-3 * np.arange(1, len(order) + 1) / len(order)]
    off = chance <= passed.max(initial=-1.0)
    if (edge := off & at_edge(data)).mean() <= _MOST_AT_EDGE:
        off &= ~edge
    # A few such tokens may be router flips unless their d is too large for that. Of 350 healthy runs of dense models, four
    # have one such token, and none has more.
    least = 5 if is_mixture(data) is not False else max(2, 1e-4 * len(off))
    return np.asarray(off if off.sum() >= least else off & (np.abs(data.d) > max_flip(data)))


CLAIM_NATS = 8.0
"""Evidence required before any cause is reported (nats). This yields a false report in at most 1 of 3,000 runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    finding: Finding
    tokens: np.ndarray
    """[N] bool: tokens that the hypothesis explains."""
    gain: float
    """Log likelihood gained compared with having no explanation, minus the cost of the parameters (nats)."""
    left: float | None = None
    """Share of rms d at `tokens` that the prediction leaves unexplained. None if no sizes are predicted."""
    rank: int = 0
    """Complexity: of all hypotheses with at least half the best gain, the one with the lowest rank wins."""
    right: np.ndarray | None = None
    """[N] d after correcting the fault, e.g. moving values or converting units. None if it cannot be corrected."""
    place: Where | None = None
    beside: Finding | None = None
    """Finding that reports `place` itself, if the explanation applies only there."""


def certain(finding: Finding, gain: float = float("inf")) -> Hypothesis:
    """Return a hypothesis that explains the finding's tokens with a `gain` (nats), by default infinite."""
    assert finding.tokens is not None
    return Hypothesis(finding=finding, tokens=finding.tokens, gain=gain)


def predicting(
    data: PairData, finding: Finding, residual: np.ndarray, cost: float, tokens: np.ndarray | None = None, *,
    is_right: bool = False, formula: np.ndarray | None = None,
) -> Hypothesis:  # fmt: skip
    """Return a hypothesis that predicts d at `tokens` ([K] bool; by default all) up to a residual ([K] nats), at the
    `cost` of its parameters (nats). If `is_right`, the residual is the d that remains once the fault is corrected.
    `formula` ([K] bool) are the tokens whose size a formula predicts if it predicts the others only on average."""
    tokens = np.ones(data.num_kept, bool) if tokens is None else tokens
    left = np.where(tokens & np.isfinite(residual), residual, data.d)
    right = data.spread_out(np.where(tokens, residual, data.d)) if is_right else None
    share, of_formula = (
        np.sqrt(np.sum(left[part] ** 2) / max(np.sum(data.d[part] ** 2), 1e-30))
        for part in (tokens, tokens if formula is None else formula)
    )
    worth = _fit(data, left).log_likelihood - unexplained(data).log_likelihood - (cost + CLAIM_NATS)
    if not is_right and of_formula**2 > 0.5 and _fit(data, left, tokens).sigma > allowed_noise(data):
        worth = 0.0  # the formula leaves more than rounding, and more than it explains
    return Hypothesis(finding=finding, tokens=data.marked(tokens), gain=worth, right=right, left=float(share))


def of_signs(data: PairData, finding: Finding, sign: np.ndarray, cost: float) -> Hypothesis:
    """Return a hypothesis that predicts the sign of d ([K] -1, 0 or 1) but not its size. If a share p of n signs is
    correct, the gain is n (log 2 - H(p)) nats, where H is the binary entropy."""
    asked = (np.abs(data.d) > 2 * value_rounding(data)) & (sign != 0)
    num = int(asked.sum())
    right = float(np.clip(np.mean(np.sign(data.d[asked]) == sign[asked]), 1e-6, 1 - 1e-6)) if num else 0.5
    entropy = -right * np.log(right) - (1 - right) * np.log(1 - right)
    worth = num * (np.log(2) - entropy) if right > 0.5 else 0.0
    return Hypothesis(finding=finding, tokens=data.keep.copy(), gain=float(worth) - cost - CLAIM_NATS)


def located(data: PairData, finding: Finding, tokens: np.ndarray, cost: float, at: Where | None = None) -> Hypothesis:
    """Return a hypothesis that predicts where d is large. The size of d there is fitted, not predicted."""
    parts = [part for part in (tokens, ~tokens) if (scored(data) & part).any()]
    apart = sum(_fit(data, data.d, part).log_likelihood for part in parts) - unexplained(data).log_likelihood
    gain = (apart if len(parts) > 1 else 0.0) - cost - CLAIM_NATS
    return Hypothesis(finding=finding, tokens=data.marked(tokens), gain=gain, place=at)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFinding:
    code: str
    signal: str
    """How the fault was detected: a key of `DataFault.evidence`. With a single way, the code."""
    title: str
    share: float
    """Affected share of the tested rows, pairs or steps."""
    since: int | None
    """First affected step, or None if that is the run's first step."""
    is_notice: bool
    """True if this can be intentional in a healthy run."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """Fitted values, counts, codes, and names of passes, metrics, settings and reward functions."""
    where: dict[str, str] = field(default_factory=dict)
    """What sets the affected rows apart: `feature`, `kind` and `values`, as in Where, and `match`."""
    finding: Finding | None = None
    """Finding about a pair of passes that explains this one."""
    next: Advice
    """SQL command that shows the finding."""
