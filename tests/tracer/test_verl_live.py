"""Recording verl as it trains: Ray, FSDP2 workers and vLLM, with no change to any of them."""

import json

import pytest
from safetensors.torch import load_file
from tim_trace.analysis.check.check import check
from tim_trace.analysis.engine_weights import read_engine_verdict
from tim_trace.analysis.info import info
from tim_trace.analysis.stats import stats
from tim_trace.analysis.views import open_database
from tim_trace.tracer.store import Store
from tim_trace.tracer.weights.checkpoints import open_weights
from verl_runs import DYNAMIC, FLOAT32, PACKED, REFERENCE, replayed, rows, verl_run

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WORDS, HEAD_ROWS = 35, 64


@pytest.fixture(scope="module")
def run():
    """Both sides in float32, so that what verl logs has the digits of float32, and updates that show."""
    return verl_run(*FLOAT32, *REFERENCE, "actor_rollout_ref.actor.optim.lr=1e-3", head_rows=HEAD_ROWS)


def test_sequences_are_those_that_verl_writes_itself(run):
    found = rows(run, "SELECT seq_id, step, reward, group_id FROM sequences")
    assert len(found) == 16
    assert {seq_id for seq_id, *_ in found} == run.result["texts"].keys()
    for seq_id, step, reward, group_id in found:
        text = run.result["texts"][seq_id]
        assert (step, reward) == (text["step"], text["score"])
        assert seq_id.startswith(f"{group_id}_")


def test_every_pass_has_every_sequence_and_one_contract(run):
    query = "SELECT pass, count(*), count(DISTINCT contract), count(DISTINCT attempt) FROM scores GROUP BY ALL ORDER BY pass"
    assert rows(run, query) == [(name, 16, 1, 1) for name in ("current", "reference", "rollout", "train")]
    assert rows(run, "SELECT pass, count(*) FROM passes GROUP BY ALL HAVING count(*) > 1") == []


def test_processes_end_their_recordings(run):
    assert {writer.state for writer in info(str(run.trace)).writers} == {"finished"}


def test_versions_say_which_weights_sampled_and_scored(run):
    query = "SELECT DISTINCT step, pass, policy_version FROM scores WHERE pass <> 'reference' ORDER BY ALL"
    assert rows(run, query) == [(s, name, s - 1) for s in (1, 2) for name in ("current", "rollout", "train")]


def test_verl_s_numbers_come_out_as_verl_logged_them(run):
    for row in stats(str(run.trace), by="step", like="verl").dicts():
        logged = run.result["logged"][row["step"]]
        names = [name for name in row if "/" in name]
        assert len(names) == 18
        # verl sums in float32.
        assert {name: row[name] for name in names} == pytest.approx({name: logged[name] for name in names}, rel=2e-6)


def test_what_verl_logs_is_recorded(run):
    found = {
        (step, name): value for step, name, value in rows(run, "SELECT step, name, value FROM metrics WHERE step > 0")
    }
    for step, logged in run.result["logged"].items():
        assert {name: found[step, name] for name in logged} == pytest.approx(logged)


def test_settings_are_recorded(run):
    query = "SELECT value FROM metrics WHERE name = 'hyperparameter/actor_rollout_ref.actor.optim.lr'"
    assert rows(run, query) == [(1e-3,)]


def test_the_one_update_of_a_step_sees_the_trainer_s_own_logprobs(run):
    query = """
        SELECT count(*) FROM scores AS a JOIN scores AS b USING (step, seq_id)
        WHERE a.pass = 'current' AND b.pass = 'train' AND a.logprobs <> b.logprobs
    """
    assert rows(run, query) == [(0,)]


def test_vllm_leaves_padding_of_the_vocabulary_out_and_the_trainer_does_not(run):
    contracts = {name: json.loads(text) for name, text in rows(run, "SELECT pass, contract_json FROM passes")}
    (patch,) = contracts["rollout"]["model_patches"]
    assert patch["arguments"]["vocab_size"] == WORDS
    finding = check(str(run.trace)).findings[0]
    assert (finding.code, finding.numbers["side"]) == ("padded_vocabulary", "train")
    # Random weights give every row of the head about the same probability.
    assert finding.numbers["lost_mass"] == pytest.approx(1 - WORDS / HEAD_ROWS, abs=0.02)


