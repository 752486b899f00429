"""Make recorded traces of healthy runs and of runs with one known fault, for a blind test of `tim-trace check`.

    python benchmarks/planted/blind_faults.py -o FOLDER [--seed N] [--healthy N] [--only NAME ...]

A small language model is computed twice: an engine samples with it and keeps the logprobs of what it drew, and a
trainer scores the same tokens. The model is recurrent (state, layer, head), so that a value belongs to a token in its
context, and the same context gives the same value again. Each side rounds as its dtype does: states, logits or logprobs
are kept with the dtype's bits after a relative error of a few units in the last place. In a healthy trace that is the
whole difference. A fault is made by doing what the fault is: other weights on one path, logits divided by another
temperature, columns that are moved by a token. Nothing here is made by adding noise of a size, except the errors of the
numerics themselves.

Each trace is a folder NAME/trace with NAME/label.json beside it:

| field | meaning |
|---|---|
| fault | a code of docs/reference/check.md; `none` of healthy traces; `other` where no code names it |
| also | other codes that are as right |
| of_weights | whether one path held other weights: stale, partly synchronised, quantised, without its adapter |
| detectable | whether the two columns, tokens, positions, steps and contracts suffice to tell it from a healthy run |
| detail | what was done, and how large the difference became by it |
| kind | the population of healthy traces, or the variant of the fault |

Of numerical faults, `detectable` compares the root mean square of d = trainer - engine with that of the same run
without the fault, on the same tokens: 2 times as large for weights and precision, 1.3 times for faults with one
parameter (temperature, kept mass), 3 times in the part that is hit for faults of a part; and a number of tokens that
move by more than 3 times the usual d. Where a side is in 16 bits, or no contract says that none is, faults of weights
need 1500 tokens besides, or a d above 0.08: less may be rounding. Misplaced values need a few tokens that are far off.
A lost value is always detectable.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tim_trace import Recorder, import_parquet

Array = np.ndarray
Weights = dict[str, Array]

CUT = np.float32(-1e30)
BITS = {"float32": 24, "tf32": 11, "float16": 11, "bfloat16": 8, "float8": 4}
TORCH_NAME = {"float32": "float32", "tf32": "float32", "float16": "float16", "bfloat16": "bfloat16"}
EXPERT_WEIGHT = np.float32(0.3)  # what the router multiplies the expert's output with


# ---------------------------------------------------------------------------------------------------------- numerics


@dataclass(frozen=True)
class Numerics:
    """How one side rounds."""

    dtype: str = "float32"
    units: float = 1.0  # size of the relative error before rounding, in units in the last place
    logit_bits: int = 24
    logprob_bits: int = 24
    logit_error: float = 0.0  # error of a logit, relative to how far it lies below the largest
    growth: float = 0.0  # by how much the error grows to the end of the response, as a multiple
    tail: float = 0.0  # degrees of freedom of Student's t, by which a context's errors are scaled; 0: none
    router_error: float = 0.0  # relative error of the router's logits
    cast_weights: bool = False  # weights of float32 rounded to the dtype when they are loaded
    log_softmax_bits: int = 24


def rounded(values: Array, bits: int) -> Array:
    """Round float32 values to a number of significant bits, to nearest even."""
    values = np.ascontiguousarray(values, np.float32)
    if bits >= 24:
        return values
    drop = np.uint32(24 - bits)
    raw = values.view(np.uint32)
    half = np.uint32((1 << (int(drop) - 1)) - 1) + ((raw >> drop) & np.uint32(1))
    return (((raw + half) >> drop) << drop).view(np.float32)


def quantised(weight: Array, how: str) -> Array:
    """Round a weight as a quantised checkpoint holds it: int8 and int4 by columns, float8 by element."""
    if how == "float8":
        return rounded(weight, BITS["float8"])
    levels = {"int8": 127, "int4": 7}[how]
    scale = np.abs(weight).max(axis=-2, keepdims=True) / levels + 1e-12
    return np.asarray(np.round(weight / scale) * scale, np.float32)


# ------------------------------------------------------------------------------------------------------- populations


@dataclass(frozen=True)
class Population:
    """Everything that decides a run before a fault is planted."""

    vocabulary: int = 1000
    active: int = 500  # tokens that the model gives mass; the others of the vocabulary are never drawn
    width: int = 24
    steps: int = 8
    groups: int = 4
    group_size: int = 4
    shortest: int = 8
    longest: int = 40
    prompt_length: int = 5
    spread: float = 3.5  # standard deviation of the logits
    sharpening: float = 0.0  # growth of the logits over the run
    move: float = 0.05  # change of the logits by one update, rms
    softcap: float = 0.0
    experts: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    engine: Numerics = field(default_factory=Numerics)
    trainer: Numerics = field(default_factory=Numerics)
    contracts: str = "full"  # full, plain or none
    entropies: str = "train"  # train, both or none
    prompts_again: bool = False  # the same prompts at every step
    with_prompts: bool = True
    with_settings: bool = True
    with_versions: bool = True
    with_groups: bool = True
    tools: str = "none"  # tokens of a tool in the response: "null" has no logprobs of them, "scored" has
    declared_lag: int = 0  # updates between sampling and training, of sides that both hold the sampling weights
    mixed_versions: bool = False  # a part of each step was sampled by the version before
    exact: bool = False
    both_quantised: str = ""
    adapter: bool = False
    imported: bool = False


@dataclass(frozen=True)
class Between:
    """A setting of a population that is drawn from a log-uniform distribution."""

    low: float
    high: float


def pick(draw: np.random.Generator, *choices: Any) -> Any:
    """Draw one of some values."""
    return choices[int(draw.integers(len(choices)))]


def between(draw: np.random.Generator, low: float, high: float) -> float:
    """Draw from a log-uniform distribution."""
    return float(np.exp(draw.uniform(np.log(low), np.log(high))))


def numerics(draw: np.random.Generator, dtype: str, **changes: Any) -> Numerics:
    """Draw the numerics of a side that computes in a dtype."""
    units = between(draw, 1.0, 30.0) if dtype == "float32" else between(draw, 0.3, 1.2)
    logit_bits = BITS["bfloat16"] if dtype == "bfloat16" and draw.random() < 0.35 else 24
    return replace(Numerics(dtype=dtype, units=units, logit_bits=logit_bits), **changes)


def usual(draw: np.random.Generator, **changes: Any) -> Population:
    """Draw a usual population: shape, dtypes and what is recorded of it."""
    sides = pick(
        draw,
        ("float32", "float32"),
        ("float32", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("float32", "tf32"),
        ("bfloat16", "float16"),
        ("float32", "bfloat16"),
    )
    active = int(pick(draw, 61, 128, 300, 500, 700))
    longest = int(draw.integers(16, 90))
    made = Population(
        vocabulary=active if active < 200 else int(pick(draw, active, 32000, 50257, 151936)),
        active=active,
        width=int(pick(draw, 16, 24, 32)),
        steps=int(draw.integers(4, 16)),
        groups=int(draw.integers(2, 6)),
        group_size=int(pick(draw, 2, 4, 8)),
        shortest=max(4, longest // int(draw.integers(2, 6))),
        longest=longest,
        prompt_length=int(draw.integers(2, 9)),
        spread=between(draw, 2.0, 7.0),
        move=between(draw, 0.005, 0.15),
        trainer=numerics(draw, sides[0]),
        engine=numerics(draw, sides[1]),
        contracts=pick(draw, "full", "full", "plain", "none"),
        entropies=pick(draw, "train", "train", "both", "none"),
        temperature=float(pick(draw, 1.0, 1.0, 1.0, 0.7, 0.9)),
        prompts_again=bool(draw.random() < 0.3),
        with_prompts=bool(draw.random() < 0.85),
        with_settings=bool(draw.random() < 0.8),
        with_versions=bool(draw.random() < 0.7),
    )
    made = replace(made, **changes)
    made = replace(made, vocabulary=max(made.vocabulary, made.active))
    tokens = made.steps * made.groups * made.group_size * (made.shortest + made.longest) / 2
    shrink = max(1.0, tokens * made.active / 2.5e6)
    if shrink > 1 and "groups" not in changes:
        made = replace(made, groups=max(2, int(made.groups / shrink)))
    return made


# -------------------------------------------------------------------------------------------------------------- model


class LanguageModel:
    """A small language model and the versions that training makes of it."""

    def __init__(self, population: Population, draw: np.random.Generator) -> None:
        self.population = population
        width, active = population.width, population.active
        self.token_ids = np.sort(draw.choice(population.vocabulary, active, replace=False)).astype(np.int64)
        self.embedding = draw.normal(0, 1.0, (active, width)).astype(np.float32)
        popularity = -0.5 * np.log1p(draw.permutation(active))
        first = {
            "recurrence": draw.normal(0, 0.8 / np.sqrt(width), (width, width)),
            "up": draw.normal(0, 1 / np.sqrt(width), (width, width)),
            "down": draw.normal(0, 1 / np.sqrt(width), (width, width)),
            "head": draw.normal(0, population.spread / np.sqrt(0.75 * width), (width, active)),
            "bias": popularity * min(1.0, population.spread / 3),
        }
        self.base = {name: weight.astype(np.float32) for name, weight in first.items()}
        if population.adapter:
            size = between(draw, 0.05, 0.5)
            first = {name: weight + self.low_rank(draw, name, size) for name, weight in first.items()}
        self.versions: Weights = {name: self.course(draw, name, weight) for name, weight in first.items()}
        if population.experts:
            shape = (population.experts, width, width)
            self.router = draw.normal(0, 1 / np.sqrt(width), (width, population.experts)).astype(np.float32)
            self.experts_up = draw.normal(0, 1 / np.sqrt(width), shape).astype(np.float32)
            self.experts_down = draw.normal(0, 1 / np.sqrt(width), shape).astype(np.float32)

    def low_rank(self, draw: np.random.Generator, name: str, size: float) -> Array:
        """Draw an adapter's part of a weight, which changes the logits by about `size`; the bias has none."""
        shape = self.base[name].shape
        if name in ("bias", "head"):
            return np.zeros(shape)
        rank = 4
        left, right = draw.normal(size=(shape[0], rank)), draw.normal(size=(rank, shape[1]))
        return np.asarray(left @ right * size / self.population.spread / np.sqrt(rank * shape[0]))

    def course(self, draw: np.random.Generator, name: str, first: Array) -> Array:
        """Make the versions of a weight: updates of low rank that keep some of their direction."""
        updates = self.population.steps
        relative = self.population.move / self.population.spread
        scale = first.std() * relative
        made = np.empty((updates + 1, *first.shape), np.float32)
        current, direction = first.astype(np.float64), np.zeros(first.shape)
        for version in range(updates + 1):
            grown = 1 + self.population.sharpening * version / updates if name in ("head", "bias") else 1.0
            made[version] = current * grown
            if first.ndim == 2:
                fresh = draw.normal(size=(first.shape[0], 2)) @ draw.normal(size=(2, first.shape[1])) / np.sqrt(2)
            else:
                fresh = draw.normal(size=first.shape)
            direction = 0.7 * direction + 0.7 * fresh
            if not (self.population.adapter and name in ("bias", "head")):
                current = current + scale * direction
        return made

    def at(self, versions: Array) -> Weights:
        """Give the weights of one version a step."""
        return {name: weight[versions] for name, weight in self.versions.items()}


