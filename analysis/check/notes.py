"""What could not be asked of a trace, what would make it answerable, and what to know of the answer."""

from __future__ import annotations

import numpy as np

from ..info import steps_text
from .evidence import Evidence
from .thresholds import FEW_TOKENS


def notes(evidence: Evidence) -> list[str]:
    """Sentences, each about a question that this trace leaves open, or about what was judged."""
    sample = evidence.sample
    out = []
    if evidence.num_kept < FEW_TOKENS:
        out.append(
            f"only {evidence.num_kept:,} tokens compare: faults near the level of rounding cannot be seen in so few; record "
            "more sequences"
        )
    if not any(sample.a.contracts) or not any(sample.b.contracts):
        out.append(
            "a pass has no contract, so its dtype, adapters and sampling are known from its numbers alone; record with "
            "`tim-trace record`, or give Recorder.add_contract"
        )
    if evidence.entropy is None:
        out.append("no entropies are recorded: tokens that nobody sampled, but both sides scored, cannot be seen")
    if len(np.unique(sample.steps)) < 3:
        out.append(
            "fewer than three steps: how the gap goes from step to step cannot be seen, which tells other weights apart"
        )
    if all(prompt is None for prompt in sample.prompts):
        out.append("no prompts are recorded: contexts that come again, and the precision of logits, cannot be seen")
    if len(evidence.attempts) > 1:
        out.append(_attempts(evidence))
    return out


def _attempts(evidence: Evidence) -> str:
    """Which attempt at training a run that resumed is judged by."""
    again = [
        f"{'step' if steps[0][0] == steps[-1][1] else 'steps'} {steps_text(steps)} of attempt {attempt.attempt}"
        for attempt in evidence.attempts
        if (steps := attempt.superseded)
    ]
    left_out = f"left out, since made again: {', '.join(again)}" if again else "no step was made twice"
    return f"the run has {len(evidence.attempts)} attempts at training, and each step counts as its newest one made it; {left_out}"
