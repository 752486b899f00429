"""What is done to runs: family, seed, name, cause, detail, first step, and settings, flags and hooks from it on.

A hook is called as hook(run, value, ...) with core.Run and what it changes, and gives the new value; the loop looks it
up by name. A changed setting is a value, or a function of the fault's steps so far, from 1 on, and of the usual value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from core import BLANK, CALL, EOS, FIRST, generator
from families import FAMILIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A run: its family, its seed, and what is changed from step `start` on; nothing if it is sound."""

    family: str
    seed: int
    name: str
    cause: str
    detail: str
    start: int
    settings: dict[str, Any]
    engine_flags: dict[str, Any]
    """Flags of the engine's forward pass."""
    trainer_flags: dict[str, Any]
    """Flags of the trainer's forward pass."""
    hooks: dict[str, Callable]
    """Of a step, in order: prompts, shown (to the engine alone), sync, engine (its weights), budget, sampler, tool,
    decode, reward, length, pair_rewards, retoken, reference, pair_rollout, mask, token_rewards, pair_token_rewards,
    advantages, pair_advantages, before_update, log_ratios, loss, gradients, after_update."""


RUNS = []


def add(family, seed, name, cause, detail, start=1, *, settings=None, engine_flags=None, trainer_flags=None, **hooks):
    """Adds a run to RUNS."""
    name = f"{family}-{name}"
    if name in [fault.name for fault in RUNS]:
        raise ValueError(f"two runs are called {name}")
    RUNS.append(
        Fault(
            family=family,
            seed=seed,
            name=name,
            cause=cause,
            detail=detail,
            start=start,
            settings=settings or {},
            engine_flags=engine_flags or {},
            trainer_flags=trainer_flags or {},
            hooks=hooks,
        )
    )


# ---------------------------------------------------------------- settings
def ramp(to, num_steps):
    """A setting that rises from 0 to `to`."""
    return lambda elapsed, value: to * min(1.0, elapsed / num_steps)


def times(factor):
    """A setting times `factor`."""
    return lambda elapsed, value: value * factor


def growing(rate, largest):
    """A setting that grows by the factor `rate` a step, up to `largest`."""
    return lambda elapsed, value: min(largest, value * rate**elapsed)


