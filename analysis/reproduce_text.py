from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..replay.reproduce.engine import Reproduction


def reproduction_text(found: Reproduction, width: int | None = None) -> str:
    if found.first is None:
        return f"Only rounding: no operator of a ({found.a}) or b ({found.b}) exceeds its rounding bound. No script written."
    numbers = f" and {found.file} ({found.num_bytes / 1e3:,.0f} kB)" if found.file else ""
    return (
        f"{found.script} ({found.num_lines} lines){numbers} show{'' if found.file else 's'} the error of {found.first.operator} in "
        f"{found.first.side}. In a fresh process it took {found.duration_s:.1f} s, exited with 1 and printed:\n\n"
        f"{found.output.rstrip()}"
    )
