"""A laboratory of collapsed RL runs: an attention policy that learns small tasks, and one fault that is switched on.

Each run trains the policy of attentive_policy.py by reinforcement learning (RLOO, or GSPO with clipped importance
ratios of sequences; AdamW with warm-up and a cosine), records it through tim_trace.Recorder as a training loop would,
and is compared with its twin, the run that shares every setting and seed and lacks the fault. A fault is nothing but
a setting that changes at a step, or something that happens once to the trainer's state.

    python attentive.py -o FOLDER [--only NAME ...] [--seed N]

makes FOLDER/NAME/trace, label.json and plan.json of each run, and prints which share of its best evaluation each kept.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from attentive_policy import (
    Array,
    Prompt,
    Rollouts,
    Sampling,
    Task,
    Weights,
    backward,
    credit,
    demonstration,
    forward,
    log_softmax,
    make_weights,
    pack,
    round_weights,
    sample,
    scatter,
)
from tim_trace import Loss, Recorder

EVALUATE_EVERY, EVALUATION_PROMPTS = 2, 192


@dataclass(frozen=True)
class Settings:
    """All that decides a run. A fault changes one of the settings below the first group, from a step on."""

    task: Task
    seed: int = 1
    steps: int = 100
    prompts: int = 16
    group: int = 4
    pool: int = 0  # distinct prompts that come again and again; 0: each comes once
    algorithm: str = "rloo"  # or gspo
    denominator: str = "train"  # of gspo's ratio: the logprobs of this pass
    clip: float = 0.2
    minibatches: int = 1
    exact: bool = False  # whether only a wholly right answer is paid
    reward_range: tuple[float, float] = (0.0, 1.0)
    jitter: float = 0.0  # spread of a judge's last digits, as a share of that range
    style: str = "plain"  # whose names metrics and settings have
    logs: tuple[str, ...] = ()  # settings that are logged with every step
    logs_evaluation: bool = True
    logs_loss: bool = True
    logs_finish: bool = True

    learning_rate: float = 2e-3
    warmup: int = 5
    floor: float = 0.3
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-8
    max_norm: float = 1.0

    engine_bits: int = 23
    engine_temperature: float = 1.0
    top_p: float = 1.0
    cache_noise: float = 0.0
    position_shift: int = 0  # of the engine's position embeddings
    unsynchronised: tuple[str, ...] = ()
    lag: int = 0
    says_version: bool = True

    reward_rule: str = "true"
    reward_noise: float = 0.0
    length_bonus: float = 0.0
    pairing: str = "own"
    entropy_coefficient: float = 0.0
    distribution: str = "usual"
    max_tokens: int = 8
    kl_coefficient: float = 0.0
    reference: str = "base"
    baseline: str = "group"
    advantage_epsilon: float = 0.1

    happens: str = ""  # once, before the step's update
    dropout: float = 0.0
    keeps_gradient: bool = False
    empty_share: float = 0.0
    tool_works: bool = True


@dataclass(frozen=True)
class Run:
    """A run: its twin's settings, the cause that its label names, and what changes from step `begins` on."""

    name: str
    cause: str
    detail: str
    twin: str
    begins: int = 1
    changes: dict[str, Any] = field(default_factory=dict)
    lasts: int = 10**6
    tells: bool = False  # whether the change is recorded as a hyperparameter

    def settings(self, step: int) -> Settings:
        """What holds at a step."""
        base = SOUND[self.twin]
        return replace(base, **self.changes) if self.begins <= step < self.begins + self.lasts else base


@dataclass
class Batch:
    """One step's sequences, with what engine, verifier and trainer say of them; per-token arrays are flat."""

    prompts: list[Prompt]
    rollouts: Rollouts
    rewards: Array
    advantages: Array
    counts: Array
    rollout: Array
    train: Array
    reference: Array | None


@dataclass
class Trainer:
    """The weights that learn, and the optimizer's state."""

    weights: Weights
    first: Weights
    second: Weights
    kept: Weights
    updates: int = 0


@cache
def base_policy(task: Task, seed: int, noise: float = 0.45) -> Weights:
    """The policy that RL begins with: learned from noisy demonstrations, not to the end."""
    rng = np.random.default_rng([seed, 77])
    weights = make_weights(task.vocabulary, rng)
    trainer = Trainer(weights, zeros(weights), zeros(weights), zeros(weights))
    settings = Settings(task, weight_decay=0.0)
    for _ in range(220 if task.name == "links" else 110):
        prompts = task.draw(rng, 64)
        shown = [demonstration(prompt, task.vocabulary, noise, rng) for prompt in prompts]
        tokens, rows, columns = pack(prompts, [said for said, _ in shown])
        said, counts = (np.concatenate([row[i] for row in shown]) for i in (0, 1))
        made = forward(trainer.weights, tokens)
        of_logits = np.exp(log_softmax(made.logits[rows, columns]))
        of_logits[np.arange(len(said)), said] -= 1
        of_logits *= counts[:, None] / counts.sum()
        update(
            trainer,
            backward(trainer.weights, made, scatter(made.logits.shape, rows, columns, of_logits)),
            settings,
            3e-3,
        )
    return trainer.weights


