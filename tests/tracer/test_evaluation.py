"""Sequences that are sampled to evaluate are recorded apart from those that are trained on."""

import json

import numpy as np
import pytest
from builders import add_step, make_batch, tim_trace
from runs import train
from tim_trace.analysis.info import info
from tim_trace.analysis.views import connect
from tim_trace.schemas.errors import InvalidRecord
from tim_trace.tracer.recorder import Recorder

FLOAT32 = {"rtol": 2e-5, "atol": 1e-7}


def rows(trace, query):
    return connect(trace).execute(query).fetchall()


def add_evaluation(recorder, step, batch):
    added = recorder.add_sequences(
        step=step, split="eval", **{name: batch[name] for name in ("prompt_ids", "response_ids", "reward")}
    )
    recorder.add_scores("rollout", added, logprobs=batch["rollout"])
    recorder.add_scores("train", added, logprobs=[values - 3 for values in batch["train"]])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The same training, recorded without and with an evaluation that is far off."""
    folder = tmp_path_factory.mktemp("evaluation")
    for name in ("plain", "evaluated"):
        with Recorder(folder / name) as recorder:
            recorder.add_contract("train", {"engine": "none"})
            for step in range(1, 13):
                if name == "evaluated" and step % 4 == 1:
                    add_evaluation(recorder, step - 1, make_batch(rows=6, seed=100 + step))
                add_step(recorder, step, make_batch(rows=8, seed=step), seq_ids=[f"{step}-{row}" for row in range(8)])
                recorder.add_metrics(step, {"loss": 0.1 * step})
    return folder / "plain", folder / "evaluated"


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb",
    [
        ["stats"], ["stats", "--by", "step"], ["stats", "--by", "sequence"], ["stats", "--like", "verl"], ["check"],
        ["diagnose"], ["dynamics"], ["attribute"], ["corrections"], ["stats", "--steps", "1:4"],
        ["gate", "--fail-on", "tim.k3>1e-3"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_no_figure_of_a_run_is_over_its_evaluation(pair, verb):
    told = []
    for trace in pair:
        done = tim_trace(verb[0], trace.name, *verb[1:], "--json", cwd=trace.parent)
        told.append((done.code, done.stdout.replace("evaluated", "plain").replace(info(str(trace)).run_id, "")))
    assert told[0] == told[1]


@pytest.mark.slow
def test_an_evaluation_has_views_of_its_own(pair):
    plain, evaluated = pair
    assert rows(evaluated, "SELECT step, count(*) FROM eval_sequences GROUP BY step ORDER BY step") == [
        (0, 6), (4, 6), (8, 6),
    ]  # fmt: skip
    query = """
        SELECT count(*), min(list_sum(t.logprobs) / len(t.logprobs)) < -3, count(t.contract)
        FROM eval_scores AS t WHERE "pass" = 'train'
    """
    assert rows(evaluated, query) == [(18, True, 0)]
    assert rows(plain, "SELECT count(*) FROM eval_sequences") == [(0,)]
    for view in ("sequences", "scores", "all_sequences", "tokens"):
        assert rows(plain, f"SELECT count(*) FROM {view}") == rows(evaluated, f"SELECT count(*) FROM {view}")
    found = info(str(evaluated))
    assert (found.num_sequences, found.num_eval_sequences, found.num_eval_steps) == (96, 18, 3)
    assert "18 sequences at 3 steps" in tim_trace("info", evaluated).stdout
    assert "eval_sequences" not in tim_trace("info", plain).stdout


def test_an_evaluation_is_there_while_it_is_a_journal(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        add_evaluation(recorder, 0, make_batch())
        recorder.flush()
        assert rows(tmp_path / "run", "SELECT count(*) FROM eval_sequences") == [(4,)]
    assert tim_trace("verify", tmp_path / "run").code == 0


def test_an_evaluation_may_have_the_names_and_steps_of_training(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_sequences(step=3, seq_ids=["a"], response_ids=[[1]])
        recorder.add_sequences(step=2, seq_ids=["a"], response_ids=[[1]], split="eval")
        with pytest.raises(InvalidRecord, match="occurs twice"):
            recorder.add_sequences(step=2, seq_ids=["a"], response_ids=[[1]], split="eval")
        with pytest.raises(InvalidRecord, match=r"split: got 'test' .*; pass 'train' or 'eval'"):
            recorder.add_sequences(step=3, response_ids=[[1]], split="test")
    assert info(str(tmp_path / "run")).num_sequences == 1


def test_scores_of_an_evaluation_are_its_own_and_have_no_contract_of_training(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_contract("train", {"engine": "mine"})
        added = recorder.add_sequences(step=1, seq_ids=["a"], response_ids=[[1]])
        recorder.add_scores("train", added, logprobs=[[-1.0]])
        evaluated = recorder.add_sequences(step=1, seq_ids=["a"], response_ids=[[1]], split="eval")
        recorder.add_scores("train", evaluated, logprobs=[[-2.0]])
    query = "SELECT logprobs, contract IS NULL FROM {}scores"
    assert rows(tmp_path / "run", query.format("")) == [([-1.0], False)]
    assert rows(tmp_path / "run", query.format("eval_")) == [([-2.0], True)]


def logged(run, name):
    return {row["step"]: row[name] for row in run.result["history"] if row.get(name) is not None}


@pytest.mark.slow
@pytest.mark.engine
def test_trl_s_evaluation_is_recorded_with_its_step_and_training_stays_as_it_is():
    config = {"per_device_eval_batch_size": 8, "steps_per_generation": 2, "num_generations_eval": 2, "beta": 0.1}
    run = train("--evaluate", "--steps", "4", config=config, capture="logprobs")
    assert run.result["weights"] == train("--evaluate", "--steps", "4", config=config).result["weights"]
    query = """
        SELECT step, count(*), avg(reward), count(DISTINCT group_id), min(policy_version) = step
        FROM eval_sequences GROUP BY step ORDER BY step
    """
    found = rows(run.trace, query)
    assert [(step, *rest) for step, _, _, *rest in found] == [(step, 4, True) for step in (1, 2, 3, 4)]
    for step, count, reward, *_ in found:
        assert count == 8
        np.testing.assert_allclose(reward, logged(run, "eval_reward")[step], **FLOAT32)
    query = 'SELECT "pass", count(*) FROM eval_scores GROUP BY ALL ORDER BY ALL'
    assert rows(run.trace, query) == [("reference", 32), ("train", 32)]
    query = """
        SELECT step, avg(exp(d) - 1 - d) FROM (
            SELECT r.step, unnest(r.logprobs) - unnest(t.logprobs) AS d FROM eval_scores AS r
            JOIN eval_scores AS t USING (step, seq_id) WHERE r."pass" = 'reference' AND t."pass" = 'train'
        ) GROUP BY step
    """
    for step, kl in rows(run.trace, query):
        np.testing.assert_allclose(kl, logged(run, "eval_kl")[step], rtol=1e-3, atol=1e-7)
    # Every iteration of every generation batch is there, though evaluations lie between them.
    assert rows(run.trace, """SELECT "pass", count(*) FROM scores WHERE "pass" <> 'reference' GROUP BY ALL ORDER BY ALL""") == [
        ("current", 32), ("train", 32),
    ]  # fmt: skip
    assert info(str(run.trace)).missing == ()


@pytest.mark.slow
@pytest.mark.engine
def test_rollouts_that_vllm_samples_to_evaluate_are_no_sequences_of_training():
    run = train("--vllm", "--bf16-engine", "--evaluate", "--steps", "2", capture="logprobs")
    query = "SELECT step, count(*), avg(reward), count(policy_version) FROM sequences GROUP BY step ORDER BY step"
    found = rows(run.trace, query)
    assert [(step, count, known) for step, count, _, known in found] == [(1, 8, 8), (2, 8, 8)]
    for step, _, reward, _ in found:
        np.testing.assert_allclose(reward, logged(run, "reward")[step], **FLOAT32)
    query = """
        SELECT r.step, avg(abs(list_sum(r.logprobs) - list_sum(t.logprobs))) FROM eval_scores AS r
        JOIN eval_scores AS t USING (step, seq_id) WHERE r."pass" = 'rollout' AND t."pass" = 'train' GROUP BY ALL ORDER BY ALL
    """
    differences = rows(run.trace, query)
    assert [step for step, _ in differences] == [1, 2]
    assert all(0 < difference < 0.1 for _, difference in differences)
    contracts = rows(run.trace, "SELECT \"pass\", contract_json FROM passes WHERE \"pass\" IN ('train', 'rollout')")
    assert len(contracts) == 2
    assert all(json.loads(text).get("training_mode") in (True, None) for _, text in contracts)
