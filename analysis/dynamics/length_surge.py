"""The surge of the response length that comes before a collapse, seen as it happens."""

from __future__ import annotations

from collections import deque
from statistics import median

from ...schemas.errors import InvalidOption


class LengthSurge:
    """Sees when responses become longer by a factor within a few steps.

    arXiv 2602.01826 acts on this surge and does not define it. Here: with L_t the mean response length of step t and base_t
    the median of L over [t - window - gap, t - gap), it is the first t at which L / base is at least `kappa` in `above` of
    the last `of` steps. The gap keeps a rise that takes a few steps out of its own base.

    >>> surge = LengthSurge(window=4, gap=1, above=2, of=2)
    >>> [surge.observe(length) for length in (10, 11, 9, 10, 10, 30, 31, 30)]
    [False, False, False, False, False, False, True, False]
    >>> surge.step
    7
    """

    def __init__(self, *, kappa: float = 2.0, window: int = 20, gap: int = 5, above: int = 3, of: int = 5):
        """Raises InvalidOption for settings under which there is no surge, or always one."""
        if not kappa > 1:
            raise InvalidOption(f"got {kappa}; give a factor above 1, as 2", option="kappa")
        if window < 1 or gap < 0 or not 1 <= above <= of:
            raise InvalidOption(
                f"length surge: got window {window}, gap {gap}, above {above} of {of}; give window >= 1, gap >= 0 and "
                "1 <= above <= of"
            )
        self.kappa, self.window, self.gap, self.above, self.of = kappa, window, gap, above, of
        self.num_steps = 0
        """Steps observed; the first is step 1."""
        self.step: int | None = None
        """The surge; None before there is one."""
        self._lengths: deque[float] = deque(maxlen=window + gap)
        self._over: deque[bool] = deque(maxlen=of)

    def observe(self, length: float | None) -> bool:
        """Take the mean response length of the next step, in tokens, and return whether it is the surge.

        None and NaN are a step without responses. After the first surge nothing is one.
        """
        self.num_steps += 1
        if self.step is not None or length is None or length != length:
            return False
        if len(self._lengths) == self.window + self.gap:
            base = median(list(self._lengths)[: self.window])
            self._over.append(length >= self.kappa * base > 0)
            if sum(self._over) >= self.above:
                self.step = self.num_steps
        self._lengths.append(float(length))
        return self.step is not None
