"""Data inside of a page: compressed, and in letters that need no escaping."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import numpy as np


def pack(value: Any) -> str:
    """A value that JSON can say, as base64 of gzip."""
    return pack_text(json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False))


def pack_text(text: str) -> str:
    """A text as base64 of gzip; the same text always gives the same letters."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "surrogatepass"), 6, mtime=0)).decode("ascii")


def floats(values: Any) -> str:
    """Numbers as base64 of little-endian float32."""
    return base64.b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode("ascii")