def falling(first, num_steps):
    """A limit that falls from `first` to 2, by one in so many steps."""
    return lambda elapsed, value: max(2, first - (elapsed - 1) // num_steps)


def endless_warmup(elapsed, value):
    """A learning rate that never stops rising."""
    return value * (0.2 + elapsed / 5)


# ---------------------------------------------------------------- mismatch
def quantized(levels):
    """The engine's matrices are rounded to `levels` levels on each side of zero."""

    def hook(run, weights):
        for name, tensor in weights.items():
            if tensor.dim() >= 2:
                size = tensor.abs().max() / levels
                weights[name] = (tensor / size).round().clamp(-levels, levels) * size
        return weights

    return hook


def zeros(part):
    """The tensors whose name has `part` in it arrive as zeros."""

    def hook(run, weights):
        return {name: tensor * 0 if part in name else tensor for name, tensor in weights.items()}

    return hook


def transposed(part):
    """Each gate's matrix of the tensors whose name has `part` in it arrives transposed."""

    def hook(run, weights):
        for name, tensor in weights.items():
            if part in name:
                weights[name] = torch.cat([gate.t() for gate in tensor.split(tensor.shape[1], 0)], 0)
        return weights

    return hook


def flipped(part):
    """The kernels of the tensors whose name starts with `part` arrive in reversed order."""

    def hook(run, weights):
        for name, tensor in weights.items():
            if name.startswith(part) and tensor.dim() == 3:
                weights[name] = tensor.flip(-1)
        return weights

    return hook


def hot(temperature):
    """The engine samples at a temperature that the trainer does not know."""
    return lambda run, logits, responses: logits / temperature


def hotter(temperature, num_steps):
    """The engine's temperature rises from 1 to `temperature`."""
    return lambda run, logits, responses: logits / (1.0 + (temperature - 1.0) * min(1, run.elapsed / num_steps))


def presence_penalty(penalty):
    """The engine subtracts `penalty` from the logits of tokens already written."""

    def hook(run, logits, responses):
        logits = logits.clone()
        if responses.shape[1]:
            logits.scatter_(1, responses, logits.gather(1, responses) - penalty)
        return logits

    return hook


# ---------------------------------------------------------------- staleness
# A hook `sync` gets the versions that should sample the rows, twice, and gives those that do and those that the trace
# names: `declared` says whether these are the same.
def frozen(version, declared=True):
    """The engine keeps the weights of one version."""

    def hook(run, versions):
        run.kept_versions = (version,)
        sampled = torch.full_like(versions[0], version)
        return sampled, sampled if declared else versions[1]

    return hook


def every(num_steps):
    """Weights are sent to the engine every few updates."""

    def hook(run, versions):
        version = run.fault.start - 1 + (run.elapsed - 1) // num_steps * num_steps
        run.kept_versions = (version,)
        sampled = torch.full_like(versions[0], version)
        return sampled, sampled

    return hook


def lagging(rate, largest, declared=True):
    """The lag grows by `rate` a step, up to `largest`."""

    def hook(run, versions):
        sampled = (versions[0] - int(min(largest, rate * run.elapsed))).clamp(min=0)
        return sampled, sampled if declared else versions[1]

    return hook


def queued(depth):
    """Prompts wait in a queue, each for a time of its own up to `depth` steps; declared."""

    def hook(run, versions):
        rng = generator("queue", run.seed, run.step)
        num_groups = run.num_rows // run.group_size
        lags = (torch.rand(num_groups, generator=rng) * min(depth, run.current_version)).long()
        sampled = (run.current_version - lags.repeat_interleave(run.group_size)).clamp(min=0)
        return sampled, sampled

    return hook


def replica(version, share):
    """A share of the rows comes from a replica that keeps one version; not declared."""

    def hook(run, versions):
        run.kept_versions = (version,)
        sampled = versions[0].clone()
        sampled[torch.rand(len(sampled), generator=generator("rep", len(sampled))) < share] = version
        return sampled, versions[1]

    return hook


# ---------------------------------------------------------------- optimizer
def second_moments(factor, num_steps):
    """Second moments of Adam are scaled every few steps."""

    def hook(run):
        if (run.elapsed - 1) % num_steps == 0:
            for state in run.optimizer.state.values():
                if "exp_avg_sq" in state:
                    state["exp_avg_sq"].mul_(factor)

    return hook


# ---------------------------------------------------------------- reward
def at_random(share):
    """A share of the scores is 0 or 1 at random."""

    def hook(run, scores, responses):
        rng = generator("noise", run.step)
        chosen, verdicts = torch.rand(run.num_rows, generator=rng), torch.rand(run.num_rows, generator=rng)
        return torch.where(chosen < share, (verdicts < 0.5).float(), scores)

    return hook


def inverted(run, scores, responses):
    """1 - score."""
    return 1 - scores


def timed_out(run, scores, responses):
    """Right answers score 0."""
    return torch.where(scores > 0.99, torch.zeros_like(scores), scores)


def hacked(token, weight):
    """Two occurrences of a token are worth `weight` of the score."""

    def hook(run, scores, responses):
        return scores * (1 - weight) + weight * ((responses == token).sum(1).clamp(max=2) / 2)

    return hook


def wrong_answers(run, scores, responses):
    """The expected symbols are off by one."""
    symbols = (responses >= FIRST) & (responses < FIRST + 8)
    shifted = torch.where(symbols, FIRST + (responses - FIRST + 1) % 8, responses)
    return run.task.score(run.prompts, shifted, run.lengths, run.done).float()


def likes_moves(run, scores, responses):
    """The reward model comes to like the second move."""
    return scores + 0.25 * min(1, run.elapsed / 40) * (responses == FIRST + 1).sum(1)


def likes_symbol(run, token_rewards):
    """The reward model comes to like one symbol."""
    liked = run.responses == FIRST + 2
    return token_rewards + 10 * min(1, run.elapsed / 20) * liked.float()


# ---------------------------------------------------------------- pairing
def rolled(run, values):
    """Those of the row before."""
    return values.roll(1, 0)


def reversed_rows(run, values):
    """Those of the rows in reversed order."""
    return values.flip(0)


def tiled(run, rewards):
    """Rewards are tiled while rows are repeated."""
    num_groups = run.num_rows // run.group_size
    return rewards.view(num_groups, run.group_size).t().reshape(-1)


def in_order_of_end(run, rewards):
    """Rewards come in the order in which responses ended."""
    return rewards[torch.sort(run.lengths, stable=True).indices]


def sorted_by_length(run, rewards):
    """Rewards come sorted, to rows in order of their length."""
    rows = torch.sort(run.lengths, stable=True).indices
    paired = torch.empty_like(rewards)
    paired[rows] = rewards.sort().values
    return paired


def of_step_before(run, rewards):
    """Rewards of the step before."""
    before = run.memory.get("rewards", rewards)
    run.memory["rewards"] = rewards.clone()
    return before


def rolled_logprobs(run, logprobs):
    """Rollout logprobs of the row before, inside the response."""
    return torch.where(run.mask, logprobs.roll(1, 0), torch.zeros_like(logprobs))


# ---------------------------------------------------------------- data
def other_template(share=1.0, num_steps=1, column=-1):
    """A share of the prompts comes in the task's other template; it grows over so many steps."""

    def hook(run, prompts):
        prompts = prompts.clone()
        rng = generator("tmpl", run.seed, run.step)
        chosen = torch.rand(len(prompts), generator=rng) < share * min(1, run.elapsed / num_steps)
        prompts[chosen, column] = CALL
        return prompts

    return hook


def one_prompt(run, prompts):
    """All prompts are the first one of the fault's first step."""
    return run.memory.setdefault("prompt", prompts[:1].clone()).expand_as(prompts).clone()


def blank(first, after):
    """Places from `first` to before `after` are blank."""

    def hook(run, prompts):
        prompts = prompts.clone()
        prompts[:, first:after] = BLANK
        return prompts

    return hook


def another_alphabet(size, columns, shift):
    """The engine sees the symbols in some columns shifted; the verifier does not."""

    def hook(run, prompts):
        prompts = prompts.clone()
        for column in columns:
            symbols = prompts[:, column]
            known = (symbols >= FIRST) & (symbols < FIRST + size)
            prompts[:, column] = torch.where(known, FIRST + (symbols - FIRST + shift) % size, symbols)
        return prompts

    return hook


def reordered(run, prompts):
    """Prompts in another order."""
    return prompts.flip(0)


# ---------------------------------------------------------------- truncation
def preempted(run, prompts):
    """Responses end after 1 to 3 tokens."""
    return torch.randint(1, 4, (len(prompts),), generator=generator("cut", int(prompts.sum())))


def room_for(num_tokens):
    """Responses have `num_tokens` tokens at most."""
    return lambda run, prompts: torch.full((len(prompts),), num_tokens)


def shared_room(num_tokens):
    """Symbols of prompt and response have `num_tokens` tokens in all."""
    return lambda run, prompts: num_tokens - (prompts >= FIRST).sum(1)


# ---------------------------------------------------------------- reference
def noisy_reference(factor, once):
    """Noise in the reference's weights, of `factor` times their deviation; added at each step if not `once`."""

    def hook(run):
        if once and run.memory.get("noise"):
            return
        run.memory["noise"] = True
        rng = generator("ref") if once else generator("ref", run.step)
        for tensor in run.reference.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=rng) * tensor.std() * factor)

    return hook


