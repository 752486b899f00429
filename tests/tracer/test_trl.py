"""Recording real TRL trainers. The trainer's own logged numbers are the reference for what was recorded."""

import json
import math

import numpy as np
import pytest
from runs import train
from shared import rest_slow
from tim_trace.analysis.info import info
from tim_trace.analysis.stats import likeness, stats
from tim_trace.analysis.views import connect
from tim_trace.replay.gradients.engine import gradient
from tim_trace.tracer.dense import read_dense
from tim_trace.tracer.hooks.trl_batches import scoring_call
from tim_trace.tracer.store import Store

pytestmark = pytest.mark.engine

# The trainer adds in float32 what we add in float64.
FLOAT32 = {"rtol": 2e-5, "atol": 1e-7}

OFF_POLICY = {"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 2, "beta": 0.1}


def rows(run, query):
    return connect(run.trace).execute(query).fetchall()


def logged(run, name):
    """Step -> value, as the trainer logged it."""
    return {row["step"]: row[name] for row in run.result["history"] if row.get(name) is not None}


@pytest.fixture(scope="module")
def on_policy():
    """No vLLM and one pass over each batch: TRL computes no logprobs apart from the loss."""
    return train(capture="logprobs")


@pytest.fixture(scope="module")
def off_policy():
    """Two iterations over each batch, gradient accumulation and a reference model."""
    return train("--steps", "4", config=OFF_POLICY, capture="logprobs")


@pytest.fixture(scope="module")
def vllm():
    """A float32 trainer with bfloat16 rollouts of vLLM."""
    return train("--vllm", "--bf16-engine", config={"temperature": 0.8}, capture="topk:3", fraction="0.5")


@pytest.fixture(scope="module")
def rloo():
    return train("--trainer", "rloo", "--vllm", "--bf16-engine", config={"beta": 0.05}, capture="logprobs")


@pytest.mark.slow
def test_recording_says_where_it_writes_and_what_comes_next(on_policy):
    assert "tim-trace: recording to " in on_policy.done.stderr
    assert "recorded 24 sequences" in on_policy.done.stderr
    assert f"next: tim-trace info {on_policy.trace}" in on_policy.done.stderr


@pytest.mark.parametrize("name", rest_slow(["vllm", "off_policy", "on_policy", "rloo"], 1))
def test_nothing_is_missing_from_a_finished_run(request, name):
    found = info(str(request.getfixturevalue(name).trace))
    assert (found.state, found.exit_code, found.damaged) == ("finished", 0, ())
    assert found.missing == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "capture", ["logprobs", *(pytest.param(name, marks=pytest.mark.slow) for name in ("topk:3", "logits"))]
)
def test_training_is_the_same_bit_for_bit_whether_recorded_or_not(capture):
    bare, recorded = train(), train(capture=capture, **({} if capture == "logprobs" else {"fraction": "0.5"}))
    assert recorded.result["weights"] == bare.result["weights"]
    for one, other in zip(recorded.result["history"], bare.result["history"], strict=True):
        assert {k: v for k, v in one.items() if not timing(k)} == {k: v for k, v in other.items() if not timing(k)}


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["topk:3", "logits"])
def test_training_with_vllm_is_the_same_bit_for_bit_whether_recorded_or_not(capture):
    config = {"temperature": 0.8}
    bare = train("--vllm", "--bf16-engine", config=config)
    recorded = train("--vllm", "--bf16-engine", config=config, capture=capture, fraction="0.5")
    assert recorded.result["weights"] == bare.result["weights"]


def timing(name):
    return name.endswith(("_time", "_runtime", "_per_second"))


