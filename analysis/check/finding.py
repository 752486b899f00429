"""What a check found: a fault by its code, the evidence for it, and what would confirm it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..advice import NOTHING, Advice

FAULTS = {
    "temperature": "temperature on one side only",
    "truncation": "top-p, top-k or min-p renormalised on one side only",
    "shift": "one side is shifted by a token",
    "row_pairing": "rows of the two sides belong to different sequences",
    "mask": "prompt or tool tokens are counted as sampled ones",
    "placeholders": "placeholders are taken for logprobs",
    "retokenised": "the two sides scored different tokenisations of the text",
    "log_base": "one side holds no natural logarithms of probabilities",
    "padded_vocabulary": "one side's softmax runs over padding of the vocabulary too",
    "lengths": "one side lacks tokens that the other has",
    "copies": "one pass is a copy of the other",
    "stale_weights": "one side's weights are a step or more behind",
    "partial_sync": "some of the weights were not synchronised",
    "change_inside_sequence": "weights or prefix cache changed inside of sequences",
    "position_onset": "everything is off from one position on (KV cache or rotary embedding)",
    "subset": "a part of the data carries the gap",
    "adapter": "the adapter is on one side only",
    "quantised": "one side's weights are quantised",
    "low_precision_head": "one side's head or log-softmax has low precision",
    "router_flips": "experts are chosen differently",
}
"""Code of a fault -> what it is, in words. A trace with one of these is no valid comparison of numerics alone."""

HEALTHY = {
    "rounding": "plain rounding at the expected level",
    "equal": "bitwise equal",
}
"""Code of a verdict without a fault -> what it is."""

TITLES = FAULTS | HEALTHY


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found."""

    code: str
    """Of FAULTS or HEALTHY."""
    evidence: str
    """What was seen, with its numbers, in a sentence."""
    effect: float
    """Root mean square of d over the affected tokens, nats."""
    share: float
    """Affected share of the compared tokens, 0 to 1."""
    weight: float = 1.0
    """How far the evidence goes: the share of the gap that the fault explains, or 1 where it was seen bit for bit."""
    next: Advice = NOTHING
    """The command that would confirm it; empty where nothing is left to confirm."""
    numbers: dict[str, float | int | str | None] = field(default_factory=dict)
    """What was fitted or counted."""

    @property
    def title(self) -> str:
        """The code in words."""
        return TITLES[self.code]

    @property
    def fails(self) -> bool:
        """Whether the comparison is not valid because of it."""
        return self.code in FAULTS
