"""Fit the model of `tim-trace attribute` on benchmark suites, and score it on each suite with the model fitted on the others.

python benchmarks/collapse/left_out.py facts runs/laboratories/* -o benchmarks/collapse/facts.parquet
python benchmarks/collapse/left_out.py score benchmarks/collapse/facts.parquet
python benchmarks/collapse/left_out.py fit benchmarks/collapse/facts.parquet

A suite has NAME/trace, NAME/label.json (cause, twin) and NAME/plan.json (evaluations by the true reward). A run counts
as collapsed if the last fifth of its evaluations is below 0.9 of the best fifth and its twin's is above 0.95. For a
cause `other`, the right answer is `unknown`. `facts` writes one row per fact, so that fitting needs no traces.

The model is a multinomial logistic regression. A fact's coefficient for the suspect that it supports (OWNERS) is shrunk
towards the mean of such coefficients, every other coefficient towards 0: most facts occur in only a few collapses, and
a new kind of fact counts like similar ones.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.optimize import minimize
from tim_trace.analysis.attribution import model as applied
from tim_trace.analysis.attribution.attribute import broken_steps, supposed_at
from tim_trace.analysis.attribution.attribution import SUSPECTS
from tim_trace.analysis.attribution.fact import Fact
from tim_trace.analysis.attribution.model import ALONE, BESIDE, judged, shares_prompts, table, table_beside, unexplained
from tim_trace.analysis.attribution.run_facts import Facts, read_facts
from tim_trace.analysis.views import open_database
from truth import FELL, HELD, SOUND, share_kept

CONFIDENT = 0.6
BANDS = (0.5, 0.7, 0.9, 1.01)
PAIR = ("train", "rollout")

OWNERS: dict[str, str] = {
    "mismatch": "mismatch_size mismatch_grows_before_fall mismatch_grows_with_fall exact_until check_fails.values check_fails.weights "
    "not_sampled_so engine_moves_on engine_parts.at_once engine_parts.later sampling_parts mismatch",
    "staleness": "engine_stands_still earlier_weights declared_lag declared_lag_grows check_fails.stale "
    "engine_parts.behind",
    "optimizer": "learning_rate_spike update_size update_leaps learning_rate gradient_is_equal",
    "reward": "data_fault.reward reward_starts_below rewards_noisy rewards_changed reward_and_relation_move reward_moves_alone reward_hides_fall.with rewards_part",
    "pairing": "data_fault.pairing in_other_rows relation_breaks_alone advantages_do_not_follow advantages_do_not_follow.alone logprobs_in_other_rows rewards_permuted_part "
    "rewards_of_last_step_part advantages_permuted_part",
    "data": "data_fault.data rewards_differ_by_group prompts_changed prompts_part",
    "truncation": "data_fault.truncation responses_capped stop_ignored never_ended rows_left_out endings_change responses_cut_off",
    "reference": "data_fault.reference loss_term_inverted.reference loss_term_unusual.reference loss_term_oversized.reference reference_changed returns_to_reference reference_parts gradient_grows",
    "advantages": "data_fault.advantages advantages_inverted advantages_of_other_sign advantages_changed.mean advantages_changed.burst advantages_part "
    "advantages_or_rewards_part",
    "entropy": "loss_term_inverted.entropy loss_term_unusual.entropy loss_term_oversized.entropy entropy_climbs entropy_collapses",
    "length": "data_fault.length length_pays_since length_pays.moves length_costs.moves "
    "rewards_by_length_part",
    "unknown": "entropy_impossible tool_parts scoring_parts trainer_moves_first",
}  # fmt: skip
"""Features that support each suspect."""
_OWNER_OF = {name: suspect for suspect, names in OWNERS.items() for name in names.split()}
_OF_SETTING, _OF_PAIR, _OF_RUN = range(3)
"""Kinds of features, each with its own mean coefficient: settings, other differences from a baseline run, other facts of a run."""

NEAR_MEAN, NEAR_0, SCALE, OF_INTERCEPT = 1.0, 10.0, 0.65, 2.0
"""Penalties on the squared distances of coefficients from the mean and from 0; the power of its spread by which a
feature is divided; the penalty on squared intercepts. Chosen by the log loss on left-out suites."""
LEAST_SPREAD = 0.03
UNSEEN_SPREAD = 0.1
"""Spread assumed for a feature that occurs in no collapse."""


@dataclass(frozen=True)
class Run:
    """The facts of one collapse."""

    suite: str
    name: str
    cause: str
    situation: str
    is_seen: bool
    """Whether a drop was detected."""
    facts: Mapping[int, Sequence[Fact]]
    """Facts by the step of the drop, or of a supposed drop."""


def owners(feature: str) -> tuple[str, ...]:
    """Return the suspects that a feature supports."""
    setting = re.fullmatch(r"setting(?:_changed)?\.(\w+)", feature)
    return (setting[1],) if setting else (_OWNER_OF[feature],) if feature in _OWNER_OF else ()


def collapses(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the runs of a suite that collapsed while their twins did not, with their labels, grouped by twin."""
    labels = [(path.parent, json.loads(path.read_text())) for path in sorted(folder.glob("*/label.json"))]
    for run, label in sorted(labels, key=lambda each: (each[1]["twin"], each[0].name)):
        kept, of_twin = (
            share_kept(json.loads((folder / name / "plan.json").read_text())["evaluations"])
            for name in (run.name, label["twin"])
        )
        if label["cause"] not in SOUND and kept <= FELL and of_twin >= HELD:
            yield run, label


