"""A suite of RL runs that collapse from a known cause: a recurrent policy, trained with GRPO in numpy.

The policy is a GRU over tokens. A prompt is a string of digits, and the answer is its copy, its reverse or its sorted
digits. The policy first learns the task from poor examples (the base model), then by GRPO: an engine samples a group of
responses to each prompt, a verifier rewards the share of correct tokens, and a trainer scores the same tokens again and
makes updates with PPO clipping and Adam. Every run is recorded with tim_trace.Recorder.

A run is a family (task, sizes, seeds, logged data) and a switch: settings that change at one step, some of them faults
in the engine, the verifier, the loss or the memory. Its twin is the family without the switch; random draws depend only
on (seed, purpose, step), so both are identical until then. The cause is known because only the switch differs. The
collapse is measured on held-out prompts, which the trainer's policy answers at temperature 1 for the true reward.
"""

from __future__ import annotations

import functools
import json
from collections import deque
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from tim_trace import Loss, Recorder
from truth import Member

Weights = dict[str, np.ndarray]

NUM_DIGITS = 8
SEPARATOR, END, PAD = NUM_DIGITS, NUM_DIGITS + 1, NUM_DIGITS + 2
VOCABULARY = NUM_DIGITS + 4
EVALUATE_EVERY = 2
NUM_EVALUATION_PROMPTS = 104
BASE_UPDATES, OFF_BY_ONE_SHARE, WRONG_TOKEN_SHARE = 1800, 0.55, 0.05

# purposes of random draws, each with its own stream per step
PROMPTS, SAMPLING, EVALUATION, ORDER, NOISE, EXAMPLES, WEIGHTS, MEMORY = range(8)


@dataclass(frozen=True)
class Settings:
    """Settings at one step of a run; the second half is healthy by default, and faults change it."""

    task: str = "copy"
    seed: int = 0
    num_steps: int = 120
    hidden_size: int = 56
    prompt_lengths: tuple[int, int] = (2, 4)
    prompt_digits: tuple[int, int] = (0, NUM_DIGITS)
    num_prompts: int = 12
    num_generations: int = 8
    num_minibatches: int = 2
    num_iterations: int = 1
    reward_range: tuple[float, float] = (0.0, 1.0)
    scale_rewards: bool = True
    learning_rate: float = 2e-3
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.99
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    epsilon: float = 0.2
    beta: float = 0.0
    entropy_coefficient: float = 0.0
    max_completion_length: int = 8
    denominator: str = "train"
    engine_precision: str = "float32"

    engine_temperature: float = 1.0
    engine_top_k: int = 0
    engine_cache_noise: float = 0.0
    engine_lag: int = 0
    engine_unsynchronised: tuple[str, ...] = ()
    reward_rule: str = "match"
    reward_noise: float = 0.0
    length_bonus: float = 0.0
    reward_rows: str = "own"
    advantage_rows: str = "own"
    advantage_scale: float = 1.0
    advantage_baseline: str = "group"
    advantage_std_floor: float = 1e-4
    reference: str = "base"
    update_targets: str = "own"
    zero_gradients: bool = True
    second_moments_lost_every: int = 0
    averaged_with_other: float = 0.0
    bit_flips: int = 0
    gates_swapped_at_restart: bool = False


@dataclass(frozen=True)
class Family:
    """Settings that a twin and its faulty runs share, and the data they record."""

    settings: Settings
    logged: tuple[str, ...] = ("loss", "grad_norm", "reward", "reward_std", "entropy", "completions/mean_length")
    logged_settings: tuple[str, ...] = ("learning_rate",)
    evaluation: str = ""
    evaluation_every: int = 10
    records_version: bool = True
    records_finish: bool = True


@dataclass(frozen=True)
class Run:
    """A family and the settings that change at the step `begins`; `announced`: also logged as hyperparameters."""

    family: str
    cause: str = "sound"
    detail: str = "nothing is wrong"
    begins: int = 1
    changes: dict[str, Any] = field(default_factory=dict)
    announced: bool = False


def generator(settings: Settings, purpose: int, step: int = 0) -> np.random.Generator:
    return np.random.default_rng([settings.seed, purpose, step])


# The policy