@pytest.mark.slow
def test_sequences_hold_what_the_trainer_logged(on_policy, off_policy, vllm, rloo):
    for run in (on_policy, off_policy, vllm, rloo):
        query = """
            SELECT step, avg(reward), avg(rewards['digits']), avg(rewards['short']), avg(num_response_tokens),
                   count(*), count(DISTINCT group_id), avg((response_ids[-1] NOT IN (0, 1))::INT)
            FROM sequences GROUP BY step ORDER BY step
        """
        for step, reward, digits, short, length, count, groups, clipped in rows(run, query):
            np.testing.assert_allclose(reward, logged(run, "reward")[step], **FLOAT32)
            np.testing.assert_allclose(digits, logged(run, "rewards/digits/mean")[step], **FLOAT32)
            np.testing.assert_allclose(short, logged(run, "rewards/short/mean")[step], **FLOAT32)
            np.testing.assert_allclose(length, logged(run, "completions/mean_length")[step], **FLOAT32)
            np.testing.assert_allclose(clipped, logged(run, "completions/clipped_ratio")[step], **FLOAT32)
            assert count == 4 * groups


def test_a_response_stopped_where_it_ends_with_the_end_token(on_policy, vllm):
    for run in (on_policy, vllm):
        query = "SELECT finish_reason, response_ids[-1] = 1, count(*) FROM sequences GROUP BY ALL"
        found = {(reason, ended): count for reason, ended, count in rows(run, query)}
        # TRL takes a sampled padding token for an end too, where the engine does not.
        assert not found.get(("stop", False)) or run is on_policy
        assert not found.get(("length", True))


def test_a_group_shares_its_prompt_and_its_advantages_are_centred(on_policy):
    query = """
        SELECT count(DISTINCT prompt_ids), sum(advantage) FROM sequences GROUP BY step, group_id
    """
    for prompts, advantages in rows(on_policy, query):
        assert prompts == 1
        assert abs(advantages) < 1e-4


def test_metrics_are_what_was_logged_and_nothing_twice(on_policy):
    found = rows(on_policy, "SELECT step, name, value FROM metrics WHERE step > 0")
    assert len(found) == len({(step, name) for step, name, _ in found})
    recorded = {(step, name): value for step, name, value in found}
    for row in on_policy.result["history"]:
        for name, value in row.items():
            if name != "step" and value is not None:
                assert recorded[row["step"], name] == value


@pytest.mark.slow
def test_learning_rate_and_grad_norm_are_there_for_every_step_though_few_are_logged():
    run = train("--steps", "6", config={"logging_steps": 3, "lr_scheduler_type": "linear"}, capture="logprobs")
    query = "SELECT step, value FROM metrics WHERE name = '{}' ORDER BY step"
    assert [step for step, _ in rows(run, query.format("grad_norm"))] == [1, 2, 3, 4, 5, 6]
    rates = dict(rows(run, query.format("learning_rate")))
    np.testing.assert_allclose([rates[step] for step in range(1, 7)], [1e-3 * (7 - step) / 6 for step in range(1, 7)])
    for step, value in logged(run, "grad_norm").items():
        assert dict(rows(run, query.format("grad_norm")))[step] == value


def test_hyperparameters_are_recorded(on_policy):
    found = dict(rows(on_policy, "SELECT name, coalesce(text, value::VARCHAR) FROM metrics WHERE step = 0"))
    assert found["hyperparameter/learning_rate"] == "0.001"
    assert found["hyperparameter/num_generations"] == "4.0"
    assert found["hyperparameter/loss_type"] == "dapo"


def test_without_logprobs_of_its_own_the_train_pass_is_what_the_loss_used(on_policy):
    query = """
        SELECT count(*), count(*) FILTER (c.logprobs = t.logprobs)
        FROM scores AS c JOIN scores AS t USING (run, step, seq_id)
        WHERE c."pass" = 'current' AND t."pass" = 'train'
    """
    assert rows(on_policy, query) == [(24, 24)]
    ((contract,),) = rows(on_policy, "SELECT contract_json FROM passes WHERE \"pass\" = 'train'")
    assert json.loads(contract)["source"] == "loss"


def test_transformers_generation_has_no_rollout_logprobs_and_the_recording_says_so(on_policy):
    (rollout,) = [p for p in info(str(on_policy.trace)).passes if p.name == "rollout"]
    assert (rollout.num_rows, rollout.engine) == (0, "transformers")
    assert rollout.note == "generation with transformers returns no logprobs, so this pass has no scores"


