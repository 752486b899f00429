"""What was sampled, by step: rewards, their spread within groups, and lengths."""

from __future__ import annotations

from ..trace.database import Database
from .columns import Column, by_step, columns_of

# Sums in a fixed order: threads would change last bits from one reading to the next.
_SEQUENCES = """
SELECT step, avg(reward ORDER BY seq_id) FILTER (isfinite(reward)) AS reward, avg(num_response_tokens) AS length,
       avg((finish_reason = 'length')::INTEGER) AS share_length_limited,
       coalesce(avg((NOT isfinite(reward))::INTEGER), 0) AS share_not_finite
FROM sequences WHERE run = $run GROUP BY step ORDER BY step
"""

_GROUPS = """
SELECT step, avg(spread ORDER BY group_id) AS reward_std_within_groups, avg((spread = 0)::INTEGER) AS share_groups_without_spread
FROM (
    SELECT step, group_id,
           CASE WHEN min(reward) = max(reward) THEN 0.0 ELSE stddev_samp(reward ORDER BY seq_id) END AS spread
    FROM sequences
    WHERE run = $run AND group_id IS NOT NULL AND isfinite(reward)
    GROUP BY step, group_id
    HAVING count(*) > 1
)
GROUP BY step ORDER BY step
"""

_MOST = 0.5
"""Share of a step's rewards that are NaN or infinite above which its reward is."""


def read_rollouts(database: Database, run: str) -> list[Column]:
    """Read rewards and lengths by step."""
    sequences = by_step(database, _SEQUENCES, {"run": run})
    groups = by_step(database, _GROUPS, {"run": run})
    no_number = sequences["step"][sequences["share_not_finite"] > _MOST]
    return [
        *columns_of(
            sequences,
            {
                "reward": "mean reward of the sequences",
                "length": "mean response length, tokens",
                "share_length_limited": "share of responses that ended at the limit of tokens",
            },
            not_finite={"reward": no_number},
        ),
        *columns_of(
            groups,
            {
                "reward_std_within_groups": "standard deviation of the reward within a group, mean over groups",
                "share_groups_without_spread": "share of groups in which all rewards are equal",
            },
        ),
    ]
