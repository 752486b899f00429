"""Tokens that count in the loss but have no finite logprob, or were not sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import commands
from ..finding import Fault, Finding
from ..likelihood import Hypothesis
from ..pair_data import PairData
from ..sample import PassSample, run_lengths

MIN_MISSING_SHARE = 1e-4
"""Minimum share of NULL logprobs for a finding. A smaller share means that a few sequences were cut off; `stats` counts
them."""


def missing_at(numbers: Mapping[str, Any]) -> dict[str, str]:
    """Return a phrase that states where logprobs are missing."""
    if numbers["place"] == "scattered":
        return {"at": f"scattered over {numbers['num_sequences']:,} sequences"}
    if numbers["place"] == "whole":
        return {"at": f"(every token of {numbers['num_sequences']:,} of {numbers['of_sequences']:,} sequences)"}
    return {"at": f"at the {numbers['place']} of {numbers['num_sequences']:,} of {numbers['of_sequences']:,} sequences"}


_SENTENCES = {
    "missing": "{side} has {value} where {other} has a logprob, for {num_tokens:,} tokens {at}",
    "missing_in_both": "neither {side} nor {other} has a finite logprob ({side}: {value}) for {num_tokens:,} tokens {at}",
    "missing_elsewhere": "{a} or {b} has NaN or infinity for {num_tokens:,} tokens of steps that were not inspected individually",
}
_WORDS = {"missing": missing_at, "missing_in_both": missing_at}

LENGTHS = Fault(
    code="lengths", title="tokens are missing on one side", broken="recording", evidence=_SENTENCES, words=_WORDS
)
HOLES = Fault(
    code="placeholders", title="missing values instead of logprobs", broken="recording", evidence=_SENTENCES, words=_WORDS,
)  # fmt: skip


def find_missing(data: PairData) -> list[Finding]:
    """Detect NULL, NaN and infinite logprobs. At the end of a sequence they show that it was cut off, elsewhere that
    values were lost.

    A NULL counts only if the other pass has a value. NaN and infinities always count, however few, because the logprob
    of a sampled token is finite. They are also counted in steps that are not inspected individually.
    """
    sample = data.sample
    sides = (sample.a, sample.b)
    lost_a, lost_b = (~np.isfinite(side.logprobs) for side in sides)
    both = sample.mask & lost_a & lost_b & ~(sample.a.is_null & sample.b.is_null)
    found = [
        finding
        for side, other, lost in ((*sides, lost_a & ~lost_b), (*sides[::-1], lost_b & ~lost_a), (*sides, both))
        if (finding := _of_side(data, side, other, sample.mask & lost, in_both=lost is both)) is not None
    ]
    not_finite = (lost_a & ~sample.a.is_null) | (lost_b & ~sample.b.is_null)
    elsewhere = data.sums.num_not_finite - int((sample.mask & not_finite).sum())
    if elsewhere > 0:
        share = float(elsewhere / max(data.sums.num_tokens + data.sums.num_not_finite, 1))
        found.append(
            HOLES.finding(
                data, "missing_elsewhere", effect=float("nan"), share=share, next=commands.stats(data, "step"),
                numbers={"num_tokens": elsewhere, **data.names},
            )
        )  # fmt: skip
    return found


def _of_side(
    data: PairData, side: PassSample, other: PassSample, missing: np.ndarray, *, in_both: bool
) -> Finding | None:
    sample = data.sample
    share = missing.sum() / max(sample.mask.sum(), 1)
    nulls = side.is_null[missing] & (other.is_null[missing] | ~np.array(in_both))
    if not missing.any() or (nulls.all() and share < MIN_MISSING_SHARE):
        return None
    in_tail = float((missing & _tails(missing, sample.starts)).sum() / missing.sum())
    in_head = float((missing & _tails(missing[::-1], len(missing) - sample.starts[::-1])[::-1]).sum() / missing.sum())
    rows = np.unique(sample.seq[missing])
    lost, counted = (np.bincount(sample.seq[each], minlength=sample.num_sequences) for each in (missing, sample.mask))
    place = "whole" if np.all(lost[rows] == counted[rows]) else "end" if in_tail >= in_head else "beginning"
    cut = missing.sum() >= 3 and max(in_tail, in_head) >= 0.8  # one or two can be at the end of a sequence by chance
    return (LENGTHS if cut else HOLES).finding(
        data, "missing_in_both" if in_both else "missing", effect=float("nan"), share=float(share),
        next=commands.sql(
            data,
            "SELECT step, seq_id, count(*) AS num_tokens, count(*) FILTER (isfinite(logprob)) AS num_scored FROM "
            f"(SELECT step, seq_id, unnest(logprobs) AS logprob FROM scores WHERE \"pass\" = '{side.name}') "
            "GROUP BY ALL HAVING num_scored < num_tokens ORDER BY ALL LIMIT 20",
        ),
        numbers={
            "side": side.name, "other": other.name, "num_tokens": int(missing.sum()), "num_sequences": len(rows),
            "of_sequences": sample.num_sequences, "place": place if cut else "scattered",
            "value": _kind(side.logprobs[missing], nulls),
        },
    )  # fmt: skip


def _kind(values: np.ndarray, nulls: np.ndarray) -> str:
    """Return the kind of missing value: NULL if all are NULL, -inf or infinity if all are, else NaN."""
    if nulls.all():
        return "NULL"
    if np.isneginf(values).all():
        return "-inf"
    return "inf" if np.isinf(values).all() else "NaN"


def _tails(flags: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return [N] bool: True where a token and all later tokens in its sequence are flagged."""
    ends = np.repeat(starts[1:], np.diff(starts))
    # For each token, the index of the first unflagged token at or after it.
    following = np.minimum.accumulate(np.where(~flags, np.arange(len(flags)), len(flags))[::-1])[::-1]
    return np.asarray(flags & (following >= ends))


