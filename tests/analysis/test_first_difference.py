"""The first difference of a run from its control: runs that are changed in one thing, and every bound on both sides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from tim_trace.analysis.attribution import divergence
from tim_trace.analysis.attribution.attribute import attribute
from tim_trace.analysis.attribution.divergence import first_divergence
from tim_trace.analysis.attribution.run_facts import Facts
from tim_trace.analysis.attribution.text import verdict_sentence
from tim_trace.analysis.comparison.compare import compare
from tim_trace.analysis.facts.relations import relation
from tim_trace.analysis.facts.rollouts import Rollouts
from tim_trace.analysis.facts.two_runs import SharedTokens, shared_tokens
from tim_trace.analysis.views import open_database
from tim_trace.schemas.errors import TimTraceWarning
from tim_trace.tracer.recorder import Recorder

STEPS, GROUPS, GROUP, CHANGED = 14, 4, 5, 8
ROWS = GROUPS * GROUP
PER_TOKEN_DECAY = 0.8


@dataclass
class Columns:
    """What a run records of a step."""

    step: int
    prompts: list
    ids: list
    mask: list
    group: list
    rewards: np.ndarray | None
    advantages: list
    rollout: list
    train: list
    reference: list
    behind: int = 0
    """Updates by which the weights that sampled are said to be behind."""

    def score(self, *names, weights=None):
        """Logprobs of passes under the weights of a step."""
        for name in names or ("rollout", "train", "reference"):
            under = 0.0 if name == "reference" else self.step if weights is None else weights
            setattr(self, name, [logprobs(*one, under) for one in zip(self.prompts, self.ids, strict=True)])


def logprobs(prompt, ids, weights):
    """Of each token by those up to it and the weights."""
    seen = np.cumsum(np.square(ids)) + 31 * prompt[0]
    usual = 0.3 + (7 * seen % 23) / 23
    return -usual * (1 + 0.03 * weights * np.sin(seen + 0.3 * weights))


def earned(ids):
    return np.array([(sum(row) * 7 % 11) / 10 for row in ids])


def centred(rewards):
    by_group = np.asarray(rewards).reshape(GROUPS, GROUP)
    return list((by_group - by_group.mean(1, keepdims=True)).ravel())


def per_token(advantages, ids):
    """Advantages that shrink token by token."""
    return [
        [one * PER_TOKEN_DECAY**place for place in range(len(row))] for one, row in zip(advantages, ids, strict=True)
    ]


def lengths(columns):
    return np.array([len(row) for row in columns.ids], float)


def columns_of(step):
    """What the control has at a step."""
    chance = np.random.default_rng(step)
    ids = [[int(token) for token in chance.integers(1, 40, int(num))] for num in chance.integers(3, 9, ROWS)]
    columns = Columns(
        step=step,
        prompts=[[100 + step * GROUPS + row // GROUP] for row in range(ROWS)],
        ids=ids,
        mask=[[1] * len(row) for row in ids],
        group=[str(row // GROUP) for row in range(ROWS)],
        rewards=earned(ids),
        advantages=centred(earned(ids)),
        rollout=[],
        train=[],
        reference=[],
    )
    columns.score()
    return columns


def record(path, *changes, since=CHANGED, steps=STEPS):
    """A run; from a step on each change alters what is recorded."""
    with Recorder(path, force=True) as recorder:
        for step in range(1, steps + 1):
            columns = columns_of(step)
            for change in changes:
                if step >= since:
                    change(columns)
            record_step(recorder, columns)
    return path


def record_step(recorder, columns):
    batch = recorder.add_sequences(
        step=columns.step,
        prompt_ids=columns.prompts,
        response_ids=columns.ids,
        response_mask=columns.mask,
        group_ids=columns.group,
        policy_version=columns.step - 1 - columns.behind,
        **({} if columns.rewards is None else {"reward": columns.rewards}),
        advantage=columns.advantages,
    )
    for name in ("rollout", "train", "reference"):
        scores = [np.asarray(one, float).tolist() for one in getattr(columns, name)]
        version = columns.step - 1 - (columns.behind if name == "rollout" else 0)
        recorder.add_scores(name, batch, logprobs=scores, policy_version=version)


# --- what is changed, and what of it is told --------------------------------------------------------------------------


def asks_other_prompts(columns):
    columns.prompts = [[one[0] + 50] for one in columns.prompts]
    columns.score()


def asks_one_other_prompt(columns):
    columns.prompts[:GROUP] = [[99]] * GROUP
    columns.score()


def cuts_off(columns):
    columns.ids = [row[:4] for row in columns.ids]
    columns.mask = [row[:4] for row in columns.mask]
    columns.score()


def samples_otherwise(columns):
    columns.ids = [[*row[:2], row[2] + 1, *row[3:]] for row in columns.ids]
    columns.score()


def tool_answers_otherwise(columns):
    samples_otherwise(columns)
    columns.mask = [[1, 1, 0, *row[3:]] for row in columns.mask]


def engine_is_another(columns):
    columns.rollout = [one - 0.02 for one in columns.rollout]


def engine_keeps_its_weights(columns):
    columns.score("rollout", weights=CHANGED - 1)


def engine_says_that_it_is_behind(columns):
    engine_keeps_its_weights(columns)
    columns.behind = 2


def trainer_is_another(columns):
    columns.train = [one - 0.05 for one in columns.train]


def trainer_is_hardly_another(columns):
    columns.train = [one - 0.005 for one in columns.train]


def flips_rewards(columns):
    columns.rewards = np.where(np.arange(ROWS) % 3 == 0, 1 - columns.rewards, columns.rewards)


def loses_rewards(columns):
    columns.rewards = np.where(np.arange(ROWS) < 3, np.nan, columns.rewards)


def permutes_rewards(columns):
    columns.rewards = np.roll(columns.rewards, 3)


def pays_for_length(columns):
    columns.rewards = columns.rewards + 0.2 * lengths(columns)


def pays_for_being_longer_than_the_group(columns):
    by_group = lengths(columns).reshape(GROUPS, GROUP)
    columns.rewards = columns.rewards + 0.2 * (by_group - by_group.mean(1, keepdims=True)).ravel()


def hands_on_the_last_step_s_rewards(columns):
    columns.rewards = columns_of(columns.step - 1).rewards


def swaps_reference(columns):
    columns.reference = [one - 0.1 for one in columns.reference]


def inverts_advantages(columns):
    columns.advantages = [-one for one in columns.advantages]


def scales_advantages(columns):
    columns.advantages = [one * 5 for one in columns.advantages]


def permutes_advantages(columns):
    columns.advantages = list(np.roll(columns.advantages, 2))


def updates_otherwise(columns):
    columns.train = [one * 1.001 for one in columns.train]
    columns.rollout = [one * 1.001 for one in columns.rollout]


CHANGES = {
    asks_other_prompts: ("prompts_part", {"data"}),
    asks_one_other_prompt: ("prompts_part", {"data"}),
    cuts_off: ("responses_cut_off", {"truncation"}),
    samples_otherwise: ("sampling_parts", {"mismatch", "truncation", "unknown"}),
    tool_answers_otherwise: ("tool_parts", {"unknown"}),
    engine_is_another: ("engine_parts", {"mismatch", "staleness"}),
    engine_keeps_its_weights: ("engine_parts", {"mismatch", "staleness"}),
    engine_says_that_it_is_behind: ("engine_parts", {"staleness"}),
    trainer_is_another: ("scoring_parts", {"unknown"}),
    flips_rewards: ("rewards_part", {"reward"}),
    loses_rewards: ("rewards_part", {"reward"}),
    permutes_rewards: ("rewards_permuted_part", {"pairing"}),
    pays_for_length: ("rewards_by_length_part", {"length"}),
    pays_for_being_longer_than_the_group: ("rewards_by_length_part", {"length"}),
    hands_on_the_last_step_s_rewards: ("rewards_of_last_step_part", {"pairing"}),
    swaps_reference: ("reference_parts", {"reference"}),
    inverts_advantages: ("advantages_part", {"advantages"}),
    scales_advantages: ("advantages_part", {"advantages"}),
    permutes_advantages: ("advantages_permuted_part", {"pairing"}),
}


KINDS_OF_CODES = {
    "prompts_part": ("prompts", ""), "responses_cut_off": ("responses", ""), "sampling_parts": ("responses", ""),
    "tool_parts": ("responses", ""), "engine_parts": ("logprobs", "rollout"), "scoring_parts": ("logprobs", "train"),
    "rewards_part": ("rewards", ""), "rewards_permuted_part": ("rewards", ""),
    "rewards_by_length_part": ("rewards", ""), "rewards_of_last_step_part": ("rewards", ""),
    "reference_parts": ("logprobs", "reference"), "advantages_part": ("advantages", ""),
    "advantages_permuted_part": ("advantages", ""), "learning_rate": ("series", "learning_rate"),
}  # fmt: skip
"""Code of a difference in `attribute` -> kind and name of the same quantity in `compare`."""


def first_steps(found):
    """Return the first step of each quantity that differs by `compare`."""
    return {(one.kind, one.name): one.step for one in found.differences}


@pytest.fixture(scope="module")
def control(tmp_path_factory):
    """Open already, so that what is read of it is read once."""
    return open_database(record(tmp_path_factory.mktemp("first") / "control"))


def first_difference(found):
    """Code, step and suspects of what differs first."""
    first = found.difference_codes[0]
    suspects = {each.suspect for each in found.difference_codes if each.code == first.code}
    return first.code, first.values["step"], suspects


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_changed_in_a_run_is_its_first_difference(tmp_path, control, change):
    code, suspects = CHANGES[change]
    run = record(tmp_path / "run", change)
    found = attribute(run, control=control)
    told = first_difference(found)
    assert told[:2] == (code, CHANGED)
    assert told[2] <= suspects
    assert found.difference_codes[0].values.get("num_sequences", ROWS) == ROWS
    assert first_steps(compare(run, control))[KINDS_OF_CODES[code]] == CHANGED


def test_a_trainer_that_rounds_a_batch_of_another_shape_did_not_update_otherwise(tmp_path):
    """Kernels round by the shape of a batch, and an engine with other weights samples responses of other lengths."""

    def engine_samples_otherwise(columns):
        columns.ids = [[*row[:2], row[2] + 1, *row[2:]] for row in columns.ids]
        columns.mask = [[1] * len(row) for row in columns.ids]
        columns.score()
        columns.rollout = [one - 0.5 for one in columns.rollout]
        columns.train = [one * (1 + 2e-7) for one in columns.train]

    beside = record(tmp_path / "control", since=7, steps=9)
    found = attribute(record(tmp_path / "run", engine_samples_otherwise, since=7, steps=9), control=beside)
    assert first_difference(found)[:2] == ("engine_parts", 7)


@pytest.mark.parametrize("change", [updates_otherwise, trainer_is_hardly_another])
def test_an_update_that_leaves_other_weights_is_of_the_step_before(tmp_path, control, change):
    code, step, suspects = first_difference(attribute(record(tmp_path / "run", change), control=control))
    assert (code, step) == ("update_parts", CHANGED - 1)
    assert suspects <= {"unknown", "optimizer", "entropy", "reference"}


def test_what_comes_later_than_the_first_difference_is_not_it(tmp_path, control):
    def later(columns):
        if columns.step > CHANGED:
            asks_other_prompts(columns)

    found = attribute(record(tmp_path / "run", permutes_rewards, later), control=control)
    assert first_difference(found) == ("rewards_permuted_part", CHANGED, {"pairing"})


@pytest.mark.parametrize(
    ("first", "second"),
    [(asks_other_prompts, permutes_rewards), (engine_is_another, permutes_rewards), (permutes_rewards, swaps_reference),
     (swaps_reference, inverts_advantages)],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_of_one_step_what_comes_first_in_it_is_told(tmp_path, control, first, second):
    found = attribute(record(tmp_path / "run", second, first), control=control)
    told = first_difference(found)
    assert told[:2] == (CHANGES[first][0], CHANGED)
    assert told[2] <= CHANGES[first][1]


def without_rewards(columns):
    columns.rewards = None


def with_advantages_by_token(columns):
    columns.advantages = per_token(columns.advantages, columns.ids)


@pytest.fixture(scope="module")
def without_rewards_recorded(tmp_path_factory):
    return record(tmp_path_factory.mktemp("unseen") / "control", without_rewards, since=1)


def test_advantages_that_differ_where_no_reward_was_recorded_may_be_those_of_another_one(
    tmp_path, without_rewards_recorded
):
    run = tmp_path / "run"
    with Recorder(run) as recorder:
        for step in range(1, STEPS + 1):
            columns = columns_of(step)
            without_rewards(columns)
            if step >= CHANGED:
                inverts_advantages(columns)
                columns.advantages[0] += 0.25
            record_step(recorder, columns)
    found = attribute(run, control=without_rewards_recorded)
    code, step, suspects = first_difference(found)
    assert (code, step) == ("advantages_or_rewards_part", CHANGED)
    assert suspects <= {"advantages", "reward", "length"}


def test_advantages_by_token_lie_in_other_rows_where_the_first_ones_do(tmp_path):
    control = record(tmp_path / "control", with_advantages_by_token, since=1)
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, STEPS + 1):
            columns = columns_of(step)
            if step >= CHANGED:
                permutes_advantages(columns)
            with_advantages_by_token(columns)
            record_step(recorder, columns)
    found = attribute(tmp_path / "run", control=control)
    assert first_difference(found) == ("advantages_permuted_part", CHANGED, {"pairing"})


def test_runs_that_rounding_drives_apart_have_no_decisive_difference(tmp_path, control):
    def drift(columns):
        for name in ("rollout", "train"):
            setattr(columns, name, [one - 1e-8 * 2.0**columns.step for one in getattr(columns, name)])

    found = attribute(record(tmp_path / "run", drift, since=1), control=control)
    assert not [each for each in found.difference_codes if each.code.endswith(("_part", "_parts", "_cut_off"))]
    sudden = attribute(record(tmp_path / "sudden", drift), control=control)
    assert first_difference(sudden)[:2] == ("update_parts", CHANGED - 1)


def test_a_run_beside_a_control_that_recorded_its_rows_in_another_order_does_not_differ(tmp_path, control):
    def reverse(columns):
        reorder(columns, [*range(ROWS)][::-1])

    found = attribute(record(tmp_path / "run", reverse), control=control)
    assert not [each for each in found.difference_codes if each.code.endswith(("_part", "_parts", "_cut_off"))]


def test_what_differs_first_would_be_the_cause_of_a_fall_that_nobody_sees(tmp_path, control):
    found = attribute(record(tmp_path / "run", permutes_advantages), control=control)
    assert (found.fall, found.cause) == (None, None)
    assert (found.supposed_cause.step, found.supposed_cause.suspects[0].code) == (CHANGED, "pairing")
    assert f"starting at step {CHANGED}" in verdict_sentence(found)
    with pytest.warns(TimTraceWarning, match="is compared with itself"):
        assert attribute(control, control=control).supposed is None


def test_a_run_beside_itself_differs_in_nothing(control):
    with pytest.warns(TimTraceWarning, match="is compared with itself"):
        assert attribute(control, control=control).difference_codes == ()


# --- compare and attribute name the same first differences ------------------------------------------------------------


def first_differences(run, control):
    """Return the first step of each quantity that differs, by `attribute` and by `compare`."""
    by_attribute = {
        KINDS_OF_CODES[one.code]: one.values["step"]
        for one in attribute(run, control=control).difference_codes
        if one.code in KINDS_OF_CODES
    }
    return by_attribute, first_steps(compare(run, control))


def reorder(columns, order):
    for name in ("prompts", "ids", "mask", "group", "advantages", "rollout", "train", "reference"):
        setattr(columns, name, [getattr(columns, name)[row] for row in order])
    columns.rewards = columns.rewards[order]


def swaps_two_of_a_group(columns):
    reorder(columns, [1, 0, *range(2, ROWS)])


def swaps_groups(columns):
    reorder(columns, [*range(GROUP, ROWS), *range(GROUP)])


def later_on(change, step=CHANGED + 3):
    def changed(columns):
        if columns.step >= step:
            change(columns)

    return changed


def earlier_only(change, step=CHANGED + 3):
    def changed(columns):
        if columns.step < step:
            change(columns)

    return changed


def rounds_the_engine_s_logprobs(columns):
    if columns.step >= 3:
        columns.rollout = [one - 5e-8 for one in columns.rollout]


@pytest.mark.parametrize(
    ("changes", "quantity", "step"),
    [
        ((swaps_two_of_a_group,), None, None),
        ((swaps_two_of_a_group, later_on(flips_rewards)), ("rewards", ""), CHANGED + 3),
        ((swaps_two_of_a_group, later_on(inverts_advantages)), ("advantages", ""), CHANGED + 3),
        ((loses_rewards,), ("rewards", ""), CHANGED),
        ((earlier_only(loses_rewards), later_on(flips_rewards)), ("rewards", ""), CHANGED),
    ],
)  # fmt: skip
def test_compare_and_attribute_name_the_same_first_difference(tmp_path, control, changes, quantity, step):
    by_attribute, by_compare = first_differences(record(tmp_path / "run", *changes), control)
    assert by_attribute == ({} if quantity is None else {quantity: step})
    assert by_compare.get(quantity) == step


def test_a_run_recorded_in_another_order_from_the_first_step_shares_its_baseline_s_prompts(tmp_path, control):
    def changed(columns):
        swaps_groups(columns)
        if columns.step >= CHANGED:
            flips_rewards(columns)

    run = record(tmp_path / "run", changed, since=1)
    assert attribute(run, control=control).is_intervention
    assert [found.get(("rewards", "")) for found in first_differences(run, control)] == [CHANGED, CHANGED]


def test_an_engine_that_rounds_otherwise_does_not_differ_before_it_does(tmp_path, control):
    run = record(tmp_path / "run", rounds_the_engine_s_logprobs, later_on(engine_is_another, CHANGED), since=1)
    assert first_difference(attribute(run, control=control))[:2] == ("engine_parts", CHANGED)


def test_a_large_reward_of_a_later_step_hides_no_earlier_difference(tmp_path):
    def grows(columns):
        if columns.step > CHANGED + 2:
            columns.rewards = columns.rewards * 1e7

    def differs(columns):
        grows(columns)
        if columns.step >= CHANGED:
            columns.rewards = columns.rewards + np.where(np.arange(ROWS) == 5, 0.5, 0)

    control = record(tmp_path / "control", grows, since=1)
    found = first_differences(record(tmp_path / "run", differs, since=1), control)
    assert [each.get(("rewards", "")) for each in found] == [CHANGED, CHANGED]


def test_rewards_that_one_run_did_not_record_are_no_difference(tmp_path, control, without_rewards_recorded):
    for pair in ((without_rewards_recorded, control), (control, without_rewards_recorded)):
        assert [found.get(("rewards", "")) for found in first_differences(*pair)] == [None, None]


def with_rates(path, rate, first=1):
    """Record a run whose learning rate is a function of the step."""
    with Recorder(path) as recorder:
        for step in range(first, 31):
            recorder.add_metrics(step, {"learning_rate": rate(step)})
    return path


@pytest.mark.parametrize(
    ("rate", "of_control", "step"),
    [
        (lambda step: 1e-6 * (1 - step / 40), lambda step: 1e-6, 1),
        (lambda step: min(step, 10) * 1e-7, lambda step: min(step, 20) * 1e-7, 11),
        (lambda step: 2e-6 if step == 9 else 1e-6, lambda step: 1e-6, 9),
        (lambda step: 1e-6 if step < 9 else 2e-6, lambda step: 1e-6, 9),
    ],
)
def test_learning_rates_differ_from_the_first_step_at_which_they_do(tmp_path, rate, of_control, step):
    run, control = with_rates(tmp_path / "run", rate), with_rates(tmp_path / "control", of_control)
    assert [found.get(("series", "learning_rate")) for found in first_differences(run, control)] == [step, step]


def test_learning_rates_of_a_baseline_that_starts_later_are_compared_step_by_step(tmp_path):
    run, control = (with_rates(tmp_path / str(first), lambda step: 1e-6 * step, first) for first in (1, 3))
    assert [found.get(("series", "learning_rate")) for found in first_differences(run, control)] == [None, None]


# --- the bounds, just under and just over -----------------------------------------------------------------------------


def rows(step=1, n=10, **columns):
    """The sequences of a step, of which each has a prompt, a response and a mean logprob of its own."""
    place = np.arange(n, dtype=float)
    usual = {
        "step": np.full(n, step), "prompt": 1000 * step + np.arange(n),
        "whole": 1000 * step + np.arange(n), "group": np.arange(n) // 5, "reward": place % 4,
        "advantage": place % 4 - 1.5,
        "first_advantage": place % 4 - 1.5, "length": 10.0 + place, "likelihood": -1 - place / 100,
        "sampled": -1 - place / 100, "reference": -1 - place**2 / 1000, "ending": np.zeros(n, int),
        "goes_on": np.zeros(n, bool), "is_ended": np.zeros(n, bool), "num_masked": np.zeros(n), "opening": np.arange(n),
        "opening_trained": np.zeros(n), "opening_sampled": np.zeros(n), "opening_reference": np.zeros(n),
    }  # fmt: skip
    return Rollouts(**usual | columns)


def joined(*steps):
    names = Rollouts.__dataclass_fields__
    return Rollouts(**{name: np.concatenate([getattr(one, name) for one in steps]) for name in names})


def run_of(*steps, **series):
    """Facts with the sequences of some steps, and series."""
    rollouts = joined(*steps)
    numbers = np.unique(rollouts.step)
    empty = np.full(len(numbers), np.nan)
    run = SimpleNamespace(
        rollouts=rollouts, steps=numbers, fall=None, pair=("train", "rollout"), database=None, graded_elsewhere=None, checked=None, scored_rows=None,
        values=lambda name: np.asarray(series[name], float) if name in series else empty,
    )  # fmt: skip
    run.at = lambda name, step: Facts.at(run, name, step)
    return run


def first_code(run, control):
    found = first_divergence(run, control)
    return None if found is None else found.code


def parts(monkeypatch, *, apart=None, num_cut=0, num_in_tool=0):
    """Say what tokens of two runs share, without traces."""
    tokens = SharedTokens(apart={"train": 0.0} if apart is None else apart, num_cut=num_cut, num_in_tool=num_in_tool)
    monkeypatch.setattr(divergence, "shared_tokens", lambda *given: tokens)


def others(num, n=10):
    """Hashes of which so many are not the control's."""
    return 1000 + np.arange(n) + np.where(np.arange(n) < num, 500, 0)