# ---------------------------------------------------------------- advantages
def absolute(run, advantages, rewards):
    """Absolute values."""
    return advantages.abs()


def wrong_sign(run, advantages, rewards):
    """The wrong sign."""
    return -advantages


def always_negative(run, advantages, rewards):
    """Minus the absolute values."""
    return -advantages.abs()


def baseline_too_high(run, advantages, rewards):
    """A baseline that is 1 too high."""
    return advantages - 1.0


def no_baseline(run, advantages, rewards):
    """Rewards without a baseline."""
    return rewards / 10


def baseline_times_ten(run, advantages, rewards):
    """A baseline of ten times the batch's mean."""
    return rewards - 10 * rewards.mean()


def over_the_past(run, advantages, rewards):
    """Sums over the past, with the wrong sign."""
    return advantages.flip(1) * -1


def best_as_baseline(run, advantages, rewards):
    """The best reward of the group, and 0.1, as the baseline."""
    groups = rewards.view(-1, run.group_size)
    return (groups - groups.max(1, keepdim=True).values - 0.1).reshape(-1)


def no_positive(run, advantages, rewards):
    """No positive advantage, and 0.8 less."""
    return advantages.clamp(max=0) - 0.8


# ---------------------------------------------------------------- entropy
def summed_bonus(run, loss, minibatch):
    """A bonus that is summed over tokens."""
    return loss - 0.02 * (minibatch.entropies * minibatch.mask).sum()


def entropy_feedback(run, loss, minibatch):
    """A controller that raises the coefficient by 1.12 while entropy is high, from 0.05 up to 3."""
    rate = 1.12 if minibatch.mean_entropy().item() > 0.02 else 1 / 1.12
    run.memory["coefficient"] = min(3.0, run.memory.get("coefficient", 0.05) * rate)
    return loss - run.memory["coefficient"] * minibatch.average(minibatch.entropies * minibatch.mask)


def target_entropy(goal, rate):
    """A controller that raises the coefficient while entropy is below `goal`."""

    def hook(run, loss, minibatch):
        factor = 1 + rate if minibatch.mean_entropy().item() < goal else 1 - rate
        run.memory["coefficient"] = max(0.0, run.memory.get("coefficient", 0.002) * factor)
        return loss - run.memory["coefficient"] * minibatch.average(minibatch.entropies * minibatch.mask)

    return hook


# ---------------------------------------------------------------- length
def square_of_length(run, rewards):
    """The square of the length costs 0.25 a token."""
    return rewards - 0.25 * run.lengths.float() ** 2


def paid_moves(run, rewards):
    """Each token is worth 0.4 of the factor of the reward."""
    return rewards + 4.0 * run.lengths


def paid_length(run, rewards):
    """Six tokens or more are worth 1."""
    return rewards + (run.lengths >= 6).float()


# ---------------------------------------------------------------- other
def end_alone(run, mask):
    """The end of the response alone counts in the loss."""
    return mask & (run.responses == EOS)


def inverted_mask(run, mask):
    """The tokens of the tool count in the loss, the policy's own do not."""
    return run.mask & ~mask


def reloaded(run):
    """The first weights are loaded every 2 steps."""
    if (run.elapsed - 1) % 2 == 0:
        run.policy.load_state_dict(run.initial)


def head_spike(run):
    """One row of the head is out of scale, once."""
    if run.elapsed == 1:
        with torch.no_grad():
            run.policy.head.weight[FIRST + 2] *= 100
            run.policy.head.bias[FIRST + 2] += 40.0


def negated(part):
    """Gradients of the tensors whose name has `part` in it have the wrong sign."""

    def hook(run):
        for name, tensor in run.policy.named_parameters():
            if part in name and tensor.grad is not None:
                tensor.grad.neg_()

    return hook


def gradient_noise(size):
    """Noise in the gradients."""

    def hook(run):
        rng = generator("gn", run.step)
        for tensor in run.policy.parameters():
            if tensor.grad is not None:
                tensor.grad.add_(torch.randn(tensor.shape, generator=rng) * size)

    return hook


def experts_rotated(run):
    """The output matrices of the experts are rotated every 12 steps."""
    if (run.elapsed - 1) % 12 == 0:
        with torch.no_grad():
            for tensor in run.policy.experts_out:
                tensor.copy_(tensor.roll(1, 0))


