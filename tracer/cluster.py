"""Work that is divided among the actors of a Ray cluster; the only module but the recording hook that imports ray."""

from __future__ import annotations

import os
import socket
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from ..schemas.errors import (
    ClusterFailed,
    InvalidOption,
    NotInstalled,
    TimTraceError,
    speaking_options,
    speaks_options,
)  # fmt: skip

LOCAL = "local"
"""In place of an address: a cluster that is started on this machine and ends with the work."""
STORE_BYTES = 10**8
"""Object store of a local cluster, bytes: units and their results are small."""
CONNECT_S = 10.0
"""Seconds that an address has to answer."""
TRIES = 3
"""Actors that may die of one unit."""
LOOK_S = 10.0
"""Seconds without a result after which is looked whether any node has room for an actor."""
PATIENCE = 6
"""Such looks in a row that may find none: a cluster that grows takes a while."""


class Worker(Protocol):
    """What an actor holds; it is pickled to the actor before its first unit."""

    def run(self, unit: Any) -> Any:
        """The result of one unit; a unit may be run again, by another worker."""

    def close(self) -> None:
        """Finish what was written."""


class _Held:
    """The actor: a worker, whose own errors come back as values."""

    def __init__(self, worker: Worker, says_options: bool):
        self._worker, self._says_options = worker, says_options

    def ready(self) -> None:
        """Answers as soon as the actor is there."""

    def run(self, unit: Any) -> Any:
        with ExitStack() as stack:
            if self._says_options:
                stack.enter_context(speaking_options())
            try:
                return self._worker.run(unit)
            except TimTraceError as error:
                return error

    def close(self) -> None:
        self._worker.close()


def run_units(
    address: str, worker: Worker, units: Sequence[Any], *, num_cpus: int, num_gpus: float,
    at_room: Callable[[int], None] = lambda num_actors: None,
) -> Iterator[tuple[int, Any]]:  # fmt: skip
    """Number and result of each unit, in the order in which they end.

    `address` is LOCAL, `auto` or `host:port`. As many actors share the units as the cluster has room for, each with a copy of
    `worker`; `num_cpus` of one are those of the largest node where that has fewer. A unit whose actor or node dies is given to
    another. What a worker refuses is raised here. `at_room` is told the number of actors that the cluster has room for.

    Raises NotInstalled, InvalidOption where no cluster answers, ClusterFailed where no node has room or a unit kills TRIES actors.
    """
    with connected(address) as ray:
        pool = _Pool(ray, worker, num_cpus, num_gpus, len(units))
        at_room(max(pool.room, 1))
        try:
            yield from pool.run(units)
            pool.close()
        finally:
            pool.kill()


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Ray, connected for all work meanwhile; a connection that was there before stays. Nothing without an address.

    Raises NotInstalled, InvalidOption where no cluster answers.
    """
    if address is None:
        yield None
        return
    try:
        import ray
    except ImportError as error:
        raise NotInstalled("Ray is not installed; pip install 'tim-trace[ray]'") from error
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"address": address}
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options |= {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    try:
        _check_answers(address)
        with _without_tips():
            ray.init(log_to_driver=False, logging_level="ERROR", **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidOption(
            f"no cluster answers at {address!r} ({str(error).splitlines()[0]}); start one (ray start --head), or use "
            f"{LOCAL!r} for one on this machine",
            option="ray",
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Raise OSError where nothing listens at `host:port`: Ray goes on asking for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()


def _last_line(error: Exception) -> str:
    """What an error in an actor is about: Ray puts its traceback before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


@contextmanager
def _without_tips() -> Iterator[None]:
    """Ray announces its coming versions as warnings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


class _Pool:
    """The actors, and which unit each has."""

    def __init__(self, ray: Any, worker: Worker, num_cpus: int, num_gpus: float, num_units: int):
        self._ray, self._num_gpus = ray, num_gpus
        self._num_cpus = min(num_cpus, max((node.get("CPU", 0.0) for node in self._nodes()), default=0.0)) or num_cpus
        self._worker = ray.put(worker)
        self._actors: list[Any] = []
        self._idle: list[Any] = []
        self._running: dict[Any, tuple[int | None, Any]] = {}
        """Reference -> unit and actor; None where the actor is not there yet."""
        for _ in range(max(min(self.room, num_units), 1)):
            self._start()

    def run(self, units: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        waiting, deaths, empty, stillborn = deque(range(len(units))), Counter[int](), 0, 0
        while waiting or any(number is not None for number, _ in self._running.values()):
            while waiting and self._idle:
                actor = self._idle.pop()
                number = waiting.popleft()
                self._running[actor.run.remote(units[number])] = number, actor
            ended, _ = self._ray.wait(list(self._running), timeout=LOOK_S)
            empty = 0 if ended or self.room else empty + 1
            if empty >= PATIENCE:
                raise ClusterFailed(
                    f"no node of the cluster has {self._num_cpus:g} CPUs and {self._num_gpus:g} GPUs for an actor"
                )
            for reference in ended:
                unit, actor = self._running.pop(reference)
                try:
                    result = self._ray.get(reference)
                except (self._ray.exceptions.RayActorError, self._ray.exceptions.ObjectLostError) as error:
                    self._replace(actor)
                    if unit is None:
                        stillborn += 1
                        if stillborn >= TRIES:
                            raise ClusterFailed(
                                f"{TRIES} actors died before they were ready ({_last_line(error)}); is tim-trace, and what the "
                                "options name, installed on every node?"
                            ) from error
                    else:
                        deaths[unit] += 1
                        if deaths[unit] >= TRIES:
                            raise ClusterFailed(
                                f"{TRIES} actors died of the same unit ({units[unit]}); does a node run out of memory?"
                            ) from error
                        waiting.appendleft(unit)
                    continue
                self._idle.append(actor)
                stillborn = 0
                if isinstance(result, TimTraceError):
                    raise result
                if unit is not None:
                    yield unit, result

    def close(self) -> None:
        """Let each worker finish; one that died meanwhile has handed in its results."""
        for reference in [actor.close.remote() for actor in self._idle]:
            try:
                self._ray.get(reference)
            except self._ray.exceptions.RayActorError:
                continue

    def kill(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)

    def _start(self) -> None:
        with _without_tips():
            kind = self._ray.remote(
                num_cpus=self._num_cpus, num_gpus=self._num_gpus, scheduling_strategy="SPREAD", max_restarts=0
            )(_Held)
            actor = kind.remote(self._worker, speaks_options())
        self._actors.append(actor)
        self._running[actor.ready.remote()] = None, actor

    def _replace(self, actor: Any) -> None:
        self._ray.kill(actor)
        self._actors.remove(actor)
        self._start()

    def _nodes(self) -> list[dict[str, float]]:
        """What each node that is alive has of everything."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    @property
    def room(self) -> int:
        """Actors that the nodes have room for, were they idle."""
        total = 0
        for node in self._nodes():
            slots = node.get("CPU", 0.0) // self._num_cpus
            if self._num_gpus:
                slots = min(slots, node.get("GPU", 0.0) // self._num_gpus)
            total += int(slots)
        return total
