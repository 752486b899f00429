from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from ...schemas import loss as losses
from ...schemas.errors import InvalidOption
from ...schemas.loss import read_loss
from ...tracer.weights.checkpoints import open_weights
from ...tracer.weights.reader import WeightReader
from ..statistics.loss import sql_options
from ..trace.columns import passes_with, read_hyperparameters
from ..trace.database import Database, cached
from ..trace.macros import quoted
from ..trace.source import Pair
from ..trace.tokens import tokens_by_step
from .mismatch import read_step_mismatch
from .series import KINDS, SPARSE, Series, by_step, columns_of, is_evaluation, named

_ENTROPY = """
SELECT step, sum_in_order(total, seq_id) / sum(n) AS entropy
FROM (
    SELECT step, seq_id, fsum({value}) AS total, count(*) AS n
    FROM (
        SELECT s.step, s.seq_id, unnest(p.{column})::DOUBLE AS x,
               unnest(coalesce(s.response_mask, list_resize([]::BOOLEAN[], s.num_response_tokens, true))) AS mask
        FROM sequences AS s JOIN scores AS p ON p.run = s.run AND p.step = s.step AND p.seq_id = s.seq_id
        WHERE p."pass" = $name AND p.iteration = 0
    )
    WHERE isfinite(x) AND mask
    GROUP BY step, seq_id
)
GROUP BY step ORDER BY step
"""

_LAGS = """
SELECT s.step,
       avg(p.policy_version - s.policy_version) FILTER (p."pass" = $loss) AS policy_lag,
       avg(p.policy_version - coalesce(b.policy_version, {sampled}))
           FILTER (p."pass" = {a} AND p.iteration = 0) AS version_lag
FROM sequences AS s
JOIN (SELECT run, step, seq_id, "pass", iteration, policy_version FROM scores WHERE "pass" IN ($loss, {a})) AS p
  ON p.run = s.run AND p.step = s.step AND p.seq_id = s.seq_id
LEFT JOIN (
    SELECT run, step, seq_id, policy_version FROM scores WHERE "pass" = {b} AND iteration = 0
) AS b ON b.run = s.run AND b.step = s.step AND b.seq_id = s.seq_id
GROUP BY s.step ORDER BY s.step
"""

_CLIPPED = """
SELECT step, coalesce(sum(n) FILTER (loss_clips(clamped_exp(log_ratio), advantage, {loss})), 0) / sum(n) AS clip_share
FROM (
    SELECT step, {terms}
    FROM pair('current', $below) WHERE iteration_b = 0 AND isfinite(d) AND mask
    {grouped}
)
WHERE isfinite(advantage)
GROUP BY step ORDER BY step
"""

Given = frozenset[tuple[str, str]]
"""The optional `scores` columns that a run recorded, each as a tuple (column, pass)."""


def read_given(database: Database) -> Given:
    columns = ("entropy", "policy_version")
    return frozenset((column, name) for column in columns for name in passes_with(database, column))


def read_entropy(database: Database, pass_a: str, metrics: list[Series], given: Given) -> list[Series]:
    """Read the token entropy by step, or estimate it from logprobs if the run recorded none (see `read_given`)."""
    for name in ("train", "current"):
        if ("entropy", name) in given:
            what = f"mean token entropy in {name}, nats"
            return columns_of(_mean(database, name, "entropy"), {"entropy": what})
    if any(column.name == "entropy" for column in metrics):
        return []
    if not passes_with(database, "logprobs", of=[pass_a]):
        return []
    what = f"estimated as the mean -logprob in {pass_a}, nats"
    return columns_of(_mean(database, pass_a, "logprobs"), {"entropy": what})


def read_lags(database: Database, pair: Pair, given: Given) -> list[Series]:
    """Return the series policy_lag and version_lag (see read_series)."""
    loss = "current" if ("policy_version", "current") in given else "train"
    # Engine scores recorded without a policy version were computed with the sequence's policy version.
    sampled = "s.policy_version" if pair[1] == "rollout" else "NULL"
    query = _LAGS.format(a=quoted(pair[0]), b=quoted(pair[1]), sampled=sampled)
    sources = {
        "policy_lag": f"number of updates between the sampling weights and the {loss} weights",
        "version_lag": f"number of updates between the {pair[1]} weights and the {pair[0]} weights",
    }
    return columns_of(by_step(database, query, {"loss": loss}), sources)


