"""Progress of the verbs that read every token of a trace: what it counts, and that bars come one after the other."""

import threading
from contextlib import contextmanager

import duckdb
import numpy as np
import pytest
from builders import add_step, make_batch, make_trace
from tim_trace.analysis import attribute, check, diagnose, dynamics
from tim_trace.analysis.views import open_database
from tim_trace.tracer.recorder import Recorder

STEPS, ROWS = 48, 64
"""So many sequences that they come in several batches."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("progress") / "run"
    batches = make_trace(folder, steps=STEPS, rows=ROWS)
    return folder, sum(len(row) for batch in batches.values() for row in batch["response_ids"])


class Bars:
    """Every bar that was drawn, as what, its total and its advances."""

    def __init__(self):
        self.drawn, self.num_open = [], 0

    @contextmanager
    def __call__(self, what, total):
        assert not self.num_open, f"{what} is drawn inside of another bar"
        advances = []
        self.drawn.append((what, total, advances))
        self.num_open += 1
        try:
            yield advances.append
        finally:
            self.num_open -= 1


READINGS = {
    check: ["reading tokens"],
    dynamics: ["reading tokens by step"],
    attribute: ["reading tokens by step", "reading tokens"],
    diagnose: ["reading tokens", "reading tokens by step"],
}


@pytest.mark.parametrize("verb", READINGS, ids=lambda verb: verb.__name__)
def test_progress_counts_the_tokens_as_they_are_read(trace, verb):
    folder, num_tokens = trace
    bars = Bars()
    verb(folder, progress=bars)
    readings = [bar for bar in bars.drawn if bar[0].startswith("reading tokens")]
    assert [what for what, _, _ in readings] == READINGS[verb]
    for _, total, advances in readings:
        assert total == sum(advances) == num_tokens
        assert len(advances) > 2
        assert max(advances) < num_tokens / 2


@pytest.mark.parametrize("verb", [dynamics, diagnose], ids=lambda verb: verb.__name__)
def test_progress_counts_the_series_in_which_changes_are_looked_for(trace, verb):
    bars = Bars()
    verb(trace[0], progress=bars)
    ((_, total, advances),) = [bar for bar in bars.drawn if bar[0] == "finding changes"]
    assert advances == [1] * total
    assert total > 5


FOLLOWED = {check: "reading a sample of steps", dynamics: "reading entropy by step", attribute: "reading sequences"}


@pytest.mark.parametrize("verb", FOLLOWED, ids=lambda verb: verb.__name__)
def test_progress_follows_a_long_query_to_its_end(tmp_path, verb):
    with Recorder(tmp_path / "run") as recorder:
        for step in range(60):
            fallen = {"reward": np.full(16, 1.0 if step < 30 else 0.0) + np.arange(16) % 2 / 10}
            batch = make_batch(rows=16, seed=step) | fallen
            added = add_step(recorder, step, batch, passes=["rollout"])
            recorder.add_scores("train", added, logprobs=batch["train"], entropy=[-row for row in batch["train"]])
    bars = Bars()
    verb(tmp_path / "run", progress=bars)
    ((_, total, advances),) = [bar for bar in bars.drawn if bar[0] == FOLLOWED[verb]]
    assert sum(advances) == total == 100
    assert min(advances) >= 0


def test_a_query_that_fails_ends_its_bar_and_names_the_query_s_error(trace):
    database, bars = open_database(trace[0]), Bars()
    with database.telling(bars), pytest.raises(duckdb.CatalogException), database.following("reading"):
        database.connection.execute("SELECT * FROM nothing_of_this_name")
    assert [what for what, _, _ in bars.drawn] == ["reading"]
    assert not [thread for thread in threading.enumerate() if thread.name == "following"]


def test_a_control_s_tokens_are_counted_too(trace, tmp_path):
    folder, _ = trace
    batches = make_trace(tmp_path / "control", steps=3)
    bars = Bars()
    attribute(folder, control=tmp_path / "control", progress=bars)
    of_control = sum(len(row) for batch in batches.values() for row in batch["response_ids"])
    assert ("reading tokens by step", of_control) in [(what, total) for what, total, _ in bars.drawn]


def test_an_open_database_tells_nobody_after_a_verb_has_ended(trace):
    database = open_database(trace[0])
    bars = Bars()
    dynamics(database, progress=bars)
    drawn = len(bars.drawn)
    attribute(database)
    assert len(bars.drawn) == drawn
