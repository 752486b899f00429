"""Sizes as people write them."""

from __future__ import annotations

import re

from .errors import InvalidOption

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kKmMgGtT]?[bB]?)\s*")


def parse_size(text: str) -> int:
    """Bytes that a text such as `500MB` or `1.5 GB` names. Raises InvalidOption.

    >>> parse_size("1.5GB")
    1500000000
    """
    match = _SIZE.fullmatch(text)
    unit = match[2].upper() if match else ""
    unit = unit if unit in _UNITS else f"{unit}B"
    if match is None or unit not in _UNITS:
        raise InvalidOption(f"size: got {text!r}; write a number and B, kB, MB, GB or TB, such as 500MB")
    return int(float(match[1]) * _UNITS[unit])
