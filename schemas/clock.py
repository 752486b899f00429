"""Times as a trace writes them."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> str:
    """The time, ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
