"""A diagnosis: what it runs, what it holds figures against, and what replays settle."""

import math
from dataclasses import replace

import numpy as np
import pytest
from bigrams import BOTH_FP32, FP32, HOT, VLLM_BF16, Recording, bfloat16, in_bfloat16, moved, sample, table
from builders import tim_trace
from tim_trace.analysis.check.check import judge
from tim_trace.analysis.check.faults import FAULTS
from tim_trace.analysis.diagnosis import diagnose as diagnose_module
from tim_trace.analysis.diagnosis.diagnose import diagnose, removed_interval
from tim_trace.analysis.diagnosis.text import diagnosis_text, effect_text, size_text
from tim_trace.analysis.rows import result_json
from tim_trace.analysis.stats import stats
from tim_trace.schemas.errors import NothingToCompare
from tim_trace.tracer.recorder import Recorder

BF16 = Recording(rollout=in_bfloat16, contracts={"train": FP32, "rollout": VLLM_BF16})


def test_a_healthy_run_is_normal_and_says_what_it_was_computed_in(tmp_path):
    found = diagnose(BF16.write(tmp_path / "trace"))
    assert found.checked.is_valid
    assert found.numerics.declared == ("float32", "bfloat16")
    assert found.numerics.logits == ("float32", "bfloat16")
    assert found.size.code == "below"
    assert "): normal." in size_text(found.size, is_valid=True)
    assert not found.alarms.raised


@pytest.mark.slow
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
    found = {
        (each.alarm.who, each.alarm.metric): each for each in diagnose(loud.write(tmp_path / "trace")).alarms.judged
    }
    assert found["verl", "prob_diff_mean"].is_raised
    assert found["NeMo-RL", "mean_exp_abs_d"].is_raised
    assert found["NeMo-RL", "mean_exp_abs_d"].own > 1.05


def test_a_fault_is_no_matter_of_numerics(tmp_path):
    found = diagnose(HOT.write(tmp_path / "trace"))
    assert "cannot tell until the fault is fixed" in size_text(found.size, is_valid=found.checked.is_valid)
    assert any("context-odds" in command for command in found.next)  # what a trace without weights can confirm it with


@pytest.mark.parametrize("setting", [{"kv_cache_dtype": "fp8_e4m3"}, {"quantization": "fp8"}])
def test_a_float8_cache_or_weights_are_compared_with_published_values_for_float8(tmp_path, setting):
    run = replace(BF16, contracts={"train": FP32, "rollout": {**VLLM_BF16, **setting}})
    size = diagnose(run.write(tmp_path / "trace")).size
    assert (size.coarser, size.is_inferred) == ("float8", False)


@pytest.mark.parametrize(
    ("contract", "code"),
    [
        ({"engine": "vllm", "arm": {"engine": "vllm", "mode": "decode"}}, "repeats"),
        ({"engine": "vllm", "arm": {"engine": "vllm", "kv_dtype": "fp8"}}, "settles"),
        ({"engine": "trl", "arm": {"mode": "decode"}}, "settles"),
    ],
)
def test_a_replay_by_the_rollout_s_own_engine_alone_is_no_cause(tmp_path, contract, code):
    with Recorder(tmp_path / "trace") as recorder:
        recorder.add_contract("rollout", {"engine": "vllm", "dtype": "bfloat16"})
        recorder.add_contract("train", {"engine": "trl", "dtype": "float32"})
        recorder.add_contract("replay/again", contract)
        step = sample(table(), 1)
        batch = recorder.add_sequences(step=1, response_ids=[r.tolist() for r in step.responses])
        recorder.add_scores("train", batch, logprobs=step.scored())
        for name in ("rollout", "replay/again"):
            recorder.add_scores(name, batch, logprobs=step.scored(bfloat16(step.logits)))
    found = diagnose(tmp_path / "trace")
    assert [replay.code for replay in found.replays] == [code]
    assert (found.settled_by is None) == (code == "repeats")


