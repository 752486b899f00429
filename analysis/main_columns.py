"""Columns to keep if a table is wider than the terminal, most important first; `--wide` shows all."""

from __future__ import annotations

MAIN_COLUMNS: dict[str, tuple[str, ...]] = {
    "stats": (
        "run", "step", "seq_id", "layer", "num_nan", "num_inf", "num_tokens", "k3", "mean_abs_d", "p99_abs_d", "max_abs_d",
        "ess_token", "routing_agreement",
    ),
    "corrections": (
        "run", "correction", "step", "quarter", "share_tokens_cut", "share_sequences_cut", "share_tokens_truncated",
        "ess_token", "bias_token", "variance_token",
    ),
    "gradient": (
        "step", "arm", "module", "cosine", "norm_ratio", "bias", "grad_norm", "logged_norm", "variance",
    ),
    "replay_plan": (
        "arm", "num_steps", "num_sequences", "num_tokens", "seconds", "tokens_per_s", "num_versions", "load_s",
    ),
    "locate_kinds": ("side", "kind", "carried", "carried_low", "carried_high", "ratio", "num_operators"),
    "locate_patches": ("patch", "taker", "removed", "removed_low", "removed_high", "num_operators"),
    "weights": (
        "version", "module", "kind", "verified", "share_changed", "mean_share_changed", "max_share_changed", "num_bytes",
        "stored_bytes",
    ),
    "compare": ("kind", "name", "step", "a", "b", "sd"),
    "gate": ("condition", "verdict", "value", "low", "high", "bound", "how"),
    "onsets": ("series", "step", "95 %", "how", "before", "after", "may be first", "sd", "kind"),
    "series": ("series", "first tenth", "last tenth", "changes at", "smallest", "largest"),
}  # fmt: skip
"""Name of a table -> its columns to keep, most important first. Tables not listed here keep their first columns."""

NO_NEWS = frozenset({"run", "num_nan", "num_inf", "iteration_a", "iteration_b"})
"""Columns dropped first if all rows have the same value."""
