"""The cheapest replay or rerun that would decide about each suspect."""

from __future__ import annotations

import shlex

from ..advice import Advice
from .facts import Facts

RECORD = Advice("tim-trace record -o RUN -- COMMAND", "with an engine that returns logprobs")
LOWER_LEARNING_RATE = Advice(
    remark="rerun from the last version before the drop with a tenth of the learning rate and everything else unchanged"
)
SCORE_AGAIN = Advice(
    remark="score the recorded responses of the steps around the drop again with the verifier, and compare with "
    "sequences.reward"
)
COMPARE_ROWS = Advice(
    remark="compare seq_id of rewards, advantages and logprobs where the trainer builds its batch, for one step"
)
CHANGE_ENTROPY_TERM = Advice(
    remark="rerun with the sign and size of the entropy term changed (or a higher clip bound, clip_high 0.28)"
)

EVALUATE_OLD_PROMPTS = Advice(
    remark="evaluate the weights before and after the change on the earlier prompts: if both do equally well, the prompts are the cause"
)
RAISE_LIMIT = Advice(
    remark="sample one step again from the same weights with a larger max_tokens, and compare the rewards"
)
WITHOUT_KL_TERM = Advice(
    remark="rerun from the last version before the drop with a KL coefficient of 0 and everything else unchanged"
)
COMPUTE_ADVANTAGES = Advice(
    remark="recompute the advantages of one step from sequences.reward and group_id, and compare with sequences.advantage"
)


def triangulate(facts: Facts) -> Advice:
    """Split the mismatch of the step at which the drop begins."""
    return Advice(f"tim-trace triangulate {shlex.quote(facts.trace)} --steps {_steps(facts)}")


def replay_versions(facts: Facts) -> Advice:
    """Replay the step at which the drop begins with older weights."""
    return Advice(
        f"tim-trace replay {shlex.quote(facts.trace)} --steps {_steps(facts)} --weights-version V-1",
        "or rerun synchronously: one policy version per step",
    )


def query_lengths(facts: Facts) -> Advice:
    """Look at rewards by length."""
    return Advice(
        f"tim-trace query by-length {shlex.quote(facts.trace)}",
        "then rerun with a penalty for overlong responses or a larger max_tokens",
    )


def _steps(facts: Facts) -> int | str:
    return facts.fall.step if facts.fall else "all"