def moved(by, num=10, n=10):
    """Mean logprobs of which so many are apart from the control's."""
    return -1 - np.arange(n) / 100 + np.where(np.arange(n) < num, by, 0.0)


@pytest.mark.parametrize(("num_shared", "code"), [(3, "prompts_part"), (4, "update_parts")])
def test_four_sequences_of_shared_prompts_tell_whether_weights_are_the_same(num_shared, code):
    other = np.where(np.arange(10) < num_shared, 1000, 5000) + np.arange(10)
    run = run_of(rows(prompt=other, whole=other, likelihood=moved(0.1), sampled=moved(0.1)))
    assert first_code(run, run_of(rows())) == code


@pytest.mark.parametrize("n", [1, 3])
def test_steps_of_few_sequences_are_compared_if_their_prompts_are_identical(n):
    assert first_code(run_of(rows(n=n, reward=rows(n=n).reward + 1)), run_of(rows(n=n))) == "rewards_part"


def asking_other_prompts(num_shared, **columns):
    """A run that asks so many of a hundred prompts that its control does, with other columns."""
    other = np.where(np.arange(100) < num_shared, 1000, 5000) + np.arange(100)
    return run_of(rows(n=100, prompt=other, whole=other, **columns))


@pytest.mark.parametrize(("num_shared", "code"), [(29, "prompts_part"), (30, "rewards_part")])
def test_where_fewer_than_three_tenths_of_the_prompts_are_shared_these_differ_first(num_shared, code):
    reward = rows(n=100).reward + np.arange(100) % 3
    assert first_code(asking_other_prompts(num_shared, reward=reward), run_of(rows(n=100))) == code


