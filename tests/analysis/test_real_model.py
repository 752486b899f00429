"""Verdicts on a healthy run of a pretrained model: what SmolLM2-135M-Instruct and vLLM said in bfloat16."""

import shutil

import numpy as np
import pytest
from conftest import DATA
from shared import rest_slow
from tim_trace.analysis.check.check import check
from tim_trace.analysis.diagnosis.diagnose import diagnose
from tim_trace.analysis.diagnosis.text import diagnosis_text
from tim_trace.analysis.views import connect
from tim_trace.tracer.recorder import Recorder


@pytest.fixture
def trace(tmp_path):
    """A copy, since sums are kept beside what they are of."""
    return str(shutil.copytree(DATA / "smollm2", tmp_path / "smollm2"))


@pytest.mark.parametrize("steps", rest_slow(["all", "1:6", "13:24:2", *map(str, range(1, 25))], 3))
def test_a_healthy_run_of_a_pretrained_model_is_valid_in_all_its_parts(trace, steps):
    found = check(trace, steps=steps)
    assert found.is_valid, found.findings[0]
    assert [finding.code for finding in found.findings] == ["rounding"]


def read(trace, name):
    """Each step's rows of sequences and scores that the trace holds of a pass."""
    return connect(trace).execute(
        "SELECT step, response_ids, logprobs FROM sequences JOIN scores USING (step, seq_id) WHERE pass = ? ORDER BY ALL",
        [name],
    ).fetchall()  # fmt: skip


def test_it_is_valid_where_no_contract_names_a_dtype(trace, tmp_path):
    rollout, train = read(trace, "rollout"), read(trace, "train")
    with Recorder(tmp_path / "bare") as recorder:
        for step in range(1, 25):
            places = [place for place, row in enumerate(rollout) if row[0] == step]
            batch = recorder.add_sequences(step=step, response_ids=[rollout[place][1] for place in places])
            recorder.add_scores("rollout", batch, logprobs=[rollout[place][2] for place in places])
            recorder.add_scores("train", batch, logprobs=[train[place][2] for place in places])
    found = check(str(tmp_path / "bare"))
    assert (found.is_valid, [finding.code for finding in found.findings]) == (True, ["rounding"])


def test_a_level_above_the_published_ones_is_not_told_to_be_a_fault(trace):
    said = " ".join(diagnosis_text(diagnose(trace)).split())
    assert said.startswith("No collapse detected; the comparison is valid. ")
    assert "the check explains it (rounding at the expected level)" in said


def test_a_temperature_of_one_side_is_still_found(trace, tmp_path):
    """Of the same logprobs, scaled as a temperature of 1.3 scales those of two tokens."""
    rollout, train = read(trace, "rollout"), read(trace, "train")
    with Recorder(tmp_path / "hot") as recorder:
        for name in ("rollout", "train"):
            recorder.add_contract(name, {"dtype": "bfloat16"})
        for step in range(1, 25):
            places = [place for place, row in enumerate(rollout) if row[0] == step]
            batch = recorder.add_sequences(step=step, response_ids=[rollout[place][1] for place in places])
            recorder.add_scores("rollout", batch, logprobs=[rollout[place][2] for place in places])
            recorder.add_scores("train", batch, logprobs=[cooled(train[place][2], 1.3) for place in places])
    found = check(str(tmp_path / "hot"))
    assert not found.is_valid
    assert found.findings[0].code == "temperature"


def cooled(logprobs, temperature):
    """[T] logprobs with log-odds divided by a temperature."""
    values = np.asarray(logprobs, float)
    odds = values - np.log(-np.expm1(np.minimum(values, -1e-9)))
    return -np.log1p(np.exp(-odds / temperature))
