"""Questions to traces. Everything here runs without torch, except for LengthDecayLR, which is for training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .trace.database import connect

if TYPE_CHECKING:
    from . import report
    from .dynamics.length_decay_lr import LengthDecayLR

__all__ = ["LengthDecayLR", "connect", "report"]


def __getattr__(name: str) -> Any:
    if name == "LengthDecayLR":
        from .dynamics.length_decay_lr import LengthDecayLR

        return LengthDecayLR
    if name == "report":
        return import_module(".report", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