def test_each_inner_iteration_is_recorded_with_the_weights_that_it_saw(off_policy):
    query = """
        SELECT iteration, policy_version - s.policy_version AS lag, count(*)
        FROM scores AS c JOIN sequences AS s USING (run, step, seq_id)
        WHERE c."pass" = 'current' GROUP BY ALL ORDER BY ALL
    """.replace("policy_version - s", "c.policy_version - s")
    # 4 optimizer steps of 2 micro-batches of 8; each generation of 16 is gone through twice.
    assert rows(off_policy, query) == [(0, 0, 32), (1, 1, 32)]
    assert rows(off_policy, "SELECT DISTINCT step FROM sequences ORDER BY step") == [(1,), (3,)]


def test_before_the_first_update_the_loss_sees_what_was_recomputed(off_policy):
    """The same weights score the same tokens in other batches: rounding apart, and not the same rows."""
    query = """
        SELECT max(abs(d)), count(d) FROM pair('current', 'train') WHERE iteration_a = 0
    """
    ((largest, count),) = rows(off_policy, query)
    assert count > 60
    # Two float32 forwards of one tiny model.
    assert largest < 2e-6
    ((moved,),) = rows(off_policy, "SELECT max(abs(d)) FROM pair('current', 'train') WHERE iteration_a = 1")
    assert moved > 1e-3


def test_the_reference_pass_gives_the_kl_that_the_trainer_logged(off_policy):
    """TRL's kl is the mean over a micro-batch's tokens of (exp(r - c) - (r - c) - 1) exp(c - o).

    r, c and o are the reference, current and train logprobs; its default corrects the estimate by the ratio.
    """
    query = """
        SELECT version + 1, avg(kl) FROM (
            SELECT c.policy_version AS version, c.forward_id, avg((exp(r.d) - r.d - 1) * exp(o.d)) AS kl
            FROM pair('reference', 'current') AS r
            JOIN pair('current', 'train') AS o
              ON (o.step, o.seq_id, o.position, o.iteration_a) = (r.step, r.seq_id, r.position, r.iteration_b)
            JOIN scores AS c
              ON c."pass" = 'current' AND (c.step, c.seq_id, c.iteration) = (r.step, r.seq_id, r.iteration_b)
            GROUP BY ALL
        ) GROUP BY ALL ORDER BY ALL
    """
    found = rows(off_policy, query)
    assert [step for step, _ in found] == [1, 2, 3, 4]
    for step, kl in found:
        np.testing.assert_allclose(kl, logged(off_policy, "kl")[step], rtol=1e-4, atol=1e-7)


def test_entropies_are_those_that_the_trainer_logged(off_policy):
    query = """
        SELECT version + 1, avg(entropy) FROM (
            SELECT version, forward_id, avg(entropy) AS entropy FROM (
                SELECT policy_version AS version, forward_id, unnest(entropy) AS entropy FROM scores WHERE "pass" = 'current'
            ) GROUP BY ALL
        ) GROUP BY 1 ORDER BY 1
    """
    for step, entropy in rows(off_policy, query):
        np.testing.assert_allclose(entropy, logged(off_policy, "entropy")[step], **FLOAT32)


def test_batch_composition_tells_which_rows_were_forwarded_together_and_how_they_were_padded(off_policy, vllm):
    for run in (off_policy, vllm):
        query = """
            SELECT scores."pass", forward_id, count(*), min(forward_rows), max(forward_rows),
                   list(forward_row ORDER BY forward_row),
                   count(DISTINCT pad_left + num_prompt_tokens), count(DISTINCT num_response_tokens + pad_right),
                   min(pad_left), min(pad_right)
            FROM scores JOIN sequences USING (run, step, seq_id)
            WHERE scores."pass" <> 'rollout' GROUP BY ALL
        """
        found = rows(run, query)
        assert {name for name, *_ in found} >= {"train", "current"}
        for _, _, count, fewest, most, order, prompt_widths, response_widths, left, right in found:
            assert count == fewest == most == 8
            assert order == list(range(8))
            assert (prompt_widths, response_widths) == (1, 1)
            assert left >= 0
            assert right >= 0


