"""Record TRL's GRPO, RLOO and AsyncGRPO trainers, and compatible classes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from .patches import Original, Patches, version_sentence
from .session import Session
from .trl_async import AsyncTrainerHooks
from .trl_release import ASYNC_POINTS, POINTS, engine_classes, is_asynchronous, trl_version, unrecorded
from .trl_trainer import TrainerHooks


def install(session: Session, module: Any) -> Patches:
    """Hook transformers' Trainer, so that each trainer class is hooked on first use."""
    patches = Patches()
    patches.wrap(module.Trainer, "__init__", TrainerClasses(session, patches).init)
    return patches


class TrainerClasses:
    def __init__(self, session: Session, patches: Patches):
        self._session = session
        self._patches = patches
        self._hooks = TrainerHooks(session)
        self._async_hooks = AsyncTrainerHooks(session)
        self._seen: weakref.WeakSet[type] = weakref.WeakSet()
        self._hears = False

    def init(self, original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with self._session.guard("a trainer whose functions could not be hooked"):
            if type(trainer) not in self._seen:
                self._seen.add(type(trainer))
                self._hook(type(trainer))
        return original(trainer, *args, **kwargs)

    def _hook(self, trainer_class: type) -> None:
        reason = unrecorded(trainer_class)
        if reason is not None:
            self._patches.wrap(trainer_class, "train", partial(self._train_unrecorded, reason))
            return
        version = trl_version()
        if version:
            self._session.hooks["trl"] = version
        hooks, points = (self._async_hooks, ASYNC_POINTS) if is_asynchronous(trainer_class) else (self._hooks, POINTS)
        missing = self._patches.wrap_points(trainer_class, hooks, points, partial(self._of_class, trainer_class))
        if not self._hears:
            self._hears = True
            _hook_engines(self._session, self._patches)
        if version and (sentence := version_sentence("trl", version, missing)):
            self._session.note(sentence)

    def _of_class(
        self, trainer_class: type, hook: Callable[..., Any], original: Original, trainer: Any, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Run a hook, except on super() calls from a hooked subclass, whose own hook covers them."""
        if type(trainer) is not trainer_class and type(trainer) in self._seen:
            return original(trainer, *args, **kwargs)
        return hook(original, trainer, *args, **kwargs)

    def _train_unrecorded(self, reason: str, original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if unrecorded(type(trainer)) is not None:
            self._session.note(reason)
        return original(trainer, *args, **kwargs)


def _hook_engines(session: Session, patches: Patches) -> None:
    def gather(original: Original, generation: Any) -> Any:
        return session.engine_weights.gathered(original(generation))

    def send(original: Original, client: Any, metadata: Any, named_params: Any) -> Any:
        return original(client, metadata, session.engine_weights.heard(named_params))

    def send_one(original: Original, client: Any, name: str, weights: Any) -> Any:
        ((name, weights),) = session.engine_weights.heard([(name, weights)])
        return original(client, name, weights)

    def generate(original: Original, generation: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(generation, "mode", None) != "server" or getattr(generation, "logprobs", 0) is not None:
            return original(generation, *args, **kwargs)
        # RLOO requests no logprobs from its server, so request them here and remove them from the result.
        generation.logprobs = 0
        try:
            prompt_ids, response_ids, logprobs, *more = original(generation, *args, **kwargs)
        finally:
            generation.logprobs = None
        if session.generation is not None and logprobs is not None:
            session.generation.server_logprobs.append(logprobs)
        return prompt_ids, response_ids, None, *(None if isinstance(value, list) else value for value in more)

    for owner in engine_classes("VLLMGeneration"):
        patches.wrap(owner, "_iter_named_params", gather)
        patches.wrap(owner, "generate", generate)
    for owner in engine_classes("VLLMClient"):
        # TRL before 1.11 sends tensors one by one, so hook the function for a single tensor there.
        patches.wrap(owner, "update_named_params", send) or patches.wrap(owner, "update_named_param", send_one)