@pytest.fixture(scope="module")
def exact():
    """The same with a head as long as the tokenizer, several updates of the weights in a step, and packed rows."""
    several = ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_epochs=2")
    return verl_run(*FLOAT32, *several, *DYNAMIC, *PACKED, "actor_rollout_ref.actor.optim.lr=1e-3", head_rows=WORDS)


def test_without_padding_of_the_vocabulary_both_sides_agree_to_rounding(exact):
    ((mean, largest),) = rows(exact, "SELECT avg(abs(d)), max(abs(d)) FROM tokens")
    assert mean < 1e-6
    assert largest < 1e-5
    assert {finding.code for finding in check(str(exact.trace)).findings} <= {"rounding"}


def test_later_updates_of_a_step_have_their_own_logprobs_and_no_version(exact):
    query = """
        SELECT iteration, policy_version IS NULL AS is_later, count(*) FROM scores WHERE pass = 'current' AND step = 1
        GROUP BY ALL ORDER BY ALL
    """
    assert rows(exact, query) == [(0, False, 4), (0, True, 4), (1, True, 8)]
    query = """
        SELECT a.policy_version IS NULL AS is_later, max(list_max([abs(x[1] - x[2]) FOR x IN list_zip(a.logprobs, b.logprobs)]))
        FROM scores AS a JOIN scores AS b USING (step, seq_id) WHERE a.pass = 'current' AND b.pass = 'train' GROUP BY ALL
    """
    found = dict(rows(exact, query))
    assert found[False] < 1e-6  # the same weights, in other micro-batches
    assert found[True] > 1e-3


def test_the_weights_of_each_version_are_recorded_from_the_model_that_was_given_on(exact):
    weights = open_weights(Store(str(exact.trace)))
    assert list(weights.versions) == [0, 1]
    given = load_file(exact.trace.parent / "model" / "model.safetensors")
    found = weights.load(0)
    assert given.keys() <= found.keys()
    for name, tensor in given.items():
        assert found[name].bits.tobytes() == tensor.numpy().tobytes()
    assert any(found[name].bits.tobytes() != weights.load(1)[name].bits.tobytes() for name in given)


def forwards(run):
    """Pass -> how many rows went through the model with how many others, each forward once."""
    query = """
        SELECT pass, list(forward_rows) FROM (
            SELECT DISTINCT pass, step, iteration, writer, forward_id, forward_rows FROM scores WHERE pass <> 'rollout'
        ) GROUP BY pass
    """
    return dict(rows(run, query))


def test_rows_of_dynamic_batches_that_went_through_the_model_together_are_recorded(exact):
    found = forwards(exact)
    assert found.keys() == {"current", "train"}
    assert sum(found["train"]) == 16
    assert sum(found["current"]) == 32
    assert max(found["train"]) > 1
    query = "SELECT DISTINCT pass, contract_json ->> '$.packing' FROM passes WHERE pass <> 'rollout' ORDER BY ALL"
    assert rows(exact, query) == [("current", "rows"), ("train", "rows")]


def test_replaying_gives_every_bit_of_the_trainer_s_logprobs(exact, tmp_path):
    as_recorded, vllm = replayed(exact, tmp_path, "--arm", "engine=vllm")
    assert as_recorded["num_steps"] == vllm["num_steps"] == 2
    assert as_recorded["share_equal"] == 1
    assert vllm["max_abs_d"] < 2e-6


@pytest.fixture(scope="module")
def older():
    """verl's RayPPOTrainer, whose batches lie on the driver."""
    return verl_run(
        *FLOAT32,
        *REFERENCE,
        *DYNAMIC,
        "trainer.use_v1=False",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        head_rows=HEAD_ROWS,
    )


