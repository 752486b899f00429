"""A scene: everything about one trace but its fault. An act: one training step of it, as both sides saw it.

Shapes: B sequences, P prompt tokens, T response tokens, L layers, S experts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from engines import Side, State, decode, score
from faults.fault import Fault, Moment
from heads import UNCHANGED, Head, Sampling
from language import EOS
from learning import advantages
from torch import Tensor
from worlds import World

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32

NUMERICS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({"dtype": _FP32}, {"dtype": _FP32}),
    "bf16-fp32": ({"dtype": _BF16}, {"dtype": _FP32}),
    "bf16-autocast": ({"dtype": _BF16}, {"dtype": _FP32, "autocast": _BF16}),
    "bf16-bf16": ({"dtype": _BF16, "shards": 2}, {"dtype": _BF16}),
    "fp16-fp32": ({"dtype": _FP16}, {"dtype": _FP32}),
    "fp16-fp16": ({"dtype": _FP16, "shards": 2}, {"dtype": _FP16}),
    "fp32-autocast": ({"dtype": _FP32}, {"dtype": _FP32, "autocast": _BF16}),
    "tf32-fp32": ({"dtype": _FP32, "input_bits": 10}, {"dtype": _FP32}),
}
"""Name -> the engine's numerics and the trainer's: see Side. Two that round alike differ in their batches and shards."""


@dataclass(slots=True, kw_only=True)
class Scene:
    """What a trace is like, apart from its fault."""

    world: World
    seed: int
    numerics: str = "fp32"
    num_steps: int = 4
    num_groups: int = 4
    group_size: int = 8
    sampling: Sampling = UNCHANGED
    first_version: int = 0
    versions_a_step: int = 1
    states: list[State] = field(default_factory=list)
    """Trainer's weights by version."""
    max_tokens: int = 0
    num_prompts: int = 0
    """Prompts that recur from step to step; 0 is new ones each step."""
    tool_words: int = 0
    """Words of a tool's output inside each response; 0 is no tool."""
    prompt_tail: int = 0
    """Last tokens of the prompt that the trainer takes for the response's first."""
    engine_rows: int = 64
    trainer_rows: int = 8
    same_engine: bool = False
    """Whether the trainer scores by the engine's own steps."""

    @property
    def num_rows(self) -> int:
        return self.num_groups * self.group_size

    def version(self, index: int) -> int:
        """Optimizer updates that the trainer's weights have seen at the step of this index."""
        return min(self.first_version + self.versions_a_step * index, len(self.states) - 1)

    def rollout(self, version: int) -> Side:
        """The engine without a fault."""
        numerics = NUMERICS[self.numerics][0]
        return self.world.side(
            self.states[version], attention="eager", rows=self.engine_rows, head=self._head, **numerics
        )

    def train(self, version: int) -> Side:
        """The trainer without a fault."""
        if self.same_engine:
            return self.rollout(version)
        numerics = NUMERICS[self.numerics][1]
        return self.world.side(self.states[version], rows=self.trainer_rows, head=self._head, **numerics)

    @property
    def _head(self) -> Head:
        return Head(sampling=Sampling(temperature=self.sampling.temperature))


@dataclass(slots=True, kw_only=True)
class Act:
    """One step as it is recorded: padded batches, all on the response's tokens."""

    index: int
    version: int
    prompts: Tensor
    """[B, P]"""
    ids: Tensor
    """[B, T]"""
    lengths: Tensor
    """[B]"""
    counted: Tensor
    """[B, T] bool: counts in the loss."""
    rollout: Tensor
    """[B, T] float32 nats"""
    train: Tensor
    """[B, T] float32 nats"""
    entropy: Tensor
    """[B, T] float32 nats, of the train pass."""
    clean_rollout: Tensor
    """[B, T] what the engine would have said without the fault."""
    clean_train: Tensor
    affected: Tensor
    """[B, T] bool: tokens that the fault reaches."""
    groups: list[str]
    rewards: np.ndarray
    """[B]"""
    advantages: np.ndarray
    """[B]"""
    carried: np.ndarray
    """[B] bool: sequences that carry the fault."""
    rollout_known: Tensor
    """[B, T] bool: the engine gave a value."""
    train_known: Tensor
    tool: Tensor
    """[B, T] bool: written by a tool."""
    flipped: Tensor | None = None
    """[B, T] bool: some router chose otherwise than without the fault."""

    @property
    def tokens(self) -> Tensor:
        """[B, T] bool: there is a token."""
        return torch.arange(self.ids.shape[1])[None] < self.lengths[:, None]


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
    version = moment.version
    rollout, train = scene.rollout(version), scene.train(version)
    part = replace_moment(moment, prompts)
    faulty_rollout, faulty_train = fault.rollout(rollout, part), fault.train(train, part)
    injected = _tool_output(scene, len(prompts), moment.chance)
    done = decode(
        faulty_rollout, prompts, scene.max_tokens, sampling=scene.sampling, generator=generator, injected_BT=injected
    )
    given = {"forced_BT": done.ids, "lengths_B": done.lengths}
    clean = done if faulty_rollout is rollout else decode(rollout, prompts, scene.max_tokens, **given)
    tail = scene.prompt_tail
    shown, ids, lengths = prompts, done.ids, done.lengths
    values = {"rollout": done.logprobs, "clean_rollout": clean.logprobs}
    if tail:
        shown, ids, lengths = prompts[:, :-tail], torch.cat([prompts[:, -tail:], ids], 1), lengths + tail
        first = score(rollout, shown, ids, lengths).logprobs[:, :tail]
        values = {name: torch.cat([first, value], 1) for name, value in values.items()}

    def scored(side: Side) -> Any:
        if scene.same_engine:
            return replace_entropy(decode(side, prompts, scene.max_tokens, **given), score(side, shown, ids, lengths))
        return score(side, shown, ids, lengths)

    own = scored(faulty_train)
    clean_own = own if faulty_train is train else scored(train)
    tool = torch.zeros(ids.shape, dtype=torch.bool)
    if injected is not None:
        tool = (injected[:, : ids.shape[1]] >= 0) & (torch.arange(ids.shape[1])[None] < lengths[:, None])
    values |= {
        "prompts": shown, "ids": ids, "lengths": lengths, "tool": tool,
        "train": own.logprobs, "entropy": own.entropy, "clean_train": clean_own.logprobs,
        "flipped": _flips(done, clean, prompts.shape[1], ids.shape) | _flips(own, clean_own, prompts.shape[1], ids.shape),
    }  # fmt: skip
    return values


def replace_moment(moment: Moment, prompts: Tensor) -> Moment:
    return replace(moment, prompts=prompts)


def replace_entropy(decoded: Any, scored: Any) -> Any:
    """The engine's own log-probabilities with entropies of the same weights."""
    scored.logprobs = decoded.logprobs
    return scored


def _flips(one: Any, other: Any, width: int, shape: torch.Size) -> Tensor:
    """[B, T] whether a router chose other experts at the token that a response token was drawn from."""
    flipped = torch.zeros(shape, dtype=torch.bool)
    if one is other or one.experts is None or other.experts is None:
        return flipped
    differs = (one.experts.sort(-1).values != other.experts.sort(-1).values).any(-1).any(-1)[:, width - 1 :]
    flipped[:, : differs.shape[1]] = differs[:, : shape[1]]
    return flipped


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
