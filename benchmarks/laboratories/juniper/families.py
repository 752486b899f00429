"""The ten families: task, policy, algorithm, settings, names of what they log, and what they record."""

import math

from core import Brackets, Cipher, Coins, Grid, Hops, Listing, ModSum, Rle, Rnn, Ssm, Style, Tool, Trans, Window

FAMILIES = {}


def family(**k):
    """Adds a family to FAMILIES; core.run reads its entries by name."""
    FAMILIES[k["name"]] = k


# f01: verl-like, live hooks. Coin change by a GRU, GRPO with a KL loss, two epochs of clipped PPO, rewards 0..10
family(
    name="f01",
    task=Coins(),
    policy=lambda t: Rnn(t, "gru", 48),
    algo="ppo",
    adv="grpo",
    agg="token_mean",
    opt="adamw",
    kl_in="loss",
    record="live",
    steps=120,
    eval_every=3,
    pre_steps=500,
    s=dict(lr=2e-3, kl_coef=0.01, batch=96, group=8, epochs=2, minibatches=1, weight_decay=0.01, beta2=0.99),
    rec_limits=True,
    names=dict(
        reward="critic/score/mean",
        entropy="actor/entropy",
        grad_norm="actor/grad_norm",
        lr="actor/lr",
        kl="actor/ppo_kl",
        clipfrac="actor/pg_clipfrac",
        length="response_length/mean",
        truncated="response_length/clip_ratio",
        loss="actor/pg_loss",
        eval="val-core/coins/reward/mean@1",
    ),
)
# f02: TRL-like, live hooks. Closing brackets by a transformer, RLOO of 4, 0/1
family(
    name="f02",
    task=Brackets(),
    policy=lambda t: Trans(t, 32, 2),
    algo="reinforce",
    adv="rloo",
    agg="sequence_mean",
    opt="adam",
    record="live",
    steps=110,
    eval_every=3,
    pre_steps=600,
    pool=400,
    bf16=True,
    s=dict(lr=1e-3, batch=96, group=4, warmup=5, ent_coef=0.001),
    rec_mask=False,
    sched=lambda x: 1 - 0.6 * x,
    names=dict(
        reward="reward",
        reward_std="reward_std",
        entropy="entropy",
        grad_norm="grad_norm",
        lr="learning_rate",
        length="completions/mean_length",
        truncated="completions/clipped_ratio",
        loss="loss",
        eval="eval_reward",
    ),
)
# f03: a loop of its own, careful. Walks in a grid by a state-space model, PPO with critic and KL in the reward by a
# controller; -20..-10; prompts never repeat, groups of 1
family(
    name="f03",
    mantissa=9,
    task=Grid(),
    policy=lambda t: Ssm(t, 40, 2),
    algo="ppo",
    adv="gae",
    agg="token_mean",
    opt="adam",
    kl_in="reward",
    record="careful",
    steps=100,
    eval_every=4,
    pre_steps=700,
    s=dict(lr=5e-4, batch=96, group=1, epochs=2, minibatches=2, kl_coef=0.01, kl_target=0.3),
    names=dict(
        reward="ppo/mean_scores",
        entropy="objective/entropy",
        kl="objective/kl",
        kl_coef="objective/kl_coef",
        grad_norm="grad_norm",
        lr="lr",
        eval="eval/mean_scores",
    ),
)
# f04: slime-like, careful, no evaluation. Two turns with a lookup tool, masked; GRU, GSPO, -1..1
family(
    name="f04",
    task=Tool(),
    policy=lambda t: Rnn(t, "gru", 72, 24),
    algo="gspo",
    adv="grpo",
    agg="sequence_mean",
    opt="adamw",
    record="careful",
    steps=120,
    eval_every=4,
    pre_steps=900,
    s=dict(lr=1.5e-3, batch=96, group=8, epochs=2, clip_low=0.1, clip_high=0.12),
    rec_mask=True,
    sched=lambda x: 0.5 + 0.5 * math.cos(math.pi * x * 0.8),
    names=dict(
        reward="rollout/raw_reward",
        entropy="train/entropy",
        grad_norm="train/grad_norm",
        lr="train/lr",
        length="rollout/response_len/mean",
        truncated="rollout/truncated_ratio",
    ),
)
# f05: prime-rl-like, careful, asynchronous by two updates. Run-length decoding by an LSTM, CISPO with truncated
# importance weights; dense 0..1
family(
    name="f05",
    task=Rle(),
    policy=lambda t: Rnn(t, "lstm", 72),
    algo="cispo",
    adv="drgrpo",
    agg="token_mean",
    opt="adamw",
    record="careful",
    steps=130,
    eval_every=4,
    pre_steps=1300,
    tis=2.0,
    s=dict(lr=1e-3, batch=192, group=8, lag=2, clip_high=1.0, weight_decay=0.01),
    rec_limits=True,
    names=dict(
        reward="reward/mean",
        entropy="entropy/mean",
        grad_norm="optim/grad_norm",
        lr="optim/lr",
        length="seq_len/mean",
        truncated="is_truncated/mean",
        eval="eval/rle/avg@1",
    ),
)
# f06: OpenRLHF-like, live hooks. A reward model of style; a window policy, REINFORCE++ (whitened), KL in the reward
family(
    name="f06",
    mantissa=8,
    task=Style(),
    policy=lambda t: Window(t, 3, 14, 80, seen=True),
    algo="ppo",
    adv="whiten",
    agg="token_mean",
    opt="adam",
    kl_in="reward",
    record="live",
    steps=120,
    eval_every=4,
    pre_steps=500,
    s=dict(lr=2e-3, batch=96, group=1, kl_coef=0.02, epochs=2),
    rec_entropy=True,
    names=dict(
        reward="reward",
        entropy="entropy_loss",
        kl="kl",
        length="response_length",
        grad_norm="grad_norm",
        lr="actor_lr",
        loss="policy_loss",
        eval="eval_style_pass1",
    ),
)
# f07: NeMo-RL-like, live hooks. Listing distinct symbols in any order by a mixture of experts, DAPO (asymmetric clip,
# dynamic sampling), groups of 12
family(
    name="f07",
    task=Listing(),
    policy=lambda t: Trans(t, 32, 2, 4, experts=4),
    algo="ppo",
    adv="grpo",
    agg="token_mean",
    opt="adamw",
    record="live",
    steps=90,
    eval_every=3,
    pre_steps=450,
    oversample=2,
    s=dict(lr=1.5e-3, batch=96, group=12, epochs=2, clip_high=0.28, overlong_buffer=9, weight_decay=0.01),
    n_eval=160,
    names=dict(
        reward="train/reward",
        entropy="train/approx_entropy",
        grad_norm="train/grad_norm",
        lr="train/lr",
        length="train/mean_gen_tokens_per_sample",
        clipfrac="train/probs_ratio_clamped",
        eval="validation/accuracy",
    ),
)
# f08: sparse: no advantages, no entropy. Modular sums with a scratchpad, GRU, GRPO without std, 0/1, constant
# denominator
family(
    name="f08",
    task=ModSum(),
    policy=lambda t: Rnn(t, "gru", 64),
    algo="reinforce",
    adv="drgrpo",
    agg="constant",
    opt="adamw",
    record="sparse",
    steps=140,
    eval_every=4,
    pre_steps=2200,
    pool=500,
    s=dict(lr=1.5e-3, batch=192, group=8, ent_coef=0.0),
    rec_adv=False,
    names=dict(reward="mean_reward", loss="loss", lr="lr", grad_norm="gnorm", eval="test_acc"),
)
# f09: sparse: no versions, no evaluation, no settings. A cipher by a window network, SGD with momentum, dense rewards
# to go against a baseline by position
family(
    name="f09",
    task=Cipher(),
    policy=lambda t: Window(t, 2, 12, 96, align=True),
    algo="reinforce",
    adv="rtg",
    agg="token_mean",
    opt="sgd",
    record="none",
    steps=150,
    eval_every=5,
    pre_steps=300,
    s=dict(lr=0.04, batch=64, group=1, momentum=0.9, clip_grad=1.0, ent_coef=0.01),
    rec_versions=False,
    rec_finish=False,
    names=dict(reward="score", entropy="H", grad_norm="|g|"),
)
# f10: careful, no evaluation, bfloat16 engine. Hops through a table by a transformer, GRPO, 0..1, entropy held by a
# controller
family(
    name="f10",
    task=Hops(),
    policy=lambda t: Trans(t, 40, 2),
    algo="ppo",
    adv="grpo",
    agg="token_mean",
    opt="adam",
    kl_in="loss",
    record="careful",
    steps=100,
    eval_every=3,
    pre_steps=1200,
    bf16=True,
    s=dict(lr=1e-3, batch=96, group=8, epochs=1, kl_coef=0.02, ent_target=0.15, ent_coef=0.0),
    rec_entropy=True,
    names=dict(
        reward="reward_mean",
        reward_std="reward_std",
        entropy="policy_entropy",
        ent_coef="entropy_coef",
        kl="kl_to_ref",
        grad_norm="grad_norm",
    ),
)
