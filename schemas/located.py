"""The columns of locate/: one table of operators and one of patches for each result of `locate`."""

from __future__ import annotations

import pyarrow as pa

from .tables import Column, Table

_PER_SEQUENCE = "one element per sequence of the result, in the order of its JSON"

OPERATORS = Table(
    name="operators",
    doc="One row per (side, operator): the error it introduced over all sequences, against float64 on the same inputs.",
    columns=(
        Column(name="side", type=pa.string(), doc="the execution, `a` or `b`", null=""),
        Column(name="forward_order", type=pa.int64(), doc="place in the forward; the head comes last", null=""),
        Column(
            name="operator",
            type=pa.string(),
            doc="name of the module; `layers.7.residual` and the like for what lies between modules",
            null="",
        ),
        Column(name="kind", type=pa.string(), doc="last part of the name", null=""),
        Column(name="layer", type=pa.int64(), doc="layer, from 0", null="outside of layers"),
        Column(name="dtype", type=pa.string(), doc="of what it gives, torch's name", null=""),
        Column(name="num_values", type=pa.int64(), doc="numbers that it gave", unit="numbers", null=""),
        Column(
            name="introduced",
            type=pa.float64(),
            doc="root mean square of its own error, relative to that of the exact result",
            null="",
        ),
        Column(
            name="ratio",
            type=pa.float64(),
            doc="its largest own error, in units of the rounding bound; above 1 rounding does not explain it",
            null="",
        ),
        Column(name="seq_id", type=pa.string(), doc="sequence of that error", null=""),
        Column(name="token", type=pa.int64(), doc="token of prompt and response of that error, from 0", null=""),
        Column(
            name="inherited",
            type=pa.float64(),
            doc="root mean square of the difference of both executions' inputs, relative to a's",
            null="no input in common",
        ),
        Column(name="difference", type=pa.float64(), doc="the same of what both give", null="no output in common"),
        Column(
            name="in_double",
            type=pa.float64(),
            doc="`introduced` of the worst token when the same code runs in float64",
            null="not run in float64",
        ),
        Column(
            name="products",
            type=pa.list_(pa.float64()),
            doc="sum over tokens of d times what its own error adds to d, to first order",
            unit="nats^2",
            alignment=_PER_SEQUENCE,
            null="not carried back; of an element: not of this sequence",
        ),
    ),
)

PATCHES = Table(
    name="patches",
    doc="One row per (patch, taker): the mismatch left if the taker computes some operators by the other's code.",
    columns=(
        Column(
            name="patch",
            type=pa.string(),
            doc="what was patched: a kind of operator, `layers 0 to 7`, `all operators`",
            null="",
        ),
        Column(name="taker", type=pa.string(), doc="the side whose operators were replaced, `a` or `b`", null=""),
        Column(name="num_operators", type=pa.int64(), doc="operators that were replaced", unit="operators", null=""),
        Column(
            name="squares_left",
            type=pa.list_(pa.float64()),
            doc="sum of d squared with the operators replaced",
            unit="nats^2",
            alignment=_PER_SEQUENCE,
            null="",
        ),
    ),
)

LOCATED_TABLES = {table.name: table for table in (OPERATORS, PATCHES)}
"""The tables of each result in locate/: the middle part of a file's name -> its columns."""
