"""The alarms of a whole trace."""

from __future__ import annotations

from ..facts.read_series import read_series
from ..trace.database import Database
from ..trace.source import Pair
from .figures import read_token_figures
from .reading import AlarmReadings, judge_alarms
from .repeats import Repeats


def read_alarms(database: Database, pair: Pair) -> AlarmReadings:
    """Judge every alarm over the steps of the one run that is open, as `watch` does once it has read them all."""
    run = database.sources[0].run
    repeats = Repeats()
    repeats.keep(database, run, ())
    return judge_alarms(read_series(database, pair=pair), repeats, read_token_figures(database, pair, run))
