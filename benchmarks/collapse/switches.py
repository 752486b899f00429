"""What can be wrong with a run: a switch each, all off in a sound one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """The switches of a run; its twin has one of them at the neutral value."""

    weight_bits: int | None = None
    """Bits that the engine rounds every weight matrix to, with one scale each; None: none."""
    cache: str | None = None
    """What the engine's KV cache is rounded to: `bf16`, `fp8` (e4m3), or `int4`, `int2` (a scale each token and head)."""
    engine_dtype: str | None = None
    """What the whole engine computes in: `bf16` or `fp16`; None: float32, as the trainer."""
    top_p: float = 1.0
    """The engine samples from the nucleus and returns renormalised logprobs; the trainer knows nothing of it."""
    temperature: float = 1.0
    """The engine's; the trainer's stays 1."""
    unsynchronised: float = 0.0
    """Share of the weight matrices that the engine never gets again after the first step."""
    stale: int = 0
    """Steps by which the engine's weights are behind."""
    declares_stale: bool = True
    """Whether sequences carry the version that really sampled them."""
    rate_spike: float = 1.0
    """Factor of the learning rate during a tenth of the run, from its middle on."""
    rate_factor: float = 1.0
    """Factor of the learning rate all along."""
    schedule: str = "constant"
    """Of the learning rate: constant, cosine (to a tenth at the end of the run), or length_decay (arXiv 2602.01826)."""
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    """Adam's."""
    noisy_reward: float = 0.0
    """Share of the prompts whose rewards are drawn at random."""
    inverted_reward: float = 0.0
    """Share of the prompts that pay 1 - reward."""
    length_reward: float = 0.0
    """What the reward pays for each token, whether right or wrong."""
    pairing: int = 0
    """Rows by which rewards are handed to the wrong response."""
    pairs_advantages: bool = False
    """Whether `pairing` moves the advantages alone, while the rewards stay where they belong."""
    entropy_coefficient: float = 0.0
    """Added to the objective; negative: the sign of the bonus is wrong."""
    exact: bool = False
    """The engine computes what the trainer computes, bit for bit."""
    correction: str = "none"
    """What multiplies each token's loss: none, token_truncate (TIS), token_mask (MIS), sequence_mask."""
    correction_cap: float = 2.0
    begins: float = 0.0
    """Share of the run after which the switch is thrown; the engine and rewards are sound before."""

    @property
    def said(self) -> dict[str, Any]:
        """The switches that are not neutral."""
        neutral = asdict(Switches())
        return {name: value for name, value in asdict(self).items() if value != neutral[name]}

    @property
    def before(self) -> Switches:
        """The engine of the run before its switch is thrown."""
        return Switches(exact=self.exact, engine_dtype=self.engine_dtype)
