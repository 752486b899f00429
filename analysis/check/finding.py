"""Findings, the faults they report, and candidate explanations with their likelihoods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import lgamma, log, pi, sqrt
from typing import Any, Literal, NamedTuple

import numpy as np

from ...schemas.passes import CURRENT, ROLLOUT, TRAIN
from ..advice import NOTHING, Advice
from .pair_data import FLOOR_NATS, MAX_EXCESS, MIN_REST, PairData, allowed_noise, levels, once, spread, value_rounding
from .where import Where, where_text

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    code: str
    title: str
    broken: Broken | None
    evidence: Mapping[str, str]
    """Signal -> sentence template, to be filled with the finding's numbers."""
    words: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = field(default_factory=dict)
    """Signal -> function that derives more template values from the numbers."""
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

    def sentence(self, finding: Finding) -> str:
        numbers: dict[str, Any] = {**finding.numbers, "effect": finding.effect}
        words = self.words[finding.signal](numbers) if finding.signal in self.words else {}
        return self.evidence[finding.signal].format_map({**numbers, **words})


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
    # In a mixture-of-experts model, up to four such tokens may be router flips unless their d is too large for that.
    return np.asarray(off if off.sum() >= 5 else off & (np.abs(data.d) > max_flip(data)))


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
    data: PairData, finding: Finding, residual: np.ndarray, cost: float, tokens: np.ndarray | None = None, *, is_right: bool = False
) -> Hypothesis:  # fmt: skip
    """Return a hypothesis that predicts d at `tokens` ([K] bool; by default all) up to a residual ([K] nats), at the
    `cost` of its parameters (nats). If `is_right`, the residual is the d that remains once the fault is corrected."""
    tokens = np.ones(data.num_kept, bool) if tokens is None else tokens
    left = np.where(tokens & np.isfinite(residual), residual, data.d)
    right = data.spread_out(np.where(tokens, residual, data.d)) if is_right else None
    share = np.sqrt(np.sum(left[tokens] ** 2) / max(np.sum(data.d[tokens] ** 2), 1e-30))
    worth = _fit(data, left).log_likelihood - unexplained(data).log_likelihood - (cost + CLAIM_NATS)
    if not is_right and share**2 > 0.5 and _fit(data, left, tokens).sigma > allowed_noise(data):
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


BY_ROW = "SELECT step, group_id, seq_id, hash(prompt_ids, response_ids) AS response, reward, advantage FROM {rows} ORDER BY step"
_BY_STEP = "SELECT step, avg(reward) AS reward, min(reward) AS lowest, max(reward) AS highest, avg(num_response_tokens) AS length, max(abs(advantage)) AS largest FROM {rows} GROUP BY step ORDER BY step"
_BY_GROUP = "SELECT step, group_id, count(*) AS n, count(DISTINCT prompt_ids) AS prompts, avg(reward) AS reward, avg(advantage) AS advantage, corr(reward, advantage) AS correlation FROM {rows} GROUP BY ALL ORDER BY step, group_id"
BY_VERSION = 'SELECT step, "pass", policy_version, count(*) AS num_sequences FROM scores GROUP BY ALL ORDER BY ALL'
_EQUAL_BY_STEP = "SELECT step, count(*) AS num_tokens, sum((d = 0)::INTEGER) AS num_equal FROM pair('{a}', '{b}') GROUP BY step ORDER BY step"
_OF_PASS = "SELECT step, seq_id, position, token_id, logprob_a, logprob_b, d FROM pair('train', '{name}') ORDER BY step, seq_id, position LIMIT 40"
_ENTROPIES = "SELECT round(e, 1) AS entropy, avg(-p) AS surprise, count(*) AS n FROM (SELECT unnest(entropy) AS e, unnest(logprobs) AS p FROM scores WHERE \"pass\" = '{name}') GROUP BY ALL ORDER BY ALL"
_TOKENS = "SELECT position, token_id, mask, rollout_logprob, train_logprob FROM tokens WHERE step = {step} AND seq_id = '{seq_id}' ORDER BY position"
_NOT_FINITE = "SELECT step, seq_id, {column} FROM {rows} WHERE NOT isfinite({column}) ORDER BY step"

