"""Distribute work across a Ray cluster. No other module imports ray."""

from __future__ import annotations

import os
import socket
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from textwrap import shorten
from typing import Any, Protocol

from ..schemas.errors import (
    ClusterFailed,
    InvalidOption,
    TimTraceError,
    option,
    speaking_options,
    speaks_options,
    warn,
)  # fmt: skip
from ..schemas.version import __version__

AUTO = "auto"
LOCAL = "local"
"""Address that means a temporary cluster on this machine."""
STORE_BYTES = 10**8
"""Object store size of a local cluster in bytes. It can be low, because units of work and their results are small."""
CONNECT_S = 10.0
TRIES = 3
"""Give up once this many actors have died before becoming ready, or while running the same unit of work."""
LOOK_S = 10.0
"""Seconds to wait for a result before checking whether an actor fits on any node."""
PATIENCE = 6
"""Give up after this many consecutive checks without room for an actor. The wait leaves time for autoscaling."""

HELD_UP = 3
"""Number of consecutive checks without a running actor before warning that resources are missing."""


class Worker(Protocol):
    """Runs units of work. It is pickled and sent to each actor before the first unit."""

    def run(self, unit: Any) -> Any: ...

    def close(self) -> None: ...


class _Actor:
    _worker: Worker

    def ready(self, version: str, says_options: bool, worker: list[Any]) -> TimTraceError | None:
        if version != __version__:
            return ClusterFailed(
                f"node {socket.gethostname()} has tim-trace {__version__}, but this process has {version}. Install "
                f"the same version on every node (pip install 'tim-trace[ray]=={version}')"
            )
        import ray

        self._says_options = says_options
        self._worker = ray.get(worker[0])
        return None

    def run(self, unit: Any) -> Any:
        with speaking_options() if self._says_options else nullcontext():
            try:
                return self._worker.run(unit)
            except (TimTraceError, OSError) as error:
                return _for_driver(error)

    def close(self) -> TimTraceError | None:
        try:
            self._worker.close()
        except (TimTraceError, OSError) as error:
            return _for_driver(error)
        return None


def _for_driver(error: TimTraceError | OSError) -> TimTraceError:
    if isinstance(error, FileNotFoundError) or isinstance(error.__cause__, FileNotFoundError):
        remedy = "the trace and the imported files must be at the same path or URL on every node"
    elif not isinstance(error, TimTraceError):
        remedy = "check the node's disk and write permissions"
    else:
        return error
    return ClusterFailed(f"node {socket.gethostname()}: {error}; {remedy}")


def run_units(
    address: str | None, worker: Worker, units: Sequence[Any], *, num_cpus: int, num_gpus: float
) -> Iterator[tuple[int, Any]]:
    """Yield each unit's number and result as it finishes.

    If `address` is None, all units run in this process. On a cluster (`local`, `auto` or `host:port`), the units are
    shared among as many actors as the cluster can hold. Each actor has its own copy of `worker` and gets `num_cpus`
    CPUs, or all CPUs of the largest node if it has fewer. If an actor dies, another actor runs its unit again.
    """
    if address is None:
        with closing(worker):
            yield from enumerate(map(worker.run, units))
        return
    with connected(address) as ray:
        pool = _Pool(ray, worker, num_cpus, num_gpus, len(units))
        try:
            yield from pool.run(units)
            pool.close()
        finally:
            pool.kill()