def test_the_mismatch_is_the_one_that_trl_logged(vllm):
    found = {row["step"]: row for row in stats(vllm.trace, by="step").dicts()}
    means, largest = (logged(vllm, f"sampling/sampling_logp_difference/{name}") for name in ("mean", "max"))
    assert set(found) == set(means)
    for step, row in found.items():
        np.testing.assert_allclose(row["mean_abs_d"], means[step], **FLOAT32)
        np.testing.assert_allclose(row["max_abs_d"], largest[step], **FLOAT32)
    # bfloat16 against float32: not nothing, and not a mistake either.
    assert all(1e-5 < row["mean_abs_d"] < 1e-2 for row in found.values())


def test_stats_like_trl_are_what_trl_logged(vllm):
    kinds = ("sampling_logp_difference/mean", "sampling_logp_difference/max")
    kinds += tuple(f"importance_sampling_ratio/{kind}" for kind in ("min", "mean", "max"))
    found = stats(vllm.trace, by="step", like="trl").dicts()
    for kind in kinds:
        expected = logged(vllm, f"sampling/{kind}")
        assert [row["step"] for row in found] == list(expected)
        shown = [row[f"sampling/{kind}"] for row in found]
        np.testing.assert_allclose(shown, list(expected.values()), err_msg=kind, **FLOAT32)


# Two updates over each batch, so that ratios leave their bounds, and logs of several steps, the last of them of fewer.
MOVED = {
    "num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 2, "learning_rate": 0.01,
    "epsilon": 0.01, "logging_steps": 3,
}  # fmt: skip


def same_as_logged(run, **options):
    """Every number that TRL logged under a name of `stats --like trl`, and no row that it has no log of."""
    found = {row["step"]: row for row in stats(run.trace, by="step", like="trl", **options).dicts()}
    names = {name for row in found.values() for name in row} - {"run", "step"}
    logs = [row for row in run.result["history"] if names & set(row)]
    assert [row["step"] for row in logs] == list(found)
    for row in logs:
        for name in names:
            if row.get(name) is None:
                assert found[row["step"]][name] is None
            else:
                np.testing.assert_allclose(found[row["step"]][name], row[name], err_msg=name, **FLOAT32)
    return [row for row in logs if any(row.get(name) for name in names if "clip_ratio" in name)]


@pytest.mark.slow
def test_means_over_logged_steps_are_what_trl_logged():
    # Micro-batches whose responses are all cut off, so that no token counts, are in TRL's means as well.
    config = MOVED | {"loss_type": "grpo", "epsilon_high": 0.02, "mask_truncated_completions": True}
    run = train("--steps", "7", config=config | {"max_completion_length": 2}, capture="logprobs")
    clipped = same_as_logged(run, logging_steps=3, loss_type="grpo", epsilon=0.01, epsilon_high=0.02)
    assert len(clipped) > 1
    assert likeness(run.trace, like="trl")[2] == (
        "run was trained with different options; to reproduce its logged numbers, use "
        "by='step', loss_type='grpo', epsilon=0.01, epsilon_high=0.02, logging_steps=3"
    )
    assert len(likeness(run.trace, like="trl", logging_steps=3, loss_type="grpo", epsilon=0.01, epsilon_high=0.02)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("luspo", {"importance_sampling_level": "sequence"}),
        pytest.param("bnpo", {}, marks=pytest.mark.slow),
        pytest.param("cispo", {"epsilon_high": 1.001}, marks=pytest.mark.slow),
        pytest.param("dapo", {}, marks=pytest.mark.slow),
        pytest.param("dr_grpo", {}, marks=pytest.mark.slow),
        pytest.param("grpo", {}, marks=pytest.mark.slow),
        pytest.param("sapo", {}, marks=pytest.mark.slow),
        pytest.param("vespo", {}, marks=pytest.mark.slow),
    ],
)
def test_a_loss_without_its_truncated_responses_clips_and_pulls_as_trl_logged(kind, more):
    options = {"loss_type": kind, **more}
    config = MOVED | options | {"logging_steps": 2, "mask_truncated_completions": True, "max_completion_length": 4}
    run = train("--steps", "4", config=config, capture="logprobs")
    masked, kept = rows(
        run, "SELECT count(*) FILTER (NOT m), count(*) FILTER (m) FROM (SELECT response_mask[1] AS m FROM sequences)"
    )[0]
    assert masked
    assert kept
    if kind in ("sapo", "vespo"):
        found = stats(run.trace, by="step", like="trl", epsilon=0.01, logging_steps=2, **options).dicts()
        assert {value for row in found for name, value in row.items() if name not in ("run", "step")} == {None}
    else:
        assert same_as_logged(run, epsilon=0.01, logging_steps=2, **options)
    found = gradient(run.trace)
    norms = [row["grad_norm"] for row in run.result["history"] if "grad_norm" in row]
    assert [step.grad_norm for step in found.steps][1::2] == norms
    assert all(step.reproduced for step in found.steps)