def initial_weights(hidden_size: int, draw: np.random.Generator) -> Weights:
    shapes = {
        "embedding": (VOCABULARY, 24),
        "input": (24, 3 * hidden_size),
        "recurrent": (hidden_size, 3 * hidden_size),
        "gate_bias": (3 * hidden_size,),
        "head": (hidden_size, VOCABULARY),
        "head_bias": (VOCABULARY,),
    }
    weights = {}
    for name, shape in shapes.items():
        scale = {"embedding": 0.5, "gate_bias": 0.0, "head_bias": 0.0}.get(name, shape[0] ** -0.5)
        weights[name] = (scale * draw.standard_normal(shape)).astype(np.float32)
    return weights


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * np.tanh(0.5 * x) + 0.5


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def gru_step(weights: Weights, projected: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the next state, and the inputs of the backward pass: both gates, the candidate and its recurrent part."""
    size = state.shape[1]
    recurrent = state @ weights["recurrent"]
    gates = sigmoid(projected[:, : 2 * size] + recurrent[:, : 2 * size])
    reset, keep = gates[:, :size], gates[:, size:]
    memory = recurrent[:, 2 * size :]
    candidate = np.tanh(projected[:, 2 * size :] + reset * memory)
    return candidate + keep * (state - candidate), reset, keep, candidate, memory


def project(weights: Weights, tokens: np.ndarray) -> np.ndarray:
    return (weights["embedding"] @ weights["input"] + weights["gate_bias"])[tokens]


def sample(
    weights: Weights,
    prompts: np.ndarray,
    max_tokens: int,
    draw: np.random.Generator,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    cache_noise: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return responses [B, T] padded after their end, their lengths, and the logprobs of the sampling distribution."""
    state = np.zeros((len(prompts), len(weights["recurrent"])), np.float32)
    for tokens in prompts.T[:-1]:
        state = np.where((tokens != PAD)[:, None], gru_step(weights, project(weights, tokens), state)[0], state)
    tokens = prompts[:, -1]
    responses = np.full((len(prompts), max_tokens), PAD)
    logprobs = np.zeros((len(prompts), max_tokens), np.float32)
    lengths = np.zeros(len(prompts), int)
    running = np.ones(len(prompts), bool)
    for position in range(max_tokens):
        state = gru_step(weights, project(weights, tokens), state)[0]
        if cache_noise:
            state = state + cache_noise * draw.standard_normal(state.shape).astype(np.float32)
        logits = (state @ weights["head"] + weights["head_bias"]) / np.float32(temperature)
        if top_k:
            logits = np.where(logits >= np.sort(logits, -1)[:, [-top_k]], logits, -np.inf)
        distribution = log_softmax(logits)
        cumulative = np.exp(distribution).cumsum(-1)
        drawn = draw.random((len(prompts), 1)) * cumulative[:, -1:]
        tokens = np.minimum((cumulative <= drawn).sum(-1), VOCABULARY - 1)
        responses[running, position] = tokens[running]
        logprobs[running, position] = distribution[running, tokens[running]]
        lengths += running
        running &= tokens != END
        if not running.any():
            break
    return responses, lengths, logprobs


@dataclass
class Forward:
    """Return the logprobs of all tokens at each response position, [B, T, V], and the inputs of the backward pass."""

    distribution: np.ndarray
    inputs: np.ndarray
    present: np.ndarray
    states: list[np.ndarray]
    parts: list[tuple[np.ndarray, ...]]
    outputs: np.ndarray


def forward(weights: Weights, prompts: np.ndarray, responses: np.ndarray) -> Forward:
    inputs = np.concatenate([prompts, responses[:, :-1]], 1).T
    present = (inputs != PAD)[..., None]
    projected = project(weights, inputs)
    states, parts = [np.zeros((len(prompts), len(weights["recurrent"])), np.float32)], []
    for place in range(len(inputs)):
        state, *rest = gru_step(weights, projected[place], states[-1])
        states.append(np.where(present[place], state, states[-1]))
        parts.append(tuple(rest))
    outputs = np.stack(states[prompts.shape[1] :], 1)
    distribution = log_softmax(outputs @ weights["head"] + weights["head_bias"])
    return Forward(distribution, inputs, present, states, parts, outputs)


def backward(weights: Weights, done: Forward, logit_gradient: np.ndarray) -> Weights:
    size = len(weights["recurrent"])
    num_places, num_rows = done.inputs.shape
    num_responses = logit_gradient.shape[1]
    flat = logit_gradient.reshape(-1, VOCABULARY)
    gradient = {"head": done.outputs.reshape(-1, size).T @ flat, "head_bias": flat.sum(0)}
    output_gradient = logit_gradient @ weights["head"].T
    gate_gradient = np.zeros((num_places, num_rows, 3 * size), np.float32)
    recurrent_gradient = np.zeros_like(weights["recurrent"])
    state_gradient = np.zeros((num_rows, size), np.float32)
    for place in reversed(range(num_places)):
        if place >= num_places - num_responses:
            state_gradient = state_gradient + output_gradient[:, place - num_places + num_responses]
        reset, keep, candidate, memory = done.parts[place]
        here = np.where(done.present[place], state_gradient, 0)
        candidate_gradient = here * (1 - keep) * (1 - candidate**2)
        keep_gradient = here * (done.states[place] - candidate) * keep * (1 - keep)
        reset_gradient = candidate_gradient * memory * reset * (1 - reset)
        gate_gradient[place] = np.concatenate([reset_gradient, keep_gradient, candidate_gradient], 1)
        through = np.concatenate([reset_gradient, keep_gradient, candidate_gradient * reset], 1)
        recurrent_gradient += done.states[place].T @ through
        state_gradient = state_gradient - here + here * keep + through @ weights["recurrent"].T
    by_token = np.zeros((VOCABULARY, 3 * size), np.float32)
    for token in range(VOCABULARY):
        by_token[token] = gate_gradient[done.inputs == token].sum(0)
    gradient["recurrent"] = recurrent_gradient
    gradient["gate_bias"] = by_token.sum(0)
    gradient["input"] = weights["embedding"].T @ by_token
    gradient["embedding"] = by_token @ weights["input"].T
    return gradient


def taken(distribution: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return np.take_along_axis(distribution, tokens[..., None], -1)[..., 0]


class Adam:
    """AdamW, preceded by gradient clipping by norm."""

    def __init__(self, weights: Weights) -> None:
        self.first = {name: np.zeros_like(value) for name, value in weights.items()}
        self.second = {name: np.zeros_like(value) for name, value in weights.items()}
        self.count = 0

    def update(self, weights: Weights, gradient: Weights, settings: Settings) -> float:
        """Update the weights and return the gradient norm before clipping."""
        norm = float(np.sqrt(sum(float((value**2).sum()) for value in gradient.values())))
        clip = min(1.0, settings.max_grad_norm / (norm + 1e-6))
        self.count += 1
        first_correction = 1 - settings.adam_beta1**self.count
        second_correction = 1 - settings.adam_beta2**self.count
        for name, value in gradient.items():
            value = value * np.float32(clip)
            self.first[name] += np.float32(1 - settings.adam_beta1) * (value - self.first[name])
            self.second[name] += np.float32(1 - settings.adam_beta2) * (value**2 - self.second[name])
            scale = np.sqrt(self.second[name] / second_correction) + settings.adam_epsilon
            change = self.first[name] / first_correction / scale + settings.weight_decay * weights[name]
            weights[name] = (weights[name] - settings.learning_rate * change).astype(np.float32)
        return norm


# The task


def is_held_out(digits: tuple[int, ...]) -> bool:
    return sum((place + 3) * digit for place, digit in enumerate(digits)) % 7 == 0


def make_prompts(settings: Settings, number: int, draw: np.random.Generator, held_out: bool = False) -> list[tuple]:
    prompts: list[tuple[int, ...]] = []
    while len(prompts) < number:
        length = int(draw.integers(settings.prompt_lengths[0], settings.prompt_lengths[1] + 1))
        digits = tuple(draw.integers(*settings.prompt_digits, length).tolist())
        if is_held_out(digits) == held_out:
            prompts.append(digits)
    return prompts


def answer(task: str, digits: tuple[int, ...]) -> tuple[int, ...]:
    return {"copy": digits, "reverse": digits[::-1], "sort": tuple(sorted(digits))}[task]


def other_task(task: str) -> str:
    return "reverse" if task == "copy" else "copy"


def padded(rows: list[tuple[int, ...]], width: int, left: bool = False) -> np.ndarray:
    fill = [(PAD,) * (width - len(row)) for row in rows]
    return np.array([extra + row if left else row + extra for row, extra in zip(rows, fill, strict=True)])


def encode(prompts: list[tuple[int, ...]]) -> np.ndarray:
    """Return the prompt tokens, padded on the left."""
    return padded([(*digits, SEPARATOR) for digits in prompts], max(map(len, prompts)) + 1, left=True)


def true_rewards(task: str, prompts: list[tuple], responses: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the fraction of correct tokens, including the end token, relative to the longer of answer and response."""
    wanted = [(*answer(task, digits), END) for digits in prompts]
    width = max(responses.shape[1], max(map(len, wanted)))
    expected = padded(wanted, width)
    right = (expected[:, : responses.shape[1]] == responses) & (responses != PAD)
    return right.sum(1) / np.maximum(lengths, [len(row) for row in wanted])


@functools.cache
def base_model(task: str, hidden_size: int, prompt_lengths: tuple[int, int], seed: int) -> Weights:
    """Return weights trained on poor examples: in many, each digit is one too high, and some digits are wrong."""
    settings = Settings(task=task, seed=seed, prompt_lengths=prompt_lengths)
    weights = initial_weights(hidden_size, generator(settings, WEIGHTS))
    adam = Adam(weights)
    for count in range(BASE_UPDATES):
        draw = generator(settings, EXAMPLES, count)
        prompts = make_prompts(settings, 64, draw)
        targets = padded([(*answer(task, digits), END) for digits in prompts], prompt_lengths[1] + 1)
        added = (draw.random((len(prompts), 1)) < OFF_BY_ONE_SHARE).astype(int)
        wrong = draw.random(targets.shape) < WRONG_TOKEN_SHARE
        added = np.where(wrong, draw.integers(0, NUM_DIGITS, targets.shape), added)
        targets = np.where(targets < NUM_DIGITS, (targets + added) % NUM_DIGITS, targets)
        counts = (targets != PAD)[..., None]
        done = forward(weights, encode(prompts), targets)
        wanted = np.eye(VOCABULARY, dtype=np.float32)[targets]
        gradient = backward(weights, done, counts * (np.exp(done.distribution) - wanted) / counts.sum())
        adam.update(weights, gradient, replace(settings, learning_rate=6e-3 * (1 - count / BASE_UPDATES)))
    return weights


def evaluate(weights: Weights, settings: Settings, step: int) -> float:
    """Return the mean true reward (0 to 1) on this step's held-out prompts, sampled with the trainer's own weights."""
    prompts = make_prompts(settings, NUM_EVALUATION_PROMPTS, generator(settings, EVALUATION), held_out=True)
    draw = generator(settings, EVALUATION, 1 + step)
    responses, lengths, _ = sample(weights, encode(prompts), settings.max_completion_length, draw)
    return float(true_rewards(settings.task, prompts, responses, lengths).mean())


# The engine


def rounded(value: np.ndarray, precision: str) -> np.ndarray:
    """Round float32 numbers to `bfloat16`, or to `intN` with one scale per tensor."""
    if precision == "float32":
        return value
    if precision == "bfloat16":
        bits = value.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    scale = np.abs(value).max() / (2 ** (int(precision.removeprefix("int")) - 1) - 1)
    return (np.round(value / scale) * scale).astype(np.float32)


class Engine:
    """The sampling side, with copies of the trainer's weights, which may be entirely or partly outdated."""

    def __init__(self) -> None:
        self.copies: deque[tuple[int, Weights]] = deque(maxlen=64)
        self.served: Weights = {}

    def synchronise(self, weights: Weights, version: int, settings: Settings) -> int:
        """Load the trainer's weights and return the policy version that is served."""
        self.copies.append(
            (version, {name: rounded(value, settings.engine_precision) for name, value in weights.items()})
        )
        served_version, newest = self.copies[max(0, len(self.copies) - 1 - settings.engine_lag)]
        kept = {name: self.served[name] for name in settings.engine_unsynchronised if name in self.served}
        self.served = {**newest, **kept}
        return served_version

    def generate(self, prompts: np.ndarray, settings: Settings, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return sample(
            self.served,
            prompts,
            settings.max_completion_length,
            generator(settings, SAMPLING, step),
            temperature=settings.engine_temperature,
            top_k=settings.engine_top_k,
            cache_noise=settings.engine_cache_noise,
        )


# The verifier and the advantages


def pay(settings: Settings, prompts: list[tuple], responses: np.ndarray, lengths: np.ndarray, step: int) -> np.ndarray:
    """Return the verifier's rewards, in the run's range, for the rows to which it assigns them."""
    draw = generator(settings, NOISE, step)
    share = true_rewards(settings.task, prompts, responses, lengths)
    if settings.reward_rule == "inverted":
        share = 1 - share
    elif settings.reward_rule == "large_digits":
        share = ((responses >= NUM_DIGITS // 2) & (responses < NUM_DIGITS)).sum(1) / lengths
    share = share + settings.reward_noise * draw.standard_normal(len(share))
    share = share + settings.length_bonus * lengths / settings.max_completion_length
    low, high = settings.reward_range
    return (low + (high - low) * share)[rows_of(settings.reward_rows, lengths, settings)]


def rows_of(rows: str, lengths: np.ndarray, settings: Settings) -> np.ndarray:
    """Return, for each row, the row whose value it receives."""
    own = np.arange(len(lengths))
    if rows == "sorted_by_length":
        return np.argsort(lengths, kind="stable")
    if rows == "transposed":
        return own.reshape(-1, settings.num_generations).T.ravel()
    return own


def advantages_of(rewards: np.ndarray, lengths: np.ndarray, settings: Settings) -> np.ndarray:
    groups = rewards.reshape(-1, settings.num_generations)
    advantages = groups.copy()
    if settings.advantage_baseline == "group":
        advantages -= groups.mean(1, keepdims=True)
    elif settings.advantage_baseline == "group_twice":
        advantages -= 2 * groups.mean(1, keepdims=True)
    if settings.scale_rewards:
        advantages /= groups.std(1, ddof=1, keepdims=True) + settings.advantage_std_floor
    return settings.advantage_scale * advantages.ravel()[rows_of(settings.advantage_rows, lengths, settings)]


# The trainer


@dataclass
class Batch:
    """Sequences to train on. Each field has a row per sequence."""

    prompts: np.ndarray
    responses: np.ndarray
    counts: np.ndarray
    advantages: np.ndarray
    old: np.ndarray
    reference: np.ndarray | None

    def take(self, rows: np.ndarray) -> Batch:
        values = (getattr(self, each.name) for each in fields(self))
        return Batch(*(None if value is None else value[rows] for value in values))


class Trainer:
    """The learning side: the policy's weights, the optimizer and the reference."""

    def __init__(self, settings: Settings) -> None:
        self.base = self.base_of(settings)
        self.weights = {name: value.copy() for name, value in self.base.items()}
        self.adam = Adam(self.weights)
        self.gradient: Weights = {}
        self.restarted = False

    @staticmethod
    def base_of(settings: Settings, seed_offset: int = 0) -> Weights:
        return base_model(settings.task, settings.hidden_size, settings.prompt_lengths, settings.seed + seed_offset)

    def reference_weights(self, settings: Settings) -> Weights:
        if settings.reference == "other_task":
            return base_model(other_task(settings.task), settings.hidden_size, settings.prompt_lengths, settings.seed)
        return self.base

    def score(self, weights: Weights, prompts: np.ndarray, responses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the logprob of each token, and the entropy."""
        distribution = forward(weights, prompts, responses).distribution
        return taken(distribution, responses), -(np.exp(distribution) * distribution).sum(-1)

    def damage(self, settings: Settings, draw: np.random.Generator) -> None:
        """Apply faults in memory and restarts, which change weights or optimizer state outside of updates."""
        if settings.gates_swapped_at_restart and not self.restarted:
            self.restarted = True
            size = settings.hidden_size
            for name in ("input", "recurrent", "gate_bias"):
                reset, keep, rest = np.split(self.weights[name], [size, 2 * size], axis=-1)
                self.weights[name] = np.concatenate([keep, reset, rest], -1)
        for _ in range(settings.bit_flips):
            name = ("input", "recurrent", "head")[draw.integers(3)]
            bits = self.weights[name].view(np.uint32)
            bits.flat[draw.integers(bits.size)] ^= np.uint32(1 << 31)
        if settings.second_moments_lost_every and self.adam.count % settings.second_moments_lost_every == 0:
            self.adam.second = {name: np.zeros_like(value) for name, value in self.adam.second.items()}
        if settings.averaged_with_other:
            for name, other in self.base_of(settings, seed_offset=1000).items():
                self.weights[name] += np.float32(settings.averaged_with_other) * (other - self.weights[name])

    def update(self, settings: Settings, batch: Batch) -> dict[str, float]:
        """Perform one optimizer step on a minibatch and return its logged values."""
        done = forward(self.weights, batch.prompts, batch.responses)
        targets = np.roll(batch.responses, 1, axis=1) if settings.update_targets == "shifted" else batch.responses
        logprobs = taken(done.distribution, targets)
        probabilities = np.exp(done.distribution)
        entropy = -(probabilities * done.distribution).sum(-1)
        scale = batch.counts / batch.counts.sum()
        advantage = batch.advantages[:, None]

        ratio = np.exp(np.clip(logprobs - batch.old, -20, 20))
        low = (advantage < 0) & (ratio < 1 - settings.epsilon)
        high = (advantage > 0) & (ratio > 1 + settings.epsilon)
        clipped = np.clip(ratio, 1 - settings.epsilon, 1 + settings.epsilon)
        loss = -np.minimum(ratio * advantage, clipped * advantage)
        slope = np.where(low | high, 0, -advantage * ratio)
        logged = {
            "clip_ratio/low_mean": float((low * scale).sum()),
            "clip_ratio/high_mean": float((high * scale).sum()),
        }
        if batch.reference is not None:
            gap = np.clip(batch.reference - logprobs, -20, 20)
            divergence = np.exp(gap) - gap - 1
            loss = loss + settings.beta * divergence
            slope = slope + settings.beta * (1 - np.exp(gap))
            logged["kl"] = float((divergence * scale).sum())
        loss = loss - settings.entropy_coefficient * entropy

        logit_gradient = (scale * slope)[..., None] * (np.eye(VOCABULARY)[targets] - probabilities)
        entropy_gradient = -probabilities * (done.distribution + entropy[..., None])
        logit_gradient -= settings.entropy_coefficient * scale[..., None] * entropy_gradient
        gradient = backward(self.weights, done, logit_gradient.astype(np.float32))
        if self.gradient and not settings.zero_gradients:
            gradient = {name: value + self.gradient[name] for name, value in gradient.items()}
        self.gradient = gradient
        norm = self.adam.update(self.weights, gradient, settings)
        return {"loss": float((loss * scale).sum()), "grad_norm": norm, **logged}

    def train(self, settings: Settings, step: int, batch: Batch) -> dict[str, float]:
        """Perform all optimizer steps of one step and return the means of their logged values."""
        order = generator(settings, ORDER, step)
        updates = []
        for _ in range(settings.num_iterations):
            for rows in np.array_split(order.permutation(len(batch.prompts)), settings.num_minibatches):
                updates.append(self.update(settings, batch.take(rows)))
        self.damage(settings, generator(settings, MEMORY, step))
        return {name: float(np.mean([one[name] for one in updates])) for name in updates[0]}


# A run


RECORDED_SETTINGS = {
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "adam_epsilon": "adam_epsilon",
    "max_grad_norm": "max_grad_norm",
    "epsilon": "epsilon",
    "beta": "beta",
    "entropy_coefficient": "entropy_coef",
    "num_generations": "num_generations",
    "num_iterations": "num_iterations",
    "num_minibatches": "steps_per_generation",
    "max_completion_length": "max_completion_length",
    "scale_rewards": "scale_rewards",
    "num_steps": "max_steps",
    "seed": "seed",
    "engine_temperature": "temperature",
    "engine_top_k": "top_k",
}


def recordable(settings: Settings, names: Any) -> dict[str, Any]:
    values = {RECORDED_SETTINGS[name]: getattr(settings, name) for name in names}
    return {name: str(value) if isinstance(value, bool) else value for name, value in values.items()}


def record_settings(recorder: Recorder, settings: Settings) -> None:
    engine = {
        "engine": "numpy_gru_sampler",
        "dtype": settings.engine_precision,
        "temperature": settings.engine_temperature,
    }
    recorder.add_contract("rollout", engine)
    recorder.add_contract("train", {"engine": "numpy_gru_trainer", "dtype": "float32", "temperature": 1.0})
    if settings.beta:
        recorder.add_contract("reference", {"engine": "numpy_gru_trainer", "dtype": "float32", "temperature": 1.0})
    clip = {"clip_low": settings.epsilon, "clip_high": settings.epsilon, "aggregation": "token_mean"}
    recorder.add_loss(Loss(kind="ppo_clip", denominator=settings.denominator, kl_coefficient=settings.beta, **clip))
    recorder.add_hyperparameters(recordable(settings, RECORDED_SETTINGS))


def settings_at(run: Run, base: Settings, step: int) -> Settings:
    return replace(base, **run.changes) if step >= run.begins else base


def train_run(run: Run, family: Family, folder: Path) -> list[float]:
    """Train and record one run, and return its true evaluations."""
    base = family.settings
    trainer, engine = Trainer(base), Engine()
    announced = set(run.changes) & set(RECORDED_SETTINGS) if run.announced else set()
    evaluations = []
    with Recorder(folder) as recorder:
        at_start = settings_at(run, base, 1)
        record_settings(recorder, replace(base, **{name: getattr(at_start, name) for name in announced}))
        for step in range(1, base.num_steps + 1):
            settings = settings_at(run, base, step)
            if announced and step == run.begins > 1:
                recorder.add_hyperparameters(recordable(settings, sorted(announced)), step=step)
            version = engine.synchronise(trainer.weights, trainer.adam.count, settings)
            questions = make_prompts(settings, settings.num_prompts, generator(settings, PROMPTS, step))
            questions = [digits for digits in questions for _ in range(settings.num_generations)]
            prompts = encode(questions)
            responses, lengths, rollout = engine.generate(prompts, settings, step)
            counts = np.arange(responses.shape[1]) < lengths[:, None]
            finished = (responses == END).any(1)
            rewards = pay(settings, questions, responses, lengths, step)
            advantages = advantages_of(rewards, lengths, settings)
            train, entropy = trainer.score(trainer.weights, prompts, responses)

            batch = recorder.add_sequences(
                step=step,
                prompt_ids=prompts,
                prompt_attention_mask=prompts != PAD,
                response_ids=responses,
                response_attention_mask=counts,
                group_ids=np.arange(len(prompts)) // settings.num_generations,
                reward=rewards,
                advantage=advantages,
                temperature=base.engine_temperature,
                max_tokens=settings.max_completion_length,
                policy_version=version if family.records_version else None,
                finish_reason=np.where(finished, "stop", "length").tolist() if family.records_finish else None,
            )
            recorder.add_scores("rollout", batch, logprobs=rollout)
            recorder.add_scores("train", batch, logprobs=train, entropy=entropy, policy_version=trainer.adam.count)
            reference = None
            if settings.beta:
                reference, _ = trainer.score(trainer.reference_weights(settings), prompts, responses)
                recorder.add_scores("reference", batch, logprobs=reference, policy_version=0)

            old = rollout if settings.denominator == "rollout" else train
            trained = Batch(prompts, responses, counts, advantages, old, reference)
            metrics = trainer.train(settings, step, trained)
            spread = rewards.reshape(-1, settings.num_generations).std(1, ddof=1)
            gap = np.abs(rollout - train)[counts]
            metrics |= {
                "reward": float(rewards.mean()),
                "reward_std": float(spread.mean()),
                "frac_reward_zero_std": float((spread < 1e-8).mean()),
                "entropy": float(entropy[counts].mean()),
                "completions/mean_length": float(lengths.mean()),
                "completions/clipped_ratio": float(1 - finished.mean()),
                "sampling/sampling_logp_difference/mean": float(gap.mean()),
                "sampling/sampling_logp_difference/max": float(gap.max()),
            }
            shown = {name: metrics[name] for name in family.logged if name in metrics}
            if step % EVALUATE_EVERY == 0:
                evaluations.append(evaluate(trainer.weights, settings, step))
                if family.evaluation and step % family.evaluation_every == 0:
                    shown[family.evaluation] = evaluations[-1]
            recorder.add_metrics(step, shown | recordable(settings, family.logged_settings))
    return evaluations


def perform(run: Run, seed: int, folder: Path, models: Path) -> None:
    """Train and record one run. `seed` is added to the family's."""
    family = FAMILIES[run.family]
    family = replace(family, settings=replace(family.settings, seed=family.settings.seed + seed))
    evaluations = train_run(run, family, folder / "trace")
    (folder / "plan.json").write_text(json.dumps({"evaluations": [round(value, 5) for value in evaluations]}) + "\n")


def members(split: str, num_seeds: int | None = None) -> list[Member]:
    """Return all runs, for one seed or several. There is only one split."""
    twins = {run.family: name for name, run in RUNS.items() if run.cause == "sound"}
    found = []
    for seed in range(num_seeds or 1):
        end = f"-s{seed}" if seed else ""
        for name, run in RUNS.items():
            label = {
                "cause": run.cause, "detail": run.detail, "twin": twins[run.family] + end, "begins": run.begins,
                "intervention": len(run.changes) == 1,
            }  # fmt: skip
            found.append(Member(name=name + end, label=label, perform=functools.partial(perform, run, seed)))
    return found


# What is made

LENGTHS = ("completions/mean_length", "completions/clipped_ratio")
CLIPPED = ("clip_ratio/low_mean", "clip_ratio/high_mean")
GAPS = ("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max")

FAMILIES = {
    "copy": Family(
        Settings(task="copy", seed=11),
        logged=("loss", "grad_norm", "reward", "reward_std", "entropy", *LENGTHS, *CLIPPED),
        evaluation="eval/accuracy",
        records_version=False,
    ),
    "reverse": Family(
        Settings(task="reverse", seed=12, num_prompts=24, num_generations=4, reward_range=(-1.0, 1.0), beta=0.05),
        logged=("loss", "grad_norm", "kl", "reward", "entropy", *LENGTHS),
        logged_settings=(),
    ),
    "sort": Family(
        Settings(
            task="sort",
            seed=13,
            num_generations=6,
            reward_range=(0.0, 10.0),
            scale_rewards=False,
            engine_precision="bfloat16",
            num_steps=110,
        ),
        logged=("loss", "grad_norm", "reward", "reward_std", "frac_reward_zero_std", "entropy", *GAPS),
        evaluation="eval/accuracy",
        evaluation_every=4,
    ),
    "copy_reuse": Family(
        Settings(task="copy", seed=14, num_iterations=2, entropy_coefficient=0.002, num_steps=100),
        logged=("loss", "grad_norm", "reward", "entropy", *LENGTHS, *CLIPPED),
        logged_settings=("learning_rate", "entropy_coefficient"),
        records_finish=False,
    ),
    "reverse_bypass": Family(
        Settings(
            task="reverse", seed=15, num_prompts=10, denominator="rollout", engine_precision="bfloat16", num_steps=130
        ),
        logged=("loss", "grad_norm", "reward", "reward_std", *LENGTHS, *CLIPPED, *GAPS),
        logged_settings=("learning_rate", "weight_decay"),
        evaluation="eval/reward",
        evaluation_every=6,
    ),
    "sort_kl": Family(
        Settings(task="sort", seed=16, hidden_size=48, beta=0.01, num_steps=140, learning_rate=1.5e-3),
        logged=("loss", "grad_norm", "kl", "reward", "reward_std", "entropy", "completions/mean_length"),
        logged_settings=("learning_rate", "beta"),
    ),
}

RUNS = {
    "sound_copy": Run("copy"),
    "sound_reverse": Run("reverse"),
    "sound_sort": Run("sort"),
    "sound_copy_reuse": Run("copy_reuse"),
    "sound_reverse_bypass": Run("reverse_bypass"),
    "sound_sort_kl": Run("sort_kl"),
    "harmless_int8": Run("copy", "harmless", "engine weights in int8", 40, {"engine_precision": "int8"}),
    "harmless_lag": Run("reverse", "harmless", "engine one step behind", 30, {"engine_lag": 1}),
    "harmless_rate": Run("sort", "harmless", "learning rate up by half", 60, {"learning_rate": 3e-3}),
    "harmless_noise": Run("copy_reuse", "harmless", "some noise in the reward", 40, {"reward_noise": 0.05}),
    "harmless_prompts": Run("reverse_bypass", "harmless", "fewer kinds of digits", 60, {"prompt_digits": (0, 6)}),
    "harmless_temperature": Run("copy", "harmless", "engine at temperature 1.5", 40, {"engine_temperature": 1.5}),
    "harmless_top_k": Run("sort", "harmless", "engine keeps the five best tokens", 30, {"engine_top_k": 5}),
    "mismatch_int3": Run("reverse_bypass", "mismatch", "engine weights in int3", 45, {"engine_precision": "int3"}),
    "mismatch_parts": Run(
        "copy_reuse",
        "mismatch",
        "the engine updates only its head",
        10,
        {"engine_unsynchronised": ("embedding", "input", "recurrent", "gate_bias")},
    ),
    "mismatch_cache": Run("copy", "mismatch", "noise in the engine's cache", 35, {"engine_cache_noise": 1.5}),
    "stale_told": Run("sort", "staleness", "engine 25 steps behind, versions recorded", 20, {"engine_lag": 25}),
    "stale_untold": Run("copy", "staleness", "engine 25 steps behind, versions not recorded", 30, {"engine_lag": 25}),
    "rate_spike": Run("copy", "optimizer", "learning rate times 20", 60, {"learning_rate": 0.04}),
    "rate_high": Run("sort", "optimizer", "learning rate 0.04 from the start", 1, {"learning_rate": 0.04}, True),
    "weight_decay": Run("reverse_bypass", "optimizer", "weight decay 5", 50, {"weight_decay": 5.0}, True),
    "reward_inverted": Run("reverse", "reward", "verifier pays wrong answers", 60, {"reward_rule": "inverted"}),
    "reward_noise": Run("copy_reuse", "reward", "rewards mostly noise", 30, {"reward_noise": 3.0}),
    "reward_digits": Run("sort_kl", "reward", "verifier pays large digits", 70, {"reward_rule": "large_digits"}),
    "length_longer": Run("copy", "length", "long responses pay", 8, {"length_bonus": 4.0}),
    "length_shorter": Run("reverse_bypass", "length", "short responses pay", 12, {"length_bonus": -4.0}),
    "pairing_rewards": Run("sort", "pairing", "rewards of a transposed batch", 40, {"reward_rows": "transposed"}),
    "pairing_lengths": Run(
        "copy_reuse", "pairing", "advantages in the order of lengths", 40, {"advantage_rows": "sorted_by_length"}
    ),
    "entropy_bonus": Run("copy", "entropy", "entropy bonus 1.5", 50, {"entropy_coefficient": 1.5}, True),
    "entropy_early": Run("copy_reuse", "entropy", "entropy bonus 0.8", 25, {"entropy_coefficient": 0.8}),
    "data_longer": Run("copy", "data", "longer prompts", 60, {"prompt_lengths": (5, 7)}),
    "data_harder": Run("reverse_bypass", "data", "longer prompts", 70, {"prompt_lengths": (5, 6)}),
    "truncation_told": Run("reverse", "truncation", "two tokens at most", 60, {"max_completion_length": 2}, True),
    "truncation_untold": Run("copy_reuse", "truncation", "three tokens at most", 50, {"max_completion_length": 3}),
    "reference_beta": Run("sort_kl", "reference", "KL coefficient times 500", 60, {"beta": 5.0}),
    "reference_wrong": Run(
        "reverse",
        "reference",
        "reference model of another task, with coefficient 1",
        50,
        {"reference": "other_task", "beta": 1.0},
    ),
    "advantage_sign": Run("copy", "advantages", "sign flipped", 65, {"advantage_scale": -1.0}),
    "advantage_twice": Run(
        "copy", "advantages", "baseline subtracted twice", 60, {"advantage_baseline": "group_twice"}
    ),
    "restart_gates": Run(
        "sort_kl", "other", "gates swapped when a checkpoint is read", 100, {"gates_swapped_at_restart": True}
    ),
    "memory_bits": Run("reverse_bypass", "other", "sign bits of weights flip", 50, {"bit_flips": 20}),
    "gradients_kept": Run("copy_reuse", "other", "gradients are never zeroed", 40, {"zero_gradients": False}),
    "targets_shifted": Run("sort", "other", "loss targets shifted by one position", 60, {"update_targets": "shifted"}),
    "ranks_apart": Run(
        "reverse", "other", "averaged with a rank that has different weights", 50, {"averaged_with_other": 0.1}
    ),
    "moments_lost": Run(
        "sort_kl", "other", "second moments lost every 10 updates", 60, {"second_moments_lost_every": 10}
    ),
}
