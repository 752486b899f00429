"""Pass the recording options to Ray workers on all nodes."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from typing import Any

from .patches import Original, Patches
from .session import BOOTSTRAP, ENVIRONMENT, Session

_PATHS = "PYTHONPATH"
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable in which `ray job submit` passes the job's configuration, including its runtime environment."""
_INHERITED = "Ray's workers are recorded only if they inherit this process's environment"


def install(session: Session, module: Any) -> Patches:
    """Hook `ray.init`, so that workers are recorded even on an existing cluster."""
    patches = Patches()

    def not_taken_along(error: Exception) -> None:
        session.note(f"{_INHERITED}; passing it to ray.init failed: {type(error).__name__}: {error}")

    def init(original: Original, *args: Any, **kwargs: Any) -> Any:
        given, job = kwargs, os.environ.get(_JOB)
        with session.guard("Ray's workers", otherwise=not_taken_along):
            kwargs = with_workers(kwargs, session.order.to_environment())
        try:
            return original(*args, **kwargs)
        except (TypeError, ValueError) as error:
            if kwargs == given and os.environ.get(_JOB) == job:
                raise
            # Variables added for recording may have caused the error, so try again with the program's own arguments.
            not_taken_along(error)
            if job is not None:
                os.environ[_JOB] = job
            return original(*args, **given)

    if not patches.wrap(module, "init", init):
        session.tell(f"{_INHERITED}; ray.init was not found")
    return patches


def with_workers(kwargs: Mapping[str, Any], order: str) -> dict[str, Any]:
    """Return `ray.init` arguments that add the recording options to the workers' environment.

    Ray rejects variables set by both the submitted job and the program. If the job sets PYTHONPATH, the options go into
    the job's environment instead.
    """
    job = json.loads(os.environ.get(_JOB) or "{}")
    of_program = kwargs.get("runtime_env")
    if _PATHS in _variables(job.get("runtime_env")) and _PATHS not in _variables(of_program):
        os.environ[_JOB] = json.dumps(job | {"runtime_env": with_order(job["runtime_env"], order)})
        return dict(kwargs)
    if of_program is None and not job:  # adding a `runtime_env` argument would override the one in job_config
        of_program = getattr(kwargs.get("job_config"), "runtime_env", None)
    return {**kwargs, "runtime_env": with_order(of_program, order)}


def with_order(runtime_env: Any, order: str) -> Any:
    given = {} if runtime_env is None else copy.copy(runtime_env)
    variables = dict(_variables(given))
    paths = variables.get(_PATHS, os.environ.get(_PATHS, "")).split(os.pathsep)
    others = [path for path in paths if path and path != BOOTSTRAP]
    given["env_vars"] = variables | {ENVIRONMENT: order, _PATHS: os.pathsep.join([BOOTSTRAP, *others])}
    return given


def _variables(runtime_env: Any) -> Mapping[str, str]:
    return (runtime_env or {}).get("env_vars") or {}
