"""Columns produced by comparing distributions, shared between the SQL function and its implementation."""

from __future__ import annotations

_DIVERGENCES = ("kl_ab", "kl_ba", "js", "tv")
_BOUNDED = (*_DIVERGENCES, "entropy_a", "entropy_b")

MEASURES: dict[str, str] = {
    **dict.fromkeys((*_DIVERGENCES, "max_abs_dlogit"), "DOUBLE"),
    "argmax_flip": "BOOLEAN",
    "num_unsupported_ab": "BIGINT",
    "num_unsupported_ba": "BIGINT",
    "entropy_a": "DOUBLE",
    "entropy_b": "DOUBLE",
    "vocab_a": "BIGINT",
    "vocab_b": "BIGINT",
    "mass_beyond_a": "DOUBLE",
    "mass_beyond_b": "DOUBLE",
    **{f"{name}_{end}": "DOUBLE" for name in _BOUNDED for end in ("low", "high")},
}
"""Column for a compared token -> its SQL type."""
