"""Compares the last operators, the head's projection and the log-softmax, with float64.

Shapes: T response tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...tracer.logits import scaled
from ..recorded import RecordedRow
from . import bounds
from .bounds import Rounding
from .judged import Judged, judged
from .reference import Reference
from .taps import RowTaps
from .vllm_execution import AnyExecution

LOG_SOFTMAX, LOGITS = "log_softmax", "logits"
"""Kinds of operators after the head; with user code `logits`: a scale or cap of the head's result."""
Head = list[tuple[Judged, np.ndarray]]
"""Operators after the last hidden states, each with the contribution of its own error to the log-probabilities, [T] nats."""
_LAST = 1 << 40
"""Position of the head in the order of operators: a number larger than that of any operator in a layer."""


def judge_head(
    execution: AnyExecution, reference: Reference, row: RecordedRow, taps: RowTaps, logprobs_T: np.ndarray
) -> Head:
    """Judge the operators after the last hidden states, as one operator if the projection is not called separately."""
    name = execution.head
    hidden = final_hidden(taps, name)
    if hidden is None or not len(row.response_ids):
        return []
    before = slice(len(row.prompt_ids) - 1, len(row.prompt_ids) + len(row.response_ids) - 1)
    numerics, model = execution.numerics, reference.model
    ids_T = torch.from_numpy(row.response_ids.astype(np.int64)).to(hidden.device)
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    hidden_TH = hidden[before]
    dtype = numerics.projection_dtype or hidden_TH.dtype
    found: Head = []
    with torch.no_grad():
        logits_TV = head(hidden_TH.double())
        num_logits = logits_TV.shape[1]
        call = taps.calls.get(name)
        made = None if call is None else call.gives[0]
        weight, out = head.weight, bounds.unit(dtype)
        rounding = Rounding(
            given=dtype if made is None else made.dtype, taken=hidden_TH.dtype,
            weight=execution.weight_dtypes.get(f"{name}.weight"), recorded=reference.recorded_dtypes.get(f"{name}.weight"),
        )  # fmt: skip
        if made is not None:
            made = made[before].flatten(1)
            bound = bounds.of_module(head, (hidden_TH.double(),), logits_TV, 0, rounding)
            # A padded vocabulary has extra rows, whose effect counts for the log-softmax; missing rows count as NaN.
            made = torch.nn.functional.pad(
                made[:, :num_logits], (0, max(num_logits - made.shape[1], 0)), value=torch.nan
            )
            made_TV = scaled(made.double(), config) / numerics.temperature
            exact_T = _logprobs(made_TV, ids_T)
            own = exact_T - _logprobs(scaled(logits_TV, config) / numerics.temperature, ids_T)
            each = judged(name, name.rpartition(".")[2], _LAST, made, logits_TV, bound)
            found.append((each, np.asarray(own.cpu())))
            logits_TV, weight, out = made_TV, None, bounds.unit(made.dtype)
        else:
            logits_TV = scaled(logits_TV, config) / numerics.temperature
            exact_T = _logprobs(logits_TV, ids_T)
        sums = min(max(out, 2.0**-53), 2.0**-24)
        bound_T = bounds.of_logprobs(
            hidden_TH.double(), weight, logits_TV, ids_T, sums, out if weight is not None or out > 2.0**-24 else 2.0**-24,
            numerics.temperature, rounding.casts,
        )  # fmt: skip
        kind = name.rpartition(".")[2] if weight is not None else LOGITS if execution.is_other_code else LOG_SOFTMAX
        values_T = torch.from_numpy(np.asarray(logprobs_T, np.float64)).to(exact_T.device)
        scored_T = torch.from_numpy(row.scored).to(exact_T.device)
        if bool(scored_T.any()):
            each = judged(kind, kind, _LAST + 1, values_T[scored_T], exact_T[scored_T], bound_T[scored_T])
            found.append((each, np.asarray((values_T - exact_T).cpu())))
    return found


def _logprobs(logits_TV: Any, ids_T: Any) -> Any:
    return logits_TV.gather(-1, ids_T[:, None])[:, 0] - logits_TV.logsumexp(-1)


def final_hidden(taps: RowTaps, head: str) -> Any:
    """Return [T, H] for prompt and response: the output of the last operator before the head."""
    calls = [call for name, call in taps.calls.items() if name != head]
    return calls[-1].gives[0] if calls and calls[-1].gives else None
