"""Every threshold of an attribution, just under and just over it. Numbers are written out: a changed threshold fails here."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from string import Formatter
from types import SimpleNamespace

import numpy as np
import pytest
from tim_trace.analysis.attribution import control, staleness, thresholds
from tim_trace.analysis.attribution import facts as facts_module
from tim_trace.analysis.attribution.attribution import Attribution
from tim_trace.analysis.attribution.drop import Drop
from tim_trace.analysis.attribution.evidence import Evidence
from tim_trace.analysis.attribution.facts import Facts
from tim_trace.analysis.attribution.mismatch import RunMismatch
from tim_trace.analysis.attribution.odds import ranked
from tim_trace.analysis.attribution.rollouts import Relation, RepeatedResponses, Rollouts
from tim_trace.analysis.attribution.staleness import StaleWeights, read_stale_weights
from tim_trace.analysis.attribution.suspect import SUSPECTS, Suspect
from tim_trace.analysis.attribution.suspects.timing import order
from tim_trace.analysis.attribution.text import (
    DIFFERENCES,
    EVIDENCE,
    EVIDENCE_OF,
    NOTES,
    UNITS,
    attribution_json,
    attribution_text,
)
from tim_trace.analysis.dynamics import fall as fall_module
from tim_trace.analysis.dynamics import timeline
from tim_trace.analysis.dynamics.changes import ChangePoint
from tim_trace.analysis.dynamics.fall import Fall, Outcome, _settled_above, find_fall
from tim_trace.analysis.dynamics.timeline import with_onset

# The functions of the package hide its modules of the same names.
entropy, length, mismatch, optimizer, pairing, reward, stale_suspect = (
    import_module(f"tim_trace.analysis.attribution.suspects.{name}")
    for name in ("entropy", "length", "mismatch", "optimizer", "pairing", "reward", "staleness")
)

WEAK, MEDIUM, STRONG, DECISIVE, CERTAIN = 0.7, 1.5, 2.5, 4.0, 7.0
STEPS = np.arange(1, 101)
FALL = Fall(
    outcome="reward", onset_of="reward", kind="collapse", step=60, low=58, high=62, interval=(57, 63), fallen=65,
    before=0.8, after=0.3, size_in_sd=9.0,
)  # fmt: skip


def run_mismatch(size=0.2, *, first=0.0, settled=0.0, late=0.0):
    return RunMismatch(size=size, first=first, settled=settled, late=late)


def change(step, before=1.0, after=2.0, *, margin=0, size_in_sd=9.0):
    return ChangePoint(step, step - margin, step + margin, before, after, size_in_sd, 0.0)


def repeated(unequal=0.0, shift=0, unequal_shifted=0.0):
    return RepeatedResponses(
        num_pairs=100, unequal=unequal, shift=shift, unequal_shifted=unequal_shifted, mean_difference=1.0
    )


def checked(code, *, fails=True):
    return SimpleNamespace(findings=[SimpleNamespace(code=code, fails=fails, next="")], is_valid=not fails)


class Stub(SimpleNamespace):
    """Facts that were not read from a trace."""

    def values(self, name):
        return np.asarray(self.series.get(name, np.full(len(STEPS), np.nan)), float)

    def around_fall(self):
        return None


def facts(**given):
    empty = {
        "trace": "run", "steps": STEPS, "series": {}, "fall": FALL, "mismatch": None, "checked": None, "changes": {},
        "settings": {}, "repeated": repeated(), "drop": None, "stale_weights": None, "since_fall": None, "hides": False,
        "pays_length": 0.0, "reward_beside": None, "outcome": SimpleNamespace(name="eval/acc"),
        "rollouts": SimpleNamespace(is_alone=False, until=lambda step: None, since=lambda step: None),
    }  # fmt: skip
    return Stub(**empty | given)


def codes(evidence):
    return {each.code: each.points for each in evidence}


def level(before, after, at=50):
    return np.where(at > STEPS, before, after)


# --- one number: function of it, just under, just over ---------------------------------------------------------------

SIZES = [
    (0.003, -4.0, -3.0), (0.01, -3.0, -1.5), (0.03, -1.5, 0.0), (0.06, 0.0, 1.5), (0.15, 1.5, 2.5),
]  # fmt: skip


@pytest.mark.parametrize(("bound", "under", "over"), SIZES)
def test_points_of_the_size_of_a_mismatch(bound, under, over):
    assert (thresholds.of_size(bound), thresholds.of_size(bound * 1.001)) == (under, over)


def test_points_of_evidence_and_priors():
    named = [thresholds.WEAK, thresholds.MEDIUM, thresholds.STRONG, thresholds.DECISIVE, thresholds.CERTAIN]
    assert [*named, thresholds.CONTROL] == [WEAK, MEDIUM, STRONG, DECISIVE, CERTAIN, 7.0]
    assert {code: thresholds.prior(code).points for code in SUSPECTS} == {
        "mismatch": 0.0, "staleness": -0.5, "optimizer": -0.3, "reward": -1.0, "pairing": -1.5, "entropy": -1.0,
        "length": -1.0, "unknown": 0.0,
    }  # fmt: skip


def _size_code(size):
    return codes([mismatch._size(size)])


def _growth_after(size):
    return codes(mismatch._order(facts(mismatch=run_mismatch(size), changes={"mean_abs_d": [change(80, after=9.0)]})))


def _growth(after):
    return codes(
        mismatch._order(facts(mismatch=run_mismatch(), changes={"mean_abs_d": [change(40, before=1.0, after=after)]}))
    )


def _rate(factor):
    rate = level(1.0, factor, at=60)
    return codes(optimizer._spike(facts(series={"learning_rate": rate})))


def _norm(factor):
    return codes(optimizer._norm(facts(changes={"grad_norm": [change(40, after=factor)]})))


def _update(size):
    return codes(optimizer._steps(facts(series={"update_to_weight": np.full(100, size)})))


def _bursts(factor):
    return codes(optimizer._bursts(np.r_[np.ones(20), factor, factor]))


def _beta1(value):
    return codes(optimizer._settings(facts(settings={"adam_beta1": value})))


def _beta2(value):
    return codes(optimizer._settings(facts(settings={"adam_beta2": value})))


def _epsilon(value):
    return codes(optimizer._settings(facts(settings={"adam_epsilon": value})))


def _entropy(at_fall, last, *, rises=False):
    return entropy._judged(1.0, at_fall, last, rises_with_fall=rises)


def _large_updates(size):
    return codes(entropy._large_updates(facts(series={"update_to_weight": np.full(100, size)})))


def _noisy(unequal):
    return codes(reward._noise(facts(repeated=repeated(unequal))))


def _rows(unequal):
    return codes(pairing._rewards(facts(repeated=repeated(unequal, shift=3))))


def _pays(correlation):
    return codes(length._pays(facts(pays_length=correlation)))


def _pays_hidden(correlation):
    moved = {"length": [change(40, before=10.0, after=20.0)]}
    return codes(length._pays(facts(pays_length=correlation, hides=True, changes=moved)))


def _length_moves(factor, correlation=0.0):
    moved = {"length": [change(40, before=10.0, after=10.0 * factor)]}
    return codes(length.length(facts(pays_length=correlation, changes=moved)).evidence)


def _policy(policy, share=0.7, *, is_early=False):
    drop = Drop(step=60, share=share, is_early=is_early, policy=policy)
    return drop.is_of_reward, drop.is_of_policy


TABLE = [
    ("of_size", _size_code, 0.03, ({"mismatch_small": -1.5}, {"mismatch_unclear": 0.0})),
    ("of_size", _size_code, 0.06, ({"mismatch_unclear": 0.0}, {"mismatch_large": 1.5})),
    ("LARGE_MISMATCH", _growth_after, 0.06, (
        {"mismatch_grows_after_fall": -STRONG}, {"mismatch_grows_after_fall": 0.0},
    )),
    ("MISMATCH_JUMPS", _growth, 2.0, ({}, {"mismatch_grows_before_fall": WEAK})),
    ("RATE_SPIKE", _rate, 3.0, ({}, {"learning_rate_spike_at_fall": DECISIVE})),
    ("NORM_JUMPS", _norm, 3.0, ({}, {"grad_norm_grows_before_fall": WEAK})),
    ("LARGE_UPDATE", _update, 0.003, ({"update_size": -WEAK}, {"update_size": MEDIUM})),
    ("HUGE_UPDATE", _update, 0.005, ({"update_size": MEDIUM}, {"update_size": STRONG})),
    ("BURST", _bursts, 8.0, ({}, {"update_bursts": MEDIUM})),
    ("CUSTOMARY", _beta1, 0.5, ({"setting_unusual": STRONG}, {})),
    ("CUSTOMARY", _beta1, 0.98, ({}, {"setting_unusual": STRONG})),
    ("CUSTOMARY", _beta2, 0.9, ({"setting_unusual": STRONG}, {})),
    ("CUSTOMARY", _beta2, 0.99999, ({}, {"setting_unusual": STRONG})),
    ("CUSTOMARY", _epsilon, 1e-16, ({"setting_unusual": STRONG}, {})),
    ("CUSTOMARY", _epsilon, 1e-4, ({}, {"setting_unusual": STRONG})),
    ("ENTROPY_GAINED", lambda x: _entropy(x, 1.0), 2.0, (
        ("entropy_in_range", -STRONG), ("entropy_rose_before_fall", STRONG),
    )),
    ("ENTROPY_LOST", lambda x: _entropy(1.0, x), 0.25, (("entropy_lost", STRONG), ("entropy_lost", MEDIUM))),
    ("ENTROPY_SHRUNK", lambda x: _entropy(1.0, x), 0.6, (("entropy_lost", MEDIUM), ("entropy_in_range", -STRONG))),
    ("ENTROPY_GAINED", lambda x: _entropy(1.0, x), 2.0, (
        ("entropy_in_range", -STRONG), ("entropy_rises_with_fall", 0.0),
    )),
    ("ENTROPY_GAINED", lambda x: _entropy(1.0, x, rises=True), 4.0, (
        ("entropy_rises_with_fall", 0.0), ("entropy_explodes", STRONG),
    )),
    ("LARGE_UPDATE", _large_updates, 0.003, ({}, {"updates_large": -WEAK})),
    ("UNEQUAL", lambda x: list(_noisy(x)), 0.01, (["rewards_deterministic"], ["rewards_noisy"])),
    ("UNEQUAL", _rows, 0.01, ({"rewards_in_their_rows": -MEDIUM}, {"rewards_in_other_rows": CERTAIN})),
    ("UNEQUAL_SHIFTED", lambda x: repeated(1.0, shift=1, unequal_shifted=x).lies_off, 0.35, (True, False)),
    ("LENGTH_PAYS", _pays, 0.5, ({}, {"length_pays": DECISIVE})),
    ("LENGTH_PAYS", _pays_hidden, 0.25, ({}, {"length_pays_while_hidden": STRONG})),
    ("LENGTH_MOVES", _length_moves, 1.3, (
        {"length_steady": -STRONG, "prior": -1.0}, {"length_changes": WEAK, "prior": -1.0},
    )),
    ("LENGTH_MOVES_PAID", lambda x: list(_length_moves(x, 0.9)), 1.05, (
        ["length_steady", "length_pays", "prior"], ["length_changes", "length_pays", "prior"],
    )),
    ("SAME_POLICY", _policy, 3.0, ((True, False), (False, False))),
    ("OTHER_POLICY", _policy, 5.0, ((False, False), (False, True))),
    ("DROPS", lambda x: _policy(1.0, x), 0.6, ((False, False), (True, False))),
    ("DROPS", lambda x: _policy(9.0, x), 0.6, ((False, False), (False, True))),
    ("AT_ONCE", lambda x: run_mismatch(1.0, first=x).begins, 0.35, ("later", "from the start")),
    ("AT_ONCE", lambda x: run_mismatch(1.0, settled=x).begins, 0.35, ("later", "with the first updates")),
    ("GROWTH", lambda x: run_mismatch(2.0, settled=1.0, late=x).grows, 1.6, (False, True)),
    ("AT_ONCE", lambda x: run_mismatch(0.1, first=x, settled=1.0).begins, 0.35, ("with the first updates", "from the start")),
    ("STALE_LEFT", lambda x: StaleWeights(steps=3, left=x, num_pairs=99, farthest=64).explains, 0.2, (True, False)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "judge", "bound", "verdicts"), TABLE, ids=[f"{row[0]}-{row[2]}" for row in TABLE])
def test_a_threshold_decides_where_it_says(name, judge, bound, verdicts):
    assert (judge(bound * 0.999), judge(bound * 1.001)) == verdicts


def test_the_points_of_noisy_rewards_grow_up_to_a_tenth():
    assert _noisy(0.05)["rewards_noisy"] == pytest.approx(DECISIVE / 2)
    assert _noisy(0.1)["rewards_noisy"] == _noisy(0.9)["rewards_noisy"] == DECISIVE


@pytest.mark.parametrize(
    ("farthest", "left", "excluded"), [(19, 0.5, False), (20, 0.5, True), (20, 0.1, False)]
)  # fmt: skip
def test_stale_weights_are_excluded_from_twenty_steps_on(farthest, left, excluded):
    assert StaleWeights(steps=3, left=left, num_pairs=99, farthest=farthest).is_excluded == excluded


@pytest.mark.parametrize(("mean_abs_d", "is_judged"), [(0.499, True), (0.501, False)])
def test_openings_represent_a_mismatch_with_a_fifth_of_it(monkeypatch, mean_abs_d, is_judged):
    n = 100
    columns = (np.zeros(n, np.int64), np.arange(1, n + 1), np.full(n, 0.1), np.zeros(n))
    monkeypatch.setattr(staleness, "_first_of_step", lambda rollouts: columns)
    assert (read_stale_weights(None, mean_abs_d) is not None) == is_judged


# --- correlations of sequences ----------------------------------------------------------------------------------------


def related(monkeypatch, module, *, by_group=0.5, negative=0.0):
    relation = Relation(correlation=by_group, by_group=by_group, num_groups=99, negative=negative)
    monkeypatch.setattr(module, "relation", lambda *arguments: relation)


@pytest.mark.parametrize(
    ("is_alone", "correlation", "codes_"),
    [(False, 0.699, ["advantages_do_not_follow"]), (False, 0.7, []), (True, 0.299, ["advantages_do_not_follow"]), (True, 0.3, [])],
)  # fmt: skip
def test_advantages_follow_rewards_from_a_correlation_on(monkeypatch, is_alone, correlation, codes_):
    related(monkeypatch, pairing, by_group=correlation)
    given = facts()
    given.rollouts.is_alone = is_alone
    assert list(codes(pairing._advantages(given))) == codes_


@pytest.mark.parametrize(
    ("by_group", "negative", "verdict"),
    [
        (0.151, 0.22, {"likelier_earn_more": -WEAK}), (0.151, 0.221, {"likelier_earn_less": STRONG}),
        (0.149, 0.0, {"likelier_earn_no_more": WEAK}), (-0.199, 0.0, {"likelier_earn_no_more": WEAK}),
        (-0.201, 0.0, {"likelier_earn_less": STRONG}),
    ],
)  # fmt: skip
def test_the_direction_of_a_reward(monkeypatch, by_group, negative, verdict):
    related(monkeypatch, reward, by_group=by_group, negative=negative)
    assert codes(reward._direction(facts())) == verdict


@pytest.mark.parametrize(("share", "verdict"), [(0.05, {}), (0.051, {"rewards_changed": DECISIVE})])
def test_rewards_changed_since_the_fall(monkeypatch, share, verdict):
    monkeypatch.setattr(reward, "changed_rewards", lambda before, after: (100, share))
    assert codes(reward._changed(facts())) == verdict


@pytest.mark.parametrize(("reward_after", "hides"), [(0.811, True), (0.809, False)])
def test_a_reward_hides_a_fall_that_it_shows_less_than_a_third_of(reward_after, hides):
    # The evaluation loses 0.625 of its level; 0.3 of that is 0.1875 of a reward of 1.
    given = SimpleNamespace(reward_beside=(1.0, 1 - (1 - reward_after) * 0.1875 / 0.19), fall=FALL)
    assert Facts.hides.func(given) == hides


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        ({"hides": True}, {"reward_hides_fall": STRONG}),
        ({"hides": True, "pays_length": 0.6}, {"reward_hides_fall_pays_length": 0.0}),
        ({"hides": False}, {"reward_falls_too": -WEAK}),
    ],
)  # fmt: skip
def test_what_an_evaluation_says_of_the_reward(given, verdict):
    assert codes(reward._hidden(facts(reward_beside=(1.0, 1.0), **given))) == verdict


# --- order, lags and checks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "expected"), [(57, "first"), (58, "with"), (65, "with"), (66, "after")]
)  # fmt: skip
def test_the_order_of_a_change_and_a_fall(step, expected):
    assert order(facts(), change(step)) == expected


@pytest.mark.parametrize(
    ("at", "verdict"),
    [
        (47, {"learning_rate_spike_before_fall": MEDIUM}), (48, {"learning_rate_spike_at_fall": DECISIVE}),
        (65, {"learning_rate_spike_at_fall": DECISIVE}), (66, {"learning_rate_spike_after_fall": -WEAK}),
    ],
)  # fmt: skip
def test_the_order_of_a_spike_and_a_fall(at, verdict):
    assert codes(optimizer._spike(facts(series={"learning_rate": level(1.0, 9.0, at=at)}))) == verdict


@pytest.mark.parametrize(
    ("step", "mismatch_code", "norm", "lengths"),
    [
        (40, {"mismatch_grows_before_fall": WEAK}, {"grad_norm_grows_before_fall": WEAK}, {"length_changes": WEAK}),
        (60, {"mismatch_grows_with_fall": WEAK}, {}, {"length_changes": WEAK}),
        (80, {"mismatch_grows_after_fall": 0.0}, {"grad_norm_grows_after_fall": -WEAK / 2}, {"length_changes_after_fall": -MEDIUM}),
    ],
)  # fmt: skip
def test_what_comes_after_a_fall_speaks_against(step, mismatch_code, norm, lengths):
    moved = [change(step, after=9.0)]
    given = facts(mismatch=run_mismatch(0.2), changes={"mean_abs_d": moved, "grad_norm": moved, "length": moved})
    assert codes(mismatch._order(given)) == mismatch_code
    assert codes(optimizer._norm(given)) == norm
    assert codes(length._moves(given, 1.3)) == lengths


@pytest.mark.parametrize(("size_in_sd", "num"), [(3.0, 0), (3.01, 1)])
def test_a_rise_counts_from_three_deviations_on(size_in_sd, num):
    moved = {"mean_abs_d": [change(40, after=9.0, size_in_sd=size_in_sd)]}
    assert len(mismatch._order(facts(mismatch=run_mismatch(), changes=moved))) == num


STALE = StaleWeights(steps=3, left=0.1, num_pairs=99, farthest=64)
STUCK = StaleWeights(steps=3, left=0.9, num_pairs=99, farthest=64)


@pytest.mark.parametrize(
    ("lag", "given", "of_staleness", "of_mismatch"),
    [
        (0.0, {"mismatch": run_mismatch(first=1.0)}, {"mismatch_at_first_step_without_lag": -MEDIUM}, {}),
        (0.5, {"mismatch": run_mismatch(first=1.0)}, {"mismatch_at_first_step": -MEDIUM}, {}),
        (0.99, {"mismatch": run_mismatch(), "stale_weights": STALE}, {"stale_weights_match": DECISIVE + 2.5}, {"explained_by_stale_weights": -STRONG}),
        (1.0, {"mismatch": run_mismatch(), "stale_weights": STALE}, {}, {"explained_by_declared_lag": -STRONG}),
        (1.0, {"mismatch": run_mismatch(first=1.0)}, {"mismatch_at_first_step": -MEDIUM}, {}),
        (0.0, {"mismatch": run_mismatch(), "stale_weights": STUCK}, {"stale_weights_excluded": -STRONG}, {}),
        (0.0, {"mismatch": run_mismatch(settled=0.2, late=0.2)}, {"mismatch_steady": STRONG + 2.5}, {}),
        (0.0, {"mismatch": run_mismatch(settled=0.2, late=0.9)}, {}, {}),
        (0.0, {"mismatch": run_mismatch(0.03, settled=0.03)}, {}, {}),
        (0.0, {"mismatch": run_mismatch(0.04, settled=0.04)}, {"mismatch_steady": STRONG}, {}),
        (0.0, {"mismatch": run_mismatch(settled=0.2), "checked": checked("stale_weights")}, {"mismatch_steady_and_check": STRONG + 2.5}, {"explained_by_steady_size": -STRONG}),
    ],
)  # fmt: skip
def test_weights_that_are_behind(lag, given, of_staleness, of_mismatch):
    given = facts(series={"version_lag": np.full(100, lag)}, **given)
    assert codes(stale_suspect._measured(given, lag)) == of_staleness
    assert codes(mismatch._lag(given)) == of_mismatch


@pytest.mark.parametrize(
    ("lag", "verdict"), [(0.99, {"no_declared_lag": -WEAK}), (1.0, {"declared_lag": STRONG + 2.5})]
)
def test_a_declared_lag_counts_from_one_update_on(lag, verdict):
    assert codes(stale_suspect._declared(facts(mismatch=run_mismatch()), lag)) == verdict


@pytest.mark.parametrize(
    ("code", "of_run", "stale", "kind"),
    [
        ("temperature", run_mismatch(first=1.0), None, "temperature"), ("copies", run_mismatch(first=1.0), None, "copies"),
        ("partial_sync", run_mismatch(first=1.0), None, "quantised"), ("partial_sync", run_mismatch(settled=0.2), None, "stale_weights"),
        ("stale_weights", run_mismatch(settled=0.2, late=0.9), None, "partial_sync"),
        ("stale_weights", run_mismatch(settled=0.2), STUCK, "partial_sync"), ("subset", run_mismatch(first=1.0), STALE, "stale_weights"),
        ("adapter", run_mismatch(), None, "adapter"),
        ("change_inside_sequence", run_mismatch(first=1.0), None, "change_inside_sequence"),
    ],
)  # fmt: skip
def test_the_class_of_a_mismatch(code, of_run, stale, kind):
    assert mismatch.kind(facts(mismatch=of_run, stale_weights=stale, checked=checked(code))) == kind


@pytest.mark.parametrize(
    ("code", "fails", "verdict"),
    [
        ("rounding", False, {"check_passes": -WEAK}), ("temperature", True, {"check_fails": MEDIUM}),
        ("quantised", True, {"check_fails": WEAK}), ("row_pairing", True, {}), ("stale_weights", True, {}),
    ],
)  # fmt: skip
def test_what_a_finding_of_check_is_worth(code, fails, verdict):
    assert codes(mismatch._semantics(facts(checked=checked(code, fails=fails)))) == verdict


def test_logprobs_in_other_rows_are_pairing():
    assert codes(pairing._logprobs(facts(checked=checked("row_pairing")))) == {"logprobs_in_other_rows": CERTAIN}
    assert pairing._logprobs(facts(checked=checked("temperature"))) == []


@pytest.mark.parametrize(
    ("drop", "of_reward", "of_policy"),
    [
        (Drop(step=60, share=0.7, is_early=False, policy=1.0), {"reward_drops_without_policy": DECISIVE}, {}),
        (Drop(step=60, share=0.7, is_early=False, policy=9.0), {}, {"reward_drops_with_policy": MEDIUM}),
        (Drop(step=4, share=0.7, is_early=True, policy=1.0), {}, {"reward_drops_with_policy": STRONG}),
    ],
)  # fmt: skip
def test_what_a_drop_is_worth(drop, of_reward, of_policy):
    assert codes(reward._dropped(facts(drop=drop))) == of_reward
    assert codes(optimizer._dropped(facts(drop=drop))) == of_policy


# --- a control --------------------------------------------------------------------------------------------------------


def rows(length=1.0, reward_=1.0, n=20, whole=None, step=1, likelihood=0.0, advantage=0.0):
    values = {
        "step": np.full(n, step), "whole": np.arange(n) if whole is None else whole, "prompt": np.zeros(n),
        "reward": np.broadcast_to(reward_, n).astype(float), "length": np.broadcast_to(length, n).astype(float),
        "advantage": np.broadcast_to(advantage, n).astype(float), "likelihood": np.broadcast_to(likelihood, n).astype(float),
    }  # fmt: skip
    return Rollouts(**{name: values.get(name, np.zeros(n)) for name in Rollouts.__dataclass_fields__})


@pytest.mark.parametrize(
    ("run", "other", "differs"),
    [
        (0.00099, 0.0, False), (0.001, 0.0, True), (0.0299, 0.01, False), (0.0301, 0.01, True),
    ],
)  # fmt: skip
def test_two_runs_differ_in_mismatch(run, other, differs):
    pair = (facts(mismatch=run_mismatch(size)) for size in (run, other))
    assert bool([*control._mismatches(*pair, ())]) == differs


def test_a_mismatch_is_compared_where_both_runs_have_one_and_no_lag_explains_it():
    far, near, none = facts(mismatch=run_mismatch(0.2)), facts(mismatch=run_mismatch(0.0)), facts()
    assert [*control._mismatches(far, none, ())] == [*control._mismatches(none, near, ())] == []
    behind = facts(mismatch=run_mismatch(0.2), series={"version_lag": np.ones(100)})
    assert [*control._mismatches(behind, near, ())] == []
    for likelier in ("mismatch", "staleness"):
        (difference,) = control._mismatches(far, near, (suspect("reward", 0.5), suspect(likelier, 0.3)))
        assert (difference.suspect, dict(difference.values)) == (likelier, {"run": 0.2, "control": 0.0})


@pytest.mark.parametrize(("num_unequal", "suspects"), [(2, []), (3, ["reward"])])
def test_two_runs_differ_in_rewards(num_unequal, suspects):
    run = rows(reward_=np.arange(200) < num_unequal, n=200)
    found = control._rewards(facts(rollouts=run), facts(rollouts=rows(reward_=0.0, n=200)))
    assert [difference.suspect for difference in found] == suspects


@pytest.mark.parametrize(("noise", "suspect"), [(0.745, "length"), (0.755, "reward")])
def test_rewards_that_differ_by_length(noise, suspect):
    # Orthogonal to the length: correlation 1 / sqrt(1 + noise^2), 0.8 at 0.75.
    lengths, other = np.tile([1.0, -1.0], 20), np.tile([1.0, 1.0, -1.0, -1.0], 10)
    run = rows(length=lengths, reward_=5 + lengths + noise * other, n=40)
    found = control._rewards(facts(rollouts=run), facts(rollouts=rows(length=lengths, reward_=0.0, n=40)))
    assert [difference.suspect for difference in found] == [suspect]


@pytest.mark.parametrize(("run", "of_control", "suspects"), [(0.69, 0.7, ["pairing"]), (0.7, 0.9, []), (0.5, 0.69, [])])
def test_advantages_follow_in_the_control_alone(monkeypatch, run, of_control, suspects):
    relations = iter([SimpleNamespace(by_group=run), SimpleNamespace(by_group=of_control)])
    monkeypatch.setattr(control, "relation", lambda *arguments: next(relations))
    assert [difference.suspect for difference in control._advantages(facts(), facts())] == suspects


@pytest.mark.parametrize(("lag", "suspects"), [(1.9, []), (2.0, ["staleness"])])
def test_two_runs_differ_in_lag(lag, suspects):
    pair = (facts(series={"version_lag": np.full(100, value)}) for value in (lag, 1.0))
    assert [difference.suspect for difference in control._lags(*pair)] == suspects


@pytest.mark.parametrize(("rate", "suspects"), [(1.0009, []), (1.0011, ["optimizer"])])
def test_two_runs_differ_in_learning_rate(rate, suspects):
    pair = (facts(series={"learning_rate": np.full(100, value)}) for value in (rate, 1.0))
    assert [difference.suspect for difference in control._rates(*pair)] == suspects


@pytest.mark.parametrize(
    ("moved", "norm", "suspects"),
    [(0.99e-5, 1.0, []), (1.01e-5, 1.0009, ["optimizer"]), (1.01e-5, 1.0011, ["entropy"])],
)
def test_the_first_update_that_leaves_other_weights(moved, norm, suspects):
    first, second = rows(step=1), rows(step=2)
    joined = {name: np.r_[getattr(first, name), getattr(second, name)] for name in Rollouts.__dataclass_fields__}
    other = Rollouts(**joined | {"likelihood": np.r_[first.likelihood, second.likelihood + moved]})
    given = {"series": {"grad_norm": np.full(100, norm)}}, {"series": {"grad_norm": np.ones(100)}}
    pair = (facts(rollouts=runs, **one) for runs, one in zip((other, Rollouts(**joined)), given, strict=True))
    assert [difference.suspect for difference in control._first_update(*pair)] == suspects


@pytest.mark.parametrize(("num_alike", "suspects"), [(49, ["optimizer"]), (50, [])])
def test_updates_are_compared_over_the_first_fifty_steps(num_alike, suspects):
    parts = [rows(step=step, n=2) for step in range(1, 61)]
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in Rollouts.__dataclass_fields__}
    other = Rollouts(**joined | {"likelihood": np.where(joined["step"] > num_alike, 1.0, 0.0)})
    norms = {"series": {"grad_norm": np.ones(100)}}
    found = control._first_update(facts(rollouts=other, **norms), facts(rollouts=Rollouts(**joined), **norms))
    assert [difference.suspect for difference in found] == suspects


@pytest.mark.parametrize(
    ("share", "code", "points"), [(0.61, "control_differs_and_fell", -7.0), (0.59, "control_differs_and_did_not_fall", 7.0)]
)  # fmt: skip
def test_a_control_that_fell_as_far_clears(monkeypatch, share, code, points):
    monkeypatch.setattr(control, "shares_prompts", lambda *pair: True)
    difference = control.Difference(suspect="optimizer", code="setting")
    monkeypatch.setattr(control, "_differences", lambda *arguments: [difference])
    # FALL loses 0.625 of its level.
    fell = SimpleNamespace(share=share * 0.625)
    suspects = tuple(Suspect(code=each, evidence=(thresholds.prior(each),)) for each in ("mismatch", "optimizer"))
    compared = control.compare(facts(), facts(fall=fell), suspects)
    optimizer_ = next(suspect for suspect in compared.suspects if suspect.code == "optimizer")
    assert (optimizer_.evidence[-1].code, optimizer_.evidence[-1].points) == (code, points)
    assert compared.is_intervention


# --- the verdict ------------------------------------------------------------------------------------------------------


def attribution(*suspects, **given):
    return Attribution(
        **{
            "trace": "run", "control": None, "kind": "observation", "num_steps": 100, "outcome": "reward", "fall": FALL,
            "onsets": (), "suspects": suspects,
        } | given
    )  # fmt: skip


def suspect(code, probability, detail=""):
    return Suspect(code=code, probability=probability, detail=detail)


@pytest.mark.parametrize(
    ("first", "cause"), [(suspect("reward", 0.5), None), (suspect("reward", 0.501), "reward"), (suspect("unknown", 0.9), None)]
)  # fmt: skip
def test_a_cause_is_more_probable_than_all_others(first, cause):
    assert attribution(first, suspect("mismatch", 0.1)).cause == cause


@pytest.mark.parametrize(("probability", "clears"), [(0.05, False), (0.0499, True)])
def test_the_mismatch_is_cleared_below_a_twentieth(probability, clears):
    assert attribution(suspect("reward", 0.9), suspect("mismatch", probability)).clears_mismatch == clears


def test_the_verdict_in_words():
    where = "reward collapses from step 60 on (95 % interval 57 to 63), 0.8 to 0.3. "
    told = attribution(suspect("reward", 0.9), suspect("mismatch", 0.01))
    assert told.sentence == where + (
        "By observation of one run the cause is a noisy or wrong reward (90%); not the mismatch."
    )
    open_ = attribution(suspect("mismatch", 0.4, "temperature"), suspect("length", 0.3), control="other")
    assert open_.sentence == where + (
        "By observation of two runs the cause cannot be told from this trace: training-inference mismatch: temperature on one "
        "side only (40%) or the length of responses (30%)."
    )
    sure = attribution(suspect("entropy", 0.99), kind="intervention", control="other")
    assert "By intervention (the control shares its seeds) the cause is entropy collapse" in sure.sentence
    assert attribution(fall=None).sentence.startswith("No fall: reward did not go down for good")
    assert attribution(outcome="", fall=None).sentence.startswith("It cannot be told whether this run fell")


def test_probabilities_are_those_of_the_points():
    evidence = {"mismatch": 1.0, "reward": 0.0}
    first, second = ranked(
        [Suspect(code=code, evidence=(Evidence(code="prior", points=points),)) for code, points in evidence.items()]
    )
    assert (first.code, second.code) == ("mismatch", "reward")
    assert first.probability / second.probability == pytest.approx(np.e)


def test_text_marks_what_speaks_for_and_against():
    evidence = tuple(Evidence(code="length_steady", points=points) for points in (1.0, -1.0, 0.0))
    likely, hardly = Suspect(code="length", probability=0.02, evidence=evidence), suspect("reward", 0.0199)
    text = attribution_text(attribution(likely, hardly))
    assert [line.split()[0] for line in text.splitlines() if "stays what it was" in line] == [
        "for",
        "against",
        "neither",
    ]
    assert "Hardly: a noisy or wrong reward 2.0%" in text
    assert "the length of responses: 2%" in text


def test_json_has_codes_numbers_and_sentences():
    given = Suspect(code="mismatch", probability=1.0, evidence=(mismatch._size(0.2),))
    written = attribution_json(attribution(given))
    assert written["suspects"][0]["evidence"] == [
        {
            "code": "mismatch_large", "values": {"mean_abs_d": 0.2}, "points": 2.5,
            "sentence": "mean |d| at the onset is 0.2 nats: large enough to affect a run",
        }
    ]  # fmt: skip
    assert (written["cause"], written["notes"], written["differences"]) == ("mismatch", (), ())


# --- a fall -----------------------------------------------------------------------------------------------------------


def outcome(values):
    return Outcome(name="reward", steps=np.arange(1, len(values) + 1), values=np.asarray(values), is_evaluation=False)


def noisy(values, scale, seed=1):
    return values + scale * np.random.default_rng(seed).normal(size=len(values))


@pytest.mark.parametrize(("lost", "falls"), [(0.085, False), (0.095, True)])
def test_a_fall_loses_nine_hundredths(lost, falls):
    values = noisy(np.where(STEPS < 50, 1.0, 1.0 - lost), 1e-4)
    assert (find_fall(outcome(values)) is not None) == falls


@pytest.mark.parametrize(("num_below", "passes"), [(60, False), (59, True)])
def test_a_dip_that_passes_is_no_fall(num_below, passes):
    # Six in ten of what follows the first window below the middle have to be below, too.
    means = np.repeat([1.0, 0.0, 1.0], [20, num_below, 100 - num_below])
    assert _settled_above(means, 0, 1.0, 0.0) == passes


@pytest.mark.parametrize(("scale", "falls"), [(0.99, True), (1.01, False)])
def test_a_fall_is_larger_than_its_noise(monkeypatch, scale, falls):
    # 3 sqrt(2) standard errors of a mean of 10 values beyond sqrt(2 ln 10), for the best of ten windows.
    noise = scale * 0.5 * np.sqrt(10) / (3 * np.sqrt(2) + np.sqrt(2 * np.log(10)))
    monkeypatch.setattr(fall_module, "_noise", lambda values: noise)
    monkeypatch.setattr(fall_module, "_slope_in_sd", lambda values, noise: 0.0)
    assert (find_fall(outcome(np.where(STEPS < 50, 1.0, 0.5))) is not None) == falls


@pytest.mark.parametrize(("width", "kind"), [(11, "collapse"), (14, "slow_decline")])
def test_a_collapse_takes_a_tenth_of_the_run(width, kind):
    fall = find_fall(outcome(noisy(np.interp(STEPS, [45, 45 + width], [1.0, 0.2]), 1e-3)))
    assert fall.kind == kind
    # 0.35 of it is lost at the end of that share of the slope.
    assert fall.fallen == pytest.approx(45 + 0.35 * width, abs=1.01)


@pytest.mark.parametrize(
    ("lost", "fallen", "falls"), [(0.085, 65, False), (0.095, 65, True), (0.0, 49, True), (0.0, 50, False)]
)
def test_the_reward_falls_where_the_evaluation_lost_as_much_or_came_too_late(lost, fallen, falls):
    evaluation = Outcome(
        name="eval", steps=np.array([1, 50, 99]), values=np.array([1.0, 1.0, 1.0 - lost]), is_evaluation=True
    )
    of_reward = replace(FALL, fallen=fallen)
    assert timeline._agreed(evaluation, None, of_reward) == (of_reward if falls else None)


@pytest.mark.parametrize(
    ("least", "is_evaluation", "floor"), [(-0.1, True, -1.0), (0.0, True, 0.0), (0.0, False, -1.0)]
)  # fmt: skip
def test_the_floor_of_an_outcome(least, is_evaluation, floor):
    values = np.array([least, 1.0, 2.0])
    assert timeline._outcome("eval", STEPS[:3], values, -1.0, is_evaluation=is_evaluation).floor == floor


@pytest.mark.parametrize(("size", "is_read"), [(0.06, True), (0.0601, False)])
def test_a_drop_is_read_where_the_mismatch_is_not_large(monkeypatch, size, is_read):
    monkeypatch.setattr(facts_module, "read_drop", lambda *arguments: "drop")
    given = facts(mismatch=run_mismatch(size))
    assert Facts.drop.func(given) == ("drop" if is_read else None)


def test_a_fall_and_its_change_have_one_onset():
    rise, descent, later = change(20, 0.2, 0.8), change(61, 0.8, 0.3), change(90, 0.5, 0.3)
    found = with_onset((rise, descent, later), FALL)
    assert [(one.step, one.low, one.high) for one in found] == [(20, 20, 20), (60, 57, 63), (90, 90, 90)]
    assert with_onset((rise, later), FALL) == (rise, later)
    assert with_onset((descent,), None) == (descent,)


# --- codes ------------------------------------------------------------------------------------------------------------


def numbers_of(sentence):
    return {name for _, name, _, _ in Formatter().parse(sentence) if name} - {"finding_title"}


def test_every_code_of_evidence_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "collapses.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| \w+ \| `(\w+)` \|", page, re.MULTILINE))
    assert documented == set(EVIDENCE)
    assert sum(len(sentences) for sentences in EVIDENCE_OF.values()) == len(EVIDENCE)
    assert {number for sentence in EVIDENCE.values() for number in numbers_of(sentence)} <= set(UNITS)


def test_every_code_in_the_rules_has_a_sentence():
    room = Path(thresholds.__file__).parent
    source = "".join(file.read_text(encoding="utf-8") for file in room.rglob("*.py") if file.name != "text.py")
    known = {*EVIDENCE, *DIFFERENCES, *NOTES, *SUSPECTS}
    assert set(re.findall(r'code="(\w+)"', source)) <= known
    unused = {code for code in (*EVIDENCE, *DIFFERENCES, *NOTES) if f'"{code}"' not in source}
    assert unused == set()