# Code -> title, sentence, and a query that shows the evidence (default: BY_ROW). The finding's numbers are inserted
# into all three.
KINDS = {
    "not_finite": ("NaN or infinite {column}", "{num:,} values of {column} are NaN or infinite{explanation}", _NOT_FINITE),
    "rewards_constant": ("constant rewards", "every reward{after} is {value:g}, so there is nothing to learn", _BY_STEP),
    "rewards_by_prompt": ("rewards do not depend on the response", "in all {num:,} groups whose responses differ, every response has the same reward, although rewards differ between prompts, so there is nothing to learn within a group; rewards may be cached by prompt", _BY_GROUP),
    "rewards_of_groups": ("some groups all get the same reward", "all rows in {num_groups:,} groups have the reward {value:g}, which hardly occurs in other groups, so the reward function may fail for these prompts", _BY_GROUP),
    "one_row_groups": ("group ids are unique per row", "each prompt has {rows_per_prompt:.3g} rows on average, but every row has its own group", _BY_GROUP),
    "groups_mix_prompts": ("groups mix prompts", "{num_groups:,} groups contain rows from several prompts, up to {most} prompts in one group", _BY_GROUP),
    "prompts_split": ("prompts are split over groups", "each prompt's rows are split over {num_groups} groups per step, each with its own baseline, or the prompt was drawn {num_groups} times", _BY_GROUP),
    "rows_alone": ("some groups contain a single row", "{num:,} rows are alone in their group although other rows in the step have the same prompt, so their baseline is their own reward", _BY_GROUP),
    "advantages_constant": ("constant advantages", "at {num_steps} steps, advantages are equal within each {scope} (mean {value:g}) although rewards differ{explanation}", _BY_GROUP),
    "advantages_inverted": ("advantages have the wrong sign", "advantages decrease as rewards increase: their correlation within groups is {correlation:.3f}", _BY_GROUP),
    "advantages_unequal": ("equal rewards in a group get different advantages", "{num:,} rows have a different advantage from the other rows with the same reward in their group, {explanation}"),
    "advantages_of_equal": ("equal rewards get advantages", "in {num:,} groups with equal rewards, advantages are {size:.3g} instead of 0, as if a rounding error had been divided by a tiny standard deviation"),
    "prompts_unshuffled": ("every epoch has the same order", "{setting} is recorded, but from step {start} on, each step has the prompts of {period} steps earlier, so the data are not reshuffled in each epoch", _BY_GROUP),
    "lag_exceeds_limit": ("the engine is further behind than the settings allow", "{setting} is recorded, but {num:,} rows were sampled with weights from up to {largest} steps earlier", BY_VERSION),
    "setting_contradicts": ("the rows contradict a recorded setting", "{explanation}, so the setting{plural} may be ignored", "SELECT step, group_id, seq_id, temperature, top_p, top_k, max_tokens, finish_reason, reward, advantage FROM {rows} ORDER BY step"),
    "kl_is_zero": ("the KL to the reference is always 0", "{name} is logged as 0 at all {num:,} steps, although {setting} is recorded, so the KL term has no effect: the reference was not computed, or it is the policy itself", "SELECT step, name, value FROM metrics WHERE name = '{name}' ORDER BY step"),
    "reward_function_constant": ("some reward functions are constant", "{explanation} ({num:,} rows), while other reward functions vary"),
    "reward_functions_unused": ("some reward functions are not used", "{setting} is recorded, but rows have no reward from {names}, so these functions may not be called", "SELECT step, seq_id, rewards FROM {rows} WHERE cardinality(rewards) > 0 ORDER BY step"),
    "failures_rewarded": ("failed rollouts are trained on as if they were wrong answers", "{num:,} rows with finish reason {reasons} all have the reward {value:g}, an advantage, and tokens in the loss, so the policy learns from failures of the environment or the verifier"),
    "rows_lost": ("groups lost rows after their baseline was computed", "in {num:,} groups with fewer than {size} rows, the advantages do not sum to 0, although they do in complete groups, so rows were removed after the advantages were computed"),
    "rows_masked": ("rows without tokens in the loss", "{num:,} rows have advantages but no tokens in the loss{explanation}"),
    "finished_masked": ("finished rows without tokens in the loss", "{num:,} rows that finished (finish reason stop) have no tokens in the loss, like the truncated ones"),
    "turns_differ": ("turns of a trajectory get different advantages", "{num:,} rows have different advantages from the rows that continue them{explanation}"),
    "rewards_of_nothing": ("rewards that no reward function gave", "{num:,} rows have a reward although no reward function gave one", "SELECT step, seq_id, reward, rewards FROM {rows} WHERE reward IS NOT NULL ORDER BY step"),
    "versions_ahead": ("the engine's policy version is ahead of the trainer's", "in {num:,} rows, the engine's policy version is {ahead:.0f} ahead of the trainer's, although the trainer does not have these weights yet, so one counter is wrong{explanation}", BY_VERSION),
    "advantages_mixed": ("some advantages follow a different rule", "in {num:,} rows, advantages have {rule}"),
    "advantages_unrelated": ("advantages do not follow rewards", "the correlation between advantages and rewards within each {scope} is {correlation:.3f} (up to {error:.2f} by chance){explanation}", _BY_GROUP),
    "rewards_of_other_rows": ("rewards belong to other rows", "advantages follow other rows' rewards ({explanation}: fit {fit:.4f}); as recorded, their correlation with rewards is {correlation:.3f} within each {scope}", _BY_GROUP),
    "baseline": ("the baseline is not the group's mean", "advantages are rewards minus {explanation} (fit {fit:.4f}; with the group's mean {own:.4f})", _BY_GROUP),
    "baseline_unknown": ("advantages do not average 0 within groups", "the groups' mean advantages have a standard deviation of {between:.2f} times the rms advantage, and no known baseline fits", _BY_GROUP),
    "advantages_unexplained": ("advantages do not follow from rewards alone", "within groups, advantages {explanation} (correlation {correlation:.3f}), and no known rule reproduces them", _BY_GROUP),
    "advantages_clipped": ("advantages are clipped", "advantages are clipped to the range {low:.3g} to {high:.3g} (fit {fit:.4f})", _BY_GROUP),
    "advantages_unsigned": ("advantages have lost their sign", "advantages are the absolute values of rewards minus the group's mean (fit {fit:.4f}; with signed values {own:.4f})", _BY_GROUP),
    "advantages_by_rank": ("advantages follow the reward's rank", "advantages depend only on the rank of the reward within its group (fit {fit:.4f}; with the group's mean {own:.4f})", _BY_GROUP),
    "advantages_by_length": ("advantages are scaled by the response length", "advantages are rewards minus the group's mean, {explanation} (fit {fit:.4f}; without the length {own:.4f})", _BY_GROUP),
    "advantages_misplaced": ("advantages do not cover the whole response", "in {num:,} rows, {explanation}"),
    "advantages_vary": ("advantages vary within responses", "in {num:,} rows, advantages vary within the response{explanation}"),
    "advantages_scaled": ("advantages have an unusual scale", "advantages are the rewards minus the baseline, {explanation}", _BY_GROUP),
    "advantages_extreme": ("extreme advantages", "|advantage| reaches {largest:.4g} ({usual:.3g} is usual), and no baseline or normalisation gives more than {bound:.3g}{explanation}", _BY_STEP),
    "rewards_unequal": ("identical responses get different rewards", "{num:,} of {num_pairs:,} pairs of identical responses to the same prompt have different rewards; {explanation}"),
    "batch_repeats": ("batches repeat", "at {num_steps:,} steps, at least 90% of the prompts and responses are the same as at the previous step"),
    "advantages_unlike_settings": ("advantages contradict the recorded settings", "{setting} is recorded, but advantages are rewards minus the group's mean, {rule} by the group's standard deviation", _BY_GROUP),
    "metric_contradicts": ("a logged metric contradicts the rows", "{name} is logged as {logged:.4g} at step {step}, but the rows give {recorded:.4g}{more}", _BY_STEP),
    "metric_of_others": ("a logged metric is not the mean of its values", "{name} is {of}: it is logged as {logged:.4g} at step {step}, but the recorded values give {recorded:.4g}{more}", _BY_STEP),
    "ratio_is_one": ("the importance ratio is 1 by construction", "{a} and {b} are bitwise equal at all {num_tokens:,} tokens inspected; {reason}", _EQUAL_BY_STEP),
    "padding_counts": ("padding after the end token counts toward the loss", "{num_tokens:,} tokens in {num_rows:,} rows repeat the end token and count toward the loss, although they were not sampled", _TOKENS),
    "samples_repeat": ("responses repeat", "{num:,} of {num_asked:,} responses to repeated prompts occurred before, but judging by their logprobs, at most {expected:.0f} should repeat, so {explanation}"),
    "finish_contradicts": ("finish reasons contradict the tokens", "{num:,} rows have the wrong finish reason: {explanation}"),
    "limit_exceeded": ("responses are longer than the recorded limit", "{num:,} rows have up to {length:,.0f} tokens although max_tokens is {limit:,.0f}{explanation}"),
    "tokens_after_end": ("tokens after the end token count toward the loss", "{num:,} of {of:,} rows have token {token} exactly {distance} tokens before their end and hardly anywhere else, so it ends the response, and all tokens after it, whether sampled or padding, count toward the loss"),
    "end_missing": ("responses have no end token", "none of {num:,} responses contains the recorded end token ({ids}), so the policy never learns to sample it: {explanation}"),
    "prompts_cut": ("prompts are cut off", "{num:,} rows have a prompt of exactly {limit:,.0f} tokens, the recorded {setting}, and few have nearly as many, so longer prompts were truncated, and may lack their question or their end", "SELECT step, seq_id, len(prompt_ids) AS num_prompt_tokens FROM {rows} ORDER BY num_prompt_tokens DESC, step"),
    "prompts_repeat": ("every step has the same prompts", "all {num:,} steps have the same {num_prompts:,} prompts, so the data loader may not advance", _BY_GROUP),
    "prompts_restart": ("the resumed run starts with the first prompts again", "attempt {attempt} starts at step {start} with the prompts of step {first}, and repeats the prompts of {num_steps} steps in the same order, so the state of the data loader was not restored, unless an epoch ended there", _BY_GROUP),
    "penalty_missing": ("a penalty is not applied", "{setting} is recorded, but the rewards of {num:,} {what} equal those of others"),
    "penalty_wrong": ("a penalty is not the declared one", "{setting} is recorded, but rewards of {num:,} responses with more than {limit:,.0f} tokens are not those of shorter ones minus the penalty: it should be {expected:.3g} (median), but is {given:.3g}, so it may be computed from another length"),
    "kl_penalty_missing": ("the KL penalty is not applied", "{setting} is recorded with a coefficient of {coefficient:g}, but in {num:,} rows, advantages equal those of rows with the same reward and a different KL to the reference (|KL| {kl:.3g} nats, median)", _BY_GROUP),
    "kl_penalty_wrong": ("the KL penalty {what}", "within groups, advantages are the rewards {coefficient:+.3g} times {term} over the response's tokens, {explanation}", _BY_GROUP),
    "advantages_of_pass": ("distillation advantages {what}", "in {num:,} rows, each token's advantage is {explanation}, apart from a constant for each row"),
    "advantages_of_parts": ("reward functions are {what}", "advantages are {explanation}", _BY_GROUP),
    "rewards_unlike_responses": ("rewards belong to other rows", "rewards depend on the responses of other rows ({explanation}): lengths, finish reasons and frequent tokens explain {best:.0%} of their variance, but {own:.0%} as recorded"),
    "prompt_padding": ("prompts are recorded with padding", "{num:,} of {of:,} prompts begin with token {token} repeated, and no other prompt begins with a repeated token, so padding is recorded as part of the prompt"),
    "rewards_differ": ("the reward is not the sum of its parts", "the reward is {explanation}"),
    "rewards_count_masked": ("a length penalty counts masked tokens", "{name} depends only on the number of response tokens, including tokens outside the loss, such as tool output, which {num:,} rows contain"),
    "rewards_of_truncated": ("truncated responses all get the same reward", "{name} gives {value:g} to all {num:,} truncated responses, but to few finished ones"),
    "groups_differ_by_one": ("groups are kept because of one reward function", "in {num_groups:,} groups, rewards differ only in {name}, so {setting} has not filtered them out"),
    "rewards_weighted": ("reward functions are not simply added", "the reward is {explanation}, {contrast}", _BY_STEP),
    "metric_late": ("a logged metric belongs to another step", "at all {num:,} logged steps, {name} is logged one step {late} the rows that it averages, so values are assigned to the wrong step", _BY_STEP),
    "schedule_restarts": ("the resumed run starts a schedule again", "from step {start} on, where attempt {attempt} starts, {name} has the values from step {first} on, so the state of the scheduler was not restored", "SELECT step, name, value FROM metrics WHERE name = '{name}' ORDER BY step"),
    "learning_rate_ends": ("the learning rate is 0 before the run ends", "{name} is logged as 0 at the last {num_steps:,} steps, from step {start} on, so the schedule ends too early, and nothing is learned from then on", "SELECT step, name, value FROM metrics WHERE name = '{name}' ORDER BY step"),
    "reference_is_policy": ("the reference is the policy", "reference and train are bitwise equal at all {num_tokens:,} tokens inspected, in {num_steps:,} steps, so the KL is 0 by construction: either the reference shares the policy's weights, or no update has changed them", _EQUAL_BY_STEP),
    "reference_apart": ("the {name} pass does not match train: {what}", "{when}the logprobs of train and {name} differ by {size:.2g} nats on average, more than rounding explains, {explanation}", _OF_PASS),
    "reference_replaced": ("the {name} pass becomes the policy", "{name} and train differ by up to {size:.2g} nats (rms) before step {start}, but are equal there up to rounding, so {name} was loaded from the policy of that step, for example after a resumption", _OF_PASS),
    "reference_changes": ("the {name} pass's weights change during the run", "for the same tokens with the same prefix, {name}'s logprobs differ by {size:.2g} nats from those at earlier steps (median, in the logit, over {num_tokens:,} repeated tokens), {explanation}", _OF_PASS),
    "sampling_contradicts": ("the samples contradict a recorded sampling setting", "{explanation}", _ENTROPIES.replace("{name}", "train")),
    "versions_wrong": ("{name}'s policy versions do not match its weights", "for the same tokens with the same prefix, {name}'s logprobs differ by {size:.2g} nats from those of the same policy version at earlier steps (median, in the logit, over {num_tokens:,} repeated tokens), so {explanation}", BY_VERSION),
    "engine_never_updated": ("the engine's policy version never grows", "all {num:,} rows inspected after the first update were sampled with policy version {version}, while the trainer's grows to {latest}: the data were sampled beforehand, the trainer's weights never reach the engine, or nothing increments its version", BY_VERSION),
    "limit_contradicts": ("responses are cut before the recorded limit", "{num:,} rows have finish reason 'length' at {length:,.0f} tokens, but max_tokens is {limit:,.0f}"),
    "entropies_lost": ("entropies do not belong to the logprobs", "{share:.0%} of the entropies recorded for {name} are {explanation}", _ENTROPIES),
    "entropies_in_bits": ("entropies are in bits", "at all entropy levels, the mean of -logprob is {ratio:.3f} (ln 2) times the entropy recorded for {name}, so the entropies are in bits, not nats", _ENTROPIES),
    "entropies_shifted": ("entropies belong to other positions", "-logprob correlates better with {name}'s entropy one position away ({best:.2f}) than at the same position ({own:.2f}), so each entropy belongs to the {which} position", _ENTROPIES),
    "mask_cuts": ("the loss mask leaves out sampled tokens", "{num_tokens:,} sampled tokens{ids} {end} of {num_rows:,} rows do not count toward the loss"),
    "unsampled_count": ("tokens that were not sampled count toward the loss", "{num_tokens:,} tokens in {num_rows:,} rows, such as tool output or parts of a template, count toward the loss but were not sampled", _TOKENS),}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFinding:
    code: str
    """A key of KINDS."""
    share: float
    """Affected share of the tested rows, pairs or steps."""
    since: int | None
    """First affected step, or None if that is the run's first step."""
    is_notice: bool
    """True if this can be intentional in a healthy run."""
    numbers: dict[str, float | str] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    """What sets the affected rows apart: `feature`, `kind` and `values`, as in Where, and `match`."""
    next: Advice
    """SQL command that shows the finding."""

    @property
    def title(self) -> str:
        return KINDS[self.code][0].format(**self.numbers)


def data_text(finding: DataFinding) -> str:
    since = "" if finding.since is None else f", starting at step {finding.since}"
    text = KINDS[finding.code][1].format(**finding.numbers)
    if finding.where:
        place = where_text(finding.where).removeprefix("all where ")
        text += f"; the rows are {finding.where['match']} those where {place}"
    return f"{text} ({finding.share:.0%} affected{since})"
