"""The learning-rate schedule that starts from a surge of the response length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...schemas.errors import InvalidOption
from .length_surge import LengthSurge


class LengthDecay:
    """Says by which factor of its first value the learning rate is to be used.

    arXiv 2602.01826, algorithm 1: eta_t = max(eta_{t-1} / 2, floor eta_0) when t mod T = 0, with T = round(1.8 t_surge) and
    floor 0.1. Before a surge of the length nothing decays. t counts updates, the first is 1.
    """

    def __init__(
        self, surge: LengthSurge | None = None, *, stretch: float = 1.8, factor: float = 0.5, floor: float = 0.1
    ):
        """Raises InvalidOption for a stretch that is not above 0, or a factor or floor outside of [0, 1]."""
        if not stretch > 0 or not 0 < factor < 1 or not 0 <= floor <= 1:
            raise InvalidOption(
                f"length decay: got stretch {stretch}, factor {factor}, floor {floor}; give a stretch above 0, a factor "
                "between 0 and 1 and a floor from 0 to 1"
            )
        self.surge = surge or LengthSurge()
        self.stretch, self.factor, self.floor = stretch, factor, floor
        self.scale = 1.0
        """Learning rate over its first value."""

    @property
    def decay_period(self) -> int | None:
        """Updates from one decay to the next; None before there is a surge."""
        return None if self.surge.step is None else max(1, round(self.stretch * self.surge.step))

    def observe(self, length: float | None) -> float:
        """Take the mean response length of the next update, in tokens, and return the factor from here on."""
        self.surge.observe(length)
        if self.decay_period is not None and self.surge.num_steps % self.decay_period == 0:
            self.scale = max(self.scale * self.factor, self.floor)
        return self.scale

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next answers depend on, as plain values."""
        own = {name: getattr(self, name) for name in ("stretch", "factor", "floor", "scale")}
        return own | {"surge": self.surge.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one stood, with its settings."""
        for name in ("stretch", "factor", "floor", "scale"):
            setattr(self, name, state[name])
        self.surge.load_state_dict(state["surge"])
