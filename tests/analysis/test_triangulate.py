"""Who is wrong, on errors that were put in by hand and on a real run."""

import shutil

import numpy as np
import pytest
from builders import tim_trace
from runs import train as train_with_trl
from tim_trace.analysis.replay_text import triangulation_sentence
from tim_trace.analysis.triangulate import triangulate
from tim_trace.schemas.errors import InvalidOption, NothingToCompare
from tim_trace.tracer.recorder import Recorder


def make_trace(path, error_t, error_r, reference=None, mask=None, arm=None, identity=None, groups=None):
    """A trace whose trainer and engine lie off an exact reference by errors given a token, [sequences][tokens]."""
    rows, tokens = np.shape(error_t)
    exact = np.full((rows, tokens), -1.0) if reference is None else np.asarray(reference)
    with Recorder(path) as recorder:
        recorder.describe(model={"class": "none.None", "config": {"model_type": "none"}})
        batch = recorder.add_sequences(
            step=1,
            response_ids=np.zeros((rows, tokens), int),
            prompt_ids=np.zeros((rows, 1), int),
            response_mask=mask,
            group_ids=groups,
        )
        values = {"train": exact + error_t, "rollout": exact + error_r, "replay/fp64": exact}
        values |= {"replay/as-recorded": exact + (error_t if identity is None else identity)} | (
            {} if arm is None else {"replay/bf16": exact + arm}
        )
        for name, logprobs in values.items():
            recorder.add_scores(name, batch, logprobs=logprobs.astype(np.float32))
    return path


# Powers of two: float32 holds the logprobs exactly.
T, R = 2.0**-10, 2.0**-8


def test_shares_are_what_the_formula_says(tmp_path):
    found = triangulate(make_trace(tmp_path / "run", [[T, -T], [T, -T]], [[R, R], [R, R]]))
    # The errors are uncorrelated: mean d^2 = T^2 + R^2.
    assert found.gap_rms == pytest.approx(np.sqrt(T**2 + R**2), rel=1e-12)
    assert [side.rms for side in found.sides] == pytest.approx([T, R], rel=1e-12)
    assert [side.share for side in found.sides] == pytest.approx(
        [T**2 / (T**2 + R**2), R**2 / (T**2 + R**2)], rel=1e-12
    )
    assert "engine accounts for 94.1%" in triangulation_sentence(found)


def test_an_error_that_both_share_is_no_part_of_the_gap(tmp_path):
    found = triangulate(make_trace(tmp_path / "run", [[R + T, R - T]], [[R, R]]))
    assert found.gap_rms == pytest.approx(T, rel=1e-12)
    assert [side.share for side in found.sides] == pytest.approx([1.0, 0.0], abs=1e-12)
    assert "trainer accounts for 100.0%" in triangulation_sentence(found)


def test_two_equal_sides_are_told_as_both(tmp_path):
    found = triangulate(make_trace(tmp_path / "run", [[T, -T]], [[T, T]]))
    assert "Both sides account for the mismatch: the trainer for 50%" in triangulation_sentence(found)


def test_no_gap_is_said_plainly(tmp_path):
    found = triangulate(make_trace(tmp_path / "run", [[T, T]], [[T, T]]))
    assert triangulation_sentence(found).startswith("No mismatch")
    assert np.isnan(found.sides[0].share)


def test_an_arm_removes_what_the_gap_is_smaller_with_it(tmp_path):
    # The arm halves the trainer's distance to the engine: three quarters of the mean square are gone.
    trace = make_trace(tmp_path / "run", [[0, 0], [0, 0]], [[R, R], [R, R]], arm=[[R / 2, R / 2], [R / 2, R / 2]])
    ((name, gap, removed, low, high),) = triangulate(trace, arm=["dtype=bf16"]).arms.rows
    assert (name, gap) == ("replay/bf16", R / 2)
    assert removed == pytest.approx(0.75, rel=1e-12)
    assert (low, high) == (None, None)


def test_few_groups_and_groups_that_agree_leave_no_interval(tmp_path):
    few = triangulate(make_trace(tmp_path / "few", [[T, -T]] * 7, [[R, R]] * 7))
    assert (few.num_groups, few.no_interval, few.sides[0].share_low) == (7, "fewer than 8 groups", None)
    assert triangulation_sentence(few).endswith("; no interval: fewer than 8 groups).")
    alike = triangulate(make_trace(tmp_path / "alike", [[T, -T]] * 8, [[R, R]] * 8))
    assert (alike.num_groups, alike.no_interval) == (8, "every group gives the same value")