def test_weights_that_differ_choose_the_prompts():
    scored = {name: moved(0.1, 100, 100) for name in ("likelihood", "sampled")}
    assert first_code(asking_other_prompts(10, **scored), run_of(rows(n=100))) == "update_parts"


@pytest.mark.parametrize(
    ("given", "code"),
    [({}, "prompts_part"), ({"num_in_tool": 100}, "prompts_part"), ({"num_cut": 100}, "responses_cut_off")],
)
def test_responses_that_part_where_prompts_do_follow_these_unless_they_are_cut(monkeypatch, given, code):
    parts(monkeypatch, **given)
    run = asking_other_prompts(90)
    assert first_code(run, run_of(rows(n=100))) == "prompts_part"
    run.rollouts.whole[:90] += 90_000
    assert first_code(run, run_of(rows(n=100))) == code


@pytest.mark.parametrize(("apart", "code"), [(0.95e-5, None), (1.05e-5, "update_parts")])
def test_weights_differ_from_a_hundred_thousandth_of_a_nat_on(apart, code):
    assert first_code(run_of(rows(likelihood=moved(apart), sampled=moved(apart))), run_of(rows())) == code


@pytest.mark.parametrize(("apart", "code"), [(0.95e-5, None), (1.05e-5, "reference_parts")])
def test_a_reference_differs_from_a_hundred_thousandth_of_a_nat_on(apart, code):
    assert first_code(run_of(rows(reference=rows().reference - apart)), run_of(rows())) == code


