"""What a remedy would leave, on mismatches that were put in by hand and on a real run."""

import csv
import io
import json

import numpy as np
import pytest
from builders import in_process
from tim_trace.analysis.triangulate import triangulate
from tim_trace.schemas.errors import InvalidOption
from tim_trace.tracer.recorder import Recorder

GROUPS, ROWS, TOKENS = 8, 4, 40
METRICS = ["mean_abs_d", "k3", "share_outside", "ess_token", "relative_abs_bias"]


def make_run(path, *, steps=24, replayed=(), factor=0.1, spread=0.05, decode=1.0, advantage=True, groups=GROUPS,
             lag=None, is_left_constant=False):  # fmt: skip
    """Write a trace whose engine lies off the trainer by noise, and off the arm of both sides by `factor` times as much.

    The arm's replays, and the engine's as `decode`, exist at the `replayed` steps. Return mean |d| that the arm leaves at
    the other steps.
    """
    draw = np.random.default_rng(0)
    left = []
    with Recorder(path) as recorder:
        recorder.describe(model={"class": "none.None", "config": {"model_type": "none"}})
        for step in range(1, steps + 1):
            shape = (groups * ROWS, TOKENS)
            train = -draw.exponential(1.0, shape).astype(np.float32) - np.float32(1)
            level = 0.02 * np.exp(draw.normal(0, spread))
            rollout = (train - draw.normal(0, level, shape)).astype(np.float32)
            off = draw.normal(0, 0.02 if is_left_constant else level, shape)
            changed = (train - factor * off).astype(np.float32)
            more = {"advantage": draw.normal(0, 1, len(train))} if advantage else {}
            batch = recorder.add_sequences(
                step=step, prompt_ids=np.zeros((len(train), 1), int), response_ids=np.zeros(shape, int),
                group_ids=[str(row // ROWS) for row in range(len(train))], policy_version=step if lag is None else step - lag(step),
                **more,
            )  # fmt: skip
            recorder.add_scores("train", batch, logprobs=train, policy_version=step)
            recorder.add_scores("rollout", batch, logprobs=rollout)
            if step in replayed:
                recorder.add_scores("replay/fp64", batch, logprobs=train)
                recorder.add_scores("replay/as-recorded", batch, logprobs=train)
                engine = "decode" if lag is None else f"decode+weights-version-{step - lag(step)}"
                changed_engine = "fp16+decode" if lag is None else f"decode+weights-version-{step + 1}"
                repeated = (train + decode * (rollout - train)).astype(np.float32)
                recorder.add_scores("replay/fp16", batch, logprobs=train)
                recorder.add_scores(f"replay/{engine}", batch, logprobs=repeated)
                recorder.add_scores(f"replay/{changed_engine}", batch, logprobs=changed)
            else:
                left.append(np.abs(train.astype(float) - changed).mean())
    return float(np.mean(left)) if left else 0.0


def predicted(path, steps, *remedies, engine="mode=decode"):
    found = triangulate(path, steps=",".join(map(str, steps)), predict=remedies or ["dtype=fp16"], engine=engine)
    return {(each.remedy, each.metric): each for each in found.predictions}


@pytest.mark.parametrize("steps", [(5,), (3, 9, 15, 21), range(1, 24, 2)], ids=["one step", "few", "many"])
def test_the_interval_holds_what_the_remedy_leaves_at_the_other_steps(tmp_path, steps):
    left = make_run(tmp_path / "run", replayed=steps)
    found = predicted(tmp_path / "run", steps)
    assert [metric for _, metric in found] == METRICS
    size = found["dtype=fp16", "mean_abs_d"]
    assert size.code is None
    assert size.low < left < size.high
    assert size.value == pytest.approx(0.1 * size.recorded, rel=0.1)
    k3, ess = found["dtype=fp16", "k3"], found["dtype=fp16", "ess_token"]
    assert k3.low < 0.01 * k3.recorded < k3.high
    assert 1 - ess.value == pytest.approx(0.01 * (1 - ess.recorded), rel=0.2)
    assert (ess.low, ess.high) == pytest.approx((1 - 2 * k3.high, 1 - 2 * k3.low), rel=1e-5)


def test_what_does_not_follow_the_recorded_mismatch_is_not_scaled_with_it(tmp_path):
    left = make_run(tmp_path / "run", replayed=range(1, 24, 2), spread=0.5, is_left_constant=True)
    size = predicted(tmp_path / "run", range(1, 24, 2))["dtype=fp16", "mean_abs_d"]
    assert size.code is None
    assert size.low < left < size.high
    assert size.high < 1.1 * size.low


def test_one_step_is_too_little_where_steps_differ(tmp_path):
    make_run(tmp_path / "run", replayed=(5,), spread=0.5)
    found = predicted(tmp_path / "run", (5,))["dtype=fp16", "mean_abs_d"]
    assert found.code == "wide"
    assert found.low < found.value < found.high
    assert float(found.detail) == pytest.approx((found.high - found.low) / found.value, rel=0.1)


def test_zero_is_predicted_only_for_equal_bits(tmp_path):
    make_run(tmp_path / "equal", replayed=(5,), factor=0.0)
    for (_, metric), each in predicted(tmp_path / "equal", (5,)).items():
        nothing = 1.0 if metric == "ess_token" else 0.0
        assert (each.value, each.low, each.high, each.code) == (nothing, nothing, nothing, None)
    make_run(tmp_path / "near", replayed=(5,), factor=1e-3)
    found = predicted(tmp_path / "near", (5,))
    assert found["dtype=fp16", "mean_abs_d"].low > 0
    assert found["dtype=fp16", "share_outside"].code == "none_seen"


def test_what_is_left_is_compared_with_what_others_could_not_feel(tmp_path):
    make_run(tmp_path / "run", replayed=(3, 9, 15))
    found = predicted(tmp_path / "run", (3, 9, 15))
    assert found["dtype=fp16", "mean_abs_d"].below == "IsoExec, vllm.ai 2026-08-21"
    assert found["dtype=fp16", "k3"].below == "Miles and SGLang, All-in-One"
    make_run(tmp_path / "large", replayed=(3, 9, 15), factor=1.2)
    found = predicted(tmp_path / "large", (3, 9, 15))
    assert found["dtype=fp16", "mean_abs_d"].below is found["dtype=fp16", "k3"].below is None


@pytest.mark.parametrize(
    ("code", "changes", "remedy"),
    [
        ("few_groups", {"groups": 7}, "dtype=fp16"),
        ("engine_differs", {"decode": 0.5}, "dtype=fp16"),
        ("engine_unknown", {}, "dtype=fp16"),
        ("same_execution", {}, "dtype=fp16,mode=prefill"),
        ("not_replayed", {}, "rollout:dtype=bf16"),
        ("mixed_versions", {"lag": lambda step: step % 2}, "dtype=fp16"),
    ],
)
def test_it_says_why_it_cannot_tell(tmp_path, code, changes, remedy):
    make_run(tmp_path / "run", replayed=(5, 6), **changes)
    steps = (5,) if code in ("few_groups", "same_execution") else (5, 6)
    engine = None if code == "engine_unknown" else "mode=decode"
    if code == "same_execution":
        engine = "mode=prefill"
    found = predicted(tmp_path / "run", steps, remedy, engine=engine)
    assert {(each.code, each.value) for each in found.values()} == {(code, None)}
    assert all(each.recorded is not None for each in found.values())


def test_a_side_that_stays_needs_no_engine(tmp_path):
    make_run(tmp_path / "run", replayed=(5,))
    found = predicted(tmp_path / "run", (5,), "train:dtype=fp16", engine=None)
    size = found["train:dtype=fp16", "mean_abs_d"]
    assert size.code is None
    assert size.low == size.value == size.high == size.recorded


def test_only_the_objective_s_bias_needs_advantages(tmp_path):
    make_run(tmp_path / "run", replayed=(5,), advantage=False)
    codes = {metric: each.code for (_, metric), each in predicted(tmp_path / "run", (5,)).items()}
    assert codes["relative_abs_bias"] == "no_advantages"
    assert codes["mean_abs_d"] is None


def test_one_more_sync_is_a_change_of_the_engine_s_weights(tmp_path):
    # The engine lags by a step. At step 5, it is repeated with the weights of version 4, and with version 6.
    make_run(tmp_path / "run", replayed=(5,), lag=lambda step: 1)
    found = predicted(tmp_path / "run", (5,), "rollout:weights-version=6")["rollout:weights-version=6", "mean_abs_d"]
    size = 0.02 * np.sqrt(2 / np.pi)
    assert found.recorded == pytest.approx(size, rel=0.1)
    assert found.value == pytest.approx(0.1 * size, rel=0.1)


def test_predictions_are_for_steps_that_are_not_replayed(tmp_path):
    make_run(tmp_path / "run", steps=2, replayed=(1, 2))
    with pytest.raises(InvalidOption, match="steps that are not replayed; choose fewer"):
        triangulate(tmp_path / "run", predict=["dtype=fp16"])
    with pytest.raises(InvalidOption, match="has no effect without"):
        triangulate(tmp_path / "run", engine="mode=decode")


def test_the_command_prints_a_table_per_remedy_json_and_csv(tmp_path):
    make_run(tmp_path / "run", replayed=(3, 9, 15))
    words = [
        "triangulate",
        str(tmp_path / "run"),
        "--steps",
        "3,9,15",
        "--predict",
        "dtype=fp16",
        "--engine",
        "mode=decode",
    ]
    text = in_process(words).stdout
    assert "dtype=fp16: predicted for the other steps, with 90% intervals" in text
    assert "none_seen: cannot tell" in text
    assert max(map(len, text.partition("dtype=fp16:")[2].splitlines())) <= 80
    rows = list(csv.DictReader(io.StringIO(in_process([*words, "--by", "prediction", "--csv"]).stdout)))
    assert [row["metric"] for row in rows] == METRICS
    found = json.loads(in_process([*words, "--json"]).stdout)["predictions"]
    assert [float(row["low"] or "nan") for row in rows] == pytest.approx(
        [float("nan") if each["low"] is None else each["low"] for each in found], nan_ok=True
    )
