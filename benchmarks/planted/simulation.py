"""Simulate the training steps of a scenario: engine and trainer, with a fault and without it.

Shapes: B sequences, P prompt tokens, T response tokens, L layers, S experts.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from engines import Decoded, decode
from faults.fault import Fault, FaultContext
from language import EOS
from learning import advantages
from scenarios import Scenario
from sides import Side
from step import RecordedStep
from torch import Tensor
from trainers import Scored, score


def simulate(scenario: Scenario, fault: Fault) -> list[RecordedStep]:
    """Sample and score every step of a scenario with a fault, and score the same tokens without it."""
    chance = random.Random(scenario.seed)
    pool = None
    if scenario.num_prompts:
        pool = scenario.model.prompts(chance, scenario.num_prompts)
    return [_step(scenario, fault, index, chance, pool) for index in range(scenario.num_steps)]


def _step(scenario: Scenario, fault: Fault, index: int, chance: random.Random, pool: Any) -> RecordedStep:
    names, texts, prompts = _prompts(scenario, index, chance, pool)
    version = scenario.version(index)
    context = FaultContext(
        scenario=scenario, index=index, version=version, groups=names, prompts=prompts, chance=chance
    )
    carried = np.broadcast_to(fault.carries(context), (len(names),)).copy()
    generator = torch.Generator().manual_seed(scenario.seed * 100 + index)
    parts = []
    for with_fault in (True, False):
        rows = torch.from_numpy(np.flatnonzero(carried == with_fault))
        if len(rows):
            parts.append(
                (rows, _part(scenario, fault if with_fault else Fault.none(), context, prompts[rows], generator))
            )
    step = _joined(scenario, context, parts, carried, texts)
    fault.record(step, context)
    return step


def _prompts(scenario: Scenario, index: int, chance: random.Random, pool: Any) -> tuple[list[str], list[str], Tensor]:
    if pool is None:
        texts, prompts = scenario.model.prompts(chance, scenario.num_groups)
        numbers = [index * scenario.num_groups + row for row in range(len(texts))]
    else:
        numbers = sorted(chance.sample(range(len(pool[0])), min(scenario.num_groups, len(pool[0]))))
        texts, prompts = [pool[0][number] for number in numbers], pool[1][numbers]
    each = scenario.group_size
    return (
        [f"prompt-{number}" for number in numbers for _ in range(each)],
        [text for text in texts for _ in range(each)],
        prompts.repeat_interleave(each, 0),
    )


def _part(
    scenario: Scenario, fault: Fault, context: FaultContext, prompts: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """Sample some rows with a fault and score them with it and without it."""
    rollout, train = scenario.rollout(context.version), scenario.train(context.version)
    part = replace(context, prompts=prompts)
    faulty_rollout, faulty_train = fault.rollout(rollout, part), fault.train(train, part)
    injected = _tool_output(scenario, len(prompts), context.chance)
    done = decode(
        faulty_rollout,
        prompts,
        scenario.max_tokens,
        sampling=scenario.sampling,
        generator=generator,
        injected_BT=injected,
    )
    own = _trained(scenario, faulty_train, prompts, done)
    clean_own = own if faulty_train is train else _trained(scenario, train, prompts, done)
    if scenario.replayed_routing:
        rollout = replace(rollout, experts=own.experts)
    clean = done if rollout is faulty_rollout else _again(scenario, rollout, prompts, done)
    tail = scenario.prompt_tail
    spoken, lengths = torch.cat([prompts[:, prompts.shape[1] - tail :], done.ids], 1), done.lengths + tail
    first = (
        score(rollout, prompts[:, :-tail], spoken, lengths).logprobs[:, :tail] if tail else torch.zeros(len(prompts), 0)
    )
    tool = torch.zeros(spoken.shape, dtype=torch.bool)
    if injected is not None:
        tool = (injected[:, : spoken.shape[1]] >= 0) & (torch.arange(spoken.shape[1])[None] < lengths[:, None])
    width = prompts.shape[1]
    flipped = _flips(done, own if scenario.replayed_routing else clean, prompts, done.ids) | _flips(
        own, clean_own, prompts, done.ids
    )
    return {
        "prompts": prompts[:, : width - tail], "ids": spoken, "lengths": lengths, "tool": tool,
        "rollout": torch.cat([first, done.logprobs], 1), "clean_rollout": torch.cat([first, clean.logprobs], 1),
        "train": own.logprobs, "entropy": own.entropy, "clean_train": clean_own.logprobs,
        "flipped": torch.nn.functional.pad(flipped, (tail, 0)),
        "disagreeing": torch.nn.functional.pad(_flips(done, own, prompts, done.ids), (tail, 0)),
    }  # fmt: skip


def _again(scenario: Scenario, side: Side, prompts: Tensor, done: Decoded) -> Decoded:
    """Return an engine's logprobs of the sampled tokens, decoded one by one as in sampling."""
    return decode(side, prompts, scenario.max_tokens, forced_BT=done.ids, lengths_B=done.lengths)


