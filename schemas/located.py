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
        Column(name="side", type=pa.string(), doc="the execution, `a` or `b`", null=""),
        Column(name="forward_order", type=pa.int64(), doc="position in the forward pass; the head is last", null=""),
        Column(
            name="operator",
            type=pa.string(),
            doc="module name; `layers.7.residual` and similar for operations between modules",
            null="",
        ),
        Column(name="kind", type=pa.string(), doc="last part of the name", null=""),
        Column(name="layer", type=pa.int64(), doc="layer, from 0", null="not in a layer"),
        Column(name="dtype", type=pa.string(), doc="output dtype, as torch names it", null=""),
        Column(name="num_values", type=pa.int64(), doc="number of output values", unit="numbers", null=""),
        Column(
            name="introduced",
            type=pa.float64(),
            doc="RMS of the error that the operator introduced, relative to the RMS of the exact result",
            null="",
        ),
        Column(
            name="ratio",
            type=pa.float64(),
            doc="largest error that the operator introduced, divided by the rounding bound; rounding cannot explain "
            "values above 1",
            null="",
        ),
        Column(name="seq_id", type=pa.string(), doc="sequence with the largest `ratio`", null=""),
        Column(
            name="token",
            type=pa.int64(),
            doc="token with the largest `ratio`, counted from 0 over prompt and response",
            null="",
        ),
        Column(
            name="inherited",
            type=pa.float64(),
            doc="RMS difference between the two executions' inputs, relative to a's",
            null="no input in common",
        ),
        Column(
            name="difference",
            type=pa.float64(),
            doc="RMS difference between the two executions' outputs, relative to a's",
            null="no output in common",
        ),
        Column(
            name="in_double",
            type=pa.float64(),
            doc="`introduced` at the worst token when the same code runs in float64",
            null="not run in float64",
        ),
        Column(
            name="products",
            type=pa.list_(pa.float64()),
            doc="sum over tokens of d times the contribution of the operator's error to d, to first order",
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
        Column(
            name="patch",
            type=pa.string(),
            doc="the patched operators: one kind, or `all operators`",
            null="",
        ),
        Column(name="taker", type=pa.string(), doc="the side whose operators were replaced, `a` or `b`", null=""),
        Column(name="num_operators", type=pa.int64(), doc="number of replaced operators", unit="operators", null=""),
        Column(
            name="squares_left",
            type=pa.list_(pa.float64()),
            doc="sum of d squared after replacing the operators",
            unit="nats^2",
            alignment=_PER_SEQUENCE,
            null="",
        ),
    ),
)

LOCATED_TABLES = {table.name: table for table in (OPERATORS, PATCHES)}
"""Tables stored per result in locate/: middle part of the file name -> column definitions."""
