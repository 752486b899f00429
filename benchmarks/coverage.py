"""Measure how often tim-trace's intervals contain the true value, on simulated runs for which it is known.

python benchmarks/coverage.py              # every cell, 200 runs each: about 10 minutes on one core
python benchmarks/coverage.py --quick      # a few cells, 50 runs each: about a minute
python benchmarks/coverage.py --json FILE  # also write every cell's counts

A cell is a number of sequences, a group size, a correlation within groups, and tails. Each simulated run of a cell goes
through the functions that compute the intervals of `gate`, `triangulate`, `objective` and `diagnose`; the true value is
that of 200,000 sequences. `lowest` is the cell with the lowest coverage of the nominal 95% interval, `mean` the mean
over cells, and `none` the share of runs without an interval; cells in which fewer than a tenth of the runs have one are
left out. A true quantile above the largest value of the run counts as neither hit nor miss, because the output says
that the interval ends there.

`dynamics`, `attribute` and `watch` report when a series changed or how fast it grows. Their cells are a number of steps
and the autocorrelation of the series' noise; runs in which no change was found count under `none`.

The exit code is 1 if coverage is below 90%, or below the level printed beside a number, by more than chance.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from tim_trace.analysis.diagnosis.diagnose import removed_interval
from tim_trace.analysis.dynamics.dynamics import LEAST_SD, growths
from tim_trace.analysis.facts.changes import change_points
from tim_trace.analysis.facts.series import Outcome, Series, find_fall
from tim_trace.analysis.gate.condition import LARGEST, SequenceColumns
from tim_trace.analysis.gate.measured import QUANTILES, TAILS, quantile_cuts, resampled
from tim_trace.analysis.objective.figures import FIGURES, chosen_figures, totals_of, values_of
from tim_trace.analysis.objective.objective import estimates
from tim_trace.analysis.objective.pass_roles import ADVANTAGE, DRIFT, MISMATCH
from tim_trace.analysis.objective.sums import COLUMNS, LossRows, SequenceSums, sequence_sums
from tim_trace.analysis.objective.sums import shares as loss_shares
from tim_trace.analysis.statistics.estimators import FROM_SUMS, addable
from tim_trace.analysis.statistics.intervals import MIN_GROUPS, PARTS, NoInterval, jackknife, parts_of
from tim_trace.analysis.trace.pair_sums import FiniteTokens, pair_sums
from tim_trace.analysis.trace.ragged import Tokens, blocks
from tim_trace.analysis.triangulate import GAP, share_of_gap
from tim_trace.schemas.loss import Loss

NOMINAL, WANTED = 0.95, 0.90
RUNS, QUICK_RUNS = 200, 50

SIZES = ((8, 1), (32, 1), (32, 4), (128, 1), (128, 8), (128, 16), (512, 1), (512, 4), (512, 16))
"""(number of sequences, group size). Fewer than MIN_GROUPS groups have no interval to measure."""
QUICK_SIZES = ((8, 1), (32, 4), (128, 8))

CORRELATIONS = (0.0, 0.3, 0.8)
"""Correlations between two sequences of a group."""

SCALE, SHIFT = 0.05, 0.3
"""Size of the logit errors, and the standard deviation of their mean over sequences, in units of that size."""

SPREAD = {"normal": 0.5, "heavy": 0.5, "scales": 1.0}
"""Standard deviation over sequences of the logarithm of the error size, by tails."""

TRUTH_SEQUENCES = 200_000

JACKKNIFED = ("k1", "k3", "mean_abs_d", "prob_pearson", "ess_token", "chi2_token")
"""Components of the frameworks' numbers, for which `gate` uses a jackknife."""

STEPS = (24, 60, 120)
EVERY = 5
"""Number of steps between two evaluations."""
QUICK_STEPS = (60,)
AUTOCORRELATIONS = (0.0, 0.5, 0.8)
"""Autocorrelations of a series' noise from one step to the next."""

