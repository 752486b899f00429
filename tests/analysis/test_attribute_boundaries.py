"""What an attribution concludes just under and just over each of its thresholds."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from string import Formatter
from types import SimpleNamespace

import numpy as np
import pytest
from tim_trace.analysis.attribution import control, silent, thresholds
from tim_trace.analysis.attribution import run_facts as facts_module
from tim_trace.analysis.attribution.attribution import Attribution
from tim_trace.analysis.attribution.odds import FACTORS, SET, ranked, weighed
from tim_trace.analysis.attribution.run_facts import Facts
from tim_trace.analysis.attribution.settings import suspect_of
from tim_trace.analysis.attribution.suspect import SUSPECTS, Evidence, Suspect
from tim_trace.analysis.attribution.suspects.lag import declared_lag
from tim_trace.analysis.attribution.suspects.timing import order
from tim_trace.analysis.attribution.text import (
    DIFFERENCES,
    EVIDENCE,
    EVIDENCE_OF,
    NOTES,
    UNITS,
    attribution_json,
    attribution_text,
    evidence_sentence,
    verdict_sentence,
)
from tim_trace.analysis.facts import changes as timeline
from tim_trace.analysis.facts import fall as fall_module
from tim_trace.analysis.facts import staleness
from tim_trace.analysis.facts.changes import ChangePoint, with_onset
from tim_trace.analysis.facts.fall import Fall, Outcome, _settled_above, find_fall
from tim_trace.analysis.facts.mismatch import RunMismatch, read_run_mismatch
from tim_trace.analysis.facts.moves import NOTHING, Drop
from tim_trace.analysis.facts.other_rows import OtherPromptsRewards, ReorderedRewards, rewards_of_other_prompts
from tim_trace.analysis.facts.recorded import RecordedChange, around
from tim_trace.analysis.facts.relations import ChangedResponses, Relation, length_correlation, step_interval
from tim_trace.analysis.facts.repeats import RepeatedResponses, repeated_responses, sorted_share
from tim_trace.analysis.facts.rollouts import Rollouts
from tim_trace.analysis.facts.series import Series
from tim_trace.analysis.facts.staleness import StaleWeights, read_stale_weights

# The functions of the package hide its modules of the same names.
advantages, changed, data, entropy, length, mismatch, optimizer, pairing, reference, reward, stale_suspect, truncation = (
    import_module(f"tim_trace.analysis.attribution.suspects.{name}")
    for name in (
        "advantages", "changed", "data", "entropy", "length", "mismatch", "optimizer", "pairing", "reference", "reward",
        "staleness", "truncation",
    )
)  # fmt: skip

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


def reordered(by_chance, num_lacking=0):
    return ReorderedRewards(num_other=100, num_lacking=num_lacking, lacking_by_chance=by_chance)


def checked(code, *, fails=True, signal=""):
    """A result of check; a cause of weights that differ stands for the finding with it."""
    cause = code if code in ("stale_weights", "partial_sync", "adapter", "quantised") else None
    finding = SimpleNamespace(
        code="weights_differ" if cause else code, fails=fails, next="", numbers={"cause": cause} if cause else {}, signal=signal,
        effect=1.0, share=1.0,
    )  # fmt: skip
    return SimpleNamespace(findings=[finding], is_valid=not fails)


class GivenFacts(Facts):
    """Facts of a run without sequences, except for what a test gives in place of what they would read or compute."""

    def __getattribute__(self, name):
        given = object.__getattribute__(self, "__dict__").get("given", {})
        return given[name] if name in given else super().__getattribute__(name)


EMPTY = Rollouts(**{name: np.empty(0) for name in Rollouts.__dataclass_fields__} | {"group": np.empty(0, int)})
REWARD = Outcome(name="reward", steps=STEPS, values=np.zeros(len(STEPS)), is_evaluation=False)


def facts(series=None, **given):
    known = {
        name: Series(name, STEPS, np.asarray(values, float), "log", name) for name, values in (series or {}).items()
    }
    found = GivenFacts(
        trace="run", series=known, outcomes=None, fall=FALL, mismatch=None, checked=None, database=None,
        pair=("train", "rollout"), settings={}, notes=(),
    )  # fmt: skip
    found.__dict__["given"] = {
        "steps": STEPS, "rollouts": EMPTY, "changes": {}, "near": (), "earlier": (), "moves": NOTHING, "outcome": REWARD,
        "stale_weights": None,
    } | given  # fmt: skip
    return found


def codes(evidence):
    return {each.code: each.points for each in evidence}


def given_change(series, kind, before=1.0, after=2.0, *, size_in_sd=20.0, low=58, high=59, shape="shift", step=59):
    """What a run was given is another thing from a step near the fall on."""
    return RecordedChange(
        series=series, kind=kind, step=step, low=low, high=high, before=before, after=after, size_in_sd=size_in_sd,
        shape=shape, order="with",
    )  # fmt: skip


def set_at(series, step, before=1.0, after=2.0):
    """A setting that somebody changed."""
    return given_change(series, "setting", before, after, size_in_sd=None, low=step, high=step, shape="set", step=step)


def level(before, after, at=50):
    return np.where(at > STEPS, before, after)


# --- one number: function of it, just under, just over ---------------------------------------------------------------


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
    slow = replace(FALL, kind="slow decline")
    return codes(optimizer._steps(facts(series={"update_to_weight": np.full(100, size)}, fall=slow)))


def _borne(factor):
    """Updates of a size that the run learned with, and one of another at the fall."""
    sizes = np.where(STEPS == 60, factor, 1.0) * thresholds.HUGE_UPDATE * 1.1
    return codes(optimizer._steps(facts(series={"update_to_weight": sizes})))


def _bursts(factor):
    return codes(optimizer._bursts(np.r_[np.ones(20), factor, factor]))


def _beta1(value):
    return codes(optimizer._settings(facts(settings={"adam_beta1": value})))


def _beta2(value):
    return codes(optimizer._settings(facts(settings={"adam_beta2": value})))


def _epsilon(value):
    return codes(optimizer._settings(facts(settings={"adam_epsilon": value})))


def _adams_rate(value):
    without = optimizer._settings(facts(settings={"learning_rate": value}))
    assert without == []
    return codes(optimizer._settings(facts(settings={"learning_rate": value, "adam_beta1": 0.9})))


def _entropy_coefficient(value):
    return codes(entropy._coefficient(facts(settings={"entropy_coefficient": value})))


def _carried(share):
    """A finding of d of 1 nat on a share of the tokens, in a run of mean |d| of 1 nat."""
    found = checked("temperature")
    found.findings[0].share = share
    return codes(mismatch._semantics(facts(checked=found, series={"mean_abs_d": np.ones(len(STEPS))})))


def _coefficient(factor):
    near = (given_change("kl_coef", "logged", 0.1, 0.1 * factor), given_change("reference_k3", "reference", 0.1, 9.0))
    return _returned(0.1, near=near)


def _distance(after, *, before=0.5, likelihood=None, keeps=False):
    """How much likelier responses are to the policy than to the reference, before and since a step where the fall may begin."""
    kept = SimpleNamespace(
        reference_distance_by_step=(STEPS, level(before, after, at=58)),
        likelihood_by_step=(STEPS, np.zeros(100) if likelihood is None else likelihood),
        keeps_reference=lambda step: keeps,
    )
    return {} if (found := reference._jump(facts(rollouts=kept))) is None else codes([found])


def _sampled(surprisal, *, entropy=1.0, before=1.0):
    """-logprob of what is sampled before and since the fall, at a constant entropy."""
    kept = SimpleNamespace(sampled_by_step=(STEPS, -level(before, surprisal, at=60)))
    return codes(mismatch.unsampled(facts(rollouts=kept, series={"entropy": np.full(100, entropy)})))


def _returned(share, *, before=0.4, mismatch=None, near=(), surprisal=1.0):
    """A policy that keeps a share of its distance to the reference; an entropy of 1, and what is sampled has that surprisal since."""
    distance = np.where(FALL.low > STEPS, before, share * before)
    sampled = np.where(FALL.low > STEPS, -1.0, -surprisal)
    kept = SimpleNamespace(reference_distance_by_step=(STEPS, distance), sampled_by_step=(STEPS, sampled))
    return codes(
        reference._returns(facts(rollouts=kept, mismatch=mismatch, near=near, series={"entropy": np.ones(100)}))
    )


def test_of_tokens_that_no_policy_draws_the_distance_to_the_reference_says_nothing():
    assert _returned(0.1) == {"returns_to_reference": DECISIVE}
    assert _returned(0.1, surprisal=9.0) == {}


def _graded(equal, by_chance):
    return OtherPromptsRewards(shift=1, num_responses=30, equal=equal, by_chance=by_chance).explains


def _costs_hidden(correlation):
    shrinks = {"length": (change(50, 20.0, 10.0),)}
    return codes(length._pays(facts(pays_length=-correlation, hides=True, changes=shrinks)))


def _entropy(at_fall, last, *, rises=False):
    return entropy._judged(1.0, at_fall, last, rises_with_fall=rises)


def _large_updates(size):
    return codes(entropy._large_updates(facts(series={"update_to_weight": np.full(100, size)})))


def _noisy(unequal, before=float("nan")):
    return codes(reward._noise(facts(repeated=repeated(unequal), repeated_before=repeated(before))))


def _grows_at_fall(before, after, lag=0.0):
    moved = {"mean_abs_d": [change(60, before=before, after=after)]}
    given = facts(mismatch=run_mismatch(), changes=moved, series={"version_lag": np.full(100, lag)})
    return codes(mismatch._order(given))


def _new_prompts(moved, series="share_new_prompts"):
    near = (given_change(series, "prompts", 0.5, 0.5 + moved),)
    return next(iter(codes(data.data(facts(near=near)).evidence)))


def _rescaled(factor, own=None):
    """The scale beside the rewards changes by a factor, and the advantages' own size by `own`, the same if None."""
    signs = np.where(np.arange(100) % 2, 1.0, -1.0)
    rows = rows_of_steps(advantage=signs * np.where(STEPS >= 59, factor if own is None else own, 1.0))
    near = (given_change("advantage_scale", "advantages", 1.0, factor),)
    return codes(advantages._changed(facts(near=near, rollouts=rows)))


def _prompts_together(size, *, second=0.0, apart=0, width=1):
    near = (
        given_change("prompt_shift", "prompts", 0.1, 0.2, size_in_sd=size, low=59 - width, high=59),
        given_change(
            "prompt_length",
            "prompts",
            10.0,
            12.0,
            size_in_sd=second,
            low=59 + apart - width,
            high=59 + apart,
            step=59 + apart,
        ),
    )
    return next(iter(codes(data.data(facts(near=near)).evidence)))


def _clear(size_in_sd):
    return len(facts(near=(given_change("x", "prompts", size_in_sd=size_in_sd),)).clear("prompts"))


def _worth(size_in_sd):
    change = given_change("x", "prompts", size_in_sd=size_in_sd)
    return changed.worth(facts(near=(change,)), change)


