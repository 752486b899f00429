"""Record vLLM's offline engine (`LLM.generate` and `LLM.chat`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...schemas.documents import Contract
from ...schemas.layout import TRAIN_SPLIT
from ...schemas.passes import ROLLOUT
from .. import environment
from ..weights.identity import tokenizer_identity
from ..writer import Part
from .engine_call import EngineCall, Requested, asking, cut_down, room_for
from .patches import Original, Patches, Points, arguments, version_sentence
from .session import Session
from .vllm_contract import Conditions, engine_contract, sampling_settings

if TYPE_CHECKING:
    from .trl_state import Generation

_POINTS = {
    "__init__": ("init", "vLLM's engine arguments, captured distributions"),
    "generate": ("generate", "rollouts of LLM.generate"),
    "chat": ("generate", "rollouts of LLM.chat"),
}

EMBEDDED = "rollouts from embedded prompts (prompt_embeds) are not recorded, because their token ids are unknown"


def install(session: Session, module: Any) -> Patches:
    hooks = OfflineHooks(session)
    patches = hooked(session, module.LLM, hooks, _POINTS, session.note)
    for name in ("enqueue", "enqueue_chat", "beam_search"):
        patches.wrap(module.LLM, name, partial(hooks.tell_of, name))
    return patches


def hooked(session: Session, engine: type, hooks: EngineHooks, points: Points, told: Callable[[str], None]) -> Patches:
    import vllm

    session.hooks["vllm"], patches = vllm.__version__, Patches()
    missing = patches.wrap_points(engine, hooks, points)
    if sentence := version_sentence("vllm", vllm.__version__, missing):
        told(sentence)
    return patches


class EngineHooks:
    """Hooks around a vLLM engine. Callers get the same results as without hooks."""

    def __init__(self, session: Session):
        self.session = session
        self._contracts: dict[Any, Contract] = {}
        self._described = False

    def _known_contract(self, key: Any, read: Callable[[], Contract]) -> tuple[Contract, bool]:
        is_new = key not in self._contracts
        if is_new:
            self._contracts[key] = read()
        return self._contracts[key], is_new

    def _describe(self, config: Any, get_tokenizer: Callable[[], Any]) -> None:
        if not self._described:
            self._described = True
            self.session.record(Part.TEXTS, self._describe_engine, config, get_tokenizer)

    def _describe_engine(self, config: Any, get_tokenizer: Callable[[], Any]) -> None:
        recorder = self.session.recorder
        recorder.describe(model={"name": config.model, "config": config.hf_config.to_dict()})
        if getattr(config, "skip_tokenizer_init", False):
            self.session.note("tokens are shown as ids, because the engine has no tokenizer (skip_tokenizer_init)")
            return
        tokenizer = get_tokenizer()
        recorder.describe(tokenizer=tokenizer_identity(tokenizer))
        if hasattr(tokenizer, "save_pretrained"):
            recorder.save_tokenizer(tokenizer)


class OfflineHooks(EngineHooks):
    def __init__(self, session: Session):
        super().__init__(session)
        self._arguments: dict[int, dict[str, Any]] = {}

    def init(self, original: Original, llm: Any, *args: Any, **kwargs: Any) -> Any:
        with self.session.guard("vLLM's engine arguments"):
            if self.session.capture.dense:
                kwargs["max_logprobs"] = room_for(self.session.capture, kwargs.get("max_logprobs", 20))
        result = original(llm, *args, **kwargs)
        with self.session.guard("vLLM's engine arguments"):
            self._arguments[id(llm)] = arguments(original, llm, *args, **kwargs)
        self.session.engine_weights.watch(llm)
        return result

    def generate(self, original: Original, llm: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.session.is_recording:
            return original(llm, *args, **kwargs)
        if self.session.generation is not None:
            self.session.engine_weights.tell(self.session.generation.step)
        requested: list[Requested] = []
        with self.session.guard("vLLM's rollouts"):
            prepared, requested = self._ask(original, llm, args, kwargs)
            if requested:
                args, kwargs = (), prepared
        outputs = original(llm, *args, **kwargs)
        if requested:
            given = _cut_down(outputs, requested)
            with self.session.guard("vLLM's rollouts"):
                call = EngineCall(outputs=outputs, requested=requested, given=given, capture=self.session.capture)
                self._record(llm, call, kwargs.get("lora_request"))
        return outputs

    def tell_of(self, name: str, original: Original, llm: Any, *args: Any, **kwargs: Any) -> Any:
        if self.session.is_recording:
            self.session.note(f"rollouts of LLM.{name} are not recorded; use LLM.generate or LLM.chat")
        return original(llm, *args, **kwargs)

    def _ask(
        self, original: Original, llm: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], list[Requested]]:
        """Return the call's arguments with logprobs requested, and each prompt's original request. Return ({}, []) if
        the call will not be recorded."""
        call = arguments(original, llm, *args, **kwargs)
        prompts = call["prompts" if "prompts" in call else "messages"]
        if has_embeddings(prompts):
            self.session.note(EMBEDDED)
            return {}, []
        rows = num_prompts(prompts)
        params = call.get("sampling_params")
        params = llm.get_default_sampling_params() if params is None else params
        each = list(params) if isinstance(params, Sequence) else [params] * rows
        if len(each) != rows or any(not hasattr(p, "logprobs") for p in each):
            return {}, []
        captured = self._captured(rows)
        # Most prompts share one params object, so handle each combination of params and capture flag only once.
        known: dict[tuple[int, bool], tuple[Any, Requested]] = {}
        for old, keep in zip(each, captured, strict=True):
            if (id(old), keep) not in known:
                new = asking(old, self.session.capture if keep else None)
                known[id(old), keep] = new, Requested(params=old, changed=new is not old, captured=keep)
        both = [known[id(old), keep] for old, keep in zip(each, captured, strict=True)]
        is_changed = any(wish.changed for _, wish in known.values())
        call["sampling_params"] = [new for new, _ in both] if is_changed else params
        return call, [wish for _, wish in both]

    def _captured(self, rows: int) -> list[bool]:
        capture = self.session.capture
        generation: Generation | None = self.session.generation
        if not capture.dense:
            return [False] * rows
        if generation is None:
            return [capture.selects(self.session.num_engine_steps + 1, f"{row}-0") for row in range(rows)]
        if generation.engine_calls or len(generation.captured) != rows:
            self.session.note(
                "rollout distributions are captured only if one engine call returns all rows of one process and no "
                "others, which rules out tools, multi-turn rollouts and vLLM tensor parallelism"
            )
            return [False] * rows
        return [bool(keep) for keep in generation.captured]

    def _declare(self, llm: Any, call: EngineCall, lora_requests: Any) -> None:
        params, conditions = call.requested[0].params, Conditions.of((r.params for r in call.requested), lora_requests)
        key = (id(llm), sampling_settings(params), conditions, *environment.torch_settings().values())
        read = partial(engine_contract, llm, self._arguments.get(id(llm), {}), params, conditions)
        contract, is_new = self._known_contract(key, read)
        if is_new:
            for sentence in conditions.sentences:
                self.session.note(sentence)
            if self.session.order.routing and llm.llm_engine.vllm_config.model_config.is_moe:
                self.session.note(
                    "vLLM's router choices (enable_return_routed_experts) are not recorded, because tim-trace cannot "
                    "read them yet"
                )
        self.session.recorder.add_contract(ROLLOUT, contract)

    def _record(self, llm: Any, call: EngineCall, lora_requests: Any) -> None:
        generation: Generation | None = self.session.generation
        if generation is None or generation.split == TRAIN_SPLIT:
            self.session.record(Part.CONTRACTS, self._declare, llm, call, lora_requests)
        if generation is not None:
            generation.engine_calls.append(call)
            return
        if self.session.is_sampled_for_trainer:
            return
        step = self.session.next_engine_step()
        self._describe(llm.llm_engine.vllm_config.model_config, llm.get_tokenizer)
        call.record(self.session.recorder, step=step, names=[str(prompt) for prompt in range(len(call.outputs))])


def _cut_down(outputs: Sequence[Any], requested: Sequence[Requested]) -> list[Any] | None:
    if not any(wish.changed for wish in requested):
        return None
    pairs = zip(outputs, requested, strict=True)
    return [cut_down(completion, wish) for output, wish in pairs for completion in output.outputs]


def has_embeddings(prompts: Any) -> bool:
    given = prompts if isinstance(prompts, (list, tuple)) else (prompts,)
    mappings = {kind for kind in set(map(type, given)) if issubclass(kind, Mapping)}
    return any(type(prompt) in mappings and prompt.get("prompt_embeds") is not None for prompt in given)


def num_prompts(prompts: Any) -> int:
    if isinstance(prompts, (str, dict)) or not isinstance(prompts, Sequence) or not len(prompts):
        return 1
    first = prompts[0]
    return 1 if isinstance(first, int) or (isinstance(first, dict) and "role" in first) else len(prompts)
