"""The contract of vLLM's serving engine, from the process that calls `AsyncLLM.generate`. Its rollouts are the caller's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ...schemas.passes import ROLLOUT
from .calls import arguments
from .patches import Patches
from .session import Session
from .versions import version_sentence
from .vllm_contract import async_contract, sampling_settings

MODEL_PATCHES = ("monkey_patch_model",)
"""Calls that change what the engine's model computes: verl's takes padding of the vocabulary out of its softmax."""

POINTS = {
    "generate": "the contract of the rollouts of AsyncLLM",
    "collective_rpc": "how the caller changed the engine's model",
}


def install(session: Session, module: Any) -> Patches:
    """Hook vLLM's serving engine."""
    import vllm

    session.hooks["vllm"] = vllm.__version__
    hooks, patches = AsyncEngineHooks(session), Patches()
    wrappers: dict[str, Callable[..., Any]] = {"generate": hooks.generate, "collective_rpc": hooks.collective_rpc}
    missing = {
        f"AsyncLLM.{name}": POINTS[name]
        for name, wrapper in wrappers.items()
        if not patches.wrap(module.AsyncLLM, name, wrapper)
    }
    sentence = version_sentence("vllm", vllm.__version__, missing)
    if sentence:
        session.tell(sentence)
    return patches


class AsyncEngineHooks:
    """What runs around an engine's functions; each returns what the original returned."""

    def __init__(self, session: Session):
        self.session = session
        self._model_patches: weakref.WeakKeyDictionary[Any, list[Mapping[str, Any]]] = weakref.WeakKeyDictionary()
        self._known: set[Any] = set()

    def generate(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        if self.session.is_recording:
            with self.session.guard("the contract of vLLM's rollouts"):
                params = arguments(original, engine, *args, **kwargs)["sampling_params"]
                self._add_contract(engine, params)
        return original(engine, *args, **kwargs)

    def collective_rpc(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        with self.session.guard("how vLLM's model was changed"):
            method = args[0] if args else kwargs.get("method")
            if method in MODEL_PATCHES:
                given = dict(kwargs.get("kwargs") or {})
                self._model_patches.setdefault(engine, []).append({"method": method, "arguments": given})
        return original(engine, *args, **kwargs)

    def _add_contract(self, engine: Any, params: Any) -> None:
        """Keep the contract, once for each of its sampling settings, before the caller has the first rollout."""
        settings = tuple(
            (name, value) for name, value in sampling_settings(params) if name not in ("max_tokens", "seed")
        )
        key = (id(engine), settings)
        if key in self._known:
            return
        self._known.add(key)
        contract = async_contract(engine, params, self._model_patches.get(engine, []))
        self.session.recorder.add_contract(ROLLOUT, contract)
        self.session.seal()