JUMP, RAMP, DECAY, GROWTH = (4.0, 8.0), (6.0, 12.0), (0.05, 0.15), 0.01
"""Sizes of jumps and ramps, in standard deviations of the noise (a ramp reaches its size at the last step); time
constants of an exponential drop, as fractions of the run; slope of ln k3."""

LOSS = Loss()
KNOWN = frozenset({MISMATCH, DRIFT, ADVANTAGE})


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A setting from which runs are drawn."""

    num_sequences: int
    group_size: int
    correlation: float
    tails: str
    """`normal`; `heavy`: logit errors have a Student's t distribution with 3 degrees of freedom; or `scales`: normal
    errors whose size varies more between sequences and groups."""

    @property
    def name(self):
        return f"{self.num_sequences} in groups of {self.group_size}, correlation {self.correlation}"


@dataclass(frozen=True, kw_only=True)
class SeriesCell:
    """A setting from which series over the steps of a run are drawn."""

    num_steps: int
    autocorrelation: float

    @property
    def name(self):
        return f"{self.num_steps} steps, autocorrelation {self.autocorrelation}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """The concatenated tokens of sequences of 16 to 48 tokens each."""

    unit_N: np.ndarray
    lengths_N: np.ndarray
    logprobs: dict[str, np.ndarray]
    """[T] logprobs by pass: `exact`; `train` and `rollout` with the trainer's and the engine's errors; `replay` with
    half of the trainer's error; `current` some updates later."""
    advantage_N: np.ndarray


def draw_run(draw, cell):
    """Draw a run in which the engine samples one of two tokens, so that d = train - rollout has mean exp(d) = 1, as in
    a real run.

    The size and mean of the errors differ between sequences and are correlated within groups.
    """
    num_groups = cell.num_sequences // cell.group_size
    lengths_N = draw.integers(16, 49, cell.num_sequences)

    def of_sequence():
        of_group = np.repeat(draw.normal(size=num_groups), cell.group_size)
        return np.sqrt(cell.correlation) * of_group + np.sqrt(1 - cell.correlation) * draw.normal(
            size=cell.num_sequences
        )

    def errors():
        size_T, shift_T = (np.repeat(of_sequence(), lengths_N) for _ in range(2))
        noise_T = draw.standard_t(3, len(size_T)) if cell.tails == "heavy" else draw.normal(size=len(size_T))
        return SCALE * np.exp(SPREAD[cell.tails] * size_T) * (noise_T + SHIFT * shift_T)

    logits_T = draw.normal(1.5, 2.0, lengths_N.sum())
    train_T, rollout_T = errors(), errors()
    sampled_T = np.where(draw.random(len(logits_T)) < 1 / (1 + np.exp(-logits_T - rollout_T)), 1, -1)
    logits = {
        "exact": logits_T, "train": logits_T + train_T, "rollout": logits_T + rollout_T, "replay": logits_T + train_T / 2,
        "current": logits_T + train_T + draw.normal(0, 0.1, len(logits_T)),
    }  # fmt: skip
    advantage_N = of_sequence()
    return Run(
        unit_N=np.repeat(np.arange(num_groups), cell.group_size), lengths_N=lengths_N,
        logprobs={name: -np.logaddexp(0, -sampled_T * values_T) for name, values_T in logits.items()}, advantage_N=advantage_N,
    )  # fmt: skip