def _sudden(width):
    near = (given_change("reference_k3", "reference", 0.01, 0.2, low=58, high=58 + width),)
    quiet = rows_of_steps(length=1.0)
    return codes(reference._moves(facts(near=near, rollouts=quiet)))


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
    ("RATE_SPIKE", _rate, 3.0, ({}, {"learning_rate_spike_at_fall": DECISIVE + MEDIUM})),
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
    ("CUSTOMARY", _adams_rate, 0.01, ({}, {"setting_unusual": STRONG})),
    ("ENTROPY_WEIGHS", _entropy_coefficient, 1.0, ({}, {"setting_unusual": STRONG})),
    ("MOST_ENTROPY", lambda x: _entropy(x, 1.0), 14.0, (
        ("entropy_rose_before_fall", MEDIUM), ("entropy_impossible", 0.0),
    )),
    ("FINDING_CARRIES", _carried, 0.1, ({}, {"check_fails": MEDIUM})),
    ("DISTANCE_JUMPS", _distance, 1.5, ({}, {"distance_jumps": DECISIVE})),
    ("UNSAMPLED", _sampled, 2.0, ({}, {"not_sampled_so": CERTAIN})),
    ("UNSAMPLED_NATS", lambda x: _sampled(x + 0.1, entropy=0.1, before=0.1), 0.5, ({}, {"not_sampled_so": CERTAIN})),
    ("SAMPLED_BY_POLICY", lambda x: _sampled(9.0, before=x), 0.6, ({}, {"not_sampled_so": CERTAIN})),
    ("SAMPLED_BY_POLICY", lambda x: _sampled(9.0, before=x), 1.6, ({"not_sampled_so": CERTAIN}, {})),
    ("AS_BEFORE", _borne, 1.5, ({"update_size": WEAK}, {"update_size": STRONG})),
    ("COEFFICIENT_GROWS", _coefficient, 10.0, ({"returns_to_reference": DECISIVE}, {"returns_to_reference": CERTAIN})),
    ("RETURNS", _returned, 0.5, ({"returns_to_reference": DECISIVE}, {})),
    ("REFERENCE_MOVES", lambda x: _returned(0.1, before=x), 0.05, ({}, {"returns_to_reference": DECISIVE})),
    ("of_size", lambda x: _returned(0.1, mismatch=run_mismatch(x)), 0.03, ({"returns_to_reference": DECISIVE}, {})),
    ("GRADED_ELSEWHERE", lambda x: _graded(x, 0.1), 0.9, (False, True)),
    ("GRADED_BY_CHANCE", lambda x: _graded(1.0, x), 0.6, (True, False)),
    ("SAME_ORDER", lambda x: replace(changed_rewards(1.0), agreement=x).is_rescaled, 0.95, (False, True)),
    ("LENGTH_PAYS", _costs_hidden, 0.25, ({}, {"length_costs_while_hidden": STRONG})),
    ("ENTROPY_GAINED", lambda x: _entropy(x, 1.0), 2.0, (
        ("entropy_in_range", -STRONG), ("entropy_rose_before_fall", MEDIUM),
    )),
    ("ENTROPY_LOST", lambda x: _entropy(1.0, x), 0.25, (("entropy_lost", WEAK), ("entropy_lost", 0.0))),
    ("ENTROPY_LOST", lambda x: _entropy(x, 0.2), 0.25, (("entropy_in_range", -MEDIUM), ("entropy_lost", WEAK))),
    ("ENTROPY_SHRUNK", lambda x: _entropy(1.0, x), 0.6, (("entropy_lost", 0.0), ("entropy_in_range", -STRONG))),
    ("ENTROPY_GAINED", lambda x: _entropy(1.0, x), 2.0, (
        ("entropy_in_range", -STRONG), ("entropy_rises_with_fall", 0.0),
    )),
    ("ENTROPY_GAINED", lambda x: _entropy(1.0, x, rises=True), 4.0, (
        ("entropy_rises_with_fall", 0.0), ("entropy_explodes", STRONG),
    )),
    ("LARGE_UPDATE", _large_updates, 0.003, ({}, {"updates_large": -WEAK})),
    ("UNEQUAL", lambda x: list(_noisy(x)), 0.01, (["rewards_deterministic"], ["rewards_noisy"])),
    ("WAS_THERE", lambda x: list(_noisy(0.4, 0.4 * x)), 0.5, (["rewards_noisy"], ["rewards_noisy_before"])),
    ("ABRUPT", lambda x: _grows_at_fall(0.1, 0.1 * x), 10.0, (
        {"mismatch_grows_with_fall": WEAK}, {"mismatch_grows_with_fall": DECISIVE},
    )),
    ("BENDS", lambda x: _grows_at_fall(1e-4, x), 0.03, (
        {"mismatch_grows_with_fall": WEAK}, {"mismatch_grows_with_fall": DECISIVE},
    )),
    ("declared_lag", lambda x: _grows_at_fall(1e-4, 0.3, x), 1.0, (
        {"mismatch_grows_with_fall": DECISIVE}, {"mismatch_grows_with_fall": WEAK},
    )),
    ("NEW_PROMPTS", _new_prompts, 0.2, ("prompts_steady", "prompts_changed")),
    ("OTHER_PATTERNS", lambda x: _new_prompts(x, "prompt_pattern_shift"), 0.1, ("prompts_steady", "prompts_changed")),
    ("RESCALED", _rescaled, 3.0, ({"advantages_steady": -STRONG}, {"advantages_changed": CERTAIN})),
    ("RESCALED", lambda own: _rescaled(9.0, own), 3.0, ({"advantages_steady": -STRONG}, {"advantages_changed": CERTAIN})),
    ("TOGETHER_SD", lambda size: _prompts_together(size, second=0.0), 3.5, ("prompts_steady", "prompts_changed")),
    ("CLEAR_SD", _clear, 4.0, (0, 1)),
    ("OF_NO_SCATTER", _worth, 10.0, (DECISIVE, CERTAIN)),
    ("UNEQUAL", _rows, 0.01, ({"rewards_in_their_rows": -STRONG}, {"rewards_in_other_rows": CERTAIN})),
    ("UNEQUAL_SHIFTED", lambda x: repeated(1.0, shift=1, unequal_shifted=x).lies_off, 0.35, (True, False)),
    ("LENGTH_PAYS", _pays, 0.5, ({}, {"length_pays": DECISIVE})),
    ("LENGTH_PAYS", _pays_hidden, 0.25, ({}, {"length_pays_while_hidden": STRONG})),
    ("LENGTH_MOVES", _length_moves, 1.3, (
        {"length_steady": -STRONG, "prior": -0.4}, {"length_changes": WEAK, "prior": -0.4},
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


def test_the_points_of_noisy_rewards_grow_up_to_three_tenths():
    assert _noisy(0.15)["rewards_noisy"] == pytest.approx(DECISIVE / 2)
    assert _noisy(0.3)["rewards_noisy"] == _noisy(0.9)["rewards_noisy"] == DECISIVE


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
    related(monkeypatch, advantages, by_group=correlation)
    given = facts(rollouts=rows(n=2) if is_alone else grouped())
    assert codes(pairing._advantages(given)) == dict.fromkeys(codes_, STRONG if is_alone else CERTAIN)


@pytest.mark.parametrize(
    ("size", "second", "apart", "width", "code"),
    [
        (2.5, 2.5, 0, 3, "prompts_changed"), (2.5, 2.4, 0, 1, "prompts_steady"), (2.5, 2.5, 1, 1, "prompts_changed"),
        (2.5, 2.5, 2, 1, "prompts_steady"), (2.5, 2.5, 0, 4, "prompts_steady"),
    ],
)  # fmt: skip
def test_prompts_of_which_two_things_shift_at_once_are_other_ones(size, second, apart, width, code):
    assert _prompts_together(size, second=second, apart=apart, width=width) == code


@pytest.mark.parametrize(
    "name", ["length_bonus", "reward.length_bonus", "rewards/overlong_penalty", "len_penalty_coef"]
)
def test_settings_that_pay_for_length_belong_to_it(name):
    assert suspect_of(name) == "length"
    near = (set_at(name, 60, 0.0, -1.2),)
    assert codes(length.length(facts(near=near, settings={name: 0.0})).evidence)["setting_changed"] == CERTAIN


@pytest.mark.parametrize(
    ("by_group", "negative", "verdict"),
    [
        (0.151, 0.221, {"likelier_earn_more": -MEDIUM}), (0.149, 0.22, {"likelier_earn_no_more": WEAK}),
        (0.149, 0.221, {"likelier_earn_less": STRONG}), (0.149, 0.0, {"likelier_earn_no_more": WEAK}), (-0.199, 0.0, {"likelier_earn_no_more": WEAK}),
        (-0.201, 0.0, {"likelier_earn_less": STRONG}),
    ],
)  # fmt: skip
def test_the_direction_of_a_reward(monkeypatch, by_group, negative, verdict):
    related(monkeypatch, reward, by_group=by_group, negative=negative)
    assert codes(reward._direction(facts())) == verdict


def changed_rewards(share, num_responses=1000, by_length=0.0, *, before=0.0, is_of_one_length=False):
    return ChangedResponses(
        step=60, num_responses=num_responses, share=share, share_before=before, length_correlation=by_length,
        is_of_one_length=is_of_one_length,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("share", "num_responses", "noise", "is_found"),
    [
        (0.05, 1000, float("nan"), False), (0.051, 1000, float("nan"), True),
        (0.1, 100, 0.0, False), (0.101, 100, 0.0, True), (0.25, 1000, 0.1, False), (0.251, 1000, 0.1, True),
    ],
)  # fmt: skip
def test_rewards_that_changed_beyond_scatter_noise_and_a_few(share, num_responses, noise, is_found):
    found = changed_rewards(share, num_responses)
    given = facts(
        repeated_before=repeated(noise), rollouts=rows_of_steps(), _given_otherwise=lambda column, least: found
    )
    assert Facts.changed_rewards.func(given) == (found if is_found else None)


def test_what_changed_rewards_are_worth():
    given = facts(changed_rewards=changed_rewards(0.15))
    assert codes(reward._changed(given)) == {"rewards_changed": pytest.approx(CERTAIN / 2)}
    assert codes(reward._changed(facts(changed_rewards=changed_rewards(0.3)))) == {"rewards_changed": CERTAIN}
    moved = facts(changed_rewards=changed_rewards(0.3), repeated=repeated(1.0, shift=2))
    assert reward._changed(moved) == reward._changed(facts()) == []


@pytest.mark.parametrize(
    ("by_chance", "num_lacking", "is_permuted"), [(9.0, 0, False), (10.0, 1, True), (30.0, 3, True), (30.0, 4, False)]
)
def test_rewards_whose_steps_still_have_them_lie_in_other_rows(by_chance, num_lacking, is_permuted):
    noisy = facts(
        repeated=repeated(0.5), reordered=reordered(by_chance, num_lacking), changed_rewards=changed_rewards(0.5)
    )
    assert codes(pairing._rewards(noisy)) == ({"rewards_reordered": CERTAIN} if is_permuted else {})
    assert bool(reward._noise(noisy) or reward._changed(noisy)) != is_permuted
    assert codes(pairing._rewards(facts(repeated=repeated(0.01), reordered=reordered(30.0)))) == {
        "rewards_in_their_rows": -STRONG
    }


@pytest.mark.parametrize(
    ("correlation", "after", "step", "pays"),
    [(0.9, 10.0, 50, False), (0.9, 10.0, 80, True), (0.9, 30.0, 50, True), (-0.9, 10.0, 50, False)],
)
def test_length_that_pays_and_goes_the_other_way_is_moved_by_something_else(correlation, after, step, pays):
    moves = {"length": (change(step, 20.0, after),)}
    assert length.pays(facts(pays_length=correlation, changes=moves)) == pays


def test_a_reward_that_falls_with_length_is_no_cost_of_length():
    shrinks = {"length": (change(50, 20.0, 10.0),)}
    assert length._pays(facts(pays_length=-0.9, hides=False, changes=shrinks)) == []


@pytest.mark.parametrize(("share", "points"), [(0.6, DECISIVE), (1.0, DECISIVE)])
def test_what_changed_long_before_a_fall_is_decisive_and_not_certain(share, points):
    earlier = replace(changed_rewards(share), is_earlier=True)
    assert codes(reward._changed(facts(changed_rewards=earlier, pays_length_since=0.0))) == {"rewards_changed": points}


def given_twice(since, *, at=30, noise_before=0, noise_since=0, column="reward"):
    """A hundred steps of twenty responses that come each step, given 0 to 1 and from `at` on `since` of it."""
    step = np.repeat(STEPS, 20)
    whole = np.tile(np.arange(20), len(STEPS)).astype(np.uint64)
    given = np.tile(np.arange(20) / 20, len(STEPS))
    values = np.where(step < at, given, since(given))
    for rows_, num in ((step < at, noise_before), (step >= at, noise_since)):
        values[np.flatnonzero(rows_ & (np.arange(len(step)) % 20 < num))[::3]] += 1.0
    rows_of = rows_of_steps(a_step=20)
    columns = {name: getattr(rows_of, name) for name in Rollouts.__dataclass_fields__}
    return Rollouts(**columns | {"step": step, "whole": whole, column: values})


@pytest.mark.parametrize(
    ("plan", "step"),
    [
        ({"since": np.flip}, 30),
        ({"since": lambda given: given}, None),
        ({"since": np.flip, "noise_before": 2}, None),
        ({"since": np.flip, "noise_since": 2}, None),
        ({"since": np.flip, "at": 52}, None),  # near the fall, which is looked at otherwise
    ],
)
def test_what_is_given_otherwise_for_good_may_have_come_long_before(plan, step):
    found = Facts._given_otherwise_for_good(facts(rollouts=given_twice(**plan)), "reward", 1e-6)
    assert (None if found is None else found.step) == step
    assert found is None or (found.is_earlier and found.low == found.high == step)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_interval_of_a_change_holds_its_step(share):
    for seed in range(20):
        chance = np.random.default_rng(seed)
        low = chance.integers(0, 90, 400)
        high = low + chance.integers(0, 10, 400)
        differs = (low < 50) & (high >= 50) & (chance.random(400) < share) | (chance.random(400) < 0.02)
        step, earliest, latest = step_interval(differs, low, high)
        assert earliest <= 50 <= latest
        assert earliest <= step <= latest
        assert latest - earliest <= 12


def test_pairs_that_differ_everywhere_alike_have_no_step():
    low = np.arange(90)
    assert step_interval(np.zeros(90, bool), low, low + 5)[1:] == (5, 94)


def test_a_reward_on_another_scale_long_before_a_fall_is_no_other_reward():
    def near(column, least):
        return None

    for since, is_found in ((np.flip, True), (lambda given: 3.0 * given + 1.0, False)):
        given = facts(rollouts=given_twice(since), _given_otherwise=near)
        assert (Facts.changed_rewards.func(given) is not None) == is_found


def test_a_reference_that_was_swapped_long_before_a_fall_is_another_one():
    swapped = facts(
        rollouts=given_twice(lambda given: given - 3.0, column="reference"), _given_otherwise=lambda *_: None
    )
    assert Facts.changed_reference.func(swapped).step == 30


def graded(shift, *, since=60, unlike=0, values=2):
    """Rewards of eight prompts a step with one of eight responses each, which earn by the prompt `shift` places on from `since`."""
    chance = np.random.default_rng(5)
    earns = chance.permutation(64).reshape(8, 8) % values
    step, prompt = np.repeat(STEPS, 8), np.tile(np.arange(8), len(STEPS))
    response = chance.integers(0, 8, len(step))
    reward_ = earns[prompt, response].astype(float)
    late = np.flatnonzero(step >= since)
    reward_[late] = earns[(prompt[late] + shift) % 8, response[late]]
    reward_[late[:unlike]] += 100.0
    columns = {name: np.zeros(len(step)) for name in Rollouts.__dataclass_fields__}
    given = {"step": step, "prompt": prompt, "response": response, "whole": prompt * 8 + response, "reward": reward_}
    return Rollouts(**columns | given)


@pytest.mark.parametrize(
    ("shift", "plan", "is_found"),
    [
        (1, {"values": 8}, True),
        (-3, {"values": 8}, True),
        (1, {"values": 8, "unlike": 30}, True),
        (1, {"values": 8, "unlike": 40}, False),  # of 328 a tenth and more
        (0, {"values": 8}, False),
        (1, {"values": 1}, False),  # one reward for all
    ],
)
def test_responses_that_are_graded_by_another_prompt_are_told_by_what_they_earned_there(shift, plan, is_found):
    found = rewards_of_other_prompts(graded(shift, **plan), 60)
    assert (found is not None and found.explains) == is_found
    assert not is_found or found.shift == shift


@pytest.mark.parametrize(("share", "is_told"), [(0.5, False), (0.51, True)])
def test_responses_of_which_most_earn_what_they_did_are_graded_by_their_own_prompt(share, is_told):
    given = facts(rollouts=graded(1, values=8), changed_rewards=changed_rewards(share))
    assert (Facts.graded_elsewhere.func(given) is not None) == is_told


def test_responses_that_are_graded_by_another_prompt_are_pairing_and_no_other_reward():
    found = rewards_of_other_prompts(graded(1, values=8), 60)
    given = facts(graded_elsewhere=found, repeated=repeated(0.4), changed_rewards=changed_rewards(0.9))
    assert codes(pairing._rewards(given)) == {"rewards_of_other_prompts": CERTAIN}
    assert reward._noise(given) == reward._changed(given) == []


def test_another_reward_of_one_length_speaks_for_length_as_well_where_length_pays():
    found = {is_one: changed_rewards(0.3, is_of_one_length=is_one) for is_one in (True, False)}
    of = {
        (is_one, pays): codes(length._pays(facts(changed_rewards=found[is_one], pays_length=pays)))
        for is_one in found for pays in (0.5, 0.51)
    }  # fmt: skip
    assert of == {
        (True, 0.5): {}, (True, 0.51): {"length_pays": DECISIVE, "rewards_changed": CERTAIN},
        (False, 0.5): {}, (False, 0.51): {"length_pays": DECISIVE},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("share", "before", "is_found"),
    [(0.5, 0.0, False), (0.51, float("nan"), True), (0.51, 0.25, True), (0.51, 0.26, False)],
)
def test_a_reference_that_scores_the_same_responses_otherwise_is_another_one(share, before, is_found):
    found = changed_rewards(share, before=before)
    given = {"rollouts": rows_of_steps(), "_given_otherwise": lambda column, least: found}
    assert Facts.changed_reference.func(facts(**given)) == (found if is_found else None)
    assert Facts.changed_reference.func(facts(**given, fall=None)) is None
    given = facts(changed_reference=found, rollouts=rows_of_steps())
    assert codes(reference._moves(given)) == {"reference_changed": CERTAIN}


@pytest.mark.parametrize(
    ("share", "num_responses", "unequal", "is_new"),
    [
        (0.5, 10, 0.05, True),
        (0.49, 10, 0.0, False),
        (0.5, 9, 0.0, False),
        (0.5, 10, 0.06, False),
        (0.5, 10, float("nan"), True),
    ],
)
def test_a_reward_that_becomes_another_one_is_told_where_nothing_fell(
    monkeypatch, share, num_responses, unequal, is_new
):
    monkeypatch.setattr(facts_module, "repeated_responses", lambda rollouts: repeated(unequal))
    given = {"changed_rewards": changed_rewards(share, num_responses), "rollouts": rows_of_steps()}
    assert (Facts.new_reward.func(facts(**given, fall=None)) is not None) == is_new
    assert Facts.new_reward.func(facts(**given)) is None


@pytest.mark.parametrize(
    ("by_length", "of_reward", "of_length"),
    [(0.0, ["rewards_changed"], []), (0.801, [], ["length_pays_since"]), (-0.801, [], ["length_pays_since"])],
)
def test_rewards_that_change_by_length_are_the_length(by_length, of_reward, of_length):
    given = facts(changed_rewards=changed_rewards(0.3), pays_length_since=by_length)
    assert (list(codes(reward._changed(given))), list(codes(length._pays(given)))) == (of_reward, of_length)


@pytest.mark.parametrize(("apart", "unequal"), [(0.0249, 0.0), (0.0251, 1.0)])
def test_two_rewards_of_a_response_differ_materially(apart, unequal):
    # Rewards of 0 and 1 by halves have a standard deviation of 0.5, of which 0.05 counts.
    whole = np.repeat(np.arange(100), 2)
    earned = np.repeat(np.arange(100) % 2, 2) + np.tile([0.0, apart], 100)
    assert repeated_responses(rows(reward_=earned, n=200, whole=whole, step=1)).unequal == unequal


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
        ({"hides": False}, {"reward_falls_too": -STRONG}),
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
        (47, {"learning_rate_spike_before_fall": MEDIUM}), (48, {"learning_rate_spike_at_fall": DECISIVE + MEDIUM}),
        (65, {"learning_rate_spike_at_fall": DECISIVE + MEDIUM}), (66, {"learning_rate_spike_after_fall": -WEAK}),
    ],
)  # fmt: skip
def test_the_order_of_a_spike_and_a_fall(at, verdict):
    assert codes(optimizer._spike(facts(series={"learning_rate": level(1.0, 9.0, at=at)}))) == verdict


