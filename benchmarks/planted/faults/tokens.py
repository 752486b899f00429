"""Faults of which tokens are compared: masks, lengths, and responses that were encoded again."""

from __future__ import annotations

import random
from typing import Any

import torch
from language import EOS
from trainers import score

from .fault import Fault, FaultContext, spread


def mask(scenario: Any, index: int, chance: random.Random) -> Fault:
    """Tokens that the engine did not sample count in the loss."""
    kind = ["tool", "tool", "prompt", "tool", "prompt", "tool scored"][index % 6]
    if kind == "prompt":
        scenario.prompt_tail = chance.choice([1, 2, 4, 7])
    else:
        scenario.tool_words = int(spread(index, 2, 14, chance))
    scored = kind == "tool scored" or index % 12 == 4

    def record(step: Any, context: FaultContext) -> None:
        foreign = step.tool.clone()
        if scenario.prompt_tail:
            foreign[:, : scenario.prompt_tail] = True
        if not scored:
            step.rollout = step.rollout.masked_fill(foreign, 0.0)
        step.counted = step.tokens.clone()
        step.rollout_known = step.tokens.clone()
        step.affected = foreign & step.tokens

    says = "its own scores of them" if scored else "zeros"
    strength = scenario.prompt_tail or scenario.tool_words
    return Fault(code="mask", variant=f"{kind.split()[0]} tokens with {says}", strength=strength, record=record)


def lengths(scenario: Any, index: int, chance: random.Random) -> Fault:
    """One side has fewer values than the response has tokens."""
    kind = ["null tail", "nan tail", "cut at a length", "end token appended"][index % 4]
    on_train = index % 8 == 5
    share = spread(index, 0.1, 1.0, chance)
    few = max(1, int(scenario.max_tokens * chance.uniform(0.1, 0.4)))

    def record(step: Any, context: FaultContext) -> None:
        if kind == "end token appended":
            _append_end(step, context)
            return
        places = torch.arange(step.ids.shape[1])[None]
        some = torch.tensor([chance.random() < share for _ in range(len(step.ids))])
        some[int(step.lengths.argmax())] = True
        if kind == "cut at a length":
            missing = places >= few
        else:
            missing = some[:, None] & (places >= (step.lengths - few).clamp(min=1)[:, None])
        missing = missing & step.tokens
        name = "train" if on_train else "rollout"
        if kind == "nan tail":
            setattr(step, name, getattr(step, name).masked_fill(missing, float("nan")))
        else:
            setattr(step, f"{name}_known", getattr(step, f"{name}_known") & ~missing)
        step.affected = missing

    return Fault(
        code="lengths",
        variant=f"{kind}, {'trainer' if on_train else 'engine'}",
        strength=round(share, 3),
        record=record,
    )


def _append_end(step: Any, context: FaultContext) -> None:
    """The trainer scores an end token that the engine has none for."""
    grown = step.lengths + 1
    ids = torch.nn.functional.pad(step.ids, (0, 1))
    ids.scatter_(1, step.lengths[:, None], EOS)
    for name in ("rollout", "clean_rollout", "clean_train", "entropy"):
        setattr(step, name, torch.nn.functional.pad(getattr(step, name), (0, 1)))
    for name in ("rollout_known", "tool"):
        setattr(step, name, torch.nn.functional.pad(getattr(step, name), (0, 1), value=False))
    step.ids, step.lengths = ids, grown
    scored = score(context.scenario.train(context.version), step.prompts, ids, grown)
    step.train, step.entropy, step.clean_train = scored.logprobs, scored.entropy, scored.logprobs
    step.train_known, step.counted = step.tokens.clone(), step.tokens.clone()
    step.affected = torch.zeros_like(step.tokens).scatter(1, grown[:, None] - 1, True)


def retokenised(scenario: Any, index: int, chance: random.Random) -> Fault:
    """The trainer decodes responses to text and encodes it again; the engine's values stay where they were."""
    kind = ["as it is", "joined by a template", "older tokenizer", "as it is"][index % 4]
    filler = [None, 0.0][(index // 3) % 2]

    def record(step: Any, context: FaultContext) -> None:
        language = context.scenario.model.language
        rows = [
            _encoded_again(language, ids[:n].tolist(), kind)
            for ids, n in zip(step.ids, step.lengths.tolist(), strict=True)
        ]
        _replace_tokens(step, context, rows, filler)

    return Fault(code="retokenised", variant=kind, strength=None, record=record)


def _encoded_again(language: Any, ids: list[int], kind: str) -> list[int]:
    end = [EOS] if ids[-1] == EOS else []
    text = language.decode(ids)
    if kind == "joined by a template":
        text = text.replace(" = ", "= ", 1)
    encode = language.encode_with_fewer_merges if kind == "older tokenizer" else language.encode
    return (encode(text) + end) or [EOS]


def _replace_tokens(step: Any, context: FaultContext, rows: list[list[int]], filler: float | None) -> None:
    width = max(len(row) for row in rows)
    old_ids, old_lengths, width_before = step.ids, step.lengths, step.ids.shape[1]
    step.lengths = torch.tensor([len(row) for row in rows])
    step.ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    grow = (0, width - width_before)
    for name in ("rollout", "clean_rollout"):
        setattr(step, name, torch.nn.functional.pad(getattr(step, name), grow))
    had = torch.arange(width)[None] < old_lengths[:, None]
    same = torch.nn.functional.pad(old_ids, grow, value=-1) == step.ids
    scored = score(context.scenario.train(context.version), step.prompts, step.ids, step.lengths)
    engine = score(context.scenario.rollout(context.version), step.prompts, step.ids, step.lengths)
    step.train, step.entropy, step.clean_train = scored.logprobs, scored.entropy, scored.logprobs
    step.clean_rollout = engine.logprobs
    step.counted, step.train_known = step.tokens.clone(), step.tokens.clone()
    step.tool = torch.zeros_like(step.tokens)
    step.rollout_known = step.tokens & (had | torch.tensor(filler is not None))
    step.rollout = step.rollout.where(had & step.tokens, torch.tensor(0.0))
    step.affected = step.tokens & (~same).cumsum(1).bool()