def read_clipping(database: Database) -> list[Series]:
    """Read the share of tokens clipped by the recorded loss. analysis.objective defines when a token is clipped."""
    loss = read_loss(read_hyperparameters(database))
    if loss is None or loss.denominator == losses.CURRENT or not loss.has_clip:
        return []
    terms, grouped = "d AS log_ratio, advantage, 1 AS n", ""
    if loss.level != losses.TOKEN:
        mean = "avg" if loss.level == losses.SEQUENCE_MEAN else "sum"
        terms = f"{mean}(d) AS log_ratio, avg(advantage) FILTER (isfinite(advantage)) AS advantage, count(*) AS n"
        grouped = "GROUP BY step, seq_id, iteration_a"
    query = _CLIPPED.format(loss=sql_options(loss), terms=terms, grouped=grouped)
    source = f"share of tokens clipped by {loss.kind} (ratio current / {loss.denominator})"
    return columns_of(by_step(database, query, {"below": loss.denominator}), {"clip_share": source})


def _mean(database: Database, name: str, column: str) -> dict[str, np.ndarray]:
    query = _ENTROPY.format(column=column, value="x" if column == "entropy" else "-x")
    with database.following(f"reading {column} by step"):
        return by_step(database, query, {"name": name})


MISMATCH: Pair = ("train", "rollout")


def read_series(database: Database, *, pair: Pair = MISMATCH) -> dict[str, Series]:
    """Read a run's series by step, named as in `series.KINDS`. Series without data are left out.

    All series share the same steps. `pair` names the passes in the mismatch d = logprob(a) - logprob(b) (nats), taken
    over tokens in the loss mask with finite logprobs in both passes.

    - k3 = mean(exp(d) - 1 - d), ess = (sum w)^2 / (n sum w^2) with w = exp(d)
    - policy_lag: number of updates between the weights used for sampling and those used in the loss
    - version_lag: number of updates between the weights of pass b and those of pass a
    - changed_weights: share of weight elements that differ bitwise from the last recorded version

    Raises InvalidOption, TraceNotFound, NewerTrace or DamagedTrace.
    """
    if len(database.sources) != 1:
        names = ", ".join(source.run for source in database.sources)
        raise InvalidOption(f"several traces are open; name one of {names}", option="run")
    return dict(_read(database, pair))


@cached
def _read(database: Database, pair: Pair) -> dict[str, Series]:
    metrics, given = read_logged(database, bool(tokens_by_step(database))), read_given(database)
    first, rest = read_rows(database, pair, metrics, given)
    columns: list[Series] = []
    known: set[str] = set()
    for source in (first, metrics, rest, read_changed(database)):
        found = [column for column in source if len(column.steps) and column.name not in known]
        known |= {column.name for column in found if column.known.any()}
        columns += found
    if not columns:
        return {}
    steps = np.unique(np.concatenate([column.steps for column in columns])).astype(np.int64)
    series = {column.name: on_steps(steps, column) for column in columns}
    return {name: series[name] for name in KINDS if name in series}


def read_rows(database: Database, pair: Pair, metrics: list[Series], given: Given) -> tuple[list[Series], list[Series]]:
    """Read the series of sequences and scores: those that replace logged `metrics`, and those that metrics replace."""
    return [*read_step_mismatch(database, pair), *read_sampled(database)], [
        *read_entropy(database, pair[0], metrics, given),
        *read_lags(database, pair, given),
        *read_clipping(database),
    ]


def on_steps(steps: np.ndarray, series: Series) -> Series:
    values = np.full(len(steps), np.nan)
    values[np.searchsorted(steps, series.steps)] = series.values
    return replace(series, steps=steps, values=values)


