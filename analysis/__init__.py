"""Questions to traces. Everything here runs without torch."""

from .database import connect

__all__ = ["connect"]
