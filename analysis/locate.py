"""Find the operator where two executions diverge, and keep the result in the trace."""

from __future__ import annotations

import os
from dataclasses import replace

from ..replay.locate.engine import REFERENCE
from ..replay.locate.engine import locate as locate_operators
from ..replay.locate.unfinished import Unfinished, question_id
from ..tracer.located.result_files import write_result
from ..tracer.located.results import Located, LocateQuestion
from ..tracer.progress import Progress, no_progress
from ..tracer.store import Store, first_line
from .location import Location, location


def locate(
    trace: str | os.PathLike[str],
    *,
    steps: str = "-1",
    arm: str | None = None,
    against: str = REFERENCE,
    sequences: str = "8",
    layers: str | None = None,
    operators: str | None = None,
    patch: str = "kinds",
    model_factory: str | None = None,
    against_factory: str | None = None,
    weights_from: str | os.PathLike[str] | None = None,
    keep: bool = True,
    progress: Progress = no_progress,
) -> Location:
    """Find the operator where two executions of recorded tokens diverge, with proof.

    Sequences of one recorded step run through two executions of the recorded weights: a, `arm` (by default as recorded), and b,
    `against` (by default the recorded model in float64). `engine=vllm` in either is vLLM, `engine=exact` the exact engine. The output
    of each operator of both is compared with a float64 model on the same inputs, so that earlier errors do not count. The first
    operator whose error exceeds what rounding can cause, given its dtype and the length of its sums, is the divergence. `carried` is
    what each operator's own error adds to the mismatch.

    `steps` names one step. `sequences` is a number (those with the largest mismatch between trainer and engine, if both were
    recorded), `random:N`, or names with commas. `layers` (3 or 2:8) and `operators` (words of names with commas, as `q_proj,rotary`)
    limit what is judged and patched. `patch` computes operators of either execution by the other's code, on their own inputs, and
    measures how much of the mismatch that removes: by `kinds`, by `layers` from the front on, `all` of both, or `none`.
    `model_factory` (of a) and `against_factory` (of b), as module:function, build the model by the user's code, which then runs once
    more in float64, where rounding hides nothing.

    With `keep`, the result is kept in a local trace below `locate/`, where it replaces an earlier one to the same question; the views
    `operators` and `patches` and the report read it there. If it cannot be kept, `not_kept` says why. Until it is finished, its parts
    lie there, so that the same question continues after an interruption, except with a user's code, which may have changed. Without
    `keep` nothing is written.

    Raises CannotReplay, WeightsMissing, DamagedTrace, InvalidOption, TraceNotFound.
    """
    question = LocateQuestion(
        step=-1, arm=arm, against=against, sequences=sequences, layers=layers, operators=operators, patch=patch,
        model_factory=model_factory, against_factory=against_factory,
        weights_from=None if weights_from is None else os.fspath(weights_from),
    )  # fmt: skip
    unfinished = Unfinished(Store(trace), question) if keep else None
    found = locate_operators(
        trace, steps=steps, arm=arm, against=against, sequences=sequences, layers=layers, operators=operators, patch=patch,
        model_factory=model_factory, against_factory=against_factory, weights_from=weights_from, unfinished=unfinished,
        progress=progress,
    )  # fmt: skip
    if unfinished is None:
        return location(found)
    kept, not_kept = _keep(Store(trace), replace(question, step=found.step), found)
    unfinished.remove()
    return location(found, kept=kept, not_kept=not_kept)


def _keep(store: Store, question: LocateQuestion, found: Located) -> tuple[str | None, str | None]:
    """Keep a result; return its path, or why it could not be kept."""
    if not store.is_local:
        return None, "the trace is not a local folder"
    try:
        return write_result(store, question_id(question), question, found), None
    except OSError as error:
        return None, error.strerror or first_line(error)
