"""tim-trace: record, replay and query the training-inference mismatch of LLM RL runs.

Every verb of the command line is a function here, under the same name and with the same options. Names are imported when
they are asked for.
"""

from typing import TYPE_CHECKING

from tim_trace.schemas.lazy import make_lazy

if TYPE_CHECKING:
    from tim_trace.analysis.attribution.attribute import attribute
    from tim_trace.analysis.check.check import check
    from tim_trace.analysis.comparison.compare import compare
    from tim_trace.analysis.corrections import corrections
    from tim_trace.analysis.diagnosis.diagnose import diagnose
    from tim_trace.analysis.dynamics.dynamics import dynamics
    from tim_trace.analysis.export.export import export_run
    from tim_trace.analysis.gate.gate import gate
    from tim_trace.analysis.info import info
    from tim_trace.analysis.objective.objective import objective
    from tim_trace.analysis.queries.catalogue import query
    from tim_trace.analysis.query import sql
    from tim_trace.analysis.report.report import report
    from tim_trace.analysis.stats import stats
    from tim_trace.analysis.triangulate import triangulate
    from tim_trace.analysis.verify import verify
    from tim_trace.analysis.views import connect
    from tim_trace.analysis.watch.watch import watch
    from tim_trace.analysis.weights import export, weights
    from tim_trace.replay.engine import replay
    from tim_trace.replay.gradients.engine import gradient
    from tim_trace.schemas.loss import Loss
    from tim_trace.tracer.importers.import_dump import import_dump
    from tim_trace.tracer.importers.neutral import import_parquet
    from tim_trace.tracer.launch import record
    from tim_trace.tracer.recorder import Recorder
    from tim_trace.tracer.weights.attach import attach

__version__ = "0.1.0"
__all__ = [
    "Loss", "Recorder", "attach", "attribute", "check", "compare", "connect", "corrections", "diagnose", "dynamics", "export", "export_run", "gate",
    "gradient", "import_dump", "import_parquet", "info", "objective", "query", "record", "replay", "report", "sql", "stats",
    "triangulate", "verify", "watch", "weights",
]  # fmt: skip

make_lazy(
    __name__,
    dict.fromkeys(__all__, "tim_trace.analysis")
    | {"Loss": "tim_trace.schemas.loss", "Recorder": "tim_trace.tracer.recorder"},
)
