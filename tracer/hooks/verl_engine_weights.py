"""Compare the weights in verl's trainer and engine, inside the worker that transfers them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..weights.digests import digest
from ..weights.layout import model_parameters, model_tensors
from .engine_weights import NONE, EngineWeights, read_digests
from .models import held_tensors, is_whole
from .patches import Original
from .session import Session
from .verl_contract import FSDP

ASKED = "tim_trace_digests"
"""Name of the method added to vLLM's worker class. The method writes digests of the worker's weights."""


class VerlEngineWeights(EngineWeights):
    def __init__(self, session: Session):
        super().__init__(session)
        self._engine: Any = None
        self._newest: Any = None
        """Training engine of the latest transfer, or None once its comparison is recorded."""
        self._found: dict[str, int] = {}
        self._reads_held = True

    async def transfer(self, original: Original, worker: Any, *args: Any, **kwargs: Any) -> Any:
        self._start(worker)
        try:
            result = await original(worker, *args, **kwargs)
            if self._engine is not None:
                await self._look(worker)
        finally:
            self._engine = None
        return result

    def give(self, original: Original, adapter: Any, *args: Any, **kwargs: Any) -> Any:
        if self._engine is not None and self.is_on:
            if args:
                args = (self.heard(args[0]), *args[1:])
            elif "weights" in kwargs:
                kwargs["weights"] = self.heard(kwargs["weights"])
        return original(adapter, *args, **kwargs)

    def export(self, original: Original, engine: Any, *args: Any, **kwargs: Any) -> Any:
        """For a sharded model, compute the trainer's digests from the tensors that verl gathers."""
        weights, *rest = original(engine, *args, **kwargs)
        return self.gathered(weights) if self._engine is engine else weights, *rest

    def tell_of(self, step: int, version: int) -> None:
        if self._newest is None:
            return
        self._version = version
        self.tell(step)
        self._newest = None

    def _start(self, worker: Any) -> None:
        if not self.is_on:
            return
        with self._guard():
            why = _why_not(worker)
            if why is not None:
                self._level = NONE
                self._session.note(f"the engine's weights are not compared: {why}")
                return
            import torch
            from verl.utils.device import get_device_name

            rollout = worker.config.rollout
            self._dtype = getattr(torch, str(rollout.dtype), None)
            self._device = torch.device(get_device_name())
            # A quantised engine's tensors differ in shape from the trainer's, so they are not compared.
            self._reads_held = not rollout.get("quantization")
            engine = worker.actor.engine
            self._own = {}
            self._is_whole = is_whole(engine.module) or _has_one_rank(engine.module)
            if self._is_whole:
                for name, tensor, _ in _tensors(engine):
                    self._take(name, tensor)
            self._engine = self._newest = self._trainer = engine

    async def _look(self, worker: Any) -> None:
        with self._guard():
            own = read_digests(self._own)
            self._last |= read_digests(self._given)
            self._found = {}
            if not self._is_due(own) or not self._reads_held:
                return
            try:
                self._found = await _held_of(worker.rollout, self._shapes, self._session.order.max_wait)
            except Exception as error:
                self._reads_held = False
                self._session.note(
                    f"the engine's own weights cannot be read ({type(error).__name__}: {error}), but the weights sent "
                    "to it are still compared"
                )

    def _held(self, own: dict[str, int]) -> dict[str, int]:
        return self._found

    def _trainer_tensors(self) -> Iterator[tuple[str, Any, Any]]:
        return _tensors(self._trainer)


def install(session: Session, module: Any) -> None:
    if session.order.engine_weights != NONE:
        setattr(module.vLLMColocateWorkerExtension, ASKED, _write_digests)


def _write_digests(worker: Any, path: str, shapes: Mapping[str, Sequence[int]]) -> None:
    """Write the digests of the engine's weights to `path`. Runs in every vLLM worker, but only rank 0 writes."""
    if worker.rank:
        return
    model, dtype = worker.model_runner.model, worker.model_runner.vllm_config.model_config.dtype
    whole = {name: tuple(shape) for name, shape in shapes.items()}
    held = {name: digest(tensor, dtype) for name, tensor in held_tensors(model, whole)}
    Path(path).write_text(json.dumps(read_digests(held)))


async def _held_of(rollout: Any, shapes: Mapping[str, Sequence[int]], timeout_s: float) -> dict[str, int]:
    # verl's server discards what a worker returns, so the worker passes the digests through a file.
    with tempfile.TemporaryDirectory(prefix="tim-trace-") as folder:
        path = Path(folder) / "held.json"
        await rollout._execute_method(ASKED, timeout=timeout_s, kwargs={"path": str(path), "shapes": shapes})
        return dict(json.loads(path.read_text())) if path.exists() else {}


def _why_not(worker: Any) -> str | None:
    backend = worker.config.rollout.checkpoint_engine.backend
    if not hasattr(worker, "rollout") or backend != "naive":  # "naive" transfers to an engine on the same devices
        return (
            f"verl's checkpoint engine {backend} sends them to other processes; use trainer.v1.trainer_mode=sync to "
            "send them from the worker itself"
        )
    engine = worker.actor.engine
    strategy = getattr(engine.engine_config, "strategy", None)
    if strategy not in FSDP:
        return f"verl's strategy {strategy} uses its own tensor names and shards"
    return (
        "verl transfers an adapter separately from its base model" if hasattr(_inner(engine), "peft_config") else None
    )


def _inner(engine: Any) -> Any:
    return getattr(engine.module, "_fsdp_wrapped_module", engine.module)


def _has_one_rank(model: Any) -> bool:
    meshes = [getattr(parameter, "device_mesh", None) for parameter in model_parameters(model)]
    return all(mesh is not None and mesh.size() == 1 for mesh in meshes)


def _tensors(engine: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield an unsharded model's tensors, as `trainer_tensors` does, under the names that verl uses."""
    from verl.utils.model import convert_weight_keys
    from verl.workers.engine.fsdp import utils

    own = convert_weight_keys(model_tensors(engine.module), _inner(engine))
    whole = ((name, tensor.to_local() if hasattr(tensor, "to_local") else tensor) for name, tensor in own.items())
    if hasattr(utils, "unfuse_moe_params"):  # verl 0.9 and newer
        whole = utils.unfuse_moe_params(whole, engine.model_config.hf_config.model_type)
    for name, tensor in whole:
        yield name, tensor, None
