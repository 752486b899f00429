"""What differs first between two runs: real small traces with one planted difference each."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from builders import tim_trace as command
from tim_trace import compare
from tim_trace.analysis.comparison.comparison import KINDS
from tim_trace.analysis.comparison.series import series_differences
from tim_trace.analysis.comparison.text import FIRST, comparison_rows, comparison_text, sentence
from tim_trace.analysis.facts.series import named
from tim_trace.analysis.facts.two_runs import paired
from tim_trace.schemas.errors import ColumnsLeftOut, InvalidOption, NothingToCompare
from tim_trace.tracer.recorder import Recorder

STEPS, GROUPS, GROUP, TOKENS = 30, 2, 4, 6
ROWS = GROUPS * GROUP


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One difference from the plain run, from a step on."""

    at: int = 1000
    settings: dict[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    contract: dict[str, Any] = field(default_factory=dict)
    prompt: int = 0
    token: int = 0
    train: float = 0.0
    reward: float = 0.0
    advantage: float = 0.0
    lag: int = 0
    grad_norm: float = 0.0
    learning_rate: float = 1e-6
    seed: int = 0
    num_steps: int = STEPS


def write(path, plan=None):
    """A run of equal seeds; what `plan` says holds from its step on."""
    plan = plan or Planted()
    scatter = np.random.default_rng(100 + plan.seed)
    with Recorder(path) as recorder:
        recorder.add_hyperparameters({"beta": 0.0, "optim": "adamw"})
        for step in range(1, plan.num_steps + 1):
            draw = np.random.default_rng(step)
            now = plan if step >= plan.at else Planted()
            if now.settings and step == plan.at:
                recorder.add_hyperparameters(now.settings, step=step)
            contract = {"engine": "vllm", "config": {"dtype": "bfloat16"}}
            recorder.add_contract("rollout", contract | now.contract)
            recorder.add_contract("train", {"engine": "trl"})
            responses = draw.integers(0, 50, (ROWS, TOKENS))
            responses[3, 2] += now.token
            rollout = -draw.exponential(1.0, (ROWS, TOKENS)).astype(np.float32)
            train = rollout - np.abs(draw.normal(0, 0.05, rollout.shape)).astype(np.float32)
            train[5, 1] -= np.float32(now.train)
            reward, advantage = draw.normal(size=ROWS), draw.normal(size=ROWS)
            reward[1] += now.reward
            advantage[2] += now.advantage
            batch = recorder.add_sequences(
                step=step, prompt_ids=[[7 + row // GROUP, step + now.prompt] for row in range(ROWS)],
                response_ids=responses.tolist(), reward=reward, advantage=advantage, policy_version=step - 1 - now.lag,
                group_ids=[str(row // GROUP) for row in range(ROWS)], temperature=now.temperature,
            )  # fmt: skip
            recorder.add_scores("rollout", batch, logprobs=list(rollout))
            recorder.add_scores("train", batch, logprobs=list(train), policy_version=step - 1)
            norm = 1.0 + scatter.normal(0, 0.1) + now.grad_norm
            recorder.add_metrics(step, {"grad_norm": norm, "learning_rate": now.learning_rate})
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write(tmp_path_factory.mktemp("plain") / "run")


def test_equal_runs_differ_in_nothing(plain, tmp_path):
    found = compare(plain, write(tmp_path / "again"))
    assert found.differences == ()
    assert found.within_scatter == ()
    assert {"reward", "k3", "grad_norm", "length", "learning_rate"} <= set(found.same)
    assert sentence(found) == f"No difference in the data that both traces recorded, over {STEPS} steps."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "kind", "name", "values"),
    [
        (Planted(at=9, settings={"beta": 0.1}), "setting", "beta", (0.0, 0.1)),
        (Planted(at=9, settings={"clip": "on"}), "setting", "clip", (None, "on")),
        (Planted(at=9, temperature=0.7), "sampling", "temperature", (1.0, 0.7)),
        (Planted(at=9, contract={"config": {"dtype": "float16"}}), "contract", "rollout.config.dtype", ("bfloat16", "float16")),
        (Planted(at=9, prompt=500), "prompts", "", ("2 prompts", "2 prompts")),
        (Planted(at=9, token=60), "responses", "", ("7 of 8 equal", "7 of 8 equal")),
        (Planted(at=9, train=0.25), "logprobs", "train", None),
        (Planted(at=9, reward=1.0), "rewards", "", None),
        (Planted(at=9, advantage=1.0), "advantages", "", None),
        (Planted(at=9, lag=1), "lag", "policy_lag", (0.0, 1.0)),
        (Planted(at=9, grad_norm=2.0), "series", "grad_norm", None),
        (Planted(at=9, learning_rate=2e-6), "series", "learning_rate", (1e-6, 2e-6)),
        (Planted(num_steps=STEPS - 2), "steps", "", ("recorded", None)),
    ],
)  # fmt: skip
def test_what_was_planted_is_what_differs_first(plain, tmp_path, plan, kind, name, values):
    found = compare(plain, write(tmp_path / "other", plan))
    first = found.first
    at = plan.at if plan.at < STEPS else STEPS - 1
    assert (first.kind, first.name, first.step) == (kind, name, at)
    if values is not None:
        assert (first.a, first.b) == pytest.approx(values)
    assert all(one.step >= at for one in found.differences)
    assert [one.step for one in found.differences] == sorted(one.step for one in found.differences)
    assert sentence(found).startswith(f"First difference, at step {at}: ")
    swapped = compare(tmp_path / "other", plain).first
    assert (swapped.kind, swapped.name, swapped.step) == (kind, name, at)


def test_what_is_planted_moves_only_what_it_touches(plain, tmp_path):
    found = compare(plain, write(tmp_path / "train", Planted(at=9, train=0.25)))
    assert {one.kind for one in found.differences} <= {"logprobs", "series"}
    logprobs = found.first
    assert logprobs.values["num_tokens"] == STEPS * ROWS * TOKENS
    assert logprobs.values["share"] == (STEPS - 8) / (STEPS * ROWS * TOKENS)
    assert logprobs.values["largest"] == pytest.approx(0.25, abs=1e-6)
    assert logprobs.a - logprobs.b == pytest.approx(0.25, abs=1e-6)
    assert {"reward", "length", "grad_norm"} <= set(found.same)
    rewards = compare(plain, write(tmp_path / "reward", Planted(at=9, reward=1.0))).first
    assert rewards.b - rewards.a == pytest.approx(1.0)
    assert rewards.values["num_pairs"] == STEPS * ROWS
    assert rewards.values["share"] == (STEPS - 8) / (STEPS * ROWS)


def test_advantages_of_other_rewards_are_no_difference_of_their_own(plain, tmp_path):
    found = compare(plain, write(tmp_path / "both", Planted(at=9, reward=1.0, advantage=1.0)))
    assert "rewards" in [one.kind for one in found.differences]
    assert "advantages" not in [one.kind for one in found.differences]


def test_tokens_before_two_responses_part_are_equal_tokens(plain, tmp_path):
    found = compare(plain, write(tmp_path / "other", Planted(at=9, token=60)))
    assert [one for one in found.differences if one.kind == "logprobs"] == []
    both = compare(plain, write(tmp_path / "both", Planted(at=9, token=60, train=0.5)))
    (logprobs,) = [one for one in both.differences if one.kind == "logprobs"]
    # Of the response that parts at its third token, two are equal.
    assert logprobs.values["num_tokens"] == STEPS * ROWS * TOKENS - (STEPS - 8) * (TOKENS - 2)


def test_series_that_scatter_alone_do_not_differ(plain, tmp_path):
    found = compare(plain, write(tmp_path / "other", Planted(seed=1)))
    assert found.differences == ()
    assert found.within_scatter == ("grad_norm",)


def test_a_series_is_found_where_it_leaves_its_scatter(plain, tmp_path):
    found = compare(plain, write(tmp_path / "other", Planted(at=16, grad_norm=1.0, seed=1)))
    (series,) = found.differences
    assert (series.kind, series.name, series.step) == ("series", "grad_norm", 16)
    assert series.b - series.a == pytest.approx(1.0, abs=0.15)
    assert 4 < series.size_in_sd < 12


def of_values(values, name="reward"):
    return {name: named(name, np.arange(1, len(values) + 1), np.array(values, float), "")}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], "same"),
        ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], (1, None)),
        ([1.0, 1.0], [2.0, 2.0], "within"),  # two steps have no scatter that could be told
        ([1.0, 1.0, 1.0, 1.0], [1.0 + 1e-9] * 4, "within"),  # two numbers that print alike are no difference
        ([1.0, 1.2, 0.9, 1.1], [1.1, 1.0, 1.2, 0.9], "within"),
        ([1.0, np.nan, 1.0], [1.0, 3.0, 1.0], "same"),  # what one run did not record is not compared
    ],
)
def test_short_series(a, b, expected):
    same, within = [], []
    found = list(series_differences(of_values(a), of_values(b), same, within))
    if isinstance(expected, str):
        assert found == []
        assert {"same": same, "within": within}[expected] == ["reward"]
    else:
        assert [(one.step, one.size_in_sd) for one in found] == [expected]