@pytest.mark.parametrize(
    ("num_before", "apart", "code"), [(4, 1.05e-9, None), (5, 0.95e-9, None), (5, 1.05e-9, "update_parts")]
)
def test_after_five_steps_of_the_same_bits_any_difference_is_one(num_before, apart, code):
    same = [rows(step) for step in range(1, num_before + 1)]
    last = num_before + 1
    run = run_of(*same, rows(last, likelihood=moved(apart), sampled=moved(apart)))
    assert first_code(run, run_of(*same, rows(last))) == code


@pytest.mark.parametrize(("apart", "is_sudden"), [(0.95e-9, True), (1.05e-9, False)])
def test_runs_that_were_apart_the_step_before_did_not_part_at_once(apart, is_sudden):
    run = run_of(rows(1, likelihood=moved(apart)), rows(2, likelihood=moved(0.1), sampled=moved(0.1)))
    found = first_divergence(run, run_of(rows(1), rows(2)))
    assert (found.code, found.step, found.num_before, found.is_sudden) == ("update_parts", 1, 1, is_sudden)


@pytest.mark.parametrize(
    ("apart", "lag", "code"), [(0.009, 0, "update_parts"), (0.011, 0, "scoring_parts"), (0.011, 1, "update_parts")]
)
def test_a_trainer_that_scores_otherwise_by_little_or_behind_its_engine_was_updated_otherwise(apart, lag, code):
    run = run_of(rows(likelihood=moved(apart)), version_lag=[lag])
    assert first_code(run, run_of(rows())) == code