@pytest.mark.parametrize(
    ("step", "mismatch_code", "norm", "lengths"),
    [
        (40, {"mismatch_grows_before_fall": WEAK}, {"grad_norm_grows_before_fall": WEAK}, {"length_changes": WEAK}),
        (60, {"mismatch_grows_with_fall": WEAK}, {}, {"length_changes": WEAK}),
        (80, {"mismatch_grows_after_fall": 0.0}, {"grad_norm_grows_after_fall": -WEAK / 2}, {"length_changes_after_fall": -WEAK}),
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
        (None, {"mismatch": run_mismatch(first=1.0)}, {"mismatch_at_first_step_without_lag": -MEDIUM}, {}),
        (0.5, {"mismatch": run_mismatch(first=1.0)}, {"mismatch_at_first_step": -MEDIUM}, {}),
        (0.99, {"mismatch": run_mismatch(), "stale_weights": STALE}, {"stale_weights_match": CERTAIN + 2.5}, {"explained_by_stale_weights": -DECISIVE}),
        (1.0, {"mismatch": run_mismatch(), "stale_weights": STALE}, {}, {"explained_by_declared_lag": -STRONG}),
        (1.0, {"mismatch": run_mismatch(first=1.0)}, {"mismatch_at_first_step": -MEDIUM}, {}),
        (None, {"mismatch": run_mismatch(), "stale_weights": STUCK}, {"stale_weights_excluded": -STRONG}, {}),
        (None, {"mismatch": run_mismatch(settled=0.2, late=0.2)}, {"mismatch_steady": STRONG + 2.5}, {}),
        (None, {"mismatch": run_mismatch(settled=0.2, late=0.9)}, {}, {}),
        (None, {"mismatch": run_mismatch(0.03, settled=0.03)}, {}, {}),
        (None, {"mismatch": run_mismatch(0.04, settled=0.04)}, {"mismatch_steady": STRONG}, {}),
        (None, {"mismatch": run_mismatch(settled=0.2), "checked": checked("stale_weights")}, {"mismatch_steady_and_check": STRONG + 2.5}, {"explained_by_steady_size": -STRONG}),
    ],
)  # fmt: skip
def test_weights_that_are_behind(lag, given, of_staleness, of_mismatch):
    given = facts(series={} if lag is None else {"version_lag": np.full(100, lag)}, **given)
    assert codes(stale_suspect._measured(given)) == of_staleness
    assert codes(mismatch._lag(given)) == of_mismatch


def lagging(at_fall, before=0.0, *, since=50, **given):
    """A run that is sampled by weights so many updates behind, from a step on; the fall may begin at 57 - 3."""
    lag = np.where(since > STEPS, before, at_fall)
    return facts(series={"version_lag": lag}, **{"mismatch": run_mismatch()} | given)


@pytest.mark.parametrize(
    ("before", "lag", "verdict"),
    [
        (0.0, 0.99, {"no_declared_lag": 0.0}),
        (0.0, 1.0, {"declared_lag_grows": CERTAIN - 0.5}),
        (1.0, 1.0, {"ordinary_lag": 0.0}),
        (1.0, 1.99, {"ordinary_lag": 0.0}),
        (1.0, 2.0, {"declared_lag_grows": CERTAIN - 0.5}),
        (4.0, 4.0, {"ordinary_lag": 0.0}),
        (4.1, 4.1, {"declared_lag": STRONG + 2.5}),
        (4.0, 7.9, {"declared_lag": STRONG + 2.5}),
        (4.0, 8.0, {"declared_lag_grows": CERTAIN - 0.5}),
    ],
)
def test_a_declared_lag_counts_where_it_grew_or_is_more_than_is_ordinary(before, lag, verdict):
    assert codes(stale_suspect._declared(lagging(lag, before), is_seen=False)) == verdict


@pytest.mark.parametrize(
    ("since", "code"), [(60, "declared_lag_grows"), (28, "declared_lag_grows"), (27, "declared_lag")]
)
def test_a_lag_grew_that_was_less_for_half_of_the_steps_before_the_fall(since, code):
    assert list(codes(stale_suspect._declared(lagging(9.0, 1.0, since=since), is_seen=False))) == [code]


@pytest.mark.parametrize(
    ("size", "before", "points"), [(0.029, 1.0, -1.5), (0.061, 1.0, 0.0), (0.029, 0.0, STRONG - 1.5 + MEDIUM)]
)
def test_a_lag_that_leaves_both_sides_near_speaks_less_for_staleness(size, before, points):
    (evidence,) = stale_suspect._declared(lagging(1.0, before, mismatch=run_mismatch(size)), is_seen=False)
    assert evidence.points == pytest.approx(points)


@pytest.mark.parametrize(
    ("grown", "lag", "before", "of_staleness", "of_mismatch"),
    [
        (1.99, 1.0, 1.0, "ordinary_lag", {"explained_by_declared_lag": -STRONG}),
        (2.01, 1.0, 1.0, "mismatch_grows_beside_lag", {}),
        (2.01, 9.0, 9.0, "mismatch_grows_beside_lag", {}),
        (2.01, 2.0, 1.0, "declared_lag_grows", {"explained_by_declared_lag": -STRONG}),
    ],
)
def test_a_mismatch_that_grows_while_the_lag_stays_is_not_of_the_lag(grown, lag, before, of_staleness, of_mismatch):
    run = lagging(lag, before, changes={"mean_abs_d": [change(60, before=0.1, after=0.1 * grown)]})
    assert list(codes(stale_suspect._declared(run, is_seen=False))) == [of_staleness]
    assert codes(mismatch._lag(run)) == of_mismatch


@pytest.mark.parametrize(("rises_at", "code"), [(13, "declared_lag"), (14, "mismatch_grows_beside_lag")])
def test_a_mismatch_that_comes_with_a_lag_at_the_beginning_of_a_run_is_the_lag_s(rises_at, code):
    run = lagging(9.0, 0.0, since=8, changes={"mean_abs_d": [change(rises_at, before=0.001, after=0.2)]})
    assert list(codes(stale_suspect._declared(run, is_seen=False))) == [code]


