"""The device of a model, and the GPUs of a Ray actor."""

from __future__ import annotations

from ..schemas.errors import InvalidOption, option


def device_here() -> str:
    """Return `cuda` if torch has a GPU, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def gpus_of_actor(ray: str | None, gpus_per_arm: float | None) -> float:
    """Return the GPUs of an actor with a model: a fraction of one, one, or several. Raises InvalidOption."""
    if ray is None:
        if gpus_per_arm is not None:
            raise InvalidOption(f"applies to a cluster only; add {option('ray', 'auto')}", option="gpus_per_arm")
        return 0.0
    if gpus_per_arm is None:
        return 1.0 if device_here() == "cuda" else 0.0
    if gpus_per_arm < 0 or (gpus_per_arm > 1 and gpus_per_arm != int(gpus_per_arm)):
        raise InvalidOption(
            f"got {gpus_per_arm:g}; use a fraction from 0 to 1, or a whole number", option="gpus_per_arm"
        )
    return float(gpus_per_arm)
