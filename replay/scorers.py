"""From an arm to what scores it."""

from __future__ import annotations

from ..schemas.capture import Capture
from ..schemas.contract import Contract
from .arms import Arm
from .exact_scorer import ExactArmScorer
from .hf_scorer import HfScorer
from .recorded import RecordedRun
from .vllm_scorer import VllmScorer

Scorer = HfScorer | VllmScorer
"""Built, given weights and attached to a model, it scores the rows of steps."""
_OF_ENGINE: dict[str, type[HfScorer] | type[VllmScorer]] = {
    "hf": HfScorer, "vllm": VllmScorer, "exact": ExactArmScorer,
}  # fmt: skip


def scorer_of(run: RecordedRun, arm: Arm, contract: Contract, device: str, capture: Capture) -> Scorer:
    """What scores an arm. Raises CannotReplay for what this machine lacks."""
    return _OF_ENGINE[arm.engine](run, arm, contract, device, capture)