@pytest.mark.parametrize(("num", "code"), [(3, "scoring_parts"), (4, "scoring_parts")])
def test_fewer_than_four_logprobs_tell_nothing_of_rows(num, code):
    place = np.arange(10)
    scored = np.where(place < num, -1 - (place + 5) / 100, -1 - place / 100)
    assert first_code(run_of(rows(likelihood=scored)), run_of(rows())) == code


@pytest.mark.parametrize(("num_cut", "code"), [(79, "sampling_parts"), (80, "responses_cut_off")])
def test_responses_are_cut_off_where_eight_of_ten_end_early(monkeypatch, num_cut, code):
    parts(monkeypatch, num_cut=num_cut)
    assert first_code(run_of(rows(n=100, whole=others(100, 100))), run_of(rows(n=100))) == code


@pytest.mark.parametrize(("num_in_tool", "code"), [(5, "sampling_parts"), (6, "tool_parts")])
def test_a_tool_differs_where_most_responses_part_in_what_it_says(monkeypatch, num_in_tool, code):
    parts(monkeypatch, num_in_tool=num_in_tool)
    assert first_code(run_of(rows(whole=others(10))), run_of(rows())) == code


@pytest.mark.parametrize(("of_run", "code"), [(0.29, "update_parts"), (0.31, "engine_parts")])
def test_responses_that_part_at_their_first_token_are_told_by_the_mismatch(monkeypatch, of_run, code):
    parts(monkeypatch, apart={})
    run, control = run_of(rows(whole=others(10)), mean_abs_d=[of_run]), run_of(rows(), mean_abs_d=[0.1])
    assert first_code(run, control) == code


