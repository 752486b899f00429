"""The twelve families: task, policy, algorithm, settings, names of what they log, and what they record."""

from dataclasses import dataclass, field, replace
from typing import Any

from core import (
    Caesar,
    Convolution,
    Count,
    Dedupe,
    Index,
    Mixture,
    Pattern,
    Policy,
    Recurrent,
    Reverse,
    Sort,
    StateSpace,
    SumTo,
    Task,
    Tool,
    Transformer,
    Walk,
    Window,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """What a family writes into its trace, besides tokens, rewards, logprobs and metrics."""

    hyperparameters: str | None
    """What of the settings: "live" (changes too), "once" (those of the first step), or None."""
    optimizer: bool = False
    advantages: bool = True
    versions: bool = True
    entropy: bool = False
    loss: bool = False
    groups: bool = True
    finish: bool = False
    mask: bool = False
    """The mask of the loss, also where it is that of the response."""
    evaluation: str | None = None
    """The name of the evaluations; None where they are not recorded."""


LIVE = Records(hyperparameters="live", optimizer=True, entropy=True, loss=True, finish=True)
CAREFUL = Records(hyperparameters="once")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A team's program, with its usual settings; a fault changes settings() from its first step on."""

    name: str
    task: Task
    policy: type[Policy]
    policy_options: dict[str, Any]
    pretraining_steps: int
    pretraining_noise: float
    """The share of wrong labels."""
    pretraining_rate: float = 3e-3
    steps: int = 120
    num_prompts: int = 8
    group_size: int = 8
    pool_size: int | None = None
    """The number of prompts, which repeat; None where they are new at each step."""
    evaluate_every: int = 3
    num_evaluated: int = 128
    advantages: str = "grpo"
    """The estimator: grpo, rloo, running, batch, reward_to_go or gae."""
    loss: str = "ppo_clip"
    level: str = "token"
    denominator: str = "train"
    aggregation: str = "token_mean"
    correction: str = "none"
    correction_cap: float = 2.0
    minibatches: int = 1
    optimizer: str = "adam"
    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: str = "constant"
    clip: tuple[float, float] = (0.2, 0.2)
    kl_coefficient: float = 0.0
    """0.0 means that there is no reference."""
    kl_mode: str = "loss"
    """Where the KL term is: in the loss or in the reward."""
    entropy_coefficient: float = 0.0
    scale: tuple[float, float] = (1.0, 0.0)
    """Factor and offset from a score of 0..1 to the reward."""
    lag: int = 0
    """Updates by which the engine's weights are behind."""
    bf16: bool = False
    """Whether the engine rounds to bfloat16."""
    gamma: float = 1.0
    records: Records
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    """Recorded name to the name of a setting, or to a function of all settings."""
    metrics: dict[str, Any]
    """Logged name to the name of a metric, or to a function of all metrics."""

    def settings(self):
        """The settings of a step, without a fault."""
        return dict(
            learning_rate=self.learning_rate,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            schedule=self.schedule,
            clear_gradients=True,
            clip_low=self.clip[0],
            clip_high=self.clip[1],
            kl_coefficient=self.kl_coefficient,
            entropy_coefficient=self.entropy_coefficient,
            gamma=self.gamma,
            scale_by_std=True,
            epochs=1,
            num_prompts=self.num_prompts,
            group_size=self.group_size,
            temperature=1.0,
            max_tokens=self.task.T,
            max_turns=99,
            stop=(),
            lag=self.lag,
            bf16=self.bf16,
            length_coefficient=0.0,
            overlong=None,
            overlong_penalty=1.0,
        )


def text(name):
    """A setting as text."""
    return lambda settings: str(settings[name])


def betas(settings):
    """Both betas as text."""
    return str((settings["beta1"], settings["beta2"]))


def num_responses(settings):
    """The number of rows of a step."""
    return settings["num_prompts"] * settings["group_size"]


# TRL-like, live: reversing by a GRU, GRPO with a KL loss, 0..1
f1 = Family(
    name="f1",
    task=Reverse(),
    policy=Recurrent,
    policy_options=dict(kind="gru", width=56),
    pretraining_steps=1500,
    pretraining_noise=0.22,
    learning_rate=2.5e-3,
    optimizer="adamw",
    betas=(0.9, 0.95),
    kl_coefficient=0.004,
    records=replace(LIVE, evaluation="eval/reward", mask=True),
    hyperparameters={
        "learning_rate": "learning_rate",
        "adam_beta1": "beta1",
        "adam_beta2": "beta2",
        "adam_epsilon": "eps",
        "weight_decay": "weight_decay",
        "max_grad_norm": "max_grad_norm",
        "beta": "kl_coefficient",
        "epsilon": "clip_low",
        "epsilon_high": "clip_high",
        "temperature": "temperature",
        "max_completion_length": "max_tokens",
        "num_generations": "group_size",
        "per_device_train_batch_size": num_responses,
        "lr_scheduler_type": "schedule",
        "entropy_coef": "entropy_coefficient",
        "scale_rewards": text("scale_by_std"),
        "length_penalty": "length_coefficient",
        "num_iterations": "epochs",
    },
    metrics={
        "reward": "reward",
        "reward_std": "reward_std",
        "entropy": "entropy",
        "grad_norm": "grad_norm",
        "learning_rate": "learning_rate",
        "kl": "kl",
        "loss": "loss",
        "completions/mean_length": "length",
        "completions/clipped_ratio": "truncated",
        "clip_ratio/region_mean": "clip_fraction",
    },
)
# verl-like, live: sorting by a transformer, DAPO (asymmetric clip) in two minibatches, cosine schedule, 0..1
f2 = Family(
    name="f2",
    task=Sort(),
    policy=Transformer,
    policy_options=dict(width=40),
    pretraining_steps=900,
    pretraining_noise=0.22,
    evaluate_every=4,
    minibatches=2,
    learning_rate=2.5e-3,
    schedule="cosine",
    clip=(0.2, 0.28),
    records=replace(LIVE, evaluation="val-core/sort/acc/mean@1"),
    hyperparameters={
        "actor_rollout_ref.actor.optim.lr": "learning_rate",
        "actor_rollout_ref.actor.optim.weight_decay": "weight_decay",
        "actor_rollout_ref.actor.optim.betas": betas,
        "actor_rollout_ref.actor.optim.eps": "eps",
        "actor_rollout_ref.actor.grad_clip": "max_grad_norm",
        "actor_rollout_ref.actor.clip_ratio_low": "clip_low",
        "actor_rollout_ref.actor.clip_ratio_high": "clip_high",
        "actor_rollout_ref.actor.entropy_coeff": "entropy_coefficient",
        "actor_rollout_ref.rollout.temperature": "temperature",
        "actor_rollout_ref.rollout.n": "group_size",
        "data.max_response_length": "max_tokens",
        "data.train_batch_size": "num_prompts",
        "reward_model.overlong_buffer.len": text("overlong"),
        "reward_model.overlong_buffer.penalty_factor": "overlong_penalty",
        "reward_model.length_coef": "length_coefficient",
        "algorithm.norm_adv_by_std_in_grpo": text("scale_by_std"),
        "actor_rollout_ref.actor.optim.lr_scheduler": "schedule",
        "actor_rollout_ref.actor.ppo_epochs": "epochs",
    },
    metrics={
        "critic/rewards/mean": "reward",
        "actor/entropy": "entropy",
        "actor/grad_norm": "grad_norm",
        "actor/lr": "learning_rate",
        "actor/pg_loss": "loss",
        "actor/pg_clipfrac": "clip_fraction",
        "response_length/mean": "length",
        "response_length/clip_ratio": "truncated",
    },
)
# OpenRLHF-like, live: counting by an LSTM, PPO with a critic and KL in the reward, one response a prompt, 0..1
f3 = Family(
    name="f3",
    task=Count(),
    policy=Recurrent,
    policy_options=dict(kind="lstm", width=40),
    pretraining_steps=1300,
    pretraining_noise=0.2,
    steps=110,
    num_prompts=96,
    group_size=1,
    evaluate_every=2,
    advantages="gae",
    minibatches=2,
    learning_rate=2e-3,
    kl_coefficient=0.01,
    kl_mode="reward",
    entropy_coefficient=0.001,
    records=replace(LIVE, evaluation="eval_reward", groups=False),
    hyperparameters={
        "actor_learning_rate": "learning_rate",
        "adam_betas": betas,
        "l2": "weight_decay",
        "adam_eps": "eps",
        "max_norm": "max_grad_norm",
        "eps_clip": "clip_low",
        "init_kl_coef": "kl_coefficient",
        "entropy_loss_coef": "entropy_coefficient",
        "generate_max_len": "max_tokens",
        "temperature": "temperature",
        "gamma": "gamma",
        "lambd": lambda settings: 0.95,
        "train_batch_size": "num_prompts",
        "n_samples_per_prompt": "group_size",
        "lr_scheduler": "schedule",
        "length_bonus": "length_coefficient",
        "max_epochs": "epochs",
        "stop": text("stop"),
    },
    metrics={
        "reward": "reward",
        "return": "reward",
        "policy_loss": "loss",
        "critic_loss": "value_loss",
        "kl": "kl",
        "entropy_loss": "entropy",
        "actor_lr": "learning_rate",
        "actor_grad_norm": "grad_norm",
        "response_length": "length",
        "ppo_clip_ratio": "clip_fraction",
    },
)
# NeMo-RL-like, live: looking values up by a transformer, RLOO of 4 with a KL loss, -1..1
f4 = Family(
    name="f4",
    task=Index(),
    policy=Transformer,
    policy_options=dict(width=40),
    pretraining_steps=1500,
    pretraining_noise=0.22,
    num_prompts=16,
    group_size=4,
    advantages="rloo",
    loss="reinforce",
    denominator="current",
    aggregation="sequence_mean",
    learning_rate=3e-3,
    kl_coefficient=0.01,
    scale=(2.0, -1.0),
    records=replace(LIVE, evaluation="validation/reward"),
    hyperparameters={
        "policy.optimizer.lr": "learning_rate",
        "policy.optimizer.betas": betas,
        "policy.optimizer.weight_decay": "weight_decay",
        "policy.optimizer.eps": "eps",
        "policy.max_grad_norm": "max_grad_norm",
        "loss_fn.reference_policy_kl_penalty": "kl_coefficient",
        "policy.generation.temperature": "temperature",
        "policy.generation.max_new_tokens": "max_tokens",
        "grpo.num_prompts_per_step": "num_prompts",
        "grpo.num_generations_per_prompt": "group_size",
        "loss_fn.entropy_coef": "entropy_coefficient",
        "env.length_reward": "length_coefficient",
        "policy.scheduler": "schedule",
        "policy.generation.stop_token_ids": text("stop"),
    },
    metrics={
        "train/reward": "reward",
        "train/loss": "loss",
        "train/grad_norm": "grad_norm",
        "train/lr": "learning_rate",
        "train/approx_entropy": "entropy",
        "train/kl_penalty": "kl",
        "train/mean_gen_tokens_per_sample": "length",
        "train/gen_kl_error": "mismatch_kl",
    },
)
# A loop of its own, careful: walks by a window policy, REINFORCE with a running baseline, SGD, -20..-10
f5 = Family(
    name="f5",
    task=Walk(),
    policy=Window,
    policy_options=dict(width=24, window=8),
    pretraining_steps=1200,
    pretraining_noise=0.35,
    steps=150,
    num_prompts=96,
    group_size=1,
    num_evaluated=256,
    advantages="running",
    loss="reinforce",
    denominator="current",
    aggregation="sequence_sum",
    learning_rate=0.05,
    optimizer="sgd",
    max_grad_norm=2.0,
    entropy_coefficient=0.002,
    scale=(10.0, -20.0),
    records=replace(CAREFUL, evaluation="test_return", groups=False),
    hyperparameters={
        "lr": "learning_rate",
        "momentum": "beta1",
        "clip": "max_grad_norm",
        "entropy_bonus": "entropy_coefficient",
        "max_moves": "max_tokens",
        "batch": "num_prompts",
        "baseline_decay": lambda settings: 0.9,
        "temperature": "temperature",
    },
    metrics={
        "mean_return": "reward",
        "policy_entropy": "entropy",
        "gnorm": "grad_norm",
        "episode_len": "length",
        "loss": "loss",
    },
)
# slime-like, careful: a cipher by a mixture of experts, GSPO in groups of 16, 96 prompts that repeat, no evaluation,
# 0..10
f6 = Family(
    name="f6",
    task=Caesar(),
    policy=Mixture,
    policy_options=dict(width=32),
    pretraining_steps=1500,
    pretraining_noise=0.22,
    pretraining_rate=4e-3,
    num_prompts=4,
    group_size=16,
    pool_size=96,
    level="sequence_mean",
    aggregation="sequence_mean",
    minibatches=2,
    learning_rate=1.5e-3,
    betas=(0.9, 0.98),
    clip=(0.05, 0.05),
    scale=(10.0, 0.0),
    records=replace(CAREFUL, entropy=True, finish=True),
    hyperparameters={
        "lr": "learning_rate",
        "adam-beta1": "beta1",
        "adam-beta2": "beta2",
        "weight-decay": "weight_decay",
        "clip-grad": "max_grad_norm",
        "eps-clip": "clip_low",
        "rollout-max-response-len": "max_tokens",
        "n-samples-per-prompt": "group_size",
        "rollout-batch-size": "num_prompts",
        "rollout-temperature": "temperature",
        "entropy-coef": "entropy_coefficient",
        "advantage-estimator": lambda settings: "gspo",
    },
    metrics={
        "rollout/raw_reward": "reward",
        "train/grad_norm": "grad_norm",
        "train/lr-pg_0": "learning_rate",
        "train/entropy_loss": "entropy",
        "train/pg_clipfrac": "clip_fraction",
        "rollout/response_len/mean": "length",
        "rollout/truncated_ratio": "truncated",
        "train/train_rollout_logprob_abs_diff": lambda metrics: abs(metrics["mismatch_kl"]),
    },
)
# A loop of its own, careful: two turns of a tool by a GRU, GRPO, 0..1
f7 = Family(
    name="f7",
    task=Tool(),
    policy=Recurrent,
    policy_options=dict(kind="gru", width=56),
    pretraining_steps=1300,
    pretraining_noise=0.12,
    steps=110,
    evaluate_every=5,
    learning_rate=2e-3,
    records=replace(CAREFUL, evaluation="eval/score", entropy=True, finish=True),
    hyperparameters={
        "lr": "learning_rate",
        "betas": betas,
        "max_grad_norm": "max_grad_norm",
        "max_tokens": "max_tokens",
        "max_turns": "max_turns",
        "group_size": "group_size",
        "groups": "num_prompts",
        "temperature": "temperature",
        "clip": "clip_low",
        "entropy_coef": "entropy_coefficient",
    },
    metrics={
        "score/mean": "reward",
        "train/grad_norm": "grad_norm",
        "train/entropy": "entropy",
        "rollout/tokens": "length",
        "train/lr": "learning_rate",
        "train/clip_frac": "clip_fraction",
    },
)
# A loop of its own, careful: patterns by a state-space model, rewards to go of tokens that are each paid, no
# evaluation, 0..8
f8 = Family(
    name="f8",
    task=Pattern(),
    policy=StateSpace,
    policy_options=dict(width=32),
    pretraining_steps=700,
    pretraining_noise=0.45,
    pretraining_rate=5e-3,
    num_prompts=32,
    group_size=2,
    advantages="reward_to_go",
    loss="reinforce",
    denominator="current",
    learning_rate=3e-3,
    optimizer="adamw",
    weight_decay=0.01,
    entropy_coefficient=0.002,
    scale=(8.0, 0.0),
    gamma=0.9,
    records=replace(CAREFUL, entropy=True, groups=False),
    hyperparameters={
        "lr": "learning_rate",
        "b1": "beta1",
        "b2": "beta2",
        "wd": "weight_decay",
        "eps": "eps",
        "clip": "max_grad_norm",
        "gamma": "gamma",
        "entropy": "entropy_coefficient",
        "horizon": "max_tokens",
        "n_prompts": "num_prompts",
        "per_prompt": "group_size",
    },
    metrics={
        "episode_reward": "reward",
        "entropy": "entropy",
        "grad_norm": "grad_norm",
        "lr": "learning_rate",
        "pg_loss": "loss",
    },
)
# Asynchronous by two updates, careful: digits of a given sum by a plain recurrence, CISPO with a KL loss, 0..1
f9 = Family(
    name="f9",
    task=SumTo(),
    policy=Recurrent,
    policy_options=dict(kind="rnn", width=64),
    pretraining_steps=1500,
    pretraining_noise=0.2,
    steps=180,
    num_prompts=12,
    evaluate_every=4,
    num_evaluated=256,
    advantages="rloo",
    loss="cispo",
    denominator="rollout",
    aggregation="constant",
    learning_rate=1.5e-3,
    clip=(0.2, 4.0),
    kl_coefficient=0.01,
    lag=2,
    records=replace(CAREFUL, evaluation="eval/avg_reward", finish=True),
    hyperparameters={
        "lr": "learning_rate",
        "betas": betas,
        "clip_grad": "max_grad_norm",
        "kl_coef": "kl_coefficient",
        "max_async_level": "lag",
        "is_cap": "clip_high",
        "seq_len": "max_tokens",
        "rollouts_per_example": "group_size",
        "batch_size": num_responses,
        "temperature": "temperature",
        "entropy_coef": "entropy_coefficient",
    },
    metrics={
        "reward/mean": "reward",
        "optim/grad_norm": "grad_norm",
        "optim/lr": "learning_rate",
        "kl/ref": "kl",
        "seq_len/mean": "length",
        "is_truncated/mean": "truncated",
        "async/off_policy_level": "lag",
    },
)
# Sparse: removing repeats by a transformer, RLOO of 4; no advantages, no entropy, no evaluation, 0..1
f10 = Family(
    name="f10",
    task=Dedupe(),
    policy=Transformer,
    policy_options=dict(width=32),
    pretraining_steps=900,
    pretraining_noise=0.22,
    num_prompts=16,
    group_size=4,
    advantages="rloo",
    loss="reinforce",
    denominator="current",
    aggregation="sequence_sum",
    learning_rate=2e-3,
    max_grad_norm=0.5,
    records=replace(CAREFUL, advantages=False),
    hyperparameters={
        "lr": "learning_rate",
        "k": "group_size",
        "batch": num_responses,
        "max_len": "max_tokens",
        "temp": "temperature",
    },
    metrics={"reward": "reward", "grad_norm": "grad_norm", "len": "length"},
)
# Sparse: reversing by a convolution, batch-normalised REINFORCE with PPO's clip, 128 prompts that repeat; no settings,
# no versions, no entropy, 0..1
f11 = Family(
    name="f11",
    task=Reverse(size=4, T=8),
    policy=Convolution,
    policy_options=dict(width=40),
    pretraining_steps=1500,
    pretraining_noise=0.22,
    num_prompts=64,
    group_size=1,
    pool_size=128,
    advantages="batch",
    aggregation="sequence_mean",
    minibatches=2,
    learning_rate=2e-3,
    records=Records(hyperparameters=None, versions=False, groups=False, evaluation="eval_acc"),
    metrics={"train_reward": "reward", "grad_norm": "grad_norm", "loss": "loss", "mean_len": "length"},
)
# prime-rl-like, live: sorting by a GRU, GRPO with truncated weights of whole sequences and a KL loss, bfloat16 engine,
# 0..1
f12 = Family(
    name="f12",
    task=Sort(size=4, T=7),
    policy=Recurrent,
    policy_options=dict(kind="gru", width=56),
    pretraining_steps=1800,
    pretraining_noise=0.22,
    loss="reinforce",
    denominator="current",
    aggregation="sequence_mean",
    correction="sequence_truncate",
    correction_cap=3.0,
    learning_rate=3e-3,
    kl_coefficient=0.005,
    bf16=True,
    records=replace(LIVE, evaluation="eval/sort"),
    hyperparameters={
        "optim.lr": "learning_rate",
        "optim.betas": betas,
        "optim.max_norm": "max_grad_norm",
        "optim.weight_decay": "weight_decay",
        "loss.kl_tau": "kl_coefficient",
        "loss.ratio_cap": lambda settings: 3.0,
        "sampling.temperature": "temperature",
        "sampling.max_tokens": "max_tokens",
        "rollouts_per_example": "group_size",
        "batch_size": num_responses,
        "loss.entropy": "entropy_coefficient",
    },
    metrics={
        "reward/mean": "reward",
        "entropy/mean": "entropy",
        "optim/grad_norm": "grad_norm",
        "optim/lr": "learning_rate",
        "mismatch_kl/mean": "mismatch_kl",
        "ref_kl/mean": "kl",
        "seq_len/mean": "length",
    },
)

FAMILIES = {family.name: family for family in (f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12)}
