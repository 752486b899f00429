"""All formats that can be imported, by name, and the format detection used for `auto`."""

from __future__ import annotations

from ...schemas.errors import ImportFailed
from .areal import AREAL
from .dump import DumpFolder
from .format import Format
from .miles import MILES
from .ms_swift import MS_SWIFT
from .nemo_rl import NEMO_RL
from .open_instruct import OPEN_INSTRUCT
from .prime_rl import PRIME_RL
from .sglang import SGLANG
from .skyrl import SKYRL
from .slime import SLIME
from .torchtitan import TORCHTITAN
from .trl import TRL
from .verl import VERL
from .vllm import VLLM

FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        VERL, SLIME, MILES, SKYRL, PRIME_RL, NEMO_RL, VLLM, SGLANG, TRL, AREAL, OPEN_INSTRUCT, TORCHTITAN, MS_SWIFT,
    )
}  # fmt: skip


def recognised(folder: DumpFolder) -> str | None:
    """Detect the format of a folder; None if no format matches. Raises ImportFailed if several formats match."""
    found = [name for name, format in FORMATS.items() if format.is_in(folder)]
    if len(found) > 1:
        raise ImportFailed(
            f"{folder.url}: holds files of {' and of '.join(found)}; name the format, for example: tim-trace import {found[0]} PATH"
        )
    return found[0] if found else None
