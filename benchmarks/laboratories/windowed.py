"""A laboratory of collapsed RL runs: a windowed feed-forward policy trained with REINFORCE, by SGD or RMSprop.

    python windowed.py -o FOLDER [--only NAME ...] [--seed N]

Every run is trained in numpy and recorded with tim_trace.Recorder. A run with a fault differs from its twin, the sound
run of the same family, in the settings that the fault switches at one step; all random streams are shared. The folder of
a run holds its trace, label.json (cause, detail, twin, first step of the fault) and plan.json (evaluations by the true
reward). Runs that are there already are not made again. At the end a table says how much each run kept of its best.
"""

import argparse
import json
import time
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from tim_trace import Loss, Recorder
from windowed_policy import (
    EOS,
    FIRST,
    PAD,
    TASKS,
    backward,
    forward,
    log_softmax,
    new_weights,
    response_windows,
    sample,
    score,
)

EVALUATION_PROMPTS = 256
EVALUATE_EVERY = 4
LONGEST = 16
"""Uniform numbers drawn for each response, whatever max_tokens is: streams stay the same under every fault."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run. A fault replaces some of these at one step."""

    task: str = "brackets"
    seed: int = 0
    steps: int = 160
    pretraining_steps: int = 150
    prompts: int = 8
    group: int = 6
    prompt_kind: str = "usual"
    max_tokens: int | None = None
    tool_works: bool = True

    reward_low: float = 0.0
    reward_high: float = 10.0
    reward_jitter: float = 0.0
    verifier: str = "exact"
    wrong_share: float = 0.0
    length_bonus: float = 0.0
    answers_roll: int = 0
    reward_roll: int = 0
    baseline: str = "prompt"
    std_epsilon: float | None = None
    advantage_roll: int = 0
    advantage_scale: float = 1.0

    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    reference: str = "start"
    optimizer: str = "sgd"
    learning_rate: float = 0.3
    momentum: float = 0.9
    decay: float = 0.99
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    restart_every: int | None = None
    keep_gradients: bool = False
    dropout: float = 0.0
    label_shift: int = 0
    frozen: tuple[str, ...] = ()
    damage: str = ""

    temperature: float = 1.0
    top_k: int = 0
    mantissa_bits: int | None = None
    cache_noise: float = 0.0
    unsynchronised: tuple[str, ...] = ()
    lag: int = 0
    synchronise_every: int = 1


@dataclass(frozen=True)
class Style:
    """What a loop records and the names that it gives: of settings, and of what it logs each step."""

    settings: dict[str, str]
    metrics: dict[str, str]
    evaluation: str | None
    reference_pass: str = "ref"
    says_version: bool = True
    says_loss: bool = True


