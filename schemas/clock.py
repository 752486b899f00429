"""Timestamps of a trace."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> str:
    """Return the current time, ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
