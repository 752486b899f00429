from __future__ import annotations

import os
from dataclasses import asdict

from ..replay.arms import Arm, parse_arm
from ..replay.locate.engine import REFERENCE
from ..replay.locate.engine import locate as locate_operators
from ..schemas.checksums import short_hash
from ..schemas.documents import canonical_json
from ..tracer.located import LocateQuestion, write_result
from ..tracer.progress import Progress, no_progress
from ..tracer.store import Store, first_line
from .location import Location, location


def locate(
    trace: str | os.PathLike[str], *, steps: str = "-1", arm: str | None = None, against: str = REFERENCE,
    sequences: str = "8", layers: str | None = None, operators: str | None = None, patch: str = "kinds",
    model_factory: str | None = None, against_factory: str | None = None,
    weights_from: str | os.PathLike[str] | None = None, keep: bool = True, progress: Progress = no_progress,
) -> Location:  # fmt: skip
    """Find the operator where two executions of recorded tokens diverge, with proof.

    With `keep`, stores the result in the trace if it is a local folder, under `locate/`.

    Runs sequences from one recorded step through two executions with the recorded weights: a is `arm` (default: as
    recorded), b is `against` (default: the recorded model in float64). `engine=vllm` runs vLLM.

    Each operator is compared with a float64 model on the same inputs, so earlier operators' errors do not count. The
    executions diverge at the first operator whose error exceeds its rounding bound. `carried` is the share of the
    mismatch caused by an operator's own error.

    `steps` is a single step. `sequences` is a number N (the N sequences with the largest mismatch between trainer and
    engine, if both were recorded), `random:N`, or comma-separated ids. `layers` (3 or 2:8) and `operators`
    (comma-separated parts of names, such as `q_proj,rotary`) limit what is checked and patched. `patch="kinds"`
    computes one kind of operator at a time with the other execution's code, on the same inputs, and measures how much
    of the mismatch this removes; `"none"` skips this. `model_factory` (for a) and `against_factory` (for b) name
    functions, as module:function, that build the model with your own code. Such a model also runs once in float64,
    where rounding cannot hide a bug.

    The stored result replaces an earlier one with the same options. `diagnose` and the views `operators` and `patches`
    read it. If it could not be stored, `not_kept` says why.

    Raises CannotReplay, WeightsMissing, DamagedTrace, InvalidOption, TraceNotFound.
    """
    found = locate_operators(
        trace, steps=steps, arm=arm, against=against, sequences=sequences, layers=layers, operators=operators,
        patch=patch, model_factory=model_factory, against_factory=against_factory, weights_from=weights_from,
        progress=progress,
    )  # fmt: skip
    if not keep:
        return location(found)
    store = Store(trace)
    if not store.is_local:
        return location(found, not_kept="the trace is not a local folder")
    question = LocateQuestion(
        step=found.step, arm=arm, against=against, sequences=sequences, layers=layers, operators=operators, patch=patch,
        model_factory=model_factory, against_factory=against_factory,
        weights_from=None if weights_from is None else os.fspath(weights_from),
    )  # fmt: skip
    try:
        return location(found, kept=write_result(store, question_id(question), question, found))
    except OSError as error:
        return location(found, not_kept=error.strerror or first_line(error))


def question_id(question: LocateQuestion) -> str:
    """Return a result's id: the XXH3-64 hash of its options as canonical JSON, in 16 hexadecimal digits.

    Only the changes that an arm makes are hashed, so that options added in later releases do not change existing ids.
    """
    arms = {"arm": Arm() if question.arm is None else parse_arm(question.arm), "against": parse_arm(question.against)}
    asked = asdict(question) | {side: arm.changes for side, arm in arms.items()}
    if question.operators is None:  # earlier releases lacked this option, and their ids must not change
        del asked["operators"]
    return short_hash(canonical_json(asked).encode())