@pytest.mark.parametrize(("first", "usual"), [(14, 9.0), (13, 0.0)])
def test_of_a_fall_whose_onset_is_hardly_known_the_whole_run_until_it_tells_the_usual_lag(first, usual):
    run = facts(fall=replace(FALL, interval=(first, 63)), series={"version_lag": np.where(STEPS < 12, 9.0, 0.0)})
    assert declared_lag(run).usual == usual


def test_a_mismatch_that_grows_after_the_fall_says_nothing_of_a_lag():
    run = lagging(9.0, 9.0, changes={"mean_abs_d": [change(70, before=0.1, after=0.9)]})
    assert list(codes(stale_suspect._declared(run, is_seen=False))) == ["declared_lag"]


@pytest.mark.parametrize(("num_steps", "at_fall"), [(5, 4.5), (6, 9.0)])
def test_a_lag_of_half_a_tenth_of_a_run_is_one(num_steps, at_fall):
    grown = declared_lag(facts(fall=None, series={"version_lag": np.where(100 - num_steps < STEPS, 9.0, 0.0)}))
    assert (grown.usual, grown.at_fall, grown.grew) == (0.0, at_fall, True)


def test_a_lag_that_was_not_declared_is_none():
    for unknown in ({}, {"version_lag": np.full(100, np.nan)}):
        lag = declared_lag(facts(fall=None, series=unknown))
        assert (lag.usual, lag.at_fall, lag.grew) == (0.0, 0.0, False)


@pytest.mark.parametrize(
    "given", [{"stale_weights": STALE}, {"stale_weights": STUCK}, {"checked": checked("stale_weights")}]
)
def test_a_lag_that_is_declared_to_be_0_at_every_step_is_no_staleness(given):
    fresh, once_behind = np.zeros(100), np.zeros(100)
    once_behind[7] = 1.0
    run = facts(series={"version_lag": fresh}, mismatch=run_mismatch(settled=0.2, late=0.2), **given)
    assert codes(stale_suspect._declared(run, is_seen=False)) == {"declared_fresh": -CERTAIN}
    assert stale_suspect._measured(run) == mismatch._lag(run) == []
    run = facts(series={"version_lag": once_behind}, mismatch=run_mismatch(settled=0.2, late=0.2), **given)
    assert codes(stale_suspect._declared(run, is_seen=False)) == {"no_declared_lag": 0.0}
    assert stale_suspect._measured(run) != []


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


@pytest.mark.parametrize("cause", ["stale_weights", "partial_sync", "adapter", "quantised"])
def test_a_cause_that_was_seen_tensor_by_tensor_is_not_judged_by_when_it_begins(cause):
    for first in (0.0, 1.0):
        run = run_mismatch(first=first, settled=0.2)
        given = facts(mismatch=run, checked=checked(cause, signal="engine_weights"))
        assert mismatch.kind(given) == cause


@pytest.mark.parametrize(
    ("code", "fails", "verdict"),
    [
        ("rounding", False, {"check_passes": -MEDIUM}), ("temperature", True, {"check_fails": MEDIUM}),
        ("quantised", True, {"check_fails": WEAK}), ("row_pairing", True, {}), ("stale_weights", True, {}),
    ],
)  # fmt: skip
def test_what_a_finding_of_check_is_worth(code, fails, verdict):
    assert codes(mismatch._semantics(facts(checked=checked(code, fails=fails)))) == verdict


@pytest.mark.parametrize(
    ("share", "effect", "kind"), [(0.09, 1.0, ""), (0.11, 1.0, "temperature"), (0.5, 0.0, "temperature")]
)
def test_a_finding_on_a_few_tokens_is_not_the_class_of_a_mismatch(share, effect, kind):
    found = checked("temperature")
    found.findings[0].share, found.findings[0].effect = share, effect
    given = facts(checked=found, mismatch=run_mismatch(1.0), series={"mean_abs_d": np.ones(len(STEPS))})
    assert mismatch.kind(given) == kind


def test_logprobs_in_other_rows_are_pairing():
    assert codes(pairing._logprobs(facts(checked=checked("row_pairing")))) == {"logprobs_in_other_rows": CERTAIN}
    assert pairing._logprobs(facts(checked=checked("temperature"))) == []


@pytest.mark.parametrize(
    ("drop", "of_reward", "of_policy"),
    [
        (Drop(step=60, share=0.7, is_early=False, policy=1.0), {"reward_drops_without_policy": DECISIVE}, {}),
        (Drop(step=60, share=0.7, is_early=False, policy=9.0), {}, {"reward_drops_with_policy": WEAK}),
        (Drop(step=4, share=0.7, is_early=True, policy=1.0), {}, {"reward_drops_with_policy": STRONG}),
    ],
)  # fmt: skip
def test_what_a_drop_is_worth(drop, of_reward, of_policy):
    assert codes(reward._dropped(facts(drop=drop))) == of_reward
    assert codes(optimizer._dropped(facts(drop=drop))) == of_policy
    otherwise = facts(drop=drop, near=(given_change("prompt_length", "prompts"),))
    assert reward._dropped(otherwise) == []


# --- what a run was given ---------------------------------------------------------------------------------------------


def rows_of_steps(length=1.0, likelihood=None, advantage=0.0, reward_=0.0, a_step=10):
    """Steps 1 to 100 of `a_step` sequences each; columns by step."""
    each = {
        name: np.repeat(np.broadcast_to(values, 100), a_step).astype(float)
        for name, values in (("length", length), ("advantage", advantage), ("reward", reward_))
    }
    likely = 0.01 * np.sin(np.arange(100)) if likelihood is None else likelihood
    columns = each | {"step": np.repeat(STEPS, a_step), "likelihood": np.repeat(likely, a_step).astype(float)}
    columns["group"] = np.zeros(100 * a_step, int)
    n = 100 * a_step
    return Rollouts(**{name: columns.get(name, np.zeros(n)) for name in Rollouts.__dataclass_fields__})


@pytest.mark.parametrize(
    ("low", "high", "points"),
    # The fall may begin from step 57 on, and a good part is lost at 65.
    [(50, 53, DECISIVE), (50, 54, CERTAIN), (65, 65, CERTAIN), (66, 66, DECISIVE)],
)
def test_a_change_is_certain_where_the_fall_may_begin_with_it(low, high, points):
    change = given_change("x", "prompts", low=low, high=high)
    assert changed.worth(facts(near=(change,)), change) == points


def test_of_several_settings_that_changed_the_nearest_counts():
    near = (
        set_at("kl_coef", 52),
        set_at("beta", 58),
        set_at("warmup", 60),
        set_at("run_name", 60),
        set_at("a_share", 60),
    )
    for suspect_code, step in (("reference", 58), ("optimizer", 60), ("unknown", 60)):
        # A name that says nothing counts where it was recorded as a setting: `a_share` was logged alone.
        (found,) = changed.settings(facts(near=near, settings={"run_name": "a"}), suspect_code)
        assert (found.code, found.values["step"], found.points) == ("setting_changed", step, CERTAIN)
    assert (
        changed.settings(facts(near=near), "data") == changed.settings(facts(near=near, fall=None), "reference") == []
    )


@pytest.mark.parametrize(
    ("width", "verdict"),
    [(3, {"reference_jumps": DECISIVE}), (4, {})],
)
def test_a_reference_that_is_swapped_is_sudden(width, verdict):
    assert _sudden(width) == verdict


def test_a_distance_to_the_reference_that_the_policy_moves_is_no_swap():
    near = (given_change("reference_k3", "reference", 0.01, 0.2),)
    moved = rows_of_steps(likelihood=0.01 * np.sin(np.arange(100)) - (STEPS >= 59))
    assert reference._moves(facts(near=near, rollouts=moved)) == []
    falls = (given_change("reference_k3", "reference", 0.2, 0.01),)
    assert reference._moves(facts(near=falls, rollouts=rows_of_steps())) == []


@pytest.mark.parametrize(
    ("settings", "evidence"),
    [({}, {"no_reference": -STRONG}), ({"kl_coef": 0.0}, {"no_reference": -STRONG}), ({"kl_coef": 0.1}, {})],
)
def test_without_a_kl_term_its_reference_is_no_cause(settings, evidence):
    assert codes(reference._moves(facts(settings=settings))) == evidence


@pytest.mark.parametrize(
    ("num_longer", "num_at_limit", "verdict"),
    [
        (1, 1, {"responses_cut": DECISIVE}), (0, 1, {"responses_not_cut": -STRONG}), (1, 0, {"responses_not_cut": -STRONG}),
    ],
)  # fmt: skip
def test_responses_are_cut_where_a_tenth_was_longer_and_a_tenth_ends_there(num_longer, num_at_limit, verdict):
    # Ten of a step: one of them is a tenth; before up to 21 tokens, since then up to 20.
    before = np.r_[np.full(num_longer, 21.0), np.full(10 - num_longer, 15.0)]
    since = np.r_[np.full(num_at_limit, 20.0), 15.0 + np.arange(10 - num_at_limit) * 0.1]
    if not num_at_limit:  # one in twenty ends at the longest one
        since[0] = 20.0
    run = rows_of_steps()
    lengths = np.concatenate([before if step <= 60 else since for step in STEPS])
    if not num_at_limit:
        lengths[(run.step > 60) & (run.step % 2 == 0) & (lengths == 20.0)] = 15.0
    cut = facts(
        rollouts=Rollouts(**{name: getattr(run, name) for name in Rollouts.__dataclass_fields__} | {"length": lengths})
    )
    assert codes(truncation._cut(cut)) == verdict


def silent_facts(**given):
    """Facts of a run in which nothing fell and no evaluation was logged."""
    outcome = SimpleNamespace(name="reward", is_evaluation=False)
    return facts(**{"fall": None, "outcome": outcome, "new_reward": None, "reward_moved": 1.0} | given)


@pytest.mark.parametrize(
    ("agreement", "by_length", "cause"),
    [
        (0.95, 0.0, "reward"),
        (0.951, 0.0, None),
        (0.951, 0.801, "length"),
        (0.0, -0.801, "length"),
    ],
)
def test_another_reward_that_hides_a_fall(agreement, by_length, cause):
    found = replace(changed_rewards(0.9), agreement=agreement, low=59, high=61)
    told = silent.read_silent(silent_facts(new_reward=found, rollouts=rows_of_steps(), pays_length_since=by_length))
    assert (told and told.suspects[0].code) == cause
    assert told is None or (told.step, told.low, told.high) == (60, 59, 61)


def test_nothing_is_hidden_where_a_fall_is_seen_or_an_evaluation_is_logged():
    found = changed_rewards(0.9)
    given = {"new_reward": found, "rollouts": rows_of_steps()}
    assert silent.read_silent(silent_facts(**given)) is not None
    assert silent.read_silent(silent_facts(**given, fall=FALL)) is None
    assert silent.read_silent(silent_facts(**given, outcome=None)) is None
    assert (
        silent.read_silent(silent_facts(**given, outcome=SimpleNamespace(name="eval/acc", is_evaluation=True))) is None
    )


@pytest.mark.parametrize(
    ("apart", "num_steps", "step"), [(0.999, 50, None), (1.001, 50, 51), (1.001, 10, 91), (1.001, 9, None)]
)
def test_a_policy_that_is_not_the_one_that_sampled(apart, num_steps, step):
    series = {"mean_d": np.where(100 - num_steps < STEPS, -apart, 0.0), "mean_abs_d": np.full(100, 1.0)}
    told = silent._policy(silent_facts(series=series, mismatch=run_mismatch(1.0)))
    assert (told and told.step) == step
    assert told is None or told.suspects[0].code == "mismatch"


def noisy_rewards(apart, since=60, share=1.0):
    """Twenty responses a step that earn 0 or 1, and from a step on 0, 1 or 2 times `apart` more, by chance."""
    given = given_twice(lambda given: np.round(given), at=since)
    chance = np.random.default_rng(3).choice([0.0, 1.0, 2.0], len(given.step))
    base = np.round(np.tile(np.arange(20) / 20, len(STEPS)))
    noise = np.where((given.step >= since) & (np.arange(len(base)) % 20 < share * 20), apart * chance, 0.0)
    columns = {name: getattr(given, name) for name in Rollouts.__dataclass_fields__}
    return Rollouts(**columns | {"reward": base + noise})


