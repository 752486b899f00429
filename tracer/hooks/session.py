"""Record in processes started by `tim-trace record`.

This module is imported whenever Python starts, so it imports as little as possible.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import wrapt

from ...schemas.capture import Capture
from ...schemas.errors import InvalidRecord, StorageStalled
from ..patience import MAX_WAIT_S, Patience, say

if TYPE_CHECKING:
    from ..writer import Part

_T = TypeVar("_T")

ENVIRONMENT = "TIM_TRACE_RECORD"

BOOTSTRAP = str(Path(__file__).parents[1] / "bootstrap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    run: str
    session: str = ""
    capture: str = "logprobs"
    capture_fraction: float = 1.0
    weights: str = "auto"
    """`delta`, `none`, or `auto` (`delta` for models up to `weights_below` bytes)."""
    weights_below: int = 500_000_000
    routing: bool = False
    engine_weights: str = "given"
    """What to compare: `given` (the weights sent to the engine), `held` (also the engine's own copy), or `none`."""
    max_wait: float = MAX_WAIT_S
    """Maximum time to wait for an unresponsive file system, in seconds."""

    def to_environment(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> Order | None:
        text = os.environ.get(ENVIRONMENT)
        return cls(**json.loads(text)) if text else None


class Session:
    """Recording state of one process.

    An error in a call made through `record` ends the recording of one `Part`, and an error in a `guard` block ends all
    recording in this process. Neither error reaches the program. Recording never calls a collective operation, because
    processes that have stopped recording would not take part in it.
    """

    def __init__(self, order: Order):
        self.order = order
        self.capture = Capture.parse(order.capture, order.capture_fraction)
        self.hooks: dict[str, str] = {}
        self.generation: Any = None
        self.is_sampled_for_trainer = False
        """True while a trainer records the samples that this process's engine generates."""
        self.num_engine_steps = 0
        self._recorder: Any = None
        self._attempt: Any = None
        self._num_trainings = 0
        self._pid = os.getpid()
        self._told: set[str] = set()
        self._exit_registered = False
        self._depth = 0
        self._over: Exception | None = None
        self.spent_s = self.cpu_s = 0.0

    @property
    def is_recording(self) -> bool:
        is_open = self._recorder is None or self._pid != os.getpid() or self._recorder.writer.is_open
        return is_open and self._over is None

    @property
    def recorder(self) -> Any:
        """This process's recorder, opened on first use. A forked child opens its own."""
        if self._recorder is None or self._pid != os.getpid():
            from ..recorder import Recorder
            from ..writer import TraceWriter

            if self._over is not None:
                raise self._over
            self._pid, self._recorder = os.getpid(), None
            options: dict[str, Any] = {"hooks": dict(self.hooks), "attempt": self._attempt}
            opened = partial(TraceWriter, Path(self.order.run), max_wait_s=self.order.max_wait, **options)
            try:
                writer = self._within(opened, late=TraceWriter.close)
            except Exception as error:
                self._over = error
                raise
            self._recorder = Recorder.of_writer(writer, self.capture)
            self._close_at_exit()
        return self._recorder

    @cached_property
    def engine_weights(self) -> Any:
        from .engine_weights import EngineWeights

        return EngineWeights(self)

    def next_engine_step(self) -> int:
        self.num_engine_steps += 1
        return self.num_engine_steps

    def begin_training(self) -> None:
        with self.guard("the start of a training run"):
            self.engine_weights.restart()
            from ..liveness import next_attempt
            from ..store import Store

            self._seal()
            if self.is_recording:
                begun = partial(next_attempt, Store(self.order.run), self.order.session, self._num_trainings)
                self._attempt = self._within(begun)
                self._num_trainings += 1

    def seal(self) -> None:
        """Seal the recorded data, so that other processes can read it. Later records go to a new writer."""
        with self.guard("the data recorded so far"):
            self._seal()

    def _seal(self) -> None:
        if self._recorder is not None and self._pid == os.getpid():
            self._account()
            self._recorder.close()
            if self._recorder.writer.has_stalled:
                self._over = StorageStalled(self._recorder.writer.state.error)
            self._recorder, self.spent_s, self.cpu_s = None, 0.0, 0.0

    def _within(self, call: Callable[[], Any], **options: Any) -> Any:
        from ..worker import run_within

        return run_within(Patience(self.order.run, self.order.max_wait), call, **options)

    def _account(self) -> None:
        self._recorder.writer.state.spent_s, self._recorder.writer.state.cpu_s = self.spent_s, self.cpu_s

    @contextmanager
    def guard(self, what: str, *, otherwise: Callable[[Exception], None] | None = None) -> Iterator[None]:
        """Prevent recording errors from reaching the program.

        An error ends this process's recording, unless `otherwise` handles it. `what` names the data lost in that case.
        """
        begin, begin_cpu, self._depth = time.perf_counter(), time.thread_time(), self._depth + 1
        try:
            yield
        except Exception as error:
            try:
                (otherwise or partial(self.stop, what))(error)
            except Exception as second:
                self.stop(what, second)
        finally:
            self._depth -= 1
            if not self._depth:
                self.spent_s += time.perf_counter() - begin
                self.cpu_s += time.thread_time() - begin_cpu

    def record(self, part: Part, function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T | None:
        """Call `function` and return its result, or None if it fails or this part is no longer recorded."""
        if not self.is_recording:
            return None
        with self.guard(part):
            writer = self.recorder.writer
            writer.raise_invalid()  # raises errors from earlier writes
            try:
                found: _T | None = writer.part(part, function, *args, **kwargs)
            except InvalidRecord as error:
                writer.end(part, error)
            else:
                return found
        return None

    def stop(self, what: str, error: Exception) -> None:
        if isinstance(error, StorageStalled):
            self._over = error
        stopped = f"RECORDING STOPPED in process {os.getpid()}, training continues"
        if self._over is not None:
            self.tell(f"{stopped}: {type(self._over).__name__}: {self._over}")
            return
        try:
            error.add_note(f"while recording {what}")
            self.recorder.writer.state.not_recorded += (f"{what}: {type(error).__name__}: {error}",)
            self.recorder.writer.stop(error)
        except Exception as second:
            self.tell(f"{stopped}: {what}: {error} ({second})")

    def note(self, sentence: str) -> None:
        if sentence not in self._told:
            self.tell(sentence)
            with self.guard("notes"):
                self.recorder.writer.note(sentence)

    def tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            say(sentence)

    def close(self) -> None:
        if self._recorder is not None and self._pid == os.getpid():
            self._account()
            with self.guard("the end of the process"):
                self._recorder.close(at_exit=True)

    def _close_at_exit(self) -> None:
        if not self._exit_registered:
            atexit.register(self.close)
            self._exit_registered = True
        # A multiprocessing child exits with os._exit, so atexit handlers do not run in it. It runs multiprocessing's
        # finalizers before it exits, so register one.
        if "multiprocessing.util" in sys.modules:
            from multiprocessing import util

            util.Finalize(None, self.close, exitpriority=0)


_HOOKS = {
    "transformers.trainer": ("trl", "install"),
    "verl.trainer.ppo.v1.trainer_base": ("verl", "install"),
    "verl.trainer.main_ppo_sync": ("verl", "install"),
    "verl.trainer.main_ppo": ("verl", "install_main"),
    "verl.trainer.ppo.ray_trainer": ("verl", "install_older"),
    "verl.workers.engine_workers": ("verl_worker", "install"),
    "verl.workers.engine.utils": ("verl_worker", "install"),
    "verl.workers.utils.losses": ("verl_worker", "install"),
    "verl.utils.transferqueue_utils": ("verl_worker", "install"),
    "verl.workers.engine.fsdp.transformer_impl": ("verl_worker", "install"),
    "verl.workers.rollout.vllm_rollout.vllm_rollout": ("verl_worker", "install"),
    "verl.workers.rollout.vllm_rollout.utils": ("verl_engine_weights", "install"),
    "ray": ("ray", "install"),
    "vllm.entrypoints.llm": ("vllm", "install"),
    "vllm.v1.engine.async_llm": ("vllm_async", "install"),
}
"""Maps each module to the file and function in this folder that hook it when it is imported."""


def activate() -> Session | None:
    """Hook supported libraries when they are imported. Return None if `tim-trace record` did not start this process."""
    order = Order.from_environment()
    if order is None:
        return None
    session = Session(order)
    for module in _HOOKS:
        wrapt.register_post_import_hook(partial(_hook, session, module), module)
    return session


def _hook(session: Session, name: str, module: Any) -> None:
    with session.guard(f"{name} (its functions could not be hooked)"):
        file, function = _HOOKS[name]
        getattr(import_module(f"{__package__}.{file}"), function)(session, module)
