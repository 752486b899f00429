"""Recording vLLM's serving engine, from the process that calls `AsyncLLM.generate`.

Under verl the sequences are the driver's, and the engine's process says what decided their logprobs.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from ...schemas.contract import Contract
from ...schemas.passes import ROLLOUT
from ..writer import Part
from .async_request import ABORT, ERROR, AsyncRequest
from .calls import arguments
from .patches import Patches
from .session import Session
from .versions import version_sentence
from .vllm_contract import Conditions, async_contract, sampling_settings
from .vllm_identity import describe_engine
from .vllm_logprobs import Requested, asking, room_for
from .vllm_prompts import EMBEDDED, has_embeddings

MODEL_PATCHES = ("monkey_patch_model",)
"""Calls that change what the engine's model computes: verl's takes padding of the vocabulary out of its softmax."""

VERL_SERVERS = "verl.workers.rollout.vllm_rollout"
"""The package that a process has imported in which verl samples."""

POINTS = {
    "__init__": "room for captured distributions",
    "generate": "rollouts of AsyncLLM",
    "collective_rpc": "how the caller changed the engine's model",
}

_STREAMED = "rollouts of AsyncLLM.generate whose input is a stream are not recorded: their prompt grows on the way"
_BARE = (
    "logprobs of AsyncLLM.generate are not recorded where the prompt is an EngineCoreRequest that asks for none: its sampling "
    "parameters are its own"
)
_LOST = (
    "completions of AsyncLLM.generate are not recorded where the request ended (aborted, or an error) before its caller was "
    "given a token of them"
)


def install(session: Session, module: Any) -> Patches:
    """Hook vLLM's serving engine."""
    import vllm

    session.hooks["vllm"] = vllm.__version__
    hooks, patches = AsyncEngineHooks(session), Patches()
    wrappers: dict[str, Callable[..., Any]] = {
        "__init__": hooks.init,
        "generate": hooks.generate,
        "collective_rpc": hooks.collective_rpc,
    }
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
    """What runs around an engine's functions. The caller gets what it would have got without.

    A step is a wave of requests: it begins with a request that finds no other under way.
    """

    def __init__(self, session: Session):
        self.session = session
        self._model_patches: weakref.WeakKeyDictionary[Any, list[Mapping[str, Any]]] = weakref.WeakKeyDictionary()
        self._contracts: dict[Any, Contract] = {}
        self._described = False
        self._step = 0
        self._num_running = 0
        self._names: Counter[str] = Counter()

    def init(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        with self.session.guard("vLLM's engine arguments"):
            if self.session.capture.dense and not _is_verl():
                config = arguments(original, engine, *args, **kwargs)["vllm_config"].model_config
                config.max_logprobs = room_for(self.session.capture, config.max_logprobs)
        return original(engine, *args, **kwargs)

    def generate(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.session.is_recording:
            return original(engine, *args, **kwargs)
        try:
            call = arguments(original, engine, *args, **kwargs)
        except TypeError:  # the caller's own, which the original raises, too
            return original(engine, *args, **kwargs)
        if _is_verl():
            with self.session.guard("the contract of vLLM's rollouts"):
                self._declare(engine, call["sampling_params"], call.get("lora_request"))
            return original(engine, *args, **kwargs)
        return self._recorded(original, engine, call)

    def collective_rpc(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        with self.session.guard("how vLLM's model was changed"):
            method = args[0] if args else kwargs.get("method")
            if method in MODEL_PATCHES:
                given = dict(kwargs.get("kwargs") or {})
                self._model_patches.setdefault(engine, []).append({"method": method, "arguments": given})
        return original(engine, *args, **kwargs)

    async def _recorded(
        self, original: Callable[..., Any], engine: Any, call: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """Hand on what the engine gives, and record the request when it has ended."""
        request: AsyncRequest | None = None
        with self.session.guard("vLLM's rollouts"):
            call, request = self._begin(call)
        outputs = original(engine, **call)
        reason = ABORT
        try:
            async for output in outputs:
                if request is not None:
                    given = request.give(output)
                    with self.session.guard("vLLM's rollouts"):
                        request.take(output, given)
                yield output
        except (GeneratorExit, asyncio.CancelledError):
            raise
        except BaseException:
            reason = ERROR
            raise
        finally:
            if request is not None:
                self._num_running -= 1
                with self.session.guard("vLLM's rollouts"):
                    self._record(engine, request, reason)
            await outputs.aclose()

    def _begin(self, call: dict[str, Any]) -> tuple[dict[str, Any], AsyncRequest | None]:
        """Ask the engine for the sampled tokens' logprobs, and for the distributions of a captured request."""
        prompt, params, name = call["prompt"], call["sampling_params"], str(call["request_id"])
        if isinstance(prompt, AsyncGenerator):
            self.session.note(_STREAMED)
            return call, None
        if has_embeddings(prompt):
            self.session.note(EMBEDDED)
            return call, None
        own = getattr(prompt, "sampling_params", None)
        if own is not None:
            asked = params = own
            if params.logprobs is None:
                self.session.note(_BARE)
        if not self._num_running:
            self._step, self._names = self.session.next_engine_step(), Counter()
        self._names[name] += 1
        name = name if self._names[name] == 1 else f"{name}.{self._names[name]}"
        captured = own is None and self.session.capture.selects(self._step, f"{name}-0")
        if own is None:
            asked = asking(params, self.session.capture if captured else None)
            call = call | {"sampling_params": asked}
        requested = Requested.of(params, changed=asked is not params, captured=captured)
        conditions = Conditions.of([params], call.get("lora_request"))
        request = AsyncRequest(name=name, step=self._step, requested=requested, conditions=conditions)
        self._num_running += 1
        return call, request

    def _record(self, engine: Any, request: AsyncRequest, reason: str) -> None:
        if not self.session.is_recording:
            return
        request.end(reason)
        if request.num_lost and not request.is_refused(reason):
            self.session.note(_LOST)
        if not request.outputs:
            return
        if not self._described:
            self._described = True
            config = engine.vllm_config.model_config
            self.session.record(Part.TEXTS, describe_engine, self.session, config, engine.get_tokenizer)
        recorder = self.session.recorder
        self.session.record(Part.CONTRACTS, self._add_contract, engine, request)
        if self.session.is_sampled_for_trainer:
            return
        request.call(self.session.capture).record(recorder, step=request.step, names=[request.name])

    def _add_contract(self, engine: Any, request: AsyncRequest) -> None:
        contract, is_new = self._contract(engine, request.requested.params, request.conditions)
        for sentence in request.conditions.sentences if is_new else ():
            self.session.note(sentence)
        self.session.recorder.add_contract(ROLLOUT, contract)

    def _contract(self, engine: Any, params: Any, conditions: Conditions) -> tuple[Contract, bool]:
        """The engine's contract, the same object for as long as nothing in it changes, and whether it is new."""
        settings = tuple(
            (name, value) for name, value in sampling_settings(params) if name not in ("max_tokens", "seed", "n")
        )
        key = (id(engine), settings, conditions)
        is_new = key not in self._contracts
        if is_new:
            self._contracts[key] = async_contract(engine, params, self._model_patches.get(engine, []), conditions)
        return self._contracts[key], is_new

    def _declare(self, engine: Any, params: Any, lora_request: Any) -> None:
        """Keep the contract, once for each of its sampling settings, before the caller has the first rollout."""
        contract, is_new = self._contract(engine, params, Conditions.of([params], lora_request))
        if is_new:
            self.session.recorder.add_contract(ROLLOUT, contract)
            self.session.seal()


def _is_verl() -> bool:
    return VERL_SERVERS in sys.modules
