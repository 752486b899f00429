"""Which model and tokenizer a vLLM engine has, for the description of a run that no trainer describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .session import Session
from .tokenizer import tokenizer_identity


def describe_engine(session: Session, config: Any, get_tokenizer: Callable[[], Any]) -> None:
    """Describe the run by its engine. `config` is the engine's model_config."""
    recorder = session.recorder
    recorder.describe(model={"name": config.model, "config": config.hf_config.to_dict()})
    if getattr(config, "skip_tokenizer_init", False):
        session.note(
            "the trace has no tokenizer, so that tokens are numbers: the engine has none (skip_tokenizer_init)"
        )
        return
    tokenizer = get_tokenizer()
    recorder.describe(tokenizer=tokenizer_identity(tokenizer))
    if hasattr(tokenizer, "save_pretrained"):
        recorder.save_tokenizer(tokenizer)
