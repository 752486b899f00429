"""Acts: the training steps of a scene, as both sides saw them, with a fault and without it.

Shapes: B sequences, P prompt tokens, T response tokens, L layers, S experts.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from act import Act
from engines import Decoded, decode
from faults.fault import Fault, Moment
from language import EOS
from learning import advantages
from scenes import Scene
from sides import Side
from torch import Tensor
from trainers import Scored, score


def perform(scene: Scene, fault: Fault) -> list[Act]:
    """Play every step of a scene with a fault, and without it on the same tokens."""
    chance = random.Random(scene.seed)
    pool = None
    if scene.num_prompts:
        pool = scene.world.prompts(chance, scene.num_prompts)
    return [_act(scene, fault, index, chance, pool) for index in range(scene.num_steps)]


def _act(scene: Scene, fault: Fault, index: int, chance: random.Random, pool: Any) -> Act:
    names, texts, prompts = _prompts(scene, index, chance, pool)
    version = scene.version(index)
    moment = Moment(scene=scene, index=index, version=version, groups=names, prompts=prompts, chance=chance)
    carried = np.broadcast_to(fault.carries(moment), (len(names),)).copy()
    generator = torch.Generator().manual_seed(scene.seed * 100 + index)
    parts = []
    for with_fault in (True, False):
        rows = torch.from_numpy(np.flatnonzero(carried == with_fault))
        if len(rows):
            parts.append((rows, _part(scene, fault if with_fault else Fault.none(), moment, prompts[rows], generator)))
    act = _joined(scene, moment, parts, carried, texts)
    fault.record(act, moment)
    return act


def _prompts(scene: Scene, index: int, chance: random.Random, pool: Any) -> tuple[list[str], list[str], Tensor]:
    if pool is None:
        texts, prompts = scene.world.prompts(chance, scene.num_groups)
        numbers = [index * scene.num_groups + row for row in range(len(texts))]
    else:
        numbers = sorted(chance.sample(range(len(pool[0])), min(scene.num_groups, len(pool[0]))))
        texts, prompts = [pool[0][number] for number in numbers], pool[1][numbers]
    each = scene.group_size
    return (
        [f"prompt-{number}" for number in numbers for _ in range(each)],
        [text for text in texts for _ in range(each)],
        prompts.repeat_interleave(each, 0),
    )


def _part(scene: Scene, fault: Fault, moment: Moment, prompts: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Sample and score some rows with a fault and without it."""
    rollout, train = scene.rollout(moment.version), scene.train(moment.version)
    part = replace(moment, prompts=prompts)
    faulty_rollout, faulty_train = fault.rollout(rollout, part), fault.train(train, part)
    injected = _tool_output(scene, len(prompts), moment.chance)
    done = decode(
        faulty_rollout, prompts, scene.max_tokens, sampling=scene.sampling, generator=generator, injected_BT=injected
    )
    own = _trained(scene, faulty_train, prompts, done)
    clean_own = own if faulty_train is train else _trained(scene, train, prompts, done)
    if scene.replayed_routing:
        rollout = replace(rollout, experts=own.experts)
    clean = done if rollout is faulty_rollout else _again(scene, rollout, prompts, done)
    tail = scene.prompt_tail
    spoken, lengths = torch.cat([prompts[:, prompts.shape[1] - tail :], done.ids], 1), done.lengths + tail
    first = (
        score(rollout, prompts[:, :-tail], spoken, lengths).logprobs[:, :tail] if tail else torch.zeros(len(prompts), 0)
    )
    tool = torch.zeros(spoken.shape, dtype=torch.bool)
    if injected is not None:
        tool = (injected[:, : spoken.shape[1]] >= 0) & (torch.arange(spoken.shape[1])[None] < lengths[:, None])
    width = prompts.shape[1]
    flipped = _flips(done, own if scene.replayed_routing else clean, prompts, done.ids) | _flips(
        own, clean_own, prompts, done.ids
    )
    return {
        "prompts": prompts[:, : width - tail], "ids": spoken, "lengths": lengths, "tool": tool,
        "rollout": torch.cat([first, done.logprobs], 1), "clean_rollout": torch.cat([first, clean.logprobs], 1),
        "train": own.logprobs, "entropy": own.entropy, "clean_train": clean_own.logprobs,
        "flipped": torch.nn.functional.pad(flipped, (tail, 0)),
        "disagreeing": torch.nn.functional.pad(_flips(done, own, prompts, done.ids), (tail, 0)),
    }  # fmt: skip


def _again(scene: Scene, side: Side, prompts: Tensor, done: Decoded) -> Decoded:
    """What an engine thinks of the tokens that were sampled, by the steps that sampled them."""
    return decode(side, prompts, scene.max_tokens, forced_BT=done.ids, lengths_B=done.lengths)


def _trained(scene: Scene, side: Side, prompts: Tensor, done: Decoded) -> Scored:
    """What a trainer thinks of the tokens that it takes for the response."""
    tail = scene.prompt_tail
    start = prompts.shape[1] - tail
    scored = score(side, prompts[:, :start], torch.cat([prompts[:, start:], done.ids], 1), done.lengths + tail)
    if scene.same_engine:
        return replace(scored, logprobs=_again(scene, side, prompts, done).logprobs)
    return scored


def _flips(one: Decoded | Scored, other: Decoded | Scored, prompts: Tensor, ids: Tensor) -> Tensor:
    """[B, T] whether a router chose other experts at the token that a response token was drawn from."""
    if one is other or one.experts is None or other.experts is None:
        return torch.zeros(ids.shape, dtype=torch.bool)
    chosen = [scores.experts[:, prompts.shape[1] - 1 :].sort(-1).values for scores in (one, other)]
    both = min(experts.shape[1] for experts in chosen)  # a side stops where its longest response ends
    flips = (chosen[0][:, :both] != chosen[1][:, :both]).any(-1).any(-1)
    return torch.nn.functional.pad(flips, (0, ids.shape[1] - both))


def _tool_output(scene: Scene, rows: int, chance: random.Random) -> Tensor | None:
    """[B, T] tokens that a tool writes, -1 elsewhere."""
    if not scene.tool_words:
        return None
    out = torch.full((rows, scene.max_tokens), -1)
    language = scene.world.language
    for row in range(rows):
        said = torch.tensor(language.encode(language.tool_output(chance, scene.tool_words)))
        start = chance.randint(2, max(2, scene.max_tokens // 3))
        said = said[: scene.max_tokens - start]
        out[row, start : start + len(said)] = said
    return out


def _joined(scene: Scene, moment: Moment, parts: list[Any], carried: np.ndarray, texts: list[str]) -> Act:
    """Rows of all parts in one batch."""
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
    skip = scene.prompt_tail
    language = scene.world.language
    rewards = np.array(
        [
            language.reward(text, language.decode(ids[skip:].tolist()))
            for text, ids in zip(texts, values["ids"], strict=True)
        ]
    )
    return Act(
        index=moment.index, version=moment.version, groups=moment.groups, carried=carried, rewards=rewards,
        advantages=advantages(torch.tensor(rewards), scene.group_size).numpy(), counted=tokens & ~values["tool"],
        affected=tokens & torch.from_numpy(carried)[:, None], rollout_known=tokens & ~values["tool"],
        train_known=tokens.clone(), **values,
    )  # fmt: skip


def ended(act: Act) -> list[bool]:
    """Which responses end with an end token."""
    last = act.ids.gather(1, (act.lengths - 1).clamp(min=0)[:, None])[:, 0]
    return (last == EOS).tolist()
