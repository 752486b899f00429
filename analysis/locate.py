"""Find where two executions diverge, and keep the result in the trace."""

from __future__ import annotations

import os
from dataclasses import replace

from ..replay.locate.engine import REFERENCE
from ..replay.locate.engine import locate as locate_operators
from ..replay.locate.question import question_id
from ..replay.locate.unfinished import Unfinished
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
    """Find where two executions of recorded tokens part: the operator, and proof.

    Sequences of one recorded step run through two executions of the recorded weights: a, `arm` (by default as recorded), and b,
    `against` (by default the recorded model in float64); of vLLM with `engine=vllm`, of the exact engine with `engine=exact`. Of each operator of either, what it gives is held against a float64
    model on the same inputs: what came before does not count. An error beyond what rounding can do in its dtype and length of
    sum is no rounding, and the first such operator is the divergence. Where there is none, `carried` says what each operator's
    rounding adds to the gap.

    `steps` names one step. `sequences`: a number (those where trainer and engine lie farthest apart, where both were
    recorded), `random:N`, or names with commas. `layers`: 3 or 2:8, these alone. `operators`: words of their names with
    commas (`q_proj,rotary`), those alone. `patch` computes operators of either
    execution by the other's code, on their own inputs, and says what that removes of the gap: by `kinds`, by `layers` from the front
    on, `all` of both, or `none`. `model_factory` (of a) and `against_factory` (of b), as module:function, build the model by
    the user's code, which then runs once more in float64, where rounding hides nothing.

    With `keep` the result is kept in a local trace, below `locate/`, in the place of an earlier one to the same question:
    the views `operators` and `patches` and the report have it then. Where that cannot be, `not_kept` says why. What is done lies
    there meanwhile, so that the same question goes on from it when it was interrupted; not with code of the user's, which may
    be another one since. Without `keep` nothing is written, and an interrupted one begins anew.

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
    """Where a result is kept now, or why it is not."""
    if not store.is_local:
        return None, "the trace is not a local folder"
    try:
        return write_result(store, question_id(question), question, found), None
    except OSError as error:
        return None, error.strerror or first_line(error)