VERL = Style(
    settings={
        "learning_rate": "actor_rollout_ref.actor.optim.lr",
        "weight_decay": "actor_rollout_ref.actor.optim.weight_decay",
        "momentum": "actor_rollout_ref.actor.optim.momentum",
        "max_grad_norm": "actor_rollout_ref.actor.grad_clip",
        "entropy_coefficient": "actor_rollout_ref.actor.entropy_coeff",
        "kl_coefficient": "actor_rollout_ref.actor.kl_loss_coef",
        "temperature": "actor_rollout_ref.rollout.temperature",
        "top_k": "actor_rollout_ref.rollout.top_k",
        "group": "actor_rollout_ref.rollout.n",
        "max_tokens": "data.max_response_length",
        "prompts": "data.train_batch_size",
        "baseline": "algorithm.adv_estimator",
        "steps": "trainer.total_training_steps",
    },
    metrics={
        "loss": "actor/pg_loss",
        "grad_norm": "actor/grad_norm",
        "learning_rate": "actor/lr",
        "entropy": "actor/entropy",
        "reference_kl": "actor/kl_loss",
        "kl_coefficient": "actor/kl_coef",
        "reward": "critic/rewards/mean",
        "reward_max": "critic/rewards/max",
        "reward_min": "critic/rewards/min",
        "advantage": "critic/advantages/mean",
        "advantage_max": "critic/advantages/max",
        "advantage_min": "critic/advantages/min",
        "length": "response_length/mean",
        "cut_share": "response_length/clip_ratio",
        "prompt_length": "prompt_length/mean",
    },
    evaluation="val-core/{task}/reward/mean@1",
)
HOME = Style(
    settings={
        "learning_rate": "lr",
        "decay": "alpha",
        "epsilon": "eps",
        "momentum": "momentum",
        "weight_decay": "wd",
        "max_grad_norm": "clip",
        "entropy_coefficient": "ent_coef",
        "kl_coefficient": "beta",
        "temperature": "temp",
        "group": "samples_per_prompt",
        "max_tokens": "max_new_tokens",
    },
    metrics={
        "loss": "loss",
        "grad_norm": "gnorm",
        "entropy": "H",
        "reward": "reward",
        "length": "len",
        "reference_kl": "kl_ref",
    },
    evaluation=None,
    reference_pass="reference",
    says_version=False,
    says_loss=False,
)
PLAIN = Style(
    settings={
        "learning_rate": "learning_rate",
        "optimizer": "optimizer",
        "momentum": "momentum",
        "decay": "rms_decay",
        "epsilon": "rms_eps",
        "max_grad_norm": "max_grad_norm",
        "entropy_coefficient": "entropy_coef",
        "kl_coefficient": "kl_coef",
        "group": "num_generations",
        "top_k": "top_k",
        "temperature": "temperature",
        "max_tokens": "max_completion_length",
        "synchronise_every": "weight_sync_interval",
        "std_epsilon": "advantage_eps",
    },
    metrics={
        "loss": "train/loss",
        "grad_norm": "train/grad_norm",
        "learning_rate": "train/learning_rate",
        "entropy": "train/entropy",
        "engine_kl": "train/rollout_kl",
        "reward": "train/reward",
        "reward_std": "train/reward_std",
        "advantage_std": "train/advantage_std",
        "length": "train/completion_length",
        "cut_share": "train/clipped_ratio",
    },
    evaluation="eval/accuracy",
    reference_pass="reference",
)


@dataclass(frozen=True)
class Family:
    """Runs that share every setting and every random stream but for their faults."""

    settings: Settings
    style: Style


@dataclass(frozen=True)
class Run:
    """A run of a family: what is switched at the step `begins`, and back at `ends`; a sound run switches nothing.

    `told` says that the switched settings are recorded where the style has a name for them, `version_recorded` that the
    policy version of the sampling weights is recorded where the style says versions.
    """

    family: str
    name: str
    cause: str
    detail: str
    fault: dict = field(default_factory=dict)
    begins: int = 1
    ends: int | None = None
    told: bool = False
    version_recorded: bool = True

    @property
    def evaluated_as_run(self):
        """Whether evaluations are made under the run's own prompts, max_tokens and tool."""
        return self.cause in ("data", "truncation") or "tool_works" in self.fault


class Engine:
    """Samples with weights of its own: what the trainer last sent, as inexact as the settings say."""

    def __init__(self, weights):
        self.sent = weights
        self.version = 0
        self.earlier = deque([(0, weights)], maxlen=65)
        self.kept = {}

    def synchronise(self, weights, version, settings):
        """Take over the trainer's weights, or those of `lag` updates ago, and keep what is left out of it."""
        if version:
            self.earlier.append((version, weights))
        if version % settings.synchronise_every == 0:
            self.version, self.sent = self.earlier[max(0, len(self.earlier) - 1 - settings.lag)]
        for name in settings.unsynchronised:
            self.kept.setdefault(name, self.sent[name])

    def weights(self, settings):
        """The weights that sample."""
        used = self.sent | {name: self.kept[name] for name in settings.unsynchronised}
        if settings.mantissa_bits is None:
            return used
        return {name: round_mantissa(array, settings.mantissa_bits) for name, array in used.items()}


def round_mantissa(array, bits):
    mantissa, exponent = np.frexp(array)
    return np.ldexp(np.round(mantissa * 2**bits) / 2**bits, exponent)


