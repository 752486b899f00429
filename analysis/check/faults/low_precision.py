"""Logprobs or logits that one side rounded to 16 bits."""

from __future__ import annotations

import numpy as np

from .. import commands
from ..finding import Fault, Finding
from ..hypothesis import Hypothesis, predicting
from ..pair_data import PairData, declared
from ..rounding import HALF_ULP, half_ulp, is_coarse, precisions

LOW_PRECISION = Fault(
    code="low_precision_head",
    title="one side's head or log-softmax has low precision",
    broken="computation",
    evidence={
        "rounded_logprobs": "every logprob of {side} has the precision of {dtype}: the {part} was computed or stored in low precision",
        "rounded_logits": "the logits of {side} are rounded to {dtype}, although its contract says float32: the {part} was "
        "computed or stored in low precision",
    },
)
MIN_SHARE = 0.5
"""Minimum share of the mismatch that rounding of the recorded values must explain if it is unknown how they were
computed. A pass computed entirely in 16 bits naturally has 16-bit logprobs.
"""


def find_low_precision(data: PairData) -> list[Hypothesis]:
    """Detect rounded logprobs, or rounded logits in a pass whose contract says float32."""
    found = []
    for side, precision in zip("ab", precisions(data), strict=True):
        if precision.values is not None and is_coarse(precision.values):
            values = getattr(data, side)
            half = half_ulp(values, precision.values)
            share = float(np.sum(np.minimum(half**2 / 3, data.d**2)) / max(np.sum(data.d**2), 1e-30))
            named = precision.declared in HALF_ULP and precision.values in ("bfloat16", "float16")
            named |= declared(data.contract(side), "logprobs_dtype") == precision.values
            if share > (0.02 if precision.declared else MIN_SHARE):
                finding = _head(data, side, "rounded_logprobs", precision.values, is_expected=named)
                residual = np.sign(data.d) * np.maximum(np.abs(data.d) - half, 0.0)
                every = np.ones(data.num_kept, bool)
                found.append(predicting(data, finding, residual, 0.0, every))
        elif precision.logits in HALF_ULP and precision.declared == "float32":
            finding = _head(data, side, "rounded_logits", precision.logits)
            found.append(Hypothesis(finding=finding, tokens=data.keep.copy(), gain=20.0))
    return found


def _head(data: PairData, side: str, signal: str, dtype: str | None, *, is_expected: bool = False) -> Finding:
    part = "log-softmax" if signal == "rounded_logprobs" else "head"
    return LOW_PRECISION.finding(
        data, signal, is_expected=is_expected, next=commands.replay(data, "--logits-dtype bf16", "head"),
        numbers={"side": data.names[side], "dtype": dtype, "part": part},
    )  # fmt: skip
