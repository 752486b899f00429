"""Python imports this module at startup, because `tim-trace record` puts this folder first on PYTHONPATH.

It starts recording, and then imports the environment's own sitecustomize module, if there is one.
"""

import os
import sys


def _activate() -> None:
    try:
        from tim_trace.tracer.hooks.session import activate
    except ImportError as error:
        print(
            f"tim-trace: {sys.executable} is not recorded, because it cannot import tim_trace ({error}); "
            f"install it there: {sys.executable} -m pip install tim-trace",
            file=sys.stderr,
        )
        return
    if activate() is None:
        print(
            "tim-trace: this process is not recorded, because its launcher forwarded PYTHONPATH but not "
            "TIM_TRACE_RECORD; see docs/start/clusters.md",
            file=sys.stderr,
        )


def _give_way() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    kept = sys.path[:]
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    mine = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if mine is not None:
            sys.modules["sitecustomize"] = mine
    finally:
        sys.path[:] = kept


try:
    _activate()
finally:
    _give_way()