def read_runs(folder: Path) -> Iterator[Run]:
    """Yield each collapse of a suite, alone and with its twin."""
    controls: dict[str, Facts] = {}
    for run, label in collapses(folder):
        known = (folder.name, run.name, label["cause"])
        facts = read_facts(open_database(str(run / "trace")), PAIR)
        steps = [facts.fall.step] if facts.fall else sorted(set(broken_steps(facts)))
        at = {step: table(facts if facts.fall else supposed_at(facts, step)) for step in steps}
        yield Run(*known, ALONE, facts.fall is not None, at)
        if label["twin"] not in controls:
            controls = {
                label["twin"]: read_facts(open_database(str(folder / label["twin"] / "trace")), PAIR, is_control=True)
            }
        control = controls[label["twin"]]
        facts = facts.beside(control) if shares_prompts(facts, control) else facts
        of_run = table(facts)
        found, parted = table_beside(facts, control)
        step = facts.fall.step if facts.fall else parted.step if parted else None
        if facts.fall is None and step is not None:
            supposed = supposed_at(facts, step)
            of_run = table(supposed)
            found, _ = table_beside(supposed, control)
        yield Run(*known, BESIDE, facts.fall is not None, {} if step is None else {step: (*of_run, *found)})


def write(folders: Iterable[Path], file: Path) -> None:
    """Write the facts of all collapses, one row per fact."""
    rows: dict[str, list[Any]] = defaultdict(list)
    for folder in folders:
        for run in read_runs(folder):
            for step, facts in (run.facts or {-1: ()}).items():
                for one in (None, *facts):
                    values = (
                        run.suite,
                        run.name,
                        run.cause,
                        run.situation,
                        run.is_seen,
                        step,
                        one.feature if one else "",
                        one.level if one else 0.0,
                    )
                    for column, value in zip(COLUMNS, values, strict=True):
                        rows[column].append(value)
    pq.write_table(pa.table(dict(rows)), file, compression="zstd")


COLUMNS = ("suite", "run", "cause", "situation", "is_seen", "step", "feature", "level")


def read(file: Path) -> list[Run]:
    """Read the facts of all collapses."""
    found: dict[tuple[Any, ...], dict[int, list[Fact]]] = {}
    for row in pq.read_table(file).to_pylist():
        key = tuple(row[name] for name in COLUMNS[:5])
        facts = found.setdefault(key, {})
        if row["step"] >= 0:
            facts.setdefault(row["step"], [])
        if row["feature"]:
            facts[row["step"]].append(Fact(code=row["feature"], level=row["level"]))
    return [Run(*key, facts) for key, facts in found.items()]


def fit(runs: Sequence[Run]) -> dict[str, Any]:
    """Return classes, intercepts, and each feature's coefficients by class, from runs with a drop in one situation."""
    runs = [run for run in runs if run.is_seen]
    classes = list(SUSPECTS)
    of_runs = [
        {name: one.level for facts in run.facts.values() for name, one in unexplained(facts).items()} for run in runs
    ]
    is_beside = bool(runs) and runs[0].situation == BESIDE
    names = sorted({name for levels in of_runs for name in levels} | unseen(is_beside=is_beside))
    table_NF = np.array([[levels.get(name, 0.0) for name in names] for levels in of_runs])
    spread_F = np.sqrt((table_NF**2).mean(0))
    spread_F = np.where(spread_F > 0, np.maximum(spread_F, LEAST_SPREAD), UNSEEN_SPREAD) ** SCALE
    truth_N = np.array([classes.index("unknown" if run.cause == "other" else run.cause) for run in runs])
    is_owner = np.array([[code in owners(name) for code in classes] for name in names], float)
    kinds = np.array([kind_of(name) for name in names])
    coefficients, intercepts = _least_loss(table_NF / spread_F, truth_N, is_owner, kinds)
    rows = np.round(coefficients / spread_F[:, None], 1)
    return {
        "classes": classes,
        "intercepts": np.round(intercepts, 2).tolist(),
        "coefficients": {name: row.tolist() for name, row in zip(names, rows, strict=True) if row.any()},
    }


def unseen(*, is_beside: bool) -> set[str]:
    """Return the features that support a suspect, even if they occur in no collapse."""
    settings = {
        f"{name}.{code}" for name in ("setting_changed", *(("setting",) if is_beside else ())) for code in SUSPECTS
    }
    return settings | {name for name in _OWNER_OF if is_beside or kind_of(name) != _OF_PAIR}