class Optimizer:
    """SGD with momentum, or RMSprop, with clipping by the global norm and decoupled weight decay."""

    def __init__(self, weights):
        self.momentum = {name: np.zeros_like(array) for name, array in weights.items()}
        self.square = {name: np.zeros_like(array) for name, array in weights.items()}

    def step(self, weights, gradients, settings, learning_rate):
        """Give the new weights and the norm of the gradients before they were clipped."""
        norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
        scale = 1.0 if settings.max_grad_norm is None else min(1.0, settings.max_grad_norm / (norm + 1e-6))
        updated = {}
        for name, array in weights.items():
            gradient = scale * gradients[name]
            if settings.optimizer == "sgd":
                self.momentum[name] = settings.momentum * self.momentum[name] + gradient
                change = self.momentum[name]
            else:
                self.square[name] = settings.decay * self.square[name] + (1 - settings.decay) * gradient**2
                change = gradient / (np.sqrt(self.square[name]) + settings.epsilon)
            kept = array * (1 - learning_rate * settings.weight_decay) - learning_rate * change
            updated[name] = array if name in settings.frozen else kept
        return updated, norm


def pretrain(settings, task):
    """Imitate right responses for some steps: the checkpoint that RL starts from, and its reference."""
    draw = np.random.default_rng([settings.seed, 1])
    weights = new_weights(draw, task)
    optimizer = Optimizer(weights)
    for _ in range(settings.pretraining_steps):
        prompts, answers = task.prompts(draw, 64)
        windows, tokens = response_windows(prompts, answers, task.window)
        logits, cache = forward(weights, windows)
        gradient = np.exp(log_softmax(logits))
        gradient[np.arange(len(tokens)), tokens] -= 1
        imitation = replace(settings, optimizer="rmsprop", decay=0.95, max_grad_norm=None)
        weights, _ = optimizer.step(weights, backward(weights, cache, gradient / len(tokens)), imitation, 0.003)
    return weights


def damaged(weights, kind, task, draw):
    """The weights after an accident; the optimizer's state is untouched."""
    if kind == "bit flips":
        head = weights["head"].copy()
        head.flat[draw.choice(head.size, 24, replace=False)] *= 2.0**8
        return weights | {"head": head}
    return weights | {name: new_weights(draw, task)[name] for name in kind.split()}


def verified_rewards(settings, responses, answers, draw):
    """What the verifier pays, which is the true score unless a fault says otherwise."""
    shown = np.roll(answers, settings.answers_roll * settings.group, axis=0)
    points = score(responses, shown)
    lengths = (responses != PAD).sum(axis=1)
    if settings.verifier == "inverted":
        points = 1 - points
    elif settings.verifier == "one token":
        points = (responses == FIRST).sum(axis=1) / responses.shape[1]
    wrong = draw.random(len(points)) < settings.wrong_share
    points = np.where(wrong, draw.random(len(points)), points)
    rewards = settings.reward_low + (settings.reward_high - settings.reward_low) * points
    rewards = rewards + settings.length_bonus * lengths + settings.reward_jitter * draw.normal(size=len(points))
    return np.roll(rewards, settings.reward_roll)


class Advantages:
    """Rewards less a baseline: the moving mean of all rewards, the mean of the prompt's group, or a wrong one."""

    def __init__(self):
        self.moving = None

    def of(self, rewards, settings):
        groups = rewards.reshape(-1, settings.group)
        self.moving = rewards.mean() if self.moving is None else self.moving
        baselines = {
            "prompt": groups.mean(axis=1, keepdims=True),
            "sum": groups.sum(axis=1, keepdims=True),
            "moving": self.moving,
            "undecayed": self.moving,
            "none": 0.0,
        }
        advantages = groups - baselines[settings.baseline]
        if settings.std_epsilon is not None:
            advantages = advantages / (groups.std(axis=1, keepdims=True) + settings.std_epsilon)
        self.moving = (1.0 if settings.baseline == "undecayed" else 0.9) * self.moving + 0.1 * rewards.mean()
        return np.roll(settings.advantage_scale * advantages.ravel(), settings.advantage_roll)


