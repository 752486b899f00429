"""The teams: task, policy, algorithm, scales, names, and what they record."""

from __future__ import annotations

import math

from models import GRU, SSM, AttnGRU, Trans, Window
from tasks import Abbr, Berth, Coins, Dedupe, Doors, Quota, Recipe, Rle, Slopes, Walk, Weave, Zigzag


def constant(step, N):
    return 1.0


def warm(n):
    return lambda step, N: min(1.0, step / n)


def cosine(low=0.1, warmup=5):
    return lambda step, N: min(1.0, step / warmup) * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * step / N)))


def linear(low=0.2):
    return lambda step, N: 1 - (1 - low) * step / N


def unit(x):
    return float(x)


VERL = dict(
    reward="critic/rewards/mean",
    adv_max="critic/advantages/max",
    adv_min="critic/advantages/min",
    loss="actor/pg_loss",
    entropy="actor/entropy",
    grad_norm="actor/grad_norm",
    lr="actor/lr",
    length="response_length/mean",
    cut="response_length/clip_ratio",
    clip="actor/pg_clipfrac",
    kl="actor/ppo_kl",
)
VERL_HP = dict(
    lr="actor.optim.lr",
    beta1="actor.optim.beta1",
    beta2="actor.optim.beta2",
    eps="actor.optim.eps",
    weight_decay="actor.optim.weight_decay",
    max_grad_norm="actor.grad_clip",
    kl_coef="actor.kl_loss_coef",
    entropy_coef="actor.entropy_coeff",
    temperature="rollout.temperature",
    top_p="rollout.top_p",
    top_k="rollout.top_k",
    repetition_penalty="rollout.repetition_penalty",
    max_tokens="data.max_response_length",
    clip_low="actor.clip_ratio_low",
    clip_high="actor.clip_ratio_high",
    group_size="rollout.n",
    num_prompts="data.train_batch_size",
    minibatches="actor.ppo_num_minibatches",
    overlong="overlong_buffer.len",
    overlong_factor="overlong_buffer.penalty_factor",
    overlong_limit="overlong_buffer.max_resp_len",
    adv_eps="algorithm.adv_eps",
    entropy_target="actor.entropy_target",
)
TRL = dict(
    reward="reward",
    reward_std="reward_std",
    loss="loss",
    entropy="entropy",
    grad_norm="grad_norm",
    lr="learning_rate",
    length="completions/mean_length",
    cut="completions/clipped_ratio",
    clip="clip_ratio/region_mean",
    kl="kl",
)
TRL_HP = dict(
    lr="learning_rate",
    beta1="adam_beta1",
    beta2="adam_beta2",
    eps="adam_epsilon",
    weight_decay="weight_decay",
    max_grad_norm="max_grad_norm",
    kl_coef="beta",
    entropy_coef="entropy_coef",
    temperature="temperature",
    top_p="top_p",
    top_k="top_k",
    repetition_penalty="repetition_penalty",
    max_tokens="max_completion_length",
    max_turns="max_tool_calling_iterations",
    clip_low="epsilon",
    clip_high="epsilon_high",
    group_size="num_generations",
    num_prompts="per_device_train_batch_size",
    minibatches="num_minibatches",
)
SLIME = dict(
    reward="rollout/raw_reward",
    loss="train/pg_loss",
    entropy="train/entropy_loss",
    grad_norm="train/grad_norm",
    lr="train/lr-pg_0",
    length="rollout/response_len/mean",
    cut="rollout/truncated_ratio",
    clip="train/pg_clipfrac",
    gap="train/train_rollout_logprob_abs_diff",
    kl="train/kl_loss",
)
SLIME_HP = dict(
    lr="lr",
    beta1="adam_beta1",
    beta2="adam_beta2",
    eps="adam_eps",
    weight_decay="weight_decay",
    max_grad_norm="clip_grad",
    kl_coef="kl_loss_coef",
    entropy_coef="entropy_coef",
    temperature="rollout_temperature",
    top_p="rollout_top_p",
    top_k="rollout_top_k",
    repetition_penalty="rollout_repetition_penalty",
    max_tokens="rollout_max_response_len",
    max_turns="max_turns",
    clip_low="eps_clip",
    clip_high="eps_clip_high",
    group_size="n_samples_per_prompt",
    num_prompts="rollout_batch_size",
    minibatches="num_steps_per_rollout",
)


def adam(lr, **o):
    return (
        dict(
            lr=lr,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=0.0,
            max_grad_norm=1.0,
            temperature=1.0,
            top_p=1.0,
            minibatches=1,
        )
        | o
    )


FAMILIES = {}


