"""Record vLLM's serving engine (`AsyncLLM.generate`).

Under verl, only the rollout contract is recorded here, because the driver records the sequences.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...schemas.documents import Contract
from ...schemas.passes import ROLLOUT
from ..writer import Part
from .engine_call import DELTA, EngineCall, Requested, asking, cut_down, room_for
from .patches import Original, Patches, arguments
from .session import Session
from .vllm import EMBEDDED, EngineHooks, has_embeddings, hooked
from .vllm_contract import Conditions, async_contract, sampling_settings

ABORT, ERROR = "abort", "error"

MODEL_PATCHES = ("monkey_patch_model",)
"""Remote calls that change the engine's model. verl uses them to keep vocabulary padding out of the softmax."""

VERL_SERVERS = "verl.workers.rollout.vllm_rollout"
"""Module that is imported only if verl samples in this process."""

_POINTS = {
    "__init__": ("init", "captured distributions"),
    "generate": ("generate", "rollouts of AsyncLLM"),
    "collective_rpc": ("collective_rpc", "how the caller changed the engine's model"),
}


def install(session: Session, module: Any) -> Patches:
    return hooked(session, module.AsyncLLM, AsyncEngineHooks(session), _POINTS, session.tell)


class AsyncEngineHooks(EngineHooks):
    """Hooks around `AsyncLLM`. A request that arrives when no other is running starts a new step."""

    def __init__(self, session: Session):
        super().__init__(session)
        self._model_patches: weakref.WeakKeyDictionary[Any, list[Mapping[str, Any]]] = weakref.WeakKeyDictionary()
        self._step = 0
        self._num_running = 0
        self._names: Counter[str] = Counter()

    def init(self, original: Original, engine: Any, *args: Any, **kwargs: Any) -> Any:
        with self.session.guard("vLLM's engine arguments"):
            if self.session.capture.dense and not _is_verl():
                config = arguments(original, engine, *args, **kwargs)["vllm_config"].model_config
                config.max_logprobs = room_for(self.session.capture, config.max_logprobs)
        return original(engine, *args, **kwargs)

    def generate(self, original: Original, engine: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.session.is_recording:
            return original(engine, *args, **kwargs)
        try:
            call = arguments(original, engine, *args, **kwargs)
        except TypeError:  # let the original function report wrong arguments
            return original(engine, *args, **kwargs)
        if _is_verl():
            with self.session.guard("vLLM's rollout contract"):
                self._declare(engine, call["sampling_params"], call.get("lora_request"))
            return original(engine, *args, **kwargs)
        return self._recorded(original, engine, call)

    def collective_rpc(self, original: Original, engine: Any, *args: Any, **kwargs: Any) -> Any:
        with self.session.guard("changes to vLLM's model"):
            method = args[0] if args else kwargs.get("method")
            if method in MODEL_PATCHES:
                given = dict(kwargs.get("kwargs") or {})
                self._model_patches.setdefault(engine, []).append({"method": method, "arguments": given})
        return original(engine, *args, **kwargs)

    async def _recorded(self, original: Original, engine: Any, call: dict[str, Any]) -> AsyncGenerator[Any, None]:
        request: AsyncRequest | None = None
        with self.session.guard("vLLM's rollouts"):
            call, request = self._begin(call)
        outputs = original(engine, **call)
        reason = ABORT
        try:
            async for output in outputs:
                if request is not None:
                    given = [(done, cut_down(done, request.requested)) for done in output.outputs]
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
        prompt, params, name = call["prompt"], call["sampling_params"], str(call["request_id"])
        if isinstance(prompt, AsyncGenerator):
            self.session.note(
                "rollouts from streamed prompts (AsyncLLM.generate) are not recorded, because the prompt keeps growing"
            )
            return call, None
        if has_embeddings(prompt):
            self.session.note(EMBEDDED)
            return call, None
        own = getattr(prompt, "sampling_params", None)
        if own is not None:
            asked = params = own
            if params.logprobs is None:
                self.session.note(
                    "AsyncLLM.generate: an EngineCoreRequest has its own sampling parameters, so no logprobs are "
                    "recorded for it unless it requests them"
                )
        if not self._num_running:
            self._step, self._names = self.session.next_engine_step(), Counter()
        self._names[name] += 1
        name = name if self._names[name] == 1 else f"{name}.{self._names[name]}"
        captured = own is None and self.session.capture.selects(self._step, f"{name}-0")
        if own is None:
            asked = asking(params, self.session.capture if captured else None)
            call = call | {"sampling_params": asked}
        requested = Requested(params=params, changed=asked is not params, captured=captured)
        conditions = Conditions.of([params], call.get("lora_request"))
        request = AsyncRequest(name=name, step=self._step, requested=requested, conditions=conditions)
        self._num_running += 1
        return call, request

    def _record(self, engine: Any, request: AsyncRequest, reason: str) -> None:
        if not self.session.is_recording:
            return
        request.end(reason)
        is_rejected = reason == ERROR and request.prompt_token_ids is None
        if len(request.outputs) < request.requested.params.n and not is_rejected:
            self.session.note(
                "AsyncLLM.generate: completions are not recorded if the request was aborted or failed before the "
                "caller received any token"
            )
        if not request.outputs:
            return
        self._describe(engine.vllm_config.model_config, engine.get_tokenizer)
        recorder = self.session.recorder
        self.session.record(Part.CONTRACTS, self._add_contract, engine, request)
        if self.session.is_sampled_for_trainer:
            return
        call = EngineCall(outputs=[request], requested=[request.requested], given=None, capture=self.session.capture)
        call.record(recorder, step=request.step, names=[request.name])

    def _add_contract(self, engine: Any, request: AsyncRequest) -> None:
        contract, is_new = self._contract(engine, request.requested.params, request.conditions)
        for sentence in request.conditions.sentences if is_new else ():
            self.session.note(sentence)
        self.session.recorder.add_contract(ROLLOUT, contract)

    def _contract(self, engine: Any, params: Any, conditions: Conditions) -> tuple[Contract, bool]:
        key = (id(engine), sampling_settings(params, of_request=False), conditions)
        read = partial(async_contract, engine, params, self._model_patches.get(engine, []), conditions)
        return self._known_contract(key, read)

    def _declare(self, engine: Any, params: Any, lora_request: Any) -> None:
        contract, is_new = self._contract(engine, params, Conditions.of([params], lora_request))
        if is_new:
            self.session.recorder.add_contract(ROLLOUT, contract)
            self.session.seal()


@dataclass(slots=True, kw_only=True)
class GivenCompletion:
    """A completion as received by the caller. Delta outputs append tokens, and other outputs replace them."""

    index: int
    num_tokens: int = 0
    tokens: Any = ()
    """May have more than `num_tokens` token ids, because vLLM may still be appending to this list."""
    positions: Any = None
    finish_reason: str | None = None

    @property
    def token_ids(self) -> Sequence[int]:
        return list(self.tokens[: self.num_tokens])

    @property
    def logprobs(self) -> Any:
        return None if self.positions is None else self.positions[: self.num_tokens]

    def add(self, completion: Any, logprobs: Any) -> None:
        self.tokens = [*self.tokens] if self.num_tokens == 0 else self.tokens
        self.tokens.extend(completion.token_ids)
        if logprobs is not None:
            self.positions = [] if self.positions is None else self.positions
            self.positions.extend(logprobs)
        self.num_tokens = len(self.tokens)

    def replace(self, completion: Any, logprobs: Any) -> None:
        self.tokens, self.positions, self.num_tokens = completion.token_ids, logprobs, len(completion.token_ids)


@dataclass(slots=True, kw_only=True)
class AsyncRequest:
    name: str
    step: int
    requested: Requested
    conditions: Conditions
    prompt_token_ids: Sequence[int] | None = None
    _completions: dict[int, GivenCompletion] = field(default_factory=dict)

    def take(self, output: Any, given: Sequence[tuple[Any, Any]]) -> None:
        self.prompt_token_ids = output.prompt_token_ids
        is_delta = self.requested.params.output_kind.name == DELTA
        for completion, logprobs in given:
            held = self._completions.setdefault(completion.index, GivenCompletion(index=completion.index))
            (held.add if is_delta else held.replace)(completion, logprobs)
            held.finish_reason = completion.finish_reason

    def end(self, reason: str) -> None:
        for held in self._completions.values():
            held.finish_reason = held.finish_reason or reason

    @property
    def outputs(self) -> list[GivenCompletion]:
        held = (self._completions[index] for index in sorted(self._completions))
        return [each for each in held if each.num_tokens or each.finish_reason not in (ABORT, ERROR)]


def _is_verl() -> bool:
    return VERL_SERVERS in sys.modules
