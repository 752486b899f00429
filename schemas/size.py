from __future__ import annotations

import re

from .errors import InvalidOption

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kKmMgGtT]?[bB]?)\s*")


def parse_size(text: str, *, option: str = "size") -> int:
    """Parse a size such as `500MB` or `1.5 GB` and return the number of bytes. Raises InvalidOption.

    >>> parse_size("1.5GB")
    1500000000
    """
    if (match := _SIZE.fullmatch(text)) is None:
        raise InvalidOption(f"got {text!r}, expected a number with B, kB, MB, GB or TB, e.g. 500MB", option=option)
    return int(float(match[1]) * _UNITS[match[2].upper().removesuffix("B")])