def family(name, **o):
    o["name"] = name
    o.setdefault("key", "1")
    o.setdefault("schedule", constant)
    o.setdefault("scale", unit)
    o.setdefault("eval_every", 2)
    FAMILIES[name] = o


def ppo(s, **o):
    return (
        dict(kind="ppo_clip", clip_low=s["clip_low"], clip_high=s["clip_high"], kl_coefficient=s.get("kl_coef") or 0.0)
        | o
    )


# 1. verl: GRPO, transformer, pay an amount with coins; KL in the loss; recorded live
family(
    "coins",
    task=Coins,
    model=lambda V, P, T: Trans(V, P, T, D=40, L=2),
    pre=0.65,
    steps=120,
    s=adam(
        2e-4,
        weight_decay=0.01,
        num_prompts=20,
        group_size=8,
        clip_low=0.2,
        clip_high=0.2,
        kl_coef=0.001,
        entropy_coef=0.0,
        minibatches=2,
        max_tokens=14,
        adv_eps=1e-4,
        beta2=0.98,
    ),
    opt="adamw",
    algo="grpo",
    loss="ppo_clip",
    agg="token_mean",
    ref=True,
    record="live",
    names=VERL | dict(eval="val-core/coins/acc/mean@1"),
    log_eval=4,
    hp=VERL_HP,
    hp_fixed={
        "algorithm.adv_estimator": "grpo",
        "actor.loss_agg_mode": "token-mean",
        "data.train_files": "coins_train.parquet",
    },
    token_entropy=True,
    per_row=("temperature", "max_tokens"),
    Loss=lambda s: ppo(s, aggregation="token_mean"),
)

# 2. OpenRLHF: RLOO, GRU, run-length encoding, rewards -1 and 1; loop of its own with evaluation
family(
    "rle",
    task=Rle,
    model=lambda V, P, T: AttnGRU(V, P, T, E=24, H=64),
    pre=0.75,
    steps=180,
    s=adam(1.5e-3, num_prompts=56, group_size=4, clip_low=0.2, clip_high=0.2, kl_coef=0.001),
    opt="adam",
    algo="rloo",
    loss="ppo_clip",
    agg="sequence_mean",
    scale=lambda x: 2 * x - 1,
    ref=True,
    record="own",
    names=dict(
        reward="reward",
        loss="policy_loss",
        length="response_length",
        kl="kl",
        lr="actor_lr",
        grad_norm="grad_norm",
        eval="eval_rle_pass1",
    ),
    log_eval=10,
    hp=dict(
        lr="actor_learning_rate",
        num_prompts="rollout_batch_size",
        group_size="n_samples_per_prompt",
        clip_low="eps_clip",
        temperature="temperature",
        beta1="adam_beta1",
        beta2="adam_beta2",
        max_grad_norm="max_norm",
        max_tokens="generate_max_len",
        kl_coef="init_kl_coef",
    ),
    hp_fixed={"advantage_estimator": "rloo", "use_kl_loss": True},
    Loss=lambda s: ppo(s, aggregation="sequence_mean"),
)

# 3. own loop: REINFORCE with a moving baseline, window model, zigzag, rewards 0..10, prompts never repeat, SGD; no evaluation
family(
    "zigzag",
    task=Zigzag,
    model=lambda V, P, T: Window(V, P, T, E=12, W=3, H=96),
    pre=0.55,
    steps=160,
    s=dict(
        lr=0.06,
        momentum=0.9,
        weight_decay=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        num_prompts=96,
        group_size=1,
        entropy_coef=0.003,
    ),
    opt="sgd",
    algo="ema",
    adv_div=5.0,
    loss="reinforce",
    denominator="train",
    agg="sequence_mean",
    scale=lambda x: 10 * x,
    record="own",
    names=dict(reward="train/return", entropy="train/entropy", grad_norm="train/gnorm", loss="train/loss"),
    hp=dict(lr="lr", momentum="momentum", max_grad_norm="clip", entropy_coef="ent_coef", num_prompts="batch"),
    schedule=linear(0.3),
)

# 4. TRL: two turns, GRPO, GRU, three doors; recorded live
family(
    "doors",
    task=Doors,
    model=lambda V, P, T: GRU(V, P, T, E=24, H=64),
    pre=0.65,
    steps=150,
    s=adam(
        2e-3,
        num_prompts=24,
        group_size=8,
        clip_low=0.2,
        clip_high=0.28,
        kl_coef=0.0,
        entropy_coef=0.0,
        max_tokens=6,
        max_turns=2,
    ),
    opt="adamw",
    algo="grpo",
    loss="ppo_clip",
    agg="sequence_mean",
    record="live",
    names=TRL | dict(eval="eval_reward"),
    log_eval=6,
    hp=TRL_HP,
    hp_fixed={"loss_type": "grpo", "scale_rewards": "group"},
    schedule=cosine(0.1),
    per_row=("temperature",),
    Loss=lambda s: ppo(s, aggregation="sequence_mean"),
    token_entropy=True,
)