def loss_gradient(weights, reference, windows, tokens, advantages, settings, draw):
    """The gradient of the loss, and what is logged of it: loss, entropy and KL to the reference."""
    count = len(tokens)
    rows = np.arange(count)
    units = len(weights["hidden_bias"])
    dropped = None
    if settings.dropout:
        dropped = (draw.random((count, units)) >= settings.dropout) / (1 - settings.dropout)
    logits, cache = forward(weights, windows, dropped)
    logprobs = log_softmax(logits)
    probabilities = np.exp(logprobs)
    entropy = -(probabilities * logprobs).sum(axis=1)
    labels = np.roll(tokens, settings.label_shift)
    log_ratio = log_softmax(forward(reference, windows)[0])[rows, labels] - logprobs[rows, labels]
    per_logprob = -advantages + settings.kl_coefficient * (1 - np.exp(np.minimum(log_ratio, 20)))
    gradient = -per_logprob[:, None] * probabilities
    gradient[rows, labels] += per_logprob
    gradient += settings.entropy_coefficient * probabilities * (logprobs + entropy[:, None])
    reference_kl = np.mean(np.exp(np.minimum(log_ratio, 20)) - 1 - log_ratio)
    measured = {
        "loss": -np.mean(advantages * logprobs[rows, labels])
        + settings.kl_coefficient * reference_kl
        - settings.entropy_coefficient * entropy.mean(),
        "entropy": entropy.mean(),
    }
    if settings.kl_coefficient:
        measured["reference_kl"] = reference_kl
    return backward(weights, cache, gradient / count), measured


def evaluate(weights, settings, task, step, as_run):
    """The mean true score on held-out prompts; `as_run` keeps the run's own prompts, max_tokens and tool."""
    draw = np.random.default_rng([settings.seed, 2, step])
    kind = settings.prompt_kind if as_run else "usual"
    prompts, answers = task.prompts(draw, EVALUATION_PROMPTS, kind, held_out=True)
    limit = (settings.max_tokens if as_run else None) or task.max_tokens
    uniforms = draw.random((len(prompts), LONGEST))
    works = settings.tool_works or not as_run
    responses, _, _ = sample(weights, task, prompts, answers, uniforms, max_tokens=limit, tool_works=works)
    return float(score(responses, answers).mean())


def named_settings(style, settings, task, names):
    values = {name: getattr(settings, name) for name in names if name in style.settings}
    if "max_tokens" in values:
        values["max_tokens"] = settings.max_tokens or task.max_tokens
    return {style.settings[name]: value for name, value in values.items()}


