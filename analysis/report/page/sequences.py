"""The chosen sequences as data of the page: texts as they are, numbers as float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...token_samples.token_sample import TokenSample
from ..subject import Subject
from .packing import floats


def sequences_of(subject: Subject) -> dict[str, Any]:
    """Everything that the page needs to open a sequence."""
    excerpts = subject.excerpts
    return {
        "pair": list(subject.pair),
        "passes": list(excerpts.passes),
        "full": full_colour(subject),
        "sequences": [_sequence(one) for one in excerpts.sequences],
    }


def full_colour(subject: Subject) -> float:
    """|d| from which a token has its full colour, nats: the 99.9 % quantile of the run's, a thousandth at least."""
    return max(float(subject.spread.edges.d[-1]), 1e-3) if subject.spread is not None else 1.0


def facts(one: TokenSample) -> str:
    """A sequence in a line."""
    told = [
        f"{one.num_tokens:,} tokens",
        "" if one.reward is None else f"reward {one.reward:.4g}".replace("nan", "NaN"),
        "" if one.advantage is None else f"advantage {one.advantage:.4g}".replace("nan", "NaN"),
        "" if one.max_abs_d is None else f"largest |d| {one.max_abs_d:.4g}",
        "" if one.sum_d is None else f"sum of d {one.sum_d:.4g} nats",
        "" if one.policy_version is None else f"policy version {one.policy_version}",
        "" if one.finish_reason is None else f"ended by {one.finish_reason}",
        "" if one.group_id is None else f"group {one.group_id}",
    ]
    return ", ".join(each for each in told if each)


def _sequence(one: TokenSample) -> dict[str, Any]:
    states = {name: values.tolist() for name, values in one.state.items()}
    holes = (
        np.any([np.asarray(values) != 0 for values in one.state.values()], axis=0)
        if one.state
        else np.zeros(len(one.ids))
    )
    return {
        "step": one.step, "seq_id": one.seq_id, "facts": facts(one), "num_tokens": one.num_tokens,
        "first_token": one.first_token, "num_prompt_tokens": one.num_prompt_tokens or 0,
        "prompt": [[token, text] for token, text in one.prompt], "ids": one.ids.tolist(), "texts": list(one.texts),
        "mask": [int(kept) for kept in one.mask], "advantage": None if one.advantage is None else _finite(one.advantage),
        "logprobs": {name: floats(values) for name, values in one.logprobs.items()}, "states": states,
        "holes": [int(hole) for hole in holes],
    } | {
        name: floats(values)
        for name, values in (("bias", one.bias), ("entropy", one.entropy), ("advantages", one.advantages))
        if values is not None
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
