"""A run as one file that a tired engineer understands in a minute.

The package can be called: `tim_trace.analysis.report(run)` is `report.report.report`. It carries the name of what it
makes, so that a function of that name would be hidden by it once it is imported.
"""

import sys
from types import ModuleType
from typing import Any


class _Report(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from .report import report

        return report(*args, **options)


sys.modules[__name__].__class__ = _Report