@pytest.mark.slow
def test_means_over_logged_steps_of_vllm_s_rollouts_are_what_trl_logged():
    options = {
        "logging_steps": 2, "logging_first_step": True, "epsilon": 0.01, "importance_sampling_level": "sequence",
        "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.0005,
    }  # fmt: skip
    run = train("--vllm", "--bf16-engine", "--steps", "5", config=MOVED | options, capture="logprobs")
    assert same_as_logged(run, **options)
    steps = [row["step"] for row in run.result["history"] if "sampling/sampling_logp_difference/mean" in row]
    assert steps == [1, 4, 5]  # generation batches of steps 1, 3 and 5


@pytest.mark.slow
def test_means_over_processes_are_what_trl_logged():
    options = {"loss_type": "cispo", "epsilon_high": 1.001, "logging_steps": 2}
    run = train("--ranks", "2", "--steps", "3", config=MOVED | options, capture="logprobs")
    assert same_as_logged(run, **options)


@pytest.mark.slow
def test_rloo_s_clips_are_what_it_logged():
    run = train("--trainer", "rloo", "--steps", "4", config=MOVED, capture="logprobs")
    assert same_as_logged(run, trainer="rloo", epsilon=0.01, logging_steps=3)


def test_sampling_settings_are_recorded_with_each_sequence(vllm):
    query = "SELECT DISTINCT temperature, top_p, top_k, min_p, repetition_penalty, max_tokens FROM sequences"
    assert rows(vllm, query) == [(0.8, 1.0, 0, 0.0, 1.0, 6)]


def test_the_contracts_say_what_decides_the_numbers(vllm):
    found = {name: json.loads(text) for name, text in rows(vllm, 'SELECT "pass", contract_json FROM passes')}
    assert set(found) == {"rollout", "train", "current"}
    rollout = found["rollout"]
    assert rollout["logprobs_mode"] == "processed_logprobs"
    assert rollout["config"]["model_config"]["dtype"] == "torch.bfloat16"
    assert rollout["engine_arguments"]["max_num_batched_tokens"] == 4096
    assert "kwargs" not in rollout["engine_arguments"]
    assert rollout["attention_backend"] == ["CPU_ATTN"]
    assert rollout["sampling"]["temperature"] == 0.8
    train_contract = found["train"]
    assert (train_contract["source"], train_contract["temperature"]) == ("recomputed", 0.8)
    assert train_contract["model"]["dtypes"] == {"float32": 75136}
    assert train_contract["model"]["attention"] == "sdpa"
    assert train_contract["fused_lm_head"] == "trl.trainer.utils.add_fused_lm_head"
    for name in ("float32_matmul_precision", "deterministic_algorithms", "num_threads", "cuda_matmul_allow_tf32"):
        assert name in train_contract["torch"]
    assert {"torch", "transformers", "trl", "python"} <= set(train_contract["versions"])
    assert found["current"]["grad_enabled"]
    assert not train_contract["grad_enabled"]