UNSAMPLED_NATS = -3.0
"""logprob + entropy, nats, below which a token counts as unlikely. With a flat-tailed model, 5 % of sampled tokens are
below it."""
MIN_UNSAMPLED_RUN = 4
"""Minimum number of consecutive unlikely tokens that suggests they were not sampled. In healthy runs, fewer than 2 % of the
sequences contain as many."""

MASK = Fault(
    code="mask",
    title="prompt or tool tokens are counted as sampled tokens",
    broken="recording",
    evidence={
        "unlikely_runs": "in {num_sequences:,} of {of_sequences:,} sequences, runs of consecutive tokens "
        "({num_tokens:,} in all) have a mean logprob of {mean_logprob:.3g} nats on both sides and a mean entropy of "
        "{mean_entropy:.3g}: they were not sampled but come from a prompt or a tool, and they count in the loss"
    },
)


def find_unsampled(data: PairData) -> list[Hypothesis]:
    """Detect runs of tokens whose logprob is far below the negative entropy in both passes. Needs recorded entropies.

    For sampled tokens, logprob + entropy is 0 on average. After an improbable token the entropy rises, so improbable
    tokens rarely follow one another.
    """
    entropy = data.entropy
    if entropy is None:
        return []
    likely = np.maximum(data.a, data.b)
    unlikely = likely + entropy < UNSAMPLED_NATS
    runs = unlikely & (run_lengths(unlikely, data.seq) >= MIN_UNSAMPLED_RUN)
    rows = np.unique(data.seq[runs])
    present = len(np.unique(data.seq))
    if len(rows) < max(4, 0.05 * present):
        return []
    finding = MASK.finding(
        data, "unlikely_runs", runs, weight=0.9, next=commands.row(data, int(rows[0])),
        numbers={
            "num_tokens": int(runs.sum()), "num_sequences": len(rows), "of_sequences": present,
            "mean_logprob": float(likely[runs].mean()), "mean_entropy": float(entropy[runs].mean()),
        },
    )  # fmt: skip
    return [Hypothesis(finding=finding, tokens=data.marked(runs), gain=float("inf"))]
