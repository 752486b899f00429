"""Struct types that Python functions return to SQL."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

ARROW = {"INTEGER": pa.int32(), "BIGINT": pa.int64(), "DOUBLE": pa.float64(), "BOOLEAN": pa.bool_()}
"""SQL type -> Arrow type."""


def struct_sql(types: Mapping[str, str]) -> str:
    """Return the SQL type of a struct, given field name -> SQL type.

    >>> struct_sql({"num": "BIGINT", "mean": "DOUBLE"})
    'STRUCT(num BIGINT, mean DOUBLE)'
    """
    return f"STRUCT({', '.join(f'{name} {kind}' for name, kind in types.items())})"


def struct_fields(types: Mapping[str, str]) -> list[pa.Field]:
    """Return the Arrow fields of a struct, given field name -> SQL type."""
    return [pa.field(name, ARROW[kind]) for name, kind in types.items()]
