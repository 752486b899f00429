"""Data faults that are planted in real traces, and sound runs of the usual advantage estimators."""

import shlex
from functools import partial

import numpy as np
import pytest
from bigrams import FP32, VLLM_BF16, VLLM_FP32, Step, in_float32, moved, sample, table, top_p
from builders import tim_trace
from shared import rest_slow
from tim_trace.analysis import check
from tim_trace.analysis.check.data_checks import FAULTS as DATA_FAULTS
from tim_trace.analysis.check.data_checks import data_findings
from tim_trace.analysis.check.sample import read_sample
from tim_trace.analysis.check.text import checked_text, data_text
from tim_trace.analysis.views import open_database
from tim_trace.schemas.loss import Loss
from tim_trace.tracer.recorder import Recorder

GROUPS, IN_GROUP, STEPS = 8, 8, 8
END = 1
GROUP = np.repeat(np.arange(GROUPS), IN_GROUP)
START = GROUP * IN_GROUP


def centred(values, group=GROUP):
    return values - (np.bincount(group, values) / np.bincount(group))[group]


def spread(values, group=GROUP, ddof=1):
    n = np.bincount(group)
    return np.sqrt(np.bincount(group, centred(values, group) ** 2) / (n - ddof))[group]


def grpo(reward, group=GROUP, ddof=1, eps=1e-4):
    return centred(reward, group) / (spread(reward, group, ddof) + eps)


def pairs(reward):
    """1 for the best and -1 for the worst response of a group, 0 for the others."""
    rows = reward.reshape(-1, IN_GROUP)
    chosen, places = np.zeros(rows.shape), np.arange(GROUPS)
    chosen[places, rows.argmax(1)] += rows.max(1) > rows.min(1)
    chosen[places, rows.argmin(1)] -= rows.max(1) > rows.min(1)
    return chosen.ravel()


def binary(step, number, draw):
    """Passes by group-wise difficulty."""
    return (draw.random(len(GROUP)) < draw.uniform(0.2, 0.8, GROUPS)[GROUP]).astype(float)


def graded(step, number, draw):
    """A function of prompt and response."""
    return np.array(
        [np.mean(row % 3 == 0) + prompt[0] / 200 for prompt, row in zip(step.prompts, step.responses, strict=True)]
    )


def write(
    path, advantage=lambda reward, number: grpo(reward), *, reward=binary, recorded=lambda reward, number: reward, steps=STEPS,
    groups=lambda step, number: step.groups, columns=lambda step, number: {}, metrics=lambda step, reward, number: {}, passes=None,
    hyperparameters=None, loss=None, contracts=None, entropy=True, longest=12,
):  # fmt: skip
    with Recorder(path) as recorder:
        for name, contract in (contracts or {}).items():
            recorder.add_contract(name, contract)
        if hyperparameters:
            recorder.add_hyperparameters(hyperparameters)
        if loss:
            recorder.add_loss(loss)
        for number in range(1, steps + 1):
            step, draw = (
                sample(table(), 100 + number, groups=GROUPS, in_group=IN_GROUP, longest=longest),
                np.random.default_rng(number),
            )
            truth = reward(step, number, draw)
            given = {
                "prompt_ids": [row.tolist() for row in step.prompts], "response_ids": [row.tolist() for row in step.responses],
                "group_ids": groups(step, number), "reward": recorded(truth, number), "advantage": advantage(truth, number), "policy_version": number - 1,
            } | columns(step, number)  # fmt: skip
            batch = recorder.add_sequences(step=number, **given)
            if passes is not None:
                passes(recorder, batch, step, number)
            else:
                recorder.add_scores("rollout", batch, logprobs=in_float32(step, number))
                recorder.add_scores(
                    "train",
                    batch,
                    logprobs=step.scored(),
                    entropy=[row * np.float32(entropy) for row in step.entropies()] if entropy else None,
                )
            recorder.add_metrics(number, metrics(step, np.asarray(given["reward"]), number))
    return path


def findings(path, steps="all", sampled=True):
    database = open_database(path) if steps == "all" else open_database(path, steps)
    return data_findings(database, read_sample(database, ("train", "rollout"), []) if sampled else None)


def per_token(reward, number):
    """GAE with a critic that is right on average."""
    draw = np.random.default_rng(number)
    rows = sample(table(), 100 + number, groups=GROUPS, in_group=IN_GROUP, longest=12).responses
    return [(r - 0.5 + draw.normal(0, 0.4, len(row))).astype(np.float32) for r, row in zip(reward, rows, strict=True)]


def lengths_of(number):
    rows = sample(table(), 100 + number, groups=GROUPS, in_group=IN_GROUP, longest=12).responses
    return np.array([len(row) for row in rows])


def left_out(reward, floor=1e-3, ddof=0):
    """The mean and the deviation of the group's other rows; not divided where they are equal (NeMo-RL)."""
    other = [
        np.delete(np.arange(len(GROUP)), row)[GROUP[np.arange(len(GROUP)) != row] == GROUP[row]]
        for row in range(len(GROUP))
    ]
    x = reward - np.array([reward[rows].mean() for rows in other])
    deviation = np.array([reward[rows].std(ddof=ddof) for rows in other])
    return np.where(deviation > floor, x / np.maximum(deviation, 1e-6), x)


def partial_credit(step, number, draw):
    """Rewards of which most are equal, so that the other rows of a group can differ by little."""
    rewards = draw.choice([0.35, 0.4, 0.95], len(GROUP), p=[0.7, 0.1, 0.2])
    rewards[:IN_GROUP] = [0.35] * (IN_GROUP - 2) + [0.4, 0.95]
    return rewards


def several(reward, number):
    """Two rewards that are normalised on their own and added; the sum is recorded."""
    other = np.random.default_rng(50 + number).normal(size=len(reward))
    return grpo(reward) + 0.3 * grpo(other)


def maxrl(reward, number):
    means = (np.bincount(GROUP, reward) / np.bincount(GROUP))[GROUP]
    return centred(reward) / np.maximum(means, 0.01)


def whitened(values):
    return (values - values.mean()) / (values.std() + 1e-8)


def some_rows(step, number):
    """Some rows have no reward, nor a part in their group's mean."""
    draw = np.random.default_rng(number)
    reward = np.where(draw.random(len(GROUP)) < 0.1, np.nan, draw.normal(GROUP, 1.0))
    means = np.array([np.nanmean(part) for part in reward.reshape(GROUPS, IN_GROUP)])[GROUP]
    return {
        name: [None if np.isnan(x) else x for x in values]
        for name, values in (("reward", reward), ("advantage", reward - means))
    }


def rising(step, number, draw):
    """Better by the step."""
    return number / 10 + np.linspace(0, 0.1, len(GROUP))


def signed(step, number, draw):
    """Graded rewards whose group means have both signs."""
    return graded(step, number, draw) + draw.uniform(-1.5, 1.5, GROUPS)[GROUP]


def by_mean(r, size=lambda mean: mean):
    return centred(r) / (size(r - centred(r)) + 1e-4)


def best_only(r, rest):
    """The best row's lead over the second, divided by the deviation (pass@k), and `rest` for the others."""
    rows = np.sort(r.reshape(-1, IN_GROUP), 1)
    best = r == rows[:, -1][GROUP]
    return np.where(best, (rows[:, -1] - rows[:, -2])[GROUP] / spread(r), rest)


def scattered(step, number, draw):
    """Rewards that are all different."""
    return graded(step, number, draw) + draw.uniform(0.2, 0.3, len(GROUP))


def kl_of(number):
    """Differences between train and reference, one for each token of a step."""
    draw = np.random.default_rng(300 + number)
    return [draw.exponential(0.1, length) for length in lengths_of(number)]


