"""Attribute the mismatch to trainer and engine by measuring both errors against a higher-precision replay.

Let t, r and f be the trainer's, engine's and reference's logprobs. The errors are e_t = t - f and e_r = r - f. The
mismatch is d = t - r = e_t - e_r, so mean d^2 = mean e_t^2 + mean e_r^2 - 2 mean e_t e_r. Each side's share is its mean
square minus the common term, for example share_t = (mean e_t^2 - mean e_t e_r) / mean d^2. The two shares add up to 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import fsum, nan, sqrt

import numpy as np

from ..replay.arms import Arm, parse_arm
from ..replay.backends.trusted import ROUNDING_NATS
from ..replay.engine import replay_missing
from ..replay.loaded import gpus_of_actor
from ..replay.recorded import RecordedRun
from ..schemas.errors import InvalidOption, NothingToCompare
from ..schemas.passes import REPLAY_PREFIX, ROLLOUT, TRAIN
from ..schemas.results import Result
from ..schemas.steps import parse_steps
from ..tracer.cluster import connected
from ..tracer.progress import Progress, no_progress
from .prediction import Prediction, listed, parse_remedies
from .prediction import predictions as predicted
from .rows import Rows
from .statistics.intervals import Interval, NoInterval, ends, numbered, ratio_interval, unit
from .trace.columns import tell_sampled
from .trace.database import Database
from .trace.macros import quoted
from .trace.tokens import places, spread, step_ranges, tokens_by_step, unit_tokens
from .views import open_database

_CONFIDENCE = 0.95
_TOKENS = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SideErrors:
    """The trainer's or engine's error relative to the reference: mean, mean absolute and rms (nats)."""

    name: str
    mean: float
    mean_abs: float
    rms: float
    share: float | None
    """Share of mean d^2 due to this side's error, or None if the reference reproduces neither side."""
    share_low: float | None
    """Lower end of the 95% interval over groups, or None without an interval."""
    share_high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Triangulation(Result):
    """Trainer and engine error, and the share of the mismatch that each arm removes on its own."""

    _text = "tim_trace.analysis.replay_text:triangulation_text"

    run: str
    reference: str
    steps: tuple[int, ...]
    num_sequences: int
    num_groups: int
    """Number of resampled units (groups of sequences, or single sequences without a group_id)."""
    no_interval: str | None
    """Why the shares have no interval, or None if they have one."""
    num_tokens: int
    gap_rms: float
    """Root mean square of d = logprob(train) - logprob(rollout) (nats)."""
    resolution: float
    """Mean rounding error (nats) from storing the reference as float32. Smaller errors cannot be measured."""
    sides: tuple[SideErrors, ...]
    correlation: float
    """Pearson correlation between the trainer's and the engine's errors."""
    identity_held: bool
    """True if the replay reproduced the recorded bits."""
    not_held: str | None
    """Why the recorded bits were not reproduced, as in `ReplayedStep`. None if they were reproduced, or if no replay
    ran."""
    arms: Rows
    """One row per arm: the mismatch if the arm's replay replaces the trainer, and the share of mean d^2 that this
    removes."""
    predictions: tuple[Prediction, ...] = ()
    """One entry per remedy in `predict` and per metric: the mismatch that would remain at the steps not replayed."""
    identity_mean_abs_d: float | None = None
    """Mean |d| (nats) between the as-recorded replay and the trainer, or None without such a replay."""


