"""Values in the wrong unit or precision: logarithms to another base, the opposite sign, probabilities, multiples of a logprob,
values above 0, or values that one side rounded to 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import commands
from ..finding import Fault, Finding
from ..likelihood import Hypothesis, predicting
from ..pair_data import PairData, declared
from ..rounding import HALF_ULP, half_ulp, precisions

MAX_LOGPROB = 1e-4
"""Largest value accepted as a logprob, nats: rounding in a float32 softmax can give logprobs up to 1e-6 above 0."""

NOT_LOGPROBS = Fault(
    code="not_logprobs",
    title="values are not logprobs: some are above 0",
    broken="recording",
    evidence={
        "above_zero": "{side} has values above 0 for {num_tokens:,} tokens, from {least:.3g} to {largest:.3g}: a "
        "logprob is at most 0, and no known unit makes these agree with the other side"
    },
)


def find_positive(data: PairData) -> list[Hypothesis]:
    """Detect values above 0 in either pass."""
    found = []
    for side, name in (("a", "logprob_a"), ("b", "logprob_b")):
        own = getattr(data.sample, side)
        where = data.keep & (np.nan_to_num(own.logprobs, nan=-1.0) > MAX_LOGPROB)
        if where.any():
            values = own.logprobs[where]
            query = f"SELECT step, seq_id, position, token_id, logprob_a, logprob_b FROM {{pair}} WHERE mask AND {name} > {MAX_LOGPROB} LIMIT 20"
            finding = NOT_LOGPROBS.finding(
                data, "above_zero", where[data.keep], next=commands.sql(data, query),
                numbers={
                    "side": own.name, "num_tokens": int(where.sum()), "least": float(values.min()), "largest": float(values.max()),
                },
            )  # fmt: skip
            found.append(Hypothesis(finding=finding, tokens=where, gain=float("inf")))
    return found


_LN2, _LN10 = float(np.log(2.0)), float(np.log(10.0))
_SHARED = {"log2": _LN2, "log10": _LN10}
"""Unit in which both passes may have been recorded instead of nats -> nats per unit."""
_NAMES = {
    "log2": "logarithms of base 2",
    "log10": "logarithms of base 10",
    "probability": "probabilities",
    "negative_ln": "negative logprobs",
    "negative_log2": "negative logarithms of base 2",
    "cumulative": "cumulative sums of logprobs along the sequence",
    "factor": "logprobs times {factor:.4g}",
    "factor_by_length": "logprobs divided by a length: the factor differs by sequence",
    "floor": "logarithms of p + {factor:.3g}, so no value is below ln {factor:.3g}",
}

UNIT = Fault(
    code="log_base",
    title="logprobs of one side or both are not natural logarithms, or are scaled",
    broken="recording",
    evidence={
        "other_unit": "{side} holds {unit_text}: nine tenths of the tokens differ by {size:.2g} nats on average as recorded, and by {residual:.2g} after conversion",
        "shared_unit": "{a} and {b} both hold {unit_text}: their mean is {mean_logprob:.3g} and the mean entropy "
        "{mean_entropy:.3g} nats; only in that unit does logprob + entropy average to 0 over sampled tokens",
    },
    words={
        "other_unit": lambda n: {"unit_text": _NAMES[n["unit"]].format_map({"factor": n.get("factor") or 1.0})},
        "shared_unit": lambda n: {"unit_text": _NAMES[n["unit"]]},
    },
)


def _log(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log(values))


UNITS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "log2": lambda values: values * _LN2,
    "log10": lambda values: values * _LN10,
    "probability": _log,
    "negative_ln": np.negative,
    "negative_log2": lambda values: -values * _LN2,
}
"""Unit in which a pass may have been recorded instead of nats -> function that converts to nats."""


def find_unit(data: PairData) -> list[Hypothesis]:
    """Detect a pass whose values agree with the other pass's once converted from another unit or divided by a factor."""
    if data.num_kept < 8 or min(np.std(data.a), np.std(data.b)) < 1e-3:
        return []
    found = []
    for side, values, other in (("a", data.a, data.b), ("b", data.b, data.a)):
        for unit, to_nats in UNITS.items():
            if unit.startswith("negative") and np.median(values) < 0:
                continue
            if unit == "probability" and np.max(values) > 1 + MAX_LOGPROB:
                continue
            nats = to_nats(values)
            if np.mean(np.isfinite(nats)) > 0.99:
                found += _converted(data, side, unit, nats - other, None)
        scale = _slope(values, other)
        if scale is not None:
            found += _converted(data, side, "factor", values / scale - other, scale)
        found += _converted(data, side, "cumulative", _differences(data, values) - other, None)
        floor = _floor(values, other)
        if floor is not None:
            found += _converted(data, side, "floor", _log(np.exp(values) - floor) - other, floor)
        by_row = _row_factors(data, values, other)
        if by_row is not None:
            found += _converted(data, side, "factor_by_length", values / by_row[data.seq] - other, None)
    return found