@pytest.mark.parametrize(("of_run", "code"), [(0.029, "update_parts"), (0.031, "engine_parts")])
def test_a_mismatch_of_rounding_alone_is_no_less_than_a_hundredth_of_a_nat(monkeypatch, of_run, code):
    parts(monkeypatch, apart={})
    run, control = run_of(rows(whole=others(10)), mean_abs_d=[of_run]), run_of(rows(), mean_abs_d=[1e-6])
    assert first_code(run, control) == code


@pytest.mark.parametrize(("passes", "code"), [
    ({"train": 0.1, "rollout": 0.1}, "update_parts"), ({"train": 0.1}, "scoring_parts"),
    ({"rollout": 0.1}, "engine_parts"),
    ({"train": 0.0}, "sampling_parts"),
])  # fmt: skip
def test_where_responses_part_the_tokens_before_tell_of_the_weights(monkeypatch, passes, code):
    parts(monkeypatch, apart=passes)
    assert first_code(run_of(rows(whole=others(10))), run_of(rows())) == code


@pytest.mark.parametrize(("explained", "way", "code"), [
    (0.79, 1.0, "rewards_part"), (0.81, 1.0, "rewards_by_length_part"), (0.81, 0.0, "rewards_part"),
])  # fmt: skip
def test_rewards_are_a_matter_of_length_where_it_explains_four_fifths_of_what_they_differ_by(
    monkeypatch, explained, way, code
):
    monkeypatch.setattr(divergence, "explained_by_length", lambda run, control: (explained, way))
    monkeypatch.setattr(divergence, "pays_length_otherwise", lambda run, control: 0.0)
    assert first_code(run_of(rows(reward=rows().reward + 1)), run_of(rows())) == code


