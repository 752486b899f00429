"""The SQL function that compares captured distributions. Its dependencies are imported on the first call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from ..rows import Rows
from ..trace.database import Database
from ..trace.macros import MacroFile, quoted_pair, sql_file, struct_sql
from ..trace.ragged import Column
from ..trace.source import Pair
from .divergence import DIVERGENCES, MEASURES

if TYPE_CHECKING:
    from .captured import DistributionPairs

COMPARE = "compare_distributions"
_PLACE = ("VARCHAR", "BIGINT", "VARCHAR", "BIGINT", "INTEGER")

BY = {"run": "pair_distribution_runs", "step": "pair_distribution_steps", "sequence": "pair_distribution_sequences"}


def _register(database: Database) -> None:
    made: list[DistributionPairs] = []

    def compare(
        run: Column, count: Column,
        group_a: Column, start_a: Column, contract_a: Column, version_a: Column, attempt_a: Column,
        group_b: Column, start_b: Column, contract_b: Column, version_b: Column, attempt_b: Column,
    ) -> pa.Array:  # fmt: skip

        if not made:
            from .captured import DistributionPairs  # imported here because it loads NumPy and Zarr

            made.append(DistributionPairs(database.sources))
        return made[0](
            run, count, group_a, start_a, contract_a, version_a, attempt_a,
            group_b, start_b, contract_b, version_b, attempt_b,
        )  # fmt: skip

    database.connection.raw.create_function(
        COMPARE, compare, ["VARCHAR", "BIGINT", *_PLACE, *_PLACE], f"{struct_sql(MEASURES)}[]", type="arrow",
        null_handling="special",
    )  # fmt: skip
    database.function_errors.append(lambda: made[0].error if made else None)


_STATISTICS = [
    (name, kind, of) for name in ("tv", "js", "kl_ab", "kl_ba") for kind, of in (("mean", "average"), ("max", "max"))
]

MACROS = MacroFile(
    name="distributions",
    sql=sql_file("distributions").format(
        measures=", ".join(f"measured.{measure}" for measure in MEASURES),
        exact=", ".join(
            f"CASE WHEN count({name}) = count(*) THEN {of}({name}) END AS {kind}_{name}"
            for name, kind, of in _STATISTICS
        ),
        bounds=", ".join(
            f"{of}({name}_{end}) AS {kind}_{name}_{end}" for name, kind, of in _STATISTICS for end in ("low", "high")
        ),
    ),
    register=_register,
    functions=(COMPARE,),
)


def has_captured(database: Database, pair: Pair) -> bool:
    """Return True if both passes captured distributions for at least one sequence. The distributions are not read."""
    query = (
        f"SELECT 1 FROM scored_by_both({quoted_pair(pair)}) WHERE dense_a IS NOT NULL AND dense_b IS NOT NULL LIMIT 1"
    )
    return bool(database.connection.execute(query).fetchall())


def summary(database: Database, pair: Pair, by: str) -> Rows:
    """Summarize a pair's divergences: as exact values if all of them are known exactly, otherwise as bounds."""
    rows = database.ask(f"SELECT * FROM {BY[by]}({quoted_pair(pair)})")
    is_exact = all(row["mean_tv"] is not None for row in rows.dicts())
    ends = {f"{kind}_{name}_{end}" for name in DIVERGENCES for kind in ("mean", "max") for end in ("low", "high")}
    exact = {f"{kind}_{name}" for name in DIVERGENCES for kind in ("mean", "max")}
    hidden = ends if is_exact else exact | {"num_unsupported_ab", "num_unsupported_ba"}
    return rows.without(hidden)
