"""Score an arm with a rebuilt transformers model, using the trainer's own scoring code or tim-trace's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch

from ..schemas.documents import PACKED_ROWS, PREFIX_TREE, Contract
from ..schemas.errors import CannotReplay, option, warn
from ..schemas.modules import has_experts
from ..tracer import environment
from ..tracer.progress import Advance, unheard
from ..tracer.routing import Router, routers
from ..tracer.staging import to_numpy
from ..tracer.store import first_line
from ..tracer.weights.reader import Tensor
from .arm_option import EXACT
from .arms import DTYPES, Arm
from .backends import kernels, packing, routing, trl, trusted
from .backends import model as models
from .backends.head import Head
from .backends.transformers import ModuleScorer, TransformersScorer, gives_hidden
from .batching import LEFT, PACKED, RIGHT, ForwardBatch, Scored, forwards, packed_batch, recorded_forwards, responses
from .numerics import Numerics
from .prefix_tree import tree_batch
from .recorded import RecordedRow, RecordedRun
from .settings import cublas_workspace, settings, used_settings

_Found = TypeVar("_Found")
LoadKey = tuple[Any, ...]
"""Everything that determines how a model is built. Arms with equal keys share a model."""


class HfScorer:
    keeps_recorded_rows = True
    """True if the as-recorded arm must fail when memory runs out, instead of running fewer rows per forward pass."""
    pass_of_rows = "per forward pass"

    def __init__(self, run: RecordedRun, arm: Arm, contract: Contract, device: str):
        if run.model_factory is not None:
            contract = contract | {"packing": None}  # a factory's model does not support packing
        self.run, self.arm, self.contract, self.device = run, arm, contract, device
        self.substitution: str | None = None
        """Why the recorded attention or experts were replaced (a `trusted.WHY` code), or None."""
        self.numerics = Numerics(arm, contract)
        here = {
            "attention": [name for name, kernel in kernels.KERNELS.items() if not kernel.needs_cuda],
            "dtype": [name for name in DTYPES if name != "tf32"],
        }
        for name, values in here.items() if device == "cpu" else ():
            if (value := getattr(arm, name)) not in (None, *values):
                why = f"{name} {value} needs an NVIDIA GPU, but this replay runs on the CPU"
                raise CannotReplay(f"{why}; use {', '.join(values[:-1])} or {values[-1]}")
        if arm.routing:
            run.check_routing()
        run.check_adapter(arm.adapter)
        if run.model_factory is None:
            trusted.check_scoring(contract)
            self._substitute()
        self._scorer: Any = None
        self._model: Any = None
        self._routers: list[Router] = []
        self.kernels: set[str] = set()
        self.rows_left: int | None = None
        """Maximum rows per forward pass, set once memory has run out."""
        self.around: Callable[[ForwardBatch], AbstractContextManager[Any]] = nullcontext
        self.calls_whole_model = False
        """True if the model's own forward method computes the logits."""

    def _substitute(self) -> None:
        recorded, made = self.contract["model"], self.numerics
        used: dict[str, str] = {}
        if made.attention == str(recorded.get("attention")):
            is_half = made.autocast is not None or made.dtype in ("bfloat16", "float16")
            path, allowed = str(self.run.model.get("class", "")), self.run.allow_kernel
            used["attention"], self.substitution = trusted.attention_here(
                made.attention, path, allowed, is_half=is_half, device=self.device
            )
        if made.experts not in (None, *trusted.EXPERTS):
            used["experts"], self.substitution = "eager", trusted.EXPERTS_UNKNOWN
        if self.substitution is not None:
            what = "experts" if "experts" in used else "attention"
            why = trusted.WHY[self.substitution].format(name=ascii(recorded.get(what)))
            warn(f"arm {self.arm.name}: {why}; {used[what]} is used instead")
        self.numerics = Numerics(self.arm, self.contract | {"model": recorded | used})

    @cached_property
    def _weights(self) -> models.Weights:
        return models.given_weights(self.run.model, self.adapter, Numerics(Arm(), self.contract).dtype)

    @property
    def adapter(self) -> str | None:
        """`off` or `merged`, or None if the model has no adapters or keeps them separate."""
        if not self.run.model.get("adapters"):
            return None
        return self.arm.adapter or ("merged" if self.arm.quantize else None)

    def build(self) -> Any:
        # CUBLAS_WORKSPACE_CONFIG must be set before CUDA starts, which happens when the model moves to the GPU.
        with cublas_workspace(self.contract["torch"], self.arm):
            model = models.build(
                models.without_adapters(self.run.model) if self.adapter else self.run.model,
                dtype=self.numerics.dtype, attention=self.numerics.attention, experts=self._experts,
                device=self.device, factory=self.run.model_factory, allow_kernel=self.run.allow_kernel,
            )  # fmt: skip
        for buffer in model.buffers() if self.numerics.buffers_dtype else ():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(self.numerics.buffers_dtype)
        if (self.arm.padding == PACKED or self.numerics.is_tree) and gives_hidden(model):
            packing.check(model.config)
        return model

    @property
    def _experts(self) -> str | None:
        if self.numerics.experts is None and self.arm.dtype == "fp64" and has_experts(self.run.model["config"]):
            return "eager"
        return self.numerics.experts

    def put(self, model: Any, tensors: Mapping[str, Tensor]) -> None:
        models.load(model, self._weights(tensors), self.numerics.weights_dtype)
        if self.arm.quantize:
            models.quantize(model, self.arm.quantize)

    @property
    def key(self) -> LoadKey:
        made, arm = self.numerics, self.arm
        built = (made.dtype, made.buffers_dtype, made.attention)
        return (arm.dtype, *built, made.uses_trl, arm.lm_head, arm.quantize, self.adapter)

    @property
    def scoring_function(self) -> str:
        if self._scorer is not None:
            return str(self._scorer.name)
        return str(self.contract["scoring_function"]) if self.numerics.uses_trl else TransformersScorer.name

    def attach(self, model: Any, shared: Any = None) -> Any:
        self._model = model
        # Hook neither a compiled backbone nor the exact engine: the backbone would keep the hooks of its first forward
        # pass, and the engine has its own routers.
        if self.run.has_routing and not self.arm.compile and self.arm.engine != EXACT:
            self._routers = routers(model)
            if self.arm.routing and not self._routers:
                raise CannotReplay(
                    f"{type(model).__name__} has no router module that runs before its experts; replay it without "
                    f"routing={self.arm.routing}"
                )
        if self._scorer is None:
            self._scorer = shared if shared is not None and self.numerics.uses_trl else self._make(model)
        return self._scorer

    def detach(self) -> None:
        self._scorer, self._model, self._routers = None, None, []

    def _make(self, model: Any) -> Any:
        arm = self.arm
        if self.numerics.uses_trl and not self.calls_whole_model:
            return trl.TrlScorer(
                model, self.contract, autocast_dtype=self.numerics.autocast, head_in_fp32=self.numerics.head_in_fp32
            )
        head = Head(
            temperature=self.numerics.temperature,
            top_k=arm.top_k,
            top_p=arm.top_p,
            projection_dtype=self.numerics.projection_dtype,
            logits_dtype=self.numerics.logits_dtype,
        )
        if self.calls_whole_model or not gives_hidden(model):
            return ModuleScorer(model, head, replace(arm, attention=None) if gives_hidden(model) else arm)
        return TransformersScorer(
            model, head, cached_tokens=arm.cached_tokens, kv_dtype=arm.kv_dtype,
            autocast_dtype=self.numerics.autocast, compile=arm.compile,
        )  # fmt: skip

    def together(self, rows: list[RecordedRow], of: list[RecordedRow]) -> list[RecordedRow]:
        """Return the rows to run for `rows`: with recorded batches, all in `of` that share a forward pass with them."""
        if not self.arm.keeps_batches:
            return rows
        forwards = {(row.writer, row.forward_id) for row in rows}
        return [row for row in of if (row.writer, row.forward_id) in forwards]

    def first(self, rows: list[RecordedRow]) -> list[RecordedRow]:
        return list(self.batches(rows)[0].rows)

    def score(self, rows: list[RecordedRow], advance: Advance = unheard) -> Scored:
        """Score rows, with half as many per forward pass whenever memory runs out. Raises CannotReplay if it runs out
        in the as-recorded arm, or in an arm that sets the batch shape."""
        return self._within_memory(rows, partial(self._score, rows, advance))

    def _within_memory(self, rows: Sequence[RecordedRow], work: Callable[[], _Found]) -> _Found:
        while True:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if "deterministic" in str(error):  # torch's message names the operation and a workaround
                    raise CannotReplay(f"arm {self.arm.name}: {first_line(error)}") from error
                if not is_out_of_memory(error):
                    raise
                self.rows_left = self._fewer_rows(rows, error)

    def _fewer_rows(self, rows: Sequence[RecordedRow], error: BaseException) -> int:
        largest = self.rows_left or max(len(batch.rows) for batch in self.batches(rows))
        what = f"arm {self.arm.name}: out of memory with {largest} rows {self.pass_of_rows}"
        is_bounded = self.arm.batch_size or self.arm.batch_tokens
        if (self.arm.is_identity and self.keeps_recorded_rows) or is_bounded or largest == 1:
            fewer = option("batch_size", largest // 2)
            if self.arm.batch_tokens:
                fewer = option("batch_tokens", max(self.arm.batch_tokens // 2, 1))
            raise CannotReplay(f"{what}; use {'a machine with more memory' if largest == 1 else fewer}") from error
        digits = "" if self.keeps_recorded_rows else ", so the last digits may differ"
        warn(f"{what}; continuing with {largest // 2}{digits}")
        return largest // 2

    def _score(self, rows: list[RecordedRow], advance: Advance) -> Scored:
        scored = Scored(batches=self.batches(rows))
        with ExitStack() as stack:
            stack.enter_context(settings(self.contract["torch"], self.arm))
            stack.enter_context(kernels.forced(self.arm.attention))
            for batch in scored.batches:
                scored.rows.extend(batch.rows)
                recorded = self.run.routing(batch.rows) if self.arm.routing else None
                with routing.followed(self._routers, batch, recorded, scored.routing), self.around(batch):
                    scored.logprobs.extend(responses(batch, to_numpy(self._given(self._scorer, batch).cpu())))
                advance(sum(row.num_tokens for row in batch.rows))
        return scored

    def batches(self, rows: Sequence[RecordedRow]) -> list[ForwardBatch]:
        if self.numerics.is_tree and self.rows_left is None:
            return [tree_batch(group) for group in recorded_forwards(rows)]
        if self.numerics.is_packed and self.rows_left is None:
            return [
                packed_batch(group, num_pads=max(row.pad_right for row in group)) for group in recorded_forwards(rows)
            ]
        pad_id = self.run.model["config"].get("pad_token_id") or 0
        made = forwards(
            rows, pad_id, batch_size=self.arm.batch_size or self.rows_left, batch_tokens=self.arm.batch_tokens,
            padding=self._padding, device=self.device,
        )  # fmt: skip
        for batch in made if self._attended else ():  # only right-padded batches have attended tokens
            batch.mask_BW[:, : self._attended], batch.mask_BW[:, self._attended :] = 1, 0  # type: ignore[union-attr]
        return made

    @property
    def _attended(self) -> int | None:
        return self.contract.get("attended_tokens") if self._padding == RIGHT and self.arm.engine == "hf" else None

    @property
    def _padding(self) -> str:
        """The arm's padding side, by default left with a KV cache, right with a token limit (right padding needs fewer
        columns), and otherwise the recorded side."""
        is_right = self.arm.batch_tokens is not None or self.contract.get("prompt_padding_side") == RIGHT
        return self.arm.padding or (RIGHT if is_right and self.arm.cached_tokens is None else LEFT)

    def _given(self, score: Callable[[ForwardBatch], Any], batch: ForwardBatch) -> Any:
        with nullcontext() if self.kernels else kernels.observed(self.kernels):
            logprobs_N = score(batch)
        self.kernels = self.kernels or {self.numerics.attention}
        rounded = self.numerics.outputs_dtype
        return logprobs_N if rounded is None else logprobs_N.to(rounded).float()

    def made_by(self) -> Contract:
        arm = self.arm
        changed: Contract = {"attention": self.numerics.attention, "built_in": self.numerics.dtype}
        if self._experts is not None:
            changed["experts"] = self._experts
        if arm.quantize:
            changed["weight_quantization"] = f"{arm.quantize}, groups of {models.GROUP} inputs"
        if self.adapter:
            changed["adapters"] = self.adapter
        if arm.kv_dtype:
            changed["kv_cache"] = f"{arm.kv_dtype}, scale 1"
        used = used_settings(self.contract["torch"], arm)
        rows = arm.batch_size or self.rows_left or self.contract.get("rows_a_forward")
        autocast = "None" if arm.dtype else self.contract["torch"].get("autocast_dtype")
        ranks, given = "ulysses_sequence_parallel_size", self.contract.get("settings")
        whole = {"settings": {**given, ranks: 1}} if isinstance(given, dict) and given.get(ranks) else {}
        compiled = {"torch_compile": arm.compile} if arm.compile or "torch_compile" in self.contract else {}
        return (
            self.contract
            | compiled
            | whole
            | ({"attended_tokens": self._attended} if "attended_tokens" in self.contract else {})
            | {
                "engine": "trl" if self.numerics.uses_trl else "transformers",
                "source": "replay",
                "scoring_function": self.scoring_function,
                "fused_lm_head": self.contract.get("fused_lm_head") if self.numerics.uses_trl else None,
                "arm": arm.changes,
                "temperature": arm.temperature or self.contract.get("temperature"),
                "model": self.contract["model"] | changed,
                "attention_kernels": sorted(self.kernels),
                "rows_a_forward": f"up to {arm.batch_tokens} tokens" if arm.batch_tokens else rows,
                "prompt_padding_side": None if self.numerics.is_tree else self._padding,
                "packing": PREFIX_TREE if self.numerics.is_tree else PACKED_ROWS if self.numerics.is_packed else None,
                "device": environment.device_name(self.device),
                "torch": used | {"autocast_dtype": autocast},
                "versions": environment.numeric_versions(),
            }
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if GPU or host memory ran out. torch has no exception class for running out of host memory."""
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return True
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)
