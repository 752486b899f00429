"""A laboratory of collapsed RL runs: PPO with a learned critic, and REINFORCE with other baselines, in numpy.

A small network answers prompts token by token. An engine samples with weights that it gets from the trainer; the
trainer scores the same tokens, takes advantages (generalised advantage estimation on a value head, a running
baseline, a batch's or a group's mean), and makes several updates a step. Before RL the network is fitted to
demonstrations that are often wrong, so that the reward has room to rise. A run is a sound base with at most one
switch: settings that take other values from some step on, or an event that happens once. All random draws have
generators of their own, so that a run and its sound twin are the same bit for bit up to the switch. Each run is
recorded by tim_trace.Recorder, and judged by the true grade on held-out prompts.

    python actor_critic.py -o FOLDER [--only NAME ...] [--seed N]
"""

import argparse
import json
import time
from collections import deque
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from actor_critic_policy import (
    END,
    EQUALS,
    LOOKUP,
    NETWORKS,
    NUM_TOKENS,
    PAD,
    TASKS,
    Network,
    Optimizer,
    Prompt,
    Task,
    log_softmax,
    padded,
)
from tim_trace import Loss, Recorder

EVALUATION_EVERY = 4
NUM_EVALUATION_PROMPTS = 192


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run; what a switch changes is among it."""

    task: str
    network: str = "gated-mlp"
    seed: int = 0
    num_steps: int = 150
    num_groups: int = 12
    group_size: int = 8
    pool: int = 0  # prompts that are drawn from again and again; 0: each prompt is new
    fit_updates: int = 500
    fit_noise: float = 0.25

    estimator: str = "gae"  # or "running", "batch", "group"
    gae_lambda: float = 0.95
    clip: float | None = 0.2  # None: plain REINFORCE
    epochs: int = 2
    mini_batches: int = 3
    entropy_coefficient: float = 0.0
    value_coefficient: float = 0.5
    kl_coefficient: float = 0.0
    kl_in: str = "loss"  # or "reward"
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    reward_low: float = 0.0
    reward_high: float = 1.0

    max_tokens: int | None = None
    temperature: float = 1.0
    engine_temperature: float | None = None  # what the engine really samples with
    engine_top_p: float = 1.0
    engine_bits: int | None = None  # of the mantissa of its weights
    engine_noise: float = 0.0  # on the state in its cache
    engine_unsynchronised: tuple[str, ...] = ()
    synchronise_every: int = 1
    lag: int = 0  # steps by which the engine's weights are older
    prompt_shift: float = 0.0
    tool_works: bool = True
    reward_sign: float = 1.0
    reward_noise: float = 0.0  # share of rewards that are exchanged for a coin's
    reward_token: int | None = None  # pays the share of this token in the response, and nothing else
    length_bonus: float = 0.0
    rewards_on: str = "own rows"  # or "next group", "shuffled", "sorted by length"
    advantages_on: str = "own rows"
    advantage_scale: float = 1.0
    baseline_offset: float = 0.0  # in standard deviations of the advantages
    reference: str = "initial"  # or "other"
    dropout: float = 0.0  # in the update alone
    zero_gradients: bool = True


@dataclass(frozen=True)
class Log:
    """What a team writes down, and under which names."""

    metrics: dict[str, str] = field(default_factory=dict)
    hyperparameters: dict[str, str] = field(default_factory=dict)
    loss: bool = False
    finish_reason: bool = False
    policy_version: bool = True
    entropy: bool = False
    temperature: bool = False


FULL = Log(
    metrics={
        "reward": "critic/score/mean",
        "loss": "actor/pg_loss",
        "gradient_norm": "actor/grad_norm",
        "entropy": "actor/entropy",
        "value_loss": "critic/vf_loss",
        "clip_fraction": "actor/pg_clipfrac",
        "update_kl": "actor/ppo_kl",
        "learning_rate": "actor/lr",
        "length": "response_length/mean",
        "evaluation": "val/accuracy",
        "reference_kl": "actor/kl_loss",
    },
    hyperparameters={
        "learning_rate": "actor.optim.lr",
        "weight_decay": "actor.optim.weight_decay",
        "clip_norm": "actor.grad_clip",
        "entropy_coefficient": "actor.entropy_coeff",
        "kl_coefficient": "actor.kl_loss_coef",
        "clip": "actor.clip_ratio",
        "estimator": "algorithm.adv_estimator",
        "gae_lambda": "algorithm.lam",
        "group_size": "rollout.n",
        "max_tokens": "data.max_response_length",
        "temperature": "rollout.temperature",
        "epochs": "actor.ppo_epochs",
        "synchronise_every": "rollout.weight_sync_interval",
        "beta2": "actor.optim.beta2",
        "length_bonus": "reward.length_bonus",
    },
    loss=True,
    finish_reason=True,
    entropy=True,
)
BASELINES = Log(
    metrics={
        "reward": "rollout/ep_rew_mean",
        "length": "rollout/ep_len_mean",
        "value_loss": "train/value_loss",
        "update_kl": "train/approx_kl",
        "clip_fraction": "train/clip_fraction",
        "loss": "train/policy_gradient_loss",
        "explained_variance": "train/explained_variance",
    },
    hyperparameters={
        "learning_rate": "learning_rate",
        "clip": "clip_range",
        "entropy_coefficient": "ent_coef",
        "epochs": "n_epochs",
        "value_coefficient": "vf_coef",
        "gae_lambda": "gae_lambda",
        "clip_norm": "max_grad_norm",
        "seed": "seed",
        "weight_decay": "weight_decay",
        "beta1": "momentum",
    },
    loss=True,
)
TRAINER = Log(
    metrics={
        "loss": "loss",
        "gradient_norm": "grad_norm",
        "learning_rate": "learning_rate",
        "reference_kl": "kl",
        "length": "completions/mean_length",
        "reward": "reward",
        "evaluation": "eval/reward",
        "entropy": "entropy",
    },
    hyperparameters={
        "learning_rate": "learning_rate",
        "kl_coefficient": "beta",
        "group_size": "num_generations",
        "max_tokens": "max_completion_length",
        "temperature": "temperature",
        "weight_decay": "weight_decay",
        "epochs": "num_iterations",
        "clip_norm": "max_grad_norm",
        "beta2": "adam_beta2",
        "clip": "epsilon",
        "synchronise_every": "vllm_sync_steps",
        "reference": "ref_model",
    },
    finish_reason=True,
    loss=True,
    temperature=True,
)
OWN = Log(
    metrics={"loss": "loss", "gradient_norm": "gnorm", "entropy": "H", "evaluation": "eval/accuracy"},
    hyperparameters={
        "learning_rate": "lr",
        "entropy_coefficient": "ent",
        "kl_coefficient": "kl",
        "optimizer": "opt",
        "seed": "seed",
        "max_tokens": "max_len",
        "beta1": "momentum",
        "weight_decay": "wd",
        "synchronise_every": "sync_every",
    },
)
SHORT = Log(
    metrics={"loss": "loss", "reward": "mean_reward"},
    hyperparameters={"learning_rate": "lr", "task": "task"},
    policy_version=False,
)
BARE = Log(policy_version=False, finish_reason=True)


@dataclass(frozen=True)
class Run:
    """A base, and the switch that makes it something else."""

    base: str
    cause: str = "sound"
    detail: str = ""
    begins: int = 1
    switch: dict[str, Any] = field(default_factory=dict)
    event: str | None = None
    ends: int | None = None  # the first step that has the old settings again
    record: str = "nothing"  # how the team records the change: "hyperparameters", "metrics" or not at all
    log: Log | None = None


def rounded(flat: np.ndarray, bits: int) -> np.ndarray:
    """Keep so many bits of each mantissa."""
    mantissa, exponent = np.frexp(flat)
    return np.ldexp(np.round(mantissa * 2**bits) / 2**bits, exponent).astype(np.float32)


def tool_token(task: Task, prompt: Prompt, works: bool) -> int:
    """Give what the lookup tool answers; one that broke down answers every call alike."""
    return task.answer(prompt)[1] if works else EQUALS


@dataclass
class Rollout:
    prompts: list[Prompt]
    tokens: np.ndarray  # [B, T]
    logprobs: np.ndarray  # [B, T], of the engine
    lengths: np.ndarray
    given: np.ndarray  # [B, T] bool, by the tool
    finished: np.ndarray

    @property
    def exists(self) -> np.ndarray:
        return np.arange(self.tokens.shape[1]) < self.lengths[:, None]

    @property
    def responses(self) -> list[list[int]]:
        return [row[:length].tolist() for row, length in zip(self.tokens, self.lengths, strict=True)]


def sample(net: Network, flat: np.ndarray, prompts: list[Prompt], rng: np.random.Generator, s: Settings) -> Rollout:
    """Sample a response to each prompt, as the engine does under the settings `s`."""
    task, p = net.task, net.views(flat)
    limit, count = s.max_tokens or task.max_tokens, len(prompts)
    tokens = np.full((count, task.max_tokens), PAD)
    logprobs = np.zeros(tokens.shape, np.float32)
    given = np.zeros(tokens.shape, bool)
    lengths = np.zeros(count, int)
    open_rows = np.ones(count, bool)
    uniform = rng.random(tokens.shape)
    noise = s.engine_noise * rng.normal(0, 1, (count, net.width)).astype(np.float32) if s.engine_noise else None
    state = net.start(p, padded(prompts, task.prompt_length))
    for place in range(limit):
        logits = net.logits(p, state, noise) / (s.engine_temperature or s.temperature)
        if s.engine_top_p < 1:
            ordered = -np.sort(-np.exp(log_softmax(logits)), axis=1)
            last = (ordered.cumsum(axis=1) < s.engine_top_p).sum(axis=1, keepdims=True)
            least = np.take_along_axis(ordered, np.minimum(last, NUM_TOKENS - 1), axis=1)
            logits = np.where(np.exp(log_softmax(logits)) >= least, logits, -1e9)
        scores = log_softmax(logits)
        chosen = (np.exp(scores).cumsum(axis=1) < uniform[:, place, None]).sum(axis=1)
        chosen = np.minimum(chosen, NUM_TOKENS - 1)
        if task.has_tool and place:
            for row in np.flatnonzero(open_rows & (tokens[:, place - 1] == LOOKUP) & ~given[:, place - 1]):
                chosen[row], given[row, place] = tool_token(task, prompts[row], s.tool_works), True
        tokens[open_rows, place] = chosen[open_rows]
        logprobs[open_rows, place] = scores[np.arange(count), chosen][open_rows]
        lengths += open_rows
        open_rows = open_rows & (chosen != END)
        if not open_rows.any():
            break
        state = net.advance(p, state, chosen)
    return Rollout(prompts, tokens, np.minimum(logprobs, 0), lengths, given, ~open_rows)


def grades(task: Task, rollout: Rollout) -> np.ndarray:
    """Grade by the task's own rule."""
    pairs = zip(rollout.responses, rollout.prompts, strict=True)
    return np.array([task.grade(response, task.answer(prompt)) for response, prompt in pairs])


