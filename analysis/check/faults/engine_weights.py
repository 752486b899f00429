"""Engine and trainer weights that differ according to the recorded tensor digests."""

from __future__ import annotations

import numpy as np

from ....schemas.passes import CURRENT, ROLLOUT, TRAIN
from .. import commands
from ..finding import Finding
from ..pair_data import PairData
from .weights import WEIGHTS


def find_engine_weights(data: PairData) -> list[Finding]:
    """Return one finding for each kind of difference between engine and trainer weights that the digests show."""
    if not _is_of_both(data):
        return []
    steps = data.sample.steps[data.seq]
    return [
        WEIGHTS.finding(
            data,
            "engine_weights",
            np.isin(steps, list(fault.steps)),
            next=commands.engine_weights(data),
            numbers={
                "cause": fault.cause,
                "side": ROLLOUT,
                "tensor": fault.tensor,
                "trainer_version": fault.version,
                "holds_version": fault.holds_version,
                "given_version": fault.given_version,
                "is_loaded": int(fault.is_loaded),
                "dtype": fault.cast,
                "num_tensors": fault.num_tensors,
                "of_tensors": fault.of_tensors,
                "num_versions": fault.num_versions,
                "of_versions": fault.of_versions,
                "first_version": fault.first_version,
            },
        )
        for fault in data.engine.faults
    ]


def weights_agree(data: PairData) -> bool:
    """Return True if all engine tensors are equal to the trainer's at every step that has kept tokens."""
    steps = np.unique(data.sample.steps[data.seq]).tolist()
    return bool(steps) and _is_of_both(data) and data.engine.agreeing_steps.issuperset(steps)


def _is_of_both(data: PairData) -> bool:
    names = set(data.names.values())
    return ROLLOUT in names and bool(names & {TRAIN, CURRENT})
