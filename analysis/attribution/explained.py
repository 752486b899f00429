"""Facts that other facts explain, and so count less: a mismatch that earlier weights explain is no mismatch of engines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .fact import Fact
from .suspect import SUSPECTS

_LAGS = ("declared_lag", "declared_lag_grows", "mismatch_grows_beside_lag")
_OLD = ("earlier_weights",)
_OF_MISMATCH = (
    "mismatch_size", "exact_until", "mismatch_grows_before_fall", "mismatch_grows_with_fall", "check_fails.weights", "check_fails.values",
    "engine_moves_with_mismatch", "engine_moves_on", "declared_fresh", "engine_parts.later", "mismatch",
    "returns_to_reference", "not_sampled_so",
)  # fmt: skip
_OF_LENGTH = ("length_pays_since", "length_explains_rewards", "rewards_by_length", "rewards_by_length_part")
_OF_REWARD = (
    "reward_hides_fall.with", "rewards_beyond_range", "reward_moves_alone", "reward_and_relation_move", "relation_breaks_alone",
    "likelier_earned_more.lost", "likelier_earn_less.share", "advantages_changed.mean",
    "advantages_changed.burst", "rewards",
)  # fmt: skip
_OTHER_RULE = ("rewards_of_other_rule", "rewards_changed", "in_other_rows")
_BY_TREND = ("length_pays.moves", "length_costs.moves")
_SETTINGS = tuple(f"setting.{code}" for code in SUSPECTS)
_OF_UPDATE = ("sampling_parts", "update_parts", "update_or_loss", "update_or_loss_without_advantages", "weights_jump")
_FRESH = ("declared_fresh",)
_BY_SIZE = ("mismatch_steady", "mismatch_grows_by_updates", "check_fails.stale")
EXPLAINED: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (_FRESH, _BY_SIZE),
    (_LAGS, (*_OLD, "engine_moves_on")),
    ((*_OLD, "engine_stands_still"), _OF_MISMATCH),
    (_OF_LENGTH, (*_OF_REWARD, "rewards_of_other_rule", "rewards_changed")),
    (_OTHER_RULE, _BY_TREND),
    (_SETTINGS, _OF_UPDATE),
)
"""Features that explain -> features that they explain, in this order. Any declared lag explains old weights."""


def unexplained(facts: Iterable[Fact]) -> dict[str, Fact]:
    """Return feature -> its strongest fact, with the level reduced by the share that other facts explain."""
    found: dict[str, Fact] = {}
    for one in facts:
        if one.feature not in found or abs(one.level) > abs(found[one.feature].level):
            found[one.feature] = one
    for explaining, explained in EXPLAINED:
        levels = [abs(found[name].level) for name in explaining if name in found]
        share = 1.0 if levels and explaining is _LAGS else max(levels, default=0.0)
        for name in explained if share else ():
            if name in found and name not in explaining:
                found[name] = replace(found[name], level=found[name].level * (1 - share))
    if max((abs(found[name].level) for name in (*_OLD, "engine_stands_still") if name in found), default=0.0) > 0.5:
        for name, behind in (("engine_parts.later", "engine_parts.behind"),):
            if name in found:
                found[behind] = replace(found.pop(name), group="behind", level=1.0)
    return found