def test_captured_distributions_hold_the_taken_token_s_logprob(vllm):
    store, checked = Store(vllm.trace), 0
    query = """
        SELECT scores."pass", dense, dense_start, logprobs, response_ids FROM scores JOIN sequences USING (run, step, seq_id)
        WHERE dense IS NOT NULL
    """
    found = rows(vllm, query)
    assert {name for name, *_ in found} == {"rollout", "train"}
    for _, group, start, logprobs, ids in found:
        arrays = read_dense(store, group, start, len(ids))
        assert arrays["token_ids"].shape == (len(ids), 3)
        # K float32 logprobs and the tail make up the whole.
        mass = np.exp(arrays["logprobs"].astype(np.float64)).sum(axis=1) + np.exp(
            arrays["tail_logprob"].astype(np.float64)
        )
        np.testing.assert_allclose(mass, 1.0, atol=1e-6)
        for position, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            place = np.flatnonzero(arrays["token_ids"][position] == token)
            if len(place):
                np.testing.assert_allclose(arrays["logprobs"][position][place[0]], logprob, atol=2e-6)
                checked += 1
    assert checked > 20


def test_the_capture_fraction_decides_the_same_rows_for_both_sides(vllm):
    query = "SELECT step, seq_id, count(dense) FROM scores WHERE \"pass\" IN ('rollout', 'train') GROUP BY ALL"
    counts = [count for *_, count in rows(vllm, query)]
    assert set(counts) == {0, 2}
    assert info(str(vllm.trace)).num_captured == 2 * counts.count(2)


@pytest.mark.slow
def test_full_logits_give_the_recorded_logprobs_of_both_sides():
    run = train("--vllm", "--bf16-engine", config={"temperature": 0.8}, capture="logits", fraction="0.5")
    store, seen = Store(run.trace), set()
    query = """
        SELECT scores."pass", dense, dense_start, logprobs, response_ids FROM scores JOIN sequences USING (run, step, seq_id)
        WHERE dense IS NOT NULL
    """
    for name, group, start, logprobs, ids in rows(run, query):
        arrays = read_dense(store, group, start, len(ids))
        seen.add((name, *arrays))
        (values,) = arrays.values()
        values = values.astype(np.float64) / (0.8 if name == "train" else 1.0)
        values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(values[np.arange(len(ids)), ids], logprobs, atol=2e-6)
    # vLLM gives logprobs and no logits.
    assert seen == {("train", "logits"), ("rollout", "logprobs")}


@pytest.mark.slow
def test_rloo_s_rollout_logprobs_are_recorded_though_the_trainer_throws_them_away(rloo):
    (row,) = stats(rloo.trace).dicts()
    assert row["num_sequences"] == 24
    assert 1e-5 < row["mean_abs_d"] < 1e-2
    assert {p.name: p.num_sequences for p in info(str(rloo.trace)).passes} == dict.fromkeys(
        ("rollout", "train", "current", "reference"), 24
    )


@pytest.mark.slow
def test_rloo_s_kl_is_the_one_that_it_logged(rloo):
    query = "SELECT step, avg(d) FROM pair('train', 'reference') GROUP BY step ORDER BY step"
    for step, kl in rows(rloo, query):
        np.testing.assert_allclose(kl, logged(rloo, "kl")[step], rtol=1e-3, atol=1e-7)


@pytest.mark.slow
def test_responses_that_are_masked_for_being_cut_off_keep_their_length_and_have_no_scores():
    run = train(
        config={"mask_truncated_completions": True, "max_completion_length": 3, **OFF_POLICY}, capture="logprobs"
    )
    query = """
        SELECT finish_reason, num_response_tokens, list_unique(response_mask), list_contains(response_mask, true),
               len(list_filter(logprobs, lambda x: x IS NOT NULL))
        FROM sequences JOIN scores USING (run, step, seq_id) WHERE "pass" = 'train'
    """
    found = rows(run, query)
    assert {reason for reason, *_ in found} == {"stop", "length"}
    for reason, tokens, kinds, counts, scored in found:
        assert kinds == 1
        assert counts == (reason == "stop")
        assert scored == (tokens if reason == "stop" else 0)
        assert tokens == 3 or reason == "stop"


