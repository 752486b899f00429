"""Bit for bit the same: two engines that agree, or one pass written twice."""

from __future__ import annotations

import numpy as np

from ....schemas.contract import Contract, engine_dtype
from .. import commands
from ..evidence import Evidence, declared
from ..finding import Finding
from ..thresholds import COPIED_BY_CHANCE, MIN_COPIED_TOKENS


def find_equal(evidence: Evidence) -> list[Finding]:
    """Every compared token has the same bits on both sides."""
    if not evidence.num_kept or np.any(evidence.d != 0.0):
        return []
    a, b = evidence.contract("a"), evidence.contract("b")
    differing = _differing(a, b)
    names = f"{evidence.sample.a.name} and {evidence.sample.b.name}"
    seen = f"all {evidence.num_kept:,} tokens of {names} have the same bits"
    if differing:
        return [
            Finding(
                code="copies",
                evidence=f"{seen}, although their contracts say {differing}: two such forwards do not agree bit for bit, so "
                "one was filled in from the other",
                effect=0.0,
                share=1.0,
                next=commands.replay(evidence, "--as-recorded", "again"),
            )
        ]
    known = "their contracts name the same numerics" if a and b else "no contract says that they should differ"
    return [Finding(code="equal", evidence=f"{seen}, and {known}", effect=0.0, share=1.0)]


def find_copied_rows(evidence: Evidence) -> list[Finding]:
    """Some sequences are the same to the last bit and the others are not."""
    if not evidence.num_kept:
        return []
    num = np.bincount(evidence.seq, minlength=evidence.sample.num_sequences)
    telling = np.bincount(evidence.seq, evidence.b < -1e-3, minlength=len(num))
    same = np.bincount(evidence.seq, evidence.d == 0.0, minlength=len(num)) == num
    copied = same & (telling >= MIN_COPIED_TOKENS)
    others = ~same & (num > 0)
    if not copied.any() or not others.any():
        return []
    telling_others = others[evidence.seq] & (evidence.b < -1e-3)
    equal_elsewhere = float(np.mean(evidence.d[telling_others] == 0.0)) if telling_others.any() else 1.0
    expected = len(num) * max(equal_elsewhere, 1e-3) ** telling[copied]
    if not np.any(expected < COPIED_BY_CHANCE):
        return []
    affected = copied[evidence.seq]
    return [
        Finding(
            code="copies",
            evidence=f"{copied.sum():,} of {(num > 0).sum():,} sequences have the same bits in both passes, and of the "
            f"others' tokens {equal_elsewhere:.1%}: those rows were filled in from the other pass",
            effect=0.0,
            share=float(affected.mean()),
            next=commands.stats(evidence, "sequence"),
        )
    ]


def _differing(a: Contract, b: Contract) -> str:
    """What two contracts say that excludes equal bits; empty when nothing does."""
    parts = []
    for what, x, y in (
        ("engine", declared(a, "engine"), declared(b, "engine")),
        ("dtype", dtype_of(a), dtype_of(b)),
    ):
        if x and y and x != y:
            parts.append(f"{what} {x} and {y}")
    exact = "exact" in {declared(a, "engine"), declared(b, "engine")} and len(parts) < 2
    return "" if exact else " and ".join(parts)


def dtype_of(contract: Contract) -> str | None:
    """torch's name of the dtype that a pass was computed in, where its contract says so."""
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
