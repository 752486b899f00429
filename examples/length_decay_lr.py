"""The length-decay schedule of arXiv 2602.01826 as a torch scheduler. Copy this file next to your training script.

    scheduler = LengthDecayLR(optimizer)
    scheduler.step(mean_response_length)  # after optimizer.step()

Once response lengths surge, the scheduler halves the learning rate every 1.8 * (surge step) steps, down to a tenth of
what it would have been.
"""

from collections import deque
from statistics import median

from torch.optim.lr_scheduler import LRScheduler


class LengthDecayLR(LRScheduler):
    """Scales the current learning rates, so it can be combined with other schedulers and with parameter groups.

    Let L_t be the mean response length at step t, and base_t the median of L over [t - window - gap, t - gap). The
    surge step is the first step t for which L / base was at least `kappa` in at least `above` of the last `of` steps.
    From then on, the rate is multiplied by `factor` every round(`stretch` * surge step) steps, down to `floor` times
    the rate that would apply without this schedule.

    If a trainer calls `step()` itself, pass the length to `observe` first.
    """

    def __init__(
        self,
        optimizer,
        *,
        kappa=2.0,
        window=20,
        gap=5,
        above=3,
        of=5,
        stretch=1.8,
        factor=0.5,
        floor=0.1,
        last_epoch=-1,
    ):
        self.kappa, self.window, self.gap, self.above, self.of = kappa, window, gap, above, of
        self.stretch, self.factor, self.floor = stretch, factor, floor
        self.surge_step = None
        self.scale = 1.0
        self.num_steps = -1  # becomes 0 when LRScheduler's constructor calls step()
        self._lengths, self._over = deque(maxlen=window + gap), deque(maxlen=of)
        self._ratio, self._length = 1.0, None
        super().__init__(optimizer, last_epoch)

    @property
    def decay_period(self):
        """Number of steps between two decays, or None before a surge."""
        return None if self.surge_step is None else max(1, round(self.stretch * self.surge_step))

    def observe(self, mean_response_length):
        """Store the batch's mean response length, in tokens, for the next `step()`."""
        self._length = float(mean_response_length)

    def step(self, mean_response_length=None):
        """Advance the schedule by one update. Surge detection ignores an update if no length was passed
        here or to `observe`."""
        self.num_steps += 1
        self._detect(self._length if mean_response_length is None else float(mean_response_length))
        before = self.scale
        if self.decay_period is not None and self.num_steps % self.decay_period == 0:
            self.scale = max(self.scale * self.factor, self.floor)
        self._ratio, self._length = self.scale / before, None
        super().step()

    def _detect(self, length):
        if self.surge_step is not None or length is None or length != length:
            return
        if len(self._lengths) == self.window + self.gap:
            base = median(list(self._lengths)[: self.window])
            self._over.append(length >= self.kappa * base > 0)
            if sum(self._over) >= self.above:
                self.surge_step = self.num_steps
        self._lengths.append(length)

    def get_lr(self):
        """Return each group's learning rate, scaled by this update's factor."""
        return [group["lr"] * self._ratio for group in self.optimizer.param_groups]

    def state_dict(self):
        """Return the state as plain values that torch.load can read with weights_only=True."""
        state = {name: value for name, value in vars(self).items() if name != "optimizer" and not callable(value)}
        return state | {"_lengths": list(self._lengths), "_over": list(self._over)}

    def load_state_dict(self, state_dict):
        """Restore the state and settings that `state_dict` returned."""
        vars(self).update(state_dict)
        self._lengths = deque(self._lengths, maxlen=self.window + self.gap)
        self._over = deque(self._over, maxlen=self.of)