@dataclass(frozen=True)
class Route:
    """One side's way from tokens to logprobs."""

    weights: Weights
    numerics: Numerics
    temperature: float | Array = 1.0
    top_p: float | Array = 1.0
    top_k: int = 0
    min_p: float = 0.0
    padding: int = 0  # columns of logit 0 in the softmax
    other: Weights | None = None  # weights where `where` is true: [S, B, prompt and response]
    where: Array | None = None
    no_softcap: bool = False
    raw_logits: bool = False  # the token's logit in place of its logprob
    onset_bits: int = 24  # significant bits of the state from `onset` on
    onset: int = 1 << 30


class Forward:
    """One pass over all sequences of a run, [S steps, B sequences], token after token."""

    def __init__(self, model: LanguageModel, path: Route, seed: int) -> None:
        self.model = model
        self.path = path
        self.draw = np.random.default_rng(seed)
        self.bits = BITS[path.numerics.dtype]
        self.weights = self.loaded(path.weights)
        self.other = self.loaded(path.other) if path.other is not None else None

    def loaded(self, weights: Weights) -> Weights:
        """Cast weights as the side does when it loads them."""
        if not self.path.numerics.cast_weights:
            return weights
        return {name: rounded(weight, self.bits) for name, weight in weights.items()}

    def kept(self, values: Array, size: Array | float) -> Array:
        """Give what a kernel returns for exact values: with its error, rounded to the dtype."""
        scale = size * self.path.numerics.units * 2.0**-self.bits
        error = self.draw.standard_normal(values.shape, np.float32) * scale
        return rounded(values * (1 + error.astype(np.float32)), self.bits)

    def next_state(self, state: Array, token: Array, weights: Weights, size: Array | float) -> Array:
        """Advance the state by one token."""
        return self.kept(np.tanh(state @ weights["recurrence"] + self.model.embedding[token]), size)

    def logits(self, state: Array, weights: Weights, size: Array | float) -> Array:
        """Project the state to logits, before temperature."""
        population = self.model.population
        layer = self.mixture(state) if population.experts else np.maximum(state @ weights["up"], 0) @ weights["down"]
        made = self.kept(state + layer, size) @ weights["head"] + weights["bias"][:, None, :]
        if population.softcap and not self.path.no_softcap:
            made = population.softcap * np.tanh(made / population.softcap)
        if self.path.numerics.logit_error:
            depth = made.max(axis=-1, keepdims=True) - made
            made = made + self.path.numerics.logit_error * depth * self.draw.standard_normal(made.shape, np.float32)
        return rounded(made, self.path.numerics.logit_bits)

    def mixture(self, state: Array) -> Array:
        """Give the output of the expert that the router chooses, times its weight."""
        model = self.model
        scores = state @ model.router
        relative = self.path.numerics.router_error
        if relative:
            scores = scores + relative * self.draw.standard_normal(scores.shape, np.float32)
        chosen = scores.argmax(axis=-1)[..., None, None]
        hidden = np.maximum(np.einsum("sbd,edf->sbef", state, model.experts_up, optimize=True), 0)
        outputs = np.einsum("sbef,efd->sbed", hidden, model.experts_down, optimize=True)
        return EXPERT_WEIGHT * np.take_along_axis(outputs, chosen, axis=2)[:, :, 0]

    def truncated(self, logits: Array) -> Array:
        """Cut what top-k, top-p and min-p do not keep."""
        path = self.path
        if path.top_k:
            floor = -np.partition(-logits, path.top_k - 1, axis=-1)[..., path.top_k - 1 : path.top_k]
            logits = np.where(logits < floor, CUT, logits)
        if np.any(np.asarray(path.top_p) < 1):
            order = np.argsort(-logits, axis=-1)
            ranked = np.take_along_axis(logits, order, axis=-1)
            mass = np.exp(ranked - ranked[..., :1])
            mass /= mass.sum(axis=-1, keepdims=True)
            before = np.cumsum(mass, axis=-1) - mass
            cut = np.zeros(logits.shape, bool)
            np.put_along_axis(cut, order, before >= np.asarray(path.top_p), axis=-1)
            logits = np.where(cut, CUT, logits)
        if path.min_p:
            floor = logits.max(axis=-1, keepdims=True) + np.log(path.min_p)
            logits = np.where(logits < floor, CUT, logits)
        return logits

    def __call__(
        self,
        prompts: Array,
        length: int,
        tokens: Array | None = None,
        keep: Array | None = None,
        forced: Array | None = None,
    ) -> dict[str, Array]:
        """Score `tokens`, or draw them where none are given; `forced` tokens, -1 elsewhere, are taken as they are.

        `keep` is the set of tokens that the other side could draw, which this side takes over.
        """
        path, numeric = self.path, self.path.numerics
        steps, rows, prompt_length = prompts.shape
        state = np.zeros((steps, rows, self.model.population.width), np.float32)
        drawn = np.zeros((steps, rows, length), np.int64)
        logprobs = np.empty((steps, rows, length), np.float32)
        entropies = np.empty((steps, rows, length), np.float32)
        best = np.empty((steps, rows, length), np.float32)
        kept_sets = []
        cuts = bool(path.top_k or path.min_p or np.any(np.asarray(path.top_p) < 1))
        for place in range(prompt_length + length - 1):
            token = prompts[:, :, place] if place < prompt_length else drawn[:, :, place - prompt_length]
            response_place = place - prompt_length + 1
            size: Array | float = 1 + numeric.growth * max(0, response_place) / length
            if numeric.tail:
                size = size * np.sqrt(numeric.tail / self.draw.chisquare(numeric.tail, (steps, rows, 1)))
            old_state = state
            state = self.next_state(old_state, token, self.weights, size)
            if self.other is not None and path.where is not None:
                mask = path.where[:, :, place, None]
                state = np.where(mask, self.next_state(old_state, token, self.other, size), state)
            if response_place >= path.onset:
                state = rounded(state, path.onset_bits)
            if response_place < 0:
                continue
            logits = self.logits(state, self.weights, size)
            if self.other is not None and path.where is not None:
                logits = np.where(mask, self.logits(state, self.other, size), logits)
            raw = logits
            logits = logits / np.asarray(path.temperature, np.float32)
            logits = self.truncated(logits) if cuts else logits
            if keep is not None:
                logits = np.where(keep[response_place], logits, CUT)
            if cuts:
                kept_sets.append(logits > CUT)
            largest = logits.max(axis=-1, keepdims=True)
            mass = np.exp(logits - largest)
            total = mass.sum(axis=-1, keepdims=True)
            if tokens is not None:
                chosen = tokens[:, :, response_place]
            else:
                threshold = self.draw.random((steps, rows, 1), np.float32) * total
                chosen = np.minimum((np.cumsum(mass, axis=-1) <= threshold).sum(axis=-1), logits.shape[-1] - 1)
                if forced is not None:
                    chosen = np.where(forced[:, :, response_place] >= 0, forced[:, :, response_place], chosen)
            if path.padding:
                total = total + path.padding * np.exp(-largest)
            below = rounded(logits - largest, numeric.log_softmax_bits)
            log_total = rounded(np.log(total), numeric.log_softmax_bits)[..., 0]
            taken = np.take_along_axis(below, chosen[..., None], axis=-1)[..., 0] - log_total
            entropies[:, :, response_place] = log_total - (mass * np.maximum(below, -1e4)).sum(axis=-1) / total[..., 0]
            best[:, :, response_place] = -log_total
            if path.raw_logits:
                taken = np.take_along_axis(raw, chosen[..., None], axis=-1)[..., 0]
            drawn[:, :, response_place] = chosen
            logprobs[:, :, response_place] = np.where(taken < -1e20, -np.inf, taken)
        logprobs = rounded(logprobs, numeric.logprob_bits)
        if not path.raw_logits:
            logprobs = np.minimum(logprobs, np.float32(0))
        return {
            "tokens": drawn,
            "logprobs": logprobs,
            "entropies": entropies,
            "best": np.minimum(best, np.float32(0)),
            "keep": np.stack(kept_sets) if kept_sets else np.empty(0),
        }


# --------------------------------------------------------------------------------------------------------------- runs


@dataclass
class Label:
    """What is true of a trace."""

    fault: str
    detail: str
    detectable: bool = True
    also: tuple[str, ...] = ()
    of_weights: bool = False


