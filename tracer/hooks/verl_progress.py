"""Progress of a verl trainer: the step that verl logs, and policy versions counted in actor updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Step and policy versions for the actor's next update and for the passes computed before it."""

    step: int
    version: int
    """Number of actor updates that the trainer's weights have had."""
    old_version: int
    """Number of actor updates in the weights with which verl computes `old_log_probs`."""
    updates_a_transfer: int
    """Number of actor updates between two weight transfers to the engine."""
    transfers_ahead: int = 0
    """Difference between verl's transfer number and the actual number of transfers."""
    is_last: bool

    def sampled_by(self, transfer: int | None) -> int | None:
        """Return the number of actor updates in the weights sent by a transfer. `transfer` is verl's number for it."""
        return None if transfer is None else max(int(transfer) - self.transfers_ahead, 0) * self.updates_a_transfer


def progress_of(trainer: Any) -> Progress:
    """Return the progress of a verl trainer: v1, RayPPOTrainer, or one of its asynchronous subclasses."""
    if hasattr(trainer, "current_param_version"):
        return _fully_asynchronous(trainer)
    step = int(trainer.global_steps)
    updates, done = int(getattr(trainer, "parameter_sync_step", 1)), int(getattr(trainer, "local_trigger_step", 0))
    begin = (step - 1) * updates
    # v1's separate_async computes `old_log_probs` with the weights from the beginning of the step.
    is_separate = hasattr(trainer, "standalone_checkpoint_manager")
    return Progress(
        step=step,
        version=begin + done,
        old_version=begin if is_separate else begin + done,
        updates_a_transfer=updates,
        transfers_ahead=int(_is_one_step_off(trainer)),
        is_last=step >= int(trainer.total_training_steps) and done + 1 >= updates,
    )


def _fully_asynchronous(trainer: Any) -> Progress:
    """Return the progress of verl's FullyAsyncTrainer.

    This trainer's global_steps counts actor updates, from 1, and the steps that it logs are weight transfers.
    """
    updates, done = int(trainer.trigger_parameter_sync_step), int(trainer.global_steps) - 1
    transfers = int(trainer.current_param_version)
    most = trainer.total_train_steps
    return Progress(
        step=transfers + 1,
        version=done,
        old_version=transfers * updates,
        updates_a_transfer=updates,
        is_last=most is not None and done + 1 >= int(most) * updates,
    )


def _is_one_step_off(trainer: Any) -> bool:
    """Return True if the trainer transfers weights after incrementing its step counter, as OneStepOffRayTrainer does."""
    return any(parent.__name__ == "OneStepOffRayTrainer" for parent in type(trainer).__mro__)