def _trained(scenario: Scenario, side: Side, prompts: Tensor, done: Decoded) -> Scored:
    """Return a trainer's logprobs of the tokens that it treats as the response."""
    tail = scenario.prompt_tail
    start = prompts.shape[1] - tail
    scored = score(side, prompts[:, :start], torch.cat([prompts[:, start:], done.ids], 1), done.lengths + tail)
    if scenario.same_engine:
        return replace(scored, logprobs=_again(scenario, side, prompts, done).logprobs)
    return scored


def _flips(one: Decoded | Scored, other: Decoded | Scored, prompts: Tensor, ids: Tensor) -> Tensor:
    """Return a [B, T] bool mask that is True where a router chose other experts at the position that predicts it."""
    if one is other or one.experts is None or other.experts is None:
        return torch.zeros(ids.shape, dtype=torch.bool)
    chosen = [scores.experts[:, prompts.shape[1] - 1 :].sort(-1).values for scores in (one, other)]
    both = min(experts.shape[1] for experts in chosen)  # a side stops at the end of its longest response
    flips = (chosen[0][:, :both] != chosen[1][:, :both]).any(-1).any(-1)
    return torch.nn.functional.pad(flips, (0, ids.shape[1] - both))


def _tool_output(scenario: Scenario, rows: int, chance: random.Random) -> Tensor | None:
    """Return [B, T] token ids written by a tool, -1 elsewhere."""
    if not scenario.tool_words:
        return None
    out = torch.full((rows, scenario.max_tokens), -1)
    language = scenario.model.language
    for row in range(rows):
        said = torch.tensor(language.encode(language.tool_output(chance, scenario.tool_words)))
        start = chance.randint(2, max(2, scenario.max_tokens // 3))
        said = said[: scenario.max_tokens - start]
        out[row, start : start + len(said)] = said
    return out


def _joined(
    scenario: Scenario, context: FaultContext, parts: list[Any], carried: np.ndarray, texts: list[str]
) -> RecordedStep:
    """Return the rows of all parts as one step, in their original order."""
    rows = torch.cat([part[0] for part in parts])
    back = torch.argsort(rows)
    width = max(part[1]["ids"].shape[1] for part in parts)

    def whole(name: str) -> Tensor:
        values = [part[1][name] for part in parts]
        if values[0].ndim == 2 and name != "prompts":
            values = [torch.nn.functional.pad(value, (0, width - value.shape[1])) for value in values]
        return torch.cat(values)[back]

    names = (
        "prompts",
        "ids",
        "lengths",
        "rollout",
        "train",
        "entropy",
        "clean_rollout",
        "clean_train",
        "tool",
        "flipped",
        "disagreeing",
    )
    values = {name: whole(name) for name in names}
    tokens = torch.arange(width)[None] < values["lengths"][:, None]
    skip = scenario.prompt_tail
    language = scenario.model.language
    rewards = np.array(
        [
            language.reward(text, language.decode(ids[skip:].tolist()))
            for text, ids in zip(texts, values["ids"], strict=True)
        ]
    )
    return RecordedStep(
        index=context.index, version=context.version, groups=context.groups, carried=carried, rewards=rewards,
        advantages=advantages(torch.tensor(rewards), scenario.group_size).numpy(), counted=tokens & ~values["tool"],
        affected=tokens & torch.from_numpy(carried)[:, None], rollout_known=tokens & ~values["tool"],
        train_known=tokens.clone(), **values,
    )  # fmt: skip


def ended(step: RecordedStep) -> list[bool]:
    """Return a [B] bool mask that is True if the response ends with an end token."""
    last = step.ids.gather(1, (step.lengths - 1).clamp(min=0)[:, None])[:, 0]
    return (last == EOS).tolist()