class Numbers:
    """The numbers of a run and their intervals, as the commands print them."""

    def __init__(self, run):
        self.run = run
        train_T, rollout_T, exact_T, replay_T = (run.logprobs[name] for name in ("train", "rollout", "exact", "replay"))
        none_N = np.zeros(len(run.lengths_N), np.int64)
        tokens = FiniteTokens(
            a_T=train_T, b_T=rollout_T, num_tokens_N=run.lengths_N, num_nan_N=none_N, num_inf_N=none_N
        )
        sums = {name: column.astype(np.float64) for name, column in pair_sums(tokens).items()}
        largest = {name: sums[name] for name in LARGEST.values()}
        self.columns = SequenceColumns(values=addable(sums), largest=largest, unit_N=run.unit_N, step_N=none_N)
        self.d_T, self.row_T = train_T - rollout_T, np.repeat(np.arange(len(run.lengths_N)), run.lengths_N)
        error_t, error_r = train_T - exact_T, rollout_T - exact_T
        self.parts = {"train": error_t * (error_t - error_r), "rollout": error_r * (error_r - error_t)}
        self.removed = {"removed": self.d_T**2 - (replay_T - rollout_T) ** 2}
        self.left_T = (replay_T - rollout_T) ** 2
        self.objective = self._objective()

    def _objective(self):
        run = self.run
        logprobs = {"train": run.logprobs["train"], "rollout": run.logprobs["rollout"], "now": run.logprobs["current"]}
        tokens = Tokens(logprobs=logprobs, advantage_N=run.advantage_N, lengths_N=run.lengths_N)
        parts = [sequence_sums(LOSS, tokens.cut(rows, span)) for rows, span, _ in blocks(run.lengths_N)]
        columns = np.concatenate(parts, axis=1)
        none_N = np.zeros(len(run.lengths_N), np.int64)
        rows = LossRows(update_R=none_N, num_tokens_R=run.lengths_N, micro_batch_R=none_N.astype(np.uint64))
        return SequenceSums(
            unit_N=run.unit_N, updates=[(1, 0)], update_N=none_N, share_N=loss_shares(LOSS, rows),
            num_rows_U=rows.num_rows_U, micro_batches_known=False, columns=dict(zip(COLUMNS, columns, strict=True)),
        )  # fmt: skip

    def own(self):
        """Return the numbers of `stats` that follow from sums."""
        totals = {name: values.sum() for name, values in self.columns.values.items()}
        return {name: float(formula(totals)) for name, formula in FROM_SUMS.items()}

    def values(self):
        """Return every number by (command, name)."""
        found = {("gate", name): value for name, value in self.own().items()}
        found |= {("gate", name): float(np.quantile(np.abs(self.d_T), p)) for name, p in QUANTILES.items()}
        found |= {("gate, framework", name): found["gate", name] for name in JACKKNIFED}
        for command, parts in (("triangulate", self.parts), ("triangulate, arm", self.removed)):
            found |= {(command, name): float(part_T.sum() / (self.d_T**2).sum()) for name, part_T in parts.items()}
        found["diagnose, replay", "removed"] = found["triangulate, arm", "removed"]
        columns = totals_of(self.objective)
        totals = {name: values.sum() for name, values in columns.items()} | {"num_updates": np.ones(())}
        figures = chosen_figures(LOSS, KNOWN)
        return found | {("objective", name): float(value) for name, value in values_of(figures, totals).items()}

    def intervals(self):
        """Return every interval or None by (command, name), and the keys of those that end at the largest value."""
        values, named = self.values(), set()
        own = {name: values["gate", name] for name in FROM_SUMS}
        found = {("gate", each.metric): each.interval for each in resampled(self.columns, own, NOMINAL)}
        size_T = np.abs(self.d_T)
        for name, probability in QUANTILES.items():
            above_N = np.bincount(self.row_T, size_T > values["gate", name])
            cuts = quantile_cuts(probability, above_N, self.run.lengths_N.astype(float), self.run.unit_N, NOMINAL)
            found["gate", name] = cuts if isinstance(cuts, NoInterval) else tuple(np.quantile(size_T, cuts))
            if found["gate", name][1] == size_T.max():
                named.add(("gate", name))
        for name in JACKKNIFED:
            value = values["gate, framework", name]
            found["gate, framework", name] = jackknife(value, self._without(name), NOMINAL)
        groups_T = self.run.unit_N[self.row_T]
        for command, parts in (("triangulate", self.parts), ("triangulate, arm", self.removed)):
            columns = {name: np.bincount(groups_T, part) for name, part in (parts | {GAP: self.d_T**2}).items()}
            found |= {(command, name): share_of_gap(columns, name)[1] for name in parts}
        gap_N, left_N = (np.bincount(self.row_T, squares_T) for squares_T in (self.d_T**2, self.left_T))
        found["diagnose, replay", "removed"] = removed_interval(gap_N, left_N, self.run.unit_N)
        figures = estimates(chosen_figures(LOSS, KNOWN), totals_of(self.objective), 1, self.run.unit_N, NOMINAL)
        found |= {("objective", name): (each.low, each.high) for name, each in figures.items()}
        return {
            key: ends if isinstance(ends, tuple) and ends[0] is not None else None for key, ends in found.items()
        }, named

    def _without(self, name):
        """Return the [P] values of a number, each without one part of the groups."""
        part_N = parts_of(self.run.unit_N)
        return np.array(
            [
                FROM_SUMS[name]({key: values[part_N != part].sum() for key, values in self.columns.values.items()})
                for part in range(part_N.max() + 1)
            ]
        )