# 5. verl: DAPO (filtered groups, higher clip, soft overlong punishment), transformer, weave; recorded live
family(
    "weave",
    task=Weave,
    model=lambda V, P, T: Trans(V, P, T, D=48, L=2, rope=True),
    pre=0.5,
    steps=110,
    s=adam(
        7e-4,
        weight_decay=0.05,
        num_prompts=24,
        group_size=6,
        clip_low=0.2,
        clip_high=0.28,
        entropy_coef=0.001,
        minibatches=2,
        max_tokens=11,
        overlong=3,
        overlong_limit=12,
        overlong_factor=0.5,
        beta2=0.98,
        entropy_target=0.06,
    ),
    opt="adamw",
    entropy_adaptive=(0.06, 0.0003, 0.006),
    algo="grpo",
    filter=16,
    loss="ppo_clip",
    agg="token_mean",
    record="live",
    names=VERL | dict(eval="val-core/weave/acc/mean@1", kept="train/num_kept"),
    log_eval=5,
    hp=VERL_HP,
    hp_fixed={
        "algorithm.adv_estimator": "grpo",
        "algorithm.filter_groups.enable": True,
        "actor.loss_agg_mode": "token-mean",
    },
    schedule=warm(5),
    bf16=True,
    per_row=("temperature", "max_tokens"),
    Loss=lambda s: ppo(s, aggregation="token_mean"),
)

# 6. slime: two turns with a tool, GSPO, transformer, berth; recorded live
family(
    "berth",
    task=Berth,
    model=lambda V, P, T: Trans(V, P, T, D=40, L=2),
    pre=0.65,
    steps=100,
    s=adam(
        3e-4,
        num_prompts=16,
        group_size=8,
        clip_low=0.2,
        clip_high=0.2,
        kl_coef=0.001,
        entropy_coef=0.001,
        max_tokens=11,
        max_turns=2,
        beta2=0.98,
        weight_decay=0.1,
        minibatches=2,
    ),
    opt="adamw",
    algo="grpo",
    loss="ppo_clip",
    level="sequence",
    agg="sequence_mean",
    ref=True,
    record="live",
    names=SLIME | dict(eval="eval/berth"),
    log_eval=4,
    hp=SLIME_HP,
    hp_fixed={"advantage_estimator": "gspo"},
    Loss=lambda s: ppo(s, aggregation="sequence_mean", level="sequence_mean"),
    token_entropy=False,
    bf16=True,
)

# 7. NeMo-RL: REINFORCE++ (batch whitening, KL in the reward, adaptive coefficient), state space model, slopes; own loop with evaluation
family(
    "slopes",
    task=Slopes,
    model=lambda V, P, T: SSM(V, P, T, E=24, H=64),
    pre=0.7,
    steps=150,
    s=adam(2e-3, num_prompts=192, group_size=1, clip_low=0.2, clip_high=0.2, kl_coef=0.002),
    opt="adam",
    algo="whiten",
    kl_in_reward=True,
    kl_adaptive=(0.15, 0.3),
    ref=True,
    loss="ppo_clip",
    agg="token_mean",
    record="own",
    names=dict(
        reward="train/reward",
        loss="train/loss",
        grad_norm="train/grad_norm",
        lr="train/lr",
        gap="train/token_mult_prob_error",
        kl="train/kl_penalty",
        kl_coef="train/kl_coef",
        length="train/mean_gen_tokens_per_sample",
        entropy="train/approx_entropy",
        eval="validation/accuracy",
    ),
    log_eval=10,
    hp=dict(
        lr="policy.optimizer.lr",
        num_prompts="grpo.num_prompts_per_step",
        kl_coef="loss_fn.kl_penalty",
        clip_low="loss_fn.ratio_clip_min",
        max_grad_norm="policy.max_grad_norm",
        temperature="policy.generation.temperature",
    ),
    token_entropy=True,
)

