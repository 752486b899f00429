from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from ..schemas.documents import Contract, engine_dtype
from ..schemas.passes import ROLLOUT
from ..tracer import environment
from ..tracer.progress import Advance, unheard
from ..tracer.weights.checkpoints import config_of
from ..tracer.weights.reader import Tensor
from .arms import Arm
from .backends import model as models
from .backends import trusted
from .backends.vllm import VllmEngine
from .batching import Scored
from .numerics import Numerics
from .recorded import RecordedRow, RecordedRun

_PROBE_ROWS = 32


class VllmScorer:
    substitution: str | None = None

    def __init__(self, run: RecordedRun, arm: Arm, contract: Contract, device: str):
        self.run, self.arm, self.contract, self.device = run, arm, contract, device
        self.numerics = Numerics(arm, contract)
        run.check_adapter(arm.adapter)
        self.rollout: Contract = next((found for found in run.arms(ROLLOUT) if found.get("engine") == "vllm"), {})
        self._engine: VllmEngine | None = None

    @cached_property
    def _weights(self) -> models.Weights:
        recorded = Numerics(Arm(), self.contract)
        return models.given_weights(self.run.model, self.arm.adapter or "merged", recorded.dtype)

    @property
    def key(self) -> tuple[Any, ...]:
        arguments = sorted((name, str(value)) for name, value in self._arguments().items())
        return ("vllm", *arguments, self.decodes, self.arm.adapter)

    @property
    def dtype(self) -> str:
        """Engine dtype (torch name): the arm's, else the recorded engine's, else the trainer's."""
        dtype = (None if self.arm.dtype else engine_dtype(self.rollout)) or self.numerics.dtype
        trusted.check_dtype(dtype)
        return dtype

    @property
    def decodes(self) -> bool:
        return self.arm.mode == "decode"

    def _arguments(self) -> dict[str, Any]:
        arguments = trusted.safe_engine_arguments(self.rollout.get("engine_arguments"))
        # `enforce_eager` is kept even if the engine chose it itself, since compiled kernels give different bits.
        model_config = (self.rollout.get("config") or {}).get("model_config") or {}
        if isinstance(is_eager := model_config.get("enforce_eager"), bool):
            arguments["enforce_eager"] = is_eager
        arguments["dtype"] = self.dtype
        # When vLLM scores a sequence, it also samples one token after the end, which needs room too.
        recorded, needed = arguments.get("max_model_len"), self.run.longest + 1
        if recorded is None or (isinstance(recorded, int) and 0 < recorded < needed):
            arguments["max_model_len"] = needed
        changed = {
            "max_model_len": self.arm.max_model_len,
            "gpu_memory_utilization": self.arm.gpu_memory_utilization,
            "max_num_seqs": self.arm.batch_size,
            "enable_prefix_caching": self.arm.prefix_caching and self.arm.prefix_caching == "on",
            "kv_cache_dtype": self.arm.kv_dtype,
            "attention_backend": self.arm.attention_backend,
            "tensor_parallel_size": self.arm.tensor_parallel_size,
        }
        arguments |= {name: value for name, value in changed.items() if value is not None}
        is_chunked = self.arm.mode.startswith("chunked")
        size = self.arm.cached_tokens if is_chunked else self.arm.batch_tokens
        if size is not None:
            # vLLM rejects max_num_seqs above max_num_batched_tokens.
            most = min(size, arguments.get("max_num_seqs") or size, 1 if is_chunked else 256)
            arguments |= {"max_num_batched_tokens": size, "enable_chunked_prefill": True, "max_num_seqs": most}
        return arguments

    def build(self) -> VllmEngine:
        config = trusted.safe_config(config_of(self.run.model))
        return VllmEngine(config, self._arguments(), decodes=self.decodes, device=self.device)

    def put(self, engine: VllmEngine, tensors: Mapping[str, Tensor]) -> None:
        engine.put(self._weights(tensors))

    def attach(self, engine: VllmEngine, shared: Any = None) -> Any:
        self._engine = engine
        return shared

    def detach(self) -> None:
        self._engine = None

    def forget(self) -> None:
        """Empty the prefix cache."""
        assert self._engine is not None
        self._engine.llm.reset_prefix_cache()

    def together(self, rows: list[RecordedRow], of: list[RecordedRow]) -> list[RecordedRow]:
        """Return only `rows`, since vLLM forms its own batches."""
        return rows

    def first(self, rows: list[RecordedRow]) -> list[RecordedRow]:
        return rows[:_PROBE_ROWS]

    def score(self, rows: list[RecordedRow], advance: Advance = unheard) -> Scored:
        """Score rows at the arm's temperature, which vLLM's own logprobs ignore."""
        assert self._engine is not None
        values = self._engine.score(rows, self.numerics.temperature, self.arm.top_k, self.arm.top_p, self.arm.preempt)
        advance(sum(row.num_tokens for row in rows))
        return Scored(rows=rows, logprobs=values)

    def made_by(self) -> Contract:
        from ..tracer.hooks.vllm_contract import Conditions, engine_contract

        assert self._engine is not None
        contract = engine_contract(self._engine.llm, self._engine.arguments, None, Conditions())
        return contract | {
            "source": "replay",
            "arm": self.arm.changes,
            "way": self._engine.way,
            "weights_not_compared": sorted(self._engine.not_compared)[:8],
            "temperature": self.numerics.temperature,
            "linear_layers": "plain, so that weights can be reloaded" if self.device == "cpu" else "vLLM's own",
            "sampling": None,
            "model": {"class": contract["model_class"], "built_in": self.dtype},
            "versions": environment.numeric_versions(),
        }
