"""Decide which trainers are recorded: any class with the functions of TRL's GRPO, RLOO or AsyncGRPO trainers.

Users subclass TRL's classes, and unsloth and ms-swift generate and copy them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from .trl_release import NEEDED, NEEDED_ASYNC, OUTPUT
from .versions import tested_releases, untested, version_sentence

TRL_LOSSES = ("trl.trainer.", "trl.experimental.async_grpo.", "transformers.")
"""Prefixes of the modules whose losses recording knows."""


def name_of(trainer_class: type) -> str:
    return f"{trainer_class.__module__}.{trainer_class.__qualname__}"


def trl_version() -> str | None:
    """Return the version of TRL imported in this process; None without TRL."""
    return getattr(sys.modules.get("trl"), "__version__", None)


def is_asynchronous(trainer_class: type) -> bool:
    """Return True if trainers of this class train on samples from a queue that is filled while they train."""
    return all(callable(getattr(trainer_class, name, None)) for name in NEEDED_ASYNC)


def unrecorded(trainer_class: type) -> str | None:
    """Return the reason why trainers of a class are not recorded; None if they are."""
    if is_asynchronous(trainer_class):
        return None
    lacking = [name for name in NEEDED if not callable(getattr(trainer_class, name, None))]
    return _unrecorded(trainer_class, f"it has no {' and no '.join(lacking)}") if lacking else None


def unknown_output(trainer_class: type, output: Any) -> str | None:
    """Return the reason why the result of a trainer's generation function cannot be recorded; None if it can."""
    if isinstance(output, dict):
        lacking = [name for name in OUTPUT if name not in output]
        found = f"a dict without {', '.join(lacking)}" if lacking else None
    else:
        found = f"a {type(output).__name__} instead of a dict"
    return None if found is None else _unrecorded(trainer_class, f"its {NEEDED[0]} returns {found}")


def _unrecorded(trainer_class: type, reason: str) -> str:
    version = trl_version()
    release = ""
    if version is not None and untested("trl", version):
        release = f" (trl {version} is not a tested version; tested: {tested_releases('trl')})"
    return (
        f"a trainer of module {trainer_class.__module__} is not recorded: {trainer_class.__qualname__}, because "
        f"{reason}{release}; only trainers with the functions of TRL's GRPOTrainer are recorded; for your own loop use "
        "tim_trace.Recorder"
    )


def lacks(trainer_class: type, missing: Mapping[str, str]) -> str | None:
    """Return a sentence that names an untested TRL release and a trainer class's missing functions; None if neither
    applies.
    """
    version = trl_version()
    return None if version is None else version_sentence("trl", version, missing)


def own_loss(trainer_class: type) -> str | None:
    """Return a sentence if a trainer class defines its own loss; None if the loss is TRL's."""
    for name in ("compute_loss", "_compute_loss"):
        function = inspect.unwrap(getattr(trainer_class, name, own_loss))
        module = str(getattr(function, "__module__", ""))
        if function is not own_loss and not module.startswith(TRL_LOSSES):
            return (
                f"{name_of(trainer_class)} overrides {name} (in {module}): `objective` and `gradient` use the loss that TRL "
                "derives from the settings"
            )
    return None