@pytest.mark.slow
def test_tool_output_is_masked_and_has_no_rollout_logprob():
    run = train("--rollout-function", capture="logprobs")
    query = """
        SELECT response_mask, logprobs, response_ids FROM sequences JOIN scores USING (run, step, seq_id) WHERE "pass" = 'rollout'
    """
    found = rows(run, query)
    assert found
    for mask, logprobs, ids in found:
        assert [value is not None for value in logprobs] == mask
        assert mask == [True, True, False, False, True]
        assert ids[2:4] == [12, 13]


@pytest.mark.slow
def test_two_ranks_of_a_trainer_write_one_trace():
    run = train("--ranks", "2", config={"steps_per_generation": 1}, capture="logprobs")
    found = info(str(run.trace))
    assert [writer.rank for writer in found.writers] == [0, 1]
    assert found.missing == ()
    query = "SELECT step, count(*), count(DISTINCT seq_id), count(DISTINCT writer), avg(reward) FROM sequences GROUP BY step"
    for step, count, names, writers, reward in rows(run, query):
        assert (count, names, writers) == (16, 16, 2)
        np.testing.assert_allclose(reward, logged(run, "reward")[step], **FLOAT32)
    assert rows(run, "SELECT count(*) = count(DISTINCT (step, name)) FROM metrics") == [(True,)]
    assert math.isclose(
        rows(run, "SELECT max(abs(s)) FROM (SELECT sum(advantage) AS s FROM sequences GROUP BY group_id)")[0][0],
        0,
        abs_tol=1e-4,
    )


def test_the_tokenizer_is_kept(on_policy):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(on_policy.trace / "tokenizer")
    ((ids,),) = rows(on_policy, "SELECT prompt_ids FROM sequences WHERE seq_id = '1-0'")
    assert set(tokenizer.decode(ids)) <= set("0123456789+=")


@pytest.mark.slow
def test_an_untested_version_gives_one_warning_and_is_recorded_as_far_as_it_goes():
    run = train("--pretend", "9.9.9", capture="logprobs")
    assert run.done.stderr.count("9.9.9 is not a tested version") == 1
    assert "training is not affected" in run.done.stderr
    found = info(str(run.trace))
    assert any("trl 9.9.9" in sentence for sentence in found.missing)
    assert found.num_sequences == 24
    assert run.result["weights"] == train().result["weights"]