def demonstration(task: Task, prompt: Prompt, rng: np.random.Generator, noise: float) -> list[int]:
    """Answer, with tokens exchanged, too many or missing at the rate `noise`."""
    wrong = [
        int(rng.choice(task.alphabet)) if token in task.alphabet and rng.random() < noise else token
        for token in task.answer(prompt)
    ]
    if rng.random() < noise / 2 and len(wrong) < task.max_tokens:
        wrong.insert(len(wrong) - 1, int(rng.choice(task.alphabet)))
    elif rng.random() < noise / 3 and not task.has_tool:
        wrong = [*wrong[: int(rng.integers(1, len(wrong)))], END]
    return wrong


@lru_cache(maxsize=2)
def fitted(task_name: str, network: str, seed: int, updates: int, noise: float) -> tuple[Network, np.ndarray]:
    """Fit a network to demonstrations, as a model is before RL."""
    task = TASKS[task_name]
    net, rng = NETWORKS[network](task), np.random.default_rng([seed, 1])
    flat = net.initial(rng)
    optimizer = Optimizer("adam", net.size)
    for update in range(updates):
        prompts = [task.draw(rng, 0.0) for _ in range(96)]
        shown = [demonstration(task, prompt, rng, noise) for prompt in prompts]
        tokens = np.array([one + [PAD] * (task.max_tokens - len(one)) for one in shown])
        weight = (tokens != PAD).astype(np.float32) / len(prompts)
        if task.has_tool:
            weight[:, 1] = 0
        logits, _, cache = net.forward(net.views(flat), padded(prompts, task.prompt_length), tokens)
        d_logits = (np.exp(log_softmax(logits)) - np.eye(NUM_TOKENS)[tokens]) * weight[..., None]
        grad = net.backward(net.views(flat), cache, d_logits.astype(np.float32), np.zeros(tokens.shape, np.float32))
        optimizer.update(flat, grad, 6e-3 * (1 - 0.9 * update / updates), 0.9, 0.99, 1e-8, 0.0)
    return net, flat


