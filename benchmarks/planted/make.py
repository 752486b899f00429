"""Generate traces with planted faults, and healthy ones.

python benchmarks/planted/make.py --split tuning -o runs/planted/tuning     # about ten minutes on one core
python benchmarks/planted/score.py runs/planted/tuning

Each trace is a folder with `trace` and `label.json`. The tiny models are stored in `--models` and trained if they are
missing, which takes a few minutes per split.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from faults import heads, healthy, records, routers, sequences, tokens, weights
from faults.fault import Fault
from heads import Sampling
from scenarios import NUMERICS, Scenario
from simulation import simulate
from splits import SPLITS, Split
from tiny_models import TinyModel
from training import load
from writing import Recording, chosen_recording, write

FAULTS: dict[str, Callable[[Any, int, random.Random], Fault]] = {
    planter.__name__: planter
    for planter in (
        heads.temperature, heads.truncation, records.shift, records.row_pairing, tokens.mask, records.placeholders,
        tokens.retokenised, heads.log_base, heads.padded_vocabulary, tokens.lengths, records.copies,
        weights.stale_weights, weights.partial_sync, sequences.change_inside_sequence, sequences.position_onset,
        weights.subset, weights.adapter, weights.quantised, heads.low_precision_head, routers.router_flips,
        healthy.rounding, healthy.equal,
    )
}  # fmt: skip
"""By code, the function that plants a fault, from (scenario, trace index, random draws); it may adapt the scenario."""

HEALTHY = ("rounding", "equal")

HEALTHY_A_FAULT = 4
"""Number of healthy traces per trace of one fault: false alarms are rare, so counting them takes many."""

_LEAST_MERGED = 100
"""Smallest vocabulary with which a text has more than one tokenisation."""

_ON_MIXTURES_TOO = ("stale_weights", "temperature", "truncation", "partial_sync", "change_inside_sequence", "equal")

_KEEP_ONE_UPDATE_A_STEP = ("stale_weights", "partial_sync", "change_inside_sequence", "subset", "adapter")

_ATTEMPTS = 5
_ATTEMPT = 1000
"""Added to the seed for another attempt."""

_MOST_TOKENS = 30_000
_MOST_SAMPLING_STEPS = 700
_NUMERICS_WEIGHTS = (3, 4, 2, 3, 1, 1, 1, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", choices=SPLITS, default="tuning")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for the traces")
    parser.add_argument(
        "--models", type=Path, default=Path("runs/planted/models"), help="folder for the trained models"
    )
    parser.add_argument("--per-fault", type=int, default=12, help="traces of each fault")
    parser.add_argument("--only", nargs="*", choices=FAULTS, default=list(FAULTS), metavar="CODE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="replace traces that lie there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    make(SPLITS[given.split], given.output, given.models, given.per_fault, given.only, given.seed, force=given.force)


def make(
    split: Split, output: Path, models: Path, per_fault: int, codes: list[str], seed: int, *, force: bool = False
) -> int:
    """Write the traces of a split, alternating between faults, and return their number."""
    loaded = {recipe.name: load(recipe, models) for recipe in split.recipes}
    count = 0
    for index in range(per_fault * HEALTHY_A_FAULT):
        for code in codes:
            if index >= per_fault * (HEALTHY_A_FAULT if code == "rounding" else 1):
                continue
            folder = output / f"{code}-{index:03d}"
            if folder.exists() and not force:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            began = time.perf_counter()
            one(split, loaded, folder, code, index, seed)
            count += 1
            print(f"{folder.name} {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return count


def one(split: Split, loaded: dict[str, TinyModel], folder: Path, code: str, index: int, seed: int) -> None:
    """Write one trace."""
    for attempt in range(_ATTEMPTS):
        scenario, fault, recording, own = planned(split, loaded, code, index, seed + _ATTEMPT * attempt)
        steps = simulate(scenario, fault)
        # Without a fault, both sides choose the same experts; a trace in which rounding changes choices is not healthy.
        if code not in HEALTHY or not any(bool(step.disagreeing[step.tokens].any()) for step in steps):
            break
    write(folder, scenario, fault, steps, recording, split.name, own)


def planned(
    split: Split, loaded: dict[str, TinyModel], code: str, index: int, seed: int
) -> tuple[Scenario, Fault, Recording, int]:
    """Return a planned trace: its scenario, fault, recorded data and seed."""
    own = split.seed + 10_000 * seed + 100 * list(FAULTS).index(code) + index
    chance = random.Random(own)
    scenario = _scenario(split, loaded, code, index, own, chance)
    _fit(scenario)
    fault = FAULTS[code](scenario, index, chance)
    _fit_versions(scenario)
    return scenario, fault, chosen_recording(code, fault, random.Random(own + 1)), own


def _scenario(
    split: Split, loaded: dict[str, TinyModel], code: str, index: int, seed: int, chance: random.Random
) -> Scenario:
    recipes = split.mixtures if code == "router_flips" else split.dense
    if code == "retokenised":
        recipes = tuple(recipe for recipe in recipes if recipe.vocabulary >= _LEAST_MERGED)
    if (code == "rounding" and index % 8 == 7) or (code in _ON_MIXTURES_TOO and index % 6 == 5):
        recipes = split.mixtures
    model = loaded[recipes[(index + seed // 100) % len(recipes)].name]
    states = model.versions
    steps = chance.choice([1, 2, 3, 4, 4, 6, 8, 12])
    numerics = chance.choices(list(NUMERICS), _NUMERICS_WEIGHTS)[0]
    return Scenario(
        model=model, seed=seed, states=states, num_steps=steps, max_tokens=model.recipe.max_tokens,
        numerics="fp32" if model.is_mixture else numerics,
        num_groups=chance.choice([2, 4, 8]), group_size=chance.choice([4, 8, 8]),
        first_version=chance.randrange(max(1, len(states) - steps)),
        sampling=Sampling(temperature=1.0 if chance.random() < 0.65 else round(chance.uniform(0.6, 1.2), 2)),
        versions_a_step=1 if code in _KEEP_ONE_UPDATE_A_STEP else chance.choices([0, 1, 2], [1, 8, 1])[0],
        num_prompts=chance.choice([0, 0, 12]), trainer_rows=chance.choice([4, 8, 16]),
    )  # fmt: skip


def _fit(scenario: Scenario) -> None:
    """Limit a trace's tokens and sampling steps: long runs get shorter responses."""
    while scenario.num_steps * scenario.num_rows * scenario.max_tokens > 2 * _MOST_TOKENS and scenario.num_groups > 2:
        scenario.num_groups //= 2
    scenario.max_tokens = min(scenario.max_tokens, max(24, _MOST_SAMPLING_STEPS // scenario.num_steps))
    _fit_versions(scenario)


def _fit_versions(scenario: Scenario) -> None:
    scenario.num_steps = min(scenario.num_steps, len(scenario.states))
    scenario.first_version = max(0, min(scenario.first_version, len(scenario.states) - scenario.num_steps))


if __name__ == "__main__":
    main()
