"""What is known about a suspect beyond the model: the kind of mismatch, and the rerun or replay that would decide."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace

from ..advice import Advice
from ..facts.mismatch import FROM_START, FROM_UPDATES
from .looks.engine import carried
from .run_facts import Facts
from .suspect import Suspect

_OF_WEIGHTS = ("weights_differ", "change_inside_sequence", "subset", "copies")

_NEXT = {
    "optimizer": "rerun from the last version before the drop with a tenth of the learning rate and everything else unchanged",
    "reward": "score the recorded responses of the steps around the drop again with the verifier, and compare with sequences.reward",
    "pairing": "compare seq_id of rewards, advantages and logprobs where the trainer builds its batch, for one step",
    "entropy": "rerun with the sign and size of the entropy term changed (or a higher clip bound, clip_high 0.28)",
    "data": "evaluate the weights before and after the change on the earlier prompts: if both do equally well, the prompts are the cause",
    "truncation": "sample one step again from the same weights with a larger max_tokens, and compare the rewards",
    "reference": "rerun from the last version before the drop with a KL coefficient of 0 and everything else unchanged",
    "advantages": "recompute the advantages of one step from sequences.reward and group_id, and compare with sequences.advantage",
}  # fmt: skip
"""Suspect -> what would decide whether it is the cause."""


def described(facts: Facts, suspects: Iterable[Suspect]) -> tuple[Suspect, ...]:
    """Return suspects with the kind of mismatch and with what would decide."""
    return tuple(
        replace(suspect, detail=kind(facts) if suspect.code == "mismatch" else "", next=_next(facts, suspect.code))
        for suspect in suspects
    )


def _next(facts: Facts, suspect: str) -> Advice:
    trace, step = shlex.quote(facts.trace), facts.fall.step if facts.fall else "all"
    if suspect == "mismatch" and facts.mismatch is None:
        return Advice("tim-trace record -o RUN -- COMMAND", "with an engine that returns logprobs")
    if suspect == "mismatch":
        found = facts.checked.findings[0].next if facts.checked else None
        return Advice(found) if found else Advice(f"tim-trace triangulate {trace} --steps {step}")
    if suspect == "staleness":
        return Advice(
            f"tim-trace replay {trace} --steps {step} --weights-version V-1",
            "or rerun synchronously: one policy version per step",
        )
    if suspect == "length":
        return Advice(
            f"tim-trace query by-length {trace}",
            "then rerun with a penalty for overlong responses or a larger max_tokens",
        )
    return Advice(remark=_NEXT[suspect]) if suspect in _NEXT else Advice()


def kind(facts: Facts) -> str:
    """Return the kind of mismatch: check's finding, corrected by the onset and growth of the mismatch."""
    first = facts.checked.findings[0] if facts.checked else None
    if first is not None and first.signal == "engine_weights":
        return str(first.numbers["cause"])
    if facts.checked is None or facts.checked.is_valid or first is None or carried(facts) < 0.1:
        return ""
    run, earlier, code = facts.mismatch, facts.earlier_weights, first.code
    if run is None or code not in _OF_WEIGHTS:
        return code
    if earlier is not None and earlier.explains:
        return "stale_weights"
    if code == "copies" and run.begins != FROM_UPDATES:
        return code
    # Before any update, trainer and engine have the same weights unless one of them quantises its weights.
    if run.begins == FROM_START:
        return "quantised" if code != "change_inside_sequence" else code
    if run.begins == FROM_UPDATES:
        return "partial_sync" if run.grows else "stale_weights"
    return str(first.numbers.get("cause") or code)
