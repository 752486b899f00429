"""Tiny transformers, and supervised training on a task before RL begins."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tasks import EOS, PAD, VOCABULARY, Task
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

_TEACHING_ROWS = 64
_MOST_TEACHING = 4000
_RIGHT_ENOUGH = 0.93
"""Share of correct places in a sampled answer at which supervised training ends, so that RL can both gain and lose."""

_OWN: dict[str, dict[str, Any]] = {
    "gpt_neox": {"rotary_pct": 0.5, "num_key_value_heads": 4},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def build(architecture: str) -> Any:
    """Return a model with hidden size 64 and 2 layers, in eval mode, so that nothing in it is random."""
    config = AutoConfig.for_model(
        architecture,
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
        }
        | _OWN.get(architecture, {}),
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def taught(architecture: str, task: Task, seed: int, folder: Path) -> Any:
    """Return a model that gets about half of the places right, loaded from the folder or trained now."""
    path = folder / f"{architecture}-{task.name}-{seed}.pt"
    torch.manual_seed(seed)
    model = build(architecture)
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    _teach(model, task, random.Random(seed))
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
    return model


def _teach(model: Any, task: Task, chance: random.Random) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(_MOST_TEACHING):
        ids_BL, response_BL = _examples(task, chance)
        logits_BLV = model(input_ids=ids_BL[:, :-1], use_cache=False).logits
        target_BL = ids_BL[:, 1:]
        counted_BL = response_BL[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits_BLV[counted_BL], target_BL[counted_BL])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # Probability that a sampled token is correct, given that those before it were.
        if float((-loss.detach()).exp()) > _RIGHT_ENOUGH:
            return


def _examples(task: Task, chance: random.Random) -> tuple[Tensor, Tensor]:
    """Return [B, L] ids, and where they belong to a response."""
    pairs = [task.prompt(chance) for _ in range(_TEACHING_ROWS)]
    width = len(pairs[0][0]) + max(len(answer) for _, answer in pairs)
    ids_BL = torch.full((_TEACHING_ROWS, width), PAD)
    response_BL = torch.zeros(_TEACHING_ROWS, width, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        ids_BL[row, :end] = torch.tensor([*prompt, *answer])
        response_BL[row, len(prompt) : end] = True
    return ids_BL, response_BL