def check_address(address: str | None) -> None:
    if address not in (None, LOCAL, AUTO) and not (address and _host_and_port(address)):
        before = f"; put RUN before {option('ray')}, which takes the next word as its value" if speaks_options() else ""
        raise InvalidOption(
            f"got {address!r}; use {AUTO!r} on a node of the cluster, HOST:PORT of its head node, or {LOCAL!r} for a "
            f"cluster on this machine{before}",
            option="ray",
        )


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Connect to Ray for this block, unless `address` is None or Ray is already connected."""
    if address is None:
        yield None
        return
    check_address(address)
    import ray

    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"address": address}
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options |= {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    try:
        if place := _host_and_port(address):  # ray.init alone would retry for minutes before failing
            socket.create_connection(place, timeout=CONNECT_S).close()
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            ray.init(log_to_driver=False, logging_level="ERROR", **options)
    except (OSError, RuntimeError, ValueError) as error:
        if "ersion mismatch" in str(error):
            raise InvalidOption(
                f"the cluster at {address!r} and this process have different Ray or Python versions "
                f"({_on_one_line(error)}). Install the cluster's versions here",
                option="ray",
            ) from error
        token = ""
        if isinstance(error, ConnectionError) and "Failed to connect to Ray cluster" in str(error):
            token = f". If the cluster requires a token, set RAY_AUTH_MODE=token or use {AUTO!r} on one of its nodes"
        raise InvalidOption(
            f"no cluster answers at {address!r} ({_on_one_line(error)}). Start one (ray start --head), or use "
            f"{LOCAL!r} for a cluster on this machine{token}",
            option="ray",
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _host_and_port(address: str) -> tuple[str, int] | None:
    host, _, port = address.rpartition(":")
    return (host, int(port)) if host and port.isdigit() and "/" not in host else None


def _on_one_line(error: Exception) -> str:
    return shorten(str(error), 300) or type(error).__name__


class _Pool:
    def __init__(self, ray: Any, worker: Worker, num_cpus: int, num_gpus: float, num_units: int):
        self._ray, self._num_gpus = ray, num_gpus
        self._num_cpus = min(num_cpus, self._most("CPU")) or num_cpus
        self._worker = ray.put(worker)
        self._actors: list[Any] = []
        self._idle: list[Any] = []
        self._running: dict[Any, tuple[int | None, Any]] = {}
        """Maps a Ray reference to its unit number (None until the actor is ready) and actor."""
        for _ in range(max(min(self.room, num_units), 1)):
            self._start()

    def run(self, units: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        waiting, deaths, empty = deque(range(len(units))), Counter[int | None](), 0
        known, held_up = self._ray.exceptions, 0
        while waiting or any(number is not None for number, _ in self._running.values()):
            while waiting and self._idle:
                actor = self._idle.pop()
                number = waiting.popleft()
                self._running[actor.run.remote(units[number])] = number, actor
            ended, _ = self._ray.wait(list(self._running), timeout=LOOK_S)
            empty = 0 if ended or self.room else empty + 1
            is_held_up = not ended and all(number is None for number, _ in self._running.values())
            held_up = held_up + 1 if is_held_up else 0
            if held_up == HELD_UP and self.room:
                free = self._ray.available_resources().get("CPU", 0.0)
                warn(
                    f"no actor has started for {held_up * LOOK_S:g} s: the cluster has {free:g} free CPUs and an "
                    f"actor needs {self._num_cpus:g}. Wait until other jobs end, or stop and run the command without "
                    "a cluster",
                )
            if empty >= PATIENCE:
                raise ClusterFailed(
                    f"no node of the cluster has {self._num_cpus:g} CPUs and {self._num_gpus:g} GPUs for an actor "
                    f"(largest node: {self._most('CPU'):g} CPUs, {self._most('GPU'):g} GPUs). Add a larger node"
                    + (f", or request less with {option('gpus_per_arm', 'N')}" if self._num_gpus else "")
                )
            for reference in ended:
                unit, actor = self._running.pop(reference)
                try:
                    result = self._ray.get(reference)
                except (known.RayActorError, known.ObjectLostError, known.RayTaskError) as error:
                    if unit is not None and isinstance(error, known.RayTaskError):
                        raise  # a bug in the worker
                    self._replace(actor)
                    deaths[unit] += 1
                    if deaths[unit] >= TRIES:
                        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
                        message = (
                            f"{TRIES} actors died before they were ready ({reason}). Check that tim-trace "
                            f"{__version__} and all packages named in the options are installed on every node"
                            if unit is None
                            else f"{TRIES} actors died while running the same unit "
                            f"({shorten(str(units[unit]), 200)}). Check whether a node ran out of memory"
                        )
                        raise ClusterFailed(message) from error
                    if unit is not None:
                        waiting.appendleft(unit)
                    continue
                self._idle.append(actor)
                deaths[None] = 0
                if isinstance(result, TimTraceError):
                    raise result
                if unit is not None:
                    yield unit, result

    def close(self) -> None:
        for reference in [actor.close.remote() for actor in self._idle]:
            try:
                error = self._ray.get(reference)
            except self._ray.exceptions.RayActorError:
                continue
            if error is not None:
                raise error

    def kill(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)

    def _start(self) -> None:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            kind = self._ray.remote(
                num_cpus=self._num_cpus, num_gpus=self._num_gpus, scheduling_strategy="SPREAD", max_restarts=0
            )(_Actor)
            actor = kind.remote()
        self._actors.append(actor)
        # Ray would replace a bare reference with its value before the call, so the reference is passed in a list.
        self._running[actor.ready.remote(__version__, speaks_options(), [self._worker])] = None, actor

    def _replace(self, actor: Any) -> None:
        self._ray.kill(actor)
        self._actors.remove(actor)
        self._start()

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _most(self, resource: str) -> float:
        return max((node.get(resource, 0.0) for node in self._nodes()), default=0.0)

    @property
    def room(self) -> int:
        """Number of actors that would fit if the cluster were idle."""
        needed = {"CPU": self._num_cpus} | ({"GPU": self._num_gpus} if self._num_gpus else {})
        return sum(int(min(node.get(kind, 0.0) // count for kind, count in needed.items())) for node in self._nodes())
