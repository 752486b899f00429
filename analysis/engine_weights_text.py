"""Render the comparison between engine and trainer weights: the number of tensors that agree, and a table of the others."""

from __future__ import annotations

from .rows import Rows, to_text


def engine_weights_text(rows: Rows, by: str = "tensor", width: int | None = None, *, verbose: bool = False) -> str:
    """Render rows of `engine_weights`; rows that agree at every version are only counted, unless `verbose`."""
    agreeing = [row for row in rows.dicts() if row["agrees"] and not row["num_differ"]]
    counted = len(agreeing) and not verbose
    blocks = [_agreement(agreeing, len(rows), by)] if counted else []
    if not counted or len(agreeing) < len(rows):
        place = {name: rows.columns.index(name) for name in ("agrees", "num_differ")}
        left = [row for row in rows.rows if verbose or not row[place["agrees"]] or row[place["num_differ"]]]
        blocks.append(to_text(Rows(rows.columns, left), width))
    return "\n\n".join(blocks)


def _agreement(agreeing: list[dict[str, int]], of: int, by: str) -> str:
    versions = sorted({row["num_versions"] for row in agreeing})
    at = f"{versions[0]:,}" if len(versions) == 1 else f"{versions[0]:,} to {versions[-1]:,}"
    num = f"All {of:,}" if len(agreeing) == of else f"{len(agreeing):,} of {of:,}"
    return f"{num} engine {by}s equal the trainer's bit for bit at all {at} versions (--verbose lists them)."