@pytest.mark.parametrize(
    ("apart", "share", "is_told"),
    # Two of three pairs differ, by 1.155 of `apart` in the root mean square.
    [(0.83, 1.0, False), (0.9, 1.0, True), (1.3, 0.7, False), (1.3, 0.8, True)],
)
def test_noise_hides_a_fall_where_it_is_larger_than_what_rewards_tell_apart(apart, share, is_told):
    told = silent._noise(silent_facts(rollouts=noisy_rewards(apart, share=share)))
    assert (told is not None) == is_told
    assert told is None or told.low <= 60 <= told.step + 1


@pytest.mark.parametrize(
    ("since", "at", "step"),
    [
        (np.flip, 60, 60),
        (lambda given: 2.0 * given, 60, None),
        (lambda given: np.where(np.arange(len(given)) % 20 < 10, given[::-1], given), 60, 60),
        (lambda given: np.where(np.arange(len(given)) % 20 < 9, given[::-1], given), 60, None),
    ],
)
def test_rewards_that_are_not_the_control_s_from_a_step_on(since, at, step):
    run, of_control = (given_twice(plan, at=at) for plan in (since, lambda given: given))
    told = silent._reward_beside(silent_facts(rollouts=run), facts(rollouts=of_control))
    assert (told and told.step) == step


def test_noisy_rewards_are_no_other_rewards_than_the_control_s():
    run, of_control = given_twice(np.flip, noise_since=2), given_twice(lambda given: given)
    assert silent._reward_beside(silent_facts(rollouts=run), facts(rollouts=of_control)) is None


@pytest.mark.parametrize(("at_limit_before", "verdict"), [(5, "responses_cut"), (6, "responses_not_cut")])
def test_what_is_cut_piles_up_at_the_limit(at_limit_before, verdict):
    # Ten of a step: before one of 21 tokens and some of 20, since then five of 20 and none longer.
    before = np.r_[21.0, np.full(at_limit_before, 20.0), np.full(9 - at_limit_before, 15.0)]
    since = np.r_[np.full(5, 20.0), np.full(5, 10.0)]
    run = rows_of_steps()
    lengths = np.concatenate([before if step <= 60 else since for step in STEPS])
    columns = {name: getattr(run, name) for name in Rollouts.__dataclass_fields__} | {"length": lengths}
    assert list(codes(truncation._cut(facts(rollouts=Rollouts(**columns))))) == [verdict]


@pytest.mark.parametrize(("correlation", "of_advantages", "of_pairing"), [
    (-0.301, {"advantages_inverted": CERTAIN}, {}), (-0.299, {}, {"advantages_do_not_follow": CERTAIN}),
])  # fmt: skip
def test_inverted_advantages_are_no_matter_of_rows(monkeypatch, correlation, of_advantages, of_pairing):
    related(monkeypatch, advantages, by_group=correlation)
    related(monkeypatch, pairing, by_group=correlation)
    assert codes(advantages._inverted(facts())) == of_advantages
    assert codes(pairing._advantages(facts(rollouts=grouped()))) == of_pairing


@pytest.mark.parametrize(
    ("moved", "of_reward", "is_baseline"),
    [(0.499, 0.0, False), (0.501, 0.0, True), (0.6, 0.31, False), (0.6, 0.29, True)],
)
def test_another_baseline_moves_the_mean_and_not_as_the_reward_does(moved, of_reward, is_baseline):
    # Advantages of -1 and 1 by halves have a standard deviation of 1.
    run = rows_of_steps(reward_=np.where(STEPS >= 59, of_reward, 0.0))
    shifted = np.tile([-1.0, 1.0], 500) + np.where(run.step >= 59, moved, 0.0)
    columns = {name: getattr(run, name) for name in Rollouts.__dataclass_fields__} | {"advantage": shifted}
    near = (given_change("advantage_mean", "advantages", 0.0, moved, size_in_sd=5.0),)
    found = codes(advantages._changed(facts(near=near, rollouts=Rollouts(**columns))))
    assert list(found) == ["advantages_changed" if is_baseline else "advantages_steady"]


@pytest.mark.parametrize(
    ("after", "size_in_sd", "is_far"), [(3.01, 10.0, True), (2.99, 10.0, False), (3.01, 9.9, False)]
)
def test_a_mean_advantage_beyond_what_single_ones_had_is_another_baseline(after, size_in_sd, is_far):
    run = rows_of_steps()
    spread = np.tile([-1.0, 1.0], 500)
    columns = {name: getattr(run, name) for name in Rollouts.__dataclass_fields__} | {"advantage": spread}
    near = given_change("advantage_mean", "advantages", 0.0, after, size_in_sd=size_in_sd, shape="ramp")
    assert advantages._is_large(near, facts(rollouts=Rollouts(**columns))) == is_far


@pytest.mark.parametrize(("of_reward", "is_far"), [(2.4, True), (2.6, False)])
def test_a_mean_advantage_that_a_slow_baseline_leaves_in_a_reward_is_no_other_baseline(of_reward, is_far):
    run = rows_of_steps(reward_=np.where(STEPS >= 59, of_reward, 0.0))
    shifted = np.tile([-1.0, 1.0], 500) + np.where(run.step >= 59, 5.0, 0.0)
    columns = {name: getattr(run, name) for name in Rollouts.__dataclass_fields__} | {"advantage": shifted}
    near = given_change("advantage_mean", "advantages", 0.0, 5.0, shape="ramp")
    assert advantages._is_large(near, facts(rollouts=Rollouts(**columns))) == is_far


def test_an_evaluation_that_holds_speaks_for_what_is_sampled_and_against_what_moves_the_policy(monkeypatch):
    related(monkeypatch, advantages, by_group=0.9)
    run = {
        "is_held_out": True,
        "rollouts": rows_of_steps(),
        "since_fall": rows_of_steps(),
        "mismatch": run_mismatch(0.05),
    }
    of = {
        name: codes(getattr(module, name)(facts(**run)).evidence)["evaluation_holds"]
        for name, module in (
            ("data", data), ("truncation", truncation), ("mismatch", mismatch), ("advantages", advantages), ("entropy", entropy),
            ("length", length), ("optimizer", optimizer), ("reference", reference),
        )
    }  # fmt: skip
    assert of == {
        "data": MEDIUM, "truncation": WEAK, "mismatch": WEAK, "advantages": -STRONG, "entropy": -STRONG, "length": -MEDIUM,
        "optimizer": -STRONG, "reference": -STRONG,
    }  # fmt: skip


@pytest.mark.parametrize(("after", "points"), [(0.029, STRONG), (0.03, DECISIVE), (0.2, DECISIVE)])
def test_an_engine_that_was_exact_before_is_told_so(after, points):
    exact = {"mean_abs_d": [change(50, before=0.0, after=after)]}
    assert codes(mismatch._order(facts(mismatch=run_mismatch(), changes=exact))) == {"exact_until": points}
    found = mismatch._order(facts(mismatch=run_mismatch(), changes={"mean_abs_d": [change(50, before=0.0, after=0.2)]}))
    assert evidence_sentence(found[0]) == (
        "the engine was exact until step 50 (95% CI 50-50); from then on mean |d| is 0.2 nats"
    )


@pytest.mark.parametrize(("high", "is_near"), [(46, False), (47, True)])
def test_a_change_is_near_a_fall_from_a_tenth_of_the_run_before_its_interval(high, is_near):
    change_ = given_change("x", "prompts", low=high, high=high, step=high)
    assert bool(around([change_], FALL, 100)) == is_near


# --- a control --------------------------------------------------------------------------------------------------------


def rows(length=1.0, reward_=1.0, n=20, whole=None, step=1, likelihood=0.0, advantage=0.0):
    values = {
        "step": np.full(n, step), "whole": np.arange(n) if whole is None else whole, "prompt": np.zeros(n), "group": np.zeros(n, int),
        "reward": np.broadcast_to(reward_, n).astype(float), "length": np.broadcast_to(length, n).astype(float),
        "advantage": np.broadcast_to(advantage, n).astype(float), "likelihood": np.broadcast_to(likelihood, n).astype(float),
    }  # fmt: skip
    return Rollouts(**{name: values.get(name, np.zeros(n)) for name in Rollouts.__dataclass_fields__})


def grouped():
    """Two sequences of one step, each in a group of its own."""
    return replace(rows(n=2), group=np.arange(2))