NAMES: dict[str, tuple[str, ...]] = {
    "grad_norm": ("grad_norm", "actor/grad_norm", "train/grad_norm", "optim/grad_norm"),
    "loss": ("loss", "actor/pg_loss", "train/loss", "loss/mean", "pg_loss", "actor_loss", "policy/loss", "loss/policy"),
    "learning_rate": ("learning_rate", "actor/lr", "train/learning_rate", "optim/lr", "lr"),
    "entropy": ("entropy", "actor/entropy", "actor/entropy_loss", "train/entropy", "entropy/mean"),
    "update_to_weight": ("optimizer/update_to_weight",),
    "adam_second_moment": ("optimizer/second_moment",),
    "reward": (
        "reward", "critic/rewards/mean", "rewards/mean", "reward/mean", "critic/score/mean", "train/reward", "rollout/raw_reward",
        "rollout/reward_mean", "env/all/reward/total",
    ),
}  # fmt: skip
"""Metric names used by frameworks and by the recorder, in order of preference."""

AVERAGES: dict[str, tuple[str, ...]] = {
    "k3": ("rollout_corr/k3_kl", "gen_kl_error", "mismatch_kl/all/mean", "train_rollout_kl", "mis_k3_kl"),
    "mean_abs_d": (
        "sampling/sampling_logp_difference/mean", "train_rollout_logprob_abs_diff",
        "policy/rollout_train_logprobs_abs_diff_mean", "mean_abs_lp_err",
    ),
    "max_abs_d": ("sampling/sampling_logp_difference/max", "policy/rollout_train_logprobs_abs_diff_max", "max_abs_lp_err"),
    "mean_d": ("rollout_corr/kl", "mis_kl", "vllm_kl", "optim/kl_sample_train_v1"), "k2": ("optim/kl_sample_train_v2",),
    "prob_diff_mean": ("training/rollout_probs_diff_mean",),
    "mean_exp_abs_d": ("token_mult_prob_error", "mult_prob_error"),
    "chi2_token": ("rollout_corr/chi2_token", "mis_chi2_token"),
    "length": (
        "response_length/mean", "completions/mean_length", "rollout/response_len/mean", "rollout/response_length_mean",
        "mean_gen_tokens_per_sample",
    ),
    "share_length_limited": (
        "response_length/clip_ratio", "completions/clipped_ratio", "rollout/truncated_ratio", "rollout/truncated_rate",
    ),
    "share_groups_without_spread": ("frac_reward_zero_std",),
    "clip_share": ("actor/pg_clipfrac", "clip_ratio/region_mean", "pg_clipfrac", "ppo_clip_ratio"),
    "entropy": ("entropy_loss", "approx_entropy", "entropy/all/mean", "optim/entropy"),
    "grad_norm": ("actor_grad_norm",), "loss": ("policy_loss",), "learning_rate": ("actor_lr", "lr-pg_0"),
    "reference_k3": ("actor/kl_loss", "kl", "kl_loss"),
}  # fmt: skip
"""Logged names, with or without `train/`, of averages over tokens. They are read only if a run has no token data.

The names come from these files.

verl: trainer/ppo/rollout_corr_helper.py, utils/debug/metrics.py, trainer/ppo/metric_utils.py. TRL: trainer/grpo_trainer.py.
slime: backends/megatron_utils/loss.py, observability/rollout_metrics.py, examples/train_infer_mismatch_helper/mis.py.
miles: backends/training_utils/loss_hub/losses.py. NeMo-RL: algorithms/loss/loss_functions.py, examples/gen_kl_harness.py
(pull request 3531). Tinker: tinker_cookbook/rl/metrics.py. OpenRLHF: models/loss.py,
trainer/ppo_trainer.py. prime-rl: trainer/rl/loss.py. SkyRL: trainer.py."""
_OF_ROLLOUT = AVERAGES["mean_d"]
"""Under these names, frameworks log mean(rollout - train), which has the opposite sign of mean d."""
ESTIMATED = "estimated from "

