"""Recording verl with several workers, its asynchronous trainer, and a transfer of weights that goes wrong."""

import pytest
from tim_trace.analysis.check.check import check
from tim_trace.analysis.info import info
from verl_runs import ASYNCHRONOUS, FLOAT32, replayed, rows, verl_run

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WORDS = 35


@pytest.fixture(scope="module")
def sharded():
    """verl's own precision, parameters cast to bfloat16 under autocast, over two workers that hold half of the weights each."""
    return verl_run(
        "trainer.n_gpus_per_node=2", "++ray_kwargs.ray_init.num_gpus=2", "actor_rollout_ref.actor.optim.lr=1e-3",
        head_rows=WORDS,
    )  # fmt: skip


def test_in_verl_s_own_precision_every_bit_comes_back_of_two_workers(sharded, tmp_path):
    as_recorded, vllm = replayed(sharded, tmp_path, "--arm", "engine=vllm")
    assert as_recorded["num_steps"] == 2
    assert as_recorded["share_equal"] == 1
    # verl holds these logprobs in bfloat16: those of its engine lie within half a unit of that.
    assert 0 < vllm["mean_abs_d"] < vllm["max_abs_d"] < 0.03


@pytest.fixture(scope="module")
def asynchronous():
    """verl's fully asynchronous trainer: an engine of its own device, two updates between two transfers of weights."""
    return verl_run(
        *FLOAT32, *ASYNCHRONOUS, "actor_rollout_ref.actor.optim.lr=1e-3",
        head_rows=WORDS, main="verl.experimental.fully_async_policy.fully_async_main",
    )  # fmt: skip


def test_a_step_of_the_asynchronous_trainer_is_what_verl_logs_under_its_number(asynchronous):
    query = "SELECT step, pass, count(*), count(DISTINCT contract) FROM scores GROUP BY ALL ORDER BY ALL"
    passes = ("current", "rollout", "train")
    assert rows(asynchronous, query) == [(step, name, 16, 1) for step in (1, 2) for name in passes]
    recorded = {
        (step, name): value
        for step, name, value in rows(asynchronous, "SELECT step, name, value FROM metrics WHERE step > 0")
    }
    logged = asynchronous.result["logged"]
    assert {step for step in logged if step} == {1, 2}
    for step in (1, 2):
        assert {name: recorded[step, name] for name in logged[step]} == pytest.approx(logged[step])
    assert {writer.state for writer in info(str(asynchronous.trace)).writers} == {"finished"}
    query = """
        SELECT avg(reward) FROM sequences JOIN scores USING (step, seq_id)
        WHERE pass = 'train' AND scores.policy_version IN ({})
    """
    # verl logs a step's last update with those of the step after.
    for step, updates in ((1, "0"), (2, "1, 2")):
        ((mean,),) = rows(asynchronous, query.format(updates))
        assert mean == pytest.approx(logged[step]["critic/score/mean"])


def test_sequences_of_the_asynchronous_trainer_have_the_version_that_sampled_them(asynchronous):
    query = "SELECT DISTINCT step, policy_version FROM scores WHERE pass = 'train' ORDER BY ALL"
    assert rows(asynchronous, query) == [(1, 0), (1, 1), (2, 2), (2, 3)]
    found = rows(asynchronous, "SELECT step, policy_version FROM sequences")
    # Weights are given after every second update, and samples wait in a queue.
    assert {version for _, version in found} <= {0, 2}
    assert {version for step, version in found if step == 1} == {0}
    # verl counts up to the update before the last, and in it, by the newest weights of each.
    stale = sum(version == 0 for step, version in found if step == 2)
    assert stale >= asynchronous.result["logged"][2]["fully_async/count/stale_trajectory_processed"]


def test_without_rounding_by_the_engine_what_the_versions_say_is_the_whole_mismatch(asynchronous):
    query = """
        SELECT a.policy_version = b.policy_version AS is_same, max(abs(d)) FROM tokens AS t
        JOIN scores AS a ON a.step = t.step AND a.seq_id = t.seq_id AND a.pass = 'train'
        JOIN scores AS b ON b.step = t.step AND b.seq_id = t.seq_id AND b.pass = 'rollout'
        GROUP BY ALL ORDER BY ALL
    """
    found = dict(rows(asynchronous, query))
    assert found[True] < 1e-5
    assert found[False] > 1e-3


def test_steps_of_the_asynchronous_trainer_are_replayed(asynchronous, tmp_path):
    (as_recorded,) = replayed(asynchronous, tmp_path)
    assert as_recorded["num_steps"] == 2
    assert as_recorded["share_equal"] == 1


def test_what_of_the_asynchronous_engine_s_weights_is_not_recorded_is_said(asynchronous):
    (sentence,) = (found for found in info(str(asynchronous.trace)).missing if "engine's weights" in found)
    assert "verl's checkpoint engine gloo sends them to other processes" in sentence


SKIPPED = "model.layers.1.mlp.down_proj.weight"


def test_a_tensor_that_a_plugin_s_transfer_skips_is_named_with_the_version_that_the_engine_has():
    run = verl_run(
        *FLOAT32, "trainer.total_training_steps=3", "actor_rollout_ref.actor.optim.lr=1e-3",
        head_rows=WORDS, modules=("skipping_rollout",),
    )  # fmt: skip
    finding = check(str(run.trace)).findings[0]
    assert (finding.code, finding.signal) == ("weights_differ", "engine_weights")
    numbers = finding.numbers
    assert (numbers["cause"], numbers["tensor"], numbers["num_tensors"]) == ("partial_sync", SKIPPED, 1)
    assert (numbers["holds_version"], numbers["given_version"], numbers["trainer_version"]) == (0, 0, 2)
