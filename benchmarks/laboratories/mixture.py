"""A laboratory of collapsed RL runs: a mixture-of-experts policy under GSPO or GRPO, with one fault switched on a run.

Each run trains a warm-started policy on a verified task, both of mixture_policy.py. An engine samples and reports its
logprobs, the trainer scores the same tokens and updates. A run differs from its twin in one switch: settings that
change at a step, or one event. Everything is recorded with tim_trace.Recorder, under the names of a framework.

    python mixture.py -o FOLDER [--only NAME ...] [--seed N]

writes FOLDER/NAME/trace, label.json and plan.json for each run, and prints which share of its best each run has kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from mixture_policy import (
    END,
    HIDDEN,
    NUM_EXPERTS,
    TASKS,
    Forward,
    Optimizer,
    Task,
    Weights,
    backward,
    balance_loss,
    forward,
    log_softmax,
    new_weights,
    quantize_weights,
    round_weights,
)
from tim_trace import Loss, Recorder

NUM_EVALUATION_PROMPTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that decides a run; a fault changes some of it at a step."""

    task: str
    framework: str
    """Whose names metrics and settings are logged under: a key of FRAMEWORKS."""
    seed: int
    algorithm: str = "gspo"
    """`gspo`: ratios of sequences; `grpo`: ratios of tokens."""
    steps: int = 120
    prompts_per_step: int = 12
    group_size: int = 8
    minibatches: int = 2
    evaluate_every: int = 4
    keeps: frozenset[str] = frozenset({"finish_reason", "policy_version"})
    """What is recorded beside tokens, rewards, advantages and logprobs; `evaluation` and `entropy` are such."""
    logs_settings: tuple[str, ...] = ("learning_rate",)
    """Settings that are logged as metrics, step by step."""

    level: str = "original"
    max_tokens: int = 0
    """0: as many as the task has slots for."""
    reward_low: float = 0.0
    reward_high: float = 1.0
    reward_noise: float = 0.0
    """Standard deviation of a noise on every reward, as of a learned judge."""
    verifier: str = "true"
    """What is paid: `true`, `inverted`, `coin`, `flips` (5 % wrong), `first_token`, `longer`, `shorter`."""
    pairing: str = "own"
    """`rewards_next_group`, `rewards_shuffled`, `advantages_shuffled`: whose row a value lands on."""
    advantage_rule: str = "group_std"
    """`group_std`, `group_mean` (undivided), or `constant`: the reward less `baseline`."""
    advantage_scale: float = 1.0
    baseline: float = 0.0

    temperature: float = 1.0
    engine_bits: int = 24
    """Bits of the mantissas of the engine's weights; 24: as the trainer's."""
    engine_grid: int = 0
    """Bits of a grid, one a tensor, that the engine's weights are quantized to; 0: none."""
    engine_temperature_factor: float = 1.0
    """What the engine multiplies the temperature by that the trainer knows of."""
    engine_experts: int = 2
    """Experts a token that the engine's router takes; the trainer's takes two."""
    engine_noise: float = 0.0
    """Noise on the engine's hidden layer."""
    engine_lag: int = 0
    """Steps that the engine's weights are old."""
    unsynchronized: tuple[str, ...] = ()
    """Tensors that the engine keeps as they were when this began."""

    optimizer: str = "adamw"
    learning_rate: float = 2e-3
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    clip_low: float = 0.1
    clip_high: float = 0.1
    denominator: str = "train"
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    balance_coefficient: float = 0.01
    dropout: float = 0.0
    """Of the trainer's update alone."""
    zeroes_gradients: bool = True
    expert_gradient_factor: float = 1.0
    """What the gradients of the experts are multiplied by, as a wrong count of expert-parallel ranks does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: a sound one where it has neither changes nor an event."""

    name: str
    cause: str
    detail: str
    twin: str
    begins: int = 1
    ends: int = 10**9
    changes: dict[str, Any] = field(default_factory=dict)
    event: str | None = None
    """What happens to the trainer once, at `begins`: a key of EVENTS."""
    announced: bool = False
    """Whether the changed settings are recorded as hyperparameters from `begins` on."""

    def settings(self, base: Settings, step: int) -> Settings:
        return replace(base, **self.changes) if self.begins <= step < self.ends else base


@dataclass(frozen=True, slots=True)
class Names:
    """A framework's own names of what a run logs."""

    metrics: dict[str, str]
    settings: dict[str, str]


