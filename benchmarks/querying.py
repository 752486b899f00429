"""Compare `stats` with a hand-written query."""

import shutil
import tempfile
from pathlib import Path

import duckdb
from comparison import Comparison, in_turn, ratios
from steps import make_step, record
from tim_trace.analysis.stats import stats
from tim_trace.tracer.recorder import Recorder

NUM_STEPS = 20
ROUNDS = 5

BY_HAND = """
WITH tokens AS (
    SELECT *, a - b AS d
    FROM (
        SELECT step, seq_id, unnest(train.logprobs)::DOUBLE AS a, unnest(rollout.logprobs)::DOUBLE AS b
        FROM sequences
        JOIN scores AS train USING (step, seq_id)
        JOIN scores AS rollout USING (step, seq_id)
        WHERE train.pass = 'train' AND rollout.pass = 'rollout'
    )
    WHERE isfinite(a) AND isfinite(b)
),
of_tokens AS (
    SELECT
        step, count(*) AS num_tokens, avg(-d) AS k1, avg(d * d / 2) AS k2, avg(exp(d) - 1 - d) AS k3,
        avg(abs(d)) AS mean_abs_d, sqrt(avg(d * d)) AS rms_d, max(abs(d)) AS max_abs_d,
        quantile_cont(abs(d), [0.5, 0.95, 0.99]) AS quantiles,
        avg((exp(d) NOT BETWEEN 0.8 AND 1.25)::INT) AS share_outside,
        avg(abs(exp(a) - exp(b))) AS prob_diff_mean, max(abs(exp(a) - exp(b))) AS prob_diff_max,
        corr(exp(a), exp(b)) AS prob_pearson,
        sum(exp(d)) ** 2 / (count(*) * sum(exp(2 * d))) AS ess_token, avg(exp(2 * d)) - 1 AS chi2_token
    FROM tokens
    GROUP BY step
),
of_sequences AS (
    SELECT
        step, count(*) AS num_sequences,
        avg(abs(sum_d)) AS log_ppl_abs_diff_sum, avg(abs(sum_d / num_tokens)) AS log_ppl_abs_diff_mean,
        sum(exp(sum_d)) ** 2 / (count(*) * sum(exp(2 * sum_d))) AS ess_sequence,
        avg(exp(2 * sum_d)) - 1 AS chi2_sequence
    FROM (SELECT step, seq_id, sum(d) AS sum_d, count(*) AS num_tokens FROM tokens GROUP BY step, seq_id)
    GROUP BY step
)
SELECT * FROM of_tokens JOIN of_sequences USING (step) ORDER BY step
"""


def compare():
    """Time `stats --by step` on 20 million tokens, and the same aggregates in hand-written DuckDB SQL."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace")
        with Recorder(trace) as recorder:
            for number in range(1, NUM_STEPS + 1):
                record(recorder, number, make_step(number))
        taken = in_turn(
            ROUNDS,
            by_hand=lambda: by_hand(trace),
            from_tokens=lambda: _from_tokens(trace),
            from_sums=lambda: stats(trace, by="step"),
        )
    over = "time over that of the hand-written query,"
    yield Comparison(what=f"{over} reading tokens", values=ratios(taken["from_tokens"], taken["by_hand"]), at_most=1.5)
    yield Comparison(what=f"{over} from the sums", values=ratios(taken["from_sums"], taken["by_hand"]), at_most=0.1)


def by_hand(trace):
    """Return the query's rows over the trace's files."""
    connection = duckdb.connect()
    for name in ("sequences", "scores"):
        connection.execute(f"CREATE VIEW {name} AS FROM '{trace}/{name}/*.parquet'")
    return connection.execute(BY_HAND).fetchall()


def _from_tokens(trace):
    shutil.rmtree(trace / "sums", ignore_errors=True)
    return stats(trace, by="step")