@pytest.mark.parametrize(
    ("run", "other", "differs"),
    [
        (0.00999, 0.0, False), (0.01, 0.0, True), (0.0299, 0.01, False), (0.0301, 0.01, True),
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


def steps_of(run, *, parted_at=100, prompts_at=100):
    """Rollouts of 20 steps with 4 sequences each; responses and prompts that are other ones from a step on."""
    step = np.repeat(np.arange(1, 21), 4)
    other = 1000 * run
    prompt = step * 10 + other * (step >= prompts_at)
    whole = np.arange(80) + other * (step >= min(parted_at, prompts_at))
    values = {"step": step, "prompt": prompt, "whole": whole}
    return Rollouts(**{name: values.get(name, np.zeros(80)) for name in Rollouts.__dataclass_fields__})


@pytest.mark.parametrize(
    ("parted_at", "shifts", "differ"), [(5, False, False), (5, True, True), (9, False, True), (10, False, True)]
)
def test_prompts_that_differ_after_the_responses_do_are_given_only_where_they_shift(parted_at, shifts, differ):
    evidence = (Evidence(code="prompts_changed", points=1.0),) if shifts else ()
    pair = [facts(rollouts=steps_of(run, parted_at=parted_at, prompts_at=9)) for run in (1, 0)]
    found = [*control._prompts(*pair, (Suspect(code="data", evidence=evidence),))]
    assert [(one.suspect, one.values["step"]) for one in found] == ([("data", 9)] if differ else [])


@pytest.mark.parametrize(("lag", "since", "differs"), [(0.0, 14, True), (1.0, 13, True), (1.0, 14, False)])
def test_behind_by_the_same_lag_a_mismatch_differs_if_it_does_where_the_runs_part(lag, since, differs):
    lags = {"version_lag": np.full(100, lag)}
    run = facts(
        mismatch=run_mismatch(0.2),
        rollouts=steps_of(1, parted_at=10),
        series=lags | {"mean_abs_d": level(0.0, 0.2, at=since)},
    )
    other = facts(mismatch=run_mismatch(0.0), rollouts=steps_of(0), series=lags | {"mean_abs_d": np.full(100, 0.001)})
    assert bool([*control._mismatches(run, other, ())]) == differs


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


@pytest.mark.parametrize(("run", "of_control", "suspects"), [
    (0.69, 0.7, ["pairing"]), (0.7, 0.9, []), (0.5, 0.69, []), (-0.299, 0.9, ["pairing"]), (-0.301, 0.9, ["advantages"]),
])  # fmt: skip
def test_advantages_follow_in_the_control_alone(monkeypatch, run, of_control, suspects):
    relations = iter([SimpleNamespace(by_group=run), SimpleNamespace(by_group=of_control)])
    monkeypatch.setattr(control, "relation", lambda *arguments: next(relations))
    of_both = facts(rollouts=rows_of_steps(), since_fall=rows_of_steps())
    assert [difference.suspect for difference in control._advantages(of_both, of_both)] == suspects


@pytest.mark.parametrize(
    ("lag", "of_control", "suspects"),
    [(0.99, 0.0, []), (1.0, 0.0, ["staleness"]), (1.9, 1.0, []), (2.0, 1.0, ["staleness"]), (5.9, 3.0, []), (6.0, 3.0, ["staleness"])],
)  # fmt: skip
def test_two_runs_differ_in_lag(lag, of_control, suspects):
    pair = (facts(series={"version_lag": np.full(100, value)}) for value in (lag, of_control))
    assert [difference.suspect for difference in control._lags(*pair)] == suspects


@pytest.mark.parametrize(("rate", "suspects"), [(1.0009, []), (1.0011, ["optimizer"])])
def test_two_runs_differ_in_learning_rate(rate, suspects):
    pair = (facts(series={"learning_rate": np.full(100, value)}) for value in (rate, 1.0))
    assert [difference.suspect for difference in control._rates(*pair)] == suspects


@pytest.mark.parametrize(
    ("moved", "norm", "suspects"),
    [
        (0.99e-5, 1.0, []),
        (1.01e-5, 1.0009, ["unknown", "optimizer"]),
        (1.01e-5, 1.0011, ["unknown", "entropy", "reference"]),
        (1.01e-5, float("nan"), ["unknown", "optimizer", "entropy", "reference"]),
    ],
)
def test_the_first_update_that_leaves_other_weights(moved, norm, suspects):
    first, second = rows(step=1), rows(step=2)
    joined = {name: np.r_[getattr(first, name), getattr(second, name)] for name in Rollouts.__dataclass_fields__}
    other = Rollouts(**joined | {"likelihood": np.r_[first.likelihood, second.likelihood + moved]})
    given = {"series": {"grad_norm": np.full(100, norm)}}, {"series": {"grad_norm": np.ones(100)}}
    pair = (facts(rollouts=runs, **one) for runs, one in zip((other, Rollouts(**joined)), given, strict=True))
    assert [difference.suspect for difference in control._first_update(*pair)] == suspects


@pytest.mark.parametrize(("num_alike", "suspects"), [(64, ["unknown", "optimizer"]), (65, [])])
def test_updates_are_compared_until_a_good_part_of_a_fall_is_there(num_alike, suspects):
    parts = [rows(step=step, n=2) for step in range(1, 101)]
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
            "changes": (), "suspects": suspects,
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
    where = "reward collapses from step 60 on (95% CI 57-63), 0.8 to 0.3. "
    told = attribution(suspect("reward", 0.9), suspect("mismatch", 0.01))
    assert verdict_sentence(told) == where + (
        "Most likely cause: a noisy or wrong reward (90%, observation of one run). The mismatch is ruled out."
    )
    open_ = attribution(suspect("mismatch", 0.4, "temperature"), suspect("length", 0.3), control="other")
    assert verdict_sentence(open_) == where + (
        "Cause unknown. Most likely of those tested: training-inference mismatch (40%): temperature on one "
        "side only; response length (30%). Basis: observation of two runs."
    )
    unknown = attribution(suspect("unknown", 0.7), suspect("length", 0.2), suspect("reward", 0.1))
    assert verdict_sentence(unknown) == where + (
        "Cause unknown. Most likely of those tested: response length (20%); something else (70%). Basis: observation of one run."
    )
    assert (open_.cause, open_.first_suspect.code) == (None, "mismatch")
    assert (unknown.cause, unknown.first_suspect.code) == (None, "length")
    assert (told.cause, told.first_suspect.code) == ("reward", "reward")
    assert attribution(suspect("unknown", 0.95), suspect("length", 0.0499)).first_suspect is None
    assert attribution(suspect("unknown", 0.95), suspect("length", 0.05)).first_suspect.code == "length"
    assert verdict_sentence(attribution(suspect("unknown", 0.98), suspect("length", 0.02))) == where + (
        "Cause unknown. None of those tested explains it (98%). Basis: observation of one run."
    )
    seen = Evidence(code="masks_change", points=7.0, values={"step": 40, "share": 1.0, "num_responses": 70})
    for evidence in ((seen, thresholds.prior("unknown")), (thresholds.prior("unknown"), seen)):
        counted = attribution(replace(suspect("unknown", 0.98), evidence=evidence), suspect("length", 0.02))
        assert verdict_sentence(counted) == where + (
            "Cause unknown. None of those tested explains it (98%): from step 40 on, the loss mask differs in 100% of 70 "
            "responses sampled both before and after it. Basis: observation of one run."
        )
    sure = attribution(suspect("entropy", 0.99), kind="intervention", control="other")
    assert (
        "Most likely cause: entropy collapse or explosion (99%, intervention: the baseline shares the seeds)"
        in verdict_sentence(sure)
    )
    assert verdict_sentence(attribution(fall=None)).startswith("No collapse detected: reward shows no lasting drop")
    assert verdict_sentence(attribution(outcome="", fall=None)).startswith("Cannot detect a collapse")


def test_probabilities_are_those_of_the_points():
    evidence = {"mismatch": 1.0, "reward": 0.0}
    first, second = ranked(
        [Suspect(code=code, evidence=(Evidence(code="prior", points=points),)) for code, points in evidence.items()]
    )
    assert (first.code, second.code) == ("mismatch", "reward")
    assert first.probability / second.probability == pytest.approx(np.e**thresholds.WORTH)
    beside = control._without((first, second), "reward")
    assert beside[0].probability / beside[1].probability == pytest.approx(np.e**thresholds.WORTH_BESIDE)


def test_evidence_counts_as_falls_say():
    given = {"setting_changed": 4.0, "reward_drops_with_policy": 2.5, "update_bursts": 1.5, "prior": -1.0}
    suspect = Suspect(code="optimizer", evidence=tuple(Evidence(code=code, points=given[code]) for code in given))
    assert [each.points for each in weighed(suspect).evidence] == pytest.approx([9.6, 4.5, 1.5, -1.0])
    # A setting that somebody changed counts alike for every suspect; what the factors have of another one does not.
    of_others = [Suspect(code="entropy", evidence=(Evidence(code=code, points=4.0),)) for code in given]
    assert [weighed(one).points for one in of_others] == pytest.approx([9.6, 4.0, 4.0, 4.0])


def test_factors_are_of_evidence_that_there_is_and_never_turn_it():
    known = {(suspect, code) for suspect, code in (kind.split(".") for kind in FACTORS if kind != SET)}
    assert SET in EVIDENCE
    assert {suspect for suspect, _ in known} <= set(SUSPECTS)
    assert {code for _, code in known} <= set(EVIDENCE) | {code for codes in EVIDENCE_OF.values() for code in codes}
    assert all(0 <= factor <= 3 for factor in FACTORS.values())


def test_text_marks_what_speaks_for_and_against():
    evidence = tuple(Evidence(code="length_steady", points=points) for points in (1.0, -1.0, 0.0))
    likely, hardly = Suspect(code="length", probability=0.02, evidence=evidence), suspect("reward", 0.0199)
    text = attribution_text(attribution(likely, hardly))
    assert [line.split()[0] for line in text.splitlines() if "response length does not change" in line] == [
        "for",
        "against",
        "neutral",
    ]
    assert "Unlikely (<2%): a noisy or wrong reward 2.0%" in text
    assert "response length (2%)" in text


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
    monkeypatch.setattr(fall_module, "level_deviation", lambda values: noise)
    monkeypatch.setattr(fall_module, "_slope_in_sd", lambda values, noise: 0.0)
    assert (find_fall(outcome(np.where(STEPS < 50, 1.0, 0.5))) is not None) == falls


@pytest.mark.parametrize(("width", "kind"), [(13, "collapse"), (13.5, "slow_decline")])
def test_a_collapse_takes_a_tenth_of_the_run(width, kind):
    fall = find_fall(outcome(noisy(np.interp(STEPS, [45, 45 + width], [1.0, 0.2]), 1e-3)))
    assert fall.kind == kind
    # 0.35 of it is lost at the end of that share of the slope.
    assert fall.fallen == pytest.approx(45 + 0.35 * width, abs=1.01)


def test_a_reward_that_falls_beside_an_evaluation_that_holds_is_the_fall():
    of_reward = replace(FALL, onset_of="reward", low=59, high=60, interval=(58, 61))
    of_evaluation = replace(FALL, outcome="eval", onset_of="eval")
    assert timeline._agreed(None, of_reward) == of_reward
    assert timeline._agreed(of_evaluation, None) == of_evaluation
    both = timeline._agreed(of_evaluation, of_reward)
    assert (both.outcome, both.onset_of, both.interval) == ("eval", "reward", (58, 61))
    assert timeline._agreed(None, None) is None


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
    page = (Path(__file__).parents[2] / "docs" / "reference" / "attribute.md").read_text(encoding="utf-8")
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


@pytest.mark.parametrize(
    ("negative", "negative_since", "positive_since", "is_one_sided"),
    [(0.1, 0.0, 0.1, True), (0.09, 0.0, 0.1, False), (0.1, 0.011, 0.1, False), (0.1, 0.0, 0.09, False)],
)
def test_advantages_of_one_sign(negative, negative_since, positive_since, is_one_sided):
    def part(below, above):
        values = np.zeros(1000)
        values[: round(1000 * below)], values[len(values) - round(1000 * above) :] = -1.0, 1.0
        return SimpleNamespace(advantage=values, share_below_group=share_below)

    rollouts = SimpleNamespace(until=lambda step: part(negative, 0.3))
    for share_below in (0.1, 0.09):  # rewards that are alike leave no signs
        found = advantages.one_sided(facts(rollouts=rollouts, since_fall=part(negative_since, positive_since)))
        assert [each.points for each in found] == [CERTAIN + WEAK] * (is_one_sided and share_below == 0.1)


@pytest.mark.parametrize(
    ("factor", "at", "verdict"),
    [
        (7.9, 60, {"advantages_steady": -STRONG}),
        (8.1, 60, {"advantages_changed": CERTAIN}),
        (300.0, 66, {"advantages_steady": -STRONG}),  # the fall's interval ends at 63
    ],
)
def test_one_step_of_advantages_of_another_size_where_a_fall_begins(factor, at, verdict):
    signs = np.where(np.arange(100) % 2, 1.0, -1.0)
    rows = rows_of_steps(advantage=signs * np.where(at == STEPS, factor, np.where(at < STEPS, 0.0, 1.0)))
    assert codes(advantages._changed(facts(rollouts=rows))) == verdict


def test_of_advantages_that_were_not_recorded_nothing_is_said():
    rows = rows_of_steps(advantage=np.full(100, np.nan))
    assert advantages._changed(facts(rollouts=rows)) == []


def test_unusual_settings_count_once_and_those_of_adam_for_adam_alone():
    several = {"adam_beta1": 0.1, "adam_epsilon": 1.0, "learning_rate": 1.0, "adam_beta2": 0.5}
    assert sum(each.points for each in optimizer._settings(facts(settings=several))) == STRONG
    assert optimizer._settings(facts(settings={"adam_beta2": 0.0, "learning_rate": 1.0})) == []


def test_logprobs_in_other_rows_are_no_mismatch_of_the_engine_s():
    for code, points in (("row_pairing", 0.0), ("temperature", 2.5)):
        found = codes(mismatch.mismatch(facts(mismatch=run_mismatch(0.5), checked=checked(code))).evidence)
        assert found["mismatch_large"] == points


def test_a_distance_to_the_reference_that_the_policy_makes_is_no_jump_of_the_reference():
    assert _distance(9.0) == {"distance_jumps": DECISIVE}
    assert _distance(9.0, likelihood=level(0.0, -3.0, at=58)) == {}
    assert _distance(9.0, before=9.0) == {}
    assert _distance(9.0, keeps=True) == {}


@pytest.mark.parametrize(("moved", "step", "keeps"), [(0.0499, 50, True), (0.0501, 50, False), (0.0, 1, False)])
def test_a_reference_is_the_same_where_it_scores_equal_responses_alike(moved, step, keeps):
    given = rows_of_steps(a_step=1)
    n = len(given.step)
    same = replace(given, whole=np.zeros(n), reference=np.where(given.step < 50, 0.0, moved))
    assert same.keeps_reference(step) == keeps
    assert not replace(same, whole=np.arange(n)).keeps_reference(step)


def test_tokens_that_are_not_sampled_as_said_are_the_engine_s_whatever_both_sides_agree_on():
    kept = SimpleNamespace(sampled_by_step=(STEPS, -level(1.0, 5.0, at=60)))
    given = facts(rollouts=kept, series={"entropy": np.ones(100)}, mismatch=run_mismatch(0.001))
    found = codes(mismatch.mismatch(given).evidence)
    assert (found["not_sampled_so"], found["mismatch_small"]) == (CERTAIN, 0.0)
    few = np.where((STEPS == 20) | (STEPS == 80), 1.0, np.nan)  # too few steps have an entropy
    assert mismatch.unsampled(facts(rollouts=kept, series={"entropy": few})) == []


@pytest.mark.parametrize(("slope", "by_length"), [(1.0, 1.0), (-1.0, -1.0), (0.0, 0.0)])
def test_what_a_token_earns_may_grow_by_the_step(slope, by_length):
    length, step = np.tile([1.0, 2.0, 3.0, 4.0], 10), np.repeat(np.arange(10), 4)
    difference = slope * length * step**3 + 50.0 * (step % 3)
    assert length_correlation(difference, length, step) == pytest.approx(by_length, abs=1e-9)


def test_a_control_that_pays_no_length_says_that_the_reward_is_that():
    suspects = (
        Suspect(code="reward", evidence=(Evidence(code="rewards_changed", points=CERTAIN), thresholds.prior("reward"))),
    )
    (left,) = control._without(suspects, "reward", "rewards_changed")
    assert [each.code for each in left.evidence] == ["prior"]


def of_two_updates(**changed):
    """Two steps of a run and its control, whose second has other weights in the run."""
    first, second = rows(step=1), rows(step=2)
    joined = {name: np.r_[getattr(first, name), getattr(second, name)] for name in Rollouts.__dataclass_fields__}
    moved = {"likelihood": np.r_[first.likelihood, second.likelihood + 1.0]}
    norms = {"series": {"grad_norm": np.ones(100)}}, {"series": {"grad_norm": np.full(100, 2.0)}}
    both = (
        Rollouts(**joined | moved | changed),
        Rollouts(**joined | {name: changed[name] for name in ("advantage",) if name in changed}),
    )
    return [facts(rollouts=runs, **one) for runs, one in zip(both, norms, strict=True)]


def test_an_update_from_advantages_that_were_not_recorded_may_be_theirs():
    n = len(rows(step=1).step) * 2
    found = [*control._first_update(*of_two_updates(advantage=np.full(n, np.nan)))]
    assert {each.code for each in found} == {"gradient_without_advantages"}
    assert [each.suspect for each in found] == ["unknown", "entropy", "reference", "advantages"]


def test_an_update_from_other_logprobs_of_the_engine_is_not_the_optimizer_s():
    n = len(rows(step=1).step)
    assert [*control._first_update(*of_two_updates())]
    assert [*control._first_update(*of_two_updates(sampled=np.r_[np.ones(n), np.zeros(n)]))] == []


@pytest.mark.parametrize(("begins", "differs"), [(43, True), (44, False)])
def test_a_mismatch_after_the_first_other_gradient_follows_it(begins, differs):
    run, other = (
        facts(mismatch=run_mismatch(size), series={"mean_abs_d": level(0.001, size, at=begins)})
        for size in (0.5, 0.001)
    )
    assert bool([*control._mismatches(run, other, (), 40)]) == differs


def test_a_mismatch_of_exchanged_rows_is_pairing_s_beside_a_control():
    run, other = facts(mismatch=run_mismatch(0.5), checked=checked("row_pairing")), facts(mismatch=run_mismatch(0.001))
    assert [each.suspect for each in control._mismatches(run, other, ())] == ["pairing"]


@pytest.mark.parametrize(
    ("num_higher", "num_steps", "found"), [(18, 20, True), (17, 20, False), (4, 4, True), (3, 3, False), (20, 20, True)]
)
def test_an_entropy_above_the_control_s_from_the_first_other_update_on(num_higher, num_steps, found):
    higher = np.where(np.arange(100) < 40 + num_higher, 1.1, 0.9)
    entropy_ = np.where((STEPS > 40) & (40 + num_steps >= STEPS), higher, np.nan)
    run, other = facts(series={"entropy": entropy_}), facts(series={"entropy": np.ones(100)})
    assert [each.code for each in control._entropy(run, other, 40)] == ["entropy_higher"] * found


def test_an_entropy_that_parts_first_is_told_from_the_other_terms_of_a_loss(monkeypatch):
    first = [
        control.Difference(suspect=each, code="update_or_loss", values={"step": 40}) for each in ("unknown", "entropy")
    ]
    monkeypatch.setattr(control, "shares_prompts", lambda *pair: True)
    monkeypatch.setattr(control, "_first_update", lambda *pair: first)
    for name in ("_prompts", "_rewards", "_advantages", "_lags", "_rates", "_settings", "_mismatches", "_changed"):
        monkeypatch.setattr(control, name, lambda *arguments: [])
    suspects = ranked([Suspect(code=each, evidence=(thresholds.prior(each),)) for each in ("unknown", "entropy")])
    for size, points in ((1.1, 7.0 + MEDIUM - 1.5), (1.0, 7.0 - 1.5)):
        run, other = facts(series={"entropy": np.full(100, size)}), facts(series={"entropy": np.ones(100)}, fall=None)
        compared = control.compare(run, other, suspects)
        assert {each.code: each.points for each in compared.suspects} == {"unknown": 9.5, "entropy": points}


def columns_of(rollouts):
    return {name: getattr(rollouts, name) for name in Rollouts.__dataclass_fields__}


@pytest.mark.parametrize(
    ("step", "drop", "points"),
    [
        (60, Drop(step=60, share=0.7, is_early=False, policy=5.1), 0.0),
        (60, Drop(step=60, share=0.7, is_early=False, policy=4.9), DECISIVE),
        (60, None, DECISIVE),
        (57, Drop(step=60, share=0.7, is_early=False, policy=5.1), DECISIVE),
    ],
)
def test_a_mismatch_that_comes_with_another_policy_at_once_is_not_its_cause(step, drop, points):
    moved = {"mean_abs_d": [change(step, before=1e-4, after=0.05)]}
    (found,) = mismatch._order(facts(mismatch=run_mismatch(0.05), changes=moved, drop=drop))
    assert found.points == points


@pytest.mark.parametrize(("policy", "size_before", "differs"), [(5.1, 0.0, False), (5.1, 0.05, True), (4.9, 0.0, True)])
def test_beside_a_control_neither_is_it(policy, size_before, differs):
    drop = Drop(step=60, share=0.7, is_early=False, policy=policy)
    run = facts(mismatch=run_mismatch(0.05), drop=drop, series={"mean_abs_d": level(size_before, 0.05, at=60)})
    other = facts(mismatch=run_mismatch(0.001), series={"mean_abs_d": np.full(100, 0.001)})
    assert bool([*control._mismatches(run, other, ())]) == differs


@pytest.mark.parametrize(("size", "points"), [(0.999, STRONG + 2.5), (1.0, CERTAIN)])
def test_a_lag_is_certain_where_the_policy_is_a_nat_a_token_away(size, points):
    assert codes(stale_suspect._declared(lagging(4.5, 4.5, mismatch=run_mismatch(size)), is_seen=False)) == {
        "declared_lag": points
    }


@pytest.mark.parametrize(
    ("series", "before", "after", "points"),
    [
        ("lr", 0.002, 0.00599, DECISIVE),
        ("optim.learning_rate", 0.006, 0.00201, DECISIVE),
        ("lr", 0.002, 0.00601, CERTAIN),
        ("lr", 0.0, 0.001, CERTAIN),
        ("warmup", 2.0, 3.0, CERTAIN),
    ],
)
def test_a_learning_rate_may_bear_another_factor(series, before, after, points):
    change = given_change(series, "settings", before, after)
    assert changed.worth(facts(near=(change,)), change) == points


@pytest.mark.parametrize(
    ("after", "size", "verdict"),
    [
        (1.199, 0.01, {"reward_hides_fall": STRONG}),
        (1.201, 0.01, {"reward_hides_fall": DECISIVE}),
        (1.201, 0.499, {"reward_hides_fall": DECISIVE}),
        (1.201, 0.5, {"reward_hides_fall_of_other_policy": 0.0}),
    ],
)
def test_a_reward_that_grows_while_the_evaluation_falls(after, size, verdict):
    given = facts(hides=True, reward_beside=(1.0, after), mismatch=run_mismatch(size))
    assert codes(reward._hidden(given)) == verdict


@pytest.mark.parametrize(("of_reward", "is_baseline"), [(-0.19, True), (-0.21, False)])
def test_a_normalised_mean_that_lags_behind_the_reward_is_no_other_baseline(of_reward, is_baseline):
    # Rewards scatter by 0.1 and advantages by 1: a reward that loses 0.4 would move a mean that lags by 4, one that loses 0.2 by half of it.
    signs = np.where(np.arange(1000) % 2, 1.0, -1.0)
    run = rows_of_steps()
    since = run.step >= 59
    both = {"advantage": signs - 4.0 * since, "reward": 0.1 * signs + of_reward * since}
    near = (given_change("advantage_mean", "advantages", 0.0, -4.0, size_in_sd=20.0),)
    found = codes(advantages._changed(facts(near=near, rollouts=Rollouts(**columns_of(run) | both))))
    assert list(found) == ["advantages_changed" if is_baseline else "advantages_steady"]


@pytest.mark.parametrize(
    ("limited", "longest_at_end", "verdict"),
    [
        (0.101, 4, {"responses_cut_at_end": CERTAIN}),
        (0.099, 4, {"responses_not_cut": -STRONG}),
        (0.101, 9, {"responses_not_cut": -STRONG}),
        (None, 4, {"responses_not_cut": -STRONG}),
    ],
)
def test_a_limit_that_goes_on_shrinking_cuts_at_the_end(limited, longest_at_end, verdict):
    # Ten of a step, of 1 to 9 tokens before; since step 60 the limit shrinks from 9 to what it is at the end.
    run = rows_of_steps()
    own = np.tile(np.r_[np.arange(1, 9), 9, 9], 100).astype(float)
    most = np.interp(run.step, [63, 90], [9, longest_at_end]).round()
    series = {} if limited is None else {"share_length_limited": level(0.0, limited, at=60)}
    cut = Rollouts(**columns_of(run) | {"length": np.minimum(own, most)})
    assert codes(truncation._cut(facts(rollouts=cut, series=series))) == verdict


@pytest.mark.parametrize(("in_control", "suspects"), [(0.24, ["reward"]), (0.26, [])])
def test_rewards_that_differ_by_themselves_are_no_difference(in_control, suspects):
    # Half of the responses earn something else in the run; of the control's own repeated ones a share does.
    n = 400
    given = np.tile(np.arange(20.0), n // 20)
    whole = np.tile(np.arange(20), n // 20).astype(np.uint64)
    once = replace_rewards(rows(n=n, whole=whole, reward_=given), np.where(np.arange(n) % 20 < 10, given + 7, given))
    pairs = n - 20
    other = given.copy()
    # One response after another earns 3 more from its second time on, so that so many neighbours differ.
    count = 0
    for response in range(20):
        for time in range(1, n // 20, 2):
            if count + 2 <= in_control * pairs:
                other[time * 20 + response] += 3.0
                count += 2
    control_rows = replace_rewards(rows(n=n, whole=whole, reward_=given), other)
    found = control._rewards(facts(rollouts=once), facts(rollouts=control_rows))
    assert [difference.suspect for difference in found] == suspects


def replace_rewards(rollouts, reward_):
    return Rollouts(**columns_of(rollouts) | {"reward": reward_})


@pytest.mark.parametrize(
    ("differing", "points"),
    [(["prompts"], -DECISIVE), (["prompts", "prompts"], -DECISIVE), (["prompts", "update"], None), (["update"], None)],
)
def test_where_one_thing_alone_differs_nothing_else_is_the_cause(monkeypatch, differing, points):
    monkeypatch.setattr(control, "shares_prompts", lambda *pair: True)
    found = [control.Difference(suspect="data", code=code) for code in differing]
    monkeypatch.setattr(control, "_differences", lambda *arguments: found)
    suspects = tuple(Suspect(code=each, evidence=(thresholds.prior(each),)) for each in ("data", "reward", "unknown"))
    compared = control.compare(facts(), facts(fall=None), suspects)
    of = {suspect.code: codes(suspect.evidence) for suspect in compared.suspects}
    assert of["reward"].get("control_is_alike") == points
    assert "control_is_alike" not in of["unknown"] | of["data"]


def climbing(before, last, *, peak=None, fallen=65):
    """An entropy that leaves what it was before the fall at once or by a ramp, and ends at `last`, after a peak at step 80."""
    ramp = np.interp(STEPS, [57, 75], [before, last])
    if peak is not None:
        ramp[(STEPS >= 78) & (STEPS <= 82)] = peak
    return codes(entropy._moves(facts(series={"entropy": ramp}, fall=replace(FALL, fallen=fallen))))


@pytest.mark.parametrize(
    ("before", "last", "options", "climbs"),
    [
        (1.0, 2.501, {}, True),
        (1.0, 2.499, {}, False),
        (1.0, 2.7, {"peak": 2.99}, True),
        (1.0, 2.7, {"peak": 3.01}, False),
        (1.0, 2.7, {"fallen": 59}, True),
        (1.0, 2.7, {"fallen": 58}, False),
        (5.0, 13.9, {}, True),
        (5.0, 14.1, {}, False),
        (0.0, 1.0, {}, False),
    ],
)
def test_an_entropy_that_climbs_from_before_a_fall_to_the_end(before, last, options, climbs):
    assert (climbing(before, last, **options) == {"entropy_climbs": DECISIVE + WEAK}) == climbs


@pytest.mark.parametrize(("apart", "is_told"), [(1.99, True), (2.01, False)])
def test_the_trainer_s_entropy_says_nothing_of_an_engine_that_has_another_policy(apart, is_told):
    # -logprob is 4 nats above the entropy.
    kept = SimpleNamespace(sampled_by_step=(STEPS, -level(1.0, 5.0, at=60)))
    series = {"entropy": np.ones(100), "mean_abs_d": level(0.001, apart, at=60)}
    found = codes(mismatch.unsampled(facts(rollouts=kept, series=series)))
    assert list(found) == ["not_sampled_so"] * is_told


@pytest.mark.parametrize(
    ("setting", "points"), [("gen/temperature", 0.0), ("top_p", 0.0), ("engine_dtype", -4.0 - MEDIUM)]
)
def test_sides_that_agree_do_not_clear_a_setting_of_sampling_that_was_changed(setting, points):
    run = facts(mismatch=run_mismatch(0.001), checked=checked("rounding", fails=False), near=(set_at(setting, 60),))
    evidence = [each for each in mismatch.mismatch(run).evidence if each.code in ("mismatch_small", "check_passes")]
    assert len(evidence) == 2
    assert sum(each.points for each in evidence) == points


@pytest.mark.parametrize(("jumps_at", "size"), [(64, 2.0), (65, 2.0), (66, 0.003)])
def test_a_mismatch_that_jumps_where_a_good_part_is_lost_has_its_size_from_then_on(jumps_at, size):
    # A reward that is lost within one step: no later step is of the onset.
    values = np.where(jumps_at > STEPS, 0.003, 2.0)
    series = {"mean_abs_d": Series("mean_abs_d", STEPS, values, "log", "mismatch")}
    assert read_run_mismatch(series, FALL).size == size


def test_one_step_of_mismatch_at_the_end_of_an_onset_is_an_outlier():
    values = np.where(STEPS == 65, 2.0, 0.003)
    assert read_run_mismatch({"mean_abs_d": Series("mean_abs_d", STEPS, values, "log", "mismatch")}, FALL).size == 0.003


@pytest.mark.parametrize(
    ("factor", "until", "points"),
    [(9.99, 100, MEDIUM), (10.01, 100, DECISIVE), (50.0, 59, DECISIVE), (50.0, 57, MEDIUM)],
)
def test_a_rate_that_rose_before_a_fall_is_decisive_where_it_is_still_ten_times_what_it_was(factor, until, points):
    rate = np.where((STEPS >= 40) & (until >= STEPS), factor, 1.0)
    assert codes(optimizer._spike(facts(series={"learning_rate": rate}))) == {"learning_rate_spike_before_fall": points}


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("limit", "truncation"), ("gen.tokens_limit", "truncation"), ("max_gen_tokens", "truncation"), ("max_response_length", "truncation"),
        ("max_prompt_length", "data"), ("kl_limit", "reference"), ("clip_limit", "optimizer"), ("betas2", "optimizer"),
        ("optim/beta_1", "optimizer"), ("adam_beta2", "optimizer"), ("beta", "reference"), ("speed_limit", "unknown"),
        ("schedule", "optimizer"), ("optim/scheduler", "optimizer"), ("kl_schedule", "reference"),
    ],
)  # fmt: skip
def test_a_setting_belongs_to_a_suspect_by_its_name(name, owner):
    assert suspect_of(name) == owner


GROUPS_, MEMBERS = 5, 4


def ordered_rewards(change, *, since=1, steps=30, seed=0):
    """Rollouts whose responses come again and earn what they are, in an order that `change` makes of a step's rewards."""
    draw = np.random.default_rng(seed)
    num = GROUPS_ * MEMBERS
    whole = draw.integers(0, 40, (steps, num))
    earned = (np.arange(40) * 7 % 11).astype(float)[whole]
    reward = np.stack([change(row) if step + 1 >= since else row for step, row in enumerate(earned)])
    step = np.repeat(np.arange(1, steps + 1), num)
    group = np.repeat(np.arange(steps * GROUPS_), MEMBERS)
    values = {"step": step, "whole": whole.ravel(), "reward": reward.ravel(), "group": group}
    return Rollouts(**{name: values.get(name, np.zeros(steps * num)) for name in Rollouts.__dataclass_fields__})


@pytest.mark.parametrize(
    ("change", "order_", "code"),
    [
        (lambda x: x[::-1], "reversed", "rewards_reversed"),
        (lambda x: x.reshape(-1, MEMBERS)[:, ::-1].ravel(), "reversed_in_groups", "rewards_reversed_in_groups"),
        (lambda x: x.reshape(-1, MEMBERS).T.ravel(), "groups_first", "rewards_groups_first"),
        (lambda x: x.reshape(MEMBERS, -1).T.ravel(), "members_first", "rewards_members_first"),
        (lambda x: np.roll(x, 3), "", "rewards_in_other_rows"),
    ],
)
def test_rewards_in_another_order_than_their_rows_are_pairing(change, order_, code):
    found = repeated_responses(ordered_rewards(change))
    assert (found.order, found.lies_off, found.unequal_shifted) == (order_, True, 0.0)
    assert codes(pairing._rewards(facts(repeated=found))) == {code: CERTAIN}


@pytest.mark.parametrize("change", [lambda x: x, lambda x: np.random.default_rng(int(x.sum())).permutation(x)])
def test_rewards_in_no_order_or_their_own_are_in_none(change):
    found = repeated_responses(ordered_rewards(change))
    assert not found.lies_off


def test_rewards_that_are_sorted_well_after_an_onset_that_is_hardly_known_are_pairing():
    def by_size(rewards):
        return np.sort(rewards.reshape(-1, MEMBERS), 1).ravel()

    rollouts = ordered_rewards(by_size, since=60, steps=100)
    given = facts(rollouts=rollouts, since_fall=rollouts.since(31), breaks=31)
    assert Facts.sorted_in_groups.func(given)[0] == 1.0
    assert (
        Facts.sorted_in_groups.func(facts(rollouts=rollouts, since_fall=rollouts.since(31), breaks=31, fall=None))
        is None
    )


@pytest.mark.parametrize(("sign", "since", "told"), [(-1, 60, True), (1, 60, True), (-1, 20, False)])
def test_rewards_that_are_sorted_within_groups_since_a_fall_are_pairing(sign, since, told):
    def by_size(rewards):
        return np.sort(sign * rewards.reshape(-1, MEMBERS), 1).ravel() * sign

    rollouts = ordered_rewards(by_size, since=since, steps=100)
    given = facts(rollouts=rollouts, since_fall=rollouts.since(60))
    found = Facts.sorted_in_groups.func(given)
    assert (found is not None) == told  # rows that were recorded in order before are as they were
    if told:
        assert found[0] == 1.0
        assert codes(pairing._rewards(facts(sorted_in_groups=found))) == {"rewards_sorted": CERTAIN}


@pytest.mark.parametrize(("unsorted", "is_told"), [(9, True), (11, False)])
def test_rewards_are_sorted_where_nine_of_ten_groups_have_them_so(unsorted, is_told):
    rewards = np.tile([3.0, 2.0, 1.0, 0.0], (100, 1))
    rewards[:unsorted] = [0.0, 3.0, 1.0, 2.0]
    values = {"reward": rewards.ravel(), "group": np.repeat(np.arange(100), 4), "step": np.repeat(np.arange(1, 101), 4)}
    rollouts = Rollouts(**{name: values.get(name, np.zeros(400)) for name in Rollouts.__dataclass_fields__})
    share, by_chance = sorted_share(rollouts)
    assert (share >= thresholds.SORTED) == is_told
    assert by_chance == pytest.approx(1 / 24)


def test_groups_of_two_or_of_one_reward_say_nothing_of_an_order():
    for size, rewards in ((2, [1.0, 0.0]), (4, [1.0, 1.0, 1.0, 1.0])):
        values = {
            "reward": np.tile(rewards, 100),
            "group": np.repeat(np.arange(100), size),
            "step": np.ones(100 * size),
        }
        rollouts = Rollouts(**{name: values.get(name, np.zeros(100 * size)) for name in Rollouts.__dataclass_fields__})
        assert np.isnan(sorted_share(rollouts)).all()


@pytest.mark.parametrize(("late_off", "is_late"), [(True, True), (False, False)])
def test_where_an_onset_is_hardly_known_rewards_are_also_held_against_each_other_after_it(late_off, is_late):
    rollouts = ordered_rewards(lambda x: x[::-1] if late_off else x, since=60, steps=100)
    given = facts(fall=replace(FALL, low=20, interval=(14, 63)), rollouts=rollouts, since_fall=rollouts.since(20))
    found = Facts.repeated.func(given)
    assert found.lies_off == is_late


@pytest.mark.parametrize(("moved", "points"), [(0.499, CERTAIN), (0.501, WEAK)])
def test_advantages_whose_mean_moves_are_not_those_of_other_rows(monkeypatch, moved, points):
    related(monkeypatch, pairing, by_group=0.0)
    related(monkeypatch, advantages, by_group=0.0)
    run = rows_of_steps()
    shifted = np.tile([-1.0, 1.0], 500) + np.where(run.step >= 59, moved, 0.0)
    columns = {name: getattr(run, name) for name in Rollouts.__dataclass_fields__} | {
        "advantage": shifted,
        "group": run.step % 7,
    }
    near = (given_change("advantage_mean", "advantages", 0.0, moved, size_in_sd=5.0),)
    given = facts(near=near, rollouts=Rollouts(**columns))
    assert codes(pairing._advantages(given)) == {"advantages_do_not_follow": points}


@pytest.mark.parametrize(
    ("before", "last", "collapses"),
    [(0.71, 0.07, True), (0.69, 0.06, False), (0.71, 0.072, False), (1.0, 0.099, True), (1.0, 0.101, False)],
)
def test_an_entropy_that_is_lost_before_anything_is_learned_is_punished(before, last, collapses):
    values = np.where(STEPS < 10, 1.0, np.where(STEPS < 57, before, last))
    found = codes(entropy._moves(facts(series={"entropy": values})))
    assert (found.get("entropy_collapses") == DECISIVE) == collapses


@pytest.mark.parametrize(
    ("follows", "size", "is_sign"), [(0.69, 0.901, True), (0.71, 0.901, False), (0.69, 0.899, False), (-0.2, 1.0, True)]
)
def test_advantages_of_their_rows_own_size_have_another_sign(monkeypatch, follows, size, is_sign):
    def known(rollouts, first, second):
        by_group = size if first == "reward_size" else follows
        return Relation(correlation=by_group, by_group=by_group, num_groups=99, negative=0.0)

    for module in (advantages, pairing):
        monkeypatch.setattr(module, "relation", known)
    assert codes(advantages._turned(facts())) == ({"advantages_of_other_sign": CERTAIN} if is_sign else {})
    of_pairing = {} if is_sign or follows > 0.7 else {"advantages_do_not_follow": CERTAIN}
    assert codes(pairing._advantages(facts(rollouts=grouped()))) == of_pairing


def test_rewards_that_lie_where_they_should_say_nothing_against_advantages_that_do_not(monkeypatch):
    related(monkeypatch, pairing, by_group=0.0)
    related(monkeypatch, advantages, by_group=0.0)
    assert codes(pairing.pairing(facts(repeated=repeated(0.0))).evidence)["rewards_in_their_rows"] == 0.0
    related(monkeypatch, pairing, by_group=1.0)
    assert codes(pairing.pairing(facts(repeated=repeated(0.0))).evidence)["rewards_in_their_rows"] == -STRONG


@pytest.mark.parametrize(("moved", "is_told"), [(0.099, False), (0.101, True)])
def test_a_reward_that_hardly_moves_goes_on_telling_how_good_a_policy_is(moved, is_told):
    given = {"new_reward": changed_rewards(0.9), "rollouts": rows_of_steps(), "pays_length_since": 1.0}
    assert (silent.read_silent(silent_facts(**given, reward_moved=moved)) is not None) == is_told


def test_by_how_much_a_reward_is_another_one_is_told_in_its_own_scatter():
    given = given_twice(lambda rewards: rewards + np.tile([0.0, 0.1], len(rewards) // 2), at=60)
    found = Facts.reward_moved.func(
        facts(rollouts=given, changed_rewards=replace(changed_rewards(0.5), low=60, high=60))
    )
    assert found == pytest.approx(0.05 / np.std(np.arange(20) / 20), rel=1e-6)
    assert Facts.reward_moved.func(facts(rollouts=given)) == 0.0


@pytest.mark.parametrize(("set_at_step", "code"), [(30, "responses_cut"), (None, "responses_not_cut")])
def test_a_limit_that_was_set_long_before_is_looked_at_where_it_was(set_at_step, code):
    run = rows_of_steps()
    lengths = np.concatenate(
        [np.arange(10.0, 20.0) if step < 30 else np.r_[np.full(8, 12.0), 10.0, 11.0] for step in STEPS]
    )
    rollouts = Rollouts(**columns_of(run) | {"length": lengths})
    near = () if set_at_step is None else (set_at("max_tokens", set_at_step, 99.0, 12.0),)
    assert list(codes(truncation._cut(facts(rollouts=rollouts, near=near, settings={"max_tokens": 12.0})))) == [code]


def test_lengths_that_are_clearly_paid_and_grow_while_a_fall_is_hidden_count_twice():
    moved = {"length": [change(40, before=10.0, after=20.0)]}
    given = {"pays_length": 0.9, "changes": moved}
    assert codes(length._pays(facts(**given, hides=True))) == {
        "length_pays": DECISIVE,
        "length_pays_while_hidden": STRONG,
    }
    assert codes(length._pays(facts(**given))) == {"length_pays": DECISIVE}
    assert codes(length._pays(facts(pays_length=0.9, hides=True))) == {"length_pays": DECISIVE}
