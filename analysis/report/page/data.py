"""The data of a page: what figures show at one step, and the chosen sequences, compressed into letters that need no escape."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from ...token_samples.token_sample import TokenSample
from ..chart import Chart, Heatmap, HistogramChart, LineChart
from ..subject import Subject
from ..text import sequence


def pack(value: Any) -> str:
    """A value that JSON can say, as base64 of gzip."""
    return pack_text(json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False))


def pack_text(text: str) -> str:
    """A text as base64 of gzip; the same text always gives the same letters."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "surrogatepass"), 6, mtime=0)).decode("ascii")


def floats(values: Any) -> str:
    """Numbers as base64 of little-endian float32."""
    return base64.b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode("ascii")


def frames_of(charts: Iterable[Chart]) -> dict[str, Any]:
    """Key of a chart -> the steps that it has values of, and these values by the column of its data that they replace."""
    found = {}
    for one in charts:
        by_step = getattr(one, "by_step", {})
        if by_step:
            steps = sorted(by_step)
            found[one.key] = {"steps": steps, "fields": _fields(one, steps)}
    return found


def _fields(one: Chart, steps: list[int]) -> list[dict[str, Any]]:
    if isinstance(one, Heatmap):
        counts = np.stack([one.by_step[step] for step in steps])
        return [_field(one.key, 0, "heatmap", counts)]
    if isinstance(one, HistogramChart):
        return [
            _field(one.key, place, "counts", np.stack([one.by_step[step][name] for step in steps]))
            for place, name in enumerate(one.counts)
        ]
    assert isinstance(one, LineChart)
    return [
        _field(one.key, place, "values", np.stack([one.by_step[step][place] for step in steps]))
        for place in range(len(one.lines))
    ]


def _field(key: str, place: int, kind: str, values: np.ndarray) -> dict[str, Any]:
    size = int(np.prod(values.shape[1:]))
    return {"source": f"{key}/{place}", "kind": kind, "size": size, "data": floats(values)}


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


def _sequence(one: TokenSample) -> dict[str, Any]:
    states = {name: values.tolist() for name, values in one.state.items()}
    holes = (
        np.any([np.asarray(values) != 0 for values in one.state.values()], axis=0)
        if one.state
        else np.zeros(len(one.ids))
    )
    return {
        "step": one.step, "seq_id": one.seq_id, "facts": sequence(one), "num_tokens": one.num_tokens,
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