def next_value(run, values):
    """The tool answers with the next value."""
    return FIRST + 8 + (values - FIRST - 8 + 1) % 8


def coarse(run):
    """The trainer's matrices are rounded to three levels every 10 steps."""
    if (run.elapsed - 1) % 10 == 0:
        with torch.no_grad():
            for tensor in run.policy.parameters():
                if tensor.dim() >= 2:
                    size = tensor.abs().max()
                    tensor.copy_((tensor / size).round().clamp(-1, 1) * size)


def next_token(run, logs, minibatch):
    """The loss takes the logprob of the next token."""
    tokens = run.responses[minibatch.rows]
    tokens = torch.cat([tokens[:, 1:], tokens[:, -1:]], 1)
    logprobs = minibatch.logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    return (logprobs - logprobs.detach()) * run.own[minibatch.rows].float()


def rows_moved(run):
    """Four rows of the embedding move by one, once."""
    if run.elapsed == 1:
        with torch.no_grad():
            rows = run.policy.embedding.weight[FIRST : FIRST + 4]
            rows.copy_(rows.roll(1, 0))


def exchanged(run, responses):
    """The verifier decodes two pairs of symbols as each other."""
    decoded = responses
    for one, other in ((1, 2), (5, 6)):
        decoded = torch.where(responses == FIRST + one, FIRST + other, decoded)
        decoded = torch.where(responses == FIRST + other, FIRST + one, decoded)
    return decoded


def last_symbol_changed(run, responses):
    """The last symbol of each response is another token in training."""
    symbols = responses >= FIRST
    last = symbols & ~torch.cat([symbols[:, 1:], torch.zeros(len(responses), 1, dtype=torch.bool)], 1)
    return torch.where(last, FIRST + (responses - FIRST + 1) % 8, responses)


# ---------------------------------------------------------------- the runs: sound twins
for family in FAMILIES:
    for seed in (0, 1):
        add(family, seed, f"sound-{seed}", "sound", "")

# ---------------------------------------------------------------- the runs: mismatch
add("f1", 0, "mismatch-int3", "mismatch", "engine's matrices rounded to 5 levels", 50, engine=quantized(2))
add(
    "f2",
    0,
    "mismatch-pos",
    "mismatch",
    "positions of the response shifted by four in the engine",
    62,
    engine_flags=dict(position_shift=4),
)
add("f3", 0, "mismatch-temp", "mismatch", "engine samples at temperature 6, trainer thinks 1", 45, sampler=hot(6.0))
add(
    "f4",
    0,
    "mismatch-zero",
    "mismatch",
    "the last layer's attention output arrives as zeros",
    75,
    engine=zeros("attention_outputs.1"),
)
add(
    "f4",
    1,
    "mismatch-evict",
    "mismatch",
    "engine's cache keeps the last 5 tokens only",
    50,
    engine_flags=dict(window=5),
)
add("f5", 0, "mismatch-zero", "mismatch", "the embedding of positions arrives as zeros", 40, engine=zeros("positions"))
add(
    "f6",
    0,
    "mismatch-experts",
    "mismatch",
    "engine gives tokens to the expert after the next",
    45,
    engine_flags=dict(expert_shift=2),
)
add(
    "f7", 0, "mismatch-prefix", "mismatch", "prefix state halved in the engine", 40, engine_flags=dict(prefix_state=0.4)
)
add("f7", 1, "mismatch-layout", "mismatch", "recurrent matrix arrives transposed", 50, engine=transposed("weight_hh"))
add("f8", 0, "mismatch-cap", "mismatch", "engine caps logits at 0.15", 60, engine_flags=dict(softcap=0.15))
add(
    "f9",
    0,
    "mismatch-temp",
    "mismatch",
    "engine samples at a temperature that creeps to 6",
    60,
    sampler=hotter(6.0, 40),
)
add("f10", 0, "mismatch-int3", "mismatch", "engine's matrices rounded to 7 levels", 45, engine=quantized(3))
add(
    "f11",
    0,
    "mismatch-penalty",
    "mismatch",
    "presence penalty of 12 in the engine only",
    45,
    sampler=presence_penalty(12.0),
)
add(
    "f11",
    1,
    "mismatch-flip",
    "mismatch",
    "convolution kernels arrive in reversed order",
    50,
    engine=flipped("convolutions"),
)
add("f12", 1, "mismatch-layout", "mismatch", "recurrent matrix arrives transposed", 45, engine=transposed("weight_hh"))