LAST_WORDS: dict[str, tuple[str, ...]] = {
    "grad_norm": ("grad_norm", "gradient_norm", "total_norm"),
    "learning_rate": ("learning_rate", "lr"),
    "loss": ("loss", "total_loss"),
    "entropy": ("entropy", "policy_entropy", "mean_entropy"),
    "reward": ("reward", "rewards", "mean_reward", "reward_mean", "avg_reward", "average_reward"),
}

_OF_OTHERS = re.compile(r"(^|[/._])(value|critic|kl|ref|reference|entropy|aux|balance|sft|reward_model|rm)[/._]")
"""Name prefixes of losses other than the policy loss, and of its individual terms."""

_METRICS = """
SELECT step, name, avg(value) FILTER (isfinite(value)) AS value, count(*) FILTER (NOT isfinite(value)) AS num_not_finite
FROM metrics
WHERE step > 0 AND value IS NOT NULL AND name IN ({names})
GROUP BY step, name ORDER BY step
"""

_NAMES = """
SELECT DISTINCT name FROM metrics
WHERE step > 0 AND value IS NOT NULL AND NOT contains(name, 'eval') AND NOT contains(name, 'hyperparameter/')
ORDER BY name
"""
_NUM_STEPS = """
SELECT name, count(DISTINCT step) FROM metrics
WHERE step > 0 AND value IS NOT NULL AND name NOT LIKE 'hyperparameter/%'
GROUP BY name
"""
_OF_TRAINING = (*LAST_WORDS["loss"], *LAST_WORDS["grad_norm"], *LAST_WORDS["learning_rate"])


@cached
def read_evaluations(database: Database) -> frozenset[str]:
    """Return the names of logged metrics that are outcomes on held-out data."""
    num_steps = dict(database.connection.execute(_NUM_STEPS).fetchall())
    of_training = [
        num
        for name, num in num_steps.items()
        if re.split(r"[/.]", name)[-1] in _OF_TRAINING and not is_evaluation(name)
    ]
    usual = min(of_training, default=0)  # a trainer may log all its metrics only every few steps
    return frozenset(name for name, num in num_steps.items() if is_evaluation(name, is_sparse=num <= SPARSE * usual))


def read_logged(database: Database, has_tokens: bool) -> list[Series]:
    """Read the series that the training loop logged. `has_tokens` is True if any step has token data."""
    chosen = _chosen(database, has_tokens)
    names = ", ".join(quoted(name) for name in chosen.values()) or "NULL"
    rows = database.connection.execute(_METRICS.format(names=names)).fetchnumpy()
    steps, values = rows["step"].astype(np.int64), np.ma.filled(rows["value"].astype(np.float64), np.nan)
    found = {}
    for series, name in chosen.items():
        at = rows["name"] == name
        own = -values[at] if series == "mean_d" and _bare(name) in _OF_ROLLOUT else values[at]
        lost = steps[at & (rows["num_not_finite"] > 0)]
        found[series] = named(series, steps[at], own, f"logged as {name}", lost, name)
    if "mean_abs_d" not in found and (estimate := _mean_abs_d(found)) is not None:
        found["mean_abs_d"] = estimate
    return [*found.values()]


def _mean_abs_d(found: Mapping[str, Series]) -> Series | None:
    """Estimate mean |d| (nats) from another average of d, for runs that did not log mean |d| itself."""
    estimates: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
        "mean_exp_abs_d": (lambda values: values - 1, "mean exp(|d|) - 1, an upper bound"),
        "prob_diff_mean": (lambda values: values, "a lower bound"),
        "k3": (lambda values: np.sqrt(2 * np.maximum(values, 0)), "sqrt(2 k3), an upper bound"),
        "k2": (lambda values: np.sqrt(2 * np.maximum(values, 0)), "sqrt(2 k2), an upper bound"),
    }
    for name, (estimate, bound) in estimates.items():
        if (series := found.get(name)) is not None:
            source = f"{ESTIMATED}{series.logged}: {bound}"
            return named("mean_abs_d", series.steps, estimate(series.values), source, series.not_finite)
    return None


