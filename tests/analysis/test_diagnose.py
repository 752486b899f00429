"""A diagnosis: what it runs, what it holds figures against, and what replays settle."""

import math

import numpy as np
import pytest
from bigrams import BOTH_FP32, FP32, HOT, VLLM_BF16, Recording, bfloat16, in_bfloat16, sample, table
from builders import tim_trace
from tim_trace.analysis.diagnosis.diagnose import diagnose
from tim_trace.analysis.stats import stats
from tim_trace.schemas.errors import NothingToCompare
from tim_trace.tracer.recorder import Recorder

BF16 = Recording(rollout=in_bfloat16, contracts={"train": FP32, "rollout": VLLM_BF16})


def test_a_healthy_run_is_normal_and_says_what_it_was_computed_in(tmp_path):
    found = diagnose(BF16.write(tmp_path / "trace"))
    assert found.checked.is_valid
    assert found.numerics.declared == ("float32", "bfloat16")
    assert found.numerics.logits == ("float32", "bfloat16")
    assert "it is normal" in found.normal
    assert not any(each.sounds for each in found.alarms)


def test_its_figures_are_those_of_stats(tmp_path):
    trace = HOT.write(tmp_path / "trace")
    found, rows = diagnose(trace).metrics, stats(trace).dicts()[0]
    for name in ("k1", "k3", "mean_abs_d", "rms_d", "max_abs_d", "share_outside", "prob_diff_mean", "ess_token"):
        assert found[name] == pytest.approx(rows[name], rel=1e-12), name
    assert found["chi2_token"] == pytest.approx(rows["chi2_token"], rel=1e-9)
    nemo = stats(trace, like="nemo-rl").dicts()[0]
    assert found["mean_exp_abs_d"] == pytest.approx(nemo["token_mult_prob_error"], rel=1e-6)


def test_alarms_sound_under_their_own_definitions(tmp_path):
    loud = Recording(train=lambda step, number: step.scored(step.logits / 3))
    found = {(each.alarm.who, each.alarm.metric): each for each in diagnose(loud.write(tmp_path / "trace")).alarms}
    assert found["verl", "prob_diff_mean"].sounds
    assert found["NeMo-RL", "mean_exp_abs_d"].sounds
    assert found["NeMo-RL", "mean_exp_abs_d"].own > 1.05


def test_a_fault_is_no_matter_of_numerics(tmp_path):
    found = diagnose(HOT.write(tmp_path / "trace"))
    assert "not valid" in found.normal
    assert any("--temperature 0.9" in command for command in found.next)


def test_a_replay_in_the_trace_settles_it(tmp_path):
    with Recorder(tmp_path / "trace") as recorder:
        for name, contract in BOTH_FP32.items():
            recorder.add_contract(name, contract)
        recorder.add_contract("replay/hot", {"engine": "trl", "arm": {"temperature": 0.9}})
        recorder.add_contract("replay/bf16", {"engine": "trl", "arm": {"dtype": "bf16"}})
        step = sample(table(), 1)
        batch = recorder.add_sequences(
            step=1, prompt_ids=[p.tolist() for p in step.prompts], response_ids=[r.tolist() for r in step.responses]
        )
        recorder.add_scores("rollout", batch, logprobs=step.scored(step.logits / 0.9))
        recorder.add_scores("train", batch, logprobs=step.scored())
        recorder.add_scores("replay/hot", batch, logprobs=step.scored(step.logits / 0.9))
        recorder.add_scores("replay/bf16", batch, logprobs=step.scored(bfloat16(step.logits)))
    found = diagnose(tmp_path / "trace")
    hot, rounded = found.replays
    assert (hot.arm, rounded.arm) == ("hot", "bf16")
    assert hot.removed == 1
    assert "it is what makes the gap" in hot.sentence
    d = np.concatenate(step.scored()).astype(float) - np.concatenate(step.scored(step.logits / 0.9))
    assert hot.gap_rms == pytest.approx(math.sqrt(np.mean(d * d)), rel=1e-12)
    assert rounded.removed < 0.1
    assert found.next == ()


def test_the_command_tells_it_and_its_exit_code(tmp_path):
    done = tim_trace("diagnose", BF16.write(tmp_path / "healthy"))
    assert done.code == 0
    for title in ("IS IT VALID?", "WHAT WAS COMPUTED IN?", "IS IT NORMAL?", "WHICH ALARMS SOUND?"):
        assert title in done.stdout
    told = tim_trace("diagnose", HOT.write(tmp_path / "hot"), "--json")
    assert told.code == 1
    assert told.json()["checked"]["findings"][0]["code"] == "temperature"
    assert told.json()["metrics"]["rms_d"] > 0.01


def test_nothing_to_compare_is_said(tmp_path):
    with Recorder(tmp_path / "trace") as recorder:
        recorder.add_sequences(step=1, response_ids=[[1]])
    with pytest.raises(NothingToCompare):
        diagnose(tmp_path / "trace")
