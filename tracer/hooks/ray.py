"""Taking the order to record along to Ray's workers, wherever they run."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

from .patches import Patches
from .session import BOOTSTRAP, ENVIRONMENT, Session

_PATHS = "PYTHONPATH"


def install(session: Session, module: Any) -> Patches:
    """Hook `ray.init`, so that the workers of a cluster that runs already record, too."""
    patches = Patches()

    def init(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with session.guard("Ray's workers"):
            kwargs["runtime_env"] = with_order(kwargs.get("runtime_env"), session.order.to_environment())
        return original(*args, **kwargs)

    if not patches.wrap(module, "init", init):
        session.tell("Ray's workers are recorded only where they inherit this environment (ray.init was not found)")
    return patches


def with_order(runtime_env: Any, order: str) -> Any:
    """A job's runtime environment with the order to record; the rest of it stays.

    A path list of the job's own stays behind ours. Without one, workers get this process's.
    """
    given = {} if runtime_env is None else copy.copy(runtime_env)
    variables = dict(given.get("env_vars") or {})
    paths = variables.get(_PATHS, os.environ.get(_PATHS, "")).split(os.pathsep)
    others = [path for path in paths if path and path != BOOTSTRAP]
    given["env_vars"] = variables | {ENVIRONMENT: order, _PATHS: os.pathsep.join([BOOTSTRAP, *others])}
    return given