def zeros(weights: Weights) -> Weights:
    """Zeros in the shapes of the weights."""
    return {name: np.zeros_like(tensor) for name, tensor in weights.items()}


def update(trainer: Trainer, gradient: Weights, settings: Settings, rate: float) -> float:
    """One update by AdamW of the clipped gradient; returns the norm before clipping."""
    if settings.keeps_gradient:
        for name in gradient:
            trainer.kept[name] += gradient[name]
        gradient = trainer.kept
    norm = math.sqrt(sum(float((tensor.astype(float) ** 2).sum()) for tensor in gradient.values()))
    scale = min(1.0, settings.max_norm / (norm + 1e-6))
    trainer.updates += 1
    beta1, beta2, count = settings.beta1, settings.beta2, trainer.updates
    for name, tensor in trainer.weights.items():
        clipped = gradient[name] * np.float32(scale)
        first = trainer.first[name] = beta1 * trainer.first[name] + (1 - beta1) * clipped
        second = trainer.second[name] = beta2 * trainer.second[name] + (1 - beta2) * clipped**2
        move = first / (1 - beta1**count) / (np.sqrt(second / (1 - beta2**count)) + settings.epsilon)
        trainer.weights[name] = (tensor - rate * (move + settings.weight_decay * tensor)).astype(np.float32)
    return norm


def happen(event: str, trainer: Trainer, rng: np.random.Generator) -> None:
    """Do to the trainer's state what the event says."""
    weights = trainer.weights
    if event == "bits flipped":
        for name in ("head", "down", "mixer", "value", "token"):
            bits = weights[name].view(np.int32)
            flipped = rng.random(bits.shape) < 0.1
            weights[name] = np.where(flipped, bits ^ (1 << 25), bits).view(np.float32)
    elif event == "not-a-numbers replaced":
        for name in ("query", "key", "value", "mixer", "token"):
            weights[name] = weights[name] * (rng.random(weights[name].shape) >= 0.5)
    elif event == "second moments lost":
        trainer.second = zeros(weights)
    elif event == "layer made anew":
        fresh = make_weights(len(weights["token"]), rng)
        for name in ("up", "down", "mixer"):
            weights[name] = fresh[name]


def schedule(settings: Settings, step: int) -> float:
    """The learning rate: linear warm-up, then a cosine down to its floor."""
    done = min(1.0, step / settings.steps)
    cosine = settings.floor + (1 - settings.floor) * 0.5 * (1 + math.cos(math.pi * done))
    return settings.learning_rate * min(1.0, step / settings.warmup) * cosine


def pay(settings: Settings, prompts: Sequence[Prompt], made: Rollouts, rng: np.random.Generator) -> tuple[Array, Array]:
    """The rewards that training sees, and the true ones in 0 to 1."""
    rows = list(zip(prompts, made.responses, made.counts, made.finished, strict=True))
    true = np.array([credit(*row, exact=settings.exact) for row in rows])
    noise, jitter = rng.standard_normal((2, len(rows)))
    paid = true.copy()
    if settings.reward_rule == "inverted":
        paid = 1 - true
    elif settings.reward_rule == "low symbols":
        paid = np.array([1 - np.mean(said) / settings.task.vocabulary if said else 0.0 for said in made.responses])
    elif settings.reward_rule == "coin":
        paid = (noise > 0).astype(float)
    lengths = np.array([len(said) for said in made.responses])
    paid = paid + settings.length_bonus * lengths + settings.reward_noise * noise + settings.jitter * jitter
    paid = np.where(lengths > 0, paid, -settings.reward_range[0] / np.ptp(settings.reward_range))
    if settings.pairing == "next row":
        paid = np.roll(paid, -1)
    elif settings.pairing == "sorted":
        paid = np.sort(paid)
    low, high = settings.reward_range
    return low + (high - low) * paid, true


