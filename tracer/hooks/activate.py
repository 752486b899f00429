"""Turning recording on in a process that `tim-trace record` started. Imported at every start of Python: kept light."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt

from .session import Order, Session


def activate() -> Session | None:
    """Hook trainers, `verl`, `ray` and `vllm` for when they are imported; None outside of `tim-trace record`."""
    order = Order.from_environment()
    if order is None:
        return None
    session = Session(order)
    for module, install in _HOOKS.items():
        wrapt.register_post_import_hook(_guarded(session, module, install), module)
    return session


def _guarded(session: Session, name: str, install: Callable[[Session, Any], None]) -> Callable[[Any], None]:
    def hook(module: Any) -> None:
        with session.guard(f"{name} (its functions could not be hooked)"):
            install(session, module)

    return hook


def _trainers(session: Session, module: Any) -> None:
    from . import trl

    trl.install(session, module)


def _verl_trainer(session: Session, module: Any) -> None:
    from . import verl

    verl.install(session, module)


def _verl_older_trainer(session: Session, module: Any) -> None:
    from . import verl

    verl.install_older(session, module)


def _verl_main(session: Session, module: Any) -> None:
    from . import verl

    verl.install_main(session, module)


def _verl_worker(session: Session, module: Any) -> None:
    from . import verl_worker

    verl_worker.install(session, module)


def _verl_engine(session: Session, module: Any) -> None:
    from . import verl_engine_weights

    verl_engine_weights.install(session, module)


def _ray(session: Session, module: Any) -> None:
    from . import ray

    ray.install(session, module)


def _vllm_async(session: Session, module: Any) -> None:
    from . import vllm_async

    vllm_async.install(session, module)


def _vllm_llm(session: Session, module: Any) -> None:
    from . import vllm

    vllm.install(session, module)


_HOOKS: dict[str, Callable[[Session, Any], None]] = {
    "transformers.trainer": _trainers,
    "verl.trainer.ppo.v1.trainer_base": _verl_trainer,
    "verl.trainer.main_ppo_sync": _verl_trainer,
    "verl.trainer.main_ppo": _verl_main,
    "verl.trainer.ppo.ray_trainer": _verl_older_trainer,
    "verl.workers.engine_workers": _verl_worker,
    "verl.workers.engine.utils": _verl_worker,
    "verl.workers.utils.losses": _verl_worker,
    "verl.utils.transferqueue_utils": _verl_worker,
    "verl.workers.engine.fsdp.transformer_impl": _verl_worker,
    "verl.workers.rollout.vllm_rollout.vllm_rollout": _verl_worker,
    "verl.workers.rollout.vllm_rollout.utils": _verl_engine,
    "ray": _ray,
    "vllm.entrypoints.llm": _vllm_llm,
    "vllm.v1.engine.async_llm": _vllm_async,
}
