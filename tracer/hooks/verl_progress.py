"""A verl trainer's progress: the step that verl logs, and policy versions, counted in updates of the actor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of training at the next update of the actor, or during the passes before that update."""

    step: int
    version: int
    """Number of updates in the trainer's weights."""
    old_version: int
    """Number of updates in the weights with which verl computes `old_log_probs`."""
    updates_a_transfer: int
    """Number of updates between two weight transfers to the engine."""
    transfers_ahead: int = 0
    """Offset of verl's transfer number from the actual number of transfers."""
    is_last: bool

    def sampled_by(self, transfer: int | None) -> int | None:
        """Return the number of updates in the weights of a transfer, given verl's number of the transfer."""
        return None if transfer is None else max(int(transfer) - self.transfers_ahead, 0) * self.updates_a_transfer


def progress_of(trainer: Any) -> Progress:
    """Return the progress of a verl trainer: v1, RayPPOTrainer, or one of its asynchronous subclasses."""
    if hasattr(trainer, "current_param_version"):
        return _fully_asynchronous(trainer)
    step = int(trainer.global_steps)
    updates, done = int(getattr(trainer, "parameter_sync_step", 1)), int(getattr(trainer, "local_trigger_step", 0))
    begin = (step - 1) * updates
    # v1's separate_async computes them with the weights at the beginning of the step.
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
    """Return the progress of FullyAsyncTrainer, whose global_steps counts updates, from 1, and which logs transfers as steps."""
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
    """Return True if weights are transferred after the step counter is incremented."""
    return any(parent.__name__ == "OneStepOffRayTrainer" for parent in type(trainer).__mro__)
