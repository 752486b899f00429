"""Tokens that are off without a known cause: at one place, in one part of the run, or anywhere; and verdicts without a fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import commands
from ..finding import Fault, Finding
from ..likelihood import Hypothesis, explained, located
from ..pair_data import PairData
from ..rounding import allowed_noise, coarsest, level
from ..where import Where, where_text

_TOKENS = (
    "first_token", "last_token", "from_end", "position", "total_position", "token_id", "token_before", "starts_turn",
)  # fmt: skip
BY_TIME = ("step", "version", "version_a", "version_b", "lag")
MAX_IDS = 20
"""Maximum number of token ids that count as one place."""
_ROW_SETTINGS = ("row", "reward_above_0", "advantage_above_0", "response_length", "total_length")


def _place(numbers: Mapping[str, Any]) -> dict[str, str]:
    sign = numbers["share_lower"]
    lower = f", {sign:.0%} of them less likely to {numbers['a']} than to {numbers['b']}" if not 0.3 < sign < 0.7 else ""
    return {"where": where_text(numbers), "sign_text": lower}


_EVIDENCE = {
    "place": "{num_tokens:,} of {of_tokens:,} tokens are off by {size:.3g} nats on average{sign_text}: {where}; all others by "
    "{elsewhere:.2g}"
}

ONE_PLACE = Fault(
    code="one_place", title="values at one fixed place in the sequences are wrong", broken="computation", evidence=_EVIDENCE,
    words={"place": _place},
)  # fmt: skip
BOUNDARY = Fault(
    code="chunk_boundary", title="tokens at the boundaries of chunks or context-parallel shards are scored wrongly",
    broken="computation", evidence=_EVIDENCE, words={"place": _place},
)  # fmt: skip
SUBSET = Fault(
    code="subset",
    title="the mismatch is concentrated in part of the run",
    broken="engine",
    evidence={
        "column": "{num_sequences:,} of {of_sequences:,} sequences (with {column} {values}) have {ratio:.3g} times the mismatch "
        "of the others (rms {effect:.2g} vs {rms_elsewhere:.2g} nats)"
    },
)


def find_place(data: PairData, places: Sequence[Where]) -> list[Hypothesis]:
    """Detect that all tokens that are off are at one kind of place."""
    found = []
    for place in places:
        if place.feature.startswith(("first_of_chunk", "last_of_chunk", "phase", "every")):
            if place.inside.mean() > 0.5 or (
                place.feature.startswith("phase") and (len(place.values) > 2 or place.ratio < 10)
            ):
                continue
            fault = BOUNDARY
        elif place.feature in _TOKENS and place.inside.mean() < 0.5:
            if place.feature in ("position", "total_position") and place.kind != "one_of" and place.values[0] >= 2:
                continue
            fault = ONE_PLACE
        else:
            continue
        is_id = place.feature.startswith("token")
        if len(place.values) > (MAX_IDS if is_id else 4) or (
            place.feature == "from_end" and (place.kind != "before" or place.values[0] > 4)
        ):
            continue
        finding = fault.finding(
            data, "place", place.inside, weight=explained(data, place.inside), next=commands.far_tokens(data),
            numbers={
                **place.numbers, **data.names, "num_tokens": int(place.inside.sum()), "of_tokens": data.num_kept,
                "size": float(np.mean(np.abs(data.d[place.inside]))),
                "elsewhere": float(np.mean(np.abs(data.d[~place.inside]))),
                "share_lower": float(np.mean(data.d[place.inside] < 0)),
            },
        )  # fmt: skip
        rows = 0.0
        if place.feature.startswith("every"):
            rows = len(np.unique(data.seq)) * np.log(float(place.feature.split("_")[1]))
        each = np.log(len(np.unique(data.sample.tokens))) if is_id else 3.0
        found.append(located(data, finding, place.inside, 2.0 + each * len(place.values) + rows))
    return found


def find_subset(data: PairData, places: Sequence[Where]) -> list[Hypothesis]:
    """Detect an engine, rank, policy version, setting, prompt or range of steps in which the mismatch is concentrated."""
    found = []
    for place in places:
        rows = np.unique(data.seq[place.inside])
        by_time = place.feature in BY_TIME
        known = by_time or place.feature in _ROW_SETTINGS or place.feature in data.sample.settings
        known |= place.feature.startswith(("writer", "contract", "finish_reason", "group_id"))
        if not known or len(place.values) > 20 or (place.feature.endswith("_length") and place.kind == "one_of"):
            continue
        steps = data.sample.steps
        since = _since(steps, rows) if by_time else None
        finding = SUBSET.finding(
            data, "column", place.inside, weight=explained(data, place.inside), next=commands.by_column(data, place.feature),
            numbers={
                "column": place.feature, "values": place.values_text, "ratio": place.ratio, "num_sequences": len(rows),
                "of_sequences": len(np.unique(data.seq)), "rms_elsewhere": data.rms(~place.inside), "since": since,
                "last_before": None if since is None else int(steps[steps < since].max()),
            },
        )  # fmt: skip
        preferred = -2.0 if place.feature == "step" else 0.0
        found.append(located(data, finding, place.inside, preferred + 10.0 * len(place.values)))
    return found


def _since(steps: np.ndarray, rows: np.ndarray) -> int | None:
    """Return the first step of the sequences `rows` if these are all sequences from that step on; None otherwise."""
    marked = np.zeros(len(steps), bool)
    marked[rows] = True
    first = int(steps[marked].min())
    return first if first > steps.min() and np.all(marked[steps >= first]) and not marked[steps < first].any() else None


# --- What is left ------------------------------------------------------------------------------------------------------------

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