@pytest.mark.parametrize(("num", "code"), [(49, "rewards_part"), (50, "rewards_by_length_part")])
def test_rewards_that_pay_length_otherwise_do_so_for_half_of_the_responses(monkeypatch, num, code):
    monkeypatch.setattr(divergence, "explained_by_length", lambda run, control: (0.0, 0.0))
    monkeypatch.setattr(divergence, "pays_length_otherwise", lambda run, control: 0.9)
    paid = rows(n=100).reward + np.where(np.arange(100) < num, 10.0, 0.0)
    assert first_code(run_of(rows(n=100, reward=paid)), run_of(rows(n=100))) == code


@pytest.mark.parametrize(("num_other", "code"), [(0, "advantages_part"), (1, "prompts_part")])
def test_other_prompts_of_a_step_change_the_advantages_of_the_rest(num_other, code):
    """A mean and a spread over the batch are other ones, too."""
    control = rows(n=40, group=np.zeros(40, int), likelihood=np.sin(np.arange(40.0)))
    other = control.advantage + control.likelihood - control.reference
    run = replace(control, advantage=other, first_advantage=other)
    run.prompt[:num_other] += 90_000
    run.whole[:num_other] += 90_000
    assert first_code(run_of(run), run_of(rows(n=40, group=np.zeros(40, int), likelihood=control.likelihood))) == code


@pytest.mark.parametrize(("apart", "code"), [(0.9e-6, None), (1.1e-6, "advantages_part")])
def test_advantages_differ_beyond_a_millionth(apart, code):
    run = rows(advantage=rows().advantage + apart, first_advantage=rows().advantage + apart + 1.0)
    assert first_code(run_of(run), run_of(rows())) == code


# --- an update that differs -------------------------------------------------------------------------------------------

# --- the tokens that two runs share -----------------------------------------------------------------------------------

IDS = [[1, 2, 3, 4], [5, 6, 7], [8, 9]]
PROMPTS = [[100], [101], [102]]


def trace_of(path, ids=IDS, *, prompts=PROMPTS, mask=None, **passes):
    """An open trace of one step of three sequences; passes give logprobs, rollout a usual one."""
    with Recorder(path) as recorder:
        batch = recorder.add_sequences(
            step=1, prompt_ids=prompts, response_ids=ids, response_mask=mask or [[1] * len(row) for row in ids]
        )
        for name, given in ({"rollout": [[-1.0] * len(row) for row in ids]} | passes).items():
            recorder.add_scores(name, batch, logprobs=given)
    return open_database(path)


def every(value, ids=IDS):
    return [[value] * len(row) for row in ids]


def test_of_tokens_that_two_runs_share_the_mean_difference_is_told(tmp_path):
    other = [[1, 2, 9, 4], [5, 6, 7], [8, 9]]
    one = trace_of(tmp_path / "one", other, train=[[-1.5, -1.0, -9.0, -9.0], [-1.0] * 3, [-1.0, -1.25]])
    two = trace_of(tmp_path / "two", train=every(-1.0))
    found = shared_tokens(one, two, 1, ["train", "rollout", "reference"])
    assert found.apart == pytest.approx({"train": (0.5 + 0.25) / 7, "rollout": 0.0})
    assert (found.num_cut, found.num_in_tool) == (0, 0)