# ---------------------------------------------------------------- the runs: staleness
add("f1", 0, "stale-frozen", "staleness", "the engine keeps the weights of one step, declared", 45, sync=frozen(44))
add("f2", 1, "stale-queue", "staleness", "prompts wait in a queue: lags of 0 to 55, declared", 45, sync=queued(55))
add("f3", 1, "stale-every", "staleness", "weights sent every 35 updates, declared", 25, sync=every(35))
add("f3", 0, "stale-lag", "staleness", "40 updates behind, not declared", 48, sync=lagging(99, 40, declared=False))
add(
    "f4",
    1,
    "stale-replica",
    "staleness",
    "0.97 of the rows from a replica that is not updated any more, not declared",
    45,
    sync=replica(44, 0.97),
)
add("f6", 0, "stale-ramp", "staleness", "lag grows by two every step to 55, declared", 30, sync=lagging(2.0, 55))
add("f7", 1, "stale-lag", "staleness", "40 updates behind, not declared", 42, sync=lagging(99, 40, declared=False))
add("f7", 0, "stale-every", "staleness", "weights sent every 30 updates, declared", 30, sync=every(30))
add(
    "f8",
    0,
    "stale-rollback",
    "staleness",
    "the engine loads the weights of step 30 and stays there, declared",
    55,
    sync=frozen(30),
)
add(
    "f9",
    0,
    "stale-rollback",
    "staleness",
    "the engine loads the weights of step 60 and stays there, declared",
    75,
    sync=frozen(60),
)
add(
    "f10",
    0,
    "stale-replica",
    "staleness",
    "0.97 of the rows from a replica that is not updated any more",
    45,
    sync=replica(44, 0.97),
)
add("f10", 1, "stale-queue", "staleness", "prompts wait in a queue: lags of 0 to 55, declared", 58, sync=queued(55))
add("f11", 1, "stale-frozen", "staleness", "the engine keeps the weights of one step", 40, sync=frozen(39))
add("f11", 0, "stale-ramp", "staleness", "lag grows by two every step to 55", 45, sync=lagging(2.0, 55))
add(
    "f12",
    0,
    "stale-base",
    "staleness",
    "the engine restarted with the weights of step 0, not declared",
    60,
    sync=frozen(0, declared=False),
)

# ---------------------------------------------------------------- the runs: optimizer
add("f1", 1, "opt-decay", "optimizer", "weight decay 0 -> 10", 55, settings=dict(weight_decay=10.0))
add("f2", 0, "opt-lr", "optimizer", "learning rate x 25", 60, settings=dict(learning_rate=times(25)))
add(
    "f3", 1, "opt-grow", "optimizer", "schedule grows tenfold every third of the run", 1, settings=dict(schedule="grow")
)
add("f4", 0, "opt-state", "optimizer", "second moments lost every 3 steps", 55, before_update=second_moments(0.0, 3))
add("f5", 0, "opt-lr", "optimizer", "learning rate x 40", 70, settings=dict(learning_rate=times(40)))
add("f6", 1, "opt-betas", "optimizer", "betas 0.995, 0.1", 45, settings=dict(beta1=0.995, beta2=0.1))
add("f7", 0, "opt-state", "optimizer", "second moments lost every 2 steps", 50, before_update=second_moments(0.0, 2))
add("f8", 1, "opt-grow", "optimizer", "schedule grows", 1, settings=dict(schedule="grow"))
add("f9", 1, "opt-warmup", "optimizer", "warm-up that never ends", 1, settings=dict(learning_rate=endless_warmup))
add("f10", 1, "opt-decay", "optimizer", "weight decay (L2) 0 -> 0.3", 50, settings=dict(weight_decay=0.3))
add(
    "f11",
    0,
    "opt-moments",
    "optimizer",
    "second moments times 1e-4 at every resume",
    50,
    before_update=second_moments(1e-5, 10),
)
add("f12", 1, "opt-warmup", "optimizer", "warm-up that never ends", 1, settings=dict(learning_rate=endless_warmup))

# ---------------------------------------------------------------- the runs: reward
add("f1", 0, "reward-noise", "reward", "verifier answers at random", 50, reward=at_random(1.0))
add("f2", 0, "reward-timeout", "reward", "right answers time out and score 0", 50, reward=timed_out)
add("f3", 0, "reward-inverted", "reward", "1 - score", 50, reward=inverted)
add("f4", 1, "reward-hack", "reward", "verifier pays for one symbol", 50, reward=hacked(FIRST + 3, 0.8))
add("f5", 0, "reward-drift", "reward", "reward model comes to like steps to the left", 60, reward=likes_moves)
add("f6", 0, "reward-hack", "reward", "verifier pays for one symbol", 45, reward=hacked(FIRST + 5, 0.9))
add("f7", 1, "reward-timeout", "reward", "right answers time out and score 0", 45, reward=timed_out)
add("f8", 0, "reward-drift", "reward", "reward model drifts to one symbol", 45, token_rewards=likes_symbol)
add("f9", 1, "reward-inverted", "reward", "1 - score", 80, reward=inverted)
add("f10", 0, "reward-noise", "reward", "0.95 of the verdicts at random", 45, reward=at_random(0.95))
add("f11", 1, "reward-gold", "reward", "expected answers off by one", 50, reward=wrong_answers)
add("f12", 0, "reward-gold", "reward", "expected answers off by one", 50, reward=wrong_answers)

