"""Compare views of `watch` on a run being recorded with a bare DuckDB pass over both logprob columns."""

import tempfile
from pathlib import Path

from comparison import Comparison, ratios, seconds
from likeness import bare_pass
from steps import make_step, record
from tim_trace.analysis.watch.watch import Watcher
from tim_trace.tracer.recorder import Recorder

NUM_STEPS = 10
ROUNDS = 5


def compare():
    """Time the first view of 10 million tokens, one when nothing is new, and one after a new step of 50,000 tokens."""
    taken = {"bare": [], "first": [], "same": [], "step": []}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace")
        with Recorder(trace, join=True) as live:
            with Recorder(trace, join=True) as sealed:
                for number in range(1, NUM_STEPS + 1):
                    record(sealed, number, make_step(number))
            Watcher(trace).look()  # imports
            for number in range(NUM_STEPS + 1, NUM_STEPS + 1 + ROUNDS):
                watcher = Watcher(trace)
                taken["bare"].append(seconds(lambda: bare_pass(trace)))
                taken["first"].append(seconds(watcher.look))
                while watcher.look().num_unread_steps:
                    pass
                taken["same"].append(seconds(watcher.look))
                record(live, number, make_step(number, num_sequences=50))
                live.flush()
                taken["step"].append(seconds(watcher.look))
    over = "time over that of a bare pass,"
    yield Comparison(what=f"{over} first look", values=ratios(taken["first"], taken["bare"]), at_most=5)
    yield Comparison(what=f"{over} nothing new", values=ratios(taken["same"], taken["bare"]), at_most=0.1)
    yield Comparison(what=f"{over} a new step of 50,000 tokens", values=ratios(taken["step"], taken["bare"]), at_most=1)