def test_sequences_of_a_prompt_are_resampled_together(tmp_path):
    # Sequences of a prompt are copies of each other: eight of them tell no more than one.
    draw = np.random.default_rng(0)
    errors = [draw.normal(0, 1e-3 * draw.lognormal(0, 0.5, (12, 1)), (12, 30)) for _ in range(2)]
    alone = triangulate(make_trace(tmp_path / "alone", *errors))
    prompts = [str(row // 8) for row in range(96)]
    grouped = triangulate(make_trace(tmp_path / "grouped", *(np.repeat(e, 8, axis=0) for e in errors), groups=prompts))
    apart = triangulate(make_trace(tmp_path / "apart", *(np.repeat(e, 8, axis=0) for e in errors)))
    assert (alone.num_groups, grouped.num_groups, apart.num_groups) == (12, 12, 96)
    for one, same, narrow in zip(alone.sides, grouped.sides, apart.sides, strict=True):
        # Groups are drawn in another order.
        width = one.share_high - one.share_low
        assert (same.share_low, same.share_high) == pytest.approx((one.share_low, one.share_high), abs=0.1 * width)
        assert narrow.share_high - narrow.share_low < 0.5 * width
    assert "95% CI over 12 groups" in triangulation_sentence(grouped) or "Both sides" in triangulation_sentence(grouped)


def test_masked_tokens_do_not_count(tmp_path):
    found = triangulate(make_trace(tmp_path / "run", [[0, 0.5]], [[R, 0]], mask=[[1, 0]]))
    assert found.num_tokens == 1
    assert found.gap_rms == R


def test_the_shares_add_up_and_have_intervals(tmp_path):
    draw = np.random.default_rng(0)
    exact = -draw.exponential(2.0, (20, 30))
    noise = [draw.normal(0, 1e-3, (20, 30)) for _ in range(2)]
    found = triangulate(make_trace(tmp_path / "run", *noise, reference=np.minimum(exact, -0.01)))
    assert found.num_tokens == 600
    assert sum(side.share for side in found.sides) == pytest.approx(1.0)
    for side in found.sides:
        assert side.share_low < side.share < side.share_high


def test_a_replay_that_did_not_give_the_bits_back_is_told(tmp_path):
    assert triangulate(make_trace(tmp_path / "held", [[T, T]], [[R, R]])).identity_held
    assert not triangulate(make_trace(tmp_path / "broken", [[T, T]], [[R, R]], identity=[[T, R]])).identity_held


def test_a_reference_that_reproduces_neither_side_attributes_nothing(tmp_path):
    off = np.array([[0.5, -0.25], [0.25, 0.5]])  # the reference has other weights than both sides
    found = triangulate(make_trace(tmp_path / "run", off, off + R, identity=np.zeros((2, 2))))
    assert [side.share for side in found.sides] == [None, None]
    assert triangulation_sentence(found).startswith(
        "Cannot attribute the mismatch: the reference reproduces neither trainer nor engine (mean |error| 0.38 and 0.38 nats"
    )
    # An engine that agrees with the reference is no such case: the trainer computes something else.
    found = triangulate(make_trace(tmp_path / "trainer", off, np.full((2, 2), R), identity=np.zeros((2, 2))))
    assert triangulation_sentence(found).startswith("The trainer accounts for")
    # Two sides that are wrong in different ways can be told apart.
    other = np.array([[0.25, 0.5], [0.5, -0.25]])
    found = triangulate(make_trace(tmp_path / "both", off, other, identity=np.zeros((2, 2))))
    assert triangulation_sentence(found).startswith("Both sides account")


def test_a_replay_that_differs_in_the_last_digits_says_by_how_much(tmp_path):
    found = triangulate(make_trace(tmp_path / "run", [[T, T]], [[R, 2 * R]], identity=[[T, T + 2.0**-20]]))
    assert (found.identity_held, found.identity_mean_abs_d) == (False, 2.0**-21)
    assert "not bitwise: mean |d| is only 5e-07 nats, less than 1% of the mismatch" in str(found)


def test_wrong_use_is_explained(tmp_path):
    trace = make_trace(tmp_path / "run", [[T]], [[R]])
    with pytest.raises(InvalidOption, match="use fp64 or fp32"):
        triangulate(trace, reference="bf16")
    with Recorder(tmp_path / "alone") as recorder:
        recorder.describe(model={"config": {"model_type": "none"}})
        batch = recorder.add_sequences(step=1, response_ids=[[1]], prompt_ids=[[1]])
        recorder.add_scores("train", batch, logprobs=[[-1.0]])
    with pytest.raises(NothingToCompare, match="no rollout logprobs"):
        triangulate(tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.engine
def test_a_bfloat16_engine_is_found_beside_a_float32_trainer(tmp_path):
    run = train_with_trl("--vllm", "--bf16-engine", config={"temperature": 0.8}, capture="topk:3", fraction="0.5")
    shutil.copytree(run.trace, tmp_path / "run")
    done = tim_trace("triangulate", tmp_path / "run", "--arm", "dtype=bf16", "--json")
    assert done.code == 0, done.stderr
    found = done.json()
    assert found["identity_held"]
    assert found["sides"][1]["share"] > 0.99
    assert found["sides"][0]["rms"] < 1e-5 < found["gap_rms"]
    text = tim_trace("triangulate", tmp_path / "run").stdout
    assert text.startswith("The engine accounts for ")