def test_an_infinite_value_of_one_run_is_a_difference():
    (found,) = series_differences(of_values([1.0, np.inf, 1.0]), of_values([1.0, 1.0, 1.0]), [], [])
    assert (found.step, found.b) == (2, 1.0)
    assert np.isnan(found.a)


@pytest.mark.parametrize("name", ["k3", "p99_abs_d"])
def test_a_mismatch_of_every_second_step_differs_and_one_of_two_steps_does_not(name):
    draw = np.random.default_rng(3)
    a, b, off = np.exp(draw.normal(-14, 0.4, 24)), np.exp(draw.normal(-14, 0.4, 24)), np.ones(24)

    def differences():
        runs = ({name: named(name, np.arange(1, 25), values, "")} for values in (a, b * off))
        return list(series_differences(*runs, [], []))

    assert differences() == []
    off[[11, 13]] = 3000
    assert differences() == []
    off[9::2] = 3000
    (found,) = differences()
    assert (found.step, found.values["statistic"]) == (10, "median peak")
    assert found.b > 100 * found.a


@pytest.mark.parametrize("num_steps", [1, 2, 3, 8])
def test_a_mismatch_of_few_steps_is_compared(num_steps):
    a, b = ({"k3": named("k3", np.arange(num_steps), np.arange(1.0, num_steps + 1) * size, "")} for size in (1, 1.1))
    within = []
    found = list(series_differences(a, b, [], within))
    assert len(found) + len(within) == 1