def test_if_the_recorded_settings_already_remove_the_mismatch_no_other_replay_is_its_cause(tmp_path):
    with Recorder(tmp_path / "trace") as recorder:
        for name, arm in (("replay/as-recorded", {}), ("replay/padding-left", {"padding": "left"})):
            recorder.add_contract(name, {"engine": "transformers", "arm": arm})
        step = sample(table(), 1)
        batch = recorder.add_sequences(step=1, response_ids=[r.tolist() for r in step.responses])
        recorder.add_scores("train", batch, logprobs=step.scored(moved(step.logits, 3, 0.5)))
        for name in ("rollout", "replay/padding-left", "replay/as-recorded"):
            recorder.add_scores(name, batch, logprobs=step.scored())
    (replay,) = diagnose(tmp_path / "trace").replays
    assert replay.arm == "as-recorded"
    assert "the recorded train logprobs are not those of the recorded weights and tokens" in effect_text(replay)


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
    assert (hot.code, found.settled_by) == ("settles", hot)
    assert effect_text(hot).endswith("the engine's logprobs are at temperature 0.9")
    d = np.concatenate(step.scored()).astype(float) - np.concatenate(step.scored(step.logits / 0.9))
    assert hot.gap_rms == pytest.approx(math.sqrt(np.mean(d * d)), rel=1e-12)
    assert rounded.removed < 0.1
    # It leaves nothing of any sequence: no spread says how sure that is.
    assert (hot.low, hot.high, hot.no_interval) == (None, None, "every group gives the same value")
    assert rounded.low < rounded.removed < rounded.high < 0.1
    assert "none: every group gives the same value" in diagnosis_text(found, verbose=True)
    assert "WHAT DO THE REPLAYS SHOW?" not in diagnosis_text(found)
    assert result_json(found)["replays"][1]["low"] == rounded.low
    assert found.next == (
        "the engine's logprobs are at temperature 0.9: compute both sides' logprobs at one temperature",
    )


def test_weights_that_a_replay_has_found_replace_the_list_of_possible_causes(tmp_path, monkeypatch):
    with Recorder(tmp_path / "trace") as recorder:
        recorder.add_contract("replay/stale", {"engine": "trl", "arm": {"weights_version": 3}})
        step = sample(table(), 1)
        batch = recorder.add_sequences(step=1, response_ids=[r.tolist() for r in step.responses])
        recorder.add_scores("train", batch, logprobs=step.scored())
        for name in ("rollout", "replay/stale"):
            recorder.add_scores(name, batch, logprobs=step.scored(step.logits / 0.9))

    def weights_differ(*given):
        found = judge(*given)
        finding = replace(found.findings[0], code="weights_differ", cause=FAULTS["weights_differ"], side="engine")
        return replace(found, findings=(finding,))

    monkeypatch.setattr(diagnose_module, "judge", weights_differ)
    found = diagnose(tmp_path / "trace")
    assert found.checked.findings[0].title == "the engine has the weights of version 3"
    assert found.next == ("the engine has the weights of version 3: fix the weight sync",)


def test_the_interval_of_what_a_replay_removes_is_never_narrower_than_student_s():
    # Ten sequences add 1 to the gap and a replay leaves 0.1 of it; ten add 3, and it leaves 0.7: R = 8 / 40 = 0.2, the
    # residuals are 0.1 - 0.2 = -0.1 and 0.7 - 0.6 = 0.1, their squares add up to 0.2, the error is sqrt(20 / 19 * 0.2) / 40.
    reach = 2.093 * math.sqrt(20 / 19 * 0.2) / 40
    low, high = removed_interval(np.repeat([1.0, 3.0], 10), np.repeat([0.1, 0.7], 10), np.arange(20))
    assert low < 0.8 - reach * 0.999 < 0.8 + reach * 0.999 < high
    assert [low, high] == pytest.approx([0.8 - reach, 0.8 + reach], abs=0.6 * reach)


def test_its_reach_is_that_of_a_bootstrap_over_groups():
    draw = np.random.default_rng(5)
    of_group = draw.uniform(0.2, 0.6, 100)
    gap = draw.exponential(1.0, 400)
    left = gap * np.repeat(of_group, 4) + draw.exponential(0.1, 400)
    low, high = removed_interval(gap, left, np.repeat(np.arange(100), 4))
    drawn = draw.integers(0, 100, (4000, 100))
    gap_G, left_G = gap.reshape(100, 4).sum(axis=1), left.reshape(100, 4).sum(axis=1)
    removed = 1 - left_G[drawn].sum(axis=1) / gap_G[drawn].sum(axis=1)
    assert [low, high] == pytest.approx(np.quantile(removed, [0.025, 0.975]), abs=0.1 * (high - low))


