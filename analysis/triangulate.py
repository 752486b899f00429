"""Who is wrong: the trainer or the engine, measured against a replay of higher precision.

With t, r and f the logprobs of the trainer, the engine and the reference, the errors are e_t = t - f and e_r = r - f, and
the gap is d = t - r = e_t - e_r. So mean d^2 = mean e_t^2 + mean e_r^2 - 2 mean e_t e_r, and what a side carries of it is
its own square less the common part: share_t = (mean e_t^2 - mean e_t e_r) / mean d^2; the two shares add up to 1.

Shapes: N tokens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..replay.arms import Arm, parse_arm
from ..replay.engine import replay
from ..replay.gpus import gpus_of_actor
from ..replay.recorded import RecordedRun
from ..schemas.errors import InvalidOption, NothingToCompare
from ..schemas.passes import REPLAY_PREFIX, ROLLOUT, TRAIN
from ..schemas.results import Result
from ..schemas.steps import parse_steps
from ..tracer.progress import Progress, no_progress
from .rows import Rows
from .statistics.correlations import pearson
from .statistics.estimators import Array, Totals
from .statistics.intervals import Interval, NoInterval, bootstrap, ends, numbered, unit
from .trace.database import Database, quoted
from .trace.samples import tell_sampled

_CONFIDENCE = 0.95
PROBABILITIES = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9, 1.0)
"""Edges of the bins of the reference's probability."""
POSITIONS = (0, 1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
"""Edges of the bins of the token's position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideErrors:
    """One side's error against the reference."""

    name: str
    mean: float
    """nats"""
    mean_abs: float
    """nats"""
    rms: float
    """nats"""
    share: float
    """Of mean d^2, what this side carries."""
    share_low: float | None
    """Ends of the share's 95 % interval over groups of sequences; None where there is none."""
    share_high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Triangulation(Result):
    """Both sides' errors, and what single changes remove of the gap."""

    _text = "tim_trace.analysis.triangulate_text:triangulation_text"

    run: str
    reference: str
    """Pass of the reference."""
    steps: tuple[int, ...]
    num_sequences: int
    num_groups: int
    """What is resampled for the intervals: sequences of a step that share a group_id, or one that has none."""
    no_interval: str | None
    """Why shares have no interval, in words; None where they have one."""
    num_tokens: int
    gap_rms: float
    """Root mean square of d = train - rollout, nats."""
    resolution: float
    """Mean rounding of the reference, which is kept as float32, nats: errors below it cannot be told."""
    sides: tuple[SideErrors, ...]
    correlation: float
    """Pearson correlation of the two errors."""
    identity_held: bool
    """Whether the replayed steps gave the recorded bits back."""
    by_probability: Rows
    by_position: Rows
    arms: Rows
    """Each arm: the gap to the rollout when it takes the trainer's place, and the share of mean d^2 that it removes."""

    @property
    def sentence(self) -> str:
        """The answer in a sentence."""
        if self.gap_rms == 0.0:
            return "There is no gap: trainer and engine gave every token the same logprob."
        larger = max(self.sides, key=lambda side: side.share)
        if larger.share < 0.6:
            return (
                f"Both sides carry the gap: the trainer {self.sides[0].share:.0%} of its mean square and the engine "
                f"{self.sides[1].share:.0%}."
            )
        who = "trainer" if larger.name == TRAIN else "engine"
        if larger.share_low is None or larger.share_high is None:
            sure = f"no interval: {self.no_interval}"
        else:
            sure = f"95 % interval over {self.num_groups:,} groups: {larger.share_low:.1%} to {larger.share_high:.1%}"
        return f"The {who} carries {larger.share:.1%} of the gap's mean square ({sure})."


def triangulate(
    trace: str | os.PathLike[str],
    *,
    steps: str = "all",
    reference: str = "fp64",
    arm: Sequence[str] = (),
    weights_from: str | os.PathLike[str] | None = None,
    ray: str | None = None,
    gpus_per_arm: float | None = None,
    progress: Progress = no_progress,
) -> Triangulation:
    """Say which side carries the gap between trainer and engine, and what each single change removes of it.

    Replays what is missing of the reference (fp64 or fp32) and of each arm (`dtype=bf16`, ...), on the steps given.
    Compared are the tokens that count in the loss and have a finite logprob on both sides and in the reference. `weights_from`
    is the folder of the run's checkpoints, where the trace has no weights of its own. `ray` and `gpus_per_arm` divide the replays among
    the actors of a Ray cluster, as `replay` does.

    Raises CannotReplay, WeightsMissing, NothingToCompare, InvalidOption.
    """
    gpus_of_actor(ray, gpus_per_arm)
    if reference not in ("fp64", "fp32"):
        raise InvalidOption(f"got {reference!r}; use fp64 or fp32", option="reference")
    run = RecordedRun(trace, weights_from=weights_from)
    chosen = parse_steps(steps, run.steps(TRAIN))
    if not set(chosen) & set(run.steps(ROLLOUT)):
        raise NothingToCompare(f"{trace}: has no rollout logprobs of these steps, so there is no gap to explain")
    arms = [Arm(dtype=reference), *(parse_arm(text) for text in arm)]
    replayed = _replay_missing(run, arms, chosen, progress, {"ray": ray, "gpus_per_arm": gpus_per_arm})
    database = Database([run.store.url])
    tell_sampled(database, [REPLAY_PREFIX + single.name for single in arms])
    held = _identity_held(database, chosen) if replayed is None else replayed
    names = [REPLAY_PREFIX + single.name for single in arms]
    columns = []
    with progress("measuring errors", len(names) + 1) as advance:
        for name in names:
            columns.append(_tokens(database, name, chosen))
            advance(1)
        return _measure(run, names, chosen, columns[0], held, columns[1:])


def _replay_missing(
    run: RecordedRun, arms: list[Arm], steps: list[int], progress: Progress, cluster: dict[str, Any]
) -> bool | None:
    """Replay the arms that lack one of the steps; returns whether the recorded bits came back, None without a replay."""
    lacking = [arm for arm in arms if not set(steps) <= set(run.steps(REPLAY_PREFIX + arm.name))]
    if not lacking:
        return None
    results = replay(
        run.store.url, steps=_list(steps), arm=lacking, weights_from=run.weights_from, progress=progress, **cluster
    )
    return all(result.identity_held for result in results)


def _identity_held(database: Database, steps: list[int]) -> bool:
    """Whether the recorded bits came back in the replays that are there."""
    query = f"""
        SELECT count(*) FILTER (WHERE d IS DISTINCT FROM 0) FROM pair('replay/as-recorded', 'train')
        WHERE step IN ({_list(steps)}) AND logprob_b IS NOT NULL
    """
    ((different,),) = database.connection.execute(query).fetchall()
    return not different


def _tokens(database: Database, name: str, steps: list[int]) -> dict[str, np.ndarray]:
    """[N] columns of the tokens that trainer, engine and one replay scored, in one order for every replay."""
    query = f"""
        SELECT step, seq_id, position, logprob_a AS train, logprob_b AS rollout, logprob_c AS replayed, {unit("s")} AS unit
        FROM triangle('{TRAIN}', '{ROLLOUT}', {quoted(name)}) JOIN sequences AS s USING (run, step, seq_id)
        WHERE step IN ({_list(steps)})
        ORDER BY step, seq_id, position
    """
    columns: dict[str, np.ndarray] = database.connection.execute(query).fetchnumpy()
    if not len(columns["train"]):
        raise NothingToCompare(f"no token of these steps has a logprob in train, rollout and {name}")
    return columns


def _measure(
    run: RecordedRun,
    names: list[str],
    steps: list[int],
    tokens: dict[str, np.ndarray],
    held: bool,
    arms: list[dict[str, np.ndarray]],
) -> Triangulation:
    error_t, error_r = tokens["train"] - tokens["replayed"], tokens["rollout"] - tokens["replayed"]
    d = tokens["train"] - tokens["rollout"]
    groups_N, num_groups = numbered(tokens["unit"])
    found = shares(
        groups_N, {TRAIN: error_t * error_t - error_t * error_r, ROLLOUT: error_r * error_r - error_t * error_r}, d
    )
    sides = tuple(_side(name, own, *found[name]) for name, own in ((TRAIN, error_t), (ROLLOUT, error_r)))
    return Triangulation(
        run=run.store.name,
        reference=names[0],
        steps=tuple(steps),
        num_sequences=_num_sequences(tokens),
        num_groups=num_groups,
        no_interval=next((str(interval) for _, interval in found.values() if isinstance(interval, NoInterval)), None),
        num_tokens=len(d),
        gap_rms=_rms(d),
        resolution=float(np.mean(np.abs(np.spacing(tokens["replayed"].astype(np.float32))))) / 4,
        sides=sides,
        correlation=pearson(error_t, error_r),
        identity_held=held,
        by_probability=_split(
            "probability", np.exp(tokens["replayed"]), PROBABILITIES, d, error_t, error_r, "{:g} to {:g}"
        ),
        by_position=_split("position", tokens["position"], POSITIONS, d, error_t, error_r, "{:g} to {:g}"),
        arms=Rows(
            ("arm", "gap_rms", "share_removed", "share_low", "share_high"),
            [_arm(name, column) for name, column in zip(names[1:], arms, strict=True)],
        ),
    )


def _num_sequences(tokens: dict[str, np.ndarray]) -> int:
    """How many sequences the tokens are of; those of a sequence follow each other."""
    fresh = (tokens["step"][1:] != tokens["step"][:-1]) | (tokens["seq_id"][1:] != tokens["seq_id"][:-1])
    return 1 + int(fresh.sum())


def _side(name: str, own: np.ndarray, share: float, interval: Interval | NoInterval) -> SideErrors:
    low, high = ends(interval) or (None, None)
    return SideErrors(
        name=name, mean=float(own.mean()), mean_abs=float(np.abs(own).mean()), rms=_rms(own),
        share=share, share_low=low, share_high=high,
    )  # fmt: skip


def _arm(name: str, tokens: dict[str, np.ndarray]) -> tuple[Any, ...]:
    left, gap = tokens["replayed"] - tokens["rollout"], tokens["train"] - tokens["rollout"]
    ((share, interval),) = shares(numbered(tokens["unit"])[0], {name: gap * gap - left * left}, gap).values()
    return name, _rms(left), share, *(ends(interval) or (None, None))


def shares(
    groups_N: np.ndarray, parts: dict[str, np.ndarray], gap: np.ndarray
) -> dict[str, tuple[float, Interval | NoInterval]]:
    """Name of a part -> its share of the sum of squares of the gap, with its interval over groups; NaN where that is 0."""
    columns = {
        name: np.bincount(groups_N, part).astype(np.float64) for name, part in (parts | {"whole": gap * gap}).items()
    }
    statistics = {name: partial(_share, name) for name in parts}
    intervals = bootstrap(statistics, columns, np.arange(len(columns["whole"])), _CONFIDENCE)
    with np.errstate(divide="ignore", invalid="ignore"):
        totals = {name: np.asarray(values.sum()) for name, values in columns.items()}
        return {name: (float(_share(name, totals)), intervals[name]) for name in parts}


def _share(name: str, totals: Totals) -> Array:
    return totals[name] / totals["whole"]


def _split(
    name: str, values: np.ndarray, edges: Sequence[float], d: np.ndarray, error_t: np.ndarray, error_r: np.ndarray,
    label: str,
) -> Rows:  # fmt: skip
    bins = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    total = float(np.sum(d * d))
    rows = []
    for index in np.unique(bins):
        mask = bins == index
        rows.append((
            label.format(edges[index], edges[index + 1]), int(mask.sum()), _rms(d[mask]), _rms(error_t[mask]),
            _rms(error_r[mask]), float(np.sum(d[mask] ** 2)) / total if total else None,
        ))  # fmt: skip
    return Rows((name, "num_tokens", "gap_rms", "train_rms", "rollout_rms", "share_of_gap"), rows)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values * values)))


def _list(steps: Sequence[int]) -> str:
    return ", ".join(str(int(step)) for step in steps)