def turns_of(number):
    """Masks with the third and the fourth of more than five tokens left out, as if a tool had written them."""
    return [(np.arange(length) // 2 != 1) | (length < 6) for length in lengths_of(number)]


def returns(r, number, gamma=1.0, kl=0.1, leaks=False, passes=1.0):
    """Sums of later rewards of each token, whitened. Over masked tokens, a sum is multiplied by `passes`."""
    rows = []
    for value, penalty, mask in zip(r, kl_of(number), turns_of(number), strict=True):
        rewards, total = -kl * penalty * (mask | leaks), 0.0
        rewards[-1] += value
        row = np.zeros(len(rewards))
        for at in reversed(range(len(row))):
            total = row[at] = rewards[at] + gamma * total
            total *= 1.0 if mask[at] else passes
        rows.append(row)
    inside = np.concatenate([row[mask] for row, mask in zip(rows, turns_of(number), strict=True)])
    return [(row - inside.mean()) / inside.std() * mask for row, mask in zip(rows, turns_of(number), strict=True)]


def of_returns(recorder, batch, step, number):
    recorder.add_scores("rollout", batch, logprobs=in_float32(step, number))
    recorder.add_scores("train", batch, logprobs=step.scored())
    reference = [row - part for row, part in zip(step.scored(), kl_of(number), strict=True)]
    recorder.add_scores("reference", batch, logprobs=reference)


RETURNS = {"columns": lambda step, n: {"response_mask": turns_of(n)}, "passes": of_returns, "reward": graded}


def lengths_logged(step, least):
    lengths = [len(row) for row in step.responses]
    return {"response_length/mean": np.mean(lengths), "response_length/max": max(lengths), "response_length/min": least}


def lagging(lag, per_step=1):
    """Scores of an engine that is `lag(number)` steps behind, with `per_step` updates a step."""

    def passes(recorder, batch, step, number):
        version = per_step * number
        behind = version - per_step * lag(number)
        recorder.add_scores("rollout", batch, logprobs=in_float32(step, number), policy_version=behind)
        recorder.add_scores("train", batch, logprobs=step.scored(), policy_version=version)

    return passes


def epochs(order):
    """Prompts of epochs of four steps, in the order `order(epoch)`."""

    def columns(step, number):
        place = order((number - 1) // 4)[(number - 1) % 4]
        return {"prompt_ids": [[9, int(place), int(group)] for group in GROUP]}

    return columns


def without_masked(reward, number):
    """Rewards minus the mean of the group's rows that train; 0 for the others."""
    trains = np.random.default_rng(number).random(len(GROUP)) > 0.3
    mean = np.bincount(GROUP, reward * trains) / np.maximum(np.bincount(GROUP, trains), 1)
    return (reward - mean[GROUP]) * trains


def third_masked(step, number):
    trains = np.random.default_rng(number).random(len(GROUP)) > 0.3
    return {"response_mask": [np.full(len(row), one) for row, one in zip(step.responses, trains, strict=True)]}


def penalties_of(number, coefficient=0.1):
    return coefficient * np.array([row.sum() for row in kl_of(number)])


DECLARED_KL = {"passes": of_returns, "hyperparameters": {"algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.1}}  # fmt: skip


def means(r):
    return (np.bincount(GROUP, r) / IN_GROUP)[GROUP]


def of_step_before(r, n):
    """Rewards minus the mean that the same group had one step earlier."""
    return r - means(binary(None, n - 1, np.random.default_rng(n - 1)) if n > 1 else r)


def neighbours_spread(r):
    return centred(r) / np.roll(spread(r)[::IN_GROUP], 1)[GROUP]


def raw_quarter(r):
    """The last quarter of a step keeps its rewards."""
    return np.where(np.arange(len(r)) < 3 * len(r) // 4, grpo(r), r)


def of_shuffled_groups(r, n):
    return grpo(r, np.random.default_rng(n).permutation(GROUP))


def penalised(r, n):
    """The advantage of rewards that are recorded without their penalty."""
    return grpo(r - np.random.default_rng(n).gamma(1.0, 0.02, len(r)))


def ends_of(step):
    """Stop, or length for the longest responses of a step."""
    longest = max(map(len, step.responses))
    return ["length" if len(row) == longest else "stop" for row in step.responses]


def parts_with(name, values):
    """A second reward function beside the accuracy, and their sum as the reward."""

    def both(step):
        return {"accuracy": parts_of(step)["accuracy"], name: np.array(values(step), float)}

    return {
        "reward": lambda step, n, draw: sum(both(step).values()),
        "columns": lambda step, n: {"rewards": both(step), "finish_reason": ends_of(step)},
    }


def far_engine(step, number):
    draw = np.random.default_rng(number)
    return [np.minimum(row + draw.normal(0, 0.1, len(row)), -1e-6).astype(np.float32) for row in step.scored()]


def importance(step, number):
    """The mean of the sequences' importance weights, as NeMo-RL logs it."""
    rows = zip(step.scored(), far_engine(step, number), strict=True)
    return np.mean([np.exp(np.sum(train.astype(float) - rollout)) for train, rollout in rows])


def scored_by_far_engine(recorder, batch, step, number):
    recorder.add_scores("rollout", batch, logprobs=far_engine(step, number))
    recorder.add_scores("train", batch, logprobs=step.scored())


def shuffled_penalties(step, number):
    """Penalties of long responses, in another order than the rows."""
    draw = np.random.default_rng(number)
    return draw.permutation([min(8 - len(row), 0) / 4 for row in step.responses])


def with_tools(step, number):
    """The third and the fourth token of every other response are a tool's."""
    return [(np.arange(len(row)) // 2 != 1) | (at % 2 == 0) for at, row in enumerate(step.responses)]


def counting_tools(step):
    return [-0.1 * max(len(row) - 4, 0) for row in step.responses]


def under_other_mask(values, number):
    """The advantage at the tokens that the reversed mask counts."""
    masks = turns_of(number)
    return [np.where(mask[::-1], value, 0.0) for value, mask in zip(values, masks, strict=True)]


def alone_format(step):
    """Every other group always has the same accuracy."""
    parts = parts_of(step)
    return {"accuracy": np.where(GROUP % 2, parts["accuracy"], 1.0), "format": parts["format"]}


def of_parts(weights=(1.0, 0.5), normalise=grpo, settings="[1.0, 0.5]"):
    """Advantages that are a sum of reward functions, each normalised by itself (GDPO)."""

    def columns(step, number):
        accuracy, form = parts_of(step).values()
        return {"rewards": parts_of(step), "advantage": weights[0] * grpo(accuracy) + weights[1] * normalise(form)}

    reward = lambda step, n, draw: parts_of(step)["accuracy"] + 0.5 * parts_of(step)["format"]  # noqa: E731
    return {
        "reward": reward,
        "columns": columns,
        "hyperparameters": {"reward_weights": settings, "scale_rewards": "gdpo"},
    }


def of_scaled_parts(weights, scales):
    """GDPO of reward functions whose values are multiplied by `scales`."""

    def parts(step):
        length = np.array([len(row) for row in step.responses])
        return {
            name: scale * values
            for scale, (name, values) in zip(scales, {**parts_of(step), "length": length}.items(), strict=True)
        }

    def columns(step, number):
        terms = zip(weights, parts(step).values(), strict=False)
        return {"rewards": parts(step), "advantage": sum(weight * grpo(values) for weight, values in terms)}

    reward = lambda step, n, draw: sum(w * x for w, x in zip(weights, parts(step).values(), strict=False))  # noqa: E731
    return {
        "reward": reward,
        "columns": columns,
        "hyperparameters": {"reward_weights": str(list(weights)), "scale_rewards": "gdpo"},
    }


def of_other_prompts(step):
    """Two reward functions, each of which judges the prompts that the other does not."""
    parts, is_code = parts_of(step), GROUP % 2 == 0
    return {"code": parts["accuracy"] * is_code, "maths": parts["format"] * ~is_code, "none": 0.0 * GROUP + 1}


def credited(reward, number, noise=0.1):
    """GAE with a critic that is right on average, and small residues."""
    draw = np.random.default_rng(number)
    return [
        value - 0.5 + draw.normal(0, noise, length) for value, length in zip(reward, lengths_of(number), strict=True)
    ]


def decaying(reward, number):
    """Discounted returns without a critic."""
    lengths = lengths_of(number)
    return [(value - 0.5) * 0.95 ** np.arange(length)[::-1] for value, length in zip(reward, lengths, strict=True)]


def truncated_only(reward, number):
    """Rewards of the longest rows, 0 for the others, as if those of shorter rows stood on padding."""
    return reward * (lengths_of(number) == lengths_of(number).max())


def of_teacher(number, factor=-1.0, lag=0):
    return [np.roll(factor * row, lag) for row in kl_of(number)]


def of_teacher_pass(recorder, batch, step, number):
    of_returns(recorder, batch, step, number)
    teacher = [row - part for row, part in zip(step.scored(), kl_of(number), strict=True)]
    if number == 1:
        recorder.add_contract("teacher", {"engine": "vllm"})
    recorder.add_scores("teacher", batch, logprobs=teacher)


def of_rank_halves(reward, number):
    """Advantages whitened by two ranks, each of which has one half of every row."""
    rows = [np.full(length, value) for value, length in zip(grpo(reward), lengths_of(number), strict=True)]
    halves = [np.arange(len(row)) < len(row) // 2 for row in rows]
    first, second = (
        np.concatenate([row[half == one] for row, half in zip(rows, halves, strict=True)]) for one in (True, False)
    )
    return [
        np.where(half, (row - first.mean()) / first.std(), (row - second.mean()) / second.std())
        for row, half in zip(rows, halves, strict=True)
    ]


def token_whitened(reward, number, padded=0):
    """GRPO, then whitened over the batch's tokens, or with a mean over `padded` tokens in each row."""
    advantage, lengths = grpo(reward), lengths_of(number)
    off = advantage - (advantage * lengths).sum() / (padded * len(lengths) or lengths.sum())
    return off / np.sqrt((off**2 * lengths).sum() / lengths.sum())


def by_length(step, number, draw):
    """Longer responses are better."""
    return 0.6 * (np.array([len(row) for row in step.responses]) > 8) + 0.4 * draw.random(len(GROUP))


def of_rank(reward, number):
    rank = np.arange(len(reward)) // (2 * IN_GROUP)
    return centred(reward) / np.sqrt(np.bincount(rank, centred(reward) ** 2))[rank]


ALONE = np.where(np.arange(len(GROUP)) % 16 == 15, GROUPS + np.arange(len(GROUP)) // 16, GROUP)
UNEVEN = np.repeat(np.arange(GROUPS), [5, 11, 6, 10, 8, 8, 7, 9])


def without_prompts(label):
    return {"groups": lambda step, n: [str(each) for each in label], "columns": lambda step, n: {"prompt_ids": None}}


def left_one_out(reward, rest):
    """Rewards minus the mean of the group's other rows, and `rest` for rows that are alone in their group."""
    num = np.bincount(ALONE)[ALONE]
    return np.where(num > 1, centred(reward, ALONE) * num / np.maximum(num - 1, 1), rest)


def changed_if_truncated(given):
    """Truncated rows have reward 0, and the advantages `given(raw reward, is truncated)`."""

    def columns(step, number):
        raw, cut = graded(step, number, None), np.array([each == "length" for each in ends_of(step)])
        return {"finish_reason": ends_of(step), "reward": np.where(cut, 0.0, raw), "advantage": given(raw, cut)}

    return {"columns": columns, "hyperparameters": {"adv_estimator": "grpo"}}


UNEVEN = np.repeat(np.arange(9), [8, 7, 6, 8, 7, 6, 8, 7, 7])
SOUND = {
    "groups of 6 to 8 rows": {"advantage": lambda r, n: grpo(r, UNEVEN), "groups": lambda step, n: UNEVEN.astype(str).tolist(), "columns": lambda step, n: {"prompt_ids": None}},
    "gdpo": of_parts(),
    "gdpo with a function of weight 0": of_scaled_parts((0.0, 0.5, 1.0), (1.0, 1.0, 1.0)),
    "gdpo with small rewards": of_scaled_parts((1.0, 1.0, 1.0), (1.0, 0.004, 1.0)),
    "gdpo of functions for other prompts": {
        "reward": lambda step, n, draw: sum(of_other_prompts(step).values()),
        "columns": lambda step, n: {"rewards": of_other_prompts(step), "advantage": sum(grpo(each) for each in of_other_prompts(step).values())},
        "hyperparameters": {"reward_weights": "[1.0, 1.0, 1.0]", "scale_rewards": "gdpo"},
    },
    "distillation normalised within rows": {"advantage": lambda r, n: [whitened(row) for row in of_teacher(n)], "passes": of_teacher_pass},
    "a large penalty of the reference": {"passes": of_returns, "advantage": lambda r, n: grpo(r - penalties_of(n, 1.0)), "hyperparameters": {"adv_estimator": "grpo", "kl_coef": 1.0}},
    "a penalty of truncated rows": changed_if_truncated(lambda raw, cut: grpo(np.where(cut, 0.0, raw) - cut)),
    "distillation": {"advantage": lambda r, n: of_teacher(n), "passes": of_returns},
    "distillation and grpo": {"advantage": lambda r, n: [a + row for a, row in zip(grpo(r), of_teacher(n, -0.3), strict=True)], "passes": of_returns, "hyperparameters": {"adv_estimator": "grpo"}},
    "a critic with small residues": {"advantage": credited},
    "grpo whitened over tokens": {"advantage": lambda r, n: token_whitened(r, n), "reward": by_length, "hyperparameters": {"adv_estimator": "grpo"}},
    "rows alone without advantages": {"advantage": lambda r, n: left_one_out(r, 0.0), "reward": graded, **without_prompts(ALONE)},
    "returns with a penalty": {"advantage": lambda r, n: returns(r, n), **RETURNS},
    "returns with a changing penalty": {"advantage": lambda r, n: returns(r, n, kl=0.05 * 1.3**n), **RETURNS},
    "returns": {"advantage": lambda r, n: returns(r, n, kl=0.0), "hyperparameters": {"adv_estimator": "reinforce_plus_plus"}, **RETURNS},
    "grpo": {},
    "grpo of graded rewards": {"reward": graded},
    "epochs in another order": {"columns": epochs(lambda epoch: np.random.default_rng(epoch).permutation(4)), "hyperparameters": {"data.shuffle": True}},
    "an engine as far behind as allowed": {"passes": lagging(lambda n: min(n, 2), per_step=3), "hyperparameters": {"max_head_offpolicyness": 2}},
    "validation data in one order": {"columns": epochs(lambda epoch: range(4)), "hyperparameters": {"data.shuffle": False, "data.validation_shuffle": True, "actor.shuffle": True}},
    "two limits of the lag": {"passes": lagging(lambda n: min(n, 4)), "hyperparameters": {"max_async_level": 1, "max_off_policy_steps": 8}},
    "a KL that is only part of the rewards": {"metrics": lambda step, r, n: {"train/loss": 0.1 * n + 1e-17 * n, "train/pg_loss": 0.1 * n, "train/kl_loss": 0.3 + 0.05 * (n % 3)}, "hyperparameters": {"kl_loss_coef": 0.0, "kl_coef": 0.1}},
    "a KL that is only part of the loss": {"metrics": lambda step, r, n: {"rollout/kl": 0.0, "train/kl_loss": 0.01 * n}, "hyperparameters": {"kl_loss_coef": 0.001, "kl_coef": 0.0}},
    "a KL that is not used": {"metrics": lambda step, r, n: {"policy/kl_loss": 0.0}, "hyperparameters": {"use_kl_loss": False, "kl_loss_coef": 0.001}},
    "logged extremes of group means": {"reward": graded, "metrics": lambda step, r, n: {"reward/mean": r.mean(), "reward/max": means(r).max(), "reward/min": means(r).min()}},
    "solved prompts": {"reward": lambda step, n, draw: np.where(GROUP % 3 == 0, 1.0, draw.integers(0, 5, len(GROUP)) / 6)},
    "a penalty that no response gets": {"reward": lambda step, n, draw: parts_of(step)["accuracy"], "columns": lambda step, n: {"rewards": {"accuracy": parts_of(step)["accuracy"], "overlong_penalty": 0 * GROUP}}},
    "a logged KL": {"metrics": lambda step, r, n: {"actor/kl_loss": 0.01 * (n > 1)}, "hyperparameters": {"actor.kl_loss_coef": 0.01}},
    "declared penalty of the reference": {**DECLARED_KL, "advantage": lambda r, n: grpo(r - penalties_of(n))},
    "declared penalty in the reward": {**DECLARED_KL, "reward": lambda step, n, draw: binary(step, n, draw) - penalties_of(n)},
    "grpo with the other standard deviation": {"advantage": lambda r, n: grpo(r, ddof=0, eps=1e-6)},
    "grpo with a large eps": {"advantage": lambda r, n: grpo(0.5 * r, eps=0.05), "recorded": lambda r, n: 0.5 * r},
    "dr. grpo": {"advantage": lambda r, n: centred(r)},
    "rloo": {"advantage": lambda r, n: centred(r) * IN_GROUP / (IN_GROUP - 1), "reward": graded},
    "mean and deviation of the other rows": {"advantage": lambda r, n: left_out(r), "reward": partial_credit},
    "mean and deviation of the other rows, with single successes": {"advantage": lambda r, n: left_out(r, ddof=1), "reward": lambda step, n, draw: (np.arange(len(GROUP)) % IN_GROUP <= GROUP // 6) * 1.0},
    "group mean, batch scale": {"advantage": lambda r, n: whitened(centred(r)), "reward": graded},
    "reinforce++": {"advantage": lambda r, n: whitened(r), "hyperparameters": {"algorithm.adv_estimator": "reinforce_plus_plus"}},
    "whitened over tokens": {"advantage": lambda r, n: r - np.average(r, weights=lengths_of(n)), "hyperparameters": {"algorithm.adv_estimator": "reinforce_plus_plus"}},
    "running mean": {"advantage": lambda r, n: r - 0.1 - 0.05 * n, "hyperparameters": {"baseline": "running_mean"}},
    "reinforce++ without groups": {"advantage": lambda r, n: whitened(r), "groups": lambda step, n: None},
    "reinforce without a baseline": {"advantage": lambda r, n: r, "groups": lambda step, n: None},
    "critic": {"advantage": per_token},
    "critic that knows nothing": {"advantage": lambda r, n: [np.full(len(x), v) for x, v in zip(per_token(r, n), r, strict=True)], "groups": lambda step, n: None},
    "several rewards": {"advantage": several},
    "a penalty that is not recorded": {"advantage": penalised, "recorded": lambda r, n: r, "reward": lambda step, n, draw: 2 * binary(step, n, draw) - 1, "hyperparameters": {"adv_estimator": "grpo"}},
    "two groups a step": {"groups": lambda step, n: [f"{row % 2}" for row in range(len(GROUP))], "advantage": lambda r, n: whitened(r), "hyperparameters": {"adv_estimator": "reinforce_plus_plus"}, "columns": lambda step, n: {"prompt_ids": None}},
    "one success a group": {"reward": lambda step, n, draw: (np.arange(len(GROUP)) % IN_GROUP == n % IN_GROUP).astype(float)},
    "other reward functions at other steps": {"reward": lambda step, n, draw: parts_of(step)["accuracy"], "columns": lambda step, n: {"rewards": {"code" if n % 2 else "maths": parts_of(step)["accuracy"]}}},
    "logged tokens of the loss": {"entropy": None, "columns": lambda step, n: {"response_mask": with_tools(step, n)}, "metrics": lambda step, r, n: {"response_length": np.mean([mask.sum() for mask in with_tools(step, n)])}},
    "metrics of more rows, close to the next step": {"metrics": lambda step, r, n: {"reward": 0.5 + 0.01 * n}, "reward": lambda step, n, draw: np.where(np.arange(len(GROUP)) < 32, 1.0, 0.0)[draw.permutation(len(GROUP))]},
    "maxrl": {"advantage": maxrl},
    "divided by the size of the mean": {"advantage": lambda r, n: by_mean(r, np.abs), "reward": signed},
    "best row only": {"advantage": lambda r, n: best_only(r, 0.0), "reward": scattered},
    "float32": {"advantage": lambda r, n: grpo(r.astype(np.float32)).astype(np.float32), "reward": graded},
    "solved": {"reward": lambda step, n, draw: binary(step, n, draw) if n < 4 else np.ones(len(GROUP)), "metrics": lambda step, r, n: {"reward": r.mean()}},
    "logged lengths": {"metrics": lambda step, r, n: lengths_logged(step, min(map(len, step.responses)))},
    "metrics": {"metrics": lambda step, r, n: {"reward": r.mean(), "completion_length": np.mean([len(x) for x in step.responses]), "entropy": np.concatenate(step.entropies()).mean()}},
"rows without a reward": {"columns": some_rows},
    "groups of several sizes": {"groups": lambda step, n: [f"{g % 6}" for g in GROUP], "advantage": lambda r, n: grpo(r, GROUP % 6), "columns": lambda step, n: {"prompt_ids": None}},
    "turns with prompts of their own": {"columns": lambda step, n: {"prompt_ids": [[*prompt.tolist(), row] for row, prompt in enumerate(step.prompts)]}},
    "one prompt": {"columns": lambda step, n: {"prompt_ids": [[5, 6]] * len(GROUP)}},
"metrics of every third step": {"steps": 12, "reward": rising, "metrics": lambda step, r, n: {"reward": np.mean([rising(step, n - k, None).mean() for k in range(3)])} if n % 3 == 0 else {}},
    "metrics of more rows": {"metrics": lambda step, r, n: {"reward": r.mean() + np.random.default_rng(n).normal() * r.std() / 8}},
}  # fmt: skip


@pytest.mark.parametrize("kind", rest_slow(SOUND, 6))
def test_a_sound_run_gives_nothing(tmp_path, kind):
    found = findings(write(tmp_path / "run", **SOUND[kind]))
    assert [data_text(finding) for finding in found] == []


def roll(by):
    return lambda r, n: np.roll(r, by)


def in_groups(r, n):
    """Each group's rewards in another order."""
    draw = np.random.default_rng(90 + n)
    return np.concatenate([draw.permutation(part) for part in r.reshape(GROUPS, IN_GROUP)])


def since(step, changed, before=grpo):
    return lambda r, n: changed(r) if n >= step else before(r)


def strided(r):
    return grpo(r, np.arange(len(r)) % GROUPS)


def previous(r):
    means = np.bincount(GROUP, r) / IN_GROUP
    return (r - np.roll(means, 1)[GROUP]) / spread(r).clip(0.1)


def of_other_group(r):
    """Advantages by the mean and the standard deviation of the group before."""
    means, sizes = np.bincount(GROUP, r) / IN_GROUP, spread(r, ddof=0)[::IN_GROUP]
    return (r - np.roll(means, 1)[GROUP]) / np.roll(sizes, 1)[GROUP]


HALVES = 2 * GROUP + (np.arange(len(GROUP)) % IN_GROUP >= IN_GROUP // 2)


def late(values, number, num):
    """One advantage for all tokens of a row but the first ones."""
    return [
        np.where(np.arange(length) < num, 0.0, value) for value, length in zip(values, lengths_of(number), strict=True)
    ]


def entropies_of_the_next_row(recorder, batch, step, number):
    """Entropies in another order than the rows, with 0 where the other row is shorter."""
    recorder.add_scores("rollout", batch, logprobs=in_float32(step, number))
    entropies = step.entropies()
    moved = [np.resize(np.r_[entropies[row - 1], np.zeros(60)], len(each)) for row, each in enumerate(entropies)]
    recorder.add_scores("train", batch, logprobs=step.scored(), entropy=moved)


def of_first_rows(recorder, batch, step, number):
    """Logprobs of groups in which each row is the first one."""
    for name, values in (("rollout", in_float32(step, number)), ("train", step.scored())):
        recorder.add_scores(name, batch, logprobs=[values[row - row % IN_GROUP] for row in range(len(GROUP))])


def of_first_step(recorder, batch, step, number):
    """Logprobs of the first step's responses at every step."""
    first = sample(table(), 101, groups=GROUPS, in_group=IN_GROUP, longest=12)
    for name, values in (("rollout", in_float32(first, 1)), ("train", first.scored())):
        recorder.add_scores(name, batch, logprobs=values)


def parts_of(step):
    """Two reward functions of each response."""
    return {
        "accuracy": np.array([float(np.mean(row % 3 == 0)) for row in step.responses]),
        "format": np.array([float(row[0] % 2) for row in step.responses]),
    }


def judged(step, number):
    """Two reward functions, of which one returns 0 from step 5 on."""
    return {name: values * (number < 5 or name == "accuracy") for name, values in parts_of(step).items()}


def failing(number):
    """Finish reasons of a step in which a tenth of the rollouts fail."""
    draw = np.random.default_rng(number).random(len(GROUP))
    return np.where(draw < 0.05, "timeout", np.where(draw < 0.1, "Error", "stop"))


def cut_prompts(number):
    """Prompts of 10 to 59 tokens, cut to 24."""
    draw = np.random.default_rng(number)
    prompts = [draw.integers(2, 50, draw.integers(10, 60)).tolist()[:24] for _ in range(GROUPS)]
    return [prompts[group] for group in GROUP]


def stopped(step):
    """Responses that end with an end token, except those of the full length; all are said to have stopped."""
    longest = max(map(len, step.responses))
    ids = [row.tolist() if len(row) == longest else [*row[:-1].tolist(), END] for row in step.responses]
    step.responses = [np.array(row) for row in ids]
    return {"response_ids": ids, "finish_reason": ["stop"] * len(ids)}


INTERLEAVED = np.arange(len(GROUP)).reshape(GROUPS, IN_GROUP).T.ravel()


def interleaved_columns(step):
    return {
        "prompt_ids": [step.prompts[row].tolist() for row in INTERLEAVED],
        "response_ids": [step.responses[row].tolist() for row in INTERLEAVED],
    }


def interleaved_scores(recorder, batch, step, number):
    for name, values in (("rollout", in_float32(step, number)), ("train", step.scored())):
        recorder.add_scores(name, batch, logprobs=[values[row] for row in INTERLEAVED])


FAULTS = {
    "nothing, divided": ("baseline", None, {"advantage": lambda r, n: r / spread(r), "reward": graded}),
    "the sum of the group": ("baseline", None, {"advantage": lambda r, n: r - IN_GROUP * means(r), "reward": graded}),
    "the group of the step before": ("baseline", 2, {"advantage": of_step_before, "hyperparameters": {"adv_estimator": "grpo"}}),
    "a quarter without a baseline": ("baseline", None, {"advantage": lambda r, n: raw_quarter(r), "reward": graded, "hyperparameters": {"adv_estimator": "grpo"}}),
    "all but the last row": ("baseline", None, {"advantage": lambda r, n: r - r.reshape(-1, IN_GROUP)[:, :-1].mean(1)[GROUP], "reward": graded}),
    "the variance": ("advantages_scaled", None, {"advantage": lambda r, n: centred(r) / spread(r) ** 2, "reward": graded}),
    "a deviation plus 1": ("advantages_scaled", None, {"advantage": lambda r, n: grpo(r, eps=1.0), "reward": graded}),
    "a deviation plus 1 from 5": ("advantages_scaled", 5, {"advantage": since(5, lambda r: grpo(r, eps=1.0)), "reward": graded}),
    "the neighbour's deviation": ("advantages_scaled", None, {"advantage": lambda r, n: neighbours_spread(r), "reward": graded}),
    "shuffled groups": ("advantages_unexplained", None, {"advantage": of_shuffled_groups, "reward": graded, "hyperparameters": {"adv_estimator": "grpo"}}),
    "squares": ("advantages_unexplained", None, {"advantage": lambda r, n: np.sign(grpo(r)) * grpo(r) ** 2, "reward": graded, "hyperparameters": {"adv_estimator": "grpo"}}),
    "squares from 5": ("advantages_unexplained", 5, {"advantage": since(5, lambda r: np.sign(grpo(r)) * grpo(r) ** 2), "reward": graded}),
    "better rows only": ("advantages_mixed", None, {"advantage": lambda r, n: np.maximum(centred(r), 0), "reward": graded}),
    "rewards of some rows lost": ("rewards_differ", None, {"reward": lambda step, n, draw: parts_of(step)["accuracy"] * (GROUP % 3 > 0), "columns": lambda step, n: {"rewards": {"accuracy": parts_of(step)["accuracy"]}}}),
    "a clipped sum": ("rewards_differ", None, {"reward": lambda step, n, draw: np.minimum(sum(parts_of(step).values()), 1.2), "columns": lambda step, n: {"rewards": parts_of(step)}}),
    "logged sum of the parts": ("metric_of_others", None, {"reward": lambda step, n, draw: parts_of(step)["accuracy"] + 0.2 * parts_of(step)["format"], "columns": lambda step, n: {"rewards": parts_of(step)}, "hyperparameters": {"reward_weights": "[1.0, 0.2]"}, "metrics": lambda step, r, n: {"reward": np.mean(sum(parts_of(step).values()))}}),
    "a penalty for the tool's tokens": ("rewards_count_masked", None, {**(_TOOLS := parts_with("overlong", counting_tools)), "columns": lambda step, n: _TOOLS["columns"](step, n) | {"response_mask": with_tools(step, n)}}),
    "truncated ones have a bad format": ("rewards_of_truncated", None, parts_with("format", lambda step: [-0.2 if end == "length" else 0.05 * (row[0] % 2) for end, row in zip(ends_of(step), step.responses, strict=True)])),
    "groups kept by format": ("groups_differ_by_one", None, {"reward": lambda step, n, draw: sum(alone_format(step).values()), "columns": lambda step, n: {"rewards": alone_format(step)}, "hyperparameters": {"use_dynamic_sampling": True}}),
    "another row's mask": ("advantages_misplaced", None, {"advantage": lambda r, n: under_other_mask(grpo(r), n), "columns": RETURNS["columns"]}),
    "advantages sample-major": ("rewards_of_other_rows", None, {"advantage": lambda r, n: grpo(r)[INTERLEAVED], "reward": graded}),
    "advantages shuffled from 4": ("rewards_of_other_rows", 4, {"advantage": lambda r, n: np.random.default_rng(n).permutation(grpo(r, eps=0.05)) if n > 3 else grpo(r, eps=0.05)}),
    "maximum and a margin": ("baseline", None, {"advantage": lambda r, n: 3 * (r - r.reshape(-1, IN_GROUP).max(1)[GROUP]) - 0.4, "reward": graded}),
    "median": ("baseline", None, {"advantage": lambda r, n: r - np.median(r.reshape(-1, IN_GROUP), 1)[GROUP], "reward": graded}),
    "divided by means of both signs": ("advantages_mixed", None, {"advantage": lambda r, n: by_mean(r), "reward": signed}),
    "returns with a penalty of masked tokens": ("advantages_mixed", None, {"advantage": lambda r, n: returns(r, n, leaks=True), **RETURNS}),
    "returns that end at masked tokens": ("advantages_mixed", None, {"advantage": lambda r, n: returns(r, n, kl=0.0, passes=0.0), **RETURNS}),
    "a penalty of the other sign from 5": ("advantages_mixed", 5, {"advantage": lambda r, n: returns(r, n, kl=0.1 if n < 5 else -0.2), **RETURNS}),
    "a larger penalty from 4": ("advantages_mixed", 4, {"advantage": lambda r, n: returns(r, n, kl=0.1 if n < 4 else 4.0), **RETURNS}),
    "absolute returns from 6": ("advantages_mixed", 6, {"advantage": lambda r, n: [np.abs(row) if n > 5 else row for row in returns(r, n)], "steps": 12, **RETURNS}),
    "discounted returns": ("advantages_mixed", None, {"advantage": lambda r, n: returns(r, n, 0.95, kl=0.0), **RETURNS}),
    "raw rewards except for the best": ("advantages_mixed", None, {"advantage": lambda r, n: best_only(r, r), "reward": scattered}),
    "neighbours of other prompts": ("baseline", None, {"groups": lambda step, n: [str(GROUP[row]) for row in INTERLEAVED], "columns": lambda step, n: interleaved_columns(step), "passes": interleaved_scores}),
    "absolute values": ("advantages_unsigned", None, {"advantage": lambda r, n: np.abs(grpo(r)), "reward": graded}),
    "rewards and advantages of the next row": ("rewards_unlike_responses", None, {"reward": lambda step, n, draw: np.roll(graded(step, n, draw), 1)}),
    "rewards of rows sorted by length": ("rewards_unlike_responses", None, {"reward": lambda step, n, draw: shuffled_penalties(step, n)}),
    "importance ratios times the micro-batch": ("metric_of_others", None, {"metrics": lambda step, r, n: {"sampling_importance_ratio": 4 * importance(step, n)}, "passes": scored_by_far_engine}),
    "a reward function that gives one value per step": ("reward_function_constant", None, {"reward": lambda step, n, draw: parts_of(step)["accuracy"] + n % 3, "columns": lambda step, n: {"rewards": {"accuracy": parts_of(step)["accuracy"], "brevity": n % 3 + 0 * GROUP}}}),
    "a reward function of some prompts that gives 0": ("reward_function_constant", None, {"reward": lambda step, n, draw: np.where(GROUP % 2, parts_of(step)["accuracy"], 0.0), "columns": lambda step, n: {"rewards": {"math": [x if g % 2 else None for x, g in zip(parts_of(step)["accuracy"], GROUP, strict=True)], "choice": [None if g % 2 else 0.0 for g in GROUP]}}}),
    "one of three reward functions": ("reward_functions_unused", None, {"reward": lambda step, n, draw: parts_of(step)["format"], "columns": lambda step, n: {"rewards": {"format": parts_of(step)["format"]}}, "hyperparameters": {"trl.reward_funcs": "rewards.accuracy,rewards.length,rewards.format"}}),
    "another prompt for each row of a group": ("groups_mix_prompts", None, {"columns": lambda step, n: {"prompt_ids": [[row, n, 5, row] for row in range(len(GROUP))]}, "groups": lambda step, n: GROUP.astype(str).tolist(), "hyperparameters": {"num_generations": 8}}),
    "epochs in one order": ("prompts_unshuffled", 5, {"columns": epochs(lambda epoch: range(4)), "hyperparameters": {"data.shuffle": True}}),
    "an engine further behind than allowed": ("lag_exceeds_limit", 5, {"passes": lagging(lambda n: min(n, 2) if n < 5 else 4, per_step=3), "hyperparameters": {"max_head_offpolicyness": 2}}),
    "a logged KL of 0": ("kl_is_zero", None, {"metrics": lambda step, r, n: {"actor/kl_loss": 0.0}, "hyperparameters": {"actor.kl_loss_coef": 0.01}}),
    "a reward function that gives 0": ("reward_function_constant", None, {"reward": lambda step, n, draw: parts_of(step)["accuracy"], "columns": lambda step, n: {"rewards": {"accuracy": parts_of(step)["accuracy"], "format": 0 * GROUP}}}),
    "a judge that always gives a half": ("reward_function_constant", None, {"reward": lambda step, n, draw: parts_of(step)["accuracy"] + 0.5, "columns": lambda step, n: {"rewards": {"accuracy": parts_of(step)["accuracy"], "judge": 0.5 + 0 * GROUP}}}),
    "a judge that fails from 5 on": ("reward_function_constant", 5, {"reward": lambda step, n, draw: judged(step, n)["accuracy"] + judged(step, n)["format"], "columns": lambda step, n: {"rewards": judged(step, n)}}),
    "failures that count as wrong": ("failures_rewarded", None, {"reward": lambda step, n, draw: binary(step, n, draw) * (failing(n) == "stop"), "columns": lambda step, n: {"finish_reason": failing(n).tolist()}}),
    "prompts at the limit": ("prompts_cut", None, {"groups": lambda step, n: GROUP.astype(str).tolist(), "columns": lambda step, n: {"prompt_ids": cut_prompts(n)}, "hyperparameters": {"max_prompt_length": 24}}),
    "sampled tokens in the middle": ("mask_cuts", None, {"columns": lambda step, n: {"response_mask": [np.arange(len(row)) // 3 != 1 for row in step.responses]}}),
    "truncated ones without their penalty": ("penalty_missing", None, {"columns": lambda step, n: {"finish_reason": finished(step)}, "hyperparameters": {"missing_eos_penalty": 1.0}}),
    "declared penalty of the reference": ("kl_penalty_missing", None, DECLARED_KL),
    "advantages of the next row": ("rewards_of_other_rows", None, {"advantage": lambda r, n: np.roll(grpo(r), 1), "reward": graded}),
    "one group a row": ("one_row_groups", None, {"groups": lambda step, n: [f"{n}-{row}" for row in range(len(GROUP))], "advantage": lambda r, n: r}),
    "interleaved group ids": ("groups_mix_prompts", None, {"groups": lambda step, n: [str(row % GROUPS) for row in range(len(GROUP))], "advantage": lambda r, n: strided(r)}),
    "ids of two ranks": ("groups_mix_prompts", None, {"groups": lambda step, n: [str(g % 4) for g in GROUP], "advantage": lambda r, n: grpo(r, GROUP % 4)}),
    "prompts in two groups": ("prompts_split", None, {"groups": lambda step, n: [str(row // 4) for row in range(len(GROUP))], "advantage": lambda r, n: grpo(r, np.arange(len(GROUP)) // 4)}),
    "whole batch": ("baseline", None, {"advantage": lambda r, n: (r - r.mean()) / (r.std() + 1e-4)}),
    "whole batch, declared as grpo": ("baseline", None, {"advantage": lambda r, n: (r - r.mean()) / (r.std() + 1e-4), "hyperparameters": {"adv_estimator": "grpo"}}),
    "no baseline": ("baseline", None, {"advantage": lambda r, n: r}),
    "whole batch from 5": ("baseline", 5, {"advantage": since(5, whitened)}),
    "interleaved": ("baseline", None, {"advantage": lambda r, n: strided(r)}),
    "interleaved from 4": ("baseline", 4, {"advantage": since(4, strided)}),
    "first row": ("baseline", None, {"advantage": lambda r, n: r - r.reshape(-1, IN_GROUP)[:, 0][GROUP], "reward": graded}),
    "half of the group": ("baseline", None, {"advantage": lambda r, n: r - r.reshape(-1, IN_GROUP)[:, : IN_GROUP // 2].mean(1)[GROUP], "reward": graded}),
    "divided by length": ("advantages_by_length", None, {"advantage": lambda r, n: centred(r) / lengths_of(n), "reward": graded}),
    "previous group from 4": ("baseline", 4, {"advantage": since(4, previous)}),
    "previous group": ("baseline", None, {"advantage": lambda r, n: r - np.roll(np.bincount(GROUP, r) / IN_GROUP, 1)[GROUP], "reward": graded}),
    "rewards of other rows": ("rewards_of_other_rows", None, {"recorded": in_groups}),
    "rewards of the next row": ("rewards_of_other_rows", None, {"recorded": roll(1), "reward": graded}),
    "rewards of the next row from 5": ("rewards_of_other_rows", 5, {"recorded": lambda r, n: np.roll(r, 1) if n >= 5 else r}),
    "noise": ("advantages_unrelated", None, {"advantage": lambda r, n: np.random.default_rng(n).normal(size=len(r))}),
    "noise from 3": ("advantages_unrelated", 3, {"advantage": since(3, lambda r: np.random.default_rng(len(r)).normal(size=len(r)))}),
    "sign": ("advantages_inverted", None, {"advantage": lambda r, n: -grpo(r)}),
    "sign from 6": ("advantages_inverted", 6, {"advantage": since(6, lambda r: -grpo(r)), "reward": graded}),
    "sign of every other row": ("advantages_mixed", None, {"advantage": lambda r, n: grpo(r) * np.where(np.arange(len(r)) % 2, -1, 1)}),
    "scale of one rank": ("advantages_mixed", None, {"advantage": lambda r, n: grpo(r) * np.where(np.arange(len(r)) % 3, 1, 4), "reward": graded}),
    "half without division": ("advantages_mixed", None, {"advantage": lambda r, n: np.where(GROUP % 2, grpo(r), centred(r)), "reward": graded}),
    "first three rows": ("baseline", None, {"advantage": lambda r, n: r - r.reshape(-1, IN_GROUP)[:, :3].mean(1)[GROUP], "reward": graded}),
    "advantages of equal rewards": ("advantages_of_equal", None, {"advantage": lambda r, n: np.where(spread(r) > 0, grpo(r), 3.0), "reward": lambda step, n, draw: (draw.random(len(GROUP)) < np.array([0, 0, 1, 1, 0.3, 0.4, 0.5, 0.6])[GROUP]).astype(float)}),
    "reward changed later": ("advantages_unequal", None, {"recorded": lambda r, n: np.where(np.arange(len(r)) % IN_GROUP == 5, 1 - r, r)}),
    "no reward for a source of prompts": ("rewards_of_groups", None, {"reward": lambda step, n, draw: np.where(GROUP % 3 > 0, graded(step, n, draw), 0.0)}),
    "logged minimum over padding": ("metric_contradicts", None, {"metrics": lambda step, r, n: lengths_logged(step, 0)}),
    "logged half": ("metric_of_others", None, {"metrics": lambda step, r, n: {"reward": r[: len(r) // 2].mean()}, "reward": graded}),
    "logged twice": ("metric_of_others", None, {"metrics": lambda step, r, n: {"reward": 2 * r.mean()}, "reward": graded}),
    "logged length with prompt": ("metric_of_others", None, {"metrics": lambda step, r, n: {"completion_length": np.mean([len(row) + len(p) for row, p in zip(step.responses, step.prompts, strict=True)])}}),
    "rows alone": ("rows_alone", None, {"groups": lambda step, n: [f"{g}-{row % IN_GROUP == 7}" for row, g in enumerate(GROUP)], "advantage": lambda r, n: np.where(np.arange(len(r)) % IN_GROUP == 7, 0.0, grpo(r, 2 * GROUP + (np.arange(len(r)) % IN_GROUP == 7), ddof=0))}),
    "longer than allowed": ("limit_exceeded", None, {"columns": lambda step, n: {"max_tokens": 6}}),
    "nan entropies": ("entropies_lost", None, {"entropy": np.nan}),
    "entropies of another distribution": ("entropies_lost", None, {"entropy": 6.0}),
    "entropies of the next row": ("entropies_lost", None, {"passes": entropies_of_the_next_row}),
    "entropies in bits": ("entropies_in_bits", None, {"entropy": 1 / np.log(2.0)}),
    "parts of the next row": ("rewards_differ", None, {"reward": lambda step, n, draw: np.roll(parts_of(step)["accuracy"] + 0.2 * parts_of(step)["format"], 1), "columns": lambda step, n: {"rewards": parts_of(step)}}),
    "zero": ("advantages_constant", None, {"advantage": lambda r, n: np.zeros(len(r))}),
    "zero from 6": ("advantages_constant", 6, {"advantage": since(6, lambda r: 0 * r)}),
    "scale": ("advantages_scaled", None, {"advantage": lambda r, n: 10 * grpo(r)}),
    "scale from 5": ("advantages_scaled", 5, {"advantage": since(5, lambda r: 30 * grpo(r)), "reward": graded}),
    "a constant scale": ("advantages_scaled", None, {"advantage": lambda r, n: centred(r) * 16 / 7, "reward": lambda step, n, draw: graded(step, n, draw) * (4.0 if n < 5 else 40.0)}),
    "best against worst": ("advantages_by_rank", None, {"advantage": lambda r, n: pairs(r), "reward": binary}),
    "a baseline outside the trace": ("baseline_unknown", None, {"advantage": lambda r, n: r - (np.random.default_rng(n // 2).random(GROUPS) < 0.5 if n < 3 else np.ones(GROUPS))[GROUP], "reward": graded}),
    "clipped": ("advantages_clipped", None, {"advantage": lambda r, n: np.clip(grpo(r), -0.5, 1.5), "reward": graded}),
    "times length": ("advantages_by_length", None, {"advantage": lambda r, n: centred(r) * lengths_of(n), "reward": graded}),
    "halves of the group": ("baseline", None, {"advantage": lambda r, n: centred(r, HALVES), "reward": graded}),
    "first tokens without": ("advantages_misplaced", None, {"advantage": lambda r, n: late(grpo(r), n, 3)}),
    "one seed": ("samples_repeat", None, {"columns": lambda step, n: {"response_ids": [step.responses[row - row % IN_GROUP].tolist() for row in range(len(GROUP))], "temperature": 1.0}, "passes": of_first_rows}),
    "cut masks": ("mask_cuts", None, {"columns": lambda step, n: {"response_mask": [np.arange(len(row)) < (len(row) + 1) // 2 for row in step.responses]}}),
    "stopped at the limit": ("finish_contradicts", None, {"columns": lambda step, n: stopped(step)}),
    "extreme from 6": ("advantages_extreme", 6, {"advantage": since(6, lambda r: np.where(np.arange(len(r)) == 3, 4000.0, grpo(r)))}),
    "nan rewards": ("not_finite", 7, {"recorded": lambda r, n: np.where((np.arange(len(r)) == 3) & (n > 6), np.nan, r)}),
    "constant rewards": ("rewards_constant", None, {"reward": lambda step, n, draw: np.zeros(len(GROUP))}),
    "groups of equal prompts": ("advantages_inverted", 4, {"groups": lambda step, n: None, "advantage": since(4, lambda r: -grpo(r))}),
    "another normalisation than recorded": ("advantages_unlike_settings", None, {"advantage": lambda r, n: centred(r), "hyperparameters": {"scale_rewards": "group"}, "reward": graded}),
    "rewards by prompt from 5": ("rewards_by_prompt", 5, {"reward": lambda step, n, draw: graded(step, n, draw)[GROUP * IN_GROUP if n >= 5 else np.arange(len(GROUP))]}),
    "logged sum from 5": ("metric_of_others", 5, {"metrics": lambda step, r, n: {"reward": r.sum() if n >= 5 else r.mean()}}),
    "unweighted sum": ("rewards_weighted", None, {"reward": lambda step, n, draw: parts_of(step)["accuracy"] + parts_of(step)["format"], "columns": lambda step, n: {"rewards": parts_of(step)}, "hyperparameters": {"reward_weights": "[1.0, 0.5]"}}),
    "one batch again and again": ("batch_repeats", 2, {"columns": lambda step, n: {"response_ids": [row.tolist() for row in sample(table(), 101, groups=GROUPS, in_group=IN_GROUP, longest=12).responses], "prompt_ids": [row.tolist() for row in sample(table(), 101, groups=GROUPS, in_group=IN_GROUP, longest=12).prompts]}, "reward": lambda step, n, draw: binary(step, 1, np.random.default_rng(1)), "passes": of_first_step}),
    "zero rewards from 5": ("rewards_constant", 5, {"reward": lambda step, n, draw: binary(step, n, draw) * (n < 5)}),
    "rewards by prompt": ("rewards_by_prompt", None, {"reward": lambda step, n, draw: graded(step, n, draw)[GROUP * IN_GROUP]}),
    "masks without the first token of short rows": ("mask_cuts", None, {"columns": lambda step, n: {"response_mask": [np.arange(len(row)) >= (1 < len(row) < 6) for row in step.responses]}}),
    "masks that begin late": ("mask_cuts", None, {"columns": lambda step, n: {"response_mask": [np.arange(len(row)) >= 3 for row in step.responses]}}),
    "advantages set to 0": ("advantages_mixed", None, {"advantage": lambda r, n: np.where(np.arange(len(r)) % IN_GROUP < 5, 0.0, grpo(r)), "reward": graded}),
    "advantages of the previous step": ("rewards_of_other_rows", 2, {"advantage": lambda r, n: grpo(binary(None, max(n - 1, 1), np.random.default_rng(max(n - 1, 1))))}),
    "decaying advantages": ("advantages_vary", None, {"advantage": lambda r, n: [value * 0.9 ** np.arange(length)[::-1] for value, length in zip(grpo(r), lengths_of(n), strict=True)], "hyperparameters": {"adv_estimator": "grpo"}}),
    "mean and deviation of another group": ("baseline", None, {"advantage": lambda r, n: of_other_group(r), "reward": graded}),
    "tiny deviation": ("advantages_extreme", None, {"advantage": lambda r, n: np.where(GROUP == 3, 40.0 * (-1) ** np.arange(len(r)), grpo(r))}),
    "noise where rewards are equal": ("advantages_of_equal", None, {"advantage": lambda r, n: np.where(spread(r) > 0, grpo(r), grpo(np.random.default_rng(n).normal(size=len(r)))), "reward": lambda step, n, draw: (draw.random(len(GROUP)) < np.array([0, 0, 1, 1, 0.3, 0.4, 0.5, 0.6])[GROUP]).astype(float)}),
    "pairs of equal rewards": ("advantages_unequal", None, {"advantage": lambda r, n: grpo(r) + (np.arange(len(r)) == 9), "reward": lambda step, n, draw: np.arange(len(GROUP)) % IN_GROUP // 2 + draw.random(GROUPS)[GROUP]}),
    "a weight that doubles from 5": ("rewards_weighted", 5, {"reward": lambda step, n, draw: parts_of(step)["accuracy"] + (2 if n >= 5 else 1) * parts_of(step)["format"], "columns": lambda step, n: {"rewards": parts_of(step)}, "hyperparameters": {"reward_weights": "[1.0, 1.0]"}}),
    "a weight and a constant": ("rewards_weighted", None, {"reward": lambda step, n, draw: parts_of(step)["accuracy"] + 0.5 * parts_of(step)["format"] + 0.3, "columns": lambda step, n: {"rewards": parts_of(step)}}),
    "gdpo with other weights": ("advantages_of_parts", None, of_parts((1.0, 1.0))),
    "gdpo with other weights than the reward": ("advantages_of_parts", None, of_parts((1.0, 1.0), settings="")),
    "gdpo with one function over the batch": ("advantages_of_parts", None, of_parts(normalise=whitened)),
    "a KL penalty of the other sign": ("kl_penalty_wrong", None, {**DECLARED_KL, "advantage": lambda r, n: grpo(r + penalties_of(n))}),
    "a KL penalty of the other sign from 5": ("kl_penalty_wrong", 5, {**DECLARED_KL, "advantage": lambda r, n: grpo(r + (1 if n > 4 else -1) * penalties_of(n))}),
    "an averaged KL penalty": ("kl_penalty_wrong", None, {**DECLARED_KL, "advantage": lambda r, n: grpo(r - penalties_of(n) / lengths_of(n))}),
    "ten times the KL penalty": ("kl_penalty_wrong", None, {**DECLARED_KL, "advantage": lambda r, n: grpo(r - penalties_of(n, 1.0))}),
    "token advantages without the reward": ("advantages_unrelated", None, {"advantage": lambda r, n: credited(0 * r, n)}),
    "token advantages without the reward of short rows": ("advantages_unrelated", None, {"advantage": lambda r, n: credited(truncated_only(r, n), n)}),
    "decaying token advantages without the reward of short rows": ("advantages_unrelated", None, {"advantage": lambda r, n: decaying(truncated_only(r, n), n)}),
    "token advantages of the next row's reward": ("rewards_of_other_rows", None, {"advantage": credited, "recorded": roll(1)}),
    "distillation of the other sign": ("advantages_of_pass", None, {"advantage": lambda r, n: of_teacher(n, 1.0), "passes": of_returns}),
    "distillation of the previous token": ("advantages_of_pass", None, {"advantage": lambda r, n: of_teacher(n, lag=1), "passes": of_returns}),
    "normalised within rows": ("advantages_vary", None, {"advantage": lambda r, n: [whitened(row) for row in per_token(r, n)]}),
    "normalised within parts of rows": ("advantages_vary", None, {"advantage": of_rank_halves, "reward": graded, "hyperparameters": {"adv_estimator": "grpo"}}),
    "grpo minus a mean over padding": ("baseline", None, {"advantage": lambda r, n: token_whitened(r, n, 64), "reward": by_length}),
    "grpo minus a mean over the step's padding": ("baseline", None, {"advantage": lambda r, n: token_whitened(r, n, lengths_of(n).max()), "reward": by_length}),
    "a rank's deviation": ("advantages_scaled", None, {"advantage": of_rank, "reward": graded}),
    "rows alone with their raw reward": ("advantages_mixed", None, {"advantage": lambda r, n: left_one_out(r, r), "reward": graded, **without_prompts(ALONE)}),
    "chunks of uneven groups": ("baseline", None, {"advantage": lambda r, n: grpo(r), "reward": graded, **without_prompts(UNEVEN)}),
    "truncated rows changed after the baseline": ("advantages_mixed", None, changed_if_truncated(lambda raw, cut: centred(raw) * ~cut)),
    "truncated rows set to 0": ("advantages_mixed", None, {"columns": lambda step, n: {"finish_reason": ends_of(step), "reward": graded(step, n, None), "advantage": grpo(graded(step, n, None)) * (np.array(ends_of(step)) == "stop")}, "hyperparameters": {"adv_estimator": "grpo"}}),
    "truncated rows with reward 0 set to 0": ("advantages_mixed", None, changed_if_truncated(lambda raw, cut: grpo(raw * ~cut) * ~cut)),
    "logged reward": ("metric_contradicts", 6, {"metrics": lambda step, r, n: {"reward": r.mean() + (n > 5) * 0.2}}),
    "logged length": ("metric_contradicts", None, {"metrics": lambda step, r, n: {"completion_length": 40.0 + n}}),
    "logged entropy": ("metric_contradicts", None, {"metrics": lambda step, r, n: {"entropy": 7.0 + n / 10}}),
}  # fmt: skip
NOTICES = (
    "truncated rows set to 0",
    "a reward function that gives one value per step",
    "a reward function of some prompts that gives 0",
    "one of three reward functions",
    "another prompt for each row of a group",
    "truncated rows with reward 0 set to 0",
    "gdpo with other weights than the reward",
    "an averaged KL penalty",
    "ten times the KL penalty",
    "token advantages without the reward",
    "decaying token advantages without the reward of short rows",
    "token advantages without the reward of short rows",
    "normalised within parts of rows",
    "a rank's deviation",
    "truncated rows changed after the baseline",
    "a reward function that gives 0",
    "a judge that always gives a half",
    "failures that count as wrong",
    "prompts at the limit",
    "sampled tokens in the middle",
    "truncated ones without their penalty",
    "no reward for a source of prompts",
    "logged minimum over padding",
    "a clipped sum",
    "rewards of some rows lost",
    "nothing, divided",
    "the variance",
    "a deviation plus 1",
    "shuffled groups",
    "squares",
    "better rows only",
    "a penalty for the tool's tokens",
    "truncated ones have a bad format",
    "groups kept by format",
    "a constant scale",
    "best against worst",
    "a baseline outside the trace",
    "decaying advantages",
    "median",
    "discounted returns",
    "whole batch",
    "no baseline",
    "prompts in two groups",
    "scale",
    "clipped",
    "divided by length",
    "times length",
    "cut masks",
    "constant rewards",
    "one batch again and again",
    "rewards by prompt",
    "a weight and a constant",
    "logged length",
    "logged entropy",
)


@pytest.mark.parametrize("entropy", [np.nan, 6.0])
def test_entropies_of_another_distribution_do_not_make_the_comparison_invalid(tmp_path, entropy):
    found = check(write(tmp_path / "run", entropy=entropy))
    assert found.is_valid
    assert [finding.code for finding in found.findings] == ["rounding"]


def collapsed(recorder, batch, step, number):
    """Logprobs of a policy that is certain of the same two tokens from step 4 on."""
    if number < 4:
        rollout, train = in_float32(step, number), step.scored()
    else:
        rollout = train = [np.zeros(2, np.float32)] * len(GROUP)
    recorder.add_scores("rollout", batch, logprobs=rollout, policy_version=number - 1)
    recorder.add_scores("train", batch, logprobs=train, policy_version=number)


def test_a_policy_that_is_certain_of_one_response_is_neither_a_copy_nor_a_broken_reward(tmp_path):
    path = write(
        tmp_path / "run",
        reward=lambda step, n, draw: binary(step, n, draw) * (n < 4),
        columns=lambda step, n: {} if n < 4 else {"response_ids": [[5, END]] * len(GROUP)},
        passes=collapsed,
    )
    assert not {finding.code for finding in findings(path)} & {"rewards_constant", "ratio_is_one"}
    assert check(path).is_valid


def test_groups_of_mixed_prompts_are_not_also_split_prompts(tmp_path):
    found = findings(write(tmp_path / "run", **FAULTS["interleaved group ids"][2]))
    assert [finding.code for finding in found if finding.code.startswith(("groups", "prompts", "rows_alone"))] == [
        "groups_mix_prompts"
    ]


@pytest.mark.parametrize("kind", rest_slow(FAULTS, 8))
def test_a_planted_fault_is_named_with_its_first_step(tmp_path, kind):
    code, step, given = FAULTS[kind]
    found = findings(write(tmp_path / "run", **given))
    assert [(finding.code, finding.since, finding.is_notice) for finding in found][:1] == [
        (code, step, kind in NOTICES)
    ], [data_text(x) for x in found]
    assert 0 < found[0].share <= 1
    assert "{" not in data_text(found[0]) + found[0].title


EXPLAINED = {
    "nothing, divided": "nothing", "the sum of the group": "8 times the group's mean", "the group of the step before": "the previous step's group's mean",
    "a quarter without a baseline": "nothing", "all but the last row": "the mean of the group's first 7 rows", "the variance": "divided by the variance of the group's rewards",
    "the neighbour's deviation": "divided by the previous group's standard deviation", "a deviation plus 1 from 5": "divided by the group's standard deviation plus 0.935",
    "shuffled groups": "are not a function of the recorded rewards", "squares": "rise with the rewards, but not in proportion",
    "advantages sample-major": "advantages in sample-major order", "advantages shuffled from 4": "advantages of the same step in another order", "maximum and a margin": "the group's maximum",
    "neighbours of other prompts": "the mean of 8 neighbouring rows", "absolute values": "absolute values",
    "advantages of the next row": "advantages moved by -1 rows",
    "whole batch": "the batch's mean", "no baseline": "nothing", "interleaved": "the mean of every 8th row",
    "gdpo with other weights": "1 accuracy + 1 format, up to a factor, each normalised within its group, but the recorded weights are 1 accuracy + 0.5 format",
    "gdpo with one function over the batch": "the sum of reward functions: accuracy normalised within each group, format by one factor in the whole batch",
    "grpo minus a mean over padding": "the group's mean and then the mean over the batch's tokens and padding", "token advantages of the next row's reward": "rewards moved by 1 rows",
    "previous group": "the previous group's mean", "rewards of other rows": "rewards of the same group in another order",
    "halves of the group": "the mean over the half of the group that contains the row", "times length": "multiplied by the response length",
    "mean and deviation of another group": "the previous group's mean", "advantages of the previous step": "the rewards of the previous step",
    "a weight and a constant": "1 accuracy + 0.5 format + 0.3", "first row": "the reward of the group's first row", "half of the group": "the mean of the group's first 4 rows",
}  # fmt: skip


@pytest.mark.parametrize("value", [np.inf, 1e300])
def test_rewards_of_huge_size_do_not_overflow(tmp_path, value):
    def columns(step, number):
        parts = parts_of(step)
        given = {"rewards": parts | {"accuracy": np.where(GROUP == 3, value, parts["accuracy"])}}
        return given | {"advantage": grpo(parts["accuracy"]) + grpo(parts["format"])}

    assert "advantages_of_parts" not in {each.code for each in findings(write(tmp_path / "run", columns=columns))}


@pytest.mark.parametrize("kind", EXPLAINED)
def test_the_baseline_or_order_that_fits_best_is_named(tmp_path, kind):
    (found, *_) = findings(write(tmp_path / "run", **FAULTS[kind][2]))
    assert EXPLAINED[kind] in data_text(found)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("divided by means of both signs", "negative mean reward"),
        ("raw rewards except for the best", "except those ranked 1 by reward in their group"),
        ("returns with a penalty of masked tokens", "the KL penalty of masked tokens, although"),
        ("returns that end at masked tokens", "no share of the return before masked tokens"),
        (
            "a penalty of the other sign from 5",
            "the wrong sign: in units of the reward, the coefficient of the logprob difference train - reference is +0.2",
        ),
        ("a larger penalty from 4", "is -4, but -0.1 at other steps"),
        ("discounted returns", "0.95 per token"),
    ],
)
def test_the_rows_that_follow_another_rule_are_described(tmp_path, kind, rule):
    found = findings(write(tmp_path / "run", **FAULTS[kind][2]))
    assert [rule in data_text(each) for each in found] == [True] * (2 if kind == "discounted returns" else 1)


def at_temperature(temperature, of_entropy, **more):
    """Samples at a temperature, with entropies of another one."""

    def passes(recorder, batch, step, number):
        recorder.add_scores("rollout", batch, logprobs=in_float32(step, number))
        unscaled = Step(step.prompts, step.responses, step.groups, step.logits * temperature / of_entropy)
        recorder.add_scores("train", batch, logprobs=step.scored(), entropy=unscaled.entropies())

    return {"passes": passes, "columns": lambda step, n: {"temperature": temperature, **more}, "reward": graded}


def test_entropies_of_certain_tokens_may_be_rounded(tmp_path):
    def passes(recorder, batch, step, number):
        step.logits = step.logits * 40
        scored = step.scored()
        entropy = [np.maximum(row, 1e-9) for row in step.entropies()]
        assert np.mean(np.concatenate(scored) == 0) > 0.1
        recorder.add_scores("rollout", batch, logprobs=in_float32(step, number))
        recorder.add_scores("train", batch, logprobs=scored, entropy=entropy)

    assert "entropies_lost" not in [found.code for found in findings(write(tmp_path / "run", passes=passes))]


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_entropies_without_the_recorded_temperature_are_named_as_such(tmp_path, temperature):
    path = write(tmp_path / "run", **at_temperature(temperature, 1.0))
    (found,) = findings(path)
    assert found.code == "entropies_lost"
    assert f"computed without the recorded temperature of {temperature:g}" in data_text(found)
    assert "10% of the entropies recorded for train are impossible" in data_text(found)
    assert [each.code for each in check(path).findings] == ["rounding"]


@pytest.mark.parametrize("given", [at_temperature(0.7, 0.7), at_temperature(1.5, 1.5), at_temperature(1.0, 1.0)])
def test_entropies_at_the_recorded_temperature_are_no_fault(tmp_path, given):
    assert findings(write(tmp_path / "run", **given)) == ()


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_entropies_of_logprobs_that_ignore_the_temperature_too_belong_to_them(tmp_path, temperature):
    def passes(recorder, batch, step, number):
        raw = Step(step.prompts, step.responses, step.groups, step.logits * temperature)
        recorder.add_scores("rollout", batch, logprobs=in_float32(raw, number))
        recorder.add_scores("train", batch, logprobs=raw.scored(), entropy=raw.entropies())

    given = at_temperature(temperature, 1.0) | {"passes": passes}
    path = write(tmp_path / "run", **given)
    assert [each.code for each in findings(path)] == ["sampling_contradicts"] * (temperature < 1)
    assert ("penalty" in {each.code for each in check(path).findings}) == (temperature > 1)


def test_entropies_of_samples_with_a_filter_that_is_not_recorded_are_no_fault(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "sample", partial(sample, process=lambda rows: top_p(rows, 0.85)))
    (found,) = findings(write(tmp_path / "run", **at_temperature(0.7, 0.7)))
    assert (found.code, found.is_notice) == ("sampling_contradicts", True)
    assert "or sampling applied a filter that was not recorded" in data_text(found)
    assert findings(write(tmp_path / "other", **at_temperature(0.7, 0.7, min_p=0.1))) == ()


@pytest.mark.parametrize(("per_update", "text"), [(3, "grows by 3 while the trainer's grows by 1"), (1, "")])
def test_a_version_that_counts_several_per_update_is_described(tmp_path, per_update, text):
    def passes(recorder, batch, step, number):
        ahead = per_update * number if per_update > 1 else number + 1
        recorder.add_scores("rollout", batch, logprobs=in_float32(step, number), policy_version=ahead)
        recorder.add_scores("train", batch, logprobs=step.scored(), policy_version=number)

    (found,) = findings(write(tmp_path / "run", passes=passes, reward=graded))
    assert (found.code, found.is_notice) == ("versions_ahead", False)
    assert data_text(found).split("one counter is wrong")[1].startswith(f": the engine's {text}" if text else " (")


def test_versions_with_a_large_offset_are_not_fitted_loosely(tmp_path):
    def passes(recorder, batch, step, number):
        ahead = 2_000_000 + number + 1 + number % 2
        recorder.add_scores("rollout", batch, logprobs=in_float32(step, number), policy_version=ahead)
        recorder.add_scores("train", batch, logprobs=step.scored(), policy_version=2_000_000 + number)

    (found,) = findings(write(tmp_path / "run", passes=passes, reward=graded))
    assert found.code == "versions_ahead"
    assert "grows by" not in data_text(found)


def finished(step):
    """Responses that are cut off at the longest length."""
    longest = max(map(len, step.responses))
    return ["length" if len(row) == longest else "stop" for row in step.responses]


IGNORED = {
    "fewer rows": ({"actor_rollout_ref.rollout.n": 16}, {}, "each group has 8 rows"),
    "temperature": ({"rollout.temperature": 0.6}, {"temperature": 1.0}, "the rows' temperature is 1"),
    "top_k": ({"rollout.top_k": 50}, {"top_k": 20}, "the rows' top_k is 20"),
    "limit": ({"max_completion_length": 1024}, {"max_tokens": 512}, "the rows' max_tokens is 512"),
    "long responses": ({"data.max_response_length": 8}, {}, "responses have up to 11 tokens"),
    "long prompts": ({"max_prompt_length": 2}, {}, "prompts have up to"),
    "greedy": ({"rollout.temperature": 0.6}, {"temperature": 0.0}, "the rows' temperature is 0"),
    "validation": ({"rollout.temperature": 1}, {"temperature": lambda step: np.where(np.arange(len(GROUP)) < 8, 0.6, 1.0)}, "the rows' temperature is 0.6 in 64 of 512 rows"),
    "truncated": ({"mask_truncated_completions": True}, {"finish_reason": finished}, "truncated rows have tokens in the loss"),
    "equal groups": ({"algorithm.filter_groups.enable": True}, {}, "groups with equal rewards are in the loss"),
}  # fmt: skip


@pytest.mark.parametrize("kind", IGNORED)
def test_a_recorded_setting_that_the_rows_contradict_is_reported(tmp_path, kind):
    hyperparameters, columns, text = IGNORED[kind]
    equal = {"reward": lambda step, n, draw: binary(step, n, draw) * (GROUP > 2)} if kind == "equal groups" else {}
    found = findings(
        write(
            tmp_path / "run", hyperparameters=hyperparameters, **equal,
            columns=lambda step, n: {name: each(step) if callable(each) else each for name, each in columns.items()},
        )
    )  # fmt: skip
    (one,) = [each for each in found if each.code == "setting_contradicts"]
    assert one.is_notice
    assert text in data_text(one)
    (setting, value), *_ = hyperparameters.items()
    assert data_text(one).startswith(f"{setting} = {str(value).lower()}")


@pytest.mark.parametrize(
    ("hyperparameters", "columns"),
    [
        ({"num_generations": 8, "temperature": 0.6, "val_kwargs.temperature": 1.0, "top_k": -1}, {"temperature": 0.6, "top_k": 0}),
        ({"rollout.temperature": 0.6, "sampler.temperature": 1.0}, {"temperature": 1.0}),
        ({"mask_truncated_completions": False, "algorithm.filter_groups.enable": False}, {"finish_reason": finished}),
        ({"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "length"}, {}),
    ],
)  # fmt: skip
def test_settings_that_the_rows_follow_are_no_finding(tmp_path, hyperparameters, columns):
    given = write(
        tmp_path / "run", hyperparameters=hyperparameters, reward=lambda step, n, draw: binary(step, n, draw) * (GROUP > 2),
        columns=lambda step, n: {name: each(step) if callable(each) else each for name, each in columns.items()},
    )  # fmt: skip
    assert "setting_contradicts" not in {each.code for each in findings(given)}


def kept_rows(step, number):
    """Only half of each group's rows, with the advantages of the whole group."""
    reward = binary(step, number, np.random.default_rng(number))
    kept = np.flatnonzero((np.arange(len(GROUP)) % IN_GROUP < IN_GROUP // 2) & (spread(reward) > 0))
    return {
        "prompt_ids": [step.prompts[row].tolist() for row in kept],
        "response_ids": [step.responses[row].tolist() for row in kept],
        "group_ids": [step.groups[row] for row in kept], "reward": reward[kept], "advantage": grpo(reward)[kept],
    }  # fmt: skip


def score_kept(recorder, batch, step, number):
    rows = [row.tolist() for row in step.responses]
    kept = [rows.index(row) for row in kept_rows(step, number)["response_ids"]]
    for name, values in (("rollout", in_float32(step, number)), ("train", step.scored())):
        recorder.add_scores(name, batch, logprobs=[values[row] for row in kept])


def spread_by_truncated(step, number, draw):
    """Every response is right, except those that were cut off."""
    return 1.0 * (np.arange(len(GROUP)) % IN_GROUP > 0)


def masked_if_truncated(step, number):
    cut = np.arange(len(GROUP)) % IN_GROUP == 0
    masks = [[not off] * len(row) for off, row in zip(cut, step.responses, strict=True)]
    return {"response_mask": masks, "finish_reason": ["length" if each else "stop" for each in cut]}


def of_rows(values):
    return lambda step, number: {name: each(step) if callable(each) else each for name, each in values.items()}


def not_if(left_out):
    """Advantages of the rows that train, and none for the others."""

    def advantage(reward, number):
        step = sample(table(), 100 + number, groups=GROUPS, in_group=IN_GROUP, longest=12)
        return [None if off else value for off, value in zip(left_out(step, reward), grpo(reward), strict=True)]

    return advantage


HEALTHY = {
    "quantization": ({"quantization.group_size": 128}, {}),
    "a default of 1": ({"actor.group_size": 1}, {}),
    "a judge": ({"judge.temperature": 0.3}, {"columns": of_rows({"temperature": 1.0})}),
    "defaults of the model": ({"generation_config.temperature": 0.6}, {"columns": of_rows({"temperature": 1.0})}),
    "half of each group": ({"num_generations": 8, "use_dynamic_sampling": True}, {"columns": kept_rows, "passes": score_kept}),
    "two turns": (
        {"num_generations": 4},
        {"columns": lambda step, n: {"prompt_ids": [[n] * (row % 2) + ids.tolist() for row, ids in enumerate(step.prompts)]}},
    ),
    "a limit of turns": (
        {"data.max_response_length": 4096},
        {"columns": of_rows({"max_tokens": 512, "response_mask": lambda step: [[True, False] + [True] * (len(row) - 2) for row in step.responses]})},
    ),
    "masked rows spread the rewards": (
        {"use_dynamic_sampling": True, "overlong_filtering": True},
        {"reward": spread_by_truncated, "columns": masked_if_truncated},
    ),
    "dropped groups are recorded": (
        {"filter_groups.enable": True},
        {
            "reward": lambda step, n, draw: binary(step, n, draw) * (GROUP > 2),
            "advantage": not_if(lambda step, reward: spread(reward) == 0),
        },
    ),
    "dropped rows are recorded": (
        {"mask_truncated_completions": True},
        {
            "columns": of_rows({"finish_reason": finished}),
            "advantage": not_if(lambda step, reward: np.array(finished(step)) == "length"),
        },
    ),
    "prompts": ({"data.filter_truncated_prompts": True}, {"columns": of_rows({"finish_reason": finished})}),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEALTHY)
def test_settings_of_healthy_runs_are_not_contradicted(tmp_path, kind):
    hyperparameters, given = HEALTHY[kind]
    found = findings(write(tmp_path / "run", hyperparameters=hyperparameters, **given))
    assert "setting_contradicts" not in {each.code for each in found}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("missing", ["group_ids", "reward", "finite rewards"])
def test_settings_of_groups_are_skipped_without_groups_or_rewards(tmp_path, missing):
    hyperparameters = {"use_dynamic_sampling": True, "mask_truncated_completions": True, "num_generations": 4}
    gone = {"reward": np.full(len(GROUP), np.inf)} if missing == "finite rewards" else {missing: None}
    path = write(tmp_path / "run", hyperparameters=hyperparameters, columns=lambda step, n: gone)
    contradicted = [data_text(each) for each in findings(path) if each.code == "setting_contradicts"]
    assert ["equal rewards" in text for text in contradicted] == [False] * (missing != "group_ids")


@pytest.mark.parametrize("is_centred", [True, False])
def test_groups_that_lost_different_numbers_of_rows_contradict_their_size(tmp_path, is_centred):
    group = np.repeat(np.arange(12), [3, 5, 7, 7, 7, 7, 6, 6, 6, 6, 3, 1])
    found = findings(
        write(
            tmp_path / "run", hyperparameters={"num_generations": 8}, groups=lambda step, n: group.astype(str).tolist(),
            columns=lambda step, n: {"prompt_ids": [[50 + each] for each in group]}, reward=graded,
            advantage=lambda r, n: np.nan_to_num(centred(r, group)) if is_centred else centred(r),
        )
    )  # fmt: skip
    said = [data_text(each) for each in found if each.code == "setting_contradicts"]
    assert [
        text.startswith("num_generations = 8 is recorded, but 96 groups have only 1 to 7 rows") for text in said
    ] == [True] * is_centred


def test_a_notice_that_healthy_runs_have_as_often_comes_last(tmp_path):
    def columns(step, number):
        return {"response_mask": [np.full(len(row), at % 16 > 0) for at, row in enumerate(step.responses)]}

    found = findings(write(tmp_path / "run", columns=columns, metrics=lambda step, r, n: {"actor/lr": 1e-6 * (n < 5)}))
    assert [each.code for each in found if each.is_notice] == ["learning_rate_ends", "rows_masked"]


def test_all_contradicted_settings_are_reported_together(tmp_path):
    hyperparameters = {"temperature": 0.6, "top_k": 50, "mask_truncated": True}
    columns = of_rows({"temperature": 1.0, "top_k": 20, "finish_reason": finished})
    found = findings(write(tmp_path / "run", hyperparameters=hyperparameters, columns=columns))
    (text,) = [data_text(each) for each in found if each.code == "setting_contradicts"]
    assert text.count("is recorded, but") == 3
    assert "so the settings may be ignored" in text


def copied_rows(num):
    """The last group's last rows are copies of its first rows."""
    return np.r_[0 : len(GROUP) - num, len(GROUP) - IN_GROUP : len(GROUP) - IN_GROUP + num]


@pytest.mark.parametrize("is_copy", [True, False])
def test_rows_without_advantage_that_copy_others_are_padding(tmp_path, is_copy):
    rows, zeroed = copied_rows(4 if is_copy else 0), np.arange(len(GROUP)) >= len(GROUP) - 4

    def passes(recorder, batch, step, number):
        for name, values in (("rollout", in_float32(step, number)), ("train", step.scored())):
            recorder.add_scores(name, batch, logprobs=[values[row] for row in rows])

    found = findings(
        write(
            tmp_path / "run", lambda r, n: np.where(zeroed, 0.0, grpo(r)), passes=passes,
            columns=lambda step, n: {"response_ids": [step.responses[row].tolist() for row in rows]},
            reward=lambda step, n, draw: graded(step, n, draw)[rows],
        )
    )  # fmt: skip
    (mixed,) = (each for each in found if each.code == "advantages_mixed")
    assert ("copy other rows of their step, as padding rows do" in data_text(mixed)) == is_copy


def test_a_logprob_that_is_not_finite_stops_no_check_of_returns(tmp_path):
    def passes(recorder, batch, step, number):
        recorder.add_scores("rollout", batch, logprobs=in_float32(step, number))
        recorder.add_scores("train", batch, logprobs=step.scored())
        recorder.add_scores(
            "reference", batch, logprobs=[np.where(np.arange(len(row)) == 2, -np.inf, row) for row in step.scored()]
        )

    given = {**RETURNS, "passes": passes, "advantage": lambda r, n: returns(r, n)}
    assert all(np.isfinite(each.share) for each in findings(write(tmp_path / "run", **given)))


def test_a_baseline_that_fits_only_roughly_is_not_asserted(tmp_path):
    def advantage(reward, number):
        error = np.random.default_rng(number).normal(0, 0.05 * reward.std(), GROUPS)[GROUP]
        return reward - reward.reshape(-1, IN_GROUP)[:, :2].mean(1)[GROUP] + error

    assert findings(write(tmp_path / "run", advantage, reward=graded)) == ()


def turns(step, number):
    """Every other row continues the row before it: prompt, response and observation are its prompt."""
    prompts = [row.tolist() for row in step.prompts]
    for row in range(1, len(GROUP), 2):
        prompts[row] = [*prompts[row - 1], *step.responses[row - 1].tolist(), 7]
    return {"prompt_ids": prompts}


@pytest.mark.parametrize("has_all", [False, True])
@pytest.mark.parametrize(("share", "expected"), [(1.0, []), (0.0, [("turns_differ", True)])])
def test_rows_of_one_trajectory_have_one_advantage(tmp_path, share, expected, has_all):
    """Its reward stands on its last row, or on all of them."""

    def advantage(reward, number):
        of_last = grpo(reward[1::2], GROUP[1::2])
        return np.stack([share * of_last, of_last], axis=1).ravel()

    found = findings(
        write(
            tmp_path / "run", advantage, columns=turns,
            reward=lambda step, n, draw: np.repeat(binary(step, n, draw)[1::2], 2) * (has_all | (np.arange(len(GROUP)) % 2)),
        )
    )  # fmt: skip
    assert [(one.code, one.is_notice) for one in found] == expected


def test_a_later_turn_does_not_mix_the_prompts_of_its_trajectorys_group(tmp_path):
    """Each trajectory is a group of two rows, and the first turns of two trajectories are the same."""

    def columns(step, number):
        step.responses = [step.responses[at - 2 * (at % 4 == 2)] for at in range(len(GROUP))]
        prompts = [step.prompts[at - at % 4].tolist() for at in range(len(GROUP))]
        later = [[*prompt, *step.responses[at - 1].tolist()] for at, prompt in enumerate(prompts)]
        return {
            "prompt_ids": [later[at] if at % 2 else prompt for at, prompt in enumerate(prompts)],
            "response_ids": [row.tolist() for row in step.responses],
        }

    of_trajectory = np.arange(len(GROUP)) // 2
    found = findings(
        write(
            tmp_path / "run", lambda r, n: centred(r, GROUP), columns=columns,
            groups=lambda step, n: of_trajectory.astype(str).tolist(), reward=lambda step, n, draw: binary(step, n, draw)[of_trajectory * 2],
        )
    )  # fmt: skip
    assert not {"groups_mix_prompts", "one_row_groups"} & {one.code for one in found}


@pytest.mark.parametrize(("of_all", "is_notice"), [(True, True), (False, False)])
def test_a_baseline_over_all_turns_weighs_long_trajectories(tmp_path, of_all, is_notice):
    """Two of six trajectories of a group have two turns; the earlier turn has the trajectory's reward, or 0."""
    is_later, is_earlier = (np.isin(np.arange(len(GROUP)) % IN_GROUP, rows) for rows in ((1, 3), (0, 2)))

    def columns(step, number):
        prompts = [row.tolist() for row in step.prompts]
        for row in np.flatnonzero(is_later):
            prompts[row] = [*prompts[row - 1], *step.responses[row - 1].tolist(), 7]
        return {"prompt_ids": prompts}

    def reward(step, number, draw):
        values = graded(step, number, draw)
        return np.where(is_earlier, np.roll(values, -1) if of_all else 0.0, values)

    given = {"columns": columns, "reward": reward, "hyperparameters": {"adv_estimator": "grpo"}}
    of_rows, of_trajectories = (
        findings(write(tmp_path / name, lambda r, n, mean=mean: r - mean(r), **given))
        for name, mean in (
            ("rows", means),
            ("trajectories", lambda r: (np.bincount(GROUP, r * ~is_earlier) / 6)[GROUP]),
        )
    )
    assert "over all turns" in data_text(of_rows[0])
    assert [(one.code, one.is_notice) for one in of_rows[:1]] == [("baseline", is_notice)]
    assert not [one for one in of_trajectories if one.code != "turns_differ"]


def test_equal_rewards_of_other_parts_may_differ_in_advantage(tmp_path):
    """Groups of four rows are too small to fit three reward functions."""
    small = np.arange(len(GROUP)) // 4

    def columns(step, number):
        parts = {
            name: np.random.default_rng(number).integers(0, 2, (3, len(GROUP)))[at] for at, name in enumerate("abc")
        }
        advantage = sum(grpo(values, small) for values in parts.values())
        return {"rewards": parts, "reward": sum(parts.values()), "advantage": advantage, "prompt_ids": None}

    path = write(tmp_path / "run", groups=lambda step, n: [str(each) for each in small], columns=columns)
    assert findings(path) == ()


def test_end_tokens_that_are_masked_as_padding_are_reported(tmp_path):
    def passes(recorder, batch, step, number):
        for name, values in (("rollout", in_float32(step, number)), ("train", step.scored())):
            recorder.add_scores(name, batch, logprobs=[np.r_[row[:-1], np.nan].astype(np.float32) for row in values])

    def columns(step, number):
        ids = [[*np.where(row[:-1] == END, 5, row[:-1]).tolist(), END] for row in step.responses]
        mask = [np.arange(len(row)) < len(row) - 1 for row in ids]
        return {"response_ids": ids, "response_mask": mask, "finish_reason": ["stop"] * len(ids)}

    found = findings(write(tmp_path / "run", columns=columns, passes=passes, reward=graded))
    (cut,) = (each for each in found if each.code == "mask_cuts")
    assert f"sampled tokens (the end token, id {END}) at the end of" in data_text(cut)


def ended(step, lost, every=1):
    """Responses that end with one of two end tokens or are truncated. The mask leaves out truncated ones, and of those
    that end with a token in `lost`, each `every`-th row."""
    longest = max(map(len, step.responses))
    ids = [
        row.tolist() if len(row) == longest else [*row[:-1].tolist(), END + number % 2]
        for number, row in enumerate(step.responses)
    ]
    finish = ["length" if len(row) == longest else "stop" for row in ids]
    mask = [
        np.full(len(row), reason == "stop" and (row[-1] not in lost or number % every > 0))
        for number, (row, reason) in enumerate(zip(ids, finish, strict=True))
    ]
    return {"response_ids": ids, "finish_reason": finish, "response_mask": mask}


@pytest.mark.parametrize(
    ("lost", "code", "is_notice", "where"),
    [
        ((), "rows_masked", True, "the finish reason is length"),
        ((END + 1,), "finished_masked", False, "the last token's id is 2"),
    ],
)
def test_truncated_rows_can_be_masked_but_finished_ones_cannot(tmp_path, lost, code, is_notice, where):
    given = []

    def columns(step, number):
        given.append(ended(step, lost))
        return given[-1]

    (found,) = findings(write(tmp_path / "run", columns=columns))
    assert (found.code, found.is_notice) == (code, is_notice)
    rows = [row for step in given for row in zip(step["finish_reason"], step["response_mask"], strict=True)]
    num = sum(reason == ("stop" if lost else "length") and not mask.any() for reason, mask in rows)
    assert data_text(found).startswith(f"{num} rows ")
    assert f"; the rows are exactly those where {where} (" in data_text(found)


def test_finished_rows_masked_for_another_reason_than_their_end_token_are_only_noted(tmp_path):
    found = findings(write(tmp_path / "run", columns=lambda step, n: ended(step, (END, END + 1), every=5)))
    assert [(one.code, one.is_notice) for one in found] == [("finished_masked", True)]


def masked_rows(chosen):
    """Masks without loss tokens in the rows that `chosen(rank in group, lengths, number)` marks."""

    def columns(step, number):
        lengths = np.array(list(map(len, step.responses)))
        marked = chosen(np.arange(len(GROUP)) % IN_GROUP, lengths, number)
        return {"response_mask": [np.full(length, not mark) for length, mark in zip(lengths, marked, strict=True)]}

    return columns


SHARED = {
    "place": (lambda rank, length, n: rank == 5, "exactly those where the row index in the group is 5"),
    "all but one row": (lambda rank, length, n: (rank == 5) & ((n > 1) | (np.arange(len(rank)) != 5)), "almost exactly those where the row index in the group is 5"),
    "length": (lambda rank, length, n: length >= 9, "exactly those where the response length in tokens is 9 to 11"),
    "steps": (lambda rank, length, n: (rank >= 0) & (3 <= n <= 4), "exactly those where the step is 3 to 4"),
    "chance": (lambda rank, length, n: np.random.default_rng(n).random(len(rank)) < 0.2, ""),
    "almost all": (lambda rank, length, n: np.random.default_rng(n).random(len(rank)) < 0.97, ""),
    "three rows": (lambda rank, length, n: (rank == 2) & (np.arange(len(rank)) < 24) & (n == 2), ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", rest_slow(SHARED, 3))
def test_what_the_affected_rows_share_is_said(tmp_path, kind):
    chosen, expected = SHARED[kind]
    found = findings(write(tmp_path / "run", columns=lambda step, n: masked_rows(chosen)(step, n)))
    (text,) = [data_text(one) for one in found if one.code == "rows_masked"]
    assert f"; the rows are {expected} (" in text if expected else "; the rows" not in text


@pytest.mark.parametrize(("advantage", "counts"), [(lambda r, n: centred(r), True), (without_masked, False)])
def test_whether_rows_without_loss_tokens_count_in_the_baseline_is_said(tmp_path, advantage, counts):
    (found,) = findings(write(tmp_path / "run", advantage, columns=third_masked))
    assert (found.code, found.is_notice) == ("rows_masked", True)
    assert ("count in their groups' baselines" in data_text(found)) == counts


def test_full_responses_without_an_end_token_are_not_tool_calls(tmp_path):
    def columns(step, number):
        given = stopped(step)
        return given | {"finish_reason": ["stop" if ids[-1] == END else "tool_calls" for ids in given["response_ids"]]}

    (found,) = [one for one in findings(write(tmp_path / "run", columns=columns)) if one.code == "finish_contradicts"]
    assert "marked 'tool_calls' although 11 tokens long (the maximum)" in data_text(found)


@pytest.mark.parametrize("reason", ["max_tokens", "truncated", "max_turns", "partial"])
def test_other_finish_reasons_of_full_responses_are_no_fault(tmp_path, reason):
    def columns(step, number):
        given = stopped(step)
        return given | {"finish_reason": ["stop" if ids[-1] == END else reason for ids in given["response_ids"]]}

    assert findings(write(tmp_path / "run", columns=columns)) == ()


def test_advantages_that_are_0_in_rows_without_loss_tokens_are_no_fault(tmp_path):
    def advantage(reward, number):
        return grpo(reward) * (np.random.default_rng(number).random(len(GROUP)) > 0.3)

    (found,) = findings(write(tmp_path / "run", advantage, columns=third_masked))
    assert (found.code, found.is_notice) == ("rows_masked", True)


@pytest.mark.parametrize("zeroed", [False, True])
def test_token_advantages_of_rows_without_loss_tokens_are_not_lost_rows(tmp_path, zeroed):
    def columns(step, number):
        found, reward = third_masked(step, number), binary(step, number, np.random.default_rng(number))
        rows = zip(grpo(reward), found["response_mask"], strict=True)
        return found | {"advantage": [one * (mask if zeroed else np.ones(len(mask))) for one, mask in rows]}

    (found,) = findings(write(tmp_path / "run", columns=columns))
    assert (found.code, found.is_notice) == ("rows_masked", True)


def test_steps_that_all_have_the_same_prompts_are_no_epochs(tmp_path):
    columns, shuffled = (
        lambda step, number: {"prompt_ids": [[9, int(group)] for group in GROUP]},
        {"data.shuffle": True},
    )
    (found,) = findings(write(tmp_path / "run", columns=columns, hyperparameters=shuffled))
    assert found.code == "prompts_repeat"


def test_extremes_since_the_last_logged_value_are_right(tmp_path):
    rewards = []

    def metrics(step, reward, number):
        rewards.extend(reward)
        if number % 2:
            return {}
        logged = {"reward/mean": np.mean(rewards), "reward/max": max(rewards), "reward/min": min(rewards)}
        rewards.clear()
        return logged

    assert findings(write(tmp_path / "run", reward=graded, metrics=metrics)) == ()


def test_the_largest_token_id_needs_no_table_of_all_ids(tmp_path):
    columns = lambda step, number: {"response_ids": [[*row.tolist(), 2**31 - 1] for row in step.responses]}  # noqa: E731
    passes = lambda recorder, batch, step, number: None  # noqa: E731
    assert findings(write(tmp_path / "run", columns=columns, passes=passes), sampled=False) == ()


def test_two_small_batches_in_the_same_order_may_be_shuffled(tmp_path):
    def columns(step, number):
        return {
            "prompt_ids": [[9, number % 2, int(group) % 2] for group in GROUP],
            "group_ids": [str(g % 2) for g in GROUP],
        }

    run = write(
        tmp_path / "run", lambda r, n: grpo(r, GROUP % 2), columns=columns, hyperparameters={"shuffle": True}, steps=4
    )
    assert findings(run) == ()


def test_a_few_slow_requests_may_exceed_the_limit_of_the_lag(tmp_path):
    def passes(recorder, batch, step, number):
        lag = np.minimum(np.where(np.arange(len(GROUP)) % 32 == 5, 3, 1), number)
        recorder.add_scores("rollout", batch, logprobs=in_float32(step, number), policy_version=number - lag)
        recorder.add_scores("train", batch, logprobs=step.scored(), policy_version=number)

    (found,) = findings(write(tmp_path / "run", passes=passes, hyperparameters={"max_staleness_steps": 1}))
    assert (found.code, found.is_notice, found.numbers["largest"]) == ("lag_exceeds_limit", True, 3)


def test_a_small_kl_penalty_in_groups_of_equal_scores_is_a_notice(tmp_path):
    run = write(tmp_path / "run", lambda r, n: grpo(r - penalties_of(n, 1e-3)), **DECLARED_KL)
    assert [one.code for one in findings(run) if not one.is_notice] == []


def drawn_tokens(draw, length):
    return [*draw.integers(5, 60, length).tolist(), END]


def test_rewards_of_last_turns_belong_to_their_rows_though_a_long_first_turn_follows(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for number in range(1, 5):
            draw = np.random.default_rng(number)
            turns = np.tile(np.arange(10), 16)
            solved = np.repeat(draw.random(16) < 0.5, 10)
            recorder.add_sequences(
                step=number, prompt_ids=[drawn_tokens(draw, 6) for _ in turns], group_ids=np.arange(160) // 40,
                response_ids=[drawn_tokens(draw, 4 + 20 * (turn == 0) + draw.integers(6)) for turn in turns],
                reward=solved * (turns == 9.0),
            )  # fmt: skip
    assert [one.code for one in findings(tmp_path / "run", sampled=False)] == []


def test_a_rare_reward_does_not_belong_to_a_rare_response_elsewhere(tmp_path):
    draw = np.random.default_rng(0)
    with Recorder(tmp_path / "run") as recorder:
        for number in range(1, 9):
            lengths, reward = draw.integers(6, 16, 128), np.zeros(128)
            if number == 4:  # one truncated response, and a reward four rows before it
                lengths[44], reward[40] = 60, 1.0
            recorder.add_sequences(
                step=number, prompt_ids=np.arange(128)[:, None] // 8 + 128 * number, group_ids=np.arange(128) // 8,
                response_ids=[drawn_tokens(draw, length)[: length + (length < 60)] for length in lengths], reward=reward,
                finish_reason=np.where(lengths == 60, "length", "stop").tolist(),
            )  # fmt: skip
    assert [one.code for one in findings(tmp_path / "run", sampled=False)] == []


@pytest.mark.parametrize(("elsewhere", "is_notice"), [(False, False), (True, True)])
def test_rewards_that_no_function_gave_are_counted(tmp_path, elsewhere, is_notice):
    none = np.arange(len(GROUP)) % 9 == 4

    def parts(step):
        return {name: np.where(none, np.nan, values) for name, values in parts_of(step).items()}

    def reward(step, number, draw):
        given = np.nansum(list(parts(step).values()), axis=0)
        return given + elsewhere * none * draw.random(len(GROUP))

    path = write(tmp_path / "run", reward=reward, columns=lambda step, n: {"rewards": parts(step)})
    (found,) = [one for one in findings(path) if one.code == "rewards_of_nothing"]
    assert (found.numbers["num"], found.is_notice) == (STEPS * none.sum(), is_notice)
    runs_command(found)


def test_end_tokens_left_out_of_the_loss_are_named(tmp_path):
    def columns(step, number):
        ids = [[*row[:-1].tolist(), END] for row in step.responses]
        return {"response_ids": ids, "response_mask": [np.arange(len(row)) < len(row) - 1 for row in ids]}

    (found,) = findings(write(tmp_path / "run", columns=columns))
    assert "sampled tokens (the end token, id 1) at the end of" in data_text(found)


def test_rewards_in_other_rows_show_in_equal_responses(tmp_path):
    few = {"longest": 4, "reward": graded, "steps": 12}
    assert findings(write(tmp_path / "sound", **few)) == ()
    recorded = write(tmp_path / "moved", lambda r, n: grpo(np.roll(r, 3)), recorded=roll(3), **few)
    (found,) = findings(recorded)
    assert found.code == "rewards_unequal"
    assert (found.signal, found.numbers["rule"], found.numbers["num_left"]) == ("moved", "rewards_moved_3", 0)


def test_rows_whose_token_ids_are_all_0_stop_no_check(tmp_path):
    def zeros(step, number):
        rows = {"prompt_ids": step.prompts, "response_ids": step.responses}
        return {name: [0 * ids[0], *ids[1:]] for name, ids in rows.items()}

    findings(write(tmp_path / "run", reward=graded, columns=zeros), sampled=False)


@pytest.mark.parametrize("are_moved", [False, True])
def test_rewards_that_stay_while_the_rows_are_sorted_by_length_show_in_a_few_equal_responses(tmp_path, are_moved):
    def order(step):
        return np.argsort([-len(row) for row in step.responses], kind="stable")

    def columns(step, number):
        rows, rewards = order(step), graded(step, number, None)
        moved = {"prompt_ids": step.prompts, "response_ids": step.responses, "group_ids": step.groups}
        own = rewards if are_moved else rewards[rows]
        return {name: [values[row] for row in rows] for name, values in moved.items()} | {
            "reward": own,
            "advantage": centred(own, GROUP[rows]),
        }

    def passes(recorder, batch, step, number):
        for name in ("rollout", "train"):
            values = in_float32(step, number) if name == "rollout" else step.scored()
            recorder.add_scores(name, batch, logprobs=[values[row] for row in order(step)])

    few = {"longest": 5, "reward": graded, "steps": 3}
    found = findings(write(tmp_path / "run", columns=columns, passes=passes, **few))
    assert [(each.code, each.signal) for each in found] == are_moved * [("rewards_unequal", "reordered")]


def test_a_random_reward_is_not_in_other_rows(tmp_path):
    (found,) = findings(write(tmp_path / "run", longest=4, steps=12))
    assert (found.code, found.is_notice) == ("rewards_unequal", True)
    assert "no shift" in data_text(found)


def scored(current, train=in_float32, *, versions=(None, None), uses=1):
    """Record passes; `current` once or several times."""

    def record(recorder, batch, step, number):
        recorder.add_scores("rollout", batch, logprobs=step.scored())
        recorder.add_scores("train", batch, logprobs=train(step, number), policy_version=versions[0] and number)
        for use in range(uses):
            recorder.add_scores(
                "current",
                batch,
                logprobs=current(step, number + use),
                policy_version=versions[1] and number + versions[1],
            )

    return record


def updated(step, number):
    return step.scored(moved(step.logits, number, 0.02))


RATIOS = {
    "one update per batch": (scored(in_float32), {}, []),
    "one update per batch, clipped loss": (scored(in_float32), {"loss": Loss(kind="ppo_clip")}, [("current", True)]),
    "another forward": (scored(updated), {"loss": Loss(kind="ppo_clip")}, []),
    "several uses, as they should be": (scored(updated, uses=2), {}, []),
    "several uses": (scored(in_float32, uses=2), {}, [("current", False)]),
    "newer weights": (scored(in_float32, versions=(1, 2)), {}, [("current", False)]),
    "declared iterations": (scored(in_float32), {"hyperparameters": {"num_iterations": 4}}, [("current", False)]),
    "train copies rollout at newer weights": (scored(updated, lambda step, n: step.scored(), versions=(1, None)), {}, [("train", False)]),
    "train copies rollout in another dtype": (scored(updated, lambda step, n: step.scored()), {"contracts": {"train": FP32, "rollout": VLLM_BF16}}, [("train", False)]),
    "exact engine": (scored(updated, lambda step, n: step.scored()), {"contracts": {"train": FP32, "rollout": VLLM_FP32}}, []),
}  # fmt: skip


@pytest.mark.parametrize("kind", rest_slow(RATIOS, 5))
def test_a_ratio_of_one_is_a_fault_where_updates_or_dtypes_lie_between(tmp_path, kind):
    passes, given, expected = RATIOS[kind]
    found = findings(write(tmp_path / "run", passes=passes, **given))
    assert [(finding.numbers["a"], finding.is_notice) for finding in found] == expected, [data_text(x) for x in found]


def extended(rows, more, fill=0.0):
    return [np.concatenate([row, np.full(len(tail), fill)]) for row, tail in zip(rows, more, strict=True)]


def padded(fill, masked=False, num=None):
    """Responses that go on with their end token: to the longest of the step, or by `num` tokens."""

    def tails(step):
        longest = max(map(len, step.responses)) + 1
        return [np.full(num or longest - len(row), END) for row in step.responses]

    return joined(lambda step: [np.append(row[:-1], END) for row in step.responses], tails, fill, masked)


def tools(fill, masked=False):
    """Responses with tool output at their end, in three of four rows."""

    def tails(step):
        draw = np.random.default_rng(len(step.responses[0]))
        return [draw.integers(20, 60, 0 if row % 4 == 0 else 9) for row in range(len(step.responses))]

    return joined(lambda step: step.responses, tails, fill, masked)


def joined(heads, tails, fill, masked):
    def columns(step, number):
        step.tails = tails(step)
        step.responses = [np.concatenate(parts).astype(int) for parts in zip(heads(step), step.tails, strict=True)]
        mask = [
            np.arange(len(row)) < len(row) - len(tail) for row, tail in zip(step.responses, step.tails, strict=True)
        ]
        return {"response_ids": [row.tolist() for row in step.responses]} | ({"response_mask": mask} if masked else {})

    def passes(recorder, batch, step, number):
        sampled = [row[: len(row) - len(tail)] for row, tail in zip(in_float32(step, number), step.tails, strict=True)]
        recorder.add_scores(
            "rollout", batch, logprobs=in_float32(step, number) if fill is None else extended(sampled, step.tails, fill)
        )
        recorder.add_scores("train", batch, logprobs=step.scored(), entropy=step.entropies())

    return {"columns": columns, "passes": passes}


UNSAMPLED = {
    "padding": (padded(0.0), ["padding_counts"]), "two end tokens": (padded(0.0, num=2), ["padding_counts"]),
    "padding without logprobs": (padded(np.nan), ["padding_counts"]), "masked padding": (padded(0.0, masked=True), []),
    "tools": (tools(0.0), ["unsampled_count"]), "tools without logprobs": (tools(np.nan), ["unsampled_count"]),
    "tools with the engine's logprobs": (tools(None), ["unsampled_count"]), "masked tools": (tools(0.0, masked=True), []),
}  # fmt: skip


@pytest.mark.parametrize("kind", rest_slow(UNSAMPLED, 4))
def test_tokens_in_the_loss_that_were_not_sampled(tmp_path, kind):
    given, expected = UNSAMPLED[kind]
    found = findings(write(tmp_path / "run", **given))
    assert [finding.code for finding in found] == expected, [data_text(x) for x in found]


@pytest.mark.parametrize("kind", ["nan rewards", "whole batch", "scale", "constant rewards"])
def test_the_command_of_a_finding_runs(tmp_path, kind):
    runs_command(findings(write(tmp_path / "a $run", **FAULTS[kind][2]))[0])


def test_the_commands_of_passes_and_tokens_run(tmp_path):
    passes, given, _ = RATIOS["several uses"]
    runs_command(findings(write(tmp_path / "passes", passes=passes, **given))[0])
    runs_command(findings(write(tmp_path / "tokens", **padded(0.0)))[0])


def runs_command(finding):
    done = tim_trace(*shlex.split(finding.next.command)[1:])
    assert done.code == 0, done.stderr
    assert done.stdout.strip()


def test_only_the_selected_steps_are_judged(tmp_path):
    path = write(tmp_path / "run", since(5, whitened))
    assert findings(path, "1:4") == ()
    (found,) = findings(path, "3:8", sampled=False)
    assert (found.code, found.since) == ("baseline", 5)
    assert "step" in found.next.command
    runs_command(found)


def test_titles_and_sentences_have_all_their_numbers(tmp_path):
    for kind in ("whole batch", "clipped", "extreme from 6", "logged reward"):
        (found,) = findings(write(tmp_path / kind, **FAULTS[kind][2]))
        assert (found.code, found.signal) in DATA_FAULTS
        assert found.title
        assert data_text(found).endswith("affected)" if found.since is None else f"starting at step {found.since})")
        assert [each for each in found.numbers.values() if isinstance(each, str) and " " in each] == []


def test_sampled_tokens_whose_logprobs_are_lost_are_no_tool_tokens(tmp_path):
    def passes(recorder, batch, step, number):
        lost = [np.where((row % 3 == 0) & (np.arange(len(own)) >= 4), 0, own) for row, own in enumerate(step.scored())]
        recorder.add_scores("rollout", batch, logprobs=lost)
        recorder.add_scores("train", batch, logprobs=step.scored())

    found = findings(write(tmp_path / "trace", passes=passes, longest=24))
    assert "unsampled_count" not in [each.code for each in found]


@pytest.mark.parametrize(("num_tool", "is_found"), [(4, False), (0, True)])
def test_tool_tokens_do_not_count_toward_the_limit(tmp_path, num_tool, is_found):
    def columns(step, number):
        masks = [~((np.arange(len(row)) >= 4) & (np.arange(len(row)) < 4 + num_tool)) for row in step.responses]
        return {"response_mask": masks, "max_tokens": 8}

    found = findings(write(tmp_path / "trace", columns=columns))
    assert ("limit_exceeded" in [one.code for one in found]) == is_found


@pytest.mark.parametrize(("apart", "is_found"), [(0.0, False), (1.0, True)])
def test_a_reference_that_is_not_the_initial_policy_is_noted(tmp_path, apart, is_found):
    def passes(recorder, batch, step, number):
        policy = moved(table(), number, 0.3 * (number - 1))
        recorder.add_scores("rollout", batch, logprobs=step.scored(policy))
        recorder.add_scores("train", batch, logprobs=step.scored(policy), policy_version=number - 1)
        recorder.add_scores("reference", batch, logprobs=step.scored(moved(table(), 50, apart)))

    noted = [one for one in findings(write(tmp_path / "trace", passes=passes)) if one.code == "reference_apart"]
    assert [one.is_notice for one in noted] == [True] * is_found
    assert all("weights are not the initial policy's" in data_text(one) for one in noted)


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_a_reference_at_another_temperature_has_the_same_weights(tmp_path, temperature):
    def passes(recorder, batch, step, number):
        recorder.add_scores("rollout", batch, logprobs=step.scored())
        recorder.add_scores("train", batch, logprobs=in_float32(step, number), policy_version=number - 1)
        recorder.add_scores("reference", batch, logprobs=step.scored(step.logits / temperature))

    (found,) = findings(write(tmp_path / "trace", passes=passes, longest=24))
    assert found.code == "reference_apart"
    assert f"reference's logits equal train's divided by {temperature:g} (" in data_text(found)


def other_pass(name, change, apart=0.3):
    """Write the passes, and one with other weights than the policy, whose rows are changed."""

    def passes(recorder, batch, step, number):
        recorder.add_scores("rollout", batch, logprobs=step.scored())
        recorder.add_scores("train", batch, logprobs=in_float32(step, number), policy_version=number - 1)
        rows = step.scored(moved(table(), 50, apart))
        recorder.add_scores(name, batch, logprobs=change(rows, step, number))

    return passes


def later(lag, since):
    """Rows that are shifted by a number of tokens from a step on, and filled up with 0."""

    def change(rows, step, number):
        out = [np.zeros_like(row) for row in rows]
        for old, new in zip(rows, out, strict=True):
            new[max(lag, 0) : len(old) + min(lag, 0)] = old[max(-lag, 0) : len(old) - max(lag, 0)]
        return out if number >= since else rows

    return change


@pytest.mark.parametrize(
    ("name", "lag", "since", "longest"), [("reference", 1, 1, 12), ("reference", -2, 4, 30), ("current", 1, 3, 12)]
)
def test_a_shifted_pass_of_other_weights_is_a_fault(tmp_path, name, lag, since, longest):
    path = write(tmp_path / "trace", passes=other_pass(name, later(lag, since)), longest=longest)
    (found,) = (one for one in findings(path) if one.code == "reference_apart")
    assert (found.is_notice, found.since) == (False, since if since > 1 else None)
    assert found.title == f"the {name} pass does not match train: shifted by {abs(lag)} token{'s' * (abs(lag) > 1)}"
    assert f"too {'late' if lag > 0 else 'early'}" in data_text(found)


def test_the_first_step_of_a_shift_is_found_between_inspected_steps(tmp_path):
    path = write(tmp_path / "trace", passes=other_pass("reference", later(1, 22)), steps=40)
    assert [one.since for one in findings(path) if one.code == "reference_apart" and not one.is_notice] == [22]


def test_a_reference_in_other_rows_is_a_fault(tmp_path):
    def change(rows, step, number):
        order = np.roll(np.arange(len(rows)), 3)
        return [np.resize(rows[other], len(row)) for row, other in zip(rows, order, strict=True)]

    path = write(tmp_path / "trace", passes=other_pass("reference", change, apart=0.02), longest=40)
    (found,) = (one for one in findings(path) if one.code == "reference_apart")
    assert (found.is_notice, found.title) == (False, "the reference pass does not match train: values of other tokens")


def test_a_reference_that_is_off_in_short_rows_says_so(tmp_path):
    def change(rows, step, number):
        others = step.scored(moved(table(), 70, 1.5))
        return [other if len(row) < 16 else row for row, other in zip(rows, others, strict=True)]

    path = write(tmp_path / "trace", passes=other_pass("reference", change), longest=40)
    (found,) = (one for one in findings(path) if one.code == "reference_apart")
    assert found.is_notice
    assert "all where the response length in tokens is below 16" in data_text(found)


def copied(num, counted=True):
    """A batch whose last rows are copies of its first rows."""

    def columns(step, number):
        step.prompts[-num:], step.responses[-num:] = step.prompts[:num], step.responses[:num]
        rows = {"prompt_ids": step.prompts, "response_ids": step.responses}
        last = np.arange(len(GROUP)) >= len(GROUP) - num
        masks = [np.full(len(row), counted or not lost) for row, lost in zip(step.responses, last, strict=True)]
        return {name: [each.tolist() for each in values] for name, values in rows.items()} | {
            "temperature": 1.0, "group_ids": [*step.groups[:-num], *step.groups[:num]], "response_mask": masks,
        }  # fmt: skip

    return columns


@pytest.mark.parametrize(("num", "counted", "is_found"), [(1, True, True), (3, True, True), (3, False, False)])
def test_a_few_copies_of_a_steps_first_rows_are_found(tmp_path, num, counted, is_found):
    path = write(tmp_path / "run", columns=copied(num, counted), steps=3, longest=48)
    found = [one for one in findings(path) if one.code == "samples_repeat"]
    assert [one.numbers["num"] for one in found] == [3 * num] * is_found
    assert all("batches are padded with copies of their first rows" in data_text(one) for one in found)


def test_a_copy_elsewhere_in_a_step_is_found_beside_repeats_by_chance(tmp_path):
    def columns(step, number):
        for row in range(IN_GROUP, len(GROUP)):  # most responses are short and repeat by chance
            step.responses[row] = step.responses[row][:1]
        step.responses[5] = step.responses[2]
        return {"response_ids": [row.tolist() for row in step.responses], "temperature": 1.0}

    path = write(tmp_path / "run", columns=columns, steps=2, longest=48)
    (found,) = [one for one in findings(path) if one.code == "samples_repeat"]
    assert found.numbers["num"] == 2


def padded_mean(reward, number):
    """Rewards minus their sum over tokens, divided by the number of tokens and padding."""
    lengths = lengths_of(number)
    off = reward - (reward * lengths).sum() / (len(lengths) * lengths.max())
    return off / np.sqrt((off**2 * lengths).sum() / lengths.sum())


@pytest.mark.parametrize(
    ("advantage", "setting", "code", "is_notice", "text"),
    [
        (lambda r, n: grpo(r, GROUP % 4), "grpo", "baseline", False, "the mean of 16 rows from several groups"),
        (padded_mean, "reinforce++", "baseline", False, "the batch's tokens and padding"),
        (lambda r, n: r - 0.1 - 0.05 * n, "reinforce++", "baseline", True, "a constant for the whole batch"),
        (lambda r, n: r - np.random.default_rng(n).random(GROUPS)[GROUP], "grpo", "baseline_unknown", True, "no known baseline"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("reward", [binary, graded])
def test_a_baseline_of_other_rows_than_the_group_is_named_or_unknown(
    tmp_path, advantage, setting, code, is_notice, text, reward
):
    given = {"reward": reward, "hyperparameters": {"adv_estimator": setting}}
    (found,) = findings(write(tmp_path / "run", advantage, **given))
    assert (found.code, found.is_notice) == (code, is_notice)
    assert text in data_text(found)


def template(is_lost):
    """Responses with two template tokens and a tool's output after ten tokens. The mask leaves out the tool's."""

    def columns(step, number):
        draw = np.random.default_rng(number)
        step.responses = [np.r_[row[:10], 57, 58, draw.integers(20, 40, 3), row[9:]] for row in step.responses]
        masks = [~np.isin(np.arange(len(row)), range(12, 16)) for row in step.responses]
        return {"response_ids": [row.tolist() for row in step.responses], "response_mask": masks}

    def passes(recorder, batch, step, number):
        known = [~is_lost(row, np.arange(len(row))) for row in step.responses]
        recorder.add_scores("rollout", batch, logprobs=in_float32(step, number), scored_mask=known)
        recorder.add_scores("train", batch, logprobs=step.scored(), entropy=step.entropies())

    return {"columns": columns, "passes": passes, "longest": 36}


def test_parts_of_a_template_in_the_loss_leave_the_comparison_valid(tmp_path):
    result = check(write(tmp_path / "run", **template(lambda ids, place: (place >= 10) & (place <= 15))))
    assert result.is_valid
    assert [finding.code for finding in result.data] == ["unsampled_count"]
    assert result.data[0].numbers["num_tokens"] == 2 * len(GROUP) * STEPS


def test_logprobs_that_a_sampled_token_lacks_are_lost(tmp_path):
    """The engine drops the logprobs of one token id, also where no tool output follows."""
    result = check(write(tmp_path / "run", **template(lambda ids, place: np.isin(place, range(12, 16)) | (ids == 58))))
    assert not result.is_valid
    assert result.findings[0].title == "missing values instead of logprobs"


def test_a_nan_reward_is_traced_to_its_reward_function(tmp_path):
    def parts(step):
        return {"accuracy": parts_of(step)["accuracy"], "ratio": np.where(np.arange(len(GROUP)) == 3, np.nan, 0.0)}

    rewards = {
        "reward": lambda step, n, draw: sum(parts(step).values()),
        "columns": lambda step, n: {"rewards": parts(step)},
    }
    found = findings(write(tmp_path / "run", **rewards))
    assert "all rows of each group in which a row's ratio, and with it the reward, is NaN" in data_text(found[0])


def test_a_limit_that_cuts_most_rows_is_not_said_to_be_another(tmp_path):
    def columns(step, number):
        step.responses = [row[: 12 if at % 8 == 0 else 6] for at, row in enumerate(step.responses)]
        finish = ["length" if len(row) >= 6 else "stop" for row in step.responses]
        return {"response_ids": [row.tolist() for row in step.responses], "max_tokens": 6, "finish_reason": finish}

    found = findings(write(tmp_path / "run", columns=columns, passes=scored_by_both))
    (text,) = (data_text(one) for one in found if one.code == "limit_exceeded")
    assert "although max_tokens is 6 and others are cut there" in text


def scored_by_both(recorder, batch, step, number, left_out=lambda row: False):
    known = [[*row[:-1], None] if left_out(row) else row for row in step.scored()]
    recorder.add_scores("rollout", batch, logprobs=known)
    recorder.add_scores("train", batch, logprobs=step.scored())


def test_an_end_token_appended_to_truncated_responses_was_not_sampled(tmp_path):
    def columns(step, number):
        step.responses = [np.array([*row[:6], END]) if len(row) > 6 else row for row in step.responses]
        finish = ["length" if len(row) == 7 else "stop" for row in step.responses]
        return {"response_ids": [row.tolist() for row in step.responses], "finish_reason": finish}

    passes = partial(scored_by_both, left_out=lambda row: len(row) == 7)
    (found, *_) = check(write(tmp_path / "run", columns=columns, passes=passes)).findings
    title = "tokens that were not sampled are at the end of responses and included in the loss"
    assert (found.code, found.title) == ("mask", title)


@pytest.mark.parametrize(("share", "code"), [(0.5, "mask"), (1.0, "lengths")])
def test_end_tokens_without_engine_logprobs_were_appended_if_others_have_one(tmp_path, share, code):
    def columns(step, number):
        step.responses = [np.array([*row[row != END][:6], END]) for row in step.responses]
        return {
            "response_ids": [row.tolist() for row in step.responses],
            "finish_reason": ["stop"] * len(step.responses),
        }

    rows = iter(np.random.default_rng(0).random(10_000))
    passes = partial(scored_by_both, left_out=lambda row: next(rows) < share)
    (found, *_) = check(write(tmp_path / "run", columns=columns, passes=passes)).findings
    assert found.code == code


OVERLONG = {
    "reward_model.overlong_buffer.enable": True, "reward_model.overlong_buffer.len": 8, "data.max_response_length": 12,
}  # fmt: skip


@pytest.mark.parametrize(("factor", "expected"), [(0.0, [("penalty_missing", False)]), (1.0, [])])
def test_a_declared_length_penalty_must_be_in_the_rewards(tmp_path, factor, expected):
    def reward(step, number, draw):
        excess = np.array(list(map(len, step.responses))) - 4
        return binary(step, number, draw) - factor * np.maximum(excess, 0) / 8

    found = findings(write(tmp_path / "run", reward=reward, hyperparameters=OVERLONG))
    assert [(one.code, one.is_notice) for one in found] == expected


def test_a_length_penalty_that_swift_declares_must_be_in_the_rewards(tmp_path):
    settings = {"soft_max_length": 12, "soft_cache_length": 8, "max_completion_length": 16}
    found = findings(write(tmp_path / "run", hyperparameters=settings))
    assert [one.code for one in found] == ["penalty_missing"]


@pytest.mark.parametrize(("start", "expected"), [(4, []), (3, []), (7, ["penalty_wrong"])])
def test_a_length_penalty_must_be_the_declared_one(tmp_path, start, expected):
    def reward(step, number, draw):
        return binary(step, number, draw) - np.maximum(np.array(list(map(len, step.responses))) - start, 0) / 8

    found = findings(write(tmp_path / "run", reward=reward, hyperparameters=OVERLONG))
    assert [one.code for one in found] == expected


@pytest.mark.parametrize(("last", "expected"), [((), ["end_missing"]), ((END,), []), ((57,), [])])
def test_finished_responses_must_contain_the_tokenizers_end_token_unless_a_stop_string_ends_them(
    tmp_path, last, expected
):
    def columns(step, number):
        ids = [[2 if token == END else int(token) for token in row] for row in step.responses]
        step.responses = [np.array([*row[: len(row) - len(last)], *last]) for row in ids]
        return {"response_ids": step.responses, "finish_reason": ["stop"] * len(ids)}

    def passes(recorder, batch, step, number):
        recorder.describe(model={"config": "a name"}, tokenizer={"eos_token_id": [END, {}]})
        for name, values in (("rollout", in_float32(step, number)), ("train", step.scored())):
            recorder.add_scores(name, batch, logprobs=values)

    given = write(tmp_path / "run", columns=columns, passes=passes)
    assert [one.code for one in findings(given)] == expected
    assert check(given).is_valid  # a config that is only a name is no config


@pytest.mark.parametrize(("is_masked", "expected"), [(True, []), (False, ["finish_contradicts"])])
def test_a_tools_output_may_follow_the_end_token(tmp_path, is_masked, expected):
    """A third of the responses end with two other tokens after the end token, which the mask leaves out or not."""

    def columns(step, number):
        rows = [[*np.where(row == END, 5, row).tolist(), END] for row in step.responses]
        step.responses = [
            np.array([*row, 10 + at % 30, 40 - at % 30] if at % 3 == 0 else row) for at, row in enumerate(rows)
        ]
        mask = [
            np.arange(len(row)) < len(row) - 2 * (is_masked and at % 3 == 0) for at, row in enumerate(step.responses)
        ]
        ids = [row.tolist() for row in step.responses]
        return {"response_ids": ids, "response_mask": mask, "finish_reason": ["stop"] * len(ids)}

    def passes(recorder, batch, step, number):
        recorder.describe(model={"config": {"eos_token_id": END}})
        scored_by_both(recorder, batch, step, number)

    found = findings(write(tmp_path / "run", columns=columns, passes=passes))
    assert [one.code for one in found if one.code == "finish_contradicts"] == expected
    after_end = [(one.signal, one.is_notice) for one in found if one.code == "tokens_after_end"]
    assert after_end == [("declared", False)] * (not is_masked)


def resumed(path, drawn):
    """Record six steps and resume after three. The prompts of a step are those of draw `drawn(step)`."""
    for numbers in ((1, 2, 3), (4, 5, 6)):
        with Recorder(path, resume=numbers[0] > 1) as recorder:
            for number in numbers:
                step = sample(table(), number, groups=GROUPS, in_group=IN_GROUP, longest=12)
                prompts = sample(table(), drawn(number), groups=GROUPS, in_group=IN_GROUP, longest=12)
                batch = recorder.add_sequences(
                    step=number, prompt_ids=prompts.prompts, response_ids=step.responses, group_ids=step.groups,
                    reward=binary(step, number, np.random.default_rng(number)),
                )  # fmt: skip
                recorder.add_scores("train", batch, logprobs=step.scored())
                recorder.add_scores("rollout", batch, logprobs=in_float32(step, number))
    return path


@pytest.mark.parametrize(
    ("drawn", "expected"),
    [
        (lambda step: step - 3 * (step > 3), [("prompts_restart", 4)]),
        (lambda step: step, []),
        (lambda step: step - (step > 3), []),
        (lambda step: 1, [("prompts_repeat", None)]),
        (lambda step: step % 2, []),
    ],
    ids=["restart", "next", "one step lost", "one batch", "epochs of two steps"],
)
def test_a_resumed_run_must_not_start_with_the_first_prompts_again(tmp_path, drawn, expected):
    found = findings(resumed(tmp_path / "run", drawn))
    assert [(one.code, one.numbers.get("start")) for one in found] == expected


@pytest.mark.parametrize(("is_padding", "expected"), [(True, ["prompt_padding"]), (False, [])])
def test_padding_makes_prompts_equally_long_unlike_an_images_placeholders(tmp_path, is_padding, expected):
    def columns(step, number):
        own = [[9, number, *range(20 + group, 24 + group + group % 5)] for group in GROUP]
        return {"prompt_ids": [[5] * (12 - len(row) if is_padding else 6) + row for row in own]}

    found = findings(write(tmp_path / "run", columns=columns))
    assert [one.code for one in found] == expected


def test_the_source_of_nan_advantages_is_named(tmp_path):
    def parts(step, number):
        given = parts_of(step)["accuracy"]
        return {"accuracy": np.where((number % 3 == 0) & (np.arange(len(given)) == 5), np.nan, given)}

    path = write(
        tmp_path / "run", reward=lambda step, n, draw: parts_of(step)["accuracy"],
        advantage=lambda r, n: grpo(r) + (np.nan if n % 3 == 0 else 0.0), columns=lambda step, n: {"rewards": parts(step, n)},
    )  # fmt: skip
    (found,) = [one for one in findings(path) if one.code == "not_finite"]
    assert "all rows of each step in which a row's accuracy is NaN" in data_text(found)


@pytest.mark.parametrize(
    ("excluded", "is_notice"),
    [
        (lambda number: np.arange(len(GROUP)) % 9 == 4, True),
        (lambda number: np.full(len(GROUP), number > 4), False),
        (lambda number: (np.arange(len(GROUP)) % 9 == 4) | (GROUP == 2), False),
    ],
    ids=["single rows", "whole steps", "a group without advantages"],
)
def test_rows_excluded_with_a_nan_reward_are_only_noted(tmp_path, excluded, is_notice):
    def advantage(reward, number):
        return np.where(excluded(number), 0.0, grpo(reward))

    def recorded(reward, number):
        return np.where(excluded(number) & ((GROUP != 2) | (np.arange(len(GROUP)) % IN_GROUP == 0)), np.nan, reward)

    found = findings(write(tmp_path / "run", recorded=recorded, advantage=advantage, reward=graded))
    assert [one.is_notice for one in found if one.code == "not_finite"] == [is_notice]


def test_extreme_advantages_of_nearly_equal_groups_are_explained(tmp_path):
    def reward(step, number, draw):
        return np.where(GROUP == 2, 1.0 * (np.arange(len(GROUP)) % IN_GROUP == 0), graded(step, number, draw))

    (found,) = findings(
        write(
            tmp_path / "run",
            advantage=lambda r, n: left_out(r) * np.where((GROUP == 2) & (r == 1), 4000.0, 1.0),
            reward=reward,
        )
    )
    assert found.code == "advantages_extreme"
    assert "the other rewards in the group are equal" in data_text(found)


def test_logged_lengths_that_count_masked_responses_as_empty_are_noted(tmp_path):
    def columns(step, number):
        return {
            "response_mask": [np.full(len(row), rank % IN_GROUP > 1) for rank, row in enumerate(step.responses)],
        }

    def metrics(step, reward, number):
        counted = [len(row) * (rank % IN_GROUP > 1) for rank, row in enumerate(step.responses)]
        return {"completions/mean_length": np.mean(counted)}

    found = findings(write(tmp_path / "run", columns=columns, metrics=metrics))
    (one,) = [one for one in found if one.code == "metric_of_others"]
    assert one.is_notice
    assert "the mean number of tokens in the loss" in data_text(one)


@pytest.mark.parametrize(("padding", "expected"), [(0, []), (9, ["metric_contradicts"])])
def test_a_logged_entropy_of_whole_responses_is_recomputed(tmp_path, padding, expected):
    def metrics(step, reward, number):
        return {"objective/entropy": np.mean([-row.sum() - padding for row in step.scored()])}

    assert [one.code for one in findings(write(tmp_path / "run", metrics=metrics))] == expected


@pytest.mark.parametrize("value", [-1.0, 2.5])
def test_padding_in_a_logged_entropy_of_whole_responses_is_found(tmp_path, value):
    def metrics(step, reward, number):
        width = max(map(len, step.responses))
        return {"objective/entropy": np.mean([value * (width - len(row)) - row.sum() for row in step.scored()])}

    (found,) = findings(write(tmp_path / "run", metrics=metrics))
    text = "a placeholder logprob of 1" if value == -1 else f"an error of about {value:g} for each padding position"
    assert text in data_text(found)
    assert not found.is_notice


def test_a_kl_over_masked_tokens_averaged_by_row_is_described(tmp_path):
    def columns(step, number):
        return {"response_mask": [np.arange(len(row)) % 3 < 2 for row in step.responses]}

    def metrics(step, reward, number):
        rows = np.split(kl_to_reference(step), np.cumsum(lengths_in(step))[:-1])
        return {"critic/kl": np.mean([row.mean() for row in rows])}

    given = {"reward": graded, "passes": with_updates, "columns": columns}
    (found,) = [
        one for one in findings(write(tmp_path / "run", metrics=metrics, **given)) if one.code.startswith("metric")
    ]
    assert "the mean over rows of the mean over all tokens, including masked ones" in data_text(found)


def test_a_reference_of_zeros_was_not_computed(tmp_path):
    def passes(recorder, batch, step, number):
        for name, rows in (("rollout", in_float32(step, number)), ("train", step.scored())):
            recorder.add_scores(name, batch, logprobs=rows)
        recorder.add_scores("reference", batch, logprobs=[np.zeros(len(row), np.float32) for row in step.responses])

    (found,) = findings(write(tmp_path / "run", passes=passes))
    assert (found.code, found.is_notice) == ("reference_apart", False)
    assert "every reference logprob is 0, so it was not computed" in data_text(found)


@pytest.mark.parametrize("counts", [True, False])
def test_it_is_said_if_rewards_of_zeroed_truncated_rows_count_in_the_baseline(tmp_path, counts):
    def is_cut(number):
        return np.random.default_rng(50 + number).random(len(GROUP)) < 0.4

    def advantage(reward, number):
        kept = ~is_cut(number)
        num = np.bincount(GROUP, kept)[GROUP]
        own = centred(reward) if counts else reward - (np.bincount(GROUP, reward * kept)[GROUP] / np.maximum(num, 1))
        return own * kept

    columns = lambda step, n: {"finish_reason": np.where(is_cut(n), "length", "stop").tolist()}  # noqa: E731
    found = findings(write(tmp_path / "run", advantage, reward=graded, columns=columns))
    said = [
        "their rewards count in their groups' baselines" in data_text(one)
        for one in found
        if one.code.startswith("adv")
    ]
    assert said == [True] * counts


@pytest.mark.parametrize(("factor", "text"), [(0.0, "with 1 data fault:"), (1.0, "VALID: ")])
def test_the_verdict_counts_data_faults(tmp_path, factor, text):
    path = write(
        tmp_path / "run", hyperparameters=OVERLONG,
        reward=lambda step, n, draw: binary(step, n, draw) - factor * np.maximum(lengths_of(n) - 4, 0) / 8,
    )  # fmt: skip
    assert text in checked_text(check(path)).splitlines()[0]


def test_an_end_token_that_is_never_sampled_is_noted(tmp_path):
    def columns(step, number):
        step.responses = [np.resize(np.where(row == END, 2, row), 9) for row in step.responses]
        return {"response_ids": step.responses, "finish_reason": ["length"] * len(step.responses)}

    def passes(recorder, batch, step, number):
        recorder.describe(tokenizer={"eos_token_id": END})
        for name, values in (("rollout", in_float32(step, number)), ("train", step.scored())):
            recorder.add_scores(name, batch, logprobs=values)

    (found,) = findings(write(tmp_path / "run", columns=columns, passes=passes))
    assert (found.code, found.is_notice) == ("end_missing", True)
    assert "every response has 9 tokens, so the engine never samples it" in data_text(found)


@pytest.mark.parametrize(("sign", "text"), [(-1, "longer responses get less"), (1, "longer responses get more")])
def test_rewards_shaped_by_the_length_are_only_noted(tmp_path, sign, text):
    def advantage(reward, number):
        shaped = reward * (1 + sign * 0.02 * np.maximum(lengths_of(number) - 9, 0))
        return centred(shaped)

    found = findings(write(tmp_path / "run", advantage=advantage))
    (one,) = [one for one in found if one.code == "advantages_unequal"]
    assert one.is_notice
    assert text in data_text(one)


def test_groups_of_one_row_are_named_where_advantages_are_constant(tmp_path):
    path = write(
        tmp_path / "run", groups=lambda step, n: [f"{n}-{row}" for row in range(len(GROUP))],
        advantage=lambda r, n: 0 * r, columns=lambda step, n: {"prompt_ids": [[row, n] for row in range(len(GROUP))]},
    )  # fmt: skip
    (found,) = findings(path)
    assert found.code == "advantages_constant"
    assert "but each group contains a single row" in data_text(found)


def with_updates(recorder, batch, step, number):
    """Passes with an update before the loss, and a reference with other weights. Evaluation rows beside them."""
    recorder.add_scores("rollout", batch, logprobs=in_float32(step, number))
    recorder.add_scores("train", batch, logprobs=step.scored(), entropy=step.entropies())
    recorder.add_scores("current", batch, logprobs=step.scored(moved(step.logits, number, 0.4)))
    recorder.add_scores("reference", batch, logprobs=step.scored(moved(step.logits, 50, 0.1)))
    ids = {"prompt_ids": [row.tolist() for row in step.prompts], "response_ids": [row.tolist() for row in step.responses]}  # fmt: skip
    recorder.add_sequences(step=number, **ids, group_ids=step.groups, reward=graded(step, number, None), split="eval")


def from_train(step, table):
    return np.concatenate([a - b for a, b in zip(step.scored(), step.scored(table), strict=True)])


def kl_to_reference(step):
    d = from_train(step, moved(step.logits, 50, 0.1))
    return np.exp(-d) - 1 + d


def clipped_terms(step, reward, number, sign=1):
    """Negated clipped terms of the loss, and whether the clip of advantages of this sign applies, one for each token."""
    advantage = np.repeat(grpo(reward), [len(row) for row in step.responses])
    ratio = np.exp(-from_train(step, moved(step.logits, number, 0.4)))
    terms = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
    return -terms, ((ratio > 1.2) & (sign * advantage > 0)) | ((ratio < 0.8) & (sign * advantage < 0))


def lengths_in(step):
    return np.array([len(row) for row in step.responses])


MEANS = {
    "padding": ("actor/kl_loss", lambda s, r, n: kl_to_reference(s).mean(), lambda s, r, n: kl_to_reference(s).sum() / (len(r) * lengths_in(s).max()), "the mean over the loss tokens and the padding"),
    "sign": ("kl", lambda s, r, n: kl_to_reference(s).mean(), lambda s, r, n: -kl_to_reference(s).mean(), "the mean over the loss tokens, with the wrong sign"),
    "loss": ("actor/pg_loss", lambda s, r, n: clipped_terms(s, r, n)[0].mean(), lambda s, r, n: clipped_terms(s, r, n)[0].mean() / 8, "the mean over the loss tokens, divided by 8"),
    "clip": ("clip_ratio/region_mean", lambda s, r, n: clipped_terms(s, r, n)[1].mean(), lambda s, r, n: clipped_terms(s, r, n, -1)[1].mean(), "the share of tokens where the clip has no effect"),
    "ppo_kl": ("actor/ppo_kl", lambda s, r, n: from_train(s, moved(s.logits, n, 0.4)).mean(), lambda s, r, n: 31 * from_train(s, moved(s.logits, n, 0.4)).mean(), "multiplied by 31"),
    "mismatch": ("train_rollout_logprob_abs_diff", lambda s, r, n: np.abs(np.concatenate(in_float32(s, n)) - np.concatenate(s.scored())).mean(), lambda s, r, n: 5 * np.abs(np.concatenate(in_float32(s, n)) - np.concatenate(s.scored())).mean(), "multiplied by 5"),
    "entropy": ("actor/entropy", lambda s, r, n: np.mean([row.mean() for row in s.entropies()]), lambda s, r, n: 4 * np.concatenate(s.entropies()).mean(), "multiplied by 4"),
    "quarter": ("rollout/raw_reward", lambda s, r, n: r.mean(), lambda s, r, n: r[:16].mean(), "the mean of the first quarter of the rows"),
    "weighted": ("reward/mean", lambda s, r, n: r.mean(), lambda s, r, n: np.average(r, weights=lengths_in(s)), "the mean over all rows, weighted by length"),
    "best": ("reward", lambda s, r, n: r.mean(), lambda s, r, n: r.reshape(-1, IN_GROUP).max(1).mean(), "the mean of the groups' largest values"),
    "spread": ("reward_std", lambda s, r, n: spread(r).mean(), lambda s, r, n: spread(r).mean() / 2, "within groups, divided by 2"),
    "advantages": ("advantages/max", lambda s, r, n: grpo(r).max(), lambda s, r, n: 3 * grpo(r).max(), "multiplied by 3"),
    "lengths": ("generate/avg_num_tokens", lambda s, r, n: lengths_in(s).mean(), lambda s, r, n: 1.7 * lengths_in(s).mean(), "multiplied by 1.7"),
    "evaluation": ("eval/reward", lambda s, r, n: r.mean(), lambda s, r, n: r.mean() / 2, "the mean over all evaluation rows, divided by 2"),
    "sum": ("actor/loss", lambda s, r, n: 0.1 * n + 0.1 * (0.3 + 0.05 * (n % 3)), lambda s, r, n: 0.1 * n - 0.1 * (0.3 + 0.05 * (n % 3)), "actor/policy_loss - 0.1 actor/kl_loss, although the coefficient is 0.1"),
}  # fmt: skip
"""Metric, its right values, wrong ones, and how these are described."""


@pytest.mark.parametrize("kind", MEANS)
def test_the_average_that_a_metric_really_is_is_named(tmp_path, kind):
    name, right, wrong, text = MEANS[kind]
    terms = {"actor/policy_loss": lambda n: 0.1 * n, "actor/kl_loss": lambda n: 0.3 + 0.05 * (n % 3)} if kind == "sum" else {}  # fmt: skip
    given = {"reward": graded, "passes": with_updates, "loss": Loss(), "hyperparameters": {"kl_loss_coef": 0.1}}
    logged = [
        [each for each in findings(path) if each.code.startswith("metric")]
        for path in (
            write(
                tmp_path / which,
                metrics=lambda s, r, n, of=of: (
                    {name: float(of(s, r, n))} | {key: term(n) for key, term in terms.items()}
                ),
                **given,
            )
            for which, of in (("right", right), ("wrong", wrong))
        )
    ]
    assert logged[0] == []
    (found,) = logged[1]
    assert found.code == "metric_of_others"
    assert f"{name} is " in data_text(found)
    assert text in data_text(found)
    assert found.is_notice == (kind in ("best", "lengths", "loss"))


ALIKE = {
    "a KL with its coefficient": lambda s, r, n: {"actor/kl_loss": 0.1 * kl_to_reference(s).mean()},
    "another estimator, summed by row": lambda s, r, n: {"objective/kl": from_train(s, moved(s.logits, 50, 0.1)).sum() / len(r)},
    "a KL of other tokens": lambda s, r, n: {"kl": kl_to_reference(s)[::2].mean()},
    "a loss that is 0 by construction": lambda s, r, n: {"loss": 1e-9 * n * (-1) ** n},
    "a loss per sequence": lambda s, r, n: {"loss": np.mean([x.mean() for x in np.split(clipped_terms(s, r, n)[0], np.cumsum(lengths_in(s))[:-1])])},
    "a term logged with its coefficient": lambda s, r, n: {"actor/pg_loss": clipped_terms(s, r, n)[0].mean(), "actor/kl_loss": 0.1 * kl_to_reference(s).mean(), "actor/loss": clipped_terms(s, r, n)[0].mean() + 0.1 * kl_to_reference(s).mean()},
    "lengths of whole sequences": lambda s, r, n: {"seq_len/all/mean": np.mean([len(p) + len(row) for p, row in zip(s.prompts, s.responses, strict=True)])},
    "deviations within steps": lambda s, r, n: {"reward_std": r.std(ddof=1)},
    "the best of each prompt": lambda s, r, n: {"eval/pass@8": r.reshape(-1, IN_GROUP).max(1).mean()},
    "other evaluation rows": lambda s, r, n: {"eval/math/reward": r[:32].mean()},
    "a steady half": lambda s, r, n: {"reward": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("kind", ALIKE)
def test_other_usual_averages_are_no_contradiction(tmp_path, kind):
    given = {"reward": graded, "passes": with_updates, "loss": Loss(), "hyperparameters": {"kl_loss_coef": 0.1}}
    found = findings(write(tmp_path / "run", metrics=ALIKE[kind], **given))
    assert [data_text(each) for each in found if each.code.startswith("metric")] == []


def lengths_of_turns(step, number):
    """Every second row is continued by the next one, as a trajectory of two turns."""
    prompts, responses = ([row.tolist() for row in rows] for rows in (step.prompts, step.responses))
    for first in range(0, len(prompts), 2):
        prompts[first + 1] = prompts[first] + responses[first] + [5, 6]
    return {"prompt_ids": prompts, "response_ids": responses}


def identical_first_turns(step, number):
    """The first turns of each group's first two trajectories are the same."""
    rows = np.arange(len(GROUP))
    like = np.where(rows % IN_GROUP == 2, rows - 2, rows)
    return lengths_of_turns(
        Step([step.prompts[row] for row in like], [step.responses[row] for row in like], step.groups, step.logits),
        number,
    )


@pytest.mark.parametrize("early", [0.0, 1.0])
def test_earlier_turns_without_an_advantage_are_found_beside_identical_ones(tmp_path, early):
    is_early = np.arange(len(GROUP)) % 2 == 0
    path = write(
        tmp_path / "run", lambda r, n: grpo(r) * np.where(is_early, early, 1.0), columns=identical_first_turns,
        reward=lambda step, number, draw: np.repeat(binary(step, number, draw)[::2], 2), passes=lambda *_: None,
    )  # fmt: skip
    found = [data_text(each) for each in findings(path, sampled=False) if each.code == "turns_differ"]
    assert len(found) == (not early)
    assert all("those of earlier turns are 0" in text for text in found)


def summary(name, values):
    return {f"{name}/{figure}": float(getattr(values, figure)()) for figure in ("mean", "max", "min")}


def whole_lengths(step):
    return lengths_in(step) + np.array([len(prompt) for prompt in step.prompts])


def loss_lengths(step):
    return np.array([np.sum(mask) for mask in with_tools(step, 0)])


def two_sets(recorder, batch, step, number):
    """Evaluation rows of two data sets, one of which is too hard."""
    ids = {"prompt_ids": [row.tolist() for row in step.prompts], "response_ids": [row.tolist() for row in step.responses]}  # fmt: skip
    reward = graded(step, number, None) * (np.arange(len(GROUP)) < 32)
    recorder.add_sequences(step=number, **ids, group_ids=step.groups, reward=reward, split="eval")


def cold_start(step, number, draw):
    """Rewards of a policy that fails at first."""
    return graded(step, number, draw) * (number > 9)


WEIGHTED = {"reward": lambda s, n, d: parts_of(s)["accuracy"] + 0.2 * parts_of(s)["format"], "columns": lambda s, n: {"rewards": parts_of(s)}, "hyperparameters": {"reward_weights": "{'accuracy': 1.0, 'format': 0.2}"}}  # fmt: skip
USUAL_LOGS = {
    "an accuracy in percent": ({"passes": with_updates, "metrics": lambda s, r, n: {"val/acc": 100 * r.mean()}}, [True]),
    "two evaluation sets": ({"passes": two_sets, "metrics": lambda s, r, n: {"val/gsm8k/reward": graded(s, n, None)[:32].mean(), "val/aime/reward": 0.0}}, []),
    "an advantage of 0, rounded": ({"reward": cold_start, "steps": 16, "metrics": lambda s, r, n: {"critic/advantages/mean": float(grpo(r).astype(np.float32).mean(dtype=np.float32))}}, []),
    "other rows after a cold start": ({"reward": cold_start, "steps": 16, "metrics": lambda s, r, n: {"reward": r[::3].mean()}}, []),
    "extremes of whole sequences": ({"metrics": lambda s, r, n: summary("seq_len/all", whole_lengths(s))}, []),
    "extremes without masked tokens": ({"entropy": None, "columns": lambda s, n: {"response_mask": with_tools(s, n)}, "metrics": lambda s, r, n: summary("response_length", loss_lengths(s))}, []),
    "rewards before a recorded scale": ({"hyperparameters": {"actor.reward_scaling": 10.0}, "reward": lambda s, n, d: 10 * graded(s, n, d), "metrics": lambda s, r, n: {"ppo_actor/task_reward/avg": r.mean() / 10}}, []),
    "a score among the parts": (WEIGHTED | {"metrics": lambda s, r, n: {"critic/rewards/mean": r.mean(), "reward/accuracy": parts_of(s)["accuracy"].mean(), "train/task_reward": parts_of(s)["accuracy"].mean()}}, [True]),
    "weighted parts": (WEIGHTED | {"columns": lambda s, n: {"rewards": {"accuracy": parts_of(s)["accuracy"], "format": 0.2 * parts_of(s)["format"]}}, "metrics": lambda s, r, n: {"rewards/format/mean": parts_of(s)["format"].mean()}}, []),
    "NaN between logged steps": ({"steps": 12, "metrics": lambda s, r, n: {"reward": r.mean() if n % 4 == 0 else np.nan}}, []),
    "tokens of trajectories": ({"columns": lengths_of_turns, "passes": lambda *_: None, "metrics": lambda s, r, n: {"generate/avg_num_tokens": 2 * lengths_in(s).mean()}}, []),
    "huge values": ({"passes": with_updates, "loss": Loss(), "metrics": lambda s, r, n: {name: 1e308 for name in ("val/reward", "actor/kl_loss", "actor/pg_loss")}}, []),
}  # fmt: skip
"""Options of runs whose metrics are logged as frameworks do, and which notices of metrics they get."""


@pytest.mark.parametrize("kind", USUAL_LOGS)
def test_metrics_are_compared_as_frameworks_log_them(tmp_path, kind):
    options, expected = USUAL_LOGS[kind]
    found = findings(write(tmp_path / "run", **{"reward": graded} | options), sampled="passes" not in options)
    assert [each.is_notice for each in found if each.code.startswith("metric")] == expected


def ever_farther(recorder, batch, step, number):
    draw, scored = np.random.default_rng(number), step.scored()
    recorder.add_scores("train", batch, logprobs=scored)
    reference = [np.minimum(row - draw.normal(0, 0.1 * number, len(row)), 0).astype(np.float32) for row in scored]
    recorder.add_scores("reference", batch, logprobs=reference)


@pytest.mark.parametrize(("coefficient", "expected"), [(1.0, ["kl_grows"]), (0.1, [])])
def test_a_kl_that_grows_beyond_what_its_penalty_allows_is_noticed(tmp_path, coefficient, expected):
    found = findings(
        write(tmp_path / "run", passes=ever_farther, hyperparameters={"actor.kl_loss_coef": coefficient}), sampled=False
    )
    assert [each.code for each in found if each.code.startswith("kl")] == expected


def behind(number):
    return np.minimum(np.arange(len(GROUP)) % 3, number - 1) * (number % 3)


def with_versions(recorder, batch, step, number):
    recorder.add_scores("train", batch, logprobs=step.scored(), policy_version=10 + number)


@pytest.mark.parametrize(("times", "expected"), [(1, []), (2, ["off_policy/level_mean"])])
def test_a_logged_staleness_is_compared_with_the_policy_versions(tmp_path, times, expected):
    path = write(
        tmp_path / "run", passes=with_versions, columns=lambda s, n: {"policy_version": (10 + n - behind(n)).tolist()},
        metrics=lambda s, r, n: {"off_policy/level_mean": times * behind(n).mean(), "staleness_max": behind(n).max()},
    )  # fmt: skip
    found = [each for each in findings(path, sampled=False) if each.code.startswith("metric")]
    assert [each.numbers["name"] for each in found] == expected
    assert all("multiplied by 2" in data_text(each) for each in found)


def finished_lengths(step, number):
    ended = np.arange(len(GROUP)) % 4 > 0
    return {"finish_reason": ["stop" if each else "length" for each in ended]}


@pytest.mark.parametrize(
    ("rows", "expected"), [(slice(None), ["metric_of_others"]), (np.arange(len(GROUP)) % 4 > 0, [])]
)
def test_a_logged_length_of_finished_responses_leaves_out_truncated_ones(tmp_path, rows, expected):
    metrics = lambda s, r, n: {"completions/mean_terminated_length": lengths_in(s)[rows].mean()}  # noqa: E731
    found = findings(write(tmp_path / "run", columns=finished_lengths, metrics=metrics), sampled=False)
    assert [each.code for each in found if each.code.startswith("metric")] == expected


def test_a_logged_loss_is_not_compared_if_no_advantage_is_finite(tmp_path):
    options = {"loss": Loss(), "passes": with_updates, "metrics": lambda s, r, n: {"loss": 0.0}}
    found = findings(write(tmp_path / "run", lambda r, n: np.full(len(r), np.nan), **options), sampled=False)
    assert [each.code for each in found] == ["not_finite"]


def test_an_infinite_metric_is_reported_with_its_value(tmp_path):
    found = findings(write(tmp_path / "run", reward=graded, metrics=lambda s, r, n: {"reward": np.inf}))
    assert "logged as inf" in data_text(found[0])


def test_a_mean_in_which_missing_rewards_count_as_0_is_described(tmp_path):
    def code(step):
        return np.where(GROUP % 2, graded(step, 0, None), np.nan)

    columns = lambda s, n: {"rewards": {"code": [None if np.isnan(x) else x for x in code(s)]}}  # noqa: E731
    metrics = lambda s, r, n: {"rewards/code/mean": np.nan_to_num(code(s)).mean()}  # noqa: E731
    found = findings(write(tmp_path / "run", reward=graded, columns=columns, metrics=metrics))
    assert [each.is_notice for each in found if "with 0 for rows without a value" in data_text(each)] == [True]


OVERLONG_BUFFER = {"data.max_response_length": 11, "overlong_buffer.enable": True, "overlong_buffer.len": 4}


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [(lambda r, n: grpo(r), [False]), (lambda r, n: None, [True]), (per_token, [True])],
)
def test_a_missing_penalty_is_certain_only_if_advantages_could_show_it(tmp_path, advantage, expected):
    found = findings(write(tmp_path / "run", advantage, hyperparameters=OVERLONG_BUFFER))
    assert [each.is_notice for each in found if each.code == "penalty_missing"] == expected


def test_a_penalty_with_a_negative_weight_may_no_longer_apply(tmp_path):
    def mixed(number):
        return 1.0 * (np.random.default_rng(number).random(len(GROUP)) < 0.5 * (number < 9))

    options = {"reward": lambda s, n, d: graded(s, n, d) - 0.5 * mixed(n), "steps": 16}
    columns = lambda s, n: {"rewards": {"score": graded(s, n, None), "mixed": mixed(n)}}  # noqa: E731
    weights = {"reward_weights": "{'score': 1.0, 'mixed': -0.5}"}
    assert findings(write(tmp_path / "run", columns=columns, hyperparameters=weights, **options)) == ()


def test_a_limit_may_be_what_a_resumed_response_had_left(tmp_path):
    columns = lambda s, n: {"max_tokens": [12 - 5 * (row % 3 == 0) for row in range(len(GROUP))]}  # noqa: E731
    (found,) = findings(write(tmp_path / "run", columns=columns))
    assert (found.code, found.is_notice) == ("limit_exceeded", True)


@pytest.mark.parametrize(("has_turns", "expected"), [(False, ["finish_contradicts"]), (True, [])])
def test_a_trajectory_without_room_for_a_turn_is_cut_after_an_end_token(tmp_path, has_turns, expected):
    def columns(step, number):
        rows = [[*np.where(row == END, 2, row).tolist(), END] for row in step.responses]
        reasons = np.where(np.random.default_rng(number).random(len(rows)) < 0.2, "length", "stop").tolist()
        masks = [[not has_turns or at % 4 != 1 for at in range(len(row))] for row in rows]
        return {"response_ids": rows, "finish_reason": reasons, "response_mask": masks}

    def passes(recorder, batch, step, number):
        for name, rows in (("rollout", in_float32(step, number)), ("train", step.scored())):
            recorder.add_scores(name, batch, logprobs=[np.append(row, np.float32(-0.1)) for row in rows])

    found = findings(write(tmp_path / "run", columns=columns, passes=passes))
    assert [each.code for each in found] == expected


@pytest.mark.parametrize("is_known", [True, False])
def test_masked_tokens_without_clear_entropies_are_not_called_sampled(tmp_path, is_known):
    def mask(step):
        return [(np.arange(len(row)) % 3 != 2) | (np.arange(len(row)) == len(row) - 1) for row in step.responses]

    def passes(recorder, batch, step, number):
        draw, rollout, train, entropies = np.random.default_rng(number), in_float32(step, number), step.scored(), []
        for inside, entropy, *logprobs in zip(mask(step), step.entropies(), rollout, train, strict=True):
            tools = np.minimum(draw.normal(-0.3, 2.5, (~inside).sum()) - entropy[~inside], -1e-3)
            for row in logprobs:
                row[~inside] = tools
            entropies.append(np.where(inside | is_known, entropy, np.nan).astype(np.float32))
        recorder.add_scores("rollout", batch, logprobs=rollout)
        recorder.add_scores("train", batch, logprobs=train, entropy=entropies)

    columns = lambda s, n: {"response_mask": mask(s)}  # noqa: E731
    assert findings(write(tmp_path / "run", columns=columns, passes=passes, steps=1)) == ()


@pytest.mark.parametrize(
    ("end", "other", "expected"), [(5, 0.0, [("learning_rate_ends", 5, True)]), (8, 0.0, []), (5, 1e-6, [])]
)
def test_learning_rates_that_reach_0_before_the_last_steps_are_named(tmp_path, end, other, expected):
    rates = lambda step, reward, number: {"actor/lr": 1e-6 * max(end - number, 0), "critic/lr": other}  # noqa: E731
    found = findings(write(tmp_path / "run", metrics=rates))
    assert [(each.code, each.since, each.is_notice) for each in found] == expected


@pytest.mark.parametrize("is_anew", [True, False])
def test_a_schedule_that_begins_anew_after_a_resumption_is_named(tmp_path, is_anew):
    for attempt, steps in enumerate((range(1, 5), range(5, 9))):
        with Recorder(tmp_path / "run", resume=attempt > 0) as recorder:
            for number in steps:
                step = sample(table(), 100 + number, groups=GROUPS, in_group=IN_GROUP, longest=12)
                ids = {"prompt_ids": [row.tolist() for row in step.prompts], "response_ids": [row.tolist() for row in step.responses]}  # fmt: skip
                reward = graded(step, number, None)
                batch = recorder.add_sequences(step=number, **ids, group_ids=step.groups, reward=reward, advantage=grpo(reward))  # fmt: skip
                recorder.add_scores("rollout", batch, logprobs=in_float32(step, number))
                recorder.add_scores("train", batch, logprobs=step.scored())
                recorder.add_metrics(number, {"actor/lr": 1e-6 * (1 - (number - 4 * attempt * is_anew) / 20)})
    assert [(each.code, each.since, each.is_notice) for each in findings(tmp_path / "run")] == [
        ("schedule_restarts", None, True)
    ] * is_anew


def sampled_with(process, sharpness=2.5, given=lambda logits: logits, **recorded):
    """Rows that are sampled from processed logits. The passes have those that `given` returns."""

    def columns(step, number):
        drawn = sample(
            table(sharpness=sharpness), number, groups=GROUPS, in_group=IN_GROUP, longest=30, process=process
        )
        step.prompts[:], step.responses[:], step.logits = drawn.prompts, drawn.responses, given(drawn.logits)
        rows = {"prompt_ids": drawn.prompts, "response_ids": drawn.responses}
        return {name: [row.tolist() for row in each] for name, each in rows.items()} | recorded

    return {"columns": columns, "longest": 30}


def min_p(rows, share):
    """Logits of what min_p sampling keeps; the others are far below."""
    return np.where(rows >= rows.max(axis=-1, keepdims=True) + np.log(share), rows, -1e9)


SAMPLING = {
    "no min_p": (sampled_with(lambda rows: rows, temperature=1.0, min_p=0.1), "min_p = 0.1 is recorded"),
    "min_p": (sampled_with(partial(min_p, share=0.1), temperature=1.0, min_p=0.1), ""),
    "renormalised after min_p": (
        sampled_with(partial(min_p, share=0.1), 2.5, partial(min_p, share=0.1), temperature=1.0, min_p=0.1), "",
    ),
    "no temperature": (sampled_with(lambda rows: rows / 0.7, temperature=0.7), "temperature = 0.7 is recorded"),
    "nearly greedy": (sampled_with(lambda rows: rows * 8, temperature=1.0), "a lower one or a filter"),
    "no filter": (sampled_with(lambda rows: rows, 5.0, temperature=1.0, top_p=0.5), "top_p = 0.5 is recorded"),
    "a temperature": (
        sampled_with(lambda rows: rows / 0.7, given=lambda rows: rows / np.float32(0.7), temperature=0.7), "",
    ),
    "a filter": (sampled_with(partial(top_p, mass=0.5), 5.0, temperature=1.0, top_p=0.5), ""),
    "renormalised after a filter": (
        sampled_with(partial(top_p, mass=0.5), 5.0, partial(top_p, mass=0.5), temperature=1.0, top_p=0.5), "",
    ),
    "a wide filter": (sampled_with(partial(top_p, mass=0.95), 5.0, temperature=1.0, top_p=0.95), ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", SAMPLING)
def test_recorded_sampling_settings_show_in_the_samples(tmp_path, kind):
    run, text = SAMPLING[kind]
    checked = check(write(tmp_path / "trace", **run))
    found = [one for one in checked.data if one.code == "sampling_contradicts"]
    assert (checked.is_valid, [one.is_notice for one in found]) == (True, [True] * bool(text))
    assert all(text in data_text(one) for one in found)


def test_a_wrong_model_says_nothing_about_the_samples(tmp_path):
    run, _ = SAMPLING["nearly greedy"]

    def passes(recorder, batch, step, number):
        recorder.add_scores("rollout", batch, logprobs=step.scored())
        step.logits = moved(step.logits, 3, 3.0)
        recorder.add_scores("train", batch, logprobs=step.scored(), entropy=step.entropies())

    checked = check(write(tmp_path / "trace", passes=passes, **run))
    assert not checked.is_valid
    assert "sampling_contradicts" not in {one.code for one in checked.data}


# --- Weights of the passes, seen in prompts that come again


def again(step, number, prompt=lambda group: np.full(4, group)):
    step.prompts[:] = [prompt(group) for group in GROUP]
    return {"prompt_ids": [row.tolist() for row in step.prompts]}


def of_weights(versions=(lambda n: n, lambda n: n), rounds=lambda logits, n: logits, size=0.1, **ages):
    """Passes with the weights of the step `ages[name](number)`, and the versions of the engine and the trainer."""
    ages = {"rollout": lambda n: n, "train": lambda n: n} | ages

    def passes(recorder, batch, step, number):
        declared = dict(zip(("rollout", "train"), versions, strict=True))
        for name, age in ages.items():
            if number == 1 and name == "teacher":
                recorder.add_contract("teacher", {"engine": "vllm"})
            logits = moved(moved(table(), 3, size * (age(number) - 1)), 4, 1e-5 * (name != "train"))
            rows = step.scored(rounds(logits, number))
            version = declared[name](number) if name in declared else None
            recorder.add_scores(name, batch, logprobs=rows, policy_version=version)

    return {"passes": passes, "columns": again, "reward": graded, "steps": 16, "longest": 30}


def initial(number):
    return 1


def counted_anew(number):
    """Versions that a resumed run counts from the first one again."""
    return number - 8 * (number > 8)


def rounded(logits, number):
    """Rounded otherwise at each step, as in batches of other shapes."""
    noise = np.random.default_rng(number).normal(0, 2.0**-9, logits.shape)
    return (logits * (1 + noise)).astype(np.float32)


def drained(number):
    """An engine up to two steps ahead, until the trainer uses up its last batches."""
    return min(number - number % 3, 12)


WEIGHTS = {
    "the reference is the policy": (of_weights(reference=lambda n: n), "reference_changes", 3, "it is the policy itself"),
    "the reference follows the policy": (
        of_weights(reference=lambda n: max(n - 4, 1)) | {"hyperparameters": {"sync_ref_model": False, "ref_model_sync_steps": 512}},
        "reference_changes", 7, "updated or reloaded",
    ),
    "the reference is loaded anew": (of_weights(reference=lambda n: 1 + 4 * (n > 5)), "reference_changes", 6, "reloaded"),
    "the teacher changes": (of_weights(teacher=lambda n: 1 + 4 * (n > 5)), "reference_changes", 6, "reloaded"),
    "versions begin anew": (of_weights((counted_anew, counted_anew)), "versions_wrong", 10, "restarted, as after a resume"),
    "a teacher is updated": (of_weights(teacher=lambda n: max(n - 4, 1)), "reference_changes", 7, "reads a context that is not recorded"),
    "no version grows": (of_weights((initial, initial)), "versions_wrong", 3, "train's logprobs differ"),
    "the engine's version does not grow": (of_weights((initial, lambda n: n)), "versions_wrong", 3, "rollout's logprobs differ"),
    "the engine's version is three too low": (
        of_weights((lambda n: n - 3, lambda n: n)), "versions_wrong", None, "rollout's logprobs differ",
    ),
    "the engine is never updated": (
        of_weights((initial, lambda n: n), rollout=initial), "engine_never_updated", 2, "policy version 1",
    ),
    "no update changes the weights": (
        of_weights(rollout=initial, train=initial, reference=initial), "weights_unchanged", None, "grows from 1 to 16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_that_are_not_as_recorded_show_in_prompts_that_come_again(tmp_path, kind):
    run, code, since, text = WEIGHTS[kind]
    checked = check(write(tmp_path / "trace", **run))
    (found,) = checked.data
    assert (found.code, found.is_notice, checked.is_valid) == (code, code != "weights_unchanged", True)
    assert text in data_text(found)
    assert since is None or abs(found.since - since) <= 1
    assert (checked.findings[0].signal == "policy_versions") == (code == "engine_never_updated")


def of_prompts_that_never_come_again(reference):
    """Passes of other prompts at each step, with a reference of the weights of the step `reference(number)`."""
    given = of_weights(reference=reference, size=0.3)
    return given | {
        "columns": lambda step, number: again(step, number, lambda group: np.array([2 + group, 10 + number, group]))
    }


@pytest.mark.parametrize(
    ("reference", "expected"), [(lambda n: 1 if n < 9 else 9, ["reference_replaced"]), (initial, [])]
)
def test_a_reference_that_becomes_the_policy_of_a_later_step_is_seen_by_its_distance(tmp_path, reference, expected):
    found = check(write(tmp_path / "run", **of_prompts_that_never_come_again(reference))).data
    assert [(one.code, one.is_notice) for one in found] == [(code, True) for code in expected]


UNMOVED = {
    "a fixed reference and teacher": of_weights(reference=initial, teacher=initial),
    "rounding in each batch": of_weights(reference=initial, teacher=initial, rounds=rounded),
    "a reference that is replaced as declared": of_weights(reference=lambda n: n)
    | {"hyperparameters": {"ref_model_sync_steps": 4, "sync_ref_model": True}},
    **{
        f"a reference with {name}": of_weights(reference=lambda n: n) | {"hyperparameters": {name: value}}
        for name, value in (
            ("ref_policy_sync_interval", 8),
            ("ema_teacher", 0.9),
            ("distillation.teacher_regularization", "ema"),
        )
    },
    "weights that do not move": of_weights((lambda n: 0, lambda n: 0), size=0.0),
    "a rate of almost 0": of_weights((lambda n: 0, lambda n: 0), size=1e-4, reference=lambda n: n),
    "other images in equal prompts": of_weights((initial, initial), reference=lambda n: n)
    | {"columns": partial(again, prompt=lambda group: np.full(20, group))},
    "an engine updated every four steps": of_weights((lambda n: n - n % 4, lambda n: n), rollout=lambda n: n - n % 4),
    "the last batches of an engine": of_weights((drained, lambda n: n), rollout=drained),
}


@pytest.mark.parametrize("kind", UNMOVED)
def test_weights_as_recorded_are_no_finding(tmp_path, kind):
    checked = check(write(tmp_path / "trace", **UNMOVED[kind]))
    assert (checked.is_valid, checked.data) == (True, ())


def test_an_engine_that_is_no_longer_updated_is_not_excused_by_its_versions(tmp_path):
    stopped = partial(min, 7)
    checked = check(write(tmp_path / "trace", **of_weights((stopped, lambda n: n), rollout=stopped)))
    first = checked.findings[0]
    assert (checked.is_valid, first.signal, first.broken, first.numbers["since"]) == (False, "stopped", "engine", 7)


def of_loss(change, version=lambda n: n):
    def passes(recorder, batch, step, number):
        for name, rows in (("rollout", in_float32(step, number)), ("train", step.scored())):
            recorder.add_scores(name, batch, logprobs=rows, policy_version=number)
        recorder.add_scores("current", batch, logprobs=change(step, number), policy_version=version(number))

    return {"passes": passes, "longest": 30, "reward": graded, "columns": lambda step, n: {"temperature": 0.7}}


def noisy(step, number):
    """Logprobs of a forward with dropout."""
    draw = np.random.default_rng(number)
    return [
        np.minimum(row + draw.normal(0, 0.5, len(row)) * np.minimum(-row, 1), 0).astype(np.float32)
        for row in step.scored()
    ]


def in_batches(step, number):
    """Logprobs of four batches, with an update after each."""
    rows = [step.scored(moved(step.logits, number, 0.1 * part)) for part in range(4)]
    return [rows[at % 4][at] for at in range(len(step.responses))]


LOSS_PASS = {
    "a temperature": (of_loss(lambda step, n: step.scored(step.logits * 0.7)), [("temperature on one side only", False)]),
    "a filter": (
        of_loss(lambda step, n: [np.minimum(row + 0.3, 0) for row in step.scored()]), [("softmax covers fewer tokens", False)],
    ),
    "dropout": (of_loss(noisy), [("random noise", True)]),
    "updates": (of_loss(in_batches), []),
    "newer weights": (of_loss(lambda step, n: step.scored(step.logits * 1.2), lambda n: n + 1), []),
    "rounding": (of_loss(in_float32), []),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOSS_PASS)
def test_the_loss_computes_its_logprobs_as_the_trainer_does(tmp_path, kind):
    run, expected = LOSS_PASS[kind]
    found = [one for one in findings(write(tmp_path / "trace", **run)) if one.code == "reference_apart"]
    assert [(one.title.partition(": ")[2], one.is_notice) for one in found] == [
        (one.title.partition(": ")[2], is_notice)
        for one, (title, is_notice) in zip(found, expected, strict=True)
        if title in one.title
    ]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_teacher_is_checked_like_a_reference(tmp_path, lag):
    def passes(recorder, batch, step, number):
        if number == 1:
            recorder.add_contract("teacher", {"engine": "vllm"})
        other_pass("teacher", later(lag, 1))(recorder, batch, step, number)

    found = findings(write(tmp_path / "trace", passes=passes))
    assert [one.title for one in found] == ["the teacher pass does not match train: shifted by 1 token"] * lag