# 8. prime-rl: asynchronous (lag 2), RLOO with truncated importance weights, GRU, recipe, dense 0..1; own loop with evaluation
family(
    "recipe",
    task=Recipe,
    model=lambda V, P, T: GRU(V, P, T, E=24, H=72),
    pre=0.7,
    steps=160,
    s=adam(5e-4, num_prompts=32, group_size=4, clip_high=5.0, entropy_coef=0.0, max_tokens=15, weight_decay=0.01),
    opt="adamw",
    algo="rloo",
    loss="reinforce",
    denominator="rollout",
    agg="token_mean",
    lag=2,
    record="own",
    names=dict(
        reward="reward/all/mean",
        loss="loss/mean",
        entropy="entropy/all/mean",
        gap_kl="mismatch_kl/all/mean",
        grad_norm="optim/grad_norm",
        lr="optim/lr",
        length="seq_len/all/mean",
        lag="off_policy_level/all/mean",
        eval="eval/recipe/avg@1",
    ),
    log_eval=8,
    hp=dict(
        lr="trainer.optim.lr",
        weight_decay="trainer.optim.weight_decay",
        max_grad_norm="trainer.optim.max_norm",
        num_prompts="orchestrator.batch_size",
        group_size="orchestrator.rollouts_per_example",
        temperature="orchestrator.sampling.temperature",
        max_tokens="orchestrator.sampling.max_tokens",
    ),
    hp_fixed={"max_async_level": 2},
)

# 9. TRL: Dr. GRPO (no std, constant divisor), rope transformer, abbreviations, dense; recorded live
family(
    "abbr",
    task=Abbr,
    model=lambda V, P, T: Trans(V, P, T, D=40, L=2, rope=True),
    pre=0.65,
    steps=110,
    s=adam(
        1e-3,
        num_prompts=16,
        group_size=8,
        clip_low=0.2,
        clip_high=0.2,
        kl_coef=0.002,
        entropy_coef=0.0,
        max_tokens=10,
        beta2=0.98,
    ),
    opt="adamw",
    algo="drgrpo",
    loss="ppo_clip",
    agg="constant",
    ref=True,
    record="live",
    names=TRL | dict(eval="eval/reward"),
    log_eval=5,
    hp=TRL_HP,
    hp_fixed={"loss_type": "dr_grpo", "scale_rewards": "none"},
    schedule=linear(0.3),
    Loss=lambda s: ppo(s, aggregation="constant", max_tokens=10),
    token_entropy=True,
)

# 10. own loop: ReMax (greedy baseline), GRU, dedupe; no evaluation, no entropy
family(
    "dedupe",
    task=Dedupe,
    model=lambda V, P, T: GRU(V, P, T, E=24, H=96),
    pre=0.65,
    steps=120,
    s=adam(2e-3, num_prompts=128, group_size=1, clip_low=0.2, clip_high=0.2),
    opt="adam",
    algo="remax",
    loss="reinforce",
    denominator="train",
    agg="sequence_sum",
    record="own",
    names=dict(reward="score", loss="pg", grad_norm="gnorm", length="gen_len"),
    hp=dict(lr="lr", num_prompts="batch_size", temperature="temperature", max_grad_norm="grad_clip"),
    hp_fixed={"algo": "remax"},
    schedule=warm(10),
)

# 11. sparse: reward-to-go REINFORCE with a baseline per place, perceptron, walk, rewards -20..-10; no versions, no evaluation
family(
    "walk",
    task=Walk,
    model=lambda V, P, T: Window(V, P, T, E=10, W=8, H=128),
    pre=0.65,
    steps=200,
    s=adam(1e-3, num_prompts=160, group_size=1, entropy_coef=0.002),
    opt="adam",
    algo="togo",
    loss="reinforce",
    denominator="train",
    agg="token_mean",
    scale=lambda x: -20 + 10 * x,
    record="sparse",
    missing=("versions",),
    names=dict(reward="episode_return", entropy="policy_entropy", length="episode_len", loss="loss"),
    hp=dict(lr="lr", entropy_coef="entropy_beta", num_prompts="episodes_per_batch", max_grad_norm="max_grad_norm"),
)

# 12. sparse: REINFORCE with a baseline per prompt (prompts repeat), mixture, RMSprop, quota; no advantages, no settings
family(
    "quota",
    task=Quota,
    model=lambda V, P, T: Window(V, P, T, E=12, W=4, H=64, experts=2),
    pre=0.55,
    steps=250,
    pool=400,
    held=512,
    s=dict(
        lr=5e-4,
        alpha=0.99,
        eps=1e-6,
        max_grad_norm=1.0,
        temperature=1.0,
        num_prompts=192,
        group_size=1,
        entropy_coef=0.001,
    ),
    opt="rmsprop",
    algo="table",
    loss="reinforce",
    denominator="train",
    agg="token_mean",
    scale=lambda x: 2 * x - 1,
    record="sparse",
    missing=("advantages",),
    names=dict(reward="reward", entropy="entropy", loss="loss", grad_norm="grad", eval="heldout_reward"),
    log_eval=10,
    hp=dict(lr="lr", num_prompts="batch"),
)
