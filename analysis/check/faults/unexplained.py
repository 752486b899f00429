"""Verdicts on what remains after all explanations: rounding, too little data to judge, or tokens that nothing
explains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import commands
from ..finding import Fault, Finding
from ..pair_data import PairData
from ..rounding import allowed_noise, coarsest, level
from ..where import Where, where_text

ROUNDING = Fault(
    code="rounding",
    title="rounding at the expected level",
    broken=None,
    evidence={
        "rounding": "the logits differ by {level:.2g} nats rms, where at most {allowed:.2g} is expected from rounding "
        "of {dtypes}, and no single token is off by more than rounding"
    },
    words={
        "rounding": lambda n: {
            "dtypes": " and ".join(f"{n[f'dtype_{side}'] or 'an unknown dtype'} ({n[side]})" for side in "ab")
        }
    },
)
TOO_FEW = Fault(
    code="too_few",
    title="too few tokens",
    broken=None,
    evidence={
        "too_few": "only {num_tokens:,} comparable tokens: below {least:,} only missing values, bitwise equality and gross errors "
        "are checked; record more sequences"
    },
)


def _where(numbers: Mapping[str, Any]) -> dict[str, str]:
    lower = numbers["share_lower"]
    sign = f"; {lower:.0%} of them are less likely to {numbers['a']}" if not 0.3 < lower < 0.7 else ""
    scattered = (
        f"they are scattered over {numbers['num_sequences']:,} of {numbers['of_sequences']:,} sequences and "
        f"{numbers['num_ids']:,} token ids"
    )
    if numbers["num_tokens"] == 1:
        scattered = (
            f"it is at position {numbers['position']} of sequence {numbers['seq_id']!r} of step {numbers['step']}"
        )
    return {"where": where_text(numbers) if numbers.get("feature") else scattered, "sign_text": sign}


UNEXPLAINED = Fault(
    code="unexplained",
    title="tokens are off and no known cause explains them",
    broken="computation",
    evidence={
        "off": "{num_tokens:,} of {of_tokens:,} tokens are off by {size:.3g} nats on average, at most {largest:.3g}, more than "
        "rounding of {dtypes} can give, and no known cause explains them: {where}{sign_text}"
    },
    words={
        "off": lambda n: {
            "dtypes": " and ".join(n[f"dtype_{side}"] or "an unknown dtype" for side in "ab"), **_where(n),
        }
    },
)  # fmt: skip


def rounding(data: PairData) -> Finding:
    return ROUNDING.finding(
        data, "rounding", numbers={"level": level(data), "allowed": allowed_noise(data), **data.names, **coarsest(data)}
    )


def too_few(data: PairData, least: int) -> Finding:
    return TOO_FEW.finding(data, "too_few", numbers={"num_tokens": data.num_kept, "least": least})


def unexplained_tokens(data: PairData, off: np.ndarray, place: Where | None) -> Finding:
    """Return the finding that nothing explains the tokens `off`, [K] bool, with their place if they share one."""
    size = np.abs(data.d[off])
    worst = int(np.flatnonzero(off)[np.argmax(size)])
    row = int(data.seq[worst])
    return UNEXPLAINED.finding(
        data, "off", off, weight=float(np.sum(size**2) / max(np.sum(data.d**2), 1e-30)), next=commands.far_tokens(data),
        numbers={
            **data.names, **coarsest(data), "num_tokens": int(off.sum()), "of_tokens": data.num_kept, "size": float(size.mean()),
            "largest": float(size.max()), "share_lower": float(np.mean(data.d[off] < 0)),
            "num_sequences": len(np.unique(data.seq[off])), "of_sequences": len(np.unique(data.seq)),
            "position": int(data.position[worst]), "seq_id": data.sample.seq_ids[row], "step": int(data.sample.steps[row]),
            "num_ids": len(np.unique(data.sample.tokens[data.keep][off])), **(place.numbers if place else {}),
        },
    )  # fmt: skip