def triangulate(
    trace: str | os.PathLike[str], *, steps: str = "all", reference: str = "fp64", arm: Sequence[str] = (),
    predict: Sequence[str] = (), engine: str | None = None, model_factory: str | None = None,
    weights_from: str | os.PathLike[str] | None = None, allow_kernel: Sequence[str] = (), ray: str | None = None,
    gpus_per_arm: float | None = None, progress: Progress = no_progress,
) -> Triangulation:  # fmt: skip
    """Attribute the mismatch to trainer and engine, and measure how much of it each individual change removes.

    Like `replay`, stores its replays in the trace.

    Replays the reference (fp64 or fp32) and each arm (`dtype=bf16`, ...) on the given steps, unless the trace already
    has these replays. Compares the tokens that count toward the loss and have finite logprobs in trainer, engine and
    reference. Also replays each remedy in `predict`, and predicts, with a 90% interval, how much of the mismatch the
    remedy would leave at the run's other steps. A remedy is one arm for both sides (`dtype=fp16`), an arm for one side
    (`rollout:engine=exact`), or an arm for each side (`train:lm-head=fp32/rollout:dtype=fp32`). `engine` is the arm
    that reproduces the recorded engine, by default `engine=vllm,mode=decode` if vLLM was recorded. Remedies are applied
    to this arm.

    `model_factory` names a function (`module:function`) that builds models missing from transformers.
    `weights_from` is the folder of the run's checkpoints, for a trace without weights. `allow_kernel` lists
    recorded attention kernels that may be downloaded from the Hugging Face Hub and run. `ray` and `gpus_per_arm` spread
    the work over a Ray cluster, as in `replay`.

    Raises CannotReplay, WeightsMissing, NothingToCompare, InvalidOption.
    """
    gpus_of_actor(ray, gpus_per_arm)
    if reference not in ("fp64", "fp32"):
        raise InvalidOption(f"got {reference!r}; use fp64 or fp32", option="reference")
    run = RecordedRun(trace, model_factory=model_factory, weights_from=weights_from, allow_kernel=allow_kernel)
    chosen = parse_steps(steps, run.steps(TRAIN))
    if not set(chosen) & set(run.steps(ROLLOUT)):
        raise NothingToCompare(f"{trace} has no rollout logprobs for these steps; choose steps that have them")
    remedies = parse_remedies(run, chosen, predict, engine)
    arms = [Arm(dtype=reference), *(parse_arm(text) for text in arm)]
    if ray is not None:
        places(open_database([run.store.url]))  # raise an error now if actors cannot open the trace
    with connected(ray):
        replayed = replay_missing(run, arms, chosen, progress, ray=ray, gpus_per_arm=gpus_per_arm)
        database = open_database([run.store.url], ray=ray)
        names = [REPLAY_PREFIX + single.name for single in arms]
        tell_sampled(database, names)
        errors, (num_different, num_tokens, sum_abs_d) = _errors(database, names, chosen, progress)
        measured = predicted(run, chosen, remedies, progress, ray=ray, gpus_per_arm=gpus_per_arm)
        predictions = tuple(measured) if remedies else ()
    not_held = None if replayed is None else next((step.not_held for step in replayed if step.not_held), None)
    mean_abs_d = float(sum_abs_d / num_tokens) if num_tokens else None
    found = _measured(run, chosen, errors, num_different == 0, not_held)
    return replace(found, predictions=predictions, identity_mean_abs_d=mean_abs_d)


def _errors(
    database: Database, names: list[str], steps: list[int], progress: Progress
) -> tuple[dict[str, ErrorSums], np.ndarray]:
    tokens = {step: number for step, number in tokens_by_step(database).items() if step in set(steps)}
    total = sum(tokens.values())
    ranges = step_ranges(tokens, unit_tokens(database, _TOKENS, total))
    units = [(names, [step for step in part if step in tokens]) for part in ranges]
    found: dict[str, list[ErrorSums]] = {name: [] for name in names}
    identity = np.zeros(3)
    with progress("measuring errors", total) as advance:
        for unit, (of_steps, of_identity) in zip(units, spread(database, _measure, units), strict=True):
            for name, parts in of_steps.items():
                found[name] += parts
            identity += of_identity
            advance(sum(tokens[step] for step in unit[1]))
    for name, parts in found.items():
        if not parts:
            where = f"train, rollout and {name}"
            raise NothingToCompare(f"no token in these steps has a logprob in {where}; choose different steps")
    return {name: joined(parts) for name, parts in found.items()}, identity


