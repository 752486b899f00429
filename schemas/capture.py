from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from .errors import InvalidOption

LOGITS = "logits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Settings for recording token distributions: level, K and fraction of sequences."""

    level: str = "logprobs"
    """`logprobs` (sampled token only), `topk` or `logits`."""
    k: int | None = None
    """Number of most probable tokens to keep per position. Set only if `level` is `topk`."""
    fraction: float = 1.0
    """Fraction of sequences (0 to 1) whose distributions are kept. Sampled tokens' logprobs are always kept."""

    def __post_init__(self) -> None:
        if self.level not in ("logprobs", "topk", LOGITS):
            raise InvalidOption(f"got {self.level!r}, expected logprobs, topk:K or logits", option="capture")
        if (self.level == "topk") != (self.k is not None) or (self.k is not None and self.k < 1):
            raise InvalidOption(
                f"got {self.level!r} with k={self.k}, expected topk:K with K >= 1, e.g. topk:20", option="capture"
            )
        if not 0.0 <= self.fraction <= 1.0:
            raise InvalidOption(
                f"got {self.fraction}, expected a fraction between 0 and 1, e.g. 0.05", option="capture_fraction"
            )

    @classmethod
    def parse(cls, text: str, fraction: float = 1.0) -> Capture:
        level, _, k = text.partition(":")
        if k and not k.isdecimal():
            raise InvalidOption(f"got {text!r}, expected topk:K, where K is an integer, e.g. topk:20", option="capture")
        return cls(level=level, k=int(k) if k else None, fraction=fraction)

    def __str__(self) -> str:
        return self.level if self.k is None else f"{self.level}:{self.k}"

    @property
    def dense(self) -> bool:
        return self.level != "logprobs" and self.fraction > 0.0

    def selects(self, step: int, seq_id: str) -> bool:
        """Return True if a sequence's distributions are kept. A hash of step and id selects the sequences."""
        if not self.dense:
            return False
        digest = blake2b(f"{step}/{seq_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.fraction * 2.0**64
