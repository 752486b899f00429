"""Logits changed for some tokens before sampling: penalties for repetition, biases, forbidden tokens."""

from __future__ import annotations

import numpy as np

from .. import commands
from ..finding import Fault
from ..kinds import judged, judged_words
from ..likelihood import Hypothesis, of_signs, unexplained
from ..pair_data import PairData
from ..rounding import value_rounding
from ..structure import sampled_mean, sampled_score
from ..where import repeated_in_row

PENALTY = Fault(
    code="penalty", title="a repetition penalty, logit bias or token filter on one side only", broken="recording",
    evidence={
        "repeated": "{side} lowers tokens that occurred before in the {counted} and raises all others: {mean_repeated:+.2g} against "
        "{mean_new:+.2g} nats on average, as with a repetition penalty{recorded_text}",
        "token_ids": "{side} {lowers} {num_ids:,} token ids and {raises} all others, {mean_ids:+.2g} against "
        "{mean_rest:+.2g} nats on average, as with a logit bias or a token filter",
        "judged": judged("a filter, penalty, bias or temperature that one side does not apply"),
        "sampled_elsewhere": "the passes agree, yet logprob + entropy averages to {mean:.3g} nats: the tokens were not "
        "sampled from the recorded distribution{recorded_text}",
    },
    words={
        "repeated": lambda n: {"recorded_text": _recorded(n["recorded"])},
        "token_ids": lambda n: {
            "lowers": "lowers" if n["mean_ids"] < 0 else "raises", "raises": "raises" if n["mean_ids"] < 0 else "lowers",
        },
        "judged": judged_words,
        "sampled_elsewhere": lambda n: {"recorded_text": _recorded(n["recorded"])},
    },
)  # fmt: skip


def _recorded(value: float | None) -> str:
    return "" if value is None else f"; recorded: repetition_penalty {value:g}"


MIN_SIGNS = 0.9
"""Minimum share of the tokens off whose d has the sign that a penalty would cause; by chance, half do."""


def find_penalty(data: PairData) -> list[Hypothesis]:
    """Detect that d has one sign where a token occurred before in its row and the other sign elsewhere. A repetition
    penalty counts prompt and response; frequency and presence penalties count only the response.
    """
    if data.num_kept < 200:
        return []
    kinds = {"row": repeated_in_row(data), "response": repeated_in_row(data, prompt=False)}
    found = [_of_repeats(data, counted, repeated) for counted, repeated in kinds.items()]
    return [each for each in found if each is not None]


def _of_repeats(data: PairData, counted: str, repeated: np.ndarray) -> Hypothesis | None:
    off = np.abs(data.d) > 4 * unexplained(data).sigma * np.maximum(data.rest, 1e-3)
    if (off & repeated).sum() < 20 or (off & ~repeated).sum() < 20:
        return None
    means = float(data.d[repeated & off].mean()), float(data.d[~repeated & off].mean())
    sign = np.where(repeated, np.sign(means[0]), np.sign(means[1]))
    if means[0] * means[1] >= 0 or np.mean(np.sign(data.d[off]) == sign[off]) < MIN_SIGNS:
        return None
    side = "b" if means[0] > 0 else "a"  # the penalised side gives repeated tokens a lower logprob
    flip = -1.0 if side == "b" else 1.0
    finding = PENALTY.finding(
        data, "repeated", off, next=commands.far_tokens(data),
        numbers={
            "side": data.names[side], "counted": counted, "mean_repeated": flip * means[0], "mean_new": flip * means[1],
            "recorded": recorded_penalty(data),
        },
    )  # fmt: skip
    # A recorded penalty is tested first, because it has no fitted parameters.
    cost = 0.0 if recorded_penalty(data) else 8.0
    return of_signs(data, finding, sign, cost)


def find_token_ids(data: PairData) -> list[Hypothesis]:
    """Detect that a few token ids are all lowered, or all raised, and all other tokens change in the opposite
    direction.
    """
    if data.num_kept < 400:
        return []
    tokens = data.sample.tokens[data.keep]
    ids, place = np.unique(tokens, return_inverse=True)
    off = np.abs(data.d) > np.maximum(0.25 * np.median(np.abs(data.d)), 4 * value_rounding(data))
    if off.sum() < 50:
        return []
    num = np.bincount(place[off], minlength=len(ids))
    lean = np.bincount(place[off], np.sign(data.d[off]), len(ids)) / np.maximum(num, 1)
    usual = 1.0 if np.sum(np.sign(data.d[off])) > 0 else -1.0
    other = (num >= 4) & (lean * usual < -0.9)
    if not 1 <= other.sum() <= max(4, len(ids) // 20):
        return []
    chosen = other[place]
    sign = np.where(chosen, -usual, usual)
    if np.mean(np.sign(data.d[off]) == sign[off]) < 0.97 or np.mean(off[~chosen]) < 0.2:
        return []  # a bias changes the normaliser, and so every other token
    means = float(data.d[chosen & off].mean()), float(data.d[~chosen & off].mean())
    finding = PENALTY.finding(
        data, "token_ids", off, next=commands.far_tokens(data),
        numbers={
            "side": data.names["b"], "num_ids": int(other.sum()), "ids": ", ".join(str(each) for each in ids[other][:8]),
            "mean_ids": -means[0], "mean_rest": -means[1],
        },
    )  # fmt: skip
    cost = float(other.sum()) * np.log(len(ids)) + 8.0
    return [of_signs(data, finding, sign, cost)]


def find_sampled_elsewhere(data: PairData) -> list[Hypothesis]:
    """Detect that the tokens were sampled from neither recorded distribution although both passes agree."""
    recorded = recorded_penalty(data)
    scores = {side: sampled_score(data, side) for side in "ab" if getattr(data.sample, side).entropy is not None}
    if not scores or data.num_kept < 400:
        return []
    side = max(scores, key=lambda each: abs(scores[each]))
    mean = sampled_mean(data, side)
    if abs(scores[side]) < (6 if recorded else 12) or mean > -0.05:
        return []
    finding = PENALTY.finding(
        data, "sampled_elsewhere", next=commands.tokens(data), effect=0.0, numbers={"mean": mean, "recorded": recorded}
    )
    return [Hypothesis(finding=finding, tokens=np.zeros(len(data.keep), bool), gain=float("inf"))]


def recorded_penalty(data: PairData) -> float | None:
    """Return the recorded repetition penalty if it is not 1."""
    values = data.sample.settings["repetition_penalty"]
    other = values[np.isfinite(values) & (values != 1.0) & (values > 0)]
    return float(np.median(other)) if len(other) else None