@pytest.mark.slow
def test_a_function_that_is_gone_is_named_with_what_is_not_recorded():
    run = train("--pretend", "9.9.9", "--without", "_calculate_rewards", capture="logprobs")
    assert "not recorded: rewards (GRPOTrainer._calculate_rewards was not found)" in run.done.stderr
    assert rows(run, "SELECT count(*), count(reward) FROM sequences") == [(24, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["derived", "copied"])
def test_a_trainer_is_known_by_its_functions_wherever_its_class_comes_from(kind):
    run = train("--trainer", kind, "--steps", "2", capture="logprobs")
    assert run.result["weights"] == train("--trainer", kind, "--steps", "2").result["weights"]
    query = 'SELECT "pass", count(*), count(logprobs) FROM scores GROUP BY ALL ORDER BY ALL'
    assert rows(run, query) == [("current", 16, 16), ("train", 16, 16)]
    for step, reward in rows(run, "SELECT step, avg(reward) FROM sequences GROUP BY step"):
        np.testing.assert_allclose(reward, logged(run, "reward")[step], **FLOAT32)
    (said,) = info(str(run.trace)).missing
    assert "`objective` and `gradient` use the loss derived from TRL's settings" in said


@pytest.mark.slow
def test_what_a_class_below_trl_s_changed_is_what_is_recorded():
    derived, plain = (train("--trainer", kind, "--steps", "2", capture="logprobs") for kind in ("derived", "grpo"))
    query = "SELECT advantage FROM sequences WHERE step = 1 ORDER BY seq_id"
    assert rows(derived, query) == [(2 * advantage,) for (advantage,) in rows(plain, query)]


@pytest.mark.slow
def test_a_trainer_with_other_functions_is_named():
    run = train("--trainer", "other", "--steps", "2", capture="logprobs")
    for said in (run.done.stderr, *info(str(run.trace)).missing):
        assert "trainer other.<locals>.PolicyTrainer in module trainers is not recorded" in said
        assert "it has no _generate_and_score_completions" in said
    assert "no process trained" not in run.done.stderr


@pytest.mark.slow
def test_an_error_of_recording_never_takes_training_down():
    run = train("--break-recorder", capture="logprobs")
    assert run.done.stderr.count("RECORDING STOPPED") == 1
    assert "ZeroDivisionError" in run.done.stderr
    found = info(str(run.trace))
    assert (found.state, found.exit_code) == ("stopped", 0)
    assert run.result["weights"] == train().result["weights"]


@pytest.mark.slow
def test_a_part_that_fails_ends_alone_and_is_named_once():
    run = train("--break-parts", capture="topk:3")
    parts = (
        "metrics", "optimizer statistics", "weights", "the tokenizer and hyperparameters", "contracts",
        "the trainer's distributions",
    )  # fmt: skip
    reason = "(OutOfMemoryError: CUDA out of memory. Tried to allocate 2.90 GiB.)"
    assert sorted(line for line in run.done.stderr.splitlines() if "no longer recorded" in line) == sorted(
        f"tim-trace: no longer recorded: {part} {reason}. Everything else continues" for part in parts
    )
    found = info(str(run.trace))
    assert (found.state, found.exit_code) == ("finished", 0)
    assert {f"not recorded: {part}, after an error {reason}" for part in parts} <= set(found.missing)
    whole = train(capture="topk:3")
    for table in ("sequences", "scores"):
        query = f"SELECT count(*) FROM {table}"
        assert rows(run, query) == rows(whole, query)
    assert run.result["weights"] == train().result["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--trainer", "rloo", "--ranks", "2")])
def test_no_collective_is_called_inside_recording(more):
    run = train(*more, "--refuse-collectives", capture="topk:3", options=("--weights", "delta"))
    assert info(str(run.trace)).state == "finished"
    assert run.result["weights"] == train(*more).result["weights"]


def test_a_scoring_function_that_hands_its_arguments_on_is_read_by_their_places():
    """As in TRL 1.14."""

    def score(self, model, *args, batch_size=None, **kwargs):
        raise AssertionError("is asked for its signature alone")

    call = scoring_call(score, "trainer", "model", "ids", "mask", 7, compute_entropy=True)
    assert call == {
        "model": "model", "input_ids": "ids", "attention_mask": "mask", "logits_to_keep": 7, "compute_entropy": True,
    }  # fmt: skip
    named = scoring_call(score, "trainer", "model", "ids", attention_mask="mask", logits_to_keep=7, batch_size=2)
    assert named == {
        "model": "model",
        "input_ids": "ids",
        "attention_mask": "mask",
        "logits_to_keep": 7,
        "batch_size": 2,
    }


@pytest.mark.slow
def test_a_compiled_trainer_is_recorded_and_its_contract_says_so():
    run = train("--steps", "1", config={"torch_compile": True}, capture="logprobs")
    found = rows(run, 'SELECT "pass", count(*), sum(len(logprobs)) FROM scores GROUP BY ALL ORDER BY ALL')
    ((tokens,),) = rows(run, "SELECT sum(num_response_tokens) FROM sequences")
    assert found == [("current", 8, tokens), ("train", 8, tokens)]
    contracts = [
        json.loads(text)
        for (text,) in rows(run, "SELECT contract_json FROM passes WHERE \"pass\" IN ('train', 'current')")
    ]
    assert [contract["torch_compile"] for contract in contracts] == [True, True]