def train(family, run, folder):
    """Train a run and record it; return its evaluations."""
    settings, style = family.settings, family.style
    task = TASKS[settings.task]
    prompt_draw, sample_draw, verifier_draw, noise_draw, damage_draw = (
        np.random.default_rng([settings.seed, stream]) for stream in range(3, 8)
    )
    weights = pretrain(settings, task)
    references = {"start": weights, "random": new_weights(np.random.default_rng([settings.seed, 9]), task)}
    optimizer, engine, baselines = Optimizer(weights), Engine(weights), Advantages()
    gradients_before = None
    evaluations = [evaluate(weights, settings, task, 0, run.evaluated_as_run)]
    with Recorder(folder / "trace") as recorder:
        record_setup(recorder, family, run, task)
        for step in range(1, settings.steps + 1):
            if run.fault and step in (run.begins, run.ends):
                source = run.fault if step == run.begins else vars(family.settings)
                settings = replace(settings, **{name: source[name] for name in run.fault})
                if settings.damage:
                    weights = damaged(weights, settings.damage, task, damage_draw)
                changed = named_settings(style, settings, task, run.fault)
                if run.told and changed and step > 1:
                    recorder.add_hyperparameters(changed, step=step)
            engine.synchronise(weights, step - 1, settings)
            prompts, answers = (
                np.repeat(ids, settings.group, axis=0)
                for ids in task.prompts(prompt_draw, settings.prompts, settings.prompt_kind)
            )
            responses, rollout, is_own = sample(
                engine.weights(settings),
                task,
                prompts,
                answers,
                sample_draw.random((len(prompts), LONGEST)),
                max_tokens=settings.max_tokens or task.max_tokens,
                temperature=settings.temperature,
                top_k=settings.top_k,
                noise=partial(noise_draw.normal, 0.0, settings.cache_noise) if settings.cache_noise else None,
                tool_works=settings.tool_works,
            )
            rewards = verified_rewards(settings, responses, answers, verifier_draw)
            advantages = baselines.of(rewards, settings)

            is_token = responses != PAD
            windows, tokens = response_windows(prompts, responses, task.window)
            reference = references[settings.reference]
            logprobs = {
                "rollout": rollout,
                "train": in_rows(token_logprobs(weights, windows, tokens), is_token),
                style.reference_pass: in_rows(token_logprobs(reference, windows, tokens), is_token),
            }
            if not settings.kl_coefficient:
                del logprobs[style.reference_pass]

            own = is_own[is_token]
            token_advantages = np.broadcast_to(advantages[:, None], responses.shape)[is_token]
            gradients, measured = loss_gradient(
                weights, reference, windows[own], tokens[own], token_advantages[own], settings, noise_draw
            )
            if settings.keep_gradients and gradients_before is not None:
                gradients = {name: gradients[name] + gradients_before[name] for name in gradients}
            gradients_before = gradients
            if settings.restart_every and step % settings.restart_every == 0:
                optimizer = Optimizer(weights)
            weights, measured["grad_norm"] = optimizer.step(weights, gradients, settings, settings.learning_rate)

            sampled = Sampled(prompts, responses, is_own, rewards, advantages, logprobs)
            engine_version = engine.version if style.says_version and run.version_recorded else None
            record_sequences(recorder, sampled, step, family, settings, task, engine_version)
            measured = measured | sampled.measured(settings)
            logged = {style.metrics[name]: float(value) for name, value in measured.items() if name in style.metrics}
            if step % EVALUATE_EVERY == 0:
                evaluations.append(evaluate(weights, settings, task, step, run.evaluated_as_run))
                if style.evaluation:
                    logged[style.evaluation.format(task=task.name)] = evaluations[-1]
            recorder.add_metrics(step, logged)
    return evaluations


def record_setup(recorder, family, run, task):
    """Record contracts, settings and loss as the loop's owner knows them at the start."""
    settings, style = family.settings, family.style
    if run.told and run.begins == 1:
        settings = replace(settings, **run.fault)
    dtype = {None: "float64", 8: "bfloat16", 11: "float16"}[settings.mantissa_bits]
    engine = {"engine": "windowed", "dtype": dtype, "temperature": settings.temperature, "logprobs": "processed"}
    recorder.add_contract("rollout", engine)
    recorder.add_contract("train", {"engine": "numpy", "dtype": "float64", "temperature": 1.0})
    recorder.add_hyperparameters(named_settings(style, settings, task, style.settings))
    if style.says_loss:
        recorder.add_loss(Loss(kind="reinforce", denominator="current", kl_coefficient=settings.kl_coefficient))
    if settings.kl_coefficient:
        recorder.add_contract(style.reference_pass, {"engine": "numpy", "dtype": "float64"})


def record_sequences(recorder, sampled, step, family, settings, task, engine_version):
    """Record one step's sequences and what each pass gave their tokens."""
    batch = recorder.add_sequences(
        step=step,
        prompt_ids=[row[row != PAD] for row in sampled.prompts],
        response_ids=sampled.responses,
        response_attention_mask=sampled.responses != PAD,
        response_mask=sampled.is_own if task.name == "lookup" else None,
        group_ids=np.arange(len(sampled.prompts)) // settings.group,
        policy_version=engine_version,
        reward=sampled.rewards,
        advantage=sampled.advantages,
        temperature=family.settings.temperature,
        max_tokens=settings.max_tokens or task.max_tokens,
        finish_reason=np.where(sampled.ended, "stop", "length").tolist(),
    )
    for name, logprobs in sampled.logprobs.items():
        recorder.add_scores(
            name,
            batch,
            logprobs=logprobs.astype(np.float32),
            scored_mask=sampled.is_own,
            policy_version=step - 1 if name == "train" and engine_version is not None else None,
        )