def judge(settings: Settings, rewards: Array, rng: np.random.Generator) -> Array:
    """Advantages of rewards [rows], whose groups follow each other."""
    grouped = rewards.reshape(-1, settings.group)
    if settings.algorithm == "rloo":
        made = (grouped - grouped.mean(1, keepdims=True)) * settings.group / (settings.group - 1)
    else:
        spread = grouped.std(1, keepdims=True) + settings.advantage_epsilon * np.ptp(settings.reward_range)
        made = (grouped - grouped.mean(1, keepdims=True)) / spread
    if settings.baseline == "none":
        made = grouped
    elif settings.baseline == "negated":
        made = -made
    elif settings.baseline == "sign lost":
        made = np.abs(made)
    flat: Array = made.reshape(-1)
    if settings.pairing == "advantages shuffled":
        flat = rng.permutation(flat)
    return flat


def score(weights: Weights, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> Array:
    """The logprob of every response token, rows after each other."""
    tokens, rows, columns = pack(prompts, responses)
    logprobs = log_softmax(forward(weights, tokens).logits[rows, columns])
    said = np.concatenate([np.asarray(response, int) for response in responses])
    return np.asarray(logprobs[np.arange(len(said)), said])


def lose(
    settings: Settings, trainer: Trainer, batch: Batch, chosen: Array, rng: np.random.Generator
) -> tuple[Weights, dict[str, float]]:
    """The gradient of the loss over the chosen rows, and what a trainer logs of it."""
    responses = [batch.rollouts.responses[row] for row in chosen]
    tokens, rows, columns = pack([batch.prompts[row] for row in chosen], responses)
    lengths = [len(response) for response in batch.rollouts.responses]
    of_chosen = np.isin(np.repeat(np.arange(len(lengths)), lengths), chosen)
    counts, said = batch.counts[of_chosen], np.concatenate([np.asarray(response, int) for response in responses])
    made = forward(trainer.weights, tokens, settings.dropout, rng)
    logprobs = log_softmax(made.logits[rows, columns])
    probabilities = np.exp(logprobs)
    places = np.arange(len(said))
    current = logprobs[places, said]
    old = (batch.rollout if settings.denominator == "rollout" else batch.train)[of_chosen]
    own = np.maximum(np.bincount(rows, counts, len(chosen)), 1)
    advantages = batch.advantages[chosen]
    if settings.algorithm == "gspo":
        ratio = np.exp(np.clip(np.bincount(rows, (current - old) * counts, len(chosen)) / own, -20, 20))
        clipped = np.clip(ratio, 1 - settings.clip, 1 + settings.clip)
        inside = ratio * advantages <= clipped * advantages
        terms = np.minimum(ratio * advantages, clipped * advantages)
        of_token = -(np.where(inside, ratio * advantages, 0) / own / len(chosen))[rows]
    else:
        inside = np.ones(len(chosen), bool)
        terms = advantages * np.bincount(rows, current * counts, len(chosen))
        of_token = -(advantages / len(chosen))[rows]
    entropies = -(probabilities * logprobs).sum(-1)
    total = max(counts.sum(), 1)
    told = {
        "policy_loss": -float(terms.mean()),
        "entropy": float((entropies * counts).sum() / total),
        "clip_fraction": 1 - float(inside.mean()),
        "update_kl": float(((old - current) * counts).sum() / total),
        "reference_kl": 0.0,
    }
    if batch.reference is not None:
        gap = batch.reference[of_chosen] - current
        told["reference_kl"] = float(((np.exp(gap) - 1 - gap) * counts / own[rows]).sum() / len(chosen))
        of_token = of_token + settings.kl_coefficient * (1 - np.exp(gap)) / own[rows] / len(chosen)
    told["loss"] = told["policy_loss"] + settings.kl_coefficient * told["reference_kl"]
    told["loss"] -= settings.entropy_coefficient * told["entropy"]
    of_logits = -probabilities * of_token[:, None]
    of_logits[places, said] += of_token
    of_logits += settings.entropy_coefficient / total * probabilities * (logprobs + entropies[:, None])
    of_logits *= counts[:, None]
    spread = scatter(made.logits.shape, rows, columns, of_logits)
    return backward(trainer.weights, made, spread), told


# What frameworks call their metrics and settings; what a style does not name, its runs do not record.
METRIC_NAMES = {
    "slime": {
        "loss": "train/loss",
        "policy_loss": "train/pg_loss",
        "entropy": "train/entropy_loss",
        "clip_fraction": "train/pg_clipfrac",
        "update_kl": "train/ppo_kl",
        "reference_kl": "train/kl_loss",
        "gradient_norm": "train/grad_norm",
        "rate": "train/lr-pg_0",
        "mismatch": "train/train_rollout_logprob_abs_diff",
        "reward": "rollout/raw_reward",
        "length": "rollout/response_len/mean",
        "truncated": "rollout/truncated_ratio",
        "evaluation": "eval/held_out",
    },
    "nemo-rl": {
        "loss": "train/loss",
        "entropy": "train/approx_entropy",
        "reference_kl": "train/kl_penalty",
        "gradient_norm": "train/grad_norm",
        "rate": "train/lr",
        "mismatch": "train/gen_kl_error",
        "mismatch_ratio": "train/token_mult_prob_error",
        "reward": "train/reward",
        "length": "train/mean_gen_tokens_per_sample",
        "prompt_length": "train/mean_prompt_length",
        "evaluation": "validation/accuracy",
    },
    "openrlhf": {
        "policy_loss": "train/policy_loss",
        "update_kl": "train/ppo_kl",
        "reference_kl": "train/kl",
        "clip_fraction": "train/ppo_clip_ratio",
        "gradient_norm": "train/actor_grad_norm",
        "rate": "train/actor_lr",
        "mismatch": "train/vllm_kl",
        "reward": "train/reward",
        "length": "train/response_length",
        "truncated": "train/truncated",
        "evaluation": "eval/eval_default_pass1",
    },
    "plain": {
        "loss": "objective",
        "entropy": "policy entropy",
        "gradient_norm": "norm of gradient",
        "rate": "step size",
        "reward": "score",
        "reward_spread": "score sd",
        "length": "tokens out",
        "evaluation": "score held out",
    },
    "terse": {"policy_loss": "pl", "gradient_norm": "gn", "reward": "r", "evaluation": "dev"},
}
SETTING_NAMES = {
    "slime": {
        "learning_rate": "lr",
        "weight_decay": "weight_decay",
        "beta1": "adam_beta1",
        "beta2": "adam_beta2",
        "epsilon": "adam_eps",
        "max_norm": "clip_grad",
        "clip": "eps_clip",
        "kl_coefficient": "kl_loss_coef",
        "entropy_coefficient": "entropy_coef",
        "group": "n_samples_per_prompt",
        "prompts": "rollout_batch_size",
        "max_tokens": "rollout_max_response_len",
        "engine_temperature": "rollout_temperature",
        "top_p": "rollout_top_p",
        "warmup": "lr_warmup_iters",
        "algorithm": "advantage_estimator",
        "seed": "seed",
    },
    "nemo-rl": {
        "learning_rate": "policy.optimizer.kwargs.lr",
        "weight_decay": "policy.optimizer.kwargs.weight_decay",
        "epsilon": "policy.optimizer.kwargs.eps",
        "max_norm": "policy.max_grad_norm",
        "clip": "loss_fn.ratio_clip_min",
        "kl_coefficient": "loss_fn.reference_policy_kl_penalty",
        "group": "grpo.num_generations_per_prompt",
        "prompts": "grpo.num_prompts_per_step",
        "max_tokens": "policy.generation.max_new_tokens",
        "engine_temperature": "policy.generation.temperature",
        "top_p": "policy.generation.top_p",
        "seed": "grpo.seed",
    },
    "openrlhf": {
        "learning_rate": "actor_learning_rate",
        "weight_decay": "l2",
        "max_norm": "max_norm",
        "kl_coefficient": "init_kl_coef",
        "entropy_coefficient": "entropy_loss_coef",
        "group": "n_samples_per_prompt",
        "prompts": "rollout_batch_size",
        "max_tokens": "generate_max_len",
        "engine_temperature": "temperature",
        "top_p": "top_p",
        "algorithm": "advantage_estimator",
        "seed": "seed",
    },
    "plain": {
        "learning_rate": "largest step size",
        "weight_decay": "decay",
        "beta1": "memory of mean",
        "beta2": "memory of square",
        "entropy_coefficient": "weight of entropy",
        "kl_coefficient": "weight of KL",
        "group": "samples",
        "max_tokens": "most tokens out",
    },
    "terse": {"learning_rate": "lr", "group": "k", "prompts": "n", "entropy_coefficient": "ent"},
}


def record_settings(recorder: Recorder, settings: Settings) -> None:
    """Contracts, hyperparameters and loss, as a training loop knows them at its start."""
    dtype = "bfloat16" if settings.engine_bits == 7 else "float32"
    recorder.add_contract("rollout", {"engine": "cached decoder", "dtype": dtype, "logprobs": "processed"})
    recorder.add_contract("train", {"engine": "attentive", "dtype": "float32", "source": "recomputed"})
    recorder.describe(model={"vocabulary": settings.task.vocabulary, "layers": 1, "task": settings.task.name})
    names = SETTING_NAMES[settings.style]
    recorder.add_hyperparameters({theirs: getattr(settings, ours) for ours, theirs in names.items()})
    if not settings.logs_loss:
        return
    if settings.algorithm == "gspo":
        loss = Loss(
            kind="ppo_clip",
            level="sequence_mean",
            clip_low=settings.clip,
            clip_high=settings.clip,
            denominator=settings.denominator,
            aggregation="sequence_mean",
            kl_coefficient=settings.kl_coefficient,
            unknown=("kl is not weighted by the ratio",) if settings.kl_coefficient else (),
        )
    else:
        loss = Loss(kind="reinforce", denominator="current", aggregation="sequence_sum")
    recorder.add_loss(loss)


def record_batch(recorder: Recorder, settings: Settings, step: int, batch: Batch, version: int) -> None:
    """A step's sequences and their scores."""
    made = batch.rollouts
    ends = np.cumsum([len(response) for response in made.responses])[:-1]
    reasons = [
        "stop" if finished else "length" if said else "abort"
        for finished, said in zip(made.finished, made.responses, strict=True)
    ]
    recorded = recorder.add_sequences(
        step=step,
        prompt_ids=[list(prompt.ids) for prompt in batch.prompts],
        response_ids=made.responses,
        response_mask=made.counts if settings.task.name == "tool" else None,
        group_ids=[f"{step}-{row // settings.group}" for row in range(len(batch.prompts))],
        reward=batch.rewards,
        advantage=batch.advantages,
        policy_version=version if settings.says_version else None,
        max_tokens=settings.max_tokens if settings.logs_finish else None,
        finish_reason=reasons if settings.logs_finish else None,
    )
    passes = {"rollout": batch.rollout, "train": batch.train, "reference": batch.reference}
    for name, logprobs in passes.items():
        if logprobs is not None:
            rows = [row.astype(np.float32) for row in np.split(np.minimum(logprobs, 0), ends)]
            own = (step - 1) * settings.minibatches if settings.says_version and name == "train" else None
            recorder.add_scores(name, recorded, logprobs=rows, scored_mask=made.counts, policy_version=own)


def evaluate(settings: Settings, weights: Weights, cause: str, seed: int) -> float:
    """The true mean reward of held-out prompts, sampled from the trainer's own weights.

    The conditions are those of the original task; a fault of data, of truncation or of the tool keeps its own.
    """
    rng = np.random.default_rng([seed, 5])
    sampling = Sampling(max_tokens=settings.max_tokens if cause == "truncation" else 8, tool_works=settings.tool_works)
    distribution = settings.distribution if cause == "data" else "usual"
    prompts = settings.task.draw(rng, EVALUATION_PROMPTS, distribution)
    made = sample(weights, prompts, sampling, rng)
    rows = zip(prompts, made.responses, made.counts, made.finished, strict=True)
    return float(np.mean([credit(*row, exact=settings.exact) for row in rows]))


def engine_weights(run: Run, settings: Settings, step: int, history: list[Weights]) -> tuple[Weights, int]:
    """What the engine samples with at a step, and the step whose weights these are."""
    source = step - min(settings.lag, step - run.begins if settings.lag else 0)
    weights = dict(history[source - 1])
    for name in settings.unsynchronised:
        weights[name] = history[run.begins - 1][name]
    if settings.position_shift:
        weights["position"] = np.roll(weights["position"], -settings.position_shift, axis=0)
    return (round_weights(weights, settings.engine_bits) if settings.engine_bits < 23 else weights), source


def reference_weights(settings: Settings, base: Weights) -> Weights:
    """The reference model of the KL term."""
    if settings.reference == "untrained":
        return make_weights(settings.task.vocabulary, np.random.default_rng([settings.seed, 8]))
    return base


def train(run: Run, path: Path, seed: int) -> list[float]:
    """Train and record one run; returns its true evaluations."""
    start = run.settings(1)
    seed = start.seed + 100 * seed
    base = base_policy(start.task, seed)
    trainer = Trainer({name: tensor.copy() for name, tensor in base.items()}, zeros(base), zeros(base), zeros(base))
    drawing, sampling, paying, losing, breaking = (np.random.default_rng([seed, stream]) for stream in range(5))
    pool = start.task.draw(np.random.default_rng([seed, 9]), start.pool) if start.pool else []
    history: list[Weights] = []
    evaluations: list[float] = []
    with Recorder(path) as recorder:
        record_settings(recorder, start if run.tells else SOUND[run.twin])
        for step in range(1, start.steps + 1):
            settings = run.settings(step)
            history.append(dict(trainer.weights))
            if run.tells and step in (run.begins, run.begins + run.lasts) and step > 1:
                names = SETTING_NAMES[settings.style]
                told = {names[name]: getattr(settings, name) for name in run.changes if name in names}
                recorder.add_hyperparameters(told, step=step)
            if pool and settings.distribution == "usual":
                drawn = [pool[place] for place in drawing.choice(len(pool), settings.prompts, replace=False)]
            else:
                drawn = settings.task.draw(drawing, settings.prompts, settings.distribution)
            prompts = [prompt for prompt in drawn for _ in range(settings.group)]
            weights, source = engine_weights(run, settings, step, history)
            how = Sampling(
                settings.engine_temperature,
                settings.top_p,
                settings.cache_noise,
                settings.max_tokens,
                settings.tool_works,
            )
            made = sample(weights, prompts, how, sampling)
            if settings.empty_share:
                for row in np.nonzero(breaking.random(len(prompts)) < settings.empty_share)[0]:
                    made.responses[row], made.logprobs[row], made.counts[row], made.finished[row] = [], [], [], False
            rewards, _ = pay(settings, prompts, made, paying)
            batch = Batch(
                prompts,
                made,
                rewards,
                judge(settings, rewards, paying),
                np.concatenate([np.asarray(row, bool) for row in made.counts]),
                np.concatenate([np.asarray(row, np.float32) for row in made.logprobs]),
                score(trainer.weights, prompts, made.responses),
                None,
            )
            if settings.kl_coefficient:
                batch.reference = score(reference_weights(settings, base), prompts, made.responses)
            record_batch(recorder, settings, step, batch, (source - 1) * settings.minibatches)
            if settings.happens and step == run.begins:
                happen(settings.happens, trainer, breaking)
            rate = schedule(settings, step)
            told_of = []
            for chosen in np.array_split(losing.permutation(len(prompts)), settings.minibatches):
                gradient, told = lose(settings, trainer, batch, np.sort(chosen), losing)
                told["gradient_norm"] = update(trainer, gradient, settings, rate)
                told_of.append(told)
            logged = {name: float(np.mean([told[name] for told in told_of])) for name in told_of[0]}
            logged |= {"rate": rate, **of_batch(batch)}
            if step % EVALUATE_EVERY == 0:
                evaluations.append(evaluate(settings, trainer.weights, run.cause, seed))
                if settings.logs_evaluation and step % (4 * EVALUATE_EVERY) == 0:
                    logged["evaluation"] = evaluations[-1]
            names = METRIC_NAMES[settings.style]
            metrics = {names[name]: value for name, value in logged.items() if name in names}
            for name in settings.logs:
                metrics[f"setting/{name}"] = getattr(settings, name)
            recorder.add_metrics(step, metrics)
    return evaluations


def of_batch(batch: Batch) -> dict[str, float]:
    """What a trainer logs of a step's sequences."""
    gap = (batch.train - batch.rollout)[batch.counts]
    return {
        "reward": float(batch.rewards.mean()),
        "reward_spread": float(batch.rewards.std()),
        "length": float(np.mean([len(response) for response in batch.rollouts.responses])),
        "prompt_length": float(np.mean([len(prompt.ids) for prompt in batch.prompts])),
        "truncated": 1 - float(np.mean(batch.rollouts.finished)),
        "mismatch": float(np.abs(gap).mean()),
        "mismatch_ratio": float(np.exp(np.minimum(np.abs(gap), 30)).mean()),
    }


def kept_share(evaluations: Sequence[float]) -> float:
    """The mean of the last fifth of the evaluations, as a share of the best fifth's."""
    fifths = [part.mean() for part in np.array_split(np.array(evaluations), 5)]
    return float(fifths[-1] / max(fifths))


SOUND = {
    "sound-a": Settings(
        Task("links", 32), seed=11, steps=100, pool=64, style="slime", learning_rate=3e-3, logs_loss=False
    ),
    "sound-b": Settings(
        Task("largest", 18), seed=12, steps=110, prompts=6, group=8, algorithm="gspo", minibatches=2, style="nemo-rl",
        kl_coefficient=0.02, learning_rate=3e-3,
    ),
    "sound-c": Settings(
        Task("links", 40), seed=13, steps=120, reward_range=(-20.0, -10.0), style="openrlhf", learning_rate=3e-3,
        logs_evaluation=False,
    ),
    "sound-d": Settings(
        Task("tool", 20), seed=14, steps=90, prompts=8, group=8, pool=48, algorithm="gspo", minibatches=2,
        reward_range=(-1.0, 1.0), style="plain", learning_rate=3e-3, logs=("entropy_coefficient",),
    ),
    "sound-e": Settings(
        Task("largest", 20), seed=15, steps=100, prompts=12, pool=60, reward_range=(0.0, 10.0), style="terse",
        learning_rate=3e-3, logs_loss=False, logs_finish=False,
    ),
    "sound-f": Settings(
        Task("count", 28), seed=16, steps=120, prompts=8, group=8, algorithm="gspo", minibatches=2, style="slime",
        learning_rate=3e-3,
    ),
    "sound-g": Settings(
        Task("largest", 24), seed=17, steps=100, prompts=8, group=8, pool=64, algorithm="gspo", minibatches=2,
        reward_range=(-20.0, -10.0), style="nemo-rl", kl_coefficient=0.2, learning_rate=3e-3, logs_evaluation=False,
        jitter=0.002,
    ),
    "sound-h": Settings(
        Task("links", 28), seed=18, steps=100, algorithm="gspo", denominator="rollout", exact=True, style="plain",
        learning_rate=3e-3, minibatches=2, logs_evaluation=False, logs=("learning_rate", "max_tokens"),
    ),
    "sound-i": Settings(
        Task("tool", 24), seed=19, steps=80, pool=64, reward_range=(-20.0, -10.0), style="openrlhf", learning_rate=3e-3,
    ),
    "sound-j": Settings(
        Task("count", 26), seed=20, steps=120, style="terse", learning_rate=3e-3, logs_finish=False, says_version=False,
    ),
}  # fmt: skip

RUNS = [Run(name, "sound", "nothing changes", name) for name in SOUND]
RUNS += [
    Run("mismatch-positions", "mismatch", "engine's positions begin at 2", "sound-a", 35, {"position_shift": 2}),
    Run("mismatch-cache-early", "mismatch", "noise in the engine's cache", "sound-j", 20, {"cache_noise": 4.0}),
    Run("mismatch-cache", "mismatch", "noise in the engine's cache", "sound-i", 35, {"cache_noise": 4.0}),
    Run("mismatch-partly-synchronised", "mismatch", "engine's layer is no longer updated", "sound-c", 10,
        {"unsynchronised": ("query", "key", "value", "mixer", "up", "down", "up_bias")}),
    Run("staleness-told", "staleness", "engine lags 25 steps", "sound-i", 20, {"lag": 25}),
    Run("staleness-untold", "staleness", "engine lags 30 steps", "sound-j", 1, {"lag": 30}),
    Run("optimizer-spike", "optimizer", "learning rate times 30 for 6 steps", "sound-b", 60, {"learning_rate": 0.1}, 6,
        True),
    Run("optimizer-rate", "optimizer", "learning rate times 10", "sound-h", 50, {"learning_rate": 0.03}),
    Run("optimizer-decay", "optimizer", "weight decay of 15", "sound-d", 40, {"weight_decay": 15.0}, tells=True),
    Run("optimizer-momentum", "optimizer", "beta2 of 0", "sound-a", 40, {"beta2": 0.0}),
    Run("reward-inverted", "reward", "verifier pays wrong answers", "sound-e", 50, {"reward_rule": "inverted"}),
    Run("reward-noise", "reward", "verifier throws a coin", "sound-c", 50, {"reward_rule": "coin"}),
    Run("reward-style", "reward", "verifier pays low symbols", "sound-c", 25, {"reward_rule": "low symbols"}),
    Run("length-longer", "length", "each token is paid", "sound-a", 12, {"length_bonus": 0.7}),
    Run("length-shorter", "length", "each token costs", "sound-f", 45, {"length_bonus": -0.4}),
    Run("pairing-rewards", "pairing", "each row has the next row's reward", "sound-i", 30, {"pairing": "next row"}),
    Run("pairing-advantages", "pairing", "advantages shuffled over the batch", "sound-c", 25,
        {"pairing": "advantages shuffled"}),
    Run("pairing-sorted", "pairing", "rewards come back sorted", "sound-g", 40, {"pairing": "sorted"}),
    Run("entropy-bonus", "entropy", "entropy bonus of 1", "sound-d", 45, {"entropy_coefficient": 1.0}),
    Run("entropy-bonus-early", "entropy", "entropy bonus of 0.6", "sound-j", 30,
        {"entropy_coefficient": 0.6}, tells=True),
    Run("data-longer", "data", "prompts become longer", "sound-c", 60, {"distribution": "longer"}),
    Run("data-rare", "data", "prompts of rare symbols", "sound-f", 60, {"distribution": "rare"}),
    Run("truncation-hard", "truncation", "at most 3 tokens", "sound-h", 50, {"max_tokens": 3}),
    Run("truncation-soft", "truncation", "at most 3 tokens", "sound-b", 55, {"max_tokens": 3}, tells=True),
    Run("reference-coefficient", "reference", "KL coefficient of 20", "sound-b", 50, {"kl_coefficient": 20.0}),
    Run("reference-swapped", "reference", "reference model is untrained", "sound-g", 50,
        {"reference": "untrained"}),
    Run("advantages-negated", "advantages", "sign of the advantages", "sound-d", 50, {"baseline": "negated"}),
    Run("advantages-no-baseline", "advantages", "no baseline", "sound-g", 25, {"baseline": "none"}),
    Run("advantages-sign-lost", "advantages", "absolute advantages", "sound-j", 20, {"baseline": "sign lost"}),
    Run("other-bits", "other", "bits flipped in the trainer's weights", "sound-a", 60, {"happens": "bits flipped"}),
    Run("other-nan-repair", "other", "not-a-numbers replaced by zeros", "sound-h", 60,
        {"happens": "not-a-numbers replaced"}),
    Run("other-moments", "other", "second moments lost at a restart", "sound-c", 50,
        {"happens": "second moments lost"}),
    Run("other-layer", "other", "a layer made anew", "sound-e", 60, {"happens": "layer made anew"}),
    Run("other-gradient-kept", "other", "gradient never set to zero", "sound-d", 40, {"keeps_gradient": True}),
    Run("other-empty", "other", "most of the batch is empty and has a reward of 0", "sound-g", 42,
        {"empty_share": 0.6}),
    Run("other-tool", "other", "the tool breaks down", "sound-d", 50, {"tool_works": False}),
    Run("harmless-coarse", "harmless", "engine's weights are powers of two", "sound-c", 20, {"engine_bits": 0}),
    Run("harmless-nucleus", "harmless", "engine samples with top-p 0.9", "sound-d", 30, {"top_p": 0.9}),
    Run("harmless-bfloat16", "harmless", "engine in bfloat16", "sound-c", 1, {"engine_bits": 7}, tells=True),
    Run("harmless-lag", "harmless", "engine lags 2 steps", "sound-i", 30, {"lag": 2}),
    Run("harmless-rate", "harmless", "learning rate times 1.6 for 6 steps", "sound-b", 50, {"learning_rate": 5e-3}, 6),
    Run("harmless-noise", "harmless", "noisy reward without bias", "sound-d", 30, {"reward_noise": 0.1}),
    Run("harmless-temperature", "harmless", "engine samples at 1.2", "sound-e", 30, {"engine_temperature": 1.2}),
    Run("harmless-dropout", "harmless", "dropout in the update only", "sound-j", 40, {"dropout": 0.3}),
    Run("harmless-prompts", "harmless", "a tenth of the prompts is longer", "sound-f", 50, {"distribution": "mixed"}),
]  # fmt: skip


def make(run: Run, folder: Path, seed: int) -> None:
    """Make a run's folder, unless it is there."""
    if (folder / "plan.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    evaluations = train(run, folder / "trace", seed)
    label = {
        "cause": run.cause,
        "detail": run.detail,
        "twin": run.twin,
        "begins": run.begins,
        "intervention": run.cause != "sound" and len(run.changes) == 1,
    }
    (folder / "label.json").write_text(json.dumps(label, indent=1))
    (folder / "plan.json").write_text(json.dumps({"evaluations": evaluations}))


def main() -> None:
    """Make the runs that are not there, and print which share of its best evaluation each kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of runs; their twins are made too")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes another laboratory")
    arguments = parser.parse_args()
    by_name = {run.name: run for run in RUNS}
    wanted = arguments.only or list(by_name)
    wanted = list(dict.fromkeys(name for each in wanted for name in (by_name[each].twin, each)))
    shares: dict[str, float] = {}
    print(f"{'run':26} {'cause':12} {'best':>5} {'kept':>5} {'twin':>5}")
    for name in wanted:
        run = by_name[name]
        make(run, arguments.output / name, arguments.seed)
        evaluations = json.loads((arguments.output / name / "plan.json").read_text())["evaluations"]
        shares[name] = kept_share(evaluations)
        best = max(part.mean() for part in np.array_split(np.array(evaluations), 5))
        fell = shares[name] < 0.9
        meant = run.cause not in ("sound", "harmless")
        right = shares[run.twin] > 0.95 and (fell if meant else shares[name] > 0.95)
        print(
            f"{name:26} {run.cause:12} {best:5.2f} {shares[name]:5.2f} {shares[run.twin]:5.2f}{'' if right else '  !'}"
        )
    print(f"{time.process_time():.0f} s of CPU")


if __name__ == "__main__":
    main()