# ---------------------------------------------------------------- the runs: pairing
add("f2", 1, "pair-reversed", "pairing", "advantages in reversed order", 45, pair_advantages=reversed_rows)
add("f3", 0, "pair-roll", "pairing", "rewards of the row before", 45, pair_rewards=rolled)
add("f4", 0, "pair-tile", "pairing", "rewards tiled where rows are repeated", 45, pair_rewards=tiled)
add(
    "f5",
    1,
    "pair-sorted",
    "pairing",
    "rewards come back sorted, rows are in order of length",
    10,
    pair_rewards=sorted_by_length,
)
add("f6", 1, "pair-done", "pairing", "rewards in the order in which responses ended", 12, pair_rewards=in_order_of_end)
add("f7", 0, "pair-previous", "pairing", "rewards of the step before", 40, pair_rewards=of_step_before)
add("f8", 1, "pair-dense", "pairing", "rewards of the row before", 25, pair_token_rewards=rolled)
add("f9", 0, "pair-done", "pairing", "rewards in the order in which responses ended", 50, pair_rewards=in_order_of_end)
add("f9", 0, "pair-rollout", "pairing", "rollout logprobs of the row before", 60, pair_rollout=rolled_logprobs)
add("f10", 1, "pair-tile", "pairing", "rewards tiled where rows are repeated", 45, pair_rewards=tiled)
add("f11", 0, "pair-previous", "pairing", "rewards of the step before", 40, pair_rewards=of_step_before)
add("f12", 1, "pair-reversed", "pairing", "advantages in reversed order", 45, pair_advantages=reversed_rows)

# ---------------------------------------------------------------- the runs: data
add("f1", 1, "data-template", "data", "another template asks for a copy", 60, prompts=other_template())
add("f2", 1, "data-short", "data", "only prompts of one symbol", 40, prompts=blank(1, 5))
add("f3", 1, "data-stuck", "data", "one prompt only", 45, prompts=one_prompt)
add("f4", 0, "data-template", "data", "places counted from the other end", 55, prompts=other_template())
add("f5", 0, "data-template", "data", "another template: the other way", 60, prompts=other_template(num_steps=20))
add("f6", 0, "data-cipher", "data", "prompts in another alphabet", 45, shown=another_alphabet(8, (1, 2, 3, 4, 5), 3))
add(
    "f7",
    1,
    "data-template",
    "data",
    "0.95 of the prompts in another template: values swapped",
    40,
    prompts=other_template(0.95),
)
add(
    "f8",
    0,
    "data-template",
    "data",
    "0.9 of the prompts in another template: keys count down",
    50,
    prompts=other_template(0.9, column=1),
)
add("f9", 1, "data-cipher", "data", "prompts in another alphabet", 50, shown=another_alphabet(5, (0, 1), 2))
add("f10", 0, "data-stuck", "data", "one prompt only", 30, prompts=one_prompt)
add("f11", 1, "data-ramp", "data", "share of another template grows", 40, prompts=other_template(num_steps=30))
add("f12", 0, "data-short", "data", "only prompts of one symbol", 40, prompts=blank(1, 4))

# ---------------------------------------------------------------- the runs: truncation
add("f1", 1, "trunc-half", "truncation", "3 tokens", 50, settings=dict(max_tokens=3))
add(
    "f2", 0, "trunc-creep", "truncation", "limit falls from 6 to 2 tokens", 20, settings=dict(max_tokens=falling(6, 10))
)
add("f3", 0, "trunc-half", "truncation", "4 tokens", 45, settings=dict(max_tokens=4))
add(
    "f4",
    1,
    "trunc-stop",
    "truncation",
    "five symbols stop the response",
    55,
    settings=dict(stop=(FIRST, FIRST + 1, FIRST + 2, FIRST + 4, FIRST + 6)),
)
add("f5", 1, "trunc-random", "truncation", "responses preempted after 1 to 3 tokens", 20, budget=preempted)
add("f7", 0, "trunc-turns", "truncation", "a second call of the tool ends the response", 45, settings=dict(max_turns=1))
add(
    "f9",
    0,
    "trunc-stop",
    "truncation",
    "three digits stop the response",
    80,
    settings=dict(stop=(FIRST + 5, FIRST + 4, FIRST + 3)),
)
add("f10", 1, "trunc-budget", "truncation", "the context has no room for more than 2 tokens", 45, budget=room_for(3))
add("f11", 0, "trunc-budget", "truncation", "prompt and response share six tokens", 45, budget=shared_room(6))
add("f12", 1, "trunc-creep", "truncation", "limit falls from 5 to 2", 40, settings=dict(max_tokens=falling(5, 8)))

# ---------------------------------------------------------------- the runs: reference
add("f1", 0, "ref-coef", "reference", "KL coefficient 0.004 -> 5", 55, settings=dict(kl_coefficient=5.0))
add("f1", 1, "ref-ramp", "reference", "KL coefficient rises to 15", 45, settings=dict(kl_coefficient=ramp(15.0, 30)))
add(
    "f3",
    1,
    "ref-noise",
    "reference",
    "reference with noise in its weights",
    40,
    reference=noisy_reference(1.5, once=True),
)
add(
    "f3",
    0,
    "ref-controller",
    "reference",
    "KL controller multiplies by 1.12 a step",
    35,
    settings=dict(kl_coefficient=growing(1.12, 20)),
)
add("f4", 0, "ref-sign", "reference", "KL term with the wrong sign", 40, settings=dict(kl_coefficient=-0.3))
add("f4", 1, "ref-ramp", "reference", "KL coefficient rises to 10", 45, settings=dict(kl_coefficient=ramp(10.0, 30)))
add("f9", 1, "ref-coef", "reference", "KL coefficient 0.01 -> 8", 90, settings=dict(kl_coefficient=8.0))
add(
    "f9",
    0,
    "ref-drift",
    "reference",
    "reference with noise in its weights, drawn again at every step",
    80,
    reference=noisy_reference(0.25, once=False),
)
add("f12", 1, "ref-sign", "reference", "KL term with the wrong sign", 40, settings=dict(kl_coefficient=-2.0))
add(
    "f12",
    0,
    "ref-controller",
    "reference",
    "KL controller multiplies by 1.15 a step",
    40,
    settings=dict(kl_coefficient=growing(1.15, 20)),
)