def read_averages(database: Database) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return logged averages that are not in `series.KINDS`, such as `prob_diff_mean`, as (steps, values) by name.

    Call this only on a run without token data.
    """
    others = (one for one in read_logged(database, False) if one.name not in KINDS and one.name != "reference_k3")
    return {one.name: (one.steps[one.known], one.values[one.known]) for one in others if one.known.any()}


def _chosen(database: Database, has_tokens: bool) -> dict[str, str]:
    rows = database.connection.execute(_NAMES).fetchall()
    evaluations = read_evaluations(database)
    logged = {name: None for (name,) in rows if name not in evaluations}
    averages = {} if has_tokens else AVERAGES
    bare = {_bare(name): name for name in reversed(logged)} if averages else {}
    found = {}
    for series in dict.fromkeys((*NAMES, *averages)):
        ends = LAST_WORDS.get(series, ())
        alike = [
            name for name in logged
            if re.split(r"[/.]", name)[-1] in ends and not (series == "loss" and _OF_OTHERS.search(name))
        ]  # fmt: skip
        named_so = [*NAMES.get(series, ()), *(bare.get(name, name) for name in averages.get(series, ())), *alike]
        name = next((name for name in named_so if name in logged), None)
        if name is not None:
            found[series] = name
    return found


def _bare(name: str) -> str:
    return name.removeprefix("train/")


# The summation order is fixed to keep results bitwise reproducible with several threads.
_SEQUENCES = """
SELECT step, avg(reward ORDER BY seq_id) FILTER (isfinite(reward)) AS reward, avg(num_response_tokens) AS length,
       avg((finish_reason = 'length')::INTEGER) AS share_length_limited,
       coalesce(avg((NOT isfinite(reward))::INTEGER), 0) AS share_not_finite
FROM sequences GROUP BY step ORDER BY step
"""

_GROUPS = """
SELECT step, avg(spread ORDER BY group_id) AS reward_std_within_groups, avg((spread = 0)::INTEGER) AS share_groups_without_spread
FROM (
    SELECT step, group_id,
           CASE WHEN min(reward) = max(reward) THEN 0.0 ELSE stddev_samp(reward ORDER BY seq_id) END AS spread
    FROM sequences
    WHERE group_id IS NOT NULL AND isfinite(reward)
    GROUP BY step, group_id
    HAVING count(*) > 1
)
GROUP BY step ORDER BY step
"""

_MOST = 0.5


def read_sampled(database: Database) -> list[Series]:
    sequences = by_step(database, _SEQUENCES)
    groups = by_step(database, _GROUPS)
    no_number = sequences["step"][sequences["share_not_finite"] > _MOST]
    of_sequences = {
        "reward": "mean sequence reward",
        "length": "mean response length, tokens",
        "share_length_limited": "share of responses ending at the token limit",
    }
    of_groups = {
        "reward_std_within_groups": "reward standard deviation within groups, averaged over groups",
        "share_groups_without_spread": "share of groups with equal rewards",
    }
    return [*columns_of(sequences, of_sequences, {"reward": no_number}), *columns_of(groups, of_groups)]


def read_changed(database: Database) -> list[Series]:
    """Read the share of weights that changed bitwise in each version. This reads only metadata, not the weights."""
    source = database.sources[0]
    reader = open_weights(source.store)
    if not isinstance(reader, WeightReader):
        return []
    shares: dict[int, float] = {}
    for version in reader.versions:
        parts = reader.parts[version]
        counts = [part.num_changed for part in parts]
        if version > 0 and all(count is not None for count in counts):
            elements = sum(tensor.numel for part in parts for tensor in reader.layout(part).tensors)
            changed = sum(sum(count.values()) for count in counts if count is not None)
            shares[version] = changed / elements if elements else np.nan
    kept = database.kept_steps.get(source.run)
    steps = np.array(sorted(shares if kept is None else shares.keys() & set(kept)), np.int64)
    values = np.array([shares[int(step)] for step in steps])
    what = "share of weights that changed bitwise since the last recorded version"
    return [named("changed_weights", steps, values, what)]
