"""Types of structs that functions in Python give to SQL."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

ARROW = {"INTEGER": pa.int32(), "BIGINT": pa.int64(), "DOUBLE": pa.float64(), "BOOLEAN": pa.bool_()}
"""Type in SQL -> type in Arrow."""


def struct_sql(types: Mapping[str, str]) -> str:
    """The SQL type of a struct with these fields.

    >>> struct_sql({"num": "BIGINT", "mean": "DOUBLE"})
    'STRUCT(num BIGINT, mean DOUBLE)'
    """
    return f"STRUCT({', '.join(f'{name} {kind}' for name, kind in types.items())})"


def struct_fields(types: Mapping[str, str]) -> list[pa.Field]:
    """The same fields in Arrow."""
    return [pa.field(name, ARROW[kind]) for name, kind in types.items()]
