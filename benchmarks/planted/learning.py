"""Train a tiny model: supervised on examples, then by policy gradients on the rewards of its answers.

Shapes: B sequences, P prompt tokens, T response tokens, V vocabulary.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from engines import decode
from heads import Sampling
from language import EOS, PAD, Language
from sides import State
from tiny_models import Recipe, TinyModel
from torch import Tensor

_GROUP = 8
_GROUPS = 4
_LOW_RANK = 4
_LOW_RANK_RATE = 5.0
"""Adapters use a larger learning rate than full weights, as usual."""


def taught(module: Any, language: Language, recipe: Recipe) -> None:
    """Train a module in place on examples of the language, prompt and response."""
    chance = random.Random(recipe.seed + 1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=recipe.teaching_steps)
    module.train()
    for _ in range(recipe.teaching_steps):
        ids = _examples(language, chance, 16, recipe.max_tokens)
        logits = module(input_ids=ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], ignore_index=PAD)
        _update(module.parameters(), optimizer, loss)
        schedule.step()
    module.eval()


def _examples(language: Language, chance: random.Random, count: int, max_tokens: int) -> Tensor:
    rows = []
    for _ in range(count):
        prompt = language.prompt(chance, chance.randint(2, 6))
        said = language.encode(language.response(chance, prompt))[: max_tokens - 1]
        rows.append(torch.tensor([*language.encode(prompt), *said, EOS]))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def reinforced_versions(module: Any, model: TinyModel, count: int) -> list[State]:
    """Return the weights before and after each of `count` policy-gradient updates."""
    chance, generator = _chances(model, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=model.recipe.learning_rate, weight_decay=0.0)
    versions = [_copy(module.state_dict())]
    for _ in range(count):
        batch = _sample(model, versions[-1], chance, generator)
        _update(module.parameters(), optimizer, _loss(module, *batch))
        versions.append(_copy(module.state_dict()))
    return versions


def low_rank_versions(module: Any, model: TinyModel, count: int) -> list[State]:
    """Return merged weights before and after each of `count` updates of a LoRA adapter; the module stays unchanged.

    A weight W becomes W + 2 B A with A of rank 4 (Hu et al. 2021, arXiv 2106.09685), on every matrix inside the layers.
    """
    chance, generator = _chances(model, 3)
    base = _copy(module.state_dict())
    adapted = [
        name for name, value in module.named_parameters()
        if value.ndim == 2 and "embed" not in name and "lm_head" not in name and "gate.weight" not in name
        and "wte" not in name and "wpe" not in name
    ]  # fmt: skip
    down = {name: torch.randn(_LOW_RANK, base[name].shape[1], generator=generator) * 0.1 for name in adapted}
    up = {name: torch.zeros(base[name].shape[0], _LOW_RANK) for name in adapted}
    parameters = [value.requires_grad_() for value in (*down.values(), *up.values())]
    optimizer = torch.optim.AdamW(parameters, lr=_LOW_RANK_RATE * model.recipe.learning_rate, weight_decay=0.0)

    def merged() -> State:
        return {name: base[name] + 2.0 * up[name] @ down[name] for name in adapted}

    versions = [base]
    for _ in range(count):
        batch = _sample(model, versions[-1], chance, generator)
        state = merged()
        loss = _loss(lambda **given: torch.func.functional_call(module, state, kwargs=given), *batch)  # noqa: B023
        _update(parameters, optimizer, loss)
        versions.append(base | _copy(merged()))
    return versions


def _chances(model: TinyModel, salt: int) -> tuple[random.Random, torch.Generator]:
    seed = 1000 * model.recipe.seed + salt
    return random.Random(seed), torch.Generator().manual_seed(seed)


def _sample(
    model: TinyModel, state: State, chance: random.Random, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return prompts [B, P], responses [B, T], lengths [B] and advantages [B] of one step."""
    texts, prompts = model.prompts(chance, _GROUPS)
    prompts = prompts.repeat_interleave(_GROUP, 0)
    done = decode(model.side(state), prompts, model.recipe.max_tokens, sampling=Sampling(), generator=generator)
    rewards = torch.tensor(
        [
            model.language.reward(texts[row // _GROUP], model.language.decode(ids.tolist()))
            for row, ids in enumerate(done.ids)
        ]
    )
    return prompts, done.ids, done.lengths, advantages(rewards, _GROUP)


def advantages(rewards: Tensor, group: int) -> Tensor:
    """Return [B] rewards minus the group's mean, divided by its standard deviation (GRPO, arXiv 2402.03300)."""
    by_group = rewards.view(-1, group)
    spread = by_group.std(1, keepdim=True) if group > 1 else torch.zeros(1)
    return ((by_group - by_group.mean(1, keepdim=True)) / (spread + 1e-4)).view(-1)


def _loss(module: Any, prompts: Tensor, ids: Tensor, lengths: Tensor, advantage: Tensor) -> Tensor:
    """Return the mean of -advantage * logprob over the response tokens."""
    width = prompts.shape[1]
    logits = module(input_ids=torch.cat([prompts, ids], 1)[:, :-1]).logits[:, width - 1 :]
    logprobs = logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    counted = torch.arange(ids.shape[1])[None] < lengths[:, None]
    return -(advantage[:, None] * logprobs)[counted].mean()


def _update(parameters: Any, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    parameters = list(parameters)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


def _copy(state: State) -> State:
    return {name: value.detach().clone() for name, value in state.items()}
