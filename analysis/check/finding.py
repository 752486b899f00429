"""Findings of a check, as codes and numbers. The sentences are in text.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..advice import NOTHING, Advice

FAULTS = {
    "temperature": "temperature on one side only",
    "truncation": "top-p, top-k or min-p renormalised on one side only",
    "grammar": "one side was sampled under a grammar, so its logprobs cover only the allowed tokens",
    "shift": "one side is shifted by a token",
    "row_pairing": "rows of the two sides belong to different sequences",
    "mask": "prompt or tool tokens are counted as sampled tokens",
    "placeholders": "placeholders instead of logprobs",
    "retokenised": "the two sides scored different tokenisations of the text",
    "log_base": "logprobs of one side or both are not natural logarithms",
    "not_logprobs": "values are not logprobs: some are above 0",
    "unrelated": "one side's values do not belong to the sampled tokens",
    "padded_vocabulary": "one side's softmax includes padding of the vocabulary",
    "lengths": "tokens are missing on one side",
    "copies": "one pass is a copy of the other",
    "weights_differ": "the weights differ: stale, partly synchronised, without the adapter, or quantised",
    "computation_differs": "equal weights, but the computation differs: kernel, cache, positions or precision",
    "change_inside_sequence": "weights or prefix cache changed during a sequence",
    "position_onset": "the mismatch begins at one position of all sequences (KV cache or rotary embedding)",
    "subset": "the mismatch is concentrated in part of the run",
    "low_precision_head": "one side's head or log-softmax has low precision",
    "router_flips": "the two sides choose different experts",
}
"""Fault code -> name of the fault. With any of these faults, differences between the passes do not measure numerical
error."""

HEALTHY = {
    "rounding": "rounding at the expected level",
    "equal": "bitwise equal",
    "too_few": "too few tokens",
}
"""Code of a fault-free verdict -> name of the verdict."""

WEIGHT_CAUSES = {
    "stale_weights": "one side's weights are a step or more behind",
    "partial_sync": "some weights were not synchronised",
    "adapter": "the adapter is on one side only",
    "quantised": "one side's weights are quantised",
    "never_synchronised": "the trainer's weights were never sent to the engine",
    "other_weights": "the engine's weights match no recorded version of the trainer",
}
"""Code of the reason why weights differ -> name. A `weights_differ` finding has the code in `numbers["cause"]` if the
recording shows the reason."""

TITLES = FAULTS | HEALTHY | WEIGHT_CAUSES

Number = float | int | str | None

Broken = Literal["recording", "engine", "versions"]
"""What must be fixed. `recording`: the two passes do not hold the same quantity for the same tokens. `engine`: they
hold the same quantity, but engine or trainer used the wrong weights, cache, experts or precision. `versions`: nothing
must be fixed; the policy versions of engine and trainer differ, as in asynchronous training."""

_ENGINE = frozenset(
    {
        "padded_vocabulary",
        "weights_differ",
        "computation_differs",
        "change_inside_sequence",
        "position_onset",
        "subset",
        "low_precision_head",
        "router_flips",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault, or fault-free verdict, found by a check."""

    code: str
    """A key in FAULTS or HEALTHY."""
    signal: str
    """How the fault was detected: a key in text.EVIDENCE."""
    effect: float
    """Root mean square of d over the affected tokens, nats; NaN if one pass has no values there."""
    share: float
    """Share of the compared tokens that is affected, 0 to 1."""
    weight: float = 1.0
    """Share of the mismatch that the fault explains, 0 to 1. It is 1 if the fault was detected by comparing bits."""
    is_expected: bool = False
    """True if the recorded engines and dtypes explain the finding without a fault. It is reported, but the comparison
    stays valid."""
    next: Advice = NOTHING
    """Command that confirms the finding; empty if nothing is left to confirm."""
    numbers: dict[str, Number] = field(default_factory=dict)
    """Fitted or counted values, and the names of the passes concerned."""

    @property
    def title(self) -> str:
        """Name of the fault. If the recording shows why weights differ, the name of that cause; for a change in time,
        with its first step."""
        if self.since is not None:
            before = int(self.numbers.get("last_before") or self.since - 1)
            exact = before == self.since - 1
            return (
                f"the mismatch grows {f'at step {self.since}' if exact else f'between steps {before} and {self.since}'}"
            )
        return TITLES[str(self.numbers.get("cause") or self.code)]

    @property
    def since(self) -> int | None:
        """First inspected step of a `subset` finding that covers the rest of the run, i.e. of a change in time; None
        otherwise."""
        since = self.numbers.get("since")
        return int(since) if self.code == "subset" and since is not None else None

    @property
    def fails(self) -> bool:
        """True if the finding makes the comparison invalid."""
        return self.code in FAULTS and not self.is_expected

    @property
    def broken(self) -> Broken | None:
        """What must be fixed; None if the finding is not a fault."""
        if not self.fails:
            return None
        if self.signal == "policy_versions":
            return "versions"
        return "engine" if self.code in _ENGINE else "recording"