@dataclass(frozen=True)
class Sampled:
    """One step's sequences: arrays of rows, and logprobs of their tokens by pass."""

    prompts: np.ndarray
    responses: np.ndarray
    is_own: np.ndarray
    rewards: np.ndarray
    advantages: np.ndarray
    logprobs: dict[str, np.ndarray]

    @property
    def ended(self):
        return (self.responses == EOS).any(axis=1)

    def measured(self, settings):
        """What a loop may log of a step beside its loss."""
        is_token = self.responses != PAD
        values = {
            "learning_rate": settings.learning_rate,
            "engine_kl": (self.logprobs["rollout"] - self.logprobs["train"])[is_token & self.is_own].mean(),
            "reward": self.rewards.mean(),
            "reward_std": self.rewards.std(),
            "reward_max": self.rewards.max(),
            "reward_min": self.rewards.min(),
            "advantage": self.advantages.mean(),
            "advantage_std": self.advantages.std(),
            "advantage_max": self.advantages.max(),
            "advantage_min": self.advantages.min(),
            "length": is_token.sum(axis=1).mean(),
            "cut_share": 1 - self.ended.mean(),
            "prompt_length": (self.prompts != PAD).sum(axis=1).mean(),
        }
        return values | ({"kl_coefficient": settings.kl_coefficient} if settings.kl_coefficient else {})


def token_logprobs(weights, windows, tokens):
    logits, _ = forward(weights, windows)
    return log_softmax(logits)[np.arange(len(tokens)), tokens]


def in_rows(values, is_token):
    """Spread the values of tokens over an array of rows, with 0 where there is no token."""
    spread = np.zeros(is_token.shape)
    spread[is_token] = values
    return spread


FAMILIES = {
    "brackets-momentum": Family(
        Settings(task="brackets", seed=11, steps=160, pretraining_steps=45, learning_rate=0.1, entropy_coefficient=0.1),
        VERL,
    ),
    "parity-rmsprop": Family(
        Settings(
            task="parity",
            seed=12,
            steps=130,
            pretraining_steps=48,
            prompts=64,
            group=1,
            baseline="moving",
            reward_low=-1.0,
            reward_high=1.0,
            optimizer="rmsprop",
            learning_rate=0.0015,
            entropy_coefficient=0.05,
        ),
        HOME,
    ),
    "addition-momentum-kl": Family(
        Settings(
            task="addition",
            seed=13,
            steps=200,
            pretraining_steps=120,
            prompts=8,
            group=8,
            learning_rate=0.1,
            entropy_coefficient=0.05,
            kl_coefficient=0.1,
            mantissa_bits=11,
        ),
        PLAIN,
    ),
    "sorting-rmsprop-kl": Family(
        Settings(
            task="sorting",
            seed=14,
            steps=160,
            pretraining_steps=80,
            prompts=6,
            group=8,
            reward_low=-1.0,
            reward_high=1.0,
            reward_jitter=0.002,
            std_epsilon=0.5,
            optimizer="rmsprop",
            learning_rate=0.004,
            entropy_coefficient=0.02,
            kl_coefficient=0.01,
        ),
        VERL,
    ),
    "lookup-rmsprop": Family(
        Settings(
            task="lookup",
            seed=15,
            steps=180,
            pretraining_steps=170,
            prompts=12,
            group=4,
            reward_low=-1.0,
            reward_high=1.0,
            optimizer="rmsprop",
            learning_rate=0.004,
            entropy_coefficient=0.02,
            mantissa_bits=8,
        ),
        PLAIN,
    ),
    "brackets-rmsprop": Family(
        Settings(
            task="brackets",
            seed=16,
            steps=140,
            pretraining_steps=50,
            prompts=56,
            group=1,
            baseline="moving",
            reward_low=-1.0,
            reward_high=1.0,
            optimizer="rmsprop",
            learning_rate=0.004,
            entropy_coefficient=0.02,
        ),
        HOME,
    ),
    "sorting-momentum": Family(
        Settings(
            task="sorting",
            seed=17,
            steps=190,
            pretraining_steps=80,
            prompts=16,
            group=4,
            baseline="moving",
            learning_rate=0.06,
            entropy_coefficient=0.1,
            mantissa_bits=8,
        ),
        PLAIN,
    ),
}


