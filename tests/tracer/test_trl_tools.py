"""Recording TRL's GRPO where a response holds what a tool, an environment or a rollout function said."""

import shutil

import numpy as np
import pytest
from builders import tim_trace
from runs import program, train
from tim_trace.analysis.check.check import check
from tim_trace.analysis.stats import stats
from tim_trace.analysis.views import connect
from tim_trace.replay.engine import replay
from tim_trace.replay.results import by_arm

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# TRL means in float32 what we mean in float64.
FLOAT32 = {"rtol": 2e-6}

OPENING, CLOSING = 5, 6
"""Tokens before and behind what a tool says."""


def tools(*arguments, capture="logprobs"):
    return program("tools.py", *arguments, capture=capture)


RUNS = [
    ("--vllm",),
    ("--environment",),
    pytest.param((), marks=pytest.mark.slow),
    pytest.param(("--vllm", "--environment"), marks=pytest.mark.slow),
]
every_run = pytest.mark.parametrize("arguments", RUNS)


def rows(run, query):
    return connect(run.trace).execute(query).fetchall()


def logged(run, name):
    return {row["step"]: row[name] for row in run.result["history"] if row.get(name) is not None}


@every_run
def test_training_is_the_same_bit_for_bit_whether_recorded_or_not(arguments):
    assert tools(*arguments).result["weights"] == tools(*arguments, capture=None).result["weights"]


@every_run
def test_what_a_tool_said_is_masked_and_nothing_else(arguments):
    found = rows(tools(*arguments), "SELECT response_ids, response_mask FROM sequences")
    assert len(found) == 16
    num_called = 0
    for ids, mask in found:
        said = [token for token, counts in zip(ids, mask or [True] * len(ids), strict=True) if not counts]
        assert (OPENING in said) == (CLOSING in said) == bool(said)
        num_called += bool(said)
    assert 0 < num_called < 16


@every_run
def test_lengths_are_the_trainer_s_without_what_a_tool_said(arguments):
    run = tools(*arguments)
    for step, wanted in logged(run, "completions/mean_length").items():
        found = rows(run, f"SELECT response_ids, response_mask FROM sequences WHERE step = {step}")
        assert np.mean([len(ids) if mask is None else sum(mask) for ids, mask in found]) == wanted


@every_run
def test_the_trainer_scores_every_token_and_the_engine_those_that_it_sampled(arguments):
    query = """
        SELECT "pass", response_mask, logprobs FROM sequences JOIN scores USING (run, step, seq_id) ORDER BY ALL
    """
    found = rows(tools(*arguments), query)
    assert {name for name, *_ in found} == {"train", "current"} | ({"rollout"} if "--vllm" in arguments else set())
    for name, mask, logprobs in found:
        sampled = [True] * len(logprobs) if mask is None or name != "rollout" else mask
        assert [value is not None for value in logprobs] == sampled


def test_a_grammar_s_mismatch_is_named_and_a_replay_without_it_agrees(tmp_path):
    shutil.copytree(tools("--vllm").trace, tmp_path / "run")
    (finding,) = check(tmp_path / "run").findings
    assert (finding.code, finding.numbers["side"], finding.numbers["num_lower"]) == ("grammar", "rollout", 0)
    assert finding.numbers["num_tokens"] > 100
    assert f"replay {tmp_path / 'run'} --steps 1 --engine vllm --name whole" in finding.next
    done = tim_trace("replay", tmp_path / "run", "--steps", "1", "--engine", "vllm", "--name", "whole")
    assert done.code == 0, done.stderr
    assert check(tmp_path / "run", pair="train:replay/whole").is_valid


def test_the_mismatch_is_what_the_trainer_logged():
    check_mismatch(tools("--vllm"))


@pytest.mark.slow
def test_the_mismatch_of_a_rollout_function_is_what_the_trainer_logged():
    run = train("--vllm", "--rollout-function", capture="logprobs")
    assert rows(run, "SELECT DISTINCT response_mask FROM sequences") == [([True, True, False, False, True],)]
    check_mismatch(run)


def check_mismatch(run):
    query = "SELECT step, avg(abs(d)), max(abs(d)) FROM pair('train', 'rollout') WHERE mask GROUP BY step ORDER BY step"
    found = rows(run, query)
    assert len(found) >= 2
    for step, mean, largest in found:
        np.testing.assert_allclose(mean, logged(run, "sampling/sampling_logp_difference/mean")[step], **FLOAT32)
        np.testing.assert_allclose(largest, logged(run, "sampling/sampling_logp_difference/max")[step], **FLOAT32)
    likeness = stats(run.trace, by="step", like="trl").dicts()
    for row, (_, mean, _) in zip(likeness, found, strict=True):
        np.testing.assert_allclose(row["sampling/sampling_logp_difference/mean"], mean, **FLOAT32)


@every_run
def test_a_replay_gives_back_every_bit(arguments, tmp_path):
    copy = shutil.copytree(tools(*arguments).trace, tmp_path / "run")
    (arm,) = by_arm(replay(copy))
    assert (arm.steps_reproduced, arm.share_equal, arm.max_abs_d) == (2, 1.0, 0.0)