@pytest.mark.parametrize(("ids", "num_cut"), [
    ([[1, 2, 3], [5, 6, 7], [8]], 2), ([[1, 2, 9], [5, 6, 7], [8]], 1), ([[1, 2, 3, 4, 5], [5, 6, 7], [8, 9]], 0),
])  # fmt: skip
def test_responses_are_cut_that_end_where_the_control_s_go_on(tmp_path, ids, num_cut):
    found = shared_tokens(trace_of(tmp_path / "one", ids), trace_of(tmp_path / "two"), 1, ["rollout"])
    assert found.num_cut == num_cut


def test_responses_part_in_a_tool_where_the_mask_leaves_the_token_out(tmp_path):
    ids, mask = [[1, 2, 9, 4], [5, 9, 7], [8, 9]], [[1, 1, 0, 1], [0, 1, 0], [0, 0]]
    found = shared_tokens(trace_of(tmp_path / "one", ids, mask=mask), trace_of(tmp_path / "two"), 1, ["rollout"])
    assert found.num_in_tool == 1


def test_no_token_is_shared_by_responses_that_part_at_once_or_of_other_prompts(tmp_path):
    two = trace_of(tmp_path / "two")
    at_once = trace_of(tmp_path / "one", [[9, 2, 3, 4], [9, 6, 7], [9, 9]])
    elsewhere = trace_of(tmp_path / "other", prompts=[[200], [201], [202]])
    assert [shared_tokens(run, two, 1, ["rollout"]).apart for run in (at_once, elsewhere)] == [{}, {}]


# --- whose the first difference is ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("last", "reward", "code"), [
    ([1, 2, 3, 4], [1, 2, 3, 4], "rewards_of_last_step_part"), ([1, 1, 1, 1], [1, 1, 1, 1], "rewards_part"),
    ([4, 3, 2, 1], [1, 2, 3, 4], "rewards_permuted_part"), ([1, 2, 3, 4, 5], [1, 2, 3, 4], "rewards_permuted_part"),
])  # fmt: skip
def test_rewards_are_the_last_step_s_where_these_tell_responses_apart(last, reward, code):
    before = rows(1, n=len(last), reward=np.array(last, float))
    control = rows(2, n=4, reward=np.array([2.0, 1, 4, 3]))
    run = replace(control, reward=np.array(reward, float))
    assert first_code(run_of(before, run), run_of(before, control)) == code
    assert first_code(run_of(replace(run, step=np.ones(4, int))), run_of(replace(control, step=np.ones(4, int)))) == (
        "rewards_part" if last[0] == last[1] else "rewards_permuted_part"
    )


# --- rewards and advantages that are as often one thing as the other ---------------------------------------------------


def earns_by_halves(columns):
    """0 and 1 by turns; advantages that are as often above 0 as below."""
    columns.rewards = np.arange(ROWS) % 2.0
    columns.advantages = list(columns.rewards - 0.5)


def inverts_rewards(columns):
    columns.rewards = 1 - columns.rewards


def exchanges_two_rewards(columns):
    columns.rewards = columns.rewards.copy()
    columns.rewards[:2] = columns.rewards[1::-1]


def mixes_rewards(columns):
    columns.rewards = columns.rewards[np.random.default_rng(0).permutation(ROWS)]


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    return record(tmp_path_factory.mktemp("halves") / "control", earns_by_halves, since=1)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (inverts_advantages, "advantages_part"), (permutes_advantages, None), (inverts_rewards, "rewards_part"),
        (exchanges_two_rewards, "rewards_part"), (mixes_rewards, "rewards_permuted_part"),
    ],
)  # fmt: skip
def test_what_is_inverted_lies_in_no_other_rows_though_it_has_the_same_values(tmp_path, halves, change, code):
    def later(columns):
        if columns.step >= CHANGED:
            change(columns)

    run = record(tmp_path / "run", earns_by_halves, later, since=1)
    found = attribute(run, control=halves).difference_codes
    assert (found[0].code if found else None) == code  # moved by two rows they are what they were


def test_a_group_of_which_a_part_has_no_reward_leaks_no_level_into_a_correlation():
    n = 30 * 4
    reward = np.tile([1.0, 2.0, 101.0, np.nan], 30)
    likelihood = np.tile([1.0, 2.0, np.nan, 50.0], 30)
    values = {
        "step": np.zeros(n, int),
        "group": np.repeat(np.arange(30), 4),
        "reward": reward,
        "likelihood": likelihood,
    }
    rollouts = Rollouts(**{name: values.get(name, np.zeros(n)) for name in Rollouts.__dataclass_fields__})
    assert relation(rollouts, "likelihood", "reward").correlation == pytest.approx(1.0)