def test_the_trainer_of_before_is_recorded_with_every_pass_and_the_numbers_that_it_logged(older):
    query = "SELECT pass, count(*), count(DISTINCT contract) FROM scores GROUP BY ALL ORDER BY pass"
    assert rows(older, query) == [(name, 16, 1) for name in ("current", "reference", "rollout", "train")]
    query = "SELECT DISTINCT step, pass, policy_version FROM scores WHERE pass <> 'reference' ORDER BY ALL"
    assert rows(older, query) == [(s, name, s - 1) for s in (1, 2) for name in ("current", "rollout", "train")]
    texts = list(older.result["texts"].values())
    for step, total in rows(older, "SELECT step, sum(reward) FROM sequences GROUP BY step ORDER BY step"):
        assert total == pytest.approx(sum(text["score"] for text in texts if text["step"] == step))
    for row in stats(str(older.trace), by="step", like="verl").dicts():
        logged = older.result["logged"][row["step"]]
        names = [name for name in row if "/" in name]
        assert len(names) == 18
        assert {name: row[name] for name in names} == pytest.approx({name: logged[name] for name in names}, rel=2e-6)
    query = "SELECT value FROM metrics WHERE step = 2 AND name = 'actor/grad_norm'"
    assert rows(older, query) == [(pytest.approx(older.result["logged"][2]["actor/grad_norm"]),)]


def test_steps_of_the_trainer_of_before_are_replayed(older, tmp_path):
    (as_recorded,) = replayed(older, tmp_path)
    assert as_recorded["num_steps"] == 2
    assert as_recorded["share_equal"] == 1
    assert {name: sum(sizes) for name, sizes in forwards(older).items()} == dict.fromkeys(
        ("current", "reference", "train"), 16
    )


def test_every_tensor_of_the_engine_is_accounted_for(run):
    query = """
        SELECT policy_version, count(*), sum((given = trainer)::INT), count(held), sum((held = trainer)::INT)
        FROM engine_weights GROUP BY ALL ORDER BY ALL
    """
    # vLLM has no head of its own where it is the embedding.
    assert rows(run, query) == [(version, 25, 25, 24, 24) for version in (0, 1)]
    assert read_engine_verdict(open_database(str(run.trace))).agreeing_steps == {1, 2}


ONE_BY_ONE = (
    "data.train_batch_size=1", "actor_rollout_ref.rollout.n=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "trainer.total_training_steps=6", "trainer.save_freq=6", "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
)  # fmt: skip
"""One sequence a step: of several, those that Ray brings to the engine first draw the first random numbers, in any order."""

OF_THE_MACHINE = ("perf/", "timing_s/", "timing_per_token_ms/")
"""In names of what verl logs of the clock and of memory."""


def test_a_recorded_run_and_a_bare_one_are_the_same_bit_for_bit():
    recorded, bare = (verl_run(*FLOAT32, *ONE_BY_ONE, head_rows=WORDS, is_bare=is_bare) for is_bare in (False, True))
    logged, logged_bare = (
        {
            (step, name): value
            for step, values in run.result["logged"].items()
            for name, value in values.items()
            if not any(part in name for part in OF_THE_MACHINE)
        }
        for run in (recorded, bare)
    )
    assert len(logged) > 100
    assert logged == logged_bare
    texts, texts_bare = (
        sorted((line["step"], line["input"], line["output"], line["score"]) for line in run.result["texts"].values())
        for run in (recorded, bare)
    )
    assert len(texts) == 6
    assert texts == texts_bare
    weights, weights_bare = (
        load_file(run.trace.parent / "checkpoints/global_step_6/actor/huggingface/model.safetensors")
        for run in (recorded, bare)
    )
    assert weights.keys() == weights_bare.keys()
    for name, tensor in weights.items():
        assert tensor.numpy().tobytes() == weights_bare[name].numpy().tobytes(), name
    given = load_file(recorded.trace.parent / "model" / "model.safetensors")
    assert any(tensor.numpy().tobytes() != given[name].numpy().tobytes() for name, tensor in weights.items())