def _measure(
    database: Database, unit: tuple[list[str], list[int]]
) -> Iterator[tuple[dict[str, list[ErrorSums]], tuple[float, ...]]]:
    names, steps = unit
    yield {name: list(_of_steps(_tokens(database, name, steps))) for name in names}, _identity(database, steps)


def _of_steps(tokens: Mapping[str, np.ndarray]) -> Iterator[ErrorSums]:
    edges = [0, *(np.flatnonzero(np.diff(tokens["step"])) + 1).tolist(), len(tokens["step"])]
    for start, end in pairwise(edges):
        if end > start:
            yield ErrorSums.of({name: column[start:end] for name, column in tokens.items()})


def _identity(database: Database, steps: list[int]) -> tuple[float, ...]:
    """Return how many trainer tokens the as-recorded replay does not reproduce, how many it has, and their sum of |d|."""
    query = f"""
        SELECT count(*) FILTER (WHERE d IS DISTINCT FROM 0), count(d), coalesce(sum(abs(d)), 0)
        FROM pair('replay/as-recorded', 'train') WHERE step IN ({listed(steps)}) AND logprob_b IS NOT NULL
    """
    return database.connection.execute(query).fetchall()[0]


def _tokens(database: Database, name: str, steps: list[int]) -> Mapping[str, np.ndarray]:
    query = f"""
        SELECT step, hash(seq_id) AS sequence, logprob_a AS train, logprob_b AS rollout, logprob_c AS replayed,
            {unit("s")} AS unit
        FROM triangle('{TRAIN}', '{ROLLOUT}', {quoted(name)}) JOIN sequences AS s USING (run, step, seq_id)
        WHERE step IN ({listed(steps)})
        ORDER BY step, seq_id, position
    """
    columns: dict[str, np.ndarray] = database.connection.execute(query).fetchnumpy()
    return columns


def _measured(
    run: RecordedRun, steps: list[int], errors: dict[str, ErrorSums], held: bool, not_held: str | None
) -> Triangulation:
    reference, own = next(iter(errors.items()))
    found = {name: share_of_gap(own.groups, name) for name in (TRAIN, ROLLOUT)}
    sides = [_side(name, own, *found[name]) for name in (TRAIN, ROLLOUT)]
    gap_rms = sqrt(own.totals["square_d"] / own.totals["num_tokens"])
    if all(side.mean_abs > ROUNDING_NATS and side.rms > gap_rms for side in sides):  # both share the reference's error
        sides = [replace(side, share=None, share_low=None, share_high=None) for side in sides]
    return Triangulation(
        run=run.store.name, reference=reference, steps=tuple(steps), num_sequences=int(own.totals["num_sequences"]),
        num_groups=len(own.groups[GAP]), num_tokens=int(own.totals["num_tokens"]), gap_rms=gap_rms,
        no_interval=next((str(interval) for _, interval in found.values() if isinstance(interval, NoInterval)), None),
        resolution=own.totals["spacing"] / own.totals["num_tokens"] / 4, sides=tuple(sides),
        correlation=_correlation(own), identity_held=held, not_held=not_held,
        arms=Rows(
            ("arm", "gap_rms", "share_removed", "share_low", "share_high"),
            [_arm(name, sums) for name, sums in errors.items() if name != reference],
        ),
    )  # fmt: skip


def _side(name: str, sums: ErrorSums, share: float, interval: Interval | NoInterval) -> SideErrors:
    low, high = ends(interval) or (None, None)
    mean, mean_abs, square = (
        sums.totals[f"{name} {part}"] / sums.totals["num_tokens"] for part in ("error", "abs_error", "square")
    )
    return SideErrors(
        name=name, mean=mean, mean_abs=mean_abs, rms=sqrt(square), share=share, share_low=low, share_high=high
    )