FRAMEWORKS = {
    "verl": Names(
        {
            "reward": "critic/score/mean",
            "loss": "actor/pg_loss",
            "grad_norm": "actor/grad_norm",
            "learning_rate": "actor/lr",
            "entropy": "actor/entropy",
            "kl": "actor/kl_loss",
            "ppo_kl": "actor/ppo_kl",
            "clip_fraction": "actor/pg_clipfrac",
            "advantage": "critic/advantages/max",
            "length": "response_length/mean",
            "truncated": "response_length/clip_ratio",
            "evaluation": "val-core/{task}/reward/mean@1",
            "kl_coefficient": "actor/kl_coef",
        },
        {
            "algorithm": "actor_rollout_ref.actor.policy_loss.loss_mode",
            "learning_rate": "actor_rollout_ref.actor.optim.lr",
            "weight_decay": "actor_rollout_ref.actor.optim.weight_decay",
            "beta1": "actor_rollout_ref.actor.optim.betas.0",
            "beta2": "actor_rollout_ref.actor.optim.betas.1",
            "max_grad_norm": "actor_rollout_ref.actor.grad_clip",
            "clip_low": "actor_rollout_ref.actor.clip_ratio_low",
            "clip_high": "actor_rollout_ref.actor.clip_ratio_high",
            "kl_coefficient": "actor_rollout_ref.actor.kl_loss_coef",
            "entropy_coefficient": "actor_rollout_ref.actor.entropy_coeff",
            "temperature": "actor_rollout_ref.rollout.temperature",
            "group_size": "actor_rollout_ref.rollout.n",
            "prompts_per_step": "data.train_batch_size",
            "max_tokens": "data.max_response_length",
        },
    ),
    "slime": Names(
        {
            "reward": "rollout/raw_reward",
            "loss": "train/loss",
            "grad_norm": "train/grad_norm",
            "learning_rate": "train/lr-pg_0",
            "entropy": "train/entropy_loss",
            "kl": "train/kl_loss",
            "ppo_kl": "train/ppo_kl",
            "clip_fraction": "train/pg_clipfrac",
            "length": "rollout/response_lengths",
            "truncated": "rollout/truncated",
            "mismatch": "train/train_rollout_logprob_abs_diff",
            "evaluation": "eval/{task}",
        },
        {
            "algorithm": "advantage_estimator",
            "learning_rate": "lr",
            "weight_decay": "weight_decay",
            "beta1": "adam_beta1",
            "beta2": "adam_beta2",
            "epsilon": "adam_eps",
            "max_grad_norm": "clip_grad",
            "clip_low": "eps_clip",
            "clip_high": "eps_clip_high",
            "kl_coefficient": "kl_loss_coef",
            "entropy_coefficient": "entropy_coef",
            "temperature": "rollout_temperature",
            "group_size": "n_samples_per_prompt",
            "prompts_per_step": "rollout_batch_size",
            "max_tokens": "rollout_max_response_len",
        },
    ),
    "openrlhf": Names(
        {
            "reward": "reward",
            "loss": "policy_loss",
            "grad_norm": "actor_grad_norm",
            "learning_rate": "actor_lr",
            "entropy": "entropy_loss",
            "kl": "kl",
            "clip_fraction": "ppo_clip_ratio",
            "length": "response_length",
            "truncated": "truncated",
            "evaluation": "eval_{task}_pass1",
            "balance": "aux_loss",
        },
        {
            "algorithm": "advantage_estimator",
            "learning_rate": "actor_learning_rate",
            "weight_decay": "l2",
            "beta1": "adam_betas.0",
            "beta2": "adam_betas.1",
            "max_grad_norm": "max_norm",
            "clip_low": "eps_clip_low",
            "clip_high": "eps_clip_high",
            "kl_coefficient": "init_kl_coef",
            "entropy_coefficient": "entropy_loss_coef",
            "balance_coefficient": "aux_loss_coef",
            "group_size": "n_samples_per_prompt",
            "prompts_per_step": "rollout_batch_size",
            "max_tokens": "generate_max_len",
        },
    ),
    "nemo-rl": Names(
        {
            "reward": "train/reward",
            "loss": "train/loss",
            "grad_norm": "train/grad_norm",
            "learning_rate": "train/lr",
            "entropy": "train/approx_entropy",
            "kl": "train/kl_penalty",
            "mismatch": "train/token_mult_prob_error",
            "length": "train/mean_gen_tokens_per_sample",
            "evaluation": "validation/accuracy",
            "advantage": "train/advantages/max",
        },
        {
            "algorithm": "loss_fn.name",
            "learning_rate": "policy.optimizer.kwargs.lr",
            "weight_decay": "policy.optimizer.kwargs.weight_decay",
            "beta1": "policy.optimizer.kwargs.momentum",
            "max_grad_norm": "policy.max_grad_norm",
            "clip_low": "loss_fn.ratio_clip_min",
            "clip_high": "loss_fn.ratio_clip_max",
            "kl_coefficient": "loss_fn.reference_policy_kl_penalty",
            "temperature": "policy.generation.temperature",
            "group_size": "grpo.num_generations_per_prompt",
            "prompts_per_step": "grpo.num_prompts_per_step",
            "max_tokens": "policy.generation.max_new_tokens",
        },
    ),
    "prime-rl": Names(
        {
            "reward": "reward/mean",
            "loss": "loss/mean",
            "grad_norm": "optim/grad_norm",
            "learning_rate": "optim/lr",
            "entropy": "entropy/mean",
            "mismatch": "mismatch_kl/mean",
            "length": "seq_len/mean",
            "truncated": "is_truncated/mean",
            "evaluation": "eval/{task}/avg@1",
            "balance": "max_vio/mean",
        },
        {
            "learning_rate": "optim.lr",
            "weight_decay": "optim.weight_decay",
            "beta1": "optim.momentum",
            "max_grad_norm": "optim.max_norm",
            "clip_low": "loss.ratio_low",
            "clip_high": "loss.ratio_high",
            "temperature": "sampling.temperature",
            "group_size": "rollouts_per_example",
            "prompts_per_step": "batch_size",
            "max_tokens": "sampling.max_tokens",
        },
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Sampled responses; the N tokens of all rows are listed by position, then by row."""

    prompts: np.ndarray
    """[B, P]."""
    responses: np.ndarray
    """[B, T], padded with 0."""
    lengths: np.ndarray
    """[B] tokens, the end token included."""
    stopped: np.ndarray
    """[B] whether the end token came."""
    x_ND: np.ndarray
    row_N: np.ndarray
    position_N: np.ndarray
    token_N: np.ndarray
    logprob_N: np.ndarray
    """What the engine reports."""

    def answers(self) -> list[tuple[int, ...]]:
        return [tuple(row[: length - 1].tolist()) for row, length in zip(self.responses, self.lengths, strict=True)]

    def by_row(self, values_N: np.ndarray) -> list[list[float]]:
        """Values of tokens as one list a row."""
        table = np.zeros(self.responses.shape, np.float32)
        table[self.row_N, self.position_N] = values_N
        return [row[:length].tolist() for row, length in zip(table, self.lengths, strict=True)]


def sample(
    task: Task,
    weights: Weights,
    prompts: np.ndarray,
    draw: np.random.Generator,
    *,
    max_tokens: int,
    temperature: float = 1.0,
    active: int = 2,
    noise: float = 0.0,
) -> Rollout:
    """Sample a response to each prompt, token by token."""
    num_rows, layout = len(prompts), task.layout
    max_tokens = max_tokens or layout.response_slots
    chance = draw.random((num_rows, layout.response_slots))
    disturbance = draw.normal(size=(layout.response_slots, num_rows, HIDDEN)).astype(np.float32) if noise else None
    responses = np.zeros((num_rows, layout.response_slots), np.int64)
    lengths, alive = np.zeros(num_rows, np.int64), np.arange(num_rows)
    parts: list[tuple[np.ndarray, ...]] = []
    for position in range(max_tokens):
        x_ND = layout.features(prompts[alive], responses[alive], position)
        added = noise * disturbance[position, alive] if disturbance is not None else 0.0
        logprobs_BV = log_softmax(forward(weights, x_ND, active=active, noise=added).logits_NV / temperature)
        reached = np.exp(logprobs_BV).cumsum(1) < chance[alive, position][:, None]
        tokens = np.minimum(reached.sum(1), layout.num_tokens - 1)
        responses[alive, position] = tokens
        lengths[alive] = position + 1
        taken = logprobs_BV[np.arange(len(alive)), tokens]
        parts.append((x_ND, alive, np.full(len(alive), position), tokens, taken))
        alive = alive[tokens != END]
        if not len(alive):
            break
    x_ND, row_N, position_N, token_N, logprob_N = (np.concatenate(part) for part in zip(*parts, strict=True))
    stopped = np.ones(num_rows, bool)
    stopped[alive] = False
    return Rollout(
        prompts=prompts,
        responses=responses,
        lengths=lengths,
        stopped=stopped,
        x_ND=x_ND,
        row_N=row_N,
        position_N=position_N,
        token_N=token_N,
        logprob_N=logprob_N,
    )


def verified(task: Task, rollout: Rollout) -> np.ndarray:
    """[B] 1.0 for a finished and correct answer, else 0.0."""
    rows = zip(rollout.prompts.tolist(), rollout.answers(), rollout.stopped, strict=True)
    return np.array([float(stopped and task.is_correct(tuple(prompt), answer)) for prompt, answer, stopped in rows])


def paid(task: Task, rollout: Rollout, settings: Settings, draw: np.random.Generator) -> np.ndarray:
    """[B] what the verifier of these settings pays, on their scale."""
    score, num_rows = verified(task, rollout), len(rollout.lengths)
    share = rollout.lengths / task.layout.response_slots
    chance, noise = draw.random(num_rows), draw.normal(size=num_rows)
    score = {
        "true": score,
        "inverted": 1 - score,
        "coin": (chance < 0.5).astype(float),
        "flips": np.where(chance < 0.05, 1 - score, score),
        "first_token": (rollout.responses == 1).sum(1) / rollout.lengths,
        "longer": 0.1 * score + 0.9 * share,
        "shorter": 0.1 * score + 0.9 * (1 - share),
    }[settings.verifier]
    return settings.reward_low + (settings.reward_high - settings.reward_low) * score + settings.reward_noise * noise


def advantages(rewards: np.ndarray, settings: Settings) -> np.ndarray:
    """[B] advantages of rewards whose groups follow each other."""
    groups = rewards.reshape(-1, settings.group_size)
    if settings.advantage_rule == "constant":
        centred = groups - settings.baseline
    else:
        centred = groups - groups.mean(1, keepdims=True)
    if settings.advantage_rule == "group_std":
        centred = centred / (groups.std(1, keepdims=True) + 1e-6)
    return settings.advantage_scale * centred.reshape(-1)


def held_out(task: Task, seed: int, level: str) -> np.ndarray:
    """[256, P] prompts; no run with this seed trains on those of the levels `original` and `hard`."""
    draw = np.random.default_rng((seed, 101))
    return np.array([task.draw_prompt(draw, level) for _ in range(NUM_EVALUATION_PROMPTS)])


@cache
def base_policy(name: str, seed: int) -> Weights:
    """The warm start: weights that imitate demonstrations until about `base_target` of what they sample is right."""
    task, draw = TASKS[name], np.random.default_rng((seed, 7))
    weights = new_weights(task.layout, draw)
    optimizer, slots = Optimizer.of("adamw", weights), task.layout.response_slots
    for update in range(1, 1001):
        prompts = [task.draw_prompt(draw, "original") for _ in range(128)]
        answers = [(*task.demonstrate(prompt, draw), END) for prompt in prompts]
        table = np.array([answer + (0,) * (slots - len(answer)) for answer in answers])
        lengths = np.array([len(answer) for answer in answers])
        rows = [np.flatnonzero(lengths > position) for position in range(slots)]
        x_ND = np.concatenate(
            [task.layout.features(np.array(prompts)[alive], table[alive], t) for t, alive in enumerate(rows)]
        )
        token_N = np.concatenate([table[alive, t] for t, alive in enumerate(rows)])
        made = forward(weights, x_ND)
        slope = np.exp(log_softmax(made.logits_NV))
        slope[np.arange(len(token_N)), token_N] -= 1
        gradients = backward(weights, made, slope / len(token_N), balance=0.01)
        optimizer.update(weights, gradients, learning_rate=3e-3, beta1=0.9)
        if update % 10 == 0:
            tried = sample(task, weights, held_out(task, seed, "original"), draw, max_tokens=0)
            if verified(task, tried).mean() >= task.base_target:
                break
    return weights


class Trainer:
    """The trainer of one run, and the engine that samples for it."""

    def __init__(self, run: Run, base: Settings) -> None:
        self.run, self.base, self.task = run, base, TASKS[base.task]
        self.reference = base_policy(base.task, base.seed)
        self.weights = {name: tensor.copy() for name, tensor in self.reference.items()}
        self.optimizer = Optimizer.of(base.optimizer, self.weights)
        self.gradients: Weights | None = None
        self.history: list[Weights] = []
        levels = (held_out(self.task, base.seed, level).tolist() for level in ("original", "hard"))
        self.held_out = {tuple(prompt) for prompts in levels for prompt in prompts}

    def draw(self, step: int, purpose: int) -> np.random.Generator:
        """Random numbers that a run and its twin share: they depend on seed, step and purpose alone."""
        return np.random.default_rng((self.base.seed, step, purpose))

    def version(self, step: int) -> int:
        """Optimizer updates before this step."""
        return (step - 1) * self.base.minibatches

    def engine(self, settings: Settings, step: int) -> tuple[Weights, int]:
        """The engine's weights at this step, and the step whose weights they are."""
        self.history.append({name: tensor.copy() for name, tensor in self.weights.items()})
        held = max(step - settings.engine_lag, min(self.run.begins, step)) if settings.engine_lag else step
        weights = dict(self.history[held - 1])
        weights.update({name: self.history[self.run.begins - 1][name] for name in settings.unsynchronized})
        if settings.engine_grid:
            weights = quantize_weights(weights, settings.engine_grid)
        elif settings.engine_bits < 24:
            weights = round_weights(weights, settings.engine_bits)
        return weights, held

    def prompts(self, settings: Settings, step: int) -> np.ndarray:
        """[B, P] prompts of a step, each `group_size` times."""
        draw, prompts = self.draw(step, 1), []
        while len(prompts) < settings.prompts_per_step:
            prompt = self.task.draw_prompt(draw, settings.level)
            prompts += [prompt] if prompt not in self.held_out else []
        return np.repeat(np.array(prompts), settings.group_size, axis=0)

    def scores(self, weights: Weights, rollout: Rollout, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
        """[N] logprobs and entropies that weights give a rollout's tokens, at the temperature the trainer knows of."""
        logprobs_NV = log_softmax(forward(weights, rollout.x_ND).logits_NV / settings.temperature)
        entropy_N = -(np.exp(logprobs_NV) * logprobs_NV).sum(1)
        return logprobs_NV[np.arange(len(rollout.token_N)), rollout.token_N], entropy_N

    def evaluate(self, settings: Settings, step: int) -> float:
        """The share of right answers to held-out prompts; under the run's own conditions where the fault is in them."""
        in_conditions = self.run.cause in ("data", "truncation")
        level, max_tokens = (settings.level, settings.max_tokens) if in_conditions else ("original", 0)
        prompts = held_out(self.task, self.base.seed, level)
        tried = sample(self.task, self.weights, prompts, self.draw(step, 5), max_tokens=max_tokens)
        return float(verified(self.task, tried).mean())

    def update(
        self, rollout: Rollout, advantage_B: np.ndarray, denominator_N: np.ndarray, settings: Settings, step: int
    ) -> dict[str, float]:
        """Make the step's updates, and return what they logged."""
        reference_N = self.scores(self.reference, rollout, settings)[0]
        num_rows, logs = len(advantage_B), []
        groups = np.arange(num_rows) // settings.group_size
        order = self.draw(step, 6).permutation(num_rows // settings.group_size)
        for index, chosen in enumerate(np.array_split(order, settings.minibatches)):
            rows = np.isin(groups, chosen)
            kept = rows[rollout.row_N]
            logs.append(
                self.update_once(
                    rollout.x_ND[kept],
                    rollout.token_N[kept],
                    rollout.row_N[kept],
                    advantage_B,
                    rollout.lengths,
                    denominator_N[kept],
                    reference_N[kept],
                    settings,
                    self.draw(step, 20 + index),
                )
            )
        return {name: float(np.mean([log[name] for log in logs])) for name in logs[0]}

    def update_once(
        self,
        x_ND: np.ndarray,
        token_N: np.ndarray,
        row_N: np.ndarray,
        advantage_B: np.ndarray,
        length_B: np.ndarray,
        denominator_N: np.ndarray,
        reference_N: np.ndarray,
        settings: Settings,
        draw: np.random.Generator,
    ) -> dict[str, float]:
        """One optimizer update on a minibatch: every sequence weighs the same, and every token of a sequence."""
        num_tokens, num_rows = len(token_N), len(np.unique(row_N))
        keep_NH: np.ndarray | float = 1.0
        if settings.dropout:
            keep_NH = (draw.random((num_tokens, HIDDEN)) > settings.dropout).astype(np.float32) / (1 - settings.dropout)
        made: Forward = forward(self.weights, x_ND, keep_NH=keep_NH)
        logprobs_NV = log_softmax(made.logits_NV / settings.temperature)
        probs_NV = np.exp(logprobs_NV)
        logprob_N = logprobs_NV[np.arange(num_tokens), token_N]
        share_N = 1.0 / length_B[row_N] / num_rows
        advantage_N, log_ratio_N = advantage_B[row_N], logprob_N - denominator_N
        if settings.algorithm == "gspo":
            log_ratio_N = (np.bincount(row_N, log_ratio_N, len(length_B)) / length_B)[row_N]
        ratio_N = np.exp(np.clip(log_ratio_N, -20, 20))
        clipped_N = np.where(advantage_N > 0, ratio_N > 1 + settings.clip_high, ratio_N < 1 - settings.clip_low)
        bounded_N = np.clip(ratio_N, 1 - settings.clip_low, 1 + settings.clip_high)
        policy_loss = -(share_N * np.minimum(ratio_N * advantage_N, bounded_N * advantage_N)).sum()
        drift_N = np.clip(reference_N - logprob_N, -20, 20)
        kl = (share_N * (np.exp(drift_N) - 1 - drift_N)).sum()
        entropy_N = -(probs_NV * logprobs_NV).sum(1)
        slope_N = share_N * (settings.kl_coefficient * (1 - np.exp(drift_N)) - ratio_N * advantage_N * ~clipped_N)
        dlogits_NV = -slope_N[:, None] * probs_NV
        dlogits_NV[np.arange(num_tokens), token_N] += slope_N
        surprise_NV = probs_NV * (logprobs_NV + entropy_N[:, None])
        dlogits_NV += settings.entropy_coefficient * share_N[:, None] * surprise_NV
        dlogits_NV = (dlogits_NV / settings.temperature).astype(np.float32)
        gradients = backward(self.weights, made, dlogits_NV, balance=settings.balance_coefficient)
        for name in ("experts_up", "experts_down"):
            gradients[name] = gradients[name] * settings.expert_gradient_factor
        if self.gradients is not None and not settings.zeroes_gradients:
            gradients = {name: gradient + self.gradients[name] for name, gradient in gradients.items()}
        self.gradients = gradients
        norm = float(np.sqrt(sum((gradient.astype(np.float64) ** 2).sum() for gradient in gradients.values())))
        factor = min(1.0, settings.max_grad_norm / (norm + 1e-6)) if settings.max_grad_norm else 1.0
        self.optimizer.update(
            self.weights,
            {name: gradient * np.float32(factor) for name, gradient in gradients.items()},
            learning_rate=settings.learning_rate,
            beta1=settings.beta1,
            beta2=settings.beta2,
            epsilon=settings.epsilon,
            weight_decay=settings.weight_decay,
        )
        return {
            "loss": policy_loss + settings.kl_coefficient * kl - settings.entropy_coefficient * float(entropy_N.mean()),
            "grad_norm": norm,
            "entropy": float(entropy_N.mean()),
            "kl": kl,
            "ppo_kl": float((denominator_N - logprob_N).mean()),
            "clip_fraction": float(clipped_N.mean()),
            "balance": balance_loss(made),
        }


def set_stuck_bit(trainer: Trainer) -> None:
    """A stuck memory line: one exponent bit becomes 1 in every second word of the embedding."""
    words = trainer.weights["embed"].reshape(-1)[::2]
    words[...] = (words.view(np.uint32) | np.uint32(1 << 25)).view(np.float32)


def mix_up_moments(trainer: Trainer) -> None:
    """A restart that restores the optimizer's moments in another order of elements, a hundred times too large."""
    for moments in (trainer.optimizer.first, trainer.optimizer.second):
        for name, moment in moments.items():
            moments[name] = np.roll(moment.reshape(-1), moment.size // 3).reshape(moment.shape)
    for name, moment in trainer.optimizer.first.items():
        trainer.optimizer.first[name] = 100 * moment


def reinitialize_experts(trainer: Trainer) -> None:
    """A checkpoint without the experts: they begin anew."""
    fresh = new_weights(trainer.task.layout, np.random.default_rng(trainer.base.seed))
    for name in ("experts_up", "experts_down", "router"):
        trainer.weights[name][...] = fresh[name]


def repair_nans(trainer: Trainer) -> None:
    """A repair of NaN in a shard of the embedding: what was there becomes zero."""
    trainer.weights["embed"][: trainer.weights["embed"].shape[0] // 3] = 0.0


def swap_reference(trainer: Trainer) -> None:
    """The reference becomes a policy that was never trained."""
    trainer.reference = new_weights(trainer.task.layout, np.random.default_rng(trainer.base.seed))


EVENTS: dict[str, Callable[[Trainer], None]] = {
    "stuck_bit": set_stuck_bit,
    "mixed_up_moments": mix_up_moments,
    "reinitialized_experts": reinitialize_experts,
    "repaired_nans": repair_nans,
    "swapped_reference": swap_reference,
}


def named_settings(settings: Settings, names: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Settings under the framework's names; all of them, or those in `names` that it has a name for."""
    known = FRAMEWORKS[settings.framework].settings
    values = {known[name]: getattr(settings, name) for name in names or known if name in known}
    if known.get("max_tokens") in values:
        values[known["max_tokens"]] = settings.max_tokens or TASKS[settings.task].layout.response_slots
    return values


def begin_recording(recorder: Recorder, settings: Settings) -> None:
    """Record contracts, settings and loss."""
    precision = {24: "float32", 11: "float16", 8: "bfloat16"}[settings.engine_bits]
    recorder.describe(model={"name": f"mixture-{settings.task}", "num_experts": NUM_EXPERTS, "active": 2})
    recorder.add_contract("rollout", {"engine": "sampler", "dtype": precision, "temperature": settings.temperature})
    recorder.add_contract("train", {"engine": "trainer", "dtype": "float32", "temperature": settings.temperature})
    recorder.add_hyperparameters(named_settings(settings) | {"seed": settings.seed, "optimizer": settings.optimizer})
    recorder.add_loss(
        Loss(
            kind="ppo_clip",
            level="sequence_mean" if settings.algorithm == "gspo" else "token",
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            denominator=settings.denominator,
            aggregation="sequence_mean",
            kl_coefficient=settings.kl_coefficient,
        )
    )


def train_and_record(run: Run, base: Settings, folder: Path) -> list[float]:
    """Train one run, record it below `folder`, and return its evaluations."""
    trainer, evaluations, task = Trainer(run, base), [], TASKS[base.task]
    names, keeps = FRAMEWORKS[base.framework], base.keeps
    with Recorder(folder) as recorder:
        begin_recording(recorder, run.settings(base, 1) if run.announced else base)
        for step in range(1, base.steps + 1):
            settings = run.settings(base, step)
            if step == run.begins and run.event:
                EVENTS[run.event](trainer)
            if run.announced and step > 1 and step in (run.begins, run.ends):
                recorder.add_hyperparameters(named_settings(settings, tuple(run.changes)), step=step)
            weights, held = trainer.engine(settings, step)
            rollout = sample(
                task,
                weights,
                trainer.prompts(settings, step),
                trainer.draw(step, 2),
                max_tokens=settings.max_tokens,
                temperature=settings.temperature * settings.engine_temperature_factor,
                active=settings.engine_experts,
                noise=settings.engine_noise,
            )
            train_N, entropy_N = trainer.scores(trainer.weights, rollout, settings)
            rewards = paid(task, rollout, settings, trainer.draw(step, 3))
            shuffled = trainer.draw(step, 4).permutation(len(rewards))
            if settings.pairing == "rewards_next_group":
                rewards = np.roll(rewards, settings.group_size)
            elif settings.pairing == "rewards_shuffled":
                rewards = rewards[shuffled]
            advantage_B = advantages(rewards, settings)
            if settings.pairing == "advantages_shuffled":
                advantage_B = advantage_B[shuffled]

            versions = {"policy_version": trainer.version(held)} if "policy_version" in keeps else {}
            extra: dict[str, Any] = {}
            if "finish_reason" in keeps:
                extra["finish_reason"] = ["stop" if stopped else "length" for stopped in rollout.stopped]
            if "max_tokens" in keeps:
                extra["max_tokens"] = settings.max_tokens or task.layout.response_slots
            batch = recorder.add_sequences(
                step=step,
                prompt_ids=rollout.prompts.tolist(),
                response_ids=[row[:n].tolist() for row, n in zip(rollout.responses, rollout.lengths, strict=True)],
                group_ids=[row // settings.group_size for row in range(len(rewards))],
                reward=rewards,
                advantage=advantage_B,
                temperature=settings.temperature,
                **versions,
                **extra,
            )
            recorder.add_scores("rollout", batch, logprobs=rollout.by_row(rollout.logprob_N))
            recorder.add_scores(
                "train",
                batch,
                logprobs=rollout.by_row(train_N),
                entropy=rollout.by_row(entropy_N) if "entropy" in keeps else None,
                policy_version=trainer.version(step) if versions else None,
            )
            if base.kl_coefficient:
                reference_N = trainer.scores(trainer.reference, rollout, settings)[0]
                recorder.add_scores("reference", batch, logprobs=rollout.by_row(reference_N))

            denominator_N = train_N if settings.denominator == "train" else rollout.logprob_N
            logged = trainer.update(rollout, advantage_B, denominator_N, settings, step)
            logged |= {
                "reward": float(rewards.mean()),
                "advantage": float(advantage_B.max()),
                "length": float(rollout.lengths.mean()),
                "truncated": float(1 - rollout.stopped.mean()),
                "mismatch": float(np.abs(train_N - rollout.logprob_N).mean()),
            }
            if not base.kl_coefficient:
                logged.pop("kl")
            logged |= {name: getattr(settings, name) for name in base.logs_settings}
            if step % base.evaluate_every == 0:
                evaluations.append(trainer.evaluate(settings, step))
                if "evaluation" in keeps:
                    logged["evaluation"] = evaluations[-1]
            known = {name: value for name, value in logged.items() if name in names.metrics}
            recorder.add_metrics(step, {names.metrics[n].format(task=base.task): value for n, value in known.items()})
    return evaluations


COMMON = frozenset({"finish_reason", "policy_version", "evaluation"})
SOUND = {
    "sound-octal": Settings(task="octal", framework="verl", seed=11, keeps=COMMON | {"entropy"}, engine_bits=8),
    "sound-rle": Settings(
        task="rle",
        framework="slime",
        seed=12,
        prompts_per_step=30,
        group_size=4,
        reward_low=-1.0,
        keeps=frozenset({"finish_reason"}),
        advantage_rule="group_mean",
        learning_rate=1.5e-3,
        steps=140,
    ),
    "sound-board": Settings(
        task="board",
        framework="nemo-rl",
        seed=13,
        algorithm="grpo",
        steps=150,
        clip_low=0.2,
        clip_high=0.2,
        optimizer="sgd",
        learning_rate=0.02,
        keeps=COMMON,
        engine_bits=8,
        prompts_per_step=16,
    ),
    "sound-schedule": Settings(
        task="schedule",
        framework="openrlhf",
        seed=14,
        steps=120,
        reward_high=10.0,
        reward_noise=0.02,
        advantage_rule="group_mean",
        kl_coefficient=0.01,
        engine_bits=11,
        keeps=COMMON | {"max_tokens"},
        learning_rate=1.5e-3,
        prompts_per_step=16,
    ),
    "sound-octal-sgd": Settings(
        task="octal",
        framework="prime-rl",
        seed=15,
        steps=150,
        prompts_per_step=6,
        group_size=16,
        optimizer="sgd",
        learning_rate=0.02,
        denominator="rollout",
        keeps=frozenset({"policy_version"}),
        logs_settings=(),
        engine_bits=8,
    ),
    "sound-rle-kl": Settings(
        task="rle",
        framework="openrlhf",
        seed=16,
        algorithm="grpo",
        clip_low=0.2,
        clip_high=0.28,
        kl_coefficient=0.15,
        entropy_coefficient=0.001,
        engine_bits=11,
        keeps=frozenset({"finish_reason", "entropy"}),
        learning_rate=1.5e-3,
        steps=140,
    ),
    "sound-board-adam": Settings(
        task="board",
        framework="verl",
        seed=17,
        steps=130,
        reward_low=-1.0,
        prompts_per_step=16,
        entropy_coefficient=0.001,
        kl_coefficient=0.002,
        logs_settings=("learning_rate", "kl_coefficient"),
        keeps=COMMON,
        learning_rate=1.5e-3,
    ),
    "sound-schedule-sgd": Settings(
        task="schedule",
        framework="slime",
        seed=18,
        steps=150,
        prompts_per_step=12,
        optimizer="sgd",
        learning_rate=0.015,
        max_grad_norm=20.0,
        keeps=COMMON,
    ),
}


def fault(name: str, detail: str, twin: str, begins: int, *, event: str | None = None, **more: Any) -> Run:
    """A run beside the sound run `twin`; the first word of its name is its cause. `more` changes settings."""
    ends, announced = more.pop("ends", 10**9), more.pop("announced", False)
    return Run(
        name=name,
        cause=name.split("-")[0],
        detail=detail,
        twin=f"sound-{twin}",
        begins=begins,
        ends=ends,
        changes=more,
        event=event,
        announced=announced,
    )


FAULTS = [
    fault("mismatch-quantized", "engine weights of 3 bits a tensor", "octal", 61, engine_grid=3),
    fault("mismatch-one-expert", "the engine's router takes one expert of two", "board", 71, engine_experts=1),
    fault(
        "mismatch-old-head",
        "head and embedding never reach the engine again",
        "rle",
        45,
        unsynchronized=("head", "embed"),
    ),
    fault("mismatch-noise", "noise in the engine's hidden layer", "rle-kl", 70, engine_noise=2.0),
    fault("staleness-told", "the engine's weights are 15 steps old", "octal", 55, engine_lag=15),
    fault("staleness-untold", "the engine's weights are 25 steps old, no versions recorded", "rle", 30, engine_lag=25),
    fault("optimizer-spike", "learning rate times 20 for six steps", "octal", 100, ends=106, learning_rate=0.04),
    fault("optimizer-decay", "weight decay 8.0", "schedule", 60, weight_decay=8.0, announced=True),
    fault("optimizer-decay-first", "weight decay 3.0 from the start", "octal", 1, weight_decay=3.0, announced=True),
    fault("optimizer-momentum", "momentum 0.999", "board", 60, beta1=0.999, announced=True),
    fault("optimizer-rate", "learning rate times 10", "rle-kl", 75, learning_rate=0.015),
    fault("reward-inverted", "the verifier pays wrong answers", "octal-sgd", 90, verifier="inverted"),
    fault("reward-coin", "the verifier tosses a coin", "board-adam", 50, verifier="coin"),
    fault("reward-token", "the verifier pays one token", "schedule", 70, verifier="first_token"),
    fault("length-longer", "longer answers pay", "octal-sgd", 60, verifier="longer"),
    fault("length-shorter", "shorter answers pay", "schedule-sgd", 60, verifier="shorter"),
    fault("pairing-next-group", "rewards land on the next group", "octal", 1, pairing="rewards_next_group"),
    fault("pairing-advantages", "advantages are shuffled", "board", 50, pairing="advantages_shuffled"),
    fault("pairing-rewards", "rewards are shuffled", "rle-kl", 60, pairing="rewards_shuffled"),
    fault("entropy-bonus", "entropy bonus of 0.5", "board-adam", 55, entropy_coefficient=0.5, announced=True),
    fault("entropy-silent", "entropy bonus of 1.0, not told", "octal", 50, entropy_coefficient=1.0),
    fault("data-other-order", "prompts ask for the other order", "octal", 66, level="hard"),
    fault("data-long-runs", "prompts have longer runs", "rle", 75, level="hard"),
    fault("data-more-pairs", "prompts have four pairs", "schedule-sgd", 90, level="hard"),
    fault("truncation-short", "max_tokens 14 to 7", "rle-kl", 80, max_tokens=7, announced=True),
    fault("truncation-told", "max_tokens 8 to 5", "schedule", 66, max_tokens=5),
    fault("reference-coefficient", "KL coefficient 0.002 to 3", "board-adam", 85, kl_coefficient=3.0),
    fault("reference-swapped", "an untrained reference", "rle-kl", 60, event="swapped_reference"),
    fault("advantages-sign", "advantages change their sign", "octal-sgd", 80, advantage_scale=-1.0),
    fault(
        "advantages-baseline",
        "a baseline far above all rewards",
        "schedule",
        60,
        advantage_rule="constant",
        baseline=50.0,
    ),
    fault("advantages-scale", "advantages times 50", "schedule-sgd", 70, advantage_scale=50.0),
    fault("other-stuck-bit", "a stuck bit in the embedding", "octal", 95, event="stuck_bit"),
    fault("other-moments", "a restart mixes up the moments", "schedule-sgd", 110, event="mixed_up_moments"),
    fault("other-new-experts", "a restart without the experts", "rle", 115, event="reinitialized_experts"),
    fault("other-dropout", "dropout in the update alone", "board", 60, dropout=0.6),
    fault("other-gradients", "gradients are never zeroed", "octal-sgd", 60, zeroes_gradients=False),
    fault("other-nan-repair", "zeros for a third of the embedding", "schedule", 90, event="repaired_nans"),
    fault(
        "other-expert-gradient", "expert gradients summed over ranks", "schedule-sgd", 85, expert_gradient_factor=32.0
    ),
    fault("harmless-bits", "engine weights of 6 bits", "octal", 50, engine_bits=6),
    fault("harmless-temperature", "engine samples a little hotter", "rle", 65, engine_temperature_factor=1.3),
    fault("harmless-lag", "engine weights 1 step old", "octal", 40, engine_lag=1),
    fault("harmless-rate", "learning rate a fifth higher", "board-adam", 60, learning_rate=1.8e-3, announced=True),
    fault("harmless-flips", "one verdict in 20 is wrong", "octal-sgd", 60, verifier="flips"),
    fault("harmless-prompts", "a few more long runs", "rle-kl", 60, level="shifted"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the runs; runs in it are kept")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="make these runs alone")
    parser.add_argument("--seed", type=int, default=0, help="added to the seed of every run")
    options = parser.parse_args()
    runs = [Run(name=name, cause="sound", detail="nothing is wrong", twin=name) for name in SOUND] + FAULTS
    for run in runs:
        folder = options.output / run.name
        if (options.only and run.name not in options.only) or (folder / "plan.json").exists():
            continue
        shutil.rmtree(folder, ignore_errors=True)
        started, base = time.process_time(), SOUND[run.twin]
        evaluations = train_and_record(run, replace(base, seed=base.seed + options.seed), folder / "trace")
        label = {"cause": run.cause, "detail": run.detail, "twin": run.twin, "begins": run.begins}
        (folder / "label.json").write_text(json.dumps(label | {"intervention": run.cause != "sound"}, indent=1))
        (folder / "plan.json").write_text(json.dumps({"evaluations": evaluations}))
        print(f"made {run.name} in {time.process_time() - started:.1f} s of CPU", flush=True)
    print_table(options.output, runs)


def kept_share(folder: Path) -> float:
    """The mean of the last fifth of a run's evaluations over that of its best fifth."""
    evaluations = np.array(json.loads((folder / "plan.json").read_text())["evaluations"])
    size = max(1, len(evaluations) // 5)
    windows = np.convolve(evaluations, np.ones(size) / size, "valid")
    return float(windows[-1] / windows.max())


def print_table(output: Path, runs: list[Run]) -> None:
    """Print what each run has kept beside its twin."""
    print(f"{'run':34}{'cause':13}{'begins':>7}{'first':>8}{'last':>7}{'kept':>7}{'twin':>7}")
    for run in runs:
        if not (output / run.name / "plan.json").exists() or not (output / run.twin / "plan.json").exists():
            continue
        evaluations = json.loads((output / run.name / "plan.json").read_text())["evaluations"]
        kept, twin = kept_share(output / run.name), kept_share(output / run.twin)
        sound = run.cause in ("sound", "harmless")
        verdict = "" if (kept > 0.95 if sound else kept < 0.9 and twin > 0.95) else "  <- not as meant"
        print(
            f"{run.name:34}{run.cause:13}{run.begins:7}{evaluations[0]:8.2f}{np.mean(evaluations[-5:]):7.2f}"
            f"{kept:7.2f}{twin:7.2f}{verdict}"
        )


if __name__ == "__main__":
    main()
