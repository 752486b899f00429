"""Compare the engine's weights with the trainer's by digest."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...schemas.layout import ENGINE_WEIGHTS
from ..weights.digests import Digest, digest, resolved
from ..writer import Part
from .models import held_tensors, is_quantised, is_whole, trained_model, trainer_tensors
from .patches import Original, Patches
from .vllm_contract import model_runner

GIVEN, HELD, NONE = "given", "held", "none"

CASTS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16")
"""dtypes to try when the engine's weights may be a rounded copy of the trainer's."""

_ROW_BYTES = 256
_NUM_ROWS = 64
_MAX_VALUES = 256  # maximum number of distinct values in an 8-bit dtype
_MIN_TIMES_MORE = 2
"""Minimum ratio of distinct values per row, original to copy, for the copy to count as rounded."""
_MIN_COSINE_SCORE = 6.0
"""Minimum z-score of the cosine similarity between a copy and its original, relative to unrelated tensors."""


class EngineWeights:
    """Compares the trainer's weights with those of an engine in the same process.

    Each policy version is compared when the engine first samples with it for training. The engine's own copy is checked
    at exponentially growing intervals, and whenever the weights it received differ from the trainer's.
    """

    def __init__(self, session: Any):
        self._session = session
        self._level = session.order.engine_weights
        self._hooked: set[type] = set()
        self._model: Any = None
        self._dtype: Any = None
        self._device: Any = None
        self._is_loading = False
        self.restart()

    def restart(self) -> None:
        self._version: int | None = None
        self._told: int | None = None
        self._num_told = 0
        self._trainer: Any = None
        self._is_whole = False
        self._own: dict[str, Digest] = {}
        self._unmerged: dict[str, Digest] = {}
        self._given: dict[str, Digest] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._last: dict[str, int] = {}
        self._known: dict[str, set[int]] = {}

    @property
    def is_on(self) -> bool:
        return self._level != NONE and bool(self._session.is_recording)

    def _guard(self) -> Any:
        return self._session.guard(Part.ENGINE_WEIGHTS, otherwise=self._end)

    def _end(self, error: Exception) -> None:
        self._level = NONE
        self._session.recorder.writer.end(Part.ENGINE_WEIGHTS, error)

    def watch(self, llm: Any) -> None:
        if not self.is_on:
            return
        with self._guard():
            runner = model_runner(llm)
            model = None if runner is None else runner.get_model()
            if model is None:
                return
            if type(model) not in self._hooked and Patches().wrap(type(model), "load_weights", self._load):
                self._hooked.add(type(model))
            self._model = weakref.ref(model)
            self._dtype = llm.llm_engine.vllm_config.model_config.dtype
            self._device = next(model.parameters()).device

    def _load(self, original: Original, model: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_loading or not self.is_on or self._model is None or self._model() is not model:
            return original(model, weights, *args, **kwargs)
        self._is_loading = True
        try:
            if isinstance(weights, (list, tuple)):
                for name, tensor in weights:
                    self._hear(name, tensor)
                return original(model, weights, *args, **kwargs)
            return original(model, self.heard(weights), *args, **kwargs)
        finally:
            self._is_loading = False

    def heard(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Hash and yield the tensors sent to the engine."""
        for name, tensor in weights:
            self._hear(name, tensor)
            yield name, tensor

    def _hear(self, name: str, tensor: Any) -> None:
        if self.is_on:
            with self._guard():
                self._given[name] = digest(tensor, self._dtype, self._device)

    def gathered(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield the tensors that the trainer gathers for the engine. Hash them if the trainer is sharded."""
        for name, tensor in weights:
            if self.is_on and self._trainer is not None and not self._is_whole:
                with self._guard():
                    self._take(name, tensor)
            yield name, tensor

    def _take(self, name: str, tensor: Any) -> None:
        self._shapes[name] = tuple(tensor.shape)
        self._own[name] = digest(tensor, self._dtype, self._device)

    def hold(self, trainer: Any) -> None:
        """Hash an unsharded trainer's weights before they are sent to the engine, once per policy version."""
        version = int(trainer.state.global_step)
        if not self.is_on or self._version == version:
            return
        with self._guard():
            model = trained_model(trainer)
            if self._trainer is None or self._trainer() is not trainer:
                self._is_whole = is_whole(model)
                packed = [name for name, parameter in model.named_parameters() if is_quantised(parameter)]
                if packed:
                    self._session.note(
                        f"{len(packed)} quantised tensors are not compared with the engine's, because the trainer "
                        f"stores them packed ({packed[0]}, ...)"
                    )
            self._version, self._trainer = version, weakref.ref(trainer)
            self._own, self._unmerged = {}, {}
            if self._is_whole:
                for name, tensor, unmerged in trainer_tensors(model):
                    self._take(name, tensor)
                    if unmerged is not None:
                        self._unmerged[name] = digest(unmerged, self._dtype, self._device)

    def tell(self, step: int) -> None:
        if not self.is_on or self._version is None or self._told == self._version:
            return
        with self._guard():
            self._told = self._version
            columns = self._columns(step, self._version)
            writer, rows = self._session.recorder.writer, len(columns["tensor"])
            writer.submit(lambda: writer.append(ENGINE_WEIGHTS, columns, rows), _ROW_BYTES * rows)

    def _columns(self, step: int, version: int) -> dict[str, Any]:
        own, unmerged = read_digests(self._own), read_digests(self._unmerged)
        given, self._given = read_digests(self._given), {}
        self._last |= given
        if given and not own and not self._is_whole:
            self._session.note(
                "the engine's weights are not compared: the trainer's weights are sharded (FSDP, ZeRO-3), and this TRL "
                "release cannot gather them (no VLLMGeneration._iter_named_params)"
            )
        for name, value in own.items():
            self._known.setdefault(name, set()).add(value)
        held = self._held(own)
        if any(held.get(name, value) != value for name, value in given.items()):
            self._level = HELD
        has = {name: held.get(name, self._last.get(name)) for name in own}
        wrong_now = {name: value for name, value in has.items() if value not in (None, own[name], unmerged.get(name))}
        is_strange = any(value not in self._known[name] for name, value in wrong_now.items())
        casts = self._casts(wrong_now) if is_strange and self._is_whole else {}
        names = list(own) + [name for name in given if name not in own]
        dtype = None if self._dtype is None else str(self._dtype).removeprefix("torch.")
        sides = {"trainer": own, "unmerged": unmerged, "given": given, "held": held}
        columns: dict[str, Any] = {side: [values.get(name) for name in names] for side, values in sides.items()}
        columns["cast"] = [casts.get(name) for name in names]
        return columns | {"step": step, "policy_version": version, "tensor": names, "dtype": dtype}

    def _held(self, own: dict[str, int]) -> dict[str, int]:
        is_due, model = self._is_due(own), None if self._model is None else self._model()
        if model is None or not is_due:
            return {}
        return read_digests({name: digest(tensor, self._dtype) for name, tensor in held_tensors(model, self._shapes)})

    def _is_due(self, own: dict[str, int]) -> bool:
        is_power = self._num_told & (self._num_told - 1) <= 0
        self._num_told += 1
        return is_power or self._level == HELD or any(self._last.get(name) != value for name, value in own.items())

    def _trainer_tensors(self) -> Iterator[tuple[str, Any, Any]]:
        return trainer_tensors(trained_model(self._trainer()))

    def _casts(self, wrong: dict[str, int]) -> dict[str, str]:
        import torch

        engine = None if self._model is None else self._model()
        held = {} if engine is None else dict(held_tensors(engine, self._shapes))
        found: dict[str, str] = {}
        for name, tensor, _ in self._trainer_tensors():
            if name in wrong and tensor.is_floating_point():
                for cast in CASTS:
                    rounded = digest(tensor, self._dtype, self._device, through=getattr(torch, cast))
                    if resolved([rounded])[0] == wrong[name]:
                        found[name] = cast
                        break
                else:
                    count = None if name not in held else values_a_row(tensor, held[name])
                    if count is not None:
                        found[name] = f"{count} values"
        return found


def read_digests(digests: Mapping[str, Digest]) -> dict[str, int]:
    return dict(zip(digests, resolved(list(digests.values())), strict=True))


def values_a_row(own: Any, coarse: Any) -> int | None:
    """Return the largest number of distinct values in a row of `coarse`, or None if it is no rounded copy of `own`."""
    if own.numel() < 2:
        return None
    coarse_RC = _some_rows(coarse)
    own_RC, coarse_RC = _some_rows(own).to(coarse_RC).float(), coarse_RC.float()
    count = max(len(row.unique()) for row in coarse_RC)
    if not 2 <= count <= _MAX_VALUES or min(len(row.unique()) for row in own_RC) < _MIN_TIMES_MORE * count:
        return None
    own_RC, coarse_RC = own_RC.double(), coarse_RC.double()
    cosine = (own_RC * coarse_RC).sum() / (own_RC.norm() * coarse_RC.norm())
    return count if float(cosine) * own_RC.numel() ** 0.5 > _MIN_COSINE_SCORE else None


def _some_rows(tensor: Any) -> Any:
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows[:: -(-len(rows) // _NUM_ROWS)]
