from __future__ import annotations

from ..schemas.errors import InvalidOption, NothingToCompare, option
from ..schemas.steps import ALL_STEPS
from ..tracer.cluster import connected
from ..tracer.progress import Progress, no_progress
from .distributions.function import has_captured, summary
from .frameworks.framework import read_once
from .frameworks.registry import framework_of, refuse_options
from .rows import Rows
from .trace.columns import parse_pair, passes_with, tell_sampled, why_nothing
from .trace.database import Database
from .trace.macros import quoted_pair
from .trace.pair_sums import KEYS
from .trace.source import Pair, Traces, find_sums
from .trace.sums import ensure, summarize
from .trace.tokens import CHUNK_TOKENS, packed
from .views import open_database

BY = {"run": "pair_runs", "step": "pair_steps", "sequence": "pair_sequences", "layer": "pair_routing_layers"}
LIKE = ("run", "step")
"""Values of `by` that work with `like`."""
_FEW = 8
"""Up to this many traces without sums are processed together, regardless of their size."""
_TOGETHER = 64
"""Maximum number of traces to open at once to compute missing sums."""
_KEYS = {"run": "run", "step": "run, step", "sequence": "run, step, seq_id, iteration_a, iteration_b"}


def stats(
    traces: Traces | Database, *, pair: str = "train:rollout", by: str = "run", steps: str = ALL_STEPS,
    like: str | None = None, ray: str | None = None, progress: Progress = no_progress, **options: object,
) -> Rows:  # fmt: skip
    """Measure how much the logprobs of two passes differ, per run, step or sequence.

    If a trace is local, finished and writable, stores per-sequence sums in it (`sums/`, `index/`), so that later calls
    need not read the tokens.

    For `pair` a:b, d = logprob(a) - logprob(b) (nats), over tokens that count toward the loss and are finite in both
    passes. NaN and infinities are counted separately. The columns match the SQL macros `pair_runs`, `pair_steps` and
    `pair_sequences`, plus `pair_distribution_runs`, `_steps` and `_sequences` if both passes captured distributions.
    `steps` (3:80, -10:, 2:200:2) selects steps in each run.

    If both passes have router choices, `routing_agreement` is the share that selected the same experts. `by="layer"`
    gives one row per layer, with the columns from the SQL macro `pair_routing_layers`.

    Above 33,554,432 tokens, quantiles come from per-step histograms. `quantile_error` bounds their relative error:
    2^-10 (0.1%), or 0 if exact.

    `ray` is the address of a Ray cluster to spread the tokens over: `auto`, `host:port`, or `local` to start one here.

    `like` names a framework (docs/reference/frameworks.md) and returns its metrics under its own names and definitions:
    one row per step, or one row that treats the run as a single batch. `options` are the framework's options, listed in
    docs/reference/cli.md. Pass a is assumed to be the trainer, and pass b the engine.

    Raises NothingToCompare if the passes share no token, InvalidOption, TraceNotFound, NewerTrace or DamagedTrace.
    """
    names = parse_pair(pair)
    if by not in BY:
        raise InvalidOption(f"got {by!r}; use {', '.join(BY)}", option="by")
    database = open_database(traces, steps, ray)
    if like is not None:
        if database.ray is not None:
            raise InvalidOption("a framework's metrics are computed in a single process; drop the option", option="ray")
        framework = framework_of(like, options)
        if by not in LIKE:
            choices = " or ".join(option("by", choice) for choice in LIKE)
            raise InvalidOption(f"{framework.name} logs no metrics per {by}; use {choices}")
        with read_once(database, framework, names):
            rows = framework.numbers(database, names, by)
        if not len(rows):
            raise NothingToCompare(why_nothing(database, names))
        return rows
    refuse_options(options)
    if not isinstance(traces, Database) and steps == ALL_STEPS and _keep_each(database, names, progress):
        database = database.reopened()
    tell_sampled(database, names)
    routed = {*names} <= passes_with(database, "routing", of=names)
    query = f"SELECT * FROM {BY[by]}({quoted_pair(names)})"
    if by == "layer":
        if not routed:
            raise NothingToCompare(
                f"{', '.join(source.run for source in database.sources)}: {names[0]!r} or {names[1]!r} has no router "
                "choices; record an MoE model with --routing, then replay the trace with engine=hf, which stores "
                "router choices for every pass"
            )
        return database.ask(query)
    of_run = by == "run"
    if not all(database.sums.covers(names, runs=runs) for runs in {False, of_run}):
        with connected(database.ray):
            if ensure(database, names, of_run=of_run, progress=progress):
                database.sums.keep(names)
    if routed:
        query = f"""
            SELECT * FROM ({query}) LEFT JOIN (
                SELECT {_KEYS[by]}, sum(num_same_experts) / nullif(sum(num_tokens), 0) AS routing_agreement
                FROM routing_sums({quoted_pair(names)}) GROUP BY {_KEYS[by]}
            ) USING ({_KEYS[by]}) ORDER BY {_KEYS[by]}"""
    result = database.ask(query)
    if not any(row["num_tokens"] or row["num_nan"] or row["num_inf"] for row in result.dicts()):
        raise NothingToCompare(why_nothing(database, names))
    is_captured = {*names} <= passes_with(database, "dense", of=names) and has_captured(database, names)
    return result.joined(summary(database, names, by), KEYS) if is_captured else result


def _keep_each(database: Database, pair: Pair, progress: Progress) -> bool:
    lacking = [source for source in database.sources if pair not in source.run_covered and source.store.is_local]
    if len(lacking) <= _FEW or database.ray is not None:
        return False
    with progress("summing runs", len(lacking)) as advance:
        sizes = {source.run: (sum(writer.num_tokens for writer in source.writers), 1) for source in lacking}
        for sources in packed(lacking, lambda source: sizes[source.run], (CHUNK_TOKENS, _TOGETHER)):
            summarize(sources, pair=pair)
            for source in sources:
                find_sums(source)
            advance(len(sources))
    return True


def likeness(
    traces: Traces | Database, *, pair: str = "train:rollout", steps: str = ALL_STEPS, like: str | None = None,
    **options: object,
) -> list[str]:  # fmt: skip
    """Return notes on the metrics that `like` selects, such as where they are defined. Without `like`, the list is
    empty."""
    if like is None:
        return []
    framework = framework_of(like, options)
    return [
        f"as {framework.name} {framework.version} defines them: {framework.source}",
        *framework.notes(open_database(traces, steps), parse_pair(pair)),
    ]