def fault(name, cause, detail, begins, *, ends=None, told=False, version_recorded=True, **switched):
    """The end of a run's name, and what makes the run of it."""
    options = {"ends": ends, "told": told, "version_recorded": version_recorded}
    return name, {"cause": cause, "detail": detail, "fault": switched, "begins": begins, **options}


FAULTS = {
    "brackets-momentum": [
        fault("greedy-engine", "mismatch", "the engine samples the most probable token alone", 64, top_k=1),
        fault(
            "rate-spike",
            "optimizer",
            "the learning rate is 40 times as high for 12 steps",
            90,
            ends=102,
            told=True,
            learning_rate=4.0,
        ),
        fault("inverted", "reward", "the verifier pays for what is wrong", 80, verifier="inverted"),
        fault(
            "neighbours-answers",
            "pairing",
            "responses are graded by the answers of the next prompt",
            70,
            answers_roll=1,
        ),
        fault(
            "entropy-bonus",
            "entropy",
            "the entropy bonus is 100 times as large",
            75,
            told=True,
            entropy_coefficient=10.0,
        ),
        fault("short-limit", "truncation", "max_tokens is cut to 3", 85, told=True, max_tokens=3),
        fault("longer", "length", "each token pays 4 more", 45, length_bonus=4.0),
        fault("bit-flips", "other", "bits of the exponent flip in 24 weights of the head", 110, damage="bit flips"),
        fault("sign", "advantages", "the sign of the advantages is wrong", 95, advantage_scale=-1.0),
        fault(
            "hot-engine",
            "harmless",
            "the engine samples at temperature 2, the trainer scores at 1",
            50,
            temperature=2.0,
        ),
    ],
    "parity-rmsprop": [
        fault(
            "late-engine", "staleness", "the engine's weights are 15 updates old, and no version is recorded", 1, lag=15
        ),
        fault("noisy-verifier", "reward", "rewards are drawn by chance", 30, wrong_share=1.0),
        fault("longer-prompts", "data", "prompts have 8 bits in place of 6", 80, prompt_kind="hard"),
        fault("mild-lag", "harmless", "the engine's weights are 1 update old", 30, lag=1),
    ],
    "addition-momentum-kl": [
        fault(
            "coefficient",
            "reference",
            "the coefficient of the KL term is 300 times as large",
            130,
            told=True,
            kl_coefficient=30.0,
        ),
        fault(
            "other-reference",
            "reference",
            "the reference is an untrained model, and the KL term weighs 10 times as much",
            120,
            reference="random",
            kl_coefficient=1.0,
        ),
        fault("short-limit", "truncation", "max_tokens is cut to 2", 140, max_tokens=2),
        fault("weight-decay", "optimizer", "a weight decay of 0.3", 110, weight_decay=0.3),
        fault(
            "rare-sync", "staleness", "the engine gets new weights every 64 steps", 64, told=True, synchronise_every=64
        ),
        fault(
            "higher-rate",
            "harmless",
            "the learning rate is a third higher for 20 steps",
            100,
            ends=120,
            told=True,
            learning_rate=0.133,
        ),
    ],
    "sorting-rmsprop-kl": [
        fault("rolled-advantages", "pairing", "advantages land on the rows of the next prompt", 60, advantage_roll=8),
        fault(
            "sum-baseline",
            "advantages",
            "the baseline is the sum of the group's rewards, not their mean",
            80,
            baseline="sum",
        ),
        fault("dropout", "other", "the update has dropout of 0.9, scores have none", 70, dropout=0.9),
        fault("shifted-labels", "other", "the loss takes each token's label from the token before", 90, label_shift=1),
        fault("noisy-verifier", "harmless", "a tenth of the rewards is drawn by chance", 60, wrong_share=0.1),
    ],
    "lookup-rmsprop": [
        fault("broken-tool", "other", "the tool gives an error token for every call", 110, tool_works=False),
        fault("longer", "length", "each token pays 1.5 more", 30, length_bonus=1.5),
        fault("lost-state", "other", "the optimizer's state is lost at every step", 100, restart_every=1),
        fault(
            "late-engine",
            "staleness",
            "the engine's weights are 30 updates old, and no version is recorded",
            40,
            version_recorded=False,
            lag=30,
        ),
        fault(
            "noisy-cache",
            "mismatch",
            "the engine's logits have noise of 14 that the trainer does not know of",
            70,
            cache_noise=14.0,
        ),
        fault(
            "old-hidden",
            "mismatch",
            "the engine never gets the hidden layer again",
            60,
            unsynchronised=("hidden", "hidden_bias"),
        ),
    ],
    "brackets-rmsprop": [
        fault("shorter", "length", "each token costs 0.8", 75, length_bonus=-0.8),
        fault("one-token", "reward", "the verifier pays for one token", 90, verifier="one token"),
        fault(
            "coarse-engine",
            "harmless",
            "the engine's weights have no bit of mantissa but the first",
            30,
            mantissa_bits=1,
        ),
        fault(
            "more-brackets", "harmless", "prompts have 3 or 4 brackets in place of 2 to 4", 70, prompt_kind="shifted"
        ),
        fault(
            "new-embedding",
            "other",
            "the embedding is drawn anew and stays frozen",
            100,
            damage="embedding",
            frozen=("embedding",),
        ),
    ],
    "sorting-momentum": [
        fault("rolled-rewards", "pairing", "each response has the reward of the row before", 60, reward_roll=1),
        fault(
            "summed-baseline", "advantages", "the moving baseline is summed and never decays", 90, baseline="undecayed"
        ),
        fault("no-baseline", "harmless", "advantages have no baseline", 60, baseline="none"),
        fault("kept-gradients", "other", "gradients are never set to zero", 70, keep_gradients=True),
        fault("high-rate", "optimizer", "the learning rate is 7 times as high", 60, told=True, learning_rate=0.4),
        fault("more-letters", "data", "prompts have 5 letters in place of 3", 120, prompt_kind="hard"),
        fault(
            "entropy-bonus", "entropy", "the entropy bonus is 40 times as large", 1, told=True, entropy_coefficient=4.0
        ),
    ],
}

