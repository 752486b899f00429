"""The length-decay schedule as a torch scheduler."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .length_decay import LengthDecay
from .length_surge import LengthSurge


class LengthDecayLR(LRScheduler):  # type: ignore[misc]
    """Halves the learning rate every 1.8 surge steps once responses surge, down to a tenth (arXiv 2602.01826).

    Call `step` after each update with the mean response length of its batch, in tokens; or `observe` it, where somebody
    else calls `step()`, as a trainer does. It multiplies what is there, so that it composes with other schedulers and
    with groups of different rates; the floor is a tenth of what these alone would give.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> scheduler = LengthDecayLR(optimizer, window=2, gap=0, above=1, of=1)
    >>> for length in (100, 100, 300, 300, 300, 300):
    ...     optimizer.step()
    ...     scheduler.step(length)
    >>> scheduler.surge_step, scheduler.decay_period, scheduler.get_last_lr()
    (3, 5, [0.5])
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        kappa: float = 2.0,
        window: int = 20,
        gap: int = 5,
        above: int = 3,
        of: int = 5,
        stretch: float = 1.8,
        factor: float = 0.5,
        floor: float = 0.1,
        last_epoch: int = -1,
    ):
        """Watch for a surge as LengthSurge does, and decay as LengthDecay does. Raises InvalidOption."""
        surge = LengthSurge(kappa=kappa, window=window, gap=gap, above=above, of=of)
        self.decay = LengthDecay(surge, stretch=stretch, factor=factor, floor=floor)
        self._ratio = 1.0
        self._length: float | None = None
        self._has_begun = False
        super().__init__(optimizer, last_epoch)
        self._has_begun = True

    @property
    def surge_step(self) -> int | None:
        """The update at which responses surged; None before."""
        return self.decay.surge.step

    @property
    def decay_period(self) -> int | None:
        """Updates from one decay to the next; None before there is a surge."""
        return self.decay.decay_period

    def observe(self, mean_response_length: float) -> None:
        """Tell the length of the batch, in tokens, that the next `step()` is of."""
        self._length = float(mean_response_length)

    def step(self, mean_response_length: float | None = None) -> None:
        """End an update; without a length here or observed before it was one without responses."""
        if self._has_begun:
            length = self._length if mean_response_length is None else float(mean_response_length)
            before = self.decay.scale
            self._ratio, self._length = self.decay.observe(length) / before, None
        super().step()

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the groups, times what this update changes."""
        return [group["lr"] * self._ratio for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The schedule's state, as plain values: a run that loads it goes on with the same rates."""
        own = {name: getattr(self, name) for name in ("last_epoch", "base_lrs", "_step_count", "_last_lr")}
        return own | {"decay": self.decay.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another one stood. The rates themselves are in the optimizer's state, as with every scheduler."""
        state = dict(state_dict)
        self.decay.load_state_dict(state.pop("decay"))
        self.__dict__.update(state)
