"""Detect bitwise equality: two engines that agree exactly, or one pass copied from the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ....schemas.contract import Contract, engine_dtype
from .. import commands
from ..finding import Finding
from ..pair_data import PairData, declared
from ..thresholds import COPIED_BY_CHANCE, MIN_COPIED_TOKENS


def find_equal(data: PairData) -> list[Finding]:
    """Detect that every compared token has bitwise-equal logprobs in both passes."""
    if not data.num_kept or np.any(data.d != 0.0):
        return []
    differing = _differing(data.contract("a"), data.contract("b"))
    if differing:
        replay = commands.replay(data, "", "as-recorded")
        return [
            data.finding(
                "copies",
                "equal_against_contracts",
                # Two engines can be made to give equal bits; two dtypes cannot.
                is_expected="dtype_a" not in differing,
                next=replay,
                numbers={"num_tokens": data.num_kept, **data.names, **differing},
            )
        ]
    known = int(bool(data.contract("a") and data.contract("b")))
    return [
        data.finding(
            "equal", "equal_bits", numbers={"num_tokens": data.num_kept, "contracts_known": known, **data.names}
        )
    ]


def find_copied_rows(data: PairData) -> list[Finding]:
    """Detect that some sequences have bitwise-equal logprobs in both passes and all others do not."""
    if not data.num_kept:
        return []
    num = np.bincount(data.seq, minlength=data.sample.num_sequences)
    telling = np.bincount(data.seq, data.b < -1e-3, minlength=len(num))
    same = np.bincount(data.seq, data.d == 0.0, minlength=len(num)) == num
    copied = same & (telling >= MIN_COPIED_TOKENS)
    others = ~same & (num > 0)
    if not copied.any() or not others.any() or _was_exact(data, copied, others):
        return []
    beside = others & np.isin(data.sample.steps, data.sample.steps[copied])
    # Chance agreement is measured in the steps with equal rows: at other steps the engine may hold different weights.
    telling_others = (beside if beside.any() else others)[data.seq] & (data.b < -1e-3)
    equal_elsewhere = float(np.mean(data.d[telling_others] == 0.0)) if telling_others.any() else 1.0
    expected = len(num) * max(equal_elsewhere, 1e-3) ** telling[copied]
    if not np.any(expected < COPIED_BY_CHANCE):
        return []
    return [
        replace(
            data.finding(
                "copies",
                "copied_rows",
                copied[data.seq],
                next=commands.stats(data, "sequence"),
                numbers={
                    "num_sequences": int(copied.sum()),
                    "of_sequences": int((num > 0).sum()),
                    "equal_elsewhere": equal_elsewhere,
                },
            ),
            effect=0.0,
        )
    ]


def _was_exact(data: PairData, copied: np.ndarray, others: np.ndarray) -> bool:
    """Return True if all equal rows come before all other rows. The engine was then exact, or not yet stale, at first,
    and nothing was copied."""
    steps = data.sample.steps
    return int(steps[copied].max()) < int(steps[others].min())


def _differing(a: Contract, b: Contract) -> dict[str, str]:
    """Return the differing contract settings that rule out equal bits, under the keys `engine_a`, `engine_b`,
    `dtype_a`, `dtype_b`."""
    sides = {
        "engine": (declared(a, "engine"), declared(b, "engine")),
        "dtype": (dtype_of(a), dtype_of(b)),
    }
    differing = {name: pair for name, pair in sides.items() if all(pair) and pair[0] != pair[1]}
    # With the same dtype, the engine `exact` gives the same bits as another engine.
    if "exact" in sides["engine"] and len(differing) < 2:
        return {}
    return {
        f"{name}_{side}": str(value) for name, pair in differing.items() for side, value in zip("ab", pair, strict=True)
    }


def dtype_of(contract: Contract) -> str | None:
    """Return the torch name of the dtype in which a pass was computed; None if the contract does not name one."""
    if (dtype := engine_dtype(contract)) is not None:
        return dtype
    if (built := declared(contract, "model", "built_in")) is not None:
        return str(built)
    autocast = str(declared(contract, "torch", "autocast_dtype") or "None").removeprefix("torch.")
    if autocast != "None":
        return autocast
    dtypes = declared(contract, "model", "dtypes")
    if isinstance(dtypes, dict) and dtypes:
        return str(max(dtypes, key=lambda name: dtypes[name]))
    dtype = declared(contract, "dtype")
    return None if dtype is None else str(dtype).removeprefix("torch.")
