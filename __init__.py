"""tim-trace: record, replay and query the training-inference mismatch of LLM RL runs.

Each command is also a function in this package, with the same name and options. Functions are imported on first use.
"""

# ruff: noqa: F405  # type checkers find the names in `__all__` through the star import below

from typing import TYPE_CHECKING

from tim_trace.schemas.lazy import make_lazy
from tim_trace.schemas.version import __version__ as __version__

if TYPE_CHECKING:
    from tim_trace.analysis import *  # noqa: F403
    from tim_trace.schemas.loss import Loss
    from tim_trace.tracer.recorder import Recorder

__all__ = [
    "Loss", "Recorder", "attach", "attribute", "certify", "check", "compact", "compare", "connect", "corrections", "diagnose", "dynamics", "example", "export", "export_run", "figures", "gate",
    "gradient", "import_dump", "import_parquet", "info", "locate", "mcp", "objective", "query", "record", "replay", "report", "reproduce", "sql", "stats",
    "triangulate", "verify", "watch", "weights",
]  # fmt: skip

make_lazy(
    __name__,
    dict.fromkeys(__all__, "tim_trace.analysis")
    | {"Loss": "tim_trace.schemas.loss", "Recorder": "tim_trace.tracer.recorder"},
)
