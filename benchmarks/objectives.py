"""Compare `objective` with a bare DuckDB pass over the columns that it needs."""

import tempfile
from pathlib import Path

import duckdb
import numpy as np
from comparison import Comparison, in_turn, ratios
from likeness import LIMIT
from peak import Peak, can_reset
from steps import make_step, record
from tim_trace.analysis.objective.objective import objective
from tim_trace.tracer.recorder import Recorder

NUM_STEPS = 20
ROUNDS = 7
GROUP = 8

BARE = """
SELECT avg(advantage * (a::DOUBLE - b::DOUBLE)), avg(c::DOUBLE - a::DOUBLE)
FROM (
    SELECT advantage, unnest(train.logprobs) AS a, unnest(rollout.logprobs) AS b, unnest(now.logprobs) AS c
    FROM sequences
    JOIN scores AS train USING (step, seq_id)
    JOIN scores AS rollout USING (step, seq_id)
    JOIN scores AS now USING (step, seq_id)
    WHERE train.pass = 'train' AND rollout.pass = 'rollout' AND now.pass = 'current'
)
"""
"""Means of A d and of the drift: a query that only reads and pairs three logprob columns and the advantages."""


def compare():
    """Time `objective` on 20 million tokens, with token-level and sequence-level losses, and a bare DuckDB pass."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace")
        with Recorder(trace) as recorder:
            for number in range(1, NUM_STEPS + 1):
                step = make_step(number)
                rows = len(step.mask)
                advantage = np.random.default_rng(number).normal(size=rows)
                groups = [str(row // GROUP) for row in range(rows)]
                record(recorder, number, step, advantage=advantage, group_ids=groups)
        taken = in_turn(
            ROUNDS,
            bare=lambda: _bare_pass(trace),
            ppo=lambda: objective(trace),
            corrected=lambda: objective(trace, loss="correction=sequence_mask,correction_high=3"),
            gspo=lambda: objective(trace, loss="gspo"),
        )
        for name, what in (
            ("ppo", "PPO's clip"),
            ("corrected", "PPO's clip with a sequence's weight"),
            ("gspo", "GSPO"),
        ):
            over = f"time over that of a bare pass, {what}"
            yield Comparison(what=over, values=ratios(taken[name], taken["bare"]), at_most=4)
        if can_reset():
            gained = []
            for _ in range(3):
                peak = Peak()
                objective(trace)
                gained.append(peak.gained())
            yield Comparison(what="peak memory of objective", values=gained, unit=" MB", at_most=2000)


def _bare_pass(trace):
    connection = duckdb.connect()
    connection.execute(f"SET memory_limit = '{LIMIT}'")
    for table in ("scores", "sequences"):
        connection.execute(f"CREATE VIEW {table} AS FROM '{trace}/{table}/*.parquet'")
    return connection.execute(BARE).fetchall()
