"""Faults of which tokens are compared: masks, lengths, and responses that were encoded again."""

from __future__ import annotations

import random
from typing import Any

import torch
from language import EOS
from trainers import score

from .fault import Fault, Moment, spread


def mask(scene: Any, index: int, chance: random.Random) -> Fault:
    """Tokens that the engine did not sample count in the loss."""
    kind = ["tool", "tool", "prompt", "tool", "prompt", "tool scored"][index % 6]
    if kind == "prompt":
        scene.prompt_tail = chance.choice([1, 2, 4, 7])
    else:
        scene.tool_words = int(spread(index, 2, 14, chance))
    scored = kind == "tool scored" or index % 12 == 4

    def record(act: Any, moment: Moment) -> None:
        foreign = act.tool.clone()
        if scene.prompt_tail:
            foreign[:, : scene.prompt_tail] = True
        if not scored:
            act.rollout = act.rollout.masked_fill(foreign, 0.0)
        act.counted = act.tokens.clone()
        act.rollout_known = act.tokens.clone()
        act.affected = foreign & act.tokens

    says = "its own scores of them" if scored else "zeros"
    strength = scene.prompt_tail or scene.tool_words
    return Fault(code="mask", variant=f"{kind.split()[0]} tokens with {says}", strength=strength, record=record)


def lengths(scene: Any, index: int, chance: random.Random) -> Fault:
    """One side has fewer values than the response has tokens."""
    kind = ["null tail", "nan tail", "cut at a length", "end token appended"][index % 4]
    on_train = index % 8 == 5
    share = spread(index, 0.1, 1.0, chance)
    few = max(1, int(scene.max_tokens * chance.uniform(0.1, 0.4)))

    def record(act: Any, moment: Moment) -> None:
        if kind == "end token appended":
            _append_end(act, moment)
            return
        places = torch.arange(act.ids.shape[1])[None]
        some = torch.tensor([chance.random() < share for _ in range(len(act.ids))])
        some[int(act.lengths.argmax())] = True
        if kind == "cut at a length":
            missing = places >= few
        else:
            missing = some[:, None] & (places >= (act.lengths - few).clamp(min=1)[:, None])
        missing = missing & act.tokens
        name = "train" if on_train else "rollout"
        if kind == "nan tail":
            setattr(act, name, getattr(act, name).masked_fill(missing, float("nan")))
        else:
            setattr(act, f"{name}_known", getattr(act, f"{name}_known") & ~missing)
        act.affected = missing

    return Fault(
        code="lengths",
        variant=f"{kind}, {'trainer' if on_train else 'engine'}",
        strength=round(share, 3),
        record=record,
    )


def _append_end(act: Any, moment: Moment) -> None:
    """The trainer scores an end token that the engine has none for."""
    grown = act.lengths + 1
    ids = torch.nn.functional.pad(act.ids, (0, 1))
    ids.scatter_(1, act.lengths[:, None], EOS)
    for name in ("rollout", "clean_rollout", "clean_train", "entropy"):
        setattr(act, name, torch.nn.functional.pad(getattr(act, name), (0, 1)))
    for name in ("rollout_known", "tool"):
        setattr(act, name, torch.nn.functional.pad(getattr(act, name), (0, 1), value=False))
    act.ids, act.lengths = ids, grown
    scored = score(moment.scene.train(moment.version), act.prompts, ids, grown)
    act.train, act.entropy, act.clean_train = scored.logprobs, scored.entropy, scored.logprobs
    act.train_known, act.counted = act.tokens.clone(), act.tokens.clone()
    act.affected = torch.zeros_like(act.tokens).scatter(1, grown[:, None] - 1, True)


def retokenised(scene: Any, index: int, chance: random.Random) -> Fault:
    """The trainer decodes responses to text and encodes it again; the engine's values stay where they were."""
    kind = ["as it is", "joined by a template", "older tokenizer", "as it is"][index % 4]
    filler = [None, 0.0][(index // 3) % 2]

    def record(act: Any, moment: Moment) -> None:
        language = moment.scene.world.language
        rows = [
            _encoded_again(language, ids[:n].tolist(), kind)
            for ids, n in zip(act.ids, act.lengths.tolist(), strict=True)
        ]
        _replace_tokens(act, moment, rows, filler)

    return Fault(code="retokenised", variant=kind, strength=None, record=record)


def _encoded_again(language: Any, ids: list[int], kind: str) -> list[int]:
    end = [EOS] if ids[-1] == EOS else []
    text = language.decode(ids)
    if kind == "joined by a template":
        text = text.replace(" = ", "= ", 1)
    encode = language.encode_with_fewer_merges if kind == "older tokenizer" else language.encode
    return (encode(text) + end) or [EOS]


def _replace_tokens(act: Any, moment: Moment, rows: list[list[int]], filler: float | None) -> None:
    width = max(len(row) for row in rows)
    old_ids, old_lengths, width_before = act.ids, act.lengths, act.ids.shape[1]
    act.lengths = torch.tensor([len(row) for row in rows])
    act.ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    grow = (0, width - width_before)
    for name in ("rollout", "clean_rollout"):
        setattr(act, name, torch.nn.functional.pad(getattr(act, name), grow))
    had = torch.arange(width)[None] < old_lengths[:, None]
    same = torch.nn.functional.pad(old_ids, grow, value=-1) == act.ids
    scored = score(moment.scene.train(moment.version), act.prompts, act.ids, act.lengths)
    engine = score(moment.scene.rollout(moment.version), act.prompts, act.ids, act.lengths)
    act.train, act.entropy, act.clean_train = scored.logprobs, scored.entropy, scored.logprobs
    act.clean_rollout = engine.logprobs
    act.counted, act.train_known = act.tokens.clone(), act.tokens.clone()
    act.tool = torch.zeros_like(act.tokens)
    act.rollout_known = act.tokens & (had | torch.tensor(filler is not None))
    act.rollout = act.rollout.where(had & act.tokens, torch.tensor(0.0))
    act.affected = act.tokens & (~same).cumsum(1).bool()