def scatter(draw, cell):
    """Draw a first-order autoregressive series with variance 1."""
    noise = draw.normal(size=cell.num_steps + 100)
    for place in range(1, len(noise)):
        noise[place] += cell.autocorrelation * noise[place - 1]
    return noise[100:] * np.sqrt(1 - cell.autocorrelation**2)


def _ramp(steps, first, size):
    """Return a series that is 0 before a step, then rises linearly to `size` at the last one."""
    return size * np.maximum(steps - first + 1, 0) / (steps[-1] - first + 1)


def series_intervals(draw, cell):
    """Return (low, high) and the true value by (command, name), each from its own series; None instead of (low, high)
    if no change was found."""
    n = cell.num_steps
    steps, first = np.arange(1, n + 1), int(draw.integers(n // 4, 3 * n // 4)) + 1
    rarely, at = EVERY * steps, EVERY * first - int(draw.integers(EVERY))  # somewhere between two evaluations
    moves = [(f"jump of {size:g} sd", steps, first, size * (steps >= first)) for size in JUMP]
    moves += [(f"ramp of {size:g} sd", steps, first, _ramp(steps, first, size)) for size in RAMP]
    moves += [
        (
            f"drop of 12 sd over {share:.0%}",
            steps,
            first,
            -12 * np.expm1(-np.maximum(steps - first + 1, 0) / (share * n)),
        )
        for share in DECAY
    ]
    rise = 10 * np.exp(-6 * steps / n)
    moves += [("jump of 8 sd after a rise", steps, first, 8 * (steps >= first) + rise)]
    moves += [(f"jump of 8 sd, every {EVERY} steps", rarely, at, 8 * (rarely >= at))]
    moves += [(f"ramp of 12 sd, every {EVERY} steps", rarely, at, _ramp(rarely, at, 12))]
    found = {}
    for name, steps_of, truth, moved in moves:
        values = 20 + scatter(draw, cell) - moved
        series = Series(name="reward", steps=steps_of, values=values, scale="linear", kind="reward")
        changes = [change for change in change_points(series) if abs(change.size_in_sd) >= LEAST_SD]
        nearest = min(changes, key=lambda change: abs(change.step - truth), default=None)
        found["dynamics", name] = (nearest.low, nearest.high) if nearest else None, truth
        fall = find_fall(Outcome(name="reward", steps=steps_of, values=values, is_evaluation=False))
        # A drop may be reported to begin at the last step before it or at the first step of it.
        found["attribute", name] = None if fall is None else (fall.interval[0], fall.interval[1] + 1), truth
    k3 = np.exp(-8 + GROWTH * steps + 0.3 * scatter(draw, cell))
    for each in growths(Series(name="k3", steps=steps, values=k3, scale="log", kind="mismatch")):
        found["dynamics", f"slope of ln k3, {each.part}"] = (each.low, each.high), GROWTH
    return found


def measure_series(cell, num_runs, seed):
    """Return the Count of each (command, name) for a cell of series."""
    found = defaultdict(Count)
    for number in range(num_runs):
        for key, (ends, truth) in series_intervals(np.random.default_rng([seed, number]), cell).items():
            count = found[key]
            if ends is None:
                count.none += 1
            elif ends[0] <= truth <= ends[1]:
                count.held += 1
            else:
                count.missed += 1
    return found


@dataclass(kw_only=True)
class Count:
    """Outcomes of one number's intervals in a cell."""

    held: int = 0
    missed: int = 0
    none: int = 0
    named: int = 0
    """Number of intervals that miss the true value but end at the run's largest value, as the output says."""

    @property
    def coverage(self):
        return self.held / (self.held + self.missed)

    @property
    def is_printed(self):
        """Return True if more than a tenth of the runs have an interval; with fewer, coverage is too noisy."""
        return self.held + self.missed > (self.none + self.named) / 9


def measure(cell, truth, num_runs, seed):
    """Return the Count of each (command, name) for a cell."""
    found = defaultdict(Count)
    for number in range(num_runs):
        run = draw_run(np.random.default_rng([seed, number]), cell)
        intervals, named = Numbers(run).intervals()
        for key, ends in intervals.items():
            count = found[key]
            if ends is None:
                count.none += 1
            elif ends[0] <= truth[key] <= ends[1]:
                count.held += 1
            elif key in named and truth[key] > ends[1]:
                count.named += 1
            else:
                count.missed += 1
    return found


def cells(sizes, tails):
    """Yield every cell for the given sizes; groups of one sequence have no correlation."""
    for num_sequences, group_size in sizes:
        for correlation in CORRELATIONS if group_size > 1 else (0.0,):
            yield Cell(num_sequences=num_sequences, group_size=group_size, correlation=correlation, tails=tails)


def promised(key):
    """Return the required coverage: 90%, or the level printed beside the number for runs that few tokens dominate."""
    command, name = key
    if command == "gate, framework":
        return min(TAILS.values())
    if command == "gate":
        return min(TAILS.get(name, WANTED), WANTED)
    return FIGURES[name].in_tails or WANTED if command == "objective" else WANTED


def falls_short(count, share):
    """Return True if coverage this low has a probability below 1 in 20, given the required share."""
    printed = count.held + count.missed
    return count.coverage < share - 1.64 * np.sqrt(share * (1 - share) / printed)


def report(counts):
    """Print one line per number with its lowest coverage for each kind of tails; return the cells that fall short."""
    short = []
    print(f"{'':38}{'normal tails':^36}{'heavy tails':^36}{'sizes that differ':^36}")
    print(f"{'interval':38}" + f"{'lowest':>8}{'mean':>7}{'none':>7}  {'in':12}" * len(SPREAD))
    keys = list(dict.fromkeys(key for found in counts.values() for key in found))
    for key in sorted(keys, key=lambda key: (key[0], keys.index(key))):
        line = f"{', '.join(key):38}"
        for tails in SPREAD:
            found = {cell: count[key] for cell, count in counts.items() if cell.tails == tails}
            known = {cell: count.coverage for cell, count in found.items() if count.is_printed}
            if not known:
                line += f"{'-':>8}{'-':>7}{'100%':>7}  {'':12}"
                continue
            worst = min(known, key=known.get)
            total = sum(count.held + count.missed + count.none + count.named for count in found.values())
            none = sum(count.none for count in found.values()) / total
            where = f"{worst.num_sequences}/{worst.group_size} {worst.correlation:g}"
            line += f"{known[worst]:>8.1%}{np.mean(list(known.values())):>7.1%}{none:>7.1%}  {where:12}"
            share = WANTED if tails == "normal" else promised(key)
            short += [(key, cell, known[cell], share) for cell in known if falls_short(found[cell], share)]
        print(line, flush=True)
    return short


def report_series(counts):
    """Print one line per number for the series; return the cells that fall short."""
    short = []
    print(f"\n{'interval of a series':38}{'lowest':>8}{'mean':>7}{'none':>7}  in")
    for key in sorted({key for found in counts.values() for key in found}):
        found = {cell: count[key] for cell, count in counts.items() if key in count}
        known = {
            cell: count.coverage for cell, count in found.items() if count.held + count.missed and count.is_printed
        }
        none = sum(count.none for count in found.values()) / sum(c.held + c.missed + c.none for c in found.values())
        if not known:
            print(f"{', '.join(key):38}{'-':>8}{'-':>7}{none:>7.1%}")
            continue
        worst = min(known, key=known.get)
        where = f"{worst.num_steps} steps, {worst.autocorrelation:g}"
        print(f"{', '.join(key):38}{known[worst]:>8.1%}{np.mean(list(known.values())):>7.1%}{none:>7.1%}  {where}")
        short += [(key, cell, known[cell], WANTED) for cell in known if falls_short(found[cell], WANTED)]
    return short


def measure_groups(quick, num_runs, start):
    """Return Counts by cell and (command, name). The seed is 0 for normal tails, 1 for heavy ones and 3 for sizes that
    differ, combined with the run's number."""
    counts = {}
    for seed, tails in zip((0, 1, 3), SPREAD, strict=True):
        alone = Cell(num_sequences=TRUTH_SEQUENCES, group_size=1, correlation=0.0, tails=tails)
        truth = Numbers(draw_run(np.random.default_rng(seed), alone)).values()
        for cell in cells(QUICK_SIZES if quick else SIZES, tails):
            counts[cell] = measure(cell, truth, num_runs, seed)
            print(f"{tails} tails, {cell.name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return counts


def measure_all_series(quick, num_runs, start):
    """Return Counts by cell and (command, name). The seed is 2, combined with the run's number."""
    counts = {}
    for num_steps in QUICK_STEPS if quick else STEPS:
        for autocorrelation in AUTOCORRELATIONS:
            cell = SeriesCell(num_steps=num_steps, autocorrelation=autocorrelation)
            counts[cell] = measure_series(cell, num_runs, 2)
            print(f"{cell.name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cells, fewer runs")
    parser.add_argument("--runs", type=int, metavar="N", help=f"runs per cell (default: {RUNS})")
    parser.add_argument(
        "--only", choices=("groups", "series"), help="measure only intervals over groups, or only those of series"
    )
    parser.add_argument("--json", metavar="FILE", help="write every cell's counts")
    options = parser.parse_args()
    num_runs = options.runs or (QUICK_RUNS if options.quick else RUNS)
    start, short = time.perf_counter(), []
    counts = {} if options.only == "series" else measure_groups(options.quick, num_runs, start)
    if counts:
        short += report(counts)
        print(
            f"\n{num_runs} runs per cell; no interval below {MIN_GROUPS} groups; the jackknife is over {PARTS} parts."
        )
        print(f"largest values ({', '.join(LARGEST)}) have an interval that ends at the value, as the output says.")
    of_series = {} if options.only == "groups" else measure_all_series(options.quick, num_runs, start)
    if of_series:
        short += report_series(of_series)
    if options.json:
        rows = [
            {"command": key[0], "name": key[1], "sequences": cell.num_sequences, "group_size": cell.group_size,
             "correlation": cell.correlation, "tails": cell.tails, **vars(count)}
            for cell, found in counts.items() for key, count in found.items()
        ]  # fmt: skip
        rows += [
            {"command": key[0], "name": key[1], **vars(cell), **vars(count)}
            for cell, found in of_series.items() for key, count in found.items()
        ]  # fmt: skip
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)
    for key, cell, coverage, share in short:
        tails = f" with {cell.tails} tails" if isinstance(cell, Cell) else ""
        print(f"{', '.join(key)}: {coverage:.1%}{tails}, {cell.name}; wanted: {share:.0%}")
    sys.exit(bool(short))


if __name__ == "__main__":
    main()