class Trainer:
    """One run: its weights, its optimizer, its engine and what it remembers from step to step."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.net, flat = fitted(
            settings.task, settings.network, settings.seed, settings.fit_updates, settings.fit_noise
        )
        self.task = self.net.task
        self.flat = flat.copy()
        self.references = {"initial": flat.copy(), "other": self.net.initial(np.random.default_rng([settings.seed, 9]))}
        self.optimizer = Optimizer(settings.optimizer, self.net.size)
        self.kept_gradient = np.zeros(self.net.size, np.float32)
        self.engine, self.engine_version = flat.copy(), 0
        self.past: deque[tuple[np.ndarray, int]] = deque(maxlen=128)
        self.running_mean: float | None = None
        self.running_square = 0.0
        names = ("prompts", "sampling", "batches", "fault", "dropout")
        self.rng = {name: np.random.default_rng([settings.seed, 2, place]) for place, name in enumerate(names)}
        self.pool = [self.task.draw(self.rng["prompts"], 0.0) for _ in range(settings.pool)]

    def draw_prompts(self, s: Settings) -> list[Prompt]:
        """Draw a group's prompt once and repeat it."""
        rng = self.rng["prompts"]
        if self.pool and not s.prompt_shift:
            drawn = [self.pool[int(rng.integers(len(self.pool)))] for _ in range(s.num_groups)]
        else:
            drawn = [self.task.draw(rng, s.prompt_shift) for _ in range(s.num_groups)]
        return [prompt for prompt in drawn for _ in range(s.group_size)]

    def synchronise(self, s: Settings, step: int) -> np.ndarray:
        """Give the engine the trainer's weights, or what the settings let it have, and return them."""
        self.past.append((self.flat.copy(), self.optimizer.num_updates))
        if step % s.synchronise_every == 0 or step == 1:
            source, version = self.past[max(0, len(self.past) - 1 - s.lag)]
            before = self.net.views(self.engine.copy())
            self.engine, self.engine_version = source.copy(), version
            for name in s.engine_unsynchronised:
                self.net.views(self.engine)[name][:] = before[name]
        return self.engine if s.engine_bits is None else rounded(self.engine, s.engine_bits)

    def rewards(self, rollout: Rollout, s: Settings) -> np.ndarray:
        """Pay each response, as the verifier does under the settings `s`."""
        graded = grades(self.task, rollout)
        rng = self.rng["fault"]
        coins = rng.random((2, len(graded)))
        graded = np.where(coins[0] < s.reward_noise, coins[1] < 0.5, graded)
        if s.reward_token is not None:
            graded = (rollout.tokens == s.reward_token).sum(axis=1) / rollout.lengths
        if s.reward_sign < 0:
            graded = 1 - graded
        graded = graded + s.length_bonus * rollout.lengths
        return s.reward_low + (s.reward_high - s.reward_low) * graded[self.rows(rollout, s, s.rewards_on)]

    def rows(self, rollout: Rollout, s: Settings, order: str) -> np.ndarray:
        """Name the row whose value each row gets."""
        own = np.arange(len(rollout.lengths))
        if order == "next group":
            return np.roll(own, s.group_size)
        if order == "sorted by length":
            return np.argsort(rollout.lengths, kind="stable")
        if order == "shuffled":
            return self.rng["fault"].permutation(own)
        return own

    def advantages(self, rollout: Rollout, rewards: np.ndarray, values: np.ndarray, gap: np.ndarray, s: Settings):
        """Give the advantages [B, T] and the critic's targets; `gap` is the trainer's less the reference's."""
        exists = rollout.exists
        returns = np.zeros(values.shape, np.float32)
        if s.estimator == "gae":
            paid = -s.kl_coefficient * gap * exists if s.kl_in == "reward" else np.zeros(values.shape, np.float32)
            paid[np.arange(len(rewards)), rollout.lengths - 1] += rewards
            found, after, carried = np.zeros_like(returns), np.zeros(len(rewards)), np.zeros(len(rewards))
            for place in range(values.shape[1] - 1, -1, -1):
                here = exists[:, place]
                delta = paid[:, place] + after - values[:, place]
                carried = np.where(here, delta + s.gae_lambda * carried, 0)
                after = np.where(here, values[:, place], 0)
                found[:, place] = carried
            returns = found + values * exists
            found = (found - found[exists].mean()) / (found[exists].std() + 1e-6)
        else:
            found = self.sequence_advantages(rewards, s)[:, None] * np.ones(values.shape)
        found = s.advantage_scale * (found - s.baseline_offset)[self.rows(rollout, s, s.advantages_on)]
        return np.where(exists, found, 0).astype(np.float32), returns.astype(np.float32)

    def sequence_advantages(self, rewards: np.ndarray, s: Settings) -> np.ndarray:
        """Compare each sequence's reward with the baseline of the settings."""
        span = s.reward_high - s.reward_low
        if s.estimator == "running":
            if self.running_mean is None:
                self.running_mean, self.running_square = float(rewards.mean()), float(rewards.var())
            centred = rewards - self.running_mean
            found = centred / (np.sqrt(self.running_square) + 0.1 * span)
            self.running_mean += 0.1 * float(centred.mean())
            self.running_square += 0.1 * (float((centred**2).mean()) - self.running_square)
            return found
        if s.estimator == "batch":
            return (rewards - rewards.mean()) / (rewards.std() + 0.05 * span)
        grouped = rewards.reshape(-1, s.group_size)
        return ((grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, keepdims=True) + 0.05 * span)).reshape(-1)

    def score(self, flat: np.ndarray, rollout: Rollout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Score a rollout's tokens with some weights: log-probabilities, entropies and values, [B, T] each."""
        prompts = padded(rollout.prompts, self.task.prompt_length)
        logits, values, _ = self.net.forward(self.net.views(flat), prompts, rollout.tokens)
        scores = log_softmax(logits / self.settings.temperature)
        taken = np.take_along_axis(scores, rollout.tokens[..., None], axis=-1)[..., 0]
        return np.minimum(taken, 0), -(np.exp(scores) * scores).sum(axis=-1), values

    def update(self, rollout, old, reference, advantages, returns, s: Settings) -> dict[str, float]:
        """Make the step's updates, and return the means of what can be logged of them."""
        counts = (rollout.exists & ~rollout.given).astype(np.float32)
        prompts = padded(rollout.prompts, self.task.prompt_length)
        seen: list[dict[str, float]] = []
        for _ in range(s.epochs):
            for rows in np.array_split(self.rng["batches"].permutation(len(counts)), s.mini_batches):
                keep = None
                if s.dropout:
                    shape = (len(rows), 1, self.net.width)
                    keep = (self.rng["dropout"].random(shape) >= s.dropout).astype(np.float32) / (1 - s.dropout)
                weight = counts[rows]
                num_tokens = max(float(weight.sum()), 1.0)
                weight = weight / num_tokens
                p = self.net.views(self.flat)
                logits, values, cache = self.net.forward(p, prompts[rows], rollout.tokens[rows], keep)
                scores = log_softmax(logits / s.temperature)
                probs = np.exp(scores)
                taken = np.take_along_axis(scores, rollout.tokens[rows][..., None], axis=-1)[..., 0]
                ratio = np.exp(np.clip(taken - old[rows], -20, 20))
                advantage = advantages[rows]
                free = np.ones(ratio.shape, bool)
                if s.clip is not None:
                    free = ~(((advantage > 0) & (ratio > 1 + s.clip)) | ((advantage < 0) & (ratio < 1 - s.clip)))
                d_taken = -ratio * advantage * free
                if reference is not None and s.kl_in == "loss":
                    d_taken = d_taken + s.kl_coefficient * (1 - np.exp(np.clip(reference[rows] - taken, -20, 20)))
                entropy = -(probs * scores).sum(axis=-1)
                d_logits = -probs * (d_taken * weight)[..., None]
                chosen = np.eye(NUM_TOKENS, dtype=np.float32)[rollout.tokens[rows]]
                d_logits += chosen * (d_taken * weight)[..., None]
                d_logits += s.entropy_coefficient * probs * (scores + entropy[..., None]) * weight[..., None]
                error = values - returns[rows]
                d_values = s.value_coefficient * error * weight if s.estimator == "gae" else np.zeros_like(error)
                grad = self.net.backward(p, cache, (d_logits / s.temperature).astype(np.float32), d_values)
                if not s.zero_gradients:
                    self.kept_gradient += grad
                    grad = self.kept_gradient.copy()
                norm = float(np.linalg.norm(grad))
                if norm > s.clip_norm:
                    grad *= s.clip_norm / norm
                self.optimizer.update(self.flat, grad, s.learning_rate, s.beta1, s.beta2, s.eps, s.weight_decay)
                seen.append(
                    {
                        "loss": float((-ratio * advantage * weight).sum()),
                        "gradient_norm": norm,
                        "entropy": float((entropy * weight).sum() / weight.sum()),
                        "value_loss": float((error**2 * weight).sum()),
                        "clip_fraction": float((~free * weight).sum()),
                        "update_kl": float(((old[rows] - taken) * weight).sum()),
                    }
                )
        return {name: float(np.mean([one[name] for one in seen])) for name in seen[0]}

    def happen(self, event: str) -> None:
        """Let something happen to the trainer once."""
        rng, views = self.rng["fault"], self.net.views(self.flat)
        if event == "bits flip":
            name = "up" if "up" in views else "recurrent"
            struck = rng.random(views[name].shape) < 0.05
            views[name][struck] *= 64
        elif event == "second moments lost":
            self.optimizer.second[:] = 0
        elif event == "first moments scaled":
            self.optimizer.first *= 300
        elif event == "rows permuted":
            views["head"][:] = views["head"][rng.permutation(self.net.width)]
        elif event == "layer initialised":
            fresh = self.net.views(self.net.initial(rng))
            for name in ("embedding", "up", "recurrent"):
                if name in views:
                    views[name][:] = fresh[name]

    def evaluate(self, step: int, cause: str, s: Settings) -> float:
        """Grade held-out prompts of the original task; under the run's conditions where these are the fault."""
        rng = np.random.default_rng([s.seed, 3, step])
        sound = self.settings
        if cause in ("data", "truncation", "other"):
            sound = replace(sound, prompt_shift=s.prompt_shift, max_tokens=s.max_tokens, tool_works=s.tool_works)
        prompts = [self.task.draw(rng, sound.prompt_shift) for _ in range(NUM_EVALUATION_PROMPTS)]
        return float(grades(self.task, sample(self.net, self.flat, prompts, rng, sound)).mean())


def start_record(recorder: Recorder, settings: Settings, log: Log) -> None:
    """Write down what is known before the first step."""
    recorder.add_contract("rollout", {"engine": "numpy-engine", "dtype": "float32", "logprobs": "processed"})
    recorder.add_contract("train", {"engine": "numpy-trainer", "dtype": "float32", "source": "recomputed"})
    known = {name: getattr(settings, ours) for ours, name in log.hyperparameters.items()}
    recorder.add_hyperparameters({name: value for name, value in known.items() if value is not None})
    if log.loss:
        clip = {"clip_low": settings.clip, "clip_high": settings.clip} if settings.clip else {}
        in_loss = settings.kl_coefficient if settings.kl_in == "loss" else 0.0
        kind = "ppo_clip" if settings.clip else "reinforce"
        recorder.add_loss(Loss(kind=kind, aggregation="token_mean", kl_coefficient=in_loss, **clip))


def record_step(recorder, step: int, rollout: Rollout, log: Log, s: Settings, given: dict[str, Any]) -> None:
    """Record the sequences of a step and what each side thought of their tokens."""
    lengths = rollout.lengths
    optional: dict[str, Any] = {}
    if log.finish_reason:
        optional["finish_reason"] = ["stop" if done else "length" for done in rollout.finished]
    if log.policy_version:
        optional["policy_version"] = given["engine_version"]
    if log.temperature:
        optional["temperature"] = s.temperature
    width = int(lengths.max())
    advantage = given["advantages"][:, :width] if s.estimator == "gae" else given["advantages"][:, 0]
    exists = rollout.exists[:, :width]
    counts = (exists & ~rollout.given[:, :width]).astype(int)
    batch = recorder.add_sequences(
        step=step,
        prompt_ids=[list(prompt) for prompt in rollout.prompts],
        response_ids=rollout.tokens[:, :width],
        response_attention_mask=exists.astype(int),
        response_mask=counts,
        group_ids=[str(row // s.group_size) for row in range(len(lengths))],
        reward=given["rewards"],
        advantage=advantage,
        **optional,
    )
    version = {"policy_version": given["trainer_version"]} if log.policy_version else {}
    entropy = {"entropy": given["entropies"][:, :width]} if log.entropy else {}
    recorder.add_scores("rollout", batch, logprobs=rollout.logprobs[:, :width], scored_mask=counts)
    recorder.add_scores("train", batch, logprobs=given["train"][:, :width], scored_mask=counts, **version, **entropy)
    if given["reference"] is not None:
        recorder.add_scores("reference", batch, logprobs=given["reference"][:, :width], scored_mask=counts)


def make(run: Run, settings: Settings, log: Log, path: Path) -> list[float]:
    """Train and record one run, and return its true evaluations."""
    trainer, evaluations = Trainer(settings), []
    named = {log.hyperparameters[ours]: value for ours, value in run.switch.items() if ours in log.hyperparameters}
    with Recorder(path, force=True) as recorder:
        start_record(recorder, settings, log)
        for step in range(1, settings.num_steps + 1):
            active = step >= run.begins and (run.ends is None or step < run.ends)
            s = replace(settings, **run.switch) if active else settings
            if run.event and step == run.begins:
                trainer.happen(run.event)
            if run.record == "hyperparameters" and step == run.begins and named:
                recorder.add_hyperparameters(named, step=step)
            weights = trainer.synchronise(s, step)
            rollout = sample(trainer.net, weights, trainer.draw_prompts(s), trainer.rng["sampling"], s)
            rewards = trainer.rewards(rollout, s)
            old, entropies, values = trainer.score(trainer.flat, rollout)
            reference = trainer.score(trainer.references[s.reference], rollout)[0] if settings.kl_coefficient else None
            gap = old - reference if reference is not None else np.zeros_like(old)
            advantages, returns = trainer.advantages(rollout, rewards, values, gap, s)
            record_step(
                recorder,
                step,
                rollout,
                log,
                s,
                {
                    "rewards": rewards,
                    "advantages": advantages,
                    "train": old,
                    "reference": reference,
                    "entropies": entropies,
                    "engine_version": trainer.engine_version,
                    "trainer_version": trainer.optimizer.num_updates,
                },
            )
            logged = trainer.update(rollout, old, reference, advantages, returns, s)
            exists = rollout.exists
            logged |= {
                "reward": float(rewards.mean()),
                "length": float(rollout.lengths.mean()),
                "learning_rate": s.learning_rate,
                "explained_variance": float(1 - np.var((returns - values)[exists]) / (np.var(returns[exists]) + 1e-9)),
            }
            if reference is not None:
                logged["reference_kl"] = float(gap[exists].mean())
            if step % EVALUATION_EVERY == 0:
                evaluations.append(trainer.evaluate(step, run.cause, s))
                logged["evaluation"] = evaluations[-1]
            metrics = {log.metrics[ours]: value for ours, value in logged.items() if ours in log.metrics}
            if run.record == "metrics":
                metrics |= {f"schedule/{name}": getattr(s, name) for name in run.switch}
            if metrics:
                recorder.add_metrics(step, metrics)
    return evaluations


def kept_share(evaluations: list[float]) -> float:
    """Give the mean of the last fifth over that of the best fifth."""
    fifth = len(evaluations) // 5
    means = np.convolve(evaluations, np.ones(fifth) / fifth, mode="valid")
    return float(means[-1] / means.max())


BASES: dict[str, tuple[Settings, Log]] = {
    "ppo-sum": (Settings("modular-sum", "gru", 11, pool=64, learning_rate=1e-3, entropy_coefficient=0.002), FULL),
    "ppo-brackets": (
        Settings("brackets", "gated-mlp", 12, fit_noise=0.5, epochs=3, mini_batches=2, learning_rate=2e-3),
        BASELINES,
    ),
    "ppo-dates": (
        Settings(
            "dates",
            "gated-mlp",
            13,
            fit_noise=0.5,
            optimizer="lion",
            learning_rate=3e-4,
            beta2=0.99,
            pool=96,
            reward_low=-1.0,
            num_steps=160,
            group_size=1,
            num_groups=96,
        ),
        TRAINER,
    ),
    "ppo-choice": (
        Settings("choice", "gru", 14, group_size=1, num_groups=96, kl_coefficient=0.15, kl_in="reward"),
        replace(FULL, finish_reason=False, loss=False),
    ),
    "ppo-rewrite": (
        Settings(
            "rewrite",
            "gated-mlp",
            15,
            fit_noise=0.45,
            optimizer="sgd",
            learning_rate=0.05,
            reward_high=10.0,
            epochs=3,
            gae_lambda=1.0,
            value_coefficient=0.02,
        ),
        BASELINES,
    ),
    "ppo-lookup": (
        Settings("lookup", "gated-mlp", 16, fit_updates=900, fit_noise=0.4, num_steps=140, group_size=4, num_groups=24),
        OWN,
    ),
    "reinforce-sum": (
        Settings(
            "modular-sum",
            "gated-mlp",
            17,
            estimator="batch",
            clip=None,
            epochs=1,
            mini_batches=2,
            learning_rate=2e-3,
            num_steps=200,
            group_size=4,
            num_groups=32,
        ),
        OWN,
    ),
    "group-brackets": (
        Settings(
            "brackets",
            "gated-mlp",
            18,
            fit_noise=0.55,
            estimator="group",
            pool=80,
            epochs=1,
            mini_batches=4,
            learning_rate=1.5e-3,
            num_steps=200,
            beta2=0.99,
        ),
        replace(TRAINER, loss=False),
    ),
    "reinforce-dates": (
        Settings(
            "dates",
            "gated-mlp",
            19,
            fit_noise=0.6,
            estimator="running",
            clip=None,
            epochs=1,
            mini_batches=3,
            learning_rate=1.5e-3,
            num_steps=180,
            reward_low=-1.0,
        ),
        SHORT,
    ),
    "reinforce-choice": (
        Settings(
            "choice",
            "gated-mlp",
            20,
            estimator="running",
            optimizer="lion",
            learning_rate=1.5e-4,
            beta2=0.99,
            clip=0.2,
            epochs=2,
            mini_batches=2,
            pool=120,
            num_steps=180,
            reward_high=10.0,
        ),
        BARE,
    ),
    "group-rewrite": (
        Settings(
            "rewrite",
            "gated-mlp",
            21,
            fit_noise=0.5,
            estimator="group",
            kl_coefficient=0.02,
            learning_rate=1.5e-3,
            epochs=2,
            mini_batches=2,
            num_steps=180,
        ),
        TRAINER,
    ),
    "reinforce-rewrite": (
        Settings(
            "rewrite",
            "gru",
            22,
            fit_updates=800,
            estimator="running",
            optimizer="sgd",
            learning_rate=0.03,
            kl_coefficient=0.02,
            clip=None,
            epochs=1,
            mini_batches=3,
            num_steps=170,
            pool=100,
        ),
        OWN,
    ),
}

FALLS: dict[str, Run] = {
    # The engine samples from other probabilities than the trainer takes.
    "engine-weights-rounded": Run("ppo-sum", "mismatch", "engine weights are powers of two", 45, {"engine_bits": 0}),
    "engine-embedding-never-synchronised": Run(
        "ppo-sum",
        "mismatch",
        "embedding and input weights stay as they were",
        60,
        {"engine_unsynchronised": ("embedding", "input", "recurrent")},
    ),
    "weights-old-and-said": Run(
        "group-brackets",
        "staleness",
        "weights reach the engine every 60 steps, version recorded",
        75,
        {"synchronise_every": 60},
        record="hyperparameters",
    ),
    "weights-old-and-silent": Run(
        "reinforce-sum", "staleness", "engine is 50 steps behind, no version", 80, {"lag": 50}, log=SHORT
    ),
    "learning-rate-times-thirty": Run(
        "reinforce-choice", "optimizer", "learning rate 30 times higher", 100, {"learning_rate": 4.5e-3}
    ),
    "weight-decay": Run(
        "ppo-dates", "optimizer", "weight decay 60", 70, {"weight_decay": 60.0}, record="hyperparameters"
    ),
    "verifier-inverted": Run("ppo-choice", "reward", "verifier pays what is wrong", 75, {"reward_sign": -1.0}),
    "verifier-pays-coins": Run(
        "reinforce-sum", "reward", "a coin in place of 95 % of the rewards", 70, {"reward_noise": 0.95}
    ),
    "longer-pays": Run("group-brackets", "length", "0.3 for each token", 30, {"length_bonus": 0.3}),
    "shorter-pays": Run(
        "ppo-choice", "length", "-1.2 for each token", 8, {"length_bonus": -1.2}, record="hyperparameters"
    ),
    "rewards-of-next-group": Run(
        "group-rewrite", "pairing", "rewards land one group further", 70, {"rewards_on": "next group"}
    ),
    "advantages-of-sorted-rows": Run(
        "group-brackets",
        "pairing",
        "advantages are those of rows sorted by length",
        15,
        {"advantages_on": "sorted by length"},
    ),
    "entropy-bonus-high": Run(
        "ppo-sum", "entropy", "entropy coefficient 0.5", 70, {"entropy_coefficient": 0.5}, record="hyperparameters"
    ),
    "entropy-bonus-silent": Run("ppo-dates", "entropy", "entropy coefficient 1.5", 95, {"entropy_coefficient": 1.5}),
    "deeper-brackets": Run(
        "ppo-brackets", "data", "nine of ten prompts are deeper than before", 85, {"prompt_shift": 0.9}
    ),
    "new-rule": Run("group-rewrite", "data", "seven of ten prompts have a new rule", 140, {"prompt_shift": 0.7}),
    "answers-cut": Run(
        "ppo-dates", "truncation", "max_tokens 4 cuts every answer", 80, {"max_tokens": 4}, record="metrics"
    ),
    "answers-cut-unseen": Run(
        "group-brackets",
        "truncation",
        "max_tokens 3 cuts answers, no finish reason",
        90,
        {"max_tokens": 3},
        log=OWN,
        record="nothing",
    ),
    "kl-coefficient-high": Run(
        "group-rewrite", "reference", "KL coefficient 50 times higher", 80, {"kl_coefficient": 2.0}, record="metrics"
    ),
    "reference-exchanged": Run("ppo-choice", "reference", "reference is another model", 70, {"reference": "other"}),
    "advantages-times-sixty": Run(
        "ppo-rewrite", "advantages", "advantages 60 times larger", 75, {"advantage_scale": 60.0}
    ),
    "bits-flip": Run(
        "ppo-brackets", "other", "some weights of the trainer 64 times larger, once", 128, event="bits flip"
    ),
    "second-moments-lost": Run(
        "reinforce-sum", "other", "second moments of Adam lost at a restart", 165, event="second moments lost"
    ),
    "gradients-never-zeroed": Run(
        "ppo-rewrite", "other", "gradients pile up over all updates", 60, {"zero_gradients": False}
    ),
    "tool-breaks-down": Run(
        "ppo-lookup", "other", "the lookup tool answers every call alike", 85, {"tool_works": False}
    ),
    "layer-initialised": Run(
        "reinforce-rewrite", "other", "embedding and recurrent weights initialised anew", 125, event="layer initialised"
    ),
    "learning-rate-high-from-start": Run(
        "ppo-sum", "optimizer", "learning rate 0.005", 1, {"learning_rate": 0.005}, record="hyperparameters"
    ),
    "advantages-negated-slowly": Run(
        "ppo-brackets", "advantages", "-0.2 times the advantages", 90, {"advantage_scale": -0.2}, log=BARE
    ),
}

# Further falls, made only where they are named.
MORE_FALLS: dict[str, Run] = {
    "engine-noise-in-cache": Run("ppo-choice", "mismatch", "noise on the cached state", 70, {"engine_noise": 6.0}),
    "learning-rate-spike": Run(
        "ppo-lookup", "optimizer", "learning rate 40 times higher for 12 steps", 95, {"learning_rate": 4e-2}, ends=107
    ),
    "momentum-without-clip": Run(
        "ppo-rewrite",
        "optimizer",
        "momentum 0.99 and gradients not clipped",
        80,
        {"beta1": 0.99, "clip_norm": 1e9},
        record="hyperparameters",
    ),
    "verifier-pays-a-token": Run(
        "group-rewrite", "reward", "verifier pays the share of one letter", 90, {"reward_token": 16}
    ),
    "rewards-shuffled": Run(
        "ppo-sum", "pairing", "rewards are shuffled over the batch", 50, {"rewards_on": "shuffled"}
    ),
    "advantages-negated": Run("reinforce-dates", "advantages", "sign of the advantages", 70, {"advantage_scale": -1.0}),
    "dropout-in-update": Run(
        "reinforce-sum", "other", "the update alone keeps 3 % in place of dropping 3 %", 70, {"dropout": 0.97}
    ),
    "rows-permuted": Run(
        "group-rewrite", "other", "rows of the head permuted at a restart", 155, event="rows permuted"
    ),
    "momentum-scaled": Run(
        "ppo-rewrite", "other", "momentum restored 300 times too large", 122, event="first moments scaled"
    ),
}

HARMLESS: dict[str, Run] = {
    "dropout-mild": Run("reinforce-choice", "harmless", "dropout 0.3 in the update alone", 90, {"dropout": 0.3}),
    "baseline-too-high": Run(
        "reinforce-dates", "harmless", "baseline is 2 deviations too high", 85, {"baseline_offset": 2.0}
    ),
    "engine-samples-hotter": Run(
        "reinforce-sum", "harmless", "engine samples at temperature 1.6, told 1", 80, {"engine_temperature": 1.6}
    ),
    "engine-bfloat16": Run("ppo-sum", "harmless", "engine weights keep 8 bits of mantissa", 1, {"engine_bits": 8}),
    "engine-two-steps-behind": Run("group-brackets", "harmless", "engine is 2 steps behind", 60, {"lag": 2}),
    "learning-rate-wiggle": Run(
        "ppo-brackets",
        "harmless",
        "learning rate a quarter higher for 30 steps",
        70,
        {"learning_rate": 2.5e-3},
        ends=100,
        record="hyperparameters",
    ),
    "some-rewards-are-coins": Run(
        "reinforce-dates", "harmless", "a coin in place of 6 % of the rewards", 80, {"reward_noise": 0.06}
    ),
    "some-prompts-shift": Run(
        "ppo-choice", "harmless", "a tenth of the prompts asks two questions", 80, {"prompt_shift": 0.1}
    ),
    "engine-top-p": Run("group-rewrite", "harmless", "engine keeps 0.98 of the mass", 90, {"engine_top_p": 0.98}),
    "less-decay-more-entropy": Run(
        "ppo-dates",
        "harmless",
        "weight decay 0.1 and a small entropy bonus",
        70,
        {"weight_decay": 0.1, "entropy_coefficient": 0.002},
    ),
}

RUNS = {**{name: Run(name) for name in BASES}, **FALLS, **HARMLESS, **MORE_FALLS}


def kept_to(folder: Path, name: str) -> float | None:
    """Read the share of its best that a run kept; None where it was not made."""
    plan = folder / name / "plan.json"
    return kept_share(json.loads(plan.read_text())["evaluations"]) if plan.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[name for name in RUNS if name not in MORE_FALLS], metavar="NAME")
    parser.add_argument("--seed", type=int, default=0, help="is added to every run's own seed")
    arguments = parser.parse_args()
    for name in sorted(arguments.only, key=lambda one: list(BASES).index(RUNS[one].base)):
        run, folder = RUNS[name], arguments.output / name
        if (folder / "plan.json").exists():
            continue
        settings, log = BASES[run.base]
        folder.mkdir(parents=True, exist_ok=True)
        begun = time.process_time()
        evaluations = make(
            run, replace(settings, seed=settings.seed + arguments.seed), run.log or log, folder / "trace"
        )
        label = {
            "cause": run.cause,
            "detail": run.detail,
            "twin": run.base,
            "begins": run.begins,
            "intervention": run.cause != "sound",
        }
        (folder / "label.json").write_text(json.dumps(label))
        (folder / "plan.json").write_text(json.dumps({"evaluations": evaluations}))
        print(f"{name}: {time.process_time() - begun:.1f} s of CPU", flush=True)
    print("run | cause | kept | twin kept | first, best, last evaluation")
    for name in arguments.only:
        kept, twin = kept_to(arguments.output, name), kept_to(arguments.output, RUNS[name].base)
        seen = json.loads((arguments.output / name / "plan.json").read_text())["evaluations"]
        text = "-" if twin is None else f"{twin:.3f}"
        print(f"{name} | {RUNS[name].cause} | {kept:.3f} | {text} | {seen[0]:.2f} {max(seen):.2f} {seen[-1]:.2f}")


if __name__ == "__main__":
    main()