def _converted(data: PairData, side: str, unit: str, residual: np.ndarray, factor: float | None) -> list[Hypothesis]:
    left, size = _typical(residual[np.isfinite(residual)]), _typical(data.d)
    # The right unit leaves rounding; a wrong one that narrows the difference leaves more than half of it. Where logprobs hardly
    # vary, a constant difference, such as a lost mass, resembles a factor.
    if left > min(0.25 * size, _typical(data.d - np.median(data.d))):
        return []
    finding = UNIT.finding(
        data, "other_unit", weight=max(1 - left / max(size, 1e-12), 0.0),
        next=commands.sql(
            data, "SELECT logprob_a, logprob_b, logprob_a / logprob_b AS ratio FROM {pair} WHERE mask LIMIT 20"
        ),
        numbers={"side": data.names[side], "unit": unit, "residual": left, "size": size, "factor": factor},
    )  # fmt: skip
    cost = {"factor": 8.0, "floor": 8.0, "factor_by_length": 4.0 * len(np.unique(data.seq))}.get(unit, 2.0)
    return [predicting(data, finding, residual if side == "a" else -residual, cost, is_right=True)]


def _differences(data: PairData, values: np.ndarray) -> np.ndarray:
    """Return each value minus the one before it in the sequence."""
    before = np.concatenate([[0.0], values[:-1]])
    starts = np.concatenate([[True], data.seq[1:] != data.seq[:-1]])
    return np.asarray(values - np.where(starts, 0.0, before))


def _slope(values: np.ndarray, other: np.ndarray) -> float | None:
    """Return the factor by which `values` are multiples of `other`; None if it is within 2 % of 1, which scaled logits give
    as well, or if they are not proportional."""
    there = (other < -1.0) & (values < 0)
    if there.sum() < 30:
        there = (other < -0.05) & (values < 0)
    if there.sum() < 30:
        return None
    ratio = values[there] / other[there]
    middle = float(np.median(ratio))
    spread = float(np.median(np.abs(ratio - middle)))
    return middle if abs(np.log(middle)) > 0.02 and spread < 0.02 * middle else None


def _floor(values: np.ndarray, other: np.ndarray) -> float | None:
    """Return the constant that one side added to every probability; None if it added none."""
    raised = np.exp(values) - np.exp(other)
    unlikely = other < np.quantile(other, 0.2)
    middle = float(np.median(raised[unlikely])) if unlikely.any() else 0.0
    spread = float(np.median(np.abs(raised[unlikely] - middle))) if unlikely.any() else 0.0
    return middle if middle > 1e-12 and spread < 0.1 * middle and np.min(values) > np.log(middle) else None


def _row_factors(data: PairData, values: np.ndarray, other: np.ndarray) -> np.ndarray | None:
    """Return the factor [S] of each row if values are multiples of the other side's with a factor that varies by row."""
    there = (other < -0.05) & (values < 0)
    num = np.bincount(data.seq[there], minlength=data.sample.num_sequences)
    if (num >= 4).sum() < 8:
        return None
    total = np.bincount(data.seq[there], np.log(values[there] / other[there]), len(num))
    factors = np.exp(total / np.maximum(num, 1))
    off = np.abs(np.log(np.maximum(-values[there], 1e-9) / np.maximum(-other[there] * factors[data.seq[there]], 1e-9)))
    varies = float(np.std(np.log(factors[num >= 4])))
    return factors if varies > 0.05 and np.median(off) < 0.02 else None


