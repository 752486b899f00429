"""Recording TRL's AsyncGRPOTrainer, whose samples a thread takes from vLLM meanwhile."""

import gc
import json
import queue
import shutil
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from runs import program
from tim_trace.analysis.stats import stats
from tim_trace.analysis.views import connect
from tim_trace.replay.arms import AS_RECORDED
from tim_trace.replay.engine import replay
from tim_trace.replay.gradients.engine import gradient
from tim_trace.replay.results import by_arm
from tim_trace.schemas.loss import Loss, read_loss
from tim_trace.tracer.hooks.session import Order, Session
from tim_trace.tracer.hooks.trl_async import SampleQueue
from tim_trace.tracer.hooks.trl_batches import PackedSample, of_bytes, to_bytes

SILENT = (("TRL_EXPERIMENTAL_SILENCE", "1"),)
TOOL = [12, 13]

FORWARDS = """
    SELECT step, forward_id, list(logprobs), list(entropy), list(rollout), list(advantage)
    FROM scores JOIN sequences USING (step, seq_id)
    JOIN (SELECT step, seq_id, logprobs AS rollout FROM scores WHERE "pass" = 'rollout') USING (step, seq_id)
    WHERE "pass" = 'train' GROUP BY ALL ORDER BY forward_id
"""


@pytest.fixture(scope="module")
def recorded():
    return program("asynchronous.py", capture="logprobs", env=SILENT)


def ask(run, query):
    return connect(run.trace).execute(query).fetchall()


def by_forward(run):
    """Step -> of each packed row the tokens' log ratios, entropies and advantages."""
    found = defaultdict(list)
    for step, _, train, entropy, rollout, advantages in ask(run, FORWARDS):
        cells = [
            (np.float32(a) - np.float32(b), h, advantage)
            for rows in zip(train, entropy, rollout, advantages, strict=True)
            for a, h, b, advantage in zip(*rows[:3], [rows[3]] * len(rows[0]), strict=True)
            if a is not None
        ]
        found[step].append([np.array(column, np.float32) for column in zip(*cells, strict=True)])
    return found


@pytest.mark.slow
@pytest.mark.engine
def test_ratios_entropies_and_clips_of_every_packed_row_are_what_trl_logged(recorded):
    forwards = by_forward(recorded)
    logged = [entry for entry in recorded.result["log"] if "kl" in entry]
    assert len(logged) == len(forwards) == 4
    for step, entry in enumerate(logged, 1):
        rows = forwards[step]
        assert len(rows) == 2
        ratios = [np.exp(d) for d, _, _ in rows]
        clipped = [
            ((ratio < 0.8) & (advantage < 0)) | ((ratio > 1.2) & (advantage > 0))
            for ratio, (_, _, advantage) in zip(ratios, rows, strict=True)
        ]
        expected = {
            "kl": [(ratio - 1 - d).mean() for ratio, (d, _, _) in zip(ratios, rows, strict=True)],
            "ratio": [ratio.mean() for ratio in ratios],
            "entropy": [entropy.mean() for _, entropy, _ in rows],
            "clip_ratio/region_mean": [row.mean() for row in clipped],
        }
        for name, values in expected.items():
            assert np.mean(values) == pytest.approx(entry[name], rel=1e-5, abs=1e-7), (step, name)
    assert logged[1]["kl"] > 1e-4


@pytest.mark.slow
@pytest.mark.engine
def test_stats_like_trl_over_the_rollout_are_its_clips(recorded):
    found = stats(recorded.trace, pair="rollout:train", by="step", like="trl", logging_steps=1).dicts()
    logged = [entry for entry in recorded.result["log"] if "kl" in entry]
    for name in ("low_mean", "high_mean", "region_mean"):
        values = [row[f"clip_ratio/{name}"] for row in found]
        assert values == pytest.approx([entry[f"clip_ratio/{name}"] for entry in logged], rel=1e-5, abs=1e-9)


@pytest.mark.slow
@pytest.mark.engine
def test_both_sides_tell_the_updates_that_their_weights_have_seen(recorded):
    found = ask(recorded, 'SELECT "pass", step, max(policy_version), min(policy_version) FROM scores GROUP BY ALL')
    versions = {(name, step): (low, high) for name, step, high, low in found}
    for step in range(1, 5):
        assert versions["train", step] == versions["current", step] == (step - 1, step - 1)
        assert 0 <= versions["rollout", step][0] <= versions["rollout", step][1] <= step - 1
    assert any(versions["rollout", step][0] < step - 1 for step in range(2, 5))
    same = ask(
        recorded,
        "SELECT max(abs(d)) FROM tokens JOIN scores USING (step, seq_id) JOIN sequences USING (step, seq_id) "
        "WHERE \"pass\" = 'train' AND scores.policy_version = sequences.policy_version",
    )
    assert same[0][0] < 1e-5