class Case:
    """A run in the making: first two paths, then two columns, then a trace."""

    def __init__(self, population: Population, seed: int) -> None:
        self.population = population
        self.draw = np.random.default_rng(seed)
        self.seed = seed
        self.model = LanguageModel(population, self.draw)
        steps = population.steps
        rows = population.groups * population.group_size
        self.shape = (steps, rows, population.longest)
        self.prompts = self.make_prompts()
        self.lengths = self.draw.integers(population.shortest, population.longest + 1, (steps, rows))
        self.versions = np.maximum(np.arange(steps) - population.declared_lag, 0)
        self.sampled_versions = np.repeat(self.versions[:, None], rows, axis=1)
        self.scored_versions: Array | None = None
        self.forced = self.make_tool_tokens()
        self.counts = np.ones(self.shape, bool) if self.forced is None else self.forced < 0
        self.engine = self.path(population.engine)
        self.trainer = self.path(population.trainer)
        if population.mixed_versions:
            older = self.draw.random((steps, rows)) < 0.4
            older[0] = False
            self.sampled_versions = self.sampled_versions - older
            places = population.prompt_length + population.longest
            where = np.repeat(older[:, :, None], places, axis=2)
            previous = self.model.at(np.maximum(self.versions - 1, 0))
            self.engine = replace(self.engine, other=previous, where=where)
            self.trainer = replace(self.trainer, other=previous, where=where)
        self.true_engine, self.true_trainer = self.engine, self.trainer
        self.contract_changes: dict[str, dict[str, Any]] = {"rollout": {}, "train": {}}
        self.row_contracts: Array | None = None
        self.null: dict[str, Array] = {}

    def make_prompts(self) -> Array:
        """Draw the prompts, one a group, as indices of tokens."""
        population = self.population
        frequency = 1 / np.arange(1, population.active + 1)
        shape = (1 if population.prompts_again else population.steps, population.groups, population.prompt_length)
        made = self.draw.choice(population.active, shape, p=frequency / frequency.sum())
        made = np.repeat(made, population.group_size, axis=1)
        return np.repeat(made, population.steps, axis=0) if population.prompts_again else made

    def make_tool_tokens(self) -> Array | None:
        """Draw the stretches of each response that a tool wrote; -1 elsewhere."""
        if self.population.tools == "none":
            return None
        forced = np.full(self.shape, -1)
        steps, rows, longest = self.shape
        for step in range(steps):
            for row in range(rows):
                start = int(self.draw.integers(2, max(3, longest // 2)))
                stop = min(longest - 1, start + int(self.draw.integers(3, 9)))
                forced[step, row, start:stop] = self.draw.integers(self.population.active, size=stop - start)
        return forced

    def path(self, how: Numerics) -> Route:
        """Give the right path of a side."""
        population = self.population
        weights = self.model.at(self.versions)
        if population.both_quantised:
            weights = {
                name: quantised(weight, population.both_quantised) if name != "bias" else weight
                for name, weight in weights.items()
            }
        return Route(
            weights,
            how,
            temperature=population.temperature,
            top_p=population.top_p,
            top_k=population.top_k,
            min_p=population.min_p,
        )

    def score(self, path: Route, seed: int, keep: Array | None) -> dict[str, Array]:
        """Score the drawn tokens on a path; a path without truncation takes over no set of tokens."""
        cuts = path.top_k or path.min_p or np.any(np.asarray(path.top_p) < 1)
        taken_over = keep if cuts and keep is not None and keep.size and path is self.true_trainer else None
        path = replace(path, top_p=1.0, top_k=0, min_p=0.0) if taken_over is not None else path
        return Forward(self.model, path, seed)(self.prompts, self.population.longest, self.tokens, taken_over)

    def play(self) -> None:
        """Sample with the engine and score with the trainer, each also without the fault."""
        seeds = [int(value) for value in np.random.default_rng(self.seed + 1).integers(1 << 40, size=2)]
        sampled = Forward(self.model, self.engine, seeds[0])(self.prompts, self.population.longest, forced=self.forced)
        self.tokens, self.keep = sampled["tokens"], sampled["keep"]
        self.rollout = sampled
        exact = self.population.exact and self.trainer is self.true_trainer and self.engine is self.true_engine
        self.train = sampled if exact else self.score(self.trainer, seeds[1], self.keep)
        right_engine = sampled if self.engine is self.true_engine else self.score(self.true_engine, seeds[0], None)
        right_trainer = self.train
        if self.trainer is not self.true_trainer:
            right_trainer = self.score(self.true_trainer, seeds[1], None)
        self.a = self.train["logprobs"].copy()
        self.b = self.rollout["logprobs"].copy()
        self.right_a, self.right_b = right_trainer["logprobs"], right_engine["logprobs"]
        self.response_ids = self.model.token_ids[self.tokens]
        if self.population.tools == "null":
            self.null = {"rollout": ~self.counts}

    # what an oracle knows

    def in_use(self) -> Array:
        """Tokens that lie within their responses and count."""
        return (np.arange(self.population.longest) < self.lengths[..., None]) & self.counts

    def sizes(self, part: Array | None = None) -> tuple[float, float, int, int]:
        """Root mean squares of d without and with the fault, tokens that are far off by it, and tokens in all."""
        used = self.in_use() if part is None else self.in_use() & part
        with np.errstate(invalid="ignore"):
            right = (self.right_a - self.right_b)[used].astype(float)
            now = (self.a - self.b)[used].astype(float)
        now = np.where(np.isfinite(now), np.clip(now, -50, 50), 50.0)
        right = np.where(np.isfinite(right), np.clip(right, -50, 50), 0.0)
        usual_size = float(np.sqrt(np.mean(right**2))) if right.size else 0.0
        far = int((np.abs(now - right) > 3 * usual_size + 1e-6).sum())
        return usual_size, float(np.sqrt(np.mean(now**2))) if now.size else 0.0, far, int(used.sum())

    def told(self, detail: str, part: Array | None = None) -> str:
        """Append the sizes to a detail."""
        usual_size, size, far, tokens = self.sizes(part)
        return f"{detail}; rms d {usual_size:.2g} without it and {size:.2g} with it, {far} of {tokens} tokens far off"

    def larger(self, factor: float, far_tokens: int, part: Array | None = None) -> bool:
        """Whether the fault makes d so much larger, and moves so many tokens far."""
        usual_size, size, far, _ = self.sizes(part)
        return bool(size > factor * usual_size and far >= far_tokens)

    def weights_show(self) -> bool:
        """Whether a careful reader sees that weights differ everywhere."""
        _, size, _, tokens = self.sizes()
        if tokens < 200:
            return self.larger(5.0, 20)
        population = self.population
        dtypes = {population.engine.dtype, population.trainer.dtype}
        known = population.contracts != "none" and not population.imported and dtypes <= {"float32", "tf32"}
        return self.larger(2.0, 20) and (known or size > 0.08 or tokens >= 1500)

    def part_shows(self, part: Array) -> bool:
        """Whether a careful reader sees that a part of the tokens is off."""
        other = self.in_use() & ~part
        return self.larger(3.0, 20, part) and self.sizes(part)[3] >= 60 and int(other.sum()) >= 60

    def steps_from(self, first: int) -> Array:
        """Tokens of the steps from a place of the run on."""
        part = np.zeros(self.shape, bool)
        part[first:] = True
        return part

    def some_rows(self, share: float) -> Array:
        """Draw some rows, two at least: [S, B]."""
        rows = self.draw.random(self.shape[:2]) < share
        if rows.sum() < 2:
            rows.reshape(-1)[self.draw.choice(rows.size, min(2, rows.size), replace=False)] = True
        return rows

    # writing

    def contract(self, side: str) -> dict[str, Any]:
        """Make a side's contract as TRL and vLLM give it, or a plain one of a loop of one's own."""
        population = self.population
        how = population.engine if side == "rollout" else population.trainer
        dtype = TORCH_NAME[how.dtype]
        changes = self.contract_changes[side]
        experts = {"moe_layers": ["layers.0.mlp"], "num_experts": population.experts, "experts_per_token": 1}
        if population.contracts == "plain":
            made: dict[str, Any] = {
                "engine": "sglang" if side == "rollout" else "fsdp",
                "dtype": dtype,
                "temperature": population.temperature,
                "allow_tf32": how.dtype == "tf32",
            }
            if population.experts:
                made["model"] = experts
            return made | changes
        if side == "train":
            model = {
                "adapters": ["default"] if population.adapter else [],
                "attention": "sdpa",
                "class": "Qwen3MoeForCausalLM" if population.experts else "Qwen3ForCausalLM",
                "dtypes": {dtype: 75072},
                "quantization": population.both_quantised or None,
            }
            return {
                "engine": "trl",
                "autocast": "no",
                "source": "recomputed",
                "logprobs_of": "logits divided by the temperature, over the whole vocabulary",
                "model": model | (experts if population.experts else {}),
                "temperature": population.temperature,
                "torch": {"cuda_matmul_allow_tf32": how.dtype == "tf32"},
            } | changes
        quantization = changes.get("quantization", population.both_quantised or None)
        made = {
            "engine": "vllm",
            "engine_version": "0.32.0",
            "logprobs_mode": "processed_logprobs",
            "logprobs_of": "the logits after temperature, penalties and truncation: the distribution sampled from",
            "config": {
                "model_config": {
                    "dtype": f"torch.{dtype}",
                    "head_dtype": f"torch.{dtype}",
                    "quantization": quantization,
                    "model": "run/model",
                }
            },
            "torch": {"cuda_matmul_allow_tf32": how.dtype == "tf32"},
            "sampling": {
                "temperature": population.temperature,
                "top_p": population.top_p,
                "top_k": population.top_k,
                "min_p": population.min_p,
                "repetition_penalty": 1.0,
            },
        }
        if population.experts:
            made["model"] = experts
        return made | {name: value for name, value in changes.items() if name != "quantization"}

    def fields(self, step: int) -> dict[str, Any]:
        """Give what is recorded of a step's sequences beside their tokens."""
        population = self.population
        rewards = np.random.default_rng(self.seed + step).integers(0, 2, self.shape[1]).astype(float)
        groups = np.arange(self.shape[1]) // population.group_size
        means = np.bincount(groups, rewards) / population.group_size
        given: dict[str, Any] = {"reward": rewards, "advantage": rewards - means[groups]}
        if population.with_settings:
            given |= {"temperature": population.temperature, "top_p": population.top_p, "top_k": population.top_k}
        if population.with_versions:
            given["policy_version"] = self.sampled_versions[step]
        return given

    def write(self, folder: Path) -> None:
        """Write the trace."""
        if self.population.imported:
            self.write_import(folder)
            return
        population = self.population
        with Recorder(folder) as recorder:
            if population.contracts != "none":
                recorder.add_contract("rollout", self.contract("rollout"))
                recorder.add_contract("train", self.contract("train"))
            for step in range(self.shape[0]):
                self.write_step(recorder, step)

    def write_step(self, recorder: Recorder, step: int) -> None:
        """Write one step."""
        population = self.population
        inside = np.arange(population.longest) < self.lengths[step][:, None]
        given = self.fields(step)
        if population.with_settings:
            given |= {"min_p": population.min_p, "max_tokens": population.longest}
        if population.with_groups:
            given["group_ids"] = [int(row) // population.group_size for row in range(self.shape[1])]
        if population.with_prompts:
            given["prompt_ids"] = self.model.token_ids[self.prompts[step]].tolist()
        batch = recorder.add_sequences(
            step=step + 1,
            response_ids=self.response_ids[step],
            response_attention_mask=inside,
            response_mask=None if self.counts.all() else self.counts[step],
            **given,
        )
        for side, values, run in (("rollout", self.b, self.rollout), ("train", self.a, self.train)):
            entropies = population.entropies == "both" or (population.entropies == "train" and side == "train")
            columns: dict[str, Any] = {"logprobs": values[step]}
            if entropies:
                columns["entropy"] = run["entropies"][step]
            if side in self.null:
                columns["scored_mask"] = ~self.null[side][step]
            if side == "train" and population.with_versions and self.scored_versions is not None:
                columns["policy_version"] = self.scored_versions[step]
            if side == "rollout" and self.row_contracts is not None:
                for server in np.unique(self.row_contracts[step]):
                    rows = np.flatnonzero(self.row_contracts[step] == server)
                    recorder.add_contract("rollout", self.contract("rollout") | {"server": f"host-{server}"})
                    part = {name: value[rows] for name, value in columns.items()}
                    recorder.add_scores("rollout", batch, rows=rows, attention_mask=inside[rows], **part)
                continue
            recorder.add_scores(side, batch, **columns)
        recorder.add_metrics(step + 1, {"reward": float(np.mean(given["reward"]))})

    def write_import(self, folder: Path) -> None:
        """Write the trace as a dump and import it: it then has no contracts, and any values."""
        rows = []
        for step in range(self.shape[0]):
            given = self.fields(step)
            for row in range(self.shape[1]):
                length = int(self.lengths[step, row])
                one = {name: value if np.ndim(value) == 0 else value[row].item() for name, value in given.items()}
                one |= {
                    "step": step + 1,
                    "group_id": row // self.population.group_size,
                    "prompt_ids": self.model.token_ids[self.prompts[step, row]].tolist(),
                    "response_ids": self.response_ids[step, row, :length].tolist(),
                    "rollout_logprobs": self.b[step, row, :length].tolist(),
                    "train_logprobs": self.a[step, row, :length].tolist(),
                }
                rows.append(one)
        dump = folder.with_suffix(".parquet")
        pq.write_table(pa.Table.from_pylist(rows), dump)
        import_parquet(dump, output=folder)
        dump.unlink()


# ------------------------------------------------------------------------------------------------------------- healthy


def both(draw: np.random.Generator, first: str, second: str, **changes: Any) -> dict[str, Numerics]:
    """Give the numerics of a trainer and an engine; the changes are the engine's."""
    return {"trainer": numerics(draw, first), "engine": numerics(draw, second, **changes)}


def big_vocabulary(draw: np.random.Generator) -> dict[str, Any]:
    """A large vocabulary, of which a run uses a part."""
    return {
        "vocabulary": int(pick(draw, 32000, 50257, 128256, 150000)),
        "active": int(draw.integers(800, 1500)),
        "groups": 2,
        "spread": between(draw, 3.0, 6.0),
    }


HEALTHY: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {
    "fp32-both": lambda draw: both(draw, "float32", "float32"),
    "tf32-engine": lambda draw: both(draw, "float32", "tf32"),
    "bf16-engine": lambda draw: both(draw, "float32", "bfloat16"),
    "bf16-both": lambda draw: both(draw, "bfloat16", "bfloat16"),
    "fp16-engine": lambda draw: both(draw, pick(draw, "float32", "float16"), "float16"),
    "bf16-cast-weights": lambda draw: both(draw, "float32", "bfloat16", cast_weights=True) | {"contracts": "full"},
    "bf16-logits": lambda draw: both(draw, "bfloat16", "bfloat16", logit_bits=8),
    "bf16-logprobs": lambda draw: both(draw, pick(draw, "float32", "bfloat16"), "bfloat16", logprob_bits=8),
    "noise-grows": lambda draw: both(draw, "float32", "bfloat16", growth=draw.uniform(1, 5)),
    "noise-of-unlikely": lambda draw: both(draw, "float32", "bfloat16", logit_error=between(draw, 1e-3, 1e-2)),
    "heavy-tailed": lambda draw: both(draw, "bfloat16", "bfloat16", tail=draw.uniform(1.8, 4)),
    "moe-flips": lambda draw: (
        both(draw, "bfloat16", "bfloat16", router_error=between(draw, 2e-3, 2e-2))
        | {"experts": int(pick(draw, 4, 8)), "contracts": "full"}
    ),
    "moe-no-contract": lambda draw: (
        both(draw, "float32", "bfloat16", router_error=between(draw, 1e-3, 1e-2)) | {"experts": 4, "contracts": "none"}
    ),
    "vocabulary-61": lambda _: {"vocabulary": 61, "active": 61},
    "big-vocabulary": big_vocabulary,
    "very-sure": lambda draw: {"spread": between(draw, 20, 60), "move": between(draw, 0.01, 0.2)},
    "unsure": lambda draw: {"spread": between(draw, 0.2, 1.0)},
    "softcap": lambda draw: {"softcap": float(pick(draw, 15, 30)), "spread": between(draw, 5, 12)},
    "temperature": lambda draw: {"temperature": float(pick(draw, 0.6, 1.3))},
    "top-p": lambda draw: {
        "top_p": float(pick(draw, 0.8, 0.9, 0.95)),
        "active": 300,
        "vocabulary": 300,
        "with_settings": True,
    },
    "top-k": lambda draw: {"top_k": int(pick(draw, 5, 20, 50)), "active": 300, "with_settings": True},
    "large-groups": lambda draw: {"groups": 2, "group_size": int(pick(draw, 8, 16))},
    "prompts-again": lambda _: {"prompts_again": True, "with_prompts": True, "steps": 14},
    "one-step": lambda draw: {"steps": 1, "groups": int(draw.integers(4, 16))},
    "hundreds-of-steps": lambda draw: {
        "steps": int(draw.integers(120, 260)),
        "groups": 1,
        "group_size": 2,
        "shortest": 4,
        "longest": 12,
        "active": 128,
        "width": 16,
        "move": between(draw, 0.005, 0.05),
    },
    "very-short": lambda draw: {"shortest": 1, "longest": int(draw.integers(1, 4)), "steps": 20, "groups": 8},
    "very-long": lambda draw: {
        "shortest": 200,
        "longest": int(draw.integers(300, 600)),
        "steps": 2,
        "groups": 1,
        "group_size": 4,
        "active": 300,
    },
    "equal-lengths": lambda draw: dict.fromkeys(("shortest", "longest"), int(draw.integers(10, 60))),
    "few-tokens": lambda draw: {
        "shortest": 3,
        "longest": int(draw.integers(5, 16)),
        "groups": 1,
        "steps": int(draw.integers(2, 6)),
        "group_size": int(pick(draw, 2, 4)),
    },
    "multi-turn": lambda draw: {"tools": pick(draw, "null", "scored"), "shortest": 20, "longest": 45},
    "declared-lag": lambda draw: {"declared_lag": 1, "with_versions": True, "move": between(draw, 0.05, 0.3)},
    "exact": lambda draw: {"exact": True} | both(draw, "float32", "float32"),
    "async": lambda draw: {"mixed_versions": True, "with_versions": True, "move": between(draw, 0.05, 0.3)},
    "trained": lambda draw: {"move": between(draw, 0.2, 0.6), "sharpening": draw.uniform(0.5, 3), "steps": 15},
    "no-metadata": lambda _: {
        "contracts": "none",
        "with_prompts": False,
        "with_settings": False,
        "with_groups": False,
        "with_versions": False,
        "entropies": "none",
    },
    "imported": lambda _: {"imported": True},
    "quantised-on-both": lambda draw: {"both_quantised": pick(draw, "int8", "float8")},
    "adapter-on-both": lambda _: {"adapter": True},
}

AS_RIGHT = {
    "exact": ("equal",),
    "bf16-logprobs": ("rounding", "low_precision_head"),
    "moe-flips": ("rounding", "router_flips"),
    "moe-no-contract": ("rounding", "router_flips"),
}


def healthy(case: Case, kind: str) -> Label:
    """Record two right paths."""
    case.play()
    return Label("none", case.told("right on both sides"), detectable=False, also=AS_RIGHT.get(kind, ("rounding",)))


# -------------------------------------------------------------------------------------- faults: distributions of a side


def side_of(case: Case, side: str) -> Route:
    """Give a side's path."""
    return case.engine if side == "engine" else case.trainer


def with_path(case: Case, side: str, **changes: Any) -> None:
    """Change a side's path."""
    if side == "engine":
        case.engine = replace(case.engine, **changes)
    else:
        case.trainer = replace(case.trainer, **changes)


def temperature(case: Case, factors: tuple[float, float], onset: bool = False) -> Label:
    """Divide the trainer's logits by another temperature than the engine's."""
    factor = between(case.draw, *factors)
    factor = 1 / factor if case.draw.random() < 0.5 else factor
    first = int(case.draw.integers(1, max(2, case.shape[0] * 2 // 3))) if onset else 0
    by_step = np.full(case.shape[0], case.population.temperature)
    by_step[first:] *= factor
    with_path(case, "trainer", temperature=by_step[:, None, None])
    case.play()
    seen = case.larger(1.3, 30, case.steps_from(first))
    return Label(
        "temperature",
        case.told(f"trainer's logits divided by {factor:.4g} more, from step {first + 1} on"),
        seen,
        ("subset",) if first else (),
    )


def softcap_missing(case: Case) -> Label:
    """Sample without the model's soft cap of the logits."""
    with_path(case, "engine", no_softcap=True)
    case.play()
    return Label(
        "other", case.told("engine leaves out the soft cap"), case.larger(2.0, 20), ("temperature", "weights_differ")
    )


def raw_temperature(case: Case) -> Label:
    """Let the engine sample with a temperature and report logprobs of the logits without it."""
    heat = float(pick(case.draw, 0.6, 0.8, 1.3))
    population = replace(case.population, temperature=heat)
    case.population = population
    for side in ("engine", "trainer"):
        with_path(case, side, temperature=heat)
    case.true_engine, case.true_trainer = case.engine, case.trainer
    case.play()
    raw = case.score(replace(case.engine, temperature=1.0), case.seed + 7, None)
    case.b, case.rollout = raw["logprobs"], raw
    return Label(
        "temperature",
        case.told(f"sampled and trained at {heat}, engine's logprobs of raw logits"),
        case.larger(1.3, 30),
    )


def truncation(case: Case, side: str = "engine", **settings: Any) -> Label:
    """Renormalise over what top-p, top-k or min-p keeps on one side alone."""
    with_path(case, side, **settings)
    if side == "engine":
        case.population = replace(case.population, **settings)
    case.play()
    also = () if case.population.with_settings else ("padded_vocabulary",)
    if side == "trainer":
        also = (*also, "placeholders")
    return Label("truncation", case.told(f"{settings} on the {side} alone"), case.larger(1.3, 30), also)


def padded_vocabulary(case: Case, columns: tuple[float, float]) -> Label:
    """Leave columns of zero weights in the trainer's softmax."""
    padding = int(between(case.draw, *columns))
    with_path(case, "trainer", padding=padding)
    case.play()
    also = () if case.population.with_settings else ("truncation",)
    return Label(
        "padded_vocabulary",
        case.told(f"{padding} columns of logit 0 in the trainer's softmax"),
        case.larger(1.3, 30),
        also,
    )


def low_precision_head(case: Case, side: str, dtype: str, what: str) -> Label:
    """Round logits, log-softmax or logprobs to 16 bits in a side whose contract says float32."""
    bits = BITS[dtype]
    rounding: dict[str, dict[str, Any]] = {
        "logits": {"logit_bits": bits},
        "logprobs": {"logprob_bits": bits},
        "log-softmax": {"logit_bits": bits, "log_softmax_bits": bits, "logprob_bits": bits},
    }
    with_path(case, side, numerics=replace(side_of(case, side).numerics, **rounding[what]))
    case.play()
    known = case.population.contracts != "none" or what != "logits"
    return Label("low_precision_head", case.told(f"{side}'s {what} rounded to {dtype}"), known and case.larger(2.0, 20))


def router_flips(case: Case, error: tuple[float, float]) -> Label:
    """Choose the experts with a router of few bits on the engine."""
    size = between(case.draw, *error)
    with_path(case, "engine", numerics=replace(case.engine.numerics, router_error=size))
    case.play()
    return Label("router_flips", case.told(f"engine's router has errors of {size:.2g}"), case.larger(2.0, 20))


# -------------------------------------------------------------------------------------------------- faults: weights


def stale(case: Case, lag: int, every: int = 1, declared: bool = False) -> Label:
    """Sample with the weights of earlier updates, in all steps or in every second or third."""
    hit = np.arange(case.shape[0]) % every == 0
    held = np.where(hit, np.maximum(case.versions - lag, 0), case.versions)
    return behind(case, held, f"engine {lag} updates behind in every {every}. step", declared, every > 1)


def sync_stops(case: Case) -> Label:
    """Leave the engine at the weights of a step on the way."""
    last = int(case.draw.integers(1, max(2, case.shape[0] // 2)))
    return behind(case, np.minimum(case.versions, last), f"engine stays at version {last}", False, True)


def behind(case: Case, held: Array, detail: str, declared: bool, in_part: bool) -> Label:
    """Sample with one held version a step, and say so in the policy versions or not."""
    with_path(case, "engine", weights=case.model.at(held))
    if declared:
        case.scored_versions = case.sampled_versions
        case.sampled_versions = np.repeat(held[:, None], case.shape[1], axis=1)
    case.play()
    said = declared and case.population.with_versions and bool((held != case.versions).any())
    return Label(
        "weights_differ",
        case.told(f"{detail}, declared: {declared}"),
        said or case.weights_show(),
        ("subset",) if in_part else (),
        True,
    )


def trainer_ahead(case: Case) -> Label:
    """Score with the trainer after its update, in place of before."""
    with_path(case, "trainer", weights=case.model.at(case.versions + 1))
    case.play()
    return Label("weights_differ", case.told("trainer scores after its update"), case.weights_show(), of_weights=True)


def partial_sync(case: Case, modules: tuple[str, ...]) -> Label:
    """Leave some modules of the engine at the first version."""
    held = dict(case.engine.weights)
    first = case.model.at(np.zeros(case.shape[0], int))
    held |= {name: first[name] for name in modules}
    with_path(case, "engine", weights=held)
    case.play()
    return Label(
        "weights_differ",
        case.told(f"engine's {', '.join(modules)} never synchronised"),
        case.weights_show(),
        of_weights=True,
    )


def quantised_engine(case: Case, how: str, declared: bool = False, head: bool = False) -> Label:
    """Sample with quantised weights."""
    kept = ("bias",) if head else ("bias", "head")
    with_path(
        case,
        "engine",
        weights={
            name: weight if name in kept else quantised(weight, how) for name, weight in case.engine.weights.items()
        },
    )
    if declared:
        case.contract_changes["rollout"] = {"quantization": how}
    case.play()
    seen = (declared and case.population.contracts == "full") or case.weights_show()
    return Label("weights_differ", case.told(f"engine's weights in {how}, declared: {declared}"), seen, of_weights=True)


def adapter(case: Case, scale: float) -> Label:
    """Sample without the adapter (scale 0), or with it scaled wrongly."""
    base = case.model.base
    with_path(
        case,
        "engine",
        weights={
            name: base[name] + np.float32(scale) * (weight - base[name]) for name, weight in case.engine.weights.items()
        },
    )
    case.play()
    return Label(
        "weights_differ", case.told(f"engine has {scale:g} of the adapter"), case.weights_show(), of_weights=True
    )


def other_model(case: Case) -> Label:
    """Score with another model of the same shape."""
    other = LanguageModel(case.population, np.random.default_rng(case.seed + 99))
    with_path(case, "trainer", weights=other.at(case.versions))
    case.play()
    return Label(
        "weights_differ", case.told("trainer scores with another model"), case.weights_show(), ("other",), True
    )


# ------------------------------------------------------------------------------------ faults: a part of the tokens


def on_part(case: Case, weights: Weights, where: Array) -> None:
    """Let the engine use other weights for some prompt and response tokens."""
    with_path(case, "engine", other=weights, where=where)


def response_part(case: Case, where: Array) -> Array:
    """Response tokens of places: the one at place p is what the state after p predicts."""
    first = case.population.prompt_length - 1
    return where[:, :, first : first + case.population.longest]


def weights_before(case: Case, lag: int) -> Weights:
    """Weights some updates before each step's own."""
    return case.model.at(np.maximum(case.versions - lag, 0))


def inflight_update(case: Case, lag: int) -> Label:
    """Change the engine's weights while it samples: each sequence is at a place of its own then."""
    steps, rows, longest = case.shape
    change = (case.lengths * case.draw.uniform(0.25, 0.75, (steps, rows))).astype(int)
    places = np.arange(case.population.prompt_length + longest) - case.population.prompt_length + 1
    where = places < change[..., None]
    on_part(case, weights_before(case, lag), where)
    case.play()
    part = response_part(case, where)
    return Label(
        "change_inside_sequence",
        case.told(f"weights {lag} updates older up to a place of each one", part),
        case.part_shows(part),
        ("weights_differ",),
        True,
    )


def stale_prefix_cache(case: Case, lag: int) -> Label:
    """Keep the states of prompts in the engine's cache over updates of the weights."""
    places = np.arange(case.population.prompt_length + case.population.longest)
    where = np.broadcast_to(places < case.population.prompt_length - 1, (*case.shape[:2], places.size)).copy()
    where[0] = False
    on_part(case, weights_before(case, lag), where)
    case.play()
    early = np.zeros(case.shape, bool)
    early[1:, :, :3] = True
    return Label(
        "change_inside_sequence",
        case.told(f"states of prompts from {lag} updates before", early),
        case.part_shows(early),
        ("weights_differ",),
        True,
    )


def position_onset(case: Case, how: str) -> Label:
    """Compute differently from a position of all sequences on, as behind a window or a switch of kernels."""
    place = int(case.population.longest * case.draw.uniform(0.25, 0.5))
    if how == "kernel":
        with_path(case, "engine", onset=place, onset_bits=BITS["float8"])
    else:
        turned = dict(case.engine.weights)
        angle = np.float32(between(case.draw, 0.05, 0.4))
        turned["recurrence"] = turned["recurrence"] * (1 - angle) + angle * np.roll(turned["recurrence"], 1, axis=1)
        places = np.arange(case.population.prompt_length + case.population.longest)
        where = np.broadcast_to(places - case.population.prompt_length + 1 >= place, (*case.shape[:2], places.size))
        on_part(case, turned, where)
    case.play()
    part = np.broadcast_to(np.arange(case.population.longest) >= place, case.shape)
    return Label(
        "position_onset", case.told(f"{how} differs from response position {place} on", part), case.part_shows(part)
    )


def stale_server(case: Case, lag: int, named: bool) -> Label:
    """Let one of several engines miss its updates; contracts may name the engines."""
    servers = case.draw.integers(0, 3, case.shape[:2])
    bad = servers == 1
    places = case.population.prompt_length + case.population.longest
    on_part(case, weights_before(case, lag), np.repeat(bad[..., None], places, axis=2))
    case.row_contracts = servers if named else None
    case.play()
    part = np.repeat(bad[..., None], case.population.longest, axis=2)
    names = ("subset", ("weights_differ",)) if named else ("weights_differ", ("subset",))
    return Label(
        names[0],
        case.told(f"one of 3 engines is {lag} updates behind, named: {named}", part),
        case.part_shows(part),
        names[1],
        True,
    )


def hit_prompts(case: Case, what: str) -> Label:
    """Hit all sequences of some prompts: another temperature, or a cached adapter."""
    groups = case.population.groups
    bad_group = case.draw.choice(groups, max(1, groups // 4), replace=False)
    bad = np.isin(np.arange(case.shape[1]) // case.population.group_size, bad_group)
    part = np.broadcast_to(bad[None, :, None], case.shape)
    if what == "temperature":
        by_row = np.where(bad, case.population.temperature * 1.4, case.population.temperature)
        with_path(case, "trainer", temperature=by_row[None, :, None])
    else:
        places = case.population.prompt_length + case.population.longest
        on_part(
            case,
            case.model.at(np.zeros(case.shape[0], int)),
            np.broadcast_to(bad[None, :, None], (*case.shape[:2], places)),
        )
    case.play()
    return Label(
        "subset",
        case.told(f"{what} differs for prompts {bad_group.tolist()} of each step", part),
        case.part_shows(part),
        ("temperature",) if what == "temperature" else ("weights_differ",),
        what == "weights",
    )


def bad_steps(case: Case) -> Label:
    """Run the engine with weights of int4 in a stretch of steps."""
    steps = case.shape[0]
    start = int(case.draw.integers(1, max(2, steps // 2)))
    stop = min(steps - 1, start + max(1, steps // 4))
    weights = {name: weight.copy() for name, weight in case.engine.weights.items()}
    for name in ("recurrence", "up", "down", "head"):
        weights[name][start:stop] = quantised(weights[name][start:stop], "int4")
    with_path(case, "engine", weights=weights)
    case.play()
    part = np.zeros(case.shape, bool)
    part[start:stop] = True
    return Label(
        "subset",
        case.told(f"engine's weights in int4 in steps {start + 1} to {stop}", part),
        case.part_shows(part),
        ("weights_differ",),
        True,
    )


# ------------------------------------------------------------------------------------------- faults: misplaced values


def gross(case: Case, fault: str, detail: str, also: tuple[str, ...] = (), tokens: int = 8) -> Label:
    """Label a fault that shows if a few tokens are far off."""
    return Label(fault, case.told(detail), case.larger(2.0, tokens), also)


def moved(values: Array, by: int, fill: float | Array = 0.0) -> Array:
    """Move values by places along the responses."""
    made = np.roll(values, by, axis=-1)
    if by > 0:
        made[..., :by] = fill
    else:
        made[..., by:] = fill
    return made


def shift(case: Case, by: int, side: str, share: float = 1.0, after_tool: bool = False) -> Label:
    """Let one side's values stand some places off."""
    case.play()
    values = case.a if side == "trainer" else case.b
    made = moved(values, by, case.draw.uniform(-3, 0, (*case.shape[:2], abs(by))).astype(np.float32))
    rows = case.some_rows(share) if share < 1 else np.ones(case.shape[:2], bool)
    where = np.repeat(rows[..., None], case.shape[2], axis=2)
    if after_tool:
        where &= np.cumsum(~case.counts, axis=-1) > 0
    made = np.where(where, made, values)
    if side == "trainer":
        case.a = made
    else:
        case.b = made
    detail = f"{side}'s values moved by {by} in {rows.mean():.0%} of rows, after a tool: {after_tool}"
    return gross(case, "shift", detail)


def row_pairing(case: Case, how: str) -> Label:
    """Give rows the engine's values of other rows."""
    case.play()
    steps, rows, _ = case.shape
    order = np.tile(np.arange(rows), (steps, 1))
    if how == "rotated":
        order = np.roll(order, 1, axis=1)
    elif how == "reversed":
        order = order[:, ::-1]
    elif how == "halves":
        order = np.roll(order, rows // 2, axis=1)
    elif how == "by-length":
        order = np.argsort(case.lengths, axis=1)
    elif how == "within-groups":
        blocks = order.reshape(steps, -1, case.population.group_size)
        order = np.roll(blocks, 1, axis=2).reshape(steps, rows)
    elif how == "two-rows":
        order[:, [0, 1]] = order[:, [1, 0]]
    case.b = np.take_along_axis(case.b, order[..., None], axis=1)
    if how == "step-before":
        case.b = np.roll(case.b, 1, axis=0)
    return gross(case, "row_pairing", f"engine's rows {how}")


def retokenised(case: Case, share: float, split: bool) -> Label:
    """Let the trainer read other tokens of the same text: a pair merged, or one split, from a place of each row."""
    case.play()
    hit = case.some_rows(share)
    tokens, values = case.tokens.copy(), case.b.copy()
    for step, row in np.argwhere(hit):
        length = int(case.lengths[step, row])
        if length < 5:
            continue
        place = int(case.draw.integers(1, max(2, length * 2 // 3)))
        new = int(case.draw.integers(case.population.active))
        if split:
            tokens[step, row, place + 1 :] = case.tokens[step, row, place:-1]
            tokens[step, row, place] = new
        else:
            tokens[step, row, place + 1 : -1] = case.tokens[step, row, place + 2 :]
            tokens[step, row, place] = new
            case.lengths[step, row] = length - 1
    case.tokens = tokens
    case.response_ids = case.model.token_ids[tokens]
    case.train = case.score(case.trainer, case.seed + 5, None)
    case.a, case.b = case.train["logprobs"], values
    how = "split in two" if split else "merged with the next"
    return gross(case, "retokenised", f"a token {how} for the trainer in {hit.mean():.0%} of rows")


def unrelated(case: Case) -> Label:
    """Record the trainer's values of other tokens: everything is shuffled."""
    case.play()
    flat = case.a.reshape(-1)
    case.a = case.draw.permutation(flat).reshape(case.shape)
    return gross(case, "other", "trainer's values in a random order", ("row_pairing",))


# ----------------------------------------------------------------------------------------- faults: values and units


def other_unit(case: Case, unit: str, side: str = "engine") -> Label:
    """Record one side in another unit."""
    case.play()
    values = case.b if side == "engine" else case.a
    units = {
        "base-2": values / np.log(2),
        "base-10": values / np.log(10),
        "probabilities": np.exp(values),
        "negative": -values,
    }
    made = units[unit].astype(np.float32)
    if side == "engine":
        case.b = made
    else:
        case.a = made
    return gross(case, "log_base", f"{side}'s values are {unit}")


def logits_recorded(case: Case) -> Label:
    """Record the token's logit in place of its logprob, less the largest that a run has where it must be negative."""
    with_path(case, "engine", raw_logits=True)
    case.play()
    if not case.population.imported:
        case.b = case.b - case.b.max()
    return gross(case, "other", "engine's values are logits", ("log_base",))


def top_logprob(case: Case) -> Label:
    """Record the most probable token's logprob on the engine's side."""
    case.play()
    case.b = case.rollout["best"].copy()
    return gross(case, "other", "engine's values are those of the most probable token")


def entropy_for_logprob(case: Case) -> Label:
    """Record the negative entropy on the trainer's side."""
    case.play()
    case.a = np.minimum(-case.train["entropies"], 0)
    return gross(case, "other", "trainer's values are negative entropies")


def sequence_mean(case: Case) -> Label:
    """Record each sequence's mean at each of its tokens."""
    case.play()
    inside = np.arange(case.shape[2]) < case.lengths[..., None]
    means = (np.where(inside, case.b, 0).sum(axis=-1) / case.lengths)[..., None]
    case.b = np.broadcast_to(means, case.shape).astype(np.float32)
    return gross(case, "other", "engine's values are each sequence's mean", ("placeholders",))


def clamped(case: Case, floor: float) -> Label:
    """Let one side clamp its values from below."""
    case.play()
    case.a = np.maximum(case.a, np.float32(floor))
    return gross(case, "other", f"trainer's values clamped at {floor}", ("placeholders",), tokens=5)


def both_in_base_2(case: Case) -> Label:
    """Record both sides in base 2: the entropies alone say it."""
    case.play()
    case.a, case.b = case.a / np.float32(np.log(2)), case.b / np.float32(np.log(2))
    used = case.in_use()
    mean_entropy, mean = float(case.train["entropies"][used].mean()), float(case.a[used].mean())
    seen = case.population.entropies != "none" and used.sum() > 500 and mean_entropy > 0.2
    detail = f"both sides in base 2; mean entropy {mean_entropy:.3g}, mean value {mean:.3g}"
    return Label("log_base", detail, bool(seen))


def both_placeholders(case: Case, value: float, share: float) -> Label:
    """Record one constant at the same tokens of both sides."""
    case.play()
    hit = case.draw.random(case.shape) < share
    far = (np.abs(case.a - value) > 0.3) & hit & case.in_use()
    case.a, case.b = np.where(hit, value, case.a).astype(np.float32), np.where(hit, value, case.b).astype(np.float32)
    return Label(
        "placeholders", f"{value} at {far.sum()} tokens of both sides that have other values", bool(far.sum() >= 20)
    )


def placeholders(case: Case, value: float, share: float, side: str = "engine", unit: str = "tokens") -> Label:
    """Put a value that stands for none at some tokens, rows or steps of one side."""
    case.play()
    if unit == "steps":
        middle = case.shape[0] // 2
        hit = np.zeros(case.shape, bool)
        hit[middle : middle + max(1, int(share * case.shape[0]))] = True
    elif unit == "rows":
        hit = np.repeat(case.some_rows(share)[..., None], case.shape[2], axis=2)
    elif unit == "one":
        hit = np.zeros(case.shape, bool)
        hit[case.shape[0] // 2, 0, 0] = True
    else:
        hit = case.draw.random(case.shape) < share
    if side == "engine":
        case.b = np.where(hit, np.float32(value), case.b)
    else:
        case.a = np.where(hit, np.float32(value), case.a)
    detail = f"{value} at {int((hit & case.in_use()).sum())} tokens ({unit}) of the {side}"
    if not np.isfinite(value):
        also = ("lengths",) if unit != "tokens" else ()
        return Label("placeholders", case.told(detail), bool((hit & case.in_use()).any()), also)
    return gross(case, "placeholders", detail)


def lengths(case: Case, where: str, share: float, null: bool) -> Label:
    """Lose one side's values at the end or the beginning of some rows."""
    case.play()
    rows = case.some_rows(share)
    cut = np.maximum(1, (case.lengths * case.draw.uniform(0.1, 0.5, case.shape[:2])).astype(int))
    places = np.arange(case.shape[2])
    lost = places >= (case.lengths - cut)[..., None] if where == "end" else places < cut[..., None]
    lost = lost & rows[..., None]
    if null:
        case.null = {"rollout": lost}
    case.b = np.where(lost, np.float32(np.nan), case.b)
    return Label(
        "lengths",
        case.told(f"engine lacks the {where} of {rows.mean():.0%} of rows, NULL: {null}"),
        True,
        ("placeholders",),
    )


def copies(case: Case, share: float) -> Label:
    """Fill the trainer's values in from the engine's, in all rows or some."""
    case.play()
    rows = np.ones(case.shape[:2], bool) if share >= 1 else case.some_rows(share)
    differing = (case.a != case.b)[case.in_use()].mean()
    case.a = np.where(rows[..., None], case.b, case.a)
    contracts = case.population.contracts != "none"
    dtypes = case.population.engine.dtype != case.population.trainer.dtype
    seen = bool(differing > 0.3) and (contracts and dtypes if share >= 1 else True)
    return Label("copies", f"{rows.mean():.0%} of rows copied; {differing:.0%} of tokens differ otherwise", seen)


def mask(case: Case, value: float | None) -> Label:
    """Let a tool's tokens count: with a constant on the engine's side, or with both sides' scores."""
    case.play()
    tool = ~case.counts
    inside = np.arange(case.shape[2]) < case.lengths[..., None]
    case.counts = np.ones(case.shape, bool)
    case.null = {}
    if value is not None:
        case.b = np.where(tool, np.float32(value), case.b)
        return gross(case, "mask", f"a tool's tokens count, engine has {value}", ("placeholders",))
    surprise = (case.a + case.train["entropies"])[tool & inside]
    seen = surprise.mean() < -1.5 and case.population.entropies != "none"
    return Label(
        "mask",
        f"a tool's {surprise.size} tokens count; mean logprob + entropy of them {surprise.mean():.3g}",
        bool(seen),
    )


def prompt_counts(case: Case, tail: int, value: float | None) -> Label:
    """Record the last tokens of the prompt as the first of the response."""
    case.play()
    population = case.population
    tail = min(tail, population.prompt_length - 1)
    start = case.prompts[:, :, population.prompt_length - tail :]
    whole = np.concatenate([start, case.tokens], axis=2)[:, :, : case.shape[2]]
    kept_rollout = case.b[:, :, : case.shape[2] - tail]
    case.prompts = case.prompts[:, :, : population.prompt_length - tail]
    case.tokens, case.response_ids = whole, case.model.token_ids[whole]
    case.lengths = np.minimum(case.lengths + tail, case.shape[2])
    case.train = case.score(case.true_trainer, case.seed + 3, None)
    right = case.score(case.true_engine, case.seed + 4, None)
    case.a, case.right_a, case.right_b = case.train["logprobs"], case.train["logprobs"], right["logprobs"]
    filled = right["logprobs"][:, :, :tail] if value is None else np.full((*case.shape[:2], tail), np.float32(value))
    case.b, case.rollout = np.concatenate([filled, kept_rollout], axis=2), right
    detail = f"last {tail} tokens of prompts count, engine has {'scores' if value is None else value}"
    if value is not None:
        return gross(case, "mask", detail, ("placeholders",))
    surprise = (case.a + case.train["entropies"])[:, :, :tail]
    return Label(
        "mask",
        f"{detail}; their mean logprob + entropy {surprise.mean():.3g}",
        bool(surprise.mean() < -1.5 and population.group_size > 1),
    )


# -------------------------------------------------------------------------------------------------- faults: together


def together(
    case: Case, first: Callable[[Case], Label], second: Callable[[Case], Label], main: str = "second"
) -> Label:
    """Plant a fault of a path and one of the recording on top: `first` plays, and `second` finds it played."""
    label = first(case)
    case.play = lambda: None  # type: ignore[method-assign]
    added = second(case)
    named, beside = (label, added) if main == "first" else (added, label)
    shown = named if named.detectable or not beside.detectable else beside
    also = dict.fromkeys((*shown.also, (beside if shown is named else named).fault))
    return Label(shown.fault, f"{label.detail}; and {added.detail}", shown.detectable, tuple(also), label.of_weights)


# ------------------------------------------------------------------------------------------------------------- the plan

AGAIN = {"prompts_again": True, "with_prompts": True}
FP32 = {"trainer": Numerics("float32", 4.0), "engine": Numerics("float32", 6.0), "contracts": "full"}
MIXED = {"trainer": Numerics("float32", 4.0), "engine": Numerics("bfloat16", 0.7), "contracts": "full"}
MOVING = {"move": Between(0.015, 0.4), "steps": 10}
THREE = {"shortest": 3, "longest": 3, "groups": 8, "group_size": 4, "steps": 12}
TURNS = {"tools": "scored", "shortest": 20, "longest": 45}
FLAT = {"spread": 1.5, "active": 300, "vocabulary": 300, "temperature": 1.0}
SHARP = {"spread": 9.0}
BIG = {"vocabulary": 150000, "active": 1200, "groups": 2}
NAN, INF = float("nan"), float("inf")

Fault = Callable[[Case], Label]
PLAN: list[tuple[str, dict[str, Any], Fault]] = [
    ("temperature-strong", {}, lambda case: temperature(case, (1.2, 1.8))),
    ("temperature-weak", {}, lambda case: temperature(case, (1.03, 1.1))),
    ("temperature-tiny", {}, lambda case: temperature(case, (1.002, 1.01))),
    ("temperature-onset", {}, lambda case: temperature(case, (1.1, 1.6), onset=True)),
    ("temperature-raw", {"temperature": 1.0}, raw_temperature),
    ("temperature-big-vocabulary", BIG, lambda case: temperature(case, (1.05, 1.4))),
    ("temperature-three-tokens", THREE, lambda case: temperature(case, (1.1, 1.5))),
    ("temperature-softcap", {"softcap": 30.0}, lambda case: temperature(case, (1.1, 1.5))),
    ("top-p-engine", FLAT, lambda case: truncation(case, top_p=float(pick(case.draw, 0.8, 0.9)))),
    ("top-p-weak", {}, lambda case: truncation(case, top_p=float(pick(case.draw, 0.95, 0.99)))),
    ("top-k-engine", FLAT, lambda case: truncation(case, top_k=int(pick(case.draw, 20, 50)))),
    ("min-p-engine", {}, lambda case: truncation(case, min_p=float(pick(case.draw, 0.02, 0.1)))),
    ("top-p-trainer", {}, lambda case: truncation(case, "trainer", top_p=0.9)),
    ("top-k-trainer-sure", SHARP, lambda case: truncation(case, "trainer", top_k=3)),
    ("padding-large", FLAT, lambda case: padded_vocabulary(case, (40, 200))),
    ("padding-small", {"temperature": 1.0}, lambda case: padded_vocabulary(case, (8, 60))),
    ("padding-big-vocabulary", BIG | {"spread": 2.5}, lambda case: padded_vocabulary(case, (100, 400))),
    ("head-logits", FP32, lambda case: low_precision_head(case, "engine", "bfloat16", "logits")),
    ("head-logprobs", FP32, lambda case: low_precision_head(case, "engine", "bfloat16", "logprobs")),
    ("head-log-softmax", FP32, lambda case: low_precision_head(case, "trainer", "bfloat16", "log-softmax")),
    ("head-float16", FP32, lambda case: low_precision_head(case, "trainer", "float16", "logits")),
    (
        "head-logprobs-no-contract",
        FP32 | {"contracts": "none"},
        lambda case: low_precision_head(case, "engine", "float16", "logprobs"),
    ),
    ("router-strong", MIXED | {"experts": 8}, lambda case: router_flips(case, (0.05, 0.15))),
    ("router-weak", FP32 | {"experts": 4}, lambda case: router_flips(case, (0.003, 0.02))),
    ("router-big-vocabulary", BIG | MIXED | {"experts": 4}, lambda case: router_flips(case, (0.03, 0.1))),
    ("stale-1", MOVING, lambda case: stale(case, 1)),
    ("stale-3", {"steps": 10}, lambda case: stale(case, 3)),
    ("stale-1-slow", {"move": Between(0.003, 0.02)}, lambda case: stale(case, 1)),
    ("stale-1-weak", MIXED | {"move": Between(0.008, 0.05)}, lambda case: stale(case, 1)),
    ("stale-2-weak-again", MIXED | AGAIN | {"move": Between(0.008, 0.05)}, lambda case: stale(case, 2)),
    ("stale-very-sure", MOVING | {"spread": 30.0}, lambda case: stale(case, 1)),
    (
        "stale-few-tokens",
        MOVING | {"steps": 5, "groups": 1, "group_size": 2, "shortest": 4, "longest": 12},
        lambda case: stale(case, 2),
    ),
    ("stale-onset", MOVING, sync_stops),
    ("stale-every-other-step", MOVING, lambda case: stale(case, 1, every=2)),
    ("stale-again", MOVING | AGAIN | FP32, lambda case: stale(case, 1)),
    ("stale-no-contract", MOVING | {"contracts": "none"}, lambda case: stale(case, 2)),
    ("stale-three-tokens", MOVING | THREE, lambda case: stale(case, 2)),
    (
        "stale-many-steps",
        {
            "steps": 150,
            "groups": 1,
            "group_size": 2,
            "shortest": 6,
            "longest": 12,
            "active": 128,
            "width": 16,
            "move": 0.1,
        },
        lambda case: stale(case, 4),
    ),
    ("stale-declared", MOVING | {"with_versions": True}, lambda case: stale(case, 1, declared=True)),
    ("trainer-ahead", MOVING, trainer_ahead),
    ("trainer-ahead-fp32", FP32 | {"move": Between(0.001, 0.02)}, trainer_ahead),
    ("partial-head", MOVING, lambda case: partial_sync(case, ("head", "bias"))),
    ("partial-layer", MOVING, lambda case: partial_sync(case, ("up", "down"))),
    ("partial-recurrence-again", MOVING | AGAIN, lambda case: partial_sync(case, ("recurrence",))),
    ("partial-bias", MOVING | FP32, lambda case: partial_sync(case, ("bias",))),
    ("partial-bias-weak", MIXED | {"move": Between(0.01, 0.06)}, lambda case: partial_sync(case, ("bias",))),
    (
        "partial-layer-weak",
        MIXED | AGAIN | {"move": Between(0.008, 0.03)},
        lambda case: partial_sync(case, ("up", "down")),
    ),
    ("int8-bf16-again", MIXED | AGAIN, lambda case: quantised_engine(case, "int8")),
    ("int8-declared", MIXED, lambda case: quantised_engine(case, "int8", declared=True)),
    ("int8-again", AGAIN | FP32, lambda case: quantised_engine(case, "int8")),
    ("int8", {}, lambda case: quantised_engine(case, "int8", head=True)),
    ("int4", {}, lambda case: quantised_engine(case, "int4", head=True)),
    ("int4-again", AGAIN, lambda case: quantised_engine(case, "int4")),
    ("float8-declared", MIXED, lambda case: quantised_engine(case, "float8", declared=True)),
    ("float8-big-vocabulary", BIG, lambda case: quantised_engine(case, "float8", head=True)),
    ("adapter-missing", {"adapter": True}, lambda case: adapter(case, 0.0)),
    ("adapter-doubled", {"adapter": True} | FP32, lambda case: adapter(case, 2.0)),
    ("adapter-missing-again", {"adapter": True} | AGAIN, lambda case: adapter(case, 0.0)),
    ("other-model", {}, other_model),
    ("inflight", MOVING | {"shortest": 30, "longest": 60}, lambda case: inflight_update(case, 2)),
    ("inflight-fp32", FP32 | {"move": 0.1, "shortest": 20, "longest": 50}, lambda case: inflight_update(case, 1)),
    ("prefix-cache", MOVING | AGAIN | FP32, lambda case: stale_prefix_cache(case, 3)),
    (
        "inflight-weak",
        MIXED | {"move": Between(0.02, 0.08), "shortest": 30, "longest": 60},
        lambda case: inflight_update(case, 2),
    ),
    ("onset-kernel", {"shortest": 30, "longest": 60} | FP32, lambda case: position_onset(case, "kernel")),
    ("onset-window", {"shortest": 30, "longest": 80}, lambda case: position_onset(case, "window")),
    ("onset-window-bf16", {"shortest": 30, "longest": 60} | MIXED, lambda case: position_onset(case, "window")),
    ("server-named", MOVING | FP32, lambda case: stale_server(case, 3, True)),
    ("server-unnamed", MOVING, lambda case: stale_server(case, 3, False)),
    ("prompts-temperature", AGAIN | {"groups": 4}, lambda case: hit_prompts(case, "temperature")),
    ("prompts-weights", MOVING | AGAIN | {"groups": 4}, lambda case: hit_prompts(case, "weights")),
    ("steps-int4", {"steps": 12}, bad_steps),
    ("shift-right", {}, lambda case: shift(case, 1, "engine")),
    ("shift-left", {}, lambda case: shift(case, -1, "trainer")),
    ("shift-two", {}, lambda case: shift(case, 2, "engine")),
    ("shift-after-tool", TURNS, lambda case: shift(case, 1, "engine", after_tool=True)),
    ("shift-three-tokens", THREE, lambda case: shift(case, 1, "trainer")),
    ("shift-sure", SHARP, lambda case: shift(case, 1, "engine")),
    ("shift-some-rows", {}, lambda case: shift(case, 1, "engine", share=0.3)),
    ("rows-rotated", {}, lambda case: row_pairing(case, "rotated")),
    ("rows-reversed", {}, lambda case: row_pairing(case, "reversed")),
    ("rows-halves", {}, lambda case: row_pairing(case, "halves")),
    ("rows-by-length", {}, lambda case: row_pairing(case, "by-length")),
    ("rows-within-groups", {"group_size": 4}, lambda case: row_pairing(case, "within-groups")),
    ("rows-two", {"groups": 4}, lambda case: row_pairing(case, "two-rows")),
    ("rows-step-before", AGAIN, lambda case: row_pairing(case, "step-before")),
    ("rows-three-tokens", THREE, lambda case: row_pairing(case, "rotated")),
    ("softcap-missing", {"softcap": 15.0, "spread": 4.0}, softcap_missing),
    ("merged", {}, lambda case: retokenised(case, 0.9, False)),
    ("split", {}, lambda case: retokenised(case, 0.9, True)),
    ("merged-some", {"shortest": 20, "longest": 50}, lambda case: retokenised(case, 0.3, False)),
    ("shuffled", {}, unrelated),
    ("base-2", {}, lambda case: other_unit(case, "base-2")),
    ("base-10", {}, lambda case: other_unit(case, "base-10", "trainer")),
    ("base-2-sure", SHARP, lambda case: other_unit(case, "base-2", "trainer")),
    ("probabilities", {"imported": True}, lambda case: other_unit(case, "probabilities")),
    ("negative", {"imported": True}, lambda case: other_unit(case, "negative", "trainer")),
    ("both-base-2", {"entropies": "both"}, both_in_base_2),
    ("logits-imported", {"imported": True}, logits_recorded),
    ("logits-negative", {}, logits_recorded),
    ("top-logprob", {}, top_logprob),
    ("entropy-for-logprob", {}, entropy_for_logprob),
    ("sequence-mean", {}, sequence_mean),
    ("clamped", {"spread": 2.0, "temperature": 1.0}, lambda case: clamped(case, -4.0)),
    ("zeros-sure", SHARP, lambda case: placeholders(case, 0.0, 0.1)),
    ("minus-infinity-steps", {"steps": 10}, lambda case: placeholders(case, -INF, 0.2, "trainer", "steps")),
    ("zeros", {}, lambda case: placeholders(case, 0.0, 0.1)),
    ("zeros-few", {}, lambda case: placeholders(case, 0.0, 0.01, "trainer")),
    ("zeros-rows", {}, lambda case: placeholders(case, 0.0, 0.15, unit="rows")),
    ("constant", {}, lambda case: placeholders(case, -1.0, 0.05, "trainer")),
    ("minus-100", {}, lambda case: placeholders(case, -100.0, 0.02)),
    ("minus-infinity", {}, lambda case: placeholders(case, -INF, 0.03)),
    ("nan-tokens", {}, lambda case: placeholders(case, NAN, 0.05, "trainer")),
    ("nan-steps", {"steps": 12}, lambda case: placeholders(case, NAN, 0.2, unit="steps")),
    ("nan-one", {}, lambda case: placeholders(case, NAN, 0.0, unit="one")),
    ("both-zeros", {"spread": 2.5}, lambda case: both_placeholders(case, 0.0, 0.1)),
    ("both-constant", {}, lambda case: both_placeholders(case, -0.5, 0.05)),
    ("ends-null", {}, lambda case: lengths(case, "end", 0.5, True)),
    ("ends-nan", {}, lambda case: lengths(case, "end", 0.2, False)),
    ("beginnings-nan", {}, lambda case: lengths(case, "beginning", 0.8, False)),
    ("copied", MIXED, lambda case: copies(case, 1.0)),
    ("copied-some", MIXED, lambda case: copies(case, 0.3)),
    ("copied-fp32", FP32, lambda case: copies(case, 0.5)),
    ("tool-zeros", TURNS, lambda case: mask(case, 0.0)),
    ("tool-scored", TURNS | {"entropies": "both"}, lambda case: mask(case, None)),
    ("prompt-zeros", {"prompt_length": 6}, lambda case: prompt_counts(case, 3, 0.0)),
    (
        "prompt-scored",
        {"prompt_length": 8, "entropies": "both", "group_size": 8, "with_prompts": True},
        lambda case: prompt_counts(case, 4, None),
    ),
    (
        "nan-and-temperature",
        {},
        lambda case: together(
            case, lambda one: temperature(one, (1.2, 1.6)), lambda one: placeholders(one, NAN, 0.0, unit="one"), "first"
        ),
    ),
    (
        "nan-and-stale",
        MOVING,
        lambda case: together(
            case, lambda one: stale(one, 2), lambda one: placeholders(one, NAN, 0.0, unit="one"), "first"
        ),
    ),
    (
        "shift-and-temperature",
        {},
        lambda case: together(case, lambda one: temperature(one, (1.2, 1.6)), lambda one: shift(one, 1, "engine")),
    ),
    (
        "rows-and-stale",
        MOVING,
        lambda case: together(case, lambda one: stale(one, 2), lambda one: row_pairing(one, "rotated")),
    ),
    (
        "base-2-and-zeros",
        {},
        lambda case: together(case, lambda one: other_unit(one, "base-2"), lambda one: placeholders(one, 0.0, 0.05)),
    ),
    (
        "ends-and-top-p",
        FLAT,
        lambda case: together(case, lambda one: truncation(one, top_p=0.9), lambda one: lengths(one, "end", 0.4, True)),
    ),
]


def make_one(
    folder: Path, seed: int, kind: str, changes: Callable[[np.random.Generator], dict[str, Any]], plant: Fault
) -> None:
    """Make one trace and its label."""
    draw = np.random.default_rng(seed)
    chosen = {
        name: between(draw, value.low, value.high) if isinstance(value, Between) else value
        for name, value in changes(draw).items()
    }
    population = usual(draw, **chosen)
    case = Case(population, seed)
    label = plant(case)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    case.write(folder / "trace")
    text = {
        "fault": label.fault,
        "also": list(label.also),
        "of_weights": label.of_weights,
        "detectable": label.detectable,
        "detail": label.detail,
        "kind": kind,
    }
    (folder / "label.json").write_text(json.dumps(text, indent=1) + "\n")


def fixed(changes: dict[str, Any], _: np.random.Generator) -> dict[str, Any]:
    """Give the same changes of the usual population whatever is drawn."""
    return changes


def everything(number_healthy: int) -> list[tuple[str, str, Callable[[np.random.Generator], dict[str, Any]], Fault]]:
    """List all traces: name, kind, changes of the usual population, and what is planted."""
    made: list[tuple[str, str, Callable[[np.random.Generator], dict[str, Any]], Fault]] = []
    kinds = list(HEALTHY)
    for number in range(number_healthy):
        kind = kinds[number % len(kinds)]
        made.append((f"healthy-{kind}-{number // len(kinds)}", kind, HEALTHY[kind], partial(healthy, kind=kind)))
    for name, changes, plant in PLAN:
        made.append((f"fault-{name}", name, partial(fixed, changes), plant))
    return made


def main() -> None:
    """Make the traces of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--healthy", type=int, default=300, help="number of healthy traces")
    parser.add_argument("--only", nargs="*", default=(), help="names, or beginnings of names, of the traces to make")
    options = parser.parse_args()
    for number, (name, kind, changes, plant) in enumerate(everything(options.healthy)):
        if options.only and not name.startswith(tuple(options.only)):
            continue
        started = time.perf_counter()
        make_one(options.output / name, options.seed * 1_000_003 + number * 101, kind, changes, plant)
        print(f"{name} {time.perf_counter() - started:.2f} s", flush=True)


if __name__ == "__main__":
    main()