def test_a_replay_of_one_sequence_has_no_interval(tmp_path):
    with Recorder(tmp_path / "trace") as recorder:
        recorder.add_contract("replay/x", {"engine": "trl", "arm": {"dtype": "bf16"}})
        batch = recorder.add_sequences(step=1, response_ids=[[1, 2]])
        for name, logprobs in (("rollout", [-1.0, -2.0]), ("train", [-1.5, -2.0]), ("replay/x", [-1.25, -2.0])):
            recorder.add_scores(name, batch, logprobs=[logprobs])
    (replay,) = diagnose(tmp_path / "trace").replays
    assert (replay.removed, replay.low, replay.high) == (0.75, None, None)
    assert replay.no_interval == "fewer than 8 groups"


@pytest.mark.slow
def test_the_command_tells_it_and_its_exit_code(tmp_path):
    healthy = BF16.write(tmp_path / "healthy")
    done, verbose = tim_trace("diagnose", healthy), tim_trace("diagnose", healthy, "--verbose")
    assert (done.code, verbose.code) == (0, 0)
    for title in ("IS IT VALID?", "WHICH PRECISION?", "IS IT NORMAL?", "WHICH ALERTS FIRED?"):
        assert title in verbose.stdout
        assert title not in done.stdout
    assert verbose.stdout.startswith(done.stdout.rstrip())
    told = tim_trace("diagnose", HOT.write(tmp_path / "hot"), "--json")
    assert told.code == 1
    assert told.json()["checked"]["findings"][0]["code"] == "temperature"
    assert told.json()["metrics"]["rms_d"] > 0.01


def test_verbose_shows_the_alerts_as_watch_does(tmp_path):
    trace = HOT.write(tmp_path / "hot")
    watched = [line.rstrip() for line in tim_trace("watch", trace, "--once").stdout.splitlines()]
    title = next(place for place, line in enumerate(watched) if line.startswith("FIRST ALERTS"))
    rows = watched[title + 1 : watched.index("", title)]
    assert len(rows) > 3
    verbose = tim_trace("diagnose", trace, "--verbose").stdout
    count = watched[title].removeprefix("FIRST ALERTS  ")
    assert "\n".join(["WHICH ALERTS FIRED?", "", count, *rows, ""]) in verbose


def test_nothing_to_compare_is_said(tmp_path):
    with Recorder(tmp_path / "trace") as recorder:
        recorder.add_sequences(step=1, response_ids=[[1]])
    with pytest.raises(NothingToCompare):
        diagnose(tmp_path / "trace")


def test_a_run_without_engine_logprobs_is_diagnosed_by_its_data(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, 9):
            reward = np.arange(16) % 4 + step % 3
            batch = recorder.add_sequences(
                step=step, prompt_ids=[[1, row // 4] for row in range(16)], response_ids=[[2, 3 + row] for row in range(16)],
                group_ids=[str(row // 4) for row in range(16)], reward=reward, advantage=-(reward - 1.5 - step % 3),
            )  # fmt: skip
            recorder.add_scores("train", batch, logprobs=[[-1.0, -2.0 - row / 16] for row in range(16)])
    found = diagnose(tmp_path / "run")
    assert str(found).startswith(
        "No collapse detected; no pair of passes to compare, but advantages have the wrong sign"
    )
    assert "valid   cannot tell: run has no logprobs from pass 'rollout'" in str(found)
    assert "normal  No mismatch was logged." in str(found)


def test_the_brief_of_a_fault_without_a_drop_has_its_evidence_and_its_first_step(tmp_path):
    def rollout(step, number):
        return [row - np.float32(2.0) * (number > 3) for row in step.scored()]

    run = Recording(rollout=rollout, contracts=BOTH_FP32, steps=8).write(tmp_path / "run")
    text = tim_trace("diagnose", run, "--brief").stdout
    title = diagnose(run).checked.findings[0].title
    assert f"check finds {title}: " in text
    assert "WHERE step IN (3, 4)" in text