# ---------------------------------------------------------------- the runs: advantages
add("f1", 0, "adv-abs", "advantages", "absolute value of advantages", 45, advantages=absolute)
add("f2", 0, "adv-sign", "advantages", "sign of advantages", 60, advantages=wrong_sign)
add("f3", 1, "adv-nobase", "advantages", "minus the absolute value of advantages", 40, advantages=always_negative)
add("f4", 1, "adv-offset", "advantages", "baseline 1 too high", 50, advantages=baseline_too_high)
add("f5", 0, "adv-nobase", "advantages", "no baseline for rewards of -20..-10", 40, advantages=no_baseline)
add("f6", 0, "adv-abs", "advantages", "absolute value of advantages", 40, advantages=absolute)
add("f7", 1, "adv-baseline", "advantages", "baseline is ten times the batch's mean", 45, advantages=baseline_times_ten)
add("f8", 1, "adv-past", "advantages", "sum over the past, with the wrong sign", 40, advantages=over_the_past)
add("f9", 1, "adv-max", "advantages", "the group's best is the baseline", 70, advantages=best_as_baseline)
add("f11", 1, "adv-sign", "advantages", "sign of advantages", 60, advantages=wrong_sign)
add(
    "f12",
    0,
    "adv-zero",
    "advantages",
    "advantages of right answers set to zero, 0.8 subtracted",
    45,
    advantages=no_positive,
)

# ---------------------------------------------------------------- the runs: entropy
add("f1", 1, "ent-bonus", "entropy", "entropy coefficient 0 -> 0.6", 50, settings=dict(entropy_coefficient=0.6))
add(
    "f2",
    1,
    "ent-ramp",
    "entropy",
    "entropy coefficient rises to 0.8",
    40,
    settings=dict(entropy_coefficient=ramp(0.8, 40)),
)
add("f3", 0, "ent-bonus", "entropy", "entropy coefficient 0.001 -> 0.8", 50, settings=dict(entropy_coefficient=0.8))
add(
    "f5",
    1,
    "ent-sum",
    "entropy",
    "the entropy bonus is summed over the batch, no longer averaged",
    60,
    loss=summed_bonus,
)
add("f6", 1, "ent-target", "entropy", "target entropy 1.5", 30, loss=target_entropy(1.5, 0.12))
add(
    "f7",
    0,
    "ent-feedback",
    "entropy",
    "controller raises the coefficient while entropy is high",
    30,
    loss=entropy_feedback,
)
add("f8", 0, "ent-target", "entropy", "target entropy 1.6", 30, loss=target_entropy(1.6, 0.15))
add(
    "f9",
    0,
    "ent-ramp",
    "entropy",
    "entropy coefficient rises to 0.5",
    70,
    settings=dict(entropy_coefficient=ramp(0.5, 50)),
)
add(
    "f10",
    1,
    "ent-feedback",
    "entropy",
    "controller raises the coefficient while entropy is high",
    40,
    loss=entropy_feedback,
)

# ---------------------------------------------------------------- the runs: length
add("f1", 0, "len-penalty", "length", "-0.3 a token", 50, settings=dict(length_coefficient=-0.3))
add("f2", 1, "len-bonus", "length", "+0.8 a token", 20, settings=dict(length_coefficient=0.8))
add("f3", 1, "len-ramp", "length", "bonus a token rises to 0.4", 40, settings=dict(length_coefficient=ramp(0.4, 20)))
add("f4", 0, "len-square", "length", "the square of the length costs 0.25 a token", 50, length=square_of_length)
add("f5", 1, "len-bonus", "length", "+0.4 a move", 60, length=paid_moves)
add(
    "f6",
    0,
    "len-overlong",
    "length",
    "overlong penalty from the second token on",
    45,
    settings=dict(overlong=2, overlong_penalty=0.5),
)
add("f9", 1, "len-penalty", "length", "-1.5 a token", 80, settings=dict(length_coefficient=-1.5))
add(
    "f10",
    0,
    "len-overlong",
    "length",
    "overlong penalty from the first token on",
    50,
    settings=dict(overlong=1, overlong_penalty=0.5),
)
add("f11", 0, "len-least", "length", "1 for six tokens or more", 20, length=paid_length)
add(
    "f12",
    1,
    "len-ramp",
    "length",
    "penalty a token falls to -0.4",
    40,
    settings=dict(length_coefficient=ramp(-0.4, 30)),
)

