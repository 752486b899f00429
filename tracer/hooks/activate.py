"""Turning recording on in a process that `tim-trace record` started. Imported at every start of Python: kept light."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt

from .session import Order, Session


def activate() -> Session | None:
    """Hook trainers and `vllm` for when they are imported; None outside of `tim-trace record`."""
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


def _vllm_llm(session: Session, module: Any) -> None:
    from . import vllm

    vllm.install(session, module)


_HOOKS: dict[str, Callable[[Session, Any], None]] = {
    "transformers.trainer": _trainers,
    "vllm.entrypoints.llm": _vllm_llm,
}
