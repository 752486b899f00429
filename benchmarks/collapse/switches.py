"""Possible faults of a run: one switch each, all off in a healthy run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """Switches of a run; in its twin, one of them has the neutral value."""

    weight_bits: int | None = None
    """Bits to which the engine rounds each weight matrix, with one scale per matrix; None: no rounding."""
    cache: str | None = None
    """Dtype of the engine's KV cache: `bf16`, `fp8` (e4m3), or `int4`, `int2` (one scale per token and head)."""
    engine_dtype: str | None = None
    """Dtype in which the whole engine computes: `bf16` or `fp16`; None: float32, like the trainer."""
    top_p: float = 1.0
    """The engine samples from the nucleus and returns renormalised logprobs; the trainer does not account for it."""
    temperature: float = 1.0
    """The engine's temperature; the trainer's stays 1."""
    unsynchronised: float = 0.0
    """Share of the weight matrices that the engine never receives after the first step."""
    stale: int = 0
    """Number of steps by which the engine's weights lag."""
    declares_stale: bool = True
    """If True, sequences record the version that really sampled them."""
    rate_spike: float = 1.0
    """Factor of the learning rate for a tenth of the run, starting at its middle."""
    rate_factor: float = 1.0
    """Factor of the learning rate throughout the run."""
    schedule: str = "constant"
    """Learning-rate schedule: constant, cosine (to a tenth at the run's end), or length_decay (arXiv 2602.01826)."""
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    """Adam's."""
    noisy_reward: float = 0.0
    """Share of prompts with random rewards."""
    inverted_reward: float = 0.0
    """Share of the prompts that pay 1 - reward."""
    length_reward: float = 0.0
    """Reward for each token, right or wrong."""
    pairing: int = 0
    """Number of rows by which rewards are misaligned with responses."""
    pairs_advantages: bool = False
    """If True, `pairing` moves only the advantages, and the rewards stay aligned."""
    entropy_coefficient: float = 0.0
    """Entropy bonus added to the objective; negative: its sign is wrong."""
    exact: bool = False
    """If True, the engine computes the same bits as the trainer."""
    correction: str = "none"
    """Correction that multiplies each token's loss: none, token_truncate (TIS), token_mask (MIS), sequence_mask."""
    correction_cap: float = 2.0
    begins: float = 0.0
    """Share of the run after which the switch takes effect; before that, engine and rewards are healthy."""

    @property
    def said(self) -> dict[str, Any]:
        """Return the switches that are not neutral."""
        neutral = asdict(Switches())
        return {name: value for name, value in asdict(self).items() if value != neutral[name]}

    @property
    def before(self) -> Switches:
        """Return the run's engine before its switch takes effect."""
        return Switches(exact=self.exact, engine_dtype=self.engine_dtype)