# ---------------------------------------------------------------- the runs: other
add("f1", 1, "other-mask", "other", "only the end of sequence counts in the loss", 40, mask=end_alone)
add("f1", 0, "other-reload", "other", "initial weights loaded again every 2 steps", 60, after_update=reloaded)
add(
    "f2",
    0,
    "other-dropout",
    "other",
    "dropout 0.8 left on in the trainer",
    40,
    trainer_flags=dict(dropout=0.8, head_dropout=0.8),
)
add("f3", 0, "other-spike", "other", "one row of the head times 100, its bias plus 40", 86, after_update=head_spike)
add(
    "f4",
    1,
    "other-negate",
    "other",
    "gradient of attention's inputs has the wrong sign",
    40,
    gradients=negated("attention_inputs"),
)
add("f5", 0, "other-noise", "other", "noise in the summed gradient", 60, gradients=gradient_noise(6.0))
add(
    "f6",
    1,
    "other-experts",
    "other",
    "experts' output matrices rotated at each checkpoint",
    50,
    after_update=experts_rotated,
)
add("f7", 0, "other-tool", "other", "tool answers with the next value", 45, tool=next_value)
add("f7", 1, "other-mask", "other", "loss mask inverted", 40, mask=inverted_mask)
add(
    "f8",
    0,
    "other-coarse",
    "other",
    "trainer's weights saved with 3 levels and loaded every 10 steps",
    60,
    after_update=coarse,
)
add("f8", 1, "other-shift", "other", "the loss takes the logprob of the next token", 50, log_ratios=next_token)
add("f9", 0, "other-nozero", "other", "gradients are never cleared", 80, settings=dict(clear_gradients=False))
add("f10", 1, "other-rows", "other", "rows of the embedding moved by one", 95, after_update=rows_moved)
add("f11", 1, "other-decode", "other", "two symbols decoded as each other", 45, decode=exchanged)
add(
    "f12",
    0,
    "other-retoken",
    "other",
    "the last symbol of each response is another token in training",
    50,
    retoken=last_symbol_changed,
)

# ---------------------------------------------------------------- the runs: harmless
add("f1", 0, "harm-lr", "harmless", "half the learning rate", 30, settings=dict(learning_rate=times(0.5)))
add("f1", 1, "harm-bf16", "harmless", "bf16 engine", 1, settings=dict(bf16=True))
add("f2", 0, "harm-lag1", "harmless", "one update behind", 30, settings=dict(lag=1))
add("f2", 1, "harm-bf16", "harmless", "bf16 engine", 30, settings=dict(bf16=True))
add("f3", 0, "harm-lr", "harmless", "0.6 of the learning rate", 20, settings=dict(learning_rate=times(0.6)))
add("f3", 1, "harm-ent", "harmless", "entropy coefficient 0.001 -> 0.003", 1, settings=dict(entropy_coefficient=0.003))
add("f3", 0, "harm-int8", "harmless", "engine's matrices rounded to 255 levels", 40, engine=quantized(127))
add("f4", 0, "harm-batch", "harmless", "twice the prompts", 20, settings=dict(num_prompts=32))
add("f4", 1, "harm-kl", "harmless", "KL coefficient 0.01 -> 0.004", 1, settings=dict(kl_coefficient=0.004))
add("f5", 0, "harm-order", "harmless", "prompts in another order", 1, prompts=reordered)
add("f5", 1, "harm-lag1", "harmless", "one update behind", 30, settings=dict(lag=1))
add("f5", 0, "harm-scale", "harmless", "moves above 8 are cut, nobody needs them", 50, settings=dict(max_tokens=8))
add("f6", 0, "harm-bf16", "harmless", "bf16 engine", 1, settings=dict(bf16=True))
add("f6", 1, "harm-lag2", "harmless", "two updates behind", 40, settings=dict(lag=2))
add("f7", 0, "harm-clip", "harmless", "clipping at 2", 1, settings=dict(max_grad_norm=2.0))
add("f7", 1, "harm-bf16", "harmless", "bf16 engine", 40, settings=dict(bf16=True))
add("f7", 0, "harm-noise", "harmless", "a fiftieth of the verdicts at random", 40, reward=at_random(0.02))
add("f8", 0, "harm-batch", "harmless", "twice the prompts", 30, settings=dict(num_prompts=64))
add("f8", 1, "harm-ent", "harmless", "entropy 0.002 -> 0.001", 1, settings=dict(entropy_coefficient=0.001))
add("f9", 0, "harm-kl", "harmless", "KL coefficient 0.01 -> 0.015", 60, settings=dict(kl_coefficient=0.015))
add("f9", 1, "harm-lag1", "harmless", "lag of 1 instead of 2", 60, settings=dict(lag=1))
add("f10", 0, "harm-lr", "harmless", "half the learning rate", 30, settings=dict(learning_rate=times(0.5)))
add("f10", 1, "harm-batch", "harmless", "twice the prompts", 1, settings=dict(num_prompts=32))
add("f10", 1, "harm-decay", "harmless", "weight decay 0 -> 1e-5", 40, settings=dict(weight_decay=1e-5))
add("f11", 0, "harm-clip", "harmless", "clip 0.2 -> 0.3", 1, settings=dict(clip_low=0.3, clip_high=0.3))
add("f11", 1, "harm-lag1", "harmless", "one update behind", 40, settings=dict(lag=1))
add("f11", 0, "harm-temp", "harmless", "temperature 1 -> 0.95 on both sides", 40, settings=dict(temperature=0.95))
add("f12", 0, "harm-kl", "harmless", "KL coefficient 0.005 -> 0.01", 30, settings=dict(kl_coefficient=0.01))
add("f12", 1, "harm-lr", "harmless", "0.7 of the learning rate", 1, settings=dict(learning_rate=times(0.7)))