def _correlation(sums: ErrorSums) -> float:
    error, square = ([sums.totals[f"{side} {name}"] for side in (TRAIN, ROLLOUT)] for name in ("error", "square"))
    num = sums.totals["num_tokens"]
    common = square[0] - fsum(sums.groups[TRAIN]) - error[0] * error[1] / num
    spreads = [of_square - of_error * of_error / num for of_square, of_error in zip(square, error, strict=True)]
    if any(spread <= 1e-12 * of_square for spread, of_square in zip(spreads, square, strict=True)):
        return nan
    return max(min(common / sqrt(spreads[0] * spreads[1]), 1.0), -1.0)


def _arm(name: str, sums: ErrorSums) -> tuple[str, float, float, float | None, float | None]:
    share, interval = share_of_gap(sums.groups, REMOVED)
    left = sums.totals[f"{ROLLOUT} square"] / sums.totals["num_tokens"]
    low, high = ends(interval) or (None, None)
    return name, sqrt(left), share, low, high


def share_of_gap(groups: Mapping[str, np.ndarray], name: str) -> tuple[float, Interval | NoInterval]:
    """Return a column's share of the sum of d^2, with its interval. The share is NaN if that sum is 0."""
    gap_G = groups[GAP]
    with np.errstate(divide="ignore", invalid="ignore"):
        share = float(groups[name].sum() / gap_G.sum())
    return share, ratio_interval(groups[name], gap_G, np.arange(len(gap_G)), _CONFIDENCE)


GAP, REMOVED = "gap", "removed"
"""Columns of `ErrorSums.groups`.

GAP is the sum of d^2. REMOVED is the reduction of this sum if the replay replaces the trainer: the sum of d^2 - e_r^2.
The other two columns are TRAIN, the sum of e_t^2 - e_t e_r, and ROLLOUT, the sum of e_r^2 - e_t e_r.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSums:
    groups: dict[str, np.ndarray]
    """Column (see GAP) -> its sum over each group, [G]. Groups are in order of first appearance."""
    totals: dict[str, float]
    """Sums over all tokens, by name.

    The names are num_sequences, num_tokens, square_d, spacing (distance between float32 values at the replay's logprob,
    in nats), `train error`, `train abs_error` and `train square` (sums of e, |e| and e^2), and the same three for
    rollout.
    """

    @classmethod
    def of(cls, tokens: Mapping[str, np.ndarray]) -> ErrorSums:
        errors = {TRAIN: tokens["train"] - tokens["replayed"], ROLLOUT: tokens["rollout"] - tokens["replayed"]}
        d = tokens["train"] - tokens["rollout"]
        squares = {side: error_N * error_N for side, error_N in errors.items()}
        common, square_d = errors[TRAIN] * errors[ROLLOUT], d * d
        parts = {side: square_N - common for side, square_N in squares.items()}
        parts |= {GAP: square_d, REMOVED: square_d - squares[ROLLOUT]}
        groups_N, _ = numbered(tokens["unit"])
        totals = {
            "num_sequences": 1 + int((tokens["sequence"][1:] != tokens["sequence"][:-1]).sum()),
            "num_tokens": len(d),
            "square_d": float(square_d.sum()),
            "spacing": float(np.abs(np.spacing(tokens["replayed"].astype(np.float32))).sum(dtype=np.float64)),
        }
        for side, error_N in errors.items():
            sums = {"error": error_N, "abs_error": np.abs(error_N), "square": squares[side]}
            totals |= {f"{side} {name}": float(values_N.sum()) for name, values_N in sums.items()}
        groups = {name: np.bincount(groups_N, part).astype(np.float64) for name, part in parts.items()}
        return cls(groups=groups, totals=totals)


def joined(parts: Sequence[ErrorSums]) -> ErrorSums:
    return ErrorSums(
        groups={name: np.concatenate([part.groups[name] for part in parts]) for name in parts[0].groups},
        totals={name: fsum(part.totals[name] for part in parts) for name in parts[0].totals},
    )
