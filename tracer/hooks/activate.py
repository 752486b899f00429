"""Turns recording on in processes started by `tim-trace record`. Imports little, since it runs whenever Python starts."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import wrapt

from .session import Order, Session

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
"""Module -> (file in this package, function in that file). The function hooks the module after its import."""


def activate() -> Session | None:
    """Arrange for TRL's trainers, verl, ray and vllm to be hooked when imported. Return None outside of `tim-trace
    record`.
    """
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