def _typical(d: np.ndarray) -> float:
    """Return the mean of |d| without its largest tenth, nats."""
    size = np.sort(np.abs(d))
    return float(np.mean(size[: max(int(len(size) * 0.9), 1)])) if len(size) else 0.0


def find_shared_unit(data: PairData) -> list[Hypothesis]:
    """Detect that both passes are in the same unit other than nats: only in the correct unit does logprob + entropy
    average to 0. Truncated sampling and penalties change that average too, so nothing is concluded if they are
    recorded."""
    entropy, settings = data.entropy, data.sample.settings
    neutral = {"top_p": 1.0, "top_k": 0.0, "min_p": 0.0, "repetition_penalty": 1.0}
    declared_other = any(
        bool(np.any(np.isfinite(settings[name]) & (settings[name] != value) & (settings[name] >= 0)))
        for name, value in neutral.items()
    )
    is_greedy = bool(np.any(settings["temperature"] == 0))
    if entropy is None or declared_other or is_greedy or data.num_kept < 30 or data.rms() > np.std(data.a) / 2:
        return []
    if abs(_score(data.a + entropy)) < 6:
        return []
    fits = {unit: abs(_score(data.a * nats + entropy)) for unit, nats in _SHARED.items()}
    unit = min(fits, key=lambda each: fits[each])
    # Means can cancel by chance, but only in the right unit does surprise follow entropy one to one at each token.
    if fits[unit] > 4 or not _follows(-data.a * _SHARED[unit], entropy):
        return []
    finding = UNIT.finding(
        data, "shared_unit",
        next=commands.sql(
            data,
            'SELECT "pass", avg(list_avg(logprobs)) AS mean_logprob, avg(list_avg(entropy)) AS mean_entropy '
            "FROM scores GROUP BY ALL ORDER BY ALL",
        ),
        numbers={
            **data.names, "unit": unit, "mean_logprob": float(data.a.mean()), "mean_entropy": float(entropy.mean()),
        },
    )  # fmt: skip
    return [Hypothesis(finding=finding, tokens=data.keep.copy(), gain=float("inf"))]


def _follows(surprise: np.ndarray, entropy: np.ndarray) -> bool:
    """Return True if mean surprise equals mean entropy in each quintile of the tokens by entropy."""
    parts = np.array_split(np.argsort(entropy, kind="stable"), 5)
    errors = [
        abs(surprise[part].mean() - entropy[part].mean()) / max(surprise[part].std() / np.sqrt(len(part)), 1e-3)
        for part in parts
    ]
    means = [abs(surprise[part].mean() / max(entropy[part].mean(), 1e-6) - 1) for part in parts]
    return all(error < 5 or share < 0.15 for error, share in zip(errors, means, strict=True))


def _score(values: np.ndarray) -> float:
    """Return the mean of `values`, [K], divided by its standard error."""
    return float(values.mean() / max(float(values.std()) / np.sqrt(len(values)), 1e-12))


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
        if (dtype := precision.rounded) is not None:
            values = getattr(data, side)
            half = half_ulp(values, dtype)
            share = float(np.sum(np.minimum(half**2 / 3, data.d**2)) / max(np.sum(data.d**2), 1e-30))
            named = precision.declared in HALF_ULP and dtype in ("bfloat16", "float16")
            named |= declared(data.contract(side), "logprobs_dtype") == dtype
            if share > (0.02 if precision.declared else MIN_SHARE):
                finding = _head(data, side, "rounded_logprobs", dtype, is_expected=named)
                residual = np.sign(data.d) * np.maximum(np.abs(data.d) - half, 0.0)
                found.append(predicting(data, finding, residual, 0.0))
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
