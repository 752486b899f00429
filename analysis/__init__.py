"""Questions to traces. Everything here runs without torch, except for LengthDecayLR, which is for training."""

from typing import TYPE_CHECKING, Any

from .database import connect

if TYPE_CHECKING:
    from .dynamics.length_decay_lr import LengthDecayLR

__all__ = ["LengthDecayLR", "connect"]


def __getattr__(name: str) -> Any:
    if name == "LengthDecayLR":
        from .dynamics.length_decay_lr import LengthDecayLR

        return LengthDecayLR
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
