"""Numbers that a Recorder takes and nobody expects: every verb answers, and integers are told to their last digit."""

import json

import numpy as np
import pytest
from builders import in_process, make_batch
from tim_trace import check, stats
from tim_trace.tracer.recorder import Recorder
from verbs import HEAVY, WORDS, answer

NUM = 12
STEPS = {
    "timestamps": [1_700_000_000 + 1000 * place for place in range(NUM)],
    "beyond 2^53": [2**62 + place for place in range(NUM)],
    "up to the last": [1, 2, 3, 2**53 + 1, 2**53 + 2, 2**63 - 2, 2**63 - 1],
    "versions": range(1, NUM + 1),
    "infinite": range(1, NUM + 1),
    "huge": range(1, NUM + 1),
}
REWARDS = {"infinite": [np.inf, 1.0, -np.inf, 1.0, 0.5, np.inf, 1.0, 0.0], "huge": [1e308, -1e308] * 4}
VERSION = 2**62 + 1


def record(path, name):
    with Recorder(path) as recorder:
        recorder.add_contract("rollout", {"engine": "vllm", "dtype": "bfloat16"})
        recorder.add_contract("train", {"engine": "trl", "dtype": "float32"})
        recorder.add_hyperparameters({"beta": 0.1})
        for place, step in enumerate(STEPS[name]):
            batch = make_batch(8, seed=place)
            batch["reward"] = REWARDS.get(name, batch["reward"])
            added = recorder.add_sequences(
                step=step, prompt_ids=batch["prompt_ids"], response_ids=batch["response_ids"], reward=batch["reward"],
                advantage=batch["advantage"], policy_version=(VERSION if name == "versions" else 0) + place,
                group_ids=[f"{step}-{row // 2}" for row in range(8)],
            )  # fmt: skip
            for scored in ("rollout", "train"):
                recorder.add_scores(scored, added, logprobs=batch[scored])
            recorder.add_metrics(step, {"loss": 0.5 * place, "grad_norm": 1.0 + place % 3})


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    made = {}

    def trace(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("odd") / "run"
            record(made[name], name)
        return made[name]

    return trace


QUICK = {
    ("timestamps", "dynamics"), ("beyond 2^53", "dynamics"), ("beyond 2^53", "report"), ("up to the last", "export"),
    ("up to the last", "watch"), ("up to the last", "compare"), ("versions", "attribute"), ("infinite", "compare"),
    ("huge", "diagnose"),
}  # fmt: skip
"""A trace and a verb for each kind of failure; the others are slow."""


@pytest.mark.parametrize(
    ("name", "verb"),
    [
        pytest.param(name, verb, marks=() if (name, verb) in QUICK else pytest.mark.slow)
        for name in STEPS
        for verb in WORDS
        if verb not in HEAVY | {"example", "record", "import"}
    ],
)
def test_every_verb_answers(traces, tmp_path, name, verb):
    answer(verb, run=traces(name), new=tmp_path / "new", refuses=verb == "weights")  # these traces have none


def test_steps_beyond_2_53_are_told_to_the_last_digit(traces):
    for name in ("beyond 2^53", "up to the last"):
        assert [row["step"] for row in stats(traces(name), by="step").dicts()] == list(STEPS[name])
    found = json.loads(in_process(["dynamics", str(traces("up to the last")), "--json"]).stdout)
    assert (found["first_step"], found["last_step"]) == (1, 2**63 - 1)


def test_one_update_between_versions_beyond_2_53_is_seen(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        batch = make_batch(200)
        added = recorder.add_sequences(step=1, response_ids=batch["response_ids"], policy_version=VERSION)
        for name, version in (("rollout", VERSION), ("train", VERSION + 1)):
            recorder.add_scores(name, added, logprobs=batch[name], policy_version=version)
    finding = next(each for each in check(tmp_path / "run").findings if each.signal == "policy_versions")
    assert finding.numbers["updates_behind"] == 1
