"""Each CLI command as a function, imported on first use. Only replays need torch."""

from typing import TYPE_CHECKING

from ..schemas.lazy import make_lazy

if TYPE_CHECKING:
    from ..replay.certify.engine import certify
    from ..replay.engine import replay
    from ..replay.gradients.engine import gradient
    from ..replay.reproduce.engine import reproduce
    from ..tracer.importers.import_dump import import_dump
    from ..tracer.importers.neutral import import_parquet
    from ..tracer.launch import record
    from ..tracer.weights.attach import attach
    from .attribution.attribute import attribute
    from .check.check import check
    from .compact import compact
    from .comparison.compare import compare
    from .corrections import corrections
    from .diagnosis.diagnose import diagnose
    from .dynamics.dynamics import dynamics
    from .example import example
    from .export.export import export_run
    from .gate.gate import gate
    from .info import info
    from .locate import locate
    from .mcp_server import mcp
    from .objective.objective import objective
    from .queries.catalogue import query
    from .query import sql
    from .report.figures import figures
    from .report.report import report
    from .stats import stats
    from .triangulate import triangulate
    from .verify import verify
    from .views import connect
    from .watch.watch import watch
    from .weights import export, weights

__all__ = [
    "attach", "attribute", "certify", "check", "compact", "compare", "connect", "corrections", "diagnose", "dynamics", "example", "export", "export_run", "figures", "gate",
    "gradient", "import_dump", "import_parquet", "info", "locate", "mcp", "objective", "query", "record", "replay", "report", "reproduce", "sql", "stats", "triangulate", "verify",
    "watch", "weights",
]  # fmt: skip

make_lazy(
    __name__,
    {
        "attach": "..tracer.weights.attach", "attribute": ".attribution.attribute", "certify": "..replay.certify.engine", "check": ".check.check",
        "compact": ".compact", "compare": ".comparison.compare", "connect": ".views",
        "corrections": ".corrections", "diagnose": ".diagnosis.diagnose", "dynamics": ".dynamics.dynamics", "example": ".example",
        "export": ".weights", "export_run": ".export.export", "figures": ".report.figures", "gate": ".gate.gate",
        "gradient": "..replay.gradients.engine", "import_dump": "..tracer.importers.import_dump",
        "import_parquet": "..tracer.importers.neutral", "info": ".info", "locate": ".locate",
        "mcp": ".mcp_server", "objective": ".objective.objective", "query": ".queries.catalogue", "record": "..tracer.launch",
        "replay": "..replay.engine", "report": ".report.report",
        "reproduce": "..replay.reproduce.engine", "sql": ".query", "stats": ".stats",
        "triangulate": ".triangulate", "verify": ".verify", "watch": ".watch.watch", "weights": ".weights",
    },
)  # fmt: skip