@pytest.mark.slow
@pytest.mark.engine
def test_sequences_are_the_trained_samples_and_no_token_of_the_tool_has_a_score(recorded):
    rows = ask(
        recorded,
        "SELECT group_id, prompt_ids, response_ids, response_mask, advantage, reward, rewards, "
        "(SELECT list(logprobs) FROM scores s WHERE s.step = q.step AND s.seq_id = q.seq_id) FROM sequences q",
    )
    assert len(rows) == 64
    groups = defaultdict(list)
    for group, prompt, response, mask, advantage, reward, rewards, passes in rows:
        groups[group].append((tuple(prompt), advantage))
        places = [place for place, counts in enumerate(mask) if not counts]
        assert [response[place] for place in places] == TOOL
        for logprobs in passes:
            assert [place for place, value in enumerate(logprobs) if value is None] == places
        assert len(passes) == 3
        assert rewards == {"digits": reward}
    for members in groups.values():
        assert len(members) == 4
        assert len({prompt for prompt, _ in members}) == 1
        assert sum(advantage for _, advantage in members) == pytest.approx(0, abs=1e-5)
    # TRL averages a packed row's rewards when it is made, which is one row ahead of the loss.
    query = """
        SELECT avg(reward) FROM sequences JOIN scores USING (step, seq_id) WHERE "pass" = 'train' GROUP BY forward_id
        ORDER BY forward_id
    """
    means = [mean for (mean,) in ask(recorded, query)]
    logged = [entry["reward"] for entry in recorded.result["log"] if "reward" in entry]
    assert [np.mean(means[:3]), np.mean(means[3:5]), np.mean(means[5:7])] == pytest.approx(logged[:3])


@pytest.mark.slow
@pytest.mark.engine
def test_weights_of_every_version_are_kept_and_the_engine_was_given_them(recorded):
    rows = ask(
        recorded,
        "SELECT policy_version, count(*), count(given), sum((given = trainer)::INT) FROM engine_weights GROUP BY ALL ORDER BY 1",
    )
    assert [row[0] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row[1:] == (24, 24, 24) for row in rows)
    assert sorted(path.name for path in (recorded.trace / "weights").glob("*-*"))


@pytest.mark.slow
@pytest.mark.engine
def test_contracts_and_the_loss_say_how_the_numbers_came_about(recorded):
    query = 'SELECT DISTINCT "pass", contract_json FROM passes JOIN scores USING (run, "pass", contract)'
    contracts = {name: json.loads(text) for name, text in ask(recorded, query)}
    assert contracts["rollout"]["function"] == "vllm.LLM.generate"
    assert contracts["train"]["packing"] == "prefix_tree"
    assert contracts["train"]["scoring_function"].endswith("AsyncGRPOTrainer.compute_loss")
    values = {
        name.removeprefix("hyperparameter/"): value if value is not None else text
        for name, value, text in ask(
            recorded, "SELECT name, value, text FROM metrics WHERE name LIKE 'hyperparameter/%'"
        )
    }
    assert read_loss(values) == Loss(denominator="rollout", aggregation="micro_token_mean")
    assert "not recorded" not in recorded.done.stderr


@pytest.mark.slow
@pytest.mark.engine
def test_every_bit_of_a_packed_row_and_its_gradient_come_back(recorded, tmp_path):
    trace = shutil.copytree(recorded.trace, tmp_path / "run")
    first, *others = by_arm(replay(trace, arm=["batch-size=1", "dtype=fp64", "padding=packed"]))
    assert (first.share_equal, first.max_abs_d) == (1.0, 0.0)
    assert all(0 < arm.max_abs_d < 2e-6 for arm in others)
    steps = [step for step in gradient(trace).steps if step.arm == AS_RECORDED]
    assert len(steps) == 4
    for step in steps:
        # The backward of two attentions that give the same bits may add in another order.
        assert step.grad_norm == pytest.approx(step.logged_norm, rel=1e-6)


def sample(ids, mask, **more):
    settings = {"name": "7", "group": "3", "policy_version": 2, "advantage": 0.5, "rewards": {"reward": 1.0}} | more
    return PackedSample(ids=np.array(ids), mask=np.array(mask), **settings)


def test_samples_come_out_of_a_batch_s_bytes_as_they_went_in():
    rows = [
        [
            sample([3, 4, 5, 12, 13, 6], [0, 0, 1, 0, 0, 1]),
            sample([300, 70000, 2], [0, 1, 1], policy_version=None, rewards={}),
        ],
        [sample([5, 6], [0, 1], name="a\nb", rewards={"reward": float("nan"), "digits": -1.0})],
    ]
    tensor = to_bytes(rows)
    assert tensor.shape[0] == 2
    for row, samples in zip(tensor, rows, strict=True):
        found = of_bytes(row).samples
        assert len(found) == len(samples)
        for one, other in zip(found, samples, strict=True):
            assert one.ids.tolist() == other.ids.tolist()
            assert one.mask.tolist() == other.mask.tolist()
            assert (one.name, one.group, one.policy_version, one.advantage) == (
                other.name, other.group, other.policy_version, other.advantage,
            )  # fmt: skip
            np.testing.assert_equal(dict(one.rewards), dict(other.rewards))


def test_terms_of_the_loss_are_found_in_the_responses():
    row = of_bytes(to_bytes([[sample([3, 4, 5, 12, 13, 6], [0, 0, 1, 0, 0, 1]), sample([9, 8], [1, 1])]])[0])
    assert [sample.first for sample in row.samples] == [2, 1]
    assert row.lengths.tolist() == [4, 1]
    assert [places.tolist() for places in row.terms] == [[0, 0, 1], [0, 3, 0]]
    assert row.scored.tolist() == [[True, False, False, True], [True, False, False, False]]


def test_a_queue_knows_the_version_of_a_sample_for_as_long_as_somebody_has_it(tmp_path):
    given = queue.Queue()
    heard = SampleQueue(Session(Order(run=str(tmp_path))), given)
    for version in (3, 5):
        given.put(SimpleNamespace(input_ids=np.arange(version), model_version=version))
    first, second = heard.get(timeout=1), heard.get()
    assert (heard.version(first.input_ids), heard.version(second.input_ids)) == (3, 5)
    assert heard.qsize() == 0
    ids = second.input_ids
    del first, second
    gc.collect()
    assert list(heard._versions.values()) == [5]
    assert heard.version(ids) == 5