def test_masks_and_finish_reasons_of_identical_responses_are_compared(tmp_path):
    plain = {"response_mask": [[1, 1, 0]] * 2, "finish_reason": ["stop"] * 2}
    others = {
        "response_mask": [[1, 1, 0], [0, 1, 1]],
        "finish_reason": ["stop", "length"],
    }
    for name, columns in ((None, plain), *((name, plain | {name: value}) for name, value in others.items())):
        with Recorder(tmp_path / str(name)) as recorder:
            recorder.add_sequences(step=1, prompt_ids=[[1], [2]], response_ids=[[3, 4, 5]] * 2, **columns)
    for name in others:
        found = compare(tmp_path / "None", tmp_path / name)
        assert [(one.kind, one.name, one.step, one.values["share"]) for one in found.differences] == [
            ("columns", name, 1, 0.5)
        ]
        assert found.num_steps == 1
    assert sentence(compare(tmp_path / "None", tmp_path / "None")).endswith("over 1 step.")


@pytest.mark.slow
def test_chance_alone_rarely_gives_a_difference():
    draw, found = np.random.default_rng(5), 0
    for num in (5, 8, 15, 40, 200):
        for _ in range(200):
            a, b = (of_values(1.0 + draw.normal(0, 0.1, num)) for _ in range(2))
            found += len(list(series_differences(a, b, [], [])))
    assert found <= 5


def test_sequences_are_paired_by_content_and_then_by_prompt():
    a = SimpleNamespace(step=np.array([1, 1, 1, 2]), prompt=np.array([5, 5, 6, 5]), whole=np.array([50, 51, 60, 50]))
    b = SimpleNamespace(step=np.array([1, 1, 1, 2]), prompt=np.array([5, 6, 5, 7]), whole=np.array([51, 60, 52, 70]))
    pairs = paired(a, b)
    assert list(zip(pairs.a.tolist(), pairs.b.tolist(), pairs.equal.tolist(), strict=True)) == [
        (0, 2, False), (1, 0, True), (2, 1, True),
    ]  # fmt: skip


def test_steps_of_a_comparison(plain, tmp_path):
    other = write(tmp_path / "other", Planted(at=9, train=0.25))
    assert compare(plain, other, steps=":8").differences == ()
    assert compare(plain, other, steps="12:").first.step == 12
    with pytest.raises(InvalidOption, match="steps: '99' matches no recorded step"):
        compare(plain, other, steps="99")


def test_runs_without_a_common_step_are_refused(plain, tmp_path):
    with Recorder(tmp_path / "later") as recorder:
        recorder.add_sequences(step=900, response_ids=[[1]])
    with pytest.raises(NothingToCompare, match="no step in common"):
        compare(plain, tmp_path / "later")


def test_every_kind_has_its_sentence():
    assert tuple(FIRST) == KINDS


def test_the_table_fits_80_columns(plain, tmp_path):
    long = {"config": {"dtype": "float16", "a_field_with_a_very_long_name_indeed": "x" * 90}}
    plan = Planted(at=9, contract=long, train=0.25, reward=1.0, grad_norm=2.0, settings={"beta": 0.1})
    found = compare(plain, write(tmp_path / "other", plan))
    with pytest.warns(ColumnsLeftOut, match="truncated"):
        text = comparison_text(found, 80)
    assert max(len(line) for line in text.splitlines() if str(tmp_path.parent) not in line) <= 80
    table = text.split("\n\n")[2]
    assert table.split()[:6] == ["kind", "name", "step", "a", "b", "sd"]
    assert "x" * 90 in comparison_text(found)
    assert str(found) == comparison_text(found)
    assert len(comparison_rows(found)) == len(found.differences)


@pytest.mark.slow
def test_compare_on_the_command_line(plain, tmp_path):
    other = write(tmp_path / "other", Planted(at=9, learning_rate=2e-6))
    done = command("compare", plain, other)
    assert done.code == 0
    assert done.stdout.startswith("First difference, at step 9: learning_rate is 1e-06 in A and 2e-06 in B.")
    found = command("compare", plain, other, "--json").json()
    assert found["differences"][0]["name"] == "learning_rate"
    assert found["differences"][0]["sentence"] == "learning_rate is 1e-06 in A and 2e-06 in B"
    header, row = command("compare", plain, other, "--csv").stdout.splitlines()
    assert header.startswith("kind,name,step,a,b,sd")
    assert row.startswith("series,learning_rate,9,1e-06,2e-06,")
