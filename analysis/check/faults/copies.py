"""Bitwise equality: two engines that agree exactly, or one pass copied from the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ....schemas.contract import Contract
from .. import commands
from ..finding import Fault, Finding
from ..pair_data import PairData, declared
from ..rounding import allowed_noise, dtype_of

_EQUAL = {
    "equal_bits": "all {num_tokens:,} tokens of {a} and {b} are bitwise equal, and {contracts_text}",
    "equal_against_contracts": "all {num_tokens:,} tokens of {a} and {b} are bitwise equal, although their contracts name "
    "{differing}: {copied_text}",
    "copied_rows": "{num_sequences:,} of {of_sequences:,} sequences are bitwise equal in both passes, but only "
    "{equal_elsewhere:.1%} of the tokens of the others: these rows were copied from the other pass",
}
_WORDS: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
    "equal_bits": lambda n: {
        "contracts_text": "their contracts have the same numerics"
        if n["contracts_known"]
        else "no contract gives a reason to differ"
    },
    "equal_against_contracts": lambda n: {
        "copied_text": "two such forward passes are never bitwise equal, so one was copied from the other"
        if "dtype_a" in n
        else "one was copied from the other, or the two are built to be bitwise equal: replay to find out",
        "differing": " and ".join(
            f"{what} {n[f'{what}_a']} and {n[f'{what}_b']}" for what in ("engine", "dtype") if f"{what}_a" in n
        ),
    },
}

COPIES = Fault(
    code="copies", title="one pass is a copy of the other", broken="recording", evidence=_EQUAL, words=_WORDS
)
EQUAL = Fault(code="equal", title="bitwise equal", broken=None, evidence=_EQUAL, words=_WORDS)

MIN_COPIED_TOKENS = 4
"""Minimum number of bitwise-equal logprobs below -1e-3 nats for a row to count as copied."""
COPIED_BY_CHANCE = 1e-4
"""Maximum expected number of groups of rows that are equal by chance, estimated from the share of equal tokens in all other
rows."""


def find_equal(data: PairData) -> list[Finding]:
    """Detect that every compared token has bitwise-equal logprobs in both passes."""
    if not data.num_kept or np.any(data.d != 0.0):
        return []
    differing = _differing(data.contract("a"), data.contract("b"))
    if differing:
        replay = commands.replay(data, "", "as-recorded")
        return [
            COPIES.finding(
                data,
                "equal_against_contracts",
                # Two engines can be built to give equal bits; two dtypes cannot.
                is_expected="dtype_a" not in differing,
                next=replay,
                numbers={"num_tokens": data.num_kept, **data.names, **differing},
            )
        ]
    known = int(bool(data.contract("a") and data.contract("b")))
    return [
        EQUAL.finding(data, "equal_bits", numbers={"num_tokens": data.num_kept, "contracts_known": known, **data.names})
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
    if not copied.any() or not others.any():
        return []
    steps = data.sample.steps
    if steps[copied].max() < steps[others].min():
        return []  # the engine was exact, or not yet stale, at first, and nothing was copied
    beside = others & np.isin(steps, steps[copied])
    # Chance agreement is measured in the steps with equal rows: at other steps the engine may hold different weights.
    beside = beside if beside.any() else others
    # It is measured in rows at the level of rounding, if there are any: in a row with a fault, no token is equal.
    size = np.bincount(data.seq, data.d**2, len(num)) / np.maximum(num, 1)
    fine = beside & (size < allowed_noise(data) ** 2)
    telling_others = (fine if fine.any() else beside)[data.seq] & (data.b < -1e-3)
    equal_elsewhere = float(np.mean(data.d[telling_others] == 0.0)) if telling_others.any() else 1.0
    share = np.bincount(data.seq[telling_others], (data.d == 0.0)[telling_others], len(num))
    share = share / np.maximum(np.bincount(data.seq[telling_others], minlength=len(num)), 1)
    # If nothing was copied, fully equal rows occur together with mostly equal ones.
    mostly = int(np.sum(share[np.unique(data.seq[telling_others])] > 0.5))
    expected = len(num) * max(equal_elsewhere, 1e-3) ** telling[copied].max()
    few = copied.sum() < 3 and telling[copied].max() < 16  # a short row may be equal by chance
    if few or expected > COPIED_BY_CHANCE or mostly > copied.sum() / 4:
        return []
    return [
        COPIES.finding(
            data, "copied_rows", copied[data.seq], effect=0.0, next=commands.stats(data, "sequence"),
            numbers={
                "num_sequences": int(copied.sum()), "of_sequences": int((num > 0).sum()), "equal_elsewhere": equal_elsewhere,
            },
        )
    ]  # fmt: skip


def _differing(a: Contract, b: Contract) -> dict[str, str]:
    """Return the differing contract settings that rule out equal bits, under the keys `engine_a`, `engine_b`,
    `dtype_a`, `dtype_b`."""
    sides = {"engine": (declared(a, "engine"), declared(b, "engine")), "dtype": (dtype_of(a), dtype_of(b))}
    differing = {name: pair for name, pair in sides.items() if all(pair) and pair[0] != pair[1]}
    # With the same dtype, the engine `exact` gives the same bits as another engine.
    if "exact" in sides["engine"] and len(differing) < 2:
        return {}
    return {
        f"{name}_{side}": str(value) for name, pair in differing.items() for side, value in zip("ab", pair, strict=True)
    }