RUNS = [Run(family, family, "sound", "nothing is switched") for family in FAMILIES] + [
    Run(family, f"{family}-{name}", **settings) for family, faults in FAULTS.items() for name, settings in faults
]


def kept_share(evaluations):
    """The mean of the last fifth of the evaluations over that of the best fifth."""
    fifth = max(1, len(evaluations) // 5)
    means = np.convolve(evaluations, np.full(fifth, 1 / fifth), "valid")
    return means[-1] / means.max()


def make(run, output, seed):
    """Make a run unless it is there."""
    folder = output / run.name
    if (folder / "plan.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    family = FAMILIES[run.family]
    family = replace(family, settings=replace(family.settings, seed=family.settings.seed + 100 * seed))
    evaluations = train(family, run, folder)
    label = {
        "cause": run.cause,
        "detail": run.detail,
        "twin": run.family,
        "begins": run.begins,
        "intervention": len(run.fault) <= 1,
    }
    (folder / "label.json").write_text(json.dumps(label, indent=1) + "\n")
    (folder / "plan.json").write_text(json.dumps({"evaluations": evaluations}) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="the folder of the runs")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="make these runs alone")
    parser.add_argument("--seed", type=int, default=0, help="another laboratory of the same faults")
    arguments = parser.parse_args()
    chosen = [run for run in RUNS if not arguments.only or run.name in arguments.only]
    started = time.process_time()
    for run in chosen:
        make(run, arguments.output, arguments.seed)
    print(f"{'run':40} {'cause':11} {'kept':>6} {'twin':>6} {'best':>6} {'last':>6}")
    for run in chosen:
        plan, twin = (arguments.output / name / "plan.json" for name in (run.name, run.family))
        evaluations = json.loads(plan.read_text())["evaluations"]
        twin_kept = kept_share(json.loads(twin.read_text())["evaluations"]) if twin.exists() else np.nan
        print(
            f"{run.name:40} {run.cause:11} {kept_share(evaluations):6.3f} {twin_kept:6.3f}"
            f" {max(evaluations):6.3f} {evaluations[-1]:6.3f}"
        )
    print(f"{time.process_time() - started:.0f} s of CPU time")


if __name__ == "__main__":
    main()
