"""Column definitions for locate/, which holds a table of operators and a table of patches per result of `locate`."""

from __future__ import annotations

import pyarrow as pa

from .tables import Column, Table

_PER_SEQUENCE = "one element per sequence of the result, in the order of its JSON"

OPERATORS = Table(
    name="operators",
    doc="One row per (side, operator): the error that the operator introduced over all sequences, compared with "
    "float64 on the same inputs.",
    columns=(
        Column("side", pa.string(), "the execution, `a` or `b`", null=""),
        Column("forward_order", pa.int64(), "position in the forward pass; the head is last", null=""),
        Column(
            "operator",
            pa.string(),
            "module name; `layers.7.residual` and similar for operations between modules",
            null="",
        ),
        Column("kind", pa.string(), "last part of the name", null=""),
        Column("layer", pa.int64(), "layer, from 0", null="not in a layer"),
        Column("dtype", pa.string(), "output dtype, as torch names it", null=""),
        Column("num_values", pa.int64(), "number of output values", unit="numbers", null=""),
        Column(
            "introduced",
            pa.float64(),
            "RMS of the error that the operator introduced, relative to the RMS of the exact result",
            null="",
        ),
        Column(
            "ratio",
            pa.float64(),
            "largest error that the operator introduced, divided by the rounding bound; rounding cannot explain values above 1",
            null="",
        ),
        Column("seq_id", pa.string(), "sequence with the largest `ratio`", null=""),
        Column("token", pa.int64(), "token with the largest `ratio`, counted from 0 over prompt and response", null=""),
        Column(
            "inherited",
            pa.float64(),
            "RMS difference between the two executions' inputs, relative to a's",
            null="no input in common",
        ),
        Column(
            "difference",
            pa.float64(),
            "RMS difference between the two executions' outputs, relative to a's",
            null="no output in common",
        ),
        Column(
            "in_double",
            pa.float64(),
            "`introduced` at the worst token when the same code runs in float64",
            null="not run in float64",
        ),
        Column(
            "products",
            pa.list_(pa.float64()),
            "sum over tokens of d times the contribution of the operator's error to d, to first order",
            unit="nats^2",
            alignment=_PER_SEQUENCE,
            null="not propagated to the logprobs; for an element: not propagated for this sequence",
        ),
    ),
)

PATCHES = Table(
    name="patches",
    doc="One row per (patch, patched side): the mismatch that remains if some operators of the patched side run the "
    "other side's code.",
    columns=(
        Column("patch", pa.string(), "the patched operators: one kind, or `all operators`", null=""),
        Column("taker", pa.string(), "the side whose operators were replaced, `a` or `b`", null=""),
        Column("num_operators", pa.int64(), "number of replaced operators", unit="operators", null=""),
        Column(
            "squares_left",
            pa.list_(pa.float64()),
            "sum of d squared after replacing the operators",
            unit="nats^2",
            alignment=_PER_SEQUENCE,
            null="",
        ),
    ),
)

LOCATED_TABLES = {table.name: table for table in (OPERATORS, PATCHES)}
"""Tables stored per result in locate/: middle part of the file name -> column definitions."""