_OF_PAIRS = re.compile(
    r".*_(part|parts)(\..*)?|learning_rate|mismatch(\.later)?|gradient_(grows|is_equal)|update_or_loss|"
    r"responses_cut_off"
)


def kind_of(feature: str) -> int:
    """Return the kind of a feature."""
    if "setting" in feature:
        return _OF_SETTING
    return _OF_PAIR if _OF_PAIRS.fullmatch(feature) else _OF_RUN


def _least_loss(
    table_NF: np.ndarray, truth_N: np.ndarray, is_owner: np.ndarray, kinds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return coefficients [F, C] and intercepts [C] that minimise the penalised log loss."""
    (n, num), classes = table_NF.shape, is_owner.shape[1]
    weight = np.where(is_owner > 0, NEAR_MEAN, NEAR_0)

    def loss(given: np.ndarray) -> tuple[float, np.ndarray]:
        part, begins, means = np.split(given, [num * classes, num * classes + classes])
        part = part.reshape(num, classes)
        logits = table_NF @ part + begins
        odds = np.exp(logits - logits.max(1, keepdims=True))
        odds /= odds.sum(1, keepdims=True)
        apart = part - is_owner * means[kinds][:, None]
        total = -np.log(np.maximum(odds[np.arange(n), truth_N], 1e-12)).sum()
        total += (weight * apart**2).sum() / 2 + OF_INTERCEPT * (begins**2).sum() / 2
        odds[np.arange(n), truth_N] -= 1
        of_means = [-(weight * apart * is_owner)[kinds == kind].sum() for kind in range(len(means))]
        slope = table_NF.T @ odds + weight * apart
        return total, np.r_[slope.ravel(), odds.sum(0) + OF_INTERCEPT * begins, of_means]

    found = minimize(
        loss, np.zeros(num * classes + classes + 3), jac=True, method="L-BFGS-B", options={"maxiter": 500}
    ).x
    return found[: num * classes].reshape(num, classes), found[num * classes :][:classes]


def answer(run: Run, model: dict[str, Any]) -> tuple[str, float, str]:
    """Return the first suspect, its probability, and the first named suspect; `none` if nothing is known."""
    best = ("none", 0.0, "none")
    for facts in run.facts.values():
        suspects = judged(facts, run.situation, model)
        first = suspects[0]
        if not run.is_seen and first.code == "unknown":
            continue
        if first.probability > best[1]:
            named = next(suspect for suspect in suspects if suspect.code != "unknown")
            best = (first.code, first.probability, named.code if named.probability >= 0.05 else "none")
    return best


def score(runs: Sequence[Run]) -> None:
    """Print how often the model is right on each suite when fitted on the others."""
    for situation in (ALONE, BESIDE):
        of_situation = [run for run in runs if run.situation == situation]
        total: Counter[str] = Counter()
        named: list[tuple[bool, float]] = []
        for suite in sorted({run.suite for run in of_situation}):
            model = fit([run for run in of_situation if run.suite != suite])
            count: Counter[str] = Counter()
            for run in (run for run in of_situation if run.suite == suite):
                first, probability, suspect = answer(run, model)
                is_named = first not in ("none", "unknown") and probability > BANDS[0]
                if is_named:
                    named.append((first == run.cause, probability))
                if run.cause == "other":
                    count.update(others=1, confident=is_named and probability >= CONFIDENT)
                    continue
                count.update(
                    causes=1, right=is_named and first == run.cause, first=suspect == run.cause, unseen=not run.is_seen
                )
                count.update(first_unseen=not run.is_seen and suspect == run.cause)
                if suspect != run.cause:
                    print(f"    {run.name}: {run.cause}, first {suspect} ({first} {probability:.0%})")
            _print(f"{situation} {suite}", count)
            total += count
        _print(f"{situation}, all", total)
        for low, high in pairwise(BANDS):
            band = [(is_right, p) for is_right, p in named if low <= p < high]
            mean = np.mean([p for _, p in band]) if band else 0.0
            print(
                f"  {low:.0%} to {min(high, 1):.0%} (mean {mean:.0%}): {sum(right for right, _ in band)} of {len(band)} right"
            )


def _print(title: str, count: Counter[str]) -> None:
    print(
        f"{title}: cause {count['right']} of {count['causes']}, top suspect {count['first']} ({count['first_unseen']} of {count['unseen']} "
        f"without a drop), other causes with a confident wrong name {count['confident']} of {count['others']}"
    )


def main() -> None:
    """Write the facts of suites, score the model on them, or fit it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("facts", "score", "fit"))
    parser.add_argument("path", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, default=Path(applied.__file__).parent / "model.json")
    given = parser.parse_args()
    if given.do == "facts":
        write(given.path, given.output)
    elif given.do == "score":
        score(read(given.path[0]))
    else:
        runs = read(given.path[0])
        models = {name: fit([run for run in runs if run.situation == name]) for name in (ALONE, BESIDE)}
        given.output.write_text(
            json.dumps(models, separators=(",", ":")).replace(".0,", ",").replace("-0,", "0,").replace('],"', '],\n"')
            + "\n"
        )


if __name__ == "__main__":
    main()
